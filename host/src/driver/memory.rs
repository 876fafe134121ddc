//! GPU memory.

use std::ffi::c_void;

use bytemuck::Pod;

use super::{Context, RawStream};
use crate::{
    error::Error,
    tensor::{DType, Memory, Tensor},
};

/// An owned allocation of GPU memory.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes. Their contents are undefined.
    ///
    /// # Errors
    /// [`Error::Driver`]: out of memory.
    pub fn allocate(context: &Context, bytes: usize) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: `address` is written.
            unsafe { context.driver().mem_alloc(&raw mut address, bytes) }?;
        }
        Ok(Self {
            context: context.clone(),
            address,
            bytes,
        })
    }

    /// Allocates memory and copies `data` into it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn from_slice<T: Pod>(context: &Context, data: &[T]) -> Result<Self, Error> {
        let mut memory = Self::allocate(context, size_of_val(data))?;
        memory.write(data)?;
        Ok(memory)
    }

    /// Address of the first byte.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// A contiguous, read-only tensor at the start of the memory.
    ///
    /// # Errors
    /// [`Error::Range`] if the memory is too small.
    pub fn tensor(&self, dtype: DType, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        let elements = self.bytes / dtype.size_of();
        Tensor::new(self.address, dtype, dims, elements, Memory::Device, false)
    }

    /// A contiguous, writable tensor at the start of the memory.
    ///
    /// # Errors
    /// [`Error::Range`] if the memory is too small.
    pub fn tensor_mut(&mut self, dtype: DType, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        let elements = self.bytes / dtype.size_of();
        Tensor::new(self.address, dtype, dims, elements, Memory::Device, true)
    }

    /// Copies `data` to the start of the memory, and waits for the copy. It does not wait for work on other streams.
    ///
    /// # Errors
    /// [`Error::Range`] if the memory is too small, [`Error::Driver`].
    pub fn write<T: Pod>(&mut self, data: &[T]) -> Result<(), Error> {
        let bytes = self.checked(size_of_val(data))?;
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: both sides have `bytes` bytes.
        unsafe {
            self.context
                .driver()
                .memcpy_htod(self.address, data.as_ptr().cast(), bytes)
        }?;
        self.settle()
    }

    /// Copies the start of the memory to `data`. It does not wait for work on other streams.
    ///
    /// # Errors
    /// [`Error::Range`] if the memory is too small, [`Error::Driver`].
    pub fn read<T: Pod>(&self, data: &mut [T]) -> Result<(), Error> {
        let bytes = self.checked(size_of_val(data))?;
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let to = data.as_mut_ptr().cast::<c_void>();
        // SAFETY: both sides have `bytes` bytes, and every bit pattern is a `T`.
        unsafe { self.context.driver().memcpy_dtoh(to, self.address, bytes) }
    }

    /// Sets every byte to `byte`, and waits until this is done.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fill(&mut self, byte: u8) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: the memory has `self.bytes` bytes.
        unsafe {
            self.context
                .driver()
                .memset_d8(self.address, byte, self.bytes)
        }?;
        self.settle()
    }

    /// Waits for the default stream, because copies and fills continue on it after their call returns, and a [`super::Stream`]
    /// does not wait for it.
    fn settle(&self) -> Result<(), Error> {
        // SAFETY: the callers have made the context current.
        unsafe { self.context.driver().stream_synchronize(RawStream::NULL) }
    }

    fn checked(&self, bytes: usize) -> Result<usize, Error> {
        if bytes <= self.bytes {
            return Ok(bytes);
        }
        let wanted = format!("at most {}", self.bytes);
        Err(Error::Range {
            what: "bytes of a copy",
            wanted,
            got: bytes.to_string(),
        })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes > 0
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: allocated once, freed once. A failure leaves nothing to do.
            let _ = unsafe { self.context.driver().mem_free(self.address) };
        }
    }
}
