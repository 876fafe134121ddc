//! Numbers of rows, tokens and heads of a launch, and checks of tensors against them.

use super::checks::{Heads, Rows, Strides, indices};
use crate::error::Error;
use crate::step::args::{Formulation, Inputs, StateLayout};
use crate::step::argument::Argument;
use crate::step::request::{KeptInputs, New, Phase, Request};
use crate::tensor_checks::{Named, range, unsupported};

/// Extent of the tensors of new or previous tokens.
pub struct Extent {
    /// Largest number of tokens of a row.
    pub tokens: usize,
    /// Sizes of the two outermost dims: rows and tokens, or 1 and `total`.
    outer: [usize; 2],
    letters: &'static Letters,
    lie: Rows,
}

/// Names of the dims of tensors, by kind of tensor.
struct Letters {
    key: [&'static str; 4],
    value: [&'static str; 4],
    channel: [&'static str; 4],
    head: [&'static str; 3],
    input: [&'static str; 3],
}

static NEW: Letters = Letters::of("B", "T");
static PACKED: Letters = Letters::of("1", "total");
static PREVIOUS: Letters = Letters::of("B", "T'");

impl Letters {
    const fn of(rows: &'static str, tokens: &'static str) -> Self {
        Self {
            key: [rows, tokens, "H", "K"],
            value: [rows, tokens, "HV", "V"],
            channel: [rows, tokens, "HV", "K"],
            head: [rows, tokens, "HV"],
            input: [rows, tokens, "D"],
        }
    }
}

/// Numbers of rows, tokens and heads of a launch.
pub struct Extents {
    /// B, the number of rows.
    pub rows: usize,
    /// Extent of the new tokens. T is 0 if the launch has no new tokens.
    pub new: Extent,
    /// Extent of the previous tokens. T' is 0 if the launch has no previous tokens.
    pub previous: Extent,
    pub heads: Heads,
}

impl Extents {
    /// Reads the numbers from the dims of the first tensors of `request`.
    pub fn of(request: &Request<'_>) -> Result<Self, Error> {
        let (mut rows, mut sizes) = (0, [0; 4]);
        let (mut new, mut previous) = (Extent::dense(0, 0, &NEW), Extent::dense(0, 0, &PREVIOUS));
        if let Some(given) = &request.new_tokens() {
            (rows, new, sizes) = of_new(request, given)?;
        }
        if let Some(given) = &request.previous_tokens() {
            let (own_rows, tokens, own_sizes);
            match given.inputs {
                KeptInputs::Kv([k, v]) => {
                    let [h, k_dim];
                    [own_rows, tokens, h, k_dim] = *k.rank("[B, T', H, K]")?.dims;
                    let [_, _, hv, v_dim] = *v.rank("[B, T', HV, V]")?.dims;
                    own_sizes = [h, k_dim, hv, v_dim];
                }
                KeptInputs::X(x) => {
                    [own_rows, tokens, _] = *x.rank("[B, T', D]")?.dims;
                    own_sizes = sizes;
                }
                KeptInputs::Conv(conv) => {
                    [own_rows, tokens, _] = *conv.named_x().rank("[B, T', D]")?.dims;
                    let [hv, k_dim, v_dim] = of_states(request)?;
                    own_sizes = [conv.heads, k_dim, hv, v_dim];
                }
            }
            if request.phase == Phase::Commit {
                (rows, sizes) = (own_rows, own_sizes);
            }
            previous = Extent::dense(rows, tokens, &PREVIOUS);
        }
        if let (Phase::Flush, Some(pending)) = (request.phase, request.pending) {
            let [keys, updates, _, len, _] = pending.named();
            let [_, h, _, k_dim] = *keys.rank::<4>("[P, H, R, K]")?.dims;
            let [_, hv, _, v_dim] = *updates.rank::<4>("[P, HV, R, V]")?.dims;
            [rows] = *len.rank("[B]")?.dims;
            sizes = [h, k_dim, hv, v_dim];
        }
        let [h, k_dim, hv, v_dim] = sizes;
        check_keys(request, k_dim)?;
        Ok(Self {
            rows,
            new,
            previous,
            heads: Heads::new(h, k_dim, hv, v_dim)?,
        })
    }
}

/// B, the extent of the new tokens, and `[H, K, HV, V]`.
fn of_new(request: &Request<'_>, given: &New<'_>) -> Result<(usize, Extent, [usize; 4]), Error> {
    let cu_seqlens = request.get(Argument::CuSeqlens);
    let (x_dims, q_dims, v_dims) = match cu_seqlens {
        Some(_) => ("[1, total, D]", "[1, total, H, K]", "[1, total, HV, V]"),
        None => ("[B, T, D]", "[B, T, H, K]", "[B, T, HV, V]"),
    };
    let [first, _, third] = given.inputs.named();
    let (rows, tokens, sizes);
    match given.inputs {
        Inputs::Qkv { .. } => {
            let [_, _, hv, v_dim] = *third.rank(v_dims)?.dims;
            let [h, k_dim];
            [rows, tokens, h, k_dim] = *first.rank(q_dims)?.dims;
            sizes = [h, k_dim, hv, v_dim];
        }
        Inputs::Conv(conv) => {
            [rows, tokens, _] = *first.rank(x_dims)?.dims;
            let [_, _, hv, v_dim] = *given.o.rank(v_dims)?.dims;
            let [_, k_dim, _] = of_states(request)?;
            sizes = [conv.heads, k_dim, hv, v_dim];
        }
    }
    let (rows, mut extent) = match cu_seqlens {
        Some(cu_seqlens) => {
            let rows = packed_rows(cu_seqlens, tokens)?;
            (rows, Extent::packed(request.max_tokens, tokens))
        }
        None => (rows, Extent::dense(rows, tokens, &NEW)),
    };
    extent.lie.any_length = request.is_chunked();
    Ok((rows, extent, sizes))
}

/// Checks that some kernels take K. K = 96 is for GDN, recurrent or chunked. K = 64 is for GDN, and for KDA in the recurrent
/// formulation. V is checked elsewhere.
fn check_keys(request: &Request<'_>, k_dim: usize) -> Result<(), Error> {
    use Formulation::{Chunked, Parallel};
    let with = match (k_dim, request.gates.per_channel, request.formulation) {
        (64 | 96, true, Parallel) => "128 with KDA and formulation = parallel",
        (96, true, Chunked) => "128 in a prefill of KDA",
        (96, true, _) => "64 or 128 with KDA",
        (96, _, Parallel) => "64 or 128 with formulation = parallel",
        (64, true, Chunked) => {
            "128 in a prefill of KDA; up to 16 tokens a launch go token by token"
        }
        _ => return Ok(()),
    };
    Err(unsupported("K", k_dim, with))
}

/// HV, K and V of the pool.
fn of_states(request: &Request<'_>) -> Result<[usize; 3], Error> {
    let [_, hv, outer, inner] = *request.pool().rank("[P, HV, V, K]")?.dims;
    Ok(match request.options.state_layout {
        StateLayout::KLast => [hv, inner, outer],
        StateLayout::VLast => [hv, outer, inner],
    })
}

/// B of packed rows with `total` tokens.
fn packed_rows(cu_seqlens: Named<'_>, total: usize) -> Result<usize, Error> {
    let [bounds] = *cu_seqlens.rank("[B + 1]")?.dims;
    let Some(rows) = bounds.checked_sub(1) else {
        return Err(range(
            "elements of cu_seqlens",
            "B + 1, at least 1".to_owned(),
            bounds,
        ));
    };
    indices(cu_seqlens, &["B + 1"], &[bounds])?;
    if total > u32::MAX as usize {
        return Err(range("total", "below 2^32".to_owned(), total));
    }
    Ok(rows)
}

impl Extent {
    fn dense(rows: usize, tokens: usize, letters: &'static Letters) -> Self {
        Self {
            tokens,
            outer: [rows, tokens],
            letters,
            lie: Rows::default(),
        }
    }

    fn packed(max_tokens: usize, total: usize) -> Self {
        let lie = Rows {
            packed: true,
            ..Rows::default()
        };
        Self {
            tokens: max_tokens,
            outer: [1, total],
            letters: &PACKED,
            lie,
        }
    }

    /// Checks the gates of the tokens, `gate` and `beta`.
    pub fn gates(
        &self,
        [gate, beta]: [Named<'_>; 2],
        heads: Heads,
        per_channel: bool,
    ) -> Result<[Strides; 2], Error> {
        let [rows, tokens] = self.outer;
        let gate = if per_channel {
            let sizes = [rows, tokens, heads.hv, heads.k_dim];
            Strides::of_heads(gate, &self.letters.channel, &sizes, self.lie)?
        } else {
            self.per_head(gate, heads)?
        };
        Ok([gate, self.per_head(beta, heads)?])
    }

    /// Checks the projection x of `channels` channels.
    pub fn inputs(&self, tensor: Named<'_>, channels: usize) -> Result<Strides, Error> {
        let sizes = [self.outer[0], self.outer[1], channels];
        let mut strides = Strides::of_tokens(tensor, &self.letters.input, &sizes, self.lie)?;
        if self.lie.any_length {
            let view = tensor.rank::<3>("[B, T, D]")?;
            let wide = view.wide_from(self.lie.packed as usize) && view.token_wide();
            strides.narrow = !wide;
        }
        Ok(strides)
    }

    /// Checks q or k.
    pub fn keys(&self, tensor: Named<'_>, heads: Heads) -> Result<Strides, Error> {
        let sizes = [self.outer[0], self.outer[1], heads.h, heads.k_dim];
        Strides::of_heads(tensor, &self.letters.key, &sizes, self.lie)
    }

    /// Checks v, o or z.
    pub fn values(&self, tensor: Named<'_>, heads: Heads) -> Result<Strides, Error> {
        let sizes = [self.outer[0], self.outer[1], heads.hv, heads.v_dim];
        Strides::of_heads(tensor, &self.letters.value, &sizes, self.lie)
    }

    /// Checks a tensor with one number for each value head.
    fn per_head(&self, tensor: Named<'_>, heads: Heads) -> Result<Strides, Error> {
        let sizes = [self.outer[0], self.outer[1], heads.hv];
        Strides::of_tokens(tensor, &self.letters.head, &sizes, self.lie)
    }
}
