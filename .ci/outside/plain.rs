//! An engine without the feature `cust`: memory and a stream of gated-delta's own.

mod layer;

use std::error::Error;

use gated_delta::driver::{DeviceMemory, Stream};
use gated_delta::{Context, DType, Device, Library};

use layer::{Layer, SLOTS, step};

fn main() -> Result<(), Box<dyn Error>> {
    layer::decode_everywhere(decode)
}

fn decode(layer: &mut Layer) -> Result<(), Box<dyn Error>> {
    let context = Context::primary(Device::get(0)?)?;
    let stream = Stream::new(&context)?;
    let upload = |data: &[f32]| DeviceMemory::from_slice(&context, data);
    let (key, value) = (upload(&layer.key)?, upload(&layer.value)?);
    let (log_decay, beta) = (upload(&layer.log_decay)?, upload(&layer.beta)?);
    let slot = DeviceMemory::from_slice(&context, &layer.slot)?;
    let (mut output, mut states) = (upload(&layer.output)?, upload(&layer.states)?);
    let step = step([
        key.tensor(DType::F32, &[1, 1, 1, 64])?,
        value.tensor(DType::F32, &[1, 1, 1, 64])?,
        log_decay.tensor(DType::F32, &[1, 1, 1])?,
        beta.tensor(DType::F32, &[1, 1, 1])?,
        slot.tensor(DType::I32, &[1])?,
        output.tensor_mut(DType::F32, &[1, 1, 1, 64])?,
        states.tensor_mut(DType::F32, &[SLOTS, 1, 64, 64])?,
    ]);
    // SAFETY: the buffers outlive the synchronisation, and nobody else uses them.
    unsafe { Library::new(&context).launch(stream.as_ref(), &step) }?;
    stream.synchronize()?;
    output.read(&mut layer.output)?;
    states.read(&mut layer.states)?;
    Ok(())
}
