//! The producer warpgroup of the scan, the copier: copies the operands of a row's chunks to shared memory.

use super::super::rows::{Span, halves};
use super::super::state;
use super::super::values::{self, TILE_BYTES};
use super::super::workspace::{Operands, own_bytes, unit_bytes};
use super::super::{ALL_CHUNKS, FACTORS, image_bytes};
use super::machine::Machine;
use super::memory::{Apart, STAGES};
use super::{Chain, Progress};
use crate::device::global::prefetch_bulk;
use crate::device::overlap::wait_for_previous;
use crate::device::shared::{
    arrive_at_counter, arrive_at_counter_behind_copies, copy_async_b128, copy_bulk, open_counter,
    store_shared_b64, wait_for_counter,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::lane_id;
use crate::layer::Place;
use crate::math::each::each;
use crate::recurrent::Gating;
use crate::step::StepConstants;

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'_, G, M, K, V, GROUPS>
{
    /// Initialises the counters, before the block's first row. Called by all threads of the block.
    ///
    /// # Safety
    /// The block's shared memory is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn open_counters(c: &StepConstants) {
        if thread_idx_x() == Self::THREADS {
            // The warp that stores checkpoint slots arrives twice.
            let copiers = Self::COPIERS + if c.checkpoint_every != 0 { 32 } else { 0 };
            each!(i in 0..STAGES => {
                // SAFETY: the caller's promise.
                unsafe {
                    open_counter(Self::there(i), copiers);
                    open_counter(Self::free(i), Self::THREADS);
                }
            });
            each!(i in 0..2 => {
                let of = Apart::ALL[i];
                if Self::has_apart(of) {
                    // SAFETY: the caller's promise.
                    unsafe {
                        open_counter(Self::apart_there(of), Self::COPIERS);
                        open_counter(Self::apart_free(of), Self::THREADS);
                    }
                }
            });
        }
        sync_threads();
    }

    /// Waits until the stage of the block's chunk number `chunks` is free.
    ///
    /// # Safety
    /// The counters are initialised.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn wait_for_stage(&self, chunks: u32) {
        let (i, round) = Self::stage_of(chunks);
        if round > 0 {
            wait_for_counter(Self::free(i), round - 1);
        }
    }

    /// Starts the copy of the row's state, which is not fresh. The copy arrives on the counter of the row's first chunk.
    ///
    /// # Safety
    /// As for [`Self::walk`]; the stage of the first chunk is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy_state(&self, place: &Place, progress: &Progress) {
        let chunks = progress.chunks;
        // SAFETY: the caller's promise; one thread copies.
        unsafe {
            // The consumers must have read the previous row's state. If that row had several chunks, an earlier wait implies
            // this; else wait for its only chunk.
            if progress.before + 1 == chunks {
                self.wait_for_stage(chunks + 1);
            }
            if thread_idx_x() == Self::THREADS {
                let start = self.start(place);
                let counter = Self::there(Self::stage_of(chunks).0);
                let bytes = V * K * state::bytes_of(self.c);
                copy_bulk(Self::state(), start.address, bytes, counter);
            }
        }
    }

    /// Copies all chunks that [`Self::walk`] processes, of the same row, each to its stage when the stage is free. Begins with a
    /// row while the consumers still process the last chunks of the previous one. Called by all copier threads, like the
    /// functions below. No thread waits for its copies, except for a row's first chunk.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn copy(&self, place: &Place, progress: &mut Progress) {
        let (params, span) = (self.params, &self.span);
        let copies = !self.copies_in_bulk() || thread_idx_x() == Self::THREADS;
        // SAFETY: the caller's promise.
        unsafe {
            if self.c.checkpoint_every != 0 {
                self.keep_span();
            }
            self.wait_for_stage(progress.chunks);
            if self.brings_state(progress) && !place.is_fresh() {
                self.copy_state(place, progress);
            }
        }
        progress.before = progress.chunks;
        let (unit, r) = (span.unit_from(params.first_chunk), self.r());
        let of = (self.row.h, 0);
        let first = Operands::new::<K, V>(self.c, params, G::PER_CHANNEL, unit, of);
        let mut next = first.images;
        let mut j = params.first_chunk;
        // SAFETY: the caller's promise; bulk copies are issued by one thread, other copies by all.
        unsafe {
            let mut slot = self.slot_behind(j);
            loop {
                let (i, round) = Self::stage_of(progress.chunks);
                self.leave_slot(i, slot);
                let at = (next, r);
                if j == params.first_chunk {
                    // No launch that may still run writes v.
                    self.copy_values(j, i);
                    if Self::CLUSTERED {
                        self.meet_cluster();
                    }
                    // The intra-chunk pass may have run until here.
                    wait_for_previous();
                    if copies {
                        next = self.copy_operands(j, i, (next, r));
                    }
                } else {
                    // Operands first, which one thread may copy: computing the addresses of v takes a while.
                    if copies {
                        next = self.copy_operands(j, i, (next, r));
                    }
                    self.copy_values(j, i);
                }
                arrive_at_counter_behind_copies(Self::there(i));
                each!(i in 0..2 => {
                    self.copy_apart(Apart::ALL[i], (j, progress.chunks), at, copies);
                });
                if j == params.first_chunk {
                    // The second chunk's copy follows when the first chunk has arrived, because the consumers wait for the first.
                    wait_for_counter(Self::there(i), round);
                }
                progress.chunks += 1;
                if Self::CLUSTERED && span.chunk(j).count == 1 && self.makes_output() {
                    // Together with the consumers, for the norm of a single token.
                    self.meet_cluster();
                }
                j += 1;
                if self.is_behind(span, j) {
                    return;
                }
                // While nothing is left to copy.
                slot = self.slot_behind(j);
                self.wait_for_stage(progress.chunks);
            }
        }
    }

    /// Whether this warp looks up the checkpoints' slots: a warp that copies nothing but v.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_slots(&self) -> bool {
        self.c.checkpoint_every != 0 && thread_idx_x() / 32 == Self::THREADS / 32 + 1
    }

    /// Slot of the checkpoint after chunk `j`; not live if none is due there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn slot_behind(&self, j: u32) -> u64 {
        if !self.has_slots() || !self.makes_output() {
            return u64::MAX;
        }
        let span = Self::kept_span();
        self.checkpoint_slot::<false>(&span, span.chunk(j))
    }

    /// Stores the slot where the consumers find it with stage `i`.
    ///
    /// # Safety
    /// Nobody reads the stage any more.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave_slot(&self, i: u32, slot: u64) {
        if self.has_slots() {
            // SAFETY: the caller's promise; the store is visible to threads that wait for the counter.
            unsafe {
                if lane_id() == 0 {
                    store_shared_b64(Self::slot(i), halves(slot));
                }
                arrive_at_counter(Self::there(i));
            }
        }
    }

    /// Whether other launches of the prefill run concurrently (the next segment's intra-chunk pass, or rows of one token), so
    /// that a copy waits for memory bandwidth. A block of two consumer warpgroups belongs to a batch, which has the GPU to
    /// itself.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_company(&self) -> bool {
        let params = self.params;
        let is_segment = params.end_chunk != ALL_CHUNKS || params.first_chunk != 0;
        GROUPS == 1 && (is_segment || params.has_singles != 0)
    }

    /// Whether chunk `j` belongs to the launch and has operands in the workspace.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_unit(&self, span: &Span, j: u32) -> bool {
        span.chunk(j).count > 1 && j < self.params.end_chunk
    }

    /// Whether one thread copies operands in bulk; else all copier threads copy.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copies_in_bulk(&self) -> bool {
        M::WARPGROUPS || self.c.copies_in_bulk()
    }

    /// Starts to copy `bytes` bytes of operands, a multiple of 16, to a stage: see [`Self::copies_in_bulk`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy_part(&self, to: u32, from: u64, bytes: u32, counter: u32) {
        if self.copies_in_bulk() {
            copy_bulk(to, from, bytes, counter);
            return;
        }
        let mut byte = 16 * (thread_idx_x() - Self::THREADS);
        while byte < bytes {
            copy_async_b128(to + byte, from + byte as u64);
            byte += 16 * Self::COPIERS;
        }
    }

    /// Starts to copy the intra-chunk pass's results for chunk `j` to stage `i`; copies nothing after the launch's last chunk.
    /// The query/key head's results are at `first`; `r` is the value head. Called by the threads that copy, for one chunk after
    /// the other. Returns the address of the next chunk's results.
    ///
    /// # Safety
    /// The tensors of `params` are live; nobody reads the stage any more.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy_operands(&self, j: u32, i: u32, (first, r): (u64, u32)) -> u64 {
        let (c, span) = (self.c, &self.span);
        let (stage, counter) = (Self::stage(i), Self::there(i));
        let mut next = first;
        // SAFETY: the caller's promise; the threads arrive on the counter next.
        unsafe {
            if self.has_unit(span, j) {
                let unit = (unit_bytes(c, K, V, G::PER_CHANNEL) * c.h) as u64;
                let own = Operands::at::<K, V>(c, G::PER_CHANNEL, (first, r));
                next = first + unit;
                if G::PER_CHANNEL {
                    // A value head's results are contiguous: prefetch those of chunk j + 2 into L2.
                    if self.has_company() && self.row.tile == 0 && self.has_unit(span, j + 2) {
                        prefetch_bulk(own.images + 2 * unit, own_bytes(c, K, V, true));
                    }
                }
                match (M::APART, G::PER_CHANNEL) {
                    (false, true) => {
                        let bytes = Self::HEAD + Self::HEAD_BYTES;
                        self.copy_part(stage, own.images, bytes, counter);
                    }
                    (false, false) => {
                        self.copy_part(stage, own.images, Self::HEAD, counter);
                        self.copy_part(stage + Self::HEAD, own.head, Self::HEAD_BYTES, counter);
                    }
                    (true, per_channel) => {
                        if !per_channel {
                            self.copy_part(stage, own.images, Self::HEAD, counter);
                        }
                        let (to, from) = (stage + Self::FACTORS, own.head + FACTORS as u64);
                        self.copy_part(to, from, Self::HEAD_BYTES - FACTORS, counter);
                    }
                }
                if c.makes_values() && !self.brings_zeros() {
                    let bytes = GROUPS * TILE_BYTES;
                    let tiles = own.values + (self.row.tile * bytes) as u64;
                    self.copy_part(stage + Self::TILES, tiles, bytes, counter);
                }
            }
        }
        next
    }

    /// Starts to copy operands of chunk `j` to their buffer apart from the stages, when the buffer is free; `chunks`, `at` and
    /// `copies` as in [`Self::copy`]. Called by all copier threads.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy_apart(&self, of: Apart, (j, chunks): (u32, u32), at: (u64, u32), copies: bool) {
        if !Self::has_apart(of) {
            return;
        }
        let counter = Self::apart_there(of);
        // SAFETY: the caller's promise; the counters are initialised.
        unsafe {
            if chunks > 0 {
                wait_for_counter(Self::apart_free(of), chunks - 1);
            }
            if copies && self.has_unit(&self.span, j) {
                let own = Operands::at::<K, V>(self.c, G::PER_CHANNEL, at);
                // With decays by channel, T and P follow the images.
                let (from, bytes) = match (of, G::PER_CHANNEL) {
                    (Apart::Images, _) => (own.images, image_bytes(K)),
                    (Apart::Triangles, true) => {
                        let from = own.images + image_bytes(K) as u64;
                        (from, image_bytes(K) / 2 + FACTORS)
                    }
                    (Apart::Triangles, false) => (own.head, FACTORS),
                };
                self.copy_part(Self::apart(of), from, bytes, counter);
            }
            arrive_at_counter_behind_copies(counter);
        }
    }

    /// Whether zeros replace v, for a transition.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn brings_zeros(&self) -> bool {
        M::SPLITS && self.has_no_values
    }

    /// Starts to copy v of chunk `j` to stage `i`, if the intra-chunk pass does not store v in the workspace.
    ///
    /// # Safety
    /// As for [`Self::copy_operands`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy_values(&self, j: u32, i: u32) {
        let (c, params, span) = (self.c, self.params, &self.span);
        let tiles = Self::stage(i) + Self::TILES;
        if self.brings_zeros() {
            values::clear::<GROUPS>(params.workspace, tiles);
        } else if !c.makes_values() && self.has_unit(span, j) {
            let channel = self.row.hv * c.v_head + self.row.tile * 64 * GROUPS;
            let with = (span, span.chunk(j));
            values::copy::<GROUPS>(c, params, with, channel, tiles);
        }
    }
}
