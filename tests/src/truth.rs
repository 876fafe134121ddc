//! What the reference says about a case.

use gated_delta::ops::BetaScale;
use gated_delta::ops::HeadMap;
use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta_reference::gdn;
use gated_delta_reference::kda;
use gated_delta_reference::recurrence::{default_scale, normalise};
use gated_delta_reference::recurrent::{
    self as reference, Layout, Previous, Recurrent, TokenGates, recurrent,
};

use crate::buffer::View;
use crate::case::Case;
use crate::compare::norm;
use crate::problem::{GateKind, Gates, KdaDecay, Tokens};
use crate::rows::Row;

/// What a launch has to leave behind.
pub(crate) struct Truth {
    /// `[B, T, HV, V]`, or `[total, HV, V]`.
    pub o: Vec<f64>,
    /// The written pool, `[P, HV, V, K]`.
    pub pool: Vec<f64>,
    /// `[B, steps, HV, V, K]`
    pub snapshots: Option<Vec<f64>>,
    /// `[B, T, HV]`, or `[total, HV]`: norms of the states after each token, written or not.
    pub states: Vec<f64>,
    /// `[B, T, HV]`, or `[total, HV]`: norms of q̂.
    pub queries: Vec<f64>,
}

/// Values of a case.
struct Values {
    q: Vec<f64>,
    tokens: Tokens<Vec<f64>>,
    previous: Option<(usize, Tokens<Vec<f64>>, Vec<i64>)>,
    gates: Gates<Vec<f64>>,
    read_slots: Option<Vec<i64>>,
    write_slots: Option<Vec<i64>>,
    token_slots: Option<Vec<i64>>,
    accepted: Option<Vec<i64>>,
    cu_seqlens: Option<Vec<i64>>,
}

impl Values {
    fn of(case: &Case) -> Self {
        let indices = |view: &Option<View>| view.as_ref().map(|view| case.indices(view));
        let new = |view: &View| match case.is_commit() {
            true => Vec::new(),
            false => case.floats(view),
        };
        Self {
            q: new(&case.q),
            tokens: case.tokens.map(new),
            previous: case.previous.as_ref().map(|previous| {
                let most = previous.tokens.k.dims[1];
                let tokens = previous.tokens.map(|view| case.floats(view));
                (most, tokens, case.indices(&previous.keep))
            }),
            gates: case.gates.map(|view| case.floats(view)),
            read_slots: indices(&case.read_slots),
            write_slots: indices(&case.write_slots),
            token_slots: indices(&case.token_slots),
            accepted: indices(&case.accepted),
            cu_seqlens: case
                .packed
                .as_ref()
                .map(|packed| case.indices(&packed.cu_seqlens)),
        }
    }

    fn gates<'a>(&'a self, tokens: &'a Tokens<Vec<f64>>) -> TokenGates<'a> {
        let a_log = self.gates.a_log.as_deref();
        let dt_bias = self.gates.dt_bias.as_deref();
        let (gate, beta) = (&tokens.gate, &tokens.beta);
        match self.gates.kind {
            GateKind::Given => TokenGates::Gdn(gdn::Gates::Given { g: gate, beta }),
            GateKind::Raw(scale) => TokenGates::Gdn(gdn::Gates::Raw {
                a: gate,
                b: beta,
                a_log: a_log.unwrap_or_default(),
                dt_bias: dt_bias.unwrap_or_default(),
                beta_scale: if scale == BetaScale::Two { 2.0 } else { 1.0 },
            }),
            GateKind::Kda(decay, beta_kind) => TokenGates::Kda(kda::KdaGates {
                g: gate,
                kind: match decay {
                    KdaDecay::Log => kda::KdaGate::Log,
                    KdaDecay::Softplus => kda::KdaGate::Softplus {
                        a_log: a_log.unwrap_or_default(),
                        dt_bias,
                    },
                    KdaDecay::LowerBound(lower_bound) => kda::KdaGate::LowerBound {
                        lower_bound: lower_bound.into(),
                        a_log,
                        dt_bias,
                    },
                },
                beta,
                beta_kind: match beta_kind {
                    KdaBeta::Given => kda::KdaBeta::Given,
                    KdaBeta::Logit => kda::KdaBeta::Logit,
                },
            }),
        }
    }

    /// The launch, as the reference takes it.
    fn problem<'a>(&'a self, case: &Case) -> Recurrent<'a> {
        let options = &case.options;
        let any = |pick: fn(&Tokens<View>) -> &View| {
            let tokens = case.previous.as_ref().filter(|_| case.is_commit());
            pick(tokens.map_or(&case.tokens, |previous| &previous.tokens))
        };
        let (k, v) = (any(|tokens| &tokens.k), any(|tokens| &tokens.v));
        Recurrent {
            batch: case.batch(),
            tokens: case.max_tokens(),
            heads: k.dims[2],
            value_heads: v.dims[2],
            key_dim: k.dims[3],
            value_dim: v.dims[3],
            q: &self.q,
            k: &self.tokens.k,
            v: &self.tokens.v,
            gates: self.gates(&self.tokens),
            l2norm: options.qk_l2norm,
            scale: options
                .scale
                .map_or_else(|| default_scale(k.dims[3]), f64::from),
            head_map: match options.head_map {
                HeadMap::Tiled => reference::HeadMap::Tiled,
                HeadMap::Grouped => reference::HeadMap::Grouped,
            },
            layout: Layout::KLast,
            read_slots: self.read_slots.as_deref(),
            write_slots: self.write_slots.as_deref(),
            token_slots: self.token_slots.as_deref(),
            accepted: self.accepted.as_deref(),
            cu_seqlens: self.cu_seqlens.as_deref(),
            null_slot: options.null_slot.map(i64::from),
            update_state: options.update_state,
            snapshot_steps: case.snapshots.as_ref().map(|snapshots| snapshots.dims[1]),
            previous: self
                .previous
                .as_ref()
                .map(|(tokens, previous, keep)| Previous {
                    tokens: *tokens,
                    k: &previous.k,
                    v: &previous.v,
                    gates: self.gates(previous),
                    keep,
                }),
            round_state: |x| x,
        }
    }
}

/// The truth about a launch on `before`. New tokens that come after committed ones start from the states that `after`
/// has: those are right where they are near the truth, and a rounding of them may be either of two neighbours.
pub(crate) fn truth(before: &Case, after: &Case) -> Truth {
    let values = Values::of(before);
    let problem = values.problem(before);
    let states = |case: &Case, view: &View| case.floats(&case.as_klast(view));
    let pool = states(before, &before.pool);
    let write_pool = before.write_pool.as_ref().map(|view| states(before, view));
    let snapshots = before.snapshots.as_ref().map(|view| states(before, view));
    let kept = recurrent(&problem, &pool, write_pool.as_deref(), snapshots.as_deref())
        .unwrap_or_else(|error| panic!("{error}"));
    let mut truth = Truth {
        o: kept.o,
        pool: kept.pool,
        snapshots: kept.snapshots,
        states: Vec::new(),
        queries: Vec::new(),
    };
    if problem.tokens == 0 {
        return truth;
    }
    let rows = before.rows();
    let from = match before.previous {
        Some(_) => states(after, after.written_pool()),
        None => pool,
    };
    let (o, norms) = each_state(&problem, &rows, &from);
    if before.previous.is_some() {
        truth.o = o;
    }
    truth.states = norms;
    let of_heads = problem.value_heads / problem.heads;
    truth.queries = (0..truth.states.len())
        .map(|i| {
            let (token, hv) = (i / problem.value_heads, i % problem.value_heads);
            let h = match problem.head_map {
                reference::HeadMap::Tiled => hv % problem.heads,
                reference::HeadMap::Grouped => hv / of_heads,
            };
            let q = &problem.q[(token * problem.heads + h) * problem.key_dim..];
            norm(&normalise(
                &q[..problem.key_dim],
                problem.l2norm,
                problem.scale,
            ))
        })
        .collect();
    truth
}

/// o, and the norm of every state, of a launch that starts from these states and writes none.
fn each_state(problem: &Recurrent<'_>, rows: &[Row], states: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (steps, heads) = (problem.tokens, problem.value_heads);
    let len = problem.key_dim * problem.value_dim;
    let start = |row: &Row| {
        row.live.as_ref().map_or(-1, |live| {
            live.commit.map_or(live.start, |(_, slot)| slot) as i64
        })
    };
    let starts: Vec<i64> = rows.iter().map(start).collect();
    let verify = Recurrent {
        read_slots: Some(&starts),
        write_slots: None,
        token_slots: None,
        accepted: None,
        null_slot: None,
        update_state: false,
        snapshot_steps: Some(steps),
        previous: None,
        ..*problem
    };
    let nothing = vec![0.0; rows.len() * steps * heads * len];
    let verified =
        recurrent(&verify, states, None, Some(&nothing)).unwrap_or_else(|error| panic!("{error}"));
    let snapshots = verified.snapshots.unwrap_or_default();
    let mut norms = vec![0.0; verified.o.len() / problem.value_dim];
    for (b, row) in rows.iter().enumerate() {
        for (t, token) in row.tokens.iter().flat_map(Clone::clone).enumerate() {
            for hv in 0..heads {
                let state = &snapshots[((b * steps + t) * heads + hv) * len..][..len];
                norms[token * heads + hv] = norm(state);
            }
        }
    }
    (verified.o, norms)
}
