//! Layer kernels for several tokens, one after the other: shared memory, convolution and gates before the recurrence, norm after
//! it.

use super::conv::{Part, Qkv};
use super::drafts::{Drafts, HELD, RowTokens, Which};
use super::norm::{Scale, sum_of, sum_of_neighbours};
use super::{Place, mail};
use crate::device::cluster;
use crate::device::shared::{dynamic_shared_mem, load_shared_b32, store_shared_b32};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::device::warp::lane_id;
use crate::launch::{Computes, Description, Family, Layout, Shared};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, load_one};
use crate::math::range::{any_large, may_overflow};
use crate::recurrent::prepared::{
    FACTOR_BYTES, bytes_of_channels, load_factors, load_key_and_query, store_factors,
};
use crate::recurrent::tokens::{Decays, Run, Tokens, clear_rest};
use crate::row::Row;
use crate::state::{StateElement, Tile};
use crate::step::{LayerParams, StepConstants};

/// A block that has a tile of all value heads of a query/key head, alone or in a cluster of blocks with the other tiles. Its
/// shared memory has the kept previous tokens, then the new tokens. For each token, in bytes:
///
/// | from | bytes | content |
/// |---|---|---|
/// | 0 | 4 K | k, f32, each channel at [`Mtp::place`] |
/// | `Q` | 4 K | q, likewise |
/// | `SLOT` | 8 | with token slots: destination of the state after the token |
/// | `TOKEN_BYTES` | `HEAD_BYTES` a head | v, then o, of the tile; factors; sums of squares of o |
/// | `DECAY` of a head | `DECAY_BYTES` | KDA: α of every channel, at [`Mtp::place`] |
pub trait Mtp {
    /// One decay per key channel (KDA) or per value head (GDN).
    type Decays: Decays;
    const K: u32;
    const V: u32;
    /// Elements of v of each head.
    const TILE: u32;
    const THREADS: u32;
    /// Byte offset of the first token: a multiple of 16.
    const TOKENS: u32;

    /// Number of blocks of a cluster; 1: no cluster.
    const BLOCKS: u32 = Self::V / Self::TILE;
    const Q: u32 = Self::K * 4;
    const SLOT: u32 = 2 * Self::Q;
    const TOKEN_BYTES: u32 = Self::SLOT + 16;
    const FACTORS: u32 = Self::TILE * 4;
    const SUMS: u32 = Self::FACTORS + FACTOR_BYTES;
    /// Elements of o whose squares one word of the sums adds.
    const SEGMENT: u32 = if Self::TILE < 32 { Self::TILE } else { 32 };
    const HEAD_SUMS: u32 = Self::V / Self::SEGMENT;
    /// Bytes of a head with one decay.
    const HEAD_BYTES: u32 = (Self::SUMS + Self::HEAD_SUMS * 4).next_multiple_of(16);
    const DECAY: u32 = Self::HEAD_BYTES;
    /// Additional bytes of a head with one decay per key channel.
    const DECAY_BYTES: u32 = bytes_of_channels::<Self::Decays>(Self::Q);
    /// First byte after the mailboxes of a cluster.
    const BEHIND_MAIL: u32 = if Self::BLOCKS == 1 { 0 } else { mail::BYTES };

    /// Byte offset of channel `i` of k, q or α from channel 0 in shared memory.
    fn place(i: u32) -> u32;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn head_bytes(c: &StepConstants) -> u32 {
        if Self::Decays::per_channel(c) {
            Self::HEAD_BYTES + Self::DECAY_BYTES
        } else {
            Self::HEAD_BYTES
        }
    }

    /// Address of token `i` in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn token(c: &StepConstants, i: u32) -> u32 {
        let bytes = Self::TOKEN_BYTES + c.ratio * Self::head_bytes(c);
        dynamic_shared_mem() + Self::TOKENS + i * bytes
    }

    /// Address in shared memory of the block's `r`-th value head of token `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn head(c: &StepConstants, i: u32, r: u32) -> u32 {
        Self::token(c, i) + Self::TOKEN_BYTES + r * Self::head_bytes(c)
    }

    /// Opens the mailboxes of a cluster, and arrives at its barrier. Every thread of the block calls it.
    ///
    /// # Safety
    /// Nothing else has used shared memory before.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn arrive(c: &StepConstants) {
        if Self::BLOCKS > 1 {
            let (channels, sums) = (2 * Self::K * RowTokens::most(c), Self::HEAD_SUMS * c.tokens);
            // SAFETY: the mailboxes are at the start of the block's shared memory.
            unsafe { mail::open_and_arrive(c, channels, sums) };
        }
    }

    /// Waits until all blocks of the cluster have arrived.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn meet() {
        if Self::BLOCKS > 1 {
            cluster::wait();
        }
    }
}

/// The description of a kernel of such blocks, for states of `S`.
pub const fn description<W: Mtp, S: StateElement>(layout: Layout) -> Description {
    let family = Family::RECURRENT.in_layer();
    let computes = Computes::new(family, W::Decays::OF_CHANNELS, [W::K, W::V]);
    Description {
        tiles: W::BLOCKS,
        max_heads: 16,
        cluster: W::BLOCKS,
        shared_of_channels: Shared {
            per_token_of_head: W::DECAY_BYTES,
            ..Shared::NONE
        },
        shared: Shared {
            block: W::TOKENS,
            per_token: W::TOKEN_BYTES,
            per_token_of_head: W::HEAD_BYTES,
            ..Shared::NONE
        },
        ..Description::of(W::THREADS, computes.on(layout, S::ELEMENT))
    }
}

/// Number of elements of o whose z a thread has loaded or is loading.
const SCALES: usize = 4;
/// Largest number of sets of tokens that are convolved.
const SETS: usize = (Family::RECURRENT.max_tokens() as usize).div_ceil(HELD);

/// A block's part of a layer step, token by token: its row and the row's tokens.
pub struct LayerStep<'a> {
    pub c: &'a StepConstants,
    pub params: &'a LayerParams,
    pub row: Row,
    pub place: Place,
    /// The new tokens, of the block's first value head.
    pub new: Tokens,
    pub previous: Option<Tokens>,
    pub walk: RowTokens,
    /// Whether the row is active.
    pub live: bool,
}

impl<'a> LayerStep<'a> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &'a StepConstants, params: &'a LayerParams, row: Row) -> Self {
        let place = Place::load(c, params, row.b);
        let new = Tokens::new(c, &params.step, row);
        let previous = if c.previous_tokens != 0 {
            Some(Tokens::previous(c, &params.step, row))
        } else {
            None
        };
        let previous_live = match &previous {
            Some(previous) => previous.live,
            None => true,
        };
        Self {
            c,
            params,
            row,
            walk: RowTokens::new(row.b, previous.as_ref(), &new),
            live: place.live() && new.live && previous_live,
            place,
            new,
            previous,
        }
    }

    /// Loads channel `i` of the block's convolution; the thread's first channel is loaded before anything waits.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; if the row is live, nobody else writes the windows of the block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_drafts<W: Mtp>(&self, i: u32) -> Drafts {
        let (dims, tiles) = ([W::K, W::V], (W::BLOCKS, W::TILE));
        let part = Part::new(self.c, self.row, dims, tiles, i);
        Drafts::load(self.c, self.params, &self.place, &self.walk, part)
    }

    /// Stores zeros for o of tokens that belong to no row: see [`clear_rest`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn clear_rest<W: Mtp>(&self) {
        let (c, params, row) = (self.c, &self.params.step, self.row);
        let (turn, threads) = ((row.b, params.rows), (thread_idx_x(), W::THREADS));
        let at = |i: u32| {
            let hv = row.value_head(c, i / W::TILE);
            hv * c.o_head + row.tile * W::TILE + i % W::TILE
        };
        clear_rest(c, params, turn, threads, c.ratio * W::TILE, at);
    }

    /// For a row without tokens: copies the block's states and windows from the slot that the row reads to the slot that it
    /// writes. Every thread of the block calls it.
    ///
    /// # Safety
    /// As for [`Self::load_drafts`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn carry<W: Mtp, S: StateElement>(&self, v_last: bool) {
        if !self.live {
            return;
        }
        let (c, params, row, thread) = (self.c, self.params, self.row, thread_idx_x());
        let tile = Tile::new(v_last, [W::K, W::V], (row.tile * W::TILE, W::TILE));
        each!(r in 0..c.ratio => {
            let of = (row.value_head(c, r), tile);
            let slots = &self.place.slots;
            slots.carry::<S>(c, &params.step, of, (thread, W::THREADS));
        });
        if self.place.carries_window(c, params) {
            let mut i = thread;
            while i < 2 * (W::K / W::BLOCKS) + c.ratio * W::TILE {
                let drafts = self.load_drafts::<W>(i);
                drafts.carry(c, params, &self.place);
                i += W::THREADS;
            }
        }
    }

    /// Stores k, q and v of all tokens in shared memory, k and q in that of the whole cluster, and writes the windows; then waits
    /// for all of them. Every thread of the block calls it, with the `drafts` that it has loaded.
    ///
    /// # Safety
    /// As for [`Self::load_drafts`]; the row is live, and the cluster's blocks have met.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn give<W: Mtp>(&self, mut drafts: Drafts) {
        let (c, params, place, walk) = (self.c, self.params, &self.place, &self.walk);
        if c.taps == 0 {
            self.give_qkv::<W>();
            sync_threads();
            return;
        }
        let channels = 2 * (W::K / W::BLOCKS) + c.ratio * W::TILE;
        let mut i = thread_idx_x();
        loop {
            if drafts.part.is_there {
                drafts.convolve::<SETS>(c, params, place, walk, |part, which, t, is_there, y| {
                    // A separate place for each token, because the mailbox counts all of them.
                    let i = match which {
                        Which::Previous if is_there => t,
                        Which::Previous => c.tokens + t,
                        Which::New => walk.kept + t,
                    };
                    give::<W>(c, part, i, y);
                });
            }
            i += W::THREADS;
            if i >= channels {
                break;
            }
            drafts = self.load_drafts::<W>(i);
        }
        sync_threads(); // for v
        if W::BLOCKS > 1 {
            cluster::wait_mailbox(mail::of_channels());
        }
    }

    /// Stores the given q, k and v, for the launch's largest number of tokens, previous and new.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn give_qkv<W: Mtp>(&self) {
        let (c, thread) = (self.c, thread_idx_x());
        let give = |run: Run, t: u32, from: u32, address: u32| {
            let [value] = load_one(run.at(t, from), run.element()).to_f32(run.element());
            store_shared_b32(address, value.to_bits());
        };
        let mut n = thread;
        while n < RowTokens::most(c) * W::K {
            let (i, channel) = (n / W::K, n % W::K);
            let (tokens, t) = self.token(i);
            let smem = W::token(c, i) + W::place(channel);
            give(tokens.k, t, channel, smem);
            give(tokens.q, t, channel, smem + W::Q);
            n += W::THREADS;
        }
        n = thread;
        while n < RowTokens::most(c) * c.ratio * W::TILE {
            let (i, r, v) = place_of::<W>(c, n);
            let (tokens, t) = self.token(i);
            let row = self.row.with_head(c, r);
            let tokens = tokens.with_head(c, &self.params.step, row);
            let from = self.row.tile * W::TILE + v;
            give(tokens.v, t, from, W::head(c, i, r) + v * 4);
            n += W::THREADS;
        }
    }

    /// The tokens (previous or new) that include token `i` of shared memory, and its index in them. A missing token is replaced
    /// by the nearest one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn token(&self, i: u32) -> (Tokens, u32) {
        // Copies, because a value selected by reference would stay in memory.
        let mut tokens = self.new;
        let mut t = i;
        if let Some(previous) = self.previous
            && (i < self.walk.kept || self.new.count == 0)
        {
            tokens = previous;
        } else {
            t -= self.walk.kept;
        }
        (tokens, tokens.nearest(t))
    }

    /// Whether the norms of any of the first `tokens` prepared tokens overflow: the same for all threads of the block. Called
    /// after the barrier that ends the preparation.
    ///
    /// # Safety
    /// The tokens are prepared.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn overflow<W: Mtp>(&self, tokens: u32) -> bool {
        let c = self.c;
        let made = c.taps != 0;
        if c.l2norm == 0 || !made && !may_overflow(true, [c.k_element, c.q_element]) {
            return false;
        }
        // One token per lane.
        let mut overflow = false;
        let mut i = lane_id();
        while i < tokens {
            let factors = load_key_and_query(W::head(c, i, 0) + W::FACTORS);
            overflow |= factors[0] == 0.0 || factors[1] == 0.0;
            i += 32;
        }
        any_large(overflow)
    }

    /// Replaces the factors of prepared token `i` for all heads of the block, with these norms. One lane calls it.
    ///
    /// # Safety
    /// The token is prepared, and only this lane writes its factors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_norms<W: Mtp>(&self, i: u32, norms: [f32; 3]) {
        let c = self.c;
        each!(r in 0..c.ratio => {
            let smem = W::head(c, i, r) + W::FACTORS;
            let of_gates = load_factors(smem, W::Decays::per_channel(c));
            let gates = (of_gates.decay, of_gates.beta);
            let scale = f32::from_bits(c.scale);
            store_factors(smem, Factors::new(c.l2norm != 0, scale, norms, gates));
        });
    }

    /// z and weight for element `n` of o; loaded before anything waits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_scale<W: Mtp>(&self, n: u32) -> Scale {
        let c = self.c;
        if c.tokens != 0 && self.new.count == 0 {
            return Scale::NONE;
        }
        let (t, r, v) = place_of::<W>(c, n);
        let t = self.new.start + self.new.nearest(t);
        let row = self.row.with_head(c, r % c.ratio);
        let v = self.row.tile * W::TILE + v;
        Scale::load(c, self.params, row, (t, v))
    }

    /// Stores o of an inactive row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_zeros<W: Mtp>(&self) {
        let mut n = thread_idx_x();
        while n < self.walk.count * self.c.ratio * W::TILE {
            self.store::<W>(n, 0.0);
            n += W::THREADS;
        }
    }

    /// Stores element `n` of o.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store<W: Mtp>(&self, n: u32, o: f32) {
        let c = self.c;
        let (t, r, v) = place_of::<W>(c, n);
        let own = self.row.with_head(c, r);
        let tokens = self.new.with_head(c, &self.params.step, own);
        let address = tokens.o.at(t, self.row.tile * W::TILE + v);
        elements::store([o], address, c.o_element, false);
    }

    /// Norms o, if the step has a norm, and stores it. All threads of the block call it, with the result of [`Self::load_scale`]
    /// for their first element.
    ///
    /// # Safety
    /// o of every token and head is in the place of v.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn finish<W: Mtp>(&self, first: Scale) {
        let (c, thread) = (self.c, thread_idx_x());
        let count = c.tokens * c.ratio * W::TILE;
        let kept = self.walk.kept;
        let mut scales = [first; SCALES];
        let mut ahead = 1;
        while ahead < SCALES {
            let n = thread + ahead as u32 * W::THREADS;
            if n < count {
                scales[ahead] = self.load_scale::<W>(n);
            }
            ahead += 1;
        }
        let o = |n: u32| {
            let (t, r, v) = place_of::<W>(c, n);
            f32::from_bits(load_shared_b32(W::head(c, kept + t, r) + v * 4))
        };
        sync_threads();
        if c.has_norm != 0 {
            let mut n = thread;
            while n - lane_id() < count {
                let mut value = 0.0;
                if n < count {
                    value = o(n);
                }
                let sum = sum_of_neighbours(value, W::SEGMENT);
                let (t, r, v) = place_of::<W>(c, n);
                let segment = (self.row.tile * W::TILE + v) / W::SEGMENT;
                let address = W::head(c, kept + t, r) + W::SUMS + segment * 4;
                let rank = lane_id() % W::SEGMENT;
                if n < count && W::BLOCKS > 1 && rank < W::BLOCKS {
                    cluster::send_b32(address, rank, sum.to_bits(), mail::of_sums());
                }
                if n < count && W::BLOCKS == 1 && rank == 0 {
                    store_shared_b32(address, sum.to_bits());
                }
                n += W::THREADS;
            }
            if W::BLOCKS > 1 {
                cluster::wait_mailbox(mail::of_sums());
            } else {
                sync_threads();
            }
        }
        let mut n = thread;
        while n < self.walk.count * c.ratio * W::TILE {
            let value = o(n);
            let mut normed = value;
            if c.has_norm != 0 {
                let (t, r, _) = place_of::<W>(c, n);
                let squares = sum_of(W::head(c, kept + t, r) + W::SUMS, W::HEAD_SUMS);
                normed = scales[0].apply(c, value, squares, W::V);
                let mut ahead = 1;
                while ahead < SCALES {
                    scales[ahead - 1] = scales[ahead];
                    ahead += 1;
                }
                let next = n + SCALES as u32 * W::THREADS;
                if next < count {
                    scales[SCALES - 1] = self.load_scale::<W>(next);
                }
            }
            self.store::<W>(n, normed);
            n += W::THREADS;
        }
    }
}

/// Token, head of the block, and index in its tile of the `n`-th element of v or o.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn place_of<W: Mtp>(c: &StepConstants, n: u32) -> (u32, u32, u32) {
    let (of_head, v) = (n / W::TILE, n % W::TILE);
    (of_head / c.ratio, of_head % c.ratio, v)
}

/// Stores a convolved channel of token `i` in its place: for k and q, in every block of the cluster.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn give<W: Mtp>(c: &StepConstants, part: &Part, i: u32, y: f32) {
    let address = match part.of {
        Qkv::Value => {
            let (r, v) = (part.own / W::TILE, part.own % W::TILE);
            W::head(c, i, r) + v * 4
        }
        Qkv::Key => W::token(c, i) + W::place(part.own),
        Qkv::Query => W::token(c, i) + W::Q + W::place(part.own),
    };
    if W::BLOCKS == 1 || part.of == Qkv::Value {
        store_shared_b32(address, y.to_bits());
        return;
    }
    each!(rank in 0..W::BLOCKS => {
        cluster::send_b32(address, rank, y.to_bits(), mail::of_channels());
    });
}
