//! Runs problems on a GPU.

use std::collections::BTreeMap;

use gated_delta::driver::{Context, Device, DeviceMemory, Stream};
use gated_delta::{Entry, Library};

use crate::error::Error;
use crate::problem::{Problem, Views};

/// A GPU and the library opened on it.
pub struct Cuda {
    library: Library,
    context: Context,
    stream: Stream,
    name: String,
}

/// Copies of a problem's tensors in GPU memory.
pub(crate) struct Upload(BTreeMap<&'static str, DeviceMemory>);

impl Cuda {
    /// The first GPU of the driver, with the kernels of a GPU of compute capability `machine` if that is given.
    ///
    /// # Errors
    /// The reason that there is none; for a GPU that lacks what such a GPU has.
    pub fn first(machine: Option<(u32, u32)>) -> Result<Self, Error> {
        let device = Device::get(0)?;
        let context = Context::primary(device)?;
        let library = match machine {
            Some(machine) => Library::for_capability(&context, machine)?,
            None => Library::new(&context),
        };
        Ok(Self {
            library,
            stream: Stream::new(&context)?,
            name: device.name()?,
            context,
        })
    }

    /// Name of the GPU.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The library on this GPU.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The GPU's context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The stream that problems run on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Runs a problem that [`Problem::validate`] has passed, with `variant` or the one that is selected on this GPU. Returns the problem
    /// after the launch, and the variant.
    pub(crate) fn run(
        &self,
        problem: &Problem,
        variant: Option<Entry>,
    ) -> Result<(Problem, Entry), Error> {
        let upload = Upload::new(&self.context, problem)?;
        let work = problem.arguments(&upload.views(problem)?)?.work()?;
        let entry = match variant {
            Some(variant) => variant,
            None => self.library.selected(&*work)?,
        };
        // SAFETY: the memory outlives the launch, which is waited for, and has no other user; the problem has been validated: no two rows
        // write the same slot.
        unsafe {
            self.library
                .launch_with(self.stream.as_ref(), &*work, entry)
        }?;
        self.stream.synchronize()?;
        let mut after = problem.clone();
        for (name, tensor) in &mut after.tensors {
            if problem.writes(name)
                && let Some(memory) = upload.0.get(name)
            {
                memory.read(tensor.bytes_mut())?;
            }
        }
        Ok((after, entry))
    }
}

impl Upload {
    /// Copies the problem's tensors to the GPU.
    pub(crate) fn new(context: &Context, problem: &Problem) -> Result<Self, Error> {
        let memory = problem
            .tensors
            .iter()
            .map(|(&name, tensor)| Ok((name, DeviceMemory::from_slice(context, tensor.bytes())?)))
            .collect::<Result<_, gated_delta::Error>>()?;
        Ok(Self(memory))
    }

    /// Views of the copies.
    pub(crate) fn views(&self, problem: &Problem) -> Result<Views<'_>, Error> {
        let views = self
            .0
            .iter()
            .filter_map(|(name, memory)| Some((*name, memory, problem.tensors.get(name)?)));
        let views = views.map(|(name, memory, tensor)| {
            // SAFETY: the memory is a copy of the tensor's bytes that lives as long as this borrow.
            Ok((name, unsafe { tensor.device_view(memory.address()) }?))
        });
        Ok(views.collect::<Result<_, gated_delta::Error>>()?)
    }
}
