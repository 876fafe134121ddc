//! The driver functions that this library calls, and raw handles.

use std::{
    ffi::{CStr, c_char, c_uint, c_void},
    ptr,
    sync::OnceLock,
};

use super::{code, library};
use crate::error::{DriverError, Error};

macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        $(
            $(#[$meta])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub struct $name(pub *mut c_void);

            impl $name {
                /// The null handle.
                pub const NULL: Self = Self(ptr::null_mut());
            }

            // SAFETY: a handle is a name for the driver, which accepts it on any thread.
            unsafe impl Send for $name {}
            // SAFETY: as above; the handle itself is never changed.
            unsafe impl Sync for $name {}
        )*
    };
}

handles! {
    /// `CUcontext`.
    RawContext,
    /// `CUmodule`.
    RawModule,
    /// `CUlibrary`.
    RawLibrary,
    /// `CUkernel`.
    RawKernel,
    /// `CUfunction`.
    RawFunction,
    /// `CUstream`.
    RawStream,
    /// `CUevent`.
    RawEvent,
    /// `CUgraph`.
    RawGraph,
    /// `CUgraphExec`.
    RawGraphExec,
}

macro_rules! functions {
    ($($(#[$meta:meta])* $method:ident = $symbol:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The driver's functions. A result is a plain number, so that a code newer than this library is no undefined behaviour.
        /// Calling a function that the driver lacks returns [`Error::MissingSymbol`].
        #[derive(Debug)]
        pub struct Driver {
            $($method: Option<unsafe extern "C" fn($($type),*) -> i32>,)*
        }

        impl Driver {
            /// Looks up every function.
            fn look_up() -> Self {
                // SAFETY: the function with this name has this type in every release of the driver.
                Self { $($method: unsafe { function(stringify!($symbol)) },)* }
            }

            $(
                $(#[$meta])*
                ///
                /// # Safety
                /// As the driver requires: handles are live, pointers are valid, and everything that enqueued work uses stays
                /// alive.
                ///
                /// # Errors
                /// [`Error::Driver`], or [`Error::MissingSymbol`].
                #[allow(clippy::too_many_arguments, reason = "the driver's own signatures")]
                #[inline]
                pub unsafe fn $method(&self, $($argument: $type),*) -> Result<(), Error> {
                    let call = stringify!($symbol);
                    let function =
                        self.$method.ok_or_else(|| Error::MissingSymbol { symbol: call })?;
                    // SAFETY: the caller's promise.
                    self.check(call, unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

functions! {
    /// Initialises the driver. [`super::driver`] has called this already.
    init = cuInit(flags: c_uint);
    /// Newest CUDA version that the driver supports: 1000 · major + 10 · minor.
    driver_get_version = cuDriverGetVersion(version: *mut i32);
    /// Number of GPUs.
    device_get_count = cuDeviceGetCount(count: *mut i32);
    /// Handle of a GPU.
    device_get = cuDeviceGet(device: *mut i32, ordinal: i32);
    /// Name of a GPU, at most `len` bytes.
    device_get_name = cuDeviceGetName(name: *mut c_char, len: i32, device: i32);
    /// Value of a device attribute: see [`super::attribute`].
    device_get_attribute = cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    /// Size of a GPU's memory, in bytes.
    device_total_mem = cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    /// Retains the primary context.
    device_primary_ctx_retain = cuDevicePrimaryCtxRetain(context: *mut RawContext, device: i32);
    /// Releases the primary context.
    device_primary_ctx_release = cuDevicePrimaryCtxRelease_v2(device: i32);
    /// Context of the calling thread; null if the thread has none.
    ctx_get_current = cuCtxGetCurrent(context: *mut RawContext);
    /// Sets the context of the calling thread.
    ctx_set_current = cuCtxSetCurrent(context: RawContext);
    /// Pushes a context onto the calling thread's stack.
    ctx_push_current = cuCtxPushCurrent_v2(context: RawContext);
    /// Pops a context off the calling thread's stack.
    ctx_pop_current = cuCtxPopCurrent_v2(context: *mut RawContext);
    /// Id of a context, unique in the process; for a null handle the id of the calling thread's context. CUDA 12.0 and newer.
    ctx_get_id = cuCtxGetId(context: RawContext, id: *mut u64);
    /// API version that a context was created for; fails if the context was destroyed.
    ctx_get_api_version = cuCtxGetApiVersion(context: RawContext, version: *mut u32);
    /// GPU of the current context.
    ctx_get_device = cuCtxGetDevice(device: *mut i32);
    /// Waits for all work of the current context.
    ctx_synchronize = cuCtxSynchronize();
    /// Loads PTX text or a binary.
    module_load_data_ex = cuModuleLoadDataEx(
        module: *mut RawModule,
        image: *const c_void,
        options: c_uint,
        option: *mut i32,
        value: *mut *mut c_void,
    );
    /// Unloads a module.
    module_unload = cuModuleUnload(module: RawModule);
    /// Function of a module.
    module_get_function = cuModuleGetFunction(
        function: *mut RawFunction,
        module: RawModule,
        name: *const c_char,
    );
    /// Loads PTX text or a binary for any context. This function and the next three need CUDA 12.0 or newer.
    library_load_data = cuLibraryLoadData(
        library: *mut RawLibrary,
        code: *const c_void,
        jit_option: *mut i32,
        jit_value: *mut *mut c_void,
        jit_options: c_uint,
        option: *mut i32,
        value: *mut *mut c_void,
        options: c_uint,
    );
    /// Unloads a library.
    library_unload = cuLibraryUnload(library: RawLibrary);
    /// Kernel of a library.
    library_get_kernel = cuLibraryGetKernel(
        kernel: *mut RawKernel,
        library: RawLibrary,
        name: *const c_char,
    );
    /// Function of a kernel in the current context.
    kernel_get_function = cuKernelGetFunction(function: *mut RawFunction, kernel: RawKernel);
    /// Value of a function attribute: see [`super::attribute`].
    func_get_attribute = cuFuncGetAttribute(value: *mut i32, attribute: i32, function: RawFunction);
    /// Sets a function attribute: see [`super::attribute`].
    func_set_attribute = cuFuncSetAttribute(function: RawFunction, attribute: i32, value: i32);
    /// Enqueues a kernel.
    launch_kernel = cuLaunchKernel(
        function: RawFunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: RawStream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    /// Enqueues a kernel with launch attributes; CUDA 11.8 and newer.
    launch_kernel_ex = cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: RawFunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    /// Name of a result code: `CUDA_ERROR_OUT_OF_MEMORY`.
    get_error_name = cuGetErrorName(code: i32, name: *mut *const c_char);
    /// Description of a result code.
    get_error_string = cuGetErrorString(code: i32, text: *mut *const c_char);
    /// Creates a stream. With flag 1 the stream does not wait for the default stream.
    stream_create = cuStreamCreate(stream: *mut RawStream, flags: c_uint);
    /// Waits for all work of a stream.
    stream_synchronize = cuStreamSynchronize(stream: RawStream);
    /// Destroys a stream.
    stream_destroy = cuStreamDestroy_v2(stream: RawStream);
    /// Begins to capture a stream; mode 0: global, 1: this thread, 2: relaxed.
    stream_begin_capture = cuStreamBeginCapture_v2(stream: RawStream, mode: i32);
    /// Ends the capture and returns its graph.
    stream_end_capture = cuStreamEndCapture(stream: RawStream, graph: *mut RawGraph);
    /// Instantiates a graph.
    graph_instantiate = cuGraphInstantiateWithFlags(exec: *mut RawGraphExec, graph: RawGraph, flags: u64);
    /// Enqueues an instantiated graph.
    graph_launch = cuGraphLaunch(exec: RawGraphExec, stream: RawStream);
    /// Destroys an instantiated graph.
    graph_exec_destroy = cuGraphExecDestroy(exec: RawGraphExec);
    /// Destroys a graph.
    graph_destroy = cuGraphDestroy(graph: RawGraph);
    /// Creates an event. With flags 0 the event can be used for timing.
    event_create = cuEventCreate(event: *mut RawEvent, flags: c_uint);
    /// Records an event.
    event_record = cuEventRecord(event: RawEvent, stream: RawStream);
    /// Waits for an event.
    event_synchronize = cuEventSynchronize(event: RawEvent);
    /// Time between two events, in milliseconds.
    event_elapsed_time = cuEventElapsedTime(milliseconds: *mut f32, start: RawEvent, end: RawEvent);
    /// Destroys an event.
    event_destroy = cuEventDestroy_v2(event: RawEvent);
    /// Allocates memory.
    mem_alloc = cuMemAlloc_v2(address: *mut u64, bytes: usize);
    /// Frees memory.
    mem_free = cuMemFree_v2(address: u64);
    /// Copies from host memory to GPU memory.
    memcpy_htod = cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    /// Copies from GPU memory to host memory.
    memcpy_dtoh = cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    /// Copies within GPU memory.
    memcpy_dtod = cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    /// Sets bytes of GPU memory.
    memset_d8 = cuMemsetD8_v2(address: u64, value: u8, bytes: usize);
    /// Free and total memory of the current context's GPU, in bytes.
    mem_get_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
}

/// Argument of [`Driver::launch_kernel_ex`]: the driver's `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Number of blocks along x, y, z.
    pub grid: [c_uint; 3],
    /// Threads per block along x, y, z.
    pub block: [c_uint; 3],
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: c_uint,
    /// Stream that the launch is enqueued on.
    pub stream: RawStream,
    /// Array of `count` attributes.
    pub attributes: *mut LaunchAttribute,
    /// Number of attributes.
    pub count: c_uint,
}

/// The driver's `CUlaunchAttribute`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    id: c_uint,
    padding: u32,
    value: [u32; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
    pub const OVERLAPS: Self = Self {
        id: 6,
        padding: 0,
        value: [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    };
}

impl Driver {
    /// A function that only newer drivers have; `None` if this driver lacks it.
    ///
    /// # Safety
    /// `F` is a pointer type that fits the function with this name.
    #[must_use]
    pub unsafe fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise.
        unsafe { function(name) }
    }

    /// Id of a context; for a null handle the id of the calling thread's context. `None` in drivers older than CUDA 12.
    ///
    /// # Safety
    /// The context is live or null.
    ///
    /// # Errors
    /// [`Error::Driver`] if the context was destroyed, or the thread has none.
    pub(super) unsafe fn id_of(&self, context: RawContext) -> Result<Option<u64>, Error> {
        let mut id = 0;
        // SAFETY: the caller's promise, and `id` is written.
        match unsafe { self.ctx_get_id(context, &raw mut id) } {
            Ok(()) => Ok(Some(id)),
            Err(Error::MissingSymbol { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the calling thread's context has this id. An error of the driver counts as `false`, because making an [`Error`]
    /// takes longer than the call.
    #[inline]
    pub(super) fn is_current(&self, id: u64) -> bool {
        let mut now = 0;
        self.ctx_get_id.is_some_and(|get| {
            // SAFETY: a null handle stands for the calling thread's context, and `now` is written.
            let result = unsafe { get(RawContext::NULL, &raw mut now) };
            result == code::SUCCESS && now == id
        })
    }

    /// Turns the result code of `call` into a result.
    #[inline]
    pub(crate) fn check(&self, call: &'static str, result: i32) -> Result<(), Error> {
        if result == code::SUCCESS {
            Ok(())
        } else {
            Err(self.error(call, result).into())
        }
    }

    /// The error for a result code of `call`.
    #[cold]
    pub(crate) fn error(&self, call: &'static str, result: i32) -> DriverError {
        let mut text = ptr::null();
        if let Some(get_error_name) = self.get_error_name {
            // SAFETY: the driver writes the address of a static string to `text`, if it knows the code.
            unsafe { get_error_name(result, &raw mut text) };
        }
        let name = if text.is_null() {
            "unknown driver error".to_owned()
        } else {
            // SAFETY: the driver's strings are terminated and live as long as its library.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        DriverError {
            code: result,
            name,
            call,
        }
    }
}

/// Looks up the function `name`, as a pointer of type `F`.
///
/// # Safety
/// `F` is a pointer type that fits the function with this name.
unsafe fn function<F: Copy>(name: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a pointer to a function has the size of an address, and the type is the caller's promise.
    library::symbol(name).map(|address| unsafe { std::mem::transmute_copy(&address) })
}

/// Loads and initialises the driver: see [`super::driver`].
pub(super) fn load() -> Result<&'static Driver, Error> {
    static DRIVER: OnceLock<(Driver, i32)> = OnceLock::new();
    library::open().map_err(|reason| Error::NoDriver {
        reason: reason.to_owned(),
    })?;
    let (driver, initialised) = DRIVER.get_or_init(|| {
        let driver = Driver::look_up();
        // SAFETY: `cuInit` may be called at any time.
        let initialised = driver
            .init
            .map_or(code::NO_DEVICE, |init| unsafe { init(0) });
        (driver, initialised)
    });
    match *initialised {
        code::NO_DEVICE => Err(Error::NoDevice),
        result => driver.check("cuInit", result).map(|()| driver),
    }
}
