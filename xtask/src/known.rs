//! Answers of ptxas on this machine, kept so that a text is assembled once.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

use crate::assemble::Usage;
use crate::hash;

/// Resources of texts that ptxas accepted, by [`crate::hash::of_text`] of everything that decides the answer. A file has one line
/// for each, written as soon as it is known: after an interruption or a defect, texts accepted before are not assembled again.
pub struct Known {
    usages: HashMap<String, Usage>,
    file: Mutex<File>,
}

/// Defects that [`crate::assemble`] looks for. Another list makes other keys: texts are then assembled again.
const LOOKED_FOR: &str = "stack, spills, warnings";

/// The key of `text` for an architecture, by the `assembler` of this version.
pub fn key(assembler: &str, architecture: &str, text: &str) -> String {
    hash::of_text(&[assembler, LOOKED_FOR, architecture, text].join("\n"))
}

impl Known {
    /// Reads the answers in the file at `path`; new ones are appended to the file.
    pub fn open(path: PathBuf) -> Result<Self> {
        let opened = || -> Result<Self> {
            if let Some(directory) = path.parent() {
                fs::create_dir_all(directory)?;
            }
            let mut options = OpenOptions::new();
            let mut file = options.create(true).read(true).append(true).open(&path)?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            Ok(Self {
                usages: text.split_inclusive('\n').filter_map(of_line).collect(),
                file: Mutex::new(file),
            })
        };
        opened().with_context(|| path.display().to_string())
    }

    /// The answer for `key`. If there is none, `find` is called and its answer is kept.
    pub fn usage(&self, key: &str, find: impl FnOnce() -> Result<Usage>) -> Result<Usage> {
        if let Some(usage) = self.usages.get(key) {
            return Ok(*usage);
        }
        let usage = find()?;
        let line = format!("{key} {} {}\n", usage.registers, usage.shared);
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(line.as_bytes())?;
        Ok(usage)
    }
}

/// Parses a line. A line that an interruption cut short gives nothing.
fn of_line(line: &str) -> Option<(String, Usage)> {
    let words = line.strip_suffix('\n')?.split(' ').collect::<Vec<_>>();
    let [key, registers, shared] = words[..] else {
        return None;
    };
    let usage = Usage {
        registers: registers.parse().ok()?,
        shared: shared.parse().ok()?,
    };
    (key.len() == crate::hash::of_text("").len()).then(|| (key.to_owned(), usage))
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn what_is_known_is_not_asked_for_again_and_a_defect_is_not_known() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/known.txt");
        let [good, bad] = ["good", "bad"].map(crate::hash::of_text);
        let usage = Usage {
            registers: 40,
            shared: 528,
        };
        let known = Known::open(path.clone()).unwrap();
        assert_eq!(known.usage(&good, || Ok(usage)).unwrap(), usage);
        assert!(known.usage(&bad, || bail!("a spill")).is_err());
        // A line that was cut short as it was written.
        fs::write(&path, fs::read_to_string(&path).unwrap() + &bad + " 40 5").unwrap();
        let known = Known::open(path).unwrap();
        let asked = || -> Result<Usage> { panic!("asked again") };
        assert_eq!(known.usage(&good, asked).unwrap(), usage);
        assert!(known.usage(&bad, || bail!("a spill")).is_err());
    }
}
