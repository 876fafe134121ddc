//! What every operator asks of its tensors: dims, dtypes, strides, alignment, and the errors that name them.

use std::array;

use crate::error::Error;
use crate::tensor::{DType, MAX_DIMS, Tensor};

/// A tensor with its name in the operator's arguments.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    pub name: &'static str,
    pub tensor: &'a Tensor<'a>,
}

/// The tensor under its name.
#[inline(always)]
pub(crate) fn named<'a>(name: &'static str, tensor: &'a Tensor<'a>) -> Named<'a> {
    Named { name, tensor }
}

impl Named<'_> {
    /// Dims are `wanted`, given as (letter, size).
    #[inline]
    pub fn dims<const N: usize>(self, wanted: &[(&'static str, usize); N]) -> Result<(), Error> {
        if let Ok(dims) = <&[usize; N]>::try_from(&self.tensor.dims()[..])
            && dims
                .iter()
                .zip(wanted)
                .all(|(&got, &(_, size))| got == size)
        {
            return Ok(());
        }
        Err(self.dims_error(wanted))
    }

    #[cold]
    fn dims_error(self, wanted: &[(&str, usize)]) -> Error {
        let letters: Vec<&str> = wanted.iter().map(|&(letter, _)| letter).collect();
        let sizes: Vec<usize> = wanted.iter().map(|&(_, size)| size).collect();
        Error::Shape {
            tensor: self.name,
            wanted: format!("[{}] = {sizes:?}", letters.join(", ")),
            got: *self.tensor.dims(),
        }
    }

    /// Has as many dims as `letters`; their sizes.
    pub fn rank<const N: usize>(self, letters: &str) -> Result<[usize; N], Error> {
        let dims = self.tensor.dims();
        dims[..].try_into().map_err(|_| Error::Shape {
            tensor: self.name,
            wanted: letters.to_owned(),
            got: *dims,
        })
    }

    /// The dtype is one of `allowed`, which `wanted` spells out.
    #[inline]
    pub fn dtype(self, allowed: &[DType], wanted: &'static str) -> Result<(), Error> {
        if allowed.contains(&self.tensor.dtype()) {
            Ok(())
        } else {
            Err(Error::DType {
                tensor: self.name,
                wanted,
                got: self.tensor.dtype(),
            })
        }
    }

    /// bf16, f16 or f32.
    #[inline]
    pub fn float(self) -> Result<(), Error> {
        self.dtype(&[DType::Bf16, DType::F16, DType::F32], "bf16, f16 or f32")
    }

    /// The `count` innermost dims lie one behind the other.
    #[inline]
    pub fn inner_contiguous(self, count: usize, wanted: &'static str) -> Result<(), Error> {
        let (dims, strides) = (self.tensor.dims(), self.tensor.strides());
        let mut next = 1;
        for dim in (dims.len().saturating_sub(count)..dims.len()).rev() {
            if dims[dim] > 1 && strides[dim] != next {
                return Err(self.stride_error(wanted));
            }
            next *= dims[dim];
        }
        Ok(())
    }

    /// The address is a multiple of the element's size, as every access needs.
    #[inline]
    pub fn natural(self) -> Result<(), Error> {
        let wanted = self.tensor.dtype().size_of();
        let address = self.tensor.address();
        if address.is_multiple_of(wanted as u64) {
            Ok(())
        } else {
            Err(Error::Alignment {
                tensor: self.name,
                wanted,
                got: 1 << address.trailing_zeros(),
            })
        }
    }

    /// The stride of `dim`, whose size is compiled in, for a kernel that multiplies it by indices in 32 bits; 0 for a
    /// dim of one.
    #[inline]
    pub fn stride_u32(self, dim: usize) -> Result<u32, Error> {
        let steps = self.tensor.dims()[dim].saturating_sub(1);
        if steps == 0 {
            return Ok(0);
        }
        let stride = self.tensor.strides()[dim];
        match stride.checked_mul(steps) {
            Some(span) if span <= u32::MAX as usize => Ok(stride as u32),
            _ => Err(self.stride_error("a head stride that spans less than 2^32 elements")),
        }
    }

    /// The stride of the outermost dim, for a kernel that multiplies it in 64 bits.
    #[inline]
    pub fn row_stride(self) -> Result<u32, Error> {
        self.long_stride(0, "a row or slot stride below 2^32 elements")
    }

    /// The stride of the tokens, dim 1, for a kernel that multiplies it in 64 bits.
    #[inline]
    pub fn token_stride(self) -> Result<u32, Error> {
        self.long_stride(1, "a token stride below 2^32 elements")
    }

    #[inline]
    fn long_stride(self, dim: usize, wanted: &'static str) -> Result<u32, Error> {
        u32::try_from(self.tensor.strides()[dim]).map_err(|_| self.stride_error(wanted))
    }

    /// What lies outside the `inner` contiguous dims of a written tensor does not overlap; `wanted` says so.
    #[inline]
    pub fn distinct(self, inner: usize, wanted: &'static str) -> Result<(), Error> {
        let outer = self.tensor.dims().len().saturating_sub(inner);
        if self.nested(outer, (0..outer).rev()) || self.nested_in_some_order(outer) {
            Ok(())
        } else {
            Err(self.stride_error(wanted))
        }
    }

    /// Each dim of `order`, innermost first, steps over all that lies in those before it and behind the `outer` dims.
    #[inline]
    fn nested(self, outer: usize, order: impl Iterator<Item = usize>) -> bool {
        let (dims, strides) = (self.tensor.dims(), self.tensor.strides());
        let mut extent: usize = dims[outer..].iter().product();
        for dim in order.filter(|&dim| dims[dim] > 1) {
            if strides[dim] < extent {
                return false;
            }
            extent = (dims[dim] - 1)
                .saturating_mul(strides[dim])
                .saturating_add(extent);
        }
        true
    }

    #[cold]
    fn nested_in_some_order(self, outer: usize) -> bool {
        let mut order: [usize; MAX_DIMS] = array::from_fn(|dim| dim);
        let order = &mut order[..outer];
        order.sort_unstable_by_key(|&dim| self.tensor.strides()[dim]);
        self.nested(outer, order.iter().copied())
    }

    /// Whether the address, the outermost stride and every other outer stride are multiples of 16 bytes.
    ///
    /// The outermost dim counts whatever its size: it is not part of what is compiled in.
    #[inline]
    pub fn wide(self) -> bool {
        self.wide_from(0)
    }

    /// [`Named::wide`] of a tensor whose dims before `outermost` are of size one.
    #[inline]
    pub fn wide_from(self, outermost: usize) -> bool {
        let size = self.tensor.dtype().size_of() as u64;
        let (dims, strides) = (self.tensor.dims(), self.tensor.strides());
        let bits = (outermost..dims.len().saturating_sub(1))
            .filter(|&dim| dim == outermost || dims[dim] > 1)
            .fold(self.tensor.address(), |bits, dim| {
                bits | (strides[dim] as u64 * size)
            });
        bits.is_multiple_of(16)
    }

    /// [`Named::wide`], for a kernel that has no narrower path.
    pub fn wide_only(self) -> Result<(), Error> {
        if self.wide() {
            Ok(())
        } else {
            Err(Error::Alignment {
                tensor: self.name,
                wanted: 16,
                got: self.tensor.alignment(),
            })
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

/// [`Error::Range`] of a number.
#[cold]
pub(crate) fn range(what: &'static str, wanted: String, got: impl ToString) -> Error {
    Error::Range {
        what,
        wanted,
        got: got.to_string(),
    }
}

/// [`Error::Unsupported`] of a size.
#[cold]
pub(crate) fn unsupported(what: &'static str, got: usize, allowed: &'static str) -> Error {
    Error::Unsupported {
        what,
        got: got.to_string(),
        allowed,
    }
}
