//! Times that need no GPU: a launch's checks, parameters and look-up, and the reference.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use gated_delta::module_cache::ModuleCache;
use gated_delta::{Error, Library};

use crate::buffers::Buffers;
use crate::cell::Cell;

/// A table of host times of the cells with one row, for each title and T: ns of the checks including the selection of a variant, ns of
/// the parameters, ns of the look-up of the compiled kernel, ms of the reference.
pub fn host_parts(cells: &[Cell], mut done: impl FnMut(&Cell)) -> Result<String> {
    let library = Library::simulator();
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header([
        "what",
        "T",
        "checks, ns",
        "params, ns",
        "look-up, ns",
        "reference, ms",
    ]);
    for cell in one_row(cells) {
        done(&cell);
        let buffers = Buffers::new(&library, cell)?;
        let work = &*buffers.work(0)?;
        let Ok(variant) = work.selected() else {
            continue;
        };
        let start = Instant::now();
        black_box(buffers.truth()?);
        let reference = start.elapsed().as_secs_f64() * 1e3;
        let checks = nanos(|| black_box(work).selected().map(drop))?;
        let params = nanos(|| {
            black_box(black_box(work).params());
            Ok(())
        })?;
        let key = vec![1; variant.symbols().len()];
        let cache = ModuleCache::<Vec<u32>, u64>::default();
        cache.get_or_compile(&key[..], || Ok::<_, Error>(0))?;
        let look_up = nanos(|| {
            black_box(cache.get(black_box(&key[..])));
            Ok(())
        })?;
        let title = Cell { cold: true, ..cell }.title();
        table.add_row([
            title,
            cell.tokens.to_string(),
            format!("{checks:.0}"),
            format!("{params:.0}"),
            format!("{look_up:.0}"),
            format!("{reference:.1}"),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Ok(table.to_string())
}

/// The cells with B = 1 and one set of buffers, without repetitions.
fn one_row(cells: &[Cell]) -> Vec<Cell> {
    let mut kept = Vec::new();
    for cell in cells {
        let cell = Cell {
            batch: 1,
            cold: false,
            ..*cell
        };
        if !kept.contains(&cell) {
            kept.push(cell);
        }
    }
    kept
}

/// Median time of a call, in ns.
fn nanos(call: impl Fn() -> Result<(), Error>) -> Result<f64> {
    const CALLS: usize = 1000;
    const ROUNDS: usize = 31;
    let mut samples = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        samples.push(start.elapsed().as_nanos() as f64 / CALLS as f64);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[ROUNDS / 2])
}
