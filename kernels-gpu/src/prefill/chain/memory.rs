//! Shared memory of a scan's block: a header, then two stages, each for the operands of a chunk.
//!
//! On Hopper a stage has all operands. Elsewhere two such stages would exceed the 99 KB of most GPUs. There the operands that only
//! a part of a chunk's computation reads have one buffer, behind the stages ([`Apart`]): the copier fills the buffer for the next
//! chunk as soon as that part ends.
//!
//! Each stage and each single buffer has two counters (mbarriers). On `there` the copier's threads and copies arrive, on `free`
//! the consumer threads when they have read the operands.

use super::super::prepare;
use super::super::solve::SCRATCH_BYTES;
use super::super::values::TILE_BYTES;
use super::super::{CHUNK, FACTORS, channels, head_bytes, image_bytes, images_bytes};
use super::machine::Machine;
use super::{Chain, cluster, makes_pairs};
use crate::device::shared::{
    COUNTER_BYTES, arrive_at_counter, dynamic_shared_mem, wait_for_counter,
};
use crate::device::thread::thread_idx_x;
use crate::recurrent::Gating;

/// Bytes of the norm's sums: a sum of squares per token, for 64 rows of a state.
const SUM_BYTES: u32 = 4 * CHUNK;
/// Number of stages. A short row has no more chunks.
pub const STAGES: u32 = 2;
/// Bytes of a row's [`Span`](super::super::rows::Span), of which each warp of a block keeps a copy; a block has at most 12 warps.
const SPAN_BYTES: u32 = 32;
const SPANS_BYTES: u32 = 12 * SPAN_BYTES;
/// Bytes of two counters for each stage.
const COUNTERS_BYTES: u32 = 2 * STAGES * COUNTER_BYTES;
/// Bytes of the checkpoints' slots that the copier stores, one for each stage.
const SLOT_BYTES: u32 = 8;
const SLOTS_BYTES: u32 = STAGES * SLOT_BYTES;
/// Bytes of the numbers that the consumer warps keep, one for each warp.
const NUMBERS_BYTES: u32 = 8 * 4;
/// Bytes of two counters for each [`Apart`].
const APART_COUNTERS_BYTES: u32 = 2 * 2 * COUNTER_BYTES;

/// Operands with a single buffer, on machines with [`Machine::APART`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Apart {
    /// KDA's images of k̂ and q̂, which the first products read.
    Images,
    /// T, P and KDA's image that is added to the state, which the later products read.
    Triangles,
}

impl Apart {
    /// In the order in which a chunk's computation reads them.
    pub const ALL: [Self; 2] = [Self::Images, Self::Triangles];
}

/// Bytes of the operands with a single buffer; none unless `apart` ([`Machine::APART`]).
const fn apart_bytes(k: u32, per_channel: bool, apart: bool) -> u32 {
    match (apart, per_channel) {
        (false, _) => 0,
        (true, false) => FACTORS,
        (true, true) => images_bytes(k, true) + FACTORS,
    }
}

/// Bytes of a stage: images, T, P, factors, and a tile of v for each warpgroup, as far as they have no single buffer.
const fn stage_bytes(k: u32, per_channel: bool, groups: u32, apart: bool) -> u32 {
    let all = images_bytes(k, per_channel) + head_bytes(k, per_channel) + groups * TILE_BYTES;
    all - apart_bytes(k, per_channel, apart)
}

/// Bytes before the stages: the sums ([`sum_bytes`]), the spans, the counters, the slots and the numbers.
const fn header_bytes(sums: u32) -> u32 {
    let counters = COUNTERS_BYTES + APART_COUNTERS_BYTES;
    (sums + SPANS_BYTES + counters + SLOTS_BYTES + NUMBERS_BYTES).next_multiple_of(128)
}

/// Bytes of shared memory of a scan's block with `sums` = [`sum_bytes`], without [`state_elements`].
pub const fn shared_bytes(k: u32, per_channel: bool, groups: u32, sums: u32, apart: bool) -> u32 {
    128 + header_bytes(sums)
        + STAGES * stage_bytes(k, per_channel, groups, apart)
        + apart_bytes(k, per_channel, apart)
}

/// Elements of the K-last state that the copier loads in one copy. A block that has all of a head has shared memory for them
/// after the stages.
pub const fn state_elements([v, k]: [u32; 2], groups: u32) -> u32 {
    if groups == 2 { v * k } else { 0 }
}

/// Bytes of shared memory of the norm's sums: of both warpgroups; in a cluster, of all rows of the head for each stage.
pub const fn sum_bytes(v: u32, groups: u32) -> u32 {
    if cluster(v, groups) > 1 {
        STAGES * v / 64 * SUM_BYTES
    } else {
        2 * SUM_BYTES
    }
}

/// Bytes of shared memory after [`shared_bytes`] for the intra-chunk pass, in a block that runs it.
pub const fn room_bytes(k: u32, per_channel: bool, groups: u32) -> u32 {
    if per_channel {
        channels::room_bytes(k) + channels::SCALE_BYTES
    } else if makes_pairs(per_channel, groups) {
        2 * SCRATCH_BYTES + prepare::SCALE_BYTES + 128 + STAGES * head_bytes(k, false)
    } else {
        SCRATCH_BYTES + prepare::SCALE_BYTES
    }
}

/// Addresses of a chunk's operands.
#[derive(Clone, Copy)]
pub(super) struct Staged {
    /// Image of k̂ and q̂.
    pub images: u32,
    /// Image of k̂ that is added to the state.
    pub added: u32,
    /// T, then P.
    pub triangles: u32,
    pub factors: u32,
    /// Tile of v of this thread's warpgroup.
    pub tile: u32,
}

impl<G: Gating, M: Machine, const K: u32, const V: u32, const GROUPS: u32>
    Chain<'_, G, M, K, V, GROUPS>
{
    pub(super) const SUM_BYTES: u32 = sum_bytes(V, GROUPS);
    const STAGE_BYTES: u32 = stage_bytes(K, G::PER_CHANNEL, GROUPS, M::APART);
    /// Byte offset of T, P and factors in a stage that has all operands.
    pub(super) const HEAD: u32 = images_bytes(K, G::PER_CHANNEL);
    pub(super) const HEAD_BYTES: u32 = head_bytes(K, G::PER_CHANNEL);
    /// Byte offset of the tiles, which follow the factors as in the workspace.
    pub(super) const TILES: u32 = Self::STAGE_BYTES - GROUPS * TILE_BYTES;
    /// Byte offset of the factors.
    pub(super) const FACTORS: u32 = Self::TILES + FACTORS - Self::HEAD_BYTES;

    /// Start of the block's shared memory, rounded up to a multiple of 128.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn base() -> u32 {
        // The start is a multiple of 16.
        dynamic_shared_mem().next_multiple_of(128)
    }

    /// Stage of the block's chunk number `chunks`, and how often the stage was used before.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn stage_of(chunks: u32) -> (u32, u32) {
        (chunks % STAGES, chunks / STAGES)
    }

    /// Address of stage `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn stage(i: u32) -> u32 {
        Self::base() + header_bytes(Self::SUM_BYTES) + i * Self::STAGE_BYTES
    }

    /// Addresses of the operands with stage `stage`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn staged(stage: u32) -> Staged {
        if !M::APART {
            return Self::staged_with(stage, stage + Self::HEAD);
        }
        let triangles = Self::apart(Apart::Triangles);
        let (images, added, triangles) = if G::PER_CHANNEL {
            (
                Self::apart(Apart::Images),
                triangles,
                triangles + image_bytes(K) / 2,
            )
        } else {
            (stage, stage, triangles)
        };
        Staged {
            images,
            added,
            triangles,
            factors: stage + Self::FACTORS,
            tile: Self::tile(stage),
        }
    }

    /// The same with T, P and factors at `head`, for a stage with all operands.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn staged_with(stage: u32, head: u32) -> Staged {
        Staged {
            images: stage,
            added: stage + if G::PER_CHANNEL { image_bytes(K) } else { 0 },
            triangles: head,
            factors: head + FACTORS,
            tile: Self::tile(stage),
        }
    }

    /// Address of this warpgroup's tile of v.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tile(stage: u32) -> u32 {
        stage + Self::TILES + thread_idx_x() / 128 * TILE_BYTES
    }

    /// Address of the state that the copier loads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn state() -> u32 {
        Self::stage(STAGES)
    }

    /// Address of the norm's sums.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sums() -> u32 {
        Self::base()
    }

    /// Address of a cluster's sums, for one of two chunks between which the blocks do not wait for each other.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sums_of_cluster(is_second: bool) -> u32 {
        Self::sums() + is_second as u32 * (Self::SUM_BYTES / STAGES)
    }

    /// Address of the warp's copy of the row's [`Span`](super::super::rows::Span), after the sums.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn kept() -> u32 {
        Self::sums() + Self::SUM_BYTES + thread_idx_x() / 32 * SPAN_BYTES
    }

    /// Counter of the operands in stage `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn there(i: u32) -> u32 {
        Self::sums() + Self::SUM_BYTES + SPANS_BYTES + i * COUNTER_BYTES
    }

    /// Counter of the readers of stage `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn free(i: u32) -> u32 {
        Self::there(STAGES + i)
    }

    /// Address of the slot of the checkpoint after the chunk in stage `i`, which the copier stores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn slot(i: u32) -> u32 {
        Self::there(2 * STAGES) + i * SLOT_BYTES
    }

    /// Address of the number that a consumer warp keeps.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn number() -> u32 {
        Self::slot(STAGES) + thread_idx_x() / 32 * 4
    }

    /// Whether these operands have a single buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn has_apart(of: Apart) -> bool {
        M::APART && (G::PER_CHANNEL || of == Apart::Triangles)
    }

    /// Address of a single buffer. The buffers lie behind the stages, in the order of the workspace.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn apart(of: Apart) -> u32 {
        let images = G::PER_CHANNEL && of == Apart::Triangles;
        Self::stage(STAGES) + if images { image_bytes(K) } else { 0 }
    }

    /// Counter of the operands in a single buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn apart_there(of: Apart) -> u32 {
        Self::slot(STAGES) + NUMBERS_BYTES + of as u32 * COUNTER_BYTES
    }

    /// Counter of the readers of a single buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn apart_free(of: Apart) -> u32 {
        Self::apart_there(of) + 2 * COUNTER_BYTES
    }

    /// Waits for the operands in a single buffer, if there is one, for the block's chunk number `chunks`. Called by a consumer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn meet_apart(of: Apart, chunks: u32) {
        if Self::has_apart(of) {
            // SAFETY: the counters are initialised.
            unsafe { wait_for_counter(Self::apart_there(of), chunks) };
        }
    }

    /// Frees a single buffer, if there is one. Called by each consumer thread once for each chunk, when it has read the operands.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn free_apart(of: Apart) {
        if Self::has_apart(of) {
            // SAFETY: the counters are initialised.
            unsafe { arrive_at_counter(Self::apart_free(of)) };
        }
    }
}
