//! Layers as modules of candle_nn: they map hidden states to hidden states, with the weights of Hugging Face's checkpoints.

mod gdn;
mod kda;

use candle_core::{Result, Tensor};

pub use gdn::{GatedDeltaNet, GdnConfig};
pub use kda::{KdaConfig, KimiDeltaAttention};

use crate::error::bail;
use crate::launch;
use crate::pool::{LayerStates, Rows};
use crate::step::{Convolution, Gates, Inputs, Norm, Previous, States, Step, Stored};

/// Projections of verified tokens, `[B, T, …]`, for the next resume or commit.
#[derive(Clone, Debug)]
pub struct Verified {
    /// Input of the convolution, x, `[B, T, D]`
    x: Tensor,
    /// Gate a, `[B, T, HV]`, or g, `[B, T, HV, K]`
    gate: Tensor,
    /// Gate b, `[B, T, HV]`
    beta: Tensor,
}

impl Verified {
    /// Selects the rows `[N]` (u32), for a batch of other rows. A row without verified tokens may name any row, with `keep` = 0.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn select(&self, rows: &Tensor) -> Result<Self> {
        // candle gathers only from contiguous memory.
        let of = |tensor: &Tensor| tensor.contiguous()?.index_select(rows, 0);
        Ok(Self {
            x: of(&self.x)?,
            gate: of(&self.gate)?,
            beta: of(&self.beta)?,
        })
    }
}

/// Projections of a layer's tokens `[B, T, …]`, before the launch.
struct Projected {
    conv: Convolution,
    gates: Gates,
    norm: Norm,
}

impl Projected {
    /// A step of packed rows, whose tensors are `[1, total, …]`.
    fn forward(self, rows: &Rows, states: &LayerStates) -> Result<Tensor> {
        if rows.is_prefill() && !launch::has_prefill(&self.gates, states)? {
            return self.in_pieces(rows, states);
        }
        let pool = States::update(&states.states, &rows.slots).write_slots(&rows.write_slots);
        let mut step = Step::new(Inputs::Conv(self.conv), self.gates, pool)
            .norm(self.norm)
            .packed(&rows.cu_seqlens, rows.max_tokens)
            .fresh(&rows.fresh)
            .options(states.options());
        step.positions.clone_from(&rows.positions);
        step.checkpoints.clone_from(&rows.checkpoints);
        step.run()
    }

    /// Like [`forward`](Self::forward), for a layer without a prefill: one launch for each sub-batch of up to 16 tokens of a row.
    fn in_pieces(&self, rows: &Rows, states: &LayerStates) -> Result<Tensor> {
        let mut outputs = Vec::new();
        let mut end = 0;
        for piece in rows.pieces()? {
            let of_piece = self.narrow(piece.first, piece.tokens)?;
            let pool = States::update(&states.states, &piece.slots).write_slots(&piece.write_slots);
            let step = Step::new(Inputs::Conv(of_piece.conv), of_piece.gates, pool)
                .norm(of_piece.norm)
                .packed(&piece.cu_seqlens, piece.max_tokens)
                .fresh(&piece.fresh)
                .options(states.options());
            let o = step.run()?;
            // A sub-batch that is computed again has the same outputs.
            if piece.first >= end {
                end = piece.first + piece.tokens;
                outputs.push(o);
            }
        }
        Tensor::cat(&outputs, 1)
    }

    /// A range of the tokens in `[1, total, …]`.
    fn narrow(&self, first: usize, tokens: usize) -> Result<Self> {
        let of = |tensor: &Tensor| tensor.narrow(1, first, tokens);
        Ok(Self {
            conv: Convolution {
                x: of(&self.conv.x)?,
                ..self.conv.clone()
            },
            gates: self.gates.narrow(first, tokens)?,
            norm: Norm {
                z: of(&self.norm.z)?,
                ..self.norm.clone()
            },
        })
    }

    /// A verify of tokens `[B, T, …]`; with `previous`, a resume.
    fn verify(
        self,
        rows: &crate::pool::DraftRows,
        previous: Option<&Verified>,
        states: &LayerStates,
    ) -> Result<(Tensor, Verified)> {
        let (gate, beta) = match &self.gates {
            Gates::Gdn(crate::step::GdnGates::Raw { a, b, .. }) => (a.clone(), b.clone()),
            Gates::Gdn(crate::step::GdnGates::Given { g, beta }) => (g.clone(), beta.clone()),
            Gates::Kda(gates) => (gates.g.clone(), gates.beta.clone()),
        };
        let verified = Verified {
            x: self.conv.x.clone(),
            gate,
            beta,
        };
        let pool = match previous {
            Some(_) => States::update(&states.states, &rows.slots),
            None => States::read_only(&states.states, &rows.slots),
        };
        let mut step = Step::new(Inputs::Conv(self.conv), self.gates, pool)
            .norm(self.norm)
            .options(states.options());
        if let Some(of) = previous {
            step = step.previous(Previous {
                stored: Stored::X(of.x.clone()),
                gate: of.gate.clone(),
                beta: of.beta.clone(),
                keep: rows.keep.clone(),
            });
        }
        Ok((step.run()?, verified))
    }
}

/// Product of `x` `[.., in]` and the transposed `weight` `[out, in]`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let dims = x.dims();
    let Some((&width, leading)) = dims.split_last() else {
        return bail!("hidden: wanted [.., hidden], got a scalar");
    };
    let rows: usize = leading.iter().product();
    let product = x.reshape((rows, width))?.matmul(&weight.t()?)?;
    product.reshape([leading, &[weight.dim(0)?]].concat())
}

/// Hidden states `[total, hidden]` of ragged rows as `[1, total, hidden]`.
fn of_rows(hidden: &Tensor, rows: &Rows) -> Result<Tensor> {
    match hidden.dims() {
        [total, _] if *total == rows.total => hidden.unsqueeze(0),
        other => bail!(
            "hidden: wanted [total, hidden] with total = {}, got {other:?}",
            rows.total
        ),
    }
}
