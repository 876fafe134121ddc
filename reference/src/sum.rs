//! Sums of many terms.

/// Terms that are added up side by side: one sum would wait for each of its terms.
const PARTS: usize = 8;

/// The sum of the terms of `x` and `y`, element by element; of what both have, where one is longer.
#[inline]
pub(crate) fn sum_of(x: &[f64], y: &[f64], term: impl Fn(f64, f64) -> f64) -> f64 {
    let len = x.len().min(y.len());
    let (x, x_rest) = x[..len].as_chunks::<PARTS>();
    let (y, y_rest) = y[..len].as_chunks::<PARTS>();
    let mut sums = [0.0; PARTS];
    for (x, y) in x.iter().zip(y) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum += term(x[i], y[i]);
        }
    }
    let rest = x_rest.iter().zip(y_rest).map(|(&x, &y)| term(x, y));
    sums.into_iter().chain(rest).sum()
}
