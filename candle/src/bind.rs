//! Binds candle's tensors to a launch: the launch gets the same memory, dims and strides.

use std::cell::RefCell;
use std::marker::PhantomData;

use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, StorageRef, Tensor, TensorId,
};

use crate::error::{bail, wrap};

/// A tensor of a launch, and its name in errors.
#[derive(Clone, Copy)]
pub struct Named<'t> {
    pub name: &'static str,
    pub tensor: &'t Tensor,
    pub is_written: bool,
}

/// A tensor that the launch reads.
pub fn named<'t>(name: &'static str, tensor: &'t Tensor) -> Named<'t> {
    Named {
        name,
        tensor,
        is_written: false,
    }
}

impl Named<'_> {
    /// Marks the tensor as written.
    pub fn written(mut self) -> Self {
        self.is_written = true;
        self
    }

    fn is(&self, other: &Self) -> bool {
        self.tensor.id() == other.tensor.id()
    }
}

/// Place of a tensor's storage in memory.
#[derive(Clone, Copy)]
struct Place {
    /// Address of the storage's first element.
    address: usize,
    /// Elements of the storage.
    len: usize,
    is_written: bool,
}

/// Places of the tensors of a launch, while their memory is locked.
pub struct At<'x> {
    places: Places,
    is_host: bool,
    held: PhantomData<&'x ()>,
}

impl<'x> At<'x> {
    /// The launch's view of `tensor`, which has to be one of the tensors that `self` was made with.
    pub fn get(&self, tensor: &Tensor) -> Result<gated_delta::Tensor<'x>> {
        let mut places = self.places.iter().filter(|(id, _)| *id == tensor.id());
        let Some(&(_, place)) = places.next() else {
            return bail!("a tensor of a launch is not among those that it holds");
        };
        let layout = tensor.layout();
        let bound = match tensor.dtype() {
            DType::F32 => self.typed::<f32>(place, layout),
            DType::BF16 => self.typed::<half::bf16>(place, layout),
            DType::F16 => self.typed::<half::f16>(place, layout),
            DType::I32 => self.typed::<i32>(place, layout),
            DType::I64 => self.typed::<i64>(place, layout),
            DType::U32 => self.typed::<u32>(place, layout),
            other => return bail!("dtype: wanted f32, bf16, f16, i32, i64 or u32, got {other:?}"),
        };
        bound.map_err(wrap)
    }

    /// Like [`get`](Self::get), for a tensor whose last dim may hold several heads of `inner` elements. This dim is split into
    /// two.
    pub fn heads(&self, tensor: &Tensor, inner: usize) -> Result<gated_delta::Tensor<'x>> {
        let bound = self.get(tensor)?;
        match tensor.rank() {
            3 => bound.split(2, inner).map_err(wrap),
            _ => Ok(bound),
        }
    }

    /// Like [`get`](Self::get), for an optional tensor.
    pub fn optional(&self, tensor: &Option<Tensor>) -> Result<Option<gated_delta::Tensor<'x>>> {
        tensor.as_ref().map(|tensor| self.get(tensor)).transpose()
    }

    fn typed<T: gated_delta::DeviceElement>(
        &self,
        place: Place,
        layout: &Layout,
    ) -> std::result::Result<gated_delta::Tensor<'x>, gated_delta::Error> {
        let (start, dims) = (layout.start_offset(), layout.dims());
        let address = place.address + start * size_of::<T>();
        let tensor = if self.is_host {
            let len = place.len.saturating_sub(start);
            let first = std::ptr::with_exposed_provenance_mut::<T>(address);
            if place.is_written {
                // SAFETY: the storage is locked exclusively for 'x, and the view's elements are in it.
                let slice = unsafe { std::slice::from_raw_parts_mut(first, len) };
                gated_delta::Tensor::from_slice_mut(slice, dims)
            } else {
                // SAFETY: the storage is locked for 'x, for reading.
                let slice = unsafe { std::slice::from_raw_parts(first, len) };
                gated_delta::Tensor::from_slice(slice, dims)
            }
        } else {
            // SAFETY: candle's storage is kept until the launch is enqueued, and freed in the order of its stream.
            unsafe { gated_delta::Tensor::from_raw(address as u64, T::DTYPE, dims) }
        }?;
        tensor.with_strides(layout.stride())
    }
}

/// Calls `launch` while the memory of all tensors is locked. On the CPU, written tensors are locked exclusively.
pub fn with_memory<R>(
    tensors: &[Named<'_>],
    launch: impl FnOnce(&At<'_>) -> Result<R>,
) -> Result<R> {
    let Some(first) = tensors.first() else {
        return bail!("a launch without tensors");
    };
    let device = first.tensor.device();
    for of in tensors {
        if !device.same_device(of.tensor.device()) {
            return bail!(
                "{}: wanted a tensor on {:?}, as {} is, got one on {:?}",
                of.name,
                device.location(),
                first.name,
                of.tensor.device().location()
            );
        }
        check_dtype(of)?;
    }
    match device {
        Device::Cpu => on_host(tensors, launch),
        Device::Cuda(_) => on_cuda(tensors, launch),
        Device::Metal(_) => bail!("device: wanted the CPU or CUDA, got Metal"),
    }
}

/// [`with_memory`] on the CPU.
fn on_host<R>(tensors: &[Named<'_>], launch: impl FnOnce(&At<'_>) -> Result<R>) -> Result<R> {
    let mut written: Vec<(usize, Named<'_>)> = Vec::new();
    // Addresses of the written storages. A storage that is locked here must not be locked again.
    for of in tensors.iter().filter(|of| of.is_written) {
        if written.iter().any(|(_, other)| other.is(of)) {
            continue;
        }
        let place = host_place(&of.tensor.storage_and_layout().0)?;
        check_unshared(of, place, &written)?;
        written.push((place.address, *of));
    }
    let mut places = Vec::with_capacity(tensors.len());
    let mut guards: Vec<StorageRef<'_>> = Vec::new();
    let is_read = |of: &&Named<'_>| written.iter().all(|(_, other)| !other.is(of));
    for of in tensors.iter().filter(is_read) {
        let (storage, _) = of.tensor.storage_and_layout();
        let place = host_place(&storage)?;
        check_unshared(of, place, &written)?;
        places.push((of.tensor.id(), place));
        guards.push(storage);
    }
    // All threads take the locks in the same order.
    written.sort_by_key(|(base, _)| *base);
    let written: Vec<Named<'_>> = written.into_iter().map(|(_, of)| of).collect();
    let (mut result, mut launch) = (None, Some(launch));
    hold(&written, &mut places, &mut |places| {
        let at = At {
            places: std::mem::take(places),
            is_host: true,
            held: PhantomData,
        };
        if let Some(launch) = launch.take() {
            result = Some(launch(&at)?);
        }
        Ok(())
    })?;
    drop(guards);
    match result {
        Some(result) => Ok(result),
        None => bail!("no launch was made"),
    }
}

/// Checks that the storage at `place` is none of the written storages.
fn check_unshared(of: &Named<'_>, place: Place, written: &[(usize, Named<'_>)]) -> Result<()> {
    let mut others = written.iter().filter(|(base, _)| *base == place.address);
    match others.next() {
        Some((_, other)) if place.len > 0 => bail!(
            "{}: on the CPU it wants another storage than {}, which is written",
            of.name,
            other.name
        ),
        _ => Ok(()),
    }
}

/// Checks that a launch can take tensors of this dtype.
fn check_dtype(of: &Named<'_>) -> Result<()> {
    match of.tensor.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::I32 | DType::I64 | DType::U32 => Ok(()),
        other => bail!(
            "{}: wanted f32, bf16 or f16, of indices i32, i64 or u32, got {}",
            of.name,
            other.as_str()
        ),
    }
}

/// Places of tensors. A launch has few, so a linear search is fast.
type Places = Vec<(TensorId, Place)>;

/// Function to call after all storages are locked.
type Then<'h> = dyn FnMut(&mut Places) -> Result<()> + 'h;

/// Locks the storages of `written` one after the other, and calls `then` with all of them.
fn hold(written: &[Named<'_>], places: &mut Places, then: &mut Then<'_>) -> Result<()> {
    let Some((first, rest)) = written.split_first() else {
        return then(places);
    };
    let op = Hold {
        id: first.tensor.id(),
        rest,
        inner: RefCell::new((places, then)),
    };
    first.tensor.inplace_op1(&op)
}

/// An in-place operation. Through it, candle gives access to a storage for writing.
struct Hold<'h, 't> {
    id: TensorId,
    rest: &'h [Named<'t>],
    inner: RefCell<(&'h mut Places, &'h mut Then<'h>)>,
}

impl InplaceOp1 for Hold<'_, '_> {
    fn name(&self) -> &'static str {
        "gated-delta"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let mut inner = self.inner.borrow_mut();
        let (places, then) = &mut *inner;
        places.push((self.id, cpu_place_mut(storage)?));
        hold(self.rest, places, *then)
    }
}

fn host_place(storage: &Storage) -> Result<Place> {
    let Storage::Cpu(storage) = storage else {
        return bail!("a tensor on the CPU has another storage");
    };
    macro_rules! place {
        ($($kind:ident)*) => {
            match storage {
                $(CpuStorage::$kind(values) => Ok(Place {
                    address: values.as_ptr().expose_provenance(),
                    len: values.len(),
                    is_written: false,
                }),)*
                _ => bail!("a storage of another dtype than a launch takes"),
            }
        };
    }
    place!(F32 BF16 F16 I32 I64 U32)
}

fn cpu_place_mut(storage: &mut CpuStorage) -> Result<Place> {
    macro_rules! place {
        ($($kind:ident)*) => {
            match storage {
                $(CpuStorage::$kind(values) => Ok(Place {
                    address: values.as_mut_ptr().expose_provenance(),
                    len: values.len(),
                    is_written: true,
                }),)*
                _ => bail!("a storage of another dtype than a launch takes"),
            }
        };
    }
    place!(F32 BF16 F16 I32 I64 U32)
}

#[cfg(not(feature = "cuda"))]
fn on_cuda<R>(_: &[Named<'_>], _: impl FnOnce(&At<'_>) -> Result<R>) -> Result<R> {
    bail!("device: candle-gated-delta was built without its feature `cuda`")
}

/// [`with_memory`] on a GPU. Takes the addresses of candle's storages. All work is on the device's stream, so no wait is needed.
#[cfg(feature = "cuda")]
fn on_cuda<R>(tensors: &[Named<'_>], launch: impl FnOnce(&At<'_>) -> Result<R>) -> Result<R> {
    let all = tensors.iter().map(|of| of.tensor);
    let storages: Vec<StorageRef<'_>> = all.map(|of| of.storage_and_layout().0).collect();
    let (mut places, mut guards) = (Vec::new(), Vec::with_capacity(tensors.len()));
    for (of, storage) in tensors.iter().zip(&storages) {
        let (address, _, guard) = crate::cuda::address(storage)?;
        let place = Place {
            address: address as usize,
            // The length is unknown, and not needed: candle's views are within their storages.
            len: usize::MAX,
            is_written: of.is_written,
        };
        places.push((of.tensor.id(), place));
        guards.push(guard);
    }
    let at = At {
        places,
        is_host: false,
        held: PhantomData,
    };
    let result = launch(&at);
    drop(guards);
    result
}
