//! How far results may be from the truth, and how far they are: every tolerance, and what is held to it.
//!
//! A result is the rounding, to the dtype that it is stored in, of something near the exact value. It is measured in
//! one of two ways:
//!
//! - [`within`] takes the rounding out, element by element ([`excess`]), and holds the L2 norm of what is left against
//!   an absolute bound. That of a state S is [`Tolerance::state`] · ‖S‖. That of an output is [`Tolerance::output`] ·
//!   ‖q̂‖ ‖S‖, S being the state that it is read from: o = S q̂ may be much smaller than that product, and its error is
//!   not. Where tokens in chunks cancel, [`of_keys`] says how much more is allowed. Besides, log decays are rounded:
//!   [`of_decays`] says what comes of it, [`of_norm`] what a norm makes of it, and [`of_underflow`] what is no
//!   difference at all.
//! - [`relative_error`] is that of a whole tensor, its rounding included, to be at most [`DType::tolerance`].
//!
//! No bound has the number of tokens in it: a state that is multiplied by a decay has its errors multiplied too. What
//! grows from token to token is the sum of the log decays, which [`of_decays`] follows.
//!
//! NaN passes neither, whichever side it is on; an infinity passes [`within`] where the truth has it too, or where
//! rounding makes it of the truth.

use std::fmt;

use crate::error::Error;
use crate::norm::{GatedNorm, gated_norm};
use crate::sum::sum_of;

/// What a result is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 24 bits of significand.
    F32,
    /// 8 bits of significand, the exponents of f32.
    Bf16,
    /// 11 bits of significand, exponents from −14 to 15.
    F16,
}

impl DType {
    /// The largest relative error of a tensor that is stored so, after one launch: half an ulp is 2⁻⁹ of bf16, around
    /// 1.7e-3 in the mean, and a state that was committed before may have had one rounding more.
    #[must_use]
    pub const fn tolerance(self) -> f64 {
        match self {
            Self::F32 => 1e-5,
            Self::Bf16 | Self::F16 => 4e-3,
        }
    }

    /// The same after tokens in chunks, of whose products each factor is rounded to f16: half an ulp is 2⁻¹², and
    /// errors of a state are those of many tokens.
    #[must_use]
    pub const fn tolerance_in_chunks(self) -> f64 {
        match self {
            Self::F32 => 2e-3,
            Self::Bf16 | Self::F16 => 4e-3,
        }
    }

    /// Bits of the significand, and the exponent of the smallest normal number.
    const fn precision(self) -> (i32, i32) {
        match self {
            Self::F32 => (24, -126),
            Self::Bf16 => (8, -126),
            Self::F16 => (11, -14),
        }
    }

    /// Half the distance of neighbours around `x`, a power of two.
    fn half_ulp(self, x: f64) -> f64 {
        let (bits, smallest) = self.precision();
        let exponent = (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
        let biased = exponent.max(smallest) - bits + 1023;
        f64::from_bits((biased as u64) << 52)
    }

    /// A value that rounding leaves finite, and all smaller ones: a power of two.
    const fn large(self) -> f64 {
        match self {
            Self::F32 | Self::Bf16 => f64::from_bits((1023 + 126) << 52),
            Self::F16 => f64::from_bits((1023 + 14) << 52),
        }
    }

    /// The nearest value, an even one of two; infinite where there is none so large.
    #[must_use]
    pub fn round(self, x: f64) -> f64 {
        if !x.is_finite() {
            return x;
        }
        let ulp = 2.0 * self.half_ulp(x);
        let rounded = (x / ulp).round_ties_even() * ulp;
        let (_, smallest) = self.precision();
        if rounded.abs() < 2f64.powi(2 - smallest) {
            rounded
        } else {
            f64::INFINITY.copysign(x)
        }
    }

    /// As [`Self::round`], of an element of a state.
    #[must_use]
    pub fn round_state(self, x: f64) -> f64 {
        self.round(self.held(x))
    }

    /// An element of a state as it is stored, but for its rounding: one of f16 is held within ±65504, so that no infinity
    /// comes into a state from finite values. NaN stays NaN.
    #[must_use]
    pub fn held(self, x: f64) -> f64 {
        match self {
            Self::F16 => x.clamp(-MOST_F16, MOST_F16),
            Self::Bf16 | Self::F32 => x,
        }
    }
}

/// The largest finite f16.
pub const MOST_F16: f64 = 65504.0;

/// How far from the truth results of a formulation may be before they are rounded to their dtype, besides what comes
/// of [`LOG_DECAY`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Of a state, as a part of its norm.
    pub state: f64,
    /// Of o, as a part of the norms of q̂ and of the state that it is read from.
    pub output: f64,
    /// Of a state, and of an output, there times the norm of q̂ where that is more than 1, however small states are, as a
    /// part of the largest of the norms of the row's v and S k̂: what is lost below the smallest normal numbers of f16.
    pub least: f64,
    /// Of a state, and of an output, there times the norm of q̂: so many times [`of_keys`], where that is more than the
    /// part of the norm; 0 where it never is.
    pub keys: f64,
    /// By how much of a part of the norm of a state [`of_terms`] counts, where that is more than the norm.
    pub terms: f64,
}

impl Tolerance {
    /// Token by token: f32 arithmetic, with approximate exponentials and roots.
    ///
    /// Of an output `terms` is three units in the last place of f32. It counts where most of what a state is added up from has
    /// cancelled.
    pub const RECURRENT: Self = Self {
        state: 1e-5,
        output: 1e-6,
        least: 0.0,
        keys: 0.0,
        terms: 0.2,
    };

    /// Tokens at once: products of bf16, or of f32 in two parts of bf16, summed in f32.
    pub const PARALLEL: Self = Self {
        state: 3e-4,
        output: 3e-4,
        least: 0.0,
        keys: 0.0,
        terms: 0.1,
    };

    /// In chunks: products of f16, summed in f32, each chunk's after the state that the one before left in f32.
    ///
    /// `least` is what f16 loses of factors below 2⁻¹⁴, where half the distance of neighbours is 2⁻²⁵ however small
    /// they are. P and T of a chunk of 64 tokens have decays in them, and T has β: where the tokens since have put
    /// nothing into a state (β, k or v of 0), all that there is of it is what such factors leave. Of values around 1, V
    /// = 128 and β up to 2, a token's δ has norm 2√128; errors of even distribution, 2⁻²⁵ / √3 each, add up over 64
    /// tokens to √64 · 2⁻²⁵ / √3 · 2√128 = 3.1e-6 by P or by δ's own decay, and half of that by T: 4e-6 with both, where
    /// v that are evenly distributed have norm √(128 / 3) = 6.5. P has q̂ in it: its part of o stays where q̂ is short. It is
    /// no more than `state` of a state of norm 4e-3, whose elements are around 2⁻¹⁵, and then only where larger ones have
    /// decayed to that.
    ///
    /// `keys` is the same bound as `state` where nothing cancels: 4 · 2⁻¹² of the norm. Where β is near 2, keys resemble
    /// each other and nothing decays, what tokens add to a state cancels, and roundings of it do not: they are as large
    /// in proportion to [`of_keys`] as elsewhere, 1.5 to 2.4 times that where there is more to a state than `least`.
    pub const CHUNKED: Self = Self {
        state: 1e-3,
        output: 1e-3,
        least: 6e-7,
        keys: 4.0,
        terms: 0.0,
    };
}

/// How far from the truth a log decay may be, as a part of it: 3e-7 of the softplus, 2⁻²² of each of the exponentials
/// of A_log and of a + dt_bias, and 2⁻²⁴ of their arguments, which are around 5.
pub const LOG_DECAY: f64 = 2e-6;

/// How much larger the log decays are, as a part of theirs, with which the second states of [`of_decays`] are computed.
pub const MORE_DECAY: f64 = 1.0 / 4096.0;

/// By what part of it each element of k is larger or smaller, at random, in the second states of [`of_keys`]: half an ulp of
/// f16, at the least.
pub const KEY: f64 = 1.0 / 4096.0;

/// How far a state comes from `exact` by [`KEY`], where `keys_off` is the state of the same tokens with every element
/// of k larger or smaller by that part of it.
///
/// Of a token that is one rounding of what it adds, δ k̂ᵀ, and one of what it reads, S k̂; what later tokens make of both
/// is what they make of any rounding. What is not finite does not count.
#[must_use]
pub fn of_keys(exact: &[f64], keys_off: &[f64]) -> f64 {
    change(exact, keys_off)
}

/// By what part of what it is added up from each element of a state is larger or smaller, at random, after every token in
/// the second states of [`of_terms`].
pub const TERM: f64 = 1.0 / 4096.0;

/// How far a state comes from `exact` by [`TERM`], as a part of that: the norm of all terms' errors, were each as large as
/// its term. `terms_off` is the state of the same tokens with every element larger or smaller by that part of |s α| + β (|v| +
/// |S k̂|) |k|.
///
/// Where terms cancel, their roundings do not: a key that comes again with another v leaves those of the first.
#[must_use]
pub fn of_terms(exact: &[f64], terms_off: &[f64]) -> f64 {
    change(exact, terms_off) / TERM
}

/// By what part of it each tap of a convolution, and each bias, is larger or smaller, at random, where results of a convolution
/// that is not exact are judged.
pub const TAP: f64 = 1.0 / 4096.0;

/// How far from the truth sums of a convolution are, and what an activation makes of them, as a part of each of their terms: f32.
pub const CONVOLVED: f64 = 1e-6;

/// How far a state may be from `exact` by [`LOG_DECAY`], where `decaying_more` is the state of the same tokens with
/// every log decay larger by [`MORE_DECAY`] of it.
///
/// Rounding a log decay g changes a state s·exp(g) by |g| times as large a part of it, after several tokens by the sum
/// of theirs: by as much as the state changes with all log decays together. What is not finite does not count.
#[must_use]
pub fn of_decays(exact: &[f64], decaying_more: &[f64]) -> f64 {
    LOG_DECAY * change(exact, decaying_more) / MORE_DECAY
}

/// The norm of what two results differ by, of what is finite.
#[must_use]
pub fn change(exact: &[f64], other: &[f64]) -> f64 {
    let square = |x: f64, y: f64| {
        let change = x - y;
        if change.is_finite() {
            change * change
        } else {
            0.0
        }
    };
    sum_of(exact, other, square).sqrt()
}

/// What a norm's own arithmetic may add to its results, as a part of them: a root and a quotient, an exponential, and
/// products in f32.
pub const NORM: f64 = 2e-6;

/// How far the results of a norm may be from the truth, one value head's, where its input o may be off by `off`.
///
/// They are o · f, f = weight · act(z) / √(mean(o²) + eps). What o is off by is multiplied by f, and it changes the root
/// by as large a part of it as o at most: twice the largest f. Besides, there is [`NORM`].
///
/// # Errors
/// Those of [`gated_norm`].
pub fn of_norm(gated: &GatedNorm, o: &[f64], off: f64) -> Result<f64, Error> {
    let results = gated_norm(gated, o)?;
    let squares: f64 = o.iter().map(|o| o * o).sum();
    let size = (squares / o.len() as f64 + gated.eps).sqrt();
    let factors = gated.weight.iter().zip(gated.z);
    let largest = factors
        .map(|(weight, &z)| (weight * gated.activation.of(z) / size).abs())
        .fold(0.0, f64::max);
    Ok(2.0 * largest * off + NORM * norm(&results))
}

/// What is no difference in an element of any size: products in f32 that are smaller than its smallest normal number are 0.
pub const UNDERFLOW: f64 = 1e-36;

/// What is no difference in so many elements, among values around 1: in each 1e-12, below which f32 exponentials are
/// denormal, or inexact by their argument.
#[must_use]
pub fn of_underflow(elements: usize) -> f64 {
    1e-12 * (elements as f64).sqrt()
}

/// The largest relative error of the reference to what other implementations computed in f32.
pub const COMPUTED_IN_F32: f64 = 1e-6;

/// The same for outputs of a norm after chunks of tokens, in which log decays are summed in f32: the norm makes small
/// outputs as large as the others, with their errors.
pub const COMPUTED_IN_CHUNKS: f64 = 5e-6;

/// The L2 norm; NaN or infinite where an element is.
#[must_use]
pub fn norm(values: &[f64]) -> f64 {
    sum_of(values, values, |x, y| x * y).sqrt()
}

/// How far `got` is from being the rounding of `exact` to `dtype`; infinite where either is NaN, or where one alone is
/// infinite after the rounding.
#[must_use]
pub fn excess(got: f64, exact: f64, dtype: DType) -> f64 {
    let half_ulp = dtype.half_ulp(got.abs().max(exact.abs()));
    let off = (got - exact).abs();
    // No rounding of it is infinite.
    if off <= half_ulp && exact.abs() < dtype.large() {
        return 0.0;
    }
    let rounded = dtype.round(exact);
    if got == rounded {
        return 0.0;
    }
    if !got.is_finite() || !rounded.is_finite() {
        return f64::INFINITY;
    }
    (off - half_ulp).max(0.0)
}

/// A result that is further from the truth than it may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TooFar {
    /// The norm of the excesses.
    pub off: f64,
    /// The most that it might be.
    pub allowed: f64,
    /// The element with the largest excess, or the first that only one side has.
    pub element: usize,
    /// Its exact value; NaN where there is none.
    pub exact: f64,
    /// What it is; NaN where there is none.
    pub got: f64,
}

impl fmt::Display for TooFar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            off,
            allowed,
            element,
            exact,
            got,
        } = self;
        write!(
            f,
            "off by {off:.1e} besides rounding, allowed {allowed:.1e}; element {element}: wanted {exact}, got {got}"
        )
    }
}

impl std::error::Error for TooFar {}

/// The norm of the excesses of `got`, stored as `dtype`, as a part of `allowed`: 1 is the limit.
///
/// # Errors
/// Where it is more, where `allowed` is NaN or infinite, and where the lengths differ.
pub fn within(got: &[f64], exact: &[f64], dtype: DType, allowed: f64) -> Result<f64, TooFar> {
    let excesses: Vec<f64> = got
        .iter()
        .zip(exact)
        .map(|(&got, &exact)| excess(got, exact, dtype))
        .collect();
    let is_whole = got.len() == exact.len();
    let off = if is_whole {
        norm(&excesses)
    } else {
        f64::INFINITY
    };
    if off <= allowed && allowed.is_finite() {
        return Ok(if allowed > 0.0 { off / allowed } else { 0.0 });
    }
    let worst = (0..excesses.len()).max_by(|&i, &j| excesses[i].total_cmp(&excesses[j]));
    let element = if is_whole {
        worst.unwrap_or(0)
    } else {
        excesses.len()
    };
    let at = |values: &[f64]| values.get(element).copied().unwrap_or(f64::NAN);
    Err(TooFar {
        off,
        allowed,
        element,
        exact: at(exact),
        got: at(got),
    })
}

/// ‖got − exact‖ / ‖exact‖: 0 where the two are equal, infinite where anything is NaN or infinite, where the lengths
/// differ, and where zeros are met by something else.
#[must_use]
pub fn relative_error(got: &[f64], exact: &[f64]) -> f64 {
    if got.len() != exact.len() {
        return f64::INFINITY;
    }
    relative_error_of(got.iter().copied().zip(exact.iter().copied()))
}

/// [`relative_error`] of pairs of a result and the truth.
#[must_use]
pub fn relative_error_of(pairs: impl IntoIterator<Item = (f64, f64)>) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (got, exact) in pairs {
        difference += (got - exact).powi(2);
        size += exact.powi(2);
    }
    let relative = f64::sqrt(difference / size);
    if difference == 0.0 {
        0.0
    } else if relative.is_finite() {
        relative
    } else {
        f64::INFINITY
    }
}
