//! Driver failures under a library, with a stand-in for the driver. Each failure is an error that names the call. No failure is
//! remembered, and no later drop panics. Every test runs in a process of its own.
#![cfg(all(feature = "cust", target_os = "linux"))]

mod fixtures;
#[path = "fixtures/stand_in.rs"]
mod stand_in;

use std::any::type_name;
use std::ffi::{CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Barrier;
use std::{env, thread};

use gated_delta::driver::{Context, Device, DeviceMemory, Graph, Module, Stream};
use gated_delta::{
    DType, Error, Gdn, GdnGates, Inputs, Kda, KdaBeta, KdaDecay, KdaGates, Library, Options,
    Previous, StateLayout, States, Stored, StreamRef, Tensor, Work,
};

/// Name of the test that this process runs with the stand-in as its driver.
const ON_STAND_IN: &str = "GATED_DELTA_ON_STAND_IN";

const THREADS: usize = 16;

/// The stand-in for the driver, loaded in this process.
struct StandIn(libloading::Library);

impl StandIn {
    /// Makes every later call of `name` (`*`: of any function) fail with `result`. With 0, calls succeed again.
    fn fault(&self, name: &str, result: i32) {
        let name = CString::new(name).unwrap();
        // SAFETY: the function has this type, and the text is terminated.
        unsafe {
            let set = self
                .0
                .get::<unsafe extern "C" fn(*const c_char, i32)>("stand_in_fault");
            set.unwrap()(name.as_ptr(), result);
        }
    }

    /// Whether the stand-in has libraries (CUDA 12) as well as modules.
    fn has_libraries(&self) -> bool {
        // SAFETY: the function is looked up, not called.
        unsafe { self.0.get::<*mut c_void>("cuLibraryLoadData") }.is_ok()
    }

    /// Name of the call that compiles.
    fn load(&self) -> &'static str {
        if self.has_libraries() {
            "cuLibraryLoadData"
        } else {
            "cuModuleLoadDataEx"
        }
    }

    /// Name of the call that checks whether the context exists.
    fn live(&self) -> &'static str {
        if self.has_libraries() {
            "cuCtxGetId"
        } else {
            "cuCtxGetApiVersion"
        }
    }

    /// Resets the context, as another library in the process may.
    fn reset(&self) {
        // SAFETY: the function has this type.
        unsafe {
            let reset = self
                .0
                .get::<unsafe extern "C" fn(i32) -> i32>("cuDevicePrimaryCtxReset_v2");
            assert_eq!(reset.unwrap()(0), 0);
        }
    }

    /// Name of the call that unloads a compiled text.
    fn unload(&self) -> &'static str {
        if self.has_libraries() {
            "cuLibraryUnload"
        } else {
            "cuModuleUnload"
        }
    }

    /// Largest number of compilations that ran at the same time.
    fn most_compiling(&self) -> u32 {
        // SAFETY: the function has this type.
        unsafe {
            let most = self
                .0
                .get::<unsafe extern "C" fn() -> u32>("stand_in_most_compiling");
            most.unwrap()()
        }
    }

    /// Number of calls of `name` so far.
    fn calls(&self, name: &str) -> u32 {
        let name = CString::new(name).unwrap();
        // SAFETY: the function has this type, and the text is terminated.
        unsafe {
            let calls = self
                .0
                .get::<unsafe extern "C" fn(*const c_char) -> u32>("stand_in_calls");
            calls.unwrap()(name.as_ptr())
        }
    }
}

/// Runs `scenario`, a closure of the calling test, in a process of its own for each stand-in. The stand-in is the process's
/// driver. The process must succeed.
fn on_stand_in<F: FnOnce(&StandIn, &Context)>(scenario: F) {
    on_slow_stand_in("0", scenario);
}

/// Like [`on_stand_in`], with compilations of `compile_ms` milliseconds.
fn on_slow_stand_in<F: FnOnce(&StandIn, &Context)>(compile_ms: &str, scenario: F) {
    if env::var_os(ON_STAND_IN).is_some() {
        // SAFETY: the stand-in has no initialisers.
        let stand_in = StandIn(unsafe { libloading::Library::new("libcuda.so.1") }.unwrap());
        let context = Context::primary(Device::get(0).unwrap()).unwrap();
        return scenario(&stand_in, &context);
    }
    // `faults::test::{{closure}}`
    let test = type_name::<F>().split("::").nth(1).unwrap();
    for driver in stand_in::DRIVERS {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(ON_STAND_IN, test)
            .env("FIXTURE_COMPILE_MS", compile_ms)
            .env("LD_LIBRARY_PATH", stand_in::folder(driver, test))
            .output()
            .unwrap();
        let text =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(
            output.status.success() && text[0].contains("1 passed"),
            "{driver}: {}\n{}",
            output.status,
            text.concat()
        );
    }
}

/// Arguments of a resume that needs more shared memory than a launch has by default (48 KiB).
fn args(heads: usize) -> Result<Kda<'static>, Error> {
    let bf16 = |dims: &[usize]| {
        // SAFETY: the stand-in accesses no address.
        unsafe { Tensor::from_raw(0x10_0000, DType::Bf16, dims) }
    };
    let (qkv, of_head) = (bf16(&[1, 16, heads, 128])?, bf16(&[1, 16, heads])?);
    // SAFETY: as above.
    let keep = unsafe { Tensor::from_raw(0x10_0000, DType::I32, &[1]) }?;
    let gates = KdaGates::new(qkv, KdaDecay::Log, of_head, KdaBeta::Given);
    let states = States::update(bf16(&[1, heads, 128, 128])?);
    let previous = Previous::new(Stored::kv(qkv, qkv), qkv, of_head, keep);
    Ok(Kda::new(Inputs::qkv(qkv, qkv, qkv), gates, qkv, states)
        .previous(previous)
        .options(Options::default().state_layout(StateLayout::VLast)))
}

fn launch(library: &Library, heads: usize) -> Result<(), Error> {
    // SAFETY: the stand-in runs nothing.
    unsafe { library.launch(StreamRef::default_stream(), &args(heads)?) }
}

/// Arguments of a prefill of one row, with K = V = `dim`.
fn prompt(tokens: usize, dim: usize) -> Result<Gdn<'static>, Error> {
    let of = |dtype, dims: &[usize]| {
        // SAFETY: the stand-in accesses no address.
        unsafe { Tensor::from_raw(0x10_0000, dtype, dims) }
    };
    let qkvo = of(DType::Bf16, &[1, tokens, 2, dim])?;
    let gate = of(DType::F32, &[1, tokens, 2])?;
    let states = States::update(of(DType::F32, &[1, 2, dim, dim])?);
    let inputs = Inputs::qkv(qkvo, qkvo, qkvo);
    let prompt = Gdn::new(inputs, GdnGates::given(gate, gate), qkvo, states);
    Ok(prompt.workspace(of(DType::F32, &[1 << 24])?))
}

/// A scan that overlaps other launches may take a multiprocessor's whole shared memory, which is 99 KiB here. The driver refuses more.
#[test]
fn no_kernel_asks_for_more_shared_memory_than_the_gpu_has() {
    on_stand_in(|stand_in, context| {
        for dim in [64, 128] {
            let library = Library::new(context);
            for tokens in [1, 40, 300, 8192] {
                let prompt = prompt(tokens, dim).unwrap();
                // SAFETY: the stand-in runs nothing.
                unsafe { library.launch(StreamRef::default_stream(), &prompt) }.unwrap();
            }
        }
        assert!(stand_in.calls("cuFuncSetAttribute") > 0);
    });
}

/// The GPU has 99 KiB of shared memory for a block, and no clusters.
#[test]
fn a_gpu_is_used_as_another_one_within_its_own_means() {
    on_stand_in(|_, context| {
        for (capability, is_possible) in [
            ((8, 0), false),
            ((8, 6), true),
            ((8, 9), true),
            ((9, 0), false),
            ((12, 0), false),
            ((7, 5), false),
        ] {
            match Library::for_capability(context, capability) {
                Ok(library) => {
                    assert!(is_possible, "{capability:?}");
                    library.prewarm(&prompt(300, 128).unwrap()).unwrap();
                }
                Err(error) => {
                    assert!(!is_possible, "{capability:?}: {error}");
                    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                }
            }
        }
    });
}

/// Out of memory in each call before the first launch.
#[test]
fn a_first_launch_that_fails_leaves_nothing_and_may_be_tried_again() {
    on_stand_in(|stand_in, context| {
        assert!(args(1).unwrap().recipe().unwrap().shape.shared_bytes > 48 << 10);
        // If the driver has libraries, both ways of loading have to fail.
        stand_in.fault("cuLibraryLoadData", 2);
        let loaded = || {
            let calls = |name| stand_in.calls(name);
            calls("cuModuleLoadDataEx") - calls("cuModuleUnload")
        };
        let on_the_way = [
            stand_in.live(),
            "cuCtxPushCurrent_v2",
            "cuModuleLoadDataEx",
            "cuModuleGetFunction",
            "cuFuncGetAttribute",
            "cuFuncSetAttribute",
            "cuLaunchKernel",
        ];
        for call in on_the_way {
            let library = Library::new(context);
            let before = loaded();
            stand_in.fault(call, 2);
            for _ in 0..3 {
                let refused = launch(&library, 1).unwrap_err().to_string();
                assert_eq!(refused, format!("{call}: CUDA_ERROR_OUT_OF_MEMORY (2)"));
            }
            stand_in.fault(call, 0);
            let refused = if call == "cuModuleLoadDataEx" { 3 } else { 0 };
            let kept = if call == "cuLaunchKernel" { 1 } else { 0 };
            assert_eq!(
                loaded() - before - refused,
                kept,
                "{call}: modules left behind"
            );
            launch(&library, 1).unwrap();
            assert_eq!(
                loaded() - before - refused,
                1,
                "{call}: modules of one kernel"
            );
        }
    });
}

/// If loading as a library fails at any call, nothing of the library is left, and the kernel is compiled as a module.
#[test]
fn what_is_refused_as_a_library_is_loaded_as_a_module() {
    on_stand_in(|stand_in, context| {
        if !stand_in.has_libraries() {
            return;
        }
        for call in [
            "cuLibraryLoadData",
            "cuLibraryGetKernel",
            "cuKernelGetFunction",
        ] {
            let calls = ["cuLibraryLoadData", "cuLibraryUnload", "cuModuleLoadDataEx"];
            let before = calls.map(|call| stand_in.calls(call));
            stand_in.fault(call, 2);
            launch(&Library::new(context), 1).unwrap();
            stand_in.fault(call, 0);
            let after = calls.map(|call| stand_in.calls(call));
            let unloaded = if call == "cuLibraryLoadData" { 0 } else { 1 };
            assert_eq!(after[0] - before[0], 1, "{call}");
            assert_eq!(after[1] - before[1], unloaded, "{call}");
            assert_eq!(after[2] - before[2], 1, "{call}");
        }
        // The kernel is loaded, but then its attribute cannot be set.
        let calls = || [stand_in.load(), stand_in.unload()].map(|call| stand_in.calls(call));
        let before = calls();
        stand_in.fault("cuFuncSetAttribute", 2);
        launch(&Library::new(context), 1).unwrap_err();
        let after = calls();
        assert_eq!([after[0] - before[0], after[1] - before[1]], [1, 1]);
    });
}

/// A library belongs to no context, and is unloaded even if the context is gone. A module is not unloaded then.
#[test]
fn a_module_is_unloaded_when_dropped() {
    on_stand_in(|stand_in, context| {
        let load = || {
            let text = c".version 7.4\n.entry empty() { ret; }\n";
            Module::load(context, "empty", text).unwrap()
        };
        drop(load());
        assert_eq!(stand_in.calls(stand_in.load()), 1);
        assert_eq!(stand_in.calls(stand_in.unload()), 1);
        let module = load();
        let library = u32::from(stand_in.has_libraries());
        stand_in.fault("cuCtxPushCurrent_v2", 709);
        drop(module);
        assert_eq!(stand_in.calls(stand_in.unload()), 1 + library);
    });
}

#[test]
fn threads_compile_at_once_where_the_driver_can() {
    on_slow_stand_in("5", |stand_in, context| {
        let library = Library::new(context);
        let start = Barrier::new(THREADS);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (library, start) = (&library, &start);
                scope.spawn(move || {
                    start.wait();
                    launch(library, 1 + thread).unwrap();
                });
            }
        });
        assert_eq!(stand_in.calls(stand_in.load()), THREADS as u32);
        let most = stand_in.most_compiling();
        assert!(
            if stand_in.has_libraries() {
                most > 1
            } else {
                most == 1
            },
            "{most} at once"
        );
    });
}

#[test]
fn text_that_the_driver_refuses_is_an_error_of_the_launch_and_of_prewarming() {
    on_stand_in(|stand_in, context| {
        let library = Library::new(context);
        let refused = |result| {
            stand_in.fault("cuModuleLoadDataEx", result);
            stand_in.fault("cuLibraryLoadData", result);
            let launched = launch(&library, 1).unwrap_err();
            let warmed = library.prewarm(&args(1).unwrap()).unwrap_err();
            assert_eq!(launched.to_string(), warmed.to_string());
            launched
        };
        assert!(matches!(refused(222), Error::PtxTooNew { .. }));
        assert!(matches!(
            refused(209),
            Error::NoImageForArch {
                major: 8,
                minor: 6,
                ..
            }
        ));
        // Without a log, the error has only the driver's name for the code.
        assert!(matches!(refused(218), Error::Driver(error) if error.code == 218));
        stand_in.fault("cuModuleLoadDataEx", 0);
        stand_in.fault("cuLibraryLoadData", 0);
        launch(&library, 1).unwrap();
    });
}

/// Another library resets the context. The driver would still follow the handles of the context's functions, streams and graphs.
/// No such handle reaches the driver, even if the context is current. If the driver can tell, this also holds for a context that
/// was created again.
#[test]
fn a_context_that_is_reset_is_an_error_and_nothing_of_it_is_followed() {
    on_stand_in(|stand_in, context| {
        for is_current in [false, true] {
            // The previous iteration has reset its context.
            let context = Context::primary(context.device()).unwrap();
            let current = is_current.then(|| context.enter().unwrap());
            let library = Library::new(&context);
            launch(&library, 1).unwrap();
            let plan = library.plan(&args(1).unwrap()).unwrap();
            let stream = Stream::new(&context).unwrap();
            let memory = DeviceMemory::allocate(&context, 16).unwrap();
            let on_stream = || {
                // SAFETY: the stand-in runs nothing.
                unsafe { library.launch(stream.as_ref(), &args(1)?) }
            };
            // SAFETY: as above.
            let mut graph = unsafe { Graph::capture(&stream, on_stream) }.unwrap();

            let mut all_fail = |when: &str| {
                let launches = stand_in.calls("cuLaunchKernel") + stand_in.calls("cuGraphLaunch");
                // SAFETY: as above.
                let (planned, replayed) = unsafe {
                    (
                        plan.launch(stream.as_ref(), &args(1).unwrap()),
                        graph.launch(&stream),
                    )
                };
                let failures = [
                    ("a launch", on_stream()),
                    ("a first launch", launch(&library, 2)),
                    ("a planned launch", planned),
                    ("a replay", replayed),
                    ("the function of a plan", plan.raw(1).map(drop)),
                    ("prewarming", library.prewarm(&args(1).unwrap())),
                    ("resources", library.resources(&args(1).unwrap()).map(drop)),
                    ("waiting", stream.synchronize()),
                    ("waiting for all", context.synchronize()),
                    ("a stream", Stream::new(&context).map(drop)),
                    ("memory", DeviceMemory::allocate(&context, 16).map(drop)),
                ];
                for (what, result) in failures {
                    match result {
                        Err(Error::Driver(error)) => {
                            let got = (error.code, error.call);
                            assert_eq!(got, (709, stand_in.live()), "{what}, {when}");
                        }
                        other => panic!("{what}, {when}: {other:?}"),
                    }
                }
                let now = stand_in.calls("cuLaunchKernel") + stand_in.calls("cuGraphLaunch");
                assert_eq!(now, launches, "{when}: something was launched");
            };
            stand_in.reset();
            all_fail("reset");
            let again = Context::primary(context.device()).unwrap();
            assert_eq!(again.raw(), context.raw());
            if stand_in.has_libraries() {
                all_fail("made again");
                launch(&Library::new(&again), 1).unwrap();
            } else {
                // This driver cannot tell. Everything of the context is dropped before the context is created again.
                stand_in.reset();
            }
            drop((library, plan, stream, memory, graph, current));
            stand_in.reset();
        }
    });
}

/// A launch makes one driver call in addition to the launch itself.
#[test]
fn a_launch_asks_once_whether_its_context_is_there() {
    on_stand_in(|stand_in, context| {
        let library = Library::new(context);
        launch(&library, 1).unwrap();
        let _current = context.enter().unwrap();
        let calls = || {
            [
                "cuCtxGetId",
                "cuCtxGetApiVersion",
                "cuCtxGetCurrent",
                "cuCtxPushCurrent_v2",
                "cuCtxPopCurrent_v2",
                "cuLaunchKernel",
            ]
            .map(|call| stand_in.calls(call))
        };
        let before = calls();
        launch(&library, 1).unwrap();
        let after = calls();
        let made: Vec<_> = after.iter().zip(before).map(|(a, b)| a - b).collect();
        match stand_in.has_libraries() {
            true => assert_eq!(made, [1, 0, 0, 0, 0, 1]),
            false => assert_eq!(made, [0, 1, 1, 0, 0, 1]),
        }
    });
}

/// After a lost device or a destroyed context every call fails, and no drop panics.
#[test]
fn after_a_fatal_error_every_call_fails_and_no_drop() {
    on_stand_in(|stand_in, context| {
        for code in [201, 700, 709, 719] {
            let library = Library::new(context);
            launch(&library, 1).unwrap();
            let plan = library.plan(&args(1).unwrap()).unwrap();
            let stream = Stream::new(context).unwrap();
            let memory = DeviceMemory::allocate(context, 16).unwrap();

            stand_in.fault("*", code);
            // SAFETY: the stand-in runs nothing.
            let planned = unsafe { plan.launch(stream.as_ref(), &args(1).unwrap()) };
            let failures = [
                ("a launch", launch(&library, 1)),
                ("a first launch", launch(&library, 2)),
                ("a planned launch", planned),
                ("prewarming", library.prewarm(&args(3).unwrap())),
                ("a plan", library.plan(&args(4).unwrap()).map(drop)),
                ("resources", library.resources(&args(1).unwrap()).map(drop)),
                ("the self-test", library.self_test().map(drop)),
                ("waiting", stream.synchronize()),
                ("waiting for all", context.synchronize()),
                ("a stream", Stream::new(context).map(drop)),
                ("memory", DeviceMemory::allocate(context, 16).map(drop)),
                ("no memory", DeviceMemory::allocate(context, 0).map(drop)),
            ];
            for (what, result) in failures {
                match result {
                    Err(Error::Driver(error)) => assert_eq!(error.code, code, "{what}: {error}"),
                    other => panic!("{what}: {other:?}"),
                }
            }
            drop((library, plan, stream, memory));

            stand_in.fault("*", 0);
            launch(&Library::new(context), 1).unwrap();
        }
    });
}

#[test]
fn threads_that_race_for_a_kernel_compile_it_once() {
    on_stand_in(|stand_in, context| {
        let library = Library::new(context);
        let start = Barrier::new(THREADS);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (library, start) = (&library, &start);
                scope.spawn(move || {
                    start.wait();
                    launch(library, 1 + thread % 2).unwrap();
                });
            }
        });
        assert_eq!(stand_in.calls(stand_in.load()), 2);
        assert_eq!(stand_in.calls("cuLaunchKernel"), THREADS as u32);
    });
}

/// A dropped library keeps its kernels loaded, because a captured graph may use them.
#[test]
fn a_dropped_library_leaves_its_kernels_and_their_context() {
    on_stand_in(|stand_in, context| {
        {
            let own = Context::primary(context.device()).unwrap();
            let library = Library::new(&own);
            launch(&library, 1).unwrap();
        }
        assert_eq!(stand_in.calls(stand_in.load()), 1);
        assert_eq!(stand_in.calls(stand_in.unload()), 0);
        assert_eq!(stand_in.calls("cuDevicePrimaryCtxRetain"), 2);
        assert_eq!(stand_in.calls("cuDevicePrimaryCtxRelease_v2"), 0);
    });
}

/// Every capture is ended, even by an error or a panic, and leaves no graph.
#[test]
fn a_capture_that_fails_or_panics_is_ended() {
    on_stand_in(|stand_in, context| {
        let stream = Stream::new(context).unwrap();
        let capture = |enqueue: fn() -> Result<(), Error>| {
            // SAFETY: the stand-in runs nothing.
            unsafe { Graph::capture(&stream, enqueue) }
        };
        let refused = capture(|| Err(Error::NoDevice)).unwrap_err();
        assert!(matches!(refused, Error::NoDevice));
        catch_unwind(AssertUnwindSafe(|| capture(|| panic!("in a capture")))).unwrap_err();
        assert_eq!(stand_in.calls("cuStreamEndCapture"), 2);
        assert_eq!(stand_in.calls("cuGraphDestroy"), 2);
        assert_eq!(stand_in.calls("cuGraphInstantiateWithFlags"), 0);

        let mut graph = capture(|| Ok(())).unwrap();
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }.unwrap();
        drop(graph);
        assert_eq!(stand_in.calls("cuGraphDestroy"), 3);
        assert_eq!(stand_in.calls("cuGraphExecDestroy"), 1);

        stand_in.fault("cuGraphInstantiateWithFlags", 2);
        capture(|| Ok(())).unwrap_err();
        stand_in.fault("cuStreamEndCapture", 2);
        capture(|| Ok(())).unwrap_err();
        assert_eq!(stand_in.calls("cuGraphDestroy"), 4);
        assert_eq!(stand_in.calls("cuGraphExecDestroy"), 1);
    });
}

/// Only text reaches the driver's loader, which would trust the offsets in a binary.
#[test]
fn a_binary_is_refused_unseen() {
    on_stand_in(|stand_in, context| {
        let refused = Module::load(context, "gdn_decode", c"\x7fELF\x02\x01\x01").unwrap_err();
        assert_eq!(
            refused.to_string(),
            r#"PTX text: wanted .version first, got "\x7fELF\x02\x01\x01""#
        );
        for call in ["cuModuleLoadDataEx", "cuLibraryLoadData"] {
            assert_eq!(stand_in.calls(call), 0, "{call}");
        }
    });
}
