//! Convolution and norm around the recurrence of a block.

use super::RowStep;
use super::map::{Block, Set};
use super::worker::Worker;
use crate::recurrent::slots::Slots;
use crate::step::{StepConstants, StepParams};

/// Convolution before the recurrence and norm after it: neither ([`Plain`]), or a layer's ([`crate::layer`]). Workers call these
/// functions in this order.
pub trait Around<B: Block, const TILES16: usize>: Sized {
    /// Registers that a worker loads before it waits for anything: x, windows and taps of its channels.
    type Drafts;
    /// z and weight of a worker's elements of o.
    type Scales;

    /// Whether a launch may have more than 8 new tokens ([`super::pair`]), and with f32 states more than 8 previous ones
    /// ([`super::sets`]). k, q and v are then given, and o is stored unchanged.
    const TAKES_PAIR: bool;

    /// The slots of the row's states.
    fn slots(&self) -> &Slots;

    /// Whether the row's slots of states and windows are live.
    fn live(&self, c: &StepConstants, params: &StepParams) -> bool;

    /// Whether the convolution computes k, q and v into shared memory, in f32, instead of loading them.
    fn makes(c: &StepConstants) -> bool;

    /// Loads the convolution's inputs.
    unsafe fn load_drafts(step: &RowStep<'_, Self>) -> Self::Drafts;

    /// Waits for the blocks to which this one sends; the solver calls it too.
    fn meet(step: &RowStep<'_, Self>);

    /// Loads z and the norm's weight.
    unsafe fn load_scales(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>) -> Self::Scales;

    /// Copies the windows of a row without tokens to the slot that is written. The last function that workers call.
    ///
    /// # Safety
    /// The row is live.
    unsafe fn carry(step: &RowStep<'_, Self>);

    /// If [`Self::makes`]: computes k, q and v; they are in shared memory after the next barrier of the workers.
    ///
    /// # Safety
    /// The row is live, and the blocks have met.
    unsafe fn make(step: &RowStep<'_, Self>, drafts: Self::Drafts);

    /// Whether any computed q or k is [large](crate::math::range::LARGE) and will be normalised. All lanes of the warp call it.
    ///
    /// # Safety
    /// The row is live, and q and k are in shared memory.
    unsafe fn has_made_large(step: &RowStep<'_, Self>) -> bool;

    /// Multiplies 8 channels of k of new token `at.0`, from channel `at.1` on, by a power of two, wherever [`Self::make`] stored them
    /// outside of shared memory.
    ///
    /// # Safety
    /// The row is live, the channels are this lane's, and a barrier of the workers has passed since [`Self::make`].
    unsafe fn scale_key(step: &RowStep<'_, Self>, at: (u32, u32), power: f32);

    /// Stores o, or the sums of its squares for the norm. o is in shared memory, in f32, in place of the new tokens' values.
    ///
    /// # Safety
    /// The row is live.
    unsafe fn take_outputs(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>);

    /// The last step of a worker.
    ///
    /// # Safety
    /// The row is live.
    unsafe fn finish(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>, scales: Self::Scales);
}

/// No convolution and no norm: q, k and v are given, and o is stored as the recurrence computes it.
pub struct Plain(pub Slots);

impl<B: Block, const TILES16: usize> Around<B, TILES16> for Plain {
    type Drafts = ();
    type Scales = ();

    const TAKES_PAIR: bool = true;

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
    unsafe fn scale_key(_: &RowStep<'_, Self>, _: (u32, u32), _: f32) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn take_outputs(step: &RowStep<'_, Self>, worker: &Worker<B, TILES16>) {
        worker.store_outputs(Set::New, step.tokens.o, step.c.o_element, step.tokens.count);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn finish(_: &RowStep<'_, Self>, _: &Worker<B, TILES16>, (): ()) {}
}
