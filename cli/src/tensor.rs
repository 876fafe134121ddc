//! Tensors in host memory that own their bytes.

use bytemuck::Pod;
use gated_delta::{DType, Tensor};
use half::{bf16, f16};

use crate::error::Error;

/// Evaluates `$body` with `$element` as the Rust type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:block) => {
        match $dtype {
            DType::F32 => with_element!(@ $element = f32, $body),
            DType::Bf16 => with_element!(@ $element = bf16, $body),
            DType::F16 => with_element!(@ $element = f16, $body),
            DType::I32 => with_element!(@ $element = i32, $body),
            DType::I64 => with_element!(@ $element = i64, $body),
            DType::U32 => with_element!(@ $element = u32, $body),
        }
    };
    (@ $element:ident = $type:ty, $body:block) => {{
        type $element = $type;
        $body
    }};
}

/// A tensor in host memory, 16-byte aligned as GPU memory is. A GPU gets a copy of it, and the simulator works on it directly.
#[derive(Clone, Debug)]
pub struct HostTensor {
    dtype: DType,
    dims: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    words: Vec<u128>,
    bytes: usize,
}

impl HostTensor {
    /// A contiguous tensor with all bits set: floats are NaN, integers −1 or the largest u32.
    ///
    /// # Errors
    /// [`Error::Input`] if the size overflows or there is too little memory.
    pub fn new(dtype: DType, dims: &[usize]) -> Result<Self, Error> {
        let mut stride = 1usize;
        let mut strides = vec![0; dims.len()];
        for (dim, slot) in dims.iter().zip(&mut strides).rev() {
            *slot = stride;
            stride = stride.saturating_mul(*dim);
        }
        Self::strided(dtype, dims, &strides, 0)
    }

    /// A view with `strides` and `offset`, in elements, of new storage that is exactly long enough, with all bits set: for example a slice
    /// of a packed buffer, or a padded pool.
    ///
    /// # Errors
    /// The errors of [`HostTensor::new`]; more or fewer strides than dims.
    pub fn strided(
        dtype: DType,
        dims: &[usize],
        strides: &[usize],
        offset: usize,
    ) -> Result<Self, Error> {
        let impossible = || {
            Error::Input(format!(
                "a {dtype} tensor of shape {dims:?} at strides {strides:?}: wanted one that fits in memory"
            ))
        };
        if dims.len() != strides.len() {
            return Err(impossible());
        }
        let bytes = span(dims, strides)
            .and_then(|span| span.checked_add(offset)?.checked_mul(dtype.size_of()))
            .ok_or_else(impossible)?;
        let mut words = Vec::new();
        let count = bytes.div_ceil(size_of::<u128>());
        words.try_reserve_exact(count).map_err(|_| impossible())?;
        words.resize(count, u128::MAX);
        Ok(Self {
            dtype,
            dims: dims.to_vec(),
            strides: strides.to_vec(),
            offset,
            words,
            bytes,
        })
    }

    /// A contiguous tensor of `values`, rounded to `dtype`.
    ///
    /// # Errors
    /// The errors of [`HostTensor::new`]; more or fewer values than elements.
    pub fn from_f64(dtype: DType, dims: &[usize], values: &[f64]) -> Result<Self, Error> {
        let mut tensor = Self::new(dtype, dims)?;
        tensor.fill(values)?;
        Ok(tensor)
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dims, outermost first.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes of the whole storage.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    /// Bytes of the whole storage, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }

    /// A view for a kernel that reads the tensor.
    ///
    /// # Errors
    /// [`gated_delta::Error::Range`] if elements of the view overlap.
    pub fn view(&self) -> Result<Tensor<'_>, gated_delta::Error> {
        let tensor = with_element!(self.dtype, T => {
            let elements = bytemuck::cast_slice::<u8, T>(self.bytes());
            Tensor::from_slice(&elements[self.offset..], &self.dims)
        });
        tensor?.with_strides(&self.strides)
    }

    /// A view for a kernel that writes the tensor.
    ///
    /// # Errors
    /// The errors of [`HostTensor::view`].
    pub fn view_mut(&mut self) -> Result<Tensor<'_>, gated_delta::Error> {
        let bytes = &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes];
        let tensor = with_element!(self.dtype, T => {
            let elements = bytemuck::cast_slice_mut::<u8, T>(bytes);
            Tensor::from_slice_mut(&mut elements[self.offset..], &self.dims)
        });
        tensor?.with_strides(&self.strides)
    }

    /// The same view of a copy of the storage in GPU memory at `address`.
    ///
    /// # Errors
    /// The errors of [`HostTensor::view`].
    ///
    /// # Safety
    /// For `'a`, `address` has to be GPU memory with as many bytes as [`HostTensor::bytes`]. Others may read and write it only in stream
    /// order with the launches that take the view.
    pub unsafe fn device_view<'a>(&self, address: u64) -> Result<Tensor<'a>, gated_delta::Error> {
        self.view()?;
        let address = address + (self.offset * self.dtype.size_of()) as u64;
        // SAFETY: the caller's promise; dims and strides fit into the copy, since they fit into the host's bytes.
        unsafe { Tensor::from_raw(address, self.dtype, &self.dims) }?.with_strides(&self.strides)
    }

    /// Elements in the order of the dims, widened to f64.
    #[must_use]
    pub fn to_f64(&self) -> Vec<f64> {
        match self.dtype {
            DType::F32 => self.map(|x: f32| x.into()),
            DType::Bf16 => self.map(|x: bf16| x.into()),
            DType::F16 => self.map(|x: f16| x.into()),
            DType::I32 => self.map(|x: i32| x.into()),
            DType::I64 => self.map(|x: i64| x as f64),
            DType::U32 => self.map(|x: u32| x.into()),
        }
    }

    /// Elements of an index tensor in the order of the dims. Floats are truncated to integers.
    #[must_use]
    pub fn to_i64(&self) -> Vec<i64> {
        match self.dtype {
            DType::I32 => self.map(|x: i32| x.into()),
            DType::I64 => self.map(|x: i64| x),
            DType::U32 => self.map(|x: u32| x.into()),
            DType::F32 | DType::Bf16 | DType::F16 => {
                self.to_f64().into_iter().map(|x| x as i64).collect()
            }
        }
    }

    /// Overwrites the elements with `values`, in the order of the dims. Values are rounded to f32 first, as in kernels, then to the
    /// nearest even of the dtype.
    ///
    /// # Errors
    /// [`Error::Input`] for more or fewer values than elements.
    pub fn fill(&mut self, values: &[f64]) -> Result<(), Error> {
        self.fill_units(values, &[true])
    }

    /// As [`fill`](Self::fill), for some of the equal parts of a tensor: part i if `filled[i]`.
    ///
    /// # Errors
    /// The errors of [`HostTensor::fill`].
    pub(crate) fn fill_units(&mut self, values: &[f64], filled: &[bool]) -> Result<(), Error> {
        if values.len() != self.elements() {
            return Err(Error::Input(format!(
                "a tensor of shape {:?}: wanted {} values, got {}",
                self.dims,
                self.elements(),
                values.len()
            )));
        }
        match self.dtype {
            DType::F32 => self.set(values, filled, |x| x as f32),
            DType::Bf16 => self.set(values, filled, |x| bf16::from_f32(x as f32)),
            DType::F16 => self.set(values, filled, |x| f16::from_f32(x as f32)),
            DType::I32 => self.set(values, filled, |x| x as i32),
            DType::I64 => self.set(values, filled, |x| x as i64),
            DType::U32 => self.set(values, filled, |x| x as u32),
        }
        Ok(())
    }

    fn map<T: Pod, U>(&self, widen: impl Fn(T) -> U) -> Vec<U> {
        let elements = bytemuck::cast_slice::<u8, T>(self.bytes());
        self.positions().map(|at| widen(elements[at])).collect()
    }

    fn set<T: Pod>(&mut self, values: &[f64], filled: &[bool], narrow: impl Fn(f64) -> T) {
        let positions: Vec<usize> = self.positions().collect();
        let elements = bytemuck::cast_slice_mut::<u8, T>(self.bytes_mut());
        let unit = positions
            .len()
            .checked_div(filled.len())
            .unwrap_or(0)
            .max(1);
        let units = positions.chunks(unit).zip(values.chunks(unit)).zip(filled);
        for ((positions, values), _) in units.filter(|(_, filled)| **filled) {
            for (at, value) in positions.iter().zip(values) {
                elements[*at] = narrow(*value);
            }
        }
    }

    /// Positions of the elements in the storage, in the order of the dims.
    fn positions(&self) -> impl Iterator<Item = usize> + use<> {
        let (dims, strides) = (self.dims.clone(), self.strides.clone());
        let mut index = vec![0usize; dims.len()];
        let mut at = self.offset;
        (0..self.elements()).map(move |_| {
            let position = at;
            for dim in (0..dims.len()).rev() {
                index[dim] += 1;
                at += strides[dim];
                if index[dim] < dims[dim] {
                    break;
                }
                at -= index[dim] * strides[dim];
                index[dim] = 0;
            }
            position
        })
    }
}

/// Elements from the first to the last, both included; `None` if the number overflows.
fn span(dims: &[usize], strides: &[usize]) -> Option<usize> {
    let elements = dims
        .iter()
        .try_fold(1usize, |product, dim| product.checked_mul(*dim))?;
    if elements == 0 {
        return Some(0);
    }
    dims.iter()
        .zip(strides)
        .try_fold(1usize, |span, (dim, stride)| {
            span.checked_add((dim - 1).checked_mul(*stride)?)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_memory_is_nan() {
        let tensor = HostTensor::new(DType::Bf16, &[2, 3]).unwrap();
        assert!(tensor.to_f64().iter().all(|x| x.is_nan()));
        assert_eq!(
            HostTensor::new(DType::I32, &[2]).unwrap().to_i64(),
            [-1, -1]
        );
    }

    #[test]
    fn a_packed_view_keeps_its_neighbours() {
        let mut tensor = HostTensor::strided(DType::F32, &[2, 2], &[5, 1], 3).unwrap();
        tensor.fill(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(tensor.to_f64(), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(tensor.bytes().len(), 4 * 10);
        let view = tensor.view().unwrap();
        assert_eq!(
            (&view.dims()[..], &view.strides()[..]),
            (&[2, 2][..], &[5, 1][..])
        );
        assert_eq!(view.address() % 16, 12);
        let floats: &[f32] = bytemuck::cast_slice(tensor.bytes());
        assert!(floats[..3].iter().chain(&floats[5..8]).all(|x| x.is_nan()));
    }

    #[test]
    fn values_are_rounded_to_the_nearest_even() {
        let tensor = HostTensor::from_f64(DType::Bf16, &[2], &[1.0 + 1.0 / 256.0, 1e60]).unwrap();
        assert_eq!(tensor.to_f64(), [1.0, f64::INFINITY]);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for dims in [&[usize::MAX, 2][..], &[usize::MAX / 2], &[usize::MAX]] {
            assert!(HostTensor::new(DType::F32, dims).is_err(), "{dims:?}");
        }
        assert!(HostTensor::strided(DType::F32, &[2], &[], 0).is_err());
        assert!(HostTensor::from_f64(DType::F32, &[2], &[1.0]).is_err());
        let empty = HostTensor::new(DType::F32, &[0, 3]).unwrap();
        assert!(empty.to_f64().is_empty() && empty.view().is_ok());
    }
}
