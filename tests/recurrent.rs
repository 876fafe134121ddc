//! What GDN MTP verify and recurrent KDA have in common, case by case: see `gdn_mtp` and `kda_recurrent` for random ones.

use gated_delta::DType;
use gated_delta::ops::StateLayout;
use gated_delta_tests::backend::backends;
use gated_delta_tests::compare::{check, check_everywhere};
use gated_delta_tests::layout::{Form, Spacing};
use gated_delta_tests::problem::{Operator, Packed, Problem};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Magnitude, Spec};

fn families() -> Vec<Family> {
    [Operator::GdnMtp, Operator::KdaRecurrent]
        .map(Family::all)
        .concat()
}

/// Launches of `plain` with each way of keeping states that its family has.
fn ways(family: Family, plain: &Spec) -> Vec<Spec> {
    let of_tokens = SlotChoice {
        inactive: plain.slots.inactive,
        ..SlotChoice::OF_TOKENS
    };
    let mut frozen = plain.clone();
    (frozen.options.update_state, frozen.slots.write) = (false, false);
    let mut ways = vec![plain.clone(), frozen];
    if Family::recurrent(family.operator).contains(&family) {
        ways.push(Spec {
            snapshots: Some(1),
            ..plain.clone()
        });
        ways.push(Spec {
            slots: of_tokens,
            ..plain.clone()
        });
    }
    for tokens in [plain.tokens, 0] {
        ways.push(Spec {
            previous: Some(2),
            tokens,
            ..plain.clone()
        });
    }
    ways
}

#[test]
fn every_number_of_tokens() {
    for family in families().into_iter().filter(|family| family.dim == 64) {
        for tokens in 1..=family.max_tokens() {
            let spec = Spec {
                batch: 1,
                heads: 1,
                ratio: 2,
                tokens,
                seed: tokens as u64,
                ..Spec::plain(family)
            };
            check_everywhere(&spec.case(), None);
            let previous = Some(family.max_tokens() + 1 - tokens);
            check_everywhere(&Spec { previous, ..spec }.case(), None);
        }
    }
}

/// Every element type of every tensor, aligned and not.
#[test]
fn every_element_type() {
    for family in families() {
        for spacing in [Spacing::Dense, Spacing::Odd] {
            for element in [DType::F32, DType::Bf16, DType::F16] {
                let mut spec = Spec {
                    batch: 1,
                    heads: 1,
                    previous: Some(2),
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

#[test]
fn an_empty_batch_does_nothing() {
    for family in families() {
        let plain = Spec {
            batch: 0,
            slots: SlotChoice {
                spare: 2,
                ..SlotChoice::NONE
            },
            ..Spec::plain(family)
        };
        for spec in ways(family, &plain) {
            for packed in [false, spec.tokens > 0] {
                let case = Spec {
                    packed,
                    ..spec.clone()
                }
                .case();
                for backend in backends() {
                    let after = backend.run(&case, None);
                    assert!(after == case, "{}: something was written", backend.name());
                }
            }
        }
    }
}

/// An all-padding batch, as engines launch to warm up: zeros, and every state as it was.
#[test]
fn an_inactive_batch_touches_no_state() {
    for family in families() {
        let plain = Spec {
            slots: SlotChoice::LIVE,
            ..Spec::plain(family)
        };
        for spec in ways(family, &plain) {
            let good = spec.problem();
            let bad = |change: &dyn Fn(&mut Problem)| {
                let mut problem = good.clone();
                change(&mut problem);
                problem
            };
            let mut problems = vec![bad(&|problem| {
                let slots = [&mut problem.read_slots, &mut problem.token_slots];
                for slots in slots.into_iter().flatten() {
                    slots.fill(-1);
                }
            })];
            if good.accepted.is_some() {
                problems.push(bad(&|problem| problem.accepted = Some(vec![0; spec.batch])));
                problems.push(bad(&|problem| problem.accepted = Some(vec![4; spec.batch])));
            }
            for keep in [-1, 3] {
                if good.previous.is_some() {
                    problems.push(bad(&|problem| {
                        let previous = problem.previous.iter_mut();
                        previous.for_each(|previous| previous.keep.fill(keep));
                    }));
                }
            }
            for problem in problems {
                let case = problem.case(&spec.form);
                for backend in backends() {
                    let after = backend.run(&case, None);
                    assert!(
                        after.o_bits().iter().all(|bits| *bits == 0),
                        "{}",
                        backend.name()
                    );
                    check(&case, &after);
                    assert!(after.state_bits() == case.state_bits(), "states differ");
                }
            }
        }
    }
}

/// Packed rows without a token, or with too many, or of which the bounds are nowhere: not even o is touched.
#[test]
fn rows_without_tokens_touch_nothing() {
    for family in families() {
        let plain = Spec {
            slots: SlotChoice::LIVE,
            ..Spec::plain(family)
        };
        for spec in ways(family, &plain).iter().filter(|spec| spec.tokens > 0) {
            for cu_seqlens in [[0, 0, 0], [6, 6, 6], [4, 3, 2], [-3, 0, -1], [5, 7, 6]] {
                let mut problem = spec.problem().packed();
                problem.packed = Some(Packed {
                    cu_seqlens: cu_seqlens.to_vec(),
                    max_tokens: spec.tokens,
                });
                let case = problem.case(&spec.form);
                for backend in backends() {
                    let after = backend.run(&case, None);
                    assert!(after == case, "{cu_seqlens:?}: something was written");
                }
            }
        }
    }
}

/// Each state that is read or written once, every other tensor once.
#[test]
fn bytes_are_what_must_be_moved() {
    let family = Family::new(Operator::GdnMtp, StateLayout::KLast, DType::F32, 64);
    let plain = Spec {
        batch: 3,
        ..Spec::plain(family)
    };
    let state = 3 * 4 * 64 * 64 * 4;
    let of_tokens = |tokens: u64| 2 * tokens * ((2 + 4) * 64 + 4 + 4);
    let parameters = 4 * (4 + 4);
    let new = of_tokens(9) + 2 * 9 * (2 + 4) * 64;
    let bytes = |change: fn(&mut Spec)| {
        let mut spec = plain.clone();
        change(&mut spec);
        let (bytes, _) = backends()[0]
            .with(&spec.case(), |_, _, args| args.bytes())
            .unwrap();
        bytes.unwrap() - parameters
    };
    assert_eq!(bytes(|_| {}), 2 * state + new);
    assert_eq!(bytes(|spec| spec.slots.read = true), 2 * state + new + 12);
    assert_eq!(bytes(|spec| spec.options.update_state = false), state + new);
    assert_eq!(bytes(|spec| spec.snapshots = Some(2)), 5 * state + new);
    assert_eq!(
        bytes(|spec| (spec.snapshots, spec.options.update_state) = (Some(0), false)),
        4 * state + new
    );
    assert_eq!(
        bytes(|spec| spec.slots = SlotChoice::OF_TOKENS),
        4 * state + new + 4 * (9 + 3)
    );
    assert_eq!(
        bytes(|spec| spec.previous = Some(5)),
        2 * state + new + of_tokens(15) + 12
    );
    assert_eq!(
        bytes(|spec| (spec.previous, spec.tokens) = (Some(5), 0)),
        2 * state + of_tokens(15) + 12
    );
}
