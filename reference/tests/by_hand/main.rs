//! Tests of the reference with numbers worked out by hand.

mod conv;
mod gdn_decode;
mod gdn_slots;
mod judge;
mod kda;
mod laws;
mod layer;
mod norm;
mod recurrence;
mod recurrent;
mod recurrent_errors;
mod recurrent_previous;
mod recurrent_slots;
mod tolerance;

#[track_caller]
fn assert_near(got: &[f64], wanted: &[f64]) {
    let near =
        got.len() == wanted.len() && got.iter().zip(wanted).all(|(g, w)| (g - w).abs() < 1e-14);
    assert!(near, "got {got:?}, wanted {wanted:?}");
}

/// Compares bits, in which NaN equals itself.
#[track_caller]
fn assert_bits(got: &[f64], wanted: &[f64]) {
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(got) == bits(wanted), "got {got:?}, wanted {wanted:?}");
}

/// `len` values in [-1, 1], different for each seed.
fn values(len: usize, seed: usize) -> Vec<f64> {
    (0..len)
        .map(|i| ((i * 37 + seed * 11) % 17) as f64 / 8.0 - 1.0)
        .collect()
}
