//! The trait of everything that a library launches.

use gated_delta_kernels::step::LayerParams;

use super::args::Formulation;
use super::argument::{Argument, Unit};
pub(crate) use super::given::sealed;
use super::gpu::{Gpu, MEASURED_ON};
use super::request::{Phase, Request};
use crate::Entry;
use crate::error::Error;
use crate::library::unproved;
use crate::raw::Recipe;
use crate::specialise::Kernel;
use crate::tensor::Memory;

/// The arguments of a launch: a [`Gdn`](super::Gdn) or [`Kda`](super::Kda) step, or a commit or flush of either operator. A prefill may
/// enqueue several kernels.
pub trait Work: sealed::Work {
    /// Lists every compiled variant that computes these arguments on an H200, whether it is the fastest or not. For a prefill,
    /// these are the variants of its main launch, which is the scan if there is one.
    /// [`Library::variants`](crate::Library::variants) lists the variants for another GPU.
    ///
    /// # Errors
    /// The error of the first rule that the arguments break.
    fn variants(&self) -> Result<Vec<Entry>, Error> {
        let request = self.request();
        let problem = request.check()?;
        Ok(problem.variants(&request.lengths()).collect())
    }

    /// The [formulation](crate::Options::formulation) of a launch of these arguments: the formulation that they name, or the
    /// choice of [`Formulation::Auto`] on a GPU with clusters of blocks. Never `Auto` itself.
    fn formulation(&self) -> Formulation {
        self.request().formulation
    }

    /// The variant that a launch selects on an H200. [`Library::selected`](crate::Library::selected) returns the variant for
    /// another GPU. All variants give results of the same bits.
    ///
    /// # Errors
    /// The errors of [`Work::variants`].
    fn selected(&self) -> Result<Entry, Error> {
        self.request().selected()
    }

    /// Number of bytes that a launch must move if every row is active and full: each start state is read once, each kept state is written
    /// once, and every other tensor is accessed once.
    ///
    /// # Errors
    /// The errors of [`Work::variants`].
    fn bytes(&self) -> Result<u64, Error> {
        self.request().bytes()
    }

    /// Size in bytes of the [workspace](super::Step::workspace) that is enough for a launch on any GPU; 0 if no workspace is
    /// needed. On Hopper, rows of at most 64 tokens need no workspace.
    ///
    /// The size depends on B, T or the `total` of packed rows, heads and dims, and on whether the step has positions or a norm.
    /// It is larger if the workspace also holds v: if v is convolved or f32, or if a view of q, k, v or o is not 16-byte aligned.
    /// It grows with B and with T. The size for the largest launch is therefore enough for all launches that are otherwise alike.
    ///
    /// # Errors
    /// The errors of [`Work::variants`].
    fn workspace_bytes(&self) -> Result<usize, Error> {
        let request = self.request();
        let problem = request.check()?;
        Ok(problem.workspace_bytes_anywhere(&request.lengths()) as usize)
    }

    /// Addresses and sizes, as a kernel takes them. For a prefill this is only the start of the parameter; [`Recipe::params`] has
    /// all of it.
    fn params(&self) -> LayerParams {
        *self.request().params()
    }

    /// Checks the arguments, and returns how to launch them without a [`Library`](crate::Library), on an H200 or on another GPU of compute
    /// capability 9.0 or newer with about as many multiprocessors.
    ///
    /// # Errors
    /// The errors of [`Work::variants`]; [`Error::Memory`] for a tensor in host memory.
    fn recipe(&self) -> Result<Recipe, Error> {
        self.request().recipe(MEASURED_ON)
    }

    /// [`Work::recipe`] for a GPU with this number of multiprocessors (`CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`) and this
    /// compute capability. The fastest tile depends on how many waves the blocks need on the GPU; clusters of blocks need 9.0.
    ///
    /// # Errors
    /// The errors of [`Work::recipe`].
    fn recipe_for(
        &self,
        multiprocessors: u32,
        compute_capability: (u32, u32),
    ) -> Result<Recipe, Error> {
        self.request()
            .recipe(Gpu::new(multiprocessors, compute_capability))
    }
}

impl<W: sealed::Work> Work for W {}

/// Results of [`Work`] for a request.
impl Request<'_> {
    /// See [`Work::recipe`](super::Work::recipe).
    pub(super) fn recipe(&self, gpu: Gpu) -> Result<Recipe, Error> {
        let problem = self.check_on(gpu)?;
        self.check_memory(Memory::Device)?;
        let lengths = self.lengths();
        problem.check_workspace(&lengths, self.get(Argument::Workspace))?;
        let entry = problem.entry(&lengths, gpu)?;
        // A caller that launches without a library has not opted in to unproved kernels.
        if !entry.is_proved() {
            return Err(unproved(entry));
        }
        let launches = problem.launches(entry, &lengths, gpu, true);
        let launches =
            launches.try_map(|entry, pass| Ok(Kernel::new(entry, problem.constants_of(pass))))?;
        Ok(Recipe::new(launches, self.parameter()))
    }

    /// The variant that a launch selects on the measured GPU.
    pub(crate) fn selected(&self) -> Result<Entry, Error> {
        let problem = self.check_on(MEASURED_ON)?;
        problem.entry(&self.lengths(), MEASURED_ON)
    }

    /// Number of bytes that a launch must move if every row is active and full.
    pub(crate) fn bytes(&self) -> Result<u64, Error> {
        let problem = self.check()?;
        let (rows, tokens) = (u64::from(self.batch()), self.tokens());
        let is_flush = self.phase == Phase::Flush;
        let final_ones = match (problem.writes_final(), self.pending) {
            (true, None) => rows + self.most_checkpoints(),
            (true, Some(_)) if is_flush => rows,
            _ => 0,
        };
        let of_rings = self.pending.map_or(0, |pending| {
            let entries = match is_flush {
                true => rows * pending.most as u64,
                false => tokens,
            };
            entries * pending.entry_bytes()
        });
        let of_each_token = [Argument::Snapshots, Argument::TokenSlots];
        let of_each_token = of_each_token.into_iter().filter(|&it| self.has(it));
        let written = final_ones + tokens * of_each_token.count() as u64;
        let moves_whole =
            |it: &&Argument| matches!(it.unit(), Unit::Token | Unit::Row | Unit::Layer);
        let others: u64 = (Argument::ALL.iter().filter(moves_whole))
            .filter_map(|&argument| self.tensor(argument))
            .map(|tensor| {
                let elements: usize = tensor.dims().iter().product();
                (elements * tensor.dtype().size_of()) as u64
            })
            .sum();
        let states = (rows + written).saturating_mul(problem.state_bytes());
        let windows = self.windows().map_or(0, |[read, _]| {
            let taps = u64::from(problem.constants.taps);
            let (window, of_each_token) = (taps - 1, self.has(Argument::WindowSnapshots));
            // With token slots, a row writes its window without the oldest input, and the inputs of its tokens.
            let in_slots = match (self.has(Argument::TokenSlots), self.pending) {
                (true, _) => rows * (window - 1) + tokens,
                // Windows are written in every step, even if the state is not, except with a ring of inputs.
                (false, Some(pending)) if pending.inputs.is_none() => rows * window,
                (false, _) => final_ones * window,
            };
            let inputs = rows * window + in_slots + u64::from(of_each_token) * tokens * window;
            let (channels, element) = (read.tensor.dims()[1], read.tensor.dtype().size_of());
            inputs * (channels * element) as u64
        });
        let around = windows.saturating_add(of_rings);
        Ok(states.saturating_add(around).saturating_add(others))
    }
}
