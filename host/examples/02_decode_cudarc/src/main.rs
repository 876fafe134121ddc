//! A GDN decode in an engine on cudarc, with cudarc's primary context, stream and buffers, and without a copy. The engine is in
//! `engine.rs`, the code for gated-delta in `adapter.rs`, and the check in this file.

#[path = "../../common/mod.rs"]
mod common;

mod adapter;
mod engine;

use anyhow::{Result, ensure};
use common::{Inputs, Rows, Shape};
use engine::Engine;

/// Shape of Qwen3-Next's layers.
const SHAPE: Shape = Shape {
    batch: 4,
    tokens: 1,
    heads: 16,
    value_heads: 32,
    dim: 128,
    slots: 8,
};

/// Slot of each row; the second row is padding.
const SLOTS: [i32; 4] = [7, -1, 3, 4];

/// Largest number of lines of code that an engine may have to add.
const MOST_LINES: usize = 40;

fn main() -> Result<()> {
    let lines = include_str!("adapter.rs").lines().map(str::trim);
    let lines = lines
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count();
    println!("adapter.rs: {lines} lines of code");
    ensure!(
        lines <= MOST_LINES,
        "adapter.rs has more than {MOST_LINES} lines of code"
    );
    if common::gpu_or_skip()?.is_none() {
        return Ok(());
    }

    let inputs = Inputs::random(SHAPE, 2);
    let engine = Engine::new()?;
    let mut layer = engine.layer(&inputs, &SLOTS)?;
    let library = adapter::library(&engine)?;
    let context = library.context().map(|context| context.raw().0);
    ensure!(
        context == Some(engine.cuda.cu_ctx().cast()),
        "the library is in another context than the engine"
    );

    adapter::decode(&library, &engine, &mut layer)?;
    let (o, states) = (
        engine.stream.clone_dtoh(&layer.o)?,
        engine.stream.clone_dtoh(&layer.states)?,
    );
    inputs.check(&inputs.states, &Rows::decoded(&SLOTS), &o, &states)
}
