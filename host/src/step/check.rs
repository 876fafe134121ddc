//! Arguments → what to compile, or an error that names the tensor.

use super::StateLayout;
use super::argument::Argument;
use super::checks::{self, Pools, Strides, indices, parameter, same_dtype};
use super::extent::{Extents, TokenStrides};
use super::layer_check::FoundConvolution;
use super::pending::FoundPending;
use super::problem::Problem;
use super::request::Request;
use super::select::{Keeps, Kind, Operator};
use crate::error::Error;
use crate::shapes::{Named, range};

/// What the checks find besides errors. Of a tensor that is not there, its default.
#[derive(Default)]
pub(super) struct Found {
    pub extents: Extents,
    /// The factor of q.
    pub scale: f32,
    /// The kernels' code of it.
    pub null_slot: u32,
    pub q: Strides,
    pub o: Strides,
    pub new: TokenStrides,
    pub previous: TokenStrides,
    /// The gates' parameters have H rows.
    pub gate_rows_h: bool,
    /// dt_bias has a value for each channel, and is not aligned to 16 bytes.
    pub narrow_dt_bias: bool,
    pub pools: Pools,
    pub token_slots_row: u32,
    pub snapshot_row: u32,
    pub snapshot_token: u32,
    /// The snapshots' addresses and strides are not all multiples of 16 bytes.
    pub narrow_snapshots: bool,
    pub conv: FoundConvolution,
    pub z: Strides,
    /// Accesses to z and the norm's weight are aligned to 16 bytes.
    pub wide_norm: bool,
    pub pending: FoundPending,
}

impl Found {
    /// Whether an access to the tensors of the tokens is not aligned to 16 bytes.
    pub fn narrow_io(&self) -> bool {
        self.q.narrow
            || self.o.narrow
            || self.new.narrow()
            || self.previous.narrow()
            || self.conv.x.narrow
            || self.narrow_dt_bias
    }

    /// Whether an access to the states is not aligned to 16 bytes.
    pub fn narrow_state(&self) -> bool {
        !self.pools.wide || self.narrow_snapshots
    }
}

impl Request<'_> {
    /// Checks shapes, dtypes, strides and switches, and says what to compile.
    pub(crate) fn check(&self) -> Result<Problem, Error> {
        let mut found = Found::default();
        let operator = self.find(&mut found)?;
        let is_narrow = found.narrow_io() || found.narrow_state();
        let kind = Kind {
            operator: if is_narrow {
                operator.narrow()
            } else {
                operator
            },
            layout: self.options.state_layout,
            state: self.pool().tensor.dtype(),
            k_dim: found.extents.heads.k_dim as u32,
            v_dim: found.extents.heads.v_dim as u32,
            ratio: found.extents.heads.ratio as u32,
            tokens: match self.is_chunked() {
                true => 0,
                false => (found.extents.new.tokens + found.extents.previous.tokens) as u32,
            },
            keeps: self.keeps(),
            norm: self.is_chunked() && self.norm.is_some(),
        };
        kind.check_room()?;
        Ok(Problem {
            kind,
            constants: self.constants(&found),
        })
    }

    /// Which states are kept, where a choice depends on it.
    fn keeps(&self) -> Keeps {
        if self.stored.is_some() {
            Keeps::Other
        } else if self.has(Argument::Snapshots) || self.has(Argument::TokenSlots) {
            Keeps::Each
        } else if self.read_only {
            Keeps::Other
        } else {
            Keeps::Last
        }
    }

    /// Checks everything.
    fn find(&self, found: &mut Found) -> Result<Operator, Error> {
        self.check_switches()?;
        let options = self.options;
        found.extents.find(self)?;
        let extents = &found.extents;
        checks::batch(extents.rows)?;
        self.check_chunked()?;
        let operator = self.check_formulation(
            self.inputs.map(|_| extents.new.tokens),
            self.stored.map(|_| extents.previous.tokens),
        )?;
        found.null_slot = checks::null_slot(options.null_slot)?;
        found.scale = checks::scale(options.scale, extents.heads.k_dim)?;
        let per_channel = self.gates.per_channel;
        self.check_new(per_channel, found)?;
        self.check_previous(per_channel, found)?;
        self.check_gate(per_channel, found)?;
        self.check_states(found)?;
        self.check_layer(found)?;
        self.check_pending(found)?;
        self.check_lengths(found)?;
        Ok(operator)
    }

    /// The gates' parameters.
    fn check_gate(&self, per_channel: bool, found: &mut Found) -> Result<(), Error> {
        let heads = found.extents.heads;
        let gates = &self.gates;
        if let Some(bound) = gates.lower_bound
            && !(bound.is_finite() && bound < 0.0)
        {
            return Err(range(
                "lower_bound",
                "a finite number below 0".to_owned(),
                bound,
            ));
        }
        let [a_log, dt_bias] = [Argument::ALog, Argument::DtBias].map(|it| self.get(it));
        let first = a_log.or(dt_bias);
        let of_h = |named: Named<'_>| named.tensor.dims().first() == Some(&heads.h);
        found.gate_rows_h = per_channel && heads.h != heads.hv && first.is_some_and(of_h);
        let rows = if found.gate_rows_h { heads.h } else { heads.hv };
        if let Some(a_log) = a_log {
            let letters = if per_channel { &["H or HV"] } else { &["HV"] };
            parameter(a_log, letters, &[rows])?;
        }
        match dt_bias {
            Some(dt_bias) if per_channel => {
                let letters = match a_log {
                    Some(_) => &["rows of A_log", "K"],
                    None => &["H or HV", "K"],
                };
                found.narrow_dt_bias = !parameter(dt_bias, letters, &[rows, heads.k_dim])?;
            }
            Some(dt_bias) => {
                parameter(dt_bias, &["HV"], &[rows])?;
            }
            None => {}
        }
        Ok(())
    }

    /// Where states start and go.
    fn check_states(&self, found: &mut Found) -> Result<(), Error> {
        let (rows, tokens) = (found.extents.rows, found.extents.new.tokens);
        let (layout, heads) = (self.options.state_layout, found.extents.heads);
        found
            .pools
            .of(self.pool(), self.get(Argument::WritePool), heads, layout)?;
        for argument in [
            Argument::ReadSlots,
            Argument::WriteSlots,
            Argument::Accepted,
        ] {
            if let Some(tensor) = self.get(argument) {
                indices(tensor, &["B"], &[rows])?;
            }
        }
        if let Some(token_slots) = self.get(Argument::TokenSlots) {
            indices(token_slots, &["B", "T"], &[rows, tokens])?;
            found.token_slots_row = token_slots.rank::<2>("[B, T]")?.row_stride()?;
        } else if !self.has(Argument::ReadSlots) {
            found.pools.one_for_each(rows, "B without read_slots")?;
        }
        let Some(snapshots) = self.get(Argument::Snapshots) else {
            return Ok(());
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
        same_dtype(snapshots, self.pool(), "the dtype of pool")?;
        view.inner_contiguous(3, "contiguous states (strides of rows and steps are free)")?;
        snapshots.natural()?;
        view.distinct(3, "states that do not overlap, since they are written")?;
        found.snapshot_row = view.row_stride()?;
        found.snapshot_token = view.token_stride()?;
        found.narrow_snapshots = !view.wide();
        Ok(())
    }
}
