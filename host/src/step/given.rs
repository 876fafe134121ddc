//! Conversion of the arguments of a launch to a request. It runs before every launch, and handles only the given tensors: the
//! place and the address of each.

use std::mem::MaybeUninit;

use super::args::gates::{GateForm, GateParts};
use super::args::{
    Commit, Convolution, Flush, Gates, Inputs, Options, Pending, PerToken, ReadOnly, States, Step,
    Stored, Update,
};
use super::argument::Argument;
use super::request::{Phase, Request};
use crate::tensor::Tensor;

pub(crate) mod sealed {
    use std::mem::MaybeUninit;

    use crate::step::request::Request;

    /// Conversion of arguments to a request.
    pub trait Work {
        /// Writes the request of the arguments to `at`, so that a launch need not move it. Its formulation is not chosen yet.
        fn describe<'r, 'a>(&'a self, at: &'r mut MaybeUninit<Request<'a>>) -> &'r mut Request<'a>;

        /// Returns the request of the arguments by value, with its formulation chosen.
        fn request(&self) -> Request<'_> {
            *self.describe(&mut MaybeUninit::uninit()).chosen()
        }
    }
}

/// A request under construction, at its final place in memory.
struct Given<'r, 'a> {
    request: &'r mut Request<'a>,
    /// [`Request::present`] so far. It is kept in a register, because in memory every tensor would wait for the store of the
    /// previous one.
    present: u64,
}

impl<G: Gates> sealed::Work for Step<'_, G> {
    #[inline]
    fn describe<'r, 'a>(&'a self, at: &'r mut MaybeUninit<Request<'a>>) -> &'r mut Request<'a> {
        let gates = self.gates.parts();
        let pool = match &self.states {
            States::Update(Update { pool, .. })
            | States::ReadOnly(ReadOnly { pool, .. })
            | States::PerToken(PerToken { pool, .. }) => pool,
        };
        let mut given = Given::new(at, Phase::Step, pool, gates.form, &self.options);
        match &self.states {
            States::Update(states) => given.update(states),
            States::ReadOnly(states) => {
                given.request.read_only = true;
                given.maybe(Argument::ReadSlots, &states.read_slots);
            }
            States::PerToken(states) => {
                given.write_pool(&states.write_pool);
                given.give(Argument::TokenSlots, &states.token_slots);
                given.maybe(Argument::Accepted, &states.accepted);
            }
        }
        given.request.inputs = Some(&self.inputs);
        match &self.inputs {
            Inputs::Qkv { q, k, v } => {
                given.give(Argument::Q, q);
                given.give(Argument::K, k);
                given.give(Argument::V, v);
            }
            Inputs::Conv(conv) => {
                given.give(Argument::X, &conv.x);
                given.convolve(conv);
            }
        }
        given.give(Argument::Gate, gates.gate);
        given.give(Argument::Beta, gates.beta);
        given.parameters(&gates);
        given.give(Argument::O, &self.o);
        if let Some(previous) = &self.previous {
            given.keep(&previous.stored, &previous.keep);
            given.give(Argument::PreviousGate, &previous.gate);
            given.give(Argument::PreviousBeta, &previous.beta);
        }
        if let Some(norm) = &self.norm {
            given.request.norm = Some(norm);
            given.give(Argument::Z, &norm.z);
            given.give(Argument::NormWeight, &norm.weight);
        }
        if let Some(packed) = &self.packed {
            given.give(Argument::CuSeqlens, &packed.cu_seqlens);
            given.request.max_tokens = packed.max_tokens;
            let bounds = packed.cu_seqlens.dims().or_zero(0);
            let step = &mut given.request.params.step;
            step.total_tokens = self.o.dims().or_zero(1) as u32;
            step.rows = bounds.saturating_sub(1) as u32;
        }
        if let Some(checkpoints) = &self.checkpoints {
            given.give(Argument::CheckpointSlots, &checkpoints.slots);
            given.request.checkpoint_every = checkpoints.every;
        }
        if let Some(pending) = &self.pending {
            given.wait(pending);
        }
        given.maybe(Argument::Fresh, &self.fresh);
        given.maybe(Argument::Snapshots, &self.snapshots);
        given.maybe(Argument::Positions, &self.positions);
        given.maybe(Argument::Workspace, &self.workspace);
        given.all()
    }
}

impl<G: Gates> sealed::Work for Commit<'_, G> {
    #[inline]
    fn describe<'r, 'a>(&'a self, at: &'r mut MaybeUninit<Request<'a>>) -> &'r mut Request<'a> {
        let gates = self.gates.parts();
        let (pool, form) = (&self.states.pool, gates.form);
        let mut given = Given::new(at, Phase::Commit, pool, form, &self.options);
        given.update(&self.states);
        given.keep(&self.stored, &self.keep);
        if let Stored::Conv(conv) = &self.stored {
            given.give(Argument::PreviousX, &conv.x);
            given.convolve(conv);
        }
        given.give(Argument::PreviousGate, gates.gate);
        given.give(Argument::PreviousBeta, gates.beta);
        given.parameters(&gates);
        given.maybe(Argument::Fresh, &self.fresh);
        given.all()
    }
}

impl sealed::Work for Flush<'_> {
    #[inline]
    fn describe<'r, 'a>(&'a self, at: &'r mut MaybeUninit<Request<'a>>) -> &'r mut Request<'a> {
        let gates = GateForm::of_none(&self.pending.decays);
        let mut given = Given::new(at, Phase::Flush, &self.states.pool, gates, &self.options);
        given.update(&self.states);
        given.wait(&self.pending);
        if let Some(windows) = &self.windows {
            given.windows_of(windows, &None);
        }
        given.all()
    }
}

impl<'r, 'a> Given<'r, 'a> {
    /// Starts a request with a pool and no tokens.
    #[inline(always)]
    fn new(
        at: &'r mut MaybeUninit<Request<'a>>,
        phase: Phase,
        pool: &'a Tensor<'a>,
        gates: GateForm,
        options: &'a Options,
    ) -> Self {
        let mut given = Self {
            request: at.write(Request::new(phase, pool, gates, options)),
            present: 0,
        };
        given.give(Argument::Pool, pool);
        // By default the pool that is read is also written; the same holds for windows.
        given.write(Argument::WritePool, pool);
        let slots = slots(pool);
        let step = &mut given.request.params.step;
        (step.read_pool_slots, step.write_pool_slots) = (slots, slots);
        given
    }

    /// Finishes the request.
    #[inline(always)]
    fn all(self) -> &'r mut Request<'a> {
        self.request.present = self.present;
        self.request
    }

    /// Sets the parameter that has a tensor's address.
    #[inline(always)]
    fn write(&mut self, argument: Argument, tensor: &'a Tensor<'a>) {
        argument.set(&mut self.request.params, tensor.address());
    }

    /// Adds a tensor.
    #[inline(always)]
    fn give(&mut self, argument: Argument, tensor: &'a Tensor<'a>) {
        self.request.given[argument as usize] = Some(tensor);
        self.present |= 1 << argument as u32;
        self.write(argument, tensor);
    }

    /// Adds a pool to write instead, if it is given.
    #[inline(always)]
    fn write_pool(&mut self, pool: &'a Option<Tensor<'a>>) {
        if let Some(pool) = pool {
            self.give(Argument::WritePool, pool);
            self.request.params.step.write_pool_slots = slots(pool);
        }
    }

    /// Adds windows, and windows to write instead, if they are given.
    #[inline(always)]
    fn windows_of(&mut self, windows: &'a Tensor<'a>, write_windows: &'a Option<Tensor<'a>>) {
        self.give(Argument::Windows, windows);
        self.write(Argument::WriteWindows, windows);
        self.maybe(Argument::WriteWindows, write_windows);
        let written = write_windows.as_ref().unwrap_or(windows);
        let (read, written) = (slots(windows), slots(written));
        let layer = &mut self.request.params;
        (layer.read_windows_slots, layer.write_windows_slots) = (read, written);
    }

    /// Adds a tensor, if it is given.
    #[inline(always)]
    fn maybe(&mut self, argument: Argument, tensor: &'a Option<Tensor<'a>>) {
        if let Some(tensor) = tensor {
            self.give(argument, tensor);
        }
    }

    /// Adds the pool to write and the slots of an update.
    #[inline(always)]
    fn update(&mut self, states: &'a Update<'a>) {
        self.write_pool(&states.write_pool);
        self.maybe(Argument::ReadSlots, &states.read_slots);
        self.maybe(Argument::WriteSlots, &states.write_slots);
    }

    /// Adds a convolution, except its projection x.
    #[inline(always)]
    fn convolve(&mut self, conv: &'a Convolution<'a>) {
        self.request.conv = Some(conv);
        self.give(Argument::ConvWeight, &conv.weight);
        self.windows_of(&conv.windows, &conv.write_windows);
        self.maybe(Argument::ConvBias, &conv.bias);
        self.maybe(Argument::WindowSnapshots, &conv.window_snapshots);
    }

    /// Adds tokens whose first ones are committed, except their gates and the convolution of a commit.
    #[inline(always)]
    fn keep(&mut self, stored: &'a Stored<'a>, keep: &'a Tensor<'a>) {
        self.request.stored = Some(stored);
        match stored {
            Stored::Kv { k, v } => {
                self.give(Argument::PreviousK, k);
                self.give(Argument::PreviousV, v);
            }
            Stored::X { x } => self.give(Argument::PreviousX, x),
            Stored::Conv(_) => {}
        }
        self.give(Argument::Keep, keep);
    }

    /// Adds the parameters of the gates.
    #[inline(always)]
    fn parameters(&mut self, gates: &GateParts<'a>) {
        for (argument, tensor) in [
            (Argument::ALog, gates.a_log),
            (Argument::DtBias, gates.dt_bias),
        ] {
            if let Some(tensor) = tensor {
                self.give(argument, tensor);
            }
        }
    }

    /// Adds the rings of deferred write-back.
    #[inline(always)]
    fn wait(&mut self, pending: &'a Pending<'a>) {
        self.request.pending = Some(pending);
        self.give(Argument::Keys, &pending.keys);
        self.give(Argument::Updates, &pending.updates);
        self.give(Argument::Decays, &pending.decays);
        self.maybe(Argument::Inputs, &pending.inputs);
        self.give(Argument::PendingLen, &pending.len);
        self.give(Argument::PendingBase, &pending.base);
    }
}

/// P of a pool or of windows. May be called before the check of ranks.
#[inline(always)]
fn slots(pool: &Tensor<'_>) -> u32 {
    pool.dims().or_zero(0) as u32
}
