//! Arguments → what to compile, or an error that names the tensor.

use gated_delta_kernels::kernels::gdn_decode::GdnDecodeConstants;

use super::{GdnDecode, LaunchShape, MAX_BATCH};
use crate::Entry;
use crate::error::Error;
use crate::launch;
use crate::ops::{BetaScale, GdnGates, HeadMap, StateLayout, element_code, index_code};
use crate::select;
use crate::shapes::{Named, named, range, unsupported};
use crate::tensor::DType;

/// What a launch is compiled for: everything but the addresses, B and P.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GdnDecodeProblem {
    pub layout: StateLayout,
    pub state: DType,
    pub k_dim: u32,
    pub constants: GdnDecodeConstants,
}

impl GdnDecodeProblem {
    pub fn value_heads(&self) -> u32 {
        self.constants.h * self.constants.ratio
    }

    /// The variant for `batch` rows.
    pub fn entry(&self, batch: u32) -> Entry {
        select::gdn_decode(
            self.layout,
            self.state,
            self.k_dim,
            batch * self.value_heads(),
        )
    }

    /// Every variant that some batch size gets.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        select::gdn_decode_entries(self.layout, self.state, self.k_dim)
    }

    /// Every variant that computes this problem.
    pub fn variants(&self) -> impl Iterator<Item = Entry> {
        select::gdn_decode_variants(self.layout, self.state, self.k_dim)
    }

    pub fn shape(&self, entry: Entry, batch: u32) -> LaunchShape {
        let c = &self.constants;
        launch::shape(entry, [entry.tiles() * c.ratio, c.h, batch])
    }
}

impl GdnDecode<'_> {
    /// Checks shapes, dtypes, strides and switches, and says what to compile.
    pub(crate) fn check(&self) -> Result<GdnDecodeProblem, Error> {
        let options = &self.options;
        let [rows, t, h, k_dim] = named("q", &self.q).rank("[B, T = 1, H, K]")?;
        let [_, _, hv, v_dim] = named("v", &self.v).rank("[B, T = 1, HV, V]")?;
        if rows > MAX_BATCH {
            return Err(range("B", format!("at most {MAX_BATCH}"), rows));
        }
        if t != 1 {
            return Err(unsupported(
                "T",
                t,
                "1 (gdn_decode is one token per sequence)",
            ));
        }
        if !matches!(k_dim, 64 | 128) {
            return Err(unsupported("K", k_dim, "64 or 128"));
        }
        if v_dim != k_dim {
            return Err(unsupported("V", v_dim, "the same as K"));
        }
        if h == 0 || h > MAX_BATCH {
            return Err(range("H", format!("1..={MAX_BATCH}"), h));
        }
        if hv == 0 || hv % h != 0 || hv > MAX_BATCH {
            return Err(range(
                "HV",
                format!("a multiple of H = {h} up to {MAX_BATCH}"),
                hv,
            ));
        }
        let qk = [("B", rows), ("T", 1), ("H", h), ("K", k_dim)];
        let vo = [("B", rows), ("T", 1), ("HV", hv), ("V", v_dim)];
        let (q, k) = (named("q", &self.q), named("k", &self.k));
        let (v, o) = (named("v", &self.v), named("o", &self.o));
        activations(q, &qk)?;
        activations(k, &qk)?;
        activations(v, &vo)?;
        activations(o, &vo)?;
        o.distinct()?;

        let (gate_a, gate_b, given_gates, beta_scale) = match &self.gates {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => {
                per_head(named("A_log", a_log), hv)?;
                per_head(named("dt_bias", dt_bias), hv)?;
                (named("a", a), named("b", b), 0, *beta_scale)
            }
            GdnGates::Given { g, beta } => (named("g", g), named("beta", beta), 1, BetaScale::One),
        };
        gate(gate_a, rows, hv)?;
        gate(gate_b, rows, hv)?;

        let inner = match options.state_layout {
            StateLayout::KLast => [("HV", hv), ("V", v_dim), ("K", k_dim)],
            StateLayout::VLast => [("HV", hv), ("K", k_dim), ("V", v_dim)],
        };
        let read_pool = named("state", &self.pool);
        let read_slot = pool(read_pool, inner)?;
        let (write_pool, write_slot) = match &self.write_pool {
            Some(tensor) => {
                let write_pool = named("write state", tensor);
                (write_pool, pool(write_pool, inner)?)
            }
            None => (read_pool, read_slot),
        };
        if write_pool.tensor.dtype() != read_pool.tensor.dtype() {
            return Err(Error::DType {
                tensor: "write state",
                wanted: "the dtype of state",
                got: write_pool.tensor.dtype(),
            });
        }
        for (name, tensor) in [
            ("read_slots", &self.read_slots),
            ("write_slots", &self.write_slots),
        ] {
            if let Some(tensor) = tensor {
                slots(named(name, tensor), rows)?;
            }
        }
        if self.read_slots.is_none() && rows > read_pool.tensor.dims()[0] {
            return Err(range(
                "B without read_slots",
                format!("at most P = {}", read_pool.tensor.dims()[0]),
                rows,
            ));
        }
        if !options.update_state {
            for (given, other) in [
                (self.write_slots.is_some(), "write_slots"),
                (self.write_pool.is_some(), "write_pool"),
            ] {
                if given {
                    return Err(Error::Contradiction {
                        one: "update_state = false",
                        other,
                        why: "no state is written",
                    });
                }
            }
        }
        let scale = options.scale.unwrap_or(1.0 / (k_dim as f32).sqrt());
        if !scale.is_finite() {
            return Err(range("scale", "a finite number".to_owned(), scale));
        }
        if options.null_slot == Some(u32::MAX) {
            return Err(range(
                "null_slot",
                "below 2^32 - 1 (which is out of range as it is)".to_owned(),
                u32::MAX,
            ));
        }

        let flag = |on: bool| on as u32;
        Ok(GdnDecodeProblem {
            layout: options.state_layout,
            state: read_pool.tensor.dtype(),
            k_dim: k_dim as u32,
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
                null_slot: options.null_slot.unwrap_or(u32::MAX),
                read_index: index_code(self.read_slots.as_ref()),
                write_index: index_code(self.write_slots.as_ref()),
                q_element: element_code(q.tensor.dtype()),
                k_element: element_code(k.tensor.dtype()),
                v_element: element_code(v.tensor.dtype()),
                o_element: element_code(o.tensor.dtype()),
                a_element: element_code(gate_a.tensor.dtype()),
                b_element: element_code(gate_b.tensor.dtype()),
                wide_io: flag(q.wide() && k.wide() && v.wide() && o.wide()),
                wide_state: flag(read_pool.wide() && write_pool.wide()),
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
                read_slot,
                write_slot,
            },
        })
    }
}

/// q, k, v or o.
fn activations(tensor: Named<'_>, dims: &[(&'static str, usize); 4]) -> Result<(), Error> {
    tensor.dims(dims)?;
    tensor.float()?;
    tensor.inner_contiguous(1, "a contiguous innermost dim")?;
    tensor.natural()
}

/// Raw or given gates of each row and value head.
fn gate(tensor: Named<'_>, rows: usize, hv: usize) -> Result<(), Error> {
    tensor.dims(&[("B", rows), ("T", 1), ("HV", hv)])?;
    tensor.float()?;
    tensor.inner_contiguous(1, "a contiguous innermost dim")?;
    tensor.natural()
}

/// A parameter of each value head.
fn per_head(tensor: Named<'_>, hv: usize) -> Result<(), Error> {
    tensor.dims(&[("HV", hv)])?;
    tensor.dtype(&[DType::F32], "f32")?;
    tensor.inner_contiguous(1, "contiguous")?;
    tensor.natural()
}

/// Slot indices of each row.
fn slots(tensor: Named<'_>, rows: usize) -> Result<(), Error> {
    tensor.dims(&[("B", rows)])?;
    tensor.dtype(&[DType::I32, DType::I64, DType::U32], "i32, i64 or u32")?;
    tensor.inner_contiguous(1, "contiguous")?;
    tensor.natural()
}

/// A pool of states with the dims `inner`; its slot stride.
fn pool(tensor: Named<'_>, inner: [(&'static str, usize); 3]) -> Result<u32, Error> {
    let [count, ..] = tensor.rank::<4>("[P, HV, V, K]")?;
    tensor.dims(&[("P", count), inner[0], inner[1], inner[2]])?;
    tensor.dtype(&[DType::F32, DType::Bf16], "f32 or bf16")?;
    tensor.inner_contiguous(3, "contiguous slots (the slot stride is free)")?;
    tensor.natural()?;
    if count >= u32::MAX as usize {
        return Err(range("P", "below 2^32 - 1".to_owned(), count));
    }
    let stride = tensor.row_stride()?;
    if count > 1 && (stride as usize) < inner[0].1 * inner[1].1 * inner[2].1 {
        return Err(Error::Stride {
            tensor: tensor.name,
            wanted: "slots that do not overlap",
            got: *tensor.tensor.strides(),
        });
    }
    Ok(stride)
}
