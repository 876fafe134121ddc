//! Tests of the comparison of a run with all records of its GPU, of the cells whose selected variant is not their best, and of the cells
//! for kernels without a row.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Parser as _;
use gated_delta::{DType, Formulation, Library, StateLayout};
use gated_delta_benches::best::{Records, Rows};
use gated_delta_benches::buffers::Buffers;
use gated_delta_benches::cell::{Cell, Mode, Op};
use gated_delta_benches::latency;
use gated_delta_benches::options::Options;
use gated_delta_benches::record::{self, Csv, Row, Run};
use gated_delta_benches::shapes;
use gated_delta_benches::sweep::{Clock, Kind, Part, Sweep};
use gated_delta_benches::timed::{Timed as _, regret};
use gated_delta_benches::untimed::{Wanted, missing};
use gated_delta_harness::arguments::DecayKind;
use gated_delta_harness::timing::Micros;

const GPU: &str = "NVIDIA H200";

fn cell(batch: usize) -> Cell {
    Cell {
        op: Op::GdnMtp,
        mode: Mode::Verify,
        formulation: Formulation::Recurrent,
        gate: DecayKind::Log,
        model: shapes::GDN[0],
        dim: 128,
        batch,
        tokens: 4,
        state: DType::Bf16,
        layout: StateLayout::KLast,
        slots: false,
        cold: true,
    }
}

fn row(cell: Cell, variant: &str, micros: f64) -> Row {
    Row {
        cell,
        variant: variant.to_owned(),
        selected: true,
        micros: Micros {
            median: micros,
            p10: micros,
            p90: micros,
        },
        floor: None,
        bytes: 4_000_000,
        error: 1e-3,
        run: Run {
            copy: 4238.0,
            empty: Some(0.5),
            gpu: GPU.to_owned(),
            driver: String::new(),
            sm_mhz: None,
            commit: String::new(),
        },
    }
}

fn records(rows: &[Row]) -> Records {
    let mut records = Records::read(Path::new("nowhere"), GPU, "", &[]).unwrap();
    records.rows(rows, "2026-11-22-all.csv", GPU);
    records
}

/// A temporary folder, removed at the end of the test.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_gpu_has_a_folder_whatever_its_memory_is_called() {
    for (gpu, wanted) in [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 5090", "geforce-rtx-5090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ] {
        assert_eq!(record::folder(gpu), wanted, "{gpu}");
    }
}

/// A row that is slower twice is named, with both records. A row that is within 1 % when measured again is not.
#[test]
fn slower_rows_are_measured_again_and_named() {
    let records = records(&[
        row(cell(1), "tile16", 10.0),
        row(cell(1), "tile32", 9.0),
        row(cell(2), "tile16", 10.0),
        row(cell(4), "tile16", 10.0),
        row(cell(8), "tile16", 10.0),
    ]);
    let mut rows = [
        row(cell(1), "tile16", 10.0),
        row(cell(2), "tile16", 10.3),
        row(cell(4), "tile16", 10.09),
        row(cell(8), "tile16", 9.8),
        row(cell(16), "tile16", 1.0),
    ];
    let mut times = BTreeMap::new();
    let again = |now: &Row| -> Result<Option<Row>> {
        let count: &mut i32 = times.entry(now.cell.batch).or_default();
        *count += 1;
        Ok(Some(match (now.cell.batch, *count) {
            (2, 2) => row(cell(2), "tile16", 10.05),
            _ => row(now.cell, "tile16", 10.2),
        }))
    };
    let verdict = records.judge(&mut rows, 3, again).unwrap();
    // The first cell stays slower than the best of all variants, and is measured three times; the second is within 1 % the second time.
    assert_eq!(times, BTreeMap::from([(1, 3), (2, 2)]));
    assert_eq!(
        (
            verdict.compared(),
            verdict.slower.len(),
            verdict.equal,
            verdict.faster,
            verdict.unrecorded
        ),
        (4, 1, 2, 1, 1)
    );
    assert_eq!(rows[0].micros.median, 10.0);
    assert_eq!(rows[1].micros.median, 10.05);
    let text = verdict.text();
    let wanted = "slower: +11.1 %  gdn_mtp qwen3-next (H=16 HV=32) K=V=128 bf16 k_last verify T=4 B=1, tile16: 10.00 µs (least of \
                  4, copy 4238 GB/s), best 9.00 of tile32 (2026-11-22-all.csv, copy 4238 GB/s)";
    assert!(text.contains(wanted), "{text}");
    assert_eq!(
        verdict.failure().unwrap(),
        "1 cell is slower than the best record by more than 1 %"
    );
}

#[test]
fn rows_of_other_work_are_not_compared() {
    let now = cell(1);
    let kda = Cell {
        op: Op::KdaLayer,
        model: shapes::KDA[0],
        mode: Mode::Update,
        ..now
    };
    let others = [
        Cell {
            mode: Mode::Update,
            ..now
        },
        Cell {
            formulation: Formulation::Parallel,
            ..now
        },
        Cell {
            model: shapes::GDN[1],
            ..now
        },
        Cell { dim: 64, ..now },
        Cell { batch: 2, ..now },
        Cell { tokens: 8, ..now },
        Cell {
            state: DType::F32,
            ..now
        },
        Cell {
            layout: StateLayout::VLast,
            ..now
        },
        Cell { slots: true, ..now },
        Cell { cold: false, ..now },
        Cell {
            gate: DecayKind::Softplus,
            ..kda
        },
    ];
    let records = records(&others.map(|cell| row(cell, "tile16", 1.0)));
    for cell in [now, kda] {
        assert!(
            records.best(&row(cell, "tile16", 2.0)).is_none(),
            "{cell:?}"
        );
        let nothing = records.judge(&mut [row(cell, "tile16", 2.0)], 3, |_| Ok(None));
        assert!(
            nothing
                .unwrap_err()
                .to_string()
                .contains("none of which has a row")
        );
    }
    for cell in others {
        assert!(
            records.best(&row(cell, "tile16", 2.0)).is_some(),
            "{cell:?}"
        );
    }
}

/// A variant that is not selected is compared with its own best, not with another's.
#[test]
fn an_unselected_variant_meets_itself() {
    let records = records(&[row(cell(1), "tile16", 10.0), row(cell(1), "tile32", 9.0)]);
    let unselected = |variant| Row {
        selected: false,
        ..row(cell(1), variant, 10.0)
    };
    assert_eq!(records.best(&unselected("tile16")).unwrap().micros, 10.0);
    assert!(records.best(&unselected("tile64")).is_none());
    assert_eq!(
        records.best(&row(cell(1), "tile64", 10.0)).unwrap().micros,
        9.0
    );
}

/// The folder has records of all tables, of different age, for one GPU.
#[test]
fn a_folder_of_records_is_read() {
    let folder = folder();
    let here = folder.path().join("h200");
    let mut other = row(cell(1), "tile16", 1.0);
    other.run.gpu = "NVIDIA H200 NVL".to_owned();
    let first = row(cell(2), "tile16", 2.0);
    // The first cell of this file is not compared: it was in its process's first graph.
    record::save(
        &here.join("2026-11-21-kda-t1.csv"),
        &[first, row(cell(1), "tile16", 5.0)],
    )
    .unwrap();
    record::save(
        &here.join("2026-11-24-all.csv"),
        &[other, row(cell(1), "tile32", 6.0)],
    )
    .unwrap();
    let write = |name: &str, text: &str| std::fs::write(here.join(name), text).unwrap();
    write(
        "2026-11-25-prefill.csv",
        "case,state,entry,selected,error_o,error_state,us,us_p10,us_p90,bytes_us,peer_us,peer\n1x64,f32,short,true,0,0,10.5,10,11,1.3,11.8,FlashInfer\n",
    );
    write(
        "2026-11-23-deferred.csv",
        "operator,state,batch,count,entry,selected,error_o,error_state,bytes,us,us_p10,us_p90\ngdn,bf16,1,cycle,gdn_deferred,true,0,0,2121856.0,2.5,2.4,2.6\n",
    );
    write("peers.csv", "op,us,peer\ngdn_decode,1,FLA\n");
    let read =
        |since, except: &[PathBuf]| Records::read(folder.path(), GPU, since, except).unwrap();
    let micros = |records: &Records, batch| {
        records
            .best(&row(cell(batch), "tile16", 9.0))
            .map(|best| best.micros)
    };
    let all = read("", &[]);
    assert_eq!((micros(&all, 1), micros(&all, 2)), (Some(5.0), None));
    let timed: Vec<&str> = all.timed().iter().map(String::as_str).collect();
    assert_eq!(timed, ["gdn_deferred", "short", "tile16", "tile32"]);
    assert_eq!(micros(&read("2026-11-22", &[]), 1), Some(6.0));
    assert_eq!(
        micros(&read("", &[here.join("2026-11-21-kda-t1.csv")]), 1),
        Some(6.0)
    );
    let Some(Rows::Deferred(deferred)) = Rows::read(&here.join("2026-11-23-deferred.csv")).unwrap()
    else {
        panic!("not of deferred write-back");
    };
    assert_eq!(
        deferred[0].work(),
        "deferred gdn K=128 bf16 whole cycles N=8 u=f32 T=1 B=1"
    );
    write("2026-11-26-what.csv", "a,b\n1,2\n");
    let refusal = Records::read(folder.path(), GPU, "", &[]).err().unwrap();
    assert!(
        format!("{refusal:#}").contains("2026-11-26-what.csv"),
        "{refusal:#}"
    );
}

/// The repository's records can be read, and a recorded run is compared with the others without a GPU.
#[test]
fn the_records_here_are_all_read_and_a_recorded_run_is_judged() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("record");
    for gpu in [GPU, "NVIDIA H100 80GB HBM3"] {
        assert!(
            Records::read(&folder, gpu, "", &[]).unwrap().timed().len() > 100,
            "{gpu}"
        );
    }
    let file = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let judge = |name: &str| {
        let (from, records) = (file(name), folder.to_string_lossy());
        let words = [
            "bench",
            "--from",
            &from,
            "--compare",
            "best",
            "--record-dir",
            &records,
        ];
        latency::run(&Options::try_parse_from(words).unwrap(), &[]).unwrap()
    };
    let steps = judge("h200/2026-11-22-all.csv");
    assert!(
        steps.text.contains("cells compared") && steps.rows.len() > 800,
        "{}",
        steps.text
    );
    let prefills = judge("h200/2026-11-26-prefill-slots.csv");
    assert!(
        prefills.text.contains("108 cells compared"),
        "{}",
        prefills.text
    );
    let deferred = judge("h200/2026-11-24-deferred.csv");
    assert!(
        deferred.text.contains("cells compared"),
        "{}",
        deferred.text
    );
}

#[test]
fn a_variant_that_is_far_from_the_best_is_regretted() {
    let unselected = |batch, micros| Row {
        selected: false,
        ..row(cell(batch), "tile32", micros)
    };
    let rows = [
        row(cell(1), "tile16", 10.3),
        unselected(1, 10.0),
        row(cell(2), "tile16", 10.1),
        unselected(2, 10.0),
        row(cell(4), "tile16", 10.0),
    ];
    let text = regret(&rows);
    assert!(
        text.starts_with("1 of 2 cells with several variants are more than 2 %"),
        "{text}"
    );
    let line = "  +3.0 %  gdn_mtp qwen3-next (H=16 HV=32) K=V=128 bf16 k_last verify T=4 B=1: tile16 10.30 µs is selected, tile32 takes 10.00";
    assert!(text.contains(line), "{text}");
    assert_eq!(regret(&rows[4..]), "");
}

/// A table whose cases are batches. Each takes 10 µs, and 1 µs less when measured again.
#[derive(Default)]
struct Fake {
    measured: Vec<usize>,
}

impl Kind for Fake {
    type Case = Cell;
    type Prepared = usize;
    type Row = Row;

    fn title(cell: &Cell) -> String {
        cell.title()
    }

    fn batch(cell: &Cell) -> Option<usize> {
        Some(cell.batch)
    }

    fn is_of(row: &Row, cell: &Cell) -> bool {
        row.cell == *cell
    }

    fn read(path: &Path) -> Result<Vec<Row>> {
        record::read(path)
    }

    fn prepare(cell: &Cell) -> Result<usize> {
        Ok(cell.batch)
    }

    fn measure(&mut self, cell: &Cell, prepared: usize) -> Result<Part<Row>> {
        assert_eq!(prepared, cell.batch);
        anyhow::ensure!(cell.batch < 1000, "no memory");
        let before = self.measured.iter().filter(|&&it| it == cell.batch).count();
        self.measured.push(cell.batch);
        Ok(Part {
            rows: vec![row(*cell, "tile16", 10.0 - before as f64)],
            ..Part::default()
        })
    }
}

#[test]
fn a_sweep_keeps_what_is_there_and_writes_what_took_least() {
    let folder = folder();
    let file = folder.path().join("rows.csv");
    // The file of a run that ended before its first row.
    drop(Csv::create(&file).unwrap());
    let before = row(cell(7), "tile16", 3.0);
    Csv::append(&file).unwrap().write(&before).unwrap();
    let clock = Clock::new(Some(Duration::from_secs(600)));
    let mut sweep = Sweep::new(Fake::default(), Some(file.clone()), true).unwrap();
    sweep.measure(&[cell(7), cell(2), cell(16), cell(64)], &clock, true);
    assert_eq!(sweep.kind.measured, [64, 16, 2]);
    let records = records(&[row(cell(16), "tile16", 8.95), row(cell(7), "tile16", 1.0)]);
    let text = sweep.judge(&records, &clock).unwrap();
    assert!(
        text.contains("1 cells compared, 0 faster, 1 equal"),
        "{text}"
    );
    assert_eq!(sweep.kind.measured, [64, 16, 2, 16]);
    let micros = |rows: &[Row]| -> Vec<f64> { rows.iter().map(|row| row.micros.median).collect() };
    assert_eq!(
        micros(&record::read(&file).unwrap()),
        [3.0, 10.0, 9.0, 10.0]
    );
    assert!(sweep.failures.is_empty() && sweep.notes().is_empty());
    sweep.measure(&[cell(1000), cell(3)], &clock, false);
    assert!(sweep.failures[0].contains("no memory") && sweep.rows.len() == 4);
}

#[test]
fn a_sweep_without_time_says_what_it_left() {
    let clock = Clock::new(Some(Duration::ZERO));
    let mut sweep = Sweep::new(Fake::default(), None, false).unwrap();
    sweep.measure(&[cell(1), cell(2)], &clock, false);
    assert_eq!(
        sweep.notes(),
        "2 cells were not measured: the budget was spent\n"
    );
    assert!(sweep.rows.is_empty());
}

/// Each kernel is a variant of some cell of the first round: for steps on the simulator, for other tables by its name.
#[test]
fn every_kernel_has_a_cell() {
    let library = Library::simulator();
    let none = BTreeSet::new();
    let mut variants: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for entry in missing(&none) {
        let name = entry.name();
        let Wanted {
            cells,
            deferred,
            prefills,
        } = Wanted::of(&[entry], 0);
        let computes = entry.computes().unwrap();
        let wanted = computes.all_operators().count() * computes.all_states().count();
        let all = cells.len() + deferred.len() + prefills.len();
        assert_eq!(all, wanted, "{name}");
        for cell in cells {
            let cell = Cell {
                batch: 1,
                cold: false,
                ..cell
            };
            let found = variants
                .entry(row(cell, "", 0.0).work())
                .or_insert_with(|| {
                    let buffers = Buffers::new(&library, cell).unwrap();
                    let work = buffers.work(0).unwrap();
                    work.variants()
                        .unwrap()
                        .into_iter()
                        .map(|it| it.name())
                        .collect()
                });
            assert!(found.contains(name), "{name}: {found:?}");
        }
        let words = |dim: usize| {
            if dim == 96 {
                "_k96v192".to_owned()
            } else {
                format!("_k{dim}")
            }
        };
        for case in deferred {
            let kind = case
                .operator_name()
                .replacen("gdn", "gdn_deferred", 1)
                .replacen("kda", "kda_deferred", 1);
            // A token-by-token entry serves both operators.
            let kind = match case.drafts.parallel {
                true => kind + "_parallel",
                false => kind.split_at("gdn_".len()).1.to_owned(),
            };
            let start = format!("{kind}_klast_{}{}", case.state, words(case.dim));
            assert!(name.starts_with(&start), "{name}: {start}");
        }
        for case in prefills {
            let operator = format!("{:?}_prefill_", case.operator).to_lowercase();
            let of_either = name.starts_with("prefill_single_");
            let words = words(case.dim);
            assert!(
                (of_either || name.starts_with(&operator)) && name.contains(&words),
                "{name}: {words}"
            );
        }
    }
    let more: Vec<_> = missing(&none).collect();
    let more = Wanted::of(&more, 1);
    assert!(more.cells.len() > 100 && more.deferred.len() > 40 && more.prefills.len() > 20);
    let timed = missing(&none)
        .map(|entry| entry.name().to_owned())
        .collect();
    assert_eq!(missing(&timed).count(), 0);
}
