//! The consumer warpgroups of the scan: from chunk to chunk of a row.

use crate::math::each::each;
use core::array;

use super::super::norm;
use super::super::output;
use super::super::range;
use super::super::rows::{Span, long};
use super::super::split;
use super::super::state::{load_carried, store_carried};
use super::super::values;
use super::super::{CHUNK, FACTOR_BYTES, P, of_warp, opaque};
use super::machine::Machine;
use super::memory::{Apart, Staged};
use super::{Chain, FIRST_GROUP_BARRIER, Progress};
use crate::device::float::{fma, pack_f16x2};
use crate::device::overlap::wait_for_previous;
use crate::device::rarely;
use crate::device::shared::{
    arrive_at_counter, load_shared_b32, load_shared_b64, wait_for_counter,
};
use crate::device::thread::{sync_barrier_any, thread_idx_x};
use crate::device::warp::lane_id;
use crate::device::warpgroup::{self, fence_shared};
use crate::layer::Place;
use crate::recurrent::Gating;

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'_, G, M, K, V, GROUPS>
{
    /// Processes all chunks of a row in this launch; the row has some. The state is in the pool, or where the launch of the
    /// preceding chunks stored it.
    ///
    /// # Safety
    /// The tensors of `params` are live, and the block's shared memory is free; the workspace has the row's chunks up to the last
    /// one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn walk(&self, place: &Place, progress: &mut Progress) {
        let (c, params) = (self.c, self.params);
        // SAFETY: the caller's promise; a block owns its rows of a state.
        unsafe {
            if Self::CLUSTERED {
                self.meet_cluster();
            }
            self.keep_span();
            let mut j = params.first_chunk;
            let mut s = [0.0; 64];
            let is_brought = self.brings_state(progress);
            if !M::SPLITS && j == 0 && !is_brought {
                s = self.places().bring(c, self.start(place), !place.is_fresh());
            }
            // The launch of the preceding chunks may have run until here.
            wait_for_previous();
            s = if M::SPLITS {
                self.begin_split(place)
            } else if j > 0 {
                load_carried::<K>(self.carried())
            } else {
                if is_brought && !place.is_fresh() {
                    let (i, round) = Self::stage_of(progress.chunks);
                    wait_for_counter(Self::there(i), round);
                    s = self.places().take(c, Self::state());
                }
                self.places().settle(c, s)
            };
            let mut i;
            loop {
                let round;
                (i, round) = Self::stage_of(progress.chunks);
                if !G::PER_CHANNEL || M::APART {
                    // Uniform (docs/compiler.md), for addresses of products. KDA's scan by warpgroups spills with a uniform stage.
                    i = of_warp(i);
                }
                wait_for_counter(Self::there(i), round);
                let span = Self::kept_span();
                let chunk = span.chunk(j);
                if chunk.count > 1 {
                    let staged = Self::staged(Self::stage(i));
                    s = self.advance::<false>(s, j, staged, progress.chunks);
                } else {
                    // Shared memory for the token's convolved q and k, and for the sums of the norm.
                    let room = Self::room(i, chunk.start);
                    // Loaded again, because no registers are free to keep it.
                    let place = Place::load(c, &params.layer, span.b);
                    self.with_inputs(&place).advance_by_one(
                        &mut s,
                        Self::kept_span,
                        chunk.start,
                        (room, G::PER_CHANNEL),
                    );
                    // Orders the stores to the stage before the copies into it.
                    fence_shared();
                    each!(n in 0..2 => {
                        Self::meet_apart(Apart::ALL[n], progress.chunks);
                        Self::free_apart(Apart::ALL[n]);
                    });
                }
                let slot = self.brought_slot(i);
                if !Self::FREES_LATE {
                    arrive_at_counter(Self::free(i));
                }
                if M::SPLITS {
                    self.end_split(&mut s, j);
                }
                self.store_checkpoint(&s, slot);
                (j, progress.chunks) = (j + 1, progress.chunks + 1);
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
            if M::SPLITS && !self.ends_row(&span) {
                free();
            } else if span.chunk(j).start < span.count {
                free();
                store_carried::<K>(self.carried(), &s);
            } else if c.update_state != 0 {
                let place = Place::load(c, &params.layer, span.b);
                free();
                self.places().store(c, self.end(&place), &s);
            } else {
                free();
            }
        }
    }

    /// State at the start of a part of a row ([`super::super::split`]). Called by all consumer threads.
    ///
    /// # Safety
    /// As for [`Self::walk`]; the earlier passes have ended.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn begin_split(&self, place: &Place) -> [f32; 64] {
        let (c, params) = (self.c, self.params);
        let row = Span::load(c, params, self.span.b);
        let i = split::number_of(c, &row, &self.span);
        let mut s = [0.0; 64];
        if self.makes_output() && (i > 0 || row.ends_split(c.split, 0)) {
            // The first part does not read its slot, because the row's last part may overwrite the slot in this pass. The
            // transition pass has stored a copy of the slot's state as the state of split 0.
            s = load_carried::<K>(self.split_state(&row, i));
        } else if i == 0 && !self.is_transition() {
            s = self.places().load(c, self.start(place), !place.is_fresh());
            if !self.makes_output() {
                store_carried::<K>(self.split_state(&row, 0), &s);
                // B starts from zeros. Exception: for a first part of one token the pass computes the state after the token
                // directly, from the start state, and no S M is added.
                if !split::is_direct(i, self.span.count) {
                    s = [0.0; 64];
                }
            }
        } else if self.is_transition() {
            let thread = opaque(thread_idx_x());
            // M starts from `IDENTITY` · I. Element n is in row own + 8 half and channel thread % 4 · 2 + 8 j + e; it is on the
            // diagonal if both are equal. `ahead`: row minus channel of element 0.
            let own = (self.first_of(thread) + thread / 32 % 4 * 16 + thread % 32 / 4) as i32;
            let ahead = own - (thread % 4 * 2) as i32;
            each!(n in 0..K as usize / 2 => {
                let (j, half, e) = (n as i32 / 4, n as i32 / 2 % 2, n as i32 % 2);
                s[n] = (ahead == 8 * j + e - 8 * half) as u32 as f32 * split::IDENTITY;
            });
        }
        s
    }

    /// After the last chunk `j` of a part of a row that reaches the end of its split: a transition pass stores its result; the
    /// output pass replaces the scanned state by the carried one. Called by all consumer threads.
    ///
    /// # Safety
    /// As for [`Self::begin_split`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn end_split(&self, s: &mut [f32; 64], j: u32) {
        let (c, params) = (self.c, self.params);
        let span = Self::kept_span();
        if !self.is_behind(&span, j + 1) {
            return;
        }
        let row = Span::load(c, params, span.b);
        let i = split::number_of(c, &row, &span);
        if !row.ends_split(c.split, i) {
            return;
        }
        if self.makes_output() {
            *s = load_carried::<K>(self.split_state(&row, i + 1));
        } else if self.is_transition() {
            let (state, thread) = self.split_state(&row, i);
            each!(n in 0..64 => s[n] *= 1.0 / split::IDENTITY);
            store_carried::<K>((split::transition::<K>(state), thread), s);
        } else {
            store_carried::<K>(self.split_state(&row, i + 1), s);
        }
    }

    /// Whether a part of a row is the row's last, in a pass that stores final states.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn ends_row(&self, span: &Span) -> bool {
        let row = Span::load(self.c, self.params, span.b);
        self.makes_output() && span.position + span.count as u64 == row.position + row.count as u64
    }

    /// Address of this thread's warpgroup's rows of the stored state at the start of the row's split `i`, and the thread's index.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn split_state(&self, row: &Span, i: u32) -> (u64, u32) {
        let thread = opaque(thread_idx_x());
        let of = (self.row.hv, self.first_of(thread));
        let with = (self.c, self.params);
        let state = split::state::<K>(with, G::PER_CHANNEL, (row, i), of);
        (state, thread)
    }

    /// Slot of the checkpoint after the chunk in stage `i`, as the copier stored it.
    ///
    /// # Safety
    /// The chunk has arrived.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn brought_slot(&self, i: u32) -> u64 {
        if self.c.checkpoint_every == 0 {
            return u64::MAX;
        }
        long(load_shared_b64(Self::slot(i)))
    }

    /// Computes the state after chunk `number`, which has more than one token. o of a `SHORT` row is normed here, other o after
    /// the launch.
    ///
    /// Rows of the state are independent of each other, so each warp decides for its 16 rows which tokens f16 holds ([`range`]).
    /// The warps of a warpgroup vote, and check the tokens only if one warp may have a token that f16 does not hold. From the
    /// first such token on, a warp's R is zero and the products leave its state unchanged; after the products the warp processes
    /// all tokens one by one ([`super::outside`]).
    ///
    /// # Safety
    /// The operands are `staged`; those [`Apart`] need not have arrived. `chunks` is the block's number of the chunk.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn advance<const SHORT: bool>(
        &self,
        before: [f32; 64],
        number: u32,
        staged: Staged,
        chunks: u32,
    ) -> [f32; 64] {
        let c = self.c;
        let tile = staged.tile;
        let own = if M::SPLITS {
            // Opaque, because no registers are free to keep the values that depend on them.
            (opaque(lane_id()), opaque(thread_idx_x()))
        } else {
            (lane_id(), thread_idx_x())
        };
        let factors = staged.factors + lane_id() % 4 * 8;
        let a: [u32; 32] = array::from_fn(|i| pack_f16x2(before[2 * i], before[2 * i + 1]));
        // Before the products, because the assembler waits for each product if these words are read while it runs. A transition
        // is not checked for small values, because errors of M that are small relative to the identity do no harm.
        let is_small = range::is_small(a[0]) && !self.is_transition();
        // A transition has no o, so it needs neither the products of queries nor those of P.
        let makes_output = self.makes_output();
        Self::meet_apart(Apart::Images, chunks);
        let products = if makes_output {
            M::by_both::<K>(&a, staged.images)
        } else {
            M::by_first::<K>(&a, staged.images)
        };
        Self::free_apart(Apart::Images);
        // While the products of keys run: load half of v and its factors; registers hold no more.
        let (v, x) = (values::of_tile(c, tile, 0, own), factors_of(0, factors));
        let (of_keys, of_queries) = if makes_output {
            M::first(products)
        } else {
            let [of_keys, nothing] = M::only(products);
            (of_keys, warpgroup::pending(nothing))
        };
        // While the products of queries run.
        let mut r = [0; 16];
        let (second, y) = (values::of_tile(c, tile, 32, own), factors_of(4, factors));
        rest_of(&mut r, 0, &v, &of_keys, &x);
        rest_of(&mut r, 4, &second, &of_keys, &y);
        let may_be_outside = is_small | range::may_be_large(&r);
        // Loaded before the branch: otherwise the assembler multiplies the state after the wait for the products.
        let decay = if G::PER_CHANNEL {
            1.0
        } else {
            f32::from_bits(load_shared_b32(staged.factors + 3 * FACTOR_BYTES))
        };
        Self::meet_apart(Apart::Triangles, chunks);
        let looks = sync_barrier_any(Self::group_barrier(), 128, may_be_outside);
        let mut first = CHUNK;
        let weighed = if looks {
            rarely();
            let count = Self::kept_span().chunk(number).count;
            first = range::first_outside::<K>(&mut r, &before, is_small, count);
            let products = M::by_triangle(&r, staged.triangles, of_queries);
            self.weigh(before, decay, products, factors, first)
        } else {
            let products = M::by_triangle(&r, staged.triangles, of_queries);
            self.weigh(before, decay, products, factors, CHUNK)
        };
        let Weighed {
            s,
            plain,
            decayed,
            mut o,
        } = weighed;
        // Added to the state: `decayed` times an image of k̂. With GDN that image is the one of the first products; with KDA it
        // is a separate image, decayed to the end of the chunk. Added to o: `plain` times P.
        let (state, products) = ((&decayed, staged.added), (&plain, staged.triangles + P));
        let mut s = match (G::PER_CHANNEL, makes_output) {
            (true, true) => M::add::<K, 64>(s, state, &mut o, products, || ()),
            (false, true) => M::add::<K, 128>(s, state, &mut o, products, || {
                Self::free_apart(Apart::Triangles);
            }),
            (true, false) => M::add_alone::<K, 64>(s, state),
            (false, false) => M::add_alone::<K, 128>(s, state),
        };
        if G::PER_CHANNEL {
            Self::free_apart(Apart::Triangles);
        }
        if looks {
            rarely();
            let mut own = M::settle::<K>(s);
            if first < CHUNK {
                self.advance_outside::<SHORT>(&mut own, &mut o, (number, first), tile);
            }
            s = warpgroup::pending(own);
        }
        // While the products that are added to the state run.
        if makes_output {
            self.store_output::<SHORT>(o, (number, first), staged);
        }
        M::settle::<K>(s)
    }

    /// Named barrier of this thread's warpgroup.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn group_barrier() -> u32 {
        FIRST_GROUP_BARRIER + thread_idx_x() / 128
    }

    /// Waits for the products of R and of queries, and computes the operands of the next products. If the chunk has a token
    /// `first`, δ is zero in them from that token on, and the state is not changed.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh(
        &self,
        mut s: [f32; 64],
        decay: f32,
        products: warpgroup::Pending<[[f32; 32]; 2]>,
        factors: u32,
        first: u32,
    ) -> Weighed {
        // SAFETY: the factors have arrived.
        unsafe {
            // While the products of R run.
            if first < CHUNK {
                // The state is not decayed.
            } else if G::PER_CHANNEL {
                each!(j in 0..K as usize / 8 => {
                    let [x, y] = factor(factors, 3, j);
                    s[4 * j] *= x;
                    s[4 * j + 1] *= y;
                    s[4 * j + 2] *= x;
                    s[4 * j + 3] *= y;
                });
            } else {
                each!(i in 0..K as usize / 2 => s[i] *= decay);
            }
            let [delta, of_queries] = if self.makes_output() {
                M::both(products)
            } else {
                M::only(products)
            };
            let (mut plain, mut decayed, mut o) = ([0; 16], [0; 16], [0.0; 32]);
            each!(j in 0..8 => {
                let ([x, y], [z, w]) = (factor(factors, 2, j), factor(factors, 1, j));
                let at = 4 * j;
                plain[2 * j] = pack_f16x2(delta[at], delta[at + 1]);
                plain[2 * j + 1] = pack_f16x2(delta[at + 2], delta[at + 3]);
                decayed[2 * j] = pack_f16x2(delta[at] * x, delta[at + 1] * y);
                decayed[2 * j + 1] = pack_f16x2(delta[at + 2] * x, delta[at + 3] * y);
                o[at] = of_queries[at] * z;
                o[at + 1] = of_queries[at + 1] * w;
                o[at + 2] = of_queries[at + 2] * z;
                o[at + 3] = of_queries[at + 3] * w;
            });
            if first < CHUNK {
                range::clear_from(&mut plain, first);
                decayed = [0; 16];
            }
            Weighed {
                s,
                plain,
                decayed,
                o,
            }
        }
    }

    /// Stores o of chunk `number`, whose first token that f16 does not hold is `first`.
    ///
    /// # Safety
    /// The tensors of `params` are live; the warpgroup has read its tile of v.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_output<const SHORT: bool>(
        &self,
        mut o: [f32; 32],
        (number, first): (u32, u32),
        staged: Staged,
    ) {
        let (c, params) = (self.c, self.params);
        let (of, at) = (
            (self.row.hv, self.first()),
            (staged.tile, Self::group_barrier()),
        );
        let span = Self::kept_span();
        let chunk = span.chunk(number);
        let is_normed = SHORT && c.has_norm != 0;
        let scales = if is_normed {
            norm::is_left(c)
        } else {
            output::stage(c, &o, at, first < CHUNK)
        };
        if scales {
            rarely();
            self.scale_output::<SHORT>(&mut o, (&span, number), first);
            if !is_normed {
                output::stage_again(c, &o, at);
            }
        }
        if is_normed {
            let sums = if Self::CLUSTERED {
                Self::sums_of_cluster(staged.images != Self::stage(0))
            } else {
                Self::sums()
            };
            let powers = Self::scratch() + thread_idx_x() / 128 * 4 * norm::OF_WARP;
            let at = (at.0, at.1, sums, powers);
            output::store_normed::<V, GROUPS>(c, params, (&span, chunk), of, &o, at);
        } else {
            output::store(c, params, (&span, chunk), of, &o, at.0);
        }
    }
}

/// Operands of a chunk's last products.
struct Weighed {
    /// State, decayed to the end of the chunk.
    s: [f32; 64],
    /// δ in f16: left factor of the product with P, which is added to o.
    plain: [u32; 16],
    /// δ times its factor for the state (kind 2 of [`factor`]), in f16: left factor of the product with k̂, which is added to
    /// `s`. With GDN the factor has the decay to the end of the chunk; with KDA the image of k̂ has it.
    decayed: [u32; 16],
    /// The state's part of o.
    o: [f32; 32],
}

/// Loads the lane's two factors of kind `kind`, for tokens or channels from 8 `j` on. Kinds, for each token: 0 of S k̂, 1 of S
/// q̂, 2 of δ in the update of the state; 3: the decay of the whole chunk, with KDA for each channel.
///
/// # Safety
/// `factors` are this lane's, in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn factor(factors: u32, kind: u32, j: usize) -> [f32; 2] {
    let byte = kind * FACTOR_BYTES + 32 * j as u32;
    load_shared_b64(factors + byte).map(f32::from_bits)
}

/// Loads the factors of S k̂ for four groups of 8 tokens, from token 8 `first` on.
///
/// # Safety
/// `factors` are this lane's, in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn factors_of(first: u32, factors: u32) -> [[f32; 2]; 4] {
    let mut of = [[0.0; 2]; 4];
    each!(i in 0..4 => {
        let pair = load_shared_b64(factors + 32 * (first + i as u32));
        of[i] = pair.map(f32::from_bits);
    });
    of
}

/// Computes R in f16 for four groups of 8 tokens, from token 8 `first` on; `v` and `factors` ([`factors_of`]) are of these
/// tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rest_of(
    r: &mut [u32; 16],
    first: usize,
    v: &[f32; 16],
    products: &[f32; 32],
    factors: &[[f32; 2]; 4],
) {
    each!(i in 0..4 => {
        let j = first + i;
        let [x, y] = factors[i];
        let [a, b, c, d] = [v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]];
        let u = [
            products[4 * j],
            products[4 * j + 1],
            products[4 * j + 2],
            products[4 * j + 3],
        ];
        r[2 * j] = pack_f16x2(fma(-u[0], x, a), fma(-u[1], y, b));
        r[2 * j + 1] = pack_f16x2(fma(-u[2], x, c), fma(-u[3], y, d));
    });
}
