//! What is before and after the recurrence of a block.

use super::RowStep;
use super::map::Block;
use super::worker::Worker;
use crate::recurrent::slots::Slots;
use crate::step::{StepConstants, StepParams};

/// Nothing ([`Plain`]), or a layer's convolution and norm ([`crate::layer`]'s). Workers call its functions in this order.
pub trait Around<B: Block, const TILES16: usize>: Sized {
    /// What a worker loads ahead of everything that waits, for k, q and v to be made of.
    type Drafts;
    /// What a worker loads to norm o with.
    type Scales;

    /// Of the states.
    fn slots(&self) -> &Slots;

    /// Whether the slots are there of all that is kept.
    fn live(&self, c: &StepConstants, params: &StepParams) -> bool;

    /// Whether k, q and v are made in shared memory, in f32, and not given.
    fn makes(c: &StepConstants) -> bool;

    unsafe fn load_drafts(step: &RowStep<'_, Self>) -> Self::Drafts;

    /// Waits for the blocks that this one sends to; the solver does too.
    fn meet(step: &RowStep<'_, Self>);

    unsafe fn load_scales(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>) -> Self::Scales;

    /// Of a row without tokens: what is kept besides states goes to where it is written. Workers call it, and nothing behind.
    ///
    /// # Safety
    /// The row is live.
    unsafe fn carry(step: &RowStep<'_, Self>);

    /// Where [`Self::makes`]: makes k, q and v, which are there after the next barrier of the workers.
    ///
    /// # Safety
    /// The row is live, and the blocks have met.
    unsafe fn make(step: &RowStep<'_, Self>, drafts: Self::Drafts);

    /// Whether any q or k that were made are [large](crate::math::range::LARGE) and are to be normalised. All lanes of the warp call
    /// it.
    ///
    /// # Safety
    /// The row is live, and they are there.
    unsafe fn has_made_large(step: &RowStep<'_, Self>) -> bool;

    /// Leaves once more what it has left of k of new token `t`, from a channel on: it is this now.
    ///
    /// # Safety
    /// The row is live, and the channels are this lane's, behind a barrier of the workers.
    unsafe fn leave_tame_key(step: &RowStep<'_, Self>, at: (u32, u32), k: [f32; 8]);

    /// o lies, in f32, in the place of the new tokens' values.
    ///
    /// # Safety
    /// The row is live.
    unsafe fn take_outputs(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>);

    /// The last thing that a worker does.
    ///
    /// # Safety
    /// The row is live.
    unsafe fn finish(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>, scales: Self::Scales);
}

/// q, k and v are given, and o is the recurrence's.
pub struct Plain(pub Slots);

impl<B: Block, const TILES16: usize> Around<B, TILES16> for Plain {
    type Drafts = ();
    type Scales = ();

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slots(&self) -> &Slots {
        &self.0
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn live(&self, c: &StepConstants, params: &StepParams) -> bool {
        self.0.live(c, params)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn makes(_: &StepConstants) -> bool {
        false
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_drafts(_: &RowStep<'_, Self>) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn meet(_: &RowStep<'_, Self>) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_scales(_: &RowStep<'_, Self>, _: &Worker<B, TILES16>) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn carry(_: &RowStep<'_, Self>) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn make(_: &RowStep<'_, Self>, (): ()) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn has_made_large(_: &RowStep<'_, Self>) -> bool {
        false
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave_tame_key(_: &RowStep<'_, Self>, _: (u32, u32), _: [f32; 8]) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn take_outputs(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>) {
        worker.store_outputs(step.tokens.o, step.c.o_element, step.tokens.count);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn finish(_: &RowStep<'_, Self>, _: &Worker<B, TILES16>, (): ()) {}
}
