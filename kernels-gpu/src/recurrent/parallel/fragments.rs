//! Tensor-core products of matrices whose elements are distributed over a warp's lanes.
//!
//! bf16 factors are used unchanged; any other value x is split as bf16(x) + bf16(x − bf16(x)), with a relative error of 2⁻¹⁷.
//!
//! Both factors of a product have one type. Factors of an f16 state are f16 too, scaled by a power of two ([`power`]) because f16
//! has few exponents: 16-bit values stay exact except for elements below 2⁻¹⁶ of their vector, and f16(x) + f16(x − f16(x)) has a
//! relative error of 2⁻²².

use super::map::{Block, Map, Operand};
use crate::constants::Element;
use crate::device::float::{b16x2_to_f32, fma, maximum, pack_b16x2, pack_bf16x2, pack_f16x2};
use crate::device::shared::{
    load_matrices, load_matrices_transposed, load_shared_b64, store_shared_b32,
};
use crate::device::warp::{
    FULL_MASK, lane_id, mma_m16n8k16_b16, mma_m16n8k16_bf16, sync_warp, warp_shuffle_xor,
};
use crate::math::each::each;
use crate::math::elements::Raw;
use crate::math::power;

/// 32 channels of 16 rows of S, two to a word: this lane's words of rows r and r + 8.
pub type Fragment = [[u32; 4]; 2];

/// Packs two values as bf16 or f16. Not clamped to finite values, unlike a state's: infinite factors make NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pack(x: f32, y: f32, is_f16: bool) -> u32 {
    if is_f16 {
        pack_f16x2(x, y)
    } else {
        pack_bf16x2(x, y)
    }
}

/// Two values as two words of bf16, or of f16, whose sum they are.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn split(x: f32, y: f32, is_f16: bool) -> [u32; 2] {
    let high = pack(x, y, is_f16);
    let [x_high, y_high] = b16x2_to_f32(high, is_f16);
    [high, pack(x - x_high, y - y_high, is_f16)]
}

/// `sum` + rows · columnsᵀ over 32 channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_products(sum: [f32; 4], rows: Fragment, columns: [u32; 4], is_f16: bool) -> [f32; 4] {
    let [x, y] = rows;
    let (first, second) = ([columns[0], columns[1]], [columns[2], columns[3]]);
    let sum = mma_m16n8k16_b16([x[0], y[0], x[1], y[1]], first, sum, is_f16);
    mma_m16n8k16_b16([x[2], y[2], x[3], y[3]], second, sum, is_f16)
}

/// 8 tokens of k or q in shared memory.
#[derive(Clone, Copy)]
pub struct Tokens8 {
    /// Address of the row that this lane loads.
    address: u32,
    low: u32,
    /// Whether there is a low part: not for bf16 tokens, nor for f16 tokens used as f16.
    split: bool,
    is_f16: bool,
}

/// 32 channels of 8 tokens.
#[derive(Clone, Copy)]
pub struct TokenFragment {
    high: [u32; 4],
    low: [u32; 4],
    split: bool,
    is_f16: bool,
}

/// Whether tokens of type `element` have a low part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn splits(element: u32, is_f16: bool) -> bool {
    if is_f16 {
        element == Element::F32 as u32
    } else {
        element != Element::Bf16 as u32
    }
}

impl Tokens8 {
    /// The tokens of `operand`, given as `element`s; in shared memory they are f16 if `is_f16`, else bf16.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new<B: Block>(operand: Operand, element: u32, is_f16: bool) -> Self {
        let (row, matrix) = (lane_id() % 8, lane_id() / 8);
        Self {
            address: Map::<B>::operand(operand) + row * Map::<B>::ROW + matrix * 16,
            low: Map::<B>::LOW,
            split: splits(element, is_f16),
            is_f16,
        }
    }

    /// Channels 32 `fragment` .. 32 `fragment` + 32. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn fragment(self, fragment: usize) -> TokenFragment {
        let address = self.address + 64 * fragment as u32;
        TokenFragment {
            high: load_matrices(address),
            low: if self.split {
                load_matrices(address + self.low)
            } else {
                [0; 4]
            },
            split: self.split,
            is_f16: self.is_f16,
        }
    }

    /// [`Self::fragment`], transposed: word j has tokens 2c and 2c + 1 of column r of the j-th of a fragment's four products in
    /// [`Steps::advance`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn channels(self, fragment: usize) -> TokenFragment {
        let address = self.address + 64 * fragment as u32;
        TokenFragment {
            high: load_matrices_transposed(address),
            low: if self.split {
                load_matrices_transposed(address + self.low)
            } else {
                [0; 4]
            },
            split: self.split,
            is_f16: self.is_f16,
        }
    }
}

impl TokenFragment {
    /// `sum` + S · tokensᵀ for the 16 rows of S in `state`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn times_state(self, sum: [f32; 4], state: Fragment) -> [f32; 4] {
        let sum = add_products(sum, state, self.high, self.is_f16);
        if self.split {
            add_products(sum, state, self.low, self.is_f16)
        } else {
            sum
        }
    }

    /// `sum` + S · tokensᵀ, of 16 rows of f32 S in split form, high and low. Products of two low parts are left out: 2⁻¹⁸ of the
    /// whole.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn times_split_state(self, sum: [f32; 4], [high, low]: [Fragment; 2]) -> [f32; 4] {
        let sum = add_products(sum, high, self.high, false);
        let sum = add_products(sum, low, self.high, false);
        if self.split {
            add_products(sum, high, self.low, false)
        } else {
            sum
        }
    }

    /// `sum` + [first; second] · selfᵀ: rows r from `first`, rows r + 8 from `second`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn gram(self, sum: [f32; 4], first: Self, second: Self) -> [f32; 4] {
        let is_f16 = self.is_f16;
        let mut sum = add_products(sum, [first.high, second.high], self.high, is_f16);
        if first.split || second.split {
            sum = add_products(sum, [first.low, second.low], self.high, is_f16);
        }
        if self.split {
            sum = add_products(sum, [first.high, second.high], self.low, is_f16);
        }
        sum
    }

    /// No tokens: zeros.
    pub const NONE: Self = Self {
        high: [0; 4],
        low: [0; 4],
        split: false,
        is_f16: false,
    };
}

/// 16 rows of 8 f32 in split form, as the left factor of a product: rows of S times tokens.
#[derive(Clone, Copy)]
pub struct Split([u32; 4]);

impl Split {
    pub const ZERO: Self = Self([0; 4]);

    /// Splits a product's accumulators into bf16.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(product: [f32; 4]) -> Self {
        Self::of(product, false)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of([a, b, c, d]: [f32; 4], is_f16: bool) -> Self {
        let [top, top_low] = split(a, b, is_f16);
        let [bottom, bottom_low] = split(c, d, is_f16);
        Self([top, bottom, top_low, bottom_low])
    }

    /// `sum` + self · matrixᵀ, in bf16.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn times(self, sum: [f32; 4], matrix: SplitMatrix) -> [f32; 4] {
        let sum = mma_m16n8k16_bf16(self.0, [matrix.high; 2], sum);
        mma_m16n8k16_bf16(self.0, [matrix.low; 2], sum)
    }
}

/// δ of 16 rows of S, as factors of 8 tokens of k.
#[derive(Clone, Copy)]
pub struct Steps {
    /// In the type of the tokens; for f16 scaled by a power of two for each row.
    split: Split,
    /// The inverse powers of rows r and r + 8.
    inverses: [f32; 2],
}

impl Steps {
    pub const ZERO: Self = Self {
        split: Split::ZERO,
        inverses: [1.0; 2],
    };

    /// Splits a product's accumulators into the type of the tokens. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new([a, b, c, d]: [f32; 4], k: Tokens8) -> Self {
        if !k.is_f16 {
            return Self {
                split: Split::new([a, b, c, d]),
                inverses: [1.0; 2],
            };
        }
        let [[p, p_inverse], [q, q_inverse]] = [[a, b], [c, d]].map(|[x, y]| {
            let mut largest = maximum(x.abs(), y.abs());
            largest = maximum(largest, warp_shuffle_xor(largest, 1));
            largest = maximum(largest, warp_shuffle_xor(largest, 2));
            power::of_exponent((largest.to_bits() >> 23).clamp(1, 253))
        });
        Self {
            split: Split::of([a * p, b * p, c * q, d * q], true),
            inverses: [p_inverse, q_inverse],
        }
    }

    /// S diag(decays) + steps · kᵀ, for one set after the other, on one fragment of S in f16 or bf16, rounded once. All lanes of
    /// the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn advance<const SETS: usize>(
        (state, is_f16): (Fragment, bool),
        sets: [(Self, [f32; 8], TokenFragment); SETS],
    ) -> Fragment {
        let mut next = [[0; 4]; 2];
        let mut j = 0;
        if is_f16 {
            // A load fence: docs/compiler.md.
            sync_warp(FULL_MASK);
            while j < 4 {
                let mut sum = [0.0; 4];
                each!(set in 0..SETS => {
                    let (steps, decays, k) = sets[set];
                    let Split(factors) = steps.split;
                    let [p, q] = steps.inverses;
                    let kept = if set == 0 {
                        Self::kept(state, true, decays, j)
                    } else {
                        Self::decayed(sum, decays, j)
                    };
                    sum = if k.is_f16 { [0.0; 4] } else { kept };
                    sum = mma_m16n8k16_b16(factors, [k.high[j]; 2], sum, k.is_f16);
                    if k.split {
                        sum = mma_m16n8k16_b16(factors, [k.low[j]; 2], sum, k.is_f16);
                    }
                    if k.is_f16 {
                        sum[0] = fma(sum[0], p, kept[0]);
                        sum[1] = fma(sum[1], p, kept[1]);
                        sum[2] = fma(sum[2], q, kept[2]);
                        sum[3] = fma(sum[3], q, kept[3]);
                    }
                });
                next[0][j] = pack_b16x2(sum[0], sum[1], true);
                next[1][j] = pack_b16x2(sum[2], sum[3], true);
                j += 1;
            }
        } else {
            while j < 4 {
                let mut sum = [0.0; 4];
                each!(set in 0..SETS => {
                    let (steps, decays, k) = sets[set];
                    let Split(factors) = steps.split;
                    sum = if set == 0 {
                        Self::kept(state, false, decays, j)
                    } else {
                        Self::decayed(sum, decays, j)
                    };
                    sum = mma_m16n8k16_bf16(factors, [k.high[j]; 2], sum);
                    if k.split {
                        sum = mma_m16n8k16_bf16(factors, [k.low[j]; 2], sum);
                    }
                });
                next[0][j] = pack_bf16x2(sum[0], sum[1]);
                next[1][j] = pack_bf16x2(sum[2], sum[3]);
                j += 1;
            }
        }
        next
    }

    /// S diag(decays) + self · kᵀ on one fragment of S, which is f32: the sum over tokens, then one addition. All lanes of the warp call
    /// it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn advance_f32(
        self,
        state: [[f32; 8]; 2],
        decays: [f32; 8],
        k: TokenFragment,
    ) -> [[f32; 8]; 2] {
        let Split(steps) = self.split;
        let mut next = [[0.0; 8]; 2];
        each!(j in 0..4 => {
            let mut sum = mma_m16n8k16_bf16(steps, [k.high[j]; 2], [0.0; 4]);
            if k.split {
                sum = mma_m16n8k16_bf16(steps, [k.low[j]; 2], sum);
            }
            each!(i in 0..4 => {
                let (half, element) = (i / 2, 2 * j + i % 2);
                next[half][element] = fma(state[half][element], decays[element], sum[i]);
            });
        });
        next
    }

    /// S diag(decays) for the `j`-th two of a lane's channels of a fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept(state: Fragment, is_f16: bool, decays: [f32; 8], j: usize) -> [f32; 4] {
        let [a, b] = b16x2_to_f32(state[0][j], is_f16);
        let [c, d] = b16x2_to_f32(state[1][j], is_f16);
        let (x, y) = (decays[2 * j], decays[2 * j + 1]);
        [x * a, y * b, x * c, y * d]
    }

    /// `sum` times the decays of the `j`-th two of a lane's channels of a fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decayed([a, b, c, d]: [f32; 4], decays: [f32; 8], j: usize) -> [f32; 4] {
        let (x, y) = (decays[2 * j], decays[2 * j + 1]);
        [x * a, y * b, x * c, y * d]
    }
}

impl Split {
    /// S diag(decays) + Σ steps · kᵀ on one fragment of S in bf16, rounded. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn flush<const SETS: usize>(
        state: Fragment,
        decays: [f32; 8],
        steps: [(Self, TokenFragment); SETS],
    ) -> Fragment {
        // A load fence: docs/compiler.md.
        sync_warp(FULL_MASK);
        let mut next = [[0; 4]; 2];
        each!(j in 0..4 => {
            let mut sum = Steps::kept(state, false, decays, j);
            each!(set in 0..SETS => {
                let (step, k) = steps[set];
                sum = mma_m16n8k16_bf16(step.0, [k.high[j]; 2], sum);
                if k.split {
                    sum = mma_m16n8k16_bf16(step.0, [k.low[j]; 2], sum);
                }
            });
            next[0][j] = pack_bf16x2(sum[0], sum[1]);
            next[1][j] = pack_bf16x2(sum[2], sum[3]);
        });
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
    /// Loads the matrix in shared memory at `address`, times `factor`, which may differ from row to row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(address: u32, factor: f32) -> Self {
        // SAFETY: the caller's promise; these are this lane's two elements.
        let [x, y] = unsafe { load_shared_b64(address + 8 * lane_id()) }.map(f32::from_bits);
        let [high, low] = split(factor * x, factor * y, false);
        Self { high, low }
    }
}

/// Stores 8 channels of a token in fragment order, in split form unless they are bf16. `address` is that of this lane's first
/// word of the token, and `low` the distance from the high part to the low part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_channels<B: Block>(raw: Raw<8>, element: u32, address: u32, low: u32) {
    let values = raw.to_f32(element);
    each!(j in 0..4 => {
        let word = address + Map::<B>::word(j as u32);
        if element == Element::Bf16 as u32 {
            store_shared_b32(word, raw.0[j]);
        } else {
            store_words(split(values[2 * j], values[2 * j + 1], false), word, low);
        }
    });
}

/// Stores 8 channels of a token, given as `element`s, in fragment order as f16. `address` and `low` are as in [`store_channels`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_f16_channels(values: [f32; 8], element: u32, address: u32, low: u32) {
    each!(j in 0..4 => {
        let (x, y) = (values[2 * j], values[2 * j + 1]);
        let word = address + 16 * j as u32;
        if splits(element, true) {
            store_words(split(x, y, true), word, low);
        } else {
            store_shared_b32(word, pack_f16x2(x, y));
        }
    });
}

/// Stores two channels of a token in split form.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_words([high, rest]: [u32; 2], address: u32, low: u32) {
    store_shared_b32(address, high);
    store_shared_b32(address + low, rest);
}
