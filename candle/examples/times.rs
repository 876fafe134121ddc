//! Times a Gated DeltaNet layer of Qwen3-Next's shape: its convolution, recurrence and norm by candle's operations alone, and by this
//! crate's launch. Both have the same projections, which are also timed alone. With the feature `cuda` on a GPU in bf16, else on the CPU.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_gated_delta::{
    Activation, BetaScale, Formulation, GatedDeltaNet, GdnConfig, LayerStates, Row, Rows, StatePool,
};
use candle_nn::VarBuilder;
use candle_nn::ops::{sigmoid, silu};

const HIDDEN: usize = 2048;
const HEADS: usize = 16;
const VALUE_HEADS: usize = 32;
/// Head dim of keys and values.
const DIM: usize = 128;
const TAPS: usize = 4;
const KEYS: usize = HEADS * DIM;
const VALUES: usize = VALUE_HEADS * DIM;
const CHANNELS: usize = 2 * KEYS + VALUES;
const EPS: f64 = 1e-6;
/// Tokens of a chunk.
const CHUNK: usize = 64;
/// Decodes that are compared, after the prompt.
const DECODES: usize = 4;

/// The layer by candle's operations, in f32 between the projections.
struct Plain {
    /// Rows `[q | k | v | z | b | a]`.
    in_proj: Tensor,
    out_proj: Tensor,
    conv: Tensor,
    norm: Tensor,
    /// exp(A_log)
    rate: Tensor,
    dt_bias: Tensor,
    /// `[C, C]`: ones below the diagonal, without it and with it.
    below: Tensor,
    lower: Tensor,
}

/// State `[B, HV, K, V]` and window `[B, W − 1, D]` of a batch.
struct Kept {
    state: Tensor,
    window: Tensor,
}

impl Kept {
    fn zeros(batch: usize, device: &Device) -> Result<Self> {
        let state = (batch, VALUE_HEADS, DIM, DIM);
        Ok(Self {
            state: Tensor::zeros(state, DType::F32, device)?,
            window: Tensor::zeros((batch, TAPS - 1, CHANNELS), DType::F32, device)?,
        })
    }
}

/// Product of `x` `[B, T, in]` and the transposed `weight` `[out, in]`.
fn linear(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, tokens, _) = x.dims3()?;
    let product = x.flatten_to(1)?.matmul(&weight.t()?)?;
    product.reshape((batch, tokens, ()))
}

impl Plain {
    fn new(weights: &HashMap<String, Tensor>, dtype: DType, device: &Device) -> Result<Self> {
        let of = |name: &str| weights[name].to_dtype(DType::F32);
        let parts = ["qkv", "z", "b", "a"].map(|part| of(&format!("in_proj_{part}.weight")));
        let [qkv, z, b, a] = parts;
        let lower: Vec<f32> = (0..CHUNK * CHUNK)
            .map(|i| f32::from(i % CHUNK <= i / CHUNK))
            .collect();
        let lower = Tensor::from_vec(lower, (CHUNK, CHUNK), device)?;
        Ok(Self {
            in_proj: Tensor::cat(&[qkv?, z?, b?, a?], 0)?.to_dtype(dtype)?,
            out_proj: of("out_proj.weight")?.to_dtype(dtype)?,
            conv: of("conv1d.weight")?.squeeze(1)?.t()?.contiguous()?,
            norm: of("norm.weight")?,
            rate: of("A_log")?.exp()?,
            dt_bias: of("dt_bias")?,
            below: (&lower - Tensor::eye(CHUNK, DType::F32, device)?)?,
            lower,
        })
    }

    /// Outputs `[B, T, hidden]` of `x` `[B, T, hidden]`.
    fn forward(&self, x: &Tensor, kept: &mut Kept) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let row = linear(x, &self.in_proj)?;
        let part = |first, len| row.narrow(D::Minus1, first, len)?.to_dtype(DType::F32);
        let x = Tensor::cat(&[&kept.window, &part(0, CHANNELS)?], 1)?;
        kept.window = x.narrow(1, tokens, TAPS - 1)?;
        let mut sum = x.narrow(1, 0, tokens)?.broadcast_mul(&self.conv.get(0)?)?;
        for tap in 1..TAPS {
            let x = x.narrow(1, tap, tokens)?;
            sum = (sum + x.broadcast_mul(&self.conv.get(tap)?)?)?;
        }
        let x = silu(&sum)?;

        // [B, HV, T, …], each key head for its value heads.
        let keys = |first: usize| -> Result<Tensor> {
            let x = x.narrow(2, first, KEYS)?;
            let x = x.reshape((batch, tokens, HEADS, 1, DIM))?;
            let length = (x.sqr()?.sum_keepdim(D::Minus1)? + EPS)?.sqrt()?;
            let repeats = VALUE_HEADS / HEADS;
            let x = x
                .broadcast_div(&length)?
                .broadcast_as((batch, tokens, HEADS, repeats, DIM))?;
            let x = x.reshape((batch, tokens, VALUE_HEADS, DIM))?;
            Ok(x.transpose(1, 2)?.contiguous()?)
        };
        let (q, k) = ((keys(0)? / (DIM as f64).sqrt())?, keys(KEYS)?);
        let v = x.narrow(2, 2 * KEYS, VALUES)?;
        let v = v.reshape((batch, tokens, VALUE_HEADS, DIM))?;
        let v = v.transpose(1, 2)?.contiguous()?;
        let gate = |first| part(CHANNELS + VALUES + first, VALUE_HEADS)?.transpose(1, 2);
        let beta = sigmoid(&gate(0)?.contiguous()?)?.unsqueeze(3)?;
        let a = gate(VALUE_HEADS)?.broadcast_add(&self.dt_bias.unsqueeze(1)?)?;
        let softplus = (a.exp()? + 1.0)?.log()?;
        let decay = softplus.broadcast_mul(&self.rate.unsqueeze(1)?)?.neg()?;

        let o = match tokens {
            1 => step([&q, &k, &v], &decay.unsqueeze(3)?, &beta, &mut kept.state)?,
            _ => self.chunks([&q, &k, &v], &decay, &beta, &mut kept.state)?,
        };
        let o = o.transpose(1, 2)?.contiguous()?;
        let o = candle_nn::ops::rms_norm_slow(&o, &self.norm, EPS as f32)?.flatten_from(2)?;
        let o = (o * silu(&part(CHANNELS, VALUES)?)?)?;
        Ok(linear(&o.to_dtype(row.dtype())?, &self.out_proj)?)
    }

    /// The rule in chunks, as transformers' `torch_chunk_gated_delta_rule`, with the inverse by repeated squares. `decay` is `[B, HV, T]`.
    fn chunks(
        &self,
        qkv: [&Tensor; 3],
        decay: &Tensor,
        beta: &Tensor,
        state: &mut Tensor,
    ) -> candle_core::Result<Tensor> {
        let (batch, heads, tokens, dim) = qkv[0].dims4()?;
        let chunks = tokens / CHUNK;
        // [B · HV, N, C, …]
        let by_chunk = |x: &Tensor| x.reshape((batch * heads, chunks, CHUNK, ()));
        let [q, k, v] = qkv.map(by_chunk);
        let (q, k, v, beta) = (q?, k?, v?, by_chunk(beta)?);
        let decay = by_chunk(&decay.contiguous()?)?;
        // Sums of the decays: a product with ones on and below the diagonal.
        let lower = self.lower.broadcast_left((batch * heads, chunks))?;
        let sums = lower.contiguous()?.matmul(&decay)?;
        let between = sums.broadcast_sub(&sums.t()?)?;
        let between = between.broadcast_mul(&self.lower)?.exp()?;
        let between = between.broadcast_mul(&self.lower)?;
        let keys = k.broadcast_mul(&beta)?;
        let products = (keys.matmul(&k.t()?)? * &between)?;
        let mut power = products.broadcast_mul(&self.below)?.neg()?;
        // (1 − A)⁻¹ = (1 + A) (1 + A²) (1 + A⁴) …, since A is nilpotent.
        let one = Tensor::eye(CHUNK, DType::F32, q.device())?;
        let mut inverse = power.broadcast_add(&one)?;
        for _ in 1..CHUNK.ilog2() {
            power = power.matmul(&power)?;
            inverse = (&inverse + inverse.matmul(&power)?)?;
        }
        let values = inverse.matmul(&v.broadcast_mul(&beta)?)?;
        let growth = sums.exp()?;
        let keys = inverse.matmul(&keys.broadcast_mul(&growth)?)?;
        let within = (q.matmul(&k.t()?)? * &between)?;
        let q = q.broadcast_mul(&growth)?;
        let last = sums.narrow(2, CHUNK - 1, 1)?;
        let k = k.broadcast_mul(&last.broadcast_sub(&sums)?.exp()?)?;
        let last = last.exp()?;
        let mut s = state.flatten_to(1)?;
        let mut outputs = Vec::new();
        for i in 0..chunks {
            let of = |x: &Tensor| x.narrow(1, i, 1)?.squeeze(1)?.contiguous();
            let new = (of(&values)? - of(&keys)?.matmul(&s)?)?;
            outputs.push((of(&q)?.matmul(&s)? + of(&within)?.matmul(&new)?)?);
            s = (s.broadcast_mul(&of(&last)?)? + of(&k)?.t()?.matmul(&new)?)?;
        }
        *state = s.reshape(state.shape())?;
        Tensor::cat(&outputs, 1)?.reshape((batch, heads, tokens, dim))
    }
}

/// One token `[B, HV, 1, …]` of the recurrence.
fn step(
    [q, k, v]: [&Tensor; 3],
    decay: &Tensor,
    beta: &Tensor,
    state: &mut Tensor,
) -> candle_core::Result<Tensor> {
    let s = state.broadcast_mul(&decay.exp()?)?;
    let delta = (v - k.matmul(&s)?)?.broadcast_mul(beta)?;
    *state = (s + k.t()?.broadcast_mul(&delta)?)?;
    q.matmul(state)
}

/// Random weights, under the names of Qwen3.5's checkpoints.
fn weights(device: &Device) -> Result<HashMap<String, Tensor>> {
    let random = |dims: &[usize], mean: f32, scale| Tensor::randn(mean, scale, dims, device);
    let of_hidden = |rows| random(&[rows, HIDDEN], 0.0, (HIDDEN as f32).powf(-0.5));
    let named = [
        ("in_proj_qkv.weight", of_hidden(CHANNELS)?),
        ("in_proj_z.weight", of_hidden(VALUES)?),
        ("in_proj_b.weight", of_hidden(VALUE_HEADS)?),
        ("in_proj_a.weight", of_hidden(VALUE_HEADS)?),
        ("conv1d.weight", random(&[CHANNELS, 1, TAPS], 0.0, 0.5)?),
        ("norm.weight", random(&[DIM], 1.0, 0.1)?),
        ("A_log", random(&[VALUE_HEADS], 0.0, 0.5)?),
        ("dt_bias", random(&[VALUE_HEADS], -3.0, 0.5)?),
        ("out_proj.weight", {
            random(&[HIDDEN, VALUES], 0.0, (VALUES as f32).powf(-0.5))?
        }),
    ];
    Ok(named.map(|(name, tensor)| (name.to_owned(), tensor)).into())
}

/// Relative error ‖got − wanted‖ / ‖wanted‖.
fn error(got: &Tensor, wanted: &Tensor) -> Result<f32> {
    let [got, wanted] = [got, wanted].map(|of| of.to_dtype(DType::F32));
    let (got, wanted) = (got?, wanted?);
    let norm = |of: Tensor| of.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    Ok(norm((got - &wanted)?)? / norm(wanted)?)
}

/// Median of the microseconds that a call of `run` takes: calls are enqueued, then waited for.
fn time(device: &Device, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let (measurements, calls) = match device.is_cpu() {
        true => (1, 1),
        false => (15, 20),
    };
    let mut times = Vec::new();
    // The first measurements warm up.
    for _ in 0..measurements + 3 {
        device.synchronize()?;
        let start = Instant::now();
        (0..calls).try_for_each(|_| run())?;
        device.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
    }
    let times = &mut times[3..];
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

struct Layers {
    plain: Plain,
    module: GatedDeltaNet,
    dtype: DType,
    device: Device,
}

impl Layers {
    fn pool(&self, slots: usize) -> Result<StatePool> {
        let (shape, dtype) = (self.module.shape(), self.dtype);
        Ok(StatePool::new(
            shape,
            1,
            slots,
            dtype,
            DType::F32,
            &self.device,
        )?)
    }

    fn hidden(&self, batch: usize, tokens: usize) -> Result<Tensor> {
        let hidden = Tensor::randn(0f32, 1.0, (batch, tokens, HIDDEN), &self.device)?;
        Ok(hidden.to_dtype(self.dtype)?)
    }

    fn rows(&self, batch: usize, tokens: usize, position: usize) -> Result<Rows> {
        let row = |slot| Row {
            slot,
            tokens,
            position,
            ..Row::default()
        };
        let rows: Vec<Row> = (0..batch as u32).map(row).collect();
        Ok(Rows::new(&rows, 64, &self.device)?)
    }

    fn after(&self, hidden: &Tensor, rows: &Rows, states: &LayerStates) -> Result<Tensor> {
        let o = self.module.forward(&hidden.flatten_to(1)?, rows, states)?;
        Ok(o.reshape(hidden.shape())?)
    }

    /// Compares outputs and states of both layers, after a prompt and some decodes.
    fn compare(&self, tolerance: f32) -> Result<()> {
        let (mut kept, pool) = (Kept::zeros(2, &self.device)?, self.pool(2)?);
        let states = pool.layer(0)?;
        let (mut position, mut output) = (0, 0.0);
        for tokens in [4 * CHUNK].into_iter().chain([1; DECODES]) {
            let (hidden, rows) = (self.hidden(2, tokens)?, self.rows(2, tokens, position)?);
            let wanted = self.plain.forward(&hidden, &mut kept)?;
            let got = self.after(&hidden, &rows, states)?;
            output = f32::max(output, error(&got, &wanted)?);
            position += tokens;
        }
        let state = error(&states.states.transpose(2, 3)?.contiguous()?, &kept.state)?;
        println!("before and after: outputs {output:.1e}, states {state:.1e} apart");
        // A NaN fails this comparison.
        ensure!(
            output <= tolerance && state <= tolerance,
            "wanted at most {tolerance:.1e}"
        );
        Ok(())
    }

    /// Times a layer and prints a row of the table.
    fn row(&self, batch: usize, tokens: usize, formulation: Formulation) -> Result<()> {
        let hidden = self.hidden(batch, tokens)?;
        let (rows, pool) = (self.rows(batch, tokens, 1)?, self.pool(batch)?);
        let pool = pool.formulation(formulation);
        let states = pool.layer(0)?;
        let mut kept = Kept::zeros(batch, &self.device)?;
        let before = time(&self.device, || {
            self.plain.forward(&hidden, &mut kept).map(drop)
        })?;
        let after = time(&self.device, || {
            self.after(&hidden, &rows, states).map(drop)
        })?;
        let o = Tensor::zeros((batch, tokens, VALUES), self.dtype, &self.device)?;
        let projections = time(&self.device, || {
            linear(&hidden, &self.plain.in_proj)?;
            Ok(linear(&o, &self.plain.out_proj).map(drop)?)
        })?;
        let share = |whole: f64| 100.0 * (whole - projections).max(0.0) / whole;
        println!(
            "| {batch} × {tokens}, {formulation:?} | {before:.0} | {after:.0} | {projections:.0} | {:.0} % | {:.0} % |",
            share(before),
            share(after)
        );
        Ok(())
    }
}

fn main() -> Result<()> {
    let (device, dtype) = match cfg!(feature = "cuda") {
        true => (Device::new_cuda(0)?, DType::BF16),
        false => (Device::Cpu, DType::F32),
    };
    let weights = weights(&device)?;
    let config = GdnConfig {
        hidden_size: HIDDEN,
        num_key_heads: HEADS,
        num_value_heads: VALUE_HEADS,
        key_head_dim: DIM,
        value_head_dim: DIM,
        conv_kernel: TAPS,
        rms_norm_eps: EPS as f32,
        gate_activation: Activation::Silu,
        beta_scale: BetaScale::One,
    };
    let plain = Plain::new(&weights, dtype, &device)?;
    let vb = VarBuilder::from_tensors(weights, dtype, &device);
    let layers = Layers {
        plain,
        module: GatedDeltaNet::new(&config, &vb)?,
        dtype,
        device,
    };
    layers.compare(match dtype {
        DType::F32 => 1e-4,
        _ => 2e-2,
    })?;
    println!("\nµs of a layer in {dtype:?}, and the part that is not its projections:");
    println!("| rows × tokens | candle's operations | this crate | projections | part | part |");
    println!("|---|---|---|---|---|---|");
    for (batch, tokens) in [(1, 1), (16, 1), (64, 1), (1, 1024)] {
        layers.row(batch, tokens, Formulation::Auto)?;
    }
    layers.row(1, 1024, Formulation::Recurrent)
}
