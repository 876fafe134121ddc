//! Shared memory of one block, and its access records.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::ops::Range;

use bytemuck::Pod;

use super::fault::Problem;
use super::race::{GRANULE_BYTES, Granule, Observer};
use super::record::{PARTS, Record, Unit};

/// Address of the first byte: not 0, so that an address without the base is out of bounds.
pub const BASE: u32 = 1024;

/// The bytes, in granules, and their access records.
pub struct SharedMemory {
    values: Box<[Cell<u16>]>,
    record: RefCell<Record<Box<[Unit]>>>,
}

impl SharedMemory {
    pub fn new(bytes: u32) -> Self {
        let count = bytes.div_ceil(GRANULE_BYTES as u32) as usize;
        let units = vec![Unit::UNTOUCHED; count.div_ceil(PARTS)];
        Self {
            values: vec![Cell::new(0); count].into(),
            record: RefCell::new(Record::new(units.into())),
        }
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.record.borrow_mut().clear();
    }

    #[inline]
    pub fn load<T: Pod>(&self, address: u32, by: &Observer<'_>) -> Result<T, Box<Problem>> {
        let range = self.range::<T>("load", address)?;
        self.change(range.clone(), |granule, at| {
            if granule.writer().is_none() {
                let what = describe::<T>("load", at);
                return Err(Problem::memory(format!(
                    "{what}: the block has not written it"
                )));
            }
            let recorded = granule.load(by);
            recorded.map_err(|conflict| by.race(conflict, &describe::<T>("load", at)))
        })?;
        Ok(self.value_in(range))
    }

    #[inline]
    fn value_in<T: Pod>(&self, range: Range<usize>) -> T {
        let halves = &self.values[range];
        assert_eq!(size_of_val(halves), size_of::<T>());
        // SAFETY: the range has as many bytes as the value; any bytes are valid; a cell is laid out as its content, and only this
        // thread accesses it.
        unsafe { halves.as_ptr().cast::<T>().read_unaligned() }
    }

    #[inline]
    pub fn store<T: Pod>(
        &self,
        address: u32,
        value: T,
        by: &Observer<'_>,
    ) -> Result<(), Box<Problem>> {
        let range = self.range::<T>("store", address)?;
        self.record_store::<T>("store", range.clone(), by)?;
        self.set_value(range, value);
        Ok(())
    }

    /// Records the start of an asynchronous copy to `address`; returns the granules that it will fill.
    #[inline]
    pub fn start_copy<T: Pod>(
        &self,
        address: u32,
        by: &Observer<'_>,
    ) -> Result<Range<usize>, Box<Problem>> {
        let range = self.range::<T>("asynchronous copy", address)?;
        self.record_store::<T>("asynchronous copy", range.clone(), by)?;
        self.set(range.clone(), Granule::written(by.in_flight()));
        Ok(range)
    }

    /// Completes a copy to the granules that [`Self::start_copy`] returned; it is a store from now on.
    #[inline]
    pub fn finish_copy<T: Pod>(&self, range: Range<usize>, value: T, by: &Observer<'_>) {
        self.set(range.clone(), Granule::written(by.access));
        self.set_value(range, value);
    }

    #[inline]
    fn set_value<T: Pod>(&self, range: Range<usize>, value: T) {
        let halves = &self.values[range];
        assert_eq!(size_of_val(halves), size_of::<T>());
        // SAFETY: the range has as many bytes as the value, in cells that only this thread accesses.
        unsafe {
            halves
                .as_ptr()
                .cast::<T>()
                .cast_mut()
                .write_unaligned(value)
        }
    }

    /// Records a mailbox; returns its byte offset.
    pub fn open_mailbox(&self, address: u32, by: &Observer<'_>) -> Result<u32, Box<Problem>> {
        let range = self.range::<[u32; 2]>("mailbox", address)?;
        self.record_store::<[u32; 2]>("mailbox", range.clone(), by)?;
        self.set(range, Granule::written(by.mailbox()));
        Ok(address - BASE)
    }

    /// Stores data sent with `mailbox`.
    pub fn send(
        &self,
        address: u32,
        value: u32,
        mailbox: u32,
        by: &Observer<'_>,
    ) -> Result<(), Box<Problem>> {
        let range = self.range::<u32>("send", address)?;
        self.record_store::<u32>("send", range.clone(), by)?;
        let sent = Observer {
            access: by.sent(mailbox),
            ..*by
        };
        self.finish_copy(range, value, &sent);
        Ok(())
    }

    #[inline]
    fn record_store<T>(
        &self,
        op: &str,
        range: Range<usize>,
        by: &Observer<'_>,
    ) -> Result<(), Box<Problem>> {
        self.change(range, |granule, at| {
            let recorded = granule.store(by);
            recorded.map_err(|conflict| by.race(conflict, &describe::<T>(op, at)))
        })
    }

    /// Lets `change` record an access in the granules of `range`; it also gets the index of each.
    #[inline]
    fn change(
        &self,
        range: Range<usize>,
        change: impl FnMut(&mut Granule, usize) -> Result<(), Box<Problem>>,
    ) -> Result<(), Box<Problem>> {
        self.record.borrow_mut().change(range, change)
    }

    #[inline]
    fn set(&self, range: Range<usize>, to: Granule) {
        let set = |granule: &mut Granule, _| {
            *granule = to;
            Ok::<_, Infallible>(())
        };
        let Ok(()) = self.record.borrow_mut().change(range, set);
    }

    /// The granules of a `T` at `address`.
    #[inline]
    fn range<T>(&self, op: &str, address: u32) -> Result<Range<usize>, Box<Problem>> {
        let (size, granule) = (size_of::<T>(), GRANULE_BYTES as usize);
        let (base, end) = (BASE as usize, BASE as usize + self.values.len() * granule);
        let (first, last) = (address as usize, address as usize + size);
        let problem = if first < base {
            format!(
                "out-of-bounds {size}-byte shared {op}: {} bytes before the start",
                base - first
            )
        } else if last > end {
            format!(
                "out-of-bounds {size}-byte shared {op}: ends {} bytes past the end",
                last - end
            )
        } else if !first.is_multiple_of(size) {
            format!(
                "misaligned {size}-byte shared {op}: at byte {}",
                first - base
            )
        } else {
            return Ok((first - base) / granule..(last - base) / granule);
        };
        let bytes = end - base;
        Err(Problem::memory(format!(
            "{problem} of the {bytes} bytes of shared memory"
        )))
    }
}

/// Describes the operation on a `T` that touches granule `at`.
#[cold]
fn describe<T>(op: &str, at: usize) -> String {
    format!(
        "{}-byte shared {op} at byte {}",
        size_of::<T>(),
        at * GRANULE_BYTES as usize
    )
}
