//! Five ways to keep states and windows until drafts are accepted or rejected.

use std::mem;

use anyhow::Result;
use bytemuck::Pod;
use gated_delta::layer::Rows;
use gated_delta::step::MAX_PENDING_DRAFTS;
use gated_delta::step::pending::{Count, Ring, Rings};
use gated_delta::{DeviceElement, Error, Inputs, Pending, States, Tensor};

use crate::common::engine::{Buffer, Engine};
use crate::model::{Model, Shape, TAPS, Tokens};

/// A way to keep states and windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each step writes the state and the window after every token to buffers. The next step starts from the state and the window
    /// of the last accepted token.
    Snapshots,
    /// Every token of a row has a pool slot for its state. The slot of the first token has a wide window for all tokens.
    TokenSlots,
    /// A step writes nothing. A commit then advances the pools by the accepted tokens.
    Commit,
    /// A step first commits the accepted tokens of the last step, in one launch that reads and writes each state once.
    Resume,
    /// Deferred write-back: tokens are stored in rings, and only the accepted tokens are counted. A flush adds them to states and
    /// windows when a ring has no room for more tokens.
    Wait,
}

impl Way {
    /// Ways that keep the state after each token. They compute token by token, for all dtypes of states.
    pub const AFTER_EACH: [Self; 2] = [Self::Snapshots, Self::TokenSlots];

    /// Ways that keep one state. They compute all tokens together for 16-bit states, and token by token for f32 states.
    pub const AFTER_THE_LAST: [Self; 2] = [Self::Commit, Self::Resume];
}

/// P slots of a state and a window each.
pub struct Slots<S> {
    shape: Shape,
    slots: usize,
    /// Number of inputs per channel of a window: W - 1, or more.
    inputs: usize,
    /// `[P, HV, V, K]`.
    states: Buffer<S>,
    /// `[P, D, inputs]`, in the dtype of x, because windows are copies of x.
    windows: Buffer<f32>,
}

impl<S: DeviceElement + Pod> Slots<S> {
    /// States and windows of zeros.
    pub fn new(engine: &Engine, shape: Shape, slots: usize, inputs: usize) -> Result<Self> {
        let state = shape.values() * shape.dim;
        Ok(Self {
            shape,
            slots,
            inputs,
            states: engine.buffer(&vec![S::zeroed(); slots * state])?,
            windows: engine.buffer(&vec![0.0; slots * shape.channels() * inputs])?,
        })
    }

    /// Views of states and windows.
    pub fn views(&mut self) -> Result<[Tensor<'_>; 2], Error> {
        let (slots, shape) = (self.slots, self.shape);
        let states = [slots, shape.value_heads, shape.dim, shape.dim];
        let windows = [slots, shape.channels(), self.inputs];
        Ok([
            self.states.tensor_mut(&states)?,
            self.windows.tensor_mut(&windows)?,
        ])
    }

    /// The windows `[D, W - 1]` that begin at these slots and columns.
    pub fn windows_at(&self, places: &[[usize; 2]]) -> Result<Vec<Vec<f32>>> {
        let (all, of_slot) = (self.windows.read()?, self.shape.channels() * self.inputs);
        let window = |&[slot, column]: &[usize; 2]| {
            let channels = all[slot * of_slot..][..of_slot].chunks(self.inputs);
            let inputs = channels.flat_map(|channel| &channel[column..][..TAPS - 1]);
            inputs.copied().collect()
        };
        Ok(places.iter().map(window).collect())
    }
}

/// States and windows of B rows with T tokens a step, kept in a [`Way`]. They start as zeros.
pub struct Keeping<S> {
    way: Way,
    dims: [usize; 2],
    /// With snapshots and token slots, one slot per token; otherwise one slot per row.
    pool: Slots<S>,
    /// Destination of the next snapshots, `[B, T, …]`.
    spare: Slots<S>,
    /// Slot of each row, `[B]`.
    slots: Buffer<i32>,
    /// Slot of each token, `[B, T]`.
    token_slots: Buffer<i32>,
    /// Accepted tokens of the last step, `[B]`.
    accepted: Buffer<i32>,
    rings: Option<Deferred>,
}

/// Rings of pending tokens.
struct Deferred {
    size: Ring,
    /// `[P, H, R, K]`.
    keys: Buffer<f32>,
    /// `[P, HV, R, V]`.
    updates: Buffer<f32>,
    /// `[P, HV, R]`.
    decays: Buffer<f32>,
    /// `[P, R, D]`.
    inputs: Buffer<f32>,
    /// Number of pending tokens of each row, and the ring entry of the first pending token, `[B]` each.
    counts: [Buffer<i32>; 2],
}

impl Deferred {
    /// Rings full of NaN, without pending tokens.
    fn new(engine: &Engine, shape: Shape, [rows, tokens]: [usize; 2]) -> Result<Self> {
        let entries = MAX_PENDING_DRAFTS + tokens;
        let of = |width: usize| engine.buffer(&vec![f32::NAN; rows * entries * width]);
        let zeros = || engine.buffer(&vec![0i32; rows]);
        Ok(Self {
            size: Ring {
                most: MAX_PENDING_DRAFTS,
                entries,
            },
            keys: of(shape.heads * shape.dim)?,
            updates: of(shape.values())?,
            decays: of(shape.value_heads)?,
            inputs: of(shape.channels())?,
            counts: [zeros()?, zeros()?],
        })
    }

    /// The rings and counts for a step.
    fn pending(&mut self, shape: Shape, rows: usize) -> Result<Pending<'_>, Error> {
        let Ring { most, entries } = self.size;
        let (h, hv, dim) = (shape.heads, shape.value_heads, shape.dim);
        let [len, base] = &self.counts;
        let rings = Rings {
            keys: self.keys.tensor_mut(&[rows, h, entries, dim])?,
            updates: self.updates.tensor_mut(&[rows, hv, entries, dim])?,
            decays: self.decays.tensor_mut(&[rows, hv, entries])?,
            len: len.tensor(&[rows])?,
            base: base.tensor(&[rows])?,
        };
        let inputs = self.inputs.tensor_mut(&[rows, entries, shape.channels()])?;
        Ok(Pending::new(rings).most(most).inputs(inputs))
    }

    /// Counts the accepted tokens of a step of `tokens` tokens. Nothing else is needed to reject the others.
    fn count(&mut self, accepted: &[i32], tokens: usize) -> Result<()> {
        let [len, base] = [self.counts[0].read()?, self.counts[1].read()?];
        let counted = len
            .iter()
            .zip(&base)
            .zip(accepted)
            .map(|((&len, &base), &kept)| {
                let [len, base] = [len, base].map(|count| count as usize);
                let next = self.size.after(Count { len, base }, tokens, kept as usize);
                (next.len as i32, next.base as i32)
            });
        let (len, base): (Vec<i32>, Vec<i32>) = counted.unzip();
        self.counts[0].write(&len)?;
        self.counts[1].write(&base)
    }
}

impl<S: DeviceElement + Pod> Keeping<S> {
    /// States and windows of zeros.
    pub fn new(
        engine: &Engine,
        shape: Shape,
        way: Way,
        [rows, tokens]: [usize; 2],
    ) -> Result<Self> {
        let with = |steps: usize, inputs: usize| Slots::new(engine, shape, rows * steps, inputs);
        let (steps, inputs, spare) = match way {
            Way::Snapshots => (tokens, TAPS - 1, tokens),
            // The window that a step starts from without its oldest input, then the inputs of the step's tokens.
            Way::TokenSlots => (tokens, TAPS - 2 + tokens, 0),
            Way::Commit | Way::Resume | Way::Wait => (1, TAPS - 1, 0),
        };
        // The first step starts from a row's first state. It has no last step to commit.
        let accepted = if way == Way::Resume { 0 } else { 1 };
        Ok(Self {
            way,
            dims: [rows, tokens],
            pool: with(steps, inputs)?,
            spare: with(spare, TAPS - 1)?,
            slots: engine.buffer(&indices(rows, |row| row * steps))?,
            token_slots: engine.buffer(&indices(rows * tokens, |token| token))?,
            accepted: engine.buffer(&vec![accepted; rows])?,
            rings: match way {
                Way::Wait => Some(Deferred::new(engine, shape, [rows, tokens])?),
                _ => None,
            },
        })
    }

    /// Enqueues the verify `step` with the outputs `o`. `last` are the tokens of the previous step.
    pub fn verify(
        &mut self,
        engine: &Engine,
        model: &Model,
        step: &Tokens,
        last: &Tokens,
        o: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        let [rows, tokens] = self.dims;
        let shape = self.pool.shape;
        let (way, rings) = (self.way, &mut self.rings);
        let [pool, windows] = self.pool.views()?;
        let layer = model.layer(pool, windows.narrow(2, 0, TAPS - 1)?)?;
        let (drafts, last) = (step.projection(&layer)?, last.projection(&layer)?);
        let (of_rows, o) = (Rows::new(self.slots.tensor(&[rows])?), step.output(o)?);
        let accepted = self.accepted.tensor(&[rows])?;
        let mut step = match way {
            Way::Snapshots | Way::Commit => layer.verify(&drafts, &of_rows, o),
            Way::Resume => layer.resume(&drafts, &last, accepted, &of_rows, o),
            Way::TokenSlots | Way::Wait => layer.decode(&drafts, &of_rows, o),
        };
        match (way, rings, &mut step.inputs) {
            (Way::Wait, Some(rings), _) => step = step.pending(rings.pending(shape, rows)?),
            (Way::Snapshots, _, Inputs::Conv(conv)) => {
                let [states, windows] = self.spare.views()?;
                conv.window_snapshots = Some(windows.split(0, tokens)?);
                step = step.snapshots(states.split(0, tokens)?);
            }
            (Way::TokenSlots, _, Inputs::Conv(conv)) => {
                let token_slots = self.token_slots.tensor(&[rows, tokens])?;
                conv.windows = windows;
                step.states = States::per_token(pool, token_slots)
                    .accepted(accepted)
                    .into();
            }
            _ => {}
        }
        // SAFETY: the buffers outlive the engine's wait, and no two rows write one slot.
        unsafe { engine.library.launch(engine.stream(), &step) }
    }

    /// Accepts the first `accepted[b]` tokens of each row of `step`; the next step starts from there.
    pub fn accept(
        &mut self,
        engine: &Engine,
        model: &Model,
        step: &Tokens,
        accepted: &[i32],
    ) -> Result<()> {
        let [rows, tokens] = self.dims;
        self.accepted.write(accepted)?;
        match self.way {
            Way::Snapshots => {
                mem::swap(&mut self.pool, &mut self.spare);
                let last = |row: usize| row * tokens + accepted[row] as usize - 1;
                self.slots.write(&indices(rows, last))
            }
            Way::Commit => {
                let [pool, windows] = self.pool.views()?;
                let layer = model.layer(pool, windows)?;
                let (last, keep) = (step.projection(&layer)?, self.accepted.tensor(&[rows])?);
                let commit = layer.commit(&last, keep, &Rows::new(self.slots.tensor(&[rows])?));
                // SAFETY: the buffers outlive the wait, and no two rows write one slot.
                unsafe { engine.library.launch(engine.stream(), &commit) }?;
                engine.synchronize()
            }
            Way::Wait => match &mut self.rings {
                Some(rings) => rings.count(accepted, tokens),
                None => Ok(()),
            },
            // The next step uses the accepted tokens.
            Way::TokenSlots | Way::Resume => Ok(()),
        }
    }

    /// Number of accepted tokens of each row that are not yet in its state and window.
    pub fn waiting(&self) -> Result<Vec<usize>> {
        let len = match &self.rings {
            Some(rings) => rings.counts[0].read()?,
            None => vec![0; self.dims[0]],
        };
        Ok(len.into_iter().map(|len| len as usize).collect())
    }

    /// The window of each row that the next step or commit starts from.
    pub fn windows(&self) -> Result<Vec<Vec<f32>>> {
        let (slots, accepted) = (self.slots.read()?, self.accepted.read()?);
        let places: Vec<[usize; 2]> = slots
            .iter()
            .zip(&accepted)
            .map(|(&slot, &accepted)| match self.way {
                Way::TokenSlots => [slot as usize, accepted as usize - 1],
                _ => [slot as usize, 0],
            })
            .collect();
        self.pool.windows_at(&places)
    }
}

/// `len` indices: `index(i)` for each i.
fn indices(len: usize, index: impl Fn(usize) -> usize) -> Vec<i32> {
    (0..len).map(|element| index(element) as i32).collect()
}
