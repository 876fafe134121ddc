//! The gated delta rule of one value head, token by token.
//!
//! State S: `[V, K]`, decay α per key channel (GDN repeats one α):
//! ```text
//! S ← S diag(α)           (1) decay
//! δ = β (v − S k̂)         (2) from the decayed S
//! S ← S + δ k̂ᵀ            (3)
//! o = S q̂                 (4) from the updated S
//! ```

use crate::error::{Error, check_length};
use crate::sum::sum_of;

/// One token of one value head: query and key as they enter the recurrence, gates evaluated.
#[derive(Clone, Debug)]
pub struct Token {
    /// q̂, `[K]`: see [`normalise`]; scaled.
    pub q: Vec<f64>,
    /// k̂, `[K]`: see [`normalise`]; not scaled.
    pub k: Vec<f64>,
    /// `[V]`
    pub v: Vec<f64>,
    /// `[K]`: log α of each key channel.
    pub log_decay: Vec<f64>,
    /// β, how much of the prediction error is written.
    pub beta: f64,
}

/// Output and state after a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// `[V]`
    pub o: Vec<f64>,
    /// `[V, K]`: the state after the token.
    pub state: Vec<f64>,
}

/// Runs the tokens in order from `state` `[V, K]` and returns the output and state of each.
///
/// K and V are the lengths of the first token's `k` and `v`. Fails if another length differs from them.
pub fn recurrence(state: &[f64], tokens: &[Token]) -> Result<Vec<Step>, Error> {
    let Some(first) = tokens.first() else {
        return Ok(Vec::new());
    };
    let (key_dim, value_dim) = (first.k.len(), first.v.len());
    check_length("state", "[V, K]", &[value_dim, key_dim], state.len())?;

    let mut state = state.to_vec();
    let mut steps = Vec::with_capacity(tokens.len());
    for token in tokens {
        let (o, _) = step(&mut state, [value_dim, key_dim], token)?;
        steps.push(Step {
            o,
            state: state.clone(),
        });
    }
    Ok(steps)
}

/// Advances `state` `[V, K]` by one token and returns its output and δ. V and K are the lengths of the token's `v` and `k`.
pub(crate) fn take(state: &mut [f64], token: &Token) -> Result<(Vec<f64>, Vec<f64>), Error> {
    let dims = [token.v.len(), token.k.len()];
    check_length("state", "[V, K]", &dims, state.len())?;
    step(state, dims, token)
}

/// As [`take`], for a state whose length is known to match the dims.
fn step(
    state: &mut [f64],
    [value_dim, key_dim]: [usize; 2],
    token: &Token,
) -> Result<(Vec<f64>, Vec<f64>), Error> {
    let Token {
        q,
        k,
        v,
        log_decay,
        beta,
    } = token;
    check_length("q", "[K]", &[key_dim], q.len())?;
    check_length("k", "[K]", &[key_dim], k.len())?;
    check_length("v", "[V]", &[value_dim], v.len())?;
    check_length("log_decay", "[K]", &[key_dim], log_decay.len())?;

    let alpha = decays(log_decay);
    let (mut o, mut deltas) = (vec![0.0; value_dim], vec![0.0; value_dim]);
    for i in 0..value_dim {
        let s = &mut state[i * key_dim..][..key_dim];
        for j in 0..key_dim {
            s[j] *= alpha[j]; // (1)
        }
        let delta = beta * (v[i] - dot(s, k)); // (2)
        for j in 0..key_dim {
            s[j] += delta * k[j]; // (3)
        }
        o[i] = dot(s, q); // (4)
        deltas[i] = delta;
    }
    Ok((o, deltas))
}

/// α of each log α. The last result is reused, since neighbours are mostly equal.
pub(crate) fn decays(log_decay: &[f64]) -> Vec<f64> {
    let mut last = (0.0, 1.0);
    let decay = |&log_decay: &f64| {
        if log_decay != last.0 {
            last = (log_decay, log_decay.exp());
        }
        last.1
    };
    log_decay.iter().map(decay).collect()
}

/// `x · rsqrt(Σx² + 1e-6) · scale` with `l2norm`, else `x · scale`: k̂ (scale 1) or q̂.
pub fn normalise(x: &[f64], l2norm: bool, scale: f64) -> Vec<f64> {
    let factor = if l2norm {
        scale / (dot(x, x) + 1e-6).sqrt()
    } else {
        scale
    };
    x.iter().map(|x| x * factor).collect()
}

/// The default scale of q: `1 / √K`.
pub fn default_scale(key_dim: usize) -> f64 {
    1.0 / (key_dim as f64).sqrt()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    sum_of(x, y, |x, y| x * y)
}
