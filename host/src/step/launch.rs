//! Launches. They use the cache of compiled kernels, and the selected variant or the caller's.

use std::mem::MaybeUninit;

use bytemuck::bytes_of;
use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::launch::LaunchShape;

use super::args::Formulation;
use super::argument::Argument;
use super::plan::{Compiled, Plan};
use super::problem::Problem;
use super::request::{Request, Sort};
use super::schedule::{Launch, Sequence};
use super::shape::checks::one_of;
use super::work::Work;
use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::on_threads::on_threads;
use crate::stream::StreamRef;

impl Library {
    /// Enqueues a step, a commit or a flush. The arguments are checked, and the compiled kernel is looked up (or compiled, the
    /// first time). A launch is one kernel. A prefill of longer rows is several kernels, in order ([`Recipe::launches`] lists
    /// them). After the first time, a launch allocates nothing and waits for nothing.
    ///
    /// [`Recipe::launches`]: crate::raw::Recipe::launches
    ///
    /// # Errors
    /// The error of the first rule that the arguments break, with the tensor's name; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, and nobody else uses the memory that the launch writes (o,
    /// snapshots, the written slots). No two live rows write one slot.
    pub unsafe fn launch<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
    ) -> Result<(), Error> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller's promise.
        unsafe { self.launch_request(stream, work.describe(&mut request), None) }
    }

    /// [`Library::launch`] with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// The errors of [`Library::launch`]. [`Error::Unsupported`] for a variant that is not one of [`Work::variants`], or that
    /// uses clusters of blocks on a GPU without clusters.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold.
    pub unsafe fn launch_with<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
        variant: Entry,
    ) -> Result<(), Error> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller's promise.
        unsafe { self.launch_request(stream, work.describe(&mut request), Some(variant)) }
    }

    /// Checks `work` and compiles its kernels. The plan can then be launched with other addresses, B and P.
    ///
    /// # Errors
    /// The errors of [`Library::launch`], except those of the launch itself.
    pub fn plan<W: Work + ?Sized>(&self, work: &W) -> Result<Plan, Error> {
        Plan::new(self, work.request().check_on(self.gpu())?)
    }

    /// Compiles every kernel that `work` may be launched with, at any batch size. Later launches of such arguments compile nothing, as
    /// graph capture requires. In the simulator, which compiles nothing, the arguments are only checked.
    ///
    /// # Errors
    /// The errors of [`Library::launch`], except those of the launch itself.
    pub fn prewarm<W: Work + ?Sized>(&self, work: &W) -> Result<(), Error> {
        self.plan(work).map(drop)
    }

    /// [`Library::prewarm`] of everything that a layer is launched with (decodes, verifies, resumes, commits). Kernels are compiled in
    /// parallel on all cores if the driver does so (CUDA 12).
    ///
    /// # Errors
    /// The errors of [`Library::prewarm`], for the first of `works` that fails.
    pub fn prewarm_all(&self, works: &[&dyn Work]) -> Result<(), Error> {
        let problems = works.iter().map(|work| work.request().check_on(self.gpu()));
        let problems = problems.collect::<Result<Vec<_>, _>>()?;
        self.functions(&problems).map(drop)
    }

    /// Every kernel that is selected for these problems at some batch size, compiled in parallel. Empty in the simulator.
    pub(super) fn functions(&self, problems: &[Problem]) -> Result<Vec<Compiled>, Error> {
        if self.context().is_none() {
            return Ok(Vec::new());
        }
        self.check_live()?;
        let mut kernels = Vec::new();
        for problem in problems {
            let entries = problem.entries(self.gpu()).into_iter();
            let passes = entries.flat_map(|entry| problem.passes(entry));
            kernels.extend(passes.map(|of| (problem, of)));
        }
        on_threads(&kernels, |&(problem, (entry, pass))| {
            let (constants, shared_bytes) =
                (problem.constants_of(pass), problem.shared_bytes(entry));
            let function = self.function(entry, constants.words(), shared_bytes)?;
            Ok(((entry, pass), function))
        })
    }

    /// Registers and memory of every variant of `work`, each compiled for these arguments. For a prefill in splits, the scan is
    /// listed twice, once for each of its passes.
    ///
    /// # Errors
    /// The errors of [`Library::prewarm`]; [`Error::Unsupported`] in the simulator, which compiles nothing.
    pub fn resources<W: Work + ?Sized>(
        &self,
        work: &W,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        let request = work.request();
        let problem = request.check_on(self.gpu())?;
        let lengths = request.lengths();
        let mut variants: Vec<Entry> = problem.variants(&lengths).collect();
        variants.extend(problem.beside(&lengths).all());
        let kernels: Vec<_> = (variants.into_iter())
            .flat_map(|entry| problem.passes(entry))
            .collect();
        on_threads(&kernels, |&(entry, pass)| {
            let (constants, shared_bytes) =
                (problem.constants_of(pass), problem.shared_bytes(entry));
            let resources = self.function_resources(entry, constants.words(), shared_bytes)?;
            Ok((entry, resources))
        })
    }

    /// [`Work::variants`] on this library's GPU. Prefills have other variants on Hopper than on other GPUs.
    ///
    /// # Errors
    /// The errors of [`Work::variants`].
    pub fn variants<W: Work + ?Sized>(&self, work: &W) -> Result<Vec<Entry>, Error> {
        let request = work.request();
        let problem = request.check_on(self.gpu())?;
        Ok(problem.variants(&request.lengths()).collect())
    }

    /// The variant that a launch selects on this library's GPU.
    ///
    /// # Errors
    /// The errors of [`Work::variants`].
    pub fn selected<W: Work + ?Sized>(&self, work: &W) -> Result<Entry, Error> {
        let request = work.request();
        let problem = request.check_on(self.gpu())?;
        problem.entry(&request.lengths(), self.gpu())
    }

    /// Enqueues the only function of `request`, with its parameter.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold. The function was compiled for these arguments, and `request` is no prefill.
    #[inline(always)]
    pub(super) unsafe fn launch_one(
        &self,
        stream: StreamRef<'_>,
        function: RawFunction,
        shape: &LaunchShape,
        request: &Request<'_>,
    ) -> Result<(), Error> {
        let deferred;
        let params = match request.pending {
            None => bytes_of(request.params()),
            Some(pending) => {
                deferred = request.deferred_params(pending);
                bytes_of(&deferred)
            }
        };
        // SAFETY: the caller's promise.
        unsafe { self.enter()?.launch(stream, function, shape, params) }
    }

    /// Enqueues the functions of a prefill in order.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold. The functions were compiled for the parameter of `request`.
    pub(super) unsafe fn launch_several(
        &self,
        stream: StreamRef<'_>,
        launches: &Sequence<RawFunction>,
        request: &Request<'_>,
    ) -> Result<(), Error> {
        let entered = self.enter()?;
        let mut params = request.prefill_params();
        for launch in launches.iter() {
            launch.say(&mut params);
            // SAFETY: the caller's promise.
            unsafe { entered.launch(stream, launch.of, &launch.shape, bytes_of(&params)) }?;
        }
        Ok(())
    }

    /// Checks and enqueues `request`, with `variant` or the selected one. If `request` has the layouts of the last launch of its sort, the
    /// functions of that launch are enqueued without a check.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold.
    #[inline(always)]
    pub(super) unsafe fn launch_request(
        &self,
        stream: StreamRef<'_>,
        request: &mut Request<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        let sort = request.sort();
        if sort == Sort::Prefill {
            request.formulation = Formulation::Chunked;
            // SAFETY: the caller's promise.
            return unsafe { self.launch_prefill(stream, request, variant) };
        }
        let (switches, last) = (request.switches(variant), self.last(sort));
        let main = |launches: &Sequence<RawFunction>| launches.iter().next().copied();
        match last.recall(&switches, request.present(), main) {
            // SAFETY: the caller's promise; the function was compiled for these layouts.
            Some(Some(Launch { of, shape, .. })) => unsafe {
                self.launch_one(stream, of, &shape, request)
            },
            // SAFETY: the caller's promise.
            _ => unsafe { self.launch_checked(stream, request.chosen(), variant) },
        }
    }

    /// [`Library::launch_request`] of a prefill.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold.
    #[inline(never)]
    unsafe fn launch_prefill(
        &self,
        stream: StreamRef<'_>,
        request: &Request<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        let (switches, last) = (request.switches(variant), self.last(Sort::Prefill));
        match last.recall(&switches, request.present(), |launches| *launches) {
            // SAFETY: the caller's promise; the functions were compiled for these layouts.
            Some(launches) => unsafe { self.launch_several(stream, &launches, request) },
            // SAFETY: the caller's promise.
            None => unsafe { self.launch_checked(stream, request, variant) },
        }
    }

    /// [`Library::launch_request`] of layouts other than the last: the request is checked and remembered.
    ///
    /// # Safety
    /// The rules of [`Library::launch`] hold.
    #[cold]
    #[inline(never)]
    unsafe fn launch_checked(
        &self,
        stream: StreamRef<'_>,
        request: &Request<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        let problem = request.check_on(self.gpu())?;
        let lengths = request.lengths();
        let entry = match variant {
            Some(variant) => one_of(problem.variants(&lengths), variant)?,
            None => problem.entry(&lengths, self.gpu())?,
        };
        request.check_memory(self.memory())?;
        problem.check_workspace(&lengths, request.get(Argument::Workspace))?;
        if lengths.are_nothing() {
            return Ok(());
        }
        let on_gpu = self.context().is_some();
        let launches = problem.launches(entry, &lengths, self.gpu(), on_gpu);
        if on_gpu {
            // All kernels are compiled before any is enqueued, so that a failure leaves no partial launch.
            let launches = launches.try_map(|entry, pass| {
                let constants = problem.constants_of(pass);
                self.function(entry, constants.words(), problem.shared_bytes(entry))
            })?;
            let sequence = launches.sequence();
            if problem.is_chunked() {
                // SAFETY: the caller's promise; the parameter is that of the entry's operator.
                unsafe { self.launch_several(stream, &sequence, request) }?;
            } else {
                let (function, shape) = &launches.main;
                // SAFETY: as above.
                unsafe { self.launch_one(stream, *function, shape, request) }?;
            }
            let (switches, last) = (request.switches(variant), self.last(request.sort()));
            last.remember(switches, request.present(), sequence);
            return Ok(());
        }
        let (tensors, mut parameter) = (request.tensors(), request.parameter());
        for launch in launches.in_order() {
            let (entry, shape) = (launch.of, launch.shape);
            let (constants, bytes) = (problem.constants_of(launch.pass), parameter.bytes(&launch));
            // SAFETY: as above.
            unsafe { self.launch_entry(stream, entry, constants.words(), shape, bytes, &tensors) }?;
        }
        Ok(())
    }
}
