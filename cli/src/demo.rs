//! `demo`: a model's layer, convolution and norm included, takes a random prompt, decodes, then verifies drafts. Each step is
//! checked against plain decoding by the reference.

mod session;

use gated_delta::{DType, StateLayout};
use gated_delta_reference::tolerance::DType as Stored;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::backend::Backend;
use crate::error::Error;
use crate::model::{Layer, Model, Pool};
use crate::table::table;
use crate::timing::{Timer, Timing};
use crate::{Report, note};

use session::{Outcome, Session};

/// Default number of sequences.
const BATCH: usize = 8;
/// Default number of sequences on the simulator. The simulator's defaults, here and below, take some seconds in all.
const SIMULATED_BATCH: usize = 4;
/// Default number of decoded tokens of each sequence.
const STEPS: usize = 32;
/// Default number of decoded tokens of each sequence on the simulator.
const SIMULATED_STEPS: usize = 4;
/// Default number of tokens of each sequence's prompt.
const PROMPT: usize = 2048;
/// Default number of tokens of the prompt on the simulator, which prompts one sequence: two chunks.
const SIMULATED_PROMPT: usize = 100;
/// Drafts of each sequence in a speculative step.
const DRAFTS: usize = 4;

/// Arguments of the demo.
#[derive(Clone, Copy, Debug)]
pub struct Demo {
    /// Model that the layer is from.
    pub model: Model,
    /// Sequences, B.
    pub batch: Option<usize>,
    /// Tokens of each sequence's prompt, 0 for none. On the simulator only the first sequence has one.
    pub prompt: Option<usize>,
    /// Tokens of each sequence that are decoded one by one.
    pub steps: Option<usize>,
    /// Seed of the inputs.
    pub seed: u64,
}

impl Demo {
    /// Runs the demo with f32 and with bf16 states. On a GPU, times both.
    ///
    /// # Errors
    /// [`Error::Input`] for the reference as the backend; the errors of [`Backend::run`].
    pub fn run(&self, backend: &Backend) -> Result<Report, Error> {
        if matches!(backend, Backend::Reference) {
            return Err(Error::Input(
                "backend reference: the demo compares with it, wanted auto, cuda or sim".to_owned(),
            ));
        }
        let (model, layer) = self.model.layer();
        let (batch, steps) = self.size(backend);
        let cases = [DType::F32, DType::Bf16];
        let prompt = self.prompt(batch, backend);
        let launches = usize::from(prompt.is_some()) + steps + Session::SPECULATIVE_LAUNCHES;
        let bar = ProgressBar::new((cases.len() * launches) as u64);
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} launches, {msg}") {
            bar.set_style(style);
        }
        let timer = match backend {
            Backend::Cuda(cuda) => Some(Timer::new(cuda)?),
            _ => None,
        };
        let (mut rows, mut outcomes) = (Vec::new(), Vec::new());
        let mut passed = true;
        for dtype in cases {
            bar.set_message(format!("{dtype} state"));
            let pool = Pool {
                slots: batch,
                dtype,
                layout: StateLayout::KLast,
            };
            let mut session = Session::new(layer, pool, self.seed, backend, &bar)?;
            let mut outcomes_of = Vec::new();
            if let Some([rows, tokens]) = prompt {
                outcomes_of.push(session.prefill(rows, tokens)?);
            }
            outcomes_of.extend([session.decode(steps)?, session.speculate(DRAFTS)?]);
            for outcome in outcomes_of {
                let of_state = match outcome.in_chunks {
                    true => Stored::from(dtype).tolerance_in_chunks(),
                    false => Stored::from(dtype).tolerance(),
                };
                let holds = outcome.o.holds(Stored::Bf16.tolerance())
                    && outcome.state.holds(of_state)
                    && outcome.windows.holds(0.0);
                passed &= holds;
                let timing = match &timer {
                    Some(timer) if holds => Some(timer.time(&outcome.last)?),
                    _ => None,
                };
                let copy = timer.as_ref().map(Timer::copy_gb_per_second);
                rows.push(self.row(pool, &outcome, holds, copy.map(|copy| (copy, timing))));
                outcomes.push(case(pool, &outcome, holds, timing));
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
        text +=
            "each launch: convolution, recurrence and gated norm, windows compared bit for bit\n";
        if let Some([rows, _]) = prompt {
            text += &format!(
                "prompt: {rows} of the rows, in chunks of 64 tokens; decodes go on from its states\n"
            );
        }
        text += &format!(
            "verify, resume: {DRAFTS} drafts per row are verified and no state is written; a random prefix is accepted; \
             one launch commits it and verifies the next {DRAFTS}\n"
        );
        let json = json!({
            "model": model,
            "heads": heads,
            "value_heads": value_heads,
            "dim": dim,
            "batch": batch,
            "backend": backend.to_string(),
            "copy_gb_per_second": timer.as_ref().map(Timer::copy_gb_per_second),
            "cases": outcomes,
            "passed": passed,
        });
        Ok(Report { text, json, passed })
    }

    /// Sequences, and decoded tokens of each.
    fn size(&self, backend: &Backend) -> (usize, usize) {
        let (batch, steps) = match backend {
            Backend::Simulator { .. } => (SIMULATED_BATCH, SIMULATED_STEPS),
            _ => (BATCH, STEPS),
        };
        if batch < BATCH && (self.batch.is_none() || self.steps.is_none()) {
            note(&format!(
                "demo: less on the simulator than on a GPU (--batch {BATCH} --steps {STEPS} for all)"
            ));
        }
        (self.batch.unwrap_or(batch), self.steps.unwrap_or(steps))
    }

    /// Number of sequences with prompts, and tokens of each prompt; `None` if no prompt is wanted.
    fn prompt(&self, batch: usize, backend: &Backend) -> Option<[usize; 2]> {
        if self.prompt == Some(0) {
            return None;
        }
        let (rows, tokens) = match backend {
            Backend::Simulator { .. } => (1, SIMULATED_PROMPT),
            _ => (batch, PROMPT),
        };
        Some([rows, self.prompt.unwrap_or(tokens)])
    }

    /// Makes a line of the table.
    fn row(
        &self,
        pool: Pool,
        outcome: &Outcome,
        holds: bool,
        timing: Option<(f64, Option<Timing>)>,
    ) -> Vec<String> {
        let mut row = vec![
            pool.dtype.to_string(),
            pool.layout.to_string(),
            pool.slots.to_string(),
            outcome.steps.clone(),
            outcome
                .variant
                .map_or("-", |variant| variant.name())
                .to_owned(),
            outcome.o.to_string(),
            outcome.state.to_string(),
        ];
        if let Some((copy, timing)) = timing {
            row.extend(timing_cells(copy, timing));
        }
        row.push(if holds { "ok" } else { "FAILED" }.to_owned());
        row
    }
}

/// As [`Demo::row`], in JSON.
fn case(pool: Pool, outcome: &Outcome, holds: bool, timing: Option<Timing>) -> Value {
    json!({
        "state": pool.dtype.to_string(),
        "state_layout": pool.layout.to_string(),
        "steps": outcome.steps,
        "variant": outcome.variant.map(|variant| variant.name()),
        "error_of_o": outcome.o.error,
        "error_of_state": outcome.state.error,
        "error_of_windows": outcome.windows.error,
        "micros": timing.map(|timing| timing.micros),
        "gb_per_second": timing.map(|timing| timing.gb_per_second),
        "passed": holds,
    })
}

/// Time, bandwidth and bandwidth relative to a copy's; dashes if there is no time.
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
