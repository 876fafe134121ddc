//! GDN prefill: any number of tokens, in chunks of 64 on the tensor cores (sm_90a).
//!
//! Math     docs/prefill.md; prefill/prepare.rs (what does not depend on states), prefill/chain.rs (from state to state); a piece of one
//!          token as kernels/gdn_decode
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V], packed [1, total, ...]   pool [P, HV, V, K] (K-last), [P, HV, K, V] (V-last)
//! Grid     [`Prepare`] x = n · unit + ⌈HV/H / 2⌉ · h + r / 2, n of a unit; [`Chain`] x = tile + TILES r, y, z = b as GDN decode's
//! Threads  warpgroups; of a chain, each has 64 rows of the state
//!          with a convolution x [B, T, D] for q, k and v, and [`Windows`] behind all: x = 256 channels, z = b
//! Padding  an inactive row zeroes o and touches no state; a row without tokens touches nothing
//! Truth    reference::recurrent; kernels-gpu/tests/prefill.rs, tests/prefill.rs, tests/laws/prefill.rs

use core::marker::PhantomData;

use crate::constants::Element;
use crate::device::shared::dynamic_shared_mem;
use crate::device::thread::{block_idx_x, block_idx_z, thread_idx_x};
use crate::device::warp::lane_id;
use crate::launch::{Computes, Family, Kernel, Layout};
use crate::layer::Place;
use crate::math::reduce::butterfly_sum;
use crate::prefill::convolution::Inputs;
use crate::prefill::prepare::{self, Global, Makes, Place as _, Unit};
use crate::prefill::rows::Span;
use crate::prefill::{CHUNK, HEAD_BYTES, chain, image_bytes, values, windows};
use crate::row::{Row, value_head};
use crate::state::StateElement;
use crate::step::{PrefillParams, StepConstants};

/// The constants, of which those are 0 that a prefill does not have.
#[inline(always)]
fn constants() -> StepConstants {
    StepConstants {
        tokens: 0,
        previous_tokens: 0,
        token_index: 0,
        accepted_index: 0,
        has_snapshots: 0,
        has_window_snapshots: 0,
        ..StepConstants::get()
    }
}

/// What of units does not depend on states.
pub struct Prepare<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Prepare<K, V> {
    /// Shared memory: the image, later the scratch of both warpgroups; and the scales.
    const SCALES: u32 = if image_bytes(K) > 2 * prepare::SCRATCH_BYTES {
        image_bytes(K)
    } else {
        2 * prepare::SCRATCH_BYTES
    };
}

impl<const K: u32, const V: u32> Kernel for Prepare<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = prepare::THREADS;
    const TILES: u32 = 1;
    const SHARED_BYTES: u32 = Self::SCALES + prepare::SCALE_BYTES + 128;
    const WORKSPACE_BYTES: u32 = image_bytes(K);
    const WORKSPACE_BYTES_PER_HEAD: u32 = HEAD_BYTES;
    const WORKSPACE_BYTES_OF_VALUES: u32 = V / 64 * values::TILE_BYTES;
    const WARPGROUPS: bool = true;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::GdnPrefillPrepare,
        layout: Layout::KLast,
        state: Element::F32,
        k: K,
        v: V,
    });

    #[inline(always)]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let pairs = c.ratio.div_ceil(2);
        let of_unit = c.h * pairs;
        let (unit, of) = ((block_idx_x() / of_unit) as u64, block_idx_x() % of_unit);
        let (h, first) = (of / pairs, of % pairs * 2);
        let heads = if c.ratio.is_multiple_of(2) || first + 1 < c.ratio {
            2
        } else {
            1
        };
        // The warpgroup's value head.
        let r = first + if heads == 2 { thread_idx_x() / 128 } else { 0 };
        let hv = value_head(h, r, c.h, c.ratio, c.tiled != 0);
        let base = dynamic_shared_mem().next_multiple_of(128);
        // SAFETY: the caller's promise; a unit's operands are this block's to write, and at most one row has it.
        unsafe {
            let Some((span, j)) = row_of(&c, params, unit) else {
                return;
            };
            let piece = span.piece(j);
            let with = (&span, piece);
            let of_head = HEAD_BYTES + values::tiles_bytes(&c, V);
            let bytes = image_bytes(K) + of_head * c.ratio;
            let out = params.workspace + (unit * c.h as u64 + h as u64) * bytes as u64;
            let head = out + (image_bytes(K) + of_head * r) as u64;
            let mut inputs = Inputs::NONE;
            if c.taps != 0 {
                let place = Place::load(&c, &params.layer, span.b);
                if !place.live() {
                    return;
                }
                inputs = Inputs::new(&c, params, &place);
            }
            if c.makes_values() {
                let threads = prepare::THREADS / heads;
                let threads = (thread_idx_x() % threads, threads);
                let tiles = Global(head + HEAD_BYTES as u64);
                values::make(&c, params, (&span, piece, inputs), (hv, V), threads, tiles);
            }
            let at = (base, base, base + Self::SCALES);
            let (of, makes) = ((h, hv, inputs), Makes::of_thread(heads));
            let unit = Unit::new::<K>(&c, params, with, of, makes, at, |byte, words| {
                if first == 0 {
                    Global(out).store_b128(byte, words);
                }
            });
            unit.give_head::<K>(Global(head));
        }
    }
}

/// The row that a unit is of, and its piece. Each warp looks for itself.
#[inline(always)]
unsafe fn row_of(c: &StepConstants, params: &PrefillParams, unit: u64) -> Option<(Span, u32)> {
    if params.rows == 1 {
        // SAFETY: the caller's promise.
        let span = unsafe { Span::load(c, params, 0) };
        return span.piece_of(unit).map(|j| (span, j));
    }
    let mut first = 0;
    while first < params.rows {
        let b = first + lane_id();
        // A row and one: more than a grid has are exact in f32.
        let mut found = [0.0f32];
        if b < params.rows {
            // SAFETY: the caller's promise.
            let span = unsafe { Span::load(c, params, b) };
            if span.piece_of(unit).is_some() {
                found = [(b + 1) as f32];
            }
        }
        let [found] = butterfly_sum(found, 1, 32);
        if found != 0.0 {
            // SAFETY: as above.
            let span = unsafe { Span::load(c, params, found as u32 - 1) };
            return span.piece_of(unit).map(|j| (span, j));
        }
        first += 32;
    }
    None
}

/// From state to state, with what [`Prepare`] left in the workspace: a block has `64 · GROUPS` rows of a state.
pub struct Chain<S, const K: u32, const V: u32, const V_LAST: bool, const GROUPS: u32>(
    PhantomData<S>,
);

impl<S: StateElement, const K: u32, const V: u32, const V_LAST: bool, const GROUPS: u32> Kernel
    for Chain<S, K, V, V_LAST, GROUPS>
{
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = 128 * GROUPS;
    const TILES: u32 = V / (64 * GROUPS);
    const SHARED_BYTES: u32 = chain::shared_bytes(K, GROUPS);
    const WARPGROUPS: bool = true;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::GdnPrefillChain,
        layout: if V_LAST { Layout::VLast } else { Layout::KLast },
        state: S::ELEMENT,
        k: K,
        v: V,
    });

    #[inline(always)]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        // A norm is for who has all of a head: the host's duty.
        if c.has_norm != 0 && Self::TILES > 1 {
            return;
        }
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
        // SAFETY: the caller's promise.
        unsafe {
            let span = Span::load(&c, params, row.b);
            if span.count == 0 {
                return;
            }
            let place = Place::load(&c, &params.layer, row.b);
            let chain = chain::Chain::<K, V, V_LAST, GROUPS> {
                c: &c,
                params,
                row,
                span,
                inputs: Inputs::new(&c, params, &place),
            };
            if place.live() {
                chain.walk::<S>(&place);
            } else {
                chain.store_zeros();
            }
        }
    }
}

/// Rows of at most 64 tokens: both in one, without a workspace. A block has all of a head, `GROUPS` · 64 rows of its state.
pub struct Short<S, const K: u32, const V: u32, const V_LAST: bool, const GROUPS: u32>(
    PhantomData<S>,
);

impl<S: StateElement, const K: u32, const V: u32, const V_LAST: bool, const GROUPS: u32> Kernel
    for Short<S, K, V, V_LAST, GROUPS>
{
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = prepare::THREADS;
    const TILES: u32 = V / (64 * GROUPS);
    const SHARED_BYTES: u32 =
        chain::shared_bytes(K, GROUPS) + prepare::SCRATCH_BYTES + prepare::SCALE_BYTES;
    const WARPGROUPS: bool = true;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::GdnPrefillShort,
        layout: if V_LAST { Layout::VLast } else { Layout::KLast },
        state: S::ELEMENT,
        k: K,
        v: V,
    });

    #[inline(always)]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, Self::TILES);
        let scratch = dynamic_shared_mem() + chain::shared_bytes(K, GROUPS);
        // SAFETY: the caller's promise.
        unsafe {
            let span = Span::load(&c, params, row.b);
            if span.count == 0 || span.count > CHUNK {
                return;
            }
            let place = Place::load(&c, &params.layer, row.b);
            let chain = chain::Chain::<K, V, V_LAST, GROUPS> {
                c: &c,
                params,
                row,
                span,
                inputs: Inputs::new(&c, params, &place),
            };
            if place.live() {
                chain.walk_short::<S>(&place, scratch);
            } else if thread_idx_x() < 128 * GROUPS {
                chain.store_zeros();
            }
        }
    }
}

/// The windows that rows leave, and those of their checkpoints: behind all that read them. A thread has a channel.
pub struct Windows<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Windows<K, V> {
    type Params = PrefillParams;
    type Constants = StepConstants;
    const BLOCK: u32 = 256;
    const TILES: u32 = 1;
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::GdnPrefillWindows,
        layout: Layout::KLast,
        state: Element::F32,
        k: K,
        v: V,
    });

    #[inline(always)]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let channel = block_idx_x() * Self::BLOCK + thread_idx_x();
        if c.taps < 2 || channel >= 2 * c.h * K + c.h * c.ratio * V {
            return;
        }
        // SAFETY: the caller's promise; a thread has a channel of a row.
        unsafe {
            let span = Span::load(&c, params, block_idx_z());
            if span.count == 0 {
                return;
            }
            let place = Place::load(&c, &params.layer, span.b);
            if place.live() {
                windows::store(&c, params, &span, &place, channel);
            }
        }
    }
}
