//! Tensors of any dims, strides, dtype and address: an error or a success, never a panic.

mod arguments;
mod tensors;

use gated_delta::{Library, StreamRef};
use gated_delta_tests::args::Args;
use gated_delta_tests::for_all;

use crate::{each, recipe, validate};
use arguments::{decode, draws, recurrent};
use tensors::{view, wild};

/// Calls everything that takes arguments.
fn call_everything(args: &Args<'_>) {
    let library = Library::simulator();
    let stream = StreamRef::default_stream();
    each!(args, args => drop(args.params()));
    let _ = (args.variants(), args.selected(), args.bytes());
    let _ = (args.prewarm(&library), args.plan(&library).is_ok());
    let _ = validate(&library, stream, args);
    if let Ok(recipe) = recipe(args) {
        assert!(recipe.kernel.ptx().is_ok());
    }
    // SAFETY: the simulator refuses tensors in GPU memory, and reads none of them.
    let launched = unsafe { args.launch(&library, stream, None) };
    assert!(launched.is_err(), "a launch on memory that is not there");
}

#[test]
fn views_of_any_tensor_are_tensors_or_errors() {
    for_all(
        "arbitrary_views",
        4000,
        &(wild(), view()),
        |(tensor, view)| {
            let _ = (
                tensor.is_contiguous(),
                tensor.alignment(),
                format!("{tensor:?}"),
            );
            let _ = view.of(tensor);
        },
    );
}

#[test]
fn arguments_of_any_tensors_are_taken_or_refused() {
    for_all("arbitrary_arguments", 4000, &draws(), |draw| {
        if let Some(args) = decode(draw.clone()) {
            call_everything(&args);
        }
        for args in recurrent(draw).into_iter().flatten() {
            call_everything(&args);
        }
    });
}
