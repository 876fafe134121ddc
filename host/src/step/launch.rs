//! Launches: through the cache of compiled kernels, with the variant that is selected or one of the caller's choice.

use super::Plan;
use super::checks::one_of;
use super::launches::{Launches, Parameter};
use super::problem::Problem;
use super::request::Request;
use super::work::Work;
use crate::Entry;
use crate::compile::on_threads;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::stream::StreamRef;

impl Library {
    /// Enqueues a step or a commit: checks the arguments, looks the compiled kernel up (or compiles it, the first
    /// time), launches: one kernel, of a prefill of longer rows several, one after the other ([`Recipe::launches`] says
    /// which). Nothing is allocated or synchronised after the first time.
    ///
    /// [`Recipe::launches`]: crate::raw::Recipe::launches
    ///
    /// # Errors
    /// Whatever the arguments break of their rules, named; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, what is written (o, snapshots, the written slots)
    /// is used by nobody else, and no two live rows write one slot.
    pub unsafe fn launch<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_request(stream, &work.request(), None) }
    }

    /// As [`Library::launch`], with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// As [`Library::launch`]'s, and [`Error::Unsupported`] for a variant that is not one of [`Work::variants`], or runs in
    /// clusters of blocks that the GPU does not have.
    ///
    /// # Safety
    /// As [`Library::launch`]'s.
    pub unsafe fn launch_with<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
        variant: Entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_request(stream, &work.request(), Some(variant)) }
    }

    /// Checks `work` and compiles its kernels; the plan is then launched with other addresses, B and P.
    ///
    /// # Errors
    /// As [`Library::launch`]'s, but for the launch.
    pub fn plan<W: Work + ?Sized>(&self, work: &W) -> Result<Plan, Error> {
        Plan::new(self, work.request().check()?)
    }

    /// Compiles every kernel that `work` may be launched with at any batch size, so that no later launch of such
    /// arguments compiles, as graph capture requires. On the simulator, which has nothing to compile, checks alone.
    ///
    /// # Errors
    /// As [`Library::launch`]'s, but for the launch.
    pub fn prewarm<W: Work + ?Sized>(&self, work: &W) -> Result<(), Error> {
        self.plan(work).map(drop)
    }

    /// [`Library::prewarm`] of everything that a layer is launched with (decodes, verifies, resumes, commits), side by
    /// side on all cores where the driver compiles so (CUDA 12).
    ///
    /// # Errors
    /// As [`Library::prewarm`]'s, of the first that fails.
    pub fn prewarm_all(&self, works: &[&dyn Work]) -> Result<(), Error> {
        let problems = works.iter().map(|work| work.request().check());
        let problems = problems.collect::<Result<Vec<_>, _>>()?;
        self.functions(&problems).map(drop)
    }

    /// Every kernel that some batch size of these problems gets, compiled side by side; none in the simulator.
    pub(super) fn functions(
        &self,
        problems: &[Problem],
    ) -> Result<Vec<(Entry, RawFunction)>, Error> {
        if self.context().is_none() {
            return Ok(Vec::new());
        }
        let mut kernels = Vec::new();
        for problem in problems {
            let entries = problem.entries(self.gpu()).into_iter();
            kernels.extend(entries.map(|entry| (problem, entry)));
        }
        on_threads(&kernels, |&(problem, entry)| {
            let shared_bytes = problem.shared_bytes(entry);
            let function = self.function(entry, problem.words(), shared_bytes)?;
            Ok((entry, function))
        })
    }

    /// Registers and memory of every variant of `work`, compiled for it.
    ///
    /// # Errors
    /// As [`Library::prewarm`]'s; [`Error::Unsupported`] on the simulator, which compiles nothing.
    pub fn resources<W: Work + ?Sized>(
        &self,
        work: &W,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        let request = work.request();
        let problem = request.check()?;
        let lengths = request.lengths();
        let mut variants: Vec<Entry> = problem.variants(&lengths).collect();
        variants.extend(problem.beside(&lengths).all());
        on_threads(&variants, |&entry| {
            let shared_bytes = problem.shared_bytes(entry);
            let resources = self.function_resources(entry, problem.words(), shared_bytes)?;
            Ok((entry, resources))
        })
    }

    /// The variant that a launch takes on this library's GPU.
    ///
    /// # Errors
    /// As [`Work::variants`]'s.
    pub fn selected<W: Work + ?Sized>(&self, work: &W) -> Result<Entry, Error> {
        let request = work.request();
        let problem = request.check()?;
        problem.entry(&request.lengths(), self.gpu())
    }

    /// Enqueues compiled functions, one after the other.
    ///
    /// # Safety
    /// As [`Library::launch`]'s; `parameter` is what the functions were compiled for.
    pub(super) unsafe fn launch_all(
        &self,
        stream: StreamRef<'_>,
        launches: Launches<RawFunction>,
        mut parameter: Parameter,
    ) -> Result<(), Error> {
        for launch in launches.in_order() {
            let bytes = parameter.bytes(&launch);
            // SAFETY: the caller's promise.
            unsafe { self.launch_function(stream, launch.of, launch.shape, bytes) }?;
        }
        Ok(())
    }

    /// Checks and enqueues `request`, with `variant` or the selected one.
    ///
    /// # Safety
    /// As [`Library::launch`]'s.
    pub(super) unsafe fn launch_request(
        &self,
        stream: StreamRef<'_>,
        request: &Request<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        let (switches, tensors) = (request.switches(variant), request.tensors());
        let mut parameter = request.parameter();
        let last = self.last(request.sort());
        if let Some(launches) = last.recall(&switches, &tensors) {
            // SAFETY: the caller's promise; the functions were compiled for these layouts.
            return unsafe { self.launch_all(stream, launches, parameter) };
        }
        let problem = request.check()?;
        let lengths = request.lengths();
        let entry = match variant {
            Some(variant) => one_of(problem.variants(&lengths), variant)?,
            None => problem.entry(&lengths, self.gpu())?,
        };
        self.check_memory(&tensors, |name| request.writes(&problem, name))?;
        problem.check_workspace(&lengths, request.workspace)?;
        if lengths.are_nothing(&problem) {
            return Ok(());
        }
        let on_gpu = self.context().is_some();
        let launches = problem.launches(entry, &lengths, self.gpu(), on_gpu);
        if on_gpu {
            // Compiled before anything is enqueued, so that a failure leaves nothing half done.
            let launches = launches.try_map(|entry| {
                self.function(entry, problem.words(), problem.shared_bytes(entry))
            })?;
            // SAFETY: the caller's promise; the parameter is that of the entry's operator.
            unsafe { self.launch_all(stream, launches, parameter) }?;
            last.remember(switches, &tensors, launches);
            return Ok(());
        }
        for launch in launches.in_order() {
            let (entry, shape) = (launch.of, launch.shape);
            let (words, bytes) = (problem.words(), parameter.bytes(&launch));
            // SAFETY: as above.
            unsafe { self.launch_entry(stream, entry, words, shape, bytes, &tensors) }?;
        }
        Ok(())
    }
}
