//! v of a chunk for a warpgroup's 64 rows of a state, in the layout of a product's sums: rows are those of the state, columns are
//! tokens.
//!
//! v is staged in shared memory, in tiles of 64 tokens of 128 bytes whose 16-byte parts are swizzled by the token. If v has 16
//! bits and can be loaded 16 bytes at a time, it is copied so; otherwise the intra-chunk pass stores tiles in f16
//! ([`StepConstants::makes_values`]).

use super::convolution::{ConvInputs, channel_of_values, run_of};
use super::operands::Sink;
use super::rows::{Chunk, Span};
use super::{CHUNK, opaque};
use crate::constants::Element;
use crate::device::float::{f16_to_f32, pack_f16x2};
use crate::device::shared::{copy_async_b128_or_zeros, load_matrices_transposed};
use crate::device::thread::thread_idx_x;
use crate::math::each::each;
use crate::math::elements::{self, bf16_to_f32};
use crate::step::{PrefillParams, StepConstants};

/// Bytes of a tile.
pub const TILE_BYTES: u32 = 64 * 128;

/// Byte offset in a tile of a token's part of 8 channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tile_part(token: u32, part: u32) -> u32 {
    token * 128 + (part ^ (token % 8)) * 16
}

/// Lane address in a tile of four matrices: tokens 16 `i` .. 16 `i` + 16 and the warp's 16 channels. The order is 8 tokens of the
/// first 8 channels, of the other 8 channels, then the next 8 tokens of both.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tile_matrix(i: u32, (lane, thread): (u32, u32)) -> u32 {
    let (matrix, line) = (lane / 8, lane % 8);
    let warp = thread / 32 % 4;
    tile_part(16 * i + matrix / 2 * 8 + line, 2 * warp + matrix % 2)
}

/// Byte offset of an f32 in a tile of half the tokens and 64 channels. Groups of 8 channels are swizzled by the token, so that
/// neither a token's nor a product's elements have bank conflicts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn half_tile(token: u32, channel: u32) -> u32 {
    token * 256 + (channel ^ (token / 2 % 4 * 8)) * 4
}

/// Bytes in the workspace of the tiles of a value head with `dim` channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn tiles_bytes(c: &StepConstants, dim: u32) -> u32 {
    if c.makes_values() {
        dim / 64 * TILE_BYTES
    } else {
        0
    }
}

/// Bytes between `tokens` tokens of 16-bit elements.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tokens_apart(tokens: u32, stride: u32) -> u64 {
    2 * tokens as u64 * stride as u64
}

/// Starts to copy v of `chunk` to the tiles of `GROUPS` warpgroups: 64 · `GROUPS` channels from `channel` of a token on; zeros
/// for tokens beyond the chunk. Called by a warpgroup, which must wait for the copies.
///
/// # Safety
/// `params` and `c` describe live tensors, of which v can be loaded 16 bytes at a time; nobody reads the tiles.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn copy<const GROUPS: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, chunk): (&Span, Chunk),
    channel: u32,
    tiles: u32,
) {
    // Neighbouring threads have channels of one token.
    let of_token = 8 * GROUPS;
    let apart = 128 / of_token;
    let thread = thread_idx_x() % 128;
    let (token, part) = (thread / of_token, thread % of_token);
    let (base, strides) = (params.layer.step.v, (params.v_row, c.v_token));
    let (t, channel) = (chunk.start + token, channel + 8 * part);
    let from = span.at(base, strides, t, channel, c.v_element);
    let place = tiles + part / 8 * TILE_BYTES + tile_part(token, part % 8);
    each!(i in 0..CHUNK / apart => {
        // Tokens whose distance is a multiple of 8 have their parts in the same order.
        let place = place + i * apart * 128;
        let from = from + tokens_apart(apart * i, c.v_token);
        // SAFETY: the caller's promise; only tokens of the chunk are read.
        unsafe { copy_async_b128_or_zeros(place, from, token + apart * i < chunk.count) };
    });
}

/// Starts to store zeros in the place where [`copy`] stores v. `address` is any address in global memory that is a multiple of
/// 16; nothing is read there.
///
/// # Safety
/// As for [`copy`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn clear<const GROUPS: u32>(address: u64, tiles: u32) {
    let thread = thread_idx_x() % 128;
    each!(i in 0..GROUPS * TILE_BYTES / 16 / 128 => {
        // SAFETY: the caller's promise.
        unsafe { copy_async_b128_or_zeros(tiles + 16 * (128 * i + thread), address, false) };
    });
}

/// Channels of a value head.
#[derive(Clone, Copy)]
pub struct Channels {
    /// The value head.
    pub hv: u32,
    /// First channel; 0 for all channels of the head.
    pub first: u32,
}

impl Channels {
    /// All channels of a value head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn of_head(hv: u32) -> Self {
        Self { hv, first: 0 }
    }
}

/// Stores the tiles of `COUNT` of the V channels of a value head; K is the dim of a query/key head. Called by threads 0 to
/// `threads` − 1.
///
/// # Safety
/// `params` and `c` describe live tensors; the tiles are these threads' to write.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn make<const K: u32, const V: u32, const COUNT: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, chunk, inputs): (&Span, Chunk, ConvInputs),
    Channels { hv, first }: Channels,
    (thread, threads): (u32, u32),
    out: impl Sink,
) {
    if c.taps != 0 {
        // Threads per token, with two channels each.
        let of_token = COUNT / 2;
        let part = opaque(thread % of_token);
        let mut channel = channel_of_values::<K, V>(c, hv, V);
        if const { COUNT < V } {
            channel += first;
        }
        let of_line = part / 32 * TILE_BYTES + part % 4 * 4;
        let mut run = run_of(COUNT) as u32 * (thread / of_token);
        if thread >= threads / of_token * of_token {
            return;
        }
        while run < CHUNK {
            let (t, end) = (chunk.start + run, chunk.start + chunk.count);
            let give = |token: u32, v: [f32; 2]| {
                let byte = of_line + tile_part(run + token, part / 4 % 8);
                // SAFETY: the caller's promise; a thread owns its tokens' channels.
                unsafe { out.store_b32(byte, pack_f16x2(v[0], v[1])) };
            };
            let (with, own) = ((c, params), channel + 2 * part);
            // SAFETY: the caller's promise.
            unsafe {
                if const { run_of(COUNT) == 16 } {
                    inputs.convolve_run::<16>(with, span, (t, end), own, give);
                } else {
                    inputs.convolve_run::<8>(with, span, (t, end), own, give);
                }
            }
            run += run_of(COUNT) as u32 * (threads / of_token);
        }
        return;
    }
    // Threads per token, with 8 channels each.
    let of_token = COUNT / 8;
    let part = opaque(thread % of_token);
    if const { !COUNT.is_power_of_two() } && thread >= threads / of_token * of_token {
        return;
    }
    let give = |token: u32, v: [f32; 8]| {
        let pair = |i: usize| pack_f16x2(v[2 * i], v[2 * i + 1]);
        let byte = part / 8 * TILE_BYTES + tile_part(token, part % 8);
        // SAFETY: the caller's promise; a thread owns its tokens' channels.
        unsafe { out.store_b128(byte, [pair(0), pair(1), pair(2), pair(3)]) };
    };
    let mut token = thread / of_token;
    while token < CHUNK {
        let mut v = [0.0; 8];
        let t = chunk.start + token;
        // SAFETY: the caller's promise; the chunk has the token.
        unsafe {
            if token < chunk.count {
                let (base, mut channel) = (params.layer.step.v, hv * c.v_head + 8 * part);
                if const { COUNT < V } {
                    channel += first;
                }
                let strides = (params.v_row, c.v_token);
                let at = span.at(base, strides, t, channel, c.v_element);
                v = elements::load::<8>(at, c.v_element, c.wide_io != 0).to_f32(c.v_element);
            }
        }
        give(token, v);
        token += threads / of_token;
    }
}

/// This thread's elements of the 32 tokens from `first` (0 or 32) on. `own`: its lane, and its index in the block.
///
/// # Safety
/// The tile is in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn of_tile(c: &StepConstants, tile: u32, first: u32, own: (u32, u32)) -> [f32; 16] {
    let mut v = [0.0; 16];
    each!(i in 0..2 => {
        let words = load_matrices_transposed(tile + tile_matrix(first / 16 + i as u32, own));
        each!(m in 0..4 => {
            let at = 8 * i + 4 * (m / 2) + 2 * (m % 2);
            let word = words[m];
            [v[at], v[at + 1]] = if c.v_element == Element::Bf16 as u32 && !c.makes_values() {
                [bf16_to_f32(word as u16), f32::from_bits(word & 0xffff_0000)]
            } else {
                [f16_to_f32(word as u16), f16_to_f32((word >> 16) as u16)]
            };
        });
    });
    v
}
