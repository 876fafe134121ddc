//! All code that the engine adds to decode with gated-delta.

use cudarc::driver::{CudaSlice, DevicePtr};
use gated_delta::{Context, Device, DeviceElement, Error, Library, StreamRef, Tensor};
use gated_delta::{Gdn, GdnGates, Inputs, States};

use crate::engine::{Engine, Layer};

/// The kernels, in the primary context of the engine's GPU, which is also cudarc's.
pub fn library(engine: &Engine) -> Result<Library, Error> {
    let device = Device::get(engine.cuda.ordinal() as i32)?;
    Ok(Library::new(&Context::primary(device)?))
}

/// Enqueues one decode step: row b reads and writes slot `slots[b]`.
pub fn decode(library: &Library, engine: &Engine, layer: &mut Layer) -> Result<(), Error> {
    let (b, h, hv, d, slots) = layer.sizes();
    let step = Gdn::new(
        Inputs::qkv(
            tensor(&layer.q, &[b, 1, h, d])?,
            tensor(&layer.k, &[b, 1, h, d])?,
            tensor(&layer.v, &[b, 1, hv, d])?,
        ),
        GdnGates::raw(
            tensor(&layer.a, &[b, 1, hv])?,
            tensor(&layer.b, &[b, 1, hv])?,
            tensor(&layer.a_log, &[hv])?,
            tensor(&layer.dt_bias, &[hv])?,
        ),
        tensor(&layer.o, &[b, 1, hv, d])?,
        States::update(tensor(&layer.states, &[slots, hv, d, d])?)
            .slots(tensor(&layer.slots, &[b])?),
    );
    // SAFETY: the engine frees buffers in stream order, and no two live rows have one slot.
    unsafe { library.launch(StreamRef::from_raw(engine.stream.cu_stream().cast()), &step) }
}

/// A tensor of all elements of `slice`. With one stream, its order is enough; with several streams, keep the guard that
/// `device_ptr` returns until the launch.
fn tensor<'a, T: DeviceElement>(at: &'a CudaSlice<T>, dims: &[usize]) -> Result<Tensor<'a>, Error> {
    let (address, _) = at.device_ptr(at.stream());
    // SAFETY: the layer's slices are as long as the dims that they are given here.
    unsafe { Tensor::from_raw(address, T::DTYPE, dims) }
}
