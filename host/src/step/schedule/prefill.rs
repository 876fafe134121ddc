//! The launches of a prefill around its scan, the segments of a long prompt, and the workspace.

use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::machine;
use gated_delta_kernels::prefill::norm::is_left;
use gated_delta_kernels::prefill::split;
use gated_delta_kernels::prefill::workspace::{carried_bytes, tokens_bytes};

use super::{Beside, Cuts, Launches, Splits};
use crate::Entry;
use crate::error::Error;
use crate::step::gpu::Gpu;
use crate::step::lengths::Lengths;
use crate::step::problem::Problem;
use crate::step::shape::MAX_BATCH;
use crate::tensor::Tensor;
use crate::tensor_checks::{Named, range};

/// Largest number of segments of a prompt.
pub(crate) const MOST_SEGMENTS: usize = 8;

/// Least number of chunks of a prompt that is cut into segments. With fewer chunks, the whole intra-chunk pass takes no longer
/// than a cut costs.
pub(crate) const SEGMENTED_FROM: u32 = 32;

/// Least numbers of chunks of the first segment (its intra-chunk pass overlaps nothing) and of the last segment.
const LEAST_OF_SEGMENT: [u32; 2] = [16, 8];

/// Least growth from one segment to the next, in chunks, if the limit allows it. It keeps the number of segments small.
const LEAST_GROWTH: u32 = 8;

/// Number of a prompt's chunks per chunk of its first segment. It limits a very long prompt to eight segments.
const OF_FIRST_SEGMENT: u32 = 26;

/// Divides a prompt of `units` chunks, whose scan has `blocks` blocks, into segments. Returns the first chunks of all segments except the
/// first, then zeros.
///
/// The intra-chunk pass of a segment runs concurrently with the scan of the previous segment, on the multiprocessors that the
/// scan leaves free. These are at least half of all multiprocessors, and on them the pass takes 0.7 of the scan's time per chunk.
/// A segment may therefore have up to 1.4 times the chunks of the previous segment. It has no more chunks than necessary, so that
/// the results of its pass stay in L2 if they fit. The last segment has the remaining chunks.
pub(crate) fn segments(units: u32, blocks: u64, gpu: Gpu) -> [u32; MOST_SEGMENTS - 1] {
    let mut firsts = [0; MOST_SEGMENTS - 1];
    if units < SEGMENTED_FROM || 2 * blocks > u64::from(gpu.multiprocessors) {
        return firsts;
    }
    let [least_first, least_last] = LEAST_OF_SEGMENT;
    let mut count = units.div_ceil(OF_FIRST_SEGMENT).max(least_first);
    let mut end = 0;
    for (i, first) in firsts.iter_mut().enumerate() {
        end += count;
        if units < end + least_last {
            break;
        }
        *first = end;
        let (rest, most) = (units - end, count + count * 2 / 5);
        if rest <= most {
            break;
        }
        let of_each = rest.div_ceil((MOST_SEGMENTS - 1 - i) as u32);
        count = most.min(of_each.max(count + LEAST_GROWTH));
    }
    firsts
}

impl Problem {
    /// The launches before and after the main entry for rows of these lengths; none if the problem is no prefill. They are: the
    /// convolution and the intra-chunk pass of rows of more than 64 tokens; the rows of one token among longer rows; and the last
    /// launch, which writes windows and applies the norm to o of rows of more than 64 tokens.
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
        // Rows of at most one token have no chunks to prepare.
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
            splits: None,
            single,
            finish,
        }
    }

    /// Largest number of splits of a row of these lengths; 0 if rows are not split.
    pub(crate) fn splits(&self, lengths: &Lengths) -> u32 {
        let every = u64::from(self.constants.split);
        if every == 0 {
            return 0;
        }
        // A row may begin at the last token of a split.
        let before = if lengths.positions { every - 1 } else { 0 };
        (lengths.longest.max(1) + before).div_ceil(every) as u32
    }

    /// The launches of rows in splits. In the grid of a scan, a split counts as one row; in the pass for transitions it counts as
    /// two.
    pub(super) fn launches_of_splits(
        &self,
        entry: Entry,
        (lengths, splits): (&Lengths, u32),
        gpu: Gpu,
        overlaps: bool,
        mut beside: Beside<Entry>,
        shape: LaunchShape,
    ) -> Launches<Entry> {
        let rows = lengths.likely_rows().saturating_mul(splits);
        let of_pass = |of_split: u32, overlaps: bool| {
            let mut shape = shape;
            shape.grid[2] = rows.saturating_mul(of_split).min(MAX_BATCH as u32);
            match overlaps {
                true => self.shape_on(entry, shape, gpu, beside.single.is_some()),
                false => shape,
            }
        };
        // Only rows that reach the end of a split have transitions.
        let reach = lengths.positions || lengths.longest >= u64::from(self.constants.split);
        let carry = self.kind.carry().filter(|_| reach);
        let main = (entry, of_pass(1, overlaps && carry.is_none()));
        beside.splits = carry.map(|carry| {
            let [x, y] = [carry.tiles() * self.constants.ratio, self.constants.h];
            Splits {
                transitions: (entry, of_pass(2, overlaps)),
                carry: (carry, self.shape_of(carry, [x, y, lengths.rows])),
            }
        });
        Launches {
            main,
            beside,
            cuts: Cuts::NONE,
            splits,
        }
    }

    /// Number of blocks of `entry` for a chunk.
    pub(super) fn blocks_of_unit(&self, entry: Entry) -> u32 {
        let (h, ratio) = (self.constants.h, self.constants.ratio);
        let computes = entry.computes();
        let per_channel = self.kind.per_channel;
        computes.map_or(0, |it| it.family.blocks_of_unit(h, ratio, per_channel))
    }

    /// Size in bytes of a workspace that is enough for rows of these lengths on any GPU. It is at least the size for this GPU.
    pub fn workspace_bytes_anywhere(&self, lengths: &Lengths) -> u64 {
        let mut elsewhere = *self;
        elsewhere.constants.machine = machine::AMPERE;
        elsewhere.workspace_bytes(lengths)
    }

    /// Size in bytes of the workspace for rows of these lengths. A prompt in segments needs room for the states between segments.
    /// All rows with as many chunks get this room, because on some GPU they may be one prompt in segments. More rows therefore
    /// never need less.
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
            if c.split != 0 {
                let states = split::states(lengths.total, lengths.rows.into(), c.split);
                let of_state = split::bytes_of_state(self.value_heads(), self.kind.k_dim);
                return of_units + states * of_state;
            }
            match lengths.units() >= SEGMENTED_FROM.into() {
                true => {
                    let (k, v) = (self.kind.k_dim, self.kind.v_dim);
                    of_units + carried_bytes(self.value_heads(), k, v)
                }
                false => of_units,
            }
        })
    }

    /// Checks that the workspace is large enough for rows of these lengths.
    pub fn check_workspace(
        &self,
        lengths: &Lengths,
        workspace: Option<Named<'_>>,
    ) -> Result<(), Error> {
        let workspace = workspace.map(|workspace| workspace.tensor);
        check_workspace(self.workspace_bytes(lengths), workspace)
    }
}

/// Checks that the workspace has at least `wanted` bytes, if `wanted` is not 0.
#[inline]
pub fn check_workspace(wanted: u64, workspace: Option<&Tensor<'_>>) -> Result<(), Error> {
    if wanted == 0 {
        return Ok(());
    }
    let bytes = workspace.map(|workspace| {
        let mut bytes = workspace.dtype().size_of();
        for &dim in &workspace.dims()[..] {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::gpu::MEASURED_ON;

    /// Numbers of chunks of all segments.
    fn counts(units: u32, blocks: u64, multiprocessors: u32) -> Vec<u32> {
        let gpu = Gpu {
            multiprocessors,
            ..MEASURED_ON
        };
        let firsts = segments(units, blocks, gpu).into_iter();
        let firsts = firsts.take_while(|&first| first != 0);
        let edges: Vec<u32> = [0].into_iter().chain(firsts).chain([units]).collect();
        edges.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    #[test]
    fn a_prompt_is_cut_from_so_many_units_on_where_half_of_the_gpu_is_free() {
        assert_eq!(counts(31, 64, 132), [31]);
        assert_eq!(counts(32, 64, 132), [16, 16]);
        assert_eq!(counts(256, 66, 132), [16, 22, 30, 38, 46, 54, 50]);
        assert_eq!(counts(64, 64, 132), [16, 22, 26]);
        assert_eq!(counts(256, 67, 132), [256]);
        assert_eq!(counts(256, 64, 128), counts(256, 64, 132));
        assert_eq!(counts(256, 64, 127), [256]);
        assert_eq!(counts(256, u64::MAX / 4, 132), [256]);
    }

    #[test]
    fn segments_grow_by_no_more_than_they_may() {
        for units in (32..5000).chain([1 << 20, u32::MAX / 64]) {
            let counts = counts(units, 1, 132);
            assert!(counts.len() <= MOST_SEGMENTS, "{units}");
            assert_eq!(counts.iter().sum::<u32>(), units);
            assert!(counts[0] >= 16 && counts.last() >= Some(&8), "{units}");
            for (i, pair) in counts.windows(2).enumerate() {
                // A remainder that is too short for a segment of its own is part of the last segment.
                let rest = if i + 2 == counts.len() { 7 } else { 0 };
                assert!(5 * (pair[1] - rest) <= 7 * pair[0], "{units}: {counts:?}");
            }
        }
    }
}
