//! Rows and slots: their order, number and neighbours change nothing.

use gated_delta::DType;
use gated_delta_tests::case::Case;
use gated_delta_tests::problem::take;
use gated_delta_tests::spec::Spec;

use crate::{backwards, law, run, with_read_slots};

#[test]
fn rows_may_come_in_any_order() {
    law(with_read_slots, |backend, spec| {
        let problem = spec.problem();
        let order = backwards(spec.batch);
        let one = run(backend, &problem, &spec.form);
        let other = run(backend, &problem.take_rows(&order), &spec.form);
        assert!(
            take(&one.o_bits(), &one.o.dims, 0, &order) == other.o_bits(),
            "o differs"
        );
        assert!(one.state_bits() == other.state_bits(), "states differ");
    });
}

#[test]
fn slots_may_lie_in_any_order() {
    let adjust = |spec: &mut Spec| {
        with_read_slots(spec);
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
    });
}

/// Neither how many other rows there are, nor what is in them.
#[test]
fn other_rows_do_not_matter() {
    law(with_read_slots, |backend, spec| {
        let problem = spec.problem();
        let together = run(backend, &problem, &spec.form);
        for b in 0..spec.batch {
            let alone = problem.take_rows(&[b]).case(&spec.form);
            let live = alone.live()[0];
            let alone = backend.run(&alone, None);
            assert!(
                take(&together.o_bits(), &together.o.dims, 0, &[b]) == alone.o_bits(),
                "o of row {b} differs"
            );
            if let Some((_, slot)) = live {
                let state = |case: &Case| take(&case.state_bits(), &case.pool.dims, 0, &[slot]);
                assert!(
                    state(&together) == state(&alone),
                    "the state of row {b} differs"
                );
            }
        }
    });
}

/// As engines pad a batch for a captured graph.
#[test]
fn padding_rows_change_nothing() {
    law(with_read_slots, |backend, spec| {
        let problem = spec.problem();
        let rows: Vec<usize> = (0..spec.batch).chain([0, 0, 0]).collect();
        let mut padded = problem.take_rows(&rows);
        let bad = if spec.form.slots[0] == DType::U32 {
            u32::MAX.into()
        } else {
            -1
        };
        padded
            .read_slots
            .iter_mut()
            .for_each(|slots| slots[spec.batch..].fill(bad));
        let [one, padded] = [problem, padded].map(|problem| run(backend, &problem, &spec.form));
        let mut o = one.o_bits();
        o.resize(padded.o_bits().len(), 0);
        assert!(o == padded.o_bits(), "o differs");
        assert!(one.state_bits() == padded.state_bits(), "states differ");
    });
}
