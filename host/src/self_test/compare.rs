//! How far results may be from the truth, and how far they are.

use crate::step::Formulation;
use crate::tensor::DType;

/// What a formulation is allowed, besides the rounding of what is stored.
#[derive(Clone, Copy)]
pub struct Tolerance {
    /// Of a state, as a part of its norm.
    pub state: f64,
    /// Of an output, as a part of the norms of q̂ and of the state that it is read from.
    pub output: f64,
}

impl Tolerance {
    pub const fn of(formulation: Formulation) -> Self {
        match formulation {
            // f32 arithmetic, with approximate exponentials and roots.
            Formulation::Recurrent => Self {
                state: 1e-5,
                output: 1e-6,
            },
            // Products of bf16, or of f32 in two parts of bf16, summed in f32.
            Formulation::Parallel => Self {
                state: 3e-4,
                output: 3e-4,
            },
        }
    }
}

/// The distance of `got` to `exact`, less what rounding to `dtype` may add, as a part of `allowed`; an error that says
/// so where it is more.
pub fn compare(got: &[f64], exact: &[f64], dtype: DType, allowed: f64) -> Result<f64, String> {
    let excess = |(&got, &exact): (&f64, &f64)| excess(got, exact, dtype);
    let excesses: Vec<f64> = got.iter().zip(exact).map(excess).collect();
    let off = norm(&excesses);
    if off <= allowed {
        return Ok(if allowed > 0.0 { off / allowed } else { 0.0 });
    }
    let worst = (0..excesses.len()).max_by(|&i, &j| excesses[i].total_cmp(&excesses[j]));
    let worst = worst.unwrap_or(0);
    Err(format!(
        "off by {off:.1e}, allowed {allowed:.1e}; element {worst}: wanted {}, got {}",
        exact[worst], got[worst]
    ))
}

pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// How far `got` is from being the rounding of `exact`; infinite where it is no number.
fn excess(got: f64, exact: f64, dtype: DType) -> f64 {
    if !got.is_finite() {
        return f64::INFINITY;
    }
    let (bits, smallest) = match dtype {
        DType::Bf16 => (8, -126),
        _ => (24, -126),
    };
    let exponent = (got.abs().max(exact.abs()).log2().floor() as i32).max(smallest);
    ((got - exact).abs() - 2f64.powi(exponent - bits)).max(0.0)
}
