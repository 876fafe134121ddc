//! Dtype, dims, strides and offset of a tensor.

use gated_delta::{DType, Error, Tensor};
use libfuzzer_sys::arbitrary::{Result, Unstructured};

use crate::draft::rarely;

/// Address of tensors without memory.
const NOWHERE: u64 = 0x7f00_0000_0000;
/// Most elements of a tensor that is put in memory.
const MOST_ELEMENTS: usize = 1 << 21;

const DTYPES: [DType; 6] = [
    DType::F32,
    DType::Bf16,
    DType::F16,
    DType::I32,
    DType::I64,
    DType::U32,
];

/// Form of a tensor, without memory.
#[derive(Debug)]
pub struct Form {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub strides: Vec<usize>,
    pub offset: usize,
}

impl Form {
    /// A tensor of these dims. There may be gaps between the entries of its `free` outermost dims.
    pub fn draw(
        dtype: DType,
        dims: Vec<usize>,
        free: usize,
        u: &mut Unstructured<'_>,
    ) -> Result<Self> {
        let mut strides = vec![1; dims.len()];
        let has_gaps = rarely(u, 3)?;
        for dim in (0..dims.len().saturating_sub(1)).rev() {
            let gap = if has_gaps && dim < free {
                u.int_in_range(0..=16)?
            } else {
                0
            };
            strides[dim] = strides[dim + 1] * dims[dim + 1] + gap;
        }
        let offset = if rarely(u, 4)? {
            u.int_in_range(0..=9)?
        } else {
            0
        };
        Ok(Self {
            dtype,
            dims,
            strides,
            offset,
        })
    }

    /// Changes the dtype, a dim or a stride, once or twice.
    pub fn bend(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let size = |u: &mut Unstructured<'_>| match u.int_in_range(0..=3)? {
            0 => Ok(1usize.checked_shl(u.int_in_range(0..=63)?).unwrap_or(0)),
            1 => u.arbitrary(),
            _ => u.int_in_range(0..=300),
        };
        for _ in 0..u.int_in_range(1..=2)? {
            if self.dims.is_empty() {
                break;
            }
            let (dim, other) = (
                u.choose_index(self.dims.len())?,
                u.choose_index(self.dims.len())?,
            );
            match u.int_in_range(0..=9)? {
                0 => self.dtype = *u.choose(&DTYPES)?,
                1 => {
                    self.dims.remove(dim);
                    self.strides.remove(dim);
                }
                2 => {
                    self.dims.insert(dim, u.int_in_range(0..=3)?);
                    self.strides.insert(dim, size(u)?);
                }
                3 => self.dims[dim] = size(u)?,
                4 => self.dims[dim] = self.dims[dim].wrapping_sub(1),
                5 => self.strides.swap(dim, other),
                6 => self.strides[dim] = 0,
                _ => self.strides[dim] = size(u)?,
            }
        }
        Ok(())
    }

    /// Whether the tensor is small enough to be put in memory.
    pub fn is_small(&self) -> bool {
        let elements = self
            .dims
            .iter()
            .try_fold(1usize, |product, dim| product.checked_mul(*dim));
        let mut dims = self.dims.iter().zip(&self.strides);
        let span = dims.try_fold(self.offset, |span, (dim, stride)| {
            span.checked_add(dim.saturating_sub(1).checked_mul(*stride)?)
        });
        let bounded = |size: Option<usize>| size.is_some_and(|size| size < MOST_ELEMENTS);
        self.dims.contains(&0) || bounded(span) && bounded(elements)
    }

    /// The tensor at [`NOWHERE`], for checks that touch no memory.
    pub fn nowhere(&self) -> std::result::Result<Tensor<'static>, Error> {
        let bytes = (self.offset * self.dtype.size_of()) as u64;
        // SAFETY: tensors at this address are checked and never launched with.
        let tensor = unsafe { Tensor::from_raw(NOWHERE + bytes, self.dtype, &self.dims) }?;
        tensor.with_strides(&self.strides)
    }
}
