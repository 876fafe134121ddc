//! A step, a commit, and what both are made of.

use super::gates::{GdnGates, KdaGates};
use super::layer::{Convolution, Norm};
use super::options::Options;
use super::pending::Pending;
use super::states::{States, Update};
use crate::tensor::Tensor;

/// Most tokens of a row in one launch, new or previous; a prefill has any number.
pub const MAX_TOKENS: usize = 16;

/// A step of a GDN layer (Gated DeltaNet, arXiv 2412.06464): see [`Step`].
pub type Gdn<'a> = Step<'a, GdnGates<'a>>;

/// A step of a KDA layer (Kimi Delta Attention, arXiv 2510.26692): see [`Step`].
pub type Kda<'a> = Step<'a, KdaGates<'a>>;

/// A commit of a GDN layer: see [`Commit`].
pub type GdnCommit<'a> = Commit<'a, GdnGates<'a>>;

/// A commit of a KDA layer: see [`Commit`].
pub type KdaCommit<'a> = Commit<'a, KdaGates<'a>>;

/// A decode, a verify, a resume or a prefill. T in 1..=16, in a prefill any number; K = V in {64, 128}, or, of GDN
/// token by token or in chunks, K = 96 and V = 192; HV a multiple of H.
///
/// With [`Step::packed`], the `[B, T, …]` tensors are `[1, total, …]`. Strides of rows, tokens and heads, of slots and
/// of snapshots are free, but what is written must not overlap itself; the innermost dim is contiguous. Views that are
/// not 16-byte aligned are taken, by a narrower path.
///
/// A row is inactive where one of its indices is out of range or the null slot: its part of `o` is zero, and it
/// touches no state. One whose bounds are out of range touches nothing at all, not even its part of `o`.
///
/// A row without a token ends with the state that it starts from, zeros where it is fresh: bit for bit it goes to the slot that the
/// row writes, and its window with it, unless that is the slot it is in; with previous tokens the kept ones are committed, and with
/// token slots it touches nothing. `o` of packed tokens before the first bound and behind the last one is zero.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Step<'a, G> {
    /// Inputs of the new tokens.
    pub inputs: Inputs<'a>,
    /// Gates of these tokens.
    pub gates: G,
    /// `[B, T, HV, V]`, bf16, f16 or f32, written.
    pub o: Tensor<'a>,
    /// Where states start and go.
    pub states: States<'a>,
    /// `[B, steps, HV, V, K]` or `[B, steps, HV, K, V]` with steps ≥ T, of the dtype of the pool: receives the state
    /// after every token, wherever else states go.
    pub snapshots: Option<Tensor<'a>>,
    /// Rows of different lengths, one behind the other.
    pub packed: Option<Packed<'a>>,
    /// Tokens of the last step, of which the accepted ones are committed first. Wants [`States::update`], and no
    /// snapshots.
    pub previous: Option<Previous<'a>>,
    /// A gated RMS norm of the outputs, where there is one.
    pub norm: Option<Norm<'a>>,
    /// `[B]`, i32, i64 or u32 (there are no tensors of bytes or bools): where it is not 0, the row starts from a state and
    /// a window of zeros. See [`Step::fresh`].
    pub fresh: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: tokens of the sequence before the row's first, of a prefill; without it, 0. See
    /// [`Step::positions`].
    pub positions: Option<Tensor<'a>>,
    /// States within rows that are kept, of a prefill.
    pub checkpoints: Option<Checkpoints<'a>>,
    /// Tokens that are not in the states yet: see [`Step::pending`].
    pub pending: Option<Pending<'a>>,
    /// f32, contiguous, 16-byte aligned, of at least [`Work::workspace_bytes`](crate::Work::workspace_bytes), written: see [`Step::workspace`].
    pub workspace: Option<Tensor<'a>>,
    /// What is fixed for a layer.
    pub options: Options,
}

/// States, and windows of a convolution, after every so many tokens of a sequence, for later ones to start from: prefix
/// caching. Each is bit for bit the final one of a prefill that ended there.
///
/// They go to the pool (and the windows) that the row's final state goes to. An entry of `slots` that is out of range
/// or the null slot skips that store alone; one that names the slot of another store of the launch is a race, which
/// [`Library::validate`](crate::Library::validate) finds.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Checkpoints<'a> {
    /// Tokens from one to the next, counted from the sequence's first: a multiple of 64.
    pub every: usize,
    /// `[B, C]`, i32, i64 or u32: entry j of a row takes its j-th multiple of `every` in this launch, the one at its
    /// last token included; those beyond C are not kept. The stride of rows is free.
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
        /// `[B, T, H, K]`, bf16, f16 or f32.
        q: Tensor<'a>,
        /// `[B, T, H, K]`, bf16, f16 or f32.
        k: Tensor<'a>,
        /// `[B, T, HV, V]`, bf16, f16 or f32.
        v: Tensor<'a>,
    },
    /// The projection that query, key and value are made of, by a short convolution.
    Conv(Convolution<'a>),
}

/// What tokens bring that are only committed: [`Inputs`] without what is read with.
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
        /// `[B, T', H, K]`, bf16, f16 or f32.
        k: Tensor<'a>,
        /// `[B, T', HV, V]`, bf16, f16 or f32.
        v: Tensor<'a>,
    },
    /// The projection at the [`Previous`] tokens, before its convolution: given where the new tokens come as [`Inputs::Conv`].
    #[non_exhaustive]
    X {
        /// `[B, T', D]`, of the dtype of the new tokens' x; strides of rows and tokens are free.
        x: Tensor<'a>,
    },
    /// Of a [`Commit`]: the convolution, whose x `[B, T', D]` is that of the tokens to commit.
    Conv(Convolution<'a>),
}

/// Rows of different lengths: the tokens of all of them along one dim.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Packed<'a> {
    /// `[B + 1]`, i32, i64 or u32: row b has the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`.
    pub cu_seqlens: Tensor<'a>,
    /// T, the upper bound of a row's length. Above 16 the step is a prefill, unless another
    /// [formulation](super::Formulation) is named. A longer row is out of range; in a prefill only where T is at most 64, which
    /// selects the launch of one kernel without a workspace. There a row of more than 64 tokens is out of range. A larger T of a
    /// prefill is a hint, and may be any number.
    pub max_tokens: usize,
}

/// Tokens of the last step, T' of each row, T' in 1..=16: the first `keep` of them advance the row's start state, which
/// is written to the write slot, rounded to the state's dtype; the new tokens start from it and write `o` alone.
///
/// Bit for bit a [`Commit`] and a verify that writes no state. Dense, with free strides, whether or not the new tokens
/// are packed; dtypes are those of the new tokens' tensors. After [`Inputs::Conv`] they are [`Stored::X`], and the window
/// after the kept tokens is written; else [`Stored::Kv`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Previous<'a> {
    /// What these tokens brought.
    pub stored: Stored<'a>,
    /// As the new tokens' `a` or `g`: `[B, T', HV]`, with KDA `[B, T', HV, K]`.
    pub gate: Tensor<'a>,
    /// As the new tokens' `b` or `beta`: `[B, T', HV]`.
    pub beta: Tensor<'a>,
    /// `[B]`, i32, i64 or u32, in 0..=T': tokens to commit. Where it is out of range, the row is inactive.
    pub keep: Tensor<'a>,
}

/// After a verify that wrote no state, the first `keep` of its T' tokens advance the states. T' in 1..=16; otherwise
/// as [`Step`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Commit<'a, G> {
    /// What these tokens brought: [`Stored::Kv`] or [`Stored::Conv`].
    pub stored: Stored<'a>,
    /// Gates of these tokens.
    pub gates: G,
    /// `[B]`, i32, i64 or u32, in 0..=T': tokens to commit. Where it is out of range, the row is inactive.
    pub keep: Tensor<'a>,
    /// Where states start and go.
    pub states: Update<'a>,
    /// `[B]`, as [`Step::fresh`](Step#structfield.fresh).
    pub fresh: Option<Tensor<'a>>,
    /// What is fixed for a layer.
    pub options: Options,
}

impl<'a, G> Step<'a, G> {
    /// A step of dense rows, with the default [`Options`].
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

    /// With the state after every token written to a tensor besides: [`Step::snapshots`](Step#structfield.snapshots).
    #[must_use]
    pub fn snapshots(mut self, snapshots: Tensor<'a>) -> Self {
        self.snapshots = Some(snapshots);
        self
    }

    /// Of rows of different lengths: `cu_seqlens` `[B + 1]`, and T, which no row is longer than. See [`Packed`].
    #[must_use]
    pub fn packed(mut self, cu_seqlens: Tensor<'a>, max_tokens: usize) -> Self {
        self.packed = Some(Packed {
            cu_seqlens,
            max_tokens,
        });
        self
    }

    /// After tokens of the last step: a resume. See [`Previous`].
    #[must_use]
    pub fn previous(mut self, previous: Previous<'a>) -> Self {
        self.previous = Some(previous);
        self
    }

    /// With a norm of the outputs, gated by z. See [`Norm`].
    #[must_use]
    pub fn norm(mut self, norm: Norm<'a>) -> Self {
        self.norm = Some(norm);
        self
    }

    /// With rows that start from a state and a window of zeros: those where `fresh` `[B]` is not 0.
    ///
    /// A fresh row's slot to read is not looked at, nor is `accepted`: the slot may hold anything, NaN too. The slot that it
    /// writes, by default that to read, makes it inactive as it does any row; it is written as it is for any row, with
    /// `keep` = 0 by zeros, and after a launch that writes no state the row is as fresh as before.
    #[must_use]
    pub fn fresh(mut self, fresh: Tensor<'a>) -> Self {
        self.fresh = Some(fresh);
        self
    }

    /// With states that wait: tokens stay in a ring beside them, and a state is written once in several steps. Of one token, of bf16
    /// states up to 8 (drafts), K-last, with [`States::update`] in place. See [`Pending`].
    ///
    /// A row that folds is, bit for bit, a [`Flush`](super::Flush) and then the step. A fresh row writes a state of zeros.
    #[must_use]
    pub fn pending(mut self, pending: Pending<'a>) -> Self {
        self.pending = Some(pending);
        self
    }

    /// A prefill of which rows go on: `positions` `[B]` tokens of its sequence came before each.
    ///
    /// Pieces, and so bits, and [`Step::checkpoints`] are counted from the sequence's first token. Without positions
    /// every row begins its sequence, or is counted as if it did.
    #[must_use]
    pub fn positions(mut self, positions: Tensor<'a>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// A prefill that keeps the state (and window) after every `every` tokens of a sequence, a multiple of 64, in
    /// `slots` `[B, C]`. See [`Checkpoints`].
    #[must_use]
    pub fn checkpoints(mut self, every: usize, slots: Tensor<'a>) -> Self {
        self.checkpoints = Some(Checkpoints { every, slots });
        self
    }

    /// A prefill with memory to work in: f32, of any dims, contiguous and 16-byte aligned, of at least
    /// [`Work::workspace_bytes`](crate::Work::workspace_bytes).
    ///
    /// Its contents mean nothing before or after a launch. It belongs to one stream at a time, and has to live as long
    /// as graphs that captured a launch with it. Where T, or the `total` of packed rows, is at most 64 none is needed,
    /// nor where T of packed rows [promises](Packed::max_tokens) so much; one that is given is not used then.
    #[must_use]
    pub fn workspace(mut self, workspace: Tensor<'a>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// With what is fixed for the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}

impl<'a> Inputs<'a> {
    /// Query `[B, T, H, K]`, key `[B, T, H, K]` and value `[B, T, HV, V]`, each bf16, f16 or f32.
    #[must_use]
    pub fn qkv(q: Tensor<'a>, k: Tensor<'a>, v: Tensor<'a>) -> Self {
        Self::Qkv { q, k, v }
    }

    /// The layer's projection, of which a convolution makes query, key and value.
    #[must_use]
    pub fn conv(convolution: Convolution<'a>) -> Self {
        Self::Conv(convolution)
    }
}

impl<'a> Stored<'a> {
    /// Key `[B, T', H, K]` and value `[B, T', HV, V]`, each bf16, f16 or f32.
    #[must_use]
    pub fn kv(k: Tensor<'a>, v: Tensor<'a>) -> Self {
        Self::Kv { k, v }
    }

    /// x `[B, T', D]` of [`Previous`] tokens, before the convolution of the new ones.
    #[must_use]
    pub fn x(x: Tensor<'a>) -> Self {
        Self::X { x }
    }

    /// The convolution of a [`Commit`], of x `[B, T', D]`.
    #[must_use]
    pub fn conv(convolution: Convolution<'a>) -> Self {
        Self::Conv(convolution)
    }
}

impl<'a> Previous<'a> {
    /// Tokens of the last step, of which `keep` are committed; `gate` and `beta` as the new tokens' gates have them.
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
    /// A commit of the first `keep` tokens, with the default [`Options`].
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

    /// With rows that start from a state and a window of zeros: those where `fresh` `[B]` is not 0. As [`Step::fresh`].
    #[must_use]
    pub fn fresh(mut self, fresh: Tensor<'a>) -> Self {
        self.fresh = Some(fresh);
        self
    }

    /// With what is fixed for the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}
