//! What holds between launches, whatever the right results are: the reference is asked for no result, only for how much
//! rounding may change one.

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

/// Checks a law on random problems of these families, made fit for it by `adjust`, on every backend in its turn.
fn law_of(families: Vec<Family>, adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    let turns = Turns::new(0);
    for_all("laws", 9, &any_specs(families, 8), |mut spec| {
        adjust(&mut spec);
        spec.fit();
        with_finite_squares(&mut spec);
        turns.next(|backend| holds(backend, &spec));
    });
}

/// Bits of what is normed are the same where [`Spec::has_finite_squares`].
fn with_finite_squares(spec: &mut Spec) {
    spec.spread &= spec.has_finite_squares();
}

/// [`law_of`] every family.
fn law(adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    law_of(Family::all(), adjust, holds);
}

/// The families of the recurrence alone, token by token.
fn alone_recurrent() -> Vec<Family> {
    Family::which(|family| !family.layer && family.is_recurrent())
}

/// The families with a state after each of several tokens.
fn several_recurrent() -> Vec<Family> {
    Family::which(|family| !family.decode && family.is_recurrent())
}

fn run(backend: &Backend, problem: &Problem, form: &Form) -> Case {
    backend.run(&problem.case(form), None)
}

/// The same bits in o, in the written pool and windows and in the snapshots of both, whatever their layout.
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

/// Results are not rounded below f32.
fn in_f32(spec: &mut Spec) {
    spec.form.state = DType::F32;
    spec.form.qkvo[3] = DType::F32;
}

/// Slots b, or slots in one pool as they come.
fn in_place(spec: &mut Spec) {
    spec.slots.write_pool = None;
}

/// `0..len` backwards.
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
