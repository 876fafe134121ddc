//! What holds between launches, whatever the right results are: no oracle is asked.

mod gates;
mod memory;
mod rows;

use gated_delta::DType;
use gated_delta::ops::{HeadMap, StateLayout};
use gated_delta_tests::backend::{Backend, backends};
use gated_delta_tests::buffer::View;
use gated_delta_tests::case::Case;
use gated_delta_tests::compare::{assert_close, norm};
use gated_delta_tests::for_all;
use gated_delta_tests::layout::Form;
use gated_delta_tests::problem::{Problem, take};
use gated_delta_tests::spec::{Magnitude, Spec};
use gated_delta_tests::strategy::any_specs;

/// Checks a law on random problems, made fit for it by `adjust`, on every backend.
fn law(adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    for_all("laws", 60, &any_specs(12), |mut spec| {
        adjust(&mut spec);
        backends().iter().for_each(|backend| holds(backend, &spec));
    });
}

fn run(backend: &Backend, problem: &Problem, form: &Form) -> Case {
    backend.run(&problem.case(form), None)
}

/// The same bits in o and in the written pool, as `[P, HV, V, K]`.
#[track_caller]
fn assert_same_bits(one: &Case, other: &Case) {
    assert!(one.o_bits() == other.o_bits(), "o differs");
    assert!(one.state_bits() == other.state_bits(), "states differ");
}

/// Near each other in o and in the written pool of [`comparable`] problems. o is the product of new states with q̂, whose
/// norm is about `scale`; it may be much smaller than these.
#[track_caller]
fn assert_near(one: &Case, other: &Case) {
    let near = |what, view: &dyn Fn(&Case) -> View, allowed| {
        let [one, other] = [one, other].map(|case| case.floats(&view(case)));
        assert_close(what, &one, &other, DType::F32, allowed);
    };
    let states = |case: &Case| case.as_klast(case.written_pool());
    let size = norm(&one.floats(&states(one)));
    let scale = one.options.scale.unwrap_or(1.0).abs();
    near("o", &|case| case.o.clone(), 2e-6 * f64::from(scale) * size);
    near("states", &states, 1e-5 * size);
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
    spec.options.update_state = true;
}

/// Slots b, or slots in one pool as they come.
fn in_place(spec: &mut Spec) {
    spec.slots.write_pool = None;
}

/// Read slots, so that rows can move; one pool.
fn with_read_slots(spec: &mut Spec) {
    in_place(spec);
    spec.slots.read = true;
}

/// `0..len` backwards.
fn backwards(len: usize) -> Vec<usize> {
    (0..len).rev().collect()
}

#[test]
fn klast_is_vlast() {
    law(comparable, |backend, spec| {
        let mut problem = spec.problem();
        let [one, other] = [StateLayout::KLast, StateLayout::VLast].map(|layout| {
            problem.options.state_layout = layout;
            run(backend, &problem, &spec.form)
        });
        assert_near(&one, &other);
    });
}

#[test]
fn gva_is_repeated_heads() {
    law(
        |_| {},
        |backend, spec| {
            let problem = spec.problem();
            let heads: Vec<usize> = match problem.options.head_map {
                HeadMap::Grouped => (0..spec.value_heads()).map(|hv| hv / spec.ratio).collect(),
                HeadMap::Tiled => (0..spec.value_heads()).map(|hv| hv % spec.heads).collect(),
            };
            let repeated = Problem {
                q: problem.q.take(1, &heads),
                k: problem.k.take(1, &heads),
                ..problem.clone()
            };
            assert_same_bits(
                &run(backend, &problem, &spec.form),
                &run(backend, &repeated, &spec.form),
            );
        },
    );
}

#[test]
fn tiled_heads_are_grouped_heads_in_another_order() {
    law(
        |spec| spec.options.head_map = HeadMap::Grouped,
        |backend, spec| {
            let grouped = spec.problem();
            let order: Vec<usize> = (0..spec.value_heads())
                .map(|hv| (hv % spec.heads) * spec.ratio + hv / spec.heads)
                .collect();
            let mut tiled = grouped.take_value_heads(&order);
            tiled.options.head_map = HeadMap::Tiled;
            let [grouped, tiled] =
                [grouped, tiled].map(|problem| run(backend, &problem, &spec.form));
            let [batch, _, hv, dim] = grouped.o.dims[..] else {
                panic!("o has four dims")
            };
            assert!(
                take(&grouped.o_bits(), &[batch, hv, dim], 1, &order) == tiled.o_bits(),
                "o differs"
            );
            let states = take(
                &grouped.state_bits(),
                &grouped.written_pool().dims,
                1,
                &order,
            );
            assert!(states == tiled.state_bits(), "states differ");
        },
    );
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
