//! What a library launches.

use gated_delta_kernels::step::LayerParams;

use crate::Entry;
use crate::error::Error;
use crate::library::has_clusters;
use crate::raw::Recipe;
use crate::step::select::{Gpu, MEASURED_ON};

/// A layer's work in one launch: a [`Gdn`](super::Gdn) or [`Kda`](super::Kda) step, or a commit of either.
pub trait Work: sealed::Work {
    /// Every compiled variant that computes these arguments, best or not.
    ///
    /// # Errors
    /// What the arguments break of their rules.
    fn variants(&self) -> Result<Vec<Entry>, Error> {
        Ok(self.request().check()?.kind.variants().collect())
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

    /// Addresses and sizes, as a kernel takes them.
    fn params(&self) -> LayerParams {
        self.request().params()
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
        let clusters = has_clusters(compute_capability);
        self.request().recipe(Gpu {
            multiprocessors,
            clusters,
        })
    }
}

impl<W: sealed::Work> Work for W {}

pub(crate) mod sealed {
    use crate::step::request::Request;

    /// Says what the arguments come down to.
    pub trait Work {
        fn request(&self) -> Request<'_>;
    }
}
