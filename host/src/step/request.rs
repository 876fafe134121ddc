//! The request: the common form of a step, a commit or a flush of either operator.

use bytemuck::Zeroable;
use gated_delta_kernels::prefill::CHUNK;
use gated_delta_kernels::step::LayerParams;

use super::args::gates::GateForm;
use super::args::{Activation, Convolution, Formulation, Inputs, Norm, Options, Pending, Stored};
use super::argument::{Access, Argument, TENSORS};
use crate::Entry;
use crate::error::Error;
use crate::tensor::{Memory, Tensor};
use crate::tensor_checks::{Named, check_memory, named};

/// The kinds of tokens in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Step: new tokens, with or without previous tokens.
    Step,
    /// Commit: previous tokens only. The first of them become part of the states.
    Commit,
    /// Flush: pending tokens only. All of them become part of the states.
    Flush,
}

/// Number of words in [`Switches`].
pub(crate) const SWITCHES: usize = 8;

/// Everything except tensors that a check depends on. Floats are stored as their bits.
pub(crate) type Switches = [u64; SWITCHES];

/// Sorts of launches. The last launch of each sort is remembered, so that an engine that alternates between sorts hits every
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    Decode,
    Prefill,
    Other,
}

/// New tokens, which have outputs.
#[derive(Clone, Copy)]
pub(super) struct New<'a> {
    pub inputs: &'a Inputs<'a>,
    /// The gate (`a` or `g`) and the beta (`b` or `beta`).
    pub gates: [Named<'a>; 2],
    pub o: Named<'a>,
}

/// Tokens of which the first ones are committed.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    pub inputs: KeptInputs<'a>,
    /// The gate and the beta, in the form of the new tokens'.
    pub gates: [Named<'a>; 2],
    pub keep: Named<'a>,
}

/// Inputs of tokens to commit: k and v, or the projection.
#[derive(Clone, Copy)]
pub(super) enum KeptInputs<'a> {
    Kv([Named<'a>; 2]),
    /// The projection x, for the convolution of the new tokens.
    X(Named<'a>),
    /// The convolution of a commit, with its projection.
    Conv(&'a Convolution<'a>),
}

impl<'a> KeptInputs<'a> {
    /// Pairs the tensors with the given names of k, v and x.
    fn of(stored: &'a Stored<'a>, [k_name, v_name, x_name]: [&'static str; 3]) -> Self {
        match stored {
            Stored::Kv { k, v } => Self::Kv([named(k_name, k), named(v_name, v)]),
            Stored::X { x } => Self::X(named(x_name, x)),
            Stored::Conv(conv) => Self::Conv(conv),
        }
    }

    /// k and v, if they are given.
    pub fn kv(&self) -> [Option<Named<'a>>; 2] {
        match self {
            Self::Kv(kv) => kv.map(Some),
            Self::X(_) | Self::Conv(_) => [None; 2],
        }
    }

    /// The first of the tensors.
    pub fn first(&self) -> Named<'a> {
        match self {
            Self::Kv([first, _]) | Self::X(first) => *first,
            Self::Conv(conv) => conv.named_x(),
        }
    }
}

/// A request: new tokens, previous tokens or both, and their states.
///
/// A request is made for every launch. It borrows the arguments; all checks are in [`Request::check`].
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Tensors by [`Argument`].
    pub(super) given: [Option<&'a Tensor<'a>>; TENSORS],
    /// Bit i is set if there is a tensor at i.
    pub(super) present: u64,
    /// The kernels' parameters, filled while tensors are added.
    pub(super) params: LayerParams,
    pub(crate) phase: Phase,
    pool: &'a Tensor<'a>,
    /// Inputs of the new tokens.
    pub(super) inputs: Option<&'a Inputs<'a>>,
    /// Inputs of the previous tokens, or of those of a commit.
    pub(super) stored: Option<&'a Stored<'a>>,
    /// The convolution of the new tokens, or of the tokens of a commit. `None` if q, k and v are given.
    pub(super) conv: Option<&'a Convolution<'a>>,
    pub(super) norm: Option<&'a Norm<'a>>,
    pub(super) gates: GateForm,
    pub(crate) pending: Option<&'a Pending<'a>>,
    /// Number of tokens between checkpoints; 0 without checkpoints.
    pub(super) checkpoint_every: usize,
    /// T of packed rows.
    pub(crate) max_tokens: usize,
    /// Whether states are read-only.
    pub(super) read_only: bool,
    pub(crate) options: &'a Options,
    /// The formulation of the options; instead of [`Formulation::Auto`] the library's choice, if it is [chosen](Request::chosen).
    pub(crate) formulation: Formulation,
}

impl<'a> Inputs<'a> {
    /// The first three tensors with their names: query, key and value, or those of the convolution.
    pub(super) fn named(&'a self) -> [Named<'a>; 3] {
        match self {
            Self::Qkv { q, k, v } => [named("q", q), named("k", k), named("v", v)],
            Self::Conv(conv) => conv.named(),
        }
    }
}

impl<'a> Request<'a> {
    /// A request with a pool and nothing else yet.
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

    /// The tensors by number, and a bit for each one that is present.
    #[inline(always)]
    pub(crate) fn present(&self) -> (u64, &[Option<&'a Tensor<'a>>; TENSORS]) {
        (self.present, &self.given)
    }

    /// A tensor. `None` if it is not given.
    #[inline(always)]
    pub(super) fn tensor(&self, argument: Argument) -> Option<&'a Tensor<'a>> {
        self.given[argument as usize]
    }

    /// Whether a tensor is given.
    #[inline(always)]
    pub(crate) fn has(&self, argument: Argument) -> bool {
        self.given[argument as usize].is_some()
    }

    /// A tensor with its name. `None` if it is not given.
    pub(crate) fn get(&self, argument: Argument) -> Option<Named<'a>> {
        let tensor = self.given[argument as usize];
        tensor.map(|tensor| named(self.name(argument), tensor))
    }

    /// The address of a tensor; 0 if it is not given.
    #[inline(always)]
    pub(super) fn address(&self, argument: Argument) -> u64 {
        self.given[argument as usize].map_or(0, |tensor| tensor.address())
    }

    /// The name of an argument in these arguments.
    pub(crate) fn name(&self, argument: Argument) -> &'static str {
        let [gate, beta, previous_gate, previous_beta] = *self.gates.names;
        // The tokens of a commit are not called "previous", because a commit has no other tokens.
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

    /// The new tokens.
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

    /// B, the number of rows. May be called before the check of ranks.
    #[inline(always)]
    pub(crate) fn batch(&self) -> u32 {
        let first = |tensor: &Tensor<'_>| tensor.dims().or_zero(0);
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

    /// The `total` of packed `[1, total, …]` tensors. `None` for dense rows.
    pub(crate) fn total(&self) -> Option<usize> {
        match self.has(Argument::CuSeqlens) {
            true => self.given[Argument::O as usize]?.dims().get(1).copied(),
            false => None,
        }
    }

    /// The convolution of the new tokens, or of the tokens of a commit. `None` if the launch gets q, k and v.
    pub(crate) fn conv(&self) -> Option<&'a Convolution<'a>> {
        self.conv
    }

    /// Pool that states are read from.
    pub(crate) fn pool(&self) -> Named<'a> {
        named(Argument::Pool.name(), self.pool)
    }

    /// Pool that states are written to.
    pub(crate) fn written_pool(&self) -> Named<'a> {
        self.get(Argument::WritePool).unwrap_or(self.pool())
    }

    /// The convolution's windows that are read, and those that are written.
    pub(crate) fn windows(&self) -> Option<[Named<'a>; 2]> {
        let windows = self.get(Argument::Windows)?;
        Some([windows, self.get(Argument::WriteWindows).unwrap_or(windows)])
    }

    /// Number of tokens between checkpoints; 0 without checkpoints.
    pub(crate) fn checkpoint_every(&self) -> usize {
        self.checkpoint_every
    }

    /// Everything except tensors that the choice of a formulation, [`Request::check`] and the choice of a variant depend on.
    /// Floats are compared by their bits, because −0 and 0 are different constants.
    #[inline(always)]
    pub(super) fn switches(&self, variant: Option<Entry>) -> Switches {
        let (gates, options) = (&self.gates, self.options);
        let two = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        // 0 stands for no activation.
        let activation = |one: Activation| 1 + one as u32;
        let (scale, null_slot) = (options.scale, options.null_slot);
        // The choice of `Formulation::Auto` follows from the tensors and the other switches.
        let of_options = [
            options.state_layout as u8,
            options.head_map as u8,
            options.qk_l2norm.into(),
            options.formulation as u8,
        ];
        // Each flag uses the bits up to the next flag. Only one kind of gates has a lower bound.
        let flags = u32::from(gates.per_channel)
            | u32::from(gates.beta_logit) << 1
            | u32::from(self.read_only) << 2
            | u32::from(scale.is_some()) << 3
            | u32::from(null_slot.is_some()) << 4
            | (gates.kind as u32) << 5
            | u32::from(options.split.is_some()) << 15
            | variant.map_or(u32::from(u16::MAX), |entry| entry as u32) << 16;
        let (mut activations, mut eps, mut heads) = (0, 0, 0);
        if let Some(conv) = self.conv {
            (activations, heads) = (activation(conv.activation), conv.heads as u64);
        }
        if let Some(norm) = self.norm {
            activations |= activation(norm.activation) << 8;
            eps = norm.eps.to_bits();
        }
        [
            two(flags, u32::from_ne_bytes(of_options)),
            two(
                gates.lower_bound.map_or(0, f32::to_bits),
                gates.beta_scale.to_bits(),
            ),
            two(scale.map_or(0, f32::to_bits), null_slot.unwrap_or(0)),
            two(activations, eps),
            // No layer that was launched has more heads.
            two(
                options.split.unwrap_or(0),
                heads.min(u64::from(u32::MAX)) as u32,
            ),
            self.max_tokens as u64,
            self.checkpoint_every as u64,
            self.pending.map_or(0, |pending| pending.most as u64),
        ]
    }

    /// Every tensor with its name. `None` for those that are not given.
    pub(crate) fn tensors(&self) -> [Option<Named<'a>>; TENSORS] {
        let mut tensors = [None; TENSORS];
        for (tensor, &argument) in tensors.iter_mut().zip(Argument::ALL) {
            *tensor = self.get(argument);
        }
        tensors
    }

    /// Whether a launch writes a tensor.
    pub(crate) fn writes(&self, argument: Argument) -> bool {
        match argument.access() {
            Access::Read => false,
            Access::Write => true,
            Access::Ring => self.phase == Phase::Step,
            Access::Update(other) => !self.read_only && !self.has(other),
            Access::States => !self.read_only,
        }
    }

    /// Checks that tensors are in `memory`, and that those that a launch writes are writable.
    pub(crate) fn check_memory(&self, memory: Memory) -> Result<(), Error> {
        check_memory(memory, &self.tensors(), |at| self.writes(Argument::ALL[at]))
    }

    /// Whether the request is a prefill.
    #[inline(always)]
    pub(crate) fn is_chunked(&self) -> bool {
        self.formulation == Formulation::Chunked
    }

    /// Whether the rows are packed and, by the caller's `max_tokens`, have at most 64 tokens each.
    pub(super) fn promises_short_rows(&self) -> bool {
        self.has(Argument::CuSeqlens) && self.max_tokens <= CHUNK as usize
    }

    /// T, of packed rows the caller's `max_tokens`. Ranks are checked before.
    pub(crate) fn most_tokens(&self) -> usize {
        match (self.has(Argument::CuSeqlens), self.get(Argument::O)) {
            (true, _) => self.max_tokens,
            (false, Some(o)) => o.tensor.dims()[1],
            (false, None) => 0,
        }
    }

    /// Number of new tokens of all rows; of packed rows it includes tokens that belong to no row. Ranks are checked before.
    pub(super) fn tokens(&self) -> u64 {
        match self.total() {
            Some(total) => total as u64,
            None => u64::from(self.batch()) * self.most_tokens() as u64,
        }
    }

    /// Largest number of checkpoints that rows at the beginning of their sequences may write.
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
    #[inline(always)]
    pub(crate) fn params(&self) -> &LayerParams {
        &self.params
    }
}
