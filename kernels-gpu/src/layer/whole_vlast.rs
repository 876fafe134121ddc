//! The layer step on V-last states, whole heads per block: for batches that fill the GPU with whole heads.

use core::marker::PhantomData;

use super::slices::Slices;
use super::whole::{Ahead, Whole, description, finish, store_zeros};
use super::{Place, warp_channels};
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, store_shared_b32,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::launch::{Description, Family, Kernel, Layout};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::range::overflow;
use crate::math::reduce::{column_products, pairwise_sum};
use crate::recurrent::Decays;
use crate::recurrent::vlast::{
    advance, leave_sums, load_rows, store_channels, warp_norms, warp_shrunk,
};
use crate::row::Row;
use crate::state::{FRAGMENT, Share, StateElement, check_v_last};
use crate::step::{LayerParams, StepConstants};

/// V-last states: all value heads of a query/key head, one after the other, each in one or several tiles of 8 · `LANES` columns.
/// Each group of `LANES` lanes has consecutive rows of a tile, `ROWS` of them in a slice. All slices of a head are in shared
/// memory. For each tile the block computes the products with k and q, then δ, then the new states; copies of the next head's
/// slices follow into the same places. The first threads of the block own one column of the tile each.
pub struct WholeVLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
> WholeVLast<G, S, K, V, LANES, ROWS, THREADS>
{
    const WARPS: u32 = THREADS / 32;
    /// Rows of a group.
    const GROUP_ROWS: u32 = K * LANES / THREADS;
    const SLICES: u32 = Self::GROUP_ROWS / ROWS as u32;
    /// Columns of a tile.
    const COLUMNS: u32 = LANES * FRAGMENT;
    /// Tiles of a head.
    const PARTS: u32 = V / Self::COLUMNS;
    /// Layout of shared memory: the slices of a head; each warp's part of S k and S q of each column of a tile; δ rk of each
    /// column; then the part of [`Whole`].
    const SUMS_OF_WARPS: u32 = Self::PARTS * Self::SLICES * Slices::<S, ROWS, THREADS>::SLICE_BYTES;
    const STEPS: u32 = Self::SUMS_OF_WARPS + Self::WARPS * Self::COLUMNS * 8;
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
> Whole for WholeVLast<G, S, K, V, LANES, ROWS, THREADS>
{
    type Decays = G;
    const K: u32 = K;
    const V: u32 = V;
    const THREADS: u32 = THREADS;
    const KEYS: u32 = Self::STEPS + Self::COLUMNS * 4;

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
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
> Kernel for WholeVLast<G, S, K, V, LANES, ROWS, THREADS>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        min_blocks_per_sm: 1,
        ..description::<Self, S>(Family::DECODE.in_layer(), Layout::VLast)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const { check_v_last(K, V, LANES, (K * LANES / THREADS).next_multiple_of(2)) };
        const {
            assert!(V <= THREADS && K <= THREADS, "a thread for each element");
            assert!(
                1 <= Self::SLICES && Self::SLICES <= 2,
                "summed pair by pair"
            );
            assert!(
                Self::PARTS * Self::SLICES <= 4,
                "as many slices on their way as can be waited for"
            );
        };
        let c = StepConstants::get();
        let (row, _) = Row::of_thread(c.h, c.ratio, c.tiled != 0, THREADS);
        let (thread, warp) = (thread_idx_x(), thread_idx_x() / 32);
        let share = |part: u32| Share::of(thread, LANES).from(part * Self::COLUMNS);
        let smem = dynamic_shared_mem();
        let (sums, steps) = (smem + Self::SUMS_OF_WARPS, smem + Self::STEPS);
        // SAFETY: the caller's promise; a group owns its rows, a lane its share of each, a thread its column and its channels
        // of the convolution; shared memory has one writer per place, before the barrier that precedes its reads.
        unsafe {
            let place = Place::load(&c, params, row.b);
            let copies = Slices::<S, ROWS, THREADS>::new(smem, place.reads(), c.wide_state != 0);
            let head = |r: u32| {
                let hv = row.with_head(&c, r).hv;
                place.slots.start::<S>(&c, &params.step, (hv, [K, V]))
            };
            let first_row = |i: u32| thread / LANES * Self::GROUP_ROWS + i * ROWS as u32;
            let ahead = Ahead::load::<Self>(&c, params, &place, row);
            // Starts the copy of slice `i` of tile `part` of head `r`, if the head exists.
            let start = |r: u32, part: u32, i: u32| {
                let (at, is_there) = (part * Self::SLICES + i, r < c.ratio);
                copies.start(at, is_there, share(part), || (head(r), first_row(i)));
            };
            each!(i in 0..Self::PARTS * Self::SLICES => {
                start(0, i / Self::SLICES, i % Self::SLICES);
            });
            if !place.live() {
                store_zeros::<Self>(&c, params, row);
                return;
            }
            let scale = ahead.give::<Self>(&c, params, &place, row);
            sync_threads();

            let all = [
                warp_channels::<K>(smem + Self::KEYS),
                warp_channels::<K>(smem + Self::Q),
            ];
            let mut norms = warp_norms(all[0], all[1]); // (1)
            if overflow(c.l2norm != 0, norms) {
                // All warps have read k and q after this barrier.
                sync_threads();
                let ([k, q], shrunk) = warp_shrunk(all, norms);
                if warp == 0 {
                    store_channels::<K>(smem + Self::KEYS, k);
                    store_channels::<K>(smem + Self::Q, q);
                }
                norms = shrunk;
                sync_threads();
            }
            each!(n in 0..c.ratio * Self::PARTS => {
                let (r, part) = (n / Self::PARTS, n % Self::PARTS);
                let (of_head, share) = (Self::head(&c, r), share(part));
                let states = |i: u32| {
                    let first = first_row(i);
                    let at = part * Self::SLICES + i;
                    let mut states = copies
                        .read(at, share, head(r), first)
                        .map(|[raw]| S::widen(&c, raw));
                    if G::per_channel(&c) {
                        let decay = load_rows::<ROWS>(of_head + Self::DECAYS + first * 4);
                        each!(n in 0..ROWS => {
                            states[n] = states[n].map(|s| s * decay[n]); // (2)
                        });
                    }
                    (states, load_rows::<ROWS>(smem + Self::KEYS + first * 4))
                };
                let products = |i: u32| {
                    copies.wait(Self::PARTS * Self::SLICES - 1 - i);
                    let (states, k) = states(i);
                    let q = load_rows::<ROWS>(smem + Self::Q + first_row(i) * 4);
                    (
                        column_products(|n| states[n], k),
                        column_products(|n| states[n], q),
                    )
                };
                let (mut sk, mut sq) = products(0);
                if Self::SLICES == 2 {
                    let (more_sk, more_sq) = products(1);
                    each!(n in 0..8 => {
                        sk[n] += more_sk[n];
                        sq[n] += more_sq[n];
                    });
                }
                leave_sums::<S, LANES>(sk, sq, share, sums + warp * Self::COLUMNS * 8);
                sync_threads();
                let beta = f32::from_bits(load_shared_b32(of_head + Self::BETA));
                let decay = match G::per_channel(&c) {
                    true => 1.0,
                    false => f32::from_bits(load_shared_b32(of_head + Self::DECAY)),
                };
                if thread < Self::COLUMNS {
                    let l2norm = c.l2norm != 0;
                    let factors =
                        Factors::new(l2norm, f32::from_bits(c.scale), norms, (decay, beta));
                    let [sk, sq] = pairwise_sum(Self::WARPS as usize, |i| {
                        load_shared_b64(sums + (i as u32 * Self::COLUMNS + thread) * 8)
                            .map(f32::from_bits)
                    });
                    let column = of_head + (part * Self::COLUMNS + thread) * 4;
                    let v = f32::from_bits(load_shared_b32(column));
                    let delta = factors.delta(v, sk); // (3)
                    let o = factors.output(sq, delta); // (5)
                    store_shared_b32(column + Self::O, o.to_bits());
                    store_shared_b32(steps + thread * 4, (delta * factors.k).to_bits());
                }
                sync_threads();
                let hv = row.with_head(&c, r).hv;
                let write = place.slots.write::<S>(&c, &params.step, (hv, [K, V]));
                each!(i in 0..Self::SLICES => {
                    if c.update_state != 0 {
                        let (mut states, k) = states(i);
                        advance::<G, S, ROWS>(&c, &mut states, k, decay, share, steps);
                        let rows = write.rows::<S>(share, first_row(i));
                        each!(n in 0..ROWS => {
                            rows.store::<S>(n, 0, S::narrow(&c, states[n]));
                        });
                    }
                    start(r + 1, part, i);
                });
            });
            finish::<Self>(&c, params, row, scale);
        }
    }
}
