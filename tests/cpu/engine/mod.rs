//! The parts of the library other than the operators that an engine calls: recipes, the self-test, the validation of indices, its
//! own context. None of them panics on any arguments.

mod arbitrary;
mod context;
mod indices;
mod plans;
mod recipes;
mod self_test;

use gated_delta::{DType, StateLayout};
use gated_delta_harness::arguments::Operator;
use gated_delta_test_support::spec::Family;

/// Families of a decode, of several tokens of each operator, and of a layer step.
fn families() -> [Family; 4] {
    [
        Family::decode(StateLayout::KLast, DType::Bf16, 64),
        Family::new(Operator::Gdn, StateLayout::VLast, DType::F32, 64),
        Family::new(Operator::Kda, StateLayout::KLast, DType::Bf16, 64),
        Family::layer(Operator::Gdn, StateLayout::KLast, DType::Bf16, 64),
    ]
}
