//! Arguments that change from one launch of a layer to the next: tokens and rows.

use crate::step::{Checkpoints, Packed};
#[cfg(doc)]
use crate::step::{Step, Update};
use crate::tensor::Tensor;

/// The projection's output for the tokens of a launch: views of one tensor, or separate tensors. The outer dims are `[B, T]`, for
/// packed rows `[1, total]`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Projection<'a> {
    /// q, k and v before the convolution, `[B, T, D]`.
    pub x: Tensor<'a>,
    /// Input of the decay: GDN's a `[B, T, HV]`, or KDA's g `[B, T, HV, K]`.
    pub gate: Tensor<'a>,
    /// Input of β, `[B, T, HV]`: GDN's b, or KDA's β or its logit.
    pub beta: Tensor<'a>,
    /// Gate of the norm, `[B, T, HV, V]`.
    pub z: Tensor<'a>,
}

impl<'a> Projection<'a> {
    /// A projection of x `[B, T, D]`, the gates (a or g, then b or β), and z `[B, T, HV, V]`.
    #[must_use]
    pub fn new(x: Tensor<'a>, [gate, beta]: [Tensor<'a>; 2], z: Tensor<'a>) -> Self {
        Self { x, gate, beta, z }
    }
}

/// The rows of a batch, the same for all layers. Each field is an option of [`Step`], or of its states, under the same name.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rows<'a> {
    /// Slot that each row reads, `[B]`: see [`Update::read_slots`].
    pub slots: Tensor<'a>,
    /// Slot that each row writes, `[B]`. Default: the slot that it reads. Used for rows that fork, or continue from a kept
    /// prefix. See [`Update::write_slots`].
    pub write_slots: Option<Tensor<'a>>,
    /// Bounds of rows of different lengths: see [`Step::packed`].
    pub packed: Option<Packed<'a>>,
    /// Rows that start from zeros, `[B]`: see [`Step::fresh`].
    pub fresh: Option<Tensor<'a>>,
    /// Positions of a prefill's rows, `[B]`: see [`Step::positions`].
    pub positions: Option<Tensor<'a>>,
    /// Checkpoints of a prefill: see [`Step::checkpoints`].
    pub checkpoints: Option<Checkpoints<'a>>,
    /// Workspace of a prefill: see [`Step::workspace`].
    pub workspace: Option<Tensor<'a>>,
}

impl<'a> Rows<'a> {
    /// Rows that all have the same number of tokens, in `slots` `[B]`.
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

    /// Writes row b's state to slot `slots[b]`.
    #[must_use]
    pub fn write_slots(mut self, slots: Tensor<'a>) -> Self {
        self.write_slots = Some(slots);
        self
    }

    /// Rows of different lengths: see [`Step::packed`].
    #[must_use]
    pub fn packed(mut self, cu_seqlens: Tensor<'a>, max_tokens: usize) -> Self {
        self.packed = Some(Packed {
            cu_seqlens,
            max_tokens,
        });
        self
    }

    /// Marks rows that start from zeros: see [`Step::fresh`].
    #[must_use]
    pub fn fresh(mut self, fresh: Tensor<'a>) -> Self {
        self.fresh = Some(fresh);
        self
    }

    /// Gives the positions of a prefill's rows: see [`Step::positions`].
    #[must_use]
    pub fn positions(mut self, positions: Tensor<'a>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// Keeps checkpoints of a prefill: see [`Step::checkpoints`].
    #[must_use]
    pub fn checkpoints(mut self, every: usize, slots: Tensor<'a>) -> Self {
        self.checkpoints = Some(Checkpoints { every, slots });
        self
    }

    /// Gives a prefill its workspace: see [`Step::workspace`].
    #[must_use]
    pub fn workspace(mut self, workspace: Tensor<'a>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// Number of rows, B.
    pub(super) fn batch(&self) -> usize {
        self.slots.dims().first().copied().unwrap_or(0)
    }

    /// The same rows with up to `tokens` tokens each, and the outer dims of their tensors.
    pub(super) fn of(&self, tokens: usize) -> (Self, [usize; 2]) {
        let batch = self.batch();
        let Some(packed) = self.packed else {
            return (*self, [batch, tokens]);
        };
        let rows = self.packed(packed.cu_seqlens, tokens);
        (rows, [1, batch.saturating_mul(tokens)])
    }
}
