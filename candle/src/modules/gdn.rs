//! Gated DeltaNet layers of Qwen3-Next and Qwen3.5.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::VarBuilder;
use gated_delta::{Activation, BetaScale};

use super::{Projected, Verified, linear, of_rows};
use crate::pool::{DraftRows, LayerShape, LayerStates, Rows};
use crate::step::{Commit, Convolution, GdnGates, Norm, States, Stored};
use gated_delta::Operator;

/// Configuration of a model's layers. Field names of Hugging Face's files are in parentheses.
#[derive(Clone, Copy, Debug)]
pub struct GdnConfig {
    /// Width of the hidden states (`hidden_size`)
    pub hidden_size: usize,
    /// Query/key heads, H (`linear_num_key_heads`)
    pub num_key_heads: usize,
    /// Value heads, HV (`linear_num_value_heads`)
    pub num_value_heads: usize,
    /// Head dim of q and k, K (`linear_key_head_dim`)
    pub key_head_dim: usize,
    /// Head dim of v, V (`linear_value_head_dim`)
    pub value_head_dim: usize,
    /// Taps of the convolution, W (`linear_conv_kernel_dim`)
    pub conv_kernel: usize,
    /// Epsilon of the norm (`rms_norm_eps`)
    pub rms_norm_eps: f32,
    /// Activation of the norm's z: SiLU in all models but `qwen4_exp`.
    pub gate_activation: Activation,
    /// Range of β: (0, 1), or (0, 2) with [`BetaScale::Two`].
    pub beta_scale: BetaScale,
}

/// A Gated DeltaNet layer (`linear_attn` in a checkpoint). Its weights are `conv1d`, `A_log`, `dt_bias`, `norm`, `out_proj`, and
/// either `in_proj_qkvz` and `in_proj_ba`, interleaved by key head (Qwen3-Next), or `in_proj_qkv`, `in_proj_z`, `in_proj_b` and
/// `in_proj_a` (Qwen3.5 and later).
///
/// One product makes a row `[q | k | v | z | b | a]` for every token. The launch takes views of this row.
#[derive(Clone, Debug)]
pub struct GatedDeltaNet {
    config: GdnConfig,
    /// `[D + HV·V + 2·HV, hidden]`
    in_proj: Tensor,
    /// `[D, W]`
    conv: Tensor,
    /// `[V]`
    norm: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    /// `[hidden, HV·V]`
    out_proj: Tensor,
}

impl GatedDeltaNet {
    /// Loads the layer, and reorders the rows of its weights as the launch needs them.
    ///
    /// # Errors
    /// Errors for missing weights, and for weights whose shapes contradict `config`.
    pub fn new(config: &GdnConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let GdnConfig {
            hidden_size,
            num_key_heads: h,
            num_value_heads: hv,
            key_head_dim: k,
            value_head_dim: v,
            ..
        } = *config;
        let (channels, values) = (2 * h * k + hv * v, hv * v);
        let weight =
            |rows: usize, name: &str| vb.get((rows, hidden_size), &format!("{name}.weight"));
        let in_proj = if vb.contains_tensor("in_proj_qkvz.weight") {
            if h == 0 || !hv.is_multiple_of(h) {
                return crate::error::bail!(
                    "num_value_heads: wanted a multiple of H = {h}, got {hv}"
                );
            }
            let r = hv / h;
            let qkvz = weight(channels + values, "in_proj_qkvz")?;
            let ba = weight(2 * hv, "in_proj_ba")?;
            let [qkvz, ba] = [
                by_part(&qkvz, &[k, k, r * v, r * v])?,
                by_part(&ba, &[r, r])?,
            ];
            Tensor::cat(&[qkvz, ba], 0)?
        } else {
            let parts = [
                weight(channels, "in_proj_qkv")?,
                weight(values, "in_proj_z")?,
                weight(hv, "in_proj_b")?,
                weight(hv, "in_proj_a")?,
            ];
            Tensor::cat(&parts, 0)?
        };
        let conv = vb.get((channels, 1, config.conv_kernel), "conv1d.weight")?;
        let f32s = |name| vb.get_with_hints_dtype(hv, name, candle_nn::Init::Const(0.), DType::F32);
        Ok(Self {
            config: *config,
            in_proj,
            conv: conv.squeeze(1)?,
            norm: vb.get(v, "norm.weight")?,
            a_log: f32s("A_log")?,
            dt_bias: f32s("dt_bias")?,
            out_proj: vb.get((hidden_size, values), "out_proj.weight")?,
        })
    }

    /// Heads and dims of the layer, to make a [`StatePool`](crate::StatePool) with.
    #[must_use]
    pub fn shape(&self) -> LayerShape {
        LayerShape {
            operator: Operator::Gdn,
            heads: self.config.num_key_heads,
            value_heads: self.config.num_value_heads,
            key_dim: self.config.key_head_dim,
            value_dim: self.config.value_head_dim,
            taps: self.config.conv_kernel,
        }
    }

    /// Outputs `[total, hidden]` for the hidden states `[total, hidden]` of packed rows of different lengths: prompts, chunks of
    /// prompts, single tokens. Updates states and windows in the rows' slots.
    ///
    /// # Errors
    /// Shapes and dtypes that do not fit, by name.
    pub fn forward(&self, hidden: &Tensor, rows: &Rows, states: &LayerStates) -> Result<Tensor> {
        let projected = self.project(&of_rows(hidden, rows)?, states)?;
        let o = projected.forward(rows, states)?;
        self.output(&o)?.squeeze(0)
    }

    /// Outputs `[B, T, hidden]` for the hidden states `[B, T, hidden]` of rows with drafts, and tensors to keep until the engine
    /// knows which drafts are accepted. With `previous`, the same launch first commits the first `keep` of those tokens to the
    /// states. The new tokens are not committed.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    pub fn verify(
        &self,
        hidden: &Tensor,
        rows: &DraftRows,
        previous: Option<&Verified>,
        states: &LayerStates,
    ) -> Result<(Tensor, Verified)> {
        let projected = self.project(hidden, states)?;
        let (o, verified) = projected.verify(rows, previous, states)?;
        Ok((self.output(&o)?, verified))
    }

    /// Commits the first `keep` verified tokens of rows to their states, before the rows continue without drafts or are copied.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    pub fn commit(
        &self,
        verified: &Verified,
        rows: &DraftRows,
        states: &LayerStates,
    ) -> Result<()> {
        let Verified { x, gate, beta } = verified;
        let conv = self.convolution(x, states);
        let pool = States::update(&states.states, &rows.slots);
        let mut commit = Commit::new(Stored::Conv(conv), self.gates(gate, beta), &rows.keep, pool);
        commit.options = states.options();
        commit.run()
    }

    fn gates(&self, a: &Tensor, b: &Tensor) -> GdnGates {
        GdnGates::raw(a, b, &self.a_log, &self.dt_bias).beta_scale(self.config.beta_scale)
    }

    fn convolution(&self, x: &Tensor, states: &LayerStates) -> Convolution {
        Convolution::new(x, self.config.num_key_heads, &self.conv, &states.windows)
    }

    /// Projects hidden states `[B, T, hidden]`.
    fn project(&self, hidden: &Tensor, states: &LayerStates) -> Result<Projected> {
        let GdnConfig {
            num_value_heads: hv,
            value_head_dim: v,
            rms_norm_eps: eps,
            ..
        } = self.config;
        let (channels, values) = (self.shape().channels(), hv * v);
        let row = linear(hidden, &self.in_proj)?;
        let part = |start, len| row.narrow(D::Minus1, start, len);
        let x = part(0, channels)?;
        let z = part(channels, values)?;
        let b = part(channels + values, hv)?;
        let a = part(channels + values + hv, hv)?;
        Ok(Projected {
            conv: self.convolution(&x, states),
            gates: self.gates(&a, &b).into(),
            norm: Norm::new(&z, &self.norm, eps).activation(self.config.gate_activation),
        })
    }

    fn output(&self, o: &Tensor) -> Result<Tensor> {
        linear(&o.flatten_from(2)?, &self.out_proj)
    }
}

/// Reorders the rows of a weight in which each key head has all `parts`. In the result, all heads' rows of the first part come
/// first, then those of the second part, and so on.
fn by_part(weight: &Tensor, parts: &[usize]) -> Result<Tensor> {
    let (rows, hidden) = weight.dims2()?;
    let of_head: usize = parts.iter().sum();
    let weight = weight.reshape((rows / of_head, of_head, hidden))?;
    let mut first = 0;
    let mut ordered = Vec::new();
    for &part in parts {
        ordered.push(weight.narrow(1, first, part)?.flatten_to(1)?);
        first += part;
    }
    Tensor::cat(&ordered, 0)
}
