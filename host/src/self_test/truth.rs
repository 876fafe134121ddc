//! What the reference says about a launch.

use gated_delta_reference::compare::norm;
use gated_delta_reference::gdn;
use gated_delta_reference::kda;
use gated_delta_reference::recurrence::default_scale;
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates, recurrent};

use super::LOWER_BOUND;
use super::cases::{Case, GateKind, ROWS};
use super::values::{Tokens, Values};

/// What a launch has to leave behind in the rows that are active.
pub struct Truth {
    /// `[B, T, HV, V]`
    pub o: Vec<f64>,
    /// `[B, T, HV]`: norm of q̂ times that of the state that it is read from.
    pub sizes: Vec<f64>,
    /// `[B, T, HV, V, K]` or `[B, T, HV, K, V]`: the state after every token.
    pub states: Vec<f64>,
    /// `[B, HV, V, K]` or `[B, HV, K, V]`: the state after the previous tokens that are kept.
    pub committed: Vec<f64>,
}

impl Truth {
    /// Of a launch of `case`, with the states that its new tokens start from: those of the pool before it, or, where
    /// previous tokens are committed, those that it has written to `pool`, since a right one may be rounded to either
    /// of two neighbours.
    pub fn new(case: &Case, values: &Values, pool: &[f64]) -> Result<Self, String> {
        let mut truth = Self {
            o: Vec::new(),
            sizes: Vec::new(),
            states: Vec::new(),
            committed: Vec::new(),
        };
        let slot = |slot: Option<usize>| slot.map_or(-1, |slot| slot as i64);
        let starts: Vec<i64> = (0..ROWS).map(|b| slot(case.start(b))).collect();
        let ends: Vec<i64> = (0..ROWS).map(|b| slot(case.end(b))).collect();
        let (_, hv) = case.heads();
        let state = hv * case.dim() * case.dim();
        if case.way.previous > 0 {
            let keep = case.keep().map(|keep| keep as i64);
            let commit = Recurrent {
                tokens: 0,
                q: &[],
                k: &[],
                v: &[],
                gates: gates(case, values, &NOTHING),
                read_slots: Some(&starts),
                write_slots: Some(&ends),
                previous: Some(Previous {
                    tokens: case.way.previous,
                    k: &values.previous.k,
                    v: &values.previous.v,
                    gates: gates(case, values, &values.previous),
                    keep: &keep,
                }),
                ..problem(case, values)
            };
            let after = recurrent(&commit, &values.pool, None, None)
                .map_err(|error| error.to_string())?
                .pool;
            truth.committed = vec![f64::NAN; ROWS * state];
            for (committed, end) in truth.committed.chunks_mut(state).zip(&ends) {
                if let Ok(slot) = usize::try_from(*end) {
                    committed.copy_from_slice(&after[slot * state..][..state]);
                }
            }
        }
        if case.way.tokens > 0 {
            let (from, starts) = match case.way.previous {
                0 => (&values.pool[..], &starts),
                _ => (pool, &ends),
            };
            let verify = Recurrent {
                read_slots: Some(starts),
                update_state: false,
                snapshot_steps: Some(case.way.tokens),
                ..problem(case, values)
            };
            let nothing = vec![f64::NAN; ROWS * case.way.tokens * state];
            let after = recurrent(&verify, from, None, Some(&nothing))
                .map_err(|error| error.to_string())?;
            truth.o = after.o;
            truth.states = after.snapshots.unwrap_or_default();
            truth.sizes = sizes(case, &verify, &truth.states);
        }
        Ok(truth)
    }
}

/// Tokens of which there are none.
static NOTHING: Tokens = Tokens {
    k: Vec::new(),
    v: Vec::new(),
    gate: Vec::new(),
    beta: Vec::new(),
};

/// The new tokens, as the reference takes them.
fn problem<'a>(case: &Case, values: &'a Values) -> Recurrent<'a> {
    let (h, hv) = case.heads();
    Recurrent {
        batch: ROWS,
        tokens: case.way.tokens,
        heads: h,
        value_heads: hv,
        key_dim: case.dim(),
        value_dim: case.dim(),
        q: &values.q,
        k: &values.tokens.k,
        v: &values.tokens.v,
        gates: gates(case, values, &values.tokens),
        l2norm: case.l2norm,
        scale: default_scale(case.dim()),
        head_map: case.head_map.into(),
        layout: case.kind.layout.into(),
        read_slots: None,
        write_slots: None,
        token_slots: None,
        accepted: None,
        cu_seqlens: None,
        null_slot: None,
        update_state: true,
        snapshot_steps: None,
        previous: None,
        round_state: |x| x,
    }
}

fn gates<'a>(case: &Case, values: &'a Values, tokens: &'a Tokens) -> TokenGates<'a> {
    let (gate, beta) = (&tokens.gate[..], &tokens.beta[..]);
    let (a_log, dt_bias) = (&values.a_log[..], &values.dt_bias[..]);
    let of_kda = |kind, beta_kind| {
        TokenGates::Kda(kda::KdaGates {
            g: gate,
            kind,
            beta,
            beta_kind,
        })
    };
    match case.gates {
        GateKind::GdnRaw => TokenGates::Gdn(gdn::Gates::Raw {
            a: gate,
            b: beta,
            a_log,
            dt_bias,
            beta_scale: 1.0,
        }),
        GateKind::GdnGiven => TokenGates::Gdn(gdn::Gates::Given { g: gate, beta }),
        GateKind::KdaLog => of_kda(kda::KdaGate::Log, kda::KdaBeta::Given),
        GateKind::KdaSoftplus => of_kda(
            kda::KdaGate::Softplus {
                a_log,
                dt_bias: Some(dt_bias),
            },
            kda::KdaBeta::Logit,
        ),
        GateKind::KdaLowerBound => of_kda(
            kda::KdaGate::LowerBound {
                lower_bound: LOWER_BOUND.into(),
                a_log: Some(a_log),
                dt_bias: Some(dt_bias),
            },
            kda::KdaBeta::Logit,
        ),
    }
}

/// [`Truth::sizes`].
fn sizes(case: &Case, problem: &Recurrent<'_>, states: &[f64]) -> Vec<f64> {
    let ((_, hv), dim) = (case.heads(), case.dim());
    let size = |(i, state)| norm(&problem.query(i / hv, i % hv)) * norm(state);
    states.chunks(dim * dim).enumerate().map(size).collect()
}
