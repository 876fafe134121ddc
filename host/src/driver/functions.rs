//! The driver's functions that this library calls, and their raw handles.

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
                /// No handle.
                pub const NULL: Self = Self(ptr::null_mut());
            }

            // SAFETY: a handle is a name for the driver, which takes it on any thread.
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
        /// The driver's functions. Results are plain numbers, so that codes newer than this library are no
        /// undefined behaviour; a function that the driver does not have is [`Error::MissingSymbol`] when
        /// called.
        #[derive(Debug)]
        pub struct Driver {
            $($method: Option<unsafe extern "C" fn($($type),*) -> i32>,)*
        }

        impl Driver {
            /// Looks every function up.
            fn look_up() -> Self {
                // SAFETY: the function of that name has this type, in every release of the driver.
                Self { $($method: unsafe { function(stringify!($symbol)) },)* }
            }

            $(
                $(#[$meta])*
                ///
                /// # Safety
                /// The driver's: handles are live, pointers valid, and what is enqueued stays alive.
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
    /// Initialises the driver; [`super::driver`] has done so.
    init = cuInit(flags: c_uint);
    /// The newest CUDA that the driver supports: 1000 times major plus 10 times minor.
    driver_get_version = cuDriverGetVersion(version: *mut i32);
    /// Number of GPUs.
    device_get_count = cuDeviceGetCount(count: *mut i32);
    /// Handle of a GPU.
    device_get = cuDeviceGet(device: *mut i32, ordinal: i32);
    /// Name of a GPU, `len` bytes at most.
    device_get_name = cuDeviceGetName(name: *mut c_char, len: i32, device: i32);
    /// A number about a GPU: see [`super::attribute`].
    device_get_attribute = cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    /// Bytes of memory of a GPU.
    device_total_mem = cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    /// Retains the primary context.
    device_primary_ctx_retain = cuDevicePrimaryCtxRetain(context: *mut RawContext, device: i32);
    /// Gives the primary context back.
    device_primary_ctx_release = cuDevicePrimaryCtxRelease_v2(device: i32);
    /// The context of the calling thread; null where it has none.
    ctx_get_current = cuCtxGetCurrent(context: *mut RawContext);
    /// Sets the context of the calling thread.
    ctx_set_current = cuCtxSetCurrent(context: RawContext);
    /// Pushes a context onto the calling thread's stack.
    ctx_push_current = cuCtxPushCurrent_v2(context: RawContext);
    /// Pops a context off the calling thread's stack.
    ctx_pop_current = cuCtxPopCurrent_v2(context: *mut RawContext);
    /// The id of a context, unique in the process; of the calling thread's for a null one. In drivers of CUDA 12.0 and
    /// newer.
    ctx_get_id = cuCtxGetId(context: RawContext, id: *mut u64);
    /// The API version that a context was made for; fails for one that is no more.
    ctx_get_api_version = cuCtxGetApiVersion(context: RawContext, version: *mut u32);
    /// The GPU of the current context.
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
    /// A function of a module.
    module_get_function = cuModuleGetFunction(
        function: *mut RawFunction,
        module: RawModule,
        name: *const c_char,
    );
    /// Loads PTX text or a binary for any context; in drivers of CUDA 12.0 and newer, like the next three.
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
    /// A kernel of a library.
    library_get_kernel = cuLibraryGetKernel(
        kernel: *mut RawKernel,
        library: RawLibrary,
        name: *const c_char,
    );
    /// A kernel's function in the current context.
    kernel_get_function = cuKernelGetFunction(function: *mut RawFunction, kernel: RawKernel);
    /// A number about a function: see [`super::attribute`].
    func_get_attribute = cuFuncGetAttribute(value: *mut i32, attribute: i32, function: RawFunction);
    /// Sets a number of a function: see [`super::attribute`].
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
    /// Enqueues a kernel with attributes; in drivers of CUDA 11.8 and newer.
    launch_kernel_ex = cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: RawFunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    /// Name of a result code.
    get_error_name = cuGetErrorName(code: i32, name: *mut *const c_char);
    /// Sentence about a result code.
    get_error_string = cuGetErrorString(code: i32, text: *mut *const c_char);
    /// Makes a stream; flag 1: it does not wait for the default stream.
    stream_create = cuStreamCreate(stream: *mut RawStream, flags: c_uint);
    /// Waits for all work of a stream.
    stream_synchronize = cuStreamSynchronize(stream: RawStream);
    /// Destroys a stream.
    stream_destroy = cuStreamDestroy_v2(stream: RawStream);
    /// Begins to capture a stream; mode 0: global, 1: this thread, 2: relaxed.
    stream_begin_capture = cuStreamBeginCapture_v2(stream: RawStream, mode: i32);
    /// Ends the capture.
    stream_end_capture = cuStreamEndCapture(stream: RawStream, graph: *mut RawGraph);
    /// Makes a graph ready to launch.
    graph_instantiate = cuGraphInstantiateWithFlags(exec: *mut RawGraphExec, graph: RawGraph, flags: u64);
    /// Enqueues a graph.
    graph_launch = cuGraphLaunch(exec: RawGraphExec, stream: RawStream);
    /// Destroys an instantiated graph.
    graph_exec_destroy = cuGraphExecDestroy(exec: RawGraphExec);
    /// Destroys a graph.
    graph_destroy = cuGraphDestroy(graph: RawGraph);
    /// Makes an event; flags 0: it can time.
    event_create = cuEventCreate(event: *mut RawEvent, flags: c_uint);
    /// Records an event.
    event_record = cuEventRecord(event: RawEvent, stream: RawStream);
    /// Waits for an event.
    event_synchronize = cuEventSynchronize(event: RawEvent);
    /// Milliseconds between two events.
    event_elapsed_time = cuEventElapsedTime(milliseconds: *mut f32, start: RawEvent, end: RawEvent);
    /// Destroys an event.
    event_destroy = cuEventDestroy_v2(event: RawEvent);
    /// Allocates memory.
    mem_alloc = cuMemAlloc_v2(address: *mut u64, bytes: usize);
    /// Frees memory.
    mem_free = cuMemFree_v2(address: u64);
    /// Copies to the GPU.
    memcpy_htod = cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    /// Copies from the GPU.
    memcpy_dtoh = cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    /// Copies within GPU memory.
    memcpy_dtod = cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    /// Sets bytes.
    memset_d8 = cuMemsetD8_v2(address: u64, value: u8, bytes: usize);
    /// Free and total bytes of memory of the current context's GPU.
    mem_get_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
}

/// What [`Driver::launch_kernel_ex`] takes: the driver's `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Blocks along x, y, z.
    pub grid: [c_uint; 3],
    /// Threads of a block along x, y, z.
    pub block: [c_uint; 3],
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: c_uint,
    /// Where it is enqueued.
    pub stream: RawStream,
    /// So many attributes.
    pub attributes: *mut LaunchAttribute,
    /// How many.
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
    /// A function that newer drivers only have; `None` where this one does not.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function of that name.
    #[must_use]
    pub unsafe fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise.
        unsafe { function(name) }
    }

    /// The id of a context, or of the calling thread's for a null one; `None` in drivers older than CUDA 12.
    ///
    /// # Safety
    /// The context is live or null.
    ///
    /// # Errors
    /// [`Error::Driver`]: of a context that is no more, or where the thread has none.
    pub(super) unsafe fn id_of(&self, context: RawContext) -> Result<Option<u64>, Error> {
        let mut id = 0;
        // SAFETY: the caller's promise, and `id` is written.
        match unsafe { self.ctx_get_id(context, &raw mut id) } {
            Ok(()) => Ok(Some(id)),
            Err(Error::MissingSymbol { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The id of the calling thread's context; `None` where the driver says none, for whatever reason. Makes no error of
    /// it, which takes longer than the call.
    pub(super) fn current_id(&self) -> Option<u64> {
        let mut id = 0;
        // SAFETY: no handle is the calling thread's context, and `id` is written.
        let result = unsafe { self.ctx_get_id?(RawContext::NULL, &raw mut id) };
        (result == code::SUCCESS).then_some(id)
    }

    /// A result code as an error that names it.
    #[inline]
    pub(crate) fn check(&self, call: &'static str, result: i32) -> Result<(), Error> {
        if result == code::SUCCESS {
            Ok(())
        } else {
            Err(self.error(call, result).into())
        }
    }

    /// The error of a result code.
    #[cold]
    pub(crate) fn error(&self, call: &'static str, result: i32) -> DriverError {
        let mut text = ptr::null();
        if let Some(get_error_name) = self.get_error_name {
            // SAFETY: `text` is where the driver puts the address of a static string, for codes it knows.
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

/// The function of that name, as a pointer of type `F`.
///
/// # Safety
/// `F` is the type of a pointer to the function of that name.
unsafe fn function<F: Copy>(name: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a pointer to a function has the size of an address, and the type is the caller's promise.
    library::symbol(name).map(|address| unsafe { std::mem::transmute_copy(&address) })
}

/// See [`super::driver`].
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
