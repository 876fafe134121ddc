//! A tensor for every buffer set, in one allocation: on the GPU, or on the host for the simulator.

use std::cell::UnsafeCell;
use std::slice;

use anyhow::{Context as _, Result, ensure};
use gated_delta::driver::{Context, DeviceMemory};
use gated_delta::{DType, DeviceElement, Error, Library, Tensor};
use gated_delta_harness::timing::cold_sets;
use half::{bf16, f16};

/// Alignment of each set, in bytes.
const ALIGNMENT: usize = 256;

/// One tensor for each buffer set.
pub struct Slab {
    memory: Memory,
    /// Bytes of one tensor.
    bytes: usize,
    /// Bytes from one set to the next.
    stride: usize,
    sets: usize,
}

enum Memory {
    Device(Context, DeviceMemory),
    Host(Box<[UnsafeCell<u128>]>),
}

/// Number of buffer sets that a cold measurement rotates over, for sets of `state_bytes` each. One in the simulator, which times nothing.
pub fn sets_for(library: &Library, state_bytes: usize) -> usize {
    match library.context() {
        Some(_) => cold_sets(state_bytes),
        None => 1,
    }
}

impl Slab {
    /// `sets` tensors of `bytes` on the device of `library`. Every byte is 0xFF: floats are NaN, indices −1.
    pub fn new(library: &Library, sets: usize, bytes: usize) -> Result<Self> {
        let stride = bytes.next_multiple_of(ALIGNMENT);
        let memory = match library.context() {
            Some(context) => {
                let mut memory = DeviceMemory::allocate(context, sets * stride)?;
                memory.fill(0xff)?;
                Memory::Device(context.clone(), memory)
            }
            None => {
                let words = sets * stride / size_of::<u128>();
                Memory::Host((0..words).map(|_| UnsafeCell::new(u128::MAX)).collect())
            }
        };
        Ok(Self {
            memory,
            bytes,
            stride,
            sets,
        })
    }

    /// `sets` tensors of `bytes`, each filled with copies of `unit`, the last copy truncated.
    pub fn filled(library: &Library, sets: usize, bytes: usize, unit: &[u8]) -> Result<Self> {
        let mut slab = Self::new(library, sets, bytes)?;
        slab.refill(unit)?;
        let stride = slab.stride;
        slab.repeat(stride, sets * stride)?;
        Ok(slab)
    }

    /// Bytes of one tensor.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fills the first tensor with copies of `unit` again.
    pub fn refill(&mut self, unit: &[u8]) -> Result<()> {
        let unit = &unit[..unit.len().min(self.bytes)];
        match &mut self.memory {
            Memory::Device(_, memory) => memory.write(unit)?,
            Memory::Host(words) => host_bytes(words)[..unit.len()].copy_from_slice(unit),
        }
        self.repeat(unit.len(), self.bytes)
    }

    /// Sets every byte of the first tensor to 0xFF again.
    pub fn spoil(&mut self) -> Result<()> {
        self.refill(&[0xff; ALIGNMENT])
    }

    /// Repeats the first `period` bytes up to `end`.
    fn repeat(&mut self, period: usize, end: usize) -> Result<()> {
        let mut done = period;
        while 0 < done && done < end {
            let bytes = done.min(end - done);
            match &mut self.memory {
                Memory::Device(context, memory) => {
                    let start = memory.address();
                    let _current = context.enter()?;
                    // SAFETY: both parts are within the memory, and do not overlap.
                    unsafe {
                        context
                            .driver()
                            .memcpy_dtod(start + done as u64, start, bytes)
                    }?;
                }
                Memory::Host(words) => host_bytes(words).copy_within(..bytes, done),
            }
            done += bytes;
        }
        if let Memory::Device(context, _) = &self.memory {
            context.synchronize()?;
        }
        Ok(())
    }

    /// Reads `bytes` of the first tensor, from `offset` on. No launch that writes them may be running.
    pub fn read(&self, offset: usize, bytes: usize) -> Result<Vec<u8>> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes);
        ensure!(
            end.is_some(),
            "{bytes} bytes at {offset} are not within {}",
            self.bytes
        );
        let mut data = vec![0; bytes];
        match &self.memory {
            Memory::Device(context, memory) => {
                let _current = context.enter()?;
                // SAFETY: source and destination have that many bytes.
                unsafe {
                    let (to, from) = (data.as_mut_ptr().cast(), memory.address() + offset as u64);
                    context.driver().memcpy_dtoh(to, from, bytes)
                }?;
            }
            Memory::Host(words) => {
                let from = words.as_ptr().cast::<u8>().wrapping_add(offset);
                // SAFETY: the words have that many bytes there, and a simulated launch is done when it returns.
                data.copy_from_slice(unsafe { slice::from_raw_parts(from, bytes) });
            }
        }
        Ok(data)
    }

    /// The tensor of a set, writable.
    pub fn tensor(&self, set: usize, dtype: DType, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        let offset = set % self.sets * self.stride;
        match &self.memory {
            // SAFETY: the memory is live while it is borrowed, and launches on it come after its writes in stream order.
            Memory::Device(_, memory) => unsafe {
                Tensor::from_raw(memory.address() + offset as u64, dtype, dims)
            },
            Memory::Host(words) => {
                let words = &words[offset / size_of::<u128>()..];
                match dtype {
                    DType::Bf16 => host_tensor::<bf16>(words, dims),
                    DType::F16 => host_tensor::<f16>(words, dims),
                    DType::F32 => host_tensor::<f32>(words, dims),
                    _ => host_tensor::<i32>(words, dims),
                }
            }
        }
    }
}

fn host_bytes(words: &mut [UnsafeCell<u128>]) -> &mut [u8] {
    let bytes = size_of_val(words);
    // SAFETY: the words are borrowed exclusively and have that many bytes; any bit pattern is valid.
    unsafe { slice::from_raw_parts_mut(words.as_mut_ptr().cast(), bytes) }
}

fn host_tensor<'a, T: DeviceElement>(
    words: &'a [UnsafeCell<u128>],
    dims: &[usize],
) -> Result<Tensor<'a>, Error> {
    let elements = size_of_val(words) / size_of::<T>();
    // SAFETY: cells may be written through a shared borrow, and any bit pattern is a `T`. The tensor keeps an address, and only the
    // simulator uses it, one launch at a time.
    let slice =
        unsafe { slice::from_raw_parts_mut(UnsafeCell::raw_get(words.as_ptr()).cast(), elements) };
    Tensor::from_slice_mut::<T>(slice, dims)
}

/// A slab with copies of `values`.
pub fn upload<T: bytemuck::NoUninit>(library: &Library, sets: usize, values: &[T]) -> Result<Slab> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    Slab::filled(library, sets, bytes.len(), bytes).context("a tensor of the cell")
}
