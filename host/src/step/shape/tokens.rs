//! Checks of the tensors of tokens.

use super::checks::{Strides, indices, same_dtype};
use super::extents::Extents;
use crate::error::Error;
use crate::step::args::Inputs;
use crate::step::request::{Kept, KeptInputs, New, Request};

/// Strides of the tensors of new or previous tokens. A tensor that is not given has the default.
#[derive(Default)]
pub struct TokenStrides {
    pub q: Strides,
    pub k: Strides,
    pub v: Strides,
    /// Strides of the projection of previous tokens. The strides of the new tokens' projection are with their convolution.
    pub x: Strides,
    pub gate: Strides,
    pub beta: Strides,
    pub o: Strides,
}

impl TokenStrides {
    /// Whether an access that could be wide is narrow.
    pub fn narrow(&self) -> bool {
        let Self {
            q, k, v, gate, o, ..
        } = self;
        [q, k, v, gate, o].into_iter().any(|it| it.narrow)
    }
}

/// Checks the tensors of the new tokens, if the launch has new tokens.
pub fn new(request: &Request<'_>, extents: &Extents) -> Result<TokenStrides, Error> {
    let mut strides = TokenStrides::default();
    let Some(New { inputs, gates, o }) = request.new_tokens() else {
        return Ok(strides);
    };
    let (extent, heads) = (&extents.new, extents.heads);
    if let Inputs::Qkv { .. } = inputs {
        let [q, k, v] = inputs.named();
        strides.q = extent.keys(q, heads)?;
        strides.k = extent.keys(k, heads)?;
        strides.v = extent.values(v, heads)?;
    }
    [strides.gate, strides.beta] = extent.gates(gates, heads, request.gates.per_channel)?;
    strides.o = extent.values(o, heads)?;
    o.rank::<4>("[B, T, HV, V]")?.distinct(
        1,
        "rows, tokens and heads that do not overlap, since it is written",
    )?;
    Ok(strides)
}

/// Checks the tensors of the previous tokens, if the launch has previous tokens.
pub fn previous(request: &Request<'_>, extents: &Extents) -> Result<TokenStrides, Error> {
    let mut strides = TokenStrides::default();
    let Some(Kept {
        inputs,
        gates,
        keep,
    }) = request.previous_tokens()
    else {
        return Ok(strides);
    };
    let (extent, heads) = (&extents.previous, extents.heads);
    match inputs {
        KeptInputs::Kv([k, v]) => {
            strides.k = extent.keys(k, heads)?;
            strides.v = extent.values(v, heads)?;
        }
        KeptInputs::X(_) | KeptInputs::Conv(_) => {
            strides.x = extent.inputs(inputs.first(), heads.channels())?;
        }
    }
    [strides.gate, strides.beta] = extent.gates(gates, heads, request.gates.per_channel)?;
    if let Some(new) = request.new_tokens() {
        // `switches` has checked that both kinds of tokens are convolved, or neither.
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
    indices(keep, &["B"], &[extents.rows])?;
    Ok(strides)
}
