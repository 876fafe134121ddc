//! The life of a layer in an engine with one `GdnLayer`: two prompts, decodes, verifies of drafts, resumes after some drafts are
//! accepted, and a commit. Slots hold NaN when a sequence gets them. Outputs, states and windows are checked against the f64
//! reference. Without a GPU the example runs in the simulator.

mod common;

use anyhow::{Result, ensure};
use common::engine::{Buffer, Engine};
use common::model::{EPS, Model, TAPS};
use common::{OUTPUT_TOLERANCE, same_bits, worst};
use gated_delta::layer::{GdnParameters, Projection, Rows, Weights};
use gated_delta::{Error, GdnLayer, Operator, Options, Tensor, Work};
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// P, the number of slots.
const POOL: usize = 6;
/// B: two sequences, and one row of padding.
const B: usize = 3;
const SLOTS: [i32; B] = [4, 0, -1];
const PROMPTS: [usize; 2] = [100, 37];
const DECODES: usize = 3;
/// T of a verify: one certain token, then drafts.
const DRAFTS: usize = 4;
/// Number of accepted tokens of each verify, by row.
const KEPT: [[usize; B]; 4] = [[3, 1, 0], [4, 2, 0], [1, 4, 0], [2, 3, 0]];
/// Tolerance of states after a chunkwise prefill.
const STATE_TOLERANCE: f64 = 2e-3;

fn main() -> Result<()> {
    let (engine, is_simulated) = Engine::first()?;
    let [h, hv, k] = if is_simulated {
        [1, 2, 64]
    } else {
        [16, 32, 128]
    };
    let rng = &mut StdRng::seed_from_u64(7);
    let model = Model::random(Operator::Gdn, [h, hv, k], rng);
    let (d, width, values) = (model.channels(), model.width(), hv * k);
    let kept_of = |row: usize| KEPT.iter().map(|kept| kept[row]).sum::<usize>();
    let sequences = [0, 1].map(|row| model.sequence(PROMPTS[row] + DECODES + kept_of(row), rng));
    let part = |row: usize, from: usize, len: usize| &sequences[row][from * width..][..len * width];

    // Weights and pools are made once; the layer borrows them. Windows are `[P, W - 1, D]`, token by token.
    let (conv, norm) = (engine.buffer(&model.conv)?, engine.buffer(&model.norm)?);
    let (a_log, dt_bias) = (engine.buffer(&model.a_log)?, engine.buffer(&model.dt_bias)?);
    let mut states = engine.buffer(&vec![f32::NAN; POOL * values * k])?;
    let mut windows = engine.buffer(&vec![bf16::NAN; POOL * (TAPS - 1) * d])?;
    let gates = GdnParameters::new(a_log.tensor(&[hv])?, dt_bias.tensor(&[hv])?);
    let weights = Weights::new(h, conv.tensor(&[d, TAPS])?, gates, norm.tensor(&[k])?, EPS);
    let by_token = windows.tensor_mut(&[POOL, d, TAPS - 1])?;
    let by_token = by_token.with_strides(&[(TAPS - 1) * d, 1, d])?;
    let pool = states.tensor_mut(&[POOL, hv, k, k])?;
    let layer = GdnLayer::new(weights, pool, by_token, Options::default())?;

    // Slots of the prompts' rows, and of all later rows.
    let (slots, fresh) = (engine.buffer(&SLOTS)?, engine.buffer(&[1, 1])?);
    let total = PROMPTS[0] + PROMPTS[1];
    let bounds = engine.buffer(&[0, PROMPTS[0] as i32, total as i32])?;
    let prompts = Rows::new(slots.tensor(&[2])?).fresh(fresh.tensor(&[2])?);
    let prompts = prompts.packed(bounds.tensor(&[3])?, PROMPTS[0]);
    let (rows, mut keep) = (Rows::new(slots.tensor(&[B])?), engine.buffer(&[0; B])?);

    // Every kernel is compiled at start.
    let tokens = |dims, rows: &[bf16]| Tokens::new(&engine, &model, [hv, k], dims, rows);
    let (sample, drafts) = (
        tokens([B, DRAFTS], &[])?,
        Some((&[DRAFTS][..], keep.tensor(&[B])?)),
    );
    layer.prewarm_all(&engine.library, &rows, Some(&prompts), drafts, |dims| {
        sample.views(&layer, dims)
    })?;
    let compiled = engine.library.compiled();
    let launch = |work: &dyn Work| -> Result<()> {
        // SAFETY: the buffers outlive the wait, nothing else uses them, and no two rows write one slot.
        unsafe { engine.library.launch(engine.stream(), work) }?;
        engine.synchronize()
    };

    // Both prompts, concatenated, in slots that were not cleared.
    let mut at = PROMPTS;
    let mut prompt = tokens([1, total], &[part(0, 0, at[0]), part(1, 0, at[1])].concat())?;
    let (row, o) = prompt.new_views(&layer)?;
    let step = layer.prefill(&row, &prompts, o);
    // An engine allocates the workspace of its largest launch.
    let elements = step.workspace_bytes()? / size_of::<f32>();
    let mut workspace = engine.buffer(&vec![f32::NAN; elements])?;
    launch(&step.workspace(workspace.tensor_mut(&[elements])?))?;
    let o = prompt.o.read()?;
    let mut outputs = [o[..at[0] * values].to_vec(), o[at[0] * values..].to_vec()];
    let mut held = |tokens: &Tokens, kept: [usize; B]| -> Result<()> {
        let o = tokens.o.read()?;
        let rows = o.chunks(o.len() / B).zip(kept);
        for ((o, kept), outputs) in rows.zip(&mut outputs) {
            outputs.extend(&o[..kept * values]);
        }
        let is_zero = o[2 * o.len() / B..].iter().all(|&o| o == bf16::ZERO);
        ensure!(is_zero, "padding has an output");
        Ok(())
    };

    for _ in 0..DECODES {
        let padding = vec![bf16::NAN; width];
        let one = [part(0, at[0], 1), part(1, at[1], 1), &padding].concat();
        let mut token = tokens([B, 1], &one)?;
        let (row, o) = token.new_views(&layer)?;
        launch(&layer.decode(&row, &rows, o))?;
        held(&token, [1, 1, 0])?;
        at = at.map(|at| at + 1);
    }

    // The engine keeps only the projection's output of a step. The next step commits the accepted tokens.
    let mut last: Option<Tokens> = None;
    for kept in KEPT {
        let mut drafted = model.sequence(B * DRAFTS, rng);
        for row in 0..2 {
            let right = part(row, at[row], kept[row]);
            drafted[row * DRAFTS * width..][..right.len()].copy_from_slice(right);
            at[row] += kept[row];
        }
        let mut drafts = tokens([B, DRAFTS], &drafted)?;
        let (row, o) = drafts.new_views(&layer)?;
        launch(&match &last {
            None => layer.verify(&row, &rows, o),
            Some(last) => layer.resume(
                &row,
                &last.projection(&layer)?,
                keep.tensor(&[B])?,
                &rows,
                o,
            ),
        })?;
        held(&drafts, kept)?;
        keep.write(&kept.map(|kept| kept as i32))?;
        last = Some(drafts);
    }
    if let Some(last) = &last {
        launch(&layer.commit(&last.projection(&layer)?, keep.tensor(&[B])?, &rows))?;
    }
    ensure!(
        engine.library.compiled() == compiled,
        "a launch has compiled"
    );

    let mut wanted_states = vec![f64::NAN; POOL * values * k];
    let mut wanted_windows = vec![bf16::NAN; POOL * (TAPS - 1) * d];
    for (row, sequence) in sequences.iter().enumerate() {
        let (truth, slot, tokens) = (model.truth(sequence)?, SLOTS[row] as usize, at[row]);
        let off = worst(
            "o",
            &outputs[row],
            &truth.o,
            truth.o.len(),
            OUTPUT_TOLERANCE,
        )?;
        println!("  sequence {row}: {tokens} tokens, o within {off:.1e} of the reference");
        wanted_states[slot * values * k..][..values * k].copy_from_slice(&truth.states);
        let inputs = sequence.chunks(width).skip(tokens + 1 - TAPS);
        let inputs: Vec<bf16> = inputs.flat_map(|row| &row[..d]).copied().collect();
        wanted_windows[slot * (TAPS - 1) * d..][..inputs.len()].copy_from_slice(&inputs);
    }
    let states = states.read()?;
    let off = worst("state", &states, &wanted_states, k * k, STATE_TOLERANCE)?;
    println!("  states within {off:.1e}");
    ensure!(
        same_bits(&windows.read()?, &wanted_windows),
        "windows are not copies of the inputs"
    );
    Ok(())
}

/// Memory of an engine for the tokens of a launch.
struct Tokens {
    dims: [usize; 2],
    /// HV and V.
    values: [usize; 2],
    /// The projection's output, `[B, T, D + HV·V + 2·HV]`.
    row: Buffer<bf16>,
    width: usize,
    /// `[B, T, HV, V]`.
    o: Buffer<bf16>,
}

impl Tokens {
    /// Copies `rows` of the projection's output, or none, and fills the output with NaN.
    fn new(
        engine: &Engine,
        model: &Model,
        values: [usize; 2],
        dims: [usize; 2],
        rows: &[bf16],
    ) -> Result<Self> {
        let (count, width) = (dims[0] * dims[1], model.width());
        let mut row = engine.buffer(&vec![bf16::NAN; count * width])?;
        row.write(rows)?;
        let o = engine.buffer(&vec![bf16::NAN; count * values[0] * values[1]])?;
        Ok(Self {
            dims,
            values,
            row,
            width,
            o,
        })
    }

    /// Views of the projection's output.
    fn projection<'a>(&'a self, layer: &GdnLayer<'a>) -> Result<Projection<'a>, Error> {
        let [b, t] = self.dims;
        layer.projection(self.row.tensor(&[b, t, self.width])?)
    }

    /// Views of the projection's output, and the layer's output tensor, for a launch.
    fn new_views<'a>(
        &'a mut self,
        layer: &GdnLayer<'a>,
    ) -> Result<(Projection<'a>, Tensor<'a>), Error> {
        let ([b, t], [hv, v]) = (self.dims, self.values);
        let o = self.o.tensor_mut(&[b, t, hv, v])?;
        Ok((layer.projection(self.row.tensor(&[b, t, self.width])?)?, o))
    }

    /// Views like those of [`Self::new_views`], with other dims, for `prewarm_all`.
    fn views<'a>(
        &'a self,
        layer: &GdnLayer<'a>,
        [b, t]: [usize; 2],
    ) -> Result<(Projection<'a>, Tensor<'a>), Error> {
        let [hv, v] = self.values;
        let row = layer.projection(self.row.tensor(&[b, t, self.width])?)?;
        Ok((row, self.o.tensor(&[b, t, hv, v])?))
    }
}
