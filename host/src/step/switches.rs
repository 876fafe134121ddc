//! Which ways of keeping states exclude each other, and what a formulation computes.

use super::request::Request;
use super::select::{Mode, Operator};
use super::{Formulation, MAX_TOKENS, StateLayout};
use crate::error::{Error, excludes};
use crate::shapes::unsupported;
use crate::tensor::DType;

/// Most tokens of a row in the parallel formulation.
const MAX_PARALLEL_TOKENS: usize = 8;

impl Request<'_> {
    /// No two switches contradict each other.
    pub(super) fn check_switches(&self) -> Result<(), Error> {
        // Of a commit, the types leave nothing to contradict.
        excludes(
            (self.previous.is_some() && self.new.is_some(), "previous"),
            &[
                (self.token_slots.is_some(), "token_slots"),
                (self.read_only, "read-only states"),
                (self.snapshots.is_some(), "snapshots"),
            ],
            "the state after the kept tokens is written, and no other",
        )?;
        if let Some((name, _)) = self.decode_alone() {
            let is_parallel = self.options.formulation == Formulation::Parallel;
            excludes(
                (true, name),
                &[
                    (self.cu_seqlens.is_some(), "cu_seqlens"),
                    (self.previous.is_some(), "previous"),
                    (self.token_slots.is_some(), "token_slots"),
                    (self.snapshots.is_some(), "snapshots"),
                    (is_parallel, "formulation = parallel"),
                ],
                "it is for decodes alone as yet: one token of each row, and the state after it",
            )?;
        }
        let write_windows = self.conv().is_some_and(|conv| conv.write_windows.is_some());
        excludes(
            (write_windows, "write_windows"),
            &[(self.read_only, "read-only states")],
            "windows are written where states are",
        )
    }

    /// What is computed for decodes alone, and what T is called with it.
    fn decode_alone(&self) -> Option<(&'static str, &'static str)> {
        [
            (
                self.conv().is_some(),
                ("a convolution", "T with a convolution"),
            ),
            (self.norm.is_some(), ("a norm", "T with a norm")),
            (self.fresh.is_some(), ("fresh", "T with fresh")),
        ]
        .into_iter()
        .find_map(|(given, names)| given.then_some(names))
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
            if let Some((_, what)) = self.decode_alone() {
                up_to(what, tokens, 1, "1")?;
            }
            if self.conv().is_some() || self.norm.is_some() {
                return Ok(if self.gates.per_channel {
                    Operator::KdaLayer
                } else {
                    Operator::GdnLayer
                });
            }
            return Ok(match (self.gates.per_channel, tokens, previous_tokens) {
                (true, Some(1), None) => Operator::KdaDecode,
                (true, ..) => Operator::KdaRecurrent,
                (false, Some(1), None) if self.is_plain() => Operator::GdnDecode,
                (false, ..) => Operator::GdnMtp,
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
            _ if self.read_only => Mode::Verify,
            _ => Mode::Update,
        };
        Ok(if self.gates.per_channel {
            Operator::KdaRecurrentParallel(mode)
        } else {
            Operator::GdnMtpParallel(mode)
        })
    }

    /// Dense rows, whose states go to one place at most.
    fn is_plain(&self) -> bool {
        self.snapshots.is_none() && self.token_slots.is_none() && self.cu_seqlens.is_none()
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
