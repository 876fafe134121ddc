//! Gates and scales: what follows when one changes.

use gated_delta::DType;
use gated_delta::ops::BetaScale;
use gated_delta_reference::gate::{sigmoid, softplus_log_decay};
use gated_delta_tests::case::Case;
use gated_delta_tests::spec::Spec;

use crate::{assert_near, comparable, in_f32, law, run};

#[test]
fn given_gates_are_raw_gates_evaluated() {
    let adjust = |spec: &mut Spec| {
        comparable(spec);
        spec.form.gates = [DType::F32; 2];
        spec.raw = spec.raw.or(Some(BetaScale::Two));
        spec.extreme_gates = false;
    };
    law(adjust, |backend, spec| {
        let raw = spec.problem();
        let mut given = raw.clone();
        let gates = given.raw.take().unwrap();
        let beta_scale = if gates.beta_scale == BetaScale::Two {
            2.0
        } else {
            1.0
        };
        for (i, (a, b)) in given
            .a
            .values
            .iter_mut()
            .zip(&mut given.b.values)
            .enumerate()
        {
            let hv = i % spec.value_heads();
            let (a_log, dt_bias) = (gates.a_log.values[hv], gates.dt_bias.values[hv]);
            *a = softplus_log_decay((*a).into(), a_log.into(), dt_bias.into()) as f32;
            *b = (beta_scale * sigmoid((*b).into())) as f32;
        }
        let [raw, given] = [raw, given].map(|problem| run(backend, &problem, &spec.form));
        assert_near(&raw, &given);
    });
}

/// From a state of zeros, twice the beta is twice the state and twice o.
#[test]
fn a_beta_scale_of_two_doubles_what_is_learnt() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        (spec.raw, spec.extreme_gates) = (Some(BetaScale::One), false);
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        problem.pool.values.iter_mut().for_each(|x| *x *= 0.0);
        let one = run(backend, &problem, &spec.form);
        problem
            .raw
            .iter_mut()
            .for_each(|raw| raw.beta_scale = BetaScale::Two);
        let two = run(backend, &problem, &spec.form);
        assert_doubled(&one.floats(&one.o), &two.floats(&two.o));
        let states = |case: &Case| case.floats(case.written_pool());
        assert_doubled(&states(&one), &states(&two));
    });
}

#[test]
fn twice_the_scale_doubles_o_alone() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.options.scale = Some(0.375);
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let one = run(backend, &problem, &spec.form);
        problem.options.scale = Some(0.75);
        let two = run(backend, &problem, &spec.form);
        assert_doubled(&one.floats(&one.o), &two.floats(&two.o));
        assert!(one.state_bits() == two.state_bits(), "states differ");
    });
}

#[track_caller]
fn assert_doubled(one: &[f64], two: &[f64]) {
    let doubled = |(one, two): (&f64, &f64)| 2.0 * one == *two || (one.is_nan() && two.is_nan());
    assert!(one.iter().zip(two).all(doubled), "not exactly doubled");
}
