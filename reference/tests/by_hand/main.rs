//! The reference against numbers worked out by hand.

mod gdn_decode;
mod gdn_slots;
mod recurrence;

#[track_caller]
fn assert_near(got: &[f64], wanted: &[f64]) {
    let near =
        got.len() == wanted.len() && got.iter().zip(wanted).all(|(g, w)| (g - w).abs() < 1e-14);
    assert!(near, "got {got:?}, wanted {wanted:?}");
}
