//! What GDN MTP verify and recurrent KDA share: the kernels, token by token, and [`Parallel`].
//!
//! The operators ([`crate::kernels::gdn_mtp`], [`crate::kernels::kda_recurrent`]) differ in their gate alone, so that
//! every way of keeping states is written once, here.

pub(crate) mod klast;
pub(crate) mod parallel;
pub(crate) mod prepared;
pub(crate) mod slots;
pub(crate) mod tokens;
pub(crate) mod vlast;

pub use klast::KLast;
pub use parallel::Parallel;
pub use tokens::Gating;
pub use vlast::VLast;
