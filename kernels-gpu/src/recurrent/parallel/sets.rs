//! More than 8 previous tokens, and previous tokens of 16-bit states that are f32 in shared memory: sets of 8 tokens, one after the
//! other. S stays in shared memory; each set advances it there before the next set reads it. New tokens follow as a
//! [pair](super::pair).
//!
//! A 16-bit state is rounded where it is written, not between sets. GDN's solver is one set ahead: a set is stored while the
//! previous one is computed. KDA's teams have room for one set.

use super::fragments::Tokens8;
use super::gates::GateInputs;
use super::inputs::Inputs;
use super::map::{Block, Map, Operand, Set, TOKENS};
use super::state::{StateRows, mask};
use super::worker::Worker;
use super::{Around, RowStep, meeting, solver};
use crate::constants::Element;
use crate::device::global::prefetch;
use crate::device::rarely;
use crate::device::shared::copy_async_commit;
use crate::device::thread::thread_idx_x;
use crate::device::unknown;
use crate::device::warp::{FULL_MASK, sync_warp};
use crate::math::each::each;
use crate::math::elements::bytes_of;
use crate::recurrent::tokens::Tokens;
use crate::state::{B16, Head, Shape};

/// Number of sets of `tokens` tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sets_of(tokens: u32) -> u32 {
    tokens.div_ceil(TOKENS)
}

/// The places of set `i` in the map.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn set<B: Block>(i: u32) -> Set {
    if B::PER_CHANNEL || i.is_multiple_of(2) {
        Set::New
    } else {
        Set::Later
    }
}

impl<A> RowStep<'_, A> {
    /// Previous set `i`, and how many of its tokens exist; none past the last set.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn set(&self, i: u32) -> (Tokens, u32) {
        let previous = match &self.previous {
            Some(previous) => previous,
            None => &self.tokens,
        };
        let first = TOKENS * i;
        let there = self.c.previous_tokens.saturating_sub(first).min(TOKENS);
        (previous.from(first, TOKENS), there)
    }

    /// The row's value head, and the shape of its state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn head<B: Block>(&self) -> (u32, Shape) {
        let shape = match self.c.state_v_last {
            0 => [B::V, B::K],
            _ => [B::K, B::V],
        };
        (self.row.hv, shape)
    }

    /// The head's state that the row starts from, and the one that it ends with.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn heads<B: Block, const TILES16: usize>(&self) -> [Head; 2]
    where
        A: Around<B, TILES16>,
    {
        let (c, slots, head) = (&self.c, self.around.slots(), self.head::<B>());
        if Map::<B>::widens(c) {
            let start = slots.start::<B16>(c, self.params, head);
            [start, slots.write::<B16>(c, self.params, head)]
        } else {
            let start = slots.start::<B::State>(c, self.params, head);
            [start, slots.write::<B::State>(c, self.params, head)]
        }
    }

    /// Solves the previous sets. Returns whether the row is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn solve_sets<B: Block, const TILES16: usize>(&self) -> bool
    where
        A: Around<B, TILES16>,
    {
        let (c, mut gates, mut count, mut i) = (&self.c, GateInputs::NONE, 0, 0);
        // Each turn loads the gates of a set, and solves the one before it.
        while i < sets_of(c.previous_tokens) + 1 {
            // Keeps the compiler from specializing a turn.
            let at = unknown(i);
            let (tokens, there) = self.set(at);
            let next = GateInputs::load::<B>(c, self.params, self.row, &tokens, there);
            if at == 0 && !self.live() {
                return false;
            }
            if at >= 1 {
                let set = set::<B>(at - 1);
                meeting::take_tokens::<B>(set);
                solver::solve::<B>(c, gates, set, count);
                meeting::leave_solution::<B>(set);
            }
            (gates, count) = (next, tokens.count);
            i += 1;
        }
        true
    }

    /// Whether a set is loaded while another one is computed. KDA, and narrow accesses, leave no registers for it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn loads_early<B: Block>(&self) -> bool {
        !B::PER_CHANNEL && self.c.wide_io != 0
    }

    /// Computes the previous sets. The state after them is written, and is in shared memory for the new tokens. Returns whether the row
    /// is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) unsafe fn work_sets<B: Block, const TILES16: usize>(&self) -> bool
    where
        A: Around<B, TILES16>,
    {
        let c = &self.c;
        let worker = Worker::<B, TILES16>::new(c, self.row.tile);
        let sets = sets_of(c.previous_tokens);
        // Number of turns between a set's loads and its computation: GDN's solver works meanwhile.
        let behind = if B::PER_CHANNEL { 1 } else { 2 };
        // SAFETY: the caller's promise; each part of the shared memory is written before the barrier that precedes its reads.
        unsafe {
            let slots = self.around.slots();
            let [start, write] = self.heads::<B, TILES16>();
            // 2 to 4 % faster for GDN at B = 256; 1 % slower for KDA.
            if !B::PER_CHANNEL {
                self.prefetch_new::<B>();
            }
            let is_early = self.loads_early::<B>();
            let mut inputs = Inputs::NONE;
            // Each turn loads a set, stores the previous one, and computes a stored one. Sets that are not loaded early are
            // loaded in the turn that stores them.
            let mut i = 0;
            while i < sets + behind {
                // Keeps the compiler from specializing a turn.
                let at = unknown(i);
                let loaded = if is_early { at } else { at.saturating_sub(1) };
                let (tokens, there) = self.set(loaded);
                let decay_inputs = if B::PER_CHANNEL {
                    Some(worker.load_decay_inputs(c, self.params, self.row, there))
                } else {
                    None
                };
                let next = worker.load_inputs(set::<B>(loaded), &tokens, there, false);
                if at == 0 && !self.live() {
                    return false;
                }
                if at == u32::from(is_early) {
                    if worker.widens {
                        B::State::copy_narrow(&worker, start, slots.is_fresh());
                        copy_async_commit();
                    } else {
                        worker.copy_state(start, slots.is_fresh());
                    }
                }
                let stored = if is_early { inputs } else { next };
                if at >= 1 && at <= sets {
                    let set = set::<B>(at - 1);
                    meeting::workers::<B>();
                    if let Some(decay_inputs) = &decay_inputs {
                        worker.prepare(self, set, &stored, decay_inputs, (true, false), false);
                    } else {
                        self.store_set(&worker, set, &stored);
                    }
                }
                inputs = next;
                if at >= behind {
                    let at = at - behind;
                    let is_last = at + 1 == sets;
                    let stays = !is_last || c.tokens != 0;
                    self.compute_set(&worker, at, (stays, is_last), write);
                }
                i += 1;
            }
        }
        true
    }

    /// Prefetches the new tokens into L2: they are loaded only after the previous ones.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn prefetch_new<B: Block>(&self) {
        let (tokens, width) = (&self.tokens, B::WARPS * B::ROWS);
        let runs = [
            (tokens.q, 0, B::K),
            (tokens.k, 0, B::K),
            (tokens.v, self.row.tile * width, width),
            (tokens.g, 0, 1),
        ];
        each!(i in 0..4 => {
            let (run, first, elements) = runs[i];
            let of_line = 128 / bytes_of(run.element());
            let lines = elements.div_ceil(of_line);
            let mut line = thread_idx_x();
            while line < tokens.count * lines {
                prefetch(run.at(line / lines, first + line % lines * of_line));
                line += 32 * B::WARPS;
            }
        });
    }

    /// Computes stored set `i`: the state after the set, which `stays` in shared memory for the next set, is written to `write`, or
    /// both.
    ///
    /// # Safety
    /// The head is a live state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn compute_set<B: Block, const TILES16: usize>(
        &self,
        worker: &Worker<B, TILES16>,
        i: u32,
        (stays, is_written): (bool, bool),
        write: Head,
    ) {
        let c = &self.c;
        let ((tokens, _), set) = (self.set(i), set::<B>(i));
        let element = match B::PER_CHANNEL {
            true => Element::F32 as u32,
            false => c.k_element,
        };
        let operand = |operand| Tokens8::new::<B>(operand, element, false);
        // SAFETY: the caller's promise.
        unsafe {
            if i == 0 && worker.widens {
                Worker::<B, TILES16>::wait_for_state();
                B::State::widen_rows(worker);
                sync_warp(FULL_MASK);
            }
            let key = operand(set.key());
            let fragments = unknown(Worker::<B, TILES16>::FRAGMENTS as u32) as usize;
            let sk = worker.key_products(key, fragments);
            meeting::take_solution::<B>(set);
            let residuals = worker.residuals(set, &sk, c.v_element);
            let keys = if B::PER_CHANNEL {
                operand(Operand::Step)
            } else {
                key
            };
            let moved = mask(tokens.count != 0);
            let advance = worker.advance_by(set, &residuals, keys, moved);
            let fragments = unknown(Worker::<B, TILES16>::FRAGMENTS as u32) as usize;
            each!(fragment in 0..fragments => {
                each!(tile in 0..TILES16 => {
                    let state = worker.state(tile, fragment);
                    let mut next =
                        Worker::<B, TILES16>::advance_fragment(&advance, tile, fragment, state);
                    if is_written && worker.widens {
                        next = B::State::rounded(worker, next);
                    }
                    if stays {
                        worker.leave_fragment(tile, fragment, next);
                    }
                    if is_written && worker.widens {
                        B::State::store_narrow(worker, write, (tile, fragment), next);
                    } else if is_written {
                        worker.store_fragment(write, tile, fragment, next);
                    }
                });
            });
        }
    }

    /// Stores a set of GDN's tokens, and hands them to the solver.
    ///
    /// # Safety
    /// Nobody still reads the previous set in these places.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_set<B: Block, const TILES16: usize>(
        &self,
        worker: &Worker<B, TILES16>,
        set: Set,
        inputs: &Inputs,
    ) {
        let c = &self.c;
        let (key, query) = (set.key(), set.query());
        // SAFETY: the caller's promise.
        unsafe {
            worker.store_tokens(c, key, inputs.keys, inputs.count);
            worker.store_tokens(c, query, inputs.queries, inputs.count);
            if Worker::<B, TILES16>::are_loaded_wild(c, set, inputs) {
                rarely();
                worker.tame_stored(c, set);
            }
            worker.store_values(set, inputs, c.v_element);
            meeting::workers::<B>();
            meeting::leave_tokens::<B>(set);
        }
    }
}
