//! KDA decode on states that wait: [`super::gdn_deferred`]'s with a decay of each key channel (Kimi Delta Attention, arXiv
//! 2510.26692), so that Γ and e^g_j are vectors, and
//!     a_j = (e^g_j ⊙ k_j)·k    b_j = (e^g_j ⊙ k_j)·q    p = S (Γ ⊙ k) + Σ_j a_j u_j     (3) (4)
//!
//! Shapes   as there, and g [B, 1, HV, K], decays [P, HV, R, K]
//! Threads  as there; the groups share the pending tokens' log decays in shared memory
//! Truth    reference::deferred; tests/deferred.rs

use super::kda_recurrent::PerChannel;
use crate::deferred::{self, Deferring, DeferringLayer};
use crate::launch::Family;

impl Deferring for PerChannel {
    const DEFERRED: Family = Family::KdaDeferred;
    const DEFERRED_LAYER: Family = Family::KdaDeferredLayer;
    const DEFERRED_PARALLEL: Family = Family::KdaDeferredParallel;
}

impl DeferringLayer for PerChannel {
    const DEFERRED_LAYER_PARALLEL: Family = Family::KdaDeferredLayerParallel;
}

/// K-last states.
pub type KLast<
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
> = deferred::KLast<PerChannel, S, K, V, ROWS, VALUES, THREADS>;

/// K-last states, whole heads a block, with a convolution before and a norm after it.
pub type WholeKLast<
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const VALUES: usize,
    const THREADS: u32,
    const DEPTH: u32,
> = deferred::WholeKLast<PerChannel, S, K, V, ROWS, VALUES, THREADS, DEPTH>;

/// Up to 8 tokens at once on bf16 K-last states.
pub type Parallel<const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> =
    deferred::Parallel<PerChannel, K, V, WARPS, TILES16>;

/// The same with a convolution before and a norm after it.
pub type LayerParallel<const K: u32, const V: u32, const WARPS: u32, const TILES16: usize> =
    deferred::LayerParallel<PerChannel, K, V, WARPS, TILES16>;
