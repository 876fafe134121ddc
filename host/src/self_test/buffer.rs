//! Memory that the kernels of a library can access.

use half::{bf16, f16};

use crate::driver::{Context, DeviceMemory};
use crate::error::Error;
use crate::tensor::{DType, Memory, Tensor};

/// Elements of a tensor, in GPU memory if there is a context, otherwise in host memory for the simulator.
pub struct Buffer {
    dtype: DType,
    len: usize,
    /// The elements, 16-byte aligned. They are stale after a GPU has written its copy.
    words: Vec<u128>,
    device: Option<DeviceMemory>,
}

impl Buffer {
    /// A tensor of bf16, f16 or f32.
    pub fn floats(context: Option<&Context>, dtype: DType, values: &[f64]) -> Result<Self, Error> {
        let bits = |round: fn(f64) -> u16| -> Vec<u8> {
            let bits = values.iter().map(|&x| round(x));
            bits.flat_map(u16::to_ne_bytes).collect()
        };
        let bytes = match dtype {
            DType::Bf16 => bits(|x| bf16::from_f64(x).to_bits()),
            DType::F16 => bits(|x| f16::from_f64(x).to_bits()),
            _ => values
                .iter()
                .flat_map(|&x| (x as f32).to_ne_bytes())
                .collect(),
        };
        Self::new(context, dtype, &bytes)
    }

    /// A tensor of i32.
    pub fn indices(context: Option<&Context>, values: &[i32]) -> Result<Self, Error> {
        Self::new(context, DType::I32, bytemuck::cast_slice(values))
    }

    fn new(context: Option<&Context>, dtype: DType, bytes: &[u8]) -> Result<Self, Error> {
        let mut words = vec![0u128; bytes.len().div_ceil(size_of::<u128>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        let device = match context {
            Some(context) => Some(DeviceMemory::from_slice(context, &words)?),
            None => None,
        };
        Ok(Self {
            dtype,
            len: bytes.len() / dtype.size_of(),
            words,
            device,
        })
    }

    /// A read-only tensor.
    pub fn tensor(&self, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        match &self.device {
            Some(memory) => memory.tensor(self.dtype, dims),
            None => {
                let address = self.words.as_ptr().expose_provenance() as u64;
                Tensor::new(address, self.dtype, dims, self.len, Memory::Host, false)
            }
        }
    }

    /// A writable tensor.
    pub fn tensor_mut(&mut self, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        match &mut self.device {
            Some(memory) => memory.tensor_mut(self.dtype, dims),
            None => {
                let address = self.words.as_mut_ptr().expose_provenance() as u64;
                Tensor::new(address, self.dtype, dims, self.len, Memory::Host, true)
            }
        }
    }

    /// Copies the elements back from the GPU.
    pub fn fetch(&mut self) -> Result<(), Error> {
        match &self.device {
            Some(memory) => memory.read(&mut self.words),
            None => Ok(()),
        }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn bytes(&self) -> &[u8] {
        let bytes = bytemuck::cast_slice(&self.words);
        &bytes[..self.len * self.dtype.size_of()]
    }

    /// Inverts bit number `bit` (0 is the lowest) of an element that the simulator has written.
    #[cfg(test)]
    pub fn spoil(&mut self, element: usize, bit: usize) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes[element * self.dtype.size_of() + bit / 8] ^= 1 << (bit % 8);
    }

    /// Values of the elements, which are floats.
    pub fn values(&self) -> Vec<f64> {
        let bytes = self.bytes();
        let halves = |value: fn(u16) -> f64| -> Vec<f64> {
            let (pairs, _) = bytes.as_chunks();
            let bits = pairs.iter().map(|&pair| u16::from_ne_bytes(pair));
            bits.map(value).collect()
        };
        match self.dtype {
            DType::Bf16 => halves(|bits| bf16::from_bits(bits).to_f64()),
            DType::F16 => halves(|bits| f16::from_bits(bits).to_f64()),
            _ => {
                let (quads, _) = bytes.as_chunks();
                let floats = quads.iter().map(|&quad| f32::from_ne_bytes(quad));
                floats.map(f64::from).collect()
            }
        }
    }
}
