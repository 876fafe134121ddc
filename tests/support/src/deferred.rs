//! Steps with deferred write-back: random problems in memory, their launches, and the expected results.

use gated_delta::step::pending::{Count, Ring};
use gated_delta::{
    Activation, BetaScale, DType, Entry, Error, Formulation, HeadMap, KdaBeta, Library, Options,
    StreamRef, Work,
};
use gated_delta_harness::arguments::{
    Arguments, Convolved, DecayKind, GateKind, GatedNorm, New, Operator, Pending, Tokens,
};
use gated_delta_kernels::constants::Element;
use gated_delta_reference::conv::Conv;
use gated_delta_reference::deferred::{After, Deferred as Reference, Rings};
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::judge::{AllowedOfRings, judge_deferred};
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, Pools, Projection};
use gated_delta_reference::norm::GatedNorm as NormOfReference;
use gated_delta_reference::recurrent::{Recurrent, TokenGates};
use gated_delta_reference::tolerance::{CONVOLVED, Tolerance};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::backend::Backend;
use crate::buffer::{Buffer, View};
use crate::case::Case;
use crate::compare::assert_close;

/// The convolution of a layer with deferred write-back.
#[derive(Clone, Copy, Debug)]
pub struct ConvSpec {
    /// W, the number of taps.
    pub taps: usize,
    /// Whether there is a bias, which is added to the sums.
    pub bias: bool,
    /// Activation of the sums.
    pub activation: Activation,
    /// Dtype of the taps and the bias.
    pub weight: DType,
    /// Whether the channels of a window are contiguous, rather than the inputs of a channel.
    pub by_input: bool,
}

/// The norm of a layer with deferred write-back.
#[derive(Clone, Copy, Debug)]
pub struct NormSpec {
    /// Activation of z, the gate of the norm.
    pub activation: Activation,
    /// Dtype of the norm's weight.
    pub weight: DType,
}

/// Epsilon of the norm, added to the mean of o².
const EPS: f32 = 1e-5;

/// Sizes and switches of a problem. Its values follow from the seed.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Operator of the layer.
    pub operator: Operator,
    /// Whether the kernel computes the gates, from raw ones and parameters.
    pub raw_gates: bool,
    /// Dtype of the states in the pool.
    pub state: DType,
    /// Dtype of q, k, v, o and the keys in the rings, and of x, its windows and z. With a convolution the keys in the rings are
    /// f32.
    pub io: DType,
    /// Dtype of u in the rings: f32, or another one if `parallel` is set.
    pub updates: DType,
    /// Dtype of the slots, the lengths and the bases.
    pub index: DType,
    /// Slot index of each row.
    pub slots: Vec<i64>,
    /// P, the number of slots of the pool.
    pub pool_slots: usize,
    /// H, and the ratio HV / H.
    pub heads: [usize; 2],
    /// K = V.
    pub dim: usize,
    /// N, the most pending tokens of a slot, and R, the entries of its ring.
    pub ring: [usize; 2],
    /// Number of pending tokens of each row. It may be out of range.
    pub len: Vec<i64>,
    /// Ring entry of each row's first pending token. It may be out of range.
    pub base: Vec<i64>,
    /// Whether each row is fresh. `None` without fresh rows.
    pub fresh: Option<Vec<bool>>,
    /// T: 1, or more if `parallel` is set. 0 for a flush.
    pub tokens: usize,
    /// Whether all tokens are computed together on tensor cores (`Formulation::Parallel`).
    pub parallel: bool,
    /// Number of unused elements in the gaps of views, 0 for dense ones.
    pub gap: usize,
    /// Head map: tiled, rather than grouped value heads of a query/key head.
    pub tiled: bool,
    /// Whether the kernel normalises q and k.
    pub l2norm: bool,
    /// Whether v of each token, the state of each slot and u of each pending token have a random size in each value head, as with
    /// [`Spec::spread`](crate::spec::Spec::spread).
    pub spread: bool,
    /// The null slot: rows with this slot index are inactive.
    pub null_slot: Option<u32>,
    /// Convolution of q, k and v. `None` if q, k and v are given.
    pub conv: Option<ConvSpec>,
    /// Norm of o. `None` for a plain o.
    pub norm: Option<NormSpec>,
    /// Seed of the values.
    pub seed: u64,
}

impl Spec {
    /// A problem with one row for each entry of `len`, its number of pending tokens. Each row has its own slot and base.
    #[must_use]
    pub fn new(operator: Operator, state: DType, dim: usize, len: &[i64]) -> Self {
        let rows = len.len();
        Self {
            operator,
            raw_gates: false,
            state,
            io: DType::Bf16,
            updates: DType::F32,
            index: DType::I32,
            slots: (0..rows as i64).rev().collect(),
            pool_slots: rows + 1,
            heads: [1, 2],
            dim,
            ring: [8, 9],
            len: len.to_vec(),
            base: (0..rows as i64).map(|b| 4 * b % 9).collect(),
            fresh: None,
            tokens: 1,
            parallel: false,
            gap: 0,
            tiled: false,
            l2norm: true,
            spread: false,
            null_slot: None,
            conv: None,
            norm: None,
            seed: 7,
        }
    }

    /// The same problem with `tokens` drafts a step and up to 16 pending tokens.
    #[must_use]
    pub fn drafts(self, tokens: usize) -> Self {
        Self {
            tokens,
            parallel: true,
            ring: [16, 24],
            ..self
        }
    }

    /// The same problem as a whole layer: with a convolution of four taps and SiLU, and a norm.
    #[must_use]
    pub fn layer(self) -> Self {
        Self {
            conv: Some(ConvSpec {
                taps: 4,
                bias: true,
                activation: Activation::Silu,
                weight: DType::Bf16,
                by_input: false,
            }),
            norm: Some(NormSpec {
                activation: Activation::Silu,
                weight: DType::F32,
            }),
            ..self
        }
    }

    /// Slot, number of pending tokens and base of row `b`. `None` if the row is inactive.
    #[must_use]
    pub fn live(&self, b: usize) -> Option<[usize; 3]> {
        let within = |index: i64, end: usize| usize::try_from(index).ok().filter(|&i| i < end);
        let len = if self.is_fresh(b) { 0 } else { self.len[b] };
        let is_null = self.null_slot.map(i64::from) == Some(self.slots[b]);
        Some([
            within(self.slots[b], self.pool_slots).filter(|_| !is_null)?,
            within(len, self.ring[0] + 1)?,
            within(self.base[b], self.ring[1])?,
        ])
    }

    /// Whether the write-back of windows is deferred too.
    #[must_use]
    pub fn windows_wait(&self) -> bool {
        self.parallel && self.conv.is_some()
    }

    /// Whether the formulation is left to the library, if it would choose this one. A bit of the seed decides.
    fn unnamed(&self) -> bool {
        self.seed & 2 != 0
    }

    /// Whether row `b` starts from a state and a window of zeros.
    #[must_use]
    pub fn is_fresh(&self, b: usize) -> bool {
        self.fresh.as_ref().is_some_and(|fresh| fresh[b])
    }

    /// Size of a slot's ring.
    fn ring_size(&self) -> Ring {
        let [most, entries] = self.ring;
        Ring { most, entries }
    }

    /// Whether row `b` writes its state.
    #[must_use]
    pub fn writes(&self, b: usize) -> bool {
        self.live(b).is_some_and(|[_, len, _]| {
            let flushes = self.ring_size().flushes(len, self.tokens);
            self.is_fresh(b) || (len > 0 && (self.tokens == 0 || flushes))
        })
    }

    /// The problem in memory. Gaps, ring entries that are not pending and slots of fresh rows have NaN, or an index that is out of
    /// range.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem::new(self)
    }
}

/// The entries of steps with deferred write-back.
pub fn entries() -> impl Iterator<Item = Entry> {
    let is_deferred = |entry: &Entry| {
        let computes = entry.computes();
        computes.is_some_and(|computes| computes.family.is_deferred())
    };
    Entry::ALL.iter().copied().filter(is_deferred)
}

/// Problems of an entry, one for each operator, dtype of states and dtype of u that it takes. Rows have `len` pending tokens; with
/// drafts twice as many, since N is twice as large. Entries of layers have a convolution and a norm.
#[must_use]
pub fn of_entry(entry: Entry, len: &[i64]) -> Vec<Spec> {
    let Some(computes) = entry.computes() else {
        return Vec::new();
    };
    let states: &[_] = match computes.element {
        Some(Element::F32) => &[DType::F32],
        _ if computes.family.is_parallel() => &[DType::Bf16],
        _ => &[DType::Bf16, DType::F16],
    };
    let spec = |operator, state| {
        let spec = Spec::new(operator, state, computes.k as usize, len);
        let spec = match computes.family.is_parallel() {
            true => Spec {
                len: len.iter().map(|len| 2 * len).collect(),
                ..spec.drafts(4)
            },
            false => spec,
        };
        match is_layer(entry) {
            true => spec.layer(),
            false => spec,
        }
    };
    let operators = computes
        .all_operators()
        .map(|per_channel| match per_channel {
            true => Operator::Kda,
            false => Operator::Gdn,
        });
    let mut specs: Vec<_> = operators
        .flat_map(|operator| states.iter().map(move |&state| spec(operator, state)))
        .collect();
    if computes.family.is_parallel() && computes.k == 64 {
        specs.push(Spec {
            updates: DType::Bf16,
            ..specs[0].clone()
        });
    }
    specs
}

/// Whether an entry is a layer step: with a convolution, a norm or both.
#[must_use]
pub fn is_layer(entry: Entry) -> bool {
    (entry.computes()).is_some_and(|computes| computes.family.layer && computes.family.deferred)
}

/// Names of the tensors, by the position of their buffers.
const NAMES: [&str; COUNT] = [
    "q",
    "k",
    "v",
    "g",
    "beta",
    "o",
    "pool",
    "keys",
    "updates",
    "decays",
    "A_log",
    "dt_bias",
    "read_slots",
    "pending len",
    "pending base",
    "fresh",
    "x",
    "conv_weight",
    "conv_bias",
    "windows",
    "z",
    "norm_weight",
    "inputs",
];
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const G: usize = 3;
const BETA: usize = 4;
const O: usize = 5;
const POOL: usize = 6;
const KEYS: usize = 7;
const UPDATES: usize = 8;
const DECAYS: usize = 9;
const A_LOG: usize = 10;
const DT_BIAS: usize = 11;
const SLOTS: usize = 12;
const LEN: usize = 13;
const BASE: usize = 14;
const FRESH: usize = 15;
const X: usize = 16;
const CONV_WEIGHT: usize = 17;
const CONV_BIAS: usize = 18;
const WINDOWS: usize = 19;
const Z: usize = 20;
const NORM_WEIGHT: usize = 21;
const INPUTS: usize = 22;
const COUNT: usize = 23;

/// Positions of the weights of a layer and of the inputs of its tokens.
const GIVEN: [usize; 12] = [
    Q,
    K,
    V,
    G,
    BETA,
    A_LOG,
    DT_BIAS,
    X,
    CONV_WEIGHT,
    CONV_BIAS,
    Z,
    NORM_WEIGHT,
];

/// Positions of the tensors that are kept in slots.
const KEPT: [usize; 6] = [POOL, KEYS, UPDATES, DECAYS, WINDOWS, INPUTS];

/// All combinations of a slot, a head and an entry.
fn all(slots: usize, heads: usize, entries: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..slots).flat_map(move |slot| {
        (0..heads).flat_map(move |head| (0..entries).map(move |entry| (slot, head, entry)))
    })
}

/// The memory and the arguments of a launch, before or after it.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Sizes and switches of the problem.
    pub spec: Spec,
    buffers: Vec<Buffer>,
    views: Vec<View>,
}

impl Problem {
    fn new(spec: &Spec) -> Self {
        let (b, slots, tokens) = (spec.slots.len(), spec.pool_slots, spec.tokens.max(1));
        let [h, ratio] = spec.heads;
        let (hv, dim, entries) = (h * ratio, spec.dim, spec.ring[1]);
        let is_kda = spec.operator == Operator::Kda;
        let of_decay = |dims: &[usize]| match is_kda {
            true => [dims, &[dim]].concat(),
            false => dims.to_vec(),
        };
        let parameter = if is_kda { vec![hv, dim] } else { vec![hv] };
        let channels = 2 * h * dim + hv * dim;
        let taps = spec.conv.map_or(2, |conv| conv.taps);
        let dims: [Vec<usize>; COUNT] = [
            vec![b, tokens, h, dim],
            vec![b, tokens, h, dim],
            vec![b, tokens, hv, dim],
            of_decay(&[b, tokens, hv]),
            vec![b, tokens, hv],
            vec![b, tokens, hv, dim],
            vec![slots, hv, dim, dim],
            vec![slots, h, entries, dim],
            vec![slots, hv, entries, dim],
            of_decay(&[slots, hv, entries]),
            vec![hv],
            parameter,
            vec![b],
            vec![b],
            vec![b],
            vec![b],
            vec![b, tokens, channels],
            vec![channels, taps],
            vec![channels],
            vec![slots, channels, taps - 1],
            vec![b, tokens, hv, dim],
            vec![dim],
            vec![slots, entries, channels],
        ];
        let mut buffers = Vec::new();
        let mut views = Vec::new();
        for (i, dims) in dims.into_iter().enumerate() {
            let dtype = match i {
                KEYS if spec.conv.is_some() => DType::F32,
                Q | K | V | O | KEYS | X | WINDOWS | INPUTS | Z => spec.io,
                CONV_WEIGHT | CONV_BIAS => spec.conv.map_or(DType::F32, |conv| conv.weight),
                NORM_WEIGHT => spec.norm.map_or(DType::F32, |norm| norm.weight),
                POOL => spec.state,
                UPDATES => spec.updates,
                SLOTS | LEN | BASE | FRESH => spec.index,
                G | BETA | DECAYS | A_LOG | DT_BIAS => DType::F32,
                _ => unreachable!("{}", NAMES[i]),
            };
            // Rings stay 16-byte aligned even if other tensors have gaps.
            let gap = match i {
                KEYS | UPDATES => 8 * spec.gap,
                A_LOG | DT_BIAS | SLOTS | LEN | BASE | FRESH => 0,
                _ => spec.gap,
            };
            let mut strides = vec![1; dims.len()];
            for d in (0..dims.len() - 1).rev() {
                strides[d] = strides[d + 1] * dims[d + 1];
            }
            let align = if i == KEYS || i == UPDATES || (i == DECAYS && is_kda) {
                8
            } else {
                1
            };
            let outer = (strides[0] + gap).next_multiple_of(align);
            if dims.len() > 1 {
                strides[0] = outer;
            }
            if i == WINDOWS && spec.conv.is_some_and(|conv| conv.by_input) {
                (strides[1], strides[2]) = (1, dims[1]);
            }
            buffers.push(Buffer::new(dtype, dims[0] * strides[0]));
            views.push(View {
                buffer: i,
                offset: 0,
                dims,
                strides,
            });
        }
        let mut problem = Self {
            spec: spec.clone(),
            buffers,
            views,
        };
        problem.fill();
        problem
    }

    fn fill(&mut self) {
        let spec = self.spec.clone();
        let mut rng = SmallRng::seed_from_u64(spec.seed);
        let is_kda = spec.operator == Operator::Kda;
        for i in [Q, K, V] {
            self.random(i, &[], &mut rng, -1.0..1.0);
        }
        let g = match (spec.raw_gates, is_kda) {
            (true, _) => -2.0..2.0,
            (false, _) => -0.7..-0.01,
        };
        self.random(G, &[], &mut rng, g);
        let beta = if spec.raw_gates { -2.0..2.0 } else { 0.1..1.0 };
        self.random(BETA, &[], &mut rng, beta);
        self.random(A_LOG, &[], &mut rng, -1.0..0.0);
        self.random(DT_BIAS, &[], &mut rng, -1.0..1.0);
        self.random(NORM_WEIGHT, &[], &mut rng, -1.0..1.0);
        for i in [CONV_WEIGHT, CONV_BIAS] {
            self.eighths(i, &[], &mut rng);
        }
        for slot in 0..spec.pool_slots {
            self.random(POOL, &[slot], &mut rng, -1.0..1.0);
        }
        if spec.spread {
            for i in [V, POOL] {
                let dims = self.views[i].dims.clone();
                let heads = &dims[..dims.len() - if i == V { 1 } else { 2 }];
                let mut index = vec![0; heads.len()];
                for n in 0..heads.iter().product() {
                    let mut rest = n;
                    for (at, len) in index.iter_mut().zip(heads).rev() {
                        (*at, rest) = (rest % len, rest / len);
                    }
                    self.spread_out(i, &index, &mut rng);
                }
            }
        }
        for b in 0..spec.slots.len() {
            let (slots, len, base) = (spec.slots[b], spec.len[b], spec.base[b]);
            self.buffers[SLOTS].set_bits(b, slots as u64);
            self.buffers[LEN].set_bits(b, len as u64);
            self.buffers[BASE].set_bits(b, base as u64);
            let fresh = spec.is_fresh(b);
            self.buffers[FRESH].set_bits(b, u64::from(fresh));
            let Some([slot, len, base]) = spec.live(b) else {
                continue;
            };
            if fresh {
                for i in self.views[POOL].entry(&[slot]).positions() {
                    self.buffers[POOL].set_bits(i, u64::MAX);
                }
            } else {
                self.eighths(WINDOWS, &[slot], &mut rng);
            }
            self.eighths(X, &[b], &mut rng);
            self.random(Z, &[b], &mut rng, -2.0..2.0);
            for j in 0..len {
                let entry = (base + j) % spec.ring[1];
                if spec.windows_wait() {
                    self.eighths(INPUTS, &[slot, entry], &mut rng);
                }
                for (i, range) in [
                    (KEYS, -1.0..1.0),
                    (UPDATES, -0.3..0.3),
                    (DECAYS, -0.7..-0.01),
                ] {
                    for head in 0..self.views[i].dims[1] {
                        self.random(i, &[slot, head, entry], &mut rng, range.clone());
                        if spec.spread && i == UPDATES {
                            self.spread_out(i, &[slot, head, entry], &mut rng);
                        }
                    }
                }
            }
        }
    }

    /// Multiplies the elements at `index` of tensor `i` by a random power of two.
    fn spread_out(&mut self, i: usize, index: &[usize], rng: &mut SmallRng) {
        let spec = &self.spec;
        let most = match [spec.io, spec.state].contains(&DType::F16) {
            true => 6,
            false => 100,
        };
        let size = 2f64.powi(rng.random_range(-most..=most));
        self.change(i, index, |value| value * size);
    }

    fn random(
        &mut self,
        i: usize,
        index: &[usize],
        rng: &mut SmallRng,
        range: std::ops::Range<f32>,
    ) {
        let width = range.end - range.start;
        self.change(i, index, |_| {
            (range.start + width * rng.random::<f32>()).into()
        });
    }

    /// Fills the elements at `index` of tensor `i` with multiples of ⅛ up to 1, so that the sums of a convolution are exact in f32.
    fn eighths(&mut self, i: usize, index: &[usize], rng: &mut SmallRng) {
        self.change(i, index, |_| f64::from(rng.random_range(-8i8..=8)) / 8.0);
    }

    /// Replaces each value at `index` of tensor `i` by `of` it.
    fn change(&mut self, i: usize, index: &[usize], of: impl FnMut(f64) -> f64) {
        let view = self.views[i].entry(index);
        let values: Vec<f64> = self.buffers[i]
            .floats_of(&view)
            .into_iter()
            .map(of)
            .collect();
        self.buffers[i].write(&view, &values);
    }

    fn floats_at(&self, i: usize, index: &[usize]) -> Vec<f64> {
        self.buffers[i].floats_of(&self.views[i].entry(index))
    }

    fn floats(&self, i: usize) -> Vec<f64> {
        self.floats_at(i, &[])
    }

    fn bits_at(&self, i: usize, index: &[usize]) -> Vec<u64> {
        self.buffers[i].bits_of(&self.views[i].entry(index))
    }

    /// Bits of o of row `b`.
    #[must_use]
    pub fn o_bits(&self, b: usize) -> Vec<u64> {
        self.bits_at(O, &[b])
    }

    /// Bits of the state in slot `slot`.
    #[must_use]
    pub fn state_bits(&self, slot: usize) -> Vec<u64> {
        self.bits_at(POOL, &[slot])
    }

    /// Values of the state in slot `slot`.
    #[must_use]
    pub fn state(&self, slot: usize) -> Vec<f64> {
        self.floats_at(POOL, &[slot])
    }

    /// Values of o of row `b`.
    #[must_use]
    pub fn o(&self, b: usize) -> Vec<f64> {
        self.floats_at(O, &[b])
    }

    /// Bits of ring entry `entry` of slot `slot`: the key, u and the decay of a token.
    #[must_use]
    pub fn entry_bits(&self, slot: usize, entry: usize) -> Vec<u64> {
        let heads = |i: usize| (0..self.views[i].dims[1]).map(move |head| (i, head));
        let all = [KEYS, UPDATES, DECAYS].into_iter().flat_map(heads);
        all.flat_map(|(i, head)| self.bits_at(i, &[slot, head, entry]))
            .chain(self.bits_at(INPUTS, &[slot, entry]))
            .collect()
    }

    /// Buffers that a launch may write to.
    #[must_use]
    pub fn written(&self) -> [&Buffer; 7] {
        [O, POOL, KEYS, UPDATES, DECAYS, WINDOWS, INPUTS].map(|i| &self.buffers[i])
    }

    /// Bits of the window in slot `slot`.
    #[must_use]
    pub fn window_bits(&self, slot: usize) -> Vec<u64> {
        self.bits_at(WINDOWS, &[slot])
    }

    /// Copies the windows of another problem.
    pub fn take_windows(&mut self, other: &Self) {
        self.buffers[WINDOWS] = other.buffers[WINDOWS].clone();
    }

    /// The next step: states, rings and windows of `after`, `kept` pending tokens in each row, and new tokens from `seed`.
    #[must_use]
    pub fn next(&self, after: &Self, kept: usize, seed: u64) -> Self {
        let mut spec = self.spec.clone();
        for b in 0..spec.slots.len() {
            if let Some([_, len, base]) = spec.live(b) {
                let before = Count { len, base };
                let next = spec.ring_size().after(before, spec.tokens.max(1), kept);
                (spec.len[b], spec.base[b]) = (next.len as i64, next.base as i64);
            }
        }
        (spec.fresh, spec.seed, spec.tokens) = (None, seed, spec.tokens.max(1));
        after.with_states_of_this(&spec)
    }

    /// A problem with the sizes and switches of `spec` and with this one's states, rings and windows.
    #[must_use]
    pub fn with_states_of_this(&self, spec: &Spec) -> Self {
        let mut next = spec.problem();
        next.take_states(self);
        next
    }

    /// The same tokens, states, rings and windows, with sizes and switches changed by `change`.
    #[must_use]
    pub fn changed(&self, change: impl FnOnce(&mut Spec)) -> Self {
        let mut spec = self.spec.clone();
        change(&mut spec);
        let mut other = self.with_states_of_this(&spec);
        for i in GIVEN {
            if other.views[i] == self.views[i] {
                other.buffers[i] = self.buffers[i].clone();
            }
        }
        other
    }

    /// The same problem with q and k multiplied by `power`. With a convolution its taps and bias for q and k are multiplied.
    #[must_use]
    pub fn with_times_the_queries_and_keys(&self, power: f32) -> Self {
        let mut other = self.clone();
        let of_qk = 2 * self.spec.heads[0] * self.spec.dim;
        let mut multiply = |i: usize, index: &[usize]| {
            for position in self.views[i].entry(index).positions() {
                let value = self.buffers[i].float(position) as f32;
                other.buffers[i].set_float(position, power * value);
            }
        };
        multiply(Q, &[]);
        multiply(K, &[]);
        for channel in 0..of_qk {
            for i in [CONV_WEIGHT, CONV_BIAS] {
                if self.spec.conv.is_some() {
                    multiply(i, &[channel]);
                }
            }
        }
        other
    }

    /// Copies the states, rings and windows of another problem.
    pub fn take_states(&mut self, other: &Self) {
        for i in KEPT {
            self.buffers[i] = other.buffers[i].clone();
        }
    }

    /// Sets the log decay of the `j`-th pending token of each row, or of the new tokens of a row with at most `j` pending ones.
    pub fn set_log_decay(&mut self, j: usize, log_decay: f32) {
        for b in 0..self.spec.slots.len() {
            let Some([slot, len, base]) = self.spec.live(b) else {
                continue;
            };
            let (i, views) = if j < len {
                let view = self.views[DECAYS].clone();
                let entry = (base + j) % self.spec.ring[1];
                let heads = 0..view.dims[1];
                (
                    DECAYS,
                    heads.map(|head| view.entry(&[slot, head, entry])).collect(),
                )
            } else {
                (G, vec![self.views[G].entry(&[b])])
            };
            for position in views.iter().flat_map(View::positions) {
                self.buffers[i].set_float(position, log_decay);
            }
        }
    }

    /// The same problem with all ring entries and all bases moved by `by` entries.
    #[must_use]
    pub fn turned(&self, by: usize) -> Self {
        let entries = self.spec.ring[1];
        let mut turned = self.changed(|spec| {
            for base in &mut spec.base {
                *base = (*base + by as i64) % entries as i64;
            }
        });
        for i in [KEYS, UPDATES, DECAYS] {
            let view = &self.views[i];
            for (slot, head, entry) in all(view.dims[0], view.dims[1], entries) {
                let from = view.entry(&[slot, head, entry]).positions();
                let to = view
                    .entry(&[slot, head, (entry + by) % entries])
                    .positions();
                for (from, to) in from.into_iter().zip(to) {
                    turned.buffers[i].set_bits(to, self.buffers[i].bits(from));
                }
            }
        }
        let inputs = &self.views[INPUTS];
        for (slot, entry, _) in all(inputs.dims[0], entries, 1) {
            let from = inputs.entry(&[slot, entry]).positions();
            let to = inputs.entry(&[slot, (entry + by) % entries]).positions();
            for (from, to) in from.into_iter().zip(to) {
                turned.buffers[INPUTS].set_bits(to, self.buffers[INPUTS].bits(from));
            }
        }
        turned
    }

    /// Fills the ring entries that are not pending with NaN.
    pub fn forget_unpending(&mut self) {
        let entries = self.spec.ring[1];
        let mut pending = Vec::new();
        for b in 0..self.spec.slots.len() {
            if let Some([slot, len, base]) = self.spec.live(b) {
                pending.extend((0..len).map(|j| (slot, (base + j) % entries)));
            }
        }
        for i in [KEYS, UPDATES, DECAYS] {
            let view = self.views[i].clone();
            for (slot, head, entry) in all(view.dims[0], view.dims[1], entries) {
                if !pending.contains(&(slot, entry)) {
                    for position in view.entry(&[slot, head, entry]).positions() {
                        self.buffers[i].set_bits(position, u64::MAX);
                    }
                }
            }
        }
        let inputs = self.views[INPUTS].clone();
        for (slot, entry, _) in all(inputs.dims[0], entries, 1) {
            if !pending.contains(&(slot, entry)) {
                for position in inputs.entry(&[slot, entry]).positions() {
                    self.buffers[INPUTS].set_bits(position, u64::MAX);
                }
            }
        }
    }

    /// Row `b` of this problem alone.
    #[must_use]
    pub fn alone(&self, b: usize) -> Self {
        let mut spec = self.spec.clone();
        (spec.slots, spec.len, spec.base) = (
            vec![spec.slots[b]; 1],
            vec![spec.len[b]; 1],
            vec![spec.base[b]; 1],
        );
        spec.fresh = spec.fresh.map(|fresh| vec![fresh[b]]);
        let mut alone = self.clone();
        alone.spec = spec;
        for i in [Q, K, V, G, BETA, O, SLOTS, LEN, BASE, FRESH, X, Z] {
            alone.views[i] = alone.views[i].narrow(0, b, 1);
        }
        alone
    }

    /// The first `tokens` tokens of each row.
    #[must_use]
    pub fn first(&self, tokens: usize) -> Self {
        let mut first = self.clone();
        first.spec.tokens = tokens;
        for i in [Q, K, V, G, BETA, O, X, Z] {
            first.views[i] = first.views[i].narrow(1, 0, tokens);
        }
        first
    }

    /// The problem as a case, for other helpers.
    #[must_use]
    pub fn case(&self) -> Case {
        let spec = &self.spec;
        let view = |i: usize| self.views[i].clone();
        let gates = match (spec.operator, spec.raw_gates) {
            (Operator::Gdn, true) => GateKind::Raw(BetaScale::One),
            (Operator::Gdn, false) => GateKind::Given,
            (Operator::Kda, true) => GateKind::Kda(DecayKind::Softplus, KdaBeta::Logit),
            (Operator::Kda, false) => GateKind::Kda(DecayKind::Log, KdaBeta::Given),
        };
        let head_map = match spec.tiled {
            true => HeadMap::Tiled,
            false => HeadMap::Grouped,
        };
        let mut options = Options::default().head_map(head_map).qk_l2norm(spec.l2norm);
        options.null_slot = spec.null_slot;
        options.formulation = match spec.parallel {
            true => Formulation::Parallel,
            false => Formulation::Recurrent,
        };
        let has_tokens = spec.tokens > 0;
        let convolved = spec.conv.filter(|_| has_tokens).map(|conv| Convolved {
            x: view(X),
            heads: spec.heads[0],
            gate: view(G),
            beta: view(BETA),
            o: view(O),
            weight: view(CONV_WEIGHT),
            bias: conv.bias.then(|| view(CONV_BIAS)),
            activation: conv.activation,
            windows: view(WINDOWS),
            write_windows: None,
            window_snapshots: None,
        });
        let args = Arguments {
            a_log: spec.raw_gates.then(|| view(A_LOG)),
            dt_bias: spec.raw_gates.then(|| view(DT_BIAS)),
            new: (has_tokens && convolved.is_none()).then(|| New {
                q: view(Q),
                tokens: Tokens {
                    k: view(K),
                    v: view(V),
                    gate: view(G),
                    beta: view(BETA),
                },
                o: view(O),
            }),
            convolved,
            norm: spec.norm.filter(|_| has_tokens).map(|norm| GatedNorm {
                z: view(Z),
                weight: view(NORM_WEIGHT),
                eps: EPS,
                activation: norm.activation,
            }),
            read_slots: Some(view(SLOTS)),
            fresh: spec
                .fresh
                .as_ref()
                .filter(|_| has_tokens)
                .map(|_| view(FRESH)),
            pending: Some(Pending {
                keys: view(KEYS),
                updates: view(UPDATES),
                decays: view(DECAYS),
                len: view(LEN),
                base: view(BASE),
                inputs: spec.windows_wait().then(|| view(INPUTS)),
                windows: (spec.windows_wait() && !has_tokens).then(|| view(WINDOWS)),
                most: spec.ring[0],
            }),
            options,
            ..Arguments::new(gates, view(POOL))
        };
        let case = Case {
            buffers: self.buffers.clone(),
            args,
        };
        match spec.unnamed() {
            true => case.unnamed(),
            false => case,
        }
    }

    /// Copies the problem to a backend's memory, runs `body` there, and returns the result of `body` and the memory after it.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn on<R>(
        &self,
        backend: &Backend,
        body: impl FnOnce(&Library, StreamRef<'_>, &dyn Work) -> R,
    ) -> Result<(R, Self), Error> {
        let (result, after) = backend.with(&self.case(), |library, stream, args| {
            let work = args.work();
            work.map(|work| body(library, stream, &*work))
        })?;
        Ok((result?, self.after(after)))
    }

    /// The problem with the memory of a case after its launch.
    fn after(&self, case: Case) -> Self {
        Self {
            buffers: case.buffers,
            ..self.clone()
        }
    }

    /// Runs the problem with `variant`, or with the variant that the library selects.
    ///
    /// # Panics
    /// On any error.
    #[must_use]
    #[track_caller]
    pub fn run(&self, backend: &Backend, variant: Option<Entry>) -> Self {
        self.after(backend.run(&self.case(), variant))
    }

    /// All variants of the problem.
    ///
    /// # Panics
    /// If the library refuses the problem.
    #[must_use]
    pub fn variants(&self) -> Vec<Entry> {
        let simulator = Backend::Simulator(Library::simulator());
        let variants = self.on(&simulator, |_, _, work| work.variants());
        let (variants, _) = variants.unwrap_or_else(|error| panic!("{error}"));
        variants.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The convolution for the reference. `weight` and `bias` have its values.
    fn conv<'a>(&self, [weight, bias]: &'a [Vec<f64>; 2]) -> Option<Conv<'a>> {
        let conv = self.spec.conv.filter(|_| self.spec.tokens > 0)?;
        Some(Conv {
            channels: self.views[X].dims[2],
            width: conv.taps,
            weight,
            bias: conv.bias.then_some(bias),
            activation: conv.activation.into(),
        })
    }

    /// The norm for the reference. `z` and `weight` have its values.
    fn norm<'a>(&self, [z, weight]: &'a [Vec<f64>; 2]) -> Option<NormOfReference<'a>> {
        let norm = self.spec.norm.filter(|_| self.spec.tokens > 0)?;
        Some(NormOfReference {
            z,
            weight,
            eps: EPS.into(),
            activation: norm.activation.into(),
        })
    }

    /// Buffers and positions of the inputs before a row's first token, by channel: in the window of its slot, or pending. `None`
    /// stands for an input of zero.
    fn window(&self, b: usize, slot: usize) -> Vec<Vec<Option<(usize, usize)>>> {
        let [_, channels, inputs] = self.views[WINDOWS].dims[..] else {
            unreachable!("windows have three dims");
        };
        let at = |i: usize, index: &[usize]| {
            let positions = self.views[i].entry(index).positions();
            positions.into_iter().map(move |place| (i, place))
        };
        let pending = match self.spec.live(b) {
            Some([_, len, base]) if self.spec.windows_wait() => (0..len)
                .map(|j| at(INPUTS, &[slot, (base + j) % self.spec.ring[1]]).collect())
                .collect(),
            _ => Vec::new(),
        };
        let pending: Vec<Vec<(usize, usize)>> = pending;
        let of_channel = |c: usize| {
            let window =
                at(WINDOWS, &[slot, c]).map(|place| (!self.spec.is_fresh(b)).then_some(place));
            let all: Vec<_> = window
                .chain(pending.iter().map(|of_token| Some(of_token[c])))
                .collect();
            all[all.len() - inputs..].to_vec()
        };
        (0..channels).map(of_channel).collect()
    }

    /// Bits of the window that a row leaves in its slot. With deferred write-back of windows the window is unchanged. Otherwise it
    /// loses its oldest input and takes the token's.
    fn window_after(&self, b: usize, slot: usize) -> Vec<u64> {
        let bits = |place: &Option<(usize, usize)>| {
            place.map_or(0, |(buffer, i)| self.buffers[buffer].bits(i))
        };
        let window = self.window(b, slot);
        if self.spec.windows_wait() {
            return window.iter().flatten().map(bits).collect();
        }
        let channels = window.iter().zip(self.bits_at(X, &[b]));
        channels
            .flat_map(|(of_channel, x)| of_channel[1..].iter().map(bits).chain([x]))
            .collect()
    }

    /// Results by the reference and their error bounds. New tokens of rows that flush start from the states of `after`.
    fn judged(&self, after: &Self) -> (After, AllowedOfRings) {
        let spec = &self.spec;
        let [h, ratio] = spec.heads;
        let [q, k, v, g, beta] = [Q, K, V, G, BETA].map(|i| self.floats(i));
        let [a_log, dt_bias] = [A_LOG, DT_BIAS].map(|i| self.floats(i));
        let gates = match (spec.operator, spec.raw_gates) {
            (Operator::Gdn, false) => TokenGates::Gdn(Gates::Given { g: &g, beta: &beta }),
            (Operator::Gdn, true) => TokenGates::Gdn(Gates::Raw {
                a: &g,
                b: &beta,
                a_log: &a_log,
                dt_bias: &dt_bias,
                beta_scale: 1.0,
            }),
            (Operator::Kda, raw) => TokenGates::Kda(kda::KdaGates {
                g: &g,
                kind: match raw {
                    false => kda::KdaDecay::Log,
                    true => kda::KdaDecay::Softplus {
                        a_log: &a_log,
                        dt_bias: Some(&dt_bias),
                    },
                },
                beta: &beta,
                beta_kind: match raw {
                    false => kda::KdaBeta::Given,
                    true => kda::KdaBeta::Logit,
                },
            }),
        };
        let tokens = spec.tokens;
        let of_tokens = |x: &[f64]| if tokens == 0 { 0 } else { x.len() };
        let dims = [spec.dim; 2];
        let [conv, of_norm] =
            [[CONV_WEIGHT, CONV_BIAS], [Z, NORM_WEIGHT]].map(|of| of.map(|i| self.floats(i)));
        let (x, windows) = (self.floats(X), self.floats(WINDOWS));
        let conv = self.conv(&conv);
        let given = |x: &[f64]| if conv.is_some() { 0 } else { of_tokens(x) };
        let step = Recurrent {
            q: &q[..given(&q)],
            k: &k[..given(&k)],
            v: &v[..given(&v)],
            l2norm: spec.l2norm,
            read_slots: Some(&spec.slots),
            null_slot: spec.null_slot.map(i64::from),
            head_map: match spec.tiled {
                true => gated_delta_reference::gdn::HeadMap::Tiled,
                false => gated_delta_reference::gdn::HeadMap::Grouped,
            },
            ..Recurrent::new([spec.slots.len(), tokens], [h, h * ratio], dims, gates)
        };
        let fresh: Vec<i64> = (0..spec.slots.len())
            .map(|b| i64::from(spec.is_fresh(b)))
            .collect();
        let rings = Rings {
            keys: self.floats(KEYS),
            updates: self.floats(UPDATES),
            decays: self.floats(DECAYS),
            inputs: spec.windows_wait().then(|| self.floats(INPUTS)),
        };
        let problem = Reference {
            layer: Layer {
                step,
                projection: conv.map(|conv| Projection {
                    x: &x,
                    previous: None,
                    conv,
                }),
                norm: self.norm(&of_norm),
                fresh: Some(&fresh),
                checkpoints: None,
            },
            most: spec.ring[0],
            entries: spec.ring[1],
            len: &spec.len,
            base: &spec.base,
        };
        let pool = self.floats(POOL);
        let pools = Pools {
            states: &pool,
            windows: (conv.is_some() || spec.windows_wait()).then_some(&windows[..]),
            ..Pools::default()
        };
        let tolerance = match spec.parallel {
            true => Tolerance::PARALLEL,
            false => Tolerance::RECURRENT,
        };
        // Sums of a convolution are exact, their activations are rounded.
        let taps = match spec.conv {
            Some(conv) if conv.activation != Activation::None => CONVOLVED,
            _ => 0.0,
        };
        let stored = after.floats(POOL);
        judge_deferred(&problem, &pools, &rings, Some(&stored), &tolerance, taps)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Panics unless `after` is a correct result of a launch on this problem. o, flushed states and ring entries are within bounds
    /// of the reference. Windows have moved by one input. All other bytes of all buffers are unchanged.
    #[track_caller]
    pub fn check(&self, after: &Self) {
        let spec = &self.spec;
        let [h, ratio] = spec.heads;
        let (hv_count, dim, entries) = (h * ratio, spec.dim, spec.ring[1]);
        let (wanted, allowed) = self.judged(after);
        let convolves = spec.conv.is_some() && spec.tokens > 0;
        let mut rest = after.clone();
        let mut seen = |views: Vec<View>| {
            for view in views {
                rest.buffers[view.buffer].copy_from(&self.buffers[view.buffer], &view);
            }
        };
        let is_kda = spec.operator == Operator::Kda;
        let channels = if is_kda { dim } else { 1 };
        for b in 0..spec.slots.len() {
            let live = spec.live(b);
            let moves = match spec.windows_wait() {
                true => spec.writes(b),
                false => convolves,
            };
            if let (true, Some([slot, ..])) = (moves, live) {
                let window = self.window_after(b, slot);
                let got = after.bits_at(WINDOWS, &[slot]);
                assert!(got == window, "the window of row {b}, {spec:?}");
                let exact = wanted.windows.as_ref().expect("there are windows");
                let exact = &exact[slot * got.len()..][..got.len()];
                assert_eq!(after.floats_at(WINDOWS, &[slot]), exact, "{spec:?}");
                seen(vec![self.views[WINDOWS].entry(&[slot])]);
            }
            if let (true, Some([slot, pending, first])) = (spec.windows_wait(), live) {
                for t in 0..spec.tokens {
                    let left = (first + pending + t) % entries;
                    let got = after.bits_at(INPUTS, &[slot, left]);
                    assert!(
                        got == self.bits_at(X, &[b, t]),
                        "x of token {t} of row {b}, {spec:?}"
                    );
                    seen(vec![self.views[INPUTS].entry(&[slot, left])]);
                }
            }
            for hv in 0..hv_count {
                let what = format!("of row {b}, value head {hv}, {spec:?}");
                let o = |t: usize| self.views[O].entry(&[b, t, hv]);
                seen((0..spec.tokens).map(o).collect());
                let Some([slot, pending, first]) = live else {
                    for t in 0..spec.tokens {
                        let zeros = after.bits_at(O, &[b, t, hv]).iter().all(|bits| *bits == 0);
                        assert!(zeros, "o of token {t} {what}, which is inactive");
                    }
                    continue;
                };
                let head = match spec.tiled {
                    true => hv % h,
                    false => hv / ratio,
                };
                let state = self.views[POOL].entry(&[slot, hv]);
                if spec.writes(b) {
                    let allowed = allowed.states[slot * hv_count + hv];
                    let exact = &wanted.pool[(slot * hv_count + hv) * dim * dim..][..dim * dim];
                    let got = after.floats_at(POOL, &[slot, hv]);
                    assert_close(&format!("state {what}"), &got, exact, spec.state, allowed);
                    seen(vec![state]);
                }
                for t in 0..spec.tokens {
                    let what = format!("of token {t} {what}");
                    let left = (first + pending + t) % entries;
                    let ring_at = |i: usize, head: usize, of_entry: usize| {
                        let of: &[f64] = match i {
                            KEYS => &wanted.rings.keys,
                            UPDATES => &wanted.rings.updates,
                            _ => &wanted.rings.decays,
                        };
                        let heads = self.views[i].dims[1];
                        let first = ((slot * heads + head) * entries + left) * of_entry;
                        of[first..][..of_entry].to_vec()
                    };
                    let log_decays = ring_at(DECAYS, hv, channels);
                    let k = ring_at(KEYS, head, dim);
                    let u = ring_at(UPDATES, hv, dim);
                    let token = (b * spec.tokens + t) * hv_count + hv;
                    let of_entry = (slot * hv_count + hv) * entries + left;
                    let got = after.floats_at(O, &[b, t, hv]);
                    let exact = &wanted.o[token * dim..][..dim];
                    assert_close(&format!("o {what}"), &got, exact, spec.io, allowed.o[token]);
                    let got_u = after.floats_at(UPDATES, &[slot, hv, left]);
                    let of_update = allowed.updates[of_entry];
                    assert_close(&format!("u {what}"), &got_u, &u, spec.updates, of_update);
                    let got_decays = after.floats_at(DECAYS, &[slot, hv, left]);
                    assert_close(
                        &format!("log decay {what}"),
                        &got_decays,
                        &log_decays,
                        DType::F32,
                        allowed.decays[of_entry],
                    );
                    let got_k = after.bits_at(KEYS, &[slot, head, left]);
                    if convolves {
                        let got = after.floats_at(KEYS, &[slot, head, left]);
                        let of_key = allowed.keys[(slot * h + head) * entries + left];
                        assert_close(&format!("k {what}"), &got, &k, DType::F32, of_key);
                    } else {
                        assert!(got_k == self.bits_at(K, &[b, t, head]), "k {what}");
                    }
                    seen(vec![
                        self.views[UPDATES].entry(&[slot, hv, left]),
                        self.views[DECAYS].entry(&[slot, hv, left]),
                        self.views[KEYS].entry(&[slot, head, left]),
                    ]);
                }
            }
        }
        for (i, (rest, before)) in rest.buffers.iter().zip(&self.buffers).enumerate() {
            assert!(
                rest == before,
                "{} is written where it must not be: {spec:?}",
                NAMES[i]
            );
        }
    }
}
