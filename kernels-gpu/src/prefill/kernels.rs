//! The kernels of a prefill, but for the preparations. Layout and element of states are load-time constants; so is the
//! operator of [`Convolve`], [`Single`] and [`Finish`].

use core::marker::PhantomData;

use super::chain::machine::{Hopper, Machine, Portable};
use super::convolution::Inputs;
use super::load::{Load, THREADS};
use super::operands::{Global, Place as _};
use super::rows::{NO_ROW, Span, row_in_turn, row_of};
use super::values::{self, Channels};
use super::workspace::{Operands, leaves_tokens};
use super::{ALL_PIECES, CHUNK, FACTOR_BYTES, FACTORS, chain, image_bytes, norm, windows};
use crate::device::overlap::{let_next_begin, wait_for_previous};
use crate::device::shared::{dynamic_shared_mem, load_shared_b32};
use crate::device::thread::{block_idx_x, block_idx_z, grid_dim_x, sync_threads, thread_idx_x};
use crate::device::warpgroup::{leave_registers, take_registers};
use crate::kernels::gdn_mtp::PerHead;
use crate::launch::{Computes, Family, Kernel};
use crate::layer::Place;
use crate::math::power::divided;
use crate::recurrent::Gating;
use crate::row::{Row, value_head};
use crate::step::{PrefillParams, StepConstants};

/// The constants, of which those are 0 that a prefill does not have.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn constants() -> StepConstants {
    StepConstants {
        tokens: 0,
        previous_tokens: 0,
        token_index: 0,
        accepted_index: 0,
        has_snapshots: 0,
        has_window_snapshots: 0,
        ..StepConstants::get()
    }
}

/// q, k and v of units, convolved, left in the workspace for a preparation: a block has q, k or v of a head.
pub struct Convolve<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Convolve<K, V> {
    /// Shared memory: where q or k goes through, and the scales.
    const SCALES: u32 = image_bytes(K);

    /// Convolves k (0) or q (1) of query/key head `h`, for value heads from `first` to `end` of it.
    ///
    /// # Safety
    /// `with` describes live tensors; the block's shared memory is free, and what is made is its to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn convolve<const OF: u32>(
        load: &Load<'_, false>,
        operands: impl Fn(u32) -> Operands,
        (first, end): (u32, u32),
    ) {
        let base = dynamic_shared_mem().next_multiple_of(128);
        let scales = base + Self::SCALES;
        // SAFETY: the caller's promise.
        unsafe {
            load.stage::<K, OF>(base);
            sync_threads();
            let words = load.scaled::<K, OF>(load.staged::<K>(base), true, scales);
            load.give::<K, OF>(words, Global(operands(first).images));
            sync_threads();
            let of = (first + thread_idx_x() / CHUNK, thread_idx_x() % CHUNK);
            let byte = OF * FACTOR_BYTES + 4 * of.1;
            let mut r = of.0;
            while r < end {
                let scale = load_shared_b32(scales + byte);
                Global(operands(r).head).store_b32(FACTORS + byte, scale);
                r += THREADS / CHUNK;
            }
        }
    }
}

impl<const K: u32, const V: u32> Kernel for Convolve<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = THREADS;
    const TILES: u32 = 1;
    /// With 192 channels of v, of views that are not aligned, 80 registers are too few.
    const MIN_BLOCKS_PER_SM: u32 = if K == 96 { 2 } else { 3 };
    const SHARED_BYTES: u32 = Self::SCALES + 2 * FACTOR_BYTES + 128;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::PrefillConvolve,
        per_channel: None,
        states: None,
        k: K,
        v: V,
    });

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        if c.taps == 0 {
            return;
        }
        // Of q, and of k.
        let per_channel = c.per_channel != 0;
        let own = if per_channel { c.ratio } else { 1 };
        let heads = c.h * own;
        let of_unit = 2 * heads + c.h * c.ratio;
        let (n, of) = divided(block_idx_x(), of_unit);
        // SAFETY: the caller's promise; a unit's operands are this block's to write.
        unsafe {
            // What is prepared first is convolved last, and in L2.
            let Some((span, j)) = row_of::<true>(&c, params, n) else {
                return;
            };
            let unit = span.unit(j);
            let place = Place::load(&c, &params.layer, span.b);
            if !place.live() {
                return;
            }
            let (piece, inputs) = (span.piece(j), Inputs::new(&c, params, &place));
            let operands =
                |h: u32, r: u32| Operands::new::<K, V>(&c, params, per_channel, unit, (h, r));
            if of >= 2 * heads {
                let (h, r) = divided(of - 2 * heads, c.ratio);
                let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
                let of = Channels::of_head(hv);
                let (with, threads) = ((&span, piece, inputs), (thread_idx_x(), THREADS));
                let tiles = Global(operands(h, r).values);
                values::make::<K, V, V>(&c, params, with, of, threads, tiles);
                return;
            }
            let (h, r) = divided(divided(of, heads).1, own);
            let load: Load<'_, false> = Load {
                with: (&c, params),
                inputs,
                head: h,
                span: &span,
                piece,
            };
            let heads_of = if per_channel {
                (r, r + 1)
            } else {
                (0, c.ratio)
            };
            if of < heads {
                Self::convolve::<0>(&load, |r| operands(h, r), heads_of);
            } else {
                Self::convolve::<1>(&load, |r| operands(h, r), heads_of);
            }
        }
    }
}

/// Of a preparation, at its end: it ends behind the chain before it, beside which it may have run. Its last block
/// waits, while the others make room; whoever waits for the preparation has waited for that chain then.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn end_behind_chain(params: &PrefillParams) {
    if params.first_piece != 0 && block_idx_x() + 1 == grid_dim_x() {
        wait_for_previous();
    }
}

/// Shared memory that blocks of a multiprocessor have together, but for 1 KB of each.
const MOST_SHARED_BYTES: u32 = 226 * 1024;

/// From state to state, with what a preparation left in the workspace: a block has `64 · GROUPS` rows of a state, a
/// cluster all of them; its last warpgroup copies for the others. With a norm o is left for [`Finish`].
///
/// Of a prompt in stretches, one that is not the last lets the preparation of the next begin beside it.
pub struct Chain<G, M, const K: u32, const V: u32, const GROUPS: u32>(PhantomData<(G, M)>);

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32> Kernel
    for Chain<G, M, K, V, GROUPS>
{
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = chain::block(GROUPS);
    const MIN_BLOCKS_PER_SM: u32 = if Self::TRADES_REGISTERS {
        2 / GROUPS
    } else {
        1
    };
    const TILES: u32 = V / (64 * GROUPS);
    const SHARED_BYTES: u32 =
        chain::shared_bytes(K, G::PER_CHANNEL, GROUPS, chain::sum_bytes(V, GROUPS))
            - Self::SHARED_BYTES_OF_STAGE;
    const SHARED_BYTES_OF_STAGE: u32 = if M::WARPGROUPS {
        0
    } else {
        chain::stage_bytes(K, G::PER_CHANNEL, GROUPS)
    };
    const SHARED_STATE_ELEMENTS: u32 = chain::state_elements([V, K], GROUPS);
    const CLUSTER: u32 = if M::CLUSTERS {
        chain::cluster(V, GROUPS)
    } else {
        1
    };
    const WARPGROUPS: bool = M::WARPGROUPS;
    const OVERLAPS: bool = true;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: G::CHAIN,
        per_channel: Some(G::PER_CHANNEL),
        states: None,
        k: K,
        v: V,
    });

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        if params.end_piece != ALL_PIECES || params.has_singles != 0 {
            // All blocks are there, and keep their multiprocessors: a preparation takes the others, or what is left of
            // all where the rows of one token are behind.
            let_next_begin();
        }
        // SAFETY: the caller's promise. A block is launched with 168 registers for each thread, or 128: together these
        // are as many.
        unsafe {
            chain::Chain::<G, M, K, V, GROUPS>::open_counters(&constants());
            if thread_idx_x() < 128 * GROUPS {
                if const { !Self::TRADES_REGISTERS } {
                    // Each thread has as many as there can be.
                } else if const { GROUPS == 2 } {
                    take_registers::<232>();
                } else {
                    take_registers::<216>();
                }
                Self::run_role::<true>(params);
            } else {
                if const { Self::TRADES_REGISTERS } {
                    leave_registers::<40>();
                }
                Self::run_role::<false>(params);
            }
        }
    }
}

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<G, M, K, V, GROUPS>
{
    /// Whether warpgroups trade registers: not where a block has two and, by its shared memory, a multiprocessor.
    const TRADES_REGISTERS: bool =
        M::WARPGROUPS && (GROUPS == 2 || 2 * Self::SHARED_BYTES <= MOST_SHARED_BYTES);

    /// What the warpgroups do that walk from state to state, or the one that copies for them.
    ///
    /// # Safety
    /// As [`Kernel::run`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run_role<const WALKS: bool>(params: &PrefillParams) {
        let c = constants();
        // SAFETY: the caller's promise.
        unsafe {
            let of_block = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
            if WALKS && params.first_piece == 0 {
                let of_heads = (1, 0);
                chain::Chain::<G, M, K, V, GROUPS>::clear_rest(&c, params, of_block, of_heads);
            }
            let mut turn = of_block.b;
            let mut progress = chain::Progress::NONE;
            loop {
                let b = row_in_turn(&c, params, turn);
                if b == NO_ROW {
                    break;
                }
                if WALKS {
                    chain::Chain::<G, M, K, V, GROUPS>::keep_number(turn);
                }
                let (row, span) = (Row { b, ..of_block }, Span::load(&c, params, b));
                if span.live {
                    let chain = chain::Chain::<G, M, K, V, GROUPS>::new(&c, params, row, span);
                    let place = Place::load(&c, &params.layer, b);
                    if !place.live() {
                        if WALKS && params.first_piece == 0 {
                            chain.store_zeros(1);
                        }
                    } else if span.count == 0 {
                        if WALKS && params.first_piece == 0 {
                            chain.carry(&place, 1);
                        }
                    } else if chain.has_pieces() {
                        if WALKS {
                            chain.walk(&place, &mut progress);
                        } else {
                            chain.copy(&place, &mut progress);
                        }
                    }
                }
                if WALKS {
                    turn = chain::Chain::<G, M, K, V, GROUPS>::kept_number();
                }
                turn += params.turns;
            }
            if params.has_singles == 0 || of_block.b == 0 {
                // Who comes behind this launch may count on the one before, whatever the rows are.
                wait_for_previous();
            }
        }
    }
}

/// The rows of [`Single`], of either operator.
type Rows<'a, const K: u32, const V: u32, const GROUPS: u32> =
    chain::Chain<'a, PerHead, Portable, K, V, GROUPS>;

/// Rows of one token, or none, beside a chain of longer ones: a block has a value head.
///
/// It reads and writes nothing that the launches before it of the same prefill do, and ends behind them.
pub struct Single<const K: u32, const V: u32, const GROUPS: u32>;

impl<const K: u32, const V: u32, const GROUPS: u32> Kernel for Single<K, V, GROUPS> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = 128 * GROUPS;
    const TILES: u32 = V / (64 * GROUPS);
    /// [`StepConstants::blocks_of_singles`]
    const MIN_BLOCKS_BY_CONSTANT: bool = true;
    const SHARED_BYTES: u32 = chain::single_bytes(K, GROUPS);
    const OVERLAPS: bool = true;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::PrefillSingle,
        per_channel: None,
        states: None,
        k: K,
        v: V,
    });

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let (b, hv) = (block_idx_z(), block_idx_x());
        // SAFETY: the caller's promise.
        unsafe {
            // Both at once: neither waits for the other.
            let (span, place) = (Span::load(&c, params, b), Place::load(&c, &params.layer, b));
            let row = Row::of_head(&c, b, hv);
            if params.has_singles == 0 {
                Rows::<K, V, GROUPS>::clear_rest(&c, params, row, (1, 0));
            }
            let chain = Rows::<K, V, GROUPS>::new(&c, params, row, span);
            if span.count == 1 {
                chain.with_inputs(&place).walk_single(&place);
            } else if span.count == 0 && span.live && place.live() {
                chain.carry(&place, 1);
            }
        }
        if b + 1 == params.rows && hv + 1 == grid_dim_x() {
            wait_for_previous();
        }
    }
}

/// Rows of at most 64 tokens: both in one, without a workspace. A cluster has all of a head, a block `GROUPS` · 64
/// rows of its state.
pub struct Short<G, const K: u32, const V: u32, const GROUPS: u32>(PhantomData<G>);

impl<G: Gating, const K: u32, const V: u32, const GROUPS: u32> Kernel for Short<G, K, V, GROUPS> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = THREADS;
    const TILES: u32 = V / (64 * GROUPS);
    const SHARED_BYTES: u32 =
        chain::shared_bytes(K, G::PER_CHANNEL, GROUPS, chain::sum_bytes(V, GROUPS))
            + chain::room_bytes(K, G::PER_CHANNEL, GROUPS);
    const CLUSTER: u32 = chain::cluster(V, GROUPS);
    const WARPGROUPS: bool = true;
    const MAKES_PAIRS: bool = chain::makes_pairs(G::PER_CHANNEL, GROUPS);
    const COMPUTES: Option<Computes> = Some(Computes {
        family: G::SHORT,
        per_channel: Some(G::PER_CHANNEL),
        states: None,
        k: K,
        v: V,
    });

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        // What is behind finds its rows and slots meanwhile.
        let_next_begin();
        let c = constants();
        // SAFETY: the caller's promise.
        unsafe {
            let mut row = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
            let mut heads = 1;
            if Self::MAKES_PAIRS && grid_dim_x() < c.ratio {
                heads = 2;
                row = row.with_head(&c, 2 * block_idx_x());
            }
            if thread_idx_x() < 128 * GROUPS {
                let of_heads = (heads, if heads > 1 { 2 * block_idx_x() } else { 0 });
                chain::Chain::<G, Hopper, K, V, GROUPS>::clear_rest(&c, params, row, of_heads);
            }
            let block = chain::Chain::<G, Hopper, K, V, GROUPS>::of_row(&c, params, row);
            let Some((chain, place)) = block else {
                return;
            };
            if chain.is_empty() {
                if place.live() && thread_idx_x() < 128 * GROUPS {
                    chain.carry(&place, heads);
                }
            } else if place.live() {
                chain.walk_short(&place, heads);
            } else if thread_idx_x() < 128 * GROUPS {
                chain.store_zeros(heads);
            }
        }
    }
}

/// Behind all, each block of which waits for them: norms what the chain left of o, and writes the windows after rows and their
/// checkpoints, which nobody reads any more. A block has a unit of a value head, or a channel of a row's windows in each thread; or,
/// behind a chain that leaves such, a piece of one token.
pub struct Finish<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Finish<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = THREADS;
    /// Of 192 channels the assembler spills unasked, for a second block.
    const MIN_BLOCKS_PER_SM: u32 = if V > 128 { 1 } else { 0 };
    const TILES: u32 = 1;
    const SHARED_BYTES: u32 = norm::TOKEN_BYTES;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::PrefillFinish,
        per_channel: None,
        states: None,
        k: K,
        v: V,
    });

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let channels = 2 * c.h * K + c.h * c.ratio * V;
        let blocks_of_row = if c.taps > 1 {
            channels.div_ceil(THREADS)
        } else {
            0
        };
        let (block, of_windows) = (block_idx_x(), params.rows * blocks_of_row);
        // SAFETY: the caller's promise; a thread has a channel of a row, a block o of a unit and head.
        unsafe {
            if block < of_windows {
                let channel = block % blocks_of_row * THREADS + thread_idx_x();
                let span = Span::load(&c, params, block / blocks_of_row);
                let place = Place::load(&c, &params.layer, span.b);
                let moves = span.count > 0 || place.carries_window(&c, &params.layer);
                let is_there = channel < channels && span.live && place.live() && moves;
                let mut last = windows::NONE;
                if is_there {
                    last = windows::last(&c, params, &span, &place, channel);
                }
                // Who reads the windows before.
                wait_for_previous();
                if is_there {
                    windows::store(&c, params, (&span, &place), channel, last);
                }
                return;
            }
            let mut block = block - of_windows;
            if leaves_tokens(&c, V) {
                let of_tokens = 2 * params.rows;
                if block < of_tokens {
                    let token = norm::LeftToken::find(&c, params, (block / 2, block % 2 != 0));
                    wait_for_previous();
                    if let Some(token) = token {
                        token.norm::<K, V>(&c, params);
                    }
                    return;
                }
                block -= of_tokens;
            }
            let of_unit = c.h * c.ratio;
            let (n, of) = divided(block, of_unit);
            let (h, r) = divided(of, c.ratio);
            // What was left last is in L2.
            let found = row_of::<true>(&c, params, n);
            wait_for_previous();
            let Some((span, j)) = found.filter(|_| c.has_norm != 0) else {
                return;
            };
            if Place::load(&c, &params.layer, span.b).live() {
                let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
                let per_channel = c.per_channel != 0;
                let own = Operands::new::<K, V>(&c, params, per_channel, span.unit(j), (h, r));
                norm::of_unit::<V>(&c, params, (&span, span.piece(j)), (hv, own.scales));
            }
        }
    }
}
