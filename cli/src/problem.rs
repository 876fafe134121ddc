//! A problem in host memory: tensors by name, and what is fixed for a layer.

use std::collections::BTreeMap;

use gated_delta::ops::recurrent::RecurrentOptions;
use gated_delta::{Entry, Tensor};

use crate::error::Error;
use crate::operation::{GdnGate, Operation};
use crate::rows;
use crate::tensor::HostTensor;

/// Views of a problem's tensors, by name, for the library.
pub type Views<'a> = BTreeMap<&'static str, Tensor<'a>>;

/// Names of the previous tokens' tensors and of how many of them are kept.
const PREVIOUS: [&str; 7] = [
    "prev.k",
    "prev.v",
    "prev.a",
    "prev.b",
    "prev.g",
    "prev.beta",
    "keep",
];
/// Names of what a commit, which has no new tokens, does not take.
const OF_NEW_TOKENS: [&str; 10] = [
    "k",
    "v",
    "a",
    "b",
    "g",
    "beta",
    "token_slots",
    "accepted",
    "cu_seqlens",
    "snapshots",
];

/// A launch: a decode, a verify, a resume, or a commit where there are previous tokens and no `q`.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What is computed.
    pub operation: Operation,
    /// The [inputs](crate::operation::Operator::inputs) under their names, `o` but in a commit, and `snapshots` where
    /// they are wanted.
    pub tensors: BTreeMap<&'static str, HostTensor>,
    /// What is fixed for the layer; [`Operation::GdnDecode`] has one formulation.
    pub options: RecurrentOptions,
    /// Most tokens of a row with `cu_seqlens`; those of the longest row where `None`.
    pub max_tokens: Option<usize>,
}

impl Problem {
    /// The tensor of that name.
    ///
    /// # Errors
    /// [`gated_delta::Error::MissingTensor`].
    pub fn tensor(&self, name: &'static str) -> Result<&HostTensor, Error> {
        Ok(self.tensors.get(name).ok_or_else(|| self.missing(name))?)
    }

    /// Whether a launch writes the tensor of that name.
    #[must_use]
    pub fn writes(&self, name: &str) -> bool {
        match name {
            "state" => self.options.update_state,
            _ => matches!(name, "o" | "snapshots"),
        }
    }

    /// Whether there are previous tokens.
    #[must_use]
    pub fn has_previous(&self) -> bool {
        PREVIOUS.iter().any(|name| self.tensors.contains_key(name))
    }

    /// Whether there are previous tokens and no others.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        self.has_previous() && !self.tensors.contains_key("q")
    }

    /// T: most tokens of a row; 0 in a commit.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        match self.tensors.get("cu_seqlens") {
            Some(_) => self.max_tokens.unwrap_or_else(|| self.longest_row()),
            None => self.dim("q", 1),
        }
    }

    /// Read-only views of the host tensors.
    ///
    /// # Errors
    /// As [`HostTensor::view`]'s.
    pub fn views(&self) -> Result<Views<'_>, gated_delta::Error> {
        self.tensors
            .iter()
            .map(|(&name, tensor)| Ok((name, tensor.view()?)))
            .collect()
    }

    /// Checks everything that the library checks, and that no two rows meet in a slot; the variant that the library
    /// selects.
    ///
    /// # Errors
    /// What the library finds, under the names of this problem's tensors; [`Error::Input`] that names the rows and the
    /// slot.
    pub fn validate(&self) -> Result<Entry, Error> {
        let views = self.views()?;
        let selected = self
            .args(&views)?
            .selected()
            .map_err(|error| self.renamed(error))?;
        rows::check_slots(&self.rows())?;
        Ok(selected)
    }

    /// The size of a tensor's dim; 0 where there is none.
    pub(crate) fn dim(&self, name: &str, dim: usize) -> usize {
        let dims = self.tensors.get(name).map(HostTensor::dims);
        dims.and_then(|dims| dims.get(dim)).copied().unwrap_or(0)
    }

    /// [`gated_delta::Error::MissingTensor`] of an input.
    pub(crate) fn missing(&self, tensor: &'static str) -> gated_delta::Error {
        let needed_by = match (self.operation, tensor) {
            (_, name) if PREVIOUS.contains(&name) => "previous tokens",
            (Operation::KdaRecurrent(_), "A_log") => "softplus gates",
            (Operation::KdaRecurrent(_), _) => self.operation.operator().plural(),
            (_, "g" | "beta") => "given gates",
            (
                Operation::GdnDecode(GdnGate::Raw(_)) | Operation::GdnMtp(GdnGate::Raw(_)),
                "a" | "b" | "A_log" | "dt_bias",
            ) => "raw gates",
            _ => self.operation.operator().plural(),
        };
        gated_delta::Error::MissingTensor { tensor, needed_by }
    }

    /// No tensor is there that the gates, or a commit, cannot use.
    pub(crate) fn check_excluded(&self) -> Result<(), gated_delta::Error> {
        let present = |names: &[&'static str]| {
            let mut names = names.iter().copied();
            names.find(|name| self.tensors.contains_key(name))
        };
        let (gates, excluded) = self.operation.excluded_gates();
        if let Some(other) = present(excluded) {
            return Err(gated_delta::Error::Contradiction {
                one: gates,
                other,
                why: "g is the log decay as it is, or gates are computed",
            });
        }
        if self.is_commit()
            && let Some(other) = present(&OF_NEW_TOKENS)
        {
            return Err(gated_delta::Error::Contradiction {
                one: "a commit",
                other,
                why: "previous tokens without a q are committed, and there are no new ones",
            });
        }
        Ok(())
    }

    /// Tokens of the longest row of `cu_seqlens` whose bounds are in range, at least 1.
    fn longest_row(&self) -> usize {
        let rows = self.bounds().into_iter().flatten();
        rows.map(|tokens| tokens.len()).max().unwrap_or(1)
    }

    /// An error of the library with the names of this problem's tensors.
    fn renamed(&self, mut error: gated_delta::Error) -> gated_delta::Error {
        use gated_delta::Error::{
            Alignment, Contradiction, DType, MissingTensor, Range, Shape, Stride, Unsupported,
        };
        match &mut error {
            Shape { tensor, .. }
            | DType { tensor, .. }
            | Stride { tensor, .. }
            | Alignment { tensor, .. }
            | MissingTensor { tensor, .. } => *tensor = self.name_of(tensor),
            Contradiction { one, other, .. } => {
                (*one, *other) = (self.name_of(one), self.name_of(other));
            }
            Unsupported { what, .. } | Range { what, .. }
                if *what == "T" && self.tensors.contains_key("cu_seqlens") =>
            {
                *what = match self.max_tokens {
                    Some(_) => "max_tokens",
                    None => "tokens of the longest row of cu_seqlens",
                };
            }
            _ => {}
        }
        error
    }

    /// The name here of one of the library's tensors.
    fn name_of(&self, name: &'static str) -> &'static str {
        match (name, self.is_commit()) {
            ("previous", _) => "prev.k",
            ("previous k", _) | ("k", true) => "prev.k",
            ("previous v", _) | ("v", true) => "prev.v",
            ("previous a", _) | ("a", true) => "prev.a",
            ("previous b", _) | ("b", true) => "prev.b",
            ("previous g", _) | ("g", true) => "prev.g",
            ("previous beta", _) | ("beta", true) => "prev.beta",
            _ => name,
        }
    }
}
