//! Runs the kernels that call every device primitive once. Tests compare the GPU's results with the simulator's.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::kernels::device_contract::{
    CLUSTER_BLOCKS, CLUSTER_RESULTS, DeviceContractConstants, DeviceContractParams, RESULTS,
    WARPGROUP_RESULTS,
};
use gated_delta_kernels::launch::LaunchShape;

use crate::error::Error;
use crate::library::Library;
use crate::stream::StreamRef;
use crate::tensor::{DType, Tensor};
use crate::tensor_checks::{Named, named};

impl Library {
    /// Enqueues one block that calls every device primitive except those of clusters on `input`, `[64]` f32. The block stores the
    /// results in `output`, `[RESULTS, 64]` u32. `number` is passed as a load-time constant.
    ///
    /// # Errors
    /// The errors of the tensors, by name.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid and nobody else uses `output`.
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

    /// Enqueues two clusters of blocks, which exchange `input`, `[CLUSTER_BLOCKS, 64]` u32. The blocks store what they receive in
    /// `output`, `[CLUSTER_RESULTS, CLUSTER_BLOCKS, 64]` u32. `number` is passed as a load-time constant.
    ///
    /// # Errors
    /// The errors of the tensors, by name; the errors of a GPU without clusters.
    ///
    /// # Safety
    /// As for [`Library::device_contract`].
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

    /// Enqueues one block. Its warpgroup multiplies matrices that it generates, and stores the sums in `output`,
    /// `[WARPGROUP_RESULTS, 128]` u32, with its copies of `input`, `[128, 4]` u32.
    ///
    /// # Errors
    /// The errors of the tensors, by name; the errors of a GPU whose warpgroups do not multiply.
    ///
    /// # Safety
    /// As for [`Library::device_contract`].
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
    /// The two tensors that `entry` reads and writes have its shapes and outlive the launch.
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

/// Checks that `tensor` has the dims `sizes`, which `letters` name, is contiguous, and can be read by the widest loads.
fn check_words<const N: usize>(
    tensor: Named<'_>,
    letters: &'static [&'static str; N],
    sizes: [usize; N],
) -> Result<(), Error> {
    let view = tensor.dims(letters, &sizes)?;
    view.inner_contiguous(N, "contiguous")?;
    view.wide_only()
}
