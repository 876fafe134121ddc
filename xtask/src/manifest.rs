//! `host/ptx/manifest.txt`: hashes of the PTX files and of their sources, and the compiler that made them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The file's name.
pub const NAME: &str = "manifest.txt";

const TITLE: &str =
    "Written by `cargo xtask ptx`; hashes are SHA-256, of the files without their first line.\n";

/// Content of the manifest, one `key: value` a line. A key that the text lacks is empty here.
#[derive(Debug, Default, PartialEq)]
pub struct Manifest {
    /// Identity of the compiler.
    pub compiler: String,
    /// Hash of the sources and flags.
    pub sources: String,
    /// Hash of each PTX file without its first line, by file name.
    pub bodies: BTreeMap<String, String>,
}

impl Manifest {
    /// The file's text.
    pub fn to_text(&self) -> String {
        let Self {
            compiler, sources, ..
        } = self;
        let mut text = format!("{TITLE}compiler: {compiler}\nsources: {sources}\n");
        for (name, hash) in &self.bodies {
            let _ = writeln!(text, "{name}: {hash}"); // a `String` takes everything
        }
        text
    }

    /// Reads the file's text.
    pub fn parse(text: &str) -> Self {
        let mut manifest = Self::default();
        let body = text.strip_prefix(TITLE).unwrap_or(text);
        for (key, value) in body.lines().filter_map(|line| line.split_once(": ")) {
            let value = value.to_owned();
            match key {
                "compiler" => manifest.compiler = value,
                "sources" => manifest.sources = value,
                name => {
                    manifest.bodies.insert(name.to_owned(), value);
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
            sources: "ab".into(),
            bodies: BTreeMap::from([("a.ptx".into(), "cd".into()), ("b.ptx".into(), "ef".into())]),
        };
        assert_eq!(Manifest::parse(&manifest.to_text()), manifest);
        assert_eq!(Manifest::parse("no manifest"), Manifest::default());
    }
}
