//! The commit that the bench is built from, for its records.

use std::process::Command;

fn main() {
    let described = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output();
    let commit = match described {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => String::new(),
    };
    println!("cargo::rustc-env=GATED_DELTA_COMMIT={commit}");
    for file in ["../.git/HEAD", "../.git/index"] {
        println!("cargo::rerun-if-changed={file}");
    }
}
