//! Launches: through the cache, with a chosen variant, and through a plan.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::recurrent::RecurrentConstants;

use super::request::Request;
use super::{LaunchShape, RecurrentParams};
use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::ops::checks::{aligned, one_of};
use crate::plan::{Planned, Problem};
use crate::stream::StreamRef;

/// A GDN MTP verify, a recurrent KDA, a resume or a commit with its kernels compiled: everything but addresses, B, P
/// and the `total` of packed rows is settled.
///
/// Cheap to clone and to launch; it holds its [`Library`] alive.
#[derive(Clone, Debug)]
pub struct RecurrentPlan(Planned<RecurrentConstants>);

impl Library {
    /// Checks and enqueues `request`, with `variant` or the selected one.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, what is written is used by nobody else, and no
    /// two live rows write one slot.
    pub(crate) unsafe fn launch_recurrent(
        &self,
        stream: StreamRef<'_>,
        request: &Request<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        let (switches, tensors) = (request.switches(variant), request.tensors());
        let params = request.params();
        let bytes = bytemuck::bytes_of(&params);
        if let Some((function, shape)) = self.last_recurrent().recall(&switches, &tensors) {
            // SAFETY: the caller's promise; the function was compiled for these layouts.
            return unsafe { self.launch_function(stream, function, shape, bytes) };
        }
        let problem = request.check()?;
        let batch = request.batch();
        let entry = match variant {
            Some(variant) => one_of(problem.kind.variants(), variant)?,
            None => problem.entry(batch)?,
        };
        self.check_memory(&tensors, |name| request.writes(&problem, name))?;
        if batch == 0 {
            return Ok(());
        }
        let (constants, shape) = (problem.constants.words(), problem.shape(entry, batch));
        // SAFETY: the caller's promise; the parameters are those of the entry's operator.
        let launched = unsafe { self.launch(stream, entry, constants, shape, bytes, &tensors) }?;
        if let Some(function) = launched {
            self.last_recurrent()
                .remember(switches, &tensors, function, shape);
        }
        Ok(())
    }

    /// Checks `request` and, on a GPU, compiles every kernel that some batch size gets.
    pub(crate) fn prewarm_recurrent(&self, request: &Request<'_>) -> Result<(), Error> {
        match self.context() {
            Some(_) => self.plan_recurrent(request).map(drop),
            None => request.check().map(drop),
        }
    }

    /// Registers and memory of every variant of `request`.
    pub(crate) fn recurrent_resources(
        &self,
        request: &Request<'_>,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        self.variant_resources(&request.check()?)
    }

    /// Checks `request` and compiles its kernels.
    pub(crate) fn plan_recurrent(&self, request: &Request<'_>) -> Result<RecurrentPlan, Error> {
        Ok(RecurrentPlan(self.plan(request.check()?)?))
    }
}

impl RecurrentPlan {
    /// The compiled function for `batch` rows and its launch shape, for an engine that launches by itself: one
    /// parameter, a [`RecurrentParams`] by value.
    ///
    /// # Errors
    /// [`Error::Range`] for B.
    pub fn raw(&self, batch: usize) -> Result<(RawFunction, LaunchShape), Error> {
        self.0.raw(batch)
    }

    /// Enqueues what is planned on other addresses: no check but B's and alignment's, no look-up.
    ///
    /// # Errors
    /// [`Error::Range`] for B, [`Error::Alignment`] for an address that is less aligned than the planned one, under
    /// its name in [`RecurrentParams`]; launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, tensors of the planned shapes, strides and dtypes are at `params`, what
    /// is written is used by nobody else, and no two live rows write one slot.
    pub unsafe fn launch(
        &self,
        stream: StreamRef<'_>,
        batch: usize,
        params: &RecurrentParams,
    ) -> Result<(), Error> {
        if batch == 0 {
            return Ok(());
        }
        check_aligned(&self.0.problem, params)?;
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(stream, batch, bytemuck::bytes_of(params)) }
    }
}

/// The addresses are as aligned as planned.
pub(super) fn check_aligned(
    problem: &Problem<RecurrentConstants>,
    params: &RecurrentParams,
) -> Result<(), Error> {
    if problem.constants.wide_io != 0 {
        aligned([
            ("q", params.q),
            ("k", params.k),
            ("v", params.v),
            ("o", params.o),
            ("previous_k", params.previous_k),
            ("previous_v", params.previous_v),
        ])?;
        if problem.per_channel() {
            aligned([
                ("g", params.g),
                ("previous_g", params.previous_g),
                ("dt_bias", params.dt_bias),
            ])?;
        }
    }
    if problem.constants.wide_state != 0 {
        aligned([
            ("read_pool", params.read_pool),
            ("write_pool", params.write_pool),
            ("snapshots", params.snapshots),
        ])?;
    }
    Ok(())
}
