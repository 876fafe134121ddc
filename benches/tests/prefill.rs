//! Tests of the bench's prefills, on the simulator: checked, and not timed.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Parser;
use gated_delta::{DType, KdaBeta, Library, StateLayout};
use gated_delta_benches::best::{Records, Rows};
use gated_delta_benches::latency;
use gated_delta_benches::options::Options;
use gated_delta_benches::prefill::{Bench, Case, Row, cases, others, table};
use gated_delta_benches::shapes::{GDN, KDA, Model};
use gated_delta_harness::arguments::{DecayKind, Operator};

const HEADS: [[usize; 2]; 2] = [[1, 2]; 2];

fn bench<'a>(library: &'a Library, every_entry: bool, entries: &'a [String]) -> Bench<'a> {
    Bench {
        library,
        timer: None,
        heads: HEADS,
        every_entry,
        entries,
    }
}

#[test]
fn rows_of_a_prefill_are_checked() {
    let case = |name, lengths: &[usize]| Case {
        dim: 64,
        ..Case::new(name, lengths.to_vec())
    };
    let small = [
        case("3 rows", &[1, 66, 5]),
        Case {
            state: DType::Bf16,
            layout: StateLayout::VLast,
            ..case("3 rows", &[1, 66, 5])
        },
        Case {
            layer: true,
            ..case("short", &[16, 3])
        },
        Case {
            every: Some(64),
            ..case("kept", &[65])
        },
        Case {
            operator: Operator::Kda,
            dim: 128,
            ..case("3 rows", &[1, 66, 5])
        },
        Case {
            operator: Operator::Kda,
            dim: 128,
            gate: DecayKind::Softplus,
            layer: true,
            ..case("short", &[16, 3])
        },
        Case {
            operator: Operator::Kda,
            dim: 128,
            gate: DecayKind::LowerBound(-5.0),
            model: Some(Model {
                heads: 2,
                value_heads: 2,
                ..KDA[3]
            }),
            layer: true,
            ..case("short", &[16, 3])
        },
        Case {
            heads: Some([1, 4]),
            qk_l2norm: false,
            ..case("2 rows", &[66, 3])
        },
        Case {
            operator: Operator::Kda,
            dim: 128,
            heads: Some([1, 1]),
            gate: DecayKind::LowerBound(-5.0),
            beta: KdaBeta::Logit,
            qk_l2norm: false,
            ..case("2 rows", &[66, 3])
        },
        Case {
            model: Some(Model {
                heads: 1,
                value_heads: 1,
                ..GDN[4]
            }),
            dim: 96,
            layer: true,
            layout: StateLayout::VLast,
            ..case("2 rows", &[66, 3])
        },
    ];
    let library = Library::simulator();
    let measured = bench(&library, false, &[]).run(&small, |_| {}).unwrap();
    assert_eq!(measured.failures, [""; 0]);
    let table = table(&measured.rows, HEADS);
    for name in [
        "3 rows, K = V = 64",
        "short, layer, K = V = 64",
        "short tile64",
        "chain tile64",
        "KDA 3 rows",
        "KDA short, softplus, layer",
        "glm-5.3-flash short, lower_bound, layer",
        "1/4 2 rows, bare, K = V = 64",
        "KDA 1 2 rows, lower_bound, logits, bare",
        "olmo-hybrid 2 rows, layer, V-last, K = 96, V = 192",
    ] {
        assert!(table.contains(&format!("| {name} ")), "{table}");
    }
    assert_eq!(measured.rows.len(), small.len());
}

/// Both tiles of an inter-chunk scan and of short rows can be selected by name.
#[test]
fn every_entry_can_be_asked_for() {
    let library = Library::simulator();
    let case = [Case::new("2 rows", vec![33, 40])];
    let names = |every_entry, entries: &[&str]| -> Vec<String> {
        let entries: Vec<String> = entries.iter().map(|&part| part.to_owned()).collect();
        let measured = bench(&library, every_entry, &entries)
            .run(&case, |_| {})
            .unwrap();
        assert_eq!(measured.failures, [""; 0]);
        assert!(
            measured
                .rows
                .iter()
                .all(|row| row.selected == row.entry.contains("short_k128_tile64"))
        );
        measured.rows.into_iter().map(|row| row.entry).collect()
    };
    let [short, wide, one, two] = [
        "gdn_prefill_short_k128_tile64",
        "gdn_prefill_short_k128_tile128",
        "gdn_prefill_chain_k128_tile64",
        "gdn_prefill_chain_k128_tile128",
    ];
    assert_eq!(names(true, &[]), [short, wide, one, two]);
    assert_eq!(names(false, &["chain", "none"]), [one, two]);
    assert_eq!(names(false, &[]), [short]);
    let none = ["none".to_owned()];
    assert!(bench(&library, false, &none).run(&case, |_| {}).is_err());
}

fn all() -> Vec<Case> {
    [cases(), others()].concat()
}

/// A case that is compared with others has as many tokens as its name says.
#[test]
fn cases_are_what_they_are_called() {
    for case in all() {
        let total: usize = case.lengths.iter().sum();
        let count = |part: &str| match part.split_once('x') {
            Some((rows, tokens)) => {
                rows.parse::<usize>().unwrap() * tokens.parse::<usize>().unwrap()
            }
            None => part.parse().unwrap(),
        };
        let wanted: usize = match case.name {
            "8 tails" => 37 + 64 + 12 + 51 + 30 + 7 + 60 + 21,
            name => name.split(" + ").map(count).sum(),
        };
        assert_eq!(total, wanted, "{}", case.name);
    }
}

/// The title and state of each row are unique, so that a line of a file identifies it.
#[test]
fn no_two_cases_are_called_the_same() {
    let cases = all();
    for (i, case) in cases.iter().enumerate() {
        let same = |other: &&Case| (other.title(), other.state) == (case.title(), case.state);
        assert_eq!(
            cases[..i].iter().filter(same).count(),
            0,
            "{}",
            case.title()
        );
    }
}

/// The table has the cases of its records, by the same titles; KDA no longer has a prefill with K = V = 64.
#[test]
fn the_table_is_that_of_its_record() {
    let path = "record/h200/2026-11-26-prefill-slots.csv";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let Some(Rows::Prefills(rows)) = Rows::read(&path).unwrap() else {
        panic!("not of prefills");
    };
    let gone = |row: &Row| row.case.starts_with("KDA ") && row.case.ends_with("K = V = 64");
    let rows = rows.into_iter().filter(|row| !gone(row));
    let recorded: Vec<_> = rows.map(|row| (row.case, row.state)).collect();
    let cases = cases()
        .into_iter()
        .map(|case| (case.title(), case.state.to_string()));
    assert_eq!(cases.collect::<Vec<_>>(), recorded);
}

fn selected(options: &[&str]) -> anyhow::Result<Vec<String>> {
    let words = ["bench", "--prefill"].iter().chain(options);
    let cases = Options::try_parse_from(words)?.prefill_cases()?;
    Ok(cases
        .iter()
        .map(|case| format!("{}, {}", case.title(), case.state))
        .collect())
}

#[test]
fn options_choose_heads_bare_cases_and_gates() {
    assert_eq!(selected(&[]).unwrap().len(), cases().len());
    for (options, wanted) in [
        (
            &["--rows", "8x1024"][..],
            &[
                "8x1024, f32",
                "8x1024, bf16",
                "8x1024, layer, f32",
                "8x1024, V-last, f32",
                "8x1024, K = V = 64, f32",
            ][..],
        ),
        (
            &["--heads", "2/8", "--bare", "--rows", "1x1024,1x65536"],
            &["2/8 1x1024, bare, f32", "2/8 1x65536, bare, f32"],
        ),
        (
            &["--heads", "2/8,4", "--rows", "1x65536"],
            &[
                "2/8 1x65536, f32",
                "2/8 1x65536, bare, f32",
                "KDA 4 1x65536, f32",
                "KDA 4 1x65536, lower_bound, logits, f32",
            ],
        ),
        (
            &["--heads", "16", "--gate", "lower_bound", "--rows", "8x1024"],
            &["KDA 16 8x1024, lower_bound, logits, f32"],
        ),
        (
            &["--heads", "16/32", "--rows", "1x256"],
            &[
                "1x256, f32",
                "1x256, bf16",
                "1x256, bare, f32",
                "1x256, V-last, f32",
                "1x256, layer, f32",
            ],
        ),
    ] {
        assert_eq!(selected(options).unwrap(), wanted, "{options:?}");
    }
    for (options, wanted) in [
        (&["--heads", "5/8"][..], "--heads, --bare or --gate"),
        (&["--rows", "1x65536"], "--heads, --bare or --gate"),
        (
            &["--heads", "2/"],
            "want H/HV of GDN, 2/8, or H = HV of KDA, 4",
        ),
        (
            &["--gate", "tanh"],
            "wanted log, softplus or lower_bound, got tanh",
        ),
        (&["--op", "gdn_decode"], "cannot be used with"),
    ] {
        let refusal = selected(options).unwrap_err().to_string();
        assert!(refusal.contains(wanted), "{options:?}: {refusal}");
    }
    for alone in [&["bench", "--bare"][..], &["bench", "--heads", "4"]] {
        assert!(Options::try_parse_from(alone).is_err(), "{alone:?}");
    }
}

/// A row is judged by rows of its own heads, gates and norms alone.
#[test]
fn a_bare_row_is_never_compared_with_one_that_has_the_norms() {
    let row = |case: &Case, us: f64| Row {
        selected: true,
        us: Some(us),
        ..Row::untimed(case, "chain", [0.0; 2])
    };
    let empty = tempfile::tempdir().unwrap();
    let plain = Case::new("8x1024", vec![1024; 8]);
    let bounded = Case {
        operator: Operator::Kda,
        gate: DecayKind::LowerBound(-5.0),
        ..plain.clone()
    };
    let bare = |case: &Case| Case {
        qk_l2norm: false,
        ..case.clone()
    };
    let of_shard = |case: &Case| Case {
        heads: Some([2, 8]),
        ..case.clone()
    };
    let cases = [
        bare(&plain),
        of_shard(&plain),
        bare(&of_shard(&plain)),
        bare(&bounded),
        Case {
            beta: KdaBeta::Logit,
            ..bounded.clone()
        },
        bounded,
        plain,
    ];
    for recorded in &cases {
        let mut records = Records::read(empty.path(), "", "", &[]).unwrap();
        records.rows(&[row(recorded, 1.0)], "before.csv", "");
        for case in &cases {
            let best = records.best(&row(case, 2.0));
            let same = case.title() == recorded.title();
            assert_eq!(
                best.is_some(),
                same,
                "{} {}",
                case.title(),
                recorded.title()
            );
        }
    }
    let titles: BTreeSet<String> = cases.iter().map(Case::title).collect();
    assert_eq!(titles.len(), cases.len());
}

/// A record that is shown again has today's peers of its own card.
#[test]
fn a_record_is_shown_beside_the_peers_of_its_card() {
    let shown = |gpu: &str, name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("record")
            .join(gpu);
        let file = folder.join(name).to_string_lossy().into_owned();
        let options = Options::try_parse_from(["bench", "--from", &file]).unwrap();
        let text = latency::run(&options, &[]).unwrap().text;
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let h200 = shown("h200", "2026-11-26-prefill-slots.csv");
    for part in [
        "| peer (H200) | ours / peer |",
        "| 143.6 FlashInfer | 1.01 |",
        "| 250.5 cuDNN | 1.31 |",
        "| 227.0 vLLM + gates | 0.79 |",
    ] {
        assert!(h200.contains(part), "{part}: {h200}");
    }
    let h100 = shown("h100", "2026-11-26-prefill.csv");
    assert!(
        h100.contains("| peer (H100) |") && h100.contains(" vLLM + gates |"),
        "{h100}"
    );
    assert!(!h100.contains("cuDNN") && !h100.contains("143.6"), "{h100}");
}
