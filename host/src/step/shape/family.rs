//! The family of kernels of a request. It follows from the formulation, and has to take the tokens and the states.

use gated_delta_kernels::launch::{Family, Stage};

use super::extents::Extents;
use crate::error::{Error, excludes};
use crate::step::args::{Formulation, MAX_TOKENS, StateLayout};
use crate::step::argument::Argument;
use crate::step::request::Request;
use crate::tensor::DType;
use crate::tensor_checks::unsupported;

/// Checks that the kernels of the chosen formulation take the numbers of tokens. Returns their family.
pub fn of(request: &Request<'_>, extents: &Extents) -> Result<Family, Error> {
    let tokens = request.inputs.map(|_| extents.new.tokens);
    let previous_tokens = request.stored.map(|_| extents.previous.tokens);
    if request.is_chunked() {
        return Ok(Family::chunked(Stage::Chain));
    }
    let is_layer = request.is_layer();
    if request.formulation == Formulation::Recurrent {
        if request.pending.is_some() {
            let allowed = match request.options.formulation {
                Formulation::Auto if request.gates.per_channel => {
                    "1, or up to 8 of bf16 states with K = 128"
                }
                Formulation::Auto => "1, or up to 8 of bf16 states with K = 64 or 128",
                _ => "1, or up to 8 with Formulation::Parallel",
            };
            up_to("T with pending", tokens, 1, allowed)?;
            return Ok(around(Family::DECODE, is_layer).on_deferred());
        }
        let allowed = match request.options.formulation {
            Formulation::Auto => "at least 1",
            _ => "1 to 16, or any with Formulation::Chunked",
        };
        up_to("T", tokens, MAX_TOKENS, allowed)?;
        up_to("T'", previous_tokens, MAX_TOKENS, "1 to 16")?;
        let is_one = tokens == Some(1) && previous_tokens.is_none() && is_plain(request);
        return Ok(match (is_layer, is_one) {
            (true, true) => Family::DECODE.in_layer(),
            (true, false) => Family::RECURRENT.in_layer(),
            (false, _) => Family::RECURRENT,
        });
    }
    let parallel = (true, "formulation = parallel");
    excludes(
        parallel,
        &[
            (request.has(Argument::Snapshots), "snapshots"),
            (request.has(Argument::TokenSlots), "token_slots"),
        ],
        "it has no state after each token",
    )?;
    let is_f32 = request.pool().tensor.dtype() == DType::F32;
    let is_v_last = request.options.state_layout == StateLayout::VLast;
    let is_plain = !is_layer && request.pending.is_none();
    excludes(
        parallel,
        &[(is_v_last && !is_f32 && !is_plain, "a 16-bit v_last state")],
        "with a convolution, a norm or pending it is for f32 states and for 16-bit k_last states",
    )?;
    let most = request.max_parallel_tokens();
    let [allowed, allowed_previous] = match most {
        MAX_TOKENS => ["1 to 16, or any with Formulation::Chunked", "1 to 16"],
        _ if request.pending.is_none() => [
            "1 to 8 with a convolution or a norm, or any with Formulation::Chunked",
            "1 to 8 with a convolution or a norm",
        ],
        _ => ["1 to 8, or any with Formulation::Chunked", "1 to 8"],
    };
    up_to("T of the parallel formulation", tokens, most, allowed)?;
    up_to(
        "T' of the parallel formulation",
        previous_tokens,
        most,
        allowed_previous,
    )?;
    if request.pending.is_some() {
        excludes(
            (true, "pending with formulation = parallel"),
            &[
                (is_f32, "an f32 state"),
                (request.pool().tensor.dtype() == DType::F16, "an f16 state"),
            ],
            "with formulation = recurrent such steps are of one token",
        )?;
        return Ok(around(Family::PARALLEL, is_layer).on_deferred());
    }
    Ok(around(Family::PARALLEL, is_layer))
}

/// The family with a convolution and a norm around `family`, if `is_layer`; otherwise `family`.
fn around(family: Family, is_layer: bool) -> Family {
    match is_layer {
        false => family,
        true => family.in_layer(),
    }
}

/// Whether rows are dense and states are written to at most one place.
fn is_plain(request: &Request<'_>) -> bool {
    !request.has(Argument::Snapshots)
        && !request.has(Argument::TokenSlots)
        && !request.has(Argument::CuSeqlens)
}

/// Checks that a number of tokens is in 1..=`most`, which `allowed` spells out. `None`: the launch has no such tokens.
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
