//! The norm between a layer's recurrence and its output projection, for each value head:
//! ```text
//! o ← weight · o / √(mean(o²) + eps) · act(z)
//! ```

use crate::error::{Error, check_length};
use crate::gate::Activation;

/// A root mean square norm, gated by z.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm<'a> {
    /// Gate `[B, T, HV, V]`, as o; with packed rows, `[B, T]` is `[total]`.
    pub z: &'a [f64],
    /// Weight `[V]`.
    pub weight: &'a [f64],
    /// Epsilon, above 0.
    pub eps: f64,
    /// Activation of z.
    pub activation: Activation,
}

/// Applies the norm to o `[…, V]`, which has the dims of z. V is the length of the weight.
pub fn gated_norm(norm: &GatedNorm, o: &[f64]) -> Result<Vec<f64>, Error> {
    let value_dim = norm.weight.len();
    if value_dim == 0 {
        return Err(Error::Zero { name: "value_dim" });
    }
    Error::check_multiple("o", "one value head, V", value_dim, o.len())?;
    check_length("z", "as o", &[o.len()], norm.z.len())?;
    let mut normed = Vec::with_capacity(o.len());
    for (o, z) in o.chunks(value_dim).zip(norm.z.chunks(value_dim)) {
        let squares: f64 = o.iter().map(|o| o * o).sum();
        let size = (squares / value_dim as f64 + norm.eps).sqrt();
        for i in 0..value_dim {
            normed.push(norm.weight[i] * o[i] / size * norm.activation.of(z[i]));
        }
    }
    Ok(normed)
}
