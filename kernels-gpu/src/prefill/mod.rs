//! Any number of tokens, in chunks: docs/prefill.md.
//!
//! A row is worked in *chunks*, which end at multiples of [`CHUNK`] tokens of its sequence. A *unit* is a chunk of more
//! than one token: a block of the intra-chunk pass works on one, and each has a place in the workspace. The *intra-chunk pass* makes
//! the operands of units, which do not depend on states; the inter-chunk scan, the *chain*, goes from state to state.
//!
//! A long prompt may be worked in *segments*: chunks, and units of the same numbers, with an intra-chunk pass and a chain of
//! their own. A chain that is not the last leaves the state as its threads have it, for the threads of the next.
//!
//! # Safety
//! An unsafe function here relies on this where its doc says nothing else: `params` and `c` describe live tensors, what it loads
//! from shared memory has been stored there, and what it stores to is this thread's.
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

/// [`end_chunk`](crate::step::PrefillParams::end_chunk) of a chain behind which there is none.
pub const ALL_CHUNKS: u32 = u32::MAX;

// What the intra-chunk pass makes of a unit and a query/key head, in the workspace as in shared memory: an image of k̂ and q̂, and
// of each of its value heads T, P and factors. Where decays are of channels, each value head has images of its own.

/// Byte of the image's q̂: its tokens are 64 to 128.
pub const QUERIES: u32 = 1024;
/// Byte of a head's P; T is at its beginning.
pub const P: u32 = TRIANGLE_BYTES;
/// Byte of a head's factors, f32: of every token that of S k̂, that of S q̂ and that of δ where it becomes a part of the state;
/// and the decays of the whole chunk.
pub const FACTORS: u32 = 2 * TRIANGLE_BYTES;
/// Bytes of the factors of one kind.
pub const FACTOR_BYTES: u32 = 4 * CHUNK;

/// Bytes of an image of K channels.
#[must_use]
pub const fn image_bytes(k: u32) -> u32 {
    k / 8 * 2048
}

/// Bytes of the images of a unit: of k̂ and q̂; and of k̂ behind them as it is added to a state, where decays are of channels.
#[must_use]
pub const fn images_bytes(k: u32, per_channel: bool) -> u32 {
    image_bytes(k) + if per_channel { image_bytes(k) / 2 } else { 0 }
}

/// Bytes of T, P and factors of a value head; the last factors are the decays of the whole chunk, one of every channel or a
/// whole line of the same.
#[must_use]
pub const fn head_bytes(k: u32, per_channel: bool) -> u32 {
    FACTORS + 3 * FACTOR_BYTES + if per_channel { 4 * k } else { 128 }
}

/// x of a lane. All lanes of the warp come.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_lane(x: u32, lane: u32) -> u32 {
    warp_shuffle_idx(f32::from_bits(x), lane).to_bits()
}

/// A uniform number (docs/compiler.md): x of lane 0, which all lanes of the warp have. All of them come.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_warp(x: u32) -> u32 {
    of_lane(x, 0)
}

/// An opaque number (docs/compiler.md): x of this lane. LLVM does not see that x is the same in every turn of a loop, and computes addresses
/// again in place of keeping them from chunk to chunk, which spills. All lanes of the warp come.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn opaque(x: u32) -> u32 {
    of_lane(x, lane_id())
}

/// Most units of rows that end with token `end` of the packed ones, `rows` of them: those of the next row begin there,
/// so that a row finds its units without a look at the others.
///
/// A row of n tokens has at most ⌊(n + C - 2)/C⌋ units if it begins at a multiple of C, else ⌊(n + 2C - 4)/C⌋; sums of
/// floors are at most the floor of the sum.
#[must_use]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn units(end: u64, rows: u64, positions: bool) -> u64 {
    let more = if positions { 2 * CHUNK - 4 } else { CHUNK - 2 };
    (end + rows * more as u64) / CHUNK as u64
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, units};

    /// Chunks of more than one token of a row of `tokens` that begins at `position`.
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
        // Nothing to spare where a row is whole chunks and two tokens.
        assert_eq!((count(0, 66), units(66, 1, false)), (2, 2));
        assert_eq!((count(62, 68), units(68, 1, true)), (3, 3));
    }
}
