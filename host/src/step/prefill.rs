//! What a prefill has besides: lengths that are no constants, positions, checkpoints, a workspace.

use bytemuck::Zeroable;
use gated_delta_kernels::machine;
use gated_delta_kernels::prefill::norm::is_left;
use gated_delta_kernels::prefill::workspace::{carried_bytes, tokens_bytes};
use gated_delta_kernels::prefill::{ALL_PIECES, CHUNK, units};
use gated_delta_kernels::step::{LayerParams, PrefillParams};

use super::Formulation;
use super::argument::Argument;
use super::check::Found;
use super::checks::{aligned, indices};
use super::launches::Beside;
use super::problem::Problem;
use super::request::{Phase, Request};
use super::select::{Gpu, STRETCHED_FROM};
use crate::Entry;
use crate::error::{Error, excludes};
use crate::shapes::{Named, range};
use crate::tensor::DType;

/// Shared memory of which a multiprocessor has no two.
pub(crate) const ALONE_BYTES: u32 = 116 * 1024;

/// Shared memory beside which a multiprocessor has room for no other block: a chain of which a preparation runs beside keeps its
/// multiprocessors to itself.
pub(crate) const WHOLE_BYTES: u32 = 227 * 1024;

/// Alignment of a workspace, bytes.
pub(super) const WORKSPACE_ALIGNMENT: usize = 16;

/// How long the rows of a launch are: of a prefill, no constant says so.
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
    /// Of what has them in its constants, or needs none.
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
    /// Whether it is a prefill.
    pub(crate) fn is_chunked(&self) -> bool {
        self.formulation == Formulation::Chunked
    }

    /// Whether the caller says of packed rows that each has at most 64 tokens.
    pub(super) fn promises_short_rows(&self) -> bool {
        self.has(Argument::CuSeqlens) && self.max_tokens <= CHUNK as usize
    }

    /// T; of packed rows what the caller says. The check has seen every rank.
    pub(crate) fn most_tokens(&self) -> usize {
        match (self.has(Argument::CuSeqlens), self.get(Argument::O)) {
            (true, _) => self.max_tokens,
            (false, Some(o)) => o.tensor.dims()[1],
            (false, None) => 0,
        }
    }

    /// New tokens of all rows, of packed ones and what is around them. The check has seen every rank.
    pub(super) fn tokens(&self) -> u64 {
        match self.total() {
            Some(total) => total as u64,
            None => u64::from(self.batch()) * self.most_tokens() as u64,
        }
    }

    /// How long the rows are. The check has seen every rank.
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

    /// Most checkpoints that rows which begin their sequences may write.
    pub(super) fn most_checkpoints(&self) -> u64 {
        self.get(Argument::CheckpointSlots).map_or(0, |slots| {
            let [rows, of_row] = [0, 1].map(|dim| slots.tensor.dims()[dim] as u64);
            let every = self.checkpoint_every() as u64;
            match self.has(Argument::CuSeqlens) {
                true => (self.tokens() / every).min(rows * of_row),
                false => rows * (self.most_tokens() as u64 / every).min(of_row),
            }
        })
    }

    /// What a prefill is not for, by name, and what is of a prefill alone.
    pub(super) fn check_chunked(&self) -> Result<(), Error> {
        let of_prefill = [
            (self.has(Argument::Positions), "positions"),
            (self.has(Argument::CheckpointSlots), "checkpoints"),
            (self.has(Argument::Workspace), "workspace"),
        ];
        let other = match self.options.formulation {
            _ if self.is_chunked() => return self.check_prefill(),
            Formulation::Recurrent => "formulation = recurrent",
            Formulation::Parallel => "formulation = parallel",
            // A step that has them is a prefill by choice, unless it has a ring.
            _ => "pending",
        };
        excludes((true, other), &of_prefill, "they are of a prefill")
    }

    fn check_prefill(&self) -> Result<(), Error> {
        let chunked = (true, self.chunked_by());
        excludes(
            chunked,
            &[
                (self.phase != Phase::Step, "a commit"),
                (self.stored.is_some(), "previous"),
            ],
            "a prefill has new tokens and no others",
        )?;
        excludes(
            chunked,
            &[
                (self.has(Argument::Snapshots), "snapshots"),
                (self.has(Argument::TokenSlots), "token_slots"),
            ],
            "a prefill keeps states at multiples of 64 tokens alone: Step::checkpoints",
        )?;
        excludes(
            chunked,
            &[(self.read_only, "read-only states")],
            "a prefill writes the states that it ends with",
        )
    }

    /// Lengths that no table of kernels bounds, positions, checkpoints, and a workspace but for its size.
    pub(super) fn check_lengths(&self, found: &mut Found) -> Result<(), Error> {
        if !self.is_chunked() {
            return Ok(());
        }
        let (rows, tokens) = (found.extents.rows, found.extents.new.tokens);
        if !self.has(Argument::CuSeqlens) && !fits(rows, tokens) {
            let wanted = "below 2^32".to_owned();
            return Err(range("B * T", wanted, rows as u128 * tokens as u128));
        }
        if let Some(positions) = self.get(Argument::Positions) {
            indices(positions, &["B"], &[rows])?;
        }
        if let Some(slots) = self.get(Argument::CheckpointSlots) {
            let chunk = CHUNK as usize;
            let every = self.checkpoint_every();
            if every == 0 || !every.is_multiple_of(chunk) || every > u32::MAX as usize {
                let wanted = "a multiple of 64 below 2^32".to_owned();
                return Err(range("every of checkpoints", wanted, every));
            }
            let [_, of_row] = *slots.rank("[B, C]")?.dims;
            indices(slots, &["B", "C"], &[rows, of_row])?;
            slots.rank::<2>("[B, C]")?.row_stride()?;
            if of_row > u32::MAX as usize {
                return Err(range("C", "below 2^32".to_owned(), of_row));
            }
        }
        match self.get(Argument::Workspace) {
            Some(workspace) => check_workspace_view(workspace),
            None => Ok(()),
        }
    }

    /// What a kernel of a prefill gets; others get what it begins with.
    pub(crate) fn prefill_params(&self, layer: LayerParams) -> PrefillParams {
        use Argument as A;
        if !self.is_chunked() {
            return PrefillParams {
                layer,
                end_piece: ALL_PIECES,
                ..Zeroable::zeroed()
            };
        }
        let is_packed = self.has(A::CuSeqlens);
        let size = |dims: &[usize], dim: usize| dims.get(dim).map_or(0, |&size| size as u32);
        let row = |argument: A| match self.tensor(argument) {
            Some(tensor) if !is_packed => size(tensor.strides(), 0),
            _ => 0,
        };
        let (slots, rows) = (self.tensor(A::CheckpointSlots), self.batch());
        PrefillParams {
            positions: self.address(A::Positions),
            checkpoint_slots: self.address(A::CheckpointSlots),
            workspace: self.address(A::Workspace),
            rows,
            tokens: match is_packed {
                true if self.promises_short_rows() => CHUNK,
                true => u32::MAX,
                false => self.tensor(A::O).map_or(0, |o| size(o.dims(), 1)),
            },
            checkpoints: slots.map_or(0, |slots| size(slots.dims(), 1)),
            checkpoint_slots_row: slots.map_or(0, |slots| size(slots.strides(), 0)),
            q_row: row(A::Q),
            k_row: row(A::K),
            v_row: row(A::V),
            o_row: row(A::O),
            g_row: row(A::Gate),
            b_row: row(A::Beta),
            x_row: row(A::X),
            z_row: row(A::Z),
            first_piece: 0,
            end_piece: ALL_PIECES,
            turns: rows,
            has_singles: 0,
            layer,
        }
    }
}

/// So many tokens are counted in 32 bits.
fn fits(rows: usize, tokens: usize) -> bool {
    rows.checked_mul(tokens)
        .is_some_and(|total| total <= u32::MAX as usize)
}

/// A workspace is what it has to be, but for its size.
fn check_workspace_view(workspace: Named<'_>) -> Result<(), Error> {
    workspace.dtype(&[DType::F32], "f32")?;
    let tensor = workspace.tensor;
    if !tensor.is_contiguous() {
        return Err(Error::Stride {
            tensor: workspace.name,
            wanted: "contiguous",
            got: *tensor.strides(),
        });
    }
    aligned(WORKSPACE_ALIGNMENT, || [(workspace.name, tensor.address())])
}

impl Problem {
    /// Whether it is a prefill.
    pub fn is_chunked(&self) -> bool {
        self.kind.operator.is_chunked()
    }

    /// What is launched with the entry of rows of these lengths: of a prefill, the preparation of rows that are not short,
    /// before it the convolution that they have, rows of one token beside longer ones, and behind all what writes the windows of a
    /// convolution and norms o of rows that are not short.
    pub fn beside(&self, lengths: &Lengths) -> Beside<Entry> {
        if !self.is_chunked() {
            return Beside::NOTHING;
        }
        let c = &self.constants;
        let kind = self.kind_of(lengths);
        let of = |entry: Entry, grid| (entry, self.shape_of(entry, grid));
        let units = lengths.units_in_grid();
        let of_units = |entry: Entry| {
            let blocks = units.saturating_mul(self.blocks_of_unit(entry));
            of(entry, [blocks, 1, 1])
        };
        // Rows of single tokens alone have no units.
        let has_units = self.single(lengths).is_none();
        let convolve = kind.convolve().filter(|_| c.taps > 0);
        let [convolve, prepare] =
            [convolve, kind.prepare()].map(|entry| entry.filter(|_| has_units).map(of_units));
        let finish = kind.finish().and_then(|entry| {
            let channels = 2 * c.h * kind.k_dim + self.value_heads() * kind.v_dim;
            let of_windows = match c.taps {
                2.. => {
                    let of_row = channels.div_ceil(entry.block_of(c.ratio));
                    lengths.rows.saturating_mul(of_row)
                }
                _ => 0,
            };
            let of_norm = match kind.norms_behind() {
                true => units.saturating_mul(self.blocks_of_unit(entry)),
                false => 0,
            };
            let of_tokens = match self.leaves_tokens() {
                true => lengths.rows.saturating_mul(2),
                false => 0,
            };
            let blocks = of_windows.saturating_add(of_tokens).saturating_add(of_norm);
            (blocks > 0).then(|| of(entry, [blocks, 1, 1]))
        });
        let single = kind.single().filter(|_| lengths.has_singles());
        let single = single.map(|entry| of(entry, [self.value_heads(), 1, lengths.rows]));
        Beside {
            convolve,
            prepare,
            single,
            finish,
        }
    }

    /// Blocks that `entry` has for a unit.
    pub(super) fn blocks_of_unit(&self, entry: Entry) -> u32 {
        let (h, ratio) = (self.constants.h, self.constants.ratio);
        let computes = entry.computes();
        let per_channel = self.kind.operator.per_channel();
        computes.map_or(0, |it| it.family.blocks_of_unit(h, ratio, per_channel))
    }

    /// Bytes of the workspace that rows of these lengths take on any GPU: no less than on this one.
    pub fn workspace_bytes_anywhere(&self, lengths: &Lengths) -> u64 {
        let mut elsewhere = *self;
        elsewhere.constants.machine = machine::AMPERE;
        elsewhere.workspace_bytes(lengths)
    }

    /// Bytes of the workspace that rows of these lengths take. Those of a prompt in stretches have a place for what one
    /// leaves for the next; any rows of as many units have it too, which may be one row on some GPU, so that more rows never take less.
    pub fn workspace_bytes(&self, lengths: &Lengths) -> u64 {
        let prepare = match self.is_chunked() && self.single(lengths).is_none() {
            true => self.kind_of(lengths).prepare(),
            false => None,
        };
        prepare.map_or(0, |prepare| {
            let c = &self.constants;
            let of_unit = prepare.workspace_bytes_per_unit(c.ratio, c.makes_values(), is_left(c));
            let of_unit = u64::from(of_unit);
            let of_units = lengths.units() * u64::from(self.constants.h) * of_unit;
            let of_tokens = match self.leaves_tokens() {
                true => tokens_bytes(lengths.rows, self.value_heads(), self.kind.v_dim),
                false => 0,
            };
            let of_units = of_units + of_tokens;
            match lengths.units() >= STRETCHED_FROM.into() {
                true => {
                    let (k, v) = (self.kind.k_dim, self.kind.v_dim);
                    of_units + carried_bytes(self.value_heads(), k, v)
                }
                false => of_units,
            }
        })
    }

    /// There is a workspace of as many bytes as rows of these lengths take.
    pub fn check_workspace(
        &self,
        lengths: &Lengths,
        workspace: Option<Named<'_>>,
    ) -> Result<(), Error> {
        check_workspace(self.workspace_bytes(lengths), workspace)
    }
}

/// There is a workspace of so many bytes, where these are any.
pub(super) fn check_workspace(wanted: u64, workspace: Option<Named<'_>>) -> Result<(), Error> {
    if wanted == 0 {
        return Ok(());
    }
    let bytes = workspace.map(|workspace| {
        let mut bytes = workspace.tensor.dtype().size_of();
        for &dim in &workspace.tensor.dims()[..] {
            bytes *= dim;
        }
        bytes as u64
    });
    match bytes {
        Some(bytes) if bytes >= wanted => Ok(()),
        _ => Err(no_workspace(wanted, bytes)),
    }
}

#[cold]
fn no_workspace(wanted: u64, bytes: Option<u64>) -> Error {
    let wanted = format!("at least {wanted} (Work::workspace_bytes)");
    match bytes {
        Some(bytes) => range("bytes of workspace", wanted, bytes),
        None => range("bytes of workspace", wanted, "no workspace"),
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

    /// Rows along z of the grid of a chain that has so many blocks for each, of which a multiprocessor has one. Where there are more rows
    /// than run at once its blocks go on to others: beside rows of one token, and where rows are of about a length, if that
    /// takes hardly longer by rows than by blocks, which fill all multiprocessors.
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
    fn units(&self) -> u64 {
        units(self.total, self.rows.into(), self.positions)
    }

    /// Units that a grid has blocks for: rows of single tokens alone have none.
    pub fn units_in_grid(&self) -> u32 {
        self.units().max(1) as u32
    }
}
