//! The `gated-delta` command as a library: problems in host memory, the backends that run them, and the report
//! of what came out. Reading order: [`tensor`], [`op`], [`problem`], [`backend`],
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

/// What a command has to say on stdout, and whether what it checked holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Lines for stdout.
    pub text: String,
    /// The same for programs, an object.
    pub json: Value,
    /// False where a check failed.
    pub passed: bool,
}

/// Writes a line to stderr, without its colours where that is no terminal. A stderr that is closed is no failure.
pub fn note(line: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}
