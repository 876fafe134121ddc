//! `cargo xtask ptx`: writes and checks the committed PTX files, which are [packed], and their manifest.

#[path = "../../host/src/ptx/packed.rs"]
mod packed;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::assemble::{Registers, Scope};
use crate::entries::{self, Entry, file_name};
use crate::manifest::{File, Manifest};
use crate::module::{Cluster, LaunchBounds};
use crate::toolchain::Compiler;
use crate::{assemble, compile, hash, manifest, shell, toolchain};

/// Directory of the committed files.
pub fn directory() -> PathBuf {
    shell::root().join("host/ptx")
}

/// The committed text of `entry`.
pub fn read(entry: Entry) -> Result<String> {
    let path = directory().join(file_name(entry));
    read_file(&path).context("`cargo xtask ptx` makes it")
}

/// The text of a packed file.
fn read_file(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    unpacked(&bytes).with_context(|| path.display().to_string())
}

/// The text in the bytes of a file.
pub fn unpacked(bytes: &[u8]) -> Result<String> {
    packed::unpacked(bytes).context("damaged")
}

/// Prints the text of an entry's file, or of any packed file.
pub fn print(of: &str) -> Result<()> {
    let file = Path::new(of);
    let text = match file.is_file() {
        true => read_file(file)?,
        false => read(entries::find(of)?)?,
    };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

/// Packs a text into a file, from which the same text comes back.
fn write_file(path: &Path, text: &str) -> Result<()> {
    let bytes = packed::packed(text);
    if packed::unpacked(&bytes).as_deref() != Some(text) {
        bail!("{}: the packed text is another one", path.display());
    }
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Compiles the kernels, writes the files that change, assembles all, and writes the manifest if nothing is wrong. `only` limits this
/// to entries whose name contains the text, and leaves the other files and the manifest as they are: [`check`] then fails.
pub fn write(only: Option<&str>) -> Result<()> {
    let compiler = toolchain::compiler()?;
    let scope = only.map_or(Scope::All, Scope::Only);
    let files = compiled(&compiler, scope)?;
    let directory = directory();
    fs::create_dir_all(&directory)?;
    let committed = committed()?;
    let is_kept = |name: &String| files.contains_key(name) || name == manifest::NAME;
    let stale = |name: &&String| only.is_none() && !is_kept(name);
    for name in committed.keys().filter(stale) {
        fs::remove_file(directory.join(name))?;
    }
    for (name, text) in &files {
        if committed.get(name) != Some(text) {
            write_file(&directory.join(name), text)?;
        }
    }
    let known = assemble::check(scope)?;
    if only.is_some() {
        return Ok(());
    }
    let file = |(name, text): (&String, &String)| {
        let registers = known.of_files.get(name).into_iter().flatten();
        let registers = registers.map(|(_, registers)| *registers).collect();
        (name.clone(), File::of(text, registers))
    };
    let manifest = Manifest {
        compiler: compiler.identity,
        assembler: known.assembler,
        sources: hash::of_sources()?,
        files: files.iter().map(file).collect(),
    };
    let path = directory.join(manifest::NAME);
    fs::write(&path, manifest.to_text()).with_context(|| path.display().to_string())
}

/// Fails if, by the manifest, the committed files do not belong to the sources. Compiles a part of the families, assembles each
/// entry with a part of its profiles, and compares the texts with the files and the registers with the manifest, as [`write()`]
/// wrote them.
pub fn check() -> Result<()> {
    let committed = committed()?;
    let problems = stale_files(&committed, &hash::of_sources()?);
    if !problems.is_empty() {
        bail!(
            "host/ptx is not of these sources; run `cargo xtask ptx` and commit it\n  {}",
            problems.join("\n  ")
        );
    }
    let manifest = Manifest::parse(&committed[manifest::NAME]);
    let made_by = &manifest.compiler;
    let compiler = toolchain::compiler()?;
    if *made_by == compiler.identity {
        let built = compiled(&compiler, Scope::Part)?;
        if let Some(name) = built.keys().find(|name| built[*name] != committed[*name]) {
            bail!(
                "host/ptx/{name} is not what this compiler makes of these sources; run `cargo xtask ptx` and commit it"
            );
        }
        let (built, all) = (built.len(), Entry::ALL.len());
        println!("{built} of {all} files of host/ptx are what {made_by} makes of these sources");
    } else {
        println!("host/ptx is of these sources, compiled by {made_by};");
        println!(
            "not compiled anew, because the compiler here is {}",
            compiler.identity
        );
    }
    let problems = other_registers(&manifest, &assemble::check(Scope::Part)?);
    if !problems.is_empty() {
        bail!(
            "{} is not what this assembler says; run `cargo xtask ptx` and commit it\n  {}",
            manifest::NAME,
            problems.join("\n  ")
        );
    }
    Ok(())
}

/// The profiles whose registers differ from `manifest`, one line each; none if another assembler counted them.
fn other_registers(manifest: &Manifest, known: &Registers) -> Vec<String> {
    let mut problems = Vec::new();
    if manifest.assembler != known.assembler {
        return problems;
    }
    for (name, by_profile) in &known.of_files {
        let listed = manifest.files.get(name).map(|file| &file.registers[..]);
        for (&number, registers) in by_profile {
            if listed.and_then(|listed| listed.get(number)) != Some(registers) {
                problems.push(format!(
                    "{name}: {registers} registers with profile {number}"
                ));
            }
        }
    }
    problems
}

/// Compiles the entries of `scope` with `compiler`. Returns their PTX files by name.
pub fn compiled(compiler: &Compiler, scope: Scope<'_>) -> Result<BTreeMap<String, String>> {
    let modules = compile::kernels(compiler, scope)?;
    let mut files = BTreeMap::new();
    for &entry in Entry::ALL {
        let bounds = LaunchBounds {
            block: entry.block_of(entry.max_heads()),
            min_blocks_per_sm: match (entry.min_blocks_by_constant(), entry.min_blocks_per_sm()) {
                (true, _) => Some("GD_BLOCKS_PER_SM".to_owned()),
                (false, 0) => None,
                (false, blocks) => Some(blocks.to_string()),
            },
            one_block_before_hopper: entry.one_block_before_hopper(),
            cluster: entry.takes_clusters().then(|| Cluster {
                tiles: entry.cluster(),
                of_heads: entry.has_cluster_of_heads(),
            }),
            warpgroups: entry.takes_warpgroups(),
        };
        let mut of_modules = modules.iter();
        if let Some(body) = of_modules.find_map(|module| module.extract(entry.name(), &bounds)) {
            files.insert(file_name(entry), body);
        }
    }
    Ok(files)
}

/// Problems of the committed files, one line each.
fn stale_files(committed: &BTreeMap<String, String>, sources: &str) -> Vec<String> {
    let Some(manifest) = committed.get(manifest::NAME) else {
        return vec![format!("{}: missing", manifest::NAME)];
    };
    let manifest = Manifest::parse(manifest);
    let mut problems = Vec::new();
    if manifest.compiler.is_empty() {
        problems.push(format!("{}: of no compiler", manifest::NAME));
    }
    if manifest.sources != sources {
        problems.push(format!("{}: of other sources or flags", manifest::NAME));
    }
    let entries: BTreeSet<_> = Entry::ALL.iter().map(|entry| file_name(*entry)).collect();
    for name in &entries {
        match (committed.get(name), manifest.files.get(name)) {
            (None, _) => problems.push(format!("{name}: missing")),
            (_, None) => problems.push(format!("{name}: not in {}", manifest::NAME)),
            (Some(text), Some(file)) if hash::of_text(text) != file.hash => {
                problems.push(format!(
                    "{name}: edited by hand (its hash in {} does not hold)",
                    manifest::NAME
                ));
            }
            _ => (),
        }
    }
    let names = committed.keys().chain(manifest.files.keys());
    let extra: BTreeSet<_> = names
        .filter(|name| *name != manifest::NAME && !entries.contains(*name))
        .collect();
    problems.extend(
        extra
            .into_iter()
            .map(|name| format!("{name}: of no entry in kernels-gpu/src/entries.rs")),
    );
    problems
}

/// The texts of the files in `host/ptx` by name; the text is empty for a damaged file and for any other kind of file.
pub fn committed() -> Result<BTreeMap<String, String>> {
    let directory = directory();
    let mut files = BTreeMap::new();
    for item in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
        let path = item?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
        let text = match name == manifest::NAME {
            true => String::from_utf8(bytes).ok(),
            false => packed::unpacked(&bytes),
        };
        let text = text.unwrap_or_default();
        files.insert(name.into_owned(), text);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Entry = Entry::ALL[0];

    /// Files as `write` leaves them, with `ab` for the hash of the sources.
    fn files() -> BTreeMap<String, String> {
        let texts = Entry::ALL
            .iter()
            .map(|entry| (file_name(*entry), entry.name().to_owned()));
        let manifest = Manifest {
            compiler: "rustc 1.96.0, LLVM 22.1.8".into(),
            assembler: "release 13.0".into(),
            sources: "ab".into(),
            files: texts
                .clone()
                .map(|(name, body)| (name, File::of(&body, vec![40, 38])))
                .collect(),
        };
        let mut files: BTreeMap<_, _> = texts.collect();
        files.insert(manifest::NAME.into(), manifest.to_text());
        files
    }

    /// Problems of [`files`] after `change`.
    fn problems(change: impl FnOnce(&mut BTreeMap<String, String>, &str)) -> Vec<String> {
        let mut files = files();
        change(&mut files, &file_name(FIRST));
        stale_files(&files, "ab")
    }

    /// Removes the lines of the manifest that begin with `key`.
    fn forget(files: &mut BTreeMap<String, String>, key: &str) {
        let manifest = files.get_mut(manifest::NAME).unwrap();
        let lines = manifest.lines().filter(|line| !line.starts_with(key));
        *manifest = lines.map(|line| format!("{line}\n")).collect();
    }

    #[test]
    fn each_problem_is_named() {
        let name = file_name(FIRST);
        let edited = format!("{name}: edited by hand (its hash in manifest.txt does not hold)");
        let unknown = "a.packed: of no entry in kernels-gpu/src/entries.rs";
        assert_eq!(problems(|_, _| ()), [""; 0]);
        assert_eq!(
            stale_files(&files(), "cd"),
            ["manifest.txt: of other sources or flags"]
        );
        assert_eq!(
            problems(|files, name| *files.get_mut(name).unwrap() += " "),
            [edited.as_str()]
        );
        assert_eq!(
            problems(|files, name| drop(files.remove(name))),
            [format!("{name}: missing")]
        );
        assert_eq!(
            problems(|files, _| drop(files.insert("a.packed".into(), "a".into()))),
            [unknown]
        );
        let listed =
            problems(|files, _| *files.get_mut(manifest::NAME).unwrap() += "a.packed: ab\n");
        assert_eq!(listed, [unknown]);
        assert_eq!(problems(forget), [format!("{name}: not in manifest.txt")]);
        assert_eq!(
            problems(|files, _| forget(files, "compiler")),
            ["manifest.txt: of no compiler"]
        );
        let sources = problems(|files, _| forget(files, "sources"));
        assert_eq!(sources, ["manifest.txt: of other sources or flags"]);
        let manifest = problems(|files, _| drop(files.remove(manifest::NAME)));
        assert_eq!(manifest, ["manifest.txt: missing"]);
    }

    #[test]
    fn registers_are_compared_where_the_assembler_is_the_same() {
        let name = file_name(FIRST);
        let manifest = Manifest::parse(&files()[manifest::NAME]);
        let known = |assembler: &str, profile, registers| Registers {
            assembler: assembler.into(),
            of_files: BTreeMap::from([(name.clone(), BTreeMap::from([(profile, registers)]))]),
        };
        let problems = |of: Registers| other_registers(&manifest, &of);
        assert_eq!(problems(known("release 13.0", 1, 38)), [""; 0]);
        assert_eq!(problems(known("release 13.1", 1, 39)), [""; 0]);
        let other = [format!("{name}: 39 registers with profile 1")];
        assert_eq!(problems(known("release 13.0", 1, 39)), other);
        let unlisted = [format!("{name}: 38 registers with profile 2")];
        assert_eq!(problems(known("release 13.0", 2, 38)), unlisted);
    }
}
