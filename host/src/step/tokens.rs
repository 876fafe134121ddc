//! What the tensors of the tokens have to be.

use super::check::Found;
use super::checks::{indices, same_dtype};
use super::request::{Kept, New, Request};
use crate::error::Error;

impl Request<'_> {
    /// The new tokens, where there are such.
    pub(super) fn check_new(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let Some(New { q, tokens, o }) = &self.new else {
            return Ok(());
        };
        let (extent, heads) = (&found.extents.new, found.extents.heads);
        extent.keys(*q, heads, &mut found.q)?;
        extent.tokens(tokens, heads, per_channel, &mut found.new)?;
        extent.values(*o, heads, &mut found.o)?;
        o.rank::<4>("[B, T, HV, V]")?.distinct(
            1,
            "rows, tokens and heads that do not overlap, since it is written",
        )
    }

    /// The previous tokens, where there are such.
    pub(super) fn check_previous(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let Some(Kept { tokens, keep }) = &self.previous else {
            return Ok(());
        };
        let (extent, heads) = (&found.extents.previous, found.extents.heads);
        extent.tokens(tokens, heads, per_channel, &mut found.previous)?;
        if let Some(new) = &self.new {
            for (tensor, like, wanted) in [
                (tokens.k, new.tokens.k, "the dtype of k"),
                (tokens.v, new.tokens.v, "the dtype of v"),
                (tokens.gate, new.tokens.gate, "the dtype of the new gates"),
                (tokens.beta, new.tokens.beta, "the dtype of the new gates"),
            ] {
                same_dtype(tensor, like, wanted)?;
            }
        }
        indices(*keep, &["B"], &[found.extents.rows])
    }
}
