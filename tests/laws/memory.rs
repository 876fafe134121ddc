//! Memory: where states go, the types of indices, strides and alignment change nothing.

use gated_delta::DType;
use gated_delta_tests::case::Case;
use gated_delta_tests::compare::assert_rest_unchanged;
use gated_delta_tests::layout::{Form, Spacing};
use gated_delta_tests::problem::{Array, take};
use gated_delta_tests::spec::Spec;

use crate::{assert_same_bits, in_place, law, run, with_read_slots};

#[test]
fn o_does_not_depend_on_the_update() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        (spec.slots.write, spec.options.update_state) = (false, true);
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let updated = run(backend, &problem, &spec.form);
        problem.options.update_state = false;
        let before = problem.case(&spec.form);
        let after = backend.run(&before, None);
        assert!(updated.o_bits() == after.o_bits(), "o differs");
        assert_rest_unchanged(&before, &after, std::slice::from_ref(&after.o));
    });
}

#[test]
fn a_write_pool_is_the_pool_updated_elsewhere() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        spec.options.update_state = true;
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let in_place = run(backend, &problem, &spec.form);
        let dims = problem.pool.dims.clone();
        problem.write_pool = Some(Array::new(&dims, || f32::NAN));
        let before = problem.case(&spec.form);
        let apart = backend.run(&before, None);
        assert!(in_place.o_bits() == apart.o_bits(), "o differs");
        let written: Vec<usize> = before
            .live()
            .iter()
            .flatten()
            .map(|(_, slot)| *slot)
            .collect();
        let states = |case: &Case| take(&case.state_bits(), &dims, 0, &written);
        assert!(states(&in_place) == states(&apart), "states differ");
    });
}

#[test]
fn the_type_of_indices_does_not_matter() {
    let adjust = |spec: &mut Spec| {
        with_read_slots(spec);
        (spec.slots.write, spec.slots.inactive) = (spec.options.update_state, false);
        spec.options.null_slot = None;
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let inside = 0..problem.pool.dims[0] as i64;
        let given = [&mut problem.read_slots, &mut problem.write_slots]
            .into_iter()
            .flatten()
            .flatten();
        given
            .filter(|slot| !inside.contains(slot))
            .for_each(|slot| *slot = i32::MAX.into());
        let [i32s, i64s, u32s, mixed] = [
            [DType::I32; 2],
            [DType::I64; 2],
            [DType::U32; 2],
            [DType::I64, DType::I32],
        ]
        .map(|slots| run(backend, &problem, &Form { slots, ..spec.form }));
        assert_same_bits(&i32s, &i64s);
        assert_same_bits(&i32s, &u32s);
        assert_same_bits(&i32s, &mixed);
    });
}

/// Neither where tensors begin, nor what is between their rows: the narrow path is the wide one, bit for bit.
#[test]
fn strides_and_alignment_do_not_matter() {
    law(
        |spec| spec.form.packed = false,
        |backend, spec| {
            let problem = spec.problem();
            let dense = Form {
                io: Spacing::Dense,
                pools: Spacing::Dense,
                ..spec.form
            };
            let expected = run(backend, &problem, &dense);
            for (io, pools) in [
                (Spacing::Odd, Spacing::Odd),
                (Spacing::Odd, Spacing::Dense),
                (Spacing::Dense, Spacing::Odd),
                (Spacing::Aligned, Spacing::Aligned),
            ] {
                assert_same_bits(
                    &run(
                        backend,
                        &problem,
                        &Form {
                            io,
                            pools,
                            ..spec.form
                        },
                    ),
                    &expected,
                );
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
        assert!(packed.q.buffer == packed.k.buffer && packed.a.buffer == packed.b.buffer);
        assert_same_bits(&backend.run(&apart, None), &backend.run(&packed, None));
    });
}
