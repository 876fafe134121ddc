//! Digests that tie the committed PTX to its sources.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::{compile, shell};

/// SHA-256 of `text`, in hex.
pub fn of_text(text: &str) -> String {
    hex(Sha256::digest(text))
}

/// SHA-256 of everything but the compiler that decides the PTX: the manifest and sources of the kernels, without the simulator
/// and the stubs for builds without it, and the compile flags.
pub fn of_sources() -> Result<String> {
    let package = shell::root().join("kernels-gpu");
    let mut files = vec![package.join("Cargo.toml")];
    collect_files(&package.join("src"), &mut files)?;
    files.sort();

    let mut digest = Sha256::new();
    for file in &files {
        let name = file.strip_prefix(&package)?.to_string_lossy();
        if name.starts_with("src/device/sim") || name == "src/device/absent.rs" {
            continue;
        }
        let content = fs::read(file).with_context(|| file.display().to_string())?;
        digest.update(format!("{name} {}\n", content.len()));
        digest.update(content);
    }
    for flag in compile::flags() {
        digest.update(format!("{flag}\n"));
    }
    Ok(hex(digest.finalize()))
}

fn collect_files(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for item in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = item?.path();
        if path.is_dir() {
            collect_files(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
