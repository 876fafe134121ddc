//! The operators of files, how their gates come, and the tensors that each of them takes.

use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};

use Op::{GdnDecode, GdnMtp, GdnPrefill, KdaPrefill, KdaRecurrent};

/// An operator, as `op` of a file names it.
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
/// Whose states may wait for the tokens of a ring.
pub(crate) const DEFERRED: &[Op] = &[GdnDecode, GdnMtp, KdaRecurrent];

/// Tensors of a problem that are given, and the operators that take them.
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

/// Tensors that a problem leaves behind.
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
    /// Those of GDN.
    pub(crate) const GDN: &[Self] = &[GdnDecode, GdnMtp, GdnPrefill];
    /// All of them.
    pub const ALL: [Self; 5] = [GdnDecode, GdnMtp, GdnPrefill, KdaRecurrent, KdaPrefill];

    /// Whether rows have any number of tokens.
    #[must_use]
    pub fn is_prefill(self) -> bool {
        PREFILL.contains(&self)
    }

    /// That of a layer's dense rows of any number of tokens.
    #[must_use]
    pub fn prefill(operator: Operator) -> Self {
        match operator {
            Operator::Gdn => GdnPrefill,
            Operator::Kda => KdaPrefill,
        }
    }

    /// That of a layer's dense rows of so many tokens, up to 16.
    #[must_use]
    pub fn of(operator: Operator, tokens: usize) -> Self {
        match (operator, tokens) {
            (Operator::Gdn, 1) => GdnDecode,
            (Operator::Gdn, _) => GdnMtp,
            (Operator::Kda, _) => KdaRecurrent,
        }
    }

    /// Its name in files.
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

    /// Names of the tensors that a problem of it may be given.
    pub fn inputs(self) -> impl Iterator<Item = &'static str> {
        taken_by(self, &INPUTS)
    }

    /// Names of the tensors that it may leave behind.
    pub fn outputs(self) -> impl Iterator<Item = &'static str> {
        taken_by(self, &OUTPUTS)
    }

    /// What it is called where several of its launches need something.
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

/// Names of the tensors that decay and β of the previous tokens come from; a new token's are [`GateKind::names`].
#[must_use]
pub fn previous_gates(gates: GateKind) -> [&'static str; 2] {
    match gates {
        GateKind::Raw(_) => ["prev.a", "prev.b"],
        GateKind::Given | GateKind::Kda(..) => ["prev.g", "prev.beta"],
    }
}

/// Names of tensors that these gates exclude, and how the gates are called.
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
