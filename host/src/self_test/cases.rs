//! Which launches a self-test makes: every entry, and every way of keeping states of every operator, state dtype and
//! layout.

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::{Family, Stage};
use gated_delta_kernels::prefill::units;
use gated_delta_kernels::prefill::workspace::tokens_bytes;

use crate::step::{HeadMap, Kind, Mode, StateLayout};
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

/// Rows 1 and 2 start from zeros, where any do.
pub const FRESH: [i32; ROWS] = [0, 1, -1];
/// W
pub const TAPS: usize = 4;

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
    /// A convolution makes q, k and v.
    pub conv: bool,
    /// The outputs are normed.
    pub norm: bool,
    /// Some rows start from zeros.
    pub fresh: bool,
    /// Rows of one token are the first of [`PACKED`], and may be longer for all that the host knows.
    pub packed: bool,
}

impl Way {
    const fn new(name: &'static str, tokens: usize, previous: usize, keep: Keep) -> Self {
        Self {
            name,
            tokens,
            previous,
            keep,
            snapshots: false,
            conv: false,
            norm: false,
            fresh: false,
            packed: false,
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

const LAYER_PARALLEL: &[Way] = &[
    Way {
        conv: true,
        norm: true,
        ..Way::new("a layer's verify", 3, 0, Keep::Nothing)
    },
    Way {
        conv: true,
        norm: true,
        fresh: true,
        ..Way::new("a layer of 3 tokens, of fresh rows", 3, 0, Keep::Elsewhere)
    },
    Way {
        conv: true,
        norm: true,
        ..Way::new("a resume of a layer", 2, 3, Keep::Elsewhere)
    },
    Way {
        conv: true,
        fresh: true,
        ..Way::new("a commit of a layer, of fresh rows", 0, 3, Keep::InPlace)
    },
    Way {
        norm: true,
        ..Way::new("a norm of 3 tokens", 3, 0, Keep::InPlace)
    },
];

const LAYER: &[Way] = &[
    Way {
        conv: true,
        norm: true,
        ..Way::new("a layer in place", 1, 0, Keep::InPlace)
    },
    Way {
        conv: true,
        norm: true,
        fresh: true,
        ..Way::new("a layer of fresh rows", 1, 0, Keep::Elsewhere)
    },
    Way {
        conv: true,
        ..Way::new("a convolution without update", 1, 0, Keep::Nothing)
    },
    Way {
        norm: true,
        fresh: true,
        ..Way::new("a norm of fresh rows", 1, 0, Keep::InPlace)
    },
];

const LAYER_MTP: &[Way] = &[
    Way {
        conv: true,
        norm: true,
        ..Way::new("a layer of 2 tokens in place", 2, 0, Keep::InPlace)
    },
    Way {
        conv: true,
        norm: true,
        ..Way::new("a resume of a layer", 2, 2, Keep::Elsewhere)
    },
    Way {
        conv: true,
        norm: true,
        ..Way::new(
            "token slots of a layer",
            TOKEN_SLOTS_TOKENS,
            0,
            Keep::EachToken,
        )
    },
    Way {
        conv: true,
        norm: true,
        snapshots: true,
        fresh: true,
        ..Way::new(
            "a layer of fresh rows with snapshots",
            2,
            0,
            Keep::Elsewhere,
        )
    },
    Way {
        conv: true,
        fresh: true,
        ..Way::new("a commit of a layer, of fresh rows", 0, 2, Keep::InPlace)
    },
    Way {
        norm: true,
        ..Way::new("a norm of 2 tokens", 2, 0, Keep::Nothing)
    },
];

/// Of more than 64 tokens, so that a row has two pieces.
const PREFILL: &[Way] = &[
    Way::new("a prefill of 66 tokens in place", 66, 0, Keep::InPlace),
    Way {
        fresh: true,
        ..Way::new(
            "a prefill of 65 tokens of fresh rows",
            65,
            0,
            Keep::Elsewhere,
        )
    },
    Way {
        conv: true,
        norm: true,
        ..Way::new("a layer's prefill of 67 tokens", 67, 0, Keep::Elsewhere)
    },
    Way {
        conv: true,
        ..Way::new("a convolved prefill of 66 tokens", 66, 0, Keep::InPlace)
    },
];

/// Tokens of a launch of packed rows.
pub const PACKED: usize = 22 * ROWS;

const SINGLE_PREFILL: &[Way] = &[
    Way {
        packed: true,
        ..Way::new("a prefill of rows of one token", 1, 0, Keep::Elsewhere)
    },
    Way {
        packed: true,
        conv: true,
        norm: true,
        fresh: true,
        ..Way::new(
            "a layer's prefill of rows of one token",
            1,
            0,
            Keep::Elsewhere,
        )
    },
];

const SHORT_PREFILL: &[Way] = &[
    Way {
        conv: true,
        norm: true,
        ..Way::new("a layer's prefill of 5 tokens", 5, 0, Keep::Elsewhere)
    },
    Way::new("a prefill of one token in place", 1, 0, Keep::InPlace),
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
        let h = if self.key_dim() == 64 { 2 } else { 1 };
        (h, h * self.kind.ratio as usize)
    }

    /// K
    pub fn key_dim(&self) -> usize {
        self.kind.k_dim as usize
    }

    /// V
    pub fn value_dim(&self) -> usize {
        self.kind.v_dim as usize
    }

    /// Elements of the states of all value heads.
    pub fn state(&self) -> usize {
        self.heads().1 * self.key_dim() * self.value_dim()
    }

    /// The two inner dims of a state.
    pub fn state_dims(&self) -> [usize; 2] {
        match self.kind.layout {
            StateLayout::KLast => [self.value_dim(), self.key_dim()],
            StateLayout::VLast => [self.key_dim(), self.value_dim()],
        }
    }

    /// `[B, T]`
    pub fn token_slots(&self) -> Option<[[i32; TOKEN_SLOTS_TOKENS]; ROWS]> {
        (self.way.keep == Keep::EachToken).then_some(TOKEN_SLOTS)
    }

    /// All that is launched.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let (single, packed) = (self.kind.single(), self.way.packed);
        let beside = self.kind.beside(self.way.conv);
        let beside = beside.filter(move |&entry| packed || Some(entry) != single);
        beside.chain([self.entry])
    }

    /// B and T of what has the new tokens.
    pub fn token_dims(&self) -> [usize; 2] {
        match self.way.packed {
            true => [1, PACKED],
            false => [ROWS, self.way.tokens],
        }
    }

    /// f32 elements of the workspace.
    pub fn workspace_elements(&self) -> usize {
        self.kind.prepare().map_or(0, |prepare| {
            let (h, hv) = self.heads();
            let of_unit = prepare.workspace_bytes_per_unit((hv / h) as u32, true, true) as usize;
            let tokens: usize = self.token_dims().iter().product();
            let units = units(tokens as u64, ROWS as u64, false) as usize;
            let of_tokens = tokens_bytes(ROWS as u32, hv as u32, self.kind.v_dim) as usize;
            (units * h * of_unit + of_tokens).div_ceil(4)
        })
    }

    /// D
    pub fn channels(&self) -> usize {
        let (h, hv) = self.heads();
        2 * h * self.key_dim() + hv * self.value_dim()
    }

    /// Columns of a slot of windows.
    pub fn window_inputs(&self) -> usize {
        match self.way.keep {
            Keep::EachToken => TAPS - 2 + self.way.tokens,
            _ => TAPS - 1,
        }
    }

    /// The slot and the column that the window of row `b` begins at, unless it is inactive or fresh.
    pub fn window(&self, b: usize) -> Option<(usize, usize)> {
        let start = self.start(b)?;
        match self.token_slots() {
            Some(slots) => {
                let column = ACCEPTED[b] as usize - 1;
                usize::try_from(slots[b][0]).ok().map(|slot| (slot, column))
            }
            None => Some((start, 0)),
        }
    }

    /// `[B]`: previous tokens that are kept.
    pub fn keep(&self) -> [usize; ROWS] {
        [1, 1, self.way.previous]
    }

    fn is_fresh(&self, b: usize) -> bool {
        self.way.fresh && FRESH[b] != 0
    }

    /// The slot that row `b` starts from, unless it is inactive or fresh.
    pub fn start(&self, b: usize) -> Option<usize> {
        if self.is_fresh(b) { None } else { self.read(b) }
    }

    /// The slot that row `b` is to read, where it is live.
    fn read(&self, b: usize) -> Option<usize> {
        let slot = match self.token_slots() {
            Some(slots) => slots[b][ACCEPTED[b] as usize - 1],
            None => READ_SLOTS[b],
        };
        usize::try_from(slot).ok()
    }

    /// Whether row `b` is computed: a fresh row needs no slot to read, but that which it writes, by default that.
    pub fn is_active(&self, b: usize) -> bool {
        self.is_fresh(b) && self.way.keep == Keep::Elsewhere || self.read(b).is_some()
    }

    /// The slot that row `b`'s last, or committed, state goes to.
    pub fn end(&self, b: usize) -> Option<usize> {
        if !self.is_active(b) {
            return None;
        }
        match self.way.keep {
            Keep::InPlace => self.read(b),
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
    let (decode, recurrent) = (with_fresh(DECODE), with_fresh(RECURRENT));
    let gdn = |family| (family, false);
    let kda = |family| (family, true);
    let each_layout: [(_, &[Way]); 13] = [
        (gdn(Family::DECODE), &decode),
        (gdn(Family::RECURRENT), several),
        (kda(Family::RECURRENT), &recurrent),
        (gdn(Family::chunked(Stage::Chain)), PREFILL),
        (gdn(Family::chunked(Stage::Chain)), SINGLE_PREFILL),
        (kda(Family::chunked(Stage::Chain)), PREFILL),
        (kda(Family::chunked(Stage::Chain)), SINGLE_PREFILL),
        (gdn(Family::chunked(Stage::Short)), SHORT_PREFILL),
        (kda(Family::chunked(Stage::Short)), SHORT_PREFILL),
        (gdn(Family::DECODE.in_layer()), LAYER),
        (kda(Family::DECODE.in_layer()), LAYER),
        (gdn(Family::RECURRENT.in_layer()), LAYER_MTP),
        (kda(Family::RECURRENT.in_layer()), LAYER_MTP),
    ];
    for layout in [KLast, VLast] {
        for state in [DType::F32, DType::Bf16, DType::F16] {
            for (of, ways) in each_layout {
                family(&mut cases, of, layout, state, ways);
            }
        }
    }
    let parallel = [
        (gdn(Family::PARALLEL), PARALLEL),
        (kda(Family::PARALLEL), PARALLEL),
        (gdn(Family::PARALLEL.in_layer()), LAYER_PARALLEL),
        (kda(Family::PARALLEL.in_layer()), LAYER_PARALLEL),
    ];
    for (of, ways) in parallel {
        for state in [DType::Bf16, DType::F16] {
            family(&mut cases, of, KLast, state, ways);
        }
    }
    cases
}

/// `ways`, and a decode of fresh rows.
fn with_fresh(ways: &[Way]) -> Vec<Way> {
    let fresh = Way {
        fresh: true,
        ..Way::new("a decode of fresh rows", 1, 0, Keep::Elsewhere)
    };
    [ways, &[fresh]].concat()
}

/// Every entry of a family at least once, and each of `ways` at least once.
fn family(
    cases: &mut Vec<Case>,
    (family, per_channel): (Family, bool),
    layout: StateLayout,
    state: DType,
    ways: &[Way],
) {
    let gates: &[GateKind] = if per_channel {
        &[
            GateKind::KdaLog,
            GateKind::KdaSoftplus,
            GateKind::KdaLowerBound,
        ]
    } else {
        &[GateKind::GdnRaw, GateKind::GdnGiven]
    };
    let kinds = [[64, 64], [96, 192], [128, 128]].map(|[k_dim, v_dim]| Kind {
        family,
        per_channel,
        mode: Mode::Update,
        narrow: false,
        layout,
        state,
        k_dim,
        v_dim,
        ratio: 1,
        tokens: 1,
        norm: false,
    });
    // With two value heads to a query/key head where the entry takes them.
    let variants = kinds.map(|kind| {
        kind.variants().map(move |entry| {
            let ratio = entry.max_ratio().min(2);
            (Kind { ratio, ..kind }, entry)
        })
    });
    let variants: Vec<_> = variants.into_iter().flatten().collect();
    let count = variants.len().max(ways.len());
    // The layouts begin with different ways, so that each variant meets several.
    let first = match layout {
        StateLayout::KLast => 0,
        StateLayout::VLast => ways.len() / 2,
    };
    let rounds = variants.iter().cycle().zip(ways.iter().cycle().skip(first));
    for (i, (&(kind, entry), &way)) in rounds.take(count).enumerate() {
        let norm = kind.is_chunked() && way.norm;
        let kind = Kind { norm, ..kind };
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
