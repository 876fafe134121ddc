//! Compiles kernels-gpu to PTX modules, one for each family of entries.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rayon::prelude::*;

use crate::assemble::Scope;
use crate::entries::{Entry, file_name};
use crate::module::Module;
use crate::toolchain::Compiler;
use crate::{hash, ptx, shell};

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

/// Cargo's variable for flags of the compiler, and their separator.
const FLAGS: &str = "CARGO_ENCODED_RUSTFLAGS";
const SEPARATOR: &str = "\x1f";

/// All flags that decide the generated code.
pub fn flags() -> impl Iterator<Item = &'static str> {
    RUSTFLAGS.into_iter().chain(PROFILE)
}

/// [`Scope::Part`] has every third family.
const PART: usize = 3;

/// Compiles the entries of `scope`, and parses the modules.
///
/// Each family is a crate of its own ([`copy_with`]). LLVM's choices in one function depend on the others in its module, so a change of
/// one family would change the machine code of others. Families are compiled concurrently, one on each core.
pub fn kernels(compiler: &Compiler, scope: Scope<'_>) -> Result<Vec<Module>> {
    // A directory for each compiler and set of flags: cargo does not track the assembly as an output of its own.
    let recipe = flags().fold(compiler.identity.clone(), |recipe, flag| {
        recipe + "\n" + flag
    });
    let directory = shell::target()?
        .join("ptx")
        .join(&hash::of_text(&recipe)[..12]);
    if !matches!(scope, Scope::Only(_)) {
        // The crate with all entries has to be free of warnings.
        let mut check = cargo(compiler, "check", &directory.join("check"));
        check.env(
            FLAGS,
            [&RUSTFLAGS[..], &["-Dwarnings"]].concat().join(SEPARATOR),
        );
        shell::run(&mut check)?;
    }

    // A bridge hands out the families in order.
    let families = families(scope)?.into_iter().par_bridge();
    let modules = families.map(|(family, names)| {
        let core = rayon::current_thread_index().unwrap_or_default();
        compile_family(compiler, &family, &names, &directory.join(core.to_string()))
    });
    modules.collect()
}

/// Compiles the entries `names` as a crate of their own, with a target directory of the core.
fn compile_family(
    compiler: &Compiler,
    family: &str,
    names: &[&str],
    directory: &Path,
) -> Result<Module> {
    let begin = Instant::now();
    let mut compile = cargo(compiler, "rustc", directory);
    compile.current_dir(copy_with(family, names)?);
    compile.args(["--crate-type", "cdylib", "--"]);
    compile.args(["--emit=asm", "-Clinker=true", "-Awarnings"]);
    shell::run(&mut compile)?;
    let assembly = directory.join("nvptx64-nvidia-cuda/ptx/deps/gated_delta_kernels.s");
    let of_assembly = || format!("{family}: {}", assembly.display());
    let text = fs::read_to_string(&assembly).with_context(of_assembly)?;
    let module = Module::parse(&text).with_context(of_assembly)?;
    let made: BTreeSet<_> = module.entry_names().collect();
    if made != names.iter().copied().collect() {
        bail!("{family}: wanted the entries {names:?}, got {made:?}");
    }
    let (count, seconds) = (names.len(), begin.elapsed().as_secs());
    println!("compiled {family}: {count} entries in {seconds} s");
    Ok(module)
}

/// Cargo's `command` for the kernels, with a target directory of its own.
fn cargo(compiler: &Compiler, command: &str, directory: &Path) -> Command {
    let mut cargo = shell::cargo();
    compiler.configure(&mut cargo);
    cargo.env(FLAGS, RUSTFLAGS.join(SEPARATOR));
    cargo.args([
        command,
        "--quiet",
        "--package",
        "gated-delta-kernels",
        "--lib",
    ]);
    cargo.args([
        "-Zbuild-std=core",
        "--target",
        "nvptx64-nvidia-cuda",
        "--profile",
        "ptx",
    ]);
    cargo.arg("--target-dir").arg(directory);
    for setting in PROFILE {
        cargo.args(["--config", setting]);
    }
    cargo
}

/// The names of the entries of `scope` by family, those with the most PTX first: they take longest.
fn families(scope: Scope<'_>) -> Result<Vec<(String, Vec<&'static str>)>> {
    let mut families = BTreeMap::<_, (u64, Vec<_>)>::new();
    for &entry in Entry::ALL {
        if matches!(scope, Scope::Only(only) if !entry.name().contains(only)) {
            continue;
        }
        let (bytes, names) = families.entry(family_of(entry.name())).or_default();
        let committed = fs::metadata(ptx::directory().join(file_name(entry)));
        *bytes += committed.map_or(0, |file| file.len());
        names.push(entry.name());
    }
    if let (Scope::Only(only), true) = (scope, families.is_empty()) {
        bail!("no entry has `{only}` in its name");
    }
    let mut families: Vec<_> = families.into_iter().collect();
    families.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
    let families = families.into_iter();
    let families = families.map(|(family, (_, names))| (family, names));
    Ok(match scope {
        Scope::Part => part(families, &hash::of_sources()?).collect(),
        Scope::All | Scope::Only(_) | Scope::On(..) => families.collect(),
    })
}

/// Every [`PART`]-th of `families`. The first follows from the hash of the sources, so that a change takes others.
fn part<T>(families: impl Iterator<Item = T>, sources: &str) -> impl Iterator<Item = T> {
    let first = sources.bytes().map(usize::from).sum::<usize>() % PART;
    families.skip(first).step_by(PART)
}

/// The family of an entry: its name up to its dims, without the layout. Entries without dims are one family.
fn family_of(name: &str) -> String {
    let is_dims = |word: &str| {
        let k = word.strip_prefix('k');
        k.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let words: Vec<_> = name.split('_').collect();
    let stem: Vec<_> = words
        .iter()
        .copied()
        .take_while(|word| !is_dims(word))
        .collect();
    if stem.len() == words.len() {
        return "contracts".to_owned();
    }
    let layouts = ["klast", "vlast"];
    let stem = stem.into_iter().filter(|word| !layouts.contains(word));
    stem.collect::<Vec<_>>().join("_")
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

/// Copies the kernels under `target/`. The copy's table of entries has only the lines of `names`.
fn copy_with(family: &str, names: &[&str]) -> Result<PathBuf> {
    let package = shell::target()?.join("ptx-families").join(family);
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
        Some((name, body)) if body.ends_with(">;") => names.contains(&name),
        _ => true,
    };
    let left: Vec<_> = lines.lines().filter(is_left).collect();
    if left.len() + Entry::ALL.len() != lines.lines().count() + names.len() {
        bail!("{}: the lines of {family} are not found", table.display());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_names_without_dims_and_layouts() {
        assert_eq!(
            family_of("gdn_mtp_parallel_klast_bf16_k64_tile64"),
            "gdn_mtp_parallel_bf16"
        );
        assert_eq!(
            family_of("recurrent_vlast_f32_k96v192_tile32"),
            "recurrent_f32"
        );
        assert_eq!(
            family_of("kda_prefill_chain_k128_tile64_mma"),
            "kda_prefill_chain"
        );
        assert_eq!(family_of("device_contract"), "contracts");
        let all = families(Scope::All).unwrap();
        assert_eq!(
            all.iter().map(|(_, names)| names.len()).sum::<usize>(),
            Entry::ALL.len()
        );
    }

    #[test]
    fn each_family_is_of_one_part() {
        let parts = ["a", "b", "c"].map(|sources| part(0..31, sources).collect::<Vec<_>>());
        assert!(parts.iter().all(|part| (10..=11).contains(&part.len())));
        let mut all = parts.concat();
        all.sort_unstable();
        assert_eq!(all, (0..31).collect::<Vec<_>>());
    }
}
