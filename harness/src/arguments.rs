//! Arguments of a launch whose kind is known at run time only: read from a file, drawn at random, or from a cell of a table.
//!
//! The library has a type for each kind of launch. [`Arguments`] is one struct of optional tensors for all kinds, and
//! [`Arguments::work`] makes the library's arguments from it, or names the contradiction.

pub use gated_delta::Operator;
use gated_delta::error::excludes;
use gated_delta::step::Update;
use gated_delta::step::pending::Rings;
use gated_delta::{
    Activation, BetaScale, Commit, Convolution, Error, Flush, Gates, GdnGates, Inputs, KdaBeta,
    KdaDecay, KdaGates, Norm, Options, Previous, States, Step, Stored, Tensor, Work,
};

/// Value head dim V of the kernels with key head dim K = `key_dim`.
#[must_use]
pub const fn value_dim(key_dim: usize) -> usize {
    if key_dim == 96 { 192 } else { key_dim }
}

/// Form of the gates, which also decides the operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateKind {
    /// GDN: computed from `a`, `b`, `A_log` and `dt_bias`.
    Raw(BetaScale),
    /// GDN: `g` is the log decay, `beta` is β.
    Given,
    /// KDA.
    Kda(DecayKind, KdaBeta),
}

/// Meaning of KDA's gate tensor `g`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DecayKind {
    /// `g` is the log decay.
    Log,
    /// The log decay is −exp(`A_log`) · softplus(`g` + `dt_bias`); `dt_bias` is optional.
    Softplus,
    /// The log decay is this lower bound · sigmoid(exp(`A_log`) · (`g` + `dt_bias`)); `A_log` and `dt_bias` are optional.
    LowerBound(f32),
}

impl GateKind {
    /// The operator that the gates belong to.
    #[must_use]
    pub const fn operator(self) -> Operator {
        match self {
            Self::Raw(_) | Self::Given => Operator::Gdn,
            Self::Kda(..) => Operator::Kda,
        }
    }

    /// Names of the gate tensors of new tokens in errors of the library.
    #[must_use]
    pub const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Raw(_) => ["a", "b"],
            _ => ["g", "beta"],
        }
    }

    /// Names of the gate tensors of previous tokens in errors of the library.
    #[must_use]
    pub const fn previous_names(self) -> [&'static str; 2] {
        match self {
            Self::Raw(_) => ["previous a", "previous b"],
            _ => ["previous g", "previous beta"],
        }
    }
}

/// Keys, values and gates of T tokens in each of B rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tokens<T> {
    /// `[B, T, H, K]`
    pub k: T,
    /// `[B, T, HV, V]`
    pub v: T,
    /// `a` or `g`: `[B, T, HV]`, KDA `[B, T, HV, K]`
    pub gate: T,
    /// `b` or `beta`: `[B, T, HV]`
    pub beta: T,
}

/// New tokens, which have queries and outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct New<T> {
    /// `[B, T, H, K]`
    pub q: T,
    /// Keys, values and gates.
    pub tokens: Tokens<T>,
    /// `[B, T, HV, V]`
    pub o: T,
}

/// New tokens whose q, k and v are computed from `x` by a convolution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convolved<T> {
    /// `[B, T, D]`
    pub x: T,
    /// Query/key heads, H.
    pub heads: usize,
    /// `a` or `g`, as in [`Tokens`].
    pub gate: T,
    /// `b` or `beta`, as in [`Tokens`].
    pub beta: T,
    /// `[B, T, HV, V]`
    pub o: T,
    /// `[D, W]`
    pub weight: T,
    /// `[D]`
    pub bias: Option<T>,
    /// Activation of the convolution's sums.
    pub activation: Activation,
    /// Windows of the convolution: `[P, D, W − 1]`, with token slots `[P, D, W − 2 + T]`.
    pub windows: T,
    /// Windows to write, where they are not `windows`; same dims.
    pub write_windows: Option<T>,
    /// Window after each token: `[B, steps, D, W − 1]`
    pub window_snapshots: Option<T>,
}

/// RMS norm of the outputs, gated by `z`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm<T> {
    /// `[B, T, HV, V]`
    pub z: T,
    /// `[V]`
    pub weight: T,
    /// Epsilon that is added to the mean of o².
    pub eps: f32,
    /// Activation of `z`.
    pub activation: Activation,
}

/// Previous tokens, of which a resume or a commit makes the first `keep` part of the state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept<T> {
    /// Keys, values and gates of the previous tokens.
    pub tokens: Tokens<T>,
    /// Number of kept tokens of each row: `[B]`
    pub keep: T,
}

/// As [`Kept`], with k and v computed from `x` by a convolution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeptX<T> {
    /// `[B, T', D]`
    pub x: T,
    /// `a` or `g`, as in [`Tokens`].
    pub gate: T,
    /// `b` or `beta`, as in [`Tokens`].
    pub beta: T,
    /// Number of kept tokens of each row: `[B]`
    pub keep: T,
    /// The convolution, in a commit. A resume uses the convolution of its new tokens.
    pub conv: Option<CommitConvolution<T>>,
}

/// The convolution of a commit, without its input `x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CommitConvolution<T> {
    /// Query/key heads, H.
    pub heads: usize,
    /// `[D, W]`
    pub weight: T,
    /// `[D]`
    pub bias: Option<T>,
    /// Activation of the convolution's sums.
    pub activation: Activation,
    /// Windows of the convolution: `[P, D, W − 1]`
    pub windows: T,
    /// Windows to write, where they are not `windows`; same dims.
    pub write_windows: Option<T>,
}

/// Bounds of packed rows: rows of different lengths, concatenated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packed<T> {
    /// `[B + 1]`
    pub cu_seqlens: T,
    /// Longest row, T.
    pub max_tokens: usize,
}

/// States within the rows of a prefill, kept in slots of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoints<T> {
    /// Tokens of the sequence from one checkpoint to the next.
    pub every: usize,
    /// Slots: `[B, C]`
    pub slots: T,
}

/// Deferred write-back: rings of pending tokens, whose updates are not in the states yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pending<T> {
    /// `[P, H, R, K]`
    pub keys: T,
    /// `[P, HV, R, V]`
    pub updates: T,
    /// GDN `[P, HV, R]`, KDA `[P, HV, R, K]`
    pub decays: T,
    /// Number of pending tokens of each row: `[B]`
    pub len: T,
    /// Ring entry of each row's first pending token: `[B]`
    pub base: T,
    /// Ring of the convolution's inputs: `[P, R, D]`
    pub inputs: Option<T>,
    /// Windows of the convolution to write, in a flush.
    pub windows: Option<T>,
    /// Most pending tokens of a slot, N.
    pub most: usize,
}

/// Everything that a launch may take. `T` is a tensor, or a stand-in that [`Arguments::map`] turns into one.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<T> {
    /// Form of the gates.
    pub gates: GateKind,
    /// Parameter `A_log` of the gates.
    pub a_log: Option<T>,
    /// Parameter `dt_bias` of the gates.
    pub dt_bias: Option<T>,
    /// New tokens; none in a commit and a flush.
    pub new: Option<New<T>>,
    /// Previous tokens, in a resume and a commit.
    pub previous: Option<Kept<T>>,
    /// Previous tokens in the form of a convolution's input; excludes `previous`.
    pub previous_x: Option<KeptX<T>>,
    /// Pool of states to start from.
    pub pool: T,
    /// Pool to write, where it is not `pool`.
    pub write_pool: Option<T>,
    /// Pool slot that each row starts from: `[B]`
    pub read_slots: Option<T>,
    /// Pool slot that each row writes: `[B]`
    pub write_slots: Option<T>,
    /// Pool slot for the state after each token: `[B, T]`
    pub token_slots: Option<T>,
    /// Number of accepted tokens of each row's last step: `[B]`
    pub accepted: Option<T>,
    /// States after each token: `[B, steps, …]`
    pub snapshots: Option<T>,
    /// Bounds of the rows, where they have different lengths.
    pub packed: Option<Packed<T>>,
    /// New tokens in the form of a convolution's input; excludes `new`.
    pub convolved: Option<Convolved<T>>,
    /// Norm of the outputs.
    pub norm: Option<GatedNorm<T>>,
    /// Flags of rows that start from a zero state and window: `[B]`
    pub fresh: Option<T>,
    /// Position of each row's first token, in a prefill: `[B]`
    pub positions: Option<T>,
    /// Checkpoints of a prefill.
    pub checkpoints: Option<Checkpoints<T>>,
    /// Workspace of a prefill.
    pub workspace: Option<T>,
    /// Pending tokens. With neither new nor previous tokens, the launch flushes these and does nothing else.
    pub pending: Option<Pending<T>>,
    /// Whether states are written.
    pub update_state: bool,
    /// Options that are fixed for a layer.
    pub options: Options,
}

impl<T> Tokens<T> {
    /// Applies `f` to each tensor.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn map<U, E>(&self, f: &impl Fn(&T) -> Result<U, E>) -> Result<Tokens<U>, E> {
        Ok(Tokens {
            k: f(&self.k)?,
            v: f(&self.v)?,
            gate: f(&self.gate)?,
            beta: f(&self.beta)?,
        })
    }
}

impl<T> Convolved<T> {
    /// Applies `f` to each tensor.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn map<U, E>(&self, f: &impl Fn(&T) -> Result<U, E>) -> Result<Convolved<U>, E> {
        Ok(Convolved {
            x: f(&self.x)?,
            heads: self.heads,
            gate: f(&self.gate)?,
            beta: f(&self.beta)?,
            o: f(&self.o)?,
            weight: f(&self.weight)?,
            bias: self.bias.as_ref().map(f).transpose()?,
            activation: self.activation,
            windows: f(&self.windows)?,
            write_windows: self.write_windows.as_ref().map(f).transpose()?,
            window_snapshots: self.window_snapshots.as_ref().map(f).transpose()?,
        })
    }
}

impl<T> Pending<T> {
    /// Applies `f` to each tensor.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn map<U, E>(&self, f: &impl Fn(&T) -> Result<U, E>) -> Result<Pending<U>, E> {
        Ok(Pending {
            keys: f(&self.keys)?,
            updates: f(&self.updates)?,
            decays: f(&self.decays)?,
            len: f(&self.len)?,
            base: f(&self.base)?,
            inputs: self.inputs.as_ref().map(f).transpose()?,
            windows: self.windows.as_ref().map(f).transpose()?,
            most: self.most,
        })
    }
}

impl<T> KeptX<T> {
    /// Applies `f` to each tensor.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn map<U, E>(&self, f: &impl Fn(&T) -> Result<U, E>) -> Result<KeptX<U>, E> {
        let conv = |conv: &CommitConvolution<T>| {
            Ok(CommitConvolution {
                heads: conv.heads,
                weight: f(&conv.weight)?,
                bias: conv.bias.as_ref().map(f).transpose()?,
                activation: conv.activation,
                windows: f(&conv.windows)?,
                write_windows: conv.write_windows.as_ref().map(f).transpose()?,
            })
        };
        Ok(KeptX {
            x: f(&self.x)?,
            gate: f(&self.gate)?,
            beta: f(&self.beta)?,
            keep: f(&self.keep)?,
            conv: self.conv.as_ref().map(conv).transpose()?,
        })
    }
}

impl<T> Arguments<T> {
    /// Arguments with states in `pool`, which are read and written, and no tokens yet.
    #[must_use]
    pub fn new(gates: GateKind, pool: T) -> Self {
        Self {
            gates,
            a_log: None,
            dt_bias: None,
            new: None,
            previous: None,
            previous_x: None,
            pool,
            write_pool: None,
            read_slots: None,
            write_slots: None,
            token_slots: None,
            accepted: None,
            snapshots: None,
            packed: None,
            convolved: None,
            norm: None,
            fresh: None,
            positions: None,
            checkpoints: None,
            workspace: None,
            pending: None,
            update_state: true,
            options: Options::default(),
        }
    }

    /// Applies `f` to each tensor.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn map<U, E>(&self, f: &impl Fn(&T) -> Result<U, E>) -> Result<Arguments<U>, E> {
        let optional = |tensor: &Option<T>| tensor.as_ref().map(f).transpose();
        let new = |new: &New<T>| {
            Ok(New {
                q: f(&new.q)?,
                tokens: new.tokens.map(f)?,
                o: f(&new.o)?,
            })
        };
        let kept = |kept: &Kept<T>| {
            Ok(Kept {
                tokens: kept.tokens.map(f)?,
                keep: f(&kept.keep)?,
            })
        };
        let packed = |packed: &Packed<T>| {
            Ok(Packed {
                cu_seqlens: f(&packed.cu_seqlens)?,
                max_tokens: packed.max_tokens,
            })
        };
        let norm = |norm: &GatedNorm<T>| {
            Ok(GatedNorm {
                z: f(&norm.z)?,
                weight: f(&norm.weight)?,
                eps: norm.eps,
                activation: norm.activation,
            })
        };
        let checkpoints = |checkpoints: &Checkpoints<T>| {
            Ok(Checkpoints {
                every: checkpoints.every,
                slots: f(&checkpoints.slots)?,
            })
        };
        let convolved = |convolved: &Convolved<T>| convolved.map(f);
        let previous_x = |kept: &KeptX<T>| kept.map(f);
        let pending = |pending: &Pending<T>| pending.map(f);
        Ok(Arguments {
            gates: self.gates,
            a_log: optional(&self.a_log)?,
            dt_bias: optional(&self.dt_bias)?,
            new: self.new.as_ref().map(new).transpose()?,
            previous: self.previous.as_ref().map(kept).transpose()?,
            previous_x: self.previous_x.as_ref().map(previous_x).transpose()?,
            pool: f(&self.pool)?,
            write_pool: optional(&self.write_pool)?,
            read_slots: optional(&self.read_slots)?,
            write_slots: optional(&self.write_slots)?,
            token_slots: optional(&self.token_slots)?,
            accepted: optional(&self.accepted)?,
            snapshots: optional(&self.snapshots)?,
            packed: self.packed.as_ref().map(packed).transpose()?,
            convolved: self.convolved.as_ref().map(convolved).transpose()?,
            norm: self.norm.as_ref().map(norm).transpose()?,
            fresh: optional(&self.fresh)?,
            positions: optional(&self.positions)?,
            checkpoints: self.checkpoints.as_ref().map(checkpoints).transpose()?,
            workspace: optional(&self.workspace)?,
            pending: self.pending.as_ref().map(pending).transpose()?,
            update_state: self.update_state,
            options: self.options,
        })
    }

    /// Whether there are previous tokens and no new ones.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        self.has_previous() && self.new.is_none() && self.convolved.is_none()
    }

    /// Whether there are pending tokens, and neither previous nor new ones.
    #[must_use]
    pub fn is_flush(&self) -> bool {
        self.pending.is_some()
            && !self.has_previous()
            && self.new.is_none()
            && self.convolved.is_none()
    }

    /// Whether there are previous tokens.
    #[must_use]
    pub fn has_previous(&self) -> bool {
        self.previous.is_some() || self.previous_x.is_some()
    }

    /// All tensors of the arguments, each with its name in errors of the library.
    pub fn tensors_mut(&mut self) -> Vec<(&'static str, &mut T)> {
        let is_commit = self.is_commit();
        let mut all = Vec::new();
        if let Some(New { q, tokens, o }) = &mut self.new {
            let [gate, beta] = self.gates.names();
            let Tokens {
                k,
                v,
                gate: g,
                beta: b,
            } = tokens;
            all.extend([("q", q), ("k", k), ("v", v), (gate, g), (beta, b), ("o", o)]);
        }
        if let Some(convolved) = &mut self.convolved {
            let [gate, beta] = self.gates.names();
            let Convolved {
                x,
                gate: g,
                beta: b,
                o,
                weight,
                windows,
                ..
            } = convolved;
            all.extend([("x", x), (gate, g), (beta, b), ("o", o)]);
            all.extend([("conv_weight", weight), ("windows", windows)]);
            let optional = [
                ("conv_bias", &mut convolved.bias),
                ("write_windows", &mut convolved.write_windows),
                ("window_snapshots", &mut convolved.window_snapshots),
            ];
            all.extend(optional.into_iter().filter_map(given));
        }
        if let Some(norm) = &mut self.norm {
            all.extend([("z", &mut norm.z), ("norm_weight", &mut norm.weight)]);
        }
        if let Some(Kept { tokens, keep }) = &mut self.previous {
            let [k_name, v_name, gate, beta] = match (is_commit, self.gates.names()) {
                (true, [gate, beta]) => ["k", "v", gate, beta],
                (false, _) => {
                    let [gate, beta] = self.gates.previous_names();
                    ["previous k", "previous v", gate, beta]
                }
            };
            let Tokens {
                k,
                v,
                gate: g,
                beta: b,
            } = tokens;
            all.extend([
                (k_name, k),
                (v_name, v),
                (gate, g),
                (beta, b),
                ("keep", keep),
            ]);
        }
        if let Some(kept) = &mut self.previous_x {
            let (x, [gate, beta]) = if is_commit {
                ("x", self.gates.names())
            } else {
                ("previous x", self.gates.previous_names())
            };
            all.extend([(x, &mut kept.x), (gate, &mut kept.gate)]);
            all.extend([(beta, &mut kept.beta), ("keep", &mut kept.keep)]);
            if let Some(conv) = &mut kept.conv {
                all.extend([
                    ("conv_weight", &mut conv.weight),
                    ("windows", &mut conv.windows),
                ]);
                let optional = [
                    ("conv_bias", &mut conv.bias),
                    ("write_windows", &mut conv.write_windows),
                ];
                all.extend(optional.into_iter().filter_map(given));
            }
        }
        all.push(("pool", &mut self.pool));
        let optional = [
            ("A_log", &mut self.a_log),
            ("dt_bias", &mut self.dt_bias),
            ("write_pool", &mut self.write_pool),
            ("read_slots", &mut self.read_slots),
            ("write_slots", &mut self.write_slots),
            ("token_slots", &mut self.token_slots),
            ("accepted", &mut self.accepted),
            ("snapshots", &mut self.snapshots),
            ("fresh", &mut self.fresh),
            ("positions", &mut self.positions),
            ("workspace", &mut self.workspace),
        ];
        all.extend(optional.into_iter().filter_map(given));
        all.extend(
            self.checkpoints
                .as_mut()
                .map(|checkpoints| ("checkpoint_slots", &mut checkpoints.slots)),
        );
        all.extend(
            self.packed
                .as_mut()
                .map(|packed| ("cu_seqlens", &mut packed.cu_seqlens)),
        );
        if let Some(pending) = &mut self.pending {
            all.extend([
                ("keys", &mut pending.keys),
                ("updates", &mut pending.updates),
                ("decays", &mut pending.decays),
                ("pending len", &mut pending.len),
                ("pending base", &mut pending.base),
            ]);
            let optional = [
                ("inputs", &mut pending.inputs),
                ("windows", &mut pending.windows),
            ];
            all.extend(optional.into_iter().filter_map(given));
        }
        all
    }
}

/// The name and the tensor, if there is one.
fn given<'a, T>(
    (name, tensor): (&'static str, &'a mut Option<T>),
) -> Option<(&'static str, &'a mut T)> {
    Some((name, tensor.as_mut()?))
}

impl<'a> Arguments<Tensor<'a>> {
    /// Makes the library's arguments.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] and [`Error::Contradiction`] for combinations that the library's types cannot express.
    pub fn work(&self) -> Result<Box<dyn Work + 'a>, Error> {
        self.check()?;
        if let (true, Some(pending)) = (self.is_flush(), &self.pending) {
            let mut flush = Flush::new(self.update(), pending.of_library());
            flush.windows = pending.windows;
            return Ok(Box::new(flush.options(self.options)));
        }
        let of = |tokens: &Tokens<Tensor<'a>>| (tokens.gate, tokens.beta);
        let (gate, beta) = match (&self.new, &self.convolved) {
            (Some(new), _) => of(&new.tokens),
            (None, Some(convolved)) => (convolved.gate, convolved.beta),
            (None, None) => match (&self.previous, &self.previous_x) {
                (Some(previous), _) => of(&previous.tokens),
                (None, Some(previous)) => (previous.gate, previous.beta),
                (None, None) => return Err(missing("q", "new tokens")),
            },
        };
        let parameter = |tensor: Option<Tensor<'a>>, name| tensor.ok_or(missing(name, "raw gates"));
        match self.gates {
            GateKind::Raw(beta_scale) => {
                let a_log = parameter(self.a_log, "A_log")?;
                let dt_bias = parameter(self.dt_bias, "dt_bias")?;
                let gates = GdnGates::raw(gate, beta, a_log, dt_bias);
                self.of_gates(gates.beta_scale(beta_scale))
            }
            GateKind::Given => self.of_gates(GdnGates::given(gate, beta)),
            GateKind::Kda(decay, beta_kind) => {
                let dt_bias = self.dt_bias;
                let kind = match decay {
                    DecayKind::Log => KdaDecay::Log,
                    DecayKind::Softplus => KdaDecay::Softplus {
                        a_log: self.a_log.ok_or(missing("A_log", "softplus gates"))?,
                        dt_bias,
                    },
                    DecayKind::LowerBound(lower_bound) => KdaDecay::LowerBound {
                        lower_bound,
                        a_log: self.a_log,
                        dt_bias,
                    },
                };
                self.of_gates(KdaGates::new(gate, kind, beta, beta_kind))
            }
        }
    }

    /// The library's form of states that are read and written.
    fn update(&self) -> Update<'a> {
        let mut update = States::update(self.pool);
        update.write_pool = self.write_pool;
        update.read_slots = self.read_slots;
        update.write_slots = self.write_slots;
        update
    }

    fn of_gates<G: Gates + 'a>(&self, gates: G) -> Result<Box<dyn Work + 'a>, Error> {
        let update = self.update();
        let kept = self.kept();
        let (inputs, o) = match (self.new, &self.convolved) {
            (Some(New { q, tokens, o }), _) => (Inputs::qkv(q, tokens.k, tokens.v), o),
            (None, Some(convolved)) => (Inputs::conv(convolved.convolution()), convolved.o),
            (None, None) => {
                let kept = kept.ok_or(missing("q", "new tokens"))?;
                let mut commit = Commit::new(kept.stored, gates, kept.keep, update);
                commit.fresh = self.fresh;
                return Ok(Box::new(commit.options(self.options)));
            }
        };
        let states: States<'a> = match self.token_slots {
            Some(slots) => {
                let mut states = States::per_token(self.pool, slots);
                states.write_pool = self.write_pool;
                states.accepted = self.accepted;
                states.into()
            }
            None if self.update_state => update.into(),
            None => {
                let mut states = States::read_only(self.pool);
                states.read_slots = self.read_slots;
                states.into()
            }
        };
        let mut step: Step<'a, G> = Step::new(inputs, gates, o, states).options(self.options);
        step.snapshots = self.snapshots;
        step.fresh = self.fresh;
        step.positions = self.positions;
        step.workspace = self.workspace;
        if let Some(Checkpoints { every, slots }) = self.checkpoints {
            step = step.checkpoints(every, slots);
        }
        step.norm = (self.norm.as_ref())
            .map(|norm| Norm::new(norm.z, norm.weight, norm.eps).activation(norm.activation));
        if let Some(Packed {
            cu_seqlens,
            max_tokens,
        }) = self.packed
        {
            step = step.packed(cu_seqlens, max_tokens);
        }
        if let Some(kept) = kept {
            step = step.previous(kept);
        }
        if let Some(pending) = &self.pending {
            step = step.pending(pending.of_library());
        }
        Ok(Box::new(step))
    }

    /// The library's form of the previous tokens.
    fn kept(&self) -> Option<Previous<'a>> {
        if let Some(Kept { tokens, keep }) = &self.previous {
            let stored = Stored::kv(tokens.k, tokens.v);
            return Some(Previous::new(stored, tokens.gate, tokens.beta, *keep));
        }
        let kept = self.previous_x.as_ref()?;
        let stored = match &kept.conv {
            Some(conv) => Stored::conv(conv.convolution(kept.x)),
            None => Stored::x(kept.x),
        };
        Some(Previous::new(stored, kept.gate, kept.beta, kept.keep))
    }

    /// Checks for combinations that the library's types cannot express.
    fn check(&self) -> Result<(), Error> {
        let no_update = (!self.update_state, "update_state = false");
        let read_slots = (self.read_slots.is_some(), "read_slots");
        let write_slots = (self.write_slots.is_some(), "write_slots");
        let write_pool = (self.write_pool.is_some(), "write_pool");
        let snapshots = (self.snapshots.is_some(), "snapshots");
        let name = if self.is_commit() {
            "a commit"
        } else {
            "previous"
        };
        let previous = (self.has_previous(), name);
        excludes(
            (self.previous.is_some(), "previous k"),
            &[(self.previous_x.is_some(), "previous x")],
            "a convolution makes k and v of x",
        )?;
        excludes(
            (self.new.is_some(), "q"),
            &[(self.convolved.is_some(), "x")],
            "a convolution makes q, k and v of x",
        )?;
        excludes(
            (self.is_commit(), "a commit"),
            &[
                (self.norm.is_some(), "z"),
                (self.positions.is_some(), "positions"),
                (self.checkpoints.is_some(), "checkpoints"),
                (self.workspace.is_some(), "workspace"),
                (self.pending.is_some(), "pending"),
            ],
            "it has no new tokens",
        )?;
        let written = |convolved: &Convolved<_>| convolved.write_windows.is_some();
        let write_windows = self.convolved.as_ref().is_some_and(written);
        if self.accepted.is_some() && self.token_slots.is_none() {
            return Err(missing("token_slots", "accepted tokens"));
        }
        excludes(
            (self.token_slots.is_some(), "token_slots"),
            &[read_slots, write_slots, previous, no_update],
            "they say where states start and where each of them goes",
        )?;
        excludes(
            (self.is_flush(), "a flush"),
            &[
                no_update,
                snapshots,
                (self.norm.is_some(), "z"),
                (self.fresh.is_some(), "fresh"),
                (self.packed.is_some(), "cu_seqlens"),
                (self.token_slots.is_some(), "token_slots"),
                (self.positions.is_some(), "positions"),
                (self.checkpoints.is_some(), "checkpoints"),
                (self.workspace.is_some(), "workspace"),
            ],
            "it flushes the pending tokens, and has no others",
        )?;
        excludes(
            previous,
            &[no_update, snapshots],
            "the state after the kept tokens is written, and no other",
        )?;
        let write_windows = (write_windows, "write_windows");
        excludes(
            no_update,
            &[write_slots, write_pool, write_windows],
            "no state is written",
        )
    }
}

fn missing(tensor: &'static str, needed_by: &'static str) -> Error {
    Error::MissingTensor { tensor, needed_by }
}

impl<'a> Pending<Tensor<'a>> {
    /// The library's form of the pending tokens.
    fn of_library(&self) -> gated_delta::Pending<'a> {
        let rings = Rings {
            keys: self.keys,
            updates: self.updates,
            decays: self.decays,
            len: self.len,
            base: self.base,
        };
        let mut pending = gated_delta::Pending::new(rings).most(self.most);
        pending.inputs = self.inputs;
        pending
    }
}

impl<'a> Convolved<Tensor<'a>> {
    /// The library's form of the convolution.
    fn convolution(&self) -> Convolution<'a> {
        let mut conv = Convolution::new(self.x, self.heads, self.weight, self.windows);
        conv.bias = self.bias;
        conv.write_windows = self.write_windows;
        conv.window_snapshots = self.window_snapshots;
        conv.activation(self.activation)
    }
}

impl<'a> CommitConvolution<Tensor<'a>> {
    /// The library's form of the convolution, with the input `x`.
    fn convolution(&self, x: Tensor<'a>) -> Convolution<'a> {
        let mut conv = Convolution::new(x, self.heads, self.weight, self.windows);
        conv.bias = self.bias;
        conv.write_windows = self.write_windows;
        conv.activation(self.activation)
    }
}

#[cfg(test)]
mod tests;
