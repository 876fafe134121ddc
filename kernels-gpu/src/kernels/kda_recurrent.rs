//! KDA (Kimi Delta Attention, arXiv 2510.26692), all tokens at once: one decay per key channel; T tokens per sequence.
//!
//! Steps (1) to (5) are [`super::recurrent`]'s. [`Parallel`] never makes the states between the first and the last. With
//! Γ_t = α_1 ⊙ … ⊙ α_t, and S₀ the state before them all, its steps are those of [`super::gdn_mtp`] with
//!     M[r, s] = −β_r k̂_r·p_s(r) for r > s    p_s(t) = k̂_s ⊙ α_(s+1) ⊙ … ⊙ α_t             (a)
//!     R_t = v_t − S₀ (Γ_t ⊙ k̂_t)                                                         (b)
//!     o_t = S₀ (Γ_t ⊙ q̂_t) + Σ_s W[t, s] R_s   W[t, s] = Σ_j q̂_t·p_j(t) T[j, s] over s ≤ j ≤ t   (d)
//!     S = S₀ diag(Γ_last) + Σ_t δ_t p_t(last)ᵀ                                            (e)
//!
//! Modes, grid, range and cost are as there.
//!
//! Shapes   g [B, T, HV, K]; else as there
//! Threads  as there; before the solver, teams of the workers' lanes find Γ ⊙ k, Γ ⊙ q, p and the products with p
//! Padding  as there; an absent token has k = q = v = 0, α = 1, β = 0
//! Truth    reference::recurrent; tests/cpu/entries.rs, tests/cpu/laws

pub use crate::recurrent::Parallel;
