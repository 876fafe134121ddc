//! What a library launches.

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
use crate::tensor::Memory;

/// A layer's work in a launch, of a prefill in several: a [`Gdn`](super::Gdn) or [`Kda`](super::Kda) step, or a commit
/// of either.
pub trait Work: sealed::Work {
    /// Every compiled variant that computes these arguments on an H200, best or not; of a prefill, of the last of its launches.
    /// [`Library::variants`](crate::Library::variants) says it of another GPU.
    ///
    /// # Errors
    /// What the arguments break of their rules.
    fn variants(&self) -> Result<Vec<Entry>, Error> {
        let request = self.request();
        let problem = request.check()?;
        Ok(problem.variants(&request.lengths()).collect())
    }

    /// How a launch of these arguments is computed: the [formulation](crate::Options::formulation) that they name, or what
    /// [`Formulation::Auto`] is for them, on a GPU with clusters of blocks. Never `Auto`.
    fn formulation(&self) -> Formulation {
        self.request().formulation
    }

    /// The variant that a launch takes on an H200; [`Library::selected`](crate::Library::selected) says it of another GPU.
    /// Whichever it is, the results have the same bits.
    ///
    /// # Errors
    /// As [`Work::variants`]'s.
    fn selected(&self) -> Result<Entry, Error> {
        self.request().selected()
    }

    /// Bytes that a launch must move where every row is active and full: each start state read once, each state that is
    /// kept written once, every other tensor once.
    ///
    /// # Errors
    /// As [`Work::variants`]'s.
    fn bytes(&self) -> Result<u64, Error> {
        self.request().bytes()
    }

    /// Bytes of the [workspace](super::Step::workspace) that a launch takes at most, on any GPU; 0 where it takes none. On Hopper
    /// rows of at most 64 tokens take none.
    ///
    /// They follow from B, T or the `total` of packed rows, heads and dims, whether there are positions or a norm, and whether v
    /// is left there too: where it is convolved or f32, or a view of q, k, v or o is not 16-byte aligned. They grow
    /// with each of B and T, so that the largest launch's are enough for all that are alike in the rest.
    ///
    /// # Errors
    /// As [`Work::variants`]'s.
    fn workspace_bytes(&self) -> Result<usize, Error> {
        let request = self.request();
        let problem = request.check()?;
        Ok(problem.workspace_bytes_anywhere(&request.lengths()) as usize)
    }

    /// Addresses and sizes, as a kernel takes them; of a prefill what these begin with: all are [`Recipe::params`].
    fn params(&self) -> LayerParams {
        *self.request().params()
    }

    /// Checks the arguments, and says how to launch them by other means than [`Library`](crate::Library), on an H200 or
    /// another GPU of compute capability 9.0 or newer with about as many multiprocessors.
    ///
    /// # Errors
    /// As [`Work::variants`]'s; [`Error::Memory`] for a tensor in host memory.
    fn recipe(&self) -> Result<Recipe, Error> {
        self.request().recipe(MEASURED_ON)
    }

    /// [`Work::recipe`] for a GPU of so many multiprocessors (`CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`) and this compute
    /// capability: which tile is fast depends on how often the blocks fill it, and clusters of blocks came with 9.0.
    ///
    /// # Errors
    /// As [`Work::recipe`]'s.
    fn recipe_for(
        &self,
        multiprocessors: u32,
        compute_capability: (u32, u32),
    ) -> Result<Recipe, Error> {
        self.request().recipe(Gpu {
            multiprocessors,
            compute_capability,
        })
    }
}

impl<W: sealed::Work> Work for W {}

/// Numbers and kernels of a launch of the arguments.
impl Request<'_> {
    /// See [`Work::recipe`](super::Work::recipe).
    pub(super) fn recipe(&self, gpu: Gpu) -> Result<Recipe, Error> {
        let problem = self.check_on(gpu)?;
        self.check_memory(Memory::Device)?;
        let lengths = self.lengths();
        problem.check_workspace(&lengths, self.get(Argument::Workspace))?;
        let entry = problem.entry(&lengths, gpu)?;
        // Who launches by itself has no library to take what is not proved.
        if !entry.is_proved() {
            return Err(unproved(entry));
        }
        let launches = problem.launches(entry, &lengths, gpu, true);
        let launches = launches.try_map(|entry| Ok(problem.kernel(entry)))?;
        Ok(Recipe::new(launches, self.parameter()))
    }

    /// The variant that a launch takes.
    pub(crate) fn selected(&self) -> Result<Entry, Error> {
        let problem = self.check_on(MEASURED_ON)?;
        problem.entry(&self.lengths(), MEASURED_ON)
    }

    /// Bytes that a launch must move where every row is active and full.
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
            // With token slots, a window without its oldest input, and the row's own.
            let in_slots = match (self.has(Argument::TokenSlots), self.pending) {
                (true, _) => rows * (window - 1) + tokens,
                // They move, whether a state is written or not, but for drafts.
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
