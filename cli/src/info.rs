//! `info`: shows the GPU, the kernels, and the variants that are selected for a model's layer.

use std::collections::BTreeMap;

use gated_delta::driver::{Context, Device};
use gated_delta::{DType, Entry, KernelResources, Library, StateLayout};
use gated_delta_harness::arguments::Operator;
use gated_delta_harness::device::Properties;
use serde_json::{Value, json};

use crate::Report;
use crate::error::Error;
use crate::model::{LAYERS, Layer, Pool};
use crate::op::Op;
use crate::problem::Problem;
use crate::table::table;
use crate::tensor::HostTensor;

/// Batch sizes of the table of variants.
const BATCHES: [usize; 4] = [1, 8, 64, 256];
/// Tokens of each row in the cases of several tokens.
const TOKENS: usize = 4;
/// State dtypes and layouts that kernels are compiled for.
const STATES: [(DType, StateLayout); 4] = [
    (DType::Bf16, StateLayout::KLast),
    (DType::F32, StateLayout::KLast),
    (DType::Bf16, StateLayout::VLast),
    (DType::F32, StateLayout::VLast),
];

/// The report of `info`. Without a GPU it says so and leaves out the results of the driver's compiler.
///
/// # Errors
/// [`Error::Library`] if a GPU fails or accepts no kernel.
pub fn info() -> Result<Report, Error> {
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    let mut text = format!("gated-delta {VERSION}\n");
    let (device, resources) = match Device::get(0) {
        Ok(device) => {
            let (about, json) = about(device)?;
            text += &about;
            let library = Library::new(&Context::primary(device)?);
            (json, resources(&library)?)
        }
        Err(error) => {
            text += &format!("device: none ({error})\n");
            (Value::Null, BTreeMap::new())
        }
    };
    text += "\nKernels; registers and bytes of local memory as compiled for GDN with H = 16, HV = 32, what is KDA's alone for H = HV = 32:\n";
    text += &kernels(&resources);
    text += &format!("\nVariant by batch size, with {TOKENS} tokens per row but in a decode:\n");
    let (table, variants) = variants()?;
    text += &table;
    let kernel = |entry: &Entry| {
        let compiled = resources.get(entry);
        json!({
            "entry": entry.name(),
            "threads": entry.block(),
            "shared_bytes": entry.shared_bytes(),
            "shared_bytes_per_token": entry.shared_bytes_per_token(),
            "registers": compiled.map(|compiled| compiled.registers),
            "local_bytes": compiled.map(|compiled| compiled.local_bytes),
        })
    };
    let json = json!({
        "version": VERSION,
        "device": device,
        "kernels": Value::from_iter(Entry::ALL.iter().map(kernel)),
        "variants": variants,
    });
    Ok(Report {
        text,
        json,
        passed: true,
    })
}

fn about(device: Device) -> Result<(String, Value), Error> {
    let of = Properties::of(device)?;
    let (major, minor) = of.compute_capability;
    let memory = device.total_memory()?;
    let text = format!(
        "device: {}, sm_{major}{minor}, {} multiprocessors, {:.1} GiB, {} MiB of L2\ndriver: CUDA {}\n",
        of.name,
        of.multiprocessors,
        memory as f64 / f64::from(1 << 30),
        of.l2_bytes >> 20,
        of.driver,
    );
    let json = json!({
        "name": of.name,
        "compute_capability": [major, minor],
        "multiprocessors": of.multiprocessors,
        "memory_bytes": memory,
        "l2_bytes": of.l2_bytes,
        "driver_cuda": of.driver,
    });
    Ok((text, json))
}

/// Registers and memory of the variants, compiled for one GDN layer and one KDA layer, and for K = V = 64 as well. Variants of both
/// operators are compiled for GDN's layer.
fn resources(library: &Library) -> Result<BTreeMap<Entry, KernelResources>, Error> {
    let mut resources = BTreeMap::new();
    for (_, layer) in [LAYERS[0], LAYERS[2]] {
        for dim in [64, 128] {
            let layer = Layer { dim, ..layer };
            for tokens in tokens(layer) {
                for state in STATES {
                    let problem = one_slot(layer, 1, *tokens, state)?;
                    let work = problem.arguments(&problem.views()?)?.work()?;
                    for (entry, compiled) in library.resources(&*work)? {
                        resources.entry(entry).or_insert(compiled);
                    }
                }
            }
        }
    }
    Ok(resources)
}

/// Numbers of tokens in a row for which different kernels are selected.
fn tokens(layer: Layer) -> &'static [usize] {
    match layer.gates.operator() {
        Operator::Gdn => &[1, TOKENS],
        Operator::Kda => &[TOKENS],
    }
}

fn kernels(resources: &BTreeMap<Entry, KernelResources>) -> String {
    let number = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
    let rows = Entry::ALL.iter().map(|entry| {
        let compiled = resources.get(entry);
        vec![
            entry.name().to_owned(),
            entry.block().to_string(),
            shared_bytes(*entry),
            number(compiled.map(|compiled| compiled.registers)),
            number(compiled.map(|compiled| compiled.local_bytes)),
        ]
    });
    table(
        &[
            "entry",
            "threads",
            "shared bytes",
            "registers",
            "local bytes",
        ],
        rows,
    )
}

/// Shared memory of a block in bytes, as a formula if it depends on T.
fn shared_bytes(entry: Entry) -> String {
    match (entry.shared_bytes(), entry.shared_bytes_per_token()) {
        (bytes, 0) => bytes.to_string(),
        (0, of_token) => format!("{of_token} T"),
        (bytes, of_token) => format!("{bytes} + {of_token} T"),
    }
}

/// A table of the variants that are selected on an H200, and the same cases in JSON.
fn variants() -> Result<(String, Vec<Value>), Error> {
    let (mut rows, mut all) = (Vec::new(), Vec::new());
    for (model, layer) in LAYERS {
        for tokens in tokens(layer) {
            for state in STATES {
                let op = Op::of(layer.gates.operator(), *tokens).name();
                let (dtype, layout) = (state.0.to_string(), state.1.to_string());
                let mut row = vec![op.to_owned(), model.to_owned(), format!("{dtype} {layout}")];
                for batch in BATCHES {
                    let problem = one_slot(layer, batch, *tokens, state)?;
                    let work = problem.arguments(&problem.views()?)?.work()?;
                    let name = work.selected()?.name();
                    let dims = format!("_k{}_", layer.dim);
                    let tile = name.split_once(&dims).map_or(name, |(_, tile)| tile);
                    row.push(tile.to_owned());
                    all.push(json!({
                        "op": op,
                        "model": model,
                        "state": dtype,
                        "state_layout": layout,
                        "tokens": tokens,
                        "batch": batch,
                        "variant": name,
                    }));
                }
                rows.push(row);
            }
        }
    }
    let batches = BATCHES.map(|batch| format!("B = {batch}"));
    let headings: Vec<&str> = ["operator", "model", "state"]
        .into_iter()
        .chain(batches.iter().map(String::as_str))
        .collect();
    Ok((table(&headings, rows), all))
}

/// Arguments of a layer whose pool has little memory.
fn one_slot(
    layer: Layer,
    batch: usize,
    tokens: usize,
    (dtype, layout): (DType, StateLayout),
) -> Result<Problem, Error> {
    let pool = Pool {
        slots: 1,
        dtype,
        layout,
    };
    let mut problem = layer.blank(batch, tokens, pool)?;
    problem
        .tensors
        .insert("read_slots", HostTensor::new(DType::I32, &[batch])?);
    Ok(problem)
}
