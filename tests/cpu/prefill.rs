//! Prefills with values that are rare among random problems, against the reference.

use gated_delta::{Activation, DType, KdaBeta, StateLayout};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};
use gated_delta_test_support::backend::{MACHINES, Turns};
use gated_delta_test_support::compare::{assert_close, check_everywhere, norm, reference};
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Change, Sizes};
use gated_delta_test_support::spec::{ConvChoice, Family, Magnitude, NormChoice, Spec};

/// Precomputed log decays and betas.
fn given(operator: Operator) -> GateKind {
    match operator {
        Operator::Gdn => GateKind::Given,
        Operator::Kda => GateKind::Kda(DecayKind::Log, KdaBeta::Given),
    }
}

/// The prefills of f32 K-last states with K = `dim`.
fn f32_klast(dim: usize) -> impl Iterator<Item = Family> {
    let wanted = (DType::F32, StateLayout::KLast, dim);
    let families = Family::prefills().into_iter();
    families.filter(move |family| (family.state, family.layout, family.dim) == wanted)
}

/// Without decay, tokens with β = 2 reflect the state along keys that a SiLU makes similar. The updates cancel, their rounding
/// errors do not. Errors are a larger part of the state here, but not larger than rounding explains.
#[test]
fn states_that_are_reflected_are_as_near_as_rounding_keeps_them() {
    for family in Family::prefills() {
        if (family.state, family.layout) != (DType::F32, StateLayout::KLast) {
            continue;
        }
        let spec = Spec {
            batch: 1,
            tokens: 200,
            heads: 1,
            gates: given(family.operator),
            conv: Some(ConvChoice {
                taps: 3,
                bias: true,
                activation: Activation::Silu,
                apart: false,
                window_snapshots: None,
            }),
            norm: Some(NormChoice {
                eps: 0.5,
                activation: Activation::Silu,
            }),
            ..Spec::plain(family)
        };
        let reflected = spec.problem().map_gates(|log_decay, beta| {
            log_decay.values.fill(0.0);
            beta.values.fill(2.0);
        });
        check_everywhere(&reflected.case(&spec.form), None);
    }
}

/// Equal keys without decay and β = 1 or 2: cancellation among the tokens of a chunk leaves results as exact as usual.
#[test]
fn keys_that_repeat_leave_results_as_near() {
    /// Bounds on the errors of o and of states, relative to their norms.
    const MOST: [f64; 2] = [2.5e-3, 2e-3];
    for family in f32_klast(128) {
        let turns = Turns::of_machines();
        for (machine, beta) in (0..MACHINES.len()).flat_map(|i| [(i, 1.0), (i, 2.0)]) {
            let mut spec = Spec {
                batch: 1,
                tokens: 130,
                heads: 1,
                ratio: 1,
                gates: given(family.operator),
                seed: machine as u64,
                ..Spec::plain(family)
            };
            spec.form.qkvo[3] = DType::F32;
            let problem = spec.problem().map_gates(|log_decay, of_token| {
                log_decay.values.fill(0.0);
                of_token.values.fill(beta);
            });
            let problem = problem.each(|name, array| {
                if name == "k" {
                    let first = array.values[..family.dim].to_vec();
                    let keys = array.values.iter_mut().zip(first.iter().cycle());
                    keys.for_each(|(k, first)| *k = first + 0.01 * *k);
                }
            });
            let case = problem.case(&spec.form);
            let (o, states) = reference(&case, &case.floats(&case.as_klast(&case.pool)));
            turns.next(|backend| {
                let after = backend.run(&case, None);
                let written = after.as_klast(after.written_pool());
                for ((what, view), (exact, most)) in [("o", after.o()), ("states", &written)]
                    .into_iter()
                    .zip([&o, &states].into_iter().zip(MOST))
                {
                    let allowed = most * norm(exact);
                    assert_close(what, &after.floats(view), exact, DType::F32, allowed);
                }
            });
        }
    }
}

/// Normalised q and k with elements of 1e38, 1e19 and 1e-20 next to usual ones give the right results, in chunks and in rows of one
/// token.
#[test]
fn queries_and_keys_beyond_the_squares_of_f32() {
    for family in Family::prefills() {
        if family.state != DType::F32 || family.dim == 128 {
            continue;
        }
        for tokens in [70, 1] {
            let spec = Spec {
                batch: 1,
                tokens,
                heads: 1,
                magnitude: Magnitude::Extreme,
                ..Spec::plain(family)
            };
            check_everywhere(&spec.case(), None);
        }
    }
}

/// The inter-chunk scan stores o for a norm in f16. The stored values neither overflow nor lose digits, whatever the scale of q.
#[test]
fn any_scale_is_normed() {
    for family in f32_klast(64) {
        for scale in [1e-3, -3e4] {
            let mut spec = Spec {
                batch: 1,
                tokens: 70,
                heads: 1,
                conv: None,
                norm: Some(NormChoice {
                    eps: 1e-20,
                    activation: Activation::Silu,
                }),
                ..Spec::plain(family)
            };
            spec.options.scale = Some(scale);
            let problem = spec.problem().each(|name, array| {
                if name == "v" {
                    array.values.iter_mut().for_each(|v| *v *= 8.0);
                }
            });
            check_everywhere(&problem.case(&spec.form), None);
        }
    }
}

/// Without keys and values o is q̂ times what is left of the state, as exact as usual after 64 binades of decay.
#[test]
fn what_is_left_of_a_state_is_read_as_exactly() {
    for family in f32_klast(128) {
        let spec = Spec {
            batch: 1,
            tokens: 64,
            heads: 1,
            gates: given(family.operator),
            ..Spec::plain(family)
        };
        let problem = spec
            .problem()
            .map_gates(|log_decay, _| log_decay.values.fill(-0.7));
        let problem = problem.each(|name, array| {
            if matches!(name, "k" | "v") {
                array.values.fill(0.0);
            }
        });
        check_everywhere(&problem.case(&spec.form), None);
    }
}
