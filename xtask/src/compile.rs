//! Compiles kernels-gpu to one PTX module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::module::Module;
use crate::toolchain::Compiler;
use crate::{hash, shell};

/// Flags of the device code and of its `core`. sm_80 has the asynchronous copies and bf16 conversions that the kernels use; PTX 7.4
/// has `L1::no_allocate`. Panics become a bare trap. The unroll threshold unrolls every loop over a register array: a loop that
/// remains puts the array in local memory. rustc's jump threading is off (LLVM has its own): it would copy a barrier into the
/// branches before it, and some warps would wait at one copy and others at the other.
const RUSTFLAGS: [&str; 6] = [
    "-Ctarget-cpu=sm_80",
    "-Ctarget-feature=+ptx74",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
    "-Cllvm-args=-unroll-threshold=4000",
    "-Zmir-enable-passes=-JumpThreading",
];

/// The cargo profile `ptx`, separate from the workspace's own profiles.
const PROFILE: [&str; 6] = [
    "profile.ptx.inherits='release'",
    "profile.ptx.panic='abort'",
    "profile.ptx.lto='fat'",
    "profile.ptx.codegen-units=1",
    "profile.ptx.debug=false",
    "profile.ptx.incremental=false",
];

/// All flags that decide the generated code.
pub fn flags() -> impl Iterator<Item = &'static str> {
    RUSTFLAGS.into_iter().chain(PROFILE)
}

/// Compiles the kernels and parses the module: all entries, or only those whose name contains `only`.
pub fn kernels(compiler: &Compiler, only: Option<&str>) -> Result<Module> {
    // A directory for each compiler and set of flags: cargo does not track the assembly as an output of its own.
    let recipe = flags().fold(compiler.identity.clone(), |recipe, flag| {
        recipe + "\n" + flag
    });
    let directory = shell::target()?
        .join("ptx")
        .join(&hash::of_text(&recipe)[..12]);

    let mut cargo = shell::cargo();
    compiler.configure(&mut cargo);
    let lints = match only {
        Some(only) => {
            cargo.current_dir(copy_with(only)?);
            "-Awarnings"
        }
        None => "-Dwarnings",
    };
    cargo.env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\x1f"));
    cargo.args([
        "rustc",
        "--package",
        "gated-delta-kernels",
        "--lib",
        "--crate-type",
        "cdylib",
    ]);
    cargo.args([
        "-Zbuild-std=core",
        "--target",
        "nvptx64-nvidia-cuda",
        "--profile",
        "ptx",
        "--target-dir",
    ]);
    cargo.arg(&directory);
    for setting in PROFILE {
        cargo.args(["--config", setting]);
    }
    cargo.args(["--", "--emit=asm", "-Clinker=true", lints]);
    shell::run(&mut cargo)?;

    let assembly = directory.join("nvptx64-nvidia-cuda/ptx/deps/gated_delta_kernels.s");
    let text = fs::read_to_string(&assembly).with_context(|| assembly.display().to_string())?;
    Module::parse(&text).with_context(|| assembly.display().to_string())
}

/// Manifest of a copy of the kernels outside of the workspace.
const MANIFEST: &str = r#"[package]
name = "gated-delta-kernels"
version = "0.0.0"
edition = "2024"

[features]
simulator = []

[dependencies]
bytemuck = { version = "1.24", features = ["derive"] }

[workspace]
"#;

/// Copies the kernels under `target/`. The copy's table of entries has only the lines whose name contains `only`.
fn copy_with(only: &str) -> Result<PathBuf> {
    let package = shell::target()?.join("ptx-only/kernels-gpu");
    if package.exists() {
        fs::remove_dir_all(&package)?;
    }
    let original = shell::root().join("kernels-gpu");
    copy_directory(&original.join("src"), &package.join("src"))?;
    fs::write(package.join("Cargo.toml"), MANIFEST)?;
    fs::copy(shell::root().join("Cargo.lock"), package.join("Cargo.lock"))?;
    let table = package.join("src/entries.rs");
    let lines = fs::read_to_string(&table)?;
    let is_left = |line: &&str| match line.trim_start().split_once(" = ") {
        Some((name, body)) if body.ends_with(">;") && name.contains("_k") => name.contains(only),
        _ => true,
    };
    let left: Vec<_> = lines.lines().filter(is_left).collect();
    if left.len() == lines.lines().count() {
        bail!("no line of {} goes for `{only}`", table.display());
    }
    fs::write(&table, left.join("\n"))?;
    Ok(package)
}

fn copy_directory(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for item in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let (path, target) = {
            let item = item?;
            (item.path(), to.join(item.file_name()))
        };
        if path.is_dir() {
            copy_directory(&path, &target)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}
