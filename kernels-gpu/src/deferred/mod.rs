//! Deferred write-back: states stay unchanged while the tokens since their last write are pending in a ring next to them, until a
//! launch flushes these tokens.
//!
//! A *pending* token has stored (k, u, log α) in the ring. Its update of a state is S ← S diag(α) + u kᵀ, with u = δ |k|⁻¹ and k
//! before normalisation. The operators differ only in their gate: [`crate::kernels::deferred`].
//!
//! # Safety
//! Unless its doc says otherwise, an unsafe function here relies on the following: `params` and `c` describe live tensors,
//! everything that it loads from shared memory has been stored there, and only this thread writes the places that it stores to.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

mod klast;
mod layer_parallel;
mod parallel;
mod ring_products;
mod whole_klast;

pub use klast::KLast;
pub use layer_parallel::LayerParallel;
pub use parallel::Parallel;
pub use whole_klast::WholeKLast;

pub use crate::pending::{MAX_PENDING, MAX_PENDING_DRAFTS, flushes};
