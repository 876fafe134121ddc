//! GDN decode against the reference: every entry on every backend, over random problems.

use gated_delta::DType;
use gated_delta::ops::{BetaScale, StateLayout};
use gated_delta_kernels::for_each_entry;
use gated_delta_reference::gate::{sigmoid, softplus_log_decay};
use gated_delta_reference::recurrence::{Token, default_scale, normalise, recurrence};
use gated_delta_tests::backend::backends;
use gated_delta_tests::compare::{assert_close, check, check_everywhere, norm};
use gated_delta_tests::layout::{Form, Spacing};
use gated_delta_tests::problem::{Array, GateKind, Operator, Problem, Tokens};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Magnitude, Spec};

macro_rules! entries {
    ($($table:tt)*) => { gated_delta_tests::differential_tests!(gdn_decode: $($table)*); };
}
for_each_entry!(entries);

fn families() -> Vec<Family> {
    Family::all(Operator::GdnDecode)
}

/// The variant that is selected for the arguments, whichever it is.
#[test]
fn the_selected_variant() {
    for family in families() {
        check_everywhere(
            &Spec {
                slots: SlotChoice::BOTH,
                batch: 3,
                ..Spec::plain(family)
            }
            .case(),
            None,
        );
    }
}

/// Every element type of every tensor, aligned and not, in the path of one family of each layout and K.
#[test]
fn every_element_type() {
    for family in families()
        .into_iter()
        .filter(|family| family.state == DType::Bf16)
    {
        for spacing in [Spacing::Dense, Spacing::Odd] {
            for element in [DType::F32, DType::Bf16, DType::F16] {
                let mut spec = Spec {
                    batch: 1,
                    heads: 1,
                    ..Spec::plain(family)
                };
                spec.form = Form {
                    qkvo: [element; 4],
                    gates: [element; 2],
                    io: spacing,
                    pools: spacing,
                    ..spec.form
                };
                check_everywhere(&spec.case(), None);
            }
        }
    }
}

#[test]
fn gates_at_the_ends_of_their_range() {
    for family in families() {
        for (seed, gates) in [
            (1, GateKind::Raw(BetaScale::One)),
            (2, GateKind::Raw(BetaScale::Two)),
            (3, GateKind::Given),
        ] {
            let mut spec = Spec {
                extreme_gates: true,
                gates,
                seed,
                heads: 2,
                ratio: 3,
                batch: 1,
                ..Spec::plain(family)
            };
            spec.form.gates = [DType::F32; 2];
            check_everywhere(&spec.case(), None);
        }
    }
}

#[test]
fn zero_queries_and_keys() {
    for family in families() {
        for qk_l2norm in [true, false] {
            let mut spec = Spec {
                magnitude: Magnitude::Zeros,
                seed: 5,
                ..Spec::plain(family)
            };
            spec.options.qk_l2norm = qk_l2norm;
            check_everywhere(&spec.case(), None);
        }
    }
}

/// Many inactive rows among few live ones, all kinds of indices.
#[test]
fn inactive_rows() {
    for family in families() {
        for (seed, index) in [DType::I32, DType::I64, DType::U32].into_iter().enumerate() {
            for null_slot in [None, Some(0)] {
                let mut spec = Spec {
                    batch: 8,
                    heads: 1,
                    ratio: 1,
                    slots: SlotChoice::BOTH,
                    ..Spec::plain(family)
                };
                spec.form.indices = [index; 6];
                spec.options.null_slot = null_slot;
                spec.seed = seed as u64;
                let case = spec.case();
                let live = case.rows().iter().filter(|row| row.live.is_some()).count();
                assert!(
                    (1..spec.batch).contains(&live),
                    "{live} live rows of {}: choose another seed",
                    spec.batch
                );
                check_everywhere(&case, None);
            }
        }
    }
}

#[test]
fn an_empty_batch_does_nothing() {
    for family in families() {
        for slots in [
            SlotChoice {
                spare: 2,
                ..SlotChoice::NONE
            },
            SlotChoice::LIVE,
        ] {
            let case = Spec {
                batch: 0,
                slots,
                ..Spec::plain(family)
            }
            .case();
            for backend in backends() {
                assert!(
                    backend.run(&case, None) == case,
                    "{}: something was written",
                    backend.name()
                );
            }
        }
    }
}

/// An all-padding batch, as engines launch to warm up: zeros, and every state as it was.
#[test]
fn an_inactive_batch_touches_no_state() {
    for family in families() {
        let spec = Spec {
            slots: SlotChoice::LIVE,
            ..Spec::plain(family)
        };
        let mut problem = spec.problem();
        problem.read_slots = Some(vec![-1; spec.batch]);
        let case = problem.case(&spec.form);
        for backend in backends() {
            let after = backend.run(&case, None);
            assert!(
                after.o_bits().iter().all(|bits| *bits == 0),
                "{}",
                backend.name()
            );
            check(&case, &after);
        }
    }
}

/// A pool that is not written may be borrowed read-only, as may everything else but o.
#[test]
fn without_update_the_pool_is_only_read() {
    for family in families() {
        let mut spec = Spec::plain(family);
        spec.options.update_state = false;
        let case = spec.case();
        assert!(!case.writes(case.pool.buffer));
        check_everywhere(&case, None);
    }
}

/// Hundreds of launches in place, f32: rounding errors do not add up, since the decay forgets them.
#[test]
fn a_long_sequence_stays_near_the_truth() {
    const STEPS: u64 = 300;
    for family in families()
        .into_iter()
        .filter(|family| family.state == DType::F32 && family.dim == 64)
    {
        let mut spec = Spec {
            batch: 1,
            heads: 1,
            ratio: 1,
            ..Spec::plain(family)
        };
        spec.form = Form {
            state: DType::F32,
            ..Form::PLAIN
        };
        let start = spec.problem().pool;
        let steps: Vec<Problem> = (0..STEPS)
            .map(|seed| {
                Spec {
                    seed,
                    ..spec.clone()
                }
                .problem()
            })
            .collect();
        let tokens: Vec<Token> = steps.iter().map(token).collect();
        let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let truth = recurrence(&wide(&start.values), &tokens).unwrap();
        for backend in backends() {
            let mut pool = start.clone();
            for (step, truth) in steps.iter().zip(&truth) {
                let after = backend.run(
                    &Problem {
                        pool,
                        ..step.clone()
                    }
                    .case(&spec.form),
                    None,
                );
                let state = after.floats(&after.as_klast(&after.pool));
                assert_close(
                    "state",
                    &state,
                    &truth.state,
                    DType::F32,
                    1e-5 * norm(&truth.state),
                );
                pool = Array {
                    dims: start.dims.clone(),
                    values: state.iter().map(|x| *x as f32).collect(),
                };
            }
        }
    }
}

/// The token of one row and head.
fn token(problem: &Problem) -> Token {
    let wide = |array: &Array| {
        array
            .values
            .iter()
            .map(|x| f64::from(*x))
            .collect::<Vec<_>>()
    };
    let parameter = |array: &Option<Array>| wide(array.as_ref().unwrap())[0];
    let Tokens { k, v, gate, beta } = problem.tokens.map(wide);
    let (a_log, dt_bias) = (
        parameter(&problem.gates.a_log),
        parameter(&problem.gates.dt_bias),
    );
    Token {
        q: normalise(&wide(&problem.q), true, default_scale(k.len())),
        k: normalise(&k, true, 1.0),
        log_decay: vec![softplus_log_decay(gate[0], a_log, dt_bias); k.len()],
        beta: sigmoid(beta[0]),
        v,
    }
}

/// Each state once to read and once to write, every other tensor once.
#[test]
fn bytes_are_what_must_be_moved() {
    let mut spec = Spec {
        batch: 3,
        ..Spec::plain(Family::new(
            Operator::GdnDecode,
            StateLayout::KLast,
            DType::F32,
            64,
        ))
    };
    let state = 3 * 4 * 64 * 64 * 4;
    let qkvo = 2 * 3 * (2 * 64 + 2 * 64 + 4 * 64 + 4 * 64);
    let gates = 2 * 3 * (4 + 4) + 4 * (4 + 4);
    let bytes = |spec: &Spec| {
        backends()[0]
            .with(&spec.case(), |_, _, args| args.bytes())
            .unwrap()
            .0
            .unwrap()
    };
    assert_eq!(bytes(&spec), 2 * state + qkvo + gates);
    spec.slots.read = true;
    assert_eq!(bytes(&spec), 2 * state + qkvo + gates + 3 * 4);
    spec.options.update_state = false;
    assert_eq!(bytes(&spec), state + qkvo + gates + 3 * 4);
}
