//! States that stay as they are while tokens wait in a ring beside them, until a launch folds these in.
//!
//! A token that is *pending* has left (k, u, log α): S ← S diag(α) + u kᵀ is what it makes of a state, with u = δ |k|⁻¹ and k
//! as it came. The operators ([`crate::kernels::gdn_deferred`], [`crate::kernels::kda_deferred`]) differ in their gate alone.
//!
//! # Safety
//! An unsafe function here relies on this where its doc says nothing else: `params` and `c` describe live tensors, what it loads
//! from shared memory has been stored there, and what it stores to is this thread's.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

mod klast;
mod layer_parallel;
mod parallel;
mod waiting;
mod whole_klast;

pub use klast::KLast;
pub use layer_parallel::LayerParallel;
pub use parallel::Parallel;
pub use whole_klast::WholeKLast;

pub use crate::pending::{MAX_PENDING, MAX_PENDING_DRAFTS, folds};

use crate::launch::Family;
use crate::layer::Layered;
use crate::recurrent::Gating;

/// A gate whose states may wait.
pub trait Deferring: Gating {
    /// Family of the kernels of one token.
    const DEFERRED: Family;
    /// Family of the layer kernels of one token.
    const DEFERRED_LAYER: Family;
    /// Family of the kernels of several tokens.
    const DEFERRED_PARALLEL: Family;
}

/// A gate whose drafts may wait in a layer.
pub trait DeferringLayer: Deferring + Layered {
    /// Family of the layer kernels of several tokens.
    const DEFERRED_LAYER_PARALLEL: Family;
}
