//! Checks of the pools of states, their slots and snapshots.

use super::checks::{Heads, indices, same_dtype};
use super::extents::Extents;
use crate::error::Error;
use crate::step::args::StateLayout;
use crate::step::argument::Argument;
use crate::step::request::Request;
use crate::tensor::DType;
use crate::tensor_checks::{Named, range};

/// Strides of states in elements, and whether some access to them is not aligned to 16 bytes.
#[derive(Default)]
pub struct StateStrides {
    /// Stride of the slots that are read.
    pub read_slot: u32,
    /// Stride of the slots that are written.
    pub write_slot: u32,
    pub token_slots_row: u32,
    pub snapshot_row: u32,
    pub snapshot_token: u32,
    pub narrow: bool,
}

/// A pool of states.
struct Pool {
    /// P, the number of slots.
    slots: usize,
    /// Stride of slots in elements.
    stride: u32,
    /// Whether every address and stride is a multiple of 16 bytes.
    wide: bool,
}

impl Pool {
    /// Checks a pool.
    fn of(tensor: Named<'_>, heads: Heads, layout: StateLayout) -> Result<Self, Error> {
        let [slots, ..] = *tensor.rank::<4>("[P, HV, V, K]")?.dims;
        let letters = match layout {
            StateLayout::KLast => &["P", "HV", "V", "K"],
            StateLayout::VLast => &["P", "HV", "K", "V"],
        };
        let [outer, inner] = heads.state_dims(layout);
        let view = tensor.dims(letters, &[slots, heads.hv, outer, inner])?;
        tensor.dtype(&[DType::Bf16, DType::F16, DType::F32], "bf16, f16 or f32")?;
        view.inner_contiguous(3, "contiguous slots (the slot stride is free)")?;
        tensor.natural()?;
        if slots >= u32::MAX as usize {
            return Err(range("P", "below 2^32 - 1".to_owned(), slots));
        }
        let stride = view.row_stride()?;
        view.distinct(3, "slots that do not overlap")?;
        let wide = view.wide();
        Ok(Self {
            slots,
            stride,
            wide,
        })
    }
}

/// Checks the pools, the slots and the snapshots.
pub fn check(request: &Request<'_>, extents: &Extents) -> Result<StateStrides, Error> {
    let (rows, tokens, heads) = (extents.rows, extents.new.tokens, extents.heads);
    let layout = request.options.state_layout;
    let pool = Pool::of(request.pool(), heads, layout)?;
    let mut strides = StateStrides {
        read_slot: pool.stride,
        write_slot: pool.stride,
        narrow: !pool.wide,
        ..StateStrides::default()
    };
    if let Some(write_pool) = request.get(Argument::WritePool) {
        let written = Pool::of(write_pool, heads, layout)?;
        same_dtype(write_pool, request.pool(), "the dtype of pool")?;
        strides.write_slot = written.stride;
        strides.narrow |= !written.wide;
    }
    for argument in [
        Argument::ReadSlots,
        Argument::WriteSlots,
        Argument::Accepted,
    ] {
        if let Some(tensor) = request.get(argument) {
            indices(tensor, &["B"], &[rows])?;
        }
    }
    if let Some(token_slots) = request.get(Argument::TokenSlots) {
        indices(token_slots, &["B", "T"], &[rows, tokens])?;
        strides.token_slots_row = token_slots.rank::<2>("[B, T]")?.row_stride()?;
    } else if !request.has(Argument::ReadSlots) && rows > pool.slots {
        let wanted = format!("at most P = {}", pool.slots);
        return Err(range("B without read_slots", wanted, rows));
    }
    let Some(snapshots) = request.get(Argument::Snapshots) else {
        return Ok(strides);
    };
    let [_, steps, ..] = *snapshots.rank::<5>("[B, steps, HV, V, K]")?.dims;
    if steps < tokens {
        return Err(range(
            "steps of snapshots",
            format!("at least T = {tokens}"),
            steps,
        ));
    }
    let letters = match layout {
        StateLayout::KLast => &["B", "steps", "HV", "V", "K"],
        StateLayout::VLast => &["B", "steps", "HV", "K", "V"],
    };
    let [outer, inner] = heads.state_dims(layout);
    let view = snapshots.dims(letters, &[rows, steps, heads.hv, outer, inner])?;
    same_dtype(snapshots, request.pool(), "the dtype of pool")?;
    view.inner_contiguous(3, "contiguous states (strides of rows and steps are free)")?;
    snapshots.natural()?;
    view.distinct(3, "states that do not overlap, since they are written")?;
    strides.snapshot_row = view.row_stride()?;
    strides.snapshot_token = view.token_stride()?;
    strides.narrow |= !view.wide();
    Ok(strides)
}
