//! Drafts on K-last states that wait, with a convolution before and a norm after them: [`super::Parallel`]'s steps with what
//! is around [`crate::layer::Parallel`]'s.
//!
//! A token leaves x, and k as the convolution made it, by the threads that have its channels. The window of a slot waits as its
//! state does: a step begins with the last inputs of the pending tokens, behind those of the window where there are too few, and a
//! row that folds, or is fresh, writes this as its window.

use core::marker::PhantomData;

use super::parallel::run;
use crate::launch::{Description, Family, Kernel};
use crate::layer::{Layer, MOST_BLOCKS, Rings};
use crate::pending::{InputRing, Pending, Ring};
use crate::recurrent::Gating;
use crate::recurrent::parallel::description;
use crate::recurrent::parallel::map::Block;
use crate::row::Row;
use crate::state::B16;
use crate::step::{DeferredParams, StepConstants};

/// As [`super::Parallel`], in clusters of up to 8 blocks: of all tiles of all value heads of a query/key head.
pub struct LayerParallel<G, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize>(
    PhantomData<G>,
);

impl<G: Gating, const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> Block
    for LayerParallel<G, K, V, WARPS, TILES16>
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
    for LayerParallel<G, K, V, WARPS, TILES16>
{
    type Params = DeferredParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = {
        let family = Family::PARALLEL.in_layer().on_deferred();
        let of_block = description::<Self>(family, Layer::<Self, Rings, true>::BYTES);
        Description {
            cluster: Self::TILES,
            cluster_of_heads: true,
            max_ratio: MOST_BLOCKS / Self::TILES,
            // With 32 rows of a warp 168 registers are too few by one, of views that are not aligned.
            min_blocks_per_sm: if TILES16 == 2 {
                1
            } else {
                of_block.min_blocks_per_sm
            },
            ..of_block
        }
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &DeferredParams) {
        let c = StepConstants::get();
        let row = Row::of_head_block(c.h, c.ratio, c.tiled != 0);
        // SAFETY: the caller's promise; the mailboxes are nothing else's.
        unsafe {
            // Nothing but a fold writes a window.
            let inner = StepConstants {
                update_state: 0,
                token_index: 0,
                has_window_snapshots: 0,
                ..c
            };
            run::<Self, _, TILES16>(inner, params, row, || {
                let mut pending = Pending::load(&c, params, row.b);
                let folds = pending.folds(&c);
                let rings = Rings {
                    inputs: InputRing::new(&c, params, &pending, [K, V], folds),
                    keys: Ring::of(
                        &c,
                        params,
                        pending,
                        row,
                        [K, V],
                        (c.updates_element, G::PER_CHANNEL),
                    ),
                };
                let layer = Layer::<Self, Rings, true>::new(&c, &params.layer, row, rings);
                pending.live &= layer.is_live();
                layer.open_mailboxes(&c);
                (pending, folds, layer)
            });
        }
    }
}
