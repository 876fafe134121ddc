//! Rows and tokens of tensors, and the strides to them.

use super::request::{Request, Tokens};
use crate::error::Error;
use crate::ops::checks::{Heads, floats, indices};
use crate::shapes::{Named, range};

/// Rows and tokens of some tensors.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// B.
    pub rows: usize,
    /// Most tokens of a row.
    pub tokens: usize,
    /// The two outermost dims.
    dims: [(&'static str, usize); 2],
    packed: bool,
}

/// Elements between the rows, tokens and heads of a tensor.
pub(super) struct Strides {
    pub row: u32,
    pub token: u32,
    pub head: u32,
}

/// Strides of the tensors of some tokens, and whether their accesses are aligned to 16 bytes.
pub(super) struct TokenStrides {
    pub k: Strides,
    pub v: Strides,
    pub gate: Strides,
    pub beta: Strides,
    pub wide: bool,
}

/// What the dims of a launch are.
pub(super) struct Extents {
    pub new: Option<Extent>,
    pub previous: Option<Extent>,
    pub heads: Heads,
}

impl Extents {
    /// As the first tensors of `request` have them.
    pub fn of(request: &Request<'_>) -> Result<Self, Error> {
        let mut sizes = None;
        let mut new = None;
        if let Some(given) = &request.new {
            let (q_dims, v_dims) = match request.cu_seqlens {
                Some(_) => ("[1, total, H, K]", "[1, total, HV, V]"),
                None => ("[B, T, H, K]", "[B, T, HV, V]"),
            };
            let [rows, tokens, h, k_dim] = given.q.rank(q_dims)?;
            let [_, _, hv, v_dim] = given.tokens.v.rank(v_dims)?;
            sizes = Some([h, k_dim, hv, v_dim]);
            new = Some(match request.cu_seqlens {
                Some(cu_seqlens) => Extent::packed(cu_seqlens, request.max_tokens, tokens)?,
                None => Extent::dense(rows, "T", tokens),
            });
        }
        let mut previous = None;
        if let Some(given) = &request.previous {
            let [rows, tokens, h, k_dim] = given.tokens.k.rank("[B, T', H, K]")?;
            let [_, _, hv, v_dim] = given.tokens.v.rank("[B, T', HV, V]")?;
            sizes = sizes.or(Some([h, k_dim, hv, v_dim]));
            let rows = new.map_or(rows, |new: Extent| new.rows);
            previous = Some(Extent::dense(rows, "T'", tokens));
        }
        let [h, k_dim, hv, v_dim] = sizes.unwrap_or_default();
        Ok(Self {
            new,
            previous,
            heads: Heads::new(h, k_dim, hv, v_dim)?,
        })
    }

    /// B.
    pub fn rows(&self) -> usize {
        self.new.or(self.previous).map_or(0, |extent| extent.rows)
    }
}

impl Extent {
    fn dense(rows: usize, letter: &'static str, tokens: usize) -> Self {
        Self {
            rows,
            tokens,
            dims: [("B", rows), (letter, tokens)],
            packed: false,
        }
    }

    fn packed(cu_seqlens: Named<'_>, max_tokens: usize, total: usize) -> Result<Self, Error> {
        let [bounds] = cu_seqlens.rank("[B + 1]")?;
        let Some(rows) = bounds.checked_sub(1) else {
            return Err(range(
                "elements of cu_seqlens",
                "B + 1, at least 1".to_owned(),
                bounds,
            ));
        };
        indices(cu_seqlens, &[("B + 1", bounds)])?;
        if total > u32::MAX as usize {
            return Err(range("total", "below 2^32".to_owned(), total));
        }
        Ok(Self {
            rows,
            tokens: max_tokens,
            dims: [("1", 1), ("total", total)],
            packed: true,
        })
    }

    /// Checks floats of these tokens, `inner` in each.
    pub fn floats(self, tensor: Named<'_>, inner: [(&'static str, usize); 2]) -> Result<(), Error> {
        let [rows, tokens] = self.dims;
        floats(tensor, &[rows, tokens, inner[0], inner[1]])
    }

    /// Checks the tensors of these tokens.
    pub fn tokens(
        self,
        tokens: Tokens<'_>,
        heads: Heads,
        per_channel: bool,
    ) -> Result<TokenStrides, Error> {
        let hv = ("HV", heads.hv);
        self.floats(tokens.k, [("H", heads.h), ("K", heads.dim)])?;
        self.floats(tokens.v, [hv, ("V", heads.dim)])?;
        let per_head = [self.dims[0], self.dims[1], hv];
        let gate_head = if per_channel {
            self.floats(tokens.gate, [hv, ("K", heads.dim)])?;
            tokens.gate.stride_u32(2)?
        } else {
            floats(tokens.gate, &per_head)?;
            1
        };
        floats(tokens.beta, &per_head)?;
        Ok(TokenStrides {
            k: self.strides(tokens.k, tokens.k.stride_u32(2)?)?,
            v: self.strides(tokens.v, tokens.v.stride_u32(2)?)?,
            gate: self.strides(tokens.gate, gate_head)?,
            beta: self.strides(tokens.beta, 1)?,
            wide: self.wide(tokens.k)
                && self.wide(tokens.v)
                && (!per_channel || self.wide(tokens.gate)),
        })
    }

    /// Strides of a tensor that has `head` elements between its heads.
    pub fn strides(self, tensor: Named<'_>, head: u32) -> Result<Strides, Error> {
        Ok(Strides {
            row: if self.packed { 0 } else { tensor.row_stride()? },
            token: if self.packed || self.tokens > 1 {
                tensor.token_stride()?
            } else {
                0
            },
            head,
        })
    }

    /// Whether the address and the strides are multiples of 16 bytes.
    pub fn wide(self, tensor: Named<'_>) -> bool {
        tensor.wide_from(if self.packed { 1 } else { 0 })
    }
}
