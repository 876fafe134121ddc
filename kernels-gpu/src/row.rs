//! What a block works on.

use crate::device::thread::{block_idx_x, block_idx_y, block_idx_z};
use crate::math::elements::bytes_of;

/// A tile of row b and value head hv, whose query/key head is h.
#[derive(Clone, Copy)]
pub struct Row {
    /// Sequence.
    pub b: u32,
    /// Query/key head.
    pub h: u32,
    /// Value head.
    pub hv: u32,
    /// Part of the head's state.
    pub tile: u32,
}

impl Row {
    /// Of this block, in a grid x = tile + `tiles` · r, y, z = b, where hv = y · ratio + r (grouped, y = h) or
    /// r · H + y (tiled).
    #[inline(always)]
    pub fn of_block(heads: u32, ratio: u32, tiled: bool, tiles: u32) -> Self {
        let (x, h, b) = (block_idx_x(), block_idx_y(), block_idx_z());
        let (tile, r) = (x % tiles, x / tiles);
        let hv = if tiled { r * heads + h } else { h * ratio + r };
        Self { b, h, hv, tile }
    }

    /// Address of element `first` of `head` in this row of a tensor with the strides `row` and `head_stride`.
    #[inline(always)]
    pub fn at(self, base: u64, row: u32, head: u32, first: u32, element: u32) -> u64 {
        base + (self.b as u64 * row as u64 + head as u64) * bytes_of(element) as u64
            + (first * bytes_of(element)) as u64
    }
}
