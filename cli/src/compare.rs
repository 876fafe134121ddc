//! How far a result is from what is wanted.

use std::fmt;

use gated_delta_reference::compare::relative_error_of;

/// The outcome of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// The relative L2 error of the finite elements.
    pub error: f64,
    /// Elements that are NaN on both sides.
    pub nans: usize,
    /// The first element that is NaN or infinite on one side and not so on the other, in words.
    pub mismatch: Option<String>,
}

impl Comparison {
    /// Whether nothing is NaN or infinite that should not be, and the error is within `tolerance`.
    #[must_use]
    pub fn holds(&self, tolerance: f64) -> bool {
        self.mismatch.is_none() && self.error <= tolerance
    }

    /// The error, and how many elements are NaN on both sides.
    #[must_use]
    pub fn measured(&self) -> String {
        match self.nans {
            0 => format!("{:.2e}", self.error),
            nans => format!("{:.2e}, beside {nans} NaN of both", self.error),
        }
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
            None => f.write_str(&self.measured()),
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
    let (mut nans, mut mismatch) = (0, None);
    let error = relative_error_of(elements.filter_map(|(index, got, wanted)| {
        if got.is_finite() && wanted.is_finite() {
            return Some((got, wanted));
        }
        if got.is_nan() && wanted.is_nan() {
            nans += 1;
        } else if got != wanted && mismatch.is_none() {
            let position = position(index, dims);
            mismatch = Some(format!("{got} at {position:?}, wanted {wanted}"));
        }
        None
    }));
    Comparison {
        error,
        nans,
        mismatch,
    }
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
        let both = [f64::NAN, f64::INFINITY, 1.0, f64::NAN];
        let same = compared(&both, &both);
        assert!(same.holds(0.0) && same.nans == 2);
        assert_eq!((nan.nans, compared(&[1.0; 4], &[1.0; 4]).nans), (0, 0));
    }
}
