//! Chunks of one token.

use super::super::rows::Span;
use super::super::workspace::tokens;
use super::super::{opaque, single, single_klast};
use super::machine::Machine;
use super::{Chain, Room};
use crate::device::cluster::{self, store_shared_b32_at};
use crate::device::global::store_b32;
use crate::device::shared::{dynamic_shared_mem, store_shared_b32};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{lane_id, warp_shuffle_xor};
use crate::layer::Place;
use crate::layer::norm::{normed, squares, sum_of};
use crate::math::each::each;
use crate::math::elements;
use crate::math::range::{SMALL, times};
use crate::recurrent::Gating;
use crate::state::is_live;

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'_, G, M, K, V, GROUPS>
{
    /// Processes a row of one token, whose slots are `place`. The operator is that of the load-time constants, not G. Called by
    /// all threads, which have all rows of the head.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn walk_single(&self, place: &Place) {
        let (c, params, span) = (self.c, self.params, self.span);
        let step = &params.layer.step;
        // SAFETY: the caller's promise; a block owns its head.
        unsafe {
            if !place.live() {
                self.store_zeros(1);
            } else if K != 96 && c.state_v_last == 0 {
                let checkpoint = || {
                    let slot = self.checkpoint_slot::<true>(&span, span.chunk(0));
                    let keeps = is_live(slot, step.write_pool_slots, c.null_slot);
                    keeps.then(|| self.checkpoint_at(slot))
                };
                let heads = [self.start(place), self.end(place)];
                let of = (&span, place, self.inputs);
                single_klast::walk::<K, V>((c, params), of, self.row, heads, checkpoint);
            } else {
                let places = self.places();
                let staged = dynamic_shared_mem().next_multiple_of(128);
                let room = Room {
                    staged,
                    sums: staged + single::staged_bytes(K),
                };
                let mut s = places.load(c, self.start(place), !place.is_fresh());
                self.advance_by_one(&mut s, || span, 0, (room, c.per_channel != 0));
                self.checkpoint::<true>(&s, &span, span.chunk(0));
                if c.update_state != 0 {
                    places.store(c, self.end(place), &s);
                }
            }
        }
    }

    /// Shared memory for the chunk that is token `t`, in stage `i`, which is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn room(i: u32, t: u32) -> Room {
        Room {
            staged: Self::stage(i),
            sums: if Self::CLUSTERED {
                // A row has such a chunk at its start and at its end.
                Self::sums_of_cluster(t > 0)
            } else {
                Self::sums()
            },
        }
    }

    /// Processes the chunk that is token `t` of the row. `span` returns the row's tokens and is called again at each use. With
    /// `per_channel`, each key channel has its own decay.
    ///
    /// # Safety
    /// The tensors of `params` are live; the room is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn advance_by_one(
        &self,
        s: &mut [f32; 64],
        span: impl Fn() -> Span + Copy,
        t: u32,
        (room, per_channel): (Room, bool),
    ) {
        let (c, params) = (self.c, self.params);
        let row = self.own_row();
        // SAFETY: the caller's promise; one lane of four stores a row's o.
        unsafe {
            let (own, t_of_row) = span().in_row(M::SPLITS, (c, params), t);
            let (with, of) = ((c, params), (&own, self.inputs));
            if c.taps != 0 {
                single::stage::<K>(with, of, (self.row.h, t_of_row), room.staged, Self::THREADS);
                Self::sync_rows();
            }
            let at = (row, room.staged);
            let with = (c, params, per_channel);
            let has_values = !self.is_transition();
            let o = if c.state_v_last != 0 {
                single::advance::<K, V, true>(with, of, self.row, t_of_row, s, (at, has_values))
            } else {
                single::advance::<K, V, false>(with, of, self.row, t_of_row, s, (at, has_values))
            };
            if !self.makes_output() {
                return;
            }
            if self.leaves_tokens() {
                // A row has such a chunk at its start and at its end.
                let of = (own.b, t_of_row > 0);
                let to = tokens::<K, V>(c, params, per_channel, of, self.row.hv);
                if lane_id().is_multiple_of(4) {
                    store_b32(to + 4 * row as u64, o[0].to_bits());
                    store_b32(to + 4 * (row + 8) as u64, o[1].to_bits());
                }
                return;
            }
            let o = self.normed(o, span, (t, row), room.sums);
            if lane_id().is_multiple_of(4) {
                let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
                let head = self.row.hv * c.o_head + row;
                let at = |row| own.at(base, strides, t_of_row, head + row, c.o_element);
                elements::store([o[0]], at(0), c.o_element, false);
                elements::store([o[1]], at(8), c.o_element, false);
            }
        }
    }

    /// First of this thread's two rows of the state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn own_row(&self) -> u32 {
        opaque(self.first() + thread_idx_x() / 32 % 4 * 16 + lane_id() / 4)
    }

    /// Norms o of rows r and r + 8 of a token, if there is a norm. Squares are added neighbours first, as in a decode.
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
        let of_block = 4 * GROUPS;
        // SAFETY: the caller's promise; each warp has its own word, which nobody reads any more after the barrier; in a cluster,
        // `sums` are free.
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

/// Sum of the squares of o in rows r and r + 8 over 8 lanes, neighbours first.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of_rows(o: [f32; 2]) -> f32 {
    let mut squares = o.map(|o| o * o);
    let mut mask = 4;
    while mask < 32 {
        each!(i in 0..2 => squares[i] += warp_shuffle_xor(squares[i], mask));
        mask *= 2;
    }
    squares[0] + squares[1]
}
