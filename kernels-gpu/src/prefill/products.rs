//! Products of a chunk's tokens, k kᵀ and q kᵀ, on tensor cores. Only tokens s ≤ t are needed: twenty tiles of 16 tokens t and 8
//! tokens s. Each of eight warps has two or three tiles of the same tokens t.

use super::{CHUNK, QUERIES};
use crate::device::shared::load_matrices;
use crate::device::thread::thread_idx_x;
use crate::device::warp::{lane_id, mma_m16n8k16_f16};
use crate::math::each::each;

/// Largest number of tiles of a warp.
pub const MOST_TILES: usize = 3;
/// Byte stride of an image between groups of 8 channels.
const CHANNELS: u32 = 2048;

/// A lane's sums of a 16 · 8 tile of products: rows t and t + 8, two tokens s of each.
pub type Fragment = [f32; 4];

/// Tiles of a warp: block `rows` of 16 tokens t, and `count` blocks of 8 tokens s from block `first` on.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Index of the block of 16 tokens t.
    pub rows: u32,
    /// Index of the first block of 8 tokens s.
    pub first: u32,
    /// Number of tiles.
    pub count: u32,
}

impl Tiles {
    /// Tiles of this thread's warp, one of eight. The four blocks of t have 2, 4, 6 and 8 tiles, for 1, 2, 2 and 3 warps. Warps n
    /// and n + 4, which share a quarter of an SM, have five tiles together.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_warp() -> Self {
        let digit = |of: u32| of >> (thread_idx_x() / 32 * 4) & 15;
        Self {
            rows: digit(0x3332_2110),
            first: digit(0x6303_0200),
            count: digit(0x2333_3222),
        }
    }

    /// Whether the tile lies on the diagonal: its tokens s are among its tokens t.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_diagonal(self, tile: usize) -> bool {
        (self.first + tile as u32) / 2 == self.rows
    }

    /// First of the lane's tokens t.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn row(self) -> u32 {
        16 * self.rows + lane_id() / 4
    }

    /// First of the lane's tokens s of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn column(self, tile: usize) -> u32 {
        8 * (self.first + tile as u32) + lane_id() % 4 * 2
    }

    /// Products k kᵀ and q kᵀ of each tile; 0 where s > t, and for k kᵀ also where s = t.
    ///
    /// # Safety
    /// The image is in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn products<const K: u32>(self, image: u32) -> [[Fragment; 2]; MOST_TILES] {
        // SAFETY: the caller's promise.
        let mut products = unsafe {
            if self.count == 3 {
                self.multiply::<K, 3>(image)
            } else {
                self.multiply::<K, 2>(image)
            }
        };
        each!(tile in 0..MOST_TILES => {
            if self.is_diagonal(tile) {
                each!(i in 0..4 => {
                    let t = self.row() + 8 * (i as u32 / 2);
                    let s = self.column(tile) + i as u32 % 2;
                    if s >= t {
                        products[tile][0][i] = 0.0;
                    }
                    if s > t {
                        products[tile][1][i] = 0.0;
                    }
                });
            }
        });
        products
    }

    /// Products of `TILES` tiles.
    ///
    /// # Safety
    /// As for [`Self::products`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn multiply<const K: u32, const TILES: usize>(
        self,
        image: u32,
    ) -> [[Fragment; 2]; MOST_TILES] {
        let (matrix, line) = (lane_id() / 8, lane_id() % 8);
        let left = image + matrix / 2 * CHANNELS + (16 * self.rows + matrix % 2 * 8 + line) * 16;
        let right = image + matrix * CHANNELS + (8 * self.first + line) * 16;
        let mut sums = [[[0.0; 4]; 2]; MOST_TILES];
        let mut channels = 0;
        while channels < K / 8 {
            let mut tokens = [[0; 4]; TILES];
            let mut tile = 0;
            while tile < TILES {
                let byte = channels * CHANNELS + tile as u32 * 128;
                tokens[tile] = load_matrices(right + byte);
                tile += 1;
            }
            each!(half in 0..2 => {
                let byte = (channels + 2 * half as u32) * CHANNELS;
                // SAFETY: as above.
                let (keys, queries) = unsafe {
                    (
                        load_matrices(left + byte),
                        load_matrices(left + byte + QUERIES),
                    )
                };
                tile = 0;
                while tile < TILES {
                    let right = [tokens[tile][2 * half], tokens[tile][2 * half + 1]];
                    sums[tile][0] = mma_m16n8k16_f16(keys, right, sums[tile][0]);
                    sums[tile][1] = mma_m16n8k16_f16(queries, right, sums[tile][1]);
                    tile += 1;
                }
            });
            channels += 4;
        }
        sums
    }
}

// Each tile needs its own place in the digits of [`Tiles::of_warp`].
const _: () = assert!(CHUNK == 64);
