//! Conversions from this crate's types to the reference's.

use gated_delta_reference::{gate, recurrent, tolerance};

use crate::step::{Activation, Formulation, HeadMap, StateLayout};
use crate::tensor::DType;

impl From<HeadMap> for recurrent::HeadMap {
    fn from(head_map: HeadMap) -> Self {
        match head_map {
            HeadMap::Grouped => Self::Grouped,
            HeadMap::Tiled => Self::Tiled,
        }
    }
}

impl From<StateLayout> for recurrent::Layout {
    fn from(layout: StateLayout) -> Self {
        match layout {
            StateLayout::KLast => Self::KLast,
            StateLayout::VLast => Self::VLast,
        }
    }
}

impl From<Activation> for gate::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::None => Self::None,
            Activation::Silu => Self::Silu,
            Activation::Sigmoid => Self::Sigmoid,
        }
    }
}

/// Tolerance of a formulation that [`Work::formulation`](crate::Work::formulation) returned, which is never `Auto`. `Auto` gets
/// the narrowest tolerance.
impl From<Formulation> for tolerance::Tolerance {
    fn from(formulation: Formulation) -> Self {
        match formulation {
            Formulation::Recurrent | Formulation::Auto => Self::RECURRENT,
            Formulation::Parallel => Self::PARALLEL,
            Formulation::Chunked => Self::CHUNKED,
        }
    }
}

/// Integers, which are never results, count as f32.
impl From<DType> for tolerance::DType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
            DType::F32 | DType::I32 | DType::I64 | DType::U32 => Self::F32,
        }
    }
}
