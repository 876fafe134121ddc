//! Settings of a layer other than its shapes.

use std::fmt;

/// Settings of a layer other than its shapes. They are the same in every launch of the layer.
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
    /// Order of a state's dims in memory.
    pub state_layout: StateLayout,
    /// Map from value heads to query/key heads.
    pub head_map: HeadMap,
    /// Normalise q and k to unit length (default: `true`).
    pub qk_l2norm: bool,
    /// Factor of q. `None`: 1/√K.
    pub scale: Option<f32>,
    /// A slot that makes its row inactive, as an index out of range does (vLLM's slot 0). If a token slot of
    /// [`States::per_token`](super::States::per_token) or a checkpoint has it, only that store is skipped. Default: `None`.
    pub null_slot: Option<u32>,
    /// Algorithm for the tokens of a row.
    pub formulation: Formulation,
    /// Number of tokens of a split of long rows in a prefill: see [`Options::split`]. Default: `None`.
    pub split: Option<u32>,
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
            split: None,
        }
    }
}

impl Options {
    /// Sets the [layout](StateLayout) of states, by default K-last.
    #[must_use]
    pub const fn state_layout(mut self, layout: StateLayout) -> Self {
        self.state_layout = layout;
        self
    }

    /// Sets the [head map](HeadMap), by default grouped.
    #[must_use]
    pub const fn head_map(mut self, head_map: HeadMap) -> Self {
        self.head_map = head_map;
        self
    }

    /// Sets whether q and k are normalised, by default `true`.
    #[must_use]
    pub const fn qk_l2norm(mut self, qk_l2norm: bool) -> Self {
        self.qk_l2norm = qk_l2norm;
        self
    }

    /// Sets the factor of q, by default 1/√K.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets a slot that makes its row inactive.
    #[must_use]
    pub const fn null_slot(mut self, slot: u32) -> Self {
        self.null_slot = Some(slot);
        self
    }

    /// Names a [formulation](Formulation), to get its guarantees. By default the library chooses.
    #[must_use]
    pub const fn formulation(mut self, formulation: Formulation) -> Self {
        self.formulation = formulation;
        self
    }

    /// Splits the rows of a prefill at multiples of `tokens` tokens of their sequences
    /// ([`Step::positions`](super::Step::positions)). `tokens` is a multiple of 64. All splits of a row run in parallel, with
    /// about three times the work. This is for few heads and long rows, which leave most of a GPU idle; docs/prefill.md has
    /// times. It requires K = 128 and a larger [workspace](super::Step::workspace). Steps that are no prefill ignore the option,
    /// and so do GPUs other than Hopper (compute capability 9.0).
    ///
    /// Results depend only on the positions of tokens, as without splits: with f32 states, a prompt that is cut into launches at
    /// multiples of `tokens` keeps every bit. The state at the start of a split has an error of up to 2⁻²⁴ of the largest state
    /// within the previous split, in addition to the errors of any prefill.
    #[must_use]
    pub const fn split(mut self, tokens: u32) -> Self {
        self.split = Some(tokens);
        self
    }
}

/// Order of a state's dims in memory; the last one is contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateLayout {
    /// Pools are `[P, HV, V, K]`; other libraries call this pretranspose or V-major.
    #[default]
    KLast,
    /// Pools are `[P, HV, K, V]`.
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

/// Map from value heads to query/key heads, for HV > H (GVA).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadMap {
    /// Value head hv has query/key head `hv / (HV / H)`.
    #[default]
    Grouped,
    /// Value head hv has query/key head `hv % H`, the order of GGUF files.
    Tiled,
}

/// Algorithm for the tokens of a row. In every formulation results do not depend on B, on other rows or on the variant. [The
/// guide](crate::guide::engines#formulations) lists the guarantees of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Formulation {
    /// The library chooses the fastest formulation by the layer's settings and the form of the launch. The choice is the same for all batch
    /// sizes:
    ///
    /// - `Chunked`, a prefill, if a row may have more than 16 tokens, or if there are [positions](super::Step::positions),
    ///   [checkpoints](super::Step::checkpoints) or a [workspace](super::Step::workspace);
    /// - `Parallel` if a row may have 2 to 16 tokens, new or previous (f32 states: 3 to 16, 16-bit V-last states: 9 to 16), with K = 128
    ///   (GDN: also 64), and no state is kept after each token. With a convolution or a norm a row may have 8 tokens, 16-bit states are
    ///   K-last, HV/H is at most 8 (KDA: 4), and HV/H above 1 needs a GPU with clusters of blocks (compute capability 9.0);
    /// - otherwise `Recurrent`.
    ///
    /// The number of tokens that a row may have is T of dense rows, `max_tokens` of [packed](super::Step::packed) rows, and T' of
    /// previous tokens. A commit has the choice of a step of its T' tokens. The choice ignores B and the actual lengths of rows.
    /// Launches whose rows must have equal bits therefore have to state the same bound.
    ///
    /// With a [ring](super::Pending) on bf16 states, the choice is `Parallel` if the ring has room for drafts: T or R − N above
    /// 1, N above 8, `updates` in bf16, or a ring of inputs. All steps of the ring then agree with its flush. There is one
    /// exception: a layer that can take only single tokens, on a ring with room for more. Such a layer has a convolution without
    /// a ring of inputs, or a norm of more value heads than the kernels for drafts take. For such a layer, name `Recurrent`, also
    /// in the flush.
    ///
    /// [`Work::formulation`](crate::Work::formulation) returns the choice for a launch on a GPU with clusters. The launch has the bits of
    /// one that names this formulation.
    #[default]
    Auto,
    /// Token by token in f32, up to 16 tokens. With f32 states, a launch of T tokens has the bits of T launches of one token.
    Recurrent,
    /// All tokens of a row together, on tensor cores: at most 16, new or previous, in sets of up to 8. The first 8 of more new tokens
    /// have the bits of a launch of 8 on f32 states. With a convolution or a norm a row has at most 8 tokens, and 16-bit states
    /// are K-last. Snapshots and token slots are not available.
    Parallel,
    /// Chunks of up to 64 tokens, on tensor cores: a prefill of any number of tokens, with [`States::update`]. A
    /// [workspace](super::Step::workspace) is needed for rows of more than 64 tokens on Hopper (compute capability 9.0), and for rows of
    /// more than one token on other GPUs.
    ///
    /// Products within a chunk have f16 operands and f32 accumulators. For finite inputs, results differ from the f32 recurrence
    /// by up to 1e-3 of the norms of q̂ and of the state. If the updates of tokens cancel each other (similar keys, β near 2, no
    /// decay), the difference is up to 1e-3 of the sum of their magnitudes. An output depends on no later token, unless the
    /// inputs of that token have a NaN.
    ///
    /// Chunks end at multiples of 64 tokens of the sequence ([`Step::positions`](super::Step::positions)). States between chunks
    /// are f32. A chunk of one token has the bits of a decode of f32 states. With f32 states, a prompt that is cut into launches
    /// at multiples of 64 therefore keeps every bit.
    ///
    /// [`States::update`]: super::States::update
    Chunked,
}
