//! Finds the commit that the bench is built from, for its records: that of the package, or of the repository around it.

use std::fs;
use std::process::Command;

/// File that `cargo package` adds, with the package's commit.
const PACKAGED: &str = ".cargo_vcs_info.json";

fn main() {
    let (commit, files) = match fs::read_to_string(PACKAGED) {
        Ok(packaged) => (of_package(&packaged), PACKAGED.to_owned()),
        Err(_) => (of_repository(), files_of_repository()),
    };
    let commit = commit.unwrap_or_default();
    println!("cargo::rustc-env=GATED_DELTA_COMMIT={commit}");
    for file in files.lines() {
        println!("cargo::rerun-if-changed={file}");
    }
}

/// The first digits after `"sha1"`, marked if the package has changes.
fn of_package(packaged: &str) -> Option<String> {
    let (_, sha1) = packaged.split_once("\"sha1\"")?;
    let digits = sha1.split('"').nth(1)?.get(..12)?;
    let dirty = packaged.contains("\"dirty\": true");
    Some(format!("{digits}{}", if dirty { "-dirty" } else { "" }))
}

fn of_repository() -> Option<String> {
    let commit = git(&["describe", "--always", "--abbrev=12"])?;
    // `git describe --dirty` would write the index, on which this build depends.
    let changes = git(&[
        "--no-optional-locks",
        "status",
        "--porcelain",
        "--untracked-files=no",
    ])?;
    Some(commit + if changes.is_empty() { "" } else { "-dirty" })
}

/// The files that change with the commit, one a line. None without a repository.
fn files_of_repository() -> String {
    git(&["rev-parse", "--git-path", "HEAD", "--git-path", "index"]).unwrap_or_default()
}

fn git(arguments: &[&str]) -> Option<String> {
    let said = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    said.status.success().then_some(text)
}
