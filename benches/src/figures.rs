//! Draws rows as figures, a file for each table.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use gated_delta::Formulation;
use plotters::style::RGBColor;

use gated_delta_harness::arguments::Operator;

use crate::cell::{self, Cell};
use crate::chart::{Axis, Marks, Panel, Picture, Series, draw};
use crate::peers::Peers;
use crate::record::Row;
use crate::report::{of_title, titles};

const GREY: RGBColor = RGBColor(120, 126, 136);

/// Draws the times of selected variants over B, in µs and in % of the copy's bandwidth, next to the best peers. Returns the files.
pub fn draw_all(folder: &Path, rows: &[Row], peers: &Peers) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let selected: Vec<Row> = rows.iter().filter(|row| row.selected).cloned().collect();
    let mut files = Vec::new();
    for title in titles(&selected) {
        let rows: Vec<&Row> = of_title(&selected, &title).collect();
        let file = folder.join(format!("{}.svg", slug(&rows[0].cell)));
        draw(&file, &picture(&title, &rows, peers))?;
        files.push(file);
    }
    Ok(files)
}

fn picture(title: &str, rows: &[&Row], peers: &Peers) -> Picture {
    let mut tokens: Vec<usize> = rows.iter().map(|row| row.cell.tokens).collect();
    tokens.dedup();
    let (mut micros, mut shares) = (Vec::new(), Vec::new());
    if let [_] = tokens[..] {
        micros.push(series("floor", GREY, Marks::Thin, rows, |row| row.floor));
        shares.push(series("floor", GREY, Marks::Thin, rows, |row| {
            Some(100.0 * row.copy_share() * row.micros.median / row.floor?)
        }));
    }
    for &tokens in &tokens {
        let rows: Vec<&Row> = rows
            .iter()
            .copied()
            .filter(|row| row.cell.tokens == tokens)
            .collect();
        let color = color(tokens);
        let peer = format!("best peer T={tokens}");
        let of_peer = |row: &Row| peers.best(row).map(|peer| peer.micros);
        micros.push(series(&peer, color, Marks::Hollow, &rows, of_peer));
        shares.push(series(&peer, color, Marks::Hollow, &rows, |row| {
            Some(100.0 * row.copy_share() * row.micros.median / of_peer(row)?)
        }));
        let ours = format!("ours T={tokens}");
        micros.push(series(&ours, color, Marks::Filled, &rows, |row| {
            Some(row.micros.median)
        }));
        shares.push(series(&ours, color, Marks::Filled, &rows, |row| {
            Some(100.0 * row.copy_share())
        }));
    }
    for series in [&mut micros, &mut shares] {
        series.retain(|series| !series.points.is_empty());
    }
    let y = micros.iter().flat_map(|series| &series.points);
    let y = Axis::log("µs per launch", y.map(|point| point.1), |y| format!("{y}"));
    let share = Axis {
        label: "% of a device copy".to_owned(),
        range: 0.0..105.0,
        log: false,
        ticks: (0..=5).map(|tick| f64::from(20 * tick)).collect(),
        text: |y| format!("{y}"),
    };
    let x = batches(rows);
    Picture {
        title: title.to_owned(),
        note: note(rows, peers),
        panels: vec![
            Panel {
                x: x.clone(),
                y,
                series: micros,
            },
            Panel {
                x,
                y: share,
                series: shares,
            },
        ],
    }
}

fn series(
    name: &str,
    color: RGBColor,
    marks: Marks,
    rows: &[&Row],
    y: impl Fn(&Row) -> Option<f64>,
) -> Series {
    Series {
        name: name.to_owned(),
        color,
        marks,
        points: rows
            .iter()
            .filter_map(|row| Some((row.cell.batch as f64, y(row)?)))
            .collect(),
    }
}

fn batches(rows: &[&Row]) -> Axis {
    let mut ticks: Vec<f64> = rows.iter().map(|row| row.cell.batch as f64).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    Axis {
        ticks: ticks.clone(),
        ..Axis::log("B", ticks.into_iter(), |batch| format!("{batch}"))
    }
}

/// Note of a figure: the GPU and driver, and the peers.
fn note(rows: &[&Row], peers: &Peers) -> String {
    let Some(Row { cell, run, .. }) = rows.first() else {
        return String::new();
    };
    let mut parts = vec![run.gpu.clone()];
    if !run.driver.is_empty() {
        parts.push(format!("driver {}", run.driver));
    }
    parts.push(format!("{} level-2 cache", cell.l2()));
    parts.push(format!("copy {:.0} GB/s", run.copy));
    let mut names: Vec<&str> = rows
        .iter()
        .filter_map(|row| Some(peers.best(row)?.name.as_str()))
        .collect();
    names.sort_unstable();
    names.dedup();
    if !names.is_empty() {
        parts.push(format!("best peers: {}", names.join(", ")));
    }
    parts.join(" · ")
}

/// Colors that color-blind readers can tell apart.
fn color(tokens: usize) -> RGBColor {
    match tokens {
        1 => RGBColor(0, 114, 178),
        2 => RGBColor(204, 121, 167),
        4 => RGBColor(0, 158, 115),
        8 => RGBColor(213, 94, 0),
        _ => RGBColor(86, 98, 110),
    }
}

/// File name of a table's figure, without the extension.
fn slug(cell: &Cell) -> String {
    let Cell { state, layout, .. } = cell;
    let (operator, model, mode) = (cell.op.name(), cell.model.name, cell.mode.name());
    let mut name = format!("{operator}-{model}-k{}-{state}-{layout}-{mode}", cell.dim);
    for (is_so, part) in [
        (cell.formulation == Formulation::Parallel, "parallel"),
        (
            cell.op.operator() == Operator::Kda,
            cell::gate_name(cell.gate),
        ),
        (cell.slots, "slots"),
        (!cell.cold, "warm"),
    ] {
        if is_so {
            name = format!("{name}-{part}");
        }
    }
    name
}
