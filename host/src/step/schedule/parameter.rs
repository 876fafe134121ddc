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
    /// The parameter of a launch as bytes. A kernel reads all of them or a prefix.
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
        let params = *self.params();
        match self.pending {
            _ if self.is_chunked() => Parameter::Prefill(self.prefill_params(params)),
            Some(pending) => Parameter::Deferred(self.deferred_params(params, pending)),
            None => Parameter::Layer(params),
        }
    }

    /// The parameter of kernels with deferred write-back. It begins with the parameter of other kernels.
    pub(crate) fn deferred_params(
        &self,
        layer: LayerParams,
        pending: &Pending<'_>,
    ) -> DeferredParams {
        DeferredParams {
            layer,
            keys: pending.keys.address(),
            updates: pending.updates.address(),
            decays: pending.decays.address(),
            pending_len: pending.len.address(),
            pending_base: pending.base.address(),
            inputs: pending.inputs.as_ref().map_or(0, Tensor::address),
        }
    }

    /// The parameter of a prefill's kernels. It begins with the parameter of other kernels.
    pub(crate) fn prefill_params(&self, layer: LayerParams) -> PrefillParams {
        use Argument as A;
        if !self.is_chunked() {
            return PrefillParams {
                layer,
                end_chunk: ALL_CHUNKS,
                ..Zeroable::zeroed()
            };
        }
        let is_packed = self.has(A::CuSeqlens);
        let size = |dims: &[usize], dim: usize| dims.get(dim).map_or(0, |&size| size as u32);
        let row = |argument: A| match self.tensor(argument) {
            Some(tensor) if !is_packed => size(tensor.strides(), 0),
            _ => 0,
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
                false => self.tensor(A::O).map_or(0, |o| size(o.dims(), 1)),
            },
            checkpoints: slots.map_or(0, |slots| size(slots.dims(), 1)),
            checkpoint_slots_row: slots.map_or(0, |slots| size(slots.strides(), 0)),
            q_row: row(A::Q),
            k_row: row(A::K),
            v_row: row(A::V),
            o_row: row(A::O),
            g_row: row(A::Gate),
            b_row: row(A::Beta),
            x_row: row(A::X),
            z_row: row(A::Z),
            first_chunk: 0,
            end_chunk: ALL_CHUNKS,
            turns: rows,
            has_singles: 0,
            layer,
        }
    }
}
