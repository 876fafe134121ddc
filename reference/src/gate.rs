//! Log decays and betas from raw gates, and activations, finite for every finite input.

/// `ln(1 + exp(x))`, without overflow and without losing small values.
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `1 / (1 + exp(-x))`: beta of a logit.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Function of a convolution's sum, or of a norm's gate z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// x
    None,
    /// `x · sigmoid(x)`
    #[default]
    Silu,
    /// `sigmoid(x)`
    Sigmoid,
}

impl Activation {
    /// Applies the activation to x.
    pub fn of(self, x: f64) -> f64 {
        match self {
            Self::None => x,
            Self::Silu => x * sigmoid(x),
            Self::Sigmoid => sigmoid(x),
        }
    }
}

/// Log decay `-exp(a_log) · softplus(x + dt_bias)`: GDN's raw gate (`x` is `a`), KDA's softplus gate (`x` is `g`).
pub fn softplus_log_decay(x: f64, a_log: f64, dt_bias: f64) -> f64 {
    -finite_exp(a_log) * softplus(x + dt_bias)
}

/// Log decay `lower_bound · sigmoid(exp(a_log) · (g + dt_bias))`, KDA's lower-bound gate. `lower_bound < 0` is a scale: the log decay
/// lies between `lower_bound` and 0. Without `A_log`, `a_log` is 0.
pub fn lower_bound_log_decay(g: f64, lower_bound: f64, a_log: f64, dt_bias: f64) -> f64 {
    lower_bound * sigmoid(finite_exp(a_log) * (g + dt_bias))
}

/// `exp(x)`, or the largest f64 if that overflows, so that the product with 0 is 0. NaN stays NaN.
fn finite_exp(x: f64) -> f64 {
    let exp = x.exp();
    if exp == f64::INFINITY { f64::MAX } else { exp }
}
