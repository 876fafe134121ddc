//! Long rows in *splits*, for few heads: docs/prefill.md, Splits.
//!
//! A split ends at each multiple of [`StepConstants::split`] tokens of a sequence. A chain has a block for each split of a row, in
//! two passes:
//!
//! - [`Pass::Transition`]: of each split that the row goes through to its end, S₁ = S₀ M + B. One block makes B, from zeros; another makes
//!   M, from the identity and without values.
//! - `Carry`: from split to split, S ← S M + B.
//! - [`Pass::Output`]: of each split o, from the state that was carried to its begin; of the row's last split the final state.
//!
//! So the bits of a state at the end of a split follow from M and B alone, whether the row goes on or ends there. A part of one token is
//! no product: B is the state after that token, and M is not made.
//!
//! States and transitions lie in the workspace, in f32, in the order of a chain's threads (`state::store_carried`).

use super::rows::Span;
use super::workspace::{behind_units, leaves_tokens, tokens_bytes};
use crate::math::power::divided_long;
use crate::step::{PrefillParams, StepConstants};

/// What a chain over rows in splits makes, as [`StepConstants::pass`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// o, checkpoints and final states; of rows without splits the only one.
    Output = 0,
    /// B and M.
    Transition = 1,
}

/// The identity from which M is made is so many times as large, and M divided again: f16 holds elements that are as many times smaller,
/// and no product is too large to be looked at.
pub const IDENTITY: f32 = 32.0;

/// Which of a row's parts a block has.
#[derive(Clone, Copy)]
pub struct Part {
    /// Turn of the row.
    pub turn: u32,
    /// The split, from the row's begin on.
    pub i: u32,
    /// Whether M is made, not B.
    pub is_transition: bool,
}

impl Part {
    /// The part of a turn of a chain's grid.
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

    /// The tokens of a row's part that the pass works; none if there is nothing to make of it.
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

/// Whether a turn of the pass for transitions makes M, not B.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn is_transition(turn: u32) -> bool {
    !turn.is_multiple_of(2)
}

/// Whether a part of a row is worked as a single token: its end is no product.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn is_direct(i: u32, count: u32) -> bool {
    i == 0 && count == 1
}

/// Number of the split that a part is of, from the begin of its row on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn number_of(c: &StepConstants, row: &Span, part: &Span) -> u32 {
    let [first, own] = [row.position, part.position].map(|at| divided_long(at, c.split).0);
    (own - first) as u32
}

/// Most states that are kept for rows of `total` tokens, of all value heads: that at the begin of each row, and behind each of its splits.
#[must_use]
pub const fn states(total: u64, rows: u64, every: u32) -> u64 {
    total / every as u64 + 2 * rows
}

/// Bytes of a state and a transition of so many value heads.
#[must_use]
pub const fn bytes_of_state(value_heads: u32, k: u32) -> u64 {
    8 * value_heads as u64 * k as u64 * k as u64
}

/// Address of 64 rows from `first` on of a value head's state at the begin of the `i`-th split of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn state<const K: u32>(
    (c, params): (&StepConstants, &PrefillParams),
    per_channel: bool,
    (row, i): (&Span, u32),
    (hv, first): (u32, u32),
) -> u64 {
    // As `states` counts them: those of a row follow from its first token.
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

/// Address of the transition of that split, behind a state's.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn transition<const K: u32>(state: u64) -> u64 {
    state + 4 * K as u64 * K as u64
}
