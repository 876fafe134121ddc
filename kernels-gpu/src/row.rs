//! The row, head and tile that a block works on.

use crate::device::thread::{block_idx_x, block_idx_y, block_idx_z, thread_idx_x};
use crate::math::elements::bytes_of;
use crate::step::StepConstants;

/// A tile of row b and value head hv, whose query/key head is h.
#[derive(Clone, Copy)]
pub struct Row {
    /// Sequence.
    pub b: u32,
    /// Query/key head.
    pub h: u32,
    /// Value head.
    pub hv: u32,
    /// Tile of the head's state.
    pub tile: u32,
}

impl Row {
    /// The row of this block, in a grid x = tile + `tiles` · r, y, z = b, where hv = y · ratio + r (grouped, y = h) or
    /// r · H + y (tiled).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_block(heads: u32, ratio: u32, tiled: bool, tiles: u32) -> Self {
        let (x, h, b) = (block_idx_x(), block_idx_y(), block_idx_z());
        let (tile, r) = (x % tiles, x / tiles);
        let hv = value_head(h, r, heads, ratio, tiled);
        Self { b, h, hv, tile }
    }

    /// The row of this block, in a grid x = tile, y = HV/H · h + r, z = b.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_head_block(heads: u32, ratio: u32, tiled: bool) -> Self {
        let (tile, y, b) = (block_idx_x(), block_idx_y(), block_idx_z());
        let (h, r) = (y / ratio, y % ratio);
        let hv = value_head(h, r, heads, ratio, tiled);
        Self { b, h, hv, tile }
    }

    /// The row of this thread, and the index r of its value head in the block. The block has all value heads of a query/key head,
    /// `threads` threads for each; grid x = tile, y = h, z = b.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_thread(heads: u32, ratio: u32, tiled: bool, threads: u32) -> (Self, u32) {
        let (tile, h, b) = (block_idx_x(), block_idx_y(), block_idx_z());
        let r = thread_idx_x() / threads;
        let hv = value_head(h, r, heads, ratio, tiled);
        (Self { b, h, hv, tile }, r)
    }

    /// All of value head `hv` of row `b`, for a block that has the whole head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_head(c: &StepConstants, b: u32, hv: u32) -> Self {
        let h = if c.tiled != 0 { hv % c.h } else { hv / c.ratio };
        Self { b, h, hv, tile: 0 }
    }

    /// This row with the `r`-th value head of those that share its query/key head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn with_head(self, c: &StepConstants, r: u32) -> Self {
        let hv = self.value_head(c, r);
        Self { hv, ..self }
    }

    /// The `r`-th value head of those that share this row's query/key head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn value_head(self, c: &StepConstants, r: u32) -> u32 {
        value_head(self.h, r, c.h, c.ratio, c.tiled != 0)
    }

    /// Address of element `first` of a head in this row of a tensor. Rows are `row` elements apart; the head begins at element
    /// `head` of its row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(self, base: u64, row: u32, head: u32, first: u32, element: u32) -> u64 {
        base + (self.b as u64 * row as u64 + head as u64) * bytes_of(element) as u64
            + (first * bytes_of(element)) as u64
    }
}

/// The `r`-th value head of those that share query/key head `h`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn value_head(h: u32, r: u32, heads: u32, ratio: u32, tiled: bool) -> u32 {
    if tiled { r * heads + h } else { h * ratio + r }
}
