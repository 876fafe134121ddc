//! What holds between launches, whatever the right results are: no oracle is asked.

mod channels;
mod gates;
mod heads;
mod keeping;
mod memory;
mod rows;
mod switches;
mod tokens;

use gated_delta::DType;
use gated_delta_tests::backend::{Backend, backends};
use gated_delta_tests::buffer::View;
use gated_delta_tests::case::Case;
use gated_delta_tests::compare::{assert_close, norm, tolerance};
use gated_delta_tests::for_all;
use gated_delta_tests::layout::Form;
use gated_delta_tests::problem::{Operator, Problem};
use gated_delta_tests::spec::{Family, Magnitude, Spec};
use gated_delta_tests::strategy::any_specs;

/// Checks a law on random problems of these families, made fit for it by `adjust`, on every backend.
fn law_of(families: Vec<Family>, adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    for_all("laws", 60, &any_specs(families, 8), |mut spec| {
        adjust(&mut spec);
        backends().iter().for_each(|backend| holds(backend, &spec));
    });
}

/// [`law_of`] the families of every operator.
fn law(adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    law_of(all(Family::all), adjust, holds);
}

/// The families of every operator.
fn all(families: fn(Operator) -> Vec<Family>) -> Vec<Family> {
    [families(Operator::GdnDecode), several(families)].concat()
}

/// The families of every operator that takes several tokens.
fn several(families: fn(Operator) -> Vec<Family>) -> Vec<Family> {
    [Operator::GdnMtp, Operator::KdaRecurrent]
        .map(families)
        .concat()
}

fn run(backend: &Backend, problem: &Problem, form: &Form) -> Case {
    backend.run(&problem.case(form), None)
}

/// The same bits in o, in the written pool and in the snapshots, whatever their layout.
#[track_caller]
fn assert_same_bits(one: &Case, other: &Case) {
    assert!(one.o_bits() == other.o_bits(), "o differs");
    assert!(one.state_bits() == other.state_bits(), "states differ");
    let snapshots = |case: &Case| {
        let view = case.snapshots.as_ref()?;
        Some(case.bits(&case.as_klast(view)))
    };
    assert!(snapshots(one) == snapshots(other), "snapshots differ");
}

/// Near each other in o, in the written pool and in the snapshots, of [`comparable`] problems. o is the product of new
/// states with q̂, whose norm is about `scale`; it may be much smaller than these.
#[track_caller]
fn assert_near(one: &Case, other: &Case) {
    let near = |what, view: &dyn Fn(&Case) -> View, allowed| {
        let [one, other] = [one, other].map(|case| case.floats(&view(case)));
        assert_close(what, &one, &other, DType::F32, allowed);
    };
    let states = |case: &Case| case.as_klast(case.written_pool());
    let snapshots = |case: &Case| case.snapshots.as_ref().map(|view| case.as_klast(view));
    let views = [Some(one.pool.clone()), Some(states(one)), snapshots(one)];
    let sizes = views.iter().flatten().map(|view| norm(&one.floats(view)));
    let size = norm(&sizes.collect::<Vec<_>>());
    let scale = one.options.scale.unwrap_or(1.0).abs();
    let allowed = tolerance(one.options.formulation);
    let of_o = 2.0 * allowed.output * f64::from(scale) * size;
    near("o", &|case| case.o.clone(), of_o);
    near("states", &states, allowed.state * size);
    if let Some(view) = snapshots(one) {
        let dims = view.dims.clone();
        let of = |case: &Case| snapshots(case).expect("both have the same switches");
        near("snapshots", &of, allowed.state * size);
        assert_eq!(dims, of(other).dims);
    }
}

/// Results are not rounded below f32.
fn in_f32(spec: &mut Spec) {
    spec.form.state = DType::F32;
    spec.form.qkvo[3] = DType::F32;
}

/// Rounding errors of results may be told from their sizes alone.
fn comparable(spec: &mut Spec) {
    in_f32(spec);
    spec.magnitude = Magnitude::Usual;
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
fn every_variant_has_the_same_bits() {
    law(
        |_| {},
        |backend, spec| {
            let case = spec.case();
            let selected = backend.run(&case, None);
            let (variants, _) = backend.with(&case, |_, _, args| args.variants()).unwrap();
            for variant in variants.unwrap() {
                assert!(
                    backend.run(&case, Some(variant)) == selected,
                    "{} differs",
                    variant.name()
                );
            }
        },
    );
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
