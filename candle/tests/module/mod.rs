//! A module of either operator.
#![allow(dead_code, reason = "each test uses a part")]

use anyhow::Result;
use candle_core::Tensor;
use candle_gated_delta::{
    DraftRows, GatedDeltaNet, KimiDeltaAttention, LayerShape, LayerStates, Rows, Verified,
};

pub enum Module {
    Gdn(GatedDeltaNet),
    Kda(KimiDeltaAttention),
}

impl Module {
    pub fn shape(&self) -> LayerShape {
        match self {
            Self::Gdn(module) => module.shape(),
            Self::Kda(module) => module.shape(),
        }
    }

    pub fn forward(&self, hidden: &Tensor, rows: &Rows, states: &LayerStates) -> Result<Tensor> {
        Ok(match self {
            Self::Gdn(module) => module.forward(hidden, rows, states)?,
            Self::Kda(module) => module.forward(hidden, rows, states)?,
        })
    }

    pub fn verify(
        &self,
        hidden: &Tensor,
        rows: &DraftRows,
        previous: Option<&Verified>,
        states: &LayerStates,
    ) -> Result<(Tensor, Verified)> {
        Ok(match self {
            Self::Gdn(module) => module.verify(hidden, rows, previous, states)?,
            Self::Kda(module) => module.verify(hidden, rows, previous, states)?,
        })
    }

    pub fn commit(
        &self,
        verified: &Verified,
        rows: &DraftRows,
        states: &LayerStates,
    ) -> Result<()> {
        match self {
            Self::Gdn(module) => module.commit(verified, rows, states)?,
            Self::Kda(module) => module.commit(verified, rows, states)?,
        }
        Ok(())
    }
}
