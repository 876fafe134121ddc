//! Results of a launch according to the reference.

use gated_delta_reference::Error;
use gated_delta_reference::conv::{Conv, convolve};
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn;
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, LayerOutput, Pools, Projection, layer};
use gated_delta_reference::norm::{GatedNorm, gated_norm};
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates};
use gated_delta_reference::tolerance::{Tolerance, norm, of_norm};

use super::LOWER_BOUND;
use super::cases::{
    ACCEPTED, Case, FRESH, GateKind, Keep, READ_SLOTS, ROWS, SLOTS, TAPS, WRITE_SLOTS,
};
use super::launch::formulation;
use super::values::{EPS, Tokens, Values};

/// The exact results for the active rows of a launch.
pub struct Truth {
    /// `[B, T, HV, V]`.
    pub o: Vec<f64>,
    /// Allowed error of each head's output, `[B, T, HV]`.
    pub allowed: Vec<f64>,
    /// State after every token, `[B, T, HV, V, K]` or `[B, T, HV, K, V]`.
    pub states: Vec<f64>,
    /// State after the kept previous tokens, `[B, HV, V, K]` or `[B, HV, K, V]`.
    pub committed: Vec<f64>,
    /// All windows of the pool, `[P, D, W - 1]`, with token slots `[P, D, W - 2 + T]`; `None` without a convolution.
    pub windows: Option<Vec<f64>>,
    /// Snapshots of windows, `[B, T + 1, D, W - 1]`, if there are any.
    pub window_snapshots: Option<Vec<f64>>,
}

impl Truth {
    /// The exact results of `case`. New tokens start from the states in the pool before the launch. If previous tokens are
    /// committed, new tokens start from the states that the launch has written to `pool`, because a correct state may be rounded
    /// to either of two neighbours.
    pub fn new(case: &Case, values: &Values, pool: &[f64]) -> Result<Self, String> {
        let mut truth = Self {
            o: Vec::new(),
            allowed: Vec::new(),
            states: Vec::new(),
            committed: Vec::new(),
            windows: None,
            window_snapshots: None,
        };
        let mut windows = starting_windows(case, values);
        let slot = |slot: Option<usize>| slot.map_or(-1, |slot| slot as i64);
        let starts: Vec<i64> = (0..ROWS).map(|b| slot(case.start(b))).collect();
        let ends: Vec<i64> = (0..ROWS).map(|b| slot(case.end(b))).collect();
        let state = case.state();
        if case.way.previous > 0 {
            let keep = case.keep().map(|keep| keep as i64);
            let commit = Layer {
                step: Recurrent {
                    tokens: 0,
                    q: &[],
                    k: &[],
                    v: &[],
                    gates: gates(case, values, &NOTHING),
                    read_slots: Some(&starts),
                    write_slots: Some(&ends),
                    previous: Some(previous(case, values, &keep)),
                    ..problem(case, values)
                },
                projection: case.way.conv.then(|| Projection {
                    x: &[],
                    previous: Some(&values.around.previous_x),
                    conv: conv(values),
                }),
                norm: None,
                fresh: fresh(case),
                checkpoints: None,
            };
            let pools = Pools {
                states: &values.pool,
                windows: case.way.conv.then_some(&windows),
                ..Pools::default()
            };
            let after = layer(&commit, &pools).map_err(|error| error.to_string())?;
            windows = after.windows.unwrap_or_default();
            let after = after.states;
            truth.committed = vec![f64::NAN; ROWS * state];
            for (committed, end) in truth.committed.chunks_mut(state).zip(&ends) {
                if let Ok(slot) = usize::try_from(*end) {
                    committed.copy_from_slice(&after[slot * state..][..state]);
                }
            }
        }
        if case.way.tokens > 0 {
            let from = match case.way.previous {
                0 => &values.pool[..],
                _ => pool,
            };
            // Whether a fresh row is active depends on the slot that it writes.
            let starts: Vec<i64> = match case.way.previous {
                0 => (0..ROWS)
                    .map(|b| slot(case.start(b).or(case.end(b))))
                    .collect(),
                _ => ends,
            };
            let verify = Layer {
                step: Recurrent {
                    read_slots: Some(&starts),
                    update_state: false,
                    snapshot_steps: Some(case.way.tokens),
                    ..problem(case, values)
                },
                projection: case.way.conv.then(|| Projection {
                    x: &values.around.x,
                    previous: None,
                    conv: conv(values),
                }),
                norm: None,
                fresh: match case.way.previous {
                    0 => fresh(case),
                    _ => None,
                },
                checkpoints: None,
            };
            let nothing = vec![f64::NAN; ROWS * case.way.tokens * state];
            let pools = Pools {
                states: from,
                windows: case.way.conv.then_some(&windows),
                snapshots: Some(&nothing),
                ..Pools::default()
            };
            let after = layer(&verify, &pools).map_err(|error| error.to_string())?;
            truth.o = after.o;
            truth.states = after.snapshots.unwrap_or_default();
            let of_norm = truth.normed(case, values, &windows, &verify.step);
            of_norm.map_err(|error| error.to_string())?;
        }
        if case.way.conv {
            let after = windows_after(case, values).map_err(|error| error.to_string())?;
            (truth.windows, truth.window_snapshots) = (after.windows, after.window_snapshots);
        }
        Ok(truth)
    }

    /// Norms the outputs, if the case has a norm, and computes their allowed errors.
    fn normed(
        &mut self,
        case: &Case,
        values: &Values,
        windows: &[f64],
        step: &Recurrent,
    ) -> Result<(), Error> {
        let query = query(case, values, windows)?;
        let step = match &query {
            Some(q) => Recurrent { q, ..*step },
            None => *step,
        };
        let ((_, hv), dim) = (case.heads(), case.value_dim());
        let len = dim * case.key_dim();
        let tolerance = Tolerance::from(formulation(case))
            .on(case.kind.state.into())
            .output;
        for (i, o) in self.o.chunks_mut(dim).enumerate() {
            let state = &self.states[i * len..][..len];
            let off = tolerance * norm(&step.query(i / hv, i % hv)) * norm(state);
            let is_active = case.is_active(i / hv / case.way.tokens);
            self.allowed.push(if case.way.norm && is_active {
                let gated = GatedNorm {
                    z: &values.around.z[i * dim..][..dim],
                    weight: &values.around.norm_weight,
                    eps: EPS.into(),
                    activation: Activation::Silu,
                };
                let allowed = of_norm(&gated, o, off)?;
                o.copy_from_slice(&gated_norm(&gated, o)?);
                allowed
            } else {
                off
            });
        }
        Ok(())
    }
}

fn conv(values: &Values) -> Conv<'_> {
    Conv {
        channels: values.around.conv_bias.len(),
        width: TAPS,
        weight: &values.around.conv_weight,
        bias: Some(&values.around.conv_bias),
        activation: Activation::Silu,
    }
}

/// Windows that rows start from, `[P, D, W - 1]`, in the slots of the states that rows start from.
fn starting_windows(case: &Case, values: &Values) -> Vec<f64> {
    if !case.way.conv {
        return Vec::new();
    }
    let (channels, inputs) = (case.channels(), case.window_inputs());
    let of_slot = channels * (TAPS - 1);
    let mut windows = vec![f64::NAN; SLOTS * of_slot];
    for b in 0..ROWS {
        let (Some(start), Some((slot, column))) = (case.start(b), case.window(b)) else {
            continue;
        };
        let from = values.around.windows[slot * channels * inputs..].chunks(inputs);
        let to = windows[start * of_slot..][..of_slot].chunks_mut(TAPS - 1);
        for (to, from) in to.zip(from) {
            to.copy_from_slice(&from[column..][..TAPS - 1]);
        }
    }
    windows
}

/// Windows after the launch. They are copies of inputs, and do not depend on the rounding of states.
fn windows_after(case: &Case, values: &Values) -> Result<LayerOutput, Error> {
    let (read_slots, write_slots) = (READ_SLOTS.map(i64::from), WRITE_SLOTS.map(i64::from));
    let token_slots = case.token_slots();
    let token_slots: Option<Vec<i64>> = token_slots.map(|slots| {
        slots
            .as_flattened()
            .iter()
            .copied()
            .map(i64::from)
            .collect()
    });
    let accepted = ACCEPTED.map(i64::from);
    let keep = case.keep().map(|keep| keep as i64);
    let with_previous = case.way.previous > 0;
    let problem = Layer {
        step: Recurrent {
            read_slots: token_slots.is_none().then_some(&read_slots),
            write_slots: (case.way.keep == Keep::Elsewhere).then_some(&write_slots),
            token_slots: token_slots.as_deref(),
            accepted: token_slots.is_some().then_some(&accepted),
            update_state: case.way.keep != Keep::Nothing,
            snapshot_steps: case.way.snapshots.then_some(case.way.tokens + 1),
            previous: with_previous.then(|| previous(case, values, &keep)),
            ..problem(case, values)
        },
        projection: Some(Projection {
            x: &values.around.x,
            previous: with_previous.then_some(&values.around.previous_x),
            conv: conv(values),
        }),
        norm: None,
        fresh: fresh(case),
        checkpoints: None,
    };
    let nothing = |of_token: usize| {
        let steps = ROWS * (case.way.tokens + 1);
        case.way.snapshots.then(|| vec![f64::NAN; steps * of_token])
    };
    let snapshots = nothing(case.state());
    let window_snapshots = nothing(case.channels() * (TAPS - 1));
    let pools = Pools {
        states: &values.pool,
        windows: Some(&values.around.windows),
        snapshots: snapshots.as_deref(),
        window_snapshots: window_snapshots.as_deref(),
        ..Pools::default()
    };
    layer(&problem, &pools)
}

fn fresh(case: &Case) -> Option<&'static [i64]> {
    case.way.fresh.then_some(&FRESH_ROWS)
}

/// q after the convolution, `[B, T, H, K]`; `None` without a convolution.
fn query(case: &Case, values: &Values, windows: &[f64]) -> Result<Option<Vec<f64>>, Error> {
    if !case.way.conv {
        return Ok(None);
    }
    let (channels, (h, _)) = (case.channels(), case.heads());
    let window = channels * (TAPS - 1);
    let mut q = Vec::new();
    for (b, x) in values
        .around
        .x
        .chunks(case.way.tokens * channels)
        .enumerate()
    {
        let start = match case.way.previous {
            0 => case.start(b),
            _ => case.end(b),
        };
        let window = match start {
            Some(slot) => windows[slot * window..][..window].to_vec(),
            None => vec![0.0; window],
        };
        for y in convolve(&conv(values), &window, x)?.chunks(channels) {
            q.extend_from_slice(&y[..h * case.key_dim()]);
        }
    }
    Ok(Some(q))
}

/// `FRESH` in the type that the reference takes.
static FRESH_ROWS: [i64; ROWS] = [FRESH[0] as i64, FRESH[1] as i64, FRESH[2] as i64];

/// An empty set of tokens.
static NOTHING: Tokens = Tokens {
    k: Vec::new(),
    v: Vec::new(),
    gate: Vec::new(),
    beta: Vec::new(),
};

/// The new tokens in the form that the reference takes.
fn problem<'a>(case: &Case, values: &'a Values) -> Recurrent<'a> {
    let (h, hv) = case.heads();
    let given = |given: &'a [f64]| if case.way.conv { &[] } else { given };
    let (rows, dims) = ([ROWS, case.way.tokens], [case.key_dim(), case.value_dim()]);
    let gates = gates(case, values, &values.tokens);
    Recurrent {
        q: given(&values.q),
        k: given(&values.tokens.k),
        v: given(&values.tokens.v),
        l2norm: case.l2norm,
        head_map: case.head_map.into(),
        layout: case.kind.layout.into(),
        ..Recurrent::new(rows, [h, hv], dims, gates)
    }
}

/// The previous tokens in the form that the reference takes.
fn previous<'a>(case: &Case, values: &'a Values, keep: &'a [i64]) -> Previous<'a> {
    let given = |given: &'a [f64]| if case.way.conv { &[] } else { given };
    Previous {
        tokens: case.way.previous,
        k: given(&values.previous.k),
        v: given(&values.previous.v),
        gates: gates(case, values, &values.previous),
        keep,
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
        GateKind::KdaLog => of_kda(kda::KdaDecay::Log, kda::KdaBeta::Given),
        GateKind::KdaSoftplus => of_kda(
            kda::KdaDecay::Softplus {
                a_log,
                dt_bias: Some(dt_bias),
            },
            kda::KdaBeta::Logit,
        ),
        GateKind::KdaLowerBound => of_kda(
            kda::KdaDecay::LowerBound {
                lower_bound: LOWER_BOUND.into(),
                a_log: Some(a_log),
                dt_bias: Some(dt_bias),
            },
            kda::KdaBeta::Logit,
        ),
    }
}
