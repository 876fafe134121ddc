//! Timed rows, and their CSV files.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use gated_delta_harness::arguments::{DecayKind, Operator};
use gated_delta_harness::timing::Micros;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize, Serializer};

use crate::cell::{self, Cell, Mode, Op};

/// A timed variant of a cell.
#[derive(Clone, Debug)]
pub struct Row {
    /// The cell.
    pub cell: Cell,
    /// Name of the kernel.
    pub variant: String,
    /// Whether the library selects this kernel.
    pub selected: bool,
    /// Time per launch, in µs.
    pub micros: Micros,
    /// Time of the floor in µs, if the cell reads and writes each state once.
    pub floor: Option<f64>,
    /// Bytes that a launch has to move.
    pub bytes: u64,
    /// Relative error, compared with the reference.
    pub error: f64,
    /// The run that the row was measured in.
    pub run: Run,
}

/// GPU, driver and ceilings, which all rows of a run share.
#[derive(Clone, Debug)]
pub struct Run {
    /// Bandwidth of a device-to-device copy, in GB/s.
    pub copy: f64,
    /// Time per launch of a kernel that does nothing, in µs.
    pub empty: Option<f64>,
    /// Name of the GPU.
    pub gpu: String,
    /// Version of the driver; empty if unknown.
    pub driver: String,
    /// Clock of the multiprocessors at the beginning of the run, in MHz.
    pub sm_mhz: Option<u32>,
    /// Commit that the bench was built from; empty if unknown.
    pub commit: String,
}

impl Run {
    /// A run on the GPU `gpu`. Driver and clock come from `nvidia-smi`, if there is one.
    #[must_use]
    pub fn now(gpu: String, copy: f64, empty: f64) -> Self {
        let queried = Command::new("nvidia-smi")
            .args([
                "--query-gpu=driver_version,clocks.sm",
                "--format=csv,noheader,nounits",
            ])
            .output();
        let text = queried.map_or_else(
            |_| String::new(),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        );
        let mut fields = text.lines().next().unwrap_or_default().split(',');
        let mut field = || fields.next().unwrap_or_default().trim().to_owned();
        Self {
            copy,
            empty: Some(empty),
            gpu,
            driver: field(),
            sm_mhz: field().parse().ok(),
            commit: env!("GATED_DELTA_COMMIT").to_owned(),
        }
    }
}

/// Writes rows of a table to a CSV file. Creates its folder if necessary.
///
/// # Errors
/// I/O errors, with the path.
pub fn save<T: Serialize>(path: &Path, rows: &[T]) -> Result<()> {
    let write = || -> Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = csv::Writer::from_path(path)?;
        for row in rows {
            file.serialize(row)?;
        }
        Ok(file.flush()?)
    };
    write().with_context(|| path.display().to_string())
}

impl Row {
    /// Bandwidth, in GB/s.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.micros.median / 1e3
    }

    /// Bandwidth relative to a copy's.
    #[must_use]
    pub fn copy_share(&self) -> f64 {
        self.rate() / self.run.copy
    }

    /// Ratio of the kernel's time to the floor's, with the gap between launches subtracted from both.
    #[must_use]
    pub fn kernel_over_floor(&self) -> Option<f64> {
        let (floor, empty) = (self.floor?, self.run.empty?);
        Some((self.micros.median - empty) / (floor - empty))
    }
}

/// A row in the form of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    op: String,
    model: String,
    #[serde(rename = "H")]
    heads: usize,
    #[serde(rename = "HV")]
    value_heads: usize,
    k_dim: usize,
    state: String,
    layout: String,
    mode: String,
    formulation: String,
    gate: String,
    slots: u8,
    #[serde(rename = "T")]
    tokens: usize,
    #[serde(rename = "B")]
    batch: usize,
    l2: String,
    variant: String,
    selected: u8,
    us: f64,
    p10_us: f64,
    p90_us: f64,
    empty_us: Option<f64>,
    floor_us: Option<f64>,
    /// Empty in a record that was copied from a printed table, as the error is.
    bytes: Option<u64>,
    copy_gb_s: f64,
    error: Option<f64>,
    #[serde(default)]
    gpu: String,
    #[serde(default)]
    driver: String,
    #[serde(default)]
    sm_mhz: Option<u32>,
    #[serde(default)]
    commit: String,
}

/// Serialises a row as a line of a record.
impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Line::from(self).serialize(serializer)
    }
}

impl From<&Row> for Line {
    fn from(row: &Row) -> Self {
        let Row {
            cell, micros, run, ..
        } = row;
        let kda = cell.op.operator() == Operator::Kda;
        Self {
            op: cell.op.name().to_owned(),
            model: cell.model.name.to_owned(),
            heads: cell.model.heads,
            value_heads: cell.model.value_heads,
            k_dim: cell.dim,
            state: cell.state.to_string(),
            layout: cell.layout.to_string(),
            mode: cell.mode.name().to_owned(),
            formulation: cell::formulation_name(cell.formulation).to_owned(),
            gate: if kda { cell::gate_name(cell.gate) } else { "" }.to_owned(),
            slots: cell.slots.into(),
            tokens: cell.tokens,
            batch: cell.batch,
            l2: cell.l2().to_owned(),
            variant: row.variant.clone(),
            selected: row.selected.into(),
            us: thousandths(micros.median),
            p10_us: thousandths(micros.p10),
            p90_us: thousandths(micros.p90),
            empty_us: run.empty.map(thousandths),
            floor_us: row.floor.map(thousandths),
            bytes: Some(row.bytes),
            copy_gb_s: run.copy.round(),
            error: Some(three_digits(row.error)),
            gpu: run.gpu.clone(),
            driver: run.driver.clone(),
            sm_mhz: run.sm_mhz,
            commit: run.commit.clone(),
        }
    }
}

impl TryFrom<Line> for Row {
    type Error = anyhow::Error;

    fn try_from(line: Line) -> Result<Self> {
        let op: Op = named("op", &line.op)?;
        let model = op.model(&line.model)?;
        let heads = (line.heads, line.value_heads);
        ensure!(
            heads == (model.heads, model.value_heads),
            "{}: wanted H={} HV={}, got H={} HV={}",
            model.name,
            model.heads,
            model.value_heads,
            heads.0,
            heads.1
        );
        let gate = match line.gate.as_str() {
            "" => DecayKind::Log,
            gate => cell::gate(gate)?,
        };
        Ok(Self {
            cell: Cell {
                op,
                mode: named::<Mode>("mode", &line.mode)?,
                formulation: cell::formulation(&line.formulation)?,
                gate,
                model,
                dim: line.k_dim,
                batch: line.batch,
                tokens: line.tokens,
                state: cell::state(&line.state)?,
                layout: cell::layout(&line.layout)?,
                slots: line.slots != 0,
                cold: line.l2 == "cold",
            },
            variant: line.variant,
            selected: line.selected != 0,
            micros: Micros {
                median: line.us,
                p10: line.p10_us,
                p90: line.p90_us,
            },
            floor: line.floor_us,
            bytes: line.bytes.unwrap_or(0),
            error: line.error.unwrap_or(f64::NAN),
            run: Run {
                copy: line.copy_gb_s,
                empty: line.empty_us,
                gpu: line.gpu,
                driver: line.driver,
                sm_mhz: line.sm_mhz,
                commit: line.commit,
            },
        })
    }
}

/// A CSV file that rows are written to.
pub struct Csv(csv::Writer<File>);

impl Csv {
    /// Creates a new file. Creates its folder if necessary.
    pub fn create(path: &Path) -> Result<Self> {
        let create = || {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            File::create(path)
        };
        let file = create().with_context(|| path.display().to_string())?;
        Ok(Self(csv::Writer::from_writer(file)))
    }

    /// Opens a file that has rows, to append to it.
    pub fn append(path: &Path) -> Result<Self> {
        let file = File::options().append(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        let is_empty = file.metadata().is_ok_and(|it| it.len() == 0);
        let mut writer = csv::WriterBuilder::new();
        Ok(Self(writer.has_headers(is_empty).from_writer(file)))
    }

    /// Writes and flushes a row.
    pub fn write<T: Serialize>(&mut self, row: &T) -> Result<()> {
        self.0.serialize(row)?;
        Ok(self.0.flush()?)
    }
}

/// Reads the rows of a file that [`Csv`] wrote.
pub fn read(path: &Path) -> Result<Vec<Row>> {
    let rows = || -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (number, line) in lines::<Line>(path)?.into_iter().enumerate() {
            rows.push(Row::try_from(line).with_context(|| format!("line {}", number + 2))?);
        }
        Ok(rows)
    };
    rows().with_context(|| path.display().to_string())
}

/// The lines of a file, without further checks.
pub(crate) fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let lines = csv::Reader::from_path(path)?.into_deserialize();
    Ok(lines.collect::<Result<_, _>>()?)
}

/// Folder of a GPU's records: its name without the maker, and without size and kind of its memory.
#[must_use]
pub fn folder(gpu: &str) -> String {
    let is_memory = |word: &str| {
        let size = word.strip_suffix("gb");
        size.is_some_and(|size| size.parse::<u32>().is_ok()) || word.starts_with("hbm")
    };
    let gpu = gpu.to_lowercase();
    let words = gpu.split_whitespace();
    let words = words.filter(|word| *word != "nvidia" && !is_memory(word));
    words.collect::<Vec<_>>().join("-")
}

fn named<T: ValueEnum>(column: &str, name: &str) -> Result<T> {
    T::from_str(name, false).map_err(|_| anyhow::anyhow!("{column}: {name} is not known"))
}

fn thousandths(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

fn three_digits(x: f64) -> f64 {
    format!("{x:.2e}").parse().unwrap_or(x)
}
