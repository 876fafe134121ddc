//! Tensors with any dims, strides, dtype and address give an error or a success, never a panic.

mod arguments;
mod tensors;

use gated_delta::{Library, StreamRef, Tensor};
use gated_delta_harness::arguments::Arguments;
use gated_delta_test_support::for_all;

use arguments::{arguments, draws};
use tensors::{view, wild};

/// Calls every function that takes arguments.
fn call_everything(args: &Arguments<Tensor<'_>>) {
    let Ok(work) = args.work() else { return };
    let library = Library::simulator();
    let stream = StreamRef::default_stream();
    let _ = (
        work.params(),
        work.variants(),
        work.selected(),
        work.bytes(),
        work.workspace_bytes(),
    );
    let _ = (library.prewarm(&*work), library.plan(&*work).is_ok());
    let _ = library.validate(stream, &*work);
    if let Ok(recipe) = work.recipe() {
        assert!(recipe.kernel.ptx().is_ok());
    }
    // SAFETY: the simulator refuses tensors in GPU memory, and reads none of them.
    let launched = unsafe { library.launch(stream, &*work) };
    assert!(launched.is_err(), "a launch on memory that is not there");
}

#[test]
fn views_of_any_tensor_are_tensors_or_errors() {
    for_all(
        "arbitrary_views",
        4000,
        (wild(), view()),
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
    for_all("arbitrary_arguments", 4000, draws(), |draw| {
        if let Some(args) = arguments(draw) {
            call_everything(&args);
        }
    });
}
