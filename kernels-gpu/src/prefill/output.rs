//! o of a piece, from the sums of a product: rows are those of the state, columns are tokens.

use core::array;

use super::anew;
use super::chain::cluster as cluster_of;
use super::rows::{Piece, Span};
use super::values::{half_tile, tile_matrix, tile_piece, tokens_apart};
use crate::constants::Element;
use crate::device::cluster::{self, store_shared_b32_at};
use crate::device::float::{fma, pack_bf16x2, pack_f16x2};
use crate::device::global::store_b128;
use crate::device::shared::{
    load_shared_b32, load_shared_b128, store_matrices_transposed, store_shared_b32,
};
use crate::device::thread::{sync_barrier, sync_threads, thread_idx_x};
use crate::device::warp::warp_shuffle_xor;
use crate::device::warpgroup::fence_shared;
use crate::layer::norm::normed;
use crate::math::elements;
use crate::step::{PrefillParams, StepConstants};

/// Stores a warpgroup's part of o, from channel `first` of value head `hv` on; normed where there is a norm, of which the block
/// of so many `GROUPS`, or its cluster, has the whole head then. `tile` is one of [`super::values::TILE_BYTES`] that nobody
/// reads any more, `barrier` the warpgroup's own; `sums` are 64 words for each group of the block or cluster, that nobody reads
/// any more either, in any block.
///
/// # Safety
/// `params` and `c` describe live tensors.
#[inline(always)]
pub unsafe fn store<const V: u32, const GROUPS: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, piece): (&Span, Piece),
    (hv, first): (u32, u32),
    o: &[f32; 32],
    (tile, barrier, sums): (u32, u32, u32),
) {
    if c.has_norm != 0 {
        // SAFETY: the caller's promise.
        unsafe {
            store_normed::<V, GROUPS>(
                c,
                params,
                (span, piece),
                (hv, first),
                o,
                (tile, barrier, sums),
            );
        }
        return;
    }
    let base = params.layer.step.o;
    let (strides, head) = ((params.o_row, c.o_token), hv * c.o_head + first);
    // SAFETY: the caller's promise; a thread stores elements of its own, of tokens that are there.
    unsafe {
        if c.wide_io != 0 && c.o_element != Element::F32 as u32 {
            let mut i = 0;
            while i < 4 {
                let mut words = [0; 4];
                let mut m = 0;
                while m < 4 {
                    let at = 8 * i + 4 * (m / 2) + 2 * (m % 2);
                    words[m] = if c.o_element == Element::Bf16 as u32 {
                        pack_bf16x2(o[at], o[at + 1])
                    } else {
                        pack_f16x2(o[at], o[at + 1])
                    };
                    m += 1;
                }
                store_matrices_transposed(tile + tile_matrix(i as u32), words);
                i += 1;
            }
            sync_barrier(barrier, 128);
            let thread = thread_idx_x() % 128;
            let place = |i: u32| (thread / 8 + 16 * i, thread % 8);
            let words: [[u32; 4]; 4] = array::from_fn(|i| {
                let (token, part) = place(i as u32);
                load_shared_b128(tile + tile_piece(token, part))
            });
            release(c);
            let (token, part) = place(0);
            let t = piece.start + token;
            let to = span.at(base, strides, t, head + 8 * part, c.o_element);
            let mut i = 0;
            while i < 4 {
                if place(i).0 < piece.count {
                    store_b128(
                        to + i as u64 * tokens_apart(16, c.o_token),
                        words[i as usize],
                    );
                }
                i += 1;
            }
            return;
        }
        let thread = anew(thread_idx_x());
        let row = thread / 32 % 4 * 16 + thread % 32 / 4;
        let mut i = 0;
        while i < 32 {
            let token = 8 * (i as u32 / 4) + thread % 4 * 2 + i as u32 % 2;
            if token < piece.count {
                let (t, channel) = (piece.start + token, head + row + i as u32 / 2 % 2 * 8);
                let address = span.at(base, strides, t, channel, c.o_element);
                elements::store([o[i]], address, c.o_element, false);
            }
            i += 1;
        }
    }
}

/// Where v is copied to the tile by itself, what was stored there is before that. Not behind what is stored to global memory,
/// for which the fence would wait.
#[inline(always)]
fn release(c: &StepConstants) {
    if c.makes_values() {
        fence_shared();
    }
}

/// Barrier of the threads that have rows, where they are not all of the block.
pub const BLOCK: u32 = 4;

/// Both halves of the tokens go through the tile, so that a thread has 16 channels of a token, and four of them all that
/// the warpgroup has.
#[inline(always)]
unsafe fn store_normed<const V: u32, const GROUPS: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, piece): (&Span, Piece),
    (hv, first): (u32, u32),
    o: &[f32; 32],
    (tile, barrier, sums): (u32, u32, u32),
) {
    // Else the compiler keeps all addresses from piece to piece.
    let thread = anew(thread_idx_x());
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
    // SAFETY: the caller's promise; the tile and a group's sums are the warpgroup's own.
    unsafe {
        let mut half = 0;
        while half < 2 {
            // Nobody reads what was in the tile.
            sync_barrier(barrier, 128);
            let mut i = 0;
            while i < 16 {
                let token = 8 * (i as u32 / 4) + lane % 4 * 2 + i as u32 % 2;
                let place = tile + half_tile(token, row + i as u32 / 2 % 2 * 8);
                store_shared_b32(place, o[16 * half + i].to_bits());
                i += 1;
            }
            sync_barrier(barrier, 128);
            let mut squares = 0.0;
            i = 0;
            while i < 4 {
                let place = tile + half_tile(thread / 4, part + 4 * i as u32);
                let words = load_shared_b128(place).map(f32::from_bits);
                let mut e = 0;
                while e < 4 {
                    own[half][4 * i + e] = words[e];
                    squares = fma(words[e], words[e], squares);
                    e += 1;
                }
                i += 1;
            }
            squares += warp_shuffle_xor(squares, 1);
            squares += warp_shuffle_xor(squares, 2);
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
            half += 1;
        }
        release(c);
        if const { cluster_of(V, GROUPS) > 1 } {
            cluster::arrive();
            cluster::wait();
        } else if V == 128 {
            sync_threads();
        } else {
            sync_barrier(barrier, 128);
        }
        half = 0;
        while half < 2 {
            let token = 32 * half as u32 + thread / 4;
            let sum = |group: u32| f32::from_bits(load_shared_b32(sums + group * 256 + token * 4));
            let squares = match V {
                192 => sum(0) + sum(1) + sum(2),
                128 => sum(0) + sum(1),
                _ => sum(0),
            };
            if token < piece.count {
                let t = piece.start + token;
                let mut i = 0;
                while i < 4 {
                    let channel = first + part + 4 * i as u32;
                    let wide = c.wide_norm != 0;
                    let strides = (params.z_row, c.z_token);
                    let (z, element) = (params.layer.z, c.z_element);
                    let z = span.at(z, strides, t, hv * c.z_head + channel, element);
                    let z = elements::load::<4>(z, element, wide).to_f32(element);
                    let element = c.norm_weight_element;
                    let at = (channel * elements::bytes_of(element)) as u64;
                    let weight = params.layer.norm_weight + at;
                    let weight = elements::load::<4>(weight, element, wide).to_f32(element);
                    let mut values = [0.0f32; 4];
                    let mut e = 0;
                    while e < 4 {
                        let o = own[half][4 * i + e];
                        values[e] = normed(c, o, (squares, V), z[e], weight[e]);
                        e += 1;
                    }
                    let base = params.layer.step.o;
                    let strides = (params.o_row, c.o_token);
                    let at = span.at(base, strides, t, hv * c.o_head + channel, c.o_element);
                    elements::store(values, at, c.o_element, c.wide_io != 0);
                    i += 1;
                }
            }
            half += 1;
        }
    }
}
