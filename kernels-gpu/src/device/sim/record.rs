//! Access records of a range of memory: granules that were always accessed together are kept as one.

use std::ops::Range;

use super::race::{Granule, Same};

/// Granules of a unit: an access of 8 bytes or more covers whole units.
pub const PARTS: usize = 4;

/// Neighbouring granules.
#[derive(Clone, Copy)]
pub struct Unit {
    /// State of each granule, unless they are split.
    whole: Granule,
    /// Index + 1 in the list of split units; 0: none yet.
    place: u32,
    is_split: bool,
}

impl Unit {
    pub const UNTOUCHED: Self = Self {
        whole: Granule::UNTOUCHED,
        place: 0,
        is_split: false,
    };

    /// Its granules, separately.
    #[inline]
    fn split<'a>(&mut self, split: &'a mut Vec<[Granule; PARTS]>) -> &'a mut [Granule; PARTS] {
        if self.place == 0 {
            split.push([self.whole; PARTS]);
            self.place = split.len() as u32;
        }
        let parts = &mut split[self.place as usize - 1];
        if !self.is_split {
            self.is_split = true;
            *parts = [self.whole; PARTS];
        }
        parts
    }
}

/// The granules of some memory.
pub struct Record<U> {
    units: U,
    /// The granules of units that have a place in this list.
    split: Vec<[Granule; PARTS]>,
}

impl<U: AsMut<[Unit]>> Record<U> {
    pub const fn new(units: U) -> Self {
        Self {
            units,
            split: Vec::new(),
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.units.as_mut().fill(Unit::UNTOUCHED);
        self.split.clear();
    }

    /// Lets `change` record an access in the granules of `range`. It also gets the index of each granule, or of the first of
    /// several equal ones.
    #[inline]
    pub fn change<E>(
        &mut self,
        range: Range<usize>,
        mut change: impl FnMut(&mut Granule, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut same = Same::default();
        let mut at = range.start;
        while at < range.end {
            let unit = &mut self.units.as_mut()[at / PARTS];
            let first = at % PARTS;
            let end = PARTS.min(first + range.end - at);
            let is_whole = end - first == PARTS;
            if is_whole && !unit.is_split {
                unit.whole = same.change(unit.whole, |granule| change(granule, at))?;
            } else {
                let parts = unit.split(&mut self.split);
                for (i, part) in parts[first..end].iter_mut().enumerate() {
                    *part = same.change(*part, |granule| change(granule, at + i))?;
                }
                if is_whole && parts[1..].iter().all(|part| part.is(&parts[0])) {
                    unit.whole = parts[0];
                    unit.is_split = false;
                }
            }
            at += end - first;
        }
        Ok(())
    }
}
