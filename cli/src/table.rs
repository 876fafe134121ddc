//! Text tables for stdout.

use comfy_table::{CellAlignment, Table, presets};

/// A table under `headings`. All columns but the first are aligned to the right.
#[must_use]
pub fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(headings.to_vec());
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}
