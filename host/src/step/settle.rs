//! The stage from a request to a problem that some kernel computes.

use super::args::Formulation;
use super::gpu::Gpu;
use super::problem::Problem;
use super::request::Request;
use super::shape;
use crate::error::Error;

impl Request<'_> {
    /// Checks shapes, dtypes, strides and switches, and that some kernel has room for the heads and tokens. Returns what to compile.
    pub(crate) fn check(&self) -> Result<Problem, Error> {
        let problem = shape::check(self)?;
        problem.kind.check_room()?;
        Ok(problem)
    }

    /// [`Self::check`] for a GPU. If the library chose `Parallel` for a layer, and the GPU lacks the clusters of blocks or the
    /// shared memory for it, the problem becomes `Recurrent`. The choice is the same for every launch on a GPU, so that bits are
    /// stable.
    pub(super) fn check_on(&self, gpu: Gpu) -> Result<Problem, Error> {
        let problem = self.check()?.on(gpu);
        let is_left = self.options.formulation == Formulation::Auto && self.pending.is_none();
        let may_change = is_left && self.formulation == Formulation::Parallel;
        if !may_change || problem.kind.entries(gpu).next().is_some() {
            return Ok(problem);
        }
        let mut one_by_one = *self;
        one_by_one.formulation = Formulation::Recurrent;
        Ok(one_by_one.check()?.on(gpu))
    }
}
