//! Checks of tensors that all operators share: dims, dtypes, strides and alignment, with errors that name the tensor.

use std::array;

use crate::error::Error;
use crate::tensor::{DType, MAX_DIMS, Memory, Tensor};

/// A tensor with its name among the operator's arguments.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    pub name: &'static str,
    pub tensor: &'a Tensor<'a>,
}

/// Pairs a tensor with its name.
#[inline(always)]
pub(crate) fn named<'a>(name: &'static str, tensor: &'a Tensor<'a>) -> Named<'a> {
    Named { name, tensor }
}

/// Pairs an optional tensor with its name.
#[inline(always)]
pub(crate) fn optional<'a>(
    name: &'static str,
    tensor: &'a Option<Tensor<'a>>,
) -> Option<Named<'a>> {
    tensor.as_ref().map(|tensor| named(name, tensor))
}

impl<'a> Named<'a> {
    /// Checks that the dims are `sizes`, which `letters` name.
    #[inline(always)]
    pub fn dims<const N: usize>(
        self,
        letters: &'static [&'static str; N],
        sizes: &[usize; N],
    ) -> Result<View<'a, N>, Error> {
        match self.view() {
            Some(view) if view.dims.iter().zip(sizes).all(|(got, size)| got == size) => Ok(view),
            _ => Err(self.dims_error(letters, sizes)),
        }
    }

    #[cold]
    fn dims_error(self, letters: &[&str], sizes: &[usize]) -> Error {
        self.shape_error(&format!("[{}] = {sizes:?}", letters.join(", ")))
    }

    /// Checks that the tensor has N dims, as `letters` show.
    #[inline(always)]
    pub fn rank<const N: usize>(self, letters: &str) -> Result<View<'a, N>, Error> {
        self.view().ok_or_else(|| self.shape_error(letters))
    }

    #[cold]
    fn shape_error(self, wanted: &str) -> Error {
        Error::Shape {
            tensor: self.name,
            wanted: wanted.to_owned(),
            got: *self.tensor.dims(),
        }
    }

    /// The tensor as a view of N dims. `None` if it has another number of dims.
    #[inline(always)]
    fn view<const N: usize>(self) -> Option<View<'a, N>> {
        Some(View {
            tensor: self,
            dims: self.tensor.dims()[..].try_into().ok()?,
            strides: self.tensor.strides()[..].try_into().ok()?,
        })
    }

    /// Checks that the dtype is one of `allowed`, which `wanted` spells out.
    #[inline(always)]
    pub fn dtype(self, allowed: &[DType], wanted: &'static str) -> Result<(), Error> {
        if allowed.contains(&self.tensor.dtype()) {
            Ok(())
        } else {
            Err(self.dtype_error(wanted))
        }
    }

    #[cold]
    fn dtype_error(self, wanted: &'static str) -> Error {
        Error::DType {
            tensor: self.name,
            wanted,
            got: self.tensor.dtype(),
        }
    }

    /// Checks that the dtype is bf16, f16 or f32.
    #[inline(always)]
    pub fn float(self) -> Result<(), Error> {
        self.dtype(&[DType::Bf16, DType::F16, DType::F32], "bf16, f16 or f32")
    }

    /// Checks that the address is a multiple of the element's size, as every access needs.
    #[inline(always)]
    pub fn natural(self) -> Result<(), Error> {
        let (address, size) = (self.tensor.address(), self.tensor.dtype().size_of());
        // The size is a power of two. A division would cost more than all other checks of a tensor.
        if address & (size as u64 - 1) == 0 {
            Ok(())
        } else {
            Err(self.alignment_error(size, 1 << address.trailing_zeros()))
        }
    }

    #[cold]
    fn alignment_error(self, wanted: usize, got: usize) -> Error {
        Error::Alignment {
            tensor: self.name,
            wanted,
            got,
        }
    }

    #[cold]
    fn stride_error(self, wanted: &'static str) -> Error {
        Error::Stride {
            tensor: self.name,
            wanted,
            got: *self.tensor.strides(),
        }
    }
}

/// A tensor with N dims. All methods are inlined, so that a view is never stored in memory.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, const N: usize> {
    tensor: Named<'a>,
    pub dims: &'a [usize; N],
    strides: &'a [usize; N],
}

impl<const N: usize> View<'_, N> {
    /// Checks that the `count` innermost dims are contiguous.
    #[inline(always)]
    pub fn inner_contiguous(self, count: usize, wanted: &'static str) -> Result<(), Error> {
        let mut next = 1;
        for (&dim, &stride) in self.dims.iter().zip(self.strides).rev().take(count) {
            if dim > 1 && stride != next {
                return Err(self.tensor.stride_error(wanted));
            }
            next *= dim;
        }
        Ok(())
    }

    /// The stride of `dim`, for a kernel that has the dim's size as a constant and multiplies the stride by an index in 32 bits. 0 for a
    /// dim of size one.
    #[inline(always)]
    pub fn stride_u32(self, dim: usize) -> Result<u32, Error> {
        let steps = self.dims[dim].saturating_sub(1);
        if steps == 0 {
            return Ok(0);
        }
        let stride = self.strides[dim];
        match stride.checked_mul(steps) {
            Some(span) if span <= u32::MAX as usize => Ok(stride as u32),
            _ => {
                let wanted = "a head stride that spans less than 2^32 elements";
                Err(self.tensor.stride_error(wanted))
            }
        }
    }

    /// The strides of these dims; 0 for a dim of size 1. Checks that they span less than 2^32 elements together, as `wanted`
    /// says.
    pub fn strides_u32<const M: usize>(
        self,
        dims: [usize; M],
        wanted: &'static str,
    ) -> Result<[u32; M], Error> {
        let mut strides = [0; M];
        let mut span = 0usize;
        for (stride, dim) in strides.iter_mut().zip(dims) {
            let steps = self.dims[dim].saturating_sub(1);
            span = span.saturating_add(self.strides[dim].saturating_mul(steps));
            if span > u32::MAX as usize {
                return Err(self.tensor.stride_error(wanted));
            }
            *stride = if steps > 0 {
                self.strides[dim] as u32
            } else {
                0
            };
        }
        Ok(strides)
    }

    /// The stride of the outermost dim, for a kernel that multiplies it in 64 bits.
    #[inline(always)]
    pub fn row_stride(self) -> Result<u32, Error> {
        self.long_stride(0, "a row or slot stride below 2^32 elements")
    }

    /// The stride of the tokens (dim 1), for a kernel that multiplies it in 64 bits.
    #[inline(always)]
    pub fn token_stride(self) -> Result<u32, Error> {
        self.long_stride(1, "a token stride below 2^32 elements")
    }

    #[inline(always)]
    fn long_stride(self, dim: usize, wanted: &'static str) -> Result<u32, Error> {
        u32::try_from(self.strides[dim]).map_err(|_| self.tensor.stride_error(wanted))
    }

    /// Checks that elements of a written tensor do not overlap. The `inner` innermost dims are contiguous. `wanted` is the text
    /// of the error.
    #[inline(always)]
    pub fn distinct(self, inner: usize, wanted: &'static str) -> Result<(), Error> {
        if self.dims.contains(&0) {
            return Ok(());
        }
        let (outer, inner) = self.dims.split_at(N.saturating_sub(inner));
        let (extent, steps) = (inner.iter().product(), &self.strides[..outer.len()]);
        if nested(extent, outer.iter().zip(steps).rev())
            || nested_in_some_order(extent, outer, steps)
        {
            Ok(())
        } else {
            Err(self.tensor.stride_error(wanted))
        }
    }

    /// Whether the address, the outermost stride and every other outer stride are multiples of 16 bytes.
    ///
    /// The outermost stride counts even for a dim of size one, because the size of this dim is not a constant of the kernel.
    #[inline(always)]
    pub fn wide(self) -> bool {
        self.wide_from(0)
    }

    /// [`View::wide`] of a tensor whose dims before `outermost` have size 1.
    #[inline(always)]
    pub fn wide_from(self, outermost: usize) -> bool {
        let size = self.tensor.tensor.dtype().size_of() as u64;
        let mut bits = 0;
        for (dim, &stride) in self.strides[..N - 1].iter().enumerate() {
            if dim == outermost || (dim > outermost && self.dims[dim] > 1) {
                bits |= stride as u64;
            }
        }
        (self.tensor.tensor.address() | bits.wrapping_mul(size)).is_multiple_of(16)
    }

    /// Whether the stride of the tokens (dim 1) is a multiple of 16 bytes.
    pub fn token_wide(&self) -> bool {
        let size = self.tensor.tensor.dtype().size_of();
        self.strides[1].wrapping_mul(size).is_multiple_of(16)
    }

    /// Whether the address and the outermost stride are multiples of `bytes`, a power of two.
    pub fn aligned_to(self, bytes: usize) -> bool {
        let size = self.tensor.tensor.dtype().size_of();
        let stride = self.strides[0].wrapping_mul(size) as u64;
        (self.tensor.tensor.address() | stride) & (bytes as u64 - 1) == 0
    }

    /// Checks [`View::wide`], for a kernel without a narrow path.
    pub fn wide_only(self) -> Result<(), Error> {
        if self.wide() {
            Ok(())
        } else {
            let got = self.tensor.tensor.alignment();
            Err(self.tensor.alignment_error(16, got))
        }
    }
}

/// Whether each of `steps` (a dim and its stride, innermost first) is at least as large as the extent of all dims before it, in
/// elements. `extent` is the extent of the dims before the first step.
#[inline(always)]
fn nested<'a>(extent: usize, steps: impl Iterator<Item = (&'a usize, &'a usize)>) -> bool {
    let mut extent = extent;
    for (&dim, &stride) in steps.filter(|&(&dim, _)| dim > 1) {
        if stride < extent {
            return false;
        }
        extent = (dim - 1).saturating_mul(stride).saturating_add(extent);
    }
    true
}

/// [`nested`] with the dims in the order of their strides.
#[cold]
fn nested_in_some_order(extent: usize, dims: &[usize], strides: &[usize]) -> bool {
    let mut order: [usize; MAX_DIMS] = array::from_fn(|dim| dim);
    let order = &mut order[..dims.len()];
    order.sort_unstable_by_key(|&dim| strides[dim]);
    nested(extent, order.iter().map(|&dim| (&dims[dim], &strides[dim])))
}

/// Checks that tensors are in `wanted` memory, and that those at `written` positions are writable.
pub(crate) fn check_memory(
    wanted: Memory,
    tensors: &[Option<Named<'_>>],
    written: impl Fn(usize) -> bool,
) -> Result<(), Error> {
    let (wanted_name, other) = match wanted {
        Memory::Device => ("device", "host"),
        Memory::Host => ("host", "device"),
    };
    for (at, named) in tensors.iter().enumerate() {
        let Some(Named { name, tensor }) = named else {
            continue;
        };
        if tensor.memory() != wanted {
            return Err(Error::Memory {
                tensor: name,
                wanted: wanted_name,
                got: other,
            });
        }
        if !tensor.is_writable() && written(at) {
            return Err(Error::ReadOnly { tensor: name });
        }
    }
    Ok(())
}

/// [`Error::Range`] for a number.
#[cold]
pub(crate) fn range(what: &'static str, wanted: String, got: impl ToString) -> Error {
    Error::Range {
        what,
        wanted,
        got: got.to_string(),
    }
}

/// [`Error::Unsupported`] for a size.
#[cold]
pub(crate) fn unsupported(what: &'static str, got: usize, allowed: &'static str) -> Error {
    Error::Unsupported {
        what,
        got: got.to_string(),
        allowed,
    }
}
