//! Convolution of a row's tokens: the computation of layer/conv.rs for one token, in the same order, for two channels or one.

use super::rows::Span;
use crate::constants::Element;
use crate::device::float::fma;
use crate::layer::Place;
use crate::layer::conv::{TAPS, activate, load_input, load_taps};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load, load_one};
use crate::step::{PrefillParams, StepConstants};

/// Tokens that a thread convolves together, for a head of `channels` channels; a thread has two channels. So many that 256
/// threads have a chunk, and at least half of the inputs that a thread loads are its own tokens.
pub const fn run_of(channels: u32) -> usize {
    if channels > 64 { 16 } else { 8 }
}

/// Largest number of inputs of a run.
const MOST_INPUTS: usize = 16 + TAPS - 1;

/// Inputs of the convolution of a row's tokens.
#[derive(Clone, Copy)]
pub struct ConvInputs {
    /// Address of the window before the row, if there is one to read.
    window: u64,
    reads: bool,
}

impl ConvInputs {
    /// No convolution.
    pub const NONE: Self = Self {
        window: 0,
        reads: false,
    };

    /// Inputs of a row with slots `place`; none without a convolution.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(c: &StepConstants, params: &PrefillParams, place: &Place) -> Self {
        Self {
            window: place.read_window(c, &params.layer),
            reads: c.taps != 0 && place.reads(),
        }
    }

    /// Loads input `t` of the row for `channel` of all D, as it is in memory. A negative `t` is before the row.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; `t` is at least 1 - W, and not after the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn raw(
        self,
        (c, params): (&StepConstants, &PrefillParams),
        span: &Span,
        t: i64,
        channel: u32,
    ) -> Raw<1> {
        if t >= 0 {
            let strides = (params.x_row, c.x_token);
            let at = span.at(params.layer.x, strides, t as u32, channel, c.x_element);
            return load_one(at, c.x_element);
        }
        if !self.reads {
            return Raw([0]);
        }
        let input = (c.taps as i64 - 1 + t) as u64;
        let element =
            channel as u64 * c.read_windows_channel as u64 + input * c.read_windows_input as u64;
        load_input(
            self.window + element * bytes_of(c.x_element) as u64,
            c.x_element,
            true,
        )
    }

    /// Convolves `RUN` tokens from `t` on, those before `end`, for two channels from `channel` of all D on. Calls `give` for one
    /// token after the other, with its index among them; with zeros for tokens from `end` on.
    ///
    /// Lanes with neighbouring channels load and store whole lines. A token is loaded once, except for the tokens before a run.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; tokens before `end` are the row's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn convolve_run<const RUN: usize>(
        self,
        (c, params): (&StepConstants, &PrefillParams),
        span: &Span,
        (t, end): (u32, u32),
        channel: u32,
        give: impl Fn(u32, [f32; 2]),
    ) {
        const { assert!(RUN + TAPS - 1 <= MOST_INPUTS) };
        let (element, wide, left) = (c.x_element, c.wide_io != 0, end.saturating_sub(t));
        let mut x = [Raw([0; 2]); MOST_INPUTS];
        let mut taps = [[0.0; TAPS]; 2];
        let mut bias = [0.0; 2];
        // SAFETY: the caller's promise.
        unsafe {
            let strides = (params.x_row, c.x_token);
            let first = span.at(params.layer.x, strides, t, channel, element);
            let apart = c.x_token as u64 * bytes_of(element) as u64;
            each!(i in 0..RUN + TAPS - 1 => {
                let is_there = if i < TAPS - 1 {
                    left > 0 && t + i as u32 >= TAPS as u32 - 1
                } else {
                    left > i as u32 - (TAPS as u32 - 1)
                };
                if is_there {
                    let at = first
                        .wrapping_add((i as u64).wrapping_sub(TAPS as u64 - 1).wrapping_mul(apart));
                    x[i] = load::<2>(at, element, wide);
                } else if i < TAPS - 1 && left > 0 && i as u32 + c.taps >= TAPS as u32 {
                    let input = t as i64 + i as i64 - (TAPS as i64 - 1);
                    each!(n in 0..2 => {
                        let own = channel + n as u32;
                        let Raw([word]) = self.raw((c, params), span, input, own);
                        if element == Element::F32 as u32 {
                            x[i].0[n] = word;
                        } else {
                            x[i].0[0] |= word << (16 * n);
                        }
                    });
                }
            });
            each!(n in 0..2 => {
                let own = channel + n as u32;
                taps[n] = load_taps(c, &params.layer, own).to_f32(c.conv_weight_element);
                if c.has_conv_bias != 0 {
                    let element = c.conv_bias_element;
                    let at = params.layer.conv_bias + own as u64 * bytes_of(element) as u64;
                    [bias[n]] = load_one(at, element).to_f32(element);
                }
            });
        }
        each!(token in 0..RUN => {
            let mut y = [0.0; 2];
            if left > token as u32 {
                let mut sums = bias;
                each!(i in 0..TAPS => {
                    if i as u32 + c.taps >= TAPS as u32 {
                        let x = x[token + i].to_f32(element);
                        sums = [
                            fma(taps[0][i], x[0], sums[0]),
                            fma(taps[1][i], x[1], sums[1]),
                        ];
                    }
                });
                y = sums.map(|sum| activate(c.conv_activation, sum));
            }
            give(token as u32, y);
        });
    }

    /// Convolves token `t` for `channel` of all D.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; the row has the token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn convolve(
        self,
        (c, params): (&StepConstants, &PrefillParams),
        span: &Span,
        t: u32,
        channel: u32,
    ) -> f32 {
        let mut sum = 0.0;
        // SAFETY: the caller's promise.
        unsafe {
            let taps = load_taps(c, &params.layer, channel).to_f32(c.conv_weight_element);
            if c.has_conv_bias != 0 {
                let element = c.conv_bias_element;
                let at = params.layer.conv_bias + channel as u64 * bytes_of(element) as u64;
                [sum] = load_one(at, element).to_f32(element);
            }
            each!(i in 0..TAPS => {
                if i as u32 >= TAPS as u32 - c.taps {
                    let input = t as i64 + i as i64 - (TAPS as i64 - 1);
                    let raw = self.raw((c, params), span, input, channel);
                    let [x] = raw.to_f32(c.x_element);
                    sum = fma(taps[i], x, sum);
                }
            });
        }
        activate(c.conv_activation, sum)
    }
}

/// First channel, of all D, of q, k or v (0, 1, 2) of a head, if all heads have `dim` channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn channel_of(c: &StepConstants, of: u32, head: u32, dim: u32) -> u32 {
    (of * c.h) * dim + head * dim
}

/// First channel, of all D, of v of a value head with `dim` = V channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn channel_of_values<const K: u32, const V: u32>(c: &StepConstants, hv: u32, dim: u32) -> u32 {
    if const { K == V } {
        channel_of(c, 2, hv, dim)
    } else {
        2 * c.h * K + hv * dim
    }
}
