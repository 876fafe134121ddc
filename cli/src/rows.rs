//! The rows of a problem: which tokens are theirs, and which slots they start from and write.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::Error;
use crate::problem::Problem;
use crate::tensor::HostTensor;

/// A row of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its tokens among those of all rows; empty in a commit, and for a row that touches nothing.
    pub tokens: Range<usize>,
    /// Its slots, unless it is inactive.
    pub slots: Option<Slots>,
}

/// The slots of an active row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Slot to start from.
    pub read: usize,
    /// Slots that are written, in the order of the tokens; one may come twice.
    pub writes: Vec<usize>,
}

impl Problem {
    /// Every row. Meaningful for a problem that the library takes.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let indices = |name| self.tensors.get(name).map(HostTensor::to_i64);
        let slots = SlotTensors {
            problem: self,
            pool: self.dim("state", 0),
            most: self.max_tokens(),
            read: indices("read_slots"),
            write: indices("write_slots"),
            token: indices("token_slots"),
            accepted: indices("accepted"),
            keep: indices("keep"),
        };
        let row = |(b, tokens): (usize, Option<Range<usize>>)| Row {
            slots: tokens
                .as_ref()
                .and_then(|tokens| slots.of_row(b, tokens.len())),
            tokens: tokens.unwrap_or(0..0),
        };
        self.bounds().into_iter().enumerate().map(row).collect()
    }

    /// The tokens of each row; `None` for a row of `cu_seqlens` that is empty or out of range.
    pub(crate) fn bounds(&self) -> Vec<Option<Range<usize>>> {
        let Some(cu_seqlens) = self.tensors.get("cu_seqlens").map(HostTensor::to_i64) else {
            let rows = if self.is_commit() { "prev.k" } else { "q" };
            let tokens = self.dim("q", 1);
            let row = |b| Some(b * tokens..(b + 1) * tokens);
            return (0..self.dim(rows, 0)).map(row).collect();
        };
        let total = self.dim("q", 1);
        let bounds = |pair: &[i64]| {
            let start = usize::try_from(pair[0]).ok()?;
            let end = usize::try_from(pair[1]).ok()?;
            let longest = self.max_tokens.unwrap_or(total);
            let length = end.checked_sub(start)?;
            ((1..=longest).contains(&length) && end <= total).then_some(start..end)
        };
        cu_seqlens.windows(2).map(bounds).collect()
    }
}

/// What says where rows start and write, as integers.
struct SlotTensors<'p> {
    problem: &'p Problem,
    /// P.
    pool: usize,
    /// T.
    most: usize,
    read: Option<Vec<i64>>,
    write: Option<Vec<i64>>,
    token: Option<Vec<i64>>,
    accepted: Option<Vec<i64>>,
    keep: Option<Vec<i64>>,
}

impl SlotTensors<'_> {
    /// The slots of row b with that many tokens, unless it is inactive.
    fn of_row(&self, b: usize, tokens: usize) -> Option<Slots> {
        let own = |tensor: &Option<Vec<i64>>, default: i64| {
            tensor
                .as_ref()
                .map_or(Some(default), |values| values.get(b).copied())
        };
        if let Some(token_slots) = &self.token {
            let slots = token_slots.get(b * self.most..(b + 1) * self.most)?;
            let accepted = usize::try_from(own(&self.accepted, 1)?).ok()?;
            return Some(Slots {
                read: self.live(*slots.get(accepted.checked_sub(1)?)?)?,
                writes: slots[..tokens]
                    .iter()
                    .filter_map(|slot| self.live(*slot))
                    .collect(),
            });
        }
        let previous = self.problem.dim("prev.k", 1);
        let keep = usize::try_from(own(&self.keep, 0)?).ok()?;
        let read = own(&self.read, b as i64)?;
        let write = self.live(own(&self.write, read)?)?;
        (keep <= previous).then_some(Slots {
            read: self.live(read)?,
            writes: Vec::from_iter(self.problem.options.update_state.then_some(write)),
        })
    }

    fn live(&self, slot: i64) -> Option<usize> {
        let slot = usize::try_from(slot)
            .ok()
            .filter(|slot| *slot < self.pool)?;
        let null_slot = self.problem.options.null_slot.map(|null| null as usize);
        (Some(slot) != null_slot).then_some(slot)
    }
}

/// No slot is written by two rows, or written by one and read by another: what is left in it would depend on which
/// comes first.
pub(crate) fn check_slots(rows: &[Row]) -> Result<(), Error> {
    let active = || {
        let rows = rows.iter().enumerate();
        rows.filter_map(|(row, Row { slots, .. })| Some((row, slots.as_ref()?)))
    };
    let mut writers = BTreeMap::new();
    for (row, slots) in active() {
        for &slot in &slots.writes {
            if let Some(other) = writers.insert(slot, row)
                && other != row
            {
                return Err(Error::Input(format!(
                    "slots: wanted a slot to be written by one row, got rows {other} and {row} for slot {slot}"
                )));
            }
        }
    }
    for (row, Slots { read, .. }) in active() {
        match writers.get(read) {
            Some(writer) if *writer != row => {
                return Err(Error::Input(format!(
                    "slots: wanted no row to read what another writes, got row {row} reading slot {read} and row \
                     {writer} writing it"
                )));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Row, Slots, check_slots};

    fn row(read: usize, writes: &[usize]) -> Row {
        Row {
            tokens: 0..1,
            slots: Some(Slots {
                read,
                writes: writes.to_vec(),
            }),
        }
    }

    #[test]
    fn rows_that_meet_in_a_slot_are_named() {
        let inactive = || Row {
            tokens: 1..2,
            slots: None,
        };
        assert!(check_slots(&[row(0, &[0]), inactive(), row(2, &[2, 3, 2])]).is_ok());
        let refused = |rows: &[Row], part: &str| {
            let message = check_slots(rows).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        };
        refused(
            &[row(0, &[3]), inactive(), row(1, &[1, 3])],
            "rows 0 and 2 for slot 3",
        );
        let crossed = [row(0, &[1]), row(1, &[0])];
        refused(&crossed, "row 0 reading slot 0 and row 1 writing it");
        assert!(check_slots(&[row(0, &[]), row(0, &[])]).is_ok());
    }
}
