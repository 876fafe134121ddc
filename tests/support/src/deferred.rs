//! States that wait for the tokens of a ring: problems in memory, their launches, and what must have come out.

use gated_delta::{
    Activation, BetaScale, DType, Entry, Error, Formulation, HeadMap, KdaBeta, Library, Options,
    StreamRef, Work,
};
use gated_delta_harness::arguments::{
    Arguments, Convolved, DecayKind, GateKind, GatedNorm, New, Operator, Pending, Tokens,
};
use gated_delta_kernels::constants::Element;
use gated_delta_reference::compare::{CONVOLVED, Tolerance};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::deferred::{After, Deferred as Reference, Rings};
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::judge::{AllowedOfRings, judge_deferred};
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, Pools, Projection};
use gated_delta_reference::norm::GatedNorm as NormOfReference;
use gated_delta_reference::recurrent::{Recurrent, TokenGates};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::backend::Backend;
use crate::buffer::{Buffer, View};
use crate::case::Case;
use crate::compare::assert_close;

/// A convolution before the recurrence.
#[derive(Clone, Copy, Debug)]
pub struct ConvSpec {
    /// W
    pub taps: usize,
    /// Whether something is added to the sums.
    pub bias: bool,
    /// Of the sums.
    pub activation: Activation,
    /// Of the taps and the bias.
    pub weight: DType,
    /// Whether the channels of a window lie side by side, and not its inputs.
    pub by_input: bool,
}

/// A norm after it.
#[derive(Clone, Copy, Debug)]
pub struct NormSpec {
    /// Of z.
    pub activation: Activation,
    /// Of the norm's weight.
    pub weight: DType,
}

/// Added to the mean of o².
const EPS: f32 = 1e-5;

/// What a problem is like; its values follow from the seed.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Whose layer.
    pub operator: Operator,
    /// Gates are computed in the kernel.
    pub raw_gates: bool,
    /// Of the pool.
    pub state: DType,
    /// Of q, k, v, o and the keys, of x, its windows and z; keys are f32 where a convolution makes them.
    pub io: DType,
    /// Of u in the rings: not always f32 with `parallel` alone.
    pub updates: DType,
    /// Of slots, lengths and bases.
    pub index: DType,
    /// Of every row.
    pub slots: Vec<i64>,
    /// P
    pub pool_slots: usize,
    /// H and HV / H.
    pub heads: [usize; 2],
    /// K = V
    pub dim: usize,
    /// N and R.
    pub ring: [usize; 2],
    /// Of every row, whatever is out of range too.
    pub len: Vec<i64>,
    /// The same.
    pub base: Vec<i64>,
    /// Rows that are fresh, where some are.
    pub fresh: Option<Vec<bool>>,
    /// T, or 0 for a flush: more than one with `parallel` alone.
    pub tokens: usize,
    /// All tokens at once, on the tensor cores.
    pub parallel: bool,
    /// Elements between what is contiguous, where views may have gaps.
    pub gap: usize,
    /// The head map, of query/key heads that several value heads share.
    pub tiled: bool,
    /// Whether q and k are normalised.
    pub l2norm: bool,
    /// v of each token, the state of each slot and u of each pending token, of each value head, are of a size of their own, as those of
    /// [`Spec::spread`](crate::spec::Spec::spread).
    pub spread: bool,
    /// A slot that makes its row inactive.
    pub null_slot: Option<u32>,
    /// What makes q, k and v of the tokens.
    pub conv: Option<ConvSpec>,
    /// What becomes of o.
    pub norm: Option<NormSpec>,
    /// Of the values.
    pub seed: u64,
}

impl Spec {
    /// Rows of so many pending tokens each, in slots and at bases of their own.
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

    /// With so many drafts a step, and up to 16 tokens pending.
    #[must_use]
    pub fn drafts(self, tokens: usize) -> Self {
        Self {
            tokens,
            parallel: true,
            ring: [16, 24],
            ..self
        }
    }

    /// With a convolution of four taps and SiLU, and a norm: a whole layer.
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

    /// Of row b: its slot, pending tokens and base, unless it is inactive.
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

    /// Whether windows wait as states do.
    #[must_use]
    pub fn windows_wait(&self) -> bool {
        self.parallel && self.conv.is_some()
    }

    /// Whether the formulation is not named, where the library is to choose it: by a bit of the seed.
    fn unnamed(&self) -> bool {
        self.seed & 2 != 0
    }

    /// Whether row b starts from zeros.
    #[must_use]
    pub fn is_fresh(&self, b: usize) -> bool {
        self.fresh.as_ref().is_some_and(|fresh| fresh[b])
    }

    /// Whether row b writes its state.
    #[must_use]
    pub fn writes(&self, b: usize) -> bool {
        self.live(b).is_some_and(|[_, len, _]| {
            let folds = gated_delta::step::pending::folds(len, self.tokens, self.ring[0]);
            self.is_fresh(b) || (len > 0 && (self.tokens == 0 || folds))
        })
    }

    /// The problem in memory: NaN, or an index that is out of range, in every gap, in entries that are not pending, and in
    /// slots of fresh rows.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem::new(self)
    }
}

/// The entries of states that wait.
pub fn entries() -> impl Iterator<Item = Entry> {
    let is_deferred = |entry: &Entry| {
        let computes = entry.computes();
        computes.is_some_and(|computes| computes.family.is_deferred())
    };
    Entry::ALL.iter().copied().filter(is_deferred)
}

/// Of an entry, of each operator, with each dtype that its states may have, and that u may have: rows of so many pending tokens each, of a layer's entry with a
/// convolution and a norm; of drafts twice as many, as N is twice as large.
#[must_use]
pub fn of_entry(entry: Entry, len: &[i64]) -> Vec<Spec> {
    let Some(computes) = entry.computes() else {
        return Vec::new();
    };
    let states: &[_] = match computes.states.map(|states| states.element) {
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

/// Whether an entry is for a convolution, a norm or both.
#[must_use]
pub fn is_layer(entry: Entry) -> bool {
    (entry.computes()).is_some_and(|computes| computes.family.layer && computes.family.deferred)
}

/// Positions of the tensors' buffers.
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

/// What is fixed for a layer, and what its tokens bring.
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

/// What stays in slots.
const KEPT: [usize; 6] = [POOL, KEYS, UPDATES, DECAYS, WINDOWS, INPUTS];

/// Slots, heads and entries.
fn all(slots: usize, heads: usize, entries: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..slots).flat_map(move |slot| {
        (0..heads).flat_map(move |head| (0..entries).map(move |entry| (slot, head, entry)))
    })
}

/// A launch in memory; after it, the same with the buffers as they are then.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What it is like.
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
            // Rings stay 16-byte aligned, whatever the gaps of others.
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

    /// Multiplies what lies at an index by a size.
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

    /// Multiples of ⅛ up to 1, so that a convolution's sums are exact, in f32 and before it.
    fn eighths(&mut self, i: usize, index: &[usize], rng: &mut SmallRng) {
        self.change(i, index, |_| f64::from(rng.random_range(-8i8..=8)) / 8.0);
    }

    /// Makes of each value that lies at an index another one.
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

    /// Bits of o of row b.
    #[must_use]
    pub fn o_bits(&self, b: usize) -> Vec<u64> {
        self.bits_at(O, &[b])
    }

    /// Bits of the state in a slot.
    #[must_use]
    pub fn state_bits(&self, slot: usize) -> Vec<u64> {
        self.bits_at(POOL, &[slot])
    }

    /// The state in a slot.
    #[must_use]
    pub fn state(&self, slot: usize) -> Vec<f64> {
        self.floats_at(POOL, &[slot])
    }

    /// o of row b.
    #[must_use]
    pub fn o(&self, b: usize) -> Vec<f64> {
        self.floats_at(O, &[b])
    }

    /// Bits of an entry of a slot's ring, all that a token left.
    #[must_use]
    pub fn entry_bits(&self, slot: usize, entry: usize) -> Vec<u64> {
        let heads = |i: usize| (0..self.views[i].dims[1]).map(move |head| (i, head));
        let all = [KEYS, UPDATES, DECAYS].into_iter().flat_map(heads);
        all.flat_map(|(i, head)| self.bits_at(i, &[slot, head, entry]))
            .chain(self.bits_at(INPUTS, &[slot, entry]))
            .collect()
    }

    /// All bytes that a launch may write.
    #[must_use]
    pub fn written(&self) -> [&Buffer; 7] {
        [O, POOL, KEYS, UPDATES, DECAYS, WINDOWS, INPUTS].map(|i| &self.buffers[i])
    }

    /// Bits of the window in a slot.
    #[must_use]
    pub fn window_bits(&self, slot: usize) -> Vec<u64> {
        self.bits_at(WINDOWS, &[slot])
    }

    /// With the windows of another.
    pub fn take_windows(&mut self, other: &Self) {
        self.buffers[WINDOWS] = other.buffers[WINDOWS].clone();
    }

    /// With states, rings and windows as `after` left them, `kept` of the tokens of each row pending, and new tokens of `seed`.
    #[must_use]
    pub fn next(&self, after: &Self, kept: usize, seed: u64) -> Self {
        let mut spec = self.spec.clone();
        for b in 0..spec.slots.len() {
            if let Some([_, len, base]) = spec.live(b) {
                let [len, base] = gated_delta::step::pending::after(
                    [len, base],
                    [kept, spec.tokens.max(1)],
                    spec.ring,
                );
                (spec.len[b], spec.base[b]) = (len as i64, base as i64);
            }
        }
        (spec.fresh, spec.seed, spec.tokens) = (None, seed, spec.tokens.max(1));
        after.with_states_of_this(&spec)
    }

    /// Another problem, with this one's states, rings and windows.
    #[must_use]
    pub fn with_states_of_this(&self, spec: &Spec) -> Self {
        let mut next = spec.problem();
        next.take_states(self);
        next
    }

    /// The same tokens, states, rings and windows, otherwise as `change` has it.
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

    /// With this many times its q and k, or what a convolution makes them of.
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

    /// With the states, rings and windows of another.
    pub fn take_states(&mut self, other: &Self) {
        for i in KEPT {
            self.buffers[i] = other.buffers[i].clone();
        }
    }

    /// With this log decay of the `j`-th pending token of every row, and of every new token if there is none such.
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

    /// The same with every entry of the rings, and every base, `by` further.
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

    /// Makes NaN of every entry that is not pending.
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

    /// Row b of this problem alone.
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

    /// The first `tokens` tokens of every row alone.
    #[must_use]
    pub fn first(&self, tokens: usize) -> Self {
        let mut first = self.clone();
        first.spec.tokens = tokens;
        for i in [Q, K, V, G, BETA, O, X, Z] {
            first.views[i] = first.views[i].narrow(1, 0, tokens);
        }
        first
    }

    /// As a launch in memory.
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

    /// Copies the problem to a backend's memory, has `body` take its work there, and returns what memory is then.
    ///
    /// # Errors
    /// The driver's.
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

    /// The same as a launch left it.
    fn after(&self, case: Case) -> Self {
        Self {
            buffers: case.buffers,
            ..self.clone()
        }
    }

    /// Runs it with the variant that the library selects, or with `variant`.
    ///
    /// # Panics
    /// On any error.
    #[must_use]
    #[track_caller]
    pub fn run(&self, backend: &Backend, variant: Option<Entry>) -> Self {
        self.after(backend.run(&self.case(), variant))
    }

    /// Every variant.
    ///
    /// # Panics
    /// Where it is refused.
    #[must_use]
    pub fn variants(&self) -> Vec<Entry> {
        let simulator = Backend::Simulator(Library::simulator());
        let variants = self.on(&simulator, |_, _, work| work.variants());
        let (variants, _) = variants.unwrap_or_else(|error| panic!("{error}"));
        variants.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The convolution, where there is one; `weight` and `bias` are its numbers.
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

    /// The norm, where there is one; `z` and `weight` are its numbers.
    fn norm<'a>(&self, [z, weight]: &'a [Vec<f64>; 2]) -> Option<NormOfReference<'a>> {
        let norm = self.spec.norm.filter(|_| self.spec.tokens > 0)?;
        Some(NormOfReference {
            z,
            weight,
            eps: EPS.into(),
            activation: norm.activation.into(),
        })
    }

    /// Where the inputs before a row's tokens lie, channel by channel, buffer and position: of its slot's window, or pending ones;
    /// nowhere, zeros.
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

    /// Bits of the window that a row leaves in its slot: that before its tokens where it waits; else without its oldest input, and
    /// with the token's.
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

    /// What the reference makes of it, where new tokens of rows that fold start from the states of `after`, and how far from that
    /// results may be.
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
        // Sums of a convolution are exact, and what is made of them is not.
        let taps = match spec.conv {
            Some(conv) if conv.activation != Activation::None => CONVOLVED,
            _ => 0.0,
        };
        let stored = after.floats(POOL);
        judge_deferred(&problem, &pools, &rings, Some(&stored), &tolerance, taps)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Panics unless `after` is what a launch on this must leave: o, folded states and entries within bounds of the
    /// reference, windows moved by an input, and every other byte of every buffer as it was.
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
