//! Runs the kernel that calls every primitive once: proof that the GPU and the simulator agree.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::kernels::device_contract::{
    DeviceContractConstants, DeviceContractParams, RESULTS,
};
use gated_delta_kernels::launch::LaunchShape;

use crate::error::Error;
use crate::library::Library;
use crate::shapes::named;
use crate::stream::StreamRef;
use crate::tensor::{DType, Tensor};

impl Library {
    /// Enqueues one block that calls every device primitive on `input`, `[64]` f32, and stores what they return
    /// in `output`, `[RESULTS, 64]` u32; `number` is passed as a load-time constant.
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
        let tensors = [named("input", &input), named("output", &output)];
        let [input_named, output_named] = tensors;
        let input_view = input_named.dims(&["threads"], &[threads])?;
        input_named.dtype(&[DType::F32], "f32")?;
        let output_view = output_named.dims(&["results", "threads"], &[RESULTS.len(), threads])?;
        output_named.dtype(&[DType::U32], "u32")?;
        self.check_memory(&tensors.map(Some), |name| name == "output")?;
        input_view.inner_contiguous(1, "contiguous")?;
        input_view.wide_only()?;
        output_view.inner_contiguous(2, "contiguous")?;
        output_view.wide_only()?;
        let constants = DeviceContractConstants { number };
        let shape = LaunchShape {
            grid: [1; 3],
            block: entry.block(),
            shared_bytes: entry.shared_bytes(),
        };
        let params = DeviceContractParams {
            input: input.address(),
            output: output.address(),
        };
        // SAFETY: the caller's promise; the tensors have the kernel's shapes.
        unsafe {
            self.launch_entry(
                stream,
                entry,
                constants.words(),
                shape,
                bytemuck::bytes_of(&params),
                &tensors.map(Some),
            )
        }?;
        Ok(())
    }
}
