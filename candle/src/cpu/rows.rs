//! Decides which rows are active, and which slots they read and write.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::Result;
use gated_delta::States;

use super::view::View;
use super::{Waiting, Work};
use crate::error::bail;

/// An active row.
pub struct Row {
    pub b: usize,
    /// Range of its tokens. [`Row::token`] gives their indices in the tensors of tokens.
    pub tokens: Range<usize>,
    /// Whether the tokens of all rows are along one dim.
    pub packed: bool,
    /// Slot of the pool that is read, unless the row is fresh.
    pub start: Option<usize>,
    pub is_fresh: bool,
    /// Number of previous tokens to commit, and the slot of the state after them.
    pub commit: Option<(usize, usize)>,
    /// With token slots, the slot of its window, and the column of its oldest input.
    pub wide: Option<(usize, usize)>,
    /// Slot of the state after each token.
    pub stores: Vec<Option<usize>>,
    /// For a row without tokens: the slot to write the start state to.
    pub carried: Option<usize>,
    /// Checkpoints: tokens, counted from the row's first, and the slot of the state after each.
    pub checkpoints: Vec<(usize, usize)>,
    pub waiting: Option<Waiting>,
}

impl Row {
    /// Index of token t of the row in the first two dims of a tensor.
    pub fn token(&self, t: usize) -> [usize; 2] {
        match self.packed {
            true => [0, self.tokens.start + t],
            false => [self.b, t],
        }
    }

    /// Slot of the state, and of the window, after the last token.
    pub fn last(&self) -> Option<usize> {
        self.carried.or(self.stores.last().copied().flatten())
    }
}

impl<'a> Work<'a> {
    /// All rows, `None` for inactive rows. Sets the outputs of inactive rows, and of tokens of no row, to zero.
    pub(super) fn all_rows(&self) -> Vec<Option<Row>> {
        let total = self.o.map_or(0, |o| o.dim(1));
        let is_packed = self.cu_seqlens.is_some();
        if is_packed && self.batch > 0 {
            for token in self.tokens_of_no_row(total).into_iter().flatten() {
                self.set_zero([0, token]);
            }
        }
        let row = |b| {
            let tokens = self.tokens_of(b, total)?;
            let row = self.row(b, tokens.clone());
            if row.is_none() {
                for t in tokens {
                    self.set_zero(if is_packed { [0, t] } else { [b, t] });
                }
            }
            row
        };
        (0..self.batch).map(row).collect()
    }

    fn set_zero(&self, token: [usize; 2]) {
        if let Some(o) = &self.o {
            let zeros = vec![0.0; self.heads.v];
            for hv in 0..self.heads.hv {
                o.write(&[token[0], token[1], hv], 3, &zeros);
            }
        }
    }

    /// The tokens of row b. `None` if its bounds are invalid; the row then touches nothing.
    fn tokens_of(&self, b: usize, total: usize) -> Option<Range<usize>> {
        let Some(bounds) = self.cu_seqlens else {
            return Some(0..self.tokens);
        };
        let start = usize::try_from(bounds.index(&[b])).ok()?;
        let end = usize::try_from(bounds.index(&[b + 1])).ok()?;
        let count = end.checked_sub(start)?;
        (count <= self.tokens && end <= total).then_some(start..end)
    }

    /// Packed tokens before the first bound and after the last bound. A bound that is out of range is ignored.
    fn tokens_of_no_row(&self, total: usize) -> [Range<usize>; 2] {
        let bound = |index: usize| {
            let bound = usize::try_from(self.cu_seqlens?.index(&[index])).ok()?;
            (bound <= total).then_some(bound)
        };
        let (first, end) = (bound(0).unwrap_or(0), bound(self.batch).unwrap_or(total));
        match first <= end {
            true => [0..first, end..total],
            false => [0..0, total..total],
        }
    }

    fn live(&self, slot: i64, slots: usize) -> Option<usize> {
        if self.options.null_slot.map(i64::from) == Some(slot) {
            return None;
        }
        usize::try_from(slot).ok().filter(|&slot| slot < slots)
    }

    /// Checks that rows, which run concurrently, write no slot that another row uses.
    pub(super) fn check_distinct(&self, rows: &[Row]) -> Result<()> {
        let mut writers = HashMap::new();
        for row in rows {
            for slot in row.written() {
                if let Some(other) = writers.insert(slot, row.b).filter(|&other| other != row.b) {
                    return bail!("slots: rows {other} and {} write slot {slot}", row.b);
                }
            }
        }
        let windows = self.conv.as_ref();
        let is_in_place = self.pools[0].is(&self.pools[1])
            || windows.is_some_and(|conv| conv.windows.is(&conv.write_windows));
        for row in rows.iter().filter(|_| is_in_place) {
            for slot in row.start.into_iter().chain(row.wide.map(|(slot, _)| slot)) {
                if let Some(other) = writers.get(&slot).filter(|&&other| other != row.b) {
                    return bail!(
                        "slots: row {} reads slot {slot}, which row {other} writes",
                        row.b
                    );
                }
            }
        }
        if self.cu_seqlens.is_some() {
            let mut bounds: Vec<&Row> = rows.iter().filter(|row| !row.tokens.is_empty()).collect();
            bounds.sort_by_key(|row| row.tokens.start);
            for pair in bounds.windows(2) {
                if pair[0].tokens.end > pair[1].tokens.start {
                    return bail!(
                        "cu_seqlens: rows {} and {} have tokens {:?} and {:?}",
                        pair[0].b,
                        pair[1].b,
                        pair[0].tokens,
                        pair[1].tokens
                    );
                }
            }
        }
        Ok(())
    }

    fn row(&self, b: usize, tokens: Range<usize>) -> Option<Row> {
        let [read, written] = self.pools.map(|pool| pool.dim(0));
        let is_fresh = self.fresh.is_some_and(|fresh| fresh.index(&[b]) != 0);
        let mut row = Row {
            b,
            stores: vec![None; tokens.len()],
            tokens,
            packed: self.cu_seqlens.is_some(),
            start: None,
            is_fresh,
            commit: None,
            wide: None,
            carried: None,
            checkpoints: Vec::new(),
            waiting: None,
        };
        let (slots, write_slots, update) = match &self.states {
            States::PerToken(of) => {
                let slots = View::of(&of.token_slots);
                for (t, store) in row.stores.iter_mut().enumerate() {
                    *store = self.live(slots.index(&[b, t]), written);
                }
                let mut column = 0;
                if !is_fresh {
                    let accepted = of.accepted.as_ref();
                    let accepted = accepted.map_or(1, |of| View::of(of).index(&[b]));
                    column = usize::try_from(accepted).ok()?.checked_sub(1)?;
                    if column >= slots.dim(1) {
                        return None;
                    }
                    row.start = Some(self.live(slots.index(&[b, column]), read)?);
                }
                if self.conv.is_some() {
                    let slot = self.live(slots.index(&[b, 0]), read.min(written))?;
                    row.wide = Some((slot, column));
                }
                return Some(row);
            }
            States::ReadOnly(of) => (of.read_slots, None, false),
            States::Update(of) => (of.read_slots, of.write_slots, true),
            _ => return None,
        };
        let read_slot = slots.map_or(b as i64, |slots| View::of(&slots).index(&[b]));
        let write_slot = write_slots.map_or(read_slot, |slots| View::of(&slots).index(&[b]));
        if !is_fresh {
            row.start = Some(self.live(read_slot, read)?);
        }
        let end = self.live(write_slot, written)?;
        if let (Some(previous), Some(keep)) = (&self.previous, &self.keep) {
            let keep = usize::try_from(keep.index(&[b])).ok()?;
            if keep > previous.beta.dim(1) {
                return None;
            }
            row.commit = Some((keep, end));
        }
        if let Some(ring) = &self.ring {
            row.waiting = Some(ring.of_row(b, is_fresh, row.tokens.len())?);
            // Only a flush writes the state.
            return Some(row.with_start(end));
        }
        if let Some((every, slots)) = &self.checkpoints {
            let before = self
                .positions
                .map_or(0, |of| of.index(&[b]).max(0) as usize);
            let ends = (1..=row.tokens.len()).filter(|end| (before + end).is_multiple_of(*every));
            for (end, entry) in ends.zip(0..slots.dim(1)) {
                if let Some(slot) = self.live(slots.index(&[b, entry]), written) {
                    row.checkpoints.push((end - 1, slot));
                }
            }
        }
        if update && row.commit.is_none() {
            match row.stores.last_mut() {
                Some(last) => *last = Some(end),
                None => row.carried = Some(end),
            }
        }
        Some(row)
    }
}

impl Row {
    /// Slots that the row writes, or may write.
    fn written(&self) -> impl Iterator<Item = usize> {
        let of_tokens = self.stores.iter().copied().flatten();
        let checkpoints = self.checkpoints.iter().map(|&(_, slot)| slot);
        let waits = self.waiting.and(self.start);
        let ends = [self.carried, self.commit.map(|(_, end)| end), waits];
        let ends = ends.into_iter().chain([self.wide.map(|(slot, _)| slot)]);
        of_tokens.chain(checkpoints).chain(ends.flatten())
    }

    /// Sets the start slot. With deferred write-back this is the row's own slot, fresh or not.
    fn with_start(mut self, slot: usize) -> Self {
        self.start = Some(slot);
        self
    }
}
