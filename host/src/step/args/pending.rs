//! Deferred write-back: updates of tokens stay in a ring next to each state, and are flushed into the state every few steps.

use gated_delta_kernels::deferred;

use super::options::{Formulation, Options};
use super::states::Update;
use crate::tensor::Tensor;
use crate::tensor_checks::{Named, named, optional};

/// Largest number of pending tokens of a slot with [`Formulation::Recurrent`].
pub const MAX_PENDING: usize = deferred::MAX_PENDING as usize;

/// Largest number of pending tokens of a slot with [`Formulation::Parallel`], the formulation of drafts.
pub const MAX_PENDING_DRAFTS: usize = deferred::MAX_PENDING_DRAFTS as usize;

/// Pending tokens: their outputs are done, and their updates are not yet in the states of their slots. Every slot has a ring of R entries.
/// `len` and `base` say which entries of a row are pending.
///
/// The entry of a token is (k, u, log α), and a flush computes S ← S diag(α) + u kᵀ. k is the key as given, or as the convolution made it.
/// (If a key is normalised and Σk² is outside the range of f32, the stored k is multiplied by a power of two.) u = δ · rsqrt(Σk² + 1e-6),
/// or u = δ if keys are not normalised, with δ = β (v − S k̂). Rings have the slots of the states. Entries that are not pending may hold
/// anything, even NaN.
///
/// Only the caller's `len` and `base` say which entries are pending. A step reads both. If [`Ring::flushes`] says so, the step first
/// flushes the pending tokens into the state. It then stores its T tokens in the entries after the pending ones. The caller counts the
/// first `kept` of these tokens as pending, by [`Ring::after`] on the host or, on the device, by
///
/// ```text
/// flushes = len + T > N       base' = (flushes ? base + len : base) mod R       len' = (flushes ? 0 : len) + kept
/// ```
///
/// With [`Formulation::Recurrent`], a step has one token, N is at most 8, and R = N + 1 is enough. With [`Formulation::Parallel`], a step
/// has up to 8 tokens (*drafts*), states are K-last bf16, and N is at most 16. [`Formulation::Auto`] is `Parallel` for every launch of a
/// ring that has room for drafts: N above 8, R above N + 1, `updates` in bf16, or `inputs`.
///
/// A token is rejected by not counting it. With [`inputs`](Self::inputs) this holds for a layer with a convolution too: a slot's window is
/// then written together with its state, and x of the later tokens is in the ring. Without `inputs` every token moves the window, and a
/// caller that rejects a token has to restore the window.
///
/// For a [fresh](super::Step::fresh) row `len` is taken as 0, whatever the tensor holds.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Pending<'a> {
    /// Ring of keys `[P, H, R, K]`, of the dtype of k, or f32 if a convolution makes k; written. R is at least N + T and below 65536. All
    /// rings are contiguous except for the stride of slots. Slots are 16-byte aligned (those of GDN's `decays` 4-byte aligned).
    pub keys: Tensor<'a>,
    /// Ring of updates `[P, HV, R, V]`, f32, with drafts also bf16; written.
    pub updates: Tensor<'a>,
    /// Ring of log decays, GDN `[P, HV, R]`, KDA `[P, HV, R, K]`, f32; written.
    pub decays: Tensor<'a>,
    /// Number of pending tokens `[B]` of the row's slot, i32, i64 or u32, in 0..=N. A row whose number is out of range is inactive.
    pub len: Tensor<'a>,
    /// Entry of the first pending token `[B]`, i32, i64 or u32, below R. A row whose entry is out of range is inactive.
    pub base: Tensor<'a>,
    /// Ring of the convolution's inputs x `[P, R, D]`, of the dtype of x; written. Only for drafts with a convolution, and required there.
    pub inputs: Option<Tensor<'a>>,
    /// N, the largest number of pending tokens of a slot: T..=8, with drafts T..=16.
    pub most: usize,
}

/// A launch that flushes the pending tokens of every row into its state. It comes before a state is copied, or read by a launch without the
/// ring. Afterwards no token of these rows is pending.
///
/// The states have the bits of a step of the same ring that flushes as many tokens. If the step or the flush names a [`Formulation`], both
/// have to name the same one. The dims of `pending.decays` decide between GDN and KDA.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Flush<'a> {
    /// States to update. Each row writes the slot that it reads.
    pub states: Update<'a>,
    /// Rings to flush.
    pub pending: Pending<'a>,
    /// Windows `[P, D, W − 1]`, written in the slots of the states with the last inputs of the flushed tokens. Required if `pending` has
    /// [`inputs`](Pending::inputs), otherwise not allowed. The rules are those of [`Convolution::windows`](super::Convolution::windows).
    pub windows: Option<Tensor<'a>>,
    /// Settings that are the same in every launch of the layer.
    pub options: Options,
}

/// The tensors that every [`Pending`] has, by name.
#[derive(Clone, Copy, Debug)]
pub struct Rings<'a> {
    /// Keys `[P, H, R, K]`: see [`Pending::keys`].
    pub keys: Tensor<'a>,
    /// Updates `[P, HV, R, V]`: see [`Pending::updates`].
    pub updates: Tensor<'a>,
    /// Log decays, GDN `[P, HV, R]`, KDA `[P, HV, R, K]`: see [`Pending::decays`].
    pub decays: Tensor<'a>,
    /// Number of pending tokens `[B]`: see [`Pending::len`].
    pub len: Tensor<'a>,
    /// Entry of the first pending token `[B]`: see [`Pending::base`].
    pub base: Tensor<'a>,
}

/// Pending tokens of a slot: an element of [`Pending::len`], and the one of [`Pending::base`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of pending tokens.
    pub len: usize,
    /// Entry of the first one.
    pub base: usize,
}

/// Size of a slot's ring. Its functions are the rules by which the kernels read `len` and `base`, and by which the caller counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// N, the largest number of pending tokens: [`Pending::most`].
    pub most: usize,
    /// R, the number of entries.
    pub entries: usize,
}

impl Ring {
    /// Whether a step of `tokens` tokens flushes a row that has `len` pending tokens.
    #[must_use]
    pub const fn flushes(self, len: usize, tokens: usize) -> bool {
        len.saturating_add(tokens) > self.most
    }

    /// The row's count after a step of `tokens` tokens, of which the first `kept` stay.
    #[must_use]
    pub const fn after(self, before: Count, tokens: usize, kept: usize) -> Count {
        let Count { len, base } = before;
        if self.flushes(len, tokens) {
            let base = match base.saturating_add(len).checked_rem(self.entries) {
                Some(base) => base,
                None => 0,
            };
            Count { len: kept, base }
        } else {
            let len = len.saturating_add(kept);
            Count { len, base }
        }
    }
}

impl Formulation {
    /// The largest N of this formulation. [`Formulation::Auto`] has the limit that holds for any state; for bf16 states its limit is
    /// [`MAX_PENDING_DRAFTS`].
    #[must_use]
    pub const fn max_pending(self) -> usize {
        match self {
            Self::Parallel => MAX_PENDING_DRAFTS,
            _ => MAX_PENDING,
        }
    }
}

impl<'a> Pending<'a> {
    /// Creates the argument from its tensors. At most 8 tokens are pending.
    #[must_use]
    pub fn new(rings: Rings<'a>) -> Self {
        let Rings {
            keys,
            updates,
            decays,
            len,
            base,
        } = rings;
        Self {
            keys,
            updates,
            decays,
            len,
            base,
            inputs: None,
            most: MAX_PENDING,
        }
    }

    /// Sets the ring of the convolution's inputs: see [`Self::inputs`].
    #[must_use]
    pub fn inputs(mut self, inputs: Tensor<'a>) -> Self {
        self.inputs = Some(inputs);
        self
    }

    /// Sets N, the largest number of pending tokens; by default 8.
    #[must_use]
    pub fn most(mut self, most: usize) -> Self {
        self.most = most;
        self
    }

    /// The tensors with their names, except `inputs`.
    pub(crate) fn named(&'a self) -> [Named<'a>; 5] {
        [
            named("keys", &self.keys),
            named("updates", &self.updates),
            named("decays", &self.decays),
            self.named_len(),
            self.named_base(),
        ]
    }

    pub(crate) fn named_inputs(&'a self) -> Option<Named<'a>> {
        optional("inputs", &self.inputs)
    }

    pub(crate) fn named_len(&'a self) -> Named<'a> {
        named("pending len", &self.len)
    }

    pub(crate) fn named_base(&'a self) -> Named<'a> {
        named("pending base", &self.base)
    }

    /// Size of a ring entry in bytes, over all heads.
    pub(crate) fn entry_bytes(&self) -> u64 {
        fn of<const N: usize>(tensor: &Tensor<'_>, dims: [usize; N]) -> u64 {
            let elements: usize = dims
                .into_iter()
                .filter_map(|dim| tensor.dims().get(dim))
                .product();
            (elements * tensor.dtype().size_of()) as u64
        }
        [&self.keys, &self.updates, &self.decays]
            .into_iter()
            .map(|tensor| of(tensor, [1, 3]))
            .chain(self.inputs.iter().map(|tensor| of(tensor, [2])))
            .sum()
    }
}

impl<'a> Flush<'a> {
    /// Creates a flush of the rows of `pending`, whose states are in the slots of `states`, with the default [`Options`].
    #[must_use]
    pub fn new(states: Update<'a>, pending: Pending<'a>) -> Self {
        Self {
            states,
            pending,
            windows: None,
            options: Options::default(),
        }
    }

    /// Sets the windows of the slots: see [`Self::windows`].
    #[must_use]
    pub fn windows(mut self, windows: Tensor<'a>) -> Self {
        self.windows = Some(windows);
        self
    }

    /// Sets the options of the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}
