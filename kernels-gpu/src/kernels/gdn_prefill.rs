//! GDN prefill: any number of tokens, in chunks of 64 on the tensor cores.
//!
//! Math     docs/prefill.md; prefill/prepare.rs (what does not depend on states), prefill/chain (from state to state); a chunk of one
//!          token as kernels/recurrent
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V], packed [1, total, ...]   pool [P, HV, V, K] (K-last), [P, HV, K, V] (V-last)
//! Grid     [`Prepare`] x = n · unit + ⌈HV/H / 2⌉ · h + r / 2, n of a unit; [`Chain`] x = tile + TILES r, y, z = b as GDN decode's;
//!          [`Short`] the same, or x = r / 2; the others in kernels/prefill.rs
//! Machine  [`Chain`] by [`Hopper`](crate::prefill::chain::machine::Hopper) and [`Short`] compute capability 9.0 alone (sm_90a); all
//!          others, [`Chain`] by [`Portable`](crate::prefill::chain::machine::Portable) too, 8.0 and newer
//! Threads  warpgroups; of a chain, each but the last, which copies, has 64 rows of the state
//!          with a convolution x [B, T, D] for q, k and v, and with it or a norm a last launch behind all
//! Padding  an inactive row zeroes o and touches no state; a row without tokens carries its state to where it writes; o of packed
//!          tokens that are no row's is zero
//! Truth    reference::recurrent; kernels-gpu/tests/prefill.rs, tests/cpu/prefill.rs, tests/cpu/laws

use crate::device::overlap::let_next_begin;
use crate::device::shared::{COUNTER_BYTES, dynamic_shared_mem};
use crate::device::thread::{block_idx_x, thread_idx_x};
use crate::launch::{Computes, Description, Family, Kernel, Shared, Stage, Workspace};
use crate::layer::Place;
use crate::math::power::divided;
use crate::prefill::convolution::ConvInputs;
use crate::prefill::kernels::end_behind_chain;
pub use crate::prefill::kernels::{Chain, Short};
use crate::prefill::load::THREADS;
use crate::prefill::norm;
use crate::prefill::operands::GlobalSink;
use crate::prefill::prepare::{self, Unit};
use crate::prefill::rows::row_of;
use crate::prefill::solve::SCRATCH_BYTES;
use crate::prefill::values::{self, Channels};
use crate::prefill::workspace::{Operands, own_bytes};
use crate::prefill::{self, head_bytes, image_bytes};
use crate::row::value_head;
use crate::step::{PrefillParams, StepConstants};

/// The intra-chunk pass: the operands of units, which do not depend on states.
pub struct Prepare<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Prepare<K, V> {
    /// Shared memory: the image, later the scratch of both warpgroups; and the scales.
    const SCALES: u32 = if image_bytes(K) > 2 * SCRATCH_BYTES {
        image_bytes(K)
    } else {
        2 * SCRATCH_BYTES
    };
}

impl<const K: u32, const V: u32> Kernel for Prepare<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        min_blocks_per_sm: 3,
        shared: Shared::of_block(Self::SCALES + prepare::SCALE_BYTES + COUNTER_BYTES + 128),
        workspace: Workspace {
            per_key_head: image_bytes(K),
            per_head: head_bytes(K, false),
            of_values: V / 64 * values::TILE_BYTES,
            of_norm: prefill::norm::scales_bytes(V),
        },
        ..Description::of(
            THREADS,
            Computes::new(Family::chunked(Stage::Prepare), Some(false), [K, V]),
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
        let pairs = c.ratio.div_ceil(2);
        let of_unit = c.h * pairs;
        let (unit, of) = divided(block_idx_x(), of_unit);
        let n = params.first_chunk + unit;
        let (h, first) = match pairs {
            1 => (of, 0),
            _ => (of / pairs, of % pairs * 2),
        };
        let heads = if c.ratio.is_multiple_of(2) || first + 1 < c.ratio {
            2
        } else {
            1
        };
        // The warpgroup's value head.
        let r = first + if heads == 2 { thread_idx_x() / 128 } else { 0 };
        let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
        let base = dynamic_shared_mem().next_multiple_of(128);
        // SAFETY: the caller's promise; a unit's operands are this block's to write.
        unsafe {
            let Some((span, j)) = row_of::<false>(&c, params, n) else {
                return;
            };
            // There is no memory for so many as are no u32; and fewer registers than were good.
            let number = span.unit(j) as u32 * c.h + h;
            let chunk = span.chunk(j);
            let with = (&span, chunk);
            let of = |r| Operands::of_head::<K, V>(&c, params, false, (number as u64, r));
            let at = (base, base, base + Self::SCALES);
            let made = if c.taps != 0 {
                if !Place::load(&c, &params.layer, span.b).live() {
                    return;
                }
                // The factors of its first value head are the block's to overwrite.
                Unit::of_convolved::<K>(&c, params, with, hv, heads, at, of(first))
            } else {
                if c.makes_values() {
                    let threads = THREADS / heads;
                    let threads = (thread_idx_x() % threads, threads);
                    let with = (&span, chunk, ConvInputs::NONE);
                    let channels = Channels::of_head(hv);
                    let out = GlobalSink(of(r).values);
                    values::make::<K, V, V>(&c, params, with, channels, threads, out);
                }
                let of_block = (h, hv, ConvInputs::NONE);
                Unit::new::<K>(&c, params, with, of_block, heads, at)
            };
            norm::begin::<V>(&c, of(r).scales, thread_idx_x() % (THREADS / heads));
            let of_first = of(first);
            if c.taps == 0 && first == 0 {
                made.give_image::<K>(&c, of_first.images);
            }
            made.give_heads::<K>(&c, GlobalSink(of_first.head), own_bytes(&c, K, V, false));
        }
    }
}
