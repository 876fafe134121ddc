//! Prefix caching for a KDA layer. A prompt in two launches has the bits of one launch. Its state and window after 128 tokens are
//! kept in a slot. A sequence with the same prefix continues from this slot, in one batch with a row that decodes (a mixed
//! batch). Then both sequences decode. Without a GPU the example runs in the simulator.

mod common;

use anyhow::{Result, ensure};
use common::engine::{Buffer, Engine};
use common::model::{EPS, Model, TAPS};
use common::{OUTPUT_TOLERANCE, same_bits, worst};
use gated_delta::layer::{KdaParameters, Projection, Rows, Weights};
use gated_delta::{Error, KdaDecay, KdaLayer, Operator, Options, Work};
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Number of tokens of a sequence from one checkpoint to the next.
const EVERY: usize = 64;
/// C: number of checkpoint slots of each row. Slot −1 skips its checkpoint.
const CHECKPOINTS: usize = 3;
/// Tolerance of states after a chunkwise prefill.
const STATE_TOLERANCE: f64 = 2e-3;

/// P, the number of slots.
const POOL: usize = 6;
/// Slots of the two sequences, of the first sequence's prompt in one launch, and of the checkpoint.
const FIRST: i32 = 4;
const SECOND: i32 = 0;
const WHOLE: i32 = 2;
const SHARED: i32 = 5;
const PROMPT: usize = 200;
/// Tokens of the first prompt's first launch: a multiple of 64.
const CUT: usize = 128;
/// Number of tokens of the second sequence's prompt. Its first [`CUT`] tokens are those of the first sequence.
const OTHER_PROMPT: usize = 170;
const DECODES: usize = 3;

fn main() -> Result<()> {
    let (engine, is_simulated) = Engine::first()?;
    let [h, hv, k] = if is_simulated {
        [2, 2, 128]
    } else {
        [32, 32, 128]
    };
    let rng = &mut StdRng::seed_from_u64(8);
    let model = Model::random(Operator::Kda, [h, hv, k], rng);
    let (d, width, values) = (model.channels(), model.width(), hv * k);
    let first = model.sequence(PROMPT + 1 + DECODES, rng);
    let mut second = model.sequence(OTHER_PROMPT + DECODES, rng);
    second[..CUT * width].copy_from_slice(&first[..CUT * width]);

    let (conv, norm) = (engine.buffer(&model.conv)?, engine.buffer(&model.norm)?);
    let (a_log, dt_bias) = (engine.buffer(&model.a_log)?, engine.buffer(&model.dt_bias)?);
    // Pools are full of NaN: nothing is read before it is written.
    let mut states = engine.buffer(&vec![f32::NAN; POOL * values * k])?;
    let mut windows = engine.buffer(&vec![bf16::NAN; POOL * d * (TAPS - 1)])?;
    let gates = KdaParameters::new(KdaDecay::Softplus {
        a_log: a_log.tensor(&[hv])?,
        dt_bias: Some(dt_bias.tensor(&[hv, k])?),
    });
    let weights = Weights::new(h, conv.tensor(&[d, TAPS])?, gates, norm.tensor(&[k])?, EPS);
    let (pool, of_slots) = (
        states.tensor_mut(&[POOL, hv, k, k])?,
        windows.tensor_mut(&[POOL, d, TAPS - 1])?,
    );
    let layer = KdaLayer::new(weights, pool, of_slots, Options::default())?;
    let serving = Serving {
        engine: &engine,
        model: &model,
        layer,
        values: [hv, k],
    };

    // The prompt in one launch, then in two launches. The first of the two keeps the state after 128 tokens.
    let prompt = Row::of(&first[..PROMPT * width], WHOLE);
    let whole = serving.launch(&[prompt])?;
    let mut begin = Row::of(&first[..CUT * width], FIRST);
    begin.checkpoints[CUT / EVERY - 1] = SHARED;
    let mut outputs = serving.launch(&[begin])?;
    let rest = begin.after(&first[CUT * width..PROMPT * width], CUT);
    outputs.extend(serving.launch(&[rest])?);
    ensure!(
        same_bits(&whole, &outputs),
        "o depends on where the prompt is cut"
    );
    println!("  a prompt of {PROMPT} tokens, cut at {CUT}: the bits of one launch");

    // The second sequence continues from the checkpoint, while the first sequence decodes.
    let mut other = begin.after(&second[CUT * width..OTHER_PROMPT * width], CUT);
    (other.read, other.write) = (SHARED, SECOND);
    let mut others = Vec::new();
    let mut at = [PROMPT, OTHER_PROMPT - 1];
    for step in 0..=DECODES {
        let token = |of: &'_ [bf16], at: usize| of[at * width..][..width].to_vec();
        let (one, two) = (token(&first, at[0]), token(&second, at[1]));
        let mut rows = [rest.after(&one, at[0]), other.after(&two, at[1])];
        if step == 0 {
            rows[1] = other;
        }
        let o = serving.launch(&rows)?;
        let (one, two) = o.split_at(values);
        outputs.extend(one);
        others.extend(two);
        at = at.map(|at| at + 1);
    }

    let states = states.read()?;
    let of_slot = |slot: i32| &states[slot as usize * values * k..][..values * k];
    for (name, sequence, from, o, slot) in [
        ("the first sequence", &first, 0, &outputs, FIRST),
        ("the second sequence", &second, CUT, &others, SECOND),
    ] {
        let truth = model.truth(sequence)?;
        let wanted = &truth.o[from * values..];
        // The error is that of all tokens together, because the output of one token may be small by chance, but its error from
        // rounded keys is not.
        let off = worst("o", o, wanted, wanted.len(), OUTPUT_TOLERANCE)?;
        let state = worst(
            "state",
            of_slot(slot),
            &truth.states,
            k * k,
            STATE_TOLERANCE,
        )?;
        println!(
            "  {name}: o within {off:.1e} of the reference, the last state within {state:.1e}"
        );
    }
    Ok(())
}

/// A row of a launch.
#[derive(Clone, Copy)]
struct Row<'a> {
    /// The projection's output for the row's tokens.
    tokens: &'a [bf16],
    /// Position: the number of tokens of the sequence before the row's first.
    at: usize,
    read: i32,
    write: i32,
    checkpoints: [i32; CHECKPOINTS],
}

impl<'a> Row<'a> {
    /// A row at the beginning of a sequence. Its slot may hold anything.
    fn of(tokens: &'a [bf16], slot: i32) -> Self {
        Self {
            tokens,
            at: 0,
            read: slot,
            write: slot,
            checkpoints: [-1; CHECKPOINTS],
        }
    }

    /// A row with the next tokens of the same sequence, at position `at`.
    fn after(self, tokens: &'a [bf16], at: usize) -> Self {
        Self {
            at,
            ..Self::of(tokens, self.write)
        }
    }
}

/// A layer in an engine, which allocates the tokens and rows of every launch.
struct Serving<'a> {
    engine: &'a Engine,
    model: &'a Model,
    layer: KdaLayer<'a>,
    /// HV and V.
    values: [usize; 2],
}

impl Serving<'_> {
    /// Launches a step and returns the outputs of all rows, concatenated. If all rows have one token the step is a decode,
    /// otherwise a prefill.
    fn launch(&self, rows: &[Row<'_>]) -> Result<Vec<bf16>> {
        let (engine, b, [hv, v]) = (self.engine, rows.len(), self.values);
        let memory = engine.buffer(
            &rows
                .iter()
                .flat_map(|row| row.tokens)
                .copied()
                .collect::<Vec<_>>(),
        )?;
        let lengths: Vec<usize> = rows
            .iter()
            .map(|row| row.tokens.len() / self.model.width())
            .collect();
        let mut bounds = vec![0];
        for length in &lengths {
            bounds.push(bounds[bounds.len() - 1] + *length as i32);
        }
        let total: usize = lengths.iter().sum();
        let of_rows =
            |index: fn(&Row<'_>) -> i32| engine.buffer(&rows.iter().map(index).collect::<Vec<_>>());
        let (read, write) = (of_rows(|row| row.read)?, of_rows(|row| row.write)?);
        let (fresh, at) = (
            of_rows(|row| (row.at == 0).into())?,
            of_rows(|row| row.at as i32)?,
        );
        let kept = engine.buffer(
            &rows
                .iter()
                .flat_map(|row| row.checkpoints)
                .collect::<Vec<_>>(),
        )?;
        let bounds = engine.buffer(&bounds)?;
        let mut workspace;
        let mut o = engine.buffer(&vec![bf16::NAN; total * hv * v])?;

        let batch = Rows::new(read.tensor(&[b])?)
            .write_slots(write.tensor(&[b])?)
            .fresh(fresh.tensor(&[b])?);
        let step = if total == b {
            let out = o.tensor_mut(&[b, 1, hv, v])?;
            self.layer
                .decode(&self.tokens(&memory, [b, 1])?, &batch, out)
        } else {
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let batch = batch
                .packed(bounds.tensor(&[b + 1])?, longest)
                .positions(at.tensor(&[b])?)
                .checkpoints(EVERY, kept.tensor(&[b, CHECKPOINTS])?);
            let out = o.tensor_mut(&[1, total, hv, v])?;
            let step = self
                .layer
                .prefill(&self.tokens(&memory, [1, total])?, &batch, out);
            // An engine allocates the workspace of its largest launch.
            let elements = step.workspace_bytes()? / size_of::<f32>();
            workspace = engine.buffer(&vec![f32::NAN; elements])?;
            step.workspace(workspace.tensor_mut(&[elements])?)
        };
        // SAFETY: the buffers outlive the wait, nothing else uses them, and no slot is written twice.
        unsafe { engine.library.launch(engine.stream(), &step) }?;
        engine.synchronize()?;
        o.read()
    }

    /// Views of the projection's output, `[q | k | v | z | beta | g]`.
    fn tokens<'b>(
        &self,
        memory: &'b Buffer<bf16>,
        [b, t]: [usize; 2],
    ) -> Result<Projection<'b>, Error> {
        let row = memory.tensor(&[b, t, self.model.width()])?;
        let [x, z, beta, g] = self
            .model
            .parts()
            .map(|part| row.narrow(2, part.start, part.len()));
        let of_heads =
            |part: Result<gated_delta::Tensor<'b>, Error>| part?.split(2, self.values[1]);
        Ok(Projection::new(x?, [of_heads(g)?, beta?], of_heads(z)?))
    }
}
