//! The tokens of a chunk as a kernel solves them: δ = T R, with R = v − S₀ k̂ and S₀ from before the chunk.

use super::finite_norm;
use crate::recurrence::{Token, decays};
use crate::sum::sum_of;
use crate::tolerance::{CHUNK, norm};

/// The tokens of a chunk so far.
#[derive(Default)]
pub(super) struct Chunk {
    /// S₀ `[V, K]`.
    start: Vec<f64>,
    /// Decay of each channel of S₀ up to the last token.
    decay: Vec<f64>,
    tokens: Vec<Solved>,
    /// The change of the state by those of δ, which no later token of the chunk reads.
    change: Vec<f64>,
}

struct Solved {
    /// k̂, decayed up to the last token.
    k: Vec<f64>,
    /// The token's row of T.
    row: Vec<f64>,
    /// R `[V]`.
    residual: Vec<f64>,
    /// Norm of the change of δ.
    change: f64,
}

impl Chunk {
    /// Adds a token. Each element of its row of T, and of R, is off by the part `off` of it. `state` is the state before the token.
    /// `other` is that state with the changes of the chunks before, and gets those of this chunk at its end. A chunk begins every
    /// [`CHUNK`] tokens. Returns the norm of the change of δ.
    pub fn advance(&mut self, state: &[f64], other: &mut [f64], token: &Token, off: f64) -> f64 {
        if self.tokens.len() == CHUNK || self.start.is_empty() {
            let next = self.changed(other);
            other.copy_from_slice(&next);
            self.tokens.clear();
            self.start = state.to_vec();
            self.decay = vec![1.0; token.k.len()];
            self.change = vec![0.0; state.len()];
        }
        let alpha = decays(&token.log_decay);
        let decay = |of: &mut [f64]| of.iter_mut().zip(&alpha).for_each(|(x, alpha)| *x *= alpha);
        decay(&mut self.decay);
        self.tokens
            .iter_mut()
            .for_each(|earlier| decay(&mut earlier.k));
        // T = (I + diag(β) A)⁻¹ diag(β), A being strictly lower triangular, by rows.
        let mut row = vec![0.0; self.tokens.len()];
        for earlier in &self.tokens {
            let product = -token.beta * sum_of(&earlier.k, &token.k, |x, y| x * y);
            for (t, of_earlier) in row.iter_mut().zip(&earlier.row) {
                *t += product * of_earlier;
            }
        }
        row.push(token.beta);
        let key: Vec<f64> = self
            .decay
            .iter()
            .zip(&token.k)
            .map(|(x, k)| x * k)
            .collect();
        let rows = self.start.chunks(key.len()).zip(&token.v);
        let residual: Vec<f64> = rows
            .map(|(s, v)| v - sum_of(s, &key, |s, k| s * k))
            .collect();
        let of_delta = self.of_delta(&row, &residual, off);
        for (row, of_delta) in self.change.chunks_mut(key.len()).zip(&of_delta) {
            decay(row);
            let added = token.k.iter().map(|k| of_delta * k);
            row.iter_mut().zip(added).for_each(|(s, added)| *s += added);
        }
        let change = finite_norm(&of_delta);
        self.tokens.push(Solved {
            k: token.k.clone(),
            row,
            residual,
            change,
        });
        change
    }

    /// `state` with the changes of this chunk. Their sum is brought to the root of the sum of their squares: if keys are alike, a sum
    /// with random signs is small by chance too often.
    pub fn changed(&self, state: &[f64]) -> Vec<f64> {
        if self.change.is_empty() {
            return state.to_vec();
        }
        let squares = |of: &Solved| (of.change * norm(&of.k)).powi(2);
        let wanted = self.tokens.iter().map(squares).sum::<f64>().sqrt();
        let scale = wanted / norm(&self.change);
        let scale = if scale.is_finite() { scale } else { 1.0 };
        let changes = state.iter().zip(&self.change);
        changes.map(|(s, change)| s + scale * change).collect()
    }

    /// The change of the next token's δ by its `row` of T and by R, of which `residual` is its own: the root of the sum of squares, with
    /// the sign of R. If the rows of R are alike, so are the changes.
    fn of_delta(&self, row: &[f64], residual: &[f64], off: f64) -> Vec<f64> {
        let earlier = self.tokens.iter().map(|earlier| &earlier.residual[..]);
        let mut squares = vec![0.0; residual.len()];
        for (t, of_token) in row.iter().zip(earlier.chain([residual])) {
            for (sum, r) in squares.iter_mut().zip(of_token) {
                *sum += 2.0 * (t * r) * (t * r);
            }
        }
        let signs = squares.iter().zip(residual);
        signs
            .map(|(sum, r)| off * sum.sqrt().copysign(*r))
            .collect()
    }
}
