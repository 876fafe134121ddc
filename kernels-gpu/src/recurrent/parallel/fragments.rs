//! Products on the tensor cores, of matrices whose elements are spread over a warp's lanes.
//!
//! bf16 factors are taken as they are; any other value x as bf16(x) + bf16(x − bf16(x)), good to 2⁻¹⁷.

use super::map::{Block, Map, Operand};
use crate::constants::Element;
use crate::device::float::pack_bf16x2;
use crate::device::shared::{
    load_matrices, load_matrices_transposed, load_shared_b64, store_shared_b32,
};
use crate::device::warp::{lane_id, mma_m16n8k16_bf16};
use crate::math::elements::{Raw, bf16_to_f32};

/// 32 channels of 16 rows, two to a word: rows r and r + 8.
pub type Piece = [[u32; 4]; 2];

/// The two bf16 of a word.
#[inline(always)]
pub fn unpack(word: u32) -> [f32; 2] {
    [bf16_to_f32(word as u16), f32::from_bits(word & 0xffff_0000)]
}

/// Two values as two words of bf16 that add up to them.
#[inline(always)]
pub fn split(x: f32, y: f32) -> [u32; 2] {
    let high = pack_bf16x2(x, y);
    let [x_high, y_high] = unpack(high);
    [high, pack_bf16x2(x - x_high, y - y_high)]
}

/// `sum` + rows · columnsᵀ over 32 channels.
#[inline(always)]
fn add_products(sum: [f32; 4], rows: Piece, columns: [u32; 4]) -> [f32; 4] {
    let [x, y] = rows;
    let sum = mma_m16n8k16_bf16([x[0], y[0], x[1], y[1]], [columns[0], columns[1]], sum);
    mma_m16n8k16_bf16([x[2], y[2], x[3], y[3]], [columns[2], columns[3]], sum)
}

/// 8 tokens of k or q in shared memory.
#[derive(Clone, Copy)]
pub struct Tokens8 {
    /// Of the row that this lane loads.
    address: u32,
    low: u32,
    /// Whether the low part is there: not of bf16 tokens.
    split: bool,
}

/// 32 channels of 8 tokens.
#[derive(Clone, Copy)]
pub struct TokenPiece {
    high: [u32; 4],
    low: [u32; 4],
    split: bool,
}

impl Tokens8 {
    #[inline(always)]
    pub fn new<B: Block>(operand: Operand, element: u32) -> Self {
        let (row, matrix) = (lane_id() % 8, lane_id() / 8);
        Self {
            address: Map::<B>::operand(operand) + row * Map::<B>::ROW + matrix * 16,
            low: Map::<B>::LOW,
            split: element != Element::Bf16 as u32,
        }
    }

    /// Channels 32 `piece` ... All lanes of the warp call it.
    ///
    /// # Safety
    /// The tokens are there.
    #[inline(always)]
    pub unsafe fn piece(self, piece: usize) -> TokenPiece {
        let address = self.address + 64 * piece as u32;
        // SAFETY: the caller's promise.
        unsafe {
            TokenPiece {
                high: load_matrices(address),
                low: if self.split {
                    load_matrices(address + self.low)
                } else {
                    [0; 4]
                },
                split: self.split,
            }
        }
    }

    /// As [`Self::piece`], channel by channel: word j is of tokens 2c and 2c + 1 and column r of the j-th of the four
    /// products that [`advance`] makes of a piece.
    ///
    /// # Safety
    /// The tokens are there.
    #[inline(always)]
    pub unsafe fn channels(self, piece: usize) -> TokenPiece {
        let address = self.address + 64 * piece as u32;
        // SAFETY: the caller's promise.
        unsafe {
            TokenPiece {
                high: load_matrices_transposed(address),
                low: if self.split {
                    load_matrices_transposed(address + self.low)
                } else {
                    [0; 4]
                },
                split: self.split,
            }
        }
    }
}

impl TokenPiece {
    /// `sum` + S · tokensᵀ, of the 16 rows of S in `state`.
    #[inline(always)]
    pub fn times_state(self, sum: [f32; 4], state: Piece) -> [f32; 4] {
        let sum = add_products(sum, state, self.high);
        if self.split {
            add_products(sum, state, self.low)
        } else {
            sum
        }
    }

    /// `sum` + [first; second] · selfᵀ: rows r are of `first`, rows r + 8 of `second`.
    #[inline(always)]
    pub fn gram(self, sum: [f32; 4], first: Self, second: Self) -> [f32; 4] {
        let mut sum = add_products(sum, [first.high, second.high], self.high);
        if first.split || second.split {
            sum = add_products(sum, [first.low, second.low], self.high);
        }
        if self.split {
            sum = add_products(sum, [first.high, second.high], self.low);
        }
        sum
    }

    /// No tokens: zeros.
    pub const NONE: Self = Self {
        high: [0; 4],
        low: [0; 4],
        split: false,
    };
}

/// 16 rows of 8 f32 in split form, as the left factor of a product: rows of S by tokens.
#[derive(Clone, Copy)]
pub struct Split([u32; 4]);

impl Split {
    pub const ZERO: Self = Self([0; 4]);

    /// Of a product's result.
    #[inline(always)]
    pub fn new([a, b, c, d]: [f32; 4]) -> Self {
        let ([top, top_low], [bottom, bottom_low]) = (split(a, b), split(c, d));
        Self([top, bottom, top_low, bottom_low])
    }

    /// `sum` + self · matrixᵀ.
    #[inline(always)]
    pub fn times(self, sum: [f32; 4], matrix: SplitMatrix) -> [f32; 4] {
        let sum = mma_m16n8k16_bf16(self.0, [matrix.high; 2], sum);
        mma_m16n8k16_bf16(self.0, [matrix.low; 2], sum)
    }

    /// S diag(decays) + self · kᵀ on one piece of S, rounded.
    #[inline(always)]
    pub fn advance(self, state: Piece, decays: [f32; 8], k: TokenPiece) -> Piece {
        let mut next = [[0; 4]; 2];
        let mut j = 0;
        while j < 4 {
            let ([a, b], [c, d]) = (unpack(state[0][j]), unpack(state[1][j]));
            let (x, y) = (decays[2 * j], decays[2 * j + 1]);
            let sum = [x * a, y * b, x * c, y * d];
            let mut sum = mma_m16n8k16_bf16(self.0, [k.high[j]; 2], sum);
            if k.split {
                sum = mma_m16n8k16_bf16(self.0, [k.low[j]; 2], sum);
            }
            next[0][j] = pack_bf16x2(sum[0], sum[1]);
            next[1][j] = pack_bf16x2(sum[2], sum[3]);
            j += 1;
        }
        next
    }
}

/// An 8 × 8 matrix of f32 in split form: this lane's elements of row r.
#[derive(Clone, Copy)]
pub struct SplitMatrix {
    high: u32,
    low: u32,
}

impl SplitMatrix {
    /// The matrix in shared memory at `address`, times `factor`, which may differ from row to row.
    ///
    /// # Safety
    /// It is there.
    #[inline(always)]
    pub unsafe fn load(address: u32, factor: f32) -> Self {
        // SAFETY: the caller's promise: this lane's two elements.
        let [x, y] = unsafe { load_shared_b64(address + 8 * lane_id()) }.map(f32::from_bits);
        let [high, low] = split(factor * x, factor * y);
        Self { high, low }
    }
}

/// Stores 8 channels of a token in fragment order, in split form unless they are bf16. `address` is that of the token's
/// first word for this lane, and `low` the distance to the low part.
///
/// # Safety
/// The places are this lane's.
#[inline(always)]
pub unsafe fn store_channels(raw: Raw<8>, element: u32, address: u32, low: u32) {
    let values = raw.to_f32(element);
    let mut j = 0;
    while j < 4 {
        let word = address + 16 * j as u32;
        // SAFETY: the caller's promise.
        unsafe {
            if element == Element::Bf16 as u32 {
                store_shared_b32(word, raw.0[j]);
            } else {
                store_words(split(values[2 * j], values[2 * j + 1]), word, low);
            }
        }
        j += 1;
    }
}

/// Stores two channels of a token in split form.
///
/// # Safety
/// The places are this lane's.
#[inline(always)]
pub unsafe fn store_words([high, rest]: [u32; 2], address: u32, low: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        store_shared_b32(address, high);
        store_shared_b32(address + low, rest);
    }
}
