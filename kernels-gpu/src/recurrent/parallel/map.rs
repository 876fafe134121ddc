//! Where things lie in a block's shared memory. Offsets in bytes.
//!
//! | from | bytes | what | written by | read by |
//! |---|---|---|---|---|
//! | 0 | 6 · 8 · ROW | tokens of k, q and the previous k, bf16, each as hi and lo | workers | all, after the first barrier |
//! | `SCRATCH` | 512 | M and the scores of one solution, 8 × 8 f32 each | solver | solver |
//! | `SOLUTIONS` | 2 · 640 | [`Solution`] of the new and of the previous tokens | solver | workers, after the barrier that ends it |
//! | `VALUES` | WARPS · 2 · 8 · VALUE_ROW | v of the new and the previous tokens as they come, a warp's rows of S each; then o in f32 | a warp | that warp |
//! | `STATE` | WARPS · TILES16 · 32 K | the state, bf16, a warp's rows of S each | a warp | that warp |
//! | `STEP` | 2 · 8 · ROW | KDA: what advances the state, as the tokens | teams | workers, after their barrier |
//! | `CHANNELS` | 3 · 8 · 4 K | KDA: k, q and α of every token, f32 | workers | teams, after a barrier |
//! | `COLUMNS` | 2 · 4 · 128 | KDA: products of the new and of the previous tokens | teams | solver, after their barrier |
//! | `KEPT` | 4 K | KDA: what is left of each channel of S₀ | a team | workers, after its barrier |
//!
//! A token of k or q lies in *fragment order*: of each 32 channels, word 4j + c holds channels 8c + 2j and 8c + 2j + 1,
//! so that `load_matrices` gives lane 4r + c of token r the channels 8c .. 8c+8, two to a word: those of the 16 bytes
//! that the lane holds of a row of S. The rows are 16 bytes longer than their tokens, against bank conflicts.

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

/// Which tokens a solution or values are of.
#[derive(Clone, Copy)]
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

/// The map of one variant.
pub struct Map<const K: u32, const WARPS: u32, const TILES16: usize>;

impl<const K: u32, const WARPS: u32, const TILES16: usize> Map<K, WARPS, TILES16> {
    /// Bytes from one token of an operand to the next.
    pub const ROW: u32 = 2 * K + 16;
    const OPERAND: u32 = TOKENS * Self::ROW;
    const SCRATCH: u32 = 6 * Self::OPERAND;
    const SOLUTIONS: u32 = Self::SCRATCH + 512;
    const VALUES: u32 = Self::SOLUTIONS + 2 * 640;
    /// Bytes from one token of a warp's values to the next: 4 words more than they are, against bank conflicts.
    pub const VALUE_ROW: u32 = 4 * (16 * TILES16 as u32 + 4);
    const STATE: u32 = Self::VALUES + WARPS * 2 * TOKENS * Self::VALUE_ROW;
    /// All of it, but for KDA.
    pub const BYTES: u32 = Self::STATE + WARPS * TILES16 as u32 * 32 * K;
    /// KDA's part: `channels.rs` has the rest of it.
    pub const STEP: u32 = Self::BYTES;

    pub fn at(offset: u32) -> u32 {
        dynamic_shared_mem() + offset
    }

    /// Token 0 of an operand; the part that bf16 does not hold lies `LOW` behind.
    pub fn operand(operand: Operand) -> u32 {
        Self::at(match operand {
            Operand::Step => Self::STEP,
            _ => 2 * operand as u32 * Self::OPERAND,
        })
    }

    /// From the high part of an operand to the low one.
    pub const LOW: u32 = Self::OPERAND;

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
        let row_of_block = warp * (16 * TILES16 as u32) + row;
        let place = chunk ^ (row & 1) << 2;
        dynamic_shared_mem() + Self::STATE + row_of_block * (2 * K) + place * 16
    }
}
