//! GDN and KDA token by token ([`crate::kernels::recurrent`]), and all tokens together: [`Parallel`]
//! ([`crate::kernels::gdn_mtp`], [`crate::kernels::kda_recurrent`]).
//!
//! The operators differ only in their gate. So the code for each way of keeping states is here, once for both.
//!
//! # Safety
//! Unless its doc says otherwise, an unsafe function here relies on the following: `params` and `c` describe live tensors,
//! everything that it loads from shared memory has been stored there, and only this thread writes the places that it stores to.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

pub(crate) mod gates;
pub(crate) mod klast;
pub(crate) mod parallel;
pub(crate) mod prepared;
pub(crate) mod slots;
pub(crate) mod tokens;
pub(crate) mod vlast;

pub use klast::KLast;
pub use parallel::Parallel;
pub use tokens::{Decays, Either, Gating, PerChannel, PerHead};
pub use vlast::VLast;
