//! A language model of one GDN layer: a token is its inputs, and the next token is read off its output.

use anyhow::Result;
use gated_delta::step::Update;
use gated_delta::{Error, Gdn, GdnCommit, GdnGates, Inputs, Previous, States, Stored, Tensor};
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

    /// Gates of tokens.
    fn gates<'a>(&'a self, a: Tensor<'a>, b: Tensor<'a>) -> Result<GdnGates<'a>, Error> {
        let parameter = |buffer: &'a Buffer<f32>| buffer.tensor(&[self.shape.value_heads]);
        let (a_log, dt_bias) = (parameter(&self.a_log)?, parameter(&self.dt_bias)?);
        Ok(GdnGates::raw(a, b, a_log, dt_bias))
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

    /// The step of these tokens.
    pub fn step<'a>(
        &'a mut self,
        model: &'a Model,
        states: impl Into<States<'a>>,
    ) -> Result<Gdn<'a>, Error> {
        let ([rows, tokens], shape) = (self.dims, self.shape);
        let qk = [rows, tokens, shape.heads, shape.dim];
        let vo = [rows, tokens, shape.value_heads, shape.dim];
        let gate = [rows, tokens, shape.value_heads];
        Ok(Gdn::new(
            Inputs::qkv(
                self.q.tensor(&qk)?,
                self.k.tensor(&qk)?,
                self.v.tensor(&vo)?,
            ),
            model.gates(self.a.tensor(&gate)?, self.b.tensor(&gate)?)?,
            self.o.tensor_mut(&vo)?,
            states,
        ))
    }

    /// The commit of the first `keep` of these tokens.
    pub fn commit<'a>(
        &'a self,
        model: &'a Model,
        keep: Tensor<'a>,
        states: Update<'a>,
    ) -> Result<GdnCommit<'a>, Error> {
        let (stored, [a, b]) = self.stored()?;
        Ok(GdnCommit::new(stored, model.gates(a, b)?, keep, states))
    }

    /// For a resume: the first `keep` of these tokens are committed first.
    pub fn previous<'a>(&'a self, keep: Tensor<'a>) -> Result<Previous<'a>, Error> {
        let (stored, [a, b]) = self.stored()?;
        Ok(Previous::new(stored, a, b, keep))
    }

    /// k and v, and a and b.
    fn stored(&self) -> Result<(Stored<'_>, [Tensor<'_>; 2]), Error> {
        let ([rows, tokens], shape) = (self.dims, self.shape);
        let k = (self.k).tensor(&[rows, tokens, shape.heads, shape.dim])?;
        let v = (self.v).tensor(&[rows, tokens, shape.value_heads, shape.dim])?;
        let gate = [rows, tokens, shape.value_heads];
        let gates = [self.a.tensor(&gate)?, self.b.tensor(&gate)?];
        Ok((Stored::kv(k, v), gates))
    }
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
