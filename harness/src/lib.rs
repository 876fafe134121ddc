//! The parts that the `gated-delta` command and the bench share: the arguments of any operator in one type ([`arguments`]),
//! times of launches on a GPU ([`timing`]), and the GPU's properties ([`device`]).

pub mod arguments;
pub mod device;
pub mod timing;

/// Compiles the example in the repository's README, which belongs to no package and so cannot be a doctest of the library.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
