//! Shapes and strides: whatever a problem's tensors are, an error, or a launch that stays inside of them. The simulator
//! is the judge: it knows the elements of every view and stops a kernel that touches anything else.
#![no_main]

mod draft;
mod form;
mod sizes;

use std::sync::LazyLock;

use gated_delta::{DType, Entry, Error, Library, StreamRef, Tensor};
use gated_delta_cli::problem::Views;
use gated_delta_cli::{HostTensor, Problem};
use gated_delta_harness::args::Args;
use libfuzzer_sys::fuzz_target;

use draft::Draft;

static SIMULATOR: LazyLock<Library> = LazyLock::new(Library::simulator);

fuzz_target!(|draft: Draft| {
    check_nowhere(&draft);
    if draft.forms.values().all(|form| form.is_small()) {
        launch(&draft);
    }
});

/// What needs no memory, on tensors of any size: no number overflows.
fn check_nowhere(draft: &Draft) {
    let mut problem = draft.problem();
    let mut views = Views::new();
    for (&name, form) in &draft.forms {
        let Ok(tensor) = form.nowhere() else { return };
        views.insert(name, tensor);
        // What a problem asks of its own tensors here is which of them there are.
        let empty = HostTensor::new(form.dtype, &[0]).expect("an empty tensor needs no memory");
        problem.tensors.insert(name, empty);
    }
    let write_pool = views.remove("write state");
    let Ok(mut args) = problem.args(&views) else {
        return;
    };
    set_write_pool(&mut args, write_pool);
    if args.selected().is_ok() {
        let bytes = args.bytes();
        bytes.unwrap_or_else(|error| panic!("selected, but of no size: {error}"));
    }
}

/// A launch in memory that is as long as the tensors are.
fn launch(draft: &Draft) {
    let mut problem = draft.problem();
    let mut write_pool = None;
    for (&name, form) in &draft.forms {
        let tensor = HostTensor::strided(form.dtype, &form.dims, &form.strides, form.offset);
        let Ok(mut tensor) = tensor else { return };
        if matches!(form.dtype, DType::I32 | DType::I64 | DType::U32) && !form.dims.contains(&0) {
            let values = draft.values(name, tensor.elements());
            tensor.fill(&values).expect("as many values as elements");
        }
        if name == "write state" {
            write_pool = Some(tensor);
        } else {
            problem.tensors.insert(name, tensor);
        }
    }
    // No two rows meet in a slot of the pool; a write pool has none beyond those.
    if problem.validate().is_err() || !fewer_slots(write_pool.as_ref(), &problem) {
        return;
    }
    let writes: Vec<_> = problem
        .tensors
        .keys()
        .map(|name| problem.writes(name))
        .collect();
    let shape = problem.clone();
    let tensors = problem.tensors.iter_mut().zip(writes);
    let views: Result<Views<'_>, Error> = tensors
        .map(|((&name, tensor), written)| {
            Ok((
                name,
                if written {
                    tensor.view_mut()?
                } else {
                    tensor.view()?
                },
            ))
        })
        .collect();
    let views = views.expect("views that were validated");
    let mut args = shape.args(&views).expect("arguments that were validated");
    let write_pool = write_pool.as_mut().map(HostTensor::view_mut);
    let Ok(write_pool) = write_pool.transpose() else {
        return;
    };
    set_write_pool(&mut args, write_pool);
    let Ok(variants) = variants(&args) else {
        return;
    };
    let variant = variants[usize::from(draft.variant) % variants.len()];
    // SAFETY: a simulated launch is over when the call returns, the tensors are this function's own, and no two rows
    // meet in a slot.
    let launched = unsafe { args.launch(&SIMULATOR, StreamRef::default_stream(), variant) };
    launched.unwrap_or_else(|error| panic!("checked, but not launched: {error}\n{draft:#?}"));
}

impl Draft {
    /// What is in an index tensor of so many elements.
    fn values(&self, name: &str, count: usize) -> Vec<f64> {
        let step = if name == "cu_seqlens" { self.tokens } else { 1 };
        let ascending = (0..count).map(|i| (i * step) as f64);
        match self.indices.is_empty() {
            true => ascending.collect(),
            false => self
                .indices
                .iter()
                .map(|&index| index as f64)
                .cycle()
                .take(count)
                .collect(),
        }
    }

    /// The problem without its tensors.
    fn problem(&self) -> Problem {
        Problem {
            operation: self.operation,
            tensors: Default::default(),
            options: self.options,
            max_tokens: self.max_tokens,
        }
    }
}

fn fewer_slots(write_pool: Option<&HostTensor>, problem: &Problem) -> bool {
    let slots = |pool: &HostTensor| pool.dims().first().copied();
    let Some(state) = problem.tensors.get("state") else {
        return false;
    };
    write_pool.is_none_or(|pool| slots(pool) <= slots(state))
}

/// `$body` for whatever the arguments are of.
macro_rules! each {
    ($args:expr, $one:ident => $body:expr) => {
        match $args {
            Args::GdnDecode($one) => $body,
            Args::GdnMtp($one) => $body,
            Args::GdnCommit($one) => $body,
            Args::KdaRecurrent($one) => $body,
            Args::KdaCommit($one) => $body,
        }
    };
}

fn set_write_pool<'a>(args: &mut Args<'a>, pool: Option<Tensor<'a>>) {
    each!(args, args => args.write_pool = pool);
}

fn variants(args: &Args<'_>) -> Result<Vec<Entry>, Error> {
    each!(args, args => args.variants())
}
