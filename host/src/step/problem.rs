//! What a launch is compiled for.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::machine;
use gated_delta_kernels::prefill::workspace::leaves_tokens;
use gated_delta_kernels::step::StepConstants;

use super::MAX_BATCH;
use super::prefill::{ALONE_BYTES, Lengths, WHOLE_BYTES};
use super::select::{Gpu, Kind, serves};
use crate::Entry;
use crate::error::Error;
use crate::raw::Kernel;

/// From more value heads than these on a block has two where it may: each has a multiprocessor then (H200: 132).
const PAIRED_FROM: u32 = 132;

/// What a launch is compiled for: everything but the addresses, B and P, and `total` of packed rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    pub kind: Kind,
    pub constants: StepConstants,
}

/// What is launched up to so many rows, but for the z of its grid, which they are.
#[derive(Clone, Copy, Debug)]
pub struct ByRows<T> {
    pub last: u32,
    pub of: T,
    pub shape: LaunchShape,
}

/// Blocks of a launch.
pub fn blocks_of(shape: &LaunchShape) -> u64 {
    shape.grid.into_iter().map(u64::from).product()
}

/// Whether it takes rows of one token of a prefill.
fn takes_singles(entry: Entry) -> bool {
    let computes = entry.computes();
    computes.is_some_and(|computes| computes.family.takes_singles())
}

impl Problem {
    /// Whether each row's final state is written: by an update or by a commit.
    pub fn writes_final(&self) -> bool {
        self.constants.update_state != 0 || self.constants.previous_tokens != 0
    }

    /// The same for another GPU: of a prefill, what is compiled in follows from what the GPU has.
    pub fn on(mut self, gpu: Gpu) -> Self {
        if self.is_chunked() {
            self.constants.machine = gpu.machine();
            let has_room = |entry: Entry| {
                let bytes = self.kind.shared_bytes(entry) + entry.shared_bytes_of_stage();
                bytes <= gpu.shared_bytes()
            };
            let has_two = self.kind.entries(gpu).all(has_room);
            self.constants.stages = if has_two { 2 } else { 1 };
        }
        self
    }

    /// Warpgroups multiply.
    pub(super) fn is_on_hopper(&self) -> bool {
        self.constants.machine == machine::HOPPER
    }

    /// The kernels of rows of these lengths: short rows have their own on Hopper.
    pub fn kind_of(&self, lengths: &Lengths) -> Kind {
        let is_short = self.is_on_hopper() && lengths.are_short();
        let short = self.kind.of_short_rows().filter(|_| is_short);
        short.unwrap_or(self.kind)
    }

    /// The variant for rows of these lengths on a GPU.
    pub fn entry(&self, lengths: &Lengths, gpu: Gpu) -> Result<Entry, Error> {
        let heads = lengths.likely_rows().saturating_mul(self.value_heads());
        let entry = self.kind_of(lengths).entry(heads, gpu)?;
        Ok(self.single(lengths).unwrap_or(entry))
    }

    /// What is beside a chain where there are rows of one token, and by itself where all are: not where the norm behind a chain would
    /// look for these.
    pub(super) fn single(&self, lengths: &Lengths) -> Option<Entry> {
        let is_alone = lengths.are_single() && !self.leaves_tokens();
        self.kind.single().filter(|_| is_alone)
    }

    /// Whether o of pieces of one token is left for the norm behind a chain.
    pub(super) fn leaves_tokens(&self) -> bool {
        self.is_chunked() && leaves_tokens(&self.constants, self.kind.v_dim)
    }

    /// All variants for rows of these lengths.
    pub fn variants(&self, lengths: &Lengths) -> impl Iterator<Item = Entry> {
        let single = self.single(lengths);
        let of_kind = self.kind_of(lengths).variants();
        of_kind
            .filter(|&entry| !self.is_chunked() || serves(entry, self.constants.machine))
            .chain(single)
    }

    /// Every entry that rows of some lengths get on a GPU.
    pub fn entries(&self, gpu: Gpu) -> Vec<Entry> {
        let mut kinds = self.kind.of_any_lengths();
        kinds.retain(|kind| *kind == self.kind || self.is_on_hopper());
        let entries = kinds.iter().flat_map(|kind| kind.entries(gpu));
        let beside = self.kind.beside(self.constants.taps > 0);
        entries.chain(beside).collect()
    }

    /// What is launched for 1 row and more, of what is no prefill, where nothing but the grid's z goes with B. It ends where a
    /// GPU has no kernel.
    pub fn by_rows(&self, gpu: Gpu) -> impl Iterator<Item = ByRows<Entry>> {
        let heads = self.kind.last_heads(gpu).chain([PAIRED_FROM]);
        let rows = heads.map(|heads| heads / self.value_heads());
        let most = MAX_BATCH as u32;
        let mut rows: Vec<u32> = rows.map(|last| last.clamp(1, most)).chain([most]).collect();
        rows.sort_unstable();
        rows.dedup();
        rows.into_iter().map_while(move |last| {
            let lengths = Lengths::of_rows(last);
            let entry = self.entry(&lengths, gpu).ok()?;
            let (of, shape) = self.launches(entry, &lengths, gpu, true).main;
            Some(ByRows { last, of, shape })
        })
    }

    pub fn kernel(&self, entry: Entry) -> Kernel {
        Kernel::new(entry, self.constants)
    }

    pub fn shape(&self, entry: Entry, lengths: &Lengths) -> LaunchShape {
        let (c, batch) = (&self.constants, lengths.rows);
        // A block has one value head, or all those of a query/key head, or two where one each would take turns.
        let take_turns = batch.saturating_mul(self.value_heads()) > PAIRED_FROM;
        let across = match entry.max_heads() {
            1 if entry.makes_pairs() && c.ratio.is_multiple_of(2) && take_turns => c.ratio / 2,
            1 => c.ratio,
            _ => 1,
        };
        let grid = if takes_singles(entry) {
            [self.value_heads(), 1, batch]
        } else if entry.has_cluster_of_heads() {
            [entry.tiles(), c.h * c.ratio, batch]
        } else {
            [entry.tiles() * across, c.h, batch]
        };
        self.shape_of(entry, grid)
    }

    /// That of blocks of `entry`.
    pub fn shape_of(&self, entry: Entry, grid: [u32; 3]) -> LaunchShape {
        let ratio = self.constants.ratio;
        LaunchShape {
            grid,
            block: entry.block_of(ratio),
            shared_bytes: self.shared_bytes(entry),
            cluster: entry.cluster_of(ratio),
            overlaps: false,
        }
    }

    /// That of a launch on a GPU: it overlaps the one before where the entry may. Blocks that all run at once have a multiprocessor
    /// each then, though they come before all of these are free; where the GPU `is_shared` with the launch behind, they share theirs
    /// with no block of it either.
    pub fn shape_on(
        &self,
        entry: Entry,
        shape: LaunchShape,
        gpu: Gpu,
        is_shared: bool,
    ) -> LaunchShape {
        if !entry.overlaps() {
            return shape;
        }
        let mut shared_bytes = shape.shared_bytes;
        if blocks_of(&shape) <= u64::from(gpu.multiprocessors) {
            let alone = match is_shared {
                true => WHOLE_BYTES,
                false => ALONE_BYTES,
            };
            shared_bytes = shared_bytes.max(alone.min(gpu.shared_bytes()));
        }
        LaunchShape {
            shared_bytes,
            overlaps: true,
            ..shape
        }
    }

    /// Dynamic shared memory of a block of `entry`, bytes.
    pub fn shared_bytes(&self, entry: Entry) -> u32 {
        let spare = if self.constants.tokens_are_bf16() {
            entry.shared_bytes_of_lows()
        } else {
            0
        };
        let of_stages = match self.constants.stages {
            2 => entry.shared_bytes_of_stage(),
            _ => 0,
        };
        self.kind.shared_bytes(entry) + of_stages - spare
    }

    /// Bytes of a slot.
    pub fn state_bytes(&self) -> u64 {
        let elements = u64::from(self.kind.k_dim) * u64::from(self.kind.v_dim);
        u64::from(self.value_heads()) * elements * self.kind.state.size_of() as u64
    }

    /// The load-time constants, as words.
    pub fn words(&self) -> &[u32] {
        self.constants.words()
    }

    pub(super) fn value_heads(&self) -> u32 {
        self.constants.h * self.constants.ratio
    }
}
