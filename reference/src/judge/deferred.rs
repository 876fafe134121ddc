//! Exact results and bounds for deferred write-back.
//!
//! Every launch adds up a state anew, from the stored state and the pending tokens. Errors are relative to the norms of these
//! terms, each of them decayed.

use super::{change, finite_norm, normed, off};
use crate::conv::Conv;
use crate::deferred::{After, Deferred, Live, Rings};
use crate::error::Error;
use crate::layer::{Layer, Pools, Projection};
use crate::recurrent::Recurrent;
use crate::tolerance::{LOG_DECAY, TAP, Tolerance};

/// Largest errors of results before they are rounded to their dtype, as norms of differences; 0 for elements that are not written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AllowedOfRings {
    /// `[B, T, HV]`: bound on o.
    pub o: Vec<f64>,
    /// `[P, HV]`: bound on the states.
    pub states: Vec<f64>,
    /// `[P, H, R]`: bound on k.
    pub keys: Vec<f64>,
    /// `[P, HV, R]`: bound on u.
    pub updates: Vec<f64>,
    /// `[P, HV, R]`: bound on the log decays.
    pub decays: Vec<f64>,
}

/// As [`judge`](super::judge()), for deferred write-back: the exact results, not rounded, and the bounds on the errors. New tokens of rows
/// that flush start from the states of `stored`.
///
/// # Errors
/// The errors of [`deferred`](crate::deferred::deferred()).
pub fn judge_deferred(
    problem: &Deferred,
    pools: &Pools,
    rings: &Rings,
    stored: Option<&[f64]>,
    tolerance: &Tolerance,
    taps: f64,
) -> Result<(After, AllowedOfRings), Error> {
    let problem = Deferred {
        layer: Layer {
            step: Recurrent {
                round_state: |s| s,
                ..problem.layer.step
            },
            ..problem.layer
        },
        ..*problem
    };
    let (mut after, queries) = from_stored(&problem, pools, rings, stored)?;
    let terms = Judged {
        problem: &problem,
        pools,
        rings,
        after: &after,
        queries: &queries,
        tolerance,
    };
    let mut allowed = terms.allowed()?;
    if let (Some(projection), true) = (&problem.layer.projection, taps > 0.0) {
        let [weight, bias] = off(&projection.conv);
        let conv = Conv {
            weight: &weight,
            bias: projection.conv.bias.map(|_| &*bias),
            ..projection.conv
        };
        let problem = Deferred {
            layer: Layer {
                projection: Some(Projection {
                    conv,
                    ..*projection
                }),
                ..problem.layer
            },
            ..problem
        };
        let (other, _) = from_stored(&problem, pools, rings, stored)?;
        for (allowed, exact, other) in [
            (&mut allowed.o, &after.o, &other.o),
            (&mut allowed.keys, &after.rings.keys, &other.rings.keys),
            (
                &mut allowed.updates,
                &after.rings.updates,
                &other.rings.updates,
            ),
        ] {
            add_changes(allowed, exact, other, taps / TAP);
        }
    }
    if let Some(norm) = &problem.layer.norm {
        let step = &problem.layer.step;
        let tokens = problem.active(pools)?;
        let tokens = tokens
            .iter()
            .flat_map(|live| live.b * step.tokens..(live.b + 1) * step.tokens);
        normed(norm, tokens, step.value_heads, &mut after.o, &mut allowed.o)?;
    }
    Ok((after, allowed))
}

/// Adds to each bound `times` the distance of the corresponding parts of two results.
pub(super) fn add_changes(allowed: &mut [f64], exact: &[f64], other: &[f64], times: f64) {
    let len = exact.len() / allowed.len().max(1);
    for (i, allowed) in allowed.iter_mut().enumerate() {
        let own = i * len..(i + 1) * len;
        *allowed += change(&exact[own.clone()], &other[own]) * times;
    }
}

/// Results of a launch before the norm, and the norms of q̂, `[B, T, HV]`. Rows that flush continue from the states of `stored`.
fn from_stored(
    problem: &Deferred,
    pools: &Pools,
    rings: &Rings,
    stored: Option<&[f64]>,
) -> Result<(After, Vec<f64>), Error> {
    let alone = Deferred {
        layer: Layer {
            norm: None,
            ..problem.layer
        },
        ..*problem
    };
    let flushed = alone.run(pools, rings)?;
    let (true, Some(stored)) = (problem.layer.step.tokens > 0, stored) else {
        return Ok(flushed);
    };
    let (mut states, mut windows) = (pools.states.to_vec(), pools.windows.map(<[f64]>::to_vec));
    let (mut len, mut base) = (problem.len.to_vec(), problem.base.to_vec());
    let slots = problem.slots(pools)?;
    for live in problem.active(pools)? {
        if live.is_fresh || !live.flushes {
            continue;
        }
        (len[live.b], base[live.b]) = (0, ((live.base + live.len) % problem.entries) as i64);
        let own = |all: &[f64]| {
            let of_slot = all.len() / slots;
            live.slot * of_slot..(live.slot + 1) * of_slot
        };
        let of_state = own(&states);
        states[of_state.clone()].copy_from_slice(&stored[of_state]);
        if let (Some(windows), Some(_), Some(after)) =
            (&mut windows, &rings.inputs, &flushed.0.windows)
        {
            let of_window = own(after);
            windows[of_window.clone()].copy_from_slice(&after[of_window]);
        }
    }
    let rest = Deferred {
        len: &len,
        base: &base,
        ..alone
    };
    let pools = Pools {
        states: &states,
        windows: windows.as_deref(),
        ..*pools
    };
    let (rest, queries) = rest.run(&pools, rings)?;
    let (flushed, _) = flushed;
    let after = After {
        o: rest.o,
        rings: rest.rings,
        ..flushed
    };
    Ok((after, queries))
}

struct Judged<'a> {
    problem: &'a Deferred<'a>,
    pools: &'a Pools<'a>,
    rings: &'a Rings,
    after: &'a After,
    /// Norms of q̂, `[B, T, HV]`.
    queries: &'a [f64],
    tolerance: &'a Tolerance,
}

impl Judged<'_> {
    fn allowed(&self) -> Result<AllowedOfRings, Error> {
        let (problem, step) = (self.problem, &self.problem.layer.step);
        let slots = problem.slots(self.pools)?;
        let zeros = |heads: usize| vec![0.0; slots * heads * problem.entries];
        let mut allowed = AllowedOfRings {
            o: vec![0.0; self.queries.len()],
            states: vec![0.0; slots * step.value_heads],
            keys: zeros(step.heads),
            updates: zeros(step.value_heads),
            decays: zeros(step.value_heads),
        };
        for live in problem.active(self.pools)? {
            for hv in 0..step.value_heads {
                self.head(&live, hv, &mut allowed);
            }
        }
        Ok(allowed)
    }

    fn head(&self, live: &Live, hv: usize, allowed: &mut AllowedOfRings) {
        let (problem, step, tolerance) = (self.problem, &self.problem.layer.step, self.tolerance);
        let heads = step.sizes();
        let (value_heads, entries) = (step.value_heads, problem.entries);
        let channels = if step.gates.per_channel() {
            step.key_dim
        } else {
            1
        };
        let entry = |j: usize| (live.base + j) % entries;
        let of = |ring: &[f64], head: usize, of_slot: usize, len: usize, j: usize| {
            let first = ((live.slot * of_slot + head) * entries + entry(j)) * len;
            ring[first..first + len].to_vec()
        };
        let token = |rings: &Rings, j: usize| {
            let k = of(&rings.keys, heads.of(hv), step.heads, step.key_dim, j);
            let u = of(&rings.updates, hv, value_heads, step.value_dim, j);
            (k, u, of(&rings.decays, hv, value_heads, channels, j))
        };
        // Norms of the terms that a state is added up from, and the largest log decays.
        let mut size = match live.is_fresh {
            true => 0.0,
            false => finite_norm(&heads.load(self.pools.states, live.slot, hv)),
        };
        let mut decays = 0.0;
        let mut add = |(k, u, log_decay): (&[f64], &[f64], &[f64])| {
            let least = log_decay.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            size = size * least.exp() + finite_norm(k) * finite_norm(u);
            let counted = log_decay.iter().filter(|g| g.abs() <= FORGOTTEN);
            decays += counted.fold(0.0, |most, g| g.abs().max(most));
            (size, decays)
        };
        let mut of_state = (0.0, 0.0);
        for j in 0..live.len {
            let (k, u, decay) = token(self.rings, j);
            of_state = add((&k, &u, &decay));
        }
        if live.flushes {
            let (size, decays) = of_state;
            allowed.states[live.slot * value_heads + hv] =
                (tolerance.state + LOG_DECAY * decays) * size;
        }
        for t in 0..step.tokens {
            let (k, u, decay) = token(&self.after.rings, live.len + t);
            let (size, decays) = add((&k, &u, &decay));
            let bound = (tolerance.output + LOG_DECAY * decays) * size;
            let i = (live.b * step.tokens + t) * value_heads + hv;
            let k_norm = finite_norm(&k);
            let (k_length, key_length) = match step.l2norm {
                true => (1.0, (k_norm.powi(2) + 1e-6).sqrt()),
                false => (k_norm.max(1.0), 1.0),
            };
            let q_length = self.queries[i].max(step.scale.abs());
            allowed.o[i] = bound * q_length * k_length.powi(2);
            let of_entry = (live.slot * value_heads + hv) * entries + entry(live.len + t);
            allowed.updates[of_entry] = bound * k_length / key_length + UPDATE * finite_norm(&u);
            // The rounding of an argument of exp is relative to the argument, which is the logarithm of a small log decay.
            let smallest = decay.iter().map(|g| g.abs()).filter(|g| *g > 0.0);
            let argument = smallest.fold(1.0, f64::min).ln().abs() / ARGUMENT;
            allowed.decays[of_entry] = LOG_DECAY * finite_norm(&decay) * argument.max(1.0);
        }
    }
}

/// Largest |log decay| whose rounding counts: e^−104 is 0 in f32.
const FORGOTTEN: f64 = 104.0;

/// Largest argument of the exponentials of a log decay for which [`LOG_DECAY`] holds.
const ARGUMENT: f64 = 16.0;

/// Relative error of u that its factors may add: f32, with an approximate root.
const UPDATE: f64 = 1e-6;
