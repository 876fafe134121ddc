//! A pair of sets: up to 16 new tokens, both sets from S₀, which is read once. A launch of up to 8 tokens is here if its 16-bit
//! state is f32 in shared memory, or if it has more than 8 previous tokens; there is no second set then.
//!
//! The first set A has δ_s, and keys p_s that advance the state over it: S_A = S₀ Γ_A + Σ_s δ_s p_sᵀ. A token t of the second set
//! B reads S_A k_t = S₀ (Γ_A k_t) + Σ_s δ_s (p_s · k_t), and q_t likewise. The solver computes the *cross products* p_s · k_t and
//! p_s · q_t; everything else of a set is as in a launch of 8 tokens.

use super::fragments::{Split, TokenFragment, Tokens8};
use super::gates::GateInputs;
use super::inputs::Inputs;
use super::map::{Block, Map, Operand, Set, TOKENS};
use super::solver::{self, MOST_FRAGMENTS, sum};
use super::state::{Advance, Decays, StateRows};
use super::worker::{Products, Worker};
use super::{Around, RowStep, meeting, solve_set};
use crate::constants::Element;
use crate::device::rarely;
use crate::device::shared::{copy_async_commit, load_shared_b32, store_shared_b64};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp};
use crate::math::each::each;
use crate::recurrent::tokens::Tokens;
use crate::row::Row;
use crate::state::{B16, Head, Tile};
use crate::step::{StepConstants, StepParams};

/// The sets, in the order of their tokens.
const FIRST: Set = Set::Later;
const SECOND: Set = Set::New;

/// The kernel body of a launch of up to 16 new tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) unsafe fn run_pair<B: Block, A: Around<B, TILES16>, const TILES16: usize>(
    c: StepConstants,
    params: &StepParams,
    row: Row,
    around: A,
) {
    let step = RowStep::new(c, params, row, around);
    let (has_previous, has_new) = (Map::<B>::F32_STATE && c.previous_tokens != 0, c.tokens != 0);
    if thread_idx_x() / 32 == B::WARPS {
        if has_previous && !step.solve_sets::<B, TILES16>() {
            return;
        }
        if has_new {
            step.solve_pair::<B, TILES16>(has_previous);
        }
    } else {
        if has_previous && !step.work_sets::<B, TILES16>() {
            step.zero_outputs::<B, TILES16>();
            return;
        }
        if has_new {
            step.work_pair::<B, TILES16>(has_previous);
        }
    }
}

/// Whether the launch has a second set: a load-time constant. 16-bit states in shared memory come only with both.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn has_second<B: Block>(c: &StepConstants) -> bool {
    !Map::<B>::F32_STATE || c.tokens > TOKENS
}

/// The tokens of `operand`, as they are stored.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn operand<B: Block>(c: &StepConstants, operand: Operand) -> Tokens8 {
    let element = match operand {
        _ if B::PER_CHANNEL => Element::F32 as u32,
        Operand::Query | Operand::LaterQuery => c.q_element,
        _ => c.k_element,
    };
    // States of KDA are bf16.
    Tokens8::new::<B>(operand, element, Map::<B>::is_f16(c))
}

impl<A> RowStep<'_, A> {
    /// The tokens of each set.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pair(&self) -> [(Tokens, u32); 2] {
        let there = self.tokens.count;
        [0, TOKENS].map(|from| {
            let of_set = there.saturating_sub(from).min(TOKENS);
            (self.tokens.from(from, TOKENS), of_set)
        })
    }

    /// The solver. GDN's workers hand over both sets together.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn solve_pair<B: Block, const TILES16: usize>(&self, has_previous: bool)
    where
        A: Around<B, TILES16>,
    {
        let c = &self.c;
        let [first, second] = self.pair();
        let (p, row) = (self.params, self.row);
        let of_first = GateInputs::load::<B>(c, p, row, &first.0, first.1);
        let has_second = has_second::<B>(c);
        let mut of_second = GateInputs::NONE;
        if has_second {
            of_second = GateInputs::load::<B>(c, p, row, &second.0, second.1);
        }
        if !has_previous && (!self.live() || self.tokens.are_none(c)) {
            return;
        }
        if !B::PER_CHANNEL {
            meeting::take_tokens::<B>(SECOND);
        }
        solve_set::<B>(c, of_first, FIRST, first.0.count);
        if !has_second {
            return;
        }
        if B::PER_CHANNEL {
            meeting::take_tokens::<B>(SECOND);
        }
        cross::<B>(c);
        solver::solve::<B>(c, of_second, SECOND, second.0.count);
        meeting::leave_solution::<B>(SECOND);
    }

    /// A worker. After previous tokens the state is in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn work_pair<B: Block, const TILES16: usize>(&self, has_previous: bool)
    where
        A: Around<B, TILES16>,
    {
        let c = &self.c;
        let worker = Worker::<B, TILES16>::new(c, self.row.tile);
        let (advances, has_second) = (c.update_state != 0, has_second::<B>(c));
        // SAFETY: the caller's promise; each part of shared memory is written before the barrier that precedes its reads.
        unsafe {
            // No arrays of inputs, which LLVM keeps in local memory.
            let [(first, of_first), (second, of_second)] = self.pair();
            let first_inputs = worker.load_inputs(FIRST, &first, of_first, false);
            // KDA with narrow accesses has no registers for both sets.
            let loads_late = B::PER_CHANNEL && c.wide_io == 0;
            let mut second_inputs = Inputs::NONE;
            if has_second && !loads_late {
                second_inputs = worker.load_inputs(SECOND, &second, of_second, false);
            }
            let decay_inputs = if B::PER_CHANNEL {
                Some(worker.load_decay_inputs(c, self.params, self.row, of_first))
            } else {
                None
            };
            let tokens = &self.tokens;
            if !has_previous && !self.live() {
                self.zero_outputs::<B, TILES16>();
                return;
            }
            let slots = self.around.slots();
            if !has_previous && tokens.are_none(c) {
                rarely();
                let width = B::WARPS * B::ROWS;
                let tile = Tile::new(worker.v_last, [B::K, B::V], (self.row.tile * width, width));
                let (threads, at) = ((thread_idx_x(), 32 * B::WARPS), (self.row.hv, tile));
                if worker.widens {
                    slots.carry::<B16>(c, self.params, at, threads);
                } else {
                    slots.carry::<B::State>(c, self.params, at, threads);
                }
                return;
            }
            let [start, write] = self.heads::<B, TILES16>();
            if has_previous {
                // The places of the previous sets are free.
                meeting::workers::<B>();
            } else if worker.widens {
                B::State::copy_narrow(&worker, start, slots.is_fresh());
                copy_async_commit();
            } else {
                worker.copy_state(start, slots.is_fresh());
            }
            if let Some(decay_inputs) = &decay_inputs {
                let by_first = (has_second || advances, false);
                worker.prepare(self, FIRST, &first_inputs, decay_inputs, by_first, false);
                if has_second {
                    if loads_late {
                        second_inputs = worker.load_inputs(SECOND, &second, of_second, false);
                    }
                    let by_second = (advances, false);
                    worker.prepare(self, SECOND, &second_inputs, decay_inputs, by_second, true);
                }
            } else {
                self.store_new_set(&worker, FIRST, &first_inputs);
                if has_second {
                    self.store_new_set(&worker, SECOND, &second_inputs);
                }
                meeting::workers::<B>();
                meeting::leave_tokens::<B>(SECOND);
            }

            let [keys, queries, steps, late_steps] = match B::PER_CHANNEL {
                true => [
                    Operand::LateKey,
                    Operand::LateQuery,
                    Operand::Step,
                    Operand::LateStep,
                ],
                false => [
                    Operand::Key,
                    Operand::Query,
                    Operand::PreviousKey,
                    Operand::Key,
                ],
            };
            let [early, late] = [[FIRST.key(), FIRST.query()], [keys, queries]]
                .map(|of| of.map(|it| operand::<B>(c, it)));
            let ([sk, sq], mut late_products);
            if B::PER_CHANNEL && has_second {
                let [k, q, late_k, late_q] =
                    worker.products_of([early[0], early[1], late[0], late[1]], !has_previous);
                ([sk, sq], late_products) = ([k, q], [late_k, late_q]);
            } else {
                [sk, sq] = worker.products_of(early, !has_previous);
                late_products = [[[0.0; 4]; TILES16]; 2];
            }

            meeting::take_solution::<B>(FIRST);
            let residuals = worker.residuals(FIRST, &sk, c.v_element);
            worker.outputs(FIRST, &residuals, &sq);
            worker.store_outputs(FIRST, first.o, c.o_element, first.count);
            let steps = operand::<B>(c, steps);
            let by_first = worker.advance_by(FIRST, &residuals, steps, u32::MAX);
            if !has_second {
                if advances {
                    worker.store_states(&by_first, write);
                }
                return;
            }
            let deltas = Worker::<B, TILES16>::deltas(FIRST, &residuals);

            // Only now, so that four blocks of tile64 have room for their registers on a multiprocessor. KDA's have no room anyway, and
            // read the state once.
            if !B::PER_CHANNEL {
                // A load fence: docs/compiler.md.
                sync_warp(FULL_MASK);
                late_products = worker.products_of(late, false);
            }
            let [late_sk, late_sq] = late_products;

            meeting::take_solution::<B>(SECOND);
            let sk = Self::after_first::<B, TILES16>(&deltas, late_sk, false);
            let sq = Self::after_first::<B, TILES16>(&deltas, late_sq, true);
            let residuals = worker.residuals(SECOND, &sk, c.v_element);
            worker.outputs(SECOND, &residuals, &sq);
            worker.store_outputs(SECOND, second.o, c.o_element, second.count);
            if advances {
                let steps = operand::<B>(c, late_steps);
                let by_second = worker.advance_by(SECOND, &residuals, steps, u32::MAX);
                let ([by_first], [mut by_second]) = (by_first.sets, by_second.sets);
                if B::PER_CHANNEL {
                    by_second.decays = Decays::Channels(Map::<B>::kept_later());
                }
                let advance = Advance {
                    sets: [by_first, by_second],
                    moved: u32::MAX,
                    state_f16: worker.state_f16,
                };
                worker.store_states(&advance, write);
            }
        }
    }

    /// Zeros as the outputs of an inactive row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn zero_outputs<B: Block, const TILES16: usize>(&self)
    where
        A: Around<B, TILES16>,
    {
        let worker = Worker::<B, TILES16>::new(&self.c, self.row.tile);
        let [(first, _), (second, _)] = self.pair();
        worker.zero_outputs(first.o, self.c.o_element, first.count);
        worker.zero_outputs(second.o, self.c.o_element, second.count);
    }

    /// Stores a set of GDN's tokens.
    ///
    /// # Safety
    /// Before the first barrier.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_new_set<B: Block, const TILES16: usize>(
        &self,
        worker: &Worker<B, TILES16>,
        set: Set,
        inputs: &Inputs,
    ) {
        let c = &self.c;
        // SAFETY: the caller's promise.
        unsafe {
            worker.store_tokens(c, set.key(), inputs.keys, inputs.count);
            worker.store_tokens(c, set.query(), inputs.queries, inputs.count);
            // f16 parts are computed from tokens that are already in range.
            if !worker.state_f16 && worker.are_wild(c, set) {
                rarely();
                worker.tame_stored(c, set);
            }
            worker.store_values(set, inputs, c.v_element);
        }
    }

    /// S_A · tokensᵀ of the second set, from S₀ · tokensᵀ and the first set's δ.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn after_first<B: Block, const TILES16: usize>(
        deltas: &[Split; TILES16],
        mut products: Products<TILES16>,
        of_queries: bool,
    ) -> Products<TILES16>
    where
        A: Around<B, TILES16>,
    {
        let cross = super::fragments::SplitMatrix::load(Map::<B>::cross(of_queries), 1.0);
        let decay = if B::PER_CHANNEL {
            1.0
        } else {
            f32::from_bits(load_shared_b32(Map::<B>::solution(FIRST).decay()))
        };
        each!(tile in 0..TILES16 => {
            let decayed = products[tile].map(|x| decay * x);
            products[tile] = deltas[tile].times(decayed, cross);
        });
        products
    }
}

impl<B: Block, const TILES16: usize> Worker<B, TILES16> {
    /// S₀ · tokensᵀ for each of several operands. S₀ is as it `is_copied` from the pool, or as the previous sets leave it.
    ///
    /// # Safety
    /// As for [`Self::key_products`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn products_of<const N: usize>(
        &self,
        operands: [Tokens8; N],
        is_copied: bool,
    ) -> [Products<TILES16>; N] {
        Self::wait_for_state();
        if self.widens && is_copied {
            B::State::widen_rows(self);
            sync_warp(FULL_MASK);
        }
        let mut products = [[[0.0; 4]; TILES16]; N];
        each!(fragment in 0..Self::FRAGMENTS => {
            let mut tokens = [TokenFragment::NONE; N];
            each!(i in 0..N => tokens[i] = operands[i].fragment(fragment));
            each!(tile in 0..TILES16 => {
                let s = B::State::factors(self.state(tile, fragment));
                each!(i in 0..N => {
                    products[i][tile] = B::State::product(products[i][tile], s, tokens[i]);
                });
            });
        });
        products
    }

    /// Advances S₀ and stores it, as 16-bit elements if the pool's are; its copies have been waited for.
    ///
    /// # Safety
    /// The head is a live state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_states<const SETS: usize>(&self, advance: &Advance<TILES16, SETS>, head: Head) {
        if !self.widens {
            return self.store_state(advance, head);
        }
        each!(fragment in 0..Self::FRAGMENTS => {
            each!(tile in 0..TILES16 => {
                let state = self.state(tile, fragment);
                let next = Self::advance_fragment(advance, tile, fragment, state);
                B::State::store_narrow(self, head, (tile, fragment), next);
            });
            // A load fence: docs/compiler.md.
            sync_warp(FULL_MASK);
        });
    }

    /// δ of a set, as factors of the products of its keys that advance the state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn deltas(set: Set, residuals: &[Split; TILES16]) -> [Split; TILES16] {
        let mut deltas = [Split::ZERO; TILES16];
        let matrix = Self::load_deltas(set);
        each!(tile in 0..TILES16 => {
            deltas[tile] = Split::new(residuals[tile].times([0.0; 4], matrix));
        });
        deltas
    }
}

/// The products of k and q of the second set with the keys that advance the state over the first.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn cross<B: Block>(c: &StepConstants) {
    let steps = match B::PER_CHANNEL {
        true => operand::<B>(c, Operand::Step),
        false => operand::<B>(c, Operand::PreviousKey),
    };
    let [keys, queries] = [Operand::Key, Operand::Query].map(|it| operand::<B>(c, it));
    let mut parts = [[0.0; 4]; MOST_FRAGMENTS];
    each!(fragment in 0..(B::K / 32) as usize => {
        let (k, q) = (keys.fragment(fragment), queries.fragment(fragment));
        parts[fragment] = steps.fragment(fragment).gram(parts[fragment], k, q);
    });
    let [a, b, c, d] = sum(parts).map(f32::to_bits);
    let place = 8 * lane_id();
    // SAFETY: the caller's promise; each place has one writer.
    unsafe {
        store_shared_b64(Map::<B>::cross(false) + place, [a, b]);
        store_shared_b64(Map::<B>::cross(true) + place, [c, d]);
    }
}
