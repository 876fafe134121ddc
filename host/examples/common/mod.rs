//! Shared parts of the examples: random inputs of a step, the reference's results, and the check against them.
#![allow(dead_code, reason = "each example uses a part of it")]

pub mod engine;
pub mod layer;
pub mod model;

use anyhow::{Result, bail, ensure};
use gated_delta::Error;
use gated_delta::driver::Device;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::recurrent::{Output, Recurrent, TokenGates, recurrent};
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Tolerance of ‖o − truth‖ / ‖truth‖ per token, with o in bf16. The rounding of o alone gives 1.7e-3.
pub const OUTPUT_TOLERANCE: f64 = 3e-3;

/// Tolerance of ‖S − truth‖ / ‖truth‖ per slot, with S in f32.
pub const STATE_TOLERANCE: f64 = 1e-5;

/// The first GPU; `None` without one, or an error if `GATED_DELTA_REQUIRE_GPU=1`.
pub fn gpu() -> Result<Option<Device>> {
    match Device::get(0) {
        Ok(device) => {
            println!("{}", device.name()?);
            Ok(Some(device))
        }
        Err(absence @ (Error::NoDriver { .. } | Error::NoDevice)) => {
            if std::env::var_os("GATED_DELTA_REQUIRE_GPU").is_some_and(|value| value == "1") {
                bail!("GATED_DELTA_REQUIRE_GPU=1, but {absence}");
            }
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Like [`gpu`]. Prints a message if there is no GPU, for an example that needs one.
pub fn gpu_or_skip() -> Result<Option<Device>> {
    let device = gpu()?;
    if device.is_none() {
        println!("no GPU, skipped");
    }
    Ok(device)
}

/// A GDN layer with K = V, a batch and a pool.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// B, the number of rows.
    pub batch: usize,
    /// T, the number of tokens of a row.
    pub tokens: usize,
    /// H, the number of query/key heads.
    pub heads: usize,
    /// HV, the number of value heads.
    pub value_heads: usize,
    /// K and V, the head dims.
    pub dim: usize,
    /// P, the number of slots.
    pub slots: usize,
}

impl Shape {
    /// Number of elements per slot.
    pub fn state(&self) -> usize {
        self.value_heads * self.dim * self.dim
    }
}

/// Inputs of one step: bf16 tensors, f32 states, all K-last and contiguous.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Sizes of the tensors.
    pub shape: Shape,
    /// `[B, T, H, K]`.
    pub q: Vec<bf16>,
    /// `[B, T, H, K]`.
    pub k: Vec<bf16>,
    /// `[B, T, HV, V]`.
    pub v: Vec<bf16>,
    /// `[B, T, HV]`.
    pub a: Vec<bf16>,
    /// `[B, T, HV]`.
    pub b: Vec<bf16>,
    /// `[HV]`.
    pub a_log: Vec<f32>,
    /// `[HV]`.
    pub dt_bias: Vec<f32>,
    /// `[P, HV, V, K]`, before the step.
    pub states: Vec<f32>,
    /// `[B, T, HV, V]`, full of NaN, so that a launch has to overwrite every element.
    pub o: Vec<bf16>,
}

/// The rows of a step, which change from one step to the next.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Slot that each row reads and writes, `[B]`; out of range for padding.
    pub slots: Vec<i32>,
    /// Bounds of rows of different lengths, `[B + 1]`. The tokens of all rows then lie at the start of the B · T tokens.
    pub cu_seqlens: Option<Vec<i32>>,
}

impl Rows {
    /// Rows of one token each.
    pub fn decoded(slots: &[i32]) -> Self {
        Self {
            slots: slots.to_vec(),
            cu_seqlens: None,
        }
    }
}

impl Inputs {
    /// Random inputs: equal seeds give equal inputs.
    pub fn random(shape: Shape, seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let tokens = shape.batch * shape.tokens;
        let (qk, vo) = (shape.heads * shape.dim, shape.value_heads * shape.dim);
        Self {
            shape,
            q: rounded(uniform(rng, tokens * qk, -1.0, 1.0)),
            k: rounded(uniform(rng, tokens * qk, -1.0, 1.0)),
            v: rounded(uniform(rng, tokens * vo, -1.0, 1.0)),
            a: rounded(uniform(rng, tokens * shape.value_heads, -2.0, 2.0)),
            b: rounded(uniform(rng, tokens * shape.value_heads, -2.0, 2.0)),
            a_log: uniform(rng, shape.value_heads, -3.0, 0.0),
            dt_bias: uniform(rng, shape.value_heads, -1.0, 1.0),
            states: uniform(rng, shape.slots * shape.state(), -1.0, 1.0),
            o: vec![bf16::NAN; tokens * vo],
        }
    }

    /// The reference's results of a step of `rows` that starts from `states`.
    pub fn truth(&self, states: &[f32], rows: &Rows) -> Result<Output> {
        let slots: Vec<i64> = rows.slots.iter().map(|&slot| slot.into()).collect();
        let cu_seqlens: Option<Vec<i64>> = rows
            .cu_seqlens
            .as_ref()
            .map(|bounds| bounds.iter().map(|&bound| bound.into()).collect());
        let Shape {
            batch,
            tokens,
            heads,
            value_heads,
            dim,
            ..
        } = self.shape;
        let [a, b] = [&self.a, &self.b].map(|values| doubles(values));
        let [a_log, dt_bias] = [&self.a_log, &self.dt_bias].map(|values| doubles(values));
        let gates = TokenGates::Gdn(Gates::Raw {
            a: &a,
            b: &b,
            a_log: &a_log,
            dt_bias: &dt_bias,
            beta_scale: 1.0,
        });
        let step = Recurrent {
            q: &doubles(&self.q),
            k: &doubles(&self.k),
            v: &doubles(&self.v),
            read_slots: Some(&slots),
            cu_seqlens: cu_seqlens.as_deref(),
            ..Recurrent::new([batch, tokens], [heads, value_heads], [dim, dim], gates)
        };
        Ok(recurrent(&step, &doubles(states), None, None)?)
    }

    /// Checks a step of `rows` that started from `before`: its outputs, and every slot of the pool.
    pub fn check(&self, before: &[f32], rows: &Rows, o: &[bf16], states: &[f32]) -> Result<()> {
        let truth = self.truth(before, rows)?;
        let token = self.shape.value_heads * self.shape.dim;
        let outputs = worst("o", o, &truth.o, token, OUTPUT_TOLERANCE)?;
        let slot = self.shape.state();
        let written = worst("state", states, &truth.pool, slot, STATE_TOLERANCE)?;
        let both = before.chunks(slot).zip(states.chunks(slot));
        for (index, (before, after)) in both.enumerate() {
            let live = rows.slots.contains(&i32::try_from(index)?);
            let kept = same_bits(before, after);
            ensure!(
                live || kept,
                "slot {index} belongs to no row, and was written"
            );
        }
        println!("  {rows}: o within {outputs:.1e} of the reference, states within {written:.1e}");
        Ok(())
    }
}

impl std::fmt::Display for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "slots {:?}", self.slots)?;
        match &self.cu_seqlens {
            Some(bounds) => write!(f, ", cu_seqlens {bounds:?}"),
            None => Ok(()),
        }
    }
}

/// Compares chunks of `chunk` elements. Returns the largest relative error, which must be within `tolerance`. Where the truth is
/// zero, `got` must be zero. Where the truth is NaN, nothing was written, and `got` must be NaN.
pub fn worst<T>(name: &str, got: &[T], truth: &[f64], chunk: usize, tolerance: f64) -> Result<f64>
where
    T: Copy + Into<f64>,
{
    let (wanted, came) = (truth.len(), got.len());
    ensure!(
        came == wanted,
        "{name}: wanted {wanted} elements, got {came}"
    );
    let mut worst = 0.0;
    for (index, (got, truth)) in got.chunks(chunk).zip(truth.chunks(chunk)).enumerate() {
        let (mut error, mut size) = (0.0, 0.0);
        for (got, truth) in got.iter().map(|&got| got.into()).zip(truth) {
            ensure!(
                got.is_nan() == truth.is_nan(),
                "{name}[{index}]: wanted {truth}, got {got}"
            );
            if !got.is_nan() {
                error += (got - truth).powi(2);
                size += truth.powi(2);
            }
        }
        let (error, size) = (error.sqrt(), size.sqrt());
        ensure!(
            error <= tolerance * size,
            "{name}[{index}]: {error:e} off, of {size:e}"
        );
        if size > 0.0 {
            worst = f64::max(worst, error / size);
        }
    }
    Ok(worst)
}

/// Random numbers from `low` to `high`.
pub fn uniform(rng: &mut StdRng, len: usize, low: f32, high: f32) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(low..high)).collect()
}

/// The values rounded to bf16.
pub fn rounded(values: Vec<f32>) -> Vec<bf16> {
    values.into_iter().map(bf16::from_f32).collect()
}

/// The values as f64.
pub fn doubles<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

/// Whether two slices are equal, bit for bit.
pub fn same_bits<T: bytemuck::NoUninit>(one: &[T], other: &[T]) -> bool {
    bytemuck::cast_slice::<T, u8>(one) == bytemuck::cast_slice::<T, u8>(other)
}
