//! The layer step on K-last deferred states, whole heads per block: convolution and norm around the steps of [`super::KLast`].

use core::marker::PhantomData;

use super::klast::{KLast as Tile, Lane};
use crate::constants::Element;
use crate::device::global::prefetch;
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::launch::{Description, Family, Kernel, Layout, Shared};
use crate::layer::{Ahead, Place, Slices, Whole, description, finish, position, store_zeros};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{Raw, load};
use crate::pending::{Pending, Ring, flushes};
use crate::recurrent::gates::RawGates;
use crate::recurrent::klast::{load_channels, load_parts, normable};
use crate::recurrent::tokens::Decays;
use crate::row::Row;
use crate::state::{Share, StateElement};
use crate::step::{DeferredParams, LayerParams, StepConstants};

/// K-last states: all value heads of a query/key head, one after the other, in slices of `ROWS` rows of S per group of K/8 lanes.
/// `DEPTH` slices are being copied to shared memory; `VALUES` = 2 `ROWS`.
pub struct WholeKLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
    const DEPTH: u32,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
    const DEPTH: u32,
> WholeKLast<G, S, K, V, ROWS, VALUES, THREADS, DEPTH>
{
    /// Lanes of a group.
    const LANES: u32 = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::LANES;
    /// Rows of a slice.
    const SLICE: u32 = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::TILE;
    const SLICES: u32 = V / Self::SLICE;
    /// Offset of the pending tokens' weights in shared memory: those of even heads, then those of odd ones.
    const WEIGHTS: u32 = DEPTH * Slices::<S, ROWS, THREADS>::SLICE_BYTES;
    const WEIGHTS_BYTES: u32 = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::BYTES;
    /// Bytes of KDA's log decays of the pending tokens. They follow all heads' data: a buffer for even heads, then one for odd
    /// heads.
    const LOG_DECAY_BYTES: u32 = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::LOG_DECAY_BYTES;

    /// Prefetches u and log α of a head's pending tokens, and their k, into L2.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn fetch(c: &StepConstants, ring: Ring, len: u32) {
        let updates = V * 4 / LINE;
        let decays = if G::per_channel(c) { K * 4 / LINE } else { 1 };
        let keys = ring.key_bytes().div_ceil(LINE);
        let lines = updates + decays + keys;
        let mut i = thread_idx_x();
        while i < len * lines {
            let (j, line) = (i / lines, i % lines);
            prefetch(if line < updates {
                ring.update(j, V, line * LINE / 4)
            } else if line < updates + decays {
                let channels = if G::per_channel(c) { K } else { 1 };
                ring.decay(j, channels) + ((line - updates) * LINE) as u64
            } else {
                ring.key(j) + ((line - updates - decays) * LINE) as u64
            });
            i += THREADS;
        }
    }
}

const F32: u32 = Element::F32 as u32;

/// Bytes of a line of the caches.
const LINE: u32 = 128;

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
    const DEPTH: u32,
> Whole for WholeKLast<G, S, K, V, ROWS, VALUES, THREADS, DEPTH>
{
    type Decays = G;
    const K: u32 = K;
    const V: u32 = V;
    const THREADS: u32 = THREADS;
    const KEYS: u32 = Self::WEIGHTS + 2 * Self::WEIGHTS_BYTES;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(i: u32) -> u32 {
        position::<S>(Self::LANES, i)
    }

    /// Returns log α and β.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values_of(c: &StepConstants, gates: RawGates<1>) -> ([f32; 1], f32) {
        gates.log_values(c)
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
    const DEPTH: u32,
> Kernel for WholeKLast<G, S, K, V, ROWS, VALUES, THREADS, DEPTH>
{
    type Params = DeferredParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        min_blocks_per_sm: if S::VECTORS == 1 { 384 } else { 256 } / THREADS,
        shared_of_channels: Shared {
            block: 2 * Self::LOG_DECAY_BYTES,
            per_head: Self::DECAY_BYTES,
            ..Shared::NONE
        },
        ..description::<Self, S>(Family::DECODE.in_layer().on_deferred(), Layout::KLast)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &DeferredParams) {
        const { Tile::<G, S, K, V, ROWS, VALUES, THREADS>::CHECKED };
        const { assert!(V <= THREADS && K <= THREADS, "a thread for each element") };
        let c = StepConstants::get();
        let layer: &LayerParams = &params.layer;
        let (row, _) = Row::of_thread(c.h, c.ratio, c.tiled != 0, THREADS);
        let group = thread_idx_x() / Self::LANES;
        let share = Share::of(thread_idx_x(), Self::LANES);
        // A lane ends up with one product: a row's with k, or, in the neighbouring lane, with q.
        let own = share.lane % VALUES as u32;
        let writes = share.lane < VALUES as u32 && own.is_multiple_of(2);
        let smem = dynamic_shared_mem();
        // SAFETY: the caller's promise; a group owns its rows, a lane its share of each, a thread its channels of the
        // convolution; no pending token has the new token's entry; shared memory has one writer per place, before the barrier
        // that precedes its reads.
        unsafe {
            let place = Place::load(&c, layer, row.b);
            let pending = Pending::load(&c, params, row.b);
            let live = place.live() && pending.live;
            let must_flush = pending.len > 0 && flushes(pending.len, c.tokens, c.pending);
            let ring = |r: u32| {
                let own = row.with_head(&c, r);
                Ring::of(&c, params, pending, own, [K, V], (F32, G::per_channel(&c)))
            };
            let wide = c.wide_state != 0;
            let copies = Slices::<S, ROWS, THREADS>::new(smem, live && place.reads(), wide);
            let head = |r: u32| {
                let own = row.with_head(&c, r);
                place.slots.start::<S>(&c, &layer.step, (own.hv, [V, K]))
            };
            let slices = c.ratio * Self::SLICES;
            let first_row = |s: u32| s % Self::SLICES * Self::SLICE + group * ROWS as u32;
            let inputs = Ahead::load::<Self>(&c, layer, &place, row);
            let mut s = 0;
            while s < DEPTH {
                copies.start(s, s < slices, share, || {
                    (head(s / Self::SLICES), first_row(s))
                });
                s += 1;
            }
            if !live {
                store_zeros::<Self>(&c, layer, row);
                return;
            }
            each!(r in 0..c.ratio => Self::fetch(&c, ring(r), pending.len));

            let scale = inputs.give::<Self>(&c, layer, &place, row);
            sync_threads();

            let [k] = load_parts(smem + Self::KEYS, share);
            let [q] = load_parts(smem + Self::Q, share);
            let (([k], [q]), norms) = normable(&c, ([k], [q]), Self::LANES); // (1)
            let ahead = if must_flush { 0 } else { pending.len };
            let scale_of_q = f32::from_bits(c.scale);
            let mut factors = Factors::new(c.l2norm != 0, scale_of_q, norms, (1.0, 0.0));
            let (mut decay, mut flush_decay) = ([0.0; 8], [0.0; 8]);
            // One loop over all heads' slices, which is not unrolled: docs/compiler.md.
            s = 0;
            while s < slices {
                let r = s / Self::SLICES;
                let of_head = Self::head(&c, r);
                let ring = ring(r);
                let first = first_row(s);
                // GDN has one decay for all channels; ptxas does not see that it is the same in every iteration.
                let of_channels = |decay: [f32; 8]| match G::per_channel(&c) {
                    true => decay,
                    false => [decay[0]; 8],
                };
                let weights = smem + Self::WEIGHTS + r % 2 * Self::WEIGHTS_BYTES;
                let log_decays = Self::head(&c, c.ratio) + r % 2 * Self::LOG_DECAY_BYTES;
                let mut update;
                if s.is_multiple_of(Self::SLICES) {
                    let log_decay = if G::per_channel(&c) {
                        load_channels(of_head + Self::DECAYS, share)
                    } else {
                        [f32::from_bits(load_shared_b32(of_head + Self::DECAY)); 8]
                    };
                    factors.beta = f32::from_bits(load_shared_b32(of_head + Self::BETA));
                    let at = (share, group, first);
                    let mut lane = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::load_lane(
                        &c,
                        ring,
                        pending.len,
                        at,
                    );
                    update = lane.update;
                    Tile::<G, S, K, V, ROWS, VALUES, THREADS>::append(
                        &c,
                        (ring, pending.len),
                        row.with_head(&c, r),
                        (&k, &log_decay),
                        (share, group),
                    );
                    if must_flush {
                        flush_decay = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::decay_keys(
                            &c,
                            (weights, log_decays, &lane),
                            pending.len,
                            (share, group),
                        );
                        lane = Lane::NONE;
                    }
                    decay = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::weigh(
                        &c,
                        (weights, log_decays, &lane),
                        ahead,
                        (k, q, log_decay),
                        (share, group),
                    );
                } else {
                    update = Raw([0; ROWS]);
                    if share.lane < pending.len {
                        update = load::<ROWS>(ring.update(share.lane, V, first), F32, true);
                    }
                }
                copies.wait(DEPTH - 1);
                let state = head(r);
                let mut raw = copies
                    .read(s % DEPTH, share, state, first)
                    .map(|[fragment]| fragment);
                if must_flush {
                    raw = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::flush(
                        &c,
                        (weights, of_channels(flush_decay), update),
                        pending.len,
                        raw,
                        (share, group),
                    );
                    update = Raw([0; ROWS]);
                }
                if must_flush || pending.fresh {
                    let rows = state.rows::<S>(share, first);
                    each!(n in 0..ROWS => rows.store::<S>(n, 0, raw[n]));
                }
                let with =
                    Tile::<G, S, K, V, ROWS, VALUES, THREADS>::weights(weights, share, ahead);
                let (sk, sq) = Tile::<G, S, K, V, ROWS, VALUES, THREADS>::products(
                    &c,
                    raw,
                    update.to_f32(F32),
                    with,
                    (k, q, of_channels(decay)),
                    share,
                );
                let own_row = first + own / 2;
                let v = f32::from_bits(load_shared_b32(of_head + own_row * 4));
                let delta = factors.delta(v, sk);
                if writes {
                    let o = factors.output(sq, delta); // (5)
                    store_shared_b32(of_head + Self::O + own_row * 4, o.to_bits());
                    ring.leave_update(pending.len, V, own_row, delta * factors.k);
                }
                let next = s + DEPTH;
                copies.start(next % DEPTH, next < slices, share, || {
                    (head(next / Self::SLICES), first_row(next))
                });
                s += 1;
            }
            sync_threads();
            finish::<Self>(&c, layer, row, scale);
        }
    }
}
