//! The choice of a variant.

mod problem;
mod table;
#[cfg(test)]
mod tests;

use gated_delta_kernels::constants::Element;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::{Family, Layout, Stage, States};

use super::args::StateLayout;
use super::gpu::{Gpu, MEASURED_ON, serves};
use super::kind::{Kind, Mode};
use super::shape::checks;
use crate::error::Error;
use crate::tensor::DType;
use crate::tensor_checks::range;
#[cfg(feature = "self-test")]
pub(crate) use problem::takes_splits;
use table::rows;

/// Dynamic shared memory in bytes that a block may have on every supported GPU.
pub(crate) const MAX_SHARED_BYTES: u32 = 99 * 1024;

/// Dynamic shared memory in bytes that a block may have on Hopper.
const MAX_HOPPER_SHARED_BYTES: u32 = 227 * 1024;

/// Dynamic shared memory in bytes that a block of `entry` may have.
fn most_shared_bytes(entry: Entry) -> u32 {
    match entry.takes_warpgroups() {
        true => MAX_HOPPER_SHARED_BYTES,
        false => MAX_SHARED_BYTES,
    }
}

/// The largest B · HV for which an entry is selected on the measured GPU, and the entry.
type Row = (u32, Entry);

/// Threshold of an entry for any number of heads.
const ANY: u32 = u32::MAX;

/// Threshold of an entry that is never selected on the measured GPU, because it is for machines that no other entry of the table
/// serves.
const ELSEWHERE: u32 = 0;

/// The only entry of a family for each K, in the order 64, 96, 128.
type ByDim = [Option<Entry>; 3];

/// Finds the entries of a stage of a prefill that has one entry for each K. `$per_channel` is a pattern for the operator.
macro_rules! by_dim {
    ($stage:ident, $per_channel:pat) => {{
        const fn find(k: u32) -> Option<Entry> {
            let mut at = 0;
            while at < Entry::ALL.len() {
                if let Some(computes) = Entry::ALL[at].computes()
                    && matches!(computes.family.stage(), Some(Stage::$stage))
                    && matches!(computes.per_channel, $per_channel)
                    && computes.k == k
                {
                    return Some(Entry::ALL[at]);
                }
                at += 1;
            }
            None
        }
        [find(64), find(96), find(128)]
    }};
}

impl Kind {
    /// The state dtype in the names of the entries. Entries of bf16 also take f16, by a load-time constant, except deferred
    /// drafts. For tokens in sets, the state in shared memory may be f32.
    fn state_of_entries(self) -> DType {
        match self.state {
            DType::Bf16 | DType::F16 if self.is_f32_in_shared() => DType::F32,
            DType::F16 if !(self.family.is_deferred() && self.family.is_parallel()) => DType::Bf16,
            state => state,
        }
    }

    /// The entry for the K of the kind.
    fn of_dim(self, [of_64, of_96, of_128]: ByDim) -> Option<Entry> {
        match self.k_dim {
            64 => of_64,
            96 => of_96,
            128 => of_128,
            _ => None,
        }
    }

    /// The intra-chunk pass. It is launched before the main entry, with the same constants.
    pub fn prepare(self) -> Option<Entry> {
        const GDN: ByDim = by_dim!(Prepare, Some(false));
        const KDA: ByDim = by_dim!(Prepare, Some(true));
        match (self.family.is_chain(), self.per_channel) {
            (true, false) => self.of_dim(GDN),
            (true, true) => self.of_dim(KDA),
            (false, _) => None,
        }
    }

    /// The convolution. It is launched before [`Self::prepare`], with the same constants.
    pub fn convolve(self) -> Option<Entry> {
        const ALL: ByDim = by_dim!(Convolve, _);
        self.prepare().and_then(|_| self.of_dim(ALL))
    }

    /// The carry of states from split to split. It is launched between the two passes of the main entry, with the same constants.
    pub fn carry(self) -> Option<Entry> {
        const ALL: ByDim = by_dim!(Carry, _);
        self.prepare().and_then(|_| self.of_dim(ALL))
    }

    /// The last launch of a prefill, with the constants of the main entry. It writes windows, and applies the norm to o of rows
    /// of more than 64 tokens.
    pub fn finish(self) -> Option<Entry> {
        const ALL: ByDim = by_dim!(Finish, _);
        self.of_dim(ALL).filter(|_| self.is_chunked())
    }

    /// The kernel for rows of one token. It is launched after the main entry and runs concurrently with it, with the same
    /// constants.
    pub fn single(self) -> Option<Entry> {
        const ALL: ByDim = by_dim!(Single, _);
        self.prepare().and_then(|_| self.of_dim(ALL))
    }

    /// Whether the last launch applies the norm. It does if the prefill has an intra-chunk pass.
    pub fn norms_behind(self) -> bool {
        self.norm && self.prepare().is_some()
    }

    /// All entries that are launched before and after the main entry, with or without a convolution.
    pub fn beside(self, convolves: bool) -> impl Iterator<Item = Entry> {
        let convolve = self.convolve().filter(|_| convolves);
        let finish = self.finish();
        let finish = finish.filter(|_| convolves || self.norms_behind());
        let all = [convolve, self.prepare(), self.single(), finish];
        all.into_iter().flatten()
    }

    /// The kinds of a launch for rows of different lengths, which are not constants.
    pub fn of_any_lengths(self) -> Vec<Self> {
        [Some(self), self.of_short_rows()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The kind of rows of at most 64 tokens, if they have kernels of their own.
    pub fn of_short_rows(self) -> Option<Self> {
        let family = Family::chunked(Stage::Short);
        (self.family.is_chain()).then_some(Self { family, ..self })
    }

    /// Largest HV / H of kernels that compute all value heads of a query/key head together. `None` for other kernels.
    pub fn max_heads(self) -> Option<u32> {
        if !self.is_layer() {
            return None;
        }
        // Some entries for a single value head take only one value head.
        let of_several = Self { ratio: 2, ..self };
        let entries = rows(of_several).iter();
        let most = |&(_, entry): &Row| {
            let fits = |&ratio: &u32| {
                let of_one = Self {
                    ratio,
                    tokens: 1,
                    ..self
                };
                of_one.shared_bytes(entry) <= most_shared_bytes(entry)
            };
            (1..=entry.max_ratio()).rev().find(fits)
        };
        entries.filter_map(most).max()
    }

    /// Dynamic shared memory of a block of `entry` in bytes.
    pub fn shared_bytes(self, entry: Entry) -> u32 {
        let of_state = match (self.layout, self.state) {
            (StateLayout::KLast, state) => entry.shared_state_elements() * state.size_of() as u32,
            (StateLayout::VLast, _) => 0,
        };
        let shared = entry.shared(self.per_channel);
        shared.bytes(self.tokens, self.ratio) + of_state
    }

    /// Checks that some variant has room for the tokens and value heads, if any variant is compiled.
    pub fn check_room(self) -> Result<(), Error> {
        checks::ratio(self.ratio as usize, self.max_heads())?;
        let mut entries = rows(self).iter().map(|&(_, entry)| entry);
        if rows(self).is_empty() || entries.any(|entry| self.has_room(entry)) {
            return Ok(());
        }
        Err(self.no_room(|_| true))
    }

    /// The error that names the largest number that fits, among the variants that a GPU `takes`.
    #[cold]
    fn no_room(self, takes: impl Fn(Entry) -> bool) -> Error {
        let fits = |kind: Self| {
            let mut entries = rows(self).iter().map(|&(_, entry)| entry);
            entries.any(|entry| takes(entry) && kind.has_room(entry))
        };
        let (ratio, tokens) = (self.ratio, self.tokens);
        let most = (0..tokens)
            .rev()
            .find(|&tokens| fits(Self { tokens, ..self }));
        match most {
            Some(most) if most > 0 => range(
                "T + T'",
                format!("at most {most} with HV / H = {ratio}, by the shared memory of a block"),
                tokens,
            ),
            _ => {
                let most = (0..ratio).rev().find(|&ratio| fits(Self { ratio, ..self }));
                let most = most.unwrap_or(0);
                let wanted = format!("at most {most}, by the shared memory of a block");
                range("HV / H", wanted, ratio)
            }
        }
    }

    /// Whether `entry` has room for the value heads that a block computes together, and for the tokens.
    fn has_room(self, entry: Entry) -> bool {
        self.ratio <= entry.max_ratio() && self.shared_bytes(entry) <= most_shared_bytes(entry)
    }

    /// The entry for `heads` = B · HV states on a GPU. The thresholds are scaled by the number of multiprocessors. If the
    /// selected entry has no room, the next entry with room is taken.
    pub fn entry(self, heads: u32, gpu: Gpu) -> Result<Entry, Error> {
        let measured = u64::from(heads) * u64::from(MEASURED_ON.multiprocessors);
        let reaches =
            |up_to| up_to == ANY || measured <= u64::from(up_to) * u64::from(gpu.multiprocessors);
        let mut last = None;
        for &(up_to, entry) in rows(self) {
            if self.runs_on(entry, gpu) {
                if reaches(up_to) {
                    return Ok(entry);
                }
                last = Some(entry);
            }
        }
        last.ok_or_else(|| self.no_entry(gpu))
    }

    /// The largest B · HV for which each entry of the table is selected on a GPU, except the last.
    pub fn last_heads(self, gpu: Gpu) -> impl Iterator<Item = u32> {
        let up_to = rows(self).iter().map(|&(up_to, _)| up_to);
        up_to.filter(|&up_to| up_to != ANY).map(move |up_to| {
            let filled = u64::from(up_to) * u64::from(gpu.multiprocessors);
            let heads = filled / u64::from(MEASURED_ON.multiprocessors);
            u32::try_from(heads).unwrap_or(u32::MAX)
        })
    }

    #[cold]
    fn no_entry(self, gpu: Gpu) -> Error {
        let of = if self.per_channel { "KDA" } else { "GDN" };
        let mut entries = rows(self).iter().map(|&(_, entry)| entry);
        if !gpu.has_clusters() && entries.any(|entry| self.has_room(entry)) {
            return Error::Unsupported {
                what: "kernel",
                got: format!(
                    "{} of {of} with HV / H = {}, on a GPU without clusters of blocks",
                    self.family, self.ratio
                ),
                allowed: "compute capability 9.0 or newer, or the recurrent formulation",
            };
        }
        if !rows(self).is_empty() {
            return self.no_room(|entry| !entry.takes_clusters() || gpu.has_clusters());
        }
        Error::Unsupported {
            what: "kernel",
            got: format!(
                "{} of {of}, {} {} states, K = {}, V = {}",
                self.family, self.layout, self.state, self.k_dim, self.v_dim
            ),
            allowed: "no variant of it is compiled",
        }
    }

    fn runs_on(self, entry: Entry, gpu: Gpu) -> bool {
        self.has_room(entry)
            && (!entry.takes_clusters() || gpu.has_clusters())
            && serves(entry, gpu.machine())
    }

    /// Every entry that [`Kind::entry`] may return, over all batch sizes.
    pub fn entries(self, gpu: Gpu) -> impl Iterator<Item = Entry> {
        let entries = rows(self).iter().map(|&(_, entry)| entry);
        entries.filter(move |&entry| self.runs_on(entry, gpu))
    }

    /// Every entry that computes this kind, selected or not.
    pub fn variants(self) -> impl Iterator<Item = Entry> {
        let is_tight = self.narrow && self.mode == Mode::Resume;
        let selected_alone = is_tight && self.family.is_parallel();
        Entry::ALL.iter().copied().filter(move |entry| {
            self.is_computed_by(*entry)
                && self.has_room(*entry)
                && !(selected_alone && rows(self).iter().all(|(_, selected)| selected != entry))
        })
    }

    fn is_computed_by(self, entry: Entry) -> bool {
        let layout = match self.layout {
            StateLayout::KLast => Layout::KLast,
            StateLayout::VLast => Layout::VLast,
        };
        entry.computes().is_some_and(|computes| {
            let element = match self.state_of_entries() {
                _ if self.in_sets && computes.takes_sets() => Element::F32,
                DType::F32 => Element::F32,
                DType::Bf16 => Element::Bf16,
                _ => return false,
            };
            let is_in_shared = !computes.takes_sets() || element == Element::F32;
            is_in_shared
                && computes.family == self.family
                && computes
                    .per_channel
                    .is_none_or(|own| own == self.per_channel)
                && computes
                    .all_states()
                    .any(|it| it == States { layout, element })
                && [computes.k, computes.v] == [self.k_dim, self.v_dim]
        })
    }
}
