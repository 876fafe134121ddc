//! Compresses the PTX files of `ptx/`, each on its own, since a program that links this library decompresses only the files that
//! it launches. `src/ptx.rs` decompresses them. A published package has `ptx.lzma` from `cargo xtask ptx-archive` in place of the
//! folder.

use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::{env, fs};

use lzma_rust2::LzmaReader;

/// Compression level. Higher levels take twice the time and save two thousandths.
const LEVEL: u8 = 6;

fn main() -> Result<(), Box<dyn Error>> {
    let here = env::var("CARGO_MANIFEST_DIR")?;
    let (directory, archive) = (
        Path::new(&here).join("ptx"),
        Path::new(&here).join("ptx.lzma"),
    );
    println!("cargo::rerun-if-changed=build.rs");
    if directory.exists() {
        println!("cargo::rerun-if-changed={}", directory.display());
        for file in fs::read_dir(directory)? {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "ptx") {
                let name = path.file_stem().and_then(|name| name.to_str());
                embed(
                    name.ok_or("a name that is no UTF-8")?,
                    &fs::read_to_string(&path)?,
                )?;
            }
        }
        return Ok(());
    }
    println!("cargo::rerun-if-changed={}", archive.display());
    let packed = fs::read(&archive).map_err(|error| {
        format!(
            "{}: {error}; `cargo xtask ptx-archive` makes it",
            archive.display()
        )
    })?;
    let mut text = String::new();
    LzmaReader::new_mem_limit(&*packed, u32::MAX, None)?.read_to_string(&mut text)?;
    for file in text.split("//! ").skip(1) {
        let (name, text) = file.split_once('\n').ok_or("a damaged archive")?;
        embed(name, text)?;
    }
    Ok(())
}

/// Writes the compressed text of an entry for `src/ptx.rs`.
fn embed(name: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let compressed = miniz_oxide::deflate::compress_to_vec(body(text).as_bytes(), LEVEL);
    let to = Path::new(&env::var("OUT_DIR")?).join(name);
    Ok(fs::write(to.with_extension("deflate"), compressed)?)
}

/// The text without its comment lines.
fn body(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}
