//! The request that a step, a commit or a flush of either operator comes down to.

use bytemuck::Zeroable;
use gated_delta_kernels::prefill::CHUNK;
use gated_delta_kernels::step::LayerParams;

use super::args::gates::GateForm;
use super::args::{Activation, Convolution, Formulation, Inputs, Norm, Options, Pending, Stored};
use super::argument::{Access, Argument, TENSORS};
use crate::Entry;
use crate::error::Error;
use crate::shapes::{Named, check_memory, named};
use crate::tensor::{Memory, Tensor};

/// The tokens that a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// New tokens, after previous ones or not.
    Step,
    /// Previous tokens alone: the first of them become part of the states.
    Commit,
    /// Pending tokens alone: all of them become part of the states.
    Flush,
}

/// Words of [`Switches`].
pub(crate) const SWITCHES: usize = 8;

/// All that a check looks at besides tensors, floats by their bits.
pub(crate) type Switches = [u64; SWITCHES];

/// Sorts of launches, of each of which the last is remembered: an engine that has several in turn has all at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    Decode,
    Prefill,
    Other,
}

/// Tokens that are read from the state.
#[derive(Clone, Copy)]
pub(super) struct New<'a> {
    pub inputs: &'a Inputs<'a>,
    /// `a` or `g`, and `b` or `beta`.
    pub gates: [Named<'a>; 2],
    pub o: Named<'a>,
}

/// Tokens of which the first ones are committed.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    pub inputs: KeptInputs<'a>,
    /// As the new tokens'.
    pub gates: [Named<'a>; 2],
    pub keep: Named<'a>,
}

/// k and v of such tokens, or the tensor that they are made of.
#[derive(Clone, Copy)]
pub(super) enum KeptInputs<'a> {
    Kv([Named<'a>; 2]),
    /// The x of the new tokens' convolution.
    X(Named<'a>),
    /// The convolution of a commit, with its x.
    Conv(&'a Convolution<'a>),
}

impl<'a> KeptInputs<'a> {
    /// `names` are those of k, v and x.
    fn of(stored: &'a Stored<'a>, [k_name, v_name, x_name]: [&'static str; 3]) -> Self {
        match stored {
            Stored::Kv { k, v } => Self::Kv([named(k_name, k), named(v_name, v)]),
            Stored::X { x } => Self::X(named(x_name, x)),
            Stored::Conv(conv) => Self::Conv(conv),
        }
    }

    /// k and v, where they are given.
    pub fn kv(&self) -> [Option<Named<'a>>; 2] {
        match self {
            Self::Kv(kv) => kv.map(Some),
            Self::X(_) | Self::Conv(_) => [None; 2],
        }
    }

    /// The tensor that comes first.
    pub fn first(&self) -> Named<'a> {
        match self {
            Self::Kv([first, _]) | Self::X(first) => *first,
            Self::Conv(conv) => conv.named_x(),
        }
    }
}

/// New tokens, previous ones or both, and where their states are.
///
/// Made for every launch: it borrows the arguments, and what has to be checked is looked at in [`Request::check`] alone.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Tensors by [`Argument`].
    pub(super) given: [Option<&'a Tensor<'a>>; TENSORS],
    /// Bit i: there is a tensor at i.
    pub(super) present: u64,
    /// The parameter, as far as tensors have been given.
    pub(super) params: LayerParams,
    pub(crate) phase: Phase,
    pool: &'a Tensor<'a>,
    /// Inputs of the new tokens.
    pub(super) inputs: Option<&'a Inputs<'a>>,
    /// Inputs of the previous tokens, or of those of a commit.
    pub(super) stored: Option<&'a Stored<'a>>,
    /// The convolution that makes q, k and v of the new tokens, or of a commit, where they are not given.
    pub(super) conv: Option<&'a Convolution<'a>>,
    pub(super) norm: Option<&'a Norm<'a>>,
    pub(super) gates: GateForm,
    pub(crate) pending: Option<&'a Pending<'a>>,
    /// Tokens from one checkpoint to the next; 0: there are none.
    pub(super) checkpoint_every: usize,
    /// T where there are `cu_seqlens`.
    pub(crate) max_tokens: usize,
    /// The states are read and not written.
    pub(super) read_only: bool,
    pub(crate) options: &'a Options,
    /// The formulation of the options, or what [`Request::choose`] has chosen: never [`Formulation::Auto`] where all is given.
    pub(crate) formulation: Formulation,
}

impl<'a> Inputs<'a> {
    /// Query, key and value, or what they are made of.
    pub(super) fn named(&'a self) -> [Named<'a>; 3] {
        match self {
            Self::Qkv { q, k, v } => [named("q", q), named("k", k), named("v", v)],
            Self::Conv(conv) => conv.named(),
        }
    }
}

impl<'a> Request<'a> {
    /// A request that has nothing yet but a pool.
    #[inline(always)]
    pub(super) fn new(
        phase: Phase,
        pool: &'a Tensor<'a>,
        gates: GateForm,
        options: &'a Options,
    ) -> Self {
        Self {
            phase,
            given: [None; TENSORS],
            present: 0,
            params: Zeroable::zeroed(),
            pool,
            inputs: None,
            stored: None,
            conv: None,
            norm: None,
            gates,
            pending: None,
            checkpoint_every: 0,
            max_tokens: 0,
            read_only: false,
            options,
            formulation: options.formulation,
        }
    }

    /// The tensors by number, and a bit for each that there is.
    pub(crate) fn present(&self) -> (u64, &[Option<&'a Tensor<'a>>; TENSORS]) {
        (self.present, &self.given)
    }

    /// A tensor, where there is one.
    #[inline(always)]
    pub(super) fn tensor(&self, argument: Argument) -> Option<&'a Tensor<'a>> {
        self.given[argument as usize]
    }

    /// Says whether there is such a tensor.
    #[inline(always)]
    pub(crate) fn has(&self, argument: Argument) -> bool {
        self.given[argument as usize].is_some()
    }

    /// A tensor under its name, where there is one.
    pub(crate) fn get(&self, argument: Argument) -> Option<Named<'a>> {
        let tensor = self.given[argument as usize];
        tensor.map(|tensor| named(self.name(argument), tensor))
    }

    /// The address of a tensor; 0 where there is none.
    #[inline(always)]
    pub(super) fn address(&self, argument: Argument) -> u64 {
        self.given[argument as usize].map_or(0, |tensor| tensor.address())
    }

    /// The name of a tensor in these arguments.
    pub(crate) fn name(&self, argument: Argument) -> &'static str {
        let [gate, beta, previous_gate, previous_beta] = *self.gates.names;
        // The tokens of a commit are no previous ones of others.
        match (argument, self.phase) {
            (Argument::Gate, _) | (Argument::PreviousGate, Phase::Commit) => gate,
            (Argument::Beta, _) | (Argument::PreviousBeta, Phase::Commit) => beta,
            (Argument::PreviousGate, _) => previous_gate,
            (Argument::PreviousBeta, _) => previous_beta,
            (Argument::PreviousK, Phase::Commit) => Argument::K.name(),
            (Argument::PreviousV, Phase::Commit) => Argument::V.name(),
            (Argument::PreviousX, Phase::Commit) => Argument::X.name(),
            _ => argument.name(),
        }
    }

    /// The tokens that are read from the state.
    pub(super) fn new_tokens(&self) -> Option<New<'a>> {
        Some(New {
            inputs: self.inputs?,
            gates: [self.get(Argument::Gate)?, self.get(Argument::Beta)?],
            o: self.get(Argument::O)?,
        })
    }

    /// The tokens of which the first ones are committed.
    pub(super) fn previous_tokens(&self) -> Option<Kept<'a>> {
        let [k, v, x] = [
            Argument::PreviousK,
            Argument::PreviousV,
            Argument::PreviousX,
        ];
        Some(Kept {
            inputs: KeptInputs::of(self.stored?, [k, v, x].map(|argument| self.name(argument))),
            gates: [
                self.get(Argument::PreviousGate)?,
                self.get(Argument::PreviousBeta)?,
            ],
            keep: self.get(Argument::Keep)?,
        })
    }

    /// B; parameters have it before the check has seen any rank.
    #[inline]
    pub(crate) fn batch(&self) -> u32 {
        let first = |tensor: &Tensor<'_>| tensor.dims().first().copied().unwrap_or(0);
        let of = |argument: Argument| self.given[argument as usize].map_or(0, first);
        let rows = match self.phase {
            _ if self.has(Argument::CuSeqlens) => of(Argument::CuSeqlens).saturating_sub(1),
            Phase::Step => of(Argument::O),
            Phase::Commit if self.has(Argument::PreviousX) => of(Argument::PreviousX),
            Phase::Commit => of(Argument::PreviousK),
            Phase::Flush => of(Argument::PendingLen),
        };
        rows as u32
    }

    /// Tokens of the `[1, total, …]` tensors, where there are `cu_seqlens`.
    pub(crate) fn total(&self) -> Option<usize> {
        match self.has(Argument::CuSeqlens) {
            true => self.given[Argument::O as usize]?.dims().get(1).copied(),
            false => None,
        }
    }

    /// The convolution that makes q, k and v of the new tokens, or of a commit, where they are not given.
    pub(crate) fn conv(&self) -> Option<&'a Convolution<'a>> {
        self.conv
    }

    /// The pool that states start from.
    pub(crate) fn pool(&self) -> Named<'a> {
        named(Argument::Pool.name(), self.pool)
    }

    /// The pool that is written.
    pub(crate) fn written_pool(&self) -> Named<'a> {
        self.get(Argument::WritePool).unwrap_or(self.pool())
    }

    /// The windows of the convolution, and those that are written where states are.
    pub(crate) fn windows(&self) -> Option<[Named<'a>; 2]> {
        let windows = self.get(Argument::Windows)?;
        Some([windows, self.get(Argument::WriteWindows).unwrap_or(windows)])
    }

    /// Tokens from one checkpoint to the next; 0: there are none.
    pub(crate) fn checkpoint_every(&self) -> usize {
        self.checkpoint_every
    }

    /// All but the tensors that [`Request::check`] and the choice of a variant look at. Floats by their bits: −0 is
    /// another constant than 0.
    pub(super) fn switches(&self, variant: Option<Entry>) -> Switches {
        let (gates, options, conv) = (&self.gates, self.options, self.conv);
        // 0 where there is none.
        let activation = |one: Option<Activation>| one.map_or(0, |one| 1 + u64::from(one.code()));
        let bits = |one: Option<f32>| u64::from(one.map_or(0, f32::to_bits));
        // Each has the bits up to the next one.
        let flags = u64::from(gates.per_channel)
            | u64::from(gates.beta_logit) << 1
            | u64::from(options.qk_l2norm) << 2
            | u64::from(self.read_only) << 3
            | u64::from(gates.lower_bound.is_some()) << 4
            | u64::from(options.scale.is_some()) << 5
            | u64::from(options.null_slot.is_some()) << 6
            | (gates.kind as u64) << 8
            | (options.state_layout as u64) << 12
            | (options.head_map as u64) << 14
            | (self.formulation as u64) << 16
            // Which of both a GPU without clusters may tell apart: `check_on`.
            | u64::from(options.formulation == Formulation::Auto) << 19
            | activation(conv.map(|conv| conv.activation)) << 20
            | activation(self.norm.map(|norm| norm.activation)) << 24
            | variant.map_or(u64::from(u32::MAX), |entry| entry as u64) << 32;
        let norm_eps = self.norm.map(|norm| norm.eps);
        let switches: [u64; SWITCHES] = [
            flags,
            bits(gates.lower_bound) << 32 | u64::from(gates.beta_scale.to_bits()),
            bits(options.scale) << 32 | u64::from(options.null_slot.unwrap_or(0)),
            bits(norm_eps),
            conv.map_or(0, |conv| conv.heads as u64),
            self.max_tokens as u64,
            self.checkpoint_every as u64,
            self.pending.map_or(0, |pending| pending.most as u64),
        ];
        switches
    }

    /// Every tensor under its name, where there is one.
    pub(crate) fn tensors(&self) -> [Option<Named<'a>>; TENSORS] {
        let mut tensors = [None; TENSORS];
        for (tensor, &argument) in tensors.iter_mut().zip(Argument::ALL) {
            *tensor = self.get(argument);
        }
        tensors
    }

    /// Says whether a launch writes this tensor.
    pub(crate) fn writes(&self, argument: Argument) -> bool {
        match argument.access() {
            Access::Read => false,
            Access::Write => true,
            Access::Ring => self.phase == Phase::Step,
            Access::Update(other) => !self.read_only && !self.has(other),
            Access::States => !self.read_only,
        }
    }

    /// Tensors are in `memory`, and those that a launch writes are writable.
    pub(crate) fn check_memory(&self, memory: Memory) -> Result<(), Error> {
        check_memory(memory, &self.tensors(), |at| self.writes(Argument::ALL[at]))
    }

    /// The sort of a library's last launches that it may be like, as far as that is seen before a check.
    pub(super) fn sort(&self) -> Sort {
        let o = self.given[Argument::O as usize];
        let is_one = o.and_then(|o| o.dims().get(1)) == Some(&1);
        if self.is_chunked() {
            Sort::Prefill
        } else if is_one && self.stored.is_none() && !self.has(Argument::CuSeqlens) {
            Sort::Decode
        } else {
            Sort::Other
        }
    }

    /// Says whether it is a prefill.
    pub(crate) fn is_chunked(&self) -> bool {
        self.formulation == Formulation::Chunked
    }

    /// Says whether the caller promises of packed rows that each has at most 64 tokens.
    pub(super) fn promises_short_rows(&self) -> bool {
        self.has(Argument::CuSeqlens) && self.max_tokens <= CHUNK as usize
    }

    /// T; of packed rows what the caller says. The check has seen every rank.
    pub(crate) fn most_tokens(&self) -> usize {
        match (self.has(Argument::CuSeqlens), self.get(Argument::O)) {
            (true, _) => self.max_tokens,
            (false, Some(o)) => o.tensor.dims()[1],
            (false, None) => 0,
        }
    }

    /// New tokens of all rows, of packed ones and what is around them. The check has seen every rank.
    pub(super) fn tokens(&self) -> u64 {
        match self.total() {
            Some(total) => total as u64,
            None => u64::from(self.batch()) * self.most_tokens() as u64,
        }
    }

    /// Most checkpoints that rows which begin their sequences may write.
    pub(super) fn most_checkpoints(&self) -> u64 {
        self.get(Argument::CheckpointSlots).map_or(0, |slots| {
            let [rows, of_row] = [0, 1].map(|dim| slots.tensor.dims()[dim] as u64);
            let every = self.checkpoint_every() as u64;
            match self.has(Argument::CuSeqlens) {
                true => (self.tokens() / every).min(rows * of_row),
                false => rows * (self.most_tokens() as u64 / every).min(of_row),
            }
        })
    }

    /// Addresses and sizes, as a launch takes them.
    #[inline]
    pub(crate) fn params(&self) -> &LayerParams {
        &self.params
    }
}
