//! The inter-chunk scan: carries the state through the chunks of a row. Each consumer warpgroup has 64 rows of S in registers.
//! For the tokens t of a chunk and its last one, C:
//!     R = Vᵀ − (S k̂ᵀ)·2^G_t    δ = R Tᵀ    o = (S q̂ᵀ)·2^G_t + δ Pᵀ    S ← 2^G_C S + (δ·2^(G_C − G_t)) k̂
//! The consumers' code is in `walk` and `token`. The block's last warpgroup, the producer, copies their operands (`copier`). A
//! short row's block computes the operands itself (`short`).

mod copier;
pub mod machine;
pub mod memory;
mod outside;
mod short;
mod token;
mod walk;

use core::marker::PhantomData;

use machine::Machine;

use super::convolution::ConvInputs;
use super::norm;
use super::output;
use super::range;
use super::rows::{Chunk, Span};
use super::single_klast;
use super::split::{Pass, is_transition};
use super::state::Places;
use super::workspace::{Operands, carried};
use super::{CHUNK, opaque};
use crate::device::cluster;
use crate::device::global::store_b32;
use crate::device::shared::{
    load_shared_b32, load_shared_b128, store_shared_b32, store_shared_b128,
};
use crate::device::thread::{sync_barrier, thread_idx_x};
use crate::device::unknown;
use crate::device::warp::{lane_id, sync_warp};
use crate::layer::Place;
use crate::math::each::each;
use crate::math::elements;
use crate::math::power::divided_long;
use crate::recurrent::Gating;
use crate::recurrent::tokens::clear_rest;
use crate::row::Row;
use crate::state::{B16, F32, Head, Shape, Tile, is_live, slot_of};
use crate::step::{PrefillParams, StepConstants};

/// Named barrier of the first warpgroup; the other warpgroups have the next ones.
const FIRST_GROUP_BARRIER: u32 = 2;

/// Threads of a block with a copier: one more warpgroup after the consumers.
pub const fn block(groups: u32) -> u32 {
    128 * (groups + 1)
}

/// Number of blocks of a cluster: those that share a head's state.
pub const fn cluster(v: u32, groups: u32) -> u32 {
    v / (64 * groups)
}

/// Bytes of shared memory of a block with a row of one token.
pub const fn single_bytes(k: u32, groups: u32) -> u32 {
    single_klast::shared_bytes(k, 64 * groups)
}

/// Whether each warpgroup may compute a value head, of two that share a query/key head.
pub const fn makes_pairs(per_channel: bool, groups: u32) -> bool {
    !per_channel && groups == 2
}

/// Shared memory for a chunk of one token: its q and k if they are convolved, and the sums of a norm.
#[derive(Clone, Copy)]
struct Room {
    staged: u32,
    sums: u32,
}

/// Progress of a persistent block. Its copier is ahead of its consumers, so each has its own.
#[derive(Clone, Copy)]
pub struct Progress {
    /// Chunks so far, of all rows of the block.
    chunks: u32,
    /// Chunks before the latest of these rows.
    before: u32,
}

impl Progress {
    /// Before the first row.
    pub const NONE: Self = Self {
        chunks: 0,
        before: 0,
    };
}

/// The scan of one row, in a block with `64 · GROUPS` rows of a value head's state. `G` is the kind of decay, `M` the machine.
pub struct Chain<'a, G, M, const K: u32, const V: u32, const GROUPS: u32> {
    c: &'a StepConstants,
    params: &'a PrefillParams,
    /// Head and tile of the block.
    row: Row,
    /// Tokens of the row.
    span: Span,
    /// Inputs of the convolution.
    inputs: ConvInputs,
    /// Whether the copier stores zeros in place of v.
    has_no_values: bool,
    gating: PhantomData<(G, M)>,
}

impl<'a, G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'a, G, M, K, V, GROUPS>
{
    /// Consumer threads.
    const THREADS: u32 = 128 * GROUPS;
    /// Copier threads.
    const COPIERS: u32 = block(GROUPS) - Self::THREADS;
    /// Blocks of the cluster.
    const CLUSTER: u32 = if M::CLUSTERS { cluster(V, GROUPS) } else { 1 };
    /// Whether o of a chunk of one token is left for the norm after the launch, because no block has all its channels.
    const LEAVES_TOKENS: bool = !M::CLUSTERS && cluster(V, GROUPS) > 1;
    /// Whether the cluster has several blocks.
    const CLUSTERED: bool = Self::CLUSTER > 1;
    /// Whether a stage is freed after the checkpoint is stored, not before: otherwise KDA's scan would spill.
    const FREES_LATE: bool = G::PER_CHANNEL;

    /// The scan of `row`, whose tokens are `span`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(c: &'a StepConstants, params: &'a PrefillParams, row: Row, span: Span) -> Self {
        Self {
            c,
            params,
            row,
            span,
            inputs: ConvInputs::NONE,
            has_no_values: false,
            gating: PhantomData,
        }
    }

    /// Sets whether the copier stores zeros in place of v.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn without_values(self, has_no_values: bool) -> Self {
        Self {
            has_no_values,
            ..self
        }
    }

    /// Whether the block computes the transition of a split ([`Pass::Transition`]): the state begins as the identity, and v is
    /// zero. Only for warps that have kept their turn.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_transition(&self) -> bool {
        // SAFETY: a consumer warp has kept the number.
        !self.makes_output() && unsafe { is_transition(Self::kept_number()) }
    }

    /// Whether the pass computes o and stores checkpoints and final states.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn makes_output(&self) -> bool {
        // Opaque, because LLVM would join branches on the pass with other branches, which the assembler then cannot resolve
        // (docs/compiler.md).
        !M::SPLITS || unknown(self.c.pass) == Pass::Output as u32
    }

    /// The scan of `row`, and the row's slots; `None` if the row's lengths are inconsistent.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn of_row(
        c: &'a StepConstants,
        params: &'a PrefillParams,
        row: Row,
    ) -> Option<(Self, Place)> {
        // Both loads in one pass: neither waits for the other.
        let span = Span::load(c, params, row.b);
        let place = Place::load(c, &params.layer, row.b);
        if !span.live {
            return None;
        }
        Some((Self::new(c, params, row, span).with_inputs(&place), place))
    }

    /// Whether the row has no tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_empty(&self) -> bool {
        self.span.count == 0
    }

    /// Whether the row has chunks from the first one of this launch on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn has_chunks(&self) -> bool {
        self.params.first_chunk == 0
            || self.span.chunk(self.params.first_chunk).start < self.span.count
    }

    /// Whether chunk `j` lies after the row's last chunk of this launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_behind(&self, span: &Span, j: u32) -> bool {
        let chunk = span.chunk(j);
        (chunk.count == 0 && chunk.start >= span.count) || j == self.params.end_chunk
    }

    /// Positions of this thread's elements in a state. Recomputed at each use, because no registers are free to keep them. Called
    /// by all lanes of a warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn places(&self) -> Places<K, V> {
        let thread = opaque(thread_idx_x());
        Places::new(thread, self.first_of(thread))
    }

    /// Whether o of a chunk of one token is left for the norm after the launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leaves_tokens(&self) -> bool {
        Self::LEAVES_TOKENS && self.c.has_norm != 0
    }

    /// Address where this thread's warpgroup stores its rows for the launch of the next chunks, and the thread's index.
    /// Recomputed like [`Self::places`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn carried(&self) -> (u64, u32) {
        let thread = opaque(thread_idx_x());
        let of = (self.row.hv, self.first_of(thread));
        let with = (G::PER_CHANNEL, self.leaves_tokens());
        let base = carried::<K, V>(self.c, self.params, with, of);
        (base, thread)
    }

    /// First row of the state that this thread's warpgroup has.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first(&self) -> u32 {
        self.first_of(thread_idx_x())
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_of(&self, thread: u32) -> u32 {
        64 * (self.row.tile * GROUPS + thread / 128)
    }

    /// Waits until the blocks of the cluster, to which this block sends its sums, have started and have read the sums of the
    /// previous row. Called by all consumer and copier threads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn meet_cluster(&self) {
        if self.c.has_norm != 0 {
            cluster::arrive();
            cluster::wait();
        }
    }

    /// Whether the copier loads this row's state. The consumers load the state of a block's first row themselves. They load all
    /// states if blocks have at most two rows, because all blocks then begin their second row at about the same time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn brings_state(&self, progress: &Progress) -> bool {
        memory::state_elements([V, K], GROUPS) > 0
            && !M::SPLITS
            && Places::<K, V>::has_runs(self.c)
            && self.params.rows > 2 * self.params.turns
            && progress.chunks > 0
    }

    /// The head's state at the row's start.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start(&self, place: &Place) -> Head {
        let (c, step) = (self.c, &self.params.layer.step);
        let head = (self.row.hv, self.shape());
        if c.state_f32 != 0 {
            place.slots.start::<F32>(c, step, head)
        } else {
            place.slots.start::<B16>(c, step, head)
        }
    }

    /// The head's state at the row's end.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn end(&self, place: &Place) -> Head {
        let (c, step) = (self.c, &self.params.layer.step);
        let head = (self.row.hv, self.shape());
        if c.state_f32 != 0 {
            place.slots.write::<F32>(c, step, head)
        } else {
            place.slots.write::<B16>(c, step, head)
        }
    }

    /// Shape of a head's state: number of rows, and elements of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn shape(&self) -> Shape {
        if self.c.state_v_last != 0 {
            [K, V]
        } else {
            [V, K]
        }
    }

    /// Keeps a number of the warp in shared memory, because no registers are free for it. Called by all lanes.
    ///
    /// # Safety
    /// The warp is a consumer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn keep_number(number: u32) {
        sync_warp(u32::MAX);
        if lane_id() == 0 {
            store_shared_b32(Self::number(), number);
        }
        sync_warp(u32::MAX);
    }

    /// The kept number.
    ///
    /// # Safety
    /// The warp has kept a number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn kept_number() -> u32 {
        load_shared_b32(Self::number())
    }

    /// Address in the workspace of the warp's scales of o for chunk `j`. Called by all lanes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scales(&self, span: &Span, j: u32) -> u64 {
        let (c, of) = (self.c, (self.row.h, self.r()));
        let operands = Operands::new::<K, V>(c, self.params, G::PER_CHANNEL, span.unit(j), of);
        let warp = self.row.tile * GROUPS * 4 + opaque(thread_idx_x()) / 32;
        norm::scales_of(operands.scales, warp)
    }

    /// Scales o of tokens that f16 would not hold until the norm after the launch, or [`output::store_normed`], reads o: tokens
    /// from `first` of chunk `j` on, and tokens whose o is too large. The scales go to the workspace, where the intra-chunk pass
    /// has stored that no token is scaled; those of a `SHORT` row go to shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn scale_output<const SHORT: bool>(
        &self,
        o: &mut [f32; 32],
        (span, j): (&Span, u32),
        first: u32,
    ) {
        let size = norm::size(self.c);
        // SAFETY: the caller's promise; each warp has its own words.
        unsafe {
            let warp = opaque(thread_idx_x()) / 32;
            let shared = if SHORT {
                Self::scratch() + warp * norm::OF_WARP
            } else {
                0
            };
            let holds = first == CHUNK && range::holds_output(o, size);
            if SHORT && holds && lane_id() == 0 {
                store_shared_b32(shared + norm::FIRST, CHUNK);
            }
            if !holds {
                let scales = if SHORT { 0 } else { self.scales(span, j) };
                let scaled = range::scale_output(o, size, first, |token, scale| {
                    if SHORT {
                        store_shared_b32(shared + 4 * token, scale.to_bits());
                    } else {
                        store_b32(scales + 4 * token as u64, scale.to_bits());
                    }
                });
                if lane_id() == 0 {
                    if SHORT {
                        store_shared_b32(shared + norm::FIRST, scaled);
                    } else {
                        store_b32(scales + norm::FIRST as u64, scaled);
                    }
                }
            }
        }
    }

    /// Keeps the row's tokens in shared memory, because no registers are free to keep them from chunk to chunk. Called by all
    /// lanes.
    ///
    /// # Safety
    /// The place is the warp's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn keep_span(&self) {
        // All lanes have read the previous row's.
        sync_warp(u32::MAX);
        if lane_id() == 0 {
            let [first, second] = self.span.words();
            store_shared_b128(Self::kept(), first);
            store_shared_b128(Self::kept() + 16, second);
        }
        sync_warp(u32::MAX);
    }

    /// The row's tokens, as [`Self::keep_span`] stored them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept_span() -> Span {
        // SAFETY: the span was stored.
        unsafe {
            let words = [0, 16].map(|byte| load_shared_b128(Self::kept() + byte));
            Span::of_words(words)
        }
    }

    /// Index of the value head among those of its query/key head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn r(&self) -> u32 {
        let c = self.c;
        if c.tiled != 0 {
            self.row.hv / c.h
        } else {
            self.row.hv % c.ratio
        }
    }

    /// Stores zeros to o of packed tokens that belong to no row (see `clear_rest`), for `heads` value heads: `row`'s, or those
    /// from `r` on. The block shares these tokens with the blocks of the same tile in other turns. Called by the consumer
    /// threads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn clear_rest(
        c: &StepConstants,
        params: &PrefillParams,
        row: Row,
        (heads, r): (u32, u32),
    ) {
        let width = 64 * GROUPS;
        let (turn, threads) = ((row.b, params.turns), (thread_idx_x(), Self::THREADS));
        let at = |i: u32| {
            let own = if heads > 1 {
                row.with_head(c, r + i / width)
            } else {
                row
            };
            own.hv * c.o_head + own.tile * width + i % width
        };
        clear_rest(c, &params.layer.step, turn, threads, heads * width, at);
    }

    /// Copies the states of a row without tokens from slot to slot, for `heads` value heads from this one on. Called by all
    /// consumer threads.
    ///
    /// # Safety
    /// The tensors of `params` are live; a block owns its rows of a state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn carry(&self, place: &Place, heads: u32) {
        let width = 64 * GROUPS;
        let (c, v_last) = (self.c, self.c.state_v_last != 0);
        let tile = Tile::new(v_last, [K, V], (self.row.tile * width, width));
        let (step, threads) = (&self.params.layer.step, (thread_idx_x(), Self::THREADS));
        each!(of in 0..heads => {
            let own = (self.of_head(of).row.hv, tile);
            // SAFETY: the caller's promise.
            unsafe {
                if c.state_f32 != 0 {
                    place.slots.carry::<F32>(c, step, own, threads);
                } else {
                    place.slots.carry::<B16>(c, step, own, threads);
                }
            }
        });
    }

    /// Stores zeros to o of a row without a slot in the pool, for `heads` value heads from this one on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_zeros(&self, heads: u32) {
        each!(of in 0..heads => {
            self.of_head(of).store_zeros_of_head();
        });
    }

    /// # Safety
    /// As for [`Self::store_zeros`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_zeros_of_head(&self) {
        let (c, params) = (self.c, self.params);
        let width = 64 * GROUPS;
        let head = self.row.hv * c.o_head + self.row.tile * width;
        let mut t = thread_idx_x() / width;
        while t < self.span.count {
            let strides = (params.o_row, c.o_token);
            let channel = head + thread_idx_x() % width;
            let base = params.layer.step.o;
            let address = self.span.at(base, strides, t, channel, c.o_element);
            elements::store([0.0], address, c.o_element, false);
            t += Self::THREADS / width;
        }
    }

    /// The same scan with the inputs of the convolution.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn with_inputs(&self, place: &Place) -> Self {
        Self {
            inputs: ConvInputs::new(self.c, self.params, place),
            ..*self
        }
    }

    /// Waits for all consumer threads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sync_rows() {
        sync_barrier(output::BLOCK, Self::THREADS);
    }

    /// Stores the state after a chunk if a checkpoint is due at its end; `IS_ONLY` as in [`Self::checkpoint_slot`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn checkpoint<const IS_ONLY: bool>(&self, s: &[f32; 64], span: &Span, chunk: Chunk) {
        let slot = self.checkpoint_slot::<IS_ONLY>(span, chunk);
        self.store_checkpoint(s, slot);
    }

    /// Stores a state to a slot if the slot is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_checkpoint(&self, s: &[f32; 64], slot: u64) {
        if is_live(
            slot,
            self.params.layer.step.write_pool_slots,
            self.c.null_slot,
        ) {
            self.places().store(self.c, self.checkpoint_at(slot), s);
        }
    }

    /// Slot of the checkpoint after a chunk; not live if none is due. `IS_ONLY`: the row is this chunk of one token, and 64-bit
    /// numbers are divided directly. The other division spills in KDA's kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn checkpoint_slot<const IS_ONLY: bool>(&self, span: &Span, chunk: Chunk) -> u64 {
        let (c, params) = (self.c, self.params);
        if c.checkpoint_every == 0 {
            return u64::MAX;
        }
        let end = span.position + (chunk.start + chunk.count) as u64;
        let position = if M::SPLITS {
            // Position of the row, not of its part.
            slot_of(params.positions, c.positions_index, span.b as u64, 0)
        } else {
            span.position
        };
        let number = if IS_ONLY {
            let every = c.checkpoint_every as u64;
            if !end.is_multiple_of(CHUNK as u64) || !end.is_multiple_of(every) {
                return u64::MAX;
            }
            end / every - position / every - 1
        } else {
            let (ended, rest) = divided_long(end, c.checkpoint_every);
            if !end.is_multiple_of(CHUNK as u64) || rest != 0 {
                return u64::MAX;
            }
            ended - divided_long(position, c.checkpoint_every).0 - 1
        };
        if number >= params.checkpoints as u64 {
            return u64::MAX;
        }
        let at = span.b as u64 * params.checkpoint_slots_row as u64 + number;
        slot_of(params.checkpoint_slots, c.checkpoint_index, at, u64::MAX)
    }

    /// The block's head of a checkpoint's state, in a live slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn checkpoint_at(&self, slot: u64) -> Head {
        let (c, pool) = (self.c, self.params.layer.step.write_pool);
        let (stride, head, wide) = (c.write_slot, (self.row.hv, self.shape()), c.wide_state != 0);
        if c.state_f32 != 0 {
            Head::of_slot::<F32>(pool, slot, stride, head, wide)
        } else {
            Head::of_slot::<B16>(pool, slot, stride, head, wide)
        }
    }
}
