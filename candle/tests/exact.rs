//! Pools in f32 compute prompts and drafts token by token: the bits of an output do not depend on how an engine serves its
//! sequence.

mod gpu;
mod module;

use std::collections::HashMap;

use anyhow::{Result, ensure};
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Tensor};
use candle_gated_delta::{
    Activation, BetaScale, DraftRows, Formulation, GatedDeltaNet, GdnConfig, KdaConfig,
    KimiDeltaAttention, Row, Rows, StatePool,
};
use candle_nn::VarBuilder;
use module::Module;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Tokens of the sequence.
const TOKENS: usize = 84;

/// Width of hidden states, and of all value heads together: the output projection is the identity.
const HIDDEN: usize = 128;

const TAPS: usize = 4;

/// A layer whose projections are exact in f32, in any order of the additions: their factors have few bits.
fn module(is_kda: bool, device: &Device) -> Result<Module> {
    let mut rng = StdRng::seed_from_u64(46);
    let [h, hv, k] = if is_kda { [1, 1, 128] } else { [1, 2, 64] };
    let channels = 2 * h * k + hv * k;
    let mut few_bits = |rows: usize, columns: usize| {
        let values = (0..rows * columns).map(|_| rng.random_range(-1i8..=1).into());
        let values: Vec<f32> = values.map(|value: f32| value / 16.0).collect();
        Tensor::from_vec(values, (rows, columns), device)
    };
    let norm = Tensor::ones(k, DType::F32, device)?;
    let zeros = Tensor::zeros(hv, DType::F32, device)?;
    let identity = Tensor::eye(HIDDEN, DType::F32, device)?;
    let mut weights = HashMap::from([("A_log".to_owned(), zeros.clone())]);
    let mut insert = |name: &str, tensor| weights.insert(name.to_owned(), tensor);
    if is_kda {
        for name in ["q", "k", "v"] {
            insert(&format!("{name}_proj.weight"), few_bits(k, HIDDEN)?);
            let taps = few_bits(k, TAPS)?.unsqueeze(1)?;
            insert(&format!("{name}_conv1d.weight"), (taps * 8.0)?);
        }
        for name in ["f", "g"] {
            insert(&format!("{name}_a_proj.weight"), few_bits(k, HIDDEN)?);
            insert(&format!("{name}_b_proj.weight"), few_bits(k, k)?);
        }
        insert("b_proj.weight", few_bits(h, HIDDEN)?);
        insert("dt_bias", Tensor::full(-4f32, k, device)?);
        insert("o_norm.weight", norm);
        insert("o_proj.weight", identity);
    } else {
        for (name, rows) in [("qkv", channels), ("z", HIDDEN), ("b", hv), ("a", hv)] {
            insert(&format!("in_proj_{name}.weight"), few_bits(rows, HIDDEN)?);
        }
        let taps = few_bits(channels, TAPS)?.unsqueeze(1)?;
        insert("conv1d.weight", (taps * 8.0)?);
        insert("dt_bias", Tensor::full(-4f32, hv, device)?);
        insert("norm.weight", norm);
        insert("out_proj.weight", identity);
    }
    let vb = VarBuilder::from_tensors(weights, DType::F32, device);
    Ok(match is_kda {
        true => Module::Kda(KimiDeltaAttention::new(
            &KdaConfig {
                hidden_size: HIDDEN,
                num_heads: h,
                head_dim: k,
                conv_kernel: TAPS,
                rms_norm_eps: 1e-5,
                gate_lower_bound: None,
            },
            &vb,
        )?),
        false => Module::Gdn(GatedDeltaNet::new(
            &GdnConfig {
                hidden_size: HIDDEN,
                num_key_heads: h,
                num_value_heads: hv,
                key_head_dim: k,
                value_head_dim: k,
                conv_kernel: TAPS,
                rms_norm_eps: 1e-6,
                gate_activation: Activation::Silu,
                beta_scale: BetaScale::One,
            },
            &vb,
        )?),
    })
}

/// A layer, a pool full of NaN, a sequence, and its outputs one token at a time.
struct Sequence<'d> {
    module: Module,
    pool: StatePool,
    hidden: Tensor,
    /// Hidden states of wrong drafts.
    wrong: Tensor,
    outputs: Vec<Vec<f32>>,
    device: &'d Device,
}

impl<'d> Sequence<'d> {
    fn new(is_kda: bool, device: &'d Device) -> Result<Self> {
        let module = module(is_kda, device)?;
        let pool = StatePool::new(module.shape(), 1, 5, DType::F32, DType::F32, device)?;
        let states = pool.layer(0)?;
        for tensor in [&states.states, &states.windows] {
            tensor.const_set(Scalar::from(f32::NAN))?;
        }
        let mut rng = StdRng::seed_from_u64(47);
        let mut few_bits = || {
            let values = (0..TOKENS * HIDDEN).map(|_| rng.random_range(-4i8..=4).into());
            let values: Vec<f32> = values.map(|value: f32| value / 4.0).collect();
            Tensor::from_vec(values, (TOKENS, HIDDEN), device)
        };
        let (hidden, wrong) = (few_bits()?, few_bits()?);
        let mut sequence = Self {
            module,
            pool,
            hidden,
            wrong,
            outputs: Vec::new(),
            device,
        };
        for position in 0..TOKENS {
            let row = sequence.row(0, position, 1);
            let mut output = sequence.forward(&[row])?;
            sequence.outputs.append(&mut output);
        }
        Ok(sequence)
    }

    fn row(&self, slot: u32, position: usize, tokens: usize) -> Row {
        Row {
            slot,
            position,
            tokens,
            ..Row::default()
        }
    }

    /// Outputs of all tokens of a batch.
    fn forward(&self, rows: &[Row]) -> Result<Vec<Vec<f32>>> {
        let of_row = |row: &Row| self.hidden.narrow(0, row.position, row.tokens);
        let hidden: Vec<Tensor> = rows
            .iter()
            .map(of_row)
            .collect::<candle_core::Result<_>>()?;
        let batch = Rows::new(rows, 64, self.device)?;
        let states = self.pool.layer(0)?;
        let o = self
            .module
            .forward(&Tensor::cat(&hidden, 0)?, &batch, states)?;
        Ok(o.to_vec2()?)
    }

    /// Runs a batch and compares its outputs.
    fn check(&self, rows: &[Row]) -> Result<()> {
        let mut got = self.forward(rows)?.into_iter();
        for row in rows {
            let got: Vec<_> = got.by_ref().take(row.tokens).collect();
            self.compare(row.position, &got)?;
        }
        Ok(())
    }

    fn compare(&self, position: usize, got: &[Vec<f32>]) -> Result<()> {
        for (token, (got, wanted)) in (position..).zip(got.iter().zip(&self.outputs[position..])) {
            ensure!(
                got == wanted,
                "token {token}: wanted {wanted:?}, got {got:?}"
            );
        }
        Ok(())
    }
}

/// Chunks of prompts, batches of several rows, a prefix and drafts of which some are wrong have the bits of single tokens.
fn serves_bit_for_bit(device: &Device) -> Result<()> {
    for is_kda in [false, true] {
        let of = Sequence::new(is_kda, device)?;
        // One row in chunks, next to another row. It keeps the prefix of 64 tokens in slot 4.
        of.check(&[of.row(1, 0, 23), of.row(2, 0, 5)])?;
        let keeps = Row {
            checkpoints: vec![4],
            ..of.row(1, 23, 44)
        };
        of.check(&[of.row(2, 5, 1), keeps, of.row(3, 0, 37)])?;
        // A fork of the prefix, and a row that goes on.
        let fork = Row {
            from: Some(4),
            ..of.row(2, 64, TOKENS - 64)
        };
        of.check(&[of.row(1, 67, 1), fork])?;
        of.check(&[of.row(1, 68, TOKENS - 68)])?;

        // Drafts of the row in slot 3: a verify, a resume after two accepted tokens of five, and a commit of three.
        let (states, accepted) = (of.pool.layer(0)?, [2u32, 3]);
        let (mut position, mut last, mut keep) = (37, None, 0);
        for right in accepted {
            let count = right as usize;
            let drafts = of.hidden.narrow(0, position, count)?;
            let wrong = of.wrong.narrow(0, position, 5 - count)?;
            let hidden = Tensor::cat(&[drafts, wrong], 0)?.unsqueeze(0)?;
            let rows = DraftRows::new(&[3], &[keep], device)?;
            let (o, verified) = of.module.verify(&hidden, &rows, last.as_ref(), states)?;
            of.compare(position, &o.squeeze(0)?.narrow(0, 0, count)?.to_vec2()?)?;
            (position, last, keep) = (position + count, Some(verified), right);
        }
        let rows = DraftRows::new(&[3], &[keep], device)?;
        let last = last.as_ref().expect("tokens are verified");
        of.module.commit(last, &rows, states)?;
        of.check(&[of.row(3, position, TOKENS - position)])?;
    }
    Ok(())
}

/// A pool in f32 computes in f32 by default, a pool with bf16 does not.
#[test]
fn pools_of_f32_are_recurrent() -> Result<()> {
    let device = &Device::Cpu;
    let shape = module(false, device)?.shape();
    for (dtype, state, wanted) in [
        (DType::F32, DType::F32, Formulation::Recurrent),
        (DType::BF16, DType::F32, Formulation::Auto),
        (DType::F32, DType::BF16, Formulation::Auto),
    ] {
        let pool = StatePool::new(shape, 1, 1, dtype, state, device)?;
        assert_eq!(pool.layer(0)?.formulation, wanted);
        let pool = pool.formulation(Formulation::Auto);
        assert_eq!(pool.layer(0)?.formulation, Formulation::Auto);
    }
    Ok(())
}

#[test]
fn outputs_are_the_same_however_a_sequence_is_served() -> Result<()> {
    serves_bit_for_bit(&Device::Cpu)
}

#[cfg(feature = "simulator")]
#[test]
fn and_in_the_simulator() -> Result<()> {
    candle_gated_delta::on_simulator(|| serves_bit_for_bit(&Device::Cpu))
}

#[test]
fn and_on_a_gpu() -> Result<()> {
    gpu::gpu()?.as_ref().map_or(Ok(()), serves_bit_for_bit)
}
