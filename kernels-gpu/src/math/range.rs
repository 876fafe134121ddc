//! Vectors that are too long to be normalised in f32. If Σx² overflows, the inverse norm is 0 and the normalised vector NaN. If the
//! inverse norm is small, its product with a decay underflows.
//!
//! Such a vector is multiplied by a power of two. The inverse norm is then divided by this power, so the normalised vector is the
//! same. Two tests find such vectors:
//! - [`overflow`] tests Σx², which is computed anyway. `Recurrent` and prefills use this test, for the sums alone.
//! - [`LARGE`] elements. `Parallel` uses this test: its factors have the decays of several tokens.
//!
//! The rare path is short: it sums the vector times [`SMALL`] once more.

use super::elements::Raw;
use super::power;
use super::reduce::{add_dot, butterfly_sum_small};
use crate::constants::Element;
use crate::device::rarely;
use crate::device::warp::warp_ballot;
use crate::math::each::each;

/// 2⁻⁷⁰: after multiplication by it, the squares of any 2⁷ finite numbers add up to less than ∞.
pub const SMALL: f32 = f32::from_bits((127 - 70) << 23);

/// 2¹⁶: the inverse norm of a vector of up to 2⁷ smaller elements is above 2⁻²⁰, and its product with a decay of e⁻⁷⁴ is a normal
/// number.
pub const LARGE: f32 = f32::from_bits((127 + 16) << 23);

/// The factor that brings a vector into range: for a `long` vector a power of two that brings the length between 2⁹ and 2¹⁰, where
/// the 1e-6 of the norm is negligible; else 1. `small` is the sum of squares of the vector times [`SMALL`].
#[inline(always)]
pub fn power_for(long: bool, small: f32) -> f32 {
    if long {
        let [power, _] = power::of_root(small);
        power * (SMALL * 1024.0)
    } else {
        1.0
    }
}

/// x · `by`, element by element. A loop, because it is always inlined and `map` is not.
#[inline(always)]
pub fn times<const N: usize>(mut x: [f32; N], by: f32) -> [f32; N] {
    each!(i in 0..N => x[i] *= by);
    x
}

/// Whether Σk² or Σq² of any lane is ∞, from each lane's Σk², Σq² and k·q. All lanes of the warp call it. A ballot is used
/// although most warps have one k and q: docs/compiler.md, Warps that stay together.
#[inline(always)]
pub fn overflow(may_overflow: bool, [squares_k, squares_q, _]: [f32; 3]) -> bool {
    may_overflow && any_large(squares_k == f32::INFINITY || squares_q == f32::INFINITY)
}

/// Whether Σk² or Σq², of elements of these types, is needed and may be ∞: f16 vectors cannot overflow.
#[inline(always)]
pub fn may_overflow(l2norm: bool, elements: [u32; 2]) -> bool {
    let f16 = Element::F16 as u32;
    l2norm && (elements[0] != f16 || elements[1] != f16)
}

/// The factors for k and q when sums [`overflow`]: [`SMALL`] or 1.
#[inline(always)]
pub fn shrinking([squares_k, squares_q, _]: [f32; 3]) -> [f32; 2] {
    let of = |squares| {
        if squares == f32::INFINITY { SMALL } else { 1.0 }
    };
    [of(squares_k), of(squares_q)]
}

/// Corrects Σk², Σq² and k·q of k and q that were multiplied by these powers. A sum of squares that was ∞ is now at least 2⁻¹²:
/// the 1e-6 that the norm adds is no longer negligible, and is subtracted here.
#[inline(always)]
pub fn shrunk([squares_k, squares_q, kq]: [f32; 3], powers: [f32; 2]) -> [f32; 3] {
    let of = |squares: f32, power: f32| {
        if power == SMALL {
            squares - 1e-6
        } else {
            squares
        }
    };
    [of(squares_k, powers[0]), of(squares_q, powers[1]), kq]
}

/// Whether any lane of the warp has a large element. All lanes of the warp call it.
#[inline(always)]
pub fn any_large(is_large: bool) -> bool {
    let any = warp_ballot(is_large) != 0;
    if any {
        rarely();
    }
    any
}

/// [`power_for`] a vector of which `x` are this lane's elements; the other elements are in the lanes whose index differs only in
/// bits `1..lanes`. All lanes of the warp call it.
#[inline(always)]
pub fn power_of<const N: usize, const PARTS: usize>(x: &[[f32; N]; PARTS], lanes: u32) -> f32 {
    let mut sums = [0.0; 2];
    each!(part in 0..PARTS => {
        let small = times(x[part], SMALL);
        sums = [
            add_dot(sums[0], x[part], x[part]),
            add_dot(sums[1], small, small),
        ];
    });
    let [squares, small] = butterfly_sum_small(sums, lanes);
    power_for(squares >= LARGE * LARGE, small)
}

/// Multiplies a lane's channels of q or k, in memory format, by a power of two if the vector is too large for its norm. The
/// vector is spread over the lanes whose index differs only in bits `1..lanes`. All lanes of the warp call it.
#[inline(always)]
pub fn tame_one<const PARTS: usize>(raw: &mut [Raw<8>; PARTS], element: u32, lanes: u32) {
    let mut values = [[0.0; 8]; PARTS];
    each!(part in 0..PARTS => values[part] = raw[part].to_f32(element));
    let power = power_of(&values, lanes);
    each!(part in 0..PARTS => raw[part] = raw[part].times(power, element));
}

/// Brings k and q, of these element types, into a range where the sums of their squares are finite: see [`tame_one`].
#[inline(always)]
pub fn tame<const PARTS: usize>(
    l2norm: bool,
    [k, q]: [&mut [Raw<8>; PARTS]; 2],
    elements: [u32; 2],
    lanes: u32,
) {
    if !l2norm || (elements[0] == Element::F16 as u32 && elements[1] == Element::F16 as u32) {
        return;
    }
    let mut is_large = false;
    each!(part in 0..PARTS => {
        is_large |= k[part].is_large(elements[0]) || q[part].is_large(elements[1]);
    });
    if any_large(is_large) {
        tame_one(k, elements[0], lanes);
        tame_one(q, elements[1], lanes);
    }
}
