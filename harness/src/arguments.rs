//! A launch whose kind is known at run time: of a file, of a random case, of a cell of a table.
//!
//! The library's own arguments differ in type where they differ in kind. Here everything is one struct of optional
//! tensors, and [`Arguments::work`] makes the library's arguments of it, or says what contradicts itself.

use gated_delta::error::excludes;
use gated_delta::step::Update;
use gated_delta::{
    Activation, BetaScale, Commit, Convolution, Error, Flush, Gates, GdnGates, Inputs, KdaBeta,
    KdaGate, KdaGates, Norm, Options, Previous, States, Step, Stored, Tensor, Work,
};

/// Whose layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// One decay per value head.
    Gdn,
    /// One decay per key channel.
    Kda,
}

/// V, where kernels take this K.
#[must_use]
pub const fn value_dim(key_dim: usize) -> usize {
    if key_dim == 96 { 192 } else { key_dim }
}

/// How gates come; whose they are says whose layer it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateKind {
    /// GDN: computed from `a`, `b`, `A_log` and `dt_bias`.
    Raw(BetaScale),
    /// GDN: `g` is the log decay, `beta` is β.
    Given,
    /// KDA.
    Kda(KdaDecay, KdaBeta),
}

/// What KDA's `g` is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KdaDecay {
    /// The log decay.
    Log,
    /// What the log decay is computed from, with `A_log` and perhaps `dt_bias`.
    Softplus,
    /// The same with a lower bound of the log decay; perhaps with `A_log` and `dt_bias`.
    LowerBound(f32),
}

impl GateKind {
    /// Whose gates they are.
    #[must_use]
    pub const fn operator(self) -> Operator {
        match self {
            Self::Raw(_) | Self::Given => Operator::Gdn,
            Self::Kda(..) => Operator::Kda,
        }
    }

    /// Names of a token's gates in errors of the library.
    #[must_use]
    pub const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Raw(_) => ["a", "b"],
            _ => ["g", "beta"],
        }
    }

    /// The same of the previous tokens.
    #[must_use]
    pub const fn previous_names(self) -> [&'static str; 2] {
        match self {
            Self::Raw(_) => ["previous a", "previous b"],
            _ => ["previous g", "previous beta"],
        }
    }
}

/// Tensors of some tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tokens<T> {
    /// `[B, T, H, K]`
    pub k: T,
    /// `[B, T, HV, V]`
    pub v: T,
    /// `a` or `g`
    pub gate: T,
    /// `b` or `beta`
    pub beta: T,
}

/// Tokens that are read from the state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct New<T> {
    /// `[B, T, H, K]`
    pub q: T,
    /// What else they bring.
    pub tokens: Tokens<T>,
    /// `[B, T, HV, V]`
    pub o: T,
}

/// New tokens whose q, k and v a convolution makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convolved<T> {
    /// `[B, T, D]`
    pub x: T,
    /// H
    pub heads: usize,
    /// `a` or `g`
    pub gate: T,
    /// `b` or `beta`
    pub beta: T,
    /// `[B, T, HV, V]`
    pub o: T,
    /// `[D, W]`
    pub weight: T,
    /// `[D]`
    pub bias: Option<T>,
    /// Of the sums.
    pub activation: Activation,
    /// `[P, D, W − 1]`, with token slots `[P, D, W − 2 + T]`.
    pub windows: T,
    /// As `windows`.
    pub write_windows: Option<T>,
    /// `[B, steps, D, W − 1]`
    pub window_snapshots: Option<T>,
}

/// A norm of the outputs, gated by z.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm<T> {
    /// `[B, T, HV, V]`
    pub z: T,
    /// `[V]`
    pub weight: T,
    /// Added to the mean of o².
    pub eps: f32,
    /// Of z.
    pub activation: Activation,
}

/// Tokens of which the first ones are committed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept<T> {
    /// What they brought.
    pub tokens: Tokens<T>,
    /// `[B]`
    pub keep: T,
}

/// The same, whose k and v a convolution makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeptX<T> {
    /// `[B, T', D]`
    pub x: T,
    /// `a` or `g`
    pub gate: T,
    /// `b` or `beta`
    pub beta: T,
    /// `[B]`
    pub keep: T,
    /// Of a commit; in a resume, that of the new tokens makes k and v.
    pub conv: Option<CommitConvolution<T>>,
}

/// The convolution of a commit, but for its x.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CommitConvolution<T> {
    /// H
    pub heads: usize,
    /// `[D, W]`
    pub weight: T,
    /// `[D]`
    pub bias: Option<T>,
    /// Of the sums.
    pub activation: Activation,
    /// `[P, D, W − 1]`
    pub windows: T,
    /// As `windows`.
    pub write_windows: Option<T>,
}

/// Tokens of rows of different lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packed<T> {
    /// `[B + 1]`
    pub cu_seqlens: T,
    /// T
    pub max_tokens: usize,
}

/// States within rows that are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoints<T> {
    /// Tokens from one to the next.
    pub every: usize,
    /// `[B, C]`
    pub slots: T,
}

/// Tokens that states wait for, in rings of the slots.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pending<T> {
    /// `[P, H, R, K]`
    pub keys: T,
    /// `[P, HV, R, V]`
    pub updates: T,
    /// GDN `[P, HV, R]`, KDA `[P, HV, R, K]`
    pub decays: T,
    /// `[B]`
    pub len: T,
    /// `[B]`
    pub base: T,
    /// N
    pub most: usize,
}

/// Everything that a launch may be given; `T` is a tensor, or what becomes one.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<T> {
    /// How gates come.
    pub gates: GateKind,
    /// A parameter of the gates.
    pub a_log: Option<T>,
    /// A parameter of the gates.
    pub dt_bias: Option<T>,
    /// Not there in a commit.
    pub new: Option<New<T>>,
    /// There in a resume and a commit.
    pub previous: Option<Kept<T>>,
    /// Previous tokens too, in the place of `previous`.
    pub previous_x: Option<KeptX<T>>,
    /// Start states.
    pub pool: T,
    /// Another pool to write.
    pub write_pool: Option<T>,
    /// `[B]`
    pub read_slots: Option<T>,
    /// `[B]`
    pub write_slots: Option<T>,
    /// `[B, T]`
    pub token_slots: Option<T>,
    /// `[B]`
    pub accepted: Option<T>,
    /// `[B, steps, …]`
    pub snapshots: Option<T>,
    /// Rows of different lengths.
    pub packed: Option<Packed<T>>,
    /// New tokens too, in the place of `new`.
    pub convolved: Option<Convolved<T>>,
    /// What becomes of the outputs.
    pub norm: Option<GatedNorm<T>>,
    /// `[B]`
    pub fresh: Option<T>,
    /// `[B]`, of a prefill.
    pub positions: Option<T>,
    /// Of a prefill.
    pub checkpoints: Option<Checkpoints<T>>,
    /// Of a prefill.
    pub workspace: Option<T>,
    /// Tokens that are not in the states yet; without new ones they are folded in, and nothing else.
    pub pending: Option<Pending<T>>,
    /// Whether states are written.
    pub update_state: bool,
    /// What is fixed for a layer.
    pub options: Options,
}

impl<T> Tokens<T> {
    /// With what `f` makes of each tensor.
    ///
    /// # Errors
    /// Those of `f`.
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
    /// With what `f` makes of each tensor.
    ///
    /// # Errors
    /// Those of `f`.
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
    /// With what `f` makes of each tensor.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map<U, E>(&self, f: &impl Fn(&T) -> Result<U, E>) -> Result<Pending<U>, E> {
        Ok(Pending {
            keys: f(&self.keys)?,
            updates: f(&self.updates)?,
            decays: f(&self.decays)?,
            len: f(&self.len)?,
            base: f(&self.base)?,
            most: self.most,
        })
    }
}

impl<T> KeptX<T> {
    /// With what `f` makes of each tensor.
    ///
    /// # Errors
    /// Those of `f`.
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
    /// Of states in `pool`, which are written, and of nothing else as yet.
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

    /// With what `f` makes of each tensor.
    ///
    /// # Errors
    /// Those of `f`.
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

    /// Whether there are previous tokens and no others.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        self.has_previous() && self.new.is_none() && self.convolved.is_none()
    }

    /// Whether pending tokens are folded, and there are no others.
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

    /// Every tensor that is there, under its name in errors of the library.
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
        }
        all
    }
}

/// A tensor under its name, where there is one.
fn given<'a, T>(
    (name, tensor): (&'static str, &'a mut Option<T>),
) -> Option<(&'static str, &'a mut T)> {
    Some((name, tensor.as_mut()?))
}

impl<'a> Arguments<Tensor<'a>> {
    /// The arguments of the library.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] and [`Error::Contradiction`] for what the library's types do not let be said.
    pub fn work(&self) -> Result<Box<dyn Work + 'a>, Error> {
        self.check()?;
        if let (true, Some(pending)) = (self.is_flush(), &self.pending) {
            let flush = Flush::new(self.update(), pending.of_library());
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
                    KdaDecay::Log => KdaGate::Log,
                    KdaDecay::Softplus => KdaGate::Softplus {
                        a_log: self.a_log.ok_or(missing("A_log", "softplus gates"))?,
                        dt_bias,
                    },
                    KdaDecay::LowerBound(lower_bound) => KdaGate::LowerBound {
                        lower_bound,
                        a_log: self.a_log,
                        dt_bias,
                    },
                };
                self.of_gates(KdaGates::new(gate, kind, beta, beta_kind))
            }
        }
    }

    /// States that are written.
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

    /// The previous tokens.
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

    /// Nothing is given that the library's types do not let be said.
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
            "pending tokens are folded, and no others are there",
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
    /// The library's.
    fn of_library(&self) -> gated_delta::Pending<'a> {
        let rings = [self.keys, self.updates, self.decays];
        gated_delta::Pending::new(rings, self.len, self.base).most(self.most)
    }
}

impl<'a> Convolved<Tensor<'a>> {
    /// The library's.
    fn convolution(&self) -> Convolution<'a> {
        let mut conv = Convolution::new(self.x, self.heads, self.weight, self.windows);
        conv.bias = self.bias;
        conv.write_windows = self.write_windows;
        conv.window_snapshots = self.window_snapshots;
        conv.activation(self.activation)
    }
}

impl<'a> CommitConvolution<Tensor<'a>> {
    /// The library's, of x.
    fn convolution(&self, x: Tensor<'a>) -> Convolution<'a> {
        let mut conv = Convolution::new(x, self.heads, self.weight, self.windows);
        conv.bias = self.bias;
        conv.write_windows = self.write_windows;
        conv.activation(self.activation)
    }
}

#[cfg(test)]
mod tests {
    use gated_delta::{DType, Formulation};

    use super::*;

    fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
        // SAFETY: nothing is launched.
        unsafe { Tensor::from_raw(0x1_0000, dtype, dims) }.unwrap()
    }

    fn tokens() -> Tokens<Tensor<'static>> {
        let (x, gate) = (
            tensor(DType::F32, &[2, 3, 1, 64]),
            tensor(DType::F32, &[2, 3, 1]),
        );
        Tokens {
            k: x,
            v: x,
            gate,
            beta: gate,
        }
    }

    fn pool() -> Tensor<'static> {
        tensor(DType::F32, &[5, 1, 64, 64])
    }

    fn slots() -> Option<Tensor<'static>> {
        Some(tensor(DType::I32, &[2]))
    }

    fn step() -> Arguments<Tensor<'static>> {
        let tokens = tokens();
        Arguments {
            new: Some(New {
                q: tokens.k,
                o: tokens.v,
                tokens,
            }),
            ..Arguments::new(GateKind::Given, pool())
        }
    }

    /// Of one token.
    fn convolved() -> Arguments<Tensor<'static>> {
        let (gate, windows) = (
            tensor(DType::F32, &[2, 1, 1]),
            tensor(DType::F32, &[5, 192, 3]),
        );
        Arguments {
            convolved: Some(Convolved {
                x: tensor(DType::F32, &[2, 1, 192]),
                heads: 1,
                gate,
                beta: gate,
                o: tensor(DType::F32, &[2, 1, 1, 64]),
                weight: tensor(DType::F32, &[192, 4]),
                bias: None,
                activation: Activation::None,
                windows,
                write_windows: Some(windows),
                window_snapshots: None,
            }),
            ..Arguments::new(GateKind::Given, pool())
        }
    }

    /// T' = 3 as [`tokens`] have it.
    fn kept_x(conv: Option<CommitConvolution<Tensor<'static>>>) -> Option<KeptX<Tensor<'static>>> {
        let gate = tensor(DType::F32, &[2, 3, 1]);
        Some(KeptX {
            x: tensor(DType::F32, &[2, 3, 192]),
            gate,
            beta: gate,
            keep: tensor(DType::I32, &[2]),
            conv,
        })
    }

    fn conv_resume() -> Arguments<Tensor<'static>> {
        Arguments {
            previous_x: kept_x(None),
            ..convolved()
        }
    }

    fn conv_commit() -> Arguments<Tensor<'static>> {
        let windows = tensor(DType::F32, &[5, 192, 3]);
        let conv = CommitConvolution {
            heads: 1,
            weight: tensor(DType::F32, &[192, 4]),
            bias: Some(tensor(DType::F32, &[192])),
            activation: Activation::None,
            windows,
            write_windows: Some(windows),
        };
        Arguments {
            previous_x: kept_x(Some(conv)),
            fresh: slots(),
            ..Arguments::new(GateKind::Given, pool())
        }
    }

    /// With the windows after each token.
    fn conv_snapshots() -> Arguments<Tensor<'static>> {
        let mut arguments = convolved();
        if let Some(convolved) = &mut arguments.convolved {
            convolved.window_snapshots = Some(tensor(DType::F32, &[2, 1, 192, 3]));
        }
        arguments.snapshots = Some(tensor(DType::F32, &[2, 1, 1, 64, 64]));
        arguments
    }

    fn norm() -> Option<GatedNorm<Tensor<'static>>> {
        Some(GatedNorm {
            z: tensor(DType::F32, &[2, 1, 1, 64]),
            weight: tensor(DType::F32, &[64]),
            eps: 1e-6,
            activation: Activation::Sigmoid,
        })
    }

    fn resume() -> Arguments<Tensor<'static>> {
        Arguments {
            previous: Some(Kept {
                tokens: tokens(),
                keep: tensor(DType::I32, &[2]),
            }),
            ..step()
        }
    }

    fn commit() -> Arguments<Tensor<'static>> {
        Arguments {
            new: None,
            ..resume()
        }
    }

    fn read_only() -> Arguments<Tensor<'static>> {
        Arguments {
            update_state: false,
            ..step()
        }
    }

    fn per_token() -> Arguments<Tensor<'static>> {
        Arguments {
            token_slots: Some(tensor(DType::I32, &[2, 3])),
            ..step()
        }
    }

    fn raw(a_log: bool, dt_bias: bool) -> Arguments<Tensor<'static>> {
        let parameter = tensor(DType::F32, &[1]);
        Arguments {
            gates: GateKind::Raw(BetaScale::One),
            a_log: a_log.then_some(parameter),
            dt_bias: dt_bias.then_some(parameter),
            ..step()
        }
    }

    /// Of 70 tokens, with all that a prefill has.
    fn prefill() -> Arguments<Tensor<'static>> {
        let (x, gate) = (
            tensor(DType::F32, &[2, 70, 1, 64]),
            tensor(DType::F32, &[2, 70, 1]),
        );
        let tokens = Tokens {
            k: x,
            v: x,
            gate,
            beta: gate,
        };
        Arguments {
            new: Some(New { q: x, tokens, o: x }),
            positions: slots(),
            checkpoints: Some(Checkpoints {
                every: 64,
                slots: tensor(DType::I32, &[2, 3]),
            }),
            workspace: Some(tensor(DType::F32, &[1 << 20])),
            options: Options::default().formulation(Formulation::Chunked),
            ..step()
        }
    }

    /// Gives every tensor an address of its own, and says which has which.
    fn spread(arguments: &mut Arguments<Tensor<'static>>) -> Vec<&'static str> {
        let (addresses, mut names) = ((1..).map(|i| 0x1_0000 * i), Vec::new());
        for ((name, tensor), address) in arguments.tensors_mut().into_iter().zip(addresses) {
            // SAFETY: nothing is launched.
            let moved = unsafe { Tensor::from_raw(address, tensor.dtype(), tensor.dims()) };
            *tensor = moved.unwrap();
            names.push(name);
        }
        names
    }

    #[test]
    fn everything_of_previous_tokens_of_a_convolution_arrives() {
        let arrived = |mut arguments: Arguments<Tensor<'static>>, all: &[&str], of: &[&str]| {
            assert_eq!(spread(&mut arguments), all);
            let params = arguments.work().unwrap().params();
            for name in of {
                let address = match *name {
                    "x" if arguments.is_commit() => params.previous_x,
                    "x" => params.x,
                    "previous x" => params.previous_x,
                    "previous g" => params.step.previous_g,
                    "previous beta" => params.step.previous_b,
                    "g" => params.step.previous_g,
                    "beta" => params.step.previous_b,
                    "keep" => params.step.keep,
                    "conv_weight" => params.conv_weight,
                    "conv_bias" => params.conv_bias,
                    "windows" => params.read_windows,
                    "write_windows" => params.write_windows,
                    "window_snapshots" => params.window_snapshots,
                    "snapshots" => params.step.snapshots,
                    "fresh" => params.step.fresh,
                    other => unreachable!("{other}"),
                };
                let place = all.iter().position(|other| other == name).unwrap() as u64;
                assert_eq!(address, 0x1_0000 * (1 + place), "{name}");
            }
        };
        #[rustfmt::skip]
        let resume = ["x", "g", "beta", "o", "conv_weight", "windows", "write_windows", "previous x", "previous g", "previous beta", "keep", "pool"];
        arrived(
            conv_resume(),
            &resume,
            &["x", "previous x", "previous g", "previous beta", "keep"],
        );
        #[rustfmt::skip]
        let of_x = ["x", "g", "beta", "keep", "conv_weight", "windows", "conv_bias", "write_windows", "pool", "fresh"];
        let of_commit: Vec<_> = of_x.into_iter().filter(|name| *name != "pool").collect();
        arrived(conv_commit(), &of_x, &of_commit);
        #[rustfmt::skip]
        let snapshots = ["x", "g", "beta", "o", "conv_weight", "windows", "write_windows", "window_snapshots", "pool", "snapshots"];
        arrived(
            conv_snapshots(),
            &snapshots,
            &["window_snapshots", "snapshots"],
        );
        let fresh = Arguments {
            fresh: slots(),
            ..commit()
        };
        let of_kv = ["k", "v", "g", "beta", "keep", "pool", "fresh"];
        arrived(fresh, &of_kv, &["g", "beta", "keep", "fresh"]);
        // Tensors are made of other things one by one.
        for arguments in [conv_resume(), conv_commit(), conv_snapshots(), prefill()] {
            let same = arguments.map(&|tensor| Ok::<_, Error>(*tensor)).unwrap();
            let bytes = |arguments: &Arguments<Tensor<'_>>| arguments.work()?.bytes();
            assert_eq!(bytes(&same).unwrap(), bytes(&arguments).unwrap());
            let all = |mut arguments: Arguments<Tensor<'static>>| spread(&mut arguments);
            assert_eq!(all(same), all(arguments));
        }
    }

    #[test]
    fn everything_of_a_convolution_and_a_norm_arrives() {
        let mut arguments = Arguments {
            norm: norm(),
            fresh: slots(),
            ..convolved()
        };
        let names = spread(&mut arguments);
        #[rustfmt::skip]
        let all = ["x", "g", "beta", "o", "conv_weight", "windows", "write_windows", "z", "norm_weight", "pool", "fresh"];
        assert_eq!(names, all);
        let params = arguments.work().unwrap().params();
        let at =
            |name| 0x1_0000 * (1 + all.iter().position(|other| *other == name).unwrap() as u64);
        #[rustfmt::skip]
        let got = [
            ("x", params.x), ("g", params.step.g), ("beta", params.step.b), ("o", params.step.o),
            ("conv_weight", params.conv_weight), ("windows", params.read_windows), ("write_windows", params.write_windows),
            ("z", params.z), ("norm_weight", params.norm_weight), ("pool", params.step.read_pool), ("fresh", params.step.fresh),
        ];
        for (name, address) in got {
            assert_eq!(address, at(name), "{name}");
        }
    }

    #[test]
    fn everything_of_a_prefill_arrives() {
        let mut arguments = prefill();
        // A workspace is aligned.
        let names = spread(&mut arguments);
        #[rustfmt::skip]
        let all = ["q", "k", "v", "g", "beta", "o", "pool", "positions", "workspace", "checkpoint_slots"];
        assert_eq!(names, all);
        let work = arguments.work().unwrap();
        work.bytes().unwrap();
        let sizes = |rows: usize| {
            let mut arguments = prefill();
            if let Some(checkpoints) = &mut arguments.checkpoints {
                checkpoints.slots = tensor(DType::I32, &[rows, 3]);
            }
            arguments.work()?.bytes()
        };
        sizes(2).unwrap();
        assert!(
            sizes(3)
                .unwrap_err()
                .to_string()
                .contains("checkpoint_slots")
        );
    }

    #[test]
    fn what_contradicts_itself_is_refused_by_name() {
        for good in [
            step(),
            resume(),
            commit(),
            read_only(),
            per_token(),
            raw(true, true),
            convolved(),
            Arguments {
                norm: norm(),
                fresh: slots(),
                ..convolved()
            },
            Arguments {
                fresh: slots(),
                ..commit()
            },
            conv_resume(),
            conv_commit(),
            prefill(),
        ] {
            good.work().unwrap().bytes().unwrap();
        }
        let mut softplus = step();
        softplus.gates = GateKind::Kda(KdaDecay::Softplus, KdaBeta::Given);
        let snapshots = Some(tensor(DType::F32, &[2, 3, 1, 64, 64]));
        let (start, kept, none) = (
            "they say where states start and where each of them goes",
            "the state after the kept tokens is written, and no other",
            "no state is written",
        );
        let both = |one, other, why| format!("{one} and {other} exclude each other: {why}");
        #[rustfmt::skip]
        let cases = [
            (Arguments { accepted: slots(), ..step() }, "token_slots is missing: accepted tokens need it".to_owned()),
            (Arguments { read_slots: slots(), ..per_token() }, both("token_slots", "read_slots", start)),
            (Arguments { write_slots: slots(), ..per_token() }, both("token_slots", "write_slots", start)),
            (Arguments { previous: resume().previous, ..per_token() }, both("token_slots", "previous", start)),
            (Arguments { token_slots: per_token().token_slots, ..commit() }, both("token_slots", "a commit", start)),
            (Arguments { update_state: false, ..per_token() }, both("token_slots", "update_state = false", start)),
            (Arguments { update_state: false, ..resume() }, both("previous", "update_state = false", kept)),
            (Arguments { snapshots, ..resume() }, both("previous", "snapshots", kept)),
            (Arguments { update_state: false, ..commit() }, both("a commit", "update_state = false", kept)),
            (Arguments { snapshots, ..commit() }, both("a commit", "snapshots", kept)),
            (Arguments { write_slots: slots(), ..read_only() }, both("update_state = false", "write_slots", none)),
            (Arguments { write_pool: Some(pool()), ..read_only() }, both("update_state = false", "write_pool", none)),
            (Arguments { new: step().new, ..convolved() }, both("q", "x", "a convolution makes q, k and v of x")),
            (Arguments { norm: norm(), ..commit() }, both("a commit", "z", "it has no new tokens")),
            (Arguments { positions: slots(), ..commit() }, both("a commit", "positions", "it has no new tokens")),
            (Arguments { checkpoints: prefill().checkpoints, ..commit() }, both("a commit", "checkpoints", "it has no new tokens")),
            (Arguments { workspace: prefill().workspace, ..commit() }, both("a commit", "workspace", "it has no new tokens")),
            (Arguments { previous_x: conv_commit().previous_x, ..commit() }, both("previous k", "previous x", "a convolution makes k and v of x")),
            (Arguments { token_slots: per_token().token_slots, ..conv_resume() }, both("token_slots", "previous", start)),
            (Arguments { update_state: false, ..conv_commit() }, both("a commit", "update_state = false", kept)),
            (Arguments { update_state: false, ..convolved() }, both("update_state = false", "write_windows", none)),
            (Arguments { new: None, ..step() }, "q is missing: new tokens need it".to_owned()),
            (raw(false, true), "A_log is missing: raw gates need it".to_owned()),
            (raw(true, false), "dt_bias is missing: raw gates need it".to_owned()),
            (softplus, "A_log is missing: softplus gates need it".to_owned()),
        ];
        for (args, wanted) in cases {
            let message = args.work().err().map(|error| error.to_string());
            assert_eq!(message, Some(wanted));
        }
    }
}
