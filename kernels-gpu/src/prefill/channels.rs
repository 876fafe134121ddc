//! Intra-chunk pass of KDA, whose decays are by key channel: computes everything about a chunk that does not depend on the state.
//! That is T and P of a value head, and f16 images of decayed k̂ and q̂. A block computes one chunk of one value head.
//!
//! With α the decays of the chunk's tokens, by channel:
//!     A_ts = β_t Σ k̂_t k̂_s Π_{s < j ≤ t} α_j   s < t        P_ts = Σ q̂_t k̂_s Π_{s < j ≤ t} α_j   s ≤ t
//! No decay is a divisor. For each t > s there is one power of two n with t in the upper half, and s in the lower half, of one
//! block of 2 n tokens. The decays between them are the decays from the middle of the block to t times those from s to the
//! middle. For each n, all of k and q are multiplied by their part, and the products of all such pairs are one matrix product:
//!     below_n(t) = Π α_j from the beginning of t's block of n to t      above_n(s) = Π α_j after s to the end of its block of n
//! below and above of a block of 2 n come from its halves: below of the upper half is multiplied by all decays of the lower half,
//! above of the lower half by all decays of the upper half. The results at n = 64 are the operands of the scan:
//!     images of below_64 k̂ and below_64 q̂ (for products with the state before the chunk; times a power of two of the token)
//!     and above_64 k̂ (for the state after the chunk)
//!
//! A warp has 8 tokens with four lanes each, as the rows of a product: up to n = 4 a lane has all of its operands. From n = 8 on,
//! a lower half stores its part to shared memory, in words as the lanes have them; k and q are kept there in the same order.

use super::load::{Convolved, Load, RawChannels, THREADS, Words};
use super::operands::Sink;
use super::rows::{Chunk, Span};
use super::solve::{SCRATCH_BYTES, Solver};
use super::{CHUNK, FACTOR_BYTES, FACTORS, P, QUERIES, image_bytes};
use crate::constants::Element;
use crate::device::float::{multiply_f16x2, pack_f16x2};
use crate::device::shared::{
    load_shared_b32, load_shared_b64, load_shared_b128, store_shared_b32, store_shared_b128,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{
    FULL_MASK, lane_id, mma_m16n8k16_f16, sync_warp, warp_shuffle_idx, warp_shuffle_xor,
};
use crate::math::each::each;
use crate::math::elements;
use crate::math::gate;
use crate::math::power;
use crate::prefill::convolution::ConvInputs;
use crate::recurrent::gates::{beta, gate_row, load_a_log, log_decay};
use crate::row::Row;
use crate::step::{PrefillParams, StepConstants};

/// Byte offset of β, after the scales of k and q.
const BETAS: u32 = 2 * FACTOR_BYTES;
/// Bytes of the tokens' scales and β.
pub const SCALE_BYTES: u32 = 3 * FACTOR_BYTES;
/// Tokens of a warp, and number of warps.
const TOKENS: u32 = 8;
const WARPS: u32 = CHUNK / TOKENS;

/// Bytes of the product of one warp's decays over its tokens, in f32.
const fn total_bytes(k: u32) -> u32 {
    4 * k
}

/// Bytes of decayed k of a lower-half warp's tokens, which the warp stores for others.
const fn part_bytes(k: u32) -> u32 {
    16 * k
}

/// Byte offset of the parts, four warps for each n from 8 to 32, after the totals.
const fn parts_at(k: u32) -> u32 {
    WARPS * total_bytes(k)
}

/// Byte offset of the solver's scratch.
const fn solver_at(k: u32) -> u32 {
    parts_at(k) + 12 * part_bytes(k)
}

/// Bytes of shared memory for the pass. If the block convolves, q and k in f32 are staged there first.
pub const fn room_bytes(k: u32) -> u32 {
    // The decays after each token are kept in the place where A is solved later.
    let waiting = 4 * CHUNK * k;
    let last = if waiting > SCRATCH_BYTES {
        waiting
    } else {
        SCRATCH_BYTES
    };
    let bytes = solver_at(k) + last;
    if bytes > image_bytes(k) {
        bytes
    } else {
        image_bytes(k)
    }
}

/// Products of decays for this lane's channels: 8 of every 32, as in [`Load`].
type Decays = [[f32; 8]; 4];

/// Bytes of shared memory where k and q are kept: those of the images of k̂ and q̂, which may be in the same place.
pub const fn words_bytes(k: u32) -> u32 {
    image_bytes(k)
}

/// This lane's channels of a token.
struct LaneToken<const K: u32> {
    below: Decays,
    words: u32,
    room: u32,
    scales: u32,
}

/// Computes the operands of `chunk` for a value head. The image of k̂ and q̂ goes to `images`, followed by the image that is
/// added to the state; T, P and the factors go to `head`. Called by all [`THREADS`].
///
/// # Safety
/// `params` and `c` describe live tensors; `chunk` is of `span`; [`words_bytes`] from `words`, [`room_bytes`] from `room` and
/// [`SCALE_BYTES`] from `scales` on are the block's shared memory; the memory at `images` and `head` is the block's to write. The
/// image of k̂ and q̂ may be at `words`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn give<const K: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    (span, chunk): (&Span, Chunk),
    (row, convolved): (Row, Convolved),
    at: (u32, u32, u32),
    images: impl Sink,
    head: impl Sink,
) {
    // SAFETY: the caller's promise; a barrier follows the stores of other warps.
    unsafe {
        let mut token = LaneToken::<K>::load((c, params), (span, chunk), (row, convolved), at);
        let [a, b, c, d] = token.advance_in_warp();
        // A warp reads only the scales of its own tokens here.
        sync_warp(FULL_MASK);
        token.give_p(warp(), [c, d], head);
        sync_threads();
        token.give_parts(images);
        sync_threads();
        token.give_a(warp(), [a, b]);
        token.multiply_parts(head);
        let last = token.decayed(head);
        sync_threads();
        // All warps have read all words.
        token.give_images(&last, images);
        if thread_idx_x() < 128 {
            let row = warp() * 16 + lane_id() / 4;
            let beta = |t: u32| f32::from_bits(load_shared_b32(token.scales + BETAS + 4 * t));
            let solver = Solver(token.room + solver_at(K));
            solver.solve([beta(row), beta(row + 8)], token.scales, head);
        } else {
            Solver::solve_nothing();
        }
    }
}

/// Index of this warp in the block.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn warp() -> u32 {
    thread_idx_x() / 32
}

impl<const K: u32> LaneToken<K> {
    /// Number of a lane's runs of 8 channels: one of every 32 channels.
    const RUNS: usize = K as usize / 32;

    /// # Safety
    /// As for [`give`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(
        (c, params): (&StepConstants, &PrefillParams),
        (span, chunk): (&Span, Chunk),
        (row, convolved): (Row, Convolved),
        (words, room, scales): (u32, u32, u32),
    ) -> Self {
        let step = &params.layer.step;
        let load: Load<'_, true> = Load {
            with: (c, params),
            inputs: match convolved {
                Convolved::Here(inputs) => inputs,
                Convolved::Before(_) => ConvInputs::NONE,
            },
            head: row.h,
            span,
            chunk,
        };
        let source = |base, row, token, first, element| (base, (row, token), first, element);
        let k = source(
            step.k,
            params.k_row,
            c.k_token,
            row.h * c.k_head,
            c.k_element,
        );
        let q = source(
            step.q,
            params.q_row,
            c.q_token,
            row.h * c.q_head,
            c.q_element,
        );
        let g = source(
            step.g,
            params.g_row,
            c.g_token,
            row.hv * c.g_head,
            c.g_element,
        );
        let t = load.token();
        let is_there = t < chunk.count;
        let mut token = Self {
            below: [[1.0; 8]; 4],
            words,
            room,
            scales,
        };
        // SAFETY: the caller's promise; a lane owns its words.
        unsafe {
            let mut beta = 0.0;
            if is_there {
                beta = beta_of(c, params, span, (chunk.start + t, row.hv));
            }
            if load.part() == 0 {
                store_shared_b32(scales + BETAS + 4 * t, beta.to_bits());
            }
            let raw;
            if c.taps != 0
                && let Convolved::Before(operands) = convolved
            {
                token.keep(0, load.left::<K>(0, operands, scales));
                token.keep(1, load.left::<K>(1, operands, scales));
                raw = load.rows::<K>(g);
            } else if c.taps != 0 {
                load.stage::<K, 1>(room);
                sync_threads();
                token.keep(1, load.scaled::<K, 1>(load.staged::<K>(room), true, scales));
                sync_threads();
                load.stage::<K, 0>(room);
                sync_threads();
                token.keep(0, load.scaled::<K, 0>(load.staged::<K>(room), true, scales));
                raw = load.rows::<K>(g);
                // All threads have read the staged values.
                sync_threads();
            } else {
                let rows = (load.rows::<K>(k), load.rows::<K>(q));
                raw = load.rows::<K>(g);
                token.keep(0, load.words::<K, 0>(rows.0, k.3, scales));
                token.keep(1, load.words::<K, 1>(rows.1, q.3, scales));
            }
            token.below = decays::<K>((c, params), row, (load.part(), is_there), raw);
        }
        token
    }

    /// Address of this lane's words of k (0) or q (1), for its channels among the 32 from 32 `i` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of_words(&self, of: u32, i: usize) -> u32 {
        let number = of * Self::RUNS as u32 + i as u32;
        self.words + (number * THREADS + thread_idx_x()) * 16
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn keep(&self, of: u32, words: Words) {
        each!(i in 0..Self::RUNS => {
            // SAFETY: a lane owns its words.
            unsafe { store_shared_b128(self.place_of_words(of, i), words[i]) };
        });
    }

    /// Loads k (0) or q (1) of this lane, for its channels among the 32 from 32 `i` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn kept(&self, of: u32, i: usize) -> [u32; 4] {
        // SAFETY: this lane has stored them.
        unsafe { load_shared_b128(self.place_of_words(of, i)) }
    }

    /// For n up to 4: products of the warp's own tokens, two of k and two of q, as a lane of a product has them. Leaves the
    /// decays of the warp's 8 tokens as a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn advance_in_warp(&mut self) -> [f32; 4] {
        let (r, c) = (lane_id() / 4, lane_id() % 4);
        let mut tile = [0.0f32; 4];
        each!(i in 0..Self::RUNS => {
            // SAFETY: k and q are kept.
            let [k, q] = unsafe { [self.kept(0, i), self.kept(1, i)] };
            // q̂_t·k̂_t has no decay.
            let own = multiply(k, q, k, tile);
            let [first, second] = [r == 2 * c, r == 2 * c + 1];
            tile = [
                tile[0],
                tile[1],
                choose(first, own[2], tile[2]),
                choose(second, own[3], tile[3]),
            ];
            let mut above = [1.0f32; 8];
            let mut n = 1;
            while n < TOKENS {
                let is_upper = r & n != 0;
                let last = 4 * (((r ^ n) & !(n - 1)) + n - 1) + c;
                let mut decays = [0.0f32; 8];
                each!(j in 0..8 => {
                    let below = self.below[i][j];
                    decays[j] = if is_upper { below } else { above[j] };
                    let next = decays[j] * warp_shuffle_idx(below, last);
                    self.below[i][j] = if is_upper { next } else { below };
                    above[j] = if is_upper { above[j] } else { next };
                });
                let decays = rounded(&decays);
                let k = times(k, decays);
                let sums = multiply(k, times(q, decays), k, tile);
                // n is the highest bit in which t and s differ, and it is set in t.
                let [first, second] = [0, 1].map(|e| is_upper && (r ^ (2 * c + e)) / n == 1);
                tile = [
                    choose(first, sums[0], tile[0]),
                    choose(second, sums[1], tile[1]),
                    choose(first, sums[2], tile[2]),
                    choose(second, sums[3], tile[3]),
                ];
                n *= 2;
            }
            if r == TOKENS - 1 {
                // SAFETY: a warp owns its total.
                unsafe { self.give_total(i) };
            }
            let [a, b, c, d, e, f, g, h] = above.map(f32::to_bits);
            let place = self.place_of_above(i);
            // SAFETY: a lane owns its place.
            unsafe {
                store_shared_b128(place, [a, b, c, d]);
                store_shared_b128(place + 16 * THREADS, [e, f, g, h]);
            }
        });
        tile
    }

    /// Address of this lane's decays after its token, for which no registers are free; A is stored there later.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of_above(&self, i: usize) -> u32 {
        self.room + solver_at(K) + (2 * i as u32 * THREADS + thread_idx_x()) * 16
    }

    /// Stores all decays of the warp's tokens, for the other warps.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_total(&self, i: usize) {
        let place = self.total(warp(), i as u32);
        let [a, b, c, d, e, f, g, h] = self.below[i].map(f32::to_bits);
        // SAFETY: a warp owns its total.
        unsafe {
            store_shared_b128(place, [a, b, c, d]);
            store_shared_b128(place + 16, [e, f, g, h]);
        }
    }

    /// Address of a warp's total, for this lane's channels among the 32 from 32 `i` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn total(&self, warp: u32, i: u32) -> u32 {
        self.room + warp * total_bytes(K) + 128 * i + lane_id() % 4 * 32
    }

    /// Address of a lower-half warp's part: number `number` of 4 for n = 8 · 2^`level`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn part(&self, level: u32, number: u32) -> u32 {
        self.room + parts_at(K) + (4 * level + number) * part_bytes(K) + lane_id() * 16
    }

    /// Multiplies the decays of channels from 32 `i` on by the totals of `count` warps from `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn behind(&self, decays: &mut [f32; 8], i: usize, (first, count): (u32, u32)) {
        let mut warp = first;
        while warp < first + count {
            let place = self.total(warp, i as u32);
            // SAFETY: the totals were stored before a barrier.
            let [a, b] = unsafe { [load_shared_b128(place), load_shared_b128(place + 16)] };
            each!(j in 0..4 => {
                decays[j] *= f32::from_bits(a[j]);
                decays[4 + j] *= f32::from_bits(b[j]);
            });
            warp += 1;
        }
    }

    /// For n from 8 on, stores the decayed k of this warp's tokens for the upper half's warps, if this warp is in the lower half.
    /// Also stores the image that is added to the state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_parts(&self, images: impl Sink) {
        let own = warp();
        let mut i = 0;
        // SAFETY: a warp owns its parts and tokens.
        unsafe {
            while i < Self::RUNS {
                let place = self.place_of_above(i);
                let first = load_shared_b128(place).map(f32::from_bits);
                let second = load_shared_b128(place + 16 * THREADS).map(f32::from_bits);
                let mut above = [0.0f32; 8];
                each!(j in 0..4 => (above[j], above[4 + j]) = (first[j], second[j]));
                let k = self.kept(0, i);
                each!(level in 0..3 => {
                    let n = 1 << level;
                    if own & n == 0 {
                        let number = (own >> (level + 1) << level) | (own & (n - 1));
                        let place = self.part(level, number) + 512 * i as u32;
                        store_shared_b128(place, times(k, rounded(&above)));
                        self.behind(&mut above, i, ((own & !(n - 1)) + n, n));
                    }
                });
                let core = lane_id() % 4 + 4 * i as u32;
                let byte = image_bytes(K) + core * 1024 + self.token() * 16;
                images.store_b128(byte, times(k, rounded(&above)));
                i += 1;
            }
        }
    }

    /// Index of the token in the chunk.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn token(&self) -> u32 {
        TOKENS * warp() + lane_id() / 4
    }

    /// For n from 8 on, computes the products of this warp's tokens with those of the lower half, if this warp is in the upper
    /// half. Leaves Γ of the token in `self.below`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn multiply_parts(&mut self, head: impl Sink) {
        let own = warp();
        let (mut ones, mut twos, mut fours) = ([[0.0; 4]; 1], [[0.0; 4]; 2], [[0.0; 4]; 4]);
        let mut i = 0;
        // SAFETY: the caller's promise; the parts were stored before a barrier.
        unsafe {
            while i < Self::RUNS {
                let (k, q) = (self.kept(0, i), self.kept(1, i));
                let mut below = self.below[i];
                self.multiply_part((k, q), &mut below, i, &mut ones);
                self.multiply_part((k, q), &mut below, i, &mut twos);
                self.multiply_part((k, q), &mut below, i, &mut fours);
                self.below[i] = below;
                if self.token() == CHUNK - 1 {
                    let byte = FACTORS + 3 * FACTOR_BYTES + 128 * i as u32 + lane_id() % 4 * 32;
                    let [a, b, c, d, e, f, g, h] = below.map(f32::to_bits);
                    head.store_b128(byte, [a, b, c, d]);
                    head.store_b128(byte + 16, [e, f, g, h]);
                }
                i += 1;
            }
            self.give_tiles(&ones, head);
            self.give_tiles(&twos, head);
            self.give_tiles(&fours, head);
            // Zeros in the other places that a product reads.
            let mut s = own + 1;
            while s < if own < 4 { 4 } else { 8 } {
                head.store_b32(Self::place_of_p(s), 0);
                s += 1;
            }
        }
    }

    /// Computes Γ_t k̂_t and Γ_t q̂_t, times a power of two that brings the token's largest decay to between 1 and 2, because f16
    /// loses values below 2⁻²⁵. Stores the factors with the inverse power.
    ///
    /// # Safety
    /// As for [`give`]; the warp's scales have been stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn decayed(&mut self, head: impl Sink) -> [Words; 2] {
        let mut largest = 0;
        each!(i in 0..Self::RUNS => {
            each!(j in 0..8 => largest = self.below[i][j].to_bits().max(largest));
        });
        let mut mask = 1;
        while mask < 4 {
            let other = warp_shuffle_xor(f32::from_bits(largest), mask);
            largest = other.to_bits().max(largest);
            mask *= 2;
        }
        let [by, back] = power::of_exponent((largest >> 23).clamp(1, 253));
        let mut images: [Words; 2] = [[[0; 4]; 4]; 2];
        // SAFETY: the caller's promise.
        unsafe {
            self.give_factors(back, head);
            each!(i in 0..Self::RUNS => {
                each!(j in 0..8 => self.below[i][j] *= by);
                let decays = rounded(&self.below[i]);
                each!(of in 0..2 => images[of][i] = times(self.kept(of as u32, i), decays));
            });
        }
        images
    }

    /// Step for one n of `HALF` warps: adds the products of k and q, with these decays, over the channels from 32 `i` on. Leaves
    /// the decays of the block of 2 n in `below`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn multiply_part<const HALF: usize>(
        &self,
        (k, q): ([u32; 4], [u32; 4]),
        below: &mut [f32; 8],
        i: usize,
        tiles: &mut [[f32; 4]; HALF],
    ) {
        let (own, half, level) = (warp(), HALF as u32, HALF.ilog2());
        if own & half == 0 {
            return;
        }
        let place = self.part(level, own >> (level + 1) << level) + 512 * i as u32;
        let decays = rounded(below);
        let (k, q) = (times(k, decays), times(q, decays));
        let mut n = 0;
        // SAFETY: the parts and totals were stored before a barrier.
        unsafe {
            while n < HALF {
                let columns = load_shared_b128(place + n as u32 * part_bytes(K));
                tiles[n] = multiply(k, q, columns, tiles[n]);
                n += 1;
            }
            self.behind(below, i, (own & !(2 * half - 1), half));
        }
    }

    /// Stores the tiles of one n to A and P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_tiles<const HALF: usize>(&self, tiles: &[[f32; 4]; HALF], head: impl Sink) {
        let (own, half) = (warp(), HALF as u32);
        let mut n = 0;
        while own & half != 0 && n < half {
            // SAFETY: the caller's promise.
            unsafe {
                let (s, [a, b, c, d]) = ((own & !(2 * half - 1)) + n, tiles[n as usize]);
                self.give_a(s, [a, b]);
                self.give_p(s, [c, d], head);
            }
            n += 1;
        }
    }

    /// Stores the images of k̂ and q̂.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_images(&self, [k, q]: &[Words; 2], images: impl Sink) {
        each!(i in 0..Self::RUNS => {
            let core = lane_id() % 4 + 4 * i as u32;
            let byte = core * 2048 + self.token() * 16;
            // SAFETY: the caller's promise; a lane owns its channels of a token.
            unsafe {
                images.store_b128(byte, k[i]);
                images.store_b128(byte + QUERIES, q[i]);
            }
        });
    }

    /// Byte offset of this lane's two elements of P, for its token and the tokens from 8 `s` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of_p(s: u32) -> u32 {
        let (t, r, c) = (warp(), lane_id() / 4, lane_id() % 4);
        P + t / 4 * 2048 + s / 2 * 1024 + t % 4 * 256 + s % 2 * 128 + r * 16 + 4 * c
    }

    /// The f32 of this lane's token at offset `byte` of the scales.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn said(&self, byte: u32) -> f32 {
        f32::from_bits(load_shared_b32(self.scales + byte + 4 * self.token()))
    }

    /// Scales of k for this lane's two of the tokens from 8 `s` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn of_columns(&self, s: u32) -> [f32; 2] {
        let place = self.scales + 4 * (TOKENS * s + lane_id() % 4 * 2);
        load_shared_b64(place).map(f32::from_bits)
    }

    /// Stores products of q of this warp's tokens with k of the tokens from 8 `s` on, as P.
    ///
    /// # Safety
    /// The scales of both have been stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_p(&self, s: u32, products: [f32; 2], head: impl Sink) {
        // SAFETY: the caller's promise; a warp owns its rows of P.
        unsafe {
            let (own, [x, y]) = (self.said(FACTOR_BYTES), self.of_columns(s));
            let word = pack_f16x2(products[0] * (own * x), products[1] * (own * y));
            head.store_b32(Self::place_of_p(s), word);
        }
    }

    /// Stores the products of k as A, for the solver.
    ///
    /// # Safety
    /// The scales of both have been stored, and nothing else is kept where A is solved.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_a(&self, s: u32, products: [f32; 2]) {
        // SAFETY: the caller's promise; a warp owns its rows of A.
        unsafe {
            let (own, [x, y]) = (self.said(0) * self.said(BETAS), self.of_columns(s));
            let a = [products[0] * (own * x), products[1] * (own * y)];
            Solver(self.room + solver_at(K)).store_pair((warp(), s), a);
        }
    }

    /// Stores the factors: the scales of k and q, which the images lack. Those of the decayed images are multiplied by `back`.
    ///
    /// # Safety
    /// The warp's scales have been stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_factors(&self, back: f32, head: impl Sink) {
        let (t, part) = (self.token(), lane_id() % 4);
        // A token's lanes 0 and 2 store the factor of k, lane 1 that of q. Lane 2's is for the image that is added to the state.
        if part < 3 {
            let scale = f32::from_bits(load_shared_b32(
                self.scales + part % 2 * FACTOR_BYTES + 4 * t,
            ));
            let back = if part < 2 { back } else { 1.0 };
            head.store_b32(
                FACTORS + part * FACTOR_BYTES + 4 * t,
                (scale * back).to_bits(),
            );
        }
    }
}

/// β of token `t` for value head `hv`.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn beta_of(
    c: &StepConstants,
    params: &PrefillParams,
    span: &Span,
    (t, hv): (u32, u32),
) -> f32 {
    let (strides, element) = ((params.b_row, c.b_token), c.b_element);
    let at = span.at(params.layer.step.b, strides, t, hv, element);
    let [b] = elements::load_one(at, element).to_f32(element);
    beta(c, b)
}

/// α of this lane's channels of its token; 1 for a token beyond the chunk. `part` is the lane's index among the token's four
/// lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn decays<const K: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    row: Row,
    (part, is_there): (u32, bool),
    raw: RawChannels,
) -> Decays {
    let step = &params.layer.step;
    let mut decays: Decays = [[1.0; 8]; 4];
    // SAFETY: the caller's promise.
    unsafe {
        let a_log = load_a_log(c, step, row);
        each!(i in 0..K as usize / 32 => {
            let x = raw[i].to_f32(c.g_element);
            let mut dt_bias = [0.0f32; 8];
            if c.has_dt_bias != 0 {
                let channel = gate_row(c, row) * K + 8 * (part + 4 * i as u32);
                let (at, wide) = (step.dt_bias + 4 * channel as u64, c.wide_io != 0);
                let element = Element::F32 as u32;
                dt_bias = elements::load::<8>(at, element, wide).to_f32(element);
            }
            each!(j in 0..8 => {
                let decay = gate::exp(log_decay(c, x[j], a_log, dt_bias[j]));
                decays[i][j] = if is_there { decay } else { 1.0 };
            });
        });
    }
    decays
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn choose(is: bool, one: f32, other: f32) -> f32 {
    if is { one } else { other }
}

/// Rounds 8 factors to f16, two to a word.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rounded(factors: &[f32; 8]) -> [u32; 4] {
    let mut words = [0; 4];
    each!(i in 0..4 => words[i] = pack_f16x2(factors[2 * i], factors[2 * i + 1]));
    words
}

/// Multiplies 8 channels by 8 factors, in f16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn times(words: [u32; 4], factors: [u32; 4]) -> [u32; 4] {
    let mut products = [0; 4];
    each!(i in 0..4 => products[i] = multiply_f16x2(words[i], factors[i]));
    products
}

/// Adds the products of this warp's 8 tokens (rows 0 to 7 are k, rows 8 to 15 are q) with 8 tokens, over 32 channels, of which a
/// lane has 8.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply(k: [u32; 4], q: [u32; 4], columns: [u32; 4], sums: [f32; 4]) -> [f32; 4] {
    let first = [k[0], q[0], k[1], q[1]];
    let second = [k[2], q[2], k[3], q[3]];
    let sums = mma_m16n8k16_f16(first, [columns[0], columns[1]], sums);
    mma_m16n8k16_f16(second, [columns[2], columns[3]], sums)
}
