//! Arguments → what to compile, or an error that names the tensor.

use gated_delta_kernels::kernels::gdn_decode::GdnDecodeConstants;

use super::GdnDecode;
use crate::error::Error;
use crate::ops::checks::{self, Heads, Pools, Strides, excludes, indices, parameter};
use crate::ops::{BetaScale, GdnGates, HeadMap, element_code, index_code};
use crate::plan::Problem;
use crate::select::{Kind, Operator};
use crate::shapes::{named, unsupported};

/// Strides of the tensors of a step.
#[derive(Default)]
struct TensorStrides {
    q: Strides,
    k: Strides,
    v: Strides,
    o: Strides,
    a: Strides,
    b: Strides,
}

impl TensorStrides {
    /// Whether an access that may be wide is not.
    fn narrow(&self) -> bool {
        self.q.narrow || self.k.narrow || self.v.narrow || self.o.narrow
    }
}

impl GdnDecode<'_> {
    /// Checks shapes, dtypes, strides and switches, and says what to compile.
    pub(crate) fn check(&self) -> Result<Problem<GdnDecodeConstants>, Error> {
        let options = &self.options;
        let (q, v) = (named("q", &self.q), named("v", &self.v));
        let [rows, t, h, k_dim] = *q.rank("[B, T = 1, H, K]")?.dims;
        let [_, _, hv, v_dim] = *v.rank("[B, T = 1, HV, V]")?.dims;
        checks::batch(rows)?;
        if t != 1 {
            return Err(unsupported(
                "T",
                t,
                "1 (gdn_decode is one token per sequence)",
            ));
        }
        let heads = Heads::new(h, k_dim, hv, v_dim)?;
        let (k, o) = (named("k", &self.k), named("o", &self.o));
        let (qk, vo) = ([rows, 1, h, k_dim], [rows, 1, hv, v_dim]);
        let mut strides = TensorStrides::default();
        strides.q.of_heads(q, &["B", "T", "H", "K"], &qk, false)?;
        strides.k.of_heads(k, &["B", "T", "H", "K"], &qk, false)?;
        strides.v.of_heads(v, &["B", "T", "HV", "V"], &vo, false)?;
        strides.o.of_heads(o, &["B", "T", "HV", "V"], &vo, false)?;
        o.rank::<4>("[B, T = 1, HV, V]")?
            .distinct(1, "rows and heads that do not overlap, since it is written")?;

        let (gate_a, gate_b, given_gates, beta_scale) = match &self.gates {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => {
                parameter(named("A_log", a_log), &["HV"], &[hv])?;
                parameter(named("dt_bias", dt_bias), &["HV"], &[hv])?;
                (named("a", a), named("b", b), 0, *beta_scale)
            }
            GdnGates::Given { g, beta } => (named("g", g), named("beta", beta), 1, BetaScale::One),
        };
        let per_head = [rows, 1, hv];
        strides
            .a
            .per_head(gate_a, &["B", "T", "HV"], &per_head, false)?;
        strides
            .b
            .per_head(gate_b, &["B", "T", "HV"], &per_head, false)?;

        let mut pools = Pools::default();
        pools.of(
            named("state", &self.pool),
            self.write_pool
                .as_ref()
                .map(|tensor| named("write state", tensor)),
            heads,
            options.state_layout,
        )?;
        for (name, tensor) in [
            ("read_slots", &self.read_slots),
            ("write_slots", &self.write_slots),
        ] {
            if let Some(tensor) = tensor {
                indices(named(name, tensor), &["B"], &[rows])?;
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
                state: self.pool.dtype(),
                k_dim: k_dim as u32,
            },
            constants: GdnDecodeConstants {
                h: h as u32,
                ratio: heads.ratio as u32,
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
                wide_io: flag(!strides.narrow()),
                wide_state: flag(pools.wide),
                q_row: strides.q.row,
                q_head: strides.q.head,
                k_row: strides.k.row,
                k_head: strides.k.head,
                v_row: strides.v.row,
                v_head: strides.v.head,
                o_row: strides.o.row,
                o_head: strides.o.head,
                a_row: strides.a.row,
                b_row: strides.b.row,
                read_slot: pools.read_slot,
                write_slot: pools.write_slot,
            },
        })
    }
}
