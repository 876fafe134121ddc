//! Exact results of a launch, and the bounds on the errors of a kernel's results.
//!
//! The bounds are those of [`compare`](crate::tolerance): one for each token and value head, and one for each slot and value head. Next
//! to the exact state of a head, this module carries states of the same tokens with one kind of error each, enlarged. Their
//! distance from the exact state shows how far such an error carries.

mod chunk;
mod deferred;

pub use deferred::{AllowedOfRings, judge_deferred};

use chunk::Chunk;
use deferred::add_changes;

use std::collections::VecDeque;

use crate::conv::Conv;
use crate::error::{Error, Tokens};
use crate::heads::Heads;
use crate::layer::{Convolved, Layer, Pools, Projection};
use crate::norm::{GatedNorm, gated_norm};
use crate::recurrence::{Token, decays, take};
use crate::recurrent::{Around, Output, Recurrent, Row, begin};
use crate::sum::sum_of;
use crate::tolerance::{
    CHUNK, FACTOR, LARGE_STATE, MORE_DECAY, NORM_AROUND_1, TAP, TERM, Tolerance, change, of_decays,
    of_factors, of_norm, of_terms,
};

/// Largest errors of results before they are rounded to their dtype, as norms of differences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Allowed {
    /// `[B, T, HV]`, or packed `[total, HV]`: bound on o of each token.
    pub o: Vec<f64>,
    /// `[P, HV]`: bound on the states of the written pool; 0 for states that are not written.
    pub states: Vec<f64>,
    /// `[B, steps, HV]`: bound on the snapshots, if there are any.
    pub snapshots: Vec<f64>,
}

/// Exact results of a launch, not rounded, and the bounds on the errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// Outputs, as in [`LayerOutput::o`](crate::layer::LayerOutput::o).
    pub o: Vec<f64>,
    /// The pool that may be written, after the launch.
    pub states: Vec<f64>,
    /// All snapshots after the launch, if there are any.
    pub snapshots: Option<Vec<f64>>,
    /// The windows that may be written, after the launch.
    pub windows: Option<Vec<f64>>,
    /// All window snapshots after the launch, if there are any.
    pub window_snapshots: Option<Vec<f64>>,
    /// Largest errors of these results.
    pub allowed: Allowed,
}

/// Exact results of `problem`, and bounds for a kernel whose arithmetic is that of `tolerance` and whose convolutions are off by `taps`
/// of each of their terms.
///
/// `stored` is the kernel's written pool after the launch. New tokens that follow committed ones start from its states: these are right
/// if they are near the exact ones, and may be rounded to either of two neighbours. Without `stored` the new tokens start from the exact
/// states, which are not rounded.
///
/// # Errors
/// The errors of [`layer`](crate::layer::layer).
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

/// Applies the norm to the outputs of `tokens`, and updates the bounds on their errors.
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

/// Results of a launch before the norm.
struct Walked {
    after: Output,
    allowed: Allowed,
    windows: Option<Vec<f64>>,
    window_snapshots: Option<Vec<f64>>,
    /// Tokens of active rows.
    active: Vec<usize>,
}

/// Runs a launch without its norm. Without a tolerance there are no bounds.
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

/// State of a launch whose rows are run token by token.
struct Walk<'a> {
    step: &'a Recurrent<'a>,
    heads: Heads,
    tolerance: Option<&'a Tolerance>,
    after: Output,
    allowed: Allowed,
}

impl<'a> Walk<'a> {
    /// Starts a launch. Also returns its rows.
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
            self.allowed.states[slot * value_heads + hv] = head.of_state();
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
            self.allowed.o[i] = head.of_output(&of_token.q, &o);
            let besides = row.checkpoints.iter().filter(|(at, _)| *at == t);
            for &slot in besides.map(|(_, slot)| slot).chain(&row.stores[t]) {
                heads.store(&mut self.after.pool, slot, hv, &head.exact);
                self.allowed.states[slot * value_heads + hv] = head.of_state();
            }
            if let (Some(steps), Some(snapshots)) = (step.snapshot_steps, &mut self.after.snapshots)
            {
                let entry = row.b * steps + t;
                heads.store(snapshots, entry, hv, &head.exact);
                self.allowed.snapshots[entry * value_heads + hv] = head.of_state();
            }
        }
        Ok(())
    }
}

/// A value head's state `[V, K]`: exact, and with one kind of error each.
struct Head<'a> {
    tolerance: Option<&'a Tolerance>,
    exact: Vec<f64>,
    /// State with every log decay larger by [`MORE_DECAY`] of it.
    decaying_more: Option<Vec<f64>>,
    /// State with every element of k off by [`FACTOR`] of it, and every element of T and R of the chunks before.
    factors_off: Option<Vec<f64>>,
    /// State with every element off by [`TERM`] of the sum of its terms' magnitudes.
    terms_off: Option<Vec<f64>>,
    /// With `factors_off`: k̂ of each of the last [`CHUNK`] tokens, decayed since, and the norms of δ and of its change by T and R.
    last: VecDeque<(Vec<f64>, [f64; 2])>,
    /// With `factors_off`: the tokens of the chunk so far.
    chunk: Chunk,
    /// Norm of |v| + |S k̂| of each of the last [`CHUNK`] tokens.
    recent: VecDeque<f64>,
    /// The largest of these norms of tokens before them, decayed since.
    older: f64,
    /// Tokens since the last one before which the state had an element of [`LARGE_STATE`].
    since_large: usize,
    signs: Signs,
}

impl<'a> Head<'a> {
    fn of(exact: Vec<f64>, tolerance: Option<&'a Tolerance>, hv: usize) -> Self {
        let copy = |is_wanted: bool| is_wanted.then(|| exact.clone());
        Self {
            tolerance,
            decaying_more: copy(tolerance.is_some()),
            factors_off: copy(tolerance.is_some_and(|tolerance| tolerance.factors > 0.0)),
            terms_off: copy(tolerance.is_some_and(|tolerance| tolerance.terms > 0.0)),
            exact,
            last: VecDeque::new(),
            chunk: Chunk::default(),
            recent: VecDeque::new(),
            older: 0.0,
            since_large: CHUNK,
            signs: Signs::new(hv as u64),
        }
    }

    /// Advances all states by a token and returns its o.
    fn advance(&mut self, token: &Token) -> Result<Vec<f64>, Error> {
        if let Some(state) = &mut self.decaying_more {
            let mut token = token.clone();
            token
                .log_decay
                .iter_mut()
                .for_each(|g| *g *= 1.0 + MORE_DECAY);
            take(state, &token)?;
        }
        let mut change = 0.0;
        if let Some(state) = &mut self.factors_off {
            let mut other = token.clone();
            for k in &mut other.k {
                *k *= 1.0 + self.signs.next() * FACTOR;
            }
            let off = self.signs.next() * FACTOR;
            change = self.chunk.advance(&self.exact, state, token, off);
            take(state, &other)?;
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
            let kept = decays(&token.log_decay).into_iter().fold(0.0, f64::max);
            self.older *= kept;
            if self.recent.len() == CHUNK {
                let oldest = self.recent.pop_back().unwrap_or_default();
                self.older = self.older.max(oldest);
            }
            self.recent.push_front(finite(terms.of_update));
            let is_large = self.exact.iter().any(|s| s.abs() >= LARGE_STATE);
            self.since_large = if is_large { 0 } else { self.since_large + 1 };
        }
        let (o, delta) = take(&mut self.exact, token)?;
        if self.factors_off.is_some() {
            let decays = decays(&token.log_decay);
            for (k, ..) in &mut self.last {
                k.iter_mut().zip(&decays).for_each(|(k, decay)| *k *= decay);
            }
            self.last.truncate(CHUNK - 1);
            let of_delta = [finite_norm(&delta), change];
            self.last.push_front((token.k.clone(), of_delta));
        }
        Ok(o)
    }

    /// Largest error of the state.
    fn of_state(&self) -> f64 {
        self.tolerance.map_or(0.0, |tolerance| {
            self.by(tolerance, tolerance.state) + self.least(tolerance)
        })
    }

    /// Largest error of the output `o` that is read from the state by `q`.
    fn of_output(&self, q: &[f64], o: &[f64]) -> f64 {
        self.tolerance.map_or(0.0, |tolerance| {
            let length = finite_norm(q);
            let off = match self.factors_off() {
                Some(factors_off) => {
                    self.by_terms(tolerance, &factors_off, q, o) + self.of_decays() * length
                }
                None => self.by(tolerance, tolerance.output) * length,
            };
            // The loss of factors that contain q̂ does not shrink with q̂.
            off + self.least(tolerance) * length.max(1.0)
        })
    }

    /// The error of [`Tolerance::least`].
    fn least(&self, tolerance: &Tolerance) -> f64 {
        let at_least = match self.since_large < CHUNK {
            true => NORM_AROUND_1,
            false => 0.0,
        };
        let largest = self.recent.iter().copied().fold(self.older, f64::max);
        tolerance.least * largest.max(at_least)
    }

    /// `factors_off` with the changes of the chunk so far.
    fn factors_off(&self) -> Option<Vec<f64>> {
        let before = self.factors_off.as_ref()?;
        Some(self.chunk.changed(before))
    }

    /// Error of the state if rounding causes an error of `part` of it.
    fn by(&self, tolerance: &Tolerance, part: f64) -> f64 {
        let of = |other: &Option<Vec<f64>>, of: fn(&[f64], &[f64]) -> f64| {
            other.as_ref().map_or(0.0, |other| of(&self.exact, other))
        };
        let factors = tolerance.factors * of(&self.factors_off(), of_factors);
        let terms = part * tolerance.terms * of(&self.terms_off, of_terms);
        (part * finite_norm(&self.exact)).max(factors).max(terms) + self.of_decays()
    }

    /// Error of `o` from the roundings of the factors of its terms: see [`Tolerance::CHUNKED`].
    fn by_terms(&self, tolerance: &Tolerance, factors_off: &[f64], q: &[f64], o: &[f64]) -> f64 {
        let Tolerance {
            output, factors, ..
        } = *tolerance;
        let (mut of_channels, mut of_reads) = (vec![0.0; q.len()], 0.0);
        for (row, off) in self.exact.chunks(q.len()).zip(factors_off.chunks(q.len())) {
            let read = sum_of(row, q, |s, q| s * q) - sum_of(off, q, |s, q| s * q);
            of_reads += finite((factors * read).powi(2));
            for ((sum, s), off) in of_channels.iter_mut().zip(row).zip(off) {
                *sum += finite(2.0 * (output * s).powi(2) + (factors * (s - off)).powi(2));
            }
        }
        let of_state = sum_of(q, &of_channels, |q, sum| finite(q * q * sum));
        let of_last = self.last.iter().map(|(k, [delta, change])| {
            let p = sum_of(q, k, |q, k| q * k);
            finite(2.0 * (output * p * delta).powi(2) + (factors * p * change).powi(2))
        });
        let of_o = (output * finite_norm(o)).powi(2);
        (of_state + of_reads + of_last.sum::<f64>() + of_o).sqrt()
    }

    /// Result of [`of_decays`].
    fn of_decays(&self) -> f64 {
        let decaying_more = self.decaying_more.as_ref();
        decaying_more.map_or(0.0, |other| of_decays(&self.exact, other))
    }
}

/// Magnitudes of the terms that a token's arithmetic adds up: the norms of the terms, not of their sums.
struct Terms {
    /// Magnitude for each element of the state.
    of_state: Vec<f64>,
    /// Norm of |v| + |S k̂|.
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

/// Taps and biases, each off by [`TAP`] of it.
fn off(conv: &Conv) -> [Vec<f64>; 2] {
    let mut signs = Signs::new(1);
    [conv.weight, conv.bias.unwrap_or_default()].map(|taps| {
        let off = taps.iter().map(|tap| tap * (1.0 + signs.next() * TAP));
        off.collect()
    })
}

/// Pseudo-random signs, the same sequence for the same seed.
struct Signs(u64);

impl Signs {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// The next sign, 1 or −1 (xorshift).
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        if self.0 & (1 << 40) == 0 { 1.0 } else { -1.0 }
    }
}

/// Norm of the finite elements; the others are never read.
fn finite_norm(values: &[f64]) -> f64 {
    let square = |x: f64, _| if x.is_finite() { x * x } else { 0.0 };
    sum_of(values, values, square).sqrt()
}

/// x, or 0 where it is NaN or infinite.
fn finite(x: f64) -> f64 {
    if x.is_finite() { x } else { 0.0 }
}
