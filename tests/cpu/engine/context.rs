//! A context that the engine owns.

use std::ptr;

use gated_delta::Library;
use gated_delta::driver::Context;
use gated_delta_test_support::backend::{Backend, gpu};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::spec::Spec;

use crate::engine::families;

#[test]
fn no_context_is_refused() {
    // SAFETY: null is not a context, and the call must refuse it.
    let error = unsafe { Context::from_raw(ptr::null_mut()) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "CUcontext: wanted a live context, got null"
    );
}

/// Launches run in a context that the engine lends, and the context outlives its borrowers.
#[test]
fn a_borrowed_context_is_the_engines() {
    let Some(context) = gpu() else { return };
    for family in families() {
        // SAFETY: the context is retained by `gpu` until the process ends.
        let borrowed = unsafe { Context::from_raw(context.raw().0) }.unwrap();
        assert_eq!(
            (borrowed.raw(), borrowed.device()),
            (context.raw(), context.device())
        );
        let backend = Backend::Cuda(Library::new(&borrowed), borrowed);
        let case = Spec::plain(family).case();
        check(&case, &backend.run(&case, None));
    }
    context.synchronize().unwrap();
}
