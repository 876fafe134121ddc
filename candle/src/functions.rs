//! Functions on tensors, in the style of candle's other kernel crates.

use candle_core::{Result, Tensor};
use gated_delta::Options;

use crate::step::{
    Commit, Convolution, Flush, Gates, GdnGates, Inputs, KdaGates, Norm, Pending, States, Step,
    Stored,
};

/// Gated DeltaNet (arXiv 2412.06464) with dense rows: q and k `[B, T, H, K]`, v `[B, T, HV, V]`, each bf16, f16 or f32. The last
/// dim is contiguous; other strides are free. The output `[B, T, HV, V]` has v's dtype. States are updated in place.
/// [`gated_delta::Step`] has the formulas.
///
/// T = 1 is a decode. Up to 16 tokens are computed one by one or together. More than 16 tokens are a prefill, whose products
/// have f16 factors. [`Formulation::Recurrent`](gated_delta::Formulation::Recurrent) in `options` computes in f32, up to 16
/// tokens in a launch. With f32 states, a prompt in several such launches has the bits of single tokens.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gated_delta::{GdnGates, Options, States, gdn};
///
/// let (b, h, hv, k) = (2, 2, 4, 64);
/// let device = &Device::Cpu;
/// let q = Tensor::randn(0f32, 1., (b, 1, h, k), device)?;
/// let v = Tensor::randn(0f32, 1., (b, 1, hv, k), device)?;
/// let (a, zeros) = (Tensor::zeros((b, 1, hv), DType::F32, device)?, Tensor::zeros(hv, DType::F32, device)?);
/// let pool = Tensor::zeros((8, hv, k, k), DType::F32, device)?; // eight slots
/// let slots = Tensor::new(&[5u32, 2], device)?;
/// let gates = GdnGates::raw(&a, &a, &zeros, &zeros);
/// let o = gdn(&q, &q, &v, &gates, &States::update(&pool, &slots), Options::default())?;
/// assert_eq!(o.dims(), [b, 1, hv, k]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Any rule that the arguments break, with the argument's name.
pub fn gdn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &GdnGates,
    states: &States,
    options: Options,
) -> Result<Tensor> {
    dense([q, k, v], gates.clone().into(), states, options)
}

/// Kimi Delta Attention (arXiv 2510.26692) with dense rows: like [`gdn`], with one decay per key channel.
///
/// # Errors
/// The errors of [`gdn`].
pub fn kda(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &KdaGates,
    states: &States,
    options: Options,
) -> Result<Tensor> {
    dense([q, k, v], gates.clone().into(), states, options)
}

/// Gated DeltaNet with packed rows of different lengths: q and k `[total, H, K]`, v `[total, HV, V]`, gates `[total, HV]`. The output is
/// `[total, HV, V]`. Row b has the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]` (u32, i32 or i64, `[B + 1]`), at most `max_seqlen`. A
/// `max_seqlen` above 16 makes the launch a prefill.
///
/// # Errors
/// The errors of [`gdn`].
#[expect(clippy::too_many_arguments, reason = "as candle-flash-attn's")]
pub fn gdn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &GdnGates,
    states: &States,
    cu_seqlens: &Tensor,
    max_seqlen: usize,
    options: Options,
) -> Result<Tensor> {
    let gates = match gates {
        GdnGates::Raw {
            a,
            b,
            a_log,
            dt_bias,
            beta_scale,
        } => GdnGates::Raw {
            a: a.unsqueeze(0)?,
            b: b.unsqueeze(0)?,
            a_log: a_log.clone(),
            dt_bias: dt_bias.clone(),
            beta_scale: *beta_scale,
        },
        GdnGates::Given { g, beta } => GdnGates::given(&g.unsqueeze(0)?, &beta.unsqueeze(0)?),
    };
    varlen(
        [q, k, v],
        gates.into(),
        states,
        (cu_seqlens, max_seqlen),
        options,
    )
}

/// Kimi Delta Attention with packed rows of different lengths: like [`gdn_varlen`], with g `[total, HV, K]` and β `[total, HV]`.
///
/// # Errors
/// The errors of [`gdn`].
#[expect(clippy::too_many_arguments, reason = "as candle-flash-attn's")]
pub fn kda_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &KdaGates,
    states: &States,
    cu_seqlens: &Tensor,
    max_seqlen: usize,
    options: Options,
) -> Result<Tensor> {
    let gates = KdaGates {
        g: gates.g.unsqueeze(0)?,
        beta: gates.beta.unsqueeze(0)?,
        ..gates.clone()
    };
    varlen(
        [q, k, v],
        gates.into(),
        states,
        (cu_seqlens, max_seqlen),
        options,
    )
}

/// The whole layer between its projections, in one launch: the short convolution of `conv.x` `[B, T, D]`, the recurrence, and the gated
/// norm. The type of `gates` chooses GDN or KDA. The output `[B, T, HV, V]` has x's dtype.
///
/// Ragged rows, fresh rows, drafts and checkpoints are methods of [`Step`].
///
/// # Errors
/// The errors of [`gdn`].
pub fn layer(
    conv: Convolution,
    gates: impl Into<Gates>,
    norm: Norm,
    states: &States,
    options: Options,
) -> Result<Tensor> {
    Step::new(Inputs::Conv(conv), gates, states.clone())
        .norm(norm)
        .options(options)
        .run()
}

/// Advances states by the first `keep` `[B]` of T' tokens, after a verify that wrote no states. `keep` = 0 copies a state from
/// its slot to its [write slot](States::write_slots). The type of `gates` chooses GDN or KDA.
///
/// # Errors
/// The errors of [`gdn`].
pub fn commit(
    stored: Stored,
    gates: impl Into<Gates>,
    keep: &Tensor,
    states: &States,
    options: Options,
) -> Result<()> {
    let mut commit = Commit::new(stored, gates, keep, states.clone());
    commit.options = options;
    commit.run()
}

/// Flushes the pending tokens of every row into its state, before the state is copied or used by another operator.
///
/// # Errors
/// The errors of [`gdn`].
pub fn flush(states: &States, pending: Pending, options: Options) -> Result<()> {
    let mut flush = Flush::new(states.clone(), pending);
    flush.options = options;
    flush.run()
}

fn dense(
    [q, k, v]: [&Tensor; 3],
    gates: Gates,
    states: &States,
    options: Options,
) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(Tensor::clone);
    Step::new(Inputs::Qkv { q, k, v }, gates, states.clone())
        .options(options)
        .run()
}

fn varlen(
    [q, k, v]: [&Tensor; 3],
    gates: Gates,
    states: &States,
    (cu_seqlens, max_seqlen): (&Tensor, usize),
    options: Options,
) -> Result<Tensor> {
    let (q, k, v) = (q.unsqueeze(0)?, k.unsqueeze(0)?, v.unsqueeze(0)?);
    Step::new(Inputs::Qkv { q, k, v }, gates, states.clone())
        .packed(cu_seqlens, max_seqlen)
        .options(options)
        .run()?
        .squeeze(0)
}
