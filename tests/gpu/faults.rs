//! A GPU that fails leaves a library that returns errors and never crashes. Each test takes the context or all memory with it, so
//! it runs in its own process, one at a time. Skipped without a GPU.

use std::any::type_name;
use std::env;
use std::ffi::CString;
use std::process::Command;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use gated_delta::driver::{Context, DeviceMemory, Graph, Module, Stream, attribute, code, driver};
use gated_delta::specialise::specialise;
use gated_delta::{Error, Library, Tensor, raw};
use gated_delta_harness::arguments::Arguments;
use gated_delta_test_support::backend::{self, Backend, cuda, gpu, on_threads};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::entries_of_each_kind;
use gated_delta_test_support::problem::Sizes;
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};

/// Variable of the process that runs a test's scenario.
const ALONE: &str = "GATED_DELTA_ALONE";

/// PTX of a kernel that stores a word to an unmapped address.
const BAD_STORE: &std::ffi::CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry bad_store()
{
    .reg .u64 %rd<2>;
    mov.u64 %rd1, 16;
    st.global.u32 [%rd1], 0;
    ret;
}
";

/// Runs `scenario`, a closure of the calling test, in a process of its own, and panics unless that process succeeds.
fn alone<F: FnOnce(&Context)>(scenario: F) {
    static ONE: Mutex<()> = Mutex::new(());
    if let Some(context) = gpu().filter(|_| env::var_os(ALONE).is_some()) {
        return scenario(context);
    }
    if gpu().is_none() {
        return;
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The name of the type is `gpu::faults::test::{{closure}}`.
    let test = type_name::<F>().strip_prefix("gpu::").unwrap();
    let test = test.strip_suffix("::{{closure}}").unwrap();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(
        output.status.success() && text[0].contains("1 passed"),
        "{}\n{}",
        output.status,
        text.concat()
    );
    print!("{}", text[1]);
}

/// A problem of each kind of kernel. The driver handles faults in the same way for all sizes.
fn specs() -> impl Iterator<Item = Spec> {
    Family::of_each_kind().into_iter().map(|family| Spec {
        batch: 4,
        slots: SlotChoice::LIVE,
        ..Spec::plain(family)
    })
}

fn launch(library: &Library, stream: &Stream, args: &Arguments<Tensor<'_>>) -> Result<(), Error> {
    // SAFETY: the callers keep the buffers until they have waited; live rows write slots of their own.
    unsafe { backend::launch(library, stream.as_ref(), args, None) }
}

/// Panics unless `result` is an error of the driver.
#[track_caller]
fn fails(what: &str, result: Result<(), Error>) {
    match result {
        Err(Error::Driver(error)) => eprintln!("{what}: {error}"),
        other => panic!("{what}: wanted an error of the driver, got {other:?}"),
    }
}

/// Panics unless every call that needs the context fails. Drops must be silent.
fn everything_fails(
    library: &Library,
    context: &Context,
    stream: &Stream,
    args: &Arguments<Tensor<'_>>,
) {
    fails("waiting for all", context.synchronize());
    fails("memory", DeviceMemory::allocate(context, 16).map(drop));
    fails("a stream", Stream::new(context).map(drop));
    let work = args.work().unwrap();
    fails("prewarming", Library::new(context).prewarm(&*work));
    fails("the self-test", library.self_test().map(drop));
    fails(
        "a first launch",
        launch(&Library::new(context), stream, args),
    );
    fails("waiting", stream.synchronize());
    fails("a launch", launch(library, stream, args));
}

#[test]
fn after_a_bad_access_every_call_fails_and_nothing_crashes() {
    alone(|context| {
        let case = specs().next().unwrap().case();
        let stream = Stream::new(context).unwrap();
        let lost = cuda().unwrap().with(&case, |library, _, args| {
            launch(library, &stream, args).unwrap();
            stream.synchronize().unwrap();
            let module = Module::load(context, "bad_store", BAD_STORE).unwrap();
            let function = module.function(c"bad_store").unwrap();
            let (raw, none) = (stream.raw(), ptr::null_mut());
            // SAFETY: the kernel is meant to fail.
            unsafe {
                let driver = driver().unwrap();
                driver.launch_kernel(function.raw(), 1, 1, 1, 1, 1, 1, 0, raw, none, none)
            }
            .unwrap();
            let bad_access = stream.synchronize().unwrap_err();
            assert!(
                bad_access.to_string().contains("ILLEGAL_ADDRESS"),
                "{bad_access}"
            );
            everything_fails(library, context, &stream, args);
        });
        lost.expect_err("the case cannot be copied back either");
    });
}

/// Calls `cuDevicePrimaryCtxReset`, as another library in the process may do.
fn reset(context: &Context) {
    let mut handle = 0;
    // SAFETY: the function has this type. After the reset, the context's objects are only used to see that the calls fail.
    unsafe {
        let driver = context.driver();
        let ordinal = context.device().ordinal();
        driver.device_get(&raw mut handle, ordinal).unwrap();
        let reset =
            driver.optional::<unsafe extern "C" fn(i32) -> i32>("cuDevicePrimaryCtxReset_v2");
        assert_eq!(reset.expect("a driver of CUDA 11")(handle), code::SUCCESS);
    }
}

/// After a reset of the context every call fails until the context is created again. This includes threads in which the context is
/// current, and libraries of a context that was created again with the same handle.
#[test]
fn a_context_that_is_reset_is_an_error_until_it_is_made_again() {
    alone(|context| {
        let case = specs().next().unwrap().case();
        let backend = Backend::Cuda(Library::new(context), context.clone());
        let stream = Stream::new(context).unwrap();
        let lost = backend.with(&case, |library, _, args| {
            launch(library, &stream, args).unwrap();
            let work = args.work().unwrap();
            let plan = library.plan(&*work).unwrap();
            // SAFETY: the buffers are alive until the graph is dropped.
            let captured = unsafe { Graph::capture(&stream, || launch(library, &stream, args)) };
            let mut graph = captured.unwrap();
            stream.synchronize().unwrap();
            let all_fails = |graph: &mut Graph| {
                everything_fails(library, context, &stream, args);
                // SAFETY: the library refuses both launches.
                let (planned, replayed) =
                    unsafe { (plan.launch(stream.as_ref(), &*work), graph.launch(&stream)) };
                fails("a planned launch", planned);
                fails("the function of a plan", plan.raw(case.batch()).map(drop));
                fails("a replay", replayed);
            };
            let current = context.enter().unwrap();
            reset(context);
            all_fails(&mut graph);
            drop(current);
            all_fails(&mut graph);
            let again = Context::primary(context.device()).unwrap();
            eprintln!("{:?}, and made again {:?}", context.raw(), again.raw());
            // SAFETY: the function is only looked up, not called.
            let can_tell = unsafe { again.driver().optional::<*const ()>("cuCtxGetId") };
            if can_tell.is_some() {
                fails(
                    "a launch where it was made again",
                    launch(library, &stream, args),
                );
                fails("waiting", stream.synchronize());
                // SAFETY: as above.
                fails("a replay", unsafe { graph.launch(&stream) });
            }
        });
        lost.expect_err("the case cannot be copied back either");
        let again = Context::primary(context.device()).unwrap();
        let backend = Backend::Cuda(Library::new(&again), again.clone());
        check(&case, &backend.run(&case, None));
    });
}

#[test]
fn out_of_memory_at_load_is_an_error_and_passes() {
    alone(|context| {
        let mut refused = 0;
        for spec in specs() {
            let case = spec.case();
            let (_, after) = cuda()
                .unwrap()
                .with(&case, |_, _, args| {
                    let library = Library::new(context);
                    let stream = Stream::new(context).unwrap();
                    let all = all_memory(context);
                    let launched = launch(&library, &stream, args);
                    stream.synchronize().unwrap();
                    drop(all);
                    match launched {
                        Ok(()) => return,
                        Err(Error::Driver(error)) => assert_eq!(error.code, code::OUT_OF_MEMORY),
                        Err(error) => panic!("{error}"),
                    }
                    refused += 1;
                    launch(&library, &stream, args).unwrap();
                    stream.synchronize().unwrap();
                })
                .unwrap();
            check(&case, &after);
        }
        eprintln!(
            "{refused} of {} first launches were out of memory",
            specs().count()
        );
    });
}

/// Allocates until no memory is left.
fn all_memory(context: &Context) -> Vec<DeviceMemory> {
    let mut all = Vec::new();
    let mut bytes = context.device().total_memory().unwrap();
    while bytes > 0 {
        match DeviceMemory::allocate(context, bytes) {
            Ok(memory) => all.push(memory),
            Err(Error::Driver(error)) if error.code == code::OUT_OF_MEMORY => bytes /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    all
}

#[test]
fn corrupted_text_is_refused() {
    alone(|context| {
        on_threads(&entries_of_each_kind(), |&entry| {
            let values = vec![1; entry.symbols().len()];
            let template = raw::template(entry).unwrap();
            let text = specialise(&template, entry.symbols(), &values).unwrap();
            let text = text.into_string().unwrap();
            let name = entry.name();
            let load = |text: &str| {
                let text = CString::new(text).unwrap();
                let module = Module::load(context, name, &text)?;
                let function = module.function(&CString::new(name).unwrap())?;
                function.attribute(attribute::FUNCTION_NUM_REGS)
            };
            load(&text).unwrap();
            let last = text.rfind('}').unwrap();
            let mut corrupted = vec![
                ("empty", String::new()),
                ("of another format", "not PTX\n".to_owned()),
                ("renamed", text.replace(name, "another")),
                ("misspelt", text.replacen("ld.global", "ld.glabol", 1)),
                ("undeclared", text.replacen(".reg ", "// ", 1)),
            ];
            // The entry that tests warpgroups has no constants.
            if template != text {
                corrupted.push(("not specialised", template));
            }
            corrupted
                .extend((1..4).map(|quarters| ("cut off", text[..last * quarters / 4].to_owned())));
            for (how, text) in corrupted {
                let refused = load(&text).expect_err(how);
                let is_explained = match how {
                    "empty" | "of another format" => matches!(refused, Error::Range { .. }),
                    _ => matches!(refused, Error::Compile { .. } | Error::Driver(_)),
                };
                assert!(is_explained, "{name}, {how}: {refused}");
            }
        });
    });
}

#[test]
fn a_captured_graph_outlives_its_library() {
    alone(|context| {
        for spec in specs() {
            let case = spec.case();
            let (_, after) = cuda()
                .unwrap()
                .with(&case, |_, _, args| {
                    let stream = Stream::new(context).unwrap();
                    let mut graph = {
                        let library = Library::new(context);
                        let work = args.work().unwrap();
                        library.prewarm(&*work).unwrap();
                        // SAFETY: the buffers are alive until `with` has waited.
                        unsafe { Graph::capture(&stream, || launch(&library, &stream, args)) }
                            .unwrap()
                    };
                    // Other modules may be loaded at the address of the unloaded kernels.
                    let work = args.work().unwrap();
                    Library::new(context).prewarm(&*work).unwrap();
                    // SAFETY: as above.
                    unsafe { graph.launch(&stream) }.unwrap();
                    stream.synchronize().unwrap();
                })
                .unwrap();
            check(&case, &after);
        }
    });
}
