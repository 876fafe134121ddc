//! Tests of tables, the count against the peers, records, and the advice on what to select.

use gated_delta::{DType, Formulation, StateLayout};
use gated_delta_benches::cell::{Cell, Mode, Op};
use gated_delta_benches::figures::draw_all;
use gated_delta_benches::inputs::LOWER_BOUND;
use gated_delta_benches::peers::Peers;
use gated_delta_benches::record::{Csv, Row, Run, read};
use gated_delta_benches::report::{Before, tables};
use gated_delta_benches::shapes;
use gated_delta_benches::suite;
use gated_delta_benches::tune::advice;
use gated_delta_harness::arguments::DecayKind;
use gated_delta_harness::timing::Micros;

fn cell(batch: usize) -> Cell {
    Cell {
        op: Op::GdnDecode,
        mode: Mode::Update,
        formulation: Formulation::Recurrent,
        gate: DecayKind::Log,
        model: shapes::GDN[0],
        dim: 128,
        batch,
        tokens: 1,
        state: DType::Bf16,
        layout: StateLayout::KLast,
        slots: false,
        cold: true,
    }
}

fn row(cell: Cell, variant: &str, micros: f64) -> Row {
    Row {
        cell,
        variant: format!("recurrent_klast_bf16_k128_{variant}"),
        selected: true,
        micros: Micros {
            median: micros,
            p10: micros - 0.125,
            p90: micros + 0.125,
        },
        floor: Some(1.75),
        bytes: 4_000_000,
        error: 1.66e-3,
        run: Run {
            copy: 4000.0,
            empty: Some(0.5),
            gpu: "NVIDIA H200".to_owned(),
            driver: "580.1".to_owned(),
            sm_mhz: Some(1980),
            commit: String::new(),
        },
    }
}

/// The trimmed cells of the line of `text` that begins with `start`.
fn fields(text: &str, start: [&str; 2]) -> Vec<String> {
    let lines = text.lines().map(|line| {
        let fields = line.trim_matches('|').split('|');
        fields.map(|field| field.trim().to_owned()).collect()
    });
    let mut lines = lines.filter(|fields: &Vec<String>| fields.len() > 2 && fields[..2] == start);
    lines
        .next()
        .unwrap_or_else(|| panic!("no {start:?} in\n{text}"))
}

#[test]
fn a_table_compares_with_the_floor_the_peers_and_a_record() {
    let peers = Peers::recorded().unwrap();
    let before = Before {
        name: "before".to_owned(),
        rows: vec![row(cell(1), "tile32", 2.5)],
    };
    let rows = [row(cell(1), "tile16", 2.0), row(cell(3), "tile16", 2.0)];
    let text = tables(&rows, &peers, Some(&before));
    let head = fields(&text, ["T", "B"]);
    let value = |batch: &str, column: &str| {
        let at = head.iter().position(|head| head == column).unwrap();
        fields(&text, ["1", batch])[at].clone()
    };
    for (column, wanted) in [
        ("variant", "tile16 *"),
        ("µs", "2.00"),
        ("p10–p90", "1.88–2.12"),
        ("GB/s", "2000"),
        ("% copy", "50"),
        ("÷ floor", "1.14"),
        ("kernel ÷ floor", "1.20"),
        ("best peer (H200)", "2.83 FlashInfer"),
        ("vs best peer", "0.71"),
        ("÷ before", "0.800"),
    ] {
        assert_eq!(value("1", column), wanted, "{column}");
    }
    for column in ["best peer (H200)", "vs best peer", "÷ before"] {
        assert_eq!(value("3", column), "", "{column}");
    }
    let text = tables(&rows[1..], &peers, None);
    assert!(!text.contains("peer"), "{text}");
}

#[test]
fn peers_of_another_gpu_are_none() {
    let peers = Peers::recorded().unwrap();
    let mut row = row(cell(1), "tile16", 2.0);
    assert!(peers.best(&row).is_some());
    for gpu in [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
    ] {
        row.run.gpu = gpu.to_owned();
        assert!(peers.best(&row).is_none(), "{gpu}");
    }
}

#[test]
fn the_best_peer_is_the_least_of_its_cell() {
    let peers = Peers::recorded().unwrap();
    let best = |cell| {
        peers
            .best(&row(cell, "tile16", 1.0))
            .map(|peer| peer.micros)
    };
    let f32_state = Cell {
        state: DType::F32,
        ..cell(256)
    };
    assert_eq!(best(f32_state), Some(257.946)); // FLA's, before FlashInfer's two and Triton's
    let mtp = Cell {
        op: Op::GdnMtp,
        tokens: 8,
        ..cell(256)
    };
    let of_mode = |mode| best(Cell { mode, ..mtp });
    assert_eq!(of_mode(Mode::Verify), Some(77.139));
    assert_eq!(of_mode(Mode::Resume), Some(201.549));
    assert_eq!(of_mode(Mode::Commit), None);
    let v_last = Cell {
        layout: StateLayout::VLast,
        ..cell(256)
    };
    assert_eq!(best(v_last), None);
}

#[test]
fn a_cell_counts_once_and_by_its_better_formulation() {
    let peers = Peers::recorded().unwrap();
    let theirs = |cell| peers.best(&row(cell, "tile16", 1.0)).unwrap().micros;
    let verify = Cell {
        op: Op::GdnMtp,
        mode: Mode::Verify,
        tokens: 8,
        ..cell(256)
    };
    let parallel = Cell {
        formulation: Formulation::Parallel,
        ..verify
    };
    let rows = [
        row(verify, "tile16", 5.0 * theirs(verify)),
        row(parallel, "tile16", 0.9 * theirs(verify)),
        row(cell(1), "tile16", 1.019 * theirs(cell(1))),
        row(cell(2), "tile16", 1.021 * theirs(cell(2))),
        row(cell(3), "tile16", 1e9),
    ];
    let score = peers.score(&rows);
    assert_eq!((score.won, score.tied.len(), score.lost.len()), (1, 1, 1));
    assert!(score.lost[0].contains("T=1 B=2: 3.95 µs, FlashInfer 3.87 (1.02"));
    let mut unselected = rows;
    for row in &mut unselected {
        row.selected = false;
    }
    assert_eq!(peers.score(&unselected).text(), "");
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let path = std::env::temp_dir().join(format!("gated-delta-record-{}.csv", std::process::id()));
    let mut kda = row(
        Cell {
            op: Op::KdaRecurrent,
            mode: Mode::TokenSlots,
            gate: DecayKind::LowerBound(LOWER_BOUND),
            model: shapes::KDA[0],
            tokens: 4,
            cold: false,
            ..cell(8)
        },
        "tile16",
        3.125,
    );
    (kda.floor, kda.run.empty, kda.run.sm_mhz) = (None, None, None);
    let rows = [row(cell(1), "tile16", 2.0), kda];
    let mut csv = Csv::create(&path).unwrap();
    for row in &rows {
        csv.write(row).unwrap();
    }
    let back = read(&path).unwrap();
    assert_eq!(format!("{back:?}"), format!("{rows:?}"));
    drop(csv);
    let more = row(cell(2), "tile16", 3.0);
    Csv::append(&path).unwrap().write(&more).unwrap();
    let back = read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(format!("{:?}", back[2]), format!("{more:?}"));
    assert_eq!(back.len(), 3);
}

#[test]
fn the_suite_has_each_of_its_cells_once_and_meets_every_peer_but_replays() {
    let cells = suite::cells().unwrap();
    for (at, cell) in cells.iter().enumerate() {
        assert!(cell.exists(), "{}", cell.title());
        assert!(!cells[..at].contains(cell), "{} twice", cell.title());
    }
    let unmet = Peers::recorded().unwrap().unmet(&cells);
    assert!(!unmet.is_empty());
    for work in unmet {
        assert!(work.contains("mode: \"replay"), "{work}");
    }
}

#[test]
fn a_record_that_is_wrong_is_refused_by_line() {
    let path = std::env::temp_dir().join(format!("gated-delta-wrong-{}.csv", std::process::id()));
    let mut csv = Csv::create(&path).unwrap();
    csv.write(&row(cell(1), "tile16", 2.0)).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("qwen3-next", "qwen9")).unwrap();
    let refusal = format!("{:#}", read(&path).unwrap_err());
    std::fs::remove_file(&path).unwrap();
    assert!(
        refusal.contains("line 2") && refusal.contains("qwen9"),
        "{refusal}"
    );
}

#[test]
fn what_to_select_has_as_few_rows_as_are_good() {
    let micros = |tile16: f64, tile32: f64, batch| {
        [
            row(cell(batch), "tile16", tile16),
            row(cell(batch), "tile32", tile32),
        ]
    };
    let rows = [
        micros(2.0, 2.5, 1),
        micros(4.0, 3.98, 4), // as good: no reason to change here
        micros(10.0, 11.0, 16),
        micros(40.0, 34.0, 64),
        micros(160.0, 130.0, 256),
    ]
    .concat();
    let text = advice(&rows);
    let wanted = "\ngdn recurrent klast bf16 k128 decode  512:tile16 *:tile32\n";
    assert!(text.contains(wanted), "{text}");
    assert!(
        text.contains("at worst 1.005 (qwen3-next update T=1 B=4)"),
        "{text}"
    );
}

#[test]
fn what_to_select_is_said_under_the_names_of_its_table() {
    let kda = |mode, tokens| Cell {
        op: Op::KdaRecurrent,
        model: shapes::KDA[0],
        mode,
        tokens,
        ..cell(1)
    };
    let gdn = |mode, tokens| Cell {
        op: Op::GdnMtp,
        mode,
        tokens,
        ..cell(1)
    };
    let parallel = |cell| Cell {
        formulation: Formulation::Parallel,
        ..cell
    };
    for (cell, name) in [
        (
            gdn(Mode::Snapshots, 1),
            "gdn recurrent klast bf16 k128 decode",
        ),
        (gdn(Mode::Update, 4), "gdn recurrent klast bf16 k128"),
        (kda(Mode::Update, 1), "kda recurrent klast bf16 k128 decode"),
        (kda(Mode::Commit, 1), "kda recurrent klast bf16 k128"),
        (kda(Mode::Update, 4), "kda recurrent klast bf16 k128"),
        (
            parallel(gdn(Mode::Verify, 1)),
            "gdn gdn_mtp_parallel klast bf16 k128 verify",
        ),
        (
            parallel(gdn(Mode::Commit, 4)),
            "gdn gdn_mtp_parallel klast bf16 k128 update|commit",
        ),
        (
            parallel(kda(Mode::Update, 1)),
            "kda kda_recurrent_parallel klast bf16 k128 update|commit",
        ),
        (
            parallel(kda(Mode::Resume, 8)),
            "kda kda_recurrent_parallel klast bf16 k128 resume",
        ),
    ] {
        let text = advice(&[row(cell, "tile16", 2.0)]);
        assert!(text.contains(&format!("\n{name}  *:")), "{name}: {text}");
    }
}

#[test]
fn a_figure_has_both_series_and_every_batch() {
    let folder = std::env::temp_dir().join(format!("gated-delta-figures-{}", std::process::id()));
    let rows = [row(cell(1), "tile16", 2.0), row(cell(4), "tile16", 4.0)];
    let files = draw_all(&folder, &rows, &Peers::recorded().unwrap()).unwrap();
    let text = std::fs::read_to_string(&files[0]).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(files.len(), 1);
    assert!(files[0].ends_with("gdn_decode-qwen3-next-k128-bf16-k_last-update.svg"));
    for part in [
        "best peer T=1",
        "ours T=1",
        "floor",
        "best peers: FlashInfer",
    ] {
        assert!(text.contains(part), "no {part}");
    }
    assert_eq!(text.matches("<circle").count(), 2 + 1 + 2 * (2 * 2 + 2));
}
