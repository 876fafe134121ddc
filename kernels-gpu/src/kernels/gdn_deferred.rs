//! GDN decode on states that wait: a step reads the state as it was some tokens ago, and those tokens from a ring.
//!
//! Per value head hv with query/key head h, state S: [V, K] and n pending tokens, 0 ≤ n ≤ N, of which the j-th left
//! (k_j, u_j, log α_j), with g_j = Σ log α of the tokens behind it, the new one among them, and g that of all:
//!     k̂ = k rk    q̂ = q rq    rk = rsqrt(Σk² + 1e-6)    rq = rsqrt(Σq² + 1e-6) scale    (1)
//!     Γ = e^g                                                                           (2)
//!     a_j = e^g_j k_j·k    b_j = e^g_j k_j·q                                            (3)
//!     p = S Γk + Σ_j a_j u_j    o' = S Γq + Σ_j b_j u_j                                 (4)
//!     δ = β (v − rk p)    o = rq o' + δ (k̂·q̂)    u = δ rk                               (5)
//! (k, u, log α) go to the entry behind the pending ones. A row of which n + 1 > N folds them first, and has none then, with g_j
//! and g of the pending tokens alone:
//!     S ← Γ S + Σ_j u_j (e^g_j k_j)ᵀ    rounded and stored                              (6)
//! Every decay is e to a sum of log decays, none above 1: no quotient of two that may both be 0.
//!
//! Shapes   q, k [B, 1, H, K]   v, o [B, 1, HV, V]   pool [P, HV, V, K]   of R entries, N < R: keys [P, H, R, K], updates
//!          [P, HV, R, V], decays [P, HV, R]; without a token all rows fold (flush)
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  block = groups of K/8 lanes; a group owns ROWS rows of S, a lane 8 channels of each and, of (4), one pending
//!          token's part of them; a group does (3) of one or two pending tokens, for the whole block
//! Padding  an inactive row zeroes o and touches neither state nor ring
//! Range    as of [`crate::kernels::gdn_decode`]; what is not pending in a ring is not read
//! Cost     V · K · size_of(S) + n · ring entry bytes per (b, hv), and one state written in N launches: memory-bound
//! Truth    reference::deferred; tests/deferred.rs

use super::gdn_mtp::PerHead;
use crate::deferred::{self, Deferring};
use crate::launch::Family;

impl Deferring for PerHead {
    const DEFERRED: Family = Family::GdnDeferred;
    const DEFERRED_LAYER: Family = Family::GdnDeferredLayer;
}

/// K-last states.
pub type KLast<
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
> = deferred::KLast<PerHead, S, K, V, ROWS, VALUES, THREADS>;

/// K-last states, whole heads a block, with a convolution before and a norm after it.
pub type WholeKLast<
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
    const DEPTH: u32,
> = deferred::WholeKLast<PerHead, S, K, V, ROWS, VALUES, THREADS, DEPTH>;
