//! Finds the commit that the bench is built from, for its records: that of the package, or of the repository around it.

use std::fs;
use std::process::Command;

/// File that `cargo package` adds, with the package's commit.
const PACKAGED: &str = ".cargo_vcs_info.json";

fn main() {
    let (commit, files) = match fs::read_to_string(PACKAGED) {
        Ok(packaged) => (of_package(&packaged), vec![PACKAGED]),
        Err(_) => (of_repository(), vec!["../.git/HEAD", "../.git/index"]),
    };
    let commit = commit.unwrap_or_default();
    println!("cargo::rustc-env=GATED_DELTA_COMMIT={commit}");
    for file in files {
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
    let described = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&described.stdout).trim().to_owned();
    described.status.success().then_some(text)
}
