//! Deferred write-back: states with a ring of pending tokens, which a step flushes if its own tokens would make too many pending.

use crate::error::{Error, check_length};
use crate::layer::{Layer, Pools};
use crate::recurrence::{decays, take};
use crate::recurrent::Recurrent;
use crate::tolerance::norm;

/// A step of rows whose slots have pending tokens; with T = 0, a flush.
#[derive(Clone, Copy, Debug)]
pub struct Deferred<'a> {
    /// Rows of one length. Each reads the state of its slot, and writes that same slot if it flushes. All other ways of keeping states
    /// are off. A fresh row has nothing pending.
    pub layer: Layer<'a>,
    /// Most pending tokens of a slot, N.
    pub most: usize,
    /// Entries of a ring, R: at least N + T.
    pub entries: usize,
    /// Pending tokens of each row's slot, `[B]`, 0 to N. A value out of range makes the row inactive.
    pub len: &'a [i64],
    /// Ring entry of each row's first pending token, `[B]`, below R. A value out of range makes the row inactive.
    pub base: &'a [i64],
}

/// Updates of pending tokens: each takes a state S to S diag(α) + u kᵀ.
#[derive(Clone, Debug, PartialEq)]
pub struct Rings {
    /// `[P, H, R, K]`: k as in the input, or as the convolution makes it; not normalised.
    pub keys: Vec<f64>,
    /// `[P, HV, R, V]`: u, which is δ times the factor that normalises k.
    pub updates: Vec<f64>,
    /// GDN `[P, HV, R]`, KDA `[P, HV, R, K]`: log α.
    pub decays: Vec<f64>,
    /// `[P, R, D]`: x as in the input, if windows are deferred as states are.
    pub inputs: Option<Vec<f64>>,
}

/// Outputs, pools and rings after a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct After {
    /// `[B, T, HV, V]`; zero for inactive rows.
    pub o: Vec<f64>,
    /// The whole pool after the launch.
    pub pool: Vec<f64>,
    /// All windows after the launch, with a projection. They move with every token, or, with a ring of inputs, when states are flushed.
    pub windows: Option<Vec<f64>>,
    /// All rings after the launch.
    pub rings: Rings,
}

/// Whether a step of `tokens` tokens first flushes its `len` pending ones, of at most `most`.
#[must_use]
pub fn flushes(len: usize, tokens: usize, most: usize) -> bool {
    len + tokens > most
}

/// Runs `problem` on pools of states and windows, and the states' rings. Rows start from the contents before the launch.
///
/// # Errors
/// A length contradicts the shape, or an input excludes deferred write-back.
pub fn deferred(problem: &Deferred, pools: &Pools, rings: &Rings) -> Result<After, Error> {
    let layer = &problem.layer;
    let step = &layer.step;
    for (name, given) in [
        ("token_slots", step.token_slots.is_some()),
        ("write_slots", step.write_slots.is_some()),
        ("write_pool", pools.write_states.is_some()),
        ("write_windows", pools.write_windows.is_some()),
        ("previous", step.previous.is_some()),
        ("cu_seqlens", step.cu_seqlens.is_some()),
        ("snapshots", pools.snapshots.is_some()),
        ("checkpoints", layer.checkpoints.is_some()),
    ] {
        if given {
            let with = "a ring";
            return Err(Error::Contradiction { name, with });
        }
    }
    let (after, _) = problem.run(pools, rings)?;
    Ok(after)
}

/// An active row.
pub(crate) struct Live {
    /// Index of the row in the batch.
    pub b: usize,
    /// Slot of the row.
    pub slot: usize,
    /// Number of pending tokens.
    pub len: usize,
    /// Ring entry of the first pending token.
    pub base: usize,
    /// Whether the row starts from zeros.
    pub is_fresh: bool,
    /// Whether the row writes its state.
    pub flushes: bool,
}

/// Deferred windows.
struct Waited {
    /// All windows before the launch, those of active rows moved past their pending tokens.
    before: Vec<f64>,
    /// All windows after the launch.
    after: Vec<f64>,
    /// The ring of inputs after the launch.
    inputs: Vec<f64>,
}

impl Deferred<'_> {
    /// Results of the launch, and the norms of q̂, `[B, T, HV]`, which are 0 for inactive rows.
    pub(crate) fn run(&self, pools: &Pools, rings: &Rings) -> Result<(After, Vec<f64>), Error> {
        let slots = self.slots(pools)?;
        let waited = match (&rings.inputs, pools.windows) {
            (Some(inputs), Some(windows)) => Some(self.wait(inputs, windows, slots)?),
            _ => None,
        };
        let pools = &Pools {
            windows: waited
                .as_ref()
                .map_or(pools.windows, |waited| Some(&waited.before)),
            ..*pools
        };
        let (mut after, queries) = self.surrounded(pools, rings, slots)?;
        if let Some(waited) = waited {
            (after.windows, after.rings.inputs) = (Some(waited.after), Some(waited.inputs));
        }
        Ok((after, queries))
    }

    /// Number of pool slots, P.
    pub(crate) fn slots(&self, pools: &Pools) -> Result<usize, Error> {
        self.layer.step.sizes().slots_of("pool", pools.states)
    }

    /// The active rows.
    pub(crate) fn active(&self, pools: &Pools) -> Result<Vec<Live>, Error> {
        let slots = self.slots(pools)?;
        let row = |b| {
            let [slot, len, base] = self.live(b, slots)?;
            let is_fresh = self.is_fresh(b);
            Some(Live {
                b,
                slot,
                len,
                base,
                is_fresh,
                flushes: is_fresh || (len > 0 && self.must_flush(len)),
            })
        };
        Ok((0..self.layer.step.batch).filter_map(row).collect())
    }

    /// Applies the launch to a ring of inputs `[P, R, D]` and windows `[P, D, W − 1]`.
    fn wait(&self, inputs: &[f64], windows: &[f64], slots: usize) -> Result<Waited, Error> {
        let step = &self.layer.step;
        let channels =
            Error::check_multiple("inputs", "one of D", slots * self.entries, inputs.len())?;
        let before = Error::check_multiple("windows", "one of D", slots * channels, windows.len())?;
        let mut waited = Waited {
            before: windows.to_vec(),
            after: windows.to_vec(),
            inputs: inputs.to_vec(),
        };
        for b in 0..step.batch {
            let Some([slot, len, base]) = self.live(b, slots) else {
                continue;
            };
            let entry = |j: usize| (slot * self.entries + (base + j) % self.entries) * channels;
            for c in 0..channels {
                let own = (slot * channels + c) * before..(slot * channels + c + 1) * before;
                let of_window = match self.is_fresh(b) {
                    true => vec![0.0; before],
                    false => windows[own.clone()].to_vec(),
                };
                let pending = (0..len).map(|j| inputs[entry(j) + c]);
                let all: Vec<f64> = of_window.into_iter().chain(pending).collect();
                waited.before[own.clone()].copy_from_slice(&all[len..]);
                if self.is_fresh(b) || (len > 0 && self.must_flush(len)) {
                    waited.after[own].copy_from_slice(&all[len..]);
                }
            }
            if let Some(projection) = &self.layer.projection {
                for t in 0..step.tokens {
                    let x = &projection.x[(b * step.tokens + t) * channels..][..channels];
                    waited.inputs[entry(len + t)..][..channels].copy_from_slice(x);
                }
            }
        }
        Ok(waited)
    }

    fn surrounded(
        &self,
        pools: &Pools,
        rings: &Rings,
        slots: usize,
    ) -> Result<(After, Vec<f64>), Error> {
        let layer = &self.layer;
        if layer.projection.is_none() && layer.norm.is_none() {
            return self.recur(&layer.step, pools.states, rings);
        }
        let live = |b: usize| self.live(b, slots).is_some();
        let (o, (after, queries), convolved) = layer.surround(pools, live, |step, _, _| {
            let (mut after, queries) = self.recur(step, pools.states, rings)?;
            Ok((std::mem::take(&mut after.o), (after, queries)))
        })?;
        let windows = convolved.map(|convolved| convolved.windows);
        let after = After {
            o,
            windows,
            ..after
        };
        Ok((after, queries))
    }

    fn must_flush(&self, len: usize) -> bool {
        let tokens = self.layer.step.tokens;
        tokens == 0 || flushes(len, tokens, self.most)
    }

    fn is_fresh(&self, b: usize) -> bool {
        self.layer.fresh.is_some_and(|fresh| fresh[b] != 0)
    }

    /// Slot of row b among `slots`, its pending tokens and the entry of the first; `None` if the row is inactive.
    fn live(&self, b: usize, slots: usize) -> Option<[usize; 3]> {
        let within = |index: i64, end: usize| usize::try_from(index).ok().filter(|&i| i < end);
        let slot = self
            .layer
            .step
            .read_slots
            .map_or(b as i64, |slots| slots[b]);
        let len = if self.is_fresh(b) { 0 } else { self.len[b] };
        Some([
            within(slot, slots).filter(|_| self.layer.step.null_slot != Some(slot))?,
            within(len, self.most + 1)?,
            within(self.base[b], self.entries)?,
        ])
    }

    /// Runs the recurrence of `step`, which has q, k and v. Returns the results and the norms of q̂.
    fn recur(
        &self,
        step: &Recurrent,
        pool: &[f64],
        rings: &Rings,
    ) -> Result<(After, Vec<f64>), Error> {
        let entries = self.entries;
        let heads = step.sizes();
        let slots = heads.slots_of("pool", pool)?;
        let channels = if step.gates.per_channel() {
            step.key_dim
        } else {
            1
        };
        let ring = |heads: usize, of_entry: usize| [slots, heads, entries, of_entry];
        let (keys, updates, of_decays) = (
            ring(step.heads, step.key_dim),
            ring(step.value_heads, step.value_dim),
            ring(step.value_heads, channels),
        );
        check_length("keys", "[P, H, R, K]", &keys, rings.keys.len())?;
        check_length("updates", "[P, HV, R, V]", &updates, rings.updates.len())?;
        check_length(
            "decays",
            "[P, HV, R, 1 or K]",
            &of_decays,
            rings.decays.len(),
        )?;

        let mut after = After {
            o: vec![0.0; step.v.len()],
            pool: pool.to_vec(),
            windows: None,
            rings: rings.clone(),
        };
        let mut queries = vec![0.0; step.batch * step.tokens * step.value_heads];
        for b in 0..step.batch {
            let Some([slot, len, base]) = self.live(b, slots) else {
                continue;
            };
            let fresh = self.is_fresh(b);
            let must_flush = self.must_flush(len);
            for hv in 0..step.value_heads {
                // Position in a ring of the first element of entry j of a head.
                let at = |head: usize, of_head: [usize; 4], j: usize| {
                    let [_, heads, entries, of_entry] = of_head;
                    ((slot * heads + head) * entries + (base + j) % entries) * of_entry
                };
                let h = heads.of(hv);
                let mut state = match fresh {
                    true => vec![0.0; step.value_dim * step.key_dim],
                    false => heads.load(pool, slot, hv),
                };
                for j in 0..len {
                    let key = &rings.keys[at(h, keys, j)..][..step.key_dim];
                    let update = &rings.updates[at(hv, updates, j)..][..step.value_dim];
                    let decay = decays(&rings.decays[at(hv, of_decays, j)..][..channels]);
                    let decay: Vec<f64> = (0..step.key_dim).map(|c| decay[c % channels]).collect();
                    for (row, u) in state.chunks_exact_mut(step.key_dim).zip(update) {
                        for (c, s) in row.iter_mut().enumerate() {
                            *s = *s * decay[c] + u * key[c];
                        }
                    }
                }
                if fresh || (must_flush && len > 0) {
                    heads.store(&mut after.pool, slot, hv, &state);
                    for s in &mut state {
                        *s = (step.round_state)(*s);
                    }
                }
                for t in 0..step.tokens {
                    let token = b * step.tokens + t;
                    let of_token = step.token(token, hv);
                    queries[token * step.value_heads + hv] = norm(&of_token.q);
                    let raw = &step.k[(token * step.heads + h) * step.key_dim..][..step.key_dim];
                    let key_length = match step.l2norm {
                        true => (raw.iter().map(|k| k * k).sum::<f64>() + 1e-6).sqrt(),
                        false => 1.0,
                    };
                    let decay = decays(&of_token.log_decay);
                    let decayed = state.chunks_exact(step.key_dim).map(|row| {
                        let products = row.iter().zip(&decay).zip(&of_token.k);
                        products.map(|((s, decay), k)| s * decay * k).sum::<f64>()
                    });
                    let u: Vec<f64> = decayed
                        .zip(&of_token.v)
                        .map(|(sk, v)| of_token.beta * (v - sk) / key_length)
                        .collect();
                    let left = &mut after.rings;
                    left.keys[at(h, keys, len + t)..][..step.key_dim].copy_from_slice(raw);
                    left.updates[at(hv, updates, len + t)..][..step.value_dim].copy_from_slice(&u);
                    left.decays[at(hv, of_decays, len + t)..][..channels]
                        .copy_from_slice(&of_token.log_decay[..channels]);
                    let (read, _) = take(&mut state, &of_token)?;
                    let o = (token * step.value_heads + hv) * step.value_dim;
                    after.o[o..][..step.value_dim].copy_from_slice(&read);
                }
            }
        }
        Ok((after, queries))
    }
}
