//! Gates of GDN, and its decode: one token for each row of a batch, with states in the slots of a pool.

use crate::error::{Error, Tokens, check_length};
use crate::gate::{sigmoid, softplus_log_decay};
use crate::heads::Heads;
pub use crate::heads::{HeadMap, Layout};
use crate::recurrent::{Around, Recurrent, TokenGates, advance};

/// A decode: one token for each of `B` rows.
#[derive(Clone, Copy, Debug)]
pub struct GdnDecode<'a> {
    /// Rows, B.
    pub batch: usize,
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV: a multiple of H.
    pub value_heads: usize,
    /// Head dim of q and k, K.
    pub key_dim: usize,
    /// Head dim of v, V.
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
    /// Query/key head that each value head reads.
    pub head_map: HeadMap,
    /// Layout of a slot in memory.
    pub layout: Layout,
    /// `[B]`: slot of the read pool to start from; by default row b uses slot b.
    pub read_slots: Option<&'a [i64]>,
    /// `[B]`: slot of the write pool for the new state; by default the read slot. No two live rows share one.
    pub write_slots: Option<&'a [i64]>,
    /// A slot that makes a row inactive, like slots outside of the pools.
    pub null_slot: Option<i64>,
    /// Whether new states are written.
    pub update_state: bool,
}

/// Gates of GDN; `[B, T]` is `[B]` in a decode and `[total]` in packed rows.
#[derive(Clone, Copy, Debug)]
pub enum Gates<'a> {
    /// Log decay `-exp(a_log) · softplus(a + dt_bias)`, beta `beta_scale · sigmoid(b)`.
    Raw {
        /// `[B, T, HV]`
        a: &'a [f64],
        /// `[B, T, HV]`
        b: &'a [f64],
        /// `[HV]`
        a_log: &'a [f64],
        /// `[HV]`
        dt_bias: &'a [f64],
        /// 1, or 2 for betas up to 2.
        beta_scale: f64,
    },
    /// Log decay and beta, precomputed.
    Given {
        /// `[B, T, HV]`: log decay.
        g: &'a [f64],
        /// `[B, T, HV]`
        beta: &'a [f64],
    },
}

/// Outputs and states after a decode.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// `[B, HV, V]`; zero for inactive rows.
    pub o: Vec<f64>,
    /// The whole write pool after the launch.
    pub pool: Vec<f64>,
}

/// One GDN step of every row, in place. `pool` is `[P, HV, V, K]` (K-last) or `[P, HV, K, V]` (V-last); the result has the pool after
/// the launch.
///
/// A row whose read or write slot is negative, not below P, or `null_slot` is inactive: its output is zero, and its slots are neither
/// read nor written. Fails if a length contradicts the shape.
pub fn decode(problem: &GdnDecode, pool: &[f64]) -> Result<Decoded, Error> {
    decode_between(problem, pool, pool)
}

/// As [`decode`], from the slots of `read_pool` to those of `write_pool`, which may have different P.
pub fn decode_between(
    problem: &GdnDecode,
    read_pool: &[f64],
    write_pool: &[f64],
) -> Result<Decoded, Error> {
    let GdnDecode {
        batch,
        heads,
        value_heads,
        key_dim,
        value_dim,
        q,
        k,
        v,
        gates,
        l2norm,
        scale,
        head_map,
        layout,
        read_slots,
        write_slots,
        null_slot,
        update_state,
    } = *problem;
    let one_token = Recurrent {
        q,
        k,
        v,
        l2norm,
        scale,
        head_map,
        layout,
        read_slots,
        write_slots,
        null_slot,
        update_state,
        ..Recurrent::new(
            [batch, 1],
            [heads, value_heads],
            [key_dim, value_dim],
            TokenGates::Gdn(gates),
        )
    };
    let rows = Tokens {
        letters: "B",
        count: batch,
    };
    let after = advance(
        &one_token,
        rows,
        read_pool,
        write_pool,
        None,
        Around::default(),
    )?;
    Ok(Decoded {
        o: after.o,
        pool: after.pool,
    })
}

impl Gates<'_> {
    pub(crate) fn check(&self, tokens: Tokens, heads: &Heads) -> Result<(), Error> {
        let value_heads = heads.value_heads;
        match self {
            Self::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale: _,
            } => {
                tokens.check("a", "HV", &[value_heads], a.len())?;
                tokens.check("b", "HV", &[value_heads], b.len())?;
                check_length("a_log", "[HV]", &[value_heads], a_log.len())?;
                check_length("dt_bias", "[HV]", &[value_heads], dt_bias.len())
            }
            Self::Given { g, beta } => {
                tokens.check("g", "HV", &[value_heads], g.len())?;
                tokens.check("beta", "HV", &[value_heads], beta.len())
            }
        }
    }

    /// Log decay and beta of a value head.
    pub(crate) fn at(&self, token: usize, hv: usize, heads: &Heads) -> (f64, f64) {
        let i = token * heads.value_heads + hv;
        match self {
            Self::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => (
                softplus_log_decay(a[i], a_log[hv], dt_bias[hv]),
                beta_scale * sigmoid(b[i]),
            ),
            Self::Given { g, beta } => (g[i], beta[i]),
        }
    }
}
