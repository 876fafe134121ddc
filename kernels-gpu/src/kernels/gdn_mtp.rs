//! GDN MTP verify: several tokens per sequence, drafted ones to be verified, or saved ones to be committed.
//!
//! Steps (1) to (5) are [`super::recurrent`]'s, of GDN (Gated DeltaNet, arXiv 2412.06464), which goes token by token. [`Parallel`] never
//! makes the states between the first and the last. With g_t = Σ log α up to token t, and S₀ the state before them all:
//!     M[r, s] = −β_r e^(g_r − g_s) k̂_r·k̂_s for r > s      T = (I − M)⁻¹ diag(β)         (a)
//!     R_t = v_t − e^g_t S₀ k̂_t                                                         (b)
//!     δ = T R                                                                         (c) all of (3)
//!     o_t = e^g_t S₀ q̂_t + Σ_s W[t, s] R_s     W[t, s] = Σ_j e^(g_t − g_j) q̂_t·k̂_j T[j, s] over s ≤ j ≤ t   (d)
//!     S = e^g_last S₀ + Σ_t e^(g_last − g_t) δ_t k̂_tᵀ                                   (e)
//! with S₀ k, S₀ q, the products of tokens, and (c), (d), (e) on the tensor cores: docs/gdn.md.
//!
//! Modes    verify: (a), (b), (d); update: (e) too; commit: (a), (b), (c), (e) of the previous tokens that are kept;
//!          resume: a commit, and a verify from the state that it stored
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   g, b [B, T, HV]   previous: T'   pool [P, HV, V, K] or [P, HV, K, V]
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  Parallel: block = WARPS workers and the solver; a worker owns TILES16 tiles of 16 rows of S, four lanes a
//!          row; the solver does (a) and W while the state is on its way
//! Padding  an inactive row zeroes o and touches no state; a row without tokens carries its state to where it writes; o of packed
//!          tokens that are no row's is zero; a token that is not there has k = q = v = 0, α = 1, β = 0
//! Range    as [`super::recurrent`]'s; Cost: likewise
//! Truth    reference::recurrent; tests/cpu/entries.rs, tests/cpu/laws

pub use crate::recurrent::Parallel;
