//! `cargo xtask ptx`: the committed PTX files, written and checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::entries::{Entry, file_name};
use crate::module::LaunchBounds;
use crate::toolchain::Compiler;
use crate::{assemble, compile, hash, shell, toolchain};

const TITLE: &str = "// Written by `cargo xtask ptx`; edit kernels-gpu instead.";

/// Directory of the committed files.
pub fn directory() -> PathBuf {
    shell::root().join("host/ptx")
}

/// Reads the committed file of `entry`.
pub fn read(entry: Entry) -> Result<String> {
    let path = directory().join(file_name(entry));
    fs::read_to_string(&path)
        .with_context(|| format!("{}; `cargo xtask ptx` makes it", path.display()))
}

/// Compiles, writes the files, and assembles them.
pub fn write() -> Result<()> {
    let files = build(&toolchain::compiler()?)?;
    let directory = directory();
    fs::create_dir_all(&directory)?;
    for name in committed()? {
        if !files.contains_key(&name) {
            fs::remove_file(directory.join(name))?;
        }
    }
    for (name, text) in &files {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    assemble::check_all()
}

/// Fails where the committed files are not what the sources give.
pub fn check() -> Result<()> {
    let problems = stale_files(&hash::of_sources()?)?;
    if !problems.is_empty() {
        bail!(
            "host/ptx is not of these sources; run `cargo xtask ptx` and commit it\n  {}",
            problems.join("\n  ")
        );
    }
    let compiler = toolchain::compiler()?;
    let mut made_by = BTreeSet::new();
    for entry in Entry::ALL {
        made_by.insert(Header::split(&read(*entry)?).0.compiler);
    }
    if made_by.iter().eq([&compiler.identity]) {
        for (name, text) in build(&compiler)? {
            if fs::read_to_string(directory().join(&name))? != text {
                bail!(
                    "host/ptx/{name} is not what this compiler makes of these sources; run `cargo xtask ptx` and commit it"
                );
            }
        }
        println!(
            "host/ptx is what {} makes of these sources",
            compiler.identity
        );
    } else {
        let made_by: Vec<_> = made_by.into_iter().collect();
        println!(
            "host/ptx is of these sources, compiled by {};",
            made_by.join(" and ")
        );
        println!(
            "not compiled anew, because the compiler here is {}",
            compiler.identity
        );
    }
    assemble::check_all()
}

/// The files by name, as `compiler` makes them.
fn build(compiler: &Compiler) -> Result<BTreeMap<String, String>> {
    let module = compile::kernels(compiler)?;
    let known: BTreeSet<_> = Entry::ALL.iter().map(|entry| entry.name()).collect();
    if let Some(name) = module.entry_names().find(|name| !known.contains(name)) {
        bail!("the module has an entry {name} that is not in kernels-gpu/src/entries.rs");
    }
    let sources = hash::of_sources()?;
    let mut files = BTreeMap::new();
    for &entry in Entry::ALL {
        let bounds = LaunchBounds {
            block: entry.block(),
            min_blocks_per_sm: entry.min_blocks_per_sm(),
        };
        let body = module.extract(entry.name(), &bounds);
        let body = body.with_context(|| format!("the module lacks the entry {}", entry.name()))?;
        let header = Header {
            compiler: compiler.identity.clone(),
            sources: sources.clone(),
            body: hash::of_text(&body),
        };
        files.insert(file_name(entry), header.to_text() + &body);
    }
    Ok(files)
}

/// What is wrong with the committed files, one line each.
fn stale_files(sources: &str) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let mut extra = committed()?;
    for &entry in Entry::ALL {
        let name = file_name(entry);
        if !extra.remove(&name) {
            problems.push(format!("{name}: missing"));
            continue;
        }
        let text = read(entry)?;
        let (header, body) = Header::split(&text);
        if header.body != hash::of_text(body) {
            problems.push(format!(
                "{name}: edited by hand (the header's hash of the body does not hold)"
            ));
        }
        if header.sources != sources {
            problems.push(format!("{name}: of other sources or flags"));
        }
    }
    problems.extend(
        extra
            .into_iter()
            .map(|name| format!("{name}: of no entry in kernels-gpu/src/entries.rs")),
    );
    Ok(problems)
}

/// Names of the files in `host/ptx`.
fn committed() -> Result<BTreeSet<String>> {
    let directory = directory();
    let mut names = BTreeSet::new();
    for item in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
        names.insert(item?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// The comment lines that begin each file. What a file lacks is empty.
#[derive(Debug, Default, PartialEq)]
struct Header {
    /// Identity of the compiler.
    compiler: String,
    /// SHA-256 of the sources and flags.
    sources: String,
    /// SHA-256 of the text below the header.
    body: String,
}

impl Header {
    fn to_text(&self) -> String {
        let Self {
            compiler,
            sources,
            body,
        } = self;
        format!(
            "{TITLE}\n// compiler: {compiler}\n// sources: sha256 {sources}\n// body: sha256 {body}\n"
        )
    }

    fn split(text: &str) -> (Self, &str) {
        let mut header = Self::default();
        let mut rest = text;
        while let Some((line, after)) = rest.split_once('\n') {
            let Some(comment) = line.strip_prefix("// ") else {
                break;
            };
            let value = |key| comment.strip_prefix(key).map(str::to_owned);
            if let Some(compiler) = value("compiler: ") {
                header.compiler = compiler;
            } else if let Some(sources) = value("sources: sha256 ") {
                header.sources = sources;
            } else if let Some(body) = value("body: sha256 ") {
                header.body = body;
            }
            rest = after;
        }
        (header, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        let header = Header {
            compiler: "rustc 1.96.0, LLVM 22.1.8".into(),
            sources: "ab".into(),
            body: "cd".into(),
        };
        let text = header.to_text() + ".version 7.4\n";
        assert_eq!(Header::split(&text), (header, ".version 7.4\n"));
        assert_eq!(Header::split("no header"), (Header::default(), "no header"));
    }
}
