//! Gates: log decay and beta from their raw forms, in f32.

use crate::device::float::{exp2, fma, maximum, minimum, reciprocal};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// eˣ.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp2(x * LOG2_E)
}

/// 1 / (1 + e⁻ˣ): saturates to 0 and 1, never NaN for a finite x.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    reciprocal(1.0 + exp(-x))
}

/// max(x, 0) + log1p(e^−|x|), clamped to finite values for every x but NaN, which the second term propagates.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    minimum(x.max(0.0), f32::MAX) + log1p_of_unit(exp(-x.abs()))
}

/// log(1 + y) for y in [0, 1]: y times the best polynomial of degree 8 for log(1 + y) / y. Relative error below 3e-7, down to y =
/// 0, where log2(1 + y) has no digit left.
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

/// exp(A_log), clamped to finite values so that its product with 0 is 0. NaN stays NaN.
#[inline(always)]
fn rate(a_log: f32) -> f32 {
    minimum(exp(a_log), f32::MAX)
}

/// Log decay of a raw gate: −exp(A_log) · softplus(a + dt_bias).
///
/// Finite or −∞ for every finite a and dt_bias, even if their sum or exp(A_log) leaves the range of f32: both factors are clamped
/// to finite values because the other may be 0 (it underflows below 2⁻¹²⁶). NaN if an argument is NaN.
#[inline(always)]
pub fn log_decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    -rate(a_log) * softplus(a + dt_bias)
}

/// Log decay of KDA's lower-bound gate: lower_bound · sigmoid(exp(A_log) · (x + dt_bias)), a scale and not a clamp.
///
/// Finite for every finite x, bound and dt_bias, like [`log_decay`]; NaN if an argument is NaN.
#[inline(always)]
pub fn lower_bound_log_decay(x: f32, lower_bound: f32, a_log: f32, dt_bias: f32) -> f32 {
    let sum = maximum(minimum(x + dt_bias, f32::MAX), f32::MIN);
    lower_bound * sigmoid(rate(a_log) * sum)
}

#[cfg(all(test, feature = "simulator"))]
mod tests {
    use super::{exp, log_decay, log1p_of_unit, lower_bound_log_decay};

    #[test]
    fn log1p_is_right_to_f32() {
        for i in 0..=40_000 {
            let y = (-(i as f32) / 1000.0).exp2();
            let right = f64::from(y).ln_1p();
            let error = f64::from(log1p_of_unit(y)) / right - 1.0;
            assert!(error.abs() < 3e-7, "log1p({y:e}): relative error {error:e}");
        }
    }

    const LOWER_BOUND: f32 = -5.0;
    /// exp(A_log) is 0 or ∞ in f32 for some, and between for others.
    const A_LOGS: [f32; 6] = [f32::MIN, -200.0, -2.0, 2.0, 200.0, f32::MAX];
    /// The sum of two of them may leave the range of f32.
    const TERMS: [f32; 7] = [f32::MIN, -3e38, -20.0, 0.0, 20.0, 3e38, f32::MAX];

    #[test]
    fn finite_gates_decay_as_they_should() {
        for a_log in A_LOGS {
            for (x, dt_bias) in TERMS.into_iter().flat_map(|x| TERMS.map(|y| (x, y))) {
                let (rate, sum) = (f64::from(a_log).exp(), f64::from(x) + f64::from(dt_bias));
                let softplus = sum.max(0.0) + (-sum.abs()).exp().ln_1p();
                // ∞ · 0 stands for a softplus that underflows in f64.
                let right = if softplus == 0.0 {
                    1.0
                } else {
                    (-rate * softplus).exp()
                };
                let decay = exp(log_decay(x, a_log, dt_bias));
                let case = format!("A_log {a_log:e}, x {x:e}, dt_bias {dt_bias:e}");
                assert!(
                    (f64::from(decay) - right).abs() < 1e-6,
                    "{case}: {decay}, not {right}"
                );

                let product = if sum == 0.0 { 0.0 } else { rate * sum };
                let right = f64::from(LOWER_BOUND) / (1.0 + (-product).exp());
                let log_decay = lower_bound_log_decay(x, LOWER_BOUND, a_log, dt_bias);
                assert!(
                    (f64::from(log_decay) - right).abs() < 1e-5,
                    "{case}: {log_decay}, not {right}"
                );
            }
        }
    }

    #[test]
    fn a_nan_is_not_lost() {
        for place in 0..3 {
            for other in TERMS {
                let [x, a_log, dt_bias] =
                    [0, 1, 2].map(|i| if i == place { f32::NAN } else { other });
                assert!(log_decay(x, a_log, dt_bias).is_nan(), "{place}, {other:e}");
                let log_decay = lower_bound_log_decay(x, LOWER_BOUND, a_log, dt_bias);
                assert!(log_decay.is_nan(), "{place}, {other:e}");
            }
        }
    }
}
