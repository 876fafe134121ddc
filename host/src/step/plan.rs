//! Plans: everything but addresses and sizes is settled before the first launch.

use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::step::LayerParams;

use super::checks::{self, aligned};
use super::launches::{Launches, Parameter};
use super::pending::check_rings_aligned;
use super::prefill::{Lengths, WORKSPACE_ALIGNMENT};
use super::problem::Problem;
use super::work::Work;
use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{Library, nothing_compiled};
use crate::shapes::unsupported;
use crate::stream::StreamRef;

/// A step or a commit with its kernels compiled: everything but addresses, B, P and the `total` of packed rows is
/// settled; of a prefill, T and the workspace are not either.
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
    /// parameter, of which a [`LayerParams`](crate::raw::LayerParams) has the bytes, of states that wait a
    /// [`DeferredParams`](crate::raw::DeferredParams).
    ///
    /// # Errors
    /// [`Error::Range`] for B; [`Error::Unsupported`] on the simulator, and for a prefill, whose launches follow from
    /// more than B: [`Work::recipe`] says which they are.
    pub fn raw(&self, batch: usize) -> Result<(RawFunction, LaunchShape), Error> {
        checks::batch(batch)?;
        if self.problem.is_chunked() {
            return Err(Error::Unsupported {
                what: "Plan::raw of formulation",
                got: "chunked".to_owned(),
                allowed: "Plan::launch, or Work::recipe",
            });
        }
        let launches = self.launches(&Lengths::of_rows(batch as u32))?;
        Ok(launches.main)
    }

    /// The compiled functions of rows of these lengths.
    fn launches(&self, lengths: &Lengths) -> Result<Launches<RawFunction>, Error> {
        let gpu = self.library.gpu();
        let entry = self.problem.entry(lengths, gpu)?;
        let launches = self.problem.launches(entry, lengths, gpu, true);
        launches.try_map(|entry| self.function(entry, lengths))
    }

    fn function(&self, entry: Entry, lengths: &Lengths) -> Result<RawFunction, Error> {
        let planned = self.functions.iter().find(|(planned, _)| *planned == entry);
        match planned {
            Some((_, function)) => Ok(*function),
            None if self.library.context().is_none() => Err(nothing_compiled()),
            None => Err(unsupported(
                "B",
                lengths.rows as usize,
                "a batch size that the plan has a kernel for",
            )),
        }
    }

    /// Enqueues what is planned on the addresses of `work`: no check but B's and alignment's, no look-up. On the
    /// simulator `work` is checked in full.
    ///
    /// # Errors
    /// [`Error::Range`] for B and for a workspace that is too small, [`Error::Alignment`] for an address that is less
    /// aligned than the planned one; launch failures. On the simulator, what a launch refuses, and
    /// [`Error::Contradiction`] for arguments that are not the planned ones.
    ///
    /// # Safety
    /// As [`Library::launch`]'s; `work` has the planned shapes (but for B, P and `total`, of a prefill T and C),
    /// strides, dtypes and options.
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
        checks::batch(request.batch() as usize)?;
        let lengths = request.lengths();
        if lengths.are_nothing(&self.problem) {
            return Ok(());
        }
        let parameter = request.parameter();
        let per_channel = self.problem.kind.operator.per_channel();
        match &parameter {
            Parameter::Layer(params) => self.problem.check_aligned(params)?,
            Parameter::Deferred(params) => {
                self.problem.check_aligned(&params.layer)?;
                check_rings_aligned(params, per_channel)?;
            }
            Parameter::Prefill(params) => {
                self.problem.check_aligned(&params.layer)?;
                aligned(WORKSPACE_ALIGNMENT, [("workspace", params.workspace)])?;
                self.problem.check_workspace(&lengths, request.workspace)?;
            }
        }
        let launches = self.launches(&lengths)?;
        // SAFETY: the caller's promise; the functions were compiled for these constants.
        unsafe { self.library.launch_all(stream, launches, parameter) }
    }
}

impl Problem {
    /// The addresses are as aligned as planned.
    pub(super) fn check_aligned(&self, params: &LayerParams) -> Result<(), Error> {
        let step = &params.step;
        if self.constants.wide_io != 0 {
            aligned(
                16,
                [
                    ("q", step.q),
                    ("k", step.k),
                    ("v", step.v),
                    ("o", step.o),
                    ("previous k", step.previous_k),
                    ("previous v", step.previous_v),
                ],
            )?;
            if self.is_chunked() {
                aligned(16, [("x", params.x)])?;
            }
            if self.kind.operator.per_channel() {
                aligned(
                    16,
                    [
                        ("g", step.g),
                        ("previous g", step.previous_g),
                        ("dt_bias", step.dt_bias),
                    ],
                )?;
            }
        }
        if self.constants.wide_state != 0 {
            aligned(
                16,
                [
                    ("pool", step.read_pool),
                    ("write_pool", step.write_pool),
                    ("snapshots", step.snapshots),
                ],
            )?;
        }
        if self.constants.wide_conv_weight != 0 {
            let bytes = self.constants.taps as usize * self.conv_weight_bytes();
            aligned(bytes, [("conv_weight", params.conv_weight)])?;
        }
        Ok(())
    }

    /// Bytes of an element of the convolution's weight.
    fn conv_weight_bytes(&self) -> usize {
        if self.constants.conv_weight_element == Element::F32 as u32 {
            4
        } else {
            2
        }
    }
}
