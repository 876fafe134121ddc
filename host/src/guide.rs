//! Guides, which exist in the documentation alone.
//!
//! | | |
//! |---|---|
//! | [`engines`] | in an engine: dependency, context, stream and buffers, compilation, layouts, slots, speculative decoding, what is promised, errors by name |
//! | [`notation`] | the letters and words of this documentation |

#[doc = include_str!("../docs/engines.md")]
pub mod engines {}

#[doc = include_str!("../docs/notation.md")]
pub mod notation {}
