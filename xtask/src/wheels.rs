//! NVIDIA's assembler and disassembler, from the Python wheels that NVIDIA publishes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell;

const WHEELS: [&str; 2] = ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-nvdisasm==13.5.37"];

/// Directory of the programs in the wheels.
const BIN: &str = "nvidia/cu13/bin";

/// Directory that holds `ptxas` and `nvdisasm`; downloads and unpacks it if it is not there.
pub fn cuda_bin() -> Result<PathBuf> {
    let parent = shell::target()?.join("toolchain");
    let cuda = parent.join("cuda");
    if cuda.is_dir() {
        return Ok(cuda.join(BIN));
    }
    fs::create_dir_all(&parent)?;
    let scratch = tempfile::tempdir_in(&parent)?;
    eprintln!("xtask: fetching {}", WHEELS.join(" "));
    let pip = [
        "-m",
        "pip",
        "--quiet",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
    ];
    shell::run(
        Command::new("python3")
            .args(pip)
            .arg(scratch.path())
            .args(WHEELS),
    )
    .context("NVIDIA's assemblers come as Python wheels, through pip (package python3-pip)")?;

    let unpacked = scratch.path().join("cuda");
    for item in fs::read_dir(scratch.path())? {
        let path = item?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            shell::run(
                Command::new("python3")
                    .args(["-m", "zipfile", "-e"])
                    .arg(path)
                    .arg(&unpacked),
            )?;
        }
    }
    for tool in ["ptxas", "nvdisasm"] {
        let path = unpacked.join(BIN).join(tool);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .with_context(|| path.display().to_string())?;
    }
    fs::rename(&unpacked, &cuda)
        .with_context(|| format!("cannot move the assemblers to {}", cuda.display()))?;
    Ok(cuda.join(BIN))
}
