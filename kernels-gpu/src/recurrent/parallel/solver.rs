//! The warp that works on tokens alone: gates, Gram matrices and the triangular solution, in f32, while the state is being
//! copied. It reads no row of S.

use super::fragments::{TokenFragment, Tokens8};
use super::gates::{GateInputs, Gates};
use super::map::{Block, Map, Set};
use crate::device::float::{exp2, fma, rsqrt};
use crate::device::shared::{
    load_shared_b32, load_shared_b128, store_shared_b32, store_shared_b64,
};
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_idx};
use crate::math::each::each;
use crate::math::power;
use crate::step::StepConstants;

/// This lane's elements of the tokens' Gram matrices: row r, columns 2c and 2c + 1.
struct Gram {
    /// k · k
    keys: [f32; 2],
    /// q · k
    queries: [f32; 2],
    /// Norm factors of k (k̂ = k · factor) of tokens r, 2c and 2c + 1.
    key_norms: [f32; 3],
    /// Norm factor of q (q̂ = q · factor) of token r.
    query_norm: f32,
    /// Norm factors of k and q; those of token t are valid in lane 4t + t/2.
    own_norms: [f32; 2],
    /// The inverse powers of two of k and q of token r: 1 except for KDA with f16 states.
    own_inverses: [f32; 2],
}

/// Maximum of K / 32.
pub const MOST_FRAGMENTS: usize = 4;

/// Sums the parts, pair by pair.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sum(parts: [[f32; 4]; MOST_FRAGMENTS]) -> [f32; 4] {
    let [a, b, c, d] = parts;
    let mut sum = [0.0; 4];
    each!(i in 0..4 => sum[i] = (a[i] + b[i]) + (c[i] + d[i]));
    sum
}

/// `value` of the lane that holds token `t`'s diagonal element.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_diagonal(value: f32, t: u32) -> f32 {
    warp_shuffle_idx(value, 4 * t + t / 2)
}

impl Gram {
    /// Computes the products from the tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn of_tokens<B: Block>(c: &StepConstants, set: Set) -> Self {
        let is_f16 = Map::<B>::is_f16(c);
        let keys = Tokens8::new::<B>(set.key(), c.k_element, is_f16);
        let queries = Tokens8::new::<B>(set.query(), c.q_element, is_f16);
        // A sum for each fragment: four short chains instead of a long one.
        let (mut with_keys, mut with_queries) =
            ([[0.0; 4]; MOST_FRAGMENTS], [[0.0; 4]; MOST_FRAGMENTS]);
        each!(fragment in 0..(B::K / 32) as usize => {
            let k = keys.fragment(fragment);
            let q = if set.has_queries() {
                queries.fragment(fragment)
            } else {
                TokenFragment::NONE
            };
            with_keys[fragment] = k.gram(with_keys[fragment], k, q);
            if set.has_queries() {
                with_queries[fragment] = q.gram(with_queries[fragment], k, q);
            }
        });
        let (with_keys, with_queries) = (sum(with_keys), sum(with_queries));
        let odd = lane_id() / 4 % 2 == 1;
        let query = if odd {
            with_queries[3]
        } else {
            with_queries[2]
        };
        let keys = [with_keys[0], with_keys[1]];
        let queries = [with_keys[2], with_keys[3]];
        if is_f16 {
            let t = lane_id() / 4;
            let scale = f32::from_bits(c.scale);
            let load = |address| f32::from_bits(load_shared_b32(address));
            let key_norm = load(Map::<B>::lacks(set.key(), t));
            let query_norm = if set.has_queries() {
                load(Map::<B>::lacks(set.query(), t)) * scale
            } else {
                scale
            };
            return Self::with_norms([keys, queries], [key_norm, query_norm], [1.0; 2]);
        }
        Self::new(c, [keys, queries], query, [1.0; 2])
    }

    /// Loads the teams' products, decayed channel by channel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn of_columns<B: Block>(c: &StepConstants, set: Set) -> Self {
        let (r, s) = (lane_id() / 4, lane_id() % 4 * 2);
        let load = |address| f32::from_bits(load_shared_b32(address));
        let keys = [s, s + 1].map(|s| load(Map::<B>::key_product(set, r, s)));
        let queries = [s, s + 1].map(|s| load(Map::<B>::query_product(set, r, s)));
        let query = load(Map::<B>::query_square(set, r));
        let own_inverses = if Map::<B>::is_f16(c) {
            Map::<B>::decayed_squares(set, r).map(|address| {
                let [_, inverse] = power::of_root(load(address));
                inverse
            })
        } else {
            [1.0; 2]
        };
        Self::new(c, [keys, queries], query, own_inverses)
    }

    /// `query` is q · q of token r.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(
        c: &StepConstants,
        [keys, queries]: [[f32; 2]; 2],
        query: f32,
        own_inverses: [f32; 2],
    ) -> Self {
        let r = lane_id() / 4;
        let key = if r % 2 == 1 { keys[1] } else { keys[0] };
        let scale = f32::from_bits(c.scale);
        let own_norms = if c.l2norm != 0 {
            [rsqrt(key + 1e-6), rsqrt(query + 1e-6) * scale]
        } else {
            [1.0, scale]
        };
        Self::with_norms([keys, queries], own_norms, own_inverses)
    }

    /// `own_norms` are those of token r, valid at least in lane 4r + r/2.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn with_norms(
        [keys, queries]: [[f32; 2]; 2],
        own_norms: [f32; 2],
        own_inverses: [f32; 2],
    ) -> Self {
        let (r, column) = (lane_id() / 4, lane_id() % 4 * 2);
        Self {
            keys,
            queries,
            key_norms: [r, column, column + 1].map(|t| of_diagonal(own_norms[0], t)),
            query_norm: of_diagonal(own_norms[1], r),
            own_norms,
            own_inverses,
        }
    }
}

/// Solves for δ of the tokens of `set`, of which `count` exist, and stores the [`super::map::Solution`]. All lanes of the warp
/// call it.
///
/// # Safety
/// The tokens are in shared memory, and this warp may write the solution and the scratch.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn solve<B: Block>(c: &StepConstants, inputs: GateInputs, set: Set, count: u32) {
    let gates = inputs.values::<B>(c, count);
    let gram = if B::PER_CHANNEL {
        Gram::of_columns::<B>(c, set)
    } else {
        Gram::of_tokens::<B>(c, set)
    };
    store_factors::<B>(c, &gram, gates, set);
    // The previous set's matrices have been read.
    sync_warp(FULL_MASK);
    store_matrices::<B>(&gram, gates, set);
    sync_warp(FULL_MASK);
    substitute::<B>(gates, set);
}

/// The factors of each token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_factors<B: Block>(c: &StepConstants, gram: &Gram, gates: Gates, set: Set) {
    let solution = Map::<B>::solution(set);
    let t = lane_id() % 8;
    let [key_norm, query_norm] = gram.own_norms.map(|norm| of_diagonal(norm, t));
    let last = warp_shuffle_idx(gates.decay, 7);
    let decay = exp2(gates.decay);
    let (mut key_factor, mut query_factor) = (decay * key_norm, decay * query_norm);
    if B::PER_CHANNEL && Map::<B>::is_f16(c) {
        let [key, query] = gram.own_inverses.map(|inverse| of_diagonal(inverse, t));
        (key_factor, query_factor) = (key_factor * key, query_factor * query);
    }
    if lane_id() < 8 {
        let place = 4 * t;
        store_shared_b32(solution.key_factors() + place, key_factor.to_bits());
        let step = if B::WAITS {
            key_norm
        } else {
            exp2(last - gates.decay) * key_norm
        };
        store_shared_b32(solution.step_factors() + place, step.to_bits());
        if set.has_queries() {
            store_shared_b32(solution.query_factors() + place, query_factor.to_bits());
        }
        if t == 7 {
            store_shared_b32(solution.decay(), decay.to_bits());
        }
    }
}

/// (a): M[r, s] = −β_r e^(g_r − g_s) k̂_r·k̂_s for r > s, and the scores e^(g_r − g_s) q̂_r·k̂_s for r ≥ s; else 0. The decay is
/// one exponential of a difference, because the product of a vanishing and an overflowing one could be NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_matrices<B: Block>(gram: &Gram, gates: Gates, set: Set) {
    let (r, column) = (lane_id() / 4, lane_id() % 4 * 2);
    let [row_norm, norms @ ..] = gram.key_norms;
    let (decay, beta) = (
        warp_shuffle_idx(gates.decay, r),
        warp_shuffle_idx(gates.beta, r),
    );
    let (mut predictions, mut scores) = ([0; 2], [0; 2]);
    each!(i in 0..2 => {
        let s = column + i as u32;
        // The norms come first: their products with vanishing decays would lose digits.
        let factor = exp2(decay - warp_shuffle_idx(gates.decay, s));
        if r > s {
            let product = gram.keys[i] * norms[i] * row_norm;
            predictions[i] = (product * factor * -beta).to_bits();
        }
        if r >= s {
            let product = gram.queries[i] * norms[i] * gram.query_norm;
            scores[i] = (product * factor).to_bits();
        }
    });
    let place = 8 * lane_id();
    store_shared_b64(Map::<B>::predictions() + place, predictions);
    if set.has_queries() {
        store_shared_b64(Map::<B>::scores() + place, scores);
    }
}

/// Row `row` of an 8 × 8 matrix in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load_row(matrix: u32, row: usize) -> [f32; 8] {
    let address = matrix + 32 * row as u32;
    let [[a, b, c, d], [e, f, g, h]] = [load_shared_b128(address), load_shared_b128(address + 16)];
    [a, b, c, d, e, f, g, h].map(f32::from_bits)
}

/// (a), (d): T = (I − M)⁻¹ diag(β), one column per lane, and W = scores · T.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn substitute<B: Block>(gates: Gates, set: Set) {
    let solution = Map::<B>::solution(set);
    let column = lane_id() % 8;
    let mut t = [0.0; 8];
    let mut m = [[0.0; 8]; 8];
    // SAFETY: the caller's promise; lanes 8.. repeat the work of lanes 0..8, and store nothing.
    unsafe {
        each!(i in 0..8 => {
            m[i] = load_row(Map::<B>::predictions(), i);
            t[i] = if column == i as u32 { gates.beta } else { 0.0 };
        });
        each!(s in 0..8 => {
            let mut i = s + 1;
            while i < 8 {
                t[i] = fma(m[i][s], t[s], t[i]);
                i += 1;
            }
        });
        store_column(solution.delta(), t);
        if set.has_queries() {
            let mut w = [0.0; 8];
            each!(i in 0..8 => {
                let scores = load_row(Map::<B>::scores(), i);
                let mut s = 0;
                while s <= i {
                    w[i] = fma(scores[s], t[s], w[i]);
                    s += 1;
                }
            });
            store_column(solution.output(), w);
        }
    }
}

/// Stores column `lane_id()` of an 8 × 8 matrix.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_column(matrix: u32, column: [f32; 8]) {
    if lane_id() < 8 {
        each!(i in 0..8 => {
            let address = matrix + 32 * i as u32 + 4 * lane_id();
            store_shared_b32(address, column[i].to_bits());
        });
    }
}
