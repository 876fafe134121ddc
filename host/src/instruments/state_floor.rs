//! The floor: a kernel that only reads and writes states in place. The benches compare other kernels with it.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::kernels::state_floor::{
    BLOCK_BYTES, StateFloorConstants, StateFloorParams,
};
use gated_delta_kernels::launch::LaunchShape;

use crate::error::Error;
use crate::library::Library;
use crate::stream::StreamRef;
use crate::tensor::{DType, Tensor};
use crate::tensor_checks::named;

impl Library {
    /// Enqueues a multiplication by `factor` of f32 `states`, `[n]`, in place.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Stride`], [`Error::Alignment`], [`Error::Memory`] and
    /// [`Error::ReadOnly`] for `states`; [`Error::Range`] if their size is no multiple of 4096 bytes.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, `states` stay valid and nobody else uses them.
    #[doc(hidden)]
    pub unsafe fn state_floor(
        &self,
        stream: StreamRef<'_>,
        states: Tensor<'_>,
        factor: f32,
    ) -> Result<(), Error> {
        let tensor = named("states", &states);
        let view = tensor.rank::<1>("[n]")?;
        tensor.dtype(&[DType::F32], "f32")?;
        view.inner_contiguous(1, "contiguous")?;
        self.check_memory(&[Some(tensor)], |_| true)?;
        view.wide_only()?;
        let bytes = view.dims[0] as u64 * 4;
        let blocks = u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        if !bytes.is_multiple_of(BLOCK_BYTES) || blocks > i32::MAX as u32 {
            return Err(Error::Range {
                what: "bytes of states",
                wanted: format!("a multiple of {BLOCK_BYTES} below 2^31 of them"),
                got: bytes.to_string(),
            });
        }
        if blocks == 0 {
            return Ok(());
        }
        let entry = Entry::state_floor;
        let constants = StateFloorConstants {
            factor: factor.to_bits(),
        };
        let shape = LaunchShape {
            grid: [blocks, 1, 1],
            block: entry.block(),
            shared_bytes: entry.shared_bytes(),
            cluster: entry.cluster(),
            overlaps: false,
        };
        let params = StateFloorParams {
            states: states.address(),
        };
        // SAFETY: the caller's promise; the blocks cover the states and no more.
        unsafe {
            self.launch_entry(
                stream,
                entry,
                constants.words(),
                shape,
                bytemuck::bytes_of(&params),
                &[Some(tensor)],
            )
        }?;
        Ok(())
    }
}
