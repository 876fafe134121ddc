//! The gated norm: o ← weight · o / √(mean(o²) + eps) · act(z), of one value head, in f32.
//!
//! If a sum of squares Σx² of finite numbers overflows f32, it is represented by a negative number, −Σ(x · [`SMALL`])².

use super::conv::activate;
use crate::device::cluster;
use crate::device::float::rsqrt;
use crate::device::shared::{load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::device::{rarely, unknown};
use crate::math::elements::{self, Raw, bytes_of, load_one};
use crate::math::range::{SMALL, times};
use crate::math::reduce::pairwise_sum;
use crate::row::Row;
use crate::step::{LayerParams, StepConstants};

/// z and weight for one element of o, unconverted.
#[derive(Clone, Copy)]
pub struct Scale {
    z: Raw<1>,
    weight: Raw<1>,
}

impl Scale {
    /// Zeros, if there is no token.
    pub const NONE: Self = Self {
        z: Raw([0]),
        weight: Raw([0]),
    };

    /// Loads z and weight for element `v` of the row's head and token `t` of the row of its tensor; zeros without a norm.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(
        c: &StepConstants,
        params: &LayerParams,
        row: Row,
        (t, v): (u32, u32),
    ) -> Self {
        if c.has_norm == 0 {
            return Self::NONE;
        }
        let token = t as u64 * c.z_token as u64 * bytes_of(c.z_element) as u64;
        let z = row.at(params.z, c.z_row, row.hv * c.z_head, v, c.z_element) + token;
        let weight = params.norm_weight + (v * bytes_of(c.norm_weight_element)) as u64;
        Self {
            z: load_one(z, c.z_element),
            weight: load_one(weight, c.norm_weight_element),
        }
    }

    /// Norms and gates element `o` of a head; `squares` is the sum of squares of the head's `dim` elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn apply(&self, c: &StepConstants, o: f32, squares: f32, dim: u32) -> f32 {
        let ([z], [weight]) = (
            self.z.to_f32(c.z_element),
            self.weight.to_f32(c.norm_weight_element),
        );
        normed(c, o, (squares, dim), z, weight)
    }
}

/// Norms and gates element `o` of a head, with `z` and `weight`; `squares` is the sum of squares of the head's `dim` elements.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn normed(c: &StepConstants, o: f32, (squares, dim): (f32, u32), z: f32, weight: f32) -> f32 {
    weight * root_normed(c, o, (squares, dim)) * activate(c.norm_activation, z)
}

/// Divides element `o` of a head by √(mean(o²) + eps); `squares` is the sum of squares of the head's `dim` elements.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn root_normed(c: &StepConstants, o: f32, (squares, dim): (f32, u32)) -> f32 {
    let mut o = [o];
    let size = size_of(c, &mut o, (squares, dim));
    o[0] * size
}

/// 1 / √(mean(o²) + eps), the factor of elements `o` of a head; `squares` is the sum of squares of the head's `dim` elements. If
/// `squares` is negative ([`squares!`]), multiplies `o` by [`SMALL`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn size_of<const N: usize>(
    c: &StepConstants,
    o: &mut [f32; N],
    (squares, dim): (f32, u32),
) -> f32 {
    let (mut mean, mut eps) = (squares * (1.0 / dim as f32), f32::from_bits(c.norm_eps));
    if mean < 0.0 {
        rarely();
        *o = times(*o, SMALL);
        // eps is negligible against the unscaled o.
        (mean, eps) = (-mean, 0.0);
    }
    rsqrt(mean + eps)
}

/// A sum of squares in the representation that the norm expects: `sum`; if `sum` is ∞, −`small`, where `small` is the sum for the
/// same numbers times [`SMALL`]. All lanes of the warp call it.
macro_rules! squares {
    ($sum:expr, $small:expr) => {{
        let mut sum: f32 = $sum;
        if $crate::math::range::any_large(sum == f32::INFINITY) {
            let small: f32 = $small;
            sum = if sum == f32::INFINITY { -small } else { sum };
        }
        sum
    }};
}
pub(crate) use squares;

/// Sends this warp's sum to every block of the cluster, which has `blocks` blocks: to address `smem` of each, through `mailbox`.
/// All lanes of the warp call it.
///
/// # Safety
/// Only this warp writes the word, in every block, and the mailbox is open in all of them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn share_sum(blocks: u32, smem: u32, sum: f32, mailbox: u32) {
    if lane_id() < blocks {
        cluster::send_b32(smem, lane_id(), sum.to_bits(), mailbox);
    }
}

/// Σ(o · SMALL)² for a sum of squares from [`squares!`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn small_sum(sum: f32) -> f32 {
    if sum < 0.0 { -sum } else { sum * SMALL * SMALL }
}

/// The sum of `count` words at `smem`, 1 to 32 sums of squares from [`squares!`], in the order of [`pairwise_sum`]; represented
/// likewise.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn sum_of(smem: u32, count: u32) -> f32 {
    let mut signs = 0;
    let word = |i: usize| {
        let word = load_shared_b32(smem + i as u32 * 4);
        signs |= word;
        [f32::from_bits(word), 0.0]
    };
    let [sum, _] = pairwise_sum(count as usize, word);
    if signs >> 31 != 0 || sum == f32::INFINITY {
        rarely();
        let mut small = 0.0;
        let (mut i, count) = (0, unknown(count));
        while i < count {
            let word = f32::from_bits(load_shared_b32(smem + i * 4));
            small += small_sum(word);
            i += 1;
        }
        return -small;
    }
    sum
}

/// [`size_of`] for elements `o` of a head of `dim`, with the [`sum_of`] `count` words at `smem`. The usual root is started before
/// the sums are tested.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn size_by_sums<const N: usize>(
    c: &StepConstants,
    o: &mut [f32; N],
    (smem, count): (u32, u32),
    dim: u32,
) -> f32 {
    let mut signs = 0;
    let word = |i: usize| {
        let word = load_shared_b32(smem + i as u32 * 4);
        signs |= word;
        [f32::from_bits(word), 0.0]
    };
    let [sum, _] = pairwise_sum(count as usize, word);
    let mut size = rsqrt(sum * (1.0 / dim as f32) + f32::from_bits(c.norm_eps));
    if signs >> 31 != 0 || sum == f32::INFINITY {
        rarely();
        size = size_of(c, o, (sum_of(smem, count), dim));
    }
    size
}

/// The end of a block of whole heads, whose o is in shared memory, head by head: norms o, if the step has a norm, and stores it.
/// All `threads` of the block call it, with the [`Scale`] of their first element.
///
/// # Safety
/// `at` gives addresses of o and sums of each of `ratio` heads. o has `dim` values, written before a barrier that all threads
/// have passed; `sums` has `dim / 32` unused words.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn finish_heads(
    c: &StepConstants,
    params: &LayerParams,
    row: Row,
    dim: u32,
    (first, threads): (Scale, u32),
    at: impl Fn(u32) -> (u32, u32),
) {
    let count = c.ratio * dim;
    let mut scale = first;
    let mut i = thread_idx_x();
    if c.has_norm != 0 {
        while i < count {
            let (o, sums) = at(i / dim);
            let value = f32::from_bits(load_shared_b32(o + i % dim * 4));
            let sum = sum_of_neighbours(value, 32);
            if lane_id() == 0 {
                store_shared_b32(sums + i % dim / 32 * 4, sum.to_bits());
            }
            i += threads;
        }
        sync_threads();
    }
    i = thread_idx_x();
    while i < count {
        let (o, sums) = at(i / dim);
        let own = row.with_head(c, i / dim);
        let mut value = f32::from_bits(load_shared_b32(o + i % dim * 4));
        if c.has_norm != 0 {
            if i >= threads {
                scale = Scale::load(c, params, own, (0, i % dim));
            }
            value = scale.apply(c, value, sum_of(sums, dim / 32), dim);
        }
        let address = own.at(
            params.step.o,
            c.o_row,
            own.hv * c.o_head,
            i % dim,
            c.o_element,
        );
        elements::store([value], address, c.o_element, false);
        i += threads;
    }
}

/// Sum of squares of one value per lane, over groups of `lanes` lanes, as from [`squares!`]. All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sum_of_neighbours(value: f32, lanes: u32) -> f32 {
    let small = value * SMALL;
    squares!(
        neighbours_sum(value * value, lanes),
        neighbours_sum_small(small * small, lanes)
    )
}

/// Sum over groups of `lanes` lanes, neighbours first: squares are added in this order for every tile. All lanes of the warp call
/// it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn neighbours_sum(mut value: f32, lanes: u32) -> f32 {
    let mut lane_mask = 1;
    while lane_mask < lanes {
        value += warp_shuffle_xor(value, lane_mask);
        lane_mask *= 2;
    }
    value
}

/// [`neighbours_sum`] in little code, for a rare path.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn neighbours_sum_small(mut value: f32, lanes: u32) -> f32 {
    let mut lane_mask = unknown(1);
    while lane_mask < lanes {
        value += warp_shuffle_xor(value, lane_mask);
        lane_mask *= 2;
    }
    value
}
