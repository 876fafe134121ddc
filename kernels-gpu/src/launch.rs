//! What a kernel is to the host and the simulator: parameters, constants, and the shape of a launch.

use crate::constants::Constants;

/// A kernel body with its compile-time parameters filled in.
pub trait Kernel {
    /// The single, by-value argument.
    type Params: bytemuck::Pod;
    /// What is written into the PTX when it is loaded.
    type Constants: Constants;
    /// Threads of a block (x only), a multiple of 32.
    const BLOCK: u32;
    /// Blocks of a multiprocessor that registers must leave room for; 0 leaves it to the assembler.
    const MIN_BLOCKS_PER_SM: u32 = 0;
    /// Blocks that share one head's state.
    const TILES: u32;
    /// Dynamic shared memory of a block, bytes.
    const SHARED_BYTES: u32 = 0;
    /// What it grows by with every token of a row, bytes.
    const SHARED_BYTES_PER_TOKEN: u32 = 0;

    /// The body, as run by every thread.
    ///
    /// # Safety
    /// `params` and the load-time constants describe live tensors.
    unsafe fn run(params: &Self::Params);
}

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block (x only), a multiple of 32.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
}
