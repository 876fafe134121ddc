//! A cell: the launch that one row of a table measures.

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use gated_delta::{DType, Formulation, KdaBeta, StateLayout};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator, value_dim};

use crate::inputs::LOWER_BOUND;
use crate::shapes::{self, Model};

/// An operator, by its name on the command line and in records. Each has a table of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Op {
    /// GDN decode: one token.
    GdnDecode,
    /// GDN, several tokens.
    GdnMtp,
    /// KDA, one token or several.
    KdaRecurrent,
    /// Layer step of GDN: convolution, one token or several, gated norm.
    GdnLayer,
    /// Layer step of KDA.
    KdaLayer,
}

/// States that a launch writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Mode {
    /// Writes the state after the last token, in its slot.
    Update,
    /// Writes the state after every token to a tensor of snapshots, and not to the pool.
    Snapshots,
    /// Writes no state.
    Verify,
    /// Writes the state after the accepted tokens of the last step, in its slot, and verifies the new tokens.
    Resume,
    /// Writes the state after the accepted tokens of the last step, in its slot; there are no new tokens.
    Commit,
    /// Writes the state after every token, in slots of the pool.
    TokenSlots,
}

/// The launch that one row measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Operator.
    pub op: Op,
    /// States that the launch writes.
    pub mode: Mode,
    /// Formulation of the tokens.
    pub formulation: Formulation,
    /// Form of KDA's gate. GDN's gate is computed from a and b.
    pub gate: DecayKind,
    /// Model that the heads are from.
    pub model: Model,
    /// Key head dim K, which V follows from.
    pub dim: usize,
    /// Rows, B.
    pub batch: usize,
    /// Tokens of a row, T; with previous tokens, T' is the same.
    pub tokens: usize,
    /// State dtype.
    pub state: DType,
    /// State layout.
    pub layout: StateLayout,
    /// Whether rows have slots in random order, by an index tensor. Without it row b has slot b.
    pub slots: bool,
    /// Whether launches rotate over buffers that no cache holds. Otherwise they stay on one set.
    pub cold: bool,
}

impl Op {
    /// Name on the command line and in kernels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GdnDecode => "gdn_decode",
            Self::GdnMtp => "gdn_mtp",
            Self::KdaRecurrent => "kda_recurrent",
            Self::GdnLayer => "gdn_layer",
            Self::KdaLayer => "kda_layer",
        }
    }

    /// Whether there are a convolution and a norm around the recurrence.
    #[must_use]
    pub fn is_layer(self) -> bool {
        matches!(self, Self::GdnLayer | Self::KdaLayer)
    }

    /// Operator of the recurrence.
    #[must_use]
    pub fn operator(self) -> Operator {
        match self {
            Self::GdnDecode | Self::GdnMtp | Self::GdnLayer => Operator::Gdn,
            Self::KdaRecurrent | Self::KdaLayer => Operator::Kda,
        }
    }

    /// Layers with names for this operator; the first is the default.
    #[must_use]
    pub fn models(self) -> &'static [Model] {
        match self.operator() {
            Operator::Gdn => &shapes::GDN,
            Operator::Kda => &shapes::KDA,
        }
    }

    /// The layer called `name`.
    pub fn model(self, name: &str) -> Result<Model> {
        if self.operator() == Operator::Gdn && name == shapes::EQUAL_HEADS.name {
            return Ok(shapes::EQUAL_HEADS);
        }
        let known = self.models().iter().find(|known| known.name == name);
        known.copied().with_context(|| {
            let known: Vec<&str> = self.models().iter().map(|known| known.name).collect();
            let (op, known) = (self.name(), known.join(", "));
            format!("model: {op} has {known}, got {name}")
        })
    }
}

/// Parses the name of a state dtype.
pub fn state(name: &str) -> Result<DType> {
    Ok(match name {
        "bf16" => DType::Bf16,
        "f16" => DType::F16,
        "f32" => DType::F32,
        _ => bail!("state: wanted bf16, f16 or f32, got {name}"),
    })
}

/// Parses the name of a state layout.
pub fn layout(name: &str) -> Result<StateLayout> {
    Ok(match name {
        "k_last" => StateLayout::KLast,
        "v_last" => StateLayout::VLast,
        _ => bail!("layout: wanted k_last or v_last, got {name}"),
    })
}

/// Parses the name of a formulation.
pub fn formulation(name: &str) -> Result<Formulation> {
    Ok(match name {
        "recurrent" => Formulation::Recurrent,
        "parallel" => Formulation::Parallel,
        _ => bail!("formulation: wanted recurrent or parallel, got {name}"),
    })
}

/// Name of a formulation, which [`formulation`] parses.
#[must_use]
pub fn formulation_name(formulation: Formulation) -> &'static str {
    match formulation {
        Formulation::Recurrent => "recurrent",
        Formulation::Parallel => "parallel",
        _ => "unnamed",
    }
}

/// Parses the name of a form of KDA's gate.
pub fn gate(name: &str) -> Result<DecayKind> {
    Ok(match name {
        "log" => DecayKind::Log,
        "softplus" => DecayKind::Softplus,
        "lower_bound" => DecayKind::LowerBound(LOWER_BOUND),
        _ => bail!("gate: wanted log, softplus or lower_bound, got {name}"),
    })
}

/// Name of a form of KDA's gate, which [`gate`] parses.
#[must_use]
pub fn gate_name(gate: DecayKind) -> &'static str {
    match gate {
        DecayKind::Log => "log",
        DecayKind::Softplus => "softplus",
        DecayKind::LowerBound(_) => "lower_bound",
    }
}

impl Mode {
    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Update => "update",
            Self::Snapshots => "snapshots",
            Self::Verify => "verify",
            Self::Resume => "resume",
            Self::Commit => "commit",
            Self::TokenSlots => "token_slots",
        }
    }

    /// Whether each state of the pool is read and written once, as by the floor.
    #[must_use]
    pub fn in_place(self) -> bool {
        matches!(self, Self::Update | Self::Resume | Self::Commit)
    }

    /// Whether states of the pool are written.
    #[must_use]
    pub fn updates(self) -> bool {
        !matches!(self, Self::Verify | Self::Snapshots)
    }

    /// Whether there are previous tokens.
    #[must_use]
    pub fn has_previous(self) -> bool {
        matches!(self, Self::Resume | Self::Commit)
    }
}

impl Cell {
    /// Whether the operator has such a launch.
    #[must_use]
    pub fn exists(&self) -> bool {
        let has_states = self.state == DType::F32 || self.layout == StateLayout::KLast;
        let parallel = (has_states || !self.op.is_layer())
            && self.tokens <= self.most_parallel()
            && (self.dim == 128 || self.op.operator() == Operator::Gdn)
            && !matches!(self.mode, Mode::Snapshots | Mode::TokenSlots);
        if self.formulation == Formulation::Parallel && !parallel {
            return false;
        }
        if self.op.is_layer() {
            let decode = matches!(self.mode, Mode::Update | Mode::Verify);
            let several = decode || matches!(self.mode, Mode::Snapshots | Mode::Resume);
            return if self.tokens == 1 {
                decode && self.formulation == Formulation::Recurrent
            } else {
                several
            };
        }
        let decode = self.op.operator() == Operator::Gdn
            && self.tokens == 1
            && self.formulation == Formulation::Recurrent
            && matches!(self.mode, Mode::Update | Mode::Verify);
        (self.op == Op::GdnDecode) == decode && !(self.slots && self.mode == Mode::TokenSlots)
    }

    /// Most tokens of the parallel formulation.
    fn most_parallel(&self) -> usize {
        match self.op.is_layer() {
            true => 8,
            false => 16,
        }
    }

    /// Form of the gates.
    #[must_use]
    pub fn gates(&self) -> GateKind {
        match self.op.operator() {
            Operator::Gdn => GateKind::Raw(self.model.beta),
            Operator::Kda => GateKind::Kda(self.gate, KdaBeta::Given),
        }
    }

    /// Value head dim, V.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        value_dim(self.dim)
    }

    /// The two inner dims of a state.
    #[must_use]
    pub fn state_dims(&self) -> [usize; 2] {
        match self.layout {
            StateLayout::KLast => [self.value_dim(), self.dim],
            StateLayout::VLast => [self.dim, self.value_dim()],
        }
    }

    /// Channels of a layer's convolution, D.
    #[must_use]
    pub fn channels(&self) -> usize {
        2 * self.model.heads * self.dim + self.model.value_heads * self.value_dim()
    }

    /// State of the level-2 cache in words: cold or warm.
    #[must_use]
    pub fn l2(&self) -> &'static str {
        if self.cold { "cold" } else { "warm" }
    }

    /// Bytes of the states of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.model.value_heads * self.dim * self.value_dim() * self.state.size_of()
    }

    /// Bytes of the pool of one set.
    #[must_use]
    pub fn pool_bytes(&self) -> usize {
        let slots = match self.mode {
            Mode::TokenSlots => self.tokens,
            _ => 1,
        };
        self.batch * slots * self.row_bytes()
    }

    /// Bytes of the snapshots of one set.
    #[must_use]
    pub fn snapshot_bytes(&self) -> usize {
        match self.mode {
            Mode::Snapshots => self.batch * self.tokens * self.row_bytes(),
            _ => 0,
        }
    }

    /// Title of the table that the cell is in: the properties that all of its cells share.
    #[must_use]
    pub fn title(&self) -> String {
        let Self {
            model, dim, state, ..
        } = self;
        let dims = match self.value_dim() {
            value_dim if value_dim == *dim => format!("K=V={dim}"),
            value_dim => format!("K={dim} V={value_dim}"),
        };
        let mut title = format!(
            "{} {} (H={} HV={}) {dims} {state} {} {}",
            self.op.name(),
            model.name,
            model.heads,
            model.value_heads,
            self.layout,
            self.mode.name(),
        );
        if self.formulation == Formulation::Parallel {
            title += " parallel";
        }
        if self.op == Op::KdaRecurrent {
            title = format!("{title} gate={}", gate_name(self.gate));
        }
        if self.slots {
            title += " slots";
        }
        if !self.cold {
            title += " warm";
        }
        title
    }
}
