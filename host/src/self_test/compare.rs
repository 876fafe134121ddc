//! What the reference holds results to, by this crate's names.

use gated_delta_reference::compare;

use crate::step::Formulation;
use crate::tensor::DType;

impl From<Formulation> for compare::Tolerance {
    fn from(formulation: Formulation) -> Self {
        match formulation {
            Formulation::Recurrent => Self::RECURRENT,
            Formulation::Parallel => Self::PARALLEL,
        }
    }
}

/// Integers, which are no results, are held to what f32 is.
impl From<DType> for compare::DType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
            DType::F32 | DType::I32 | DType::I64 | DType::U32 => Self::F32,
        }
    }
}
