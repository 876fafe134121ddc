//! A layer of a model, said once: weights, pools and options. Its methods make the steps of a serving loop of what changes from one
//! launch to the next: tokens, rows and the output.
//!
//! | method | launch |
//! |---|---|
//! | [`Layer::prefill`] | prompts and their parts, of any lengths |
//! | [`Layer::decode`] | tokens whose states are written: one of each row, or several that are certain |
//! | [`Layer::verify`] | drafts: no state is written |
//! | [`Layer::resume`] | drafts, after the accepted ones of the last step are committed |
//! | [`Layer::commit`], [`Layer::flush`] | no tokens: accepted ones, or pending ones, become part of the states |
//!
//! Each makes a [`Step`], a [`Commit`] or a [`Flush`]: their methods, checks and promises hold, and what a layer has no method for
//! (snapshots, token slots, states that wait) is an option of that step, or a step by hand. Nothing is allocated.
//! [The guide](crate::guide::engines#a-layer) has one in an engine.

mod rows;
#[cfg(test)]
mod tests;
mod weights;

pub use rows::{Projection, Rows};
pub use weights::{GdnParameters, KdaParameters, Parameters, Weights};

use crate::error::Error;
use crate::library::Library;
use crate::shapes::named;
use crate::step::{
    Commit, Convolution, Flush, Formulation, Inputs, Norm, Options, Pending, Previous, StateLayout,
    States, Step, Stored, Update, Work,
};
use crate::tensor::{DType, Tensor};

/// A GDN layer.
pub type GdnLayer<'a> = Layer<'a, GdnParameters<'a>>;

/// A KDA layer.
pub type KdaLayer<'a> = Layer<'a, KdaParameters<'a>>;

/// Everything between the projections of a layer. It borrows tensors as a [`Step`] does, and is a plain value: an engine whose
/// tensors are raw addresses keeps a `Layer<'static>` as long as its weights and pools, and steps may borrow for shorter.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a, P> {
    weights: Weights<'a, P>,
    pool: Tensor<'a>,
    windows: Tensor<'a>,
    options: Options,
    /// HV, K and V, as the pool has them.
    dims: [usize; 3],
}

impl<'a, P: Parameters<'a>> Layer<'a, P> {
    /// A layer of `weights`, whose states are in `pool` `[P, HV, V, K]` (or V-last) and whose windows are in `windows`
    /// `[P, D, W − 1]`, both written.
    ///
    /// # Errors
    /// What a decode would refuse of these tensors and options, by name, and tensors in another memory than the pool.
    pub fn new(
        weights: Weights<'a, P>,
        pool: Tensor<'a>,
        windows: Tensor<'a>,
        options: Options,
    ) -> Result<Self, Error> {
        let [_, hv, outer, inner] = *named("pool", &pool).rank::<4>("[P, HV, V, K]")?.dims;
        let [k, v] = match options.state_layout {
            StateLayout::KLast => [inner, outer],
            StateLayout::VLast => [outer, inner],
        };
        let layer = Self {
            weights,
            pool,
            windows,
            options,
            dims: [hv, k, v],
        };
        // A row of one token, at no address.
        let dtype = match windows.dtype() {
            dtype @ (DType::Bf16 | DType::F16) => dtype,
            _ => DType::F32,
        };
        let placed =
            |dtype, dims: &[usize]| Tensor::new(0, dtype, dims, usize::MAX, pool.memory(), true);
        let [x, values] = [
            placed(dtype, &[1, 1, layer.channels()])?,
            placed(dtype, &[1, 1, hv, v])?,
        ];
        let of_heads = placed(dtype, &[1, 1, hv])?;
        let gate = match P::PER_CHANNEL {
            true => placed(dtype, &[1, 1, hv, k])?,
            false => of_heads,
        };
        let token = Projection::new(x, [gate, of_heads], values);
        let rows = Rows::new(placed(DType::I32, &[1])?);
        check(&layer.decode(&token, &rows, values))?;
        Ok(layer)
    }

    /// Prompts, or parts of them, one or many, of any lengths ([`Rows::packed`]); rows of one token may be among them. It takes
    /// [`Rows::workspace`] where a row may have more than 64. All of it is [`Formulation::Chunked`], so that one prewarm serves every
    /// prompt.
    #[must_use]
    pub fn prefill(
        &self,
        tokens: &Projection<'a>,
        rows: &Rows<'a>,
        o: Tensor<'a>,
    ) -> Step<'a, P::Gates> {
        let mut step = self.decode(tokens, rows, o);
        step.options.formulation = Formulation::Chunked;
        step
    }

    /// Tokens whose states are written: one of each row, or up to 16.
    #[must_use]
    pub fn decode(
        &self,
        tokens: &Projection<'a>,
        rows: &Rows<'a>,
        o: Tensor<'a>,
    ) -> Step<'a, P::Gates> {
        self.step(self.states(rows).into(), tokens, rows, o)
    }

    /// Up to 16 tokens of each row, of which the engine then accepts some: no state is written, and [`Rows::write_slots`] are not looked
    /// at.
    #[must_use]
    pub fn verify(
        &self,
        tokens: &Projection<'a>,
        rows: &Rows<'a>,
        o: Tensor<'a>,
    ) -> Step<'a, P::Gates> {
        let states = States::read_only(self.pool).slots(rows.slots);
        self.step(states.into(), tokens, rows, o)
    }

    /// [`Layer::verify`] after the first `keep` `[B]` of the last step's tokens `last` are committed: [`Previous`].
    #[must_use]
    pub fn resume(
        &self,
        tokens: &Projection<'a>,
        last: &Projection<'a>,
        keep: Tensor<'a>,
        rows: &Rows<'a>,
        o: Tensor<'a>,
    ) -> Step<'a, P::Gates> {
        let previous = Previous::new(Stored::x(last.x), last.gate, last.beta, keep);
        self.decode(tokens, rows, o).previous(previous)
    }

    /// The first `keep` `[B]` of the last step's tokens `last` become part of the states; with `keep` = 0 states and windows are copied
    /// from [`Rows::slots`] to [`Rows::write_slots`].
    #[must_use]
    pub fn commit(
        &self,
        last: &Projection<'a>,
        keep: Tensor<'a>,
        rows: &Rows<'a>,
    ) -> Commit<'a, P::Gates> {
        let stored = Stored::conv(self.convolution(last));
        let gates = self.weights.parameters.gates(last.gate, last.beta);
        let mut commit = Commit::new(stored, gates, keep, self.states(rows)).options(self.options);
        commit.fresh = rows.fresh;
        commit
    }

    /// The pending tokens of rows become part of their states: before these are copied, or read by a step without the ring.
    #[must_use]
    pub fn flush(&self, pending: Pending<'a>, rows: &Rows<'a>) -> Flush<'a> {
        let mut flush = Flush::new(self.states(rows), pending).options(self.options);
        flush.windows = pending.inputs.map(|_| self.windows);
        flush
    }

    /// Compiles what a serving loop launches, at any batch size, side by side: afterwards none of its launches compiles.
    ///
    /// `rows` are such as the loop's decodes and drafts have, `prompts` such as its prefills have. `drafts` are every T that is verified,
    /// resumed after another of them, or committed, and a `keep`. Which of these tensors there are, and their dtypes, is part of what
    /// is compiled; B and what they hold are not. `tokens` gives tokens of these outer dims (`[B, T]`, packed `[1, total]`) as the
    /// engine has them in memory, and their output. Steps with a ring, and flushes, are [`Library::prewarm`]'s.
    ///
    /// # Errors
    /// As [`Library::prewarm_all`]'s, and those of `tokens`.
    pub fn prewarm_all(
        &self,
        library: &Library,
        rows: &Rows<'a>,
        prompts: Option<&Rows<'a>>,
        drafts: Option<(&[usize], Tensor<'a>)>,
        tokens: impl Fn([usize; 2]) -> Result<(Projection<'a>, Tensor<'a>), Error>,
    ) -> Result<(), Error> {
        let (mut steps, mut commits) = (Vec::new(), Vec::new());
        let (one, dims) = rows.of(1);
        let (token, o) = tokens(dims)?;
        steps.push(self.decode(&token, &one, o));
        if let Some(prompts) = prompts {
            let (_, dims) = prompts.of(2);
            let (prompt, o) = tokens(dims)?;
            steps.push(self.prefill(&prompt, prompts, o));
        }
        if let Some((lengths, keep)) = drafts {
            let dense = |length: usize| tokens([rows.batch(), length]).map(|(last, _)| last);
            for &length in lengths {
                let (of, dims) = rows.of(length);
                let (new, o) = tokens(dims)?;
                steps.push(self.verify(&new, &of, o));
                for &before in lengths {
                    steps.push(self.resume(&new, &dense(before)?, keep, &of, o));
                }
                commits.push(self.commit(&dense(length)?, keep, rows));
            }
        }
        let steps = steps.iter().map(|step| step as &dyn Work);
        let works: Vec<_> = steps
            .chain(commits.iter().map(|commit| commit as _))
            .collect();
        library.prewarm_all(&works)
    }

    fn step(
        &self,
        states: States<'a>,
        tokens: &Projection<'a>,
        rows: &Rows<'a>,
        o: Tensor<'a>,
    ) -> Step<'a, P::Gates> {
        let weights = &self.weights;
        let norm = Norm::new(tokens.z, weights.norm, weights.eps);
        let inputs = Inputs::conv(self.convolution(tokens));
        let gates = weights.parameters.gates(tokens.gate, tokens.beta);
        let mut step = Step::new(inputs, gates, o, states)
            .norm(norm.activation(weights.norm_activation))
            .options(self.options);
        step.packed = rows.packed;
        step.fresh = rows.fresh;
        step.positions = rows.positions;
        step.checkpoints = rows.checkpoints;
        step.workspace = rows.workspace;
        step
    }

    /// D.
    fn channels(&self) -> usize {
        let [hv, k, v] = self.dims;
        self.weights
            .heads
            .saturating_mul(2 * k)
            .saturating_add(hv * v)
    }

    fn convolution(&self, tokens: &Projection<'a>) -> Convolution<'a> {
        let weights = &self.weights;
        let mut conv = Convolution::new(tokens.x, weights.heads, weights.conv, self.windows);
        conv.bias = weights.conv_bias;
        conv.activation(weights.conv_activation)
    }

    fn states(&self, rows: &Rows<'a>) -> Update<'a> {
        let mut states = States::update(self.pool).slots(rows.slots);
        states.write_slots = rows.write_slots;
        states
    }
}

impl<'a> GdnLayer<'a> {
    /// Views of rows `[B, T, D + HV·V + 2·HV]` (packed: `[1, total, …]`) in the order `[q | k | v | z | b | a]`, as
    /// [the guide](crate::guide::engines#layouts) has a projection.
    ///
    /// # Errors
    /// [`Error::Shape`] for other dims.
    pub fn projection(&self, row: Tensor<'a>) -> Result<Projection<'a>, Error> {
        let ([hv, _, v], d) = (self.dims, self.channels());
        let (named, values) = (named("row", &row), hv * v);
        let [rows, tokens, _] = *named.rank::<3>("[B, T, D + HV·V + 2·HV]")?.dims;
        let sizes = [rows, tokens, d + values + 2 * hv];
        named.dims(&["B", "T", "D + HV·V + 2·HV"], &sizes)?;
        let part = |from, len| row.narrow(2, from, len);
        let [b, a] = [part(d + values, hv)?, part(d + values + hv, hv)?];
        Ok(Projection::new(
            part(0, d)?,
            [a, b],
            part(d, values)?.split(2, v)?,
        ))
    }
}

/// Checks a decode and where its tensors are.
fn check<W: Work>(work: &W) -> Result<(), Error> {
    let request = work.request();
    request.check()?;
    request.check_memory(request.pool().tensor.memory())
}
