//! Stores of o of a chunk from the sums of a product, whose rows are those of the state and whose columns are tokens.

use core::array;

use super::chain::cluster as cluster_of;
use super::norm;
use super::opaque;
use super::range;
use super::rows::{Chunk, Span};
use super::values::{half_tile, tile_matrix, tile_part, tokens_apart};
use crate::constants::Element;
use crate::device::cluster::{self, store_shared_b32_at};
use crate::device::float::{fma, pack_bf16x2, pack_f16x2};
use crate::device::global::{store_b16, store_b128};
use crate::device::rarely;
use crate::device::shared::{
    load_shared_b32, load_shared_b128, store_matrices_transposed, store_shared_b16,
    store_shared_b32,
};
use crate::device::thread::{sync_barrier, sync_barrier_any, sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::device::warpgroup::fence_shared;
use crate::layer::conv::activate;
use crate::layer::norm::{size_of, small_sum, squares};
use crate::machine;
use crate::math::each::each;
use crate::math::elements::{self, Raw};
use crate::math::range::{SMALL, times};
use crate::step::{PrefillParams, StepConstants};

/// Whether o is staged in the tile, so that neighbouring threads store neighbouring elements.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
const fn goes_by_tile(c: &StepConstants) -> bool {
    c.wide_io != 0 && c.o_element != Element::F32 as u32
}

/// Stages o in the tile before [`store`], packed as [`store`] stores it. Returns whether f16 may not hold the
/// [stored](norm::left) o of the warpgroup, or a warp `scales` o anyway; the result is the same in all threads. If true,
/// [`stage_again`] must follow, after o is scaled.
///
/// # Safety
/// `tile` has [`super::values::TILE_BYTES`] and nobody reads it any more; `barrier` is the warpgroup's own, and all its threads
/// call this.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn stage(
    c: &StepConstants,
    o: &[f32; 32],
    (tile, barrier): (u32, u32),
    scales: bool,
) -> bool {
    if !goes_by_tile(c) {
        return norm::is_left(c);
    }
    let words = packed(c, o);
    to_tile(c, &words, tile);
    if norm::is_left(c) {
        sync_barrier_any(barrier, 128, scales || range::may_be_large(&words))
    } else {
        sync_barrier(barrier, 128);
        false
    }
}

/// Stages o again after it was scaled: see [`stage`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn stage_again(c: &StepConstants, o: &[f32; 32], (tile, barrier): (u32, u32)) {
    if goes_by_tile(c) {
        to_tile(c, &packed(c, o), tile);
        sync_barrier(barrier, 128);
    }
}

/// Stores a warpgroup's part of o, which is [staged](stage), from channel `first` of value head `hv` on; or, for a norm after the
/// scan, its [unnormed form](norm::left).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store(
    c: &StepConstants,
    params: &PrefillParams,
    (span, chunk): (&Span, Chunk),
    (hv, first): (u32, u32),
    o: &[f32; 32],
    tile: u32,
) {
    let base = params.layer.step.o;
    let (strides, head) = ((params.o_row, c.o_token), hv * c.o_head + first);
    // SAFETY: the caller's promise; a thread stores its own elements, of tokens that the chunk has.
    unsafe {
        if goes_by_tile(c) {
            let words = array::from_fn(|i| {
                let (token, part) = own_part(i as u32);
                load_shared_b128(tile + tile_part(token, part))
            });
            release(c);
            store_parts(c, params, (span, chunk), head, words);
            return;
        }
        each(o, |token, row, o| {
            if token < chunk.count {
                let t = chunk.start + token;
                let address = span.at(base, strides, t, head + row, c.o_element);
                if c.o_element == Element::F32 as u32 {
                    elements::store([o], address, c.o_element, false);
                } else {
                    store_b16(address, pack(c, [o, 0.0]) as u16);
                }
            }
        });
    }
}

/// Token of the chunk and its part of 8 channels that is this thread's `i`-th, such that the threads of a token are neighbours.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn own_part(i: u32) -> (u32, u32) {
    let thread = thread_idx_x() % 128;
    (thread / 8 + 16 * i, thread % 8)
}

/// Packs two sums of an o that is not f32, as they are stored.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn pack(c: &StepConstants, o: [f32; 2]) -> u32 {
    if c.has_norm != 0 {
        norm::left(c, o)
    } else if c.o_element == Element::Bf16 as u32 {
        pack_bf16x2(o[0], o[1])
    } else {
        pack_f16x2(o[0], o[1])
    }
}

/// Packs all sums, two to a word.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn packed(c: &StepConstants, o: &[f32; 32]) -> [u32; 16] {
    let mut words = [0; 16];
    each!(i in 0..16 => words[i] = pack(c, [o[2 * i], o[2 * i + 1]]));
    words
}

/// Stores words of two sums each to the tile, which keeps a token's channels together.
///
/// # Safety
/// Nobody accesses the warp's part of the tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn to_tile(c: &StepConstants, words: &[u32; 16], tile: u32) {
    each!(i in 0..4 => {
        // SAFETY: the caller's promise.
        unsafe {
            let of = [
                words[4 * i],
                words[4 * i + 1],
                words[4 * i + 2],
                words[4 * i + 3],
            ];
            if c.machine >= machine::HOPPER {
                let own = (lane_id(), thread_idx_x());
                store_matrices_transposed(tile + tile_matrix(i as u32, own), of);
            } else {
                store_elements_transposed(tile, i as u32, of);
            }
        }
    });
}

/// Equals [`store_matrices_transposed`] for tokens 16 `i` .. 16 `i` + 16, element by element.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_elements_transposed(tile: u32, i: u32, words: [u32; 4]) {
    let (row, column) = (lane_id() / 4, lane_id() % 4 * 2);
    let warp = thread_idx_x() / 32 % 4;
    each!(m in 0..4 => {
        let token = 16 * i + m / 2 * 8 + column;
        let at = |token: u32| tile + tile_part(token, 2 * warp + m % 2) + 2 * row;
        let word = words[m as usize];
        // SAFETY: the caller's promise.
        unsafe {
            store_shared_b16(at(token), word as u16);
            store_shared_b16(at(token + 1), (word >> 16) as u16);
        }
    });
}

/// Stores the 16-bit elements of the parts of [`own_part`], from element `head` of a token of o on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_parts(
    c: &StepConstants,
    params: &PrefillParams,
    (span, chunk): (&Span, Chunk),
    head: u32,
    words: [[u32; 4]; 4],
) {
    let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
    let (token, part) = own_part(0);
    let t = chunk.start + token;
    let to = span.at(base, strides, t, head + 8 * part, c.o_element);
    each!(i in 0..4 => {
        if own_part(i).0 < chunk.count {
            store_b128(
                to + i as u64 * tokens_apart(16, c.o_token),
                words[i as usize],
            );
        }
    });
}

/// Calls `give` with each of the thread's sums, its token, and its row among the warpgroup's 64.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn each(o: &[f32; 32], give: impl Fn(u32, u32, f32)) {
    let thread = opaque(thread_idx_x());
    let row = thread / 32 % 4 * 16 + thread % 32 / 4;
    each!(i in 0..32 => {
        let token = 8 * (i as u32 / 4) + thread % 4 * 2 + i as u32 % 2;
        give(token, row + i as u32 / 2 % 2 * 8, o[i]);
    });
}

/// Orders the stores to the tile before a bulk copy of v into it, if v is copied so. Called before stores to global memory,
/// because the fence would wait for these.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn release(c: &StepConstants) {
    if c.makes_values() {
        fence_shared();
    }
}

/// Named barrier of the consumer threads, if they are not the whole block.
pub const BLOCK: u32 = 4;

/// [`store`] with the norm: the block of `GROUPS` warpgroups, or its cluster, has the whole head. `sums` are 64 words for each of
/// the head's warpgroups, which no block reads any more. `scales` are those by which the warpgroup's warps have scaled o, as in
/// the workspace.
///
/// The tokens are staged in the tile in two halves, so that a thread has 16 channels of a token, and four threads all channels of
/// the warpgroup.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_normed<const V: u32, const GROUPS: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, chunk): (&Span, Chunk),
    (hv, first): (u32, u32),
    o: &[f32; 32],
    (tile, barrier, sums, scales): (u32, u32, u32, u32),
) {
    // Opaque (docs/compiler.md), so that addresses are not kept from chunk to chunk.
    let thread = opaque(thread_idx_x());
    let (thread, group, lane) = (thread % 128, thread / 128, thread % 32);
    let row = thread / 32 * 16 + lane / 4;
    let part = thread % 4 * 16;
    let mut own = [[0.0f32; 16]; 2];
    const {
        assert!(
            cluster_of(V, GROUPS) <= 4,
            "a lane for each block of a cluster"
        )
    };
    // SAFETY: the caller's promise; the warpgroup owns the tile and its sums.
    unsafe {
        each!(half in 0..2 => {
            // All threads have read the tile.
            sync_barrier(barrier, 128);
            each!(i in 0..16 => {
                let token = 8 * (i as u32 / 4) + lane % 4 * 2 + i as u32 % 2;
                let place = tile + half_tile(token, row + i as u32 / 2 % 2 * 8);
                store_shared_b32(place, o[16 * half + i].to_bits());
            });
            sync_barrier(barrier, 128);
            each!(i in 0..4 => {
                let place = tile + half_tile(thread / 4, part + 4 * i as u32);
                let [x, y, z, w] = load_shared_b128(place).map(f32::from_bits);
                // Rounded as for a norm after the scan, so that the bits do not depend on which launch norms.
                [own[half][4 * i], own[half][4 * i + 1]] = norm::as_left(c, [x, y]);
                [own[half][4 * i + 2], own[half][4 * i + 3]] = norm::as_left(c, [z, w]);
            });
            if norm::is_left(c) {
                let token = 32 * half as u32 + thread / 4;
                let scales = scales + thread % 4 * norm::OF_WARP;
                if token >= load_shared_b32(scales + norm::FIRST) {
                    let back = f32::from_bits(load_shared_b32(scales + 4 * token));
                    own[half] = own[half].map(|o| o * back);
                }
            }
            let squares = squares!(
                sum_of_quad(&own[half]),
                sum_of_quad(&times(own[half], SMALL))
            );
            if const { cluster_of(V, GROUPS) > 1 } {
                // The four lanes have the same sum.
                let place = sums + first / 64 * 256 + (32 * half as u32 + thread / 4) * 4;
                if thread % 4 < cluster_of(V, GROUPS) {
                    store_shared_b32_at(place, thread % 4, squares.to_bits());
                }
            } else if thread % 4 == 0 {
                let place = sums + group * 256 + (32 * half as u32 + thread / 4) * 4;
                store_shared_b32(place, squares.to_bits());
            }
        });
        release(c);
        // Loads for both halves, before the wait for the other warpgroups' sums.
        let mut scales = [Scales::NONE; 2];
        each!(half in 0..2 => {
            let token = 32 * half as u32 + thread / 4;
            if token < chunk.count {
                let (t, of) = (chunk.start + token, (hv, first + part));
                scales[half] = Scales::load(c, params, (span, t), of);
            }
        });
        if const { cluster_of(V, GROUPS) > 1 } {
            cluster::arrive();
            cluster::wait();
        } else if V == 128 {
            sync_threads();
        } else {
            sync_barrier(barrier, 128);
        }
        each!(half in 0..2 => {
            let token = 32 * half as u32 + thread / 4;
            let squares = sum_of_groups::<V>(sums + token * 4);
            if token < chunk.count {
                let (t, of) = (chunk.start + token, (hv, first + part));
                let size = size_of(c, &mut own[half], (squares, V));
                scales[half].store(c, params, (span, t), of, &own[half], size);
            }
        });
    }
}

/// Sum of a token's squares for a norm, in the form of [`squares!`]: from a word for each 64 channels, at `sums` and every 256
/// bytes after.
///
/// # Safety
/// The words are in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn sum_of_groups<const V: u32>(sums: u32) -> f32 {
    let word = |group: u32| f32::from_bits(load_shared_b32(sums + group * 256));
    let mut words = [0.0; 3];
    let (mut sum, mut signs) = (0.0, 0);
    each!(group in 0..V as usize / 64 => {
        words[group] = word(group as u32);
        signs |= words[group].to_bits();
        sum = if group == 0 { words[0] } else { sum + words[group] };
    });
    if signs >> 31 != 0 || sum == f32::INFINITY {
        rarely();
        let mut small = 0.0;
        each!(group in 0..V as usize / 64 => small += small_sum(words[group]));
        return -small;
    }
    sum
}

/// Sum of the squares of 16 channels, and of those of the token's other three lanes. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sum_of_quad(o: &[f32; 16]) -> f32 {
    let mut squares = 0.0;
    each!(i in 0..16 => squares = fma(o[i], o[i], squares));
    squares += warp_shuffle_xor(squares, 1);
    squares += warp_shuffle_xor(squares, 2);
    squares
}

/// z and weights of 16 channels of a token, as loaded from memory.
#[derive(Clone, Copy)]
pub struct Scales {
    z: [Raw<8>; 2],
    weight: [Raw<8>; 2],
}

impl Scales {
    /// Zeros.
    pub const NONE: Self = Self {
        z: [Raw([0; 8]); 2],
        weight: [Raw([0; 8]); 2],
    };

    /// Loads z of token `t` and the weights, from `channel` of value head `hv` on.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; the step has a norm, and the row has the token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(
        c: &StepConstants,
        params: &PrefillParams,
        (span, t): (&Span, u32),
        (hv, channel): (u32, u32),
    ) -> Self {
        let (mut scales, wide) = (Self::NONE, c.wide_norm != 0);
        each!(i in 0..2 => {
            let channel = channel + 8 * i as u32;
            let (strides, element) = ((params.z_row, c.z_token), c.z_element);
            let z = span.at(params.layer.z, strides, t, hv * c.z_head + channel, element);
            // SAFETY: the caller's promise.
            unsafe {
                scales.z[i] = elements::load::<8>(z, element, wide);
                let element = c.norm_weight_element;
                let at = (channel * elements::bytes_of(element)) as u64;
                let weight = params.layer.norm_weight + at;
                scales.weight[i] = elements::load::<8>(weight, element, wide);
            }
        });
        scales
    }

    /// Norms `o` of these channels with factor `size`, and stores it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store(
        &self,
        c: &StepConstants,
        params: &PrefillParams,
        (span, t): (&Span, u32),
        (hv, channel): (u32, u32),
        o: &[f32; 16],
        size: f32,
    ) {
        each!(i in 0..2 => {
            let z = self.z[i].to_f32(c.z_element);
            let weight = self.weight[i].to_f32(c.norm_weight_element);
            let mut values = [0.0; 8];
            each!(e in 0..8 => {
                let root_normed = o[8 * i + e] * size;
                values[e] = weight[e] * root_normed * activate(c.norm_activation, z[e]);
            });
            let channel = hv * c.o_head + channel + 8 * i as u32;
            let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
            let at = span.at(base, strides, t, channel, c.o_element);
            elements::store(values, at, c.o_element, c.wide_io != 0);
        });
    }
}
