//! Layouts of states, and order of heads.

use gated_delta::{HeadMap, StateLayout};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::assert_near;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Change, Sizes, take};
use gated_delta_test_support::spec::Family;

use crate::laws::{alone_recurrent, assert_same_bits, in_f32, law_of, run};

#[test]
fn klast_is_vlast() {
    law_of(alone_recurrent(), in_f32, |backend, spec| {
        let mut problem = spec.problem();
        let [one, other] = [StateLayout::KLast, StateLayout::VLast].map(|layout| {
            problem.options.state_layout = layout;
            run(backend, &problem, &spec.form)
        });
        assert_near(&problem.case(&spec.form), &one, &other);
    });
}

#[test]
fn gva_is_repeated_heads() {
    law_of(
        Family::alone(),
        |spec| spec.parameters.of_h = false,
        |backend, spec| {
            let problem = spec.problem();
            let heads: Vec<usize> = match problem.options.head_map {
                HeadMap::Grouped => (0..spec.value_heads()).map(|hv| hv / spec.ratio).collect(),
                HeadMap::Tiled => (0..spec.value_heads()).map(|hv| hv % spec.heads).collect(),
            };
            let repeated = problem.map_qk(|array| array.take(2, &heads));
            assert_same_bits(
                &run(backend, &problem, &spec.form),
                &run(backend, &repeated, &spec.form),
            );
        },
    );
}

#[test]
fn tiled_heads_are_grouped_heads_in_another_order() {
    law_of(
        Family::alone(),
        |spec| spec.options.head_map = HeadMap::Grouped,
        |backend, spec| {
            let grouped = spec.problem();
            let order: Vec<usize> = (0..spec.value_heads())
                .map(|hv| (hv % spec.heads) * spec.ratio + hv / spec.heads)
                .collect();
            let mut tiled = grouped.take_value_heads(&order);
            tiled.options.head_map = HeadMap::Tiled;
            let [grouped, tiled] =
                [grouped, tiled].map(|problem| run(backend, &problem, &spec.form));
            if let Some(new) = &grouped.new {
                let o = take(&grouped.o_bits(), &new.o.dims, 2, &order);
                assert!(o == tiled.o_bits(), "o differs");
            }
            let states = take(
                &grouped.state_bits(),
                &grouped.written_pool().dims,
                1,
                &order,
            );
            assert!(states == tiled.state_bits(), "states differ");
            let snapshots = |case: &Case, order: &[usize]| {
                let view = case.as_klast(case.snapshots.as_ref()?);
                Some(take(&case.bits(&view), &view.dims, 2, order))
            };
            let as_they_are: Vec<usize> = (0..order.len()).collect();
            assert!(
                snapshots(&grouped, &order) == snapshots(&tiled, &as_they_are),
                "snapshots differ"
            );
        },
    );
}
