//! Cells for entries without a row in the records of a GPU.

use std::collections::BTreeSet;

use gated_delta::{DType, Entry, Formulation, StateLayout};
use gated_delta_harness::arguments::{DecayKind, Operator};
use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch::{Computes, Family, Layout, Stage, States};

use crate::cell::{Cell, Mode, Op};
use crate::deferred::{self, Drafts, OF_4, OF_8};
use crate::prefill;
use crate::shapes::{self, Model};

/// Batch sizes of steps, in the first and in the second round.
const BATCHES: [&[usize]; 2] = [&[64], &[256, 16, 4, 1]];

/// Cases to measure, by table.
#[derive(Default)]
pub struct Wanted {
    /// Steps.
    pub cells: Vec<Cell>,
    /// Steps with deferred write-back.
    pub deferred: Vec<deferred::Case>,
    /// Prefills.
    pub prefills: Vec<prefill::Case>,
}

/// The entries that compute steps, and that are not in `timed`.
pub fn missing(timed: &BTreeSet<String>) -> impl Iterator<Item = Entry> {
    Entry::ALL.iter().copied().filter(|entry| {
        let computes = entry.computes();
        computes.is_some_and(|it| it.family.knows_states()) && !timed.contains(entry.name())
    })
}

impl Wanted {
    /// Cases for `entries`. Round 0 has a cell for each entry, some of which serve several entries. Round 1 has other batches, tokens and
    /// modes.
    #[must_use]
    pub fn of(entries: &[Entry], round: usize) -> Self {
        let mut wanted = Self::default();
        for &entry in entries {
            if let Some(computes) = entry.computes() {
                for per_channel in computes.all_operators() {
                    let operator = match per_channel {
                        true => Operator::Kda,
                        false => Operator::Gdn,
                    };
                    for states in computes.all_states() {
                        wanted.add(entry, (computes, operator, states), round);
                    }
                }
            }
        }
        wanted
    }

    fn add(
        &mut self,
        entry: Entry,
        (computes, operator, states): (Computes, Operator, States),
        round: usize,
    ) {
        let family = computes.family;
        let state = match states.element {
            Element::F32 => DType::F32,
            Element::Bf16 => DType::Bf16,
            Element::F16 => DType::F16,
        };
        let layout = match states.layout {
            Layout::KLast => StateLayout::KLast,
            Layout::VLast => StateLayout::VLast,
        };
        let dim = computes.k as usize;
        if family.is_chunked() {
            let case = |name: &'static str, lengths: Vec<usize>| prefill::Case {
                operator,
                state,
                layout,
                dim,
                ..prefill::Case::new(name, lengths)
            };
            for case in prefills(family, round, case) {
                let same = |known: &prefill::Case| {
                    (known.title(), known.state) == (case.title(), case.state)
                };
                if !self.prefills.iter().any(same) {
                    self.prefills.push(case);
                }
            }
        } else if family.is_deferred() {
            let layer = family.layer;
            let drafts: &[Drafts] = match (family.is_parallel(), round) {
                (false, _) => &[Drafts::NONE],
                (true, 0) => &[OF_4],
                (true, _) => &[OF_4, OF_8],
            };
            for &drafts in drafts {
                for &batch in BATCHES[round] {
                    let case = deferred::Case {
                        operator,
                        layer,
                        heads: deferred::heads(operator),
                        dim,
                        state,
                        batch,
                        drafts,
                    };
                    if !self.deferred.contains(&case) {
                        self.deferred.push(case);
                    }
                }
            }
        } else {
            // Up to 8 tokens of 16-bit K-last states have other entries.
            let is_16_bit_k_last = states.element != Element::F32 && layout == StateLayout::KLast;
            let least = match computes.takes_sets() && is_16_bit_k_last {
                true => 16,
                false => 1,
            };
            for (op, mode, tokens) in steps((family, operator), round) {
                let tokens = tokens.max(least);
                for &batch in BATCHES[round] {
                    let cell = Cell {
                        op,
                        mode,
                        formulation: match family.is_parallel() {
                            true => Formulation::Parallel,
                            false => Formulation::Recurrent,
                        },
                        gate: match (operator, op.is_layer()) {
                            (Operator::Kda, true) => DecayKind::Softplus,
                            _ => DecayKind::Log,
                        },
                        model: model(entry, operator, dim),
                        dim,
                        batch,
                        tokens,
                        state,
                        layout,
                        slots: false,
                        cold: true,
                    };
                    if cell.exists() && !self.cells.contains(&cell) {
                        self.cells.push(cell);
                    }
                }
            }
        }
    }
}

/// A model with heads that the entry accepts.
fn model(entry: Entry, operator: Operator, dim: usize) -> Model {
    match operator {
        Operator::Kda => shapes::KDA[0],
        Operator::Gdn if dim == 96 => shapes::OLMO,
        Operator::Gdn if entry.max_ratio() == 1 => shapes::EQUAL_HEADS,
        Operator::Gdn => shapes::GDN[0],
    }
}

/// Operator, mode and T of the steps of a kernel family.
fn steps((family, operator): (Family, Operator), round: usize) -> Vec<(Op, Mode, usize)> {
    let op = match (operator, family) {
        (Operator::Gdn, Family { layer: true, .. }) => Op::GdnLayer,
        (Operator::Kda, Family { layer: true, .. }) => Op::KdaLayer,
        (Operator::Gdn, _) => Op::GdnMtp,
        (Operator::Kda, _) => Op::KdaRecurrent,
    };
    if family.max_tokens() == 1 {
        return vec![(op, Mode::Update, 1)];
    }
    let modes: &[Mode] = match (family.is_parallel(), op.is_layer(), round) {
        (true, _, 0) => &[Mode::Resume],
        (true, true, _) => &[Mode::Resume, Mode::Update],
        (true, false, _) => &[Mode::Resume, Mode::Verify, Mode::Update],
        (false, _, 0) => &[Mode::Snapshots],
        (false, ..) => &[Mode::Snapshots, Mode::Update],
    };
    let tokens: &[usize] = match round {
        0 => &[4],
        _ => &[4, 8],
    };
    let mut steps: Vec<_> = modes
        .iter()
        .flat_map(|&mode| tokens.iter().map(move |&tokens| (op, mode, tokens)))
        .collect();
    match op {
        Op::KdaRecurrent if round > 0 => steps.push((op, Mode::Update, 1)),
        Op::GdnMtp if round > 0 && family == Family::RECURRENT => {
            steps.push((Op::GdnDecode, Mode::Update, 1));
        }
        _ => {}
    }
    steps
}

/// Cases of the prefills of a kernel family. `case` makes one from a name and lengths.
fn prefills(
    family: Family,
    round: usize,
    case: impl Fn(&'static str, Vec<usize>) -> prefill::Case,
) -> Vec<prefill::Case> {
    let tails = || vec![37, 64, 12, 51, 30, 7, 60, 21];
    match (family.stage(), round) {
        (Some(Stage::Chain), 0) => vec![case("1x1024", vec![1024])],
        (Some(Stage::Chain), _) => vec![case("8x1024", vec![1024; 8]), case("1x4096", vec![4096])],
        (Some(Stage::Short), 0) => vec![case("8 tails", tails())],
        (Some(Stage::Short), _) => vec![case("1x64", vec![64])],
        (Some(Stage::Single), 0) => vec![case("63x1", vec![1; 63])],
        _ => Vec::new(),
    }
}
