//! A decode on states that wait, of GDN, and of KDA by the load-time constant `per_channel`: a step reads the state as it was some
//! tokens ago, and those tokens from a ring.
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
//! KDA has a decay of each key channel (Kimi Delta Attention, arXiv 2510.26692), so that Γ and e^g_j are vectors, and
//!     a_j = (e^g_j ⊙ k_j)·k    b_j = (e^g_j ⊙ k_j)·q    p = S (Γ ⊙ k) + Σ_j a_j u_j     (3) (4)
//! Every decay is e to a sum of log decays, none above 1: no quotient of two that may both be 0.
//!
//! [`Parallel`] takes T new tokens at once, as [`super::gdn_mtp`]'s do, with M, T, W and R of the new tokens
//! as there, and what is pending in place of S₀ k and S₀ q, for all tokens by two products on the tensor cores:
//!     p_t = Γ S k_t + Σ_j a_tj u_j    o'_t = Γ S q_t + Σ_j b_tj u_j    with g_j, Γ of the pending tokens alone    (3) (4)
//! where the u_j are a matrix of V by 16, and a and b one of 16 by 16; then R_t = v_t − e^g_t rk_t p_t, g_t of the new tokens.
//!
//! [`LayerParallel`] has [`super::layer_mtp`]'s convolution before that and its norm behind. There the
//! window of a slot waits too: the convolution of the new tokens begins with the last W − 1 of its inputs and those of the pending tokens, and a row
//! that folds leaves these as its window. A rejected token has left nothing but entries that are not pending.
//!
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   pool [P, HV, V, K]   of R entries, N + T ≤ R: keys [P, H, R, K], updates
//!          [P, HV, R, V], decays [P, HV, R], of a layer's drafts inputs [P, R, D]; KDA's g [B, T, HV, K] and decays
//!          [P, HV, R, K]; without a token all rows fold (flush); T = 1 and N ≤ 8, all tokens at once T ≤ 8 and N ≤ 16
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  block = groups of K/8 lanes; a group owns ROWS rows of S, a lane 8 channels of each and, of (4), one pending
//!          token's part of them; a group does (3) of one or two pending tokens, for the whole block, KDA's with all log decays in
//!          shared memory. All tokens at once: WARPS workers and the solver, as in [`super::gdn_mtp`]; (3) is the first two
//!          workers', of 8 pending tokens each
//! Padding  an inactive row zeroes o and touches neither state nor ring
//! Range    as of [`crate::kernels::recurrent`]; what is not pending in a ring is not read
//! Cost     V · K · size_of(S) + n · ring entry bytes per (b, hv), and one state written in N launches: memory-bound
//! Truth    reference::deferred; tests/cpu/deferred

pub use crate::deferred::{KLast, LayerParallel, Parallel, WholeKLast};
