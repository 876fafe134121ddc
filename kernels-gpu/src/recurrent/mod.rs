//! GDN and KDA, token by token ([`crate::kernels::recurrent`]), and all tokens at once: [`Parallel`]
//! ([`crate::kernels::gdn_mtp`], [`crate::kernels::kda_recurrent`]).
//!
//! The operators differ in their gate alone, so that every way of keeping states is written once, here.
//!
//! # Safety
//! An unsafe function here relies on this where its doc says nothing else: `params` and `c` describe live tensors, what it loads
//! from shared memory has been stored there, and what it stores to is this thread's.
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
