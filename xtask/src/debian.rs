//! Debian's packages of a newer rustc, unpacked without being installed (they conflict with rustup's).

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::toolchain::{OLDEST, Release};

/// Directory that holds `usr/bin/rustc`; downloads and unpacks it if it is not there.
pub fn compiler_prefix() -> Result<PathBuf> {
    let parent = shell::target()?.join("toolchain");
    let prefix = parent.join("debian");
    if prefix.is_dir() {
        return Ok(prefix);
    }
    fs::create_dir_all(&parent)?;
    let scratch = tempfile::tempdir_in(&parent)?;
    if download(scratch.path()).is_err() {
        eprintln!("xtask: updating the package lists");
        let update = shell::run(Command::new("apt-get").args(["update", "--quiet"]));
        download(scratch.path()).map_err(|error| match update {
            Ok(()) => error,
            Err(update) => error.context(update),
        })?;
    }
    let unpacked = scratch.path().join("prefix");
    for item in fs::read_dir(scratch.path())? {
        let path = item?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            shell::run(Command::new("dpkg").arg("-x").arg(path).arg(&unpacked))?;
        }
    }
    fs::rename(&unpacked, &prefix)
        .with_context(|| format!("cannot move the compiler to {}", prefix.display()))?;
    Ok(prefix)
}

/// Directories of shared libraries under `prefix`, joined for `LD_LIBRARY_PATH`.
pub fn library_path(prefix: &Path) -> Result<OsString> {
    let mut directories = Vec::new();
    for parent in [prefix.join("usr/lib"), prefix.join("lib")] {
        for item in fs::read_dir(&parent).into_iter().flatten() {
            let path = item?.path();
            if path.is_dir() && path.to_string_lossy().ends_with("-linux-gnu") {
                directories.push(path);
            }
        }
    }
    if directories.is_empty() {
        bail!(
            "no shared libraries in {0}; delete {0} to fetch it anew",
            prefix.display()
        );
    }
    Ok(env::join_paths(directories)?)
}

/// Downloads the compiler, its library sources, and those of their dependencies that this system lacks.
fn download(directory: &Path) -> Result<()> {
    let mut simulate = Command::new("apt-get");
    simulate.args([
        "install",
        "--simulate",
        "--no-install-recommends",
        "rustc-web",
        "rust-web-src",
    ]);
    let plan = shell::stdout(&mut simulate)?;
    let installs: Vec<_> = plan
        .lines()
        .filter_map(|line| line.strip_prefix("Inst "))
        .collect();

    let compiler = installs
        .iter()
        .find_map(|install| install.strip_prefix("rustc-web "));
    let compiler = compiler
        .context("apt would not install rustc-web; if it is installed, set GATED_DELTA_RUSTC")?;
    let version = compiler
        .split(['(', ' ', ')'])
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    let release = version.and_then(|version| Release::parse(version.split(['+', '-']).next()?));
    if release.is_none_or(|release| release < OLDEST) {
        bail!(
            "apt would install rustc-web {compiler}; 1.{} or newer is needed",
            OLDEST.minor
        );
    }

    let packages: Vec<_> = installs
        .iter()
        .filter_map(|install| install.split_whitespace().next())
        .collect();
    eprintln!("xtask: fetching {}", packages.join(" "));
    shell::run(
        Command::new("apt-get")
            .args(["download", "--quiet"])
            .args(packages)
            .current_dir(directory),
    )
}
