//! Intra-chunk pass of GDN: computes everything about a chunk that does not depend on the state. That is k̂ and q̂ as f16 images
//! for a query/key head, and T, P and factors for one or two of its value heads. All eight warps compute A and P of each value
//! head; then each of the two warpgroups computes T of one head (with one head, only the first warpgroup).
//!
//! The image has k and q times a power of two that brings their length near 1; for 16-bit inputs this is exact. A scale of the
//! token makes up the difference to k̂ and q̂.
//!
//! With G the prefix sums of log2 decays:
//!     A_ts = β_t 2^(G_t − G_s) k̂_t·k̂_s   s < t        T = (I + A)⁻¹ diag(β)        P_ts = 2^(G_t − G_s) q̂_t·k̂_s   s ≤ t
//! solve.rs computes T.

use super::convolution::ConvInputs;
use super::load::{self, Load, THREADS};
use super::operands::{SharedSink, Sink};
use super::products::{Fragment, MOST_TILES, Tiles};
use super::rows::{Chunk, Span};
use super::solve::{SCRATCH_BYTES, Solver};
use super::workspace::Operands;
use super::{CHUNK, FACTOR_BYTES, FACTORS, P, image_bytes, opaque};
use crate::constants::Element;
use crate::device::float::{exp2, maximum, minimum, pack_f16x2};
use crate::device::global::{load_b32, store_b128};
use crate::device::shared::{
    copy_async_b128, copy_async_commit, copy_async_wait, copy_bulk, copy_bulk_commit,
    copy_bulk_wait, load_shared_b32, load_shared_b64, load_shared_b128, open_counter, store_bulk,
    store_bulk_wait, store_shared_b32,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_idx};
use crate::device::warpgroup::fence_shared;
use crate::math::each::each;
use crate::math::elements::{self, load_one};
use crate::math::gate;
use crate::step::{Gate, PrefillParams, StepConstants};

/// Lower bound of a token's log2 decay. At this bound the decay of a state is 0, and no prefix sum of a chunk is −∞.
const LEAST: f32 = -127.0;
/// Layout after the scales of k and q, for each value head: prefix sums of log2 decays, then β.
const LOGS: u32 = 2 * FACTOR_BYTES;
const BETAS: u32 = FACTOR_BYTES;
const OF_HEAD: u32 = 2 * FACTOR_BYTES;
/// Bytes of the tokens' scales, log decays and β.
pub const SCALE_BYTES: u32 = LOGS + 2 * OF_HEAD;

/// Calls `f` with the byte offsets of this thread's 16-byte parts of the image, which all [`THREADS`] share.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn each_part<const K: u32>(f: impl Fn(u32)) {
    let mut byte = 16 * thread_idx_x();
    while byte < image_bytes(K) {
        f(byte);
        byte += 16 * THREADS;
    }
}

/// A chunk whose image of k and q is in shared memory, with the scales and gates of its tokens in `scales`.
pub struct Unit {
    image: u32,
    scratch: u32,
    scales: u32,
    /// Number of value heads, one or two.
    heads: u32,
}

impl Unit {
    /// Loads the chunk for query/key head `h` and `heads` value heads; `hv` is the warpgroup's. Called by all
    /// [`super::load::THREADS`]. The image is at `image` in shared memory. The scratch, [`SCRATCH_BYTES`] for each value head,
    /// may overlap the image if the image is not needed after [`Self::give_heads`].
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; `chunk` is of `span`; the image, the scratch and the scales are the block's to
    /// write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn new<const K: u32>(
        c: &StepConstants,
        params: &PrefillParams,
        (span, chunk): (&Span, Chunk),
        (h, hv, inputs): (u32, u32, ConvInputs),
        heads: u32,
        (image, scratch, scales): (u32, u32, u32),
    ) -> Self {
        let step = &params.layer.step;
        let load: Load<'_, false> = Load {
            with: (c, params),
            inputs,
            head: h,
            span,
            chunk,
        };
        let k = (step.k, (params.k_row, c.k_token), h * c.k_head, c.k_element);
        let q = (step.q, (params.q_row, c.q_token), h * c.q_head, c.q_element);
        let unit = Self {
            image,
            scratch,
            scales,
            heads,
        };
        // SAFETY: the caller's promise. Convolved k and q are staged in the image's place: q first, kept in registers until k has
        // been staged.
        unsafe {
            let says = says_gates();
            let mut gates = RawChunkGates::NONE;
            if says {
                gates = RawChunkGates::load(c, params, (span, chunk), hv);
            }
            if c.taps != 0 {
                if says {
                    unit.say(c, chunk, gates);
                }
                load.stage::<K, 1>(image);
                sync_threads();
                let queries = load.scaled::<K, 1>(load.staged::<K>(image), true, scales);
                sync_threads();
                load.stage::<K, 0>(image);
                sync_threads();
                let keys = load.scaled::<K, 0>(load.staged::<K>(image), true, scales);
                sync_threads();
                load.give::<K, 0>(keys, SharedSink(image));
                load.give::<K, 1>(queries, SharedSink(image));
            } else {
                // Both loads in one pass, where registers suffice for both.
                let (keys, comes_later) = (load.rows::<K>(k), q.3 == Element::F32 as u32);
                let mut queries = load::NO_RAW_CHANNELS;
                if !comes_later {
                    queries = load.rows::<K>(q);
                }
                if says {
                    unit.say(c, chunk, gates);
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

    /// Loads the chunk where an earlier launch has convolved k and q: they are at `operands`, their scales in the place of the
    /// factors. The bytes after [`SCALE_BYTES`] hold a counter of [`COUNTER_BYTES`](crate::device::shared::COUNTER_BYTES).
    ///
    /// # Safety
    /// As for [`Self::new`]; the memory at `operands` is in the workspace.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn of_convolved<const K: u32>(
        c: &StepConstants,
        params: &PrefillParams,
        (span, chunk): (&Span, Chunk),
        hv: u32,
        heads: u32,
        (image, scratch, scales): (u32, u32, u32),
        operands: Operands,
    ) -> Self {
        let unit = Self {
            image,
            scratch,
            scales,
            heads,
        };
        let counter = unit.scales + SCALE_BYTES;
        // SAFETY: the caller's promise; each thread waits for its copies before the barrier.
        unsafe {
            let in_bulk = c.copies_in_bulk();
            let copies = in_bulk && thread_idx_x() == 0;
            if in_bulk {
                if copies {
                    open_counter(counter, 1);
                }
                // For racecheck, which attributes the counter to another lane.
                sync_warp(FULL_MASK);
                if copies {
                    copy_bulk(unit.image, operands.images, image_bytes(K), counter);
                    copy_bulk_commit(counter);
                }
            } else {
                each_part::<K>(|byte| {
                    copy_async_b128(unit.image + byte, operands.images + byte as u64);
                });
                copy_async_commit();
            }
            let byte = 4 * thread_idx_x();
            if byte < 2 * FACTOR_BYTES {
                let scale = load_b32(operands.head + (FACTORS + byte) as u64);
                store_shared_b32(unit.scales + byte, scale);
            }
            if says_gates() {
                let gates = RawChunkGates::load(c, params, (span, chunk), hv);
                unit.say(c, chunk, gates);
            }
            if copies {
                copy_bulk_wait(counter, 0);
            }
            if !in_bulk {
                copy_async_wait::<0>();
            }
            sync_threads();
        }
        unit
    }

    /// Stores the prefix sums and β of the warpgroup's value head. Called by all lanes of a warp.
    ///
    /// # Safety
    /// The scales are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn say(&self, c: &StepConstants, chunk: Chunk, gates: RawChunkGates) {
        let gates = gates.sums(c, chunk);
        let place = self.logs(thread_idx_x() / 128) + 4 * lane_id();
        each!(half in 0..2 => {
            let byte = place + 128 * half as u32;
            store_shared_b32(byte, gates.logs[half].to_bits());
            store_shared_b32(byte + BETAS, gates.betas[half].to_bits());
        });
    }

    /// Address of a value head's prefix sums of log decays.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn logs(&self, head: u32) -> u32 {
        self.scales + LOGS + head * OF_HEAD
    }

    /// Solver of a value head's A.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn solver(&self, head: u32) -> Solver {
        Solver(self.scratch + head * SCRATCH_BYTES)
    }

    /// Stores the image in the workspace; the copy is complete when the launch ends. Called by all threads.
    ///
    /// # Safety
    /// As for [`Self::new`]; the bytes of an image at `images` are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn give_image<const K: u32>(&self, c: &StepConstants, images: u64) {
        // SAFETY: the caller's promise; a fence and a barrier follow the image's stores, and the image is overwritten only after
        // it is read.
        unsafe {
            if !c.copies_in_bulk() {
                each_part::<K>(|byte| {
                    store_b128(images + byte as u64, load_shared_b128(self.image + byte));
                });
            } else if thread_idx_x() == 0 {
                store_bulk(images, self.image, image_bytes(K));
            }
        }
    }

    /// Computes T, P and factors of the value heads and stores them to `out`; the second head's are `behind` bytes after the
    /// first's. Called by all threads.
    ///
    /// # Safety
    /// As for [`Self::new`]; the bytes of the heads are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn give_heads<const K: u32>(&self, c: &StepConstants, out: impl Sink, behind: u32) {
        let tiles = Tiles::of_warp();
        let (group, own) = (thread_idx_x() / 128, thread_idx_x() / 32 % 4);
        // SAFETY: the caller's promise; a barrier follows the stores of the image and of the tokens' scales and gates.
        unsafe {
            let products = tiles.products::<K>(self.image);
            if c.copies_in_bulk() && thread_idx_x() == 0 {
                store_bulk_wait();
            }
            // All warps have read the image.
            sync_threads();
            self.weigh(tiles, products, (out, behind));
            // The condition uses an opaque number (docs/compiler.md), because the barrier would be compiled twice otherwise.
            sync_threads();
            if opaque(group) < self.heads {
                let betas = Self::of_rows(self.logs(group) + BETAS, 16 * own + lane_id() / 4);
                self.solver(group)
                    .solve(betas, self.scales, out.behind(group * behind));
            } else {
                Solver::solve_nothing();
            }
        }
    }

    /// Loads the f32 at `base` of tokens `row` and `row` + 8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn of_rows(base: u32, row: u32) -> [f32; 2] {
        // SAFETY: both were stored before a barrier.
        [row, row + 8].map(|t| f32::from_bits(unsafe { load_shared_b32(base + 4 * t) }))
    }

    /// Stores A, P and the factors of each value head.
    ///
    /// # Safety
    /// As for [`Self::give_heads`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn weigh(
        &self,
        tiles: Tiles,
        products: [[Fragment; 2]; MOST_TILES],
        (out, behind): (impl Sink, u32),
    ) {
        let (warp, row) = (thread_idx_x() / 32, tiles.row());
        let of_keys = Self::of_rows(self.scales, row);
        let of_queries = Self::of_rows(self.scales + FACTOR_BYTES, row);
        each!(head in 0..2 => {
            if head < self.heads {
                let logs = Self::of_rows(self.logs(head), row);
                let betas = Self::of_rows(self.logs(head) + BETAS, row);
                let of_keys = [of_keys[0] * betas[0], of_keys[1] * betas[1]];
                let out = out.behind(head * behind);
                each!(tile in 0..MOST_TILES => {
                    if (tile as u32) < tiles.count {
                        let s = tiles.column(tile);
                        let [log, of_column] = [self.logs(head), self.scales]
                            .map(|base| load_shared_b64(base + 4 * s).map(f32::from_bits));
                        let (mut a, mut p) = ([0.0; 4], [0.0; 4]);
                        each!(i in 0..4 => {
                            let (half, e) = (i / 2, i % 2);
                            // The decay is at most 1, for s > t too.
                            let decay = exp2(minimum(logs[half] - log[e], 0.0)) * of_column[e];
                            let [k, q] = [products[tile][0][i], products[tile][1][i]];
                            a[i] = k * (decay * of_keys[half]);
                            p[i] = q * (decay * of_queries[half]);
                        });
                        let of = (tiles.rows, tiles.first + tile as u32);
                        self.solver(head).store_terms(of, a);
                        Self::store_products(out, of, p);
                    }
                });
                // P is 0 where t is in the lower and s in the upper 16 of the same 32 tokens.
                if warp < 2 {
                    Self::store_products(out, (2 * warp, 4 * warp + 2), [0.0; 4]);
                    Self::store_products(out, (2 * warp, 4 * warp + 3), [0.0; 4]);
                }
                // By a warp that has two tiles only.
                if warp == 2 + 5 * head {
                    self.give_factors(head, out);
                }
            }
        });
    }

    /// Stores a tile of P: 16 tokens t and 8 tokens s.
    ///
    /// # Safety
    /// The tile is the warp's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_products(out: impl Sink, (t, s): (u32, u32), p: Fragment) {
        let of_tile = t / 2 * 2048 + s / 2 * 1024 + t % 2 * 512 + s % 2 * 128;
        let out = out.behind(P + of_tile + lane_id() / 4 * 16 + lane_id() % 4 * 4);
        out.store_b32(0, pack_f16x2(p[0], p[1]));
        out.store_b32(256, pack_f16x2(p[2], p[3]));
    }

    /// Stores the factors; called by one warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_factors(&self, head: u32, out: impl Sink) {
        let lane = lane_id();
        // SAFETY: the caller's promise; the tokens' scales and gates were stored before a barrier.
        unsafe {
            let load = |base: u32, token: u32| f32::from_bits(load_shared_b32(base + 4 * token));
            let last = load(self.logs(head), CHUNK - 1);
            let out = out.behind(FACTORS + 4 * lane);
            each!(half in 0..2 => {
                let token = lane + 32 * half;
                let log = load(self.logs(head), token);
                let (k, q) = (
                    load(self.scales, token),
                    load(self.scales + FACTOR_BYTES, token),
                );
                let decay = exp2(log);
                let byte = 128 * half;
                out.store_b32(byte, (decay * k).to_bits());
                out.store_b32(byte + FACTOR_BYTES, (decay * q).to_bits());
                out.store_b32(byte + 2 * FACTOR_BYTES, (exp2(last - log) * k).to_bits());
            });
            // All lanes store it, a whole line, so that a copy of the line reads no unwritten bytes.
            out.store_b32(3 * FACTOR_BYTES, exp2(last).to_bits());
        }
    }
}

/// Whether this warp computes the gates: one warp of each warpgroup, on different quarters of an SM.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn says_gates() -> bool {
    let warp = thread_idx_x() / 32;
    warp == 1 || warp == 6
}

/// Gates of a chunk's tokens and a value head, as loaded from memory. A lane has tokens `lane_id()` and `lane_id()` + 32.
#[derive(Clone, Copy)]
pub struct RawChunkGates {
    g: [elements::Raw<1>; 2],
    b: [elements::Raw<1>; 2],
    a_log: f32,
    dt_bias: f32,
}

impl RawChunkGates {
    /// Gates without a value.
    const NONE: Self = Self {
        g: [elements::Raw([0]); 2],
        b: [elements::Raw([0]); 2],
        a_log: 0.0,
        dt_bias: 0.0,
    };

    /// Loads the gates of value head `hv`.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(
        c: &StepConstants,
        params: &PrefillParams,
        (span, chunk): (&Span, Chunk),
        hv: u32,
    ) -> Self {
        // SAFETY: the caller's promise; the first token replaces tokens beyond the chunk.
        unsafe {
            let place = |token: u32| chunk.start + if token < chunk.count { token } else { 0 };
            let first = Self::of_token(c, params, span, place(lane_id()), hv);
            let second = Self::of_token(c, params, span, place(lane_id() + 32), hv);
            Self {
                g: [first.g[0], second.g[0]],
                b: [first.b[0], second.b[0]],
                ..first
            }
        }
    }

    /// Loads the gates of token `t`, which the row has, into both halves.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

    /// Log decay and β of the lane's token `half`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

    /// Prefix sums of log decays, and β. Tokens beyond the chunk neither decay nor write. Called by all lanes of the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sums(&self, c: &StepConstants, chunk: Chunk) -> ChunkGates {
        let lane = lane_id();
        let mut logs = [0.0f32; 2];
        let mut betas = [0.0f32; 2];
        let mut half = 0;
        while half < 2 {
            let (log, beta) = self.values(c, half);
            if lane + 32 * (half as u32) < chunk.count {
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
        ChunkGates { logs, betas }
    }
}

/// Log decay and β of token `t` for value head `hv`.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn gates_of(
    c: &StepConstants,
    params: &PrefillParams,
    span: &Span,
    t: u32,
    hv: u32,
) -> (f32, f32) {
    // SAFETY: the caller's promise.
    unsafe { RawChunkGates::of_token(c, params, span, t, hv) }.values(c, 0)
}

/// Gates of a chunk's tokens. A lane has tokens `lane_id()` and `lane_id()` + 32.
struct ChunkGates {
    /// Prefix sums of log2 decays, up to and including the token.
    logs: [f32; 2],
    betas: [f32; 2],
}
