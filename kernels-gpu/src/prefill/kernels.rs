//! Kernels of a prefill except the intra-chunk passes. Layout and element of states are load-time constants; so is the operator
//! of [`Convolve`], [`Single`] and [`Finish`].

use core::marker::PhantomData;

use super::chain::machine::{Hopper, Machine, Portable};
use super::chain::memory;
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

/// Load-time constants, with 0 for those that a prefill does not have.
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

/// Convolves q, k and v of chunks and stores them in the workspace for the intra-chunk pass. A block has q, k or v of one chunk
/// and head.
pub struct Convolve<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Convolve<K, V> {
    /// Offset of the scales in shared memory, after the staging area of q or k.
    const SCALES: u32 = image_bytes(K);

    /// Convolves k (`OF` = 0) or q (1) of `load`'s query/key head, and stores it for value heads `first` to `end` of that head.
    ///
    /// # Safety
    /// `with` describes live tensors; the block's shared memory is free, and the operands are its to write.
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
        // With 192 channels of v and unaligned views, 80 registers are too few.
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
        // Blocks for q and for k: one per query/key head, or per value head with decays by channel.
        let per_channel = c.per_channel != 0;
        let own = if per_channel { c.ratio } else { 1 };
        let heads = c.h * own;
        let of_unit = 2 * heads + c.h * c.ratio;
        let (n, of) = divided(block_idx_x(), of_unit);
        // SAFETY: the caller's promise; a chunk's operands are this block's to write.
        unsafe {
            // From the last chunk on: the chunks that the intra-chunk pass reads first are convolved last, and are in L2.
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

/// End of an intra-chunk pass. The pass of segment n overlaps scan n − 1. Its last block waits for that scan, so that scan n,
/// which waits for the pass, has also waited for scan n − 1.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn end_behind_chain(params: &PrefillParams) {
    if params.first_chunk != 0 && block_idx_x() + 1 == grid_dim_x() {
        wait_for_previous();
    }
}

/// Shared memory that the blocks of a multiprocessor share, without the 1 KB that each block reserves.
const MOST_SHARED_BYTES: u32 = 226 * 1024;

/// The inter-chunk scan, with the operands of the intra-chunk pass in the workspace. A block has `64 · GROUPS` rows of a state, a
/// cluster all of them; the block's last warpgroup copies operands for the others. With a norm, [`Finish`] norms o after the
/// scan.
///
/// The scan of a segment that is not the prompt's last lets the next segment's intra-chunk pass begin concurrently.
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
            shared_state_elements: memory::state_elements([V, K], GROUPS),
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
            // All blocks of the scan run and keep their multiprocessors. The next launch takes the other multiprocessors: an
            // intra-chunk pass, or, with rows of one token, their launch takes whatever is free.
            let_next_begin();
        }
        // SAFETY: the caller's promise. A block is launched with 168 or 128 registers a thread; the counts below add up to the
        // same total.
        unsafe {
            chain::Chain::<G, M, K, V, GROUPS>::open_counters(&constants());
            if thread_idx_x() < 128 * GROUPS {
                if const { !Self::TRADES_REGISTERS } {
                    // Each thread has the maximum number of registers already.
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
    /// Bytes of shared memory of a block.
    const BYTES: u32 = {
        let sums = memory::sum_bytes(V, GROUPS);
        let bytes = memory::shared_bytes(K, G::PER_CHANNEL, GROUPS, sums, M::APART);
        assert!(M::WARPGROUPS || bytes <= 99 * 1024, "every GPU has 99 KB");
        bytes
    };
    /// Whether warpgroups trade registers. They do not where a block has two warpgroups and, by its shared memory, a
    /// multiprocessor to itself.
    const TRADES_REGISTERS: bool =
        M::WARPGROUPS && (GROUPS == 2 || 2 * Self::BYTES <= MOST_SHARED_BYTES);

    /// Whether the kernel has a second body for rows in splits. Splits are for few heads, hence few blocks, hence the smallest
    /// blocks.
    const SPLITS: bool = M::InSplits::SPLITS && GROUPS == 1 && K == 128 && V == 128;

    /// Calls [`Self::run_role`], or that of rows in splits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run_body<const WALKS: bool>(params: &PrefillParams) {
        if const { Self::SPLITS } && constants().split != 0 {
            Chain::<G, M::InSplits, K, V, GROUPS>::run_role::<WALKS>(params);
        } else {
            Self::run_role::<WALKS>(params);
        }
    }

    /// Body of a warpgroup that computes (`WALKS`), or of the warpgroup that copies for the others.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run_role<const WALKS: bool>(params: &PrefillParams) {
        let c = constants();
        let tiles = const { Self::DESCRIPTION.tiles };
        let of_block = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        // With rows in splits: only in the pass that computes o.
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
            // The launch after this one may rely on the launch before it, whatever the rows are.
            wait_for_previous();
        }
    }
}

/// Carries states from split to split: [`carry`]. A block has 16 rows of a state.
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
        // SAFETY: the caller's promise; a block owns its rows of a state.
        unsafe {
            let span = Span::load(&c, params, row.b);
            if span.live && Place::load(&c, &params.layer, row.b).live() {
                carry::Carry::<K>::new(&c, params, row, &span).run();
            }
        }
    }
}

/// The scan whose rows of one token [`Single`] processes, for either operator.
type SingleChain<'a, const K: u32, const V: u32, const GROUPS: u32> =
    chain::Chain<'a, PerHead, Portable, K, V, GROUPS>;

/// Processes rows of one token, or none, concurrently with the scan of longer rows. A block has one value head.
///
/// The kernel reads and writes nothing that earlier launches of the same prefill read or write, and it ends after them.
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
            // Both in one pass: neither load waits for the other.
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

/// Intra-chunk pass and scan in one kernel, without a workspace, for rows of at most 64 tokens. A cluster has all rows of a
/// head's state, a block `GROUPS` · 64 of them.
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
            memory::shared_bytes(
                K,
                G::PER_CHANNEL,
                GROUPS,
                memory::sum_bytes(V, GROUPS),
                false,
            ) + memory::room_bytes(K, G::PER_CHANNEL, GROUPS),
        ),
        ..Description::of(
            THREADS,
            Computes::new(Family::chunked(Stage::Short), Some(G::PER_CHANNEL), [K, V]),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        // The next launch finds its rows and slots meanwhile.
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

/// The last launch, each block of which waits for the launches before it. Norms the scan's o, and writes the windows after rows
/// and their checkpoints, which nobody reads any more. A block has a chunk of one value head, or one channel of a row's windows
/// in each thread; or, after a scan that stores them for the norm, a chunk of one token.
pub struct Finish<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Finish<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // With 192 channels the assembler spills without being asked, to fit a second block.
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
        // SAFETY: the caller's promise; a thread owns a channel of a row, a block owns o of a chunk and head.
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
                // Wait for the readers of the old windows.
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
            // From the last chunk on, because the results stored last are in L2.
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
