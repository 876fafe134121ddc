//! The parts of each tensor that a launch writes.

use gated_delta::IndexReport;

use crate::problem::{Problem, RINGS};
use crate::tensor::HostTensor;

/// Whether each unit of a result is written. A unit is written as a whole or not at all.
pub(crate) struct Written {
    tokens: Vec<bool>,
    slots: Vec<bool>,
    /// Units of windows: with token slots, each column of a slot, channel by channel; else each slot.
    windows: Vec<bool>,
    /// Snapshots of all rows, one row after the other.
    steps: Vec<bool>,
    /// Entries of the rings of keys, updates, decays and inputs.
    entries: [Vec<bool>; 4],
}

impl Written {
    /// The written units of a problem. `rows` tells the inactive rows.
    pub(crate) fn of(problem: &Problem, rows: &IndexReport) -> Self {
        let steps = problem.dim("snapshots", 1);
        let tokens = problem.tokens();
        let [slots, channels, columns] = [0, 1, 2].map(|dim| problem.dim("conv_state", dim));
        let has_token_slots = problem.tensors.contains_key("token_slots");
        let mut written = Self {
            // Outputs of no row and of inactive rows are zeroed; without rows nothing is launched.
            tokens: vec![!tokens.is_empty(); problem.dim("o", 0) * problem.dim("o", 1)],
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
            let is_empty = tokens.is_empty() && problem.has_new() && !problem.has_previous();
            let stays = is_empty && !problem.carries(b);
            if stays || rows.inactive.iter().any(|row| row.row == b) {
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

    /// Whether each unit of the result `name` is written. Empty for a result without units, which counts as not written.
    pub(crate) fn units(&self, name: &str) -> &[bool] {
        match name {
            "o" => &self.tokens,
            "state" => &self.slots,
            "conv_state" => &self.windows,
            "snapshots" | "conv_snapshots" => &self.steps,
            name => RINGS
                .iter()
                .position(|ring| *ring == name)
                .map_or(&[], |ring| &self.entries[ring]),
        }
    }

    /// Name of a unit of the result `name`.
    pub(crate) fn unit(&self, name: &str) -> &'static str {
        match name {
            "o" => "token",
            "state" => "slot",
            "conv_state" if self.windows.len() == self.slots.len() => "slot",
            "conv_state" => "input",
            "snapshots" | "conv_snapshots" => "step",
            _ => "entry",
        }
    }
}
