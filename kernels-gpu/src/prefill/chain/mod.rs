//! From state to state through the chunks of a row. With S of a warpgroup's 64 rows in registers, for the tokens t of a chunk
//! and its last one, C:
//!     R = Vᵀ − (S k̂ᵀ)·2^G_t    δ = R Tᵀ    o = (S q̂ᵀ)·2^G_t + δ Pᵀ    S ← 2^G_C S + (δ·2^(G_C − G_t)) k̂
//! Warpgroups that have rows walk (`walk`, `token`); one more brings them what they read (`copier`). A short row's
//! block makes that itself (`short`).

mod copier;
pub mod machine;
mod outside;
mod short;
mod token;
mod walk;

use core::marker::PhantomData;

use machine::Machine;

use super::convolution::ConvInputs;
use super::norm;
use super::output;
use super::prepare;
use super::range;
use super::rows::{Chunk, Span};
use super::single_klast;
use super::solve::SCRATCH_BYTES;
use super::split::{Pass, is_transition};
use super::state::Places;
use super::values::TILE_BYTES;
use super::workspace::{Operands, carried};
use super::{CHUNK, channels, head_bytes, image_bytes, images_bytes, opaque};
use crate::device::cluster;
use crate::device::global::store_b32;
use crate::device::shared::{
    COUNTER_BYTES, dynamic_shared_mem, load_shared_b32, load_shared_b128, store_shared_b32,
    store_shared_b128,
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

/// Barrier of the first warpgroup; the others' follow.
const FIRST_GROUP_BARRIER: u32 = 2;
/// Bytes of the norm's sums: squares of every token, for 64 rows of a state.
const SUM_BYTES: u32 = 4 * CHUNK;
/// Chunks in shared memory; all that a short row has.
const STAGES: u32 = 2;
/// Bytes of a row's [`Span`], which each warp of a block keeps; a block has no more than 12.
const SPAN_BYTES: u32 = 32;
const SPANS_BYTES: u32 = 12 * SPAN_BYTES;
/// Bytes of the counters of a block with a copier, two for each stage.
const COUNTERS_BYTES: u32 = 2 * STAGES * COUNTER_BYTES;
/// Bytes of the checkpoints' slots that a copier leaves, one for each stage.
const SLOT_BYTES: u32 = 8;
const SLOTS_BYTES: u32 = STAGES * SLOT_BYTES;
/// Bytes of the number that each warp with rows keeps.
const NUMBERS_BYTES: u32 = 8 * 4;

/// Shared memory of a stage: the images, the head's operands, and a tile for each warpgroup.
pub const fn stage_bytes(k: u32, per_channel: bool, groups: u32) -> u32 {
    images_bytes(k, per_channel) + head_bytes(k, per_channel) + groups * TILE_BYTES
}

/// Shared memory before the stages, with [`sum_bytes`]: these, the row's tokens, the counters, the slots and the
/// numbers.
const fn header_bytes(sums: u32) -> u32 {
    (sums + SPANS_BYTES + COUNTERS_BYTES + SLOTS_BYTES + NUMBERS_BYTES).next_multiple_of(128)
}

/// Shared memory of a chain's block, with [`sum_bytes`], but for [`state_elements`].
pub const fn shared_bytes(k: u32, per_channel: bool, groups: u32, sums: u32) -> u32 {
    128 + header_bytes(sums) + STAGES * stage_bytes(k, per_channel, groups)
}

/// Elements of the K-last state that the copier brings in one copy: a block that has all of a head has shared memory for
/// these behind the stages.
pub const fn state_elements([v, k]: [u32; 2], groups: u32) -> u32 {
    if groups == 2 { v * k } else { 0 }
}

/// Threads of a block that has a copier: a warpgroup behind those that have rows.
pub const fn block(groups: u32) -> u32 {
    128 * (groups + 1)
}

/// Blocks of a cluster: all that share a head's state.
pub const fn cluster(v: u32, groups: u32) -> u32 {
    v / (64 * groups)
}

/// Shared memory of the norm: the sums of both warpgroups; of a block of a cluster those of all rows of the head, for
/// each stage.
pub const fn sum_bytes(v: u32, groups: u32) -> u32 {
    if cluster(v, groups) > 1 {
        STAGES * v / 64 * SUM_BYTES
    } else {
        2 * SUM_BYTES
    }
}

/// Shared memory behind it that a unit is made in, where the block makes it.
pub const fn room_bytes(k: u32, per_channel: bool, groups: u32) -> u32 {
    if per_channel {
        channels::room_bytes(k) + channels::SCALE_BYTES
    } else if makes_pairs(per_channel, groups) {
        2 * SCRATCH_BYTES + prepare::SCALE_BYTES + 128 + STAGES * head_bytes(k, false)
    } else {
        SCRATCH_BYTES + prepare::SCALE_BYTES
    }
}

/// Shared memory of a block that has a row of one token.
pub const fn single_bytes(k: u32, groups: u32) -> u32 {
    single_klast::shared_bytes(k, 64 * groups)
}

/// Whether both warpgroups may make a value head each, of two that share a query/key head.
pub const fn makes_pairs(per_channel: bool, groups: u32) -> bool {
    !per_channel && groups == 2
}

/// Shared memory that a chunk of one token takes: its q and k, where they are convolved, and the sums of a norm.
#[derive(Clone, Copy)]
struct Room {
    staged: u32,
    sums: u32,
}

/// How far a block is that goes on from row to row, of which it copies chunks ahead of those that it walks.
#[derive(Clone, Copy)]
pub struct Progress {
    /// Chunks of the rows before.
    chunks: u32,
    /// Those before the last of these rows.
    before: u32,
}

impl Progress {
    /// At the first row.
    pub const NONE: Self = Self {
        chunks: 0,
        before: 0,
    };
}

/// A row's walk, of a block that has `64 · GROUPS` rows of a value head's state, as the gate decays it.
pub struct Chain<'a, G, M, const K: u32, const V: u32, const GROUPS: u32> {
    c: &'a StepConstants,
    params: &'a PrefillParams,
    /// The head and tile of the block.
    row: Row,
    /// The row's tokens.
    span: Span,
    /// The inputs from which they are convolved.
    inputs: ConvInputs,
    /// Whether a copier brings zeros for v.
    has_no_values: bool,
    gating: PhantomData<(G, M)>,
}

impl<'a, G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'a, G, M, K, V, GROUPS>
{
    /// Threads that have rows.
    const THREADS: u32 = 128 * GROUPS;
    /// The copier's.
    const COPIERS: u32 = block(GROUPS) - Self::THREADS;
    /// Blocks of the cluster.
    const CLUSTER: u32 = if M::CLUSTERS { cluster(V, GROUPS) } else { 1 };
    const SUM_BYTES: u32 = sum_bytes(V, GROUPS);
    /// Whether o of a chunk of one token is left for the norm behind the launch: no block has all of it.
    const LEAVES_TOKENS: bool = !M::CLUSTERS && cluster(V, GROUPS) > 1;
    /// Whether it has several.
    const CLUSTERED: bool = Self::CLUSTER > 1;
    const STAGE_BYTES: u32 = stage_bytes(K, G::PER_CHANNEL, GROUPS);
    /// Byte of the head's operands in a stage.
    const HEAD: u32 = images_bytes(K, G::PER_CHANNEL);
    const HEAD_BYTES: u32 = head_bytes(K, G::PER_CHANNEL);
    /// Byte of the tiles, behind the head's operands as they are in a workspace.
    const TILES: u32 = Self::HEAD + Self::HEAD_BYTES;
    /// Whether a stage is handed back behind a checkpoint, not before it: KDA's chain would spill.
    const FREES_LATE: bool = G::PER_CHANNEL;
    /// Byte of the image that is added to the state, and tokens of which it is one.
    const ADDED: u32 = if G::PER_CHANNEL { image_bytes(K) } else { 0 };

    /// The walk of a block that has `row`, whose tokens are `span`.
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

    /// The walk of a copier that brings zeros for v if it `has_no_values`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn without_values(self, has_no_values: bool) -> Self {
        Self {
            has_no_values,
            ..self
        }
    }

    /// Whether it makes the transition of a split ([`Pass::Transition`]): the state begins as the identity, and there are no values. For
    /// warps that have kept their turn.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_transition(&self) -> bool {
        // SAFETY: a warp that walks has kept the number.
        !self.makes_output() && unsafe { is_transition(Self::kept_number()) }
    }

    /// Whether it makes o, and states that are kept.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn makes_output(&self) -> bool {
        // Opaque: LLVM would join branches by the pass with others, which the assembler cannot decide (docs/compiler.md).
        !M::SPLITS || unknown(self.c.pass) == Pass::Output as u32
    }

    /// The walk of a block that has `row`, and the slots of the row; `None` where its tokens are not where its lengths say.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn of_row(
        c: &'a StepConstants,
        params: &'a PrefillParams,
        row: Row,
    ) -> Option<(Self, Place)> {
        // Both at once: neither waits for the other.
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

    /// Whether chunk `j` is behind the launch's last of the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_behind(&self, span: &Span, j: u32) -> bool {
        let chunk = span.chunk(j);
        (chunk.count == 0 && chunk.start >= span.count) || j == self.params.end_chunk
    }

    /// The places of this thread's elements of a state; computed at each use, since there are no registers to keep
    /// it. All lanes of a warp come.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn places(&self) -> Places<K, V> {
        let thread = opaque(thread_idx_x());
        Places::new(thread, self.first_of(thread))
    }

    /// Whether o of a chunk of one token is left for the norm behind the launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leaves_tokens(&self) -> bool {
        Self::LEAVES_TOKENS && self.c.has_norm != 0
    }

    /// Address of the rows that this thread's warpgroup leaves for the launch of the next chunks, and the thread; computed as
    /// [`Self::places`].
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

    /// A multiple of 128.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn base() -> u32 {
        // It is a multiple of 16.
        dynamic_shared_mem().next_multiple_of(128)
    }

    /// The `i`-th stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage(i: u32) -> u32 {
        Self::base() + header_bytes(Self::SUM_BYTES) + i * Self::STAGE_BYTES
    }

    /// Words of the norm.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sums() -> u32 {
        Self::base()
    }

    /// The sums of a cluster, for one of two chunks between which its blocks do not wait for each other.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sums_of_cluster(is_second: bool) -> u32 {
        Self::sums() + is_second as u32 * (Self::SUM_BYTES / STAGES)
    }

    /// Waits until the blocks of the cluster, to which this one sends its sums, are there and have read the sums of the row before. All
    /// threads that have rows come, and a copier's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn meet_cluster(&self) {
        if self.c.has_norm != 0 {
            cluster::arrive();
            cluster::wait();
        }
    }

    /// Whether the copier brings the state of this row, behind `progress`: of a block's first row those that walk load
    /// it themselves, as they do where a block has few others, all of which end and begin at about the same time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn brings_state(&self, progress: &Progress) -> bool {
        state_elements([V, K], GROUPS) > 0
            && !M::SPLITS
            && Places::<K, V>::has_runs(self.c)
            && self.params.rows > 2 * self.params.turns
            && progress.chunks > 0
    }

    /// The head's state that the row starts from.
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

    /// The head's state that the row ends with.
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

    /// Rows of a head's state, and elements of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn shape(&self) -> Shape {
        if self.c.state_v_last != 0 {
            [K, V]
        } else {
            [V, K]
        }
    }

    /// Address of the state that the copier brings.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn state() -> u32 {
        Self::stage(STAGES)
    }

    /// Counter of a chunk that is in the `i`-th stage: the copier's threads come to it, with what they copy.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn there(i: u32) -> u32 {
        Self::sums() + Self::SUM_BYTES + SPANS_BYTES + i * COUNTER_BYTES
    }

    /// Counter of the readers of the `i`-th stage: the threads that have rows come to it when they have read the stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn free(i: u32) -> u32 {
        Self::there(STAGES + i)
    }

    /// Address of the checkpoint's slot behind the chunk in the `i`-th stage, which the copier leaves.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slot(i: u32) -> u32 {
        Self::there(2 * STAGES) + i * SLOT_BYTES
    }

    /// Address of the number that a warp keeps while it walks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn number() -> u32 {
        Self::slot(STAGES) + thread_idx_x() / 32 * 4
    }

    /// Keeps it there, since there are not registers for it. All lanes come.
    ///
    /// # Safety
    /// The warp walks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn keep_number(number: u32) {
        sync_warp(u32::MAX);
        if lane_id() == 0 {
            store_shared_b32(Self::number(), number);
        }
        sync_warp(u32::MAX);
    }

    /// The number.
    ///
    /// # Safety
    /// The warp has kept it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn kept_number() -> u32 {
        load_shared_b32(Self::number())
    }

    /// Address of the warp's scales of o of chunk `j` in the workspace. All lanes come.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scales(&self, span: &Span, j: u32) -> u64 {
        let (c, of) = (self.c, (self.row.h, self.r()));
        let operands = Operands::new::<K, V>(c, self.params, G::PER_CHANNEL, span.unit(j), of);
        let warp = self.row.tile * GROUPS * 4 + opaque(thread_idx_x()) / 32;
        norm::scales_of(operands.scales, warp)
    }

    /// Scales o of tokens that f16 would not hold until the norm behind the launch, or [`output::store_normed`], has it: those
    /// from token `first` of chunk `j` on, and any that are too large. What takes that back goes to the workspace, of a `SHORT` row
    /// to shared memory; the intra-chunk pass has said there that no token is scaled.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn scale_output<const SHORT: bool>(
        &self,
        o: &mut [f32; 32],
        (span, j): (&Span, u32),
        first: u32,
    ) {
        let size = norm::size(self.c);
        // SAFETY: the caller's promise; a warp has its own words.
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

    /// Address of the row's [`Span`] that the warp keeps, behind the sums.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept() -> u32 {
        Self::sums() + Self::SUM_BYTES + thread_idx_x() / 32 * SPAN_BYTES
    }

    /// Says there which tokens are the row's, since there are not registers to keep that from chunk to chunk. All lanes come.
    ///
    /// # Safety
    /// The place is the warp's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn keep_span(&self) {
        // The row before is read.
        sync_warp(u32::MAX);
        if lane_id() == 0 {
            let [first, second] = self.span.words();
            store_shared_b128(Self::kept(), first);
            store_shared_b128(Self::kept() + 16, second);
        }
        sync_warp(u32::MAX);
    }

    /// The row's tokens, as [`Self::keep_span`] said.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept_span() -> Span {
        // SAFETY: they are there.
        unsafe {
            let words = [0, 16].map(|byte| load_shared_b128(Self::kept() + byte));
            Span::of_words(words)
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn tile(stage: u32) -> u32 {
        stage + Self::TILES + thread_idx_x() / 128 * TILE_BYTES
    }

    /// Which of the value heads of its query/key head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn r(&self) -> u32 {
        let c = self.c;
        if c.tiled != 0 {
            self.row.hv / c.h
        } else {
            self.row.hv % c.ratio
        }
    }

    /// Zeros for o of the packed tokens that are no row's: see `clear_rest`. Of blocks that have `row`, and those of the same
    /// tile of other rows' turns; with so many `heads` from that one on. Threads that have rows come.
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

    /// Carries the states of a row without tokens from slot to slot, of so many value heads from this one on. All threads come that
    /// have rows.
    ///
    /// # Safety
    /// The tensors of `params` are live; a block's rows of a state are its own.
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

    /// Zeros for the tokens of a row that has no place in the pool, of so many value heads from this one on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_zeros(&self, heads: u32) {
        each!(of in 0..heads => {
            self.of_head(of).store_zeros_of_head();
        });
    }

    /// # Safety
    /// As [`Self::store_zeros`]'.
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

    /// The same, with what its tokens are convolved from.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn with_inputs(&self, place: &Place) -> Self {
        Self {
            inputs: ConvInputs::new(self.c, self.params, place),
            ..*self
        }
    }

    /// Waits for all threads that have rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sync_rows() {
        sync_barrier(output::BLOCK, Self::THREADS);
    }

    /// Stores the state after a chunk that ends where a checkpoint is due; `IS_ONLY` as [`Self::checkpoint_slot`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn checkpoint<const IS_ONLY: bool>(&self, s: &[f32; 64], span: &Span, chunk: Chunk) {
        let slot = self.checkpoint_slot::<IS_ONLY>(span, chunk);
        self.store_checkpoint(s, slot);
    }

    /// Stores a state to a slot, if that is live.
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

    /// The slot of the checkpoint behind a chunk; one that is not live where none is due. `IS_ONLY`: the row is this chunk of one token, and
    /// 64-bit numbers are divided as they are. The other way of dividing spills in KDA's kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn checkpoint_slot<const IS_ONLY: bool>(&self, span: &Span, chunk: Chunk) -> u64 {
        let (c, params) = (self.c, self.params);
        if c.checkpoint_every == 0 {
            return u64::MAX;
        }
        let end = span.position + (chunk.start + chunk.count) as u64;
        let position = if M::SPLITS {
            // Of the row, not of its part.
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

    /// The block's head of a checkpoint's state, in a slot that is live.
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
