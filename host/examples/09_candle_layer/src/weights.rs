//! The weights of a layer, from the names and orders of transformers to those that the engine launches with: once, at
//! load.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor, safetensors};

/// A file of tensors.
pub struct Tensors(HashMap<String, Tensor>);

impl Tensors {
    /// All of a safetensors file.
    pub fn read(path: &Path) -> Result<Self> {
        let tensors = safetensors::load(path, &Device::Cpu);
        Ok(Self(tensors.with_context(|| path.display().to_string())?))
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.0
            .get(name)
            .with_context(|| format!("no tensor {name}"))
    }

    /// A weight by its name.
    fn weight(&self, name: &str) -> Result<&Tensor> {
        self.get(&format!("weights.{name}"))
    }

    /// Weights one behind the other.
    fn weights(&self, names: &[&str]) -> Result<Tensor> {
        let parts: Result<Vec<_>> = names.iter().map(|name| self.weight(name)).collect();
        Ok(Tensor::cat(&parts?, 0)?)
    }
}

/// What a model's configuration says of a layer.
#[derive(Clone, Copy)]
pub struct Shape {
    /// H
    pub heads: usize,
    /// HV
    pub value_heads: usize,
    /// K and V
    pub dim: usize,
    /// Of the norm.
    pub eps: f32,
}

impl Shape {
    /// D
    pub fn channels(&self) -> usize {
        (2 * self.heads + self.value_heads) * self.dim
    }

    /// HV·V
    pub fn values(&self) -> usize {
        self.value_heads * self.dim
    }
}

/// Which layer it is: the second part of its projection, behind q, k and v, and what comes of that.
pub enum Operator {
    /// `[q | k | v | z | b | a]`.
    Gdn,
    /// `[q | k | v | f_a | g_a | b]`: the gates go through a second projection of K channels each.
    Kda {
        /// `[HV·K, K]`: f_a to the forget gate.
        forget: Tensor,
        /// `[HV·V, K]`: g_a to z.
        gate: Tensor,
    },
}

/// A layer's weights.
pub struct Weights {
    pub shape: Shape,
    pub operator: Operator,
    /// `[width, hidden]`: one product for all that is made of the hidden states.
    pub projection: Tensor,
    /// `[hidden, HV·V]`
    pub output: Tensor,
    /// `[D, W]`
    pub conv: Tensor,
    /// `[V]`
    pub norm: Tensor,
    /// f32, `[HV]`
    pub a_log: Tensor,
    /// f32, `[HV]`, with KDA `[HV, K]`
    pub dt_bias: Tensor,
}

impl Weights {
    /// Qwen3-Next's: the rows of its projections are interleaved by query/key head.
    pub fn qwen3_next(file: &Tensors, shape: Shape) -> Result<Self> {
        let Shape {
            heads,
            value_heads,
            dim,
            ..
        } = shape;
        let values = value_heads / heads * dim;
        let qkvz = by_part(
            file.weight("in_proj_qkvz.weight")?,
            [dim, dim, values, values],
        )?;
        let ba = by_part(file.weight("in_proj_ba.weight")?, [value_heads / heads; 2])?;
        Ok(Self {
            shape,
            operator: Operator::Gdn,
            projection: Tensor::cat(&[qkvz, ba], 0)?,
            output: file.weight("out_proj.weight")?.clone(),
            conv: file.weight("conv1d.weight")?.squeeze(1)?,
            norm: file.weight("norm.weight")?.clone(),
            a_log: file.weight("A_log")?.clone(),
            dt_bias: file.weight("dt_bias")?.clone(),
        })
    }

    /// Kimi-Linear's: a projection for each part.
    pub fn kimi_linear(file: &Tensors, shape: Shape) -> Result<Self> {
        let projection = file.weights(&[
            "q_proj.weight",
            "k_proj.weight",
            "v_proj.weight",
            "forget_gate.f_a_proj.weight",
            "g_a_proj.weight",
            "b_proj.weight",
        ])?;
        let dt_bias = file.weight("forget_gate.dt_bias")?;
        Ok(Self {
            shape,
            operator: Operator::Kda {
                forget: file.weight("forget_gate.f_b_proj.weight")?.clone(),
                gate: file.weight("g_b_proj.weight")?.clone(),
            },
            projection,
            output: file.weight("o_proj.weight")?.clone(),
            conv: file.weight("conv1d.weight")?.squeeze(1)?,
            norm: file.weight("o_norm.weight")?.clone(),
            a_log: file.weight("forget_gate.A_log")?.clone(),
            dt_bias: dt_bias.reshape((shape.value_heads, shape.dim))?,
        })
    }
}

/// Of rows that each query/key head has `parts` of, one part behind the other: all heads' of the first part, and so on.
fn by_part<const N: usize>(weight: &Tensor, parts: [usize; N]) -> Result<Tensor> {
    let (rows, hidden) = weight.dims2()?;
    let of_head: usize = parts.iter().sum();
    let weight = weight.reshape((rows / of_head, of_head, hidden))?;
    let mut first = 0;
    let mut ordered = Vec::new();
    for part in parts {
        ordered.push(weight.narrow(1, first, part)?.flatten_to(1)?);
        first += part;
    }
    Ok(Tensor::cat(&ordered, 0)?)
}
