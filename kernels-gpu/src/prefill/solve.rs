//! T = (I + A)⁻¹ diag(β) of a chunk, by a warpgroup.
//!
//! A is divided into blocks of 16 · 16. Each warp inverts its diagonal block D by substitution in f32. Then it computes one
//! column of blocks of T, column j, as transposes X, one after the other:
//!     X_j = D_jᵀ        X_i = −(Σ_{j ≤ k < i} X_k A_ikᵀ) D_iᵀ
//! The products run on tensor cores, with both factors split into two bf16.

use core::array;

use super::operands::Sink;
use super::range::{MOST_GAIN, MOST_QUERY};
use super::{FACTOR_BYTES, FACTORS};
use crate::device::float::{fma, maximum, pack_bf16x2, pack_f16x2};
use crate::device::rarely;
use crate::device::shared::{
    load_matrices, load_matrices_transposed, load_shared_b32, load_shared_b128, store_shared_b32,
    store_shared_b128,
};
use crate::device::thread::{sync_barrier, sync_barrier_any, thread_idx_x};
use crate::device::warp::{FULL_MASK, lane_id, mma_m16n8k16_bf16, sync_warp, warp_shuffle_xor};
use crate::math::each::each;
use crate::math::elements::bf16_to_f32;

/// Bytes of a block of 16 rows of bf16.
const BLOCK: u32 = 512;
/// A warp's scratch: the high halves of its blocks of A and D, then the low halves, then D in f32 while it is computed.
const HALVES: u32 = 4 * BLOCK;
const SQUARE: u32 = 2 * HALVES;
const OF_WARP: u32 = SQUARE + 1024;
/// Named barrier of the solving warps of the first warpgroup; the second warpgroup has the next one.
const SOLVERS: u32 = 1;
/// Bytes of a warpgroup's scratch, which may overlap an image that is no longer needed.
pub const SCRATCH_BYTES: u32 = 4 * OF_WARP;

/// Byte offset of an element in a bf16 block. The two halves of a row are swapped in every second group of four rows, so that
/// neither rows nor a lane's elements have bank conflicts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
const fn of_block(row: u32, column: u32) -> u32 {
    row * 32 + ((column / 8) ^ (row / 4 % 2)) * 16 + column % 8 * 2
}

/// Byte offset of an element of the f32 D, stored column by column. Columns are swapped in pairs, and halves of a column are
/// swapped, so that the elements of a product have no bank conflicts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
const fn of_square(row: u32, column: u32) -> u32 {
    (column ^ (column / 4 % 2)) * 64 + (row ^ (column / 2 % 2 * 8)) * 4
}

/// Solves A in the warpgroup's [`SCRATCH_BYTES`] of shared memory.
#[derive(Clone, Copy)]
pub struct Solver(pub u32);

impl Solver {
    /// Stores four elements of A: rows r and r + 8 of the 16 tokens of block `t`, columns lane % 4 · 2 and the next of the 8
    /// tokens of block `s`. Equals two calls of [`Self::store_pair`], but with one address and constant offsets (8x1024 −1 %).
    ///
    /// # Safety
    /// The elements are this lane's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_terms(self, (t, s): (u32, u32), [w, x, y, z]: [f32; 4]) {
        let (r, column) = (lane_id() / 4, lane_id() % 4 * 2);
        let (mine, block) = (self.0 + t * OF_WARP, s / 2);
        let within = s % 2 * 8 + column;
        if block < t {
            let (high, low) = split(w, x);
            let byte = mine + block * BLOCK + of_block(r, within);
            store_shared_b32(byte, high);
            store_shared_b32(byte + HALVES, low);
            let (high, low) = split(y, z);
            // Rows r + 8.
            store_shared_b32(byte + BLOCK / 2, high);
            store_shared_b32(byte + BLOCK / 2 + HALVES, low);
        } else {
            let square = mine + SQUARE;
            store_shared_b32(square + of_square(r, within), w.to_bits());
            store_shared_b32(square + of_square(r, within + 1), x.to_bits());
            store_shared_b32(square + of_square(r + 8, within), y.to_bits());
            store_shared_b32(square + of_square(r + 8, within + 1), z.to_bits());
        }
    }

    /// Stores two elements of A, s ≤ t: row lane / 4 of the 8 tokens of block `t`, columns lane % 4 · 2 and the next of the 8
    /// tokens of block `s`. They are split into halves, except in a diagonal block, which is stored in f32.
    ///
    /// # Safety
    /// The elements are this lane's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_pair(self, (t, s): (u32, u32), [x, y]: [f32; 2]) {
        let (r, column) = (lane_id() / 4 + t % 2 * 8, s % 2 * 8 + lane_id() % 4 * 2);
        let mine = self.0 + t / 2 * OF_WARP;
        if s / 2 < t / 2 {
            let (high, low) = split(x, y);
            let byte = mine + s / 2 * BLOCK + of_block(r, column);
            store_shared_b32(byte, high);
            store_shared_b32(byte + HALVES, low);
        } else {
            let square = mine + SQUARE;
            store_shared_b32(square + of_square(r, column), x.to_bits());
            store_shared_b32(square + of_square(r, column + 1), y.to_bits());
        }
    }

    /// The two barriers of a warpgroup that solves nothing while the other one solves. Results do not need them; racecheck does
    /// (docs/compiler.md, Barriers).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn solve_nothing() {
        sync_barrier(SOLVERS + thread_idx_x() / 128, 128);
        sync_barrier(SOLVERS + thread_idx_x() / 128, 128);
    }

    /// Computes T from A; this warp has rows 16 `own` and on, and `betas` has β of its rows r and r + 8. Called by all threads of
    /// the warpgroup.
    ///
    /// A token that the scan must process in f32 gets NaN as its factor of S k̂ᵀ. `scales` has the scales of k, then those of q.
    ///
    /// # Safety
    /// The factors and the scales were stored before a barrier. A was stored by this warp, or by other warps before a barrier; T
    /// is the warpgroup's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn solve(self, betas: [f32; 2], scales: u32, out: impl Sink) {
        let (group, own, lane) = (thread_idx_x() / 128, thread_idx_x() / 32 % 4, lane_id());
        let of_warp = |warp: u32| self.0 + warp * OF_WARP;
        let mine = of_warp(own);
        // SAFETY: a warp writes its own blocks, and reads others after a barrier.
        unsafe {
            sync_warp(FULL_MASK);
            // Column lane % 16 of D. The diagonal block of A is stored column by column.
            let mut x: [f32; 16] = array::from_fn(|i| (lane % 16 == i as u32) as u32 as f32);
            let mut i = 0;
            while i < 15 {
                // Negate x once, because negating the loaded terms takes an instruction each.
                let minus = -x[i];
                let mut t = (i + 1) / 4 * 4;
                while t < 16 {
                    let terms = load_shared_b128(mine + SQUARE + of_square(t as u32, i as u32));
                    each!(e in 0..4 => {
                        if t + e > i {
                            x[t + e] = fma(f32::from_bits(terms[e]), minus, x[t + e]);
                        }
                    });
                    t += 4;
                }
                i += 1;
            }
            if lane < 16 {
                each!(half in 0..2 => {
                    let pairs: [(u32, u32); 4] =
                        array::from_fn(|i| split(x[8 * half + 2 * i], x[8 * half + 2 * i + 1]));
                    let byte = mine + own * BLOCK + of_block(lane, 8 * half as u32);
                    store_shared_b128(byte, pairs.map(|(high, _)| high));
                    store_shared_b128(byte + HALVES, pairs.map(|(_, low)| low));
                });
            }
            // The warpgroup checks T only if a token may be amplified too much, or has a scale that is too large.
            let looks = !is_contraction(betas) || !has_plain_scales(scales, 16 * own + lane % 16);
            let looks = sync_barrier_any(SOLVERS + group, 128, looks);
            let (matrix, line) = (lane / 8, lane % 8);
            let square = of_block(matrix / 2 * 8 + line, matrix % 2 * 8);
            // Lane address in D, whose columns are stored as rows of a block.
            let of_columns = of_block(matrix % 2 * 8 + line, matrix / 2 * 8);
            let mut x = [[[0u32; 4]; 2]; 3];
            x[0] = read(mine + own * BLOCK + of_columns);
            if own % 2 == 1 {
                store_block(out, own - 1, [0; 4]);
            }
            store_block(out, own, packed(of_betas(joined(&x[0]), betas)));
            // Result of the last step, which no later product uses.
            let mut last = [[0.0; 4]; 2];
            let mut i = own + 1;
            let mut steps = 1;
            while steps < 4 {
                if i < 4 {
                    let mut sums = [[0.0f32; 4]; 2];
                    each!(k in 0..steps => {
                        let block = read(of_warp(i) + (own + k as u32) * BLOCK + square);
                        sums = multiply(&x[k], &block, sums);
                    });
                    let sums = multiply(
                        &as_left(sums),
                        &read_transposed(of_warp(i) + i * BLOCK + of_columns),
                        [[0.0; 4]; 2],
                    );
                    let next = sums.map(|sums| sums.map(|x| -x));
                    if steps == 3 {
                        last = next;
                    } else {
                        x[steps] = as_left(next);
                    }
                    store_block(out, i, packed(of_betas(next, betas)));
                }
                i += 1;
                steps += 1;
            }
            // The f32 square is free now: its first words become a flag per token, whether this warp's tokens s amplify the token
            // too much.
            let flags = mine + SQUARE;
            if looks {
                rarely();
                store_shared_b32(flags + 4 * lane, 0);
                store_shared_b32(flags + 4 * (lane + 32), 0);
                sync_warp(FULL_MASK);
                each!(k in 0..4 => {
                    if own + k < 4 {
                        let block = if k == 3 { last } else { joined(&x[k as usize]) };
                        look(of_betas(block, betas), own + k, scales, flags);
                    }
                });
            }
            // Unconditional, because racecheck counts barriers.
            sync_barrier(SOLVERS + group, 128);
            if looks && lane < 16 {
                rarely();
                let token = 16 * own + lane;
                let mut flag = 0;
                let mut warp = 0;
                while warp <= own {
                    flag |= load_shared_b32(of_warp(warp) + SQUARE + 4 * token);
                    warp += 1;
                }
                if flag != 0 {
                    out.store_b32(FACTORS + 4 * token, f32::NAN.to_bits());
                }
            }
        }
    }
}

/// Loads both halves of a block; `block` is the address of this lane's matrix row.
///
/// # Safety
/// The halves are in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn read(block: u32) -> [[u32; 4]; 2] {
    [load_matrices(block), load_matrices(block + HALVES)]
}

/// Like [`read`], transposed.
///
/// # Safety
/// The halves are in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn read_transposed(block: u32) -> [[u32; 4]; 2] {
    [block, block + HALVES].map(|block| load_matrices_transposed(block))
}

/// Stores this warp's block of T for tokens t from 16 `i` on. A lane has rows s = r and r + 8 of the block, for 8 columns t, then
/// 8 more.
///
/// # Safety
/// The block is this warp's to write.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_block(out: impl Sink, i: u32, words: [u32; 4]) {
    let (own, r, c) = (thread_idx_x() / 32 % 4, lane_id() / 4, lane_id() % 4);
    let out = out.behind(i / 2 * 2048 + own * 1024 + i % 2 * 512 + r * 16 + 4 * c);
    out.store_b32(0, words[0]);
    out.store_b32(128, words[1]);
    out.store_b32(256, words[2]);
    out.store_b32(384, words[3]);
}

/// A block of T, from a block of X and β of rows r and r + 8.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_betas(x: [[f32; 4]; 2], betas: [f32; 2]) -> [[f32; 4]; 2] {
    x.map(|x| {
        [
            x[0] * betas[0],
            x[1] * betas[0],
            x[2] * betas[1],
            x[3] * betas[1],
        ]
    })
}

/// Packs a block in f16, in the word order of [`store_block`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn packed([a, b]: [[f32; 4]; 2]) -> [u32; 4] {
    [
        pack_f16x2(a[0], a[1]),
        pack_f16x2(a[2], a[3]),
        pack_f16x2(b[0], b[1]),
        pack_f16x2(b[2], b[3]),
    ]
}

/// Whether 0 ≤ β ≤ 1. With keys no longer than 1 and decays of at most 1, I − β k kᵀ is then a contraction. Let w be the vector
/// that these factors leave of k_t: |w|² falls by β (2 − β) (w k_s)² at each token s, so Σ β_s |w k_s| over 16 tokens is at most
/// √16, and Σ |T_ts| at most 4.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[allow(clippy::manual_range_contains)] // Comparisons as in the formula.
fn is_contraction([a, b]: [f32; 2]) -> bool {
    a >= 0.0 && a <= 1.0 && b >= 0.0 && b <= 1.0
}

/// A token's scale of k, and the magnitude of its scale of q.
///
/// # Safety
/// The scales of k, followed by those of q, were stored before a barrier.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn scales_of(scales: u32, token: u32) -> [f32; 2] {
    let [k, q] = [0, FACTOR_BYTES].map(|of| load_shared_b32(scales + of + 4 * token));
    [k, q & 0x7fff_ffff].map(f32::from_bits)
}

/// Whether a token's k is no longer than 1, and f16 holds the length of its q. Without l2norm, k is shorter than its scale (a
/// power of two) and at least half as long; with l2norm, the scale is at most 2. A k that f16 does not hold has a scale of 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn has_plain_scales(scales: u32, token: u32) -> bool {
    let [k, q] = scales_of(scales, token);
    k > 0.0 && k < 2.0 && q < MOST_QUERY
}

/// Checks a block of T, 16 tokens s by 16 tokens t from 16 `i` on, and flags the tokens t that the scan must process in f32
/// ([`super::range`]). Called by all lanes of the warp.
///
/// # Safety
/// As for [`scales_of`]; the flags are the warp's to write.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn look(block: [[f32; 4]; 2], i: u32, scales: u32, flags: u32) {
    let lane = lane_id();
    let [[a, b], [c, d]] = block.map(|x| {
        let x = x.map(|x| f32::from_bits(x.to_bits() & 0x7fff_ffff));
        [x[0] + x[2], x[1] + x[3]]
    });
    // Among the 8 lanes with the same tokens, each half reduces half of the sums.
    let (is_upper, is_odd) = (lane & 4 != 0, lane & 8 != 0);
    let trade = |own: f32, other: f32, is_second: bool, mask: u32| {
        let (keep, give) = if is_second {
            (other, own)
        } else {
            (own, other)
        };
        keep + warp_shuffle_xor(give, mask)
    };
    let (first, second) = (trade(a, c, is_upper, 4), trade(b, d, is_upper, 4));
    let sum = trade(first, second, is_odd, 8);
    let sum = sum + warp_shuffle_xor(sum, 16);
    let token = 16 * i + is_upper as u32 * 8 + lane % 4 * 2 + is_odd as u32;
    let [k, q] = scales_of(scales, token);
    let holds = sum * maximum(0.5 * k, 1.0) < MOST_GAIN / 4.0 && k > 0.0 && q < MOST_QUERY;
    if !holds && lane < 16 {
        // SAFETY: as above.
        unsafe { store_shared_b32(flags + 4 * token, 1) };
    }
}

/// Splits two values into bf16 and the bf16 of the remainders.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn split(x: f32, y: f32) -> (u32, u32) {
    let high = pack_bf16x2(x, y);
    let [p, q] = values(high);
    (high, pack_bf16x2(x - p, y - q))
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn values(word: u32) -> [f32; 2] {
    [bf16_to_f32(word as u16), f32::from_bits(word & 0xffff_0000)]
}

/// Converts sums to a left factor, in two halves.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn as_left([a, b]: [[f32; 4]; 2]) -> [[u32; 4]; 2] {
    let pairs = [(a[0], a[1]), (a[2], a[3]), (b[0], b[1]), (b[2], b[3])];
    let split = pairs.map(|(x, y)| split(x, y));
    [split.map(|(high, _)| high), split.map(|(_, low)| low)]
}

/// Converts a left factor back to sums.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn joined([high, low]: &[[u32; 4]; 2]) -> [[f32; 4]; 2] {
    let pair = |i: usize| {
        let ([a, b], [c, d]) = (values(high[i]), values(low[i]));
        [a + c, b + d]
    };
    let [[a, b], [c, d], [e, f], [g, h]] = [pair(0), pair(1), pair(2), pair(3)];
    [[a, b, c, d], [e, f, g, h]]
}

/// A Bᵀ + C of 16 · 16 blocks; both factors are split in two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply(a: &[[u32; 4]; 2], b: &[[u32; 4]; 2], c: [[f32; 4]; 2]) -> [[f32; 4]; 2] {
    let product = |a: &[u32; 4], b: &[u32; 4], [x, y]: [[f32; 4]; 2]| {
        [
            mma_m16n8k16_bf16(*a, [b[0], b[1]], x),
            mma_m16n8k16_bf16(*a, [b[2], b[3]], y),
        ]
    };
    product(
        &a[0],
        &b[0],
        product(&a[0], &b[1], product(&a[1], &b[0], c)),
    )
}
