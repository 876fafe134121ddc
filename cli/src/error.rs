//! Errors that end a command early: one line each, naming the tensor, key or file.

use std::path::Path;

/// Any failure of a command other than a failed check.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file, option or tensor that cannot be used.
    #[error("{0}")]
    Input(String),
    /// Arguments that no kernel accepts, a failure of the GPU, or a kernel that the simulator stopped.
    #[error(transparent)]
    Library(#[from] gated_delta::Error),
    /// Arguments that the reference does not accept.
    #[error("reference: {0}")]
    Reference(#[from] gated_delta_reference::Error),
}

impl Error {
    /// An [`Error::Input`] about a file.
    pub(crate) fn file(path: &Path, problem: impl std::fmt::Display) -> Self {
        Self::Input(format!("{}: {problem}", path.display()))
    }

    /// The exit status: 1 if the simulator stopped a kernel, which counts as a failed check; 2 for all other errors.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Library(gated_delta::Error::Fault { .. }) => 1,
            _ => 2,
        }
    }
}
