//! Drafts on K-last deferred states, with a convolution before them and a norm after them: the steps of [`super::Parallel`], with
//! the convolution and the norm of [`crate::layer::Parallel`].
//!
//! The threads that have a token's channels store its x in the ring, and k as the convolution computes it. A slot's window is
//! deferred like its state: the convolution of the new tokens starts from the last inputs of the pending tokens and, if these are
//! too few, of the window before them. A row that is flushed, or fresh, writes these inputs as its window.

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

/// Like [`super::Parallel`], in clusters of up to 8 blocks: all tiles of all value heads of a query/key head.
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
            // With 32 rows per warp, 168 registers would be one too few for views that are not aligned.
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
        // SAFETY: the caller's promise; the mailboxes' memory has no other use.
        unsafe {
            // Only a row that is flushed or fresh writes a window.
            let inner = StepConstants {
                update_state: 0,
                token_index: 0,
                has_window_snapshots: 0,
                ..c
            };
            run::<Self, _, TILES16>(inner, params, row, || {
                let mut pending = Pending::load(&c, params, row.b);
                let flushes = pending.flushes(&c);
                let rings = Rings {
                    inputs: InputRing::new(&c, params, &pending, [K, V], flushes),
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
                (pending, flushes, layer)
            });
        }
    }
}
