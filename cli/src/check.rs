//! `check`: a problem's results against what its file expects, or against the reference.

use std::borrow::Cow;

use gated_delta::{Entry, Formulation, HeadMap, IndexReport, Options, StateLayout};
use gated_delta_reference::compare::DType;
use serde_json::{Value, json};

use crate::Report;
use crate::backend::{Backend, Outputs};
use crate::compare::{Comparison, compare, pairs};
use crate::error::Error;
use crate::file::Expected;
use crate::metadata::{head_map_name, state_layout_name};
use crate::problem::{INPUTS, Problem, RINGS};
use crate::reference::{self, Truth};
use crate::table::table;
use crate::tensor::HostTensor;

/// Runs a problem and compares the written parts of `o`, `state`, `snapshots`, `conv_state`, `conv_snapshots` and rings with
/// `expected`, or with the reference where that has none; every other part has to be as it was, bit for bit. Windows, and rings of
/// inputs and of keys that came, hold what came as it is, and are compared bit for bit too.
///
/// NaN on one side alone fails. NaN on both sides, or the same infinity, passes and is said in the line's result; a part
/// that holds nothing else fails, since nothing was compared.
///
/// Where what the file expects does not hold, the report says which other state layout or head map it holds in.
///
/// # Errors
/// As [`Backend::run`]'s; [`Error::Input`] where the reference would be compared with itself alone.
pub fn check(
    backend: &Backend,
    problem: &Problem,
    expected: &Expected,
    variant: Option<Entry>,
) -> Result<Report, Error> {
    let results = [
        ("o", &expected.o),
        ("state", &expected.state),
        ("conv_state", &expected.conv_state),
        ("snapshots", &expected.snapshots),
        ("conv_snapshots", &expected.conv_snapshots),
    ];
    let rings = RINGS.into_iter().zip(&expected.rings);
    let results: Vec<_> = results.into_iter().chain(rings).collect();
    let results = results
        .iter()
        .filter(|(name, _)| problem.tensors.contains_key(name));
    let is_reference = matches!(backend, Backend::Reference);
    if is_reference && results.clone().all(|(_, expected)| expected.is_none()) {
        let names: Vec<_> = results
            .map(|(name, _)| format!("expected.{name}"))
            .collect();
        return Err(Error::Input(format!(
            "{}: wanted one of them for the reference to be compared with, got none",
            names.join(", ")
        )));
    }
    let outputs = backend.run(problem, variant)?;
    let needs_truth = !is_reference && results.clone().any(|(_, expected)| expected.is_none());
    let truth = needs_truth.then(|| reference::truth(problem)).transpose()?;
    let lines = Lines::of(problem, &outputs, expected, truth.as_ref())?;
    let mut text = table(
        &[
            "tensor",
            "dtype",
            "against",
            "rel. L2 error",
            "tolerance",
            "not finite",
            "result",
        ],
        lines.rows,
    );
    text += &outputs.summary();
    let mut json = outputs.json();
    json["passed"] = json!(!lines.failed);
    json["results"] = json!(lines.json);
    if lines.failed && results.clone().any(|(_, expected)| expected.is_some()) {
        let fitting = fitting_options(problem, expected);
        text += &match &fitting {
            Some(fitting) => {
                let options = fitting
                    .iter()
                    .map(|(key, value)| format!("{key} = {value}"));
                let options: Vec<_> = options.collect();
                let options = options.join(" and ");
                format!("with {options} all that the file expects would hold\n")
            }
            None => "no other state_layout or head_map would hold what the file expects\n".into(),
        };
        json["would_hold_with"] = fitting.map_or(Value::Null, |fitting| {
            Value::from_iter(
                fitting
                    .into_iter()
                    .map(|(key, value)| (key, Value::from(value))),
            )
        });
    }
    Ok(Report {
        text,
        json,
        passed: !lines.failed,
    })
}

/// The state layout or head map, or both, with which the reference's results of the file's tensors would hold what it
/// expects: the keys that are to change, and to what.
fn fitting_options(
    problem: &Problem,
    expected: &Expected,
) -> Option<Vec<(&'static str, &'static str)>> {
    let Options {
        state_layout,
        head_map,
        ..
    } = problem.options;
    let other_layout = match state_layout {
        StateLayout::KLast => StateLayout::VLast,
        StateLayout::VLast => StateLayout::KLast,
    };
    let other_map = match head_map {
        HeadMap::Grouped => HeadMap::Tiled,
        HeadMap::Tiled => HeadMap::Grouped,
    };
    let others = [
        (other_layout, head_map),
        (state_layout, other_map),
        (other_layout, other_map),
    ];
    others.into_iter().find_map(|(layout, map)| {
        let mut other = problem.clone();
        other.options = other.options.state_layout(layout).head_map(map);
        let outputs = Backend::Reference.run(&other, None).ok()?;
        let lines = Lines::of(&other, &outputs, expected, None).ok()?;
        let changed = [
            (layout != state_layout).then(|| ("state_layout", state_layout_name(layout))),
            (map != head_map).then(|| ("head_map", head_map_name(map))),
        ];
        (!lines.failed).then(|| changed.into_iter().flatten().collect())
    })
}

/// Whether each unit of a result is written.
struct Written {
    tokens: Vec<bool>,
    slots: Vec<bool>,
    /// Of windows: each of a slot's columns, channel by channel, where there are token slots, else the slot.
    windows: Vec<bool>,
    /// Of all rows, one row's behind the other's.
    steps: Vec<bool>,
    /// Entries of the rings of keys, updates, decays and inputs.
    entries: [Vec<bool>; 4],
}

impl Written {
    fn of(problem: &Problem, rows: &IndexReport) -> Self {
        let steps = problem.dim("snapshots", 1);
        let tokens = problem.tokens();
        let [slots, channels, columns] = [0, 1, 2].map(|dim| problem.dim("conv_state", dim));
        let has_token_slots = problem.tensors.contains_key("token_slots");
        let mut written = Self {
            tokens: vec![false; problem.dim("o", 0) * problem.dim("o", 1)],
            slots: vec![false; problem.dim("state", 0)],
            windows: match has_token_slots {
                true => vec![false; slots * channels * columns],
                false => vec![false; slots],
            },
            steps: vec![false; tokens.len() * steps],
            entries: RINGS.map(|ring| {
                let [heads, entries] = problem.ring(ring);
                vec![false; problem.dim(ring, 0) * heads * entries]
            }),
        };
        for (b, tokens) in tokens.into_iter().enumerate() {
            written.tokens[tokens.clone()].fill(true);
            let is_empty = tokens.is_empty() && problem.has_new();
            if is_empty || rows.inactive.iter().any(|row| row.row == b) {
                continue;
            }
            for slot in problem.written_slots(b, tokens.len()) {
                written.slots[slot] = true;
            }
            if has_token_slots {
                if let Some((slot, inputs)) = problem.written_window(b, tokens.len()) {
                    for channel in slot * channels..(slot + 1) * channels {
                        written.windows[channel * columns..][..inputs].fill(true);
                    }
                }
            } else {
                for slot in problem.written_windows(b, tokens.len()) {
                    written.windows[slot] = true;
                }
            }
            for left in problem.left(b) {
                let slots = problem.tensors.get("read_slots").map(HostTensor::to_i64);
                let slot = slots.map_or(b, |slots| slots[b] as usize);
                for (ring, written) in RINGS.into_iter().zip(&mut written.entries) {
                    if !problem.tensors.contains_key(ring) {
                        continue;
                    }
                    let [heads, entries] = problem.ring(ring);
                    for head in slot * heads..(slot + 1) * heads {
                        written[head * entries + left] = true;
                    }
                }
            }
            if steps > 0 {
                written.steps[b * steps..][..tokens.len()].fill(true);
            }
        }
        written
    }
}

/// A result, what it was before, and what is wanted.
struct Part<'a> {
    name: &'static str,
    /// What is written as a whole or not at all.
    unit: &'static str,
    before: &'a HostTensor,
    after: &'a HostTensor,
    /// Whether each unit is written.
    written: &'a [bool],
    expected: Option<&'a HostTensor>,
    truth: Option<&'a [f64]>,
}

/// The lines of the report.
#[derive(Default)]
struct Lines {
    rows: Vec<Vec<String>>,
    json: Vec<Value>,
    failed: bool,
    /// Results are of chunks of tokens.
    chunked: bool,
    /// A convolution makes k.
    convolved: bool,
}

impl Lines {
    /// Of the outputs of a problem.
    fn of(
        problem: &Problem,
        outputs: &Outputs,
        expected: &Expected,
        truth: Option<&Truth>,
    ) -> Result<Self, Error> {
        let written = Written::of(problem, &outputs.rows);
        let mut lines = Self {
            chunked: problem.options.formulation == Formulation::Chunked,
            convolved: problem.convolves(),
            ..Self::default()
        };
        if let Some(after) = &outputs.o {
            lines.result(Part {
                name: "o",
                unit: "token",
                before: problem.tensor("o")?,
                after,
                written: &written.tokens,
                expected: expected.o.as_ref(),
                truth: truth.map(|truth| truth.o.as_slice()),
            });
        }
        if let Some(after) = &outputs.snapshots {
            lines.result(Part {
                name: "snapshots",
                unit: "step",
                before: problem.tensor("snapshots")?,
                after,
                written: &written.steps,
                expected: expected.snapshots.as_ref(),
                truth: truth.and_then(|truth| truth.snapshots.as_deref()),
            });
        }
        lines.result(Part {
            name: "state",
            unit: "slot",
            before: problem.tensor("state")?,
            after: &outputs.state,
            written: &written.slots,
            expected: expected.state.as_ref(),
            truth: truth.map(|truth| truth.pool.as_slice()),
        });
        if let Some(after) = &outputs.conv_state {
            lines.result(Part {
                name: "conv_state",
                unit: match written.windows.len() == written.slots.len() {
                    true => "slot",
                    false => "input",
                },
                before: problem.tensor("conv_state")?,
                after,
                written: &written.windows,
                expected: expected.conv_state.as_ref(),
                truth: truth.and_then(|truth| truth.windows.as_deref()),
            });
        }
        if let Some(after) = &outputs.conv_snapshots {
            lines.result(Part {
                name: "conv_snapshots",
                unit: "step",
                before: problem.tensor("conv_snapshots")?,
                after,
                written: &written.steps,
                expected: expected.conv_snapshots.as_ref(),
                truth: truth.and_then(|truth| truth.window_snapshots.as_deref()),
            });
        }
        for (i, name) in RINGS.into_iter().enumerate() {
            if let Some(after) = &outputs.rings[i] {
                lines.result(Part {
                    name,
                    unit: "entry",
                    before: problem.tensor(name)?,
                    after,
                    written: &written.entries[i],
                    expected: expected.rings[i].as_ref(),
                    truth: truth.and_then(|truth| truth.rings[i].as_deref()),
                });
            }
        }
        Ok(lines)
    }

    /// A line for what is written, and one for the rest, where there is such.
    fn result(&mut self, part: Part<'_>) {
        let Part {
            name,
            unit,
            before,
            after,
            written,
            ..
        } = part;
        let unit_elements = (after.elements() / written.len().max(1)).max(1);
        let (before, got) = (before.to_f64(), after.to_f64());
        let wanted = match (part.expected, part.truth) {
            (Some(tensor), _) => Some(("file", Cow::Owned(tensor.to_f64()))),
            (None, Some(truth)) => Some(("reference", Cow::Borrowed(truth))),
            (None, None) => None,
        };
        let units = match unit {
            "entry" => "entries".to_owned(),
            unit => format!("{unit}s"),
        };
        let label = |which: &str| match written.contains(&false) {
            true => format!("{name}, {which} {units}"),
            false => name.to_owned(),
        };
        if written.contains(&true)
            && let Some((source, values)) = &wanted
        {
            let is_copied = match name {
                "conv_state" | "conv_snapshots" | INPUTS => true,
                "pending.keys" => !self.convolved,
                _ => false,
            };
            if is_copied {
                let others: Vec<bool> = written.iter().map(|written| !written).collect();
                let problem = changed_unit(values, &got, &others, unit_elements);
                let problem = problem.map(|index| format!("{unit} {index} differs"));
                self.exact(&label("written"), after, source, problem);
            } else {
                let of_rows = |index: usize| written[index / unit_elements];
                let elements = pairs(&got, values).filter(|(index, ..)| of_rows(*index));
                let comparison = compare(elements, after.dims());
                self.compared(&label("written"), after, source, comparison);
            }
        }
        if written.contains(&false) {
            let changed = |after: &[f64]| changed_unit(&before, after, written, unit_elements);
            let mut problem = changed(&got).map(|index| format!("{unit} {index} has changed"));
            if let (None, "state" | "conv_state", Some((_, values))) = (&problem, name, &wanted) {
                problem = changed(values)
                    .map(|index| format!("{unit} {index} is to change, but no row writes it"));
            }
            self.exact(&label("other"), after, "input", problem);
        }
    }

    fn compared(&mut self, name: &str, tensor: &HostTensor, source: &str, comparison: Comparison) {
        let dtype = DType::from(tensor.dtype());
        let tolerance = match self.chunked {
            true => dtype.tolerance_in_chunks(),
            false => dtype.tolerance(),
        };
        let Comparison { got, wanted, .. } = comparison;
        let not_finite = match got == wanted {
            true => got.to_string(),
            false => format!("{got}; wanted {wanted}"),
        };
        let result = match comparison.failure(tolerance) {
            None if comparison.agreed > 0 => Ok(format!("ok, but not finite on both sides: {got}")),
            None => Ok("ok".to_owned()),
            Some(problem) => Err(problem),
        };
        let json = json!({
            "error": comparison.error,
            "tolerance": tolerance,
            "not_finite": { "nan": got.nan, "inf": got.infinite },
            "wanted_not_finite": { "nan": wanted.nan, "inf": wanted.infinite },
        });
        self.push(
            name,
            tensor,
            source,
            [
                format!("{:.2e}", comparison.error),
                format!("{tolerance:.0e}"),
                not_finite,
            ],
            json,
            result,
        );
    }

    fn exact(&mut self, name: &str, tensor: &HostTensor, source: &str, problem: Option<String>) {
        self.push(
            name,
            tensor,
            source,
            ["", "exact", ""].map(str::to_owned),
            json!({}),
            problem.map_or(Ok("ok".to_owned()), Err),
        );
    }

    fn push(
        &mut self,
        name: &str,
        tensor: &HostTensor,
        source: &str,
        [error, tolerance, not_finite]: [String; 3],
        mut json: Value,
        result: Result<String, String>,
    ) {
        self.failed |= result.is_err();
        let (whole, part) = match name.split_once(", ") {
            Some((whole, part)) => (whole, Some(part)),
            None => (name, None),
        };
        json["tensor"] = json!(whole);
        json["part"] = json!(part);
        json["dtype"] = json!(tensor.dtype().to_string());
        json["against"] = json!(source);
        json["passed"] = json!(result.is_ok());
        json["result"] = json!(result.as_ref().unwrap_or_else(|problem| problem));
        self.json.push(json);
        let result = result.unwrap_or_else(|problem| format!("FAILED: {problem}"));
        self.rows.push(vec![
            name.to_owned(),
            tensor.dtype().to_string(),
            source.to_owned(),
            error,
            tolerance,
            not_finite,
            result,
        ]);
    }
}

/// The first unit that is not written and yet differs in a bit, one NaN being as good as another.
fn changed_unit(
    before: &[f64],
    after: &[f64],
    written: &[bool],
    unit_elements: usize,
) -> Option<usize> {
    let units = before
        .chunks(unit_elements)
        .zip(after.chunks(unit_elements))
        .zip(written);
    let same = |before: &[f64], after: &[f64]| {
        before
            .iter()
            .zip(after)
            .all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan())
    };
    units
        .enumerate()
        .find_map(|(unit, ((before, after), written))| {
            (!written && !same(before, after)).then_some(unit)
        })
}
