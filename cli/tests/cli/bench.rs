//! Tests of `bench`, which does the same as `cargo bench`.

use std::path::PathBuf;

use clap::Parser;
use gated_delta_benches::options::Options;
use gated_delta_benches::record::{Csv, Row, Run};
use gated_delta_harness::timing::Micros;
use serde_json::Value;
use tempfile::TempDir;

use crate::command::{folder, gated_delta};

/// Writes a record of one row.
fn record(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("rows.csv");
    let options = [
        "bench", "--batch", "1", "--state", "bf16", "--layout", "k_last",
    ];
    let cells = Options::try_parse_from(options).unwrap().cells().unwrap();
    let row = Row {
        cell: cells[0],
        variant: "recurrent_klast_bf16_k128_tile16".to_owned(),
        selected: true,
        micros: Micros {
            median: 2.5,
            p10: 2.25,
            p90: 2.75,
        },
        floor: Some(2.0),
        bytes: 2_097_152,
        error: 1e-3,
        run: Run {
            copy: 4000.0,
            empty: Some(0.5),
            gpu: "NVIDIA H200".to_owned(),
            driver: "580.1".to_owned(),
            sm_mhz: None,
            commit: String::new(),
        },
    };
    Csv::create(&path).unwrap().write(&row).unwrap();
    path
}

#[test]
fn a_record_becomes_tables_figures_and_json() {
    let folder = folder();
    let (rows, figures) = (record(&folder), folder.path().join("figures"));
    let (rows, figures) = (rows.to_str().unwrap(), figures.to_str().unwrap());
    let said = gated_delta(&["bench", "--from", rows, "--svg", figures, "--tune"]).succeeds();
    for part in [
        "gdn_decode qwen3-next",
        "2.50",
        "gdn recurrent klast bf16 k128 decode  *:tile16",
        "1 cells won",
        "-update.svg",
    ] {
        assert!(said.stdout.contains(part), "{part:?} in {}", said.stdout);
    }
    assert_eq!(std::fs::read_dir(figures).unwrap().count(), 1);
    let said = gated_delta(&["bench", "--from", rows, "--json"]).succeeds();
    let said: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!(said["rows"][0]["us"], 2.5);
    assert_eq!(said["rows"][0]["mode"], "update");
    assert_eq!(said["failures"], Value::Array(Vec::new()));
}

#[test]
fn what_no_bench_is_made_of_is_refused() {
    gated_delta(&["bench", "--batch", "0"]).refused("--batch: wanted at least 1, got 0");
    gated_delta(&["bench", "--model", "qwen9"]).refused("got qwen9");
    gated_delta(&["bench", "--from", "/nowhere.csv"]).refused("/nowhere.csv");
    gated_delta(&["bench", "--append"]).refused("--save");
}
