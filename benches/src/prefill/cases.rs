//! Cases of the table of prefills.

use gated_delta::{Activation, DType, StateLayout};
use gated_delta_harness::arguments::{DecayKind, Operator, value_dim};

use crate::cell::gate_name;
use crate::inputs::LOWER_BOUND;
use crate::shapes::{self, Model};

/// Part of a title before the distance of checkpoints.
pub(super) const KEPT: &str = ", a checkpoint every ";

/// Lengths of a launch's rows, and its other properties.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name in the table.
    pub name: &'static str,
    /// Operator of the layer.
    pub operator: Operator,
    /// Model that heads and norm are from. By default the bench's heads for the operator, and SiLU.
    pub model: Option<Model>,
    /// Form of KDA's gate.
    pub gate: DecayKind,
    /// Tokens of each row.
    pub lengths: Vec<usize>,
    /// Tokens from one checkpoint to the next.
    pub every: Option<usize>,
    /// Dtype of the states.
    pub state: DType,
    /// Layout of the states.
    pub layout: StateLayout,
    /// Key head dim K. V is [`value_dim`] of it.
    pub dim: usize,
    /// Whether the launch has a convolution and a norm.
    pub layer: bool,
}

impl Case {
    /// GDN's recurrence with f32 K-last states, K = V = 128.
    #[must_use]
    pub fn new(name: &'static str, lengths: Vec<usize>) -> Self {
        Self {
            name,
            operator: Operator::Gdn,
            model: None,
            gate: DecayKind::Log,
            lengths,
            every: None,
            state: DType::F32,
            layout: StateLayout::KLast,
            dim: 128,
            layer: false,
        }
    }

    /// Name and unusual properties, the key of a peer's time.
    #[must_use]
    pub fn title(&self) -> String {
        let mut title = match (self.model, self.operator) {
            (Some(model), _) => format!("{} {}", model.name, self.name),
            (None, Operator::Kda) => format!("KDA {}", self.name),
            (None, Operator::Gdn) => self.name.to_owned(),
        };
        if self.gate != DecayKind::Log {
            title += &format!(", {}", gate_name(self.gate));
        }
        if self.layer {
            title += ", layer";
        }
        if self.layout == StateLayout::VLast {
            title += ", V-last";
        }
        match (self.dim, self.value_dim()) {
            (128, _) => {}
            (k, v) if k == v => title += &format!(", K = V = {k}"),
            (k, v) => title += &format!(", K = {k}, V = {v}"),
        }
        if let Some(every) = self.every {
            title += &format!("{KEPT}{every}");
        }
        title
    }

    /// Number of tokens of all rows.
    pub(super) fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Tokens of the longest row.
    pub(super) fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Number of checkpoints of each row.
    pub(super) fn checkpoints(&self) -> usize {
        self.every.map_or(0, |every| self.longest() / every)
    }

    /// Number of slots, P: each row starts from one slot, and ends in another.
    pub(super) fn slots(&self) -> usize {
        self.lengths.len() * (2 + self.checkpoints())
    }

    /// Channels of the convolution D, for H and HV heads.
    pub(super) fn channels(&self, [h, hv]: [usize; 2]) -> usize {
        2 * h * self.dim + hv * self.value_dim()
    }

    /// Value head dim, V.
    pub(super) fn value_dim(&self) -> usize {
        value_dim(self.dim)
    }

    /// The two inner dims of a state.
    pub(super) fn state_dims(&self) -> [usize; 2] {
        match self.layout {
            StateLayout::KLast => [self.value_dim(), self.dim],
            StateLayout::VLast => [self.dim, self.value_dim()],
        }
    }

    /// Factor of β, whose other factor is in 0 to 1.
    pub(super) fn beta_scale(&self) -> f32 {
        self.model.map_or(1.0, |model| model.beta.factor())
    }

    /// Activation of the norm.
    pub(super) fn norm(&self) -> Activation {
        self.model.map_or(Activation::Silu, |model| model.norm)
    }

    /// Whether a peer's time with this title is for the same work.
    pub(super) fn is_peers(&self, name: &str) -> bool {
        self.title() == name && self.state == DType::F32
    }
}

/// All cases, in the order of the table.
#[must_use]
pub fn cases() -> Vec<Case> {
    let long = |before: usize| [vec![1; before], vec![2048], vec![1; 63 - before]].concat();
    let tails = || vec![37, 64, 12, 51, 30, 7, 60, 21];
    let plain = [
        Case::new("1x64", vec![64]),
        Case::new("1x256", vec![256]),
        Case::new("1x1024", vec![1024]),
        Case::new("1x2048", vec![2048]),
        Case::new("1x4096", vec![4096]),
        Case::new("1x16384", vec![16384]),
        Case::new("8x128", vec![128; 8]),
        Case::new("8x1024", vec![1024; 8]),
        Case::new("32x512", vec![512; 32]),
        Case::new("2048 + 63x1", long(0)),
        Case::new("31x1 + 2048 + 32x1", long(31)),
        Case::new("63x1 + 2048", long(63)),
        // Single tokens alone, and 1x2048 alone above: the three mixed batches are compared with both.
        Case::new("63x1", vec![1; 63]),
        Case::new("8 tails", tails()),
        Case::new("8x16", vec![16; 8]),
    ];
    let of_operator = |operator| {
        let plain = plain.clone().map(|case| Case { operator, ..case });
        of_operator(plain, operator)
    };
    let mut cases = of_operator(Operator::Gdn);
    cases.extend(of_operator(Operator::Kda));
    cases.extend(of_models());
    cases
}

/// A prompt for each model of docs/models.md's table, from convolution to norm.
fn of_models() -> impl Iterator<Item = Case> {
    let prompt = |model: Model, operator: Operator, gate: DecayKind, dim: usize| Case {
        operator,
        model: Some(model),
        gate,
        dim,
        layer: true,
        ..Case::new("1x1024", vec![1024])
    };
    let gdn = shapes::GDN.into_iter().flat_map(move |model| {
        let dims = match (model.name, model.dim) {
            ("qwen4-exp", _) => vec![128, 64],
            (_, dim) => vec![dim.unwrap_or(128)],
        };
        let prompt = move |dim| prompt(model, Operator::Gdn, DecayKind::Log, dim);
        dims.into_iter().map(prompt)
    });
    let kda = shapes::KDA.into_iter().filter_map(move |model| {
        let gate = match model.name {
            "kimi-linear" => DecayKind::Softplus,
            "glm-5.3-flash" => DecayKind::LowerBound(LOWER_BOUND),
            _ => return None,
        };
        Some(prompt(model, Operator::Kda, gate, 128))
    });
    gdn.chain(kda).flat_map(|case| {
        [DType::F32, DType::Bf16].map(|state| Case {
            state,
            ..case.clone()
        })
    })
}

/// All cases of an operator. `plain` are its cases without unusual properties.
fn of_operator(plain: [Case; 15], operator: Operator) -> Vec<Case> {
    let find = |names: &[&str]| -> Vec<Case> {
        let of = |name: &&str| plain.iter().find(|case| case.name == *name).cloned();
        names.iter().filter_map(of).collect()
    };
    let mut cases = Vec::new();
    for case in &plain {
        for state in [DType::F32, DType::Bf16] {
            cases.push(Case {
                state,
                ..case.clone()
            });
        }
    }
    let some = [
        "1x64",
        "1x1024",
        "1x4096",
        "8x1024",
        "2048 + 63x1",
        "8 tails",
    ];
    if operator == Operator::Kda {
        cases.extend(find(&some).into_iter().map(|case| Case {
            gate: DecayKind::Softplus,
            ..case
        }));
    }
    cases.extend(find(&some).into_iter().map(|case| Case {
        layer: true,
        gate: match operator {
            Operator::Gdn => DecayKind::Log,
            Operator::Kda => DecayKind::Softplus,
        },
        ..case
    }));
    let few = ["1x4096", "8x1024", "8 tails"];
    cases.extend(find(&few).into_iter().map(|case| Case {
        layout: StateLayout::VLast,
        ..case
    }));
    if operator == Operator::Gdn {
        cases.extend(find(&few).into_iter().map(|case| Case { dim: 64, ..case }));
    }
    cases.extend(find(&["1x4096"]).into_iter().map(|case| Case {
        every: Some(256),
        ..case
    }));
    cases
}
