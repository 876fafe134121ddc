//! Several GPUs in one process: one library per GPU, and the heads of a layer spread over the GPUs (tensor parallelism). Their
//! results together equal the results of a single GPU, bit for bit.
//!
//! With one GPU, two libraries share it. Without a GPU, two simulators are used.

mod common;

use anyhow::{Result, ensure};
use common::engine::Engine;
use common::layer::Layer;
use common::{Inputs, Rows, Shape};
use gated_delta::driver::Device;
use half::bf16;

/// Slot of each row; the third row is padding.
const SLOTS: [i32; 4] = [4, 0, -1, 3];

fn main() -> Result<()> {
    let layer = Shape {
        batch: 4,
        tokens: 1,
        heads: 16,
        value_heads: 32,
        dim: 128,
        slots: 6,
    };
    let (engines, shape) = match common::gpu()? {
        Some(only) => {
            let count = Device::count()?;
            println!("{count} GPU(s)");
            let devices: Vec<Device> = match count {
                1 => vec![only, only],
                2 | 3 => (0..2).map(Device::get).collect::<Result<_, _>>()?,
                _ => (0..4).map(Device::get).collect::<Result<_, _>>()?,
            };
            if count == 1 {
                println!("one GPU: two libraries share it");
            }
            let engines = devices.into_iter().map(Engine::on);
            (engines.collect::<Result<Vec<_>>>()?, layer)
        }
        None => {
            println!("no GPU: two simulators");
            let small = Shape {
                heads: 2,
                value_heads: 4,
                dim: 64,
                ..layer
            };
            (vec![Engine::simulated(), Engine::simulated()], small)
        }
    };
    let inputs = Inputs::random(shape, 6);
    let rows = Rows::decoded(&SLOTS);

    let (o, states) = step(&engines[..1], &inputs, &rows)?;
    inputs.check(&inputs.states, &rows, &o, &states)?;
    let (sharded_o, sharded_states) = step(&engines, &inputs, &rows)?;
    ensure!(
        common::same_bits(&o, &sharded_o),
        "o differs between one GPU and several"
    );
    ensure!(
        common::same_bits(&states, &sharded_states),
        "states differ between one GPU and several"
    );
    println!("heads over {} libraries: the bits of one", engines.len());
    Ok(())
}

/// A decode step with the heads spread over `engines`. All launches are enqueued before any engine is waited for.
fn step(engines: &[Engine], inputs: &Inputs, rows: &Rows) -> Result<(Vec<bf16>, Vec<f32>)> {
    let parts = engines.len();
    let mut layers = Vec::with_capacity(parts);
    for (part, engine) in engines.iter().enumerate() {
        layers.push(Layer::new(engine, &shard(inputs, part, parts), rows)?);
    }
    for (engine, layer) in engines.iter().zip(&mut layers) {
        // SAFETY: the layer outlives the wait below, and no two live rows write one slot.
        unsafe { engine.library.launch(engine.stream(), &layer.step()?) }?;
    }
    let (mut outputs, mut states) = (Vec::with_capacity(parts), Vec::with_capacity(parts));
    for (engine, layer) in engines.iter().zip(&layers) {
        engine.synchronize()?;
        outputs.push(layer.o.read()?);
        states.push(layer.states.read()?);
    }
    Ok((
        join(&outputs, inputs.shape.batch),
        join(&states, inputs.shape.slots),
    ))
}

/// Part number `part` of a layer whose heads are split into `parts` equal parts. Query/key heads stay with their value heads.
fn shard(inputs: &Inputs, part: usize, parts: usize) -> Inputs {
    let Shape {
        batch,
        heads,
        value_heads,
        slots,
        ..
    } = inputs.shape;
    let shape = Shape {
        heads: heads / parts,
        value_heads: value_heads / parts,
        ..inputs.shape
    };
    Inputs {
        shape,
        q: cut(&inputs.q, batch, part, parts),
        k: cut(&inputs.k, batch, part, parts),
        v: cut(&inputs.v, batch, part, parts),
        a: cut(&inputs.a, batch, part, parts),
        b: cut(&inputs.b, batch, part, parts),
        a_log: cut(&inputs.a_log, 1, part, parts),
        dt_bias: cut(&inputs.dt_bias, 1, part, parts),
        states: cut(&inputs.states, slots, part, parts),
        o: cut(&inputs.o, batch, part, parts),
    }
}

/// The heads of one part from a tensor `[rows, heads, …]`.
fn cut<T: Copy>(data: &[T], rows: usize, part: usize, parts: usize) -> Vec<T> {
    let of_row = data.len() / rows;
    let range = of_row / parts * part..of_row / parts * (part + 1);
    data.chunks(of_row)
        .flat_map(|row| &row[range.clone()])
        .copied()
        .collect()
}

/// The reverse of [`cut`].
fn join<T: Copy>(parts: &[Vec<T>], rows: usize) -> Vec<T> {
    let row = |row: usize| {
        parts
            .iter()
            .flat_map(move |part| &part[part.len() / rows * row..][..part.len() / rows])
    };
    (0..rows).flat_map(row).copied().collect()
}
