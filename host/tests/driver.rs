//! Tests of the driver layer on a GPU: memory, a kernel, a graph, events. Without a GPU nothing is tested, and
//! `GATED_DELTA_REQUIRE_GPU=1` makes this a failure.

use std::ptr;

use gated_delta::{
    DType, Error,
    driver::{
        Context, Device, DeviceMemory, Event, Graph, Module, RawFunction, Stream, attribute, driver,
    },
};

/// Adds 1 to `data[threadIdx.x]`.
const INCREMENT: &std::ffi::CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry increment(.param .u64 data)
{
    .reg .u64 %rd<4>;
    .reg .u32 %r<3>;
    ld.param.u64 %rd1, [data];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u32 %r2, [%rd3];
    add.u32 %r2, %r2, 1;
    st.global.u32 [%rd3], %r2;
    ret;
}
";

const THREADS: usize = 64;

/// The first GPU's context; `None` without a GPU, unless one is required.
fn context() -> Option<Context> {
    let context = Device::get(0).and_then(Context::primary);
    match context {
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice)) => {
            let required =
                std::env::var_os("GATED_DELTA_REQUIRE_GPU").is_some_and(|value| value == "1");
            assert!(!required, "{error}");
            eprintln!("skipped: {error}");
            None
        }
        context => Some(context.unwrap()),
    }
}

/// # Safety
/// `increment` is [`INCREMENT`], and `address` is the address of [`THREADS`] words.
unsafe fn launch(increment: RawFunction, mut address: u64, stream: &Stream) -> Result<(), Error> {
    let mut parameters = [(&raw mut address).cast()];
    let (threads, parameters) = (THREADS as u32, parameters.as_mut_ptr());
    // SAFETY: the caller's promise; the driver copies the parameter before it returns.
    unsafe {
        let (raw, extra) = (stream.raw(), ptr::null_mut());
        driver()?.launch_kernel(increment, 1, 1, 1, threads, 1, 1, 0, raw, parameters, extra)
    }
}

#[test]
fn a_kernel_runs_launched_and_replayed() {
    let Some(context) = context() else { return };
    let module = Module::load(&context, "increment", INCREMENT).unwrap();
    let increment = module.function(c"increment").unwrap();
    let registers = increment.attribute(attribute::FUNCTION_NUM_REGS).unwrap();
    assert!((1..=255).contains(&registers));

    let stream = Stream::new(&context).unwrap();
    let mut memory = DeviceMemory::from_slice(&context, &[5u32; THREADS]).unwrap();
    let address = memory.tensor_mut(DType::U32, &[THREADS]).unwrap().address();
    let (start, end) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());

    // SAFETY: the memory has the words, and outlives the stream's work, which the test waits for below.
    unsafe {
        let increment = increment.raw();
        launch(increment, address, &stream).unwrap();
        let mut graph = Graph::capture(&stream, || launch(increment, address, &stream)).unwrap();
        start.record(&stream).unwrap();
        graph.launch(&stream).unwrap();
        graph.launch(&stream).unwrap();
        end.record(&stream).unwrap();
        stream.synchronize().unwrap();
    }
    assert!(end.milliseconds_since(&start).unwrap() > 0.0);
    let mut words = [0u32; THREADS];
    memory.read(&mut words).unwrap();
    assert_eq!(words, [8; THREADS]);
    memory.fill(0).unwrap();
    memory.read(&mut words).unwrap();
    assert_eq!(words, [0; THREADS]);
}

#[test]
fn errors_of_the_driver_are_named() {
    let Some(context) = context() else { return };
    let refused = Module::load(
        &context,
        "broken",
        c".version 7.0\n.target sm_70\n.address_size 64\nGD_H;\n",
    );
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("CUDA_ERROR_INVALID_PTX (218)") && message.contains("line 4"),
        "{message}"
    );
    assert!(matches!(
        Module::load(
            &context,
            "new",
            c".version 99.0\n.target sm_70\n.address_size 64\n"
        ),
        Err(Error::PtxTooNew { .. })
    ));
    let module = Module::load(&context, "increment", INCREMENT).unwrap();
    assert!(
        module
            .function(c"absent")
            .unwrap_err()
            .to_string()
            .contains("CUDA_ERROR_NOT_FOUND")
    );
    let all = context.device().total_memory().unwrap();
    let message = DeviceMemory::allocate(&context, 2 * all)
        .unwrap_err()
        .to_string();
    assert_eq!(message, "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

#[test]
fn the_context_before_comes_back() {
    let Some(context) = context() else { return };
    let current = || {
        let mut current = gated_delta::driver::RawContext::NULL;
        // SAFETY: `current` is written.
        unsafe { driver().unwrap().ctx_get_current(&raw mut current) }.unwrap();
        current
    };
    let before = current();
    {
        let _outer = context.enter().unwrap();
        let _inner = context.enter().unwrap();
        assert_eq!(current(), context.raw());
    }
    assert_eq!(current(), before);
}
