//! Tokens one by one, in f32: a piece of one token, and one whose factors f16 does not hold.

use super::super::convolution::Inputs;
use super::super::norm;
use super::super::range;
use super::super::rows::Span;
use super::super::{CHUNK, anew, single, single_klast};
use super::{Chain, Room, STAGES};
use crate::device::cluster::{self, store_shared_b32_at};
use crate::device::global::{store_b16, store_b32};
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_barrier, thread_idx_x};
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::layer::Place;
use crate::layer::norm::{normed, squares, sum_of};
use crate::math::elements;
use crate::math::range::{SMALL, times};
use crate::recurrent::Gating;
use crate::state::{StateElement, is_live};

impl<G: Gating, const K: u32, const V: u32, const V_LAST: bool, const GROUPS_OF_BLOCK: u32>
    Chain<'_, G, K, V, V_LAST, GROUPS_OF_BLOCK>
{
    /// A row of one token, whose place is this. All threads come, which have all of the head.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn walk_single<S: StateElement>(&self, place: &Place) {
        let (c, params, span) = (self.c, self.params, self.span);
        let step = &params.layer.step;
        // SAFETY: the caller's promise; a block's head is its own.
        unsafe {
            if !place.live() {
                self.store_zeros(1);
            } else if const { !V_LAST && K != 96 } {
                let checkpoint = || {
                    let slot = self.checkpoint_slot::<true>(&span, span.piece(0));
                    let keeps = is_live(slot, step.write_pool_slots, c.null_slot);
                    keeps.then(|| self.checkpoint_at::<S>(slot))
                };
                let of = (&span, place, self.inputs);
                single_klast::walk::<G, S, K, V>((c, params), of, self.row, checkpoint);
            } else {
                let places = self.places();
                let head = (self.row.hv, if V_LAST { [K, V] } else { [V, K] });
                let staged = dynamic_shared_mem().next_multiple_of(128);
                let room = Room {
                    staged,
                    sums: staged + single::staged_bytes(K),
                };
                let start = place.slots.start::<S>(c, step, head);
                let mut s = places.load::<S>(c, start, !place.is_fresh());
                self.advance_by_one(&mut s, || span, 0, room);
                self.checkpoint::<S, true>(&s, &span, span.piece(0));
                if c.update_state != 0 {
                    places.store::<S>(c, place.slots.write::<S>(c, step, head), &s);
                }
            }
        }
    }

    /// Works the tokens of piece `j`, behind `pieces` of the block, one by one, where f16 does not hold them from the token on
    /// that the warp has told; and stores their o. All threads of the warpgroup come: the warps that have nothing to work convolve with
    /// the others.
    ///
    /// # Safety
    /// The tensors of `params` are live; nobody reads the warpgroup's tile; o of the tokens before is stored, or
    /// [stashed](Self::stash) where a `SHORT` row is normed.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn advance_tokens<const SHORT: bool>(
        &self,
        s: &mut [f32; 64],
        (j, pieces): (u32, u32),
        tile: u32,
    ) {
        let (c, params) = (self.c, self.params);
        // SAFETY: the caller's promise; what is staged is there behind a barrier, and read before the next.
        unsafe {
            let mut t = 0;
            loop {
                let span = Self::kept_span();
                let inputs = if SHORT {
                    self.inputs
                } else {
                    // Said anew: there are not registers to keep it.
                    let place = Place::load(c, &params.layer, span.b);
                    Inputs::new(c, params, &place)
                };
                let piece = span.piece(j);
                let (with, of, token) = ((c, params), (&span, inputs), piece.start + t);
                if c.taps != 0 {
                    let threads = (thread_idx_x() % 128, 128);
                    single::stage::<K>(with, of, (self.row.h, token), tile, threads);
                    sync_barrier(Self::barrier(), 128);
                }
                // Read anew, for the same reason.
                let first = if piece.count == 1 {
                    0
                } else {
                    Self::told(anew(pieces) % STAGES)
                };
                if first < CHUNK {
                    let at = (self.own_row(), tile);
                    let o = single::advance::<G, K, V, V_LAST>(with, of, self.row, token, s, at);
                    if piece.count == 1 {
                        self.store_token(o, Self::kept_span, token, Self::sums_of_token(token));
                    } else if t >= first {
                        self.store_one_of::<SHORT>(o, (t, token), j);
                    }
                }
                t += 1;
                if t >= Self::kept_span().piece(j).count {
                    break;
                }
                if c.taps != 0 {
                    sync_barrier(Self::barrier(), 128);
                }
            }
            if SHORT && c.has_norm != 0 && Self::kept_span().piece(j).count > 1 {
                let mut o = Self::stashed();
                self.store_output::<SHORT>(&mut o, (j, pieces), tile);
            }
        }
    }

    /// Where the sums of the norm of a piece are that is token `t`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sums_of_token(t: u32) -> u32 {
        if Self::CLUSTERED {
            // A row has one such piece at its begin, and one at its end.
            Self::sums_of_cluster(t > 0)
        } else {
            Self::sums()
        }
    }

    /// Where, of a short row, this thread leaves an o of its own, four bytes each.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stash_of(of: u32) -> u32 {
        let scales = 4 * GROUPS_OF_BLOCK * norm::OF_WARP;
        Self::scratch() + scales + 4 * (of * Self::THREADS + thread_idx_x())
    }

    /// Leaves the thread's o of a piece in the scratch, while its tokens are worked one by one.
    ///
    /// # Safety
    /// The row is short, and its operands are made.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn stash(o: &[f32; 32]) {
        let base = Self::stash_of(0);
        let mut i = 0;
        while i < 32 {
            // SAFETY: the caller's promise; a thread has its own words.
            unsafe { store_shared_b32(base + 4 * Self::THREADS * i as u32, o[i].to_bits()) };
            i += 1;
        }
    }

    /// What [`Self::stash`] left, and what has taken its place.
    ///
    /// # Safety
    /// As [`Self::stash`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn stashed() -> [f32; 32] {
        let base = Self::stash_of(0);
        let mut o = [0.0; 32];
        let mut i = 0;
        while i < 32 {
            // SAFETY: the caller's promise.
            let word = unsafe { load_shared_b32(base + 4 * Self::THREADS * i as u32) };
            o[i] = f32::from_bits(word);
            i += 1;
        }
        o
    }

    /// Stores o of token `t` of piece `j` that has several, which is `token` of the row: as it is, or as a norm wants it. All
    /// lanes of the warp come.
    ///
    /// # Safety
    /// As [`Self::advance_tokens`]'.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_one_of<const SHORT: bool>(&self, o: [f32; 2], (t, token): (u32, u32), j: u32) {
        let c = self.c;
        let mut o = o;
        // SAFETY: the caller's promise; one lane of four has a row's o, and the same stores it.
        unsafe {
            if SHORT && c.has_norm != 0 {
                if anew(lane_id()) % 4 == t % 8 / 2 {
                    let of = 4 * (t / 8) + t % 2;
                    store_shared_b32(Self::stash_of(of), o[0].to_bits());
                    store_shared_b32(Self::stash_of(of + 2), o[1].to_bits());
                }
                return;
            }
            let span = Self::kept_span();
            if norm::is_left(c) {
                let (scaled, back) = range::scale_token(o, norm::size(c));
                o = scaled.map(|o| norm::left_one(c, o));
                let at = self.scales(&span, j) + 4 * t as u64;
                if lane_id() == 0 {
                    store_b32(at, back.to_bits());
                }
            }
            let head = self.row.hv * c.o_head + self.own_row();
            if lane_id().is_multiple_of(4) {
                let (base, strides) = (self.params.layer.step.o, (self.params.o_row, c.o_token));
                let mut half = 0;
                while half < 2 {
                    let channel = head + 8 * half as u32;
                    let at = span.at(base, strides, token, channel, c.o_element);
                    if norm::is_left(c) {
                        store_b16(at, o[half].to_bits() as u16);
                    } else {
                        elements::store([o[half]], at, c.o_element, false);
                    }
                    half += 1;
                }
            }
        }
    }

    /// The first of this thread's two rows of the state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn own_row(&self) -> u32 {
        anew(self.first() + thread_idx_x() / 32 % 4 * 16 + lane_id() / 4)
    }

    /// A row that is token `t` of the row whose tokens `span` says, once more each time. All threads of the block come.
    ///
    /// # Safety
    /// The tensors of `params` are live; the room is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn advance_by_one(
        &self,
        s: &mut [f32; 64],
        span: impl Fn() -> Span + Copy,
        t: u32,
        room: Room,
    ) {
        let (c, params) = (self.c, self.params);
        // SAFETY: the caller's promise.
        unsafe {
            let own = span();
            let (with, of) = ((c, params), (&own, self.inputs));
            if c.taps != 0 {
                let threads = (thread_idx_x(), Self::THREADS);
                single::stage::<K>(with, of, (self.row.h, t), room.staged, threads);
                Self::sync_rows();
            }
            let at = (self.own_row(), room.staged);
            let o = single::advance::<G, K, V, V_LAST>(with, of, self.row, t, s, at);
            self.store_token(o, span, t, room.sums);
        }
    }

    /// Norms o of a piece of one token, where there is a norm, and stores it. All threads come that have rows.
    ///
    /// # Safety
    /// The tensors of `params` are live; `sums` are free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_token(&self, o: [f32; 2], span: impl Fn() -> Span + Copy, t: u32, sums: u32) {
        let (c, params, row) = (self.c, self.params, self.own_row());
        // SAFETY: the caller's promise; one lane of four stores a row's o.
        unsafe {
            let own = span();
            let o = self.normed(o, span, (t, row), sums);
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
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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
        let squares = squares!(sum_of_rows(o), sum_of_rows(times(o, SMALL)));
        let warp = thread_idx_x() / 32;
        let of_block = 4 * GROUPS_OF_BLOCK;
        // SAFETY: the caller's promise; a warp has a word, which nobody reads any more behind the barrier, nor in a cluster.
        unsafe {
            if Self::CLUSTERED {
                let place = sums + 4 * (self.row.tile * of_block + warp);
                if lane_id() < Self::CLUSTER {
                    store_shared_b32_at(place, lane_id(), squares.to_bits());
                }
                cluster::arrive();
                cluster::wait();
            } else {
                Self::sync_rows();
                if lane_id() == 0 {
                    store_shared_b32(sums + 4 * warp, squares.to_bits());
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
}

/// Sum of the squares of o of rows r and r + 8 of 8 lanes, neighbours first.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of_rows(o: [f32; 2]) -> f32 {
    let mut squares = o.map(|o| o * o);
    let mut mask = 4;
    while mask < 32 {
        let mut i = 0;
        while i < 2 {
            squares[i] += warp_shuffle_xor(squares[i], mask);
            i += 1;
        }
        mask *= 2;
    }
    squares[0] + squares[1]
}
