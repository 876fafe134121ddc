//! Launches of a self-test. They cover every entry, and every way of keeping states for each operator, state dtype and layout.

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::{Family, Stage};
use gated_delta_kernels::prefill::workspace::tokens_bytes;
use gated_delta_kernels::prefill::{split, units};

use crate::step::{HeadMap, Kind, Mode, StateLayout, takes_splits};
use crate::tensor::DType;

/// B, the number of rows.
pub const ROWS: usize = 3;
/// P, the number of slots.
pub const SLOTS: usize = 8;
/// Slots that rows read; row 1 is inactive.
pub const READ_SLOTS: [i32; ROWS] = [2, -1, 0];
/// Slots that rows write, if they write other slots than they read.
pub const WRITE_SLOTS: [i32; ROWS] = [1, 3, 4];
/// T, the number of tokens of a launch with token slots.
const TOKEN_SLOTS_TOKENS: usize = 3;
/// Token slots, `[B, T]`; row 1 has no slot to start from.
const TOKEN_SLOTS: [[i32; TOKEN_SLOTS_TOKENS]; ROWS] = [[2, 5, -1], [-1, 6, 7], [0, 3, 1]];
/// Accepted tokens of each row with token slots: row 2 starts from slot 3.
pub const ACCEPTED: [i32; ROWS] = [1, 1, 2];

/// Flags of fresh rows, for launches with fresh rows: rows 1 and 2 are fresh.
pub const FRESH: [i32; ROWS] = [0, 1, -1];
/// W, the number of taps.
pub const TAPS: usize = 4;

/// Destination of the states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// States are not written.
    Nothing,
    /// Each state is written to the slot that it was read from.
    InPlace,
    /// Each state is written to the row's write slot.
    Elsewhere,
    /// The state after each token is written to a token slot.
    EachToken,
}

/// A way of keeping states.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Name for messages.
    pub name: &'static str,
    /// T; 0 in a commit.
    pub tokens: usize,
    /// T'; 0 without previous tokens.
    pub previous: usize,
    pub keep: Keep,
    pub snapshots: bool,
    /// Whether a convolution makes q, k and v.
    pub conv: bool,
    /// Whether the outputs pass a norm.
    pub norm: bool,
    /// Whether some rows are fresh.
    pub fresh: bool,
    /// Whether the launch is packed, with [`PACKED`] tokens, and its rows are the first tokens, one token each. As far as the
    /// host knows, rows may be longer.
    pub packed: bool,
    /// Number of tokens of a split.
    pub split: Option<u32>,
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
            split: None,
        }
    }
}

const RECURRENT: &[Way] = &[
    Way::new("a decode in place", 1, 0, Keep::InPlace),
    Way::new("a decode to other slots", 1, 0, Keep::Elsewhere),
    Way::new("a decode without update", 1, 0, Keep::Nothing),
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

const VERIFY_OF_9: Way = Way::new("a verify of 9 tokens", 9, 0, Keep::Nothing);

/// More than 8 tokens, new or previous, in sets of 8.
const IN_SETS: &[Way] = &[
    VERIFY_OF_9,
    Way::new("a resume of 10 tokens after 11", 10, 11, Keep::Elsewhere),
];

/// More than 8 new tokens, without previous ones.
const PAIR: &[Way] = &[VERIFY_OF_9, Way::new("16 tokens", 16, 0, Keep::InPlace)];

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

/// Prefills of more than 64 tokens, so that a row has two chunks.
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

/// `total` of a launch of packed rows.
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

/// Prefills of three splits of 64 tokens.
const SPLIT_PREFILL: &[Way] = &[Way {
    split: Some(64),
    ..Way::new("a prefill of 130 tokens in splits", 130, 0, Keep::InPlace)
}];

/// The form of the gates: inputs of log decays and betas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    GdnRaw,
    GdnGiven,
    KdaLog,
    KdaSoftplus,
    KdaLowerBound,
}

/// A launch of one entry.
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
    /// `(H, HV)`.
    pub fn heads(&self) -> (usize, usize) {
        let h = if self.key_dim() == 64 { 2 } else { 1 };
        (h, h * self.kind.ratio as usize)
    }

    /// K.
    pub fn key_dim(&self) -> usize {
        self.kind.k_dim as usize
    }

    /// V.
    pub fn value_dim(&self) -> usize {
        self.kind.v_dim as usize
    }

    /// Elements per state slot: the states of all value heads.
    pub fn state(&self) -> usize {
        self.heads().1 * self.key_dim() * self.value_dim()
    }

    /// The two inner dims of a state, in the order of the layout.
    pub fn state_dims(&self) -> [usize; 2] {
        match self.kind.layout {
            StateLayout::KLast => [self.value_dim(), self.key_dim()],
            StateLayout::VLast => [self.key_dim(), self.value_dim()],
        }
    }

    /// The token slots `[B, T]`, if there are any.
    pub fn token_slots(&self) -> Option<[[i32; TOKEN_SLOTS_TOKENS]; ROWS]> {
        (self.way.keep == Keep::EachToken).then_some(TOKEN_SLOTS)
    }

    /// All entries of the launch.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let (single, packed) = (self.kind.single(), self.way.packed);
        let beside = self.kind.beside(self.way.conv);
        let beside = beside.filter(move |&entry| packed || Some(entry) != single);
        let carry = self.kind.carry().filter(|_| self.way.split.is_some());
        beside.chain(carry).chain([self.entry])
    }

    /// Outer dims of the tensors of new tokens: `[B, T]`, packed `[1, total]`.
    pub fn token_dims(&self) -> [usize; 2] {
        match self.way.packed {
            true => [1, PACKED],
            false => [ROWS, self.way.tokens],
        }
    }

    /// Size of the workspace in f32 elements.
    pub fn workspace_elements(&self) -> usize {
        self.kind.prepare().map_or(0, |prepare| {
            let (h, hv) = self.heads();
            let of_unit = prepare.workspace_bytes_per_unit((hv / h) as u32, true, true) as usize;
            let tokens: usize = self.token_dims().iter().product();
            let units = units(tokens as u64, ROWS as u64, false) as usize;
            let of_tokens = tokens_bytes(ROWS as u32, hv as u32, self.kind.v_dim) as usize;
            let of_splits = self.way.split.map_or(0, |every| {
                let states = split::states(tokens as u64, ROWS as u64, every);
                states * split::bytes_of_state(hv as u32, self.kind.k_dim)
            });
            (units * h * of_unit + of_tokens + of_splits as usize).div_ceil(4)
        })
    }

    /// D.
    pub fn channels(&self) -> usize {
        let (h, hv) = self.heads();
        2 * h * self.key_dim() + hv * self.value_dim()
    }

    /// Number of columns of a slot in the pool of windows.
    pub fn window_inputs(&self) -> usize {
        match self.way.keep {
            Keep::EachToken => TAPS - 2 + self.way.tokens,
            _ => TAPS - 1,
        }
    }

    /// The slot and the column where the window of row `b` begins; `None` if the row is inactive or fresh.
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

    /// Number of previous tokens to keep, `[B]`.
    pub fn keep(&self) -> [usize; ROWS] {
        [1, 1, self.way.previous]
    }

    fn is_fresh(&self, b: usize) -> bool {
        self.way.fresh && FRESH[b] != 0
    }

    /// The slot that row `b` starts from; `None` if the row is inactive or fresh.
    pub fn start(&self, b: usize) -> Option<usize> {
        if self.is_fresh(b) { None } else { self.read(b) }
    }

    /// The slot that row `b` names for reading; `None` if it is inactive.
    fn read(&self, b: usize) -> Option<usize> {
        let slot = match self.token_slots() {
            Some(slots) => slots[b][ACCEPTED[b] as usize - 1],
            None => READ_SLOTS[b],
        };
        usize::try_from(slot).ok()
    }

    /// Whether row `b` is active. A fresh row only needs a slot to write. By default this is the slot to read.
    pub fn is_active(&self, b: usize) -> bool {
        self.is_fresh(b) && self.way.keep == Keep::Elsewhere || self.read(b).is_some()
    }

    /// The slot that row `b`'s last or committed state goes to.
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

/// All cases.
pub fn cases() -> Vec<Case> {
    use StateLayout::{KLast, VLast};
    let mut cases = Vec::new();
    let recurrent = with_fresh(RECURRENT);
    let gdn = |family| (family, false);
    let kda = |family| (family, true);
    let each_layout: [(_, &[Way]); 12] = [
        (gdn(Family::RECURRENT), &recurrent),
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
    for per_channel in [false, true] {
        let of = (Family::chunked(Stage::Chain), per_channel);
        family(&mut cases, of, KLast, DType::F32, SPLIT_PREFILL);
    }
    cases.retain(|case| case.way.split.is_none() || takes_splits(case.entry));
    for layout in [KLast, VLast] {
        for state in [DType::F32, DType::Bf16, DType::F16] {
            // A prefill's kernels serve all states. Half of the pairs of layout and dtype are enough: they have both layouts and
            // every dtype.
            let is_of_prefills = (layout == VLast) == (state == DType::Bf16);
            for (of, ways) in each_layout {
                if is_of_prefills || !of.0.is_chunked() {
                    family(&mut cases, of, layout, state, ways);
                }
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
        for (layout, state) in [
            (KLast, DType::Bf16),
            (KLast, DType::F16),
            (KLast, DType::F32),
            (VLast, DType::F32),
            (VLast, DType::Bf16),
            (VLast, DType::F16),
        ] {
            let has_kernels = !of.0.layer || layout == KLast || state == DType::F32;
            if has_kernels {
                family(&mut cases, of, layout, state, ways);
            }
            if !of.0.layer {
                family(&mut cases, of, layout, state, IN_SETS);
                if layout == KLast && state != DType::F32 {
                    family(&mut cases, of, layout, state, PAIR);
                }
            }
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

/// Adds cases that cover every entry of a family, and each of `ways`, at least once.
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
    let of = |tokens: fn(&Way) -> usize| ways.iter().map(tokens).max().unwrap_or(0);
    let tokens = [of(|way| way.tokens), of(|way| way.previous)];
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
        in_sets: false,
        in_pair: false,
        norm: false,
    });
    let kinds = kinds.map(|kind| kind.with_tokens(tokens));
    // Two value heads per query/key head, if the entry supports that.
    let variants = kinds.map(|kind| {
        kind.variants().map(move |entry| {
            let ratio = entry.max_ratio().min(2);
            (Kind { ratio, ..kind }, entry)
        })
    });
    let variants: Vec<_> = variants.into_iter().flatten().collect();
    let count = variants.len().max(ways.len());
    // The two layouts begin with different ways, so that each variant is launched in several ways.
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
