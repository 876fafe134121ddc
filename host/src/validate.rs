//! A look at index tensors on the host, for debugging: what kernels skip without a word, and what they must not be
//! given.

mod hazard;
mod indices;
mod rows;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::error::Error;
use crate::library::Library;
use crate::step::Work;
use crate::stream::StreamRef;
use indices::Indices;

/// What a launch does with its rows: each is active, inactive or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexReport {
    /// B
    pub rows: usize,
    /// Rows that are computed.
    pub active: usize,
    /// Rows whose output is zero and whose states are not touched, each with the index that makes it so.
    pub inactive: Vec<InactiveRow>,
    /// Rows without a token, packed ones or of a prefill, and without previous tokens: the state that they start from is that
    /// which they end with. Where they read and write one slot, or keep states in token slots, they touch nothing.
    pub empty: usize,
    /// Entries of `token_slots` of active rows, or of their checkpoints' slots, that are out of range or the null slot,
    /// and skip a store.
    pub skipped_stores: usize,
    /// Tokens of packed tensors behind the last row's, whose output is zero.
    pub unused_tokens: usize,
}

/// A row that is inactive, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InactiveRow {
    /// Its number.
    pub row: usize,
    /// The index tensor, or `row` for a row's own number where no tensor gives its slot.
    pub tensor: &'static str,
    /// The index, which is out of range or the null slot.
    pub index: i64,
}

impl fmt::Display for InactiveRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, tensor, index } = self;
        write!(f, "row {row} is inactive: {tensor} = {index}")
    }
}

impl Library {
    /// Checks the index tensors of a launch, for debugging: arguments of any operator are taken as its launch takes
    /// them.
    ///
    /// Indices that are out of range are legal padding, and are reported; what would race, or what no launch means, is
    /// an error. On a GPU it waits for `stream` and copies the index tensors to the host: it is not for the hot path,
    /// and not for a stream under capture.
    ///
    /// ```
    /// use gated_delta::{Gdn, GdnGates, Inputs, Library, States, StreamRef, Tensor};
    ///
    /// let (tokens, gates) = (vec![0.0f32; 3 * 64], [0.0f32; 3]);
    /// let (mut output, mut states) = (vec![0.0f32; 3 * 64], vec![0.0f32; 4 * 64 * 64]);
    /// let qkv = Tensor::from_slice(&tokens, &[3, 1, 1, 64])?;
    /// let gates = Tensor::from_slice(&gates, &[3, 1, 1])?;
    /// let o = Tensor::from_slice_mut(&mut output, &[3, 1, 1, 64])?;
    /// let pool = States::update(Tensor::from_slice_mut(&mut states, &[4, 1, 64, 64])?);
    /// let slots = [2, -1, 2];
    /// let states = pool.slots(Tensor::from_slice(&slots, &[3])?);
    /// let step = Gdn::new(Inputs::qkv(qkv, qkv, qkv), GdnGates::given(gates, gates), o, states);
    /// let (library, stream) = (Library::simulator(), StreamRef::default_stream());
    /// let error = library.validate(stream, &step).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "row 0 writes slot 2 of pool, and row 2 writes slot 2 of pool: nothing orders them"
    /// );
    ///
    /// let slots = [2, -1, 3];
    /// let states = pool.slots(Tensor::from_slice(&slots, &[3])?);
    /// let report = library.validate(stream, &Gdn::new(step.inputs, step.gates, o, states))?;
    /// assert_eq!((report.active, report.inactive[0].row), (2, 1));
    /// # Ok::<(), gated_delta::Error>(())
    /// ```
    ///
    /// # Errors
    /// * What a launch of the arguments would refuse, and index tensors in the wrong memory.
    /// * [`Error::Hazard`]: a state or a window that a row writes is written or read by another row, or is written for
    ///   two tokens of one row, as where two checkpoints name one slot.
    /// * [`Error::Index`]: `cu_seqlens` that do not begin with 0, that fall, that leave the tensors, or that have a
    ///   row of more than T tokens; `positions` below 0.
    /// * [`Error::Driver`].
    pub fn validate<W: Work + ?Sized>(
        &self,
        stream: StreamRef<'_>,
        work: &W,
    ) -> Result<IndexReport, Error> {
        let (report, uses) = Indices::of(self, stream, &work.request())?.rows()?;
        uses.check()?;
        Ok(report)
    }
}
