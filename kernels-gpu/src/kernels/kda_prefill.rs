//! KDA prefill: any number of tokens, in chunks of 64 on the tensor cores, with a decay of every key channel.
//!
//! Math     docs/prefill.md; prefill/channels.rs (what does not depend on states), prefill/chain (from state to state); a chunk of
//!          one token as kernels/kda_recurrent
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   g [B, T, HV, K], packed [1, total, ...]   pool [P, HV, V, K] or [P, HV, K, V]
//! Grid     [`Prepare`] x = n · unit + HV/H · h + r, n of a unit; [`Chain`] x = tile + TILES r, y, z = b as a decode's
//! Machine  [`Chain`] by [`Hopper`](crate::prefill::chain::machine::Hopper) and [`Short`] compute capability 9.0 alone (sm_90a); all
//!          others, [`Chain`] by [`Portable`](crate::prefill::chain::machine::Portable) too, 8.0 and newer
//! Threads  warpgroups; of a chain, each but the last, which copies, has 64 rows of the state; of an intra-chunk pass, a warp has 8 tokens
//!          with a convolution x [B, T, D] for q, k and v, and with it or a norm a last launch behind all
//! Padding  an inactive row zeroes o and touches no state; a row without tokens carries its state to where it writes; o of packed
//!          tokens that are no row's is zero
//! Truth    reference::recurrent; kernels-gpu/tests/prefill.rs, tests/cpu/prefill.rs, tests/cpu/laws

use crate::device::overlap::let_next_begin;
use crate::device::shared::dynamic_shared_mem;
use crate::device::thread::{block_idx_x, thread_idx_x};
use crate::launch::{Computes, Description, Family, Kernel, Shared, Stage, Workspace};
use crate::layer::Place;
use crate::prefill::convolution::ConvInputs;
use crate::prefill::kernels::end_behind_chain;
pub use crate::prefill::kernels::{Chain, Short};
use crate::prefill::load::{Convolved, THREADS};
use crate::prefill::norm;
use crate::prefill::operands::GlobalSink;
use crate::prefill::rows::row_at;
use crate::prefill::values::{self, Channels};
use crate::prefill::workspace::Operands;
use crate::prefill::{self, channels, head_bytes, images_bytes};
use crate::row::{Row, value_head};
use crate::step::{PrefillParams, StepConstants};

/// The intra-chunk pass: the operands of units, which do not depend on states. A block has a unit of one value head.
pub struct Prepare<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Prepare<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        min_blocks_per_sm: 2,
        shared: Shared::of_block(
            channels::words_bytes(K) + channels::room_bytes(K) + channels::SCALE_BYTES + 128,
        ),
        workspace: Workspace {
            per_head: images_bytes(K, true) + head_bytes(K, true),
            of_values: V / 64 * values::TILE_BYTES,
            of_norm: prefill::norm::scales_bytes(V),
            ..Workspace::NONE
        },
        ..Description::of(
            THREADS,
            Computes::new(Family::chunked(Stage::Prepare), Some(true), [K, V]),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &PrefillParams) {
        // The chain begins with what it has in the pool.
        let_next_begin();
        // SAFETY: the caller's promise.
        unsafe { Self::make(params) };
        end_behind_chain(params);
    }
}

impl<const K: u32, const V: u32> Prepare<K, V> {
    /// Makes the operands of the block's unit.
    ///
    /// # Safety
    /// As [`Kernel::run`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn make(params: &PrefillParams) {
        let c = prefill::kernels::constants();
        let of_unit = c.h * c.ratio;
        let unit = (params.first_chunk + block_idx_x() / of_unit) as u64;
        let of = block_idx_x() % of_unit;
        let (h, r) = (of / c.ratio, of % c.ratio);
        let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
        let base = dynamic_shared_mem().next_multiple_of(128);
        // SAFETY: the caller's promise; a unit's operands are this block's to write.
        unsafe {
            let Some((span, j)) = row_at(&c, params, unit) else {
                return;
            };
            let with = (&span, span.chunk(j));
            let operands = Operands::new::<K, V>(&c, params, true, unit, (h, r));
            if c.taps != 0 {
                if !Place::load(&c, &params.layer, span.b).live() {
                    return;
                }
            } else if c.makes_values() {
                let (with, threads) = (
                    (with.0, with.1, ConvInputs::NONE),
                    (thread_idx_x(), THREADS),
                );
                let (of, tiles) = (Channels::of_head(hv), GlobalSink(operands.values));
                values::make::<K, V, V>(&c, params, with, of, threads, tiles);
            }
            norm::begin::<V>(&c, operands.scales, thread_idx_x());
            let row = Row {
                b: span.b,
                h,
                hv,
                tile: 0,
            };
            let room = base + channels::words_bytes(K);
            let at = (base, room, room + channels::room_bytes(K));
            let to = (GlobalSink(operands.images), GlobalSink(operands.head));
            let convolved = Convolved::Before(operands);
            channels::give::<K>((&c, params), with, (row, convolved), at, to.0, to.1);
        }
    }
}
