//! What changes from one launch of a layer to the next: tokens and rows.

use crate::step::{Checkpoints, Packed};
#[cfg(doc)]
use crate::step::{Step, Update};
use crate::tensor::Tensor;

/// What the layer's projection leaves of the tokens of a launch: views of one row, or tensors of their own. The outer dims are
/// `[B, T]`, of packed rows `[1, total]`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Projection<'a> {
    /// `[B, T, D]`: q, k and v before the convolution.
    pub x: Tensor<'a>,
    /// GDN's a `[B, T, HV]`, KDA's g `[B, T, HV, K]`.
    pub gate: Tensor<'a>,
    /// `[B, T, HV]`: GDN's b, KDA's β or its logit.
    pub beta: Tensor<'a>,
    /// `[B, T, HV, V]`: the gate of the norm.
    pub z: Tensor<'a>,
}

impl<'a> Projection<'a> {
    /// x `[B, T, D]`, the gates, a or g and b or β, and z `[B, T, HV, V]`.
    #[must_use]
    pub fn new(x: Tensor<'a>, [gate, beta]: [Tensor<'a>; 2], z: Tensor<'a>) -> Self {
        Self { x, gate, beta, z }
    }
}

/// The rows of a batch, the same for all layers. Each field is an option of [`Step`], or of its states, under the same name.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rows<'a> {
    /// [`Update::read_slots`], `[B]`.
    pub slots: Tensor<'a>,
    /// [`Update::write_slots`], `[B]`: of rows that fork, or go on from a kept prefix.
    pub write_slots: Option<Tensor<'a>>,
    /// [`Step::packed`]: rows of different lengths.
    pub packed: Option<Packed<'a>>,
    /// [`Step::fresh`], `[B]`.
    pub fresh: Option<Tensor<'a>>,
    /// [`Step::positions`], `[B]`; of a prefill.
    pub positions: Option<Tensor<'a>>,
    /// [`Step::checkpoints`]; of a prefill.
    pub checkpoints: Option<Checkpoints<'a>>,
    /// [`Step::workspace`]; of a prefill.
    pub workspace: Option<Tensor<'a>>,
}

impl<'a> Rows<'a> {
    /// Rows of as many tokens each, in `slots` `[B]`.
    #[must_use]
    pub fn new(slots: Tensor<'a>) -> Self {
        Self {
            slots,
            write_slots: None,
            packed: None,
            fresh: None,
            positions: None,
            checkpoints: None,
            workspace: None,
        }
    }

    /// Row b's state goes to slot `slots[b]`.
    #[must_use]
    pub fn write_slots(mut self, slots: Tensor<'a>) -> Self {
        self.write_slots = Some(slots);
        self
    }

    /// As [`Step::packed`].
    #[must_use]
    pub fn packed(mut self, cu_seqlens: Tensor<'a>, max_tokens: usize) -> Self {
        self.packed = Some(Packed {
            cu_seqlens,
            max_tokens,
        });
        self
    }

    /// As [`Step::fresh`].
    #[must_use]
    pub fn fresh(mut self, fresh: Tensor<'a>) -> Self {
        self.fresh = Some(fresh);
        self
    }

    /// As [`Step::positions`].
    #[must_use]
    pub fn positions(mut self, positions: Tensor<'a>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// As [`Step::checkpoints`].
    #[must_use]
    pub fn checkpoints(mut self, every: usize, slots: Tensor<'a>) -> Self {
        self.checkpoints = Some(Checkpoints { every, slots });
        self
    }

    /// As [`Step::workspace`].
    #[must_use]
    pub fn workspace(mut self, workspace: Tensor<'a>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// B.
    pub(super) fn batch(&self) -> usize {
        self.slots.dims().first().copied().unwrap_or(0)
    }

    /// The same rows of up to `tokens` tokens, and the outer dims of their tensors.
    pub(super) fn of(&self, tokens: usize) -> (Self, [usize; 2]) {
        let batch = self.batch();
        let Some(packed) = self.packed else {
            return (*self, [batch, tokens]);
        };
        let rows = self.packed(packed.cu_seqlens, tokens);
        (rows, [1, batch.saturating_mul(tokens)])
    }
}
