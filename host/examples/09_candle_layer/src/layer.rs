//! The layer of an engine on candle, its caches, and its forward pass.

use anyhow::Result;
use bytemuck::Pod;
use candle_core::{DType, Device, Tensor, WithDType};
use gated_delta::{
    Activation, Convolution, DeviceElement, Error, Gates, Gdn, GdnGates, Inputs, Kda, KdaBeta,
    KdaGate, KdaGates, Norm, Options, States, Step, Work,
};

use crate::common::engine::{Buffer, Engine};
use crate::weights::{Operator, Shape, Weights};

/// What both candle and this crate know: f32 and bf16.
pub trait Element: WithDType + DeviceElement + Pod {
    /// As candle says it.
    const CANDLE: DType = <Self as WithDType>::DTYPE;
}

impl<T: WithDType + DeviceElement + Pod> Element for T {}

/// The layer, with weights and activations of `A`. Products are candle's, on the CPU; what a launch reads is in an
/// [`Engine`]'s memory. On candle's CUDA device the two are one: `Tensor::from_raw` takes a tensor's address, and
/// nothing is copied.
pub struct Layer<A> {
    shape: Shape,
    operator: Operator,
    projection: Tensor,
    output: Tensor,
    /// D, W
    taps: [usize; 2],
    conv: Buffer<A>,
    norm: Buffer<A>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
}

/// What a layer keeps of its sequences, by slot.
pub struct Cache<A, S> {
    /// `[P, HV, V, K]`
    states: Buffer<S>,
    state_dims: [usize; 4],
    /// `[P, W − 1, D]`: token by token.
    windows: Buffer<A>,
    window_dims: [usize; 3],
}

/// What the scheduler says of a batch: the same for all layers of a model.
pub struct Rows {
    batch: usize,
    slots: Buffer<i32>,
    fresh: Buffer<i32>,
}

impl Rows {
    /// Sequences in `slots`, which begin here or go on.
    pub fn new(engine: &Engine, slots: &[i32], fresh: bool) -> Result<Self> {
        Ok(Self {
            batch: slots.len(),
            slots: engine.buffer(slots)?,
            fresh: engine.buffer(&vec![i32::from(fresh); slots.len()])?,
        })
    }
}

impl<A: Element, S: Element> Cache<A, S> {
    /// Of `slots` sequences, full of NaN: a sequence that begins in a slot looks at nothing there.
    pub fn new(engine: &Engine, weights: &Weights, slots: usize) -> Result<Self> {
        let Shape {
            value_heads, dim, ..
        } = weights.shape;
        let (channels, taps) = weights.conv.dims2()?;
        let state_dims = [slots, value_heads, dim, dim];
        let window_dims = [slots, taps - 1, channels];
        Ok(Self {
            states: engine.buffer(&vec![S::from_f64(f64::NAN); state_dims.iter().product()])?,
            state_dims,
            windows: engine.buffer(&vec![A::from_f64(f64::NAN); window_dims.iter().product()])?,
            window_dims,
        })
    }

    /// States and windows.
    pub fn read(&self) -> Result<[Tensor; 2]> {
        Ok([
            Tensor::from_vec(self.states.read()?, &self.state_dims, &Device::Cpu)?,
            Tensor::from_vec(self.windows.read()?, &self.window_dims, &Device::Cpu)?,
        ])
    }
}

impl<A: Element> Layer<A> {
    /// Weights where they are used.
    pub fn new(engine: &Engine, weights: &Weights) -> Result<Self> {
        let to = |weight: &Tensor| weight.to_dtype(A::CANDLE);
        let (channels, taps) = weights.conv.dims2()?;
        Ok(Self {
            shape: weights.shape,
            operator: match &weights.operator {
                Operator::Gdn => Operator::Gdn,
                Operator::Kda { forget, gate } => Operator::Kda {
                    forget: to(forget)?,
                    gate: to(gate)?,
                },
            },
            projection: to(&weights.projection)?,
            output: to(&weights.output)?,
            taps: [channels, taps],
            conv: buffer(engine, &weights.conv)?,
            norm: buffer(engine, &weights.norm)?,
            a_log: buffer(engine, &weights.a_log)?,
            dt_bias: buffer(engine, &weights.dt_bias)?,
        })
    }

    /// The layer's outputs `[B, T, hidden]` of hidden states `[B, T, hidden]`; the cache advances by these tokens.
    pub fn forward<S: Element>(
        &self,
        engine: &Engine,
        hidden: &Tensor,
        rows: &Rows,
        cache: &mut Cache<A, S>,
        options: Options,
    ) -> Result<Tensor> {
        let Shape {
            value_heads,
            dim,
            eps,
            ..
        } = self.shape;
        let (batch, tokens, _) = hidden.dims3()?;
        let (channels, values) = (self.shape.channels(), self.shape.values());
        let of_head = [batch, tokens, value_heads, dim];

        // candle: one product makes the row of every token.
        let projected = linear(hidden, &self.projection)?;
        let row = buffer::<A>(engine, &projected)?;
        let row = row.tensor(&[batch, tokens, projected.dim(2)?])?;

        // The launch: from x, a view of the row, to the gated norm.
        let x = row.narrow(2, 0, channels)?;
        let conv = self.convolution(x, &mut cache.windows, cache.window_dims)?;
        let pool = cache.states.tensor_mut(&cache.state_dims)?;
        let states = States::update(pool).slots(rows.slots.tensor(&[batch])?);
        let a_log = self.a_log.tensor(&[value_heads])?;
        let norm_weight = self.norm.tensor(&[dim])?;
        let mut o = engine.buffer(&vec![A::zero(); batch * tokens * values])?;
        let out = o.tensor_mut(&of_head)?;
        match &self.operator {
            Operator::Gdn => {
                let z = row.narrow(2, channels, values)?.split(2, dim)?;
                let b = row.narrow(2, channels + values, value_heads)?;
                let a = row.narrow(2, channels + values + value_heads, value_heads)?;
                let gates = GdnGates::raw(a, b, a_log, self.dt_bias.tensor(&[value_heads])?);
                let step = Gdn::new(Inputs::conv(conv), gates, out, states);
                let step = step.norm(Norm::new(z, norm_weight, eps));
                launch(engine, step.options(options), rows)?;
            }
            Operator::Kda { forget, gate } => {
                let f_a = projected.narrow(2, channels, dim)?;
                let g_a = projected.narrow(2, channels + dim, dim)?;
                let f = buffer::<A>(engine, &linear(&f_a, forget)?)?;
                let z = buffer::<A>(engine, &linear(&g_a, gate)?)?;
                let b = row.narrow(2, channels + 2 * dim, value_heads)?;
                let kind = KdaGate::Softplus {
                    a_log,
                    dt_bias: Some(self.dt_bias.tensor(&[value_heads, dim])?),
                };
                let gates = KdaGates::new(f.tensor(&of_head)?, kind, b, KdaBeta::Logit);
                let norm = Norm::new(z.tensor(&of_head)?, norm_weight, eps);
                let step = Kda::new(Inputs::conv(conv), gates, out, states);
                let step = step.norm(norm.activation(Activation::Sigmoid));
                launch(engine, step.options(options), rows)?;
            }
        }

        // candle again.
        let o = Tensor::from_vec(o.read()?, (batch, tokens, values), &Device::Cpu)?;
        linear(&o, &self.output)
    }

    /// The convolution of x, with windows that are kept token by token.
    fn convolution<'a>(
        &'a self,
        x: gated_delta::Tensor<'a>,
        windows: &'a mut Buffer<A>,
        [slots, inputs, channels]: [usize; 3],
    ) -> Result<Convolution<'a>, Error> {
        let windows = windows.tensor_mut(&[slots, channels, inputs])?;
        let windows = windows.with_strides(&[inputs * channels, 1, channels])?;
        Ok(Convolution::new(
            x,
            self.shape.heads,
            self.conv.tensor(&self.taps)?,
            windows,
        ))
    }
}

/// Launches a step of `rows`. With candle on the CPU it waits, which an engine whose work is all on one stream does not.
fn launch<'a, G: Gates>(engine: &Engine, step: Step<'a, G>, rows: &'a Rows) -> Result<()> {
    let step = step.fresh(rows.fresh.tensor(&[rows.batch])?);
    // For a prompt of more than 64 tokens; an engine has one for its largest launch.
    let elements = step.workspace_bytes()?.div_ceil(size_of::<f32>());
    let mut workspace = engine.buffer(&vec![0f32; elements])?;
    let step = match elements {
        0 => step,
        _ => step.workspace(workspace.tensor_mut(&[elements])?),
    };
    // SAFETY: the buffers outlive the wait, nobody else uses them, and rows have slots of their own.
    unsafe { engine.library.launch(engine.stream(), &step) }?;
    engine.synchronize()
}

/// `x` `[B, T, in]` by `weight` `[out, in]`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (batch, tokens, _) = x.dims3()?;
    let product = x.flatten_to(1)?.matmul(&weight.t()?)?;
    Ok(product.reshape((batch, tokens, weight.dim(0)?))?)
}

/// A copy of candle's tensor, as `T`, in the memory of launches.
fn buffer<T: Element>(engine: &Engine, tensor: &Tensor) -> Result<Buffer<T>> {
    let values = tensor.to_dtype(T::CANDLE)?.flatten_all()?;
    engine.buffer(&values.to_vec1::<T>()?)
}
