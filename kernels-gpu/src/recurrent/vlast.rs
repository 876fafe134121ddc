//! Token by token on V-last states, which stay in registers between tokens.

use core::marker::PhantomData;

use super::gates::{RawGates, gate_row, load_a_log, load_beta, load_gate};
use super::prepared::{Prepared, description, store_factors};
use super::slots::{Slots, token_slot};
use super::tokens::{Decays, Tokens, clear_rest_of_tile};
use crate::constants::Element;
use crate::device::float::fma;
use crate::device::rarely;
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, load_shared_b128, store_shared_b32,
    store_shared_b64, store_shared_b128,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{lane_id, sync_warp};
use crate::launch::{Description, Kernel, Layout};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, Raw, bytes_of, load, load_one};
use crate::math::range::{may_overflow, overflow, shrinking, shrunk, times};
use crate::math::reduce::{
    butterfly_scatter, butterfly_sum, butterfly_sum_small, column_products, dot, pairwise_sum,
};
use crate::row::Row;
use crate::state::{FRAGMENT, RawFragment, Share, StateElement, Tile, check_v_last};
use crate::step::{StepConstants, StepParams};

/// V-last states: 8 · `LANES` columns per block, `ROWS` rows per group of `LANES` lanes.
///
/// With one new token and no previous one, each thread loads its own factors from global memory. Otherwise tokens are prepared in
/// shared memory, each by one warp for the whole block; then all warps process them in order. Whole warps of owners, with one
/// column per thread, turn the block's sums into δ and o while the other warps wait. Sums over the rows are taken pair by pair,
/// neighbours first, for any `LANES` and `ROWS`.
pub struct VLast<G, S, const K: u32, const V: u32, const LANES: u32, const ROWS: usize>(
    PhantomData<(G, S)>,
);

impl<G: Decays, S: StateElement, const K: u32, const V: u32, const LANES: u32, const ROWS: usize>
    VLast<G, S, K, V, LANES, ROWS>
{
    /// Columns of a block.
    const COLUMNS: u32 = LANES * FRAGMENT;
    const THREADS: u32 = K / ROWS as u32 * LANES;
    const WARPS: u32 = Self::THREADS / 32;
    /// Layout of shared memory: each warp's part of S k and S q of each column; then δ rk of each column; then the tokens.
    const STEPS: u32 = Self::WARPS * Self::COLUMNS * 8;

    /// Column that this thread owns; `COLUMNS` or more if it owns none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn owner(row: Row) -> u32 {
        // The owners rotate, because warps of the same index share a scheduler with those of other blocks.
        let warp = thread_idx_x() / 32 + row.tile + row.hv + row.b;
        warp % Self::WARPS * 32 + lane_id()
    }

    /// Processes one new token without previous ones. Each thread loads k and q of its rows from global memory, and each warp
    /// computes KDA's α of its rows, so that the products wait for no other warp. The first warp of owners computes the factors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn decode(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        (slots, live): (&Slots, bool),
        tokens: &Tokens,
        (share, first): (Share, u32),
    ) {
        let wide = c.wide_io != 0;
        let warp = thread_idx_x() / 32;
        let owner = Self::owner(row);
        let owns_column = owner < Self::COLUMNS;
        let sums = dynamic_shared_mem();
        let steps = sums + Self::STEPS;
        let smem = Self::token(c, 0);
        let o = tokens.o.at(0, share.first + owner);
        // The powers of two by which k and q are multiplied take the place of a prepared token's k.
        let powers = smem;
        let start = slots.start::<S>(c, params, (row.hv, [K, V]));
        let mut raw = [[0; 8]; ROWS];
        each!(r in 0..ROWS => {
            raw[r] = start.load_start::<S>(share, first + r as u32, (live, slots.is_fresh()));
        });
        let k = load::<ROWS>(tokens.k.at(0, first), c.k_element, wide);
        let q = load::<ROWS>(tokens.q.at(0, first), tokens.q.element(), wide);
        // KDA's gates of one of the warp's rows.
        let rows_of_warp = const { 32 / LANES * ROWS as u32 };
        let channel = warp * rows_of_warp + lane_id() % rows_of_warp;
        let mut gates = RawGates::<1>::NONE;
        if G::per_channel(c) {
            gates = load_gate::<G>(c, params, row, (tokens, 0), (channel, K));
        }
        let slot = token_slot(c, params, row.b, 0);
        // Loads first: docs/compiler.md.
        if !live {
            if owns_column {
                elements::store([0.0], o, c.o_element, false);
            }
            return;
        }
        let elements = [c.k_element, tokens.q.element()];
        let may_overflow = may_overflow(c.l2norm != 0, elements);
        let mut overflows = false;
        if owns_column {
            let v = load_one(tokens.v.at(0, share.first + owner), c.v_element);
            if owner < 32 {
                let k = warp_channels::<K>(tokens.k.at(0, 0), elements[0], wide);
                let q = warp_channels::<K>(tokens.q.at(0, 0), elements[1], wide);
                if !G::per_channel(c) {
                    gates = load_gate::<G>(c, params, row, (tokens, 0), (0, K));
                }
                let (k, q) = (k.to_f32(elements[0]), q.to_f32(elements[1]));
                let mut norms = warp_norms(k, q); // (1)
                let mut by = [1.0; 2];
                if overflow(may_overflow, norms) {
                    by = shrinking(norms);
                    (_, norms) = warp_shrunk([k, q], norms);
                    overflows = true;
                }
                let ([decay], beta) = gates.values(c);
                let decay = if G::per_channel(c) { 1.0 } else { decay };
                let (l2norm, scale) = (c.l2norm != 0, f32::from_bits(c.scale));
                let factors = Factors::new(l2norm, scale, norms, (decay, beta));
                if lane_id() == 0 {
                    store_factors(smem + Self::FACTORS, factors);
                    if may_overflow {
                        store_shared_b64(powers, by.map(f32::to_bits));
                    }
                }
            }
            let [v] = v.to_f32(c.v_element);
            store_shared_b32(smem + Self::VALUES + owner * 4, v.to_bits());
        }

        let decays = smem + Self::DECAY + first * 4;
        let mut decay = [1.0; ROWS];
        if G::per_channel(c) {
            let ([own], _) = gates.values(c);
            if lane_id() < rows_of_warp {
                store_shared_b32(smem + Self::DECAY + channel * 4, own.to_bits());
            }
            sync_warp(u32::MAX);
            decay = load_rows(decays);
        }
        let (mut k, mut q) = (k.to_f32(elements[0]), q.to_f32(elements[1]));
        let mut is_first = true;
        loop {
            let sk = column_products(|r| decayed::<G, S>(c, raw[r], decay[r]), k);
            if G::per_channel(c) {
                // Loaded again, because the compiler would otherwise keep all decayed rows in registers for the second sums.
                decay = load_rows(decays);
            }
            let sq = column_products(|r| decayed::<G, S>(c, raw[r], decay[r]), q);
            leave_sums::<S, LANES>(sk, sq, share, sums + warp * Self::COLUMNS * 8);
            sync_threads();
            if !is_first || !may_overflow {
                break;
            }
            // All threads of the block must decide alike: threads that did not compute the factors read the powers.
            let load_powers = || load_shared_b64(powers).map(f32::from_bits);
            if owner >= 32 {
                let [of_k, of_q] = load_powers();
                overflows = of_k * of_q != 1.0;
            }
            if !overflows {
                break;
            }
            rarely();
            let [of_k, of_q] = load_powers();
            (k, q) = (times(k, of_k), times(q, of_q));
            is_first = false;
        }
        if owns_column {
            elements::store([Self::close(c, 0, owner)], o, c.o_element, false);
        }
        if c.update_state == 0 && c.has_snapshots == 0 && c.token_index == 0 {
            return;
        }
        sync_threads();
        // KDA's decay is loaded again, so that it occupies no registers while the block waits.
        let decay = if G::per_channel(c) {
            load_rows(decays)
        } else {
            [f32::from_bits(load_shared_b32(smem + Self::FACTORS)); ROWS]
        };
        let step = load_steps::<S>(share, steps);
        each!(r in 0..ROWS => {
            let s = S::widen(c, raw[r]);
            let mut next = [0.0; 8];
            each!(i in 0..8 => next[i] = fma(step[i], k[r], decay[r] * s[i])); // (2) (4)
            let next = S::narrow(c, next);
            slots.after::<S>(c, params, row, [K, V], (0, true, slot), |head| {
                head.store::<S>(share, first + r as u32, next);
            });
        });
    }

    /// Prepares all of `tokens` in shared memory, after the `before` tokens that are there already. The warps take turns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn prepare(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        tokens: &Tokens,
        before: u32,
    ) {
        let first = row.tile * Self::COLUMNS;
        let mut t = thread_idx_x() / 32;
        while t < tokens.count {
            let smem = Self::token(c, before + t);
            // SAFETY: the caller's promise; each token's bytes have one writer.
            unsafe {
                let wide = c.wide_io != 0;
                let k = warp_channels::<K>(tokens.k.at(t, 0), c.k_element, wide);
                let q = warp_channels::<K>(tokens.q.at(t, 0), tokens.q.element(), wide);
                let mut i = lane_id();
                while i < Self::COLUMNS {
                    let [v] = load_one(tokens.v.at(t, first + i), c.v_element).to_f32(c.v_element);
                    store_shared_b32(smem + Self::VALUES + i * 4, v.to_bits());
                    i += 32;
                }
                let (decay, gates) = warp_gates::<G, K>(c, params, row, tokens, t);
                if G::per_channel(c) {
                    store_channels::<K>(smem + Self::DECAY, decay);
                }
                let elements = [c.k_element, tokens.q.element()];
                let (k, q) = (k.to_f32(elements[0]), q.to_f32(elements[1]));
                store_channels::<K>(smem, k);
                store_channels::<K>(smem + Self::Q, q);
                let mut norms = warp_norms(k, q); // (1)
                if overflow(may_overflow(c.l2norm != 0, elements), norms) {
                    let ([k, q], shrunk) = warp_shrunk([k, q], norms);
                    store_channels::<K>(smem, k);
                    store_channels::<K>(smem + Self::Q, q);
                    norms = shrunk;
                }
                let f = Factors::new(c.l2norm != 0, f32::from_bits(c.scale), norms, gates);
                let slot = token_slot(c, params, row.b, t);
                if lane_id() == 0 {
                    Self::store_factors(c, smem, f, slot);
                }
            }
            t += Self::WARPS;
        }
    }

    /// Decays KDA's states (2), then stores this warp's part of S k and S q of every column in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn products(
        c: &StepConstants,
        states: &mut [[f32; 8]; ROWS],
        token: u32,
        share: Share,
        first: u32,
    ) {
        let smem = Self::token(c, token);
        let warp = thread_idx_x() / 32;
        if G::per_channel(c) {
            let decay = load_rows::<ROWS>(smem + Self::DECAY + first * 4);
            each!(r in 0..ROWS => {
                states[r] = states[r].map(|s| s * decay[r]); // (2)
            });
        }
        let (k, q) = (
            load_rows::<ROWS>(smem + first * 4),
            load_rows::<ROWS>(smem + Self::Q + first * 4),
        );
        let sums = dynamic_shared_mem() + warp * Self::COLUMNS * 8;
        leave_products::<S, ROWS, LANES>(states, (k, q), share, sums);
    }

    /// Computes δ of column `own`, stores δ rk in shared memory, and returns o of the column.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn close(c: &StepConstants, token: u32, own: u32) -> f32 {
        let smem = Self::token(c, token);
        let [sk, sq] = pairwise_sum(Self::WARPS as usize, |i| {
            load_shared_b64(dynamic_shared_mem() + (i as u32 * Self::COLUMNS + own) * 8)
                .map(f32::from_bits)
        });
        let factors = Self::factors(c, smem);
        let v = f32::from_bits(load_shared_b32(smem + Self::VALUES + own * 4));
        let delta = factors.delta(v, sk); // (3)
        let step = delta * factors.k;
        store_shared_b32(dynamic_shared_mem() + Self::STEPS + own * 4, step.to_bits());
        factors.output(sq, delta) // (5)
    }

    /// Updates the states by prepared token `token`; δ rk of each column is in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn update(
        c: &StepConstants,
        states: &mut [[f32; 8]; ROWS],
        token: u32,
        share: Share,
        first: u32,
    ) {
        let smem = Self::token(c, token);
        let decay = Self::factors(c, smem).decay;
        let k = load_rows::<ROWS>(smem + first * 4);
        advance::<G, S, ROWS>(
            c,
            states,
            k,
            decay,
            share,
            dynamic_shared_mem() + Self::STEPS,
        );
    }
}

impl<G: Decays, S: StateElement, const K: u32, const V: u32, const LANES: u32, const ROWS: usize>
    Prepared for VLast<G, S, K, V, LANES, ROWS>
{
    type Decays = G;
    const K: u32 = K;
    const TILE: u32 = Self::COLUMNS;
    const TOKENS: u32 = Self::STEPS + Self::COLUMNS * 4;
}

impl<G: Decays, S: StateElement, const K: u32, const V: u32, const LANES: u32, const ROWS: usize>
    Kernel for VLast<G, S, K, V, LANES, ROWS>
{
    type Params = StepParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // Entries with 2 or more than 4 rows are for decode; the assembler chooses their register count.
        min_blocks_per_sm: if ROWS == 4 { 512 / Self::THREADS } else { 0 },
        ..description::<Self, S>(Layout::VLast, Self::THREADS, V)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &StepParams) {
        const { check_v_last(K, V, LANES, ROWS as u32) };
        const {
            assert!(
                ROWS == 2 || ROWS.is_multiple_of(4),
                "prepared channels are loaded by twos or fours"
            )
        };
        let c = StepConstants::get();
        let tiles = const { Self::DESCRIPTION.tiles };
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        let share = Share::of(thread_idx_x(), LANES).from(row.tile * Self::COLUMNS);
        let first = thread_idx_x() / LANES * ROWS as u32;
        let owner = Self::owner(row);
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each; prepared tokens are
        // written before the barrier that precedes their reads.
        unsafe {
            let slots = Slots::load(&c, params, row.b);
            let tokens = Tokens::new(&c, params, row);
            clear_rest_of_tile(&c, params, (row, Self::COLUMNS), Self::THREADS);
            if !tokens.live {
                return;
            }
            let mut live = slots.live(&c, params);
            if tokens.are_none(&c) {
                rarely();
                let tile = Tile::new(true, [K, V], (share.first, Self::COLUMNS));
                if live {
                    let threads = (thread_idx_x(), Self::THREADS);
                    slots.carry::<S>(&c, params, (row.hv, tile), threads);
                }
                return;
            }
            let mut previous = tokens;
            let mut kept = 0;
            if c.previous_tokens != 0 {
                previous = Tokens::previous(&c, params, row);
                live = live && previous.live;
                kept = previous.count;
            }
            if c.tokens == 1 && c.previous_tokens == 0 {
                Self::decode(&c, params, row, (&slots, live), &tokens, (share, first));
                return;
            }
            let start = slots.start::<S>(&c, params, (row.hv, [K, V]));
            let mut raw = [[0; 8]; ROWS];
            each!(r in 0..ROWS => {
                raw[r] = start.load_start::<S>(share, first + r as u32, (live, slots.is_fresh()));
            });
            if !live {
                let mut t = 0;
                while t < tokens.count && owner < Self::COLUMNS {
                    let o = tokens.o.at(t, share.first + owner);
                    elements::store([0.0], o, c.o_element, false);
                    t += 1;
                }
                return;
            }
            if c.previous_tokens != 0 {
                Self::prepare(&c, params, row, &previous, 0);
            }
            Self::prepare(&c, params, row, &tokens, kept);
            sync_threads();
            let mut states = raw.map(|raw| S::widen(&c, raw));
            if c.previous_tokens != 0 {
                each!(t in 0..kept => {
                    Self::products(&c, &mut states, t, share, first);
                    sync_threads();
                    if owner < Self::COLUMNS {
                        Self::close(&c, t, owner);
                    }
                    sync_threads();
                    Self::update(&c, &mut states, t, share, first);
                });
                let write = slots.write::<S>(&c, params, (row.hv, [K, V]));
                each!(r in 0..ROWS => {
                    let rounded = S::narrow(&c, states[r]);
                    write.store::<S>(share, first + r as u32, rounded);
                    states[r] = S::widen(&c, rounded);
                });
            }
            each!(t in 0..tokens.count => {
                Self::products(&c, &mut states, kept + t, share, first);
                sync_threads();
                if owner < Self::COLUMNS {
                    let o = Self::close(&c, kept + t, owner);
                    let address = tokens.o.at(t, share.first + owner);
                    elements::store([o], address, c.o_element, false);
                }
                sync_threads();
                Self::update(&c, &mut states, kept + t, share, first);
                let is_last = t + 1 == tokens.count;
                let slot = Self::slot(&c, Self::token(&c, kept + t));
                slots.after::<S>(&c, params, row, [K, V], (t, is_last, slot), |head| {
                    each!(r in 0..ROWS => {
                        head.store::<S>(share, first + r as u32, S::narrow(&c, states[r]));
                    });
                });
            });
        }
    }
}

/// The row of S with which a decode's products are computed: with KDA, after its decay (2); GDN's decay is in the factors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn decayed<G: Decays, S: StateElement>(
    c: &StepConstants,
    raw: RawFragment,
    decay: f32,
) -> [f32; 8] {
    let mut s = S::widen(c, raw);
    if G::per_channel(c) {
        each!(i in 0..8 => s[i] *= decay);
    }
    s
}

/// Computes this warp's part of S k and S q of every column, and stores it at `sums`.
///
/// # Safety
/// Only this warp writes the sums; all of its lanes call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn leave_products<S: StateElement, const ROWS: usize, const LANES: u32>(
    states: &[[f32; 8]; ROWS],
    (k, q): ([f32; ROWS], [f32; ROWS]),
    share: Share,
    sums: u32,
) {
    let sk = column_products(|r| states[r], k);
    let sq = column_products(|r| states[r], q);
    leave_sums::<S, LANES>(sk, sq, share, sums)
}

/// Sums the lanes' parts of S k and S q of every column over the warp, and stores the sums at `sums`. `sk` and `sq` are this
/// thread's parts, for its own columns.
///
/// # Safety
/// Only this warp writes the sums; all of its lanes call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn leave_sums<S: StateElement, const LANES: u32>(
    sk: [f32; 8],
    sq: [f32; 8],
    share: Share,
    sums: u32,
) {
    let sk = butterfly_scatter(sk, LANES, 32);
    let sq = butterfly_scatter(sq, LANES, 32);
    let kept = FRAGMENT * LANES / 32;
    each!(i in 0..kept => {
        let column = share.column::<S>((lane_id() / LANES * kept + i) as usize);
        let pair = [sk[i as usize].to_bits(), sq[i as usize].to_bits()];
        store_shared_b64(sums + column * 8, pair);
    });
}

/// Loads δ rk of this thread's columns; `steps` has δ rk of all columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load_steps<S: StateElement>(share: Share, steps: u32) -> [f32; 8] {
    let mut step = [0.0; 8];
    let mut i = 0;
    while i < 8 {
        let piece = load_shared_b128(steps + share.column::<S>(i) * 4);
        each!(j in 0..4 => step[i + j] = f32::from_bits(piece[j]));
        i += 4;
    }
    step
}

/// Updates the states by a token; `steps` has its δ rk of each column.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn advance<G: Decays, S: StateElement, const ROWS: usize>(
    c: &StepConstants,
    states: &mut [[f32; 8]; ROWS],
    k: [f32; ROWS],
    decay: f32,
    share: Share,
    steps: u32,
) {
    let step = load_steps::<S>(share, steps);
    each!(r in 0..ROWS => {
        each!(i in 0..8 => {
            let s = states[r][i];
            // KDA's state is already decayed.
            let decayed = if G::per_channel(c) { s } else { decay * s };
            states[r][i] = fma(step[i], k[r], decayed); // (2) (4)
        });
    });
}

/// Gates of token `t`: KDA's α of this lane's channels, padded to 4; then the inputs of [`Factors`]: GDN's α (KDA: 1) and β.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn warp_gates<G: Decays, const K: u32>(
    c: &StepConstants,
    params: &StepParams,
    row: Row,
    tokens: &Tokens,
    t: u32,
) -> ([f32; 4], (f32, f32)) {
    if G::per_channel(c) {
        let (decay, beta) = channel_gates::<K>(c, params, row, tokens, t);
        return (decay, (1.0, beta));
    }
    let mut dt_bias = Raw([0]);
    if c.has_dt_bias != 0 {
        let address = params.dt_bias + gate_row(c, row) as u64 * 4;
        dt_bias = load_one(address, Element::F32 as u32);
    }
    let gates = RawGates {
        g: load_one(tokens.g.at(t, 0), c.g_element),
        b: load_beta(c, tokens, t),
        a_log: load_a_log(c, params, row),
        dt_bias,
    };
    let ([decay], beta) = gates.values(c);
    ([0.0; 4], (decay, beta))
}

/// α of this lane's channels, padded to 4, and β of token `t`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn channel_gates<const K: u32>(
    c: &StepConstants,
    params: &StepParams,
    row: Row,
    tokens: &Tokens,
    t: u32,
) -> ([f32; 4], f32) {
    let wide = c.wide_io != 0;
    let dt_bias = if c.has_dt_bias != 0 {
        let address = params.dt_bias + gate_row(c, row) as u64 * (K * 4) as u64;
        warp_channels::<K>(address, Element::F32 as u32, wide)
    } else {
        Raw([0; 4])
    };
    let gates = RawGates {
        g: warp_channels::<K>(tokens.g.at(t, 0), c.g_element, wide),
        b: load_beta(c, tokens, t),
        a_log: load_a_log(c, params, row),
        dt_bias,
    };
    gates.values(c)
}

/// Σk², Σq² and k·q over the warp. All of its lanes call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn warp_norms(k: [f32; 4], q: [f32; 4]) -> [f32; 3] {
    butterfly_sum([dot(k, k), dot(q, q), dot(k, q)], 1, 32)
}

/// Multiplies k and q, whose [`warp_norms`] `sums` [`overflow`], by the powers of two from [`shrinking`]; returns both and their
/// corrected sums. All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn warp_shrunk([k, q]: [[f32; 4]; 2], sums: [f32; 3]) -> ([[f32; 4]; 2], [f32; 3]) {
    let powers = shrinking(sums);
    let (k, q) = (times(k, powers[0]), times(q, powers[1]));
    let own = [dot(k, k), dot(q, q), dot(k, q)];
    ([k, q], shrunk(butterfly_sum_small(own, 32), powers))
}

/// Loads this lane's channels of q, k or a gate, padded with zeros to 4: with K = 64 each lane has 2 channels, with a larger K
/// each of the first K/4 lanes has 4.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn warp_channels<const K: u32>(address: u64, element: u32, wide: bool) -> Raw<4> {
    let own = if K > 64 { 4 } else { 2 };
    let address = address + (lane_id() * own * bytes_of(element)) as u64;
    if K > 64 {
        if lane_id() < K / 4 {
            load::<4>(address, element, wide)
        } else {
            Raw([0; 4])
        }
    } else {
        let Raw([x, y]) = load::<2>(address, element, wide);
        Raw([x, y, 0, 0])
    }
}

/// Stores this lane's channels of a row of K channels, in shared memory; lanes have the channels that [`warp_channels`] loads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn store_channels<const K: u32>(smem: u32, values: [f32; 4]) {
    let [x, y, z, w] = values.map(f32::to_bits);
    if K > 64 {
        if lane_id() < K / 4 {
            store_shared_b128(smem + lane_id() * 16, [x, y, z, w]);
        }
    } else {
        store_shared_b64(smem + lane_id() * 8, [x, y]);
    }
}

/// Loads `ROWS` (2, or a multiple of 4) consecutive values.
///
/// # Safety
/// The values are in shared memory at `smem`, which is a multiple of 16, or of 4 `ROWS` if that is less.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn load_rows<const ROWS: usize>(smem: u32) -> [f32; ROWS] {
    let mut values = [0.0; ROWS];
    if ROWS == 2 {
        [values[0], values[1]] = load_shared_b64(smem).map(f32::from_bits);
        return values;
    }
    let mut i = 0;
    while i < ROWS {
        let piece = load_shared_b128(smem + i as u32 * 4);
        each!(j in 0..4 => values[i + j] = f32::from_bits(piece[j]));
        i += 4;
    }
    values
}
