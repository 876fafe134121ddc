//! Four ways to keep the states that drafts may yet be rejected from.

use std::mem;

use anyhow::Result;
use bytemuck::Pod;
use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
use gated_delta::ops::recurrent::{Formulation, Previous, RecurrentOptions};
use gated_delta::{DeviceElement, Error, Tensor};

use crate::common::engine::{Buffer, Engine};
use crate::model::{Model, Shape, Tokens, Views};

/// A way to keep states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each step writes the state after every token to a buffer; the next one starts from the accepted of them.
    Snapshots,
    /// Every token of a row has a slot of the pool.
    TokenSlots,
    /// A step writes no state; then the accepted tokens are replayed into the pool.
    Commit,
    /// A step first commits what was accepted of the last one: one launch, one state read and one written.
    Resume,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Snapshots,
        Self::TokenSlots,
        Self::Commit,
        Self::Resume,
    ];
}

/// States of B rows with T tokens a step, kept in a [`Way`]. They start as zeros.
pub struct States<S> {
    way: Way,
    dims: [usize; 2],
    /// `[P, HV, V, K]`: with snapshots and token slots a slot for each token, otherwise one for each row.
    pool: Buffer<S>,
    /// `[B, T, HV, V, K]`: what snapshots are written to next.
    spare: Buffer<S>,
    /// `[B]`: slot of a row.
    slots: Buffer<i32>,
    /// `[B, T]`: slot of a token.
    token_slots: Buffer<i32>,
    /// `[B]`: tokens of the last step that were accepted.
    accepted: Buffer<i32>,
    options: RecurrentOptions,
}

impl<S: DeviceElement + Pod> States<S> {
    /// Zero states.
    pub fn new(
        engine: &Engine,
        model: &Model,
        way: Way,
        rows: usize,
        tokens: usize,
    ) -> Result<Self> {
        let state = model.shape.value_heads * model.shape.dim.pow(2);
        let with = |steps: usize| engine.buffer(&vec![S::zeroed(); rows * steps * state]);
        let (steps, spare) = match way {
            Way::Snapshots => (tokens, tokens),
            Way::TokenSlots => (tokens, 0),
            Way::Commit | Way::Resume => (1, 0),
        };
        // The first step starts from the first state of a row, and has no last step to commit.
        let accepted = if way == Way::Resume { 0 } else { 1 };
        Ok(Self {
            way,
            dims: [rows, tokens],
            pool: with(steps)?,
            spare: with(spare)?,
            slots: engine.buffer(&indices(rows, |row| row * steps))?,
            token_slots: engine.buffer(&indices(rows * tokens, |token| token))?,
            accepted: engine.buffer(&vec![accepted; rows])?,
            options: RecurrentOptions::default(),
        })
    }

    /// With another formulation.
    pub fn formulated(mut self, formulation: Formulation) -> Self {
        self.options.formulation = formulation;
        self
    }

    /// Enqueues the verify of `step`. `last` are the tokens of the step before.
    pub fn verify(
        &mut self,
        engine: &Engine,
        model: &Model,
        step: &mut Tokens,
        last: &Tokens,
    ) -> Result<(), Error> {
        let ([rows, tokens], shape) = (self.dims, model.shape);
        let outputs_only = RecurrentOptions {
            update_state: false,
            ..self.options
        };
        let read_slots = Some(self.slots.tensor(&[rows])?);
        let views = step.tensors(model)?;
        let args = match self.way {
            Way::Snapshots => GdnMtp {
                read_slots,
                snapshots: Some(self.spare.tensor_mut(&[
                    rows,
                    tokens,
                    shape.value_heads,
                    shape.dim,
                    shape.dim,
                ])?),
                ..verify(
                    views,
                    slots(&mut self.pool, shape, rows * tokens)?,
                    outputs_only,
                )
            },
            Way::TokenSlots => GdnMtp {
                token_slots: Some(self.token_slots.tensor(&[rows, tokens])?),
                accepted: Some(self.accepted.tensor(&[rows])?),
                ..verify(
                    views,
                    slots(&mut self.pool, shape, rows * tokens)?,
                    self.options,
                )
            },
            Way::Commit => GdnMtp {
                read_slots,
                ..verify(views, slots(&mut self.pool, shape, rows)?, outputs_only)
            },
            Way::Resume => {
                let [k, v, gate, beta] = last.previous()?;
                let keep = self.accepted.tensor(&[rows])?;
                GdnMtp {
                    read_slots,
                    previous: Some(Previous {
                        k,
                        v,
                        gate,
                        beta,
                        keep,
                    }),
                    ..verify(views, slots(&mut self.pool, shape, rows)?, self.options)
                }
            }
        };
        // SAFETY: the buffers outlive the engine's wait, and every row has slots of its own.
        unsafe { engine.library.gdn_mtp(engine.stream(), &args) }
    }

    /// The first `accepted[b]` tokens of each row of `step` hold; the next step starts from there.
    pub fn accept(
        &mut self,
        engine: &Engine,
        model: &Model,
        step: &mut Tokens,
        accepted: &[i32],
    ) -> Result<()> {
        let ([rows, tokens], shape) = (self.dims, model.shape);
        self.accepted.write(accepted)?;
        match self.way {
            Way::Snapshots => {
                mem::swap(&mut self.pool, &mut self.spare);
                let last = |row: usize| row * tokens + accepted[row] as usize - 1;
                self.slots.write(&indices(rows, last))
            }
            Way::Commit => {
                let Views { k, v, gates, .. } = step.tensors(model)?;
                let commit = GdnCommit {
                    k,
                    v,
                    gates,
                    keep: self.accepted.tensor(&[rows])?,
                    pool: slots(&mut self.pool, shape, rows)?,
                    write_pool: None,
                    read_slots: Some(self.slots.tensor(&[rows])?),
                    write_slots: None,
                    options: self.options,
                };
                // SAFETY: the buffers outlive the wait, and every row has a slot of its own.
                unsafe { engine.library.gdn_commit(engine.stream(), &commit) }?;
                engine.synchronize()
            }
            // The next step does it.
            Way::TokenSlots | Way::Resume => Ok(()),
        }
    }
}

/// A verify that starts from slot b in row b.
fn verify<'a>(views: Views<'a>, pool: Tensor<'a>, options: RecurrentOptions) -> GdnMtp<'a> {
    GdnMtp {
        q: views.q,
        k: views.k,
        v: views.v,
        gates: views.gates,
        o: views.o,
        pool,
        write_pool: None,
        read_slots: None,
        write_slots: None,
        token_slots: None,
        accepted: None,
        snapshots: None,
        packed: None,
        previous: None,
        options,
    }
}

/// A buffer of states as a pool of `slots` slots.
fn slots<S: DeviceElement + Pod>(
    states: &mut Buffer<S>,
    shape: Shape,
    slots: usize,
) -> Result<Tensor<'_>, Error> {
    states.tensor_mut(&[slots, shape.value_heads, shape.dim, shape.dim])
}

/// `index` of each of `len` elements.
fn indices(len: usize, index: impl Fn(usize) -> usize) -> Vec<i32> {
    (0..len).map(|element| index(element) as i32).collect()
}
