//! Compresses `ptx/`, which stays text in the sources: a megabyte of every program that links this library, rather than
//! seven. `src/ptx.rs` has the other half.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

/// The levels above it take twice the time for two thousandths.
const LEVEL: u8 = 6;

fn main() -> Result<(), Box<dyn Error>> {
    let from = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("ptx");
    let to = env::var("OUT_DIR")?;
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", from.display());
    for file in fs::read_dir(from)? {
        let file = file?;
        let text = fs::read_to_string(file.path())?;
        let compressed = miniz_oxide::deflate::compress_to_vec(body(&text).as_bytes(), LEVEL);
        fs::write(
            Path::new(&to)
                .join(file.file_name())
                .with_extension("deflate"),
            compressed,
        )?;
    }
    Ok(())
}

/// The text without comment lines and indentation.
fn body(text: &str) -> String {
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}
