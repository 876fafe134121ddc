//! Kimi Delta Attention layers of Kimi-Linear.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::VarBuilder;
use gated_delta::{Activation, KdaBeta};

use super::{Projected, Verified, linear, of_rows};
use crate::error::bail;
use crate::pool::{DraftRows, LayerShape, LayerStates, Rows};
use crate::step::{Commit, Convolution, KdaDecay, KdaGates, Norm, States, Stored};
use gated_delta::Operator;

/// Configuration of a model's layers. Field names of Hugging Face's files are in parentheses.
#[derive(Clone, Copy, Debug)]
pub struct KdaConfig {
    /// Width of the hidden states (`hidden_size`)
    pub hidden_size: usize,
    /// Heads, H = HV (`linear_num_heads`, or `num_heads` of `linear_attn_config`)
    pub num_heads: usize,
    /// Head dim, K = V (`linear_head_dim`, or `head_dim` of `linear_attn_config`)
    pub head_dim: usize,
    /// Taps of the convolution, W (`linear_conv_kernel_dim`, or `short_conv_kernel_size`)
    pub conv_kernel: usize,
    /// Epsilon of the norm (`rms_norm_eps`)
    pub rms_norm_eps: f32,
    /// Lower bound of the log decay. With it, log decays are lower bound · sigmoid(exp(A_log) · (f + dt_bias)); without it,
    /// −exp(A_log) · softplus(f + dt_bias).
    pub gate_lower_bound: Option<f32>,
}

/// A Kimi Delta Attention layer (`self_attn` in a checkpoint). Its weights are `q_proj`, `k_proj`, `v_proj` and `q_conv1d`, `k_conv1d`,
/// `v_conv1d`; `f_a_proj`, `f_b_proj`, `A_log`, `dt_bias` for the decays; `b_proj`; `g_a_proj`, `g_b_proj` and `o_norm` for the gated
/// norm; `o_proj`.
///
/// One product makes a row `[q | k | v | f_a | g_a | b]` for every token. Two more products make the inputs of the decays and z.
#[derive(Clone, Debug)]
pub struct KimiDeltaAttention {
    config: KdaConfig,
    /// `[3·H·K + 2·K + H, hidden]`
    in_proj: Tensor,
    /// `[H·K, K]`
    forget: Tensor,
    /// `[H·K, K]`
    gate: Tensor,
    /// `[D, W]`
    conv: Tensor,
    /// `[V]`
    norm: Tensor,
    /// `[H]`
    a_log: Tensor,
    /// `[H, K]`
    dt_bias: Tensor,
    /// `[hidden, H·V]`
    out_proj: Tensor,
}

impl KimiDeltaAttention {
    /// Loads the layer and concatenates its projections and its convolutions.
    ///
    /// # Errors
    /// Errors for missing weights, and for weights whose shapes contradict `config`.
    pub fn new(config: &KdaConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let KdaConfig {
            hidden_size,
            num_heads: h,
            head_dim: k,
            conv_kernel,
            ..
        } = *config;
        let keys = h * k;
        let weight =
            |rows: usize, name: &str| vb.get((rows, hidden_size), &format!("{name}.weight"));
        let in_proj = [
            weight(keys, "q_proj")?,
            weight(keys, "k_proj")?,
            weight(keys, "v_proj")?,
            weight(k, "f_a_proj")?,
            weight(k, "g_a_proj")?,
            weight(h, "b_proj")?,
        ];
        let conv = |name: &str| {
            let weight = vb.get((keys, 1, conv_kernel), &format!("{name}.weight"))?;
            weight.squeeze(1)
        };
        let conv = [conv("q_conv1d")?, conv("k_conv1d")?, conv("v_conv1d")?];
        // Some checkpoints have [1, 1, H, 1], others [H].
        let a_log = vb.get_unchecked_dtype("A_log", DType::F32)?.flatten_all()?;
        if a_log.elem_count() != h {
            return bail!("A_log: wanted H = {h} numbers, got {}", a_log.elem_count());
        }
        let dt_bias =
            vb.get_with_hints_dtype(keys, "dt_bias", candle_nn::Init::Const(0.), DType::F32)?;
        Ok(Self {
            config: *config,
            in_proj: Tensor::cat(&in_proj, 0)?,
            forget: vb.get((keys, k), "f_b_proj.weight")?,
            gate: vb.get((keys, k), "g_b_proj.weight")?,
            conv: Tensor::cat(&conv, 0)?,
            norm: vb.get(k, "o_norm.weight")?,
            a_log,
            dt_bias: dt_bias.reshape((h, k))?,
            out_proj: vb.get((hidden_size, keys), "o_proj.weight")?,
        })
    }

    /// Heads and dims of the layer, to make a [`StatePool`](crate::StatePool) with.
    #[must_use]
    pub fn shape(&self) -> LayerShape {
        let KdaConfig {
            num_heads,
            head_dim,
            conv_kernel,
            ..
        } = self.config;
        LayerShape {
            operator: Operator::Kda,
            heads: num_heads,
            value_heads: num_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            taps: conv_kernel,
        }
    }

    /// Like [`GatedDeltaNet::forward`](crate::GatedDeltaNet::forward).
    ///
    /// # Errors
    /// Shapes and dtypes that do not fit, by name.
    pub fn forward(&self, hidden: &Tensor, rows: &Rows, states: &LayerStates) -> Result<Tensor> {
        let projected = self.project(&of_rows(hidden, rows)?, states)?;
        let o = projected.forward(rows, states)?;
        self.output(&o)?.squeeze(0)
    }

    /// Like [`GatedDeltaNet::verify`](crate::GatedDeltaNet::verify).
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

    /// Like [`GatedDeltaNet::commit`](crate::GatedDeltaNet::commit).
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

    fn gates(&self, forget: &Tensor, beta: &Tensor) -> KdaGates {
        let (a_log, dt_bias) = (self.a_log.clone(), Some(self.dt_bias.clone()));
        let kind = match self.config.gate_lower_bound {
            None => KdaDecay::Softplus { a_log, dt_bias },
            Some(lower_bound) => KdaDecay::LowerBound {
                lower_bound,
                a_log: Some(a_log),
                dt_bias,
            },
        };
        KdaGates::new(forget, kind, beta, KdaBeta::Logit)
    }

    fn convolution(&self, x: &Tensor, states: &LayerStates) -> Convolution {
        Convolution::new(x, self.config.num_heads, &self.conv, &states.windows)
    }

    /// Projects hidden states `[B, T, hidden]`.
    fn project(&self, hidden: &Tensor, states: &LayerStates) -> Result<Projected> {
        let KdaConfig {
            num_heads: h,
            head_dim: k,
            rms_norm_eps: eps,
            ..
        } = self.config;
        let channels = 3 * h * k;
        let row = linear(hidden, &self.in_proj)?;
        let (batch, tokens, _) = row.dims3()?;
        let part = |start, len| row.narrow(D::Minus1, start, len);
        let forget = linear(&part(channels, k)?, &self.forget)?;
        let forget = forget.reshape((batch, tokens, h, k))?;
        let z = linear(&part(channels + k, k)?, &self.gate)?;
        let beta = part(channels + 2 * k, h)?;
        Ok(Projected {
            conv: self.convolution(&part(0, channels)?, states),
            gates: self.gates(&forget, &beta).into(),
            norm: Norm::new(&z, &self.norm, eps).activation(Activation::Sigmoid),
        })
    }

    fn output(&self, o: &Tensor) -> Result<Tensor> {
        linear(&o.flatten_from(2)?, &self.out_proj)
    }
}
