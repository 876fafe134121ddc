//! The inputs of a step in an engine's memory, and its arguments.

use anyhow::Result;
use gated_delta::{Error, Gdn, GdnGates, Inputs as Qkv, States};
use half::bf16;

use super::engine::{Buffer, Engine};
use super::{Inputs, Rows, Shape};

/// Copies of [`Inputs`] and [`Rows`] in an engine's memory.
pub struct Layer {
    shape: Shape,
    q: Buffer<bf16>,
    k: Buffer<bf16>,
    v: Buffer<bf16>,
    a: Buffer<bf16>,
    b: Buffer<bf16>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    /// `[P, HV, V, K]`.
    pub states: Buffer<f32>,
    /// `[B, T, HV, V]`.
    pub o: Buffer<bf16>,
    slots: Buffer<i32>,
    cu_seqlens: Option<Buffer<i32>>,
}

impl Layer {
    /// Copies `inputs` and `rows` to the engine's memory.
    pub fn new(engine: &Engine, inputs: &Inputs, rows: &Rows) -> Result<Self> {
        let bounds = rows.cu_seqlens.as_ref();
        Ok(Self {
            shape: inputs.shape,
            q: engine.buffer(&inputs.q)?,
            k: engine.buffer(&inputs.k)?,
            v: engine.buffer(&inputs.v)?,
            a: engine.buffer(&inputs.a)?,
            b: engine.buffer(&inputs.b)?,
            a_log: engine.buffer(&inputs.a_log)?,
            dt_bias: engine.buffer(&inputs.dt_bias)?,
            states: engine.buffer(&inputs.states)?,
            o: engine.buffer(&inputs.o)?,
            slots: engine.buffer(&rows.slots)?,
            cu_seqlens: bounds.map(|bounds| engine.buffer(bounds)).transpose()?,
        })
    }

    /// Replaces the rows, and resets the outputs to NaN.
    pub fn set_rows(&mut self, inputs: &Inputs, rows: &Rows) -> Result<()> {
        self.slots.write(&rows.slots)?;
        if let (Some(buffer), Some(bounds)) = (&mut self.cu_seqlens, &rows.cu_seqlens) {
            buffer.write(bounds)?;
        }
        self.o.write(&inputs.o)
    }

    /// The arguments of a step: T tokens of each row, or the lengths of `cu_seqlens`.
    pub fn step(&mut self) -> Result<Gdn<'_>, Error> {
        let Shape {
            batch,
            tokens,
            heads,
            value_heads,
            dim,
            slots,
        } = self.shape;
        let [rows, columns] = match self.cu_seqlens {
            Some(_) => [1, batch * tokens],
            None => [batch, tokens],
        };
        let (qk, vo) = (
            [rows, columns, heads, dim],
            [rows, columns, value_heads, dim],
        );
        let gate = [rows, columns, value_heads];
        let gates = GdnGates::raw(
            self.a.tensor(&gate)?,
            self.b.tensor(&gate)?,
            self.a_log.tensor(&[value_heads])?,
            self.dt_bias.tensor(&[value_heads])?,
        );
        let pool = self.states.tensor_mut(&[slots, value_heads, dim, dim])?;
        let step = Gdn::new(
            Qkv::qkv(
                self.q.tensor(&qk)?,
                self.k.tensor(&qk)?,
                self.v.tensor(&vo)?,
            ),
            gates,
            self.o.tensor_mut(&vo)?,
            States::update(pool).slots(self.slots.tensor(&[batch])?),
        );
        Ok(match &self.cu_seqlens {
            Some(bounds) => step.packed(bounds.tensor(&[batch + 1])?, tokens),
            None => step,
        })
    }
}
