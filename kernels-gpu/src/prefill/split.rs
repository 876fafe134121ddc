//! Long rows in *splits*, for few heads: docs/prefill.md, Splits.
//!
//! A split ends at each multiple of [`StepConstants::split`] tokens of a sequence. In a scan, each block has one split of a row.
//! There are two passes of the scan, and a carry between them:
//!
//! - [`Pass::Transition`]: for each split whose end the row reaches, S₁ = S₀ M + B. One block computes B, from zeros; another
//!   computes M, from the identity and without values.
//! - `Carry`: from split to split, S ← S M + B.
//! - [`Pass::Output`]: o of each split, from the state carried to its start; and the final state, from the row's last split.
//!
//! So the bits of the state at the end of a split follow from M and B alone, whether the row goes on or ends there. A first part
//! of one token has no product: B is the state after that token, and M is not computed.
//!
//! States and transitions are in the workspace in f32, in the order of the scan's threads (`state::store_carried`).

use super::rows::Span;
use super::workspace::{behind_units, leaves_tokens, tokens_bytes};
use crate::math::power::divided_long;
use crate::step::{PrefillParams, StepConstants};

/// What a scan over rows in splits computes, as [`StepConstants::pass`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// o, checkpoints and final states; the only pass for rows without splits.
    Output = 0,
    /// B and M.
    Transition = 1,
}

/// Factor of the identity from which M is computed; M is divided by it afterwards. So f16 holds elements that are smaller by this
/// factor, and no product is large enough to be checked ([`super::range`]).
pub const IDENTITY: f32 = 32.0;

/// The part of a row that a block has.
#[derive(Clone, Copy)]
pub struct Part {
    /// Turn of the row.
    pub turn: u32,
    /// Index of the split, counted from the row's start.
    pub i: u32,
    /// Whether the block computes M, not B.
    pub is_transition: bool,
}

impl Part {
    /// The part for a turn of the scan's grid.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_turn(
        is_split: bool,
        (c, params): (&StepConstants, &PrefillParams),
        turn: u32,
    ) -> Self {
        if !is_split {
            return Self {
                turn,
                i: 0,
                is_transition: false,
            };
        }
        let (half, is_transition) = if c.pass == Pass::Transition as u32 {
            (turn / 2, is_transition(turn))
        } else {
            (turn, false)
        };
        Self {
            turn: half / params.splits,
            i: half % params.splits,
            is_transition,
        }
    }

    /// Tokens of the row's part that the pass processes; none if there is nothing to compute.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(&self, c: &StepConstants, row: &Span) -> Span {
        let mut own = row.split(c.split, self.i);
        let is_made = c.pass == Pass::Output as u32
            || row.ends_split(c.split, self.i)
                && !(self.is_transition && is_direct(self.i, own.count));
        if !is_made {
            own.count = 0;
        }
        own
    }
}

/// Whether a turn of the pass for transitions computes M, not B.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn is_transition(turn: u32) -> bool {
    !turn.is_multiple_of(2)
}

/// Whether a part of a row is processed as a single token, without a product at its end.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn is_direct(i: u32, count: u32) -> bool {
    i == 0 && count == 1
}

/// Index of a part's split, counted from the start of its row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn number_of(c: &StepConstants, row: &Span, part: &Span) -> u32 {
    let [first, own] = [row.position, part.position].map(|at| divided_long(at, c.split).0);
    (own - first) as u32
}

/// Upper bound of the number of stored states for rows of `total` tokens, per value head: at the start of each row and after each
/// of its splits.
#[must_use]
pub const fn states(total: u64, rows: u64, every: u32) -> u64 {
    total / every as u64 + 2 * rows
}

/// Bytes of a state and a transition of `value_heads` value heads.
#[must_use]
pub const fn bytes_of_state(value_heads: u32, k: u32) -> u64 {
    8 * value_heads as u64 * k as u64 * k as u64
}

/// Address of 64 rows, from row `first` on, of a value head's state at the start of split `i` of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn state<const K: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    per_channel: bool,
    (row, i): (&Span, u32),
    (hv, first): (u32, u32),
) -> u64 {
    // Counted as in `states`: the number of a row's first state follows from its first token.
    let (before, _) = divided_long(row.begin(c, params), c.split);
    let number = before + 2 * row.b as u64 + i as u64;
    let of_tokens = if leaves_tokens(c, K) {
        tokens_bytes(params.rows, c.h * c.ratio, K)
    } else {
        0
    };
    let base = behind_units::<K, K>(c, params, per_channel) + of_tokens;
    let head = number * (c.h * c.ratio) as u64 + hv as u64;
    base + head * bytes_of_state(1, K) + (first * 4 * K) as u64
}

/// Address of the split's transition, which follows the state.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn transition<const K: u32>(state: u64) -> u64 {
    state + 4 * K as u64 * K as u64
}
