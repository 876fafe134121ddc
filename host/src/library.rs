//! The kernels on one GPU (or in the simulator), compiled as they are needed.

use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::machine;

use crate::driver::{Context, Current, Driver, Module, RawFunction, attribute};
use crate::enqueue::enqueue;
#[cfg(feature = "simulator")]
use crate::enqueue::simulate;
use crate::error::Error;
use crate::kernel;
use crate::module_cache::ModuleCache;
use crate::recall::Last;
use crate::shapes::{Named, check_memory};
use crate::step::{Gpu, MEASURED_ON, Sort, TENSORS, WHOLE_BYTES, serves};
use crate::stream::StreamRef;
use crate::tensor::Memory;

/// Dynamic shared memory that a launch may have without asking first, bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// The kernels on one GPU, or in the simulator. Cheap to clone; one per GPU serves every thread.
///
/// Compiled kernels stay loaded until the process ends or their context is destroyed, so that a captured graph
/// may outlive the library that launched into it.
///
/// Threads that ask for the same kernel first wait for one compilation. A failure is an error of the call that met it,
/// and is not kept: where memory ran out, or the driver refused the PTX, nothing stays loaded, and the next call tries
/// again. After an error that is fatal to the context (an illegal access, a lost device) every call returns the
/// driver's error, and dropping is quiet.
///
/// A context that others reset or destroy takes its kernels along. Every launch asks the driver for the id of the current
/// context, and is an error (`CUDA_ERROR_CONTEXT_IS_DESTROYED`) where the context is gone or was made again, of a
/// plan and of a [`Graph`](crate::driver::Graph) too: they are dropped, and new ones made from a new [`Context`]. What the
/// driver leaves to its callers is left to them: nobody resets the device while a launch is being enqueued, or launches a
/// function of [`Plan::raw`](crate::Plan::raw) afterwards. Drivers older than CUDA 12 cannot tell a context that was made
/// again: on these, libraries are dropped before the device is reset.
#[derive(Clone)]
pub struct Library(Arc<Inner>);

struct Inner {
    target: Target,
    /// Kernels whose tests have not passed on a GPU run on this one.
    takes_unproved: bool,
    /// The compute capability of the GPU that it is taken for; none: its own.
    capability: Option<(u32, u32)>,
    /// Of the GPU, once they are asked for.
    gpu: OnceLock<Gpu>,
    /// One for each entry, by load-time constants: the very words that are written into the PTX text, so the key
    /// cannot be narrower than the code.
    caches: Vec<ModuleCache<Vec<u32>, RawFunction>>,
    last_decode: Last<TENSORS>,
    last_prefill: Last<TENSORS>,
    /// Of several tokens, or of previous ones.
    last_other: Last<TENSORS>,
    /// The modules of a library that unloads them when it is dropped.
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
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread, bytes; 0, or registers spill.
    pub local_bytes: u32,
    /// Dynamic shared memory of a block, bytes.
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
    /// Kernels for the GPU of `context`; compiled on first use.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with_target(Target::Gpu(context.clone()), false, None, None)
    }

    /// The kernels that a GPU of compute capability `capability` (8.0 or newer) gets, with the shared memory that it has, on the GPU of
    /// `context`: for tests and benches of what another GPU computes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a capability below 8.0, and for one whose instructions or shared memory the GPU lacks;
    /// [`Error::Driver`].
    pub fn for_capability(context: &Context, capability: (u32, u32)) -> Result<Self, Error> {
        let own = context.device().compute_capability()?;
        let own_machine = machine::of_capability(own);
        let has_instructions = match machine::of_capability(capability) {
            machine::AMPERE => capability >= (8, 0),
            machine::HOPPER => own_machine == machine::HOPPER,
            _ => own_machine >= machine::HOPPER,
        };
        if !has_instructions || machine::shared_bytes(capability) > machine::shared_bytes(own) {
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

    /// [`Library::new`] that runs experimental kernels too. The simulator alone has checked what these compute, since their tests have not
    /// passed on a GPU yet; a library that is not experimental refuses them by name. Today they are drafts with a convolution or a norm
    /// on states that wait.
    #[must_use]
    pub fn experimental(context: &Context) -> Self {
        Self::with_target(Target::Gpu(context.clone()), true, None, None)
    }

    /// The kernels' own source on the CPU, with every memory access, race and barrier checked. Its tensors are in
    /// host memory, and a launch is done when it returns.
    #[cfg(feature = "simulator")]
    #[must_use]
    pub fn simulator() -> Self {
        Self::with_target(Target::Simulator, true, None, None)
    }

    /// [`Library::simulator`] of a GPU of this compute capability, an H200's being (9, 0): its kernels, its shared memory, and an error
    /// where a kernel takes an instruction that it lacks.
    #[cfg(feature = "simulator")]
    #[must_use]
    pub fn simulator_of(capability: (u32, u32)) -> Self {
        Self::with_target(Target::Simulator, true, Some(capability), None)
    }

    /// A library of its own for the same target. Its kernels are unloaded when it is dropped: nothing of it is under
    /// way then, or captured.
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

    /// The context that kernels run in; `None` for the simulator.
    #[must_use]
    pub fn context(&self) -> Option<&Context> {
        match &self.0.target {
            Target::Gpu(context) => Some(context),
            #[cfg(feature = "simulator")]
            Target::Simulator => None,
        }
    }

    /// The context is the one that the kernels were compiled in; nothing in the simulator.
    pub(crate) fn check_live(&self) -> Result<(), Error> {
        match self.context() {
            Some(context) => context.enter().map(drop),
            None => Ok(()),
        }
    }

    /// What the choice of a variant asks of the GPU; that of an H200 for the simulator, and where the driver does not say.
    pub(crate) fn gpu(&self) -> Gpu {
        *self.0.gpu.get_or_init(|| {
            let Some(device) = self.context().map(Context::device) else {
                return Gpu {
                    compute_capability: (self.0.capability)
                        .unwrap_or(MEASURED_ON.compute_capability),
                    ..MEASURED_ON
                };
            };
            let count = device.attribute(attribute::MULTIPROCESSOR_COUNT);
            let count = count.ok().and_then(|count| u32::try_from(count).ok());
            Gpu {
                multiprocessors: count
                    .filter(|&count| count > 0)
                    .unwrap_or(MEASURED_ON.multiprocessors),
                // Where the driver does not say, one that has nothing special.
                compute_capability: (self.0.capability)
                    .unwrap_or_else(|| device.compute_capability().unwrap_or((0, 0))),
            }
        })
    }

    /// The GPU has what `entry` takes, clusters of blocks or Hopper's tensor cores, and the simulator has; and it is proved, or
    /// taken unproved.
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

    /// Tensors are where this library's kernels reach them, and those whose positions are `written` are writable.
    pub(crate) fn check_memory(
        &self,
        tensors: &[Option<Named<'_>>],
        written: impl Fn(usize) -> bool,
    ) -> Result<(), Error> {
        check_memory(self.memory(), tensors, written)
    }

    /// Where tensors have to be.
    pub(crate) fn memory(&self) -> Memory {
        match &self.0.target {
            Target::Gpu(_) => Memory::Device,
            #[cfg(feature = "simulator")]
            Target::Simulator => Memory::Host,
        }
    }

    /// The last launch of this sort.
    #[inline]
    pub(crate) fn last(&self, sort: Sort) -> &Last<TENSORS> {
        match sort {
            Sort::Decode => &self.0.last_decode,
            Sort::Prefill => &self.0.last_prefill,
            Sort::Other => &self.0.last_other,
        }
    }

    /// Launches `entry`, compiling it first where need be. Returns its function; none in the simulator.
    ///
    /// # Safety
    /// `params` are the parameters of `entry`'s operator and `constants` describe the tensors that they name, which
    /// stay valid until the stream has passed the launch; `tensors` are all of these tensors.
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

    /// Makes the context current for launches; an error in the simulator.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Entered<'_>, Error> {
        match self.context() {
            Some(context) => Ok(Entered {
                driver: context.driver(),
                _current: context.enter()?,
            }),
            None => Err(nothing_compiled()),
        }
    }

    /// The compiled `entry`, from the cache or the driver's compiler; the constants settle its shared memory.
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

    /// Kernels that this library and its clones have compiled so far: 0 on the simulator. Where it is the same after
    /// launches as after [`Library::prewarm`], none of them compiled.
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

/// A library whose context is current on this thread: the one way of a launch to the driver.
pub(crate) struct Entered<'a> {
    driver: &'static Driver,
    _current: Current<'a>,
}

impl Entered<'_> {
    /// Launches a function of the library.
    ///
    /// # Safety
    /// As [`Library::launch_entry`]'s, for the entry and constants that the function was compiled for.
    #[inline]
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

/// Writes the constants into the entry's PTX and has the driver compile and load it.
fn compile(
    context: &Context,
    entry: Entry,
    constants: &[u32],
    shared_bytes: u32,
) -> Result<(Module, RawFunction), Error> {
    let text = kernel::text(entry, constants)?;
    let name = CString::new(entry.name())
        .map_err(|_| Error::Specialise("the entry's name has a NUL".to_owned()))?;
    let module = Module::load(context, entry.name(), &text)?;
    let function = module.function(&name)?;
    // Under lazy loading, asking for an attribute brings the code in now rather than at the first launch.
    function.attribute(attribute::FUNCTION_NUM_REGS)?;
    // What a launch may take besides.
    let shared_bytes = match entry.overlaps() {
        true => shared_bytes.max(WHOLE_BYTES),
        false => shared_bytes,
    };
    if shared_bytes > DEFAULT_SHARED_BYTES {
        function.set_shared_bytes(shared_bytes)?;
    }
    let function = function.raw();
    Ok((module, function))
}

/// What there is to say where `entry` is asked for.
#[cold]
pub(crate) fn unproved(entry: Entry) -> Error {
    Error::Unsupported {
        what: "kernel",
        got: entry.name().to_owned(),
        allowed: "its tests have not passed on a GPU yet; the simulator runs it, and Library::experimental",
    }
}

/// What the simulator says to whoever asks for a compiled kernel.
#[cold]
pub(crate) fn nothing_compiled() -> Error {
    Error::Unsupported {
        what: "a compiled kernel",
        got: "the simulator".to_owned(),
        allowed: "a library made from a GPU's context",
    }
}
