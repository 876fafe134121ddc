//! The choice of [`Formulation::Auto`].

use super::args::{Formulation, Inputs, MAX_PENDING, MAX_TOKENS, Pending, StateLayout, Stored};
use super::argument::Argument;
use super::request::{Phase, Request, Sort};
use crate::tensor::{DType, Tensor};

/// Largest number of tokens of a row that the parallel formulation computes together.
const MAX_SET_TOKENS: usize = 8;

/// Number of tokens up to which f32 states are computed token by token: this is as fast, and has the bits of decodes.
const FEW_TOKENS: usize = 2;

/// Largest HV / H of the parallel formulation with a convolution or a norm, in GDN.
const MAX_PARALLEL_RATIO: usize = 8;

/// Largest HV / H of the parallel formulation with a convolution or a norm, in KDA.
const MAX_PARALLEL_KDA_RATIO: usize = 4;

/// Bits of the arguments that make a step a prefill.
const OF_PREFILL: u64 = 1 << Argument::Positions as u32
    | 1 << Argument::CheckpointSlots as u32
    | 1 << Argument::Workspace as u32;

const CU_SEQLENS: u64 = 1 << Argument::CuSeqlens as u32;

/// Bits of the arguments that receive a state after each token.
const OF_EACH_TOKEN: u64 = 1 << Argument::Snapshots as u32 | 1 << Argument::TokenSlots as u32;

impl Request<'_> {
    /// The sort of launch. It is known before the formulation is chosen.
    #[inline(always)]
    pub(super) fn sort(&self) -> Sort {
        let tokens = self.new_bound();
        let is_chunked = match self.formulation {
            Formulation::Auto => self.has_to_be_chunked(tokens),
            named => named == Formulation::Chunked,
        };
        if is_chunked {
            Sort::Prefill
        } else if tokens == 1 && self.stored.is_none() && self.present & CU_SEQLENS == 0 {
            Sort::Decode
        } else {
            Sort::Other
        }
    }

    /// The request with its formulation chosen, if the options leave it to the library.
    pub(super) fn chosen(&mut self) -> &Self {
        if self.formulation == Formulation::Auto {
            self.formulation = self.choose();
        }
        self
    }

    /// Chooses the formulation of [`Formulation::Auto`] for these arguments: the first line of the table that applies. T is the largest
    /// possible number of new tokens of a row (`max_tokens` of packed rows), T' that of previous tokens. Either is 0 if there are no such
    /// tokens.
    ///
    /// | arguments | formulation |
    /// |---|---|
    /// | a step without a ring: T above 16, positions, checkpoints or a workspace | `Chunked` |
    /// | states that tensor cores do not take (K = 96, KDA with K = 64, 16-bit V-last with a convolution or a norm, with a ring all but K-last bf16), T or T' above 8 with a convolution, a norm or a ring, snapshots or token slots | `Recurrent` |
    /// | f32 states, neither T nor T' above 2; 16-bit V-last states, neither above 8 | `Recurrent` |
    /// | with a ring: T above 1, N above 8, `updates` in bf16, `inputs`, or windows of a flush | `Parallel` |
    /// | with a ring: a convolution (without `inputs`, its window moves with every token) | `Recurrent` |
    /// | with a ring: R above N + 1, so that more than one token may come | `Parallel` |
    /// | with a ring: R = N + 1 | `Recurrent` |
    /// | T or T' above 1 | `Parallel` |
    /// | all others | `Recurrent` |
    ///
    /// A launch that would be `Parallel` is `Recurrent` if a convolution or a norm has a larger HV / H than a cluster of blocks takes (GDN:
    /// 8, KDA: 4).
    ///
    /// The choice depends on the layer's settings and on the form of the launch. It never depends on B, rows, lengths, addresses
    /// or contents, so neither do the bits of results. It depends on the GPU only if the GPU lacks the clusters of blocks or the
    /// shared memory for `Parallel` ([`Self::check_on`]). A commit has the choice of a step with T equal to its T'. All steps of
    /// a ring have the same choice as its flush, so that a step that flushes has the bits of a flush. The exception is a layer
    /// that can take only single tokens, on a ring with R above N + 1: a convolution without `inputs`, or a norm with more value
    /// heads than a cluster takes.
    ///
    /// The choice comes before any check. For tensors of wrong dims it may be any formulation.
    fn choose(&self) -> Formulation {
        let tokens = self.new_bound();
        if self.has_to_be_chunked(tokens) {
            return Formulation::Chunked;
        }
        let previous = self.stored.map_or(0, bound_of_stored);
        let most = tokens.max(previous);
        if most <= 1 && self.pending.is_none() {
            return Formulation::Recurrent;
        }
        let least = match (self.pool().tensor.dtype(), self.options.state_layout) {
            (DType::F32, _) => FEW_TOKENS + 1,
            (_, StateLayout::VLast) => MAX_SET_TOKENS + 1,
            (_, StateLayout::KLast) => 0,
        };
        if most < least
            || most > self.max_parallel_tokens()
            || self.present & OF_EACH_TOKEN != 0
            || !self.has_parallel_states()
        {
            return Formulation::Recurrent;
        }
        let is_parallel = match self.pending {
            None => self.fits_clusters(),
            Some(pending) => self.is_ring_parallel(pending, tokens),
        };
        match is_parallel {
            true => Formulation::Parallel,
            false => Formulation::Recurrent,
        }
    }

    /// Whether only a prefill takes the arguments, with T = `tokens`.
    #[inline(always)]
    fn has_to_be_chunked(&self, tokens: usize) -> bool {
        let is_step = self.phase == Phase::Step && self.pending.is_none();
        is_step && (tokens > MAX_TOKENS || self.present & OF_PREFILL != 0)
    }

    /// T; 0 without new tokens.
    #[inline(always)]
    fn new_bound(&self) -> usize {
        match self.present & CU_SEQLENS {
            0 => self.tensor(Argument::O).map_or(0, |o| o.dims().or_zero(1)),
            _ => self.max_tokens,
        }
    }

    /// Largest number of tokens of a row in the parallel formulation, new or previous.
    #[inline]
    pub(super) fn max_parallel_tokens(&self) -> usize {
        match self.is_layer() || self.pending.is_some() {
            true => MAX_SET_TOKENS,
            false => MAX_TOKENS,
        }
    }

    /// Whether the launch has a convolution or a norm.
    #[inline]
    pub(super) fn is_layer(&self) -> bool {
        self.conv.is_some() || self.norm.is_some() || self.has(Argument::Windows)
    }

    /// Whether the parallel formulation has kernels for the pool's dtype, layout and K.
    #[inline]
    fn has_parallel_states(&self) -> bool {
        let pool = self.pool().tensor;
        let is_k_last = self.options.state_layout == StateLayout::KLast;
        let is_plain = self.pending.is_none() && !self.is_layer();
        let takes = match pool.dtype() {
            DType::Bf16 => is_k_last || is_plain,
            DType::F16 => is_k_last && self.pending.is_none() || is_plain,
            DType::F32 => self.pending.is_none(),
            _ => false,
        };
        // K = V, or V = 192 if K = 96.
        takes
            && match dim(pool, if is_k_last { 3 } else { 2 }) {
                Some(64) => !self.gates.per_channel,
                k => k == Some(128),
            }
    }

    /// Whether the steps of a ring, and its flush, are `Parallel`.
    fn is_ring_parallel(&self, pending: &Pending<'_>, tokens: usize) -> bool {
        let is_of_drafts = tokens > 1
            || pending.most > MAX_PENDING
            || pending.updates.dtype() == DType::Bf16
            || pending.inputs.is_some()
            || self.phase == Phase::Flush && self.has(Argument::Windows);
        let entries = dim(&pending.keys, 2).unwrap_or(0);
        let may_be = || {
            self.conv.is_none() && entries > pending.most.saturating_add(1) && self.fits_clusters()
        };
        is_of_drafts || may_be()
    }

    /// Whether a cluster of blocks has room for the value heads of a query/key head, if they are computed together.
    fn fits_clusters(&self) -> bool {
        if !self.is_layer() {
            return true;
        }
        let pool = self.pool().tensor;
        let heads = match (self.inputs, self.stored, self.conv) {
            (_, _, Some(conv)) => Some(conv.heads),
            (Some(Inputs::Qkv { q, .. }), _, _) => dim(q, 2),
            (_, Some(Stored::Kv { k, .. }), _) => dim(k, 2),
            _ => self.pending.and_then(|pending| dim(&pending.keys, 1)),
        };
        let most = match self.gates.per_channel {
            true => MAX_PARALLEL_KDA_RATIO,
            false => MAX_PARALLEL_RATIO,
        };
        let most = heads.unwrap_or(0).saturating_mul(most);
        dim(pool, 1).unwrap_or(0) <= most
    }
}

/// Names the argument that makes the request a prefill.
pub(super) fn chunked_by(request: &Request<'_>) -> &'static str {
    let of_prefill = [
        (Argument::Positions, "positions"),
        (Argument::CheckpointSlots, "checkpoints"),
        (Argument::Workspace, "workspace"),
    ];
    let given = of_prefill.into_iter().find(|(it, _)| request.has(*it));
    match (request.options.formulation, given) {
        (Formulation::Auto, Some((_, name))) => name,
        (Formulation::Auto, None) => "T above 16",
        _ => "formulation = chunked",
    }
}

/// Names the reason why the arguments do not allow drafts with deferred write-back.
pub(super) fn no_drafts_by(request: &Request<'_>) -> &'static str {
    match (request.options.formulation, request.pool().tensor.dtype()) {
        (Formulation::Auto, DType::F32) => "an f32 state",
        (Formulation::Auto, DType::F16) => "an f16 state",
        (Formulation::Auto, _) if request.options.state_layout == StateLayout::VLast => {
            "a v_last state"
        }
        (Formulation::Auto, _) if request.gates.per_channel => "KDA with another K than 128",
        (Formulation::Auto, _) => "K = 96",
        _ => "formulation = recurrent",
    }
}

/// T' of previous tokens.
#[inline]
fn bound_of_stored(stored: &Stored<'_>) -> usize {
    let first = match stored {
        Stored::Kv { k, .. } => k,
        Stored::X { x } => x,
        Stored::Conv(conv) => &conv.x,
    };
    first.dims().or_zero(1)
}

#[inline]
fn dim(tensor: &Tensor<'_>, dim: usize) -> Option<usize> {
    tensor.dims().get(dim).copied()
}
