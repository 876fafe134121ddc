//! The layer step on K-last states; the numbers of steps are those of the operators' headers.

use core::marker::PhantomData;

use super::conv::{Part, Qkv, ThreadChannels};
use super::norm::{Scale, share_sum, squares, sum_of};
use super::{Place, mail, position};
use crate::device::cluster;
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::warp_shuffle_xor;
use crate::launch::{Computes, Description, Family, Kernel, Layout, Shared};
use crate::math::each::each;
use crate::math::elements::{self, load};
use crate::math::range::{SMALL, times};
use crate::recurrent::gates::LaneGates;
use crate::recurrent::klast::{
    Token, check_parts, load_parts, normable, only_step, parts_to_f32, step,
};
use crate::recurrent::tokens::{Decays, Tokens};
use crate::row::Row;
use crate::state::{Share, StateElement, check_k_last, lanes_of, widen_rows};
use crate::step::{LayerParams, StepConstants};

/// K-last states: `ROWS` rows of S per group of [`lanes_of`] lanes; `THREADS` threads for each value head of a block.
pub struct KLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize = 1,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
> KLast<G, S, K, V, ROWS, THREADS, PARTS>
{
    /// Lanes of a group.
    const LANES: u32 = lanes_of(K, PARTS);
    const WARPS: u32 = THREADS / 32;
    /// Rows of a block.
    const TILE: u32 = THREADS / Self::LANES * ROWS as u32;
    const BLOCKS: u32 = V / Self::TILE;
    /// Number of channels of q, and of k, that a block convolves for its cluster.
    const PART: u32 = K / Self::BLOCKS;
    /// Layout of shared memory: the mailboxes; k, then q, as [`load_parts`] loads them; then v and the sums of squares of every
    /// head.
    const KEYS: u32 = mail::BYTES;
    const Q: u32 = Self::KEYS + K * 4;
    const HEADS: u32 = Self::Q + K * 4;
    const SUMS: u32 = Self::TILE * 4;
    const HEAD_SUMS: u32 = Self::BLOCKS * Self::WARPS;
    const HEAD_BYTES: u32 = Self::SUMS + Self::HEAD_SUMS * 4;

    /// Stores a convolved channel in its place: for k and q, in every block of the cluster.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give(part: &Part, y: f32) {
        let smem = dynamic_shared_mem();
        if part.of == Qkv::Value {
            let (r, v) = (part.own / Self::TILE, part.own % Self::TILE);
            let address = smem + Self::HEADS + r * Self::HEAD_BYTES + v * 4;
            store_shared_b32(address, y.to_bits());
            return;
        }
        let first = match part.of {
            Qkv::Query => Self::Q,
            _ => Self::KEYS,
        };
        let address = smem + first + position::<S>(Self::LANES, part.own);
        each!(rank in 0..Self::BLOCKS => {
            cluster::send_b32(address, rank, y.to_bits(), mail::of_channels());
        });
    }

    /// Sum of the squares of o over the rows of this warp, neighbours first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn squares(o: [f32; ROWS]) -> f32 {
        let mut sums = o.map(|o| o * o);
        let mut stride = 1;
        while stride < ROWS {
            let mut i = 0;
            while i < ROWS {
                sums[i] += sums[i + stride];
                i += 2 * stride;
            }
            stride *= 2;
        }
        let mut sum = sums[0];
        let mut lane_mask = Self::LANES;
        while lane_mask < 32 {
            sum += warp_shuffle_xor(sum, lane_mask);
            lane_mask *= 2;
        }
        sum
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
> Kernel for KLast<G, S, K, V, ROWS, THREADS, PARTS>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: Self::BLOCKS,
        max_heads: 8 * 64 / THREADS,
        min_blocks_per_sm: 1,
        block_per_head: true,
        cluster: Self::BLOCKS,
        shared: Shared {
            block: Self::HEADS,
            per_head: Self::HEAD_BYTES,
            ..Shared::NONE
        },
        ..Description::of(
            THREADS,
            Computes::new(Family::DECODE.in_layer(), G::OF_CHANNELS, [K, V])
                .on(Layout::KLast, S::ELEMENT),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const { check_k_last((K, PARTS), V, ROWS as u32, THREADS) };
        const {
            assert!(
                Self::TILE + 2 * Self::PART <= THREADS,
                "a thread for each channel"
            );
            assert!(ROWS as u32 <= Self::LANES, "a lane for each row's norm");
            check_parts::<G>(PARTS);
        };
        let c = StepConstants::get();
        // SAFETY: the mailboxes are at the start of the block's shared memory.
        unsafe { mail::open_and_arrive(&c, 2 * K, Self::HEAD_SUMS) };
        let (row, r) = Row::of_thread(c.h, c.ratio, c.tiled != 0, THREADS);
        let thread = thread_idx_x() % THREADS;
        let group = thread / Self::LANES;
        let share = Share::of(thread, Self::LANES);
        let own = group * ROWS as u32;
        let first = row.tile * Self::TILE + own;
        let wide = c.wide_io != 0;
        let smem = dynamic_shared_mem();
        let head_smem = smem + Self::HEADS + r * Self::HEAD_BYTES;
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each, a thread its channel of the
        // convolution; each message between blocks has one writer, is sent after the meeting for which the mailboxes are opened,
        // and is read after it has arrived.
        unsafe {
            let place = Place::load(&c, params, row.b);
            let tokens = Tokens::new(&c, &params.step, row);
            let live = place.live();
            let start = place.slots.start::<S>(&c, &params.step, (row.hv, [V, K]));
            let from = (live, place.is_fresh());
            let raw = start.load_start_rows::<S, ROWS, PARTS>(share, first, from);
            let (dims, tiles) = ([K, V], (Self::BLOCKS, Self::TILE));
            let own_channels = (thread_idx_x(), c.ratio * THREADS, false);
            let channels =
                ThreadChannels::<1>::load(&c, params, &place, row, dims, tiles, own_channels);
            let (mut k, mut q, mut v) = ([[0.0; 8]; PARTS], [[0.0; 8]; PARTS], [0.0; ROWS]);
            let gates = LaneGates::load::<G, S, K>(&c, &params.step, row, &tokens, 0, share);
            let scale = Scale::load(&c, params, row, (0, first + share.lane % ROWS as u32));
            if c.taps == 0 {
                let raw_k = share.load_parts::<S, PARTS>(tokens.k.at(0, 0), c.k_element, wide);
                let raw_q = share.load_parts::<S, PARTS>(tokens.q.at(0, 0), c.q_element, wide);
                let raw_v = load::<ROWS>(tokens.v.at(0, first), c.v_element, wide);
                k = parts_to_f32(raw_k, c.k_element);
                q = parts_to_f32(raw_q, c.q_element);
                v = raw_v.to_f32(c.v_element);
            }
            cluster::wait();
            // Loads first: docs/compiler.md.
            if !live {
                if share.lane == 0 {
                    elements::store([0.0; ROWS], tokens.o.at(0, first), c.o_element, wide);
                }
                return;
            }

            if c.taps != 0 {
                channels.convolve(&c, |part, y| Self::give(part, y));
                channels.store_windows(&c, params, &place);
                sync_threads(); // for v
                cluster::wait_mailbox(mail::of_channels());
                k = load_parts(smem + Self::KEYS, share);
                q = load_parts(smem + Self::Q, share);
                each!(i in 0..ROWS => {
                    v[i] = f32::from_bits(load_shared_b32(head_smem + (own + i as u32) * 4));
                });
            }
            let gates = gates.values::<G>(&c, Self::LANES, true);
            let (mut states, o);
            // With more rows of 16-bit states `only_step` would take too many registers: it keeps the partial S k and S q of every
            // row until they are reduced together with the norms.
            if const { S::BYTES == 4 || ROWS * PARTS <= 2 } {
                states = widen_rows::<S, ROWS, PARTS>(&c, raw);
                let of_token = ((k, q), gates, v);
                let may_overflow = c.l2norm != 0;
                o = only_step::<G, ROWS, PARTS>(
                    &c,
                    may_overflow,
                    &mut states,
                    of_token,
                    Self::LANES,
                );
            } else {
                let (channels, norms) = normable(&c, (k, q), Self::LANES);
                let token = Token::new(&c, channels, norms, gates, 0);
                states = widen_rows::<S, ROWS, PARTS>(&c, raw);
                o = step::<G, ROWS, PARTS>(&c, &mut states, token, v, Self::LANES);
            }
            if c.has_norm != 0 {
                let sums = head_smem + Self::SUMS;
                let of_warp = row.tile * Self::WARPS + thread / 32;
                let squares = squares!(Self::squares(o), Self::squares(times(o, SMALL)));
                share_sum(Self::BLOCKS, sums + of_warp * 4, squares, mail::of_sums());
            }
            if c.update_state != 0 {
                let write = place.slots.write::<S>(&c, &params.step, (row.hv, [V, K]));
                each!(i in 0..ROWS => {
                    write.store_row::<S, PARTS>(&c, share, first + i as u32, states[i]);
                });
            }
            if c.has_norm != 0 {
                cluster::wait_mailbox(mail::of_sums());
                let squares = sum_of(head_smem + Self::SUMS, Self::HEAD_SUMS);
                let mut mine = o[0];
                let mut i = 1;
                while i < ROWS {
                    mine = if share.lane == i as u32 { o[i] } else { mine };
                    i += 1;
                }
                if share.lane < ROWS as u32 {
                    let normed = scale.apply(&c, mine, squares, V);
                    let address = tokens.o.at(0, first + share.lane);
                    elements::store([normed], address, c.o_element, false);
                }
            } else if share.lane == 0 {
                elements::store(o, tokens.o.at(0, first), c.o_element, wide);
            }
        }
    }
}
