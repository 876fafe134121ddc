//! The layer step: convolution, recurrence and gated norm of a token in one launch, on the projection as it comes.
//! Sequences are admitted to slots that nobody has cleared. Without a GPU, in the simulator.

mod common;

use anyhow::{Result, ensure};
use common::engine::{Buffer, Engine};
use common::{OUTPUT_TOLERANCE, STATE_TOLERANCE, Shape, doubles, rounded, uniform, worst};
use gated_delta::{Convolution, Error, Gdn, GdnGates, Inputs, Norm, States, Tensor};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::layer::{self, LayerOutput, Pools, Projection};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Recurrent, TokenGates};
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// W
const TAPS: usize = 4;

/// Of the norm.
const EPS: f32 = 1e-6;

/// How many tokens to decode.
const STEPS: usize = 8;

/// The step at which the last row is admitted; the others are at the first.
const ADMITTED: usize = 4;

/// A slot for each row; before it is admitted, the last row has none.
const SLOTS: [i32; 3] = [4, 0, 2];

fn main() -> Result<()> {
    let (engine, is_simulated) = Engine::first()?;
    let (heads, dim) = match is_simulated {
        false => ([16, 32], 128),
        true => ([1, 2], 64),
    };
    let [heads, value_heads] = heads;
    let shape = Shape {
        batch: SLOTS.len(),
        tokens: 1,
        heads,
        value_heads,
        dim,
        slots: 6,
    };
    let rng = &mut StdRng::seed_from_u64(7);
    let weights = Weights::random(shape, rng);
    let mut layer = Layer::new(&engine, shape, &weights)?;
    let (mut states, mut windows) = (
        vec![f64::NAN; shape.slots * shape.state()],
        vec![f64::NAN; shape.slots * channels(shape) * (TAPS - 1)],
    );
    for step in 0..STEPS {
        let token = uniform(rng, shape.batch * Part::of(shape).width, -1.0, 1.0);
        let token = Token {
            projection: rounded(token),
            slots: SLOTS.map(|slot| match slot == SLOTS[2] && step < ADMITTED {
                true => -1,
                false => slot,
            }),
            fresh: match step {
                0 => [1, 1, 0],
                ADMITTED => [0, 0, 1],
                _ => [0; 3],
            },
        };
        layer.set(&token)?;
        // SAFETY: the buffers outlive the wait, nobody else uses them, and rows have slots of their own.
        unsafe { engine.library.launch(engine.stream(), &layer.step()?) }?;
        engine.synchronize()?;

        let truth = weights.truth(shape, &token, &states, &windows)?;
        layer.check(step, &token, &truth)?;
        (states, windows) = (truth.states, truth.windows.unwrap_or_default());
    }
    Ok(())
}

/// D
fn channels(shape: Shape) -> usize {
    (2 * shape.heads + shape.value_heads) * shape.dim
}

/// Where the parts of a projection's row begin: x (q, k and v), z, b, a.
struct Part {
    z: usize,
    b: usize,
    a: usize,
    width: usize,
}

impl Part {
    fn of(shape: Shape) -> Self {
        let z = channels(shape);
        let b = z + shape.value_heads * shape.dim;
        let a = b + shape.value_heads;
        Self {
            z,
            b,
            a,
            width: a + shape.value_heads,
        }
    }
}

/// What changes from one step to the next.
struct Token {
    /// `[B, D + HV·V + 2·HV]`
    projection: Vec<bf16>,
    /// `[B]`
    slots: [i32; 3],
    /// `[B]`
    fresh: [i32; 3],
}

/// What is fixed for the layer.
struct Weights {
    /// `[D, W]`
    conv: Vec<bf16>,
    /// `[V]`
    norm: Vec<bf16>,
    /// `[HV]`
    a_log: Vec<f32>,
    /// `[HV]`
    dt_bias: Vec<f32>,
}

/// The layer of an engine: its memory, and what it launches.
struct Layer {
    shape: Shape,
    conv: Buffer<bf16>,
    norm: Buffer<bf16>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    projection: Buffer<bf16>,
    slots: Buffer<i32>,
    fresh: Buffer<i32>,
    /// `[P, HV, V, K]`
    states: Buffer<f32>,
    /// `[P, W − 1, D]`: token by token.
    windows: Buffer<bf16>,
    /// `[B, 1, HV, V]`
    o: Buffer<bf16>,
}

impl Layer {
    /// With pools full of NaN: what is there is never read before it is written.
    fn new(engine: &Engine, shape: Shape, weights: &Weights) -> Result<Self> {
        let nan = |len: usize| engine.buffer(&vec![bf16::NAN; len]);
        Ok(Self {
            shape,
            conv: engine.buffer(&weights.conv)?,
            norm: engine.buffer(&weights.norm)?,
            a_log: engine.buffer(&weights.a_log)?,
            dt_bias: engine.buffer(&weights.dt_bias)?,
            projection: nan(shape.batch * Part::of(shape).width)?,
            slots: engine.buffer(&[-1; SLOTS.len()])?,
            fresh: engine.buffer(&[0; SLOTS.len()])?,
            states: engine.buffer(&vec![f32::NAN; shape.slots * shape.state()])?,
            windows: nan(shape.slots * (TAPS - 1) * channels(shape))?,
            o: nan(shape.batch * shape.value_heads * shape.dim)?,
        })
    }

    /// What the engine's projection and scheduler leave; the outputs are set back to NaN.
    fn set(&mut self, token: &Token) -> Result<()> {
        let Shape {
            batch,
            value_heads,
            dim,
            ..
        } = self.shape;
        self.projection.write(&token.projection)?;
        self.slots.write(&token.slots)?;
        self.fresh.write(&token.fresh)?;
        self.o.write(&vec![bf16::NAN; batch * value_heads * dim])
    }

    /// Arguments of the step: views of one projection, and of windows that are kept token by token.
    fn step(&mut self) -> Result<Gdn<'_>, Error> {
        let Shape {
            batch,
            heads,
            value_heads,
            dim,
            slots,
            ..
        } = self.shape;
        let (part, d) = (Part::of(self.shape), channels(self.shape));
        let row: Tensor<'_> = self.projection.tensor(&[batch, 1, part.width])?;
        let x = row.narrow(2, 0, d)?;
        let z = row.narrow(2, part.z, value_heads * dim)?.split(2, dim)?;
        let gates = GdnGates::raw(
            row.narrow(2, part.a, value_heads)?,
            row.narrow(2, part.b, value_heads)?,
            self.a_log.tensor(&[value_heads])?,
            self.dt_bias.tensor(&[value_heads])?,
        );
        let windows = self.windows.tensor_mut(&[slots, d, TAPS - 1])?;
        let windows = windows.with_strides(&[(TAPS - 1) * d, 1, d])?;
        let conv = Convolution::new(x, heads, self.conv.tensor(&[d, TAPS])?, windows);
        let pool = self.states.tensor_mut(&[slots, value_heads, dim, dim])?;
        let states = States::update(pool).slots(self.slots.tensor(&[batch])?);
        let o = self.o.tensor_mut(&[batch, 1, value_heads, dim])?;
        Ok(Gdn::new(Inputs::conv(conv), gates, o, states)
            .norm(Norm::new(z, self.norm.tensor(&[dim])?, EPS))
            .fresh(self.fresh.tensor(&[batch])?))
    }

    /// Checks what a step left: its outputs, and every slot of both pools.
    fn check(&self, step: usize, token: &Token, truth: &LayerOutput) -> Result<()> {
        let Shape {
            value_heads, dim, ..
        } = self.shape;
        let outputs = worst(
            "o",
            &self.o.read()?,
            &truth.o,
            value_heads * dim,
            OUTPUT_TOLERANCE,
        )?;
        let states = self.states.read()?;
        let slot = self.shape.state();
        let written = worst("state", &states, &truth.states, slot, STATE_TOLERANCE)?;
        let (windows, wanted) = (self.windows.read()?, truth.windows.as_deref());
        ensure!(
            wanted.is_some_and(|wanted| self.same_windows(&windows, wanted)),
            "step {step}: windows are not copies of the inputs"
        );
        println!(
            "  step {step}, slots {:?}, fresh {:?}: o within {outputs:.1e} of the reference, states within {written:.1e}",
            token.slots, token.fresh
        );
        Ok(())
    }

    /// Windows `[P, W − 1, D]` are those of the reference, `[P, D, W − 1]`.
    fn same_windows(&self, got: &[bf16], wanted: &[f64]) -> bool {
        let (d, inputs) = (channels(self.shape), TAPS - 1);
        got.len() == wanted.len()
            && got.iter().enumerate().all(|(index, got)| {
                let (slot, input, channel) = (index / d / inputs, index / d % inputs, index % d);
                let wanted = wanted[(slot * d + channel) * inputs + input];
                got.to_f64() == wanted || got.is_nan() && wanted.is_nan()
            })
    }
}

impl Weights {
    fn random(shape: Shape, rng: &mut StdRng) -> Self {
        Self {
            conv: rounded(uniform(rng, channels(shape) * TAPS, -0.5, 0.5)),
            norm: rounded(uniform(rng, shape.dim, 0.5, 1.5)),
            a_log: uniform(rng, shape.value_heads, -3.0, 0.0),
            dt_bias: uniform(rng, shape.value_heads, -1.0, 1.0),
        }
    }

    /// What the reference makes of a token, from its own states and windows.
    fn truth(
        &self,
        shape: Shape,
        token: &Token,
        states: &[f64],
        windows: &[f64],
    ) -> Result<LayerOutput> {
        let part = Part::of(shape);
        let column = |from: usize, to: usize| -> Vec<f64> {
            let rows = token.projection.chunks(part.width);
            rows.flat_map(|row| doubles(&row[from..to])).collect()
        };
        let (x, z) = (column(0, part.z), column(part.z, part.b));
        let (b, a) = (column(part.b, part.a), column(part.a, part.width));
        let (slots, fresh) = (token.slots.map(i64::from), token.fresh.map(i64::from));
        let [a_log, dt_bias] = [&self.a_log, &self.dt_bias].map(|values| doubles(values));
        let gates = TokenGates::Gdn(Gates::Raw {
            a: &a,
            b: &b,
            a_log: &a_log,
            dt_bias: &dt_bias,
            beta_scale: 1.0,
        });
        let heads = [shape.heads, shape.value_heads];
        let step = Recurrent {
            read_slots: Some(&slots),
            ..Recurrent::new([shape.batch, 1], heads, [shape.dim, shape.dim], gates)
        };
        let whole = layer::Layer {
            step,
            projection: Some(Projection {
                x: &x,
                previous: None,
                conv: Conv {
                    channels: channels(shape),
                    width: TAPS,
                    weight: &doubles(&self.conv),
                    bias: None,
                    activation: Activation::Silu,
                },
            }),
            norm: Some(GatedNorm {
                z: &z,
                weight: &doubles(&self.norm),
                eps: EPS.into(),
                activation: Activation::Silu,
            }),
            fresh: Some(&fresh),
            checkpoints: None,
        };
        let pools = Pools {
            states,
            windows: Some(windows),
            ..Pools::default()
        };
        Ok(layer::layer(&whole, &pools)?)
    }
}
