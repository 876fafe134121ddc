//! The properties that rows of all tables share, and the cells whose selected variant is not their best.

use std::collections::HashMap;

use crate::cell::{Op, gate_name};
use crate::deferred;
use crate::prefill;
use crate::record::{Row, Run};

/// A cell is shown if the ratio of its selected variant's µs to the best variant's is above this.
const REGRET: f64 = 1.02;

/// A timed variant.
pub trait Timed {
    /// Description of the launch's work. Rows with the same description did the same work, with any variant.
    fn work(&self) -> String;
    /// Name of the kernel.
    fn variant(&self) -> &str;
    /// Whether the library selects this variant.
    fn selected(&self) -> bool;
    /// Time of a launch in µs; `None` if it was only checked.
    fn micros(&self) -> Option<f64>;
    /// Bandwidth of a copy in the same run in GB/s, if the row has it.
    fn copy(&self) -> Option<f64>;
    /// Time in µs that the bytes take at the copy's bandwidth, if the row has it.
    fn bytes_micros(&self) -> Option<f64>;
    /// Name of the GPU; empty if the row lacks it.
    fn gpu(&self) -> &str;
}

impl Timed for Row {
    fn work(&self) -> String {
        let cell = &self.cell;
        // The title of a table does not contain the gate of a layer.
        let gate = match cell.op == Op::KdaLayer {
            true => format!(" gate={}", gate_name(cell.gate)),
            false => String::new(),
        };
        format!("{}{gate} T={} B={}", cell.title(), cell.tokens, cell.batch)
    }

    fn variant(&self) -> &str {
        &self.variant
    }

    fn selected(&self) -> bool {
        self.selected
    }

    fn micros(&self) -> Option<f64> {
        Some(self.micros.median)
    }

    fn copy(&self) -> Option<f64> {
        let Run { copy, .. } = self.run;
        Some(copy)
    }

    fn bytes_micros(&self) -> Option<f64> {
        None
    }

    fn gpu(&self) -> &str {
        &self.run.gpu
    }
}

impl Timed for prefill::Row {
    fn work(&self) -> String {
        format!("prefill {} {}", self.case, self.state)
    }

    fn variant(&self) -> &str {
        &self.entry
    }

    fn selected(&self) -> bool {
        self.selected
    }

    fn micros(&self) -> Option<f64> {
        self.us
    }

    fn copy(&self) -> Option<f64> {
        self.copy_gb_s
    }

    fn bytes_micros(&self) -> Option<f64> {
        self.bytes_us
    }

    fn gpu(&self) -> &str {
        &self.gpu
    }
}

impl Timed for deferred::Row {
    fn work(&self) -> String {
        // Without a ring there are neither N nor u.
        let ring = match self.count {
            deferred::Count::Today => String::new(),
            _ => format!(" N={} u={}", self.most, self.updates),
        };
        let formulation = match self.entry.contains("_parallel") {
            true => " parallel",
            false => "",
        };
        format!(
            "deferred {} K={} {} {}{formulation}{ring} T={} B={}",
            self.operator,
            self.k_dim,
            self.state,
            self.count.name(),
            self.tokens,
            self.batch
        )
    }

    fn variant(&self) -> &str {
        &self.entry
    }

    fn selected(&self) -> bool {
        self.selected
    }

    fn micros(&self) -> Option<f64> {
        self.us
    }

    fn copy(&self) -> Option<f64> {
        self.copy_gb_s
    }

    fn bytes_micros(&self) -> Option<f64> {
        None
    }

    fn gpu(&self) -> &str {
        &self.gpu
    }
}

fn micros(row: &impl Timed) -> f64 {
    row.micros().unwrap_or(f64::INFINITY)
}

/// The fastest row.
fn least<'a, R: Timed>(rows: impl Iterator<Item = &'a &'a R>) -> Option<&'a R> {
    let least = rows.min_by(|one, two| micros(**one).total_cmp(&micros(**two)));
    least.copied()
}

/// Lines about the cells whose selected variant takes over 2 % longer than their best one, worst first. Empty if no cell has two
/// variants.
#[must_use]
pub fn regret<R: Timed>(rows: &[R]) -> String {
    let mut cells: Vec<(String, Vec<&R>)> = Vec::new();
    let mut places = HashMap::new();
    for row in rows.iter().filter(|row| row.micros().is_some()) {
        let work = row.work();
        let place = *places.entry(work.clone()).or_insert(cells.len());
        match cells.get_mut(place) {
            Some((_, rows)) => rows.push(row),
            None => cells.push((work, vec![row])),
        }
    }
    let (mut measured, mut worse) = (0, Vec::new());
    for (work, rows) in &cells {
        let selected = least(rows.iter().filter(|row| row.selected()));
        let (Some(selected), Some(best)) = (selected, least(rows.iter())) else {
            continue;
        };
        if rows.iter().all(|row| row.variant() == selected.variant()) {
            continue;
        }
        measured += 1;
        let ratio = micros(selected) / micros(best);
        if ratio > REGRET {
            let line = format!(
                "  {:+.1} %  {work}: {} {:.2} µs is selected, {} takes {:.2}\n",
                100.0 * (ratio - 1.0),
                selected.variant(),
                micros(selected),
                best.variant(),
                micros(best)
            );
            worse.push((ratio, line));
        }
    }
    if measured == 0 {
        return String::new();
    }
    worse.sort_by(|one, two| two.0.total_cmp(&one.0));
    let lines: String = worse.iter().map(|(_, line)| line.as_str()).collect();
    format!(
        "{} of {measured} cells with several variants are more than {:.0} % from their best one\n{lines}",
        worse.len(),
        100.0 * (REGRET - 1.0)
    )
}
