//! What only a GPU shows: graphs, foreign streams and threads, plans, pools beyond 2³² elements, registers.

mod large_pool;
mod plans;

use std::error::Error as StdError;
use std::ffi::c_void;

use gated_delta::driver::{Context, Graph, RawContext, RawStream, Stream};
use gated_delta::ops::gdn_decode::GdnDecode;
use gated_delta::{Library, StreamRef, Tensor};
use gated_delta_tests::backend::{Backend, cuda, gpu};
use gated_delta_tests::buffer::Buffer;
use gated_delta_tests::compare::check;
use gated_delta_tests::problem::Problem;
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

/// Four rows with read and write slots in one pool.
fn spec(family: Family) -> Spec {
    Spec {
        batch: 4,
        slots: SlotChoice::LIVE,
        ..Spec::plain(family)
    }
}

fn context_of(library: &Library) -> &Context {
    library
        .context()
        .expect("the library of a GPU has its context")
}

/// Waits for copies from host memory, which may return before they are done. A whole context is not waited for while
/// other tests capture graphs: that ends their captures.
fn wait_for_copies(context: &Context) {
    let _current = context.enter().unwrap();
    // SAFETY: the context is current.
    unsafe { context.driver().stream_synchronize(RawStream::NULL) }.unwrap();
}

/// Writes a tensor's buffer, while no work is under way.
fn overwrite(context: &Context, tensor: &Tensor<'_>, buffer: &Buffer) {
    let _current = context.enter().unwrap();
    let (from, bytes) = (
        buffer.words.as_ptr().cast::<c_void>(),
        size_of_val(&*buffer.words),
    );
    // SAFETY: the tensor is all of a buffer of that many words; nothing else is under way.
    unsafe { context.driver().memcpy_htod(tensor.address(), from, bytes) }.unwrap();
    wait_for_copies(context);
}

/// A graph captured after prewarming, replayed with other slots than it was captured with.
#[test]
fn a_replayed_graph_sees_changed_slots() {
    let Some(backend) = cuda() else { return };
    for family in Family::all() {
        let spec = spec(family);
        let problem = spec.problem();
        let with_slots = |slots: &[i64]| {
            Problem {
                read_slots: Some(slots.to_vec()),
                ..problem.clone()
            }
            .case(&spec.form)
        };
        let slots = problem.read_slots.clone().unwrap();
        let nobody = with_slots(&[-1; 4]);
        let first = with_slots(&slots);
        let second = with_slots(&[slots[0], -1, slots[2], i32::MAX.into()]);
        let slots = first.read_slots.as_ref().unwrap();
        assert_eq!(slots.offset, 0);

        let mut eager = backend.run(&first, None);
        eager.buffers[slots.buffer] = second.buffers[slots.buffer].clone();
        let eager = backend.run(&eager, None);

        let (_, replayed) = backend
            .with(&nobody, |library, _, args| {
                let context = context_of(library);
                let stream = Stream::new(context).unwrap();
                library.prewarm_gdn_decode(args).unwrap();
                // SAFETY: the buffers are alive until `with` has waited; live rows write slots of their own.
                let graph = unsafe {
                    Graph::capture(&stream, || library.gdn_decode(stream.as_ref(), args))
                }
                .unwrap();
                for case in [&nobody, &first, &second] {
                    overwrite(
                        context,
                        &args.read_slots.unwrap(),
                        &case.buffers[slots.buffer],
                    );
                    // SAFETY: as above.
                    unsafe { graph.launch(&stream) }.unwrap();
                    stream.synchronize().unwrap();
                }
            })
            .unwrap();
        assert!(
            replayed == eager,
            "{family:?}: a replay differs from launches"
        );
    }
}

/// The launching thread has no context; the stream was made by another thread through the driver itself.
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
    let case = spec(Family::all().next().unwrap()).case();
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
    // SAFETY: made above, and its work was waited for.
    unsafe { context.driver().stream_destroy(stream) }.unwrap();
}

fn launch_without_a_context(library: &Library, stream: RawStream, args: &GdnDecode<'_>) {
    let context = context_of(library);
    let current = || {
        let mut current = RawContext::NULL;
        // SAFETY: `current` is written.
        unsafe { context.driver().ctx_get_current(&raw mut current) }.unwrap();
        current
    };
    assert_eq!(current(), RawContext::NULL);
    // SAFETY: the stream is alive, as are the buffers until the stream was waited for.
    unsafe { library.gdn_decode(StreamRef::from_raw(stream.0), args) }.unwrap();
    assert_eq!(
        current(),
        RawContext::NULL,
        "the launch leaves the thread as it was"
    );
    let _current = context.enter().unwrap();
    // SAFETY: the stream is alive.
    unsafe { context.driver().stream_synchronize(stream) }.unwrap();
}

/// Eight threads ask one library for the same kernels at once: there is one of each, and the right results.
#[test]
fn threads_share_a_library_and_its_kernels() {
    let Some(context) = gpu() else { return };
    let backend = Backend::Cuda(Library::new(context), context.clone());
    let case = spec(Family::all().next().unwrap()).case();
    let launch = || {
        let (function, after) = backend
            .with(&case, |library, stream, args| {
                // SAFETY: the buffers are alive until `with` has waited.
                unsafe { library.gdn_decode(stream, args) }.unwrap();
                library
                    .plan_gdn_decode(args)
                    .unwrap()
                    .raw(case.q.dims[0])
                    .unwrap()
                    .0
            })
            .unwrap();
        check(&case, &after);
        function
    };
    let functions: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(launch)).collect();
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

/// Buffers, a stream and a context of `cust`.
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
    for family in Family::all() {
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
        let args = case.args(&bases.collect::<Result<Vec<_>, _>>()?)?;
        // SAFETY: the buffers are alive until the stream was waited for; live rows write slots of their own.
        unsafe { library.gdn_decode((&stream).into(), &args) }?;
        stream.synchronize()?;
        let mut after = case.clone();
        for (buffer, copy) in after.buffers.iter_mut().zip(&copies) {
            bytemuck::cast_slice_mut(&mut buffer.words).copy_from_slice(&copy.as_host_vec()?);
        }
        check(&case, &after);
    }
    Ok(())
}
