//! What is launched, but for its tile: an operator, its states and dims.

use gated_delta_kernels::launch::Family;

use super::args::StateLayout;
use crate::tensor::DType;

/// A family of kernels, or a use of one that has thresholds of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operator {
    GdnDecode,
    GdnMtp,
    GdnMtpParallel(Mode),
    /// Of one token, and no previous ones.
    KdaDecode,
    KdaRecurrent,
    KdaRecurrentParallel(Mode),
    /// Of one token, on states that wait; of none, a flush.
    GdnDeferred,
    KdaDeferred,
    /// Of one token, on states that wait, with a convolution before it, a norm after it, or both.
    GdnDeferredLayer,
    KdaDeferredLayer,
    /// Of up to 8 tokens at once, on states that wait; of none, a flush.
    GdnDeferredParallel,
    KdaDeferredParallel,
    /// Of up to 8 tokens at once, on states that wait, with a convolution before it, a norm after it, or both; of none, a flush
    /// that moves windows.
    GdnDeferredLayerParallel,
    KdaDeferredLayerParallel,
    /// Of one token, with a convolution before it, a norm after it, or both.
    GdnLayer,
    KdaLayer,
    /// Token by token, with a convolution before it, a norm after it, or both.
    GdnLayerMtp,
    KdaLayerMtp,
    /// All tokens at once, with a convolution before it, a norm after it, or both.
    GdnLayerParallel(Mode),
    KdaLayerParallel(Mode),
    /// Any number of tokens, after a preparation, with or without a convolution and a norm.
    GdnPrefill,
    KdaPrefill,
    /// Rows of at most 64 tokens, without a preparation.
    GdnPrefillShort,
    KdaPrefillShort,
}

impl Operator {
    /// That of its kernels.
    pub fn family(self) -> Family {
        match self {
            Self::GdnDecode => Family::GdnDecode,
            Self::GdnMtp | Self::KdaDecode | Self::KdaRecurrent => Family::Recurrent,
            Self::GdnMtpParallel(_) => Family::GdnMtpParallel,
            Self::KdaRecurrentParallel(_) => Family::KdaRecurrentParallel,
            Self::GdnDeferred | Self::KdaDeferred => Family::Deferred,
            Self::GdnDeferredLayer | Self::KdaDeferredLayer => Family::DeferredLayer,
            Self::GdnDeferredParallel => Family::GdnDeferredParallel,
            Self::KdaDeferredParallel => Family::KdaDeferredParallel,
            Self::GdnDeferredLayerParallel => Family::GdnDeferredLayerParallel,
            Self::KdaDeferredLayerParallel => Family::KdaDeferredLayerParallel,
            Self::GdnLayer | Self::KdaLayer => Family::Layer,
            Self::GdnLayerMtp | Self::KdaLayerMtp => Family::LayerMtp,
            Self::GdnLayerParallel(_) => Family::GdnLayerParallel,
            Self::KdaLayerParallel(_) => Family::KdaLayerParallel,
            Self::GdnPrefill => Family::GdnPrefillChain,
            Self::KdaPrefill => Family::KdaPrefillChain,
            Self::GdnPrefillShort => Family::GdnPrefillShort,
            Self::KdaPrefillShort => Family::KdaPrefillShort,
        }
    }

    /// Whether a decay is one per key channel: KDA's.
    pub fn per_channel(self) -> bool {
        match self {
            Self::GdnDecode
            | Self::GdnMtp
            | Self::GdnMtpParallel(_)
            | Self::GdnDeferred
            | Self::GdnDeferredLayer
            | Self::GdnDeferredParallel
            | Self::GdnDeferredLayerParallel
            | Self::GdnLayer
            | Self::GdnLayerMtp
            | Self::GdnLayerParallel(_)
            | Self::GdnPrefill
            | Self::GdnPrefillShort => false,
            Self::KdaDecode
            | Self::KdaRecurrent
            | Self::KdaRecurrentParallel(_)
            | Self::KdaDeferred
            | Self::KdaDeferredLayer
            | Self::KdaDeferredParallel
            | Self::KdaDeferredLayerParallel
            | Self::KdaLayer
            | Self::KdaLayerMtp
            | Self::KdaLayerParallel(_)
            | Self::KdaPrefill
            | Self::KdaPrefillShort => true,
        }
    }

    /// Whether it is a prefill.
    pub fn is_chunked(self) -> bool {
        self.family().is_chunked()
    }

    /// Whether it takes several tokens, on states that wait.
    pub fn has_drafts_wait(self) -> bool {
        self.family().is_deferred() && self.family().is_parallel()
    }

    /// What a launch of the parallel formulation does with states.
    pub fn mode(self) -> Option<Mode> {
        match self {
            Self::GdnMtpParallel(mode)
            | Self::KdaRecurrentParallel(mode)
            | Self::GdnLayerParallel(mode)
            | Self::KdaLayerParallel(mode) => Some(mode),
            _ => None,
        }
    }

    /// Whether a block has one value head, whatever is around the recurrence, or all of a query/key head.
    #[cfg(test)]
    pub fn has_whole_blocks(self) -> bool {
        !matches!(
            self,
            Self::GdnLayerParallel(_)
                | Self::KdaLayerParallel(_)
                | Self::GdnDeferredLayerParallel
                | Self::KdaDeferredLayerParallel
        )
    }

    /// The same for views that are not 16-byte aligned.
    pub fn narrow(self) -> Self {
        match self {
            Self::GdnMtpParallel(Mode::Resume) => Self::GdnMtpParallel(Mode::NarrowResume),
            Self::KdaRecurrentParallel(Mode::Resume) => {
                Self::KdaRecurrentParallel(Mode::NarrowResume)
            }
            Self::GdnLayerParallel(Mode::Resume) => Self::GdnLayerParallel(Mode::NarrowResume),
            Self::KdaLayerParallel(Mode::Resume) => Self::KdaLayerParallel(Mode::NarrowResume),
            operator => operator,
        }
    }
}

/// What a launch of the parallel formulation does with states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// Reads them.
    Verify,
    /// Reads and writes them: an update or a commit.
    Update,
    /// Writes them, and goes on from there.
    Resume,
    /// The same on views that are not 16-byte aligned: two tiles a warp have no registers left for it.
    NarrowResume,
}

/// Which states a step that goes token by token keeps, where a choice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keeps {
    /// That after the last token: an update without previous tokens.
    Last,
    /// That after each token: snapshots or token slots, without previous tokens.
    Each,
    /// None, or that after the previous tokens.
    Other,
}

/// Kernels that compute the same: what remains to be chosen is the tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub operator: Operator,
    pub layout: StateLayout,
    /// bf16, f16 or f32.
    pub state: DType,
    pub k_dim: u32,
    pub v_dim: u32,
    /// HV / H.
    pub ratio: u32,
    /// T + T'
    pub tokens: u32,
    pub keeps: Keeps,
    /// Of a prefill: there is a norm.
    pub norm: bool,
}
