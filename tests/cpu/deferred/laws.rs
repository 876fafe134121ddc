//! What holds of states that wait, bit for bit, whatever the reference says.

use gated_delta::DType;
use gated_delta_harness::arguments::Operator;
use gated_delta_reference::compare::norm;
use gated_delta_test_support::backend::{Backend, backends};
use gated_delta_test_support::deferred::{Problem, Spec};

/// Runs `law` on every backend, for either operator, either state and either dim, alone, with drafts, in a layer, and with drafts
/// in a layer of GDN of the smaller dim; of which gates that are given, not raw, have one without any of these.
fn law(len: &[i64], law: impl Fn(&Backend, &Spec)) {
    for backend in backends() {
        for operator in [Operator::Gdn, Operator::Kda] {
            for state in [DType::Bf16, DType::F32] {
                for dim in [64, 128] {
                    for raw_gates in [false, true] {
                        if !raw_gates && dim == 128 {
                            continue;
                        }
                        let spec = Spec {
                            raw_gates,
                            ..Spec::new(operator, state, dim, len)
                        };
                        law(backend, &spec);
                        if raw_gates {
                            law(backend, &spec.clone().layer());
                        }
                        let has_drafts = dim == 128 || operator == Operator::Gdn;
                        if raw_gates && state != DType::F32 && has_drafts {
                            let drafts = with_drafts(spec, 4);
                            law(backend, &drafts);
                            if dim == 64 && operator == Operator::Gdn {
                                law(backend, &drafts.layer());
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The same rows with drafts, twice as many tokens pending of each, so that as many of them fold.
fn with_drafts(spec: Spec, tokens: usize) -> Spec {
    let len = spec.len.iter().map(|len| 2 * len).collect();
    Spec { len, ..spec }.drafts(tokens)
}

/// What row b is given and leaves, wherever its slot and its ring begin.
fn row(before: &Problem, after: &Problem, b: usize) -> [Vec<u64>; 4] {
    let spec = &before.spec;
    let [slot, len, base] = spec.live(b).unwrap();
    let entries = (0..spec.tokens).map(|t| (base + len + t) % spec.ring[1]);
    [
        after.o_bits(b),
        after.state_bits(slot),
        entries
            .flat_map(|entry| after.entry_bits(slot, entry))
            .collect(),
        after.window_bits(slot),
    ]
}

#[test]
fn a_step_depends_on_no_other_row() {
    law(&[0, 3, 8, 1, 7], |backend, spec| {
        let problem = spec.problem();
        let together = problem.run(backend, None);
        for b in 0..spec.slots.len() {
            let alone = problem.alone(b);
            let after = alone.run(backend, None);
            assert!(
                row(&problem, &together, b) == row(&alone, &after, 0),
                "row {b} of {spec:?}"
            );
        }
    });
}

#[test]
fn every_variant_has_the_same_bits() {
    law(&[0, 3, 8, 1, 7], |backend, spec| {
        for tokens in [0, spec.tokens] {
            let spec = Spec {
                tokens,
                ..spec.clone()
            };
            let problem = spec.problem();
            let selected = problem.run(backend, None);
            for variant in problem.variants() {
                let other = problem.run(backend, Some(variant));
                assert!(
                    selected.written() == other.written(),
                    "{variant:?}, {spec:?}"
                );
            }
        }
    });
}

/// What is normalised knows no power of two, whether f32 holds the squares or not: neither in the step nor in the next one, for
/// which its tokens are pending.
#[test]
fn a_step_normalises_what_is_beyond_the_squares_of_f32() {
    law(&[0, 3, 8], |backend, spec| {
        let [(near, after_near), (far, after_far)] = [2f32.powi(40), 2f32.powi(110)].map(|power| {
            let problem = spec.problem().with_times_the_queries_and_keys(power);
            let after = problem.run(backend, None);
            let next = problem.next(&after, 1, 8);
            (after, next.run(backend, None))
        });
        for b in 0..spec.slots.len() {
            assert!(near.o(b).iter().any(|o| *o != 0.0), "row {b} of {spec:?}");
            for (near, far) in [(&near, &far), (&after_near, &after_far)] {
                assert!(
                    near.o(b).iter().all(|o| o.is_finite()),
                    "row {b} of {spec:?}"
                );
                assert!(near.o_bits(b) == far.o_bits(b), "row {b} of {spec:?}");
            }
            let [slot, ..] = spec.live(b).unwrap();
            let [near, far] = [&after_near, &after_far].map(|after| after.state_bits(slot));
            assert!(near == far, "row {b} of {spec:?}");
        }
    });
}

/// Entries of a ring moved on by `by`, with the base.
#[test]
fn a_step_does_not_depend_on_the_base() {
    law(&[0, 3, 8, 1, 7], |backend, spec| {
        let one = spec.problem();
        let left = one.run(backend, None);
        // By some of all numbers of places, more of them where states are small.
        let apart = if spec.dim == 64 { 2 } else { 4 };
        for by in (1..spec.ring[1]).step_by(apart) {
            let other = one.turned(by);
            let after = other.run(backend, None);
            for b in 0..spec.slots.len() {
                assert!(
                    row(&one, &left, b) == row(&other, &after, b),
                    "row {b} by {by}, {spec:?}"
                );
            }
        }
    });
}

#[test]
fn a_step_that_folds_is_a_flush_and_a_step() {
    law(&[8, 8, 8], |backend, spec| {
        let problem = spec.problem();
        let at_once = problem.run(backend, None);
        let flush = problem.changed(|spec| spec.tokens = 0);
        let flushed = flush.run(backend, None);
        let states = |problem: &Problem, slot| problem.state_bits(slot);
        for b in 0..spec.slots.len() {
            let [slot, len, base] = spec.live(b).unwrap();
            assert!(states(&flushed, slot) == states(&at_once, slot), "{spec:?}");
            assert!(states(&flushed, slot) != states(&problem, slot));
            assert_eq!((len, base), (spec.ring[0], 4 * b % 9));
        }
        let mut then = problem.clone();
        then.take_states(&flushed);
        let then = then.changed(|spec| {
            for b in 0..spec.len.len() {
                let base = spec.base[b] + spec.len[b];
                (spec.len[b], spec.base[b]) = (0, base % spec.ring[1] as i64);
            }
        });
        let after = then.run(backend, None);
        assert!(after.written() == at_once.written(), "{spec:?}");
    });
}

/// A token that is not counted has not been.
#[test]
fn a_rejected_token_leaves_no_trace() {
    law(&[0, 3, 6, 1, 8], |backend, spec| {
        let problem = spec.problem();
        let rejected = problem.run(backend, None);
        let kept = spec.tokens / 2;
        let after_it = problem.next(&rejected, kept, 99);
        // The same tokens where the first was never seen: of a row that folds, from the folded state.
        let mut never = after_it.clone();
        never.forget_unpending();
        let [one, other] = [after_it, never].map(|problem| problem.run(backend, None));
        for b in 0..spec.slots.len() {
            let before = problem.next(&rejected, kept, 99);
            assert!(row(&before, &one, b) == row(&before, &other, b), "{spec:?}");
        }
    });
}

#[test]
fn a_flush_of_nothing_does_nothing() {
    law(&[0, 0], |backend, spec| {
        let problem = Spec {
            tokens: 0,
            ..spec.clone()
        }
        .problem();
        let after = problem.run(backend, None);
        assert!(after.written() == problem.written(), "{spec:?}");
    });
}

/// The first tokens of a step do not know of those behind them.
#[test]
fn a_draft_changes_nothing_before_it() {
    law(&[0, 3, 6, 1, 8], |backend, spec| {
        if spec.tokens == 1 {
            return;
        }
        let problem = spec.problem();
        let all = problem.run(backend, None);
        for tokens in 1..spec.tokens {
            let fewer = problem.first(tokens);
            let after = fewer.run(backend, None);
            for b in 0..spec.slots.len() {
                let of_all = row(&fewer, &all.first(tokens), b);
                assert!(row(&fewer, &after, b) == of_all, "row {b} of {spec:?}");
            }
        }
    });
}

/// Twenty decodes on states that wait are twenty decodes: outputs, and the states that a flush leaves; ten of larger states.
#[test]
fn waiting_changes_nothing_but_roundings() {
    law(&[0, 0], |backend, spec| {
        if !spec.raw_gates {
            return;
        }
        let mut problem = spec.problem();
        let mut always = problem.clone();
        let far = |one: &[f64], other: &[f64]| {
            let difference: Vec<f64> = one.iter().zip(other).map(|(x, y)| x - y).collect();
            norm(&difference) / norm(other)
        };
        // Every step folds: the state is written with each token, as a decode writes it.
        let (states, outputs) = match spec.state {
            DType::F32 => (2e-6, 8e-3),
            _ => (1.2e-2, 2e-2),
        };
        for t in 0..if spec.dim == 64 { 20 } else { 10 } {
            let after = problem.run(backend, None);
            let folded = always.run(backend, None);
            for b in 0..spec.slots.len() {
                let far = far(&after.o(b), &folded.o(b));
                assert!(far < outputs, "o of token {t}: {far:e}, {spec:?}");
            }
            problem = problem.next(&after, 1, 100 + t);
            let flush = always
                .next(&folded, 1, 100 + t)
                .changed(|spec| spec.tokens = 0);
            let flushed = flush.run(backend, None);
            always = problem.clone();
            always.take_states(&flushed);
            always = always.changed(|spec| spec.len.fill(0));
        }
        let pending = problem.changed(|spec| spec.tokens = 0);
        let flushed = pending.run(backend, None);
        for &slot in &spec.slots {
            let far = far(&flushed.state(slot as usize), &always.state(slot as usize));
            assert!(far < states, "states: {far:e}, {spec:?}");
        }
    });
}

/// Whatever is summed with a log decay of −∞, it is a decay of 0 and not NaN: e to −1000 is 0 too.
#[test]
fn what_forgets_all_forgets_all() {
    law(&[0, 3, 8, 1, 7], |backend, spec| {
        // Each is given its log decays, those with raw gates too: once.
        if !spec.raw_gates {
            return;
        }
        let given = Spec {
            raw_gates: false,
            ..spec.clone()
        };
        for of in [&[1][..], &[0, 2], &[8], &[1, 8]] {
            let [one, other] = [f32::NEG_INFINITY, -1000.0].map(|log_decay| {
                let mut problem = given.problem();
                of.iter().for_each(|&j| problem.set_log_decay(j, log_decay));
                problem.run(backend, None)
            });
            for b in 0..given.slots.len() {
                let [slot, ..] = given.live(b).unwrap();
                assert!(one.o(b).iter().all(|o| o.is_finite()), "{given:?}");
                assert!(one.o_bits(b) == other.o_bits(b), "o of row {b}, {given:?}");
                assert!(one.state_bits(slot) == other.state_bits(slot), "{given:?}");
            }
        }
    });
}
