//! Verify, update, commit and resume on the tensor cores; steps are those of the operators' headers.

mod channels;
mod fragments;
mod gates;
mod inputs;
mod map;
mod meeting;
mod solver;
mod state;
mod worker;

use core::marker::PhantomData;

use crate::constants::Element;
use crate::device::thread::thread_idx_x;
use crate::launch::{Computes, Kernel, Layout};
use crate::recurrent::Gating;
use crate::recurrent::slots::Slots;
use crate::recurrent::tokens::Tokens;
use crate::row::Row;
use crate::state::{Bf16, StateElement};
use crate::step::{StepConstants, StepParams};
use fragments::{Split, Tokens8};
use gates::GateInputs;
use map::{Block, Map, Operand, Set};
use worker::Worker;

/// Up to 8 tokens and 8 previous ones on bf16 K-last states: `WARPS` warps of `TILES16` tiles of 16 rows of S, and the
/// solver.
pub struct Parallel<G, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize>(
    PhantomData<G>,
);

impl<G: Gating, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> Kernel
    for Parallel<G, K, V, WARPS, TILES16>
{
    type Params = StepParams;
    type Constants = StepConstants;
    const BLOCK: u32 = 32 * (WARPS + 1);
    const TILES: u32 = V / (WARPS * Self::ROWS);
    const MIN_BLOCKS_PER_SM: u32 = 384 / Self::BLOCK;
    const SHARED_BYTES: u32 = Map::<Self>::BYTES;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: G::PARALLEL,
        layout: Layout::KLast,
        state: Bf16::ELEMENT,
        k: K,
        v: V,
    });

    #[inline(always)]
    unsafe fn run(params: &StepParams) {
        const {
            assert!(
                K == 64 || K == 128,
                "K: a team of lanes and a loader's turns are made for 64 and 128"
            );
            assert!(
                TILES16 == 1 || TILES16 == 2,
                "a warp's values of 8 tokens are one to a lane"
            );
            assert!(
                V.is_multiple_of(WARPS * Self::ROWS),
                "whole tiles of rows of S"
            );
        }
        let c = StepConstants::get();
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
        // SAFETY: the caller's promise.
        unsafe {
            let launch = Launch {
                slots: Slots::load(&c, params, row.b),
                tokens: Tokens::new(&c, params, row),
                previous: if c.previous_tokens != 0 {
                    Some(Tokens::previous(&c, params, row))
                } else {
                    None
                },
                c,
                params,
                row,
            };
            if thread_idx_x() / 32 == WARPS {
                launch.solve::<Self>();
            } else {
                launch.work::<Self, TILES16>();
            }
        }
    }
}

impl<G: Gating, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> Block
    for Parallel<G, K, V, WARPS, TILES16>
{
    const PER_CHANNEL: bool = G::PER_CHANNEL;
    const K: u32 = K;
    const V: u32 = V;
    const WARPS: u32 = WARPS;
    const ROWS: u32 = 16 * TILES16 as u32;
}

/// What a block knows of its row.
struct Launch<'a> {
    c: StepConstants,
    params: &'a StepParams,
    row: Row,
    slots: Slots,
    tokens: Tokens,
    previous: Option<Tokens>,
}

impl Launch<'_> {
    #[inline(always)]
    fn live(&self) -> bool {
        let previous_live = match &self.previous {
            Some(previous) => previous.live,
            None => true,
        };
        self.slots.live(&self.c, self.params) && self.tokens.live && previous_live
    }

    /// The solver: GDN's tokens of both sets come together.
    #[inline(always)]
    unsafe fn solve<B: Block>(&self) {
        let (c, tokens) = (&self.c, &self.tokens);
        // SAFETY: the caller's promise.
        unsafe {
            let load =
                |tokens, there| GateInputs::load::<B>(c, self.params, self.row, tokens, there);
            let previous_gates = self
                .previous
                .as_ref()
                .map(|previous| load(previous, c.previous_tokens));
            let gates = load(tokens, tokens.count);
            if !self.live() {
                return;
            }
            let solve = |gates, set, count| {
                if B::PER_CHANNEL {
                    meeting::take_tokens::<B>(set);
                }
                solver::solve::<B>(c, gates, set, count);
                meeting::leave_solution::<B>(set);
            };
            if !B::PER_CHANNEL {
                meeting::take_tokens::<B>(Set::New);
            }
            if let (Some(previous), Some(gates)) = (&self.previous, previous_gates) {
                solve(gates, Set::Previous, previous.count);
            }
            if c.tokens != 0 {
                solve(gates, Set::New, tokens.count);
            }
        }
    }

    /// A worker: all loads, then the previous tokens, then the new ones.
    #[inline(always)]
    unsafe fn work<B: Block, const TILES16: usize>(&self) {
        let (c, tokens) = (&self.c, &self.tokens);
        let worker = Worker::<B, TILES16>::new(c, self.row.tile);
        let element = |operand| match operand {
            _ if B::PER_CHANNEL => Element::F32 as u32,
            Operand::Query => c.q_element,
            _ => c.k_element,
        };
        let operand = |operand| Tokens8::new::<B>(operand, element(operand));
        // SAFETY: the caller's promise; each part of the shared memory is written before the barrier that precedes its
        // reads.
        unsafe {
            let previous = self
                .previous
                .as_ref()
                .map(|previous| worker.load_inputs(Set::Previous, previous, c.previous_tokens));
            let inputs = worker.load_inputs(Set::New, tokens, tokens.count);
            let decay_inputs = if B::PER_CHANNEL {
                let most = tokens.count.max(c.previous_tokens);
                Some(worker.load_decay_inputs(c, self.params, self.row, most))
            } else {
                None
            };
            if !self.live() {
                worker.zero_outputs(tokens.o, c.o_element, tokens.count);
                return;
            }
            worker.copy_state(self.slots.start::<Bf16>(
                c,
                self.params,
                (self.row.hv, [B::V, B::K]),
            ));

            if let Some(decay_inputs) = &decay_inputs {
                if let Some(inputs) = &previous {
                    worker.prepare(c, Set::Previous, inputs, decay_inputs, true);
                }
                if c.tokens != 0 {
                    worker.prepare(c, Set::New, &inputs, decay_inputs, c.update_state != 0);
                }
            } else {
                let store = |operand, raw, count| {
                    worker.store_tokens(operand, raw, element(operand), count);
                };
                if let Some(inputs) = &previous {
                    store(Operand::PreviousKey, inputs.keys, inputs.count);
                }
                if c.tokens != 0 {
                    store(Operand::Key, inputs.keys, tokens.count);
                    store(Operand::Query, inputs.queries, tokens.count);
                }
                meeting::workers::<B>();
                meeting::leave_tokens::<B>(Set::New);
            }

            let write = self
                .slots
                .write::<Bf16>(c, self.params, (self.row.hv, [B::V, B::K]));
            let advance = |set, residuals: &[Split; TILES16], keys, moves| {
                let keys = if B::PER_CHANNEL { Operand::Step } else { keys };
                worker.advance_by(set, residuals, operand(keys), moves)
            };
            let mut advanced = None;
            if let Some(inputs) = &previous {
                if !B::PER_CHANNEL {
                    worker.store_values(Set::Previous, inputs, c.v_element);
                }
                let sk = worker.key_products(operand(Operand::PreviousKey));
                meeting::take_solution::<B>(Set::Previous);
                let residuals = worker.residuals(Set::Previous, &sk, c.v_element);
                advanced = Some(advance(
                    Set::Previous,
                    &residuals,
                    Operand::PreviousKey,
                    inputs.count != 0,
                ));
            }
            if c.tokens == 0 {
                if let Some(advance) = &advanced {
                    worker.store_state(advance, write);
                }
                return;
            }
            if !B::PER_CHANNEL {
                worker.store_values(Set::New, &inputs, c.v_element);
            }
            let [sk, sq] = worker.products(
                operand(Operand::Key),
                operand(Operand::Query),
                |tile, piece, state| match &advanced {
                    Some(advance) => {
                        let next = Worker::<B, TILES16>::advance_piece(advance, tile, piece, state);
                        worker.store_piece(write, tile, piece, next);
                        next
                    }
                    None => state,
                },
            );
            meeting::take_solution::<B>(Set::New);
            let residuals = worker.residuals(Set::New, &sk, c.v_element);
            worker.outputs(&residuals, &sq);
            worker.store_outputs(tokens.o, c.o_element, tokens.count);
            if c.update_state != 0 {
                let advance = advance(Set::New, &residuals, Operand::Key, true);
                worker.store_state(&advance, write);
            }
        }
    }
}
