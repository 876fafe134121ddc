//! Borrowed views of tensors in GPU memory, or in host memory for the simulator.
//!
//! A [`Tensor`] is an address, a dtype, dims and strides. It owns, copies and allocates nothing.

mod dims;
mod dtype;
#[cfg(test)]
mod tests;

use std::{fmt, marker::PhantomData};

use bytemuck::NoUninit;
pub use dims::{Dims, MAX_DIMS};
pub use dtype::{DType, DeviceElement};

use crate::error::Error;

/// Kind of memory that an address is in.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, NoUninit)]
pub enum Memory {
    /// Memory that the GPU can access.
    Device,
    /// Host memory, which the simulator accesses.
    Host,
}

/// A borrowed view of a tensor.
///
/// Views of q, k and v in one packed buffer:
///
/// ```
/// use gated_delta::{DType, Tensor};
///
/// let (rows, heads, value_heads, k) = (3, 2, 4, 64);
/// let width = (2 * heads + value_heads) * k;
/// // SAFETY: nothing is launched on it here.
/// let packed = unsafe { Tensor::from_raw(0x7f00_0000_0000, DType::Bf16, &[rows, 1, width]) }?;
/// let key = packed.narrow(2, heads * k, heads * k)?.split(2, k)?;
/// assert_eq!((&key.dims()[..], &key.strides()[..]), (&[3, 1, 2, 64][..], &[512, 512, 64, 1][..]));
/// assert_eq!(key.address() - packed.address(), 2 * 64 * 2);
/// # Ok::<(), gated_delta::Error>(())
/// ```
// The fields of a layout are adjacent, because one instruction then compares several of its words.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    dims: Dims,
    strides: Dims,
    of: Of,
    address: u64,
    storage: usize,
    borrow: PhantomData<&'a ()>,
}

/// Element type, memory and writability of a tensor, packed into one 8-byte word.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
struct Of {
    dtype: DType,
    memory: Memory,
    writable: bool,
    zeros: [u8; 5],
}

impl<'a> Tensor<'a> {
    /// A contiguous tensor at a device address. [`Tensor::with_strides`] makes views with other strides.
    ///
    /// # Errors
    /// [`Error::Range`] if there are more than [`MAX_DIMS`] dims, or elements past the end of the address space.
    ///
    /// # Safety
    /// During `'a`, every element of this view, and of a view made of it, lies in GPU memory. Other code reads and writes these
    /// elements only in stream order with the launches that take the view.
    pub unsafe fn from_raw(address: u64, dtype: DType, dims: &[usize]) -> Result<Self, Error> {
        Self::new(address, dtype, dims, usize::MAX, Memory::Device, true)
    }

    /// A contiguous, read-only tensor in host memory, for the simulator.
    ///
    /// # Errors
    /// [`Error::Range`] if `slice` has fewer elements than `dims`.
    pub fn from_slice<T: DeviceElement>(slice: &'a [T], dims: &[usize]) -> Result<Self, Error> {
        let address = slice.as_ptr().expose_provenance() as u64;
        Self::new(address, T::DTYPE, dims, slice.len(), Memory::Host, false)
    }

    /// A contiguous, writable tensor in host memory, for the simulator.
    ///
    /// # Errors
    /// [`Error::Range`] if `slice` has fewer elements than `dims`.
    pub fn from_slice_mut<T: DeviceElement>(
        slice: &'a mut [T],
        dims: &[usize],
    ) -> Result<Self, Error> {
        let address = slice.as_mut_ptr().expose_provenance() as u64;
        Self::new(address, T::DTYPE, dims, slice.len(), Memory::Host, true)
    }

    pub(crate) fn new(
        address: u64,
        dtype: DType,
        dims: &[usize],
        storage: usize,
        memory: Memory,
        writable: bool,
    ) -> Result<Self, Error> {
        let dims = Dims::new(dims)?;
        let strides = dims.contiguous_strides()?;
        let tensor = Self {
            dims,
            strides,
            of: Of {
                dtype,
                memory,
                writable,
                zeros: [0; 5],
            },
            address,
            storage,
            borrow: PhantomData,
        };
        tensor.fits()
    }

    /// A view of the same memory with other strides: one stride per dim, in elements.
    ///
    /// # Errors
    /// [`Error::Range`] if the numbers of strides and dims differ, or the view exceeds its storage.
    pub fn with_strides(self, strides: &[usize]) -> Result<Self, Error> {
        if strides.len() != self.dims.len() {
            return Err(range("strides of a tensor", self.dims.len(), strides.len()));
        }
        Self {
            strides: Dims::new(strides)?,
            ..self
        }
        .fits()
    }

    /// The elements `start .. start + len` of a dim: for example k of a packed buffer.
    ///
    /// # Errors
    /// [`Error::Range`] if the dim does not exist, or is shorter.
    pub fn narrow(self, dim: usize, start: usize, len: usize) -> Result<Self, Error> {
        let size = self.dim(dim)?;
        if start.checked_add(len).is_none_or(|end| end > size) {
            let got = format!("{start} .. {start} + {len}");
            return Err(range(
                "range of a narrowed dim",
                format!("within 0 .. {size}"),
                got,
            ));
        }
        let mut narrowed = self;
        narrowed.dims.values[dim] = len;
        if !narrowed.dims.contains(&0) {
            let skipped = start * self.strides[dim];
            narrowed.address += (skipped * self.dtype().size_of()) as u64;
            narrowed.storage -= if self.storage == usize::MAX {
                0
            } else {
                skipped
            };
        }
        Ok(narrowed)
    }

    /// Splits a dim into two: `[.., H * K, ..]` becomes `[.., H, K, ..]` for `inner` = K.
    ///
    /// # Errors
    /// [`Error::Range`] if the dim is not a multiple of `inner`, or there are [`MAX_DIMS`] dims already.
    pub fn split(self, dim: usize, inner: usize) -> Result<Self, Error> {
        let size = self.dim(dim)?;
        if inner == 0 || size % inner != 0 {
            return Err(range(
                "inner part of a split dim",
                format!("a divisor of {size}"),
                inner,
            ));
        }
        let insert = |numbers: &Dims, outer: usize, inner: usize| {
            let mut all = [0; MAX_DIMS + 1];
            let len = numbers.len() + 1;
            all[..dim].copy_from_slice(&numbers[..dim]);
            all[dim..dim + 2].copy_from_slice(&[outer, inner]);
            all[dim + 2..len].copy_from_slice(&numbers[dim + 1..]);
            Dims::new(&all[..len])
        };
        let stride = self.strides[dim];
        Ok(Self {
            dims: insert(&self.dims, size / inner, inner)?,
            strides: insert(&self.strides, stride.saturating_mul(inner), stride)?,
            ..self
        })
    }

    /// Address of the first element.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.of.dtype
    }

    /// Dims, outermost first.
    #[must_use]
    pub const fn dims(&self) -> &Dims {
        &self.dims
    }

    /// Strides of the dims, in elements.
    #[must_use]
    pub const fn strides(&self) -> &Dims {
        &self.strides
    }

    /// Kind of memory that the tensor is in.
    #[must_use]
    pub const fn memory(&self) -> Memory {
        self.of.memory
    }

    /// Whether kernels may write the tensor. `false` for a tensor from a shared borrow.
    #[must_use]
    pub const fn is_writable(&self) -> bool {
        self.of.writable
    }

    /// Whether the elements are contiguous in the order of the dims.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut wanted = 1usize;
        self.dims
            .iter()
            .zip(self.strides.iter())
            .rev()
            .all(|(&dim, &stride)| {
                let holds = dim <= 1 || stride == wanted;
                wanted = wanted.saturating_mul(dim);
                holds
            })
    }

    /// Alignment in bytes: the largest power of two, at most 16, that divides the address and all strides except the innermost.
    /// Strides of dims of size 1 do not count.
    #[must_use]
    pub fn alignment(&self) -> usize {
        let outer = self.dims.len().saturating_sub(1);
        let strides = self.dims.iter().zip(self.strides.iter()).take(outer);
        let offsets = strides
            .filter(|&(&dim, _)| dim > 1)
            .fold(self.address, |bits, (_, &stride)| {
                bits | stride.wrapping_mul(self.dtype().size_of()) as u64
            });
        1 << offsets.trailing_zeros().min(4)
    }

    /// Size of a dim; [`Error::Range`] if the dim does not exist.
    fn dim(&self, dim: usize) -> Result<usize, Error> {
        let dims = self.dims.len();
        self.dims
            .get(dim)
            .copied()
            .ok_or_else(|| range("dim", format!("below {dims}"), dim))
    }

    /// All words that the checks of a launch depend on, and the address.
    #[inline(always)]
    pub(crate) fn layout(&self) -> Layout {
        let mut words = [0; LAYOUT];
        for (at, numbers) in [(0, &self.dims), (MAX_DIMS + 1, &self.strides)] {
            for dim in 0..MAX_DIMS {
                words[at + dim] = numbers.values[dim] as u64;
            }
            words[at + MAX_DIMS] = numbers.len as u64;
        }
        words[LAYOUT - 2] = bytemuck::cast(self.of);
        words[LAYOUT - 1] = self.address;
        Layout(words)
    }

    /// Checks that the last element lies in the storage.
    fn fits(self) -> Result<Self, Error> {
        if self.dims.contains(&0) {
            return Ok(self);
        }
        let end = self
            .dims
            .iter()
            .zip(self.strides.iter())
            .try_fold(1usize, |end, (&dim, &stride)| {
                end.checked_add((dim - 1).checked_mul(stride)?)
            });
        let bytes = end.and_then(|end| end.checked_mul(self.dtype().size_of()));
        match (
            end,
            bytes.and_then(|bytes| self.address.checked_add(bytes as u64)),
        ) {
            (Some(end), Some(_)) if end <= self.storage => Ok(self),
            _ => Err(range(
                "elements of a view",
                format!("at most the {} of its storage", self.storage),
                format!("dims {} at strides {}", self.dims, self.strides),
            )),
        }
    }
}

/// Number of words of a [`Layout`].
const LAYOUT: usize = 2 * (MAX_DIMS + 1) + 2;

/// Dims, strides, dtype, memory, writability and address of a tensor.
#[repr(align(16))]
#[derive(Clone, Copy)]
pub(crate) struct Layout([u64; LAYOUT]);

impl Layout {
    /// The layout of an absent tensor.
    pub const NONE: Self = Self([0; LAYOUT]);

    /// Adds the differences between this layout and the tensor's.
    #[inline(always)]
    pub fn differs(&self, tensor: &Tensor<'_>, all: &mut Differences) {
        let (Self(one), Self(other)) = (self, tensor.layout());
        let mut words = [0; 2];
        for at in 0..LAYOUT - 2 {
            words[at % 2] |= one[at] ^ other[at];
        }
        for at in 0..2 {
            all.words[at] |= words[at];
            all.last[at] |= one[LAYOUT - 2 + at] ^ other[LAYOUT - 2 + at];
        }
    }
}

/// Bits in which layouts differ, combined over all pairs of words by a bitwise or.
pub(crate) struct Differences {
    words: [u64; 2],
    /// Bits of the last pair of words. The second word of this pair is the address.
    last: [u64; 2],
}

impl Differences {
    pub const NONE: Self = Self {
        words: [0; 2],
        last: [0; 2],
    };

    /// Whether no check can see these differences. Addresses may differ by a multiple of 16, the largest alignment that a check
    /// needs.
    #[inline(always)]
    pub fn are_none(&self) -> bool {
        let ([first, second], [of, address]) = (self.words, self.last);
        first | second | of | (address % 16) == 0
    }
}

fn range(what: &'static str, wanted: impl fmt::Display, got: impl fmt::Display) -> Error {
    Error::Range {
        what,
        wanted: wanted.to_string(),
        got: got.to_string(),
    }
}
