//! A language model of one GDN layer: a token is its inputs, and the next token is read off its output.

use anyhow::Result;
use gated_delta::ops::{BetaScale, GdnGates};
use gated_delta::{Error, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::engine::{Buffer, Engine};
use crate::common::uniform;

/// Tokens that there are.
pub const VOCABULARY: usize = 64;

/// One in so many drafts is wrong.
const DRAFTS_PER_ERROR: u32 = 3;

/// The sizes of the layer, with K = V.
#[derive(Clone, Copy)]
pub struct Shape {
    /// H
    pub heads: usize,
    /// HV
    pub value_heads: usize,
    /// K and V
    pub dim: usize,
}

/// Weights, on the host: f32 throughout, so that no output is rounded.
pub struct Model {
    /// Sizes of the layer.
    pub shape: Shape,
    /// `[VOCABULARY, H, K]`
    q: Vec<f32>,
    /// `[VOCABULARY, H, K]`
    k: Vec<f32>,
    /// `[VOCABULARY, HV, V]`
    v: Vec<f32>,
    /// `[VOCABULARY, HV]`
    a: Vec<f32>,
    /// `[VOCABULARY, HV]`
    b: Vec<f32>,
    /// `[VOCABULARY, HV, V]`
    head: Vec<f32>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
}

impl Model {
    /// Random weights.
    pub fn random(engine: &Engine, shape: Shape, seed: u64) -> Result<Self> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let Shape {
            heads,
            value_heads,
            dim,
        } = shape;
        Ok(Self {
            shape,
            q: uniform(rng, VOCABULARY * heads * dim, -1.0, 1.0),
            k: uniform(rng, VOCABULARY * heads * dim, -1.0, 1.0),
            v: uniform(rng, VOCABULARY * value_heads * dim, -1.0, 1.0),
            a: uniform(rng, VOCABULARY * value_heads, -4.0, 0.0),
            b: uniform(rng, VOCABULARY * value_heads, -1.0, 2.0),
            head: uniform(rng, VOCABULARY * value_heads * dim, -1.0, 1.0),
            a_log: engine.buffer(&uniform(rng, value_heads, -3.0, -1.0))?,
            dt_bias: engine.buffer(&uniform(rng, value_heads, -1.0, 0.0))?,
        })
    }

    /// The most likely token after one whose output is `o`, `[HV, V]`.
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

/// Inputs and outputs of a step in an engine's memory: T tokens of each of B rows.
pub struct Tokens {
    dims: [usize; 2],
    shape: Shape,
    /// `[B, T, H, K]`
    q: Buffer<f32>,
    /// `[B, T, H, K]`
    k: Buffer<f32>,
    /// `[B, T, HV, V]`
    v: Buffer<f32>,
    /// `[B, T, HV]`
    a: Buffer<f32>,
    /// `[B, T, HV]`
    b: Buffer<f32>,
    /// `[B, T, HV, V]`
    pub o: Buffer<f32>,
}

impl Tokens {
    /// Room for `tokens` tokens of each of `rows` rows, full of NaN.
    pub fn room(engine: &Engine, model: &Model, rows: usize, tokens: usize) -> Result<Self> {
        let Shape {
            heads,
            value_heads,
            dim,
        } = model.shape;
        let room = |of_token: usize| engine.buffer(&vec![f32::NAN; rows * tokens * of_token]);
        Ok(Self {
            dims: [rows, tokens],
            shape: model.shape,
            q: room(heads * dim)?,
            k: room(heads * dim)?,
            v: room(value_heads * dim)?,
            a: room(value_heads)?,
            b: room(value_heads)?,
            o: room(value_heads * dim)?,
        })
    }

    /// Looks `tokens`, `[B, T]`, up.
    pub fn embed(&mut self, model: &Model, tokens: &[usize]) -> Result<()> {
        let rows = |table: &[f32]| -> Vec<f32> {
            let width = table.len() / VOCABULARY;
            tokens
                .iter()
                .flat_map(|token| &table[token * width..][..width])
                .copied()
                .collect()
        };
        self.q.write(&rows(&model.q))?;
        self.k.write(&rows(&model.k))?;
        self.v.write(&rows(&model.v))?;
        self.a.write(&rows(&model.a))?;
        self.b.write(&rows(&model.b))
    }

    /// q, k, v, gates and o, as tensors.
    pub fn tensors<'a>(&'a mut self, model: &'a Model) -> Result<Views<'a>, Error> {
        let (
            [rows, tokens],
            Shape {
                heads,
                value_heads,
                dim,
            },
        ) = (self.dims, self.shape);
        let (qk, vo) = ([rows, tokens, heads, dim], [rows, tokens, value_heads, dim]);
        Ok(Views {
            q: self.q.tensor(&qk)?,
            o: self.o.tensor_mut(&vo)?,
            k: self.k.tensor(&qk)?,
            v: self.v.tensor(&vo)?,
            gates: GdnGates::Raw {
                a: self.a.tensor(&[rows, tokens, value_heads])?,
                b: self.b.tensor(&[rows, tokens, value_heads])?,
                a_log: model.a_log.tensor(&[value_heads])?,
                dt_bias: model.dt_bias.tensor(&[value_heads])?,
                beta_scale: BetaScale::One,
            },
        })
    }

    /// As [`gated_delta::ops::recurrent::Previous`] wants them: k, v, a, b.
    pub fn previous(&self) -> Result<[Tensor<'_>; 4], Error> {
        let (
            [rows, tokens],
            Shape {
                heads,
                value_heads,
                dim,
            },
        ) = (self.dims, self.shape);
        Ok([
            self.k.tensor(&[rows, tokens, heads, dim])?,
            self.v.tensor(&[rows, tokens, value_heads, dim])?,
            self.a.tensor(&[rows, tokens, value_heads])?,
            self.b.tensor(&[rows, tokens, value_heads])?,
        ])
    }
}

/// [`Tokens`] as tensors.
pub struct Views<'a> {
    /// `[B, T, H, K]`
    pub q: Tensor<'a>,
    /// `[B, T, H, K]`
    pub k: Tensor<'a>,
    /// `[B, T, HV, V]`
    pub v: Tensor<'a>,
    /// Of `[B, T, HV]`.
    pub gates: GdnGates<'a>,
    /// `[B, T, HV, V]`
    pub o: Tensor<'a>,
}

/// A sequence, with the output that each token but the first was read off.
#[derive(Clone)]
pub struct Sequence {
    /// The prompt's only token, and what was decoded.
    pub tokens: Vec<usize>,
    /// `[tokens - 1, HV, V]`
    pub outputs: Vec<Vec<f32>>,
}

impl Sequence {
    /// The prompt.
    pub fn new(token: usize) -> Self {
        Self {
            tokens: vec![token],
            outputs: Vec::new(),
        }
    }

    /// Appends what `model` makes of an output, and returns it.
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

/// Stands in for a draft model: it has seen what plain decoding makes of each row, and errs now and then.
pub struct Drafter<'a> {
    /// What plain decoding makes of each row.
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
