//! Arguments → what to compile, or an error that names the tensor.

use gated_delta_kernels::kernels::gdn_decode::GdnDecodeConstants;

use super::GdnDecode;
use crate::error::Error;
use crate::ops::checks::{self, Heads, Pools, excludes, floats, indices, parameter};
use crate::ops::{BetaScale, GdnGates, HeadMap, element_code, index_code};
use crate::plan::Problem;
use crate::select::{Kind, Operator};
use crate::shapes::{named, unsupported};

impl GdnDecode<'_> {
    /// Checks shapes, dtypes, strides and switches, and says what to compile.
    pub(crate) fn check(&self) -> Result<Problem<GdnDecodeConstants>, Error> {
        let options = &self.options;
        let [rows, t, h, k_dim] = named("q", &self.q).rank("[B, T = 1, H, K]")?;
        let [_, _, hv, v_dim] = named("v", &self.v).rank("[B, T = 1, HV, V]")?;
        checks::batch(rows)?;
        if t != 1 {
            return Err(unsupported(
                "T",
                t,
                "1 (gdn_decode is one token per sequence)",
            ));
        }
        let heads = Heads::new(h, k_dim, hv, v_dim)?;
        let qk = [("B", rows), ("T", 1), ("H", h), ("K", k_dim)];
        let vo = [("B", rows), ("T", 1), ("HV", hv), ("V", v_dim)];
        let (q, k) = (named("q", &self.q), named("k", &self.k));
        let (v, o) = (named("v", &self.v), named("o", &self.o));
        floats(q, &qk)?;
        floats(k, &qk)?;
        floats(v, &vo)?;
        floats(o, &vo)?;
        o.distinct(1, "rows and heads that do not overlap, since it is written")?;

        let (gate_a, gate_b, given_gates, beta_scale) = match &self.gates {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => {
                parameter(named("A_log", a_log), &[("HV", hv)])?;
                parameter(named("dt_bias", dt_bias), &[("HV", hv)])?;
                (named("a", a), named("b", b), 0, *beta_scale)
            }
            GdnGates::Given { g, beta } => (named("g", g), named("beta", beta), 1, BetaScale::One),
        };
        let per_head = [("B", rows), ("T", 1), ("HV", hv)];
        floats(gate_a, &per_head)?;
        floats(gate_b, &per_head)?;

        let pools = Pools::new(
            named("state", &self.pool),
            self.write_pool
                .as_ref()
                .map(|tensor| named("write state", tensor)),
            heads.state(options.state_layout),
        )?;
        for (name, tensor) in [
            ("read_slots", &self.read_slots),
            ("write_slots", &self.write_slots),
        ] {
            if let Some(tensor) = tensor {
                indices(named(name, tensor), &[("B", rows)])?;
            }
        }
        if self.read_slots.is_none() {
            pools.one_for_each(rows, "B without read_slots")?;
        }
        excludes(
            (!options.update_state, "update_state = false"),
            &[
                (self.write_slots.is_some(), "write_slots"),
                (self.write_pool.is_some(), "write_pool"),
            ],
            "no state is written",
        )?;
        let scale = checks::scale(options.scale, k_dim)?;
        let null_slot = checks::null_slot(options.null_slot)?;

        let flag = |on: bool| on as u32;
        Ok(Problem {
            kind: Kind {
                operator: Operator::GdnDecode,
                layout: options.state_layout,
                state: pools.read.tensor.dtype(),
                k_dim: k_dim as u32,
            },
            constants: GdnDecodeConstants {
                h: h as u32,
                ratio: (hv / h) as u32,
                tiled: flag(options.head_map == HeadMap::Tiled),
                l2norm: flag(options.qk_l2norm),
                scale: scale.to_bits(),
                given_gates,
                beta_scale: (if beta_scale == BetaScale::Two {
                    2.0f32
                } else {
                    1.0
                })
                .to_bits(),
                update_state: flag(options.update_state),
                null_slot,
                read_index: index_code(self.read_slots.as_ref()),
                write_index: index_code(self.write_slots.as_ref()),
                q_element: element_code(q.tensor.dtype()),
                k_element: element_code(k.tensor.dtype()),
                v_element: element_code(v.tensor.dtype()),
                o_element: element_code(o.tensor.dtype()),
                a_element: element_code(gate_a.tensor.dtype()),
                b_element: element_code(gate_b.tensor.dtype()),
                wide_io: flag(q.wide() && k.wide() && v.wide() && o.wide()),
                wide_state: flag(pools.wide()),
                q_row: q.row_stride()?,
                q_head: q.stride_u32(2)?,
                k_row: k.row_stride()?,
                k_head: k.stride_u32(2)?,
                v_row: v.row_stride()?,
                v_head: v.stride_u32(2)?,
                o_row: o.row_stride()?,
                o_head: o.stride_u32(2)?,
                a_row: gate_a.row_stride()?,
                b_row: gate_b.row_stride()?,
                read_slot: pools.read_slot,
                write_slot: pools.write_slot,
            },
        })
    }
}
