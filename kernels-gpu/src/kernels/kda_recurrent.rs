//! KDA (Kimi Delta Attention, arXiv 2510.26692) with all tokens together: one decay per key channel; T tokens per sequence.
//!
//! Per value head hv with query/key head h and state S: [V, K], for each token:
//!     k̂ = k rsqrt(Σk² + 1e-6)    q̂ = q rsqrt(Σq² + 1e-6) scale    (1)
//!     S ← S diag(α)                                               (2) decay of each key channel
//!     δ = β (v − S k̂)                                             (3) from the decayed S
//!     S ← S + δ k̂ᵀ                                                (4)
//!     o = S q̂                                                     (5) from the written S
//! Both products use the decayed S and the raw k and q in one reduction: S k̂ = rk (S k), o = rq (S q) + δ (k̂·q̂), with rk, rq
//! the factors of (1). S stays f32 between tokens.
//!
//! [`Parallel`] never computes the states between the first and the last. With Γ_t = α_1 ⊙ … ⊙ α_t, and S₀ the state before all
//! tokens, its steps are those of [`crate::kernels::gdn_mtp`] with
//!     M[r, s] = −β_r k̂_r·p_s(r) for r > s    p_s(t) = k̂_s ⊙ α_(s+1) ⊙ … ⊙ α_t             (a)
//!     R_t = v_t − S₀ (Γ_t ⊙ k̂_t)                                                         (b)
//!     o_t = S₀ (Γ_t ⊙ q̂_t) + Σ_s W[t, s] R_s   W[t, s] = Σ_j q̂_t·p_j(t) T[j, s] over s ≤ j ≤ t   (d)
//!     S = S₀ diag(Γ_last) + Σ_t δ_t p_t(last)ᵀ                                            (e)
//!
//! Shapes   q, k [B, T, H, K]   v, o [B, T, HV, V]   g [B, T, HV, K]   pool [P, HV, V, K] or [P, HV, K, V]
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  K-last: block = groups of K/8 lanes; a group owns whole rows (one v), a lane 8 channels and their α
//!          V-last: block = groups of LANES lanes; a group owns ROWS rows (one k each) and their α, a lane 8 columns
//!          Parallel: as in GDN's; before the solver, teams of the workers' lanes compute Γ ⊙ k, Γ ⊙ q, p and the products with p
//! Padding  an inactive row zeroes o and touches no state; a row without tokens carries its state to the slot that it writes; o
//!          of packed tokens that belong to no row is zero; Parallel: an absent token has k = q = v = 0, α = 1, β = 0
//! Range    NaN from finite inputs only where S k or S q of the raw k and q leaves f32, whatever the gates (k and q whose squares
//!          overflow in f32 are first multiplied by a power of two); a NaN among the inputs is never dropped
//! Cost     (states read + states written) · V · K · size_of(S) bytes per (b, hv): memory-bound
//! Truth    reference::recurrent; tests/kda_recurrent.rs, tests/laws

pub use crate::recurrent::Parallel;
