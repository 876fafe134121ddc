//! Paths of the workspace, and child processes whose errors name the command.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

/// Root of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

/// Cargo's target directory.
pub fn target() -> Result<PathBuf> {
    let directory =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    std::path::absolute(&directory)
        .with_context(|| format!("target directory {}", directory.display()))
}

/// The cargo that runs this program, to be started in the workspace's root.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs `command` with this process's output streams.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", describe(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", describe(command));
    }
    Ok(())
}

/// Runs `command` and returns its output, whatever its exit status.
pub fn capture(command: &mut Command) -> Result<Output> {
    command
        .output()
        .with_context(|| format!("cannot start {}", describe(command)))
}

/// Runs `command` and returns its standard output.
pub fn stdout(command: &mut Command) -> Result<String> {
    let bytes = bytes(command)?;
    String::from_utf8(bytes).with_context(|| format!("output of {}", describe(command)))
}

/// As [`stdout`], for a command whose output is not text.
pub fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = capture(command)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{} ended with {}\n{}",
            describe(command),
            output.status,
            stderr.trim_end()
        );
    }
    Ok(output.stdout)
}

fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    format!(
        "`{}`",
        words
            .map(|word| word.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" ")
    )
}
