//! Chunkwise prefill of any number of tokens: docs/prefill.md.
//!
//! A row is divided into *chunks*, which end at multiples of [`CHUNK`] tokens of its sequence. The *intra-chunk pass* computes
//! the operands of a chunk, which do not depend on the state: one block computes one chunk. Every chunk of more than one token (a
//! *unit* in identifiers) has a place in the workspace. The *inter-chunk scan* ([`chain`]) carries the state from chunk to chunk.
//!
//! Files by pass: `load`, `products`, `solve` and `operands` for the intra-chunk pass, from `prepare` (GDN) or `channels` (KDA);
//! `chain`, `state`, `values` and `output` for the scan; `single` for chunks of one token; `convolution` before, `norm` and `windows`
//! after; `split` and `carry` for rows in splits.
//!
//! A long prompt may be cut into *segments* of chunks, each with an intra-chunk pass and a scan of its own. A scan that is not
//! the last stores the state as its threads hold it, for the same threads of the next scan.
//!
//! # Safety
//! An unsafe function without a `# Safety` section requires: `params` and `c` describe live tensors, the function's operands in
//! shared memory have been stored there, and the calling thread owns the memory that it stores to.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

pub mod carry;
pub mod chain;
pub mod channels;
pub mod convolution;
pub mod kernels;
pub mod load;
pub mod norm;
pub mod operands;
pub mod output;
pub mod prepare;
pub mod products;
pub mod range;
pub mod rows;
pub mod single;
pub mod single_klast;
pub mod solve;
pub mod split;
pub mod state;
pub mod values;
pub mod windows;
pub mod workspace;

use crate::device::warp::{lane_id, warp_shuffle_idx};
use crate::device::warpgroup::TRIANGLE_BYTES;

/// Tokens of a whole chunk, C.
pub const CHUNK: u32 = 64;

/// [`end_chunk`](crate::step::PrefillParams::end_chunk) of the last scan of a prompt.
pub const ALL_CHUNKS: u32 = u32::MAX;

// Results of the intra-chunk pass for a chunk and a query/key head, laid out alike in the workspace and in shared memory: an
// image of k̂ and q̂, then T, P and factors of each value head. With decays by channel, each value head has its own images.

/// Byte offset of q̂ in the image: its tokens are numbered 64 to 127.
pub const QUERIES: u32 = 1024;
/// Byte offset of P within a head's results, which begin with T.
pub const P: u32 = TRIANGLE_BYTES;
/// Byte offset of a head's factors, f32. For each token: the factor of S k̂, the factor of S q̂, and the factor of δ in the
/// update of the state; then the decays of the whole chunk.
pub const FACTORS: u32 = 2 * TRIANGLE_BYTES;
/// Bytes of one kind of factors.
pub const FACTOR_BYTES: u32 = 4 * CHUNK;

/// Bytes of an image with `k` channels.
#[must_use]
pub const fn image_bytes(k: u32) -> u32 {
    k / 8 * 2048
}

/// Bytes of a chunk's images: k̂ and q̂; with decays by channel, then k̂ as it is added to the state.
#[must_use]
pub const fn images_bytes(k: u32, per_channel: bool) -> u32 {
    image_bytes(k) + if per_channel { image_bytes(k) / 2 } else { 0 }
}

/// Bytes of T, P and factors of a value head. The last factors are the decays of the whole chunk: one for each channel, or 128
/// bytes (a line) of one value.
#[must_use]
pub const fn head_bytes(k: u32, per_channel: bool) -> u32 {
    FACTORS + 3 * FACTOR_BYTES + if per_channel { 4 * k } else { 128 }
}

/// Returns x of lane `lane`. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_lane(x: u32, lane: u32) -> u32 {
    warp_shuffle_idx(f32::from_bits(x), lane).to_bits()
}

/// Returns x of lane 0 in all lanes: a uniform number (docs/compiler.md). Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_warp(x: u32) -> u32 {
    of_lane(x, 0)
}

/// Returns this lane's x as an opaque number (docs/compiler.md). LLVM then does not see that x is the same in every iteration of
/// a loop: it recomputes addresses, where keeping them from chunk to chunk would spill. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn opaque(x: u32) -> u32 {
    of_lane(x, lane_id())
}

/// Upper bound of the number of chunks of more than one token in the first `rows` rows, which end at packed token `end`. The next
/// row's chunks begin at this index of the workspace, so a row finds its chunks without reading the other rows.
///
/// A row of n tokens has at most ⌊(n + C - 2)/C⌋ such chunks if it begins at a multiple of C, else ⌊(n + 2C - 4)/C⌋. A sum of
/// floors is at most the floor of the sum.
#[must_use]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn units(end: u64, rows: u64, positions: bool) -> u64 {
    let more = if positions { 2 * CHUNK - 4 } else { CHUNK - 2 };
    (end + rows * more as u64) / CHUNK as u64
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, units};

    /// Number of chunks of more than one token, for a row of `tokens` tokens that begins at `position`.
    fn count(position: u64, tokens: u64) -> u64 {
        let chunk = u64::from(CHUNK);
        let mut at = position;
        let mut count = 0;
        while at < position + tokens {
            let end = (at / chunk * chunk + chunk).min(position + tokens);
            count += u64::from(end - at > 1);
            at = end;
        }
        count
    }

    #[test]
    fn a_row_has_room_for_its_units() {
        for tokens in 0..300 {
            assert!(count(0, tokens) <= units(tokens, 1, false), "{tokens}");
            let most = (0..64).map(|position| count(position, tokens)).max();
            assert!(most <= Some(units(tokens, 1, true)), "{tokens}");
        }
        // The bound is tight for a row of whole chunks and two tokens.
        assert_eq!((count(0, 66), units(66, 1, false)), (2, 2));
        assert_eq!((count(62, 68), units(68, 1, true)), (3, 3));
    }
}
