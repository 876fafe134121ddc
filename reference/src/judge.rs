//! What a launch has to leave behind, and how far from it its results may be.
//!
//! The bounds are those of [`compare`](crate::compare), one of each token and value head, of each slot and value head. Besides
//! the exact state of a head there are states of the same tokens with one kind of error each, made larger: how far they come
//! from the exact one says how far such an error carries.

mod deferred;

pub use deferred::{AllowedOfRings, judge_deferred};

use deferred::add_changes;

use crate::compare::{
    KEY, MORE_DECAY, TAP, TERM, Tolerance, change, of_decays, of_keys, of_norm, of_terms,
};
use crate::conv::Conv;
use crate::error::{Error, Tokens};
use crate::heads::Heads;
use crate::layer::{Convolved, Layer, Pools, Projection};
use crate::norm::{GatedNorm, gated_norm};
use crate::recurrence::{Token, decays, take};
use crate::recurrent::{Around, Output, Recurrent, Row, begin};
use crate::sum::sum_of;

/// How far results may be from the truth before they are rounded to their dtype: norms of differences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Allowed {
    /// `[B, T, HV]`, or `[total, HV]`: of o of each token.
    pub o: Vec<f64>,
    /// `[P, HV]`: of the states of the pool that is written; 0 where none is.
    pub states: Vec<f64>,
    /// `[B, steps, HV]`: of the snapshots, where there are any.
    pub snapshots: Vec<f64>,
}

/// The truth about a launch, not rounded, and how near to it results have to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// As [`LayerOutput::o`](crate::layer::LayerOutput::o).
    pub o: Vec<f64>,
    /// All states that may be written, afterwards.
    pub states: Vec<f64>,
    /// All snapshots afterwards, where there are any.
    pub snapshots: Option<Vec<f64>>,
    /// All windows that may be written, afterwards.
    pub windows: Option<Vec<f64>>,
    /// All snapshots of windows afterwards, where there are any.
    pub window_snapshots: Option<Vec<f64>>,
    /// How far results may be from these.
    pub allowed: Allowed,
}

/// What a launch of `problem` has to leave behind whose arithmetic is that of `tolerance`, and whose convolutions are off by `taps`
/// of each of their terms.
///
/// New tokens that come after committed ones start from the states of `stored`, the written pool after the launch: these are
/// right where they are near the truth, and a rounding of them may be either of two neighbours. Without it they start from
/// the true states, which are not rounded.
///
/// # Errors
/// Those of [`layer`](crate::layer::layer).
pub fn judge(
    problem: &Layer,
    pools: &Pools,
    stored: Option<&[f64]>,
    tolerance: &Tolerance,
    taps: f64,
) -> Result<Judgement, Error> {
    let mut all = walk(problem, pools, stored, Some(tolerance))?;
    if let (Some(projection), true) = (&problem.projection, taps > 0.0) {
        let [weight, bias] = off(&projection.conv);
        let conv = Conv {
            weight: &weight,
            bias: projection.conv.bias.map(|_| &*bias),
            ..projection.conv
        };
        let projection = Projection {
            conv,
            ..*projection
        };
        let problem = Layer {
            projection: Some(projection),
            ..*problem
        };
        let other = walk(&problem, pools, stored, None)?.after;
        let allowed = &mut all.allowed;
        let snapshots = [&all.after.snapshots, &other.snapshots];
        let [snapshots, others] = snapshots.map(|of| of.as_deref().unwrap_or_default());
        for (allowed, exact, other) in [
            (&mut allowed.o, &*all.after.o, &*other.o),
            (&mut allowed.states, &all.after.pool, &other.pool),
            (&mut allowed.snapshots, snapshots, others),
        ] {
            add_changes(allowed, exact, other, taps / TAP);
        }
    }
    if let Some(norm) = &problem.norm {
        let (o, allowed) = (&mut all.after.o, &mut all.allowed.o);
        let active = all.active.iter().copied();
        normed(norm, active, problem.step.value_heads, o, allowed)?;
    }
    Ok(Judgement {
        o: all.after.o,
        states: all.after.pool,
        snapshots: all.after.snapshots,
        windows: all.windows,
        window_snapshots: all.window_snapshots,
        allowed: all.allowed,
    })
}

/// Norms the outputs of these tokens, and says how far they may be off then.
fn normed(
    norm: &GatedNorm,
    tokens: impl Iterator<Item = usize>,
    value_heads: usize,
    o: &mut [f64],
    allowed: &mut [f64],
) -> Result<(), Error> {
    let width = norm.weight.len();
    for i in tokens.flat_map(|token| token * value_heads..(token + 1) * value_heads) {
        let own = i * width..(i + 1) * width;
        let of_head = GatedNorm {
            z: &norm.z[own.clone()],
            ..*norm
        };
        let o = &mut o[own];
        allowed[i] = of_norm(&of_head, o, allowed[i])?;
        o.copy_from_slice(&gated_norm(&of_head, o)?);
    }
    Ok(())
}

/// What a launch leaves, o as it is before the norm.
struct Walked {
    after: Output,
    allowed: Allowed,
    windows: Option<Vec<f64>>,
    window_snapshots: Option<Vec<f64>>,
    /// Tokens of rows that are active.
    active: Vec<usize>,
}

/// Without a tolerance there are no bounds.
fn walk(
    problem: &Layer,
    pools: &Pools,
    stored: Option<&[f64]>,
    tolerance: Option<&Tolerance>,
) -> Result<Walked, Error> {
    let alone = Layer {
        norm: None,
        ..*problem
    };
    let (o, (mut after, allowed, active), convolved) = alone.surround(
        pools,
        |_| true,
        |step, tokens, around| {
            let step = &Recurrent {
                round_state: |s| s,
                ..*step
            };
            let (mut heads, rows) = Walk::of(step, tokens, pools, around, tolerance)?;
            let mut active = Vec::new();
            for row in rows {
                for hv in 0..step.value_heads {
                    heads.row(&row, hv, pools.states, stored)?;
                }
                active.extend(row.tokens);
            }
            let o = std::mem::take(&mut heads.after.o);
            Ok((o, (heads.after, heads.allowed, active)))
        },
    )?;
    after.o = o;
    let (windows, window_snapshots) = match convolved {
        Some(convolved) => {
            let Convolved {
                windows,
                window_snapshots,
                ..
            } = convolved;
            (Some(windows), window_snapshots)
        }
        None => (None, None),
    };
    Ok(Walked {
        after,
        allowed,
        windows,
        window_snapshots,
        active,
    })
}

/// Rows on their way from token to token.
struct Walk<'a> {
    step: &'a Recurrent<'a>,
    heads: Heads,
    tolerance: Option<&'a Tolerance>,
    after: Output,
    allowed: Allowed,
}

impl<'a> Walk<'a> {
    /// Before the rows, which are returned.
    fn of(
        step: &'a Recurrent<'a>,
        tokens: Tokens,
        pools: &Pools,
        around: Around,
        tolerance: Option<&'a Tolerance>,
    ) -> Result<(Self, Vec<Row>), Error> {
        let (after, rows) = begin(step, tokens, pools.states(), pools.snapshots, around)?;
        let len = step.key_dim * step.value_dim;
        let nothing = |elements: usize, of_each: usize| vec![0.0; elements / of_each];
        let snapshots = after.snapshots.as_ref().map_or(0, Vec::len);
        let allowed = Allowed {
            o: nothing(after.o.len(), step.value_dim),
            states: nothing(after.pool.len(), len),
            snapshots: nothing(snapshots, len),
        };
        let walk = Self {
            step,
            heads: step.sizes(),
            tolerance,
            after,
            allowed,
        };
        Ok((walk, rows))
    }

    fn row(
        &mut self,
        row: &Row,
        hv: usize,
        states: &[f64],
        stored: Option<&[f64]>,
    ) -> Result<(), Error> {
        let (step, heads) = (self.step, self.heads);
        let (value_heads, width) = (step.value_heads, step.value_dim);
        let from = |state| Head::of(state, self.tolerance, hv);
        let mut head = from(match row.start {
            Some(slot) => heads.load(states, slot, hv),
            None => vec![0.0; step.key_dim * width],
        });
        if let (Some(previous), Some((keep, slot))) = (&step.previous, row.commit) {
            for token in (row.b * previous.tokens..).take(keep) {
                head.advance(&step.previous_token(previous, token, hv))?;
            }
            heads.store(&mut self.after.pool, slot, hv, &head.exact);
            self.allowed.states[slot * value_heads + hv] = head.off().of_state();
            if let Some(stored) = stored {
                head = from(heads.load(stored, slot, hv));
            }
        }
        if let Some(end) = row.end {
            heads.store(&mut self.after.pool, end, hv, &head.exact);
        }
        for (t, token) in row.tokens.clone().enumerate() {
            let of_token = step.token(token, hv);
            let o = head.advance(&of_token)?;
            let i = token * value_heads + hv;
            self.after.o[i * width..][..width].copy_from_slice(&o);
            let off = head.off();
            self.allowed.o[i] = off.of_output(&of_token.q);
            let besides = row.checkpoints.iter().filter(|(at, _)| *at == t);
            for &slot in besides.map(|(_, slot)| slot).chain(&row.stores[t]) {
                heads.store(&mut self.after.pool, slot, hv, &head.exact);
                self.allowed.states[slot * value_heads + hv] = off.of_state();
            }
            if let (Some(steps), Some(snapshots)) = (step.snapshot_steps, &mut self.after.snapshots)
            {
                let entry = row.b * steps + t;
                heads.store(snapshots, entry, hv, &head.exact);
                self.allowed.snapshots[entry * value_heads + hv] = off.of_state();
            }
        }
        Ok(())
    }
}

/// A value head's state `[V, K]`, exact and with errors.
struct Head<'a> {
    tolerance: Option<&'a Tolerance>,
    exact: Vec<f64>,
    /// Every log decay is larger by [`MORE_DECAY`] of it.
    decaying_more: Option<Vec<f64>>,
    /// Every element of k is off by [`KEY`] of it.
    keys_off: Option<Vec<f64>>,
    /// Every element is off by [`TERM`] of what it is added up from.
    terms_off: Option<Vec<f64>>,
    /// The largest norm of v and of S k̂ together.
    largest: f64,
    signs: Signs,
}

impl<'a> Head<'a> {
    fn of(exact: Vec<f64>, tolerance: Option<&'a Tolerance>, hv: usize) -> Self {
        let copy = |is_wanted: bool| is_wanted.then(|| exact.clone());
        Self {
            tolerance,
            decaying_more: copy(tolerance.is_some()),
            keys_off: copy(tolerance.is_some_and(|tolerance| tolerance.keys > 0.0)),
            terms_off: copy(tolerance.is_some_and(|tolerance| tolerance.terms > 0.0)),
            exact,
            largest: 0.0,
            signs: Signs::new(hv as u64),
        }
    }

    /// o of a token, whose part comes into every state.
    fn advance(&mut self, token: &Token) -> Result<Vec<f64>, Error> {
        if let Some(state) = &mut self.decaying_more {
            let mut token = token.clone();
            token
                .log_decay
                .iter_mut()
                .for_each(|g| *g *= 1.0 + MORE_DECAY);
            take(state, &token)?;
        }
        if let Some(state) = &mut self.keys_off {
            let mut token = token.clone();
            for k in &mut token.k {
                *k *= 1.0 + self.signs.next() * KEY;
            }
            take(state, &token)?;
        }
        if let Some(state) = &mut self.terms_off {
            let terms = Terms::of(state, token);
            take(state, token)?;
            for (s, term) in state.iter_mut().zip(terms.of_state) {
                *s += self.signs.next() * TERM * term;
            }
        }
        if self
            .tolerance
            .is_some_and(|tolerance| tolerance.least > 0.0)
        {
            let terms = Terms::of(&self.exact, token);
            self.largest = finite(terms.of_update).max(self.largest);
        }
        take(&mut self.exact, token)
    }

    /// How far the state is off, and what is read from it.
    fn off(&self) -> Off<'a> {
        let of = |other: &Option<Vec<f64>>, of: fn(&[f64], &[f64]) -> f64| {
            other.as_ref().map_or(0.0, |other| of(&self.exact, other))
        };
        Off {
            tolerance: self.tolerance,
            size: self.tolerance.map_or(0.0, |_| finite_norm(&self.exact)),
            keys: of(&self.keys_off, of_keys),
            terms: of(&self.terms_off, of_terms),
            decays: of(&self.decaying_more, of_decays),
            largest: self.largest,
        }
    }
}

/// What errors of a state come from.
struct Off<'a> {
    /// Without it nothing is off.
    tolerance: Option<&'a Tolerance>,
    /// The norm of the state.
    size: f64,
    /// [`of_keys`], [`of_terms`], [`of_decays`]
    keys: f64,
    terms: f64,
    decays: f64,
    /// [`Head::largest`]
    largest: f64,
}

impl Off<'_> {
    /// How far the state may be off.
    fn of_state(&self) -> f64 {
        self.tolerance.map_or(0.0, |tolerance| {
            self.by(tolerance, tolerance.state) + tolerance.least * self.largest
        })
    }

    /// How far o may be off that is read from the state by `q`.
    fn of_output(&self, q: &[f64]) -> f64 {
        self.tolerance.map_or(0.0, |tolerance| {
            let q = finite_norm(q);
            // What factors with q̂ in them lose does not shrink with it.
            self.by(tolerance, tolerance.output) * q + tolerance.least * self.largest * q.max(1.0)
        })
    }

    /// How far the state is off where rounding makes an error of `part` of it.
    fn by(&self, tolerance: &Tolerance, part: f64) -> f64 {
        let keys = tolerance.keys * self.keys;
        let terms = part * tolerance.terms * self.terms;
        (part * self.size).max(keys).max(terms) + self.decays
    }
}

/// What a token's arithmetic adds up: the norms of the terms, and not of their sums.
struct Terms {
    /// Of each element of the state.
    of_state: Vec<f64>,
    /// Of v and S k̂ together.
    of_update: f64,
}

impl Terms {
    fn of(state: &[f64], token: &Token) -> Self {
        let decays = decays(&token.log_decay);
        let (mut of_state, mut of_update) = (Vec::with_capacity(state.len()), 0.0);
        for (row, v) in state.chunks(token.k.len()).zip(&token.v) {
            let decayed = || row.iter().zip(&decays).map(|(s, decay)| (s * decay).abs());
            let read: f64 = decayed().zip(&token.k).map(|(s, k)| s * k.abs()).sum();
            let update = v.abs() + read;
            of_update += update * update;
            let added = token.k.iter().map(|k| (token.beta * update * k).abs());
            of_state.extend(decayed().zip(added).map(|(s, added)| s + added));
        }
        Self {
            of_state,
            of_update: of_update.sqrt(),
        }
    }
}

/// Taps and biases that are off by [`TAP`] of each.
fn off(conv: &Conv) -> [Vec<f64>; 2] {
    let mut signs = Signs::new(1);
    [conv.weight, conv.bias.unwrap_or_default()].map(|taps| {
        let off = taps.iter().map(|tap| tap * (1.0 + signs.next() * TAP));
        off.collect()
    })
}

/// Signs in no order, the same ones each time.
struct Signs(u64);

impl Signs {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// 1 or −1 (xorshift).
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        if self.0 & (1 << 40) == 0 { 1.0 } else { -1.0 }
    }
}

/// The norm of what is finite: nobody reads the rest.
fn finite_norm(values: &[f64]) -> f64 {
    let square = |x: f64, _| if x.is_finite() { x * x } else { 0.0 };
    sum_of(values, values, square).sqrt()
}

/// x, or 0 where it is NaN or infinite.
fn finite(x: f64) -> f64 {
    if x.is_finite() { x } else { 0.0 }
}
