//! What the reference says about a case.

use std::convert::Infallible;
use std::ops::Range;

use gated_delta::{DType, KdaBeta};
use gated_delta_harness::arguments::{Arguments, GateKind, KdaDecay, New, Tokens};
use gated_delta_reference::compare::{
    KEY, MORE_DECAY, Tolerance, norm, of_decays, of_keys, of_norm,
};
use gated_delta_reference::conv::{Conv, convolve, window_after};
use gated_delta_reference::gdn;
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, LayerOutput, Pools, Projection, layer};
use gated_delta_reference::norm::{GatedNorm, gated_norm};
use gated_delta_reference::recurrence::default_scale;
use gated_delta_reference::recurrent::{Checkpoints, Layout, Previous, Recurrent, TokenGates};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::buffer::View;
use crate::case::Case;
use crate::problem::{self, Sizes, keep};
use crate::rows::Row;

/// What a launch has to leave behind.
pub(crate) struct Truth {
    /// `[B, T, HV, V]`, or `[total, HV, V]`.
    pub o: Vec<f64>,
    /// The written pool, `[P, HV, V, K]`.
    pub pool: Vec<f64>,
    /// `[B, steps, HV, V, K]`
    pub snapshots: Option<Vec<f64>>,
    /// The written windows, of as many columns as they have.
    pub windows: Option<Vec<f64>>,
    /// `[B, steps, D, W − 1]`
    pub window_snapshots: Option<Vec<f64>>,
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
    /// States as `[…, V, K]`; of a convolution there are q, k and v too.
    floats: Arguments<Vec<f64>>,
    indices: Arguments<Vec<i64>>,
    /// What previous tokens bring, made by the convolution where there is one.
    previous: Option<Tokens<Vec<f64>>>,
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
        let mut floats = of_each(&klast, floats);
        let mut indices = of_each(&klast, indices);
        let mut previous = floats.previous.as_ref().map(|kept| kept.tokens.clone());
        if let Some((new, kept)) = made(case, &floats) {
            (floats.new, previous) = (new, kept);
            // The recurrence alone knows of no window without a slot.
            if let Some(slots) = &mut indices.token_slots {
                let steps = case.max_tokens();
                for (b, row) in case.rows().iter().enumerate() {
                    if row.live.is_none() {
                        slots[b * steps..][..steps].fill(-1);
                        let fresh = indices.fresh.as_mut();
                        fresh.into_iter().for_each(|fresh| fresh[b] = 0);
                    }
                }
            }
        }
        Self {
            floats,
            indices,
            previous,
        }
    }

    /// The same with every log decay larger by [`MORE_DECAY`] of it.
    fn decaying_more(mut self) -> Self {
        let more = 1.0 + MORE_DECAY;
        let values = &mut self.floats;
        match &mut values.gates {
            GateKind::Given | GateKind::Kda(KdaDecay::Log, _) => {
                let new = values.new.as_mut().map(|new| &mut new.tokens);
                for tokens in [new, self.previous.as_mut()].into_iter().flatten() {
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

    /// The same with every element of k larger or smaller by [`KEY`] of it.
    fn with_keys_off(mut self) -> Self {
        let mut rng = StdRng::seed_from_u64(0);
        let new = self.floats.new.as_mut().map(|new| &mut new.tokens);
        for tokens in [new, self.previous.as_mut()].into_iter().flatten() {
            for x in &mut tokens.k {
                *x *= if rng.random() { 1.0 + KEY } else { 1.0 - KEY };
            }
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
                beta_scale: scale.factor().into(),
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
        let heads = match (&case.new, problem::conv(case), &case.previous) {
            (Some(new), ..) => new.q.dims[2],
            (_, Some(conv), _) => conv.heads,
            (.., Some(previous)) => previous.tokens.k.dims[2],
            _ => panic!("there are tokens"),
        };
        let [_, value_heads, value_dim, key_dim] = case.as_klast(&case.pool).dims[..] else {
            panic!("a pool has four dims")
        };
        let new = self.floats.new.as_ref();
        let (q, tokens) = new.map_or((&NO_TOKENS.k, &NO_TOKENS), |new| (&new.q, &new.tokens));
        let previous = self.previous.as_ref().zip(keep(&self.indices));
        Recurrent {
            batch: case.batch(),
            tokens: case.max_tokens(),
            heads,
            value_heads,
            key_dim,
            value_dim,
            q,
            k: &tokens.k,
            v: &tokens.v,
            gates: self.gates(tokens),
            l2norm: options.qk_l2norm,
            scale: options
                .scale
                .map_or_else(|| default_scale(key_dim), f64::from),
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
            previous: previous.map(|(tokens, keep)| Previous {
                tokens: case.previous_tokens().unwrap_or(0),
                k: &tokens.k,
                v: &tokens.v,
                gates: self.gates(tokens),
                keep,
            }),
            round_state: |x| x,
        }
    }

    /// The launch without a convolution and a norm: from q, k and v to o.
    fn recurrence<'a>(&'a self, case: &Case) -> Layer<'a> {
        Layer {
            step: self.problem(case),
            projection: None,
            norm: None,
            fresh: self.indices.fresh.as_deref(),
            checkpoints: self.indices.checkpoints.as_ref().map(|of| Checkpoints {
                every: of.every,
                slots: &of.slots,
                positions: self.indices.positions.as_deref(),
            }),
        }
    }

    /// All of it.
    fn whole<'a>(&'a self, case: &Case) -> Layer<'a> {
        let alone = self.recurrence(case);
        let Some(conv) = conv(case, &self.floats) else {
            return Layer {
                norm: self.norm(),
                ..alone
            };
        };
        let nothing = &NO_TOKENS.k;
        let x = self.floats.convolved.as_ref().map(|convolved| &convolved.x);
        let previous_x = self.floats.previous_x.as_ref().map(|kept| &*kept.x);
        Layer {
            step: Recurrent {
                q: nothing,
                k: nothing,
                v: nothing,
                previous: alone.step.previous.map(|previous| Previous {
                    k: nothing,
                    v: nothing,
                    ..previous
                }),
                ..alone.step
            },
            projection: Some(Projection {
                x: x.unwrap_or(nothing),
                previous: previous_x,
                conv,
            }),
            norm: self.norm(),
            ..alone
        }
    }

    fn norm(&self) -> Option<GatedNorm<'_>> {
        let norm = self.floats.norm.as_ref()?;
        Some(GatedNorm {
            z: &norm.z,
            weight: &norm.weight,
            eps: norm.eps.into(),
            activation: norm.activation.into(),
        })
    }

    fn pools(&self) -> Pools<'_> {
        let Arguments {
            pool,
            write_pool,
            snapshots,
            ..
        } = &self.floats;
        Pools {
            states: pool,
            write_states: write_pool.as_deref(),
            snapshots: snapshots.as_deref(),
            ..Pools::default()
        }
    }
}

fn conv<'a>(case: &Case, floats: &'a Arguments<Vec<f64>>) -> Option<Conv<'a>> {
    let dims = &problem::conv(case)?.weight.dims;
    let conv = problem::conv(floats)?;
    Some(Conv {
        channels: dims[0],
        width: dims[1],
        weight: conv.weight,
        bias: conv.bias.map(Vec::as_slice),
        activation: conv.activation.into(),
    })
}

/// What a convolution makes of new tokens, but for o, and of previous ones.
type Made = (Option<New<Vec<f64>>>, Option<Tokens<Vec<f64>>>);

/// q, k and v of the active rows of a convolution, NaN of the others, with their gates. Of previous tokens k and v, as far as
/// they are kept.
fn made(case: &Case, floats: &Arguments<Vec<f64>>) -> Option<Made> {
    let conv = conv(case, floats)?;
    let windows = problem::conv(floats)?.windows;
    let pool = case.as_klast(&case.pool);
    let values = pool.dims[1] * pool.dims[2];
    let keys = (conv.channels - values) / 2;
    let most = case.previous_tokens().unwrap_or(0);
    let nothing = |tokens: usize, len: usize| vec![f64::NAN; tokens * len];
    let new_x: &[f64] = match &floats.convolved {
        Some(convolved) => &convolved.x,
        None => &[],
    };
    let tokens = new_x.len() / conv.channels;
    let [mut q, mut k, mut v] = [keys, keys, values].map(|len| nothing(tokens, len));
    let kept = [keys, values].map(|len| nothing(case.batch() * most, len));
    let [mut previous_k, mut previous_v] = kept;
    let put = |tensor: &mut Vec<f64>, t: usize, token: &[f64]| {
        tensor[t * token.len()..][..token.len()].copy_from_slice(token);
    };
    for (b, row) in case.rows().into_iter().enumerate() {
        let (Some(tokens), Some(live)) = (row.tokens, row.live) else {
            continue;
        };
        let before = conv.width - 1;
        let columns = windows.len() / pool.dims[0] / conv.channels;
        let start = live.window.and_then(|window| window.start);
        let mut window = match start {
            Some([slot, column]) => (slot * conv.channels..(slot + 1) * conv.channels)
                .flat_map(|channel| &windows[channel * columns + column..][..before])
                .copied()
                .collect(),
            None => vec![0.0; conv.channels * before],
        };
        if let (Some((keep, _)), Some(kept)) = (live.commit, &floats.previous_x) {
            let x = &kept.x[b * most * conv.channels..][..keep * conv.channels];
            let y = convolve(&conv, &window, x).unwrap_or_else(|error| panic!("{error}"));
            for (t, y) in (b * most..).zip(y.chunks(conv.channels)) {
                put(&mut previous_k, t, &y[keys..2 * keys]);
                put(&mut previous_v, t, &y[2 * keys..]);
            }
            let after = window_after(&conv, &window, x, keep);
            window = after.unwrap_or_else(|error| panic!("{error}"));
        }
        let x = &new_x[tokens.start * conv.channels..tokens.end * conv.channels];
        let y = convolve(&conv, &window, x).unwrap_or_else(|error| panic!("{error}"));
        for (t, y) in tokens.zip(y.chunks(conv.channels)) {
            put(&mut q, t, &y[..keys]);
            put(&mut k, t, &y[keys..2 * keys]);
            put(&mut v, t, &y[2 * keys..]);
        }
    }
    let new = floats.convolved.as_ref().map(|convolved| New {
        q,
        tokens: Tokens {
            k,
            v,
            gate: convolved.gate.clone(),
            beta: convolved.beta.clone(),
        },
        o: Vec::new(),
    });
    let previous = floats.previous_x.as_ref().map(|kept| Tokens {
        k: previous_k,
        v: previous_v,
        gate: kept.gate.clone(),
        beta: kept.beta.clone(),
    });
    Some((new, previous))
}

/// What a launch leaves, by the reference.
fn run(problem: &Layer, pools: &Pools) -> LayerOutput {
    layer(problem, pools).unwrap_or_else(|error| panic!("{error}"))
}

/// What `values` says of each tensor.
fn of_each<T>(args: &Arguments<View>, values: impl Fn(&View) -> T) -> Arguments<T> {
    let values = |view: &View| Ok::<_, Infallible>(values(view));
    args.map(&values).unwrap_or_else(|never| match never {})
}

/// What an error may be of each state of `len` elements, where rounding makes one of `part` of it, or of what keys that are
/// off change by as often as `keys` says, and `least`. `states` are the exact ones, those with [`MORE_DECAY`], and,
/// where `keys` is not 0, those with [`KEY`].
fn errors(states: &[&[f64]], len: usize, [part, keys, least]: [f64; 3]) -> Vec<f64> {
    let of_state = |i: usize| {
        let [exact, decaying_more] = [0, 1].map(|of| &states[of][i * len..][..len]);
        let keys_off = states.get(2).map(|states| &states[i * len..][..len]);
        let of_keys = keys_off.map_or(0.0, |off| keys * of_keys(exact, off));
        let of_roundings = of_keys.max(part * finite_norm(exact));
        of_roundings + least + of_decays(exact, decaying_more)
    };
    (0..states[0].len() / len).map(of_state).collect()
}

/// The truth about a launch on `before`.
///
/// New tokens that come after committed ones start from the states that `stored` has, the case after the launch: those
/// are right where they are near the truth, and a rounding of them may be either of two neighbours. Without it they
/// start from the true ones.
pub(crate) fn truth(before: &Case, stored: Option<&Case>) -> Truth {
    let tolerance = Tolerance::from(before.options.formulation);
    let values = Values::of(before);
    let more = Values::of(before).decaying_more();
    let keys_off = (tolerance.keys > 0.0).then(|| Values::of(before).with_keys_off());
    let problems: Vec<Layer> = [&values, &more]
        .into_iter()
        .chain(&keys_off)
        .map(|values| values.recurrence(before))
        .collect();
    let problem = &problems[0].step;
    let states = |case: &Case, view: &View| case.floats(&case.as_klast(view));
    let (pool, pools) = (&values.floats.pool, values.pools());
    let mut kept: Vec<LayerOutput> = problems
        .iter()
        .map(|problem| run(problem, &pools))
        .collect();
    let len = problem.key_dim * problem.value_dim;
    let parts = [tolerance.state, tolerance.keys, tolerance.least];
    let of_states = |states: Vec<&[f64]>| errors(&states, len, parts);
    let snapshots: Option<_> = kept.iter().map(|kept| kept.snapshots.as_deref()).collect();
    let mut allowed = Allowed {
        o: Vec::new(),
        pool: of_states(kept.iter().map(|kept| &*kept.states).collect()),
        snapshots: snapshots.map_or(Vec::new(), of_states),
    };
    let mut o = std::mem::take(&mut kept[0].o);
    if problem.tokens > 0 {
        let stored = stored.map(|after| states(after, after.written_pool()));
        let from = |i: usize| match (before.has_previous(), &stored) {
            (false, _) => pool,
            (true, Some(stored)) => stored,
            (true, None) => &kept[i].states,
        };
        let rows = before.rows();
        let each = problems.iter().enumerate();
        let each = each.map(|(i, problem)| each_state(problem, &rows, from(i)));
        let each: Vec<EachState> = each.collect();
        let heads = problem.value_heads;
        let states: Vec<&[f64]> = each.iter().map(|each| &*each.states).collect();
        let of_states = errors(&states, len, [tolerance.output, tolerance.keys, 0.0]);
        let mut of_tokens = vec![0.0; problem.v.len() / problem.value_dim];
        for (tokens, first) in &each[0].rows {
            let of_row = tokens.start * heads..tokens.end * heads;
            let count = of_row.len();
            of_tokens[of_row].copy_from_slice(&of_states[first * heads..][..count]);
        }
        allowed.o = of_tokens
            .into_iter()
            .enumerate()
            .map(|(i, of_state)| {
                let q = problem.query(i / problem.value_heads, i % problem.value_heads);
                let q = finite_norm(&q);
                // What factors with q̂ in them lose does not shrink with it.
                of_state * q + tolerance.least * q.max(1.0)
            })
            .collect();
        if before.has_previous() {
            o.clone_from(&each[0].o);
        }
    }
    let (mut windows, mut window_snapshots) = (None, None);
    let conv = problem::conv(&values.floats);
    if conv.is_some() || before.norm.is_some() {
        if let Some(norm) = values.norm() {
            let width = problem.value_dim;
            let rows = before.rows();
            let live = rows.iter().filter(|row| row.live.is_some());
            for token in live.flat_map(|row| row.tokens.iter().flat_map(Clone::clone)) {
                for i in token * problem.value_heads..(token + 1) * problem.value_heads {
                    let own = i * width..(i + 1) * width;
                    let of_head = GatedNorm {
                        z: &norm.z[own.clone()],
                        ..norm
                    };
                    let off = of_norm(&of_head, &o[own.clone()], allowed.o[i]);
                    allowed.o[i] = off.unwrap_or_else(|error| panic!("{error}"));
                    if before.has_previous() {
                        let normed = gated_norm(&of_head, &o[own.clone()]);
                        let normed = normed.unwrap_or_else(|error| panic!("{error}"));
                        o[own].copy_from_slice(&normed);
                    }
                }
            }
        }
        let whole = run(
            &values.whole(before),
            &Pools {
                windows: conv.as_ref().map(|conv| &**conv.windows),
                write_windows: conv
                    .as_ref()
                    .and_then(|conv| conv.write_windows.map(|windows| &**windows)),
                window_snapshots: problem::window_snapshots(&values.floats).map(Vec::as_slice),
                ..pools
            },
        );
        (windows, window_snapshots) = (whole.windows, whole.window_snapshots);
        if !before.has_previous() {
            // With previous tokens o is of the states as they are stored.
            o = whole.o;
        }
    }
    let exact = kept.swap_remove(0);
    Truth {
        o,
        pool: exact.states,
        snapshots: exact.snapshots,
        windows,
        window_snapshots,
        allowed,
    }
}

/// What the launch of a case leaves that starts from `states`, `[P, HV, V, K]`, and writes its pool: o and the states.
pub(crate) fn after(case: &Case, states: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let values = Values::of(case);
    let windows = problem::conv(&values.floats).map(|conv| &**conv.windows);
    let pools = Pools {
        states,
        windows,
        ..Pools::default()
    };
    let after = run(&values.whole(case), &pools);
    (after.o, after.states)
}

/// The norm of what is finite: nobody reads the rest.
fn finite_norm(values: &[f64]) -> f64 {
    let finite: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
    norm(&finite)
}

/// What rows leave that start from some states and write none.
struct EachState {
    /// As of any launch.
    o: Vec<f64>,
    /// Active rows' tokens, among those of all rows, and the state after the first of them: its number in `states`.
    rows: Vec<(Range<usize>, usize)>,
    /// `[…, HV, V, K]`
    states: Vec<f64>,
}

/// The states after every token of a launch that starts from these.
fn each_state(problem: &Layer<'_>, rows: &[Row], states: &[f64]) -> EachState {
    let step = &problem.step;
    let mut live: Vec<_> = rows
        .iter()
        .enumerate()
        .filter_map(|(b, row)| Some((b, row.tokens.clone()?, row.live.as_ref()?)))
        .collect();
    live.sort_by_key(|(_, tokens, _)| tokens.start);
    let lengths = live.iter().map(|(_, tokens, _)| tokens.len());
    // Packed rows of a prefill may all be shorter than T.
    let steps = lengths.max().unwrap_or(1).max(1);
    // All tokens as packed ones: what is between active rows is one inactive row, and has no state.
    let total = step.v.len() / (step.value_heads * step.value_dim);
    let (mut bounds, mut starts, mut fresh, mut own) = (vec![0], vec![], vec![], vec![]);
    let mut add = |end: usize, start: i64, is_fresh: i64| {
        bounds.push(end as i64);
        starts.push(start);
        fresh.push(is_fresh);
        starts.len() - 1
    };
    let mut end = 0;
    for (b, tokens, live) in live {
        assert!(end <= tokens.start, "no token is of two rows");
        if end < tokens.start {
            add(tokens.start, -1, 0);
        }
        // A fresh row is active by the slot that it writes: any.
        let start = live.commit.map(|(_, slot)| slot).or(live.start);
        let is_fresh = problem.fresh.map_or(0, |fresh| fresh[b]);
        let row = add(tokens.end, start.unwrap_or(0) as i64, is_fresh);
        end = tokens.end;
        own.push((tokens, row * steps));
    }
    if end < total {
        add(total, -1, 0);
    }
    let step = Recurrent {
        batch: starts.len(),
        tokens: steps,
        cu_seqlens: Some(&bounds),
        read_slots: Some(&starts),
        write_slots: None,
        token_slots: None,
        accepted: None,
        null_slot: None,
        update_state: false,
        snapshot_steps: Some(steps),
        previous: None,
        ..*step
    };
    let len = step.value_heads * step.key_dim * step.value_dim;
    let nothing = vec![0.0; starts.len() * steps * len];
    let pools = Pools {
        states,
        snapshots: Some(&nothing),
        ..Pools::default()
    };
    let fresh = problem.fresh.is_some().then_some(&fresh[..]);
    let verify = Layer {
        step,
        // What is committed of a fresh row is no longer zeros.
        fresh: fresh.filter(|_| problem.step.previous.is_none()),
        checkpoints: None,
        ..*problem
    };
    let verified = run(&verify, &pools);
    // Zero for inactive rows, NaN where there is no row.
    let mut o = vec![f64::NAN; verified.o.len()];
    let of_token = step.value_heads * step.value_dim;
    for row in rows {
        let Some(tokens) = &row.tokens else { continue };
        let own = tokens.start * of_token..tokens.end * of_token;
        match row.live {
            Some(_) => o[own.clone()].copy_from_slice(&verified.o[own]),
            None => o[own].fill(0.0),
        }
    }
    EachState {
        o,
        rows: own,
        states: verified.snapshots.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
