//! What ends a command early: one line each, naming the tensor, key or file.

use std::path::Path;

/// Any failure of a command but a check that does not hold.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file, option or tensor that cannot be used.
    #[error("{0}")]
    Input(String),
    /// Arguments that no kernel takes, a GPU that fails, a kernel that the simulator stopped.
    #[error(transparent)]
    Library(#[from] gated_delta::Error),
    /// Arguments that the reference does not take.
    #[error("reference: {0}")]
    Reference(#[from] gated_delta_reference::Error),
}

impl Error {
    /// An [`Error::Input`] about a file.
    pub(crate) fn file(path: &Path, problem: impl std::fmt::Display) -> Self {
        Self::Input(format!("{}: {problem}", path.display()))
    }

    /// The exit status: 1 where the simulator stopped a kernel, which is a check that failed; 2 for all else.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Library(gated_delta::Error::Fault { .. }) => 1,
            _ => 2,
        }
    }
}
