//! Snapshots, token slots, commits and resumes keep the same states as launches that update in place.

use gated_delta::{DType, Formulation, StateLayout};
use gated_delta_harness::arguments::{
    CommitConvolution, Convolved, Kept, KeptX, New, Packed, value_dim,
};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{
    Array, Change, Problem, Sizes, conv, of_tokens, window_snapshots, windows_mut,
};
use gated_delta_test_support::rows::{self, Row};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, SET, Spec};

use crate::laws::{law_of, run, several_recurrent};

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
            let mut up_to = Problem {
                snapshots: None,
                ..problem.take_tokens(&(0..=t).collect::<Vec<_>>())
            };
            let convolved = up_to.convolved.as_mut();
            let has_windows = convolved.is_some_and(|conv| conv.window_snapshots.take().is_some());
            let before = up_to.case(&spec.form);
            let after = backend.run(&before, None);
            for (b, row) in before.rows().into_iter().enumerate() {
                for slot in row.live.iter().flat_map(|live| live.writes()) {
                    let [snapshot, state] = snapshot_and_slot(&whole, b, t, &after, slot);
                    assert!(snapshot == state, "row {b} after token {t} differs");
                    let window = after.slot_window_bits(slot);
                    assert!(
                        !has_windows || whole.window_snapshot_bits(b, t) == window,
                        "the window of row {b} after token {t} differs"
                    );
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
            let Some(live) = row.live else { continue };
            for (t, slot) in live.stores {
                let [snapshot, state] = snapshot_and_slot(&after, b, t, &after, slot);
                assert!(snapshot == state, "row {b} after token {t} differs");
            }
            let window = live.window.and_then(|window| window.end);
            for t in 0..row.tokens.map_or(0, |tokens| tokens.len()) {
                if let (Some(slot), Some(_)) = (window, window_snapshots(&before)) {
                    assert!(
                        after.window_snapshot_bits(b, t) == after.window_bits_at(slot, t),
                        "the window of row {b} after token {t} differs"
                    );
                }
            }
        }
    });
}

/// Rows with token slots as plain rows: row b has its start state and its window in slot b.
fn plain(problem: &Problem) -> Problem {
    let rows = rows::of_problem(problem);
    let (channels, taps) = match conv(problem) {
        Some(conv) => (conv.weight.dims[0], conv.weight.dims[1]),
        None => (0, 1),
    };
    let mut plain = Problem {
        token_slots: None,
        accepted: None,
        snapshots: None,
        write_pool: None,
        ..problem.clone()
    };
    let start = |row: &Row| row.live.as_ref().and_then(|live| live.start);
    let starts: Vec<usize> = rows.iter().map(|row| start(row).unwrap_or(0)).collect();
    plain.pool = problem.pool.take(0, &starts);
    let slot = |(b, row): (usize, &Row)| match row.live {
        Some(_) => b as i64,
        None => i32::MAX.into(),
    };
    plain.read_slots = Some(Array::indices(rows.iter().enumerate().map(slot)));
    if let Some(convolved) = &mut plain.convolved {
        (convolved.write_windows, convolved.window_snapshots) = (None, None);
        let wide = &convolved.windows;
        let mut windows = Vec::new();
        for row in &rows {
            let window = row.live.as_ref().and_then(|live| live.window);
            let [slot, column] = window.and_then(|window| window.start).unwrap_or([0, 0]);
            let columns: Vec<usize> = (column..column + taps - 1).collect();
            windows.extend(wide.take(0, &[slot]).take(2, &columns).values);
        }
        convolved.windows = Array {
            values: windows,
            dims: vec![rows.len(), channels, taps - 1],
        };
    }
    plain
}

/// For any number of accepted tokens, the next step starts from the window that as many decodes leave.
#[test]
fn token_slots_keep_the_windows_that_decodes_leave() {
    let adjust = |spec: &mut Spec| {
        spec.tokens = spec.tokens.max(1);
        (spec.previous, spec.packed, spec.update_state) = (None, false, true);
        spec.slots = SlotChoice {
            write_pool: None,
            ..SlotChoice::OF_TOKENS
        };
        spec.options.null_slot = None;
        spec.conv.iter_mut().for_each(|conv| conv.apart = false);
    };
    let layers = Family::which(|family| family.layer && !family.decode && family.is_recurrent());
    law_of(layers, adjust, |backend, spec| {
        let problem = spec.problem();
        let before = problem.case(&spec.form);
        let after = backend.run(&before, None);
        let mut step = plain(&problem);
        for t in 0..spec.tokens {
            let decoded = run(backend, &step.take_tokens(&[t]), &spec.form);
            for (b, row) in before.rows().into_iter().enumerate() {
                let Some(live) = row.live else { continue };
                if let Some(slot) = live.window.and_then(|window| window.end) {
                    assert!(
                        after.window_bits_at(slot, t) == decoded.slot_window_bits(b),
                        "the window of row {b} after token {t} differs"
                    );
                }
                // States in f32 are not rounded between launches.
                if spec.form.state == DType::F32 {
                    let o = |case: &Case, t| case.bits(&case.o().entry(&[b, t]));
                    assert!(o(&after, t) == o(&decoded, 0), "o of row {b}, token {t}");
                    for (_, slot) in live.stores.into_iter().filter(|store| store.0 == t) {
                        assert!(
                            after.slot_bits(slot) == decoded.slot_bits(b),
                            "the state of row {b} after token {t} differs"
                        );
                    }
                }
            }
            step.fresh = None;
            step.pool.values = decoded.floats(&decoded.as_klast(&decoded.pool));
            if let (Some((windows, _)), Some([left, _])) =
                (windows_mut(&mut step), decoded.windows())
            {
                windows.values = decoded.floats(left);
            }
        }
    });
}

/// Previous tokens, whose states are in separate slots, with or without new tokens.
fn with_previous(spec: &mut Spec) {
    spec.previous = spec.previous.or(Some(spec.tokens));
    spec.snapshots = None;
    spec.update_state = true;
    spec.slots.of_tokens = None;
}

/// The commit of the previous tokens of `problem`, without the rows that touch nothing.
fn commit(problem: &Problem) -> Problem {
    let given = problem.read_slots.as_ref().map(Array::integers);
    let slot = |(b, row): (usize, Row)| match (&given, row.tokens) {
        (_, None) => i32::MAX.into(),
        (None, Some(_)) => b as i64,
        (Some(slots), Some(_)) => slots[b],
    };
    let rows = rows::of_problem(problem);
    // A fresh row is active if the slot that it writes is valid.
    let mut fresh = problem.fresh.clone();
    for (b, _) in rows
        .iter()
        .enumerate()
        .filter(|(_, row)| row.tokens.is_none())
    {
        fresh.iter_mut().for_each(|fresh| fresh.values[b] = 0.0);
    }
    let previous_x = problem.previous_x.clone().map(|kept| KeptX {
        conv: problem.convolved.as_ref().map(of_commit).or(kept.conv),
        ..kept
    });
    Problem {
        packed: None,
        new: None,
        convolved: None,
        norm: None,
        previous_x,
        fresh,
        read_slots: Some(Array::indices(rows.into_iter().enumerate().map(slot))),
        ..problem.clone()
    }
}

/// The convolution of new tokens as that of a commit, without the tensors of new tokens.
fn of_commit(convolved: &Convolved<Array>) -> CommitConvolution<Array> {
    CommitConvolution {
        heads: convolved.heads,
        weight: convolved.weight.clone(),
        bias: convolved.bias.clone(),
        activation: convolved.activation,
        windows: convolved.windows.clone(),
        write_windows: convolved.write_windows.clone(),
    }
}

#[test]
fn a_resumed_launch_is_a_commit_and_a_verify_without_update() {
    law_of(
        Family::several(),
        |spec| {
            with_previous(spec);
            spec.tokens = spec.tokens.max(1);
            if spec.has_bits_of_bound() {
                spec.tokens = spec.tokens.min(SET);
                spec.previous = spec.previous.min(Some(SET));
            }
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
            assert!(
                committed.window_bits() == resumed.window_bits(),
                "windows differ"
            );

            let slot = |row: Row| {
                let commit = row.live.and_then(|live| live.commit);
                commit.map_or(i32::MAX.into(), |(_, slot)| slot as i64)
            };
            let states = committed.as_klast(committed.written_pool());
            let mut verify = Problem {
                previous: None,
                previous_x: None,
                fresh: None,
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
            if let (Some((windows, others)), Some([_, left])) =
                (windows_mut(&mut verify), committed.windows())
            {
                *windows = Array {
                    values: committed.floats(left),
                    dims: left.dims.clone(),
                };
                *others = None;
            }
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
        // A row without tokens touches nothing. A commit row with `keep` = 0 copies its state, or writes zeros if it is fresh.
        (spec.slots.write, spec.slots.write_pool, spec.fresh) = (false, None, false);
        spec.conv.iter_mut().for_each(|conv| conv.apart = false);
    };
    law_of(Family::several(), adjust, |backend, spec| {
        let problem = spec.problem();
        let before = problem.case(&spec.form);
        let committed = backend.run(&before, None);
        let most = problem.previous_tokens().unwrap();
        let (mut kept, mut bounds) = (Vec::new(), vec![0]);
        for (b, row) in before.rows().into_iter().enumerate() {
            let (keep, _) = row.live.and_then(|live| live.commit).unwrap_or((0, 0));
            kept.extend((0..keep).map(|t| b * most + t));
            bounds.push(kept.len() as i64);
        }
        let batch = problem.batch();
        let packed = |array: &mut Array| {
            array.dims.splice(..2, [1, batch * most]);
            *array = array.take(1, &kept);
        };
        let new = problem.previous.clone().map(|Kept { mut tokens, .. }| {
            of_tokens(&mut tokens).into_iter().for_each(packed);
            New {
                q: Array::new(&tokens.k.dims, || 1.0),
                o: Array::unread(&tokens.v.dims),
                tokens,
            }
        });
        let convolved = problem.previous_x.clone().map(|mut kept| {
            let tensors = [&mut kept.x, &mut kept.gate, &mut kept.beta];
            tensors.into_iter().for_each(packed);
            let conv = kept.conv.expect("of a commit");
            let [_, heads, dim, _] = problem.pool.dims[..] else {
                panic!("a pool has four dims")
            };
            Convolved {
                o: Array::unread(&[1, kept.x.dims[1], heads, dim]),
                x: kept.x,
                heads: conv.heads,
                gate: kept.gate,
                beta: kept.beta,
                weight: conv.weight,
                bias: conv.bias,
                activation: conv.activation,
                windows: conv.windows,
                write_windows: conv.write_windows,
                window_snapshots: None,
            }
        });
        let update = Problem {
            new,
            convolved,
            previous: None,
            previous_x: None,
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
        assert!(
            committed.window_bits() == updated.window_bits(),
            "windows differ"
        );
    });
}

/// A commit of 0 tokens copies every bit, also of −0, denormals, infinities and NaN. Exception: token by token and in sets of tokens, a
/// 16-bit NaN changes through f32, and an f16 infinity becomes the largest number.
#[test]
fn a_commit_of_no_tokens_keeps_every_bit() {
    let adjust = |spec: &mut Spec| {
        with_previous(spec);
        (spec.tokens, spec.packed, spec.fresh) = (0, false, false);
    };
    law_of(Family::several(), adjust, |backend, spec| {
        let in_sets = spec.options.state_layout == StateLayout::VLast || spec.previous > Some(SET);
        let is_parallel = spec.options.formulation == Formulation::Parallel;
        let keeps_nan = spec.form.state == DType::F32 || is_parallel && !in_sets;
        let mut problem = spec.problem();
        let of_kv = problem.previous.as_mut().map(|kept| &mut kept.keep);
        let of_x = problem.previous_x.as_mut().map(|kept| &mut kept.keep);
        let keep = of_kv.or(of_x).expect("there are previous tokens");
        keep.values.fill(0.0);
        if let Some((windows, _)) = windows_mut(&mut problem) {
            let special = [-0.0, 1e-7, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
            let places = windows.values.iter_mut().step_by(7);
            places
                .zip(special.into_iter().cycle())
                .for_each(|(x, special)| *x = special);
        }
        let unread = problem.pool.values.iter_mut();
        unread.filter(|x| x.is_nan()).for_each(|x| *x = 0.5);
        for state in problem
            .pool
            .values
            .chunks_mut(spec.dim * value_dim(spec.dim))
        {
            let special = [-0.0, 1e-40, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
            for (i, x) in special.into_iter().enumerate() {
                let is_held = spec.form.state == DType::F16 && x.is_infinite() && !keeps_nan;
                if !is_held && (keeps_nan || !x.is_nan()) {
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
                if let Some([read, _]) = before.windows() {
                    let start = before.bits(&read.entry(&[live.start.unwrap_or(slot)]));
                    assert!(
                        start == after.slot_window_bits(slot),
                        "window {slot} differs"
                    );
                }
            }
        }
    });
}
