//! `check`: compares a problem's results with the expectations in its file, or with the reference.

use gated_delta::{Entry, Formulation, HeadMap, Options, StateLayout};
use gated_delta_reference::tolerance::{DType, change};
use serde_json::{Value, json};

use crate::Report;
use crate::backend::{Backend, Outputs};
use crate::compare::{Units, units};
use crate::error::Error;
use crate::file::Expected;
use crate::metadata::{head_map_name, state_layout_name};
use crate::problem::{INPUTS, Problem, RINGS};
use crate::reference::{self, Allowed, Truth};
use crate::table::table;
use crate::tensor::HostTensor;
use crate::written::Written;

/// Runs a problem and compares the written parts of `o`, `state`, `snapshots`, `conv_state`, `conv_snapshots` and rings with `expected`, or
/// with the reference if the file expects nothing for a tensor. Every other part has to be unchanged, bit for bit. Windows, rings of
/// inputs, and rings of keys without a convolution are copies of inputs, and are compared bit for bit too.
///
/// Each token of a value head, and each slot of one, has its own bound, the same as in the tests: a bound on the difference after the
/// rounding to its dtype is taken out. New tokens after committed or flushed ones are compared with results that start from the state
/// as the launch has stored it. A file's expectation may be as far from the exact result as a launch, or off by a relative error
/// ([`DType::tolerance`]), and may start from a state that is rounded differently.
///
/// NaN on one side only fails. NaN on both sides, or the same infinity, passes and is noted in the line's result; a part with nothing
/// else fails, since nothing was compared.
///
/// If the results differ from the file's expectations, the report names another state layout or head map with which they agree, if
/// there is one.
///
/// # Errors
/// The errors of [`Backend::run`]; [`Error::Input`] if the reference would only be compared with itself.
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
    let lines = Lines::of(problem, &outputs, expected, !is_reference)?;
    let mut text = table(
        &[
            "tensor",
            "dtype",
            "against",
            "rel. L2 error",
            "nearest to its bound",
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
            Some(fitting) if fitting.is_empty() => {
                "the reference holds all that the file expects: the kernel does not\n".to_owned()
            }
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
        let fitting = fitting.filter(|fitting| !fitting.is_empty());
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

/// The state layout or head map, or both, with which the reference's results would agree with the file's expectations: pairs of key and
/// new value. Empty if they agree as they are, `None` if nothing fits.
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
    let all = [
        (state_layout, head_map),
        (other_layout, head_map),
        (state_layout, other_map),
        (other_layout, other_map),
    ];
    all.into_iter().find_map(|(layout, map)| {
        let mut other = problem.clone();
        other.options = other.options.state_layout(layout).head_map(map);
        let outputs = Backend::Reference.run(&other, None).ok()?;
        let lines = Lines::of(&other, &outputs, expected, false).ok()?;
        let changed = [
            (layout != state_layout).then(|| ("state_layout", state_layout_name(layout))),
            (map != head_map).then(|| ("head_map", head_map_name(map))),
        ];
        (!lines.failed).then(|| changed.into_iter().flatten().collect())
    })
}

/// A result of a launch, its contents before, and the wanted values.
struct Part<'a> {
    name: &'static str,
    before: &'a HostTensor,
    after: &'a HostTensor,
    expected: Option<&'a HostTensor>,
    truth: Option<&'a [f64]>,
    /// Names of the leading dims of its heads: all dims but the last one or two.
    heads: &'static [&'static str],
    /// Largest error of each head of each token or slot.
    allowed: &'a [f64],
    /// Additional error of a file's expectation, which may start from a state that is rounded differently.
    rounded_otherwise: Option<Vec<f64>>,
}

/// Lines of the report.
#[derive(Default)]
struct Lines {
    rows: Vec<Vec<String>>,
    json: Vec<Value>,
    failed: bool,
    /// Whether the results come from chunks of tokens.
    chunked: bool,
    /// Whether a convolution computes k.
    convolved: bool,
}

/// Differences in o and u of tokens after committed or flushed ones that rounding of the state causes: the norm of the difference for
/// each head, between a start from the stored state, from the exact state, and from another rounding of it. Returns those of o, then u.
fn rounded_otherwise(problem: &Problem, of_stored: &Truth) -> Result<[Vec<f64>; 2], Error> {
    let commits = problem.has_previous() || problem.has_pending();
    if !commits || !problem.has_new() {
        return Ok([const { Vec::new() }; 2]);
    }
    let (unrounded, _) = reference::judged(problem, None)?;
    let rounded = reference::truth(problem)?;
    let all = [of_stored, &unrounded, &rounded];
    let moved = |of: fn(&Truth) -> &[f64], dims: usize| {
        let [stored, unrounded, rounded] = all.map(of);
        let heads = unrounded.chunks(dims.max(1)).enumerate();
        let of_head = heads.map(|(i, unrounded)| {
            let own = i * dims..i * dims + unrounded.len();
            change(&stored[own.clone()], unrounded) + change(unrounded, &rounded[own])
        });
        of_head.collect()
    };
    let width = problem.state_dims()[1];
    Ok([
        moved(|truth| &truth.o, width),
        moved(|truth| truth.rings[1].as_deref().unwrap_or_default(), width),
    ])
}

impl Lines {
    /// Compares the outputs of a problem. `by_reference`: tensors without an expectation in the file are compared with the reference.
    fn of(
        problem: &Problem,
        outputs: &Outputs,
        expected: &Expected,
        by_reference: bool,
    ) -> Result<Self, Error> {
        let written = Written::of(problem, &outputs.rows);
        let (mut judged, mut allowed) = reference::judged(problem, Some(&outputs.state.to_f64()))?;
        let [of_o, mut of_updates] = match (&expected.o, &expected.rings[1]) {
            (None, None) => [const { Vec::new() }; 2],
            _ => rounded_otherwise(problem, &judged)?,
        };
        if let [Some(keys), Some(updates), ..] = &outputs.rings {
            let [of_keys, own, ..] = &mut allowed.rings;
            let bounds = (&mut of_keys[..], [own, &mut of_updates]);
            reference::scale_long_keys(problem, [keys, updates], &mut judged, bounds);
        }
        let Allowed {
            o,
            state,
            snapshots,
            rings,
        } = &allowed;
        let truth = by_reference.then_some(&judged);
        let [of_o, of_updates] = [of_o, of_updates].map(|of| (!of.is_empty()).then_some(of));
        let mut lines = Self {
            chunked: problem.formulation()? == Formulation::Chunked,
            convolved: problem.convolves(),
            ..Self::default()
        };
        let of_tokens: &[_] = match problem.tensors.contains_key("cu_seqlens") {
            // With packed rows the first dim is 1, and tokens are counted over all rows.
            true => &["", "token", "value head"],
            false => &["row", "token", "value head"],
        };
        if let Some(after) = &outputs.o {
            let part = Part {
                name: "o",
                before: problem.tensor("o")?,
                after,
                expected: expected.o.as_ref(),
                truth: truth.map(|truth| truth.o.as_slice()),
                heads: of_tokens,
                allowed: o,
                rounded_otherwise: of_o,
            };
            lines.result(part, &written);
        }
        if let Some(after) = &outputs.snapshots {
            let part = Part {
                name: "snapshots",
                before: problem.tensor("snapshots")?,
                after,
                expected: expected.snapshots.as_ref(),
                truth: truth.and_then(|truth| truth.snapshots.as_deref()),
                heads: &["row", "token", "value head"],
                allowed: snapshots,
                rounded_otherwise: None,
            };
            lines.result(part, &written);
        }
        let part = Part {
            name: "state",
            before: problem.tensor("state")?,
            after: &outputs.state,
            expected: expected.state.as_ref(),
            truth: truth.map(|truth| truth.pool.as_slice()),
            heads: &["slot", "value head"],
            allowed: state,
            rounded_otherwise: None,
        };
        lines.result(part, &written);
        let windows = [
            (
                "conv_state",
                &outputs.conv_state,
                &expected.conv_state,
                judged.windows.as_deref(),
            ),
            (
                "conv_snapshots",
                &outputs.conv_snapshots,
                &expected.conv_snapshots,
                judged.window_snapshots.as_deref(),
            ),
        ];
        for (name, after, expected, of_truth) in windows {
            if let Some(after) = after {
                let part = Part {
                    name,
                    before: problem.tensor(name)?,
                    after,
                    expected: expected.as_ref(),
                    truth: of_truth.filter(|_| by_reference),
                    heads: &[],
                    allowed: &[],
                    rounded_otherwise: None,
                };
                lines.result(part, &written);
            }
        }
        let mut of_updates = of_updates;
        for (i, name) in RINGS.into_iter().enumerate() {
            if let Some(after) = &outputs.rings[i] {
                let part = Part {
                    name,
                    before: problem.tensor(name)?,
                    after,
                    expected: expected.rings[i].as_ref(),
                    truth: truth.and_then(|truth| truth.rings[i].as_deref()),
                    heads: match i {
                        0 => &["slot", "head", "entry"],
                        _ => &["slot", "value head", "entry"],
                    },
                    allowed: &rings[i],
                    rounded_otherwise: match i {
                        1 => of_updates.take(),
                        _ => None,
                    },
                };
                lines.result(part, &written);
            }
        }
        Ok(lines)
    }

    /// Adds a line for the units that are written, and one for the others, if there are any.
    fn result(&mut self, part: Part<'_>, written: &Written) {
        let Part {
            name,
            before,
            after,
            ..
        } = part;
        let (unit, written) = (written.unit(name), written.units(name));
        let unit_elements = (after.elements() / written.len().max(1)).max(1);
        let got = after.to_f64();
        let file = part.expected.map(HostTensor::to_f64);
        let wanted = match (&file, part.truth) {
            (Some(file), _) => Some(("file", &file[..])),
            (None, Some(truth)) => Some(("reference", truth)),
            (None, None) => None,
        };
        let plural = match unit {
            "entry" => "entries".to_owned(),
            unit => format!("{unit}s"),
        };
        let label = |which: &str| match written.contains(&false) {
            true => format!("{name}, {which} {plural}"),
            false => name.to_owned(),
        };
        if written.contains(&true)
            && let Some((source, values)) = wanted
        {
            let is_copied = match name {
                "conv_state" | "conv_snapshots" | INPUTS => true,
                "pending.keys" => !self.convolved,
                _ => false,
            };
            if is_copied {
                let problem = differing_unit(values, &got, written, unit_elements);
                let problem = problem.map(|index| format!("{unit} {index} differs"));
                self.exact(&label("written"), after, source, problem);
            } else {
                let bounds = self.bounds(&part, values, file.is_some());
                let dtype = DType::from(after.dtype());
                let held: Vec<f64> = match name {
                    "state" | "snapshots" => values.iter().map(|s| dtype.held(*s)).collect(),
                    _ => values.to_vec(),
                };
                let is_written = |element: usize| written[element / unit_elements];
                let compared = units(
                    [&got, &held],
                    dtype,
                    &bounds,
                    (after.dims(), part.heads),
                    is_written,
                );
                self.compared(&label("written"), &part, source, &compared);
            }
        }
        if written.contains(&false) {
            let mut problem = changed_unit(before, after, written)
                .map(|index| format!("{unit} {index} has changed"));
            if let (None, "state" | "conv_state", Some((_, values))) = (&problem, name, wanted) {
                let others: Vec<bool> = written.iter().map(|written| !written).collect();
                problem = differing_unit(&before.to_f64(), values, &others, unit_elements)
                    .map(|index| format!("{unit} {index} is to change, but no row writes it"));
            }
            self.exact(&label("other"), after, "input", problem);
        }
    }

    /// Largest error of each head of each token or slot, compared with `values`, which are a file's (`is_file`) or the reference's.
    fn bounds(&self, part: &Part<'_>, values: &[f64], is_file: bool) -> Vec<f64> {
        if !is_file {
            return part.allowed.to_vec();
        }
        let dtype = DType::from(part.after.dtype());
        let relative = match self.chunked {
            true => dtype.tolerance_in_chunks(),
            false => dtype.tolerance(),
        };
        let len = (values.len() / part.allowed.len().max(1)).max(1);
        let heads = part.allowed.iter().zip(values.chunks(len)).enumerate();
        let of_head = heads.map(|(i, (allowed, values))| {
            // Both the launch and the file's expectation may be off from the exact result.
            let zeros = vec![0.0; values.len()];
            let file = allowed.max(relative * change(values, &zeros));
            let otherwise = part.rounded_otherwise.as_ref().map_or(0.0, |of| of[i]);
            allowed + file + otherwise
        });
        of_head.collect()
    }

    fn compared(&mut self, name: &str, part: &Part<'_>, source: &str, compared: &Units) {
        let (got, wanted) = (compared.all.got, compared.all.wanted);
        let not_finite = match got == wanted {
            true => got.to_string(),
            false => format!("{got}; wanted {wanted}"),
        };
        let (share, at) = compared.worst;
        let result = match compared.failure() {
            None if compared.all.agreed > 0 => {
                Ok(format!("ok, but not finite on both sides: {got}"))
            }
            None => Ok("ok".to_owned()),
            Some(problem) => Err(problem),
        };
        let json = json!({
            "error": compared.all.error,
            "worst": {
                "at": compared.position(at),
                "of_bound": share.is_finite().then_some(share),
            },
            "not_finite": { "nan": got.nan, "inf": got.infinite },
            "wanted_not_finite": { "nan": wanted.nan, "inf": wanted.infinite },
        });
        self.push(
            name,
            part.after,
            source,
            [
                format!("{:.2e}", compared.all.error),
                format!("{share:.2} of it, {}", compared.place(at)),
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

/// The first unit that is not written, but differs in a bit.
fn changed_unit(before: &HostTensor, after: &HostTensor, written: &[bool]) -> Option<usize> {
    let of_unit = (before.bytes().len() / written.len().max(1)).max(1);
    let [before, after] = [before, after].map(|tensor| tensor.bytes().chunks(of_unit));
    let units = before.zip(after).zip(written).enumerate();
    let mut others = units.filter(|(_, (_, written))| !**written);
    others.find_map(|(unit, ((before, after), _))| (before != after).then_some(unit))
}

/// The first of the selected units that differs in a bit. All NaN count as equal.
fn differing_unit(
    wanted: &[f64],
    got: &[f64],
    units: &[bool],
    unit_elements: usize,
) -> Option<usize> {
    let same = |(x, y): (&f64, &f64)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
    let pairs = wanted.chunks(unit_elements).zip(got.chunks(unit_elements));
    pairs
        .zip(units)
        .enumerate()
        .find_map(|(unit, ((x, y), is_of_these))| {
            (*is_of_these && !x.iter().zip(y).all(same)).then_some(unit)
        })
}
