//! Steps and commits, and the arguments that both are built from.

use super::gates::{GdnGates, KdaGates};
use super::layer::{Convolution, Norm};
use super::options::Options;
use super::pending::Pending;
use super::states::{States, Update};
use crate::tensor::Tensor;

/// Largest number of tokens of a row in one launch, new or previous. A prefill has no such limit.
pub const MAX_TOKENS: usize = 16;

/// A step of a GDN layer (Gated DeltaNet, arXiv 2412.06464): see [`Step`].
pub type Gdn<'a> = Step<'a, GdnGates<'a>>;

/// A step of a KDA layer (Kimi Delta Attention, arXiv 2510.26692): see [`Step`].
pub type Kda<'a> = Step<'a, KdaGates<'a>>;

/// A commit of a GDN layer: see [`Commit`].
pub type GdnCommit<'a> = Commit<'a, GdnGates<'a>>;

/// A commit of a KDA layer: see [`Commit`].
pub type KdaCommit<'a> = Commit<'a, KdaGates<'a>>;

/// A decode, a verify, a resume or a prefill. T is in 1..=16; in a prefill it is any number. K = V is 64 or 128. GDN also takes
/// K = 96 with V = 192, in the recurrent and chunked formulations. HV is a multiple of H.
///
/// For each token and value head, with the state S `[V, K]` in f32:
///
/// ```text
/// k̂ = k · rsqrt(Σk² + 1e-6)    q̂ = q · rsqrt(Σq² + 1e-6) · scale    (without qk_l2norm: k̂ = k, q̂ = q · scale)
/// S ← S diag(α)                α = exp(log decay): one per head in GDN, one per key channel in KDA
/// δ = β (v − S k̂)
/// S ← S + δ k̂ᵀ
/// o = S q̂
/// ```
///
/// A 16-bit state is rounded when it is stored. `o` is computed from the state before rounding.
///
/// With [`Step::packed`], the `[B, T, …]` tensors are `[1, total, …]`. The innermost dim is contiguous. Strides of rows, tokens, heads,
/// slots and snapshots are free, but elements of a written tensor must not overlap. Views that are not 16-byte aligned are accepted, and
/// take a narrower path.
///
/// A row is inactive if one of its indices is out of range or names the null slot. Its part of `o` is then zero, and the row
/// touches no state. A packed row whose bounds are out of range touches nothing at all, not even its part of `o`.
///
/// A row without tokens ends with its start state, or with zeros if it is fresh. If the row reads one slot and writes another,
/// the state and the window are copied bit for bit. With previous tokens, the kept previous tokens are committed. With token
/// slots, a row without tokens touches nothing. `o` of packed tokens before the first bound and after the last bound is zero.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Step<'a, G> {
    /// Inputs of the new tokens.
    pub inputs: Inputs<'a>,
    /// Gates of the new tokens.
    pub gates: G,
    /// Output `[B, T, HV, V]`, bf16, f16 or f32, written.
    pub o: Tensor<'a>,
    /// States that the rows start from, and the places to write their new states to.
    pub states: States<'a>,
    /// Tensor for the state after every token, `[B, steps, HV, V, K]` (K-last) or `[B, steps, HV, K, V]` (V-last) with steps ≥ T,
    /// of the pool's dtype, written. It is independent of `states`.
    pub snapshots: Option<Tensor<'a>>,
    /// Bounds of rows of different lengths, whose tokens are concatenated.
    pub packed: Option<Packed<'a>>,
    /// Tokens of the last step. The accepted tokens are committed before the new tokens. Requires [`States::update`], and
    /// excludes snapshots.
    pub previous: Option<Previous<'a>>,
    /// Gated RMS norm of the outputs.
    pub norm: Option<Norm<'a>>,
    /// Flags `[B]`, i32, i64 or u32 (tensors of bytes or bools do not exist). A row whose flag is not 0 starts from a state and a window of
    /// zeros. See [`Step::fresh`].
    pub fresh: Option<Tensor<'a>>,
    /// Positions `[B]` of a prefill, i32, i64 or u32: the number of tokens of the sequence before the row's first. Default: 0. See
    /// [`Step::positions`].
    pub positions: Option<Tensor<'a>>,
    /// States within the rows of a prefill to keep, for prefix caching.
    pub checkpoints: Option<Checkpoints<'a>>,
    /// Rings of tokens whose updates are not yet in the states: see [`Step::pending`].
    pub pending: Option<Pending<'a>>,
    /// Scratch memory of a prefill: f32, contiguous, 16-byte aligned, of at least [`Work::workspace_bytes`](crate::Work::workspace_bytes),
    /// written. See [`Step::workspace`].
    pub workspace: Option<Tensor<'a>>,
    /// Settings that are the same in every launch of the layer.
    pub options: Options,
}

/// Checkpoints of a prefill: the states (and the convolution's windows) after every `every` tokens of a sequence, from which
/// later sequences may start (prefix caching). Each checkpoint has the bits of the final state of a prefill that ends there.
///
/// Checkpoints are written to the pool (and the windows) of the rows' final states. An entry of `slots` that is out of range or
/// names the null slot skips its store. An entry that names the slot of another store of the launch is a race;
/// [`Library::validate`](crate::Library::validate) finds such a race.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Checkpoints<'a> {
    /// Distance between checkpoints in tokens, counted from the first token of the sequence: a multiple of 64.
    pub every: usize,
    /// Slots `[B, C]`, i32, i64 or u32. Entry j of a row is for the row's j-th multiple of `every` in this launch; a multiple at the row's
    /// last token counts. Multiples after the C-th are not kept. The stride of rows is free.
    pub slots: Tensor<'a>,
}

/// Inputs of the new tokens of a step.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Inputs<'a> {
    /// Query, key and value.
    #[non_exhaustive]
    Qkv {
        /// Queries `[B, T, H, K]`, bf16, f16 or f32.
        q: Tensor<'a>,
        /// Keys `[B, T, H, K]`, bf16, f16 or f32.
        k: Tensor<'a>,
        /// Values `[B, T, HV, V]`, bf16, f16 or f32.
        v: Tensor<'a>,
    },
    /// The layer's projection, from which a short convolution computes query, key and value.
    Conv(Convolution<'a>),
}

/// Inputs of tokens that are committed without an output: [`Inputs`] without queries.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Stored<'a> {
    /// Key and value.
    #[non_exhaustive]
    Kv {
        /// Keys `[B, T', H, K]`, bf16, f16 or f32.
        k: Tensor<'a>,
        /// Values `[B, T', HV, V]`, bf16, f16 or f32.
        v: Tensor<'a>,
    },
    /// The projection of [`Previous`] tokens, before its convolution. Required if the new tokens come as [`Inputs::Conv`].
    #[non_exhaustive]
    X {
        /// Projection `[B, T', D]`, of the dtype of the new tokens' x. Strides of rows and tokens are free.
        x: Tensor<'a>,
    },
    /// The convolution of a [`Commit`], with the projection x `[B, T', D]` of the tokens to commit.
    Conv(Convolution<'a>),
}

/// Rows of different lengths, whose tokens are concatenated along one dim.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Packed<'a> {
    /// Bounds `[B + 1]`, i32, i64 or u32: row b has the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`.
    pub cu_seqlens: Tensor<'a>,
    /// T, the upper bound of a row's length. With T above 16 the step is a prefill, unless another
    /// [formulation](super::Formulation) is named. Except in a prefill, a row of more than T tokens is out of range. On Hopper, a
    /// prefill with T up to 64 is one kernel without a workspace, and a row of more than 64 tokens is out of range there. A
    /// larger T of a prefill is a hint, and may be any number.
    pub max_tokens: usize,
}

/// Tokens of the last step: T' of each row, with T' in 1..=16. The first `keep` of them advance the row's start state. This state is
/// rounded to the pool's dtype and written to the write slot. The new tokens start from it, and write only `o`.
///
/// Results have the bits of a [`Commit`] followed by a verify that writes no state. The tensors are dense with free strides,
/// whether or not the new tokens are packed, and have the dtypes of the new tokens' tensors. If the new tokens come as
/// [`Inputs::Conv`], the previous tokens are [`Stored::X`], and the window after the kept tokens is written. Otherwise the
/// previous tokens are [`Stored::Kv`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Previous<'a> {
    /// Inputs of the previous tokens.
    pub stored: Stored<'a>,
    /// Gates of the previous tokens, in the form of the new tokens' `a` or `g`: GDN `[B, T', HV]`, KDA `[B, T', HV, K]`.
    pub gate: Tensor<'a>,
    /// Betas `[B, T', HV]` of the previous tokens, in the form of the new tokens' `b` or `beta`.
    pub beta: Tensor<'a>,
    /// Number of tokens to commit, `[B]`, i32, i64 or u32, in 0..=T'. A row whose number is out of range is inactive.
    pub keep: Tensor<'a>,
}

/// A launch that advances the states by the first `keep` of T' tokens, after a verify that wrote no state. T' is in 1..=16. Other rules are
/// those of [`Step`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Commit<'a, G> {
    /// Inputs of the tokens to commit: [`Stored::Kv`] or [`Stored::Conv`].
    pub stored: Stored<'a>,
    /// Gates of the tokens to commit.
    pub gates: G,
    /// Number of tokens to commit, `[B]`, i32, i64 or u32, in 0..=T'. A row whose number is out of range is inactive.
    pub keep: Tensor<'a>,
    /// States that the rows start from, and the places to write their new states to.
    pub states: Update<'a>,
    /// Flags `[B]` of fresh rows, as in [`Step::fresh`](Step#structfield.fresh).
    pub fresh: Option<Tensor<'a>>,
    /// Settings that are the same in every launch of the layer.
    pub options: Options,
}

impl<'a, G> Step<'a, G> {
    /// Creates a step of dense rows with the default [`Options`].
    pub fn new(inputs: Inputs<'a>, gates: G, o: Tensor<'a>, states: impl Into<States<'a>>) -> Self {
        Self {
            inputs,
            gates,
            o,
            states: states.into(),
            snapshots: None,
            packed: None,
            previous: None,
            norm: None,
            fresh: None,
            positions: None,
            checkpoints: None,
            pending: None,
            workspace: None,
            options: Options::default(),
        }
    }

    /// Also writes the state after every token to a tensor: [`Step::snapshots`](Step#structfield.snapshots).
    #[must_use]
    pub fn snapshots(mut self, snapshots: Tensor<'a>) -> Self {
        self.snapshots = Some(snapshots);
        self
    }

    /// Sets rows of different lengths: their bounds `cu_seqlens` `[B + 1]`, and the upper bound T of a row's length. See [`Packed`].
    #[must_use]
    pub fn packed(mut self, cu_seqlens: Tensor<'a>, max_tokens: usize) -> Self {
        self.packed = Some(Packed {
            cu_seqlens,
            max_tokens,
        });
        self
    }

    /// Commits accepted tokens of the last step first, which makes the step a resume. See [`Previous`].
    #[must_use]
    pub fn previous(mut self, previous: Previous<'a>) -> Self {
        self.previous = Some(previous);
        self
    }

    /// Adds a norm of the outputs, gated by z. See [`Norm`].
    #[must_use]
    pub fn norm(mut self, norm: Norm<'a>) -> Self {
        self.norm = Some(norm);
        self
    }

    /// Marks rows that start from a state and a window of zeros: those whose `fresh` `[B]` is not 0.
    ///
    /// The read slot and `accepted` of a fresh row are ignored; the slot may hold anything, even NaN. The write slot (by default the read
    /// slot) is checked and written as for any row: an index out of range makes the row inactive, and `keep` = 0 writes zeros. After a
    /// launch that writes no state, the row is as fresh as before.
    #[must_use]
    pub fn fresh(mut self, fresh: Tensor<'a>) -> Self {
        self.fresh = Some(fresh);
        self
    }

    /// Defers the write-back of states. Updates of tokens stay in a ring next to the states, and a state is written once in several steps.
    /// A step has one token, or up to 8 (drafts) on bf16 states. States are K-last, with [`States::update`] in place. See [`Pending`].
    ///
    /// A row that flushes its ring has the bits of a [`Flush`](super::Flush) followed by the step. A fresh row writes a state of zeros.
    #[must_use]
    pub fn pending(mut self, pending: Pending<'a>) -> Self {
        self.pending = Some(pending);
        self
    }

    /// Sets `positions` `[B]`, the number of tokens of the sequence before each row. The step becomes a prefill.
    ///
    /// Chunks (and therefore the bits of results) and [`Step::checkpoints`] are counted from the first token of the sequence. Without
    /// positions every row counts as the beginning of its sequence.
    #[must_use]
    pub fn positions(mut self, positions: Tensor<'a>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// Keeps the state (and window) after every `every` tokens of a sequence, a multiple of 64, in `slots` `[B, C]`. The step becomes a
    /// prefill. See [`Checkpoints`].
    #[must_use]
    pub fn checkpoints(mut self, every: usize, slots: Tensor<'a>) -> Self {
        self.checkpoints = Some(Checkpoints { every, slots });
        self
    }

    /// Sets the scratch memory of a prefill: f32 of any dims, contiguous and 16-byte aligned, of at least
    /// [`Work::workspace_bytes`](crate::Work::workspace_bytes). The step becomes a prefill.
    ///
    /// The contents mean nothing before or after a launch. A workspace belongs to one stream at a time, and has to outlive graphs
    /// that captured a launch with it. On Hopper, a launch without [splits](Options::split) needs no workspace if T, or the
    /// `total` of packed rows, is at most 64, or if T of packed rows [promises](Packed::max_tokens) at most 64. On other GPUs the
    /// bound is 1 in place of 64, and with a norm and V above 64 a workspace is needed for any T. A workspace that is not needed
    /// is not used.
    #[must_use]
    pub fn workspace(mut self, workspace: Tensor<'a>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// Sets the options of the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}

impl<'a> Inputs<'a> {
    /// Creates inputs from queries `[B, T, H, K]`, keys `[B, T, H, K]` and values `[B, T, HV, V]`, each bf16, f16 or f32.
    #[must_use]
    pub fn qkv(q: Tensor<'a>, k: Tensor<'a>, v: Tensor<'a>) -> Self {
        Self::Qkv { q, k, v }
    }

    /// Creates inputs from the layer's projection. A convolution computes query, key and value from it.
    #[must_use]
    pub fn conv(convolution: Convolution<'a>) -> Self {
        Self::Conv(convolution)
    }
}

impl<'a> Stored<'a> {
    /// Creates inputs from keys `[B, T', H, K]` and values `[B, T', HV, V]`, each bf16, f16 or f32.
    #[must_use]
    pub fn kv(k: Tensor<'a>, v: Tensor<'a>) -> Self {
        Self::Kv { k, v }
    }

    /// Creates inputs of [`Previous`] tokens from their projection x `[B, T', D]`, to which the convolution of the new tokens is applied.
    #[must_use]
    pub fn x(x: Tensor<'a>) -> Self {
        Self::X { x }
    }

    /// Creates inputs of a [`Commit`] from a convolution of x `[B, T', D]`.
    #[must_use]
    pub fn conv(convolution: Convolution<'a>) -> Self {
        Self::Conv(convolution)
    }
}

impl<'a> Previous<'a> {
    /// Creates previous tokens, of which the first `keep` are committed. `gate` and `beta` have the form of the new tokens' gates.
    #[must_use]
    pub fn new(stored: Stored<'a>, gate: Tensor<'a>, beta: Tensor<'a>, keep: Tensor<'a>) -> Self {
        Self {
            stored,
            gate,
            beta,
            keep,
        }
    }
}

impl<'a, G> Commit<'a, G> {
    /// Creates a commit of the first `keep` tokens, with the default [`Options`].
    #[must_use]
    pub fn new(stored: Stored<'a>, gates: G, keep: Tensor<'a>, states: Update<'a>) -> Self {
        Self {
            stored,
            gates,
            keep,
            states,
            fresh: None,
            options: Options::default(),
        }
    }

    /// Marks rows that start from a state and a window of zeros: those whose `fresh` `[B]` is not 0. See [`Step::fresh`].
    #[must_use]
    pub fn fresh(mut self, fresh: Tensor<'a>) -> Self {
        self.fresh = Some(fresh);
        self
    }

    /// Sets the options of the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}
