//! Lengths of the rows of a launch, which are no constants of a prefill.

use gated_delta_kernels::prefill::{CHUNK, units};

use super::argument::Argument;
use super::gpu::Gpu;
use super::request::Request;

/// Lengths of the rows of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    /// B
    pub rows: u32,
    /// Tokens of all rows; those around packed ones count.
    pub total: u64,
    /// Most tokens of a row, by what the caller says.
    pub longest: u64,
    /// They begin anywhere in their sequences.
    pub positions: bool,
}

impl Lengths {
    /// The lengths of a launch whose constants have them, or that needs none.
    pub fn of_rows(rows: u32) -> Self {
        Self {
            rows,
            total: 0,
            longest: 0,
            positions: false,
        }
    }

    /// Nothing is launched: there is no row. One without tokens may carry its state to another slot.
    pub fn are_nothing(&self) -> bool {
        self.rows == 0
    }
}

impl Request<'_> {
    /// The lengths of the rows. The check has seen every rank.
    pub(crate) fn lengths(&self) -> Lengths {
        self.lengths_of(self.batch())
    }

    /// [`Self::lengths`] of so many rows.
    pub(super) fn lengths_of(&self, rows: u32) -> Lengths {
        if !self.is_chunked() {
            return Lengths::of_rows(rows);
        }
        let total = self.tokens();
        let longest = match self.has(Argument::CuSeqlens) {
            true => total.min(self.max_tokens as u64),
            false => self.most_tokens() as u64,
        };
        Lengths {
            rows,
            total,
            longest,
            positions: self.has(Argument::Positions),
        }
    }
}

impl Lengths {
    /// Rows of at most 64 tokens.
    pub fn are_short(&self) -> bool {
        self.longest <= u64::from(CHUNK)
    }

    /// Rows of at most one token.
    pub fn are_single(&self) -> bool {
        self.longest <= 1
    }

    /// Rows of one token have a launch of their own, beside the chain: where rows are half as long as the longest on average, or
    /// less, there may be many. How many there are the GPU alone knows.
    pub fn has_singles(&self) -> bool {
        !self.are_short() && 2 * self.total <= u64::from(self.rows) * self.longest
    }

    /// Rows that a chain's tile is chosen by: with such a launch so many as may be as long as the longest.
    pub fn likely_rows(&self) -> u32 {
        match self.has_singles() {
            true => self.rows.min(self.total.div_ceil(self.longest) as u32),
            false => self.rows,
        }
    }

    /// Grid size in z of a chain that has so many blocks for each row, one on a multiprocessor. With more rows than run at once its
    /// blocks are persistent and take several rows: beside rows of one token, and where lengths are about even, if rows at a time
    /// take hardly longer than blocks at a time, which fill all multiprocessors.
    pub fn turns(&self, blocks_of_row: u64, gpu: Gpu) -> u32 {
        let multiprocessors = u64::from(gpu.multiprocessors);
        let at_once = (multiprocessors / blocks_of_row) as u32;
        if self.has_singles() {
            return at_once.max(self.likely_rows()).min(self.rows);
        }
        let rows = u64::from(self.rows);
        let are_even = 8 * self.total >= 7 * rows * self.longest;
        let by_blocks = (rows * blocks_of_row).div_ceil(multiprocessors);
        let most = by_blocks + by_blocks / 32;
        match are_even && at_once > 0 && rows.div_ceil(at_once.into()) <= most {
            true => at_once.min(self.rows),
            false => self.rows,
        }
    }

    /// Most pieces of more than one token that the rows have.
    pub fn units(&self) -> u64 {
        units(self.total, self.rows.into(), self.positions)
    }

    /// Units that a grid has blocks for: rows of single tokens alone have none.
    pub fn units_in_grid(&self) -> u32 {
        self.units().max(1) as u32
    }
}
