//! Sizes of a launch, and the dims of each tensor that follow from them.

use gated_delta::Formulation;
use gated_delta_harness::arguments::Operator;
use libfuzzer_sys::arbitrary::{Result, Unstructured};

use crate::draft::rarely;

/// Sizes that decide the dims of tensors.
pub struct Sizes {
    /// Rows, B.
    pub rows: usize,
    /// Tokens of a row, T.
    pub tokens: usize,
    /// Previous tokens of a row, T'.
    previous: usize,
    pub heads: usize,
    value_heads: usize,
    dim: usize,
    slots: usize,
    pub packed: bool,
    /// Taps of the convolution, W.
    pub taps: usize,
    /// Most pending tokens N and ring entries R.
    pub ring: [usize; 2],
}

impl Sizes {
    /// Draws small sizes, most of which some kernel accepts.
    pub fn draw(u: &mut Unstructured<'_>) -> Result<Self> {
        let heads = if rarely(u, 16)? {
            u.int_in_range(0..=5)?
        } else {
            u.int_in_range(1..=2)?
        };
        let rows = u.int_in_range(0..=3)?;
        let tokens = draw_tokens(u)?;
        let slots = if rarely(u, 3)? { rows * tokens } else { rows };
        let most = u.int_in_range(1..=16)?;
        Ok(Self {
            rows,
            tokens,
            previous: draw_tokens(u)?,
            heads,
            value_heads: heads * u.int_in_range(1..=3)?,
            dim: match u.int_in_range(0..=15)? {
                0..=12 => 64,
                13 | 14 => 128,
                _ => u.int_in_range(0..=256)?,
            },
            slots: slots + u.int_in_range(0..=3)?,
            packed: rarely(u, 3)?,
            taps: 4,
            ring: [most, most + tokens + u.int_in_range(0..=1)?],
        })
    }

    /// Limits tokens and ring to what deferred write-back accepts: 1 token and 8 pending ones, or 8 and 16 in the parallel formulation.
    pub fn wait(&mut self, formulation: Formulation) {
        let tokens = match formulation {
            Formulation::Parallel => 8,
            _ => 1,
        };
        let most = formulation.max_pending();
        self.tokens = self.tokens.clamp(1, tokens);
        self.ring[0] = self.ring[0].clamp(self.tokens, most);
        self.ring[1] = self.ring[1].max(self.ring[0] + self.tokens);
    }

    /// Dims that the tensor `name` should have.
    pub fn dims(
        &self,
        name: &str,
        operator: Operator,
        u: &mut Unstructured<'_>,
    ) -> Result<Vec<usize>> {
        let &Self {
            rows,
            heads,
            value_heads,
            dim,
            slots,
            ..
        } = self;
        let channels = (2 * heads + value_heads) * dim;
        let is_kda = operator == Operator::Kda;
        let (previous, name) = match name.strip_prefix("previous ") {
            Some(rest) => (true, rest),
            None => (false, name),
        };
        let mut dims = match (previous, self.packed) {
            (true, _) => vec![rows, self.previous],
            (false, true) => vec![1, rows * self.tokens],
            (false, false) => vec![rows, self.tokens],
        };
        match name {
            "q" | "k" => dims.extend([heads, dim]),
            "v" | "o" => dims.extend([value_heads, dim]),
            "g" if is_kda => dims.extend([value_heads, dim]),
            "a" | "b" | "g" | "beta" => dims.push(value_heads),
            "A_log" => dims = vec![self.parameter_heads(is_kda, u)?],
            "dt_bias" if is_kda => dims = vec![self.parameter_heads(is_kda, u)?, dim],
            "dt_bias" => dims = vec![value_heads],
            "pool" => dims = vec![slots, value_heads, dim, dim],
            "write_pool" => dims = vec![u.int_in_range(0..=slots)?, value_heads, dim, dim],
            "snapshots" => {
                dims = vec![
                    rows,
                    self.tokens + u.int_in_range(0..=1)?,
                    value_heads,
                    dim,
                    dim,
                ]
            }
            "x" => dims.push(channels),
            "z" => dims.extend([value_heads, dim]),
            "conv_weight" => dims = vec![channels, self.taps],
            "conv_bias" => dims = vec![channels],
            "windows" => dims = vec![slots, channels, self.taps - 1],
            "inputs" => dims = vec![slots, self.ring[1], channels],
            "norm_weight" => dims = vec![dim],
            "keys" => dims = vec![slots, heads, self.ring[1], dim],
            "updates" => dims = vec![slots, value_heads, self.ring[1], dim],
            "decays" if is_kda => dims = vec![slots, value_heads, self.ring[1], dim],
            "decays" => dims = vec![slots, value_heads, self.ring[1]],
            "token_slots" => dims = vec![rows, self.tokens],
            "cu_seqlens" => dims = vec![rows + 1],
            _ => dims = vec![rows],
        }
        Ok(dims)
    }

    fn parameter_heads(&self, is_kda: bool, u: &mut Unstructured<'_>) -> Result<usize> {
        Ok(if is_kda && rarely(u, 3)? {
            self.heads
        } else {
            self.value_heads
        })
    }
}

/// A number of tokens, mostly small.
pub fn draw_tokens(u: &mut Unstructured<'_>) -> Result<usize> {
    match u.int_in_range(0..=7)? {
        0 => u.int_in_range(0..=17),
        1 | 2 => Ok(1),
        _ => u.int_in_range(1..=4),
    }
}
