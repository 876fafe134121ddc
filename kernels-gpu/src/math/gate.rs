//! Gates: log decay and beta from their raw forms, in f32.

use crate::device::float::{exp2, fma, log2, reciprocal};

const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;

/// eˣ.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp2(x * LOG2_E)
}

/// 1 / (1 + e⁻ˣ): 0 and 1 at the ends, never NaN for a finite x.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    reciprocal(1.0 + exp(-x))
}

/// max(x, 0) + log1p(e^−|x|): finite for every finite x.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + log1p_of_unit(exp(-x.abs()))
}

/// log(1 + y) for y in [0, 1]: relative error below 1e-5, down to y = 0, where log2(1 + y) has none left.
#[inline(always)]
fn log1p_of_unit(y: f32) -> f32 {
    if y < 0.03 {
        y * fma(y, fma(y, fma(y, -0.25, 1.0 / 3.0), -0.5), 1.0)
    } else {
        LN_2 * log2(1.0 + y)
    }
}

/// Log decay of a raw GDN gate: −exp(A_log) · softplus(a + dt_bias).
///
/// Finite or −∞, never NaN: exp(A_log) is held finite, so that it times a softplus of 0 is 0.
#[inline(always)]
pub fn log_decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    -exp(a_log).min(f32::MAX) * softplus(a + dt_bias)
}

/// Log decay of KDA's lower-bound gate: lower_bound · sigmoid(exp(A_log) · (x + dt_bias)), a scale and not a clamp.
#[inline(always)]
pub fn lower_bound_log_decay(x: f32, lower_bound: f32, a_log: f32, dt_bias: f32) -> f32 {
    lower_bound * sigmoid(exp(a_log).min(f32::MAX) * (x + dt_bias))
}
