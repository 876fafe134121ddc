//! Gates of 8 tokens, one to a lane.

use super::map::Block;
use crate::constants::Element;
use crate::device::warp::{lane_id, warp_shuffle_idx};
use crate::math::each::each;
use crate::math::elements::{Raw, load_one};
use crate::recurrent::gates::{RawGates, gate_row, load_a_log, load_beta};
use crate::recurrent::tokens::Tokens;
use crate::row::Row;
use crate::step::{StepConstants, StepParams};

/// log₂ of the smallest nonzero decay: 2ˣ below it is a denormal, which the GPU flushes to zero. Clamped to it, sums of log
/// decays stay finite and their differences exact enough for all gates.
pub const LOWEST: f32 = -127.0;

/// Gates of token `lane_id() % 8`, in memory format.
#[derive(Clone, Copy)]
pub struct GateInputs(RawGates<1>);

/// Gates of token `lane_id() % 8`: its β, and the sum of log₂ of the decays up to its own (0 with per-channel decays).
#[derive(Clone, Copy)]
pub struct Gates {
    pub decay: f32,
    pub beta: f32,
}

impl GateInputs {
    /// No token.
    pub const NONE: Self = Self(RawGates {
        g: Raw([0]),
        b: Raw([0]),
        a_log: 0.0,
        dt_bias: Raw([0]),
    });

    /// Reads nothing of tokens past the first `there`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<B: Block>(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        tokens: &Tokens,
        there: u32,
    ) -> Self {
        let t = lane_id() % 8;
        let none = Raw([0]);
        let (mut g, mut b, mut a_log, mut dt_bias) = (none, none, 0.0, none);
        if t < there {
            b = load_beta(c, tokens, t);
        }
        if !B::PER_CHANNEL {
            if t < there {
                g = load_one(tokens.g.at(t, 0), c.g_element);
            }
            if c.has_dt_bias != 0 {
                let address = params.dt_bias + 4 * gate_row(c, row) as u64;
                dt_bias = load_one(address, Element::F32 as u32);
            }
            a_log = load_a_log(c, params, row);
        }
        Self(RawGates {
            g,
            b,
            a_log,
            dt_bias,
        })
    }

    /// log α.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn log_decay(self, c: &StepConstants) -> f32 {
        let ([log_decay], _) = self.0.log_values(c);
        log_decay
    }

    /// Tokens past the first `count` have no decay and β = 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values<B: Block>(self, c: &StepConstants, count: u32) -> Gates {
        let ([log_decay], beta) = self.0.log_values(c);
        let t = lane_id() % 8;
        let beta = if t < count { beta } else { 0.0 };
        if B::PER_CHANNEL {
            return Gates { decay: 0.0, beta };
        }
        let decay = log_decay * core::f32::consts::LOG2_E;
        let decay = if t >= count {
            0.0
        } else if decay < LOWEST {
            LOWEST
        } else {
            decay
        };
        let mut sum = 0.0;
        each!(i in 0..8 => {
            let next = warp_shuffle_idx(decay, i);
            sum = if i <= t { sum + next } else { sum };
        });
        Gates { decay: sum, beta }
    }
}
