//! The library: the kernels on one GPU or in the simulator, compiled on first use.

use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::machine;

use crate::driver::{Context, Current, Device, Driver, Module, RawFunction, attribute};
use crate::enqueue::enqueue;
#[cfg(feature = "simulator")]
use crate::enqueue::simulate;
use crate::error::Error;
use crate::module_cache::ModuleCache;
use crate::recall::Last;
use crate::specialise;
use crate::step::{Gpu, MEASURED_ON, Sort, TENSORS, WHOLE_BYTES, serves};
use crate::stream::StreamRef;
use crate::tensor::Memory;
use crate::tensor_checks::{Named, check_memory};

/// Dynamic shared memory in bytes that a launch may have without setting a function attribute.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// The kernels on one GPU, or in the simulator. A library is cheap to clone. One library per GPU serves all threads.
///
/// Compiled kernels stay loaded until the process ends or their context is destroyed. A captured graph may therefore outlive the library.
///
/// If several threads ask for a new kernel, one thread compiles it and the others wait. A failure is an error of the call that
/// met it, and is not remembered: after running out of memory, or after the driver refused the PTX, nothing stays loaded, and the
/// next call tries again. After an error that is fatal to the context (an illegal access, a lost device), every call returns the
/// driver's error, and dropping the library reports nothing.
///
/// If other code resets or destroys the context, its kernels are lost. Every launch, also of a plan or a
/// [`Graph`](crate::driver::Graph), asks the driver for the id of the current context. If the context is gone or was created
/// again, the launch is an error (`CUDA_ERROR_CONTEXT_IS_DESTROYED`). Drop the library, its plans and graphs then, and create new
/// ones from a new [`Context`]. The caller still has to follow two rules of the driver: do not reset the device while a launch is
/// being enqueued, and do not launch a function of [`Plan::raw`](crate::Plan::raw) after a reset. Drivers older than CUDA 12
/// cannot recognise a context that was created again: with these drivers, drop libraries before resetting the device.
#[derive(Clone)]
pub struct Library(Arc<Inner>);

struct Inner {
    target: Target,
    /// Whether to run kernels whose tests have not passed on a GPU.
    takes_unproved: bool,
    /// Compute capability to select kernels for. `None`: the GPU's own.
    capability: Option<(u32, u32)>,
    /// Properties of the GPU, read on first use.
    gpu: OnceLock<Gpu>,
    /// One cache for each entry. The key is the load-time constants, as the words that are written into the PTX text, so that different
    /// code always has different keys.
    caches: Vec<ModuleCache<Vec<u32>, RawFunction>>,
    last_decode: Last<TENSORS>,
    last_prefill: Last<TENSORS>,
    /// The last launch that was neither a decode nor a prefill: several tokens, or previous tokens.
    last_other: Last<TENSORS>,
    /// Modules to unload when the library is dropped. `None`: modules stay loaded.
    unloaded: Option<Mutex<Vec<Module>>>,
}

#[derive(Clone, Debug)]
enum Target {
    Gpu(Context),
    #[cfg(feature = "simulator")]
    Simulator,
}

/// Registers and memory of a compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelResources {
    /// Number of registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes. More than 0 means that registers are spilled.
    pub local_bytes: u32,
    /// Dynamic shared memory per block in bytes.
    pub shared_bytes: u32,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("target", &self.0.target)
            .finish_non_exhaustive()
    }
}

impl Library {
    /// Creates a library for the GPU of `context`. Kernels are compiled on first use.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with_target(Target::Gpu(context.clone()), false, None, None)
    }

    /// Creates a library that runs, on the GPU of `context`, the kernels for GPUs of compute capability `capability` (8.0 or
    /// newer), within the shared memory of such GPUs. It is for tests and benches of the results on other GPUs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a capability below 8.0, and for a capability whose instructions or shared memory the GPU lacks;
    /// [`Error::Driver`].
    pub fn for_capability(context: &Context, capability: (u32, u32)) -> Result<Self, Error> {
        let own = context.device().compute_capability()?;
        let own_gpu = gpu_of(context.device());
        let own_machine = own_gpu.machine();
        let has_instructions = match machine::of_capability(capability) {
            machine::AMPERE => capability >= (8, 0),
            machine::HOPPER => own_machine == machine::HOPPER,
            _ => own_machine >= machine::HOPPER,
        };
        if !has_instructions || machine::shared_bytes(capability) > own_gpu.shared_bytes {
            return Err(Error::Unsupported {
                what: "compute capability",
                got: format!(
                    "{}.{} on a GPU of {}.{}",
                    capability.0, capability.1, own.0, own.1
                ),
                allowed: "8.0 or newer, whose instructions and shared memory the GPU has",
            });
        }
        let target = Target::Gpu(context.clone());
        Ok(Self::with_target(target, false, Some(capability), None))
    }

    /// [`Library::new`] that also runs experimental kernels. The tests of these kernels have passed in the simulator, but not yet
    /// on a GPU. Other libraries refuse these kernels by name. At present there are none.
    #[must_use]
    pub fn experimental(context: &Context) -> Self {
        Self::with_target(Target::Gpu(context.clone()), true, None, None)
    }

    /// Creates a library that runs the kernels' own source on the CPU, and checks every memory access, race and barrier. Its tensors are in
    /// host memory. A launch is done when it returns.
    #[cfg(feature = "simulator")]
    #[must_use]
    pub fn simulator() -> Self {
        Self::with_target(Target::Simulator, true, None, None)
    }

    /// [`Library::simulator`] for a GPU of this compute capability (H200: (9, 0)). The library selects the kernels of this GPU,
    /// and has its shared memory. An instruction that the GPU lacks is an error.
    #[cfg(feature = "simulator")]
    #[must_use]
    pub fn simulator_of(capability: (u32, u32)) -> Self {
        Self::with_target(Target::Simulator, true, Some(capability), None)
    }

    /// A separate library for the same target, which unloads its kernels when it is dropped. At that time none of its launches
    /// may be running or captured.
    #[cfg(feature = "self-test")]
    pub(crate) fn scratch(&self) -> Self {
        let unloaded = Some(Mutex::default());
        let Inner {
            takes_unproved,
            capability,
            ..
        } = *self.0;
        Self::with_target(self.0.target.clone(), takes_unproved, capability, unloaded)
    }

    fn with_target(
        target: Target,
        takes_unproved: bool,
        capability: Option<(u32, u32)>,
        unloaded: Option<Mutex<Vec<Module>>>,
    ) -> Self {
        Self(Arc::new(Inner {
            target,
            takes_unproved,
            capability,
            gpu: OnceLock::new(),
            caches: Entry::ALL.iter().map(|_| ModuleCache::default()).collect(),
            last_decode: Last::default(),
            last_prefill: Last::default(),
            last_other: Last::default(),
            unloaded,
        }))
    }

    /// The context that the kernels run in. `None` in the simulator.
    #[inline]
    #[must_use]
    pub fn context(&self) -> Option<&Context> {
        match &self.0.target {
            Target::Gpu(context) => Some(context),
            #[cfg(feature = "simulator")]
            Target::Simulator => None,
        }
    }

    /// Checks that the context is still the one that the kernels were compiled in. Always succeeds in the simulator.
    pub(crate) fn check_live(&self) -> Result<(), Error> {
        match self.context() {
            Some(context) => context.enter().map(drop),
            None => Ok(()),
        }
    }

    /// Properties of the GPU that the choice of a variant depends on; in the simulator an H200's. A library for another compute
    /// capability has the shared memory of that capability.
    pub(crate) fn gpu(&self) -> Gpu {
        *self.0.gpu.get_or_init(|| {
            let device = self.context().map(Context::device);
            let gpu = device.map_or(MEASURED_ON, gpu_of);
            match self.0.capability {
                Some(capability) => gpu.used_as(capability),
                None => gpu,
            }
        })
    }

    /// Checks that the GPU has the features that `entry` uses (clusters of blocks, Hopper's tensor cores), and that `entry` is proved or
    /// the library takes unproved kernels. The simulator takes unproved kernels.
    pub(crate) fn check_runs(&self, entry: Entry) -> Result<(), Error> {
        match self.context() {
            Some(_) if !entry.is_proved() && !self.0.takes_unproved => Err(unproved(entry)),
            _ if !serves(entry, self.gpu().machine()) => Err(self.gpu().no_such(entry)),
            _ if entry.takes_clusters() && !self.gpu().has_clusters() => {
                let (major, minor) = self.gpu().compute_capability;
                Err(Error::Unsupported {
                    what: "compute capability with a variant in clusters of blocks",
                    got: format!("{major}.{minor}"),
                    allowed: "9.0 or newer; the selected variant runs anywhere",
                })
            }
            _ => Ok(()),
        }
    }

    /// Checks that tensors are in the memory of this library's kernels, and that those at `written` positions are writable.
    pub(crate) fn check_memory(
        &self,
        tensors: &[Option<Named<'_>>],
        written: impl Fn(usize) -> bool,
    ) -> Result<(), Error> {
        check_memory(self.memory(), tensors, written)
    }

    /// The memory that tensors have to be in.
    pub(crate) fn memory(&self) -> Memory {
        match &self.0.target {
            Target::Gpu(_) => Memory::Device,
            #[cfg(feature = "simulator")]
            Target::Simulator => Memory::Host,
        }
    }

    /// The last launch of this sort.
    #[inline(always)]
    pub(crate) fn last(&self, sort: Sort) -> &Last<TENSORS> {
        match sort {
            Sort::Decode => &self.0.last_decode,
            Sort::Prefill => &self.0.last_prefill,
            Sort::Other => &self.0.last_other,
        }
    }

    /// Launches `entry`, and compiles it first if necessary. Returns its function, or `None` in the simulator.
    ///
    /// # Safety
    /// `params` are the parameters of `entry`'s operator. `constants` describe the tensors that the parameters name. These tensors stay
    /// valid until the stream has passed the launch, and `tensors` lists all of them.
    #[cfg_attr(
        not(feature = "simulator"),
        expect(unused_variables, reason = "the simulator asks for the tensors")
    )]
    pub(crate) unsafe fn launch_entry(
        &self,
        stream: StreamRef<'_>,
        entry: Entry,
        constants: &[u32],
        shape: LaunchShape,
        params: &[u8],
        tensors: &[Option<Named<'_>>],
    ) -> Result<Option<RawFunction>, Error> {
        match &self.0.target {
            Target::Gpu(_) => {
                let function = self.function(entry, constants, shape.shared_bytes)?;
                // SAFETY: the caller's promise.
                unsafe { self.enter()?.launch(stream, function, &shape, params) }?;
                Ok(Some(function))
            }
            #[cfg(feature = "simulator")]
            Target::Simulator => {
                // SAFETY: the caller's promise.
                unsafe {
                    let capability = self.gpu().compute_capability;
                    simulate(entry, capability, constants, shape, params, tensors)
                }?;
                Ok(None)
            }
        }
    }

    /// Makes the context current for launches. An error in the simulator.
    #[inline(always)]
    pub(crate) fn enter(&self) -> Result<Entered<'_>, Error> {
        match self.context() {
            Some(context) => Ok(Entered {
                driver: context.driver(),
                _current: context.enter()?,
            }),
            None => Err(nothing_compiled()),
        }
    }

    /// The compiled function of `entry`, from the cache or from the driver's compiler. The constants determine its shared memory.
    pub(crate) fn function(
        &self,
        entry: Entry,
        constants: &[u32],
        shared_bytes: u32,
    ) -> Result<RawFunction, Error> {
        let Some(context) = self.context() else {
            return Err(nothing_compiled());
        };
        self.0.caches[entry as usize].get_or_compile(constants, || {
            self.check_runs(entry)?;
            // A launch may ask for more shared memory than the kernel needs.
            let shared_bytes = match entry.overlaps() {
                true => shared_bytes.max(WHOLE_BYTES.min(self.gpu().shared_bytes)),
                false => shared_bytes,
            };
            let (module, function) = compile(context, entry, constants, shared_bytes)?;
            match &self.0.unloaded {
                Some(modules) => modules
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(module),
                // Never unloaded: a captured graph may still hold the kernel.
                None => std::mem::forget(module),
            }
            Ok(function)
        })
    }

    /// Number of kernels that this library and its clones have compiled so far; 0 in the simulator. If the number after
    /// [`Library::prewarm`] is still the same after later launches, no launch has compiled a kernel.
    #[must_use]
    pub fn compiled(&self) -> usize {
        self.0.caches.iter().map(ModuleCache::compiled).sum()
    }

    /// Registers and memory of `entry` as compiled for `constants`.
    pub(crate) fn function_resources(
        &self,
        entry: Entry,
        constants: &[u32],
        shared_bytes: u32,
    ) -> Result<KernelResources, Error> {
        let Some(context) = self.context() else {
            return Err(nothing_compiled());
        };
        let function = self.function(entry, constants, shared_bytes)?;
        let _current = context.enter()?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the function is loaded in the current context, and `value` is written.
            unsafe {
                context
                    .driver()
                    .func_get_attribute(&raw mut value, which, function)
            }?;
            Ok::<_, Error>(value.unsigned_abs())
        };
        Ok(KernelResources {
            registers: attribute(attribute::FUNCTION_NUM_REGS)?,
            local_bytes: attribute(attribute::FUNCTION_LOCAL_SIZE_BYTES)?,
            shared_bytes,
        })
    }
}

/// A library whose context is current on this thread. Every launch reaches the driver through this type.
pub(crate) struct Entered<'a> {
    driver: &'static Driver,
    _current: Current<'a>,
}

impl Entered<'_> {
    /// Launches a function of the library.
    ///
    /// # Safety
    /// The rules of [`Library::launch_entry`] hold, with the entry and constants that the function was compiled for.
    #[inline(always)]
    pub unsafe fn launch(
        &self,
        stream: StreamRef<'_>,
        function: RawFunction,
        shape: &LaunchShape,
        params: &[u8],
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise; the function's context is current.
        unsafe { enqueue(self.driver, function, shape, stream, params) }
    }
}

/// Properties of a GPU. If the driver does not report the number of multiprocessors, an H200's number is used; if it does not report
/// the shared memory of a block, that of the compute capability.
fn gpu_of(device: Device) -> Gpu {
    let number = |attribute| {
        let number = u32::try_from(device.attribute(attribute).ok()?).ok()?;
        Some(number).filter(|&number| number > 0)
    };
    let multiprocessors = number(attribute::MULTIPROCESSOR_COUNT);
    // If the driver does not report it, assume a GPU without optional features.
    let capability = device.compute_capability().unwrap_or((0, 0));
    let count = multiprocessors.unwrap_or(MEASURED_ON.multiprocessors);
    let gpu = Gpu::new(count, capability);
    let shared_bytes = number(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    Gpu {
        shared_bytes: shared_bytes.unwrap_or(gpu.shared_bytes),
        ..gpu
    }
}

/// Writes the constants into the PTX of the entry, and lets the driver compile and load it. A launch may ask for `shared_bytes`.
fn compile(
    context: &Context,
    entry: Entry,
    constants: &[u32],
    shared_bytes: u32,
) -> Result<(Module, RawFunction), Error> {
    let text = specialise::text(entry, constants)?;
    let name = CString::new(entry.name())
        .map_err(|_| Error::Specialise("the entry's name has a NUL".to_owned()))?;
    let module = Module::load(context, entry.name(), &text)?;
    let function = module.function(&name)?;
    // Under lazy loading this query loads the code now, rather than at the first launch.
    function.attribute(attribute::FUNCTION_NUM_REGS)?;
    if shared_bytes > DEFAULT_SHARED_BYTES {
        function.set_shared_bytes(shared_bytes)?;
    }
    let function = function.raw();
    Ok((module, function))
}

/// The error for an unproved `entry`.
#[cold]
pub(crate) fn unproved(entry: Entry) -> Error {
    Error::Unsupported {
        what: "kernel",
        got: entry.name().to_owned(),
        allowed: "its tests have not passed on a GPU yet; the simulator runs it, and Library::experimental",
    }
}

/// The error for a compiled kernel that is requested from the simulator.
#[cold]
pub(crate) fn nothing_compiled() -> Error {
    Error::Unsupported {
        what: "a compiled kernel",
        got: "the simulator".to_owned(),
        allowed: "a library made from a GPU's context",
    }
}
