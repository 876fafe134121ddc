//! Token by token, of GDN and of KDA: which of the two is a load-time constant, `per_channel`.
//!
//! Per value head hv with query/key head h and state S: [V, K], for each token:
//!     k̂ = k rsqrt(Σk² + 1e-6)    q̂ = q rsqrt(Σq² + 1e-6) scale    (1)
//!     S ← S diag(α)                                               (2) decay: KDA's of each key channel, GDN's α of the head
//!     δ = β (v − S k̂)                                             (3) from the decayed S
//!     S ← S + δ k̂ᵀ                                                (4)
//!     o = S q̂                                                     (5) from the written S
//! Both products are taken with the raw k and q in one reduction: S k̂ = rk (S k), o = rq (S q) + δ (k̂·q̂) with rk, rq the
//! factors of (1); of GDN from S as it was, times α, of KDA from the decayed S. S stays f32 between tokens.
//!
//! Modes    verify, update, commit and resume, as of [`super::gdn_mtp`]
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   b [B, T, HV]   g [B, T, HV], of KDA [B, T, HV, K]   previous: T'
//!          pool [P, HV, V, K] (K-last), [P, HV, K, V] (V-last)
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  K-last: block = groups of K/8 lanes; a group owns whole rows (one v), a lane 8 channels and their α
//!          V-last: block = groups of LANES lanes; a group owns ROWS rows (one k each) and their α, a lane 8 columns
//! Padding  an inactive row zeroes o and touches no state; a row without tokens carries its state to where it writes; o of packed
//!          tokens that are no row's is zero
//! Range    NaN from finite inputs only where S k or S q of the raw k and q leaves f32, whatever the gates (k and q whose squares
//!          leave it are multiplied by a power of two before); a NaN among the inputs is never dropped
//! Decode   one new token and no previous one, by load-time constants: k, q and v are loaded with the state, and nothing is prepared
//! Cost     (states read + states written) · V · K · size_of(S) bytes per (b, hv): memory-bound
//! Truth    reference::recurrent; tests/cpu/entries.rs, tests/cpu/laws

pub use crate::recurrent::{KLast, VLast};
