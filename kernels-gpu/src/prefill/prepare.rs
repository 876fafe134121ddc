//! What of a unit does not depend on states: k and q as f16 images, and of each value head T, P and factors. Two warpgroups
//! make a value head each, of one query/key head; or, of one value head, the first T, the other P.
//!
//! k and q are in the image with a power of two that brings their length near 1, exactly where they have 16 bits; what lacks
//! to k̂ and q̂ is a scale of the token.
//!
//! With G the sums of log decays, in powers of two:
//!     A_ts = β_t 2^(G_t − G_s) k̂_t·k̂_s   s < t        T = (I + A)⁻¹ diag(β)        P_ts = 2^(G_t − G_s) q̂_t·k̂_s   s ≤ t
//! A goes in blocks of 16. A warp inverts its own block of the diagonal, D, in f32, by substitution; then it has a column
//! of blocks of T, j, whose transposes X are made one after the other:
//!     X_j = D_jᵀ        X_i = −(Σ_{j ≤ k < i} X_k A_ikᵀ) D_iᵀ
//! on tensor cores, with both factors split in two bf16.

use core::array;

use super::convolution::{Inputs, RUN, channel_of};
use super::rows::{Piece, Span};
use super::{CHUNK, FACTOR_BYTES, FACTORS, P, QUERIES, anew};
use crate::constants::Element;
use crate::device::float::{exp2, f16_to_f32, fma, maximum, pack_bf16x2, pack_f16x2, rsqrt};
use crate::device::global::{load_b32, store_b32, store_b128};
use crate::device::shared::{
    load_matrices, load_matrices_transposed, load_shared_b32, load_shared_b64, load_shared_b128,
    store_shared_b16, store_shared_b32, store_shared_b128,
};
use crate::device::thread::{sync_barrier, sync_threads, thread_idx_x};
use crate::device::warp::{FULL_MASK, lane_id, mma_m16n8k16_bf16, sync_warp, warp_shuffle_idx};
use crate::device::warpgroup::{self, fence_shared};
use crate::math::elements::{self, bf16_to_f32, load_one};
use crate::math::gate;
use crate::math::reduce::{butterfly_sum, dot};
use crate::step::{Gate, PrefillParams, StepConstants};

/// The log decays of a token are held above this power of two: the decay of a state is 0 from there on, and no sum of a
/// piece's is −∞.
const LEAST: f32 = -127.0;
/// Bytes between rows of a block in two bf16 matrices, and of a block.
const ROW: u32 = 48;
const BLOCK: u32 = 16 * ROW;
/// The upper halves of a warp's blocks, those of A and D; as many for the lower halves; then D in the making, in f32.
const HALVES: u32 = 4 * BLOCK;
const SQUARE: u32 = 2 * HALVES;
const OF_WARP: u32 = SQUARE + 1024;
/// Barrier of the warps of the first warpgroup that make T; the other's follows.
const SOLVERS: u32 = 1;
/// Behind the scales of k and q, for each warpgroup's value head: sums of log decays, in powers of two, and β.
const LOGS: u32 = 2 * FACTOR_BYTES;
const BETAS: u32 = FACTOR_BYTES;
const OF_GROUP: u32 = 2 * FACTOR_BYTES;
/// Threads that make a unit.
pub const THREADS: u32 = 256;

/// Bytes of the scratch of a warpgroup, which may be where the image is no more.
pub const SCRATCH_BYTES: u32 = 4 * OF_WARP;
/// Bytes of what is said of tokens.
pub const SCALE_BYTES: u32 = LOGS + 2 * OF_GROUP;

/// Where operands go.
pub trait Place: Copy {
    /// # Safety
    /// The bytes are this thread's to write.
    unsafe fn store_b32(self, byte: u32, word: u32);
    /// # Safety
    /// The bytes are this thread's to write.
    unsafe fn store_b128(self, byte: u32, words: [u32; 4]);
}

/// To a workspace.
#[derive(Clone, Copy)]
pub struct Global(pub u64);

/// To the shared memory of the block that uses them.
#[derive(Clone, Copy)]
pub struct Shared(pub u32);

impl Place for Global {
    #[inline(always)]
    unsafe fn store_b32(self, byte: u32, word: u32) {
        // SAFETY: the caller's promise.
        unsafe { store_b32(self.0 + byte as u64, word) };
    }

    #[inline(always)]
    unsafe fn store_b128(self, byte: u32, words: [u32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { store_b128(self.0 + byte as u64, words) };
    }
}

impl Place for Shared {
    #[inline(always)]
    unsafe fn store_b32(self, byte: u32, word: u32) {
        // SAFETY: the caller's promise.
        unsafe { store_shared_b32(self.0 + byte, word) };
    }

    #[inline(always)]
    unsafe fn store_b128(self, byte: u32, words: [u32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { store_shared_b128(self.0 + byte, words) };
    }
}

/// A unit whose k and q are in the image, and what is said of its tokens behind it.
pub struct Unit {
    image: u32,
    /// Of this warpgroup.
    scratch: u32,
    scales: u32,
    makes: Makes,
}

/// What a warpgroup makes of a value head.
#[derive(Clone, Copy)]
pub struct Makes {
    /// T.
    solution: bool,
    /// P and the factors.
    products: bool,
}

impl Makes {
    /// For the warpgroup of this thread, of two value heads or of one.
    #[inline(always)]
    pub fn of_thread(heads: u32) -> Self {
        let first = thread_idx_x() < 128;
        Self {
            solution: first || heads == 2,
            products: !first || heads == 2,
        }
    }
}

/// 8 channels of some of a token's, as they lie in memory: a thread has every fourth 8 channels of a token.
type Rows = [elements::Raw<8>; 4];
/// Their values.
type Token = [[f32; 8]; 4];
/// The same in f16, two to a word.
type Words = [[u32; 4]; 4];

impl Unit {
    /// Of query/key head `h`, and the warpgroup's value head `hv`. All [`THREADS`] come; the image is at `image` in shared
    /// memory, and goes where `give` says besides. The scratch, [`SCRATCH_BYTES`] for each warpgroup that makes T, may be where
    /// the image is, if that is not wanted behind [`Self::give_head`].
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; `piece` is of `span`; the image, the scratch and the scales are the block's
    /// to write.
    #[inline(always)]
    pub unsafe fn new<const K: u32>(
        c: &StepConstants,
        params: &PrefillParams,
        (span, piece): (&Span, Piece),
        (h, hv, inputs): (u32, u32, Inputs),
        makes: Makes,
        (image, scratch, scales): (u32, u32, u32),
        give: impl Fn(u32, [u32; 4]),
    ) -> Self {
        let step = &params.layer.step;
        let load = Load {
            with: (c, params),
            inputs,
            head: h,
            span,
            piece,
        };
        let k = (step.k, (params.k_row, c.k_token), h * c.k_head, c.k_element);
        let q = (step.q, (params.q_row, c.q_token), h * c.q_head, c.q_element);
        let group = thread_idx_x() / 128;
        let unit = Self {
            image,
            scratch: scratch
                + if makes.products {
                    group * SCRATCH_BYTES
                } else {
                    0
                },
            scales,
            makes,
        };
        // SAFETY: the caller's promise. One warp of each group says what there is to say of gates. What is convolved goes
        // through the image: q first, which is kept until k has been there.
        unsafe {
            let says = (thread_idx_x() / 32).is_multiple_of(4);
            let mut gates = RawGates::NONE;
            if says {
                gates = RawGates::load(c, params, (span, piece), hv);
            }
            let (keys, queries);
            if c.taps != 0 {
                if says {
                    unit.say(c, piece, gates);
                }
                load.stage::<K, 1>(image);
                sync_threads();
                queries = load.scaled::<K, 1>(load.staged::<K>(image), true, scales);
                sync_threads();
                load.stage::<K, 0>(image);
                sync_threads();
                keys = load.scaled::<K, 0>(load.staged::<K>(image), true, scales);
                sync_threads();
                load.give::<K, 0>(keys, image);
                load.give::<K, 1>(queries, image);
            } else {
                let rows = (load.rows::<K>(k), load.rows::<K>(q));
                if says {
                    unit.say(c, piece, gates);
                }
                keys = load.place::<K, 0>(rows.0, k.3, (image, scales));
                queries = load.place::<K, 1>(rows.1, q.3, (image, scales));
            }
            fence_shared();
            sync_threads();
            // Behind the fence, which would wait for them.
            let mut i = 0;
            while i < K as usize / 32 {
                give(load.byte(0, i as u32), keys[i]);
                give(load.byte(1, i as u32), queries[i]);
                i += 1;
            }
        }
        unit
    }

    /// Stores what there is to say of the gates of the warpgroup's value head. All lanes of a warp come.
    ///
    /// # Safety
    /// The scales are the block's to write.
    #[inline(always)]
    unsafe fn say(&self, c: &StepConstants, piece: Piece, gates: RawGates) {
        let gates = gates.sums(c, piece);
        let place = self.logs() + 4 * lane_id();
        // SAFETY: the caller's promise.
        unsafe {
            let mut half = 0;
            while half < 2 {
                let byte = place + 128 * half as u32;
                store_shared_b32(byte, gates.logs[half].to_bits());
                store_shared_b32(byte + BETAS, gates.betas[half].to_bits());
                half += 1;
            }
        }
    }

    /// Where the sums of log decays of the warpgroup's value head are.
    #[inline(always)]
    fn logs(&self) -> u32 {
        self.scales + LOGS + thread_idx_x() / 128 * OF_GROUP
    }

    /// Makes what this warpgroup makes of its value head. All threads come.
    ///
    /// # Safety
    /// As [`Self::new`]'s; the bytes of a head at `out` are the warpgroup's to write.
    #[inline(always)]
    pub unsafe fn give_head<const K: u32>(&self, out: impl Place) {
        // SAFETY: the caller's promise; the image and what is said of tokens is behind a barrier.
        unsafe {
            if self.makes.products {
                let q = warpgroup::by_rows::<K>(self.image + QUERIES, self.image);
                self.give_products(&q, out);
            }
            let mut k = [0.0; 32];
            if self.makes.solution {
                k = warpgroup::by_rows::<K>(self.image, self.image);
            }
            // The image is read. Whether there is more to do is asked anew: else the assembler makes two barriers of one, one
            // for each answer, which count as one, but not for synccheck.
            sync_threads();
            if anew(self.makes.solution as u32) != 0 {
                let betas = self.store_a(&k);
                self.solve(betas, out);
            }
        }
    }

    /// f32 at `base` of rows r and r + 8 of this warp's 16 tokens.
    #[inline(always)]
    unsafe fn of_rows(base: u32) -> [f32; 2] {
        let row = thread_idx_x() / 32 % 4 * 16 + lane_id() / 4;
        // SAFETY: they were stored before a barrier.
        [row, row + 8].map(|t| f32::from_bits(unsafe { load_shared_b32(base + 4 * t) }))
    }

    /// Products of two tokens of rows 16 `own` and on and s = 8 `j` and on, of which these are the products as in the image, with
    /// decays and scales; 0 where s is behind t, or at it and not `with_own`.
    #[inline(always)]
    unsafe fn decayed(
        &self,
        products: &[f32; 32],
        j: usize,
        (logs, scales): ([f32; 2], [f32; 2]),
        with_own: bool,
    ) -> [f32; 4] {
        let row = thread_idx_x() / 32 % 4 * 16 + lane_id() / 4;
        let s = 8 * j as u32 + lane_id() % 4 * 2;
        // SAFETY: they were stored before a barrier.
        let [log, of_column] = [self.logs(), self.scales]
            .map(|base| unsafe { load_shared_b64(base + 4 * s) }.map(f32::from_bits));
        array::from_fn(|i| {
            let (half, e) = (i / 2, i % 2);
            let (t, s) = (row + 8 * half as u32, s + e as u32);
            let decay = exp2(logs[half] - log[e]) * of_column[e];
            let value = products[4 * j + i] * (decay * scales[half]);
            if s < t || (with_own && s == t) {
                value
            } else {
                0.0
            }
        })
    }

    /// P and the factors.
    #[inline(always)]
    unsafe fn give_products(&self, products: &[f32; 32], out: impl Place) {
        let own = thread_idx_x() / 32 % 4;
        let (r, column) = (lane_id() / 4, lane_id() % 4 * 2);
        // SAFETY: the caller's promise.
        unsafe {
            let of_rows = (
                Self::of_rows(self.logs()),
                Self::of_rows(self.scales + FACTOR_BYTES),
            );
            let mut block = 0;
            while block < 4 {
                let mut p = [[0.0f32; 4]; 2];
                if block as u32 <= own {
                    p = [0, 1].map(|n| self.decayed(products, 2 * block + n, of_rows, true));
                }
                if block < 2 || own >= 2 {
                    let byte = P + own / 2 * 2048 + block as u32 * 1024 + own % 2 * 512 + r * 16;
                    let mut n = 0;
                    while n < 2 {
                        let byte = byte + n as u32 * 128 + 2 * column;
                        out.store_b32(byte, pack_f16x2(p[n][0], p[n][1]));
                        out.store_b32(byte + 256, pack_f16x2(p[n][2], p[n][3]));
                        n += 1;
                    }
                }
                block += 1;
            }
            if own == 0 {
                self.give_factors(out);
            }
        }
    }

    /// Stores A where it is solved; β of rows r and r + 8.
    #[inline(always)]
    unsafe fn store_a(&self, products: &[f32; 32]) -> [f32; 2] {
        let own = thread_idx_x() / 32 % 4;
        // SAFETY: a warp stores its own blocks.
        unsafe {
            let betas = Self::of_rows(self.logs() + BETAS);
            let scales = Self::of_rows(self.scales);
            let scales = [scales[0] * betas[0], scales[1] * betas[1]];
            let of_rows = (Self::of_rows(self.logs()), scales);
            let mut block = 0;
            while block < 4 {
                if block as u32 <= own {
                    let a = [0, 1].map(|n| self.decayed(products, 2 * block + n, of_rows, false));
                    self.store_terms(2 * block as u32, a[0]);
                    self.store_terms(2 * block as u32 + 1, a[1]);
                }
                block += 1;
            }
            betas
        }
    }

    /// The factors, by one warp.
    #[inline(always)]
    unsafe fn give_factors(&self, out: impl Place) {
        let lane = lane_id();
        // SAFETY: the caller's promise; what is said of tokens was stored before a barrier.
        unsafe {
            let load = |base: u32, token: u32| f32::from_bits(load_shared_b32(base + 4 * token));
            let last = load(self.logs(), CHUNK - 1);
            let mut half = 0;
            while half < 2 {
                let token = lane + 32 * half;
                let log = load(self.logs(), token);
                let (k, q) = (
                    load(self.scales, token),
                    load(self.scales + FACTOR_BYTES, token),
                );
                let decay = exp2(log);
                let byte = FACTORS + 4 * token;
                out.store_b32(byte, (decay * k).to_bits());
                out.store_b32(byte + FACTOR_BYTES, (decay * q).to_bits());
                out.store_b32(byte + 2 * FACTOR_BYTES, (exp2(last - log) * k).to_bits());
                half += 1;
            }
            // The whole line, so that no copy of it takes what nobody wrote.
            let byte = FACTORS + 3 * FACTOR_BYTES + 4 * lane;
            out.store_b32(byte, exp2(last).to_bits());
        }
    }

    /// Stores this warp's four elements of A of columns 8 `j` and on: in halves, and as they are in the block of the diagonal.
    #[inline(always)]
    unsafe fn store_terms(&self, j: u32, [w, x, y, z]: [f32; 4]) {
        let own = thread_idx_x() / 32 % 4;
        let (r, column) = (lane_id() / 4, lane_id() % 4 * 2);
        let (mine, block) = (self.scratch + own * OF_WARP, j / 2);
        let within = j % 2 * 8 + column;
        // SAFETY: a warp writes its own blocks.
        unsafe {
            if block < own {
                let (high, low) = split(w, x);
                let byte = mine + block * BLOCK + r * ROW + 2 * within;
                store_shared_b32(byte, high);
                store_shared_b32(byte + HALVES, low);
                let (high, low) = split(y, z);
                store_shared_b32(byte + 8 * ROW, high);
                store_shared_b32(byte + 8 * ROW + HALVES, low);
            } else {
                let byte = mine + SQUARE + within * 64 + 4 * r;
                store_shared_b32(byte, w.to_bits());
                store_shared_b32(byte + 64, x.to_bits());
                store_shared_b32(byte + 32, y.to_bits());
                store_shared_b32(byte + 96, z.to_bits());
            }
        }
    }

    /// T from A, of which this warp has rows 16 `own` and on; `betas` are those of its rows r and r + 8.
    #[inline(always)]
    unsafe fn solve(&self, betas: [f32; 2], out: impl Place) {
        let (group, own, lane) = (thread_idx_x() / 128, thread_idx_x() / 32 % 4, lane_id());
        let of_warp = |warp: u32| self.scratch + warp * OF_WARP;
        let mine = of_warp(own);
        // SAFETY: a warp writes its own blocks, and reads others behind a barrier.
        unsafe {
            sync_warp(FULL_MASK);
            // Column lane % 16 of D; of the block, columns are together.
            let mut x: [f32; 16] = array::from_fn(|i| (lane % 16 == i as u32) as u32 as f32);
            let mut i = 0;
            while i < 15 {
                let mut t = (i + 1) / 4 * 4;
                while t < 16 {
                    let terms = load_shared_b128(mine + SQUARE + 64 * i as u32 + 4 * t as u32);
                    let mut e = 0;
                    while e < 4 {
                        if t + e > i {
                            x[t + e] = fma(-f32::from_bits(terms[e]), x[i], x[t + e]);
                        }
                        e += 1;
                    }
                    t += 4;
                }
                i += 1;
            }
            if lane < 16 {
                i = 0;
                while i < 16 {
                    let (high, low) = split(x[i], 0.0);
                    let byte = mine + own * BLOCK + ROW * i as u32 + 2 * lane;
                    store_shared_b16(byte, high as u16);
                    store_shared_b16(byte + HALVES, low as u16);
                    i += 1;
                }
            }
            sync_barrier(SOLVERS + group, 128);
            let (matrix, line) = (lane / 8, lane % 8);
            let square = (matrix / 2 * 8 + line) * ROW + matrix % 2 * 16;
            let own_block = mine + own * BLOCK + square;
            let mut x = [[[0u32; 4]; 2]; 4];
            x[0] = [own_block, own_block + HALVES].map(|block| load_matrices_transposed(block));
            if own % 2 == 1 {
                store_block(out, own - 1, [0; 4]);
            }
            store_block(out, own, of_betas(joined(&x[0]), betas));
            let mut i = own + 1;
            let mut steps = 1;
            while steps < 4 {
                if i < 4 {
                    let mut sums = [[0.0f32; 4]; 2];
                    let mut k = 0;
                    while k < steps {
                        let block = read(of_warp(i) + (own + k as u32) * BLOCK + square);
                        sums = multiply(&x[k], &block, sums);
                        k += 1;
                    }
                    let sums = multiply(
                        &as_left(sums),
                        &read(of_warp(i) + i * BLOCK + square),
                        [[0.0; 4]; 2],
                    );
                    let next = sums.map(|sums| sums.map(|x| -x));
                    x[steps] = as_left(next);
                    store_block(out, i, of_betas(next, betas));
                }
                i += 1;
                steps += 1;
            }
        }
    }
}

/// Address, strides of rows and tokens, first channel and element of q or k.
type Source = (u64, (u32, u32), u32, u32);

/// How q and k come into an image.
struct Load<'a> {
    with: (&'a StepConstants, &'a PrefillParams),
    inputs: Inputs,
    /// The query/key head.
    head: u32,
    span: &'a Span,
    piece: Piece,
}

impl Load<'_> {
    /// The token of the piece that is this thread's.
    #[inline(always)]
    fn token(&self) -> u32 {
        8 * (thread_idx_x() / 32) + lane_id() % 8
    }

    /// # Safety
    /// The tensor is live.
    #[inline(always)]
    unsafe fn rows<const K: u32>(&self, (base, strides, head, element): Source) -> Rows {
        let mut rows: Rows = [elements::Raw([0; 8]); 4];
        let token = self.token();
        let t = self.piece.start + if token < self.piece.count { token } else { 0 };
        let mut i = 0;
        while i < K as usize / 32 {
            let channel = head + 8 * (lane_id() / 8 + 4 * i as u32);
            let address = self.span.at(base, strides, t, channel, element);
            // SAFETY: the caller's promise.
            rows[i] = unsafe { elements::load::<8>(address, element, self.with.0.wide_io != 0) };
            i += 1;
        }
        rows
    }

    /// Byte of 8 channels of the token in the image, of k (0) or q (1).
    #[inline(always)]
    fn byte(&self, of: u32, i: u32) -> u32 {
        (lane_id() / 8 + 4 * i) * 2048 + of * QUERIES + self.token() * 16
    }

    /// Convolves k (0) or q (1): values in f32, half of them in the place of k, half in that of q. Behind a barrier they are
    /// there.
    ///
    /// # Safety
    /// The tensors are live, and the image is the block's.
    #[inline(always)]
    unsafe fn stage<const K: u32, const OF: u32>(&self, image: u32) {
        let (c, params) = self.with;
        let (of_token, thread) = (K / 8, anew(thread_idx_x()));
        let (part, first) = (thread % of_token, RUN as u32 * (thread / of_token));
        if first < CHUNK {
            let channel = channel_of(c, 1 - OF, self.head, K) + 8 * part;
            let (t, end) = (
                self.piece.start + first,
                self.piece.start + self.piece.count,
            );
            // SAFETY: the caller's promise.
            unsafe {
                self.inputs
                    .convolve_run((c, params), self.span, (t, end), channel, |token, y| {
                        let place = image + part * 2048 + (first + token) * 16;
                        let [a, b, c, d, e, f, g, h] = y.map(f32::to_bits);
                        store_shared_b128(place, [a, b, c, d]);
                        store_shared_b128(place + QUERIES, [e, f, g, h]);
                    });
            }
        }
    }

    /// What [`Self::stage`] stored.
    #[inline(always)]
    unsafe fn staged<const K: u32>(&self, image: u32) -> Token {
        let mut x = [[0.0; 8]; 4];
        let mut i = 0;
        while i < K as usize / 32 {
            // SAFETY: it is there, behind a barrier.
            let [a, b] =
                unsafe { [0, 1].map(|of| load_shared_b128(image + self.byte(of, i as u32))) };
            x[i] = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(f32::from_bits);
            i += 1;
        }
        x
    }

    /// k (0) or q (1) with a power of two, and leaves what lacks to k̂ or q̂. The four lanes of a token come with their
    /// channels; `rounds` says that they may have more bits than f16.
    ///
    /// # Safety
    /// The scales are the block's to write.
    #[inline(always)]
    unsafe fn scaled<const K: u32, const OF: u32>(
        &self,
        x: Token,
        rounds: bool,
        scales: u32,
    ) -> Words {
        let c = self.with.0;
        let mut sum = 0.0;
        let mut i = 0;
        while i < K as usize / 32 {
            sum += dot(x[i], x[i]);
            i += 1;
        }
        let [sum] = butterfly_sum([sum], 8, 32);
        // 2^-e, for a length between 2^(e - 2) and 2^e.
        let e = ((sum.to_bits() >> 23 & 255) + 129) / 2;
        let (power, inverse) = (f32::from_bits((254 - e) << 23), f32::from_bits(e << 23));
        let mut words: Words = [[0; 4]; 4];
        let mut i = 0;
        while i < K as usize / 32 {
            let mut j = 0;
            while j < 4 {
                words[i][j] = pack_f16x2(x[i][2 * j] * power, x[i][2 * j + 1] * power);
                j += 1;
            }
            i += 1;
        }
        let mut rest = inverse;
        if c.l2norm != 0 {
            rest *= rsqrt(sum + 1e-6);
        }
        if rounds && OF == 0 {
            // What rounding did to the length is undone: with equal keys and β = 2 it would grow with every token.
            let mut rounded = 0.0;
            i = 0;
            while i < K as usize / 32 {
                let mut j = 0;
                while j < 4 {
                    let word = words[i][j];
                    let half = [word as u16, (word >> 16) as u16].map(f16_to_f32);
                    rounded = fma(half[0], half[0], fma(half[1], half[1], rounded));
                    j += 1;
                }
                i += 1;
            }
            let [rounded] = butterfly_sum([rounded], 8, 32);
            let exact = sum * power * power;
            let ratio = exact * rsqrt(exact * rounded);
            rest *= if exact * rounded > 1e-30 { ratio } else { 1.0 };
        }
        if OF == 1 {
            rest *= f32::from_bits(c.scale);
        }
        if lane_id() < 8 {
            // SAFETY: the caller's promise.
            unsafe {
                store_shared_b32(
                    scales + OF * FACTOR_BYTES + 4 * self.token(),
                    rest.to_bits(),
                );
            }
        }
        words
    }

    /// # Safety
    /// The image is the block's to write.
    #[inline(always)]
    unsafe fn give<const K: u32, const OF: u32>(&self, words: Words, image: u32) {
        let mut i = 0;
        while i < K as usize / 32 {
            let byte = self.byte(OF, i as u32);
            // SAFETY: the caller's promise; a thread writes its own token's channels.
            unsafe { store_shared_b128(image + byte, words[i]) };
            i += 1;
        }
    }

    /// k (0) or q (1) of what was loaded.
    ///
    /// # Safety
    /// The image and the scales are the block's to write.
    #[inline(always)]
    unsafe fn place<const K: u32, const OF: u32>(
        &self,
        rows: Rows,
        element: u32,
        (image, scales): (u32, u32),
    ) -> Words {
        let mut x: Token = [[0.0; 8]; 4];
        let mut i = 0;
        while i < K as usize / 32 {
            if self.token() < self.piece.count {
                x[i] = rows[i].to_f32(element);
            }
            i += 1;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let words = self.scaled::<K, OF>(x, element == Element::F32 as u32, scales);
            self.give::<K, OF>(words, image);
            words
        }
    }
}

/// The halves of a block, of which this lane names a row of a matrix.
///
/// # Safety
/// They are in shared memory.
#[inline(always)]
unsafe fn read(block: u32) -> [[u32; 4]; 2] {
    // SAFETY: the caller's promise.
    unsafe { [load_matrices(block), load_matrices(block + HALVES)] }
}

/// Stores this warp's block of T with rows t from 16 `i` on: rows s of the block r and r + 8, 8 columns t, then 8 more.
///
/// # Safety
/// The block is this warp's to write.
#[inline(always)]
unsafe fn store_block(out: impl Place, i: u32, words: [u32; 4]) {
    let (own, r, c) = (thread_idx_x() / 32 % 4, lane_id() / 4, lane_id() % 4);
    let byte = i / 2 * 2048 + own * 1024 + i % 2 * 512 + r * 16 + 4 * c;
    // SAFETY: the caller's promise.
    unsafe {
        out.store_b32(byte, words[0]);
        out.store_b32(byte + 128, words[1]);
        out.store_b32(byte + 256, words[2]);
        out.store_b32(byte + 384, words[3]);
    }
}

/// A block of T, from one of X and β of rows r and r + 8.
#[inline(always)]
fn of_betas([a, b]: [[f32; 4]; 2], betas: [f32; 2]) -> [u32; 4] {
    [
        pack_f16x2(a[0] * betas[0], a[1] * betas[0]),
        pack_f16x2(a[2] * betas[1], a[3] * betas[1]),
        pack_f16x2(b[0] * betas[0], b[1] * betas[0]),
        pack_f16x2(b[2] * betas[1], b[3] * betas[1]),
    ]
}

/// Two values as bf16, and what that leaves of them.
#[inline(always)]
fn split(x: f32, y: f32) -> (u32, u32) {
    let high = pack_bf16x2(x, y);
    let [p, q] = values(high);
    (high, pack_bf16x2(x - p, y - q))
}

#[inline(always)]
fn values(word: u32) -> [f32; 2] {
    [bf16_to_f32(word as u16), f32::from_bits(word & 0xffff_0000)]
}

/// Sums as a left factor, in two halves.
#[inline(always)]
fn as_left([a, b]: [[f32; 4]; 2]) -> [[u32; 4]; 2] {
    let pairs = [(a[0], a[1]), (a[2], a[3]), (b[0], b[1]), (b[2], b[3])];
    let split = pairs.map(|(x, y)| split(x, y));
    [split.map(|(high, _)| high), split.map(|(_, low)| low)]
}

/// A left factor as sums.
#[inline(always)]
fn joined([high, low]: &[[u32; 4]; 2]) -> [[f32; 4]; 2] {
    let pair = |i: usize| {
        let ([a, b], [c, d]) = (values(high[i]), values(low[i]));
        [a + c, b + d]
    };
    let [[a, b], [c, d], [e, f], [g, h]] = [pair(0), pair(1), pair(2), pair(3)];
    [[a, b, c, d], [e, f, g, h]]
}

/// A Bᵀ + C of blocks of 16; both factors are split in two.
#[inline(always)]
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

/// The gates of a piece's tokens and a value head as they lie in memory: a lane has those of tokens `lane_id()` and 32 more.
#[derive(Clone, Copy)]
pub struct RawGates {
    g: [elements::Raw<1>; 2],
    b: [elements::Raw<1>; 2],
    a_log: f32,
    dt_bias: f32,
}

impl RawGates {
    /// Of nothing.
    const NONE: Self = Self {
        g: [elements::Raw([0]); 2],
        b: [elements::Raw([0]); 2],
        a_log: 0.0,
        dt_bias: 0.0,
    };

    /// Of value head `hv`.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors.
    #[inline(always)]
    pub unsafe fn load(
        c: &StepConstants,
        params: &PrefillParams,
        (span, piece): (&Span, Piece),
        hv: u32,
    ) -> Self {
        // SAFETY: the caller's promise; tokens that are not there are the first instead.
        unsafe {
            let place = |token: u32| piece.start + if token < piece.count { token } else { 0 };
            let first = Self::of_token(c, params, span, place(lane_id()), hv);
            let second = Self::of_token(c, params, span, place(lane_id() + 32), hv);
            Self {
                g: [first.g[0], second.g[0]],
                b: [first.b[0], second.b[0]],
                ..first
            }
        }
    }

    /// Of one token, which is there, twice.
    #[inline(always)]
    unsafe fn of_token(
        c: &StepConstants,
        params: &PrefillParams,
        span: &Span,
        t: u32,
        hv: u32,
    ) -> Self {
        let step = &params.layer.step;
        let strides = (params.g_row, c.g_token);
        let g = span.at(step.g, strides, t, hv * c.g_head, c.g_element);
        let b = span.at(step.b, (params.b_row, c.b_token), t, hv, c.b_element);
        // SAFETY: the caller's promise.
        unsafe {
            let (a_log, dt_bias) = if c.gate == Gate::Log as u32 {
                (0, 0)
            } else {
                let offset = 4 * hv as u64;
                (
                    load_b32(step.a_log + offset),
                    load_b32(step.dt_bias + offset),
                )
            };
            Self {
                g: [load_one(g, c.g_element); 2],
                b: [load_one(b, c.b_element); 2],
                a_log: f32::from_bits(a_log),
                dt_bias: f32::from_bits(dt_bias),
            }
        }
    }

    /// Log decay and β of both tokens.
    #[inline(always)]
    fn values(&self, c: &StepConstants, half: usize) -> (f32, f32) {
        let ([g], [b]) = (
            self.g[half].to_f32(c.g_element),
            self.b[half].to_f32(c.b_element),
        );
        if c.gate == Gate::Log as u32 {
            return (g, b);
        }
        (
            gate::log_decay(g, self.a_log, self.dt_bias),
            gate::sigmoid(b) * f32::from_bits(c.beta_scale),
        )
    }

    /// Their sums. Tokens that are not there neither decay nor write. All lanes of the warp come.
    #[inline(always)]
    fn sums(&self, c: &StepConstants, piece: Piece) -> Gates {
        let lane = lane_id();
        let mut logs = [0.0f32; 2];
        let mut betas = [0.0f32; 2];
        let mut half = 0;
        while half < 2 {
            let (log, beta) = self.values(c, half);
            if lane + 32 * (half as u32) < piece.count {
                logs[half] = maximum(log * core::f32::consts::LOG2_E, LEAST);
                betas[half] = beta;
            }
            half += 1;
        }
        let mut step = 1;
        while step < 32 {
            let before = logs.map(|log| warp_shuffle_idx(log, (lane + 32 - step) % 32));
            if lane >= step {
                logs = [logs[0] + before[0], logs[1] + before[1]];
            }
            step *= 2;
        }
        logs[1] += warp_shuffle_idx(logs[0], 31);
        Gates { logs, betas }
    }
}

/// Log decay and β of token `t` of value head `hv`.
///
/// # Safety
/// `params` and `c` describe live tensors; the token is there.
#[inline(always)]
pub unsafe fn gates_of(
    c: &StepConstants,
    params: &PrefillParams,
    span: &Span,
    t: u32,
    hv: u32,
) -> (f32, f32) {
    // SAFETY: the caller's promise.
    unsafe { RawGates::of_token(c, params, span, t, hv) }.values(c, 0)
}

/// The gates of a piece's tokens: a lane has those of tokens `lane_id()` and 32 more.
struct Gates {
    /// Sums of log decays up to the token, in powers of two.
    logs: [f32; 2],
    betas: [f32; 2],
}
