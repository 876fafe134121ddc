//! Laws between launches, which hold whatever the right results are. The reference only bounds the effect of rounding.

mod channels;
mod choice;
mod gates;
mod heads;
mod keeping;
mod layer;
mod memory;
mod prefill;
mod rows;
mod switches;
mod tokens;

use gated_delta::DType;
use gated_delta_test_support::backend::{Backend, Turns};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::for_all;
use gated_delta_test_support::layout::{Form, Layout};
use gated_delta_test_support::problem::{Problem, window_snapshots};
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::strategy::any_specs;

/// Checks a law on random problems of `families` that `adjust` has changed, on each backend whose turn it is.
fn law_of(families: Vec<Family>, adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    let turns = Turns::new(0);
    for_all("laws", 9, any_specs(families, 8), |mut spec| {
        adjust(&mut spec);
        spec.fit();
        with_finite_squares(&mut spec);
        turns.next(|backend| holds(backend, &spec));
    });
}

/// Restricts problems to sums of squares within f32, for which normed outputs have the same bits ([`Spec::has_finite_squares`]).
fn with_finite_squares(spec: &mut Spec) {
    spec.spread &= spec.has_finite_squares();
}

/// Like [`law_of`], for every family.
fn law(adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    law_of(Family::all(), adjust, holds);
}

/// The recurrent families without a convolution and a norm.
fn alone_recurrent() -> Vec<Family> {
    Family::which(|family| !family.layer && family.is_recurrent())
}

/// The recurrent families of several tokens, with a state after each token.
fn several_recurrent() -> Vec<Family> {
    Family::which(|family| !family.decode && family.is_recurrent())
}

fn run(backend: &Backend, problem: &Problem, form: &Form) -> Case {
    backend.run(&problem.case(form), None)
}

/// Panics unless row `b` leaves the same states and windows in its slots with other rows and alone.
fn assert_same_slots(
    [together, alone]: [&Case; 2],
    b: usize,
    written: impl Iterator<Item = usize>,
) {
    for slot in written {
        assert!(
            together.slot_bits(slot) == alone.slot_bits(slot),
            "slot {slot} of row {b} differs"
        );
        assert!(
            together.slot_window_bits(slot) == alone.slot_window_bits(slot),
            "the window of row {b}, in slot {slot}, differs"
        );
    }
}

/// Panics unless o, the written pool, the windows and the snapshots have the same bits, in any layouts.
#[track_caller]
fn assert_same_bits(one: &Case, other: &Case) {
    assert!(one.o_bits() == other.o_bits(), "o differs");
    assert!(one.state_bits() == other.state_bits(), "states differ");
    assert!(one.window_bits() == other.window_bits(), "windows differ");
    let snapshots = |case: &Case| {
        let view = case.snapshots.as_ref()?;
        Some(case.bits(&case.as_klast(view)))
    };
    assert!(snapshots(one) == snapshots(other), "snapshots differ");
    let snapshots = |case: &Case| window_snapshots(case).map(|view| case.bits(view));
    assert!(
        snapshots(one) == snapshots(other),
        "snapshots of windows differ"
    );
}

/// f32 states and outputs, which are not rounded further.
fn in_f32(spec: &mut Spec) {
    spec.form.state = DType::F32;
    spec.form.qkvo[3] = DType::F32;
}

/// Slots b, or read and write slots in one pool as drawn.
fn in_place(spec: &mut Spec) {
    spec.slots.write_pool = None;
}

/// The numbers `0..len` in reverse.
fn backwards(len: usize) -> Vec<usize> {
    (0..len).rev().collect()
}

#[test]
fn a_second_run_has_the_same_bits() {
    law(
        |_| {},
        |backend, spec| {
            let case = spec.case();
            assert!(
                backend.run(&case, None) == backend.run(&case, None),
                "the second run differs"
            );
        },
    );
}
