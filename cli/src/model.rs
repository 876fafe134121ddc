//! Layers of published models.

use gated_delta::DType;
use gated_delta::ops::gdn_decode::GdnDecodeOptions;
use gated_delta::ops::{BetaScale, StateLayout};

use crate::error::Error;
use crate::problem::Problem;
use crate::tensor::HostTensor;

/// A model whose layers the demo takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// Qwen3-Next-80B-A3B.
    #[default]
    #[value(name = "qwen3-next")]
    Qwen3Next,
    /// Qwen3.5-397B-A17B.
    #[value(name = "qwen3.5-397b")]
    Qwen35,
    /// Kimi-Linear-48B-A3B, whose layers are KDA.
    #[value(name = "kimi-linear")]
    KimiLinear,
}

/// Shape of a GDN layer, K = V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV.
    pub value_heads: usize,
    /// K and V.
    pub dim: usize,
}

/// GDN layers by name.
pub const GDN: [(&str, Shape); 2] = [
    (
        "qwen3-next",
        Shape {
            heads: 16,
            value_heads: 32,
            dim: 128,
        },
    ),
    (
        "qwen3.5-397b",
        Shape {
            heads: 16,
            value_heads: 64,
            dim: 128,
        },
    ),
];

impl Model {
    /// Name and shape of its GDN layers.
    ///
    /// # Errors
    /// [`Error::Input`] for a model that has none.
    pub fn gdn(self) -> Result<(&'static str, Shape), Error> {
        match self {
            Self::Qwen3Next => Ok(GDN[0]),
            Self::Qwen35 => Ok(GDN[1]),
            Self::KimiLinear => Err(Error::Input(
                "model kimi-linear: its layers are KDA, which is not supported yet; qwen3-next and qwen3.5-397b are".to_owned(),
            )),
        }
    }
}

impl Shape {
    /// A decode of `batch` rows with a pool of `slots`: bf16 tensors, raw gates with f32 `A_log` and `dt_bias`,
    /// everything NaN.
    ///
    /// # Errors
    /// As [`HostTensor::new`]'s.
    pub fn blank(
        self,
        batch: usize,
        slots: usize,
        state: DType,
        layout: StateLayout,
    ) -> Result<Problem, Error> {
        let Self {
            heads,
            value_heads,
            dim,
        } = self;
        let tensors: [(_, _, &[usize]); 9] = [
            ("q", DType::Bf16, &[batch, 1, heads, dim]),
            ("k", DType::Bf16, &[batch, 1, heads, dim]),
            ("v", DType::Bf16, &[batch, 1, value_heads, dim]),
            ("a", DType::Bf16, &[batch, 1, value_heads]),
            ("b", DType::Bf16, &[batch, 1, value_heads]),
            ("A_log", DType::F32, &[value_heads]),
            ("dt_bias", DType::F32, &[value_heads]),
            ("o", DType::Bf16, &[batch, 1, value_heads, dim]),
            ("state", state, &[slots, value_heads, dim, dim]),
        ];
        let tensors = tensors
            .into_iter()
            .map(|(name, dtype, dims)| Ok((name, HostTensor::new(dtype, dims)?)));
        Ok(Problem {
            tensors: tensors.collect::<Result<_, Error>>()?,
            options: GdnDecodeOptions {
                state_layout: layout,
                ..GdnDecodeOptions::default()
            },
            beta_scale: BetaScale::One,
        })
    }
}
