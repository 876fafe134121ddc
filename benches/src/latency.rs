//! The bench from its options to what it shows: `cargo bench` and the command's `bench`.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use gated_delta::Library;
use gated_delta::driver::{Context, Device};
use gated_delta_harness::timing::{Timer, copy_ceiling, empty_kernel};
use humantime::format_rfc3339_seconds;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::buffers::Buffers;
use crate::cell::Cell;
use crate::deferred;
use crate::figures::draw_all;
use crate::host_cost::host_cost;
use crate::host_parts::host_parts;
use crate::options::Options;
use crate::peers::Peers;
use crate::prefill;
use crate::prewarm;
use crate::record::{self, Csv, Row, Run, read};
use crate::report::{Before, tables};
use crate::shapes::{GDN, KDA};
use crate::tune::advice;

/// What a run has to show.
#[derive(Default)]
pub struct Outcome {
    /// Tables, the count against the peers, what launches cost the host, and what failed.
    pub text: String,
    /// Timed rows, those that were kept or read included.
    pub rows: Vec<Row>,
    /// Rows that failed, each in words; an error that ended the run early comes last.
    pub failures: Vec<String>,
}

/// Measures what `options` ask for, or shows what they name. Without a GPU, what the host does for one row. `again` are
/// the arguments that bring a process of this program here.
///
/// # Errors
/// Options that ask for nothing, a file that cannot be read or written, a GPU that fails before its first row.
pub fn run(options: &Options, again: &[&str]) -> Result<Outcome> {
    let before = options.compare.as_deref().map(before).transpose()?;
    if !options.from.is_empty() {
        let rows: Vec<Vec<Row>> = options
            .from
            .iter()
            .map(|path| read(path))
            .collect::<Result<_>>()?;
        let mut outcome = Outcome {
            rows: rows.concat(),
            ..Outcome::default()
        };
        show(&mut outcome.text, &outcome.rows, options, before.as_ref())?;
        return Ok(outcome);
    }
    let (cells, cases) = match options.deferred {
        true => (Vec::new(), options.deferred_cases()?),
        false => (options.cells()?, Vec::new()),
    };
    let device = match Device::get(0) {
        Ok(device) => device,
        Err(error) if options.deferred => {
            return Ok(Outcome {
                text: format!("{error}: no launch is timed\n"),
                ..Outcome::default()
            });
        }
        Err(error) => {
            let progress = progress(cells.len())?;
            let table = host_parts(&cells, |cell| progress.set_message(cell.title()))?;
            progress.finish_and_clear();
            return Ok(Outcome {
                text: format!(
                    "{error}: no launch is timed, only what the host does for one row\n\n{table}\n"
                ),
                ..Outcome::default()
            });
        }
    };
    let context = Context::primary(device)?;
    let library = Library::with_unproved(&context);
    if options.prewarm_once {
        return Ok(Outcome {
            text: format!("{}\n", prewarm::millis(&library)?),
            ..Outcome::default()
        });
    }
    let timer = Timer::new(&library, &context)?;
    if options.deferred {
        return deferreds(options, &cases, &library, &timer, &device.name()?);
    }
    if options.prefill {
        return prefills(options, &library, &timer, &device.name()?);
    }
    let (copy, empty) = (copy_ceiling(&context)?, empty_kernel(&timer, &context)?);
    let run = Run::now(device.name()?, copy, empty);
    let mut kept = Vec::new();
    let csv = match &options.save {
        Some(path) => {
            let path = path.clone().unwrap_or_else(|| default_record(&run.gpu, ""));
            eprintln!("rows go to {}", path.display());
            Some(if options.append && path.exists() {
                kept = read(&path)?;
                eprintln!("{} of them are there", kept.len());
                Csv::append(&path)?
            } else {
                Csv::create(&path)?
            })
        }
        None => None,
    };
    let missing: Vec<Cell> = cells
        .iter()
        .filter(|&cell| kept.iter().all(|row| row.cell != *cell))
        .copied()
        .collect();
    let mut bench = Bench {
        csv,
        library,
        timer,
        tune: options.tune,
        floors: HashMap::new(),
        run,
        rows: kept,
        skipped: Vec::new(),
        failures: Vec::new(),
    };
    let stopped = bench.measure_all(&context, &missing);
    let mut text = String::new();
    for skipped in &bench.skipped {
        writeln!(text, "skipped: {skipped}")?;
    }
    let shown = show(&mut text, &bench.rows, options, before.as_ref());
    let Run { gpu, .. } = &bench.run;
    writeln!(
        text,
        "{gpu}: copy {copy:.0} GB/s (2 GiB, bytes read + written), empty kernel {empty:.2} µs"
    )?;
    let ended = stopped.and(shown).and_then(|()| {
        text += &bench.host_costs(&cells)?;
        if options.prewarm {
            text += &prewarm::table(again)?;
        }
        Ok(())
    });
    let Bench {
        rows, mut failures, ..
    } = bench;
    failures.extend(ended.err().map(|error| format!("{error:#}")));
    for failure in &failures {
        writeln!(text, "FAILED: {failure}")?;
    }
    Ok(Outcome {
        text,
        rows,
        failures,
    })
}

/// Adds tables, what to select, the figures' files, and the count against the peers.
fn show(text: &mut String, rows: &[Row], options: &Options, before: Option<&Before>) -> Result<()> {
    let peers = Peers::recorded()?;
    writeln!(text, "{}", tables(rows, &peers, before))?;
    if options.tune {
        writeln!(text, "host/src/select.rs by these rows:\n{}", advice(rows))?;
    }
    *text += &peers.score(rows).text();
    if let Some(folder) = &options.svg {
        for file in draw_all(folder, rows, &peers)? {
            writeln!(text, "{}", file.display())?;
        }
    }
    Ok(())
}

fn before(path: &Path) -> Result<Before> {
    let name = path.file_stem().unwrap_or(path.as_os_str());
    Ok(Before {
        name: name.to_string_lossy().into_owned(),
        rows: read(path)?,
    })
}

/// Measures prefills.
fn prefills(options: &Options, library: &Library, timer: &Timer, gpu: &str) -> Result<Outcome> {
    let context = library.context().context("a library without a GPU")?;
    let copy = copy_ceiling(context)?;
    let mut cases = prefill::cases();
    if !options.rows.is_empty() {
        let asked = |title: &str| {
            options
                .rows
                .iter()
                .any(|name| title.starts_with(name.as_str()))
        };
        cases.retain(|case| asked(&case.title()));
    }
    let bench = prefill::Bench {
        library,
        timer: Some((timer, copy)),
        heads: [GDN[0].head_counts(), KDA[0].head_counts()],
        every_entry: options.tune,
        entries: &options.entry,
    };
    let progress = progress(cases.len())?;
    let measured = bench.run(&cases, |title| {
        progress.inc(1);
        progress.set_message(title.to_owned());
    })?;
    progress.finish_and_clear();
    let table = prefill::table(&measured.rows, bench.heads);
    let mut text = in_words(options, (gpu, copy), "-prefill", (&measured.rows, &table))?;
    for failure in &measured.failures {
        writeln!(text, "FAILED: {failure}")?;
    }
    Ok(Outcome {
        text,
        failures: measured.failures,
        ..Outcome::default()
    })
}

/// Measures steps on states that wait.
fn deferreds(
    options: &Options,
    cases: &[deferred::Case],
    library: &Library,
    timer: &Timer,
    gpu: &str,
) -> Result<Outcome> {
    let context = library.context().context("a library without a GPU")?;
    let copy = copy_ceiling(context)?;
    let progress = progress(cases.len())?;
    let rows = deferred::run(library, Some(timer), cases, options.tune, |case| {
        progress.inc(1);
        progress.set_message(format!("{case:?}"));
    })?;
    progress.finish_and_clear();
    let table = deferred::table(&rows, copy);
    Ok(Outcome {
        text: in_words(options, (gpu, copy), "-deferred", (&rows, &table))?,
        ..Outcome::default()
    })
}

/// A table and the copy beside it; its rows in a file, where that is asked for.
fn in_words<T: Serialize>(
    options: &Options,
    (gpu, copy): (&str, f64),
    suffix: &str,
    (rows, table): (&[T], &str),
) -> Result<String> {
    let mut text = String::new();
    if let Some(path) = &options.save {
        let default = || default_record(gpu, suffix);
        let path = path.clone().unwrap_or_else(default);
        record::save(&path, rows)?;
        writeln!(text, "rows are in {}", path.display())?;
    }
    writeln!(text, "{table}")?;
    writeln!(
        text,
        "{gpu}: copy {copy:.0} GB/s (2 GiB, bytes read + written)"
    )?;
    Ok(text)
}

/// `record/h200/2026-01-31.csv`.
fn default_record(gpu: &str, suffix: &str) -> PathBuf {
    let gpu = gpu.to_lowercase().replace("nvidia ", "");
    let now = format_rfc3339_seconds(SystemTime::now()).to_string();
    let date = now.split('T').next().unwrap_or(&now);
    let file = format!("{date}{suffix}.csv");
    ["record", &gpu.replace(' ', "-"), &file].iter().collect()
}

fn progress(length: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {eta} {msg}")?;
    Ok(ProgressBar::new(length as u64).with_style(style))
}

struct Bench {
    library: Library,
    timer: Timer,
    tune: bool,
    csv: Option<Csv>,
    /// µs of the floor, by cold or warm and bytes of a set's states.
    floors: HashMap<(bool, usize), f64>,
    run: Run,
    rows: Vec<Row>,
    skipped: Vec<String>,
    failures: Vec<String>,
}

impl Bench {
    /// Measures every cell. A row that fails is kept as a failure; an error of the driver ends it.
    fn measure_all(&mut self, context: &Context, cells: &[Cell]) -> Result<()> {
        let progress = progress(cells.len())?;
        for cell in cells {
            let Cell { tokens, batch, .. } = cell;
            let title = format!("{} T={tokens} B={batch}", cell.title());
            progress.set_message(title.clone());
            self.measure(cell, &title).with_context(|| title.clone())?;
            context.synchronize().with_context(|| title)?;
            progress.inc(1);
        }
        progress.finish_and_clear();
        Ok(())
    }

    fn measure(&mut self, cell: &Cell, title: &str) -> Result<()> {
        let mut buffers = Buffers::new(&self.library, *cell)?;
        let work = buffers.work(0)?;
        let selected = match self.library.selected(&*work) {
            Ok(selected) => selected,
            Err(refusal) => {
                self.skipped.push(format!("{title}: {refusal}"));
                return Ok(());
            }
        };
        let bytes = work.bytes()?;
        let variants = match self.tune {
            true => work.variants()?,
            false => vec![selected],
        };
        drop(work);
        let truth = buffers.truth()?;
        let launches = buffers
            .sets()
            .max(40.min((20_000_000_000 / bytes.max(1)) as usize).max(4))
            .next_multiple_of(buffers.sets());
        let floor = match cell.mode.in_place() {
            true => Some(self.floor(&buffers, launches)?),
            false => None,
        };
        for variant in variants {
            let stream = self.timer.stream.as_ref();
            let error = match buffers.check(&self.library, stream, variant, &truth) {
                Ok(error) => error,
                Err(error) => {
                    self.failures.push(format!("{title}: {error:#}"));
                    continue;
                }
            };
            // SAFETY: the buffers outlive the timing, which waits for all launches.
            let micros = self.timer.graph(launches, |i| unsafe {
                self.library
                    .launch_with(stream, &*buffers.work(i)?, variant)
            })?;
            let row = Row {
                cell: *cell,
                variant: variant.name().to_owned(),
                selected: variant == selected,
                micros,
                floor,
                bytes,
                error,
                run: self.run.clone(),
            };
            if let Some(csv) = &mut self.csv {
                csv.write(&row)?;
            }
            self.rows.push(row);
        }
        Ok(())
    }

    fn floor(&mut self, buffers: &Buffers, launches: usize) -> Result<f64> {
        let key = (buffers.cell().cold, buffers.cell().pool_bytes());
        if let Some(&floor) = self.floors.get(&key) {
            return Ok(floor);
        }
        let stream = self.timer.stream.as_ref();
        // SAFETY: the buffers outlive the timing, which waits for all launches.
        let micros = self.timer.graph(launches, |i| unsafe {
            self.library.state_floor(stream, buffers.words(i)?, 1.0)
        })?;
        self.floors.insert(key, micros.median);
        Ok(micros.median)
    }

    /// What a launch of the first cell of each operator, mode and formulation costs the host, with one row.
    fn host_costs(&self, cells: &[Cell]) -> Result<String> {
        let mut text = String::new();
        let mut seen = HashSet::new();
        for cell in cells {
            let cell = Cell {
                batch: 1,
                cold: false,
                ..*cell
            };
            if !seen.insert((cell.op, cell.mode, cell.formulation)) {
                continue;
            }
            let buffers = Buffers::new(&self.library, cell)?;
            if buffers.work(0)?.selected().is_err() {
                continue;
            }
            let cost = host_cost(&self.library, &self.timer.stream, &buffers)?;
            writeln!(
                text,
                "host, {}, T={}: cuLaunchKernel {:.0} ns, plan + {:.0} ns, cache + {:.0} ns",
                cell.title(),
                cell.tokens,
                cost.bare,
                cost.plan,
                cost.cached
            )?;
        }
        Ok(text)
    }
}
