//! Checks of index tensors on the host, for debugging. They report indices that kernels skip silently, and refuse indices that
//! make a launch invalid.

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

/// Summary of the rows of a launch: active, inactive or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexReport {
    /// B, the number of rows.
    pub rows: usize,
    /// Number of rows that are computed.
    pub active: usize,
    /// Rows whose output is zero and whose states are not touched, each with the index that makes it inactive.
    pub inactive: Vec<InactiveRow>,
    /// Number of rows without tokens (packed, or of a prefill) and without previous tokens. Such a row ends with its start state.
    /// It touches no memory if it reads and writes one slot, or keeps states in token slots.
    pub empty: usize,
    /// Number of skipped stores of active rows: entries of `token_slots`, or of the slots of checkpoints, that are out of range
    /// or the null slot.
    pub skipped_stores: usize,
    /// Number of tokens in packed tensors after the last row's. Their outputs are zero.
    pub unused_tokens: usize,
}

/// An inactive row, and the index that makes it inactive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InactiveRow {
    /// Number of the row.
    pub row: usize,
    /// Name of the index tensor, or `row` if no tensor gives the slot, which is then the row's number.
    pub tensor: &'static str,
    /// The index that is out of range or the null slot.
    pub index: i64,
}

impl fmt::Display for InactiveRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, tensor, index } = self;
        write!(f, "row {row} is inactive: {tensor} = {index}")
    }
}

impl Library {
    /// Checks the index tensors of a launch, for debugging. `work` has the arguments of the launch, of any operator.
    ///
    /// Indices that are out of range are legal padding, and are reported. Indices that would race, or are invalid, are an error.
    /// On a GPU this call waits for `stream` and copies the index tensors to the host. Do not use this call on the hot path, or
    /// on a stream under capture.
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
    /// * The errors of a launch of the arguments, and of index tensors in the wrong memory.
    /// * [`Error::Hazard`]: a row writes a state or a window that another row reads or writes, or writes one for two of its tokens (for
    ///   example, two checkpoints name one slot).
    /// * [`Error::Index`]: `cu_seqlens` do not begin with 0, decrease, exceed the tensors, or have a row of more than T tokens;
    ///   `positions` are below 0.
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
