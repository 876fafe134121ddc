//! Plans: everything but addresses and sizes is settled before the first launch.

use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::step::StepParams;

use super::checks::{self, aligned};
use super::problem::Problem;
use super::work::Work;
use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{Library, nothing_compiled};
use crate::shapes::unsupported;
use crate::stream::StreamRef;

/// A step or a commit with its kernels compiled: everything but addresses, B, P and the `total` of packed rows is
/// settled.
///
/// Cheap to clone and to launch; it holds its [`Library`] alive. A plan of the simulator checks every launch in full,
/// so that an engine's hot path can be tested on a CPU.
///
/// ```no_run
/// use gated_delta::{Error, Gdn, Library, Plan, StreamRef};
///
/// /// Once for a layer.
/// fn plan(library: &Library, first: &Gdn<'_>) -> Result<Plan, Error> {
///     library.plan(first)
/// }
///
/// /// Every step, for the same shapes, strides and dtypes, but any B, P and addresses.
/// fn step(plan: &Plan, stream: StreamRef<'_>, step: &Gdn<'_>) -> Result<(), Error> {
///     // SAFETY: the tensors outlive the step, and no two rows of it write one slot.
///     unsafe { plan.launch(stream, step) }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    library: Library,
    problem: Problem,
    /// Every kernel that some batch size gets; none in the simulator.
    functions: Vec<(Entry, RawFunction)>,
}

impl Plan {
    pub(super) fn new(library: &Library, problem: Problem) -> Result<Self, Error> {
        let functions = library.functions(std::slice::from_ref(&problem))?;
        Ok(Self {
            library: library.clone(),
            problem,
            functions,
        })
    }

    /// The compiled function for `batch` rows and its launch shape, for an engine that launches by itself: one
    /// parameter, a [`StepParams`] by value.
    ///
    /// # Errors
    /// [`Error::Range`] for B; [`Error::Unsupported`] on the simulator.
    pub fn raw(&self, batch: usize) -> Result<(RawFunction, LaunchShape), Error> {
        checks::batch(batch)?;
        let multiprocessors = self.library.multiprocessors();
        let entry = self.problem.entry(batch as u32, multiprocessors)?;
        let planned = self.functions.iter().find(|(planned, _)| *planned == entry);
        match planned {
            Some((_, function)) => Ok((*function, self.problem.shape(entry, batch as u32))),
            None if self.library.context().is_none() => Err(nothing_compiled()),
            None => Err(unsupported(
                "B",
                batch,
                "a batch size that the plan has a kernel for",
            )),
        }
    }

    /// Enqueues what is planned on the addresses of `work`: no check but B's and alignment's, no look-up. On the
    /// simulator `work` is checked in full.
    ///
    /// # Errors
    /// [`Error::Range`] for B, [`Error::Alignment`] for an address that is less aligned than the planned one; launch
    /// failures. On the simulator, what a launch refuses, and [`Error::Contradiction`] for arguments that are not the
    /// planned ones.
    ///
    /// # Safety
    /// As [`Library::launch`]'s; `work` has the planned shapes (but for B, P and `total`), strides, dtypes and options.
    pub unsafe fn launch<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
    ) -> Result<(), Error> {
        let request = work.request();
        if self.library.context().is_none() {
            if request.check()? != self.problem {
                return Err(Error::Contradiction {
                    one: "the plan",
                    other: "these arguments",
                    why: "they differ in a shape (besides B and P), a stride, a dtype or an option",
                });
            }
            // SAFETY: the caller's promise.
            return unsafe { self.library.launch_request(stream, &request, None) };
        }
        let batch = request.batch();
        if batch == 0 {
            return Ok(());
        }
        let params = request.params();
        self.problem.check_aligned(&params)?;
        let (function, shape) = self.raw(batch as usize)?;
        let params = bytemuck::bytes_of(&params);
        // SAFETY: the caller's promise; the function was compiled for these constants.
        unsafe {
            self.library
                .launch_function(stream, function, shape, params)
        }
    }
}

impl Problem {
    /// The addresses are as aligned as planned.
    pub(super) fn check_aligned(&self, params: &StepParams) -> Result<(), Error> {
        if self.constants.wide_io != 0 {
            aligned([
                ("q", params.q),
                ("k", params.k),
                ("v", params.v),
                ("o", params.o),
                ("previous k", params.previous_k),
                ("previous v", params.previous_v),
            ])?;
            if self.kind.operator.per_channel() {
                aligned([
                    ("g", params.g),
                    ("previous g", params.previous_g),
                    ("dt_bias", params.dt_bias),
                ])?;
            }
        }
        if self.constants.wide_state != 0 {
            aligned([
                ("pool", params.read_pool),
                ("write_pool", params.write_pool),
                ("snapshots", params.snapshots),
            ])?;
        }
        Ok(())
    }
}
