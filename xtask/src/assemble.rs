//! Assembles entries with ptxas and checks the result.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table};
use gated_delta_kernels::machine;
use rayon::prelude::*;

use crate::entries::{Entry, file_name};
use crate::known::{self, Known};
use crate::profiles::{self, PROFILES, Profile, values};
use crate::text::{defects, replace_words};
use crate::toolchain::{self, CudaTools};
use crate::{hash, ptx, shell};

/// Architectures to assemble for: Ampere, Hopper, Blackwell (data centre), Blackwell (workstation), and Hopper with its own features.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_90", "sm_100", "sm_120", HOPPER];
/// Hopper with features that no other architecture has: its warpgroup instructions.
const HOPPER: &str = "sm_90a";

/// Architectures of the other GPUs, which [`Scope::On`] also assembles for: with [`ARCHITECTURES`] all that `host/docs/engines.md` names but
/// sm_87. Their instructions are those of sm_80, sm_100 and sm_120.
pub const FURTHER: [&str; 4] = ["sm_86", "sm_89", "sm_103", "sm_121"];

/// Entries that may spill on an architecture, and on others with the same major number, and how many bytes (docs/lab-notes.md, Spills
/// that are kept). Blocks of 9 warps have 168 registers a thread, two of them on a multiprocessor 112.
const KEPT_SPILLS: [(Entry, &str, u32); 4] = [
    (Entry::gdn_mtp_parallel_f32_k128_tile128, "sm_80", 24),
    (Entry::gdn_layer_parallel_f32_k128_tile128, "sm_90", 16),
    (Entry::gdn_layer_parallel_f32_k128_tile128_alone, "sm_90", 8),
    (
        Entry::kda_deferred_layer_parallel_klast_bf16_k128_tile64,
        "sm_120",
        8,
    ),
];

/// Architectures that [`Scope::Only`] assembles for.
const QUICK: [&str; 2] = ["sm_90", HOPPER];

/// Selection of entries to compile, and of entries, profiles and architectures to assemble.
#[derive(Clone, Copy)]
pub enum Scope<'a> {
    /// Every entry with every profile for every architecture.
    All,
    /// Compiled: every third family ([`crate::compile`]). Assembled: every entry with one in [`PART`] of its profiles, each for one
    /// architecture; profiles and entries take an entry's architectures in turn. Families and profiles follow from the sources and the
    /// text, so that a change takes others.
    Part,
    /// Entries whose name contains this text; assembled with every profile, for [`QUICK`] alone.
    Only(&'a str),
    /// Compiled: all. Assembled: the selection, for these architectures.
    On(&'a [String], Selection<'a>),
}

/// Entries and profiles to assemble. An empty list selects all of them.
#[derive(Clone, Copy)]
pub struct Selection<'a> {
    /// Texts of which an entry's name contains one.
    pub entries: &'a [String],
    /// Names of profiles.
    pub profiles: &'a [String],
}

impl Selection<'_> {
    fn has(self, entry: Entry, profile: &Profile) -> bool {
        let (entries, profiles) = (self.entries, self.profiles);
        (entries.is_empty() || entries.iter().any(|text| entry.name().contains(text)))
            && (profiles.is_empty() || profiles.contains(&profile.name()))
    }
}

/// See [`Scope::Part`].
const PART: usize = 4;

/// The architectures that `entry` is assembled for. Clusters need Hopper or newer, warpgroup instructions need Hopper itself.
fn served<'a>(entry: Entry, architectures: &[&'a str]) -> Vec<&'a str> {
    let (warpgroups, clusters) = (entry.takes_warpgroups(), entry.takes_clusters());
    let is_served = |architecture: &&str| match *architecture {
        HOPPER => warpgroups,
        it if machine_of(it) < machine::HOPPER => !warpgroups && !clusters,
        _ => !warpgroups,
    };
    let all = architectures.iter().copied();
    all.filter(is_served).collect()
}

impl<'a> Scope<'a> {
    /// Architectures that any entry is assembled for.
    fn architectures(self) -> Vec<&'a str> {
        match self {
            Self::On(architectures, _) => architectures.iter().map(String::as_str).collect(),
            _ => ARCHITECTURES.to_vec(),
        }
    }

    /// Architectures and numbered profiles that the `number`-th entry, with this text, is assembled for.
    fn jobs(self, number: usize, entry: Entry, text: &str) -> Vec<(&'a str, usize, Profile)> {
        let served = served(entry, &self.architectures());
        let first = hash::of_text(text).bytes().next().unwrap_or(0) as usize;
        let is_taken = |n: usize, profile: &Profile, place: usize, architecture: &str| match self {
            Self::All => true,
            Self::Part => {
                (first + n).is_multiple_of(PART) && place == (number + n / PART) % served.len()
            }
            Self::Only(only) => entry.name().contains(only) && QUICK.contains(&architecture),
            Self::On(_, selection) => selection.has(entry, profile),
        };
        let mut jobs = Vec::new();
        for (place, &architecture) in served.iter().enumerate() {
            for (n, profile) in profiles::of(entry).into_iter().enumerate() {
                if is_taken(n, &profile, place, architecture) {
                    jobs.push((architecture, n, profile));
                }
            }
        }
        jobs
    }
}

/// Resources of an entry, as ptxas prints them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, bytes.
    pub shared: u32,
}

/// Registers of a thread on Hopper.
pub struct Registers {
    /// Version of the assembler.
    pub assembler: String,
    /// Those of a file, by the number of the profile.
    pub of_files: BTreeMap<String, BTreeMap<usize, u32>>,
}

/// Fills in the load-time constants of `text`, and the words that depend on the machine of `architecture`.
pub fn substitute(text: &str, values: &[(&str, u32)], architecture: &str) -> String {
    let mut values: HashMap<_, _> = values.iter().copied().collect();
    let machine = machine_of(architecture);
    values.insert("GD_MACHINE", machine);
    replace_words(text, |word| match values.get(word) {
        Some(value) => Some(value.to_string()),
        None => machine::word(word, machine).map(str::to_owned),
    })
}

/// The compute capability of an architecture, whose name is `sm_` and ten times this number.
fn capability_of(architecture: &str) -> (u32, u32) {
    let digits = architecture.trim_start_matches(|c: char| !c.is_ascii_digit());
    let number = digits.trim_end_matches(|c: char| !c.is_ascii_digit());
    let capability: u32 = number.parse().unwrap_or(0);
    (capability / 10, capability % 10)
}

fn major_of(architecture: &str) -> u32 {
    capability_of(architecture).0
}

/// The machine (see [`machine`]) of an architecture.
pub fn machine_of(architecture: &str) -> u32 {
    machine::of_capability(capability_of(architecture))
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

/// `cargo xtask assemble`: assembles entries for other architectures than `cargo xtask ptx` does, [`FURTHER`] by default.
pub fn on(architectures: &[String], selection: Selection<'_>) -> Result<()> {
    let further = FURTHER.map(str::to_owned);
    let architectures = match architectures {
        [] => &further[..],
        given => given,
    };
    for name in selection.profiles {
        let mut entries = Entry::ALL.iter();
        if !entries.any(|&entry| profiles::find(entry, name).is_ok()) {
            bail!("no entry has a profile {name}");
        }
    }
    check(Scope::On(architectures, selection)).map(drop)
}

/// Checks the text of every committed entry, assembles the entries of `scope`, and prints their registers and shared memory. A text
/// is not assembled again if the same assembler has accepted it on this machine before ([`known::key`]). Returns the registers for sm_90,
/// or for sm_90a where warpgroups multiply.
pub fn check(scope: Scope<'_>) -> Result<Registers> {
    let tools = toolchain::cuda_tools()?;
    let known = Known::open(shell::target()?.join("ptx/assembled.txt"))?;
    let assembler = shell::stdout(Command::new(&tools.ptxas).arg("--version"))?;
    let texts = Entry::ALL
        .iter()
        .map(|&entry| ptx::read(entry))
        .collect::<Result<Vec<_>>>()?;
    let mut failures = Vec::new();
    let mut jobs = Vec::new();
    for ((number, &entry), text) in Entry::ALL.iter().enumerate().zip(&texts) {
        failures.extend(
            defects(text)
                .into_iter()
                .map(|defect| format!("{}: {defect}", entry.name())),
        );
        let of_entry = scope.jobs(number, entry, text).into_iter();
        jobs.extend(
            of_entry.map(|(architecture, n, profile)| (entry, text, architecture, n, profile)),
        );
    }

    let results: Vec<_> = jobs
        .par_iter()
        .map(|(entry, text, architecture, _, profile)| {
            let (entry, architecture) = (*entry, *architecture);
            let text = substitute(text, &values(entry, profile, architecture)?, architecture);
            let key = known::key(&assembler, architecture, &text);
            let kept = KEPT_SPILLS
                .iter()
                .find(|of| of.0 == entry && major_of(of.1) == major_of(architecture));
            let most = kept.map_or(0, |(.., bytes)| *bytes);
            let usage = known
                .usage(&key, || usage(&tools, &text, architecture, most))
                .with_context(|| {
                    let name = profile.name();
                    format!("{} for {architecture}, profile {name}", entry.name())
                });
            // Errors are printed at once: the table comes after all entries, which takes a while.
            if let Err(error) = &usage {
                eprintln!("{error:#}");
            }
            usage
        })
        .collect();

    let architectures = scope.architectures();
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    let header = ["entry", "threads", "shared"].into_iter();
    table.set_header(header.chain(architectures.iter().copied()));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut results = jobs.iter().zip(results).peekable();
    let mut of_files = BTreeMap::<_, BTreeMap<_, _>>::new();
    for &entry in Entry::ALL {
        let mut shared = 0;
        let mut registers: HashMap<_, Vec<(&Profile, u32)>> = HashMap::new();
        while let Some((job, result)) = results.next_if(|(job, _)| job.0 == entry) {
            match result {
                Ok(usage) => {
                    let of_architecture = registers.entry(job.2).or_default();
                    of_architecture.push((&job.4, usage.registers));
                    let hopper = if entry.takes_warpgroups() {
                        HOPPER
                    } else {
                        "sm_90"
                    };
                    if job.2 == hopper {
                        let of_file = of_files.entry(file_name(entry)).or_default();
                        of_file.insert(job.3, usage.registers);
                    }
                    shared = shared.max(usage.shared);
                }
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        if registers.is_empty() {
            continue;
        }
        let cells = architectures.iter().map(|architecture| {
            let Some(of_architecture) = registers.get(architecture) else {
                return "-".to_owned();
            };
            let canonical = of_architecture
                .iter()
                .find(|(profile, _)| profile.is_canonical());
            let canonical =
                canonical.map_or("-".to_owned(), |(_, registers)| registers.to_string());
            let most = of_architecture.iter().map(|(_, registers)| registers).max();
            format!("{canonical} / {}", most.unwrap_or(&0))
        });
        let shared = (shared + entry.shared_bytes()).to_string();
        table.add_row(
            [entry.name().to_owned(), entry.block().to_string(), shared]
                .into_iter()
                .chain(cells),
        );
    }
    println!(
        "{table}\nregisters of a thread: profile {} / most of any profile that was assembled; shared: bytes of a block",
        PROFILES[0]
    );
    if !failures.is_empty() {
        bail!("host/ptx has defects\n  {}", failures.join("\n  "));
    }
    let assembler = assembler.lines().find(|line| line.contains("release"));
    let assembler = assembler.context("ptxas does not say its version")?;
    Ok(Registers {
        assembler: assembler.trim().to_owned(),
        of_files,
    })
}

/// Assembles a text without load-time constants; fails on warnings, and on more than `most` bytes of local memory.
fn usage(tools: &CudaTools, text: &str, architecture: &str, most: u32) -> Result<Usage> {
    let directory = tempfile::tempdir()?;
    let (_, printed) = assemble(tools, text, architecture, directory.path())?;
    let memory = printed
        .lines()
        .find(|line| line.contains("bytes stack frame"));
    let memory = memory
        .with_context(|| format!("ptxas does not speak of the stack\n{printed}"))?
        .trim();
    let has_none = memory == "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    if !has_none && number_before(memory, " bytes stack frame").is_none_or(|bytes| bytes > most) {
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

/// The number before `unit` in the output of ptxas.
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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn architectures_are_of_machines() {
        let machines = ARCHITECTURES.map(machine_of);
        let [ampere, hopper, blackwell] = [machine::AMPERE, machine::HOPPER, machine::BLACKWELL];
        assert_eq!(machines, [ampere, hopper, blackwell, blackwell, hopper]);
    }

    /// A part is a quarter of the work. Several texts together have all profiles, all entries together all architectures.
    #[test]
    fn a_part_is_of_every_entry_and_over_texts_of_every_profile() {
        let mut architectures = BTreeSet::new();
        for (number, &entry) in Entry::ALL.iter().enumerate() {
            let all = profiles::of(entry).len();
            let mut taken = BTreeSet::new();
            for text in 0..32 {
                let jobs = Scope::Part.jobs(number, entry, &text.to_string());
                assert!((1..=all.div_ceil(PART)).contains(&jobs.len()), "{entry:?}");
                architectures.extend(jobs.iter().map(|(architecture, ..)| *architecture));
                taken.extend(jobs.into_iter().map(|(.., profile)| profile));
            }
            assert_eq!(taken.len(), all, "{entry:?}");
            let every = Scope::All.jobs(number, entry, "").len();
            assert_eq!(every, all * served(entry, &ARCHITECTURES).len());
        }
        assert_eq!(architectures, BTreeSet::from(ARCHITECTURES));
    }

    /// Other architectures are served as the known one with the same instructions, and may spill as much.
    #[test]
    fn further_architectures_are_served_as_known_ones() {
        let further = FURTHER.map(str::to_owned);
        let known = ["sm_80", "sm_80", "sm_100", "sm_120"].map(str::to_owned);
        let none = Selection {
            entries: &[],
            profiles: &[],
        };
        for (further, known) in further.iter().zip(&known) {
            assert_eq!(machine_of(further), machine_of(known));
            assert_eq!(major_of(further), major_of(known));
            for (number, &entry) in Entry::ALL.iter().enumerate() {
                let jobs = |on: &String| -> Vec<Profile> {
                    let on = std::slice::from_ref(on);
                    let jobs = Scope::On(on, none).jobs(number, entry, "");
                    jobs.into_iter().map(|(.., profile)| profile).collect()
                };
                assert_eq!(jobs(further), jobs(known), "{entry:?}");
            }
        }
    }

    #[test]
    fn entries_and_profiles_are_selected_by_name() {
        let text =
            |texts: &[&str]| -> Vec<String> { texts.iter().map(|&text| text.to_owned()).collect() };
        let (on, entries) = (text(&["sm_86", "sm_103"]), text(&["prepare_k64", "_mma"]));
        let profiles = text(&["canonical", "narrow-states32"]);
        let selection = Selection {
            entries: &entries,
            profiles: &profiles,
        };
        let mut found = BTreeSet::new();
        for (number, &entry) in Entry::ALL.iter().enumerate() {
            for (architecture, _, profile) in Scope::On(&on, selection).jobs(number, entry, "") {
                found.insert((entry.name(), architecture, profile.name()));
            }
        }
        let of_prepare = ["sm_103", "sm_86"].map(|on| ("gdn_prefill_prepare_k64", on, "canonical"));
        assert!(
            of_prepare.iter().all(|(entry, on, profile)| {
                found.contains(&(*entry, *on, (*profile).to_owned()))
            })
        );
        let chain = "kda_prefill_chain_k128_tile64_mma";
        assert!(found.contains(&(chain, "sm_86", "narrow-states32".to_owned())));
        let is_selected = |name: &str| name == "gdn_prefill_prepare_k64" || name.ends_with("_mma");
        assert!(found.iter().all(|(name, ..)| is_selected(name)));
    }

    #[test]
    fn numbers_are_read_from_what_ptxas_prints() {
        let printed = "ptxas info    : Used 40 registers, used 1 barriers, 528 bytes smem";
        assert_eq!(number_before(printed, " registers"), Some(40));
        assert_eq!(number_before(printed, " bytes smem"), Some(528));
        assert_eq!(number_before(printed, " bytes lmem"), None);
    }
}
