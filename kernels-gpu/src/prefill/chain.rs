//! From state to state through the pieces of a row. With S of a warpgroup's 64 rows in registers, for the tokens t of a piece
//! and its last one, C:
//!     R = Vᵀ − (S k̂ᵀ)·2^G_t    δ = R Tᵀ    o = (S q̂ᵀ)·2^G_t + δ Pᵀ    S ← 2^G_C S + (δ·2^(G_C − G_t)) k̂

use core::array;
use core::marker::PhantomData;

use super::convolution::Inputs;
use super::load::{Convolved, THREADS};
use super::operands::Shared;
use super::output;
use super::prepare::{self, Makes, Unit};
use super::rows::{Piece, Span, halves, long};
use super::single;
use super::single_klast;
use super::solve::SCRATCH_BYTES;
use super::state::{Places, load_carried, store_carried};
use super::values::{self, Channels, TILE_BYTES};
use super::workspace::{Operands, carried, own_bytes, unit_bytes};
use super::{
    ALL_PIECES, CHUNK, FACTOR_BYTES, FACTORS, P, anew, channels, head_bytes, image_bytes,
    images_bytes,
};
use crate::device::cluster::{self, store_shared_b32_at};
use crate::device::float::{fma, pack_f16x2};
use crate::device::global::{prefetch, prefetch_bulk};
use crate::device::overlap::wait_for_previous;
use crate::device::shared::{
    COUNTER_BYTES, close_counter, copy_bulk, copy_bulk_commit, copy_bulk_wait, dynamic_shared_mem,
    load_shared_b32, load_shared_b64, load_shared_b128, open_counter, store_shared_b32,
    store_shared_b128,
};
use crate::device::thread::{sync_barrier, sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::device::warpgroup::{self, fence_shared};
use crate::layer::Place;
use crate::layer::norm::{normed, sum_of};
use crate::math::elements;
use crate::recurrent::Gating;
use crate::row::Row;
use crate::state::{Head, StateElement, is_live, slot_of};
use crate::step::{PrefillParams, StepConstants};

/// Barrier of the first warpgroup; the others' follow.
pub const GROUPS: u32 = 2;
/// Of the norm: squares of every token, for 64 rows of a state.
const SUM_BYTES: u32 = 4 * CHUNK;
/// Pieces in shared memory.
const STAGES: u32 = 2;
/// Of the row's tokens, and of where the next copies are from.
const SPAN_BYTES: u32 = 48;
const SOURCES: u32 = 32;

/// Shared memory of a stage: the images, the head's operands, and a tile for each warpgroup.
pub const fn stage_bytes(k: u32, per_channel: bool, groups: u32) -> u32 {
    images_bytes(k, per_channel) + head_bytes(k, per_channel) + groups * TILE_BYTES
}

/// Shared memory of a block, with [`sum_bytes`].
pub const fn shared_bytes(k: u32, per_channel: bool, groups: u32, sums: u32) -> u32 {
    let stages = STAGES * stage_bytes(k, per_channel, groups);
    128 + stages + sums + SPAN_BYTES + STAGES * COUNTER_BYTES
}

/// Blocks of a cluster: all that share a head's state.
pub const fn cluster(v: u32, groups: u32) -> u32 {
    v / (64 * groups)
}

/// Shared memory of the norm: the sums of both warpgroups; of a block of a cluster those of all rows of the head, for each stage.
pub const fn sum_bytes(v: u32, groups: u32) -> u32 {
    if cluster(v, groups) > 1 {
        STAGES * v / 64 * SUM_BYTES
    } else {
        2 * SUM_BYTES
    }
}

/// Shared memory behind it that a unit is made in, where the block makes it.
pub const fn room_bytes(k: u32, per_channel: bool, groups: u32) -> u32 {
    if per_channel {
        channels::room_bytes(k) + channels::SCALE_BYTES
    } else if makes_pairs(per_channel, groups) {
        2 * SCRATCH_BYTES + prepare::SCALE_BYTES + 128 + STAGES * head_bytes(k, false)
    } else {
        SCRATCH_BYTES + prepare::SCALE_BYTES
    }
}

/// Shared memory of a block that has a row of one token.
pub const fn single_bytes(k: u32, groups: u32) -> u32 {
    single_klast::shared_bytes(k, 64 * groups)
}

/// Whether both warpgroups may make a value head each, of two that share a query/key head.
pub const fn makes_pairs(per_channel: bool, groups: u32) -> bool {
    !per_channel && groups == 2
}

/// Shared memory that a piece of one token takes: its q and k, where they are convolved, and the sums of a norm.
#[derive(Clone, Copy)]
struct Room {
    staged: u32,
    sums: u32,
}

/// A row's walk, of a block that has `64 · GROUPS` rows of a value head's state, as the gate decays it.
pub struct Chain<'a, G, const K: u32, const V: u32, const V_LAST: bool, const GROUPS_OF_BLOCK: u32>
{
    c: &'a StepConstants,
    params: &'a PrefillParams,
    /// What the block works on.
    row: Row,
    /// The row's tokens.
    span: Span,
    /// What they are convolved from.
    inputs: Inputs,
    gating: PhantomData<G>,
}

impl<'a, G: Gating, const K: u32, const V: u32, const V_LAST: bool, const GROUPS_OF_BLOCK: u32>
    Chain<'a, G, K, V, V_LAST, GROUPS_OF_BLOCK>
{
    const THREADS: u32 = 128 * GROUPS_OF_BLOCK;
    /// Blocks of the cluster.
    const CLUSTER: u32 = cluster(V, GROUPS_OF_BLOCK);
    const SUM_BYTES: u32 = sum_bytes(V, GROUPS_OF_BLOCK);
    /// Whether it has several.
    const CLUSTERED: bool = Self::CLUSTER > 1;
    const STAGE_BYTES: u32 = stage_bytes(K, G::PER_CHANNEL, GROUPS_OF_BLOCK);
    /// Byte of the head's operands in a stage.
    const HEAD: u32 = images_bytes(K, G::PER_CHANNEL);
    const HEAD_BYTES: u32 = head_bytes(K, G::PER_CHANNEL);
    /// Byte of the tiles, behind the head's operands as they are in a workspace.
    const TILES: u32 = Self::HEAD + Self::HEAD_BYTES;
    /// Byte of the image that is added to the state, and tokens of which it is one.
    const ADDED: u32 = if G::PER_CHANNEL { image_bytes(K) } else { 0 };

    /// That of a block that has `row`, whose tokens are `span`.
    #[inline(always)]
    pub fn new(c: &'a StepConstants, params: &'a PrefillParams, row: Row, span: Span) -> Self {
        Self {
            c,
            params,
            row,
            span,
            inputs: Inputs::NONE,
            gating: PhantomData,
        }
    }

    /// That of a block that has `row`, and where the row's states and windows are; nothing of one without tokens.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors.
    #[inline(always)]
    pub unsafe fn of_row(
        c: &'a StepConstants,
        params: &'a PrefillParams,
        row: Row,
    ) -> Option<(Self, Place)> {
        // SAFETY: the caller's promise.
        unsafe {
            // Both at once: neither waits for the other.
            let span = Span::load(c, params, row.b);
            let place = Place::load(c, &params.layer, row.b);
            if span.count == 0 {
                return None;
            }
            Some((Self::new(c, params, row, span).with_inputs(&place), place))
        }
    }

    /// Whether the row has pieces from the first one of this launch on.
    #[inline(always)]
    pub fn has_pieces(&self) -> bool {
        self.params.first_piece == 0
            || self.span.piece(self.params.first_piece).start < self.span.count
    }

    /// Where this thread's warpgroup leaves its rows for the launch of the next pieces.
    #[inline(always)]
    fn carried(&self) -> u64 {
        let of = (self.row.hv, self.first());
        carried::<K, V>(self.c, self.params, G::PER_CHANNEL, of)
    }

    /// First row of the state that this thread's warpgroup has.
    #[inline(always)]
    fn first(&self) -> u32 {
        64 * (self.row.tile * GROUPS_OF_BLOCK + thread_idx_x() / 128)
    }

    #[inline(always)]
    fn stage(j: u32) -> u32 {
        // The base is a multiple of 16.
        let base = dynamic_shared_mem().next_multiple_of(128);
        base + j % STAGES * Self::STAGE_BYTES
    }

    /// Words of the norm, behind the stages.
    #[inline(always)]
    fn sums() -> u32 {
        Self::stage(0) + STAGES * Self::STAGE_BYTES
    }

    /// Those of a cluster, of one of two pieces between which its blocks do not wait for each other.
    #[inline(always)]
    fn sums_of_cluster(is_second: bool) -> u32 {
        Self::sums() + is_second as u32 * (Self::SUM_BYTES / STAGES)
    }

    /// Waits for the blocks of the cluster to be there, to which this one sends its sums, and for what they have read of those of a
    /// row before. All threads that have rows come.
    #[inline(always)]
    fn meet_cluster(&self) {
        if self.c.has_norm != 0 {
            cluster::arrive();
            cluster::wait();
        }
    }

    /// Counter of the copies to the stage of piece `j`.
    #[inline(always)]
    fn counter(j: u32) -> u32 {
        Self::kept() + SPAN_BYTES + j % STAGES * COUNTER_BYTES
    }

    /// Where the row's tokens are said, behind the sums.
    #[inline(always)]
    fn kept() -> u32 {
        Self::sums() + Self::SUM_BYTES
    }

    /// Says there which tokens are the row's, since there are not registers to keep that from piece to piece. For one thread,
    /// that which copies.
    ///
    /// # Safety
    /// The place is free.
    #[inline(always)]
    unsafe fn keep_span(&self) {
        let [first, second] = self.span.words();
        // SAFETY: the caller's promise.
        unsafe {
            store_shared_b128(Self::kept(), first);
            store_shared_b128(Self::kept() + 16, second);
        }
    }

    /// Says behind that where the units of the launch's pieces begin.
    ///
    /// # Safety
    /// As [`Self::keep_span`]'s; the row has units.
    #[inline(always)]
    unsafe fn keep_first_sources(&self) {
        let (c, unit) = (self.c, self.span.unit_from(self.params.first_piece));
        let of = (self.row.h, self.r());
        let first = Operands::new::<K, V>(c, self.params, G::PER_CHANNEL, unit, of);
        // SAFETY: the caller's promise.
        unsafe { Self::keep_sources(first.images, first.head) };
    }

    /// # Safety
    /// As [`Self::keep_span`]'s.
    #[inline(always)]
    unsafe fn keep_sources(images: u64, head: u64) {
        let ([a, b], [c, d]) = (halves(images), halves(head));
        // SAFETY: the caller's promise.
        unsafe { store_shared_b128(Self::kept() + SOURCES, [a, b, c, d]) };
    }

    /// The row's tokens, as [`Self::keep_span`] said, for its thread, or behind a barrier.
    #[inline(always)]
    fn kept_span() -> Span {
        // SAFETY: they are there.
        unsafe {
            let words = [0, 16].map(|byte| load_shared_b128(Self::kept() + byte));
            Span::of_words(words)
        }
    }

    #[inline(always)]
    fn tile(stage: u32) -> u32 {
        stage + Self::TILES + thread_idx_x() / 128 * TILE_BYTES
    }

    /// Which of the value heads of its query/key head.
    #[inline(always)]
    fn r(&self) -> u32 {
        let c = self.c;
        if c.tiled != 0 {
            self.row.hv / c.h
        } else {
            self.row.hv % c.ratio
        }
    }

    /// Zeros for the tokens of a row that has no place in the pool, of so many value heads from this one on.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    pub unsafe fn store_zeros(&self, heads: u32) {
        let mut of = 0;
        while of < heads {
            // SAFETY: the caller's promise.
            unsafe { self.of_head(of).store_zeros_of_head() };
            of += 1;
        }
    }

    /// # Safety
    /// As [`Self::store_zeros`]'.
    #[inline(always)]
    unsafe fn store_zeros_of_head(&self) {
        let (c, params) = (self.c, self.params);
        let width = 64 * GROUPS_OF_BLOCK;
        let head = self.row.hv * c.o_head + self.row.tile * width;
        let mut t = thread_idx_x() / width;
        while t < self.span.count {
            let strides = (params.o_row, c.o_token);
            let channel = head + thread_idx_x() % width;
            let base = params.layer.step.o;
            let address = self.span.at(base, strides, t, channel, c.o_element);
            // SAFETY: the caller's promise.
            unsafe { elements::store([0.0], address, c.o_element, false) };
            t += Self::THREADS / width;
        }
    }

    /// Whether other launches of the prefill run beside this one, the preparation of the next stretch or rows of one token, and a copy
    /// waits for their bytes. A block of two warpgroups is of a batch, which has the GPU to itself.
    #[inline(always)]
    fn has_company(&self) -> bool {
        let params = self.params;
        let is_stretch = params.end_piece != ALL_PIECES || params.first_piece != 0;
        GROUPS_OF_BLOCK == 1 && (is_stretch || params.has_singles != 0)
    }

    /// Starts to copy what the preparation left of piece `j` to its stage; nothing behind the launch's last. For one thread, one
    /// piece after the other.
    ///
    /// # Safety
    /// The tensors of `params` are live, the row's tokens kept; nobody reads the stage any more.
    #[inline(always)]
    unsafe fn copy(&self, j: u32) {
        let c = self.c;
        let (stage, counter) = (Self::stage(j), Self::counter(j));
        let span = Self::kept_span();
        // SAFETY: the caller's promise; the thread opened the counter.
        unsafe {
            if span.piece(j).count > 1 && j < self.params.end_piece {
                let [a, b, d, e] = load_shared_b128(Self::kept() + SOURCES);
                let (image, head) = (long([a, b]), long([d, e]));
                let unit = unit_bytes(c, K, V, G::PER_CHANNEL);
                let next = (unit * c.h) as u64;
                Self::keep_sources(image + next, head + next);
                if G::PER_CHANNEL {
                    // Bytes of a unit are neighbours: what follows the piece behind the next comes to L2.
                    let ahead = image + 2 * next;
                    let is_followed = self.has_company()
                        && self.row.tile == 0
                        && span.piece(j + 2).count > 1
                        && j + 2 < self.params.end_piece;
                    if is_followed {
                        prefetch_bulk(ahead, own_bytes(c, K, V, true));
                    }
                    copy_bulk(stage, image, Self::HEAD + Self::HEAD_BYTES, counter);
                } else {
                    copy_bulk(stage, image, Self::HEAD, counter);
                    copy_bulk(stage + Self::HEAD, head, Self::HEAD_BYTES, counter);
                }
                if c.makes_values() {
                    let bytes = GROUPS_OF_BLOCK * TILE_BYTES;
                    let tiles = head + (Self::HEAD_BYTES + self.row.tile * bytes) as u64;
                    copy_bulk(stage + Self::TILES, tiles, bytes, counter);
                }
            }
            copy_bulk_commit(counter);
        }
    }

    /// Says that v of `piece` will be wanted.
    #[inline(always)]
    fn expect_values(&self, span: &Span, piece: Piece) {
        if !self.c.makes_values() {
            let channel = self.row.hv * self.c.v_head + self.first();
            values::prefetch(self.c, self.params, (span, piece), channel);
        }
    }

    /// v of `piece`, where the preparation does not leave it.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    unsafe fn values(&self, span: &Span, piece: Piece) -> values::Raw {
        if self.c.makes_values() {
            return [[0; 4]; 4];
        }
        let channel = self.row.hv * self.c.v_head + self.first();
        // SAFETY: the caller's promise.
        unsafe { values::load(self.c, self.params, (span, piece), channel) }
    }

    /// Puts them where [`Self::advance`] finds them.
    ///
    /// # Safety
    /// Nobody reads the tile of `stage` any more.
    #[inline(always)]
    unsafe fn put(&self, values: values::Raw, stage: u32) {
        if !self.c.makes_values() {
            // SAFETY: the caller's promise.
            unsafe { values::store(values, Self::tile(stage)) };
        }
    }

    /// All pieces of the launch of a row that has some, whose state is in the pool, or where the launch of those before left it.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free; the workspace has the row's units up to the last
    /// piece.
    #[inline(always)]
    pub unsafe fn walk<S: StateElement>(&self, place: &Place) {
        let (c, params) = (self.c, self.params);
        let step = &params.layer.step;
        let places = Places::<K, V, V_LAST>::new(thread_idx_x(), self.first());
        let shape = if V_LAST { [K, V] } else { [V, K] };
        let head = (self.row.hv, shape);
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            if Self::CLUSTERED {
                self.meet_cluster();
            }
            let is_first = thread_idx_x() == 0;
            if is_first {
                self.keep_span();
                self.keep_first_sources();
                open_counter(Self::counter(0));
                open_counter(Self::counter(1));
            }
            let mut j = params.first_piece;
            let first = self.values(&self.span, self.span.piece(j));
            self.expect_values(&self.span, self.span.piece(j + 1));
            let mut s = [0.0; 64];
            if j == 0 {
                let start = place.slots.start::<S>(c, step, head);
                s = places.bring::<S>(c, start, !place.is_fresh());
            }
            // The preparation is done, which may have been under way until now, and the pieces before.
            wait_for_previous();
            if is_first {
                self.copy(j);
                self.copy(j + 1);
            }
            self.put(first, Self::stage(j));
            // Beside the copies.
            s = if j == 0 {
                places.settle(c, s)
            } else {
                load_carried::<K>(self.carried(), thread_idx_x())
            };
            if is_first {
                copy_bulk_wait(Self::counter(j), j / STAGES);
            }
            sync_threads();
            loop {
                let span = Self::kept_span();
                let piece = span.piece(j);
                let is_over = piece.count == 0 && piece.start >= span.count;
                if is_over || j == params.end_piece {
                    break;
                }
                let next = span.piece(j + 1);
                self.expect_values(&span, span.piece(j + 2));
                // Beside products; of two warpgroups the other has them meanwhile.
                let beside = GROUPS_OF_BLOCK == 1 && piece.count > 1;
                let copy = || {
                    if is_first && j > params.first_piece {
                        self.copy(j + 1);
                    }
                };
                if !beside {
                    copy();
                }
                let values;
                if piece.count > 1 {
                    let stage = Self::stage(j);
                    let at = (stage, stage + Self::HEAD);
                    (s, values) = self.advance::<false>(s, (piece, next), at, || {
                        if beside {
                            copy();
                        }
                    });
                } else {
                    let room = Self::room(j, piece.start);
                    // Said anew: there are not registers to keep it.
                    let place = Place::load(c, &params.layer, span.b);
                    self.with_inputs(&place).advance_by_one(
                        &mut s,
                        Self::kept_span,
                        piece.start,
                        room,
                    );
                    values = self.values(&Self::kept_span(), next);
                    // What was stored to the stage is before what is copied to it.
                    fence_shared();
                }
                self.checkpoint::<S>(&places, &s, &Self::kept_span(), piece);
                self.put(values, Self::stage(j + 1));
                j += 1;
                if is_first {
                    copy_bulk_wait(Self::counter(j), j / STAGES);
                }
                // All is there for the next piece, and nobody reads what was for this one.
                sync_threads();
            }
            let span = Self::kept_span();
            if span.piece(j).start < span.count {
                store_carried::<K>(self.carried(), thread_idx_x(), &s);
            } else if c.update_state != 0 {
                let place = Place::load(c, &params.layer, span.b);
                places.store::<S>(c, place.slots.write::<S>(c, step, head), &s);
            }
            if params.has_singles != 0 {
                // There may be another row, for which all is to be free.
                if is_first {
                    close_counter(Self::counter(0));
                    close_counter(Self::counter(1));
                }
                sync_threads();
            }
        }
    }

    /// The same, with what its tokens are convolved from.
    #[inline(always)]
    pub fn with_inputs(&self, place: &Place) -> Self {
        Self {
            inputs: Inputs::new(self.c, self.params, place),
            ..*self
        }
    }

    /// A row of one token, whose place is this. All threads come, which have all of the head.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free.
    #[inline(always)]
    pub unsafe fn walk_single<S: StateElement>(&self, place: &Place) {
        let (c, params, span) = (self.c, self.params, self.span);
        let step = &params.layer.step;
        // SAFETY: the caller's promise; a block's head is its own.
        unsafe {
            if !place.live() {
                self.store_zeros(1);
            } else if const { !V_LAST && K != 96 } {
                let checkpoint = || {
                    let slot = self.checkpoint_slot(&span, span.piece(0));
                    let keeps = is_live(slot, step.write_pool_slots, c.null_slot);
                    keeps.then(|| self.checkpoint_at::<S>(slot))
                };
                let of = (&span, place, self.inputs);
                single_klast::walk::<G, S, K, V>((c, params), of, self.row, checkpoint);
            } else {
                let places = Places::<K, V, V_LAST>::new(thread_idx_x(), self.first());
                let head = (self.row.hv, if V_LAST { [K, V] } else { [V, K] });
                let staged = dynamic_shared_mem().next_multiple_of(128);
                let room = Room {
                    staged,
                    sums: staged + single::staged_bytes(K),
                };
                let start = place.slots.start::<S>(c, step, head);
                let mut s = places.load::<S>(c, start, !place.is_fresh());
                self.advance_by_one(&mut s, || span, 0, room);
                self.checkpoint::<S>(&places, &s, &span, span.piece(0));
                if c.update_state != 0 {
                    places.store::<S>(c, place.slots.write::<S>(c, step, head), &s);
                }
            }
        }
    }

    /// All pieces of a row of at most [`CHUNK`] tokens, of which there are two at most, whose operands are made here, and of
    /// `heads` value heads of its query/key head, this one and the next; two where [`makes_pairs`]. All 256 threads come, of
    /// which those of the block's warpgroups have rows.
    ///
    /// # Safety
    /// As [`Self::walk`]'s, but for the workspace.
    #[inline(always)]
    pub unsafe fn walk_short<S: StateElement>(&self, place: &Place, heads: u32) {
        let (c, params) = (self.c, self.params);
        let step = &params.layer.step;
        let has_rows = thread_idx_x() < Self::THREADS;
        let pieces = Self::pieces(&self.span);
        let shape = if V_LAST { [K, V] } else { [V, K] };
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            if GROUPS_OF_BLOCK * 64 == V && !place.is_fresh() {
                // All of the heads, long before there are registers for them.
                let mut of = 0;
                while of < heads {
                    let head = (self.of_head(of).row.hv, shape);
                    let start = place.slots.start::<S>(c, step, head);
                    let mut byte = 128 * thread_idx_x();
                    while byte < V * K * S::BYTES {
                        prefetch(start.address + byte as u64);
                        byte += 128 * THREADS;
                    }
                    of += 1;
                }
            }
            if thread_idx_x() == 0 {
                self.keep_span();
            }
            let mut j = 0;
            while j < pieces {
                if self.span.piece(j).count > 1 {
                    self.make(j, heads, has_rows);
                    // The scratch is free.
                    sync_threads();
                }
                j += 1;
            }
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
                self.of_head(of).advance_short::<S>(of);
                of += 1;
                if of == heads {
                    return;
                }
                // The tiles are read.
                Self::sync_rows();
                let (next, span) = (self.of_head(of), Self::kept_span());
                let mut j = 0;
                while j < Self::pieces(&span) {
                    if span.piece(j).count > 1 {
                        next.bring_values(j);
                    }
                    j += 1;
                }
                Self::sync_rows();
            }
        }
    }

    /// Pieces of a short row.
    #[inline(always)]
    fn pieces(span: &Span) -> u32 {
        if span.piece(0).count < span.count {
            2
        } else {
            1
        }
    }

    /// The same of the value head so many behind this one.
    #[inline(always)]
    fn of_head(&self, of: u32) -> Self {
        let row = if makes_pairs(G::PER_CHANNEL, GROUPS_OF_BLOCK) {
            self.row.with_head(self.c, self.r() + of)
        } else {
            self.row
        };
        Self {
            c: self.c,
            params: self.params,
            row,
            span: self.span,
            inputs: self.inputs,
            gating: PhantomData,
        }
    }

    /// Where the scratch is that a unit is made in.
    #[inline(always)]
    fn scratch() -> u32 {
        dynamic_shared_mem() + shared_bytes(K, G::PER_CHANNEL, GROUPS_OF_BLOCK, Self::SUM_BYTES)
    }

    /// Operands of piece `j` of the value head so many behind the first of the block.
    #[inline(always)]
    fn head(j: u32, of: u32) -> u32 {
        if makes_pairs(G::PER_CHANNEL, GROUPS_OF_BLOCK) && of > 0 {
            let room = 2 * SCRATCH_BYTES + prepare::SCALE_BYTES;
            (Self::scratch() + room).next_multiple_of(128) + j * Self::HEAD_BYTES
        } else {
            Self::stage(j) + Self::HEAD
        }
    }

    /// Makes the operands of piece `j`, of more than one token, and brings v of the first head.
    ///
    /// # Safety
    /// As [`Self::walk_short`]'s; the stage is free.
    #[inline(always)]
    unsafe fn make(&self, j: u32, heads: u32, has_rows: bool) {
        let (c, params) = (self.c, self.params);
        let (piece, stage, scratch) = (self.span.piece(j), Self::stage(j), Self::scratch());
        let with = (&self.span, piece);
        let mut values = [[0; 4]; 4];
        // SAFETY: the caller's promise.
        unsafe {
            if c.makes_values() {
                self.make_values(&self.span, j);
            } else if has_rows {
                values = self.values(&self.span, piece);
            }
            if G::PER_CHANNEL {
                let at = (stage, scratch, scratch + channels::room_bytes(K));
                if has_rows {
                    self.put(values, stage);
                }
                let (of, head) = ((self.row, Convolved::Here(self.inputs)), Self::head(j, 0));
                channels::give::<K>((c, params), with, of, at, Shared(stage), Shared(head));
            } else {
                let scratches = if makes_pairs(false, GROUPS_OF_BLOCK) {
                    2
                } else {
                    1
                };
                let at = (stage, scratch, scratch + scratches * SCRATCH_BYTES);
                let own = if heads == 2 { thread_idx_x() / 128 } else { 0 };
                let of = (self.row.h, self.of_head(own).row.hv, self.inputs);
                let makes = Makes::of_thread(heads);
                let unit = Unit::new::<K>(c, params, with, of, makes, at);
                if has_rows {
                    self.put(values, stage);
                }
                unit.give_head::<K>(Shared(Self::head(j, own)));
            }
        }
    }

    /// v of piece `j` where the preparation would leave it. All 256 threads come.
    ///
    /// # Safety
    /// The tensors of `params` are live; the tiles are free.
    #[inline(always)]
    unsafe fn make_values(&self, span: &Span, j: u32) {
        let with = (span, span.piece(j), self.inputs);
        let count = 64 * GROUPS_OF_BLOCK;
        let of = Channels {
            hv: self.row.hv,
            first: if V == count { 0 } else { self.row.tile * count },
            count,
        };
        let threads = (thread_idx_x(), THREADS);
        let tiles = Shared(Self::stage(j) + Self::TILES);
        // SAFETY: the caller's promise.
        unsafe { values::make::<K, V>(self.c, self.params, with, of, threads, tiles) };
    }

    /// v of piece `j`, of a block all of whose threads have rows.
    ///
    /// # Safety
    /// As [`Self::make_values`]'s.
    #[inline(always)]
    unsafe fn bring_values(&self, j: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            let span = Self::kept_span();
            if self.c.makes_values() {
                self.make_values(&span, j);
            } else {
                self.put(self.values(&span, span.piece(j)), Self::stage(j));
            }
        }
    }

    /// From state to state through the pieces of a short row, of the value head so many behind the first of the block.
    ///
    /// # Safety
    /// As [`Self::walk_short`]'s; the operands and v are there.
    #[inline(always)]
    unsafe fn advance_short<S: StateElement>(&self, of: u32) {
        let (c, layer) = (self.c, &self.params.layer);
        let shape = if V_LAST { [K, V] } else { [V, K] };
        let head = (self.row.hv, shape);
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            let places = Places::<K, V, V_LAST>::new(thread_idx_x(), self.first());
            let place = Place::load(c, layer, Self::kept_span().b);
            let start = place.slots.start::<S>(c, &layer.step, head);
            let mut s = places.load::<S>(c, start, !place.is_fresh());
            let mut j = 0;
            loop {
                let span = Self::kept_span();
                if j == Self::pieces(&span) {
                    break;
                }
                let piece = span.piece(j);
                if c.has_norm != 0 {
                    // The sums of the last piece are read.
                    Self::sync_rows();
                }
                if piece.count > 1 {
                    // v of both pieces is there.
                    let next = Piece { start: 0, count: 0 };
                    let at = (Self::stage(j), Self::head(j, of));
                    (s, _) = self.advance::<true>(s, (piece, next), at, || {});
                } else {
                    self.advance_by_one(
                        &mut s,
                        Self::kept_span,
                        piece.start,
                        Self::room(j, piece.start),
                    );
                }
                self.checkpoint::<S>(&places, &s, &Self::kept_span(), piece);
                j += 1;
            }
            if c.update_state != 0 {
                let place = Place::load(c, layer, Self::kept_span().b);
                places.store::<S>(c, place.slots.write::<S>(c, &layer.step, head), &s);
            }
        }
    }

    /// Waits for all threads that have rows.
    #[inline(always)]
    fn sync_rows() {
        if Self::THREADS == THREADS {
            sync_threads();
        } else {
            sync_barrier(output::BLOCK, Self::THREADS);
        }
    }

    /// Where the lower halves of o of a unit are left, of this warpgroup's channels.
    #[inline(always)]
    fn lows(&self, span: &Span, piece: Piece) -> u64 {
        let (unit, of) = (span.unit_of(piece), (self.row.h, self.r()));
        let of = Operands::new::<K, V>(self.c, self.params, G::PER_CHANNEL, unit, of);
        of.values + (self.first() / 64 * TILE_BYTES) as u64
    }

    /// The state after a piece of more than one token, and v of the `next` one; does `beside` while nothing else can be done. Of
    /// a row that is `SHORT` o is normed here, of others behind the launch.
    ///
    /// # Safety
    /// Images and v are in `stage`, the other operands at `head`.
    #[inline(always)]
    unsafe fn advance<const SHORT: bool>(
        &self,
        mut s: [f32; 64],
        (piece, next): (Piece, Piece),
        (stage, head): (u32, u32),
        beside: impl FnOnce(),
    ) -> ([f32; 64], values::Raw) {
        let (c, params) = (self.c, self.params);
        let tile = Self::tile(stage);
        let factors = head + FACTORS + lane_id() % 4 * 8;
        // SAFETY: the caller's promise.
        unsafe {
            let factor = |kind: u32, j: usize| {
                load_shared_b64(factors + kind * FACTOR_BYTES + 32 * j as u32).map(f32::from_bits)
            };
            let a: [u32; 32] = array::from_fn(|i| pack_f16x2(s[2 * i], s[2 * i + 1]));
            let products = warpgroup::by_both::<K>(&a, stage);
            beside();
            let (of_keys, of_queries) = warpgroup::first(products);
            if G::PER_CHANNEL {
                let mut j = 0;
                while j < K as usize / 8 {
                    let [x, y] = factor(3, j);
                    s[4 * j] *= x;
                    s[4 * j + 1] *= y;
                    s[4 * j + 2] *= x;
                    s[4 * j + 3] *= y;
                    j += 1;
                }
            } else {
                let decay = f32::from_bits(load_shared_b32(head + FACTORS + 3 * FACTOR_BYTES));
                let mut i = 0;
                while i < K as usize / 2 {
                    s[i] *= decay;
                    i += 1;
                }
            }
            // Beside the products of queries.
            let mut r = [0; 16];
            rest_of(&mut r, 0, &values::of_tile(c, tile, 0), &of_keys, factors);
            rest_of(&mut r, 4, &values::of_tile(c, tile, 32), &of_keys, factors);
            let values = self.values(&Self::kept_span(), next);
            let (delta, of_queries) = warpgroup::by_triangle(&r, head, of_queries);
            let (mut plain, mut decayed, mut o) = ([0; 16], [0; 16], [0.0; 32]);
            let mut j = 0;
            while j < 8 {
                let ([x, y], [z, w]) = (factor(2, j), factor(1, j));
                let at = 4 * j;
                plain[2 * j] = pack_f16x2(delta[at], delta[at + 1]);
                plain[2 * j + 1] = pack_f16x2(delta[at + 2], delta[at + 3]);
                decayed[2 * j] = pack_f16x2(delta[at] * x, delta[at + 1] * y);
                decayed[2 * j + 1] = pack_f16x2(delta[at + 2] * x, delta[at + 3] * y);
                o[at] = of_queries[at] * z;
                o[at + 1] = of_queries[at + 1] * w;
                o[at + 2] = of_queries[at + 2] * z;
                o[at + 3] = of_queries[at + 3] * w;
                j += 1;
            }
            let (state, products) = ((&decayed, stage + Self::ADDED), (&plain, head + P));
            let s = if G::PER_CHANNEL {
                warpgroup::add::<K, 64>(s, state, &mut o, products)
            } else {
                warpgroup::add::<K, 128>(s, state, &mut o, products)
            };
            // Beside the products that are added to the state.
            let (of, barrier) = ((self.row.hv, self.first()), GROUPS + thread_idx_x() / 128);
            let span = Self::kept_span();
            if c.has_norm == 0 {
                output::store(c, params, (&span, piece), of, &o, (tile, barrier));
            } else if SHORT {
                let sums = if Self::CLUSTERED {
                    Self::sums_of_cluster(stage != Self::stage(0))
                } else {
                    Self::sums()
                };
                let at = (tile, barrier, sums);
                output::store_normed::<V, GROUPS_OF_BLOCK>(c, params, (&span, piece), of, &o, at);
            } else {
                let lows = self.lows(&span, piece);
                output::leave(c, params, (&span, piece), of, &o, (tile, barrier), lows);
            }
            (warpgroup::settle::<K>(s), values)
        }
    }

    /// That of a piece that is token `t`, whose stage is free.
    #[inline(always)]
    fn room(j: u32, t: u32) -> Room {
        Room {
            staged: Self::stage(j),
            sums: if Self::CLUSTERED {
                // A row has one such piece at its begin, and one at its end.
                Self::sums_of_cluster(t > 0)
            } else {
                Self::sums()
            },
        }
    }

    /// A piece that is token `t` of the row whose tokens `span` says, once more each time.
    ///
    /// # Safety
    /// The tensors of `params` are live; the room is free.
    #[inline(always)]
    unsafe fn advance_by_one(
        &self,
        s: &mut [f32; 64],
        span: impl Fn() -> Span + Copy,
        t: u32,
        room: Room,
    ) {
        let (c, params) = (self.c, self.params);
        let row = anew(self.first() + thread_idx_x() / 32 % 4 * 16 + lane_id() / 4);
        // SAFETY: the caller's promise; one lane of four stores a row's o.
        unsafe {
            let own = span();
            let (with, of) = ((c, params), (&own, self.inputs));
            if c.taps != 0 {
                single::stage::<K>(with, of, (self.row.h, t), room.staged, Self::THREADS);
                Self::sync_rows();
            }
            let at = (row, room.staged);
            let o = single::advance::<G, K, V, V_LAST>(with, of, self.row, t, s, at);
            let o = self.normed(o, span, (t, row), room.sums);
            if lane_id().is_multiple_of(4) {
                let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
                let head = self.row.hv * c.o_head + row;
                let at = |row| own.at(base, strides, t, head + row, c.o_element);
                elements::store([o[0]], at(0), c.o_element, false);
                elements::store([o[1]], at(8), c.o_element, false);
            }
        }
    }

    /// o of rows r and r + 8 of a token, normed where there is a norm: squares are added neighbours first, as for one token.
    ///
    /// # Safety
    /// The tensors of `params` are live; `sums` are free.
    #[inline(always)]
    unsafe fn normed(
        &self,
        o: [f32; 2],
        span: impl Fn() -> Span,
        (t, row): (u32, u32),
        sums: u32,
    ) -> [f32; 2] {
        let (c, params) = (self.c, self.params);
        if c.has_norm == 0 {
            return o;
        }
        let squares = o.map(|o| o * o);
        let [a, b] = butterfly_sum_of_rows(squares);
        let warp = thread_idx_x() / 32;
        let of_block = 4 * GROUPS_OF_BLOCK;
        // SAFETY: the caller's promise; a warp has a word, which nobody reads any more behind the barrier, nor in a cluster.
        unsafe {
            if Self::CLUSTERED {
                let place = sums + 4 * (self.row.tile * of_block + warp);
                if lane_id() < Self::CLUSTER {
                    store_shared_b32_at(place, lane_id(), (a + b).to_bits());
                }
                cluster::arrive();
                cluster::wait();
            } else {
                Self::sync_rows();
                if lane_id() == 0 {
                    store_shared_b32(sums + 4 * warp, (a + b).to_bits());
                }
                Self::sync_rows();
            }
            let sum = sum_of(sums, Self::CLUSTER * of_block);
            let scale = |o: f32, channel: u32| {
                let strides = (params.z_row, c.z_token);
                let (z, element) = (params.layer.z, c.z_element);
                let channel_of_token = self.row.hv * c.z_head + channel;
                let z = span().at(z, strides, t, channel_of_token, element);
                let [z] = elements::load_one(z, element).to_f32(element);
                let element = c.norm_weight_element;
                let at = (channel * elements::bytes_of(element)) as u64;
                let weight = elements::load_one(params.layer.norm_weight + at, element);
                let [weight] = weight.to_f32(element);
                normed(c, o, (sum, V), z, weight)
            };
            [scale(o[0], row), scale(o[1], row + 8)]
        }
    }

    /// Stores the state after a piece that ends where a checkpoint is due.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    unsafe fn checkpoint<S: StateElement>(
        &self,
        places: &Places<K, V, V_LAST>,
        s: &[f32; 64],
        span: &Span,
        piece: Piece,
    ) {
        // SAFETY: the caller's promise.
        let slot = unsafe { self.checkpoint_slot(span, piece) };
        if is_live(
            slot,
            self.params.layer.step.write_pool_slots,
            self.c.null_slot,
        ) {
            // SAFETY: the caller's promise.
            unsafe { places.store::<S>(self.c, self.checkpoint_at::<S>(slot), s) };
        }
    }

    /// The slot that the state after a piece is to be stored to; one that is not live where no checkpoint is due.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    unsafe fn checkpoint_slot(&self, span: &Span, piece: Piece) -> u64 {
        let (c, params) = (self.c, self.params);
        if c.checkpoint_every == 0 {
            return u64::MAX;
        }
        let every = c.checkpoint_every as u64;
        let end = span.position + (piece.start + piece.count) as u64;
        if !end.is_multiple_of(CHUNK as u64) || !end.is_multiple_of(every) {
            return u64::MAX;
        }
        let number = end / every - span.position / every - 1;
        if number >= params.checkpoints as u64 {
            return u64::MAX;
        }
        let at = span.b as u64 * params.checkpoint_slots_row as u64 + number;
        // SAFETY: the caller's promise.
        unsafe { slot_of(params.checkpoint_slots, c.checkpoint_index, at, u64::MAX) }
    }

    /// The block's head of a checkpoint's state, in a slot that is live.
    #[inline(always)]
    fn checkpoint_at<S: StateElement>(&self, slot: u64) -> Head {
        let (c, pool) = (self.c, self.params.layer.step.write_pool);
        let shape = if V_LAST { [K, V] } else { [V, K] };
        Head::of_slot::<S>(
            pool,
            slot,
            c.write_slot,
            (self.row.hv, shape),
            c.wide_state != 0,
        )
    }
}

/// Sums over the 8 rows that lanes have, neighbours first.
#[inline(always)]
fn butterfly_sum_of_rows(mut squares: [f32; 2]) -> [f32; 2] {
    let mut mask = 4;
    while mask < 32 {
        let mut i = 0;
        while i < 2 {
            squares[i] += warp_shuffle_xor(squares[i], mask);
            i += 1;
        }
        mask *= 2;
    }
    squares
}

/// R, rounded, of four times 8 tokens, those from 8 `first` on, whose v this is.
///
/// # Safety
/// `factors` are this lane's, in shared memory.
#[inline(always)]
unsafe fn rest_of(
    r: &mut [u32; 16],
    first: usize,
    v: &[f32; 16],
    products: &[f32; 32],
    factors: u32,
) {
    let mut i = 0;
    while i < 4 {
        let j = first + i;
        // SAFETY: the caller's promise.
        let [x, y] = unsafe { load_shared_b64(factors + 32 * j as u32) }.map(f32::from_bits);
        let [a, b, c, d] = [v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]];
        let u = [
            products[4 * j],
            products[4 * j + 1],
            products[4 * j + 2],
            products[4 * j + 3],
        ];
        r[2 * j] = pack_f16x2(fma(-u[0], x, a), fma(-u[1], y, b));
        r[2 * j + 1] = pack_f16x2(fma(-u[2], x, c), fma(-u[3], y, d));
        i += 1;
    }
}
