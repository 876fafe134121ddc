//! A run over the cases of a table. Each row is written when it is measured, a budget may end the run, and a gate judges the rows.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::best::{AGAIN, Records};
use crate::record::{self, Csv};
use crate::timed::Timed;

/// Batch sizes to measure first, in this order, if there is a budget: they are the most important.
const RANKS: [usize; 5] = [64, 256, 1, 16, 4];

/// Start and end of a run.
pub struct Clock {
    start: Instant,
    end: Option<Instant>,
}

impl Clock {
    /// A clock that begins now, and ends after `budget`.
    #[must_use]
    pub fn new(budget: Option<Duration>) -> Self {
        let start = Instant::now();
        Self {
            start,
            end: budget.map(|budget| start + budget),
        }
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether there is no time left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Whether four fifths of the time are over, so that the rest is left to later work.
    fn is_nearly_over(&self) -> bool {
        self.end
            .is_some_and(|end| self.start.elapsed() >= (end - self.start) * 4 / 5)
    }
}

/// Result of a case.
pub struct Part<R> {
    /// Timed rows.
    pub rows: Vec<R>,
    /// Messages about wrong results.
    pub failures: Vec<String>,
    /// Descriptions of launches that this GPU does not have.
    pub skipped: Vec<String>,
}

impl<R> Default for Part<R> {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            failures: Vec::new(),
            skipped: Vec::new(),
        }
    }
}

/// A table of the bench.
pub trait Kind {
    /// A case, which rows are measured of.
    type Case: Clone + Sync;
    /// Data of a case that is prepared without a GPU.
    type Prepared: Send;
    /// A row, of a variant of a case.
    type Row: Timed + Clone + Serialize;

    /// Title of a case.
    fn title(case: &Self::Case) -> String;

    /// Batch size of a case, if cases differ in it.
    fn batch(case: &Self::Case) -> Option<usize>;

    /// Whether a row belongs to a case.
    fn is_of(row: &Self::Row, case: &Self::Case) -> bool;

    /// Reads the rows of a file.
    ///
    /// # Errors
    /// I/O errors, and malformed lines.
    fn read(path: &Path) -> Result<Vec<Self::Row>>;

    /// Prepares a case, concurrently with the measurement of earlier ones.
    ///
    /// # Errors
    /// The errors of the reference.
    fn prepare(case: &Self::Case) -> Result<Self::Prepared>;

    /// Measures a case.
    ///
    /// # Errors
    /// The errors of the driver.
    fn measure(&mut self, case: &Self::Case, prepared: Self::Prepared) -> Result<Part<Self::Row>>;
}

/// Most threads that prepare cases. Each has one case ready and one in work, of up to 200 MB each.
const MOST_THREADS: usize = 6;

/// Prepares cases on some threads. Case i comes from receiver i modulo their number. A thread ends when its receiver is dropped.
fn prepared<'scope, 'env, K: Kind>(
    scope: &'scope Scope<'scope, 'env>,
    cases: &'scope [K::Case],
) -> Vec<Receiver<Result<K::Prepared>>>
where
    K::Prepared: 'scope,
{
    let threads = thread::available_parallelism().map_or(1, |count| count.get() / 2);
    let threads = threads.clamp(1, MOST_THREADS);
    let start = |first: usize| {
        let (sender, receiver) = sync_channel(1);
        scope.spawn(move || {
            let mut cases = cases.iter().skip(first).step_by(threads);
            cases.all(|case| sender.send(K::prepare(case)).is_ok())
        });
        receiver
    };
    (0..threads).map(start).collect()
}

/// A run over the cases of a table.
pub struct Sweep<K: Kind> {
    /// The table, which measures cases.
    pub kind: K,
    /// Kept and measured rows.
    pub rows: Vec<K::Row>,
    /// Messages about errors and wrong results.
    pub failures: Vec<String>,
    /// Descriptions of launches that this GPU does not have.
    pub skipped: Vec<String>,
    /// Number of cases that the budget left out.
    pub left: usize,
    cases: Vec<K::Case>,
    /// Number of rows that were in the file before.
    kept: usize,
    file: Option<(PathBuf, Csv)>,
}

impl<K: Kind> Sweep<K> {
    /// An empty sweep, whose rows go to `file`. With `append`, the rows in the file are kept.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn new(kind: K, file: Option<PathBuf>, append: bool) -> Result<Self> {
        let mut rows = Vec::new();
        let file = match file {
            Some(path) => {
                eprintln!("rows go to {}", path.display());
                let csv = if append && path.exists() {
                    rows = K::read(&path).with_context(|| path.display().to_string())?;
                    eprintln!("{} of them are there", rows.len());
                    Csv::append(&path)?
                } else {
                    Csv::create(&path)?
                };
                Some((path, csv))
            }
            None => None,
        };
        Ok(Self {
            kind,
            kept: rows.len(),
            rows,
            failures: Vec::new(),
            skipped: Vec::new(),
            left: 0,
            cases: Vec::new(),
            file,
        })
    }

    /// Measures the cases that have no row yet; if there is a budget, the most important ones first. An error of the driver ends the
    /// measurement, and becomes a failure.
    pub fn measure(&mut self, cases: &[K::Case], clock: &Clock, is_judged: bool) {
        let lacks = |case: &&K::Case| self.rows.iter().all(|row| !K::is_of(row, case));
        let mut cases: Vec<K::Case> = cases.iter().filter(lacks).cloned().collect();
        if clock.end.is_some() {
            let rank = |batch| RANKS.iter().position(|&it| it == batch);
            cases.sort_by_key(|case| K::batch(case).map(|it| rank(it).unwrap_or(RANKS.len())));
        }
        let progress = progress(cases.len());
        thread::scope(|scope| {
            let receivers = prepared::<K>(scope, &cases);
            for (done, case) in cases.iter().enumerate() {
                if clock.is_over() || (is_judged && clock.is_nearly_over()) {
                    self.left += cases.len() - done;
                    break;
                }
                let title = K::title(case);
                progress.set_message(title.clone());
                let prepared = receivers[done % receivers.len()].recv();
                let prepared = prepared.context("its preparation ended early");
                let one = prepared.and_then(|prepared| self.one(case, prepared?));
                if let Err(error) = one.context(title) {
                    self.failures.push(format!("{error:#}"));
                    break;
                }
                progress.inc(1);
            }
        });
        progress.finish_and_clear();
        self.cases.extend(cases);
    }

    fn one(&mut self, case: &K::Case, prepared: K::Prepared) -> Result<()> {
        let Part {
            rows,
            failures,
            skipped,
        } = self.kind.measure(case, prepared)?;
        self.failures.extend(failures);
        self.skipped.extend(skipped);
        if let Some((_, csv)) = &mut self.file {
            for row in &rows {
                csv.write(row)?;
            }
        }
        self.rows.extend(rows);
        Ok(())
    }

    /// Judges the measured rows by records and returns the report. Slower rows are measured again while there is time. The file then has
    /// the fastest measurement of each row.
    ///
    /// # Errors
    /// The errors of the driver and of [`Records::judge`].
    pub fn judge(&mut self, records: &Records, clock: &Clock) -> Result<String> {
        let Self {
            kind,
            rows,
            cases,
            kept,
            ..
        } = self;
        let again = |row: &K::Row| -> Result<Option<K::Row>> {
            let case = cases.iter().find(|case| K::is_of(row, case));
            let Some(case) = case.filter(|_| !clock.is_over()) else {
                return Ok(None);
            };
            let same =
                |other: &K::Row| (other.work(), other.variant()) == (row.work(), row.variant());
            let part = kind.measure(case, K::prepare(case)?)?;
            Ok(part.rows.into_iter().find(same))
        };
        let verdict = records.judge(&mut rows[*kept..], AGAIN, again)?;
        if let (Some((path, _)), true) = (&self.file, verdict.replaced > 0) {
            record::save(path, &self.rows)?;
        }
        self.failures.extend(verdict.failure());
        Ok(verdict.text())
    }

    /// Lines about skipped cases and cases left out.
    #[must_use]
    pub fn notes(&self) -> String {
        let skipped = self.skipped.iter().map(|it| format!("skipped: {it}\n"));
        let left = (self.left > 0).then(|| {
            format!(
                "{} cells were not measured: the budget was spent\n",
                self.left
            )
        });
        skipped.chain(left).collect()
    }

    /// Names of the kernels in the rows.
    pub fn variants(&self) -> impl Iterator<Item = String> {
        self.rows.iter().map(|row| row.variant().to_owned())
    }
}

/// A progress bar.
pub fn progress(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {eta} {msg}");
    let bar = ProgressBar::new(length as u64);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
