//! The inputs of a step in an engine's memory, and the arguments of its operators.

use anyhow::Result;
use gated_delta::Error;
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::gdn_mtp::GdnMtp;
use gated_delta::ops::recurrent::{Packed, RecurrentOptions};
use gated_delta::ops::{BetaScale, GdnGates};
use half::bf16;

use super::engine::{Buffer, Engine};
use super::{Inputs, Rows, Shape};

/// An [`Inputs`] in an engine's memory, with its [`Rows`].
pub struct Layer {
    shape: Shape,
    q: Buffer<bf16>,
    k: Buffer<bf16>,
    v: Buffer<bf16>,
    a: Buffer<bf16>,
    b: Buffer<bf16>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    /// `[P, HV, V, K]`
    pub states: Buffer<f32>,
    /// `[B, T, HV, V]`
    pub o: Buffer<bf16>,
    slots: Buffer<i32>,
    cu_seqlens: Option<Buffer<i32>>,
}

impl Layer {
    /// Copies `inputs` and `rows`.
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

    /// Changes what rows there are, and sets the outputs back to NaN.
    pub fn set_rows(&mut self, inputs: &Inputs, rows: &Rows) -> Result<()> {
        self.slots.write(&rows.slots)?;
        if let (Some(buffer), Some(bounds)) = (&mut self.cu_seqlens, &rows.cu_seqlens) {
            buffer.write(bounds)?;
        }
        self.o.write(&inputs.o)
    }

    /// Arguments of a decode, for T = 1.
    pub fn decode(&mut self) -> Result<GdnDecode<'_>, Error> {
        let Shape {
            batch,
            heads,
            value_heads,
            dim,
            slots,
            ..
        } = self.shape;
        let (qk, vo) = ([batch, 1, heads, dim], [batch, 1, value_heads, dim]);
        let gate = [batch, 1, value_heads];
        Ok(GdnDecode {
            q: self.q.tensor(&qk)?,
            k: self.k.tensor(&qk)?,
            v: self.v.tensor(&vo)?,
            gates: GdnGates::Raw {
                a: self.a.tensor(&gate)?,
                b: self.b.tensor(&gate)?,
                a_log: self.a_log.tensor(&[value_heads])?,
                dt_bias: self.dt_bias.tensor(&[value_heads])?,
                beta_scale: BetaScale::One,
            },
            o: self.o.tensor_mut(&vo)?,
            pool: self.states.tensor_mut(&[slots, value_heads, dim, dim])?,
            write_pool: None,
            read_slots: Some(self.slots.tensor(&[batch])?),
            write_slots: None,
            options: GdnDecodeOptions::default(),
        })
    }

    /// Arguments of several tokens a row: T of each, or as many as `cu_seqlens` say.
    pub fn verify(&mut self) -> Result<GdnMtp<'_>, Error> {
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
        let packed = match &self.cu_seqlens {
            Some(bounds) => {
                let cu_seqlens = bounds.tensor(&[batch + 1])?;
                Some(Packed {
                    cu_seqlens,
                    max_tokens: tokens,
                })
            }
            None => None,
        };
        Ok(GdnMtp {
            q: self.q.tensor(&qk)?,
            k: self.k.tensor(&qk)?,
            v: self.v.tensor(&vo)?,
            gates: GdnGates::Raw {
                a: self.a.tensor(&gate)?,
                b: self.b.tensor(&gate)?,
                a_log: self.a_log.tensor(&[value_heads])?,
                dt_bias: self.dt_bias.tensor(&[value_heads])?,
                beta_scale: BetaScale::One,
            },
            o: self.o.tensor_mut(&vo)?,
            pool: self.states.tensor_mut(&[slots, value_heads, dim, dim])?,
            write_pool: None,
            read_slots: Some(self.slots.tensor(&[batch])?),
            write_slots: None,
            token_slots: None,
            accepted: None,
            snapshots: None,
            packed,
            previous: None,
            options: RecurrentOptions::default(),
        })
    }
}
