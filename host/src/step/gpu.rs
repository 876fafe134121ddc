//! A GPU, as far as a choice depends on it.

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::machine;

use crate::error::Error;

/// The properties of a GPU that a choice asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub multiprocessors: u32,
    /// Major and minor.
    pub compute_capability: (u32, u32),
}

impl Gpu {
    /// It has clusters of blocks.
    pub fn has_clusters(self) -> bool {
        self.compute_capability.0 >= 9
    }

    /// A launch may begin before the one before it on its stream has ended.
    pub fn overlaps(self) -> bool {
        self.machine() >= machine::HOPPER
    }

    /// Its machine, as kernels know it.
    pub fn machine(self) -> u32 {
        machine::of_capability(self.compute_capability)
    }

    /// Shared memory that a block may have, bytes.
    pub fn shared_bytes(self) -> u32 {
        machine::shared_bytes(self.compute_capability)
    }

    #[cold]
    pub fn no_such(self, entry: Entry) -> Error {
        let (major, minor) = self.compute_capability;
        Error::Unsupported {
            what: "compute capability of the variant",
            got: format!("{major}.{minor} of {}", entry.name()),
            allowed: match entry.takes_warpgroups() {
                true => "9.0, whose warpgroups multiply; the selected variant runs anywhere",
                false => "any but 9.0, which has variants of its own",
            },
        }
    }
}

/// The GPU that the thresholds were measured on, an H200.
pub(crate) const MEASURED_ON: Gpu = Gpu {
    multiprocessors: 132,
    compute_capability: (9, 0),
};

/// Says whether `entry` is for this machine: a chain's entries with warpgroups are for Hopper, its others for all other machines.
pub(crate) fn serves(entry: Entry, machine: u32) -> bool {
    let is_chain = (entry.computes()).is_some_and(|computes| computes.family.is_chain());
    let is_hopper = machine == machine::HOPPER;
    match entry.takes_warpgroups() {
        true => is_hopper,
        false => !is_chain || !is_hopper,
    }
}
