//! What is fixed for a layer, besides shapes.

use std::fmt;

/// What is fixed for a layer, besides shapes.
///
/// ```
/// use gated_delta::{HeadMap, Options, StateLayout};
///
/// let options = Options::default().state_layout(StateLayout::VLast).head_map(HeadMap::Tiled).null_slot(0);
/// assert!(options.qk_l2norm && options.scale.is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// Which dim of a state is contiguous.
    pub state_layout: StateLayout,
    /// Query/key head of a value head.
    pub head_map: HeadMap,
    /// Normalise q and k to unit length.
    pub qk_l2norm: bool,
    /// Factor of q; 1/√K where `None`.
    pub scale: Option<f32>,
    /// A slot that makes its row inactive, besides those out of range (vLLM's slot 0). As these do, of one token of
    /// [`States::per_token`](super::States::per_token) or a checkpoint it skips that store alone.
    pub null_slot: Option<u32>,
    /// How the tokens of a row are computed.
    pub formulation: Formulation,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            state_layout: StateLayout::KLast,
            head_map: HeadMap::Grouped,
            qk_l2norm: true,
            scale: None,
            null_slot: None,
            formulation: Formulation::Auto,
        }
    }
}

impl Options {
    /// With another [layout](StateLayout) of states than K-last.
    #[must_use]
    pub const fn state_layout(mut self, layout: StateLayout) -> Self {
        self.state_layout = layout;
        self
    }

    /// With another [head map](HeadMap) than grouped.
    #[must_use]
    pub const fn head_map(mut self, head_map: HeadMap) -> Self {
        self.head_map = head_map;
        self
    }

    /// Whether q and k are normalised; they are by default.
    #[must_use]
    pub const fn qk_l2norm(mut self, qk_l2norm: bool) -> Self {
        self.qk_l2norm = qk_l2norm;
        self
    }

    /// With another factor of q than 1/√K.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// With a slot that makes its row inactive.
    #[must_use]
    pub const fn null_slot(mut self, slot: u32) -> Self {
        self.null_slot = Some(slot);
        self
    }

    /// With a [formulation](Formulation) by name, for its promise, where the library is not to choose.
    #[must_use]
    pub const fn formulation(mut self, formulation: Formulation) -> Self {
        self.formulation = formulation;
        self
    }
}

/// Which dim of a state is contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateLayout {
    /// `[P, HV, V, K]` (others call it pretranspose or V-major).
    #[default]
    KLast,
    /// `[P, HV, K, V]`.
    VLast,
}

impl fmt::Display for StateLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KLast => "k_last",
            Self::VLast => "v_last",
        })
    }
}

/// Query/key head of a value head, for HV > H (GVA).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadMap {
    /// `hv / (HV / H)`.
    #[default]
    Grouped,
    /// `hv % H`, the order of GGUF files.
    Tiled,
}

/// How the tokens of a row are computed. Whatever it is, results do not depend on B, on other rows or on the variant.
/// [The guide](crate::guide::engines#formulations) says which promise is kept by which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Formulation {
    /// The library chooses the fastest, for all batch sizes alike, by what is fixed for a layer and by the form of the launch:
    ///
    /// - a prefill (`Chunked`) where a row may have more than 16 tokens, and where there are
    ///   [positions](super::Step::positions), [checkpoints](super::Step::checkpoints) or a [workspace](super::Step::workspace);
    /// - the tokens at once (`Parallel`) where a row may have 2 to 8 of them, new or previous, and tensor cores take the states:
    ///   K-last, bf16 or f16, K = 128 or, of GDN, 64, and none wanted after each token; with a convolution or a norm, HV/H up to 8, of
    ///   KDA 4, and above 1 on a GPU that has clusters of blocks (compute capability 9.0);
    /// - else token by token (`Recurrent`).
    ///
    /// How many tokens a row may have is T of dense rows, `max_tokens` of [packed](super::Step::packed) ones, and T' of previous
    /// ones; a commit takes what the step of its T' tokens took. Neither B nor what rows hold is looked at: launches whose rows are to
    /// agree say the same bound.
    ///
    /// With a [ring](super::Pending) it is `Parallel`, of bf16 states, where the ring says that drafts may come: T or R − N above
    /// 1, N above 8, `updates` in bf16, or a ring of inputs. So all of its steps and its flush agree, but for a step that only takes
    /// single tokens on a ring with room for more: one with a convolution and without a ring of inputs, or a norm of more value
    /// heads than drafts have kernels for. Who has such a one names `Recurrent`, in the flush too.
    ///
    /// [`Work::formulation`](crate::Work::formulation) says what a launch takes on a GPU with clusters: it has the bits of one that
    /// names that.
    #[default]
    Auto,
    /// Token by token in f32, up to 16 of them: with f32 states T tokens are T launches of one token, bit for bit.
    Recurrent,
    /// The tokens of a row at once, on tensor cores: K-last states in bf16 or f16 and at most 8 tokens, new or previous,
    /// without snapshots and token slots.
    Parallel,
    /// Any number of tokens in pieces of up to 64, on tensor cores: a prefill, with [`States::update`]. It takes a
    /// [workspace](super::Step::workspace), but on Hopper (compute capability 9.0) for rows of at most 64 tokens and elsewhere for
    /// rows of one.
    ///
    /// Within a piece products are of f16, summed in f32: finite input gives what the recurrence gives in f32, but for 1e-3 of
    /// the norms of q̂ and of the state, and not its bits. Where what tokens add to a state cancels, as with keys that resemble
    /// each other, β near 2 and no decay, it is 1e-3 of what is added up. An output depends on no
    /// later token, unless there is a NaN in that one's own inputs.
    ///
    /// Pieces end at multiples of 64 tokens of the sequence ([`Step::positions`](super::Step::positions)), states
    /// between them are f32, and a piece of one token has the bits of a decode of f32 states. So a prompt that is cut
    /// into launches at multiples of 64 keeps every bit with f32 states.
    ///
    /// [`States::update`]: super::States::update
    Chunked,
}
