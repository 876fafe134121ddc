//! Sums of many terms.

/// Number of independent partial sums: in a single sum each addition would wait for the previous one.
const PARTS: usize = 8;

/// Sum of `term` over pairs of elements of `x` and `y`, up to the shorter length.
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
