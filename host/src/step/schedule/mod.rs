//! The launches of a problem, in order, on one stream.

mod parameter;
pub(super) mod prefill;
mod shapes;

pub(crate) use parameter::Parameter;
pub(crate) use shapes::WHOLE_BYTES;

use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::prefill::ALL_CHUNKS;
use gated_delta_kernels::prefill::split::Pass;
use gated_delta_kernels::step::PrefillParams;

use crate::Entry;
use crate::error::Error;
use crate::step::gpu::Gpu;
use crate::step::lengths::Lengths;
use crate::step::problem::Problem;
use crate::step::shape::MAX_BATCH;
use prefill::MOST_SEGMENTS;
use shapes::blocks_of;

/// Range of a prompt's chunks in a launch. Units (chunks of more than one token) have the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub first: u32,
    pub end: u32,
}

impl Segment {
    /// The range of all chunks.
    pub const ALL: Self = Self {
        first: 0,
        end: ALL_CHUNKS,
    };
}

/// One of several launches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Launch<T> {
    pub of: T,
    pub shape: LaunchShape,
    pub segment: Segment,
    /// Whether rows of one token have a launch of their own.
    pub has_singles: bool,
    /// The pass of a scan over rows in splits.
    pub pass: Pass,
    /// Largest number of splits of a row.
    pub splits: u32,
}

impl<T> Launch<T> {
    /// Writes the launch's own fields into the parameter of a prefill.
    #[inline(always)]
    pub fn say(&self, params: &mut PrefillParams) {
        let Segment { first, end } = self.segment;
        (params.first_chunk, params.end_chunk) = (first, end);
        // Only the scan reads `turns`.
        params.turns = self.shape.grid[2];
        params.has_singles = self.has_singles.into();
        params.splits = self.splits;
    }
}

/// The launches around the main entry of a prefill.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Beside<T> {
    /// The convolution, the first launch, over all chunks.
    pub convolve: Option<(T, LaunchShape)>,
    /// The intra-chunk pass, before the main entry, over all chunks or those of a segment.
    pub prepare: Option<(T, LaunchShape)>,
    /// The launches for rows in splits before the main entry's last launch: the same scan for transitions, and the carry of
    /// states. They exist if a row may reach the end of a split.
    pub splits: Option<Splits<T>>,
    /// The launch of rows of one token, after the main entry and concurrent with it.
    pub single: Option<(T, LaunchShape)>,
    /// The last launch, for windows and a norm.
    pub finish: Option<(T, LaunchShape)>,
}

impl<T> Beside<T> {
    pub const NOTHING: Self = Self {
        convolve: None,
        prepare: None,
        splits: None,
        single: None,
        finish: None,
    };

    /// The entries or functions of all these launches.
    pub fn all(self) -> impl Iterator<Item = T> {
        let carry = self.splits.map(|splits| splits.carry);
        let all = [self.convolve, self.prepare, carry, self.single, self.finish];
        all.into_iter().flatten().map(|(of, _)| of)
    }
}

/// The launches for transitions and states of rows in splits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Splits<T> {
    /// The scan for transitions: the main entry with the constants of [`Pass::Transition`].
    pub transitions: (T, LaunchShape),
    pub carry: (T, LaunchShape),
}

/// Division of a prompt into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cuts {
    /// Number of chunks of the prompt.
    units: u32,
    /// Number of blocks of the intra-chunk pass for a chunk.
    blocks_of_unit: u32,
    /// First chunks of all segments except the first, then zeros.
    firsts: [u32; MOST_SEGMENTS - 1],
}

impl Cuts {
    pub const NONE: Self = Self {
        units: 0,
        blocks_of_unit: 0,
        firsts: [0; MOST_SEGMENTS - 1],
    };

    /// The launch shape of the intra-chunk pass of a segment, from the shape for all chunks. If the previous segment's scan overlaps
    /// launches, the pass starts early, runs concurrently with that scan, and waits for it at the end.
    fn shape_of(self, shape: LaunchShape, segment: Segment, overlaps: bool) -> LaunchShape {
        if self == Self::NONE {
            return shape;
        }
        let count = segment.end.min(self.units) - segment.first;
        LaunchShape {
            grid: [count.saturating_mul(self.blocks_of_unit), 1, 1],
            overlaps: overlaps && segment.first != 0,
            ..shape
        }
    }
}

/// All launches of a request, as entries, kernels or compiled functions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Launches<T> {
    /// The only launch, or the launch that has variants. For a prompt in segments, it is launched once per segment.
    pub main: (T, LaunchShape),
    pub beside: Beside<T>,
    pub cuts: Cuts,
    /// Largest number of splits of a row; 0 without splits.
    pub splits: u32,
}

impl<T: Copy> Launches<T> {
    /// A single launch.
    #[cfg(test)]
    pub fn alone(of: T, shape: LaunchShape) -> Self {
        Self {
            main: (of, shape),
            beside: Beside::NOTHING,
            cuts: Cuts::NONE,
            splits: 0,
        }
    }

    /// All launches in order, without an allocation.
    pub fn sequence(&self) -> Sequence<T> {
        let mut all = [None; MOST_LAUNCHES];
        let mut places = all.iter_mut();
        let (has_singles, splits) = (self.beside.single.is_some(), self.splits);
        let mut launch = |of: T, shape: LaunchShape, segment: Segment, pass: Pass| {
            let launch = Launch {
                of,
                shape,
                segment,
                has_singles,
                pass,
                splits,
            };
            if let Some(place) = places.next() {
                *place = Some(launch);
            }
        };
        if let Some((of, shape)) = self.beside.convolve {
            launch(of, shape, Segment::ALL, Pass::Output);
        }
        let (main, overlaps) = (self.main, self.main.1.overlaps);
        let mut segment = Segment::ALL;
        for cut in 0..MOST_SEGMENTS {
            let next = self.cuts.firsts.get(cut).copied().unwrap_or(0);
            segment.end = if next == 0 { ALL_CHUNKS } else { next };
            if let Some((of, shape)) = self.beside.prepare {
                launch(
                    of,
                    self.cuts.shape_of(shape, segment, overlaps),
                    segment,
                    Pass::Output,
                );
            }
            if let Some(splits) = &self.beside.splits {
                let (transitions, carry) = (splits.transitions, splits.carry);
                launch(transitions.0, transitions.1, segment, Pass::Transition);
                launch(carry.0, carry.1, segment, Pass::Output);
            }
            launch(main.0, main.1, segment, Pass::Output);
            if next == 0 {
                break;
            }
            segment.first = next;
        }
        if let Some((of, shape)) = self.beside.single {
            launch(of, shape, Segment::ALL, Pass::Output);
        }
        if let Some((of, shape)) = self.beside.finish {
            launch(of, shape, Segment::ALL, Pass::Output);
        }
        Sequence { all }
    }

    /// All launches in order.
    pub fn in_order(&self) -> Vec<Launch<T>> {
        self.sequence().iter().copied().collect()
    }

    /// The same launches, with each entry replaced by the result of `f` for its pass.
    pub fn try_map<U>(self, f: impl Fn(T, Pass) -> Result<U, Error>) -> Result<Launches<U>, Error> {
        let of_pass = |(of, shape): (T, LaunchShape), pass| Ok::<_, Error>((f(of, pass)?, shape));
        let with = |launch| of_pass(launch, Pass::Output);
        let Beside {
            convolve,
            prepare,
            splits,
            single,
            finish,
        } = self.beside;
        let with_splits = |splits: Splits<T>| {
            Ok::<_, Error>(Splits {
                transitions: of_pass(splits.transitions, Pass::Transition)?,
                carry: with(splits.carry)?,
            })
        };
        Ok(Launches {
            beside: Beside {
                convolve: convolve.map(with).transpose()?,
                prepare: prepare.map(with).transpose()?,
                splits: splits.map(with_splits).transpose()?,
                single: single.map(with).transpose()?,
                finish: finish.map(with).transpose()?,
            },
            main: with(self.main)?,
            cuts: self.cuts,
            splits: self.splits,
        })
    }
}

/// Largest number of launches of a request: two for each segment, and three others.
const MOST_LAUNCHES: usize = 2 * MOST_SEGMENTS + 3;

/// Launches in order, ready to be enqueued one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sequence<T> {
    /// `None` after the last launch.
    all: [Option<Launch<T>>; MOST_LAUNCHES],
}

impl<T> Sequence<T> {
    /// The launches.
    #[inline(always)]
    pub fn iter(&self) -> impl Iterator<Item = &Launch<T>> {
        self.all.iter().map_while(Option::as_ref)
    }
}

/// A launch of up to `last` rows. The number of rows is the z extent of its grid.
#[derive(Clone, Copy, Debug)]
pub struct ByRows<T> {
    pub last: u32,
    pub of: T,
    pub shape: LaunchShape,
}

impl Problem {
    /// The launches of `entry` and around it, for rows of these lengths on a GPU. In the simulator no launch `overlaps`.
    pub fn launches(
        &self,
        entry: Entry,
        lengths: &Lengths,
        gpu: Gpu,
        overlaps: bool,
    ) -> Launches<Entry> {
        let overlaps = overlaps && gpu.overlaps();
        let mut beside = self.beside(lengths);
        // After a scan, early blocks of this launch would only occupy multiprocessors while they wait.
        let finish = beside.finish.as_mut().filter(|_| lengths.are_short());
        for (_, shape) in beside.single.as_mut().into_iter().chain(finish) {
            shape.overlaps = overlaps;
        }
        let mut shape = self.shape(entry, lengths, gpu);
        let splits = self.splits(lengths);
        let is_chain = entry.computes().is_some_and(|it| it.family.is_chain());
        if splits > 0 && is_chain {
            return self.launches_of_splits(entry, (lengths, splits), gpu, overlaps, beside, shape);
        }
        if beside.single.is_some() || beside.prepare.is_some() && entry.min_blocks_per_sm() == 1 {
            let [x, y, _] = shape.grid.map(u64::from);
            shape.grid[2] = lengths.turns(x * y, gpu);
        }
        let mut cuts = Cuts::NONE;
        // Segments are only useful where launches overlap: the intra-chunk pass then runs during a scan. The simulator uses the same
        // segments.
        if let (Some((prepare, _)), 1, true) = (beside.prepare, lengths.rows, gpu.overlaps()) {
            let units = lengths.units_in_grid();
            let firsts = prefill::segments(units, blocks_of(&shape), gpu);
            if firsts[0] != 0 {
                cuts = Cuts {
                    units,
                    blocks_of_unit: self.blocks_of_unit(prepare),
                    firsts,
                };
            }
        }
        let shape = match beside.prepare {
            Some(_) if overlaps => {
                let is_shared = cuts != Cuts::NONE || beside.single.is_some();
                self.shape_on(entry, shape, gpu, is_shared)
            }
            // The first launch waits for everything before it.
            _ => shape,
        };
        Launches {
            main: (entry, shape),
            beside,
            cuts,
            splits,
        }
    }

    /// The launches for all numbers of rows, if the problem is no prefill: only the grid's extent in z depends on B. The list
    /// ends early if the GPU has no kernel.
    pub fn by_rows(&self, gpu: Gpu) -> impl Iterator<Item = ByRows<Entry>> {
        let heads = self.kind.last_heads(gpu);
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
}
