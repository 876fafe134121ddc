//! Times of other libraries' kernels on an H200, from `record/h200/peers.csv`, and their comparison with rows.

use std::collections::{HashMap, HashSet};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::cell::Cell;
use crate::record::Row;

/// Relative difference from the best peer below which a cell is tied.
pub const TIED: f64 = 0.02;

/// Name of the GPU that all peers were recorded on, as in its driver.
pub const GPU: &str = "NVIDIA H200";

/// Name of that GPU in a table's head.
pub const CARD: &str = "H200";

/// Whether a time on `gpu` may be compared with a peer's.
#[must_use]
pub fn are_of(gpu: &str) -> bool {
    gpu == GPU
}

const RECORDED: &str = include_str!("../record/h200/peers.csv");

/// A recorded cell of another library. Its gate is not compared: a row of KDA is compared with the best over all gates.
#[derive(Clone, Debug, Deserialize)]
pub struct Peer {
    #[serde(flatten)]
    work: Work,
    /// Time per launch in µs, measured as in a row.
    #[serde(rename = "us")]
    pub micros: f64,
    /// Name of the library.
    #[serde(rename = "peer")]
    pub name: String,
    /// Name of its function.
    pub kernel: String,
}

/// Work of a launch, by which cells are compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
struct Work {
    op: String,
    mode: String,
    state: String,
    layout: String,
    l2: String,
    #[serde(rename = "T")]
    tokens: usize,
    #[serde(rename = "B")]
    batch: usize,
    #[serde(rename = "H")]
    heads: usize,
    #[serde(rename = "HV")]
    value_heads: usize,
    k_dim: usize,
}

impl From<&Cell> for Work {
    fn from(cell: &Cell) -> Self {
        Self {
            op: cell.op.name().to_owned(),
            mode: cell.mode.name().to_owned(),
            state: cell.state.to_string(),
            layout: cell.layout.to_string(),
            l2: cell.l2().to_owned(),
            tokens: cell.tokens,
            batch: cell.batch,
            heads: cell.model.heads,
            value_heads: cell.model.value_heads,
            k_dim: cell.dim,
        }
    }
}

/// The best peer of each cell.
pub struct Peers(HashMap<Work, Peer>);

impl Peers {
    /// Reads the recorded peers.
    pub fn recorded() -> Result<Self> {
        let mut best: HashMap<Work, Peer> = HashMap::new();
        for peer in csv::Reader::from_reader(RECORDED.as_bytes()).deserialize() {
            let peer: Peer = peer.context("record/h200/peers.csv")?;
            let known = best.entry(peer.work.clone()).or_insert(peer.clone());
            if peer.micros < known.micros {
                *known = peer;
            }
        }
        Ok(Self(best))
    }

    /// The best peer of a cell, if there is one.
    #[must_use]
    pub fn of(&self, cell: &Cell) -> Option<&Peer> {
        self.0.get(&Work::from(cell))
    }

    /// The best peer of a row, if there is one and the row is from the same kind of GPU.
    #[must_use]
    pub fn best(&self, row: &Row) -> Option<&Peer> {
        self.of(&row.cell).filter(|_| are_of(&row.run.gpu))
    }

    /// Descriptions of recorded cells whose work is in none of `cells`.
    #[must_use]
    pub fn unmet(&self, cells: &[Cell]) -> Vec<String> {
        let met: HashSet<Work> = cells.iter().map(Work::from).collect();
        let unmet = self.0.keys().filter(|work| !met.contains(work));
        let mut unmet: Vec<String> = unmet.map(|work| format!("{work:?}")).collect();
        unmet.sort();
        unmet
    }

    /// Counts the cells of `rows` that are faster and slower than their best peers. A cell counts once, with the better formulation. Rows
    /// of variants that are not selected do not count.
    #[must_use]
    pub fn score(&self, rows: &[Row]) -> Score {
        let mut cells: Vec<(String, &Row, &Peer)> = Vec::new();
        for row in rows.iter().filter(|row| row.selected) {
            let Some(peer) = self.best(row) else { continue };
            let Cell { tokens, batch, .. } = row.cell;
            let title = Cell {
                formulation: Default::default(),
                ..row.cell
            }
            .title();
            let title = format!("{title} T={tokens} B={batch}");
            match cells.iter_mut().find(|(known, ..)| *known == title) {
                Some((_, best, _)) if row.micros.median < best.micros.median => *best = row,
                Some(_) => {}
                None => cells.push((title, row, peer)),
            }
        }
        let mut score = Score::default();
        for (title, row, peer) in cells {
            let (ours, theirs) = (row.micros.median, peer.micros);
            let ratio = ours / theirs;
            let Peer { name, kernel, .. } = peer;
            let text = format!("{title}: {ours:.2} µs, {name} {theirs:.2} ({ratio:.2}; {kernel})");
            if ratio > 1.0 + TIED {
                score.lost.push(text);
            } else if ratio >= 1.0 - TIED {
                score.tied.push(text);
            } else {
                score.won += 1;
            }
        }
        score
    }
}

/// Count of the cells that have a peer.
#[derive(Debug, Default)]
pub struct Score {
    /// Number of cells that are faster than the best peer.
    pub won: usize,
    /// Descriptions of cells within [`TIED`] of it.
    pub tied: Vec<String>,
    /// Descriptions of slower cells.
    pub lost: Vec<String>,
}

impl Score {
    /// The count, the lost cells and the tied ones. Empty if there is no cell.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { won, tied, lost } = self;
        if won + tied.len() + lost.len() == 0 {
            return String::new();
        }
        let mut text = format!(
            "best peers on the same GPU (benches/record/h200/peers.csv): {won} cells won, {} tied (within {:.0} %), {} lost\n",
            tied.len(),
            100.0 * TIED,
            lost.len()
        );
        for (outcome, cells) in [("lost", lost), ("tied", tied)] {
            for cell in cells {
                text += &format!("{outcome}: {cell}\n");
            }
        }
        text
    }
}
