//! Products of a unit's tokens, k kᵀ and q kᵀ, on tensor cores. Those wanted are of tokens s at or before t: twenty
//! tiles of 16 tokens t and 8 tokens s, of which each of eight warps has two or three, all of the same tokens t.

use super::{CHUNK, QUERIES};
use crate::device::shared::load_matrices;
use crate::device::thread::thread_idx_x;
use crate::device::warp::{lane_id, mma_m16n8k16_f16};
use crate::math::each::each;

/// Most tiles of a warp.
pub const MOST_TILES: usize = 3;
/// Bytes of an image from 8 channels to the next.
const CHANNELS: u32 = 2048;

/// A lane's sums of a tile of 16 · 8 products: rows t and t + 8, two tokens s of each.
pub type Fragment = [f32; 4];

/// The tiles of a warp: of block `rows` of 16 tokens t, and of `count` blocks of 8 tokens s from `first` on.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Which 16 tokens t.
    pub rows: u32,
    /// The first 8 tokens s.
    pub first: u32,
    /// How many tiles.
    pub count: u32,
}

impl Tiles {
    /// The tiles of this thread's warp, one of eight: the blocks of t have 2, 4, 6 and 8 tiles, for 1, 2, 2 and 3 warps. The
    /// warps of an SM's quarter, n and n + 4, have five.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_warp() -> Self {
        let digit = |of: u32| of >> (thread_idx_x() / 32 * 4) & 15;
        Self {
            rows: digit(0x3332_2110),
            first: digit(0x6303_0200),
            count: digit(0x2333_3222),
        }
    }

    /// Whether tokens s of a tile are tokens t too.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_diagonal(self, tile: usize) -> bool {
        (self.first + tile as u32) / 2 == self.rows
    }

    /// The first of the lane's tokens t.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn row(self) -> u32 {
        16 * self.rows + lane_id() / 4
    }

    /// The first of the lane's tokens s of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn column(self, tile: usize) -> u32 {
        8 * (self.first + tile as u32) + lane_id() % 4 * 2
    }

    /// The products of k and of q of each tile; 0 where s > t, and of k where s = t.
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

    /// The products of so many tiles.
    ///
    /// # Safety
    /// As [`Self::products`]'.
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

// Tiles have a place each.
const _: () = assert!(CHUNK == 64);
