//! candle's CUDA devices.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaDevice, Result, Storage};
use gated_delta::{Context, Device, Library, StreamRef, Work};

use crate::bind::{Named, Place};
use crate::error::{bail, wrap};

/// The kernels for a device: one library for each GPU, made when it is first asked for.
pub fn library(device: &CudaDevice) -> Result<Library> {
    static LIBRARIES: OnceLock<Mutex<HashMap<usize, Library>>> = OnceLock::new();
    let ordinal = device.cuda_stream().context().ordinal();
    let mut libraries = LIBRARIES
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = libraries.get(&ordinal) {
        return Ok(library.clone());
    }
    let Ok(number) = i32::try_from(ordinal) else {
        return bail!("device: wanted the number of a GPU, got {ordinal}");
    };
    // candle's context is the GPU's primary one, which this retains too.
    let gpu = Device::get(number).map_err(wrap)?;
    let library = Library::new(&Context::primary(gpu).map_err(wrap)?);
    libraries.insert(ordinal, library.clone());
    Ok(library)
}

/// Whether the GPU has prefills.
pub fn is_hopper(device: &CudaDevice) -> Result<bool> {
    let library = library(device)?;
    let Some(context) = library.context() else {
        return Ok(false);
    };
    let capability = context.device().compute_capability().map_err(wrap)?;
    Ok(matches!(capability, (9, _)))
}

/// Enqueues on the device's stream. Nothing is waited for.
pub fn launch<W: Work>(library: &Library, device: &CudaDevice, work: &W) -> Result<()> {
    let stream = device.cuda_stream();
    // SAFETY: the stream outlives the call.
    let stream = unsafe { StreamRef::from_raw(stream.cu_stream().cast()) };
    // SAFETY: candle frees memory in the order of this stream; that no two rows write one slot, and that nobody else writes what
    // this launch does, is the caller's.
    unsafe { library.launch(stream, work) }.map_err(wrap)
}

/// Where a storage lies.
pub fn place(storage: &Storage, of: &Named<'_>) -> Result<Place> {
    let Storage::Cuda(storage) = storage else {
        return bail!("{}: wanted a tensor on a CUDA device", of.name);
    };
    let stream = storage.device.cuda_stream();
    macro_rules! place {
        ($($kind:ident)*) => {
            match &storage.slice {
                $(CudaStorageSlice::$kind(slice) => {
                    let (address, _recorded) = slice.device_ptr(&stream);
                    Ok(Place::on_device(address, slice.len(), of.is_written))
                })*
                _ => bail!("{}: a storage of another dtype than a launch takes", of.name),
            }
        };
    }
    place!(F32 BF16 F16 I32 I64 U32)
}
