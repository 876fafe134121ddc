//! Butterfly reductions.

use crate::device::float::fma;
use crate::device::unknown;
use crate::math::each::each;
// The simulator's shortcut: it waits for all lanes once, instead of for each value and step.
#[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
use crate::device::sim::butterfly as at_once;
use crate::device::warp::{lane_id, warp_shuffle_xor};

#[cfg(all(not(feature = "simulator"), not(target_arch = "nvptx64")))]
fn at_once<const N: usize>(_: [f32; N], _: u32, _: u32, _: bool) -> Option<[f32; N]> {
    None
}

/// Sums `values` over the lanes of a warp whose index differs only in bits `low..high` (powers of two).
///
/// All 32 lanes of the warp call it; every lane holds the sums. The order of additions depends only on `low` and `high`. With
/// `low = 1, high = 16`, lanes 0..16 get the sums over lanes 0..16 and lanes 16..32 those over lanes 16..32.
#[inline(always)]
pub fn butterfly_sum<const N: usize>(values: [f32; N], low: u32, high: u32) -> [f32; N] {
    #[cfg(not(target_arch = "nvptx64"))]
    if let Some(sums) = at_once(values, low, high, false) {
        return sums;
    }
    sum_from(values, high / 2, low)
}

/// [`butterfly_sum`] from the exchange across bit `lane_mask` down to the one across bit `low`.
#[inline(always)]
fn sum_from<const N: usize>(mut values: [f32; N], mut lane_mask: u32, low: u32) -> [f32; N] {
    while lane_mask >= low {
        each!(i in 0..N => values[i] += warp_shuffle_xor(values[i], lane_mask));
        lane_mask /= 2;
    }
    values
}

/// [`butterfly_sum`] of bits `1..high` in a rolled loop, for rare code.
#[inline(always)]
pub fn butterfly_sum_small<const N: usize>(values: [f32; N], high: u32) -> [f32; N] {
    #[cfg(not(target_arch = "nvptx64"))]
    if let Some(sums) = at_once(values, 1, high, false) {
        return sums;
    }
    sum_from(values, unknown(high / 2), 1)
}

/// [`butterfly_sum`] for pairs.
#[inline(always)]
pub fn butterfly_sum_pairs<const N: usize>(
    mut pairs: [[f32; 2]; N],
    low: u32,
    high: u32,
) -> [[f32; 2]; N] {
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let [first, second] = [0, 1].map(|e| pairs.map(|pair| pair[e]));
        let (first, second) = (
            at_once(first, low, high, false),
            at_once(second, low, high, false),
        );
        if let (Some(first), Some(second)) = (first, second) {
            each!(i in 0..N => pairs[i] = [first[i], second[i]]);
            return pairs;
        }
    }
    let mut lane_mask = high / 2;
    while lane_mask >= low {
        each!(i in 0..N => {
            pairs[i][0] += warp_shuffle_xor(pairs[i][0], lane_mask);
            pairs[i][1] += warp_shuffle_xor(pairs[i][1], lane_mask);
        });
        lane_mask /= 2;
    }
    pairs
}

/// [`butterfly_sum`] of `values` and [`butterfly_sum_pairs`] of `pairs` over the lanes of bits `1..high`, in the same exchanges.
#[inline(always)]
pub fn butterfly_sum_both<const N: usize, const M: usize>(
    mut values: [f32; N],
    mut pairs: [[f32; 2]; M],
    high: u32,
) -> ([f32; N], [[f32; 2]; M]) {
    #[cfg(not(target_arch = "nvptx64"))]
    if let Some(sums) = at_once(values, 1, high, false) {
        return (sums, butterfly_sum_pairs(pairs, 1, high));
    }
    let mut lane_mask = high / 2;
    while lane_mask >= 1 {
        values = sum_from(values, lane_mask, lane_mask);
        each!(i in 0..M => pairs[i] = sum_from(pairs[i], lane_mask, lane_mask));
        lane_mask /= 2;
    }
    (values, pairs)
}

/// Sums each of `N` values over the lanes of a warp whose index differs only in bits `low..high` (powers of two, high / low ≤ N),
/// and leaves each lane a part of the sums: with n = N · low / high, the first n places of lane l hold the sums of the n values
/// from `l % high / low * n` on. Neighbours (bit `low`) are added first. N − n shuffles, where [`butterfly_sum`] takes
/// N log₂(high / low).
///
/// All 32 lanes of the warp call it.
#[inline(always)]
pub fn butterfly_scatter<const N: usize>(mut values: [f32; N], low: u32, high: u32) -> [f32; N] {
    #[cfg(not(target_arch = "nvptx64"))]
    if let Some(sums) = at_once(values, low, high, true) {
        return sums;
    }
    // At each step two lanes divide the values that they still share: values whose index has the bit `stride` go to the lane that
    // has the bit `lane_mask`.
    let mut lane_mask = low;
    let mut stride = N * low as usize / high as usize;
    let mut parted = 0;
    while lane_mask < high {
        let keeps_second = lane_id() & lane_mask != 0;
        each!(i in 0..N => {
            if i & (stride | parted) == 0 {
                let (first, second) = (values[i], values[i + stride]);
                let (mine, other) = if keeps_second {
                    (second, first)
                } else {
                    (first, second)
                };
                values[i] = mine + warp_shuffle_xor(other, lane_mask);
            }
        });
        parted |= stride;
        lane_mask *= 2;
        stride *= 2;
    }
    values
}

/// Sum of the pairs `pair(0..count)`, 1 to 32 of them, neighbours first. If `count` is not a power of two, the sums of its
/// power-of-two parts are added, the largest part first.
#[inline(always)]
pub fn pairwise_sum(count: usize, mut pair: impl FnMut(usize) -> [f32; 2]) -> [f32; 2] {
    // partial[l] is the sum of the last complete run of 2^l pairs: few are live at a time.
    let mut partial = [[0.0; 2]; 6];
    each!(i in 0..count => {
        let mut sum = pair(i);
        let mut level = 0;
        while (i >> level) & 1 == 1 {
            sum = [partial[level][0] + sum[0], partial[level][1] + sum[1]];
            level += 1;
        }
        partial[level] = sum;
    });
    let mut level = count.ilog2() as usize;
    let mut sum = partial[level];
    while level > 0 {
        level -= 1;
        if (count >> level) & 1 == 1 {
            sum = [sum[0] + partial[level][0], sum[1] + partial[level][1]];
        }
    }
    sum
}

/// Σ over rows r of `row(r)` x\[r\], for each of a thread's columns: two rows at a time, then a pairwise sum, neighbours first.
/// `ROWS` is a power of two, 2 to 16.
#[inline(always)]
pub fn column_products<const ROWS: usize>(
    row: impl Fn(usize) -> [f32; 8],
    x: [f32; ROWS],
) -> [f32; 8] {
    let mut partial = [[0.0; 8]; 4];
    let mut pair = 0;
    while 2 * pair < ROWS {
        let (first, second) = (row(2 * pair), row(2 * pair + 1));
        let mut sum = [0.0; 8];
        let mut level = 0;
        each!(i in 0..8 => sum[i] = fma(second[i], x[2 * pair + 1], first[i] * x[2 * pair]));
        while (pair >> level) & 1 == 1 {
            each!(i in 0..8 => sum[i] += partial[level][i]);
            level += 1;
        }
        partial[level] = sum;
        pair += 1;
    }
    partial[(ROWS / 2).ilog2() as usize]
}

/// x · y of a thread's own values, summed in order.
#[inline(always)]
pub fn dot<const N: usize>(x: [f32; N], y: [f32; N]) -> f32 {
    add_dot(0.0, x, y)
}

/// [`dot`] of several parts, one after the other.
#[inline(always)]
pub fn dot_parts<const N: usize, const PARTS: usize>(
    x: [[f32; N]; PARTS],
    y: [[f32; N]; PARTS],
) -> f32 {
    let mut sum = 0.0;
    each!(part in 0..PARTS => sum = add_dot(sum, x[part], y[part]));
    sum
}

/// sum + x · y of a thread's own values, summed in order.
#[inline(always)]
pub fn add_dot<const N: usize>(mut sum: f32, x: [f32; N], y: [f32; N]) -> f32 {
    each!(i in 0..N => sum = fma(x[i], y[i], sum));
    sum
}
