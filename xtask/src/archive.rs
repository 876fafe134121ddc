//! `cargo xtask ptx-archive`: `host/ptx.lzma`, which the published package has instead of `host/ptx`.
//!
//! The files share most of what they are, over more than a package's own compression reaches; a registry takes 10 MiB.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;

use anyhow::{Context, Result, bail};
use gated_delta_kernels::entries::Entry;
use lzma_rust2::{LzmaOptions, LzmaWriter};

use crate::{ptx, shell};

/// Of LZMA: its default.
const PRESET: u32 = 6;
/// More than this leaves too little of a registry's 10 MiB.
const MOST_MIB: u64 = 9;

/// Writes the archive: each file's text behind a line `//! ` and its entry, as `host/build.rs` reads it.
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
