//! Assembling entries with ptxas, and the checks on what comes out.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table};
use rayon::prelude::*;

use crate::entries::Entry;
use crate::profiles::{PROFILES, values};
use crate::text::{defects, replace_words};
use crate::toolchain::{self, CudaTools};
use crate::{ptx, shell};

/// Ampere, Hopper, Blackwell (data centre), Blackwell (workstation); and what Hopper has alone.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_90", "sm_100", "sm_120", HOPPER];
/// Hopper with its warpgroups.
const HOPPER: &str = "sm_90a";

/// The ones that a quick look is at.
const QUICK: [&str; 2] = ["sm_90", HOPPER];

/// Those that `entry` is assembled for: clusters came with Hopper, and warpgroups went with it. With `only`, none unless its
/// name contains that.
fn architectures(entry: Entry, only: Option<&str>) -> impl Iterator<Item = &'static str> {
    let (warpgroups, clusters) = (entry.takes_warpgroups(), entry.takes_clusters());
    let is_served = move |architecture: &&str| match *architecture {
        HOPPER => warpgroups,
        "sm_80" => !warpgroups && !clusters,
        _ => !warpgroups,
    };
    ARCHITECTURES
        .into_iter()
        .filter(is_served)
        .filter(move |architecture| {
            only.is_none_or(|only| entry.name().contains(only) && QUICK.contains(architecture))
        })
}

/// What ptxas says of an entry.
struct Usage {
    /// Registers of a thread.
    registers: u32,
    /// Static shared memory of a block, bytes.
    shared: u32,
}

/// `text` with its load-time constants filled in.
pub fn substitute(text: &str, values: &[(&str, u32)]) -> String {
    let values: HashMap<_, _> = values.iter().copied().collect();
    replace_words(text, |word| values.get(word).map(u32::to_string))
}

/// Assembles `text` for `architecture` into `directory`. Returns the object and what ptxas printed.
pub fn assemble(
    tools: &CudaTools,
    text: &str,
    architecture: &str,
    directory: &Path,
) -> Result<(PathBuf, String)> {
    let source = directory.join("entry.ptx");
    let object = directory.join("entry.cubin");
    fs::write(&source, text)?;
    let mut ptxas = Command::new(&tools.ptxas);
    ptxas
        .args(["--verbose", "--gpu-name", architecture, "--output-file"])
        .arg(&object)
        .arg(&source);
    let output = shell::capture(&mut ptxas)?;
    let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("ptxas ended with {}\n{}", output.status, printed.trim_end());
    }
    Ok((object, printed.into_owned()))
}

/// Checks the text of every committed entry, assembles it with every profile for every architecture, and prints what it
/// takes. With `only`, entries whose name contains that, for sm_90.
pub fn check(only: Option<&str>) -> Result<()> {
    let tools = toolchain::cuda_tools()?;
    let texts = Entry::ALL
        .iter()
        .map(|&entry| ptx::read(entry))
        .collect::<Result<Vec<_>>>()?;
    let mut failures = Vec::new();
    let mut jobs = Vec::new();
    for (&entry, text) in Entry::ALL.iter().zip(&texts) {
        failures.extend(
            defects(text)
                .into_iter()
                .map(|defect| format!("{}: {defect}", entry.name())),
        );
        for architecture in architectures(entry, only) {
            jobs.extend(PROFILES.map(|profile| (entry, text, architecture, profile)));
        }
    }

    let results: Vec<_> = jobs
        .par_iter()
        .map(|&(entry, text, architecture, profile)| {
            usage(
                &tools,
                &substitute(text, &values(entry, profile)?),
                architecture,
            )
            .with_context(|| format!("{} for {architecture}, profile {profile}", entry.name()))
        })
        .collect();

    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(
        ["entry", "threads", "shared"]
            .into_iter()
            .chain(ARCHITECTURES),
    );
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut by_entry = results.into_iter();
    for entry in Entry::ALL {
        if architectures(*entry, only).next().is_none() {
            continue;
        }
        let mut shared = 0;
        let mut cells = Vec::new();
        for architecture in ARCHITECTURES {
            if !architectures(*entry, only).any(|own| own == architecture) {
                cells.push("-".to_owned());
                continue;
            }
            let mut registers = Vec::new();
            for result in by_entry.by_ref().take(PROFILES.len()) {
                match result {
                    Ok(usage) => {
                        registers.push(usage.registers);
                        shared = shared.max(usage.shared);
                    }
                    Err(error) => failures.push(format!("{error:#}")),
                }
            }
            let canonical = registers.first().map_or("-".to_owned(), u32::to_string);
            let most = registers
                .iter()
                .max()
                .map_or("-".to_owned(), u32::to_string);
            cells.push(format!("{canonical} / {most}"));
        }
        let shared = (shared + entry.shared_bytes()).to_string();
        table.add_row(
            [entry.name().to_owned(), entry.block().to_string(), shared]
                .into_iter()
                .chain(cells),
        );
    }
    println!(
        "{table}\nregisters of a thread: profile {} / most of any profile; shared: bytes of a block",
        PROFILES[0]
    );
    if !failures.is_empty() {
        bail!("host/ptx has defects\n  {}", failures.join("\n  "));
    }
    Ok(())
}

/// Assembles a text without load-time constants; fails on warnings and on local memory.
fn usage(tools: &CudaTools, text: &str, architecture: &str) -> Result<Usage> {
    let directory = tempfile::tempdir()?;
    let (_, printed) = assemble(tools, text, architecture, directory.path())?;
    let memory = printed
        .lines()
        .find(|line| line.contains("bytes stack frame"));
    let memory = memory
        .with_context(|| format!("ptxas does not speak of the stack\n{printed}"))?
        .trim();
    if memory != "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" {
        bail!("{memory}");
    }
    let is_warning = |line: &&str| line.contains("warning") || line.contains("Performance Loss");
    if let Some(warning) = printed.lines().find(is_warning) {
        bail!("{warning}");
    }
    let registers = number_before(&printed, " registers");
    let registers =
        registers.with_context(|| format!("ptxas does not say how many registers\n{printed}"))?;
    Ok(Usage {
        registers,
        shared: number_before(&printed, " bytes smem").unwrap_or(0),
    })
}

/// The number that stands before `unit` in what ptxas prints.
fn number_before(printed: &str, unit: &str) -> Option<u32> {
    let before = &printed[..printed.find(unit)?];
    before
        .rsplit(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_what_ptxas_prints() {
        let printed = "ptxas info    : Used 40 registers, used 1 barriers, 528 bytes smem";
        assert_eq!(number_before(printed, " registers"), Some(40));
        assert_eq!(number_before(printed, " bytes smem"), Some(528));
        assert_eq!(number_before(printed, " bytes lmem"), None);
    }
}
