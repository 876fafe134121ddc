//! The short causal convolution of several tokens: a thread has all tokens of a channel.

use super::Place;
use super::conv::{Channel, Part, store_element, store_input};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load_one};
use crate::pending::InputRing;
use crate::recurrent::tokens::Tokens;
use crate::step::{LayerParams, StepConstants};

/// Number of tokens whose x a thread has in registers together, so that no sum waits for another one's load.
pub const HELD: usize = 8;

/// The tokens of a row that the convolution goes through: the kept previous tokens, then the new ones. If the row has fewer
/// tokens than the launch has room for, the last one is repeated.
pub struct RowTokens {
    b: u32,
    /// First new token among those of its tensor's row.
    start: u32,
    /// Number of kept previous tokens.
    pub kept: u32,
    /// Number of new tokens.
    pub count: u32,
}

/// The previous tokens of a row, or the new ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Previous,
    New,
}

/// x of several tokens of a channel.
type Held = [Raw<1>; HELD];

impl RowTokens {
    /// The tokens of row `b`; `previous`: the previous tokens, if the launch has any.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(b: u32, previous: Option<&Tokens>, new: &Tokens) -> Self {
        Self {
            b,
            start: new.start,
            kept: previous.map_or(0, |previous| previous.count),
            count: new.count,
        }
    }

    /// Largest number of tokens, previous and new.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn most(c: &StepConstants) -> u32 {
        c.previous_tokens + c.tokens
    }

    /// Loads x of a channel for the tokens from `first` on.
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
        // A first previous token always exists, even if it is not kept.
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

/// A channel of several tokens that a thread convolves.
pub struct Drafts {
    pub part: Part,
    channel: Channel,
    /// x of the first tokens.
    previous: Held,
    new: Held,
}

impl Drafts {
    /// # Safety
    /// `params` and `c` describe live tensors; if the row is live, nobody else writes the channel's window.
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

    /// [`Self::load`] for new tokens after pending ones; the window is that of [`Channel::load_waiting`].
    ///
    /// # Safety
    /// As for [`Self::load`].
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

    /// Writes the window of a row without tokens, unchanged.
    ///
    /// # Safety
    /// As for [`Self::load`]; the row is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn carry(&self, c: &StepConstants, params: &LayerParams, place: &Place) {
        if self.part.is_there {
            let number = self.part.channel;
            self.channel.store_window(c, params, place, number);
        }
    }

    /// Convolves all tokens, writes the windows, and passes each token to `give`: its kind, its number, whether the row has it,
    /// and y. If the thread has no channel, `give` gets meaningless values. Each kind has at most `SETS` · [`HELD`] tokens; the
    /// loop over sets is unrolled, because ptxas would otherwise keep a loop with a branch for each token.
    ///
    /// # Safety
    /// As for [`Self::load`]; the row is live.
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

    /// Stores x of the new tokens in the entries after the pending ones, and writes the window before them if the row is flushed
    /// or fresh.
    ///
    /// # Safety
    /// As for [`Self::load`]; the row is live, with at most [`HELD`] new tokens.
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
        // SAFETY: the caller's promise; no pending token has these entries.
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

    /// Loads x of the tokens after the [`HELD`] tokens from `first` on.
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

    /// Writes the window after new token `t`, whose x is given, to all of its destinations.
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
