//! Slots for the rows of a problem.

use gated_delta::DType;
use rand::Rng;
use rand::rngs::StdRng;

use crate::spec::Spec;

/// Where slots come from.
#[derive(Clone, Copy, Debug)]
pub struct SlotChoice {
    /// There are read slots.
    pub read: bool,
    /// There are write slots.
    pub write: bool,
    /// There is a write pool, of so many slots more or fewer than the read pool.
    pub write_pool: Option<isize>,
    /// Slots that there are besides one for each row.
    pub spare: usize,
    /// Some rows name no valid slot.
    pub inactive: bool,
}

impl SlotChoice {
    /// Slots b in place for rows b.
    pub const NONE: Self = Self {
        read: false,
        write: false,
        write_pool: None,
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
        spare: 3,
        inactive: true,
    };
}

/// Slots as drawn.
pub struct Slots {
    /// `[B]`
    pub read: Option<Vec<i64>>,
    /// `[B]`
    pub write: Option<Vec<i64>>,
    /// Read and write slot of every live row.
    pub live: Vec<Option<(usize, usize)>>,
}

impl Spec {
    /// Draws slots that are the caller's right: no two live rows write one slot, and none reads what another
    /// one writes. An inactive row may name a live row's slot.
    pub(crate) fn draw_slots(&self, rng: &mut StdRng) -> Slots {
        let choice = self.slots;
        let (mut reads, mut writes, mut live) = (Vec::new(), Vec::new(), Vec::new());
        for b in 0..self.batch {
            let mut tries = 0;
            let (read, write, row) = loop {
                tries += 1;
                let inactive = choice.inactive && rng.random_ratio(1, 4) || tries > 100;
                let (read, write) = self.candidate(b, inactive, rng);
                let row = self.live(read, write);
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
            live,
        }
    }

    /// Slots for row `b`.
    fn candidate(&self, b: usize, inactive: bool, rng: &mut StdRng) -> (i64, i64) {
        let choice = self.slots;
        let (pool, write_pool) = self.pool_slots();
        let write_pool = write_pool.unwrap_or(pool);
        let read_too = rng.random();
        let bad_read = inactive && choice.read && (read_too || !choice.write);
        let bad_write = inactive && choice.write && (!bad_read || rng.random());
        let read = match (choice.read, bad_read) {
            (false, _) => b as i64,
            (true, true) => self.bad_slot(self.form.slots[0], pool, rng),
            (true, false) => rng.random_range(0..pool) as i64,
        };
        let write = match (choice.write, bad_write) {
            (false, _) => read,
            (true, true) => self.bad_slot(self.form.slots[1], write_pool, rng),
            (true, false) if rng.random() => read,
            (true, false) => rng.random_range(0..write_pool) as i64,
        };
        (read, write)
    }

    /// An index that makes its row inactive in a pool of `slots`.
    fn bad_slot(&self, dtype: DType, slots: usize, rng: &mut StdRng) -> i64 {
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

    fn live(&self, read: i64, write: i64) -> Option<(usize, usize)> {
        let (pool, write_pool) = self.pool_slots();
        let live = |slot: i64, slots: usize| {
            let inside = (0..slots as i64).contains(&slot)
                && self.options.null_slot.map(i64::from) != Some(slot);
            inside.then_some(slot as usize)
        };
        Some((live(read, pool)?, live(write, write_pool.unwrap_or(pool))?))
    }

    /// Whether row `b` with these slots gets in the way of `others`, or of a later row.
    fn conflicts(
        &self,
        b: usize,
        (read, write): (usize, usize),
        others: &[Option<(usize, usize)>],
    ) -> bool {
        let in_place = self.slots.write_pool.is_none();
        let of_another = |&(read2, write2): &(usize, usize)| {
            write == write2 || (in_place && (read == write2 || read2 == write))
        };
        let start_of_another = in_place && !self.slots.read && write != b && write < self.batch;
        self.options.update_state && (start_of_another || others.iter().flatten().any(of_another))
    }
}
