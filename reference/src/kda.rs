//! Gates of KDA: one log decay for every key channel.

use crate::error::{Error, Tokens, elements};
use crate::gate::{lower_bound_log_decay, sigmoid, softplus_log_decay};
use crate::heads::Heads;

/// Decay and beta of KDA; with packed rows, `[B, T]` is `[total]`.
#[derive(Clone, Copy, Debug)]
pub struct KdaGates<'a> {
    /// `[B, T, HV, K]`
    pub g: &'a [f64],
    /// Meaning of `g`.
    pub kind: KdaDecay<'a>,
    /// `[B, T, HV]`
    pub beta: &'a [f64],
    /// Meaning of `beta`.
    pub beta_kind: KdaBeta,
}

/// Meaning of KDA's `g`. `a_log` and `dt_bias` have a row for each value head or for each query/key head; in the second case a value
/// head uses the row of the query/key head that it reads.
#[derive(Clone, Copy, Debug)]
pub enum KdaDecay<'a> {
    /// `g` is the log decay.
    Log,
    /// The log decay is `-exp(a_log) · softplus(g + dt_bias)`.
    Softplus {
        /// `[H]` or `[HV]`
        a_log: &'a [f64],
        /// `[H, K]` or `[HV, K]`; 0 if absent.
        dt_bias: Option<&'a [f64]>,
    },
    /// The log decay is `lower_bound · sigmoid(exp(a_log) · (g + dt_bias))`.
    LowerBound {
        /// Lower bound of the log decay, below 0.
        lower_bound: f64,
        /// `[H]` or `[HV]`; 0 if absent.
        a_log: Option<&'a [f64]>,
        /// `[H, K]` or `[HV, K]`; 0 if absent.
        dt_bias: Option<&'a [f64]>,
    },
}

/// Meaning of KDA's `beta`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KdaBeta {
    /// `beta` is β.
    #[default]
    Given,
    /// β = sigmoid(`beta`).
    Logit,
}

impl KdaGates<'_> {
    pub(crate) fn check(&self, tokens: Tokens, heads: &Heads) -> Result<(), Error> {
        let (value_heads, key_dim) = (heads.value_heads, heads.key_dim);
        tokens.check("g", "HV, K", &[value_heads, key_dim], self.g.len())?;
        tokens.check("beta", "HV", &[value_heads], self.beta.len())?;
        let (a_log, dt_bias) = self.kind.parameters();
        for (name, rows, row) in [("a_log", a_log, 1), ("dt_bias", dt_bias, key_dim)] {
            let wanted = [heads.heads, value_heads].map(|rows| elements(&[rows, row]));
            if let Some(rows) = rows
                && !wanted.contains(&rows.len())
            {
                return Err(Error::HeadRows {
                    name,
                    heads: wanted[0],
                    value_heads: wanted[1],
                    got: rows.len(),
                });
            }
        }
        Ok(())
    }

    /// Log decays `[K]` and beta of a value head.
    pub(crate) fn at(&self, token: usize, hv: usize, heads: &Heads) -> (Vec<f64>, f64) {
        let (value_head, key_dim) = (token * heads.value_heads + hv, heads.key_dim);
        let row = |rows: usize| {
            if rows == heads.value_heads {
                hv
            } else {
                heads.of(hv)
            }
        };
        let (a_log, dt_bias) = self.kind.parameters();
        let a_log = a_log.map_or(0.0, |a_log| a_log[row(a_log.len())]);
        let dt_bias = dt_bias.map(|dt_bias| &dt_bias[row(dt_bias.len() / key_dim) * key_dim..]);
        let log_decay = self.g[value_head * key_dim..][..key_dim]
            .iter()
            .enumerate()
            .map(|(channel, &g)| {
                let dt_bias = dt_bias.map_or(0.0, |dt_bias| dt_bias[channel]);
                match self.kind {
                    KdaDecay::Log => g,
                    KdaDecay::Softplus { .. } => softplus_log_decay(g, a_log, dt_bias),
                    KdaDecay::LowerBound { lower_bound, .. } => {
                        lower_bound_log_decay(g, lower_bound, a_log, dt_bias)
                    }
                }
            });
        let beta = self.beta[value_head];
        let beta = match self.beta_kind {
            KdaBeta::Given => beta,
            KdaBeta::Logit => sigmoid(beta),
        };
        (log_decay.collect(), beta)
    }
}

impl<'a> KdaDecay<'a> {
    /// `a_log` and `dt_bias`, if there are any.
    fn parameters(&self) -> (Option<&'a [f64]>, Option<&'a [f64]>) {
        match *self {
            Self::Log => (None, None),
            Self::Softplus { a_log, dt_bias } => (Some(a_log), dt_bias),
            Self::LowerBound { a_log, dt_bias, .. } => (a_log, dt_bias),
        }
    }
}
