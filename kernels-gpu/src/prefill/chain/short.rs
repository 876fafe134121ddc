//! Rows of at most 64 tokens: the block runs the intra-chunk pass and the scan.

use super::super::channels;
use super::super::convolution::{channel_of, channel_of_values};
use super::super::load::{Convolved, THREADS};
use super::super::operands::SharedSink;
use super::super::prepare::{self, Unit};
use super::super::rows::Span;
use super::super::solve::SCRATCH_BYTES;
use super::super::state;
use super::super::values::{self, Channels};
use super::machine::Machine;
use super::memory::shared_bytes;
use super::{Chain, makes_pairs};
use crate::device::global::prefetch;
use crate::device::shared::{copy_async_commit, copy_async_wait, dynamic_shared_mem};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warpgroup::fence_shared;
use crate::layer::Place;
use crate::math::each::each;
use crate::math::elements::bytes_of;
use crate::recurrent::Gating;

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'_, G, M, K, V, GROUPS>
{
    /// Processes all chunks of a row of at most [`CHUNK`](super::super::CHUNK) tokens: at most two chunks, whose operands the
    /// block computes. Covers `heads` value heads of the query/key head, this one and the next; two only with [`makes_pairs`].
    /// Called by all 256 threads; those of the block's consumer warpgroups have rows.
    ///
    /// # Safety
    /// As for [`Self::walk`], except for the workspace.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn walk_short(&self, place: &Place, heads: u32) {
        let has_rows = thread_idx_x() < Self::THREADS;
        let chunks = Self::chunks(&self.span);
        // SAFETY: the caller's promise; a block owns its rows of a state.
        unsafe {
            self.prefetch(place, heads);
            self.keep_span();
            let mut j = 0;
            while j < chunks {
                if self.span.chunk(j).count > 1 {
                    self.make(j, heads, has_rows);
                    // All warps have left the scratch.
                    sync_threads();
                }
                j += 1;
            }
            copy_async_wait::<0>();
            fence_shared();
            sync_threads();
            if !has_rows {
                return;
            }
            if Self::CLUSTERED {
                self.meet_cluster();
            }
            let mut of = 0;
            loop {
                self.of_head(of).advance_short(of);
                of += 1;
                if of == heads {
                    return;
                }
                // All consumers have read the tiles.
                Self::sync_rows();
                let (next, span) = (self.of_head(of), Self::kept_span());
                each!(j in 0..Self::chunks(&span) => {
                    if span.chunk(j).count > 1 {
                        next.bring_values(&span, j, true);
                    }
                });
                copy_async_wait::<0>();
                Self::sync_rows();
            }
        }
    }

    /// Prefetches into L2 the data that is loaded late: the states of all heads of the block, long before registers are free for
    /// them; the convolution's inputs and weights, except those of the first head's v; and z.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn prefetch(&self, place: &Place, heads: u32) {
        let (c, params) = (self.c, self.params);
        let layer = &params.layer;
        let width = 64 * GROUPS;
        let x = (layer.x, (params.x_row, c.x_token), c.x_element);
        if c.taps != 0 {
            let (q, k) = (
                channel_of(c, 0, self.row.h, K),
                channel_of(c, 1, self.row.h, K),
            );
            self.prefetch_tokens::<K>(x, q);
            self.prefetch_tokens::<K>(x, k);
            self.prefetch_taps::<K>(q);
            self.prefetch_taps::<K>(k);
        }
        each!(of in 0..heads => {
            let own = self.of_head(of);
            let hv = own.row.hv;
            if !place.is_fresh() {
                let start = own.start(place);
                // Each block of a cluster prefetches a part.
                let mut byte = 128 * (self.row.tile * THREADS + thread_idx_x());
                while byte < V * K * state::bytes_of(c) {
                    prefetch(start.address + byte as u64);
                    byte += 128 * THREADS * Self::CLUSTER;
                }
            }
            if c.has_norm != 0 {
                let z = (layer.z, (params.z_row, c.z_token), c.z_element);
                let channel = hv * c.z_head + self.row.tile * width;
                match GROUPS {
                    1 => self.prefetch_tokens::<64>(z, channel),
                    _ => self.prefetch_tokens::<128>(z, channel),
                }
            }
            if c.taps != 0 && of > 0 {
                let v = channel_of_values::<K, V>(c, hv, V);
                self.prefetch_tokens::<V>(x, v);
                self.prefetch_taps::<V>(v);
            }
        });
    }

    /// Prefetches `CHANNELS` channels from `channel` on, of all tokens, into L2.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn prefetch_tokens<const CHANNELS: u32>(
        &self,
        (base, strides, element): (u64, (u32, u32), u32),
        channel: u32,
    ) {
        let of_line = 128 / bytes_of(element);
        let mut line = thread_idx_x() * of_line;
        while line < self.span.count * CHANNELS {
            let (t, of) = (line / CHANNELS, channel + line % CHANNELS);
            prefetch(self.span.at(base, strides, t, of, element));
            line += THREADS * of_line;
        }
    }

    /// Prefetches the weights of `CHANNELS` channels from `channel` on into L2.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn prefetch_taps<const CHANNELS: u32>(&self, channel: u32) {
        let (c, layer) = (self.c, &self.params.layer);
        let of_channel = c.conv_weight_channel * bytes_of(c.conv_weight_element);
        let byte = 128 * thread_idx_x();
        if byte < CHANNELS * of_channel {
            prefetch(layer.conv_weight + channel as u64 * of_channel as u64 + byte as u64);
        }
    }

    /// Number of chunks of a short row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn chunks(span: &Span) -> u32 {
        if span.chunk(0).count < span.count {
            2
        } else {
            1
        }
    }

    /// The same for the value head `of` heads after this one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_head(&self, of: u32) -> Self {
        let row = if makes_pairs(G::PER_CHANNEL, GROUPS) {
            self.row.with_head(self.c, self.r() + of)
        } else {
            self.row
        };
        Self { row, ..*self }
    }

    /// Address of the scratch of the intra-chunk pass. Afterwards it holds the scales of [`Self::scale_output`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn scratch() -> u32 {
        dynamic_shared_mem() + shared_bytes(K, G::PER_CHANNEL, GROUPS, Self::SUM_BYTES, false)
    }

    /// Address of the operands of chunk `j` for the value head `of` heads after the block's first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn head(j: u32, of: u32) -> u32 {
        if makes_pairs(G::PER_CHANNEL, GROUPS) && of > 0 {
            let room = 2 * SCRATCH_BYTES + prepare::SCALE_BYTES;
            (Self::scratch() + room).next_multiple_of(128) + j * Self::HEAD_BYTES
        } else {
            Self::stage(j) + Self::HEAD
        }
    }

    /// Computes the operands of chunk `j`, of more than one token, and loads v of the first head.
    ///
    /// # Safety
    /// As for [`Self::walk_short`]; the stage is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn make(&self, j: u32, heads: u32, has_rows: bool) {
        let (c, params) = (self.c, self.params);
        let (chunk, stage, scratch) = (self.span.chunk(j), Self::stage(j), Self::scratch());
        let with = (&self.span, chunk);
        self.bring_values(&self.span, j, has_rows);
        if G::PER_CHANNEL {
            let at = (stage, scratch, scratch + channels::room_bytes(K));
            let (of, head) = ((self.row, Convolved::Here(self.inputs)), Self::head(j, 0));
            channels::give::<K>(
                (c, params),
                with,
                of,
                at,
                SharedSink(stage),
                SharedSink(head),
            );
        } else {
            let scratches = if makes_pairs(false, GROUPS) { 2 } else { 1 };
            let at = (stage, scratch, scratch + scratches * SCRATCH_BYTES);
            let own = if heads == 2 { thread_idx_x() / 128 } else { 0 };
            let of = (self.row.h, self.of_head(own).row.hv, self.inputs);
            let unit = Unit::new::<K>(c, params, with, of, heads, at);
            let first = Self::head(j, 0);
            unit.give_heads::<K>(self.c, SharedSink(first), Self::head(j, 1) - first);
        }
    }

    /// Stores v of chunk `j` where the intra-chunk pass would store it. Called by all 256 threads.
    ///
    /// # Safety
    /// The tensors of `params` are live; the tiles are free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn make_values(&self, span: &Span, j: u32) {
        let with = (span, span.chunk(j), self.inputs);
        let count = 64 * GROUPS;
        let of = Channels {
            hv: self.row.hv,
            first: if V == count { 0 } else { self.row.tile * count },
        };
        let threads = (thread_idx_x(), THREADS);
        let tiles = SharedSink(Self::stage(j) + Self::TILES);
        // SAFETY: the caller's promise.
        unsafe {
            // A constant of the block cannot be computed in a const argument yet.
            match GROUPS {
                1 => values::make::<K, V, 64>(self.c, self.params, with, of, threads, tiles),
                _ => values::make::<K, V, 128>(self.c, self.params, with, of, threads, tiles),
            }
        };
    }

    /// Loads v of chunk `j` to the place where [`Self::advance`] reads it. Asynchronous copies are complete after a wait and a
    /// barrier. Called by all threads, whether they have rows or not.
    ///
    /// # Safety
    /// The tensors of `params` are live; nobody reads the tiles of the stage any more.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn bring_values(&self, span: &Span, j: u32, has_rows: bool) {
        if self.c.makes_values() {
            self.make_values(span, j);
        } else if has_rows {
            let channel = self.row.hv * self.c.v_head + self.first();
            let (of, tile) = ((span, span.chunk(j)), Self::tile(Self::stage(j)));
            values::copy::<1>(self.c, self.params, of, channel, tile);
            copy_async_commit();
        }
    }

    /// Scans the chunks of a short row, for the value head `of` heads after the block's first.
    ///
    /// # Safety
    /// As for [`Self::walk_short`]; the operands and v are in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn advance_short(&self, of: u32) {
        let (c, layer) = (self.c, &self.params.layer);
        // SAFETY: the caller's promise; a block owns its rows of a state.
        unsafe {
            let place = Place::load(c, layer, Self::kept_span().b);
            let start = self.start(&place);
            let mut s = self.places().load(c, start, !place.is_fresh());
            let mut j = 0;
            loop {
                let span = Self::kept_span();
                if j == Self::chunks(&span) {
                    break;
                }
                let chunk = span.chunk(j);
                if c.has_norm != 0 {
                    // All warps have read the previous chunk's sums.
                    Self::sync_rows();
                }
                if chunk.count > 1 {
                    // v of both chunks is in shared memory.
                    let staged = Self::staged_with(Self::stage(j), Self::head(j, of));
                    s = self.advance::<true>(s, j, staged, 0);
                } else {
                    self.advance_by_one(
                        &mut s,
                        Self::kept_span,
                        chunk.start,
                        (Self::room(j, chunk.start), G::PER_CHANNEL),
                    );
                }
                self.checkpoint::<false>(&s, &Self::kept_span(), chunk);
                j += 1;
            }
            if c.update_state != 0 {
                let place = Place::load(c, layer, Self::kept_span().b);
                self.places().store(c, self.end(&place), &s);
            }
        }
    }
}
