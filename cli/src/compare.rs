//! How far a result is from what is wanted.

use std::fmt;

use gated_delta::DType;

/// The relative L2 error that a result stored as `dtype` may have.
#[must_use]
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        _ => 4e-3,
    }
}

/// The outcome of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// √(Σ (got − wanted)² / Σ wanted²) over the finite elements; 0 where both sums are.
    pub error: f64,
    /// The first element that is NaN or infinite on one side and not so on the other, in words.
    pub mismatch: Option<String>,
}

impl Comparison {
    /// Whether nothing is NaN or infinite that should not be, and the error is within `tolerance`.
    #[must_use]
    pub fn holds(&self, tolerance: f64) -> bool {
        self.mismatch.is_none() && self.error <= tolerance
    }

    /// The worse of two.
    #[must_use]
    pub fn worse(self, other: Self) -> Self {
        let is_worse = match (&self.mismatch, &other.mismatch) {
            (None, Some(_)) => true,
            (Some(_), _) => false,
            (None, None) => other.error.total_cmp(&self.error).is_gt(),
        };
        if is_worse { other } else { self }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mismatch {
            Some(mismatch) => f.write_str(mismatch),
            None => write!(f, "{:.2e}", self.error),
        }
    }
}

/// (index, got, wanted) of each element.
pub fn pairs<'a>(got: &'a [f64], wanted: &'a [f64]) -> impl Iterator<Item = (usize, f64, f64)> {
    got.iter()
        .zip(wanted)
        .enumerate()
        .map(|(index, (got, wanted))| (index, *got, *wanted))
}

/// Compares [`pairs`] of a tensor of `dims`, or some of them.
pub fn compare(elements: impl Iterator<Item = (usize, f64, f64)>, dims: &[usize]) -> Comparison {
    let (mut difference, mut norm) = (0.0, 0.0);
    let mut mismatch = None;
    for (index, got, wanted) in elements {
        if got.is_finite() && wanted.is_finite() {
            difference += (got - wanted).powi(2);
            norm += wanted.powi(2);
        } else if mismatch.is_none() && !(got == wanted || got.is_nan() && wanted.is_nan()) {
            mismatch = Some(format!(
                "{got} at {:?}, wanted {wanted}",
                position(index, dims)
            ));
        }
    }
    let error = if difference == 0.0 {
        0.0
    } else {
        f64::sqrt(difference / norm)
    };
    Comparison { error, mismatch }
}

/// The position in a tensor of the element of that number.
fn position(mut index: usize, dims: &[usize]) -> Vec<usize> {
    let mut position: Vec<usize> = dims
        .iter()
        .rev()
        .map(|dim| {
            let at = index % dim;
            index /= dim;
            at
        })
        .collect();
    position.reverse();
    position
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(got: &[f64], wanted: &[f64]) -> Comparison {
        compare(pairs(got, wanted), &[2, 2])
    }

    #[test]
    fn the_error_is_relative() {
        let comparison = compared(&[3.0, 0.0, 0.0, 4.5], &[3.0, 0.0, 0.0, 4.0]);
        assert_eq!(
            (
                comparison.error,
                comparison.holds(0.1),
                comparison.holds(0.09)
            ),
            (0.1, true, false)
        );
        assert!(compared(&[0.0; 4], &[0.0; 4]).holds(0.0));
        assert!(!compared(&[1e-9, 0.0, 0.0, 0.0], &[0.0; 4]).holds(1.0));
    }

    #[test]
    fn what_is_not_finite_must_match() {
        let nan = compared(&[1.0, 1.0, f64::NAN, 1.0], &[1.0; 4]);
        assert_eq!(nan.mismatch.as_deref(), Some("NaN at [1, 0], wanted 1"));
        assert!(
            !compared(
                &[f64::INFINITY, 1.0, 1.0, 1.0],
                &[f64::NEG_INFINITY, 1.0, 1.0, 1.0]
            )
            .holds(1.0)
        );
        assert!(!compared(&[1.0; 4], &[1.0, f64::NAN, 1.0, 1.0]).holds(1.0));
        assert_eq!(nan.clone().worse(compared(&[2.0; 4], &[1.0; 4])), nan);
        let both = [f64::NAN, f64::INFINITY, 1.0, 1.0];
        assert!(compared(&both, &both).holds(0.0));
    }
}
