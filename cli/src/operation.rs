//! The operators, how their gates come, and the tensors that each of them takes.

use gated_delta::ops::BetaScale;
use gated_delta::ops::kda_recurrent::KdaBeta;

use Operator::{GdnDecode, GdnMtp, KdaRecurrent};

/// An operator, as `op` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// One token per row.
    GdnDecode,
    /// Up to 16 tokens per row, or a commit.
    GdnMtp,
    /// Up to 16 tokens per row with a decay per key channel, or a commit.
    KdaRecurrent,
}

/// An operator with its gates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    /// [`Operator::GdnDecode`].
    GdnDecode(GdnGate),
    /// [`Operator::GdnMtp`].
    GdnMtp(GdnGate),
    /// [`Operator::KdaRecurrent`].
    KdaRecurrent(KdaGate),
}

/// How GDN's gates come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GdnGate {
    /// Computed from `a`, `b`, `A_log` and `dt_bias`.
    Raw(BetaScale),
    /// `g` is the log decay, `beta` is β.
    Given,
}

/// How KDA's gates come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KdaGate {
    /// What `g` is.
    pub decay: KdaDecay,
    /// What `beta` is.
    pub beta: KdaBeta,
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

const ALL: &[Operator] = &Operator::ALL;
const GDN: &[Operator] = &[GdnDecode, GdnMtp];
const SEVERAL_TOKENS: &[Operator] = &[GdnMtp, KdaRecurrent];

/// Tensors of a problem that are given, and the operators that take them.
const INPUTS: [(&str, &[Operator]); 22] = [
    ("q", ALL),
    ("k", ALL),
    ("v", ALL),
    ("a", GDN),
    ("b", GDN),
    ("A_log", ALL),
    ("dt_bias", ALL),
    ("g", ALL),
    ("beta", ALL),
    ("state", ALL),
    ("read_slots", ALL),
    ("write_slots", ALL),
    ("token_slots", SEVERAL_TOKENS),
    ("accepted", SEVERAL_TOKENS),
    ("cu_seqlens", SEVERAL_TOKENS),
    ("keep", SEVERAL_TOKENS),
    ("prev.k", SEVERAL_TOKENS),
    ("prev.v", SEVERAL_TOKENS),
    ("prev.a", &[GdnMtp]),
    ("prev.b", &[GdnMtp]),
    ("prev.g", SEVERAL_TOKENS),
    ("prev.beta", SEVERAL_TOKENS),
];

/// Tensors that a problem leaves behind.
const OUTPUTS: [(&str, &[Operator]); 3] =
    [("o", ALL), ("state", ALL), ("snapshots", SEVERAL_TOKENS)];

impl Operator {
    /// All of them.
    pub const ALL: [Self; 3] = [GdnDecode, GdnMtp, KdaRecurrent];

    /// Its name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GdnDecode => "gdn_decode",
            GdnMtp => "gdn_mtp",
            KdaRecurrent => "kda_recurrent",
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
            KdaRecurrent => "all KDA launches",
        }
    }
}

fn taken_by(
    operator: Operator,
    tensors: &'static [(&'static str, &'static [Operator])],
) -> impl Iterator<Item = &'static str> {
    let taken = move |(name, takers): &(&'static str, &[Operator])| {
        takers.contains(&operator).then_some(*name)
    };
    tensors.iter().filter_map(taken)
}

impl Operation {
    /// The operator.
    #[must_use]
    pub fn operator(self) -> Operator {
        match self {
            Self::GdnDecode(_) => GdnDecode,
            Self::GdnMtp(_) => GdnMtp,
            Self::KdaRecurrent(_) => KdaRecurrent,
        }
    }

    /// Names of the tensors that decay and β of each token come from.
    #[must_use]
    pub fn token_gates(self) -> [&'static str; 2] {
        match self {
            Self::GdnDecode(GdnGate::Raw(_)) | Self::GdnMtp(GdnGate::Raw(_)) => ["a", "b"],
            _ => ["g", "beta"],
        }
    }

    /// The same of the previous tokens.
    #[must_use]
    pub fn previous_gates(self) -> [&'static str; 2] {
        match self {
            Self::GdnDecode(GdnGate::Raw(_)) | Self::GdnMtp(GdnGate::Raw(_)) => {
                ["prev.a", "prev.b"]
            }
            _ => ["prev.g", "prev.beta"],
        }
    }

    /// Names of gate tensors that these gates exclude, and how the gates are called.
    pub(crate) fn excluded_gates(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::GdnDecode(GdnGate::Raw(_)) | Self::GdnMtp(GdnGate::Raw(_)) => {
                ("raw gates", &["g", "beta", "prev.g", "prev.beta"])
            }
            Self::GdnDecode(GdnGate::Given) | Self::GdnMtp(GdnGate::Given) => (
                "g, beta",
                &["a", "b", "A_log", "dt_bias", "prev.a", "prev.b"],
            ),
            Self::KdaRecurrent(KdaGate {
                decay: KdaDecay::Log,
                ..
            }) => ("gate = log", &["A_log", "dt_bias"]),
            Self::KdaRecurrent(_) => ("computed gates", &[]),
        }
    }
}
