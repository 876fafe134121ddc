//! A problem in host memory: tensors by name, and what is fixed for a layer.

use std::collections::BTreeMap;
use std::ops::Range;

use gated_delta::{Entry, IndexReport, Library, Options, StreamRef, Tensor};
use gated_delta_harness::arguments::GateKind;

use crate::error::Error;
use crate::op::Op;
use crate::tensor::HostTensor;

/// Views of a problem's tensors, by name, for the library.
pub type Views<'a> = BTreeMap<&'static str, Tensor<'a>>;

/// Names of the previous tokens' tensors and of how many of them are kept.
pub(crate) const PREVIOUS: [&str; 7] = [
    "prev.k",
    "prev.v",
    "prev.a",
    "prev.b",
    "prev.g",
    "prev.beta",
    "keep",
];
/// A launch: a decode, a verify, a resume, or a commit where there are previous tokens and no `q`.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What a file calls it.
    pub op: Op,
    /// How gates come; whose they are says whose layer it is.
    pub gates: GateKind,
    /// The [inputs](Op::inputs) under their names, `o` but in a commit, and `snapshots` where they are wanted.
    pub tensors: BTreeMap<&'static str, HostTensor>,
    /// Whether states are written.
    pub update_state: bool,
    /// What is fixed for the layer.
    pub options: Options,
    /// Most tokens of a row with `cu_seqlens`; those of the longest row where `None`.
    pub max_tokens: Option<usize>,
}

/// What the library says to a problem that it takes.
#[derive(Clone, Debug)]
pub struct Validated {
    /// The variant that it selects.
    pub selected: Entry,
    /// What each row does.
    pub rows: IndexReport,
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
            "state" => self.update_state,
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

    /// Checks everything that the library checks, the contents of index tensors too.
    ///
    /// # Errors
    /// What the library finds, under the names of this problem's tensors.
    pub fn validate(&self) -> Result<Validated, Error> {
        let arguments = self.arguments(&self.views()?)?;
        let check = || {
            let work = arguments.work()?;
            Ok(Validated {
                selected: work.selected()?,
                rows: Library::simulator().validate(StreamRef::default_stream(), &*work)?,
            })
        };
        Ok(check().map_err(|error| self.renamed(error))?)
    }

    /// The tokens of each row of the batch, among those of all rows; none in a commit, and none where `cu_seqlens` has
    /// what [`Problem::validate`] refuses.
    #[must_use]
    pub fn tokens(&self) -> Vec<Range<usize>> {
        let total = self.dim("q", 1);
        let Some(cu_seqlens) = self.tensors.get("cu_seqlens").map(HostTensor::to_i64) else {
            let rows = if self.is_commit() { "prev.k" } else { "q" };
            let row = |b| b * total..(b + 1) * total;
            return (0..self.dim(rows, 0)).map(row).collect();
        };
        let bound = |bound: i64| usize::try_from(bound).ok().filter(|bound| *bound <= total);
        let row = |pair: &[i64]| match (bound(pair[0]), bound(pair[1])) {
            (Some(start), Some(end)) => start..end.max(start),
            _ => 0..0,
        };
        cu_seqlens.windows(2).map(row).collect()
    }

    /// Slots that row b, which is active and has that many tokens, writes.
    pub(crate) fn written_slots(&self, b: usize, tokens: usize) -> Vec<usize> {
        let indices = |name| self.tensors.get(name).map(HostTensor::to_i64);
        let written = match indices("token_slots") {
            Some(slots) => slots[b * self.max_tokens()..][..tokens].to_vec(),
            None if self.update_state => {
                let slots = indices("write_slots").or_else(|| indices("read_slots"));
                vec![slots.map_or(b as i64, |slots| slots[b])]
            }
            None => Vec::new(),
        };
        let null_slot = self.options.null_slot.map(i64::from);
        let live = written.into_iter().filter(|slot| Some(*slot) != null_slot);
        let slot = |slot| usize::try_from(slot).ok();
        let pool = self.dim("state", 0);
        live.filter_map(slot).filter(|slot| *slot < pool).collect()
    }

    /// The size of a tensor's dim; 0 where there is none.
    pub(crate) fn dim(&self, name: &str, dim: usize) -> usize {
        let dims = self.tensors.get(name).map(HostTensor::dims);
        dims.and_then(|dims| dims.get(dim)).copied().unwrap_or(0)
    }

    /// Tokens of the longest row, at least 1.
    fn longest_row(&self) -> usize {
        let lengths = self.tokens().into_iter().map(|tokens| tokens.len());
        lengths.max().unwrap_or(0).max(1)
    }
}
