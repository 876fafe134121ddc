//! Which tokens are a row's, and which of them are a piece's.

use super::{CHUNK, units};
use crate::math::elements::bytes_of;
use crate::state::slot_of;
use crate::step::{PrefillParams, StepConstants};

/// The tokens of a row.
#[derive(Clone, Copy)]
pub struct Span {
    /// The row.
    pub b: u32,
    /// How many tokens.
    pub count: u32,
    /// Tokens of the sequence before them.
    pub position: u64,
    /// First of them among the packed tokens; 0 where tensors are dense.
    first: u64,
    /// The first unit.
    units: u64,
    /// Whether they are where the lengths say; else there are none.
    pub live: bool,
}

/// Consecutive tokens of a row.
#[derive(Clone, Copy)]
pub struct Piece {
    /// The first.
    pub start: u32,
    /// How many.
    pub count: u32,
}

impl Span {
    /// Of row `b`.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors.
    #[inline(always)]
    pub unsafe fn load(c: &StepConstants, params: &PrefillParams, b: u32) -> Self {
        let step = &params.layer.step;
        let (mut count, mut first, mut live) = (params.tokens, 0, true);
        let mut begin = b as u64 * params.tokens as u64;
        // SAFETY: the caller's promise; there are B + 1 of the one and B of the other.
        let position = unsafe {
            if c.cu_seqlens_index != 0 {
                let at = |i| slot_of(step.cu_seqlens, c.cu_seqlens_index, i, 0);
                let (start, end) = (at(b as u64), at(b as u64 + 1));
                live = start < end && end <= step.total_tokens as u64;
                (begin, first) = (start, start);
                count = if live { (end - start) as u32 } else { 0 };
            }
            slot_of(params.positions, c.positions_index, b as u64, 0)
        };
        Self {
            b,
            count,
            position,
            first,
            units: units(begin, b as u64, c.positions_index != 0),
            live,
        }
    }

    /// Tokens between the last multiple of [`CHUNK`] and the first.
    #[inline(always)]
    fn phase(&self) -> u32 {
        self.position as u32 % CHUNK
    }

    /// Piece `j`; empty behind the last.
    #[inline(always)]
    pub fn piece(&self, j: u32) -> Piece {
        let edge = |j: u32| (j * CHUNK).saturating_sub(self.phase()).min(self.count);
        Piece {
            start: edge(j),
            count: edge(j + 1) - edge(j),
        }
    }

    /// Whether the first piece is a single token before an edge, and so no unit.
    #[inline(always)]
    fn skipped(&self) -> u32 {
        (self.phase() == CHUNK - 1) as u32
    }

    /// The unit of piece `j`, which has one.
    #[inline(always)]
    pub fn unit(&self, j: u32) -> u64 {
        self.units + (j - self.skipped()) as u64
    }

    /// The piece whose unit this is, if it is of this row.
    #[inline(always)]
    pub fn piece_of(&self, unit: u64) -> Option<u32> {
        let j = unit
            .wrapping_sub(self.units)
            .wrapping_add(self.skipped() as u64);
        let pieces = (self.count as u64 + self.phase() as u64).div_ceil(CHUNK as u64);
        (unit >= self.units && j < pieces && self.piece(j as u32).count > 1).then_some(j as u32)
    }

    /// Address of element `i` of token `t` in a tensor with these strides.
    #[inline(always)]
    pub fn at(&self, base: u64, (row, token): (u32, u32), t: u32, i: u32, element: u32) -> u64 {
        let element_index =
            self.b as u64 * row as u64 + (self.first + t as u64) * token as u64 + i as u64;
        base + element_index * bytes_of(element) as u64
    }
}
