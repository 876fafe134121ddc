//! Views of `cust`'s tensors and streams.

use cust::memory::{DeviceCopy, DeviceSlice};

use crate::{
    error::Error,
    stream::StreamRef,
    tensor::{DType, DeviceElement, Memory, Tensor},
};

impl<'a> Tensor<'a> {
    /// A contiguous, read-only tensor in a `cust` buffer or slice.
    ///
    /// # Errors
    /// [`Error::Range`] if `slice` has fewer elements than `dims`.
    pub fn from_device<T>(slice: &'a DeviceSlice<T>, dims: &[usize]) -> Result<Self, Error>
    where
        T: DeviceElement + DeviceCopy,
    {
        Self::from_device_as(slice, T::DTYPE, dims)
    }

    /// The writable counterpart of [`Tensor::from_device`].
    ///
    /// # Errors
    /// As for [`Tensor::from_device`].
    pub fn from_device_mut<T>(slice: &'a mut DeviceSlice<T>, dims: &[usize]) -> Result<Self, Error>
    where
        T: DeviceElement + DeviceCopy,
    {
        Self::from_device_as_mut(slice, T::DTYPE, dims)
    }

    /// Like [`Tensor::from_device`], for a buffer whose element type stands for another: `u16` for bf16 and f16, which are not
    /// `DeviceCopy`.
    ///
    /// # Errors
    /// [`Error::Range`] if `slice` has fewer bytes than the tensor.
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

    /// The writable counterpart of [`Tensor::from_device_as`].
    ///
    /// # Errors
    /// As for [`Tensor::from_device_as`].
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
