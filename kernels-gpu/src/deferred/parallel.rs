//! Several new tokens on K-last deferred states, together on the tensor cores; the numbers of steps are those of
//! [`crate::kernels::deferred`].
//!
//! The new tokens are solved among themselves as in [`crate::recurrent::Parallel`]. Only their products with S differ: products
//! with the stored state, plus the contribution of the pending tokens, a product of 16 columns of u with 16 rows of weights. A
//! row that flushes first adds the pending tokens to the state, fragment by fragment, in shared memory and in its slot.

use core::marker::PhantomData;

use super::ring_products;
use crate::constants::Element;
use crate::device::shared::copy_async_wait;
use crate::device::thread::thread_idx_x;
use crate::launch::{Description, Family, Kernel};
use crate::pending::{MAX_PENDING_DRAFTS, Pending, Ring};
use crate::recurrent::Gating;
use crate::recurrent::parallel::channels::DecayInputs;
use crate::recurrent::parallel::fragments::Tokens8;
use crate::recurrent::parallel::gates::GateInputs;
use crate::recurrent::parallel::inputs::Inputs;
use crate::recurrent::parallel::map::{Block, MOST_PENDING, Map, Operand, Set, TOKENS};
use crate::recurrent::parallel::worker::{Products, Worker};
use crate::recurrent::parallel::{self as recurrent, Around, Plain, meeting, solver};
use crate::recurrent::slots::Slots;
use crate::recurrent::tokens::Tokens;
use crate::row::Row;
use crate::state::{B16, Head};
use crate::step::{DeferredParams, StepConstants};
use ring_products::{Flush, LogDecays, RawLogDecay, halves, weigh};

const F32: u32 = Element::F32 as u32;

/// Operands with the keys of the first 8 pending tokens, and of the later ones.
const PENDING_KEYS: [Operand; 2] = [Operand::PreviousKey, Operand::LaterPendingKey];

/// Up to 8 new tokens and 16 pending ones on bf16 K-last states: `WARPS` workers with `TILES16` tiles of 16 rows of S each, and
/// the solver.
pub struct Parallel<G, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize>(
    PhantomData<G>,
);

impl<G: Gating, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> Block
    for Parallel<G, K, V, WARPS, TILES16>
{
    type State = B16;
    const PER_CHANNEL: bool = G::PER_CHANNEL;
    const K: u32 = K;
    const V: u32 = V;
    const WARPS: u32 = WARPS;
    const ROWS: u32 = 16 * TILES16 as u32;
    const WAITS: bool = true;
}

impl<G: Gating, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> Kernel
    for Parallel<G, K, V, WARPS, TILES16>
{
    type Params = DeferredParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // [`StepConstants::blocks_by_tokens`]
        min_blocks_per_sm: 4,
        min_blocks_by_constant: true,
        shared_of_lows: Map::<Self>::BYTES_OF_LOWS,
        ..recurrent::description::<Self>(Family::PARALLEL.on_deferred(), Map::<Self>::BYTES)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &DeferredParams) {
        let c = StepConstants::get();
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
        run::<Self, _, TILES16>(c, params, row, || {
            let pending = Pending::load(&c, params, row.b);
            let around = Plain(Slots::of(pending.slot, pending.fresh));
            (pending, pending.flushes(&c), around)
        });
    }
}

/// The body. `pending` returns the row's pending tokens, whether the launch flushes them, and the row's [`Around`]. It is called
/// after the loads that do not depend on the number of pending tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) unsafe fn run<B: Block<State = B16>, A: Around<B, TILES16>, const TILES16: usize>(
    c: StepConstants,
    params: &DeferredParams,
    row: Row,
    pending: impl FnOnce() -> (Pending, bool, A),
) {
    const { recurrent::check::<B>(TILES16) };
    const { assert!(MAX_PENDING_DRAFTS == MOST_PENDING && MOST_PENDING == 2 * TOKENS) };
    // The states are bf16.
    let c = StepConstants { state_f16: 0, ..c };
    let step = &params.layer.step;
    let tokens = Tokens::new(&c, step, row);
    let new = |pending, flushes, around| DeferredStep {
        ring: Ring::of(
            &c,
            params,
            pending,
            row,
            [B::K, B::V],
            (c.updates_element, B::PER_CHANNEL),
        ),
        step: recurrent::RowStep {
            tokens,
            previous: None,
            c,
            params: step,
            row,
            around,
        },
        pending,
        flushes,
    };
    if thread_idx_x() / 32 == B::WARPS {
        let gates = GateInputs::load::<B>(&c, step, row, &tokens, tokens.count);
        let (pending, flushes, around) = pending();
        new(pending, flushes, around).solve::<B, TILES16>(gates);
    } else {
        let worker = Worker::<B, TILES16>::new(&c, row.tile);
        let inputs = worker.load_inputs(Set::New, &tokens, tokens.count, A::makes(&c));
        let (pending, flushes, around) = pending();
        new(pending, flushes, around).work::<B, TILES16>(worker, inputs);
    }
}

/// A block's part of a step on deferred states: the part of the recurrence, and the pending tokens of the row's slot.
struct DeferredStep<'a, A> {
    step: recurrent::RowStep<'a, A>,
    pending: Pending,
    ring: Ring,
    flushes: bool,
}

impl<A> DeferredStep<'_, A> {
    /// Number of pending tokens that are not in the state when the new tokens are processed.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ahead(&self) -> u32 {
        if self.flushes { 0 } else { self.pending.len }
    }

    /// Whether this block stores the data that all tiles of a value head share.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leaves(&self) -> bool {
        self.step.row.tile == 0
    }

    /// Element type of an operand's tokens in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn element<B: Block>(&self, operand: Operand) -> u32 {
        match operand {
            _ if B::PER_CHANNEL => F32,
            Operand::Query => self.step.c.q_element,
            // A flush without new tokens has no other keys.
            Operand::PreviousKey | Operand::LaterPendingKey => self.step.c.keys_element,
            _ => self.step.c.k_element,
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn operand<B: Block>(&self, operand: Operand) -> Tokens8 {
        Tokens8::new::<B>(operand, self.element::<B>(operand), false)
    }

    /// Keys of the first 8 pending tokens, and of the later ones, in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pending_keys<B: Block>(&self) -> [Tokens8; 2] {
        PENDING_KEYS.map(|operand| self.operand::<B>(operand))
    }

    /// The solver: solves the new tokens among themselves, independently of the pending tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn solve<B: Block, const TILES16: usize>(&self, gates: GateInputs)
    where
        A: Around<B, TILES16>,
    {
        let step = &self.step;
        let (c, tokens) = (&step.c, &step.tokens);
        A::meet(step);
        if c.tokens == 0 || !self.pending.live {
            return;
        }
        meeting::take_tokens::<B>(Set::New);
        solver::solve::<B>(c, gates, Set::New, tokens.count);
        meeting::leave_solution::<B>(Set::New);
        if self.leaves() && !B::PER_CHANNEL {
            let log_decay = gates.log_decay(c);
            self.ring
                .leave_log_decay(self.pending.len, tokens.count, log_decay);
        }
    }

    /// A worker: all remaining loads, then the products, then the outputs and ring entries of the new tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn work<B: Block<State = B16>, const TILES16: usize>(
        &self,
        worker: Worker<B, TILES16>,
        mut inputs: Inputs,
    ) where
        A: Around<B, TILES16>,
    {
        let (step, pending) = (&self.step, &self.pending);
        let (c, tokens, row) = (&step.c, &step.tokens, step.row);
        let made = A::makes(c);
        if c.tokens == 0 && !self.flushes {
            return;
        }
        // SAFETY: the caller's promise; each part of shared memory is written before the barrier that precedes its reads.
        unsafe {
            let drafts = A::load_drafts(step);
            let keys = PENDING_KEYS
                .map(|operand| worker.load_pending_keys(c, self.ring, operand, pending.len));
            let log_decay = RawLogDecay::load::<B>(self.ring, pending.len);
            let decay_inputs = if B::PER_CHANNEL {
                Some(worker.load_decay_inputs(c, step.params, row, tokens.count))
            } else {
                None
            };
            A::meet(step);
            if !pending.live {
                worker.zero_outputs(tokens.o, c.o_element, tokens.count);
                return;
            }
            let head = Head::of_slot::<B16>(
                step.params.read_pool,
                pending.slot,
                c.read_slot,
                (row.hv, [B::V, B::K]),
                c.wide_state != 0,
            );
            worker.copy_pending(self.ring, pending.len);
            worker.copy_state(head, pending.fresh);
            // After the copies are started, because otherwise they would wait for the loaded log decay.
            let log_decays = LogDecays::new::<B>(log_decay);
            if made {
                A::make(step, drafts);
                if c.l2norm != 0 && c.tokens != 0 {
                    meeting::workers::<B>();
                    worker.tame_made(step, [true, false]);
                }
            } else {
                Worker::<B, TILES16>::tame(c, &mut inputs);
            }

            if let Some(decay_inputs) = &decay_inputs {
                copy_async_wait::<1>();
                meeting::workers::<B>();
                Worker::<B, TILES16>::decay_channels(pending.len);
                if c.tokens != 0 {
                    self.leave(&worker, &inputs, (made, Some(decay_inputs)));
                    worker.prepare(step, Set::New, &inputs, decay_inputs, (false, made), true);
                } else {
                    meeting::workers::<B>();
                }
            } else if c.tokens != 0 {
                let (key, query) = (Operand::Key, Operand::Query);
                if !made {
                    worker.store_tokens(c, key, inputs.keys, tokens.count);
                    worker.store_tokens(c, query, inputs.queries, tokens.count);
                    worker.store_values(Set::New, &inputs, c.v_element);
                }
                self.leave(&worker, &inputs, (made, None));
                meeting::workers::<B>();
                meeting::leave_tokens::<B>(Set::New);
            }
            let mut half = 0;
            while half < 2 && half < halves(pending.len) {
                let (operand, mut raw) = (PENDING_KEYS[half as usize], keys[half as usize]);
                if B::PER_CHANNEL {
                    raw = worker.decay_keys(c, operand, raw, pending.len);
                }
                worker.store_pending_keys(operand, (raw, self.element::<B>(operand)), pending.len);
                half += 1;
            }
            meeting::workers::<B>();
            if self.flushes || (pending.fresh && c.tokens != 0) {
                let flush = if self.flushes {
                    let keys = self.pending_keys::<B>();
                    let place = (self.ring, pending.len);
                    Some(Flush::new(&worker, place, keys, &log_decays))
                } else {
                    None
                };
                worker.store_flushed(&flush, head);
            }
            if c.tokens == 0 {
                return;
            }
            let ahead = self.ahead() > 0;
            if ahead {
                self.weigh(&worker, &log_decays);
            }
            let [mut sk, mut sq] = self.products(&worker);
            if ahead && !B::PER_CHANNEL {
                let kept = log_decays.kept();
                (sk, sq) = (scaled(sk, kept), scaled(sq, kept));
            }
            let scales = A::load_scales(step, &worker);
            meeting::take_solution::<B>(Set::New);
            if ahead {
                worker.add_pending(self.ring, pending.len, [&mut sk, &mut sq]);
            }
            let residuals = worker.residuals(Set::New, &sk, c.v_element);
            worker.make_updates(&residuals);
            worker.outputs(Set::New, &residuals, &sq);
            A::take_outputs(step, &worker);
            worker.leave_updates((self.ring, pending.len), tokens.count);
            A::finish(step, &worker, scales);
        }
    }

    /// Stores the new tokens' data that all tiles share in the ring: k, unless the convolution has `made` k (and stored it), and
    /// KDA's log decays.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave<B: Block<State = B16>, const TILES16: usize>(
        &self,
        worker: &Worker<B, TILES16>,
        inputs: &Inputs,
        (made, decay_inputs): (bool, Option<&DecayInputs>),
    ) {
        if !self.leaves() {
            return;
        }
        let (c, row, place) = (&self.step.c, self.step.row, (self.ring, self.pending.len));
        // SAFETY: the caller's promise; only the first value head of a query/key head writes k.
        unsafe {
            if !made && row.value_head(c, 0) == row.hv {
                worker.leave_keys(c, place, inputs);
            }
            if let Some(decay_inputs) = decay_inputs {
                worker.leave_log_decays(c, place, inputs, decay_inputs);
            }
        }
    }

    /// (3) Computes the weights of the pending tokens: warp 0 for the first 8, warp 1 for the later ones.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn weigh<B: Block, const TILES16: usize>(
        &self,
        worker: &Worker<B, TILES16>,
        log_decays: &LogDecays,
    ) {
        let tokens = [Operand::Key, Operand::Query].map(|operand| self.operand::<B>(operand));
        let half = worker.warp;
        if half < halves(self.pending.len) {
            let [first, later] = self.pending_keys::<B>();
            let pending = if half == 0 { first } else { later };
            weigh::<B>(half, tokens, pending, log_decays);
        }
    }

    /// S · kᵀ and S · qᵀ with the state in shared memory. With KDA, k and q are decayed over the pending tokens, unless these are
    /// in the state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn products<B: Block, const TILES16: usize>(
        &self,
        worker: &Worker<B, TILES16>,
    ) -> [Products<TILES16>; 2] {
        let [key, query] = if B::PER_CHANNEL && self.ahead() > 0 {
            [Operand::LateKey, Operand::LateQuery]
        } else {
            [Operand::Key, Operand::Query]
        }
        .map(|operand| self.operand::<B>(operand));
        worker.products(
            key,
            query,
            Worker::<B, TILES16>::FRAGMENTS,
            |_, _, state| state,
        )
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn scaled<const TILES16: usize>(products: Products<TILES16>, by: f32) -> Products<TILES16> {
    products.map(|of_tile| of_tile.map(|x| by * x))
}

/// Number of pending tokens of an operand, if there are `len` in all.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn of_operand(operand: Operand, len: u32) -> u32 {
    match operand {
        Operand::LaterPendingKey => len.saturating_sub(TOKENS),
        _ => len.min(TOKENS),
    }
}
