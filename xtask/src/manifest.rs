//! `host/ptx/manifest.txt`: hashes of the PTX texts and of their sources, the compiler that made them, and their sizes and registers.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::hash;

/// The file's name.
pub const NAME: &str = "manifest.txt";

const TITLE: &str = "\
Written by `cargo xtask ptx`, as are the files beside: edit kernels-gpu instead. `cargo xtask text NAME` prints a text. A file: SHA-256
of its text, bytes of the text, and registers of a thread with each profile of xtask/src/profiles.rs in its order, for sm_90, or for
sm_90a where warpgroups multiply.
";

/// Content of the manifest, one `key: value` a line. A key that the text lacks is empty here.
#[derive(Debug, Default, PartialEq)]
pub struct Manifest {
    /// Identity of the compiler.
    pub compiler: String,
    /// Version of the assembler that counted the registers.
    pub assembler: String,
    /// Hash of the sources and flags.
    pub sources: String,
    /// The PTX files, by file name.
    pub files: BTreeMap<String, File>,
}

/// A PTX file.
#[derive(Debug, Default, PartialEq)]
pub struct File {
    /// Hash of the text.
    pub hash: String,
    /// Size of the text.
    pub bytes: usize,
    /// Registers of a thread, by the number of the profile.
    pub registers: Vec<u32>,
}

impl File {
    /// The file of a text.
    pub fn of(text: &str, registers: Vec<u32>) -> Self {
        Self {
            hash: hash::of_text(text),
            bytes: text.len(),
            registers,
        }
    }

    fn to_text(&self) -> String {
        let words = [self.hash.clone(), self.bytes.to_string()].into_iter();
        let registers = self.registers.iter().map(u32::to_string);
        words.chain(registers).collect::<Vec<_>>().join(" ")
    }

    fn parse(text: &str) -> Self {
        let mut words = text.split(' ');
        Self {
            hash: words.next().unwrap_or_default().to_owned(),
            bytes: words.next().and_then(|word| word.parse().ok()).unwrap_or(0),
            registers: words.filter_map(|word| word.parse().ok()).collect(),
        }
    }
}

impl Manifest {
    /// The file's text.
    pub fn to_text(&self) -> String {
        let Self {
            compiler,
            assembler,
            sources,
            files,
        } = self;
        let mut text =
            format!("{TITLE}compiler: {compiler}\nassembler: {assembler}\nsources: {sources}\n");
        for (name, file) in files {
            let _ = writeln!(text, "{name}: {}", file.to_text()); // a `String` takes everything
        }
        text
    }

    /// Reads the file's text.
    pub fn parse(text: &str) -> Self {
        let mut manifest = Self::default();
        let body = text.strip_prefix(TITLE).unwrap_or(text);
        for (key, value) in body.lines().filter_map(|line| line.split_once(": ")) {
            match key {
                "compiler" => manifest.compiler = value.to_owned(),
                "assembler" => manifest.assembler = value.to_owned(),
                "sources" => manifest.sources = value.to_owned(),
                name => {
                    let file = File::parse(value);
                    manifest.files.insert(name.to_owned(), file);
                }
            }
        }
        manifest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_round_trips() {
        let manifest = Manifest {
            compiler: "rustc 1.96.0: a, LLVM 22.1.8".into(),
            assembler: "release 13.0, V13.0.88".into(),
            sources: "ab".into(),
            files: BTreeMap::from([
                ("a.packed".into(), File::of("text", vec![40, 38])),
                ("b.packed".into(), File::of("b", vec![])),
            ]),
        };
        assert_eq!(manifest.files["a.packed"].bytes, 4);
        assert_eq!(Manifest::parse(&manifest.to_text()), manifest);
        assert_eq!(Manifest::parse("no manifest"), Manifest::default());
    }
}
