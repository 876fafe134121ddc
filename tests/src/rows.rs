//! What the rows of a launch do, by the rules of slots and lengths.

use std::ops::Range;

use crate::problem::Problem;

/// What a row of a launch does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its tokens among those of all rows; `None` where it touches nothing, not even its part of o.
    pub tokens: Option<Range<usize>>,
    /// Its states, unless it is inactive.
    pub live: Option<Live>,
}

/// Where the states of a row come from and go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    /// Slot of the pool that it starts from.
    pub start: usize,
    /// How many previous tokens are kept, and the slot of the written pool for the state after them.
    pub commit: Option<(usize, usize)>,
    /// Tokens, counted from the row's first, and the slot of the written pool for the state after each.
    pub stores: Vec<(usize, usize)>,
}

impl Live {
    /// Slots of the written pool that are written.
    pub fn writes(&self) -> impl Iterator<Item = usize> {
        let commit = self.commit.iter().map(|(_, slot)| *slot);
        commit.chain(self.stores.iter().map(|(_, slot)| *slot))
    }
}

/// All that the rules depend on.
pub(crate) struct Switches {
    pub batch: usize,
    /// T
    pub max_tokens: usize,
    /// Tokens of `[1, total, …]`.
    pub total: usize,
    /// P
    pub pool: usize,
    /// P of the written pool.
    pub write_pool: usize,
    pub read_slots: Option<Vec<i64>>,
    pub write_slots: Option<Vec<i64>>,
    pub token_slots: Option<Vec<i64>>,
    pub accepted: Option<Vec<i64>>,
    pub cu_seqlens: Option<Vec<i64>>,
    /// T' and how many of them are kept.
    pub previous: Option<(usize, Vec<i64>)>,
    pub null_slot: Option<u32>,
    pub update_state: bool,
}

impl Switches {
    pub fn rows(&self) -> Vec<Row> {
        let row = |b| {
            let tokens = self.tokens(b);
            let live = tokens
                .as_ref()
                .and_then(|tokens| self.live(b, tokens.len()));
            Row { tokens, live }
        };
        (0..self.batch).map(row).collect()
    }

    fn tokens(&self, b: usize) -> Option<Range<usize>> {
        let Some(bounds) = &self.cu_seqlens else {
            return Some(b * self.max_tokens..(b + 1) * self.max_tokens);
        };
        let [start, end] = [bounds[b], bounds[b + 1]].map(|bound| usize::try_from(bound).ok());
        let (start, end) = (start?, end?);
        let fits = start < end && end <= self.total && end - start <= self.max_tokens;
        fits.then_some(start..end)
    }

    fn live(&self, b: usize, length: usize) -> Option<Live> {
        if let Some(slots) = &self.token_slots {
            let slots = &slots[b * self.max_tokens..][..self.max_tokens];
            let accepted = self.accepted.as_ref().map_or(1, |accepted| accepted[b]);
            let last = usize::try_from(accepted).ok()?.checked_sub(1)?;
            let store = |(t, slot): (usize, &i64)| Some((t, self.slot(*slot, self.write_pool)?));
            return Some(Live {
                start: self.slot(*slots.get(last)?, self.pool)?,
                commit: None,
                stores: slots[..length]
                    .iter()
                    .enumerate()
                    .filter_map(store)
                    .collect(),
            });
        }
        let read = self.read_slots.as_ref().map_or(b as i64, |slots| slots[b]);
        let write = self.write_slots.as_ref().map_or(read, |slots| slots[b]);
        let mut live = Live {
            start: self.slot(read, self.pool)?,
            commit: None,
            stores: Vec::new(),
        };
        if let Some((most, keep)) = &self.previous {
            let keep = usize::try_from(keep[b]).ok().filter(|keep| keep <= most)?;
            live.commit = Some((keep, self.slot(write, self.write_pool)?));
        } else if self.update_state {
            live.stores = vec![(length - 1, self.slot(write, self.write_pool)?)];
        }
        Some(live)
    }

    fn slot(&self, slot: i64, slots: usize) -> Option<usize> {
        let null = self.null_slot.map(i64::from) == Some(slot);
        usize::try_from(slot)
            .ok()
            .filter(|&slot| slot < slots && !null)
    }
}

impl Problem {
    /// What each row does.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let previous = self.previous.as_ref();
        let switches = Switches {
            batch: self.batch,
            max_tokens: self.max_tokens(),
            total: self.q.dims[1],
            pool: self.pool.dims[0],
            write_pool: self.write_pool.as_ref().unwrap_or(&self.pool).dims[0],
            read_slots: self.read_slots.clone(),
            write_slots: self.write_slots.clone(),
            token_slots: self.token_slots.clone(),
            accepted: self.accepted.clone(),
            cu_seqlens: self.packed.as_ref().map(|packed| packed.cu_seqlens.clone()),
            previous: previous.map(|previous| (previous.tokens.k.dims[1], previous.keep.clone())),
            null_slot: self.options.null_slot,
            update_state: self.options.update_state,
        };
        switches.rows()
    }
}
