//! Fuzzes shapes and strides: any tensors of a launch have to give an error, or a launch that stays inside of them. The simulator
//! decides: it knows the elements of every view and stops a kernel that touches any other memory.
#![no_main]

mod draft;
mod form;
mod sizes;

use std::convert::Infallible;
use std::ops::Range;
use std::sync::LazyLock;

use gated_delta::{DType, Error, Formulation, Library, MAX_TOKENS, StreamRef, Tensor, Work};
use gated_delta_cli::HostTensor;
use gated_delta_harness::arguments::Arguments;
use libfuzzer_sys::fuzz_target;

use draft::Draft;

static SIMULATOR: LazyLock<Library> = LazyLock::new(Library::simulator);

fuzz_target!(|draft: Draft| {
    check_nowhere(&draft);
    if draft.forms.iter().all(|(_, form)| form.is_small()) {
        launch(&draft);
    }
});

/// Runs the checks that need no memory, on tensors of any size. No number may overflow.
fn check_nowhere(draft: &Draft) {
    let views: Result<Vec<_>, Error> = (draft.forms.iter())
        .map(|(_, form)| form.nowhere())
        .collect();
    let Ok(views) = views else { return };
    let Ok(work) = with_views(&draft.arguments, &views).work() else {
        return;
    };
    if let Ok(entry) = work.selected() {
        let bytes = work.bytes();
        bytes.unwrap_or_else(|error| panic!("selected, but of no size: {error}"));
        // Only GPUs load recipes, and they run proved entries only.
        if entry.is_proved() {
            let recipe = work.recipe();
            recipe.unwrap_or_else(|error| panic!("selected, but without a recipe: {error}"));
        }
    }
}

/// Launches the draft in memory that is exactly as long as the tensors.
fn launch(draft: &Draft) {
    let Some(mut memory) = draft.memory() else {
        return;
    };
    let (mut arguments, stream) = (draft.arguments, StreamRef::default_stream());
    let validate = |work: &dyn Work| SIMULATOR.validate(stream, work);
    match with_work(draft, &arguments, &mut memory, validate) {
        Some(Ok(_)) => {}
        // The kernels skip rows whose bounds no launch can mean. The draft is launched anyway if no two rows write the same output,
        // without the tensors for which the check would also have looked for overlapping writes.
        Some(Err(Error::Index { .. })) if rows_are_apart(draft, &memory) => {
            arguments = Arguments {
                update_state: false,
                previous: None,
                write_pool: None,
                write_slots: None,
                token_slots: None,
                accepted: None,
                snapshots: None,
                ..arguments
            };
        }
        _ => return,
    }
    with_work(draft, &arguments, &mut memory, |work| {
        let Ok(variants) = work.variants() else {
            return;
        };
        let variant = variants[usize::from(draft.variant) % variants.len()];
        // SAFETY: a simulated launch is over when the call returns, the tensors belong to this function, and no two rows write the
        // same slot.
        let launched = unsafe { SIMULATOR.launch_with(stream, work, variant) };
        launched.unwrap_or_else(|error| panic!("checked, but not launched: {error}\n{draft:#?}"));
    });
}

/// Calls `look` with the library's arguments in `memory`. `None` if the draft makes no arguments.
fn with_work<R>(
    draft: &Draft,
    arguments: &Arguments<usize>,
    memory: &mut [HostTensor],
    look: impl FnOnce(&dyn Work) -> R,
) -> Option<R> {
    let views: Result<Vec<_>, Error> = (draft.forms.iter().zip(memory))
        .map(|((name, _), tensor)| match writes(arguments, name) {
            true => tensor.view_mut(),
            false => tensor.view(),
        })
        .collect();
    let work = with_views(arguments, &views.ok()?).work().ok()?;
    Some(look(&*work))
}

fn with_views<'a>(arguments: &Arguments<usize>, views: &[Tensor<'a>]) -> Arguments<Tensor<'a>> {
    let Ok(arguments) = arguments.map(&|&position| Ok::<_, Infallible>(views[position]));
    arguments
}

/// Whether a launch writes the tensor `name`.
fn writes(arguments: &Arguments<usize>, name: &str) -> bool {
    match name {
        "o" | "snapshots" | "write_pool" => true,
        "keys" | "updates" | "decays" | "inputs" => !arguments.is_flush(),
        "windows" => arguments.update_state,
        "pool" => arguments.write_pool.is_none() && arguments.update_state,
        _ => false,
    }
}

/// Whether no token belongs to two ranges: to two rows of `cu_seqlens` within bounds, or to a row and the tokens before the first or
/// after the last bound, which get zeros.
fn rows_are_apart(draft: &Draft, memory: &[HostTensor]) -> bool {
    let (Some(packed), Some(new)) = (draft.arguments.packed, draft.arguments.new) else {
        return false;
    };
    let total = memory[new.q].dims().get(1).copied().unwrap_or(0);
    // A prefill accepts rows of up to 64 tokens whatever `max_tokens` says.
    let is_prefill =
        draft.arguments.options.formulation == Formulation::Auto && packed.max_tokens > MAX_TOKENS;
    let most = match is_prefill {
        true => packed.max_tokens.max(64),
        false => packed.max_tokens,
    };
    let row = |pair: &[i64]| -> Option<Range<usize>> {
        let (start, end) = (pair[0].try_into().ok()?, pair[1].try_into().ok()?);
        let row = start..end;
        (!row.is_empty() && row.len() <= most && end <= total).then_some(row)
    };
    let bounds = memory[packed.cu_seqlens].to_i64();
    let mut rows: Vec<_> = bounds.windows(2).filter_map(row).collect();
    // As in the kernels' `clear_rest`: a bound outside of the tokens is ignored.
    let bound = |bound: Option<&i64>| {
        let bound = usize::try_from(*bound?).ok()?;
        (bound <= total).then_some(bound)
    };
    let first = bound(bounds.first()).unwrap_or(0);
    let end = bound(bounds.last()).unwrap_or(total);
    if first <= end {
        rows.extend(
            [0..first, end..total]
                .into_iter()
                .filter(|rest| !rest.is_empty()),
        );
    }
    rows.sort_by_key(|row| row.start);
    rows.is_sorted_by(|one, next| one.end <= next.start)
}

impl Draft {
    /// Memory for the tensors, with index tensors filled. `None` if a form is no valid tensor.
    fn memory(&self) -> Option<Vec<HostTensor>> {
        let tensor = |(name, form): &(&str, form::Form)| {
            let tensor = HostTensor::strided(form.dtype, &form.dims, &form.strides, form.offset);
            let mut tensor = tensor.ok()?;
            if matches!(form.dtype, DType::I32 | DType::I64 | DType::U32) && !form.dims.contains(&0)
            {
                let values = self.values(name, tensor.elements());
                tensor.fill(&values).expect("as many values as elements");
            }
            Some(tensor)
        };
        self.forms.iter().map(tensor).collect()
    }

    /// Values of an index tensor of `count` elements.
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
}
