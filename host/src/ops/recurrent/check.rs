//! Arguments → what to compile, or an error that names the tensor.

use bytemuck::Zeroable;
use gated_delta_kernels::recurrent::RecurrentConstants;

use super::extent::Extents;
use super::request::Request;
use super::tokens::{flag, index};
use crate::error::Error;
use crate::ops::HeadMap;
use crate::ops::checks::{self, Heads, Pools, indices, parameter, same_dtype};
use crate::plan::Problem;
use crate::select::{Kind, Operator};
use crate::shapes::{Named, range};

impl Problem<RecurrentConstants> {
    /// Whether g and dt_bias have a value for each channel.
    pub fn per_channel(&self) -> bool {
        self.kind.operator.per_channel()
    }

    /// Whether each row's final state is written: by an update or by a commit.
    pub fn writes_final(&self) -> bool {
        self.constants.update_state != 0 || self.constants.previous_tokens != 0
    }
}

impl Request<'_> {
    /// Checks shapes, dtypes, strides and switches, and says what to compile.
    pub(super) fn check(&self) -> Result<Problem<RecurrentConstants>, Error> {
        self.check_switches()?;
        let options = self.options;
        let extents = Extents::of(self)?;
        let heads = extents.heads;
        checks::batch(extents.rows())?;
        let operator = self.check_formulation(
            extents.new.map(|extent| extent.tokens),
            extents.previous.map(|extent| extent.tokens),
        )?;
        let mut constants = RecurrentConstants {
            h: heads.h as u32,
            ratio: (heads.hv / heads.h) as u32,
            tiled: flag(options.head_map == HeadMap::Tiled),
            l2norm: flag(options.qk_l2norm),
            update_state: flag(
                options.update_state && self.previous.is_none() && self.token_slots.is_none(),
            ),
            null_slot: checks::null_slot(options.null_slot)?,
            wide_io: 1,
            ..RecurrentConstants::zeroed()
        };
        let per_channel = operator.per_channel();
        self.check_new(&extents, per_channel, &mut constants)?;
        self.check_previous(&extents, per_channel, &mut constants)?;
        self.check_gate(heads, per_channel, &mut constants)?;
        let pools = self.check_states(&extents, &mut constants)?;
        let is_narrow = constants.wide_io == 0 || constants.wide_state == 0;
        Ok(Problem {
            kind: Kind {
                operator: if is_narrow {
                    operator.narrow()
                } else {
                    operator
                },
                layout: options.state_layout,
                state: pools.read.tensor.dtype(),
                k_dim: heads.dim as u32,
            },
            constants,
        })
    }

    /// The gates' parameters.
    fn check_gate(
        &self,
        heads: Heads,
        per_channel: bool,
        constants: &mut RecurrentConstants,
    ) -> Result<(), Error> {
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
        let first = gates.a_log.or(gates.dt_bias);
        let of_h = |named: Named<'_>| named.tensor.dims().first() == Some(&heads.h);
        let rows_h = per_channel && heads.h != heads.hv && first.is_some_and(of_h);
        let rows = match (per_channel, rows_h) {
            (false, _) => ("HV", heads.hv),
            (true, false) => ("H or HV", heads.hv),
            (true, true) => ("H or HV", heads.h),
        };
        if let Some(a_log) = gates.a_log {
            parameter(a_log, &[rows])?;
        }
        if let Some(dt_bias) = gates.dt_bias {
            let rows = match gates.a_log {
                Some(_) if per_channel => ("rows of A_log", rows.1),
                _ => rows,
            };
            if per_channel {
                parameter(dt_bias, &[rows, ("K", heads.dim)])?;
                constants.wide_io &= flag(dt_bias.wide());
            } else {
                parameter(dt_bias, &[rows])?;
            }
        }
        constants.gate = gates.kind as u32;
        constants.lower_bound = gates.lower_bound.unwrap_or(0.0).to_bits();
        constants.has_a_log = flag(gates.a_log.is_some());
        constants.has_dt_bias = flag(gates.dt_bias.is_some());
        constants.gate_rows_h = flag(rows_h);
        constants.beta_logit = flag(gates.beta_logit);
        constants.beta_scale = gates.beta_scale.to_bits();
        Ok(())
    }

    /// Where states start and go.
    fn check_states<'p>(
        &'p self,
        extents: &Extents,
        constants: &mut RecurrentConstants,
    ) -> Result<Pools<'p>, Error> {
        let rows = extents.rows();
        let tokens = extents.new.map_or(0, |extent| extent.tokens);
        let state = extents.heads.state(self.options.state_layout);
        let pools = Pools::new(self.pool, self.write_pool, state)?;
        let mut wide = pools.wide();
        let of_rows = [self.read_slots, self.write_slots, self.accepted];
        for tensor in of_rows.into_iter().flatten() {
            indices(tensor, &[("B", rows)])?;
        }
        if let Some(token_slots) = self.token_slots {
            indices(token_slots, &[("B", rows), ("T", tokens)])?;
            constants.token_slots_row = token_slots.row_stride()?;
        } else if self.read_slots.is_none() {
            pools.one_for_each(rows, "B without read_slots")?;
        }
        if let Some(snapshots) = self.snapshots {
            let [_, steps, ..] = snapshots.rank::<5>("[B, steps, HV, V, K]")?;
            if steps < tokens {
                return Err(range(
                    "steps of snapshots",
                    format!("at least T = {tokens}"),
                    steps,
                ));
            }
            snapshots.dims(&[("B", rows), ("steps", steps), state[0], state[1], state[2]])?;
            same_dtype(snapshots, pools.read, "the dtype of state")?;
            snapshots
                .inner_contiguous(3, "contiguous states (strides of rows and steps are free)")?;
            snapshots.natural()?;
            snapshots.distinct(3, "states that do not overlap, since they are written")?;
            constants.snapshot_row = snapshots.row_stride()?;
            constants.snapshot_token = snapshots.token_stride()?;
            wide &= snapshots.wide();
        }
        constants.read_index = index(self.read_slots);
        constants.write_index = index(self.write_slots);
        constants.token_index = index(self.token_slots);
        constants.accepted_index = index(self.accepted);
        constants.cu_seqlens_index = index(self.cu_seqlens);
        constants.has_snapshots = flag(self.snapshots.is_some());
        constants.read_slot = pools.read_slot;
        constants.write_slot = pools.write_slot;
        constants.wide_state = flag(wide);
        Ok(pools)
    }
}
