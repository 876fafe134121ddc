//! Runs the kernels that call every primitive once: proof that the GPU and the simulator agree.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::kernels::device_contract::{
    CLUSTER_BLOCKS, CLUSTER_RESULTS, DeviceContractConstants, DeviceContractParams, RESULTS,
    WARPGROUP_RESULTS,
};
use gated_delta_kernels::launch::LaunchShape;

use crate::error::Error;
use crate::library::Library;
use crate::shapes::{Named, named};
use crate::stream::StreamRef;
use crate::tensor::{DType, Tensor};

impl Library {
    /// Enqueues one block that calls every device primitive, but those of clusters, on `input`, `[64]` f32, and stores
    /// what they return in `output`, `[RESULTS, 64]` u32; `number` is passed as a load-time constant.
    ///
    /// # Errors
    /// Those of the tensors, named.
    ///
    /// # Safety
    /// The tensors stay valid, and `output` is used by nobody else, until `stream` has passed the launch.
    #[doc(hidden)]
    pub unsafe fn device_contract(
        &self,
        stream: StreamRef<'_>,
        input: Tensor<'_>,
        output: Tensor<'_>,
        number: u32,
    ) -> Result<(), Error> {
        let entry = Entry::device_contract;
        let threads = entry.block() as usize;
        let (input, output) = (named("input", &input), named("output", &output));
        input.dtype(&[DType::F32], "f32")?;
        check_words(input, &["threads"], [threads])?;
        output.dtype(&[DType::U32], "u32")?;
        check_words(output, &["results", "threads"], [RESULTS.len(), threads])?;
        // SAFETY: the caller's promise; the tensors have the kernel's shapes.
        unsafe { self.launch_contract(stream, entry, 1, [input, output], number) }
    }

    /// Enqueues two clusters of blocks, which exchange `input`, `[CLUSTER_BLOCKS, 64]` u32, and store what they get in
    /// `output`, `[CLUSTER_RESULTS, CLUSTER_BLOCKS, 64]` u32; `number` is passed as a load-time constant.
    ///
    /// # Errors
    /// Those of the tensors, named; those of a GPU without clusters.
    ///
    /// # Safety
    /// As [`Library::device_contract`]'s.
    #[doc(hidden)]
    pub unsafe fn cluster_contract(
        &self,
        stream: StreamRef<'_>,
        input: Tensor<'_>,
        output: Tensor<'_>,
        number: u32,
    ) -> Result<(), Error> {
        let entry = Entry::cluster_contract;
        let dims = [CLUSTER_BLOCKS as usize, entry.block() as usize];
        let (input, output) = (named("input", &input), named("output", &output));
        input.dtype(&[DType::U32], "u32")?;
        check_words(input, &["blocks", "threads"], dims)?;
        let [blocks, threads] = dims;
        let results = [CLUSTER_RESULTS.len(), blocks, threads];
        output.dtype(&[DType::U32], "u32")?;
        check_words(output, &["results", "blocks", "threads"], results)?;
        // SAFETY: the caller's promise; the tensors have the kernel's shapes.
        unsafe { self.launch_contract(stream, entry, CLUSTER_BLOCKS, [input, output], number) }
    }

    /// Enqueues one block whose warpgroup multiplies matrices that it makes up, and stores the sums in `output`,
    /// `[WARPGROUP_RESULTS, 128]` u32, with what it copies of `input`, `[128, 4]` u32.
    ///
    /// # Errors
    /// Those of the tensors, named; those of a GPU whose warpgroups do not multiply.
    ///
    /// # Safety
    /// As [`Library::device_contract`]'s.
    #[doc(hidden)]
    pub unsafe fn warpgroup_contract(
        &self,
        stream: StreamRef<'_>,
        input: Tensor<'_>,
        output: Tensor<'_>,
    ) -> Result<(), Error> {
        let entry = Entry::warpgroup_contract;
        let (input, output) = (named("input", &input), named("output", &output));
        for tensor in [input, output] {
            tensor.dtype(&[DType::U32], "u32")?;
        }
        let words = [entry.block() as usize, 4];
        check_words(input, &["threads", "words"], words)?;
        let dims = [WARPGROUP_RESULTS as usize, entry.block() as usize];
        check_words(output, &["results", "threads"], dims)?;
        // SAFETY: the caller's promise; the tensors have the kernel's shapes.
        unsafe { self.launch_contract(stream, entry, 1, [input, output], 0) }
    }

    /// # Safety
    /// Those of the two tensors that `entry` reads and writes: they have its shapes, and outlive the launch.
    unsafe fn launch_contract(
        &self,
        stream: StreamRef<'_>,
        entry: Entry,
        blocks: u32,
        tensors: [Named<'_>; 2],
        number: u32,
    ) -> Result<(), Error> {
        let named = tensors.map(Some);
        self.check_memory(&named, |at| at == 1)?;
        let constants = DeviceContractConstants { number };
        let shape = LaunchShape {
            grid: [blocks, 1, 1],
            block: entry.block(),
            shared_bytes: entry.shared_bytes(),
            cluster: entry.cluster(),
            overlaps: false,
        };
        let [input, output] = tensors.map(|named| named.tensor.address());
        let params = DeviceContractParams { input, output };
        // SAFETY: the caller's promise.
        unsafe {
            self.launch_entry(
                stream,
                entry,
                constants.words(),
                shape,
                bytemuck::bytes_of(&params),
                &named,
            )
        }?;
        Ok(())
    }
}

/// `tensor` has dims of `sizes`, which `letters` name, lies in one piece, and can be read in the widest words.
fn check_words<const N: usize>(
    tensor: Named<'_>,
    letters: &'static [&'static str; N],
    sizes: [usize; N],
) -> Result<(), Error> {
    let view = tensor.dims(letters, &sizes)?;
    view.inner_contiguous(N, "contiguous")?;
    view.wide_only()
}
