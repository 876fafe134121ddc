//! What ptxas has said of texts on this machine: it says the same of the same text again.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

use crate::assemble::Usage;

/// Texts without defects, by what [`crate::hash::of_text`] makes of what decides the answer. They are kept in a file, a line each,
/// as they are found: what was assembled before an interruption, or a defect, is not assembled again.
pub struct Known {
    usages: HashMap<String, Usage>,
    file: Mutex<File>,
}

impl Known {
    /// Those of `path`, to which new ones are added.
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

    /// What is known of `key`; else what `find` says, which is remembered.
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

/// Of a whole line: one that is not was being written as somebody interrupted.
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
        // The rest of a line that was being written.
        fs::write(&path, fs::read_to_string(&path).unwrap() + &bad + " 40 5").unwrap();
        let known = Known::open(path).unwrap();
        let asked = || -> Result<Usage> { panic!("asked again") };
        assert_eq!(known.usage(&good, asked).unwrap(), usage);
        assert!(known.usage(&bad, || bail!("a spill")).is_err());
    }
}
