//! Advice for `host/src/step/select/tiles.txt`, from rows of every variant.

use std::collections::BTreeSet;

use gated_delta::{Formulation, StateLayout};
use gated_delta_harness::arguments::Operator;

use crate::cell::{Cell, Mode};
use crate::record::Row;

/// Variants within this ratio of the best of a batch size count as equally good, so that a table has no more rows than necessary.
const AS_GOOD: f64 = 1.01;

/// The variant for up to a number of heads, B · HV.
struct Choice<'a> {
    up_to: u32,
    variant: &'a str,
}

/// Lines for `tiles.txt`: for each kind of launch its choices, with the worst-case cost. Where several T or kept states were measured, and
/// their own best choices differ, these follow as comments.
#[must_use]
pub fn advice(rows: &[Row]) -> String {
    // Drafts on 16-bit states may have kernels of both dtypes, of which a launch takes one.
    let is_taken = |row: &&Row| {
        let mut selected = rows.iter().filter(|other| other.selected);
        selected.all(|other| other.cell != row.cell || state(other) == state(row))
    };
    let rows: Vec<&Row> = rows.iter().filter(is_taken).collect();
    let mut kinds = Vec::new();
    for row in &rows {
        let kind = kind(row);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let mut text = String::new();
    for name in kinds {
        let rows = rows.iter().copied().filter(|row| kind(row) == name);
        let rows: Vec<&Row> = rows.collect();
        let all = table(&rows);
        text += &format!("{}\n{name}  {}\n", worst(&rows, &all), written(&all));
        let some = |row: &Row| (row.cell.tokens, keeps(&row.cell));
        let parts: BTreeSet<(usize, &str)> = rows.iter().map(|row| some(row)).collect();
        for (tokens, keeps) in parts {
            let alone = rows.iter().copied();
            let alone: Vec<&Row> = alone.filter(|row| some(row) == (tokens, keeps)).collect();
            let of_part = table(&alone);
            if written(&of_part) != written(&all) {
                text += &format!("# {keeps}tokens={tokens} alone: {}\n", written(&of_part));
            }
        }
    }
    text
}

/// The fewest choices that are as good as the best at every number of heads. All rows with the same number of heads count alike, whatever
/// their model, mode and T: the cost of a variant is the mean ratio of its µs to the best's.
fn table<'a>(rows: &[&'a Row]) -> Vec<Choice<'a>> {
    let heads: Vec<u32> = rows
        .iter()
        .map(|row| heads(&row.cell))
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let variants: BTreeSet<&str> = rows.iter().map(|row| row.variant.as_str()).collect();
    let cost = |variant: &str, heads: u32| mean_over_best(rows, variant, heads);
    let good: Vec<(&str, Vec<bool>)> = variants
        .iter()
        .map(|&variant| {
            let good = heads.iter().map(|&heads| {
                let best = variants.iter().map(|variant| cost(variant, heads));
                let best = best.min_by(f64::total_cmp).unwrap_or(f64::INFINITY);
                cost(variant, heads) <= AS_GOOD * best
            });
            (variant, good.collect())
        })
        .collect();
    let mut choices = Vec::new();
    let mut at = 0;
    while at < heads.len() {
        let runs = good.iter().map(|(variant, good)| {
            let run = good[at..].iter().take_while(|good| **good).count();
            let total: f64 = heads[at..at + run]
                .iter()
                .map(|&heads| cost(variant, heads).ln())
                .sum();
            (run, total, *variant)
        });
        let longest = runs.max_by(|one, two| one.0.cmp(&two.0).then(two.1.total_cmp(&one.1)));
        let Some((run @ 1.., _, variant)) = longest else {
            break;
        };
        at += run;
        choices.push(Choice {
            up_to: heads[at - 1],
            variant,
        });
    }
    if let Some(last) = choices.last_mut() {
        last.up_to = u32::MAX;
    }
    choices
}

/// Geometric mean, over the cells with this number of heads, of the ratio of a variant's µs to the best variant's; infinite if the variant
/// was not measured.
fn mean_over_best(rows: &[&Row], variant: &str, heads_wanted: u32) -> f64 {
    let cells = cells(
        rows.iter()
            .copied()
            .filter(|row| heads(&row.cell) == heads_wanted),
    );
    let logs: f64 = cells.iter().map(|cell| over_best(cell, variant).ln()).sum();
    (logs / cells.len() as f64).exp()
}

/// The rows, grouped by cell.
fn cells<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<Vec<&'a Row>> {
    let mut cells: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match cells.iter_mut().find(|cell| cell[0].cell == row.cell) {
            Some(cell) => cell.push(row),
            None => cells.push(vec![row]),
        }
    }
    cells
}

fn over_best(cell: &[&Row], variant: &str) -> f64 {
    let micros = |row: &&Row| row.micros.median;
    let best = cell.iter().map(micros).min_by(f64::total_cmp);
    let found = cell.iter().find(|row| row.variant == variant).map(micros);
    found.unwrap_or(f64::INFINITY) / best.unwrap_or(f64::NAN)
}

/// Comment with the worst ratio of the chosen variants to the best of a cell, and of the variants that are selected today.
fn worst(rows: &[&Row], choices: &[Choice<'_>]) -> String {
    let cells = cells(rows.iter().copied());
    let worst = |of: &dyn Fn(&[&Row]) -> f64| {
        let worst = cells.iter().max_by(|one, two| of(one).total_cmp(&of(two)));
        worst.map_or_else(String::new, |cell| {
            let first = &cell[0].cell;
            let Cell { tokens, batch, .. } = first;
            let (model, mode) = (first.model.name, first.mode.name());
            format!("{:.3} ({model} {mode} T={tokens} B={batch})", of(cell))
        })
    };
    let chosen = worst(&|cell| {
        let heads = heads(&cell[0].cell);
        let choice = choices.iter().find(|choice| heads <= choice.up_to);
        choice.map_or(f64::INFINITY, |choice| over_best(cell, choice.variant))
    });
    let today = worst(&|cell| {
        let selected = cell.iter().find(|row| row.selected);
        selected.map_or(f64::INFINITY, |row| over_best(cell, &row.variant))
    });
    format!("# at worst {chosen} of the best variant; now {today}")
}

fn written(choices: &[Choice<'_>]) -> String {
    let choices: Vec<String> = choices
        .iter()
        .map(|Choice { up_to, variant }| match up_to {
            &u32::MAX => format!("*:{}", tile(variant)),
            up_to => format!("{up_to}:{}", tile(variant)),
        })
        .collect();
    choices.join(" ")
}

/// Last part of an entry's name, after its dims.
fn tile(variant: &str) -> &str {
    let dims = ["_k64_", "_k96v192_", "_k128_"];
    let behind = dims.iter().find_map(|dims| variant.split_once(dims));
    behind.map_or(variant, |(_, tile)| tile)
}

/// Number of heads over all rows, B · HV.
fn heads(cell: &Cell) -> u32 {
    (cell.batch * cell.model.value_heads) as u32
}

/// States kept by a token-by-token step, as a condition of a line.
fn keeps(cell: &Cell) -> &'static str {
    match (cell.formulation, cell.mode) {
        (Formulation::Recurrent, Mode::Update) if cell.tokens > 1 => "update ",
        (Formulation::Recurrent, Mode::Snapshots | Mode::TokenSlots) => "each ",
        _ => "",
    }
}

/// Dtype of states in the name of a row's kernel.
fn state(row: &Row) -> &'static str {
    if row.variant.contains("_f32_") {
        "f32"
    } else {
        "bf16"
    }
}

/// Left side of a line of `tiles.txt` for a row's kernel.
fn kind(row: &Row) -> String {
    let (cell, state) = (&row.cell, state(row));
    let is_parallel = cell.formulation == Formulation::Parallel;
    let operator = cell.op.operator();
    let of = match operator {
        Operator::Gdn => "gdn",
        Operator::Kda => "kda",
    };
    let family = match (is_parallel, cell.op.is_layer(), operator) {
        (true, true, _) => &format!("{of}_layer_parallel"),
        (true, false, Operator::Gdn) => "gdn_mtp_parallel",
        (true, false, Operator::Kda) => "kda_recurrent_parallel",
        (false, true, _) if cell.tokens == 1 => "layer",
        (false, true, _) => "layer_mtp",
        (false, false, _) => "recurrent",
    };
    let layout = match cell.layout {
        StateLayout::KLast => "klast",
        StateLayout::VLast => "vlast",
    };
    let dims = match cell.dim {
        96 => "k96v192".to_owned(),
        dim => format!("k{dim}"),
    };
    let is_decode = cell.tokens == 1 && !cell.mode.has_previous();
    let condition = match cell.mode {
        Mode::Verify if is_parallel => " verify",
        Mode::Resume if is_parallel => " resume",
        _ if is_parallel => " update|commit",
        _ if family == "recurrent" && is_decode => " decode",
        _ => "",
    };
    format!("{of} {family} {layout} {state} {dims}{condition}")
}
