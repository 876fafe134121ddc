//! What the tensors of the tokens have to be.

use super::Inputs;
use super::check::Found;
use super::checks::{indices, same_dtype};
use super::request::{Kept, New, Request};
use crate::error::Error;

impl Request<'_> {
    /// The new tokens, where there are such.
    pub(super) fn check_new(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let Some(New { inputs, gates, o }) = &self.new else {
            return Ok(());
        };
        let (extent, heads) = (&found.extents.new, found.extents.heads);
        if let Inputs::Qkv { .. } = inputs {
            let [q, k, v] = inputs.named();
            extent.keys(q, heads, &mut found.q)?;
            extent.keys(k, heads, &mut found.new.k)?;
            extent.values(v, heads, &mut found.new.v)?;
        }
        extent.gates(*gates, heads, per_channel, &mut found.new)?;
        extent.values(*o, heads, &mut found.o)?;
        o.rank::<4>("[B, T, HV, V]")?.distinct(
            1,
            "rows, tokens and heads that do not overlap, since it is written",
        )
    }

    /// The previous tokens, where there are such.
    pub(super) fn check_previous(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let Some(Kept { k, v, gates, keep }) = &self.previous else {
            return Ok(());
        };
        let (extent, heads) = (&found.extents.previous, found.extents.heads);
        extent.keys(*k, heads, &mut found.previous.k)?;
        extent.values(*v, heads, &mut found.previous.v)?;
        extent.gates(*gates, heads, per_channel, &mut found.previous)?;
        if let Some(new) = &self.new {
            let ([_, new_k, new_v], [gate, beta]) = (new.inputs.named(), new.gates);
            for (tensor, like, wanted) in [
                (*k, new_k, "the dtype of k"),
                (*v, new_v, "the dtype of v"),
                (gates[0], gate, "the dtype of the new gates"),
                (gates[1], beta, "the dtype of the new gates"),
            ] {
                same_dtype(tensor, like, wanted)?;
            }
        }
        indices(*keep, &["B"], &[found.extents.rows])
    }
}
