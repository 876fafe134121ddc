//! Grid, block and shared memory of a launch.

use gated_delta_kernels::launch::LaunchShape;

use crate::Entry;
use crate::step::gpu::Gpu;
use crate::step::lengths::Lengths;
use crate::step::problem::Problem;

/// Shared memory of a block in bytes that leaves a multiprocessor no room for a second such block.
const ALONE_BYTES: u32 = 116 * 1024;

/// Shared memory of a block in bytes that leaves a multiprocessor no room for any other block. A scan that runs concurrently with
/// an intra-chunk pass uses it to keep its multiprocessors to itself.
pub(crate) const WHOLE_BYTES: u32 = 227 * 1024;

/// Number of blocks of a launch.
pub fn blocks_of(shape: &LaunchShape) -> u64 {
    shape.grid.into_iter().map(u64::from).product()
}

/// Whether an entry processes the rows of one token of a prefill.
fn takes_singles(entry: Entry) -> bool {
    let computes = entry.computes();
    computes.is_some_and(|computes| computes.family.takes_singles())
}

impl Problem {
    /// The launch shape of the main entry on a GPU.
    pub fn shape(&self, entry: Entry, lengths: &Lengths, gpu: Gpu) -> LaunchShape {
        let (c, batch) = (&self.constants, lengths.rows);
        // A block has one value head, all value heads of a query/key head, or two if the entry allows it and blocks with one value
        // head would need more than one wave.
        let take_turns = batch.saturating_mul(self.value_heads()) > gpu.multiprocessors;
        let across = match entry.max_heads() {
            1 if entry.makes_pairs() && c.ratio.is_multiple_of(2) && take_turns => c.ratio / 2,
            1 => c.ratio,
            _ => 1,
        };
        let grid = if takes_singles(entry) {
            [self.value_heads(), 1, batch]
        } else if entry.has_cluster_of_heads() {
            [entry.tiles(), c.h * c.ratio, batch]
        } else {
            [entry.tiles() * across, c.h, batch]
        };
        self.shape_of(entry, grid)
    }

    /// The launch shape of a grid of blocks of `entry`.
    pub fn shape_of(&self, entry: Entry, grid: [u32; 3]) -> LaunchShape {
        let ratio = self.constants.ratio;
        LaunchShape {
            grid,
            block: entry.block_of(ratio),
            shared_bytes: self.shared_bytes(entry),
            cluster: entry.cluster_of(ratio),
            overlaps: false,
        }
    }

    /// The shape of a launch on a GPU. The launch overlaps the previous launch if the entry allows it. If the whole grid fits in
    /// one wave, the launch requests enough shared memory that a multiprocessor holds only one of its blocks, even if the launch
    /// starts early. If the GPU `is_shared` with the next launch, it requests enough that no block of the next launch fits on the
    /// same multiprocessor.
    pub fn shape_on(
        &self,
        entry: Entry,
        shape: LaunchShape,
        gpu: Gpu,
        is_shared: bool,
    ) -> LaunchShape {
        if !entry.overlaps() {
            return shape;
        }
        let mut shared_bytes = shape.shared_bytes;
        if blocks_of(&shape) <= u64::from(gpu.multiprocessors) {
            let alone = match is_shared {
                true => WHOLE_BYTES,
                false => ALONE_BYTES,
            };
            shared_bytes = shared_bytes.max(alone.min(gpu.shared_bytes));
        }
        LaunchShape {
            shared_bytes,
            overlaps: true,
            ..shape
        }
    }

    /// Dynamic shared memory of a block of `entry` in bytes.
    pub fn shared_bytes(&self, entry: Entry) -> u32 {
        let spare = if self.constants.tokens_are_bf16() {
            entry.shared_bytes_of_lows()
        } else {
            0
        };
        let of_sets = match self.kind.in_sets {
            true => entry.shared_bytes_of_sets(),
            false => 0,
        };
        self.kind.shared_bytes(entry) + of_sets - spare
    }
}
