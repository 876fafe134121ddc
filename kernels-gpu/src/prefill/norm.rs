//! Norms o after the scan, one chunk of a value head at a time.
//!
//! The scan stores o without its norm into o: f32 unchanged, otherwise f16(o · 2^⌈−log2 scale⌉). The power of two undoes the
//! scale of q, so that o has the range of S q̂ before scaling, and f16 holds o where f16 holds S.
//!
//! Where f16 does not hold o, 16 channels of a token are scaled by a further power of two. For each value head and 16 channels,
//! the workspace has the inverse of that power for each token, f32, and the first token that is scaled.

use super::CHUNK;
use super::load::THREADS;
use super::output::{Scales, sum_of_quad};
use super::rows::{Chunk, Span};
use super::workspace::tokens;
use crate::constants::Element;
use crate::device::float::{b16x2_to_f32, pack_f16x2, rsqrt};
use crate::device::global::{load_b32, load_b128, store_b32};
use crate::device::rarely;
use crate::device::shared::{dynamic_shared_mem, store_shared_b32};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_ballot, warp_shuffle_xor};
use crate::layer::Place;
use crate::layer::norm::{normed, squares, sum_of};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load, load_one, store};
use crate::math::power;
use crate::math::range::{SMALL, any_large, times};
use crate::step::{PrefillParams, StepConstants};

/// Largest number of groups of 64 channels.
const MOST_GROUPS: usize = 3;
/// Byte offset, after the scales of a warp's 16 channels, of the first token that is scaled.
pub const FIRST: u32 = 4 * CHUNK;
/// Bytes of the scales and the first token.
pub const OF_WARP: u32 = FIRST + 16;

/// Bytes of the scales of a value head with `dim` channels.
pub const fn scales_bytes(dim: u32) -> u32 {
    (dim / 16 * OF_WARP).next_multiple_of(128)
}

/// Address of the scales of 16 channels, number `warp`, of a value head whose scales are at `scales`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scales_of(scales: u64, warp: u32) -> u64 {
    scales + (warp * OF_WARP) as u64
}

/// Stores that no token of a chunk's value head is scaled; the scan overwrites this where it scales a token. The first of the
/// calling threads store.
///
/// # Safety
/// The scales are these threads' to write.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn begin<const V: u32>(c: &StepConstants, scales: u64, thread: u32) {
    if is_left(c) && thread < V / 16 {
        store_b32(scales_of(scales, thread) + FIRST as u64, CHUNK);
    }
}

/// Whether the scan stores o in f16 for the norm.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn is_left(c: &StepConstants) -> bool {
    c.has_norm != 0 && c.o_element != Element::F32 as u32
}

/// Power of two by which the stored o is multiplied.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn size(c: &StepConstants) -> f32 {
    let [size, _] = sizes(c);
    size
}

/// 2^⌈−log2 scale⌉ and its inverse.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sizes(c: &StepConstants) -> [f32; 2] {
    power::of_exponent((c.scale >> 23 & 0xff).clamp(1, 253))
}

/// Packs two elements of an o that is not f32, as they are stored for the norm.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn left(c: &StepConstants, [x, y]: [f32; 2]) -> u32 {
    let [size, _] = sizes(c);
    pack_f16x2(x * size, y * size)
}

/// Restores two elements of o from the result of [`left`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_left(c: &StepConstants, word: u32) -> [f32; 2] {
    let [_, size] = sizes(c);
    b16x2_to_f32(word, true).map(|o| o * size)
}

/// Rounds two elements of o to the values that the norm after the scan reads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn as_left(c: &StepConstants, o: [f32; 2]) -> [f32; 2] {
    if c.o_element == Element::F32 as u32 {
        o
    } else {
        of_left(c, left(c, o))
    }
}

/// Bytes of the sums of a block's warps that norm chunks of one token: a word for each 16 channels.
pub const TOKEN_BYTES: u32 = THREADS / 32 * SUMS_BYTES;
/// Bytes of one warp's sums.
const SUMS_BYTES: u32 = MOST_GROUPS as u32 * 16;

/// A chunk of one token whose o the scan has stored for the norm.
pub struct LeftToken {
    span: Span,
    /// Index of the token in the row.
    t: u32,
    /// Whether the chunk is the row's last, not its first.
    is_last: bool,
}

impl LeftToken {
    /// Returns the first chunk of row `b`, or its last (`is_last`), if it is one token and the scan has processed the row, which
    /// has a slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn find(
        c: &StepConstants,
        params: &PrefillParams,
        (b, is_last): (u32, bool),
    ) -> Option<Self> {
        let (span, place) = (Span::load(c, params, b), Place::load(c, &params.layer, b));
        let t = if is_last {
            span.count.saturating_sub(1)
        } else {
            0
        };
        let is_of_chain =
            span.live && place.live() && span.count > (params.has_singles != 0) as u32;
        // A row's only chunk counts as its first.
        let is_it = is_of_chain && span.is_by_itself(t) && is_last == (t > 0);
        is_it.then_some(Self { span, t, is_last })
    }

    /// Norms o of the token and stores it. The block's warps take the value heads in turn. Squares are added as for one token of
    /// a layer.
    ///
    /// # Safety
    /// The scan has stored o; the block's shared memory has [`TOKEN_BYTES`], and all threads of the block call this.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn norm<const K: u32, const V: u32>(
        &self,
        c: &StepConstants,
        params: &PrefillParams,
    ) {
        const OF_LANE: usize = 4;
        let (span, lane, warp) = (&self.span, lane_id(), thread_idx_x() / 32);
        let sums = dynamic_shared_mem() + warp * SUMS_BYTES;
        let per_channel = c.per_channel != 0;
        let mut hv = warp;
        while hv < c.h * c.ratio {
            let of = (span.b, self.is_last);
            let from = tokens::<K, V>(c, params, per_channel, of, hv);
            // SAFETY: the caller's promise; each warp has its own words.
            unsafe {
                let mut o = [[0.0; OF_LANE]; MOST_GROUPS.div_ceil(2)];
                each!(part in 0..V.div_ceil(128) as usize => {
                    let channel = 128 * part as u32 + 4 * lane;
                    if channel < V {
                        o[part] = load_b128(from + 4 * channel as u64).map(f32::from_bits);
                    }
                    let squares = squares!(sum_of_16(o[part]), sum_of_16(times(o[part], SMALL)));
                    if channel < V && lane.is_multiple_of(4) {
                        store_shared_b32(sums + channel / 4, squares.to_bits());
                    }
                });
                sync_warp(FULL_MASK);
                let sum = sum_of(sums, V / 16);
                // All lanes have read the words before the next head's are stored.
                sync_warp(FULL_MASK);
                each!(part in 0..V.div_ceil(128) as usize => {
                    let channel = 128 * part as u32 + 4 * lane;
                    let mut i = 0;
                    while i < OF_LANE && channel < V {
                        let channel = channel + i as u32;
                        let of = (hv, channel);
                        let y = normed_element(c, params, (span, self.t), of, o[part][i], (sum, V));
                        let strides = (params.o_row, c.o_token);
                        let base = params.layer.step.o;
                        let to =
                            span.at(base, strides, self.t, hv * c.o_head + channel, c.o_element);
                        store([y], to, c.o_element, false);
                        i += 1;
                    }
                });
            }
            hv += THREADS / 32;
        }
    }
}

/// Normed o of a channel of token `t` and value head `hv`; `sum` is the sum of the squares of all `dim` channels.
///
/// # Safety
/// `params` and `c` describe live tensors; the step has a norm, and the row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn normed_element(
    c: &StepConstants,
    params: &PrefillParams,
    (span, t): (&Span, u32),
    (hv, channel): (u32, u32),
    o: f32,
    (sum, dim): (f32, u32),
) -> f32 {
    let (strides, element) = ((params.z_row, c.z_token), c.z_element);
    let z = span.at(params.layer.z, strides, t, hv * c.z_head + channel, element);
    let [z] = load_one(z, element).to_f32(element);
    let element = c.norm_weight_element;
    let at = (channel * bytes_of(element)) as u64;
    let [weight] = load_one(params.layer.norm_weight + at, element).to_f32(element);
    normed(c, o, (sum, dim), z, weight)
}

/// Sum of the squares of 16 channels, four in each of four lanes, neighbours first. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of_16(o: [f32; 4]) -> f32 {
    let [a, b, c, d] = o.map(|o| o * o);
    let mut sum = (a + b) + (c + d);
    sum += warp_shuffle_xor(sum, 1);
    sum + warp_shuffle_xor(sum, 2)
}

/// 16 channels of a token, as the scan stored them.
#[derive(Clone, Copy)]
struct Left([Raw<8>; 2]);

impl Left {
    const NONE: Self = Self([Raw([0; 8]); 2]);

    /// Loads 16 channels from `o` on.
    ///
    /// # Safety
    /// The channels are in memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(c: &StepConstants, o: u64) -> Self {
        let second = o + 8 * bytes_of(c.o_element) as u64;
        Self([o, second].map(|at| load::<8>(at, c.o_element, c.wide_io != 0)))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values(&self, c: &StepConstants) -> [f32; 16] {
        let mut values = [0.0; 16];
        let mut i = 0;
        while i < 16 {
            let words = self.0[i / 8].0;
            if c.o_element == Element::F32 as u32 {
                values[i] = f32::from_bits(words[i % 8]);
                values[i + 1] = f32::from_bits(words[i % 8 + 1]);
            } else {
                [values[i], values[i + 1]] = of_left(c, words[i % 8 / 2]);
            }
            i += 2;
        }
        values
    }
}

/// Norms o of a chunk and value head `hv`, and stores it. Each token has four of the 256 threads.
///
/// # Safety
/// `params` and `c` describe live tensors; the scan has stored o, and nobody else accesses o of the chunk and head.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn of_unit<const V: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, chunk): (&Span, Chunk),
    (hv, powers): (u32, u64),
) {
    const { assert!(V / 64 <= MOST_GROUPS as u32) };
    let groups = V as usize / 64;
    let (token, part) = (thread_idx_x() / 4, thread_idx_x() % 4 * 16);
    let is_there = token < chunk.count;
    let t = chunk.start + if is_there { token } else { 0 };
    let channel = |group: usize| 64 * group as u32 + part;
    // SAFETY: the caller's promise; a thread has its own channels of a token, and loads them before it stores any.
    unsafe {
        let mut left = [Left::NONE; MOST_GROUPS];
        // One lane for each 16 channels of the value head.
        let mut first = CHUNK;
        if is_left(c) && lane_id() < V / 16 {
            first = load_b32(scales_of(powers, lane_id()) + FIRST as u64);
        }
        let mut scales = [Scales::NONE; MOST_GROUPS];
        each!(group in 0..groups => {
            let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
            let at = hv * c.o_head + channel(group);
            let o = span.at(base, strides, t, at, c.o_element);
            if is_there {
                left[group] = Left::load(c, o);
                scales[group] = Scales::load(c, params, (span, t), (hv, channel(group)));
            }
        });
        // After all loads: a branch between them would wait.
        let is_scaled = is_left(c) && warp_ballot(first < CHUNK) != 0;
        let unit = NormedChunk {
            left,
            scales,
            of: (hv, part),
            token: (t, token),
            is_there,
        };
        if is_scaled || !is_left(c) {
            rarely();
            unit.finish::<V, true>(c, params, span, powers);
        } else {
            unit.finish::<V, false>(c, params, span, powers);
        }
    }
}

/// A thread's part of a chunk: 16 channels of a token in each group of 64, with their z and weights.
struct NormedChunk {
    left: [Left; MOST_GROUPS],
    scales: [Scales; MOST_GROUPS],
    /// Value head, and first channel in a group.
    of: (u32, u32),
    /// Index of the token in the row, and in the chunk.
    token: (u32, u32),
    is_there: bool,
}

impl NormedChunk {
    /// Norms the channels and stores them. Without `LOOKS`, no token is scaled, and the sum of squares is finite, because f16
    /// holds o.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn finish<const V: u32, const LOOKS: bool>(
        &self,
        c: &StepConstants,
        params: &PrefillParams,
        span: &Span,
        powers: u64,
    ) {
        let groups = V as usize / 64;
        let ((hv, part), (t, token)) = (self.of, self.token);
        let mut values = [[0.0; 16]; MOST_GROUPS];
        let (mut squares, mut eps) = (0.0, f32::from_bits(c.norm_eps));
        let mut group = 0;
        while group < groups {
            values[group] = self.left[group].values(c);
            if LOOKS && is_left(c) {
                let back = scale_of(powers, 64 * group as u32 + part, token);
                values[group] = times(values[group], back);
            }
            squares += sum_of_quad(&values[group]);
            group += 1;
        }
        if LOOKS && any_large(squares == f32::INFINITY) {
            let mut small = 0.0;
            group = 0;
            while group < groups {
                small += sum_of_quad(&times(values[group], SMALL));
                group += 1;
            }
            if squares == f32::INFINITY {
                // eps is negligible next to an o of this size.
                (squares, eps) = (small, 0.0);
                group = 0;
                while group < groups {
                    values[group] = times(values[group], SMALL);
                    group += 1;
                }
            }
        }
        let size = rsqrt(squares * (1.0 / V as f32) + eps);
        group = 0;
        while group < groups && self.is_there {
            let of = (hv, 64 * group as u32 + part);
            self.scales[group].store(c, params, (span, t), of, &values[group], size);
            group += 1;
        }
    }
}

/// Inverse of the scale of a token's 16 channels from `channel` on; the scales begin at `powers`.
///
/// # Safety
/// The scan has stored the scales.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn scale_of(powers: u64, channel: u32, token: u32) -> f32 {
    let scales = scales_of(powers, channel / 16);
    if token < load_b32(scales + FIRST as u64) {
        1.0
    } else {
        f32::from_bits(load_b32(scales + 4 * token as u64))
    }
}
