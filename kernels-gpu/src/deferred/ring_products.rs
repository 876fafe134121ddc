//! Pending tokens on the tensor cores: copies them from the ring to shared memory, adds them to products and states, and stores
//! the new tokens in the ring.

use super::parallel::of_operand;
use crate::constants::Element;
use crate::device::float::exp2;
use crate::device::global::load_b32;
use crate::device::shared::{
    copy_async_b128, copy_async_commit, copy_async_wait, load_shared_b32, load_shared_b128,
    store_shared_b32, store_shared_b64, store_shared_b128,
};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_idx};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load, store};
use crate::math::gate;
use crate::pending::{MAX_PENDING_DRAFTS, Ring};
use crate::recurrent::parallel::channels::DecayInputs;
use crate::recurrent::parallel::fragments::{
    Fragment, Split, SplitMatrix, Tokens8, store_channels,
};
use crate::recurrent::parallel::gates::LOWEST;
use crate::recurrent::parallel::inputs::{Inputs, RawTokens};
use crate::recurrent::parallel::map::{Block, Map, Operand, Set, TOKENS};
use crate::recurrent::parallel::solver::{MOST_FRAGMENTS, sum};
use crate::recurrent::parallel::state::Decays;
use crate::recurrent::parallel::worker::{Products, Worker, load_value};
use crate::state::{B16, Head};
use crate::step::StepConstants;

const F32: u32 = Element::F32 as u32;
const F32_BYTES: u32 = bytes_of(F32);

/// GDN: log α of pending token `lane_id()`, as in the ring.
pub struct RawLogDecay(u32);

impl RawLogDecay {
    /// Loads log α of the first `len` pending tokens; 0 in other lanes, and with KDA, which has one for each channel.
    ///
    /// # Safety
    /// The ring is live, unless `len` is 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<B: Block>(ring: Ring, len: u32) -> Self {
        if !B::PER_CHANNEL && lane_id() < len {
            Self(load_b32(ring.decay(lane_id(), 1)))
        } else {
            Self(0)
        }
    }
}

/// GDN: log₂ of the decays of the pending tokens' updates and of the state; 0 with KDA.
pub struct LogDecays {
    /// Sum of log₂ α over the pending tokens after token `lane_id()`.
    behind: f32,
    /// Sum of log₂ α over all pending tokens.
    all: f32,
}

impl LogDecays {
    /// Sums log α over the pending tokens after each. All lanes of the warp call it, each with its own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new<B: Block>(RawLogDecay(raw): RawLogDecay) -> Self {
        if B::PER_CHANNEL {
            return Self {
                behind: 0.0,
                all: 0.0,
            };
        }
        let lane = lane_id();
        let decay = f32::from_bits(raw) * core::f32::consts::LOG2_E;
        let mut sum = if decay < LOWEST { LOWEST } else { decay };
        let mut distance = 1;
        while distance < MAX_PENDING_DRAFTS {
            let later = warp_shuffle_idx(sum, (lane + distance) % 32);
            sum = if lane + distance < MAX_PENDING_DRAFTS {
                sum + later
            } else {
                sum
            };
            distance *= 2;
        }
        let behind = warp_shuffle_idx(sum, (lane + 1) % 32);
        Self {
            behind: if lane + 1 < MAX_PENDING_DRAFTS {
                behind
            } else {
                0.0
            },
            all: warp_shuffle_idx(sum, 0),
        }
    }

    /// Γ, the decay of the state by all pending tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn kept(&self) -> f32 {
        exp2(self.all)
    }

    /// e^g of pending tokens 8 `half` + 2c and the next. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_columns(&self, half: u32) -> [f32; 2] {
        let first = TOKENS * half + lane_id() % 4 * 2;
        [first, first + 1].map(|j| exp2(warp_shuffle_idx(self.behind, j)))
    }
}

/// (3) Stores a and b of the 8 pending tokens from 8 `half` on, for the new tokens with these keys and queries, in shared memory.
/// All lanes of the warp call it.
///
/// # Safety
/// The new and the pending tokens are in shared memory, and only this warp writes these weights.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn weigh<B: Block>(
    half: u32,
    [keys, queries]: [Tokens8; 2],
    pending: Tokens8,
    log_decays: &LogDecays,
) {
    // One sum per fragment: several short dependency chains instead of a long one.
    let mut sums = [[0.0; 4]; MOST_FRAGMENTS];
    each!(fragment in 0..(B::K / 32) as usize => {
        let (keys, queries) = (keys.fragment(fragment), queries.fragment(fragment));
        sums[fragment] = pending.fragment(fragment).gram(sums[fragment], keys, queries);
        if B::PER_CHANNEL {
            // A load fence (docs/compiler.md): a fragment has two parts.
            sync_warp(FULL_MASK);
        }
    });
    let mut sum = sum(sums);
    if !B::PER_CHANNEL {
        let [x, y] = log_decays.of_columns(half);
        sum = [x * sum[0], y * sum[1], x * sum[2], y * sum[3]];
    }
    let [a, b, c, d] = sum.map(f32::to_bits);
    let place = 8 * lane_id();
    store_shared_b64(Map::<B>::weights(half, false) + place, [a, b]);
    store_shared_b64(Map::<B>::weights(half, true) + place, [c, d]);
}

/// Number of runs of 8 of `len` pending tokens; 1 if there are none.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn halves(len: u32) -> u32 {
    if len > TOKENS { 2 } else { 1 }
}

/// (6): operands of a flush, which adds pending tokens to a state.
pub struct Flush<const TILES16: usize> {
    /// u as left factors of the products with k, of the first 8 tokens and of the later ones.
    steps: [[Split; TILES16]; 2],
    keys: [Tokens8; 2],
    decays: Decays,
    /// Whether there are more than 8 tokens.
    later: bool,
}

impl<const TILES16: usize> Flush<TILES16> {
    /// Loads u of the pending tokens as left factors of the products with their keys. With GDN u is multiplied by its decay;
    /// KDA's keys are already decayed in shared memory. All lanes of the warp call it.
    ///
    /// # Safety
    /// The copies of u to this warp's shared memory have been started.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn new<B: Block<State = B16>>(
        worker: &Worker<B, TILES16>,
        (ring, len): (Ring, u32),
        keys: [Tokens8; 2],
        log_decays: &LogDecays,
    ) -> Self {
        let mut steps = [[Split::ZERO; TILES16]; 2];
        copy_async_wait::<1>();
        sync_warp(FULL_MASK);
        let mut half = 0;
        while half < 2 && half < halves(len) {
            let weights = log_decays.of_columns(half);
            each!(tile in 0..TILES16 => {
                let [a, b, c, d] = worker.updates(ring, tile, half);
                let [x, y] = if B::PER_CHANNEL { [1.0; 2] } else { weights };
                steps[half as usize][tile] = Split::new([x * a, y * b, x * c, y * d]);
            });
            half += 1;
        }
        Self {
            steps,
            keys,
            decays: if B::PER_CHANNEL {
                Decays::Channels(Map::<B>::kept())
            } else {
                Decays::Head(log_decays.kept())
            },
            later: halves(len) == 2,
        }
    }

    /// Fragment `fragment` of `tile` of the flushed state; `state` is the fragment before.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn fragment(&self, tile: usize, fragment: usize, state: Fragment) -> Fragment {
        let decays = self.decays.of_fragment::<B16>(fragment);
        let first = (self.steps[0][tile], self.keys[0].channels(fragment));
        if self.later {
            let later = (self.steps[1][tile], self.keys[1].channels(fragment));
            Split::flush(state, decays, [first, later])
        } else {
            Split::flush(state, decays, [first])
        }
    }
}

impl<B: Block<State = B16>, const TILES16: usize> Worker<B, TILES16> {
    /// Loads this lane's channels of the keys in the ring, for the pending tokens of `operand` among the first `len`;
    /// [`Self::token`] gives the token of each turn.
    ///
    /// # Safety
    /// The ring is live, unless `len` is 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_pending_keys(
        &self,
        c: &StepConstants,
        ring: Ring,
        operand: Operand,
        len: u32,
    ) -> RawTokens {
        let RawTokens(mut raw) = RawTokens::NONE;
        let channel = lane_id() % Self::LANES * 8;
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            if t < of_operand(operand, len) {
                let address = ring.key(first_of(operand) + t);
                let address = address + (channel * bytes_of(c.keys_element)) as u64;
                raw[turn] = load(address, c.keys_element, true);
            }
        });
        RawTokens(raw)
    }

    /// Starts copying u of the `len` pending tokens to shared memory, for the warp's rows, and with KDA the block's part of their
    /// log decays. u is zeros for the missing tokens of the last run of 8.
    ///
    /// # Safety
    /// The ring is live, unless `len` is 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn copy_pending(&self, ring: Ring, len: u32) {
        let bytes = bytes_of(ring.update_element());
        let of_chunk = 16 / bytes;
        let chunks = B::ROWS / of_chunk;
        let mut i = lane_id();
        while i < halves(len) * TOKENS * chunks {
            let (j, row) = (i / chunks, i % chunks * of_chunk);
            let place = Map::<B>::update(self.warp, j, row, bytes);
            // SAFETY: the caller's promise; the warp reads them after it has waited.
            unsafe {
                if j < len {
                    copy_async_b128(place, ring.update(j, B::V, self.first + row));
                } else {
                    store_shared_b128(place, [0; 4]);
                }
            }
            i += 32;
        }
        if B::PER_CHANNEL {
            let chunks = B::K / 4;
            let mut i = thread_idx_x();
            while i < len * chunks {
                let (j, channel) = (i / chunks, i % chunks * 4);
                let from = ring.decay(j, B::K) + 4 * channel as u64;
                // SAFETY: the caller's promise; the workers read them after waiting and a barrier.
                unsafe { copy_async_b128(Map::<B>::log_decays(j) + 4 * channel, from) };
                i += 32 * B::WARPS;
            }
        }
        copy_async_commit();
    }

    /// KDA: replaces log α of each of the `len` pending tokens by the decay over the tokens after it, and stores Γ, the decay of
    /// a state over all of them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn decay_channels(len: u32) {
        let mut channel = thread_idx_x();
        while channel < B::K {
            let (mut behind, mut j) = (0.0, len);
            // SAFETY: the caller's promise; each channel belongs to one thread.
            unsafe {
                while j > 0 {
                    j -= 1;
                    let place = Map::<B>::log_decays(j) + 4 * channel;
                    let log_decay = f32::from_bits(load_shared_b32(place));
                    store_shared_b32(place, gate::exp(behind).to_bits());
                    behind += log_decay;
                }
                store_shared_b32(Map::<B>::kept() + 4 * channel, gate::exp(behind).to_bits());
            }
            channel += 32 * B::WARPS;
        }
    }

    /// KDA: the keys in f32, decayed over the tokens after them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn decay_keys(
        &self,
        c: &StepConstants,
        operand: Operand,
        RawTokens(mut raw): RawTokens,
        len: u32,
    ) -> RawTokens {
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            if t < of_operand(operand, len) {
                let decays = Map::<B>::log_decays(first_of(operand) + t);
                let decays = decays + lane_id() % Self::LANES * 32;
                let decays = load_8(decays);
                let mut key = raw[turn].to_f32(c.keys_element);
                each!(i in 0..8 => key[i] *= decays[i]);
                raw[turn] = Raw(key.map(f32::to_bits));
            }
        });
        RawTokens(raw)
    }

    /// Stores the keys of the pending tokens of `operand` among the first `len`, and zeros for missing tokens.
    ///
    /// # Safety
    /// Only the workers write the operand now.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_pending_keys(
        &self,
        operand: Operand,
        (raw, element): (RawTokens, u32),
        len: u32,
    ) {
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            let (address, low) = (Self::channels_place(operand, t), Map::<B>::LOW);
            // SAFETY: the caller's promise; each word has one writer.
            unsafe {
                if t < of_operand(operand, len) {
                    store_channels::<B>(raw.0[turn], element, address, low);
                } else if t < TOKENS {
                    store_channels::<B>(Raw([0; 8]), element, address, low);
                }
            }
        });
    }

    /// u of this lane's rows r and r + 8 of a tile, for pending tokens 8 `half` + 2c and the next.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn updates(&self, ring: Ring, tile: usize, half: u32) -> [f32; 4] {
        let element = ring.update_element();
        let mut updates = [0.0; 4];
        each!(i in 0..4 => {
            let j = TOKENS * half + lane_id() % 4 * 2 + i as u32 % 2;
            let row = 16 * tile as u32 + 8 * (i as u32 / 2) + lane_id() / 4;
            let place = Map::<B>::update(self.warp, j, row, bytes_of(element));
            updates[i] = load_value(place, element);
        });
        updates
    }

    /// (4): adds Σ_j a_j u_j and Σ_j b_j u_j of the pending tokens to products of the state.
    ///
    /// # Safety
    /// u and the weights that [`weigh`] stores are in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn add_pending(&self, ring: Ring, len: u32, [sk, sq]: [&mut Products<TILES16>; 2]) {
        let mut half = 0;
        while half < 2 && half < halves(len) {
            let [of_keys, of_queries] = [false, true]
                .map(|of_queries| SplitMatrix::load(Map::<B>::weights(half, of_queries), 1.0));
            each!(tile in 0..TILES16 => {
                let updates = Split::new(self.updates(ring, tile, half));
                sk[tile] = updates.times(sk[tile], of_keys);
                sq[tile] = updates.times(sq[tile], of_queries);
            });
            half += 1;
        }
    }

    /// (5): computes u of the new tokens, in f32, in place of the pending tokens' u. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn make_updates(&self, residuals: &[Split; TILES16]) {
        let solution = Map::<B>::solution(Set::New);
        // SAFETY: the caller's promise; u is overwritten once every lane has read the pending tokens' u.
        unsafe {
            let factor = load_shared_b32(solution.step_factors() + 4 * (lane_id() / 4));
            let deltas = SplitMatrix::load(solution.delta(), f32::from_bits(factor));
            sync_warp(FULL_MASK);
            each!(tile in 0..TILES16 => {
                let updates = residuals[tile].times([0.0; 4], deltas);
                each!(i in 0..4 => {
                    let (t, row) = Self::place_of(tile, i);
                    store_shared_b32(
                        Map::<B>::update(self.warp, t, row, F32_BYTES),
                        updates[i].to_bits(),
                    );
                });
            });
        }
    }

    /// Stores u of the `count` new tokens in the entries after the `len` pending ones. [`Self::make_updates`] has computed u, and
    /// the warp has been synchronised since.
    ///
    /// # Safety
    /// The ring is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave_updates(&self, (ring, len): (Ring, u32), count: u32) {
        let (t, row) = self.value_place();
        if t < count {
            // SAFETY: the caller's promise; no pending token has this entry.
            unsafe {
                let updates = load_8(Map::<B>::update(self.warp, t, row, F32_BYTES));
                let address = ring.update(len + t, B::V, self.first + row);
                store(updates, address, ring.update_element(), true);
            }
        }
    }

    /// Stores the new tokens' keys in the entries after the `len` pending ones.
    ///
    /// # Safety
    /// The ring is live, and only this block writes the keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave_keys(&self, c: &StepConstants, (ring, len): (Ring, u32), inputs: &Inputs) {
        let channel = lane_id() % Self::LANES * 8;
        each!(turn in 0..Self::TURNS => {
            let t = self.token(Operand::Key, turn);
            if t < inputs.count {
                let address = ring.key(len + t) + (channel * bytes_of(c.keys_element)) as u64;
                let key = inputs.keys.0[turn].to_f32(c.k_element);
                // SAFETY: the caller's promise; no pending token has this entry.
                unsafe { store(key, address, c.keys_element, true) };
            }
        });
    }

    /// KDA: stores the new tokens' log α in the entries after the `len` pending ones.
    ///
    /// # Safety
    /// The ring is live, and only this block writes these numbers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave_log_decays(
        &self,
        c: &StepConstants,
        (ring, len): (Ring, u32),
        inputs: &Inputs,
        decay_inputs: &DecayInputs,
    ) {
        let channel = lane_id() % Self::LANES * 8;
        each!(turn in 0..Self::TURNS => {
            let t = self.token(Operand::Key, turn);
            if t < inputs.count {
                let address = ring.decay(len + t, B::K) + 4 * channel as u64;
                let log_decays = decay_inputs.log_decays(c, inputs.gates.0[turn]);
                // SAFETY: the caller's promise; no pending token has this entry.
                unsafe { store(log_decays, address, F32, true) };
            }
        });
    }

    /// Stores S₀, flushed if `flush` is given, in global memory, and the rounded values in shared memory.
    ///
    /// # Safety
    /// The head is a live state, and the copy of S₀ to shared memory has been started.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_flushed(&self, flush: &Option<Flush<TILES16>>, head: Head) {
        Self::wait_for_state();
        each!(fragment in 0..Self::FRAGMENTS => {
            each!(tile in 0..TILES16 => {
                let next = self.flushed_fragment(flush, tile, fragment);
                self.store_fragment(head, tile, fragment, next);
            });
        });
    }

    /// Flushes one fragment, and stores it in shared memory.
    ///
    /// # Safety
    /// As for [`Self::store_flushed`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn flushed_fragment(
        &self,
        flush: &Option<Flush<TILES16>>,
        tile: usize,
        fragment: usize,
    ) -> Fragment {
        // SAFETY: the caller's promise; a lane reads only what it has stored itself.
        unsafe {
            let state = self.state(tile, fragment);
            let Some(flush) = flush else {
                return state;
            };
            let next = flush.fragment(tile, fragment, state);
            self.leave_fragment(tile, fragment, next);
            next
        }
    }
}

/// First pending token of an operand.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn first_of(operand: Operand) -> u32 {
    match operand {
        Operand::LaterPendingKey => TOKENS,
        _ => 0,
    }
}

/// Loads 8 f32 from shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load_8(address: u32) -> [f32; 8] {
    let [[a, b, c, d], [e, f, g, h]] = [load_shared_b128(address), load_shared_b128(address + 16)];
    [a, b, c, d, e, f, g, h].map(f32::from_bits)
}
