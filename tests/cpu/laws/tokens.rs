//! The tokens of one launch equal the tokens of several launches.

use gated_delta::{DType, Operator};
use gated_delta_harness::arguments::Packed;
use gated_delta_test_support::backend::{Backend, backends};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::check_everywhere;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Array, Change, Problem, Sizes, of_tokens, windows_mut};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, SET, Spec};
use gated_delta_test_support::variants;

use crate::laws::{assert_same_bits, assert_same_slots, law_of, run, several_recurrent};

/// Every row has all tokens and writes its state in place.
fn verify_in_place(spec: &mut Spec) {
    spec.tokens = spec.tokens.max(1);
    spec.conv.iter_mut().for_each(|conv| conv.apart = false);
    (spec.packed, spec.previous, spec.snapshots) = (false, None, None);
    spec.update_state = true;
    spec.slots = SlotChoice {
        write: false,
        write_pool: None,
        of_tokens: None,
        ..spec.slots
    };
}

/// Names the formulation: equal bits are a promise of the named formulation.
fn named(spec: &mut Spec) {
    spec.form.unnamed = false;
}

#[test]
fn a_verify_of_one_token_is_a_decode() {
    let all = Family::all();
    let also_takes_several = |family| {
        let several = Family {
            decode: false,
            ..family
        };
        family.decode && all.contains(&several)
    };
    law_of(Family::which(also_takes_several), named, |backend, spec| {
        let decode = spec.problem();
        let verify = decode.packed();
        let kernels = [&decode, &verify].map(|problem| {
            let case = problem.case(&spec.form);
            Family::of(variants(&case)[0]).unwrap()
        });
        // Layers of one token have kernels of their own.
        let decodes = kernels.map(|family| family.decode);
        assert_eq!(decodes, [kernels[0].layer, false]);
        let [decoded, verified] =
            [decode, verify].map(|problem| run(backend, &problem, &spec.form));
        assert_same_bits(&decoded, &verified);
    });
}

/// Several tokens equal as many launches, bit for bit with f32 states, which are not rounded between launches.
/// `Formulation::Recurrent` promises this.
#[test]
fn several_tokens_are_as_many_launches() {
    let mut families = several_recurrent();
    families.retain(|family| family.state == DType::F32);
    let adjust = |spec: &mut Spec| {
        verify_in_place(spec);
        named(spec);
    };
    law_of(families, adjust, |backend, spec| {
        let problem = spec.problem();
        let together = run(backend, &problem, &spec.form);
        let mut step = problem.clone();
        for t in 0..spec.tokens {
            let after = run(backend, &step.take_tokens(&[t]), &spec.form);
            for b in 0..spec.batch {
                let together = together.bits(&together.o().entry(&[b, t]));
                let alone = after.bits(&after.o().entry(&[b, 0]));
                assert!(together == alone, "o of row {b}, token {t} differs");
            }
            step.pool.values = after.floats(&after.as_klast(&after.pool));
            if let (Some((windows, _)), Some([left, _])) = (windows_mut(&mut step), after.windows())
            {
                windows.values = after.floats(left);
            }
            step.fresh = None;
            if t + 1 == spec.tokens {
                assert!(together.state_bits() == after.state_bits(), "states differ");
                let windows = [&together, &after].map(Case::window_bits);
                assert!(windows[0] == windows[1], "windows differ");
            }
        }
    });
}

#[test]
fn packed_rows_are_rows_of_their_own() {
    let adjust = |spec: &mut Spec| {
        spec.tokens = spec.tokens.max(1);
        (spec.packed, spec.slots.write_pool) = (true, None);
        spec.slots.of_tokens = None;
        spec.slots.read = true;
    };
    law_of(Family::several(), adjust, |backend, spec| {
        each_packed_row_is_alone(backend, spec, &spec.problem(), spec.has_bits_of_bound());
    });
}

/// Checks that every row of a packed problem has the bits that it has alone: packed, with the same `max_tokens`, or dense.
fn each_packed_row_is_alone(backend: &Backend, spec: &Spec, problem: &Problem, is_packed: bool) {
    let before = problem.case(&spec.form);
    let together = backend.run(&before, None);
    for (b, row) in before.rows().into_iter().enumerate() {
        // Dense rows are never empty.
        let Some(tokens) = row.tokens.filter(|tokens| !tokens.is_empty()) else {
            continue;
        };
        let mut alone = problem.take_tokens(&tokens.clone().collect::<Vec<_>>());
        alone.packed = None;
        if is_packed {
            let packed = problem.packed.as_ref().expect("rows are packed");
            let bounds = [0, tokens.len() as i64];
            alone.packed = Some(Packed {
                cu_seqlens: Array::indices(bounds),
                max_tokens: packed.max_tokens,
            });
        }
        let of_row = |array: &Array| array.take(0, &[b]);
        let alone = alone.each(|name, array| match name {
            "snapshots" | "window_snapshots" => {
                *array = of_row(array).take(1, &vec![0; tokens.len()]);
            }
            "read_slots" | "write_slots" | "keep" | "fresh" => *array = of_row(array),
            _ if name.starts_with("previous") => *array = of_row(array),
            _ => {}
        });
        let alone = run(backend, &alone, &spec.form);
        for (t, token) in tokens.enumerate() {
            let o = together.bits(&together.o().entry(&[0, token]));
            assert!(
                o == alone.bits(&alone.o().entry(&[0, t])),
                "o of row {b}, token {t}"
            );
            if together.snapshots.is_some() && row.live.is_some() {
                assert!(
                    together.snapshot_bits(b, t) == alone.snapshot_bits(0, t),
                    "the snapshot of row {b}, token {t} differs"
                );
                assert!(
                    together.window_snapshot_bits(b, t) == alone.window_snapshot_bits(0, t),
                    "the window after row {b}, token {t} differs"
                );
            }
        }
        let written = row.live.iter().flat_map(|live| live.writes());
        assert_same_slots([&together, &alone], b, written);
    }
}

/// The families whose parallel formulation takes more than 8 tokens, in sets of 8.
fn in_sets() -> Vec<Family> {
    Family::which(|family| !family.is_recurrent() && family.max_tokens() > SET)
}

/// Lengths and numbers of kept tokens on both sides of a set, with the smallest K of an operator: a GPU's driver takes a second for
/// each kernel.
#[test]
fn rows_may_end_on_both_sides_of_a_set() {
    const LENGTHS: [usize; 7] = [0, 1, 7, 8, 9, 15, 16];
    let mut families = in_sets();
    families.retain(|family| family.operator == Operator::Kda || family.dim == 64);
    for family in families {
        for previous in [None, Some(16)] {
            let spec = Spec {
                batch: LENGTHS.len(),
                tokens: 16,
                heads: 1,
                ratio: 1,
                slots: SlotChoice {
                    read: true,
                    ..SlotChoice::LIVE
                },
                previous,
                ..Spec::plain(family)
            };
            let mut problem = spec.problem().packed();
            let mut bounds = vec![0];
            for length in LENGTHS {
                bounds.push(bounds[bounds.len() - 1] + length as i64);
            }
            let packed = problem.packed.as_mut().expect("rows are packed");
            packed.cu_seqlens = Array::indices(bounds);
            if let Some(kept) = &mut problem.previous {
                kept.keep = Array::indices(LENGTHS.iter().rev().map(|&keep| keep as i64));
                let tensors = of_tokens(&mut kept.tokens).into_iter();
                // Those that the drawn problem does not keep are NaN.
                let unread = tensors.flat_map(|array| &mut array.values);
                unread.filter(|x| x.is_nan()).for_each(|x| *x = 0.5);
            }
            check_everywhere(&problem.case(&spec.form), None);
            for backend in backends() {
                each_packed_row_is_alone(backend, &spec, &problem, true);
            }
        }
    }
}

/// With f32 states the first 8 of more tokens have the bits of a launch of 8, whatever follows them.
#[test]
fn the_first_set_is_a_launch_of_its_own() {
    let adjust = |spec: &mut Spec| {
        verify_in_place(spec);
        named(spec);
        spec.tokens = spec.tokens.max(SET + 1);
    };
    let mut families = in_sets();
    families.retain(|family| family.state == DType::F32);
    law_of(families, adjust, |backend, spec| {
        let problem = spec.problem();
        let together = run(backend, &problem, &spec.form);
        let first = problem.take_tokens(&(0..SET).collect::<Vec<_>>());
        let first = run(backend, &first, &spec.form);
        for b in 0..spec.batch {
            for t in 0..SET {
                assert!(
                    together.bits(&together.o().entry(&[b, t]))
                        == first.bits(&first.o().entry(&[b, t])),
                    "o of row {b}, token {t} differs"
                );
            }
        }
    });
}

#[test]
fn rows_of_all_tokens_may_be_packed_or_not() {
    law_of(
        Family::several(),
        |spec| spec.packed = false,
        |backend, spec| {
            if spec.tokens == 0 {
                return;
            }
            let dense = spec.problem();
            assert_same_bits(
                &run(backend, &dense, &spec.form),
                &run(backend, &dense.packed(), &spec.form),
            );
        },
    );
}

/// Neither tokens after the last row's nor previous tokens that are not kept change anything: they may be NaN.
#[test]
fn tokens_that_are_not_there_change_nothing() {
    let adjust = |spec: &mut Spec| {
        verify_in_place(spec);
        (spec.batch, spec.slots.inactive, spec.options.null_slot) = (1, false, None);
        spec.previous = Some(spec.tokens);
    };
    law_of(Family::several(), adjust, |backend, spec| {
        let part = spec.problem();
        let there = 1 + spec.seed as usize % spec.tokens;
        let not_nan = |array: &mut Array| {
            let unread = array.values.iter_mut().filter(|x| x.is_nan());
            unread.for_each(|x| *x = 0.5);
        };
        let whole = part.each(|_, array| not_nan(array)).packed();
        let mut part = part.packed().each_new(|array| {
            let absent = match array.values.is_empty() {
                true => 0..0,
                false => there..spec.tokens,
            };
            absent.for_each(|i| array.entry_mut(2, i).fill(f64::NAN));
        });
        if let Some(packed) = &mut part.packed {
            packed.cu_seqlens = Array::indices([0, there as i64]);
        }
        let [whole, part] = [whole, part].map(|problem| run(backend, &problem, &spec.form));
        for t in 0..spec.tokens {
            let [whole, part] = [&whole, &part].map(|case| case.floats(&case.o().entry(&[0, t])));
            let right = match t < there {
                true => whole == part,
                false => part.iter().all(|x| x.to_bits() == 0),
            };
            assert!(right, "o of token {t} of {there}");
        }
        let slot = match &whole.read_slots {
            Some(slots) => whole.indices(slots)[0] as usize,
            None => 0,
        };
        assert!(
            whole.slot_bits(slot) == part.slot_bits(slot),
            "the state differs"
        );
        assert!(
            whole.slot_window_bits(slot) == part.slot_window_bits(slot),
            "the window differs"
        );
    });
}
