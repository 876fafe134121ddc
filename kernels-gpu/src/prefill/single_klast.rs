//! A row of one token on K-last states with K = 64 or 128: the computation of [`super::single`] with the same order of sums, but
//! with the lanes of a decode. A block has a value head, a warp 16 rows of its state, K/8 lanes one of these rows: lane l has the
//! four channels from 4 l on and the four from K/2 + 4 l on.

use super::channels::beta_of;
use super::convolution::{ConvInputs, channel_of_values};
use super::prepare::gates_of;
use super::rows::Span;
use super::single::{Source, decay_of, stage, staged_bytes};
use crate::constants::Element;
use crate::device::float::{b16x2_to_f32, fma};
use crate::device::global::{
    load_state_b16, load_state_b32, load_state_b64, load_state_b128, store_state_b16,
    store_state_b32, store_state_b64, store_state_b128,
};
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::layer::Place;
use crate::layer::norm::{normed, squares, sum_of};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, load_one};
use crate::math::gate;
use crate::math::range::{SMALL, times};
use crate::math::reduce::{butterfly_sum_pairs, dot};
use crate::recurrent::gates::{gate_row, load_a_log};
use crate::recurrent::klast::normable;
use crate::row::Row;
use crate::state::{B16, F32, Head, StateElement};
use crate::step::{PrefillParams, StepConstants};

/// Rows of a state per warp.
const OF_WARP: u32 = 16;
/// Largest number of rows of a lane.
const MOST: usize = 8;

/// Bytes of shared memory: q, k and v of the token, if they are convolved, and a word for each warp for the norm.
pub const fn shared_bytes(k: u32, v: u32) -> u32 {
    128 + staged_bytes(k) + 4 * v + v / 4
}

/// 8 channels of each of a lane's rows.
type StateRows = [[f32; 8]; MOST];

/// Rows and channels of a lane.
#[derive(Clone, Copy)]
struct Own<const K: u32> {
    /// First row; the others follow at distances of [`Self::APART`].
    row: u32,
    /// First channel in each half of K.
    channel: u32,
}

impl<const K: u32> Own<K> {
    const LANES: u32 = K / 8;
    const APART: u32 = 32 / Self::LANES;
    const ROWS: usize = (OF_WARP / Self::APART) as usize;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new() -> Self {
        Self {
            row: OF_WARP * (thread_idx_x() / 32) + lane_id() / Self::LANES,
            channel: 4 * (lane_id() % Self::LANES),
        }
    }

    /// Address of the lane's four channels in its row `i`, in half 0 or 1.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn at<S: StateElement>(self, head: Head, i: usize, half: u32) -> u64 {
        let first = head.address + ((self.row * K + self.channel) * S::BYTES) as u64;
        first + ((i as u32 * Self::APART * K + half * K / 2) * S::BYTES) as u64
    }

    /// Loads the lane's elements; zeros unless `live`.
    ///
    /// # Safety
    /// If `live`, `head` is in global memory, and no other thread writes these elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(self, c: &StepConstants, head: Head, live: bool) -> StateRows {
        if c.state_f32 != 0 {
            self.load_of::<F32>(c, head, live)
        } else {
            self.load_of::<B16>(c, head, live)
        }
    }

    /// # Safety
    /// As for [`Self::load`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_of<S: StateElement>(
        self,
        c: &StepConstants,
        head: Head,
        live: bool,
    ) -> StateRows {
        let mut s = [[0.0; 8]; MOST];
        let mut i = 0;
        while live && i < 2 * Self::ROWS {
            let at = self.at::<S>(head, i / 2, i as u32 % 2);
            let of_b16 = |word: u32| b16x2_to_f32(word, c.state_f16 != 0);
            // SAFETY: the caller's promise.
            let four = unsafe {
                match (S::BYTES, head.wide) {
                    (4, true) => load_state_b128(at, true).map(f32::from_bits),
                    (4, false) => {
                        [0, 4, 8, 12].map(|byte| f32::from_bits(load_state_b32(at + byte, true)))
                    }
                    (_, true) => {
                        let [a, b] = load_state_b64(at, true).map(of_b16);
                        [a[0], a[1], b[0], b[1]]
                    }
                    _ => [0, 2, 4, 6].map(|byte| of_b16(load_state_b16(at + byte, true).into())[0]),
                }
            };
            each!(e in 0..4 => s[i / 2][4 * (i % 2) + e] = four[e]);
            i += 1;
        }
        s
    }

    /// Stores the lane's elements.
    ///
    /// # Safety
    /// `head` is in global memory, and no other thread accesses these elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store(self, c: &StepConstants, head: Head, s: &StateRows) {
        if c.state_f32 != 0 {
            self.store_of::<F32>(c, head, s);
        } else {
            self.store_of::<B16>(c, head, s);
        }
    }

    /// # Safety
    /// As for [`Self::store`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_of<S: StateElement>(self, c: &StepConstants, head: Head, s: &StateRows) {
        each!(i in 0..2 * Self::ROWS => {
            let at = self.at::<S>(head, i / 2, i as u32 % 2);
            let mut eight = [0.0; 8];
            let mut e = 0;
            while e < 4 {
                eight[e] = s[i / 2][4 * (i % 2) + e];
                e += 1;
            }
            let raw = S::narrow(c, eight);
            // SAFETY: the caller's promise.
            unsafe {
                match (S::BYTES, head.wide) {
                    (4, true) => store_state_b128(at, [raw[0], raw[1], raw[2], raw[3]]),
                    (_, true) => store_state_b64(at, [raw[0], raw[1]]),
                    _ => {
                        e = 0;
                        while e < 4 {
                            let byte = at + (e as u32 * S::BYTES) as u64;
                            if S::BYTES == 4 {
                                store_state_b32(byte, raw[e]);
                            } else {
                                store_state_b16(byte, (raw[e / 2] >> (16 * (e % 2))) as u16);
                            }
                            e += 1;
                        }
                    }
                }
            }
        });
    }

    /// Loads this lane's channels of q or k.
    ///
    /// # Safety
    /// The row has the token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn of(self, x: Source<'_>) -> [f32; 8] {
        let (a, b) = (x.load::<4>(self.channel), x.load::<4>(K / 2 + self.channel));
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
    }

    /// KDA: decays the rows.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; the row has the token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn decay(
        self,
        (c, params): (&StepConstants, &PrefillParams),
        span: &Span,
        of: Row,
        s: &mut StateRows,
    ) {
        let step = &params.layer.step;
        let (strides, element, wide) = ((params.g_row, c.g_token), c.g_element, c.wide_io != 0);
        let a_log = load_a_log(c, step, of);
        each!(half in 0..2 => {
            let channel = half as u32 * K / 2 + self.channel;
            let at = span.at(step.g, strides, 0, of.hv * c.g_head + channel, element);
            // SAFETY: the caller's promise.
            let (x, dt_bias) = unsafe {
                let x = elements::load::<4>(at, element, wide).to_f32(element);
                let mut dt_bias = [0.0f32; 4];
                if c.has_dt_bias != 0 {
                    let at = step.dt_bias + 4 * (gate_row(c, of) * K + channel) as u64;
                    let element = Element::F32 as u32;
                    dt_bias = elements::load::<4>(at, element, wide).to_f32(element);
                }
                (x, dt_bias)
            };
            each!(e in 0..4 => {
                let decay = decay_of(c, x[e], a_log, dt_bias[e]);
                each!(i in 0..Self::ROWS => s[i][4 * half + e] *= decay);
            });
        });
    }

    /// Sum of the squares of `o` over the warp's rows, neighbours first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum_of_squares(o: &[f32; MOST]) -> f32 {
        let mut sums = o.map(|o| o * o);
        let mut mask = Self::LANES;
        while mask < 32 {
            each!(i in 0..Self::ROWS => sums[i] += warp_shuffle_xor(sums[i], mask));
            mask *= 2;
        }
        let mut count = Self::ROWS;
        while count > 1 {
            count /= 2;
            each!(i in 0..count => sums[i] = sums[2 * i] + sums[2 * i + 1]);
        }
        sums[0]
    }
}

/// Processes the row, which has one token and a slot, from the state at `start` to the state at `end`. Also stores the state
/// where `checkpoint` says, if a checkpoint is due. Called by all threads.
///
/// # Safety
/// `params` and `c` describe live tensors; the block's shared memory is free, and the block owns its head's states.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn walk<const K: u32, const V: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    (span, place, inputs): (&Span, &Place, ConvInputs),
    of: Row,
    [start, end]: [Head; 2],
    checkpoint: impl Fn() -> Option<Head>,
) {
    let (step, own) = (&params.layer.step, Own::<K>::new());
    let rows = Own::<K>::ROWS;
    let staged = dynamic_shared_mem().next_multiple_of(128);
    let values = staged + staged_bytes(K);
    let mut s = own.load(c, start, !place.is_fresh());
    let threads = 2 * V;
    if c.taps != 0 {
        stage::<K>((c, params), (span, inputs), (of.h, 0), staged, threads);
        let channel = thread_idx_x();
        if channel < V {
            let first = channel_of_values::<K, V>(c, of.hv, V);
            let y = inputs.convolve((c, params), span, 0, first + channel);
            store_shared_b32(values + 4 * channel, y.to_bits());
        }
        sync_threads();
    }
    let [k, q] = Source::of(((c, params), span), (of.h, 0), (staged, K)).map(|x| own.of(x));
    let (([k], [q]), norms) = normable(c, ([k], [q]), Own::<K>::LANES);
    let gates = if c.per_channel != 0 {
        own.decay((c, params), span, of, &mut s);
        (1.0, beta_of(c, params, span, (0, of.hv)))
    } else {
        let (log, beta) = gates_of(c, params, span, 0, of.hv);
        (gate::exp(log), beta)
    };
    let factors = Factors::new(c.l2norm != 0, f32::from_bits(c.scale), norms, gates);
    let products: [[f32; 2]; MOST] = core::array::from_fn(|i| match i < rows {
        true => [dot(s[i], k), dot(s[i], q)],
        false => [0.0; 2],
    });
    // q is no longer needed from here on.
    let v: [f32; MOST] = core::array::from_fn(|i| {
        if i >= rows {
            return 0.0;
        }
        let row = own.row + i as u32 * Own::<K>::APART;
        if c.taps != 0 {
            return f32::from_bits(load_shared_b32(values + 4 * row));
        }
        let strides = (params.v_row, c.v_token);
        let at = span.at(step.v, strides, 0, of.hv * c.v_head + row, c.v_element);
        let [v] = load_one(at, c.v_element).to_f32(c.v_element);
        v
    });
    let products = sum_over_lanes::<K>(products);
    let mut o = [0.0; MOST];
    let mut i = 0;
    while i < rows {
        let [sk, sq] = products[i];
        let delta = factors.delta(v[i], sk);
        o[i] = factors.output(sq, delta);
        let step = delta * factors.k;
        each!(e in 0..8 => s[i][e] = fma(step, k[e], factors.decay * s[i][e]));
        i += 1;
    }
    if let Some(head) = checkpoint() {
        own.store(c, head, &s);
    }
    if c.update_state != 0 {
        own.store(c, end, &s);
    }
    let mut sum = 0.0;
    if c.has_norm != 0 {
        let (words, warp) = (values + 4 * V, thread_idx_x() / 32);
        let of_warp = squares!(
            Own::<K>::sum_of_squares(&o),
            Own::<K>::sum_of_squares(&times(o, SMALL))
        );
        if lane_id() == 0 {
            store_shared_b32(words + 4 * warp, of_warp.to_bits());
        }
        sync_threads();
        sum = sum_of(words, V / OF_WARP);
    }
    // A lane finishes one of its rows, if it has enough rows.
    let own_i = own.channel / 4;
    let mut last = o[0];
    i = 1;
    while i < rows {
        last = if own_i == i as u32 { o[i] } else { last };
        i += 1;
    }
    if own_i < rows as u32 {
        let row = own.row + own_i * Own::<K>::APART;
        if c.has_norm != 0 {
            let element = c.z_element;
            let channel = of.hv * c.z_head + row;
            let z = span.at(
                params.layer.z,
                (params.z_row, c.z_token),
                0,
                channel,
                element,
            );
            let [z] = load_one(z, element).to_f32(element);
            let element = c.norm_weight_element;
            let at = params.layer.norm_weight + (row * elements::bytes_of(element)) as u64;
            let [weight] = load_one(at, element).to_f32(element);
            last = normed(c, last, (sum, V), z, weight);
        }
        let strides = (params.o_row, c.o_token);
        let at = span.at(step.o, strides, 0, of.hv * c.o_head + row, c.o_element);
        elements::store([last], at, c.o_element, false);
    }
}

/// Sums over the lanes for the existing rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_over_lanes<const K: u32>(products: [[f32; 2]; MOST]) -> [[f32; 2]; MOST] {
    if const { Own::<K>::ROWS == MOST } {
        return butterfly_sum_pairs(products, 1, Own::<K>::LANES);
    }
    let [a, b, c, d, ..] = products;
    let [a, b, c, d] = butterfly_sum_pairs([a, b, c, d], 1, Own::<K>::LANES);
    let none = [0.0; 2];
    [a, b, c, d, none, none, none, none]
}
