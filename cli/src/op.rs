//! The operators of files, the forms of their gates, and the tensors that each of them takes.

use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};

use Op::{GdnDecode, GdnMtp, GdnPrefill, KdaPrefill, KdaRecurrent};

/// An operator: the value of `op` in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// GDN, one token per row.
    GdnDecode,
    /// GDN, up to 16 tokens per row, or a commit.
    GdnMtp,
    /// GDN, any number of tokens per row.
    GdnPrefill,
    /// KDA, up to 16 tokens per row, or a commit.
    KdaRecurrent,
    /// KDA, any number of tokens per row.
    KdaPrefill,
}

const ALL: &[Op] = &Op::ALL;
const PREFILL: &[Op] = &[GdnPrefill, KdaPrefill];
const SEVERAL_TOKENS: &[Op] = &[GdnMtp, KdaRecurrent];
/// Operators that have deferred write-back.
pub(crate) const DEFERRED: &[Op] = &[GdnDecode, GdnMtp, KdaRecurrent];

/// Input tensors of a problem, and the operators that take them.
const INPUTS: [(&str, &[Op]); 38] = [
    ("q", ALL),
    ("k", ALL),
    ("v", ALL),
    ("a", Op::GDN),
    ("b", Op::GDN),
    ("A_log", ALL),
    ("dt_bias", ALL),
    ("g", ALL),
    ("beta", ALL),
    ("x", ALL),
    ("conv_weight", ALL),
    ("conv_bias", ALL),
    ("conv_state", ALL),
    ("z", ALL),
    ("norm_weight", ALL),
    ("state", ALL),
    ("read_slots", ALL),
    ("write_slots", ALL),
    ("fresh", ALL),
    ("token_slots", SEVERAL_TOKENS),
    ("accepted", SEVERAL_TOKENS),
    (
        "cu_seqlens",
        &[GdnMtp, GdnPrefill, KdaRecurrent, KdaPrefill],
    ),
    ("positions", PREFILL),
    ("checkpoint_slots", PREFILL),
    ("keep", SEVERAL_TOKENS),
    ("prev.x", SEVERAL_TOKENS),
    ("prev.k", SEVERAL_TOKENS),
    ("prev.v", SEVERAL_TOKENS),
    ("prev.a", &[GdnMtp]),
    ("prev.b", &[GdnMtp]),
    ("prev.g", SEVERAL_TOKENS),
    ("prev.beta", SEVERAL_TOKENS),
    ("pending.keys", DEFERRED),
    ("pending.updates", DEFERRED),
    ("pending.decays", DEFERRED),
    ("pending.inputs", SEVERAL_TOKENS),
    ("pending.len", DEFERRED),
    ("pending.base", DEFERRED),
];

/// Results of a problem, and the operators that have them.
const OUTPUTS: [(&str, &[Op]); 9] = [
    ("o", ALL),
    ("state", ALL),
    ("conv_state", ALL),
    ("snapshots", SEVERAL_TOKENS),
    ("conv_snapshots", SEVERAL_TOKENS),
    ("pending.keys", DEFERRED),
    ("pending.updates", DEFERRED),
    ("pending.decays", DEFERRED),
    ("pending.inputs", SEVERAL_TOKENS),
];

impl Op {
    /// Operators of GDN.
    pub(crate) const GDN: &[Self] = &[GdnDecode, GdnMtp, GdnPrefill];
    /// All operators.
    pub const ALL: [Self; 5] = [GdnDecode, GdnMtp, GdnPrefill, KdaRecurrent, KdaPrefill];

    /// Whether rows have any number of tokens.
    #[must_use]
    pub fn is_prefill(self) -> bool {
        PREFILL.contains(&self)
    }

    /// The prefill of `operator`, with dense rows of any number of tokens.
    #[must_use]
    pub fn prefill(operator: Operator) -> Self {
        match operator {
            Operator::Gdn => GdnPrefill,
            Operator::Kda => KdaPrefill,
        }
    }

    /// The operator in files for dense rows of `tokens` tokens, at most 16.
    #[must_use]
    pub fn of(operator: Operator, tokens: usize) -> Self {
        match (operator, tokens) {
            (Operator::Gdn, 1) => GdnDecode,
            (Operator::Gdn, _) => GdnMtp,
            (Operator::Kda, _) => KdaRecurrent,
        }
    }

    /// Name of the operator in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GdnDecode => "gdn_decode",
            GdnMtp => "gdn_mtp",
            GdnPrefill => "gdn_prefill",
            KdaRecurrent => "kda_recurrent",
            KdaPrefill => "kda_prefill",
        }
    }

    /// Names of the input tensors that a problem of this operator may have.
    pub fn inputs(self) -> impl Iterator<Item = &'static str> {
        taken_by(self, &INPUTS)
    }

    /// Names of the results that a problem of this operator may have.
    pub fn outputs(self) -> impl Iterator<Item = &'static str> {
        taken_by(self, &OUTPUTS)
    }

    /// Plural of the operator in error messages about tensors that all of its launches need.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            GdnDecode => "all GDN decodes",
            GdnMtp => "all GDN MTP verifies",
            GdnPrefill => "all GDN prefills",
            KdaRecurrent => "all KDA launches of up to 16 tokens",
            KdaPrefill => "all KDA prefills",
        }
    }
}

fn taken_by(
    op: Op,
    tensors: &'static [(&'static str, &'static [Op])],
) -> impl Iterator<Item = &'static str> {
    let taken = move |(name, takers): &(&'static str, &[Op])| takers.contains(&op).then_some(*name);
    tensors.iter().filter_map(taken)
}

/// Names of the gate tensors of previous tokens. The names for new tokens are [`GateKind::names`].
#[must_use]
pub fn previous_gates(gates: GateKind) -> [&'static str; 2] {
    match gates {
        GateKind::Raw(_) => ["prev.a", "prev.b"],
        GateKind::Given | GateKind::Kda(..) => ["prev.g", "prev.beta"],
    }
}

/// Name of the gates in error messages, and names of the tensors that they exclude.
pub(crate) fn excluded(gates: GateKind) -> (&'static str, &'static [&'static str]) {
    match gates {
        GateKind::Raw(_) => ("raw gates", &["g", "beta", "prev.g", "prev.beta"]),
        GateKind::Given => (
            "g, beta",
            &["a", "b", "A_log", "dt_bias", "prev.a", "prev.b"],
        ),
        GateKind::Kda(DecayKind::Log, _) => ("gate = log", &["A_log", "dt_bias"]),
        GateKind::Kda(..) => ("computed gates", &[]),
    }
}
