//! Range checks of f16 factors. The tensor cores multiply R and δ in f16, which holds magnitudes from 2⁻²⁴ to 65,504. A warp has
//! 16 rows of the state, and checks its R of every token of a chunk. From the first token on that f16 does not hold well, the
//! warp processes its rows token by token in f32 ([`super::chain`]).
//!
//! The intra-chunk pass bounds the amplification by the triangular system: for each token, Σ |T_ts| over each block of 16 tokens
//! s, times the scale of k, is below [`MOST_GAIN`] / 4; otherwise the token's factor of S k̂ᵀ is NaN ([`super::solve`]), and so
//! is its R. With |R| below `LARGEST`, neither δ nor δ times its factor for the state reaches 65,504.
//!
//! The rule for a token depends on that token, on tokens before it and on the state before the chunk. So no output
//! depends on later tokens.

use super::{CHUNK, of_lane, of_warp, opaque};
use crate::device::float::{add_f16x2, fma_f16x2, larger_f16x2, pack_f16x2};
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_ballot, warp_shuffle_xor};
use crate::math::each::each;
use crate::math::power;

/// Upper bound of Σ_s |T_ts| times half the scale of k: with `LARGEST`, 768 · 40 · 2 < 65,504.
pub const MOST_GAIN: f32 = 40.0;
/// Upper bound of the scale of k. Without scales the lengths of k and q are near 1, so with [`MOST_QUERY`] P is bounded by 64 ·
/// 512 < 65,504.
pub const MOST_KEY: f32 = 64.0;
/// Upper bound of the scale of q: see [`MOST_KEY`].
pub const MOST_QUERY: f32 = 512.0;
/// Bits of the f16 768, the smallest |R| that is too large.
const LARGEST: u32 = 0x6200;
/// Bits of the f16 2⁻⁹. A token whose |R| is below it in all rows is too small, if the state is below `SMALL_STATE`.
const SMALLEST: u32 = 0x1800;
/// A state whose elements are all below this is small. If R is small too, every part of o is small.
const SMALL_STATE: f32 = 1.0 / 2048.0;
/// Exponent bits of an f16; one of them is set if the magnitude is 2⁻¹¹ or more.
const NOT_SMALL: u32 = 0x7000;
/// Bits of an infinite f16.
const INFINITE: u32 = 0x7c00;
/// Sign bits of both halves of a word.
const SIGNS: u32 = 0x8000_8000;

/// The same number in both halves of a word.
const fn both(x: u32) -> u32 {
    x << 16 | x
}

/// Sign bits of the halves that are at least `least`; both are magnitudes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn at_least(magnitudes: u32, least: u32) -> u32 {
    magnitudes.wrapping_add(both(0x8000 - least)) & SIGNS
}

/// First of the lane's tokens: it has 8 j + this and the next, j = 0 .. 8, for rows lane / 4 and lane / 4 + 8. Called by all
/// lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn own_token() -> u32 {
    opaque(lane_id()) % 4 * 2
}

/// Σ x² over a thread's words, for each half separately, in f16: infinite or NaN if some |x| is 256 or more, or NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn squares(words: &[u32; 16]) -> u32 {
    // Two independent sums, so that neither waits for the other's last addition.
    let mut sums = [0; 2];
    each!(i in 0..16 => sums[i % 2] = fma_f16x2(words[i], words[i], sums[i % 2]));
    add_f16x2(sums[0], sums[1])
}

/// Whether all elements of the warp's rows of the state may be small: two f16 elements of each lane (`word`) are below 2⁻¹¹. A
/// sample of eight channels. Called by all lanes of the warp; all get the result.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn is_small(word: u32) -> bool {
    warp_ballot(word & both(NOT_SMALL) != 0) == 0
}

/// Whether a thread's words of R may be large: true if a magnitude is 256 or more, or NaN. [`first_outside`] may find tokens
/// outside without it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn may_be_large(r: &[u32; 16]) -> bool {
    at_least(squares(r) & !SIGNS, INFINITE) != 0
}

/// First token of the chunk whose R f16 does not hold in the warp's 16 rows; [`CHUNK`] if f16 holds all. `s` is the state before
/// the chunk, which may be [small](is_small). If no thread's R [may be large](may_be_large) and the state is not small, the
/// result is [`CHUNK`]. Sets R of that token and of later tokens to 0. Called by all lanes of the warp; all get the result.
///
/// Words 2 j and 2 j + 1 of `r` belong to rows lane / 4 and lane / 4 + 8, each to tokens 8 j + lane % 4 · 2 and the next.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn first_outside<const K: u32>(
    r: &mut [u32; 16],
    s: &[f32; 64],
    is_small: bool,
    count: u32,
) -> u32 {
    let mut first = CHUNK;
    if !holds(r, is_small, count) {
        first = of_warp(search::<K>(s, r, count));
        clear_from(r, first);
    }
    first
}

/// Whether f16 holds R of every token of the chunk in the warp's 16 rows; if not, [`search`] must look. Called by all lanes of
/// the warp; all get the result.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn holds(r: &[u32; 16], is_small: bool, count: u32) -> bool {
    let mut large = 0;
    // Bit 15 − j for the first token of word j, bit 31 − j for the second.
    let mut tokens = 0;
    let mut j = 0;
    while j < 8 {
        let pair = larger_f16x2(r[2 * j], r[2 * j + 1]);
        large = larger_f16x2(large, pair);
        tokens |= at_least(pair, SMALLEST) >> j;
        j += 1;
    }
    let mut mask = 4;
    while mask < 32 {
        tokens |= warp_shuffle_xor(f32::from_bits(tokens), mask).to_bits();
        mask *= 2;
    }
    if count < CHUNK {
        let own = own_token();
        each!(j in 0..8 => {
            let token = 8 * j + own;
            tokens |= ((token >= count) as u32) << (15 - j);
            tokens |= ((token + 1 >= count) as u32) << (31 - j);
        });
    }
    let is_outside = (is_small && tokens != both(0xff00)) || at_least(large, LARGEST) != 0;
    warp_ballot(is_outside) == 0
}

/// Larger of the words of two lanes, `mask` apart, for each half separately.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn larger_of_lanes(word: u32, mask: u32) -> u32 {
    let other = warp_shuffle_xor(f32::from_bits(word), mask).to_bits();
    larger_f16x2(word, other)
}

/// Larger of the numbers of two lanes, `mask` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn maximum_of_lanes(x: u32, mask: u32) -> u32 {
    let other = warp_shuffle_xor(f32::from_bits(x), mask).to_bits();
    if other > x { other } else { x }
}

/// Bits of the largest magnitude of o, times `size`, over the warp's 16 rows; the lane has two of them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn largest_of_rows(o: [f32; 2], size: f32) -> u32 {
    let [a, b] = o.map(|o| o.to_bits() & 0x7fff_ffff);
    let mut largest = if a > b { a } else { b };
    let mut mask = 4;
    while mask < 32 {
        largest = maximum_of_lanes(largest, mask);
        mask *= 2;
    }
    (f32::from_bits(largest) * size).to_bits()
}

/// Searches the token of [`first_outside`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn search<const K: u32>(s: &[f32; 64], r: &[u32; 16], count: u32) -> u32 {
    let lane = opaque(lane_id());
    let mut state = 0;
    each!(i in 0..K as usize / 2 => {
        let magnitude = s[i].to_bits() & 0x7fff_ffff;
        state = if magnitude > state { magnitude } else { state };
    });
    let mut mask = 1;
    while mask < 32 {
        state = maximum_of_lanes(state, mask);
        mask *= 2;
    }
    let is_small = state < SMALL_STATE.to_bits();
    // Lane l gets tokens l and l + 32.
    let mut own = [0; 2];
    each!(j in 0..8 => {
        let mut word = larger_f16x2(r[2 * j], r[2 * j + 1]);
        mask = 4;
        while mask < 32 {
            word = larger_of_lanes(word, mask);
            mask *= 2;
        }
        let word = of_lane(word, lane % 8 / 2);
        let half = if lane % 2 == 1 {
            word >> 16
        } else {
            word & 0xffff
        };
        if lane / 8 == j as u32 % 4 {
            own[j / 4] = half;
        }
    });
    // Prefix maximum over the tokens.
    let mut step = 1;
    while step < 32 {
        let before = own.map(|x| of_lane(x, (lane + 32 - step) % 32));
        each!(half in 0..2 => {
            if lane >= step && before[half] > own[half] {
                own[half] = before[half];
            }
        });
        step *= 2;
    }
    let before = of_lane(own[0], 31);
    own[1] = if before > own[1] { before } else { own[1] };
    let mut first = CHUNK;
    let mut half = 2;
    while half > 0 {
        half -= 1;
        let most = own[half];
        // An R of 0 may have been too small for f16.
        let is_outside = most >= LARGEST || (is_small && most < SMALLEST);
        let outside = warp_ballot(is_outside && lane + 32 * (half as u32) < count);
        if outside != 0 {
            first = 32 * half as u32 + outside.trailing_zeros();
        }
    }
    first
}

/// Clears the tokens from `first` on, in words laid out as in [`first_outside`]. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn clear_from(words: &mut [u32; 16], first: u32) {
    let own = own_token();
    each!(j in 0..8 => {
        let token = 8 * j as u32 + own;
        let low = if token < first { 0xffff } else { 0 };
        let high = if token + 1 < first { 0xffff_0000 } else { 0 };
        words[2 * j] &= low | high;
        words[2 * j + 1] &= low | high;
    });
}

/// Whether f16 holds o times `size` of all tokens. Conservative: false if a product is 256 or more, even one that f16 holds.
/// Called by all lanes of the warp; all get the result.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn holds_output(o: &[f32; 32], size: f32) -> bool {
    let words: [u32; 16] =
        core::array::from_fn(|i| pack_f16x2(o[2 * i] * size, o[2 * i + 1] * size));
    warp_ballot(at_least(squares(&words) & !SIGNS, INFINITE) != 0) == 0
}

/// Scales o of each token from `first` on by a power of two; or from an earlier token on, if f16 does not hold its o times
/// `size`. The largest of the warp's 16 rows times `size` is then between 1 and 2. Calls `give` once in the warp with each such
/// token and the inverse power. Returns the first of these tokens. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scale_output(o: &mut [f32; 32], size: f32, first: u32, give: impl Fn(u32, f32)) -> u32 {
    const MOST: u32 = 65504.0f32.to_bits();
    let own = own_token();
    let token = |i: usize| 8 * (i as u32 / 2) + own + i as u32 % 2;
    let mut first = first;
    each!(i in 0..16 => {
        let at = 4 * (i / 2) + i % 2;
        // One token after the other: all in one pass take more registers than are free.
        sync_warp(FULL_MASK);
        if largest_of_rows([o[at], o[at + 2]], size) > MOST && token(i) < first {
            first = token(i);
        }
    });
    let mut mask = 1;
    while mask < 4 {
        let other = warp_shuffle_xor(f32::from_bits(first), mask).to_bits();
        first = if other < first { other } else { first };
        mask *= 2;
    }
    each!(i in 0..16 => {
        let at = 4 * (i / 2) + i % 2;
        sync_warp(FULL_MASK);
        let (scaled, back) = scale_token([o[at], o[at + 2]], size);
        if token(i) >= first {
            [o[at], o[at + 2]] = scaled;
            if lane_id() < 4 {
                give(token(i), back);
            }
        }
    });
    first
}

/// Scales o of rows lane / 4 and lane / 4 + 8 of a token as in [`scale_output`]; also returns the inverse power. Called by all
/// lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn scale_token(o: [f32; 2], size: f32) -> ([f32; 2], f32) {
    let largest = largest_of_rows(o, size);
    let [power, back] = power::of_exponent((largest >> 23).clamp(1, 253));
    (o.map(|o| o * power), back)
}
