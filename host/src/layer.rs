//! The layer object: weights, pools and options, given once. Its methods make the steps of a serving loop from the arguments that change
//! from one launch to the next: tokens, rows and the output.
//!
//! | method | launch |
//! |---|---|
//! | [`Layer::prefill`] | prompts and their parts, of any lengths |
//! | [`Layer::decode`] | tokens whose states are written: one of each row, or several that are certain |
//! | [`Layer::verify`] | drafts: no state is written |
//! | [`Layer::resume`] | drafts, after the accepted tokens of the last step are committed |
//! | [`Layer::commit`], [`Layer::flush`] | no tokens: accepted or pending tokens become part of the states |
//!
//! Each returns a [`Step`], a [`Commit`] or a [`Flush`]. The methods, checks and safety rules of these types apply. Snapshots and
//! deferred write-back are options of the step; token slots need a step made by hand. Nothing is allocated.
//! [The guide](crate::guide::engines#a-layer) shows a layer in an engine.

mod rows;
#[cfg(test)]
mod tests;
mod weights;

pub use rows::{Projection, Rows};
pub use weights::{GdnParameters, KdaParameters, Parameters, Weights};

use crate::error::Error;
use crate::library::Library;
use crate::step::{
    Commit, Convolution, Flush, Formulation, Gates, Inputs, Norm, Operator, Options, Pending,
    Previous, StateLayout, States, Step, Stored, Update, Work,
};
use crate::tensor::{DType, Tensor};
use crate::tensor_checks::named;

/// A GDN layer.
pub type GdnLayer<'a> = Layer<'a, GdnParameters<'a>>;

/// A KDA layer.
pub type KdaLayer<'a> = Layer<'a, KdaParameters<'a>>;

/// A layer between its projections. A layer borrows tensors as a [`Step`] does, and is a plain value. An engine whose tensors are
/// raw addresses keeps a `Layer<'static>` as long as its weights and pools live; the layer's steps may borrow tensors for a
/// shorter time.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a, P> {
    weights: Weights<'a, P>,
    pool: Tensor<'a>,
    windows: Tensor<'a>,
    options: Options,
    /// HV, K and V of the pool.
    dims: [usize; 3],
}

impl<'a, P: Parameters<'a>> Layer<'a, P> {
    /// A layer of `weights`. Its states are in `pool`, `[P, HV, V, K]` (K-last) or `[P, HV, K, V]` (V-last); its windows are in
    /// `windows`, `[P, D, W − 1]`. Launches write both.
    ///
    /// # Errors
    /// The errors of a decode with these tensors and options, by name; [`Error::Memory`] for a tensor in another memory than the
    /// pool's.
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
        // A row of one token, at address 0.
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
        let gate = match P::Gates::OPERATOR {
            Operator::Kda => placed(dtype, &[1, 1, hv, k])?,
            Operator::Gdn => of_heads,
        };
        let token = Projection::new(x, [gate, of_heads], values);
        let rows = Rows::new(placed(DType::I32, &[1])?);
        check(&layer.decode(&token, &rows, values))?;
        Ok(layer)
    }

    /// A step of prompts, or parts of prompts, of any lengths; rows of one token may be among them. Rows of more than 64 tokens
    /// need [`Rows::workspace`]; on GPUs other than Hopper, shorter rows may need it too. The step is always
    /// [`Formulation::Chunked`], so that one prewarm serves every prompt.
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

    /// A step of one token of each row, or of up to 16, that writes the states.
    #[must_use]
    pub fn decode(
        &self,
        tokens: &Projection<'a>,
        rows: &Rows<'a>,
        o: Tensor<'a>,
    ) -> Step<'a, P::Gates> {
        self.step(self.states(rows).into(), tokens, rows, o)
    }

    /// A step of up to 16 tokens of each row, of which the engine then accepts some. The step writes no state, and ignores
    /// [`Rows::write_slots`].
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

    /// A verify that first commits the first `keep` `[B]` tokens of the last step, whose projection is `last`: see [`Previous`].
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

    /// A commit of the first `keep` `[B]` tokens of the last step, whose projection is `last`. With `keep` = 0 it copies states and
    /// windows from [`Rows::slots`] to [`Rows::write_slots`].
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

    /// A flush of the pending tokens of rows, needed before their states are copied, or read by a step without the ring.
    #[must_use]
    pub fn flush(&self, pending: Pending<'a>, rows: &Rows<'a>) -> Flush<'a> {
        let mut flush = Flush::new(self.states(rows), pending).options(self.options);
        flush.windows = pending.inputs.map(|_| self.windows);
        flush
    }

    /// Compiles every kernel of a serving loop, for any batch size, on all cores. Afterwards no launch of the loop compiles.
    ///
    /// `rows` is a sample of the rows of decodes and drafts, `prompts` a sample of the rows of prefills. `drafts` has every T of
    /// a verify, and a sample of `keep`; a resume may follow a step of any of these T. The dtypes of the samples, and which
    /// tensors they have, select the kernels; B and the contents do not. `tokens` returns the projection and the output of these
    /// outer dims (`[B, T]`, for packed rows `[1, total]`) as the engine lays them out. [`Library::prewarm`] compiles steps with
    /// a ring, and flushes.
    ///
    /// # Errors
    /// The errors of [`Library::prewarm_all`] and of `tokens`.
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

    /// D, the number of channels of the convolution.
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
    /// Views of rows `[B, T, D + HV·V + 2·HV]` (packed: `[1, total, …]`) in the order `[q | k | v | z | b | a]`, the projection's
    /// layout in [the guide](crate::guide::engines#layouts).
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

/// Checks a step. Its tensors have to be in the memory of the pool, and writable if the step writes them.
fn check<W: Work>(work: &W) -> Result<(), Error> {
    let request = work.request();
    request.check()?;
    request.check_memory(request.pool().tensor.memory())
}
