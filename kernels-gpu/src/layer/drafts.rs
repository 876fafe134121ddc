//! The short causal convolution of several tokens: a thread walks a channel through them.

use super::Place;
use super::conv::{Channel, Part, store_input};
use crate::math::elements::{Raw, bytes_of, load_one};
use crate::recurrent::tokens::Tokens;
use crate::step::{LayerParams, StepConstants};

/// Tokens whose x is on its way while others are convolved.
const AHEAD: usize = 8;

/// The tokens of a row that the convolution goes through: those that are kept of the previous ones, then the new ones. Where
/// there are fewer than the launch has room for, the last one is repeated.
pub struct Walk {
    b: u32,
    /// First new token among those of its tensor's row.
    start: u32,
    /// How many previous ones are kept.
    pub kept: u32,
    /// How many new ones there are.
    pub count: u32,
}

impl Walk {
    /// Of row `b`: `previous` where the launch has previous tokens.
    #[inline(always)]
    pub fn new(b: u32, previous: Option<&Tokens>, new: &Tokens) -> Self {
        Self {
            b,
            start: new.start,
            kept: previous.map_or(0, |previous| previous.count),
            count: new.count,
        }
    }

    /// Most tokens, of both kinds.
    #[inline(always)]
    pub fn most(c: &StepConstants) -> u32 {
        c.previous_tokens + c.tokens
    }

    /// x of token `i` of a channel.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors.
    #[inline(always)]
    unsafe fn x(&self, c: &StepConstants, params: &LayerParams, channel: u32, i: u32) -> Raw<1> {
        let last = |count: u32| count.max(1) - 1;
        let element = if c.previous_tokens != 0 && (i < self.kept || c.tokens == 0) {
            let t = i.min(last(self.kept));
            let row = self.b as u64 * c.previous_x_row as u64;
            (
                params.previous_x,
                row + t as u64 * c.previous_x_token as u64,
            )
        } else {
            let t = self.start + (i - self.kept).min(last(self.count));
            let row = self.b as u64 * c.x_row as u64;
            (params.x, row + t as u64 * c.x_token as u64)
        };
        let (tensor, first) = element;
        let address = tensor + (first + channel as u64) * bytes_of(c.x_element) as u64;
        // SAFETY: the caller's promise.
        unsafe { load_one(address, c.x_element) }
    }
}

/// A channel that a thread convolves of several tokens.
pub struct Drafts {
    part: Part,
    channel: Channel,
    /// x of the next tokens.
    x: [Raw<1>; AHEAD],
}

impl Drafts {
    /// # Safety
    /// `params` and `c` describe live tensors; where the row is live, nobody else writes the channel's window.
    #[inline(always)]
    pub unsafe fn load(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &Walk,
        part: Part,
    ) -> Self {
        let (mut channel, mut x) = (Channel::NONE, [Raw([0]); AHEAD]);
        if part.is_there {
            // SAFETY: the caller's promise.
            unsafe {
                let mut i = 0;
                while i < AHEAD {
                    if (i as u32) < Walk::most(c) {
                        x[i] = walk.x(c, params, part.channel, i as u32);
                    }
                    i += 1;
                }
                channel = Channel::load(c, params, place, part.channel);
            }
        }
        Self { part, channel, x }
    }

    /// Convolves all tokens in order and hands each to `give`, with its number; writes the windows wherever they go.
    ///
    /// # Safety
    /// As [`Self::load`]'s, of a row that is live.
    #[inline(always)]
    pub unsafe fn convolve(
        mut self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &Walk,
        give: impl Fn(&Part, u32, f32),
    ) {
        if !self.part.is_there {
            return;
        }
        let number = self.part.channel;
        // SAFETY: the caller's promise.
        unsafe {
            if c.token_index != 0 {
                self.channel.store_kept_inputs(c, params, place, number);
            }
            if c.previous_tokens != 0 && walk.kept == 0 {
                self.channel.store_window(c, params, place, number);
            }
            let mut i = 0;
            while i < Walk::most(c) {
                let x = self.x[0];
                let y = self.channel.convolve(c, x);
                self.channel.shift(x);
                give(&self.part, i, y);
                self.after(c, params, place, walk, (i, x));
                let mut ahead = 1;
                while ahead < AHEAD {
                    self.x[ahead - 1] = self.x[ahead];
                    ahead += 1;
                }
                let next = i + AHEAD as u32;
                if next < Walk::most(c) {
                    self.x[AHEAD - 1] = walk.x(c, params, number, next);
                }
                i += 1;
            }
        }
    }

    /// Writes the window after token `i`, whose x this is, wherever it goes.
    #[inline(always)]
    unsafe fn after(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &Walk,
        (i, x): (u32, Raw<1>),
    ) {
        let (channel, number) = (&self.channel, self.part.channel);
        // SAFETY: the caller's promise.
        unsafe {
            if c.previous_tokens != 0 {
                if i + 1 == walk.kept {
                    channel.store_window(c, params, place, number);
                }
                return;
            }
            if i >= walk.count {
                return;
            }
            if c.token_index != 0 {
                store_input(c, params, place, number, c.taps - 2 + i, x);
            } else if c.update_state != 0 && i + 1 == walk.count {
                channel.store_window(c, params, place, number);
            }
            if c.has_window_snapshots != 0 {
                let window = walk.b as u64 * c.window_snapshot_row as u64
                    + i as u64 * c.window_snapshot_token as u64
                    + number as u64 * c.window_snapshot_channel as u64;
                let bytes = bytes_of(c.x_element) as u64;
                let first = params.window_snapshots + window * bytes;
                channel.store_inputs(c, first, c.window_snapshot_input);
            }
        }
    }
}
