//! What the reference says about a case.

use gated_delta::ops::BetaScale;
use gated_delta::ops::HeadMap;
use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta_reference::compare::{MORE_DECAY, Tolerance, norm, of_decays};
use gated_delta_reference::gdn;
use gated_delta_reference::kda;
use gated_delta_reference::recurrence::{default_scale, normalise};
use gated_delta_reference::recurrent::{
    self as reference, Layout, Previous, Recurrent, TokenGates, recurrent,
};

use crate::buffer::View;
use crate::case::Case;
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
    /// How far from these a launch may be.
    pub allowed: Allowed,
}

/// How far results may be from the truth before they are rounded to their dtype: norms of differences.
pub struct Allowed {
    /// `[B, T, HV]`, or `[total, HV]`: of o of each token.
    pub o: Vec<f64>,
    /// `[P, HV]`: of the states of the written pool.
    pub pool: Vec<f64>,
    /// `[B, steps, HV]`: of the snapshots, where there are any.
    pub snapshots: Vec<f64>,
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

    /// The same with every log decay larger by [`MORE_DECAY`] of it.
    fn decaying_more(mut self) -> Self {
        let more = 1.0 + MORE_DECAY;
        match &mut self.gates.kind {
            GateKind::Given | GateKind::Kda(KdaDecay::Log, _) => {
                let previous = self.previous.as_mut().map(|(_, tokens, _)| tokens);
                for tokens in [Some(&mut self.tokens), previous].into_iter().flatten() {
                    tokens.gate.iter_mut().for_each(|g| *g *= more);
                }
            }
            GateKind::Raw(_) | GateKind::Kda(KdaDecay::Softplus, _) => {
                let a_log = self.gates.a_log.iter_mut().flatten();
                a_log.for_each(|a_log| *a_log += more.ln());
            }
            GateKind::Kda(KdaDecay::LowerBound(bound), _) => *bound *= more as f32,
        }
        self
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

/// States of every value head, and states of the same problem with [`MORE_DECAY`].
struct States<'a> {
    exact: &'a [f64],
    decaying_more: &'a [f64],
}

impl States<'_> {
    /// What an error may be of each state of `len` elements, where rounding makes one of `part` of it.
    fn allowed(&self, len: usize, part: f64) -> Vec<f64> {
        let states = self.exact.chunks(len).zip(self.decaying_more.chunks(len));
        let of_state =
            |(exact, more): (&[f64], &[f64])| part * finite_norm(exact) + of_decays(exact, more);
        states.map(of_state).collect()
    }
}

/// The truth about a launch on `before`.
///
/// New tokens that come after committed ones start from the states that `stored` has, the case after the launch: those
/// are right where they are near the truth, and a rounding of them may be either of two neighbours. Without it they
/// start from the true ones.
pub(crate) fn truth(before: &Case, stored: Option<&Case>) -> Truth {
    let values = Values::of(before);
    let more = Values::of(before).decaying_more();
    let problems = [values.problem(before), more.problem(before)];
    let problem = &problems[0];
    let states = |case: &Case, view: &View| case.floats(&case.as_klast(view));
    let pool = states(before, &before.pool);
    let write_pool = before.write_pool.as_ref().map(|view| states(before, view));
    let snapshots = before.snapshots.as_ref().map(|view| states(before, view));
    let [kept, more_kept] = problems.each_ref().map(|problem| {
        recurrent(problem, &pool, write_pool.as_deref(), snapshots.as_deref())
            .unwrap_or_else(|error| panic!("{error}"))
    });
    let tolerance = Tolerance::from(before.options.formulation);
    let len = problem.key_dim * problem.value_dim;
    let of_states = |exact: &[f64], decaying_more: &[f64]| {
        States {
            exact,
            decaying_more,
        }
        .allowed(len, tolerance.state)
    };
    let mut allowed = Allowed {
        o: Vec::new(),
        pool: of_states(&kept.pool, &more_kept.pool),
        snapshots: match (&kept.snapshots, &more_kept.snapshots) {
            (Some(exact), Some(more)) => of_states(exact, more),
            _ => Vec::new(),
        },
    };
    let mut o = kept.o;
    if problem.tokens > 0 {
        let stored = stored.map(|after| states(after, after.written_pool()));
        let from = match (&before.previous, &stored) {
            (None, _) => [&pool; 2],
            (Some(_), Some(stored)) => [stored; 2],
            (Some(_), None) => [&kept.pool, &more_kept.pool],
        };
        let rows = before.rows();
        let [exact, more] = [0, 1].map(|i| each_state(&problems[i], &rows, from[i]));
        let states = States {
            exact: &exact.1,
            decaying_more: &more.1,
        };
        let of_tokens = states
            .allowed(len, tolerance.output)
            .into_iter()
            .enumerate();
        allowed.o = of_tokens
            .map(|(i, of_state)| of_state * query(problem, i))
            .collect();
        if before.previous.is_some() {
            o = exact.0;
        }
    }
    Truth {
        o,
        pool: kept.pool,
        snapshots: kept.snapshots,
        allowed,
    }
}

/// The norm of q̂ of token and value head `i` of `[B, T, HV]`.
fn query(problem: &Recurrent<'_>, i: usize) -> f64 {
    let (token, hv) = (i / problem.value_heads, i % problem.value_heads);
    let h = match problem.head_map {
        reference::HeadMap::Tiled => hv % problem.heads,
        reference::HeadMap::Grouped => hv / (problem.value_heads / problem.heads),
    };
    let q = &problem.q[(token * problem.heads + h) * problem.key_dim..][..problem.key_dim];
    finite_norm(&normalise(q, problem.l2norm, problem.scale))
}

/// The norm of what is finite: nobody reads the rest.
fn finite_norm(values: &[f64]) -> f64 {
    let finite: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
    norm(&finite)
}

/// o, and the state after every token, `[B, T, HV, V, K]`, or `[total, HV, V, K]`, of a launch that starts from these
/// states and writes none.
fn each_state(problem: &Recurrent<'_>, rows: &[Row], states: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (steps, heads) = (problem.tokens, problem.value_heads);
    let len = heads * problem.key_dim * problem.value_dim;
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
    let nothing = vec![0.0; rows.len() * steps * len];
    let verified =
        recurrent(&verify, states, None, Some(&nothing)).unwrap_or_else(|error| panic!("{error}"));
    let snapshots = verified.snapshots.unwrap_or_default();
    let mut states = vec![0.0; verified.o.len() / problem.value_dim * len / heads];
    for (b, row) in rows.iter().enumerate() {
        for (t, token) in row.tokens.iter().flat_map(Clone::clone).enumerate() {
            let state = &snapshots[(b * steps + t) * len..][..len];
            states[token * len..][..len].copy_from_slice(state);
        }
    }
    (verified.o, states)
}
