//! The bench, from its options to its output: `cargo bench`, and `bench` of the command.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail, ensure};
use clap::Parser as _;
use gated_delta::driver::{Context, Device};
use gated_delta::{Entry, Library};
use gated_delta_harness::device::Properties;
use gated_delta_harness::timing::{Timer, copy_ceiling, empty_kernel};
use humantime::format_rfc3339_seconds;

use crate::best::{BEST, Records, Rows};
use crate::buffers::Buffers;
use crate::cell::Cell;
use crate::check::{Truth, truth};
use crate::deferred;
use crate::figures::draw_all;
use crate::host_cost::host_costs;
use crate::host_parts::host_parts;
use crate::inputs::Inputs;
use crate::options::Options;
use crate::peers::Peers;
use crate::prefill::{self, HEADS};
use crate::prewarm;
use crate::record::{self, Row, Run, lines, read};
use crate::report::{Before, tables};
use crate::sweep::{Clock, Kind, Part, Sweep, progress};
use crate::timed::{Timed, regret};
use crate::tune::advice;
use crate::untimed::{self, Wanted};

/// Suffixes of the names of files that a run may write.
const SUFFIXES: [&str; 6] = [
    "",
    "-prefill",
    "-deferred",
    "-untimed",
    "-untimed-prefill",
    "-untimed-deferred",
];

/// Output of a run.
#[derive(Default)]
pub struct Outcome {
    /// Tables, the count of cells against the peers, host times of launches, and failures.
    pub text: String,
    /// Timed rows, including those that were kept or read.
    pub rows: Vec<Row>,
    /// Messages of rows that failed. An error that ended the run early comes last.
    pub failures: Vec<String>,
}

/// Measures the cells that `options` ask for, or shows the files that they name. Without a GPU, measures the host's work for one row.
/// `again` are the arguments that make this program run the bench in another process.
///
/// # Errors
/// Options that select nothing, a file that cannot be read or written, a GPU that fails before its first row.
pub fn run(options: &Options, again: &[&str]) -> Result<Outcome> {
    if options.report {
        return report(options, again);
    }
    let before = match &options.compare {
        Some(path) if !options.compares_best() => Some(before(path)?),
        _ => None,
    };
    if !options.from.is_empty() {
        return from_files(options, before.as_ref());
    }
    let (cells, cases) = match (options.deferred, options.untimed || options.prefill) {
        (true, _) => (Vec::new(), options.deferred_cases()?),
        (false, true) => (Vec::new(), Vec::new()),
        (false, false) => (options.cells()?, Vec::new()),
    };
    let prefills = match options.prefill {
        true => options.prefill_cases()?,
        false => Vec::new(),
    };
    let device = match Device::get(0) {
        Ok(device) => device,
        // A gate fails if it cannot measure.
        Err(error) if options.compares_best() => bail!("--compare {BEST}: {error}"),
        Err(error) if cells.is_empty() || options.host => {
            return Ok(Outcome {
                text: format!("{error}: no launch is timed\n"),
                ..Outcome::default()
            });
        }
        Err(error) => {
            let progress = progress(cells.len());
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
    let clock = Clock::new(options.budget.map(Duration::from_secs));
    let context = Context::primary(device)?;
    let library = library_on(&context, options)?;
    if options.prewarm_once {
        return Ok(Outcome {
            text: format!("{}\n", prewarm::millis(&library)?),
            ..Outcome::default()
        });
    }
    let timer = Timer::new(&library, &context)?;
    if options.host {
        return Ok(Outcome {
            text: host_costs(&library, &timer.stream)?,
            ..Outcome::default()
        });
    }
    let (copy, empty) = (copy_ceiling(&context)?, empty_kernel(&timer, &context)?);
    let name = match options.machine {
        Some((major, minor)) => format!("{} as sm_{major}{minor}", device.name()?),
        None => device.name()?,
    };
    let run = Run::now(name, copy, empty);
    let records = match options.compares_best() || options.untimed {
        true => {
            // A run is not compared with its own file.
            let own = SUFFIXES.map(|suffix| record_file(options, &run.gpu, suffix));
            let own: Vec<PathBuf> = own.into_iter().flatten().collect();
            let folder = options.records();
            Some(Records::read(&folder, &run.gpu, &options.since, &own)?)
        }
        false => None,
    };
    let machine = Machine {
        library: &library,
        context: &context,
        timer: &timer,
        run: &run,
    };
    let gate = records.as_ref().filter(|_| options.compares_best());
    let mut outcome = Outcome::default();
    if options.untimed {
        let timed = records
            .iter()
            .flat_map(|records| records.timed().iter().cloned());
        untimed(options, machine, timed.collect(), &clock, &mut outcome)?;
    } else if options.deferred {
        let kind = Deferreds {
            machine,
            every_entry: options.tune,
        };
        let mut sweep = Sweep::new(
            kind,
            record_file(options, &run.gpu, "-deferred"),
            options.append,
        )?;
        sweep.measure(&cases, &clock, gate.is_some());
        let judged = judged(&mut sweep, gate, &clock);
        writeln!(outcome.text, "{}", deferred::table(&sweep.rows, run.copy))?;
        outcome.text += &words(&sweep, options.tune, &judged);
        outcome.failures = sweep.failures;
    } else if options.prefill {
        let kind = Prefills::new(machine, options);
        let mut sweep = Sweep::new(
            kind,
            record_file(options, &run.gpu, "-prefill"),
            options.append,
        )?;
        sweep.measure(&prefills, &clock, gate.is_some());
        ensure!(
            !sweep.rows.is_empty() || !sweep.failures.is_empty() || sweep.left > 0,
            "no case has such an entry"
        );
        let judged = judged(&mut sweep, gate, &clock);
        writeln!(outcome.text, "{}", prefill::table(&sweep.rows, HEADS))?;
        let many = options.tune || !options.entry.is_empty();
        outcome.text += &words(&sweep, many, &judged);
        outcome.failures = sweep.failures;
    } else {
        let kind = Steps::new(machine, options.tune);
        let mut sweep = Sweep::new(kind, record_file(options, &run.gpu, ""), options.append)?;
        sweep.measure(&cells, &clock, gate.is_some());
        let judged = judged(&mut sweep, gate, &clock);
        let shown = show(&mut outcome.text, &sweep.rows, options, before.as_ref());
        outcome.text += &words(&sweep, options.tune, &judged);
        outcome.failures = sweep.failures;
        let failed = shown.err().map(|error| format!("{error:#}"));
        outcome.failures.extend(failed);
        outcome.rows = sweep.rows;
    }
    writeln!(
        outcome.text,
        "{}: copy {copy:.0} GB/s (2 GiB, bytes read + written), empty kernel {empty:.2} µs; {:.0} s",
        run.gpu,
        clock.elapsed().as_secs_f64()
    )?;
    let costs = || -> Result<String> {
        let mut text = String::new();
        // The bare launches next to them are those of the GPU itself.
        if !clock.is_over() && options.machine.is_none() {
            text = host_costs(&library, &timer.stream)?;
        }
        if options.prewarm {
            text += &prewarm::table(again)?;
        }
        Ok(text)
    };
    match costs() {
        Ok(text) => outcome.text += &text,
        Err(error) => outcome.failures.push(format!("{error:#}")),
    }
    for failure in &outcome.failures {
        writeln!(outcome.text, "FAILED: {failure}")?;
    }
    Ok(outcome)
}

/// Prefills in a report.
const REPORTED: &str = "1x64,1x1024,1x4096,8x1024,KDA 1x1024";

/// Time budget of a report's steps, in seconds.
const REPORT_SECONDS: &str = "60";

/// Runs the self-test of every kernel, then some of the cells.
fn report(options: &Options, again: &[&str]) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    match Device::get(0) {
        Ok(device) => {
            writeln!(outcome.text, "{}", about(device)?)?;
            let tested = library_on(&Context::primary(device)?, options)?.self_test();
            match tested {
                Ok(tested) => writeln!(
                    outcome.text,
                    "self-test: {} launches of {} kernels are right\n",
                    tested.launches,
                    tested.entries.len()
                )?,
                Err(error) => outcome.failures.push(error.to_string()),
            }
        }
        Err(error) => writeln!(outcome.text, "{error}: nothing is tested")?,
    }
    let parts: [&[&str]; 2] = [
        &["--step", "--budget", REPORT_SECONDS],
        &["--prefill", "--rows", REPORTED],
    ];
    for part in parts {
        let mut of_part = Options::try_parse_from(["bench"].iter().chain(part))?;
        of_part.machine = options.machine;
        let part = run(&of_part, again)?;
        outcome.text += &part.text;
        outcome.rows.extend(part.rows);
        outcome.failures.extend(part.failures);
    }
    Ok(outcome)
}

/// The properties of a GPU that its kernels are chosen by, and its driver.
fn about(device: Device) -> Result<String, gated_delta::Error> {
    let of = Properties::of(device)?;
    let (major, minor) = of.compute_capability;
    Ok(format!(
        "{}, sm_{major}{minor}: {} multiprocessors, {} KiB of shared memory for a block, {} MiB of L2; driver CUDA {}",
        of.name,
        of.multiprocessors,
        of.shared_bytes >> 10,
        of.l2_bytes >> 20,
        of.driver
    ))
}

/// The library for the GPU of `context`, with the kernels of the compute capability in the options, if there is one.
fn library_on(context: &Context, options: &Options) -> Result<Library, gated_delta::Error> {
    match options.machine {
        Some(capability) => Library::for_capability(context, capability),
        None => Ok(Library::experimental(context)),
    }
}

/// Shows the rows of files. If the options ask for it, compares them with all other files of their GPU.
fn from_files(options: &Options, before: Option<&Before>) -> Result<Outcome> {
    let (mut steps, mut prefills, mut deferreds) = (Vec::new(), Vec::new(), Vec::new());
    for path in &options.from {
        match Rows::read(path)? {
            Some(Rows::Steps(rows)) => steps.extend(rows),
            Some(Rows::Prefills(rows)) => prefills.extend(beside_peers(rows, path)?),
            Some(Rows::Deferred(rows)) => deferreds.extend(rows),
            None => bail!("{}: these are times of peers", path.display()),
        }
    }
    let mut outcome = Outcome::default();
    if !steps.is_empty() {
        show(&mut outcome.text, &steps, options, before)?;
    }
    if !prefills.is_empty() {
        writeln!(outcome.text, "{}", prefill::table(&prefills, HEADS))?;
    }
    if !deferreds.is_empty() {
        writeln!(outcome.text, "{}", deferred::table(&deferreds, f64::NAN))?;
    }
    from_rows(options, &mut steps, &mut outcome)?;
    from_rows(options, &mut prefills, &mut outcome)?;
    from_rows(options, &mut deferreds, &mut outcome)?;
    outcome.rows = steps;
    Ok(outcome)
}

/// Adds today's peers to the rows of a file. Older rows lack the GPU's name; the name of the file's folder is used for them.
fn beside_peers(mut rows: Vec<prefill::Row>, path: &Path) -> Result<Vec<prefill::Row>> {
    let peers = prefill::Peers::recorded()?;
    let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
    let card = peers.card(&folder.to_string_lossy()).unwrap_or_default();
    for row in &mut rows {
        if row.gpu.is_empty() {
            card.clone_into(&mut row.gpu);
        }
        if !row.gpu.is_empty() {
            let gpu = row.gpu.clone();
            row.put_beside(&peers, &gpu);
        }
    }
    Ok(rows)
}

fn from_rows<R: Timed>(options: &Options, rows: &mut [R], outcome: &mut Outcome) -> Result<()> {
    if options.tune {
        outcome.text += &regret(rows);
    }
    if !options.compares_best() || rows.is_empty() {
        return Ok(());
    }
    // Rows of older records lack the GPU's name. It is then the name of their folder.
    let of_folder = options
        .from
        .iter()
        .find_map(|path| Some(path.parent()?.file_name()?.to_string_lossy().into_owned()));
    let gpu = rows.iter().map(Timed::gpu).find(|gpu| !gpu.is_empty());
    let gpu = gpu.map(str::to_owned).or(of_folder).unwrap_or_default();
    let records = Records::read(&options.records(), &gpu, &options.since, &options.from)?;
    let verdict = records.judge(rows, 0, |_| Ok(None))?;
    outcome.text += &verdict.text();
    if let Some(failure) = verdict.failure() {
        writeln!(outcome.text, "FAILED: {failure}")?;
        outcome.failures.push(failure);
    }
    Ok(())
}

/// Adds tables, the advice on what to select, the figures' files, and the count against the peers.
fn show(text: &mut String, rows: &[Row], options: &Options, before: Option<&Before>) -> Result<()> {
    let peers = Peers::recorded()?;
    writeln!(text, "{}", tables(rows, &peers, before))?;
    if options.tune {
        writeln!(
            text,
            "host/src/step/select/tiles.txt by these rows:\n{}",
            advice(rows)
        )?;
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

/// Judges the rows of a sweep, and returns the report. An error becomes a failure of the sweep.
fn judged<K: Kind>(sweep: &mut Sweep<K>, gate: Option<&Records>, clock: &Clock) -> String {
    let Some(records) = gate else {
        return String::new();
    };
    match sweep.judge(records, clock) {
        Ok(text) => text,
        Err(error) => {
            sweep.failures.push(format!("{error:#}"));
            String::new()
        }
    }
}

/// Text below a table.
fn words<K: Kind>(sweep: &Sweep<K>, every_variant: bool, judged: &str) -> String {
    let regret = match every_variant {
        true => regret(&sweep.rows),
        false => String::new(),
    };
    format!("{regret}{judged}{}", sweep.notes())
}

/// Measures cells for the kernels that `timed` does not contain, in two rounds: first one for each kernel, then more.
fn untimed(
    options: &Options,
    machine: Machine<'_>,
    mut timed: BTreeSet<String>,
    clock: &Clock,
    outcome: &mut Outcome,
) -> Result<()> {
    let file = |suffix| record_file(options, &machine.run.gpu, suffix);
    let kind = Steps::new(machine, true);
    let mut steps = Sweep::new(kind, file("-untimed"), options.append)?;
    let kind = Deferreds {
        machine,
        every_entry: true,
    };
    let mut deferreds = Sweep::new(kind, file("-untimed-deferred"), options.append)?;
    let mut kind = Prefills::new(machine, options);
    kind.bench.every_entry = true;
    let mut prefills = Sweep::new(kind, file("-untimed-prefill"), options.append)?;
    let missing: Vec<Entry> = untimed::missing(&timed).collect();
    eprintln!("{} kernels have no row", missing.len());
    for round in 0..2 {
        let wanted = Wanted::of(&missing, round);
        steps.measure(&wanted.cells, clock, false);
        deferreds.measure(&wanted.deferred, clock, false);
        prefills.measure(&wanted.prefills, clock, false);
    }
    show(&mut outcome.text, &steps.rows, options, None)?;
    if !deferreds.rows.is_empty() {
        let table = deferred::table(&deferreds.rows, machine.run.copy);
        writeln!(outcome.text, "{table}")?;
    }
    if !prefills.rows.is_empty() {
        let table = prefill::table(&prefills.rows, HEADS);
        writeln!(outcome.text, "{table}")?;
    }
    outcome.text += &words(&steps, true, "");
    outcome.text += &words(&deferreds, true, "");
    outcome.text += &words(&prefills, true, "");
    timed.extend(steps.variants());
    timed.extend(deferreds.variants());
    timed.extend(prefills.variants());
    outcome.failures.extend(steps.failures);
    outcome.failures.extend(deferreds.failures);
    outcome.failures.extend(prefills.failures);
    let still: Vec<&str> = untimed::missing(&timed).map(Entry::name).collect();
    match still.len() {
        0 => outcome.text += "every kernel has a row\n",
        count => {
            let names = still.join(", ");
            let failure = format!("{count} kernels have no row: {names}");
            outcome.failures.push(failure);
        }
    }
    outcome.rows = steps.rows;
    Ok(())
}

/// File for the rows of a table: by default `record/h200/2026-01-31.csv`. `suffix` tells the tables of a run apart.
fn record_file(options: &Options, gpu: &str, suffix: &str) -> Option<PathBuf> {
    let path = options.save.as_ref()?;
    if let Some(path) = path {
        // In a run with several tables, each but the first has a file of its own next to the named one.
        let beside = suffix
            .strip_prefix("-untimed")
            .filter(|rest| !rest.is_empty());
        let Some(rest) = beside else {
            return Some(path.clone());
        };
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        return Some(path.with_file_name(format!("{stem}{rest}.csv")));
    }
    let now = format_rfc3339_seconds(SystemTime::now()).to_string();
    let date = now.split('T').next().unwrap_or(&now);
    let folder = options.saves_to().join(record::folder(gpu));
    Some(folder.join(format!("{date}{suffix}.csv")))
}

/// Library, context and timer of a run.
#[derive(Clone, Copy)]
struct Machine<'a> {
    library: &'a Library,
    context: &'a Context,
    timer: &'a Timer,
    run: &'a Run,
}

/// The table of steps. Each cell is a case.
struct Steps<'a> {
    machine: Machine<'a>,
    every_variant: bool,
    /// Times of the floor in µs, by cold or warm cache and bytes of a set's states.
    floors: HashMap<(bool, usize), f64>,
}

impl<'a> Steps<'a> {
    fn new(machine: Machine<'a>, every_variant: bool) -> Self {
        Self {
            machine,
            every_variant,
            floors: HashMap::new(),
        }
    }

    fn floor(&mut self, buffers: &Buffers, launches: usize) -> Result<f64> {
        let key = (buffers.cell().cold, buffers.cell().pool_bytes());
        if let Some(&floor) = self.floors.get(&key) {
            return Ok(floor);
        }
        let Machine { library, timer, .. } = self.machine;
        let stream = timer.stream.as_ref();
        // SAFETY: the buffers outlive the timing, which waits for all launches.
        let micros = timer.graph(launches, |i| unsafe {
            library.state_floor(stream, buffers.words(i)?, 1.0)
        })?;
        self.floors.insert(key, micros.median);
        Ok(micros.median)
    }
}

impl Kind for Steps<'_> {
    type Case = Cell;
    type Prepared = (Inputs, Truth);
    type Row = Row;

    fn title(cell: &Cell) -> String {
        format!("{} T={} B={}", cell.title(), cell.tokens, cell.batch)
    }

    fn batch(cell: &Cell) -> Option<usize> {
        Some(cell.batch)
    }

    fn is_of(row: &Row, cell: &Cell) -> bool {
        row.cell == *cell
    }

    fn read(path: &Path) -> Result<Vec<Row>> {
        read(path)
    }

    fn prepare(cell: &Cell) -> Result<(Inputs, Truth)> {
        let inputs = Inputs::of(cell);
        let truth = truth(cell, &inputs)?;
        Ok((inputs, truth))
    }

    fn measure(&mut self, cell: &Cell, (inputs, truth): (Inputs, Truth)) -> Result<Part<Row>> {
        let mut part = Part::default();
        let title = Self::title(cell);
        let Machine {
            library,
            context,
            timer,
            run,
        } = self.machine;
        let mut buffers = Buffers::with(library, *cell, inputs)?;
        let work = buffers.work(0)?;
        let selected = match library.selected(&*work) {
            Ok(selected) => selected,
            Err(refusal) => {
                part.skipped.push(format!("{title}: {refusal}"));
                return Ok(part);
            }
        };
        let bytes = work.bytes()?;
        let variants = match self.every_variant {
            true => library.variants(&*work)?,
            false => vec![selected],
        };
        drop(work);
        let launches = buffers
            .sets()
            .max(40.min((20_000_000_000 / bytes.max(1)) as usize).max(4))
            .next_multiple_of(buffers.sets());
        let floor = match cell.mode.in_place() {
            true => Some(self.floor(&buffers, launches)?),
            false => None,
        };
        for variant in variants {
            let stream = timer.stream.as_ref();
            let error = match buffers.check(library, stream, variant, &truth) {
                Ok(error) => error,
                Err(error) => {
                    part.failures.push(format!("{title}: {error:#}"));
                    continue;
                }
            };
            // SAFETY: the buffers outlive the timing, which waits for all launches.
            let micros = timer.graph(launches, |i| unsafe {
                library.launch_with(stream, &*buffers.work(i)?, variant)
            })?;
            part.rows.push(Row {
                cell: *cell,
                variant: variant.name().to_owned(),
                selected: variant == selected,
                micros,
                floor,
                bytes,
                error,
                run: run.clone(),
            });
        }
        context.synchronize()?;
        Ok(part)
    }
}

/// The table of prefills.
struct Prefills<'a> {
    bench: prefill::Bench<'a>,
    known: prefill::Known,
}

impl<'a> Prefills<'a> {
    fn new(machine: Machine<'a>, options: &'a Options) -> Self {
        Self {
            bench: prefill::Bench {
                library: machine.library,
                timer: Some((machine.timer, machine.run)),
                heads: HEADS,
                every_entry: options.tune,
                entries: &options.entry,
            },
            known: prefill::Known::default(),
        }
    }
}

impl Kind for Prefills<'_> {
    type Case = prefill::Case;
    type Prepared = ();
    type Row = prefill::Row;

    fn title(case: &prefill::Case) -> String {
        case.title()
    }

    fn batch(_: &prefill::Case) -> Option<usize> {
        None
    }

    fn is_of(row: &prefill::Row, case: &prefill::Case) -> bool {
        row.case == case.title() && row.state == case.state.to_string()
    }

    fn read(path: &Path) -> Result<Vec<prefill::Row>> {
        lines(path)
    }

    fn prepare(_: &prefill::Case) -> Result<()> {
        Ok(())
    }

    fn measure(&mut self, case: &prefill::Case, (): ()) -> Result<Part<prefill::Row>> {
        let measured = self.bench.measure(case, &mut self.known)?;
        Ok(Part {
            rows: measured.rows,
            failures: measured.failures,
            skipped: Vec::new(),
        })
    }
}

/// The table of steps with deferred write-back.
struct Deferreds<'a> {
    machine: Machine<'a>,
    every_entry: bool,
}

impl Kind for Deferreds<'_> {
    type Case = deferred::Case;
    type Prepared = ();
    type Row = deferred::Row;

    fn title(case: &deferred::Case) -> String {
        format!("{case:?}")
    }

    fn batch(case: &deferred::Case) -> Option<usize> {
        Some(case.batch)
    }

    fn is_of(row: &deferred::Row, case: &deferred::Case) -> bool {
        row.is_of(case)
    }

    fn read(path: &Path) -> Result<Vec<deferred::Row>> {
        lines(path)
    }

    fn prepare(_: &deferred::Case) -> Result<()> {
        Ok(())
    }

    fn measure(&mut self, case: &deferred::Case, (): ()) -> Result<Part<deferred::Row>> {
        let Machine {
            library,
            timer,
            run,
            ..
        } = self.machine;
        let rows = deferred::measure(library, Some((timer, run)), case, self.every_entry)?;
        Ok(Part {
            rows,
            ..Part::default()
        })
    }
}
