//! The kernels of a problem for rows of given lengths.

use gated_delta_kernels::launch::{Computes, Family};
use gated_delta_kernels::prefill::split::Pass;

use crate::Entry;
use crate::error::Error;
use crate::step::gpu::{Gpu, serves};
use crate::step::kind::Kind;
use crate::step::lengths::Lengths;
use crate::step::problem::Problem;
use crate::tensor::DType;
use crate::tensor_checks::unsupported;

/// Whether a scan takes rows in splits. The scan by warpgroups with K = V = 128, whose blocks have 64 rows of a state each, does.
pub(crate) fn takes_splits(entry: Entry) -> bool {
    let computes = entry.computes();
    let has_splits =
        |it: Computes| it.family.is_chain() && it.k == 128 && entry.tiles() * 64 == it.v;
    entry.takes_warpgroups() && computes.is_some_and(has_splits)
}

impl Problem {
    /// The same problem for a GPU. The constants of a prefill, and the number of blocks per multiprocessor, depend on the GPU.
    pub fn on(mut self, gpu: Gpu) -> Self {
        if self.is_chunked() {
            self.constants.machine = gpu.machine();
            if !self.is_on_hopper() {
                // No other scan takes rows in splits.
                self.constants.split = 0;
            }
        }
        self.constants.blocks_per_sm = self.blocks_per_sm(gpu.machine());
        self
    }

    /// Number of blocks per multiprocessor that the registers have to leave room for on this machine, by sort of kernel.
    fn blocks_per_sm(&self, machine: u32) -> u32 {
        let (kind, constants) = (self.kind, &self.constants);
        if kind.is_chunked() {
            constants.blocks_of_singles(kind.v_dim)
        } else if kind.family.is_deferred() {
            constants.blocks_by_tokens()
        } else if kind.family == Family::RECURRENT {
            constants.blocks_of_two_warps()
        } else if !kind.family.layer {
            constants.blocks_of_drafts(machine, kind.in_sets && kind.state != DType::F32)
        } else {
            constants.blocks_of_layer(machine, kind.state == DType::F32)
        }
    }

    /// The kind for rows of these lengths. On Hopper, short rows have kernels of their own.
    pub fn kind_of(&self, lengths: &Lengths) -> Kind {
        // With splits, a short row keeps the same kernels, so that it has the bits of a split row.
        let is_short = self.is_on_hopper() && lengths.are_short() && self.constants.split == 0;
        let short = self.kind.of_short_rows().filter(|_| is_short);
        short.unwrap_or(self.kind)
    }

    /// The variant for rows of these lengths on a GPU.
    pub fn entry(&self, lengths: &Lengths, gpu: Gpu) -> Result<Entry, Error> {
        let heads = lengths.likely_rows().saturating_mul(self.value_heads());
        let entry = match self.constants.split {
            0 => self.kind_of(lengths).entry(heads, gpu)?,
            _ => self.entry_of_splits()?,
        };
        Ok(self.single(lengths).unwrap_or(entry))
    }

    /// The scan of rows in splits.
    fn entry_of_splits(&self) -> Result<Entry, Error> {
        let mut all = self.kind.variants();
        let found = all.find(|&entry| serves(entry, self.constants.machine) && takes_splits(entry));
        found.ok_or_else(|| unsupported("split", self.constants.split as usize, "none"))
    }

    /// The kernel for rows of one token, if no row has more than one token: the kernel is then launched alone, without a scan.
    /// `None` if the norm after a scan would need outputs that this kernel does not leave.
    pub fn single(&self, lengths: &Lengths) -> Option<Entry> {
        let is_alone = lengths.are_single() && !self.leaves_tokens();
        self.kind.single().filter(|_| is_alone)
    }

    /// All variants of the main launch for rows of these lengths.
    pub fn variants(&self, lengths: &Lengths) -> impl Iterator<Item = Entry> {
        let single = self.single(lengths);
        let of_kind = self.kind_of(lengths).variants();
        of_kind
            .filter(|&entry| !self.is_chunked() || serves(entry, self.constants.machine))
            .filter(|&entry| self.constants.split == 0 || takes_splits(entry))
            .chain(single)
    }

    /// Every entry that may be launched on a GPU, for rows of any lengths.
    pub fn entries(&self, gpu: Gpu) -> Vec<Entry> {
        let mut kinds = self.kind.of_any_lengths();
        kinds.retain(|kind| *kind == self.kind || self.is_on_hopper());
        let entries = kinds.iter().flat_map(|kind| kind.entries(gpu));
        let entries = match self.constants.split {
            0 => entries.collect::<Vec<_>>(),
            _ => self.entry_of_splits().into_iter().collect(),
        };
        let beside = self.kind.beside(self.constants.taps > 0);
        let carry = self.kind.carry().filter(|_| self.constants.split != 0);
        entries.into_iter().chain(beside).chain(carry).collect()
    }

    /// The passes that an entry is launched for: two for a scan over rows in splits, otherwise one.
    pub fn passes(&self, entry: Entry) -> impl Iterator<Item = (Entry, Pass)> + use<> {
        let has_transitions = self.constants.split != 0 && takes_splits(entry);
        let transition = has_transitions.then_some(Pass::Transition);
        let passes = [Some(Pass::Output), transition].into_iter().flatten();
        passes.map(move |pass| (entry, pass))
    }
}
