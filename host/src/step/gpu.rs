//! The properties of a GPU that choices depend on.

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::machine;

use crate::error::Error;

/// The properties of a GPU that choices depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub multiprocessors: u32,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Largest shared memory of a block in bytes.
    pub shared_bytes: u32,
}

impl Gpu {
    /// A GPU that has the shared memory of its compute capability.
    pub const fn new(multiprocessors: u32, compute_capability: (u32, u32)) -> Self {
        Self {
            multiprocessors,
            compute_capability,
            shared_bytes: machine::shared_bytes(compute_capability),
        }
    }

    /// The same GPU with the kernels and the shared memory of another compute capability.
    pub fn used_as(self, compute_capability: (u32, u32)) -> Self {
        let other = Self::new(self.multiprocessors, compute_capability);
        Self {
            shared_bytes: other.shared_bytes.min(self.shared_bytes),
            ..other
        }
    }

    /// Whether the GPU has clusters of blocks.
    pub fn has_clusters(self) -> bool {
        self.compute_capability.0 >= 9
    }

    /// Whether a launch may begin before the previous launch on its stream has ended (programmatic dependent launch).
    pub fn overlaps(self) -> bool {
        self.machine() >= machine::HOPPER
    }

    /// The kernels' code of the machine.
    pub fn machine(self) -> u32 {
        machine::of_capability(self.compute_capability)
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

/// An H200, the GPU that the thresholds were measured on.
pub(crate) const MEASURED_ON: Gpu = Gpu::new(132, (9, 0));

/// Whether `entry` is for this machine. The scan's entries with warpgroups are for Hopper only, its other entries for all other
/// machines.
pub(crate) fn serves(entry: Entry, machine: u32) -> bool {
    let is_chain = (entry.computes()).is_some_and(|computes| computes.family.is_chain());
    let is_hopper = machine == machine::HOPPER;
    match entry.takes_warpgroups() {
        true => is_hopper,
        false => !is_chain || !is_hopper,
    }
}
