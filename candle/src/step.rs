//! Launches with tensors of candle. They have the same parts as those of [`gated_delta::step`].
//!
//! A [`Step`] or a [`Commit`] holds its tensors (candle's are reference counted), so it has no lifetime. Building it computes
//! nothing. [`Step::run`] checks the step, makes its output and launches: on the device's stream for a CUDA device, immediately
//! on the CPU.

use candle_core::{DType, Result, Tensor};
use gated_delta::step::pending::Rings;
use gated_delta::{Activation, BetaScale, KdaBeta, Options, StateLayout};

use crate::bind::{At, Named, named};
use crate::error::{bail, wrap};
use crate::launch::{self, Launch};

/// Inputs of a step's tokens.
#[derive(Clone, Debug)]
pub enum Inputs {
    /// Query, key and value. Views of one row are used without a copy, also with rank 3, where heads are concatenated.
    Qkv {
        /// `[B, T, H, K]` or `[B, T, H·K]`
        q: Tensor,
        /// `[B, T, H, K]` or `[B, T, H·K]`
        k: Tensor,
        /// `[B, T, HV, V]` or `[B, T, HV·V]`
        v: Tensor,
    },
    /// The layer's projection. A short convolution computes q, k and v from it.
    Conv(Convolution),
}

/// A short causal convolution of a layer's projection, and the windows of its slots: [`gated_delta::Convolution`].
#[derive(Clone, Debug)]
pub struct Convolution {
    /// Input `[B, T, D]`, bf16, f16 or f32, with D = 2·H·K + HV·V: q, k and v in this order along D, before the convolution. A
    /// view is used without a copy.
    pub x: Tensor,
    /// Query/key heads, H.
    pub heads: usize,
    /// Taps `[D, W]`, the oldest token's tap first; W in 2..=4.
    pub weight: Tensor,
    /// Bias `[D]`; 0 by default.
    pub bias: Option<Tensor>,
    /// Activation of the sums, [`Activation::Silu`] or [`Activation::None`].
    pub activation: Activation,
    /// Windows `[P, D, W − 1]`, the oldest input first, with token slots `[P, D, W − 2 + T]`; of the dtype of `x`, any strides. A
    /// row's window is written if its state is written.
    pub windows: Tensor,
    /// Windows to write, by default `windows`.
    pub write_windows: Option<Tensor>,
    /// Window after every token, `[B, steps, D, W − 1]` with steps ≥ T. Requires [`Step::snapshots`].
    pub window_snapshots: Option<Tensor>,
}

impl Convolution {
    /// A convolution without a bias, with SiLU, and windows that are updated in place.
    #[must_use]
    pub fn new(x: &Tensor, heads: usize, weight: &Tensor, windows: &Tensor) -> Self {
        Self {
            x: x.clone(),
            heads,
            weight: weight.clone(),
            bias: None,
            activation: Activation::Silu,
            windows: windows.clone(),
            write_windows: None,
            window_snapshots: None,
        }
    }
}

/// RMS norm of the outputs, gated by z: o = weight · o / √(mean(o²) + eps) · act(z). See [`gated_delta::Norm`].
#[derive(Clone, Debug)]
pub struct Norm {
    /// Gate z, `[B, T, HV, V]` or `[B, T, HV·V]`
    pub z: Tensor,
    /// Weight, `[V]`
    pub weight: Tensor,
    /// Number that is added to the mean of squares.
    pub eps: f32,
    /// Activation of z, [`Activation::Silu`] or [`Activation::Sigmoid`].
    pub activation: Activation,
}

impl Norm {
    /// A norm with `weight` `[V]`, gated by z `[B, T, HV, V]` with SiLU.
    #[must_use]
    pub fn new(z: &Tensor, weight: &Tensor, eps: f32) -> Self {
        Self {
            z: z.clone(),
            weight: weight.clone(),
            eps,
            activation: Activation::Silu,
        }
    }

    /// Sets the activation of z.
    #[must_use]
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }
}

/// Gates of a layer, which also choose its operator.
#[derive(Clone, Debug)]
pub enum Gates {
    /// Gates of Gated DeltaNet.
    Gdn(GdnGates),
    /// Gates of Kimi Delta Attention.
    Kda(KdaGates),
}

/// Gates with one decay per value head.
#[derive(Clone, Debug)]
pub enum GdnGates {
    /// Log decay −exp(A_log) · softplus(a + dt_bias), β = sigmoid(b) · beta_scale.
    Raw {
        /// Input of the decay, `[B, T, HV]`
        a: Tensor,
        /// Input of β, `[B, T, HV]`
        b: Tensor,
        /// A_log, f32, `[HV]`
        a_log: Tensor,
        /// Bias of a, f32, `[HV]`
        dt_bias: Tensor,
        /// Factor of sigmoid(b).
        beta_scale: BetaScale,
    },
    /// Log decay and β, each `[B, T, HV]`.
    Given {
        /// Log decay.
        g: Tensor,
        /// β: how much of the prediction error is written.
        beta: Tensor,
    },
}

impl GdnGates {
    /// Gates that are computed from `a` and `b` `[B, T, HV]`, and `a_log` and `dt_bias` `[HV]` (f32), with β in (0, 1).
    #[must_use]
    pub fn raw(a: &Tensor, b: &Tensor, a_log: &Tensor, dt_bias: &Tensor) -> Self {
        Self::Raw {
            a: a.clone(),
            b: b.clone(),
            a_log: a_log.clone(),
            dt_bias: dt_bias.clone(),
            beta_scale: BetaScale::One,
        }
    }

    /// Gates that are given: log decay and β, each `[B, T, HV]`.
    #[must_use]
    pub fn given(g: &Tensor, beta: &Tensor) -> Self {
        Self::Given {
            g: g.clone(),
            beta: beta.clone(),
        }
    }

    /// Sets the factor of sigmoid(b), 1 by default. No effect on given gates.
    #[must_use]
    pub fn beta_scale(mut self, scale: BetaScale) -> Self {
        if let Self::Raw { beta_scale, .. } = &mut self {
            *beta_scale = scale;
        }
        self
    }
}

impl From<GdnGates> for Gates {
    fn from(gates: GdnGates) -> Self {
        Self::Gdn(gates)
    }
}

/// Gates with one decay per key channel.
#[derive(Clone, Debug)]
pub struct KdaGates {
    /// Log decays `[B, T, HV, K]`, or the values that they are computed from.
    pub g: Tensor,
    /// Meaning of `g`.
    pub kind: KdaDecay,
    /// β `[B, T, HV]`, or its logit.
    pub beta: Tensor,
    /// Meaning of `beta`.
    pub beta_kind: KdaBeta,
}

/// Meaning of the `g` of [`KdaGates`]. `a_log` is f32, `[H]` or `[HV]`; `dt_bias` is f32, `[H, K]` or `[HV, K]`.
#[derive(Clone, Debug)]
pub enum KdaDecay {
    /// `g` is the log decay.
    Log,
    /// The log decay is −exp(A_log) · softplus(g + dt_bias).
    Softplus {
        /// A_log, f32, `[H]` or `[HV]`
        a_log: Tensor,
        /// Bias of g, f32, `[H, K]` or `[HV, K]`; 0 by default.
        dt_bias: Option<Tensor>,
    },
    /// The log decay is lower_bound · sigmoid(exp(A_log) · (g + dt_bias)).
    LowerBound {
        /// Lower bound, finite and below 0.
        lower_bound: f32,
        /// A_log, f32, `[H]` or `[HV]`. Without it, exp(A_log) is 1.
        a_log: Option<Tensor>,
        /// Bias of g, f32, `[H, K]` or `[HV, K]`; 0 by default.
        dt_bias: Option<Tensor>,
    },
}

impl KdaGates {
    /// Gates `g` `[B, T, HV, K]` and `beta` `[B, T, HV]`, with their meanings.
    #[must_use]
    pub fn new(g: &Tensor, kind: KdaDecay, beta: &Tensor, beta_kind: KdaBeta) -> Self {
        Self {
            g: g.clone(),
            kind,
            beta: beta.clone(),
            beta_kind,
        }
    }
}

impl From<KdaGates> for Gates {
    fn from(gates: KdaGates) -> Self {
        Self::Kda(gates)
    }
}

/// States that a launch starts from and writes: [`gated_delta::States`].
#[derive(Clone, Debug)]
pub struct States {
    /// Pool `[P, HV, V, K]`, or `[P, HV, K, V]` with [`StateLayout::VLast`]: f32, bf16 or f16.
    pub pool: Tensor,
    /// Pool to write states to, by default `pool`.
    pub write_pool: Option<Tensor>,
    /// States to write.
    pub keep: Keep,
}

/// States that a step writes. Index tensors are i32, i64 or u32.
#[derive(Clone, Debug)]
pub enum Keep {
    /// Writes the state after a row's last token.
    Last {
        /// `[B]`: slot that each row starts from; by default row b starts from slot b.
        slots: Option<Tensor>,
        /// `[B]`: slot that each row writes; by default the slot that it starts from.
        write_slots: Option<Tensor>,
    },
    /// Writes no state.
    None {
        /// `[B]`: slot that each row starts from; by default row b starts from slot b.
        slots: Option<Tensor>,
    },
    /// Writes the state after each token to a slot of its own.
    Each {
        /// `[B, T]`: slot for the state after each token.
        token_slots: Tensor,
        /// `[B]`: number of accepted tokens of the last step; by default 1.
        accepted: Option<Tensor>,
    },
}

impl States {
    /// States that are updated in the slots `[B]` of `pool`.
    #[must_use]
    pub fn update(pool: &Tensor, slots: &Tensor) -> Self {
        Self::new(
            pool,
            Keep::Last {
                slots: Some(slots.clone()),
                write_slots: None,
            },
        )
    }

    /// States that are updated in place, row b in slot b.
    #[must_use]
    pub fn in_order(pool: &Tensor) -> Self {
        Self::new(
            pool,
            Keep::Last {
                slots: None,
                write_slots: None,
            },
        )
    }

    /// States that are read from the slots `[B]` and not written.
    #[must_use]
    pub fn read_only(pool: &Tensor, slots: &Tensor) -> Self {
        Self::new(
            pool,
            Keep::None {
                slots: Some(slots.clone()),
            },
        )
    }

    /// States with a slot for the state after each token, `token_slots` `[B, T]`, after `accepted` `[B]` tokens of the last step.
    #[must_use]
    pub fn per_token(pool: &Tensor, token_slots: &Tensor, accepted: Option<&Tensor>) -> Self {
        Self::new(
            pool,
            Keep::Each {
                token_slots: token_slots.clone(),
                accepted: accepted.cloned(),
            },
        )
    }

    /// States in `pool`. `keep` says which are written.
    #[must_use]
    pub fn new(pool: &Tensor, keep: Keep) -> Self {
        Self {
            pool: pool.clone(),
            write_pool: None,
            keep,
        }
    }

    /// Sets the slots to write: row b's state is written to slot `slots[b]`. No effect unless the states are updated.
    #[must_use]
    pub fn write_slots(mut self, slots: &Tensor) -> Self {
        if let Keep::Last { write_slots, .. } = &mut self.keep {
            *write_slots = Some(slots.clone());
        }
        self
    }

    /// Sets another pool to write to.
    #[must_use]
    pub fn write_pool(mut self, pool: &Tensor) -> Self {
        self.write_pool = Some(pool.clone());
        self
    }
}

/// Inputs of tokens that are only committed: [`gated_delta::Stored`].
#[derive(Clone, Debug)]
pub enum Stored {
    /// Keys `[B, T', H, K]` and values `[B, T', HV, V]`.
    Kv {
        /// Key.
        k: Tensor,
        /// Value.
        v: Tensor,
    },
    /// Inputs of the convolution `[B, T', D]`, for [`Previous`] tokens of a step with a convolution.
    X(Tensor),
    /// The convolution of the tokens to commit, in a [`Commit`].
    Conv(Convolution),
}

/// Tokens of the last step. The first `keep` of them are committed before the new tokens: [`gated_delta::Previous`].
#[derive(Clone, Debug)]
pub struct Previous {
    /// Inputs of the tokens.
    pub stored: Stored,
    /// Gate a or g, in the form of the new tokens' gate.
    pub gate: Tensor,
    /// Gate b or β, in the form of the new tokens'.
    pub beta: Tensor,
    /// `[B]`: number of tokens to commit, in 0..=T'.
    pub keep: Tensor,
}

/// Ring of pending tokens, which are not in the states yet: [`gated_delta::Pending`].
#[derive(Clone, Debug)]
pub struct Pending {
    /// Keys `[P, H, R, K]`, of the dtype of k, f32 after a convolution; written.
    pub keys: Tensor,
    /// Updates `[P, HV, R, V]`, f32, for drafts also bf16; written.
    pub updates: Tensor,
    /// Log decays, f32, `[P, HV, R]`, with KDA `[P, HV, R, K]`; written.
    pub decays: Tensor,
    /// `[B]`: number of pending tokens.
    pub len: Tensor,
    /// `[B]`: entry of the first pending token.
    pub base: Tensor,
    /// Inputs of the convolution `[P, R, D]`, for drafts with a convolution; written.
    pub inputs: Option<Tensor>,
    /// N, the largest number of pending tokens of a slot.
    pub most: usize,
}

/// A step of a layer: a decode, a verify, a resume or a prefill. [`gated_delta::Step`] describes its parts.
#[derive(Clone, Debug)]
pub struct Step {
    /// Inputs of the tokens.
    pub inputs: Inputs,
    /// Gates of the tokens.
    pub gates: Gates,
    /// States that the step starts from and writes.
    pub states: States,
    /// Packed rows: `cu_seqlens` `[B + 1]`, and the largest number of tokens of a row. The rows' tokens are concatenated in
    /// tensors `[1, total, …]`.
    pub packed: Option<(Tensor, usize)>,
    /// Tokens of the last step to commit first.
    pub previous: Option<Previous>,
    /// Norm of the outputs.
    pub norm: Option<Norm>,
    /// `[B]`: a row with a value other than 0 starts from zeros, whatever its slot holds.
    pub fresh: Option<Tensor>,
    /// `[B]`: number of tokens of each sequence before the row's first. Makes any step a prefill.
    pub positions: Option<Tensor>,
    /// Checkpoints: distance in tokens, a multiple of 64, and slots `[B, C]` for the states.
    pub checkpoints: Option<(usize, Tensor)>,
    /// State after every token, `[B, steps, HV, V, K]` (V-last: `[B, steps, HV, K, V]`) with steps ≥ T.
    pub snapshots: Option<Tensor>,
    /// Deferred write-back: the ring of pending tokens.
    pub pending: Option<Pending>,
    /// Workspace of a prefill on a GPU, f32. By default it is allocated when it is needed.
    pub workspace: Option<Tensor>,
    /// Options that are fixed for a layer.
    pub options: Options,
    /// Dtype of the output; by default, the dtype of v or x.
    pub dtype: Option<DType>,
}

/// A commit: the first `keep` of some tokens advance the states. See [`gated_delta::Commit`].
#[derive(Clone, Debug)]
pub struct Commit {
    /// Inputs of the tokens: [`Stored::Kv`] or [`Stored::Conv`].
    pub stored: Stored,
    /// Gates of the tokens.
    pub gates: Gates,
    /// `[B]`: number of tokens to commit, in 0..=T'.
    pub keep: Tensor,
    /// States that the commit starts from and writes: [`Keep::Last`].
    pub states: States,
    /// `[B]`: rows that start from zeros, as in a step.
    pub fresh: Option<Tensor>,
    /// Options that are fixed for a layer.
    pub options: Options,
}

/// A flush: adds pending tokens to the states. See [`gated_delta::Flush`].
#[derive(Clone, Debug)]
pub struct Flush {
    /// States of the rows: [`Keep::Last`].
    pub states: States,
    /// Ring of pending tokens.
    pub pending: Pending,
    /// Windows `[P, D, W − 1]`, if `pending` has inputs.
    pub windows: Option<Tensor>,
    /// Options that are fixed for a layer.
    pub options: Options,
}

impl Step {
    /// A step of dense rows, with the default options.
    #[must_use]
    pub fn new(inputs: Inputs, gates: impl Into<Gates>, states: States) -> Self {
        Self {
            inputs,
            gates: gates.into(),
            states,
            packed: None,
            previous: None,
            norm: None,
            fresh: None,
            positions: None,
            checkpoints: None,
            snapshots: None,
            pending: None,
            workspace: None,
            options: Options::default(),
            dtype: None,
        }
    }

    /// Makes rows packed: bounds `cu_seqlens` `[B + 1]`, and T, the largest number of tokens of a row.
    #[must_use]
    pub fn packed(mut self, cu_seqlens: &Tensor, max_tokens: usize) -> Self {
        self.packed = Some((cu_seqlens.clone(), max_tokens));
        self
    }

    /// Makes the step a resume, which first commits tokens of the last step.
    #[must_use]
    pub fn previous(mut self, previous: Previous) -> Self {
        self.previous = Some(previous);
        self
    }

    /// Adds a norm of the outputs.
    #[must_use]
    pub fn norm(mut self, norm: Norm) -> Self {
        self.norm = Some(norm);
        self
    }

    /// Sets the rows that start from zeros: those with a value other than 0 in `fresh` `[B]`.
    #[must_use]
    pub fn fresh(mut self, fresh: &Tensor) -> Self {
        self.fresh = Some(fresh.clone());
        self
    }

    /// Sets the options of the layer.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Launches the step and returns the output `[B, T, HV, V]`, for packed rows `[1, total, HV, V]`.
    ///
    /// # Errors
    /// Any rule that the arguments break, with the argument's name; errors of the device.
    pub fn run(&self) -> Result<Tensor> {
        let o = self.output()?;
        self.run_into(&o)?;
        Ok(o)
    }

    /// Launches the step with the output `o`, whose dims are those of the result of [`run`](Self::run). It is for an engine that
    /// allocates nothing under capture.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub fn run_into(&self, o: &Tensor) -> Result<()> {
        let launch = Launch::Step(self, o);
        launch::launch(&launch, &self.states.pool, self.workspace.as_ref())
    }

    /// Compiles the kernels of [`run`](Self::run) for any number of rows, and launches nothing. Call it before a capture. On the
    /// CPU it only checks the arguments.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub fn prewarm(&self) -> Result<()> {
        launch::prewarm(&Launch::Step(self, &self.output()?), &self.states.pool)
    }

    /// Size of a [`workspace`](Self::workspace) in f32 elements that is enough for the step on any GPU; 0 if none is needed.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub fn workspace_elements(&self) -> Result<usize> {
        Launch::Step(self, &self.output()?).workspace_elements()
    }

    /// Allocates the output.
    fn output(&self) -> Result<Tensor> {
        let (tokens, dtype) = match &self.inputs {
            Inputs::Qkv { v, .. } => (v.dims(), v.dtype()),
            Inputs::Conv(conv) => (conv.x.dims(), conv.x.dtype()),
        };
        let [batch, count, ..] = tokens else {
            return bail!("v or x: wanted [B, T, …], got {tokens:?}");
        };
        let [_, value_dim] = self.states.head_dims(&self.options)?;
        let dims = [*batch, *count, self.states.pool.dim(1)?, value_dim];
        let dtype = self.dtype.unwrap_or(dtype);
        let device = self.states.pool.device();
        if device.is_cpu() {
            return Tensor::zeros(&dims[..], dtype, device);
        }
        // SAFETY: the launch writes every element of this GPU memory that belongs to a token or to no row. All other elements
        // belong to rows with invalid bounds.
        unsafe { Tensor::empty(&dims[..], dtype, device) }
    }

    pub(crate) fn tensors<'t>(&'t self, o: &'t Tensor) -> Vec<Named<'t>> {
        let mut all = self.gates.tensors(["a", "b", "g", "beta"]);
        match &self.inputs {
            Inputs::Qkv { q, k, v } => all.extend([named("q", q), named("k", k), named("v", v)]),
            Inputs::Conv(conv) => all.extend(conv.tensors(self.states.is_written())),
        }
        all.push(named("o", o).written());
        all.extend(self.states.tensors(self.pending.is_some()));
        if let Some((cu_seqlens, _)) = &self.packed {
            all.push(named("cu_seqlens", cu_seqlens));
        }
        if let Some(previous) = &self.previous {
            match &previous.stored {
                Stored::Kv { k, v } => all.extend([named("previous k", k), named("previous v", v)]),
                Stored::X(x) => all.push(named("previous x", x)),
                Stored::Conv(conv) => all.push(named("previous x", &conv.x)),
            }
            all.push(named("previous gate", &previous.gate));
            all.push(named("previous beta", &previous.beta));
            all.push(named("keep", &previous.keep));
        }
        if let Some(norm) = &self.norm {
            all.extend([named("z", &norm.z), named("norm_weight", &norm.weight)]);
        }
        let optional = [("fresh", &self.fresh), ("positions", &self.positions)];
        for (name, tensor) in optional {
            all.extend(tensor.as_ref().map(|tensor| named(name, tensor)));
        }
        if let Some((_, slots)) = &self.checkpoints {
            all.push(named("checkpoint_slots", slots));
        }
        if let Some(snapshots) = &self.snapshots {
            all.push(named("snapshots", snapshots).written());
        }
        if let Some(pending) = &self.pending {
            all.extend(pending.tensors());
        }
        all
    }

    /// The step of gated-delta with these tensors, for gates of one operator.
    pub(crate) fn build<'x, G>(
        &self,
        at: &At<'x>,
        gates: G,
        o: &Tensor,
    ) -> Result<gated_delta::Step<'x, G>> {
        let inputs = match &self.inputs {
            Inputs::Qkv { q, k, v } => {
                let [key_dim, value_dim] = self.states.head_dims(&self.options)?;
                gated_delta::Inputs::qkv(
                    at.heads(q, key_dim)?,
                    at.heads(k, key_dim)?,
                    at.heads(v, value_dim)?,
                )
            }
            Inputs::Conv(conv) => gated_delta::Inputs::conv(conv.build(at)?),
        };
        let states = self.states.build(at)?;
        let mut step = gated_delta::Step::new(inputs, gates, at.get(o)?, states);
        if let Some((cu_seqlens, max_tokens)) = &self.packed {
            step = step.packed(at.get(cu_seqlens)?, *max_tokens);
        }
        if let Some(previous) = &self.previous {
            step = step.previous(gated_delta::Previous::new(
                previous
                    .stored
                    .build(at, self.states.head_dims(&self.options)?)?,
                at.get(&previous.gate)?,
                at.get(&previous.beta)?,
                at.get(&previous.keep)?,
            ));
        }
        if let Some(norm) = &self.norm {
            let z = at.heads(&norm.z, norm.weight.elem_count())?;
            let of = gated_delta::Norm::new(z, at.get(&norm.weight)?, norm.eps);
            step = step.norm(of.activation(norm.activation));
        }
        step.fresh = at.optional(&self.fresh)?;
        step.positions = at.optional(&self.positions)?;
        step.snapshots = at.optional(&self.snapshots)?;
        if let Some((every, slots)) = &self.checkpoints {
            step = step.checkpoints(*every, at.get(slots)?);
        }
        if let Some(pending) = &self.pending {
            step = step.pending(pending.build(at)?);
        }
        Ok(step.options(self.options))
    }
}

impl Commit {
    /// A commit with the default options.
    #[must_use]
    pub fn new(stored: Stored, gates: impl Into<Gates>, keep: &Tensor, states: States) -> Self {
        Self {
            stored,
            gates: gates.into(),
            keep: keep.clone(),
            states,
            fresh: None,
            options: Options::default(),
        }
    }

    /// Launches the commit.
    ///
    /// # Errors
    /// The errors of [`Step::run`].
    pub fn run(&self) -> Result<()> {
        launch::launch(&Launch::Commit(self), &self.states.pool, None)
    }

    /// Compiles the commit's kernels, as [`Step::prewarm`] does.
    ///
    /// # Errors
    /// The errors of [`Step::run`].
    pub fn prewarm(&self) -> Result<()> {
        launch::prewarm(&Launch::Commit(self), &self.states.pool)
    }

    pub(crate) fn tensors(&self) -> Vec<Named<'_>> {
        let mut all = self.gates.tensors(["a", "b", "g", "beta"]);
        match &self.stored {
            Stored::Kv { k, v } => all.extend([named("k", k), named("v", v)]),
            Stored::X(x) => all.push(named("x", x)),
            Stored::Conv(conv) => all.extend(conv.tensors(true)),
        }
        all.push(named("keep", &self.keep));
        all.extend(self.states.tensors(false));
        all.extend(self.fresh.as_ref().map(|tensor| named("fresh", tensor)));
        all
    }

    pub(crate) fn build<'x, G>(&self, at: &At<'x>, gates: G) -> Result<gated_delta::Commit<'x, G>> {
        let head_dims = self.states.head_dims(&self.options)?;
        let (stored, keep) = (self.stored.build(at, head_dims)?, at.get(&self.keep)?);
        let states = self.states.updated(at)?;
        let mut commit = gated_delta::Commit::new(stored, gates, keep, states);
        commit.fresh = at.optional(&self.fresh)?;
        Ok(commit.options(self.options))
    }
}

impl Flush {
    /// A flush of the rows of `pending`, with the default options.
    #[must_use]
    pub fn new(states: States, pending: Pending) -> Self {
        Self {
            states,
            pending,
            windows: None,
            options: Options::default(),
        }
    }

    /// Launches the flush.
    ///
    /// # Errors
    /// The errors of [`Step::run`].
    pub fn run(&self) -> Result<()> {
        launch::launch(&Launch::Flush(self), &self.states.pool, None)
    }

    pub(crate) fn tensors(&self) -> Vec<Named<'_>> {
        let mut all = self.states.tensors(true);
        all.extend(self.pending.tensors());
        let windows = self.windows.as_ref();
        all.extend(windows.map(|tensor| named("windows", tensor).written()));
        all
    }

    pub(crate) fn build<'x>(&self, at: &At<'x>) -> Result<gated_delta::Flush<'x>> {
        let pending = self.pending.build(at)?;
        let mut flush = gated_delta::Flush::new(self.states.updated(at)?, pending);
        flush.windows = at.optional(&self.windows)?;
        Ok(flush.options(self.options))
    }
}

impl Convolution {
    fn tensors(&self, is_written: bool) -> Vec<Named<'_>> {
        let windows = named("windows", &self.windows);
        let is_written = is_written && self.write_windows.is_none();
        let mut all = vec![
            named("x", &self.x),
            named("conv_weight", &self.weight),
            if is_written {
                windows.written()
            } else {
                windows
            },
        ];
        all.extend(self.bias.as_ref().map(|bias| named("conv_bias", bias)));
        let written = [
            ("write_windows", &self.write_windows),
            ("window_snapshots", &self.window_snapshots),
        ];
        for (name, tensor) in written {
            all.extend(tensor.as_ref().map(|tensor| named(name, tensor).written()));
        }
        all
    }

    fn build<'x>(&self, at: &At<'x>) -> Result<gated_delta::Convolution<'x>> {
        let (x, weight) = (at.get(&self.x)?, at.get(&self.weight)?);
        let windows = at.get(&self.windows)?;
        let mut conv = gated_delta::Convolution::new(x, self.heads, weight, windows);
        conv.bias = at.optional(&self.bias)?;
        conv.write_windows = at.optional(&self.write_windows)?;
        conv.window_snapshots = at.optional(&self.window_snapshots)?;
        Ok(conv.activation(self.activation))
    }
}

impl States {
    /// Head dims, K and V.
    fn head_dims(&self, options: &Options) -> Result<[usize; 2]> {
        match (self.pool.dims(), options.state_layout) {
            (&[_, _, v, k], StateLayout::KLast) | (&[_, _, k, v], StateLayout::VLast) => Ok([k, v]),
            (other, _) => bail!("pool: wanted [P, HV, V, K] or [P, HV, K, V], got {other:?}"),
        }
    }

    fn is_written(&self) -> bool {
        !matches!(self.keep, Keep::None { .. })
    }

    fn tensors(&self, waits: bool) -> Vec<Named<'_>> {
        let pool = named("pool", &self.pool);
        let is_written = (self.is_written() || waits) && self.write_pool.is_none();
        let mut all = vec![if is_written { pool.written() } else { pool }];
        let write_pool = self.write_pool.as_ref();
        all.extend(write_pool.map(|pool| named("write_pool", pool).written()));
        match &self.keep {
            Keep::Last { slots, write_slots } => {
                all.extend(slots.as_ref().map(|of| named("read_slots", of)));
                all.extend(write_slots.as_ref().map(|of| named("write_slots", of)));
            }
            Keep::None { slots } => all.extend(slots.as_ref().map(|of| named("read_slots", of))),
            Keep::Each {
                token_slots,
                accepted,
            } => {
                all.push(named("token_slots", token_slots));
                all.extend(accepted.as_ref().map(|of| named("accepted", of)));
            }
        }
        all
    }

    fn build<'x>(&self, at: &At<'x>) -> Result<gated_delta::States<'x>> {
        let pool = at.get(&self.pool)?;
        Ok(match &self.keep {
            Keep::Last { .. } => self.updated(at)?.into(),
            Keep::None { slots } => {
                if self.write_pool.is_some() {
                    return bail!("write_pool: states that are not written have none");
                }
                let mut states = gated_delta::States::read_only(pool);
                states.read_slots = at.optional(slots)?;
                states.into()
            }
            Keep::Each {
                token_slots,
                accepted,
            } => {
                let mut states = gated_delta::States::per_token(pool, at.get(token_slots)?);
                states.accepted = at.optional(accepted)?;
                states.write_pool = at.optional(&self.write_pool)?;
                states.into()
            }
        })
    }

    fn updated<'x>(&self, at: &At<'x>) -> Result<gated_delta::step::Update<'x>> {
        let Keep::Last { slots, write_slots } = &self.keep else {
            return bail!("states: wanted Keep::Last, which this launch writes, got another");
        };
        let mut states = gated_delta::States::update(at.get(&self.pool)?);
        states.read_slots = at.optional(slots)?;
        states.write_slots = at.optional(write_slots)?;
        states.write_pool = at.optional(&self.write_pool)?;
        Ok(states)
    }
}

impl Stored {
    fn build<'x>(&self, at: &At<'x>, head_dims: [usize; 2]) -> Result<gated_delta::Stored<'x>> {
        Ok(match self {
            Self::Kv { k, v } => {
                gated_delta::Stored::kv(at.heads(k, head_dims[0])?, at.heads(v, head_dims[1])?)
            }
            Self::X(x) => gated_delta::Stored::x(at.get(x)?),
            Self::Conv(conv) => gated_delta::Stored::conv(conv.build(at)?),
        })
    }
}

impl Pending {
    fn tensors(&self) -> Vec<Named<'_>> {
        let mut all = vec![
            named("keys", &self.keys).written(),
            named("updates", &self.updates).written(),
            named("decays", &self.decays).written(),
            named("pending len", &self.len),
            named("pending base", &self.base),
        ];
        let inputs = self.inputs.as_ref();
        all.extend(inputs.map(|inputs| named("inputs", inputs).written()));
        all
    }

    fn build<'x>(&self, at: &At<'x>) -> Result<gated_delta::Pending<'x>> {
        let rings = Rings {
            keys: at.get(&self.keys)?,
            updates: at.get(&self.updates)?,
            decays: at.get(&self.decays)?,
            len: at.get(&self.len)?,
            base: at.get(&self.base)?,
        };
        let mut pending = gated_delta::Pending::new(rings).most(self.most);
        pending.inputs = at.optional(&self.inputs)?;
        Ok(pending)
    }
}

impl Gates {
    /// Gates of a range of tokens along the second dim.
    pub(crate) fn narrow(&self, first: usize, tokens: usize) -> Result<Self> {
        let of = |tensor: &Tensor| tensor.narrow(1, first, tokens);
        let mut gates = self.clone();
        match &mut gates {
            Self::Gdn(GdnGates::Raw { a, b, .. }) => (*a, *b) = (of(a)?, of(b)?),
            Self::Gdn(GdnGates::Given { g, beta }) => (*g, *beta) = (of(g)?, of(beta)?),
            Self::Kda(KdaGates { g, beta, .. }) => (*g, *beta) = (of(g)?, of(beta)?),
        }
        Ok(gates)
    }

    fn tensors(&self, [a_name, b_name, g_name, beta_name]: [&'static str; 4]) -> Vec<Named<'_>> {
        match self {
            Self::Gdn(GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            }) => vec![
                named(a_name, a),
                named(b_name, b),
                named("A_log", a_log),
                named("dt_bias", dt_bias),
            ],
            Self::Gdn(GdnGates::Given { g, beta }) => {
                vec![named(g_name, g), named(beta_name, beta)]
            }
            Self::Kda(gates) => {
                let mut all = vec![named(g_name, &gates.g), named(beta_name, &gates.beta)];
                let (a_log, dt_bias) = match &gates.kind {
                    KdaDecay::Log => (None, None),
                    KdaDecay::Softplus { a_log, dt_bias } => (Some(a_log), dt_bias.as_ref()),
                    KdaDecay::LowerBound { a_log, dt_bias, .. } => {
                        (a_log.as_ref(), dt_bias.as_ref())
                    }
                };
                all.extend(a_log.map(|of| named("A_log", of)));
                all.extend(dt_bias.map(|of| named("dt_bias", of)));
                all
            }
        }
    }
}

impl GdnGates {
    pub(crate) fn build<'x>(&self, at: &At<'x>) -> Result<gated_delta::GdnGates<'x>> {
        Ok(match self {
            Self::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => {
                gated_delta::GdnGates::raw(at.get(a)?, at.get(b)?, at.get(a_log)?, at.get(dt_bias)?)
                    .beta_scale(*beta_scale)
            }
            Self::Given { g, beta } => gated_delta::GdnGates::given(at.get(g)?, at.get(beta)?),
        })
    }
}

impl KdaGates {
    pub(crate) fn build<'x>(&self, at: &At<'x>) -> Result<gated_delta::KdaGates<'x>> {
        let kind = match &self.kind {
            KdaDecay::Log => gated_delta::KdaDecay::Log,
            KdaDecay::Softplus { a_log, dt_bias } => gated_delta::KdaDecay::Softplus {
                a_log: at.get(a_log)?,
                dt_bias: at.optional(dt_bias)?,
            },
            KdaDecay::LowerBound {
                lower_bound,
                a_log,
                dt_bias,
            } => gated_delta::KdaDecay::LowerBound {
                lower_bound: *lower_bound,
                a_log: at.optional(a_log)?,
                dt_bias: at.optional(dt_bias)?,
            },
        };
        let (g, beta) = (at.get(&self.g)?, at.get(&self.beta)?);
        Ok(gated_delta::KdaGates::new(g, kind, beta, self.beta_kind))
    }
}

/// Checks a step or a commit like a launch.
pub(crate) fn check<W: gated_delta::Work>(work: &W) -> Result<()> {
    work.selected().map(drop).map_err(wrap)
}
