//! Checks of options that exclude each other: ways of keeping states, and kinds of tokens.

use super::rings;
use crate::error::{Error, excludes};
use crate::step::argument::Argument;
use crate::step::request::{KeptInputs, Phase, Request};

/// Checks that no two options exclude each other.
pub fn check(request: &Request<'_>) -> Result<(), Error> {
    rings::check_switches(request)?;
    excludes(
        (
            request.stored.is_some() && request.phase == Phase::Step,
            "previous",
        ),
        &[
            (request.has(Argument::TokenSlots), "token_slots"),
            (request.read_only, "read-only states"),
            (request.has(Argument::Snapshots), "snapshots"),
        ],
        "the state after the kept tokens is written, and no other",
    )?;
    check_kept_inputs(request)?;
    let write_windows = request
        .conv()
        .is_some_and(|conv| conv.write_windows.is_some());
    excludes(
        (write_windows, "write_windows"),
        &[(request.read_only, "read-only states")],
        "windows are written where states are",
    )?;
    excludes(
        (request.has(Argument::WindowSnapshots), "window_snapshots"),
        &[(
            !request.has(Argument::Snapshots),
            "a launch without snapshots",
        )],
        "windows after each token are of no use without the states",
    )
}

/// Checks that previous tokens have the form of the new ones, and that tokens of a commit come with their own convolution.
fn check_kept_inputs(request: &Request<'_>) -> Result<(), Error> {
    let Some(previous) = request.previous_tokens() else {
        return Ok(());
    };
    let (given, x, conv) = match previous.inputs {
        KeptInputs::Kv(_) => (true, false, false),
        KeptInputs::X(_) => (false, true, false),
        KeptInputs::Conv(_) => (false, false, true),
    };
    if request.phase == Phase::Commit {
        return excludes(
            (true, "a commit"),
            &[(x, "an x without its convolution")],
            "k and v are given, or made by a convolution of the commit's own",
        );
    }
    let alike = "previous tokens come as the new ones do";
    excludes(
        (request.conv().is_some(), "x"),
        &[(given, "previous k")],
        alike,
    )?;
    excludes((request.conv().is_none(), "q"), &[(x, "previous x")], alike)?;
    excludes(
        (true, "previous"),
        &[(conv, "a convolution of its own")],
        "previous tokens are convolved as the new ones are",
    )
}
