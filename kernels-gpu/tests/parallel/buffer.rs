//! A tensor in memory that the simulator checks: NaN wherever nothing was stored.

use gated_delta_kernels::constants::Element;
use gated_delta_kernels::device::sim::Region;
use half::{bf16, f16};

/// Floats with free strides.
#[derive(Clone)]
pub struct Buffer {
    words: Vec<u128>,
    pub element: Element,
    dims: Vec<usize>,
    pub strides: Vec<usize>,
    /// Elements before the first one.
    start: usize,
}

impl Buffer {
    /// The rows of the outermost dim have `gap` elements between them, and the first one `gap` before it.
    pub fn new(element: Element, dims: &[usize], gap: usize) -> Self {
        let mut strides: Vec<usize> = (0..dims.len())
            .map(|dim| dims[dim + 1..].iter().product())
            .collect();
        strides[0] += gap;
        let bytes = (gap + dims[0] * strides[0]) * Self::bytes_of(element);
        Self {
            words: vec![u128::MAX; bytes.div_ceil(16)],
            element,
            dims: dims.to_vec(),
            strides,
            start: gap,
        }
    }

    fn bytes_of(element: Element) -> usize {
        if element == Element::F32 { 4 } else { 2 }
    }

    pub fn filled(mut self, mut value: impl FnMut() -> f64) -> Self {
        let count = self.dims.iter().product();
        for i in 0..count {
            self.set(i, value());
        }
        self
    }

    fn offset(&self, mut index: usize) -> usize {
        let mut offset = self.start;
        for (dim, stride) in self.dims.iter().zip(&self.strides).rev() {
            offset += index % dim * stride;
            index /= dim;
        }
        offset
    }

    /// Element of this index in row-major order.
    pub fn get(&self, index: usize) -> f64 {
        let offset = self.offset(index);
        let halves: &[u16] = bytemuck::cast_slice(&self.words);
        match self.element {
            Element::F32 => bytemuck::cast_slice::<_, f32>(&self.words)[offset].into(),
            Element::Bf16 => bf16::from_bits(halves[offset]).to_f64(),
            Element::F16 => f16::from_bits(halves[offset]).to_f64(),
        }
    }

    pub fn set(&mut self, index: usize, value: f64) {
        let offset = self.offset(index);
        match self.element {
            Element::F32 => {
                bytemuck::cast_slice_mut::<_, f32>(&mut self.words)[offset] = value as f32
            }
            Element::Bf16 => {
                bytemuck::cast_slice_mut::<_, u16>(&mut self.words)[offset] =
                    bf16::from_f64(value).to_bits()
            }
            Element::F16 => {
                bytemuck::cast_slice_mut::<_, u16>(&mut self.words)[offset] =
                    f16::from_f64(value).to_bits()
            }
        }
    }

    /// `count` elements from `index` on, in row-major order.
    pub fn values(&self, index: usize, count: usize) -> Vec<f64> {
        (index..index + count).map(|i| self.get(i)).collect()
    }

    /// Everything, gaps too.
    pub fn bits(&self) -> &[u128] {
        &self.words
    }

    pub fn set_bits(&mut self, bits: &[u128]) {
        self.words.copy_from_slice(bits);
    }

    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    pub fn address(&self) -> u64 {
        self.words.as_ptr().expose_provenance() as u64
            + (self.start * Self::bytes_of(self.element)) as u64
    }

    pub fn region(&self, name: &'static str, writable: bool) -> Region {
        Region {
            name,
            address: self.address(),
            element_bytes: Self::bytes_of(self.element),
            dims: self.dims.clone(),
            strides: self.strides.clone(),
            writable,
        }
    }
}

/// A contiguous tensor of 32-bit integers.
pub fn indices(name: &'static str, values: &[i32]) -> Region {
    Region {
        name,
        address: values.as_ptr().expose_provenance() as u64,
        element_bytes: 4,
        dims: vec![values.len()],
        strides: vec![1],
        writable: false,
    }
}
