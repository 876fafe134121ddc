//! Random weights of a whole layer on the host, outputs of its projection, and the reference's results.

use std::ops::Range;

use anyhow::Result;
use gated_delta::Operator;
use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::layer::{self, Layer, LayerOutput, Pools, Projection};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Recurrent, TokenGates};
use gated_delta_reference::{gdn, kda};
use half::bf16;
use rand::rngs::StdRng;

use super::{doubles, rounded, uniform};

/// W, the number of taps.
pub const TAPS: usize = 4;

/// Epsilon of the norm.
pub const EPS: f32 = 1e-6;

/// A layer. The projection's output is a row `[q | k | v | z | b | a]` for every token; KDA has g in place of a.
pub struct Model {
    operator: Operator,
    /// H, HV, and K = V.
    dims: [usize; 3],
    /// `[D, W]`.
    pub conv: Vec<bf16>,
    /// `[V]`.
    pub norm: Vec<bf16>,
    /// `[HV]`.
    pub a_log: Vec<f32>,
    /// `[HV]`, for KDA `[HV, K]`.
    pub dt_bias: Vec<f32>,
}

impl Model {
    /// Random weights.
    pub fn random(operator: Operator, dims: [usize; 3], rng: &mut StdRng) -> Self {
        let [h, hv, k] = dims;
        let decays = if operator == Operator::Kda {
            hv * k
        } else {
            hv
        };
        Self {
            operator,
            dims,
            conv: rounded(uniform(rng, (2 * h + hv) * k * TAPS, -0.5, 0.5)),
            norm: rounded(uniform(rng, k, 0.5, 1.5)),
            a_log: uniform(rng, hv, -3.0, 0.0),
            dt_bias: uniform(rng, decays, -1.0, 1.0),
        }
    }

    /// Random rows of the projection's output for `tokens` tokens.
    pub fn sequence(&self, tokens: usize, rng: &mut StdRng) -> Vec<bf16> {
        rounded(uniform(rng, tokens * self.width(), -1.0, 1.0))
    }

    /// Columns of x, z, b, and a or g in a row.
    pub fn parts(&self) -> [Range<usize>; 4] {
        let [h, hv, k] = self.dims;
        let mut end = 0;
        [(2 * h + hv) * k, hv * k, hv, self.dt_bias.len()].map(|len| {
            end += len;
            end - len..end
        })
    }

    /// D, the number of channels.
    pub fn channels(&self) -> usize {
        self.parts()[0].end
    }

    /// Number of elements of a row.
    pub fn width(&self) -> usize {
        self.parts()[3].end
    }

    /// The reference's results for all tokens of a sequence, starting from a state and a window of zeros.
    pub fn truth(&self, sequence: &[bf16]) -> Result<LayerOutput> {
        let ([h, hv, k], d) = (self.dims, self.channels());
        let [x, z, b, a] = self.parts().map(|part| -> Vec<f64> {
            let rows = sequence.chunks(self.width());
            rows.flat_map(|row| doubles(&row[part.clone()])).collect()
        });
        let [a_log, dt_bias] = [&self.a_log, &self.dt_bias].map(|values| doubles(values));
        let gates = match self.operator {
            Operator::Gdn => TokenGates::Gdn(gdn::Gates::Raw {
                a: &a,
                b: &b,
                a_log: &a_log,
                dt_bias: &dt_bias,
                beta_scale: 1.0,
            }),
            Operator::Kda => TokenGates::Kda(kda::KdaGates {
                g: &a,
                kind: kda::KdaDecay::Softplus {
                    a_log: &a_log,
                    dt_bias: Some(&dt_bias),
                },
                beta: &b,
                beta_kind: kda::KdaBeta::Logit,
            }),
        };
        let whole = Layer {
            step: Recurrent::new([1, b.len() / hv], [h, hv], [k, k], gates),
            projection: Some(Projection {
                x: &x,
                previous: None,
                conv: Conv {
                    channels: d,
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
            fresh: None,
            checkpoints: None,
        };
        let pools = Pools {
            states: &vec![0.0; hv * k * k],
            windows: Some(&vec![0.0; d * (TAPS - 1)]),
            ..Pools::default()
        };
        Ok(layer::layer(&whole, &pools)?)
    }
}
