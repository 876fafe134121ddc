//! From piece to piece of a row: the warpgroups that have its state.

use core::array;

use super::super::norm;
use super::super::output;
use super::super::range;
use super::super::rows::long;
use super::super::state::{load_carried, store_carried};
use super::super::values;
use super::super::{CHUNK, FACTOR_BYTES, FACTORS, P, anew, of_warp};
use super::{Chain, Progress, STAGES};
use crate::device::float::{fma, pack_f16x2};
use crate::device::overlap::wait_for_previous;
use crate::device::shared::{
    arrive_at_counter, load_shared_b32, load_shared_b64, wait_for_counter,
};
use crate::device::thread::{sync_barrier, thread_idx_x};
use crate::device::warp::lane_id;
use crate::device::warpgroup::{self, Pending, fence_shared};
use crate::layer::Place;
use crate::recurrent::Gating;
use crate::state::StateElement;

impl<G: Gating, const K: u32, const V: u32, const V_LAST: bool, const GROUPS_OF_BLOCK: u32>
    Chain<'_, G, K, V, V_LAST, GROUPS_OF_BLOCK>
{
    /// All pieces of the launch of a row that has some, whose state is in the pool, or where the launch of those before
    /// left it.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free; the workspace has the row's units up to
    /// the last piece.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn walk<S: StateElement>(&self, place: &Place, progress: &mut Progress) {
        let (c, params) = (self.c, self.params);
        let step = &params.layer.step;
        let shape = if V_LAST { [K, V] } else { [V, K] };
        let head = (self.row.hv, shape);
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            if Self::CLUSTERED {
                self.meet_cluster();
            }
            self.keep_span();
            let mut j = params.first_piece;
            let mut s = [0.0; 64];
            let is_brought = self.brings_state::<S>(progress);
            if j == 0 && !is_brought {
                let start = place.slots.start::<S>(c, step, head);
                s = self.places().bring::<S>(c, start, !place.is_fresh());
            }
            // The pieces before are done, which may have been under way until now.
            wait_for_previous();
            s = if j > 0 {
                load_carried::<K>(self.carried())
            } else {
                if is_brought && !place.is_fresh() {
                    let (i, round) = (progress.pieces % STAGES, progress.pieces / STAGES);
                    wait_for_counter(Self::there(i), round);
                    s = self.places().take::<S>(c, Self::state());
                }
                self.places().settle(c, s)
            };
            let mut i;
            loop {
                i = progress.pieces % STAGES;
                if !G::PER_CHANNEL {
                    // Addresses of products come by uniform registers then. KDA's chain spills with that.
                    i = of_warp(i);
                }
                wait_for_counter(Self::there(i), progress.pieces / STAGES);
                let stage = Self::stage(i);
                s = self.advance::<false>(s, (j, progress.pieces), (stage, stage + Self::HEAD));
                let slot = self.brought_slot(i);
                if !Self::FREES_LATE {
                    arrive_at_counter(Self::free(i));
                }
                self.store_checkpoint::<S>(&s, slot);
                (j, progress.pieces) = (j + 1, progress.pieces + 1);
                if self.is_behind(&Self::kept_span(), j) {
                    break;
                }
                if Self::FREES_LATE {
                    arrive_at_counter(Self::free(i));
                }
            }
            let free = || {
                if Self::FREES_LATE {
                    arrive_at_counter(Self::free(i));
                }
            };
            let span = Self::kept_span();
            if span.piece(j).start < span.count {
                free();
                store_carried::<K>(self.carried(), &s);
            } else if c.update_state != 0 {
                let place = Place::load(c, &params.layer, span.b);
                free();
                let end = place.slots.write::<S>(c, step, head);
                self.places().store::<S>(c, end, &s);
            } else {
                free();
            }
        }
    }

    /// The slot of the checkpoint behind the piece in the `i`-th stage, as the copier left it.
    ///
    /// # Safety
    /// The piece is there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn brought_slot(&self, i: u32) -> u64 {
        if self.c.checkpoint_every == 0 {
            return u64::MAX;
        }
        // SAFETY: the caller's promise.
        long(unsafe { load_shared_b64(Self::slot(i)) })
    }

    /// The state after piece `j`, behind `pieces` of the block. o of a row that is `SHORT` is normed here, of others behind the
    /// launch.
    ///
    /// Rows of the state are independent of each other, so each warp decides for its 16 rows whether f16 holds the piece's
    /// factors ([`range`]). If not, the warp takes no part of the products for its state, and works the tokens one by one
    /// behind them; so it does with a piece of one token.
    ///
    /// # Safety
    /// Images and v are in `stage`, the other operands at `head`, of a piece of more than one token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn advance<const SHORT: bool>(
        &self,
        mut s: [f32; 64],
        (j, pieces): (u32, u32),
        (stage, head): (u32, u32),
    ) -> [f32; 64] {
        let tile = Self::tile(stage);
        // SAFETY: the caller's promise.
        unsafe {
            let piece = Self::kept_span().piece(j);
            if piece.count > 1 {
                let mut products = self.multiply(&mut s, (j, pieces), (stage, head, tile));
                sync_barrier(Self::barrier(), 128);
                let all_hold = Self::all_hold(anew(pieces) % STAGES);
                if SHORT && self.c.has_norm != 0 && !all_hold {
                    // A norm wants o of all rows at once.
                    Self::stash(&products.o);
                } else {
                    self.store_output::<SHORT>(&mut products.o, (j, pieces), tile);
                }
                s = warpgroup::settle::<K>(products.s);
                if all_hold {
                    return s;
                }
                // Tokens from `first` on are stored again.
                sync_barrier(Self::barrier(), 128);
            }
            self.advance_tokens::<SHORT>(&mut s, (j, pieces), tile);
            if !SHORT {
                // What was stored to the stage is before what is copied to it.
                fence_shared();
            }
        }
        s
    }

    /// The products of piece `j`, behind `pieces` of the block. The warp tells the first token that f16 does not
    /// hold: from there on it has no o, and its state is that of before.
    ///
    /// # Safety
    /// As [`Self::advance`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn multiply(
        &self,
        s: &mut [f32; 64],
        (j, pieces): (u32, u32),
        (stage, head, tile): (u32, u32, u32),
    ) -> Products {
        let c = self.c;
        let factors = head + FACTORS + lane_id() % 4 * 8;
        // SAFETY: the caller's promise.
        unsafe {
            let factor = |kind: u32, j: usize| {
                load_shared_b64(factors + kind * FACTOR_BYTES + 32 * j as u32).map(f32::from_bits)
            };
            let a: [u32; 32] = array::from_fn(|i| pack_f16x2(s[2 * i], s[2 * i + 1]));
            let products = warpgroup::by_both::<K>(&a, stage);
            let (of_keys, of_queries) = warpgroup::first(products);
            // Beside the products of queries.
            let mut r = [0; 16];
            rest_of(&mut r, 0, &values::of_tile(c, tile, 0), &of_keys, factors);
            rest_of(&mut r, 4, &values::of_tile(c, tile, 32), &of_keys, factors);
            let mut first = CHUNK;
            let count = Self::kept_span().piece(j).count;
            if !range::holds(&r, count) {
                first = range::first_outside::<K>(s, &r, count);
                range::clear_from(&mut r, first);
            }
            Self::tell(pieces % STAGES, first);
            if first < CHUNK {
                // The state stays.
            } else if G::PER_CHANNEL {
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
            // Read anew: there are not registers to keep it.
            let first = Self::told(anew(pieces) % STAGES);
            if first < CHUNK {
                range::clear_from(&mut plain, first);
                decayed = [0; 16];
            }
            let (state, products) = ((&decayed, stage + Self::ADDED), (&plain, head + P));
            let s = if G::PER_CHANNEL {
                warpgroup::add::<K, 64>(*s, state, &mut o, products)
            } else {
                warpgroup::add::<K, 128>(*s, state, &mut o, products)
            };
            Products { s, o }
        }
    }

    /// Stores o of piece `j`, behind `pieces` of the block. Nobody reads what is in the tile.
    ///
    /// # Safety
    /// The tensors of `params` are live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn store_output<const SHORT: bool>(
        &self,
        o: &mut [f32; 32],
        (j, pieces): (u32, u32),
        tile: u32,
    ) {
        let (c, params) = (self.c, self.params);
        let (of, barrier) = ((self.row.hv, self.first()), Self::barrier());
        // SAFETY: the caller's promise.
        unsafe {
            let span = Self::kept_span();
            let piece = span.piece(j);
            if norm::is_left(c) {
                self.scale_output::<SHORT>(o, &span, (j, pieces));
            }
            if SHORT && c.has_norm != 0 {
                let sums = if Self::CLUSTERED {
                    Self::sums_of_cluster(j > 0)
                } else {
                    Self::sums()
                };
                let scales = Self::scratch() + thread_idx_x() / 128 * 4 * norm::OF_WARP;
                let at = (tile, barrier, sums, scales);
                output::store_normed::<V, GROUPS_OF_BLOCK>(c, params, (&span, piece), of, o, at);
            } else {
                output::store(c, params, (&span, piece), of, o, (tile, barrier));
            }
        }
    }
}

/// What the products of a piece give.
struct Products {
    /// The state behind it, under way.
    s: Pending<[f32; 64]>,
    o: [f32; 32],
}

/// R, rounded, of four times 8 tokens, those from 8 `first` on, whose v this is.
///
/// # Safety
/// `factors` are this lane's, in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
