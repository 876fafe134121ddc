//! The tensors of the tokens: what they have to be, and their part of the load-time constants.

use gated_delta_kernels::recurrent::RecurrentConstants;

use super::extent::Extents;
use super::request::{Kept, New, Request};
use crate::error::Error;
use crate::ops::checks::{self, indices, same_dtype};
use crate::ops::{element_code, index_code};
use crate::shapes::Named;

/// A load-time constant of two values.
pub(super) fn flag(on: bool) -> u32 {
    on as u32
}

/// The kernels' code of the indices.
pub(super) fn index(tensor: Option<Named<'_>>) -> u32 {
    index_code(tensor.map(|named| named.tensor))
}

fn element(tensor: Named<'_>) -> u32 {
    element_code(tensor.tensor.dtype())
}

impl Request<'_> {
    /// The new tokens, where there are such.
    pub(super) fn check_new(
        &self,
        extents: &Extents,
        per_channel: bool,
        constants: &mut RecurrentConstants,
    ) -> Result<(), Error> {
        let heads = extents.heads;
        let scale = checks::scale(self.options.scale, heads.dim)?;
        let (Some(New { q, tokens, o }), Some(extent)) = (self.new, extents.new) else {
            return Ok(());
        };
        extent.floats(q, [("H", heads.h), ("K", heads.dim)])?;
        let strides = extent.tokens(tokens, heads, per_channel)?;
        extent.floats(o, [("HV", heads.hv), ("V", heads.dim)])?;
        o.distinct(
            1,
            "rows, tokens and heads that do not overlap, since it is written",
        )?;
        let of_q = extent.strides(q, q.stride_u32(2)?)?;
        let of_o = extent.strides(o, o.stride_u32(2)?)?;
        let wide = strides.wide && extent.wide(q) && extent.wide(o);
        *constants = RecurrentConstants {
            tokens: extent.tokens as u32,
            scale: scale.to_bits(),
            q_element: element(q),
            k_element: element(tokens.k),
            v_element: element(tokens.v),
            o_element: element(o),
            g_element: element(tokens.gate),
            b_element: element(tokens.beta),
            wide_io: constants.wide_io & flag(wide),
            q_row: of_q.row,
            q_token: of_q.token,
            q_head: of_q.head,
            k_row: strides.k.row,
            k_token: strides.k.token,
            k_head: strides.k.head,
            v_row: strides.v.row,
            v_token: strides.v.token,
            v_head: strides.v.head,
            o_row: of_o.row,
            o_token: of_o.token,
            o_head: of_o.head,
            g_row: strides.gate.row,
            g_token: strides.gate.token,
            g_head: strides.gate.head,
            b_row: strides.beta.row,
            b_token: strides.beta.token,
            ..*constants
        };
        Ok(())
    }

    /// The previous tokens, where there are such.
    pub(super) fn check_previous(
        &self,
        extents: &Extents,
        per_channel: bool,
        constants: &mut RecurrentConstants,
    ) -> Result<(), Error> {
        let (Some(Kept { tokens, keep }), Some(extent)) = (self.previous, extents.previous) else {
            return Ok(());
        };
        let strides = extent.tokens(tokens, extents.heads, per_channel)?;
        if let Some(new) = self.new {
            for (tensor, like, wanted) in [
                (tokens.k, new.tokens.k, "the dtype of k"),
                (tokens.v, new.tokens.v, "the dtype of v"),
                (tokens.gate, new.tokens.gate, "the dtype of the new gates"),
                (tokens.beta, new.tokens.beta, "the dtype of the new gates"),
            ] {
                same_dtype(tensor, like, wanted)?;
            }
        }
        indices(keep, &[("B", extent.rows)])?;
        *constants = RecurrentConstants {
            previous_tokens: extent.tokens as u32,
            keep_index: index(Some(keep)),
            k_element: element(tokens.k),
            v_element: element(tokens.v),
            g_element: element(tokens.gate),
            b_element: element(tokens.beta),
            wide_io: constants.wide_io & flag(strides.wide),
            previous_k_row: strides.k.row,
            previous_k_token: strides.k.token,
            previous_k_head: strides.k.head,
            previous_v_row: strides.v.row,
            previous_v_token: strides.v.token,
            previous_v_head: strides.v.head,
            previous_g_row: strides.gate.row,
            previous_g_token: strides.gate.token,
            previous_g_head: strides.gate.head,
            previous_b_row: strides.beta.row,
            previous_b_token: strides.beta.token,
            ..*constants
        };
        Ok(())
    }
}
