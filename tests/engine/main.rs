//! What an engine calls besides the operators: recipes, the self-test, the look at indices, a context of its own; and
//! that nothing that it may hand over makes them panic.

mod arbitrary;
mod context;
mod indices;
mod recipes;
mod self_test;

use gated_delta::ops::StateLayout;
use gated_delta::raw::{Kernel, LaunchShape};
use gated_delta::{DType, Error, IndexReport, Library, StreamRef};
use gated_delta_tests::args::Args;
use gated_delta_tests::problem::Operator;
use gated_delta_tests::spec::Family;

macro_rules! each {
    ($args:expr, $one:ident => $result:expr) => {
        match $args {
            Args::GdnDecode($one) => $result,
            Args::GdnMtp($one) => $result,
            Args::GdnCommit($one) => $result,
            Args::KdaRecurrent($one) => $result,
            Args::KdaCommit($one) => $result,
        }
    };
}
use each;

/// A recipe of any operator.
struct Recipe {
    kernel: Kernel,
    shape: LaunchShape,
    parameter: Vec<u8>,
}

fn recipe(args: &Args<'_>) -> Result<Recipe, Error> {
    each!(args, args => {
        let recipe = args.recipe()?;
        Ok(Recipe {
            kernel: recipe.kernel,
            shape: recipe.shape,
            parameter: recipe.parameter().to_vec(),
        })
    })
}

fn validate(
    library: &Library,
    stream: StreamRef<'_>,
    args: &Args<'_>,
) -> Result<IndexReport, Error> {
    each!(args, args => library.validate(stream, args))
}

/// One family of each operator.
fn families() -> [Family; 3] {
    [
        Family::new(Operator::GdnDecode, StateLayout::KLast, DType::Bf16, 64),
        Family::new(Operator::GdnMtp, StateLayout::VLast, DType::F32, 64),
        Family::new(Operator::KdaRecurrent, StateLayout::KLast, DType::Bf16, 64),
    ]
}
