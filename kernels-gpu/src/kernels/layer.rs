//! The layer step, of GDN and of KDA by the load-time constant `per_channel`: what is between the projections of a layer, for one
//! token.
//!
//! Per channel c of x, with w the last W − 1 inputs of the row's slot, and per value head hv with query/key head h and state
//! S: [V, K] (Gated DeltaNet, arXiv 2412.06464; Kimi Delta Attention, arXiv 2510.26692):
//!     y = act(bias + Σ_j u_j w_j + u_(W−1) x), u the W taps        (a) convolution; q, k, v are its parts
//!     w ← w without its oldest, with x                             (b)
//!     k̂ = k rsqrt(Σk² + 1e-6)    q̂ = q rsqrt(Σq² + 1e-6) scale    (1)
//!     S ← S diag(α)                                               (2) decay: KDA's of each key channel, GDN's α of the head
//!     δ = β (v − S k̂)                                             (3) from the decayed S
//!     S ← S + δ k̂ᵀ                                                (4)
//!     o = S q̂                                                     (5) from the written S
//!     o ← weight · o rsqrt(mean(o²) + eps) · act(z)                (c) norm
//! Without (a) and (b) q, k and v are given; without (c) o is (5). Nothing is rounded between them.
//!
//! Shapes   x [B, 1, D], D = 2 H K + HV V   weight [D, W]   windows [P, D, W − 1]   z, o [B, 1, HV, V]   weight `[V]`
//!          KDA's g [B, 1, HV, K]   pool [P, HV, V, K] (K-last), [P, HV, K, V] (V-last)
//! Grid     x = tile, y = h, z = b; clusters of all tiles; block = threads of each value head of h, head by head
//! Threads  K-last: groups of K/8 lanes; a group owns whole rows (one v), a lane 8 channels, of KDA with their α
//!          V-last: groups of LANES lanes; a group owns ROWS rows (one k each), a lane 8 columns, one warp's lanes a column
//!          of the convolution, a thread of the block has a channel: a part of q and k for the whole cluster, v of the tile
//! Padding  an inactive row zeroes o and touches no state and no window; a fresh one reads neither
//! Range    as GDN decode's; silu and sigmoid are finite for every finite argument
//! Cost     2 · V · K · size_of(S) bytes per (b, hv), and (2 W − 1) · size_of(x) per (b, channel): memory-bound
//! Truth    reference::layer; tests/cpu/entries.rs, tests/cpu/laws

pub use crate::layer::{KLast, VLast, WholeKLast, WholeVLast};
