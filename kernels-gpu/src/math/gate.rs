//! Gates: log decay and beta from their raw forms, in f32.

use crate::device::float::{exp2, fma, reciprocal};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

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

/// log(1 + y) for y in [0, 1]: y times the polynomial of degree 8 that is nearest to log(1 + y) / y there. Relative error
/// below 3e-7, down to y = 0, where log2(1 + y) has no digit left.
#[inline(always)]
fn log1p_of_unit(y: f32) -> f32 {
    let square = y * y;
    let a = fma(-0.499_994_93, y, 0.999_999_94);
    let b = fma(-0.248_429_82, y, 0.333_190_98);
    let c = fma(-0.136_632_43, y, 0.191_060_05);
    let d = fma(-0.029_505_22, y, 0.078_225_92);
    let d = fma(0.005_232_689, square, d);
    y * fma(fma(fma(d, square, c), square, b), square, a)
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

#[cfg(test)]
mod tests {
    use super::log1p_of_unit;

    #[test]
    fn log1p_is_right_to_f32() {
        for i in 0..=40_000 {
            let y = (-(i as f32) / 1000.0).exp2();
            let right = f64::from(y).ln_1p();
            let error = f64::from(log1p_of_unit(y)) / right - 1.0;
            assert!(error.abs() < 3e-7, "log1p({y:e}): relative error {error:e}");
        }
    }
}
