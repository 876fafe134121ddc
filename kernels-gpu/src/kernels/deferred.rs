//! Decode with deferred write-back, of GDN, and of KDA by the load-time constant `per_channel`: a step reads the state as of some
//! tokens ago, and the updates of those tokens from a ring.
//!
//! Per value head hv with query/key head h, state S: [V, K] and n pending tokens, 0 ≤ n ≤ N. The ring has (k_j, u_j, log α_j) of
//! pending token j. g_j = Σ log α of the tokens after it, including the new one; g is the sum over all tokens:
//!     k̂ = k rk    q̂ = q rq    rk = rsqrt(Σk² + 1e-6)    rq = rsqrt(Σq² + 1e-6) scale    (1)
//!     Γ = e^g                                                                           (2)
//!     a_j = e^g_j k_j·k    b_j = e^g_j k_j·q                                            (3)
//!     p = S Γk + Σ_j a_j u_j    o' = S Γq + Σ_j b_j u_j                                 (4)
//!     δ = β (v − rk p)    o = rq o' + δ (k̂·q̂)    u = δ rk                               (5)
//! (k, u, log α) go to the ring entry after the pending ones. A row with n + 1 > N first flushes its pending tokens and then has
//! none; here g_j and g are sums over the pending tokens alone:
//!     S ← Γ S + Σ_j u_j (e^g_j k_j)ᵀ    rounded and stored                              (6)
//! KDA has a decay of each key channel (Kimi Delta Attention, arXiv 2510.26692), so Γ and e^g_j are vectors, and
//!     a_j = (e^g_j ⊙ k_j)·k    b_j = (e^g_j ⊙ k_j)·q    p = S (Γ ⊙ k) + Σ_j a_j u_j     (3) (4)
//! Every decay is e to the power of a sum of log decays, and at most 1; no decay is a quotient of two that may both be 0.
//!
//! [`Parallel`] takes T new tokens together, like [`super::gdn_mtp`]; M, T, W and R of the new tokens are defined there. The
//! state and the pending tokens take the place of S₀ k and S₀ q, for all tokens by two products on the tensor cores:
//!     p_t = Γ S k_t + Σ_j a_tj u_j    o'_t = Γ S q_t + Σ_j b_tj u_j    with g_j, Γ of the pending tokens alone    (3) (4)
//! where the u_j form a matrix of V by 16, and a and b one of 16 by 16 each; then R_t = v_t − e^g_t rk_t p_t, g_t of the new
//! tokens.
//!
//! [`LayerParallel`] has the convolution of [`super::layer_mtp`] before these steps and its norm after them. There the window of
//! a slot is deferred too: the convolution of the new tokens begins with the last W − 1 of the window's inputs and those of the
//! pending tokens, and a row that flushes stores these as its window. A rejected token leaves only entries that are not pending.
//!
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   pool [P, HV, V, K]   of R entries, N + T ≤ R: keys [P, H, R, K], updates
//!          [P, HV, R, V], decays [P, HV, R], of a layer's drafts inputs [P, R, D]; KDA's g [B, T, HV, K] and decays
//!          [P, HV, R, K]; without a token all rows flush; T = 1 and N ≤ 8, all tokens together T ≤ 8 and N ≤ 16
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  block = groups of K/8 lanes; a group owns ROWS rows of S, a lane 8 channels of each and, of (4), one pending
//!          token's part of them; a group computes (3) of one or two pending tokens, for the whole block, for KDA with all log
//!          decays in shared memory. All tokens together: WARPS workers and the solver, as in [`super::gdn_mtp`]; the first two
//!          workers compute (3), of 8 pending tokens each
//! Padding  an inactive row zeroes o and touches neither state nor ring
//! Range    as in [`crate::kernels::recurrent`]; ring entries that are not pending are not read
//! Cost     V · K · size_of(S) + n · ring entry bytes per (b, hv), and one state written in N launches: memory-bound
//! Truth    reference::deferred; tests/cpu/deferred

pub use crate::deferred::{KLast, LayerParallel, Parallel, WholeKLast};
