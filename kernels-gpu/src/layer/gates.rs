//! The gates of a layer's heads, one value a thread.

use crate::constants::Element;
use crate::math::elements::{Raw, load_one};
use crate::recurrent::tokens::{Decays, RawGates, Tokens, gate_row, load_a_log, load_beta};
use crate::row::Row;
use crate::step::{StepConstants, StepParams};

/// β of the row's value head, and its α: with KDA that of one channel of all `k_dim`, with GDN the head's own.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_gate<G: Decays>(
    c: &StepConstants,
    params: &StepParams,
    row: Row,
    tokens: &Tokens,
    channel: u32,
    k_dim: u32,
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
        g: load_one(tokens.g.at(0, channel), c.g_element),
        b: load_beta(c, tokens, 0),
        a_log: load_a_log(c, params, row),
        dt_bias,
    }
}
