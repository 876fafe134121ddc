//! The layer step on the tensor cores, all tokens together; the numbers of steps are those of the operators' headers.
//!
//! The recurrence is that of [`crate::recurrent::Parallel`], block by block. A cluster has the blocks that need the same channels
//! of q and k: all tiles of all value heads of a query/key head. Each block convolves a part of these channels for all of them,
//! and v of its own tile. Workers store the results in the places of given tokens. o is normed in place, where v was.
//!
//! Shared memory after [`Map`], in bytes:
//!
//! | from | bytes | content | written by | read by |
//! |---|---|---|---|---|
//! | `MAIL` | 16 | mailboxes: of q and k, and of the sums | | |
//! | `SUMS` | 4 · 8 · V / ROWS | sums of squares of o: a word per token and worker of all tiles | the workers | workers |
//! | `LARGE` | 4 · WARPS · blocks | whether a warp convolved a large q or k, in each block with a part | its warp | workers |

use core::cell::Cell;
use core::marker::PhantomData;

use super::Place;
use super::conv::{Part, Qkv, activate};
use super::drafts::{Drafts, HELD, RowTokens, Which};
use super::norm::{neighbours_sum, neighbours_sum_small, size_by_sums, squares};
use crate::constants::Element;
use crate::device::cluster::{
    self, MAILBOX_BYTES, arrive_relaxed, open_mailbox, send_b32, wait_mailbox,
};
use crate::device::float::maximum;
use crate::device::global::{load_state_b32, store_b32};
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b128, store_shared_b32,
};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_ballot, warp_shuffle_xor};
use crate::launch::{Description, Family, Kernel};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load, store};
use crate::math::range::{self, SMALL, times};
use crate::pending::{InputRing, Ring};
use crate::recurrent::Gating;
use crate::recurrent::parallel::fragments::split;
use crate::recurrent::parallel::map::{Block, Map, Operand, Set, TOKENS, TeamOperand};
use crate::recurrent::parallel::state::StateRows;
use crate::recurrent::parallel::worker::Worker;
use crate::recurrent::parallel::{Around, RowStep, description, meeting, run};
use crate::recurrent::slots::Slots;
use crate::row::Row;
use crate::step::{LayerParams, StepConstants, StepParams};

/// Like [`crate::recurrent::Parallel`], with a convolution and a norm. `CLUSTERED`: in clusters of up to 8 blocks; otherwise a
/// block has a whole value head, the only one of its query/key head.
pub struct Parallel<
    G,
    S,
    const K: u32,
    const V: u32,
    const WARPS: u32,
    const TILES16: usize,
    const CLUSTERED: bool,
>(PhantomData<(G, S)>);

/// Largest cluster that every GPU with clusters supports, in blocks.
pub(crate) const MOST_BLOCKS: u32 = 8;

impl<
    G: Gating,
    S: StateRows,
    const K: u32,
    const V: u32,
    const WARPS: u32,
    const TILES16: usize,
    const CLUSTERED: bool,
> Kernel for Parallel<G, S, K, V, WARPS, TILES16, CLUSTERED>
{
    type Params = LayerParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = {
        let family = Family::PARALLEL.in_layer();
        let of_block = description::<Self>(family, Layer::<Self, (), CLUSTERED>::BYTES);
        let is_large = G::PER_CHANNEL && TILES16 == 2;
        Description {
            cluster: Self::TILES,
            cluster_of_heads: CLUSTERED,
            max_ratio: if CLUSTERED {
                MOST_BLOCKS / Self::TILES
            } else {
                1
            },
            min_blocks_per_sm: match (S::ELEMENT, TILES16) {
                _ if is_large => 2,
                _ if WARPS == 8 && !G::PER_CHANNEL => 2,
                // This tile of K = 128 is selected only for small batches, in which each block has a multiprocessor to itself.
                (_, 1) if WARPS == 4 && K == 128 && !G::PER_CHANNEL => 2,
                (Element::F32, _) => 3,
                (_, 1) if WARPS == 4 => 4,
                _ => of_block.min_blocks_per_sm,
            },
            // [`StepConstants::blocks_of_layer`]
            min_blocks_by_constant: is_large || TILES16 == 1 && (WARPS == 4 || !G::PER_CHANNEL),
            ..of_block
        }
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &LayerParams) {
        const {
            assert!(
                CLUSTERED || Self::TILES == 1,
                "a block by itself has a whole head"
            )
        };
        // No state is stored after each token, so no window either.
        let c = StepConstants {
            token_index: 0,
            has_window_snapshots: 0,
            ..StepConstants::get()
        };
        let row = if CLUSTERED {
            Row::of_head_block(c.h, c.ratio, c.tiled != 0)
        } else {
            Row::of_block(c.h, c.ratio, c.tiled != 0, 1)
        };
        // SAFETY: the caller's promise; the mailboxes' memory has no other use.
        unsafe {
            let layer = Layer::<Self, (), CLUSTERED>::new(&c, params, row, ());
            layer.open_mailboxes(&c);
            run::<Self, _, TILES16>(c, &params.step, row, layer);
        }
    }
}

impl<
    G: Gating,
    S: StateRows,
    const K: u32,
    const V: u32,
    const WARPS: u32,
    const TILES16: usize,
    const CLUSTERED: bool,
> Block for Parallel<G, S, K, V, WARPS, TILES16, CLUSTERED>
{
    type State = S;
    const PER_CHANNEL: bool = G::PER_CHANNEL;
    const K: u32 = K;
    const V: u32 = V;
    const WARPS: u32 = WARPS;
    const ROWS: u32 = 16 * TILES16 as u32;
}

/// Rings to which new tokens are appended before they are solved: none, or [`Rings`].
pub(crate) trait Leaves {
    /// Whether a launch may be a flush, which has no tokens, and whose blocks send each other nothing.
    const FLUSHES: bool;

    /// Loads x, window and taps of a channel.
    ///
    /// # Safety
    /// As for [`Drafts::load`].
    unsafe fn load(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        part: Part,
    ) -> Drafts;

    /// Appends x of the new tokens to the ring, and writes the window if the row is flushed or fresh.
    ///
    /// # Safety
    /// The row is live, and only this thread has the channel.
    unsafe fn leave(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        drafts: &Drafts,
    );

    /// Multiplies `channel` of k of new token `t` in the ring by a power of two.
    ///
    /// # Safety
    /// The row is live, the channel is in the ring, only this thread has the channel, and a barrier has passed since it was stored.
    unsafe fn scale_key(&self, t: u32, channel: u32, power: f32);

    /// Stores y of new token `t` in the ring if `part` is a channel of k.
    ///
    /// # Safety
    /// The row is live, and only this thread has the channel.
    unsafe fn leave_key(&self, part: &Part, t: u32, y: f32);
}

impl Leaves for () {
    const FLUSHES: bool = false;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        part: Part,
    ) -> Drafts {
        Drafts::load(c, params, place, walk, part)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave(
        &self,
        _: &StepConstants,
        _: &LayerParams,
        _: &Place,
        _: &RowTokens,
        _: &Drafts,
    ) {
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn scale_key(&self, _: u32, _: u32, _: f32) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave_key(&self, _: &Part, _: u32, _: f32) {}
}

/// The rings of a deferred state, in which new tokens store x and k.
pub(crate) struct Rings {
    pub inputs: InputRing,
    /// The ring of the query/key head.
    pub keys: Ring,
}

impl Leaves for Rings {
    const FLUSHES: bool = true;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        part: Part,
    ) -> Drafts {
        Drafts::load_waiting(c, params, place, walk, part, &self.inputs)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        walk: &RowTokens,
        drafts: &Drafts,
    ) {
        drafts.leave(c, params, place, walk, &self.inputs);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn scale_key(&self, t: u32, channel: u32, power: f32) {
        let address = self.keys.key(self.inputs.pending() + t) + 4 * channel as u64;
        // SAFETY: the caller's promise; no pending token has this entry.
        unsafe {
            let k = f32::from_bits(load_state_b32(address, true));
            store_b32(address, (k * power).to_bits());
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave_key(&self, part: &Part, t: u32, y: f32) {
        if part.is_there && part.of == Qkv::Key {
            let address = self.keys.key(self.inputs.pending() + t) + 4 * part.own as u64;
            // SAFETY: the caller's promise; no pending token has this entry.
            unsafe { store_b32(address, y.to_bits()) };
        }
    }
}

/// Largest number of a cluster's blocks that convolve q and k.
const MOST_PARTS: u32 = 8;

/// A convolution, a norm, or both, around a block's recurrence.
pub(crate) struct Layer<'a, B, R, const CLUSTERED: bool> {
    block: PhantomData<B>,
    params: &'a LayerParams,
    place: Place,
    rings: R,
    /// Rank of the block in its cluster; the tiles of a head are consecutive.
    rank: u32,
    /// First channel of q and k that the block convolves for its cluster, and number of these channels.
    part: (u32, u32),
}

impl<'a, B: Block, R: Leaves, const CLUSTERED: bool> Layer<'a, B, R, CLUSTERED> {
    const TILE: u32 = B::WARPS * B::ROWS;
    const TILES: u32 = B::V / Self::TILE;
    const MAIL: u32 = Map::<B>::BYTES;
    const SUMS: u32 = Self::MAIL + 2 * MAILBOX_BYTES;
    /// Number of sums of a token.
    const TOKEN_SUMS: u32 = B::V / B::ROWS;
    /// Offset of one word per warp of the blocks that convolve q and k: whether the warp has computed a large q or k.
    const LARGE: u32 = Self::SUMS + TOKENS * Self::TOKEN_SUMS * 4;
    pub const BYTES: u32 = Self::LARGE + if CLUSTERED { MOST_PARTS } else { 1 } * B::WARPS * 4;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn new(c: &StepConstants, params: &'a LayerParams, row: Row, rings: R) -> Self {
        let rank = if CLUSTERED {
            // hv = h · ratio + r, or r · H + h
            let r = if c.tiled != 0 {
                row.hv / c.h
            } else {
                row.hv % c.ratio
            };
            r * Self::TILES + row.tile
        } else {
            0
        };
        let parts = Self::parts(c);
        let channels = B::K / parts;
        let part = if rank < parts {
            (rank * channels, channels)
        } else {
            (0, 0)
        };
        Self {
            block: PhantomData,
            params,
            place: Place::load(c, params, row.b),
            rings,
            rank,
            part,
        }
    }

    /// Number of blocks of the cluster.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn blocks(c: &StepConstants) -> u32 {
        if CLUSTERED { Self::TILES * c.ratio } else { 1 }
    }

    /// Whether the launch's blocks send each other anything.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn meets(c: &StepConstants) -> bool {
        Self::blocks(c) > 1 && (!R::FLUSHES || c.tokens != 0)
    }

    /// Whether the row's slots are valid.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_live(&self) -> bool {
        self.place.live()
    }

    /// Number of the cluster's blocks that convolve q and k: a power of two; they are the first blocks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn parts(c: &StepConstants) -> u32 {
        let blocks = Self::blocks(c);
        if blocks >= MOST_PARTS {
            MOST_PARTS
        } else if blocks >= 4 {
            4
        } else if blocks >= 2 {
            2
        } else {
            1
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn mail_of_channels() -> u32 {
        dynamic_shared_mem() + Self::MAIL
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn mail_of_sums() -> u32 {
        dynamic_shared_mem() + Self::MAIL + MAILBOX_BYTES
    }

    /// Opens the mailboxes for the messages of the other blocks, and arrives at the cluster's barrier. Every thread of the block
    /// calls it.
    ///
    /// # Safety
    /// Nothing else has used shared memory before.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn open_mailboxes(&self, c: &StepConstants) {
        if !Self::meets(c) {
            return;
        }
        if thread_idx_x() == 0 {
            let (_, own) = self.part;
            // SAFETY: the mailboxes' memory has no other use.
            unsafe {
                if c.taps != 0 {
                    // A word per channel and token: an f32, or the high or the low parts of two channels.
                    let sets = if c.tokens != 0 { 2 } else { 0 }
                        + if c.previous_tokens != 0 { 1 } else { 0 };
                    let channels = sets * (B::K - own);
                    let large = match Self::looks_for_large(c) {
                        true if own != 0 => (Self::parts(c) - 1) * B::WARPS,
                        true => Self::parts(c) * B::WARPS,
                        false => 0,
                    };
                    open_mailbox(Self::mail_of_channels(), (channels * TOKENS + large) * 4);
                }
                if Self::TILES > 1 && c.has_norm != 0 {
                    let sums = Self::TOKEN_SUMS - B::WARPS;
                    open_mailbox(Self::mail_of_sums(), sums * TOKENS * 4);
                }
            }
        }
        arrive_relaxed();
    }

    /// Address of the sum of token `t` over the rows of warp `warp` of tile `tile`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum(&self, tile: u32, warp: u32, t: u32) -> u32 {
        dynamic_shared_mem() + Self::SUMS + (t * Self::TOKEN_SUMS + tile * B::WARPS + warp) * 4
    }

    /// Address of token `t` of a channel of k or q. With GDN, the address of a word of two neighbouring channels: their high
    /// parts for the even channel, their low parts for the odd one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn channel(part: &Part, set: Set, t: u32) -> u32 {
        let i = part.own;
        if B::PER_CHANNEL {
            let operand = match (part.of, set) {
                (Qkv::Query, _) => TeamOperand::Query,
                (_, Set::New) => TeamOperand::Key,
                (_, Set::Previous | Set::Later) => TeamOperand::PreviousKey,
            };
            let halves = i % 8 / 4 * (2 * B::K) + i / 8 * 16;
            return Map::<B>::team_operand(operand, t) + halves + i % 4 * 4;
        }
        let operand = match part.of {
            Qkv::Query => Operand::Query,
            _ => set.key(),
        };
        let token = Map::<B>::operand(operand) + t * Map::<B>::ROW;
        let word = Map::<B>::word_of_channel(i);
        token + i % 2 * Map::<B>::LOW + word
    }

    /// Stores `y`, token `t` of a channel, in its place: for k and q, in every block of the cluster. With GDN and bf16 parts, one
    /// of two neighbouring lanes stores the high parts of both channels, the other the low parts. f16 parts are computed later,
    /// from whole tokens. All lanes of the warp call it.
    ///
    /// # Safety
    /// Only this thread writes the place. The mailbox is open, because the blocks have met.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave(&self, c: &StepConstants, part: &Part, set: Set, t: u32, y: f32) {
        let mut word = y.to_bits();
        if !B::PER_CHANNEL && !Map::<B>::is_f16(c) {
            let other = warp_shuffle_xor(y, 1);
            let is_odd = part.own % 2 == 1;
            let [high, low] = if is_odd {
                split(other, y, false)
            } else {
                split(y, other, false)
            };
            if part.of != Qkv::Value {
                word = if is_odd { low } else { high };
            }
        }
        if !part.is_there || (part.of == Qkv::Query && set == Set::Previous) {
            return;
        }
        if part.of == Qkv::Value {
            let values = Map::<B>::values(set, part.own / B::ROWS);
            let place = values + t * Map::<B>::VALUE_ROW + part.own % B::ROWS * 4;
            store_shared_b32(place, word);
            return;
        }
        let place = Self::channel(part, set, t);
        store_shared_b32(place, word);
        let blocks = Self::blocks(c);
        each!(rank in 0..blocks => {
            if rank != self.rank {
                send_b32(place, rank, word, Self::mail_of_channels());
            }
        });
    }

    /// Whether the threads that convolve report a large q or k. They do not for f16 parts, which are computed from whole vectors,
    /// or for deferred states, which have a ring of keys: there the vectors themselves are checked.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn looks_for_large(c: &StepConstants) -> bool {
        c.l2norm != 0 && (B::PER_CHANNEL || !Map::<B>::is_f16(c)) && !B::WAITS
    }

    /// Stores in every block of the cluster whether this warp has computed a large q or k. All lanes of the warp call it.
    ///
    /// # Safety
    /// As for [`Self::leave`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave_large(&self, c: &StepConstants, is_large: bool) {
        let (_, own) = self.part;
        if !Self::looks_for_large(c) || own == 0 {
            return;
        }
        let large = warp_ballot(is_large);
        let place = Self::LARGE + (self.rank * B::WARPS + thread_idx_x() / 32) * 4;
        let (place, rank) = (dynamic_shared_mem() + place, lane_id());
        if rank == self.rank {
            store_shared_b32(place, large);
        } else if rank < Self::blocks(c) {
            send_b32(place, rank, large, Self::mail_of_channels());
        }
    }

    /// Whether a thread loads x, window and taps of its next channel before it convolves the current one. Not if all channels are
    /// first ones, nor if accesses to states are not wide, because then no registers are free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn looks_ahead(c: &StepConstants) -> bool {
        let channels = 2 * (B::K / Self::parts(c)) + Self::TILE;
        channels > 32 * B::WARPS && c.wide_state != 0
    }

    /// Loads x, window and taps of channel `i` of the block; nothing if the row's tokens are not live or `is_due` is false.
    ///
    /// # Safety
    /// The step is of live tensors; no other thread has the channel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_channel(
        step: &RowStep<'_, Self>,
        walk: &RowTokens,
        i: u32,
        is_due: bool,
    ) -> Drafts {
        let (c, layer) = (&step.c, &step.around);
        let dims = [B::K, B::V];
        let mut part = Part::of_head(c, step.row, dims, layer.part, Self::TILE, i);
        part.is_there &= step.tokens.live && is_due;
        (layer.rings).load(c, layer.params, &layer.place, walk, part)
    }
}

/// z and the norm's weight for the elements of o that a lane stores, unconverted.
pub(crate) struct Scales {
    z: Raw<8>,
    weight: Raw<8>,
}

impl<B: Block, R: Leaves, const CLUSTERED: bool, const TILES16: usize> Around<B, TILES16>
    for Layer<'_, B, R, CLUSTERED>
{
    /// x, window and taps of the thread's first channel, and of its second channel if it [`Layer::looks_ahead`].
    type Drafts = (RowTokens, [Drafts; 2]);
    type Scales = Scales;

    const TAKES_PAIR: bool = false;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slots(&self) -> &Slots {
        &self.place.slots
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn live(&self, _: &StepConstants, _: &StepParams) -> bool {
        self.place.live()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn makes(c: &StepConstants) -> bool {
        c.taps != 0
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_drafts(step: &RowStep<'_, Self>) -> (RowTokens, [Drafts; 2]) {
        let walk = RowTokens::new(step.row.b, step.previous.as_ref(), &step.tokens);
        let i = thread_idx_x();
        // If accesses to states are not wide, no registers are free for the first channel.
        let first = Self::load_channel(step, &walk, i, step.c.wide_state != 0);
        let is_due = Self::looks_ahead(&step.c);
        let second = Self::load_channel(step, &walk, i + 32 * B::WARPS, is_due);
        (walk, [first, second])
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn meet(step: &RowStep<'_, Self>) {
        if Self::meets(&step.c) {
            cluster::wait();
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_scales(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>) -> Scales {
        let (c, layer, row) = (&step.c, &step.around, step.row);
        let (t, first) = worker.value_place();
        let none = Raw([0; 8]);
        if c.has_norm == 0 || t >= step.tokens.count {
            return Scales {
                z: none,
                weight: none,
            };
        }
        let v = worker.first + first;
        let token = (step.tokens.start + t) as u64 * c.z_token as u64;
        let z = row.at(layer.params.z, c.z_row, row.hv * c.z_head, v, c.z_element)
            + token * bytes_of(c.z_element) as u64;
        let weight = layer.params.norm_weight + (v * bytes_of(c.norm_weight_element)) as u64;
        Scales {
            z: load(z, c.z_element, c.wide_norm != 0),
            weight: load(weight, c.norm_weight_element, c.wide_norm != 0),
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn carry(step: &RowStep<'_, Self>) {
        let (c, layer) = (&step.c, &step.around);
        if !layer.place.carries_window(c, layer.params) {
            return;
        }
        let walk = RowTokens::new(step.row.b, None, &step.tokens);
        let (_, own) = layer.part;
        let mut i = thread_idx_x();
        while i < 2 * own + Self::TILE {
            let drafts = Self::load_channel(step, &walk, i, true);
            drafts.carry(c, layer.params, &layer.place);
            i += 32 * B::WARPS;
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn make(step: &RowStep<'_, Self>, (walk, drafts): (RowTokens, [Drafts; 2])) {
        let (c, layer) = (&step.c, &step.around);
        let (_, own) = layer.part;
        const { assert!(TOKENS as usize <= HELD, "one set of tokens is convolved") }
        let channels = 2 * own + Self::TILE;
        let mut first = 0;
        let [mut drafts, mut next] = drafts;
        // SAFETY: the caller's promise; each place has one writer, and neighbours are in one warp.
        unsafe {
            if c.wide_state == 0 {
                drafts = Self::load_channel(step, &walk, thread_idx_x(), true);
            }
            let largest = Cell::new(0.0f32);
            loop {
                let give = |part: &Part, which, t, is_there, y: f32| {
                    // Absent tokens count too: the only effect is one more check. A NaN is kept.
                    largest.set(maximum(largest.get(), y.abs()));
                    let set = match which {
                        Which::Previous => Set::Previous,
                        Which::New => Set::New,
                    };
                    if R::FLUSHES && is_there {
                        layer.rings.leave_key(part, t, y);
                    }
                    layer.leave(c, part, set, t, if is_there { y } else { 0.0 });
                };
                let part = drafts.part;
                (layer.rings).leave(c, layer.params, &layer.place, &walk, &drafts);
                drafts.convolve::<1>(c, layer.params, &layer.place, &walk, give);
                // Zeros for the tokens that the launch does not have.
                each!(t in 0..TOKENS => {
                    if c.previous_tokens != 0 && t >= c.previous_tokens {
                        layer.leave(c, &part, Set::Previous, t, 0.0);
                    }
                    if c.tokens != 0 && t >= c.tokens {
                        layer.leave(c, &part, Set::New, t, 0.0);
                    }
                });
                // All threads iterate equally often, because they take part in the shuffles together.
                first += 32 * B::WARPS;
                if first >= channels {
                    break;
                }
                let i = first + thread_idx_x();
                drafts = if Self::looks_ahead(c) {
                    next
                } else {
                    Self::load_channel(step, &walk, i, true)
                };
                let is_due = Self::looks_ahead(c);
                next = Self::load_channel(step, &walk, i + 32 * B::WARPS, is_due);
            }
            let largest = largest.get();
            layer.leave_large(c, largest >= range::LARGE || largest.is_nan());
            if Self::meets(c) {
                wait_mailbox(Self::mail_of_channels());
            }
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn has_made_large(step: &RowStep<'_, Self>) -> bool {
        let c = &step.c;
        if !Self::looks_for_large(c) {
            return false;
        }
        let mut large = 0;
        let mut i = lane_id();
        while i < Self::parts(c) * B::WARPS {
            large |= load_shared_b32(dynamic_shared_mem() + Self::LARGE + 4 * i);
            i += 32;
        }
        range::any_large(large != 0)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn scale_key(step: &RowStep<'_, Self>, (t, channel): (u32, u32), power: f32) {
        let layer = &step.around;
        let (first, count) = layer.part;
        each!(i in 0..8 => {
            let own = channel + i as u32;
            if t < step.tokens.count && own >= first && own < first + count {
                layer.rings.scale_key(t, own, power);
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn take_outputs(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>) {
        let (c, layer) = (&step.c, &step.around);
        let (t, _) = worker.value_place();
        // SAFETY: the caller's promise; the cluster's blocks have met.
        unsafe {
            if c.has_norm == 0 {
                worker.store_outputs(Set::New, step.tokens.o, c.o_element, step.tokens.count);
                return;
            }
            sync_warp(FULL_MASK);
            let mut own = [0.0; 8];
            if t < TOKENS {
                own = outputs(worker);
            }
            let lanes = Worker::<B, TILES16>::VALUE_LANES;
            let sum = squares!(sum_of_rows(own, lanes), sum_of_rows_small(own, lanes));
            if t < TOKENS && lane_id().is_multiple_of(Worker::<B, TILES16>::VALUE_LANES) {
                let place = layer.sum(step.row.tile, worker.warp, t);
                store_shared_b32(place, sum.to_bits());
                each!(tile in 0..Self::TILES => {
                    if tile != step.row.tile {
                        let rank = layer.rank - step.row.tile + tile;
                        send_b32(place, rank, sum.to_bits(), Self::mail_of_sums());
                    }
                });
            }
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn finish(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>, scales: Scales) {
        let (c, layer) = (&step.c, &step.around);
        if c.has_norm == 0 {
            return;
        }
        let (t, first) = worker.value_place();
        meeting::workers::<B>();
        if Self::TILES > 1 {
            wait_mailbox(Self::mail_of_sums());
        }
        if t >= step.tokens.count {
            return;
        }
        let z = scales.z.to_f32(c.z_element);
        let weight = scales.weight.to_f32(c.norm_weight_element);
        let mut o = outputs(worker);
        let sums = (layer.sum(0, 0, t), Self::TOKEN_SUMS);
        let size = size_by_sums(c, &mut o, sums, B::V);
        each!(i in 0..8 => o[i] = weight[i] * (o[i] * size) * activate(c.norm_activation, z[i]));
        let address = step.tokens.o.at(t, worker.first + first);
        store(o, address, c.o_element, c.wide_io != 0);
    }
}

/// Sum of the squares of 8 rows in each of `lanes` lanes, neighbours first. All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of_rows(o: [f32; 8], lanes: u32) -> f32 {
    let [a, b, c, d, e, f, g, h] = o.map(|o| o * o);
    neighbours_sum(((a + b) + (c + d)) + ((e + f) + (g + h)), lanes)
}

/// [`sum_of_rows`] for o times [`SMALL`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of_rows_small(o: [f32; 8], lanes: u32) -> f32 {
    let [a, b, c, d, e, f, g, h] = times(o, SMALL).map(|o| o * o);
    neighbours_sum_small(((a + b) + (c + d)) + ((e + f) + (g + h)), lanes)
}

/// This lane's 8 elements of o, which [`Worker::outputs`] stored over the new tokens' values.
///
/// # Safety
/// The lane has elements, and they have been stored.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn outputs<B: Block, const TILES16: usize>(worker: &Worker<B, TILES16>) -> [f32; 8] {
    let (t, row) = worker.value_place();
    let place = worker.value_address(Set::New, t, row, Element::F32 as u32);
    let [[a, b, c, d], [e, f, g, h]] = [load_shared_b128(place), load_shared_b128(place + 16)];
    [a, b, c, d, e, f, g, h].map(f32::from_bits)
}
