//! What the tensors of the tokens have to be.

use super::Inputs;
use super::check::Found;
use super::checks::{indices, same_dtype};
use super::request::{Kept, KeptInputs, New, Request};
use crate::error::Error;

impl Request<'_> {
    /// The new tokens, where there are such.
    pub(super) fn check_new(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let Some(New { inputs, gates, o }) = self.new_tokens() else {
            return Ok(());
        };
        let (extent, heads) = (&found.extents.new, found.extents.heads);
        if let Inputs::Qkv { .. } = inputs {
            let [q, k, v] = inputs.named();
            extent.keys(q, heads, &mut found.q)?;
            extent.keys(k, heads, &mut found.new.k)?;
            extent.values(v, heads, &mut found.new.v)?;
        }
        extent.gates(gates, heads, per_channel, &mut found.new)?;
        extent.values(o, heads, &mut found.o)?;
        o.rank::<4>("[B, T, HV, V]")?.distinct(
            1,
            "rows, tokens and heads that do not overlap, since it is written",
        )
    }

    /// The previous tokens, where there are such.
    pub(super) fn check_previous(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let Some(Kept {
            inputs,
            gates,
            keep,
        }) = self.previous_tokens()
        else {
            return Ok(());
        };
        let (extent, heads) = (&found.extents.previous, found.extents.heads);
        match inputs {
            KeptInputs::Kv([k, v]) => {
                extent.keys(k, heads, &mut found.previous.k)?;
                extent.values(v, heads, &mut found.previous.v)?;
            }
            KeptInputs::X(_) | KeptInputs::Conv(_) => {
                extent.inputs(inputs.first(), heads.channels(), &mut found.conv.previous_x)?;
            }
        }
        extent.gates(gates, heads, per_channel, &mut found.previous)?;
        if let Some(new) = self.new_tokens() {
            // The switches have seen that they come alike.
            let [first, second, third] = new.inputs.named();
            match inputs {
                KeptInputs::Kv([k, v]) => {
                    same_dtype(k, second, "the dtype of k")?;
                    same_dtype(v, third, "the dtype of v")?;
                }
                KeptInputs::X(x) => same_dtype(x, first, "the dtype of x")?,
                KeptInputs::Conv(_) => {}
            }
            for (gate, like) in gates.iter().zip(new.gates) {
                same_dtype(*gate, like, "the dtype of the new gates")?;
            }
        }
        indices(keep, &["B"], &[found.extents.rows])
    }
}
