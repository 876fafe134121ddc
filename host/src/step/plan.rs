//! Plans: launches whose kernels are chosen and compiled ahead; only addresses and sizes are left open.

use std::mem::MaybeUninit;
use std::sync::Arc;

use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::prefill::split::Pass;
use gated_delta_kernels::step::LayerParams;

use super::args::Formulation;
use super::argument::{Argument, Wide};
use super::lengths::Lengths;
use super::problem::Problem;
use super::request::Request;
use super::schedule::prefill::check_workspace;
use super::schedule::{ByRows, Launches, Sequence};
use super::shape::checks;
use super::shape::prefill::WORKSPACE_ALIGNMENT;
use super::shape::rings::check_rings_aligned;
use super::work::Work;
use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{Library, nothing_compiled};
use crate::stream::StreamRef;
use crate::tensor::Tensor;
use crate::tensor_checks::unsupported;
use crate::try_lock::TryLock;

/// A checked step, commit or flush with its kernels compiled. A launch may differ from the planned arguments in addresses, B, P and the
/// `total` of packed rows; a prefill also in T and the workspace. The choice of [`Formulation::Auto`] is fixed: a prefill's plan launches
/// prefills, whatever their T is.
///
/// A plan is cheap to clone and to launch, and keeps its [`Library`] alive. In the simulator, a plan checks every launch in full, so that
/// an engine's hot path can be tested on a CPU.
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
    /// Every kernel that is selected at some batch size. Empty in the simulator.
    functions: Vec<Compiled>,
    /// Kernels by B. Empty for a prefill.
    by_rows: Vec<ByRows<RawFunction>>,
    /// The launches of the last rows, for a prefill.
    of_last: Arc<TryLock<Option<OfLengths>>>,
}

/// Workspace size and launches of a prefill, for rows of some lengths.
#[derive(Clone, Copy, Debug)]
struct OfLengths {
    lengths: Lengths,
    workspace_bytes: u64,
    launches: Sequence<RawFunction>,
}

/// A compiled kernel of a problem, with its entry and pass.
pub(super) type Compiled = ((Entry, Pass), RawFunction);

impl Plan {
    pub(super) fn new(library: &Library, problem: Problem) -> Result<Self, Error> {
        let functions = library.functions(std::slice::from_ref(&problem))?;
        let mut plan = Self {
            library: library.clone(),
            problem,
            functions,
            by_rows: Vec::new(),
            of_last: Arc::default(),
        };
        if library.context().is_some() && !problem.is_chunked() {
            let compiled = |step: ByRows<Entry>| {
                let lengths = Lengths::of_rows(step.last);
                let of = plan.function((step.of, Pass::Output), &lengths).ok()?;
                let ByRows { last, shape, .. } = step;
                Some(ByRows { last, of, shape })
            };
            // The list may end early: a launch reports a missing kernel.
            plan.by_rows = (problem.by_rows(library.gpu()))
                .map_while(compiled)
                .collect();
        }
        Ok(plan)
    }

    /// The compiled function for `batch` rows and its launch shape, for an engine that launches functions directly. The function
    /// has one parameter: the bytes of a [`LayerParams`](crate::raw::LayerParams), or, with deferred write-back, of a
    /// [`DeferredParams`](crate::raw::DeferredParams).
    ///
    /// # Errors
    /// [`Error::Range`] for B. [`Error::Unsupported`] in the simulator, and for a prefill, whose launches depend on more than B:
    /// [`Work::recipe`] lists them. [`Error::Driver`] if the context is gone, and the function with it; a caller that keeps the function
    /// has to call this again after a reset.
    pub fn raw(&self, batch: usize) -> Result<(RawFunction, LaunchShape), Error> {
        checks::batch(batch)?;
        if self.problem.is_chunked() {
            return Err(Error::Unsupported {
                what: "Plan::raw of",
                got: "a prefill".to_owned(),
                allowed: "Plan::launch, or Work::recipe",
            });
        }
        let launches = self.launches(&Lengths::of_rows(batch as u32))?;
        self.library.check_live()?;
        Ok(launches.main)
    }

    /// The compiled functions of the launches of rows of these lengths.
    fn launches(&self, lengths: &Lengths) -> Result<Launches<RawFunction>, Error> {
        let gpu = self.library.gpu();
        let entry = self.problem.entry(lengths, gpu)?;
        let launches = self.problem.launches(entry, lengths, gpu, true);
        launches.try_map(|entry, pass| self.function((entry, pass), lengths))
    }

    fn function(&self, of: (Entry, Pass), lengths: &Lengths) -> Result<RawFunction, Error> {
        let planned = self.functions.iter().find(|(planned, _)| *planned == of);
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

    /// Enqueues the planned kernels on the addresses of `work`. Only B and alignment are checked, and nothing is looked up. In the
    /// simulator `work` is checked in full.
    ///
    /// # Errors
    /// [`Error::Range`] for B and for a workspace that is too small; [`Error::Alignment`] for an address that is less aligned than the
    /// planned one; launch failures. In the simulator, the errors of a launch, and [`Error::Contradiction`] for arguments other than the
    /// planned ones.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold. `work` has the planned shapes (except B, P and `total`, and in a prefill T and C), strides,
    /// dtypes and options.
    pub unsafe fn launch<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
    ) -> Result<(), Error> {
        let mut request = MaybeUninit::uninit();
        let request = work.describe(&mut request);
        if self.library.context().is_none() {
            // SAFETY: the caller's promise.
            return unsafe { self.simulate(stream, request) };
        }
        let rows = request.batch();
        if self.by_rows.is_empty() && self.problem.is_chunked() {
            request.formulation = Formulation::Chunked;
            // SAFETY: the caller's promise.
            return unsafe { self.launch_prefill(stream, request, rows) };
        }
        let Some(of) = self.of_rows(rows) else {
            // SAFETY: the caller's promise.
            return unsafe { self.launch_other_rows(stream, request, rows) };
        };
        self.check_aligned(request)?;
        let [x, y, _] = of.shape.grid;
        let grid = [x, y, rows];
        let shape = LaunchShape { grid, ..of.shape };
        // SAFETY: the caller's promise; the function was compiled for these constants.
        unsafe { self.library.launch_one(stream, of.of, &shape, request) }
    }

    /// [`Plan::launch`] of a number of rows that has no precomputed kernel.
    ///
    /// # Safety
    /// The rules of [`Plan::launch`] hold.
    #[cold]
    #[inline(never)]
    unsafe fn launch_other_rows(
        &self,
        stream: StreamRef<'_>,
        request: &Request<'_>,
        rows: u32,
    ) -> Result<(), Error> {
        checks::batch(rows as usize)?;
        if rows == 0 {
            return Ok(());
        }
        self.check_aligned(request)?;
        let (function, shape) = self.launches(&Lengths::of_rows(rows))?.main;
        // SAFETY: the caller's promise; the function was compiled for these constants.
        unsafe { (self.library).launch_one(stream, function, &shape, request) }
    }

    /// Checks that the addresses are as aligned as planned.
    #[inline(always)]
    fn check_aligned(&self, request: &Request<'_>) -> Result<(), Error> {
        self.problem.check_aligned(request.params())?;
        match request.pending {
            Some(pending) => check_rings_aligned(pending, self.problem.kind.per_channel),
            None => Ok(()),
        }
    }

    /// [`Plan::launch`] in the simulator.
    ///
    /// # Safety
    /// The rules of [`Plan::launch`] hold.
    #[cold]
    #[inline(never)]
    unsafe fn simulate(
        &self,
        stream: StreamRef<'_>,
        request: &mut Request<'_>,
    ) -> Result<(), Error> {
        if self.problem.is_chunked() && request.formulation == Formulation::Auto {
            request.formulation = Formulation::Chunked;
        }
        if request.chosen().check_on(self.library.gpu())? != self.problem {
            return Err(Error::Contradiction {
                one: "the plan",
                other: "these arguments",
                why: "they differ in a shape (besides B and P), a stride, a dtype or an option",
            });
        }
        // SAFETY: the caller's promise.
        unsafe { self.library.launch_request(stream, request, None) }
    }

    /// [`Plan::launch`] of a prefill.
    ///
    /// # Safety
    /// The rules of [`Plan::launch`] hold.
    #[inline(never)]
    unsafe fn launch_prefill(
        &self,
        stream: StreamRef<'_>,
        request: &Request<'_>,
        rows: u32,
    ) -> Result<(), Error> {
        checks::batch(rows as usize)?;
        let lengths = request.lengths_of(rows);
        if lengths.are_nothing() {
            return Ok(());
        }
        self.problem.check_aligned(request.params())?;
        let workspace = request.tensor(Argument::Workspace);
        let address = workspace.map_or(0, Tensor::address);
        checks::aligned(WORKSPACE_ALIGNMENT, || [("workspace", address)])?;
        // Rows are equally long in all layers of a step.
        let last = (self.of_last).with(|last| match last {
            Some(last) if last.lengths == lengths => Some(*last),
            _ => None,
        });
        let of = match last.flatten() {
            Some(of) => of,
            None => self.of_lengths(lengths)?,
        };
        check_workspace(of.workspace_bytes, workspace)?;
        // SAFETY: the caller's promise; the functions were compiled for these constants.
        unsafe { (self.library).launch_several(stream, &of.launches, request) }
    }

    /// The launches of rows of these lengths, remembered for the next launch.
    #[cold]
    fn of_lengths(&self, lengths: Lengths) -> Result<OfLengths, Error> {
        let of = OfLengths {
            lengths,
            workspace_bytes: self.problem.workspace_bytes(&lengths),
            launches: self.launches(&lengths)?.sequence(),
        };
        self.of_last.with(|last| *last = Some(of));
        Ok(of)
    }

    /// The compiled kernel for `rows` rows in a plan that is no prefill. `None` for 0 rows, and for a number that has no precomputed kernel.
    #[inline(always)]
    fn of_rows(&self, rows: u32) -> Option<&ByRows<RawFunction>> {
        if rows == 0 {
            return None;
        }
        self.by_rows.iter().find(|of| rows <= of.last)
    }
}

impl Problem {
    /// Checks that the addresses are as aligned as planned.
    #[inline]
    pub(super) fn check_aligned(&self, params: &LayerParams) -> Result<(), Error> {
        let c = &self.constants;
        if c.wide_io != 0 {
            aligned(Wide::Io, 16, params)?;
            if self.is_chunked() {
                aligned(Wide::Chunks, 16, params)?;
            }
            if self.kind.per_channel {
                aligned(Wide::Channels, 16, params)?;
            }
        }
        if c.wide_state != 0 {
            aligned(Wide::States, 16, params)?;
        }
        if c.wide_norm != 0 {
            aligned(Wide::Norm, 16, params)?;
        }
        if c.wide_conv_weight != 0 {
            let bytes = c.taps as usize * self.conv_weight_bytes();
            aligned(Wide::Taps, bytes, params)?;
        }
        Ok(())
    }

    /// Size of an element of the convolution's weight, in bytes.
    fn conv_weight_bytes(&self) -> usize {
        if self.constants.conv_weight_element == Element::F32 as u32 {
            4
        } else {
            2
        }
    }
}

/// Checks that the addresses of all tensors of class `wide` are multiples of `bytes`, a power of two.
#[inline(always)]
fn aligned(wide: Wide, bytes: usize, params: &LayerParams) -> Result<(), Error> {
    match Argument::addresses(wide, params) & (bytes as u64 - 1) {
        0 => Ok(()),
        _ => Err(misaligned(wide, bytes, params)),
    }
}

#[cold]
fn misaligned(wide: Wide, bytes: usize, params: &LayerParams) -> Error {
    let of_wide = Argument::ALL.iter().filter(|it| it.wide() == wide);
    checks::misaligned(bytes, of_wide.map(|it| (it.name(), it.address(params))))
}
