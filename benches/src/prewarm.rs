//! Times the preparation for a layer: ms to compile all kernels that it is launched with, in separate processes.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use gated_delta::{DType, Error, Formulation, Library, StateLayout, Work};
use gated_delta_harness::arguments::DecayKind;

use crate::buffers::Buffers;
use crate::cell::{Cell, Mode, Op};
use crate::shapes;

/// Option that makes a process print [`millis`] and end.
const ONCE: &str = "--prewarm-once";
/// Drafted tokens of a step.
const TOKENS: usize = 8;

/// The launches of Qwen3-Next's layer: a decode, and steps of eight tokens that verify, update and resume.
#[must_use]
pub fn cells() -> [Cell; 4] {
    let decode = Cell {
        op: Op::GdnDecode,
        mode: Mode::Update,
        formulation: Formulation::Recurrent,
        gate: DecayKind::Log,
        model: shapes::GDN[0],
        dim: 128,
        batch: 1,
        tokens: 1,
        state: DType::Bf16,
        layout: StateLayout::KLast,
        slots: true,
        cold: false,
    };
    let step = |mode| Cell {
        op: Op::GdnMtp,
        mode,
        formulation: Formulation::Parallel,
        tokens: TOKENS,
        ..decode
    };
    [
        decode,
        step(Mode::Verify),
        step(Mode::Update),
        step(Mode::Resume),
    ]
}

/// Time in ms of [`Library::prewarm_all`] for [`cells`], in a library that has compiled nothing yet. On the simulator, time of the checks.
pub fn millis(library: &Library) -> Result<f64> {
    let buffers = cells().map(|cell| Buffers::new(library, cell));
    let buffers = buffers.into_iter().collect::<Result<Vec<_>>>()?;
    let works = buffers.iter().map(|buffers| buffers.work(0));
    let works = works.collect::<Result<Vec<_>, Error>>()?;
    let works: Vec<&dyn Work> = works.iter().map(|work| &**work).collect();
    let start = Instant::now();
    library.prewarm_all(&works)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// A table of [`millis`] without the driver's cache of compiled PTX, and with a cache that an earlier process has filled. `again` are the
/// arguments that make this program run the bench in another process.
pub fn table(again: &[&str]) -> Result<String> {
    let cache = tempfile::tempdir().context("a folder for the driver's cache")?;
    let once = |disable: &str| -> Result<f64> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(again).arg(ONCE);
        // The driver reads both variables when it is initialised, so each measurement needs its own process.
        command.env("CUDA_CACHE_DISABLE", disable);
        command.env("CUDA_CACHE_PATH", cache.path());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{ONCE}: {}", complaint.trim());
        let millis = said.trim().parse();
        millis.with_context(|| format!("{ONCE}: wanted ms, got {}", said.trim()))
    };
    let cold = once("1")?;
    once("0")?;
    let warm = once("0")?;
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let model = shapes::GDN[0].name;
    let what =
        format!("prewarm_all of {model}: decode; verify, update and resume of {TOKENS} tokens");
    table.set_header([what.as_str(), "ms"]);
    for (what, millis) in [
        ("cold: CUDA_CACHE_DISABLE=1", cold),
        ("warm: compiled by a process before", warm),
    ] {
        table.add_row([what.to_owned(), format!("{millis:.1}")]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Ok(format!("{table}\n"))
}
