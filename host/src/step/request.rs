//! What a step and a commit of either operator come down to.

use gated_delta_kernels::step::{LayerParams, StepParams};

use super::gates::{GateParts, Gates};
use super::problem::Problem;
use super::select::{Gpu, MEASURED_ON};
use super::work::sealed;
use super::{
    Activation, Checkpoints, Commit, Convolution, Inputs, Norm, Options, Pending, States, Step,
    Stored, Update,
};
use crate::Entry;
use crate::error::Error;
use crate::library::{Sort, TENSORS, unproved};
use crate::raw::Recipe;
use crate::recall::{SWITCHES, Switches};
use crate::shapes::{Named, check_memory, named, optional};
use crate::tensor::{Memory, Tensor};

/// Tokens that are read from the state.
#[derive(Clone, Copy)]
pub(super) struct New<'a> {
    pub inputs: &'a Inputs<'a>,
    /// `a` or `g`, and `b` or `beta`.
    pub gates: [Named<'a>; 2],
    pub o: Named<'a>,
}

/// Tokens of which the first ones are committed.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    pub inputs: KeptInputs<'a>,
    /// As the new tokens'.
    pub gates: [Named<'a>; 2],
    pub keep: Named<'a>,
}

/// What k and v of such tokens are, or are made of.
#[derive(Clone, Copy)]
pub(super) enum KeptInputs<'a> {
    Kv([Named<'a>; 2]),
    /// The x of the new tokens' convolution.
    X(Named<'a>),
    /// Of a commit, with its x.
    Conv(&'a Convolution<'a>),
}

impl<'a> KeptInputs<'a> {
    /// `names` are those of k, v and x.
    fn of(stored: &'a Stored<'a>, [k_name, v_name, x_name]: [&'static str; 3]) -> Self {
        match stored {
            Stored::Kv { k, v } => Self::Kv([named(k_name, k), named(v_name, v)]),
            Stored::X { x } => Self::X(named(x_name, x)),
            Stored::Conv(conv) => Self::Conv(conv),
        }
    }

    /// k and v, where they are given.
    pub fn kv(&self) -> [Option<Named<'a>>; 2] {
        match self {
            Self::Kv(kv) => kv.map(Some),
            Self::X(_) | Self::Conv(_) => [None; 2],
        }
    }

    /// The tensor that comes first.
    pub fn first(&self) -> Named<'a> {
        match self {
            Self::Kv([first, _]) | Self::X(first) => *first,
            Self::Conv(conv) => conv.named_x(),
        }
    }

    /// What is convolved.
    fn x(&self) -> Option<Named<'a>> {
        match self {
            Self::Kv(_) => None,
            Self::X(_) | Self::Conv(_) => Some(self.first()),
        }
    }
}

/// New tokens, previous ones or both, and where their states are.
pub struct Request<'a> {
    pub(super) new: Option<New<'a>>,
    pub(super) previous: Option<Kept<'a>>,
    pub(super) gates: GateParts<'a>,
    pub(crate) pool: Named<'a>,
    pub(super) write_pool: Option<Named<'a>>,
    pub(crate) read_slots: Option<Named<'a>>,
    pub(crate) write_slots: Option<Named<'a>>,
    pub(crate) token_slots: Option<Named<'a>>,
    pub(crate) accepted: Option<Named<'a>>,
    pub(crate) snapshots: Option<Named<'a>>,
    pub(crate) cu_seqlens: Option<Named<'a>>,
    pub(super) norm: Option<&'a Norm<'a>>,
    pub(crate) fresh: Option<Named<'a>>,
    pub(crate) positions: Option<Named<'a>>,
    pub(crate) checkpoints: Option<&'a Checkpoints<'a>>,
    pub(crate) pending: Option<&'a Pending<'a>>,
    /// Those of a flush: of tokens they are the convolution's.
    pub(super) windows: Option<Named<'a>>,
    pub(crate) workspace: Option<Named<'a>>,
    /// T where there are `cu_seqlens`.
    pub(crate) max_tokens: usize,
    /// Whether the states are [`States::ReadOnly`].
    pub(super) read_only: bool,
    pub(crate) options: &'a Options,
}

impl<'a> Inputs<'a> {
    /// Query, key and value, or what they are made of.
    pub(super) fn named(&'a self) -> [Named<'a>; 3] {
        match self {
            Self::Qkv { q, k, v } => [named("q", q), named("k", k), named("v", v)],
            Self::Conv(conv) => conv.named(),
        }
    }
}

impl<G: Gates> sealed::Work for Step<'_, G> {
    fn request(&self) -> Request<'_> {
        let gates = self.gates.parts();
        Request {
            new: Some(New {
                inputs: &self.inputs,
                gates: [gates.gate, gates.beta],
                o: named("o", &self.o),
            }),
            previous: self.previous.as_ref().map(|previous| {
                let names = ["previous k", "previous v", "previous x"];
                let [gate, beta] = gates.previous_names;
                Kept {
                    inputs: KeptInputs::of(&previous.stored, names),
                    gates: [named(gate, &previous.gate), named(beta, &previous.beta)],
                    keep: named("keep", &previous.keep),
                }
            }),
            norm: self.norm.as_ref(),
            fresh: optional("fresh", &self.fresh),
            positions: optional("positions", &self.positions),
            checkpoints: self.checkpoints.as_ref(),
            pending: self.pending.as_ref(),
            workspace: optional("workspace", &self.workspace),
            snapshots: optional("snapshots", &self.snapshots),
            cu_seqlens: (self.packed.as_ref())
                .map(|packed| named("cu_seqlens", &packed.cu_seqlens)),
            max_tokens: self.packed.as_ref().map_or(0, |packed| packed.max_tokens),
            ..match &self.states {
                States::Update(states) => Request::update(states, gates, &self.options),
                States::ReadOnly(states) => Request {
                    read_slots: optional("read_slots", &states.read_slots),
                    read_only: true,
                    ..Request::of_pool(&states.pool, gates, &self.options)
                },
                States::PerToken(states) => Request {
                    write_pool: optional("write_pool", &states.write_pool),
                    token_slots: Some(named("token_slots", &states.token_slots)),
                    accepted: optional("accepted", &states.accepted),
                    ..Request::of_pool(&states.pool, gates, &self.options)
                },
            }
        }
    }
}

impl<G: Gates> sealed::Work for Commit<'_, G> {
    fn request(&self) -> Request<'_> {
        let gates = self.gates.parts();
        Request {
            previous: Some(Kept {
                inputs: KeptInputs::of(&self.stored, ["k", "v", "x"]),
                gates: [gates.gate, gates.beta],
                keep: named("keep", &self.keep),
            }),
            fresh: optional("fresh", &self.fresh),
            ..Request::update(&self.states, gates, &self.options)
        }
    }
}

impl<'a> Request<'a> {
    /// Of no tokens.
    fn of_pool(pool: &'a Tensor<'a>, gates: GateParts<'a>, options: &'a Options) -> Self {
        Self {
            new: None,
            previous: None,
            gates,
            pool: named("pool", pool),
            write_pool: None,
            read_slots: None,
            write_slots: None,
            token_slots: None,
            accepted: None,
            snapshots: None,
            cu_seqlens: None,
            norm: None,
            fresh: None,
            positions: None,
            checkpoints: None,
            pending: None,
            windows: None,
            workspace: None,
            max_tokens: 0,
            read_only: false,
            options,
        }
    }

    /// The same with its states.
    pub(super) fn update(
        states: &'a Update<'a>,
        gates: GateParts<'a>,
        options: &'a Options,
    ) -> Self {
        Self {
            write_pool: optional("write_pool", &states.write_pool),
            read_slots: optional("read_slots", &states.read_slots),
            write_slots: optional("write_slots", &states.write_slots),
            ..Self::of_pool(&states.pool, gates, options)
        }
    }

    /// B; parameters have it before the check has seen any rank.
    pub(crate) fn batch(&self) -> u32 {
        let first = |named: Named<'_>| named.tensor.dims().first().copied().unwrap_or(0);
        let rows = match (self.cu_seqlens, self.new, self.previous) {
            (Some(cu_seqlens), ..) => first(cu_seqlens).saturating_sub(1),
            (None, Some(new), _) => first(new.o),
            (None, None, Some(previous)) => first(previous.inputs.first()),
            (None, None, None) => self.pending.map_or(0, |pending| first(pending.named_len())),
        };
        rows as u32
    }

    /// Tokens of the `[1, total, …]` tensors, where there are `cu_seqlens`.
    pub(crate) fn total(&self) -> Option<usize> {
        let o = self.new?.o.tensor;
        self.cu_seqlens.and(o.dims().get(1).copied())
    }

    /// What makes q, k and v, where they are not given: of the new tokens, or of a commit.
    pub(crate) fn conv(&self) -> Option<&'a Convolution<'a>> {
        match (self.new, self.previous) {
            (Some(new), _) => match new.inputs {
                Inputs::Conv(conv) => Some(conv),
                Inputs::Qkv { .. } => None,
            },
            (None, Some(previous)) => match previous.inputs {
                KeptInputs::Conv(conv) => Some(conv),
                KeptInputs::Kv(_) | KeptInputs::X(_) => None,
            },
            (None, None) => None,
        }
    }

    /// Whether nothing but a commit is asked for.
    pub(super) fn is_commit(&self) -> bool {
        self.new.is_none()
    }

    /// The pool that is written.
    pub(crate) fn written_pool(&self) -> Named<'a> {
        self.write_pool.unwrap_or(self.pool)
    }

    /// The windows of the convolution, and those that are written where states are.
    pub(crate) fn windows(&self) -> Option<[Named<'a>; 2]> {
        match self.conv() {
            Some(conv) => Some([conv.named_windows(), conv.written_windows()]),
            None => self.windows.map(|windows| [windows; 2]),
        }
    }

    /// The windows after every token.
    pub(crate) fn window_snapshots(&self) -> Option<Named<'a>> {
        self.conv().and_then(Convolution::named_window_snapshots)
    }

    /// Of the previous tokens.
    pub(crate) fn keep(&self) -> Option<Named<'a>> {
        self.previous.map(|previous| previous.keep)
    }

    /// All but the tensors that [`Request::check`] and the choice of a variant look at. Floats by their bits: −0 is
    /// another constant than 0.
    pub(super) fn switches(&self, variant: Option<Entry>) -> Switches {
        let (gates, options, conv) = (&self.gates, self.options, self.conv());
        // 0 where there is none.
        let activation = |one: Option<Activation>| one.map_or(0, |one| 1 + u64::from(one.code()));
        let scale = options
            .scale
            .map_or(u64::MAX, |scale| scale.to_bits().into());
        let switches: [u64; SWITCHES] = [
            u64::from(gates.per_channel),
            gates.kind as u64,
            gates.lower_bound.map_or(0, f32::to_bits).into(),
            u64::from(gates.beta_logit) << 32 | u64::from(gates.beta_scale.to_bits()),
            options.state_layout as u64,
            options.head_map as u64,
            u64::from(options.qk_l2norm),
            scale,
            options.null_slot.map_or(u64::MAX, u64::from),
            options.formulation as u64,
            u64::from(self.read_only),
            self.max_tokens as u64,
            self.checkpoint_every() as u64,
            conv.map_or(0, |conv| conv.heads as u64),
            activation(conv.map(|conv| conv.activation)) << 32
                | activation(self.norm.map(|norm| norm.activation)),
            self.norm.map_or(0, |norm| norm.eps.to_bits()).into(),
            self.pending.map_or(0, |pending| pending.most as u64),
            variant.map_or(u64::MAX, |entry| entry as u64),
        ];
        switches
    }

    /// Every tensor under its name, where there is one.
    pub(crate) fn tensors(&self) -> [Option<Named<'a>>; TENSORS] {
        let new = self.new.as_ref();
        let previous = self.previous.as_ref();
        let (conv, norm) = (self.conv(), self.norm);
        let [keys, updates, decays, pending_len, pending_base] = match self.pending {
            Some(pending) => pending.named().map(Some),
            None => [None; 5],
        };
        let ring_of_inputs = self.pending.and_then(Pending::named_inputs);
        // Switches tell q, k and v from what they are made of.
        let inputs = match new {
            Some(new) => Some(new.inputs.named()),
            None => conv.map(Convolution::named),
        };
        let [previous_k, previous_v] = match previous.map(|previous| previous.inputs) {
            Some(KeptInputs::X(x)) => [Some(x), None],
            Some(inputs) => inputs.kv(),
            None => [None; 2],
        };
        [
            inputs.map(|[first, ..]| first),
            inputs.map(|[_, second, _]| second),
            inputs.map(|[.., third]| third).or(self.windows),
            new.map(|new| new.gates[0]),
            new.map(|new| new.gates[1]),
            previous_k,
            previous_v,
            previous.map(|previous| previous.gates[0]),
            previous.map(|previous| previous.gates[1]),
            new.map(|new| new.o),
            previous.map(|previous| previous.keep),
            conv.and_then(Convolution::named_bias),
            conv.and_then(Convolution::named_write_windows),
            norm.map(Norm::named_z),
            norm.map(Norm::named_weight),
            self.fresh,
            self.gates.a_log,
            self.gates.dt_bias,
            Some(self.pool),
            self.write_pool,
            self.read_slots,
            self.write_slots,
            self.token_slots,
            self.accepted,
            self.snapshots,
            self.window_snapshots(),
            self.cu_seqlens,
            self.positions,
            self.checkpoints.map(Checkpoints::named),
            keys,
            updates,
            decays,
            ring_of_inputs,
            pending_len,
            pending_base,
            self.workspace,
        ]
    }

    /// Whether the tensor of this name is written.
    pub(crate) fn writes(&self, problem: &Problem, name: &str) -> bool {
        let writes_slots = problem.writes_final() || self.token_slots.is_some();
        match name {
            "o" | "snapshots" | "window_snapshots" | "workspace" => true,
            "keys" | "updates" | "decays" | "inputs" => !self.is_flush(),
            "pool" | "write_pool" => writes_slots && name == self.written_pool().name,
            "windows" | "write_windows" => {
                let written = self.windows().map(|[_, written]| written);
                writes_slots && written.is_some_and(|written| name == written.name)
            }
            _ => false,
        }
    }

    /// Which of a library's last launches it may be like, as far as that is seen before a check.
    pub(super) fn sort(&self) -> Sort {
        let tokens = self.new.and_then(|new| new.o.tensor.dims().get(1).copied());
        if self.is_chunked() {
            Sort::Prefill
        } else if self.previous.is_none() && self.cu_seqlens.is_none() && tokens == Some(1) {
            Sort::Decode
        } else {
            Sort::Other
        }
    }

    /// See [`Work::recipe`](super::Work::recipe).
    pub(super) fn recipe(&self, gpu: Gpu) -> Result<Recipe, Error> {
        let problem = self.check()?;
        check_memory(Memory::Device, &self.tensors(), |name| {
            self.writes(&problem, name)
        })?;
        let lengths = self.lengths();
        problem.check_workspace(&lengths, self.workspace)?;
        let entry = problem.entry(&lengths, gpu)?;
        // Who launches by itself has no library to take what is not proved.
        if !entry.is_proved() {
            return Err(unproved(entry));
        }
        let launches = problem.launches(entry, &lengths, gpu, true);
        let launches = launches.try_map(|entry| Ok(problem.kernel(entry)))?;
        Ok(Recipe::new(launches, self.parameter()))
    }

    /// The variant that a launch takes.
    pub(crate) fn selected(&self) -> Result<Entry, Error> {
        let problem = self.check()?;
        problem.entry(&self.lengths(), MEASURED_ON)
    }

    /// Bytes that a launch must move where every row is active and full.
    pub(crate) fn bytes(&self) -> Result<u64, Error> {
        const IN_SLOTS: [&str; 11] = [
            "keys",
            "updates",
            "decays",
            "inputs",
            "pool",
            "write_pool",
            "snapshots",
            "windows",
            "write_windows",
            "window_snapshots",
            "workspace",
        ];
        let problem = self.check()?;
        let (rows, tokens) = (u64::from(self.batch()), self.tokens());
        let final_ones = match (problem.writes_final(), self.pending) {
            (true, None) => rows + self.most_checkpoints(),
            (true, Some(_)) if self.is_flush() => rows,
            _ => 0,
        };
        let of_rings = self.pending.map_or(0, |pending| {
            let entries = match self.is_flush() {
                true => rows * pending.most as u64,
                false => tokens,
            };
            entries * pending.entry_bytes()
        });
        let of_each_token = [self.snapshots, self.token_slots];
        let written = final_ones + tokens * of_each_token.into_iter().flatten().count() as u64;
        let others: u64 = self
            .tensors()
            .into_iter()
            .flatten()
            .filter(|named| !IN_SLOTS.contains(&named.name))
            .map(|named| {
                let elements: usize = named.tensor.dims().iter().product();
                (elements * named.tensor.dtype().size_of()) as u64
            })
            .sum();
        let states = (rows + written).saturating_mul(problem.state_bytes());
        let windows = self.windows().map_or(0, |[read, _]| {
            let taps = u64::from(problem.constants.taps);
            let (window, of_each_token) = (taps - 1, self.window_snapshots().is_some());
            // With token slots, a window without its oldest input, and the row's own.
            let in_slots = match (self.token_slots, self.pending) {
                (Some(_), _) => rows * (window - 1) + tokens,
                // They move, whether a state is written or not, but for drafts.
                (None, Some(pending)) if pending.inputs.is_none() => rows * window,
                (None, _) => final_ones * window,
            };
            let inputs = rows * window + in_slots + u64::from(of_each_token) * tokens * window;
            let (channels, element) = (read.tensor.dims()[1], read.tensor.dtype().size_of());
            inputs * (channels * element) as u64
        });
        let around = windows.saturating_add(of_rings);
        Ok(states.saturating_add(around).saturating_add(others))
    }

    /// Addresses and sizes, as a launch takes them.
    pub(crate) fn params(&self) -> LayerParams {
        let address = |named: Option<Named<'_>>| named.map_or(0, |named| named.tensor.address());
        let slots = |named: Named<'_>| named.tensor.dims().first().map_or(0, |&slots| slots as u32);
        let (new, previous) = (self.new, self.previous);
        let (conv, norm) = (self.conv(), self.norm);
        let [q, k, v] = match new.map(|new| new.inputs) {
            Some(Inputs::Qkv { q, k, v }) => [q.address(), k.address(), v.address()],
            _ => [0; 3],
        };
        let kept = previous.map(|previous| previous.inputs);
        let [previous_k, previous_v] = kept.map_or([None; 2], |inputs| inputs.kv());
        let step = StepParams {
            q,
            k,
            v,
            g: address(new.map(|new| new.gates[0])),
            b: address(new.map(|new| new.gates[1])),
            o: address(new.map(|new| new.o)),
            previous_k: address(previous_k),
            previous_v: address(previous_v),
            previous_g: address(previous.map(|previous| previous.gates[0])),
            previous_b: address(previous.map(|previous| previous.gates[1])),
            keep: address(previous.map(|previous| previous.keep)),
            a_log: address(self.gates.a_log),
            dt_bias: address(self.gates.dt_bias),
            read_pool: self.pool.tensor.address(),
            write_pool: self.written_pool().tensor.address(),
            snapshots: address(self.snapshots),
            read_slots: address(self.read_slots),
            write_slots: address(self.write_slots),
            token_slots: address(self.token_slots),
            accepted: address(self.accepted),
            cu_seqlens: address(self.cu_seqlens),
            read_pool_slots: slots(self.pool),
            write_pool_slots: slots(self.written_pool()),
            total_tokens: self.total().unwrap_or(0) as u32,
            reserved: 0,
            fresh: address(self.fresh),
        };
        let [read_windows, write_windows] = match self.windows() {
            Some(windows) => windows.map(Some),
            None => [None; 2],
        };
        LayerParams {
            step,
            // Of a commit, they are previous tokens.
            x: address(new.and(conv).map(Convolution::named_x)),
            conv_weight: conv.map_or(0, |conv| conv.weight.address()),
            conv_bias: address(conv.and_then(Convolution::named_bias)),
            read_windows: address(read_windows),
            write_windows: address(write_windows),
            z: norm.map_or(0, |norm| norm.z.address()),
            norm_weight: norm.map_or(0, |norm| norm.weight.address()),
            read_windows_slots: read_windows.map_or(0, slots),
            write_windows_slots: write_windows.map_or(0, slots),
            previous_x: address(kept.and_then(|inputs| inputs.x())),
            window_snapshots: address(self.window_snapshots()),
        }
    }
}
