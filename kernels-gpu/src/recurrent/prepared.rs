//! Tokens that a block has prepared in its shared memory, for the kernels that go token by token. Of each, in bytes:
//!
//! | from | bytes | what |
//! |---|---|---|
//! | 0 | 4 K | k, f32 |
//! | `Q` | 4 K | q |
//! | `DECAY` | 4 K | KDA: α of every channel |
//! | `VALUES` | 4 · TILE | v of the block's part of a state |
//! | `FACTORS` | 20 | [`Factors`]; their α is GDN's |
//! | `SLOT` | 8 | where the state after it goes besides, where there are token slots |

use crate::device::shared::{
    dynamic_shared_mem, load_shared_b32, load_shared_b64, load_shared_b128, store_shared_b32,
    store_shared_b64, store_shared_b128,
};
use crate::math::delta_rule::Factors;
use crate::step::StepConstants;

/// Where a block's prepared tokens lie, and the moves of what all kernels move alike. How channels lie is a kernel's own.
pub trait Prepared {
    /// KDA: one decay per key channel; GDN: one per value head.
    const PER_CHANNEL: bool;
    const K: u32;
    /// Elements of v of a block.
    const TILE: u32;
    /// First token.
    const TOKENS: u32;

    const Q: u32 = Self::K * 4;
    const DECAY: u32 = 2 * Self::Q;
    const VALUES: u32 = Self::DECAY + if Self::PER_CHANNEL { Self::Q } else { 0 };
    const FACTORS: u32 = Self::VALUES + Self::TILE * 4;
    const SLOT: u32 = Self::FACTORS + 24;
    const TOKEN_BYTES: u32 = Self::FACTORS + 32;

    /// Shared memory of prepared token `i`.
    #[inline(always)]
    fn token(i: u32) -> u32 {
        dynamic_shared_mem() + Self::TOKENS + i * Self::TOKEN_BYTES
    }

    /// By one lane.
    ///
    /// # Safety
    /// The token at `smem` is this lane's to write.
    #[inline(always)]
    unsafe fn store_factors(c: &StepConstants, smem: u32, f: Factors, slot: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            let four = [f.decay, f.beta, f.k, f.q].map(f32::to_bits);
            store_shared_b128(smem + Self::FACTORS, four);
            store_shared_b32(smem + Self::FACTORS + 16, f.kq.to_bits());
            if c.token_index != 0 {
                store_shared_b64(smem + Self::SLOT, [slot as u32, (slot >> 32) as u32]);
            }
        }
    }

    /// # Safety
    /// The token at `smem` is prepared.
    #[inline(always)]
    unsafe fn factors(smem: u32) -> Factors {
        // SAFETY: the caller's promise.
        let ([decay, beta, k, q], kq) = unsafe {
            (
                load_shared_b128(smem + Self::FACTORS).map(f32::from_bits),
                f32::from_bits(load_shared_b32(smem + Self::FACTORS + 16)),
            )
        };
        Factors {
            decay: if Self::PER_CHANNEL { 1.0 } else { decay },
            beta,
            k,
            q,
            kq,
        }
    }

    /// Where the state after it goes besides; any number where there are no token slots.
    ///
    /// # Safety
    /// The token at `smem` is prepared.
    #[inline(always)]
    unsafe fn slot(c: &StepConstants, smem: u32) -> u64 {
        if c.token_index == 0 {
            return 0;
        }
        // SAFETY: the caller's promise.
        let [low, high] = unsafe { load_shared_b64(smem + Self::SLOT) };
        low as u64 | (high as u64) << 32
    }
}
