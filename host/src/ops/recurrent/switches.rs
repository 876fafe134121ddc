//! Which ways of keeping states exclude each other, and what a formulation computes.

use super::request::Request;
use super::{Formulation, MAX_TOKENS};
use crate::error::Error;
use crate::ops::StateLayout;
use crate::ops::checks::excludes;
use crate::select::{Mode, Operator};
use crate::shapes::unsupported;
use crate::tensor::DType;

/// Most tokens of a row in the parallel formulation.
const MAX_PARALLEL_TOKENS: usize = 8;

impl Request<'_> {
    /// No two switches contradict each other.
    pub(super) fn check_switches(&self) -> Result<(), Error> {
        let no_update = (!self.options.update_state, "update_state = false");
        let read_slots = (self.read_slots.is_some(), "read_slots");
        let write_slots = (self.write_slots.is_some(), "write_slots");
        let write_pool = (self.write_pool.is_some(), "write_pool");
        let snapshots = (self.snapshots.is_some(), "snapshots");
        let name = if self.new.is_some() {
            "previous"
        } else {
            "a commit"
        };
        let previous = (self.previous.is_some(), name);
        if self.accepted.is_some() && self.token_slots.is_none() {
            return Err(Error::MissingTensor {
                tensor: "token_slots",
                needed_by: "accepted tokens",
            });
        }
        excludes(
            (self.token_slots.is_some(), "token_slots"),
            &[read_slots, write_slots, previous, no_update],
            "they say where states start and where each of them goes",
        )?;
        excludes(
            previous,
            &[no_update, snapshots],
            "the state after the kept tokens is written, and no other",
        )?;
        excludes(no_update, &[write_slots, write_pool], "no state is written")
    }

    /// The kernels of the chosen formulation compute T = `tokens` and T' = `previous_tokens`, where there are such.
    pub(super) fn check_formulation(
        &self,
        tokens: Option<usize>,
        previous_tokens: Option<usize>,
    ) -> Result<Operator, Error> {
        if self.options.formulation == Formulation::Recurrent {
            up_to("T", tokens, MAX_TOKENS, "1 to 16")?;
            up_to("T'", previous_tokens, MAX_TOKENS, "1 to 16")?;
            return Ok(match (self.gates.operator, tokens, previous_tokens) {
                (Operator::KdaRecurrent, Some(1), None) => Operator::KdaDecode,
                (operator, ..) => operator,
            });
        }
        let parallel = (true, "formulation = parallel");
        excludes(
            parallel,
            &[
                (self.snapshots.is_some(), "snapshots"),
                (self.token_slots.is_some(), "token_slots"),
            ],
            "it has no state after each token",
        )?;
        excludes(
            parallel,
            &[
                (self.pool.tensor.dtype() == DType::F32, "an f32 state"),
                (
                    self.options.state_layout == StateLayout::VLast,
                    "a v_last state",
                ),
            ],
            "it is for bf16 k_last states",
        )?;
        up_to(
            "T of the parallel formulation",
            tokens,
            MAX_PARALLEL_TOKENS,
            "1 to 8",
        )?;
        up_to(
            "T' of the parallel formulation",
            previous_tokens,
            MAX_PARALLEL_TOKENS,
            "1 to 8",
        )?;
        let mode = match (tokens, previous_tokens) {
            (Some(_), Some(_)) => Mode::Resume,
            (_, Some(_)) => Mode::Update,
            _ if self.options.update_state => Mode::Update,
            _ => Mode::Verify,
        };
        Ok(if self.gates.operator.per_channel() {
            Operator::KdaRecurrentParallel(mode)
        } else {
            Operator::GdnMtpParallel(mode)
        })
    }
}

/// A number of tokens, where there are some, is in 1..=`most`, which `allowed` spells out.
fn up_to(
    what: &'static str,
    tokens: Option<usize>,
    most: usize,
    allowed: &'static str,
) -> Result<(), Error> {
    match tokens {
        Some(tokens) if !(1..=most).contains(&tokens) => Err(unsupported(what, tokens, allowed)),
        _ => Ok(()),
    }
}
