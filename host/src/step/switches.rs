//! Which ways of keeping states exclude each other, and what a formulation computes.

use super::argument::Argument;
use super::choice::MAX_PARALLEL_TOKENS;
use super::request::{KeptInputs, Phase, Request};
use super::select::{Mode, Operator};
use super::{Formulation, MAX_TOKENS, StateLayout};
use crate::error::{Error, excludes};
use crate::shapes::unsupported;
use crate::tensor::DType;

impl Request<'_> {
    /// No two switches contradict each other.
    pub(super) fn check_switches(&self) -> Result<(), Error> {
        self.check_deferred()?;
        excludes(
            (
                self.stored.is_some() && self.phase == Phase::Step,
                "previous",
            ),
            &[
                (self.has(Argument::TokenSlots), "token_slots"),
                (self.read_only, "read-only states"),
                (self.has(Argument::Snapshots), "snapshots"),
            ],
            "the state after the kept tokens is written, and no other",
        )?;
        self.check_kept_inputs()?;
        let write_windows = self.conv().is_some_and(|conv| conv.write_windows.is_some());
        excludes(
            (write_windows, "write_windows"),
            &[(self.read_only, "read-only states")],
            "windows are written where states are",
        )?;
        excludes(
            (self.has(Argument::WindowSnapshots), "window_snapshots"),
            &[(!self.has(Argument::Snapshots), "a launch without snapshots")],
            "windows after each token are of no use without the states",
        )
    }

    /// Previous tokens come as the new ones do, those of a commit with their own convolution.
    fn check_kept_inputs(&self) -> Result<(), Error> {
        let Some(previous) = self.previous_tokens() else {
            return Ok(());
        };
        let (given, x, conv) = match previous.inputs {
            KeptInputs::Kv(_) => (true, false, false),
            KeptInputs::X(_) => (false, true, false),
            KeptInputs::Conv(_) => (false, false, true),
        };
        if self.phase == Phase::Commit {
            return excludes(
                (true, "a commit"),
                &[(x, "an x without its convolution")],
                "k and v are given, or made by a convolution of the commit's own",
            );
        }
        let alike = "previous tokens come as the new ones do";
        excludes(
            (self.conv().is_some(), "x"),
            &[(given, "previous k")],
            alike,
        )?;
        excludes((self.conv().is_none(), "q"), &[(x, "previous x")], alike)?;
        excludes(
            (true, "previous"),
            &[(conv, "a convolution of its own")],
            "previous tokens are convolved as the new ones are",
        )
    }

    /// The kernels of the chosen formulation compute T = `tokens` and T' = `previous_tokens`, where there are such.
    pub(super) fn check_formulation(
        &self,
        tokens: Option<usize>,
        previous_tokens: Option<usize>,
    ) -> Result<Operator, Error> {
        if self.is_chunked() {
            return Ok(match self.gates.per_channel {
                false => Operator::GdnPrefill,
                true => Operator::KdaPrefill,
            });
        }
        let is_layer = self.conv().is_some() || self.norm.is_some() || self.has(Argument::Windows);
        if self.formulation == Formulation::Recurrent {
            if self.pending.is_some() {
                let allowed = match self.options.formulation {
                    Formulation::Auto if self.gates.per_channel => {
                        "1, or up to 8 of bf16 states with K = 128"
                    }
                    Formulation::Auto => "1, or up to 8 of bf16 states with K = 64 or 128",
                    _ => "1, or up to 8 with Formulation::Parallel",
                };
                up_to("T with pending", tokens, 1, allowed)?;
                return Ok(match (self.gates.per_channel, is_layer) {
                    (false, false) => Operator::GdnDeferred,
                    (true, false) => Operator::KdaDeferred,
                    (false, true) => Operator::GdnDeferredLayer,
                    (true, true) => Operator::KdaDeferredLayer,
                });
            }
            let allowed = match self.options.formulation {
                Formulation::Auto => "at least 1",
                _ => "1 to 16, or any with Formulation::Chunked",
            };
            up_to("T", tokens, MAX_TOKENS, allowed)?;
            up_to("T'", previous_tokens, MAX_TOKENS, "1 to 16")?;
            let (per_channel, is_one) = (self.gates.per_channel, tokens == Some(1));
            let is_one = is_one && previous_tokens.is_none();
            if is_layer {
                return Ok(match (per_channel, is_one && self.is_plain()) {
                    (false, true) => Operator::GdnLayer,
                    (false, false) => Operator::GdnLayerMtp,
                    (true, true) => Operator::KdaLayer,
                    (true, false) => Operator::KdaLayerMtp,
                });
            }
            return Ok(match (per_channel, is_one) {
                (true, true) => Operator::KdaDecode,
                (true, false) => Operator::KdaRecurrent,
                (false, true) if self.is_plain() => Operator::GdnDecode,
                (false, _) => Operator::GdnMtp,
            });
        }
        let parallel = (true, "formulation = parallel");
        excludes(
            parallel,
            &[
                (self.has(Argument::Snapshots), "snapshots"),
                (self.has(Argument::TokenSlots), "token_slots"),
            ],
            "it has no state after each token",
        )?;
        excludes(
            parallel,
            &[
                (self.pool().tensor.dtype() == DType::F32, "an f32 state"),
                (
                    self.options.state_layout == StateLayout::VLast,
                    "a v_last state",
                ),
            ],
            "it is for 16-bit k_last states",
        )?;
        up_to(
            "T of the parallel formulation",
            tokens,
            MAX_PARALLEL_TOKENS,
            "1 to 8, or any with Formulation::Chunked",
        )?;
        up_to(
            "T' of the parallel formulation",
            previous_tokens,
            MAX_PARALLEL_TOKENS,
            "1 to 8",
        )?;
        if self.pending.is_some() {
            excludes(
                (true, "pending with formulation = parallel"),
                &[(self.pool().tensor.dtype() == DType::F16, "an f16 state")],
                "with formulation = recurrent such steps are of one token",
            )?;
            return Ok(match (self.gates.per_channel, is_layer) {
                (false, false) => Operator::GdnDeferredParallel,
                (false, true) => Operator::GdnDeferredLayerParallel,
                (true, false) => Operator::KdaDeferredParallel,
                (true, true) => Operator::KdaDeferredLayerParallel,
            });
        }
        let mode = match (tokens, previous_tokens) {
            (Some(_), Some(_)) => Mode::Resume,
            (_, Some(_)) => Mode::Update,
            _ if self.read_only => Mode::Verify,
            _ => Mode::Update,
        };
        Ok(match (self.gates.per_channel, is_layer) {
            (false, false) => Operator::GdnMtpParallel(mode),
            (false, true) => Operator::GdnLayerParallel(mode),
            (true, false) => Operator::KdaRecurrentParallel(mode),
            (true, true) => Operator::KdaLayerParallel(mode),
        })
    }

    /// Dense rows, whose states go to one place at most.
    fn is_plain(&self) -> bool {
        !self.has(Argument::Snapshots)
            && !self.has(Argument::TokenSlots)
            && !self.has(Argument::CuSeqlens)
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
