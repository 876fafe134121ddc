//! The layer step on K-last states, whole heads per block: for batches that fill the GPU with whole heads.

use core::marker::PhantomData;

use super::slices::Slices;
use super::whole::{Ahead, Whole, description, finish, store_zeros};
use super::{Place, position};
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::launch::{Description, Family, Kernel, Layout};
use crate::math::each::each;
use crate::recurrent::Decays;
use crate::recurrent::klast::{Token, check_parts, load_channels, load_parts, normable, step};
use crate::row::Row;
use crate::state::{Share, StateElement, check_k_last, lanes_of, widen_rows};
use crate::step::{LayerParams, StepConstants};

/// K-last states: all value heads of a query/key head, one after the other; `ROWS` rows of S per group of [`lanes_of`] lanes at a
/// time. `DEPTH` such slices are being copied to shared memory. Each thread waits only for its own copies.
pub struct WholeKLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize = 1,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize,
> WholeKLast<G, S, K, V, ROWS, THREADS, DEPTH, PARTS>
{
    const LANES: u32 = lanes_of(K, PARTS);
    /// Rows of a slice.
    const SLICE: u32 = THREADS / Self::LANES * ROWS as u32;
    const SLICES: u32 = V / Self::SLICE;
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize,
> Whole for WholeKLast<G, S, K, V, ROWS, THREADS, DEPTH, PARTS>
{
    type Decays = G;
    const K: u32 = K;
    const V: u32 = V;
    const THREADS: u32 = THREADS;
    const KEYS: u32 = DEPTH * Slices::<S, ROWS, THREADS, PARTS>::SLICE_BYTES;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(i: u32) -> u32 {
        position::<S>(Self::LANES, i)
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize,
> Kernel for WholeKLast<G, S, K, V, ROWS, THREADS, DEPTH, PARTS>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // Without this bound several parts of k, q and states would take more than 128 registers, and leave room for one block.
        min_blocks_per_sm: if PARTS > 1 { 2 } else { 1 },
        ..description::<Self, S>(Family::DECODE.in_layer(), Layout::KLast)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const { check_k_last((K, PARTS), V, ROWS as u32, THREADS) };
        const { check_parts::<G>(PARTS) };
        const { assert!(V <= THREADS && K <= THREADS, "a thread for each element") };
        let c = StepConstants::get();
        let (row, _) = Row::of_thread(c.h, c.ratio, c.tiled != 0, THREADS);
        let group = thread_idx_x() / Self::LANES;
        let share = Share::of(thread_idx_x(), Self::LANES);
        let smem = dynamic_shared_mem();
        // SAFETY: the caller's promise; a group owns its rows, a lane its share of each, a thread its channels of the
        // convolution; shared memory has one writer per place, before the barrier that precedes its reads.
        unsafe {
            let place = Place::load(&c, params, row.b);
            let copies =
                Slices::<S, ROWS, THREADS, PARTS>::new(smem, place.reads(), c.wide_state != 0);
            let head = |r: u32| {
                let own = row.with_head(&c, r);
                place.slots.start::<S>(&c, &params.step, (own.hv, [V, K]))
            };
            let slices = c.ratio * Self::SLICES;
            let first_row = |s: u32| s % Self::SLICES * Self::SLICE + group * ROWS as u32;
            let ahead = Ahead::load::<Self>(&c, params, &place, row);
            each!(s in 0..DEPTH => {
                copies.start(s, s < slices, share, || {
                    (head(s / Self::SLICES), first_row(s))
                });
            });
            if !place.live() {
                store_zeros::<Self>(&c, params, row);
                return;
            }

            let scale = ahead.give::<Self>(&c, params, &place, row);
            sync_threads();

            let k = load_parts(smem + Self::KEYS, share);
            let q = load_parts(smem + Self::Q, share);
            let ((k, q), norms) = normable(&c, (k, q), Self::LANES);
            let mut s = 0;
            each!(r in 0..c.ratio => {
                let of_head = Self::head(&c, r);
                let beta = f32::from_bits(load_shared_b32(of_head + Self::BETA));
                let gates = if G::per_channel(&c) {
                    (load_channels(of_head + Self::DECAYS, share), (1.0, beta))
                } else {
                    let decay = f32::from_bits(load_shared_b32(of_head + Self::DECAY));
                    ([0.0; 8], (decay, beta))
                };
                let token = Token::new(&c, (k, q), norms, gates, 0);
                let hv = row.with_head(&c, r).hv;
                let write = place.slots.write::<S>(&c, &params.step, (hv, [V, K]));
                each!(i in 0..Self::SLICES => {
                    let first = first_row(i);
                    copies.wait(DEPTH - 1);
                    let raw = copies.read(s % DEPTH, share, head(r), first);
                    let mut states = widen_rows::<S, ROWS, PARTS>(&c, raw);
                    let mut v = [0.0; ROWS];
                    each!(n in 0..ROWS => {
                        let address = of_head + (first + n as u32) * 4;
                        v[n] = f32::from_bits(load_shared_b32(address));
                    });
                    let o = step::<G, ROWS, PARTS>(&c, &mut states, token, v, Self::LANES);
                    let rows = write.rows::<S>(share, first);
                    each!(n in 0..ROWS => {
                        if share.lane == 0 {
                            let address = of_head + Self::O + (first + n as u32) * 4;
                            store_shared_b32(address, o[n].to_bits());
                        }
                        if c.update_state != 0 {
                            rows.store_row::<S, PARTS>(&c, n, states[n]);
                        }
                    });
                    let next = s + DEPTH;
                    copies.start(next % DEPTH, next < slices, share, || {
                        (head(next / Self::SLICES), first_row(next))
                    });
                    s += 1;
                });
            });
            sync_threads();
            finish::<Self>(&c, params, row, scale);
        }
    }
}
