//! Launches: through the cache of compiled kernels, with the variant that is selected or one of the caller's choice.

use gated_delta_kernels::launch::LaunchShape;

use super::Plan;
use super::checks::one_of;
use super::prefill::Beside;
use super::problem::Problem;
use super::request::Request;
use super::work::Work;
use crate::Entry;
use crate::compile::on_threads;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::recall::Calls;
use crate::stream::StreamRef;

impl Library {
    /// Enqueues a step or a commit: checks the arguments, looks the compiled kernel up (or compiles it, the first
    /// time), launches; of a prefill up to three kernels, one after the other. Nothing is allocated or synchronised
    /// after the first time.
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
        let lengths = request.lengths(&problem);
        let mut variants: Vec<Entry> = problem.kind_of(&lengths).variants().collect();
        let beside = problem.beside(&lengths);
        variants.extend(beside.all().map(|(entry, _)| entry));
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
        problem.entry(&request.lengths(&problem), self.gpu())
    }

    /// Enqueues compiled functions, one after the other.
    ///
    /// # Safety
    /// As [`Library::launch`]'s; `bytes` are the parameters that the functions were compiled for.
    pub(super) unsafe fn launch_calls(
        &self,
        stream: StreamRef<'_>,
        calls: Calls,
        bytes: &[u8],
    ) -> Result<(), Error> {
        for (function, shape) in calls.in_order() {
            // SAFETY: the caller's promise.
            unsafe { self.launch_function(stream, function, shape, bytes) }?;
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
        let params = request.params();
        let (prefill, deferred);
        let bytes = if request.is_chunked() {
            prefill = request.prefill_params(params);
            bytemuck::bytes_of(&prefill)
        } else if let Some(pending) = request.pending {
            deferred = request.deferred_params(params, pending);
            bytemuck::bytes_of(&deferred)
        } else {
            bytemuck::bytes_of(&params)
        };
        let last = self.last(request.sort());
        if let Some(calls) = last.recall(&switches, &tensors) {
            // SAFETY: the caller's promise; the functions were compiled for these layouts.
            return unsafe { self.launch_calls(stream, calls, bytes) };
        }
        let problem = request.check()?;
        let lengths = request.lengths(&problem);
        let entry = match variant {
            Some(variant) => one_of(problem.kind_of(&lengths).variants(), variant)?,
            None => problem.entry(&lengths, self.gpu())?,
        };
        self.check_memory(&tensors, |name| request.writes(&problem, name))?;
        problem.check_workspace(&lengths, request.workspace)?;
        if lengths.are_nothing(&problem) {
            return Ok(());
        }
        let launch = |entry, shape| {
            // SAFETY: the caller's promise; the parameters are those of the entry's operator.
            let launched = unsafe {
                self.launch_entry(stream, entry, problem.words(), shape, bytes, &tensors)
            };
            launched.map(|function| function.map(|function| (function, shape)))
        };
        let beside = problem.beside(&lengths);
        if beside != Beside::NOTHING {
            // Compiled before anything is enqueued, so that a failure leaves nothing half done.
            let all = beside.all().map(|(entry, _)| entry);
            for entry in all.chain([entry]).filter(|_| self.context().is_some()) {
                self.function(entry, problem.words(), problem.shared_bytes(entry))?;
            }
        }
        let optional = |launched: Option<(Entry, LaunchShape)>| match launched {
            Some((entry, shape)) => launch(entry, shape),
            None => Ok(None),
        };
        let [first, second] = beside.before;
        let before = [optional(first)?, optional(second)?];
        let shape = match self.context() {
            Some(_) => problem.shape_on(entry, &lengths, self.gpu()),
            None => problem.shape(entry, &lengths),
        };
        let main = launch(entry, shape)?;
        let after = optional(beside.after)?;
        if let Some(main) = main {
            let beside = Beside { before, after };
            last.remember(switches, &tensors, Calls { main, beside });
        }
        Ok(())
    }
}
