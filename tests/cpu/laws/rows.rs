//! The order, number and neighbours of rows and slots change nothing.

use gated_delta::DType;
use gated_delta_test_support::backend::{backends_if, is_of_gpu, on_threads};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::check;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Array, Change, Sizes, take, window_snapshots};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};

use crate::laws::{assert_same_slots, backwards, in_place, law, run};

/// Rows that may be reordered: each names its slots, all in one pool, and all have the same length.
fn movable(spec: &mut Spec) {
    in_place(spec);
    spec.slots.read |= spec.slots.of_tokens.is_none();
    spec.packed = false;
}

/// Bits of o and of the snapshots of states and windows of row `b`.
fn row_bits(case: &Case, b: usize) -> [Vec<u64>; 3] {
    let snapshots = case.snapshots.as_ref();
    [
        case.outputs()
            .map_or(Vec::new(), |o| case.bits(&o.entry(&[b]))),
        snapshots.map_or_else(Vec::new, |view| case.bits(&case.as_klast(view).entry(&[b]))),
        window_snapshots(case).map_or(Vec::new(), |view| case.bits(&view.entry(&[b]))),
    ]
}

#[test]
fn rows_may_come_in_any_order() {
    law(movable, |backend, spec| {
        let problem = spec.problem();
        let order = backwards(spec.batch);
        let one = run(backend, &problem, &spec.form);
        let other = run(backend, &problem.take_rows(&order), &spec.form);
        for (b, &from) in order.iter().enumerate() {
            assert!(
                row_bits(&one, from) == row_bits(&other, b),
                "row {from} differs"
            );
        }
        assert!(one.state_bits() == other.state_bits(), "states differ");
        assert!(one.window_bits() == other.window_bits(), "windows differ");
    });
}

#[test]
fn slots_may_lie_in_any_order() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        spec.slots.read |= spec.slots.of_tokens.is_none();
        spec.options.null_slot = None;
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let order = backwards(problem.pool.dims[0]);
        let one = run(backend, &problem, &spec.form);
        let other = run(backend, &problem.take_slots(&order), &spec.form);
        assert!(one.o_bits() == other.o_bits(), "o differs");
        assert!(
            take(&one.state_bits(), &one.pool.dims, 0, &order) == other.state_bits(),
            "states differ"
        );
        if let Some([_, windows]) = one.windows() {
            assert!(
                take(&one.window_bits(), &windows.dims, 0, &order) == other.window_bits(),
                "windows differ"
            );
        }
    });
}

/// Neither the number nor the contents of other rows change a row.
#[test]
fn other_rows_do_not_matter() {
    law(movable, |backend, spec| {
        let problem = spec.problem();
        let together = run(backend, &problem, &spec.form);
        for b in 0..spec.batch {
            let before = problem.take_rows(&[b]).case(&spec.form);
            let alone = backend.run(&before, None);
            assert!(
                row_bits(&together, b) == row_bits(&alone, 0),
                "row {b} differs"
            );
            let rows = before.rows();
            let written = rows[0].live.iter().flat_map(|live| live.writes());
            assert_same_slots([&together, &alone], b, written);
        }
    });
}

/// Padding rows, which engines add to a batch for a captured graph, change no other row.
#[test]
fn padding_rows_change_nothing() {
    law(movable, |backend, spec| {
        let problem = spec.problem();
        let rows: Vec<usize> = (0..spec.batch).chain([0, 0, 0]).collect();
        let mut padded = problem.take_rows(&rows);
        // Indices out of range as i32, i64 and u32.
        let slots = [
            &mut padded.read_slots,
            &mut padded.write_slots,
            &mut padded.token_slots,
        ];
        for slots in slots.into_iter().flatten() {
            let of_row = slots.values.len() / rows.len();
            slots.values[spec.batch * of_row..].fill(i32::MAX.into());
        }
        // A fresh row of token slots needs no valid slot.
        let fresh = padded.fresh.iter_mut();
        fresh.for_each(|fresh| fresh.values[spec.batch..].fill(0.0));
        let [one, padded] = [problem, padded].map(|problem| run(backend, &problem, &spec.form));
        for b in 0..spec.batch {
            assert!(row_bits(&one, b) == row_bits(&padded, b), "row {b} differs");
        }
        for b in spec.batch..rows.len() {
            let [o, ..] = row_bits(&padded, b);
            assert!(o.iter().all(|bits| *bits == 0), "o of padding row {b}");
        }
        assert!(one.state_bits() == padded.state_bits(), "states differ");
        assert!(one.window_bits() == padded.window_bits(), "windows differ");
    });
}

/// One launch with other lengths, as in a replayed graph: no tokens at all, rows without tokens among others, tokens of no row
/// before and after them, and empty tensors.
#[test]
fn lengths_are_whatever_the_bounds_say() {
    const TOKENS: usize = 3;
    let several = Family::several().into_iter();
    let mut families: Vec<_> = several.chain(Family::prefills()).collect();
    // f16 and bf16 share kernels.
    families.retain(|family| family.state != DType::F16);
    let count = families.len();
    let families: Vec<_> = families.into_iter().enumerate().collect();
    on_threads(&families, |&(i, family)| {
        let machines = || backends_if(is_of_gpu(i, count));
        for previous in [None, Some(2)] {
            // The code that finds rows is the same for all dims. Random problems of resumes are packed too.
            if previous.is_some() && (family.is_chunked() || family.dim > 64) {
                continue;
            }
            let layer = Spec::plain(Family {
                layer: true,
                ..family
            });
            let spec = Spec {
                batch: 4,
                tokens: TOKENS,
                heads: 1,
                fresh: true,
                slots: SlotChoice::LIVE,
                previous,
                conv: layer.conv.filter(|_| family.layer || family.is_chunked()),
                norm: layer.norm.filter(|_| family.layer || family.is_chunked()),
                ..Spec::plain(family)
            };
            let packed = spec.problem().packed();
            let none = packed.take_tokens(&[]);
            let all = [
                (&packed, [2, 2, 5, 6, 6]),
                (&none, [0; 5]),
                (&packed, [0, 3, 3, 3, 5]),
                (&packed, [12; 5]),
            ];
            let of_size = if family.dim > 64 { &all[..2] } else { &all };
            for &(problem, bounds) in of_size {
                let mut problem = problem.clone();
                let lengths = problem.packed.as_mut().expect("rows are packed");
                lengths.cu_seqlens = Array::indices(bounds);
                let case = problem.case(&spec.form);
                machines().for_each(|backend| check(&case, &backend.run(&case, None)));
            }
            // Dense rows of a prefill may have no tokens.
            let dense = spec.problem().take_tokens(&[]);
            let mut empty = none.clone();
            let lengths = empty.packed.as_mut().expect("rows are packed");
            lengths.cu_seqlens = Array::indices([0; 5]);
            for backend in machines().filter(|_| family.is_chunked()) {
                let [dense, packed] =
                    [&dense, &empty].map(|problem| run(backend, problem, &spec.form));
                assert!(dense.state_bits() == packed.state_bits(), "states differ");
                assert!(
                    dense.window_bits() == packed.window_bits(),
                    "windows differ"
                );
            }
        }
    });
}
