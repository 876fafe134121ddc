//! Elements of tensors in host memory, as f32.

use std::{marker::PhantomData, ptr};

use gated_delta::{DType, Tensor};
use half::{bf16, f16};

/// Largest magnitude of an element of an f16 state.
const MOST_F16: f32 = 65504.0;

/// Access to a tensor's elements.
#[derive(Clone, Copy)]
pub struct View<'a> {
    first: *mut u8,
    dtype: DType,
    dims: [usize; 5],
    strides: [usize; 5],
    rank: usize,
    borrow: PhantomData<&'a ()>,
}

// SAFETY: threads write distinct elements: the caller of a launch guarantees it for rows, and `run` for heads.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}

impl<'a> View<'a> {
    /// A view of a tensor in host memory with at most five dims.
    pub fn of(tensor: &Tensor<'a>) -> Self {
        let (mut dims, mut strides) = ([1; 5], [0; 5]);
        let rank = tensor.dims().len().min(5);
        dims[..rank].copy_from_slice(&tensor.dims()[..rank]);
        strides[..rank].copy_from_slice(&tensor.strides()[..rank]);
        Self {
            first: ptr::with_exposed_provenance_mut(tensor.address() as usize),
            dtype: tensor.dtype(),
            dims,
            strides,
            rank,
            borrow: PhantomData,
        }
    }

    pub fn dim(&self, dim: usize) -> usize {
        self.dims[dim]
    }

    /// Whether both views begin at the same address.
    pub fn is(&self, other: &Self) -> bool {
        self.first == other.first
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Offset of the element at `index`, in elements. Dims after the end of `index` are at 0.
    fn offset(&self, index: &[usize]) -> usize {
        debug_assert!(index.iter().zip(&self.dims).all(|(i, dim)| i < dim));
        index.iter().zip(&self.strides).map(|(i, s)| i * s).sum()
    }

    /// The element at this offset, which is in elements from the first.
    fn get(&self, offset: usize) -> f32 {
        // SAFETY: the offset is that of an element of the tensor, whose memory is locked for 'a.
        unsafe {
            match self.dtype {
                DType::F32 => self.first.cast::<f32>().add(offset).read(),
                DType::Bf16 => self.first.cast::<bf16>().add(offset).read().to_f32(),
                DType::F16 => self.first.cast::<f16>().add(offset).read().to_f32(),
                DType::I32 | DType::I64 | DType::U32 => self.index_at(offset) as f32,
            }
        }
    }

    /// The index at this offset of an index tensor.
    fn index_at(&self, offset: usize) -> i64 {
        // SAFETY: as in `get`.
        unsafe {
            match self.dtype {
                DType::I32 => self.first.cast::<i32>().add(offset).read().into(),
                DType::U32 => self.first.cast::<u32>().add(offset).read().into(),
                DType::I64 => self.first.cast::<i64>().add(offset).read(),
                DType::F32 | DType::Bf16 | DType::F16 => self.get(offset) as i64,
            }
        }
    }

    /// Writes the element at this offset, rounded to the dtype.
    fn set(&self, offset: usize, value: f32) {
        // SAFETY: as in `get`; the tensor is one that the launch writes.
        unsafe {
            match self.dtype {
                DType::F32 => self.first.cast::<f32>().add(offset).write(value),
                DType::Bf16 => {
                    let rounded = bf16::from_f32(value);
                    self.first.cast::<bf16>().add(offset).write(rounded);
                }
                DType::F16 => {
                    let rounded = f16::from_f32(value);
                    self.first.cast::<f16>().add(offset).write(rounded);
                }
                // Launches write no index tensors.
                DType::I32 | DType::I64 | DType::U32 => {}
            }
        }
    }

    /// An element of an index tensor.
    pub fn index(&self, index: &[usize]) -> i64 {
        self.index_at(self.offset(index))
    }

    /// An element of a float tensor.
    pub fn at(&self, index: &[usize]) -> f32 {
        self.get(self.offset(index))
    }

    /// Reads `out.len()` elements along dim `dim`, starting at `index`.
    pub fn read(&self, index: &[usize], dim: usize, out: &mut [f32]) {
        let (first, stride) = (self.offset(index), self.strides[dim]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = self.get(first + i * stride);
        }
    }

    /// Writes `values` along dim `dim`, starting at `index`.
    pub fn write(&self, index: &[usize], dim: usize, values: &[f32]) {
        let (first, stride) = (self.offset(index), self.strides[dim]);
        for (i, &value) in values.iter().enumerate() {
            self.set(first + i * stride, value);
        }
    }

    /// The value of an element after it is stored in a state: rounded to the dtype, and in f16 clamped to ±65,504.
    pub fn stored(&self, value: f32) -> f32 {
        match self.dtype {
            DType::F16 => {
                let held = value.clamp(-MOST_F16, MOST_F16);
                f16::from_f32(held).to_f32()
            }
            DType::Bf16 => bf16::from_f32(value).to_f32(),
            _ => value,
        }
    }
}
