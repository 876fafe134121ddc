//! The layer step of several tokens on V-last states; the numbers of steps are those of the operators' headers.

use core::marker::PhantomData;

use super::mtp::{LayerStep, Mtp, description};
use super::slices::Slices;
use super::warp_channels;
use crate::device::rarely;
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, store_shared_b32,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::lane_id;
use crate::launch::{Description, Kernel, Layout};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::reduce::pairwise_sum;
use crate::recurrent::prepared::{load_factors, load_slot, store_factors, store_slot};
use crate::recurrent::slots::token_slot;
use crate::recurrent::tokens::{Decays, Tokens};
use crate::recurrent::vlast::{
    advance, leave_products, load_rows, store_channels, warp_gates, warp_norms, warp_shrunk,
};
use crate::row::Row;
use crate::state::{FRAGMENT, Share, StateElement, check_v_last};
use crate::step::{LayerParams, StepConstants};

/// V-last states: `TILE` columns of every value head of a query/key head. A team of K/`ROWS` · `LANES` threads processes a slice
/// of 8 · `LANES` columns at a time, `ROWS` rows per group of `LANES` lanes; `DEPTH` slices of each team are being copied to
/// shared memory. The first threads of a team own one column each: they turn the team's sums into δ and o while the others wait.
pub struct MtpVLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> MtpVLast<G, S, K, V, TILE, LANES, ROWS, THREADS, DEPTH>
{
    /// Columns of a team.
    const COLUMNS: u32 = LANES * FRAGMENT;
    /// Threads of a team.
    const TEAM: u32 = K / ROWS as u32 * LANES;
    const TEAMS: u32 = THREADS / Self::TEAM;
    /// Warps of a team.
    const WARPS: u32 = Self::TEAM / 32;
    /// Slices of a head.
    const SLICES: u32 = TILE / Self::COLUMNS;
    /// Layout of shared memory after the mailboxes: the slices; then for every team each warp's part of S k and S q of each
    /// column, and δ rk of each column; then the tokens.
    const OF_TEAMS: u32 = Self::BEHIND_MAIL + DEPTH * Slices::<S, ROWS, THREADS>::SLICE_BYTES;
    const STEPS: u32 = Self::WARPS * Self::COLUMNS * 8;
    const TEAM_BYTES: u32 = Self::STEPS + Self::COLUMNS * 4;
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> Mtp for MtpVLast<G, S, K, V, TILE, LANES, ROWS, THREADS, DEPTH>
{
    type Decays = G;
    const K: u32 = K;
    const V: u32 = V;
    const TILE: u32 = TILE;
    const THREADS: u32 = THREADS;
    const TOKENS: u32 = Self::OF_TEAMS + Self::TEAMS * Self::TEAM_BYTES;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(i: u32) -> u32 {
        4 * i
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> Kernel for MtpVLast<G, S, K, V, TILE, LANES, ROWS, THREADS, DEPTH>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // f32 states take so many registers per thread that no more blocks fit.
        min_blocks_per_sm: if S::BYTES == 4 { 384 } else { 512 } / THREADS,
        ..description::<Self, S>(Layout::VLast)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const { check_v_last(K, V, LANES, ROWS as u32) };
        const {
            assert!(TILE.is_multiple_of(Self::COLUMNS), "whole slices");
            assert!(THREADS.is_multiple_of(Self::TEAM), "whole teams");
        };
        let c = StepConstants::get();
        let (row, _) = Row::of_thread(c.h, c.ratio, c.tiled != 0, THREADS);
        let (team, thread) = (thread_idx_x() / Self::TEAM, thread_idx_x() % Self::TEAM);
        let first = thread / LANES * ROWS as u32;
        let smem = dynamic_shared_mem() + Self::OF_TEAMS + team * Self::TEAM_BYTES;
        let sums = smem + thread / 32 * Self::COLUMNS * 8;
        // SAFETY: the caller's promise; a group owns its rows, a lane its share of each, a thread its column and its channels
        // of the convolution; shared memory has one writer per place, between the barriers that order its accesses; each
        // message between blocks too has one writer, is sent after the meeting for which the mailboxes are opened, and is read
        // after it has arrived.
        unsafe {
            Self::arrive(&c);
            let launch = LayerStep::load(&c, params, row);
            launch.clear_rest::<Self>();
            if !launch.new.live || launch.new.are_none(&c) {
                rarely();
                Self::meet();
                if launch.new.live {
                    launch.carry::<Self, S>(true);
                }
                return;
            }
            let slots = &launch.place.slots;
            let drafts = launch.load_drafts::<Self>(thread_idx_x());
            let scale = launch.load_scale::<Self>(thread_idx_x());
            let copies = Slices::<S, ROWS, THREADS>::new(
                dynamic_shared_mem() + Self::BEHIND_MAIL,
                launch.place.reads(),
                c.wide_state != 0,
            );
            // For this team's slice `s`: whether it exists, its head, and its first column within the tile.
            let columns = |s: u32| {
                let n = s * Self::TEAMS + team;
                (
                    n < c.ratio * Self::SLICES,
                    n / Self::SLICES,
                    n % Self::SLICES * Self::COLUMNS,
                )
            };
            let share = |own: u32| Share::of(thread, LANES).from(row.tile * TILE + own);
            let start = |s: u32| {
                let (is_there, r, own) = columns(s);
                copies.start(s % DEPTH, is_there, share(own), || {
                    let hv = row.with_head(&c, r).hv;
                    (slots.start::<S>(&c, &params.step, (hv, [K, V])), first)
                });
            };
            let mut s = 0;
            while s < DEPTH {
                start(s);
                s += 1;
            }
            Self::meet();
            if !launch.live {
                launch.store_zeros::<Self>();
                return;
            }

            launch.give::<Self>(drafts);
            let mut kept = 0;
            if let Some(previous) = &launch.previous {
                kept = previous.count;
                Self::prepare(&launch, previous, 0);
            }
            Self::prepare(&launch, &launch.new, kept);
            sync_threads();

            let tokens = kept + launch.new.count;
            if launch.overflow::<Self>(tokens) {
                Self::shrink(&launch, tokens);
            }
            s = 0;
            while s * Self::TEAMS < c.ratio * Self::SLICES {
                let (is_there, r, own) = columns(s);
                let r = if is_there { r } else { 0 };
                let (of_head, share) = (row.with_head(&c, r), share(own));
                copies.wait(DEPTH - 1);
                let head = slots.start::<S>(&c, &params.step, (of_head.hv, [K, V]));
                let mut raw = [[[0; 8]; 1]; ROWS];
                if is_there {
                    raw = copies.read(s % DEPTH, share, head, first);
                }
                start(s + DEPTH);
                let mut states = raw.map(|[raw]| S::widen(&c, raw));
                let mut i = 0;
                loop {
                    if c.previous_tokens != 0 && i == kept {
                        let write = slots.write::<S>(&c, &params.step, (of_head.hv, [K, V]));
                        let rows = write.rows::<S>(share, first);
                        each!(n in 0..ROWS => {
                            let rounded = S::narrow(&c, states[n]);
                            if is_there {
                                rows.store::<S>(n, 0, rounded);
                            }
                            states[n] = S::widen(&c, rounded);
                        });
                    }
                    if i == tokens {
                        break;
                    }
                    let (token, of_token) = (Self::token(&c, i), Self::head(&c, i, r));
                    if G::per_channel(&c) {
                        let decay = load_rows::<ROWS>(of_token + Self::DECAY + first * 4);
                        each!(n in 0..ROWS => {
                            states[n] = states[n].map(|s| s * decay[n]); // (2)
                        });
                    }
                    let (k, q) = (
                        load_rows::<ROWS>(token + first * 4),
                        load_rows::<ROWS>(token + Self::Q + first * 4),
                    );
                    leave_products::<S, ROWS, LANES>(&states, (k, q), share, sums);
                    sync_threads();
                    // A team without a slice does not skip this: a condition on both sides of a barrier would duplicate
                    // the barrier.
                    if thread < Self::COLUMNS {
                        let values = of_token + (own + thread) * 4;
                        Self::close(&c, smem, of_token, thread, values, (is_there, i >= kept));
                    }
                    sync_threads();
                    let decay = load_factors(of_token + Self::FACTORS, G::per_channel(&c)).decay;
                    advance::<G, S, ROWS>(&c, &mut states, k, decay, share, smem + Self::STEPS);
                    i += 1;
                    if i <= kept || !is_there {
                        continue;
                    }
                    let slot = load_slot(&c, token + Self::SLOT);
                    let after = (i - 1 - kept, i == tokens, slot);
                    slots.after::<S>(&c, &params.step, of_head, [K, V], after, |head| {
                        let rows = head.rows::<S>(share, first);
                        each!(n in 0..ROWS => rows.store::<S>(n, 0, S::narrow(&c, states[n])));
                    });
                }
                s += 1;
            }
            if c.tokens != 0 {
                launch.finish::<Self>(scale);
            }
        }
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> MtpVLast<G, S, K, V, TILE, LANES, ROWS, THREADS, DEPTH>
{
    /// Stores α and the factors of all `tokens`, after the `before` tokens that are there already, in shared memory. The warps
    /// take turns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn prepare(launch: &LayerStep, tokens: &Tokens, before: u32) {
        let (c, params) = (launch.c, &launch.params.step);
        let mut n = thread_idx_x() / 32;
        while n < tokens.count * c.ratio {
            let (t, r) = (n / c.ratio, n % c.ratio);
            let row = launch.row.with_head(c, r);
            let (token, head) = (Self::token(c, before + t), Self::head(c, before + t, r));
            // SAFETY: the caller's promise; a head's bytes have one writer.
            unsafe {
                let own = tokens.with_head(c, params, row);
                let (decay, gates) = warp_gates::<G, K>(c, params, row, &own, t);
                let slot = token_slot(c, params, row.b, t);
                let (k, q) = (
                    warp_channels::<K>(token),
                    warp_channels::<K>(token + Self::Q),
                );
                let norms = warp_norms(k, q); // (1)
                let factors = Factors::new(c.l2norm != 0, f32::from_bits(c.scale), norms, gates);
                if G::per_channel(c) {
                    store_channels::<K>(head + Self::DECAY, decay);
                }
                if lane_id() == 0 {
                    store_factors(head + Self::FACTORS, factors);
                    if r == 0 {
                        store_slot(c, token + Self::SLOT, slot);
                    }
                }
            }
            n += THREADS / 32;
        }
    }

    /// Multiplies k and q of prepared tokens whose norms overflow by powers of two, and replaces the factors. The warps take
    /// turns. All threads of the block call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn shrink(launch: &LayerStep, tokens: u32) {
        // SAFETY: the caller's promise; a token's bytes have one writer, after all readers.
        unsafe {
            sync_threads();
            let mut i = thread_idx_x() / 32;
            while i < tokens {
                let token = Self::token(launch.c, i);
                let all = [
                    warp_channels::<K>(token),
                    warp_channels::<K>(token + Self::Q),
                ];
                let ([k, q], norms) = warp_shrunk(all, warp_norms(all[0], all[1]));
                store_channels::<K>(token, k);
                store_channels::<K>(token + Self::Q, q);
                if lane_id() == 0 {
                    launch.store_norms::<Self>(i, norms);
                }
                i += THREADS / 32;
            }
            sync_threads();
        }
    }

    /// Turns the sums of the team's column `own` into δ rk. If the slice `is_there` and the token `is_new`, also replaces v at
    /// `values` by o.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn close(
        c: &StepConstants,
        smem: u32,
        of_token: u32,
        own: u32,
        values: u32,
        (is_there, is_new): (bool, bool),
    ) {
        let [sk, sq] = pairwise_sum(Self::WARPS as usize, |i| {
            load_shared_b64(smem + (i as u32 * Self::COLUMNS + own) * 8).map(f32::from_bits)
        });
        let factors = load_factors(of_token + Self::FACTORS, G::per_channel(c));
        let mut v = 0.0;
        if is_there {
            v = f32::from_bits(load_shared_b32(values));
        }
        let delta = factors.delta(v, sk); // (3)
        store_shared_b32(smem + Self::STEPS + own * 4, (delta * factors.k).to_bits());
        if is_there && is_new {
            store_shared_b32(values, factors.output(sq, delta).to_bits()); // (5)
        }
    }
}
