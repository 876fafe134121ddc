//! What global memory remembers of its accesses.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::race::{GRANULE_BYTES, Granule};

/// Bytes that are recorded under one lock; no access crosses their bounds.
const LINE_BYTES: u64 = 256;
/// Bytes whose granules are made together.
const PAGE_BYTES: u64 = 4096;

type Line = Mutex<[Granule; (LINE_BYTES / GRANULE_BYTES) as usize]>;

/// The granules of some pages of global memory, made when first touched.
///
/// An access is recorded under a lock before it happens, so that of two that race the second is found
/// before it happens: the simulator itself never races.
pub struct Shadow {
    pages: Range<u64>,
    lines: Box<[OnceLock<Box<[Line]>>]>,
}

impl Shadow {
    /// Shadows of all `spans` of addresses, in order; spans that share a page share a shadow.
    pub fn of_spans(spans: impl Iterator<Item = Range<u64>>) -> Vec<Self> {
        let pages_of = |span: Range<u64>| span.start / PAGE_BYTES..span.end.div_ceil(PAGE_BYTES);
        let mut spans: Vec<_> = spans.map(pages_of).collect();
        spans.sort_by_key(|pages| pages.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for pages in spans {
            match merged.last_mut() {
                Some(last) if pages.start < last.end => last.end = last.end.max(pages.end),
                _ => merged.push(pages),
            }
        }
        let untouched = |pages: Range<u64>| {
            let lines = pages.clone().map(|_| OnceLock::new()).collect();
            Self { pages, lines }
        };
        merged.into_iter().map(untouched).collect()
    }

    /// Whether all its addresses are lower.
    pub fn is_below(&self, address: u64) -> bool {
        self.pages.end <= address / PAGE_BYTES
    }

    /// Runs `f` on the granules of an aligned access to `size` bytes at `address`, which is here.
    pub fn with<R>(&self, address: u64, size: u64, f: impl FnOnce(&mut [Granule]) -> R) -> R {
        let page = (address / PAGE_BYTES - self.pages.start) as usize;
        let line = (address % PAGE_BYTES / LINE_BYTES) as usize;
        let first = (address % LINE_BYTES / GRANULE_BYTES) as usize;
        let lines = self.lines[page].get_or_init(untouched_page);
        let mut granules = lines[line].lock().unwrap_or_else(PoisonError::into_inner);
        f(&mut granules[first..first + (size / GRANULE_BYTES) as usize])
    }
}

fn untouched_page() -> Box<[Line]> {
    let line = |_| Line::new([Granule::UNTOUCHED; (LINE_BYTES / GRANULE_BYTES) as usize]);
    (0..PAGE_BYTES / LINE_BYTES).map(line).collect()
}
