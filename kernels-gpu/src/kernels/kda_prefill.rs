//! KDA prefill: any number of tokens, in chunks of 64 on the tensor cores, with a decay of every key channel.
//!
//! Math     docs/prefill.md; prefill/channels.rs (what does not depend on states), prefill/chain (from state to state); a piece of
//!          one token as kernels/kda_recurrent
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   g [B, T, HV, K], packed [1, total, ...]   pool [P, HV, V, K] or [P, HV, K, V]
//! Grid     [`Prepare`] x = n · unit + HV/H · h + r, n of a unit; [`Chain`] x = tile + TILES r, y, z = b as a decode's
//! Machine  [`Chain`] and [`Short`] compute capability 9.0 alone (sm_90a); [`PortableChain`] and all others 8.0 and newer
//! Threads  warpgroups; of a chain, each but the last, which copies, has 64 rows of the state; of a preparation, a warp has 8 tokens
//!          with a convolution x [B, T, D] for q, k and v, and with it or a norm a last launch behind all
//! Padding  an inactive row zeroes o and touches no state; a row without tokens carries its state to where it writes; o of packed
//!          tokens that are no row's is zero
//! Truth    reference::recurrent; kernels-gpu/tests/prefill.rs, tests/prefill.rs, tests/laws/prefill.rs

use super::kda_recurrent::PerChannel;
use crate::device::overlap::let_next_begin;
use crate::device::shared::dynamic_shared_mem;
use crate::device::thread::{block_idx_x, thread_idx_x};
use crate::launch::{Computes, Family, Kernel};
use crate::layer::Place;
use crate::prefill::chain::machine::{Hopper, Portable};
use crate::prefill::convolution::Inputs;
use crate::prefill::kernels::end_behind_chain;
use crate::prefill::load::{Convolved, THREADS};
use crate::prefill::norm;
use crate::prefill::operands::Global;
use crate::prefill::rows::row_at;
use crate::prefill::values::{self, Channels};
use crate::prefill::workspace::Operands;
use crate::prefill::{self, channels, head_bytes, images_bytes};
use crate::row::{Row, value_head};
use crate::step::{PrefillParams, StepConstants};

/// From state to state, with what [`Prepare`] left in the workspace.
pub type Chain<const K: u32, const V: u32, const GROUPS: u32> =
    prefill::kernels::Chain<PerChannel, Hopper, K, V, GROUPS>;

/// The same on every machine: a block has 64 rows of a state.
pub type PortableChain<const K: u32, const V: u32> =
    prefill::kernels::Chain<PerChannel, Portable, K, V, 1>;

/// Rows of at most 64 tokens: both in one, without a workspace.
pub type Short<const K: u32, const V: u32, const GROUPS: u32> =
    prefill::kernels::Short<PerChannel, K, V, GROUPS>;

/// What of units does not depend on states. A block has one of a value head.
pub struct Prepare<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Prepare<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = THREADS;
    const TILES: u32 = 1;
    const MIN_BLOCKS_PER_SM: u32 = 2;
    const SHARED_BYTES: u32 =
        channels::words_bytes(K) + channels::room_bytes(K) + channels::SCALE_BYTES + 128;
    const WORKSPACE_BYTES_PER_HEAD: u32 = images_bytes(K, true) + head_bytes(K, true);
    const WORKSPACE_BYTES_OF_VALUES: u32 = V / 64 * values::TILE_BYTES;
    const WORKSPACE_BYTES_OF_NORM: u32 = prefill::norm::scales_bytes(V);
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::KdaPrefillPrepare,
        per_channel: Some(true),
        states: None,
        k: K,
        v: V,
    });

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
    /// What the block makes of its unit.
    ///
    /// # Safety
    /// As [`Kernel::run`]'s.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn make(params: &PrefillParams) {
        let c = prefill::kernels::constants();
        let of_unit = c.h * c.ratio;
        let unit = (params.first_piece + block_idx_x() / of_unit) as u64;
        let of = block_idx_x() % of_unit;
        let (h, r) = (of / c.ratio, of % c.ratio);
        let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
        let base = dynamic_shared_mem().next_multiple_of(128);
        // SAFETY: the caller's promise; a unit's operands are this block's to write.
        unsafe {
            let Some((span, j)) = row_at(&c, params, unit) else {
                return;
            };
            let with = (&span, span.piece(j));
            let operands = Operands::new::<K, V>(&c, params, true, unit, (h, r));
            if c.taps != 0 {
                if !Place::load(&c, &params.layer, span.b).live() {
                    return;
                }
            } else if c.makes_values() {
                let (with, threads) = ((with.0, with.1, Inputs::NONE), (thread_idx_x(), THREADS));
                let (of, tiles) = (Channels::of_head(hv), Global(operands.values));
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
            let to = (Global(operands.images), Global(operands.head));
            let convolved = Convolved::Before(operands);
            channels::give::<K>((&c, params), with, (row, convolved), at, to.0, to.1);
        }
    }
}
