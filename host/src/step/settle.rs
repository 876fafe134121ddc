//! From arguments to a problem that some kernel computes.

use super::args::Formulation;
use super::gpu::Gpu;
use super::problem::Problem;
use super::request::Request;
use super::shape;
use crate::error::Error;

impl Request<'_> {
    /// Checks shapes, dtypes, strides and switches, and that a block of some kernel has room; says what to compile.
    pub(crate) fn check(&self) -> Result<Problem, Error> {
        let problem = shape::check(self)?;
        problem.kind.check_room()?;
        Ok(problem)
    }

    /// [`Self::check`] for a GPU. Where the caller left the choice, and the tokens of a layer at once would take clusters of blocks
    /// that the GPU has not, the problem is computed token by token. One GPU has one choice, so that its bits stay what they are.
    pub(super) fn check_on(&self, gpu: Gpu) -> Result<Problem, Error> {
        let problem = self.check()?.on(gpu);
        let is_left = self.options.formulation == Formulation::Auto && self.pending.is_none();
        let may_change = is_left && self.formulation == Formulation::Parallel;
        if !may_change || gpu.has_clusters() || problem.kind.entries(gpu).next().is_some() {
            return Ok(problem);
        }
        let mut one_by_one = *self;
        one_by_one.formulation = Formulation::Recurrent;
        one_by_one.check()
    }
}
