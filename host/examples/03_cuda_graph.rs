//! A step over a padded batch, captured once as a CUDA graph and replayed with other slots and lengths. The kernels read slots
//! and lengths on the device. The step has two layers: one decodes one token of every row, the other takes packed rows of up to
//! four tokens.

mod common;

use anyhow::{Context as _, Result};
use common::engine::Engine;
use common::layer::Layer;
use common::{Inputs, Rows, Shape};
use gated_delta::driver::Graph;

const DECODE: Shape = Shape {
    batch: 6,
    tokens: 1,
    heads: 16,
    value_heads: 32,
    dim: 128,
    slots: 9,
};
const VERIFY: Shape = Shape {
    tokens: 4,
    ..DECODE
};

/// Slots and packed row bounds of each step. Padding rows have slot -1, and any number of tokens.
const STEPS: [([i32; 6], [i32; 7]); 5] = [
    ([3, 1, 4, 8, 5, 0], [0, 4, 8, 12, 16, 20, 24]),
    ([3, 1, 4, -1, -1, -1], [0, 1, 3, 7, 7, 7, 7]),
    ([7, -1, 2, 6, -1, 1], [0, 2, 3, 3, 6, 7, 11]),
    ([-1; 6], [0; 7]),
    ([0, 1, 2, 3, 4, 9], [0, 4, 5, 9, 10, 14, 15]),
];

fn main() -> Result<()> {
    let Some(device) = common::gpu_or_skip()? else {
        return Ok(());
    };
    let engine = Engine::on(device)?;
    let stream = engine
        .gpu_stream()
        .context("an engine on a GPU has a stream")?;

    let (decode, verify) = (Inputs::random(DECODE, 3), Inputs::random(VERIFY, 4));
    // The capture is an engine's warm-up. All rows are padding, so that no sequence's state is touched.
    let padding = rows([-1; 6], [0; 7]);
    let mut first = Layer::new(&engine, &decode, &padding.0)?;
    let mut second = Layer::new(&engine, &verify, &padding.1)?;
    let mut graph = {
        let (first, second) = (first.step()?, second.step()?);
        engine.library.prewarm(&first)?;
        engine.library.prewarm(&second)?;
        // SAFETY: the layers outlive the graph and nothing else uses them during a replay; no two live rows have one slot.
        unsafe {
            Graph::capture(stream, || {
                engine.library.launch(engine.stream(), &first)?;
                engine.library.launch(engine.stream(), &second)
            })
        }?
    };

    for (slots, bounds) in STEPS {
        let (decode_rows, verify_rows) = rows(slots, bounds);
        first.set_rows(&decode, &decode_rows)?;
        second.set_rows(&verify, &verify_rows)?;
        let before = (first.states.read()?, second.states.read()?);
        // SAFETY: as promised at the capture.
        unsafe { graph.launch(stream) }?;
        engine.synchronize()?;
        decode.check(
            &before.0,
            &decode_rows,
            &first.o.read()?,
            &first.states.read()?,
        )?;
        verify.check(
            &before.1,
            &verify_rows,
            &second.o.read()?,
            &second.states.read()?,
        )?;
    }
    println!("one graph, {} replays", STEPS.len());
    Ok(())
}

/// The rows of both layers.
fn rows(slots: [i32; 6], bounds: [i32; 7]) -> (Rows, Rows) {
    let decode = Rows::decoded(&slots);
    let cu_seqlens = Some(bounds.to_vec());
    (
        decode.clone(),
        Rows {
            cu_seqlens,
            ..decode
        },
    )
}
