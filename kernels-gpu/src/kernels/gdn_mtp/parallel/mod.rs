//! GDN verify, update, commit and resume on the tensor cores; steps are those of the operator's header.

mod fragments;
mod gates;
mod inputs;
mod map;
mod solver;
mod state;
mod worker;

use crate::device::thread::{sync_warps_of_roles, thread_idx_x};
use crate::launch::Kernel;
use crate::recurrent::slots::Slots;
use crate::recurrent::tokens::Tokens;
use crate::recurrent::{RecurrentConstants, RecurrentParams};
use crate::row::Row;
use crate::state::Bf16;
use fragments::{Split, Tokens8};
use gates::GateInputs;
use map::{Map, Operand, Set};
use worker::Worker;

/// Up to 8 tokens and 8 previous ones on bf16 K-last states: `WARPS` warps of `TILES16` tiles of 16 rows of S, and the
/// solver. V = K.
pub struct Parallel<const K: u32, const WARPS: u32, const TILES16: usize>;

impl<const K: u32, const WARPS: u32, const TILES16: usize> Kernel for Parallel<K, WARPS, TILES16> {
    type Params = RecurrentParams;
    type Constants = RecurrentConstants;
    const BLOCK: u32 = 32 * (WARPS + 1);
    const TILES: u32 = K / (16 * WARPS * TILES16 as u32);
    const MIN_BLOCKS_PER_SM: u32 = 384 / Self::BLOCK;
    const SHARED_BYTES: u32 = Map::<K, WARPS, TILES16>::BYTES;

    #[inline(always)]
    unsafe fn run(params: &RecurrentParams) {
        let c = RecurrentConstants::get();
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
                launch.solve::<K, WARPS, TILES16>();
            } else {
                launch.work::<K, WARPS, TILES16>();
            }
        }
    }
}

/// Where workers and solver wait for each other.
#[inline(always)]
fn meet<const WARPS: u32>() {
    sync_warps_of_roles(32 * (WARPS + 1));
}

/// What a block knows of its row.
struct Launch<'a> {
    c: RecurrentConstants,
    params: &'a RecurrentParams,
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

    /// The solver: each solution ends with a barrier, behind which the workers use it.
    #[inline(always)]
    unsafe fn solve<const K: u32, const WARPS: u32, const TILES16: usize>(&self) {
        let (c, tokens) = (&self.c, &self.tokens);
        // SAFETY: the caller's promise.
        unsafe {
            let load = |tokens, there| GateInputs::load(c, self.params, self.row, tokens, there);
            let previous_gates = self
                .previous
                .as_ref()
                .map(|previous| load(previous, c.previous_tokens));
            let gates = load(tokens, tokens.count);
            if !self.live() {
                return;
            }
            meet::<WARPS>();
            if let (Some(previous), Some(gates)) = (&self.previous, previous_gates) {
                solver::solve::<K, WARPS, TILES16>(c, gates, Set::Previous, previous.count);
                meet::<WARPS>();
            }
            if c.tokens != 0 {
                solver::solve::<K, WARPS, TILES16>(c, gates, Set::New, tokens.count);
                meet::<WARPS>();
            }
        }
    }

    /// A worker: all loads, then the previous tokens, then the new ones.
    #[inline(always)]
    unsafe fn work<const K: u32, const WARPS: u32, const TILES16: usize>(&self) {
        let (c, tokens) = (&self.c, &self.tokens);
        let worker = Worker::<K, WARPS, TILES16>::new(c, self.row.tile);
        let element = |operand| match operand {
            Operand::Query => c.q_element,
            Operand::Key | Operand::PreviousKey => c.k_element,
        };
        let operand = |operand| Tokens8::new::<K, WARPS, TILES16>(operand, element(operand));
        // SAFETY: the caller's promise; each part of the shared memory is written before the barrier that precedes its
        // reads.
        unsafe {
            let load =
                |operand, run, there| worker.load_tokens(operand, run, element(operand), there);
            let previous = self.previous.as_ref().map(|previous| {
                let there = c.previous_tokens;
                let keys = load(Operand::PreviousKey, previous.k, there);
                let values = worker.load_values(previous.v, c.v_element, there);
                (previous.count, keys, values)
            });
            let keys = load(Operand::Key, tokens.k, tokens.count);
            let queries = load(Operand::Query, tokens.q, tokens.count);
            let values = worker.load_values(tokens.v, c.v_element, tokens.count);
            if !self.live() {
                worker.zero_outputs(tokens.o, c.o_element, tokens.count);
                return;
            }
            worker.copy_state(self.slots.start::<Bf16, K>(c, self.params, self.row.hv));

            let store = |operand, raw, count| {
                worker.store_tokens(operand, raw, element(operand), count);
            };
            if let Some((count, keys, _)) = previous {
                store(Operand::PreviousKey, keys, count);
            }
            if c.tokens != 0 {
                store(Operand::Key, keys, tokens.count);
                store(Operand::Query, queries, tokens.count);
            }
            meet::<WARPS>();

            let write = self.slots.write::<Bf16, K>(c, self.params, self.row.hv);
            let advance = |set, residuals: &[Split; TILES16], keys, moves| {
                worker.advance_by(set, residuals, operand(keys), moves)
            };
            let mut advanced = None;
            if let Some((count, _, values)) = previous {
                worker.store_values(Set::Previous, values, c.v_element, count);
                let sk = worker.key_products(operand(Operand::PreviousKey));
                meet::<WARPS>();
                let residuals = worker.residuals(Set::Previous, &sk, c.v_element);
                advanced = Some(advance(
                    Set::Previous,
                    &residuals,
                    Operand::PreviousKey,
                    count != 0,
                ));
            }
            if c.tokens == 0 {
                if let Some(advance) = &advanced {
                    worker.store_state(advance, write);
                }
                return;
            }
            worker.store_values(Set::New, values, c.v_element, tokens.count);
            let [sk, sq] = worker.products(
                operand(Operand::Key),
                operand(Operand::Query),
                |tile, piece, state| match &advanced {
                    Some(advance) => {
                        let next =
                            Worker::<K, WARPS, TILES16>::advance_piece(advance, tile, piece, state);
                        worker.store_piece(write, tile, piece, next);
                        next
                    }
                    None => state,
                },
            );
            meet::<WARPS>();
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
