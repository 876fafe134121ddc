//! Foreign streams and threads, and libraries that threads share.

use std::error::Error as StdError;

use gated_delta::driver::{Context, RawContext, RawStream};
use gated_delta::{Library, StreamRef, Tensor};
use gated_delta_harness::arguments::Arguments;
use gated_delta_test_support::backend::{Backend, cuda, gpu, launch};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::problem::Sizes;
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};

/// Four rows with read and write slots in one pool.
pub fn spec(family: Family) -> Spec {
    Spec {
        batch: 4,
        slots: SlotChoice::LIVE,
        ..Spec::plain(family)
    }
}

pub fn context_of(library: &Library) -> &Context {
    library
        .context()
        .expect("the library of a GPU has its context")
}

/// Waits for copies from host memory, which may return before they are done. It waits for a stream, since a wait for the whole
/// context would end the graph captures of other tests.
pub fn wait_for_copies(context: &Context) {
    let _current = context.enter().unwrap();
    // SAFETY: the context is current.
    unsafe { context.driver().stream_synchronize(RawStream::NULL) }.unwrap();
}

/// A launch works in a thread without a context, on a stream that another thread made through the driver.
#[test]
fn a_foreign_stream_and_a_thread_without_a_context() {
    let (Some(backend), Some(context)) = (cuda(), gpu()) else {
        return;
    };
    let stream = std::thread::spawn(|| {
        let _current = context.enter().unwrap();
        let mut stream = RawStream::NULL;
        // SAFETY: the context is current, and `stream` is written.
        unsafe { context.driver().stream_create(&raw mut stream, 1) }.unwrap();
        stream
    });
    let stream = stream.join().unwrap();
    let case = spec(Family::all()[0]).case();
    let (_, after) = backend
        .with(&case, |library, _, args| {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| launch_without_a_context(library, stream, args))
                    .join()
                    .unwrap()
            });
        })
        .unwrap();
    check(&case, &after);
    let _current = context.enter().unwrap();
    // SAFETY: this function has created the stream, and its work is done.
    unsafe { context.driver().stream_destroy(stream) }.unwrap();
}

fn launch_without_a_context(library: &Library, stream: RawStream, args: &Arguments<Tensor<'_>>) {
    let context = context_of(library);
    let current = || {
        let mut current = RawContext::NULL;
        // SAFETY: `current` is written.
        unsafe { context.driver().ctx_get_current(&raw mut current) }.unwrap();
        current
    };
    assert_eq!(current(), RawContext::NULL);
    // SAFETY: the stream is alive, as are the buffers until the stream was waited for.
    unsafe { launch(library, StreamRef::from_raw(stream.0), args, None) }.unwrap();
    assert_eq!(
        current(),
        RawContext::NULL,
        "the launch leaves the thread as it was"
    );
    let _current = context.enter().unwrap();
    // SAFETY: the stream is alive.
    unsafe { context.driver().stream_synchronize(stream) }.unwrap();
}

/// Eight threads that ask one library for the same kernels at once share one compilation of each, and get right results.
#[test]
fn threads_share_a_library_and_its_kernels() {
    let Some(context) = gpu() else { return };
    let backend = Backend::Cuda(Library::new(context), context.clone());
    let case = spec(Family::all()[0]).case();
    let run = || {
        let (function, after) = backend
            .with(&case, |library, stream, args| {
                // SAFETY: the buffers are alive until `with` has waited.
                unsafe { launch(library, stream, args, None) }.unwrap();
                let plan = library.plan(&*args.work().unwrap()).unwrap();
                plan.raw(case.batch()).unwrap().0
            })
            .unwrap();
        check(&case, &after);
        function
    };
    let functions: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(run)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(
        functions.iter().all(|function| *function == functions[0]),
        "compiled more than once"
    );
}

/// Launches work with buffers, a stream and a context of `cust`.
#[test]
fn tensors_and_streams_of_cust() -> Result<(), Box<dyn StdError>> {
    use cust::CudaFlags;
    use cust::context::Context as CustContext;
    use cust::device::Device;
    use cust::memory::DeviceBuffer;
    use cust::stream::{Stream, StreamFlags};

    let Some(context) = gpu() else { return Ok(()) };
    cust::init(CudaFlags::empty())?;
    let _context = CustContext::new(Device::get_device(0)?)?;
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
    let library = Library::new(context);
    for family in Family::of_each_kind() {
        let case = spec(family).case();
        let copies = case.buffers.iter().map(|buffer| {
            let words: &[u64] = bytemuck::cast_slice(&buffer.words);
            DeviceBuffer::from_slice(words)
        });
        let mut copies = copies.collect::<Result<Vec<_>, _>>()?;
        wait_for_copies(context);
        let bases = copies
            .iter_mut()
            .zip(&case.buffers)
            .enumerate()
            .map(|(i, (copy, buffer))| {
                let (dtype, dims) = (buffer.dtype, [buffer.len()]);
                if case.writes(i) {
                    Tensor::from_device_as_mut(copy, dtype, &dims)
                } else {
                    Tensor::from_device_as(copy, dtype, &dims)
                }
            });
        let bases = bases.collect::<Result<Vec<_>, _>>()?;
        let args = case.args.map(&|view| view.of(&bases))?;
        // SAFETY: the buffers are alive until the stream was waited for; live rows write slots of their own.
        unsafe { launch(&library, (&stream).into(), &args, None) }?;
        stream.synchronize()?;
        let mut after = case.clone();
        for (buffer, copy) in after.buffers.iter_mut().zip(&copies) {
            bytemuck::cast_slice_mut(&mut buffer.words).copy_from_slice(&copy.as_host_vec()?);
        }
        check(&case, &after);
    }
    Ok(())
}
