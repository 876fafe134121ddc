//! What a library launches.

use gated_delta_kernels::step::LayerParams;

use crate::Entry;
use crate::error::Error;
use crate::raw::Recipe;
use crate::step::Formulation;
use crate::step::select::{Gpu, MEASURED_ON};

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

pub(crate) mod sealed {
    use std::mem::MaybeUninit;

    use crate::step::request::Request;

    /// Says what the arguments come down to.
    pub trait Work {
        /// Makes a request of the arguments where the caller wants it: for a launch, which does not move it.
        fn describe<'r, 'a>(&'a self, at: &'r mut MaybeUninit<Request<'a>>) -> &'r Request<'a>;

        /// The same by value.
        fn request(&self) -> Request<'_> {
            *self.describe(&mut MaybeUninit::uninit())
        }
    }
}
