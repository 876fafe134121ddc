//! Passes candle's CUDA tensors to gated-delta: without a copy or a wait, on the device's own stream. An engine on another version of
//! candle (from git, or a fork) copies this one file; in `candle-gated-delta` it is the module `cuda`.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, SyncOnDrop};
use candle_core::{CudaDevice, Error, Layout, Result, Storage};
use gated_delta::{Context, DType, Device, Library, StreamRef, Work};

/// The library for a device. There is one for each GPU, made when it is first asked for.
///
/// # Errors
/// The driver's errors for a GPU.
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
    let number = i32::try_from(ordinal).map_err(Error::wrap)?;
    // candle's context is the GPU's primary context, which this retains too.
    let gpu = Device::get(number).map_err(Error::wrap)?;
    let library = Library::new(&Context::primary(gpu).map_err(Error::wrap)?);
    libraries.insert(ordinal, library.clone());
    Ok(library)
}

/// Enqueues a launch on the device's stream.
///
/// # Errors
/// Any rule that the arguments break, with the argument's name; failures to compile and to launch.
///
/// # Safety
/// The tensors of `work` are on this device and held until this returns: candle then frees them in the order of the stream. Nobody else
/// uses memory that the launch writes in the meantime, and no two live rows write the same slot.
pub unsafe fn launch<W: Work>(library: &Library, device: &CudaDevice, work: &W) -> Result<()> {
    let stream = device.cuda_stream();
    // SAFETY: the stream outlives the call; the rest is the caller's promise.
    unsafe {
        let stream = StreamRef::from_raw(stream.cu_stream().cast());
        library.launch(stream, work).map_err(Error::wrap)
    }
}

/// A tensor at its own address and with its own strides, to be read or written, from what [`storage_and_layout`] of candle's tensor
/// returns. Keep the guard until the launch has returned.
///
/// [`storage_and_layout`]: candle_core::Tensor::storage_and_layout
///
/// # Errors
/// [`Error`] for a tensor on another device, or of a dtype that launches do not take.
///
/// # Safety
/// `layout` is of a tensor in `storage`.
pub unsafe fn tensor<'s>(
    storage: &'s Storage,
    layout: &Layout,
) -> Result<(gated_delta::Tensor<'s>, SyncOnDrop<'s>)> {
    let (address, dtype, guard) = address(storage)?;
    let address = address + (layout.start_offset() * dtype.size_of()) as u64;
    // SAFETY: candle's views are within their storages.
    let view = unsafe { gated_delta::Tensor::from_raw(address, dtype, layout.dims()) };
    let view = view.and_then(|view| view.with_strides(layout.stride()));
    Ok((view.map_err(Error::wrap)?, guard))
}

/// Address and dtype of a storage, and cudarc's guard, to be dropped after the launch. With more than one stream the guard records an event,
/// for which streams wait before they write. As after candle's own kernels, a stream that reads what was written waits for an event of the
/// engine's own.
///
/// # Errors
/// The errors of [`tensor`].
pub fn address(storage: &Storage) -> Result<(u64, DType, SyncOnDrop<'_>)> {
    let Storage::Cuda(storage) = storage else {
        return Err(Error::msg("wanted a tensor on a CUDA device"));
    };
    macro_rules! of {
        ($($slice:ident is $dtype:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$slice(slice) => {
                    let (address, guard) = slice.device_ptr(slice.stream());
                    Ok((address, DType::$dtype, guard))
                })*
                _ => Err(Error::msg("wanted f32, bf16, f16, i32, i64 or u32")),
            }
        };
    }
    of!(F32 is F32, BF16 is Bf16, F16 is F16, I32 is I32, I64 is I64, U32 is U32)
}
