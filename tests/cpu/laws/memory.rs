//! Slots, dtypes of indices, strides and alignment change no result.

use gated_delta::DType;
use gated_delta_harness::arguments::New;
use gated_delta_test_support::layout::{Form, Layout, Spacing, TENSORS};
use gated_delta_test_support::problem::Array;
use gated_delta_test_support::spec::Spec;

use crate::laws::{assert_same_bits, in_place, law, run};

#[test]
fn a_write_pool_is_the_pool_updated_elsewhere() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        spec.update_state = true;
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let in_place = run(backend, &problem, &spec.form);
        let dims = problem.pool.dims.clone();
        problem.write_pool = Some(Array::unread(&dims));
        let before = problem.case(&spec.form);
        let apart = backend.run(&before, None);
        assert!(in_place.o_bits() == apart.o_bits(), "o differs");
        let rows = before.rows();
        for slot in rows
            .iter()
            .flat_map(|row| &row.live)
            .flat_map(|live| live.writes())
        {
            assert!(
                in_place.slot_bits(slot) == apart.slot_bits(slot),
                "the state of slot {slot} differs"
            );
            assert!(
                in_place.slot_window_bits(slot) == apart.slot_window_bits(slot),
                "the window of slot {slot} differs"
            );
        }
        assert!(
            apart.bits(&apart.pool) == before.bits(&before.pool),
            "the pool was written"
        );
    });
}

#[test]
fn the_type_of_indices_does_not_matter() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        spec.slots.read |= spec.slots.of_tokens.is_none();
        spec.slots.inactive = false;
        spec.options.null_slot = None;
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let inside = 0.0..problem.pool.dims[0] as f64;
        let given = [
            &mut problem.read_slots,
            &mut problem.write_slots,
            &mut problem.token_slots,
        ];
        given
            .into_iter()
            .flatten()
            .flat_map(|slots| &mut slots.values)
            .filter(|slot| !inside.contains(slot))
            .for_each(|slot| *slot = i32::MAX.into());
        let (a, b, c) = (DType::I32, DType::I64, DType::U32);
        let [i32s, i64s, u32s, mixed] =
            [[a; 6], [b; 6], [c; 6], [b, a, c, a, c, b]].map(|indices| {
                run(
                    backend,
                    &problem,
                    &Form {
                        indices,
                        ..spec.form
                    },
                )
            });
        assert_same_bits(&i32s, &i64s);
        assert_same_bits(&i32s, &u32s);
        assert_same_bits(&i32s, &mixed);
    });
}

/// Offsets of tensors and gaps between their rows change no bit: narrow and wide accesses give the same results.
#[test]
fn strides_and_alignment_do_not_matter() {
    law(
        |spec| spec.form.packed = false,
        |backend, spec| {
            let problem = spec.problem();
            let dense = Form {
                io: Spacing::Dense,
                pools: Spacing::Dense,
                apart: None,
                ..spec.form
            };
            let expected = run(backend, &problem, &dense);
            for (io, pools) in [
                (Spacing::Odd, Spacing::Odd),
                (Spacing::Odd, Spacing::Dense),
                (Spacing::Dense, Spacing::Odd),
                (Spacing::Aligned, Spacing::Aligned),
            ] {
                let form = Form { io, pools, ..dense };
                assert_same_bits(&run(backend, &problem, &form), &expected);
            }
            // Gaps of each tensor of states alone, and of one of the other tensors.
            let other = TENSORS[3 + spec.seed as usize % (TENSORS.len() - 3)];
            for name in TENSORS[..3].iter().copied().chain([other]) {
                let form = Form {
                    apart: Some((name, Spacing::Odd)),
                    ..dense
                };
                assert_same_bits(&run(backend, &problem, &form), &expected);
            }
        },
    );
}

#[test]
fn packed_slices_are_tensors_like_others() {
    let adjust = |spec: &mut Spec| {
        let [q, ..] = spec.form.qkvo;
        spec.form.qkvo[..3].fill(q);
        spec.form.gates[1] = spec.form.gates[0];
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let [apart, packed] = [false, true].map(|packed| {
            problem.case(&Form {
                packed,
                ..spec.form
            })
        });
        if let Some(New { q, tokens, .. }) = &packed.new {
            assert!(q.buffer == tokens.k.buffer && tokens.gate.buffer == tokens.beta.buffer);
        }
        assert_same_bits(&backend.run(&apart, None), &backend.run(&packed, None));
    });
}
