//! A layer of an engine on candle: its projections are candle's, all between them is one launch of this crate. It runs
//! two whole modules, Qwen3-Next's and Kimi-Linear's, and compares outputs, states and windows with what Hugging Face
//! transformers computed in f32 from the same weights. Without a GPU, in the simulator.

#[path = "../../common/mod.rs"]
mod common;
mod layer;
mod weights;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use common::engine::Engine;
use gated_delta::{Formulation, Options};
use gated_delta_reference::compare::relative_error_of;
use half::bf16;
use layer::{Cache, Element, Layer, Rows};
use weights::{Shape, Tensors, Weights};

/// Slots of the batch's rows; the pools have two more, which nobody uses.
const SLOTS: [i32; 2] = [3, 1];
const POOL: usize = 4;

/// Steps of a file: a prompt, and single tokens.
const STEPS: usize = 3;

/// Qwen3-Next's heads and dims in its file.
const QWEN3_NEXT: Shape = Shape {
    heads: 2,
    value_heads: 4,
    dim: 128,
    eps: 1e-6,
};

/// Kimi-Linear's.
const KIMI_LINEAR: Shape = Shape {
    heads: 2,
    value_heads: 2,
    dim: 128,
    eps: 1e-5,
};

fn main() -> Result<()> {
    let (engine, hopper) = match common::gpu()? {
        Some(device) => (Engine::on(device)?, device.compute_capability()? == (9, 0)),
        None => {
            println!("no GPU: in the simulator");
            (Engine::simulated(), true)
        }
    };
    let mut results = Vec::new();
    for module in [
        Module::read("qwen3_next", QWEN3_NEXT, Weights::qwen3_next)?,
        Module::read("kimi_linear", KIMI_LINEAR, Weights::kimi_linear)?,
    ] {
        for prompt in [Prompt::Cut, Prompt::Whole] {
            if prompt == Prompt::Whole && !hopper {
                println!("skipped: prefills take a GPU of compute capability 9.0");
                continue;
            }
            results.push(module.run::<f32, f32>(&engine, prompt)?);
            results.push(module.run::<bf16, bf16>(&engine, prompt)?);
        }
    }
    println!(
        "{:12} {:11} {:6} {:10} {:17} {:17} {:17}",
        "module", "activations", "states", "prompt", "outputs", "states", "windows"
    );
    for result in &results {
        println!("{result}");
    }
    ensure!(
        results.iter().all(Outcome::holds),
        "further from transformers than wanted"
    );
    Ok(())
}

/// How a prompt is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prompt {
    /// By 16 tokens, token by token: on every GPU.
    Cut,
    /// At once and as the library chooses: a prefill.
    Whole,
}

/// A module of transformers: its weights, and what it made of which inputs.
struct Module {
    name: &'static str,
    weights: Weights,
    file: Tensors,
}

impl Module {
    /// Of the file of that name, whose weights `order` brings into the layer's order.
    fn read(
        name: &'static str,
        shape: Shape,
        order: fn(&Tensors, Shape) -> Result<Weights>,
    ) -> Result<Self> {
        let folder = std::env::var_os("GATED_DELTA_FIXTURES").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures"),
            PathBuf::from,
        );
        let file = Tensors::read(&folder.join(format!("module_{name}.safetensors")))?;
        Ok(Self {
            name,
            weights: order(&file, shape)?,
            file,
        })
    }

    /// All steps, with activations (and windows) of `A` and states of `S`.
    fn run<A: Element, S: Element>(&self, engine: &Engine, prompt: Prompt) -> Result<Outcome> {
        let layer = Layer::<A>::new(engine, &self.weights)?;
        let mut cache = Cache::<A, S>::new(engine, &self.weights, POOL)?;
        let mut output = 0.0;
        for step in 0..STEPS {
            let hidden = self.file.get(&format!("step{step}.hidden"))?;
            let hidden = hidden.to_dtype(A::CANDLE)?;
            let (mut outputs, tokens) = (Vec::new(), hidden.dim(1)?);
            let options = Options::default();
            let (options, most) = match prompt {
                Prompt::Whole => (options, tokens),
                Prompt::Cut => (
                    options.formulation(Formulation::Recurrent),
                    gated_delta::MAX_TOKENS,
                ),
            };
            for start in (0..tokens).step_by(most) {
                let part = hidden.narrow(1, start, most.min(tokens - start))?;
                let rows = Rows::new(engine, &SLOTS, step == 0 && start == 0)?;
                outputs.push(layer.forward(engine, &part, &rows, &mut cache, options)?);
            }
            let wanted = self.file.get(&format!("step{step}.output"))?;
            output = f64::max(output, error(&Tensor::cat(&outputs, 1)?, wanted)?);
        }
        // The file's states are `[B, HV, K, V]`, the cache's `[P, HV, V, K]`; windows `[B, D, W − 1]` and `[P, W − 1, D]`.
        let slots = Tensor::new(&SLOTS.map(i64::from), &Device::Cpu)?;
        let [states, windows] = cache.read()?.map(|pool| pool.index_select(&slots, 0));
        let (states, windows) = (states?.transpose(2, 3)?, windows?.transpose(1, 2)?);
        Ok(Outcome {
            module: self.name,
            dtypes: [A::CANDLE, S::CANDLE],
            prompt,
            errors: [
                output,
                error(&states, self.file.get("final.state")?)?,
                error(&windows, self.file.get("final.conv_state")?)?,
            ],
        })
    }
}

/// ‖got − wanted‖ / ‖wanted‖.
fn error(got: &Tensor, wanted: &Tensor) -> Result<f64> {
    ensure!(
        got.dims() == wanted.dims(),
        "wanted {:?}, got {:?}",
        wanted.dims(),
        got.dims()
    );
    let values = |tensor: &Tensor| -> candle_core::Result<Vec<f64>> {
        tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
    };
    Ok(relative_error_of(
        values(got)?.into_iter().zip(values(wanted)?),
    ))
}

/// How far a run was from the file, and how far it may be.
struct Outcome {
    module: &'static str,
    /// Of activations and windows, and of states.
    dtypes: [DType; 2],
    prompt: Prompt,
    /// The largest of a step's outputs; of the states and the windows at the end.
    errors: [f64; 3],
}

impl Outcome {
    /// In f32 there are the rounding errors of both sides. In bf16 x, o, the outputs and, between launches, the states
    /// are rounded. In chunks factors of products have 11 bits, and the bounds are the goals of docs/prefill.md.
    fn wanted(&self) -> [f64; 3] {
        match (self.dtypes, self.prompt) {
            ([DType::F32, _], Prompt::Whole) => [2.5e-3, 2e-3, 1e-4],
            ([DType::F32, _], _) => [1e-4; 3],
            _ => [2e-2; 3],
        }
    }

    fn holds(&self) -> bool {
        let mut pairs = self.errors.iter().zip(self.wanted());
        pairs.all(|(&error, wanted)| error <= wanted)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [activations, states] = self.dtypes.map(|dtype| dtype.as_str());
        let prompt = format!("{:?}", self.prompt);
        write!(
            f,
            "{:12} {activations:11} {states:6} {prompt:10}",
            self.module
        )?;
        for (error, wanted) in self.errors.iter().zip(self.wanted()) {
            let sign = if error <= &wanted { "≤" } else { "> !" };
            write!(f, " {:17}", format!("{error:.1e} {sign} {wanted:.1e}"))?;
        }
        Ok(())
    }
}
