//! A chunk of one token: the computation of a decode with an f32 state, with sums in the same order, on a state laid out as in
//! [`super::state::Places`].
//!
//! Order of the sums, K-last: K/8 lanes; lane l adds channels 4 l .. 4 l + 4 and K/2 + 4 l .. K/2 + 4 l + 4 in order, then lanes
//! are added, the farthest first. With K = 96, four lanes; lane l adds channels 16 i + 4 l .. 16 i + 4 l + 4, i = 0 .. 6. V-last:
//! pairs of channels, then neighbours first.

use super::convolution::{ConvInputs, channel_of, channel_of_values};
use super::opaque;
use super::rows::Span;
use crate::constants::Element;
use crate::device::float::fma;
use crate::device::shared::{load_shared_b32, store_shared_b32};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, load, load_one};
use crate::math::gate;
use crate::math::range::{SMALL, power_for, times};
use crate::math::reduce::{add_dot, butterfly_sum, dot, pairwise_sum};
use crate::recurrent::gates::{gate_row, load_a_log, log_decay};
use crate::row::Row;
use crate::step::{PrefillParams, StepConstants};

use super::channels::beta_of;
use super::prepare::gates_of;

/// q or k of a token.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    address: u64,
    element: u32,
    with: (&'a StepConstants, &'a PrefillParams),
    /// Address of its K values in shared memory, if they are convolved.
    staged: u32,
}

impl<'a> Source<'a> {
    /// k and q of token `t` for query/key head `h`; `staged` is where [`stage`] stored them, `dim` channels each.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(
        ((c, params), span): ((&'a StepConstants, &'a PrefillParams), &Span),
        (h, t): (u32, u32),
        (staged, dim): (u32, u32),
    ) -> [Self; 2] {
        let step = &params.layer.step;
        let (q, k) = ((params.q_row, c.q_token), (params.k_row, c.k_token));
        let q = Self {
            address: span.at(step.q, q, t, h * c.q_head, c.q_element),
            element: c.q_element,
            with: (c, params),
            staged,
        };
        let k = Self {
            address: span.at(step.k, k, t, h * c.k_head, c.k_element),
            element: c.k_element,
            staged: staged + 4 * dim,
            ..q
        };
        [k, q]
    }

    /// Loads `N` channels from `first` on.
    ///
    /// # Safety
    /// The row has the token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<const N: usize>(self, first: u32) -> [f32; N] {
        let address = self.address + (first * elements::bytes_of(self.element)) as u64;
        let wide = self.with.0.wide_io != 0;
        if self.with.0.taps != 0 {
            let mut values = [0.0; N];
            each!(i in 0..N => {
                let place = self.staged + 4 * (first + i as u32);
                values[i] = f32::from_bits(load_shared_b32(place));
            });
            return values;
        }
        load::<N>(address, self.element, wide).to_f32(self.element)
    }

    /// This thread's channels 8 j + 2 c and the next, times `by`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn own<const K: u32>(self, by: f32) -> [f32; 32] {
        let mut own = [0.0; 32];
        let first = opaque(lane_id() % 4 * 2);
        each!(j in 0..K as usize / 8 => {
            let pair: [f32; 2] = self.load::<2>(8 * j as u32 + first);
            [own[2 * j], own[2 * j + 1]] = times(pair, by);
        });
        own
    }
}

/// Σ s x over the channels of both rows of a thread, in the order of the layout. Called by all lanes; all get the sums.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn products<const K: u32, const V_LAST: bool>(s: &[f32; 64], x: &[f32; 32]) -> [f32; 2] {
    let at = |half: usize, j: usize| {
        let i = 4 * j + 2 * half;
        ([s[i], s[i + 1]], [x[2 * j], x[2 * j + 1]])
    };
    let mut sums = [0.0; 2];
    let mut half = 0;
    while half < 2 {
        if const { K == 96 } {
            sums[half] = product_of_k96::<V_LAST>(|j| at(half, j));
            half += 1;
            continue;
        }
        let mut parts = [0.0f32; 16];
        // First within runs of neighbouring channels, then over the runs. K-last: a run is spread over two lanes with two
        // channels each, twice.
        let mut count = K as usize / 8;
        if V_LAST {
            let mut j = 0;
            while j < count {
                let ([s0, s1], [x0, x1]) = at(half, j);
                let mut sum = fma(s1, x1, s0 * x0);
                sum += warp_shuffle_xor(sum, 1);
                parts[j] = sum + warp_shuffle_xor(sum, 2);
                j += 1;
            }
            while count > 1 {
                count /= 2;
                each!(j in 0..count => parts[j] = parts[2 * j] + parts[2 * j + 1]);
            }
            sums[half] = parts[0];
        } else {
            count /= 2;
            let mut j = 0;
            while j < count {
                let (s0, x0) = at(half, j);
                let (s1, x1) = at(half, j + count);
                let more =
                    |sum: f32, s: [f32; 2], x: [f32; 2]| fma(s[1], x[1], fma(s[0], x[0], sum));
                let first = more(0.0, s0, x0);
                let second = more(warp_shuffle_xor(first, 1), s0, x0);
                let third = more(warp_shuffle_xor(second, 1), s1, x1);
                parts[j] = more(warp_shuffle_xor(third, 1), s1, x1);
                j += 1;
            }
            while count > 1 {
                count /= 2;
                each!(j in 0..count => parts[j] += parts[j + count]);
            }
            // Lanes with an odd c have the sums of whole runs.
            let sum = parts[0] + warp_shuffle_xor(parts[0], 2);
            let other = warp_shuffle_xor(sum, 1);
            sums[half] = if lane_id() % 2 == 1 { sum } else { other };
        }
        half += 1;
    }
    sums
}

/// The same for a row with K = 96: `at` returns this thread's two channels of each of 12 groups of 8, and x's.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn product_of_k96<const V_LAST: bool>(at: impl Fn(usize) -> ([f32; 2], [f32; 2])) -> f32 {
    if V_LAST {
        let [sum, _] = pairwise_sum(12, |j| {
            let ([s0, s1], [x0, x1]) = at(j);
            let mut sum = fma(s1, x1, s0 * x0);
            sum += warp_shuffle_xor(sum, 1);
            [sum + warp_shuffle_xor(sum, 2), 0.0]
        });
        return sum;
    }
    // A decode's lane has two channels in each of two lanes here, in every second of the twelve groups: lanes 0 and 1 in the even
    // groups.
    let mut parts = [0.0f32; 2];
    each!(j in 0..12 => {
        let (s, x) = at(j);
        let more = |sum: f32| fma(s[1], x[1], fma(s[0], x[0], sum));
        let before = if j < 2 {
            0.0
        } else {
            warp_shuffle_xor(parts[j % 2], 1)
        };
        parts[j % 2] = more(warp_shuffle_xor(more(before), 1));
    });
    // Lanes with an odd c have the sums of whole runs.
    let part = parts[0] + parts[1];
    let sum = part + warp_shuffle_xor(part, 2);
    let other = warp_shuffle_xor(sum, 1);
    if lane_id() % 2 == 1 { sum } else { other }
}

/// Powers of two by which k and q are multiplied, and the sums after that: Σk², Σq² and k·q, in the order of the layout. The
/// powers are 1 unless a sum of squares is infinite and `l2norm` divides by its root. Called by all lanes.
///
/// # Safety
/// The row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn norms_of<const K: u32, const V_LAST: bool>(
    l2norm: bool,
    of: [Source<'_>; 2],
    lane: u32,
) -> ([f32; 2], [f32; 3]) {
    let mut powers = [1.0; 2];
    let mut round = 0;
    loop {
        let sums = sums_of::<K, V_LAST>(of, lane, powers);
        let is_finite = sums[0] < f32::INFINITY && sums[1] < f32::INFINITY;
        if !l2norm || round == 2 || (round == 0 && is_finite) {
            return (powers, sums);
        }
        each!(i in 0..2 => {
            if round == 1 && powers[i] == SMALL {
                powers[i] = power_for(true, sums[i]);
            } else if sums[i] == f32::INFINITY {
                powers[i] = SMALL;
            }
        });
        round += 1;
    }
}

/// Σk², Σq² and k·q, where k and q are multiplied by `powers`.
///
/// # Safety
/// The row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn sums_of<const K: u32, const V_LAST: bool>(
    [k, q]: [Source<'_>; 2],
    lane: u32,
    powers: [f32; 2],
) -> [f32; 3] {
    if const { K == 96 } {
        return sums_of_k96::<V_LAST>([k, q], lane, powers);
    }
    if V_LAST {
        let (k, q) = if K == 128 {
            (k.load::<4>(4 * lane), q.load::<4>(4 * lane))
        } else {
            let pad = |[x, y]: [f32; 2]| [x, y, 0.0, 0.0];
            (pad(k.load::<2>(2 * lane)), pad(q.load::<2>(2 * lane)))
        };
        let (k, q) = (times(k, powers[0]), times(q, powers[1]));
        butterfly_sum([dot(k, k), dot(q, q), dot(k, q)], 1, 32)
    } else {
        let lane = lane % (K / 8);
        let both = |x: Source, by: f32| {
            let (a, b) = (x.load::<4>(4 * lane), x.load::<4>(K / 2 + 4 * lane));
            times([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]], by)
        };
        let (k, q) = (both(k, powers[0]), both(q, powers[1]));
        butterfly_sum([dot(k, k), dot(q, q), dot(k, q)], 1, K / 8)
    }
}

/// The same with K = 96.
///
/// # Safety
/// The row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn sums_of_k96<const V_LAST: bool>(
    [k, q]: [Source<'_>; 2],
    lane: u32,
    powers: [f32; 2],
) -> [f32; 3] {
    let (count, step) = if V_LAST { (1, 0) } else { (6, 16) };
    let first = if V_LAST { 4 * lane } else { 4 * (lane % 4) };
    let mut sums = [0.0; 3];
    each!(i in 0..count => {
        let (mut own_k, mut own_q) = ([0.0; 4], [0.0; 4]);
        // V-last: eight lanes have no channels.
        if first < 96 {
            own_k = times(k.load::<4>(first + step * i), powers[0]);
            own_q = times(q.load::<4>(first + step * i), powers[1]);
        }
        sums = [
            add_dot(sums[0], own_k, own_k),
            add_dot(sums[1], own_q, own_q),
            add_dot(sums[2], own_k, own_q),
        ];
    });
    butterfly_sum(sums, 1, if V_LAST { 32 } else { 4 })
}

/// Bytes that [`stage`] stores.
pub const fn staged_bytes(k: u32) -> u32 {
    8 * k
}

/// Convolves q and k of token `t` and query/key head `h` to `staged` in shared memory. The calling `threads` threads share the
/// channels. A barrier must follow.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has the token; the bytes are these threads' to write.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn stage<const K: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    (span, inputs): (&Span, ConvInputs),
    (h, t): (u32, u32),
    staged: u32,
    threads: u32,
) {
    let mut i = opaque(thread_idx_x());
    while i < 2 * K {
        let channel = channel_of(c, i / K, h, K) + i % K;
        // SAFETY: the caller's promise.
        unsafe {
            let y = inputs.convolve((c, params), span, t, channel);
            store_shared_b32(staged + 4 * i, y.to_bits());
        }
        i += threads;
    }
}

/// KDA: the decay of a key channel, from its gate's inputs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn decay_of(c: &StepConstants, x: f32, a_log: f32, dt_bias: f32) -> f32 {
    gate::exp(log_decay(c, x, a_log, dt_bias))
}

/// KDA: decays the rows; a lane has channels 8 j + 2 c and the next.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn decay_channels<const K: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    span: &Span,
    of: Row,
    t: u32,
    s: &mut [f32; 64],
) {
    let step = &params.layer.step;
    let (strides, element, wide) = ((params.g_row, c.g_token), c.g_element, c.wide_io != 0);
    let own = opaque(lane_id() % 4 * 2);
    let a_log = load_a_log(c, step, of);
    each!(j in 0..K as usize / 8 => {
        let channel = 8 * j as u32 + own;
        let at = span.at(step.g, strides, t, of.hv * c.g_head + channel, element);
        let x = load::<2>(at, element, wide).to_f32(element);
        let mut dt_bias = [0.0f32; 2];
        if c.has_dt_bias != 0 {
            let at = step.dt_bias + 4 * (gate_row(c, of) * K + channel) as u64;
            let element = Element::F32 as u32;
            dt_bias = load::<2>(at, element, wide).to_f32(element);
        }
        each!(e in 0..2 => {
            let decay = decay_of(c, x[e], a_log, dt_bias[e]);
            s[4 * j + e] *= decay;
            s[4 * j + 2 + e] *= decay;
        });
    });
}

/// v of token `t` and value head `hv` in f32, for the channel of row `row` of the state.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has the token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn value_of<const K: u32, const V: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    (span, inputs): (&Span, ConvInputs),
    t: u32,
    (hv, row): (u32, u32),
) -> f32 {
    if c.taps != 0 {
        let channel = channel_of_values::<K, V>(c, hv, V) + row;
        return inputs.convolve((c, params), span, t, channel);
    }
    let (base, strides) = (params.layer.step.v, (params.v_row, c.v_token));
    let at = span.at(base, strides, t, hv * c.v_head + row, c.v_element);
    let [v] = load_one(at, c.v_element).to_f32(c.v_element);
    v
}

/// Advances the rows by token `t` and returns o of both. `row` is the first of this thread's two rows of the state; `staged` is
/// what [`stage`] stored, if there is a convolution. Without values, v is 0.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has the token; all lanes of the warp call this.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn advance<const K: u32, const V: u32, const V_LAST: bool>(
    (c, params, per_channel): (&StepConstants, &PrefillParams, bool),
    (span, inputs): (&Span, ConvInputs),
    of: Row,
    t: u32,
    s: &mut [f32; 64],
    ((row, staged), has_values): ((u32, u32), bool),
) -> [f32; 2] {
    // Opaque (docs/compiler.md), so that addresses are not kept from chunk to chunk.
    let lane = opaque(lane_id());
    let [k, q] = Source::of(((c, params), span), (of.h, t), (staged, K));
    let (powers, norms) = norms_of::<K, V_LAST>(c.l2norm != 0, [k, q], lane);
    let gates = if per_channel {
        let of = Row {
            h: opaque(of.h),
            hv: opaque(of.hv),
            ..of
        };
        decay_channels::<K>((c, params), span, of, t, s);
        (1.0, beta_of(c, params, span, (t, of.hv)))
    } else {
        let (log, beta) = gates_of(c, params, span, t, of.hv);
        (gate::exp(log), beta)
    };
    let factors = Factors::new(c.l2norm != 0, f32::from_bits(c.scale), norms, gates);
    let (k, q) = (k.own::<K>(powers[0]), q.own::<K>(powers[1]));
    let sk = products::<K, V_LAST>(s, &k);
    let sq = products::<K, V_LAST>(s, &q);
    let mut o = [0.0; 2];
    each!(half in 0..2 => {
        let own = row + 8 * half as u32;
        let v = if has_values {
            value_of::<K, V>((c, params), (span, inputs), t, (of.hv, own))
        } else {
            0.0
        };
        let delta = factors.delta(v, sk[half]);
        o[half] = factors.output(sq[half], delta);
        let step = delta * factors.k;
        each!(j in 0..K as usize / 8 => {
            let i = 4 * j + 2 * half;
            s[i] = fma(step, k[2 * j], factors.decay * s[i]);
            s[i + 1] = fma(step, k[2 * j + 1], factors.decay * s[i + 1]);
        });
    });
    o
}
