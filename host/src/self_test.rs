//! A test of the kernels on the GPU that will run them. An engine calls it once, after loading the library.

mod buffer;
mod cases;
mod compare;
mod deferred;
mod launch;
mod tensors;
#[cfg(test)]
mod tests;
mod truth;
mod values;

use crate::Entry;
use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::library::Library;
use crate::on_threads::on_threads;
use crate::stream::StreamRef;
use buffer::Buffer;
use cases::{Case, ROWS, SLOTS};
use gated_delta_reference::tolerance::{Tolerance, norm, within};
use tensors::{Inputs, Outputs};
use truth::Truth;
use values::Values;

/// Lower bound of the log decay, for KDA gates of that kind.
const LOWER_BOUND: f32 = -5.0;

/// Report of a self-test that passed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SelfTest {
    /// All launched entries, in the order of their launches.
    pub entries: Vec<Entry>,
    /// Number of launches.
    pub launches: usize,
    /// Largest error, as a fraction of the allowed error: below 1.
    pub worst: f64,
    /// The entry with the largest error.
    pub worst_entry: Option<Entry>,
}

impl Library {
    /// Launches every entry of the operators with tiny inputs on this device. Compares all results with the CPU reference:
    /// outputs, written states, and states that must not change.
    ///
    /// The launches cover every operator, state dtype and layout with one token and with several, snapshots, token slots, a
    /// resume and a commit, every formulation, convolutions, norms, fresh rows, and deferred write-back. Entries with clusters of
    /// blocks, and prefills, are left out on a GPU that cannot run them. The kernels are compiled for the test, on all cores, and
    /// unloaded afterwards. The test takes seconds on a GPU, and a few MiB of its memory. The launches use streams of their own.
    /// The caller waits for them, so no stream of this thread may be under capture.
    ///
    /// ```no_run
    /// use gated_delta::Library;
    /// use gated_delta::driver::{Context, Device};
    ///
    /// let library = Library::new(&Context::primary(Device::get(0)?)?);
    /// let report = library.self_test()?;
    /// println!("{} kernels are right, to {:.0} % of what is allowed", report.entries.len(), 100.0 * report.worst);
    /// # Ok::<(), gated_delta::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::SelfTest`] for the first wrong result, with the entry and the deviation; compile and launch failures.
    pub fn self_test(&self) -> Result<SelfTest, Error> {
        run(self, &cases::cases(), Truth::new)
    }
}

/// The reference: computes the results of a launch with these values. The last argument is the pool after the launch.
type Says = fn(&Case, &Values, &[f64]) -> Result<Truth, String>;

fn run(library: &Library, cases: &[Case], truth: Says) -> Result<SelfTest, Error> {
    let scratch = library.scratch();
    let of_cases = cases.iter().map(Job::Case);
    let waiting = deferred::entries().flat_map(|entry| {
        let operators = entry.computes().into_iter();
        let operators = operators.flat_map(|computes| computes.all_operators());
        operators.flat_map(move |per_channel| {
            let tokens = deferred::tokens(entry).iter();
            tokens.map(move |&tokens| Job::Waiting((entry, per_channel, tokens)))
        })
    });
    let mut jobs = Vec::new();
    for job in of_cases.chain(waiting) {
        match library.check_runs(job.entry()) {
            Err(Error::Unsupported { .. }) => {}
            checked => {
                checked?;
                jobs.push(job);
            }
        }
    }
    let mut report = SelfTest {
        entries: Vec::new(),
        launches: 0,
        worst: 0.0,
        worst_entry: None,
    };
    // Compilation takes most of the time, and runs on the thread that launches. The jobs are therefore spread over threads.
    let errors = on_threads(&jobs, |job| job.error(&scratch, truth))?;
    for (job, error) in jobs.iter().zip(errors) {
        match *job {
            Job::Case(case) => report.passed(case.entry, case.entries(), error),
            Job::Waiting((entry, ..)) => report.passed(entry, [entry], error),
        }
    }
    Ok(report)
}

/// A launch.
#[derive(Clone, Copy)]
enum Job<'a> {
    Case(&'a Case),
    /// Deferred write-back: the entry, whether the operator is KDA, and the number of tokens.
    Waiting((Entry, bool, usize)),
}

impl Job<'_> {
    fn entry(self) -> Entry {
        match self {
            Self::Case(case) => case.entry,
            Self::Waiting((entry, ..)) => entry,
        }
    }

    /// Largest error of the launch, as a fraction of the allowed error.
    fn error(self, library: &Library, truth: Says) -> Result<f64, Error> {
        let context = library.context();
        let stream = context.map(Stream::new).transpose()?;
        let stream = stream.as_ref();
        match self {
            Self::Case(case) => {
                let results = launch(library, context, stream, case, truth)?;
                results.check().map_err(|reason| failure(case, reason))
            }
            Self::Waiting(what) => deferred::check(library, context, stream, what),
        }
    }
}

impl SelfTest {
    /// Adds a launch that passed. `entry` is the tested entry, `entries` are all entries of the launch in order, `error` is a
    /// fraction of the allowed error.
    fn passed(&mut self, entry: Entry, entries: impl IntoIterator<Item = Entry>, error: f64) {
        self.launches += 1;
        for entry in entries {
            if !self.entries.contains(&entry) {
                self.entries.push(entry);
            }
        }
        if self.worst_entry.is_none() || error > self.worst {
            (self.worst, self.worst_entry) = (error, Some(entry));
        }
    }
}

fn failure(case: &Case, reason: String) -> Error {
    Error::SelfTest {
        entry: case.entry.name(),
        case: case.way.name,
        reason,
    }
}

/// Launches `case` and waits for it.
fn launch<'a>(
    library: &Library,
    context: Option<&Context>,
    stream: Option<&Stream>,
    case: &'a Case,
    truth: Says,
) -> Result<Results<'a>, Error> {
    let values = Values::of(case);
    let inputs = Inputs::new(context, case, &values)?;
    let mut outputs = Outputs::new(context, case, &values)?;
    let pool = outputs.pool.bytes().to_vec();
    let queue = stream.map_or(StreamRef::default_stream(), Stream::as_ref);
    // SAFETY: the tensors live until the launch is done, below, and nothing else uses them.
    let enqueued = unsafe { launch::enqueue(library, queue, case, &inputs, &mut outputs) };
    let done = stream.map_or(Ok(()), Stream::synchronize);
    enqueued.and(done)?;
    outputs.all_mut().try_for_each(Buffer::fetch)?;

    let truth = truth(case, &values, &outputs.pool.values());
    Ok(Results {
        case,
        truth: truth.map_err(|reason| failure(case, reason))?,
        outputs,
        pool,
    })
}

/// Results of a launch, and the exact results.
struct Results<'a> {
    case: &'a Case,
    truth: Truth,
    outputs: Outputs,
    /// Bytes of the pool before the launch.
    pool: Vec<u8>,
}

impl Results<'_> {
    /// Largest error, as a fraction of the allowed error. A message if an error is larger than allowed.
    fn check(&self) -> Result<f64, String> {
        self.windows()?;
        let errors = [self.outputs()?, self.pool()?, self.snapshots()?];
        Ok(errors.into_iter().fold(0.0, f64::max))
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance::from(launch::formulation(self.case)).on(self.case.kind.state.into())
    }

    fn outputs(&self) -> Result<f64, String> {
        let (got, (_, hv)) = (self.outputs.o.values(), self.case.heads());
        let of_row = self.case.way.tokens * hv;
        let mut worst = 0.0f64;
        for (i, (&allowed, got)) in self
            .truth
            .allowed
            .iter()
            .zip(got.chunks(self.case.value_dim()))
            .enumerate()
        {
            let (b, t, head) = (i / of_row, i % of_row / hv, i % hv);
            let allowed = if self.case.is_active(b) { allowed } else { 0.0 };
            let exact = &self.truth.o[i * self.case.value_dim()..][..self.case.value_dim()];
            let error = within(got, exact, self.outputs.o.dtype().into(), allowed);
            worst = worst.max(
                error
                    .map_err(|off| format!("o of row {b}, token {t}, value head {head}: {off}"))?,
            );
        }
        Ok(worst)
    }

    /// Checks every slot of the pool: written states are within their bounds, all others are unchanged.
    fn pool(&self) -> Result<f64, String> {
        let mut written = [None; SLOTS];
        for b in 0..ROWS {
            if let Some(slot) = self.case.end(b) {
                written[slot] = Some(match self.case.way.previous {
                    0 => self.after(b, self.case.way.tokens - 1),
                    _ => self.state(&self.truth.committed, b),
                });
            }
            if let (true, Some(slots)) = (self.case.is_active(b), self.case.token_slots()) {
                for (t, slot) in slots[b].into_iter().enumerate() {
                    if let Ok(slot) = usize::try_from(slot) {
                        written[slot] = Some(self.after(b, t));
                    }
                }
            }
        }
        let (bytes, values) = (self.outputs.pool.bytes(), self.outputs.pool.values());
        let slot_bytes = bytes.len() / SLOTS;
        let mut worst = 0.0f64;
        for (slot, exact) in written.into_iter().enumerate() {
            let what = format!("state in slot {slot}");
            match exact {
                Some(exact) => {
                    worst =
                        worst.max(self.compare_state(&what, self.state(&values, slot), exact)?)
                }
                None if bytes[slot * slot_bytes..][..slot_bytes]
                    == self.pool[slot * slot_bytes..][..slot_bytes] => {}
                None => return Err(format!("{what} is nobody's to write, and changed")),
            }
        }
        Ok(worst)
    }

    /// Checks every snapshot: those of active rows are within their bounds, all others are still NaN.
    fn snapshots(&self) -> Result<f64, String> {
        let Some(snapshots) = &self.outputs.snapshots else {
            return Ok(0.0);
        };
        let (values, steps) = (snapshots.values(), self.case.way.tokens + 1);
        let mut worst = 0.0f64;
        for i in 0..ROWS * steps {
            let (b, t) = (i / steps, i % steps);
            let (what, got) = (
                format!("snapshot of row {b} after token {t}"),
                self.state(&values, i),
            );
            if self.case.is_active(b) && t < self.case.way.tokens {
                worst = worst.max(self.compare_state(&what, got, self.after(b, t))?);
            } else if !got.iter().all(|x| x.is_nan()) {
                return Err(format!("{what} is nobody's to write, and changed"));
            }
        }
        Ok(worst)
    }

    /// Checks every window: written windows are copies of inputs, all others are unchanged.
    fn windows(&self) -> Result<(), String> {
        let (outputs, truth) = (&self.outputs, &self.truth);
        copies("window in slot", SLOTS, &outputs.windows, &truth.windows)?;
        let (got, exact) = (&outputs.window_snapshots, &truth.window_snapshots);
        copies("snapshots of windows of row", ROWS, got, exact)
    }

    fn compare_state(&self, what: &str, got: &[f64], exact: &[f64]) -> Result<f64, String> {
        let head = self.case.key_dim() * self.case.value_dim();
        let mut worst = 0.0f64;
        for (hv, (got, exact)) in got.chunks(head).zip(exact.chunks(head)).enumerate() {
            let allowed = self.tolerance().state * norm(exact);
            let error = within(got, exact, self.case.kind.state.into(), allowed);
            worst = worst.max(error.map_err(|off| format!("{what}, value head {hv}: {off}"))?);
        }
        Ok(worst)
    }

    /// Exact state of row `b` after token `t`.
    fn after(&self, b: usize, t: usize) -> &[f64] {
        self.state(&self.truth.states, b * self.case.way.tokens + t)
    }

    /// State number `index` of `states`.
    fn state<'s>(&self, states: &'s [f64], index: usize) -> &'s [f64] {
        let len = self.case.state();
        &states[index * len..][..len]
    }
}

/// Checks that all of `count` parts have the wanted bits.
fn copies(
    what: &str,
    count: usize,
    got: &Option<Buffer>,
    exact: &Option<Vec<f64>>,
) -> Result<(), String> {
    let (Some(got), Some(exact)) = (got, exact) else {
        return Ok(());
    };
    let (got, len) = (got.values(), exact.len() / count);
    let differ = |i: &usize| got[*i].to_bits() != exact[*i].to_bits();
    let is_nan = |i: &usize| got[*i].is_nan() && exact[*i].is_nan();
    match (0..exact.len()).find(|i| differ(i) && !is_nan(i)) {
        Some(i) => Err(format!(
            "{what} {}: element {}: wanted {}, got {}",
            i / len,
            i % len,
            exact[i],
            got[i]
        )),
        None => Ok(()),
    }
}
