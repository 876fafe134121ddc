//! An engine on cudarc without gated-delta: a context, a stream, the buffers of a layer.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use half::bf16;

use crate::common::{Inputs, Shape};

/// The engine. All of its work is on one stream.
pub struct Engine {
    /// The GPU.
    pub cuda: Arc<CudaContext>,
    /// The stream.
    pub stream: Arc<CudaStream>,
}

/// Buffers of a GDN layer, contiguous.
pub struct Layer {
    /// Sizes of the buffers.
    shape: Shape,
    /// `[B, 1, H, K]`.
    pub q: CudaSlice<bf16>,
    /// `[B, 1, H, K]`.
    pub k: CudaSlice<bf16>,
    /// `[B, 1, HV, V]`.
    pub v: CudaSlice<bf16>,
    /// `[B, 1, HV]`.
    pub a: CudaSlice<bf16>,
    /// `[B, 1, HV]`.
    pub b: CudaSlice<bf16>,
    /// `[HV]`.
    pub a_log: CudaSlice<f32>,
    /// `[HV]`.
    pub dt_bias: CudaSlice<f32>,
    /// `[B, 1, HV, V]`.
    pub o: CudaSlice<bf16>,
    /// `[P, HV, V, K]`.
    pub states: CudaSlice<f32>,
    /// `[B]`.
    pub slots: CudaSlice<i32>,
}

impl Layer {
    /// B, H, HV, K = V, and P, in this order.
    pub fn sizes(&self) -> (usize, usize, usize, usize, usize) {
        let shape = &self.shape;
        (
            shape.batch,
            shape.heads,
            shape.value_heads,
            shape.dim,
            shape.slots,
        )
    }
}

impl Engine {
    /// An engine on the first GPU.
    pub fn new() -> Result<Self> {
        let cuda = CudaContext::new(0)?;
        let stream = cuda.new_stream()?;
        Ok(Self { cuda, stream })
    }

    /// Buffers of a layer, with copies of `inputs`.
    pub fn layer(&self, inputs: &Inputs, slots: &[i32]) -> Result<Layer> {
        Ok(Layer {
            shape: inputs.shape,
            q: self.stream.clone_htod(&inputs.q)?,
            k: self.stream.clone_htod(&inputs.k)?,
            v: self.stream.clone_htod(&inputs.v)?,
            a: self.stream.clone_htod(&inputs.a)?,
            b: self.stream.clone_htod(&inputs.b)?,
            a_log: self.stream.clone_htod(&inputs.a_log)?,
            dt_bias: self.stream.clone_htod(&inputs.dt_bias)?,
            o: self.stream.clone_htod(&inputs.o)?,
            states: self.stream.clone_htod(&inputs.states)?,
            slots: self.stream.clone_htod(slots)?,
        })
    }
}
