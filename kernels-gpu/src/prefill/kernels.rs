//! The kernels of a prefill, but for the intra-chunk passes. Layout and element of states are load-time constants; so is the
//! operator of [`Convolve`], [`Single`] and [`Finish`].

use core::marker::PhantomData;

use super::chain::machine::{Hopper, Machine, Portable};
use super::convolution::ConvInputs;
use super::load::{Load, THREADS};
use super::operands::{GlobalSink, Sink as _};
use super::rows::{NO_ROW, Span, row_in_turn, row_of};
use super::split::{Part, Pass};
use super::values::{self, Channels};
use super::workspace::{Operands, leaves_tokens};
use super::{ALL_CHUNKS, CHUNK, FACTOR_BYTES, FACTORS, carry, chain, image_bytes, norm, windows};
use crate::device::overlap::{let_next_begin, wait_for_previous};
use crate::device::shared::{dynamic_shared_mem, load_shared_b32};
use crate::device::thread::{block_idx_x, block_idx_z, grid_dim_x, sync_threads, thread_idx_x};
use crate::device::warpgroup::{leave_registers, take_registers};
use crate::launch::{Computes, Description, Family, Kernel, Shared, Stage};
use crate::layer::Place;
use crate::math::power::divided;
use crate::recurrent::{Gating, PerHead};
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

/// q, k and v of units, convolved, left in the workspace for an intra-chunk pass: a block has q, k or v of a head.
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
        load.stage::<K, OF>(base);
        sync_threads();
        let words = load.scaled::<K, OF>(load.staged::<K>(base), true, scales);
        load.give::<K, OF>(words, GlobalSink(operands(first).images));
        sync_threads();
        let of = (first + thread_idx_x() / CHUNK, thread_idx_x() % CHUNK);
        let byte = OF * FACTOR_BYTES + 4 * of.1;
        let mut r = of.0;
        while r < end {
            let scale = load_shared_b32(scales + byte);
            GlobalSink(operands(r).head).store_b32(FACTORS + byte, scale);
            r += THREADS / CHUNK;
        }
    }
}

impl<const K: u32, const V: u32> Kernel for Convolve<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // With 192 channels of v, of views that are not aligned, 80 registers are too few.
        min_blocks_per_sm: if K == 96 { 2 } else { 3 },
        shared: Shared::of_block(Self::SCALES + 2 * FACTOR_BYTES + 128),
        ..Description::of(
            THREADS,
            Computes::new(Family::chunked(Stage::Convolve), None, [K, V]),
        )
    };

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
            let (chunk, inputs) = (span.chunk(j), ConvInputs::new(&c, params, &place));
            let operands =
                |h: u32, r: u32| Operands::new::<K, V>(&c, params, per_channel, unit, (h, r));
            if of >= 2 * heads {
                let (h, r) = divided(of - 2 * heads, c.ratio);
                let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
                let of = Channels::of_head(hv);
                let (with, threads) = ((&span, chunk, inputs), (thread_idx_x(), THREADS));
                let tiles = GlobalSink(operands(h, r).values);
                values::make::<K, V, V>(&c, params, with, of, threads, tiles);
                return;
            }
            let (h, r) = divided(divided(of, heads).1, own);
            let load: Load<'_, false> = Load {
                with: (&c, params),
                inputs,
                head: h,
                span: &span,
                chunk,
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

/// The end of an intra-chunk pass. The pass of segment n overlaps chain n − 1. Its last block waits for that chain, so that chain n,
/// which waits for the pass, has waited for chain n − 1 too.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn end_behind_chain(params: &PrefillParams) {
    if params.first_chunk != 0 && block_idx_x() + 1 == grid_dim_x() {
        wait_for_previous();
    }
}

/// Shared memory that blocks of a multiprocessor have together, but for 1 KB of each.
const MOST_SHARED_BYTES: u32 = 226 * 1024;

/// From state to state, with what an intra-chunk pass left in the workspace: a block has `64 · GROUPS` rows of a state, a
/// cluster all of them; its last warpgroup copies for the others. With a norm o is left for [`Finish`].
///
/// The chain of a segment that is not the prompt's last lets the intra-chunk pass of the next segment begin beside it.
pub struct Chain<G, M, const K: u32, const V: u32, const GROUPS: u32>(PhantomData<(G, M)>);

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32> Kernel
    for Chain<G, M, K, V, GROUPS>
{
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = {
        let computes = Computes::new(Family::chunked(Stage::Chain), Some(G::PER_CHANNEL), [K, V]);
        Description {
            min_blocks_per_sm: if Self::TRADES_REGISTERS {
                2 / GROUPS
            } else {
                1
            },
            tiles: V / (64 * GROUPS),
            shared: Shared::of_block(Self::BYTES),
            shared_of_stage: Self::STAGE_BYTES,
            shared_state_elements: chain::state_elements([V, K], GROUPS),
            cluster: if M::CLUSTERS {
                chain::cluster(V, GROUPS)
            } else {
                1
            },
            warpgroups: M::WARPGROUPS,
            overlaps: true,
            ..Description::of(chain::block(GROUPS), computes)
        }
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        if params.end_chunk != ALL_CHUNKS || params.has_singles != 0 {
            // All blocks are there, and keep their multiprocessors: an intra-chunk pass takes the others, or what is left of
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
                Self::run_body::<true>(params);
            } else {
                if const { Self::TRADES_REGISTERS } {
                    leave_registers::<40>();
                }
                Self::run_body::<false>(params);
            }
        }
    }
}

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<G, M, K, V, GROUPS>
{
    /// Shared memory of the second stage, where a launch may have one or two.
    const STAGE_BYTES: u32 = if M::WARPGROUPS {
        0
    } else {
        chain::stage_bytes(K, G::PER_CHANNEL, GROUPS)
    };
    /// The rest of shared memory.
    const BYTES: u32 = chain::shared_bytes(K, G::PER_CHANNEL, GROUPS, chain::sum_bytes(V, GROUPS))
        - Self::STAGE_BYTES;
    /// Whether warpgroups trade registers: not where a block has two and, by its shared memory, a multiprocessor.
    const TRADES_REGISTERS: bool =
        M::WARPGROUPS && (GROUPS == 2 || 2 * Self::BYTES <= MOST_SHARED_BYTES);

    /// Whether there is a body for rows in splits: few heads have few blocks, and so the smallest ones.
    const SPLITS: bool = M::InSplits::SPLITS && GROUPS == 1 && K == 128 && V == 128;

    /// [`Self::run_role`], or that of rows in splits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run_body<const WALKS: bool>(params: &PrefillParams) {
        if const { Self::SPLITS } && constants().split != 0 {
            Chain::<G, M::InSplits, K, V, GROUPS>::run_role::<WALKS>(params);
        } else {
            Self::run_role::<WALKS>(params);
        }
    }

    /// The body of a warpgroup that walks from state to state, or of the one that copies for the others.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run_role<const WALKS: bool>(params: &PrefillParams) {
        let c = constants();
        let tiles = const { Self::DESCRIPTION.tiles };
        let of_block = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        // Of rows in splits, for the pass that makes o.
        let is_first = params.first_chunk == 0 && (!M::SPLITS || c.pass == Pass::Output as u32);
        if WALKS && is_first {
            let of_heads = (1, 0);
            chain::Chain::<G, M, K, V, GROUPS>::clear_rest(&c, params, of_block, of_heads);
        }
        let mut turn = of_block.b;
        let mut progress = chain::Progress::NONE;
        loop {
            let part = Part::of_turn(M::SPLITS, (&c, params), turn);
            let b = row_in_turn(&c, params, part.turn);
            if b == NO_ROW {
                break;
            }
            if WALKS {
                chain::Chain::<G, M, K, V, GROUPS>::keep_number(turn);
            }
            let (row, span) = (Row { b, ..of_block }, Span::load(&c, params, b));
            if span.live {
                let place = Place::load(&c, &params.layer, b);
                let own = if M::SPLITS && place.live() && span.count > 0 {
                    part.of(&c, &span)
                } else {
                    span
                };
                let chain = chain::Chain::<G, M, K, V, GROUPS>::new(&c, params, row, own)
                    .without_values(!WALKS && part.is_transition);
                if !place.live() {
                    if WALKS && is_first && part.i == 0 {
                        chain.store_zeros(1);
                    }
                } else if span.count == 0 {
                    if WALKS && is_first && part.i == 0 {
                        chain.carry(&place, 1);
                    }
                } else if (!M::SPLITS || own.count > 0) && chain.has_chunks() {
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

/// Of rows in splits, from split to split: [`carry`]. A block has 16 rows of a state.
pub struct Carry<const K: u32>;

impl<const K: u32> Kernel for Carry<K> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: K / carry::ROWS,
        shared: Shared::of_block(carry::shared_bytes(K)),
        ..Description::of(
            carry::THREADS,
            Computes::new(Family::chunked(Stage::Carry), None, [K, K]),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let tiles = const { Self::DESCRIPTION.tiles };
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        // SAFETY: the caller's promise; a block's rows of a state are its own.
        unsafe {
            let span = Span::load(&c, params, row.b);
            if span.live && Place::load(&c, &params.layer, row.b).live() {
                carry::Carry::<K>::new(&c, params, row, &span).run();
            }
        }
    }
}

/// The chain whose rows of one token [`Single`] takes, of either operator.
type SingleChain<'a, const K: u32, const V: u32, const GROUPS: u32> =
    chain::Chain<'a, PerHead, Portable, K, V, GROUPS>;

/// Rows of one token, or none, beside a chain of longer ones: a block has a value head.
///
/// It reads and writes nothing that the launches before it of the same prefill do, and ends behind them.
pub struct Single<const K: u32, const V: u32, const GROUPS: u32>;

impl<const K: u32, const V: u32, const GROUPS: u32> Kernel for Single<K, V, GROUPS> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: V / (64 * GROUPS),
        // [`StepConstants::blocks_of_singles`]
        min_blocks_per_sm: 4,
        min_blocks_by_constant: true,
        overlaps: true,
        shared: Shared::of_block(chain::single_bytes(K, GROUPS)),
        ..Description::of(
            128 * GROUPS,
            Computes::new(Family::chunked(Stage::Single), None, [K, V]),
        )
    };

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
                SingleChain::<K, V, GROUPS>::clear_rest(&c, params, row, (1, 0));
            }
            let chain = SingleChain::<K, V, GROUPS>::new(&c, params, row, span);
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
    const DESCRIPTION: Description = Description {
        tiles: V / (64 * GROUPS),
        cluster: chain::cluster(V, GROUPS),
        warpgroups: true,
        makes_pairs: chain::makes_pairs(G::PER_CHANNEL, GROUPS),
        shared: Shared::of_block(
            chain::shared_bytes(K, G::PER_CHANNEL, GROUPS, chain::sum_bytes(V, GROUPS))
                + chain::room_bytes(K, G::PER_CHANNEL, GROUPS),
        ),
        ..Description::of(
            THREADS,
            Computes::new(Family::chunked(Stage::Short), Some(G::PER_CHANNEL), [K, V]),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        // What is behind finds its rows and slots meanwhile.
        let_next_begin();
        let c = constants();
        let tiles = const { Self::DESCRIPTION.tiles };
        let mut row = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        let mut heads = 1;
        if const { Self::DESCRIPTION.makes_pairs } && grid_dim_x() < c.ratio {
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

/// Behind all, each block of which waits for them: norms what the chain left of o, and writes the windows after rows and their
/// checkpoints, which nobody reads any more. A block has a unit of a value head, or a channel of a row's windows in each thread; or,
/// behind a chain that leaves such, a chunk of one token.
pub struct Finish<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Finish<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // Of 192 channels the assembler spills unasked, for a second block.
        min_blocks_per_sm: if V > 128 { 1 } else { 0 },
        one_block_before_hopper: V == 128,
        shared: Shared::of_block(norm::TOKEN_BYTES),
        ..Description::of(
            THREADS,
            Computes::new(Family::chunked(Stage::Finish), None, [K, V]),
        )
    };

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
                norm::of_unit::<V>(&c, params, (&span, span.chunk(j)), (hv, own.scales));
            }
        }
    }
}
