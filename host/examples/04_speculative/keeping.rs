//! Four ways to keep the states that drafts may yet be rejected from.

use std::mem;

use anyhow::Result;
use bytemuck::Pod;
use gated_delta::{DeviceElement, Error, Formulation, Options, States, Tensor};

use crate::common::engine::{Buffer, Engine};
use crate::model::{Model, Shape, Tokens};

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
pub struct Keeping<S> {
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
    options: Options,
}

impl<S: DeviceElement + Pod> Keeping<S> {
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
            options: Options::default(),
        })
    }

    /// With another formulation.
    pub fn formulated(mut self, formulation: Formulation) -> Self {
        self.options = self.options.formulation(formulation);
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
        let steps = if matches!(self.way, Way::Snapshots | Way::TokenSlots) {
            tokens
        } else {
            1
        };
        let pool = slots(&mut self.pool, shape, rows * steps)?;
        let row_slots = self.slots.tensor(&[rows])?;
        let accepted = self.accepted.tensor(&[rows])?;
        let step = match self.way {
            Way::Snapshots => {
                let states = States::read_only(pool).slots(row_slots);
                let snapshots = slots(&mut self.spare, shape, rows * tokens)?;
                step.step(model, states)?
                    .snapshots(snapshots.split(0, tokens)?)
            }
            Way::TokenSlots => {
                let token_slots = self.token_slots.tensor(&[rows, tokens])?;
                step.step(
                    model,
                    States::per_token(pool, token_slots).accepted(accepted),
                )?
            }
            Way::Commit => step.step(model, States::read_only(pool).slots(row_slots))?,
            Way::Resume => {
                let states = States::update(pool).slots(row_slots);
                step.step(model, states)?.previous(last.previous(accepted)?)
            }
        };
        let step = step.options(self.options);
        // SAFETY: the buffers outlive the engine's wait, and every row has slots of its own.
        unsafe { engine.library.launch(engine.stream(), &step) }
    }

    /// The first `accepted[b]` tokens of each row of `step` hold; the next step starts from there.
    pub fn accept(
        &mut self,
        engine: &Engine,
        model: &Model,
        step: &Tokens,
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
                let pool = States::update(slots(&mut self.pool, shape, rows)?);
                let keep = self.accepted.tensor(&[rows])?;
                let commit = step
                    .commit(model, keep, pool.slots(self.slots.tensor(&[rows])?))?
                    .options(self.options);
                // SAFETY: the buffers outlive the wait, and every row has a slot of its own.
                unsafe { engine.library.launch(engine.stream(), &commit) }?;
                engine.synchronize()
            }
            // The next step does it.
            Way::TokenSlots | Way::Resume => Ok(()),
        }
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
