//! Tests of the bench's prefills, on the simulator: checked, and not timed.

use gated_delta::{DType, Library, StateLayout};
use gated_delta_benches::prefill::{Bench, Case, cases, table};
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

/// A case that is compared with others has as many tokens as its name says.
#[test]
fn cases_are_what_they_are_called() {
    for case in cases() {
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
    let cases = cases();
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
