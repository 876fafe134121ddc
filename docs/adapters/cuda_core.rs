//! Streams and buffers of NVIDIA's own bindings (`cuda-core` 0.5) as gated-delta takes them. One file to copy.

use cuda_core::{Context, DeviceBuffer, DeviceCopy, Stream};
use gated_delta::{DeviceElement, Error, Library, StreamRef, Tensor, Work};

/// The kernels for the GPU of a context.
///
/// # Errors
/// What the driver says of the context.
///
/// # Safety
/// The context outlives the library, its plans, and graphs of its launches.
pub unsafe fn library(context: &Context) -> Result<Library, Error> {
    // SAFETY: the caller's promise.
    let context = unsafe { gated_delta::Context::from_raw(context.cu_ctx().cast()) }?;
    Ok(Library::new(&context))
}

/// A contiguous tensor in all of `buffer`, or in what it begins with; parts of it are views (`narrow`, `split`, `with_strides`).
///
/// # Errors
/// [`Error::Range`] where the buffer has fewer elements than `dims`.
pub fn tensor<'a, T: DeviceElement + DeviceCopy>(
    buffer: &'a DeviceBuffer<T>,
    dims: &[usize],
) -> Result<Tensor<'a>, Error> {
    let wanted: usize = dims.iter().product();
    if wanted > buffer.len() {
        return Err(Error::Range {
            what: "elements of a buffer",
            wanted: format!("at least {wanted}"),
            got: buffer.len().to_string(),
        });
    }
    // SAFETY: the buffer is borrowed for 'a, and has as many elements.
    unsafe { Tensor::from_raw(buffer.cu_deviceptr(), T::DTYPE, dims) }
}

/// Enqueues on the stream.
///
/// # Errors
/// Whatever the arguments break of their rules, named; compile and launch failures.
///
/// # Safety
/// As [`Library::launch`]'s: the buffers live until the stream has passed the launch, which alone writes what it writes.
pub unsafe fn launch<W: Work>(library: &Library, stream: &Stream, work: &W) -> Result<(), Error> {
    // SAFETY: the stream outlives the call; the rest is the caller's promise.
    unsafe { library.launch(StreamRef::from_raw(stream.cu_stream().cast()), work) }
}
