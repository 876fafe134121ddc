//! The accesses of each row, by the rules of the kernels.

use super::hazard::{Access, Accesses, Place};
use super::indices::Indices;
use super::{InactiveRow, IndexReport};
use crate::error::Error;
use crate::step::Argument;
use crate::tensor_checks::Named;

/// All accesses of the rows to states and windows.
#[derive(Default)]
pub struct Uses {
    states: Accesses,
    windows: Accesses,
}

impl Uses {
    /// Checks states and windows: see [`Accesses::check`].
    pub fn check(self) -> Result<(), Error> {
        self.states.check()?;
        self.windows.check()
    }
}

/// An index that makes its row inactive: the name of its tensor and its value.
type Dead = (&'static str, i64);

impl Indices<'_> {
    /// The report of the rows, and their accesses to states and windows.
    pub fn rows(&self) -> Result<(IndexReport, Uses), Error> {
        let mut report = IndexReport {
            rows: self.rows,
            ..IndexReport::default()
        };
        let mut uses = Uses::default();
        self.check_positions()?;
        if let Some(bounds) = self.numbers(Argument::CuSeqlens) {
            self.check_bounds(bounds)?;
            let end = bounds.last().map_or(0, |&end| end as usize);
            report.unused_tokens = self.total - end;
        }
        for b in 0..self.rows {
            let tokens = match self.numbers(Argument::CuSeqlens) {
                Some(bounds) => (bounds[b + 1] - bounds[b]) as usize,
                None => self.tokens,
            };
            let is_empty = tokens == 0 && !self.has_previous() && !self.is_flush();
            match self.row(b, tokens, is_empty, &mut uses) {
                Ok(_) if is_empty => report.empty += 1,
                Ok(skipped) => {
                    report.active += 1;
                    report.skipped_stores += skipped;
                }
                Err((tensor, index)) => report.inactive.push(InactiveRow {
                    row: b,
                    tensor,
                    index,
                }),
            }
        }
        Ok((report, uses))
    }

    /// Whether the launch has previous tokens.
    fn has_previous(&self) -> bool {
        self.previous_tokens > 0
    }

    /// Whether the launch is a flush: pending tokens and no new tokens.
    fn is_flush(&self) -> bool {
        self.numbers(Argument::PendingLen).is_some() && self.tokens == 0
    }

    /// Checks that the pending tokens of row `b` are a valid range of its ring.
    fn check_pending(&self, b: usize, is_fresh: bool) -> Result<(), Dead> {
        let [most, entries] = self.ring.map(|n| n as i64);
        if let Some(len) = self.numbers(Argument::PendingLen)
            && !(is_fresh || (0..=most).contains(&len[b]))
        {
            return Err(("pending len", len[b]));
        }
        match self.numbers(Argument::PendingBase) {
            Some(base) if !(0..entries).contains(&base[b]) => Err(("pending base", base[b])),
            _ => Ok(()),
        }
    }

    /// Checks that positions are not negative.
    fn check_positions(&self) -> Result<(), Error> {
        let positions = self
            .numbers(Argument::Positions)
            .into_iter()
            .flatten()
            .enumerate();
        match positions.into_iter().find(|(_, got)| **got < 0) {
            Some((position, &got)) => Err(Error::Index {
                tensor: "positions",
                position,
                wanted: "0 or more".to_owned(),
                got,
            }),
            None => Ok(()),
        }
    }

    /// The checkpoints of row `b`, which has `tokens` tokens: for each, the token that it follows and its slot.
    fn checkpoints(&self, b: usize, tokens: usize) -> impl Iterator<Item = (usize, i64)> {
        let slots = self.numbers(Argument::CheckpointSlots).unwrap_or_default();
        let of_row = slots.len() / self.rows.max(1);
        let slots = slots[b * of_row..][..of_row].iter().copied();
        let positions = self.numbers(Argument::Positions);
        let before = positions.map_or(0, |positions| positions[b] as u64);
        let every = self.every.max(1) as u64;
        let ends = (before / every + 1..).map(move |multiple| (multiple * every - before) as usize);
        let ends = ends.take_while(move |end| *end <= tokens);
        ends.map(|end| end - 1).zip(slots)
    }

    /// Checks that bounds start at 0, never decrease, stay within the tensors, and give no row more than T tokens.
    fn check_bounds(&self, bounds: &[i64]) -> Result<(), Error> {
        let mut last = 0;
        for (position, &bound) in bounds.iter().enumerate() {
            let most = match position {
                0 => 0,
                _ => (last + self.tokens as i64).min(self.total as i64),
            };
            if !(last..=most).contains(&bound) {
                return Err(Error::Index {
                    tensor: "cu_seqlens",
                    position,
                    wanted: match position {
                        0 => "0".to_owned(),
                        _ => format!(
                            "{last}..={most} (no less than the bound before, at most T = {} more, within total = {})",
                            self.tokens, self.total
                        ),
                    },
                    got: bound,
                });
            }
            last = bound;
        }
        Ok(())
    }

    /// Adds the accesses of row `b`, which has `tokens` tokens. Returns the number of its skipped stores, or the index that makes it
    /// inactive.
    fn row(&self, b: usize, tokens: usize, is_empty: bool, uses: &mut Uses) -> Result<usize, Dead> {
        let (mut skipped, accesses) = (0, &mut uses.states);
        let is_fresh = self
            .numbers(Argument::Fresh)
            .is_some_and(|fresh| fresh[b] != 0);
        if let Some(slots) = self.numbers(Argument::TokenSlots) {
            if is_empty {
                return Ok(0);
            }
            let slots = &slots[b * self.tokens..][..self.tokens];
            let start = if is_fresh {
                None
            } else {
                Some(self.token_start(b, slots)?)
            };
            // The window is in the slot of the first token, whichever slot the state starts from.
            let window = match self.windows {
                Some(of) => {
                    let [read, written] = of.map(|windows| self.slot(slots[0], windows));
                    Some((of, read.and(written).ok_or(("token_slots", slots[0]))?))
                }
                None => None,
            };
            if let Some(start) = start {
                accesses.read(slot_access(self.pool, start, b, None));
            }
            if let Some(([windows, written], slot)) = window {
                if start.is_some() {
                    uses.windows.read(window_access(windows, slot, b, None));
                }
                uses.windows.write(window_access(written, slot, b, None));
            }
            for (t, &slot) in slots[..tokens].iter().enumerate() {
                match self.slot(slot, self.write_pool) {
                    Some(slot) => accesses.write(slot_access(self.write_pool, slot, b, Some(t))),
                    None => skipped += 1,
                }
            }
        } else {
            let (read_name, read) = match self.numbers(Argument::ReadSlots) {
                Some(slots) => ("read_slots", slots[b]),
                None => ("row", b as i64),
            };
            let (write_name, write) = match self.numbers(Argument::WriteSlots) {
                Some(slots) => ("write_slots", slots[b]),
                None => (read_name, read),
            };
            let start = match self.slot(read, self.pool) {
                _ if is_fresh => None,
                None => return Err((read_name, read)),
                start => start,
            };
            if let Some(keep) = self.numbers(Argument::Keep)
                && !(0..=self.previous_tokens as i64).contains(&keep[b])
            {
                return Err(("keep", keep[b]));
            }
            self.check_pending(b, is_fresh)?;
            let end = self.slot(write, self.write_pool);
            // A fresh row ignores its read slot. Its write slot is therefore checked here.
            if is_fresh && end.is_none() {
                return Err((write_name, write));
            }
            if is_empty {
                if self.writes_final {
                    self.carry(b, (start, end.ok_or((write_name, write))?), uses);
                }
                return Ok(0);
            }
            if self.writes_final {
                let end = end.ok_or((write_name, write))?;
                let last = [(None, Some(end))].into_iter();
                let checkpoints = self.checkpoints(b, tokens);
                let checkpoints =
                    checkpoints.map(|(t, slot)| (Some(t), self.slot(slot, self.write_pool)));
                for (token, slot) in last.chain(checkpoints) {
                    let Some(slot) = slot else {
                        skipped += 1;
                        continue;
                    };
                    accesses.write(slot_access(self.write_pool, slot, b, token));
                    if let Some([_, written]) = self.windows {
                        (uses.windows).write(window_access(written, slot, b, token));
                    }
                }
            }
            if let Some(start) = start {
                accesses.read(slot_access(self.pool, start, b, None));
                if let Some([windows, _]) = self.windows {
                    uses.windows.read(window_access(windows, start, b, None));
                }
            }
        }
        if let Some(snapshots) = self.snapshots {
            (0..tokens).for_each(|t| accesses.write(snapshot_access(snapshots, b, t)));
        }
        if let Some(snapshots) = self.window_snapshots {
            (0..tokens).for_each(|t| uses.windows.write(window_snapshot_access(snapshots, b, t)));
        }
        Ok(skipped)
    }

    /// Adds the accesses of row `b` without tokens. Its state and window are copied from `start` to `end`; if the row is fresh,
    /// zeros are written. In place nothing is touched.
    fn carry(&self, b: usize, (start, end): (Option<usize>, usize), uses: &mut Uses) {
        let of = |accesses: &mut Accesses, pools: [Named<'_>; 2], access: AccessOf| {
            let write = access(pools[1], end, b, None);
            match start.map(|start| access(pools[0], start, b, None)) {
                Some(read) if read.is_of(&write) => {}
                read => {
                    read.into_iter().for_each(|read| accesses.read(read));
                    accesses.write(write);
                }
            }
        };
        of(&mut uses.states, [self.pool, self.write_pool], slot_access);
        if let Some(windows) = self.windows {
            of(&mut uses.windows, windows, window_access);
        }
    }

    /// The token slot that row `b` starts from.
    fn token_start(&self, b: usize, slots: &[i64]) -> Result<usize, Dead> {
        let accepted = self
            .numbers(Argument::Accepted)
            .map_or(1, |accepted| accepted[b]);
        let last = accepted.checked_sub(1).map(usize::try_from);
        let start = last.and_then(|last| slots.get(last.ok()?));
        let start = *start.ok_or(("accepted", accepted))?;
        self.slot(start, self.pool).ok_or(("token_slots", start))
    }

    /// The slot of `pool` for an index. `None` if it is out of range or the null slot.
    fn slot(&self, index: i64, pool: Named<'_>) -> Option<usize> {
        let slot = usize::try_from(index).ok()?;
        let is_null = self.null_slot.is_some_and(|null| i64::from(null) == index);
        (slot < pool.tensor.dims()[0] && !is_null).then_some(slot)
    }
}

/// Function from a tensor, a slot, a row and a token (`None`: the last one) to the access.
type AccessOf = fn(Named<'_>, usize, usize, Option<usize>) -> Access;

/// Access to the state in `slot`.
fn slot_access(pool: Named<'_>, slot: usize, row: usize, token: Option<usize>) -> Access {
    let state = pool.tensor.dims()[1..].iter().product();
    Access::new(
        pool.tensor,
        slot * pool.tensor.strides()[0],
        state,
        Place {
            tensor: pool.name,
            index: slot,
            row,
            token,
        },
    )
}

/// Access to the window in `slot`. The access covers all elements that the window spans. If windows of other slots lie between
/// them, it covers only the first element.
fn window_access(windows: Named<'_>, slot: usize, row: usize, token: Option<usize>) -> Access {
    let step = windows.tensor.strides()[0];
    let place = Place {
        tensor: windows.name,
        index: slot,
        row,
        token,
    };
    let len = window_len(windows, 1, step);
    Access::new(windows.tensor, slot * step, len, place)
}

/// Number of elements that a window spans, whose channels are dim `channels`. 1 if the span is larger than `step`, the distance
/// to the next window in elements.
fn window_len(windows: Named<'_>, channels: usize, step: usize) -> usize {
    let (dims, strides) = (windows.tensor.dims(), windows.tensor.strides());
    let last: usize = (channels..dims.len())
        .map(|dim| dims[dim].saturating_sub(1) * strides[dim])
        .sum();
    if step > last { last + 1 } else { 1 }
}

/// Access to the window after token `t` of row `b`, with the extent of [`window_access`].
fn window_snapshot_access(snapshots: Named<'_>, b: usize, t: usize) -> Access {
    let (dims, strides) = (snapshots.tensor.dims(), snapshots.tensor.strides());
    let apart = (0..2).filter(|&dim| dims[dim] > 1).map(|dim| strides[dim]);
    let len = window_len(snapshots, 2, apart.min().unwrap_or(usize::MAX));
    let place = Place {
        tensor: snapshots.name,
        index: b * dims[1] + t,
        row: b,
        token: Some(t),
    };
    let first = b * strides[0] + t * strides[1];
    Access::new(snapshots.tensor, first, len, place)
}

/// Access to the state after token `t` of row `b`.
fn snapshot_access(snapshots: Named<'_>, b: usize, t: usize) -> Access {
    let (dims, strides) = (snapshots.tensor.dims(), snapshots.tensor.strides());
    Access::new(
        snapshots.tensor,
        b * strides[0] + t * strides[1],
        dims[2..].iter().product(),
        Place {
            tensor: snapshots.name,
            index: b * dims[1] + t,
            row: b,
            token: Some(t),
        },
    )
}
