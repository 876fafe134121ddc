//! What the `gated-delta` command and the bench share: the arguments of any operator in one type ([`arguments`]), and what
//! launches take on a GPU ([`timing`]).

pub mod arguments;
pub mod timing;

/// The example of the repository's README compiles: no package has that file, and so the library cannot say it.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
