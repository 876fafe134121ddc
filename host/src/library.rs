//! The kernels on one GPU (or in the simulator), compiled as they are needed.

use std::ffi::CString;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::kernels::device_contract::DeviceContractConstants;
use gated_delta_kernels::kernels::gdn_decode::GdnDecodeConstants;
use gated_delta_kernels::kernels::state_floor::StateFloorConstants;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::recurrent::RecurrentConstants;

use crate::driver::{Context, Module, RawFunction, attribute};
use crate::error::Error;
use crate::launch::{enqueue, shared_bytes, simulate};
use crate::module_cache::{ModuleCache, specialise};
use crate::plan::LayerConstants;
use crate::ptx;
use crate::shapes::Named;
use crate::stream::StreamRef;
use crate::tensor::Memory;

/// Dynamic shared memory that a launch may have without asking first, bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// The kernels on one GPU, or in the simulator. Cheap to clone; one per GPU serves every thread.
///
/// Compiled kernels stay loaded until the process ends or their context is destroyed, so that a captured graph
/// may outlive the library that launched into it.
#[derive(Clone)]
pub struct Library(Arc<Inner>);

struct Inner {
    target: Target,
    cache: ModuleCache<ModuleKey, RawFunction>,
}

enum Target {
    Gpu(Context),
    Simulator,
}

macro_rules! operator_constants {
    ($($operator:ident($constants:ty),)*) => {
        /// Load-time constants of any operator.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum OperatorConstants {
            $($operator($constants),)*
        }

        impl OperatorConstants {
            fn symbols(&self) -> &'static [&'static str] {
                match self {
                    $(Self::$operator(_) => <$constants>::SYMBOLS,)*
                }
            }

            fn words(&self) -> &[u32] {
                match self {
                    $(Self::$operator(constants) => constants.words(),)*
                }
            }
        }
    };
}

operator_constants! {
    GdnDecode(GdnDecodeConstants),
    Recurrent(RecurrentConstants),
    DeviceContract(DeviceContractConstants),
    StateFloor(StateFloorConstants),
}

impl OperatorConstants {
    /// Tokens of a row that a kernel's shared memory depends on.
    pub(crate) fn tokens(&self) -> u32 {
        match self {
            Self::Recurrent(constants) => LayerConstants::tokens(constants),
            _ => 0,
        }
    }
}

/// Everything that is compiled in: the constants are the very value that is written into the PTX text, so the
/// key cannot be narrower than the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ModuleKey {
    device: i32,
    entry: Entry,
    constants: OperatorConstants,
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

impl Library {
    /// Kernels for the GPU of `context`; compiled on first use.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with_target(Target::Gpu(context.clone()))
    }

    /// The kernels' own source on the CPU, with every memory access, race and barrier checked. Its tensors are in
    /// host memory, and a launch is done when it returns.
    #[must_use]
    pub fn simulator() -> Self {
        Self::with_target(Target::Simulator)
    }

    fn with_target(target: Target) -> Self {
        Self(Arc::new(Inner {
            target,
            cache: ModuleCache::default(),
        }))
    }

    /// The context that kernels run in; `None` for the simulator.
    #[must_use]
    pub fn context(&self) -> Option<&Context> {
        match &self.0.target {
            Target::Gpu(context) => Some(context),
            Target::Simulator => None,
        }
    }

    /// Tensors are where this library's kernels reach them, and those written are writable.
    pub(crate) fn check_memory<'a>(
        &self,
        tensors: impl Iterator<Item = Named<'a>>,
        written: impl Fn(&str) -> bool,
    ) -> Result<(), Error> {
        let (wanted, wanted_name) = match &self.0.target {
            Target::Gpu(_) => (Memory::Device, "device"),
            Target::Simulator => (Memory::Host, "host"),
        };
        for Named { name, tensor } in tensors {
            if tensor.memory() != wanted {
                let got = if wanted == Memory::Device {
                    "host"
                } else {
                    "device"
                };
                return Err(Error::Memory {
                    tensor: name,
                    wanted: wanted_name,
                    got,
                });
            }
            if !tensor.is_writable() && written(name) {
                return Err(Error::ReadOnly { tensor: name });
            }
        }
        Ok(())
    }

    /// Launches `entry`, compiling it first where need be.
    ///
    /// # Safety
    /// `params` are the parameters of `entry`'s operator and `constants` describe the tensors that they name, which
    /// stay valid until the stream has passed the launch; `tensors` are all of these tensors.
    pub(crate) unsafe fn launch<'a>(
        &self,
        stream: StreamRef<'_>,
        entry: Entry,
        constants: &OperatorConstants,
        shape: LaunchShape,
        params: &[u8],
        tensors: impl FnOnce() -> Vec<Named<'a>>,
    ) -> Result<(), Error> {
        match &self.0.target {
            Target::Gpu(_) => {
                let function = self.function(entry, constants)?;
                // SAFETY: the caller's promise.
                unsafe { self.launch_function(stream, function, shape, params) }
            }
            // SAFETY: the caller's promise.
            Target::Simulator => unsafe {
                simulate(entry, constants.words(), shape, params, &tensors())
            },
        }
    }

    /// Launches a function of this library.
    ///
    /// # Safety
    /// As [`Library::launch`]'s, for the entry and constants that the function was compiled for.
    pub(crate) unsafe fn launch_function(
        &self,
        stream: StreamRef<'_>,
        function: RawFunction,
        shape: LaunchShape,
        params: &[u8],
    ) -> Result<(), Error> {
        let Target::Gpu(context) = &self.0.target else {
            return Err(nothing_compiled());
        };
        let _current = context.enter()?;
        // SAFETY: the caller's promise; the function's context is current.
        unsafe { enqueue(context.driver(), function, shape, stream, params) }
    }

    /// The compiled `entry`, from the cache or the driver's compiler.
    pub(crate) fn function(
        &self,
        entry: Entry,
        constants: &OperatorConstants,
    ) -> Result<RawFunction, Error> {
        let Target::Gpu(context) = &self.0.target else {
            return Err(nothing_compiled());
        };
        let key = ModuleKey {
            device: context.device().ordinal(),
            entry,
            constants: *constants,
        };
        self.0
            .cache
            .get_or_compile(&key, || compile(context, entry, constants))
    }

    /// Registers and memory of `entry` as compiled for `constants`.
    pub(crate) fn resources(
        &self,
        entry: Entry,
        constants: &OperatorConstants,
    ) -> Result<KernelResources, Error> {
        let Target::Gpu(context) = &self.0.target else {
            return Err(nothing_compiled());
        };
        let function = self.function(entry, constants)?;
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
            shared_bytes: shared_bytes(entry, constants.tokens()),
        })
    }
}

/// Writes the constants into the entry's PTX and has the driver compile and load it.
fn compile(
    context: &Context,
    entry: Entry,
    constants: &OperatorConstants,
) -> Result<RawFunction, Error> {
    let text = ptx::text(entry)
        .ok_or_else(|| Error::Specialise(format!("no PTX for {}", entry.name())))?;
    let text = specialise(text, constants.symbols(), constants.words())?;
    let name = CString::new(entry.name())
        .map_err(|_| Error::Specialise("the entry's name has a NUL".to_owned()))?;
    // Never unloaded: a captured graph may still hold the kernel.
    let module = ManuallyDrop::new(Module::load(context, entry.name(), &text)?);
    let function = module.function(&name)?;
    // Under lazy loading, asking for an attribute brings the code in now rather than at the first launch.
    module.function_attribute(function, attribute::FUNCTION_NUM_REGS)?;
    let shared = shared_bytes(entry, constants.tokens());
    if shared > DEFAULT_SHARED_BYTES {
        module.set_shared_bytes(function, shared)?;
    }
    Ok(function)
}

fn nothing_compiled() -> Error {
    Error::Unsupported {
        what: "a compiled kernel",
        got: "the simulator".to_owned(),
        allowed: "a library made from a GPU's context",
    }
}
