//! Feed-forward layers in candle: dense, or experts with a shared one, with Qwen's or Kimi's routing.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

use crate::model::{Config, linear};

/// A multilayer perceptron, down(silu(gate(x)) · up(x)).
struct Mlp {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Mlp {
    fn new(hidden: usize, inner: usize, names: [&str; 3], vb: &VarBuilder<'_>) -> Result<Self> {
        let [gate, up, down] = names.map(|name| format!("{name}.weight"));
        Ok(Self {
            gate: vb.get((inner, hidden), &gate)?,
            up: vb.get((inner, hidden), &up)?,
            down: vb.get((hidden, inner), &down)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let gated = (linear(x, &self.gate)?.silu()? * linear(x, &self.up)?)?;
        linear(&gated, &self.down)
    }
}

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

pub enum FeedForward {
    Dense(Box<Dense>),
    Experts(Box<Experts>),
}

pub struct Dense(Mlp);

pub struct Experts {
    router: Tensor,
    /// Kimi: added to the scores that experts are chosen by.
    correction: Option<Vec<f32>>,
    experts: Vec<Mlp>,
    shared: Mlp,
    /// Qwen: weights of the gate logit of the shared expert.
    shared_gate: Option<Tensor>,
    chosen: usize,
    scale: f32,
}

impl FeedForward {
    pub fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.usize("hidden_size")?;
        let is_kimi = vb.contains_tensor("block_sparse_moe.gate.weight");
        let vb = vb.pp(if is_kimi { "block_sparse_moe" } else { "mlp" });
        if !vb.contains_tensor("gate.weight") {
            let inner = config.usize("intermediate_size")?;
            return Ok(Self::Dense(Box::new(Dense(Mlp::new(
                hidden, inner, NAMES, &vb,
            )?))));
        }
        let count = config.usize("num_experts")?;
        let inner = config.usize("moe_intermediate_size")?;
        let names = if is_kimi { ["w1", "w3", "w2"] } else { NAMES };
        let experts = (0..count)
            .map(|i| Mlp::new(hidden, inner, names, &vb.pp(format!("experts.{i}"))))
            .collect::<Result<_>>()?;
        let router = vb.get((count, hidden), "gate.weight")?;
        let experts = match is_kimi {
            true => Experts {
                router,
                correction: Some(vb.get(count, "gate.e_score_correction_bias")?.to_vec1()?),
                experts,
                shared: {
                    let inner = inner * config.usize("num_shared_experts")?;
                    Mlp::new(hidden, inner, NAMES, &vb.pp("shared_experts"))?
                },
                shared_gate: None,
                chosen: config.usize("num_experts_per_token")?,
                scale: config.f64("routed_scaling_factor")? as f32,
            },
            false => Experts {
                router,
                correction: None,
                experts,
                shared: {
                    let inner = config.usize("shared_expert_intermediate_size")?;
                    Mlp::new(hidden, inner, NAMES, &vb.pp("shared_expert"))?
                },
                shared_gate: Some(vb.get((1, hidden), "shared_expert_gate.weight")?),
                chosen: config.usize("num_experts_per_tok")?,
                scale: 1.0,
            },
        };
        Ok(Self::Experts(Box::new(experts)))
    }

    /// Feed-forward of `x` `[n, hidden]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(dense) => Ok(dense.0.forward(x)?),
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

impl Experts {
    /// The host reads the routing back, which is simple, but waits for a GPU.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let logits = linear(x, &self.router)?.to_dtype(DType::F32)?;
        let scores = match self.correction {
            Some(_) => candle_nn::ops::sigmoid(&logits)?,
            None => candle_nn::ops::softmax_last_dim(&logits)?,
        };
        // For every expert, its tokens and their weights.
        let mut of_expert = vec![(Vec::new(), Vec::new()); self.experts.len()];
        for (token, scores) in scores.to_vec2::<f32>()?.iter().enumerate() {
            let by = |i: &usize| scores[*i] + self.correction.as_ref().map_or(0.0, |of| of[*i]);
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|i, j| by(j).total_cmp(&by(i)));
            let chosen = &order[..self.chosen.min(order.len())];
            let sum: f32 = chosen.iter().map(|&i| scores[i]).sum();
            for &i in chosen {
                of_expert[i].0.push(token as u32);
                of_expert[i].1.push(scores[i] / sum * self.scale);
            }
        }
        let mut sum = self.shared.forward(x)?;
        if let Some(gate) = &self.shared_gate {
            let gate = candle_nn::ops::sigmoid(&linear(x, gate)?)?;
            sum = sum.broadcast_mul(&gate)?;
        }
        for (expert, (tokens, weights)) in self.experts.iter().zip(of_expert) {
            if tokens.is_empty() {
                continue;
            }
            let count = tokens.len();
            let tokens = Tensor::from_vec(tokens, count, x.device())?;
            let weights = Tensor::from_vec(weights, (count, 1), x.device())?;
            let out = expert.forward(&x.index_select(&tokens, 0)?)?;
            sum = sum.index_add(&tokens, &out.broadcast_mul(&weights)?, 0)?;
        }
        Ok(sum)
    }
}
