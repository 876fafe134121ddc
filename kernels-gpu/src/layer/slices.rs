//! States on their way to shared memory: slices of a few rows a thread, each of which waits for its own vectors alone.

use core::marker::PhantomData;

use crate::device::shared::{
    copy_async_b128, copy_async_commit, copy_async_wait, load_shared_b128,
};
use crate::device::thread::thread_idx_x;
use crate::math::each::each;
use crate::state::{Head, RawRows, Share, StateElement};

/// The slices of a block of `THREADS`, `ROWS` rows of each thread in one, in its shared memory; a
/// row is of `PARTS` fragments.
pub struct Slices<S, const ROWS: usize, const THREADS: u32, const PARTS: usize = 1> {
    /// Address of the first.
    first: u32,
    /// Whether states come this way: of a row that starts from its slot, in vectors of 16 bytes.
    copies: bool,
    /// Whether the row starts from its slot.
    reads: bool,
    element: PhantomData<S>,
}

impl<S: StateElement, const ROWS: usize, const THREADS: u32, const PARTS: usize>
    Slices<S, ROWS, THREADS, PARTS>
{
    /// Vectors of 16 bytes of a row that a thread copies.
    const VECTORS: usize = S::VECTORS * PARTS;

    /// Bytes of a slice.
    pub const SLICE_BYTES: u32 = ROWS as u32 * Self::VECTORS as u32 * THREADS * 16;

    /// From address `first` on, of a row that `reads` its slot, from states whose vectors are aligned where `wide`.
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

    /// Starts the copy of a slice to place `at`, where there is one: of `ROWS` rows of the head from the one that `from`
    /// says. Counts as started either way.
    ///
    /// # Safety
    /// The head's state is live; what was at that place is read.
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
            each!(i in 0..ROWS * Self::VECTORS => {
                let row = first + (i / Self::VECTORS) as u32;
                let part = share.part(i % Self::VECTORS / S::VECTORS);
                let address = head.vector_address::<S>(part, row, i % S::VECTORS);
                copy_async_b128(self.vector(at, i as u32), address);
            });
        }
        copy_async_commit();
    }

    /// Waits for all slices but the newest `pending`, at most 3, of those that were started.
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

    /// The slice at place `at`, which has been waited for; it is that of the head's rows from `first` on. Zeros of a row
    /// that does not start from its slot.
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
                    raw[row][part] = head.load::<S>(share.part(part), first + row as u32, true);
                });
            }
        });
        raw
    }
}
