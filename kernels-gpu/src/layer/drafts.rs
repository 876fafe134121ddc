//! The short causal convolution of several tokens: a thread has all tokens of a channel.

use super::Place;
use super::conv::{Channel, Part, store_element, store_input};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load_one};
use crate::pending::InputRing;
use crate::recurrent::tokens::Tokens;
use crate::step::{LayerParams, StepConstants};

/// Tokens whose x a thread has at a time: no sum waits for another's.
pub const HELD: usize = 8;

/// The tokens of a row that the convolution goes through: those that are kept of the previous ones, then the new ones. Where
/// there are fewer than the launch has room for, the last one is repeated.
pub struct RowTokens {
    b: u32,
    /// First new token among those of its tensor's row.
    start: u32,
    /// Previous tokens that are kept.
    pub kept: u32,
    /// New tokens.
    pub count: u32,
}

/// The previous tokens of a row, or the new ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Previous,
    New,
}

/// x of tokens of a channel.
type Held = [Raw<1>; HELD];

impl RowTokens {
    /// The tokens of row `b`: `previous` where the launch has previous tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(b: u32, previous: Option<&Tokens>, new: &Tokens) -> Self {
        Self {
            b,
            start: new.start,
            kept: previous.map_or(0, |previous| previous.count),
            count: new.count,
        }
    }

    /// Most tokens, of both kinds.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn most(c: &StepConstants) -> u32 {
        c.previous_tokens + c.tokens
    }

    /// x of the tokens of a channel from token `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        which: Which,
        channel: u32,
        first: u32,
    ) -> Held {
        let (x, row, token, start, count, room) = match which {
            Which::Previous => {
                let (row, token) = (c.previous_x_row, c.previous_x_token);
                (
                    params.previous_x,
                    row,
                    token,
                    0,
                    self.kept,
                    c.previous_tokens,
                )
            }
            Which::New => (
                params.x, c.x_row, c.x_token, self.start, self.count, c.tokens,
            ),
        };
        // Of previous tokens there is always a first one, though it may not be kept.
        let is_any = which == Which::Previous || count != 0;
        let mut held = [Raw([0]); HELD];
        let mut i = 0;
        while i < HELD && is_any {
            let t = first + i as u32;
            if t < room {
                let t = start + t.min(count.max(1) - 1);
                let element = self.b as u64 * row as u64 + t as u64 * token as u64 + channel as u64;
                held[i] = load_one(x + element * bytes_of(c.x_element) as u64, c.x_element);
            }
            i += 1;
        }
        held
    }
}

/// A channel that a thread convolves of several tokens.
pub struct Drafts {
    pub part: Part,
    channel: Channel,
    /// The first tokens' x.
    previous: Held,
    new: Held,
}

impl Drafts {
    /// # Safety
    /// `params` and `c` describe live tensors; where the row is live, nobody else writes the channel's window.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        part: Part,
    ) -> Self {
        let none = [Raw([0]); HELD];
        let (mut channel, mut previous, mut new) = (Channel::NONE, none, none);
        if part.is_there {
            if c.previous_tokens != 0 {
                previous = walk.load(c, params, Which::Previous, part.channel, 0);
            }
            if c.tokens != 0 {
                new = walk.load(c, params, Which::New, part.channel, 0);
            }
            channel = Channel::load(c, params, place, part.channel, true);
        }
        Self {
            part,
            channel,
            previous,
            new,
        }
    }

    /// [`Self::load`] of new tokens behind the pending ones: the window is [`Channel::load_waiting`]'s.
    ///
    /// # Safety
    /// As [`Self::load`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_waiting(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        part: Part,
        ring: &InputRing,
    ) -> Self {
        let none = [Raw([0]); HELD];
        let mut drafts = Self {
            part,
            channel: Channel::NONE,
            previous: none,
            new: none,
        };
        if part.is_there {
            if c.tokens != 0 {
                drafts.new = walk.load(c, params, Which::New, part.channel, 0);
            }
            drafts.channel = Channel::load_waiting(c, params, place, ring, part.channel);
        }
        drafts
    }

    /// Writes the window of a row without tokens as it was loaded.
    ///
    /// # Safety
    /// As [`Self::load`]'s, of a row that is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn carry(&self, c: &StepConstants, params: &LayerParams, place: &Place) {
        if self.part.is_there {
            let number = self.part.channel;
            self.channel.store_window(c, params, place, number);
        }
    }

    /// Convolves all tokens and hands each to `give`, of either kind, with its number and whether the row has it; writes the
    /// windows wherever they go. Where the thread has no channel, what `give` gets is of none. There are no more tokens of a kind
    /// than in `SETS` of [`HELD`]: a loop over sets would be one to ptxas too, which then keeps every token's branch.
    ///
    /// # Safety
    /// As [`Self::load`]'s, of a row that is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn convolve<const SETS: usize>(
        mut self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        give: impl Fn(&Part, Which, u32, bool, f32),
    ) {
        let (number, is_there) = (self.part.channel, self.part.is_there);
        if c.token_index != 0 && is_there {
            self.channel.store_kept_inputs(c, params, place, number);
        }
        if c.previous_tokens != 0 {
            let mut held = self.previous;
            each!(set in 0..SETS => {
                let first = (set * HELD) as u32;
                if first < c.previous_tokens {
                    let next = self.load_next(c, params, walk, Which::Previous, first);
                    each!(i in 0..HELD => {
                        let t = first + i as u32;
                        if t < c.previous_tokens {
                            let y = self.channel.convolve(c, held[i]);
                            give(&self.part, Which::Previous, t, t < walk.kept, y);
                            self.channel.shift_where(t < walk.kept, held[i]);
                        }
                    });
                    held = next;
                }
            });
            if is_there {
                self.channel.store_window(c, params, place, number);
            }
        }
        let mut held = self.new;
        each!(set in 0..SETS => {
            let first = (set * HELD) as u32;
            if first < c.tokens {
                let next = self.load_next(c, params, walk, Which::New, first);
                each!(i in 0..HELD => {
                    let t = first + i as u32;
                    if t < c.tokens {
                        let y = self.channel.convolve(c, held[i]);
                        give(&self.part, Which::New, t, t < walk.count, y);
                        self.channel.shift(held[i]);
                        if c.previous_tokens == 0 && is_there && t < walk.count {
                            self.after(c, params, place, walk, (t, held[i]));
                        }
                    }
                });
                held = next;
            }
        });
    }

    /// Leaves x of the new tokens behind the pending ones, and the window before them where it moves.
    ///
    /// # Safety
    /// As [`Self::load`]'s, of a row that is live, and no more new tokens than are held.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        ring: &InputRing,
    ) {
        if !self.part.is_there {
            return;
        }
        let number = self.part.channel;
        // SAFETY: the caller's promise; the entries are those of no pending token.
        unsafe {
            each!(i in 0..HELD => {
                let t = i as u32;
                if t < walk.count {
                    store_element(c.x_element, ring.new_input(c, t, number), self.new[i]);
                }
            });
            if ring.moves {
                self.channel.store_window(c, params, place, number);
            }
        }
    }

    /// x of the tokens behind those from `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_next(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        walk: &RowTokens,
        which: Which,
        first: u32,
    ) -> Held {
        let next = first + HELD as u32;
        let room = match which {
            Which::Previous => c.previous_tokens,
            Which::New => c.tokens,
        };
        if next < room && self.part.is_there {
            return walk.load(c, params, which, self.part.channel, next);
        }
        [Raw([0]); HELD]
    }

    /// Writes the window after new token `t`, whose x this is, wherever it goes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn after(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        (t, x): (u32, Raw<1>),
    ) {
        let (channel, number) = (&self.channel, self.part.channel);
        if c.token_index != 0 {
            store_input(c, params, place, number, c.taps - 2 + t, x);
        } else if c.update_state != 0 && t + 1 == walk.count {
            channel.store_window(c, params, place, number);
        }
        if c.has_window_snapshots != 0 {
            let window = walk.b as u64 * c.window_snapshot_row as u64
                + t as u64 * c.window_snapshot_token as u64
                + number as u64 * c.window_snapshot_channel as u64;
            let bytes = bytes_of(c.x_element) as u64;
            let first = params.window_snapshots + window * bytes;
            channel.store_inputs(c, first, c.window_snapshot_input);
        }
    }
}
