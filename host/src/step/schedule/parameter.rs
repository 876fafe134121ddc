//! The parameter of a launch: addresses and sizes.

use bytemuck::Zeroable;
use gated_delta_kernels::prefill::{ALL_CHUNKS, CHUNK};
use gated_delta_kernels::step::{DeferredParams, LayerParams, PrefillParams};

use super::Launch;
use crate::step::args::Pending;
use crate::step::argument::Argument;
use crate::step::request::Request;
use crate::tensor::Tensor;

/// The parameter of every launch of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parameter {
    Layer(LayerParams),
    Deferred(DeferredParams),
    Prefill(PrefillParams),
}

impl Parameter {
    /// The parameter of a launch as bytes. A kernel reads all of them, or only the first part.
    pub fn bytes<T>(&mut self, launch: &Launch<T>) -> &[u8] {
        if let Self::Prefill(params) = self {
            launch.say(params);
        }
        match self {
            Self::Layer(params) => bytemuck::bytes_of(params),
            Self::Deferred(params) => bytemuck::bytes_of(params),
            Self::Prefill(params) => bytemuck::bytes_of(params),
        }
    }
}

impl Request<'_> {
    /// The parameter of the request's launches.
    pub(crate) fn parameter(&self) -> Parameter {
        match self.pending {
            _ if self.is_chunked() => Parameter::Prefill(self.prefill_params()),
            Some(pending) => Parameter::Deferred(self.deferred_params(pending)),
            None => Parameter::Layer(self.params),
        }
    }

    /// The parameter of kernels with deferred write-back. It begins with the parameter of other kernels.
    #[inline]
    pub(crate) fn deferred_params(&self, pending: &Pending<'_>) -> DeferredParams {
        DeferredParams {
            layer: self.params,
            keys: pending.keys.address(),
            updates: pending.updates.address(),
            decays: pending.decays.address(),
            pending_len: pending.len.address(),
            pending_base: pending.base.address(),
            inputs: pending.inputs.as_ref().map_or(0, Tensor::address),
        }
    }

    /// The parameter of a prefill's kernels. It begins with the parameter of other kernels.
    #[inline]
    pub(crate) fn prefill_params(&self) -> PrefillParams {
        use Argument as A;
        if !self.is_chunked() {
            return PrefillParams {
                layer: self.params,
                end_chunk: ALL_CHUNKS,
                ..Zeroable::zeroed()
            };
        }
        let is_packed = self.has(A::CuSeqlens);
        let row = |argument: A| {
            let tensor = self.tensor(argument);
            tensor.map_or(0, |tensor| tensor.strides().or_zero(0) as u32)
        };
        let [q_row, k_row, v_row, o_row, g_row, b_row, x_row, z_row] = match is_packed {
            true => [0; 8],
            false => [A::Q, A::K, A::V, A::O, A::Gate, A::Beta, A::X, A::Z].map(row),
        };
        let (slots, rows) = (self.tensor(A::CheckpointSlots), self.batch());
        PrefillParams {
            positions: self.address(A::Positions),
            checkpoint_slots: self.address(A::CheckpointSlots),
            workspace: self.address(A::Workspace),
            rows,
            tokens: match is_packed {
                true if self.promises_short_rows() => CHUNK,
                true => u32::MAX,
                false => self.tensor(A::O).map_or(0, |o| o.dims().or_zero(1) as u32),
            },
            checkpoints: slots.map_or(0, |slots| slots.dims().or_zero(1) as u32),
            checkpoint_slots_row: slots.map_or(0, |slots| slots.strides().or_zero(0) as u32),
            q_row,
            k_row,
            v_row,
            o_row,
            g_row,
            b_row,
            x_row,
            z_row,
            first_chunk: 0,
            end_chunk: ALL_CHUNKS,
            turns: rows,
            has_singles: 0,
            splits: 0,
            padding: 0,
            layer: self.params,
        }
    }
}
