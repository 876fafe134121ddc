//! Options of the bench, and the cells that they select.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Parser;
use gated_delta::{DType, Formulation};
use gated_delta_harness::arguments::{DecayKind, Operator};

use crate::best::BEST;
use crate::cell::{self, Cell, Mode, Op};
use crate::deferred;
use crate::prefill;
use crate::suite;

/// Folders of records, relative to the folder that the bench is started in.
const RECORDS: [&str; 2] = ["benches/record", "record"];

/// Options that select cells; prefills have the first one too.
const CHOICES: [&str; 12] = [
    "gate",
    "step",
    "op",
    "model",
    "dim",
    "batch",
    "tokens",
    "modes",
    "formulation",
    "state",
    "layout",
    "slots",
];

/// Latency of the operators on the GPU, next to the ceilings of the same run. Combinations that an operator does not have are left out.
#[derive(Parser)]
pub struct Options {
    /// Measure every table of a release instead of selected cells, and every cell that a peer was recorded for.
    #[arg(long, conflicts_with_all = CHOICES)]
    pub all: bool,
    /// Measure the layer step of one token, for each model of docs/models.md's table, at B = 1, 16 and 256.
    #[arg(long, conflicts_with_all = CHOICES, conflicts_with = "all")]
    pub models: bool,
    /// Measure the layer step, convolution to norm, of GDN and KDA, next to the sum of the launches that peers need for it.
    #[arg(long, conflicts_with_all = ["all", "op", "gate"])]
    pub step: bool,
    /// Operators to measure.
    #[arg(long, value_delimiter = ',', default_value = "gdn_decode")]
    pub op: Vec<Op>,
    /// Models to measure. GDN: qwen3-next (default), qwen3.5-397b, qwen3.5-27b; KDA: kimi-linear (default), kda-gva, kimi-k3-tp8,
    /// glm-5.3-flash.
    #[arg(long, value_delimiter = ',')]
    pub model: Vec<String>,
    /// K = V: 64 or 128. A model with K and V of its own keeps them.
    #[arg(long, value_delimiter = ',', default_value = "128")]
    pub dim: Vec<usize>,
    /// Batch sizes. Default: 1 to 512 for one token, 1, 4, 16, 64, 256 for more.
    #[arg(long, value_delimiter = ',')]
    pub batch: Vec<usize>,
    /// Tokens of a row, and its previous tokens. Default: 1; GDN MTP 2, 4, 8; KDA 1, 2, 4, 8.
    #[arg(long, value_delimiter = ',')]
    pub tokens: Vec<usize>,
    /// States that a launch writes. Default: GDN MTP snapshots, update, verify, resume; KDA update and token_slots; else update.
    #[arg(long, visible_alias = "mode", value_delimiter = ',')]
    pub modes: Vec<Mode>,
    /// Formulations: recurrent, parallel.
    #[arg(long, value_delimiter = ',', default_value = "recurrent,parallel")]
    pub formulation: Vec<String>,
    /// Gates of KDA: log (default; prefills: those of their table), softplus, lower_bound.
    #[arg(long, value_delimiter = ',')]
    pub gate: Vec<String>,
    /// State dtypes: bf16, f16, f32.
    #[arg(long, value_delimiter = ',', default_value = "bf16,f32")]
    pub state: Vec<String>,
    /// State layouts: k_last, v_last.
    #[arg(long, value_delimiter = ',', default_value = "k_last,v_last")]
    pub layout: Vec<String>,
    /// Read each row's slot from an index tensor.
    #[arg(long)]
    pub slots: bool,
    /// Keep the level-2 cache warm: one set of buffers instead of a rotation.
    #[arg(long)]
    pub warm: bool,
    /// Measure every variant of a cell, not only the selected one. Print lines for host/src/step/select/tiles.txt, and the cells whose
    /// selected variant is more than 2 % from the best; for prefills and deferred write-back, only the cells.
    #[arg(long)]
    pub tune: bool,
    /// Write the rows to a CSV file, by default record/GPU/DATE.csv.
    #[arg(long, visible_alias = "csv", value_name = "FILE")]
    pub save: Option<Option<PathBuf>>,
    /// Keep the rows in the file of --save, and measure only the missing ones.
    #[arg(long, requires = "save")]
    pub append: bool,
    /// Compare with the rows of a CSV file that was saved before; with `best`, with the best row of all records of this GPU: rows that are
    /// more than 1 % slower are measured again and named, and the run fails.
    #[arg(long, value_name = "FILE|best")]
    pub compare: Option<PathBuf>,
    /// Earliest date, at the beginning of a file's name, of the records that --compare best and --untimed read.
    #[arg(long, value_name = "DATE", default_value = "")]
    pub since: String,
    /// Folder of the records, with a folder for each GPU in it. Default: benches/record or record here, else the bench's own.
    #[arg(long, value_name = "DIR")]
    pub record_dir: Option<PathBuf>,
    /// Seconds to end after. The most important cells are measured first; the number of cells left out is printed.
    #[arg(long, value_name = "SECONDS")]
    pub budget: Option<u64>,
    /// Measure every variant of cells for the kernels without a row in the records of this GPU: one cell for each kernel first, then more
    /// batches.
    #[arg(long, conflicts_with_all = CHOICES, conflicts_with_all = ["all", "models", "step", "prefill", "deferred", "compare"])]
    pub untimed: bool,
    /// Folder to draw an SVG file of every table into.
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// CSV files to show, with all of their rows, instead of measuring; needs no GPU.
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    pub from: Vec<PathBuf>,
    /// Also time the preparation for a layer: compiling all kernels that it is launched with, without the driver's cache and with it.
    #[arg(long)]
    pub prewarm: bool,
    /// Measure the host's time of launches instead, over bare launches of the same kernels: a decode, layers, drafts, a prefill.
    #[arg(long, conflicts_with_all = CHOICES)]
    pub host: bool,
    /// Measure prefills of Qwen3-Next's layer instead: prompts and batches of them, next to the fastest other library; and a prompt of
    /// 1,024 tokens for each model.
    #[arg(long, conflicts_with_all = CHOICES.into_iter().skip(1))]
    pub prefill: bool,
    /// Measure steps with deferred write-back instead, next to steps that write every state: decodes, drafts, and layers of both. Takes
    /// --batch, --dim, --tokens and --state, and measures every variant with --tune.
    #[arg(long, conflicts_with_all = ["all", "step", "prefill", "op", "model", "modes", "formulation", "gate", "layout"])]
    pub deferred: bool,
    /// With --deferred, measure only these operators.
    #[arg(long, requires = "deferred", value_delimiter = ',', value_parser = deferred::OPERATORS)]
    pub cases: Vec<String>,
    /// With --prefill, measure only the cases whose titles begin so: 1x4096; 8 tails; with --heads, the titles from the rows on.
    #[arg(long, requires = "prefill", value_delimiter = ',')]
    pub rows: Vec<String>,
    /// With --prefill, measure only these heads, also of a layer's shards: 2/8 is GDN's H/HV, 4 is KDA's H = HV.
    #[arg(long, requires = "prefill", value_delimiter = ',', value_parser = Heads::parse)]
    pub heads: Vec<Heads>,
    /// With --prefill, measure only bare cases: q and k are normalised before the launch, as for kernels of other libraries.
    #[arg(long, requires = "prefill")]
    pub bare: bool,
    /// With --prefill, split rows at multiples of so many tokens.
    #[arg(long, requires = "prefill")]
    pub split: Option<u32>,
    /// With --prefill, measure every entry whose name contains one of these, selected or not: chain, short, tile64. For all: --tune.
    #[arg(long, requires = "prefill", value_delimiter = ',')]
    pub entry: Vec<String>,
    /// Measure a GPU that has no records, in about two minutes: the self-test of every kernel, the host's and the step's cells, and
    /// prompts. Its output is the report to send.
    #[arg(long, conflicts_with_all = CHOICES, conflicts_with_all = ["all", "prefill", "deferred", "host", "save", "compare", "tune"])]
    pub report: bool,
    /// Use the kernels and the shared memory of a GPU of this compute capability (sm_80, sm_89) on the GPU here. Records are those of
    /// another GPU, "NAME as sm_80". The host's times are left out.
    #[arg(long, value_name = "sm_XY", value_parser = capability, conflicts_with = "host")]
    pub machine: Option<(u32, u32)>,
    /// Print the time of the preparation in this process, in ms, and end.
    #[arg(long, hide = true)]
    pub prewarm_once: bool,
    /// Passed by `cargo bench`, and ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Heads H and HV of an operator's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads(Operator, [usize; 2]);

impl Heads {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<usize>().ok();
        let heads = match text.split_once('/') {
            Some((h, hv)) => number(h)
                .zip(number(hv))
                .map(|(h, hv)| (Operator::Gdn, [h, hv])),
            None => number(text).map(|h| (Operator::Kda, [h, h])),
        };
        let (operator, heads) = heads.ok_or("want H/HV of GDN, 2/8, or H = HV of KDA, 4")?;
        Ok(Self(operator, heads))
    }

    fn are_of(self, case: &prefill::Case) -> bool {
        self == Self(case.operator, case.heads(prefill::HEADS))
    }
}

/// Parses an architecture, `sm_` and ten times the compute capability.
///
/// # Errors
/// Another text.
pub fn capability(text: &str) -> Result<(u32, u32), String> {
    let number = text
        .strip_prefix("sm_")
        .and_then(|digits| digits.parse().ok());
    let number: u32 = number.ok_or("want sm_ and ten times a compute capability: sm_80")?;
    Ok((number / 10, number % 10))
}

impl Options {
    /// Whether `--compare` asks for all records.
    #[must_use]
    pub fn compares_best(&self) -> bool {
        self.compare.as_deref() == Some(Path::new(BEST))
    }

    /// Folder to read records from.
    #[must_use]
    pub fn records(&self) -> PathBuf {
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("record");
        let places = RECORDS.map(PathBuf::from).into_iter();
        let mut places = places.filter(|place| place.is_dir());
        let given = self.record_dir.clone();
        given.or_else(|| places.next()).unwrap_or(own)
    }

    /// Folder for records if `--save` names no file: never one among installed sources.
    #[must_use]
    pub fn saves_to(&self) -> PathBuf {
        let here = RECORDS.into_iter().find(|place| Path::new(place).is_dir());
        let given = self.record_dir.clone();
        given.unwrap_or_else(|| here.unwrap_or(RECORDS[1]).into())
    }

    /// The selected cells, at least one. Combinations that an operator does not have are left out.
    pub fn cells(&self) -> Result<Vec<Cell>> {
        if self.all {
            return suite::cells();
        }
        if self.models {
            return suite::models();
        }
        let ops = if self.step {
            &[Op::GdnLayer, Op::KdaLayer]
        } else {
            &self.op[..]
        };
        let mut cells = Vec::new();
        for &op in ops {
            for cell in self.layers(op)? {
                for &mode in or(&self.modes, default_modes(op)) {
                    for formulation in &self.formulation {
                        let formulation = cell::formulation(formulation)?;
                        for &tokens in or(&self.tokens, default_tokens(op)) {
                            for &batch in or(&self.batch, default_batches(tokens)) {
                                ensure!(batch > 0, "--batch: wanted at least 1, got 0");
                                ensure!(tokens > 0, "--tokens: wanted at least 1, got 0");
                                cells.push(Cell {
                                    mode,
                                    formulation,
                                    tokens,
                                    batch,
                                    ..cell
                                });
                            }
                        }
                    }
                }
            }
        }
        cells.retain(Cell::exists);
        ensure!(!cells.is_empty(), "no operator has such a cell");
        Ok(cells)
    }

    /// The selected cases of deferred write-back, at least one.
    pub fn deferred_cases(&self) -> Result<Vec<deferred::Case>> {
        for (name, values) in [("--batch", &self.batch), ("--tokens", &self.tokens)] {
            ensure!(!values.contains(&0), "{name}: wanted at least 1, got 0");
        }
        let states = self.state.iter().map(|state| cell::state(state));
        let states: Vec<DType> = states.collect::<Result<_>>()?;
        let batches = &[1, 4, 8, 16, 32, 64, 128, 256, 512];
        for dim in &self.dim {
            ensure!(
                [64, 128].contains(dim),
                "--dim: wanted 64 or 128 with --deferred, got {dim}"
            );
        }
        let mut cases = deferred::cases(or(&self.batch, batches), &self.dim);
        cases.retain(|case| {
            states.contains(&case.state)
                && (self.tokens.is_empty() || self.tokens.contains(&case.drafts.tokens))
                && (self.cases.is_empty() || self.cases.iter().any(|it| it == case.operator_name()))
        });
        ensure!(
            !cases.is_empty(),
            "--deferred has no such case: wanted --tokens 1, 4 or 8, and bf16 states where these are more than 1, but for \
             kda_layer, which has 1 alone"
        );
        Ok(cases)
    }

    /// The selected cases of prefills, at least one: without heads, a gate or bare cases, those of the table.
    pub fn prefill_cases(&self) -> Result<Vec<prefill::Case>> {
        let gates = self.gate.iter().map(|gate| cell::gate(gate));
        let gates: Vec<DecayKind> = gates.collect::<Result<_>>()?;
        let mut cases = prefill::cases();
        if self.bare || !(self.heads.is_empty() && gates.is_empty()) {
            cases.extend(prefill::others());
        }
        cases.retain(|case| {
            let title = match self.heads.is_empty() {
                true => case.title(),
                false => case.rows(),
            };
            (self.heads.is_empty() || self.heads.iter().any(|heads| heads.are_of(case)))
                && (gates.is_empty() || gates.contains(&case.gate))
                && !(self.bare && case.qk_l2norm)
                && (self.rows.is_empty() || self.rows.iter().any(|rows| title.starts_with(rows)))
        });
        ensure!(
            !cases.is_empty(),
            "--prefill has no such case: rows that are not in its table need --heads, --bare or --gate"
        );
        for case in &mut cases {
            case.split = self.split;
        }
        Ok(cases)
    }

    /// The selected layers of an operator, with B = T = 1.
    fn layers(&self, op: Op) -> Result<Vec<Cell>> {
        let names: Vec<&str> = self.model.iter().map(String::as_str).collect();
        let default = if self.step { "softplus" } else { "log" }.to_owned();
        let gates = or(&self.gate, std::slice::from_ref(&default));
        let gates = gates.iter().map(|gate| cell::gate(gate));
        let gates: Vec<DecayKind> = match op.operator() {
            Operator::Kda => gates.collect::<Result<_>>()?,
            Operator::Gdn => vec![DecayKind::Log],
        };
        let mut cells = Vec::new();
        for &name in or(&names, &[op.models()[0].name]) {
            let model = op.model(name)?;
            for &dim in model
                .dim
                .as_ref()
                .map_or(&self.dim[..], std::slice::from_ref)
            {
                for state in &self.state {
                    let state = cell::state(state)?;
                    for layout in &self.layout {
                        let layout = cell::layout(layout)?;
                        cells.extend(gates.iter().map(|&gate| Cell {
                            op,
                            mode: Mode::Update,
                            formulation: Formulation::Recurrent,
                            gate,
                            model,
                            dim,
                            batch: 1,
                            tokens: 1,
                            state,
                            layout,
                            slots: self.slots,
                            cold: !self.warm,
                        }));
                    }
                }
            }
        }
        Ok(cells)
    }
}

fn or<'a, T>(given: &'a [T], default: &'a [T]) -> &'a [T] {
    if given.is_empty() { default } else { given }
}

fn default_modes(op: Op) -> &'static [Mode] {
    match op {
        Op::GdnDecode => &[Mode::Update],
        Op::GdnMtp => &[Mode::Snapshots, Mode::Update, Mode::Verify, Mode::Resume],
        Op::KdaRecurrent => &[Mode::Update, Mode::TokenSlots],
        Op::GdnLayer | Op::KdaLayer => &[Mode::Update],
    }
}

fn default_tokens(op: Op) -> &'static [usize] {
    match op {
        Op::GdnDecode | Op::GdnLayer | Op::KdaLayer => &[1],
        Op::GdnMtp => &[2, 4, 8],
        Op::KdaRecurrent => &[1, 2, 4, 8],
    }
}

fn default_batches(tokens: usize) -> &'static [usize] {
    match tokens {
        1 => &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        _ => &[1, 4, 16, 64, 256],
    }
}
