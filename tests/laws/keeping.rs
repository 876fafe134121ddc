//! Snapshots, token slots, commits and resumed launches keep the states that an update would.

use gated_delta_tests::case::Case;
use gated_delta_tests::problem::{Array, Packed, Problem};
use gated_delta_tests::rows::Row;
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

use crate::{law_of, run, several};

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
        spec.options.update_state = true;
        spec.slots.of_tokens = None;
        spec.snapshots = spec.snapshots.or(Some(0));
    };
    law_of(several(Family::recurrent), adjust, |backend, spec| {
        let problem = spec.problem();
        let whole = run(backend, &problem, &spec.form);
        for t in 0..spec.tokens {
            let up_to = Problem {
                snapshot_steps: None,
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
        spec.options.update_state = true;
        spec.slots = SlotChoice {
            read: false,
            write: false,
            of_tokens: spec.slots.of_tokens.or(Some(true)),
            ..spec.slots
        };
        spec.snapshots = spec.snapshots.or(Some(0));
    };
    law_of(several(Family::recurrent), adjust, |backend, spec| {
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
    spec.options.update_state = true;
    spec.slots.of_tokens = None;
}

/// The commit of the previous tokens of `problem`, but for rows that touch nothing.
fn commit(problem: &Problem) -> Problem {
    let slot = |(b, row): (usize, Row)| match (&problem.read_slots, row.tokens) {
        (_, None) => i32::MAX.into(),
        (None, Some(_)) => b as i64,
        (Some(slots), Some(_)) => slots[b],
    };
    let no_tokens = |array: &Array| array.take(0, &vec![0; problem.batch]).take(1, &[]);
    Problem {
        packed: None,
        q: no_tokens(&problem.q),
        tokens: problem.tokens.map(no_tokens),
        read_slots: Some(problem.rows().into_iter().enumerate().map(slot).collect()),
        ..problem.clone()
    }
}

#[test]
fn a_resumed_launch_is_a_commit_and_a_verify_without_update() {
    law_of(
        several(Family::all),
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

            let live = before.rows().into_iter().map(|row| row.live);
            let states = committed.floats(&committed.as_klast(committed.written_pool()));
            let dims = &committed.written_pool().dims[..2];
            let mut verify = Problem {
                previous: None,
                pool: Array {
                    values: states.iter().map(|x| *x as f32).collect(),
                    dims: [dims, &[spec.dim; 2]].concat(),
                },
                write_pool: None,
                read_slots: Some(
                    live.map(|live| {
                        live.map_or(i32::MAX.into(), |live| live.commit.unwrap().1 as i64)
                    })
                    .collect(),
                ),
                write_slots: None,
                ..problem.clone()
            };
            verify.options.update_state = false;
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
    law_of(several(Family::all), adjust, |backend, spec| {
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
        let take = |array: &Array| {
            let dims = [&[1, problem.batch * most], &array.dims[2..]].concat();
            array.clone().reshape(&dims).take(1, &kept)
        };
        let tokens = previous.tokens.map(take);
        let update = Problem {
            q: Array::new(&tokens.k.dims, || 1.0),
            tokens,
            previous: None,
            packed: Some(Packed {
                cu_seqlens: bounds,
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
