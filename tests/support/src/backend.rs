//! Backends that run a case: the simulator, and the GPU if there is one.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{LazyLock, OnceLock};
use std::{env, thread};

use gated_delta::driver::{Context, Device, DeviceMemory, Stream};
use gated_delta::{Entry, Error, Library, StreamRef, Tensor};
use gated_delta_harness::arguments::Arguments;

use crate::case::Case;

/// A machine that runs kernels.
pub enum Backend {
    /// The simulator: the kernels' source on the CPU, with checks of accesses and races.
    Simulator(Library),
    /// The first GPU.
    Cuda(Library, Context),
}

/// The simulator, for queries whose answer needs no launch, such as the variants of a case.
pub fn simulator() -> &'static Backend {
    static SIMULATOR: LazyLock<Backend> =
        LazyLock::new(|| Backend::Simulator(Library::simulator()));
    &SIMULATOR
}

/// All backends of this machine: the simulator, and the GPU if there is one. `GATED_DELTA_SIMULATOR=0` leaves the GPU alone. This
/// is for sources that have passed in the simulator, so that all cores compile for the driver.
pub fn backends() -> &'static [Backend] {
    static BACKENDS: OnceLock<Vec<Backend>> = OnceLock::new();
    BACKENDS.get_or_init(|| {
        let cuda =
            gpu().map(|context| Backend::Cuda(Library::experimental(context), context.clone()));
        with_simulator(|| simulator().library().clone(), cuda)
    })
}

/// The list of backends. The simulator is in the list unless the caller turned it off and there is a GPU.
fn with_simulator(simulator: impl FnOnce() -> Library, cuda: Option<Backend>) -> Vec<Backend> {
    let is_simulated = env::var_os("GATED_DELTA_SIMULATOR").is_none_or(|value| value != "0");
    let simulator = (is_simulated || cuda.is_none()).then(|| Backend::Simulator(simulator()));
    simulator.into_iter().chain(cuda).collect()
}

/// Compute capabilities whose prefills have different machine code: Hopper, two older GPUs that differ in the size of shared memory, and
/// a newer one, which has Hopper's bulk copies and launches that overlap.
pub const MACHINES: [(u32, u32); 4] = [(9, 0), (8, 0), (8, 6), (10, 0)];

/// Positions in [`MACHINES`] of the machines that run the scan for GPUs other than Hopper.
const PORTABLE: [usize; 3] = [1, 2, 3];

/// The [`backends`] with the compute capability at position `machine` of [`MACHINES`]. The GPU is also used as such a device, if it has
/// the instructions and the shared memory.
fn backends_of(machine: usize) -> &'static [Backend] {
    static BACKENDS: [OnceLock<Vec<Backend>>; MACHINES.len()] =
        [const { OnceLock::new() }; MACHINES.len()];
    if machine == 0 {
        return backends();
    }
    BACKENDS[machine].get_or_init(|| {
        let capability = MACHINES[machine];
        let cuda = gpu().and_then(
            |context| match Library::for_capability(context, capability) {
                Ok(library) => Some(Backend::Cuda(library, context.clone())),
                Err(Error::Unsupported { .. }) => None,
                Err(error) => panic!("{error}"),
            },
        );
        with_simulator(|| Library::simulator_of(capability), cuda)
    })
}

/// Whether `entry` is the inter-chunk scan of a prefill for GPUs other than Hopper.
#[must_use]
pub fn is_portable_chain(entry: Entry) -> bool {
    let is_chain = (entry.computes()).is_some_and(|computes| computes.family.is_chain());
    is_chain && !entry.takes_warpgroups()
}

/// Positions in [`MACHINES`] of the machines that run the tests of `entry`.
fn machines_of(entry: Entry) -> &'static [usize] {
    match is_portable_chain(entry) {
        true => &PORTABLE,
        false => &[0],
    }
}

/// The simulator of a GPU that `entry` is for, for queries whose answer needs no launch.
pub fn simulator_for(entry: Entry) -> &'static Backend {
    static OTHERS: LazyLock<Backend> =
        LazyLock::new(|| Backend::Simulator(Library::simulator_of(MACHINES[PORTABLE[0]])));
    match is_portable_chain(entry) {
        true => &OTHERS,
        false => simulator(),
    }
}

/// The backend of the first GPU, used as a machine that `entry` is for. `None` without a GPU.
pub fn cuda_for(entry: Entry) -> Option<&'static Backend> {
    let is_cuda = |backend: &&Backend| matches!(backend, Backend::Cuda(..));
    let mut machines = machines_of(entry).iter();
    machines.find_map(|&machine| backends_of(machine).iter().find(is_cuda))
}

/// A variable that is a number of at least `least`, or `usual` without the variable.
fn number(variable: &str, least: usize, usual: usize) -> usize {
    env::var(variable).map_or(usual, |text| {
        let number = text.parse().ok().filter(|number| *number >= least);
        number.unwrap_or_else(|| panic!("{variable}: wanted {least} or more, got {text}"))
    })
}

/// The driver compiles another text for each problem. So the GPU takes one problem in thirteen, or one in `GATED_DELTA_GPU_SHARE`.
/// A share without the factors 2 and 3 goes through all [`MACHINES`].
fn share() -> usize {
    static SHARE: LazyLock<usize> = LazyLock::new(|| number("GATED_DELTA_GPU_SHARE", 1, 13));
    *SHARE
}

/// Whether the GPU takes problem `turn` of `count` that are the same in each run: one in `GATED_DELTA_GPU_SHARE`, and at least one of
/// them. Other values of `GATED_DELTA_GPU_TURN` select other problems: as many values as the share is select all.
#[must_use]
pub fn is_of_gpu(turn: usize, count: usize) -> bool {
    (turn + first_turn()).is_multiple_of(share().min(count.max(1)))
}

/// The GPU's share of `items`, at least one of them ([`is_of_gpu`]). Another `turn` is another share.
#[must_use]
pub fn of_gpu<T>(items: Vec<T>, turn: usize) -> Vec<T> {
    let count = items.len();
    let numbered = items.into_iter().enumerate();
    let taken = numbered.filter(|&(i, _)| is_of_gpu(turn + i, count));
    taken.map(|(_, item)| item).collect()
}

/// `GATED_DELTA_GPU_TURN`: which problems a run draws, and which fixed ones the GPU takes.
pub(crate) fn first_turn() -> usize {
    static TURN: LazyLock<usize> = LazyLock::new(|| number("GATED_DELTA_GPU_TURN", 0, 0));
    *TURN
}

/// The simulator, and the GPU too if it takes the problem.
pub fn backends_if(is_of_gpu: bool) -> impl Iterator<Item = &'static Backend> {
    let all = backends().iter();
    all.filter(move |backend| is_of_gpu || matches!(backend, Backend::Simulator(_)))
}

/// Shares the problems of one kernel among backends. The GPU takes one problem in `GATED_DELTA_GPU_SHARE`, the simulator takes all
/// problems. After a failure the GPU takes all of them too, since a smaller failing problem is searched.
#[derive(Debug)]
pub struct Turns {
    next: AtomicUsize,
    failed: AtomicBool,
    /// Number of the first turn among those of the GPU.
    after: usize,
    /// Positions in [`MACHINES`] of the machines that take problems in turn, and the number of turns before the first problem.
    machines: (&'static [usize], usize),
}

impl Turns {
    /// Turns that start at number `after`. The GPU takes the turns whose number is a multiple of its share: the first problem if
    /// `after` is 0, another one otherwise.
    #[must_use]
    pub const fn new(after: usize) -> Self {
        Self::among(after, (&[0], 0))
    }

    /// Turns of problems that are the same in each run: the GPU takes other ones with each `GATED_DELTA_GPU_TURN`.
    #[must_use]
    pub fn of_fixed(after: usize) -> Self {
        Self::new(after + first_turn())
    }

    /// Turns of problems of several kernels. Problems go to the [`MACHINES`] in turn, and each caller starts one machine further
    /// than the last.
    #[must_use]
    pub fn of_machines() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self::among(0, (&[0, 1, 2, 3], NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Like [`Turns::of_fixed`], on the machines that `entry` is for.
    #[must_use]
    pub fn of_entry(entry: Entry, after: usize) -> Self {
        Self::among(after + first_turn(), (machines_of(entry), 0))
    }

    const fn among(after: usize, machines: (&'static [usize], usize)) -> Self {
        Self {
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            after,
            machines,
        }
    }

    /// Runs `body` on each backend whose turn it is for the next problem.
    pub fn next(&self, body: impl Fn(&'static Backend)) {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let (machines, first) = self.machines;
        let is_turn = (self.after + turn).is_multiple_of(share());
        let of_gpu = is_turn || self.failed.load(Ordering::Relaxed);
        let _watch = Watch(&self.failed);
        backends_of(machines[(first + turn) % machines.len()])
            .iter()
            .filter(|backend| of_gpu || matches!(backend, Backend::Simulator(_)))
            .for_each(body);
    }
}

/// Sets its flag when the thread panics.
struct Watch<'a>(&'a AtomicBool);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.0.fetch_or(thread::panicking(), Ordering::Relaxed);
    }
}

/// The backend of the first GPU. `None` without a GPU.
pub fn cuda() -> Option<&'static Backend> {
    backends()
        .iter()
        .find(|backend| matches!(backend, Backend::Cuda(..)))
}

/// The context of the first GPU. Without a GPU it returns `None` and says so once on stderr.
///
/// # Panics
/// If the GPU does not work, or if there is none and `GATED_DELTA_REQUIRE_GPU=1`.
pub fn gpu() -> Option<&'static Context> {
    static CONTEXT: OnceLock<Option<Context>> = OnceLock::new();
    let context = CONTEXT.get_or_init(|| match Device::get(0).and_then(Context::primary) {
        Ok(context) => Some(context),
        Err(absence @ (Error::NoDriver { .. } | Error::NoDevice)) => {
            // `eprintln!` would be captured by the test harness.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: everything on the GPU ({absence})"
            );
            None
        }
        Err(error) => panic!("{error}"),
    });
    let required = env::var_os("GATED_DELTA_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(
        context.is_some() || !required,
        "GATED_DELTA_REQUIRE_GPU=1, and there is no GPU"
    );
    context.as_ref()
}

/// Calls `body` for each of `items` on as many threads as there are cores, or `RUST_TEST_THREADS`. On a GPU most time goes to the
/// driver's compiler, which runs on the launching thread.
///
/// # Panics
/// If `body` panics. No further item is started then.
pub fn on_threads<T: Sync>(items: &[T], body: impl Fn(&T) + Sync) {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        let _watch = Watch(&failed);
        while !failed.load(Ordering::Relaxed)
            && let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed))
        {
            body(item);
        }
    };
    let asked = env::var("RUST_TEST_THREADS")
        .ok()
        .and_then(|threads| threads.parse().ok());
    let threads = asked.unwrap_or_else(|| thread::available_parallelism().map_or(1, Into::into));
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, items.len().max(1)) {
            scope.spawn(work);
        }
    });
}

/// Enqueues `args` with `variant`, or with the variant that the library selects.
///
/// # Errors
/// Contradictory arguments, and the errors of the library.
///
/// # Safety
/// The contract of [`Library::launch`].
pub unsafe fn launch(
    library: &Library,
    stream: StreamRef<'_>,
    args: &Arguments<Tensor<'_>>,
    variant: Option<Entry>,
) -> Result<(), Error> {
    let work = args.work()?;
    // SAFETY: the caller's promise.
    unsafe {
        match variant {
            None => library.launch(stream, &*work),
            Some(variant) => library.launch_with(stream, &*work, variant),
        }
    }
}

impl Backend {
    /// Name of the backend in messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Simulator(_) => "simulator",
            Self::Cuda(..) => "cuda",
        }
    }

    /// The library that launches on this backend.
    #[must_use]
    pub fn library(&self) -> &Library {
        match self {
            Self::Simulator(library) | Self::Cuda(library, _) => library,
        }
    }

    /// Copies `case` to this backend's memory, runs `body` on the copy and waits. Returns the result of `body`, and the case with
    /// the memory's contents after it.
    ///
    /// # Errors
    /// A view that leaves its buffer, and the errors of the driver.
    pub fn with<R>(
        &self,
        case: &Case,
        body: impl FnOnce(&Library, StreamRef<'_>, &Arguments<Tensor<'_>>) -> R,
    ) -> Result<(R, Case), Error> {
        let mut after = case.clone();
        let result = match self {
            Self::Simulator(library) => {
                let buffers = after.buffers.iter_mut().enumerate();
                let bases = buffers
                    .map(|(i, buffer)| buffer.tensor(case.writes(i)))
                    .collect::<Result<Vec<_>, _>>()?;
                body(
                    library,
                    StreamRef::default_stream(),
                    &case.args.map(&|view| view.of(&bases))?,
                )
            }
            Self::Cuda(library, context) => {
                let stream = Stream::new(context)?;
                let copies = case
                    .buffers
                    .iter()
                    .map(|buffer| DeviceMemory::from_slice(context, &buffer.words));
                let mut memories = copies.collect::<Result<Vec<_>, _>>()?;
                let result = {
                    let buffers = case.buffers.iter().zip(&mut memories).enumerate();
                    let bases = buffers.map(|(i, (buffer, memory))| match case.writes(i) {
                        true => memory.tensor_mut(buffer.dtype, &[buffer.len()]),
                        false => memory.tensor(buffer.dtype, &[buffer.len()]),
                    });
                    let bases = bases.collect::<Result<Vec<_>, _>>()?;
                    let args = case.args.map(&|view| view.of(&bases))?;
                    body(library, stream.as_ref(), &args)
                };
                stream.synchronize()?;
                for (buffer, memory) in after.buffers.iter_mut().zip(&memories) {
                    memory.read(&mut buffer.words)?;
                }
                result
            }
        };
        Ok((result, after))
    }

    /// Runs `case` with `variant`, or with the variant that the library selects. Returns the case after the launch.
    ///
    /// # Panics
    /// On any error.
    #[must_use]
    #[track_caller]
    pub fn run(&self, case: &Case, variant: Option<Entry>) -> Case {
        let launched = self.with(case, |library, stream, args| {
            // SAFETY: the buffers are alive until `with` has waited, and no other work uses them. Active rows of a case write slots
            // of their own.
            unsafe { launch(library, stream, args, variant) }
        });
        match launched {
            Ok((Ok(()), after)) => after,
            Ok((Err(error), _)) | Err(error) => panic!("{}: {error}", self.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn each_item_is_taken_once() {
        let taken = Mutex::new(Vec::new());
        let items: Vec<usize> = (0..100).collect();
        on_threads(&items, |item| taken.lock().unwrap().push(*item));
        let mut taken = taken.into_inner().unwrap();
        taken.sort_unstable();
        assert_eq!(taken, items);
        on_threads(&[], |(): &()| unreachable!());
    }

    #[test]
    fn the_simulator_has_every_turn_and_a_failure_is_the_gpus_too() {
        let turns = Turns::new(1);
        let taken = AtomicUsize::new(0);
        for _ in 0..7 {
            turns.next(|backend| {
                let is_simulator = matches!(backend, Backend::Simulator(_));
                taken.fetch_add(usize::from(is_simulator), Ordering::Relaxed);
            });
        }
        if cuda().is_none() {
            assert_eq!(taken.into_inner(), 7);
        }
        assert!(!turns.failed.load(Ordering::Relaxed));
        let fails = || turns.next(|_| panic!("of a problem"));
        // Of as many consecutive problems at least one runs on the GPU.
        for _ in 0..share() {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(fails));
        }
        assert!(turns.failed.into_inner());
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn a_panic_goes_on() {
        on_threads(&[0; 8], |_| panic!("of an item"));
    }
}
