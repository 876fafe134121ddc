//! States that stay as they are while tokens wait in a ring beside them, until a launch folds these in.
//!
//! A token that is *pending* has left (k, u, log α): S ← S diag(α) + u kᵀ is what it makes of a state, with u = δ |k|⁻¹ and k
//! as it came. The operators differ in their gate alone: [`crate::kernels::deferred`].
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
