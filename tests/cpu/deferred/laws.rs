//! Laws of deferred write-back that hold bit for bit, whatever the results of the reference.

use gated_delta::DType;
use gated_delta_harness::arguments::Operator;
use gated_delta_reference::tolerance::norm;
use gated_delta_test_support::backend::{Backend, backends};
use gated_delta_test_support::deferred::{Problem, Spec};

/// Checks `law` on every backend, for both operators, both dtypes of states and both dims: the recurrence alone, with drafts, in a
/// layer, and with drafts in a layer (GDN with the smaller dim only). Precomputed gates run with the smaller dim and the recurrence
/// alone.
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

/// The same rows with drafts. Each row has twice as many pending tokens, so that equally many rows flush.
fn with_drafts(spec: Spec, tokens: usize) -> Spec {
    let len = spec.len.iter().map(|len| 2 * len).collect();
    Spec { len, ..spec }.drafts(tokens)
}

/// Bits of the results of row `b`: o, its state, its new ring entries and its window, relative to its slot and base.
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

/// Scaling by a power of two changes no bit of normalised q and k, even if f32 does not hold their squares. This holds for the
/// step, and for the next one, in which its tokens are pending.
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

/// Results do not depend on the base: all ring entries and the base may move by `by` entries.
#[test]
fn a_step_does_not_depend_on_the_base() {
    law(&[0, 3, 8, 1, 7], |backend, spec| {
        let one = spec.problem();
        let left = one.run(backend, None);
        // The small states try every second distance, the large ones every fourth.
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
fn a_step_that_flushes_is_a_flush_and_a_step() {
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

/// A pending token that `len` does not count has the same effect as a token that never was.
#[test]
fn a_rejected_token_leaves_no_trace() {
    law(&[0, 3, 6, 1, 8], |backend, spec| {
        let problem = spec.problem();
        let rejected = problem.run(backend, None);
        let kept = spec.tokens / 2;
        let after_it = problem.next(&rejected, kept, 99);
        // The same problem without the rejected tokens in its ring. A row that flushed has its flushed state.
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

/// A token's results do not depend on later tokens of the step.
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

/// Twenty steps with deferred write-back equal twenty decodes up to rounding: in the outputs, and in the states after a flush.
/// Larger states take ten steps.
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
        // The steps of `always` flush every time: they write the state with each token, as a decode does.
        let (states, outputs) = match spec.state {
            DType::F32 => (2e-6, 8e-3),
            _ => (1.2e-2, 2e-2),
        };
        for t in 0..if spec.dim == 64 { 20 } else { 10 } {
            let after = problem.run(backend, None);
            let flushed = always.run(backend, None);
            for b in 0..spec.slots.len() {
                let far = far(&after.o(b), &flushed.o(b));
                assert!(far < outputs, "o of token {t}: {far:e}, {spec:?}");
            }
            problem = problem.next(&after, 1, 100 + t);
            let flush = always
                .next(&flushed, 1, 100 + t)
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

/// A log decay of −∞ is a decay of 0 and never NaN, whatever is added to it. It has the same bits as a log decay of −1000, since
/// exp(−1000) is 0 in f32.
#[test]
fn what_forgets_all_forgets_all() {
    law(&[0, 3, 8, 1, 7], |backend, spec| {
        // The log decays are precomputed in all problems here, so one kind of gates is enough.
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
