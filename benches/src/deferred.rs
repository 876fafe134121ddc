//! Steps with deferred write-back, next to steps that write every state: decodes, verifies of drafts, and layer steps of both. Times are
//! µs a step, over whole cycles from one flush to the next.

use std::collections::BTreeSet;
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use gated_delta::step::pending::{self, MAX_PENDING, MAX_PENDING_DRAFTS, Ring};
use gated_delta::{
    Activation, Convolution, DType, Entry, Error, Formulation, Gates, Gdn, GdnGates, Inputs, Kda,
    KdaBeta, KdaDecay, KdaGates, Library, Norm, Options, Pending, Previous, States, Step, Stored,
    StreamRef, Tensor, Work,
};
use gated_delta_harness::arguments::Operator;
use gated_delta_harness::timing::Timer;
use gated_delta_reference::conv::Conv;
use gated_delta_reference::deferred::{Deferred as Reference, Rings, deferred};
use gated_delta_reference::gdn::Gates as GdnReference;
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Previous as ReferencePrevious, Recurrent, TokenGates};
use gated_delta_reference::tolerance;
use half::bf16;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::inputs::{EPS, TAPS};
use crate::record::Run;
use crate::slab::{Slab, sets_for, upload};

/// Entries of a ring, R.
const ENTRIES: usize = 24;

/// Largest relative errors: of o in bf16, and of f32 states. For bf16 states the first one counts.
const ERRORS: [f64; 2] = [2.5e-3, 1e-5];

/// Numbers of pending tokens in the rows of a launch. Records say *fold* for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Count {
    /// No ring: each step writes its states; with drafts, it first commits the kept ones of the step before.
    Today,
    /// All counts from one flush to the next, each in as many rows; launches take all of them in turn.
    Cycle,
    /// Counts with which no row flushes.
    #[serde(rename = "never_fold")]
    NeverFlushes,
    /// The count with which all rows flush.
    #[serde(rename = "always_fold")]
    AlwaysFlushes,
}

/// New tokens of a step, and how they are computed and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Drafts {
    /// Tokens of a step, T.
    pub tokens: usize,
    /// Number of them that are kept after every step.
    pub kept: usize,
    /// Most pending tokens, N.
    pub most: usize,
    /// Whether the tokens are computed together, on tensor cores.
    pub parallel: bool,
    /// Whether u in the ring is bf16, not f32.
    pub bf16_updates: bool,
}

impl Drafts {
    /// The ring of a slot.
    const fn ring(self) -> Ring {
        Ring {
            most: self.most,
            entries: ENTRIES,
        }
    }

    /// One token a step, and up to 8 pending tokens.
    pub const NONE: Self = Self {
        tokens: 1,
        kept: 1,
        most: MAX_PENDING,
        parallel: false,
        bf16_updates: false,
    };

    /// Dtype of u in the ring.
    fn updates(self) -> DType {
        match self.bf16_updates {
            true => DType::Bf16,
            false => DType::F32,
        }
    }

    /// Numbers of pending tokens, for rows at different places in the cycle of flushes.
    fn counts(self, count: Count) -> Vec<usize> {
        let cycle = (1..)
            .map(|step| step * self.kept)
            .take_while(|&len| len == self.kept || len + self.tokens <= self.most + self.kept);
        let mut cycle: Vec<usize> = cycle.collect();
        match count {
            Count::Today => vec![0],
            Count::Cycle => cycle,
            Count::NeverFlushes if self.kept == 1 => (0..self.most).collect(),
            Count::NeverFlushes => {
                cycle.pop();
                cycle
            }
            Count::AlwaysFlushes => cycle.split_off(cycle.len() - 1),
        }
    }
}

impl Count {
    const ALL: [Self; 4] = [
        Self::Today,
        Self::Cycle,
        Self::NeverFlushes,
        Self::AlwaysFlushes,
    ];

    /// Name in a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Today => "every step writes",
            Self::Cycle => "whole cycles",
            Self::NeverFlushes => "never flushes",
            Self::AlwaysFlushes => "always flushes",
        }
    }
}

/// A layer and a batch to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Operator of the layer.
    pub operator: Operator,
    /// Whether there are a convolution and a norm around the recurrence.
    pub layer: bool,
    /// Heads, H and HV.
    pub heads: [usize; 2],
    /// Head dims, K = V.
    pub dim: usize,
    /// Dtype of the states.
    pub state: DType,
    /// Rows, B.
    pub batch: usize,
    /// Tokens of a step.
    pub drafts: Drafts,
}

/// Drafts with bf16 states: speculation by 3 and by 7 tokens, of which half is kept, and single tokens.
const DRAFTS: [Drafts; 7] = [
    Drafts {
        parallel: true,
        ..Drafts::NONE
    },
    Drafts {
        parallel: true,
        bf16_updates: true,
        ..Drafts::NONE
    },
    Drafts {
        most: MAX_PENDING_DRAFTS,
        parallel: true,
        ..Drafts::NONE
    },
    OF_4,
    Drafts {
        bf16_updates: true,
        ..OF_4
    },
    OF_8,
    Drafts {
        bf16_updates: true,
        ..OF_8
    },
];

/// Four tokens a step, of which two are kept.
pub(crate) const OF_4: Drafts = Drafts {
    tokens: 4,
    kept: 2,
    most: MAX_PENDING_DRAFTS,
    parallel: true,
    bf16_updates: false,
};

/// Eight tokens a step, of which four are kept.
pub(crate) const OF_8: Drafts = Drafts {
    tokens: 8,
    kept: 4,
    ..OF_4
};

/// Names of the kinds of cases: recurrences, and whole layers.
pub const OPERATORS: [&str; 4] = ["gdn", "kda", "gdn_layer", "kda_layer"];

/// Cases with Qwen3-Next's heads and Kimi-Linear's, in both state dtypes, without and with a convolution and a norm. With bf16 states there
/// are drafts too, except for KDA with K = 64, which has no kernels for them.
#[must_use]
pub fn cases(batches: &[usize], dims: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for layer in [false, true] {
        for operator in [Operator::Gdn, Operator::Kda] {
            for state in [DType::Bf16, DType::F32] {
                let drafts: &[Drafts] = match (layer, operator, state) {
                    (false, _, DType::Bf16) => &DRAFTS,
                    (true, _, DType::Bf16) => DRAFTS.split_at(3).1,
                    _ => &[],
                };
                for drafts in [&[Drafts::NONE][..], drafts].concat() {
                    let has_kernels = |dim: &&usize| {
                        **dim == 128 || operator == Operator::Gdn || !drafts.parallel
                    };
                    cases.extend(dims.iter().filter(has_kernels).flat_map(|&dim| {
                        batches.iter().map(move |&batch| Case {
                            operator,
                            layer,
                            heads: heads(operator),
                            dim,
                            state,
                            batch,
                            drafts,
                        })
                    }));
                }
            }
        }
    }
    cases
}

/// Heads H and HV of Qwen3-Next (GDN) and of Kimi-Linear (KDA).
#[must_use]
pub fn heads(operator: Operator) -> [usize; 2] {
    match operator {
        Operator::Gdn => [16, 32],
        Operator::Kda => [32, 32],
    }
}

/// A measured row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Name of the kind of case, one of [`OPERATORS`].
    pub operator: String,
    /// Dtype of the states.
    pub state: String,
    /// Rows, B.
    pub batch: usize,
    /// Tokens of a step, T. Older records lack this column, and others below: N, u, and the columns after µs.
    #[serde(default = "one_token")]
    pub tokens: usize,
    /// Most pending tokens, N.
    #[serde(default = "most_of_one_token")]
    pub most: usize,
    /// Dtype of u in the rings.
    #[serde(default = "wide_updates")]
    pub updates: String,
    /// Numbers of pending tokens in the rows.
    pub count: Count,
    /// Name of the kernel.
    pub entry: String,
    /// Whether the library selects this kernel.
    pub selected: bool,
    /// Relative error of o, ‖got − exact‖ / ‖exact‖.
    pub error_o: f64,
    /// Relative error of the written states; 0 if none is written.
    pub error_state: f64,
    /// Bytes that a launch has to move, on average.
    pub bytes: f64,
    /// Median time of a launch, in µs; `None` without a timer.
    pub us: Option<f64>,
    /// 10th percentile over the replays, in µs.
    pub us_p10: Option<f64>,
    /// 90th percentile over the replays, in µs.
    pub us_p90: Option<f64>,
    /// Head dims, K = V.
    #[serde(default = "recorded_dim")]
    pub k_dim: usize,
    /// Bandwidth of a copy in the same run, in GB/s.
    #[serde(default)]
    pub copy_gb_s: Option<f64>,
    /// Name of the GPU.
    #[serde(default)]
    pub gpu: String,
    /// Version of the driver.
    #[serde(default)]
    pub driver: String,
    /// Commit that the bench was built from.
    #[serde(default)]
    pub commit: String,
}

impl Row {
    /// Whether the row belongs to the case. A row of one token that writes every state belongs to all token-by-token cases of one token.
    #[must_use]
    pub fn is_of(&self, case: &Case) -> bool {
        let Drafts {
            tokens,
            most,
            parallel,
            ..
        } = case.drafts;
        let same = self.operator == case.operator_name()
            && self.state == case.state.to_string()
            && (self.batch, self.tokens, self.k_dim) == (case.batch, tokens, case.dim);
        if self.count == Count::Today && tokens == 1 {
            return same && !parallel;
        }
        same && self.most == most
            && self.updates == case.drafts.updates().to_string()
            && self.entry.contains("_parallel") == parallel
    }
}

fn one_token() -> usize {
    1
}

fn most_of_one_token() -> usize {
    MAX_PENDING
}

fn wide_updates() -> String {
    DType::F32.to_string()
}

fn recorded_dim() -> usize {
    128
}

/// Buffer sets of a case. All rows have the same values, except for their pending tokens.
struct Buffers {
    case: Case,
    sets: usize,
    values: Values,
    q: Slab,
    k: Slab,
    v: Slab,
    g: Slab,
    beta: Slab,
    o: Slab,
    pool: Slab,
    keys: Slab,
    updates: Slab,
    decays: Slab,
    inputs: Slab,
    x: Slab,
    conv_weight: Slab,
    windows: Slab,
    z: Slab,
    norm_weight: Slab,
    counts: Vec<usize>,
    /// Numbers of pending tokens, one tensor for each launch with other counts.
    len: Slab,
    base: Slab,
    /// Number of kept tokens of the step before.
    keep: Slab,
}

/// Exact results of a row.
struct Truth {
    b: usize,
    o: Vec<f64>,
    /// States, if they are written.
    states: Option<Vec<f64>>,
    /// Windows, and inputs in the ring.
    copies: [Option<Vec<f64>>; 2],
}

/// Values of a row's tensors, exact in their dtypes: q, k and v, or x and the layer's other tensors.
struct Values {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
    keys: Vec<f32>,
    updates: Vec<f32>,
    decays: Vec<f32>,
    inputs: Vec<f32>,
    x: Vec<f32>,
    conv_weight: Vec<f32>,
    windows: Vec<f32>,
    z: Vec<f32>,
    norm_weight: Vec<f32>,
}

fn bf16s(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// Bytes of values in a dtype.
fn bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => bytemuck::cast_slice(&bf16s(values)).to_vec(),
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}

impl Values {
    fn new(case: &Case) -> Self {
        let mut rng = SmallRng::seed_from_u64(17);
        let [h, hv] = case.heads;
        let dim = case.dim;
        let mut random = |count: usize, low: f32, high: f32| -> Vec<f32> {
            let value = || bf16::from_f32(rng.random_range(low..high)).to_f32();
            std::iter::repeat_with(value).take(count).collect()
        };
        let channels = case.decays();
        let tokens = case.drafts.tokens;
        let (given, made) = match case.layer {
            false => (tokens * dim, 0),
            true => (0, dim),
        };
        let convolved = (2 * h + hv) * made;
        let waiting = if case.windows_wait() { ENTRIES } else { 0 };
        Self {
            q: random(h * given, -1.0, 1.0),
            k: random(h * given, -1.0, 1.0),
            v: random(hv * given, -1.0, 1.0),
            g: random(tokens * hv * channels, -0.3, -0.01),
            beta: random(tokens * hv, 0.1, 1.0),
            state: random(hv * dim * dim, -0.1, 0.1),
            keys: random(h * ENTRIES * dim, -1.0, 1.0),
            updates: random(hv * ENTRIES * dim, -0.1, 0.1),
            decays: random(hv * ENTRIES * channels, -0.3, -0.01),
            x: random(tokens * convolved, -2.0, 2.0),
            conv_weight: random(convolved * TAPS, -0.7, 0.7),
            windows: random(convolved * (TAPS - 1), -2.0, 2.0),
            z: random(tokens * hv * made, -2.0, 2.0),
            norm_weight: random(made, 0.5, 1.5),
            inputs: random(waiting * convolved, -2.0, 2.0),
        }
    }
}

impl Case {
    /// Number of decays for a token and value head.
    fn decays(&self) -> usize {
        match self.operator {
            Operator::Gdn => 1,
            Operator::Kda => self.dim,
        }
    }

    /// Elements of o in a row.
    fn outputs(&self) -> usize {
        self.drafts.tokens * self.heads[1] * self.dim
    }

    /// Channels of the convolution, D.
    fn channels(&self) -> usize {
        let [h, hv] = self.heads;
        (2 * h + hv) * self.dim
    }

    /// Whether windows are deferred as states are, with x of the pending tokens in a ring.
    fn windows_wait(&self) -> bool {
        self.layer && self.drafts.parallel
    }

    /// Dtype of keys in the ring: a convolution makes k in f32.
    fn keys(&self) -> DType {
        match self.layer {
            false => DType::Bf16,
            true => DType::F32,
        }
    }

    /// Activation of z in Qwen3-Next's layer (GDN) and Kimi-Linear's (KDA).
    fn activation(&self) -> Activation {
        match self.operator {
            Operator::Gdn => Activation::Silu,
            Operator::Kda => Activation::Sigmoid,
        }
    }

    /// Name of the kind of case, one of [`OPERATORS`].
    #[must_use]
    pub fn operator_name(&self) -> &'static str {
        let [gdn, kda, gdn_layer, kda_layer] = OPERATORS;
        match (self.operator, self.layer) {
            (Operator::Gdn, false) => gdn,
            (Operator::Kda, false) => kda,
            (Operator::Gdn, true) => gdn_layer,
            (Operator::Kda, true) => kda_layer,
        }
    }
}

impl Buffers {
    fn new(library: &Library, case: Case, count: Count) -> Result<Self> {
        let values = Values::new(&case);
        let (batch, state) = (case.batch, case.state);
        let unit = bytes(&values.state, state);
        let sets = sets_for(library, batch * unit.len());
        let filled = |values: &[f32], dtype: DType| -> Result<Slab> {
            let unit = bytes(values, dtype);
            Slab::filled(library, sets, batch * unit.len(), &unit)
        };
        let counts = case.drafts.counts(count);
        let of = |b: usize, i: usize| counts[(b + i) % counts.len()] as i32;
        let launches = 0..counts.len();
        let lens = launches.flat_map(|i| (0..batch).map(move |b| of(b, i)));
        let lens: Vec<i32> = lens.collect();
        let bases: Vec<i32> = (0..batch).map(|b| (5 * b % ENTRIES) as i32).collect();
        Ok(Self {
            case,
            sets,
            q: filled(&values.q, DType::Bf16)?,
            k: filled(&values.k, DType::Bf16)?,
            v: filled(&values.v, DType::Bf16)?,
            g: filled(&values.g, DType::Bf16)?,
            beta: filled(&values.beta, DType::Bf16)?,
            o: Slab::new(library, sets, batch * case.outputs() * 2)?,
            pool: filled(&values.state, state)?,
            keys: filled(&values.keys, case.keys())?,
            updates: filled(&values.updates, case.drafts.updates())?,
            decays: filled(&values.decays, DType::F32)?,
            inputs: filled(&values.inputs, DType::Bf16)?,
            x: filled(&values.x, DType::Bf16)?,
            conv_weight: upload(library, 1, &bf16s(&values.conv_weight))?,
            windows: filled(&values.windows, DType::Bf16)?,
            z: filled(&values.z, DType::Bf16)?,
            norm_weight: upload(library, 1, &bf16s(&values.norm_weight))?,
            len: upload(library, 1, &lens)?,
            base: upload(library, 1, &bases)?,
            keep: upload(library, 1, &vec![case.drafts.kept as i32; batch])?,
            counts,
            values,
        })
    }

    /// Restores the first set: launches have flushed its states, moved its windows and written to its rings. Clears its outputs.
    fn restore(&mut self) -> Result<()> {
        self.o.spoil()?;
        let Values {
            state,
            keys,
            updates,
            decays,
            inputs,
            windows,
            ..
        } = &self.values;
        if self.case.layer {
            self.windows.refill(&bytes(windows, DType::Bf16))?;
        }
        if self.case.windows_wait() {
            self.inputs.refill(&bytes(inputs, DType::Bf16))?;
        }
        self.pool.refill(&bytes(state, self.case.state))?;
        self.keys.refill(&bytes(keys, self.case.keys()))?;
        self.updates
            .refill(&bytes(updates, self.case.drafts.updates()))?;
        self.decays.refill(&bytes(decays, DType::F32))
    }

    /// Launch number `i`, with the numbers of pending tokens of `count`.
    fn work(&self, i: usize, count: Count) -> Result<Box<dyn Work + '_>, Error> {
        let Case {
            operator,
            heads: [h, hv],
            dim,
            state,
            batch,
            layer,
            drafts: Drafts { tokens, .. },
        } = self.case;
        let set = i % self.sets;
        let channels = self.case.channels();
        let inputs = match layer {
            false => Inputs::qkv(
                self.q.tensor(set, DType::Bf16, &[batch, tokens, h, dim])?,
                self.k.tensor(set, DType::Bf16, &[batch, tokens, h, dim])?,
                self.v.tensor(set, DType::Bf16, &[batch, tokens, hv, dim])?,
            ),
            true => Inputs::conv(Convolution::new(
                self.x
                    .tensor(set, DType::Bf16, &[batch, tokens, channels])?,
                h,
                self.conv_weight.tensor(0, DType::Bf16, &[channels, TAPS])?,
                self.windows
                    .tensor(set, DType::Bf16, &[batch, channels, TAPS - 1])?,
            )),
        };
        let beta = self.beta.tensor(set, DType::Bf16, &[batch, tokens, hv])?;
        match operator {
            Operator::Gdn => {
                let g = self.g.tensor(set, DType::Bf16, &[batch, tokens, hv])?;
                let decays = self.decays.tensor(set, DType::F32, &[batch, hv, ENTRIES])?;
                let gates = GdnGates::given(g, beta);
                let o = self.o.tensor(set, DType::Bf16, &[batch, tokens, hv, dim])?;
                let states =
                    States::update(self.pool.tensor(set, state, &[batch, hv, dim, dim])?);
                let step = Gdn::new(inputs, gates, o, states);
                let gate = &[batch, tokens, hv];
                let gate = self.g.tensor(self.before(set), DType::Bf16, gate)?;
                self.step(step, [decays, gate], i, count)
            }
            Operator::Kda => {
                let g = self.g.tensor(set, DType::Bf16, &[batch, tokens, hv, dim])?;
                let decays = self
                    .decays
                    .tensor(set, DType::F32, &[batch, hv, ENTRIES, dim])?;
                let gates = KdaGates::new(g, KdaDecay::Log, beta, KdaBeta::Given);
                let o = self.o.tensor(set, DType::Bf16, &[batch, tokens, hv, dim])?;
                let states =
                    States::update(self.pool.tensor(set, state, &[batch, hv, dim, dim])?);
                let step = Kda::new(inputs, gates, o, states);
                let gate = &[batch, tokens, hv, dim];
                let gate = self.g.tensor(self.before(set), DType::Bf16, gate)?;
                self.step(step, [decays, gate], i, count)
            }
        }
    }

    fn step<'a, G: Gates + 'a>(
        &'a self,
        mut step: Step<'a, G>,
        [decays, gate_before]: [Tensor<'a>; 2],
        i: usize,
        count: Count,
    ) -> Result<Box<dyn Work + 'a>, Error>
    where
        Step<'a, G>: Work,
    {
        let Case {
            heads: [h, hv],
            dim,
            batch,
            layer,
            drafts,
            ..
        } = self.case;
        let (set, tokens) = (i % self.sets, drafts.tokens);
        let formulation = match drafts.parallel && (count != Count::Today || tokens > 1) {
            true => Formulation::Parallel,
            false => Formulation::Recurrent,
        };
        step = step.options(Options::default().formulation(formulation));
        if layer {
            let z = self.z.tensor(set, DType::Bf16, &[batch, tokens, hv, dim])?;
            let weight = self.norm_weight.tensor(0, DType::Bf16, &[dim])?;
            let norm = Norm::new(z, weight, EPS);
            step = step.norm(norm.activation(self.case.activation()));
        }
        if count == Count::Today && tokens > 1 {
            let before = self.before(set);
            let stored = match layer {
                false => Stored::kv(
                    self.k
                        .tensor(before, DType::Bf16, &[batch, tokens, h, dim])?,
                    self.v
                        .tensor(before, DType::Bf16, &[batch, tokens, hv, dim])?,
                ),
                true => {
                    let x = &[batch, tokens, self.case.channels()];
                    Stored::x(self.x.tensor(before, DType::Bf16, x)?)
                }
            };
            let beta = self
                .beta
                .tensor(before, DType::Bf16, &[batch, tokens, hv])?;
            let keep = self.keep.tensor(0, DType::I32, &[batch])?;
            return Ok(Box::new(step.previous(Previous::new(
                stored,
                gate_before,
                beta,
                keep,
            ))));
        }
        if count == Count::Today {
            return Ok(Box::new(step));
        }
        let keys = self.case.keys();
        let launches = self.counts.len();
        let lens = self.len.tensor(0, DType::I32, &[launches * batch])?;
        let rings = pending::Rings {
            keys: self.keys.tensor(set, keys, &[batch, h, ENTRIES, dim])?,
            updates: (self.updates).tensor(set, drafts.updates(), &[batch, hv, ENTRIES, dim])?,
            decays,
            len: lens.narrow(0, i % launches * batch, batch)?,
            base: self.base.tensor(0, DType::I32, &[batch])?,
        };
        let mut pending = Pending::new(rings).most(drafts.most);
        if self.case.windows_wait() {
            let dims = &[batch, ENTRIES, self.case.channels()];
            pending = pending.inputs(self.inputs.tensor(set, DType::Bf16, dims)?);
        }
        Ok(Box::new(step.pending(pending)))
    }

    /// Number of the set that has the previous tokens: another set, so that they are not in level-2 cache either.
    fn before(&self, set: usize) -> usize {
        (set + 1) % self.sets
    }

    /// Bytes that a launch has to move, on average: states read, and written by rows that flush; ring entries read and written; windows
    /// read and written; tokens. A deferred window is written together with its state. The window and its pending inputs that are read are
    /// one window's bytes; x of the new tokens adds to the entries written.
    fn bytes(&self, count: Count) -> f64 {
        let Values {
            q,
            k,
            v,
            g,
            beta,
            x,
            windows,
            z,
            ..
        } = &self.values;
        let inputs = q.len() + k.len() + v.len() + x.len() + windows.len();
        let tokens = 2 * (inputs + z.len() + self.case.outputs() + g.len() + beta.len());
        let resumed = 2 * (k.len() + v.len() + x.len() + g.len() + beta.len());
        let left = if self.case.windows_wait() {
            2 * x.len()
        } else {
            0
        };
        let state = (self.values.state.len() * self.case.state.size_of()) as f64;
        let entry = (self.case.keys().size_of() * self.values.keys.len()
            + self.case.drafts.updates().size_of() * self.values.updates.len()
            + 4 * self.values.decays.len())
            / ENTRIES;
        let drafts = self.case.drafts;
        let of_row = |&pending: &usize| {
            let flushes = count == Count::Today || drafts.ring().flushes(pending, drafts.tokens);
            let extra = match count {
                Count::Today if drafts.tokens > 1 => resumed,
                Count::Today => 0,
                _ => (pending + drafts.tokens) * entry + left,
            };
            let window = match flushes || !self.case.windows_wait() {
                true => 2 * windows.len(),
                false => 0,
            };
            state * if flushes { 2.0 } else { 1.0 } + (extra + window + tokens) as f64
        };
        let of_rows: f64 = self.counts.iter().map(of_row).sum();
        self.case.batch as f64 * of_rows / self.counts.len() as f64
    }

    /// Exact results of some rows after the first launch, each computed by the reference on its own thread.
    fn truths(&self, count: Count) -> Result<Vec<Truth>> {
        let (case, counts, values) = (self.case, &self.counts[..], &self.values);
        let Case {
            operator,
            heads: [h, hv],
            dim,
            state,
            batch,
            layer: is_layer,
            drafts,
        } = case;
        let exact = |values: &[f32]| -> Vec<f64> { values.iter().map(|&x| x.into()).collect() };
        let Values {
            q, k, v, g, beta, ..
        } = &self.values;
        let [q, k, v, g, beta] = [q, k, v, g, beta].map(|values| exact(values));
        let Values {
            x,
            conv_weight,
            windows,
            z,
            norm_weight,
            ..
        } = &self.values;
        let [x, conv_weight, windows, z, norm_weight] =
            [x, conv_weight, windows, z, norm_weight].map(|values| exact(values));
        let rings = Rings {
            keys: exact(&self.values.keys),
            updates: exact(&self.values.updates),
            decays: exact(&self.values.decays),
            inputs: (case.windows_wait()).then(|| exact(&self.values.inputs)),
        };
        let gates = match operator {
            Operator::Gdn => TokenGates::Gdn(GdnReference::Given { g: &g, beta: &beta }),
            Operator::Kda => TokenGates::Kda(kda::KdaGates {
                g: &g,
                kind: kda::KdaDecay::Log,
                beta: &beta,
                beta_kind: kda::KdaBeta::Given,
            }),
        };
        let keep = [drafts.kept as i64];
        let of_row = |b: usize| -> Result<Truth> {
            let len = counts[b % counts.len()];
            let base = 5 * b % ENTRIES;
            let step = Recurrent {
                q: &q,
                k: &k,
                v: &v,
                round_state: match state {
                    DType::Bf16 => |s| f64::from(bf16::from_f64(s)),
                    _ => |s| s,
                },
                ..Recurrent::new([1, drafts.tokens], [h, hv], [dim, dim], gates)
            };
            let problem = Reference {
                layer: Layer {
                    step,
                    projection: is_layer.then(|| Projection {
                        x: &x,
                        previous: (count == Count::Today && drafts.tokens > 1).then_some(&x),
                        conv: Conv {
                            channels: case.channels(),
                            width: TAPS,
                            weight: &conv_weight,
                            bias: None,
                            activation: Activation::Silu.into(),
                        },
                    }),
                    norm: is_layer.then(|| GatedNorm {
                        z: &z,
                        weight: &norm_weight,
                        eps: EPS.into(),
                        activation: case.activation().into(),
                    }),
                    fresh: None,
                    checkpoints: None,
                },
                most: drafts.most,
                entries: ENTRIES,
                len: &[len as i64],
                base: &[base as i64],
            };
            let pool = exact(&values.state);
            let pools = Pools {
                states: &pool,
                windows: is_layer.then_some(&windows),
                ..Pools::default()
            };
            let truth = if count == Count::Today {
                let mut today = problem.layer;
                if drafts.tokens > 1 {
                    today.step.previous = Some(ReferencePrevious {
                        tokens: drafts.tokens,
                        k: &k,
                        v: &v,
                        gates,
                        keep: &keep,
                    });
                }
                let wanted = layer(&today, &pools)?;
                let inputs = rings.inputs.clone();
                Truth {
                    b,
                    o: wanted.o,
                    states: Some(wanted.states),
                    copies: [wanted.windows, inputs],
                }
            } else {
                let wanted = deferred(&problem, &pools, &rings)?;
                let writes = drafts.ring().flushes(len, drafts.tokens);
                Truth {
                    b,
                    o: wanted.o,
                    states: writes.then_some(wanted.pool),
                    copies: [wanted.windows, wanted.rings.inputs],
                }
            };
            Ok(truth)
        };
        // The rows include that of the last count, which flushes in a cycle.
        let rows = [0, 1, 6, 7, counts.len() - 1, batch - 1];
        let rows: BTreeSet<usize> = rows.into_iter().filter(|&b| b < batch).collect();
        thread::scope(|scope| {
            let of_row = &of_row;
            let started = rows.into_iter().map(|b| scope.spawn(move || of_row(b)));
            let started: Vec<_> = started.collect();
            let ended = started.into_iter().map(|thread| {
                let ended = thread.join();
                ended.map_err(|_| anyhow!("the reference of a row panicked"))?
            });
            ended.collect()
        })
    }

    /// Relative errors of o and of written states after the first launch. Windows and pending inputs are copies: an error is returned if
    /// they differ at all, written or not.
    fn errors(&self, truths: &[Truth]) -> Result<[f64; 2]> {
        let Case {
            heads: [_, hv],
            dim,
            state,
            ..
        } = self.case;
        let mut worst = [0.0f64; 2];
        for Truth {
            b,
            o,
            states,
            copies,
        } in truths
        {
            let slabs = [("windows", &self.windows), ("inputs", &self.inputs)];
            for ((name, slab), wanted) in slabs.into_iter().zip(copies) {
                let Some(wanted) = wanted else {
                    continue;
                };
                let len = 2 * wanted.len();
                let got = floats(&slab.read(b * len, len)?, DType::Bf16);
                let off = got
                    .iter()
                    .zip(wanted)
                    .position(|(got, wanted)| got != wanted);
                if let Some(i) = off {
                    let (got, wanted) = (got[i], wanted[i]);
                    bail!("{name} of row {b}, element {i}: wanted {wanted}, got {got}");
                }
            }
            let row = self.case.outputs();
            let got = floats(&self.o.read(b * row * 2, row * 2)?, DType::Bf16);
            worst[0] = worst[0].max(tolerance::relative_error(&got, o));
            if let Some(states) = states {
                let len = hv * dim * dim * state.size_of();
                let got = floats(&self.pool.read(b * len, len)?, state);
                worst[1] = worst[1].max(tolerance::relative_error(&got, states));
            }
        }
        Ok(worst)
    }
}

/// f64 values of f32 or bf16 bytes.
fn floats(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F32 => {
            let (words, _) = bytes.as_chunks();
            words
                .iter()
                .map(|&word| f32::from_le_bytes(word).into())
                .collect()
        }
        _ => {
            let (words, _) = bytes.as_chunks();
            words
                .iter()
                .map(|&word| bf16::from_le_bytes(word).to_f64())
                .collect()
        }
    }
}

/// Checks and, with a timer, times every count of every case; with `every_entry`, for every kernel that computes it, else for the
/// selected one.
///
/// # Errors
/// The driver's errors, and wrong results.
pub fn run(
    library: &Library,
    timer: Option<(&Timer, &Run)>,
    cases: &[Case],
    every_entry: bool,
    mut begins: impl FnMut(&Case),
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in cases {
        begins(case);
        rows.extend(measure(library, timer, case, every_entry)?);
    }
    Ok(rows)
}

/// Checks and times one case, as [`run`] does.
///
/// # Errors
/// The errors of [`run`].
pub fn measure(
    library: &Library,
    timer: Option<(&Timer, &Run)>,
    case: &Case,
    every_entry: bool,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for count in Count::ALL {
        let mut buffers = Buffers::new(library, *case, count)?;
        let selected = library.selected(&*buffers.work(0, count)?)?;
        let entries: Vec<Entry> = match every_entry {
            true => buffers.work(0, count)?.variants()?,
            false => vec![selected],
        };
        let truths = buffers.truths(count)?;
        for entry in entries {
            let title = || format!("{}, {} of {case:?}", entry.name(), count.name());
            let stream = timer.map_or(StreamRef::default_stream(), |(it, _)| it.stream.as_ref());
            buffers.restore()?;
            // SAFETY: the buffers outlive the wait.
            unsafe { library.launch_with(stream, &*buffers.work(0, count)?, entry) }?;
            if let Some((timer, _)) = timer {
                timer.stream.synchronize()?;
            }
            let errors = buffers.errors(&truths).with_context(title)?;
            let allowed = [ERRORS[0], ERRORS[usize::from(case.state == DType::F32)]];
            let right = errors
                .iter()
                .zip(allowed)
                .all(|(error, allowed)| *error < allowed);
            ensure!(right, "{}: errors {errors:?}", title());
            let bytes = buffers.bytes(count);
            let micros = match timer {
                Some((timer, _)) => {
                    let turns = (20e9 / bytes).clamp(4.0, 400.0) as usize;
                    let turns = turns.max(buffers.sets);
                    let launches = turns.next_multiple_of(buffers.counts.len());
                    // SAFETY: the buffers outlive the timing, which waits for all launches.
                    Some(timer.graph(launches, |i| unsafe {
                        library.launch_with(stream, &*buffers.work(i, count)?, entry)
                    })?)
                }
                None => None,
            };
            let run = timer.map(|(_, run)| run);
            let of_run = |text: fn(&Run) -> &String| run.map(text).cloned().unwrap_or_default();
            rows.push(Row {
                operator: case.operator_name().to_owned(),
                state: case.state.to_string(),
                batch: case.batch,
                tokens: case.drafts.tokens,
                most: case.drafts.most,
                updates: case.drafts.updates().to_string(),
                count,
                entry: entry.name().to_owned(),
                selected: entry == selected,
                error_o: errors[0],
                error_state: errors[1],
                bytes,
                us: micros.map(|micros| micros.median),
                us_p10: micros.map(|micros| micros.p10),
                us_p90: micros.map(|micros| micros.p90),
                k_dim: case.dim,
                copy_gb_s: run.map(|run| run.copy.round()),
                gpu: of_run(|run| &run.gpu),
                driver: of_run(|run| &run.driver),
                commit: of_run(|run| &run.commit),
            });
        }
    }
    Ok(rows)
}

/// A table of all rows, one a line.
#[must_use]
pub fn table(rows: &[Row], copy: f64) -> String {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header([
        "op",
        "state",
        "K",
        "B",
        "T",
        "N",
        "u",
        "states",
        "kernel",
        "error o",
        "error S",
        "us",
        "us of bytes",
        "/ today",
    ]);
    for row in rows {
        let today = rows.iter().find(|other| {
            let of = |row: &Row| (row.batch, row.tokens, row.k_dim);
            let same = (&row.operator, &row.state) == (&other.operator, &other.state);
            same && of(other) == of(row) && other.count == Count::Today && other.selected
        });
        let ratio = today.and_then(|today| Some(row.us? / today.us?));
        let number = |value: Option<f64>, digits| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        table.add_row([
            row.operator.clone(),
            row.state.clone(),
            row.k_dim.to_string(),
            row.batch.to_string(),
            row.tokens.to_string(),
            row.most.to_string(),
            row.updates.clone(),
            row.count.name().to_owned(),
            row.entry.clone(),
            format!("{:.1e}", row.error_o),
            format!("{:.1e}", row.error_state),
            number(row.us, 2),
            format!("{:.2}", row.bytes / copy / 1e3),
            number(ratio, 2),
        ]);
    }
    for column in table.column_iter_mut().skip(9) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!(
        "T tokens a step with deferred write-back, at most N pending; K-last, q, k, v, o in bf16, level-2 cache cold.\n\
         A layer has x, windows and z in bf16 and four taps; with drafts its windows are deferred too. 2 of 4 drafts are\n\
         kept, and 4 of 8; the step that writes every state is then a resume.\n\
         \"whole cycles\" is a mean from one flush to the next: all counts, spread evenly over the rows, and over the\n\
         launches in turn, flushes included.\n\n{table}\n"
    )
}
