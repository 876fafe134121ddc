//! Launches on the CPU: the recurrence token by token in f32, with value heads spread over all threads.
//!
//! The documentation of gated-delta defines the meaning of a launch, and gated-delta has checked the arguments before. This code
//! is not the kernels' source, and its bits differ from a GPU's.

mod head;
mod rows;
mod view;
mod window;

use candle_core::Result;
use gated_delta::step::pending;
use gated_delta::{
    Activation, Commit, Convolution, Flush, Gdn, GdnGates, HeadMap, Inputs, Kda, KdaBeta, KdaDecay,
    KdaGates, Norm, Options, Pending, Previous, StateLayout, States, Stored, Tensor,
};
use rayon::prelude::*;

use crate::error::bail;

use head::Head;
use rows::Row;
use view::View;
use window::Convolved;

/// A launch on the CPU.
#[derive(Clone)]
pub struct Work<'a> {
    new: Option<Tokens<'a>>,
    o: Option<View<'a>>,
    previous: Option<Tokens<'a>>,
    keep: Option<View<'a>>,
    conv: Option<Conv<'a>>,
    form: Form<'a>,
    states: States<'a>,
    snapshots: Option<View<'a>>,
    cu_seqlens: Option<View<'a>>,
    /// T, the largest number of tokens of a row.
    tokens: usize,
    batch: usize,
    norm: Option<GatedNorm<'a>>,
    fresh: Option<View<'a>>,
    positions: Option<View<'a>>,
    checkpoints: Option<(usize, View<'a>)>,
    ring: Option<Ring<'a>>,
    options: Options,
    heads: Heads,
    /// Pool that states are read from, and pool that they are written to.
    pools: [View<'a>; 2],
}

/// Head counts and dims: H, HV, K, V.
#[derive(Clone, Copy)]
struct Heads {
    h: usize,
    hv: usize,
    k: usize,
    v: usize,
}

/// Inputs and gates of tokens.
#[derive(Clone)]
struct Tokens<'a> {
    source: Source<'a>,
    gate: View<'a>,
    beta: View<'a>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one or two of a launch; a box would allocate"
)]
#[derive(Clone)]
enum Source<'a> {
    /// q, k and v. For previous tokens, k takes the place of q.
    Qkv([View<'a>; 3]),
    X(View<'a>),
}

/// A convolution without its projection x.
#[derive(Clone)]
struct Conv<'a> {
    weight: View<'a>,
    bias: Option<View<'a>>,
    activation: Activation,
    windows: View<'a>,
    write_windows: View<'a>,
    snapshots: Option<View<'a>>,
}

#[derive(Clone)]
struct GatedNorm<'a> {
    z: View<'a>,
    weight: Vec<f32>,
    eps: f32,
    activation: Activation,
}

/// Form of the gates, and their parameters.
#[derive(Clone)]
struct Form<'a> {
    kind: Kind,
    a_log: Option<View<'a>>,
    dt_bias: Option<View<'a>>,
    beta_is_logit: bool,
    beta_scale: f32,
    per_channel: bool,
}

#[derive(Clone, Copy)]
enum Kind {
    Log,
    Softplus,
    LowerBound(f32),
}

#[derive(Clone)]
struct Ring<'a> {
    keys: View<'a>,
    updates: View<'a>,
    decays: View<'a>,
    len: View<'a>,
    base: View<'a>,
    inputs: Option<View<'a>>,
    most: usize,
    entries: usize,
    /// Windows to update, in a flush.
    windows: Option<View<'a>>,
}

/// Pending tokens of a row.
#[derive(Clone, Copy)]
struct Waiting {
    len: usize,
    base: usize,
    /// Whether the step flushes: it writes the state before the row's tokens.
    is_flushed: bool,
}

/// A view of an optional tensor.
fn view<'a>(tensor: &Option<Tensor<'a>>) -> Option<View<'a>> {
    tensor.as_ref().map(View::of)
}

/// Parts of a launch other than its gates.
struct Parts<'a> {
    new: Option<(Inputs<'a>, [Tensor<'a>; 3])>,
    previous: Option<Previous<'a>>,
    states: States<'a>,
    options: Options,
}

impl<'a> Work<'a> {
    /// A GDN step.
    pub fn gdn(step: &Gdn<'a>) -> Result<Self> {
        let (gate, beta, form) = gdn_gates(&step.gates)?;
        Self::step(step, [gate, beta], form)
    }

    /// A KDA step.
    pub fn kda(step: &Kda<'a>) -> Result<Self> {
        let gates = [step.gates.g, step.gates.beta];
        Self::step(step, gates, kda_gates(&step.gates)?)
    }

    /// A GDN commit.
    pub fn gdn_commit(commit: &Commit<'a, GdnGates<'a>>) -> Result<Self> {
        let (gate, beta, form) = gdn_gates(&commit.gates)?;
        Self::commit(commit, [gate, beta], form)
    }

    /// A KDA commit.
    pub fn kda_commit(commit: &Commit<'a, KdaGates<'a>>) -> Result<Self> {
        let gates = [commit.gates.g, commit.gates.beta];
        Self::commit(commit, gates, kda_gates(&commit.gates)?)
    }

    /// A flush.
    pub fn flush(flush: &Flush<'a>) -> Result<Self> {
        let per_channel = flush.pending.decays.dims().len() == 4;
        let form = Form {
            kind: Kind::Log,
            a_log: None,
            dt_bias: None,
            beta_is_logit: false,
            beta_scale: 1.0,
            per_channel,
        };
        let parts = Parts {
            new: None,
            previous: None,
            states: flush.states.into(),
            options: flush.options,
        };
        let mut work = Self::new(parts, form)?;
        work.batch = flush.pending.len.dims()[0];
        work.heads.h = flush.pending.keys.dims()[1];
        work.ring = Some(Ring::new(&flush.pending, view(&flush.windows)));
        Ok(work)
    }

    fn step<G>(
        step: &gated_delta::Step<'a, G>,
        [gate, beta]: [Tensor<'a>; 2],
        form: Form<'a>,
    ) -> Result<Self> {
        let parts = Parts {
            new: Some((step.inputs, [gate, beta, step.o])),
            previous: step.previous,
            states: step.states,
            options: step.options,
        };
        let mut work = Self::new(parts, form)?;
        work.snapshots = view(&step.snapshots);
        work.norm = step.norm.as_ref().map(GatedNorm::new);
        work.fresh = view(&step.fresh);
        work.positions = view(&step.positions);
        work.checkpoints = step
            .checkpoints
            .map(|of| (of.every.max(1), View::of(&of.slots)));
        if let Some(packed) = step.packed {
            work.tokens = packed.max_tokens;
            work.batch = packed.cu_seqlens.dims()[0].saturating_sub(1);
            work.cu_seqlens = Some(View::of(&packed.cu_seqlens));
        }
        work.ring = step.pending.as_ref().map(|of| Ring::new(of, None));
        Ok(work)
    }

    fn commit<G>(
        commit: &Commit<'a, G>,
        [gate, beta]: [Tensor<'a>; 2],
        form: Form<'a>,
    ) -> Result<Self> {
        let parts = Parts {
            new: None,
            previous: Some(Previous::new(commit.stored, gate, beta, commit.keep)),
            states: commit.states.into(),
            options: commit.options,
        };
        let mut work = Self::new(parts, form)?;
        work.batch = commit.keep.dims()[0];
        work.fresh = view(&commit.fresh);
        Ok(work)
    }

    fn new(parts: Parts<'a>, form: Form<'a>) -> Result<Self> {
        let pools = pools_of(&parts.states)?;
        let pool = pools[0];
        let [rows, columns] = [pool.dims()[2], pool.dims()[3]];
        let (k, v) = match parts.options.state_layout {
            StateLayout::KLast => (columns, rows),
            StateLayout::VLast => (rows, columns),
        };
        let mut heads = Heads {
            h: 0,
            hv: pool.dims()[1],
            k,
            v,
        };
        let mut conv = None;
        let mut new = None;
        if let Some((inputs, [gate, beta, _])) = parts.new {
            let source = match inputs {
                Inputs::Qkv { q, k, v, .. } => {
                    heads.h = q.dims()[2];
                    Source::Qkv([q, k, v].map(|tensor| View::of(&tensor)))
                }
                Inputs::Conv(of) => {
                    heads.h = of.heads;
                    conv = Some(Conv::new(&of));
                    Source::X(View::of(&of.x))
                }
                _ => return unknown("inputs"),
            };
            new = Some(Tokens::new(source, &gate, &beta));
        }
        let mut previous = None;
        if let Some(of) = parts.previous {
            let source = match of.stored {
                Stored::Kv { k, v, .. } => {
                    heads.h = k.dims()[2];
                    Source::Qkv([k, k, v].map(|tensor| View::of(&tensor)))
                }
                Stored::X { x, .. } => Source::X(View::of(&x)),
                Stored::Conv(of) => {
                    heads.h = of.heads;
                    conv = Some(Conv::new(&of));
                    Source::X(View::of(&of.x))
                }
                _ => return unknown("stored"),
            };
            previous = Some(Tokens::new(source, &of.gate, &of.beta));
        }
        let o = parts.new.map(|(_, [.., o])| o);
        let dims = o.map(|o| [o.dims()[0], o.dims()[1]]);
        Ok(Self {
            new,
            o: view(&o),
            previous,
            keep: parts.previous.map(|of| View::of(&of.keep)),
            conv,
            form,
            states: parts.states,
            snapshots: None,
            cu_seqlens: None,
            tokens: dims.map_or(0, |[_, tokens]| tokens),
            batch: dims.map_or(0, |[batch, _]| batch),
            norm: None,
            fresh: None,
            positions: None,
            checkpoints: None,
            ring: None,
            options: parts.options,
            heads,
            pools: pools.map(|pool| View::of(&pool)),
        })
    }

    /// Runs the launch.
    pub fn run(&self) -> Result<()> {
        let all = self.all_rows();
        let rows: Vec<Row> = all.into_iter().flatten().collect();
        self.check_distinct(&rows)?;
        let convolved: Vec<Option<Convolved>> = rows
            .par_iter()
            .map(|row| self.conv.as_ref().map(|conv| self.convolve(conv, row)))
            .collect();
        if self.conv.is_none() {
            rows.par_iter().for_each(|row| self.flush_window(row));
        }
        let heads = rows.len() * self.heads.hv;
        (0..heads).into_par_iter().for_each(|index| {
            let (row, hv) = (index / self.heads.hv, index % self.heads.hv);
            Head::new(self, &rows[row], convolved[row].as_ref(), hv).run();
        });
        Ok(())
    }

    /// Query/key head of a value head.
    fn head_of(&self, hv: usize) -> usize {
        match self.options.head_map {
            HeadMap::Grouped => hv / (self.heads.hv / self.heads.h),
            HeadMap::Tiled => hv % self.heads.h,
        }
    }
}

/// The pool that states are read from, and the pool that they are written to.
fn pools_of<'a>(states: &States<'a>) -> Result<[Tensor<'a>; 2]> {
    match states {
        States::Update(of) => Ok([of.pool, of.write_pool.unwrap_or(of.pool)]),
        States::ReadOnly(of) => Ok([of.pool; 2]),
        States::PerToken(of) => Ok([of.pool, of.write_pool.unwrap_or(of.pool)]),
        _ => unknown("states"),
    }
}

/// Error for a kind that a newer gated-delta has added, and that this crate never makes.
fn unknown<T>(what: &str) -> Result<T> {
    bail!("{what}: of a kind that the CPU has no code for")
}

impl<'a> Tokens<'a> {
    fn new(source: Source<'a>, gate: &Tensor<'a>, beta: &Tensor<'a>) -> Self {
        Self {
            source,
            gate: View::of(gate),
            beta: View::of(beta),
        }
    }
}

impl<'a> Conv<'a> {
    fn new(of: &Convolution<'a>) -> Self {
        Self {
            weight: View::of(&of.weight),
            bias: view(&of.bias),
            activation: of.activation,
            windows: View::of(&of.windows),
            write_windows: View::of(of.write_windows.as_ref().unwrap_or(&of.windows)),
            snapshots: view(&of.window_snapshots),
        }
    }
}

impl<'a> GatedNorm<'a> {
    fn new(of: &Norm<'a>) -> Self {
        let mut weight = vec![0.0; of.weight.dims()[0]];
        View::of(&of.weight).read(&[0], 0, &mut weight);
        Self {
            z: View::of(&of.z),
            weight,
            eps: of.eps,
            activation: of.activation,
        }
    }
}

impl<'a> Ring<'a> {
    fn new(of: &Pending<'a>, windows: Option<View<'a>>) -> Self {
        Self {
            keys: View::of(&of.keys),
            updates: View::of(&of.updates),
            decays: View::of(&of.decays),
            len: View::of(&of.len),
            base: View::of(&of.base),
            inputs: view(&of.inputs),
            most: of.most,
            entries: of.keys.dims()[2],
            windows,
        }
    }

    /// Pending tokens of row `b`; `None` if their numbers are out of range.
    fn of_row(&self, b: usize, is_fresh: bool, tokens: usize) -> Option<Waiting> {
        let within = |index: i64, end: usize| usize::try_from(index).ok().filter(|&i| i < end);
        let len = match is_fresh {
            true => 0,
            false => within(self.len.index(&[b]), self.most + 1)?,
        };
        let ring = pending::Ring {
            most: self.most,
            entries: self.entries,
        };
        let flushes = tokens == 0 || ring.flushes(len, tokens);
        Some(Waiting {
            len,
            base: within(self.base.index(&[b]), self.entries)?,
            is_flushed: is_fresh || (len > 0 && flushes),
        })
    }
}

fn gdn_gates<'a>(gates: &GdnGates<'a>) -> Result<(Tensor<'a>, Tensor<'a>, Form<'a>)> {
    match gates {
        GdnGates::Raw {
            a,
            b,
            a_log,
            dt_bias,
            beta_scale,
            ..
        } => {
            let form = Form {
                kind: Kind::Softplus,
                a_log: Some(View::of(a_log)),
                dt_bias: Some(View::of(dt_bias)),
                beta_is_logit: true,
                beta_scale: beta_scale.factor(),
                per_channel: false,
            };
            Ok((*a, *b, form))
        }
        GdnGates::Given { g, beta, .. } => {
            let form = Form {
                kind: Kind::Log,
                a_log: None,
                dt_bias: None,
                beta_is_logit: false,
                beta_scale: 1.0,
                per_channel: false,
            };
            Ok((*g, *beta, form))
        }
        _ => unknown("gates"),
    }
}

fn kda_gates<'a>(gates: &KdaGates<'a>) -> Result<Form<'a>> {
    let (kind, a_log, dt_bias) = match &gates.kind {
        KdaDecay::Log => (Kind::Log, None, None),
        KdaDecay::Softplus { a_log, dt_bias } => {
            (Kind::Softplus, Some(View::of(a_log)), view(dt_bias))
        }
        KdaDecay::LowerBound {
            lower_bound,
            a_log,
            dt_bias,
        } => (Kind::LowerBound(*lower_bound), view(a_log), view(dt_bias)),
        _ => return unknown("gate"),
    };
    Ok(Form {
        kind,
        a_log,
        dt_bias,
        beta_is_logit: gates.beta_kind == KdaBeta::Logit,
        beta_scale: 1.0,
        per_channel: true,
    })
}

/// `1 / (1 + exp(-x))`. Like all gates and activations here, it is finite for every finite input.
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::None => x,
        Activation::Sigmoid => sigmoid(x),
        _ => x * sigmoid(x),
    }
}

/// `exp(x)`, or the largest f32 if that overflows.
fn finite_exp(x: f32) -> f32 {
    let exp = x.exp();
    if exp == f32::INFINITY { f32::MAX } else { exp }
}
