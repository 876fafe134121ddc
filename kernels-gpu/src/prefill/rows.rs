//! Which tokens belong to a row, and which of them to a chunk.

use super::{CHUNK, of_lane, units};
use crate::device::warp::{lane_id, warp_ballot, warp_shuffle_idx};
use crate::math::elements::bytes_of;
use crate::math::power::divided_long;
use crate::math::reduce::butterfly_sum;
use crate::state::slot_of;
use crate::step::{PrefillParams, StepConstants};

/// Tokens of a row.
#[derive(Clone, Copy)]
pub struct Span {
    /// Index of the row.
    pub b: u32,
    /// Number of tokens.
    pub count: u32,
    /// Tokens of the sequence before the row's first.
    pub position: u64,
    /// First token among the packed ones; 0 with dense tensors.
    first: u64,
    /// Workspace index of the row's first chunk of more than one token.
    units: u64,
    /// Whether the lengths are consistent and no larger than a row may have; if not, the row has no tokens.
    pub live: bool,
}

/// Consecutive tokens of a row.
#[derive(Clone, Copy)]
pub struct Chunk {
    /// First token.
    pub start: u32,
    /// Number of tokens.
    pub count: u32,
}

impl Span {
    /// Span of no row.
    const NONE: Self = Self {
        b: 0,
        count: 0,
        position: 0,
        first: 0,
        units: 0,
        live: false,
    };

    /// Loads the span of row `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &StepConstants, params: &PrefillParams, b: u32) -> Self {
        let step = &params.layer.step;
        let (mut count, mut first, mut live) = (params.tokens, 0, true);
        let mut begin = b as u64 * params.tokens as u64;
        // SAFETY: the caller's promise; `cu_seqlens` has B + 1 entries and `positions` has B.
        let position = unsafe {
            if c.cu_seqlens_index != 0 {
                let at = |i| slot_of(step.cu_seqlens, c.cu_seqlens_index, i, 0);
                let (start, end) = (at(b as u64), at(b as u64 + 1));
                live = start <= end
                    && end <= step.total_tokens as u64
                    && end - start <= params.tokens as u64;
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

    /// Span held by another lane, of a row that exists and has tokens. Called by all lanes of the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_lane(&self, c: &StepConstants, params: &PrefillParams, lane: u32) -> Self {
        let b = of_lane(self.b, lane);
        let mut position = 0;
        if c.positions_index != 0 {
            position = long(halves(self.position).map(|half| of_lane(half, lane)));
        }
        // The index of a packed token fits in 32 bits.
        let first = of_lane(self.first as u32, lane) as u64;
        let begin = if c.cu_seqlens_index != 0 {
            first
        } else {
            b as u64 * params.tokens as u64
        };
        Self {
            b,
            count: of_lane(self.count, lane),
            position,
            first,
            units: units(begin, b as u64, c.positions_index != 0),
            live: true,
        }
    }

    /// The span in words; the row is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn words(&self) -> [[u32; 4]; 2] {
        let [a, b, c] = [self.position, self.first, self.units].map(halves);
        [[self.b, self.count, a[0], a[1]], [b[0], b[1], c[0], c[1]]]
    }

    /// Restores a span from [`Self::words`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_words([[b, count, low, high], rest]: [[u32; 4]; 2]) -> Self {
        Self {
            b,
            count,
            position: long([low, high]),
            first: long([rest[0], rest[1]]),
            units: long([rest[2], rest[3]]),
            live: true,
        }
    }

    /// Index of the row's first token among the tokens of all rows, packed or dense.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn begin(&self, c: &StepConstants, params: &PrefillParams) -> u64 {
        if c.cu_seqlens_index != 0 {
            self.first
        } else {
            self.b as u64 * params.tokens as u64
        }
    }

    /// Token of the row at which split `i` begins, clamped to the row; splits are counted from the one that has the row's first
    /// token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn split_edge(&self, every: u32, i: u32) -> u32 {
        let (_, before) = divided_long(self.position, every);
        let edge = i as u64 * every as u64;
        edge.saturating_sub(before).min(self.count as u64) as u32
    }

    /// The row's part in split `i` (counted from the split that has the row's first token), as a row of its own: see
    /// [`super::split`]. The part has no tokens if the row does not reach that split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn split(&self, every: u32, i: u32) -> Self {
        let (start, end) = (self.split_edge(every, i), self.split_edge(every, i + 1));
        let units = if start == 0 {
            self.units
        } else {
            self.unit((self.phase() + start) / CHUNK)
        };
        Self {
            b: self.b,
            count: end - start,
            position: self.position + start as u64,
            first: self.first + start as u64,
            units,
            live: self.live,
        }
    }

    /// If the span `is_split`, a part of a row: the span moved back to the row's start, and the index in it of the part's token
    /// `t`. Its count and workspace index stay those of the part.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn in_row(
        self,
        is_split: bool,
        (c, params): (&StepConstants, &PrefillParams),
        t: u32,
    ) -> (Self, u32) {
        let mut before = 0;
        if is_split {
            let position = slot_of(params.positions, c.positions_index, self.b as u64, 0);
            before = (self.position - position) as u32;
        }
        let row = Self {
            position: self.position - before as u64,
            first: self.first - before as u64,
            ..self
        };
        (row, before + t)
    }

    /// Whether the row reaches the end of split `i`, counted from the split that has the row's first token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn ends_split(&self, every: u32, i: u32) -> bool {
        let (_, before) = divided_long(self.position, every);
        (i as u64 + 1) * every as u64 <= before + self.count as u64
    }

    /// Tokens of the sequence between the last multiple of [`CHUNK`] and the row's first token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn phase(&self) -> u32 {
        self.position as u32 % CHUNK
    }

    /// Whether token `t`, the first or the last, is a chunk of one token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_by_itself(&self, t: u32) -> bool {
        let place = (self.phase() + t) % CHUNK;
        let (begins, ends) = (
            t == 0 || place == 0,
            t + 1 == self.count || place == CHUNK - 1,
        );
        begins && ends
    }

    /// Workspace index of the first chunk of more than one token from chunk `j` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn unit_from(&self, j: u32) -> u64 {
        self.units + j.saturating_sub(self.skipped()) as u64
    }

    /// Chunk `j`; empty after the last one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn chunk(&self, j: u32) -> Chunk {
        let edge = |j: u32| (j * CHUNK).saturating_sub(self.phase()).min(self.count);
        Chunk {
            start: edge(j),
            count: edge(j + 1) - edge(j),
        }
    }

    /// 1 if the first chunk is a single token before a multiple of [`CHUNK`], which has no place in the workspace.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn skipped(&self) -> u32 {
        (self.phase() == CHUNK - 1) as u32
    }

    /// Workspace index of chunk `j`, which has more than one token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn unit(&self, j: u32) -> u64 {
        self.units + (j - self.skipped()) as u64
    }

    /// Workspace index of a chunk of more than one token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn unit_of(&self, chunk: Chunk) -> u64 {
        self.unit((self.phase() + chunk.start) / CHUNK)
    }

    /// Chunk with workspace index `unit`, if it belongs to this row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn chunk_of(&self, unit: u64) -> Option<u32> {
        let j = unit
            .wrapping_sub(self.units)
            .wrapping_add(self.skipped() as u64);
        let chunks = (self.count as u64 + self.phase() as u64).div_ceil(CHUNK as u64);
        (unit >= self.units && j < chunks && self.chunk(j as u32).count > 1).then_some(j as u32)
    }

    /// Number of chunks of more than one token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count_of_units(&self) -> u32 {
        if self.count <= 1 {
            return 0;
        }
        let end = self.count as u64 + self.phase() as u64;
        let ends_with_one = end % CHUNK as u64 == 1;
        end.div_ceil(CHUNK as u64) as u32 - self.skipped() - ends_with_one as u32
    }

    /// Address of element `i` of token `t` in a tensor with these strides.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(&self, base: u64, (row, token): (u32, u32), t: u32, i: u32, element: u32) -> u64 {
        let element_index =
            self.b as u64 * row as u64 + (self.first + t as u64) * token as u64 + i as u64;
        base + element_index * bytes_of(element) as u64
    }
}

/// Low and high half.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Joins [`halves`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn long([low, high]: [u32; 2]) -> u64 {
    low as u64 | (high as u64) << 32
}

/// Largest number of rows for which blocks take the long rows first.
const MOST_IN_TURN: u32 = 1024;

/// Returned for a turn without a row. A number in place of an `Option`: docs/compiler.md, One value, not two.
pub const NO_ROW: u32 = u32::MAX;

/// Row of a turn, or [`NO_ROW`]. Packed rows with more tokens than the mean come first, because the longest rows should start
/// first; all other rows are in order. If rows of one token have their own launch, only longer rows have a turn. Each warp
/// searches for itself.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn row_in_turn(c: &StepConstants, params: &PrefillParams, turn: u32) -> u32 {
    let rows = params.rows;
    if params.has_singles != 0 {
        return nth_row(c, params, true, turn);
    }
    if turn >= rows {
        return NO_ROW;
    }
    if c.cu_seqlens_index == 0 || !(2..=MOST_IN_TURN).contains(&rows) {
        return turn;
    }
    let mut longer = 0;
    let mut first = 0;
    while first < rows {
        longer += longer_rows(c, params, first).count_ones();
        first += 32;
    }
    if longer == 0 || longer == rows {
        return turn;
    }
    let (is_longer, before) = if turn < longer {
        (true, turn)
    } else {
        (false, turn - longer)
    };
    // SAFETY: as above.
    unsafe { nth_row(c, params, is_longer, before) }
}

/// The row that `before` of the longer rows precede; or of the other rows, if not `is_longer`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn nth_row(
    c: &StepConstants,
    params: &PrefillParams,
    is_longer: bool,
    mut before: u32,
) -> u32 {
    let rows = params.rows;
    let mut first = 0;
    while first < rows {
        let longer = longer_rows(c, params, first);
        let there = u32::MAX >> (32 - (rows - first).min(32));
        let mut those = if is_longer { longer } else { there & !longer };
        let count = those.count_ones();
        if before < count {
            while before > 0 {
                those &= those - 1;
                before -= 1;
            }
            return first + those.trailing_zeros();
        }
        before -= count;
        first += 32;
    }
    NO_ROW
}

/// Bit mask of the rows among the 32 from `first` on that have more tokens than the mean; or more than one, if rows of one token
/// have their own launch.
///
/// # Safety
/// `params` and `c` describe live tensors; the rows are packed.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn longer_rows(c: &StepConstants, params: &PrefillParams, first: u32) -> u32 {
    let b = first + lane_id();
    let mut longer = false;
    if b < params.rows {
        let span = Span::load(c, params, b);
        let total = params.layer.step.total_tokens as u64;
        longer = if params.has_singles != 0 {
            span.count > 1
        } else {
            span.count as u64 * params.rows as u64 > total
        };
    }
    warp_ballot(longer)
}

/// Row and chunk with workspace index `unit`, if any; indices between rows belong to no row. Each warp searches for itself.
///
/// KDA's intra-chunk pass uses this in place of [`row_of`], because after [`row_of`] ptxas moves two loads of log decays down to
/// their first use, after products (8x1024: +8 %).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn row_at(c: &StepConstants, params: &PrefillParams, unit: u64) -> Option<(Span, u32)> {
    if params.rows == 1 {
        let span = Span::load(c, params, 0);
        return span.chunk_of(unit).map(|j| (span, j));
    }
    let mut first = 0;
    while first < params.rows {
        let b = first + lane_id();
        // Row index + 1; f32 is exact beyond the number of rows of a grid.
        let mut found = [0.0f32];
        if b < params.rows {
            let span = Span::load(c, params, b);
            if span.chunk_of(unit).is_some() {
                found = [(b + 1) as f32];
            }
        }
        let [found] = butterfly_sum(found, 1, 32);
        if found != 0.0 {
            // SAFETY: as above.
            let span = unsafe { Span::load(c, params, found as u32 - 1) };
            return span.chunk_of(unit).map(|j| (span, j));
        }
        first += 32;
    }
    None
}

/// Row and chunk of the `n`-th chunk of more than one token, counted from the first row or, with `FROM_LAST`, from the last. Its
/// workspace index is [`Span::unit`]. Each warp searches for itself.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn row_of<const FROM_LAST: bool>(
    c: &StepConstants,
    params: &PrefillParams,
    mut n: u32,
) -> Option<(Span, u32)> {
    let mut first = 0;
    // A single row needs no search.
    if params.rows > 1 {
        loop {
            if first >= params.rows {
                return None;
            }
            let (lane, rows) = (lane_id(), (params.rows - first).min(32));
            let mut span = Span::NONE;
            if lane < rows {
                let b = if FROM_LAST {
                    params.rows - 1 - (first + lane)
                } else {
                    first + lane
                };
                span = Span::load(c, params, b);
            }
            let count = span.count_of_units();
            let mut sum = count;
            let mut step = 1;
            while step < rows {
                let before = warp_shuffle_idx(f32::from_bits(sum), (lane + 32 - step) % 32);
                if lane >= step {
                    sum += before.to_bits();
                }
                step *= 2;
            }
            let before = warp_ballot(lane < rows && sum <= n).count_ones();
            if before < rows {
                let j = if FROM_LAST {
                    of_lane(sum, before) - 1 - n
                } else {
                    n - of_lane(sum - count, before)
                };
                let span = span.of_lane(c, params, before);
                return Some((span, j + span.skipped()));
            }
            n -= of_lane(sum, rows - 1);
            first += 32;
        }
    }
    // SAFETY: as above.
    let span = unsafe { Span::load(c, params, first) };
    if FROM_LAST {
        let j = span.count_of_units().checked_sub(n + 1)?;
        return Some((span, j + span.skipped()));
    }
    let j = n + span.skipped();
    (span.chunk(j).count > 1).then_some((span, j))
}
