//! States that wait: tokens are kept in a ring beside them, and folded in every few steps.

use gated_delta_kernels::deferred;

use super::options::{Formulation, Options};
use super::states::Update;
use crate::shapes::{Named, named, optional};
use crate::tensor::Tensor;

/// Most tokens of a slot that are pending at once, with [`Formulation::Recurrent`].
pub const MAX_PENDING: usize = deferred::MAX_PENDING as usize;

/// The same with [`Formulation::Parallel`], which is for drafts.
pub const MAX_PENDING_DRAFTS: usize = deferred::MAX_PENDING_DRAFTS as usize;

/// Tokens whose outputs are done and that are not in the states of their slots yet: a ring of R entries for every slot, and
/// how many of them each row has.
///
/// A token leaves (k, u, log α), with which S ← S diag(α) + u kᵀ: k as it came, or as the convolution made it (times a power of
/// two, where it is normalised and f32 does not hold Σk²),
/// u = δ · rsqrt(Σk² + 1e-6) (u = δ where keys are not normalised), δ = β (v − S k̂). Slots are those of the states. What is
/// not pending may be anything, NaN too.
///
/// Nothing but the caller's `len` and `base` says what is pending. A step reads both, leaves its T tokens in the entries
/// behind the pending ones, and, where [`folds`] says so, has put those into the state before. Of its T tokens the first
/// `kept` are then pending; [`after`] says where, and on the device it is
///
/// ```text
/// folded = len + T > N        base' = (folded ? base + len : base) mod R        len' = (folded ? 0 : len) + kept
/// ```
///
/// A step has one token and N ≤ 8, with *drafts* up to 8 tokens, K-last bf16 states and N ≤ 16. They are [`Formulation::Parallel`]'s,
/// which [`Formulation::Auto`] is for every launch of a ring that has room for them: N above 8, R above N + 1, `updates` in bf16, or
/// `inputs`. R = N + 1 is for one token a step, with [`Formulation::Recurrent`].
///
/// To reject a token is not to count it. With [`inputs`](Self::inputs) that is so with a convolution too: the window of a slot
/// waits as its state does, is written where that is, and x of the tokens since is there. Without them a window has moved with
/// every token, and who rejects one restores it.
///
/// A row that is [fresh](super::Step::fresh) has `len` = 0 here, whatever the tensor says.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Pending<'a> {
    /// `[P, H, R, K]`, of the dtype of k, f32 where a convolution makes k, written; R at least N + T, below 65536. Here and
    /// below contiguous but for the stride of slots, and slots are 16-byte aligned, GDN's `decays` to 4.
    pub keys: Tensor<'a>,
    /// `[P, HV, R, V]`, f32, of drafts bf16 too, written.
    pub updates: Tensor<'a>,
    /// GDN `[P, HV, R]`, KDA `[P, HV, R, K]`, f32, written: log α.
    pub decays: Tensor<'a>,
    /// `[B]`, i32, i64 or u32: tokens of the row's slot that are pending, 0..=N. Where it is out of range, the row is
    /// inactive.
    pub len: Tensor<'a>,
    /// `[B]`, i32, i64 or u32: the entry of the first of them, below R. Where it is out of range, the row is inactive.
    pub base: Tensor<'a>,
    /// Of drafts with a convolution, and only there: `[P, R, D]`, of the dtype of x, written: x as it came.
    pub inputs: Option<Tensor<'a>>,
    /// N, the most tokens that are pending: T..=8, of drafts T..=16.
    pub most: usize,
}

/// Folds the pending tokens of every row into its state, and does nothing else: before a state is copied or handed to
/// whoever knows no ring. Afterwards none of them is pending.
///
/// Bit for bit what a step of the same ring does that folds as many, or, where one of them names a [`Formulation`], of the same one.
/// It is GDN's or KDA's as `pending.decays` are.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Flush<'a> {
    /// Where states are; the slot to write is that to read.
    pub states: Update<'a>,
    /// What is pending.
    pub pending: Pending<'a>,
    /// `[P, D, W − 1]`, where `pending` has [`inputs`](Pending::inputs), and only there: written where the states are, with the last
    /// inputs of what was pending. As [`Convolution::windows`](super::Convolution::windows) are.
    pub windows: Option<Tensor<'a>>,
    /// What is fixed for a layer.
    pub options: Options,
}

/// Whether a step of `tokens` tokens folds the `len` pending ones of a row first, of which there may be up to `most`: what
/// kernels ask.
#[must_use]
pub const fn folds(len: usize, tokens: usize, most: usize) -> bool {
    len.saturating_add(tokens) > most
}

/// The largest N; with [`Formulation::Auto`] that of any state, of bf16 ones it is [`MAX_PENDING_DRAFTS`].
#[must_use]
pub const fn max_pending(formulation: Formulation) -> usize {
    match formulation {
        Formulation::Parallel => MAX_PENDING_DRAFTS,
        _ => MAX_PENDING,
    }
}

/// How many tokens of a row are pending, and the entry of the first, after a step of `tokens` tokens of which `kept` are to
/// stay, with `len` pending ones from entry `base` on before it, of at most `most`, in a ring of `entries`, not 0.
#[must_use]
pub const fn after(
    [len, base]: [usize; 2],
    [kept, tokens]: [usize; 2],
    [most, entries]: [usize; 2],
) -> [usize; 2] {
    if folds(len, tokens, most) {
        [kept, (base + len) % entries]
    } else {
        [len + kept, base]
    }
}

impl<'a> Pending<'a> {
    /// Of rings `keys` `[P, H, R, K]`, `updates` `[P, HV, R, V]` and `decays` (GDN `[P, HV, R]`, KDA `[P, HV, R, K]`), and
    /// `len` and `base` `[B]`, with at most 8 tokens pending.
    #[must_use]
    pub fn new(
        [keys, updates, decays]: [Tensor<'a>; 3],
        len: Tensor<'a>,
        base: Tensor<'a>,
    ) -> Self {
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

    /// With a ring of what tokens were convolved from: see [`Self::inputs`].
    #[must_use]
    pub fn inputs(mut self, inputs: Tensor<'a>) -> Self {
        self.inputs = Some(inputs);
        self
    }

    /// With another number of tokens that are pending at most.
    #[must_use]
    pub fn most(mut self, most: usize) -> Self {
        self.most = most;
        self
    }

    /// Every tensor under its name.
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

    /// Bytes of an entry, all heads together.
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
    /// Of the rows of `pending`, whose states are in the slots of `states`, with the default [`Options`].
    #[must_use]
    pub fn new(states: Update<'a>, pending: Pending<'a>) -> Self {
        Self {
            states,
            pending,
            windows: None,
            options: Options::default(),
        }
    }

    /// With the windows of the slots: see [`Self::windows`].
    #[must_use]
    pub fn windows(mut self, windows: Tensor<'a>) -> Self {
        self.windows = Some(windows);
        self
    }

    /// With what is fixed for the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}
