//! Snapshots, token slots, commits and resumed launches keep the states that an update would.

use gated_delta::{DType, Formulation};
use gated_delta_harness::arguments::{New, Packed};
use gated_delta_tests::case::Case;
use gated_delta_tests::layout::Layout;
use gated_delta_tests::problem::{Array, Change, Problem, Sizes, of_tokens};
use gated_delta_tests::rows::{self, Row};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

use crate::{law_of, run, several_recurrent};

/// Bits of the snapshot of row `b` after token `t`, and of slot `slot`.
fn snapshot_and_slot(
    snapshots: &Case,
    b: usize,
    t: usize,
    pool: &Case,
    slot: usize,
) -> [Vec<u64>; 2] {
    [snapshots.snapshot_bits(b, t), pool.slot_bits(slot)]
}

#[test]
fn snapshots_are_the_pool_after_as_many_tokens() {
    let adjust = |spec: &mut Spec| {
        spec.tokens = spec.tokens.max(1);
        (spec.packed, spec.previous) = (false, None);
        spec.update_state = true;
        spec.slots.of_tokens = None;
        spec.snapshots = spec.snapshots.or(Some(0));
    };
    law_of(several_recurrent(), adjust, |backend, spec| {
        let problem = spec.problem();
        let whole = run(backend, &problem, &spec.form);
        for t in 0..spec.tokens {
            let up_to = Problem {
                snapshots: None,
                ..problem.take_tokens(&(0..=t).collect::<Vec<_>>())
            };
            let before = up_to.case(&spec.form);
            let after = backend.run(&before, None);
            for (b, row) in before.rows().into_iter().enumerate() {
                for slot in row.live.iter().flat_map(|live| live.writes()) {
                    let [snapshot, state] = snapshot_and_slot(&whole, b, t, &after, slot);
                    assert!(snapshot == state, "row {b} after token {t} differs");
                }
            }
        }
    });
}

#[test]
fn token_slots_take_what_snapshots_take() {
    let adjust = |spec: &mut Spec| {
        spec.tokens = spec.tokens.max(1);
        spec.previous = None;
        spec.update_state = true;
        spec.slots = SlotChoice {
            read: false,
            write: false,
            of_tokens: spec.slots.of_tokens.or(Some(true)),
            ..spec.slots
        };
        spec.snapshots = spec.snapshots.or(Some(0));
    };
    law_of(several_recurrent(), adjust, |backend, spec| {
        let before = spec.case();
        let after = backend.run(&before, None);
        for (b, row) in before.rows().into_iter().enumerate() {
            for (t, slot) in row.live.into_iter().flat_map(|live| live.stores) {
                let [snapshot, state] = snapshot_and_slot(&after, b, t, &after, slot);
                assert!(snapshot == state, "row {b} after token {t} differs");
            }
        }
    });
}

/// Previous tokens, from slots of their own; there may be new tokens or not.
fn with_previous(spec: &mut Spec) {
    spec.previous = spec.previous.or(Some(spec.tokens));
    spec.snapshots = None;
    spec.update_state = true;
    spec.slots.of_tokens = None;
}

/// The commit of the previous tokens of `problem`, but for rows that touch nothing.
fn commit(problem: &Problem) -> Problem {
    let given = problem.read_slots.as_ref().map(Array::integers);
    let slot = |(b, row): (usize, Row)| match (&given, row.tokens) {
        (_, None) => i32::MAX.into(),
        (None, Some(_)) => b as i64,
        (Some(slots), Some(_)) => slots[b],
    };
    let rows = rows::of_problem(problem).into_iter().enumerate();
    Problem {
        packed: None,
        new: None,
        read_slots: Some(Array::indices(rows.map(slot))),
        ..problem.clone()
    }
}

#[test]
fn a_resumed_launch_is_a_commit_and_a_verify_without_update() {
    law_of(
        Family::several(),
        |spec| {
            with_previous(spec);
            spec.tokens = spec.tokens.max(1);
        },
        |backend, spec| {
            let problem = spec.problem();
            let before = problem.case(&spec.form);
            let resumed = backend.run(&before, None);
            let committed = run(backend, &commit(&problem), &spec.form);
            assert!(
                committed.state_bits() == resumed.state_bits(),
                "states differ"
            );

            let slot = |row: Row| {
                let commit = row.live.and_then(|live| live.commit);
                commit.map_or(i32::MAX.into(), |(_, slot)| slot as i64)
            };
            let states = committed.as_klast(committed.written_pool());
            let verify = Problem {
                previous: None,
                pool: Array {
                    values: committed.floats(&states),
                    dims: states.dims,
                },
                write_pool: None,
                read_slots: Some(Array::indices(before.rows().into_iter().map(slot))),
                write_slots: None,
                update_state: false,
                ..problem.clone()
            };
            let verified = run(backend, &verify, &spec.form);
            assert!(verified.o_bits() == resumed.o_bits(), "o differs");
        },
    );
}

#[test]
fn a_commit_is_an_update_with_the_kept_tokens() {
    let adjust = |spec: &mut Spec| {
        with_previous(spec);
        (spec.tokens, spec.packed) = (0, false);
        // A row without tokens touches nothing, one that keeps none writes its state unchanged.
        (spec.slots.write, spec.slots.write_pool) = (false, None);
    };
    law_of(Family::several(), adjust, |backend, spec| {
        let problem = spec.problem();
        let before = problem.case(&spec.form);
        let committed = backend.run(&before, None);
        let previous = problem.previous.clone().unwrap();
        let most = previous.tokens.k.dims[1];
        let (mut kept, mut bounds) = (Vec::new(), vec![0]);
        for (b, row) in before.rows().into_iter().enumerate() {
            let (keep, _) = row.live.and_then(|live| live.commit).unwrap_or((0, 0));
            kept.extend((0..keep).map(|t| b * most + t));
            bounds.push(kept.len() as i64);
        }
        let mut tokens = previous.tokens;
        for array in of_tokens(&mut tokens) {
            array.dims.splice(..2, [1, problem.batch() * most]);
            *array = array.take(1, &kept);
        }
        let update = Problem {
            new: Some(New {
                q: Array::new(&tokens.k.dims, || 1.0),
                o: Array::unread(&tokens.v.dims),
                tokens,
            }),
            previous: None,
            packed: Some(Packed {
                cu_seqlens: Array::indices(bounds),
                max_tokens: most,
            }),
            ..problem
        };
        let updated = run(backend, &update, &spec.form);
        assert!(
            committed.state_bits() == updated.state_bits(),
            "states differ"
        );
    });
}

/// −0, a denormal, an infinity and NaN too. Token by token a bf16 NaN is another one when it has been f32.
#[test]
fn a_commit_of_no_tokens_keeps_every_bit() {
    let adjust = |spec: &mut Spec| {
        with_previous(spec);
        (spec.tokens, spec.packed) = (0, false);
    };
    law_of(Family::several(), adjust, |backend, spec| {
        let keeps_nan =
            spec.form.state == DType::F32 || spec.options.formulation == Formulation::Parallel;
        let mut problem = spec.problem();
        if let Some(previous) = &mut problem.previous {
            previous.keep.values.fill(0.0);
        }
        let unread = problem.pool.values.iter_mut();
        unread.filter(|x| x.is_nan()).for_each(|x| *x = 0.5);
        for state in problem.pool.values.chunks_mut(spec.dim * spec.dim) {
            let special = [-0.0, 1e-40, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
            for (i, x) in special.into_iter().enumerate() {
                if keeps_nan || !x.is_nan() {
                    state[13 * i + 7] = x;
                    state[spec.dim * (spec.dim - i) - 1] = x;
                }
            }
        }
        let before = problem.case(&spec.form);
        let after = backend.run(&before, None);
        for live in before.rows().into_iter().filter_map(|row| row.live) {
            for slot in live.writes() {
                let start = live.start.expect("no row is fresh");
                let start = before.as_klast(&before.pool).entry(&[start]);
                assert!(
                    before.bits(&start) == after.slot_bits(slot),
                    "slot {slot} differs"
                );
            }
        }
    });
}
