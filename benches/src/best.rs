//! The best recorded row of each cell on a GPU, and the gate: rows that are slower than that are measured again, and named.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use crate::deferred;
use crate::prefill;
use crate::record::{self, Row};
use crate::timed::Timed;

/// Value of `--compare` that stands for all records instead of one file.
pub const BEST: &str = "best";

/// Ratio of a row's µs to the best row's above which the row is slower. Below the inverse it is faster.
const SLOWER: f64 = 1.01;

/// Number of times that a slower row is measured again.
pub const AGAIN: usize = 3;

/// Files from before the first graph of a process was thrown away. The first cell of each has gaps that are 0.35 µs too short.
const FIRST_GRAPHS: [&str; 8] = [
    "2026-11-20-gdn-decode-k64.csv",
    "2026-11-20-gdn-decode-qwen3-next.csv",
    "2026-11-20-gdn-decode-qwen3.5.csv",
    "2026-11-20-gdn-decode-warm-l2.csv",
    "2026-11-21-gdn_mtp-bf16-klast.csv",
    "2026-11-21-kda-t1.csv",
    "2026-11-21-kda-t48.csv",
    "2026-11-21-mtp-f32-klast.csv",
];

/// Rows of a file, by table.
pub enum Rows {
    /// Steps.
    Steps(Vec<Row>),
    /// Prefills.
    Prefills(Vec<prefill::Row>),
    /// Steps with deferred write-back.
    Deferred(Vec<deferred::Row>),
}

impl Rows {
    /// Reads the rows of a file. `None` for a file of peers' times, and for a run that ended before its first row.
    ///
    /// # Errors
    /// I/O errors, a malformed line, or columns of no table, each with the path.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let read = || -> Result<Option<Self>> {
            let header = csv::Reader::from_path(path)?.headers()?.clone();
            let has = |column: &str| header.iter().any(|name| name == column);
            let rows = if has("op") && has("variant") {
                let mut rows = record::read(path)?;
                for row in &mut rows {
                    row.variant = todays_entry(&row.variant);
                }
                Self::Steps(rows)
            } else if has("case") && has("entry") {
                let mut rows: Vec<prefill::Row> = record::lines(path)?;
                for row in &mut rows {
                    row.entry = todays_entry(&row.entry);
                }
                Self::Prefills(rows)
            } else if has("operator") && has("count") && has("entry") {
                let mut rows: Vec<deferred::Row> = record::lines(path)?;
                for row in &mut rows {
                    row.entry = todays_entry(&row.entry);
                }
                Self::Deferred(rows)
            } else if has("peer") || header.is_empty() {
                return Ok(None);
            } else {
                bail!(
                    "columns: wanted those of steps (op, variant), prefills (case, entry) or deferred write-back (operator, count, entry)"
                );
            };
            Ok(Some(rows))
        };
        read().with_context(|| path.display().to_string())
    }
}

/// Today's name of an entry in an older record. There were separate entries for each operator (token-by-token kernels, single rows), and
/// for each layout and element of states (prefills).
fn todays_entry(name: &str) -> String {
    // GDN had one entry with the largest f32 tile, KDA had two.
    if name == "gdn_layer_klast_f32_k128_tile128" {
        return "layer_klast_f32_k128_tile128_warps16".to_owned();
    }
    for layout in ["_klast_", "_vlast_"] {
        let Some((kernel, rest)) = name.split_once(layout) else {
            continue;
        };
        let kernel = match kernel {
            "gdn_mtp" | "kda_recurrent" => "recurrent",
            "gdn_deferred" | "kda_deferred" => "deferred",
            "gdn_deferred_layer" | "kda_deferred_layer" => "deferred_layer",
            "gdn_layer" | "kda_layer" => "layer",
            "gdn_layer_mtp" | "kda_layer_mtp" => "layer_mtp",
            _ => continue,
        };
        return [kernel, layout, rest].concat();
    }
    let mut name = name.to_owned();
    if !name.contains("_prefill_") {
        return name;
    }
    for states in ["klast_bf16_", "klast_f32_", "vlast_bf16_", "vlast_f32_"] {
        name = name.replace(states, "");
    }
    match name.split_once("_prefill_single_") {
        Some((_, dims)) => format!("prefill_single_{dims}"),
        None => name,
    }
}

/// The best recorded row of a cell.
#[derive(Clone, Debug)]
pub struct Best {
    /// Time of a launch, in µs.
    pub micros: f64,
    /// Name of the kernel.
    pub variant: String,
    /// Name of the record file.
    pub file: String,
    /// Bandwidth of a copy in that run, in GB/s, if it is known.
    pub copy: Option<f64>,
    bytes_micros: Option<f64>,
}

/// All records of a GPU.
pub struct Records {
    folder: PathBuf,
    files: usize,
    /// Best rows by work; below, by work and variant.
    of_work: HashMap<String, Best>,
    of_variant: HashMap<(String, String), Best>,
    /// Every kernel that has a row.
    timed: BTreeSet<String>,
}

impl Records {
    /// Reads all files in the GPU's folder of `folder`, except `except`. Names of files begin with a date: those before `since` are
    /// skipped.
    ///
    /// # Errors
    /// The errors of [`Rows::read`]; a folder that exists and cannot be listed.
    pub fn read(folder: &Path, gpu: &str, since: &str, except: &[PathBuf]) -> Result<Self> {
        let mut records = Self {
            folder: folder.join(record::folder(gpu)),
            files: 0,
            of_work: HashMap::new(),
            of_variant: HashMap::new(),
            timed: BTreeSet::new(),
        };
        let folder = records.folder.clone();
        if !folder.is_dir() {
            return Ok(records);
        }
        let mut paths = Vec::new();
        for file in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            paths.push(file?.path());
        }
        paths.sort();
        let except: Vec<PathBuf> = except.iter().flat_map(|it| it.canonicalize()).collect();
        for path in paths {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let is_record = name.ends_with(".csv") && *name >= *since;
            let is_excepted = path.canonicalize().is_ok_and(|path| except.contains(&path));
            if is_record && !is_excepted {
                records.add(&path, &name, gpu)?;
            }
        }
        Ok(records)
    }

    fn add(&mut self, path: &Path, name: &str, gpu: &str) -> Result<()> {
        match Rows::read(path)? {
            None => return Ok(()),
            Some(Rows::Steps(rows)) => self.rows(&rows, name, gpu),
            Some(Rows::Prefills(rows)) => self.rows(&rows, name, gpu),
            Some(Rows::Deferred(rows)) => self.rows(&rows, name, gpu),
        }
        self.files += 1;
        Ok(())
    }

    /// Adds the rows of a file.
    pub fn rows<R: Timed>(&mut self, rows: &[R], file: &str, gpu: &str) {
        let first = rows.first().map(Timed::work);
        for row in rows {
            let of_gpu = row.gpu().is_empty() || row.gpu() == gpu;
            let Some(micros) = row.micros().filter(|_| of_gpu) else {
                continue;
            };
            self.timed.insert(row.variant().to_owned());
            let work = row.work();
            if FIRST_GRAPHS.contains(&file) && first.as_ref() == Some(&work) {
                continue;
            }
            let best = || Best {
                micros,
                variant: row.variant().to_owned(),
                file: file.to_owned(),
                copy: row.copy(),
                bytes_micros: row.bytes_micros(),
            };
            let lower = |known: &mut Best| {
                if micros < known.micros {
                    *known = best();
                }
            };
            let of_variant = (work.clone(), row.variant().to_owned());
            (self.of_work.entry(work).and_modify(lower)).or_insert_with(best);
            (self.of_variant.entry(of_variant).and_modify(lower)).or_insert_with(best);
        }
    }

    /// Every kernel that has a row.
    #[must_use]
    pub fn timed(&self) -> &BTreeSet<String> {
        &self.timed
    }

    /// The row to compare with: for a selected variant the best of all variants, for another one its own best.
    #[must_use]
    pub fn best(&self, row: &impl Timed) -> Option<&Best> {
        match row.selected() {
            true => self.of_work.get(&row.work()),
            false => {
                let key = (row.work(), row.variant().to_owned());
                self.of_variant.get(&key)
            }
        }
    }

    /// Compares rows with the best records. A slower row is measured again by `again`, at most `times` times, until it is not slower. Its
    /// fastest measurement replaces it in `rows`.
    ///
    /// # Errors
    /// The errors of `again`; no row has a record, so that nothing is compared.
    pub fn judge<R: Timed>(
        &self,
        rows: &mut [R],
        times: usize,
        mut again: impl FnMut(&R) -> Result<Option<R>>,
    ) -> Result<Verdict> {
        let mut verdict = Verdict::default();
        for row in rows {
            let Some(micros) = row.micros() else { continue };
            let Some(best) = self.best(row) else {
                verdict.unrecorded += 1;
                continue;
            };
            let (mut least, mut count) = (micros, 1);
            while least > SLOWER * best.micros && count <= times {
                let Some(repeated) = again(row)? else { break };
                count += 1;
                if let Some(micros) = repeated.micros().filter(|&micros| micros < least) {
                    (least, *row) = (micros, repeated);
                    verdict.replaced += 1;
                }
            }
            let ratio = least / best.micros;
            verdict.ratios.push(ratio);
            if ratio > SLOWER {
                let line = line(row, best, least, count);
                verdict.slower.push((ratio, line));
            } else if ratio * SLOWER < 1.0 {
                verdict.faster += 1;
            } else {
                verdict.equal += 1;
            }
        }
        ensure!(
            !verdict.ratios.is_empty(),
            "--compare {BEST}: {} record files in {}, none of which has a row of the same work",
            self.files,
            self.folder.display()
        );
        verdict.slower.sort_by(|one, two| two.0.total_cmp(&one.0));
        verdict.files = self.files;
        verdict.folder = self.folder.display().to_string();
        Ok(verdict)
    }
}

fn line<R: Timed>(row: &R, best: &Best, micros: f64, count: usize) -> String {
    let copy = |copy: Option<f64>| copy.map_or_else(|| "?".to_owned(), |it| format!("{it:.0}"));
    // Equal work has equal bytes.
    let by_bytes = || Some(row.copy()? * row.bytes_micros()? / best.bytes_micros?);
    let tune = match best.variant == row.variant() {
        true => String::new(),
        false => format!(" of {}", best.variant),
    };
    format!(
        "{:+.1} %  {}, {}: {micros:.2} µs (least of {count}, copy {} GB/s), best {:.2}{tune} ({}, copy {} GB/s)",
        100.0 * (micros / best.micros - 1.0),
        row.work(),
        row.variant(),
        copy(row.copy()),
        best.micros,
        best.file,
        copy(best.copy.or_else(by_bytes)),
    )
}

/// Result of a comparison of rows with records.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Slower rows, worst first: the ratio of the time to the best, and a line of text.
    pub slower: Vec<(f64, String)>,
    /// Number of rows that take more than 1 % less than the best.
    pub faster: usize,
    /// Number of rows within 1 % of the best.
    pub equal: usize,
    /// Number of rows without a record of the same work.
    pub unrecorded: usize,
    /// Number of times that a repeated measurement replaced a row.
    pub replaced: usize,
    ratios: Vec<f64>,
    files: usize,
    folder: String,
}

impl Verdict {
    /// Number of compared rows.
    #[must_use]
    pub fn compared(&self) -> usize {
        self.ratios.len()
    }

    /// The counts, and a line for each slower row.
    #[must_use]
    pub fn text(&self) -> String {
        let mut ratios = self.ratios.clone();
        ratios.sort_by(f64::total_cmp);
        let median = ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN);
        let mut text = format!(
            "best of {} record files of {}: {} cells compared, {} faster, {} equal (within {:.0} %), {} slower; {} without a record; \
             median {median:.3} of the best\n",
            self.files,
            self.folder,
            self.compared(),
            self.faster,
            self.equal,
            100.0 * (SLOWER - 1.0),
            self.slower.len(),
            self.unrecorded
        );
        for (_, line) in &self.slower {
            let _ = writeln!(text, "slower: {line}");
        }
        text
    }

    /// The failure message, if a row is slower.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let count = self.slower.len();
        (count > 0).then(|| {
            let cells = if count == 1 { "cell is" } else { "cells are" };
            format!(
                "{count} {cells} slower than the best record by more than {:.0} %",
                100.0 * (SLOWER - 1.0)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::todays_entry;
    use gated_delta::Entry;

    #[test]
    fn entries_of_older_records_are_known() {
        for (old, entry) in [
            (
                "gdn_mtp_klast_bf16_k128_tile16_warps2",
                Entry::recurrent_klast_bf16_k128_tile16_warps2,
            ),
            (
                "kda_recurrent_vlast_f32_k128_tile32",
                Entry::recurrent_vlast_f32_k128_tile32,
            ),
            (
                "gdn_layer_klast_f32_k128_tile128",
                Entry::layer_klast_f32_k128_tile128_warps16,
            ),
            (
                "kda_layer_klast_f32_k128_tile128",
                Entry::layer_klast_f32_k128_tile128,
            ),
            (
                "gdn_layer_mtp_klast_f32_k128_tile128",
                Entry::layer_mtp_klast_f32_k128_tile128,
            ),
            (
                "kda_deferred_layer_klast_bf16_k64_tile64",
                Entry::deferred_layer_klast_bf16_k64_tile64,
            ),
            (
                "gdn_deferred_klast_bf16_k128_tile32",
                Entry::deferred_klast_bf16_k128_tile32,
            ),
            (
                "kda_prefill_single_vlast_bf16_k128",
                Entry::prefill_single_k128,
            ),
        ] {
            assert_eq!(todays_entry(old), entry.name());
        }
        for entry in Entry::ALL {
            assert_eq!(todays_entry(entry.name()), entry.name());
        }
    }
}
