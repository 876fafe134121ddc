//! What the reference says about a case.

use std::convert::Infallible;

use gated_delta::{BetaScale, DType, KdaBeta};
use gated_delta_harness::arguments::{Arguments, GateKind, KdaDecay, Tokens};
use gated_delta_reference::compare::{MORE_DECAY, Tolerance, norm, of_decays};
use gated_delta_reference::gdn;
use gated_delta_reference::kda;
use gated_delta_reference::recurrence::default_scale;
use gated_delta_reference::recurrent::{Layout, Previous, Recurrent, TokenGates, recurrent};

use crate::buffer::View;
use crate::case::Case;
use crate::problem::Sizes;
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

/// Those of a commit that are read from the state.
static NO_TOKENS: Tokens<Vec<f64>> = Tokens {
    k: Vec::new(),
    v: Vec::new(),
    gate: Vec::new(),
    beta: Vec::new(),
};

/// Values of a case.
struct Values {
    /// States as `[…, V, K]`.
    floats: Arguments<Vec<f64>>,
    indices: Arguments<Vec<i64>>,
}

impl Values {
    fn of(case: &Case) -> Self {
        let mut klast = case.args.clone();
        let states = [&mut klast.write_pool, &mut klast.snapshots];
        for view in states.into_iter().flatten().chain([&mut klast.pool]) {
            *view = case.as_klast(view);
        }
        let is_index = |view: &View| {
            let dtype = case.buffers[view.buffer].dtype;
            matches!(dtype, DType::I32 | DType::I64 | DType::U32)
        };
        let floats = |view: &View| match is_index(view) {
            true => Vec::new(),
            false => case.floats(view),
        };
        let indices = |view: &View| match is_index(view) {
            true => case.indices(view),
            false => Vec::new(),
        };
        Self {
            floats: of_each(&klast, floats),
            indices: of_each(&klast, indices),
        }
    }

    /// The same with every log decay larger by [`MORE_DECAY`] of it.
    fn decaying_more(mut self) -> Self {
        let more = 1.0 + MORE_DECAY;
        let values = &mut self.floats;
        match &mut values.gates {
            GateKind::Given | GateKind::Kda(KdaDecay::Log, _) => {
                let new = values.new.as_mut().map(|new| &mut new.tokens);
                let previous = values
                    .previous
                    .as_mut()
                    .map(|previous| &mut previous.tokens);
                for tokens in [new, previous].into_iter().flatten() {
                    tokens.gate.iter_mut().for_each(|g| *g *= more);
                }
            }
            GateKind::Raw(_) | GateKind::Kda(KdaDecay::Softplus, _) => {
                let a_log = values.a_log.iter_mut().flatten();
                a_log.for_each(|a_log| *a_log += more.ln());
            }
            GateKind::Kda(KdaDecay::LowerBound(bound), _) => *bound *= more as f32,
        }
        self
    }

    fn gates<'a>(&'a self, tokens: &'a Tokens<Vec<f64>>) -> TokenGates<'a> {
        let a_log = self.floats.a_log.as_deref();
        let dt_bias = self.floats.dt_bias.as_deref();
        let (gate, beta) = (&tokens.gate, &tokens.beta);
        match self.floats.gates {
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
                    _ => kda::KdaBeta::Logit,
                },
            }),
        }
    }

    /// The launch, as the reference takes it.
    fn problem<'a>(&'a self, case: &Case) -> Recurrent<'a> {
        let options = &case.options;
        let dims = match (&case.new, &case.previous) {
            (Some(new), _) => &new.tokens,
            (None, Some(previous)) => &previous.tokens,
            (None, None) => panic!("there are tokens"),
        };
        let [k_dims, v_dims] = [&dims.k.dims, &dims.v.dims];
        let new = self.floats.new.as_ref();
        let (q, tokens) = new.map_or((&NO_TOKENS.k, &NO_TOKENS), |new| (&new.q, &new.tokens));
        let previous = self.floats.previous.as_ref();
        let previous = previous.zip(self.indices.previous.as_ref());
        Recurrent {
            batch: case.batch(),
            tokens: case.max_tokens(),
            heads: k_dims[2],
            value_heads: v_dims[2],
            key_dim: k_dims[3],
            value_dim: v_dims[3],
            q,
            k: &tokens.k,
            v: &tokens.v,
            gates: self.gates(tokens),
            l2norm: options.qk_l2norm,
            scale: options
                .scale
                .map_or_else(|| default_scale(k_dims[3]), f64::from),
            head_map: options.head_map.into(),
            layout: Layout::KLast,
            read_slots: self.indices.read_slots.as_deref(),
            write_slots: self.indices.write_slots.as_deref(),
            token_slots: self.indices.token_slots.as_deref(),
            accepted: self.indices.accepted.as_deref(),
            cu_seqlens: self
                .indices
                .packed
                .as_ref()
                .map(|packed| &*packed.cu_seqlens),
            null_slot: options.null_slot.map(i64::from),
            update_state: case.update_state,
            snapshot_steps: case.snapshots.as_ref().map(|snapshots| snapshots.dims[1]),
            previous: previous.map(|(floats, indices)| Previous {
                tokens: case
                    .previous
                    .as_ref()
                    .map_or(0, |previous| previous.tokens.k.dims[1]),
                k: &floats.tokens.k,
                v: &floats.tokens.v,
                gates: self.gates(&floats.tokens),
                keep: &indices.keep,
            }),
            round_state: |x| x,
        }
    }
}

/// What `values` says of each tensor.
fn of_each<T>(args: &Arguments<View>, values: impl Fn(&View) -> T) -> Arguments<T> {
    let values = |view: &View| Ok::<_, Infallible>(values(view));
    args.map(&values).unwrap_or_else(|never| match never {})
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
    let Arguments {
        pool,
        write_pool,
        snapshots,
        ..
    } = &values.floats;
    let [kept, more_kept] = problems.each_ref().map(|problem| {
        recurrent(problem, pool, write_pool.as_deref(), snapshots.as_deref())
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
            (None, _) => [pool; 2],
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
            .map(|(i, of_state)| {
                let q = problem.query(i / problem.value_heads, i % problem.value_heads);
                of_state * finite_norm(&q)
            })
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
