//! Layers of published models.

use gated_delta::{Activation, BetaScale, DType, KdaBeta, Options, StateLayout};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};

use crate::error::Error;
use crate::op::Op;
use crate::problem::Problem;
use crate::tensor::HostTensor;

/// A published model whose layers the demo runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// Qwen3-Next-80B-A3B.
    #[default]
    #[value(name = "qwen3-next")]
    Qwen3Next,
    /// Qwen3.5-397B-A17B.
    #[value(name = "qwen3.5-397b")]
    Qwen35,
    /// Kimi-Linear-48B-A3B, whose layers are KDA.
    #[value(name = "kimi-linear")]
    KimiLinear,
}

/// Taps W of the convolution, in all of these models.
const TAPS: usize = 4;

/// Sizes of a linear-attention layer with K = V.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Form of the gates, which also decides the operator.
    pub gates: GateKind,
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV.
    pub value_heads: usize,
    /// K and V.
    pub dim: usize,
}

/// Pool of states of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Slots, P.
    pub slots: usize,
    /// Dtype of the states, f32 or bf16.
    pub dtype: DType,
    /// Layout of the states: which dim is contiguous.
    pub layout: StateLayout,
}

/// Layers by name.
pub const LAYERS: [(&str, Layer); 3] = [
    ("qwen3-next", gdn(16, 32)),
    ("qwen3.5-397b", gdn(16, 64)),
    (
        "kimi-linear",
        Layer {
            gates: GateKind::Kda(DecayKind::Softplus, KdaBeta::Logit),
            heads: 32,
            value_heads: 32,
            dim: 128,
        },
    ),
];

const fn gdn(heads: usize, value_heads: usize) -> Layer {
    Layer {
        gates: GateKind::Raw(BetaScale::One),
        heads,
        value_heads,
        dim: 128,
    }
}

impl Model {
    /// Name and linear-attention layer of the model.
    #[must_use]
    pub fn layer(self) -> (&'static str, Layer) {
        LAYERS[self as usize]
    }
}

impl Layer {
    /// A problem of `tokens` tokens in each of `batch` rows: bf16 tensors, f32 `A_log` and `dt_bias`, all NaN.
    ///
    /// # Errors
    /// The errors of [`HostTensor::new`].
    pub fn blank(self, batch: usize, tokens: usize, pool: Pool) -> Result<Problem, Error> {
        let Self {
            gates,
            heads,
            value_heads,
            dim,
        } = self;
        let per_channel = gates.operator() == Operator::Kda;
        let gate_dims = |leading: &[usize]| match per_channel {
            true => [leading, &[value_heads, dim]].concat(),
            false => [leading, &[value_heads]].concat(),
        };
        let [gate, beta] = gates.names();
        let (q, v) = (
            vec![batch, tokens, heads, dim],
            vec![batch, tokens, value_heads, dim],
        );
        let tensors = [
            ("q", DType::Bf16, q.clone()),
            ("k", DType::Bf16, q),
            ("o", DType::Bf16, v.clone()),
            ("v", DType::Bf16, v),
            (gate, DType::Bf16, gate_dims(&[batch, tokens])),
            (beta, DType::Bf16, vec![batch, tokens, value_heads]),
            ("A_log", DType::F32, vec![value_heads]),
            ("dt_bias", DType::F32, gate_dims(&[])),
            ("state", pool.dtype, vec![pool.slots, value_heads, dim, dim]),
        ];
        let tensors = tensors
            .into_iter()
            .map(|(name, dtype, dims)| Ok((name, HostTensor::new(dtype, &dims)?)));
        Ok(Problem {
            op: Op::of(gates.operator(), tokens),
            gates,
            tensors: tensors.collect::<Result<_, Error>>()?,
            update_state: true,
            options: Options::default().state_layout(pool.layout),
            max_tokens: None,
            checkpoint_every: None,
            max_pending: None,
            heads: None,
            conv_activation: Activation::Silu,
            norm_eps: None,
            norm_activation: Activation::Silu,
        })
    }

    /// As [`blank`](Self::blank), for the whole layer: a projection `x` and its convolution in place of `q`, `k` and `v`, and a norm gated
    /// by `z`, all bf16.
    ///
    /// # Errors
    /// The errors of [`HostTensor::new`].
    pub fn blank_layer(self, batch: usize, tokens: usize, pool: Pool) -> Result<Problem, Error> {
        let mut problem = self.blank(batch, tokens, pool)?;
        for name in ["q", "k", "v"] {
            problem.tensors.remove(name);
        }
        let channels = (2 * self.heads + self.value_heads) * self.dim;
        for (name, dims) in [
            ("x", vec![batch, tokens, channels]),
            ("conv_weight", vec![channels, TAPS]),
            ("conv_state", vec![pool.slots, channels, TAPS - 1]),
            ("z", vec![batch, tokens, self.value_heads, self.dim]),
            ("norm_weight", vec![self.dim]),
        ] {
            let tensor = HostTensor::new(DType::Bf16, &dims)?;
            problem.tensors.insert(name, tensor);
        }
        (problem.norm_eps, problem.norm_activation) = match self.gates.operator() {
            Operator::Gdn => (Some(1e-6), Activation::Silu),
            Operator::Kda => (Some(1e-5), Activation::Sigmoid),
        };
        problem.heads = Some(self.heads);
        Ok(problem)
    }
}
