//! Asynchronous copies of states to shared memory, in slices of a few rows per thread. A thread waits only for its own vectors.

use core::marker::PhantomData;

use crate::device::shared::{
    copy_async_b128, copy_async_commit, copy_async_wait, load_shared_b128,
};
use crate::device::thread::thread_idx_x;
use crate::math::each::each;
use crate::state::{Head, RawRows, Share, StateElement};

/// Slices in the shared memory of a block of `THREADS` threads. A slice has `ROWS` rows per thread, a row `PARTS` fragments per
/// thread.
///
/// `ONE_BASE`: whether the state is addressed by [`crate::state::Rows`]. K-last drafts take up to 9 % longer so.
pub struct Slices<
    S,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize = 1,
    const ONE_BASE: bool = true,
> {
    /// Address of the first slice.
    first: u32,
    /// Whether slices are copied: the row starts from its slot, and states are accessed in vectors of 16 bytes.
    copies: bool,
    /// Whether the row starts from its slot.
    reads: bool,
    element: PhantomData<S>,
}

impl<
    S: StateElement,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
    const ONE_BASE: bool,
> Slices<S, ROWS, THREADS, PARTS, ONE_BASE>
{
    /// Number of 16-byte vectors that a thread copies per row.
    const VECTORS: usize = S::VECTORS * PARTS;

    /// Bytes of a slice.
    pub const SLICE_BYTES: u32 = ROWS as u32 * Self::VECTORS as u32 * THREADS * 16;

    /// Slices from address `first` on, for a row that starts from its slot if `reads`. `wide`: the vectors of states are aligned.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(first: u32, reads: bool, wide: bool) -> Self {
        Self {
            first,
            copies: reads && wide,
            reads,
            element: PhantomData,
        }
    }

    /// Address in shared memory of this thread's vector `i` of the slice at place `at`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vector(&self, at: u32, i: u32) -> u32 {
        let vectors = ROWS as u32 * Self::VECTORS as u32;
        self.first + ((at * vectors + i) * THREADS + thread_idx_x()) * 16
    }

    /// Starts the copy of a slice to place `at`, if the slice exists (`is_there`): `ROWS` rows of a head, from the first row on;
    /// `from` returns both. Counts as started either way.
    ///
    /// # Safety
    /// The head's state is live, and the slice at place `at` has been read.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn start(
        &self,
        at: u32,
        is_there: bool,
        share: Share,
        from: impl Fn() -> (Head, u32),
    ) {
        if self.copies && is_there {
            let (head, first) = from();
            if const { ONE_BASE } {
                let rows = head.rows::<S>(share, first);
                each!(i in 0..ROWS * Self::VECTORS => {
                    let (row, part) = (i / Self::VECTORS, i % Self::VECTORS / S::VECTORS);
                    let address = rows.vector_address(row, part, i % S::VECTORS);
                    copy_async_b128(self.vector(at, i as u32), address);
                });
            } else {
                each!(i in 0..ROWS * Self::VECTORS => {
                    let row = first + (i / Self::VECTORS) as u32;
                    let part = share.part(i % Self::VECTORS / S::VECTORS);
                    let address = head.vector_address::<S>(part, row, i % S::VECTORS);
                    copy_async_b128(self.vector(at, i as u32), address);
                });
            }
        }
        copy_async_commit();
    }

    /// Waits for all started slices except the newest `pending`, which is at most 3.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn wait(&self, pending: u32) {
        if self.copies {
            match pending {
                0 => copy_async_wait::<0>(),
                1 => copy_async_wait::<1>(),
                2 => copy_async_wait::<2>(),
                _ => copy_async_wait::<3>(),
            }
        }
    }

    /// The slice at place `at`, for which the thread has waited: the head's rows from `first` on. Zeros if the row does not start
    /// from its slot.
    ///
    /// # Safety
    /// The head's state is live, and this thread has not written it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn read(
        &self,
        at: u32,
        share: Share,
        head: Head,
        first: u32,
    ) -> RawRows<ROWS, PARTS> {
        let mut raw = [[[0; 8]; PARTS]; ROWS];
        let rows = head.rows::<S>(share, first);
        each!(row in 0..ROWS => {
            if self.copies {
                each!(i in 0..Self::VECTORS => {
                    let vector = self.vector(at, (row * Self::VECTORS + i) as u32);
                    let (raw, word) = (&mut raw[row][i / S::VECTORS], 4 * (i % S::VECTORS));
                    [raw[word], raw[word + 1], raw[word + 2], raw[word + 3]] =
                        load_shared_b128(vector);
                });
            } else if self.reads {
                each!(part in 0..PARTS => {
                    raw[row][part] = if const { ONE_BASE } {
                        rows.load::<S>(row, part)
                    } else {
                        head.load::<S>(share.part(part), first + row as u32, true)
                    };
                });
            }
        });
        raw
    }
}
