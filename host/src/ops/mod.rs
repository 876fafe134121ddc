//! One file per operator: arguments → check → parameters and load-time constants → launch.

pub(crate) mod checks;
pub mod device_contract;
pub mod gdn_decode;
pub mod gdn_mtp;
pub mod kda_recurrent;
pub mod recurrent;
pub mod state_floor;

use std::fmt;

use crate::tensor::{DType, Tensor};

/// Which dim of a state is contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateLayout {
    /// `[P, HV, V, K]` (others call it pretranspose or V-major).
    #[default]
    KLast,
    /// `[P, HV, K, V]`.
    VLast,
}

impl fmt::Display for StateLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KLast => "k_last",
            Self::VLast => "v_last",
        })
    }
}

/// Query/key head of a value head, for HV > H (GVA).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadMap {
    /// `hv / (HV / H)`.
    #[default]
    Grouped,
    /// `hv % H`, the order of GGUF files.
    Tiled,
}

/// Factor of sigmoid(b).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BetaScale {
    /// β in (0, 1).
    #[default]
    One,
    /// β in (0, 2): states may have negative eigenvalues (OLMo-Hybrid).
    Two,
}

/// Gates of a GDN layer.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
pub enum GdnGates<'a> {
    /// Computed in the kernel: log decay −exp(A_log) · softplus(a + dt_bias), β = sigmoid(b) · beta_scale.
    Raw {
        /// `[B, T, HV]`, bf16, f16 or f32.
        a: Tensor<'a>,
        /// `[B, T, HV]`, bf16, f16 or f32.
        b: Tensor<'a>,
        /// `[HV]`, f32.
        a_log: Tensor<'a>,
        /// `[HV]`, f32.
        dt_bias: Tensor<'a>,
        /// Factor of sigmoid(b).
        beta_scale: BetaScale,
    },
    /// Given by the caller.
    Given {
        /// Log decay, `[B, T, HV]`, bf16, f16 or f32.
        g: Tensor<'a>,
        /// `[B, T, HV]`, bf16, f16 or f32.
        beta: Tensor<'a>,
    },
}

/// The kernels' code of a float dtype; the check has let no other through.
pub(crate) fn element_code(dtype: DType) -> u32 {
    use gated_delta_kernels::constants::Element;
    (match dtype {
        DType::Bf16 => Element::Bf16,
        DType::F16 => Element::F16,
        _ => Element::F32,
    }) as u32
}

/// The kernels' code of a slot index dtype.
pub(crate) fn index_code(slots: Option<&Tensor<'_>>) -> u32 {
    use gated_delta_kernels::constants::Index;
    (match slots.map(|slots| slots.dtype()) {
        None => Index::None,
        Some(DType::I64) => Index::I64,
        Some(DType::U32) => Index::U32,
        Some(_) => Index::I32,
    }) as u32
}
