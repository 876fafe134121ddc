//! Random slots and lengths for the rows of a problem.

use std::ops::RangeInclusive;

use gated_delta::{DType, Formulation};
use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::spec::Spec;

/// Kinds of slot indices that a problem has.
#[derive(Clone, Copy, Debug)]
pub struct SlotChoice {
    /// Whether there are read slots.
    pub read: bool,
    /// Whether there are write slots.
    pub write: bool,
    /// Number of slots that a separate write pool has more than the read pool. `None` without a write pool.
    pub write_pool: Option<isize>,
    /// Token slots in place of read and write slots, with accepted tokens (`true`) or without. `None` without token slots.
    pub of_tokens: Option<bool>,
    /// Number of slots beyond one for each row.
    pub spare: usize,
    /// Whether some rows have an invalid slot, number of tokens or length.
    pub inactive: bool,
}

impl SlotChoice {
    /// No indices: row b uses slot b in place.
    pub const NONE: Self = Self {
        read: false,
        write: false,
        write_pool: None,
        of_tokens: None,
        spare: 0,
        inactive: false,
    };
    /// Read and write slots in one pool.
    pub const LIVE: Self = Self {
        inactive: false,
        ..Self::BOTH
    };
    /// Read and write slots in one pool, some rows inactive.
    pub const BOTH: Self = Self {
        read: true,
        write: true,
        write_pool: None,
        of_tokens: None,
        spare: 3,
        inactive: true,
    };
    /// Token slots with accepted tokens, some rows inactive.
    pub const OF_TOKENS: Self = Self {
        of_tokens: Some(true),
        spare: 6,
        inactive: true,
        ..Self::NONE
    };
}

/// The drawn indices.
#[derive(Default)]
pub(crate) struct Slots {
    /// Read slots, `[B]`.
    pub read: Option<Vec<i64>>,
    /// Write slots, `[B]`.
    pub write: Option<Vec<i64>>,
    /// Token slots, `[B, T]`.
    pub of_tokens: Option<Vec<i64>>,
    /// Numbers of accepted tokens, `[B]`.
    pub accepted: Option<Vec<i64>>,
}

impl Spec {
    /// Draws slots that keep the caller's contract: no two active rows write one slot, and no active row reads a slot that another
    /// one writes. An inactive row may name an active row's slot. A fresh row may name any read slot.
    pub(crate) fn draw_slots(&self, fresh: Option<&[i64]>, rng: &mut SmallRng) -> Slots {
        let choice = self.slots;
        if let Some(accepted) = choice.of_tokens {
            return self.draw_token_slots(accepted, fresh, rng);
        }
        let (mut reads, mut writes, mut live) = (Vec::new(), Vec::new(), Vec::new());
        for b in 0..self.batch {
            let mut tries = 0;
            let (read, write, row) = loop {
                tries += 1;
                let inactive = choice.inactive && rng.random_ratio(1, 4) || tries > 100;
                let is_fresh = fresh.is_some_and(|fresh| fresh[b] != 0);
                let (mut read, write) = self.candidate(b, inactive, rng);
                if is_fresh && choice.read && choice.write && rng.random_ratio(1, 3) {
                    read = self.bad_slot(self.form.indices[0], self.pool_slots().0, rng);
                }
                let row = self.live(read, write, is_fresh);
                if row.is_none_or(|row| !self.conflicts(b, row, &live)) {
                    break (read, write, row);
                }
            };
            reads.push(read);
            writes.push(write);
            live.push(row);
        }
        Slots {
            read: choice.read.then_some(reads),
            write: choice.write.then_some(writes),
            ..Slots::default()
        }
    }

    /// Draws token slots. Each slot belongs to at most one token. Other tokens get an index that skips the store. If such a token
    /// is the one whose slot has the row's window, the row is inactive.
    fn draw_token_slots(&self, accepted: bool, fresh: Option<&[i64]>, rng: &mut SmallRng) -> Slots {
        let (pool, write_pool) = self.pool_slots();
        let most = pool.max(write_pool.unwrap_or(pool));
        let mut free: Vec<i64> = (0..most as i64).collect();
        free.shuffle(rng);
        let is_fresh = |b: usize| fresh.is_some_and(|fresh| fresh[b] != 0);
        let mut accepted: Vec<i64> = (0..self.batch)
            .map(|b| {
                let bad = if is_fresh(b) { 3 } else { 6 };
                match self.slots.inactive && rng.random_ratio(1, bad) {
                    _ if !accepted => 1,
                    true => self.bad_count(self.form.indices[3], 1..=self.tokens, rng),
                    false => rng.random_range(1..=self.tokens) as i64,
                }
            })
            .collect();
        let mut slots = vec![None; self.batch * self.tokens];
        let mut skips = || self.slots.inactive && rng.random_ratio(1, 6);
        if self.conv.is_some() {
            for b in (0..self.batch).filter(|_| !skips()) {
                slots[b * self.tokens] = free.pop();
            }
        }
        for b in (0..self.batch).filter(|&b| !is_fresh(b)) {
            let last = usize::try_from(accepted[b] - 1).ok();
            let Some(last) = last.filter(|&last| last < self.tokens) else {
                continue;
            };
            let start = &mut slots[b * self.tokens + last];
            if start.is_none() && !skips() {
                *start = free.pop();
                if start.is_none() && self.slots.of_tokens == Some(true) {
                    // Token slot 0, which has the window, belongs to the row.
                    accepted[b] = 1;
                }
            }
        }
        for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
            if rng.random_ratio(3, 4) {
                *slot = free.pop();
            }
        }
        let of_tokens = slots
            .into_iter()
            .map(|slot| slot.unwrap_or_else(|| self.bad_slot(self.form.indices[2], most, rng)))
            .collect();
        Slots {
            of_tokens: Some(of_tokens),
            accepted: (self.slots.of_tokens == Some(true)).then_some(accepted),
            ..Slots::default()
        }
    }

    /// Draws slots of checkpoints, `[B, C]`: the last slots of the written pool, each at most once, or an index that skips the
    /// store.
    pub(crate) fn draw_checkpoint_slots(&self, count: usize, rng: &mut SmallRng) -> Vec<i64> {
        let (pool, write_pool) = self.pool_slots();
        let written = write_pool.unwrap_or(pool);
        let mut slots: Vec<i64> = (written - count..written).map(|slot| slot as i64).collect();
        slots.shuffle(rng);
        let null = self.options.null_slot.map(i64::from);
        let mut skips = || self.slots.inactive && rng.random_ratio(1, 5);
        let dead: Vec<bool> = slots
            .iter()
            .map(|slot| skips() || Some(*slot) == null)
            .collect();
        for (slot, _) in slots.iter_mut().zip(dead).filter(|(_, dead)| *dead) {
            *slot = self.bad_slot(self.form.indices[1], written, rng);
        }
        slots
    }

    /// Draws `[B]` flags: some rows are fresh.
    pub(crate) fn draw_fresh(&self, rng: &mut SmallRng) -> Vec<i64> {
        let yes = match self.form.fresh {
            DType::U32 => vec![1, 1, 1 << 31, u32::MAX.into()],
            DType::I32 => vec![1, 1, -1, i32::MIN.into()],
            _ => vec![1, 1, -1, i64::MIN, 1 << 32],
        };
        let mut draw = || match rng.random_ratio(2, 5) {
            true => yes[rng.random_range(0..yes.len())],
            false => 0,
        };
        (0..self.batch).map(|_| draw()).collect()
    }

    /// Draws `cu_seqlens` of rows of 0 to T tokens, and the number of packed tokens. There may be tokens of no row around the rows,
    /// lengths beyond T, and bounds beyond the tokens.
    pub(crate) fn draw_lengths(&self, rng: &mut SmallRng) -> (Vec<i64>, usize) {
        let mut bounds = vec![rng.random_range(0..=1)];
        for b in 0..self.batch {
            let too_long = self.slots.inactive && rng.random_ratio(1, 8);
            // In a prefill a row can be too long only if the caller promises short rows.
            let chunked = self.options.formulation == Formulation::Chunked;
            let short = chunked && self.tokens <= 64 && !self.prefill.unpromised;
            let most = if short { 64 } else { self.tokens };
            let length = match rng.random_range(0..4) {
                _ if too_long && (short || !chunked) => most + rng.random_range(1..=2),
                _ if chunked && self.prefill.singles && rng.random_ratio(2, 3) => 1,
                0 => 0,
                1 => self.tokens,
                2 if chunked => 1,
                _ => rng.random_range(1..=self.tokens),
            };
            bounds.push(bounds[b] + length as i64);
        }
        // More tokens after the last bound than a block clears in one turn.
        let behind = match rng.random_ratio(1, 4) {
            true => rng.random_range(2..=9),
            false => rng.random_range(0..=1),
        };
        let total = bounds[self.batch] as usize + behind;
        if self.slots.inactive && rng.random_ratio(1, 4) {
            let b = rng.random_range(0..=self.batch);
            bounds[b] = self.bad_count(self.form.indices[4], 0..=total, rng);
        }
        (bounds, total)
    }

    /// Draws the number of kept previous tokens of each row, `[B]`: 0 to T'.
    pub(crate) fn draw_keep(&self, most: usize, rng: &mut SmallRng) -> Vec<i64> {
        let keep = |_| match self.slots.inactive && rng.random_ratio(1, 8) {
            true => self.bad_count(self.form.indices[5], 0..=most, rng),
            false => rng.random_range(0..=most) as i64,
        };
        (0..self.batch).map(keep).collect()
    }

    /// A number outside of `good`.
    fn bad_count(&self, dtype: DType, good: RangeInclusive<usize>, rng: &mut SmallRng) -> i64 {
        let (least, most) = (*good.start() as i64, *good.end() as i64);
        let mut bad = match dtype {
            DType::U32 => vec![most + 1, 1 << 31, u32::MAX.into()],
            DType::I32 => vec![least - 1, -1, i32::MIN.into(), most + 1, i32::MAX.into()],
            _ => vec![
                least - 1,
                -1,
                i64::MIN,
                most + 1,
                i64::MAX,
                1 << 32,
                (1 << 32) + most,
            ],
        };
        bad.extend((least > 0).then_some(0));
        bad[rng.random_range(0..bad.len())]
    }

    /// Random read and write slots for row `b`.
    fn candidate(&self, b: usize, inactive: bool, rng: &mut SmallRng) -> (i64, i64) {
        let choice = self.slots;
        let (pool, write_pool) = self.own_slots();
        let write_pool = write_pool.unwrap_or(pool);
        let read_too = rng.random();
        let bad_read = inactive && choice.read && (read_too || !choice.write);
        let bad_write = inactive && choice.write && (!bad_read || rng.random());
        let read = match (choice.read, bad_read) {
            (false, _) => b as i64,
            (true, true) => self.bad_slot(self.form.indices[0], self.pool_slots().0, rng),
            (true, false) => rng.random_range(0..pool) as i64,
        };
        let write = match (choice.write, bad_write) {
            (false, _) => read,
            (true, true) => {
                let (pool, write_pool) = self.pool_slots();
                self.bad_slot(self.form.indices[1], write_pool.unwrap_or(pool), rng)
            }
            // An index that is invalid in one dtype might be valid in another.
            (true, false) if !bad_read && rng.random() => read,
            (true, false) => rng.random_range(0..write_pool) as i64,
        };
        (read, write)
    }

    /// An index that makes its row inactive in a pool of `slots` slots.
    fn bad_slot(&self, dtype: DType, slots: usize, rng: &mut SmallRng) -> i64 {
        let slots = slots as i64;
        let mut bad = match dtype {
            DType::U32 => vec![slots, slots + 7, 1 << 31, u32::MAX.into()],
            DType::I32 => vec![-1, i32::MIN.into(), slots, slots + 7, i32::MAX.into()],
            _ => vec![
                -1,
                i64::MIN,
                slots,
                i64::MAX,
                1 << 32,
                (1 << 32) + rng.random_range(0..slots),
            ],
        };
        bad.extend(self.options.null_slot.map(i64::from));
        bad[rng.random_range(0..bad.len())]
    }

    fn live(&self, read: i64, write: i64, is_fresh: bool) -> Option<(Option<usize>, usize)> {
        let (pool, write_pool) = self.pool_slots();
        let live = |slot: i64, slots: usize| {
            let inside = (0..slots as i64).contains(&slot)
                && self.options.null_slot.map(i64::from) != Some(slot);
            inside.then_some(slot as usize)
        };
        let start = match is_fresh {
            true => None,
            false => Some(live(read, pool)?),
        };
        Some((start, live(write, write_pool.unwrap_or(pool))?))
    }

    /// Whether row `b` with these slots conflicts with `others`, a later row or a checkpoint.
    fn conflicts(
        &self,
        b: usize,
        (read, write): (Option<usize>, usize),
        others: &[Option<(Option<usize>, usize)>],
    ) -> bool {
        let in_place = self.slots.write_pool.is_none() || (self.conv.is_some() && !self.apart());
        let of_another = |&(read2, write2): &(Option<usize>, usize)| {
            write == write2 || (in_place && (read == Some(write2) || read2 == Some(write)))
        };
        let start_of_another = in_place && !self.slots.read && write != b && write < self.batch;
        let (pool, write_pool) = self.pool_slots();
        // A fresh row may write to a slot beyond the end of the pool that it does not read.
        let of_checkpoint = write >= write_pool.unwrap_or(pool) - self.checkpoint_slots();
        self.update_state
            && (start_of_another || of_checkpoint || others.iter().flatten().any(of_another))
    }
}
