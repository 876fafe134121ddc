//! Distance of a result from the wanted values.

use std::fmt;

use gated_delta_reference::tolerance::{DType, TooFar, UNDERFLOW, relative_error_of, within};

/// Outcome of a comparison. NaN agrees with NaN, and an infinity with the same infinity; such elements are counted, and agreement in
/// nothing else counts as no agreement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// The relative L2 error of the elements that are finite on both sides.
    pub error: f64,
    /// The first element that is NaN or infinite on one side and not so on the other, in words.
    pub mismatch: Option<String>,
    /// Elements of the result that are not finite.
    pub got: NotFinite,
    /// Elements of the wanted values that are not finite.
    pub wanted: NotFinite,
    /// Elements that are finite on both sides.
    pub finite: usize,
    /// Elements that agree, and are not finite.
    pub agreed: usize,
}

/// Elements that are not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NotFinite {
    /// NaN of either sign.
    pub nan: usize,
    /// Infinities of either sign.
    pub infinite: usize,
}

impl NotFinite {
    fn count(&mut self, value: f64) {
        self.nan += usize::from(value.is_nan());
        self.infinite += usize::from(value.is_infinite());
    }
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nan, self.infinite) {
            (0, 0) => f.write_str("0"),
            (nan, 0) => write!(f, "{nan} NaN"),
            (0, infinite) => write!(f, "{infinite} inf"),
            (nan, infinite) => write!(f, "{nan} NaN, {infinite} inf"),
        }
    }
}

impl Comparison {
    /// The failure, if there is one: an element that is NaN or infinite on one side only, no element that is finite on both, or an error
    /// above `tolerance`.
    #[must_use]
    pub fn failure(&self, tolerance: f64) -> Option<String> {
        if self.mismatch.is_some() {
            return self.mismatch.clone();
        }
        if self.agreed > 0 && self.finite == 0 {
            return Some("NaN or inf on both sides in every element, nothing compared".to_owned());
        }
        (self.error > tolerance).then(|| "above tolerance".to_owned())
    }

    /// Whether everything is finite, and the error within `tolerance`.
    #[must_use]
    pub fn holds(&self, tolerance: f64) -> bool {
        self.agreed == 0 && self.failure(tolerance).is_none()
    }

    /// The worse of two outcomes.
    #[must_use]
    pub fn worse(self, other: Self) -> Self {
        let rank = |of: &Self| (of.mismatch.is_some(), of.agreed);
        let order = rank(&other).cmp(&rank(&self));
        let is_worse = order.then(other.error.total_cmp(&self.error)).is_gt();
        if is_worse { other } else { self }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mismatch {
            Some(mismatch) => f.write_str(mismatch),
            None if self.agreed > 0 => write!(f, "{} on both sides", self.got),
            None => write!(f, "{:.2e}", self.error),
        }
    }
}

/// Triples (index, got, wanted) of all elements.
pub fn pairs<'a>(got: &'a [f64], wanted: &'a [f64]) -> impl Iterator<Item = (usize, f64, f64)> {
    got.iter()
        .zip(wanted)
        .enumerate()
        .map(|(index, (got, wanted))| (index, *got, *wanted))
}

/// Compares [`pairs`] of all or some elements of a tensor with dims `dims`.
pub fn compare(elements: impl Iterator<Item = (usize, f64, f64)>, dims: &[usize]) -> Comparison {
    let mut comparison = Comparison::default();
    let finite = elements.filter_map(|(index, got, wanted)| {
        comparison.got.count(got);
        comparison.wanted.count(wanted);
        if got.is_finite() && wanted.is_finite() {
            comparison.finite += 1;
            return Some((got, wanted));
        }
        if got == wanted || got.is_nan() && wanted.is_nan() {
            comparison.agreed += 1;
        } else if comparison.mismatch.is_none() {
            let at = position(index, dims);
            comparison.mismatch = Some(format!("{got} at {at:?}, wanted {wanted}"));
        }
        None
    });
    let error = relative_error_of(finite);
    comparison.error = error;
    comparison
}

/// Outcome of a comparison in units, each with its own bound.
#[derive(Clone, Debug)]
pub(crate) struct Units {
    /// Outcome for all elements together.
    pub all: Comparison,
    /// Largest error of a unit relative to its bound, and the unit.
    pub worst: (f64, usize),
    /// The first unit whose error is above its bound.
    too_far: Option<(usize, TooFar)>,
    /// Dims of the units; below, their names. A dim without a name is not shown.
    dims: Vec<usize>,
    names: &'static [&'static str],
}

impl Units {
    /// The failure, if there is one.
    pub fn failure(&self) -> Option<String> {
        let too_far = self
            .too_far
            .as_ref()
            .map(|(unit, too_far)| format!("above tolerance at {}: {too_far}", self.place(*unit)));
        // A failure of elements that are not finite names its own position.
        self.all.failure(f64::INFINITY).or(too_far)
    }

    /// The indices of a unit.
    pub fn position(&self, unit: usize) -> Vec<usize> {
        position(unit, &self.dims)
    }

    /// Position of a unit in words, such as "slot 2, value head 5".
    pub fn place(&self, unit: usize) -> String {
        let indices = self.position(unit);
        let named = self.names.iter().zip(indices);
        let named = named.filter(|(name, _)| !name.is_empty());
        let named: Vec<_> = named
            .map(|(name, index)| format!("{name} {index}"))
            .collect();
        named.join(", ")
    }
}

/// Compares a result of `dtype` and dims `dims` in equal units, one for each bound. `is_compared` selects the elements. The units' dims are
/// the leading ones of the result's, with the names `names`. The wanted values are not rounded.
pub(crate) fn units(
    [got, wanted]: [&[f64]; 2],
    dtype: DType,
    bounds: &[f64],
    (dims, names): (&[usize], &'static [&'static str]),
    is_compared: impl Fn(usize) -> bool,
) -> Units {
    // A wanted value that is infinite in the dtype agrees with an infinity.
    let rounded = |wanted: f64| match dtype.round(wanted) {
        infinite if infinite.is_infinite() => infinite,
        _ => wanted,
    };
    let wanted: Vec<f64> = wanted.iter().copied().map(rounded).collect();
    let compared = pairs(got, &wanted).filter(|(index, ..)| is_compared(*index));
    let all = compare(compared, dims);
    let len = (got.len() / bounds.len().max(1)).max(1);
    let (mut worst, mut too_far) = ((0.0, 0), None);
    for (unit, bound) in bounds.iter().enumerate() {
        let own = unit * len..(unit + 1) * len;
        if !is_compared(own.start) {
            continue;
        }
        let finite = |index: &usize| got[*index].is_finite() && wanted[*index].is_finite();
        let indices: Vec<usize> = own.clone().filter(finite).collect();
        let of = |values: &[f64]| indices.iter().map(|&i| values[i]).collect::<Vec<f64>>();
        // A bound of exactly zero means that all terms are zero.
        let bound = match *bound {
            0.0 => 0.0,
            bound => bound + UNDERFLOW * (len as f64).sqrt(),
        };
        let share = match within(&of(got), &of(&wanted), dtype, bound) {
            Ok(share) => share,
            Err(mut far) => {
                let share = far.off / far.allowed;
                far.element = indices
                    .get(far.element)
                    .map_or(0, |index| index - own.start);
                too_far.get_or_insert((unit, far));
                share
            }
        };
        if share > worst.0 {
            worst = (share, unit);
        }
    }
    Units {
        all,
        worst,
        too_far,
        dims: dims[..names.len().min(dims.len())].to_vec(),
        names,
    }
}

/// Position of element `index` in a tensor with dims `dims`.
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
        assert_eq!(nan.got.to_string(), "1 NaN");
    }

    #[test]
    fn what_is_not_finite_on_both_sides_is_counted_and_is_no_agreement_alone() {
        let both = [f64::NAN, f64::INFINITY, 1.0, 1.0];
        let comparison = compared(&both, &both);
        assert_eq!(comparison.failure(0.0), None);
        assert_eq!((comparison.agreed, comparison.finite), (2, 2));
        assert_eq!(comparison.wanted.to_string(), "1 NaN, 1 inf");
        assert!(!comparison.holds(1.0));
        assert!(
            compared(&[f64::NAN; 4], &[f64::NAN; 4])
                .failure(1.0)
                .is_some()
        );
        let finite = compared(&[1.0; 4], &[2.0; 4]);
        assert_eq!(comparison.clone().worse(finite), comparison);
    }
}
