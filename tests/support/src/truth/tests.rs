//! The checks accept the results of the reference, and refuse any change of a window.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gated_delta::{DType, StateLayout};
use gated_delta_harness::arguments::Operator;
use proptest::prelude::Strategy;
use proptest::sample::select;

use super::{Judgement, Values, run, truth};
use crate::buffer::View;
use crate::case::Case;
use crate::compare::check;
use crate::for_all;
use crate::problem::{Sizes, window_snapshots};
use crate::spec::{Family, Spec};
use crate::strategy::specs;

/// Problems of layers with several tokens, also ones without a kernel.
fn layers() -> impl Strategy<Value = Spec> {
    let of = |operator, layout, state| Family {
        decode: false,
        ..Family::layer(operator, layout, state, 64)
    };
    let families = vec![
        of(Operator::Gdn, StateLayout::KLast, DType::F32),
        of(Operator::Gdn, StateLayout::VLast, DType::Bf16),
        of(Operator::Kda, StateLayout::KLast, DType::Bf16),
    ];
    select(families).prop_flat_map(|family| specs(family, 6))
}

/// Writes `values` except NaN to `view`.
fn write(case: &mut Case, view: Option<&View>, values: Option<&[f64]>) {
    let (Some(view), Some(values)) = (view, values) else {
        return;
    };
    case.buffers[view.buffer].write(view, values);
}

/// The case after a correct launch.
fn left(before: &Case) -> Case {
    let mut after = before.clone();
    let Judgement {
        states,
        snapshots,
        windows,
        window_snapshots: after_tokens,
        ..
    } = truth(before, None);
    let klast = |view: &View| before.as_klast(view);
    write(
        &mut after,
        Some(&klast(before.written_pool())),
        Some(&states),
    );
    let view = before.snapshots.as_ref().map(klast);
    write(&mut after, view.as_ref(), snapshots.as_deref());
    let view = before.windows().map(|[_, written]| written);
    write(&mut after, view, windows.as_deref());
    let view = window_snapshots(before);
    write(&mut after, view, after_tokens.as_deref());
    // New tokens start from the stored, rounded states.
    let o = truth(before, Some(&after)).o;
    write(&mut after, before.outputs(), Some(&o));
    after
}

#[test]
fn the_truth_passes_and_no_other_window_does() {
    for_all("truth", 60, layers(), |spec| {
        let before = spec.case();
        let after = left(&before);
        check(&before, &after);
        let windows = before.windows().into_iter().flatten();
        for view in windows.chain(window_snapshots(&before)) {
            // A random element: in a column of a window or in a gap.
            let place = spec.seed as usize % after.buffers[view.buffer].len();
            let mut wrong = after.clone();
            let bits = wrong.buffers[view.buffer].bits(place);
            wrong.buffers[view.buffer].set_bits(place, bits ^ 1);
            let caught = catch_unwind(AssertUnwindSafe(|| check(&before, &wrong)));
            assert!(
                caught.is_err(),
                "element {place} of {view:?} is not looked at"
            );
        }
    });
}

/// The recurrence alone and the whole layer give the same bits by the reference, also after previous tokens, whose states are not
/// rounded there. No active row reads a NaN.
#[test]
fn the_truth_that_bounds_belong_to_is_the_layer() {
    for_all("truth", 60, layers(), |spec| {
        let before = spec.case();
        let values = Values::of(&before);
        let whole = run(&values.whole(&before), &values.pools());
        let Judgement { o, states, .. } = truth(&before, None);
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&whole.o) == bits(&o), "o differs");
        assert!(bits(&whole.states) == bits(&states), "states differ");

        let token = spec.value_heads() * spec.dim;
        let live = before.rows().into_iter().filter(|row| row.live.is_some());
        for tokens in live.filter_map(|row| row.tokens) {
            let o = &o[tokens.start * token..tokens.end * token];
            assert!(o.iter().all(|o| o.is_finite()), "o is not finite");
        }
    });
}
