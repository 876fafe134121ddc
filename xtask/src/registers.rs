//! Registers of a thread, as ptxas has said of the committed texts for Hopper.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result};

use crate::assemble::substitute;
use crate::entries::{Entry, file_name};
use crate::known::{self, Known};
use crate::profiles::{self, values};
use crate::{ptx, shell, toolchain};

/// The registers that are known.
pub struct Registers {
    /// Version of the assembler.
    pub assembler: String,
    /// Those of a file, by the number of the profile.
    pub of_files: BTreeMap<String, BTreeMap<usize, u32>>,
}

/// All that [`crate::assemble::check`] has found here, of this assembler and the texts as they are.
pub fn known() -> Result<Registers> {
    let version = shell::stdout(Command::new(toolchain::cuda_tools()?.ptxas).arg("--version"))?;
    let known = Known::open(shell::target()?.join("ptx/assembled.txt"))?;
    let mut of_files = BTreeMap::<_, BTreeMap<_, _>>::new();
    for &entry in Entry::ALL {
        let architecture = match entry.takes_warpgroups() {
            true => "sm_90a",
            false => "sm_90",
        };
        let text = ptx::read(entry)?;
        for (number, profile) in profiles::of(entry).iter().enumerate() {
            let text = substitute(&text, &values(entry, profile)?, architecture);
            if let Some(usage) = known.get(&known::key(&version, architecture, &text)) {
                let of_file = of_files.entry(file_name(entry)).or_default();
                of_file.insert(number, usage.registers);
            }
        }
    }
    let assembler = version.lines().find(|line| line.contains("release"));
    let assembler = assembler.context("ptxas does not say its version")?;
    Ok(Registers {
        assembler: assembler.trim().to_owned(),
        of_files,
    })
}
