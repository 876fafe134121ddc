//! Decodes with deferred write-back: the updates of tokens are stored in a ring, and a state is written once in eight steps. Rows
//! flush at different steps, one row is admitted late, one token is rejected, and a last launch flushes the states. The states
//! and every output equal plain decoding. Without a GPU the example runs in the simulator.

mod common;

use anyhow::{Result, ensure};
use common::engine::{Buffer, Engine};
use common::{Inputs as Step, OUTPUT_TOLERANCE, Rows, STATE_TOLERANCE, Shape, same_bits, worst};
use gated_delta::step::pending::{Count, Ring, Rings};
use gated_delta::step::{MAX_PENDING, Update};
use gated_delta::{Error, Flush, Gdn, GdnGates, Inputs, Pending, States};
use half::bf16;

/// The ring of a slot: the most pending tokens, and one new token.
const RING: Ring = Ring {
    most: MAX_PENDING,
    entries: MAX_PENDING + 1,
};

/// Number of tokens to decode.
const STEPS: usize = 24;

/// Slot of each row.
const SLOTS: [usize; 3] = [4, 0, 2];

/// Step at which each row is admitted. The steps differ, so that rows flush at different steps.
const ADMITTED: [usize; 3] = [0, 3, 7];

/// The step whose token the first row rejects.
const TAKEN_BACK: usize = 10;

fn main() -> Result<()> {
    let (engine, is_simulated) = Engine::first()?;
    let (heads, dim) = match is_simulated {
        false => ([16, 32], 128),
        true => ([1, 2], 64),
    };
    let shape = Shape {
        batch: SLOTS.len(),
        tokens: 1,
        heads: heads[0],
        value_heads: heads[1],
        dim,
        slots: 5,
    };
    let mut layer = Layer::new(&engine, shape)?;
    let mut wanted = vec![f32::NAN; shape.slots * shape.state()];
    // The pending tokens of each slot. An engine keeps nothing else.
    let mut pending = [Count::default(); 5];
    for step in 0..STEPS {
        let token = Step::random(shape, step as u64);
        let active = |b: usize| step >= ADMITTED[b];
        let fresh = [0, 1, 2].map(|b| i32::from(step == ADMITTED[b]));
        let rows = [0, 1, 2].map(|b| if active(b) { SLOTS[b] as i32 } else { -1 });
        layer.set(&token, &rows, &fresh, &pending)?;
        let before = layer.deferred.states.read()?;
        // SAFETY: the buffers outlive the wait, nothing else uses them, and no two rows have one slot.
        unsafe { engine.library.launch(engine.stream(), &layer.step()?) }?;
        engine.synchronize()?;

        // In plain decoding every step writes the states.
        for b in (0..SLOTS.len()).filter(|&b| fresh[b] != 0) {
            wanted[SLOTS[b] * shape.state()..][..shape.state()].fill(0.0);
        }
        let truth = token.truth(&wanted, &Rows::decoded(&rows))?;
        let of_token = shape.value_heads * dim;
        let off = worst("o", &layer.o.read()?, &truth.o, of_token, OUTPUT_TOLERANCE)?;
        let states = layer.deferred.states.read()?;
        let mut flushed = Vec::new();
        for b in (0..SLOTS.len()).filter(|&b| active(b)) {
            let slot = SLOTS[b];
            let of_slot = slot * shape.state()..(slot + 1) * shape.state();
            if fresh[b] != 0 {
                pending[slot] = Count::default();
            }
            let writes = fresh[b] != 0 || RING.flushes(pending[slot].len, 1);
            if writes && fresh[b] == 0 {
                flushed.push(slot);
            }
            let is_same = same_bits(&before[of_slot.clone()], &states[of_slot.clone()]);
            ensure!(
                writes != is_same,
                "step {step}: slot {slot}, flushes {writes}"
            );
            let kept = usize::from((b, step) != (0, TAKEN_BACK));
            pending[slot] = RING.after(pending[slot], 1, kept);
            if kept > 0 {
                let own = &truth.pool[of_slot.clone()];
                let own = own.iter().map(|&x| x as f32);
                wanted.splice(of_slot, own);
            }
        }
        println!("  step {step}: o within {off:.1e} of the reference, flushed {flushed:?}");
    }

    // A prefill or a copy does not read the ring: flush the pending tokens before it.
    layer.deferred.set(&pending)?;
    let (states, tokens) = layer.deferred.tensors(shape)?;
    // SAFETY: as above.
    unsafe {
        engine
            .library
            .launch(engine.stream(), &Flush::new(states, tokens))
    }?;
    engine.synchronize()?;
    let wanted: Vec<f64> = common::doubles(&wanted);
    let states = layer.deferred.states.read()?;
    let off = worst("state", &states, &wanted, shape.state(), STATE_TOLERANCE)?;
    println!("flushed: states within {off:.1e} of those that every step writes");
    Ok(())
}

/// The layer of an engine: its memory and its launches.
struct Layer {
    shape: Shape,
    q: Buffer<bf16>,
    k: Buffer<bf16>,
    v: Buffer<bf16>,
    a: Buffer<bf16>,
    b: Buffer<bf16>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    o: Buffer<bf16>,
    fresh: Buffer<i32>,
    deferred: Deferred,
}

/// States, their rings, and the numbers of pending tokens.
struct Deferred {
    /// `[P, HV, V, K]`.
    states: Buffer<f32>,
    /// `[P, H, R, K]`.
    keys: Buffer<bf16>,
    /// `[P, HV, R, V]`.
    updates: Buffer<f32>,
    /// `[P, HV, R]`.
    decays: Buffer<f32>,
    /// `[B]`.
    slots: Buffer<i32>,
    /// `[B]`.
    len: Buffer<i32>,
    /// `[B]`.
    base: Buffer<i32>,
}

impl Layer {
    /// Creates pools and rings full of NaN, because nothing is read before it is written.
    fn new(engine: &Engine, shape: Shape) -> Result<Self> {
        let Shape {
            batch,
            heads,
            value_heads,
            dim,
            slots,
            ..
        } = shape;
        let wide = |len: usize| engine.buffer(&vec![f32::NAN; len]);
        let narrow = |len: usize| engine.buffer(&vec![bf16::NAN; len]);
        let indices = || engine.buffer(&vec![-1; batch]);
        Ok(Self {
            shape,
            q: narrow(batch * heads * dim)?,
            k: narrow(batch * heads * dim)?,
            v: narrow(batch * value_heads * dim)?,
            a: narrow(batch * value_heads)?,
            b: narrow(batch * value_heads)?,
            a_log: wide(value_heads)?,
            dt_bias: wide(value_heads)?,
            o: narrow(batch * value_heads * dim)?,
            fresh: indices()?,
            deferred: Deferred {
                states: wide(slots * shape.state())?,
                keys: narrow(slots * heads * RING.entries * dim)?,
                updates: wide(slots * value_heads * RING.entries * dim)?,
                decays: wide(slots * value_heads * RING.entries)?,
                slots: indices()?,
                len: indices()?,
                base: indices()?,
            },
        })
    }

    /// Writes the inputs of the projection and the scheduler, and resets the outputs to NaN.
    fn set(
        &mut self,
        token: &Step,
        rows: &[i32; 3],
        fresh: &[i32; 3],
        pending: &[Count; 5],
    ) -> Result<()> {
        self.q.write(&token.q)?;
        self.k.write(&token.k)?;
        self.v.write(&token.v)?;
        self.a.write(&token.a)?;
        self.b.write(&token.b)?;
        self.a_log.write(&token.a_log)?;
        self.dt_bias.write(&token.dt_bias)?;
        self.o.write(&token.o)?;
        self.fresh.write(fresh)?;
        self.deferred.slots.write(rows)?;
        self.deferred.set(pending)
    }

    /// The decode of one token of each row.
    fn step(&mut self) -> Result<Gdn<'_>, Error> {
        let Shape {
            batch,
            heads,
            value_heads,
            dim,
            ..
        } = self.shape;
        let inputs = Inputs::qkv(
            self.q.tensor(&[batch, 1, heads, dim])?,
            self.k.tensor(&[batch, 1, heads, dim])?,
            self.v.tensor(&[batch, 1, value_heads, dim])?,
        );
        let gates = GdnGates::raw(
            self.a.tensor(&[batch, 1, value_heads])?,
            self.b.tensor(&[batch, 1, value_heads])?,
            self.a_log.tensor(&[value_heads])?,
            self.dt_bias.tensor(&[value_heads])?,
        );
        let o = self.o.tensor_mut(&[batch, 1, value_heads, dim])?;
        let (states, pending) = self.deferred.tensors(self.shape)?;
        Ok(Gdn::new(inputs, gates, o, states)
            .pending(pending)
            .fresh(self.fresh.tensor(&[batch])?))
    }
}

impl Deferred {
    /// Writes the number of pending tokens and the first entry of each row, from those of its slot.
    fn set(&mut self, pending: &[Count; 5]) -> Result<()> {
        self.len
            .write(&SLOTS.map(|slot| pending[slot].len as i32))?;
        self.base
            .write(&SLOTS.map(|slot| pending[slot].base as i32))
    }

    /// The states and the pending tokens for a launch.
    fn tensors(&mut self, shape: Shape) -> Result<(Update<'_>, Pending<'_>), Error> {
        let Shape {
            batch,
            heads,
            value_heads,
            dim,
            slots,
            ..
        } = shape;
        let pool = self.states.tensor_mut(&[slots, value_heads, dim, dim])?;
        let entries = RING.entries;
        let rings = Rings {
            keys: self.keys.tensor_mut(&[slots, heads, entries, dim])?,
            updates: (self.updates).tensor_mut(&[slots, value_heads, entries, dim])?,
            decays: self.decays.tensor_mut(&[slots, value_heads, entries])?,
            len: self.len.tensor(&[batch])?,
            base: self.base.tensor(&[batch])?,
        };
        let states = States::update(pool).slots(self.slots.tensor(&[batch])?);
        Ok((states, Pending::new(rings)))
    }
}
