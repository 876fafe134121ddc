//! The `gated-delta` command as a library: problems in host memory, the backends that run them, and the reports of the
//! results. Reading order: [`tensor`], [`op`], [`problem`], [`backend`],
//! [`check`], [`mod@file`].

mod arguments;
pub mod backend;
pub mod check;
pub mod compare;
mod container;
pub mod cuda;
pub mod demo;
pub mod error;
pub mod file;
pub mod info;
mod metadata;
pub mod model;
pub mod op;
pub mod problem;
pub mod reference;
pub mod table;
pub mod tensor;
pub mod timing;
mod written;

use std::io::Write;

use serde_json::Value;

pub use backend::{Backend, Choice, Outputs};
pub use error::Error;
pub use problem::Problem;
pub use tensor::HostTensor;

/// Output of a command on stdout, and whether its checks passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Lines for stdout.
    pub text: String,
    /// The output in JSON, an object.
    pub json: Value,
    /// False if a check failed.
    pub passed: bool,
}

/// Writes a line to stderr, without colours if stderr is no terminal. A closed stderr is no failure.
pub fn note(line: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}
