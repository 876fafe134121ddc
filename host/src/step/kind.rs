//! What is launched, but for its tile: a family of kernels, what it does with states, their layout and dims.

use gated_delta_kernels::launch::Family;

use super::args::StateLayout;
use crate::tensor::DType;

/// The states that a launch keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// It keeps none of the new tokens.
    Verify,
    /// It keeps the state after the last new token; a flush that after the pending ones.
    Update,
    /// It keeps the state after each new token: snapshots or token slots.
    Each,
    /// It keeps the state after the kept previous tokens; there are no new ones.
    Commit,
    /// It keeps the state after the kept previous tokens; new ones go on from there.
    Resume,
}

/// Kernels that compute the same: what remains to be chosen is the tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub family: Family,
    /// A decay is one per key channel: KDA's.
    pub per_channel: bool,
    pub mode: Mode,
    /// Views are not 16-byte aligned: a resume on tensor cores has no registers left for two tiles a warp then.
    pub narrow: bool,
    pub layout: StateLayout,
    /// bf16, f16 or f32.
    pub state: DType,
    pub k_dim: u32,
    pub v_dim: u32,
    /// HV / H.
    pub ratio: u32,
    /// T + T'
    pub tokens: u32,
    /// A prefill has a norm.
    pub norm: bool,
}

impl Kind {
    /// Says whether it is a prefill.
    pub fn is_chunked(self) -> bool {
        self.family.is_chunked()
    }

    /// Says whether it is of one new token, and no previous ones.
    pub fn is_decode(self) -> bool {
        self.tokens == 1 && self.mode != Mode::Commit
    }

    /// Says whether the kernels compute all value heads of a query/key head together, with a convolution or a norm around them.
    pub fn is_layer(self) -> bool {
        self.family.layer
    }
}
