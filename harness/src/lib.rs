//! What the `gated-delta` command and the bench share: the arguments of any operator in one type ([`args`]), and what
//! launches take on a GPU ([`timing`]).

pub mod args;
pub mod timing;
