//! `check`: a problem's results against what its file expects, or against the reference.

use std::borrow::Cow;

use gated_delta::Entry;

use crate::Report;
use crate::backend::Backend;
use crate::compare::{Comparison, compare, pairs, tolerance};
use crate::error::Error;
use crate::file::Expected;
use crate::problem::Problem;
use crate::reference::{self, Truth};
use crate::table::table;
use crate::tensor::HostTensor;

/// Runs a problem and compares `o` and the written slots of the pool with `expected`, or with the reference where
/// that has none; every other slot has to be as it was, bit for bit.
///
/// # Errors
/// As [`Backend::run`]'s; [`Error::Input`] where the reference would be compared with itself alone.
pub fn check(
    backend: &Backend,
    problem: &Problem,
    expected: &Expected,
    variant: Option<Entry>,
) -> Result<Report, Error> {
    let is_reference = matches!(backend, Backend::Reference);
    if is_reference && expected.o.is_none() && expected.state.is_none() {
        let wanted = "wanted one of them for the reference to be compared with, got none";
        return Err(Error::Input(format!(
            "expected.o, expected.state: {wanted}"
        )));
    }
    let outputs = backend.run(problem, variant)?;
    let needs_truth = !is_reference && (expected.o.is_none() || expected.state.is_none());
    let truth = needs_truth.then(|| reference::truth(problem)).transpose()?;
    let wanted =
        |expected: &Option<HostTensor>, values: fn(&Truth) -> &Vec<f64>| match (expected, &truth) {
            (Some(tensor), _) => Some(("file", Cow::Owned(tensor.to_f64()))),
            (None, Some(truth)) => Some(("reference", Cow::Borrowed(values(truth)))),
            (None, None) => None,
        };

    let mut lines = Lines::default();
    if let Some((source, values)) = wanted(&expected.o, |truth| &truth.o) {
        let got = outputs.o.to_f64();
        lines.compared(
            "o",
            &outputs.o,
            source,
            compare(pairs(&got, &values), outputs.o.dims()),
        );
    }
    let before = problem.tensor(problem.written_pool())?;
    let after = outputs.write_state.as_ref().unwrap_or(&outputs.state);
    let written = written_slots(problem, before.dims()[0]);
    let slot_elements: usize = before.dims()[1..].iter().product();
    let (before, got) = (before.to_f64(), after.to_f64());
    let mut kept = changed_slot(&before, &got, &written, slot_elements)
        .map(|slot| format!("slot {slot} has changed"));
    if let Some((source, values)) = wanted(&expected.state, |truth| &truth.pool) {
        let elements = pairs(&got, &values).filter(|(index, ..)| written[index / slot_elements]);
        lines.compared(
            "state, written slots",
            after,
            source,
            compare(elements, after.dims()),
        );
        if kept.is_none() {
            kept = changed_slot(&before, &values, &written, slot_elements)
                .map(|slot| format!("slot {slot} is to change, but no row writes it"));
        }
    }
    lines.exact("state, other slots", after, kept);

    let mut text = table(
        &[
            "tensor",
            "dtype",
            "against",
            "rel. L2 error",
            "tolerance",
            "result",
        ],
        lines.rows,
    );
    if let Some(variant) = outputs.variant {
        text += &format!("variant: {}\n", variant.name());
    }
    Ok(Report {
        text,
        passed: !lines.failed,
    })
}

/// The lines of the report.
#[derive(Default)]
struct Lines {
    rows: Vec<Vec<String>>,
    failed: bool,
}

impl Lines {
    fn compared(&mut self, name: &str, tensor: &HostTensor, source: &str, comparison: Comparison) {
        let tolerance = tolerance(tensor.dtype());
        let problem = match &comparison.mismatch {
            Some(mismatch) => Some(mismatch.clone()),
            None if comparison.holds(tolerance) => None,
            None => Some("above tolerance".to_owned()),
        };
        self.push(
            name,
            tensor,
            source,
            [
                format!("{:.2e}", comparison.error),
                format!("{tolerance:.0e}"),
            ],
            problem,
        );
    }

    fn exact(&mut self, name: &str, tensor: &HostTensor, problem: Option<String>) {
        self.push(
            name,
            tensor,
            "input",
            ["".to_owned(), "exact".to_owned()],
            problem,
        );
    }

    fn push(
        &mut self,
        name: &str,
        tensor: &HostTensor,
        source: &str,
        [error, tolerance]: [String; 2],
        problem: Option<String>,
    ) {
        self.failed |= problem.is_some();
        let result = problem.map_or("ok".to_owned(), |problem| format!("FAILED: {problem}"));
        self.rows.push(vec![
            name.to_owned(),
            tensor.dtype().to_string(),
            source.to_owned(),
            error,
            tolerance,
            result,
        ]);
    }
}

/// Whether each slot of the written pool is a row's to write.
fn written_slots(problem: &Problem, slots: usize) -> Vec<bool> {
    let mut written = vec![false; slots];
    if problem.options.update_state {
        for row in problem.rows().into_iter().flatten() {
            written[row.write] = true;
        }
    }
    written
}

/// The first slot that is not written and yet differs in a bit, one NaN being as good as another.
fn changed_slot(
    before: &[f64],
    after: &[f64],
    written: &[bool],
    slot_elements: usize,
) -> Option<usize> {
    let slots = before
        .chunks(slot_elements)
        .zip(after.chunks(slot_elements))
        .zip(written);
    let same = |before: &[f64], after: &[f64]| {
        before
            .iter()
            .zip(after)
            .all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan())
    };
    slots
        .enumerate()
        .find_map(|(slot, ((before, after), written))| {
            (!written && !same(before, after)).then_some(slot)
        })
}
