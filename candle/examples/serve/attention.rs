//! Softmax attention in candle, row by row: grouped and gated, with rotary positions (Qwen), or latent, without positions (Kimi).

use anyhow::{Result, ensure};
use candle_core::{D, DType, Tensor};
use candle_nn::VarBuilder;

use crate::model::{Config, RmsNorm, linear};

/// Keys and values of a sequence in a layer, each `[heads, n, dim]`. Cheap to clone.
#[derive(Clone, Default)]
pub struct KeyValues(Option<[Tensor; 2]>);

impl KeyValues {
    pub fn len(&self) -> Result<usize> {
        Ok(match &self.0 {
            None => 0,
            Some([keys, _]) => keys.dim(1)?,
        })
    }

    /// Keeps the first `len` tokens and drops the others.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        ensure!(len <= self.len()?, "a cache is shorter than {len} tokens");
        if let Some(both) = &mut self.0 {
            for of in both {
                *of = of.narrow(1, 0, len)?;
            }
        }
        Ok(())
    }

    fn append(&mut self, new: [Tensor; 2]) -> Result<&[Tensor; 2]> {
        let [keys, values] = match self.0.take() {
            None => new,
            Some([keys, values]) => [
                Tensor::cat(&[&keys, &new[0]], 1)?,
                Tensor::cat(&[&values, &new[1]], 1)?,
            ],
        };
        Ok(self.0.insert([keys, values]))
    }
}

enum Projections {
    Grouped {
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: RmsNorm,
        k_norm: RmsNorm,
        /// Number of dims that are rotated, and base of their frequencies.
        rotary: (usize, f64),
    },
    Latent {
        q: Tensor,
        kv_a: Tensor,
        kv_norm: RmsNorm,
        kv_b: Tensor,
        rank: usize,
        /// Dims of a key of its own head, dims of a key that all heads have in common, and dims of a value.
        dims: [usize; 3],
    },
}

pub struct Attention {
    projections: Projections,
    o: Tensor,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

impl Attention {
    pub fn new(config: &Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let hidden = config.usize("hidden_size")?;
        let heads = config.usize("num_attention_heads")?;
        let weight = |out, input, name: &str| vb.get((out, input), &format!("{name}.weight"));
        if config.is_kimi() {
            let dims = [
                config.usize("qk_nope_head_dim")?,
                config.usize("qk_rope_head_dim")?,
                config.usize("v_head_dim")?,
            ];
            let [nope, rope, value] = dims;
            let rank = config.usize("kv_lora_rank")?;
            let kv_norm = RmsNorm::new(config, rank, &vb.pp("kv_a_layernorm"))?;
            return Ok(Self {
                projections: Projections::Latent {
                    q: weight(heads * (nope + rope), hidden, "q_proj")?,
                    kv_a: weight(rank + rope, hidden, "kv_a_proj_with_mqa")?,
                    kv_norm: kv_norm.eps(1e-6),
                    kv_b: weight(heads * (nope + value), rank, "kv_b_proj")?,
                    rank,
                    dims,
                },
                o: weight(hidden, heads * value, "o_proj")?,
                heads,
                kv_heads: heads,
                dim: nope + rope,
            });
        }
        let (kv_heads, dim) = (
            config.usize("num_key_value_heads")?,
            config.usize("head_dim")?,
        );
        let rotated = dim as f64 * config.f64("partial_rotary_factor")?;
        Ok(Self {
            projections: Projections::Grouped {
                q: weight(heads * 2 * dim, hidden, "q_proj")?,
                k: weight(kv_heads * dim, hidden, "k_proj")?,
                v: weight(kv_heads * dim, hidden, "v_proj")?,
                q_norm: RmsNorm::new(config, dim, &vb.pp("q_norm"))?,
                k_norm: RmsNorm::new(config, dim, &vb.pp("k_norm"))?,
                rotary: (rotated as usize, config.f64("rope_theta")?),
            },
            o: weight(hidden, heads * dim, "o_proj")?,
            heads,
            kv_heads,
            dim,
        })
    }

    /// Attention of `h` `[tokens, hidden]`. Each row has the number of tokens given for it, which follow those in its cache.
    pub fn forward<'c>(
        &self,
        h: &Tensor,
        counts: &[usize],
        caches: impl Iterator<Item = &'c mut KeyValues>,
    ) -> Result<Tensor> {
        let (mut first, mut rows) = (0, Vec::new());
        for (&count, cache) in counts.iter().zip(caches) {
            rows.push(self.row(&h.narrow(0, first, count)?, cache)?);
            first += count;
        }
        Ok(linear(&Tensor::cat(&rows, 0)?, &self.o)?)
    }

    /// Output of one row, `[n, heads · value dim]`.
    fn row(&self, h: &Tensor, cache: &mut KeyValues) -> Result<Tensor> {
        let (n, before) = (h.dim(0)?, cache.len()?);
        let by_head = |x: Tensor, heads: usize| -> candle_core::Result<Tensor> {
            x.reshape((n, heads, ()))?.transpose(0, 1)?.contiguous()
        };
        let (q, k, v, gate) = match &self.projections {
            Projections::Grouped {
                q,
                k,
                v,
                q_norm,
                k_norm,
                rotary,
            } => {
                // Each head has its query, then its gate.
                let q = linear(h, q)?.reshape((n, self.heads, 2 * self.dim))?;
                let gate = q.narrow(2, self.dim, self.dim)?.flatten_from(1)?;
                let q = q_norm.forward(&q.narrow(2, 0, self.dim)?)?;
                let k = linear(h, k)?.reshape((n, self.kv_heads, self.dim))?;
                let q = rotate(&by_head(q, self.heads)?, *rotary, before)?;
                let k = rotate(
                    &by_head(k_norm.forward(&k)?, self.kv_heads)?,
                    *rotary,
                    before,
                )?;
                let v = by_head(linear(h, v)?, self.kv_heads)?;
                (q, k, v, Some(candle_nn::ops::sigmoid(&gate)?))
            }
            Projections::Latent {
                q,
                kv_a,
                kv_norm,
                kv_b,
                rank,
                dims: [nope, rope, value],
            } => {
                let q = by_head(linear(h, q)?, self.heads)?;
                let c = linear(h, kv_a)?;
                let latent = kv_norm.forward(&c.narrow(1, 0, *rank)?)?;
                let kv = by_head(linear(&latent, kv_b)?, self.heads)?;
                let of_all = c.narrow(1, *rank, *rope)?.unsqueeze(0)?;
                let of_all = of_all.repeat((self.heads, 1, 1))?;
                let k = Tensor::cat(&[kv.narrow(2, 0, *nope)?, of_all], 2)?;
                (q, k, kv.narrow(2, *nope, *value)?.contiguous()?, None)
            }
        };
        let [k, v] = cache.append([k, v])?;
        let shared = |x: &Tensor| -> candle_core::Result<Tensor> {
            let (heads, len, dim) = x.dims3()?;
            let x = x
                .unsqueeze(1)?
                .repeat((1, self.heads / self.kv_heads, 1, 1))?;
            x.reshape((heads * (self.heads / self.kv_heads), len, dim))
        };
        let (k, v) = (shared(k)?, shared(v)?);
        // On a GPU a product takes no other views.
        let (q, k, v) = (q.contiguous()?, k.t()?.contiguous()?, v.contiguous()?);
        let scores = (q.matmul(&k)? / (self.dim as f64).sqrt())?;
        let mask: Vec<f32> = (0..n)
            .flat_map(|t| {
                (0..before + n).map(move |at| {
                    if at > before + t {
                        f32::NEG_INFINITY
                    } else {
                        0.0
                    }
                })
            })
            .collect();
        let mask = Tensor::from_vec(mask, (1, n, before + n), h.device())?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let mut out = weights
            .contiguous()?
            .matmul(&v)?
            .transpose(0, 1)?
            .flatten_from(1)?;
        if let Some(gate) = gate {
            out = (out * gate)?;
        }
        Ok(out)
    }
}

/// Rotates the first dims of `x` `[heads, n, dim]` by the tokens' positions, which begin at `before`.
fn rotate(x: &Tensor, (rotated, base): (usize, f64), before: usize) -> Result<Tensor> {
    let (_, n, dim) = x.dims3()?;
    let half = rotated / 2;
    let angles: Vec<f32> = (before..before + n)
        .flat_map(|at| {
            (0..half).map(move |i| (at as f64 / base.powf(2.0 * i as f64 / rotated as f64)) as f32)
        })
        .collect();
    let angles = Tensor::from_vec(angles, (1, n, half), x.device())?.to_dtype(DType::F32)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let rest = x.narrow(2, rotated, dim - rotated)?;
    Ok(Tensor::cat(&[first, second, rest], 2)?)
}
