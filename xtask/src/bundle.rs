//! `cargo xtask gpu-bundle`: what a GPU host without Rust and network needs to run the tests.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::shell;

const RUN: &str = include_str!("../gpu-bundle/run.sh");

/// More than this is a mistake: unstripped binaries, or a build directory among the fixtures.
const MOST_MIB: u64 = 320;

/// Builds the bundle in `target/gpu-bundle`.
pub fn build() -> Result<()> {
    let binaries = binaries()?;
    let bundle = shell::target()?.join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle).with_context(|| bundle.display().to_string())?;
    }
    for binary in binaries {
        let place = bundle.join(binary.folder);
        fs::create_dir_all(&place)?;
        let strip = Command::new("strip")
            .arg("-o")
            .arg(place.join(&binary.name))
            .arg(&binary.path)
            .status();
        let status = strip.context("cannot start `strip` (package binutils)")?;
        if !status.success() {
            bail!("`strip` of {} ended with {status}", binary.path.display());
        }
    }
    let fixtures = shell::root().join("tests/fixtures");
    copy_directory(&fixtures, &bundle.join("fixtures"))
        .with_context(|| fixtures.display().to_string())?;
    let run = bundle.join("run.sh");
    fs::write(&run, RUN)?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))?;

    let mut bytes = 0;
    let mut files: Vec<_> = files_below(&bundle)?;
    files.sort();
    for (path, length) in &files {
        println!(
            "{:9.2} MiB  {}",
            mib(*length),
            path.strip_prefix(&bundle)?.display()
        );
        bytes += length;
    }
    println!("{:9.2} MiB  {}", mib(bytes), bundle.display());
    if bytes > MOST_MIB << 20 {
        bail!("the bundle is larger than {MOST_MIB} MiB");
    }
    Ok(())
}

/// An executable of the workspace.
struct Binary {
    path: PathBuf,
    /// `tests`, `benches`, `examples` or `bin`.
    folder: &'static str,
    name: String,
}

/// Builds the workspace and lists what came out. Without the tests of what only the machine that builds
/// has: a package names them in its manifest, as `package.metadata.gpu-bundle.skip`.
fn binaries() -> Result<Vec<Binary>> {
    let skipped = skipped_tests()?;
    let mut cargo = shell::cargo();
    cargo.args(["build", "--release", "--workspace", "--exclude", "xtask"]);
    cargo.args(["--lib", "--bins", "--tests", "--benches", "--examples"]);
    cargo
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit());
    let mut binaries = Vec::new();
    for line in shell::stdout(&mut cargo)?.lines() {
        let message: Value = serde_json::from_str(line).context("a message of cargo")?;
        binaries.extend(binary(&message).filter(|binary| !skipped.contains(&binary.name)));
    }
    if binaries.is_empty() {
        bail!("cargo built no executable");
    }
    Ok(binaries)
}

fn skipped_tests() -> Result<Vec<String>> {
    let metadata = ["metadata", "--no-deps", "--format-version=1"];
    let metadata: Value = serde_json::from_str(&shell::stdout(shell::cargo().args(metadata))?)?;
    let mut names = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let skip = package["metadata"]["gpu-bundle"]["skip"].as_array();
        let skip = skip.into_iter().flatten().filter_map(Value::as_str);
        names.extend(skip.filter_map(|test| Some(format!("{}-{test}", folder_of(package)?))));
    }
    Ok(names)
}

/// The executable that a message of cargo announces. Tests are called after their package's folder.
fn binary(message: &Value) -> Option<Binary> {
    let path = message["executable"].as_str()?.into();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let package = folder_of(message)?;
    let (folder, name) = match (kind, message["profile"]["test"].as_bool()?) {
        ("bench", _) => ("benches", target.to_owned()),
        ("test", _) => ("tests", format!("{package}-{target}")),
        (_, true) => ("tests", format!("{package}-{kind}-{target}")),
        ("bin", false) => ("bin", target.to_owned()),
        // Those without a number are fixtures and tools.
        ("example", false) if target.starts_with(|c: char| c.is_ascii_digit()) => {
            ("examples", target.to_owned())
        }
        _ => return None,
    };
    Some(Binary { path, folder, name })
}

/// Folder of the package that a message is about.
fn folder_of(message: &Value) -> Option<&str> {
    let manifest = Path::new(message["manifest_path"].as_str()?);
    manifest.parent()?.file_name()?.to_str()
}

fn copy_directory(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for item in fs::read_dir(from)? {
        let path = item?.path();
        let Some(name) = path.file_name() else {
            continue;
        };
        if path.is_dir() {
            copy_directory(&path, &to.join(name))?;
        } else {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Every file below `directory` with its length.
fn files_below(directory: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for item in fs::read_dir(directory)? {
        let path = item?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            let length = fs::metadata(&path)?.len();
            files.push((path, length));
        }
    }
    Ok(files)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_go_where_they_belong() {
        let place_of = |name: &str, kind: &str, test: bool| {
            let message = serde_json::json!({
                "manifest_path": "/y/p/Cargo.toml", "executable": "/x/a-0123", "target": {"name": name, "kind": [kind]}, "profile": {"test": test},
            });
            binary(&message).map(|binary| format!("{}/{}", binary.folder, binary.name))
        };
        let place = |kind: &str, test: bool| place_of("a", kind, test);
        assert_eq!(place("test", true).as_deref(), Some("tests/p-a"));
        assert_eq!(place("lib", true).as_deref(), Some("tests/p-lib-a"));
        assert_eq!(place("bin", false).as_deref(), Some("bin/a"));
        assert_eq!(place("bench", true).as_deref(), Some("benches/a"));
        assert_eq!(
            place_of("01_a", "example", false).as_deref(),
            Some("examples/01_a")
        );
        assert_eq!(place("example", false), None);
        assert_eq!(place("custom-build", false), None);
        assert!(
            binary(&serde_json::json!({"reason": "build-finished", "executable": null})).is_none()
        );
    }
}
