//! Access records of global memory.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::race::{GRANULE_BYTES, Granule};
use super::record::{PARTS, Record, Unit};

/// Bytes under one lock; no access crosses a line's bounds.
const LINE_BYTES: u64 = 256;
/// Bytes whose granules are allocated together.
const PAGE_BYTES: u64 = 4096;

/// Units of a line.
const UNITS: usize = (LINE_BYTES / GRANULE_BYTES) as usize / PARTS;

/// The record of a line, under a lock that is held for a few instructions: half the cost of a `Mutex`.
struct Line {
    is_taken: AtomicBool,
    record: UnsafeCell<Record<[Unit; UNITS]>>,
}

// SAFETY: a thread accesses the record only after it has changed `is_taken` from false to true.
unsafe impl Sync for Line {}

impl Line {
    fn untouched() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            record: UnsafeCell::new(Record::new([Unit::UNTOUCHED; UNITS])),
        }
    }

    /// Runs `change` with exclusive access to the record.
    #[inline]
    fn with<R>(&self, change: impl FnOnce(&mut Record<[Unit; UNITS]>) -> R) -> R {
        while self.is_taken.swap(true, Ordering::Acquire) {
            thread::yield_now();
        }
        let _taken = Taken(&self.is_taken);
        // SAFETY: `is_taken` was false, and is now true.
        change(unsafe { &mut *self.record.get() })
    }
}

/// Releases a line when dropped.
struct Taken<'a>(&'a AtomicBool);

impl Drop for Taken<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The granules of some pages of global memory, allocated when first touched.
///
/// An access is recorded under a lock before it happens, so that the second of two racing accesses is found before it happens:
/// the simulator itself never races.
pub struct Shadow {
    pages: Range<u64>,
    lines: Box<[OnceLock<Box<[Line]>>]>,
}

impl Shadow {
    /// Shadows of all `spans` of addresses, in order; the flag says whether a span may be written. Spans that share a page share
    /// a shadow. Spans that nobody may write cannot race, and have no records.
    pub fn of_spans(spans: impl Iterator<Item = (Range<u64>, bool)>) -> Vec<Self> {
        let pages_of = |(span, writable): (Range<u64>, bool)| {
            let pages = span.start / PAGE_BYTES..span.end.div_ceil(PAGE_BYTES);
            (pages, writable)
        };
        let mut spans: Vec<_> = spans.map(pages_of).collect();
        spans.sort_by_key(|(pages, _)| pages.start);
        let mut merged: Vec<(Range<u64>, bool)> = Vec::new();
        for (pages, writable) in spans {
            match merged.last_mut() {
                Some((last, any)) if pages.start < last.end => {
                    last.end = last.end.max(pages.end);
                    *any |= writable;
                }
                _ => merged.push((pages, writable)),
            }
        }
        let untouched = |(pages, writable): (Range<u64>, bool)| {
            let remembered = if writable { pages.clone() } else { 0..0 };
            let lines = remembered.map(|_| OnceLock::new()).collect();
            Self { pages, lines }
        };
        merged.into_iter().map(untouched).collect()
    }

    /// Whether accesses are recorded.
    #[inline]
    pub fn remembers(&self) -> bool {
        !self.lines.is_empty()
    }

    /// Whether all its addresses are below `address`.
    pub fn is_below(&self, address: u64) -> bool {
        self.pages.end <= address / PAGE_BYTES
    }

    /// Lets `change` record an aligned access to `size` bytes at `address`, within this shadow, in each granule. It also gets the
    /// address of each granule, or of the first of several equal ones.
    #[inline]
    pub fn change<E>(
        &self,
        address: u64,
        size: u64,
        mut change: impl FnMut(&mut Granule, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let page = (address / PAGE_BYTES - self.pages.start) as usize;
        let line = (address % PAGE_BYTES / LINE_BYTES) as usize;
        let first = (address % LINE_BYTES / GRANULE_BYTES) as usize;
        let lines = self.lines[page].get_or_init(untouched_page);
        let start = address - address % LINE_BYTES;
        let range = first..first + (size / GRANULE_BYTES) as usize;
        lines[line].with(|record| {
            record.change(range, |granule, at| {
                change(granule, start + at as u64 * GRANULE_BYTES)
            })
        })
    }
}

fn untouched_page() -> Box<[Line]> {
    let lines = 0..PAGE_BYTES / LINE_BYTES;
    lines.map(|_| Line::untouched()).collect()
}
