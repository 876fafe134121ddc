//! `cargo xtask ptx-archive` writes `host/ptx.packed`, which replaces `host/ptx` in the published package: a registry takes packages
//! of at most 10 MiB, and who builds the package has nothing to pack.

#[path = "../../host/src/ptx/packed.rs"]
mod packed;

use std::fs;

use anyhow::{Context, Result, bail};
use gated_delta_kernels::entries::Entry;

use crate::{ptx, shell};

/// Largest archive, in MiB. A larger one leaves too little of a registry's 10 MiB for the rest of the package.
const MOST_MIB: u64 = 9;

/// Writes the archive: for each entry a line `NAME BYTES`, then its packed PTX, as `host/build.rs` reads them.
pub fn write() -> Result<()> {
    let mut archive = Vec::new();
    for &entry in Entry::ALL {
        let packed = packed::packed(&ptx::read(entry)?);
        archive.extend(format!("{} {}\n", entry.name(), packed.len()).into_bytes());
        archive.extend(packed);
    }
    let path = shell::root().join("host/ptx.packed");
    fs::write(&path, &archive).with_context(|| path.display().to_string())?;
    println!(
        "{:.2} MiB  {}",
        archive.len() as f64 / 1048576.0,
        path.display()
    );
    if archive.len() as u64 > MOST_MIB << 20 {
        bail!("the archive is larger than {MOST_MIB} MiB");
    }
    Ok(())
}
