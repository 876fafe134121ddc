//! The floor under every operator: states read, multiplied by a constant and written in place, nothing else.
//!
//! Grid     x = chunks of 2048 VECTORS bytes
//! Threads  block 128; a thread owns VECTORS vectors of 16 bytes, 2048 bytes apart
//! Cost     2 bytes moved per byte of state: what a perfect in-place kernel would take
//! Truth    tests/gpu/device_contract.rs

use crate::constants::constants;
use crate::device::global::{load_state_b128, store_state_b128};
use crate::device::thread::{block_idx_x, thread_idx_x};
use crate::launch::{Description, Kernel};
use crate::math::each::each;

const BLOCK: u32 = 128;
/// Bytes that a block of the 2-vector variant works on.
pub const BLOCK_BYTES: u64 = 2 * BLOCK as u64 * 16;

/// Address of the states.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct StateFloorParams {
    /// f32 states, a multiple of [`BLOCK_BYTES`], 16-byte aligned; written.
    pub states: u64,
}

constants! {
    /// The constant of a measurement.
    pub struct StateFloorConstants {
        /// Bits of the f32 that every state is multiplied by.
        factor = "GD_FACTOR",
    }
}

/// `VECTORS` vectors of 16 bytes in flight per thread.
pub struct InPlace<const VECTORS: usize>;

impl<const VECTORS: usize> Kernel for InPlace<VECTORS> {
    type Params = StateFloorParams;
    type Constants = StateFloorConstants;
    const DESCRIPTION: Description = Description::new(BLOCK);

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &StateFloorParams) {
        let factor = f32::from_bits(StateFloorConstants::get().factor);
        let first = params.states
            + block_idx_x() as u64 * (VECTORS as u64 * BLOCK as u64 * 16)
            + thread_idx_x() as u64 * 16;
        let address = |vector: usize| first + vector as u64 * (BLOCK as u64 * 16);
        let mut raw = [[0; 4]; VECTORS];
        // SAFETY: the caller's promise; the vectors are this thread's own.
        unsafe {
            each!(vector in 0..VECTORS => raw[vector] = load_state_b128(address(vector), true));
            each!(vector in 0..VECTORS => {
                let [x, y, z, w] = raw[vector];
                let scaled = |bits: u32| (f32::from_bits(bits) * factor).to_bits();
                store_state_b128(address(vector), [scaled(x), scaled(y), scaled(z), scaled(w)]);
            });
        }
    }
}
