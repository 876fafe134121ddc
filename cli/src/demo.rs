//! `demo`: a model's layer decodes random tokens, then verifies drafts, each step checked against plain decoding by
//! the reference.

mod session;

use gated_delta::{DType, StateLayout};
use gated_delta_reference::compare::DType as Stored;
use indicatif::{ProgressBar, ProgressStyle};

use crate::backend::Backend;
use crate::error::Error;
use crate::model::{Layer, Model, Pool};
use crate::table::table;
use crate::timing::{Timer, Timing};
use crate::{Report, note};

use session::{Outcome, Session};

/// Steps where the user names none.
const STEPS: usize = 32;
/// The same on the simulator, so that it is a matter of seconds.
const SIMULATED_STEPS: usize = 8;
/// Drafts of each row in a speculative step.
const DRAFTS: usize = 4;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Demo {
    /// The model whose layer it is.
    pub model: Model,
    /// B.
    pub batch: usize,
    /// Tokens of each row that are decoded one by one.
    pub steps: Option<usize>,
    /// Seed of the inputs.
    pub seed: u64,
}

impl Demo {
    /// Runs with f32 and with bf16 states; on a GPU, times both.
    ///
    /// # Errors
    /// [`Error::Input`] for the reference; as [`Backend::run`]'s.
    pub fn run(&self, backend: &Backend) -> Result<Report, Error> {
        if matches!(backend, Backend::Reference) {
            return Err(Error::Input(
                "backend reference: the demo compares with it, wanted auto, cuda or sim".to_owned(),
            ));
        }
        let (model, layer) = self.model.layer();
        let steps = self.steps.unwrap_or_else(|| default_steps(backend));
        let cases = [DType::F32, DType::Bf16];
        let launches = steps + Session::SPECULATIVE_LAUNCHES;
        let bar = ProgressBar::new((cases.len() * launches) as u64);
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} launches, {msg}") {
            bar.set_style(style);
        }
        let timer = match backend {
            Backend::Cuda(cuda) => Some(Timer::new(cuda)?),
            _ => None,
        };
        let mut rows = Vec::new();
        let mut passed = true;
        for dtype in cases {
            bar.set_message(format!("{dtype} state"));
            let pool = Pool {
                slots: self.batch,
                dtype,
                layout: StateLayout::KLast,
            };
            let mut session = Session::new(layer, pool, self.seed, backend, &bar)?;
            for outcome in [session.decode(steps)?, session.speculate(DRAFTS)?] {
                let holds = outcome.o.holds(Stored::Bf16.tolerance())
                    && outcome.state.holds(Stored::from(dtype).tolerance());
                passed &= holds;
                rows.push(self.row(pool, &outcome, holds, timer.as_ref())?);
            }
        }
        bar.finish_and_clear();
        let mut headings = vec![
            "state",
            "layout",
            "batch",
            "steps",
            "variant",
            "error of o",
            "error of state",
        ];
        if timer.is_some() {
            headings.extend(["µs per launch", "GB/s", "% of a copy"]);
        }
        headings.push("result");
        let Layer {
            heads,
            value_heads,
            dim,
            ..
        } = layer;
        let mut text =
            format!("{model}: H = {heads}, HV = {value_heads}, K = V = {dim}, on {backend}\n");
        text += &table(&headings, rows);
        text += "errors: relative L2 against plain decoding by the reference (f64), the worst of all steps\n";
        text += &format!(
            "verify, resume: {DRAFTS} drafts per row are verified and no state is written; a random prefix is accepted; \
             one launch commits it and verifies the next {DRAFTS}\n"
        );
        Ok(Report { text, passed })
    }

    /// A line of the table.
    fn row(
        &self,
        pool: Pool,
        outcome: &Outcome,
        holds: bool,
        timer: Option<&Timer<'_>>,
    ) -> Result<Vec<String>, Error> {
        let mut row = vec![
            pool.dtype.to_string(),
            pool.layout.to_string(),
            self.batch.to_string(),
            outcome.steps.clone(),
            outcome
                .variant
                .map_or("-", |variant| variant.name())
                .to_owned(),
            outcome.o.to_string(),
            outcome.state.to_string(),
        ];
        if let Some(timer) = timer {
            let timing = holds.then(|| timer.time(&outcome.last)).transpose()?;
            row.extend(timing_cells(timer.copy_gb_per_second(), timing));
        }
        row.push(if holds { "ok" } else { "FAILED" }.to_owned());
        Ok(row)
    }
}

fn default_steps(backend: &Backend) -> usize {
    match backend {
        Backend::Simulator { .. } => {
            note(&format!(
                "demo: {SIMULATED_STEPS} steps on the simulator instead of {STEPS} (--steps {STEPS} for all)"
            ));
            SIMULATED_STEPS
        }
        _ => STEPS,
    }
}

/// Time, bandwidth and share of a copy's bandwidth; dashes where there is no time.
fn timing_cells(copy: f64, timing: Option<Timing>) -> [String; 3] {
    match timing {
        None => ["-", "-", "-"].map(str::to_owned),
        Some(Timing {
            micros,
            gb_per_second,
        }) => [
            format!("{micros:.2}"),
            format!("{gb_per_second:.0}"),
            format!("{:.0} %", 100.0 * gb_per_second / copy),
        ],
    }
}
