//! Tokens that a block has prepared in its shared memory, for the kernels that go token by token. Layout of a token, in bytes:
//!
//! | from | bytes | content |
//! |---|---|---|
//! | 0 | 4 K | k, f32 |
//! | `Q` | 4 K | q |
//! | `VALUES` | 4 · TILE | v of the block's part of a state |
//! | `FACTORS` | 20 | [`Factors`], with GDN's α |
//! | `SLOT` | 8 | with token slots: destination of the state after the token |
//! | `DECAY` | 4 K | KDA: α of every channel |

use super::tokens::Decays;
use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, load_shared_b128, store_shared_b32,
    store_shared_b64, store_shared_b128,
};
use crate::launch::{Computes, Description, Family, Layout, Shared};
use crate::math::delta_rule::Factors;
use crate::state::StateElement;
use crate::step::StepConstants;

/// Addresses of a block's prepared tokens, and the loads and stores that all kernels share. Each kernel has its own order of
/// channels.
pub trait Prepared {
    /// One decay per key channel (KDA) or per value head (GDN).
    type Decays: Decays;
    const K: u32;
    /// Elements of v of a block.
    const TILE: u32;
    /// Byte offset of the first token.
    const TOKENS: u32;

    const Q: u32 = Self::K * 4;
    const VALUES: u32 = 2 * Self::Q;
    const FACTORS: u32 = Self::VALUES + Self::TILE * 4;
    const SLOT: u32 = Self::FACTORS + 24;
    const DECAY: u32 = Self::FACTORS + 32;
    /// Bytes of a token with one decay.
    const TOKEN_BYTES: u32 = Self::DECAY;
    /// Additional bytes of a token with one decay per key channel.
    const DECAY_BYTES: u32 = bytes_of_channels::<Self::Decays>(Self::Q);

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn token_bytes(c: &StepConstants) -> u32 {
        if Self::Decays::per_channel(c) {
            Self::TOKEN_BYTES + Self::DECAY_BYTES
        } else {
            Self::TOKEN_BYTES
        }
    }

    /// Address in shared memory of prepared token `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn token(c: &StepConstants, i: u32) -> u32 {
        dynamic_shared_mem() + Self::TOKENS + i * Self::token_bytes(c)
    }

    /// Stores factors and token slot. One lane calls it.
    ///
    /// # Safety
    /// Only this lane writes the token at `smem`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_factors(c: &StepConstants, smem: u32, f: Factors, slot: u64) {
        store_factors(smem + Self::FACTORS, f);
        store_slot(c, smem + Self::SLOT, slot);
    }

    /// # Safety
    /// The token at `smem` is prepared.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn factors(c: &StepConstants, smem: u32) -> Factors {
        load_factors(smem + Self::FACTORS, Self::Decays::per_channel(c))
    }

    /// The token slot for the state after the token; an arbitrary number without token slots.
    ///
    /// # Safety
    /// The token at `smem` is prepared.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn slot(c: &StepConstants, smem: u32) -> u64 {
        load_slot(c, smem + Self::SLOT)
    }
}

/// The description of a kernel whose blocks of `threads` threads prepare tokens, for states of `S` with head dim `v`.
pub const fn description<W: Prepared, S: StateElement>(
    layout: Layout,
    threads: u32,
    v: u32,
) -> Description {
    let computes = Computes::new(Family::RECURRENT, W::Decays::OF_CHANNELS, [W::K, v]);
    Description {
        tiles: v / W::TILE,
        shared_of_channels: Shared {
            per_token: W::DECAY_BYTES,
            ..Shared::NONE
        },
        shared: Shared {
            block: W::TOKENS,
            per_token: W::TOKEN_BYTES,
            ..Shared::NONE
        },
        ..Description::of(threads, computes.on(layout, S::ELEMENT))
    }
}

/// `bytes` for kernels that may have one decay per key channel; otherwise 0.
pub const fn bytes_of_channels<D: Decays>(bytes: u32) -> u32 {
    match D::OF_CHANNELS {
        Some(false) => 0,
        _ => bytes,
    }
}

/// Number of bytes that [`store_factors`] writes.
pub const FACTOR_BYTES: u32 = 20;

/// # Safety
/// Only this thread writes the bytes at `smem`, which is a multiple of 16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_factors(smem: u32, f: Factors) {
    store_shared_b128(smem, [f.decay, f.beta, f.k, f.q].map(f32::to_bits));
    store_shared_b32(smem + 16, f.kq.to_bits());
}

/// Loads the factors that [`store_factors`] stored; α is 1 for KDA, whose decay is per channel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_factors(smem: u32, per_channel: bool) -> Factors {
    let ([decay, beta, k, q], kq) = (
        load_shared_b128(smem).map(f32::from_bits),
        f32::from_bits(load_shared_b32(smem + 16)),
    );
    Factors {
        decay: if per_channel { 1.0 } else { decay },
        beta,
        k,
        q,
        kq,
    }
}

/// Loads the factors of k and q that [`store_factors`] stored.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_key_and_query(smem: u32) -> [f32; 2] {
    load_shared_b64(smem + 8).map(f32::from_bits)
}

/// Stores a token's slot, if the step has token slots.
///
/// # Safety
/// Only this thread writes the 8 bytes at `smem`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_slot(c: &StepConstants, smem: u32, slot: u64) {
    if c.token_index != 0 {
        store_shared_b64(smem, [slot as u32, (slot >> 32) as u32]);
    }
}

/// Loads the slot that [`store_slot`] stored; 0 without token slots.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_slot(c: &StepConstants, smem: u32) -> u64 {
    if c.token_index == 0 {
        return 0;
    }
    let [low, high] = load_shared_b64(smem);
    low as u64 | (high as u64) << 32
}
