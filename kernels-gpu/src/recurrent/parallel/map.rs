//! What a block is made of, and where things lie in its shared memory. Offsets in bytes.
//!
//! | from | bytes | what | written by | read by |
//! |---|---|---|---|---|
//! | 0 | 6 · 8 · ROW | tokens of k, q and the previous k, bf16, each as hi and lo | workers | all, after the first barrier |
//! | `SCRATCH` | 512 | M and the scores of one solution, 8 × 8 f32 each | solver | solver |
//! | `SOLUTIONS` | 2 · 640 | [`Solution`] of the new and of the previous tokens | solver | workers, after the barrier that ends it |
//! | `VALUES` | WARPS · 2 · 8 · VALUE_ROW | v of the new and the previous tokens as they come, a warp's rows of S each; then o in f32 | a warp | that warp |
//! | `STATE` | WARPS · ROWS · 2 K | the state, bf16, a warp's rows of S each | a warp | that warp |
//! | `STEP` | 2 · 8 · ROW | KDA: what advances the state, as the tokens | teams | workers, after their barrier |
//! | `CHANNELS` | 3 · 8 · 4 K | KDA: k, q and α of every token, f32 | workers | teams, after a barrier |
//! | `COLUMNS` | 2 · 4 · 128 | KDA: products of the new and of the previous tokens | teams | solver, after their barrier |
//! | `KEPT` | 4 K | KDA: what is left of each channel of S₀ | a team | workers, after its barrier |
//!
//! A token of k or q lies in *fragment order*: of each 32 channels, word 4j + c holds channels 8c + 2j and 8c + 2j + 1,
//! so that `load_matrices` gives lane 4r + c of token r the channels 8c .. 8c+8, two to a word: those of the 16 bytes
//! that the lane holds of a row of S. The rows are 16 bytes longer than their tokens, against bank conflicts.

use core::marker::PhantomData;

use crate::device::shared::dynamic_shared_mem;

/// Tokens of an operand, and rows and columns of a solution's matrices.
pub const TOKENS: u32 = 8;

/// An operand of tokens in shared memory.
#[derive(Clone, Copy)]
pub enum Operand {
    Key = 0,
    Query = 1,
    PreviousKey = 2,
    /// KDA: k decayed up to the last token, of the tokens that the state is advanced by.
    Step = 3,
}

/// KDA's tokens as f32 in shared memory, for the teams.
#[derive(Clone, Copy)]
pub enum Channels {
    Key = 0,
    Query = 1,
    Decay = 2,
    /// k of the previous tokens, where a convolution makes it together with that of the new ones: in the place of the
    /// operand of queries, which is written once the teams are done with the previous tokens.
    PreviousKey = 3,
}

/// Which tokens a solution or values are of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Set {
    New = 0,
    Previous = 1,
}

impl Set {
    /// Its keys.
    #[inline(always)]
    pub fn key(self) -> Operand {
        match self {
            Self::New => Operand::Key,
            Self::Previous => Operand::PreviousKey,
        }
    }
}

/// What the solver finds for 8 tokens; all f32.
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

    /// `[8]`: what is left of δ k̂ᵀ after the last token, as a factor of δ kᵀ.
    pub fn step_factors(&self) -> u32 {
        self.0 + 576
    }

    /// What is left of S₀ after the last token.
    pub fn decay(&self) -> u32 {
        self.0 + 608
    }
}

/// What a block of one variant is made of.
pub trait Block {
    /// KDA: one decay per key channel; GDN: one per value head.
    const PER_CHANNEL: bool;
    const K: u32;
    const V: u32;
    /// Workers.
    const WARPS: u32;
    /// Rows of S of a worker.
    const ROWS: u32;
}

/// The map of its shared memory.
pub struct Map<B>(PhantomData<B>);

impl<B: Block> Map<B> {
    /// Bytes from one token of an operand to the next.
    pub const ROW: u32 = 2 * B::K + 16;
    /// From the high part of an operand to the low one.
    pub const LOW: u32 = TOKENS * Self::ROW;
    const SCRATCH: u32 = 6 * Self::LOW;
    const SOLUTIONS: u32 = Self::SCRATCH + 512;
    const VALUES: u32 = Self::SOLUTIONS + 2 * 640;
    /// Bytes from one token of a warp's values to the next: 4 words more than they are, against bank conflicts.
    pub const VALUE_ROW: u32 = 4 * (B::ROWS + 4);
    const STATE: u32 = Self::VALUES + B::WARPS * 2 * TOKENS * Self::VALUE_ROW;
    const STEP: u32 = Self::STATE + B::WARPS * B::ROWS * 2 * B::K;
    const CHANNELS: u32 = Self::STEP + 2 * Self::LOW;
    const COLUMNS: u32 = Self::CHANNELS + 3 * TOKENS * 4 * B::K;
    const KEPT: u32 = Self::COLUMNS + 2 * 4 * 128;
    /// All of it.
    pub const BYTES: u32 = if B::PER_CHANNEL {
        Self::KEPT + 4 * B::K
    } else {
        Self::STEP
    };

    /// Token 0 of an operand; the part that bf16 does not hold lies `LOW` behind.
    pub fn operand(operand: Operand) -> u32 {
        let offset = match operand {
            Operand::Step => Self::STEP,
            _ => 2 * operand as u32 * Self::LOW,
        };
        dynamic_shared_mem() + offset
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
        Solution(dynamic_shared_mem() + Self::SOLUTIONS + set as u32 * 640)
    }

    /// Token 0 of the values of `warp`.
    pub fn values(set: Set, warp: u32) -> u32 {
        dynamic_shared_mem() + Self::VALUES + (warp * 2 + set as u32) * (TOKENS * Self::VALUE_ROW)
    }

    /// 8 channels, the `chunk`-th, of row `row` of the tiles of `warp`. Odd rows have their halves of 4 chunks
    /// exchanged in pairs, so that neither a row nor a fragment meets a bank twice.
    pub fn state(warp: u32, row: u32, chunk: u32) -> u32 {
        let row_of_block = warp * B::ROWS + row;
        let place = chunk ^ (row & 1) << 2;
        dynamic_shared_mem() + Self::STATE + row_of_block * (2 * B::K) + place * 16
    }

    /// Two halves of 16 bytes a lane: of channels 8l .. 8l+4, then of 8l+4 .. 8l+8.
    pub fn channels(channels: Channels, t: u32) -> u32 {
        let first = match channels {
            Channels::PreviousKey => Self::operand(Operand::Query),
            _ => dynamic_shared_mem() + Self::CHANNELS + channels as u32 * TOKENS * 4 * B::K,
        };
        first + t * 4 * B::K
    }

    /// What a team finds for columns `pair` and 7 − `pair` of the products: `[2, 2, 8]` f32, of each column its
    /// products with k and q of every token, 0 before its own. In the place of the second column's products with the
    /// first two q are q · q of both columns' tokens.
    pub fn pair(set: Set, pair: u32) -> u32 {
        dynamic_shared_mem() + Self::COLUMNS + (set as u32 * 4 + pair) * 128
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

    /// `[K]` f32: what is left of each channel of S₀ after the last token.
    pub fn kept() -> u32 {
        dynamic_shared_mem() + Self::KEPT
    }
}
