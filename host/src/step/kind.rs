//! The kind of a launch: a family of kernels, the states that it keeps, their layout and dims. Only the tile is still open.

use gated_delta_kernels::launch::Family;

use super::args::StateLayout;
use crate::tensor::DType;

/// The states that a launch keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// No state of the new tokens is kept.
    Verify,
    /// The state after the last new token is kept; in a flush the state after the last pending token.
    Update,
    /// The state after each new token is kept, as a snapshot or in a token slot.
    Each,
    /// The state after the kept previous tokens is kept; there are no new tokens.
    Commit,
    /// The state after the kept previous tokens is kept; the new tokens start from it.
    Resume,
}

/// A class of kernels that compute the same results and differ only in their tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub family: Family,
    /// Whether the gates have one decay per key channel (KDA).
    pub per_channel: bool,
    pub mode: Mode,
    /// Whether some views are not 16-byte aligned. A resume on tensor cores then has no registers left for two tiles per warp.
    pub narrow: bool,
    pub layout: StateLayout,
    /// bf16, f16 or f32.
    pub state: DType,
    pub k_dim: u32,
    pub v_dim: u32,
    /// HV / H.
    pub ratio: u32,
    /// T + T', the number of new and previous tokens of a row.
    pub tokens: u32,
    /// See [`Kind::goes_in_sets`].
    pub in_sets: bool,
    /// Whether the launch is in sets and has no previous tokens: both sets start from the state before the first one.
    pub in_pair: bool,
    /// Whether the launch is a prefill with a norm.
    pub norm: bool,
}

impl Kind {
    /// Whether a step of `family` on such states processes its tokens in sets of 8. `most` is the larger of T and T'.
    fn goes_in_sets(family: Family, (layout, state): (StateLayout, DType), most: usize) -> bool {
        let is_16_bit_v_last = state != DType::F32 && layout == StateLayout::VLast;
        let is_long = most > Family::PARALLEL.max_tokens() as usize;
        family == Family::PARALLEL && (is_long || is_16_bit_v_last)
    }

    /// The kind, with [`Self::in_sets`] and [`Self::in_pair`] for T and T'.
    pub fn with_tokens(self, [new, previous]: [usize; 2]) -> Self {
        let states = (self.layout, self.state);
        let in_sets = Self::goes_in_sets(self.family, states, new.max(previous));
        Self {
            in_sets,
            in_pair: in_sets && previous == 0,
            ..self
        }
    }

    /// Whether the launch is in sets of tokens, and only kernels whose states are f32 in shared memory take them. Those of 16-bit
    /// K-last states take a pair; KDA's take no pair of f16.
    pub fn is_f32_in_shared(self) -> bool {
        let has_own = self.layout == StateLayout::KLast
            && (self.state == DType::Bf16 || self.state == DType::F16 && !self.per_channel);
        self.in_sets && !(self.in_pair && has_own)
    }

    /// Whether the launch is a prefill.
    pub fn is_chunked(self) -> bool {
        self.family.is_chunked()
    }

    /// Whether the launch has one new token and no previous tokens.
    pub fn is_decode(self) -> bool {
        self.tokens == 1 && self.mode != Mode::Commit
    }

    /// Whether the kernels compute all value heads of a query/key head together, with a convolution or a norm.
    pub fn is_layer(self) -> bool {
        self.family.layer
    }
}
