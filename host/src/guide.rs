//! Guides. They exist only in the documentation.
//!
//! | | |
//! |---|---|
//! | [`engines`] | how to use this crate in an engine: dependency, context, stream and buffers, compilation, layouts, slots,
//! speculative decoding, guarantees, errors by name |
//! | [`prefixes`] | kept prefixes, drafts and slots: which slot holds the true state, and when a slot is free |
//! | [`notation`] | letters and terms of this documentation |

#[doc = include_str!("../docs/engines.md")]
pub mod engines {}

#[doc = include_str!("../docs/prefixes.md")]
pub mod prefixes {}

#[doc = include_str!("../docs/notation.md")]
pub mod notation {}
