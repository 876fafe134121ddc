//! Decodes and layer steps of the bench on states that wait, on the simulator: checked, and not timed.

use gated_delta::{DType, Library};
use gated_delta_benches::deferred::{Case, Count, Drafts, Row, run, table};
use gated_delta_harness::arguments::Operator;

#[test]
fn every_count_is_checked() {
    let library = Library::simulator();
    // A norm makes some of o large, the rounding of a few of which is much of a small row's error.
    for (layer, heads) in [(false, [1, 2]), (true, [2, 4])] {
        let cases = [Operator::Gdn, Operator::Kda]
            .into_iter()
            .flat_map(|operator| {
                [DType::Bf16, DType::F32].map(|state| Case {
                    operator,
                    layer,
                    heads,
                    dim: 64,
                    state,
                    batch: 9,
                    drafts: Drafts::NONE,
                })
            });
        check(&run(&library, None, &cases.collect::<Vec<_>>(), true, |_| {}).unwrap());
    }
}

#[test]
fn drafts_are_checked() {
    let library = Library::simulator();
    let drafts = [(Operator::Gdn, [8, 4]), (Operator::Kda, [4, 2])];
    for (operator, [tokens, kept]) in drafts {
        let case = Case {
            operator,
            layer: false,
            heads: [1, 2],
            dim: 64,
            state: DType::Bf16,
            batch: 8,
            drafts: Drafts {
                tokens,
                kept,
                most: 16,
                parallel: true,
            },
        };
        check(&run(&library, None, &[case], true, |_| {}).unwrap());
    }
}

fn check(rows: &[Row]) {
    for count in [
        "every step writes",
        "whole cycles",
        "never folds",
        "always folds",
    ] {
        assert!(table(rows, 4000.0).contains(count), "{count}");
    }
    // A state is written by each row, by one in eight, by none, by all.
    let of = |count: Count| rows.iter().find(|row| row.count == count).unwrap();
    let [today, cycle, never, always] = [
        Count::Today,
        Count::Cycle,
        Count::NeverFold,
        Count::AlwaysFold,
    ]
    .map(of);
    assert!(today.error_state > 0.0 && cycle.error_state > 0.0 && always.error_state > 0.0);
    assert!(never.error_state == 0.0);
    assert!(never.bytes < cycle.bytes && cycle.bytes < always.bytes && never.bytes < today.bytes);
}
