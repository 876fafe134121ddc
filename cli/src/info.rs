//! `info`: the GPU, the kernels, and which of them a model's layer gets.

use std::collections::BTreeMap;

use gated_delta::driver::{Context, Device, attribute, driver};
use gated_delta::ops::StateLayout;
use gated_delta::{DType, Entry, KernelResources, Library};

use crate::error::Error;
use crate::model::{GDN, Shape};
use crate::problem::Problem;
use crate::table::table;
use crate::tensor::HostTensor;

/// Batch sizes of the table of variants.
const BATCHES: [usize; 4] = [1, 8, 64, 256];
/// State dtypes and layouts that kernels are compiled for.
const STATES: [(DType, StateLayout); 4] = [
    (DType::Bf16, StateLayout::KLast),
    (DType::F32, StateLayout::KLast),
    (DType::Bf16, StateLayout::VLast),
    (DType::F32, StateLayout::VLast),
];

/// The text of `info`. Without a GPU it says so and leaves out what the driver's compiler would know.
///
/// # Errors
/// [`Error::Library`] where there is a GPU, and it fails or takes no kernel.
pub fn info() -> Result<String, Error> {
    let mut text = format!("gated-delta {}\n", env!("CARGO_PKG_VERSION"));
    let resources = match Device::get(0) {
        Ok(device) => {
            text += &about(device)?;
            resources(&Library::new(&Context::primary(device)?))?
        }
        Err(error) => {
            text += &format!("device: none ({error})\n");
            BTreeMap::new()
        }
    };
    text += "\nKernels; registers and bytes of local memory as compiled for H = 16, HV = 32:\n";
    text += &kernels(&resources);
    text += "\nVariant by batch size:\n";
    text += &variants()?;
    Ok(text)
}

fn about(device: Device) -> Result<String, Error> {
    let (major, minor) = device.compute_capability()?;
    let attribute = |which| Ok::<_, Error>(device.attribute(which)?);
    let mut version = 0;
    // SAFETY: `version` is written.
    unsafe { driver()?.driver_get_version(&raw mut version) }?;
    Ok(format!(
        "device: {}, sm_{major}{minor}, {} multiprocessors, {:.1} GiB, {} MiB of L2\ndriver: CUDA {}.{}\n",
        device.name()?,
        attribute(attribute::MULTIPROCESSOR_COUNT)?,
        device.total_memory()? as f64 / f64::from(1 << 30),
        attribute(attribute::L2_CACHE_SIZE)? >> 20,
        version / 1000,
        version % 1000 / 10,
    ))
}

/// Registers and memory of the variants, compiled for a layer of Qwen3-Next; for K = V = 64 as well.
fn resources(library: &Library) -> Result<BTreeMap<Entry, KernelResources>, Error> {
    let mut resources = BTreeMap::new();
    for dim in [64, 128] {
        for (state, layout) in STATES {
            let problem = one_slot(Shape { dim, ..GDN[0].1 }, 1, state, layout)?;
            let views = problem.views()?;
            resources.extend(library.gdn_decode_resources(&problem.args(&views)?)?);
        }
    }
    Ok(resources)
}

fn kernels(resources: &BTreeMap<Entry, KernelResources>) -> String {
    let number = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
    let rows = Entry::ALL.iter().map(|entry| {
        let compiled = resources.get(entry);
        vec![
            entry.name().to_owned(),
            entry.block().to_string(),
            entry.shared_bytes().to_string(),
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

fn variants() -> Result<String, Error> {
    let mut rows = Vec::new();
    for (model, shape) in GDN {
        for (state, layout) in STATES {
            let mut row = vec![model.to_owned(), format!("{state} {layout}")];
            for batch in BATCHES {
                let problem = one_slot(shape, batch, state, layout)?;
                let views = problem.views()?;
                let name = problem.args(&views)?.selected()?.name();
                row.push(name.rsplit('_').next().unwrap_or(name).to_owned());
            }
            rows.push(row);
        }
    }
    let batches = BATCHES.map(|batch| format!("B = {batch}"));
    let headings: Vec<&str> = ["model", "state"]
        .into_iter()
        .chain(batches.iter().map(String::as_str))
        .collect();
    Ok(table(&headings, rows))
}

/// Arguments of that shape with little memory behind them.
fn one_slot(
    shape: Shape,
    batch: usize,
    state: DType,
    layout: StateLayout,
) -> Result<Problem, Error> {
    let mut problem = shape.blank(batch, 1, state, layout)?;
    problem
        .tensors
        .insert("read_slots", HostTensor::new(DType::I32, &[batch])?);
    Ok(problem)
}
