//! Sequences that are prefilled, decoded and verified on a backend, and in parallel by the reference.

use std::iter;

use gated_delta::{DType, Entry, Formulation};
use indicatif::ProgressBar;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::backend::{Backend, Outputs};
use crate::compare::{Comparison, compare, pairs};
use crate::error::Error;
use crate::model::{Layer, Pool};
use crate::op::{Op, previous_gates};
use crate::problem::Problem;
use crate::reference;
use crate::tensor::HostTensor;

/// States of some sequences, on a backend and in the reference.
pub(super) struct Session<'a> {
    layer: Layer,
    pool: Pool,
    backend: &'a Backend,
    bar: &'a ProgressBar,
    random: StdRng,
    /// The next decode on the backend.
    problem: Problem,
    /// The next decode in the reference, from its own states, which are rounded as the backend stores them.
    wanted: Problem,
}

/// Results of some launches.
pub(super) struct Outcome {
    /// The launches in words, for the table.
    pub steps: String,
    /// The last launch, which is timed.
    pub last: Problem,
    /// Worst comparison of the outputs.
    pub o: Comparison,
    /// Worst comparison of the states.
    pub state: Comparison,
    /// Whether the launch was a chunkwise prefill, whose states have another tolerance.
    pub in_chunks: bool,
    /// Worst comparison of the windows. Windows are copies, so only an error of 0 is right.
    pub windows: Comparison,
    /// The variant that ran.
    pub variant: Option<Entry>,
}

impl<'a> Session<'a> {
    /// Launches of a speculative step.
    pub const SPECULATIVE_LAUNCHES: usize = 2;

    /// Sequences with zero states and windows, one for each slot of `pool`.
    pub fn new(
        layer: Layer,
        pool: Pool,
        seed: u64,
        backend: &'a Backend,
        bar: &'a ProgressBar,
    ) -> Result<Self, Error> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut problem = layer.blank_layer(pool.slots, 1, pool)?;
        fill(&mut problem, "state", || 0.0)?;
        fill(&mut problem, "conv_state", || 0.0)?;
        fill(&mut problem, "conv_weight", || {
            random.random_range(-0.5..0.5)
        })?;
        fill(&mut problem, "norm_weight", || {
            random.random_range(0.5..1.5)
        })?;
        fill(&mut problem, "A_log", || random.random_range(0.0..2.7))?;
        fill(&mut problem, "dt_bias", || random.random_range(-6.0..-1.0))?;
        Ok(Self {
            layer,
            pool,
            backend,
            bar,
            random,
            wanted: problem.clone(),
            problem,
        })
    }

    /// Prefills random prompts of `tokens` tokens in the first `rows` rows, from zero states. Later decodes start from the result.
    pub fn prefill(&mut self, rows: usize, tokens: usize) -> Result<Outcome, Error> {
        let mut problem = self.following([rows, tokens], &self.problem)?;
        problem.op = Op::GdnPrefill;
        problem.options = problem.options.formulation(Formulation::Chunked);
        for name in token_tensors(&problem) {
            fill(&mut problem, name, || self.random.random_range(-2.0..2.0))?;
        }
        let truth = reference::truth(&problem)?;
        problem.add_workspace()?;
        let got = self.backend.run(&problem, None)?;
        let o = output_error(&problem, &got, &truth.o)?;
        let state = error(&got.state, &truth.pool);
        let windows = got
            .conv_state
            .ok_or_else(|| problem.missing("conv_state"))?;
        let windows_error = error(&windows, &truth.windows.unwrap_or_default());
        // Decodes on both sides start from the backend's result: the errors of a prefill do not count against them.
        for (name, tensor) in [("state", got.state), ("conv_state", windows)] {
            self.problem.tensors.insert(name, tensor.clone());
            self.wanted.tensors.insert(name, tensor);
        }
        self.bar.inc(1);
        Ok(Outcome {
            steps: match rows {
                1 => format!("a prompt of {tokens}"),
                _ => format!("{rows} prompts of {tokens}"),
            },
            last: problem,
            o,
            state,
            in_chunks: true,
            windows: windows_error,
            variant: got.variant,
        })
    }

    /// Decodes `steps` random tokens in each row, each from the projection to the norm's result.
    pub fn decode(&mut self, steps: usize) -> Result<Outcome, Error> {
        let (mut o, mut state) = (Comparison::default(), Comparison::default());
        let (mut windows, mut variant) = (Comparison::default(), None);
        for _ in 0..steps {
            for name in token_tensors(&self.problem) {
                fill(&mut self.problem, name, || {
                    self.random.random_range(-2.0..2.0)
                })?;
                let tensor = self.problem.tensor(name)?.clone();
                self.wanted.tensors.insert(name, tensor);
            }
            let got = self.backend.run(&self.problem, None)?;
            let truth = reference::truth(&self.wanted)?;
            o = o.worse(output_error(&self.problem, &got, &truth.o)?);
            state = state.worse(error(&got.state, &truth.pool));
            variant = got.variant;
            self.problem.tensors.insert("state", got.state);
            fill_from(&mut self.wanted, "state", &truth.pool)?;
            if let (Some(got), Some(truth)) = (got.conv_state, truth.windows) {
                windows = windows.worse(error(&got, &truth));
                self.problem.tensors.insert("conv_state", got);
                fill_from(&mut self.wanted, "conv_state", &truth)?;
            }
            self.bar.inc(1);
        }
        Ok(Outcome {
            steps: format!("{steps} decodes"),
            last: self.problem.clone(),
            o,
            state,
            in_chunks: false,
            windows,
            variant,
        })
    }

    /// Verifies random drafts, accepts a random prefix of each row's, and resumes with as many new drafts.
    pub fn speculate(&mut self, drafts: usize) -> Result<Outcome, Error> {
        let rows = self.pool.slots;
        let accepted: Vec<usize> = iter::repeat_with(|| self.random.random_range(0..=drafts))
            .take(rows)
            .collect();
        let mut plain = PlainDecoding::new(self.following([self.pool.slots, 1], &self.wanted)?)?;

        let mut verify = self.drafts(drafts)?;
        verify.update_state = false;
        let got = self.backend.run(&verify, None)?;
        let o = output_error(&verify, &got, &plain.decode(&verify, &accepted)?)?;
        self.bar.inc(1);

        let mut resume = self.drafts(drafts)?;
        let [gate, beta] = verify.gates.names();
        let [previous_gate, previous_beta] = previous_gates(verify.gates);
        for (previous, name) in [
            ("prev.x", "x"),
            (previous_gate, gate),
            (previous_beta, beta),
        ] {
            let tensor = verify.tensor(name)?.clone();
            resume.tensors.insert(previous, tensor);
        }
        let keep: Vec<f64> = accepted.iter().map(|&accepted| accepted as f64).collect();
        let keep = HostTensor::from_f64(DType::I32, &[rows], &keep)?;
        resume.tensors.insert("keep", keep);
        let got = self.backend.run(&resume, None)?;
        let state = error(&got.state, &plain.values("state")?);
        let windows = (got.conv_state.as_ref()).ok_or_else(|| resume.missing("conv_state"))?;
        let windows = error(windows, &plain.values("conv_state")?);
        let wanted = plain.decode(&resume, &vec![drafts; rows])?;
        let o = o.worse(output_error(&resume, &got, &wanted)?);
        self.bar.inc(1);
        Ok(Outcome {
            steps: format!("verify {drafts}, resume {drafts}"),
            last: resume,
            o,
            state,
            in_chunks: false,
            windows,
            variant: got.variant,
        })
    }

    /// A verify of random tokens of every row, from the current states and windows.
    fn drafts(&mut self, drafts: usize) -> Result<Problem, Error> {
        let mut problem = self.following([self.pool.slots, drafts], &self.problem)?;
        for name in token_tensors(&problem) {
            fill(&mut problem, name, || self.random.random_range(-2.0..2.0))?;
        }
        Ok(problem)
    }

    /// A step of `rows` rows and `tokens` tokens, with the weights, states and windows of `decode`.
    fn following(&self, [rows, tokens]: [usize; 2], decode: &Problem) -> Result<Problem, Error> {
        let (layer, pool) = (self.layer, self.pool);
        let mut problem = layer.blank_layer(rows, tokens, pool)?;
        for name in [
            "conv_weight",
            "norm_weight",
            "A_log",
            "dt_bias",
            "state",
            "conv_state",
        ] {
            let tensor = decode.tensor(name)?.clone();
            problem.tensors.insert(name, tensor);
        }
        Ok(problem)
    }
}

/// Decodes tokens one by one with the reference, with states that are not rounded to bf16.
struct PlainDecoding(Problem);

impl PlainDecoding {
    /// Starts from the states and windows of a decode.
    fn new(mut decode: Problem) -> Result<Self, Error> {
        let states = decode.tensor("state")?;
        let states = HostTensor::from_f64(DType::F32, states.dims(), &states.to_f64())?;
        decode.tensors.insert("state", states);
        Ok(Self(decode))
    }

    fn values(&self, name: &'static str) -> Result<Vec<f64>, Error> {
        Ok(self.0.tensor(name)?.to_f64())
    }

    /// Decodes all tokens of `drafts` and returns the outputs `[B, T, HV, V]`. Afterwards the states and windows are those after the first
    /// `accepted[b]` tokens of each row b.
    fn decode(&mut self, drafts: &Problem, accepted: &[usize]) -> Result<Vec<f64>, Error> {
        let tokens = drafts.max_tokens();
        let rows = accepted.len();
        let (mut states, mut windows) = (self.values("state")?, self.values("conv_state")?);
        let row_output = drafts.tensor("o")?.elements() / (tokens * rows);
        let mut o = vec![0.0; tokens * rows * row_output];
        for t in 0..tokens {
            for name in token_tensors(drafts) {
                let token = token(drafts.tensor(name)?, t)?;
                self.0.tensors.insert(name, token);
            }
            let truth = reference::truth(&self.0)?;
            let windows_after = truth.windows.unwrap_or_default();
            for (b, &accepted) in accepted.iter().enumerate() {
                let output = &truth.o[b * row_output..][..row_output];
                o[(b * tokens + t) * row_output..][..row_output].copy_from_slice(output);
                if accepted == t + 1 {
                    keep_row(&mut states, &truth.pool, b, rows);
                    keep_row(&mut windows, &windows_after, b, rows);
                }
            }
            fill_from(&mut self.0, "state", &truth.pool)?;
            fill_from(&mut self.0, "conv_state", &windows_after)?;
        }
        fill_from(&mut self.0, "state", &states)?;
        fill_from(&mut self.0, "conv_state", &windows)?;
        Ok(o)
    }
}

/// Restores row b of `rows` in `kept` from `from`.
fn keep_row(kept: &mut [f64], from: &[f64], b: usize, rows: usize) {
    let len = kept.len() / rows;
    kept[b * len..][..len].copy_from_slice(&from[b * len..][..len]);
}

/// Names of the tensors that have an entry for each token.
fn token_tensors(problem: &Problem) -> [&'static str; 4] {
    let [gate, beta] = problem.gates.names();
    ["x", "z", gate, beta]
}

/// Token t of a tensor `[B, T, …]`, as `[B, 1, …]`.
fn token(tensor: &HostTensor, t: usize) -> Result<HostTensor, Error> {
    let mut dims = tensor.dims().to_vec();
    let elements: usize = dims[2..].iter().product();
    let values: Vec<f64> = tensor
        .to_f64()
        .chunks(dims[1] * elements)
        .flat_map(|row| &row[t * elements..][..elements])
        .copied()
        .collect();
    dims[1] = 1;
    HostTensor::from_f64(tensor.dtype(), &dims, &values)
}

/// Distance of a result from the wanted values.
fn error(got: &HostTensor, wanted: &[f64]) -> Comparison {
    compare(pairs(&got.to_f64(), wanted), got.dims())
}

/// Distance of the outputs of a launch from the wanted values.
fn output_error(problem: &Problem, got: &Outputs, wanted: &[f64]) -> Result<Comparison, Error> {
    let o = got.o.as_ref().ok_or_else(|| problem.missing("o"))?;
    Ok(error(o, wanted))
}

/// Overwrites a tensor of the problem.
fn fill(
    problem: &mut Problem,
    name: &'static str,
    value: impl FnMut() -> f64,
) -> Result<(), Error> {
    let elements = problem.tensor(name)?.elements();
    let values: Vec<f64> = iter::repeat_with(value).take(elements).collect();
    fill_from(problem, name, &values)
}

fn fill_from(problem: &mut Problem, name: &'static str, values: &[f64]) -> Result<(), Error> {
    match problem.tensors.get_mut(name) {
        Some(tensor) => tensor.fill(values),
        None => Err(problem.missing(name).into()),
    }
}
