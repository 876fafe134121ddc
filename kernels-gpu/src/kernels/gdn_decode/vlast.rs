//! GDN decode on V-last states; steps are those of the operator's header.

use core::marker::PhantomData;

use super::row::{DecodeGates, DecodeSlots};
use crate::device::float::fma;
use crate::device::rarely;
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, load_shared_b128, store_shared_b32,
    store_shared_b128,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::lane_id;
use crate::launch::{Computes, Description, Family, Kernel, Layout, Shared};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, bytes_of, load, load_one};
use crate::math::range::{may_overflow, overflow, shrinking, times};
use crate::math::reduce::{column_products, pairwise_sum};
use crate::recurrent::vlast::{leave_sums, warp_norms, warp_shrunk};
use crate::row::Row;
use crate::state::{FRAGMENT, Share, StateElement, check_v_last};
use crate::step::{StepConstants, StepParams};

/// V-last states: 8 · `LANES` columns per block, `ROWS` rows per group of `LANES` lanes.
///
/// As many threads as there are columns, whole warps, own one each: they turn the block's sums into δ and o while
/// the others wait. Whatever `LANES` and `ROWS` are, sums over the rows are taken pair by pair, neighbours first.
pub struct VLast<S, const K: u32, const V: u32, const LANES: u32, const ROWS: usize>(
    PhantomData<S>,
);

impl<S, const K: u32, const V: u32, const LANES: u32, const ROWS: usize>
    VLast<S, K, V, LANES, ROWS>
{
    /// Columns of a block.
    const COLUMNS: u32 = LANES * FRAGMENT;
    const THREADS: u32 = K / ROWS as u32 * LANES;
    const WARPS: u32 = Self::THREADS / 32;
    /// Shared memory: S k and S q of each column from each warp; then what each owner sets aside, its factors and
    /// its v; then δ rk of each column; then α.
    const OWNERS: u32 = Self::WARPS * Self::COLUMNS * 8;
    const STEPS: u32 = Self::OWNERS + Self::COLUMNS * 32;
    const DECAY: u32 = Self::STEPS + Self::COLUMNS * 4;
}

impl<S: StateElement, const K: u32, const V: u32, const LANES: u32, const ROWS: usize> Kernel
    for VLast<S, K, V, LANES, ROWS>
{
    type Params = StepParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: V / Self::COLUMNS,
        shared: Shared::of_block(Self::DECAY + 16),
        ..Description::of(
            Self::THREADS,
            Computes::new(Family::DECODE, Some(false), [K, V]).on(Layout::VLast, S::ELEMENT),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &StepParams) {
        const { check_v_last(K, V, LANES, ROWS as u32) };
        let c = StepConstants::get();
        let row = Row::of_block(
            c.h,
            c.ratio,
            c.tiled != 0,
            const { Self::DESCRIPTION.tiles },
        );
        let (warp, group) = (thread_idx_x() / 32, thread_idx_x() / LANES);
        let share = Share {
            lane: thread_idx_x() % LANES,
            lanes: LANES,
            first: row.tile * Self::COLUMNS,
        };
        let first = group * ROWS as u32;
        let wide = c.wide_io != 0;
        // Warps of the same index share a scheduler with those of other blocks: the owners rotate.
        let owner = (warp + row.tile + row.hv + row.b) % Self::WARPS;
        let owns_column = owner < Self::COLUMNS / 32;
        let own = owner * 32 + lane_id();
        let column = share.first + own;
        let sums_smem = dynamic_shared_mem();
        let owner_smem = sums_smem + Self::OWNERS + own * 32;
        let (steps_smem, decay_smem) = (sums_smem + Self::STEPS, sums_smem + Self::DECAY);
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each, an owner its column
        // of o; sums, steps and decay are written by one thread each before the barrier that precedes their reads.
        unsafe {
            let slots = DecodeSlots::load(&c, params, row.b);
            let live = slots.live(&c, params);
            let read = slots.read_head::<S>(&c, params, (row.hv, [K, V]));
            let mut raw = [[0; 8]; ROWS];
            each!(r in 0..ROWS => {
                raw[r] = read.load_start::<S>(share, first + r as u32, (live, slots.is_fresh()));
            });
            let k = load::<ROWS>(row.k(&c, params, first), c.k_element, wide);
            let q = load::<ROWS>(row.q(&c, params, first), c.q_element, wide);
            // Loads first: docs/compiler.md.
            if !live {
                if owns_column {
                    elements::store([0.0], row.o(&c, params, column), c.o_element, wide);
                }
                return;
            }
            let may_overflow = may_overflow(c.l2norm != 0, [c.k_element, c.q_element]);
            let mut overflows = false;
            if owns_column {
                let (k_address, q_address) = (row.k(&c, params, 0), row.q(&c, params, 0));
                let k = warp_channels::<K>(k_address, c.k_element, wide);
                let q = warp_channels::<K>(q_address, c.q_element, wide);
                let [v] = load_one(row.v(&c, params, column), c.v_element).to_f32(c.v_element);
                let gates = DecodeGates::load(&c, params, row);
                let mut norms = warp_norms(k, q); // (1)
                let mut powers = [1.0; 2];
                if overflow(may_overflow, norms) {
                    powers = shrinking(norms);
                    (_, norms) = warp_shrunk([k, q], norms);
                    overflows = true;
                }
                let f = Factors::new(
                    c.l2norm != 0,
                    f32::from_bits(c.scale),
                    norms,
                    gates.values(&c),
                );
                store_shared_b128(
                    owner_smem,
                    [
                        f.decay.to_bits(),
                        f.beta.to_bits(),
                        f.k.to_bits(),
                        f.q.to_bits(),
                    ],
                );
                let [of_k, of_q] = powers.map(f32::to_bits);
                store_shared_b128(owner_smem + 16, [f.kq.to_bits(), v.to_bits(), of_k, of_q]);
            }

            let (mut k, mut q) = (k.to_f32(c.k_element), q.to_f32(c.q_element));
            let mut is_first = true;
            loop {
                let sk = column_products(|r| S::widen(&c, raw[r]), k);
                let sq = column_products(|r| S::widen(&c, raw[r]), q);
                let sums = sums_smem + warp * Self::COLUMNS * 8;
                leave_sums::<S, LANES>(sk, sq, share, sums);
                sync_threads();
                if !is_first || !may_overflow {
                    break;
                }
                // Those that wait for the owners look at what one of them has left.
                let powers = sums_smem + Self::OWNERS + 24;
                if !owns_column {
                    let [of_k, of_q] = load_shared_b64(powers).map(f32::from_bits);
                    overflows = of_k * of_q != 1.0;
                }
                // The block is of one mind.
                if !overflows {
                    break;
                }
                rarely();
                let [of_k, of_q] = load_shared_b64(powers).map(f32::from_bits);
                (k, q) = (times(k, of_k), times(q, of_q));
                is_first = false;
            }
            if owns_column {
                let [sk, sq] = pairwise_sum(Self::WARPS as usize, |i| {
                    load_shared_b64(sums_smem + (i as u32 * Self::COLUMNS + own) * 8)
                        .map(f32::from_bits)
                });
                let [decay, beta, k, q] = load_shared_b128(owner_smem).map(f32::from_bits);
                let [kq, v] = load_shared_b64(owner_smem + 16).map(f32::from_bits);
                let factors = Factors {
                    decay,
                    beta,
                    k,
                    q,
                    kq,
                };
                let delta = factors.delta(v, sk); // (3)
                let o = factors.output(sq, delta); // (5)
                elements::store([o], row.o(&c, params, column), c.o_element, wide);
                store_shared_b32(steps_smem + own * 4, (delta * factors.k).to_bits());
                if own == 0 {
                    store_shared_b32(decay_smem, factors.decay.to_bits());
                }
            }
            if c.update_state == 0 {
                return;
            }
            sync_threads();
            let decay = f32::from_bits(load_shared_b32(decay_smem));
            let mut step = [0.0; 8];
            let mut i = 0;
            while i < 8 {
                let piece = load_shared_b128(steps_smem + share.column::<S>(i) * 4);
                each!(j in 0..4 => step[i + j] = f32::from_bits(piece[j]));
                i += 4;
            }
            let write = slots.write_head::<S>(&c, params, (row.hv, [K, V]));
            each!(r in 0..ROWS => {
                let s = S::widen(&c, raw[r]);
                let mut next = [0.0; 8];
                each!(i in 0..8 => {
                    next[i] = fma(step[i], k[r], decay * s[i]); // (2) (4)
                });
                write.store::<S>(share, first + r as u32, S::narrow(&c, next));
            });
        }
    }
}

/// This lane's channels of q or k: 2 of K = 64, of a larger K 4 of each of the first K/4 lanes; padded with zeros to 4.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn warp_channels<const K: u32>(address: u64, element: u32, wide: bool) -> [f32; 4] {
    let own = if K > 64 { 4 } else { 2 };
    let address = address + (lane_id() * own * bytes_of(element)) as u64;
    if K > 64 {
        if lane_id() < K / 4 {
            load::<4>(address, element, wide).to_f32(element)
        } else {
            [0.0; 4]
        }
    } else {
        let [x, y] = load::<2>(address, element, wide).to_f32(element);
        [x, y, 0.0, 0.0]
    }
}
