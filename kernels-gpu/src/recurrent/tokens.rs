//! Tokens in memory, and what a lane makes of one.

use crate::constants::Element;
use crate::device::global::load_b32;
use crate::device::rarely;
use crate::device::thread::thread_idx_x;
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::launch::Family;
use crate::math::each::each;
use crate::math::elements::{self, Raw, bytes_of, load_one};
use crate::math::gate;
use crate::row::Row;
use crate::state::{Share, StateElement, slot_of};
use crate::step::{Gate, StepConstants, StepParams};

/// Whether the decay is one per key channel (KDA) or one per value head (GDN).
pub trait Decays {
    /// What a kernel is compiled for; `None`: either, by a load-time constant.
    const OF_CHANNELS: Option<bool>;

    /// Whether the running launch has one decay per key channel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn per_channel(c: &StepConstants) -> bool {
        match Self::OF_CHANNELS {
            Some(of_channels) => of_channels,
            None => c.per_channel != 0,
        }
    }
}

/// Either, by a load-time constant.
pub struct Either;

impl Decays for Either {
    const OF_CHANNELS: Option<bool> = None;
}

/// Decays of the kernels that are compiled for one operator.
pub trait Gating: Decays {
    /// KDA: one decay per key channel; GDN: one per value head.
    const PER_CHANNEL: bool;
    /// Family of the kernels that take all tokens at once.
    const PARALLEL: Family;
    /// Family of the layer kernels that do.
    const LAYER_PARALLEL: Family;
    /// Family of those on states that wait.
    const DEFERRED_PARALLEL: Family;
    /// Family of the layer kernels on states that wait that do.
    const DEFERRED_LAYER_PARALLEL: Family;
    /// Family of a prefill's chain.
    const CHAIN: Family;
    /// Family of a prefill's kernels for rows of at most a chunk.
    const SHORT: Family;
}

/// One tensor of one row and head: element `i` of token t is `i` behind `first + t · token`.
#[derive(Clone, Copy)]
pub struct Run {
    first: u64,
    token: u32,
    element: u32,
}

impl Run {
    /// Address of element `i` of token `t`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(self, t: u32, i: u32) -> u64 {
        self.first + (t as u64 * self.token as u64 + i as u64) * bytes_of(self.element) as u64
    }

    /// [`crate::constants::Element`] of the tensor.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn element(self) -> u32 {
        self.element
    }
}

/// Tokens of one row and value head.
#[derive(Clone, Copy)]
pub struct Tokens {
    /// q of the query/key head; previous tokens have none, and k in its place.
    pub q: Run,
    /// k of the query/key head.
    pub k: Run,
    /// v of the value head.
    pub v: Run,
    /// The gate of the value head.
    pub g: Run,
    /// β, or its logit, of the value head.
    pub b: Run,
    /// o of the value head.
    pub o: Run,
    /// The first of them among the tokens of their tensors' rows.
    pub start: u32,
    /// Their number; 0 of a packed row without tokens.
    pub count: u32,
    /// Whether the row's tokens are where its lengths say, and no more than a row may have.
    pub live: bool,
    are_previous: bool,
}

impl Tokens {
    /// The tokens of this launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn new(c: &StepConstants, params: &StepParams, row: Row) -> Self {
        let (mut start, mut count, mut live) = (0, c.tokens, true);
        if c.cu_seqlens_index != 0 {
            // SAFETY: the caller's promise; there are B + 1 of them.
            let (first, end) = unsafe {
                let at = |i| slot_of(params.cu_seqlens, c.cu_seqlens_index, i, 0);
                (at(row.b as u64), at(row.b as u64 + 1))
            };
            live =
                first <= end && end <= params.total_tokens as u64 && end - first <= c.tokens as u64;
            start = first as u32;
            count = if live { (end - first) as u32 } else { 0 };
        }
        Self::of_head(c, params, row, (start, count, live))
    }

    /// Whether the launch leaves the row as it is but for carrying its state on: a packed row that has neither tokens nor
    /// previous ones.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn are_none(&self, c: &StepConstants) -> bool {
        c.cu_seqlens_index != 0 && c.previous_tokens == 0 && self.count == 0
    }

    /// The same tokens as the row's value head has them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn with_head(&self, c: &StepConstants, params: &StepParams, row: Row) -> Self {
        if self.are_previous {
            return Self::previous_of_head(c, params, row, (self.count, self.live));
        }
        Self::of_head(c, params, row, (self.start, self.count, self.live))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_head(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        (start, count, live): (u32, u32, bool),
    ) -> Self {
        let run = |base, stride: u32, token: u32, head: u32, element| Run {
            first: row.at(base, stride, head, 0, element)
                + start as u64 * token as u64 * bytes_of(element) as u64,
            token,
            element,
        };
        Self {
            q: run(params.q, c.q_row, c.q_token, row.h * c.q_head, c.q_element),
            k: run(params.k, c.k_row, c.k_token, row.h * c.k_head, c.k_element),
            v: run(params.v, c.v_row, c.v_token, row.hv * c.v_head, c.v_element),
            g: run(params.g, c.g_row, c.g_token, row.hv * c.g_head, c.g_element),
            b: run(params.b, c.b_row, c.b_token, row.hv, c.b_element),
            o: run(params.o, c.o_row, c.o_token, row.hv * c.o_head, c.o_element),
            start,
            count,
            live,
            are_previous: false,
        }
    }

    /// Token `t`, or the last where there are fewer; the first where there are none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn nearest(&self, t: u32) -> u32 {
        if t < self.count {
            t
        } else {
            self.count.max(1) - 1
        }
    }

    /// The previous tokens that are kept; they have neither q nor o. None of them where the launch has none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn previous(c: &StepConstants, params: &StepParams, row: Row) -> Self {
        // SAFETY: the caller's promise; there are B of them.
        let keep = unsafe { slot_of(params.keep, c.keep_index, row.b as u64, 0) };
        let live = keep <= c.previous_tokens as u64;
        let count = if live { keep as u32 } else { 0 };
        Self::previous_of_head(c, params, row, (count, live))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn previous_of_head(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        (count, live): (u32, bool),
    ) -> Self {
        let run = |base, stride, token, head, element| Run {
            first: row.at(base, stride, head, 0, element),
            token,
            element,
        };
        let k = run(
            params.previous_k,
            c.previous_k_row,
            c.previous_k_token,
            row.h * c.previous_k_head,
            c.k_element,
        );
        let v = run(
            params.previous_v,
            c.previous_v_row,
            c.previous_v_token,
            row.hv * c.previous_v_head,
            c.v_element,
        );
        Self {
            q: k,
            k,
            v,
            g: run(
                params.previous_g,
                c.previous_g_row,
                c.previous_g_token,
                row.hv * c.previous_g_head,
                c.g_element,
            ),
            b: run(
                params.previous_b,
                c.previous_b_row,
                c.previous_b_token,
                row.hv,
                c.b_element,
            ),
            o: v,
            start: 0,
            count,
            live,
            are_previous: true,
        }
    }
}

/// Zeros for o of the packed tokens that are no row's: those before the first bound, and those behind the last one. So many
/// `turns` of blocks take a token each, one after the other; this block's is `turn`. It has so many `channels` of a token, `at`
/// says which elements of o these are, and its threads come with their number and how many they are.
///
/// A bound that is outside of the tokens says nothing of them.
///
/// # Safety
/// `params` and `c` describe live tensors; the channels are the block's, and no other block with its turn has them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn clear_rest(
    c: &StepConstants,
    params: &StepParams,
    (turn, turns): (u32, u32),
    (thread, threads): (u32, u32),
    channels: u32,
    at: impl Fn(u32) -> u32,
) {
    if c.cu_seqlens_index == 0 {
        return;
    }
    let total = params.total_tokens as u64;
    // SAFETY: the caller's promise; there are B + 1 of them.
    let [first, end] = [0, params.rows as u64]
        .map(|i| unsafe { slot_of(params.cu_seqlens, c.cu_seqlens_index, i, 0) });
    let (first, end) = (
        if first <= total { first } else { 0 },
        if end <= total { end } else { total },
    );
    if first > end || turn as u64 >= first + (total - end) {
        return;
    }
    rarely();
    let (mut n, mut channel) = (turn as u64, thread);
    loop {
        while channel >= channels {
            channel -= channels;
            n += turns as u64;
        }
        if n >= first + (total - end) {
            return;
        }
        let token = if n < first { n } else { end + (n - first) };
        let element = token * c.o_token as u64 + at(channel) as u64;
        let address = params.o + element * bytes_of(c.o_element) as u64;
        elements::store([0.0], address, c.o_element, false);
        channel += threads;
    }
}

/// [`clear_rest`] by a block that has `tile` elements of o of the row's value head; rows take turns.
///
/// # Safety
/// As [`clear_rest`]'s.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn clear_rest_of_tile(
    c: &StepConstants,
    params: &StepParams,
    (row, tile): (Row, u32),
    threads: u32,
) {
    let first = row.hv * c.o_head + row.tile * tile;
    let (turn, thread) = ((row.b, params.rows), (thread_idx_x(), threads));
    clear_rest(c, params, turn, thread, tile, |i| first + i);
}

/// g, b, A_log and dt_bias of a token, as they lie in memory.
#[derive(Clone, Copy)]
pub struct RawGates<const CHANNELS: usize> {
    /// g of this lane's channels; of the head where `CHANNELS` is 1.
    pub g: Raw<CHANNELS>,
    /// β or its logit.
    pub b: Raw<1>,
    /// A_log of the head.
    pub a_log: f32,
    /// dt_bias of the same channels.
    pub dt_bias: Raw<CHANNELS>,
}

/// A_log of this head and its row among the gate's parameters; 0 without.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_a_log(c: &StepConstants, params: &StepParams, row: Row) -> f32 {
    if c.has_a_log == 0 {
        return 0.0;
    }
    f32::from_bits(load_b32(params.a_log + 4 * gate_row(c, row) as u64))
}

/// Row of A_log and dt_bias.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn gate_row(c: &StepConstants, row: Row) -> u32 {
    if c.gate_rows_h != 0 { row.h } else { row.hv }
}

/// β of token `t`, as it lies in memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_beta(c: &StepConstants, tokens: &Tokens, t: u32) -> Raw<1> {
    load_one(tokens.b.at(t, 0), c.b_element)
}

impl<const CHANNELS: usize> RawGates<CHANNELS> {
    /// α of each channel, and β.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values(self, c: &StepConstants) -> ([f32; CHANNELS], f32) {
        let (mut decay, beta) = self.log_values(c);
        each!(i in 0..CHANNELS => decay[i] = gate::exp(decay[i]));
        (decay, beta)
    }

    /// log α of each channel, and β.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn log_values(self, c: &StepConstants) -> ([f32; CHANNELS], f32) {
        let mut decay = self.g.to_f32(c.g_element);
        each!(i in 0..CHANNELS => {
            let dt_bias = f32::from_bits(self.dt_bias.0[i]);
            decay[i] = log_decay(c, decay[i], self.a_log, dt_bias);
        });
        (decay, self.beta(c))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn beta(self, c: &StepConstants) -> f32 {
        let [b] = self.b.to_f32(c.b_element);
        if c.beta_logit != 0 {
            gate::sigmoid(b) * f32::from_bits(c.beta_scale)
        } else {
            b
        }
    }
}

/// The gates of a token as a lane with 8 channels takes them.
#[derive(Clone, Copy)]
pub struct LaneGates {
    /// KDA's.
    channels: RawGates<8>,
    /// GDN's; β of both.
    head: RawGates<1>,
}

impl LaneGates {
    /// Of token `t`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<G: Decays, S: StateElement, const K: u32>(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        tokens: &Tokens,
        t: u32,
        share: Share,
    ) -> Self {
        let wide = c.wide_io != 0;
        let gate_row = gate_row(c, row) as u64;
        let (mut g, mut dt_bias) = (Raw([0; 8]), Raw([0; 8]));
        let (mut head_g, mut head_dt_bias) = (Raw([0]), Raw([0]));
        if G::per_channel(c) {
            g = share.load_matching::<S>(tokens.g.at(t, 0), c.g_element, wide);
            if c.has_dt_bias != 0 {
                let address = params.dt_bias + gate_row * (K * 4) as u64;
                dt_bias = share.load_matching::<S>(address, Element::F32 as u32, wide);
            }
        } else {
            head_g = load_one(tokens.g.at(t, 0), c.g_element);
            if c.has_dt_bias != 0 {
                head_dt_bias = load_one(params.dt_bias + gate_row * 4, Element::F32 as u32);
            }
        }
        let b = load_beta(c, tokens, t);
        let a_log = load_a_log(c, params, row);
        Self {
            channels: RawGates {
                g,
                b,
                a_log,
                dt_bias,
            },
            head: RawGates {
                g: head_g,
                b,
                a_log,
                dt_bias: head_dt_bias,
            },
        }
    }

    /// KDA's α of the lane's channels; then what [`crate::math::delta_rule::Factors`] take: GDN's α (KDA's 1) and β. All
    /// lanes of the warp call it; `together` where all of its groups of `lanes` lanes have this token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values<G: Decays>(
        self,
        c: &StepConstants,
        lanes: u32,
        together: bool,
    ) -> ([f32; 8], (f32, f32)) {
        if G::per_channel(c) {
            let (decay, beta) = if together {
                self.channels.values_together(c, lanes)
            } else {
                self.channels.values(c)
            };
            (decay, (1.0, beta))
        } else {
            let ([decay], beta) = self.head.values(c);
            ([0.0; 8], (decay, beta))
        }
    }
}

impl LaneGates {
    /// As [`Self::values`] with log α, of GDN the same in every place, of one token that all of a warp's groups of `lanes`
    /// lanes have.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn log_values<G: Decays>(self, c: &StepConstants, lanes: u32) -> ([f32; 8], f32) {
        if G::per_channel(c) {
            if c.gate == Gate::Log as u32 {
                return self.channels.log_values(c);
            }
            self.channels.together(c, lanes, |log_decay| log_decay)
        } else {
            let ([log_decay], beta) = self.head.log_values(c);
            ([log_decay; 8], beta)
        }
    }
}

impl RawGates<8> {
    /// As [`Self::values`], of one token that all of a warp's groups of `lanes` lanes have: each computes a part of the
    /// channels for all. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values_together(self, c: &StepConstants, lanes: u32) -> ([f32; 8], f32) {
        if c.gate == Gate::Log as u32 {
            return self.values(c);
        }
        self.together(c, lanes, gate::exp)
    }

    /// `of` log α of each channel, computed so, and β.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn together(self, c: &StepConstants, lanes: u32, of: impl Fn(f32) -> f32) -> ([f32; 8], f32) {
        let mut decay = self.g.to_f32(c.g_element);
        let mut dt_bias = self.dt_bias.0.map(f32::from_bits);
        let mut count = 8;
        let mut mask = 16;
        while mask >= lanes {
            count /= 2;
            let upper = lane_id() & mask != 0;
            each!(i in 0..count => {
                decay[i] = if upper { decay[count + i] } else { decay[i] };
                dt_bias[i] = if upper {
                    dt_bias[count + i]
                } else {
                    dt_bias[i]
                };
            });
            mask /= 2;
        }
        each!(i in 0..count => decay[i] = of(log_decay(c, decay[i], self.a_log, dt_bias[i])));
        mask = lanes;
        while mask <= 16 {
            let upper = lane_id() & mask != 0;
            each!(i in 0..count => {
                let (own, other) = (decay[i], warp_shuffle_xor(decay[i], mask));
                decay[i] = if upper { other } else { own };
                decay[count + i] = if upper { own } else { other };
            });
            count *= 2;
            mask *= 2;
        }
        (decay, self.beta(c))
    }
}

/// log α of one x.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn log_decay(c: &StepConstants, x: f32, a_log: f32, dt_bias: f32) -> f32 {
    if c.gate == Gate::Log as u32 {
        x
    } else if c.gate == Gate::Softplus as u32 {
        gate::log_decay(x, a_log, dt_bias)
    } else {
        gate::lower_bound_log_decay(x, f32::from_bits(c.lower_bound), a_log, dt_bias)
    }
}
