//! The dims of a block, and the map of its shared memory. Offsets in bytes.
//!
//! | from | bytes | content | written by | read by |
//! |---|---|---|---|---|
//! | 0 | 6 · 8 · ROW | tokens of k, q and the previous k, in the type of the state, each as high and low part | workers | all, after the first barrier |
//! | `SCRATCH` | 512 | M and the scores of one solution, 8 × 8 f32 each | solver | solver |
//! | `SOLUTIONS` | 2 · 640 | [`Solution`] of the new and of the previous tokens | solver | workers, after the barrier that ends it |
//! | `VALUES` | WARPS · 2 · 8 · VALUE_ROW | v of the new and the previous tokens, unconverted, a warp's rows of S each; then o in f32 | a warp | that warp |
//! | `STATE` | WARPS · ROWS · (2 or 4) K | the state, a warp's rows of S each | a warp | that warp |
//! | `STEP` | 2 · 8 · ROW | KDA: keys that advance the state, in the format of tokens, bf16 | teams | workers, after their barrier |
//! | `CHANNELS` | 3 · 8 · 4 K | KDA: k, q and α of every token, f32 | workers | teams, after a barrier |
//! | `COLUMNS` | 2 · 4 · 128 | KDA: products of the new and of the previous tokens | teams | solver, after their barrier |
//! | `KEPT` | 4 K | KDA: decay of each channel of S₀ | a team | workers, after its barrier |
//! | `WEIGHTS` | 4 · 256 | deferred states: products of pending tokens with k and q, 8 × 8 f32 each | workers | workers, after a barrier |
//! | `LATE` | 2 · 2 · 8 · ROW | KDA, deferred states: k and q, decayed also over the pending tokens | teams | workers, after their barrier |
//! | `LOG_DECAYS` | 16 · 4 K | KDA, deferred states: log α of pending tokens, then the decay over the tokens after each | workers | workers, after a barrier |
//! | `BYTES` | 2 · 8 · ROW | more than 8 new or previous tokens: q of every other 8, in the format of tokens | workers | all, after a barrier |
//! | `LATE` | 3 · 2 · 8 · ROW | KDA, a pair of sets: k and q of the second, decayed also over the first; its keys that advance the state | teams | workers, after their barrier |
//! | `KEPT_LATER` | 4 K | KDA, a pair of sets: decay of each channel over the second set | a team | workers, after its barrier |
//! | `CROSS` | 2 · 256 | a pair of sets: products of the second set's k and q with the first's k, 8 × 8 f32 each | solver | workers, after the barrier that ends the second solution |
//!
//! A token of k or q is stored in *fragment order*: for each 32 channels, word 4j + c holds the j-th two of the 8 channels of
//! lane 4r + c, so that `load_matrices` gives this lane all 8 channels of token r. They are the channels that the lane holds of a
//! row of S ([`crate::state`]): 8c .. 8c+8 of 16-bit states; 4c .. 4c+4 and 16+4c .. 16+4c+4 of f32 states. Rows are padded by 16
//! bytes, against bank conflicts; with f16 states the first 4 bytes of the high part's padding hold the compensating factor of
//! GDN's tokens ([`Map::lacks`]).
//!
//! With deferred write-back the previous tokens are the pending ones, up to 16. A warp then has room for 16 rows of u, f32,
//! instead of 8 previous values. k of the later 8 is in place of the keys that advance the state. With GDN it is a fourth
//! operand, and the low parts of all four are at the end of the map.

use core::marker::PhantomData;

use super::state::StateRows;
use crate::device::shared::dynamic_shared_mem;
use crate::state::StateElement;
use crate::step::StepConstants;

/// Tokens of an operand, and rows and columns of a solution's matrices.
pub const TOKENS: u32 = 8;

/// Maximum number of pending tokens of a deferred state.
pub const MOST_PENDING: u32 = 16;

/// An operand of tokens in shared memory.
#[derive(Clone, Copy)]
pub enum Operand {
    Key = 0,
    Query = 1,
    PreviousKey = 2,
    /// KDA: k decayed up to the last token, for the tokens that advance the state.
    Step = 3,
    /// Deferred states, which nothing else advances: k of pending tokens 8 .. 16; k of the first 8 is [`Self::PreviousKey`].
    LaterPendingKey = 4,
    /// KDA: k, decayed also over the pending tokens of a deferred state, or over the first set of a pair.
    LateKey = 5,
    /// KDA: q, decayed as [`Self::LateKey`].
    LateQuery = 6,
    /// Queries of [`Set::Later`], at the end of the map. Its number gives it the loaders of [`Self::Query`].
    LaterQuery = 7,
    /// KDA: [`Self::Step`] of the second set of a pair.
    LateStep = 8,
}

/// KDA's tokens as f32 in shared memory, for the teams.
#[derive(Clone, Copy)]
pub enum TeamOperand {
    Key = 0,
    Query = 1,
    Decay = 2,
    /// k of the previous tokens, if a convolution computes it together with the new ones. In place of the operand of queries,
    /// which is written once the teams are done with the previous tokens.
    PreviousKey = 3,
}

/// Up to 8 tokens, of this launch or of the last step. If either has more than 8 ([`super::sets`]), sets alternate between
/// [`Self::New`] and [`Self::Later`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Set {
    New = 0,
    Previous = 1,
    /// Every other set of a launch of more than 8 tokens, in place of the previous tokens.
    Later = 3,
}

impl Set {
    /// Its index among the two sets of a map.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn place(self) -> u32 {
        self as u32 % 2
    }

    /// Operand of its keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn key(self) -> Operand {
        match self {
            Self::New => Operand::Key,
            Self::Previous | Self::Later => Operand::PreviousKey,
        }
    }

    /// Operand of its queries; previous tokens have none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn query(self) -> Operand {
        match self {
            Self::New | Self::Previous => Operand::Query,
            Self::Later => Operand::LaterQuery,
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn has_queries(self) -> bool {
        !matches!(self, Self::Previous)
    }
}

/// The solver's results for 8 tokens, all f32.
pub struct Solution(u32);

impl Solution {
    /// T, `[8, 8]`: δ = T (v − S k̂).
    pub fn delta(&self) -> u32 {
        self.0
    }

    /// W, `[8, 8]`: the contribution W (v − S k̂) to o.
    pub fn output(&self) -> u32 {
        self.0 + 256
    }

    /// `[8]`: S k̂ = this · (S₀ k).
    pub fn key_factors(&self) -> u32 {
        self.0 + 512
    }

    /// `[8]`: S q̂ = this · (S₀ q).
    pub fn query_factors(&self) -> u32 {
        self.0 + 544
    }

    /// `[8]`: the decay of δ k̂ᵀ up to the last token, as a factor of δ kᵀ; without that decay for a deferred state.
    pub fn step_factors(&self) -> u32 {
        self.0 + 576
    }

    /// Γ, the decay of S₀ up to the last token.
    pub fn decay(&self) -> u32 {
        self.0 + 608
    }
}

/// The dims of a variant's block.
pub trait Block {
    /// KDA: one decay per key channel; GDN: one per value head.
    const PER_CHANNEL: bool;
    const K: u32;
    const V: u32;
    /// Workers.
    const WARPS: u32;
    /// Rows of S of a worker.
    const ROWS: u32;
    /// Elements of S in shared memory. States of 16 bits are K-last; the layout of f32 states is a load-time constant.
    type State: StateRows;
    /// Whether the kernel can hold 16-bit states as f32 in shared memory; a load-time constant selects it.
    const WIDENS: bool = false;
    /// Blocks that share one head's state.
    const TILES: u32 = Self::V / (Self::WARPS * Self::ROWS);
    /// Whether the state has deferred write-back; the previous tokens are then those of a ring.
    const WAITS: bool = false;
}

/// The map of a block's shared memory.
pub struct Map<B>(PhantomData<B>);

impl<B: Block> Map<B> {
    /// Bytes between successive tokens of an operand.
    pub const ROW: u32 = 2 * B::K + 16;
    /// Bytes of one part, high or low, of an operand.
    const PART: u32 = TOKENS * Self::ROW;
    /// Whether low parts are at the end of the map. True for GDN's deferred states: a launch with bf16 tokens omits them, and a
    /// multiprocessor then has room for four blocks.
    const LOWS_LAST: bool = B::WAITS && !B::PER_CHANNEL;
    /// Bytes from the high part of an operand to the low part.
    pub const LOW: u32 = if Self::LOWS_LAST {
        Self::LOWS
    } else {
        Self::PART
    };
    const SCRATCH: u32 = if Self::LOWS_LAST { 4 } else { 6 } * Self::PART;
    const SOLUTIONS: u32 = Self::SCRATCH + 512;
    const VALUES: u32 = Self::SOLUTIONS + if Self::LOWS_LAST { 1 } else { 2 } * 640;
    /// Bytes between successive tokens of a warp's values: padded by 4 words, against bank conflicts.
    pub const VALUE_ROW: u32 = 4 * (B::ROWS + 4);
    /// Bytes of a warp's values of one set.
    const SET: u32 = TOKENS * Self::VALUE_ROW;
    /// Bytes of all values of a warp: of two sets, or of the new set and u.
    const OF_WARP: u32 = Self::SET
        + if B::WAITS {
            MOST_PENDING * 4 * B::ROWS
        } else {
            Self::SET
        };
    const STATE: u32 = Self::VALUES + B::WARPS * Self::OF_WARP;
    /// Bytes of a warp's rows of S.
    const STATE_OF_WARP: u32 = B::ROWS * B::State::BYTES * B::K;
    /// Whether S is f32 in shared memory.
    pub const F32_STATE: bool = B::State::BYTES == 4;
    /// Whether states are f16 in shared memory, and so are tokens that are multiplied by them.
    pub const fn is_f16(c: &StepConstants) -> bool {
        c.state_f16 != 0 && !Self::widens(c)
    }

    /// Whether states are f32 in shared memory, and 16-bit in the pool.
    pub const fn widens(c: &StepConstants) -> bool {
        B::WIDENS && c.state_f32 == 0
    }

    const STEP: u32 = Self::STATE + B::WARPS * Self::STATE_OF_WARP;
    const CHANNELS: u32 = Self::STEP + 2 * Self::PART;
    const COLUMNS: u32 = Self::CHANNELS + 3 * TOKENS * 4 * B::K;
    const KEPT: u32 = Self::COLUMNS + 2 * 4 * 128;
    const WEIGHTS: u32 = if B::PER_CHANNEL {
        Self::KEPT + 4 * B::K
    } else {
        Self::STEP
    };
    const LATE: u32 = Self::WEIGHTS + if B::WAITS { 4 * 256 } else { 2 * Self::PART };
    const LOG_DECAYS: u32 = Self::LATE + 4 * Self::PART;
    const LOWS: u32 = Self::LATE;
    /// The bytes of low parts within [`Self::BYTES`]: unused if q, k and the keys of a ring are bf16.
    pub const BYTES_OF_LOWS: u32 = if Self::LOWS_LAST { 4 * Self::PART } else { 0 };
    /// Bytes of the map.
    pub const BYTES: u32 = if !B::WAITS {
        Self::WEIGHTS
    } else if B::PER_CHANNEL {
        Self::LOG_DECAYS + MOST_PENDING * 4 * B::K
    } else {
        Self::LOWS + Self::BYTES_OF_LOWS
    };

    const KEPT_LATER: u32 = Self::LATE + 6 * Self::PART;
    const CROSS: u32 = if B::PER_CHANNEL {
        Self::KEPT_LATER + 4 * B::K
    } else {
        Self::LATE
    };
    /// Additional bytes for [sets](super::sets) and a [pair](super::pair).
    pub const BYTES_OF_PAIR: u32 = Self::CROSS + 512 - Self::BYTES;

    /// Address of token 0 of an operand; its low part is `LOW` bytes later.
    pub fn operand(operand: Operand) -> u32 {
        let offset = match operand {
            Operand::LaterPendingKey if Self::LOWS_LAST => 3 * Self::PART,
            _ if Self::LOWS_LAST => operand as u32 * Self::PART,
            Operand::Step | Operand::LaterPendingKey => Self::STEP,
            Operand::LateKey => Self::LATE,
            Operand::LateQuery => Self::LATE + 2 * Self::PART,
            Operand::LateStep => Self::LATE + 4 * Self::PART,
            Operand::LaterQuery => Self::BYTES,
            _ => 2 * operand as u32 * Self::PART,
        };
        dynamic_shared_mem() + offset
    }

    /// Address of the f32 factor of token `t` of an f16 operand: k̂, or q̂ without the scale, is the token times this factor.
    pub fn lacks(operand: Operand, t: u32) -> u32 {
        Self::operand(operand) + t * Self::ROW + 2 * B::K
    }

    /// M, `[8, 8]` f32: the coefficients of earlier tokens' δ in a token's δ.
    pub fn predictions() -> u32 {
        dynamic_shared_mem() + Self::SCRATCH
    }

    /// `[8, 8]` f32: the coefficients of its own and earlier tokens' δ in a token's o.
    pub fn scores() -> u32 {
        Self::predictions() + 256
    }

    /// `[8, 8]` f32: products of the second set's k, or q, with k of the first set of a pair.
    pub fn cross(of_queries: bool) -> u32 {
        dynamic_shared_mem() + Self::CROSS + 256 * of_queries as u32
    }

    pub fn solution(set: Set) -> Solution {
        Solution(dynamic_shared_mem() + Self::SOLUTIONS + set.place() * 640)
    }

    /// Address of token 0 of `warp`'s values.
    pub fn values(set: Set, warp: u32) -> u32 {
        dynamic_shared_mem() + Self::VALUES + warp * Self::OF_WARP + set.place() * Self::SET
    }

    /// Address of the `chunk`-th 16 bytes of row `row` of `warp`'s tiles, for a K-last state. In odd rows, neighbouring groups of
    /// 4 chunks are swapped, so that neither a row nor a fragment has bank conflicts.
    pub fn state(warp: u32, row: u32, chunk: u32) -> u32 {
        let row_of_block = warp * B::ROWS + row;
        let place = chunk ^ (row & 1) << 2;
        let row_bytes = B::State::BYTES * B::K;
        dynamic_shared_mem() + Self::STATE + row_of_block * row_bytes + place * 16
    }

    /// Address of rows 4 `chunk` .. 4 `chunk` + 4 of channel `channel` of `warp`'s tiles, for a V-last f32 state. Swizzled by the
    /// channel, so that the lanes of a fragment, which differ in `channel / 4 % 4`, have no bank conflicts.
    pub fn state_of_channel(warp: u32, channel: u32, chunk: u32) -> u32 {
        let (low, high) = (channel / 4 % 2, channel / 8 % 2);
        let (line, place) = if B::ROWS == 16 {
            (channel ^ low, chunk ^ high << 1)
        } else {
            (channel, chunk ^ (2 * high + low) << 1)
        };
        let of_warp = dynamic_shared_mem() + Self::STATE + warp * Self::STATE_OF_WARP;
        of_warp + line * 4 * B::ROWS + place * 16
    }

    /// Address of the first word of the `i`-th 8 consecutive channels of the token at `token`.
    pub fn channels(token: u32, i: u32) -> u32 {
        if Self::F32_STATE {
            token + i / 4 * 64 + i % 4 / 2 * 32 + i % 2 * 8
        } else {
            token + i / 4 * 64 + i % 4 * 4
        }
    }

    /// Byte offset from [`Self::channels`] to the word of the `j`-th two of these channels.
    pub const fn word(j: u32) -> u32 {
        if Self::F32_STATE {
            j % 2 * 16 + j / 2 * 4
        } else {
            j * 16
        }
    }

    /// Byte offset, within a token of an operand, of the word of channel `i` and its neighbour.
    pub fn word_of_channel(i: u32) -> u32 {
        if Self::F32_STATE {
            Self::channels(0, i / 8) + Self::word(i % 8 / 2)
        } else {
            i / 32 * 64 + i % 8 / 2 * 16 + i % 32 / 8 * 4
        }
    }

    /// Address of a token for the teams. A lane has two halves of 16 bytes: channels 8l .. 8l+4 and 8l+4 .. 8l+8.
    pub fn team_operand(operand: TeamOperand, t: u32) -> u32 {
        let first = match operand {
            TeamOperand::PreviousKey => Self::operand(Operand::Query),
            _ => dynamic_shared_mem() + Self::CHANNELS + operand as u32 * TOKENS * 4 * B::K,
        };
        first + t * 4 * B::K
    }

    /// Address of a team's products of columns `pair` and 7 − `pair`: `[2, 2, 8]` f32. Words 0 .. 8 are p · k_t of column `pair`,
    /// 8 .. 16 its p · q_t, 16 .. 32 those of column 7 − `pair`; a product with a token before the column's own is 0. Column 7 −
    /// `pair` has no products with tokens 0 .. 4: instead words 24 .. 26 hold q · q of both columns' tokens and, with f16 states,
    /// words 26 .. 28 |Γ ⊙ q|² and 16 .. 18 |Γ ⊙ k|².
    pub fn pair(set: Set, pair: u32) -> u32 {
        dynamic_shared_mem() + Self::COLUMNS + (set.place() * 4 + pair) * 128
    }

    /// Address of p_s · k_t.
    pub fn key_product(set: Set, t: u32, s: u32) -> u32 {
        let (side, pair) = if s < 4 { (0, s) } else { (1, 7 - s) };
        Self::pair(set, pair) + side * 64 + 4 * t
    }

    /// Address of p_s · q_t.
    pub fn query_product(set: Set, t: u32, s: u32) -> u32 {
        Self::key_product(set, t, s) + 32
    }

    /// Address of q_t · q_t.
    pub fn query_square(set: Set, t: u32) -> u32 {
        let (side, pair) = if t < 4 { (0, t) } else { (1, 7 - t) };
        Self::pair(set, pair) + 96 + 4 * side
    }

    /// Addresses of |Γ ⊙ k|² and |Γ ⊙ q|² of token `t`, with f16 states.
    pub fn decayed_squares(set: Set, t: u32) -> [u32; 2] {
        let (side, pair) = if t < 4 { (0, t) } else { (1, 7 - t) };
        [64, 104].map(|first| Self::pair(set, pair) + first + 4 * side)
    }

    /// Address of Γ, `[K]` f32: the decay of each channel of S₀ up to the last token.
    pub fn kept() -> u32 {
        dynamic_shared_mem() + Self::KEPT
    }

    /// [`Self::kept`], over the second set of a pair.
    pub fn kept_later() -> u32 {
        dynamic_shared_mem() + Self::KEPT_LATER
    }

    /// Address of an `[8, 8]` f32 matrix: the coefficients of u of pending tokens 8 `half` .. 8 `half` + 8 in a new token's
    /// product of S with k, or q.
    pub fn weights(half: u32, of_queries: bool) -> u32 {
        dynamic_shared_mem() + Self::WEIGHTS + (2 * half + of_queries as u32) * 256
    }

    /// Address of u of pending token `j` and row `row` of `warp`, in elements of `bytes` bytes. Groups of 8 rows are swizzled by
    /// the token's pair, so that tokens 2c of rows r have no bank conflicts.
    pub fn update(warp: u32, j: u32, row: u32, bytes: u32) -> u32 {
        let element = (j * B::ROWS + row) ^ (j / 2 % 4 * 8);
        Self::values(Set::Previous, warp) + bytes * element
    }

    /// Address of `[K]` f32 for pending token `j`: log α, then the decay over the tokens after it.
    pub fn log_decays(j: u32) -> u32 {
        dynamic_shared_mem() + Self::LOG_DECAYS + j * 4 * B::K
    }
}
