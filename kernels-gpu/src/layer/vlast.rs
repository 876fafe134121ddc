//! The layer step on V-last states; the numbers of steps are those of the operators' headers.

use core::marker::PhantomData;

use super::conv::{Part, Qkv, ThreadChannels};
use super::norm::{Scale, share_sum, sum_of, sum_of_neighbours};
use super::{Place, mail, warp_channels};
use crate::device::cluster;
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, store_shared_b32,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::lane_id;
use crate::launch::{Computes, Description, Family, Kernel, Layout, Shared};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, load_one};
use crate::math::range::{overflow, shrinking, times};
use crate::math::reduce::pairwise_sum;
use crate::recurrent::gates::load_gate;
use crate::recurrent::tokens::{Decays, Tokens};
use crate::recurrent::vlast::{advance, leave_products, load_rows, warp_norms, warp_shrunk};
use crate::row::Row;
use crate::state::{FRAGMENT, Share, StateElement, check_v_last};
use crate::step::{LayerParams, StepConstants};

/// V-last states: 8 · `LANES` columns per block, `ROWS` rows per group of `LANES` lanes; a thread convolves up to `CHANNELS`
/// channels.
///
/// Whole warps of owners, with one column of the block per thread, turn a head's sums into δ and o while the other warps wait.
pub struct VLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const CHANNELS: usize,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const CHANNELS: usize,
> VLast<G, S, K, V, LANES, ROWS, CHANNELS>
{
    /// Columns of a block.
    const COLUMNS: u32 = LANES * FRAGMENT;
    /// Threads of a value head.
    const THREADS: u32 = K / ROWS as u32 * LANES;
    const WARPS: u32 = Self::THREADS / 32;
    const BLOCKS: u32 = V / Self::COLUMNS;
    /// Warps that own columns.
    const OWNERS: u32 = Self::COLUMNS / 32;
    /// Layout of shared memory: the mailboxes; k, then q; then for every head: each warp's part of S k and S q of each column, δ
    /// rk of each column, v and later o, KDA's α of every channel, and the sums of squares.
    const KEYS: u32 = mail::BYTES;
    const Q: u32 = Self::KEYS + K * 4;
    const HEADS: u32 = Self::Q + K * 4;
    const STEPS: u32 = Self::WARPS * Self::COLUMNS * 8;
    const VALUES: u32 = Self::STEPS + Self::COLUMNS * 4;
    const DECAY: u32 = Self::VALUES + Self::COLUMNS * 4;
    const SUMS: u32 = Self::DECAY + K * 4;
    const HEAD_SUMS: u32 = Self::BLOCKS * Self::OWNERS;
    const HEAD_BYTES: u32 = Self::SUMS + (Self::HEAD_SUMS * 4).next_multiple_of(16);

    /// Stores a convolved channel in its place: for k and q, in every block of the cluster.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give(part: &Part, y: f32) {
        let smem = dynamic_shared_mem();
        if part.of == Qkv::Value {
            let (r, v) = (part.own / Self::COLUMNS, part.own % Self::COLUMNS);
            let address = smem + Self::HEADS + r * Self::HEAD_BYTES + Self::VALUES + v * 4;
            store_shared_b32(address, y.to_bits());
            return;
        }
        let first = match part.of {
            Qkv::Query => Self::Q,
            _ => Self::KEYS,
        };
        each!(rank in 0..Self::BLOCKS => {
            let address = smem + first + part.own * 4;
            cluster::send_b32(address, rank, y.to_bits(), mail::of_channels());
        });
    }

    /// Stores q, k and v as given: q and k once per block (head `r` = 0), v of head `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_qkv(c: &StepConstants, tokens: &Tokens, share: Share, thread: u32, r: u32) {
        let smem = dynamic_shared_mem();
        if r == 0 && thread < K {
            let [k] = load_one(tokens.k.at(0, thread), c.k_element).to_f32(c.k_element);
            let [q] = load_one(tokens.q.at(0, thread), c.q_element).to_f32(c.q_element);
            store_shared_b32(smem + Self::KEYS + thread * 4, k.to_bits());
            store_shared_b32(smem + Self::Q + thread * 4, q.to_bits());
        }
        if thread < Self::COLUMNS {
            let v = tokens.v.at(0, share.first + thread);
            let [v] = load_one(v, c.v_element).to_f32(c.v_element);
            let address = smem + Self::HEADS + r * Self::HEAD_BYTES + Self::VALUES;
            store_shared_b32(address + thread * 4, v.to_bits());
        }
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const CHANNELS: usize,
> Kernel for VLast<G, S, K, V, LANES, ROWS, CHANNELS>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: Self::BLOCKS,
        max_heads: 512 / Self::THREADS,
        min_blocks_per_sm: 1,
        block_per_head: true,
        cluster: Self::BLOCKS,
        shared: Shared {
            block: Self::HEADS,
            per_head: Self::HEAD_BYTES,
            ..Shared::NONE
        },
        ..Description::of(
            Self::THREADS,
            Computes::new(Family::DECODE.in_layer(), G::OF_CHANNELS, [K, V])
                .on(Layout::VLast, S::ELEMENT),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const { check_v_last(K, V, LANES, ROWS as u32) };
        const {
            assert!(
                K <= Self::THREADS,
                "a thread for each channel of k and of q"
            );
            assert!(
                Self::COLUMNS + 2 * K / Self::BLOCKS <= CHANNELS as u32 * Self::THREADS,
                "all channels of the convolution"
            );
        };
        let c = StepConstants::get();
        // SAFETY: the mailboxes are at the start of the block's shared memory.
        unsafe { mail::open_and_arrive(&c, 2 * K, Self::HEAD_SUMS) };
        let (row, r) = Row::of_thread(c.h, c.ratio, c.tiled != 0, Self::THREADS);
        let thread = thread_idx_x() % Self::THREADS;
        let warp = thread / 32;
        let share = Share::of(thread, LANES).from(row.tile * Self::COLUMNS);
        let first = thread / LANES * ROWS as u32;
        // The owners rotate, because warps of the same index share a scheduler with those of other blocks.
        let owner = (warp + row.tile + row.hv + row.b) % Self::WARPS;
        let (owns, own) = (owner < Self::OWNERS, owner * 32 + lane_id());
        let column = share.first + own;
        let smem = dynamic_shared_mem();
        let head = smem + Self::HEADS + r * Self::HEAD_BYTES;
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each, an owner its column of o, a
        // thread its channel of the convolution; shared memory has one writer per place, between the barriers that order its
        // accesses; each message between blocks too has one writer, is sent after the meeting for which the mailboxes are
        // opened, and is read after it has arrived.
        unsafe {
            let place = Place::load(&c, params, row.b);
            let tokens = Tokens::new(&c, &params.step, row);
            let live = place.live();
            let start = place.slots.start::<S>(&c, &params.step, (row.hv, [K, V]));
            let mut raw = [[0; 8]; ROWS];
            each!(i in 0..ROWS => {
                let from = (live, place.is_fresh());
                raw[i] = start.load_start::<S>(share, first + i as u32, from);
            });
            let (dims, tiles) = ([K, V], (Self::BLOCKS, Self::COLUMNS));
            let own_channels = (thread_idx_x(), c.ratio * Self::THREADS, false);
            let channels = ThreadChannels::<CHANNELS>::load(
                &c,
                params,
                &place,
                row,
                dims,
                tiles,
                own_channels,
            );
            let gates = load_gate::<G>(&c, &params.step, row, (&tokens, 0), (thread % K, K));
            let scale = Scale::load(&c, params, row, (0, share.first + thread % Self::COLUMNS));
            cluster::wait();
            // Loads first: docs/compiler.md.
            if !live {
                if owns {
                    elements::store([0.0], tokens.o.at(0, column), c.o_element, false);
                }
                return;
            }

            let ([decay], beta) = gates.values(&c);
            if G::per_channel(&c) && thread < K {
                store_shared_b32(head + Self::DECAY + thread * 4, decay.to_bits());
            }
            if c.taps == 0 {
                Self::give_qkv(&c, &tokens, share, thread, r);
                sync_threads();
            } else {
                channels.convolve(&c, |part, y| Self::give(part, y));
                channels.store_windows(&c, params, &place);
                sync_threads(); // for v and α
                cluster::wait_mailbox(mail::of_channels());
            }

            let (mut k, mut q) = (
                load_rows::<ROWS>(smem + Self::KEYS + first * 4),
                load_rows::<ROWS>(smem + Self::Q + first * 4),
            );
            let mut states = raw.map(|raw| S::widen(&c, raw));
            if G::per_channel(&c) {
                let decay = load_rows::<ROWS>(head + Self::DECAY + first * 4);
                each!(i in 0..ROWS => {
                    states[i] = states[i].map(|s| s * decay[i]); // (2)
                });
            }
            let sums = head + warp * Self::COLUMNS * 8;
            let decay = if G::per_channel(&c) { 1.0 } else { decay };
            let mut norms = None;
            let norms = loop {
                leave_products::<S, ROWS, LANES>(&states, (k, q), share, sums);
                if let Some(norms) = norms {
                    break norms;
                }
                let all = [
                    warp_channels::<K>(smem + Self::KEYS),
                    warp_channels::<K>(smem + Self::Q),
                ];
                let own = warp_norms(all[0], all[1]); // (1)
                if !overflow(c.l2norm != 0, own) {
                    break own;
                }
                // k and q are loaded again, so that they occupy no registers for this rare case.
                let [of_k, of_q] = shrinking(own);
                q = times(load_rows(smem + Self::Q + first * 4), of_q);
                k = times(load_rows(smem + Self::KEYS + first * 4), of_k);
                let (_, shrunk) = warp_shrunk(all, own);
                norms = Some(shrunk);
            };
            sync_threads();
            // The owners' branch is between two barriers: a branch on both sides of a barrier would duplicate the barrier.
            if owns {
                let q_scale = f32::from_bits(c.scale);
                let factors = Factors::new(c.l2norm != 0, q_scale, norms, (decay, beta));
                let [sk, sq] = pairwise_sum(Self::WARPS as usize, |i| {
                    load_shared_b64(head + (i as u32 * Self::COLUMNS + own) * 8).map(f32::from_bits)
                });
                let v = f32::from_bits(load_shared_b32(head + Self::VALUES + own * 4));
                let delta = factors.delta(v, sk); // (3)
                let o = factors.output(sq, delta); // (5)
                let step = delta * factors.k;
                store_shared_b32(head + Self::STEPS + own * 4, step.to_bits());
                if c.has_norm != 0 {
                    store_shared_b32(head + Self::VALUES + own * 4, o.to_bits());
                    let squares = sum_of_neighbours(o, 32);
                    let of_warp = row.tile * Self::OWNERS + owner;
                    let sum = head + Self::SUMS + of_warp * 4;
                    share_sum(Self::BLOCKS, sum, squares, mail::of_sums());
                } else {
                    elements::store([o], tokens.o.at(0, column), c.o_element, false);
                }
            }
            if c.update_state != 0 || c.has_norm != 0 {
                sync_threads();
            }
            if c.update_state != 0 {
                advance::<G, S, ROWS>(&c, &mut states, k, decay, share, head + Self::STEPS);
                let write = place.slots.write::<S>(&c, &params.step, (row.hv, [K, V]));
                each!(i in 0..ROWS => {
                    write.store::<S>(share, first + i as u32, S::narrow(&c, states[i]));
                });
            }
            // These threads wait for the mailbox, so the block does not exit before the sums have arrived.
            if c.has_norm != 0 && thread < Self::COLUMNS {
                cluster::wait_mailbox(mail::of_sums());
                let squares = sum_of(head + Self::SUMS, Self::HEAD_SUMS);
                let o = f32::from_bits(load_shared_b32(head + Self::VALUES + thread * 4));
                let normed = scale.apply(&c, o, squares, V);
                let address = tokens.o.at(0, share.first + thread);
                elements::store([normed], address, c.o_element, false);
            }
        }
    }
}
