//! Prefills with Qwen3-Next's heads, and with Kimi-Linear's (log decay and β given, or the gate computed): prompts of all sizes, batches
//! of prompts, and mixed batches, with other states and with a convolution and a norm, next to the fastest other library; and a prompt
//! of each model. Other heads, and q and k normalised before the launch, are measured on request. Each row is checked against the
//! reference before it is timed.

mod cases;
mod peers;
mod values;

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use anyhow::{Context as _, Result, ensure};
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use gated_delta::{
    Convolution, DType, Entry, Error, Formulation, Gates, GdnGates, Inputs, KdaDecay, KdaGates,
    Library, Norm, Options, StateLayout, States, Step, StreamRef, Work,
};
use gated_delta_harness::arguments::{DecayKind, Operator};
use gated_delta_harness::timing::{Micros, Timer};
use gated_delta_reference::tolerance;
use half::bf16;
use serde::{Deserialize, Serialize};

use crate::cell::gate_name;
use crate::record::{Run, folder};
use crate::slab::{Slab, sets_for, upload};

pub use cases::{Case, HEADS, cases, others};
pub use peers::Peers;
use values::{EPS, TAPS, Truth, Values, truths};

/// Largest relative errors: of o in bf16, and of f32 states. For bf16 states the first one counts.
const ERRORS: [f64; 2] = [2.5e-3, 2e-3];
/// Declared length of the longest row that makes no promise, so that kernels for longer rows accept the rows too.
const UNPROMISED: usize = usize::MAX;

/// Device of a run, and selection of entries.
pub struct Bench<'a> {
    /// The library, on a GPU or on the simulator.
    pub library: &'a Library,
    /// Timer, and the data that all rows of the run share. Without it, rows are only checked.
    pub timer: Option<(&'a Timer, &'a Run)>,
    /// Heads H and HV, of GDN and of KDA.
    pub heads: [[usize; 2]; 2],
    /// Whether every entry that computes a case is measured, not only the selected one.
    pub every_entry: bool,
    /// Parts of the names of entries to measure; if empty, `every_entry` decides.
    pub entries: &'a [String],
}

/// A measured row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Title of the case: operator and heads if these are not the table's, lengths of its rows, and unusual properties.
    pub case: String,
    /// Dtype of the states.
    pub state: String,
    /// Name of the last entry of the launch, other than the one for windows.
    pub entry: String,
    /// Whether the library selects this entry.
    pub selected: bool,
    /// Relative error of o, ‖got − exact‖ / ‖exact‖, over the sampled rows and heads.
    pub error_o: f64,
    /// Relative error of the final states.
    pub error_state: f64,
    /// Median time of a launch, in µs; `None` without a timer, or if the result is wrong.
    pub us: Option<f64>,
    /// 10th percentile over the replays, in µs.
    pub us_p10: Option<f64>,
    /// 90th percentile over the replays, in µs.
    pub us_p90: Option<f64>,
    /// Time in µs that the bytes of a launch take at a copy's bandwidth.
    pub bytes_us: Option<f64>,
    /// Time in µs of the fastest other library for the same work, if it was recorded on the same GPU.
    pub peer_us: Option<f64>,
    /// Name of that library, the additional work that its time includes, and whether a library is faster with other values.
    pub peer: Option<String>,
    /// Bandwidth of a copy in the same run, in GB/s. Older records lack this column and those below.
    #[serde(default)]
    pub copy_gb_s: Option<f64>,
    /// Name of the GPU.
    #[serde(default)]
    pub gpu: String,
    /// Version of the driver.
    #[serde(default)]
    pub driver: String,
    /// Commit that the bench was built from.
    #[serde(default)]
    pub commit: String,
}

impl Row {
    /// A row of a case without times.
    #[must_use]
    pub fn untimed(case: &Case, entry: &str, [error_o, error_state]: [f64; 2]) -> Self {
        Self {
            case: case.title(),
            state: case.state.to_string(),
            entry: entry.to_owned(),
            selected: false,
            error_o,
            error_state,
            us: None,
            us_p10: None,
            us_p90: None,
            bytes_us: None,
            peer_us: None,
            peer: None,
            copy_gb_s: None,
            gpu: String::new(),
            driver: String::new(),
            commit: String::new(),
        }
    }

    /// Adds to the row the fastest of the peers that were recorded on this GPU for the same work.
    pub fn put_beside(&mut self, peers: &Peers, gpu: &str) {
        (self.peer_us, self.peer) = peers.best(gpu, &self.case, &self.state).unzip();
    }
}

/// Rows, and failures.
#[derive(Debug, Default)]
pub struct Measured {
    /// Rows, in the order of the cases.
    pub rows: Vec<Row>,
    /// Messages about rows with wrong results.
    pub failures: Vec<String>,
}

/// Buffer sets of a case.
struct Buffers<'a> {
    case: &'a Case,
    heads: [usize; 2],
    sets: usize,
    q: Slab,
    k: Slab,
    v: Slab,
    gate: Slab,
    a_log: Slab,
    dt_bias: Slab,
    beta: Slab,
    o: Slab,
    pool: Slab,
    cu_seqlens: Slab,
    write_slots: Slab,
    kept: Slab,
    /// One workspace for all sets, as the launches of one stream share it.
    workspace: Slab,
    layer: Option<Around>,
}

/// Buffers of the convolution and the norm.
struct Around {
    x: Slab,
    weight: Slab,
    windows: Slab,
    z: Slab,
    norm: Slab,
}

impl<'a> Buffers<'a> {
    fn new(library: &Library, case: &'a Case, heads: [usize; 2], values: &Values) -> Result<Self> {
        let [_, hv] = heads;
        let (total, rows, v_dim) = (case.tokens(), case.lengths.len(), case.value_dim());
        let state = values.states(case);
        let channels = case.channels(heads);
        let of_launch = total * 2 * (channels + hv * v_dim) + 2 * rows * state.len();
        let sets = sets_for(library, of_launch);
        // Inputs that the launch reads have values for all tokens; the others have the size of one token.
        let [qkv, x] = match case.layer {
            true => [0, total],
            false => [total, 0],
        };
        let [q, k] = values.qk(case);
        let tokens = |count: usize, unit: &[u8]| -> Result<Slab> {
            let bytes = unit.len() / values.tokens * count.max(1);
            Slab::filled(library, sets, bytes, unit).with_context(|| case.title())
        };
        let mut bounds = vec![0i32];
        for length in &case.lengths {
            bounds.push(bounds[bounds.len() - 1] + *length as i32);
        }
        let count = rows as i32;
        let kept: Vec<i32> = (0..(rows * case.checkpoints()) as i32)
            .map(|i| 2 * count + i)
            .collect();
        let slots = case.slots();
        let layer = match case.layer {
            true => Some(Around {
                x: tokens(x, bytemuck::cast_slice(&values.x))?,
                weight: upload(library, 1, &values.weight)?,
                windows: {
                    let unit: &[u8] = bytemuck::cast_slice(&values.window);
                    Slab::filled(library, sets, slots * unit.len(), unit)?
                },
                z: tokens(x, bytemuck::cast_slice(&values.z))?,
                norm: upload(library, 1, &values.norm)?,
            }),
            false => None,
        };
        let mut buffers = Self {
            case,
            heads,
            sets,
            q: tokens(qkv, bytemuck::cast_slice(&q))?,
            k: tokens(qkv, bytemuck::cast_slice(&k))?,
            v: tokens(qkv, bytemuck::cast_slice(&values.v))?,
            gate: match case.operator {
                Operator::Gdn => tokens(total, bytemuck::cast_slice(&values.gate))?,
                Operator::Kda => {
                    let gates = &values.gates[usize::from(case.gate != DecayKind::Log)];
                    tokens(total, bytemuck::cast_slice(gates))?
                }
            },
            a_log: upload(library, 1, &values.a_log)?,
            dt_bias: upload(library, 1, &values.dt_bias)?,
            beta: tokens(total, bytemuck::cast_slice(&values.betas(case)))?,
            o: Slab::new(library, sets, total * hv * v_dim * 2)?,
            pool: Slab::filled(library, sets, slots * state.len(), &state)?,
            cu_seqlens: upload(library, 1, &bounds)?,
            write_slots: upload(library, 1, &(count..2 * count).collect::<Vec<_>>())?,
            kept: upload(library, 1, &[kept, vec![-1]].concat())?,
            workspace: Slab::new(library, 1, 16)?,
            layer,
        };
        let bytes = buffers.step(0, UNPROMISED)?.workspace_bytes()?;
        buffers.workspace = Slab::new(library, 1, bytes.max(16))?;
        Ok(buffers)
    }

    /// A step in which row b starts from slot b and ends in slot B + b. `longest` is the declared length of the longest row.
    fn step(&self, set: usize, longest: usize) -> Result<Box<dyn Work + '_>, Error> {
        let (total, dim, hv) = (self.case.tokens(), self.case.dim, self.heads[1]);
        let beta = self.beta.tensor(set, DType::F32, &[1, total, hv])?;
        if self.case.operator == Operator::Gdn {
            let gate = self.gate.tensor(set, DType::F32, &[1, total, hv])?;
            return self.step_of(set, longest, GdnGates::given(gate, beta));
        }
        let gate = self.gate.tensor(set, DType::Bf16, &[1, total, hv, dim])?;
        let a_log = self.a_log.tensor(0, DType::F32, &[hv])?;
        let dt_bias = Some(self.dt_bias.tensor(0, DType::F32, &[hv, dim])?);
        let kind = match self.case.gate {
            DecayKind::Log => KdaDecay::Log,
            DecayKind::Softplus => KdaDecay::Softplus { a_log, dt_bias },
            DecayKind::LowerBound(lower_bound) => KdaDecay::LowerBound {
                lower_bound,
                a_log: Some(a_log),
                dt_bias,
            },
        };
        let gates = KdaGates::new(gate, kind, beta, self.case.beta);
        self.step_of(set, longest, gates)
    }

    fn step_of<'b, G: Gates + 'b>(
        &'b self,
        set: usize,
        longest: usize,
        gates: G,
    ) -> Result<Box<dyn Work + 'b>, Error>
    where
        Step<'b, G>: Work,
    {
        let case = self.case;
        let (total, rows, dim) = (case.tokens(), case.lengths.len(), case.dim);
        let v_dim = case.value_dim();
        let [h, hv] = self.heads;
        let (slots, channels) = (case.slots(), case.channels(self.heads));
        let inputs = match &self.layer {
            Some(layer) => Inputs::conv(Convolution::new(
                layer.x.tensor(set, DType::Bf16, &[1, total, channels])?,
                h,
                layer.weight.tensor(0, DType::Bf16, &[channels, TAPS])?,
                layer
                    .windows
                    .tensor(set, DType::Bf16, &[slots, channels, TAPS - 1])?,
            )),
            None => Inputs::qkv(
                self.q.tensor(set, DType::Bf16, &[1, total, h, dim])?,
                self.k.tensor(set, DType::Bf16, &[1, total, h, dim])?,
                self.v.tensor(set, DType::Bf16, &[1, total, hv, v_dim])?,
            ),
        };
        let [rows_of_state, of_row] = case.state_dims();
        let dims = [slots, hv, rows_of_state, of_row];
        let pool = self.pool.tensor(set, case.state, &dims)?;
        let states =
            States::update(pool).write_slots(self.write_slots.tensor(0, DType::I32, &[rows])?);
        let o = self.o.tensor(set, DType::Bf16, &[1, total, hv, v_dim])?;
        let bounds = self.cu_seqlens.tensor(0, DType::I32, &[rows + 1])?;
        let mut options = Options::default()
            .formulation(Formulation::Chunked)
            .qk_l2norm(case.qk_l2norm)
            .state_layout(case.layout);
        options.split = case.split;
        let mut step = Step::new(inputs, gates, o, states)
            .packed(bounds, longest)
            .options(options);
        if let Some(layer) = &self.layer {
            let z = layer.z.tensor(set, DType::Bf16, &[1, total, hv, v_dim])?;
            let weight = layer.norm.tensor(0, DType::Bf16, &[v_dim])?;
            step = step.norm(Norm::new(z, weight, EPS).activation(case.norm()));
        }
        if let Some(every) = case.every {
            let kept = self
                .kept
                .tensor(0, DType::I32, &[rows, case.checkpoints()])?;
            step = step.checkpoints(every, kept);
        }
        let bytes = step.workspace_bytes()?;
        if 0 < bytes && bytes <= self.workspace.bytes() {
            step = step.workspace(self.workspace.tensor(0, DType::F32, &[bytes / 4])?);
        }
        Ok(Box::new(step))
    }

    /// Sets the outputs of the first set to NaN, and restores its states.
    fn spoil(&mut self, values: &Values) -> Result<()> {
        self.o.spoil()?;
        self.pool.refill(&values.states(self.case))
    }

    /// Largest relative errors of o and of the final states.
    fn errors(&self, truths: &[Truth]) -> Result<[f64; 2]> {
        let Case {
            lengths,
            dim,
            state,
            layout,
            ..
        } = self.case;
        let (hv, v_dim) = (self.heads[1], self.case.value_dim());
        let mut worst = [0.0f64; 2];
        for truth in truths {
            let first: usize = lengths[..truth.b].iter().sum();
            let tokens = lengths[truth.b];
            let bytes = self
                .o
                .read(first * hv * v_dim * 2, tokens * hv * v_dim * 2)?;
            let of_head = bytes.chunks(v_dim * 2).skip(truth.head).step_by(hv);
            let got: Vec<f64> = of_head
                .flat_map(|bytes| floats(bytes, DType::Bf16))
                .collect();
            let len = dim * v_dim * state.size_of();
            let slot = lengths.len() + truth.b;
            let bytes = self.pool.read((slot * hv + truth.head) * len, len)?;
            let mut stored = floats(&bytes, *state);
            if *layout == StateLayout::VLast {
                stored = values::transposed(&stored, v_dim);
            }
            for (worst, (got, wanted)) in worst
                .iter_mut()
                .zip([(&got, &truth.o), (&stored, &truth.state)])
            {
                *worst = worst.max(tolerance::relative_error(got, wanted));
            }
        }
        Ok(worst)
    }
}

/// f64 values of f32 or bf16 bytes.
fn floats(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F32 => {
            let (words, _) = bytes.as_chunks();
            let floats = words.iter().map(|&word| f32::from_le_bytes(word).into());
            floats.collect()
        }
        _ => {
            let (words, _) = bytes.as_chunks();
            let floats = words.iter().map(|&word| bf16::from_le_bytes(word).to_f64());
            floats.collect()
        }
    }
}

/// Values and exact results, which cases share.
#[derive(Default)]
pub struct Known {
    values: HashMap<([usize; 2], usize), Values>,
    truths: HashMap<Key, Rc<Vec<Truth>>>,
    peers: Option<Peers>,
}

/// Properties of a case that its exact results depend on.
type Key = (
    Vec<usize>,
    [usize; 2],
    usize,
    (Operator, &'static str, bool, bool, Option<&'static str>),
);

impl Bench<'_> {
    /// Checks every case, and times it if there is a timer. `begins` is called with the title of each case.
    ///
    /// # Errors
    /// The library's errors. A wrong result is a failure in [`Measured`] instead.
    pub fn run(&self, cases: &[Case], begins: impl Fn(&str)) -> Result<Measured> {
        let mut known = Known::default();
        let mut measured = Measured::default();
        for case in cases {
            begins(&case.title());
            let of_case = self.measure(case, &mut known)?;
            measured.rows.extend(of_case.rows);
            measured.failures.extend(of_case.failures);
        }
        ensure!(!measured.rows.is_empty(), "no case has such an entry");
        Ok(measured)
    }

    /// Checks and times one case, as [`Bench::run`] does. The result has no rows if the case has none of the requested entries.
    ///
    /// # Errors
    /// The errors of [`Bench::run`].
    pub fn measure(&self, case: &Case, known: &mut Known) -> Result<Measured> {
        let heads = case.heads(self.heads);
        let values = known.values.entry((heads, case.dim));
        let values = values.or_insert_with(|| Values::new(heads, case.dim));
        let model = case.model.map(|model| model.name);
        let gate = gate_name(case.gate);
        let what = (case.operator, gate, case.qk_l2norm, case.layer, model);
        let key = (case.lengths.clone(), heads, case.dim, what);
        let truths = match known.truths.get(&key) {
            Some(truths) => Rc::clone(truths),
            None => {
                let truths = Rc::new(truths(case, heads, values)?);
                known.truths.insert(key, Rc::clone(&truths));
                truths
            }
        };
        let peers = match &mut known.peers {
            Some(peers) => peers,
            none => none.insert(Peers::recorded()?),
        };
        let mut measured = Measured::default();
        let mut buffers = Buffers::new(self.library, case, heads, values)?;
        let selected = self.selected(&buffers)?;
        for (entry, longest) in self.chosen(&buffers, selected)? {
            buffers.spoil(values)?;
            let row = self.row(&buffers, (entry, longest), &truths);
            let mut row = row.with_context(|| format!("{}, {}", case.title(), entry.name()))?;
            row.selected = entry == selected;
            if let Some((_, run)) = self.timer {
                row.put_beside(peers, &run.gpu);
            }
            if let Some(wrong) = wrong(&row, case.state) {
                measured.failures.push(wrong);
            }
            measured.rows.push(row);
        }
        Ok(measured)
    }

    /// The entry that the library selects if it is given the rows' true lengths.
    fn selected(&self, buffers: &Buffers<'_>) -> Result<Entry> {
        Ok(self
            .library
            .selected(&*buffers.step(0, buffers.case.longest())?)?)
    }

    /// The entries to measure, and the declared length of the longest row for each.
    fn chosen(&self, buffers: &Buffers<'_>, selected: Entry) -> Result<Vec<(Entry, usize)>> {
        let mut chosen = Vec::new();
        for longest in [buffers.case.longest(), UNPROMISED] {
            for entry in self.library.variants(&*buffers.step(0, longest)?)? {
                if chosen.iter().all(|(other, _)| *other != entry) {
                    chosen.push((entry, longest));
                }
            }
        }
        let asked = |entry: Entry| {
            let mut parts = self.entries.iter();
            parts.any(|part| entry.name().contains(part.as_str()))
        };
        chosen.retain(|(entry, _)| match self.entries {
            [] => self.every_entry || *entry == selected,
            _ => asked(*entry),
        });
        Ok(chosen)
    }

    fn row(
        &self,
        buffers: &Buffers<'_>,
        (entry, longest): (Entry, usize),
        truths: &[Truth],
    ) -> Result<Row> {
        let launch = |set: usize| {
            let step = buffers.step(set, longest)?;
            let stream = match self.timer {
                Some((timer, _)) => timer.stream.as_ref(),
                None => StreamRef::default_stream(),
            };
            // SAFETY: the buffers outlive the launches, which are waited for; rows have slots of their own, and the launches of a stream,
            // which share a workspace, run one after the other.
            unsafe { self.library.launch_with(stream, &*step, entry) }
        };
        launch(0)?;
        if let Some((timer, _)) = self.timer {
            timer.stream.synchronize()?;
        }
        let [error_o, error_state] = buffers.errors(truths)?;
        let case = buffers.case;
        let mut row = Row::untimed(case, entry.name(), [error_o, error_state]);
        if let (Some((timer, run)), None) = (self.timer, wrong(&row, case.state)) {
            let Micros { median, p10, p90 } = timer.graph(buffers.sets.max(8), launch)?;
            (row.us, row.us_p10, row.us_p90) = (Some(median), Some(p10), Some(p90));
            row.bytes_us = Some(buffers.step(0, longest)?.bytes()? as f64 / run.copy / 1e3);
            row.copy_gb_s = Some(run.copy.round());
            row.gpu.clone_from(&run.gpu);
            row.driver.clone_from(&run.driver);
            row.commit.clone_from(&run.commit);
        }
        Ok(row)
    }
}

/// Message about a wrong result, if the row has one.
fn wrong(row: &Row, state: DType) -> Option<String> {
    let allowed = match state {
        DType::F32 => ERRORS,
        _ => [ERRORS[0]; 2],
    };
    let Row {
        case,
        entry,
        error_o,
        error_state,
        ..
    } = row;
    // A NaN is wrong too.
    let right = *error_o <= allowed[0] && *error_state <= allowed[1];
    (!right).then(|| {
        format!(
            "{case}, {state}, {entry}: errors of o and state: wanted at most {:.1e} and {:.1e}, got {error_o:.1e} and {error_state:.1e}",
            allowed[0], allowed[1]
        )
    })
}

/// A table of all rows, one a line, and the cost of checkpoints.
#[must_use]
pub fn table(rows: &[Row], [gdn, kda]: [[usize; 2]; 2]) -> String {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let head = [
        "rows", "state", "kernel", "error o", "error S", "us", "of bytes",
    ];
    // Peers have columns only if a row has a peer. A row and its peer are of the same card.
    let of_peers = rows.iter().filter(|row| row.peer_us.is_some());
    let cards: BTreeSet<String> = of_peers.map(|row| card(&row.gpu)).collect();
    let cards: Vec<String> = cards.into_iter().collect();
    let of_peers = match cards.is_empty() {
        true => Vec::new(),
        false => vec![
            format!("peer ({})", cards.join(", ")),
            "ours / peer".to_owned(),
        ],
    };
    table.set_header(head.into_iter().map(str::to_owned).chain(of_peers));
    for row in rows {
        let number =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
        let peer = match (row.peer_us, &row.peer) {
            (Some(us), Some(peer)) if cards.len() < 2 => format!("{us:.1} {peer}"),
            (Some(us), Some(peer)) => format!("{us:.1} {peer}, {}", card(&row.gpu)),
            _ => "-".to_owned(),
        };
        let ratio = row
            .us
            .zip(row.peer_us)
            .map(|(us, peer)| format!("{:.2}", us / peer));
        let mut cells = vec![
            row.case.clone(),
            row.state.clone(),
            short(&row.entry),
            format!("{:.2e}", row.error_o),
            format!("{:.2e}", row.error_state),
            number(row.us),
            number(row.bytes_us),
        ];
        if !cards.is_empty() {
            cells.extend([peer, ratio.unwrap_or("-".to_owned())]);
        }
        table.add_row(cells);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = format!(
        "prefill, H = {}, HV = {} (KDA {}, {}), bf16 q, k, v and o, of KDA g; the recurrence with K = V = 128 and K-last states \
         where nothing else is said\n{table}\n",
        gdn[0], gdn[1], kda[0], kda[1]
    );
    for kept in rows.iter().filter(|row| row.case.contains(cases::KEPT)) {
        let plain = rows.iter().find(|row| {
            let same = (&row.state, &row.entry) == (&kept.state, &kept.entry);
            same && kept.case.split(cases::KEPT).next() == Some(&row.case)
        });
        if let Some((us, bytes_us)) = plain.and_then(|plain| {
            let more = |a: Option<f64>, b: Option<f64>| Some(a? - b?);
            more(kept.us, plain.us).zip(more(kept.bytes_us, plain.bytes_us))
        }) {
            text += &format!(
                "{}, {}: checkpoints take {us:.1} us; their bytes {bytes_us:.1} us at a copy's rate\n",
                kept.case, kept.state
            );
        }
    }
    text
}

/// Name of a GPU in a table. Rows without one have peers of an H200.
fn card(gpu: &str) -> String {
    match gpu {
        "" => crate::peers::CARD.to_owned(),
        _ => folder(gpu).to_uppercase(),
    }
}

/// Short name of an entry, enough to tell it from the others of its case.
fn short(entry: &str) -> String {
    let mut parts = entry.split('_').skip_while(|part| *part != "prefill");
    let kind = parts.nth(1).unwrap_or(entry);
    let tile = entry.split('_').find(|part| part.starts_with("tile"));
    [kind, tile.unwrap_or_default()].join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(error_o: f64, error_state: f64) -> Row {
        Row {
            case: "1x4096".to_owned(),
            state: "f32".to_owned(),
            entry: "gdn_prefill_chain_k128_tile64".to_owned(),
            selected: true,
            error_o,
            error_state,
            us: Some(105.0),
            us_p10: None,
            us_p90: None,
            bytes_us: Some(25.0),
            peer_us: Some(160.4),
            peer: Some("FlashInfer".to_owned()),
            copy_gb_s: Some(4238.0),
            gpu: "NVIDIA H200".to_owned(),
            driver: "580.1".to_owned(),
            commit: String::new(),
        }
    }

    /// Without peers on the GPU, the table has no column for them.
    #[test]
    fn peers_are_shown_with_their_card_or_not_at_all() {
        let heads = [[16, 32], [32, 32]];
        let beside = table(&[row(0.0, 0.0)], heads);
        assert!(beside.contains(" peer (H200) |"), "{beside}");
        let of_h100 = Row {
            gpu: "NVIDIA H100 80GB HBM3".to_owned(),
            ..row(0.0, 0.0)
        };
        let both = table(&[row(0.0, 0.0), of_h100.clone()], heads);
        for part in [
            " peer (H100, H200) |",
            " FlashInfer, H100 |",
            " FlashInfer, H200 |",
        ] {
            assert!(both.contains(part), "{both}");
        }
        let alone = Row {
            peer_us: None,
            peer: None,
            ..of_h100
        };
        let alone = table(&[alone], heads);
        assert!(
            !alone.contains("peer") && alone.contains("105.0"),
            "{alone}"
        );
    }

    #[test]
    fn what_is_too_far_off_is_wrong() {
        for (error_o, error_state, dtype, wanted) in [
            (2.4e-3, 1.9e-3, DType::F32, false),
            (2.6e-3, 0.0, DType::F32, true),
            (0.0, 2.1e-3, DType::F32, true),
            (0.0, 2.1e-3, DType::Bf16, false),
            (f64::NAN, 0.0, DType::F32, true),
            (0.0, f64::INFINITY, DType::Bf16, true),
        ] {
            let wrong = wrong(&row(error_o, error_state), dtype);
            assert_eq!(wrong.is_some(), wanted, "{wrong:?}");
        }
    }

    #[test]
    fn checkpoints_are_beside_what_they_cost() {
        let kept = Row {
            case: "1x4096, a checkpoint every 256".to_owned(),
            us: Some(113.5),
            bytes_us: Some(32.5),
            ..row(0.0, 0.0)
        };
        let text = table(&[row(0.0, 0.0), kept], [[16, 32], [32, 32]]);
        let line = "| 1x4096 | f32 | chain tile64 | 0.00e0 | 0.00e0 | 105.0 | 25.0 | 160.4 FlashInfer | 0.65 |";
        let squeezed = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(squeezed.contains(line), "{squeezed}");
        assert!(
            text.contains("checkpoints take 8.5 us; their bytes 7.5 us at a copy's rate"),
            "{text}"
        );
    }
}
