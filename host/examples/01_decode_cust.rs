//! A GDN decode in an engine on cust, with cust's context, stream and buffers.

mod common;

use anyhow::Result;
use common::{Inputs, Rows, Shape};
use cust::CudaFlags;
use cust::memory::DeviceBuffer;
use cust::stream::{Stream, StreamFlags};
use gated_delta::driver::{Context, Device};
use gated_delta::{DType, Gdn, GdnGates, Inputs as Qkv, Library, States, Tensor};
use half::bf16;

/// Shape of Qwen3-Next's layers.
const SHAPE: Shape = Shape {
    batch: 4,
    tokens: 1,
    heads: 16,
    value_heads: 32,
    dim: 128,
    slots: 8,
};

/// Slot of each row; the third row is padding.
const SLOTS: [i32; 4] = [5, 2, -1, 0];

fn main() -> Result<()> {
    if common::gpu_or_skip()?.is_none() {
        return Ok(());
    }
    let inputs = Inputs::random(SHAPE, 1);
    let (o, states) = decode(&inputs, &SLOTS)?;
    inputs.check(&inputs.states, &Rows::decoded(&SLOTS), &o, &states)
}

/// A decode in the engine. Only the library and its tensors do not belong to cust.
fn decode(inputs: &Inputs, slots: &[i32]) -> Result<(Vec<bf16>, Vec<f32>)> {
    let Shape {
        batch,
        heads,
        value_heads,
        dim,
        slots: pool,
        ..
    } = inputs.shape;
    cust::init(CudaFlags::empty())?;
    let _context = cust::context::Context::new(cust::device::Device::get_device(0)?)?;
    // A stream with these flags waits for the copies below, which run on the default stream.
    let stream = Stream::new(StreamFlags::DEFAULT, None)?;
    // cust uses the primary context, as this library does.
    let library = Library::new(&Context::primary(Device::get(0)?)?);

    // cust has no bf16: its buffers are of u16.
    let upload = |data: &[bf16]| DeviceBuffer::from_slice(bytemuck::cast_slice::<_, u16>(data));
    let (q, k, v) = (upload(&inputs.q)?, upload(&inputs.k)?, upload(&inputs.v)?);
    let (a, b, mut o) = (upload(&inputs.a)?, upload(&inputs.b)?, upload(&inputs.o)?);
    let a_log = DeviceBuffer::from_slice(&inputs.a_log)?;
    let dt_bias = DeviceBuffer::from_slice(&inputs.dt_bias)?;
    let mut states = DeviceBuffer::from_slice(&inputs.states)?;
    let slots = DeviceBuffer::from_slice(slots)?;

    let (qk, vo) = ([batch, 1, heads, dim], [batch, 1, value_heads, dim]);
    let gate = [batch, 1, value_heads];
    let step = Gdn::new(
        Qkv::qkv(
            Tensor::from_device_as(&q, DType::Bf16, &qk)?,
            Tensor::from_device_as(&k, DType::Bf16, &qk)?,
            Tensor::from_device_as(&v, DType::Bf16, &vo)?,
        ),
        GdnGates::raw(
            Tensor::from_device_as(&a, DType::Bf16, &gate)?,
            Tensor::from_device_as(&b, DType::Bf16, &gate)?,
            Tensor::from_device(&a_log, &[value_heads])?,
            Tensor::from_device(&dt_bias, &[value_heads])?,
        ),
        Tensor::from_device_as_mut(&mut o, DType::Bf16, &vo)?,
        States::update(Tensor::from_device_mut(
            &mut states,
            &[pool, value_heads, dim, dim],
        )?)
        .slots(Tensor::from_device(&slots, &[batch])?),
    );
    // SAFETY: the buffers outlive the synchronisation, nothing else uses them, and no two live rows write one slot.
    unsafe { library.launch((&stream).into(), &step) }?;
    stream.synchronize()?;
    let o: Vec<bf16> = o.as_host_vec()?.into_iter().map(bf16::from_bits).collect();
    Ok((o, states.as_host_vec()?))
}
