//! What the engine adds to decode with gated-delta, in all.

use cudarc::driver::{CudaSlice, DevicePtr};
use gated_delta::driver::{Context, Device};
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::{BetaScale, GdnGates};
use gated_delta::{DeviceElement, Error, Library, StreamRef, Tensor};

use crate::engine::{Engine, Layer};

/// The kernels, in the primary context of the engine's GPU: cudarc's own.
pub fn library(engine: &Engine) -> Result<Library, Error> {
    let device = Device::get(engine.cuda.ordinal() as i32)?;
    Ok(Library::new(&Context::primary(device)?))
}

/// Enqueues one decode step: row b reads and writes slot `slots[b]`.
pub fn decode(library: &Library, engine: &Engine, layer: &mut Layer) -> Result<(), Error> {
    let (b, h, hv, d, slots) = layer.sizes();
    let args = GdnDecode {
        q: tensor(&layer.q, &[b, 1, h, d])?,
        k: tensor(&layer.k, &[b, 1, h, d])?,
        v: tensor(&layer.v, &[b, 1, hv, d])?,
        gates: GdnGates::Raw {
            a: tensor(&layer.a, &[b, 1, hv])?,
            b: tensor(&layer.b, &[b, 1, hv])?,
            a_log: tensor(&layer.a_log, &[hv])?,
            dt_bias: tensor(&layer.dt_bias, &[hv])?,
            beta_scale: BetaScale::One,
        },
        o: tensor(&layer.o, &[b, 1, hv, d])?,
        pool: tensor(&layer.states, &[slots, hv, d, d])?,
        write_pool: None,
        read_slots: Some(tensor(&layer.slots, &[b])?),
        write_slots: None,
        options: GdnDecodeOptions::default(),
    };
    // SAFETY: the engine frees buffers in the order of its stream, and gives live rows slots of their own.
    unsafe { library.gdn_decode(StreamRef::from_raw(engine.stream.cu_stream().cast()), &args) }
}

/// A tensor in all of `slice`. The order of the engine's one stream is all that it needs; with several, keep what
/// `device_ptr` returns beside the address until the launch.
fn tensor<'a, T: DeviceElement>(at: &'a CudaSlice<T>, dims: &[usize]) -> Result<Tensor<'a>, Error> {
    let (address, _) = at.device_ptr(at.stream());
    // SAFETY: the layer's slices are as long as the dims that they are given here.
    unsafe { Tensor::from_raw(address, T::DTYPE, dims) }
}
