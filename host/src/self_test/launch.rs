//! The call of an operator.

use super::cases::{Case, Keep, ROWS};
use super::tensors::{Inputs, Outputs, Views};
use crate::error::Error;
use crate::library::Library;
use crate::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use crate::ops::recurrent::{Commit, Formulation, Previous, Recurrent, RecurrentOptions};
use crate::select::Operator;
use crate::stream::StreamRef;

/// Enqueues `case`.
///
/// # Safety
/// The tensors stay as they are until `stream` has passed the launch.
pub unsafe fn enqueue(
    library: &Library,
    stream: StreamRef<'_>,
    case: &Case,
    inputs: &Inputs,
    outputs: &mut Outputs,
) -> Result<(), Error> {
    let views = outputs.views(case)?;
    let update_state = case.way.keep != Keep::Nothing;
    if case.kind.operator == Operator::GdnDecode {
        let options = GdnDecodeOptions {
            state_layout: case.kind.layout,
            head_map: case.head_map,
            qk_l2norm: case.l2norm,
            update_state,
            ..GdnDecodeOptions::default()
        };
        let args = GdnDecode {
            q: inputs.q(case)?,
            k: inputs.tokens.k(case)?,
            v: inputs.tokens.v(case)?,
            gates: inputs.gdn_gates(case, &inputs.tokens)?,
            o: views.o,
            pool: views.pool,
            write_pool: None,
            read_slots: inputs.read_slots()?,
            write_slots: inputs.write_slots(case)?,
            options,
        };
        // SAFETY: the caller's promise; live rows write slots of their own.
        return unsafe { library.gdn_decode_with(stream, &args, case.entry) };
    }
    let options = RecurrentOptions {
        state_layout: case.kind.layout,
        head_map: case.head_map,
        qk_l2norm: case.l2norm,
        update_state,
        formulation: formulation(case),
        ..RecurrentOptions::default()
    };
    let launch = Launch {
        case,
        inputs,
        views,
        options,
    };
    let (kda, entry) = (case.kind.operator.per_channel(), case.entry);
    // SAFETY: the caller's promise; live rows write slots of their own.
    unsafe {
        match (kda, case.way.tokens) {
            (false, 0) => {
                let args = launch.commit(inputs.gdn_gates(case, &inputs.previous)?)?;
                library.gdn_commit_with(stream, &args, entry)
            }
            (false, _) => {
                let args = launch.tokens(inputs.gdn_gates(case, &inputs.tokens)?)?;
                library.gdn_mtp_with(stream, &args, entry)
            }
            (true, 0) => {
                let args = launch.commit(inputs.kda_gates(case, &inputs.previous)?)?;
                library.kda_commit_with(stream, &args, entry)
            }
            (true, _) => {
                let args = launch.tokens(inputs.kda_gates(case, &inputs.tokens)?)?;
                library.kda_recurrent_with(stream, &args, entry)
            }
        }
    }
}

pub fn formulation(case: &Case) -> Formulation {
    match case.kind.operator {
        Operator::GdnMtpParallel(_) | Operator::KdaRecurrentParallel(_) => Formulation::Parallel,
        _ => Formulation::Recurrent,
    }
}

/// What the arguments of both operators are made of.
struct Launch<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    views: Views<'a>,
    options: RecurrentOptions,
}

impl<'a> Launch<'a> {
    fn tokens<G>(self, gates: G) -> Result<Recurrent<'a, G>, Error> {
        let Self {
            case,
            inputs,
            views,
            options,
        } = self;
        let previous = &inputs.previous;
        Ok(Recurrent {
            q: inputs.q(case)?,
            k: inputs.tokens.k(case)?,
            v: inputs.tokens.v(case)?,
            gates,
            o: views.o,
            pool: views.pool,
            write_pool: None,
            read_slots: inputs.read_slots()?,
            write_slots: inputs.write_slots(case)?,
            token_slots: match &inputs.token_slots {
                Some(slots) => Some(slots.tensor(&[ROWS, case.way.tokens])?),
                None => None,
            },
            accepted: match &inputs.token_slots {
                Some(_) => Some(inputs.accepted.tensor(&[ROWS])?),
                None => None,
            },
            snapshots: views.snapshots,
            packed: None,
            previous: if previous.count == 0 {
                None
            } else {
                Some(Previous {
                    k: previous.k(case)?,
                    v: previous.v(case)?,
                    gate: previous.gate(case)?,
                    beta: previous.beta(case)?,
                    keep: inputs.keep.tensor(&[ROWS])?,
                })
            },
            options,
        })
    }

    fn commit<G>(self, gates: G) -> Result<Commit<'a, G>, Error> {
        let Self {
            case,
            inputs,
            views,
            options,
        } = self;
        Ok(Commit {
            k: inputs.previous.k(case)?,
            v: inputs.previous.v(case)?,
            gates,
            keep: inputs.keep.tensor(&[ROWS])?,
            pool: views.pool,
            write_pool: None,
            read_slots: inputs.read_slots()?,
            write_slots: inputs.write_slots(case)?,
            options,
        })
    }
}
