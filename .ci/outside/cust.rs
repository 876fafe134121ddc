//! An engine on cust.

mod layer;

use std::error::Error;

use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use gated_delta::{Context, Device, Library, Tensor};

use layer::{Layer, SLOTS, step};

fn main() -> Result<(), Box<dyn Error>> {
    layer::decode_everywhere(decode)
}

fn decode(layer: &mut Layer) -> Result<(), Box<dyn Error>> {
    // cust's context is the primary one, as is this.
    let library = Library::new(&Context::primary(Device::get(0)?)?);
    let _context = cust::quick_init()?;
    let stream = Stream::new(StreamFlags::DEFAULT, None)?;
    let upload = |data: &[f32]| DeviceBuffer::from_slice(data);
    let (key, value) = (upload(&layer.key)?, upload(&layer.value)?);
    let (log_decay, beta) = (upload(&layer.log_decay)?, upload(&layer.beta)?);
    let slot = DeviceBuffer::from_slice(&layer.slot)?;
    let (mut output, mut states) = (upload(&layer.output)?, upload(&layer.states)?);
    let step = step([
        Tensor::from_device(&key, &[1, 1, 1, 64])?,
        Tensor::from_device(&value, &[1, 1, 1, 64])?,
        Tensor::from_device(&log_decay, &[1, 1, 1])?,
        Tensor::from_device(&beta, &[1, 1, 1])?,
        Tensor::from_device(&slot, &[1])?,
        Tensor::from_device_mut(&mut output, &[1, 1, 1, 64])?,
        Tensor::from_device_mut(&mut states, &[SLOTS, 1, 64, 64])?,
    ]);
    // SAFETY: the buffers outlive the synchronisation, and nobody else uses them.
    unsafe { library.launch((&stream).into(), &step) }?;
    stream.synchronize()?;
    output.copy_to(&mut layer.output)?;
    states.copy_to(&mut layer.states)?;
    Ok(())
}
