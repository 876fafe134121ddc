//! Launches a case.

use super::cases::{Case, Keep, PACKED, ROWS};
use super::tensors::{Inputs, Outputs, Views};
use crate::error::Error;
use crate::library::Library;
use crate::step::{
    self, Commit, Formulation, Gates, Options, Previous, States, Step, Stored, Update, Work,
};
use crate::stream::StreamRef;

/// Enqueues `case`.
///
/// # Safety
/// Until `stream` has passed the launch, nobody else uses the tensors.
pub unsafe fn enqueue(
    library: &Library,
    stream: StreamRef<'_>,
    case: &Case,
    inputs: &Inputs,
    outputs: &mut Outputs,
) -> Result<(), Error> {
    let views = outputs.views(case)?;
    let tokens = if case.way.tokens == 0 {
        &inputs.previous
    } else {
        &inputs.tokens
    };
    let work: Box<dyn Work + '_> = if case.kind.per_channel {
        work(case, inputs, views, inputs.kda_gates(case, tokens)?)?
    } else {
        work(case, inputs, views, inputs.gdn_gates(case, tokens)?)?
    };
    // SAFETY: the caller's promise; no two live rows write one slot.
    unsafe { library.launch_with(stream, &*work, case.entry) }
}

pub fn formulation(case: &Case) -> Formulation {
    let family = case.kind.family;
    match (family.is_chunked(), family.is_parallel()) {
        (true, _) => Formulation::Chunked,
        (_, true) => Formulation::Parallel,
        _ => Formulation::Recurrent,
    }
}

fn work<'a, G: Gates + 'a>(
    case: &Case,
    inputs: &'a Inputs,
    views: Views<'a>,
    gates: G,
) -> Result<Box<dyn Work + 'a>, Error> {
    let options = Options {
        state_layout: case.kind.layout,
        head_map: case.head_map,
        qk_l2norm: case.l2norm,
        formulation: formulation(case),
        split: case.way.split,
        ..Options::default()
    };
    let (tokens, previous) = (&inputs.tokens, &inputs.previous);
    let update = Update {
        read_slots: inputs.read_slots()?,
        write_slots: inputs.write_slots(case)?,
        ..States::update(views.pool)
    };
    if case.way.tokens == 0 {
        let stored = match views.windows {
            Some(windows) => Stored::conv(inputs.around.convolution(case, windows)?),
            None => Stored::kv(previous.k(case)?, previous.v(case)?),
        };
        let keep = inputs.keep.tensor(&[ROWS])?;
        let mut commit = Commit::new(stored, gates, keep, update).options(options);
        if case.way.fresh {
            commit = commit.fresh(inputs.around.fresh()?);
        }
        return Ok(Box::new(commit));
    }
    let states: States<'_> = match (&inputs.token_slots, case.way.keep) {
        (Some(slots), _) => {
            let slots = slots.tensor(&[ROWS, case.way.tokens])?;
            States::per_token(views.pool, slots)
                .accepted(inputs.accepted.tensor(&[ROWS])?)
                .into()
        }
        (None, Keep::Nothing) => step::ReadOnly {
            read_slots: inputs.read_slots()?,
            ..States::read_only(views.pool)
        }
        .into(),
        (None, _) => update.into(),
    };
    let step_inputs = match views.windows {
        Some(windows) => {
            let mut conv = inputs.around.convolution(case, windows)?;
            conv.window_snapshots = views.window_snapshots;
            step::Inputs::conv(conv)
        }
        None => step::Inputs::qkv(inputs.q(case)?, tokens.k(case)?, tokens.v(case)?),
    };
    let mut step = Step::new(step_inputs, gates, views.o, states).options(options);
    step.snapshots = views.snapshots;
    step.workspace = views.workspace;
    if case.way.packed {
        step = step.packed(inputs.cu_seqlens()?, PACKED);
    }
    if case.way.norm {
        step = step.norm(inputs.around.norm(case)?);
    }
    if case.way.fresh {
        step = step.fresh(inputs.around.fresh()?);
    }
    if case.way.previous > 0 {
        let stored = if case.way.conv {
            Stored::x(inputs.around.previous_x(case)?)
        } else {
            Stored::kv(previous.k(case)?, previous.v(case)?)
        };
        step = step.previous(Previous::new(
            stored,
            previous.gate(case)?,
            previous.beta(case)?,
            inputs.keep.tensor(&[ROWS])?,
        ));
    }
    Ok(Box::new(step))
}
