//! Rows and tokens of tensors, and the strides to them.

use super::argument::Argument;
use super::checks::{Heads, Rows, Strides, indices};
use super::request::{KeptInputs, Phase, Request};
use super::{Formulation, Inputs, StateLayout};
use crate::error::Error;
use crate::shapes::{Named, range, unsupported};

/// Tokens of some tensors.
pub(super) struct Extent {
    /// Most tokens of a row.
    pub tokens: usize,
    /// Sizes of the two outermost dims.
    outer: [usize; 2],
    letters: &'static Letters,
    lie: Rows,
}

impl Default for Extent {
    fn default() -> Self {
        Self {
            tokens: 0,
            outer: [0; 2],
            letters: &NEW,
            lie: Rows::default(),
        }
    }
}

/// Names of the dims of the tensors of some tokens.
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

/// Strides of the tensors of some tokens.
#[derive(Default)]
pub(super) struct TokenStrides {
    pub k: Strides,
    pub v: Strides,
    pub gate: Strides,
    pub beta: Strides,
}

impl TokenStrides {
    /// Whether an access that may be wide is not.
    pub fn narrow(&self) -> bool {
        self.k.narrow || self.v.narrow || self.gate.narrow
    }
}

/// What the dims of a launch are.
#[derive(Default)]
pub(super) struct Extents {
    /// B.
    pub rows: usize,
    /// Of the new tokens, where there are such.
    pub new: Extent,
    /// Of the previous tokens, where there are such.
    pub previous: Extent,
    pub heads: Heads,
}

impl Extents {
    /// As the first tensors of `request` have them.
    pub fn find(&mut self, request: &Request<'_>) -> Result<(), Error> {
        let mut sizes = [0; 4];
        if let Some(given) = &request.new_tokens() {
            let (x_dims, q_dims, v_dims) = match request.get(Argument::CuSeqlens) {
                Some(_) => ("[1, total, D]", "[1, total, H, K]", "[1, total, HV, V]"),
                None => ("[B, T, D]", "[B, T, H, K]", "[B, T, HV, V]"),
            };
            let [first, _, third] = given.inputs.named();
            let (rows, tokens);
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
            match request.get(Argument::CuSeqlens) {
                Some(cu_seqlens) => {
                    self.rows = packed_rows(cu_seqlens, tokens)?;
                    self.new.packed(request.max_tokens, tokens);
                }
                None => {
                    self.rows = rows;
                    self.new.dense(rows, tokens, &NEW);
                }
            }
            self.new.lie.any_length = request.is_chunked();
        }
        if let Some(given) = &request.previous_tokens() {
            let (rows, tokens, kept_sizes);
            match given.inputs {
                KeptInputs::Kv([k, v]) => {
                    let [h, k_dim];
                    [rows, tokens, h, k_dim] = *k.rank("[B, T', H, K]")?.dims;
                    let [_, _, hv, v_dim] = *v.rank("[B, T', HV, V]")?.dims;
                    kept_sizes = [h, k_dim, hv, v_dim];
                }
                KeptInputs::X(x) => {
                    [rows, tokens, _] = *x.rank("[B, T', D]")?.dims;
                    kept_sizes = sizes;
                }
                KeptInputs::Conv(conv) => {
                    [rows, tokens, _] = *conv.named_x().rank("[B, T', D]")?.dims;
                    let [hv, k_dim, v_dim] = of_states(request)?;
                    kept_sizes = [conv.heads, k_dim, hv, v_dim];
                }
            }
            if request.phase == Phase::Commit {
                sizes = kept_sizes;
                self.rows = rows;
            }
            self.previous.dense(self.rows, tokens, &PREVIOUS);
        }
        if let Some(pending) = request.pending
            && request.phase == Phase::Flush
        {
            let [keys, updates, _, len, _] = pending.named();
            let [h, k_dim];
            [_, h, _, k_dim] = *keys.rank::<4>("[P, H, R, K]")?.dims;
            let [_, hv, _, v_dim] = *updates.rank::<4>("[P, HV, R, V]")?.dims;
            [self.rows] = *len.rank("[B]")?.dims;
            sizes = [h, k_dim, hv, v_dim];
        }
        let [h, k_dim, hv, v_dim] = sizes;
        check_keys(request, k_dim)?;
        self.heads = Heads::new(h, k_dim, hv, v_dim)?;
        Ok(())
    }
}

/// K = 96 has kernels of GDN that go token by token, and in chunks; K = 64 has such of KDA that go token by token. What V is with
/// it does not matter to them.
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

/// HV, K and V, as the pool has them.
fn of_states(request: &Request<'_>) -> Result<[usize; 3], Error> {
    let [_, hv, outer, inner] = *request.pool().rank("[P, HV, V, K]")?.dims;
    Ok(match request.options.state_layout {
        StateLayout::KLast => [hv, inner, outer],
        StateLayout::VLast => [hv, outer, inner],
    })
}

/// B of packed rows, which have `total` tokens.
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
    fn dense(&mut self, rows: usize, tokens: usize, letters: &'static Letters) {
        self.tokens = tokens;
        self.outer = [rows, tokens];
        self.letters = letters;
    }

    fn packed(&mut self, max_tokens: usize, total: usize) {
        self.tokens = max_tokens;
        self.outer = [1, total];
        self.letters = &PACKED;
        self.lie.packed = true;
    }

    /// Checks the gates of these tokens, `gate` and `beta`.
    pub fn gates(
        &self,
        [gate, beta]: [Named<'_>; 2],
        heads: Heads,
        per_channel: bool,
        strides: &mut TokenStrides,
    ) -> Result<(), Error> {
        let [rows, tokens] = self.outer;
        if per_channel {
            let sizes = [rows, tokens, heads.hv, heads.k_dim];
            let letters = &self.letters.channel;
            (strides.gate).of_heads(gate, letters, &sizes, self.lie)?;
        } else {
            self.per_head(gate, heads, &mut strides.gate)?;
        }
        self.per_head(beta, heads, &mut strides.beta)
    }

    /// Checks x, which has so many channels.
    pub fn inputs(
        &self,
        tensor: Named<'_>,
        channels: usize,
        strides: &mut Strides,
    ) -> Result<(), Error> {
        let sizes = [self.outer[0], self.outer[1], channels];
        strides.of_tokens(tensor, &self.letters.input, &sizes, self.lie)?;
        if self.lie.any_length {
            let view = tensor.rank::<3>("[B, T, D]")?;
            let wide = view.wide_from(self.lie.packed as usize) && view.token_wide();
            strides.narrow = !wide;
        }
        Ok(())
    }

    /// Checks q or k.
    pub fn keys(
        &self,
        tensor: Named<'_>,
        heads: Heads,
        strides: &mut Strides,
    ) -> Result<(), Error> {
        let sizes = [self.outer[0], self.outer[1], heads.h, heads.k_dim];
        strides.of_heads(tensor, &self.letters.key, &sizes, self.lie)
    }

    /// Checks v, o or z.
    pub fn values(
        &self,
        tensor: Named<'_>,
        heads: Heads,
        strides: &mut Strides,
    ) -> Result<(), Error> {
        let sizes = [self.outer[0], self.outer[1], heads.hv, heads.v_dim];
        strides.of_heads(tensor, &self.letters.value, &sizes, self.lie)
    }

    /// Checks a tensor that has one number for each head.
    fn per_head(
        &self,
        tensor: Named<'_>,
        heads: Heads,
        strides: &mut Strides,
    ) -> Result<(), Error> {
        let sizes = [self.outer[0], self.outer[1], heads.hv];
        strides.of_tokens(tensor, &self.letters.head, &sizes, self.lie)
    }
}
