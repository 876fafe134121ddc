//! Processes tokens of a chunk that f16 does not hold ([`super::super::range`]), one by one in f32, for a warp's 16 rows of the
//! state.
//!
//! This runs between the products of a chunk and the store of o. At that time the warp's 16 channels of the tile of v, 2 KB, have
//! been read, and no other warp writes them yet. The warp stages k̂, q̂ and, with decays by channel, α of a token there.

use super::super::convolution::{ConvInputs, channel_of};
use super::super::prepare::gates_of;
use super::super::rows::Span;
use super::super::single::{Source, decay_of, value_of};
use super::super::values::tile_part;
use super::super::{CHUNK, channels::beta_of, opaque};
use super::Chain;
use super::machine::Machine;
use crate::constants::Element;
use crate::device::float::{fma, rsqrt};
use crate::device::shared::{load_shared_b64, store_shared_b32};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_xor};
use crate::layer::Place;
use crate::math::each::each;
use crate::math::elements::load_one;
use crate::math::gate;
use crate::math::power;
use crate::recurrent::Gating;
use crate::recurrent::gates::{gate_row, load_a_log};

/// Largest number of channels of a lane.
const MOST: usize = 4;

/// Sums over the four lanes that share a row's channels. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of_four(mut x: [f32; 2]) -> [f32; 2] {
    let mut mask = 1;
    while mask < 4 {
        x = [
            x[0] + warp_shuffle_xor(x[0], mask),
            x[1] + warp_shuffle_xor(x[1], mask),
        ];
        mask *= 2;
    }
    x
}

/// Reduces the lanes' numbers with `of`; all lanes get the result. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn fold(mut x: f32, of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut mask = 1;
    while mask < 32 {
        x = of(x, warp_shuffle_xor(x, mask));
        mask *= 2;
    }
    x
}

/// Divides a vector, whose elements are spread over the lanes, by its norm: `x / √(Σx² + 1e-6)`. Before squaring, a power of two
/// brings the largest element to 1, unless that element is less than 2⁻⁴⁰. Called by all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn normalised(mut x: [f32; MOST]) -> [f32; MOST] {
    let mut most = 0.0;
    each!(i in 0..MOST => {
        let magnitude = f32::from_bits(x[i].to_bits() & 0x7fff_ffff);
        most = if magnitude > most { magnitude } else { most };
    });
    let most = fold(most, |a, b| if a > b { a } else { b });
    let [by, _] = power::of_exponent((most.to_bits() >> 23).clamp(127 - 40, 253));
    let mut squares = 0.0;
    each!(i in 0..MOST => {
        x[i] *= by;
        squares = fma(x[i], x[i], squares);
    });
    let norm = rsqrt(fold(squares, |a, b| a + b) + 1e-6 * by * by);
    each!(i in 0..MOST => x[i] *= norm);
    x
}

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'_, G, M, K, V, GROUPS>
{
    /// Address of word `word` of the warp's 512 words in the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn own_word(tile: u32, word: u32) -> u32 {
        let warp = thread_idx_x() / 32 % 4;
        tile + tile_part(word / 8, 2 * warp + word / 4 % 2) + word % 4 * 4
    }

    /// Stages token `t` of the row: k̂ from word 0 on, q̂ times the scale from word K on, α by channel from word 2 K on. Called
    /// by all lanes of the warp, which may read the words afterwards.
    ///
    /// # Safety
    /// The tensors of `params` are live; nobody reads the warp's part of the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn stage_token(&self, (span, inputs): (&Span, ConvInputs), t: u32, tile: u32) {
        let (c, params) = (self.c, self.params);
        let lane = opaque(lane_id());
        sync_warp(FULL_MASK);
        let of = Source::of(((c, params), span), (self.row.h, t), (0, K));
        each!(which in 0..2 => {
            let mut x = [0.0; MOST];
            each!(i in 0..K as usize / 32 => {
                let channel = lane + 32 * i as u32;
                x[i] = if c.taps != 0 {
                    // q's channels are before k's.
                    let first = channel_of(c, 1 - which, self.row.h, K);
                    inputs.convolve((c, params), span, t, first + channel)
                } else {
                    let [x] = of[which as usize].load::<1>(channel);
                    x
                };
            });
            if c.l2norm != 0 {
                x = normalised(x);
            }
            let scale = if which == 1 {
                f32::from_bits(c.scale)
            } else {
                1.0
            };
            each!(i in 0..K as usize / 32 => {
                let at = Self::own_word(tile, which * K + lane + 32 * i as u32);
                store_shared_b32(at, (x[i] * scale).to_bits());
            });
        });
        if G::PER_CHANNEL {
            let step = &params.layer.step;
            let a_log = load_a_log(c, step, self.row);
            each!(i in 0..K / 32 => {
                let channel = lane + 32 * i;
                let (strides, element) = ((params.g_row, c.g_token), c.g_element);
                let at = span.at(
                    step.g,
                    strides,
                    t,
                    self.row.hv * c.g_head + channel,
                    element,
                );
                let [x] = load_one(at, element).to_f32(element);
                let mut bias = 0.0;
                if c.has_dt_bias != 0 {
                    let row = gate_row(c, self.row);
                    let at = step.dt_bias + 4 * (row * K + channel) as u64;
                    let element = Element::F32 as u32;
                    [bias] = load_one(at, element).to_f32(element);
                }
                let decay = decay_of(c, x, a_log, bias);
                store_shared_b32(Self::own_word(tile, 2 * K + channel), decay.to_bits());
            });
        }
        sync_warp(FULL_MASK);
    }

    /// Advances the warp's rows of the state by the tokens of chunk `number`, and replaces the products' o for tokens from
    /// `first` on. Called by all lanes of the warp.
    ///
    /// # Safety
    /// The tensors of `params` are live; nobody reads the warp's part of the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn advance_outside<const SHORT: bool>(
        &self,
        s: &mut [f32; 64],
        o: &mut [f32; 32],
        (number, first): (u32, u32),
        tile: u32,
    ) {
        let (c, params) = (self.c, self.params);
        let mut token = 0;
        loop {
            // Recomputed for every token, because no registers are free to keep them.
            let span = Self::kept_span();
            let chunk = span.chunk(opaque(number));
            if token >= chunk.count {
                break;
            }
            let (span, t) = span.in_row(M::SPLITS, (c, params), chunk.start + token);
            let inputs = if SHORT {
                self.inputs
            } else {
                ConvInputs::new(c, params, &Place::load(c, &params.layer, span.b))
            };
            self.stage_token((&span, inputs), t, tile);
            let (decay, beta) = if G::PER_CHANNEL {
                (1.0, beta_of(c, params, &span, (t, self.row.hv)))
            } else {
                let (log, beta) = gates_of(c, params, &span, t, self.row.hv);
                (gate::exp(log), beta)
            };
            let own = self.advance_token((s, decay, beta), (&span, inputs), t, tile);
            // Words 4 j and 4 j + 1 belong to tokens 8 j + 2 c and the next, in the first row.
            let column = opaque(lane_id()) % 4 * 2;
            each!(i in 0..CHUNK as usize / 4 => {
                let at = 4 * (i / 2) + i % 2;
                if token >= first && 8 * (i as u32 / 2) + column + i as u32 % 2 == token {
                    [o[at], o[at + 2]] = own;
                }
            });
            token += 1;
        }
        // The whole warpgroup may use the tile again.
        sync_warp(FULL_MASK);
    }

    /// Processes one token, which is staged; returns o of the thread's two rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn advance_token(
        &self,
        (s, decay, beta): (&mut [f32; 64], f32, f32),
        (span, inputs): (&Span, ConvInputs),
        t: u32,
        tile: u32,
    ) -> [f32; 2] {
        let (c, params) = (self.c, self.params);
        let column = opaque(lane_id()) % 4 * 2;
        let pair = |of: u32, j: usize| {
            load_shared_b64(Self::own_word(tile, of * K + 8 * j as u32 + column))
                .map(f32::from_bits)
        };
        let mut products = [0.0; 2];
        each!(j in 0..K as usize / 8 => {
            let k = pair(0, j);
            let decays = if G::PER_CHANNEL {
                pair(2, j)
            } else {
                [decay; 2]
            };
            each!(i in 0..4 => {
                s[4 * j + i] *= decays[i % 2];
                products[i / 2] = fma(s[4 * j + i], k[i % 2], products[i / 2]);
            });
        });
        let products = sum_of_four(products);
        let row = self.own_row();
        let mut delta = [0.0; 2];
        each!(half in 0..2 => {
            let own = row + 8 * half as u32;
            let (with, of) = ((c, params), (self.row.hv, own));
            let v = if self.is_transition() {
                0.0
            } else {
                value_of::<K, V>(with, (span, inputs), t, of)
            };
            delta[half] = beta * (v - products[half]);
        });
        let mut o = [0.0; 2];
        each!(j in 0..K as usize / 8 => {
            let (k, q) = (pair(0, j), pair(1, j));
            each!(i in 0..4 => {
                s[4 * j + i] = fma(delta[i / 2], k[i % 2], s[4 * j + i]);
                o[i / 2] = fma(s[4 * j + i], q[i % 2], o[i / 2]);
            });
        });
        sum_of_four(o)
    }
}
