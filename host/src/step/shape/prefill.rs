//! Checks of a prefill: rows of any length, positions, checkpoints and the workspace.

use gated_delta_kernels::prefill::CHUNK;

use super::checks::{aligned, indices};
use super::extents::Extents;
use crate::error::{Error, excludes};
use crate::step::args::Formulation;
use crate::step::argument::Argument;
use crate::step::choice;
use crate::step::request::{Phase, Request};
use crate::tensor::DType;
use crate::tensor_checks::{Named, range, unsupported};

/// Alignment of a workspace in bytes.
pub const WORKSPACE_ALIGNMENT: usize = 16;

/// Refuses, by name, options that a prefill does not take, and options that only a prefill takes.
pub fn check_switches(request: &Request<'_>) -> Result<(), Error> {
    let of_prefill = [
        (request.has(Argument::Positions), "positions"),
        (request.has(Argument::CheckpointSlots), "checkpoints"),
        (request.has(Argument::Workspace), "workspace"),
    ];
    let other = match request.options.formulation {
        _ if request.is_chunked() => return check_prefill(request),
        Formulation::Recurrent => "formulation = recurrent",
        Formulation::Parallel => "formulation = parallel",
        // With `Auto` a step with these options is a prefill, unless it has a ring.
        _ => "pending",
    };
    excludes((true, other), &of_prefill, "they are of a prefill")
}

fn check_prefill(request: &Request<'_>) -> Result<(), Error> {
    let chunked = (true, choice::chunked_by(request));
    excludes(
        chunked,
        &[
            (request.phase != Phase::Step, "a commit"),
            (request.stored.is_some(), "previous"),
        ],
        "a prefill has new tokens and no others",
    )?;
    excludes(
        chunked,
        &[
            (request.has(Argument::Snapshots), "snapshots"),
            (request.has(Argument::TokenSlots), "token_slots"),
        ],
        "a prefill keeps states at multiples of 64 tokens alone: Step::checkpoints",
    )?;
    excludes(
        chunked,
        &[(request.read_only, "read-only states")],
        "a prefill writes the states that it ends with",
    )
}

/// Checks lengths (which no table of kernels limits), positions, checkpoints, and the workspace except for its size.
pub fn check_lengths(request: &Request<'_>, extents: &Extents) -> Result<(), Error> {
    if !request.is_chunked() {
        return Ok(());
    }
    let (rows, tokens) = (extents.rows, extents.new.tokens);
    if !request.has(Argument::CuSeqlens) && !fits(rows, tokens) {
        let wanted = "below 2^32".to_owned();
        return Err(range("B * T", wanted, rows as u128 * tokens as u128));
    }
    if let Some(positions) = request.get(Argument::Positions) {
        indices(positions, &["B"], &[rows])?;
    }
    if let Some(slots) = request.get(Argument::CheckpointSlots) {
        let chunk = CHUNK as usize;
        let every = request.checkpoint_every();
        if every == 0 || !every.is_multiple_of(chunk) || every > u32::MAX as usize {
            let wanted = "a multiple of 64 below 2^32".to_owned();
            return Err(range("every of checkpoints", wanted, every));
        }
        let [_, of_row] = *slots.rank("[B, C]")?.dims;
        indices(slots, &["B", "C"], &[rows, of_row])?;
        slots.rank::<2>("[B, C]")?.row_stride()?;
        if of_row > u32::MAX as usize {
            return Err(range("C", "below 2^32".to_owned(), of_row));
        }
    }
    if let Some(split) = request.options.split {
        check_split(split, extents)?;
    }
    match request.get(Argument::Workspace) {
        Some(workspace) => check_workspace_view(workspace),
        None => Ok(()),
    }
}

/// Checks the size of splits, and that heads can be split.
fn check_split(split: u32, extents: &Extents) -> Result<(), Error> {
    if split == 0 || !split.is_multiple_of(CHUNK) {
        return Err(range("split", "a multiple of 64".to_owned(), split));
    }
    match extents.heads.k_dim {
        128 => Ok(()),
        other => Err(unsupported("K with split", other, "128")),
    }
}

/// Whether the number of tokens fits in 32 bits.
fn fits(rows: usize, tokens: usize) -> bool {
    rows.checked_mul(tokens)
        .is_some_and(|total| total <= u32::MAX as usize)
}

/// Checks a workspace except for its size.
fn check_workspace_view(workspace: Named<'_>) -> Result<(), Error> {
    workspace.dtype(&[DType::F32], "f32")?;
    let tensor = workspace.tensor;
    if !tensor.is_contiguous() {
        return Err(Error::Stride {
            tensor: workspace.name,
            wanted: "contiguous",
            got: *tensor.strides(),
        });
    }
    aligned(WORKSPACE_ALIGNMENT, || [(workspace.name, tensor.address())])
}
