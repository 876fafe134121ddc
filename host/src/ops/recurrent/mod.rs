//! What GDN MTP verify ([`gdn_mtp`](super::gdn_mtp)) and recurrent KDA ([`kda_recurrent`](super::kda_recurrent))
//! share: up to 16 tokens of every sequence in one launch, and every way of keeping its state.
//!
//! | switch | where states start and go |
//! |---|---|
//! | none | row b starts from slot b, its state after the last token goes back there |
//! | `read_slots`, `write_slots`, `write_pool` | other slots, another pool |
//! | `update_state = false` | no state is written |
//! | `snapshots` | besides, the state after every token goes to a tensor of its own |
//! | `token_slots`, `accepted` | the state after each token goes to a slot of its own, the row starts from one of them |
//! | `packed` | rows of different lengths |
//! | `previous` | the accepted part of the last step is committed first, the new tokens are verified: a *resume* |
//!
//! After a verify without states written, either a [`Commit`] replays the accepted tokens into the pool, or the next
//! step resumes: one state read and one written, whatever T is.

mod check;
mod constants;
mod extent;
mod gates;
mod launch;
mod request;
mod switches;
#[cfg(test)]
mod tests;
mod tokens;

pub use gated_delta_kernels::launch::LaunchShape;
pub use gated_delta_kernels::recurrent::RecurrentParams;
pub use gates::Gates;
pub use launch::RecurrentPlan;
pub(crate) use request::{Switches, TENSORS};

pub use super::checks::MAX_BATCH;
use super::{HeadMap, StateLayout};
use crate::Entry;
use crate::error::Error;
use crate::tensor::Tensor;

/// Most tokens of a row in one launch, new or previous.
pub const MAX_TOKENS: usize = 16;

/// Arguments of a verify, a decode or a resume. T in 1..=16; K = V in {64, 128}; HV a multiple of H.
///
/// With `packed`, the `[B, T, …]` tensors are `[1, total, …]`. Strides of rows, tokens and heads, of slots and of
/// snapshots are free, but what is written must not overlap itself; the innermost dim is contiguous. Views that are
/// not 16-byte aligned are taken, by a narrower path.
///
/// A row is inactive where one of its indices is out of range or the null slot: its part of `o` is zero, and it
/// touches no state. A packed row without a token, or one whose bounds are out of range, touches nothing at all.
///
/// `token_slots` exclude `read_slots`, `write_slots`, `previous` and `update_state = false`; `previous` excludes
/// `snapshots` and `update_state = false`; `update_state = false` excludes `write_slots` and `write_pool`; `accepted`
/// needs `token_slots`.
#[derive(Clone, Copy, Debug)]
pub struct Recurrent<'a, G> {
    /// `[B, T, H, K]`, bf16, f16 or f32.
    pub q: Tensor<'a>,
    /// `[B, T, H, K]`, bf16, f16 or f32.
    pub k: Tensor<'a>,
    /// `[B, T, HV, V]`, bf16, f16 or f32.
    pub v: Tensor<'a>,
    /// Gates of these tokens.
    pub gates: G,
    /// `[B, T, HV, V]`, bf16, f16 or f32, written.
    pub o: Tensor<'a>,
    /// States, `[P, HV, V, K]` or `[P, HV, K, V]`, f32 or bf16; updated in place unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that states are written to instead, of the same dtype and dims but P.
    pub write_pool: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: slot that row b starts from; without it, slot b.
    pub read_slots: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: slot that row b's state goes to; without it, the read slot.
    pub write_slots: Option<Tensor<'a>>,
    /// `[B, T]`, i32, i64 or u32: slot that the state after each token goes to. An entry that is out of range or the
    /// null slot skips that store alone. The row starts from slot `token_slots[b, accepted[b] - 1]`.
    pub token_slots: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32, in 1..=T: tokens of the last step that were accepted; without it, 1.
    pub accepted: Option<Tensor<'a>>,
    /// `[B, steps, HV, V, K]` or `[B, steps, HV, K, V]` with steps ≥ T, of the dtype of `pool`: receives the state
    /// after every token, whether the pool is updated or not.
    pub snapshots: Option<Tensor<'a>>,
    /// Rows of different lengths, one behind the other.
    pub packed: Option<Packed<'a>>,
    /// Tokens of the last step, of which the accepted ones are committed first.
    pub previous: Option<Previous<'a>>,
    /// What is fixed for a layer.
    pub options: RecurrentOptions,
}

/// Rows of different lengths: the tokens of all of them along one dim.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// `[B + 1]`, i32, i64 or u32: row b has the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`.
    pub cu_seqlens: Tensor<'a>,
    /// T: no row is longer. A longer one is out of range.
    pub max_tokens: usize,
}

/// Tokens of the last step, T' of each row, T' in 1..=16: the first `keep` of them advance the row's start state, which
/// is written to the write slot, rounded to the state's dtype; the new tokens start from it and write `o` alone.
///
/// Bit for bit a [`Commit`] and a verify that writes no state. Dense, with free strides, whether or not the new tokens
/// are packed; dtypes are those of the new tokens' tensors.
#[derive(Clone, Copy, Debug)]
pub struct Previous<'a> {
    /// `[B, T', H, K]`.
    pub k: Tensor<'a>,
    /// `[B, T', HV, V]`.
    pub v: Tensor<'a>,
    /// As the new tokens' `a` or `g`: `[B, T', HV]`, with KDA `[B, T', HV, K]`.
    pub gate: Tensor<'a>,
    /// As the new tokens' `b` or `beta`: `[B, T', HV]`.
    pub beta: Tensor<'a>,
    /// `[B]`, i32, i64 or u32, in 0..=T': tokens to commit. Where it is out of range, the row is inactive.
    pub keep: Tensor<'a>,
}

/// Arguments of a commit: after a verify that wrote no state, the first `keep` of its T' tokens advance the states.
///
/// T' in 1..=16; otherwise as [`Recurrent`], without q and o. `update_state = false` is refused.
#[derive(Clone, Copy, Debug)]
pub struct Commit<'a, G> {
    /// `[B, T', H, K]`, bf16, f16 or f32.
    pub k: Tensor<'a>,
    /// `[B, T', HV, V]`, bf16, f16 or f32.
    pub v: Tensor<'a>,
    /// Gates of these tokens.
    pub gates: G,
    /// `[B]`, i32, i64 or u32, in 0..=T': tokens to commit. Where it is out of range, the row is inactive.
    pub keep: Tensor<'a>,
    /// States, `[P, HV, V, K]` or `[P, HV, K, V]`, f32 or bf16; updated in place unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that states are written to instead, of the same dtype and dims but P.
    pub write_pool: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: slot that row b starts from; without it, slot b.
    pub read_slots: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: slot that row b's state goes to; without it, the read slot.
    pub write_slots: Option<Tensor<'a>>,
    /// What is fixed for a layer.
    pub options: RecurrentOptions,
}

/// What is fixed for a layer, besides shapes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentOptions {
    /// Which dim of a state is contiguous.
    pub state_layout: StateLayout,
    /// Query/key head of a value head.
    pub head_map: HeadMap,
    /// Normalise q and k to unit length.
    pub qk_l2norm: bool,
    /// Factor of q; 1/√K where `None`.
    pub scale: Option<f32>,
    /// A slot that makes its row inactive, besides those out of range (vLLM's slot 0).
    pub null_slot: Option<u32>,
    /// Write the state after the last token.
    pub update_state: bool,
    /// How the tokens of a row are computed.
    pub formulation: Formulation,
}

impl Default for RecurrentOptions {
    fn default() -> Self {
        Self {
            state_layout: StateLayout::KLast,
            head_map: HeadMap::Grouped,
            qk_l2norm: true,
            scale: None,
            null_slot: None,
            update_state: true,
            formulation: Formulation::Recurrent,
        }
    }
}

/// How the tokens of a row are computed. Whatever it is, results do not depend on B, on other rows, on the variant, or
/// on where states go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Formulation {
    /// Token by token in f32: with f32 states T tokens are T launches of one token, bit for bit.
    #[default]
    Recurrent,
    /// The tokens of a row at once, on tensor cores: bf16 K-last states and at most 8 tokens, new or previous, without
    /// snapshots and token slots.
    Parallel,
}

impl<G: Gates> Recurrent<'_, G> {
    /// Every compiled variant that computes these arguments, best or not.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn variants(&self) -> Result<Vec<Entry>, Error> {
        Ok(self.request().check()?.kind.variants().collect())
    }

    /// The variant that a launch takes.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn selected(&self) -> Result<Entry, Error> {
        self.request().selected()
    }

    /// Bytes that a launch must move where every row is active and full: each start state read once, each state that is kept
    /// written once, every other tensor once.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn bytes(&self) -> Result<u64, Error> {
        self.request().bytes()
    }

    /// Addresses and sizes, as a launch takes them.
    #[must_use]
    pub fn params(&self) -> RecurrentParams {
        self.request().params()
    }
}

impl<G: Gates> Commit<'_, G> {
    /// Every compiled variant that computes these arguments, best or not.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn variants(&self) -> Result<Vec<Entry>, Error> {
        Ok(self.request().check()?.kind.variants().collect())
    }

    /// The variant that a launch takes.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn selected(&self) -> Result<Entry, Error> {
        self.request().selected()
    }

    /// Bytes that a launch must move where every row is active: each start state read once, each state that is kept
    /// written once, every other tensor once.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn bytes(&self) -> Result<u64, Error> {
        self.request().bytes()
    }

    /// Addresses and sizes, as a launch takes them.
    #[must_use]
    pub fn params(&self) -> RecurrentParams {
        self.request().params()
    }
}
