//! A language model of one GDN layer. A token is embedded as its projection, and the layer's output gives the next token.

use std::collections::BTreeMap;

use anyhow::Result;
use gated_delta::layer::{GdnParameters, Projection, Weights};
use gated_delta::{Error, GdnLayer, Options, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common::engine::{Buffer, Engine};
use crate::common::uniform;

/// Number of different tokens.
pub const VOCABULARY: usize = 64;

/// W, the number of taps.
pub const TAPS: usize = 4;

/// Epsilon of the norm.
const EPS: f32 = 1e-6;

/// One in this number of drafts is wrong.
const DRAFTS_PER_ERROR: u32 = 3;

/// The sizes of the layer, with K = V.
#[derive(Clone, Copy)]
pub struct Shape {
    /// H, the number of query/key heads.
    pub heads: usize,
    /// HV, the number of value heads.
    pub value_heads: usize,
    /// K and V, the head dims.
    pub dim: usize,
}

impl Shape {
    /// D, the number of channels of q, k and v.
    pub fn channels(self) -> usize {
        (2 * self.heads + self.value_heads) * self.dim
    }

    /// Number of elements of an output.
    pub fn values(self) -> usize {
        self.value_heads * self.dim
    }

    /// Number of elements of a token's projection: x, z, b and a.
    fn width(self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }
}

/// Weights, all in f32, so that no output is rounded.
pub struct Model {
    /// Sizes of the layer.
    pub shape: Shape,
    /// `[VOCABULARY, D + HV·V + 2·HV]`, on the host.
    projections: Vec<f32>,
    /// `[VOCABULARY, HV, V]`, on the host.
    head: Vec<f32>,
    /// `[D, W]`.
    conv: Buffer<f32>,
    /// `[V]`.
    norm: Buffer<f32>,
    /// `[HV]`.
    a_log: Buffer<f32>,
    /// `[HV]`.
    dt_bias: Buffer<f32>,
}

impl Model {
    /// Random weights.
    pub fn random(engine: &Engine, shape: Shape, seed: u64) -> Result<Self> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (values, value_heads) = (shape.values(), shape.value_heads);
        let mut projections = Vec::with_capacity(VOCABULARY * shape.width());
        for _ in 0..VOCABULARY {
            projections.extend(uniform(rng, shape.channels(), -1.0, 1.0)); // x
            projections.extend(uniform(rng, values, -2.0, 2.0)); // z
            projections.extend(uniform(rng, value_heads, -1.0, 2.0)); // b
            projections.extend(uniform(rng, value_heads, -4.0, 0.0)); // a
        }
        Ok(Self {
            shape,
            projections,
            head: uniform(rng, VOCABULARY * values, -1.0, 1.0),
            conv: engine.buffer(&uniform(rng, shape.channels() * TAPS, -1.0, 1.0))?,
            norm: engine.buffer(&uniform(rng, shape.dim, 0.5, 1.5))?,
            a_log: engine.buffer(&uniform(rng, value_heads, -3.0, -1.0))?,
            dt_bias: engine.buffer(&uniform(rng, value_heads, -1.0, 0.0))?,
        })
    }

    /// The layer, with states in a pool `[P, HV, V, K]` and windows `[P, D, W - 1]`.
    pub fn layer<'a>(
        &'a self,
        pool: Tensor<'a>,
        windows: Tensor<'a>,
    ) -> Result<GdnLayer<'a>, Error> {
        let Shape {
            heads,
            value_heads,
            dim,
        } = self.shape;
        let [a_log, dt_bias] = [&self.a_log, &self.dt_bias].map(|of| of.tensor(&[value_heads]));
        let gates = GdnParameters::new(a_log?, dt_bias?);
        let conv = self.conv.tensor(&[self.shape.channels(), TAPS])?;
        let weights = Weights::new(heads, conv, gates, self.norm.tensor(&[dim])?, EPS);
        GdnLayer::new(weights, pool, windows, Options::default())
    }

    /// The most likely token after a token with the output `o`, `[HV, V]`.
    pub fn next(&self, o: &[f32]) -> usize {
        let logit = |token: usize| -> f32 {
            let weights = &self.head[token * o.len()..][..o.len()];
            weights.iter().zip(o).map(|(weight, o)| weight * o).sum()
        };
        let mut best = (0, f32::NEG_INFINITY);
        for token in 0..VOCABULARY {
            let logit = logit(token);
            if logit > best.1 {
                best = (token, logit);
            }
        }
        best.0
    }
}

/// T tokens of each of B rows, projected, in an engine's memory.
pub struct Tokens {
    dims: [usize; 2],
    shape: Shape,
    /// The projection's output, `[B, T, D + HV·V + 2·HV]`: x (q, k and v before the convolution), z, b and a of each token.
    projection: Buffer<f32>,
}

impl Tokens {
    /// Memory for `tokens` tokens of each of `rows` rows, full of NaN.
    pub fn room(engine: &Engine, model: &Model, rows: usize, tokens: usize) -> Result<Self> {
        let shape = model.shape;
        Ok(Self {
            dims: [rows, tokens],
            shape,
            projection: engine.buffer(&vec![f32::NAN; rows * tokens * shape.width()])?,
        })
    }

    /// Writes the projections of `tokens`, `[B, T]`.
    pub fn embed(&mut self, model: &Model, tokens: &[usize]) -> Result<()> {
        let width = self.shape.width();
        let row = |&token: &usize| &model.projections[token * width..][..width];
        let rows: Vec<&[f32]> = tokens.iter().map(row).collect();
        self.projection.write(&rows.concat())
    }

    /// Views of the projection's output for a step.
    pub fn projection<'a>(&'a self, layer: &GdnLayer<'a>) -> Result<Projection<'a>, Error> {
        let [rows, tokens] = self.dims;
        let row = [rows, tokens, self.shape.width()];
        layer.projection(self.projection.tensor(&row)?)
    }

    /// A tensor for the outputs, `[B, T, HV, V]`.
    pub fn output<'a>(&self, o: &'a mut Buffer<f32>) -> Result<Tensor<'a>, Error> {
        let ([rows, tokens], shape) = (self.dims, self.shape);
        o.tensor_mut(&[rows, tokens, shape.value_heads, shape.dim])
    }
}

/// A sequence. Every token except the first has the output that gave the token.
#[derive(Clone)]
pub struct Sequence {
    /// The prompt's only token, and the decoded tokens.
    pub tokens: Vec<usize>,
    /// `[tokens - 1, HV, V]`.
    pub outputs: Vec<Vec<f32>>,
    /// Some windows `[D, W - 1]`, by the number of tokens before them.
    pub windows: BTreeMap<usize, Vec<f32>>,
}

impl Sequence {
    /// A sequence of the prompt alone.
    pub fn new(token: usize) -> Self {
        Self {
            tokens: vec![token],
            outputs: Vec::new(),
            windows: BTreeMap::new(),
        }
    }

    /// Appends the token that `model` derives from an output, and returns the token.
    pub fn push(&mut self, model: &Model, o: &[f32]) -> usize {
        let token = model.next(o);
        self.tokens.push(token);
        self.outputs.push(o.to_vec());
        token
    }

    /// The last token.
    pub fn last(&self) -> usize {
        self.tokens[self.tokens.len() - 1]
    }
}

/// Stands in for a draft model. It knows the result of plain decoding, and some of its drafts are wrong.
pub struct Drafter<'a> {
    /// The result of plain decoding for each row.
    pub plain: &'a [Sequence],
}

impl Drafter<'_> {
    /// The draft of a row's token at `position`.
    pub fn draft(&self, row: usize, position: usize) -> usize {
        let right = self.plain[row].tokens.get(position).copied().unwrap_or(0);
        let seed = (row * 1_000_000 + position) as u64;
        let wrong = StdRng::seed_from_u64(seed).random_ratio(1, DRAFTS_PER_ERROR);
        if wrong {
            (right + 1) % VOCABULARY
        } else {
            right
        }
    }
}
