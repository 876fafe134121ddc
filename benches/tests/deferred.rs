//! Tests of the bench's steps with deferred write-back, on the simulator: checked, and not timed.

use clap::Parser as _;
use gated_delta::{DType, Library};
use gated_delta_benches::deferred::{Case, Count, Drafts, OPERATORS, Row, run, table};
use gated_delta_benches::options::Options;
use gated_delta_harness::arguments::Operator;

#[test]
fn every_count_is_checked() {
    let library = Library::simulator();
    // A norm enlarges some of o. In a small row the rounding of a few elements is then much of the error.
    for (layer, heads) in [(false, [1, 2]), (true, [2, 4])] {
        let states = match layer {
            false => [DType::Bf16, DType::F32],
            true => [DType::F32, DType::Bf16],
        };
        let cases = [Operator::Gdn, Operator::Kda].into_iter().zip(states);
        let cases = cases.map(|(operator, state)| Case {
            operator,
            layer,
            heads,
            dim: 64,
            state,
            batch: 9,
            drafts: Drafts::NONE,
        });
        check(&run(&library, None, &cases.collect::<Vec<_>>(), true, |_| {}).unwrap());
    }
}

#[test]
fn drafts_are_checked() {
    let library = Library::simulator();
    let drafts = [
        (Operator::Gdn, false, [8, 4]),
        (Operator::Kda, false, [4, 2]),
        (Operator::Gdn, true, [4, 2]),
        (Operator::Gdn, true, [8, 4]),
        (Operator::Kda, true, [4, 2]),
    ];
    for (operator, layer, [tokens, kept]) in drafts {
        let case = Case {
            operator,
            layer,
            heads: if layer { [2, 4] } else { [1, 2] },
            dim: match operator {
                Operator::Gdn => 64,
                Operator::Kda => 128,
            },
            state: DType::Bf16,
            batch: 8,
            drafts: Drafts {
                tokens,
                kept,
                most: 16,
                parallel: true,
                bf16_updates: kept == 2,
            },
        };
        let rows = run(&library, None, &[case], true, |_| {}).unwrap();
        check(&rows);
        let entry = if layer {
            "_deferred_layer_parallel_"
        } else {
            "_deferred_parallel_"
        };
        let waits = |row: &Row| row.entry.contains(entry);
        assert!(
            rows.iter()
                .all(|row| waits(row) != (row.count == Count::Today))
        );
    }
}

#[test]
fn bytes_of_layer_drafts_are_those_of_windows_that_wait() {
    let case = |tokens: usize, layer: bool| Case {
        operator: Operator::Gdn,
        layer,
        heads: [1, 1],
        dim: 64,
        state: DType::Bf16,
        batch: 1,
        drafts: Drafts {
            tokens,
            kept: tokens,
            most: 16,
            parallel: true,
            bf16_updates: false,
        },
    };
    let rows = run(&Library::simulator(), None, &[case(8, true)], false, |_| {}).unwrap();
    let of = |count: Count| rows.iter().find(|row| row.count == count).unwrap().bytes as usize;
    let (state, channels, tokens) = (64 * 64 * 2, 3 * 64, 8);
    // x, z, o, g and β; the window, or its pending inputs in place of it.
    let read = tokens * 2 * (channels + 64 + 64 + 1 + 1) + channels * 3 * 2;
    // x as in the input, k, u and log α.
    let (inputs, entry) = (2 * channels, 4 * (64 + 64 + 1));
    let written_window = channels * 3 * 2;
    let previous = tokens * 2 * (channels + 1 + 1);
    assert_eq!(
        of(Count::Today),
        2 * state + read + written_window + previous
    );
    let of_pending = |pending: usize| (pending + tokens) * entry + tokens * inputs;
    assert_eq!(of(Count::NeverFlushes), state + read + of_pending(8));
    assert_eq!(
        of(Count::AlwaysFlushes),
        2 * state + read + written_window + of_pending(16)
    );
}

#[test]
fn options_choose_cases() {
    let parsed = |options: &[&str]| {
        let options = [&["bench", "--deferred"], options].concat();
        Options::try_parse_from(options).map(|options| options.deferred_cases())
    };
    let cases = |options: &[&str]| parsed(options).unwrap().unwrap();
    let all = cases(&["--batch", "4"]);
    let has = |name| all.iter().any(|case| case.operator_name() == name);
    assert!(OPERATORS.into_iter().all(has));
    let layers = cases(&["--batch", "4,16", "--cases", "gdn_layer", "--tokens", "4,8"]);
    let mut dims: Vec<_> = layers
        .iter()
        .map(|case| (case.drafts.tokens, case.drafts.bf16_updates, case.batch))
        .collect();
    dims.sort_unstable();
    let of = |tokens, bf16| [(tokens, bf16, 4), (tokens, bf16, 16)];
    let wanted = [of(4, false), of(4, true), of(8, false), of(8, true)];
    assert_eq!(dims, wanted.concat());
    assert!(
        layers
            .iter()
            .all(|case| case.layer && case.operator == Operator::Gdn)
    );
    let error = parsed(&["--cases", "kda_layer", "--tokens", "3"]).unwrap();
    assert!(error.unwrap_err().to_string().contains("no such case"));
    assert!(
        parsed(&["--tokens", "0"]).unwrap().is_err()
            && parsed(&["--state", "f8"]).unwrap().is_err()
    );
    let error = parsed(&["--cases", "gdn_decode"])
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("gdn_decode") && error.contains("gdn_layer"),
        "{error}"
    );
}

fn check(rows: &[Row]) {
    for count in [
        "every step writes",
        "whole cycles",
        "never flushes",
        "always flushes",
    ] {
        assert!(table(rows, 4000.0).contains(count), "{count}");
    }
    // A state is written by every row, by one in eight, by none, by all.
    let of = |count: Count| rows.iter().find(|row| row.count == count).unwrap();
    let [today, cycle, never, always] = [
        Count::Today,
        Count::Cycle,
        Count::NeverFlushes,
        Count::AlwaysFlushes,
    ]
    .map(of);
    assert!(today.error_state > 0.0 && cycle.error_state > 0.0 && always.error_state > 0.0);
    assert!(never.error_state == 0.0);
    assert!(never.bytes < cycle.bytes && cycle.bytes < always.bytes && never.bytes < today.bytes);
}
