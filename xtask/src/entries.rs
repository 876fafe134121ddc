//! The compiled variants of the kernels, and their files.

pub use gated_delta_kernels::entries::Entry;

use anyhow::{Context, Result};

/// Extension of an entry's file; the rest of the file's name is the entry's name.
pub const EXTENSION: &str = ".packed";

/// File name of an entry under `host/ptx`.
pub fn file_name(entry: Entry) -> String {
    entry.name().to_owned() + EXTENSION
}

/// The entry called `name`.
pub fn find(name: &str) -> Result<Entry> {
    let entry = Entry::ALL
        .iter()
        .copied()
        .find(|entry| entry.name() == name);
    entry.with_context(|| {
        let names: Vec<_> = Entry::ALL.iter().map(|entry| entry.name()).collect();
        format!("no entry {name}; there are\n  {}", names.join("\n  "))
    })
}
