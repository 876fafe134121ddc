//! `demo`: a model's layer decodes random tokens, each step checked against the reference.

use std::iter;

use gated_delta::ops::StateLayout;
use gated_delta::{DType, Entry};
use indicatif::{ProgressBar, ProgressStyle};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::backend::Backend;
use crate::compare::{Comparison, compare, pairs, tolerance};
use crate::error::Error;
use crate::model::{Model, Shape};
use crate::problem::Problem;
use crate::reference;
use crate::table::table;
use crate::tensor::HostTensor;
use crate::timing::{Timer, Timing};
use crate::{Report, note};

/// Steps where the user names none.
const STEPS: usize = 32;
/// The same on the simulator, so that it is a matter of seconds.
const SIMULATED_STEPS: usize = 8;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Demo {
    /// The model whose layer it is.
    pub model: Model,
    /// B.
    pub batch: usize,
    /// Tokens of each row.
    pub steps: Option<usize>,
    /// Seed of the inputs.
    pub seed: u64,
}

/// The worst of a run's comparisons.
#[derive(Default)]
struct Errors {
    o: Comparison,
    state: Comparison,
    variant: Option<Entry>,
}

impl Demo {
    /// Runs with f32 and with bf16 states; on a GPU, times both.
    ///
    /// # Errors
    /// [`Error::Input`] for a model without GDN layers; as [`Backend::run`]'s.
    pub fn run(&self, backend: &Backend) -> Result<Report, Error> {
        if matches!(backend, Backend::Reference) {
            return Err(Error::Input(
                "backend reference: the demo compares with it, wanted auto, cuda or sim".to_owned(),
            ));
        }
        let (model, shape) = self.model.gdn()?;
        let steps = self.steps.unwrap_or_else(|| self.default_steps(backend));
        let cases = [DType::F32, DType::Bf16];
        let bar = ProgressBar::new((cases.len() * steps) as u64);
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} steps, {msg}") {
            bar.set_style(style);
        }
        let timer = match backend {
            Backend::Cuda(cuda) => Some(Timer::new(cuda)?),
            _ => None,
        };
        let mut rows = Vec::new();
        let mut passed = true;
        for state in cases {
            bar.set_message(format!("{state} state"));
            let mut problem = shape.blank(self.batch, self.batch, state, StateLayout::KLast)?;
            let errors = self.decode(backend, &mut problem, steps, &bar)?;
            let holds =
                errors.o.holds(tolerance(DType::Bf16)) && errors.state.holds(tolerance(state));
            passed &= holds;
            let mut row = vec![
                state.to_string(),
                problem.options.state_layout.to_string(),
                self.batch.to_string(),
                steps.to_string(),
                errors.variant.map_or("-", Entry::name).to_owned(),
                errors.o.to_string(),
                errors.state.to_string(),
            ];
            if let Some(timer) = &timer {
                row.extend(timing_cells(
                    timer.copy_gb_per_second(),
                    holds.then(|| timer.time(&problem)).transpose()?,
                ));
            }
            row.push(if holds { "ok" } else { "FAILED" }.to_owned());
            rows.push(row);
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
            headings.extend(["µs per step", "GB/s", "% of a copy"]);
        }
        headings.push("result");
        let Shape {
            heads,
            value_heads,
            dim,
        } = shape;
        let mut text = format!(
            "{model}: GDN decode, H = {heads}, HV = {value_heads}, K = V = {dim}, on {backend}\n"
        );
        text += &table(&headings, rows);
        text += "errors: relative L2 against the reference (f64), the worst of all steps\n";
        Ok(Report { text, passed })
    }

    fn default_steps(&self, backend: &Backend) -> usize {
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

    /// Decodes `steps` random tokens per row from zero states. The reference goes its own way: it starts from its own
    /// states, rounded as they are stored.
    fn decode(
        &self,
        backend: &Backend,
        problem: &mut Problem,
        steps: usize,
        bar: &ProgressBar,
    ) -> Result<Errors, Error> {
        let mut random = StdRng::seed_from_u64(self.seed);
        fill(problem, "state", || 0.0)?;
        fill(problem, "A_log", || random.random_range(0.0..2.7))?;
        fill(problem, "dt_bias", || random.random_range(-6.0..-1.0))?;
        let mut wanted = problem.clone();
        let mut errors = Errors::default();
        for _ in 0..steps {
            for name in ["q", "k", "v", "a", "b"] {
                fill(problem, name, || random.random_range(-2.0..2.0))?;
                wanted.tensors.insert(name, problem.tensor(name)?.clone());
            }
            let got = backend.run(problem, None)?;
            let truth = reference::truth(&wanted)?;
            let error =
                |got: &HostTensor, wanted| compare(pairs(&got.to_f64(), wanted), got.dims());
            errors = Errors {
                o: errors.o.worse(error(&got.o, &truth.o)),
                state: errors.state.worse(error(&got.state, &truth.pool)),
                variant: got.variant,
            };
            problem.tensors.insert("state", got.state);
            if let Some(state) = wanted.tensors.get_mut("state") {
                state.fill(&truth.pool)?;
            }
            bar.inc(1);
        }
        Ok(errors)
    }
}

/// Overwrites a tensor.
fn fill(problem: &mut Problem, name: &str, value: impl FnMut() -> f64) -> Result<(), Error> {
    let Some(tensor) = problem.tensors.get_mut(name) else {
        return Ok(());
    };
    let values: Vec<f64> = iter::repeat_with(value).take(tensor.elements()).collect();
    tensor.fill(&values)
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
