//! Building blocks of kernel bodies: element conversion, gates, powers of two, reductions, vectors out of range.
#![allow(unsafe_op_in_unsafe_fn)] // every unsafe function says what it relies on

pub mod delta_rule;
pub(crate) mod each;
pub mod elements;
pub mod gate;
pub mod power;
pub mod range;
pub mod reduce;
