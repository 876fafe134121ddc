//! Random problems: values and slots follow from sizes, switches and a seed.

use gated_delta::{
    Activation, BetaScale, DType, Entry, Formulation, KdaBeta, MAX_TOKENS, Options, StateLayout,
};
use gated_delta_harness::arguments::{
    Checkpoints, CommitConvolution, Convolved, DecayKind, GateKind, GatedNorm, Kept, KeptX, New,
    Operator, Packed, Tokens, value_dim,
};
use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::case::Case;
use crate::layout::{Form, Layout};
use crate::problem::{Array, Problem, conv, of_tokens, windows_mut};
use crate::rows;
use crate::slots::SlotChoice;

/// All entries of one operator, formulation, layout, state dtype and K, which compute the same problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Operator of the layer.
    pub operator: Operator,
    /// Whether problems have exactly one new token and no previous ones.
    pub decode: bool,
    /// Whether the kernels are layer steps: with a convolution, a norm or both.
    pub layer: bool,
    /// Formulation of the kernels.
    pub formulation: Formulation,
    /// Layout of a state.
    pub layout: StateLayout,
    /// Dtype of the pools.
    pub state: DType,
    /// K. V is [`value_dim`] of K.
    pub dim: usize,
}

impl Family {
    /// The recurrent family, for any number of tokens, one by one.
    #[must_use]
    pub const fn new(operator: Operator, layout: StateLayout, state: DType, dim: usize) -> Self {
        Self {
            operator,
            decode: false,
            layer: false,
            formulation: Formulation::Recurrent,
            layout,
            state,
            dim,
        }
    }

    /// The decodes of GDN: problems with one token of the recurrent family.
    #[must_use]
    pub const fn decode(layout: StateLayout, state: DType, dim: usize) -> Self {
        Self {
            decode: true,
            ..Self::new(Operator::Gdn, layout, state, dim)
        }
    }

    /// The layer family for one token. Layers of several tokens have `decode` unset.
    #[must_use]
    pub const fn layer(operator: Operator, layout: StateLayout, state: DType, dim: usize) -> Self {
        Self {
            decode: true,
            layer: true,
            ..Self::new(operator, layout, state, dim)
        }
    }

    /// The families of prefills, with and without a convolution and a norm. All other lists of families leave them out.
    #[must_use]
    pub fn prefills() -> Vec<Self> {
        let mut families = Vec::new();
        for family in Entry::ALL.iter().flat_map(|entry| Self::all_of(*entry)) {
            if family.is_chunked() && !families.contains(&family) {
                families.push(family);
            }
        }
        families
    }

    /// All families except prefills, in the order of the entries.
    #[must_use]
    pub fn all() -> Vec<Self> {
        Self::which(|_| true)
    }

    /// One family of each kernel, for tests that do not depend on the conversion of states: f16 and bf16 share kernels.
    #[must_use]
    pub fn of_kernels() -> Vec<Self> {
        Self::which(|family| family.state != DType::F16)
    }

    /// One family of each operator, kind of kernel, formulation and layout, with the smallest states. Every other one has f32
    /// states if there are any. For tests that do not depend on the size and the dtype of a state.
    #[must_use]
    pub fn of_each_kind() -> Vec<Self> {
        let kind = |of: &Self| (of.operator, of.decode, of.layer, of.formulation, of.layout);
        let all = Self::all();
        let mut kinds: Vec<Self> = Vec::new();
        for family in &all {
            if !kinds.iter().any(|known| kind(known) == kind(family)) {
                let state = [DType::Bf16, DType::F32][kinds.len() % 2];
                let same = |of: &&Self| kind(of) == kind(family);
                let wanted = all.iter().filter(same).find(|of| of.state == state);
                kinds.push(*wanted.unwrap_or(family));
            }
        }
        kinds
    }

    /// The families without a convolution and a norm.
    #[must_use]
    pub fn alone() -> Vec<Self> {
        Self::which(|family| !family.layer)
    }

    /// The families that take several tokens.
    #[must_use]
    pub fn several() -> Vec<Self> {
        Self::which(|family| !family.decode)
    }

    /// The families that `wanted` accepts. Prefills have their own tests.
    pub fn which(wanted: impl Fn(Self) -> bool) -> Vec<Self> {
        let mut families = Vec::new();
        for family in Entry::ALL.iter().flat_map(|entry| Self::all_of(*entry)) {
            if !family.is_chunked() && wanted(family) && !families.contains(&family) {
                families.push(family);
            }
        }
        families
    }

    /// Whether a kernel has room for one token of `ratio` value heads of a query/key head.
    #[must_use]
    pub fn takes_ratio(self, ratio: usize) -> bool {
        let mut entries = Entry::ALL.iter();
        entries.any(|entry| {
            Self::all_of(*entry).contains(&self) && takes(*entry, self.operator, 1, ratio as u32)
        })
    }

    /// Whether tokens are computed one by one, so that there is a state after each token.
    #[must_use]
    pub fn is_recurrent(self) -> bool {
        self.formulation == Formulation::Recurrent
    }

    /// Whether the family is a prefill.
    #[must_use]
    pub fn is_chunked(self) -> bool {
        self.formulation == Formulation::Chunked
    }

    /// All families of an entry: one for each operator and dtype of states that it takes. A 16-bit entry has two dtypes, since the
    /// dtype is a load-time constant. Empty for entries that have no operator or no states, for the intra-chunk pass and other
    /// parts of a prefill, and for deferred write-back, whose problems are in [`crate::deferred`].
    #[must_use]
    pub fn all_of(entry: Entry) -> Vec<Self> {
        let Some(computes) = entry.computes() else {
            return Vec::new();
        };
        let family = computes.family;
        if family.is_deferred() || family.takes_singles() {
            return Vec::new();
        }
        let of = |states: launch::States, per_channel, decode| Self {
            operator: match per_channel {
                true => Operator::Kda,
                false => Operator::Gdn,
            },
            decode,
            layer: family.layer,
            formulation: match (family.is_chunked(), family.is_parallel()) {
                (true, _) => Formulation::Chunked,
                (_, true) => Formulation::Parallel,
                _ => Formulation::Recurrent,
            },
            layout: match states.layout {
                launch::Layout::KLast => StateLayout::KLast,
                launch::Layout::VLast => StateLayout::VLast,
            },
            state: match states.element {
                Element::F32 => DType::F32,
                Element::Bf16 => DType::Bf16,
                Element::F16 => DType::F16,
            },
            dim: computes.k as usize,
        };
        let with_f16 = |family: Self| {
            let of_f16 = Self {
                state: DType::F16,
                ..family
            };
            let of_f16 = (family.state == DType::Bf16).then_some(of_f16);
            [Some(family), of_f16].into_iter().flatten()
        };
        // The recurrent kernels have separate code for one token.
        let decodes: &[bool] = match (family == launch::Family::RECURRENT, family.max_tokens()) {
            (true, _) => &[false, true],
            (false, 1) => &[true],
            (false, _) => &[false],
        };
        let operators = computes.all_operators();
        let families = operators.flat_map(|of_channels| {
            computes.all_states().flat_map(move |states| {
                decodes
                    .iter()
                    .map(move |&decode| of(states, of_channels, decode))
            })
        });
        families.flat_map(with_f16).collect()
    }

    /// The first family of an entry, if it has one.
    #[must_use]
    pub fn of(entry: Entry) -> Option<Self> {
        Self::all_of(entry).into_iter().next()
    }

    /// Most new or previous tokens of a row in a problem of the family.
    #[must_use]
    pub fn max_tokens(self) -> usize {
        match (self.decode, self.formulation) {
            (true, _) => 1,
            (_, Formulation::Parallel) if self.layer => SET,
            (_, Formulation::Parallel | Formulation::Recurrent) => MAX_TOKENS,
            // Prefills take any number. The simulator has time for 200.
            _ => 200,
        }
    }
}

/// Most tokens of a set of the parallel formulation.
pub const SET: usize = 8;

/// Whether a block of `entry` has room for `tokens` tokens of `heads` value heads.
fn takes(entry: Entry, operator: Operator, tokens: u32, heads: u32) -> bool {
    let shared = entry.shared(operator == Operator::Kda);
    heads <= entry.max_ratio() && shared.bytes(tokens, heads) <= 101_376
}

/// Size of q and k.
#[derive(Clone, Copy, Debug)]
pub enum Magnitude {
    /// Elements around 1. Vectors of unit norm if the kernel does not normalise.
    Usual,
    /// Vectors whose Σk² is around 1e-6, the epsilon of the l2norm.
    Tiny,
    /// A hundred times the usual size.
    Large,
    /// All elements of some heads are zero.
    Zeros,
    /// Some heads have elements from 1e18 to 1e38, whose sum of squares overflows f32. Some have elements of 1e-20.
    Extreme,
}

/// The optional parameters of KDA's gates that a problem has.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// Whether there is an A_log.
    pub a_log: bool,
    /// Whether there is a dt_bias.
    pub dt_bias: bool,
    /// Whether the parameters have H rows rather than HV.
    pub of_h: bool,
}

/// The convolution of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ConvChoice {
    /// W, the number of taps.
    pub taps: usize,
    /// Whether there is a bias.
    pub bias: bool,
    /// Activation of the sums.
    pub activation: Activation,
    /// Whether there are separate written windows, if states are written.
    pub apart: bool,
    /// Steps beyond T in the snapshots of windows. `None` without them; they exist only next to snapshots of states.
    pub window_snapshots: Option<usize>,
}

/// Switches of a prefill.
#[derive(Clone, Copy, Debug)]
pub struct PrefillChoice {
    /// Whether some rows continue a sequence, at a position above 0.
    pub positions: bool,
    /// Interval of checkpoints in units of 64 tokens, and C, the slots of a row for checkpoints. `None` without checkpoints.
    pub checkpoints: Option<[usize; 2]>,
    /// Whether the caller gives no bound on the lengths of packed rows, even if all are short.
    pub unpromised: bool,
    /// Whether most packed rows have one token.
    pub singles: bool,
}

impl PrefillChoice {
    /// All rows start at position 0, without checkpoints.
    pub const NONE: Self = Self {
        positions: false,
        checkpoints: None,
        unpromised: false,
        singles: false,
    };
}

/// The norm of a layer.
#[derive(Clone, Copy, Debug)]
pub struct NormChoice {
    /// Epsilon, added to the mean of o².
    pub eps: f32,
    /// Activation of z, the gate of the norm.
    pub activation: Activation,
}

/// Sizes, switches and form of a random problem.
#[derive(Clone, Debug)]
pub struct Spec {
    /// B.
    pub batch: usize,
    /// T, 0 for a commit.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// The ratio HV / H.
    pub ratio: usize,
    /// K. V is [`value_dim`] of K.
    pub dim: usize,
    /// Kind of gates, which determines the operator.
    pub gates: GateKind,
    /// Parameters of KDA's gates.
    pub parameters: Parameters,
    /// Size of q and k.
    pub magnitude: Magnitude,
    /// Whether v of each token and the state of each slot have a random size in each value head, from 2⁻¹⁰⁰ to 2¹⁰⁰ (1e-30 to
    /// 1e30). If v, o or the state is f16, from 2⁻⁶ to 2⁶.
    pub spread: bool,
    /// Whether gates are at the ends of their range.
    pub extreme_gates: bool,
    /// Kinds of slot indices.
    pub slots: SlotChoice,
    /// Steps beyond T in the snapshots. `None` without snapshots.
    pub snapshots: Option<usize>,
    /// Whether rows are packed, with lengths up to T.
    pub packed: bool,
    /// T'. `None` without previous tokens.
    pub previous: Option<usize>,
    /// Convolution of q, k and v. `None` if q, k and v are given.
    pub conv: Option<ConvChoice>,
    /// Norm of o. `None` for a plain o.
    pub norm: Option<NormChoice>,
    /// Whether some rows are fresh and start from zeros.
    pub fresh: bool,
    /// Switches of a prefill.
    pub prefill: PrefillChoice,
    /// Whether states are written.
    pub update_state: bool,
    /// Options of the layer.
    pub options: Options,
    /// Placement in memory.
    pub form: Form,
    /// Seed of the values.
    pub seed: u64,
}

impl Spec {
    /// An ordinary problem: two rows of three tokens (one for a decode), gates computed in the kernel, dense, bf16 except for the
    /// state.
    #[must_use]
    pub fn plain(family: Family) -> Self {
        Self {
            batch: 2,
            tokens: family.max_tokens().min(3),
            heads: 2,
            ratio: 2,
            dim: family.dim,
            gates: match family.operator {
                Operator::Kda => GateKind::Kda(DecayKind::Softplus, KdaBeta::Logit),
                Operator::Gdn => GateKind::Raw(BetaScale::One),
            },
            parameters: Parameters {
                a_log: true,
                dt_bias: true,
                of_h: false,
            },
            magnitude: Magnitude::Usual,
            spread: false,
            extreme_gates: false,
            slots: SlotChoice::NONE,
            snapshots: None,
            packed: false,
            previous: None,
            conv: family.layer.then_some(ConvChoice {
                taps: 4,
                bias: false,
                activation: Activation::Silu,
                apart: false,
                window_snapshots: Some(0),
            }),
            norm: family.layer.then_some(NormChoice {
                eps: 1e-6,
                activation: Activation::Silu,
            }),
            fresh: false,
            prefill: PrefillChoice::NONE,
            update_state: true,
            options: Options::default()
                .state_layout(family.layout)
                .formulation(family.formulation),
            form: Form {
                state: family.state,
                qkvo: [DType::Bf16; 4],
                gates: [DType::Bf16; 2],
                norm: [DType::Bf16; 2],
                ..Form::PLAIN
            },
            seed: 1,
        }
    }

    /// HV.
    #[must_use]
    pub fn value_heads(&self) -> usize {
        self.heads * self.ratio
    }

    /// Whether f32 holds the sum of squares of every normed output. For larger sums a norm scales the part of a head that a warp
    /// holds. This part differs among kernels, and so do the bits of the result.
    #[must_use]
    pub fn has_finite_squares(&self) -> bool {
        !self.spread || self.norm.is_none()
    }

    /// Whether the bits of a row depend on how many tokens any row may have: 16-bit K-last states have other kernels for more than 8
    /// tokens together.
    #[must_use]
    pub fn has_bits_of_bound(&self) -> bool {
        let are_together = self.options.formulation == Formulation::Parallel;
        let is_k_last = self.options.state_layout == StateLayout::KLast;
        let is_alone = self.conv.is_none() && self.norm.is_none();
        are_together && is_k_last && is_alone && self.form.state != DType::F32
    }

    /// Whether `entry` takes the problem's states with more than 8 tokens alone.
    fn needs_sets(&self, entry: Entry) -> bool {
        self.has_bits_of_bound() && entry.computes().is_some_and(|it| it.takes_sets())
    }

    /// Raises the number of new or previous tokens of a small problem to the least that `entry` takes.
    pub fn grow_to(&mut self, entry: Entry) {
        let least = if self.needs_sets(entry) { SET + 1 } else { 0 };
        match self.tokens {
            0 => self.previous = self.previous.map(|previous| previous.max(least)),
            _ => self.tokens = self.tokens.max(least),
        }
    }

    /// Removes tokens until a kernel has room for the tokens of all value heads of a query/key head.
    pub fn fit(&mut self) {
        while self.conv.is_some() || self.norm.is_some() {
            let previous = self.previous.unwrap_or(0);
            if self.tokens.max(previous) <= 1 || self.has_room() {
                break;
            }
            match self.tokens < previous {
                true => self.previous = Some(previous - 1),
                false => self.tokens -= 1,
            }
        }
        // The kernels with snapshots may lack room for problems that the kernels of a single token take.
        if (self.conv.is_some() || self.norm.is_some()) && !self.has_room() {
            self.snapshots = None;
            if let Some(conv) = &mut self.conv {
                conv.window_snapshots = None;
            }
        }
    }

    /// Makes the problem one that `entry`, an entry of its family, takes: without previous tokens, and with no more tokens and value
    /// heads than a block has room for. In a prefill, dense rows of more than 64 tokens are for an inter-chunk scan, shorter rows for
    /// the entries of short rows.
    ///
    /// # Panics
    /// If the entry belongs to no family.
    pub fn fit_to(&mut self, entry: Entry) {
        let family = entry.computes().expect("an entry of a family").family;
        let previous = self.previous.take().unwrap_or(0);
        self.tokens = self.tokens.max(previous);
        if family.is_chunked() {
            let is_long = family.is_chain();
            self.tokens = (self.tokens - 1) % 64 + 1 + if is_long { 64 } else { 0 };
            self.packed &= !is_long;
            self.prefill.unpromised = false;
            // On Hopper rows in splits, even short ones, use the scan of 64 rows of a state.
            let takes_splits = is_long && !(entry.takes_warpgroups() && entry.tiles() == 1);
            self.options.split = self.options.split.filter(|_| takes_splits);
            return;
        }
        // A single token is a decode, which has separate entries. 16-bit K-last states with up to 8 tokens together have separate
        // entries too.
        let least = match self.needs_sets(entry) {
            true => SET + 1,
            false => family.max_tokens().min(2) as usize,
        };
        let most = entry.computes().map_or(0, |it| it.max_tokens() as usize);
        self.tokens = self.tokens.clamp(least, most);
        let has_room = |spec: &Self| {
            let (tokens, heads) = (spec.tokens as u32, spec.ratio as u32);
            takes(entry, spec.gates.operator(), tokens, heads)
        };
        while !has_room(self) && (self.tokens > least || self.ratio > 1) {
            match self.tokens > least {
                true => self.tokens -= 1,
                false => self.ratio -= 1,
            }
        }
    }

    /// Whether a layer kernel for several tokens has room for the problem, or the family has no such kernel. Kernels that compute
    /// all tokens together have room for any problem.
    fn has_room(&self) -> bool {
        if self.options.formulation != Formulation::Recurrent {
            return true;
        }
        let family = Family {
            decode: false,
            ..Family::layer(
                self.gates.operator(),
                self.options.state_layout,
                self.form.state,
                self.dim,
            )
        };
        let tokens = (self.tokens + self.previous.unwrap_or(0)) as u32;
        let heads = self.ratio as u32;
        // KDA with K = 128 is never launched with a tile of 32 rows, a quarter of V: see `tiles.txt`.
        let is_given = |entry: &&Entry| {
            let of_kda = family.operator == Operator::Kda && family.dim == 128;
            !of_kda || entry.tiles() < 4
        };
        let mut entries = (Entry::ALL.iter())
            .filter(|entry| Family::all_of(**entry).contains(&family))
            .filter(is_given)
            .peekable();
        entries.peek().is_none()
            || entries.any(|entry| takes(*entry, family.operator, tokens, heads))
    }

    /// The problem in memory.
    #[must_use]
    pub fn case(&self) -> Case {
        self.problem().case(&self.form)
    }

    /// The values of the problem. Elements that no active row reads are NaN.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let mut rng = SmallRng::seed_from_u64(self.seed);
        let (pool_slots, write_pool_slots) = self.pool_slots();
        let (packed, rows) = if self.packed {
            let (bounds, total) = self.draw_lengths(&mut rng);
            let packed = Packed {
                cu_seqlens: Array::indices(bounds),
                max_tokens: match self.prefill.unpromised {
                    true => usize::MAX,
                    false => self.tokens,
                },
            };
            (Some(packed), [1, total])
        } else {
            (None, [self.batch, self.tokens])
        };
        let fresh = self.fresh.then(|| self.draw_fresh(&mut rng));
        let slots = self.draw_slots(fresh.as_deref(), &mut rng);
        let (positions, checkpoints) = self.draw_prefill(&mut rng);
        let (hv, dim) = (self.value_heads(), value_dim(self.dim));
        let o = Array::unread(&[rows[0], rows[1], hv, dim]);
        let is_commit = self.tokens == 0;
        let (new, convolved) = match self.conv {
            _ if is_commit => (None, None),
            Some(conv) => (None, Some(self.draw_convolved(conv, rows, &mut rng))),
            None => {
                let q = self.draw_qk(rows, &mut rng);
                let tokens = self.draw_tokens(rows, &mut rng);
                (Some(New { q, tokens, o }), None)
            }
        };
        let norm = self.norm.filter(|_| !is_commit).map(|norm| GatedNorm {
            z: Array::new(&[rows[0], rows[1], hv, dim], || unit(&mut rng).into()),
            weight: Array::new(&[dim], || unit(&mut rng).into()),
            eps: norm.eps,
            activation: norm.activation,
        });
        let (mut previous, mut previous_x) = (None, None);
        if let Some(most) = self.previous {
            let keep = Array::indices(self.draw_keep(most, &mut rng));
            match self.conv {
                Some(conv) => previous_x = Some(self.draw_previous_x(conv, most, keep, &mut rng)),
                None => {
                    let tokens = self.draw_tokens([self.batch, most], &mut rng);
                    previous = Some(Kept { tokens, keep });
                }
            }
        }
        let (a_log, dt_bias) = self.draw_parameters(&mut rng);
        let mut pool = Array::new(&[pool_slots, hv, dim, self.dim], || unit(&mut rng).into());
        self.spread_out(&mut pool, dim * self.dim, &mut rng);
        let states = |slots: &[usize]| [slots, &[hv, dim, self.dim]].concat();
        let indices = |slots: Option<Vec<i64>>| slots.map(Array::indices);
        let mut problem = Problem {
            gates: self.gates,
            a_log,
            dt_bias,
            new,
            previous,
            previous_x,
            pool,
            write_pool: write_pool_slots.map(|slots| Array::unread(&states(&[slots]))),
            read_slots: indices(slots.read),
            write_slots: indices(slots.write),
            token_slots: indices(slots.of_tokens)
                .map(|slots| slots.reshape(&[self.batch, self.tokens])),
            accepted: indices(slots.accepted),
            snapshots: self
                .snapshots
                .map(|more| Array::unread(&states(&[self.batch, self.tokens + more]))),
            packed,
            convolved,
            norm,
            fresh: indices(fresh),
            positions: indices(positions),
            checkpoints,
            // The placement in memory adds a workspace of the needed size.
            workspace: None,
            pending: None,
            update_state: self.update_state,
            options: self.options,
        };
        forget_the_unread(&mut problem);
        problem
    }

    /// P of the pool and of the write pool. The last slots of the written pool are for checkpoints.
    pub(crate) fn pool_slots(&self) -> (usize, Option<usize>) {
        let (slots, written) = self.own_slots();
        let more = self.checkpoint_slots();
        match written {
            // Slots for checkpoints follow all slots that a row may name.
            Some(written) if more > 0 => (slots, Some(written.max(slots) + more)),
            Some(written) => (slots, Some(written)),
            None => (slots + more, None),
        }
    }

    /// P of the pool and of the write pool without slots for checkpoints.
    pub(crate) fn own_slots(&self) -> (usize, Option<usize>) {
        let slots = self.batch + self.slots.spare;
        (
            slots,
            self.slots
                .write_pool
                .map(|more| slots.saturating_add_signed(more).max(1)),
        )
    }

    /// Number of slots for checkpoints.
    pub(crate) fn checkpoint_slots(&self) -> usize {
        (self.prefill.checkpoints).map_or(0, |[_, of_row]| self.batch * of_row)
    }

    /// Draws positions and checkpoints of a prefill.
    fn draw_prefill(&self, rng: &mut SmallRng) -> (Option<Vec<i64>>, Option<Checkpoints<Array>>) {
        let positions = self.prefill.positions.then(|| {
            let mut draw = || match rng.random_range(0..4) {
                0 => 0,
                1 => 64 * rng.random_range(1..=3),
                2 => 64 * rng.random_range(1..=3) - 1,
                _ => rng.random_range(1..=500),
            };
            (0..self.batch).map(|_| draw()).collect()
        });
        let checkpoints = self.prefill.checkpoints.map(|[chunks, of_row]| {
            let slots = self.draw_checkpoint_slots(self.checkpoint_slots(), rng);
            Checkpoints {
                every: 64 * chunks,
                slots: Array::indices(slots).reshape(&[self.batch, of_row]),
            }
        });
        (positions, checkpoints)
    }

    /// Columns of a slot of windows. With token slots it has the windows before and after each token of the row.
    pub(crate) fn window_columns(&self, taps: usize) -> usize {
        match self.slots.of_tokens {
            Some(_) => taps - 2 + self.tokens,
            None => taps - 1,
        }
    }

    /// Whether there are separate written windows. There must be if the write pool has another size.
    pub(crate) fn apart(&self) -> bool {
        let (slots, write_slots) = self.pool_slots();
        let apart = self.conv.is_some_and(|conv| conv.apart);
        self.update_state && (apart || write_slots.is_some_and(|written| written != slots))
    }

    /// Size of the elements of q and k. In a prefill whose kernel does not normalise, keys are shorter than 1: with β = 2 a longer
    /// key lets the state grow, and cancellation within a chunk grows with it (docs/prefill.md, "What f16 does not hold").
    fn qk_size(&self) -> f32 {
        let size = match self.magnitude {
            Magnitude::Tiny => 1e-3 / (self.dim as f32).sqrt(),
            Magnitude::Large => 100.0,
            _ => 1.0,
        };
        match (self.options.qk_l2norm, self.options.formulation) {
            (true, _) => size,
            (false, Formulation::Chunked) => 0.8 * size / (self.dim as f32).sqrt(),
            (false, _) => size / (self.dim as f32).sqrt(),
        }
    }

    /// Draws x of variance 1, and taps that scale the sums to the sizes of q, k and v.
    fn draw_convolved(
        &self,
        conv: ConvChoice,
        [rows, tokens]: [usize; 2],
        rng: &mut SmallRng,
    ) -> Convolved<Array> {
        let (hv, dim) = (self.value_heads(), value_dim(self.dim));
        let of_qk = 2 * self.heads * self.dim;
        let channels = of_qk + hv * dim;
        let x = Array::new(&[rows, tokens, channels], || unit(rng).into());
        let heads = 0..2 * self.heads + hv;
        let of_head = |head: usize, rng: &mut SmallRng| match self.magnitude {
            _ if head >= 2 * self.heads => self.size_of_values(rng) as f32,
            Magnitude::Zeros if rng.random() => 0.0,
            // The sum of the products of the taps must be finite.
            Magnitude::Extreme => extreme(rng).min(1e37) as f32,
            _ => self.qk_size(),
        };
        let sizes: Vec<f32> = heads.map(|head| of_head(head, rng)).collect();
        let scaled = |i: usize, rng: &mut SmallRng| {
            let head = if i < of_qk {
                i / self.dim
            } else {
                2 * self.heads + (i - of_qk) / dim
            };
            let terms = conv.taps + usize::from(conv.bias);
            let size = sizes[head] / (terms as f32).sqrt();
            f64::from(size * unit(rng))
        };
        let weights = (0..channels * conv.taps).map(|i| scaled(i / conv.taps, rng));
        let weight = Array {
            values: weights.collect(),
            dims: vec![channels, conv.taps],
        };
        let bias = conv.bias.then(|| Array {
            values: (0..channels).map(|i| scaled(i, rng)).collect(),
            dims: vec![channels],
        });
        let (slots, write_slots) = self.pool_slots();
        let window = |slots| [slots, channels, self.window_columns(conv.taps)];
        let Tokens { gate, beta, .. } = self.draw_tokens([rows, tokens], rng);
        Convolved {
            x,
            heads: self.heads,
            gate,
            beta,
            o: Array::unread(&[rows, tokens, hv, dim]),
            weight,
            bias,
            activation: conv.activation,
            windows: Array::new(&window(slots), || unit(rng).into()),
            write_windows: (self.apart())
                .then(|| Array::unread(&window(write_slots.unwrap_or(slots)))),
            window_snapshots: (self.snapshots.and(conv.window_snapshots)).map(|more| {
                let steps = self.tokens + more;
                Array::unread(&[self.batch, steps, channels, conv.taps - 1])
            }),
        }
    }

    /// Draws the inputs of the convolution at previous tokens. A commit has its own x.
    fn draw_previous_x(
        &self,
        conv: ConvChoice,
        most: usize,
        keep: Array,
        rng: &mut SmallRng,
    ) -> KeptX<Array> {
        let convolved = self.draw_convolved(conv, [self.batch, most], rng);
        KeptX {
            x: convolved.x,
            gate: convolved.gate,
            beta: convolved.beta,
            keep,
            conv: (self.tokens == 0).then_some(CommitConvolution {
                heads: convolved.heads,
                weight: convolved.weight,
                bias: convolved.bias,
                activation: convolved.activation,
                windows: convolved.windows,
                write_windows: convolved.write_windows,
            }),
        }
    }

    /// Draws q or k, `[rows, tokens, H, K]`.
    fn draw_qk(&self, [rows, tokens]: [usize; 2], rng: &mut SmallRng) -> Array {
        let size = self.qk_size();
        let dims = [rows, tokens, self.heads, self.dim];
        let mut array = Array::new(&dims, || (size * unit(rng)).into());
        if matches!(self.magnitude, Magnitude::Zeros) {
            let heads = array.values.chunks_mut(self.dim);
            heads
                .filter(|_| rng.random())
                .for_each(|head| head.fill(0.0));
        }
        if matches!(self.magnitude, Magnitude::Extreme) {
            for head in array.values.chunks_mut(self.dim) {
                let size = extreme(rng);
                head.iter_mut().for_each(|x| *x *= size);
            }
        }
        array
    }

    /// A random power of two, so that a multiplication by it is exact.
    fn size_of_values(&self, rng: &mut SmallRng) -> f64 {
        if !self.spread {
            return 1.0;
        }
        let [_, weight, v, o] = self.form.qkvo;
        let of_conv = self.conv.map_or(o, |_| weight);
        let has_f16 = [of_conv, v, o, self.form.state].contains(&DType::F16);
        let most = if has_f16 { 6 } else { 100 };
        2f64.powi(rng.random_range(-most..=most))
    }

    /// Multiplies each `len` elements by a random power of two.
    fn spread_out(&self, array: &mut Array, len: usize, rng: &mut SmallRng) {
        for part in array.values.chunks_mut(len) {
            let size = self.size_of_values(rng);
            part.iter_mut().for_each(|x| *x *= size);
        }
    }

    fn draw_tokens(&self, [rows, tokens]: [usize; 2], rng: &mut SmallRng) -> Tokens<Array> {
        let hv = self.value_heads();
        let k = self.draw_qk([rows, tokens], rng);
        let mut v = Array::new(&[rows, tokens, hv, value_dim(self.dim)], || {
            unit(rng).into()
        });
        self.spread_out(&mut v, value_dim(self.dim), rng);
        let (per_head, per_channel) = ([rows, tokens, hv], [rows, tokens, hv, self.dim]);
        let raw = ([-4.0, 4.0], &[1e4, -1e4][..]);
        let log_decay = ([-3.0, 0.0], &[0.0, -1e4][..]);
        let beta = ([0.0, 2.0], &[0.0, 1.0, 2.0][..]);
        let (gate_dims, gate, beta) = match self.gates {
            GateKind::Given => (&per_head[..], log_decay, beta),
            GateKind::Raw(_) => (&per_head[..], raw, raw),
            GateKind::Kda(decay, kind) => (
                &per_channel[..],
                if decay == DecayKind::Log {
                    log_decay
                } else {
                    raw
                },
                if kind == KdaBeta::Given { beta } else { raw },
            ),
        };
        Tokens {
            k,
            v,
            gate: self.draw_gate(gate_dims, gate, rng),
            beta: self.draw_gate(&per_head, beta, rng),
        }
    }

    fn draw_gate(
        &self,
        dims: &[usize],
        (usual, ends): ([f32; 2], &[f32]),
        rng: &mut SmallRng,
    ) -> Array {
        let mut draw = || match rng.random_range(0..4) {
            0 => rng.random_range(usual[0]..usual[1]),
            _ if !self.extreme_gates => rng.random_range(usual[0]..usual[1]),
            _ => ends[rng.random_range(0..ends.len())],
        };
        Array::new(dims, || draw().into())
    }

    /// Draws A_log and dt_bias.
    fn draw_parameters(&self, rng: &mut SmallRng) -> (Option<Array>, Option<Array>) {
        let Parameters {
            a_log,
            dt_bias,
            of_h,
        } = self.parameters;
        let heads = if of_h { self.heads } else { self.value_heads() };
        let (a_log, dt_bias) = match self.gates {
            GateKind::Given | GateKind::Kda(DecayKind::Log, _) => (None, None),
            GateKind::Raw(_) => (
                Some(vec![self.value_heads()]),
                Some(vec![self.value_heads()]),
            ),
            GateKind::Kda(decay, _) => (
                (a_log || decay == DecayKind::Softplus).then(|| vec![heads]),
                dt_bias.then(|| vec![heads, self.dim]),
            ),
        };
        let mut draw = |dims: Option<Vec<usize>>, usual, ends: &[f32]| {
            dims.map(|dims| self.draw_gate(&dims, (usual, ends), rng))
        };
        (
            draw(a_log, [0.0, 16f32.ln()], &[100.0, -100.0]),
            draw(dt_bias, [-2.0, 1.0], &[0.0]),
        )
    }
}

/// Fills the elements that no active row reads with NaN.
fn forget_the_unread(problem: &mut Problem) {
    let mut slots = vec![false; problem.pool.dims[0]];
    let (mut tokens, mut kept, mut windows) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows::of_problem(problem) {
        let commit = row.live.as_ref().and_then(|live| live.commit);
        kept.push(commit.map_or(0, |(keep, _)| keep));
        if let (Some(own), Some(live)) = (row.tokens, row.live) {
            tokens.extend(own);
            live.start.into_iter().for_each(|start| slots[start] = true);
            windows.extend(live.window.and_then(|window| window.start));
        }
    }
    if let Some(New { q, tokens: new, .. }) = &mut problem.new {
        for i in (0..q.dims[0] * q.dims[1]).filter(|i| !tokens.contains(i)) {
            for array in of_tokens(new).into_iter().chain([&mut *q]) {
                array.entry_mut(2, i).fill(f64::NAN);
            }
        }
    }
    let unread = |array: &Array| {
        let all = 0..array.dims[0] * array.dims[1];
        all.filter(|i| !tokens.contains(i)).collect::<Vec<_>>()
    };
    if let Some(Convolved { x, gate, beta, .. }) = &mut problem.convolved {
        for array in [x, gate, beta] {
            let unread = unread(array).into_iter();
            unread.for_each(|i| array.entry_mut(2, i).fill(f64::NAN));
        }
    }
    if let Some(GatedNorm { z, .. }) = &mut problem.norm {
        let unread = unread(z).into_iter();
        unread.for_each(|i| z.entry_mut(2, i).fill(f64::NAN));
    }
    for i in (0..slots.len()).filter(|&i| !slots[i]) {
        problem.pool.entry_mut(1, i).fill(f64::NAN);
    }
    let before = conv(problem).map_or(0, |conv| conv.weight.dims[1] - 1);
    if let Some((of_pool, _)) = windows_mut(problem) {
        let [_, channels, columns] = of_pool.dims[..] else {
            panic!("windows have three dims")
        };
        let nothing = Array::unread(&of_pool.dims).filled(f64::NAN);
        let all = std::mem::replace(of_pool, nothing);
        for [slot, column] in windows {
            for channel in slot * channels..(slot + 1) * channels {
                let read = channel * columns + column..channel * columns + column + before;
                of_pool.values[read.clone()].copy_from_slice(&all.values[read]);
            }
        }
    }
    let of_previous = match (&mut problem.previous, &mut problem.previous_x) {
        (Some(Kept { tokens, .. }), _) => Vec::from(of_tokens(tokens)),
        (_, Some(KeptX { x, gate, beta, .. })) => vec![x, gate, beta],
        _ => Vec::new(),
    };
    for array in of_previous {
        let most = array.dims[1];
        for i in (0..kept.len() * most).filter(|i| i % most >= kept[i / most]) {
            array.entry_mut(2, i).fill(f64::NAN);
        }
    }
}

/// A random number of mean 0 and variance 1.
fn unit(rng: &mut SmallRng) -> f32 {
    (2.0 * rng.random::<f32>() - 1.0) * 3f32.sqrt()
}

/// A random size for [`Magnitude::Extreme`].
fn extreme(rng: &mut SmallRng) -> f64 {
    match rng.random_range(0..4) {
        0 => 1.0,
        1 => 1e-20,
        2 => 10f64.powf(rng.random_range(18.0..38.0)),
        _ => 1e38,
    }
}
