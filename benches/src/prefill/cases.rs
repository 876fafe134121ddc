//! Cases of the table of prefills.

use gated_delta::{Activation, DType, KdaBeta, StateLayout};
use gated_delta_harness::arguments::{DecayKind, Operator, value_dim};

use crate::cell::gate_name;
use crate::inputs::LOWER_BOUND;
use crate::shapes::{self, Model};

/// Heads H and HV of the table, of GDN and of KDA.
pub const HEADS: [[usize; 2]; 2] = [shapes::GDN[0].head_counts(), shapes::KDA[0].head_counts()];
/// Heads of GDN's and of KDA's layers, whole or on one of several GPUs.
const OF_SHARDS: [&[[usize; 2]]; 2] = [
    &[
        [2, 8],
        [4, 8],
        [4, 16],
        [8, 16],
        [8, 32],
        [16, 32],
        [16, 48],
        [16, 64],
    ],
    &[[4, 4], [8, 8], [12, 12], [16, 16], [32, 32], [64, 64]],
];
/// Rows of the cases for shards.
const LONG: &[&str] = &[
    "1x1024", "1x4096", "1x16384", "1x32768", "1x65536", "8x1024",
];
/// More rows, for the table's heads alone.
const MORE: &[&str] = &[
    "1x64",
    "1x256",
    "8x16",
    "8x128",
    "32x512",
    "2048 + 63x1",
    "8 tails",
];
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
    /// Heads H and HV, if they are neither the model's nor the bench's.
    pub heads: Option<[usize; 2]>,
    /// Form of KDA's gate.
    pub gate: DecayKind,
    /// Form of KDA's β.
    pub beta: KdaBeta,
    /// Whether the launch normalises q and k. In a bare case they are normalised before it.
    pub qk_l2norm: bool,
    /// Tokens of each row.
    pub lengths: Vec<usize>,
    /// Tokens from one checkpoint to the next.
    pub every: Option<usize>,
    /// Tokens of a split, on request.
    pub split: Option<u32>,
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
            heads: None,
            gate: DecayKind::Log,
            beta: KdaBeta::Given,
            qk_l2norm: true,
            lengths,
            every: None,
            split: None,
            state: DType::F32,
            layout: StateLayout::KLast,
            dim: 128,
            layer: false,
        }
    }

    /// Operator, heads, rows and unusual properties: the key of a row, and of a peer's time.
    #[must_use]
    pub fn title(&self) -> String {
        let mut title = match (self.model, self.operator) {
            (Some(model), _) => format!("{} ", model.name),
            (None, Operator::Kda) => "KDA ".to_owned(),
            (None, Operator::Gdn) => String::new(),
        };
        match (self.operator, self.heads) {
            (_, None) => {}
            (Operator::Kda, Some([h, hv])) if h == hv => title += &format!("{h} "),
            (_, Some([h, hv])) => title += &format!("{h}/{hv} "),
        }
        title + &self.rows()
    }

    /// Rows and unusual properties.
    pub(crate) fn rows(&self) -> String {
        let mut title = self.name.to_owned();
        if self.gate != DecayKind::Log {
            title += &format!(", {}", gate_name(self.gate));
        }
        if self.beta == KdaBeta::Logit {
            title += ", logits";
        }
        if !self.qk_l2norm {
            title += ", bare";
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
        if let Some(split) = self.split {
            title += &format!(", splits of {split}");
        }
        title
    }

    /// Heads H and HV, where those of the bench are `of_bench`.
    pub(crate) fn heads(&self, of_bench: [[usize; 2]; 2]) -> [usize; 2] {
        let of_model = self.model.as_ref().map(Model::head_counts);
        let of_operator = of_bench[usize::from(self.operator == Operator::Kda)];
        self.heads.or(of_model).unwrap_or(of_operator)
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
}

/// Tokens of each row of a launch, by its name.
fn lengths(name: &str) -> Vec<usize> {
    if name == "8 tails" {
        return vec![37, 64, 12, 51, 30, 7, 60, 21];
    }
    let number = |text: &str| text.parse().unwrap_or(0);
    let rows = name
        .split(" + ")
        .flat_map(|part| match part.split_once('x') {
            Some((rows, tokens)) => vec![number(tokens); number(rows)],
            None => vec![number(part)],
        });
    rows.collect()
}

/// All cases of the table, in its order.
#[must_use]
pub fn cases() -> Vec<Case> {
    let plain = [
        "1x64",
        "1x256",
        "1x1024",
        "1x2048",
        "1x4096",
        "1x16384",
        "8x128",
        "8x1024",
        "32x512",
        "2048 + 63x1",
        "31x1 + 2048 + 32x1",
        "63x1 + 2048",
        // Single tokens alone, and 1x2048 alone above: the three mixed batches are compared with both.
        "63x1",
        "8 tails",
        "8x16",
    ];
    let plain = plain.map(|name| Case::new(name, lengths(name)));
    let of_operator = |operator| {
        let plain = plain.clone().map(|case| Case { operator, ..case });
        of_operator(plain, operator)
    };
    let mut cases = of_operator(Operator::Gdn);
    cases.extend(of_operator(Operator::Kda));
    cases.extend(of_models());
    cases
}

/// Cases that are not in the table, measured if the options ask for their heads, for bare cases or for their gate: other heads, q
/// and k normalised before the launch, KDA's bounded gate, V-last states, and every case that a peer was measured in.
#[must_use]
pub fn others() -> Vec<Case> {
    let gdn = Case::new("", Vec::new());
    let kda = with(&gdn, |case| case.operator = Operator::Kda);
    let softplus = with(&kda, |case| case.gate = DecayKind::Softplus);
    let bounded = with(&kda, |case| {
        (case.gate, case.beta) = (DecayKind::LowerBound(LOWER_BOUND), KdaBeta::Logit);
    });
    let bare = |case: &Case| with(case, |case| case.qk_l2norm = false);
    let v_last = |case: &Case| with(case, |case| case.layout = StateLayout::VLast);
    let layer = |case: &Case| with(case, |case| case.layer = true);
    let [whole_gdn, whole_kda] = [&[HEADS[0]][..], &[HEADS[1]][..]];
    let [gdn_heads, kda_heads] = OF_SHARDS;
    let cells = [
        (gdn.clone(), gdn_heads, [LONG, &[]]),
        (bare(&gdn), gdn_heads, [LONG, &[]]),
        (bare(&gdn), whole_gdn, [MORE, &[]]),
        (v_last(&gdn), whole_gdn, [LONG, MORE]),
        (layer(&gdn), whole_gdn, [LONG, MORE]),
        (kda.clone(), kda_heads, [LONG, &[]]),
        (bare(&kda), whole_kda, [LONG, MORE]),
        (v_last(&kda), whole_kda, [LONG, MORE]),
        (bounded.clone(), kda_heads, [LONG, &[]]),
        (bounded.clone(), whole_kda, [MORE, &[]]),
        (layer(&softplus), whole_kda, [LONG, MORE]),
        (layer(&bounded), whole_kda, [LONG, MORE]),
    ];
    let known: Vec<String> = cases().iter().map(Case::title).collect();
    let mut others = Vec::new();
    for (like, heads, rows) in cells {
        for &heads in heads {
            let heads = Some(heads).filter(|&heads| heads != like.heads(HEADS));
            let of_rows = |&name: &&'static str| Case {
                name,
                lengths: lengths(name),
                heads,
                ..like.clone()
            };
            others.extend(rows.into_iter().flatten().map(of_rows));
        }
    }
    others.retain(|case| !known.contains(&case.title()));
    others
}

/// A case that differs from `case` by `change`.
fn with(case: &Case, change: impl FnOnce(&mut Case)) -> Case {
    let mut case = case.clone();
    change(&mut case);
    case
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
