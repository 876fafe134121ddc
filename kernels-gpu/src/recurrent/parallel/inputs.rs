//! Tokens and values from global to shared memory, and o from shared to global memory.
//!
//! Inputs are loaded without conversion; conversion follows after all copies of the state have been issued: docs/compiler.md,
//! Loads first.

use super::fragments::{store_channels, store_f16_channels};
use super::map::{Block, Map, Operand, Set, TOKENS, TeamOperand};
use super::worker::Worker;
use super::{Around, RowStep};
use crate::constants::Element;
use crate::device::float::rsqrt;
use crate::device::shared::{
    load_shared_b32, load_shared_b128, store_shared_b32, store_shared_b128,
};
use crate::device::unknown;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_ballot};
use crate::math::each::each;
use crate::math::elements::{self, Raw, bytes_of, load};
use crate::math::reduce::{butterfly_sum, butterfly_sum_small, dot};
use crate::math::{power, range};
use crate::recurrent::tokens::{Run, Tokens};
use crate::step::StepConstants;

/// Maximum number of turns in which a warp loads 8 tokens of an operand: with one warp and K = 128.
const MOST_TURNS: usize = 4;

/// Tokens of an operand in memory format: in each turn 8 channels of one token.
#[derive(Clone, Copy)]
pub struct RawTokens(pub [Raw<8>; MOST_TURNS]);

impl RawTokens {
    /// No tokens.
    pub const NONE: Self = Self([Raw([0; 8]); MOST_TURNS]);
}

/// Tokens of a set in memory format.
#[derive(Clone, Copy)]
pub struct Inputs {
    pub keys: RawTokens,
    /// Zeros for previous tokens, which have no q.
    pub queries: RawTokens,
    /// KDA: the gate of every channel, loaded by the lanes of the keys. The solver loads GDN's gates.
    pub gates: RawTokens,
    pub values: RawValues,
    /// Tokens of the set.
    pub count: u32,
}

impl Inputs {
    /// No tokens.
    pub const NONE: Self = Self {
        keys: RawTokens::NONE,
        queries: RawTokens::NONE,
        gates: RawTokens::NONE,
        values: RawValues(Raw([0; 8])),
        count: 0,
    };
}

/// 8 rows of S of one token's v, in memory format.
#[derive(Clone, Copy)]
pub struct RawValues(Raw<8>);

/// Shared-memory address of a lane's 8 channels of a token: 8 words of f32, or 4 words of bf16 and 4 of their low parts.
#[derive(Clone, Copy)]
struct StoredToken {
    first: u32,
    low: u32,
}

impl StoredToken {
    /// The address for token `t` of `operand`. Previous keys that a convolution has `made` have a place of their own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of<B: Block, const TILES16: usize>(operand: Operand, t: u32, made: bool) -> Self {
        let lane = lane_id() % Worker::<B, TILES16>::LANES;
        if B::PER_CHANNEL {
            let from = match operand {
                Operand::Query | Operand::LaterQuery => TeamOperand::Query,
                Operand::PreviousKey if made => TeamOperand::PreviousKey,
                _ => TeamOperand::Key,
            };
            Self {
                first: Map::<B>::team_operand(from, t) + lane * 16,
                low: 2 * B::K,
            }
        } else {
            Self {
                first: Worker::<B, TILES16>::channels_place(operand, t),
                low: Map::<B>::LOW,
            }
        }
    }

    /// Address of the `i`-th word.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn at<B: Block>(&self, i: u32) -> u32 {
        let word = if B::PER_CHANNEL {
            i % 4 * 4
        } else {
            Map::<B>::word(i % 4)
        };
        self.first + word + i / 4 * self.low
    }
}

impl<B: Block, const TILES16: usize> Worker<B, TILES16> {
    /// Lanes that share a token of an operand.
    pub const LANES: u32 = B::K / 8;
    /// Warps that load 8 tokens of an operand in one turn.
    const LOADERS: u32 = B::K / 32;
    pub const TURNS: usize = Self::LOADERS.div_ceil(B::WARPS) as usize;
    /// Whether each warp has tokens to load in every turn.
    const ALL_LOAD: bool = Self::LOADERS.is_multiple_of(B::WARPS);
    /// Format of stored tokens: f32 for KDA's teams, split form for GDN.
    const STORED: Element = if B::PER_CHANNEL {
        Element::F32
    } else {
        Element::Bf16
    };
    /// Lanes that share one token's v of the warp's rows.
    pub const VALUE_LANES: u32 = B::ROWS / 8;

    /// The token of `operand` that this lane loads in `turn`; 8 or more: none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn token(&self, operand: Operand, turn: usize) -> u32 {
        let shift = operand as u32 * Self::LOADERS % B::WARPS;
        let warp = (self.warp + B::WARPS - shift) % B::WARPS + turn as u32 * B::WARPS;
        warp * (32 / Self::LANES) + lane_id() / Self::LANES
    }

    /// Loads the tokens of a set; k, q and v are skipped if a convolution has `made` them. Reads nothing of tokens past the first
    /// `there`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_inputs(&self, set: Set, tokens: &Tokens, there: u32, made: bool) -> Inputs {
        let of_qkv = if made { 0 } else { there };
        let of_queries = if tokens.are_new() { of_qkv } else { 0 };
        Inputs {
            keys: self.load_tokens(set.key(), tokens.k, of_qkv),
            queries: match set {
                Set::New | Set::Later => self.load_tokens(set.query(), tokens.q, of_queries),
                Set::Previous => RawTokens::NONE,
            },
            gates: if B::PER_CHANNEL {
                self.load_tokens(set.key(), tokens.g, there)
            } else {
                RawTokens::NONE
            },
            values: self.load_values(tokens.v, of_qkv),
            count: tokens.count,
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_tokens(&self, operand: Operand, run: Run, there: u32) -> RawTokens {
        let RawTokens(mut raw) = RawTokens::NONE;
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            if t < there {
                let address = run.at(t, lane_id() % Self::LANES * 8);
                raw[turn] = load(address, run.element(), self.wide_io);
            }
        });
        RawTokens(raw)
    }

    /// Brings k and q into a range where the sums of their squares are finite: see [`range`]. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn tame(c: &StepConstants, inputs: &mut Inputs) {
        let (key, query) = (c.k_element, c.q_element);
        if c.l2norm == 0 {
            return;
        }
        let mut is_large = false;
        each!(turn in 0..Self::TURNS => {
            is_large |= inputs.keys.0[turn].is_large(key) || inputs.queries.0[turn].is_large(query);
        });
        if range::any_large(is_large) {
            each!(turn in 0..Self::TURNS => {
                let (mut k, mut q) = ([inputs.keys.0[turn]], [inputs.queries.0[turn]]);
                range::tame_one(&mut k, key, Self::LANES);
                range::tame_one(&mut q, query, Self::LANES);
                [inputs.keys.0[turn]] = k;
                [inputs.queries.0[turn]] = q;
            });
        }
    }

    /// Whether tokens of `set` that this warp has stored have to be brought into [range](Self::tame_stored). All lanes of the
    /// warp call it.
    ///
    /// The test is on the stored words instead of the loaded ones: ptxas would move the comparison up, and the copies of the
    /// state would wait for k and q (docs/compiler.md, Loads first).
    ///
    /// # Safety
    /// The tokens are stored, and no other warp writes them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn are_wild(&self, c: &StepConstants, set: Set) -> bool {
        let (mut keys, mut queries) = (RawTokens::NONE, RawTokens::NONE);
        if !Self::may_be_wild(c, set) {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe {
            each!(turn in 0..Self::TURNS => {
                keys.0[turn] = self.load_stored(set.key(), turn);
                if set.has_queries() {
                    queries.0[turn] = self.load_stored(set.query(), turn);
                }
            });
        }
        let element = Self::STORED as u32;
        Self::any_large([(&keys, element), (&queries, element)])
    }

    /// [`Self::are_wild`] on the loaded tokens, where no copies can be delayed by the test.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn are_loaded_wild(c: &StepConstants, set: Set, inputs: &Inputs) -> bool {
        let (keys, queries) = (&inputs.keys, &inputs.queries);
        Self::may_be_wild(c, set) && Self::any_large([(keys, c.k_element), (queries, c.q_element)])
    }

    /// Whether the sum of squares of q or k is needed and may overflow f32.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn may_be_wild(c: &StepConstants, set: Set) -> bool {
        let q_element = if set.has_queries() {
            c.q_element
        } else {
            c.k_element
        };
        range::may_overflow(c.l2norm != 0, [c.k_element, q_element])
    }

    /// Whether any lane of the warp has a large channel. All lanes call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn any_large([(keys, of_keys), (queries, of_queries)]: [(&RawTokens, u32); 2]) -> bool {
        let mut is_large = false;
        each!(turn in 0..Self::TURNS => {
            is_large |= keys.0[turn].is_large(of_keys) | queries.0[turn].is_large(of_queries);
        });
        warp_ballot(is_large) != 0
    }

    /// The words that this lane has stored in `turn`; the high parts of split values.
    ///
    /// # Safety
    /// As for [`Self::are_wild`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_stored(&self, operand: Operand, turn: usize) -> Raw<8> {
        let t = self.token(operand, turn);
        let mut raw = Raw([0; 8]);
        if !Self::has_tokens(t) {
            return raw;
        }
        let place = StoredToken::of::<B, TILES16>(operand, t, false);
        if B::PER_CHANNEL {
            let [[a, b, c, d], [e, f, g, h]] = [0, 4].map(|i| load_shared_b128(place.at::<B>(i)));
            raw = Raw([a, b, c, d, e, f, g, h]);
        } else {
            each!(i in 0..4 => raw.0[i] = load_shared_b32(place.at::<B>(i as u32)));
        }
        raw
    }

    /// [`Self::tame`] on the tokens of `set` that this lane has stored. All lanes of the warp call it.
    ///
    /// # Safety
    /// As for [`Self::are_wild`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn tame_stored(&self, c: &StepConstants, set: Set) {
        // One copy of the code for k and q, because rare code is to be short.
        let operands = unknown(1 + set.has_queries() as u32);
        let turns = unknown(Self::TURNS as u32) as usize;
        each!(i in 0..operands => {
            let (operand, element) = match unknown(i) {
                0 => (set.key(), c.k_element),
                _ => (set.query(), c.q_element),
            };
            each!(turn in 0..turns => self.tame_turn(operand, turn, (false, element)));
        });
    }

    /// [`Self::tame`] on the results of a convolution in shared memory: k and q of the `new` tokens, k of the `previous` ones. A
    /// new key that changes is also rewritten wherever else it was stored. All lanes of the warp call it, between barriers of the
    /// workers.
    ///
    /// # Safety
    /// The tokens are stored, and the workers may write them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn tame_made<A: Around<B, TILES16>>(
        &self,
        step: &RowStep<'_, A>,
        [new, previous]: [bool; 2],
    ) {
        let turns = unknown(Self::TURNS as u32) as usize;
        let (first, end) = (if new { 0 } else { 2 }, if previous { 3 } else { 2 });
        let (mut i, end) = (unknown(first), unknown(end));
        while i < end {
            let operand = match unknown(i) {
                0 => Operand::Key,
                1 => Operand::Query,
                _ => Operand::PreviousKey,
            };
            each!(turn in 0..turns => {
                if let Some((t, power)) = self.tame_turn(operand, turn, (true, Element::F32 as u32))
                    && matches!(operand, Operand::Key)
                {
                    A::scale_key(step, (t, 8 * (lane_id() % Self::LANES)), power);
                }
            });
            i += 1;
        }
    }

    /// One turn of [`Self::tame_stored`] or, if `made`, of [`Self::tame_made`]. Returns this lane's token and its power of
    /// two if that is not 1.
    ///
    /// # Safety
    /// As for these functions.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn tame_turn(
        &self,
        operand: Operand,
        turn: usize,
        (made, of_tokens): (bool, u32),
    ) -> Option<(u32, f32)> {
        let t = self.token(operand, turn);
        if !Self::has_tokens(t) {
            return None;
        }
        let place = StoredToken::of::<B, TILES16>(operand, t, made);
        let element = Self::STORED as u32;
        // SAFETY: the caller's promise; each word has one reader, its writer.
        unsafe {
            // 8 words for f32; 4 for bf16, and 4 of low parts if the tokens have any.
            let words = if B::PER_CHANNEL || of_tokens != Element::Bf16 as u32 {
                8
            } else {
                4
            };
            let at = |i: u32| place.at::<B>(i);
            let (mut raw, mut rest) = (Raw([0; 8]), Raw([0; 8]));
            each!(i in 0..8 => {
                if i < words {
                    let word = load_shared_b32(at(i as u32));
                    if B::PER_CHANNEL || i < 4 {
                        raw.0[i] = word;
                    } else {
                        rest.0[i - 4] = word;
                    }
                }
            });
            if made && !range::any_large(raw.is_large(element)) {
                return None;
            }
            let (mut values, lacking) = (raw.to_f32(element), rest.to_f32(element));
            let mut i = 0;
            while i < 8 && !B::PER_CHANNEL {
                values[i] += lacking[i];
                i += 1;
            }
            let power = range::power_of(&[values], Self::LANES);
            (raw, rest) = (raw.times(power, element), rest.times(power, element));
            each!(i in 0..8 => {
                let word = if B::PER_CHANNEL || i < 4 {
                    raw.0[i]
                } else {
                    rest.0[i - 4]
                };
                if i < words {
                    store_shared_b32(at(i as u32), word);
                }
            });
            if power != 1.0 {
                return Some((t, power));
            }
        }
        None
    }

    /// Stores tokens of `operand`; zeros for tokens past the first `count`.
    ///
    /// # Safety
    /// Before the first barrier.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_tokens(
        &self,
        c: &StepConstants,
        operand: Operand,
        raw: RawTokens,
        count: u32,
    ) {
        let element = match operand {
            Operand::Query | Operand::LaterQuery => c.q_element,
            _ => c.k_element,
        };
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            let (address, low) = (Self::channels_place(operand, t), Map::<B>::LOW);
            // SAFETY: the caller's promise; each word has one writer. Two stores, because otherwise the selection would move up
            // to the loads of the tokens and wait for them there.
            unsafe {
                if self.state_f16 {
                    self.store_f16_tokens(c, operand, turn, (raw, element), count);
                } else if t < count {
                    store_channels::<B>(raw.0[turn], element, address, low);
                } else if t < 8 {
                    store_channels::<B>(Raw([0; 8]), element, address, low);
                }
            }
        });
    }

    /// Address of the first word of this lane's channels of token `t`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn channels_place(operand: Operand, t: u32) -> u32 {
        let lane = lane_id() % Self::LANES;
        Map::<B>::channels(Map::<B>::operand(operand) + t * Map::<B>::ROW, lane)
    }

    /// Whether the warp has tokens to store, from this lane's token `t`: uniform over the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_tokens(t: u32) -> bool {
        Self::ALL_LOAD || t - lane_id() / Self::LANES < TOKENS
    }

    /// One turn of [`Self::store_tokens`], as f16. All lanes of the warp call it.
    ///
    /// # Safety
    /// As for [`Self::store_tokens`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_f16_tokens(
        &self,
        c: &StepConstants,
        operand: Operand,
        turn: usize,
        (raw, element): (RawTokens, u32),
        count: u32,
    ) {
        let t = self.token(operand, turn);
        if Self::has_tokens(t) {
            let mut values = raw.0[turn].to_f32(element);
            if t >= count {
                values = [0.0; 8];
            }
            Self::store_f16_token(c, operand, t, values, element);
        }
    }

    /// Converts f32 tokens in shared memory, even channels in the place of high parts and odd channels in that of low parts, to
    /// the format of [`Self::store_tokens`]. All lanes of the warp call it.
    ///
    /// # Safety
    /// The tokens are stored, and the workers may write them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn make_f16_tokens(&self, c: &StepConstants, operand: Operand) {
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            if Self::has_tokens(t) {
                let address = Self::channels_place(operand, t);
                let mut values = [0.0; 8];
                let mut i = 0;
                // SAFETY: the caller's promise; each word has one reader, its writer.
                unsafe {
                    while i < 8 {
                        let part = i as u32 % 2 * Map::<B>::LOW;
                        let word = load_shared_b32(address + i as u32 / 2 * 16 + part);
                        values[i] = f32::from_bits(word);
                        i += 1;
                    }
                    Self::store_f16_token(c, operand, t, values, Element::F32 as u32);
                }
            }
        });
    }

    /// Stores this lane's channels of token `t`, scaled by a power of two, and the factor that compensates it. All lanes of the
    /// warp call it.
    ///
    /// # Safety
    /// The places are this lane's, and its token's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_f16_token(
        c: &StepConstants,
        operand: Operand,
        t: u32,
        values: [f32; 8],
        element: u32,
    ) {
        let mut values = values;
        let [mut square] = butterfly_sum([dot(values, values)], 1, Self::LANES);
        if range::overflow(c.l2norm != 0, [square, 0.0, 0.0]) {
            let powers = range::shrinking([square, 0.0, 0.0]);
            values = range::times(values, powers[0]);
            let own = butterfly_sum_small([dot(values, values)], Self::LANES);
            [square, _, _] = range::shrunk([own[0], 0.0, 0.0], powers);
        }
        let [power, mut lacks] = power::of_root(square);
        if c.l2norm != 0 {
            lacks *= rsqrt(square + 1e-6);
        }
        let values = values.map(|x| x * power);
        let address = Self::channels_place(operand, t);
        store_f16_channels(values, element, address, Map::<B>::LOW);
        if lane_id().is_multiple_of(Self::LANES) {
            store_shared_b32(Map::<B>::lacks(operand, t), lacks.to_bits());
        }
    }

    /// Token and first row, within the warp's rows, of the values that this lane loads and stores; token 8 or more: none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn value_place(&self) -> (u32, u32) {
        (
            lane_id() / Self::VALUE_LANES,
            lane_id() % Self::VALUE_LANES * 8,
        )
    }

    /// Reads nothing of tokens past the first `there`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_values(&self, run: Run, there: u32) -> RawValues {
        let (t, row) = self.value_place();
        RawValues(if t < there {
            load(run.at(t, self.first + row), run.element(), self.wide_io)
        } else {
            Raw([0; 8])
        })
    }

    /// Stores the values without conversion; zeros for absent tokens. All lanes of the warp call it.
    ///
    /// # Safety
    /// This warp may write the values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_values(&self, set: Set, inputs: &Inputs, element: u32) {
        let (t, row) = self.value_place();
        let address = self.value_address(set, t, row, element);
        // SAFETY: the caller's promise. Two stores: as for the tokens.
        unsafe {
            if t < inputs.count {
                store_raw(inputs.values.0, address, element);
            } else if t < 8 {
                store_raw(Raw([0; 8]), address, element);
            }
        }
        sync_warp(FULL_MASK);
    }

    /// Shared-memory address of the value of token `t` in the warp's row `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn value_address(&self, set: Set, t: u32, row: u32, element: u32) -> u32 {
        Map::<B>::values(set, self.warp) + t * Map::<B>::VALUE_ROW + row * bytes_of(element)
    }

    /// Stores the outputs of the first `count` tokens of `set`, which are in shared memory, in f32, in place of its values. All
    /// lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_outputs(&self, set: Set, run: Run, element: u32, count: u32) {
        sync_warp(FULL_MASK);
        let (t, row) = self.value_place();
        if t < count {
            let place = self.value_address(set, t, row, Element::F32 as u32);
            let [a, b, c, d] = load_shared_b128(place);
            let [e, f, g, h] = load_shared_b128(place + 16);
            let o = [a, b, c, d, e, f, g, h].map(f32::from_bits);
            elements::store(o, run.at(t, self.first + row), element, self.wide_io);
        }
    }

    /// Stores zeros as the outputs of the first `count` tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn zero_outputs(&self, run: Run, element: u32, count: u32) {
        let (t, row) = self.value_place();
        if t < count {
            let address = run.at(t, self.first + row);
            elements::store([0.0; 8], address, element, self.wide_io);
        }
    }
}

/// Stores 8 elements without conversion.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_raw(raw: Raw<8>, address: u32, element: u32) {
    let [a, b, c, d, e, f, g, h] = raw.0;
    store_shared_b128(address, [a, b, c, d]);
    if element == Element::F32 as u32 {
        store_shared_b128(address + 16, [e, f, g, h]);
    }
}
