//! Products of tokens with one decay per channel, for KDA.
//!
//! With Γ_t = α_1 ⊙ … ⊙ α_t, S₀ is multiplied by Γ_t ⊙ k_t and Γ_t ⊙ q_t. The products of tokens are those of k_t and q_t with p
//! = k_s ⊙ α_(s+1) ⊙ … ⊙ α_t, and S₀ is advanced along the last token's p. These are products of decays, never quotients or
//! exponentials of sums, so that no decay makes a NaN or loses the digits of another.
//!
//! A *team* of K/4 lanes, 4 channels each, computes two columns s of the products, one from each end, so that all teams have
//! equal work; the same pass yields the p of tokens s that advance the state.

use super::fragments::{split, store_words};
use super::inputs::{Inputs, RawTokens};
use super::map::{Block, Map, Operand, Set, TOKENS, TeamOperand};
use super::meeting;
use super::worker::Worker;
use super::{Around, RowStep};
use crate::constants::Element;
use crate::device::rarely;
use crate::device::shared::{
    load_shared_b128, store_shared_b32, store_shared_b64, store_shared_b128,
};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_idx};
use crate::math::each::each;
use crate::math::elements::{Raw, load};
use crate::math::power;
use crate::math::reduce::{butterfly_scatter, dot};
use crate::recurrent::gates::{RawGates, gate_row, load_a_log};
use crate::row::Row;
use crate::step::{StepConstants, StepParams};

/// A_log and dt_bias of this lane's 8 channels.
pub struct DecayInputs {
    a_log: f32,
    dt_bias: Raw<8>,
}

impl DecayInputs {
    /// log α of this lane's channels of a token; `g` is the gate in memory format.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn log_decays(&self, c: &StepConstants, g: Raw<8>) -> [f32; 8] {
        self.gates(g).log_values(c).0
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn gates(&self, g: Raw<8>) -> RawGates<8> {
        RawGates {
            g,
            b: Raw([0]),
            a_log: self.a_log,
            dt_bias: self.dt_bias,
        }
    }
}

impl<B: Block, const TILES16: usize> Worker<B, TILES16> {
    /// Lanes of a team.
    const TEAM: u32 = B::K / 4;
    const TEAMS: u32 = B::WARPS * 32 / Self::TEAM;

    /// Loads the gates' parameters in the lanes that load one of `most` tokens. Under a condition, because the assembler delays
    /// an unconditional load until after the tokens have arrived.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_decay_inputs(
        &self,
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        most: u32,
    ) -> DecayInputs {
        let (mut a_log, mut dt_bias) = (0.0, Raw([0; 8]));
        if self.token(Operand::Key, 0) < most {
            a_log = load_a_log(c, params, row);
            if c.has_dt_bias != 0 {
                let channel = lane_id() % Self::LANES * 8;
                let address = params.dt_bias + 4 * (gate_row(c, row) * B::K + channel) as u64;
                dt_bias = load(address, Element::F32 as u32, self.wide_io);
            }
        }
        DecayInputs { a_log, dt_bias }
    }

    /// Computes the operands and the products of the tokens of `set` and, if `advances`, the operand that advances the state;
    /// absent tokens are zeros without decay. Also stores the values, and hands the products to the solver. If a convolution has
    /// `made` k, q and v, they are in shared memory already. If the tokens are `late`, the second set of a pair or those after a
    /// deferred state's pending ones, the decay of the state before them is in shared memory after the first barrier.
    ///
    /// # Safety
    /// The workers may write all of these places.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn prepare<A: Around<B, TILES16>>(
        &self,
        step: &RowStep<'_, A>,
        set: Set,
        inputs: &Inputs,
        decay_inputs: &DecayInputs,
        (advances, made): (bool, bool),
        is_late: bool,
    ) {
        let c = &step.c;
        let decays = |g| decay_inputs.gates(g).values(c).0;
        let (key, count) = (set.key(), inputs.count);
        // SAFETY: the caller's promise; the barriers separate the writes from the reads.
        unsafe {
            let keys = |raw: Raw<8>| raw.to_f32(c.k_element);
            if !made {
                self.store_f32(TeamOperand::Key, key, inputs.keys, keys, 0.0, count);
            }
            if !made && set.has_queries() {
                let queries = |raw: Raw<8>| raw.to_f32(c.q_element);
                let raw = inputs.queries;
                self.store_f32(TeamOperand::Query, set.query(), raw, queries, 0.0, count);
            }
            self.store_f32(TeamOperand::Decay, key, inputs.gates, decays, 1.0, count);
            if !made {
                self.store_values(set, inputs, c.v_element);
            }
            // Tokens of deferred states have been brought into range already, because they are kept in a ring.
            if !B::WAITS && !made && self.are_wild(c, set) {
                rarely();
                self.tame_stored(c, set);
            }
            meeting::workers::<B>();
            if !B::WAITS && made && A::has_made_large(step) {
                rarely();
                self.tame_made(step, [set.has_queries(), !set.has_queries()]);
                meeting::workers::<B>();
            }
            let team = thread_idx_x() / Self::TEAM;
            let mut first = 0;
            while first < TOKENS / 2 {
                // No comparison where every team has a column: docs/compiler.md, Warps that stay together.
                if Self::TEAMS <= TOKENS / 2 || team < TOKENS / 2 {
                    self.columns(set, first + team, (advances, made), is_late);
                }
                first += Self::TEAMS;
            }
            meeting::workers::<B>();
            meeting::leave_tokens::<B>(set);
        }
    }

    /// Stores `values` of the tokens that this lane has loaded for `operand` as `to`; `absent` for tokens past `count`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_f32(
        &self,
        to: TeamOperand,
        operand: Operand,
        raw: RawTokens,
        values: impl Fn(Raw<8>) -> [f32; 8],
        absent: f32,
        count: u32,
    ) {
        each!(turn in 0..Self::TURNS => {
            let t = self.token(operand, turn);
            let place = Map::<B>::team_operand(to, t) + lane_id() % Self::LANES * 16;
            let store = |values: [f32; 8]| {
                let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
                // SAFETY: the caller's promise; each place has one writer.
                unsafe {
                    store_shared_b128(place, [a, b, c, d]);
                    store_shared_b128(place + 2 * B::K, [e, f, g, h]);
                }
            };
            if t < count {
                store(values(raw.0[turn]));
            } else if t < TOKENS {
                store([absent; 8]);
            }
        });
    }

    /// Computes columns `pair` and 7 − `pair` of the products, and tokens `pair` and 7 − `pair` of the operands. All lanes of the
    /// warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn columns(&self, set: Set, pair: u32, (advances, made): (bool, bool), is_late: bool) {
        let lane = thread_idx_x() % Self::TEAM;
        let is_new = set.has_queries();
        let keys = match set {
            Set::Previous if made => TeamOperand::PreviousKey,
            _ => TeamOperand::Key,
        };
        let load = |operand, t| {
            let place = Map::<B>::team_operand(operand, t) + 16 * lane;
            load_shared_b128(place).map(f32::from_bits)
        };
        let of_columns = [pair, 7 - pair];
        let mut sums = [0.0; 32];
        // p of each column, Γ of its token, and the running Γ.
        let (mut steps, mut decays, mut decay) = ([[0.0; 4]; 2], [[0.0; 4]; 2], [1.0; 4]);
        each!(t in 0..TOKENS as usize => {
            let k = load(keys, t as u32);
            let alpha = load(TeamOperand::Decay, t as u32);
            decay = product(decay, alpha);
            let q = if is_new {
                load(TeamOperand::Query, t as u32)
            } else {
                [0.0; 4]
            };
            // The column that may begin at this token: the first columns begin before token 4, the second ones from it on.
            let begins = t / 4;
            let mut side = 0;
            while side <= begins {
                steps[side] = product(steps[side], alpha);
                if side == begins && t as u32 == of_columns[side] {
                    (steps[side], decays[side]) = (k, decay);
                }
                sums[16 * side + t] = dot(k, steps[side]);
                if is_new {
                    sums[16 * side + 8 + t] = dot(q, steps[side]);
                }
                side += 1;
            }
        });
        // A load fence: docs/compiler.md.
        sync_warp(FULL_MASK);
        // Powers of two for Γ ⊙ k and Γ ⊙ q of each column.
        let mut powers = [[1.0; 2]; 2];
        if self.state_f16 {
            each!(side in 0..2 => {
                let k = product(decays[side], load(keys, of_columns[side]));
                sums[16 + side] = dot(k, k);
                if is_new {
                    let q = load(TeamOperand::Query, of_columns[side]);
                    sums[24 + side] = dot(q, q);
                    let q = product(decays[side], q);
                    sums[26 + side] = dot(q, q);
                }
            });
            sums = butterfly_scatter(sums, 1, Self::TEAM);
            each!(side in 0..2 => {
                powers[side] = [16, 26].map(|first| {
                    let [power, _] = power::of_root(Self::of_team(&sums, first + side));
                    power
                });
            });
        }
        // SAFETY: the caller's promise; each place has one writer.
        unsafe {
            each!(side in 0..2 => {
                let t = of_columns[side];
                let [of_key, of_query] = powers[side];
                let k = product(decays[side], load(keys, t));
                self.store_decayed(set.key(), t, lane, (k, of_key));
                if is_new {
                    let q = load(TeamOperand::Query, t);
                    if !self.state_f16 {
                        sums[24 + side] = dot(q, q);
                    }
                    let q = product(decays[side], q);
                    self.store_decayed(set.query(), t, lane, (q, of_query));
                    if is_late {
                        let kept = load_shared_b128(Map::<B>::kept() + 4 * Self::channel(lane));
                        let kept = kept.map(f32::from_bits);
                        Self::store_token(Operand::LateKey, t, lane, product(kept, k), false);
                        Self::store_token(Operand::LateQuery, t, lane, product(kept, q), false);
                    }
                }
                if advances {
                    let step = if is_late {
                        Operand::LateStep
                    } else {
                        Operand::Step
                    };
                    Self::store_token(step, t, lane, steps[side], false);
                }
            });
            if advances && pair == 0 {
                let kept = if is_late {
                    Map::<B>::kept_later()
                } else {
                    Map::<B>::kept()
                };
                let place = kept + 4 * Self::channel(lane);
                store_shared_b128(place, decays[1].map(f32::to_bits));
            }
            if !self.state_f16 {
                sums = butterfly_scatter(sums, 1, Self::TEAM);
            }
            let sums = sums.map(f32::to_bits);
            let place = Map::<B>::pair(set, pair);
            if B::K == 128 {
                store_shared_b32(place + 4 * lane, sums[0]);
            } else {
                store_shared_b64(place + 8 * lane, [sums[0], sums[1]]);
            }
        }
    }

    /// First channel of a lane of a team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn channel(lane: u32) -> u32 {
        lane % Self::LANES * 8 + lane / Self::LANES * 4
    }

    /// Sum `i` of the sums that are scattered over a team's lanes. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_team(sums: &[f32; 32], i: usize) -> f32 {
        let each = 32 / Self::TEAM as usize;
        let first = lane_id() / Self::TEAM * Self::TEAM;
        warp_shuffle_idx(sums[i % each], first + (i / each) as u32)
    }

    /// Stores 4 channels of a token of an operand that is multiplied by the state; scaled by a power of two if the state is f16.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_decayed(
        &self,
        operand: Operand,
        t: u32,
        lane: u32,
        (mut x, power): ([f32; 4], f32),
    ) {
        if self.state_f16 {
            x = x.map(|x| x * power);
        }
        Self::store_token(operand, t, lane, x, self.state_f16);
    }

    /// Stores 4 channels of a token of an operand, in split form.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_token(
        operand: Operand,
        t: u32,
        lane: u32,
        [a, b, c, d]: [f32; 4],
        is_f16: bool,
    ) {
        let (group, half) = (lane % Self::LANES, lane / Self::LANES);
        let token = Map::<B>::operand(operand) + t * Map::<B>::ROW;
        let address = Map::<B>::channels(token, group) + half * Map::<B>::word(2);
        let low = Map::<B>::LOW;
        store_words(split(a, b, is_f16), address, low);
        store_words(split(c, d, is_f16), address + Map::<B>::word(1), low);
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn product([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4]) -> [f32; 4] {
    [a * e, b * f, c * g, d * h]
}
