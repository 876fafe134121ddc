//! Compares modules with those of Hugging Face's transformers, with K = 128: a prompt, then single tokens, for two sequences.

mod gpu;
mod module;

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Tensor, safetensors};
use candle_gated_delta::{
    Activation, BetaScale, Formulation, GatedDeltaNet, GdnConfig, KdaConfig, KimiDeltaAttention,
    Row, Rows, StateLayout, StatePool,
};
use candle_nn::VarBuilder;
use gated_delta_reference::tolerance::relative_error_of;
use module::Module;

/// Slots of the rows. The pool has two more, which are unused.
const SLOTS: [u32; 2] = [3, 1];
const POOL: usize = 4;

/// Number of forward passes: a prompt, then single tokens.
const STEPS: usize = 3;

fn file(name: &str) -> Result<HashMap<String, Tensor>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let path = folder.join(format!("module_{name}.safetensors"));
    safetensors::load(&path, &Device::Cpu).with_context(|| path.display().to_string())
}

/// The file's weights, under the names of checkpoints.
fn weights(file: &HashMap<String, Tensor>) -> Result<HashMap<String, Tensor>> {
    let mut named = HashMap::new();
    for (name, tensor) in file {
        let Some(name) = name.strip_prefix("weights.") else {
            continue;
        };
        // transformers' Kimi-Linear module nests some weights that are at the top level in checkpoints.
        let name = name.strip_prefix("forget_gate.").unwrap_or(name);
        named.insert(name.to_owned(), tensor.clone());
    }
    if named.contains_key("q_proj.weight")
        && let Some(conv) = named.remove("conv1d.weight")
    {
        for (part, name) in conv.chunk(3, 0)?.into_iter().zip(["q", "k", "v"]) {
            named.insert(format!("{name}_conv1d.weight"), part);
        }
    }
    Ok(named)
}

fn module(name: &str, dtype: DType, device: &Device) -> Result<(Module, StatePool)> {
    let weights = weights(&file(name)?)?;
    let hidden_size = hidden_size(&weights)?;
    let vb = VarBuilder::from_tensors(weights, dtype, device);
    let module = match name {
        "qwen3_next" => {
            let config = GdnConfig {
                hidden_size,
                num_key_heads: 2,
                num_value_heads: 4,
                key_head_dim: 128,
                value_head_dim: 128,
                conv_kernel: 4,
                rms_norm_eps: 1e-6,
                gate_activation: Activation::Silu,
                beta_scale: BetaScale::One,
            };
            Module::Gdn(GatedDeltaNet::new(&config, &vb)?)
        }
        _ => {
            let config = KdaConfig {
                hidden_size,
                num_heads: 2,
                head_dim: 128,
                conv_kernel: 4,
                rms_norm_eps: 1e-5,
                gate_lower_bound: None,
            };
            Module::Kda(KimiDeltaAttention::new(&config, &vb)?)
        }
    };
    let pool = StatePool::new(module.shape(), 1, POOL, dtype, DType::F32, device)?;
    Ok((module, pool))
}

fn hidden_size(weights: &HashMap<String, Tensor>) -> Result<usize> {
    let output = weights
        .get("out_proj.weight")
        .or(weights.get("o_proj.weight"));
    Ok(output.context("an output projection")?.dim(0)?)
}

/// Relative error ‖got − wanted‖ / ‖wanted‖.
fn error(got: &Tensor, wanted: &Tensor) -> Result<f64> {
    ensure!(
        got.dims() == wanted.dims(),
        "wanted {:?}, got {:?}",
        wanted.dims(),
        got.dims()
    );
    let values = |tensor: &Tensor| -> Result<Vec<f64>> {
        let tensor = tensor.to_device(&Device::Cpu)?;
        Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
    };
    Ok(relative_error_of(
        values(got)?.into_iter().zip(values(wanted)?),
    ))
}

/// Relative errors of outputs, states and windows, compared with transformers. Without a `formulation`, the pool has its default.
fn run(
    name: &str,
    dtype: DType,
    device: &Device,
    layout: StateLayout,
    formulation: Option<Formulation>,
) -> Result<[f64; 3]> {
    let (file, (module, pool)) = (file(name)?, module(name, dtype, device)?);
    let mut pool = pool.state_layout(layout)?;
    if let Some(formulation) = formulation {
        pool = pool.formulation(formulation);
    }
    let get = |name: &str| file.get(name).with_context(|| format!("no tensor {name}"));
    let states = pool.layer(0)?;
    for tensor in [&states.states, &states.windows] {
        let nan = match tensor.dtype() {
            DType::BF16 => Scalar::from(half::bf16::NAN),
            _ => Scalar::from(f32::NAN),
        };
        tensor.const_set(nan)?;
    }
    let (mut output, mut position) = (0.0, 0);
    for step in 0..STEPS {
        let hidden = get(&format!("step{step}.hidden"))?;
        let hidden = hidden.to_dtype(dtype)?.to_device(device)?;
        let (batch, tokens, _) = hidden.dims3()?;
        let row = |slot| Row {
            slot,
            tokens,
            position,
            ..Row::default()
        };
        let rows = Rows::new(&SLOTS.map(row), 64, device)?;
        let got = module.forward(&hidden.flatten_to(1)?, &rows, states)?;
        let got = got.reshape((batch, tokens, ()))?;
        output = f64::max(output, error(&got, get(&format!("step{step}.output"))?)?);
        position += tokens;
    }
    // The file's states are V-last, `[B, HV, K, V]`.
    let slots = Tensor::new(&SLOTS, device)?;
    let of_rows = states.states.index_select(&slots, 0)?;
    let of_rows = match layout {
        StateLayout::KLast => of_rows.transpose(2, 3)?,
        StateLayout::VLast => of_rows,
    };
    let windows = states.windows.contiguous()?.index_select(&slots, 0)?;
    Ok([
        output,
        error(&of_rows, get("final.state")?)?,
        error(&windows, get("final.conv_state")?)?,
    ])
}

fn check(
    dtype: DType,
    device: &Device,
    formulation: Option<Formulation>,
    wanted: [f64; 3],
) -> Result<()> {
    for name in ["qwen3_next", "kimi_linear"] {
        for layout in [StateLayout::KLast, StateLayout::VLast] {
            let errors = run(name, dtype, device, layout, formulation)?;
            println!(
                "{name}, {dtype:?}, {layout:?}, {formulation:?}: outputs {:.1e}, states {:.1e}, windows {:.1e}",
                errors[0], errors[1], errors[2]
            );
            let holds = errors
                .iter()
                .zip(wanted)
                .all(|(&error, wanted)| error <= wanted);
            ensure!(
                holds,
                "{name}, {dtype:?}, {layout:?}, {formulation:?}: {errors:?}, wanted {wanted:?}"
            );
        }
    }
    Ok(())
}

/// Bound for layers in f32. Both sides have rounding errors.
const EXACT: [f64; 3] = [1e-5; 3];

/// Bound for layers in bf16: weights, x and o are rounded.
const ROUNDED: [f64; 3] = [2e-2; 3];

#[test]
fn modules_are_those_of_transformers() -> Result<()> {
    let device = &Device::Cpu;
    check(DType::F32, device, None, EXACT)?;
    check(DType::F32, device, Some(Formulation::Auto), EXACT)?;
    check(DType::BF16, device, None, ROUNDED)
}

/// As above, on the kernels, which compute the prompt chunkwise with [`Formulation::Auto`].
fn check_kernels(device: &Device) -> Result<()> {
    check(DType::F32, device, None, EXACT)?;
    let in_chunks = [2.5e-3, 2e-3, 1e-4];
    check(DType::F32, device, Some(Formulation::Auto), in_chunks)?;
    check(DType::BF16, device, None, ROUNDED)
}

#[cfg(feature = "simulator")]
#[test]
fn and_in_the_simulator() -> Result<()> {
    candle_gated_delta::on_simulator(|| check_kernels(&Device::Cpu))
}

#[test]
fn and_on_a_gpu() -> Result<()> {
    gpu::gpu()?.as_ref().map_or(Ok(()), check_kernels)
}
