//! GDN decode: one token per sequence, read and write of every state once.
//!
//! Per value head hv with query/key head h and state S: [V, K] (Gated DeltaNet, arXiv 2412.06464):
//!     k̂ = k rsqrt(Σk² + 1e-6)    q̂ = q rsqrt(Σq² + 1e-6) scale    (1)
//!     S ← α S                                                     (2) decay
//!     δ = β (v − S k̂)                                             (3) from the decayed S
//!     S ← S + δ k̂ᵀ                                                (4)
//!     o = S q̂                                                     (5) from the written S
//! Both products are taken from the loaded S with the raw k and q, so that no load waits for another and
//! one reduction serves all: S k̂ = α rk (S k), o = α rq (S q) + δ (k̂·q̂) with rk, rq the factors of (1).
//!
//! Shapes   q, k [B, 1, H, K]   v, o [B, 1, HV, V]   pool [P, HV, V, K] (K-last), [P, HV, K, V] (V-last)
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  K-last: block = groups of K/8 lanes; a group owns whole rows (one v), a lane 8 channels
//!          V-last: block = groups of LANES lanes; a group owns ROWS rows (one k each), a lane 8 columns, and
//!          a thread of some warps a column
//! Padding  an inactive row zeroes o and touches no state
//! Range    NaN from finite inputs only where Σk², Σq², S k or S q of the raw k and q leaves f32 (|k|, |q| up to 10¹⁸ never
//!          square out of it), whatever the gates; a NaN among the inputs is never dropped
//! Cost     2 · V · K · size_of(S) bytes per (b, hv): memory-bound
//! Truth    reference::gdn::decode; tests/gdn_decode.rs

mod klast;
mod row;
mod vlast;

pub use klast::KLast;
pub use vlast::VLast;
