//! One token on K-last deferred states; the numbers of steps are those of [`crate::kernels::deferred`].

use core::marker::PhantomData;

use crate::constants::Element;
use crate::device::float::fma;
use crate::device::global::{load_b32, store_b32};
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b64, load_shared_b128, store_shared_b64, store_shared_b128,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{FULL_MASK, sync_warp, warp_shuffle_xor};
use crate::launch::{Computes, Description, Family, Kernel, Layout, Shared};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, Raw, load, load_one};
use crate::math::gate;
use crate::math::range::tame;
use crate::math::reduce::{butterfly_scatter, butterfly_sum, dot};
use crate::pending::{MAX_PENDING, Pending, Ring, flushes};
use crate::recurrent::gates::LaneGates;
use crate::recurrent::klast::{load_channels, norms, store_channels};
use crate::recurrent::prepared::bytes_of_channels;
use crate::recurrent::tokens::{Decays, Tokens};
use crate::row::Row;
use crate::state::{FRAGMENT, Head, RawFragment, Share, StateElement, check_k_last};
use crate::step::{DeferredParams, StepConstants, StepParams};

const F32: u32 = Element::F32 as u32;

/// K-last states: `ROWS` rows of S per group of K/8 lanes, all loaded before the first is used; `THREADS` per block; `VALUES` =
/// 2 `ROWS`.
pub struct KLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
>(PhantomData<(G, S)>);

/// Values from the ring in a lane's registers, with two kinds of token index. Lane j has u of pending token j for the group's
/// rows, and with GDN its log α. For each pending token group + i · `GROUPS`, whose weights (3) the group computes, entry i has
/// the lane's channels of k, and with KDA of log α.
pub(super) struct Lane<const ROWS: usize> {
    pub(super) update: Raw<ROWS>,
    log_decay: f32,
    keys: [Raw<8>; MOST_ENTRIES],
    log_decays: [Raw<8>; MOST_ENTRIES],
}

impl<const ROWS: usize> Lane<ROWS> {
    /// Zeros, for no pending tokens.
    pub(super) const NONE: Self = Self {
        update: Raw([0; ROWS]),
        log_decay: 0.0,
        keys: [Raw([0; 8]); MOST_ENTRIES],
        log_decays: [Raw([0; 8]); MOST_ENTRIES],
    };
}

/// Largest number of pending tokens whose weights a group computes.
const MOST_ENTRIES: usize = 2;

/// Stores u of one token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_update<const ROWS: usize>(place: u32, update: Raw<ROWS>) {
    let mut i = 0;
    while i < ROWS {
        let [a, b, c, d] = [0, 1, 2, 3].map(|n| update.0[i + n]);
        store_shared_b128(place + 4 * i as u32, [a, b, c, d]);
        i += 4;
    }
}

/// Loads u of one token.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load_update<const ROWS: usize>(place: u32) -> Raw<ROWS> {
    let mut update = [0; ROWS];
    let mut r = 0;
    while r < ROWS {
        let words = load_shared_b128(place + 4 * r as u32);
        each!(n in 0..4 => update[r + n] = words[n]);
        r += 4;
    }
    Raw(update)
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
> KLast<G, S, K, V, ROWS, VALUES, THREADS>
{
    /// Lanes of a group.
    pub(super) const LANES: u32 = K / FRAGMENT;
    const GROUPS: u32 = THREADS / Self::LANES;
    pub(super) const TILE: u32 = Self::GROUPS * ROWS as u32;
    /// Number of pending tokens whose weights a group computes.
    const ENTRIES: usize = MAX_PENDING.div_ceil(Self::GROUPS) as usize;
    /// Layout of shared memory: first each pending token's weights a and b ((3)); for a flush, each token's decayed k, then u,
    /// group by group. KDA's log decays (`LOG_DECAY_BYTES`) have an address of their own.
    const KEYS: u32 = MAX_PENDING * 8;
    const UPDATES: u32 = Self::KEYS + MAX_PENDING * K * 4;
    pub(super) const BYTES: u32 = Self::UPDATES + MAX_PENDING * Self::TILE * 4;
    pub(super) const LOG_DECAY_BYTES: u32 = bytes_of_channels::<G>(MAX_PENDING * K * 4);

    pub(super) const CHECKED: () = {
        check_k_last((K, 1), V, ROWS as u32, THREADS);
        assert!(ROWS.is_multiple_of(4), "u comes four at a time");
        assert!(VALUES == 2 * ROWS, "a product with k and one with q a row");
        assert!(VALUES as u32 <= Self::LANES, "a lane for each product");
        assert!(MAX_PENDING <= Self::LANES, "a lane for each pending token");
        assert!(Self::ENTRIES <= MOST_ENTRIES);
    };

    /// Address in shared memory of a group's u of pending token `share.lane`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn update_place(smem: u32, share: Share, group: u32) -> u32 {
        smem + Self::UPDATES + (group * MAX_PENDING + share.lane) * (4 * ROWS as u32)
    }

    /// (6) The states of the group's rows after the first `len` pending tokens. [`Self::decay_keys`] has stored the keys at
    /// `smem` and returned Γ; lane j has u of pending token j for these rows. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn flush(
        c: &StepConstants,
        (smem, decay, update): (u32, [f32; 8], Raw<ROWS>),
        len: u32,
        raw: [RawFragment; ROWS],
        (share, group): (Share, u32),
    ) -> [RawFragment; ROWS] {
        let mut states = raw.map(|raw| S::widen(c, raw));
        each!(r in 0..ROWS => each!(i in 0..8 => states[r][i] *= decay[i]));
        // SAFETY: the caller's promise; a group has its own place, which no other group reads.
        unsafe {
            sync_warp(FULL_MASK);
            if share.lane < len {
                store_update(Self::update_place(smem, share, group), update);
            }
            sync_warp(FULL_MASK);
            each!(j in 0..len => {
                let key = load_channels(smem + Self::KEYS + j * K * 4, share);
                let place = Self::update_place(smem, Share { lane: j, ..share }, group);
                let update = load_update::<ROWS>(place).to_f32(F32);
                each!(r in 0..ROWS => {
                    each!(i in 0..8 => states[r][i] = fma(update[r], key[i], states[r][i]));
                });
            });
        }
        states.map(|state| S::narrow(c, state))
    }

    /// (6) Stores e^g_j k_j of the `len` pending tokens of `lane` at `smem`, with g_j over the pending tokens after the j-th.
    /// Returns Γ of the lane's channels. All threads of the block call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn decay_keys(
        c: &StepConstants,
        (smem, log_decays, lane): (u32, u32, &Lane<ROWS>),
        len: u32,
        (share, group): (Share, u32),
    ) -> [f32; 8] {
        // SAFETY: each place has one writer, and is read after the barrier.
        unsafe {
            let (behind, total) = if G::per_channel(c) {
                Self::behind(lane, log_decays, len, [0.0; 8], (share, group))
            } else {
                let [pending] = butterfly_sum([lane.log_decay], 1, Self::LANES);
                ([[0.0; 8]; MOST_ENTRIES], [pending; 8])
            };
            each!(i in 0..Self::ENTRIES => {
                let j = group + i as u32 * Self::GROUPS;
                let mut key = lane.keys[i].to_f32(c.keys_element);
                let mut weights = behind[i];
                if G::per_channel(c) {
                    weights = weights.map(gate::exp);
                } else {
                    // Σ log α over the pending tokens after j: lane i has log α of token i.
                    let own = if share.lane > j { lane.log_decay } else { 0.0 };
                    let [log_decay] = butterfly_sum([own], 1, Self::LANES);
                    weights = [gate::exp(log_decay); 8];
                }
                each!(channel in 0..8 => key[channel] *= weights[channel]);
                if j < MAX_PENDING {
                    store_channels(smem + Self::KEYS + j * K * 4, share, key);
                }
            });
            sync_threads();
            total.map(gate::exp)
        }
    }

    /// KDA: Σ log α over the tokens after each of the group's pending tokens, and over all tokens, for the lane's channels. The
    /// tokens are the first `ahead` pending tokens of `lane`, then a token with `log_decay`. All threads of the block call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn behind(
        lane: &Lane<ROWS>,
        log_decays_smem: u32,
        ahead: u32,
        log_decay: [f32; 8],
        (share, group): (Share, u32),
    ) -> ([[f32; 8]; MOST_ENTRIES], [f32; 8]) {
        let (mut behind, mut total) = ([log_decay; MOST_ENTRIES], log_decay);
        // SAFETY: each place has one writer, and is read after the barrier.
        unsafe {
            each!(i in 0..Self::ENTRIES => {
                let j = group + i as u32 * Self::GROUPS;
                if j < MAX_PENDING {
                    let log_decays = lane.log_decays[i].to_f32(F32);
                    store_channels(log_decays_smem + j * K * 4, share, log_decays);
                }
            });
            sync_threads();
            let mut j = ahead;
            while j > 0 {
                j -= 1;
                let of_token = load_channels(log_decays_smem + j * K * 4, share);
                each!(channel in 0..8 => {
                    each!(i in 0..Self::ENTRIES => {
                        if j == group + i as u32 * Self::GROUPS {
                            behind[i][channel] = total[channel];
                        }
                    });
                    total[channel] += of_token[channel];
                });
            }
        }
        (behind, total)
    }

    /// Loads this lane's registers of the first `ahead` pending tokens from the ring; zeros for the others.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn load_lane(
        c: &StepConstants,
        ring: Ring,
        ahead: u32,
        (share, group, first): (Share, u32, u32),
    ) -> Lane<ROWS> {
        let mut lane = Lane::NONE;
        // SAFETY: the caller's promise; no thread writes an entry of a pending token.
        unsafe {
            if share.lane < ahead {
                lane.update = load::<ROWS>(ring.update(share.lane, V, first), F32, true);
                if !G::per_channel(c) {
                    lane.log_decay = f32::from_bits(load_b32(ring.decay(share.lane, 1)));
                }
            }
            each!(i in 0..Self::ENTRIES => {
                let j = group + i as u32 * Self::GROUPS;
                if j < ahead {
                    lane.keys[i] = share.load_matching::<S>(ring.key(j), c.keys_element, true);
                    if G::per_channel(c) {
                        lane.log_decays[i] = share.load_matching::<S>(ring.decay(j, K), F32, true);
                    }
                }
            });
        }
        lane
    }

    /// (2) (3) For a token with `k`, `q` and `log_decay` (GDN: the same for all channels) after the first `ahead` pending tokens:
    /// returns Γ of the lane's channels, and stores a and b of each of these pending tokens at `smem`. All threads of the block
    /// call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn weigh(
        c: &StepConstants,
        (smem, log_decays, lane): (u32, u32, &Lane<ROWS>),
        ahead: u32,
        (k, q, log_decay): ([f32; 8], [f32; 8], [f32; 8]),
        (share, group): (Share, u32),
    ) -> [f32; 8] {
        // SAFETY: each place has one writer, and is read after the barrier.
        unsafe {
            let (behind, total) = if G::per_channel(c) {
                Self::behind(lane, log_decays, ahead, log_decay, (share, group))
            } else {
                let [pending] = butterfly_sum([lane.log_decay], 1, Self::LANES);
                ([log_decay; MOST_ENTRIES], [log_decay[0] + pending; 8])
            };
            each!(i in 0..Self::ENTRIES => {
                let j = group + i as u32 * Self::GROUPS;
                let key = lane.keys[i].to_f32(c.keys_element);
                let mut decayed = key;
                // GDN's Σ log α over the pending tokens after j: lane i has log α of token i.
                let log_decay_behind = if share.lane > j { lane.log_decay } else { 0.0 };
                if G::per_channel(c) {
                    each!(channel in 0..8 => decayed[channel] *= gate::exp(behind[i][channel]));
                }
                let [mut with_k, mut with_q, log_decay_behind] = butterfly_sum(
                    [dot(decayed, k), dot(decayed, q), log_decay_behind],
                    1,
                    Self::LANES,
                );
                if !G::per_channel(c) {
                    let weight = gate::exp(log_decay[0] + log_decay_behind);
                    (with_k, with_q) = (weight * with_k, weight * with_q);
                }
                if share.lane == 0 && j < MAX_PENDING {
                    store_shared_b64(smem + j * 8, [with_k.to_bits(), with_q.to_bits()]);
                }
            });
            sync_threads();
            total.map(gate::exp)
        }
    }

    /// a and b of pending token `lane`, which [`Self::weigh`] stored at `smem`: the weights of its u in S k and S q. Zeros if it
    /// is not one of the first `ahead` tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn weights(smem: u32, share: Share, ahead: u32) -> [f32; 2] {
        let mut with = [0.0; 2];
        if share.lane < ahead {
            with = load_shared_b64(smem + share.lane * 8).map(f32::from_bits);
        }
        with
    }

    /// (4) p and o' of the row of this lane's value. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn products(
        c: &StepConstants,
        raw: [RawFragment; ROWS],
        update: [f32; ROWS],
        with: [f32; 2],
        (k, q, decay): ([f32; 8], [f32; 8], [f32; 8]),
        share: Share,
    ) -> (f32, f32) {
        let (mut decayed_k, mut decayed_q) = (k, q);
        each!(i in 0..8 => {
            decayed_k[i] *= decay[i];
            decayed_q[i] *= decay[i];
        });
        let mut products = [0.0; VALUES];
        each!(r in 0..ROWS => {
            let s = S::widen(c, raw[r]);
            products[2 * r] = fma(update[r], with[0], dot(s, decayed_k));
            products[2 * r + 1] = fma(update[r], with[1], dot(s, decayed_q));
        });
        let products = butterfly_scatter(products, 1, VALUES as u32);
        let [product] = butterfly_sum([products[0]], VALUES as u32, Self::LANES);
        let other = warp_shuffle_xor(product, 1);
        if (share.lane % VALUES as u32).is_multiple_of(2) {
            (product, other)
        } else {
            (other, product)
        }
    }

    /// Stores k and log α of the new token in the entry after the pending ones, once for all tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn append(
        c: &StepConstants,
        (ring, len): (Ring, u32),
        row: Row,
        (k, log_decay): (&[f32; 8], &[f32; 8]),
        (share, group): (Share, u32),
    ) {
        if row.tile != 0 || group != 0 {
            return;
        }
        // SAFETY: no pending token has this entry, so no block reads it; only the first value head of a query/key head writes k.
        unsafe {
            if row.value_head(c, 0) == row.hv {
                share.store_matching::<S>(ring.key(len), c.keys_element, *k);
            }
            let address = ring.decay(len, if G::per_channel(c) { K } else { 1 });
            if G::per_channel(c) {
                share.store_matching::<S>(address, F32, *log_decay);
            } else if share.lane == 0 {
                store_b32(address, log_decay[0].to_bits());
            }
        }
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
> Kernel for KLast<G, S, K, V, ROWS, VALUES, THREADS>
{
    type Params = DeferredParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: V / Self::TILE,
        // With 128 registers and blocks of 128 threads, 8 rows per lane would spill if all tensors are f32.
        min_blocks_per_sm: if ROWS == 8 && THREADS == 128 {
            3
        } else {
            512 / THREADS
        },
        shared_of_channels: Shared {
            block: Self::LOG_DECAY_BYTES,
            ..Shared::NONE
        },
        shared: Shared::of_block(Self::BYTES),
        ..Description::of(
            THREADS,
            Computes::new(Family::DECODE.on_deferred(), G::OF_CHANNELS, [K, V])
                .on(Layout::KLast, S::ELEMENT),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &DeferredParams) {
        const { Self::CHECKED };
        let c = StepConstants::get();
        let step: &StepParams = &params.layer.step;
        let tiles = const { Self::DESCRIPTION.tiles };
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        let group = thread_idx_x() / Self::LANES;
        let share = Share::of(thread_idx_x(), Self::LANES);
        let first = row.tile * Self::TILE + group * ROWS as u32;
        // A lane ends up with one product: a row's with k, or, in the neighbouring lane, with q.
        let own = share.lane % VALUES as u32;
        let own_row = first + own / 2;
        let writes = share.lane < VALUES as u32 && own.is_multiple_of(2);
        let wide = c.wide_io != 0;
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each; no pending token has the new
        // token's entry.
        unsafe {
            let pending = Pending::load(&c, params, row.b);
            let ring = Ring::of(&c, params, pending, row, [K, V], (F32, G::per_channel(&c)));
            let head = (row.hv, [V, K]);
            let wide_state = c.wide_state != 0;
            let head =
                Head::of_slot::<S>(step.read_pool, pending.slot, c.read_slot, head, wide_state);
            let must_flush =
                pending.len > 0 && (c.tokens == 0 || flushes(pending.len, c.tokens, c.pending));
            if c.tokens == 0 && !must_flush {
                return;
            }
            let mut raw = [[0; 8]; ROWS];
            each!(r in 0..ROWS => {
                let start = (pending.live, pending.fresh);
                raw[r] = head.load_start::<S>(share, first + r as u32, start);
            });
            let (smem, log_decays) = (dynamic_shared_mem(), dynamic_shared_mem() + Self::BYTES);
            let mut lane = Self::load_lane(&c, ring, pending.len, (share, group, first));
            if must_flush {
                let at = (share, group);
                let decay = Self::decay_keys(&c, (smem, log_decays, &lane), pending.len, at);
                raw = Self::flush(&c, (smem, decay, lane.update), pending.len, raw, at);
                lane = Lane::NONE;
            }
            if must_flush || (pending.live && pending.fresh) {
                let rows = head.rows::<S>(share, first);
                each!(r in 0..ROWS => rows.store::<S>(r, 0, raw[r]));
            }
            if c.tokens == 0 {
                return;
            }
            let ahead = if must_flush { 0 } else { pending.len };
            let tokens = Tokens::new(&c, step, row);
            let load_token = || {
                (
                    share.load_matching::<S>(tokens.k.at(0, 0), c.k_element, wide),
                    share.load_matching::<S>(tokens.q.at(0, 0), c.q_element, wide),
                    load_one(tokens.v.at(0, own_row), c.v_element),
                    LaneGates::load::<G, S, K>(&c, step, row, &tokens, 0, share),
                )
            };
            // KDA with two pending tokens per group and narrow accesses to states has too few registers to hold the token and u
            // here. So the token is loaded later, after the check of `live`, and u is kept in shared memory until it is used.
            let parks = Self::ENTRIES == 2 && G::per_channel(&c) && !wide_state;
            let mut token = None;
            if !parks {
                token = Some(load_token());
            }
            let o = tokens.o.at(0, own_row);
            let parked = Self::update_place(smem, share, group);
            if parks && share.lane < ahead {
                store_update(parked, lane.update);
            }
            // Loads first: docs/compiler.md.
            if !pending.live {
                if writes {
                    elements::store([0.0], o, c.o_element, false);
                }
                return;
            }

            let (k, q, v, gates) = match token {
                Some(token) => token,
                None => load_token(),
            };
            // k is multiplied by a power of two if its sum of squares overflows. The ring gets this k, because u = δ rk has its
            // rk.
            let (mut k, mut q) = ([k], [q]);
            let elements = [c.k_element, c.q_element];
            tame(c.l2norm != 0, [&mut k, &mut q], elements, Self::LANES);
            let (k, q) = (k[0].to_f32(c.k_element), q[0].to_f32(c.q_element));
            let [v] = v.to_f32(c.v_element);
            let norms = norms(([k], [q]), Self::LANES); // (1)
            let (log_decay, beta) = gates.log_values::<G>(&c, Self::LANES);
            let scale = f32::from_bits(c.scale);
            let factors = Factors::new(c.l2norm != 0, scale, norms, (1.0, beta));
            let left = (&k, &log_decay);
            Self::append(&c, (ring, pending.len), row, left, (share, group));
            let decay = Self::weigh(
                &c,
                (smem, log_decays, &lane),
                ahead,
                (k, q, log_decay),
                (share, group),
            );

            let with = Self::weights(smem, share, ahead);
            if parks {
                lane.update = Raw([0; ROWS]);
                if share.lane < ahead {
                    lane.update = load_update(parked);
                }
            }
            let update = lane.update.to_f32(F32);
            let (sk, sq) = Self::products(&c, raw, update, with, (k, q, decay), share);
            let delta = factors.delta(v, sk);
            if writes {
                elements::store([factors.output(sq, delta)], o, c.o_element, false); // (5)
                ring.leave_update(pending.len, V, own_row, delta * factors.k);
            }
        }
    }
}
