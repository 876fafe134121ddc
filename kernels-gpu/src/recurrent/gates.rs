//! Gates: log α and β of a token and a value head, from g, b, A_log and dt_bias.

use super::tokens::{Decays, Tokens};
use crate::constants::Element;
use crate::device::global::load_b32;
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::math::each::each;
use crate::math::elements::{Raw, load_one};
use crate::math::gate;
use crate::row::Row;
use crate::state::{Share, StateElement};
use crate::step::{Gate, StepConstants, StepParams};

/// g, b, A_log and dt_bias of a token, unconverted.
#[derive(Clone, Copy)]
pub struct RawGates<const CHANNELS: usize> {
    /// g of this lane's channels; of the head if `CHANNELS` is 1.
    pub g: Raw<CHANNELS>,
    /// β or its logit.
    pub b: Raw<1>,
    /// A_log of the head.
    pub a_log: f32,
    /// dt_bias of the same channels.
    pub dt_bias: Raw<CHANNELS>,
}

/// Loads A_log of this head, and row of the gate's parameters; 0 if there is none.
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

/// β of token `t`, unconverted.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_beta(c: &StepConstants, tokens: &Tokens, t: u32) -> Raw<1> {
    load_one(tokens.b.at(t, 0), c.b_element)
}

impl<const CHANNELS: usize> RawGates<CHANNELS> {
    /// The gates before they are loaded.
    pub const NONE: Self = Self {
        g: Raw([0; CHANNELS]),
        b: Raw([0]),
        a_log: 0.0,
        dt_bias: Raw([0; CHANNELS]),
    };

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
        beta(c, b)
    }
}

/// The gates of a token, as a lane with 8 channels needs them.
#[derive(Clone, Copy)]
pub struct LaneGates {
    /// Gates of KDA.
    channels: RawGates<8>,
    /// The gate of GDN; β of both operators.
    head: RawGates<1>,
}

impl LaneGates {
    /// Loads the gates of token `t`.
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

    /// KDA's α of the lane's channels; then the gates for [`crate::math::delta_rule::Factors`]: GDN's α (KDA: 1) and β. All lanes
    /// of the warp call it; `together`: all of its groups of `lanes` lanes have this token.
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
    /// Like [`Self::values`] with log α instead of α (GDN: the same in every channel), if all of a warp's groups of `lanes` lanes
    /// have this token.
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
    /// Like [`Self::values`], if all of a warp's groups of `lanes` lanes have this token: each group computes a part of the
    /// channels for all groups. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values_together(self, c: &StepConstants, lanes: u32) -> ([f32; 8], f32) {
        if c.gate == Gate::Log as u32 {
            return self.values(c);
        }
        self.together(c, lanes, gate::exp)
    }

    /// `of` log α of each channel, computed in this way, and β.
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

/// log α from gate input x.
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

/// β from gate input b.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn beta(c: &StepConstants, b: f32) -> f32 {
    if c.beta_logit != 0 {
        gate::sigmoid(b) * f32::from_bits(c.beta_scale)
    } else {
        b
    }
}

/// Loads the gates of the row's value head and token `t`: with KDA of one of all `k_dim` channels, with GDN of the head.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_gate<G: Decays>(
    c: &StepConstants,
    params: &StepParams,
    row: Row,
    (tokens, t): (&Tokens, u32),
    (channel, k_dim): (u32, u32),
) -> RawGates<1> {
    let (channel, channels) = if G::per_channel(c) {
        (channel, k_dim)
    } else {
        (0, 1)
    };
    let mut dt_bias = Raw([0]);
    if c.has_dt_bias != 0 {
        let first = gate_row(c, row) as u64 * channels as u64;
        let address = params.dt_bias + (first + channel as u64) * 4;
        dt_bias = load_one(address, Element::F32 as u32);
    }
    RawGates {
        g: load_one(tokens.g.at(t, channel), c.g_element),
        b: load_beta(c, tokens, t),
        a_log: load_a_log(c, params, row),
        dt_bias,
    }
}
