//! What the `gated-delta` command and the bench share: the arguments of any operator in one type ([`arguments`]), and what
//! launches take on a GPU ([`timing`]).

pub mod arguments;
pub mod timing;
