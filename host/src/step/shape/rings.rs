//! Checks of deferred write-back: the rings of pending tokens, and the options that exclude them.

use super::checks::{aligned, floats_of_slots, indices, same_dtype, wide_floats_of_slots};
use super::convolution::ConvolutionStrides;
use super::extents::Extents;
use crate::error::{Error, excludes};
use crate::step::args::{Formulation, Inputs, Pending, StateLayout};
use crate::step::argument::Argument;
use crate::step::choice;
use crate::step::request::{Phase, Request};
use crate::tensor::DType;
use crate::tensor_checks::{named, range};

/// Alignment of a ring in bytes.
const ALIGNMENT: usize = 16;

/// Sizes of the rings, and strides of their slots in elements.
#[derive(Default)]
pub struct Rings {
    /// N, the largest number of pending tokens.
    pub most: u32,
    /// R, the number of entries.
    pub entries: u32,
    pub keys_slot: u32,
    pub updates_slot: u32,
    pub decays_slot: u32,
    pub inputs_slot: u32,
}

/// Refuses, by name, options that exclude deferred write-back.
pub fn check_switches(request: &Request<'_>) -> Result<(), Error> {
    let pending = (request.pending.is_some(), "pending");
    excludes(
        pending,
        &[
            (request.stored.is_some(), "previous"),
            (request.has(Argument::TokenSlots), "token_slots"),
            (request.read_only, "read-only states"),
            (request.has(Argument::Snapshots), "snapshots"),
            (request.has(Argument::CuSeqlens), "packed rows"),
        ],
        "the tokens since the state are in its slot's ring, and rejected by its length",
    )?;
    let write_windows = request
        .conv()
        .is_some_and(|conv| conv.write_windows.is_some());
    excludes(
        pending,
        &[
            (request.has(Argument::WriteSlots), "write_slots"),
            (request.has(Argument::WritePool), "write_pool"),
            (write_windows, "write_windows"),
        ],
        "a state is flushed, and a window moves, where the ring is",
    )?;
    excludes(
        pending,
        &[
            (request.is_chunked(), "formulation = chunked"),
            (
                request.options.state_layout == StateLayout::VLast,
                "a v_last state",
            ),
        ],
        "it is for up to 8 tokens on k_last states",
    )
}

/// Checks the rings, `len` and `base`; in a flush also the windows.
pub fn check(
    request: &Request<'_>,
    extents: &Extents,
) -> Result<(Rings, Option<ConvolutionStrides>), Error> {
    let mut of = Rings::default();
    let Some(pending) = request.pending else {
        return Ok((of, None));
    };
    let (rows, tokens) = (extents.rows, extents.new.tokens);
    let most = request.formulation.max_pending();
    if !(tokens.max(1)..=most).contains(&pending.most) {
        let wanted = format!("{}..={most}", tokens.max(1));
        return Err(range("most of pending", wanted, pending.most));
    }
    let heads = extents.heads;
    let [keys, updates, decays, len, base] = pending.named();
    let [slots, _, entries, _] = *keys.rank::<4>("[P, H, R, K]")?.dims;
    let pool_slots = request.pool().tensor.dims()[0];
    if slots != pool_slots {
        return Err(range("P of keys", format!("P = {pool_slots}"), slots));
    }
    let least = pending.most + tokens.max(1);
    if !(least..1 << 16).contains(&entries) {
        let wanted = format!("at least N + T = {least}, below 65536");
        return Err(range("R", wanted, entries));
    }
    (of.most, of.entries) = (pending.most as u32, entries as u32);
    let sizes = [slots, heads.h, entries, heads.k_dim];
    of.keys_slot = wide_floats_of_slots(keys, &["P", "H", "R", "K"], &sizes)?;
    match request.inputs {
        Some(Inputs::Qkv { k, .. }) => same_dtype(keys, named("k", k), "the dtype of k")?,
        Some(Inputs::Conv(_)) => {
            keys.dtype(&[DType::F32], "f32, as k is that a convolution makes")?
        }
        None => {}
    }
    let sizes = [slots, heads.hv, entries, heads.v_dim];
    of.updates_slot = wide_floats_of_slots(updates, &["P", "HV", "R", "V"], &sizes)?;
    of.decays_slot = if request.gates.per_channel {
        let sizes = [slots, heads.hv, entries, heads.k_dim];
        wide_floats_of_slots(decays, &["P", "HV", "R", "K"], &sizes)?
    } else {
        floats_of_slots(decays, &["P", "HV", "R"], &[slots, heads.hv, entries])?
    };
    if request.formulation == Formulation::Parallel {
        updates.dtype(&[DType::F32, DType::Bf16], "f32 or bf16")?;
    } else {
        let wanted = match request.options.formulation {
            Formulation::Auto if request.gates.per_channel => {
                "f32; bf16 is for bf16 states with K = 128"
            }
            Formulation::Auto => "f32; bf16 is for bf16 states with K = 64 or 128",
            _ => "f32; bf16 is for formulation = parallel",
        };
        updates.dtype(&[DType::F32], wanted)?;
    }
    decays.dtype(&[DType::F32], "f32")?;
    let flushed;
    (of.inputs_slot, flushed) = check_inputs(request, extents, pending, [slots, entries])?;
    indices(len, &["B"], &[rows])?;
    indices(base, &["B"], &[rows])?;
    Ok((of, flushed))
}

/// Checks the ring of inputs, which is required if windows are deferred too, and the windows of a flush. Returns the ring's
/// stride of slots in elements, and the strides of the windows.
fn check_inputs(
    request: &Request<'_>,
    extents: &Extents,
    pending: &Pending<'_>,
    [slots, entries]: [usize; 2],
) -> Result<(u32, Option<ConvolutionStrides>), Error> {
    let is_parallel = request.formulation == Formulation::Parallel;
    let inputs = pending.named_inputs();
    let no_windows = request.inputs.is_some() && request.conv().is_none();
    excludes(
        (inputs.is_some(), "inputs"),
        &[
            (!is_parallel, choice::no_drafts_by(request)),
            (no_windows, "q"),
        ],
        "they are of windows that wait, with drafts of bf16 states and a convolution",
    )?;
    excludes(
        (
            request.phase == Phase::Flush && request.has(Argument::Windows),
            "windows of a flush",
        ),
        &[(!is_parallel, choice::no_drafts_by(request))],
        "they move with every token",
    )?;
    let (inputs, windows) = match (inputs, request.windows()) {
        (None, Some(_)) if is_parallel => {
            return Err(Error::MissingTensor {
                tensor: "inputs",
                needed_by: "windows that wait",
            });
        }
        (Some(_), None) => {
            return Err(Error::MissingTensor {
                tensor: "windows",
                needed_by: "inputs that are pending",
            });
        }
        (Some(inputs), Some([windows, _])) => (inputs, windows),
        _ => return Ok((0, None)),
    };
    let channels = extents.heads.channels();
    let sizes = [slots, entries, channels];
    let inputs_slot = floats_of_slots(inputs, &["P", "R", "D"], &sizes)?;
    let flushed = match request.phase {
        Phase::Flush => Some(ConvolutionStrides::of_flushed(windows, slots, channels)?),
        _ => None,
    };
    same_dtype(inputs, windows, "the dtype of the windows")?;
    Ok((inputs_slot, flushed))
}

/// Checks that the addresses of rings are aligned as the kernels assume.
#[inline]
pub fn check_rings_aligned(pending: &Pending<'_>, per_channel: bool) -> Result<(), Error> {
    aligned(ALIGNMENT, || {
        [
            ("keys", pending.keys.address()),
            ("updates", pending.updates.address()),
        ]
    })?;
    let of_decays = if per_channel { ALIGNMENT } else { 4 };
    aligned(of_decays, || [("decays", pending.decays.address())])
}
