//! Shows rows as tables.

use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};

use crate::cell::Cell;
use crate::peers::{CARD, Peers};
use crate::record::Row;

/// A column of the tables: its heading, and its text for a row.
type Column<'a> = (String, Text<'a>);
type Text<'a> = Box<dyn Fn(&Row) -> Option<String> + 'a>;

/// Rows of an earlier run, to compare with.
pub struct Before {
    /// Name of the earlier run.
    pub name: String,
    /// Rows of the earlier run.
    pub rows: Vec<Row>,
}

impl Before {
    /// The earlier row of the same cell: for a selected variant the one that was selected then, else the same variant.
    fn of(&self, row: &Row) -> Option<&Row> {
        self.rows.iter().find(|before| {
            before.cell == row.cell
                && match row.selected {
                    true => before.selected,
                    false => before.variant == row.variant,
                }
        })
    }
}

/// A table for each group of cells that differ only in T, B and variant. Columns that are empty in all rows are left out. If several
/// variants were measured, `*` marks the selected one.
#[must_use]
pub fn tables(rows: &[Row], peers: &Peers, before: Option<&Before>) -> String {
    let columns = columns(peers, before);
    let mut text = String::new();
    for title in titles(rows) {
        let rows: Vec<&Row> = of_title(rows, &title).collect();
        let cells = |column: &Column<'_>| -> Vec<Option<String>> {
            rows.iter().map(|row| column.1(row)).collect()
        };
        let filled: Vec<(&str, Vec<Option<String>>)> = columns
            .iter()
            .map(|column| (column.0.as_str(), cells(column)))
            .filter(|(_, cells)| cells.iter().any(Option::is_some))
            .collect();
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN);
        table.set_header(filled.iter().map(|(head, _)| *head));
        for row in 0..rows.len() {
            table.add_row(
                filled
                    .iter()
                    .map(|(_, cells)| cells[row].clone().unwrap_or_default()),
            );
        }
        for (column, (head, _)) in table.column_iter_mut().zip(&filled) {
            if *head != "variant" && !head.starts_with("best peer") {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        text += &format!("\n{title}\n{table}\n");
    }
    text
}

fn columns<'a>(peers: &'a Peers, before: Option<&'a Before>) -> Vec<Column<'a>> {
    let mut columns: Vec<Column<'a>> = Vec::new();
    let mut add = |head: &str, text: Text<'a>| {
        columns.push((head.to_owned(), text));
    };
    add("T", Box::new(|row| Some(row.cell.tokens.to_string())));
    add("B", Box::new(|row| Some(row.cell.batch.to_string())));
    add(
        "variant",
        Box::new(|row| {
            let mark = if row.selected { " *" } else { "" };
            Some(format!("{}{mark}", tile(&row.variant)))
        }),
    );
    add("µs", Box::new(|row| Some(digits(row.micros.median))));
    add(
        "p10–p90",
        Box::new(|row| {
            let [low, high] = [row.micros.p10, row.micros.p90].map(digits);
            Some(format!("{low}–{high}"))
        }),
    );
    // A record that was copied from a printed table has no bytes.
    let has_bytes = |row: &Row| (row.bytes > 0).then_some(());
    add(
        "GB/s",
        Box::new(move |row| has_bytes(row).map(|()| format!("{:.0}", row.rate()))),
    );
    add(
        "% copy",
        Box::new(move |row| has_bytes(row).map(|()| format!("{:.0}", 100.0 * row.copy_share()))),
    );
    add(
        "÷ floor",
        Box::new(|row| Some(format!("{:.2}", row.micros.median / row.floor?))),
    );
    add(
        "kernel ÷ floor",
        Box::new(|row| Some(format!("{:.2}", row.kernel_over_floor()?))),
    );
    add(
        &format!("best peer ({CARD})"),
        Box::new(|row| {
            let peer = peers.best(row)?;
            Some(format!("{} {}", digits(peer.micros), peer.name))
        }),
    );
    add(
        "vs best peer",
        Box::new(|row| {
            Some(format!(
                "{:.2}",
                row.micros.median / peers.best(row)?.micros
            ))
        }),
    );
    if let Some(before) = before {
        add(
            &format!("÷ {}", before.name),
            Box::new(|row| {
                let old = before.of(row)?;
                Some(format!("{:.3}", row.micros.median / old.micros.median))
            }),
        );
    }
    columns
}

/// The titles of `rows`, without repetitions.
#[must_use]
pub fn titles(rows: &[Row]) -> Vec<String> {
    let mut titles = Vec::new();
    for title in rows.iter().map(|row| row.cell.title()) {
        if !titles.contains(&title) {
            titles.push(title);
        }
    }
    titles
}

/// The rows with this title, ordered by T, then B.
pub fn of_title<'a>(rows: &'a [Row], title: &str) -> impl Iterator<Item = &'a Row> {
    let mut rows: Vec<&Row> = rows
        .iter()
        .filter(|row| row.cell.title() == title)
        .collect();
    rows.sort_by_key(|row| {
        let Cell { tokens, batch, .. } = row.cell;
        (tokens, batch)
    });
    rows.into_iter()
}

/// Part of a variant's name that tells it from the others of a table.
fn tile(variant: &str) -> &str {
    match variant.find("_tile") {
        Some(at) => &variant[at + 1..],
        None => variant,
    }
}

fn digits(micros: f64) -> String {
    let digits = if micros < 100.0 { 2 } else { 1 };
    format!("{micros:.digits$}")
}
