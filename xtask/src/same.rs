//! `cargo xtask ptx --same REVISION`: proves that a change of the kernels' source leaves their code as it is.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::process::Command;

use anyhow::{Context, Result, bail};
use tar::Archive;

use crate::assemble::Scope;
use crate::entries::EXTENSION;
use crate::module::minimal;
use crate::{hash, ptx, shell, text, toolchain};

/// Compiles the kernels, compares their texts with those in `host/ptx` of `revision`, and prints the differences. Fails if a text was
/// changed, added or removed. A text in which only the entry's symbol differs counts as renamed. `only` limits this to entries whose
/// name contains the text.
pub fn compare_with(revision: &str, only: Option<&str>) -> Result<()> {
    let scope = only.map_or(Scope::All, Scope::Only);
    let now = ptx::compiled(&toolchain::compiler()?, scope)?;
    let mut before = of_revision(revision)?;
    before
        .retain(|name, _| only.is_none_or(|only| name.trim_end_matches(EXTENSION).contains(only)));
    let changes = Changes::between(&before, &now);
    println!("{changes}");
    if !changes.are_none() {
        bail!("these sources do not give the texts of {revision}");
    }
    Ok(())
}

/// The texts of `host/ptx` in `revision`, by the name of their file now. They were files of their own once, with a title.
fn of_revision(revision: &str) -> Result<BTreeMap<String, String>> {
    let mut git = Command::new("git");
    git.args(["archive", "--format=tar", revision, "host/ptx"]);
    let tar = shell::bytes(git.current_dir(shell::root()))?;
    let mut files = BTreeMap::new();
    for file in Archive::new(&*tar).entries()? {
        let mut file = file?;
        let path = file.path()?.into_owned();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let of_file = || path.display().to_string();
        if name.ends_with(EXTENSION) {
            let text = ptx::unpacked(&bytes).with_context(of_file)?;
            files.insert(name.into_owned(), text);
        } else if let Some(entry) = name.strip_suffix(".ptx") {
            let text = String::from_utf8(bytes).with_context(of_file)?;
            let (_title, text) = text.split_once('\n').unwrap_or_default();
            files.insert(entry.to_owned() + EXTENSION, text.to_owned());
        }
    }
    Ok(files)
}

/// PTX files by kind of change, each with its size in bytes.
#[derive(Debug, Default, PartialEq)]
struct Changes<'a> {
    same: Vec<(&'a str, usize)>,
    /// Bytes in the revision and now.
    changed: Vec<(&'a str, [usize; 2])>,
    /// The old name, then the new one.
    renamed: Vec<([&'a str; 2], usize)>,
    added: Vec<(&'a str, usize)>,
    removed: Vec<(&'a str, usize)>,
}

impl<'a> Changes<'a> {
    fn between(before: &'a BTreeMap<String, String>, now: &'a BTreeMap<String, String>) -> Self {
        let mut changes = Self::default();
        for (name, old) in before {
            match now.get(name) {
                Some(new) if body_hash(name, new) == body_hash(name, old) => {
                    changes.same.push((name, new.len()));
                }
                Some(new) => changes.changed.push((name, [old.len(), new.len()])),
                None => changes.removed.push((name, old.len())),
            }
        }
        // Names of the removed texts by body hash: two entries may have the same body.
        let mut gone = BTreeMap::<_, Vec<_>>::new();
        for &(name, _) in &changes.removed {
            let hash = body_hash(name, &before[name]);
            gone.entry(hash).or_default().push(name);
        }
        for (name, new) in now.iter().filter(|(name, _)| !before.contains_key(*name)) {
            match gone.get_mut(&body_hash(name, new)).and_then(Vec::pop) {
                Some(old) => changes.renamed.push(([old, name], new.len())),
                None => changes.added.push((name, new.len())),
            }
        }
        let is_renamed = |name| changes.renamed.iter().any(|([old, _], _)| *old == name);
        changes.removed.retain(|&(name, _)| !is_renamed(name));
        changes
    }

    /// Whether every text is the same or renamed.
    fn are_none(&self) -> bool {
        self.changed.is_empty() && self.added.is_empty() && self.removed.is_empty()
    }
}

impl fmt::Display for Changes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, [before, now]) in &self.changed {
            writeln!(f, "changed  {name}, {before} bytes to {now}")?;
        }
        for ([old, new], bytes) in &self.renamed {
            writeln!(f, "renamed  {old} to {new}, {bytes} bytes")?;
        }
        for (kind, texts) in [("added", &self.added), ("removed", &self.removed)] {
            for (name, bytes) in texts {
                writeln!(f, "{kind:<8} {name}, {bytes} bytes")?;
            }
        }
        let bytes: usize = self.same.iter().map(|(_, bytes)| bytes).sum();
        write!(f, "the same: {} texts, {bytes} bytes", self.same.len())
    }
}

/// Hash of the text of the file `name` without the entry's symbol, the symbols of its parameters, and unnecessary white space.
fn body_hash(name: &str, text: &str) -> String {
    let symbol = name.trim_end_matches(EXTENSION);
    let body: String = text.lines().map(|line| minimal(line) + "\n").collect();
    hash::of_text(&text::replace_words(&body, |word| {
        let rest = word.strip_prefix(symbol)?;
        (rest.is_empty() || rest.starts_with("_param_")).then(|| format!("entry{rest}"))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files made of pairs of an entry's name and its only instruction.
    fn files(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
        let text = |(name, instruction): &(&str, &str)| {
            let text =
                format!(".visible .entry {name}(\n\t.param {name}_param_0\n){{ {instruction} }}\n");
            (format!("{name}.packed"), text)
        };
        texts.iter().map(text).collect()
    }

    #[test]
    fn each_text_is_of_one_kind() {
        let before = files(&[("a", "ret;"), ("b", "ret;"), ("c", "add;"), ("d", "mul;")]);
        let now = files(&[("a", "ret;"), ("bb", "ret;"), ("c", "sub;"), ("e", "mad;")]);
        let changes = Changes::between(&before, &now);
        let bytes = |name: &str| now.get(name).unwrap_or_else(|| &before[name]).len();
        let expected = Changes {
            same: vec![("a.packed", bytes("a.packed"))],
            changed: vec![("c.packed", [bytes("c.packed"); 2])],
            renamed: vec![(["b.packed", "bb.packed"], bytes("bb.packed"))],
            added: vec![("e.packed", bytes("e.packed"))],
            removed: vec![("d.packed", bytes("d.packed"))],
        };
        assert_eq!(changes, expected);
        assert!(!changes.are_none());
        let lines = changes.to_string();
        for line in [
            "changed  c.packed, 47 bytes to 47",
            "renamed  b.packed to bb.packed, 49 bytes",
            "added    e.packed, 47 bytes",
            "removed  d.packed, 47 bytes",
            "the same: 1 texts, 47 bytes",
        ] {
            assert!(lines.contains(line), "{line} in\n{lines}");
        }
    }

    #[test]
    fn a_symbol_is_no_change_and_a_copy_is_added() {
        let before = files(&[("a", "ret;"), ("b", "ret;")]);
        let now = files(&[("a", "ret;"), ("x", "ret;")]);
        assert!(Changes::between(&before, &now).are_none());
        let copied = files(&[("a", "ret;"), ("x", "ret;"), ("y", "ret;")]);
        let changes = Changes::between(&before, &copied);
        assert_eq!((changes.renamed.len(), changes.added.len()), (1, 1));
        assert!(!changes.are_none());
    }

    #[test]
    fn words_that_begin_with_the_symbol_count() {
        let texts = ["a", "aa_param_0"].map(|word| files(&[("a", &format!("call {word};"))]));
        assert!(!Changes::between(&texts[0], &texts[1]).are_none());
    }
}
