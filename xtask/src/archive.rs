//! `cargo xtask ptx-archive` writes `host/ptx.lzma`, which replaces `host/ptx` in the published package.
//!
//! The PTX files have most of their text in common, at distances beyond the reach of a package's own compression. A registry takes
//! packages of at most 10 MiB.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;

use anyhow::{Context, Result, bail};
use gated_delta_kernels::entries::Entry;
use lzma_rust2::{LzmaOptions, LzmaWriter};

use crate::{ptx, shell};

/// LZMA's default preset.
const PRESET: u32 = 6;
/// Largest archive, in MiB. A larger one leaves too little of a registry's 10 MiB for the rest of the package.
const MOST_MIB: u64 = 9;

/// Writes the archive: for each entry a line `//! NAME`, then its PTX, as `host/build.rs` reads them.
pub fn write() -> Result<()> {
    let mut text = String::new();
    for &entry in Entry::ALL {
        let _ = write!(text, "//! {}\n{}", entry.name(), ptx::read(entry)?); // a `String` takes everything
    }
    let mut options = LzmaOptions::with_preset(PRESET);
    options.dict_size = u32::try_from(text.len().next_power_of_two())?;
    let size = Some(text.len() as u64);
    let mut packed = LzmaWriter::new_use_header(Vec::new(), &options, size)?;
    packed.write_all(text.as_bytes())?;
    let packed = packed.finish()?;
    let path = shell::root().join("host/ptx.lzma");
    fs::write(&path, &packed).with_context(|| path.display().to_string())?;
    println!(
        "{:.2} MiB  {}",
        packed.len() as f64 / 1048576.0,
        path.display()
    );
    if packed.len() as u64 > MOST_MIB << 20 {
        bail!("the archive is larger than {MOST_MIB} MiB");
    }
    Ok(())
}
