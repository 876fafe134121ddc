//! Tensors and streams of `cust`, borrowed.

use cust::memory::{DeviceCopy, DeviceSlice};

use crate::{
    error::Error,
    stream::StreamRef,
    tensor::{DType, DeviceElement, Memory, Tensor},
};

impl<'a> Tensor<'a> {
    /// A contiguous tensor in a `cust` buffer or slice, read only.
    ///
    /// # Errors
    /// [`Error::Range`] where `slice` has fewer elements than `dims`.
    pub fn from_device<T>(slice: &'a DeviceSlice<T>, dims: &[usize]) -> Result<Self, Error>
    where
        T: DeviceElement + DeviceCopy,
    {
        Self::from_device_as(slice, T::DTYPE, dims)
    }

    /// As [`Tensor::from_device`], for kernels to write.
    ///
    /// # Errors
    /// As [`Tensor::from_device`]'s.
    pub fn from_device_mut<T>(slice: &'a mut DeviceSlice<T>, dims: &[usize]) -> Result<Self, Error>
    where
        T: DeviceElement + DeviceCopy,
    {
        Self::from_device_as_mut(slice, T::DTYPE, dims)
    }

    /// As [`Tensor::from_device`], where the buffer's type stands for another: `u16` for bf16 and f16,
    /// which are no `DeviceCopy` types.
    ///
    /// # Errors
    /// [`Error::Range`] where `slice` has fewer bytes than the tensor.
    pub fn from_device_as<T>(
        slice: &'a DeviceSlice<T>,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Self, Error>
    where
        T: DeviceCopy,
    {
        view(slice, dtype, dims, false)
    }

    /// As [`Tensor::from_device_as`], for kernels to write.
    ///
    /// # Errors
    /// As [`Tensor::from_device_as`]'s.
    pub fn from_device_as_mut<T>(
        slice: &'a mut DeviceSlice<T>,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Self, Error>
    where
        T: DeviceCopy,
    {
        view(slice, dtype, dims, true)
    }
}

fn view<'a, T: DeviceCopy>(
    slice: &'a DeviceSlice<T>,
    dtype: DType,
    dims: &[usize],
    writable: bool,
) -> Result<Tensor<'a>, Error> {
    let elements = slice.len() * size_of::<T>() / dtype.size_of();
    Tensor::new(
        slice.as_device_ptr().as_raw(),
        dtype,
        dims,
        elements,
        Memory::Device,
        writable,
    )
}

impl<'a> From<&'a cust::stream::Stream> for StreamRef<'a> {
    fn from(stream: &'a cust::stream::Stream) -> Self {
        // SAFETY: the borrow keeps the stream from being dropped.
        unsafe { Self::from_raw(stream.as_inner().cast()) }
    }
}
