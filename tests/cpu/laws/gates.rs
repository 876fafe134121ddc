//! Gates and scales: effects of their changes on results.

use gated_delta::{BetaScale, DType, KdaBeta};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};
use gated_delta_reference::gate::{lower_bound_log_decay, sigmoid, softplus_log_decay};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::{assert_near, check};
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Array, Change, Problem, Sizes};
use gated_delta_test_support::spec::{Family, Magnitude, Spec};

use crate::laws::{alone_recurrent, in_f32, law_of, run, several_recurrent};

#[test]
fn given_gates_are_raw_gates_evaluated() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.form.gates = [DType::F32; 2];
        spec.gates = match spec.gates {
            GateKind::Given => GateKind::Raw(BetaScale::Two),
            GateKind::Kda(DecayKind::Log, beta) => GateKind::Kda(DecayKind::Softplus, beta),
            gates => gates,
        };
        (spec.extreme_gates, spec.parameters.of_h) = (false, false);
    };
    // The problems are in f32, which tensor cores do not take.
    law_of(alone_recurrent(), adjust, |backend, spec| {
        let raw = spec.problem();
        let given = Problem {
            gates: match spec.gates.operator() {
                Operator::Kda => GateKind::Kda(DecayKind::Log, KdaBeta::Given),
                Operator::Gdn => GateKind::Given,
            },
            a_log: None,
            dt_bias: None,
            ..raw.map_gates(|gate, beta| evaluate(&raw, gate, beta))
        };
        let before = raw.case(&spec.form);
        let [raw, given] = [raw, given].map(|problem| run(backend, &problem, &spec.form));
        assert_near(&before, &raw, &given);
    });
}

/// Replaces raw gates by the log decays and β that are computed from them.
fn evaluate(raw: &Problem, gate: &mut Array, beta: &mut Array) {
    let heads = raw.value_heads();
    let of_head = gate.values.len() / beta.values.len().max(1);
    for (i, x) in gate.values.iter_mut().enumerate() {
        let (hv, channel) = (i / of_head % heads, i % (of_head * heads));
        let parameter =
            |array: &Option<Array>, i| array.as_ref().map_or(0.0, |array| array.values[i]);
        let (a_log, dt_bias) = (parameter(&raw.a_log, hv), parameter(&raw.dt_bias, channel));
        *x = match raw.gates {
            GateKind::Kda(DecayKind::LowerBound(bound), _) => {
                lower_bound_log_decay(*x, bound.into(), a_log, dt_bias)
            }
            _ => softplus_log_decay(*x, a_log, dt_bias),
        };
    }
    let factor = match raw.gates {
        GateKind::Raw(BetaScale::Two) => 2.0,
        GateKind::Kda(_, KdaBeta::Given) => return,
        _ => 1.0,
    };
    for x in &mut beta.values {
        *x = factor * sigmoid(*x);
    }
}

/// From a zero state, a doubled β doubles the state and o of the first token.
#[test]
fn a_beta_scale_of_two_doubles_what_is_learnt() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        (spec.gates, spec.extreme_gates) = (GateKind::Raw(BetaScale::One), false);
        (spec.tokens, spec.previous) = (1, None);
    };
    let gdn =
        |family: Family| family.operator == Operator::Gdn && family.is_recurrent() && !family.layer;
    law_of(Family::which(gdn), adjust, |backend, spec| {
        let mut problem = spec.problem();
        problem.pool.values.iter_mut().for_each(|x| *x *= 0.0);
        let one = run(backend, &problem, &spec.form);
        problem.gates = GateKind::Raw(BetaScale::Two);
        let two = run(backend, &problem, &spec.form);
        assert_doubled(&one.floats(one.o()), &two.floats(two.o()));
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
    law_of(alone_recurrent(), adjust, |backend, spec| {
        let mut problem = spec.problem();
        let one = run(backend, &problem, &spec.form);
        problem.options.scale = Some(0.75);
        let two = run(backend, &problem, &spec.form);
        let o = |case: &Case| {
            case.new
                .iter()
                .flat_map(|new| case.floats(&new.o))
                .collect::<Vec<_>>()
        };
        assert_doubled(&o(&one), &o(&two));
        assert!(one.state_bits() == two.state_bits(), "states differ");
    });
}

/// Fails unless each of `two` is twice that of `one`. A subnormal one is rounded to the grid of these, and so may be two steps off.
#[track_caller]
fn assert_doubled(one: &[f64], two: &[f64]) {
    let step = f64::from(f32::from_bits(1));
    let doubled = |(one, two): &(&f64, &f64)| {
        let (one, two) = (**one, **two);
        let is_subnormal = one.abs() < f64::from(f32::MIN_POSITIVE);
        2.0 * one == two
            || (one.is_nan() && two.is_nan())
            || is_subnormal && (2.0 * one - two).abs() <= 2.0 * step
    };
    let mut pairs = one.iter().zip(two);
    let off = pairs.find(|pair| !doubled(pair));
    assert!(off.is_none(), "not exactly doubled: {off:?}");
}

/// KDA with one decay for all channels of a head equals GDN.
#[test]
fn kda_of_equal_channels_is_gdn() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.gates = GateKind::Given;
    };
    // KDA has no kernels with K = 96.
    let gdn = |family: Family| {
        let is_gdn = family.operator == Operator::Gdn && family.dim != 96;
        is_gdn && family.is_recurrent() && !family.layer
    };
    law_of(Family::which(gdn), adjust, |backend, spec| {
        let gdn = spec.problem();
        let of_each = |x: &f64| std::iter::repeat_n(*x, spec.dim);
        let mut kda = gdn.map_gates(|gate, _| {
            *gate = Array {
                values: gate.values.iter().flat_map(of_each).collect(),
                dims: [&gate.dims[..], &[spec.dim]].concat(),
            };
        });
        kda.gates = GateKind::Kda(DecayKind::Log, KdaBeta::Given);
        let before = gdn.case(&spec.form);
        let [gdn, kda] = [gdn, kda].map(|problem| run(backend, &problem, &spec.form));
        assert_near(&before, &gdn, &kda);
    });
}

/// Sigmoid and softplus of ±1e4 are finite, and so are all results.
#[test]
fn saturated_gates_give_finite_results() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.form.gates = [DType::F32; 2];
        spec.slots.inactive = false;
        spec.gates = match spec.gates {
            GateKind::Given => GateKind::Raw(BetaScale::Two),
            GateKind::Kda(DecayKind::Log, _) => GateKind::Kda(DecayKind::Softplus, KdaBeta::Logit),
            GateKind::Kda(decay, _) => GateKind::Kda(decay, KdaBeta::Logit),
            gates => gates,
        };
    };
    law_of(several_recurrent(), adjust, |backend, spec| {
        let problem = spec.problem().map_gates(|gate, beta| {
            let gates = [gate, beta];
            for x in gates.into_iter().flat_map(|array| &mut array.values) {
                *x = 1e4f64.copysign(*x);
            }
        });
        let before = problem.case(&spec.form);
        let after = backend.run(&before, None);
        for row in before.rows() {
            let tokens = row.tokens.iter().flat_map(Clone::clone);
            for token in tokens.filter(|_| row.live.is_some()) {
                let o = after.floats(&after.o().entry(&after.token(token)));
                assert!(o.iter().all(|x| x.is_finite()), "o of token {token}");
            }
            for slot in row.live.iter().flat_map(|live| live.writes()) {
                let state = after.floats(&after.written_pool().entry(&[slot]));
                assert!(state.iter().all(|x| x.is_finite()), "state of slot {slot}");
            }
        }
    });
}

/// Decays to nothing, of whole heads and of some channels, give no NaN and right later results.
#[test]
fn decays_to_nothing() {
    let adjust = |spec: &mut Spec| {
        spec.gates = match spec.gates {
            GateKind::Kda(_, beta) => GateKind::Kda(DecayKind::Log, beta),
            _ => GateKind::Given,
        };
        spec.extreme_gates = false;
    };
    law_of(Family::alone(), adjust, |backend, spec| {
        for lowest in [-80.0, -1e4, -1e30, f64::NEG_INFINITY] {
            let problem = spec.problem().map_gates(|gate, beta| {
                let of_head = gate.values.len() / beta.values.len().max(1);
                for (i, g) in gate.values.iter_mut().enumerate() {
                    let (head, channel) = (i / of_head, i % of_head);
                    let channels = of_head > 1 && head % 2 == 0 && channel % 7 == 0;
                    if !g.is_nan() && (head % 5 == 2 || channels) {
                        *g = lowest;
                    }
                }
            });
            let before = problem.case(&spec.form);
            check(&before, &backend.run(&before, None));
        }
    });
}

/// Raw f32 gates, which the kernel evaluates.
fn raw_in_f32(spec: &mut Spec) {
    spec.form.gates = [DType::F32; 2];
    spec.extreme_gates = false;
    spec.gates = match spec.gates {
        GateKind::Given => GateKind::Raw(BetaScale::One),
        GateKind::Kda(DecayKind::Log, beta) => GateKind::Kda(DecayKind::Softplus, beta),
        gates => gates,
    };
    (spec.parameters.a_log, spec.parameters.dt_bias) = (true, true);
}

/// a + dt_bias beyond the range of f32 gives finite results near the reference, also if its factor exp(A_log) is 0.
#[test]
fn a_sum_of_gates_beyond_f32_is_no_nan() {
    law_of(Family::alone(), raw_in_f32, |backend, spec| {
        let mut problem = spec.problem().map_gates(|gate, _| {
            let given = gate.values.iter_mut().filter(|x| !x.is_nan());
            given.for_each(|x| *x = 3e38);
        });
        for (parameter, x) in [(&mut problem.a_log, -200.0), (&mut problem.dt_bias, 3e38)] {
            let array = parameter.as_mut().expect("a parameter of raw gates");
            array.values.fill(x);
        }
        let before = problem.case(&spec.form);
        check(&before, &backend.run(&before, None));
    });
}

/// A NaN in A_log gives NaN in o. It is not taken for a decay to nothing.
#[test]
fn a_nan_in_a_log_is_a_nan_in_o() {
    let adjust = |spec: &mut Spec| {
        raw_in_f32(spec);
        (spec.slots.inactive, spec.options.null_slot) = (false, None);
        (spec.options.scale, spec.magnitude) = (None, Magnitude::Usual);
        (spec.tokens, spec.packed, spec.previous) = (spec.tokens.max(1), false, None);
    };
    law_of(Family::alone(), adjust, |backend, spec| {
        let mut problem = spec.problem();
        let a_log = problem.a_log.as_mut().expect("a parameter of raw gates");
        a_log.values.fill(f64::NAN);
        let before = problem.case(&spec.form);
        let after = backend.run(&before, None);
        for (b, row) in before.rows().into_iter().enumerate() {
            let o = after.floats(&after.o().entry(&[b]));
            let is_nan = o.iter().all(|x| x.is_nan());
            assert!(row.live.is_none() || is_nan, "o of row {b}");
        }
    });
}
