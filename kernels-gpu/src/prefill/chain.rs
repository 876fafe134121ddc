//! From state to state through the pieces of a row. With S of a warpgroup's 64 rows in registers, for the tokens t of a piece
//! and its last one, C:
//!     R = Vᵀ − (S k̂ᵀ)·2^G_t    δ = R Tᵀ    o = (S q̂ᵀ)·2^G_t + δ Pᵀ    S ← 2^G_C S + (δ·2^(G_C − G_t)) k̂

use core::array;

use super::convolution::Inputs;
use super::output;
use super::prepare::{Makes, SCRATCH_BYTES, Shared, THREADS, Unit};
use super::rows::{Piece, Span};
use super::single;
use super::state::Places;
use super::values::{self, TILE_BYTES, tiles_bytes};
use super::{CHUNK, FACTOR_BYTES, FACTORS, HEAD_BYTES, P, anew, image_bytes};
use crate::device::float::{fma, pack_f16x2};
use crate::device::global::{prefetch, prefetch_bulk};
use crate::device::shared::{
    COUNTER_BYTES, copy_bulk, copy_bulk_commit, copy_bulk_wait, dynamic_shared_mem,
    load_shared_b32, load_shared_b64, open_counter, store_shared_b32,
};
use crate::device::thread::{sync_barrier, sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::device::warpgroup::{self, fence_shared};
use crate::layer::Place;
use crate::layer::norm::{normed, sum_of};
use crate::math::elements;
use crate::row::Row;
use crate::state::{Head, StateElement, is_live, slot_of};
use crate::step::{PrefillParams, StepConstants};

/// Barrier of the first warpgroup; the others' follow.
pub const GROUPS: u32 = 2;
/// Of the norm: squares of every token, for each warpgroup.
const SUM_BYTES: u32 = 512;
/// Pieces in shared memory.
const STAGES: u32 = 2;

/// Shared memory of a stage: the image, the head's operands, and a tile for each warpgroup.
pub const fn stage_bytes(k: u32, groups: u32) -> u32 {
    tiles_at(k) + groups * TILE_BYTES
}

/// Shared memory of a block.
pub const fn shared_bytes(k: u32, groups: u32) -> u32 {
    128 + STAGES * stage_bytes(k, groups) + SUM_BYTES + STAGES * COUNTER_BYTES
}

/// Byte of the head's operands in a stage.
const fn head_at(k: u32) -> u32 {
    image_bytes(k)
}

/// Byte of the tiles, behind the head's operands as they are in a workspace.
const fn tiles_at(k: u32) -> u32 {
    head_at(k) + HEAD_BYTES
}

/// A row's walk, of a block that has `64 · GROUPS` rows of a value head's state.
pub struct Chain<'a, const K: u32, const V: u32, const V_LAST: bool, const GROUPS_OF_BLOCK: u32> {
    /// Of the layer.
    pub c: &'a StepConstants,
    /// Of the launch.
    pub params: &'a PrefillParams,
    /// What the block works on.
    pub row: Row,
    /// The row's tokens.
    pub span: Span,
    /// What they are convolved from.
    pub inputs: Inputs,
}

impl<const K: u32, const V: u32, const V_LAST: bool, const GROUPS_OF_BLOCK: u32>
    Chain<'_, K, V, V_LAST, GROUPS_OF_BLOCK>
{
    const THREADS: u32 = 128 * GROUPS_OF_BLOCK;

    /// First row of the state that this thread's warpgroup has.
    #[inline(always)]
    fn first(&self) -> u32 {
        64 * (self.row.tile * GROUPS_OF_BLOCK + thread_idx_x() / 128)
    }

    #[inline(always)]
    fn stage(j: u32) -> u32 {
        // The base is a multiple of 16.
        let base = dynamic_shared_mem().next_multiple_of(128);
        base + j % STAGES * stage_bytes(K, GROUPS_OF_BLOCK)
    }

    /// Words of the norm, behind the stages.
    #[inline(always)]
    fn sums() -> u32 {
        Self::stage(0) + STAGES * stage_bytes(K, GROUPS_OF_BLOCK)
    }

    /// Counter of the copies to the stage of piece `j`.
    #[inline(always)]
    fn counter(j: u32) -> u32 {
        Self::sums() + SUM_BYTES + j % STAGES * COUNTER_BYTES
    }

    #[inline(always)]
    fn tile(stage: u32) -> u32 {
        stage + tiles_at(K) + thread_idx_x() / 128 * TILE_BYTES
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

    /// Zeros for the tokens of a row that has no place in the pool.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    pub unsafe fn store_zeros(&self) {
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

    /// Starts to copy what the preparation left of piece `j` to its stage; nothing behind the last. For one thread.
    ///
    /// # Safety
    /// The tensors of `params` are live; nobody reads the stage any more.
    #[inline(always)]
    unsafe fn copy(&self, j: u32) {
        let (c, params) = (self.c, self.params);
        let (stage, counter) = (Self::stage(j), Self::counter(j));
        // SAFETY: the caller's promise; the thread opened the counter.
        unsafe {
            if self.span.piece(j).count > 1 {
                let of_head = HEAD_BYTES + tiles_bytes(c, V);
                let unit = image_bytes(K) + of_head * c.ratio;
                let first = (self.span.unit(j) * c.h as u64 + self.row.h as u64) * unit as u64;
                let image = params.workspace + first;
                let head = image + (image_bytes(K) + self.r() * of_head) as u64;
                if self.r() == 0 && self.row.tile == 0 && self.span.piece(j + 2).count > 1 {
                    // What follows the piece behind the next: bytes of this unit and its heads are neighbours.
                    let bytes = unit * c.h;
                    prefetch_bulk(image + 2 * bytes as u64, unit);
                }
                copy_bulk(stage, image, image_bytes(K), counter);
                copy_bulk(stage + head_at(K), head, HEAD_BYTES, counter);
                if c.makes_values() {
                    let bytes = GROUPS_OF_BLOCK * TILE_BYTES;
                    let tiles = head + (HEAD_BYTES + self.row.tile * bytes) as u64;
                    copy_bulk(stage + tiles_at(K), tiles, bytes, counter);
                }
            }
            copy_bulk_commit(counter);
        }
    }

    /// Says that v of `piece` will be wanted.
    #[inline(always)]
    fn expect_values(&self, piece: Piece) {
        if !self.c.makes_values() {
            let channel = self.row.hv * self.c.v_head + self.first();
            values::prefetch(self.c, self.params, (&self.span, piece), channel);
        }
    }

    /// v of `piece`, where the preparation does not leave it.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    unsafe fn values(&self, piece: Piece) -> values::Raw {
        if self.c.makes_values() {
            return [[0; 4]; 4];
        }
        let channel = self.row.hv * self.c.v_head + self.first();
        // SAFETY: the caller's promise.
        unsafe { values::load(self.c, self.params, (&self.span, piece), channel) }
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

    /// All pieces of a row, whose state is in the pool.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free; the workspace has the row's units.
    #[inline(always)]
    pub unsafe fn walk<S: StateElement>(&self, place: &Place) {
        let (c, params) = (self.c, self.params);
        let step = &params.layer.step;
        let places = Places::<K, V, V_LAST>::new(self.first());
        let shape = if V_LAST { [K, V] } else { [V, K] };
        let head = (self.row.hv, shape);
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            let is_first = thread_idx_x() == 0;
            if is_first {
                open_counter(Self::counter(0));
                open_counter(Self::counter(1));
                self.copy(0);
                self.copy(1);
            }
            let first = self.values(self.span.piece(0));
            self.expect_values(self.span.piece(1));
            let start = place.slots.start::<S>(c, step, head);
            let mut s = places.load::<S>(start, !place.is_fresh());
            self.put(first, Self::stage(0));
            if is_first {
                copy_bulk_wait(Self::counter(0), 0);
            }
            sync_threads();
            let mut j = 0;
            loop {
                let piece = here(self.span.piece(j));
                if piece.count == 0 && piece.start >= self.span.count {
                    break;
                }
                if is_first && j > 0 {
                    self.copy(j + 1);
                }
                self.expect_values(here(self.span.piece(j + 2)));
                let next = here(self.span.piece(j + 1));
                let values;
                if piece.count > 1 {
                    (s, values) = self.advance(s, (piece, next), Self::stage(j));
                } else {
                    self.advance_by_one(&mut s, piece.start, Self::stage(j));
                    values = self.values(next);
                    // What was stored to the stage is before what is copied to it.
                    fence_shared();
                }
                self.checkpoint::<S>(&places, &s, piece);
                self.put(values, Self::stage(j + 1));
                j += 1;
                if is_first {
                    copy_bulk_wait(Self::counter(j), j / STAGES);
                }
                // All is there for the next piece, and nobody reads what was for this one.
                sync_threads();
            }
            if c.update_state != 0 {
                places.store::<S>(place.slots.write::<S>(c, step, head), &s);
            }
        }
    }

    /// All pieces of a row of at most [`CHUNK`] tokens, of which there are two at most, whose operands are made here. All
    /// 256 threads come, of which those of the block's warpgroups have rows; `scratch` is in shared memory.
    ///
    /// # Safety
    /// As [`Self::walk`]'s, but for the workspace.
    #[inline(always)]
    pub unsafe fn walk_short<S: StateElement>(&self, place: &Place, scratch: u32) {
        let (c, params) = (self.c, self.params);
        let step = &params.layer.step;
        let has_rows = thread_idx_x() < Self::THREADS;
        let pieces = if self.span.piece(0).count < self.span.count {
            2
        } else {
            1
        };
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            let places = Places::<K, V, V_LAST>::new(self.first());
            let shape = if V_LAST { [K, V] } else { [V, K] };
            let head = (self.row.hv, shape);
            let start = place.slots.start::<S>(c, step, head);
            if GROUPS_OF_BLOCK * 64 == V && !place.is_fresh() {
                // All of the head, long before there are registers for it.
                let mut byte = 128 * thread_idx_x();
                while byte < V * K * S::BYTES {
                    prefetch(start.address + byte as u64);
                    byte += 128 * THREADS;
                }
            }
            let mut j = 0;
            while j < pieces {
                let (piece, stage) = (self.span.piece(j), Self::stage(j));
                if piece.count > 1 {
                    let with = (&self.span, piece);
                    let mut values = [[0; 4]; 4];
                    if c.makes_values() {
                        let with = (&self.span, piece, self.inputs);
                        let (of, threads) = ((self.row.hv, V), (thread_idx_x(), THREADS));
                        values::make(c, params, with, of, threads, Shared(stage + tiles_at(K)));
                    } else if has_rows {
                        values = self.values(piece);
                    }
                    let at = (stage, scratch, scratch + SCRATCH_BYTES);
                    let of = (self.row.h, self.row.hv, self.inputs);
                    let makes = Makes::of_thread(1);
                    let unit = Unit::new::<K>(c, params, with, of, makes, at, |_, _| {});
                    if has_rows {
                        self.put(values, stage);
                    }
                    unit.give_head::<K>(Shared(stage + head_at(K)));
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
            let mut s = places.load::<S>(start, !place.is_fresh());
            j = 0;
            while j < pieces {
                let piece = self.span.piece(j);
                if c.has_norm != 0 {
                    // The sums of the last piece are read.
                    sync_barrier(output::BLOCK, Self::THREADS);
                }
                if piece.count > 1 {
                    // v of both pieces is there.
                    let next = Piece { start: 0, count: 0 };
                    (s, _) = self.advance(s, (piece, next), Self::stage(j));
                } else {
                    self.advance_by_one(&mut s, piece.start, Self::stage(j));
                }
                self.checkpoint::<S>(&places, &s, piece);
                j += 1;
            }
            if c.update_state != 0 {
                places.store::<S>(place.slots.write::<S>(c, step, head), &s);
            }
        }
    }

    /// The state after a piece of more than one token, and v of the `next` one.
    ///
    /// # Safety
    /// Its operands are in `stage`.
    #[inline(always)]
    unsafe fn advance(
        &self,
        mut s: [f32; 64],
        (piece, next): (Piece, Piece),
        stage: u32,
    ) -> ([f32; 64], values::Raw) {
        let (c, params) = (self.c, self.params);
        let (head, tile) = (stage + head_at(K), Self::tile(stage));
        let factors = head + FACTORS + lane_id() % 4 * 8;
        // SAFETY: the caller's promise.
        unsafe {
            let factor = |kind: u32, j: usize| {
                load_shared_b64(factors + kind * FACTOR_BYTES + 32 * j as u32).map(f32::from_bits)
            };
            let a: [u32; 32] = array::from_fn(|i| pack_f16x2(s[2 * i], s[2 * i + 1]));
            let (of_keys, of_queries) = warpgroup::by_both::<K>(&a, stage);
            // Beside the products of queries.
            let mut r = [0; 16];
            rest_of(&mut r, 0, &values::of_tile(c, tile, 0), &of_keys, factors);
            rest_of(&mut r, 4, &values::of_tile(c, tile, 32), &of_keys, factors);
            let decay = f32::from_bits(load_shared_b32(head + FACTORS + 3 * FACTOR_BYTES));
            let mut i = 0;
            while i < K as usize / 2 {
                s[i] *= decay;
                i += 1;
            }
            let values = self.values(next);
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
            let s = warpgroup::add::<K>(s, (&decayed, stage), &mut o, (&plain, head + P));
            // Beside the products that are added to the state.
            let (of, barrier) = ((self.row.hv, self.first()), GROUPS + thread_idx_x() / 128);
            let at = (tile, barrier, Self::sums());
            output::store::<V>(c, params, (&self.span, piece), of, &o, at);
            (warpgroup::settle::<K>(s), values)
        }
    }

    /// A piece that is token `t`; what would be its stage is free.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    unsafe fn advance_by_one(&self, s: &mut [f32; 64], t: u32, stage: u32) {
        let (c, params) = (self.c, self.params);
        let row = anew(self.first() + thread_idx_x() / 32 % 4 * 16 + lane_id() / 4);
        // SAFETY: the caller's promise; one lane of four stores a row's o.
        unsafe {
            let (with, of) = ((c, params), (&self.span, self.inputs));
            if c.taps != 0 {
                single::stage::<K>(with, of, (self.row.h, t), stage, Self::THREADS);
                sync_barrier(output::BLOCK, Self::THREADS);
            }
            let o = single::advance::<K, V_LAST>(with, of, self.row, t, s, (row, stage));
            let o = self.normed(o, t, row);
            if lane_id().is_multiple_of(4) {
                let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
                let head = self.row.hv * c.o_head + row;
                let at = |row| self.span.at(base, strides, t, head + row, c.o_element);
                elements::store([o[0]], at(0), c.o_element, false);
                elements::store([o[1]], at(8), c.o_element, false);
            }
        }
    }

    /// o of rows r and r + 8 of a token, normed where there is a norm: squares are added neighbours first, as for one token.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[inline(always)]
    unsafe fn normed(&self, o: [f32; 2], t: u32, row: u32) -> [f32; 2] {
        let (c, params) = (self.c, self.params);
        if c.has_norm == 0 {
            return o;
        }
        let squares = o.map(|o| o * o);
        let [a, b] = butterfly_sum_of_rows(squares);
        let (warp, sums) = (thread_idx_x() / 32, Self::sums());
        let count = 4 * GROUPS_OF_BLOCK;
        // SAFETY: the caller's promise; a warp has a word, which nobody reads any more behind the barrier.
        unsafe {
            sync_barrier(output::BLOCK, Self::THREADS);
            if lane_id() == 0 {
                store_shared_b32(sums + 4 * warp, (a + b).to_bits());
            }
            sync_barrier(output::BLOCK, Self::THREADS);
            let sum = sum_of(sums, count);
            let scale = |o: f32, channel: u32| {
                let strides = (params.z_row, c.z_token);
                let (z, element) = (params.layer.z, c.z_element);
                let z = self
                    .span
                    .at(z, strides, t, self.row.hv * c.z_head + channel, element);
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
        piece: Piece,
    ) {
        let (c, params) = (self.c, self.params);
        if c.checkpoint_every == 0 {
            return;
        }
        let every = c.checkpoint_every as u64;
        let end = self.span.position + (piece.start + piece.count) as u64;
        if !end.is_multiple_of(CHUNK as u64) || !end.is_multiple_of(every) {
            return;
        }
        let number = end / every - self.span.position / every - 1;
        if number >= params.checkpoints as u64 {
            return;
        }
        let at = self.span.b as u64 * params.checkpoint_slots_row as u64 + number;
        let step = &params.layer.step;
        // SAFETY: the caller's promise.
        unsafe {
            let slot = slot_of(params.checkpoint_slots, c.checkpoint_index, at, u64::MAX);
            if is_live(slot, step.write_pool_slots, c.null_slot) {
                let shape = if V_LAST { [K, V] } else { [V, K] };
                let wide = c.wide_state != 0;
                let head = (self.row.hv, shape);
                let head = Head::of_slot::<S>(step.write_pool, slot, c.write_slot, head, wide);
                places.store::<S>(head, s);
            }
        }
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

/// The same piece, of which the compiler does not know how it follows from the one before: else it carries the addresses of
/// all that a thread loads of a piece along, in registers that there are not. All lanes of the warp come.
#[inline(always)]
fn here(piece: Piece) -> Piece {
    Piece {
        start: anew(piece.start),
        count: piece.count,
    }
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
