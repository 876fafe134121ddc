//! Carries the state from split to split of a row ([`super::split`]): S ← S M + B, in f32.
//!
//! Rows of S are independent of each other: a block has 16 rows of a value head, a warp 4. M is staged in shared memory, 32 of
//! its rows at a time, while the rows before are multiplied. A warp's rows of S are in shared memory too.

use super::rows::Span;
use super::split::{is_direct, state, transition};
use crate::device::float::fma;
use crate::device::global::{load_state_b128, store_state_b128};
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b128, store_shared_b32, store_shared_b128,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{FULL_MASK, lane_id, sync_warp};
use crate::math::each::each;
use crate::row::Row;
use crate::step::{PrefillParams, StepConstants};

/// Threads of a block.
pub const THREADS: u32 = 128;
/// Rows of a state of one block.
pub const ROWS: u32 = 16;
/// Rows of M in a piece.
const PIECE: u32 = 32;
/// Bytes of four elements of a state, as a thread of the scan has them: two channels of rows r and r + 8.
const UNIT: u32 = 16;

/// Bytes of a piece.
const fn piece_bytes(k: u32) -> u32 {
    4 * PIECE * k
}

/// Shared memory of a block: two pieces, and the rows of S.
pub const fn shared_bytes(k: u32) -> u32 {
    2 * piece_bytes(k) + 4 * ROWS * k
}

/// Byte offset of a 16-byte unit (rows r and r + 8, channels 8 `j` + 2 `c` and the next) within the state that the scan stores,
/// for 16-row group `group`.
const fn unit_at<const K: u32>(group: u32, j: u32, (r, c): (u32, u32)) -> u32 {
    group / 4 * (64 * 4 * K) + j * 2048 + (32 * (group % 4) + 4 * r + c) * UNIT
}

/// A lane's elements of S: for two r, two channels of rows r and r + 8, in each of K/64 groups of 8 channels.
type Sums = [[[f32; 4]; 2]; 2];

/// Work of a block.
pub struct Carry<const K: u32> {
    /// Address of the first split's state and M; those of the next splits follow at a distance of `apart`.
    first: u64,
    /// Bytes from a split to the next.
    apart: u64,
    /// Index of the block's 16 rows of S.
    group: u32,
    /// Number of splits after the first state.
    count: u32,
}

impl<const K: u32> Carry<K> {
    /// Number of pieces of M.
    const PIECES: u32 = K / PIECE;
    /// 16-byte units of a piece that a thread loads.
    const UNITS: usize = (piece_bytes(K) / UNIT / THREADS) as usize;
    /// Groups of 8 channels that a lane has of a row.
    const OF_LANE: usize = K as usize / 64;

    /// Work of the block that has `row`, whose tile is the index of the 16 rows of S, on the tokens of `span`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(c: &StepConstants, params: &PrefillParams, row: Row, span: &Span) -> Self {
        // After a first part of one token the stored state is already final, so the carry starts there.
        let is_direct = is_direct(0, span.split(c.split, 0).count) && span.ends_split(c.split, 0);
        let start = is_direct as u32;
        let at = |i| state::<K>((c, params), c.per_channel != 0, (span, i), (row.hv, 0));
        let (first, next) = (at(start), at(start + 1));
        let mut count = 0;
        while span.ends_split(c.split, start + count) {
            count += 1;
        }
        Self {
            first,
            apart: next - first,
            group: row.tile,
            count,
        }
    }

    /// Carries the state through all splits. Called by all threads of the block.
    ///
    /// # Safety
    /// The passes before have ended; the block's shared memory is free, and its rows of the states are its own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn run(&self) {
        if self.count == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = self.load(0);
            self.stage(&sums);
            let pieces = self.count * Self::PIECES;
            let mut next = self.bring(0);
            let mut n = 0;
            while n < pieces {
                let (i, piece) = (n / Self::PIECES, n % Self::PIECES);
                if piece == 0 {
                    sums = self.load(i + 1);
                }
                let buffer = dynamic_shared_mem() + n % 2 * piece_bytes(K);
                Self::put(buffer, &next);
                // The piece is stored; all warps have read the piece two before.
                sync_threads();
                if n + 1 < pieces {
                    next = self.bring(n + 1);
                }
                Self::multiply(&mut sums, buffer, piece);
                if piece + 1 == Self::PIECES {
                    self.store(i + 1, &sums);
                    self.stage(&sums);
                }
                n += 1;
            }
        }
    }

    /// Loads the thread's units of a piece.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn bring(&self, n: u32) -> [[u32; 4]; 8] {
        let (i, piece) = (n / Self::PIECES, n % Self::PIECES);
        let m = transition::<K>(self.first + i as u64 * self.apart);
        let (lane, warp) = (lane_id(), thread_idx_x() / 32);
        let mut units = [[0; 4]; 8];
        each!(u in 0..Self::UNITS => {
            let (half, j) = Self::unit_of(u as u32, warp);
            let byte = unit_at::<K>(2 * piece + half, j, (lane / 4, lane % 4));
            units[u] = load_state_b128(m + byte as u64, true);
        });
        units
    }

    /// The half (16 rows) of a piece and the group of 8 channels of a warp's unit number `u`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    const fn unit_of(u: u32, warp: u32) -> (u32, u32) {
        let n = 4 * u + warp;
        (n / (K / 8), n % (K / 8))
    }

    /// Stores the units to a buffer; those of a row are contiguous.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn put(buffer: u32, units: &[[u32; 4]; 8]) {
        let (lane, warp) = (lane_id(), thread_idx_x() / 32);
        each!(u in 0..Self::UNITS => {
            let (half, j) = Self::unit_of(u as u32, warp);
            let unit = ((8 * half + lane / 4) * (K / 8) + j) * 4 + lane % 4;
            store_shared_b128(buffer + UNIT * unit, units[u]);
        });
    }

    /// r of the first of the lane's two pairs of rows, and its first group j of 8 channels.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn places() -> (u32, u32) {
        (thread_idx_x() / 32 * 2, lane_id() / 4)
    }

    /// Loads the block's rows of the state at the start of split `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(&self, i: u32) -> Sums {
        let (r, j) = Self::places();
        let mut sums = [[[0.0; 4]; 2]; 2];
        each!(pair in 0..2 => {
            each!(of in 0..Self::OF_LANE => {
                let at = (r + pair as u32, lane_id() % 4);
                let byte = unit_at::<K>(self.group, j + 8 * of as u32, at);
                let words = load_state_b128(self.first + i as u64 * self.apart + byte as u64, true);
                sums[pair][of] = words.map(f32::from_bits);
            });
        });
        sums
    }

    /// Stores the rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store(&self, i: u32, sums: &Sums) {
        let (r, j) = Self::places();
        each!(pair in 0..2 => {
            each!(of in 0..Self::OF_LANE => {
                let at = (r + pair as u32, lane_id() % 4);
                let byte = unit_at::<K>(self.group, j + 8 * of as u32, at);
                let words = sums[pair][of].map(f32::to_bits);
                store_state_b128(self.first + i as u64 * self.apart + byte as u64, words);
            });
        });
    }

    /// Address of the warp's rows of S in shared memory: for each pair of channels k and k + 8, the four rows, in the order in
    /// which rows k and k + 8 of M are multiplied.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn own() -> u32 {
        dynamic_shared_mem() + 2 * piece_bytes(K) + thread_idx_x() / 32 * (4 * 4 * K)
    }

    /// Stages the rows there. Called by all lanes of the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn stage(&self, sums: &Sums) {
        let (_, j) = Self::places();
        sync_warp(FULL_MASK);
        each!(pair in 0..2 => {
            each!(of in 0..Self::OF_LANE => {
                each!(word in 0..4 => {
                    let (half, e) = (word as u32 / 2, word as u32 % 2);
                    let j = j + 8 * of as u32;
                    let k = 8 * (j / 2) + 2 * (lane_id() % 4) + e;
                    let at = (k * 4 + 2 * pair as u32 + half) * 2 + j % 2;
                    store_shared_b32(Self::own() + 4 * at, sums[pair][of][word].to_bits());
                });
            });
        });
        sync_warp(FULL_MASK);
    }

    /// Adds the product of the warp's rows and a piece of M.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn multiply(sums: &mut Sums, buffer: u32, piece: u32) {
        let (_, j) = Self::places();
        let rows = Self::own() + piece * PIECE / 2 * 32;
        let lane = buffer + (4 * j + lane_id() % 4) * UNIT;
        each!(k in 0..PIECE as usize / 2 => {
            let at = rows + 32 * k as u32;
            let s = [load_shared_b128(at), load_shared_b128(at + 16)];
            each!(of in 0..Self::OF_LANE => {
                let m = load_shared_b128(lane + (k as u32 * (K / 8) + 8 * of as u32) * 4 * UNIT);
                let m = m.map(f32::from_bits);
                each!(pair in 0..2 => {
                    let s = s[pair].map(f32::from_bits);
                    each!(half in 0..2 => {
                        each!(e in 0..2 => {
                            let sum = &mut sums[pair][of][2 * half + e];
                            *sum = fma(s[2 * half], m[e], *sum);
                            *sum = fma(s[2 * half + 1], m[2 + e], *sum);
                        });
                    });
                });
            });
        });
    }
}
