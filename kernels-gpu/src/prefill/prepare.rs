//! What of a unit does not depend on states: k and q as f16 images, and of each value head T, P and factors. Two warpgroups
//! make a value head each, of one query/key head; or, of one value head, the first T, the other P.
//!
//! k and q are in the image with a power of two that brings their length near 1, exactly where they have 16 bits; what lacks
//! to k̂ and q̂ is a scale of the token.
//!
//! With G the sums of log decays, in powers of two:
//!     A_ts = β_t 2^(G_t − G_s) k̂_t·k̂_s   s < t        T = (I + A)⁻¹ diag(β)        P_ts = 2^(G_t − G_s) q̂_t·k̂_s   s ≤ t
//! T is made as solve.rs says.

use core::array;

use super::convolution::Inputs;
use super::load::{self, Load};
use super::operands::{Place, Shared};
use super::rows::{Piece, Span};
use super::solve::{SCRATCH_BYTES, Solver};
use super::workspace::Operands;
use super::{CHUNK, FACTOR_BYTES, FACTORS, P, QUERIES, anew, image_bytes};
use crate::constants::Element;
use crate::device::float::{exp2, maximum, pack_f16x2};
use crate::device::global::load_b32;
use crate::device::shared::{
    copy_bulk, copy_bulk_commit, copy_bulk_wait, load_shared_b32, load_shared_b64, open_counter,
    store_bulk, store_bulk_wait, store_shared_b32,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_idx};
use crate::device::warpgroup::{self, fence_shared};
use crate::math::elements::{self, load_one};
use crate::math::gate;
use crate::step::{Gate, PrefillParams, StepConstants};

/// The log decays of a token are held above this power of two: the decay of a state is 0 from there on, and no sum of a
/// piece's is −∞.
const LEAST: f32 = -127.0;
/// Behind the scales of k and q, for each warpgroup's value head: sums of log decays, in powers of two, and β.
const LOGS: u32 = 2 * FACTOR_BYTES;
const BETAS: u32 = FACTOR_BYTES;
const OF_GROUP: u32 = 2 * FACTOR_BYTES;
/// Bytes of what is said of tokens.
pub const SCALE_BYTES: u32 = LOGS + 2 * OF_GROUP;

/// A unit whose k and q are in the image, and what is said of its tokens behind it.
pub struct Unit {
    image: u32,
    /// Of this warpgroup.
    solver: Solver,
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

impl Unit {
    /// Of query/key head `h`, and the warpgroup's value head `hv`. All [`super::load::THREADS`] come; the image is at `image` in shared
    /// memory. The scratch, [`SCRATCH_BYTES`] for each warpgroup that makes T, may be where the image is, if that is not wanted
    /// behind [`Self::give_head`].
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
    ) -> Self {
        let step = &params.layer.step;
        let load: Load<'_, false> = Load {
            with: (c, params),
            inputs,
            head: h,
            span,
            piece,
        };
        let k = (step.k, (params.k_row, c.k_token), h * c.k_head, c.k_element);
        let q = (step.q, (params.q_row, c.q_token), h * c.q_head, c.q_element);
        let unit = Self::at((image, scratch, scales), makes);
        // SAFETY: the caller's promise. What is convolved goes through the image: q first, which is kept until k has been there.
        unsafe {
            let says = says_gates();
            let mut gates = RawGates::NONE;
            if says {
                gates = RawGates::load(c, params, (span, piece), hv);
            }
            if c.taps != 0 {
                if says {
                    unit.say(c, piece, gates);
                }
                load.stage::<K, 1>(image);
                sync_threads();
                let queries = load.scaled::<K, 1>(load.staged::<K>(image), true, scales);
                sync_threads();
                load.stage::<K, 0>(image);
                sync_threads();
                let keys = load.scaled::<K, 0>(load.staged::<K>(image), true, scales);
                sync_threads();
                load.give::<K, 0>(keys, Shared(image));
                load.give::<K, 1>(queries, Shared(image));
            } else {
                // Both at once, where there are registers for both.
                let (keys, comes_later) = (load.rows::<K>(k), q.3 == Element::F32 as u32);
                let mut queries = load::NO_ROWS;
                if !comes_later {
                    queries = load.rows::<K>(q);
                }
                if says {
                    unit.say(c, piece, gates);
                }
                load.place::<K, 0>(keys, k.3, (image, scales));
                if comes_later {
                    queries = load.rows::<K>(q);
                }
                load.place::<K, 1>(queries, q.3, (image, scales));
            }
            fence_shared();
            sync_threads();
        }
        unit
    }

    /// The same where a launch before has convolved k and q: they are where `operands` says, their scales with the factors. Behind
    /// [`SCALE_BYTES`] there are [`COUNTER_BYTES`](crate::device::shared::COUNTER_BYTES).
    ///
    /// # Safety
    /// As [`Self::new`]'s; what `operands` names is in the workspace.
    #[inline(always)]
    pub unsafe fn of_convolved<const K: u32>(
        c: &StepConstants,
        params: &PrefillParams,
        (span, piece): (&Span, Piece),
        hv: u32,
        makes: Makes,
        at: (u32, u32, u32),
        operands: Operands,
    ) -> Self {
        let unit = Self::at(at, makes);
        let counter = unit.scales + SCALE_BYTES;
        // SAFETY: the caller's promise; the copies are there when their thread comes to the barrier.
        unsafe {
            let copies = thread_idx_x() == 0;
            if copies {
                open_counter(counter, 1);
                copy_bulk(unit.image, operands.images, image_bytes(K), counter);
                copy_bulk_commit(counter);
            }
            let byte = 4 * thread_idx_x();
            if byte < 2 * FACTOR_BYTES {
                let scale = load_b32(operands.head + (FACTORS + byte) as u64);
                store_shared_b32(unit.scales + byte, scale);
            }
            if says_gates() {
                let gates = RawGates::load(c, params, (span, piece), hv);
                unit.say(c, piece, gates);
            }
            if copies {
                copy_bulk_wait(counter, 0);
            }
            sync_threads();
        }
        unit
    }

    /// Of this thread's warpgroup.
    #[inline(always)]
    fn at((image, scratch, scales): (u32, u32, u32), makes: Makes) -> Self {
        let group = if makes.products {
            thread_idx_x() / 128
        } else {
            0
        };
        Self {
            image,
            solver: Solver(scratch + group * SCRATCH_BYTES),
            scales,
            makes,
        }
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

    /// Stores the image in the workspace. It is there when the launch ends.
    ///
    /// # Safety
    /// As [`Self::new`]'s; the bytes of an image at `images` are the block's to write.
    #[inline(always)]
    pub unsafe fn give_image<const K: u32>(&self, images: u64) {
        if thread_idx_x() == 0 {
            // SAFETY: the caller's promise; the image is behind a fence and a barrier, and not written before it is read.
            unsafe { store_bulk(images, self.image, image_bytes(K)) };
        }
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
            if thread_idx_x() == 0 {
                store_bulk_wait();
            }
            // The image is read. Whether there is more to do is asked anew: else the assembler makes two barriers of one, one
            // for each answer, which count as one, but not for synccheck.
            sync_threads();
            if anew(self.makes.solution as u32) != 0 {
                let betas = self.store_a(&k);
                self.solver.solve(betas, out);
            } else {
                Solver::solve_nothing();
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
                    self.solver.store_terms(2 * block as u32, a[0]);
                    self.solver.store_terms(2 * block as u32 + 1, a[1]);
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
}

/// One warp of each group says what there is to say of gates.
#[inline(always)]
fn says_gates() -> bool {
    (thread_idx_x() / 32).is_multiple_of(4)
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
