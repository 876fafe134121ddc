//! Prefill, of GDN and of KDA: a prompt in two launches, with the bits of one; a sequence that begins as another one did,
//! from its checkpoint, beside a row that decodes (a mixed batch); then decodes of both. Without a GPU, in the simulator.

mod common;

use std::ops::Range;

use anyhow::{Result, ensure};
use common::engine::{Buffer, Engine};
use common::{OUTPUT_TOLERANCE, Shape, doubles, rounded, same_bits, uniform, worst};
use gated_delta::{
    Gates, Gdn, GdnGates, Inputs, Kda, KdaBeta, KdaGate, KdaGates, States, Step, Work,
};
use gated_delta_reference::recurrent::{Output, Recurrent, TokenGates, recurrent};
use gated_delta_reference::{gdn, kda};
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Tokens from one checkpoint to the next.
const EVERY: usize = 64;
/// Checkpoints that a row of a launch has slots for; −1 where one is not kept.
const CHECKPOINTS: usize = 3;
/// Of states, after tokens in chunks.
const STATE_TOLERANCE: f64 = 2e-3;

/// Slots of the two sequences, of the first one's prompt in one launch, and of the checkpoint after 128 tokens.
const FIRST: i32 = 4;
const SECOND: i32 = 0;
const WHOLE: i32 = 2;
const SHARED: i32 = 5;
const PROMPT: usize = 200;
/// Where the engine cuts it: a multiple of 64.
const CUT: usize = 128;
/// Tokens of the second sequence, the first [`CUT`] of which are those of the first.
const OTHER_PROMPT: usize = 170;
const DECODES: usize = 3;

/// Whose prompts they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Gdn,
    Kda,
}

fn main() -> Result<()> {
    let device = common::gpu()?;
    let (engine, small) = match device {
        Some(device) => (Engine::on(device)?, false),
        None => {
            println!("no GPU: in the simulator");
            (Engine::simulated(), true)
        }
    };
    for operator in [Operator::Gdn, Operator::Kda] {
        let (heads, value_heads) = match (operator, small) {
            (Operator::Gdn, false) => (16, 32),
            (Operator::Kda, false) => (32, 32),
            (Operator::Gdn, true) => (1, 2),
            (Operator::Kda, true) => (2, 2),
        };
        let shape = Shape {
            batch: 2,
            tokens: 1,
            heads,
            value_heads,
            // KDA's prompts have K = 128.
            dim: if small && operator == Operator::Gdn {
                64
            } else {
                128
            },
            slots: 6,
        };
        println!("{operator:?}");
        serve(&engine, operator, shape)?;
    }
    Ok(())
}

/// Two sequences that begin alike.
fn serve(engine: &Engine, operator: Operator, shape: Shape) -> Result<()> {
    let rng = &mut StdRng::seed_from_u64(8);
    let first = Sequence::random(operator, shape, PROMPT + 1 + DECODES, rng);
    let mut second = Sequence::random(operator, shape, OTHER_PROMPT + DECODES, rng);
    second.begin_as(&first, CUT);
    let mut layer = Layer::new(engine, operator, shape, rng)?;

    // The prompt in one launch, and in two, of which the first keeps the state after 128 tokens.
    let mut prompt = Row::of(&first, 0..PROMPT, WHOLE);
    let whole = layer.launch(engine, &[prompt.clone()])?;
    prompt.write = FIRST;
    let mut begin = Row {
        tokens: 0..CUT,
        ..prompt.clone()
    };
    begin.checkpoints[CUT / EVERY - 1] = SHARED;
    let mut parts = layer.launch(engine, &[begin])?;
    parts.extend(layer.launch(engine, &[prompt.after(CUT..PROMPT)])?);
    ensure!(
        same_bits(&whole, &parts),
        "o depends on where the prompt is cut"
    );
    let [one, two] = [WHOLE, FIRST].map(|slot| layer.state(slot));
    ensure!(same_bits(&one?, &two?), "the state depends on it");
    println!("  a prompt of {PROMPT} tokens, cut at {CUT}: the bits of one launch");

    // The second sequence goes on from the checkpoint, while the first one decodes.
    let mut rest = Row::of(&second, CUT..OTHER_PROMPT, SECOND);
    (rest.read, rest.fresh) = (SHARED, false);
    let mixed = [prompt.after(PROMPT..PROMPT + 1), rest];
    let o = layer.launch(engine, &mixed)?;
    let (decoded, prefilled) = o.split_at(shape.value_heads * shape.dim);
    parts.extend(decoded);
    let mut others = prefilled.to_vec();

    for step in 0..DECODES {
        let at = [PROMPT + 1 + step, OTHER_PROMPT + step];
        let rows = [
            prompt.after(at[0]..at[0] + 1),
            mixed[1].after(at[1]..at[1] + 1),
        ];
        let o = layer.launch(engine, &rows)?;
        let (one, other) = o.split_at(shape.value_heads * shape.dim);
        parts.extend(one);
        others.extend(other);
    }
    layer.check("the first sequence", &first, 0, &parts, FIRST)?;
    layer.check("the second sequence", &second, CUT, &others, SECOND)
}

/// The tokens of a sequence: of each q and k, v, and what its gates are made of.
#[derive(Clone)]
struct Sequence {
    tensors: [Vec<bf16>; 5],
    widths: [usize; 5],
}

/// Elements of a token in q, k, v, `a` (GDN) or `g` (KDA), and `b` or `beta`.
fn widths(operator: Operator, shape: Shape) -> [usize; 5] {
    let (keys, values) = (shape.heads * shape.dim, shape.value_heads * shape.dim);
    let decays = match operator {
        Operator::Gdn => shape.value_heads,
        Operator::Kda => values,
    };
    [keys, keys, values, decays, shape.value_heads]
}

impl Sequence {
    fn random(operator: Operator, shape: Shape, tokens: usize, rng: &mut StdRng) -> Self {
        let widths = widths(operator, shape);
        let mut draw =
            |of_token: usize, size: f32| rounded(uniform(rng, tokens * of_token, -size, size));
        Self {
            tensors: [0, 1, 2, 3, 4].map(|i| draw(widths[i], if i < 3 { 1.0 } else { 2.0 })),
            widths,
        }
    }

    /// The first tokens are those of another.
    fn begin_as(&mut self, other: &Self, tokens: usize) {
        let pairs = self.tensors.iter_mut().zip(&other.tensors);
        for ((to, from), width) in pairs.zip(self.widths) {
            to[..tokens * width].copy_from_slice(&from[..tokens * width]);
        }
    }
}

/// A row of a launch.
#[derive(Clone)]
struct Row<'a> {
    sequence: &'a Sequence,
    tokens: Range<usize>,
    read: i32,
    write: i32,
    fresh: bool,
    checkpoints: [i32; CHECKPOINTS],
}

impl<'a> Row<'a> {
    /// From the sequence's beginning, in a slot that may hold anything.
    fn of(sequence: &'a Sequence, tokens: Range<usize>, slot: i32) -> Self {
        Self {
            sequence,
            tokens,
            read: slot,
            write: slot,
            fresh: true,
            checkpoints: [-1; CHECKPOINTS],
        }
    }

    /// The same sequence going on where it is.
    fn after(&self, tokens: Range<usize>) -> Self {
        Self {
            tokens,
            read: self.write,
            fresh: false,
            checkpoints: [-1; CHECKPOINTS],
            ..self.clone()
        }
    }
}

/// The layer of an engine, without its memory for tokens, which is made anew here for every launch.
struct Layer {
    operator: Operator,
    shape: Shape,
    /// A_log and dt_bias.
    parameters: [Vec<f32>; 2],
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    /// `[P, HV, V, K]`
    states: Buffer<f32>,
}

impl Layer {
    /// With a pool full of NaN: what is there is never read before it is written.
    fn new(engine: &Engine, operator: Operator, shape: Shape, rng: &mut StdRng) -> Result<Self> {
        let [.., decays, heads] = widths(operator, shape);
        let parameters = [
            uniform(rng, heads, -3.0, 0.0),
            uniform(rng, decays, -1.0, 1.0),
        ];
        Ok(Self {
            operator,
            shape,
            a_log: engine.buffer(&parameters[0])?,
            dt_bias: engine.buffer(&parameters[1])?,
            parameters,
            states: engine.buffer(&vec![f32::NAN; shape.slots * shape.state()])?,
        })
    }

    /// The outputs of rows, one behind the other. Rows of one token each are a decode, others a prefill.
    fn launch(&mut self, engine: &Engine, rows: &[Row<'_>]) -> Result<Vec<bf16>> {
        let Shape {
            heads,
            value_heads,
            dim,
            slots,
            ..
        } = self.shape;
        let mut tokens: [Vec<bf16>; 5] = Default::default();
        let mut bounds = vec![0];
        for row in rows {
            let of_row = row.sequence.tensors.iter().zip(row.sequence.widths);
            for (all, (tensor, width)) in tokens.iter_mut().zip(of_row) {
                all.extend(&tensor[row.tokens.start * width..row.tokens.end * width]);
            }
            bounds.push(bounds[bounds.len() - 1] + i32::try_from(row.tokens.len())?);
        }
        let decode = rows.iter().all(|row| row.tokens.len() == 1);
        let total = tokens[4].len() / value_heads;
        let leading = if decode { [total, 1] } else { [1, total] };
        let dims = |inner: &[usize]| [&leading[..], inner].concat();

        let [q, k, v, g, b] = tokens;
        let [q, k, v, g, b] = [&q, &k, &v, &g, &b].map(|tensor| engine.buffer(tensor));
        let (q, k, v, g, b) = (q?, k?, v?, g?, b?);
        let of_rows = |index: fn(&Row<'_>) -> i32| rows.iter().map(index).collect::<Vec<_>>();
        let read = engine.buffer(&of_rows(|row| row.read))?;
        let write = engine.buffer(&of_rows(|row| row.write))?;
        let mut o = engine.buffer(&vec![bf16::NAN; total * value_heads * dim])?;

        let pool = self.states.tensor_mut(&[slots, value_heads, dim, dim])?;
        let states = States::update(pool)
            .slots(read.tensor(&[rows.len()])?)
            .write_slots(write.tensor(&[rows.len()])?);
        let inputs = Inputs::qkv(
            q.tensor(&dims(&[heads, dim]))?,
            k.tensor(&dims(&[heads, dim]))?,
            v.tensor(&dims(&[value_heads, dim]))?,
        );
        let out = o.tensor_mut(&dims(&[value_heads, dim]))?;
        let prompts = (!decode).then_some((&bounds[..], total));
        let [a_log, beta] = [
            self.a_log.tensor(&[value_heads])?,
            b.tensor(&dims(&[value_heads]))?,
        ];
        match self.operator {
            Operator::Gdn => {
                let dt_bias = self.dt_bias.tensor(&[value_heads])?;
                let a = g.tensor(&dims(&[value_heads]))?;
                let gates = GdnGates::raw(a, beta, a_log, dt_bias);
                run(engine, Gdn::new(inputs, gates, out, states), rows, prompts)
            }
            Operator::Kda => {
                let dt_bias = Some(self.dt_bias.tensor(&[value_heads, dim])?);
                let g = g.tensor(&dims(&[value_heads, dim]))?;
                let kind = KdaGate::Softplus { a_log, dt_bias };
                let gates = KdaGates::new(g, kind, beta, KdaBeta::Logit);
                run(engine, Kda::new(inputs, gates, out, states), rows, prompts)
            }
        }?;
        o.read()
    }

    fn state(&self, slot: i32) -> Result<Vec<f32>> {
        let len = self.shape.state();
        Ok(self.states.read()?[usize::try_from(slot)? * len..][..len].to_vec())
    }

    /// Checks a sequence against the reference: its outputs from token `from` on, and its last state.
    fn check(
        &self,
        name: &str,
        sequence: &Sequence,
        from: usize,
        o: &[bf16],
        slot: i32,
    ) -> Result<()> {
        let truth = self.truth(sequence)?;
        let head = self.shape.dim;
        let wanted = &truth.o[from * self.shape.value_heads * head..];
        // Of all tokens: the output of one may be small by chance, and what rounding makes of keys is not.
        let outputs = worst("o", o, wanted, wanted.len(), OUTPUT_TOLERANCE)?;
        let state = self.state(slot)?;
        let states = worst("state", &state, &truth.pool, head * head, STATE_TOLERANCE)?;
        println!(
            "  {name}: o within {outputs:.1e} of the reference, the last state within {states:.1e}"
        );
        Ok(())
    }

    /// All tokens of a sequence, one after the other from zeros.
    fn truth(&self, sequence: &Sequence) -> Result<Output, gated_delta_reference::Error> {
        let Shape {
            heads,
            value_heads,
            dim,
            ..
        } = self.shape;
        let [q, k, v, g, b] = sequence.tensors.each_ref().map(|tensor| doubles(tensor));
        let [a_log, dt_bias] = self.parameters.each_ref().map(|values| doubles(values));
        let gates = match self.operator {
            Operator::Gdn => TokenGates::Gdn(gdn::Gates::Raw {
                a: &g,
                b: &b,
                a_log: &a_log,
                dt_bias: &dt_bias,
                beta_scale: 1.0,
            }),
            Operator::Kda => TokenGates::Kda(kda::KdaGates {
                g: &g,
                kind: kda::KdaGate::Softplus {
                    a_log: &a_log,
                    dt_bias: Some(&dt_bias),
                },
                beta: &b,
                beta_kind: kda::KdaBeta::Logit,
            }),
        };
        let rows = [1, b.len() / value_heads];
        let step = Recurrent {
            q: &q,
            k: &k,
            v: &v,
            ..Recurrent::new(rows, [heads, value_heads], [dim, dim], gates)
        };
        recurrent(&step, &vec![0.0; self.shape.state()], None, None)
    }
}

/// Launches a step of `rows`, and waits for it; `prompts` are their bounds and all their tokens, unless they are decodes.
fn run<G: Gates>(
    engine: &Engine,
    step: Step<'_, G>,
    rows: &[Row<'_>],
    prompts: Option<(&[i32], usize)>,
) -> Result<()> {
    let fresh: Vec<i32> = rows.iter().map(|row| row.fresh.into()).collect();
    let positions: Vec<i64> = rows.iter().map(|row| row.tokens.start as i64).collect();
    let kept: Vec<i32> = rows.iter().flat_map(|row| row.checkpoints).collect();
    let (fresh, positions) = (engine.buffer(&fresh)?, engine.buffer(&positions)?);
    let kept = engine.buffer(&kept)?;
    let (bounds, mut workspace);
    let mut step = step.fresh(fresh.tensor(&[rows.len()])?);
    if let Some((of_rows, total)) = prompts {
        bounds = engine.buffer(of_rows)?;
        step = step
            .packed(bounds.tensor(&[rows.len() + 1])?, total)
            .positions(positions.tensor(&[rows.len()])?)
            .checkpoints(EVERY, kept.tensor(&[rows.len(), CHECKPOINTS])?);
        // An engine has one for its largest launch.
        let elements = step.workspace_bytes()?.div_ceil(4);
        workspace = engine.buffer(&vec![f32::NAN; elements])?;
        if elements > 0 {
            step = step.workspace(workspace.tensor_mut(&[elements])?);
        }
    }
    // SAFETY: the buffers outlive the wait, nobody else uses them, and no slot is written twice.
    unsafe { engine.library.launch(engine.stream(), &step) }?;
    engine.synchronize()
}
