//! Every tolerance, and the comparisons of results with the exact values (the truth) that use them.
//!
//! A result is a value near the exact one, rounded to the dtype that it is stored in. There are two measures of its error:
//!
//! - [`within`] takes the rounding out, element by element ([`excess`]), and compares the L2 norm of the rest with an absolute bound.
//!   The bound of a state S is [`Tolerance::state`] · ‖S‖. The bound of an output is [`Tolerance::output`] · ‖q̂‖ ‖S‖, S being the
//!   state that the output is read from: o = S q̂ may be much smaller than that product, and its error is not. Chunkwise the bound
//!   follows the terms of o ([`Tolerance::CHUNKED`]). If tokens of a chunk cancel, [`of_factors`] says how much more is allowed.
//!   Log decays are rounded too: [`of_decays`] bounds the effect on a state, [`of_norm`] the effect on a norm's results, and
//!   [`of_underflow`] is a difference that never counts.
//! - [`relative_error`] is the relative error of a whole tensor, rounding included. Its limit is [`DType::tolerance`]. The demo, the
//!   benchmarks and candle's tests use it; every other test and the command's `check` use [`within`].
//!
//! No bound depends on the number of tokens: a decay multiplies the errors of a state too. Only the sum of the log decays grows
//! from token to token, and [`of_decays`] follows that sum.
//!
//! NaN on either side passes neither measure. An infinity passes [`within`] if the exact value is the same infinity, or if
//! rounding turns the exact value into it.

use std::fmt;

use crate::error::Error;
use crate::norm::{GatedNorm, gated_norm};
use crate::sum::sum_of;

/// Dtype that a result is stored in.
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
    /// Largest relative error of a tensor stored in this dtype after one launch. Half an ulp of bf16 is 2⁻⁹, around 1.7e-3 in the mean,
    /// and a state that was committed before may have been rounded once more.
    #[must_use]
    pub const fn tolerance(self) -> f64 {
        match self {
            Self::F32 => 1e-5,
            Self::Bf16 | Self::F16 => 4e-3,
        }
    }

    /// Largest relative error after chunks of tokens, whose products have factors rounded to f16: half an ulp is 2⁻¹², and a state has
    /// the errors of many tokens.
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

    /// Half the distance between neighbours around `x`, a power of two.
    fn half_ulp(self, x: f64) -> f64 {
        let (bits, smallest) = self.precision();
        let exponent = (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
        let biased = exponent.max(smallest) - bits + 1023;
        f64::from_bits((biased as u64) << 52)
    }

    /// A power of two below which every value stays finite when rounded.
    const fn large(self) -> f64 {
        match self {
            Self::F32 | Self::Bf16 => f64::from_bits((1023 + 126) << 52),
            Self::F16 => f64::from_bits((1023 + 14) << 52),
        }
    }

    /// The nearest value of this dtype, ties to even; infinite above the largest finite value.
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

    /// As [`Self::round`], for an element of a state.
    #[must_use]
    pub fn round_state(self, x: f64) -> f64 {
        self.round(self.held(x))
    }

    /// An element of a state before it is rounded for storage. An f16 state is held within ±65504, so that finite values never store an
    /// infinity. NaN stays NaN.
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

/// Largest errors of a formulation's results before they are rounded to their dtype, without the effect of [`LOG_DECAY`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Error of a state, relative to its norm.
    pub state: f64,
    /// Error of o, relative to the product of the norms of q̂ and of the state that o is read from. With `factors`,
    /// [`judge`](crate::judge::judge()) takes it relative to the terms of o instead: see [`Self::CHUNKED`].
    pub output: f64,
    /// Error of a state or an output that remains however small states are, from values below the smallest normal number of f16. It is
    /// relative to the largest norm of v and S k̂ of the last [`CHUNK`] tokens, or of a token before them as far as it has not decayed;
    /// and to at least [`NORM_AROUND_1`] for [`CHUNK`] tokens from a state with an element of [`LARGE_STATE`] on. For an output it is
    /// multiplied by the norm of q̂ if that is more than 1.
    pub least: f64,
    /// Factor of [`of_factors`] in the error of a state, where it counts if the result is more than the error relative to the state's
    /// norm. An output has the part that q̂ reads. 0 turns it off.
    pub factors: f64,
    /// Weight of [`of_terms`] relative to the state's norm: the larger of the two counts.
    pub terms: f64,
}

impl Tolerance {
    /// Token by token: f32 arithmetic, with approximate exponentials and roots.
    ///
    /// For an output, `terms` amounts to three units in the last place of f32. It counts where most of the terms that make up a state
    /// have cancelled.
    pub const RECURRENT: Self = Self {
        state: 1e-5,
        output: 1e-6,
        least: 0.0,
        factors: 0.0,
        terms: 0.2,
    };

    /// Up to 8 tokens together: products of bf16, or of f32 split into two bf16 parts, summed in f32.
    ///
    /// `least` is for decays over several tokens, which are one factor: below the smallest normal number of f32 it is 0.
    pub const PARALLEL: Self = Self {
        state: 3e-4,
        output: 3e-4,
        least: UNDERFLOW,
        factors: 0.0,
        terms: 0.1,
    };

    /// As [`Self::PARALLEL`], on f32 states: S is split into two bf16 parts too, and the new state is made by additions in f32. The sum of
    /// two bf16 parts is good to 2⁻¹⁸ of a factor. A state's error has that of S, k̂, R = v − S k̂, T and δ, 1.9e-5 if all add up. Each
    /// term has these errors, also where the terms cancel: the largest of 228 problems with keys that repeat and v of 1e-5 to 1e5 is
    /// 0.48 of the bound by `terms`.
    pub const PARALLEL_F32: Self = Self {
        state: 2e-5,
        output: 1e-5,
        terms: 1.0,
        ..Self::PARALLEL
    };

    /// The tolerance for results of this formulation on states of a dtype.
    #[must_use]
    pub fn on(self, state: DType) -> Self {
        match state {
            DType::F32 if self == Self::PARALLEL => Self::PARALLEL_F32,
            _ => self,
        }
    }

    /// Chunkwise: products of f16, summed in f32. Each chunk starts from the f32 state of the chunk before.
    ///
    /// `output` follows the terms of o = Γ S₀ q̂ + Σ P_s δ_s, with S₀ from before the chunk and P_s = q̂·k̂_s, decayed, of its tokens s.
    /// Each factor is rounded by itself, by up to ε = 2⁻¹² of it, so that the squares of the errors add up:
    /// - S₀ and q̂: twice ε² Σ (S_vk q̂_k)². S after the token stands for Γ S₀: what tokens have taken from S₀ is in their δ, and in what
    ///   they have added k̂ and q̂ are rounded likewise where they are not f16. For random q̂ and S the root of the sum is about ‖o‖;
    ///   ‖q̂‖ ‖S‖ is √K times that, and as large only for q̂ and S of one channel.
    /// - P and δ: twice ε² Σ P_s² ‖δ_s‖². It counts where tokens cancel. A chunk is any 64 tokens here, of which the token is the last.
    /// - T and R in δ = T R: twice ε² Σ P_s² Σ_j T_sj² ‖R_j‖². It counts where the rows of R are alike and their products with T cancel.
    /// - o itself, which is f16 before a norm: ε² ‖o‖².
    /// - S₀ has the errors of earlier tokens, which q̂ reads: Σ (D_vk q̂_k)² if they are independent, ‖D q̂‖² if tokens
    ///   with like keys have made them. D is the difference in [`of_factors`], and both count.
    ///
    /// The bound is 4 times the root of the sum: 1e-3 for 4 ε in `output`, 4 in `factors`. The largest error of 4,500 random problems
    /// is 0.63 of it, with strong decays, β up to 2 and q̂ and S of few channels; 0.82 with keys that are nearly equal and never decay.
    /// With decays above e^−0.2 and β up to 1 the bound is 2.5e-3 of ‖o‖ in the median, and at most 4.9e-3 for 99 of 100 tokens; T and R are a tenth
    /// of that. It is more for an o that is small by chance, as of a single token whose q̂ is at a right angle to k̂.
    ///
    /// `least` bounds the loss of f16 factors below 2⁻¹⁴, where half the distance between neighbours is 2⁻²⁵ however small they are. In a
    /// chunk of 64 tokens, P and T contain decays, and T contains β: if the later tokens have added nothing to a state (β, k or v of 0),
    /// the whole state comes from such factors. For values around 1, V = 128 and β up to 2, a token's δ has norm 2√128; evenly
    /// distributed errors, 2⁻²⁵ / √3 each, add up over 64 tokens to √64 · 2⁻²⁵ / √3 · 2√128 = 3.1e-6 by P or by δ's own decay, and to half
    /// of that by T: 4e-6 with both, where evenly distributed v have norm √(128 / 3) = 6.5. P contains q̂: its share of o stays where q̂
    /// is short. `least` is no more than `state` of a state of norm 4e-3, whose elements are around 2⁻¹⁵, and then only if larger
    /// elements have decayed to that size.
    ///
    /// `factors` is the same bound as `state` where nothing cancels: 4 · 2⁻¹² of the norm. Where β is near 2, keys resemble each other and
    /// nothing decays, the tokens' contributions to a state cancel, and the roundings of these contributions do not: they are as large
    /// in proportion to [`of_factors`] as elsewhere, 1.5 to 2.4 times [`of_factors`] for states above `least`.
    pub const CHUNKED: Self = Self {
        state: 1e-3,
        output: 1e-3,
        least: 6e-7,
        factors: 4.0,
        terms: 0.0,
    };
}

/// Largest relative error of a log decay: 3e-7 of the softplus, 2⁻²² of each of the exponentials of A_log and of a + dt_bias, and
/// 2⁻²⁴ of their arguments, which are around 5.
pub const LOG_DECAY: f64 = 2e-6;

/// Relative increase of the log decays for the second states of [`of_decays`].
pub const MORE_DECAY: f64 = 1.0 / 4096.0;

/// Relative change of each element of k, T and R, with random sign, for the second states of [`of_factors`]: half an ulp of f16.
pub const FACTOR: f64 = 1.0 / 4096.0;

/// Most tokens of a chunk.
pub const CHUNK: usize = 64;

/// Magnitude of an element of a state from which a chunk's products take every R = v − S k̂ below 768, however small. If the state has
/// decayed to nothing since, R below 2⁻²⁵ are lost that an f32 recurrence keeps.
pub const LARGE_STATE: f64 = 1.0 / 2048.0;

/// Norm of 128 values that are evenly distributed between −1 and 1.
pub const NORM_AROUND_1: f64 = 6.5;

/// Distance of a state from `exact` that [`FACTOR`] causes. `factors_off` is the state after the same tokens with every element of k,
/// and of T and R in δ = T R, larger or smaller by that part of it.
///
/// For a token this is one rounding of its contribution, δ k̂ᵀ, one of its prediction, S k̂, and one of each product T R. If the rows
/// of R are alike, these products cancel, and their roundings do not. Later tokens carry all three on as they carry any rounding.
/// Elements that are not finite are left out.
#[must_use]
pub fn of_factors(exact: &[f64], factors_off: &[f64]) -> f64 {
    change(exact, factors_off)
}

/// Relative change of each element of a state after every token, with random sign, for the second states of [`of_terms`]. It is
/// relative to the sum of the magnitudes of the terms that make up the element.
pub const TERM: f64 = 1.0 / 4096.0;

/// Norm of the errors of all terms of a state, each as large as its term. `terms_off` is the state after the same tokens with every
/// element larger or smaller by [`TERM`] times |s α| + β (|v| + |S k̂|) |k|; the distance from `exact` is divided by [`TERM`].
///
/// Where terms cancel, their roundings do not: a key that comes again with another v leaves the roundings of the first v.
#[must_use]
pub fn of_terms(exact: &[f64], terms_off: &[f64]) -> f64 {
    change(exact, terms_off) / TERM
}

/// Relative change of each tap and bias of a convolution, with random sign, for judging the results of a convolution that is not
/// exact.
pub const TAP: f64 = 1.0 / 4096.0;

/// Error of the sums of a convolution and of their activations in f32, relative to each of their terms.
pub const CONVOLVED: f64 = 1e-6;

/// Error of a state that [`LOG_DECAY`] allows. `decaying_more` is the state after the same tokens with every log decay larger by
/// [`MORE_DECAY`] of it.
///
/// Rounding a log decay g changes a state s·exp(g) by a part of it that is |g| times as large; after several tokens, by the sum of their
/// |g|: by as much as the state changes with all log decays together. Elements that are not finite are left out.
#[must_use]
pub fn of_decays(exact: &[f64], decaying_more: &[f64]) -> f64 {
    LOG_DECAY * change(exact, decaying_more) / MORE_DECAY
}

/// Norm of the difference of two results, over the elements whose difference is finite.
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

/// Relative error that a norm's own arithmetic may add to its results: a root, a quotient, an exponential and products in f32.
pub const NORM: f64 = 2e-6;

/// Largest error of the results of a norm of one value head, if the norm's input o may be off by `off`.
///
/// The results are o · f with f = weight · act(z) / √(mean(o²) + eps). The error e of o is multiplied by f. The bound is √Σ (e f)² for
/// an error that is spread over the V elements evenly, and in proportion to o: e² = off² (1/V + o² / ‖o‖²). The error of the root is
/// left out: an e in proportion to o changes the root by the same part, and the results by nothing; any other e changes the root by
/// much less. [`NORM`] is added. If o is not finite, the bound is 0, and the results are NaN or zeros.
///
/// # Errors
/// The errors of [`gated_norm`].
pub fn of_norm(gated: &GatedNorm, o: &[f64], off: f64) -> Result<f64, Error> {
    let results = gated_norm(gated, o)?;
    let squares: f64 = o.iter().map(|o| o * o).sum();
    let width = o.len() as f64;
    let size = (squares / width + gated.eps).sqrt();
    let factors = gated.weight.iter().zip(gated.z);
    let share = |o: f64| 1.0 / width + if squares > 0.0 { o * o / squares } else { 0.0 };
    let spread: f64 = factors
        .zip(o)
        .map(|((weight, &z), &o)| (weight * gated.activation.of(z) / size).powi(2) * share(o))
        .sum();
    let bound = spread.sqrt() * off + NORM * norm(&results);
    Ok(if bound.is_finite() { bound } else { 0.0 })
}

/// Difference that never counts, in an element of any size: f32 products below the smallest normal number are 0.
pub const UNDERFLOW: f64 = 1e-36;

/// Difference that never counts in `elements` values, among values around 1: 1e-12 in each, below which f32 exponentials are denormal,
/// or inexact because their argument is.
#[must_use]
pub fn of_underflow(elements: usize) -> f64 {
    1e-12 * (elements as f64).sqrt()
}

/// Largest relative error of the reference compared with other implementations that compute in f32.
pub const COMPUTED_IN_F32: f64 = 1e-6;

/// [`COMPUTED_IN_F32`] for outputs of a norm after a chunkwise prefill, in which log decays are summed in f32: the norm makes small
/// outputs as large as the others, with their errors.
pub const COMPUTED_IN_CHUNKS: f64 = 5e-6;

/// The L2 norm; NaN or infinite if an element is.
#[must_use]
pub fn norm(values: &[f64]) -> f64 {
    sum_of(values, values, |x, y| x * y).sqrt()
}

/// Distance of `got` from being a rounding of `exact` to `dtype`; infinite if either is NaN, or if only one is infinite after the
/// rounding.
#[must_use]
pub fn excess(got: f64, exact: f64, dtype: DType) -> f64 {
    let half_ulp = dtype.half_ulp(got.abs().max(exact.abs()));
    let off = (got - exact).abs();
    // The exact value cannot round to infinity here.
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
    /// Norm of the excesses.
    pub off: f64,
    /// Bound on the norm of the excesses.
    pub allowed: f64,
    /// Number of the element with the largest excess, or of the first element that only one side has.
    pub element: usize,
    /// Exact value of the element; NaN if there is none.
    pub exact: f64,
    /// Value of the element in the result; NaN if there is none.
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

/// Norm of the excesses of `got`, stored as `dtype`, divided by `allowed`: 1 is the limit.
///
/// # Errors
/// The quotient is more than 1, `allowed` is NaN or infinite, or the lengths differ.
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

/// ‖got − exact‖ / ‖exact‖: 0 if the two are equal; infinite if anything is NaN or infinite, if the lengths differ, or if `exact` is
/// zero and `got` is not.
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
