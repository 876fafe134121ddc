//! Verify, update, commit and resume on the tensor cores; the numbers of steps are those of the operators' headers.

mod around;
pub(crate) mod channels;
pub(crate) mod fragments;
pub(crate) mod gates;
pub(crate) mod inputs;
pub(crate) mod map;
pub(crate) mod meeting;
mod pair;
mod sets;
pub(crate) mod solver;
pub(crate) mod state;
mod state_f32;
pub(crate) mod worker;

pub(crate) use around::{Around, Plain};

use core::marker::PhantomData;

use crate::constants::Element;
use crate::device::rarely;
use crate::device::thread::thread_idx_x;
use crate::launch::{Computes, Description, Family, Kernel, Layout, Shared};
use crate::recurrent::Gating;
use crate::recurrent::slots::Slots;
use crate::recurrent::tokens::{Tokens, clear_rest_of_tile};
use crate::row::Row;
use crate::state::{StateElement, Tile};
use crate::step::{StepConstants, StepParams};
use fragments::{Split, Tokens8};
use gates::GateInputs;
use map::{Block, Map, Operand, Set, TOKENS};
use pair::run_pair;
use state::{StateRows, mask};
use worker::Worker;

/// Up to 8 new and 8 previous tokens, or up to 16 new ones, on 16-bit K-last states (`S` = [`B16`](crate::state::B16)); up to 16
/// and 16 on any states
/// (`S` = [`F32`](crate::state::F32), their type in shared memory): `WARPS` workers with `TILES16` tiles of 16 rows of S each,
/// and the solver.
pub struct Parallel<G, S, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize>(
    PhantomData<(G, S)>,
);

/// The description of a kernel of `family` with blocks `B`, with `shared_bytes` bytes of shared memory.
pub(crate) const fn description<B: Block>(family: Family, shared_bytes: u32) -> Description {
    let threads = 32 * (B::WARPS + 1);
    let computes = Computes::new(family, Some(B::PER_CHANNEL), [B::K, B::V]);
    Description {
        tiles: B::TILES,
        min_blocks_per_sm: 384 / threads,
        shared: Shared::of_block(shared_bytes),
        ..Description::of(
            threads,
            match B::State::ELEMENT {
                Element::F32 => computes.of(Element::F32),
                element => computes.on(Layout::KLast, element),
            },
        )
    }
}

impl<G: Gating, S: StateRows, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize>
    Kernel for Parallel<G, S, K, V, WARPS, TILES16>
{
    type Params = StepParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // [`StepConstants::blocks_of_drafts`]
        min_blocks_by_constant: true,
        shared_of_sets: Map::<Self>::BYTES_OF_PAIR,
        ..description::<Self>(Family::PARALLEL, Map::<Self>::BYTES)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &StepParams) {
        let c = StepConstants::get();
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
        let around = Plain(Slots::load(&c, params, row.b));
        run::<Self, Plain, TILES16>(c, params, row, around);
    }
}

/// Compile-time check that each warp of the block has whole tiles, and that its lanes have whole tokens.
pub(crate) const fn check<B: Block>(tiles16: usize) {
    assert!(
        B::K == 64 || B::K == 128,
        "K: a team of lanes and a loader's turns are made for 64 and 128"
    );
    assert!(
        tiles16 == 1 || tiles16 == 2,
        "a warp's values of 8 tokens are one to a lane"
    );
    assert!(
        B::V.is_multiple_of(B::WARPS * B::ROWS),
        "whole tiles of rows of S"
    );
}

/// The kernel body, which the kernels with and without convolution and norm share.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn run<B: Block, A: Around<B, TILES16>, const TILES16: usize>(
    c: StepConstants,
    params: &StepParams,
    row: Row,
    around: A,
) {
    const { check::<B>(TILES16) };
    const {
        assert!(
            !A::TAKES_PAIR || Map::<B>::BYTES + Map::<B>::BYTES_OF_PAIR <= 99 * 1024,
            "shared memory that every GPU has"
        );
    }
    let tile = B::WARPS * B::ROWS;
    clear_rest_of_tile(&c, params, (row, tile), 32 * (B::WARPS + 1));
    let are_several = c.tokens > TOKENS || c.previous_tokens > TOKENS || Map::<B>::widens(&c);
    if A::TAKES_PAIR && are_several {
        return run_pair::<B, A, TILES16>(c, params, row, around);
    }
    let step = RowStep::new(c, params, row, around);
    if thread_idx_x() / 32 == B::WARPS {
        step.solve::<B, TILES16>();
    } else {
        step.work::<B, TILES16>();
    }
}

impl<G: Gating, S: StateRows, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize>
    Block for Parallel<G, S, K, V, WARPS, TILES16>
{
    type State = S;
    const PER_CHANNEL: bool = G::PER_CHANNEL;
    const K: u32 = K;
    const V: u32 = V;
    const WARPS: u32 = WARPS;
    const ROWS: u32 = 16 * TILES16 as u32;
    const WIDENS: bool = S::BYTES == 4;
}

/// Takes a set's tokens, and leaves their solution. A function instead of a closure, which LLVM does not inline in large kernels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn solve_set<B: Block>(c: &StepConstants, gates: GateInputs, set: Set, count: u32) {
    if B::PER_CHANNEL {
        meeting::take_tokens::<B>(set);
    }
    solver::solve::<B>(c, gates, set, count);
    meeting::leave_solution::<B>(set);
}

/// A block's part of a step whose tokens are computed together: its row, the row's tokens, and the convolution and norm around
/// the recurrence.
pub(crate) struct RowStep<'a, A> {
    pub c: StepConstants,
    pub params: &'a StepParams,
    pub row: Row,
    pub around: A,
    pub tokens: Tokens,
    pub previous: Option<Tokens>,
}

impl<'a, A> RowStep<'a, A> {
    /// The part of the block for `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn new(c: StepConstants, params: &'a StepParams, row: Row, around: A) -> Self {
        Self {
            around,
            tokens: Tokens::new(&c, params, row),
            previous: if c.previous_tokens != 0 {
                Some(Tokens::previous(&c, params, row))
            } else {
                None
            },
            c,
            params,
            row,
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn live<B: Block, const TILES16: usize>(&self) -> bool
    where
        A: Around<B, TILES16>,
    {
        let previous_live = match &self.previous {
            Some(previous) => previous.live,
            None => true,
        };
        self.around.live(&self.c, self.params) && self.tokens.live && previous_live
    }

    /// The solver. With GDN the workers hand over the tokens of both sets together.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn solve<B: Block, const TILES16: usize>(&self)
    where
        A: Around<B, TILES16>,
    {
        let (c, tokens) = (&self.c, &self.tokens);
        let load = |tokens, there| GateInputs::load::<B>(c, self.params, self.row, tokens, there);
        let previous_gates = self
            .previous
            .as_ref()
            .map(|previous| load(previous, c.previous_tokens));
        let gates = load(tokens, tokens.count);
        A::meet(self);
        if !self.live() || tokens.are_none(c) {
            return;
        }
        if !B::PER_CHANNEL {
            meeting::take_tokens::<B>(Set::New);
        }
        if let (Some(previous), Some(gates)) = (&self.previous, previous_gates) {
            solve_set::<B>(c, gates, Set::Previous, previous.count);
        }
        if c.tokens != 0 {
            solve_set::<B>(c, gates, Set::New, tokens.count);
        }
    }

    /// A worker: issues all loads, then processes the previous tokens, then the new ones.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn work<B: Block, const TILES16: usize>(&self)
    where
        A: Around<B, TILES16>,
    {
        let (c, tokens) = (&self.c, &self.tokens);
        let made = A::makes(c);
        let worker = Worker::<B, TILES16>::new(c, self.row.tile);
        let element = |operand| match operand {
            _ if B::PER_CHANNEL => Element::F32 as u32,
            Operand::Query => c.q_element,
            _ => c.k_element,
        };
        let operand = |operand| {
            let meets_state = !matches!(operand, Operand::Step);
            let is_f16 = worker.state_f16 && meets_state;
            Tokens8::new::<B>(operand, element(operand), is_f16)
        };
        // SAFETY: the caller's promise; each part of shared memory is written before the barrier that precedes its reads.
        unsafe {
            let drafts = A::load_drafts(self);
            let previous = self.previous.as_ref().map(|previous| {
                worker.load_inputs(Set::Previous, previous, c.previous_tokens, made)
            });
            let inputs = worker.load_inputs(Set::New, tokens, tokens.count, made);
            let decay_inputs = if B::PER_CHANNEL {
                let most = tokens.count.max(c.previous_tokens);
                Some(worker.load_decay_inputs(c, self.params, self.row, most))
            } else {
                None
            };
            A::meet(self);
            if !self.live() {
                worker.zero_outputs(tokens.o, c.o_element, tokens.count);
                return;
            }
            let v_last = worker.v_last;
            let shape = if v_last { [B::K, B::V] } else { [B::V, B::K] };
            let (slots, head) = (self.around.slots(), (self.row.hv, shape));
            if tokens.are_none(c) {
                rarely();
                let width = B::WARPS * B::ROWS;
                let tile = Tile::new(v_last, [B::K, B::V], (self.row.tile * width, width));
                let threads = (thread_idx_x(), 32 * B::WARPS);
                slots.carry::<B::State>(c, self.params, (self.row.hv, tile), threads);
                A::carry(self);
                return;
            }
            worker.copy_state(
                slots.start::<B::State>(c, self.params, head),
                slots.is_fresh(),
            );
            // A resume, and narrow accesses to states, leave no registers for the scales here; they are loaded later.
            let mut scales = None;
            if c.previous_tokens == 0 && c.wide_state != 0 {
                scales = Some(A::load_scales(self, &worker));
            }
            if made {
                A::make(self, drafts);
            }

            if let Some(decay_inputs) = &decay_inputs {
                if let Some(inputs) = &previous {
                    worker.prepare(
                        self,
                        Set::Previous,
                        inputs,
                        decay_inputs,
                        (true, made),
                        false,
                    );
                }
                if c.tokens != 0 {
                    let advances = c.update_state != 0;
                    worker.prepare(
                        self,
                        Set::New,
                        &inputs,
                        decay_inputs,
                        (advances, made),
                        false,
                    );
                }
            } else {
                if !made && let Some(inputs) = &previous {
                    worker.store_tokens(c, Operand::PreviousKey, inputs.keys, inputs.count);
                    // f16 parts are computed from tokens that are already in range.
                    if !worker.state_f16 && worker.are_wild(c, Set::Previous) {
                        rarely();
                        worker.tame_stored(c, Set::Previous);
                    }
                }
                if !made && c.tokens != 0 {
                    worker.store_tokens(c, Operand::Key, inputs.keys, tokens.count);
                    worker.store_tokens(c, Operand::Query, inputs.queries, tokens.count);
                    if !worker.state_f16 && worker.are_wild(c, Set::New) {
                        rarely();
                        worker.tame_stored(c, Set::New);
                    }
                }
                if made && worker.state_f16 {
                    meeting::workers::<B>();
                    if previous.is_some() {
                        worker.make_f16_tokens(c, Operand::PreviousKey);
                    }
                    if c.tokens != 0 {
                        worker.make_f16_tokens(c, Operand::Key);
                        worker.make_f16_tokens(c, Operand::Query);
                    }
                }
                meeting::workers::<B>();
                if made && !worker.state_f16 && A::has_made_large(self) {
                    rarely();
                    worker.tame_made(self, [c.tokens != 0, previous.is_some()]);
                    meeting::workers::<B>();
                }
                meeting::leave_tokens::<B>(Set::New);
            }

            let write = slots.write::<B::State>(c, self.params, head);
            let advance = |set, residuals: &[Split; TILES16], keys, moved| {
                let keys = if B::PER_CHANNEL { Operand::Step } else { keys };
                worker.advance_by(set, residuals, operand(keys), moved)
            };
            let mut advanced = None;
            if let Some(inputs) = &previous {
                if !B::PER_CHANNEL && !made {
                    worker.store_values(Set::Previous, inputs, c.v_element);
                }
                let sk = worker.key_products(
                    operand(Operand::PreviousKey),
                    Worker::<B, TILES16>::FRAGMENTS,
                );
                meeting::take_solution::<B>(Set::Previous);
                let residuals = worker.residuals(Set::Previous, &sk, c.v_element);
                advanced = Some(advance(
                    Set::Previous,
                    &residuals,
                    Operand::PreviousKey,
                    mask(inputs.count != 0),
                ));
            }
            if c.tokens == 0 {
                if let Some(advance) = &advanced {
                    worker.store_state(advance, write);
                }
                return;
            }
            if !B::PER_CHANNEL && !made {
                worker.store_values(Set::New, &inputs, c.v_element);
            }
            let [sk, sq] = worker.products(
                operand(Operand::Key),
                operand(Operand::Query),
                Worker::<B, TILES16>::FRAGMENTS,
                |tile, fragment, state| match &advanced {
                    Some(advance) => {
                        let next =
                            Worker::<B, TILES16>::advance_fragment(advance, tile, fragment, state);
                        worker.store_fragment(write, tile, fragment, next);
                        next
                    }
                    None => state,
                },
            );
            let scales = match scales {
                Some(scales) => scales,
                None => A::load_scales(self, &worker),
            };
            meeting::take_solution::<B>(Set::New);
            let residuals = worker.residuals(Set::New, &sk, c.v_element);
            worker.outputs(Set::New, &residuals, &sq);
            A::take_outputs(self, &worker);
            if c.update_state != 0 {
                let advance = advance(Set::New, &residuals, Operand::Key, u32::MAX);
                worker.store_state(&advance, write);
            }
            A::finish(self, &worker, scales);
        }
    }
}
