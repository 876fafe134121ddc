//! Which launches a self-test makes: every entry, and every way of keeping states of every operator, state dtype and
//! layout.

use gated_delta_kernels::entries::Entry;

use crate::step::select::{Kind, Mode, Operator};
use crate::step::{HeadMap, StateLayout};
use crate::tensor::DType;

/// B
pub const ROWS: usize = 3;
/// P
pub const SLOTS: usize = 8;
/// Row 1 is inactive.
pub const READ_SLOTS: [i32; ROWS] = [2, -1, 0];
/// Another slot for every row.
pub const WRITE_SLOTS: [i32; ROWS] = [1, 3, 4];
/// Tokens of a row with token slots.
const TOKEN_SLOTS_TOKENS: usize = 3;
/// Row 1 would start from no slot.
const TOKEN_SLOTS: [[i32; TOKEN_SLOTS_TOKENS]; ROWS] = [[2, 5, -1], [-1, 6, 7], [0, 3, 1]];
/// With token slots: row 2 starts from slot 3.
pub const ACCEPTED: [i32; ROWS] = [1, 1, 2];

/// Where states go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nowhere.
    Nothing,
    /// Back to where they came from.
    InPlace,
    /// To the write slots.
    Elsewhere,
    /// Each to a slot of its own.
    EachToken,
}

/// A way of keeping states.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// For messages.
    pub name: &'static str,
    /// T; 0 for a commit.
    pub tokens: usize,
    /// T'; 0 without previous tokens.
    pub previous: usize,
    pub keep: Keep,
    pub snapshots: bool,
}

impl Way {
    const fn new(name: &'static str, tokens: usize, previous: usize, keep: Keep) -> Self {
        Self {
            name,
            tokens,
            previous,
            keep,
            snapshots: false,
        }
    }
}

const DECODE: &[Way] = &[
    Way::new("a decode in place", 1, 0, Keep::InPlace),
    Way::new("a decode to other slots", 1, 0, Keep::Elsewhere),
    Way::new("a decode without update", 1, 0, Keep::Nothing),
];

const RECURRENT: &[Way] = &[
    Way::new("a decode in place", 1, 0, Keep::InPlace),
    Way {
        snapshots: true,
        ..Way::new("3 tokens with snapshots", 3, 0, Keep::Elsewhere)
    },
    Way::new("token slots", TOKEN_SLOTS_TOKENS, 0, Keep::EachToken),
    Way::new("a resume", 2, 2, Keep::Elsewhere),
    Way::new("a commit", 0, 2, Keep::InPlace),
];

const PARALLEL: &[Way] = &[
    Way::new("a verify", 3, 0, Keep::Nothing),
    Way::new("an update", 3, 0, Keep::Elsewhere),
    Way::new("a resume", 2, 3, Keep::Elsewhere),
    Way::new("a commit", 0, 3, Keep::InPlace),
    Way::new("a decode in place", 1, 0, Keep::InPlace),
];

/// What log decays and betas are computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    GdnRaw,
    GdnGiven,
    KdaLog,
    KdaSoftplus,
    KdaLowerBound,
}

/// A launch.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub entry: Entry,
    pub kind: Kind,
    pub way: Way,
    pub gates: GateKind,
    pub head_map: HeadMap,
    pub l2norm: bool,
}

impl Case {
    /// H and HV.
    pub fn heads(&self) -> (usize, usize) {
        if self.dim() == 64 { (2, 4) } else { (1, 2) }
    }

    /// K and V.
    pub fn dim(&self) -> usize {
        self.kind.k_dim as usize
    }

    /// `[B, T]`
    pub fn token_slots(&self) -> Option<[[i32; TOKEN_SLOTS_TOKENS]; ROWS]> {
        (self.way.keep == Keep::EachToken).then_some(TOKEN_SLOTS)
    }

    /// `[B]`: previous tokens that are kept.
    pub fn keep(&self) -> [usize; ROWS] {
        [1, 1, self.way.previous]
    }

    /// The slot that row `b` starts from, unless it is inactive.
    pub fn start(&self, b: usize) -> Option<usize> {
        let slot = match self.token_slots() {
            Some(slots) => slots[b][ACCEPTED[b] as usize - 1],
            None => READ_SLOTS[b],
        };
        usize::try_from(slot).ok()
    }

    /// The slot that row `b`'s last, or committed, state goes to.
    pub fn end(&self, b: usize) -> Option<usize> {
        let start = self.start(b)?;
        match self.way.keep {
            Keep::InPlace => Some(start),
            Keep::Elsewhere => Some(WRITE_SLOTS[b] as usize),
            Keep::Nothing | Keep::EachToken => None,
        }
    }
}

/// All of them.
pub fn cases() -> Vec<Case> {
    use StateLayout::{KLast, VLast};
    let mut cases = Vec::new();
    // One token of a GDN layer alone is computed by the decode's kernels.
    let [_, several @ ..] = RECURRENT else {
        return cases;
    };
    for layout in [KLast, VLast] {
        for state in [DType::F32, DType::Bf16] {
            family(&mut cases, Operator::GdnDecode, layout, state, DECODE);
            family(&mut cases, Operator::GdnMtp, layout, state, several);
            family(&mut cases, Operator::KdaRecurrent, layout, state, RECURRENT);
        }
    }
    for parallel in [Operator::GdnMtpParallel, Operator::KdaRecurrentParallel] {
        let operator = parallel(Mode::Update);
        family(&mut cases, operator, KLast, DType::Bf16, PARALLEL);
    }
    cases
}

/// Every entry of a family at least once, and each of `ways` at least once.
fn family(
    cases: &mut Vec<Case>,
    operator: Operator,
    layout: StateLayout,
    state: DType,
    ways: &[Way],
) {
    let gates: &[GateKind] = if operator.per_channel() {
        &[
            GateKind::KdaLog,
            GateKind::KdaSoftplus,
            GateKind::KdaLowerBound,
        ]
    } else {
        &[GateKind::GdnRaw, GateKind::GdnGiven]
    };
    let kinds = [64, 128].map(|k_dim| Kind {
        operator,
        layout,
        state,
        k_dim,
        v_dim: k_dim,
    });
    let variants = kinds.map(|kind| kind.variants().map(move |entry| (kind, entry)));
    let variants: Vec<_> = variants.into_iter().flatten().collect();
    let count = variants.len().max(ways.len());
    let rounds = variants.iter().cycle().zip(ways.iter().cycle());
    for (i, (&(kind, entry), &way)) in rounds.take(count).enumerate() {
        cases.push(Case {
            entry,
            kind,
            way,
            gates: gates[i % gates.len()],
            head_map: [HeadMap::Grouped, HeadMap::Tiled][i % 2],
            l2norm: true,
        });
    }
}
