//! Qwen3-Next, Qwen3.5 and Kimi-Linear from the files of a checkpoint: linear layers from candle-gated-delta, all others from candle.

use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_gated_delta::{
    Activation, BetaScale, DraftRows, GatedDeltaNet, GdnConfig, KdaConfig, KimiDeltaAttention,
    LayerShape, LayerStates, Rows, StatePool, Verified,
};
use candle_nn::{Embedding, Module, VarBuilder};
use serde_json::Value;

use crate::attention::{Attention, KeyValues};
use crate::experts::FeedForward;

/// A model's configuration file.
pub struct Config(Value);

impl Config {
    pub fn usize(&self, name: &str) -> Result<usize> {
        let value = self.0[name].as_u64();
        Ok(value.with_context(|| format!("config.json: wanted a number {name}"))? as usize)
    }

    pub fn f64(&self, name: &str) -> Result<f64> {
        let value = self.0[name]
            .as_f64()
            .or(self.0["rope_parameters"][name].as_f64());
        value.with_context(|| format!("config.json: wanted a number {name}"))
    }

    pub fn is_kimi(&self) -> bool {
        self.0["model_type"] == "kimi_linear"
    }
}

/// Root mean square norm in f32. Qwen's checkpoints contain the weight minus one.
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    pub fn new(config: &Config, dim: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get(dim, "weight")?;
        Ok(Self {
            weight: if config.is_kimi() {
                weight
            } else {
                (weight + 1.0)?
            },
            eps: config.f64("rms_norm_eps")?,
        })
    }

    /// Sets the epsilon, in place of the configuration's.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::ops::rms_norm_slow(&x.contiguous()?, &self.weight, self.eps as f32)
    }
}

/// Product of `x` `[n, in]` and the transposed `weight` `[out, in]`.
pub fn linear(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    x.contiguous()?.matmul(&weight.t()?)
}

enum Mixer {
    Gdn(GatedDeltaNet),
    Kda(KimiDeltaAttention),
    Attention(Attention),
}

struct Layer {
    mixer: Mixer,
    before: RmsNorm,
    after: RmsNorm,
    feed_forward: FeedForward,
}

/// A model.
pub struct Model {
    embeddings: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Tensor,
    pub device: Device,
    pub dtype: DType,
    shape: LayerShape,
}

/// Input of a forward pass: the tokens of ragged rows, then those of rows with drafts, which have equal lengths.
pub struct Batch {
    /// Tokens of all rows, one row after the other.
    pub tokens: Vec<u32>,
    /// Number of tokens of each row.
    pub counts: Vec<usize>,
    /// Rows without drafts, which come first.
    pub rows: Option<Rows>,
    pub drafts: Option<Drafts>,
}

/// Rows with drafts.
pub struct Drafts {
    pub rows: DraftRows,
    /// Tokens of each row, T.
    pub tokens: usize,
    /// Tensors of the last verify of these rows, for every linear layer; `None` if no row was in it.
    pub previous: Option<Vec<Verified>>,
}

/// Arguments of a linear layer.
struct Linear<'l> {
    batch: &'l Batch,
    previous: Option<&'l Verified>,
    states: &'l LayerStates,
}

impl Model {
    /// Loads the model from the folder of a checkpoint.
    pub fn load(folder: &Path, device: &Device) -> Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).with_context(|| path.display().to_string())
        };
        let config = Config(serde_json::from_slice(&read("config.json")?)?);
        let dtype = DType::F32;
        let weights = read("model.safetensors")?;
        let vb = VarBuilder::from_buffered_safetensors(weights, dtype, device)?;
        let hidden = config.usize("hidden_size")?;
        // Published checkpoints of Qwen3.5 contain an image model next to the language model.
        let of_model = match vb.contains_tensor("model.language_model.norm.weight") {
            true => vb.pp("model.language_model"),
            false => vb.pp("model"),
        };
        let vocabulary = config.usize("vocab_size")?;
        let kinds = config.0["layer_types"].as_array().context("layer_types")?;
        let mut layers = Vec::new();
        for (i, kind) in kinds.iter().enumerate() {
            let vb = of_model.pp(format!("layers.{i}"));
            let mixer = match (kind.as_str(), config.is_kimi()) {
                (Some("linear_attention"), false) => {
                    let of = gdn_config(&config)?;
                    Mixer::Gdn(GatedDeltaNet::new(&of, &vb.pp("linear_attn"))?)
                }
                (Some("linear_attention"), true) => {
                    let of = kda_config(&config)?;
                    Mixer::Kda(KimiDeltaAttention::new(&of, &vb.pp("self_attn"))?)
                }
                _ => Mixer::Attention(Attention::new(&config, &vb.pp("self_attn"))?),
            };
            layers.push(Layer {
                mixer,
                before: RmsNorm::new(&config, hidden, &vb.pp("input_layernorm"))?,
                after: RmsNorm::new(&config, hidden, &vb.pp("post_attention_layernorm"))?,
                feed_forward: FeedForward::new(&config, &vb)?,
            });
        }
        let shape = layers.iter().find_map(|layer| match &layer.mixer {
            Mixer::Gdn(layer) => Some(layer.shape()),
            Mixer::Kda(layer) => Some(layer.shape()),
            Mixer::Attention(_) => None,
        });
        let table = of_model.get((vocabulary, hidden), "embed_tokens.weight")?;
        Ok(Self {
            embeddings: Embedding::new(table, hidden),
            layers,
            norm: RmsNorm::new(&config, hidden, &of_model.pp("norm"))?,
            head: vb.get((vocabulary, hidden), "lm_head.weight")?,
            device: device.clone(),
            dtype,
            shape: shape.context("a model without linear layers")?,
        })
    }

    /// A pool of states for `slots` sequences.
    pub fn pool(&self, slots: usize) -> Result<StatePool> {
        let is_linear = |layer: &&Layer| !matches!(layer.mixer, Mixer::Attention(_));
        let layers = self.layers.iter().filter(is_linear).count();
        let (dtype, device) = (self.dtype, &self.device);
        Ok(StatePool::new(
            self.shape,
            layers,
            slots,
            dtype,
            DType::F32,
            device,
        )?)
    }

    /// An empty cache of a sequence.
    pub fn cache(&self) -> Vec<KeyValues> {
        let is_attention = |layer: &&Layer| matches!(layer.mixer, Mixer::Attention(_));
        let layers = self.layers.iter().filter(is_attention);
        layers.map(|_| KeyValues::default()).collect()
    }

    /// Returns the logits `[tokens, vocabulary]`, and the tensors of the verify, for every linear layer. `caches` belong to the rows and
    /// grow by the rows' tokens. States advance by all tokens but drafts.
    pub fn forward(
        &self,
        batch: &Batch,
        pool: &StatePool,
        caches: &mut [&mut Vec<KeyValues>],
    ) -> Result<(Tensor, Vec<Verified>)> {
        let tokens = Tensor::new(&batch.tokens[..], &self.device)?;
        let mut x = self.embeddings.forward(&tokens)?;
        let (mut linear_layers, mut attention_layers, mut verified) = (0, 0, Vec::new());
        for layer in &self.layers {
            let h = layer.before.forward(&x)?;
            let mixed = match &layer.mixer {
                Mixer::Attention(attention) => {
                    let index = attention_layers;
                    attention_layers += 1;
                    let of_layer = caches.iter_mut().map(|cache| &mut cache[index]);
                    attention.forward(&h, &batch.counts, of_layer)?
                }
                mixer => {
                    let drafts = batch.drafts.as_ref();
                    let previous = drafts.and_then(|drafts| drafts.previous.as_ref());
                    let call = Linear {
                        batch,
                        previous: previous.map(|of| &of[linear_layers]),
                        states: pool.layer(linear_layers)?,
                    };
                    linear_layers += 1;
                    call.forward(mixer, &h, &mut verified)?
                }
            };
            x = (x + mixed)?;
            x = (&x + layer.feed_forward.forward(&layer.after.forward(&x)?)?)?;
        }
        Ok((linear(&self.norm.forward(&x)?, &self.head)?, verified))
    }

    /// Commits the first `keep` verified tokens of rows to their states, in all layers.
    pub fn commit(&self, verified: &[Verified], rows: &DraftRows, pool: &StatePool) -> Result<()> {
        let mixers = self.layers.iter().map(|layer| &layer.mixer);
        let linear = mixers.filter(|mixer| !matches!(mixer, Mixer::Attention(_)));
        for (i, (mixer, verified)) in linear.zip(verified).enumerate() {
            match mixer {
                Mixer::Gdn(layer) => layer.commit(verified, rows, pool.layer(i)?)?,
                Mixer::Kda(layer) => layer.commit(verified, rows, pool.layer(i)?)?,
                Mixer::Attention(_) => bail!("an attention layer has no state"),
            }
        }
        Ok(())
    }
}

impl Linear<'_> {
    /// Runs a layer: ragged rows in one launch, rows with drafts in another.
    fn forward(&self, mixer: &Mixer, h: &Tensor, verified: &mut Vec<Verified>) -> Result<Tensor> {
        let mut parts = Vec::new();
        let mut first = 0;
        if let Some(rows) = &self.batch.rows {
            let h = h.narrow(0, 0, rows.total())?;
            first = rows.total();
            parts.push(match mixer {
                Mixer::Gdn(layer) => layer.forward(&h, rows, self.states)?,
                Mixer::Kda(layer) => layer.forward(&h, rows, self.states)?,
                Mixer::Attention(_) => bail!("an attention layer has no state"),
            });
        }
        if let Some(drafts) = &self.batch.drafts {
            let (total, hidden) = h.dims2()?;
            let h = h.narrow(0, first, total - first)?;
            let h = h.reshape(((), drafts.tokens, hidden))?;
            let (rows, previous, states) = (&drafts.rows, self.previous, self.states);
            let (o, of_layer) = match mixer {
                Mixer::Gdn(layer) => layer.verify(&h, rows, previous, states)?,
                Mixer::Kda(layer) => layer.verify(&h, rows, previous, states)?,
                Mixer::Attention(_) => bail!("an attention layer has no state"),
            };
            verified.push(of_layer);
            parts.push(o.flatten_to(1)?);
        }
        Ok(Tensor::cat(&parts, 0)?)
    }
}

fn gdn_config(config: &Config) -> Result<GdnConfig> {
    Ok(GdnConfig {
        hidden_size: config.usize("hidden_size")?,
        num_key_heads: config.usize("linear_num_key_heads")?,
        num_value_heads: config.usize("linear_num_value_heads")?,
        key_head_dim: config.usize("linear_key_head_dim")?,
        value_head_dim: config.usize("linear_value_head_dim")?,
        conv_kernel: config.usize("linear_conv_kernel_dim")?,
        rms_norm_eps: config.f64("rms_norm_eps")? as f32,
        gate_activation: Activation::Silu,
        beta_scale: BetaScale::One,
    })
}

fn kda_config(config: &Config) -> Result<KdaConfig> {
    Ok(KdaConfig {
        hidden_size: config.usize("hidden_size")?,
        num_heads: config.usize("linear_num_heads")?,
        head_dim: config.usize("linear_head_dim")?,
        conv_kernel: config.usize("linear_conv_kernel_dim")?,
        rms_norm_eps: config.f64("rms_norm_eps")? as f32,
        gate_lower_bound: None,
    })
}
