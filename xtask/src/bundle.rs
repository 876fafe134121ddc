//! `cargo xtask gpu-bundle` packs the tests for a GPU host that has neither Rust nor network.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use lzma_rust2::{LzmaOptions, XzOptions, XzWriter};
use serde_json::Value;

use crate::shell;

const RUN: &str = include_str!("../gpu-bundle/run.sh");

/// Largest bundle, in MiB. A larger one is a mistake: unstripped binaries, or a build directory among the fixtures.
const MOST_MIB: u64 = 24;

/// xz's preset. Preset 1 packs in a third of the time; the bundle is then 4 % larger.
const PRESET: u32 = 6;

/// The folder that the archive unpacks to.
const FOLDER: &str = "gpu-bundle";

/// Builds the bundle, `target/gpu-bundle.tar.xz`.
pub fn build() -> Result<()> {
    let files = files()?;
    for (name, file) in &files {
        println!("{:9.2} MiB  {name}", mib(file.content.len()));
    }
    let tar = tar(&files)?;
    println!("{:9.2} MiB  unpacked", mib(tar.len()));

    let archive = shell::target()?.join("gpu-bundle.tar.xz");
    let packed = xz(&tar)?;
    fs::write(&archive, &packed).with_context(|| archive.display().to_string())?;
    println!("{:9.2} MiB  {}", mib(packed.len()), archive.display());
    println!("`tar xf gpu-bundle.tar.xz` unpacks it, or where there is no xz");
    println!("`python3 -c \"import tarfile; tarfile.open('gpu-bundle.tar.xz').extractall()\"`");
    if packed.len() as u64 > MOST_MIB << 20 {
        bail!("the bundle is larger than {MOST_MIB} MiB");
    }
    Ok(())
}

/// A file of the bundle.
struct File {
    content: Vec<u8>,
    executable: bool,
}

/// The files of the bundle, by path.
fn files() -> Result<BTreeMap<String, File>> {
    let mut files = BTreeMap::new();
    let metadata = ["metadata", "--no-deps", "--format-version=1"];
    let metadata: Value = serde_json::from_str(&shell::stdout(shell::cargo().args(metadata))?)?;
    for binary in binaries(&metadata)? {
        let content = stripped(&binary.path)?;
        let executable = true;
        let file = File {
            content,
            executable,
        };
        files.insert(format!("{}/{}", binary.folder, binary.name), file);
    }
    let fixtures = shell::root().join("tests/fixtures");
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let skipped: Vec<_> = packages.flat_map(skipped_tests).collect();
    for path in files_below(&fixtures).with_context(|| fixtures.display().to_string())? {
        let name = path.strip_prefix(&fixtures)?;
        if skipped.contains(&format!("tests-{}", name.display())) {
            continue;
        }
        let content = fs::read(&path).with_context(|| path.display().to_string())?;
        let executable = false;
        let file = File {
            content,
            executable,
        };
        files.insert(format!("fixtures/{}", name.display()), file);
    }
    let run = File {
        content: RUN.into(),
        executable: true,
    };
    files.insert("run.sh".into(), run);
    Ok(files)
}

/// The executable at `path` without symbols and debug information.
fn stripped(path: &Path) -> Result<Vec<u8>> {
    let place = tempfile::NamedTempFile::new()?;
    let mut strip = Command::new("strip");
    strip
        .arg("--strip-all")
        .arg("-o")
        .arg(place.path())
        .arg(path);
    let status = strip
        .status()
        .context("cannot start `strip` (package binutils)")?;
    if !status.success() {
        bail!("`strip` of {} ended with {status}", path.display());
    }
    fs::read(place.path()).with_context(|| place.path().display().to_string())
}

/// Packs the files into one tar archive, without times, owners and other data that differs from build to build.
fn tar(files: &BTreeMap<String, File>) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, file) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(file.content.len() as u64);
        header.set_mode(if file.executable { 0o755 } else { 0o644 });
        archive.append_data(&mut header, format!("{FOLDER}/{name}"), &*file.content)?;
    }
    Ok(archive.into_inner()?)
}

/// Compresses `text` with a dictionary as large as the text: code that the binaries have in common is then stored once.
fn xz(text: &[u8]) -> Result<Vec<u8>> {
    let mut options = XzOptions::with_preset(PRESET);
    let size = text.len().next_power_of_two().min(1 << 30);
    options.lzma_options = LzmaOptions {
        dict_size: u32::try_from(size)?,
        ..options.lzma_options
    };
    let mut packed = XzWriter::new(Vec::new(), options)?;
    packed.write_all(text)?;
    Ok(packed.finish()?)
}

/// An executable that cargo built.
struct Binary {
    path: PathBuf,
    /// Folder in the bundle: `tests`, `benches`, `examples` or `bin`.
    folder: &'static str,
    name: String,
}

/// Builds the workspace and lists the executables for the bundle. Tests that need no GPU are left out: those of packages that do
/// not depend on `gated-delta`, and those that need cargo or the sources, which their package lists in its manifest under
/// `package.metadata.gpu-bundle.skip`.
fn binaries(metadata: &Value) -> Result<Vec<Binary>> {
    let mut binaries = Vec::new();
    for packages in built_together(metadata) {
        let skipped: Vec<_> = packages.iter().flat_map(|&p| skipped_tests(p)).collect();
        let names = packages
            .iter()
            .filter_map(|package| package["name"].as_str());
        let mut cargo = shell::cargo();
        cargo.args(["build", "--release", "--all-targets"]);
        cargo.args(names.map(|name| format!("--package={name}")));
        cargo
            .arg("--message-format=json-render-diagnostics")
            .stderr(Stdio::inherit());
        for line in shell::stdout(&mut cargo)?.lines() {
            let message: Value = serde_json::from_str(line).context("a message of cargo")?;
            binaries.extend(binary(&message).filter(|binary| !skipped.contains(&binary.name)));
        }
    }
    if binaries.is_empty() {
        bail!("cargo built no executable");
    }
    Ok(binaries)
}

/// Groups of packages with GPU tests, each group built by one cargo command. The workspace's default members are one group, as
/// `cargo test` builds them. Every other package is built alone: the features that it asks of dependencies would rebuild them.
fn built_together(metadata: &Value) -> Vec<Vec<&Value>> {
    let default = metadata["workspace_default_members"].as_array();
    let is_default = |package: &Value| default.is_some_and(|ids| ids.contains(&package["id"]));
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let (together, alone): (Vec<_>, Vec<_>) = packages
        .filter(|package| has_gpu_tests(package))
        .partition(|package| is_default(package));
    let alone = alone.into_iter().map(|package| vec![package]);
    [together].into_iter().chain(alone).collect()
}

/// Whether `package` is `gated-delta` or depends on it. Any other package cannot launch a kernel.
fn has_gpu_tests(package: &Value) -> bool {
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    let mut names = dependencies
        .chain([package])
        .map(|package| &package["name"]);
    names.any(|name| name == "gated-delta")
}

/// Names of the test binaries and fixtures that `package` keeps out of the bundle, each after the package's folder.
fn skipped_tests(package: &Value) -> Vec<String> {
    let skip = package["metadata"]["gpu-bundle"]["skip"].as_array();
    let skip = skip.into_iter().flatten().filter_map(Value::as_str);
    skip.filter_map(|test| Some(format!("{}-{test}", folder_of(package)?)))
        .collect()
}

/// The executable that a message of cargo announces, if any. A test is named after its package's folder.
fn binary(message: &Value) -> Option<Binary> {
    let path = message["executable"].as_str()?.into();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let package = folder_of(message)?;
    let (folder, name) = match (kind, message["profile"]["test"].as_bool()?) {
        ("bench", _) => ("benches", target.to_owned()),
        ("test", _) => ("tests", format!("{package}-{target}")),
        (_, true) => ("tests", format!("{package}-{kind}-{target}")),
        // An example may be a package of its own. Examples without a number are fixtures and tools.
        ("bin" | "example", false) if target.starts_with(|c: char| c.is_ascii_digit()) => {
            ("examples", target.to_owned())
        }
        ("bin", false) => ("bin", target.to_owned()),
        _ => return None,
    };
    Some(Binary { path, folder, name })
}

/// Folder name of the package in a message of cargo.
fn folder_of(message: &Value) -> Option<&str> {
    let manifest = Path::new(message["manifest_path"].as_str()?);
    manifest.parent()?.file_name()?.to_str()
}

/// Every file below `directory`.
fn files_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for item in fs::read_dir(directory)? {
        let path = item?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_without_kernels_to_launch_stay_behind() {
        let package = |name: &str, dependencies: &[&str]| {
            let dependencies = dependencies.iter();
            serde_json::json!({
                "name": name, "manifest_path": "/y/p/Cargo.toml", "metadata": {"gpu-bundle": {"skip": ["a", "b"]}},
                "dependencies": dependencies.map(|name| serde_json::json!({"name": name})).collect::<Vec<_>>(),
            })
        };
        assert!(has_gpu_tests(&package("gated-delta", &["half"])));
        assert!(has_gpu_tests(&package("x", &["half", "gated-delta"])));
        assert!(!has_gpu_tests(&package(
            "x",
            &["half", "gated-delta-kernels"]
        )));
        assert_eq!(skipped_tests(&package("x", &[])), ["p-a", "p-b"]);
        assert_eq!(
            skipped_tests(&serde_json::json!({"metadata": null})),
            [""; 0]
        );
    }

    #[test]
    fn other_packages_than_the_default_members_are_built_by_themselves() {
        let package = |id: &str, dependency: &str| serde_json::json!({"name": id, "id": id, "dependencies": [{"name": dependency}]});
        let metadata = serde_json::json!({
            "workspace_default_members": ["a", "b", "c"],
            "packages": [package("x", "gated-delta"), package("a", "gated-delta"), package("b", "gated-delta"),
                package("c", "half"), package("y", "gated-delta"), package("z", "half")],
        });
        let names = built_together(&metadata).into_iter().map(|packages| {
            packages
                .into_iter()
                .map(|package| package["name"].as_str().unwrap())
                .collect::<Vec<_>>()
        });
        assert_eq!(
            names.collect::<Vec<_>>(),
            [vec!["a", "b"], vec!["x"], vec!["y"]]
        );
    }

    /// The archive is unpacked by readers of xz and tar, which verify the checksums.
    #[test]
    fn the_archive_holds_the_files_and_what_they_share_once() {
        let mut state = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        })
        .take(5 << 20)
        .collect();
        let file = |executable| File {
            content: noise.clone(),
            executable,
        };
        let files = (0..3).map(|i| (format!("tests/{i}"), file(i % 2 == 0)));
        let files: BTreeMap<_, _> = files.collect();
        let packed = xz(&tar(&files).unwrap()).unwrap();
        assert!(packed.len() < 6 << 20, "{}", packed.len());
        let text = lzma_rust2::XzReader::new(&*packed, false);
        let mut archive = tar::Archive::new(text);
        let mut names = files.iter();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let (name, file) = names.next().unwrap();
            assert_eq!(
                entry.path().unwrap().to_str(),
                Some(&*format!("gpu-bundle/{name}"))
            );
            let mode = if file.executable { 0o755 } else { 0o644 };
            assert_eq!(entry.header().mode().unwrap(), mode);
            let mut content = Vec::new();
            io::Read::read_to_end(&mut entry, &mut content).unwrap();
            assert!(content == file.content, "{name}");
        }
        assert!(names.next().is_none());
    }

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
        assert_eq!(
            place_of("09_a", "bin", false).as_deref(),
            Some("examples/09_a")
        );
        assert_eq!(place("example", false), None);
        assert_eq!(place("custom-build", false), None);
        assert!(
            binary(&serde_json::json!({"reason": "build-finished", "executable": null})).is_none()
        );
    }
}
