//! The layer step of several tokens on K-last states; the numbers of steps are those of the operators' headers.

use core::marker::PhantomData;

use super::mtp::{LayerStep, Mtp, description};
use super::position;
use super::slices::Slices;
use crate::device::rarely;
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::{FULL_MASK, lane_id, sync_warp};
use crate::launch::{Description, Kernel, Layout};
use crate::math::each::each;
use crate::recurrent::gates::LaneGates;
use crate::recurrent::klast::{
    Token, check_parts, load_channels, load_parts, normable, norms, step, store_channels,
    store_parts,
};
use crate::recurrent::prepared::{load_factors, load_slot, store_factors, store_slot};
use crate::recurrent::slots::token_slot;
use crate::recurrent::tokens::{Decays, Tokens};
use crate::row::Row;
use crate::state::{Share, StateElement, check_k_last, lanes_of, widen_rows};
use crate::step::{LayerParams, StepConstants};

/// K-last states: `TILE` rows of every value head of a query/key head, `ROWS` of them per group of [`lanes_of`] lanes at a time.
/// `DEPTH` such slices of the block are being copied to shared memory. Each thread waits only for its own copies.
pub struct MtpKLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const TILE: u32,
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
    const TILE: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize,
> MtpKLast<G, S, K, V, TILE, ROWS, THREADS, DEPTH, PARTS>
{
    const LANES: u32 = lanes_of(K, PARTS);
    const GROUPS: u32 = THREADS / Self::LANES;
    const GROUPS_OF_WARP: u32 = 32 / Self::LANES;
    /// Rows of a slice.
    const SLICE: u32 = Self::GROUPS * ROWS as u32;

    /// Stores α and the factors of all `tokens`, after the `before` tokens that are there already, in shared memory. The groups
    /// take turns; their first turn is loaded already. All threads of the block call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn prepare(
        launch: &LayerStep,
        (tokens, before): (&Tokens, u32),
        mut turn: Turn,
        share: Share,
    ) {
        let c = launch.c;
        let count = tokens.count * c.ratio;
        // All lanes of a warp stay together: a group without a turn repeats the last one.
        let is_due = |n: u32| n / Self::GROUPS_OF_WARP * Self::GROUPS_OF_WARP < count;
        let mut n = thread_idx_x() / Self::LANES;
        while is_due(n) {
            let (i, r) = (before + tokens.nearest(n / c.ratio), n % c.ratio);
            let (token, head) = (Self::token(c, i), Self::head(c, i, r));
            // SAFETY: the caller's promise; a head's bytes have one writer.
            unsafe {
                let (k, q) = (
                    load_parts::<PARTS>(token, share),
                    load_parts::<PARTS>(token + Self::Q, share),
                );
                let gates = turn.gates.values::<G>(c, Self::LANES, false);
                let norms = norms((k, q), Self::LANES);
                let made = Token::new(c, (k, q), norms, gates, turn.slot);
                if n < count {
                    if G::per_channel(c) {
                        store_channels(head + Self::DECAY, share, made.decay);
                    }
                    if share.lane == 0 {
                        store_factors(head + Self::FACTORS, made.factors);
                        if r == 0 {
                            store_slot(c, token + Self::SLOT, made.slot);
                        }
                    }
                }
                n += Self::GROUPS;
                if is_due(n) {
                    turn = Turn::load::<G, S, K>(launch, tokens, n, share);
                }
            }
        }
    }

    /// Multiplies k and q of prepared tokens whose norms overflow by powers of two, and replaces the factors. The warps take
    /// turns. All threads of the block call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn shrink(launch: &LayerStep, tokens: u32, share: Share) {
        let c = launch.c;
        // SAFETY: the caller's promise; a token's bytes have one writer, after all readers.
        unsafe {
            sync_threads();
            let mut i = thread_idx_x() / 32;
            while i < tokens {
                let token = Self::token(c, i);
                let channels = (
                    load_parts::<PARTS>(token, share),
                    load_parts::<PARTS>(token + Self::Q, share),
                );
                let ((k, q), norms) = normable(c, channels, Self::LANES);
                sync_warp(FULL_MASK);
                if lane_id() < Self::LANES {
                    store_parts(token, share, k);
                    store_parts(token + Self::Q, share, q);
                }
                if lane_id() == 0 {
                    launch.store_norms::<Self>(i, norms);
                }
                i += THREADS / 32;
            }
            sync_threads();
        }
    }

    /// Prepared token `i` of head `r`, v of this group's rows, from row `own` of the tile on, and the address of v.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn prepared(
        c: &StepConstants,
        (i, r, own): (u32, u32, u32),
        share: Share,
    ) -> (Token<PARTS>, [f32; ROWS], u32) {
        let (token, head) = (Self::token(c, i), Self::head(c, i, r));
        let values = head + own * 4;
        let mut v = [0.0; ROWS];
        each!(n in 0..ROWS => v[n] = f32::from_bits(load_shared_b32(values + n as u32 * 4)));
        let made = Token {
            k: load_parts(token, share),
            q: load_parts(token + Self::Q, share),
            decay: if G::per_channel(c) {
                load_channels(head + Self::DECAY, share)
            } else {
                [0.0; 8]
            },
            factors: load_factors(head + Self::FACTORS, G::per_channel(c)),
            slot: load_slot(c, token + Self::SLOT),
        };
        (made, v, values)
    }
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize,
> Mtp for MtpKLast<G, S, K, V, TILE, ROWS, THREADS, DEPTH, PARTS>
{
    type Decays = G;
    const K: u32 = K;
    const V: u32 = V;
    const TILE: u32 = TILE;
    const THREADS: u32 = THREADS;
    const TOKENS: u32 = Self::BEHIND_MAIL + DEPTH * Slices::<S, ROWS, THREADS, PARTS>::SLICE_BYTES;

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
    const TILE: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
    const PARTS: usize,
> Kernel for MtpKLast<G, S, K, V, TILE, ROWS, THREADS, DEPTH, PARTS>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        min_blocks_per_sm: 512 / THREADS,
        ..description::<Self, S>(Layout::KLast)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const { check_k_last((K, PARTS), V, ROWS as u32, THREADS) };
        const { check_parts::<G>(PARTS) };
        const {
            assert!(
                TILE.is_multiple_of(Self::GROUPS_OF_WARP * ROWS as u32),
                "the rows of a warp are of one head"
            );
        };
        let c = StepConstants::get();
        let (row, _) = Row::of_thread(c.h, c.ratio, c.tiled != 0, THREADS);
        let share = Share::of(thread_idx_x(), Self::LANES);
        let group = thread_idx_x() / Self::LANES;
        // SAFETY: the caller's promise; a group owns its rows, a lane its share of each, a thread its channels of the
        // convolution; shared memory has one writer per place, before the barrier that precedes its reads; each message between
        // blocks too has one writer, is sent after the meeting for which the mailboxes are opened, and is read after it has
        // arrived.
        unsafe {
            Self::arrive(&c);
            let launch = LayerStep::load(&c, params, row);
            launch.clear_rest::<Self>();
            if !launch.new.live || launch.new.are_none(&c) {
                rarely();
                Self::meet();
                if launch.new.live {
                    launch.carry::<Self, S>(false);
                }
                return;
            }
            let slots = &launch.place.slots;
            let drafts = launch.load_drafts::<Self>(thread_idx_x());
            let mut earliest = launch.new;
            if let Some(previous) = launch.previous {
                earliest = previous;
            }
            let turn = Turn::load::<G, S, K>(&launch, &earliest, group, share);
            let scale = launch.load_scale::<Self>(thread_idx_x());
            let copies = Slices::<S, ROWS, THREADS, PARTS, false>::new(
                dynamic_shared_mem() + Self::BEHIND_MAIL,
                launch.place.reads(),
                c.wide_state != 0,
            );
            // For a slice: whether this group has rows of it, the head of these rows, and the first of them within the tile.
            let rows = |s: u32| {
                let n = s * Self::SLICE + group * ROWS as u32;
                (n < c.ratio * TILE, n / TILE, n % TILE)
            };
            let from = |s: u32| {
                let (_, r, own) = rows(s);
                let hv = row.with_head(&c, r).hv;
                let head = slots.start::<S>(&c, &params.step, (hv, [V, K]));
                (head, row.tile * TILE + own)
            };
            let slices = (c.ratio * TILE).div_ceil(Self::SLICE);
            let start = |s: u32| {
                let (is_there, ..) = rows(s);
                copies.start(s % DEPTH, is_there, share, || from(s));
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
            match &launch.previous {
                Some(previous) => {
                    kept = previous.count;
                    Self::prepare(&launch, (previous, 0), turn, share);
                    if launch.new.count != 0 {
                        let new = &launch.new;
                        let turn = Turn::load::<G, S, K>(&launch, new, group, share);
                        Self::prepare(&launch, (new, kept), turn, share);
                    }
                }
                None => Self::prepare(&launch, (&launch.new, 0), turn, share),
            }
            sync_threads();

            let tokens = kept + launch.new.count;
            if launch.overflow::<Self>(tokens) {
                Self::shrink(&launch, tokens, share);
            }
            s = 0;
            while s < slices {
                copies.wait(DEPTH - 1);
                let (is_there, r, own) = rows(s);
                if is_there {
                    let (head, first) = from(s);
                    let of_head = row.with_head(&c, r);
                    let raw = copies.read(s % DEPTH, share, head, first);
                    start(s + DEPTH);
                    let mut states = widen_rows::<S, ROWS, PARTS>(&c, raw);
                    let mut i = 0;
                    loop {
                        if c.previous_tokens != 0 && i == kept {
                            let write = slots.write::<S>(&c, &params.step, (of_head.hv, [V, K]));
                            each!(n in 0..ROWS => {
                                let row = first + n as u32;
                                states[n] =
                                    write.store_rounded::<S, PARTS>(&c, share, row, states[n]);
                            });
                        }
                        if i == tokens {
                            break;
                        }
                        let (token, v, values) = Self::prepared(&c, (i, r, own), share);
                        let o = step::<G, ROWS, PARTS>(&c, &mut states, token, v, Self::LANES);
                        i += 1;
                        if i <= kept {
                            continue;
                        }
                        let after = (i - 1 - kept, i == tokens, token.slot);
                        slots.after::<S>(&c, &params.step, of_head, [V, K], after, |head| {
                            each!(n in 0..ROWS => {
                                head.store_row::<S, PARTS>(&c, share, first + n as u32, states[n]);
                            });
                        });
                        sync_warp(FULL_MASK); // o takes the place of v
                        if share.lane == 0 {
                            each!(n in 0..ROWS => {
                                store_shared_b32(values + n as u32 * 4, o[n].to_bits());
                            });
                        }
                    }
                } else {
                    start(s + DEPTH);
                }
                s += 1;
            }
            if c.tokens != 0 {
                launch.finish::<Self>(scale);
            }
        }
    }
}

/// The gates of the token and head that a group prepares next, unconverted, and the token's slot.
#[derive(Clone, Copy)]
struct Turn {
    gates: LaneGates,
    slot: u64,
}

impl Turn {
    /// Loads turn `n`, a token and one of its heads; after the last turn, the last token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load<G: Decays, S: StateElement, const K: u32>(
        launch: &LayerStep,
        tokens: &Tokens,
        n: u32,
        share: Share,
    ) -> Self {
        let (c, params) = (launch.c, &launch.params.step);
        let (t, r) = (tokens.nearest(n / c.ratio), n % c.ratio);
        let row = launch.row.with_head(c, r);
        let own = tokens.with_head(c, params, row);
        Self {
            gates: LaneGates::load::<G, S, K>(c, params, row, &own, t, share),
            slot: token_slot(c, params, row.b, t),
        }
    }
}
