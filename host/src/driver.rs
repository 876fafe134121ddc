//! The CUDA driver, loaded at its first use: a thin layer for tests, benches, the command line, and engines without a driver
//! binding of their own. Operators launch the kernels; this module does not.
//!
//! [`Driver`] has the driver's functions unchanged: they take raw handles, are unsafe, and return each failure as an [`Error`].
//! [`Context`], [`DeviceMemory`], [`Stream`], [`Event`] and [`Graph`] own the objects that they create.
//!
//! ```no_run
//! use gated_delta::DType;
//! use gated_delta::driver::{Context, Device, DeviceMemory, Event, Graph, Stream};
//!
//! let context = Context::primary(Device::get(0)?)?;
//! let library = gated_delta::Library::new(&context);
//! let stream = Stream::new(&context)?;
//! let mut states = DeviceMemory::from_slice(&context, &[1.0f32; 4096])?;
//! let tensor = states.tensor_mut(DType::F32, &[4096])?;
//! // SAFETY: the states outlive the launches, and nothing else uses them.
//! unsafe { library.state_floor(stream.as_ref(), tensor, 2.0) }?; // compiles the kernel: a capture must not
//! // SAFETY: as above.
//! let mut graph = unsafe { Graph::capture(&stream, || library.state_floor(stream.as_ref(), tensor, 2.0)) }?;
//! let (start, end) = (Event::new(&context)?, Event::new(&context)?);
//! start.record(&stream)?;
//! // SAFETY: as above.
//! unsafe { graph.launch(&stream) }?;
//! end.record(&stream)?;
//! end.synchronize()?;
//! println!("{} ms", end.milliseconds_since(&start)?);
//! let mut result = [0.0f32; 4096];
//! states.read(&mut result)?;
//! assert_eq!(result[0], 4.0);
//! # Ok::<(), gated_delta::Error>(())
//! ```

mod context;
#[cfg(all(
    feature = "cust",
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod forward;
mod functions;
mod graph;
mod library;
mod memory;
mod module;
mod stream;

pub use context::{Context, Current, Device};
pub use functions::{
    Driver, LaunchAttribute, LaunchConfig, RawContext, RawEvent, RawFunction, RawGraph,
    RawGraphExec, RawKernel, RawLibrary, RawModule, RawStream,
};
pub use graph::Graph;
pub use memory::DeviceMemory;
pub use module::{Function, Module};
pub use stream::{Event, Stream};

use crate::error::Error;

/// `CUresult` values that callers distinguish.
pub mod code {
    /// Success.
    pub const SUCCESS: i32 = 0;
    /// Out of memory.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// No GPU, or no driver.
    pub const NO_DEVICE: i32 = 100;
    /// The context is null, or was destroyed.
    pub const INVALID_CONTEXT: i32 = 201;
    /// No image for this GPU: the PTX is for a newer architecture.
    pub const NO_BINARY_FOR_GPU: i32 = 209;
    /// The PTX does not compile.
    pub const INVALID_PTX: i32 = 218;
    /// The PTX ISA version is newer than the driver.
    pub const UNSUPPORTED_PTX_VERSION: i32 = 222;
    /// The context was destroyed or reset.
    pub const CONTEXT_IS_DESTROYED: i32 = 709;
}

/// `CUdevice_attribute` and `CUfunction_attribute` values.
pub mod attribute {
    /// Device: number of multiprocessors.
    pub const MULTIPROCESSOR_COUNT: i32 = 16;
    /// Device: size of the level-2 cache, in bytes.
    pub const L2_CACHE_SIZE: i32 = 38;
    /// Device: compute capability, major.
    pub const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
    /// Device: compute capability, minor.
    pub const COMPUTE_CAPABILITY_MINOR: i32 = 76;
    /// Device: most shared memory that a block may opt in to, in bytes.
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: i32 = 97;
    /// Function: local memory per thread, in bytes.
    pub const FUNCTION_LOCAL_SIZE_BYTES: i32 = 3;
    /// Function: registers per thread.
    pub const FUNCTION_NUM_REGS: i32 = 4;
    /// Function: most dynamic shared memory that a launch may ask for, in bytes.
    pub const FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;
}

/// Returns the driver; the first call loads and initialises it.
///
/// # Errors
/// [`Error::NoDriver`] if the driver's library is missing, [`Error::NoDevice`] if the driver finds no GPU.
pub fn driver() -> Result<&'static Driver, Error> {
    functions::load()
}
