//! Runs whole models in an engine's loop: small versions of Qwen3-Next, Qwen3.5 and Kimi-Linear, whose tokens and logits are
//! known from Hugging Face's transformers. Every request has to get those tokens, whatever else is in its batches. Arguments:
//! `--simulator` (with the feature `simulator`), a folder of models, and a number of schedules.

mod attention;
mod engine;
mod experts;
mod model;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor, safetensors};
use candle_gated_delta::{Formulation, StateLayout, StatePool};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use engine::{Answer, Counts, Engine, Proposer, Request, Settings};
use model::Model;

/// Largest difference of logits from transformers', in f32.
const TOLERANCE: f32 = 1e-3;

/// Largest difference of logits with [`Formulation::Auto`] on a GPU: chunks of prompts have products of f16 numbers, whose
/// errors these models amplify to 2.8e-2 on an H200, and to 4.1e-2 in the simulator.
const TOLERANCE_IN_CHUNKS: f32 = 5e-2;

const MODELS: [&str; 3] = ["qwen3_next_tiny", "qwen3_5_tiny", "kimi_linear_tiny"];

/// A mix of requests, and the settings that serve it.
struct Mix {
    name: &'static str,
    settings: Settings,
    requests: usize,
    /// Number of requests in ten that propose drafts.
    drafting: u32,
    /// Number of steps in ten that allow drafts.
    drafting_steps: u32,
    /// Whether the loop's counts show what the mix is meant to test.
    is_what: fn(&Counts) -> bool,
}

const MIXES: [Mix; 4] = [
    Mix {
        name: "one by one",
        is_what: |of| of.handed_on > 0,
        settings: Settings {
            slots: 1,
            budget: 256,
            drafts: 3,
            every: 64,
        },
        requests: 6,
        drafting: 0,
        drafting_steps: 0,
    },
    Mix {
        name: "in chunks, side by side",
        is_what: |of| of.mixed > 0 && of.handed_on > 0,
        settings: Settings {
            slots: 5,
            budget: 23,
            drafts: 3,
            every: 64,
        },
        requests: 14,
        drafting: 0,
        drafting_steps: 0,
    },
    Mix {
        name: "with prefixes and drafts",
        is_what: |of| {
            let drafts = [of.accepted, of.rejected, of.resumed, of.committed];
            let others = [of.mixed, of.hits, of.evicted, of.handed_on];
            drafts.iter().chain(&others).all(|&count| count > 0)
        },
        settings: Settings {
            slots: 7,
            budget: 48,
            drafts: 4,
            every: 64,
        },
        requests: 24,
        drafting: 7,
        drafting_steps: 7,
    },
    Mix {
        name: "with drafts throughout",
        is_what: |of| of.accepted > 0 && of.rejected > 0 && of.resumed > 0,
        settings: Settings {
            slots: 4,
            budget: 96,
            drafts: 7,
            every: 128,
        },
        requests: 16,
        drafting: 10,
        drafting_steps: 10,
    },
];

fn main() -> Result<()> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let is_simulated = args.first().is_some_and(|arg| arg == "--simulator");
    if is_simulated {
        args.remove(0);
    }
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models");
    let folder = Path::new(args.first().map_or(models, String::as_str));
    let schedules = match args.get(1) {
        Some(count) => count.parse().context("wanted a number of schedules")?,
        None => 1,
    };
    let device = match cfg!(feature = "cuda") && !is_simulated {
        true => Device::new_cuda(0)?,
        false => Device::Cpu,
    };
    let has_kernels = is_simulated || !device.is_cpu();
    let run = || {
        MODELS.iter().try_for_each(|name| {
            let model = Model::load(&folder.join(name), &device)?;
            let expected = Expected::read(&folder.join(name))?;
            println!("{name}");
            serve(&model, &expected, has_kernels, schedules)
        })
    };
    match is_simulated {
        #[cfg(feature = "simulator")]
        true => candle_gated_delta::on_simulator(run),
        #[cfg(not(feature = "simulator"))]
        true => bail!("--simulator: wanted a build with the feature simulator"),
        false => run(),
    }
}

/// Runs all mixes of a model, each with `schedules` seeds, and the first seed with V-last states and with chunkwise prompts
/// too. Prints the counts of the first seed.
fn serve(model: &Model, expected: &Expected, has_kernels: bool, schedules: u64) -> Result<()> {
    for (seed, mix) in (0..).zip(&MIXES) {
        let run = |seed, layout, formulation| {
            let mut pool = model.pool(mix.settings.slots)?.state_layout(layout)?;
            if let Some(formulation) = formulation {
                pool = pool.formulation(formulation);
            }
            let tolerance = match formulation {
                Some(Formulation::Auto) if has_kernels => TOLERANCE_IN_CHUNKS,
                _ => TOLERANCE,
            };
            run(model, expected, mix, seed, pool, tolerance)
                .with_context(|| format!("{}, seed {seed}, {layout:?}, {formulation:?}", mix.name))
        };
        for schedule in 1..schedules {
            run(seed + 100 * schedule, StateLayout::KLast, None)?;
        }
        let (counts, tokens, off) = run(seed, StateLayout::KLast, None)?;
        let (.., v_last) = run(seed, StateLayout::VLast, None)?;
        let (.., in_chunks) = run(seed, StateLayout::KLast, Some(Formulation::Auto))?;
        let off = off.max(v_last);
        ensure!((mix.is_what)(&counts), "{}: {counts}", mix.name);
        println!(
            "  {}: {} requests, {tokens} tokens as transformers', logits within {off:.1e}; Formulation::Auto: {in_chunks:.1e}\n    {counts}",
            mix.name, mix.requests
        );
    }
    Ok(())
}

/// Runs a mix from the first request to the last answer. Returns the loop's counts, the number of compared tokens, and the largest
/// difference of logits.
fn run(
    model: &Model,
    expected: &Expected,
    mix: &Mix,
    seed: u64,
    pool: StatePool,
    tolerance: f32,
) -> Result<(Counts, usize, f32)> {
    let rng = &mut StdRng::seed_from_u64(seed);
    let mut engine = Engine::new(model, mix.settings, poisoned(pool)?)?;
    let (mut asked, mut answered, mut tokens, mut off) = (Vec::new(), 0, 0, 0.0);
    while answered < mix.requests {
        while asked.len() < mix.requests && (engine.is_idle() || rng.random_range(0..3) == 0) {
            let (row, skipped, request) = expected.request(rng, asked.len(), mix)?;
            let id = engine.submit(request);
            ensure!(id == asked.len(), "requests are numbered in order");
            asked.push((row, skipped));
        }
        for answer in engine.step(rng.random_range(0..10) < mix.drafting_steps)? {
            let (row, skipped) = *asked.get(answer.id).context("nobody asked that")?;
            off = f32::max(off, expected.check(row, skipped, &answer, tolerance)?);
            tokens += answer.tokens.len();
            answered += 1;
        }
    }
    Ok((engine.counts, tokens, off))
}

/// A pool full of NaN, which would show any read before a write.
fn poisoned(pool: StatePool) -> Result<StatePool> {
    for index in 0.. {
        let Ok(layer) = pool.layer(index) else {
            break;
        };
        for tensor in [&layer.states, &layer.windows] {
            tensor.const_set(candle_core::scalar::Scalar::from(f32::NAN))?;
        }
    }
    Ok(pool)
}

/// Results of transformers for a model's prompts.
struct Expected {
    prompts: Vec<Vec<u32>>,
    continuations: Vec<Vec<u32>>,
    prompt_logits: Vec<Vec<f32>>,
    /// For some prompts, the logits after each of the first tokens of the continuation.
    step_logits: Vec<Option<Vec<Vec<f32>>>>,
}

impl Expected {
    fn read(folder: &Path) -> Result<Self> {
        let tensors = safetensors::load(folder.join("expected.safetensors"), &Device::Cpu)?;
        let get = |name: &str| {
            tensors
                .get(name)
                .with_context(|| format!("no tensor {name}"))
        };
        let rows = |name: &str| -> Result<Vec<Vec<i64>>> { Ok(get(name)?.to_vec2()?) };
        let lengths: Vec<i64> = get("prompt_lengths")?.to_vec1()?;
        let tokens = |row: &[i64]| row.iter().map(|&token| token as u32).collect::<Vec<u32>>();
        let prompts = rows("prompts")?;
        let prompts = prompts.iter().zip(&lengths);
        Ok(Self {
            prompts: prompts
                .map(|(row, &len)| tokens(&row[..len as usize]))
                .collect(),
            continuations: rows("continuations")?
                .iter()
                .map(|row| tokens(row))
                .collect(),
            prompt_logits: get("prompt_logits")?.to_vec2()?,
            step_logits: lengths
                .iter()
                .map(|len| {
                    let logits = tensors.get(&format!("step_logits_{len}"));
                    logits.map(Tensor::to_vec2).transpose()
                })
                .collect::<candle_core::Result<_>>()?,
        })
    }

    /// Request number `index` of a mix. Returns the number of its prompt, the number of tokens of the continuation that are part of the
    /// request's prompt, and the request.
    fn request(
        &self,
        rng: &mut StdRng,
        index: usize,
        mix: &Mix,
    ) -> Result<(usize, usize, Request)> {
        // Each prompt comes once as it is; then come random ones, followed by a part of their answers.
        let is_first = index < self.prompts.len();
        let row = if is_first {
            index
        } else {
            rng.random_range(0..self.prompts.len())
        };
        let answer = &self.continuations[row];
        let skipped = if is_first {
            0
        } else {
            rng.random_range(0..answer.len() / 2)
        };
        let most = match is_first {
            true => answer.len(),
            false => rng.random_range(1..=answer.len() - skipped),
        };
        let proposer: Option<Proposer> = match rng.random_range(0..10) < mix.drafting {
            false => None,
            true if rng.random() => Some(Box::new(ngram)),
            true => Some(self.nearly_right(row, rng.random_range(2..6))),
        };
        let prompt = [&self.prompts[row][..], &answer[..skipped]].concat();
        Ok((
            row,
            skipped,
            Request {
                prompt,
                most,
                proposer,
            },
        ))
    }

    /// Proposes the right tokens, except every `wrong`-th of the answer.
    fn nearly_right(&self, row: usize, wrong: usize) -> Proposer {
        let (start, answer) = (self.prompts[row].len(), self.continuations[row].clone());
        Box::new(move |text, most| {
            let behind = (text.len() - start..answer.len()).take(most);
            behind
                .map(|at| {
                    if (at + 1) % wrong == 0 {
                        (answer[at] + 1) % 256
                    } else {
                        answer[at]
                    }
                })
                .collect()
        })
    }

    /// Compares an answer, which follows the first `skipped` tokens of the continuation.
    fn check(&self, row: usize, skipped: usize, answer: &Answer, tolerance: f32) -> Result<f32> {
        let Answer { id, tokens, logits } = answer;
        let wanted = &self.continuations[row][skipped..][..tokens.len()];
        if tokens[..] != wanted[..] {
            bail!(
                "request {id}, prompt {row} and {skipped} tokens: wanted {wanted:?}, got {tokens:?}"
            );
        }
        ensure!(
            logits.len() == tokens.len(),
            "request {id}: logits of every token"
        );
        let mut off = 0.0;
        for (i, got) in logits.iter().enumerate() {
            let wanted = match (skipped + i, &self.step_logits[row]) {
                (0, _) => &self.prompt_logits[row],
                (at, Some(of_steps)) if at <= of_steps.len() => &of_steps[at - 1],
                _ => continue,
            };
            ensure!(
                got.len() == wanted.len(),
                "request {id}: logits of the vocabulary"
            );
            for (got, wanted) in got.iter().zip(wanted) {
                // A NaN fails this comparison.
                ensure!(
                    (got - wanted).abs() <= tolerance,
                    "request {id}, token {i}: logit {got}, wanted {wanted}"
                );
                off = f32::max(off, (got - wanted).abs());
            }
        }
        Ok(off)
    }
}

/// Proposes the tokens that followed an earlier occurrence of the last two tokens.
fn ngram(text: &[u32], most: usize) -> Vec<u32> {
    let Some(last) = text.len().checked_sub(2) else {
        return Vec::new();
    };
    let pair = &text[last..];
    let before = text
        .windows(2)
        .take(last)
        .rposition(|window| window == pair);
    before.map_or(Vec::new(), |at| {
        text[at + 2..].iter().copied().take(most).collect()
    })
}
