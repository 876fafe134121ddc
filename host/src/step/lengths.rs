//! Lengths of the rows of a launch. For a prefill they are not load-time constants.

use gated_delta_kernels::prefill::{CHUNK, units};

use super::argument::Argument;
use super::gpu::Gpu;
use super::request::Request;

/// Lengths of the rows of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    /// B, the number of rows.
    pub rows: u32,
    /// Number of tokens of all rows, including packed tokens that belong to no row.
    pub total: u64,
    /// Largest number of tokens of a row, according to the caller.
    pub longest: u64,
    /// Whether rows may begin anywhere in their sequences.
    pub positions: bool,
}

impl Lengths {
    /// The lengths for a launch that has them as constants, or does not need them.
    pub fn of_rows(rows: u32) -> Self {
        Self {
            rows,
            total: 0,
            longest: 0,
            positions: false,
        }
    }

    /// Whether nothing is launched, because there are no rows. A row without tokens is launched: it may copy its state to another
    /// slot.
    pub fn are_nothing(&self) -> bool {
        self.rows == 0
    }
}

impl Request<'_> {
    /// The lengths of the rows. Ranks are checked before.
    pub(crate) fn lengths(&self) -> Lengths {
        self.lengths_of(self.batch())
    }

    /// [`Self::lengths`] with B = `rows`.
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
    /// Whether all rows have at most 64 tokens.
    pub fn are_short(&self) -> bool {
        self.longest <= u64::from(CHUNK)
    }

    /// Whether all rows have at most one token.
    pub fn are_single(&self) -> bool {
        self.longest <= 1
    }

    /// Whether rows of one token get a launch of their own, concurrently with the scan. They do if rows are on average at most
    /// half as long as the longest row, because many rows may then have one token. Only the GPU knows their number.
    pub fn has_singles(&self) -> bool {
        !self.are_short() && 2 * self.total <= u64::from(self.rows) * self.longest
    }

    /// Number of rows for the choice of the scan's tile. If rows of one token have a launch of their own, this is the largest
    /// possible number of rows that are as long as the longest one.
    pub fn likely_rows(&self) -> u32 {
        match self.has_singles() {
            true => self.rows.min(self.total.div_ceil(self.longest) as u32),
            false => self.rows,
        }
    }

    /// Grid size in z of a scan with `blocks_of_row` blocks for each row, one block on each multiprocessor. If more rows exist
    /// than run concurrently, blocks may be persistent and process several rows. They are persistent if rows of one token have a
    /// launch of their own. They are also persistent if lengths are about even, and processing whole rows in turn takes hardly
    /// longer than distributing single blocks over all multiprocessors.
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

    /// Largest possible number of chunks of more than one token in the rows.
    pub fn units(&self) -> u64 {
        units(self.total, self.rows.into(), self.positions)
    }

    /// [`Self::units`] for a grid, which has blocks for at least one unit.
    pub fn units_in_grid(&self) -> u32 {
        self.units().max(1) as u32
    }
}
