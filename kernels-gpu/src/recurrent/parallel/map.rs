//! The dims of a block, and the map of its shared memory. Offsets in bytes.
//!
//! | from | bytes | what | written by | read by |
//! |---|---|---|---|---|
//! | 0 | 6 · 8 · ROW | tokens of k, q and the previous k, of the type of the state, each as hi and lo | workers | all, after the first barrier |
//! | `SCRATCH` | 512 | M and the scores of one solution, 8 × 8 f32 each | solver | solver |
//! | `SOLUTIONS` | 2 · 640 | [`Solution`] of the new and of the previous tokens | solver | workers, after the barrier that ends it |
//! | `VALUES` | WARPS · 2 · 8 · VALUE_ROW | v of the new and the previous tokens as they come, a warp's rows of S each; then o in f32 | a warp | that warp |
//! | `STATE` | WARPS · ROWS · (2 or 4) K | the state, a warp's rows of S each | a warp | that warp |
//! | `STEP` | 2 · 8 · ROW | KDA: what advances the state, as the tokens, bf16 | teams | workers, after their barrier |
//! | `CHANNELS` | 3 · 8 · 4 K | KDA: k, q and α of every token, f32 | workers | teams, after a barrier |
//! | `COLUMNS` | 2 · 4 · 128 | KDA: products of the new and of the previous tokens | teams | solver, after their barrier |
//! | `KEPT` | 4 K | KDA: what is left of each channel of S₀ | a team | workers, after its barrier |
//! | `WEIGHTS` | 4 · 256 | states that wait: products of pending tokens with k and q, 8 × 8 f32 each | workers | workers, after a barrier |
//! | `LATE` | 2 · 2 · 8 · ROW | KDA's states that wait: k and q with the decays of the pending tokens too | teams | workers, after their barrier |
//! | `LOG_DECAYS` | 16 · 4 K | KDA's states that wait: log α of pending tokens, then e to those of the tokens behind each | workers | workers, after a barrier |
//! | `BYTES` | 2 · 8 · ROW | GDN, more than 8 new or previous tokens: q of every other 8, as the tokens | workers | all, after a barrier |
//!
//! A token of k or q lies in *fragment order*: of each 32 channels, word 4j + c holds the j-th two of the 8 channels of lane 4r + c,
//! so that `load_matrices` gives this lane all 8 of token r. They are the channels that the lane holds of a row of S
//! ([`crate::state`]): 8c .. 8c+8 of 16-bit states; 4c .. 4c+4 and 16+4c .. 16+4c+4 of f32 states. The rows are 16 bytes longer than
//! their tokens, against bank conflicts; with f16 states the first 4 of them, of the high part, have what lacks of GDN's tokens
//! ([`Map::lacks`]).
//!
//! Of states that wait the previous tokens are the pending ones, up to 16, and a warp has room for 16 rows of u, f32, where it
//! else has that of 8 previous values. k of the later 8 has the place of what advances the state; with GDN it is a fourth operand,
//! and the low parts of all four lie behind all else.

use core::marker::PhantomData;

use super::state::StateRows;
use crate::device::shared::dynamic_shared_mem;
use crate::state::StateElement;
use crate::step::StepConstants;

/// Tokens of an operand, and rows and columns of a solution's matrices.
pub const TOKENS: u32 = 8;

/// Most pending tokens of a state that waits.
pub const MOST_PENDING: u32 = 16;

/// An operand of tokens in shared memory.
#[derive(Clone, Copy)]
pub enum Operand {
    Key = 0,
    Query = 1,
    PreviousKey = 2,
    /// KDA: k decayed up to the last token, of the tokens that the state is advanced by.
    Step = 3,
    /// States that wait, which nothing else advances: k of pending tokens 8 .. 16; that of the first 8 is
    /// [`Self::PreviousKey`].
    LaterPendingKey = 4,
    /// KDA's states that wait: k with the decays of the pending tokens too.
    LateKey = 5,
    /// KDA's states that wait: q with the decays of the pending tokens too.
    LateQuery = 6,
    /// Queries of [`Set::Later`], behind all else. Its number gives it the loaders of [`Self::Query`].
    LaterQuery = 7,
}

/// KDA's tokens as f32 in shared memory, for the teams.
#[derive(Clone, Copy)]
pub enum TeamOperand {
    Key = 0,
    Query = 1,
    Decay = 2,
    /// k of the previous tokens, where a convolution makes it together with that of the new ones: in the place of the
    /// operand of queries, which is written once the teams are done with the previous tokens.
    PreviousKey = 3,
}

/// Up to 8 tokens: those of this launch, or those of the last step. Where either are more than 8 ([`super::sets`]), sets are taken in
/// turns as [`Self::New`] and as [`Self::Later`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Set {
    New = 0,
    Previous = 1,
    /// Every other set of a launch of more than 8 tokens, in the place of the previous tokens.
    Later = 3,
}

impl Set {
    /// Its place among the two of a map.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn place(self) -> u32 {
        self as u32 % 2
    }

    /// Its keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn key(self) -> Operand {
        match self {
            Self::New => Operand::Key,
            Self::Previous | Self::Later => Operand::PreviousKey,
        }
    }

    /// Its queries; previous tokens have none.
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

    /// W, `[8, 8]`: what o takes of (v − S k̂).
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

    /// `[8]`: what is left of δ k̂ᵀ after the last token, as a factor of δ kᵀ; of a state that waits δ k̂ᵀ itself.
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
    /// Whether states of 16 bits are f32 in shared memory, where a load-time constant says so.
    const WIDENS: bool = false;
    /// Blocks that share one head's state.
    const TILES: u32 = Self::V / (Self::WARPS * Self::ROWS);
    /// Whether states wait for tokens of a ring, which are then the previous ones.
    const WAITS: bool = false;
}

/// The map of its shared memory.
pub struct Map<B>(PhantomData<B>);

impl<B: Block> Map<B> {
    /// Bytes from one token of an operand to the next.
    pub const ROW: u32 = 2 * B::K + 16;
    /// Bytes of a part of an operand.
    const PART: u32 = TOKENS * Self::ROW;
    /// Whether low parts lie behind all else: GDN's states that wait, where a launch whose tokens are bf16 has no room for them,
    /// and a multiprocessor one for four blocks.
    const LOWS_LAST: bool = B::WAITS && !B::PER_CHANNEL;
    /// From the high part of an operand to the low one.
    pub const LOW: u32 = if Self::LOWS_LAST {
        Self::LOWS
    } else {
        Self::PART
    };
    const SCRATCH: u32 = if Self::LOWS_LAST { 4 } else { 6 } * Self::PART;
    const SOLUTIONS: u32 = Self::SCRATCH + 512;
    const VALUES: u32 = Self::SOLUTIONS + if Self::LOWS_LAST { 1 } else { 2 } * 640;
    /// Bytes from one token of a warp's values to the next: 4 words more than they are, against bank conflicts.
    pub const VALUE_ROW: u32 = 4 * (B::ROWS + 4);
    /// Bytes of a set of values of a warp.
    const SET: u32 = TOKENS * Self::VALUE_ROW;
    /// Bytes of all that a warp has of values: of two sets, or of the new ones and u.
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
    /// Whether states are f16 in shared memory, and tokens that meet them.
    pub const fn is_f16(c: &StepConstants) -> bool {
        c.state_f16 != 0 && !Self::widens(c)
    }

    /// Whether states are f32 in shared memory, and of 16 bits in the pool.
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
    const LATE: u32 = Self::WEIGHTS + 4 * 256;
    const LOG_DECAYS: u32 = Self::LATE + 4 * Self::PART;
    const LOWS: u32 = Self::LATE;
    /// The bytes of low parts among [`Self::BYTES`]: unused where q, k and the keys of a ring are bf16.
    pub const BYTES_OF_LOWS: u32 = if Self::LOWS_LAST { 4 * Self::PART } else { 0 };
    /// Bytes of the map.
    pub const BYTES: u32 = if !B::WAITS {
        Self::WEIGHTS
    } else if B::PER_CHANNEL {
        Self::LOG_DECAYS + MOST_PENDING * 4 * B::K
    } else {
        Self::LOWS + Self::BYTES_OF_LOWS
    };

    /// More bytes where a launch has more than 8 new or previous tokens: [`Operand::LaterQuery`].
    pub const BYTES_OF_SETS: u32 = if B::PER_CHANNEL { 0 } else { 2 * Self::PART };

    /// Token 0 of an operand; the part that bf16 does not hold lies `LOW` behind.
    pub fn operand(operand: Operand) -> u32 {
        let offset = match operand {
            Operand::LaterPendingKey if Self::LOWS_LAST => 3 * Self::PART,
            _ if Self::LOWS_LAST => operand as u32 * Self::PART,
            Operand::Step | Operand::LaterPendingKey => Self::STEP,
            Operand::LateKey => Self::LATE,
            Operand::LateQuery => Self::LATE + 2 * Self::PART,
            Operand::LaterQuery => Self::BYTES,
            _ => 2 * operand as u32 * Self::PART,
        };
        dynamic_shared_mem() + offset
    }

    /// The f32 that token `t` of an f16 operand is to be multiplied by: k̂ or q̂, but for the scale, is the product.
    pub fn lacks(operand: Operand, t: u32) -> u32 {
        Self::operand(operand) + t * Self::ROW + 2 * B::K
    }

    /// M, `[8, 8]` f32: what a token's δ takes of the earlier ones'.
    pub fn predictions() -> u32 {
        dynamic_shared_mem() + Self::SCRATCH
    }

    /// `[8, 8]` f32: what a token's o takes of the δ of its own and the earlier ones.
    pub fn scores() -> u32 {
        Self::predictions() + 256
    }

    pub fn solution(set: Set) -> Solution {
        Solution(dynamic_shared_mem() + Self::SOLUTIONS + set.place() * 640)
    }

    /// Token 0 of the values of `warp`.
    pub fn values(set: Set, warp: u32) -> u32 {
        dynamic_shared_mem() + Self::VALUES + warp * Self::OF_WARP + set.place() * Self::SET
    }

    /// 16 bytes, the `chunk`-th, of row `row` of the tiles of `warp`, of a K-last state. Odd rows have their halves of 4 chunks
    /// exchanged in pairs, so that neither a row nor a fragment meets a bank twice.
    pub fn state(warp: u32, row: u32, chunk: u32) -> u32 {
        let row_of_block = warp * B::ROWS + row;
        let place = chunk ^ (row & 1) << 2;
        let row_bytes = B::State::BYTES * B::K;
        dynamic_shared_mem() + Self::STATE + row_of_block * row_bytes + place * 16
    }

    /// Rows 4 `chunk` .. 4 `chunk` + 4 of channel `channel` of the tiles of `warp`, of a V-last f32 state. The places depend on the
    /// channel, so that the lanes of a fragment, which differ in `channel / 4 % 4`, meet in no bank.
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

    /// The first word of 8 consecutive channels, the `i`-th such, of the token of an operand at `token`.
    pub fn channels(token: u32, i: u32) -> u32 {
        if Self::F32_STATE {
            token + i / 4 * 64 + i % 4 / 2 * 32 + i % 2 * 8
        } else {
            token + i / 4 * 64 + i % 4 * 4
        }
    }

    /// From [`Self::channels`] to the word of the `j`-th two of these channels.
    pub const fn word(j: u32) -> u32 {
        if Self::F32_STATE {
            j % 2 * 16 + j / 2 * 4
        } else {
            j * 16
        }
    }

    /// Byte, in a token of an operand, of the word of channel `i` and its neighbour.
    pub fn word_of_channel(i: u32) -> u32 {
        if Self::F32_STATE {
            Self::channels(0, i / 8) + Self::word(i % 8 / 2)
        } else {
            i / 32 * 64 + i % 8 / 2 * 16 + i % 32 / 8 * 4
        }
    }

    /// Two halves of 16 bytes a lane: of channels 8l .. 8l+4, then of 8l+4 .. 8l+8.
    pub fn team_operand(operand: TeamOperand, t: u32) -> u32 {
        let first = match operand {
            TeamOperand::PreviousKey => Self::operand(Operand::Query),
            _ => dynamic_shared_mem() + Self::CHANNELS + operand as u32 * TOKENS * 4 * B::K,
        };
        first + t * 4 * B::K
    }

    /// A team's products of columns `pair` and 7 − `pair`: `[2, 2, 8]` f32. Words 0 .. 8 are p · k_t of column `pair`, 8 .. 16 its
    /// p · q_t, 16 .. 32 those of column 7 − `pair`; a product with a token before the column's own is 0. Column 7 − `pair` has none with
    /// tokens 0 .. 4, so that words 24 .. 26 hold q · q of both columns' tokens, and with f16 states 26 .. 28 |Γ ⊙ q|² and
    /// 16 .. 18 |Γ ⊙ k|².
    pub fn pair(set: Set, pair: u32) -> u32 {
        dynamic_shared_mem() + Self::COLUMNS + (set.place() * 4 + pair) * 128
    }

    /// p_s · k_t.
    pub fn key_product(set: Set, t: u32, s: u32) -> u32 {
        let (side, pair) = if s < 4 { (0, s) } else { (1, 7 - s) };
        Self::pair(set, pair) + side * 64 + 4 * t
    }

    /// p_s · q_t.
    pub fn query_product(set: Set, t: u32, s: u32) -> u32 {
        Self::key_product(set, t, s) + 32
    }

    /// q_t · q_t.
    pub fn query_square(set: Set, t: u32) -> u32 {
        let (side, pair) = if t < 4 { (0, t) } else { (1, 7 - t) };
        Self::pair(set, pair) + 96 + 4 * side
    }

    /// Squares of Γ ⊙ k and Γ ⊙ q of token `t`, with f16 states.
    pub fn decayed_squares(set: Set, t: u32) -> [u32; 2] {
        let (side, pair) = if t < 4 { (0, t) } else { (1, 7 - t) };
        [64, 104].map(|first| Self::pair(set, pair) + first + 4 * side)
    }

    /// `[K]` f32: Γ, the decay of each channel of S₀ up to the last token.
    pub fn kept() -> u32 {
        dynamic_shared_mem() + Self::KEPT
    }

    /// `[8, 8]` f32: what a new token's product of S with k, or q, takes of the u of pending tokens 8 `half` ..
    pub fn weights(half: u32, of_queries: bool) -> u32 {
        dynamic_shared_mem() + Self::WEIGHTS + (2 * half + of_queries as u32) * 256
    }

    /// u of pending token `j` and row `row` of `warp`, of so many bytes each. 8 rows trade places with the token's pair, so that
    /// tokens 2c of rows r meet in no bank.
    pub fn update(warp: u32, j: u32, row: u32, bytes: u32) -> u32 {
        let element = (j * B::ROWS + row) ^ (j / 2 % 4 * 8);
        Self::values(Set::Previous, warp) + bytes * element
    }

    /// `[K]` f32 of pending token `j`: log α, then e to the sum of those of the tokens behind it.
    pub fn log_decays(j: u32) -> u32 {
        dynamic_shared_mem() + Self::LOG_DECAYS + j * 4 * B::K
    }
}
