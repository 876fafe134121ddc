//! The part of an engine that owns memory and a stream, on a GPU or, for the simulator, in host memory.

use std::marker::PhantomData;

use anyhow::Result;
use bytemuck::Pod;
use gated_delta::driver::{Context, Device, DeviceMemory, Stream};
use gated_delta::{DeviceElement, Error, Library, StreamRef, Tensor};

/// A library, and a stream to launch on.
pub struct Engine {
    /// The kernels of the GPU or the simulator.
    pub library: Library,
    stream: Option<Stream>,
}

impl Engine {
    /// An engine on a GPU.
    pub fn on(device: Device) -> Result<Self> {
        let context = Context::primary(device)?;
        let (library, stream) = (Library::new(&context), Some(Stream::new(&context)?));
        Ok(Self { library, stream })
    }

    /// An engine on the first GPU, or in the simulator if there is no GPU. Also returns whether it is the simulator.
    pub fn first() -> Result<(Self, bool)> {
        Ok(match super::gpu()? {
            Some(device) => (Self::on(device)?, false),
            None => {
                println!("no GPU: in the simulator");
                (Self::simulated(), true)
            }
        })
    }

    /// An engine in the simulator.
    pub fn simulated() -> Self {
        Self {
            library: Library::simulator(),
            stream: None,
        }
    }

    /// The stream for launches.
    pub fn stream(&self) -> StreamRef<'_> {
        self.stream
            .as_ref()
            .map_or(StreamRef::default_stream(), Stream::as_ref)
    }

    /// The stream, if the engine is on a GPU.
    pub fn gpu_stream(&self) -> Option<&Stream> {
        self.stream.as_ref()
    }

    /// Waits for all launches.
    pub fn synchronize(&self) -> Result<()> {
        match &self.stream {
            Some(stream) => Ok(stream.synchronize()?),
            None => Ok(()),
        }
    }

    /// Copies `data` to the engine's memory.
    pub fn buffer<T: Pod>(&self, data: &[T]) -> Result<Buffer<T>> {
        Ok(match self.library.context() {
            Some(context) => Buffer::Device(DeviceMemory::from_slice(context, data)?, PhantomData),
            None => Buffer::Host(data.to_vec()),
        })
    }
}

/// An allocation of an engine.
pub enum Buffer<T> {
    /// GPU memory.
    Device(DeviceMemory, PhantomData<T>),
    /// Host memory, for the simulator.
    Host(Vec<T>),
}

impl<T: DeviceElement + Pod> Buffer<T> {
    /// A read-only tensor at the start of the buffer.
    pub fn tensor(&self, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        match self {
            Self::Device(memory, _) => memory.tensor(T::DTYPE, dims),
            Self::Host(data) => Tensor::from_slice(data, dims),
        }
    }

    /// A writable tensor at the start of the buffer.
    pub fn tensor_mut(&mut self, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        match self {
            Self::Device(memory, _) => memory.tensor_mut(T::DTYPE, dims),
            Self::Host(data) => Tensor::from_slice_mut(data, dims),
        }
    }

    /// Contents of the buffer. Every launch that writes it must have ended.
    pub fn read(&self) -> Result<Vec<T>> {
        match self {
            Self::Device(memory, _) => {
                let mut data = vec![T::zeroed(); memory.bytes() / size_of::<T>()];
                memory.read(&mut data)?;
                Ok(data)
            }
            Self::Host(data) => Ok(data.clone()),
        }
    }

    /// Overwrites the start of the buffer. No launch may be using it.
    pub fn write(&mut self, data: &[T]) -> Result<()> {
        match self {
            Self::Device(memory, _) => memory.write(data)?,
            Self::Host(old) => old[..data.len()].copy_from_slice(data),
        }
        Ok(())
    }
}
