//! The part of an engine that owns memory and a stream: on a GPU, or in host memory for the simulator.

use std::marker::PhantomData;

use anyhow::Result;
use bytemuck::Pod;
use gated_delta::driver::{Context, Device, DeviceMemory, Stream};
use gated_delta::{DeviceElement, Error, Library, StreamRef, Tensor};

/// Kernels, and a stream to launch them on.
pub struct Engine {
    /// The kernels of this place.
    pub library: Library,
    stream: Option<Stream>,
}

impl Engine {
    /// On a GPU.
    pub fn on(device: Device) -> Result<Self> {
        let context = Context::primary(device)?;
        let (library, stream) = (Library::new(&context), Some(Stream::new(&context)?));
        Ok(Self { library, stream })
    }

    /// On the first GPU, or where there is none in the simulator; and whether it is there.
    pub fn first() -> Result<(Self, bool)> {
        Ok(match super::gpu()? {
            Some(device) => (Self::on(device)?, false),
            None => {
                println!("no GPU: in the simulator");
                (Self::simulated(), true)
            }
        })
    }

    /// In the simulator.
    pub fn simulated() -> Self {
        Self {
            library: Library::simulator(),
            stream: None,
        }
    }

    /// Where launches go.
    pub fn stream(&self) -> StreamRef<'_> {
        self.stream
            .as_ref()
            .map_or(StreamRef::default_stream(), Stream::as_ref)
    }

    /// The stream of a GPU.
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

    /// A copy of `data` in this engine's memory.
    pub fn buffer<T: Pod>(&self, data: &[T]) -> Result<Buffer<T>> {
        Ok(match self.library.context() {
            Some(context) => Buffer::Device(DeviceMemory::from_slice(context, data)?, PhantomData),
            None => Buffer::Host(data.to_vec()),
        })
    }
}

/// Memory of an engine.
pub enum Buffer<T> {
    /// Of a GPU.
    Device(DeviceMemory, PhantomData<T>),
    /// For the simulator.
    Host(Vec<T>),
}

impl<T: DeviceElement + Pod> Buffer<T> {
    /// A tensor at its start, read only.
    pub fn tensor(&self, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        match self {
            Self::Device(memory, _) => memory.tensor(T::DTYPE, dims),
            Self::Host(data) => Tensor::from_slice(data, dims),
        }
    }

    /// A tensor at its start, for kernels to write.
    pub fn tensor_mut(&mut self, dims: &[usize]) -> Result<Tensor<'_>, Error> {
        match self {
            Self::Device(memory, _) => memory.tensor_mut(T::DTYPE, dims),
            Self::Host(data) => Tensor::from_slice_mut(data, dims),
        }
    }

    /// Its contents, once the engine has waited for what writes them.
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

    /// Overwrites its start, while no launch that uses it is under way.
    pub fn write(&mut self, data: &[T]) -> Result<()> {
        match self {
            Self::Device(memory, _) => memory.write(data)?,
            Self::Host(old) => old[..data.len()].copy_from_slice(data),
        }
        Ok(())
    }
}
