//! Memory of a case: buffers, and views of them as tensors.

use gated_delta::{DType, DeviceElement, Error, Tensor};
use half::{bf16, f16};

/// A 16-byte aligned buffer of one dtype. Elements outside of all tensors are filled with the byte 0xFF: NaN as floats, −1 as
/// indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Type of the elements.
    pub dtype: DType,
    /// Bytes of the elements, padded to a multiple of 16.
    pub words: Vec<u128>,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` elements filled with the byte 0xFF.
    #[must_use]
    pub fn new(dtype: DType, len: usize) -> Self {
        Self {
            dtype,
            words: vec![u128::MAX; (len * dtype.size_of()).div_ceil(16)],
            len,
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bits of element `i`, in the low bits of the result.
    #[must_use]
    pub fn bits(&self, i: usize) -> u64 {
        assert!(i < self.len, "element {i} of {}", self.len);
        match self.dtype.size_of() {
            2 => bytemuck::cast_slice::<_, u16>(&self.words)[i].into(),
            4 => bytemuck::cast_slice::<_, u32>(&self.words)[i].into(),
            _ => bytemuck::cast_slice::<_, u64>(&self.words)[i],
        }
    }

    /// Sets element `i` to the low bits of `bits`.
    pub fn set_bits(&mut self, i: usize, bits: u64) {
        assert!(i < self.len, "element {i} of {}", self.len);
        match self.dtype.size_of() {
            2 => bytemuck::cast_slice_mut::<_, u16>(&mut self.words)[i] = bits as u16,
            4 => bytemuck::cast_slice_mut::<_, u32>(&mut self.words)[i] = bits as u32,
            _ => bytemuck::cast_slice_mut::<_, u64>(&mut self.words)[i] = bits,
        }
    }

    /// Values of a view of a float buffer, in the order of its dims.
    #[must_use]
    pub fn floats_of(&self, view: &View) -> Vec<f64> {
        match self.dtype {
            DType::F32 => self.each_of(view, |x: f32| x.into()),
            DType::Bf16 => self.each_of(view, |x: bf16| x.to_f32().into()),
            DType::F16 => self.each_of(view, |x: f16| x.to_f32().into()),
            _ => unreachable!("an index is not a float"),
        }
    }

    /// Bits of each element of a view, in the order of its dims, in the low bits of each result.
    #[must_use]
    pub fn bits_of(&self, view: &View) -> Vec<u64> {
        match self.dtype.size_of() {
            2 => self.each_of(view, |bits: u16| bits.into()),
            4 => self.each_of(view, |bits: u32| bits.into()),
            _ => self.each_of(view, |bits: u64| bits),
        }
    }

    fn each_of<E: bytemuck::Pod, T>(&self, view: &View, of: impl Fn(E) -> T) -> Vec<T> {
        let elements = &bytemuck::cast_slice::<_, E>(&self.words)[..self.len];
        view.each(|position| of(elements[position]))
    }

    /// Writes `values` to the elements of a view, in the order of its dims, rounded to the nearest float. Elements whose value is
    /// NaN stay as they are.
    pub fn write(&mut self, view: &View, values: &[f64]) {
        match self.dtype {
            DType::F32 => self.write_each(view, values, |value| value as f32),
            DType::Bf16 => self.write_each(view, values, |value| bf16::from_f32(value as f32)),
            DType::F16 => self.write_each(view, values, |value| f16::from_f32(value as f32)),
            DType::I64 => self.write_each(view, values, |value| value as i64),
            DType::I32 | DType::U32 => {
                self.write_each(view, values, |value| value as i64 as u64 as u32);
            }
        }
    }

    fn write_each<E: bytemuck::Pod>(&mut self, view: &View, values: &[f64], of: impl Fn(f64) -> E) {
        let to = &mut bytemuck::cast_slice_mut::<_, E>(&mut self.words)[..self.len];
        let mut values = values.iter();
        view.each(|position| match values.next() {
            Some(&value) if !value.is_nan() => to[position] = of(value),
            _ => (),
        });
    }

    /// Copies the elements of a view from another buffer of the same dtype.
    pub fn copy_from(&mut self, other: &Self, view: &View) {
        assert_eq!(self.dtype, other.dtype, "elements of both buffers");
        match self.dtype.size_of() {
            2 => self.copy::<u16>(other, view),
            4 => self.copy::<u32>(other, view),
            _ => self.copy::<u64>(other, view),
        }
    }

    fn copy<E: bytemuck::Pod>(&mut self, other: &Self, view: &View) {
        let from = &bytemuck::cast_slice::<_, E>(&other.words)[..other.len];
        let to = &mut bytemuck::cast_slice_mut::<_, E>(&mut self.words)[..self.len];
        view.each(|position| to[position] = from[position]);
    }

    /// Value of element `i` of a float buffer.
    #[must_use]
    pub fn float(&self, i: usize) -> f64 {
        let bits = self.bits(i);
        match self.dtype {
            DType::F32 => f32::from_bits(bits as u32).into(),
            DType::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            DType::F16 => f16::from_bits(bits as u16).to_f64(),
            _ => unreachable!("an index is not a float"),
        }
    }

    /// Sets element `i` to the float nearest to `value`.
    pub fn set_float(&mut self, i: usize, value: f32) {
        self.set_bits(
            i,
            match self.dtype {
                DType::F32 => value.to_bits().into(),
                DType::Bf16 => bf16::from_f32(value).to_bits().into(),
                DType::F16 => f16::from_f32(value).to_bits().into(),
                _ => unreachable!("an index is not a float"),
            },
        );
    }

    /// Value of element `i` of an index buffer.
    #[must_use]
    pub fn index(&self, i: usize) -> i64 {
        let bits = self.bits(i);
        if self.dtype == DType::I32 {
            i64::from(bits as i32)
        } else {
            bits as i64
        }
    }

    /// The whole buffer as a one-dimensional tensor for the simulator.
    ///
    /// # Errors
    /// None: the dims are the buffer's own.
    pub fn tensor(&mut self, writable: bool) -> Result<Tensor<'_>, Error> {
        match self.dtype {
            DType::F32 => self.typed::<f32>(writable),
            DType::Bf16 => self.typed::<bf16>(writable),
            DType::F16 => self.typed::<f16>(writable),
            DType::I32 => self.typed::<i32>(writable),
            DType::I64 => self.typed::<i64>(writable),
            DType::U32 => self.typed::<u32>(writable),
        }
    }

    fn typed<T: DeviceElement + bytemuck::Pod>(
        &mut self,
        writable: bool,
    ) -> Result<Tensor<'_>, Error> {
        let len = self.len;
        let elements: &mut [T] = &mut bytemuck::cast_slice_mut(&mut self.words)[..len];
        if writable {
            Tensor::from_slice_mut(elements, &[len])
        } else {
            Tensor::from_slice(elements, &[len])
        }
    }
}

/// A tensor: its buffer, offset, dims and strides, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Position of the buffer in the case.
    pub buffer: usize,
    /// Position of the first element in the buffer.
    pub offset: usize,
    /// Dims, outermost first.
    pub dims: Vec<usize>,
    /// Strides of the dims, in elements.
    pub strides: Vec<usize>,
}

impl View {
    /// Positions of the elements in the buffer, in the order of the dims.
    #[must_use]
    pub fn positions(&self) -> Vec<usize> {
        self.each(|position| position)
    }

    /// Results of `of` for the position of each element, in the order of the dims.
    pub fn each<T>(&self, mut of: impl FnMut(usize) -> T) -> Vec<T> {
        let Some((&len, outer)) = self.dims.split_last() else {
            return vec![of(self.offset)];
        };
        let mut starts = vec![self.offset];
        for (&dim, &stride) in outer.iter().zip(&self.strides) {
            let places = |start: usize| (0..dim).map(move |i| start + i * stride);
            starts = starts.into_iter().flat_map(places).collect();
        }
        let stride = self.strides[outer.len()];
        let mut all = Vec::with_capacity(starts.len() * len);
        for start in starts {
            all.extend((0..len).map(|i| of(start + i * stride)));
        }
        all
    }

    /// The subtensor at `index` of the outermost dims.
    #[must_use]
    pub fn entry(&self, index: &[usize]) -> Self {
        let inside = index.iter().zip(&self.strides);
        Self {
            buffer: self.buffer,
            offset: self.offset + inside.map(|(i, stride)| i * stride).sum::<usize>(),
            dims: self.dims[index.len()..].to_vec(),
            strides: self.strides[index.len()..].to_vec(),
        }
    }

    /// The `len` entries of dim `dim` from `start` on.
    #[must_use]
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Self {
        let mut view = self.clone();
        view.offset += start * view.strides[dim];
        view.dims[dim] = len;
        view
    }

    /// The view as a tensor. `bases` has all elements of each buffer.
    ///
    /// # Errors
    /// If the view leaves its buffer.
    pub fn of<'a>(&self, bases: &[Tensor<'a>]) -> Result<Tensor<'a>, Error> {
        let elements = self.dims.iter().map(|&dim| dim.max(1)).product();
        // An allocation on a GPU may have room for more elements than the buffer.
        if self.dims.iter().all(|&dim| dim > 0) {
            let steps = self.dims.iter().zip(&self.strides);
            let last = steps.fold(self.offset, |last, (&dim, &stride)| {
                last.saturating_add((dim - 1).saturating_mul(stride))
            });
            bases[self.buffer].narrow(0, last, 1)?;
        }
        let mut tensor = bases[self.buffer].narrow(0, self.offset, elements)?;
        for &inner in self.dims.iter().skip(1).rev() {
            tensor = tensor.split(0, inner.max(1))?;
        }
        let mut tensor = tensor.with_strides(&self.strides)?;
        for dim in (0..self.dims.len()).filter(|&dim| self.dims[dim] == 0) {
            tensor = tensor.narrow(dim, 0, 0)?;
        }
        Ok(tensor)
    }
}
