//! Speculative decoding (draft, verify, accept, resume) with a whole layer on its projection's output: convolution, recurrence
//! and gated norm in one launch. Two ways keep the states and windows after each draft. With f32 states, their outputs equal
//! plain decoding, bit for bit. Two ways keep the states and windows after the last accepted draft, and compute all tokens
//! together, as the library chooses. These two agree bit for bit, and equal plain decoding up to rounding. So does a fifth way,
//! deferred write-back. Without a GPU the example runs in the simulator.
//!
//! A step verifies T tokens of every row: the last certain token, and T - 1 drafts. The output of each token gives the next one.
//! Drafts are accepted up to the first one that differs, and the token in its place becomes certain.

#[path = "../common/mod.rs"]
mod common;
mod keeping;
mod model;

use std::mem;

use anyhow::{Context as _, Result, ensure};
use bytemuck::Pod;
use common::engine::Engine;
use common::same_bits;
use gated_delta::DeviceElement;
use gated_delta::layer::Rows;
use half::bf16;
use keeping::{Keeping, Slots, Way};
use model::{Drafter, Model, Sequence, Shape, TAPS, Tokens, VOCABULARY};

/// The prompt of each of B rows: one token.
const PROMPTS: [usize; 3] = [1, 17, 40];

/// T, the number of tokens of a step.
const TOKENS: usize = 4;

/// Number of tokens to decode.
const LENGTH: usize = 32;

/// Tolerance of an output, relative to its norm, if the tokens on f32 states are computed together.
const F32_TOLERANCE: f32 = 1e-4;

/// Tolerance of an output, relative to its norm, if bf16 states are not rounded after the same tokens as in plain decoding.
const ROUNDED_TOLERANCE: f32 = 5e-2;

fn main() -> Result<()> {
    let (engine, is_simulated) = Engine::first()?;
    let [heads, value_heads, dim] = match is_simulated {
        false => [4, 8, 128],
        true => [1, 2, 64],
    };
    let shape = Shape {
        heads,
        value_heads,
        dim,
    };
    let model = Model::random(&engine, shape, 5)?;

    println!("f32 states, against plain decoding:");
    let plain = decode::<f32>(&engine, &model)?;
    for way in Way::AFTER_EACH {
        let rows = speculate::<f32>(&engine, &model, &plain, way)?;
        same(&rows, &plain).with_context(|| format!("{way:?} differs from plain decoding"))?;
    }
    let [first, other] = Way::AFTER_THE_LAST;
    let wanted = speculate::<f32>(&engine, &model, &plain, first)?;
    near(&wanted, &plain, F32_TOLERANCE)?;
    let rows = speculate::<f32>(&engine, &model, &plain, other)?;
    same(&rows, &wanted).with_context(|| format!("{other:?} differs from {first:?}"))?;

    println!("bf16 states, against each other and plain decoding:");
    let plain = decode::<bf16>(&engine, &model)?;
    let has_clusters = match engine.library.context() {
        Some(context) => context.device().compute_capability()? >= (9, 0),
        None => true,
    };
    for [first, other] in [Way::AFTER_EACH, Way::AFTER_THE_LAST] {
        if first == Way::Commit && !has_clusters {
            println!(
                "  {first:?}, {other:?}: skipped, a whole layer of tokens at once takes compute capability 9.0"
            );
            continue;
        }
        let wanted = speculate::<bf16>(&engine, &model, &plain, first)?;
        near(&wanted, &plain, ROUNDED_TOLERANCE)?;
        let rows = speculate::<bf16>(&engine, &model, &plain, other)?;
        same(&rows, &wanted).with_context(|| format!("{other:?} differs from {first:?}"))?;
    }
    if is_simulated {
        near(
            &speculate::<bf16>(&engine, &model, &plain, Way::Wait)?,
            &plain,
            ROUNDED_TOLERANCE,
        )?;
    } else {
        println!("  Wait: its kernels have not run on a GPU yet");
    }
    Ok(())
}

/// Plain decoding: one decode per token.
fn decode<S: DeviceElement + Pod>(engine: &Engine, model: &Model) -> Result<Vec<Sequence>> {
    let (rows, shape) = (PROMPTS.len(), model.shape);
    let mut sequences = PROMPTS.map(Sequence::new);
    let mut step = Tokens::room(engine, model, rows, 1)?;
    let mut o = engine.buffer(&vec![f32::NAN; rows * shape.values()])?;
    let mut slots = Slots::<S>::new(engine, shape, rows, TAPS - 1)?;
    let places: Vec<[usize; 2]> = (0..rows).map(|row| [row, 0]).collect();
    let of_rows = engine.buffer(&[0, 1, 2])?;
    for _ in 0..LENGTH {
        step.embed(model, &sequences.each_ref().map(Sequence::last))?;
        let [pool, windows] = slots.views()?;
        let layer = model.layer(pool, windows)?;
        let (token, rows) = (
            step.projection(&layer)?,
            Rows::new(of_rows.tensor(&[rows])?),
        );
        let one = layer.decode(&token, &rows, step.output(&mut o)?);
        // SAFETY: the buffers outlive the wait, and row b writes slot b.
        unsafe { engine.library.launch(engine.stream(), &one) }?;
        engine.synchronize()?;
        let windows = slots.windows_at(&places)?;
        let outputs = o.read()?;
        let after = outputs.chunks(shape.values()).zip(windows);
        for (sequence, (o, window)) in sequences.iter_mut().zip(after) {
            sequence.push(model, o);
            sequence.windows.insert(sequence.outputs.len(), window);
        }
    }
    let distinct: std::collections::BTreeSet<_> =
        sequences.iter().flat_map(|row| &row.tokens).collect();
    println!(
        "  plain: {LENGTH} launches, {} different tokens",
        distinct.len()
    );
    ensure!(
        distinct.len() > VOCABULARY / 4,
        "the model hardly looks at its states"
    );
    Ok(sequences.to_vec())
}

/// The speculative loop: draft, verify, accept.
fn speculate<S: DeviceElement + Pod>(
    engine: &Engine,
    model: &Model,
    plain: &[Sequence],
    way: Way,
) -> Result<Vec<Sequence>> {
    let drafter = Drafter { plain };
    let (rows, width) = (PROMPTS.len(), model.shape.values());
    let mut sequences = PROMPTS.map(Sequence::new);
    let mut states = Keeping::<S>::new(engine, model.shape, way, [rows, TOKENS])?;
    let mut step = Tokens::room(engine, model, rows, TOKENS)?;
    let mut last = Tokens::room(engine, model, rows, TOKENS)?;
    let mut o = engine.buffer(&vec![f32::NAN; rows * TOKENS * width])?;
    let (mut steps, mut accepted_drafts) = (0, 0);
    while sequences
        .iter()
        .any(|sequence| sequence.outputs.len() < LENGTH)
    {
        let mut drafts = Vec::with_capacity(rows * TOKENS);
        for (row, sequence) in sequences.iter().enumerate() {
            let known = sequence.tokens.len();
            drafts.push(sequence.last());
            drafts.extend((known..known + TOKENS - 1).map(|position| drafter.draft(row, position)));
        }
        step.embed(model, &drafts)?;

        states.verify(engine, model, &step, &last, &mut o)?;
        engine.synchronize()?;
        let outputs = o.read()?;
        let before = sequences.each_ref().map(|row| row.outputs.len());

        let mut accepted = [0; PROMPTS.len()];
        for (row, sequence) in sequences.iter_mut().enumerate() {
            let drafts = &drafts[row * TOKENS..][..TOKENS];
            for (token, o) in outputs[row * TOKENS * width..][..TOKENS * width]
                .chunks(width)
                .enumerate()
            {
                let next = sequence.push(model, o);
                accepted[row] += 1;
                if drafts.get(token + 1) != Some(&next) {
                    break;
                }
            }
            accepted_drafts += accepted[row] - 1;
        }
        states.accept(engine, model, &step, &accepted)?;
        let waiting = states.waiting()?;
        for (row, window) in states.windows()?.into_iter().enumerate() {
            let tokens = match way {
                // The next step commits the tokens that are accepted now.
                Way::Resume => before[row],
                _ => sequences[row].outputs.len() - waiting[row],
            };
            sequences[row].windows.insert(tokens, window);
        }
        mem::swap(&mut step, &mut last);
        steps += 1;
    }
    println!("  {way:?}: {steps} steps, {accepted_drafts} drafts accepted");
    Ok(sequences.to_vec())
}

/// Checks that the first `LENGTH` tokens, their outputs and the windows are equal, bit for bit.
fn same(rows: &[Sequence], wanted: &[Sequence]) -> Result<()> {
    for (row, (got, wanted)) in rows.iter().zip(wanted).enumerate() {
        for (token, (got, wanted)) in got
            .outputs
            .iter()
            .zip(&wanted.outputs)
            .take(LENGTH)
            .enumerate()
        {
            ensure!(
                same_bits(got, wanted),
                "row {row}, token {token}: other outputs"
            );
        }
        let (got, wanted) = (&got.tokens[..=LENGTH], &wanted.tokens[..=LENGTH]);
        ensure!(
            got == wanted,
            "row {row}: tokens {got:?} instead of {wanted:?}"
        );
    }
    same_windows(rows, wanted)?;
    println!("    the same tokens, outputs and windows, bit for bit");
    Ok(())
}

/// Checks that windows after the same tokens are equal, bit for bit, because windows are copies of inputs.
fn same_windows(rows: &[Sequence], wanted: &[Sequence]) -> Result<()> {
    for (row, (got, wanted)) in rows.iter().zip(wanted).enumerate() {
        let mut compared = 0;
        for (&tokens, window) in &got.windows {
            let Some(exact) = wanted.windows.get(&tokens) else {
                continue;
            };
            if got.tokens[..tokens] == wanted.tokens[..tokens] {
                ensure!(
                    same_bits(window, exact),
                    "row {row}: another window after {tokens} tokens"
                );
                compared += 1;
            }
        }
        ensure!(compared > 0, "row {row}: no window was looked at");
    }
    Ok(())
}

/// Checks that outputs are near those of plain decoding for as long as the tokens are the same.
fn near(rows: &[Sequence], plain: &[Sequence], tolerance: f32) -> Result<()> {
    let (mut worst, mut compared) = (0.0, 0);
    for (row, (got, plain)) in rows.iter().zip(plain).enumerate() {
        for (token, (o, wanted)) in got.outputs.iter().zip(&plain.outputs).enumerate() {
            if got.tokens[..=token] != plain.tokens[..=token] {
                break;
            }
            let norm =
                |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
            let error = norm(&mut o.iter().zip(wanted).map(|(o, wanted)| o - wanted))
                / norm(&mut wanted.iter().copied());
            ensure!(
                error <= tolerance,
                "row {row}, token {token}: {error:e} off"
            );
            worst = f32::max(worst, error);
            compared += 1;
        }
    }
    same_windows(rows, plain)?;
    println!(
        "    {compared} of {} outputs follow the same tokens, and are within {worst:.1e}",
        plain.len() * LENGTH
    );
    Ok(())
}
