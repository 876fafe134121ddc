//! GDN's MTP verify and recurrent KDA: up to T tokens for each row of a batch, with every way of keeping states.

mod advance;
mod check;

pub use advance::Checkpoints;
pub(crate) use advance::{Around, Row, advance, begin};

use crate::error::Error;
use crate::gdn::Gates;
pub use crate::heads::{HeadMap, Layout};
use crate::kda::KdaGates;
use crate::recurrence::default_scale;

/// Tokens of `B` rows. The leading `[B, T]` of `q`, `k`, `v` and the gates is `[total]` with `cu_seqlens`.
///
/// A slot index that is negative, not below P, or `null_slot` is dead. A row is inactive if it would start from a dead slot or write its
/// last or committed state to one, or if its `keep` or `accepted` is out of range: the output of its tokens is zero, and nothing else of
/// it is read or written.
#[derive(Clone, Copy, Debug)]
pub struct Recurrent<'a> {
    /// Rows, B.
    pub batch: usize,
    /// T; with `cu_seqlens`, the most tokens of a row. 0 commits previous tokens and does nothing else.
    pub tokens: usize,
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV: a multiple of H.
    pub value_heads: usize,
    /// Head dim of q and k, K.
    pub key_dim: usize,
    /// Head dim of v, V.
    pub value_dim: usize,
    /// `[B, T, H, K]`
    pub q: &'a [f64],
    /// `[B, T, H, K]`
    pub k: &'a [f64],
    /// `[B, T, HV, V]`
    pub v: &'a [f64],
    /// Decay and beta.
    pub gates: TokenGates<'a>,
    /// Whether q and k are L2-normalised first.
    pub l2norm: bool,
    /// Factor of q, usually [`default_scale`].
    pub scale: f64,
    /// Query/key head that each value head reads.
    pub head_map: HeadMap,
    /// Layout of a slot, and of a snapshot, in memory.
    pub layout: Layout,
    /// `[B]`: slot of the read pool to start from; by default row b uses slot b.
    pub read_slots: Option<&'a [i64]>,
    /// `[B]`: slot of the write pool for the state after the last token, or after the previous tokens; by default the read slot.
    pub write_slots: Option<&'a [i64]>,
    /// `[B, T]`: slot of the write pool for the state after each token. A dead slot skips only that store. The row starts from the slot of
    /// the read pool in the entry of its last accepted token. Excludes `read_slots`, `write_slots` and `previous`.
    pub token_slots: Option<&'a [i64]>,
    /// `[B]`, with `token_slots`: number of accepted tokens, 1 to T; by default 1.
    pub accepted: Option<&'a [i64]>,
    /// `[B + 1]`: row b has the tokens from `cu_seqlens[b]` up to `cu_seqlens[b + 1]`. A row with more than T tokens, or with tokens
    /// outside of `[total]`, touches nothing, not even its output. If there are rows, the output of tokens before the first bound and after
    /// the last one, if these are within `[total]`, is zero.
    ///
    /// A row without tokens ends with its start state. It still commits its kept previous tokens. With token slots it touches no
    /// slot.
    pub cu_seqlens: Option<&'a [i64]>,
    /// An additional dead slot; slots outside of the pools are always dead.
    pub null_slot: Option<i64>,
    /// Whether states after the last token are written. With `previous`, and with `token_slots`, only the states that these name are
    /// written; both need this to be on.
    pub update_state: bool,
    /// Steps of the snapshots, at least T. Snapshots `[B, steps, HV, V, K]` (V-last: `[B, steps, HV, K, V]`) take the state after every
    /// token.
    pub snapshot_steps: Option<usize>,
    /// Previous tokens, some of which are committed before the new tokens.
    pub previous: Option<Previous<'a>>,
    /// Rounding of an element of a state when it is stored. New tokens start from the committed state as it is stored; the states of
    /// [`Output`] are not rounded.
    pub round_state: fn(f64) -> f64,
}

impl<'a> Recurrent<'a> {
    /// Rows `[B, T]` of heads `[H, HV]` with dims `[K, V]`, in place, row b in slot b: q and k L2-normalised, the default scale, grouped
    /// heads, K-last states that are not rounded. q, k and v are empty, as a projection needs them to be. Other fields are set by
    /// struct update: `Recurrent { q, k, v, ..Recurrent::new(…) }`.
    #[must_use]
    pub fn new(
        [batch, tokens]: [usize; 2],
        [heads, value_heads]: [usize; 2],
        [key_dim, value_dim]: [usize; 2],
        gates: TokenGates<'a>,
    ) -> Self {
        Self {
            batch,
            tokens,
            heads,
            value_heads,
            key_dim,
            value_dim,
            q: &[],
            k: &[],
            v: &[],
            gates,
            l2norm: true,
            scale: default_scale(key_dim),
            head_map: HeadMap::default(),
            layout: Layout::default(),
            read_slots: None,
            write_slots: None,
            token_slots: None,
            accepted: None,
            cu_seqlens: None,
            null_slot: None,
            update_state: true,
            snapshot_steps: None,
            previous: None,
            round_state: |s| s,
        }
    }
}

/// Gates of every token.
#[derive(Clone, Copy, Debug)]
pub enum TokenGates<'a> {
    /// One decay for a value head.
    Gdn(Gates<'a>),
    /// One decay for each key channel.
    Kda(KdaGates<'a>),
}

/// Tokens of the last step. The first `keep` of them advance the state that is written, and that new tokens start from.
#[derive(Clone, Copy, Debug)]
pub struct Previous<'a> {
    /// Previous tokens of each row, T'.
    pub tokens: usize,
    /// `[B, T', H, K]`
    pub k: &'a [f64],
    /// `[B, T', HV, V]`
    pub v: &'a [f64],
    /// Gates of the previous tokens, `[B, T']`.
    pub gates: TokenGates<'a>,
    /// `[B]`: 0 to T'.
    pub keep: &'a [i64],
}

/// Outputs, pool and snapshots after a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[B, T, HV, V]`, with `cu_seqlens` `[total, HV, V]`; zero for inactive rows and for tokens of no row, NaN if not written.
    pub o: Vec<f64>,
    /// The whole write pool after the launch.
    pub pool: Vec<f64>,
    /// All snapshots after the launch, if there are any.
    pub snapshots: Option<Vec<f64>>,
}

/// Runs `problem` from the slots of `read_pool` to those of `write_pool`, or in place if there is none. Both are `[P, HV, V, K]` (K-last)
/// or `[P, HV, K, V]` (V-last), and may have different P.
///
/// `snapshots` are the contents before the launch. Elements that are not written keep their value; if two rows, or two tokens of a row,
/// name the same slot to write, the later one wins. Rows start from the states before the launch.
///
/// # Errors
/// A length that contradicts the shape, no tokens at all, or switches that contradict each other.
pub fn recurrent(
    problem: &Recurrent,
    read_pool: &[f64],
    write_pool: Option<&[f64]>,
    snapshots: Option<&[f64]>,
) -> Result<Output, Error> {
    problem.check_switches(write_pool.is_some(), snapshots.is_some())?;
    let tokens = problem.token_dims()?;
    advance(
        problem,
        tokens,
        read_pool,
        write_pool.unwrap_or(read_pool),
        snapshots,
        Around::default(),
    )
}
