//! Kinds of machines, and how one PTX text serves several.
//!
//! A text for every machine has a word before each instruction that some machines lack: `GD_SM90` before an instruction that came
//! with compute capability 9.0, `GD_SM80` before its replacement on older machines. The loader replaces the word by nothing or by
//! `//`, as it replaces load-time constants by numbers. It sets `.version` and `.target` in the same way ([`word`]). If an
//! alternative takes several instructions, the kernel's source also branches on
//! [`StepConstants::machine`](crate::step::StepConstants::machine): the branch not taken is dead code, whose instructions are
//! commented out.

/// [`StepConstants::machine`](crate::step::StepConstants::machine) from compute capability 8.0 on: `mma.sync`, `cp.async`,
/// `mbarrier`.
pub const AMPERE: u32 = 80;

/// The machine of compute capability 9.0: bulk copies, programmatic dependent launch, clusters of blocks, and `wgmma`.
pub const HOPPER: u32 = 90;

/// The machine of later compute capabilities: all of Hopper's features except `wgmma`.
pub const BLACKWELL: u32 = 100;

/// The machine of a GPU of this compute capability; a GPU newer than every known machine counts as the newest machine.
#[must_use]
pub const fn of_capability((major, _): (u32, u32)) -> u32 {
    match major {
        0..9 => AMPERE,
        9 => HOPPER,
        _ => BLACKWELL,
    }
}

/// Bytes of shared memory that a block may have on a GPU of this compute capability; for an unknown capability 99 KiB, which
/// every GPU has.
#[must_use]
pub const fn shared_bytes(capability: (u32, u32)) -> u32 {
    1024 * match capability {
        (9, _) | (10, _) => 227,
        (8, 0 | 7) => 163,
        _ => 99,
    }
}

/// The loader's replacement of a word of a text, for a machine; `None` if the word does not depend on the machine.
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
