//! What machines have, and how one text serves several.
//!
//! A text for every machine has a word before each instruction that some lack: `GD_SM90` before one that came with compute
//! capability 9.0, `GD_SM80` before what stands in for it on older ones. The loader replaces the word by nothing or by `//`,
//! as it replaces load-time constants by numbers, and says `.version` and `.target` likewise ([`word`]). What goes
//! another way with several instructions asks [`StepConstants::machine`](crate::step::StepConstants::machine) in the kernel's
//! source besides: the way not taken is dead code of instructions that a comment has removed.

/// [`StepConstants::machine`](crate::step::StepConstants::machine) from compute capability 8.0 on: `mma.sync`, `cp.async`,
/// `mbarrier`.
pub const AMPERE: u32 = 80;

/// The machine of compute capability 9.0: bulk copies, launches that overlap, clusters of blocks, and `wgmma`.
pub const HOPPER: u32 = 90;

/// The machine of later compute capabilities: all of Hopper's but `wgmma`.
pub const BLACKWELL: u32 = 100;

/// The machine of a GPU of this compute capability; one that is newer than any known is taken for the newest.
#[must_use]
pub const fn of_capability((major, _): (u32, u32)) -> u32 {
    match major {
        0..9 => AMPERE,
        9 => HOPPER,
        _ => BLACKWELL,
    }
}

/// Shared memory that a block may have on a GPU of this compute capability, bytes; of one that is not known what every GPU has.
#[must_use]
pub const fn shared_bytes(capability: (u32, u32)) -> u32 {
    1024 * match capability {
        (9, _) | (10, _) => 227,
        (8, 0 | 7) => 163,
        _ => 99,
    }
}

/// The loader's replacement of a word of a text, for a machine; none for a word that is no machine's.
#[must_use]
pub fn word(word: &str, machine: u32) -> Option<&'static str> {
    let is_old = machine < HOPPER;
    match (word, is_old) {
        ("GD_SM80", true) | ("GD_SM90", false) => Some(""),
        ("GD_SM80", false) | ("GD_SM90", true) => Some("//"),
        ("GD_VERSION", true) => Some("7.4"),
        ("GD_VERSION", false) => Some("8.0"),
        ("GD_TARGET", true) => Some("sm_80"),
        ("GD_TARGET", false) => Some("sm_90"),
        _ => None,
    }
}
