//! GDN over a batch whose states live in the slots of a pool.

use crate::error::{Error, check_length, elements};
use crate::gate::{sigmoid, softplus_log_decay};
use crate::recurrence::{Step, Token, normalise, recurrence};

/// One token for each of `B` rows.
#[derive(Clone, Copy, Debug)]
pub struct GdnDecode<'a> {
    /// B
    pub batch: usize,
    /// H
    pub heads: usize,
    /// HV, a multiple of H.
    pub value_heads: usize,
    /// K
    pub key_dim: usize,
    /// V
    pub value_dim: usize,
    /// `[B, H, K]`
    pub q: &'a [f64],
    /// `[B, H, K]`
    pub k: &'a [f64],
    /// `[B, HV, V]`
    pub v: &'a [f64],
    /// Decay and beta.
    pub gates: Gates<'a>,
    /// Whether q and k are L2-normalised first.
    pub l2norm: bool,
    /// Factor of q, usually [`default_scale`](crate::recurrence::default_scale).
    pub scale: f64,
    /// Which query/key head a value head reads.
    pub head_map: HeadMap,
    /// How a slot lies in memory.
    pub layout: Layout,
    /// `[B]`: slot of the read pool to start from; without it row b uses slot b.
    pub read_slots: Option<&'a [i64]>,
    /// `[B]`: slot of the write pool for the new state; without it the read slot. No two live rows share one.
    pub write_slots: Option<&'a [i64]>,
    /// A slot that makes a row inactive, as those outside the pools do.
    pub null_slot: Option<i64>,
    /// Whether new states are written.
    pub update_state: bool,
}

/// Gates of GDN.
#[derive(Clone, Copy, Debug)]
pub enum Gates<'a> {
    /// Log decay `-exp(a_log) · softplus(a + dt_bias)`, beta `beta_scale · sigmoid(b)`.
    Raw {
        /// `[B, HV]`
        a: &'a [f64],
        /// `[B, HV]`
        b: &'a [f64],
        /// `[HV]`
        a_log: &'a [f64],
        /// `[HV]`
        dt_bias: &'a [f64],
        /// 1, or 2 for betas up to 2.
        beta_scale: f64,
    },
    /// Both as they are.
    Given {
        /// `[B, HV]`: log decay.
        g: &'a [f64],
        /// `[B, HV]`
        beta: &'a [f64],
    },
}

/// Which query/key head value head `hv` reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadMap {
    /// `hv / (HV/H)`
    #[default]
    Grouped,
    /// `hv % H`, the GGUF order.
    Tiled,
}

/// How a slot of the pool lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `[HV, V, K]`
    #[default]
    KLast,
    /// `[HV, K, V]`
    VLast,
}

/// What a launch leaves behind.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// `[B, HV, V]`; zero for inactive rows.
    pub o: Vec<f64>,
    /// The whole write pool afterwards.
    pub pool: Vec<f64>,
}

/// One GDN step of every row in place: `pool` `[P, HV, V, K]` (K-last) or `[P, HV, K, V]` (V-last) is read and,
/// as it is afterwards, returned.
///
/// A row whose read or write slot is negative, not below P, or `null_slot` is inactive: its output is zero and
/// its slots are neither read nor written. Fails where a length contradicts the shape.
pub fn decode(problem: &GdnDecode, pool: &[f64]) -> Result<Decoded, Error> {
    decode_between(problem, pool, pool)
}

/// As [`decode`], from the slots of `read_pool` to those of `write_pool`, which may differ in their P.
pub fn decode_between(
    problem: &GdnDecode,
    read_pool: &[f64],
    write_pool: &[f64],
) -> Result<Decoded, Error> {
    let p = problem;
    p.check()?;
    let read_pool_slots = p.slots_of("read_pool", read_pool)?;
    let write_pool_slots = p.slots_of("write_pool", write_pool)?;

    let mut o = vec![0.0; p.v.len()];
    let mut pool = write_pool.to_vec();
    for b in 0..p.batch {
        let read_slot = p.read_slots.map_or(b as i64, |slots| slots[b]);
        let write_slot = p.write_slots.map_or(read_slot, |slots| slots[b]);
        let (Some(read_slot), Some(write_slot)) = (
            p.live(read_slot, read_pool_slots),
            p.live(write_slot, write_pool_slots),
        ) else {
            continue;
        };
        for hv in 0..p.value_heads {
            let start = p.load_state(read_pool, read_slot, hv);
            for Step { o: step_o, state } in recurrence(&start, &[p.token(b, hv)])? {
                o[(b * p.value_heads + hv) * p.value_dim..][..p.value_dim].copy_from_slice(&step_o);
                if p.update_state {
                    p.store_state(&mut pool, write_slot, hv, &state);
                }
            }
        }
    }
    Ok(Decoded { o, pool })
}

impl GdnDecode<'_> {
    fn check(&self) -> Result<(), Error> {
        let Self {
            batch,
            heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = *self;
        let dims = [
            ("heads", heads),
            ("value_heads", value_heads),
            ("key_dim", key_dim),
            ("value_dim", value_dim),
        ];
        if let Some(&(name, _)) = dims.iter().find(|(_, dim)| *dim == 0) {
            return Err(Error::Zero { name });
        }
        if !value_heads.is_multiple_of(heads) {
            return Err(Error::Heads { heads, value_heads });
        }
        check_length("q", "[B, H, K]", &[batch, heads, key_dim], self.q.len())?;
        check_length("k", "[B, H, K]", &[batch, heads, key_dim], self.k.len())?;
        check_length(
            "v",
            "[B, HV, V]",
            &[batch, value_heads, value_dim],
            self.v.len(),
        )?;
        match self.gates {
            Gates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale: _,
            } => {
                check_length("a", "[B, HV]", &[batch, value_heads], a.len())?;
                check_length("b", "[B, HV]", &[batch, value_heads], b.len())?;
                check_length("a_log", "[HV]", &[value_heads], a_log.len())?;
                check_length("dt_bias", "[HV]", &[value_heads], dt_bias.len())?;
            }
            Gates::Given { g, beta } => {
                check_length("g", "[B, HV]", &[batch, value_heads], g.len())?;
                check_length("beta", "[B, HV]", &[batch, value_heads], beta.len())?;
            }
        }
        for (name, slots) in [
            ("read_slots", self.read_slots),
            ("write_slots", self.write_slots),
        ] {
            if let Some(slots) = slots {
                check_length(name, "[B]", &[batch], slots.len())?;
            }
        }
        Ok(())
    }

    /// P of `pool`.
    fn slots_of(&self, name: &'static str, pool: &[f64]) -> Result<usize, Error> {
        let slot = elements(&[self.value_heads, self.value_dim, self.key_dim]);
        if !pool.len().is_multiple_of(slot) {
            return Err(Error::Pool {
                name,
                slot,
                got: pool.len(),
            });
        }
        Ok(pool.len() / slot)
    }

    /// `slot`, unless it makes the row inactive.
    fn live(&self, slot: i64, pool_slots: usize) -> Option<usize> {
        if self.null_slot == Some(slot) {
            return None;
        }
        usize::try_from(slot).ok().filter(|&slot| slot < pool_slots)
    }

    fn token(&self, b: usize, hv: usize) -> Token {
        let h = match self.head_map {
            HeadMap::Grouped => hv / (self.value_heads / self.heads),
            HeadMap::Tiled => hv % self.heads,
        };
        let (head, value_head) = (b * self.heads + h, b * self.value_heads + hv);
        let (log_decay, beta) = match self.gates {
            Gates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => (
                softplus_log_decay(a[value_head], a_log[hv], dt_bias[hv]),
                beta_scale * sigmoid(b[value_head]),
            ),
            Gates::Given { g, beta } => (g[value_head], beta[value_head]),
        };
        Token {
            q: normalise(
                &self.q[head * self.key_dim..][..self.key_dim],
                self.l2norm,
                self.scale,
            ),
            k: normalise(
                &self.k[head * self.key_dim..][..self.key_dim],
                self.l2norm,
                1.0,
            ),
            v: self.v[value_head * self.value_dim..][..self.value_dim].to_vec(),
            log_decay: vec![log_decay; self.key_dim],
            beta,
        }
    }

    /// `[V, K]`, whatever the layout of the pool.
    fn load_state(&self, pool: &[f64], slot: usize, hv: usize) -> Vec<f64> {
        self.state_indices(slot, hv)
            .map(|index| pool[index])
            .collect()
    }

    /// Stores `[V, K]` in the layout of the pool.
    fn store_state(&self, pool: &mut [f64], slot: usize, hv: usize, state: &[f64]) {
        for (index, s) in self.state_indices(slot, hv).zip(state) {
            pool[index] = *s;
        }
    }

    /// Where the elements of `[V, K]` lie in the pool, in this order.
    fn state_indices(&self, slot: usize, hv: usize) -> impl Iterator<Item = usize> + use<> {
        let (key_dim, value_dim, layout) = (self.key_dim, self.value_dim, self.layout);
        let base = (slot * self.value_heads + hv) * value_dim * key_dim;
        (0..value_dim * key_dim).map(move |i| {
            let (v, k) = (i / key_dim, i % key_dim);
            base + match layout {
                Layout::KLast => v * key_dim + k,
                Layout::VLast => k * value_dim + v,
            }
        })
    }
}
