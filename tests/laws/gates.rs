//! Gates and scales: what follows when one changes.

use gated_delta::DType;
use gated_delta::ops::BetaScale;
use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta_reference::gate::{lower_bound_log_decay, sigmoid, softplus_log_decay};
use gated_delta_tests::case::Case;
use gated_delta_tests::compare::assert_near;
use gated_delta_tests::problem::{Array, GateKind, Gates, KdaDecay, Operator, Tokens};
use gated_delta_tests::spec::{Family, Spec};

use crate::{all, in_f32, law_of, run, several};

#[test]
fn given_gates_are_raw_gates_evaluated() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.form.gates = [DType::F32; 2];
        spec.gates = match spec.gates {
            GateKind::Given => GateKind::Raw(BetaScale::Two),
            GateKind::Kda(KdaDecay::Log, beta) => GateKind::Kda(KdaDecay::Softplus, beta),
            gates => gates,
        };
        (spec.extreme_gates, spec.parameters.of_h) = (false, false);
    };
    // In f32, which the tensor cores do not take.
    law_of(all(Family::recurrent), adjust, |backend, spec| {
        let raw = spec.problem();
        let mut given = raw.clone();
        let kind = match spec.operator {
            Operator::KdaRecurrent => GateKind::Kda(KdaDecay::Log, KdaBeta::Given),
            _ => GateKind::Given,
        };
        let gates = Gates {
            kind,
            a_log: None,
            dt_bias: None,
        };
        let gates = std::mem::replace(&mut given.gates, gates);
        let previous = given.previous.as_mut().map(|previous| &mut previous.tokens);
        for tokens in [Some(&mut given.tokens), previous].into_iter().flatten() {
            evaluate(&gates, tokens, spec.value_heads());
        }
        let before = raw.case(&spec.form);
        let [raw, given] = [raw, given].map(|problem| run(backend, &problem, &spec.form));
        assert_near(&before, &raw, &given);
    });
}

/// Log decays and β in place of what they are computed from.
fn evaluate(gates: &Gates<Array>, tokens: &mut Tokens<Array>, heads: usize) {
    let of_head = tokens.gate.values.len() / tokens.beta.values.len().max(1);
    for (i, x) in tokens.gate.values.iter_mut().enumerate() {
        let (hv, channel) = (i / of_head % heads, i % (of_head * heads));
        let a_log = gates.a_log.as_ref().map_or(0.0, |array| array.values[hv]);
        let dt_bias = gates
            .dt_bias
            .as_ref()
            .map_or(0.0, |array| array.values[channel]);
        let (given, a_log, dt_bias) = (f64::from(*x), a_log.into(), dt_bias.into());
        *x = match gates.kind {
            GateKind::Kda(KdaDecay::LowerBound(bound), _) => {
                lower_bound_log_decay(given, bound.into(), a_log, dt_bias) as f32
            }
            _ => softplus_log_decay(given, a_log, dt_bias) as f32,
        };
    }
    let factor = match gates.kind {
        GateKind::Raw(BetaScale::Two) => 2.0,
        GateKind::Kda(_, KdaBeta::Given) => return,
        _ => 1.0,
    };
    for x in &mut tokens.beta.values {
        *x = (factor * sigmoid((*x).into())) as f32;
    }
}

/// From a state of zeros, twice the beta is twice the state and twice o of the first token.
#[test]
fn a_beta_scale_of_two_doubles_what_is_learnt() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        (spec.gates, spec.extreme_gates) = (GateKind::Raw(BetaScale::One), false);
        (spec.tokens, spec.previous) = (1, None);
    };
    let gdn = [Operator::GdnDecode, Operator::GdnMtp].map(Family::recurrent);
    law_of(gdn.concat(), adjust, |backend, spec| {
        let mut problem = spec.problem();
        problem.pool.values.iter_mut().for_each(|x| *x *= 0.0);
        let one = run(backend, &problem, &spec.form);
        problem.gates.kind = GateKind::Raw(BetaScale::Two);
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
    law_of(crate::all(Family::recurrent), adjust, |backend, spec| {
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

/// One decay for all channels of a head is GDN's decay.
#[test]
fn kda_of_equal_channels_is_gdn() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.gates = GateKind::Given;
    };
    law_of(
        Family::recurrent(Operator::GdnMtp),
        adjust,
        |backend, spec| {
            let gdn = spec.problem();
            let mut kda = gdn.clone();
            kda.operator = Operator::KdaRecurrent;
            kda.gates.kind = GateKind::Kda(KdaDecay::Log, KdaBeta::Given);
            let previous = kda.previous.as_mut().map(|previous| &mut previous.tokens);
            for tokens in [Some(&mut kda.tokens), previous].into_iter().flatten() {
                let of_each = |x: &f32| std::iter::repeat_n(*x, spec.dim);
                tokens.gate = Array {
                    values: tokens.gate.values.iter().flat_map(of_each).collect(),
                    dims: [&tokens.gate.dims[..], &[spec.dim]].concat(),
                };
            }
            let before = gdn.case(&spec.form);
            let [gdn, kda] = [gdn, kda].map(|problem| run(backend, &problem, &spec.form));
            assert_near(&before, &gdn, &kda);
        },
    );
}

/// The sigmoid and the softplus of ±1e4 are finite, and so is all that comes of them.
#[test]
fn saturated_gates_give_finite_results() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        spec.form.gates = [DType::F32; 2];
        spec.slots.inactive = false;
        spec.gates = match spec.gates {
            GateKind::Given => GateKind::Raw(BetaScale::Two),
            GateKind::Kda(KdaDecay::Log, _) => GateKind::Kda(KdaDecay::Softplus, KdaBeta::Logit),
            GateKind::Kda(decay, _) => GateKind::Kda(decay, KdaBeta::Logit),
            gates => gates,
        };
    };
    law_of(several(Family::recurrent), adjust, |backend, spec| {
        let mut problem = spec.problem();
        let previous = problem
            .previous
            .as_mut()
            .map(|previous| &mut previous.tokens);
        for tokens in [Some(&mut problem.tokens), previous].into_iter().flatten() {
            let gates = [&mut tokens.gate, &mut tokens.beta];
            for x in gates.into_iter().flat_map(|array| &mut array.values) {
                *x = 1e4f32.copysign(*x);
            }
        }
        let before = problem.case(&spec.form);
        let after = backend.run(&before, None);
        for row in before.rows() {
            let tokens = row.tokens.iter().flat_map(Clone::clone);
            for token in tokens.filter(|_| row.live.is_some()) {
                let o = after.floats(&after.o.entry(&after.token(token)));
                assert!(o.iter().all(|x| x.is_finite()), "o of token {token}");
            }
            for slot in row.live.iter().flat_map(|live| live.writes()) {
                let state = after.floats(&after.written_pool().entry(&[slot]));
                assert!(state.iter().all(|x| x.is_finite()), "state of slot {slot}");
            }
        }
    });
}
