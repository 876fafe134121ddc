//! kernels-gpu, compiled to one PTX module.

use std::fs;

use anyhow::{Context, Result};

use crate::module::Module;
use crate::toolchain::Compiler;
use crate::{hash, shell};

/// Flags of the device code and of its `core`. sm_80 has the asynchronous copies and bf16 conversions
/// that the kernels use; PTX 7.4 has `L1::no_allocate`. Panics become a bare trap. The threshold makes
/// every loop over a register array unroll: one that stays puts the array in local memory.
const RUSTFLAGS: [&str; 5] = [
    "-Ctarget-cpu=sm_80",
    "-Ctarget-feature=+ptx74",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
    "-Cllvm-args=-unroll-threshold=4000",
];

/// The profile `ptx`, which leaves the workspace's own profiles alone.
const PROFILE: [&str; 6] = [
    "profile.ptx.inherits='release'",
    "profile.ptx.panic='abort'",
    "profile.ptx.lto='fat'",
    "profile.ptx.codegen-units=1",
    "profile.ptx.debug=false",
    "profile.ptx.incremental=false",
];

/// Every flag that decides the generated code.
pub fn flags() -> impl Iterator<Item = &'static str> {
    RUSTFLAGS.into_iter().chain(PROFILE)
}

/// Compiles the kernels and reads the module.
pub fn kernels(compiler: &Compiler) -> Result<Module> {
    // A directory per compiler and flags: cargo does not track the assembly as an output of its own.
    let recipe = flags().fold(compiler.identity.clone(), |recipe, flag| {
        recipe + "\n" + flag
    });
    let directory = shell::target()?
        .join("ptx")
        .join(&hash::of_text(&recipe)[..12]);

    let mut cargo = shell::cargo();
    compiler.configure(&mut cargo);
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
    cargo.args(["--", "--emit=asm", "-Clinker=true", "-Dwarnings"]);
    shell::run(&mut cargo)?;

    let assembly = directory.join("nvptx64-nvidia-cuda/ptx/deps/gated_delta_kernels.s");
    let text = fs::read_to_string(&assembly).with_context(|| assembly.display().to_string())?;
    Module::parse(&text).with_context(|| assembly.display().to_string())
}
