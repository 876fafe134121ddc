//! Inputs of prefills, and their exact results by the reference.

use std::borrow::Cow;
use std::thread;

use anyhow::{Context as _, Result, anyhow};
use gated_delta::{DType, KdaBeta, StateLayout};
use gated_delta_harness::arguments::{DecayKind, Operator, value_dim};
use gated_delta_reference::conv::{Conv, convolve};
use gated_delta_reference::gate::{Activation, lower_bound_log_decay, softplus_log_decay};
use gated_delta_reference::norm::{GatedNorm, gated_norm};
use gated_delta_reference::recurrence::{Token, default_scale, normalise, recurrence};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::Case;

/// Taps of the convolution, W.
pub const TAPS: usize = 4;
/// Epsilon of the norm.
pub const EPS: f32 = 1e-6;
/// Number of tokens that are drawn. Later tokens repeat these.
const DISTINCT_TOKENS: usize = 1000;

/// Initial values of the buffer sets of a case, for some tokens, one state and one window.
pub struct Values {
    /// Number of tokens that have values.
    pub tokens: usize,
    /// q of each token, `[H, K]`; below, k.
    pub q: Vec<bf16>,
    pub k: Vec<bf16>,
    /// v of each token, `[HV, V]`.
    pub v: Vec<bf16>,
    /// q, k and v of each token side by side, `[D]`; below, z.
    pub x: Vec<bf16>,
    pub z: Vec<bf16>,
    /// GDN's log decays of each token, `[HV]`; below, β.
    pub gate: Vec<f32>,
    pub beta: Vec<f32>,
    /// KDA's log decays of each token, `[HV, K]`, and the values that they are computed from.
    pub gates: [Vec<bf16>; 2],
    /// Gate parameters, `[HV]` and `[HV, K]`.
    pub a_log: Vec<f32>,
    pub dt_bias: Vec<f32>,
    /// Taps `[D, W]`, window `[D, W − 1]` and weight of the norm `[V]`.
    pub weight: Vec<bf16>,
    pub window: Vec<bf16>,
    pub norm: Vec<bf16>,
    /// State `[HV, V, K]`, exact in bf16.
    state: Vec<f32>,
}

impl Values {
    pub fn new([heads, value_heads]: [usize; 2], dim: usize) -> Self {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut draw = |of_token: usize, count: usize| -> Vec<f32> {
            (0..of_token * count)
                .map(|_| rng.random_range(-1.0..1.0))
                .collect()
        };
        let rounded =
            |values: Vec<f32>| -> Vec<bf16> { values.into_iter().map(bf16::from_f32).collect() };
        let (keys, all, tokens) = (heads * dim, value_heads * value_dim(dim), DISTINCT_TOKENS);
        let channels = 2 * keys + all;
        let [q, k] = [(); 2].map(|()| rounded(draw(keys, tokens)));
        let v = rounded(draw(all, tokens));
        let of_tokens = q.chunks(keys).zip(k.chunks(keys)).zip(v.chunks(all));
        let x = of_tokens
            .flat_map(|((q, k), v)| [q, k, v].concat())
            .collect();
        Self {
            tokens,
            x,
            q,
            k,
            v,
            z: rounded(draw(all, tokens)),
            // Distributed as the softplus of a layer's gates: slow and fast decays.
            gate: draw(value_heads, tokens)
                .into_iter()
                .map(|x| -(2.0 * x).exp() / 20.0)
                .collect(),
            beta: draw(value_heads, tokens)
                .into_iter()
                .map(|x| 1.0 / (1.0 + (-2.0 * x).exp()))
                .collect(),
            gates: {
                let slow = draw(value_heads * dim, tokens)
                    .into_iter()
                    .map(|x| -(2.0 * x).exp() / 20.0);
                let slow = slow.collect();
                [rounded(slow), rounded(draw(value_heads * dim, tokens))]
            },
            a_log: draw(value_heads, 1),
            dt_bias: draw(value_heads * dim, 1)
                .into_iter()
                .map(|x| x - 2.0)
                .collect(),
            weight: rounded(draw(channels, TAPS)),
            window: rounded(draw(channels, TAPS - 1)),
            norm: rounded(draw(value_dim(dim), 1)),
            state: draw(all * dim, 1)
                .into_iter()
                .map(|x| bf16::from_f32(x).to_f32())
                .collect(),
        }
    }

    /// Log decays of the key channels for a token and value head. `hv` is the number of value heads.
    fn log_decays(&self, case: &Case, (token, head, hv): (usize, usize, usize)) -> Vec<f64> {
        let (row, dim) = (token % DISTINCT_TOKENS * hv + head, case.dim);
        if case.operator == Operator::Gdn {
            return vec![self.gate[row].into(); dim];
        }
        let [given, raw] = &self.gates;
        let of_row = |values: &[bf16]| -> Vec<f64> {
            let values = &values[row * dim..][..dim];
            values.iter().map(|x| x.to_f64()).collect()
        };
        let computed = |log_decay: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
            let a_log = self.a_log[head].into();
            let biased = of_row(raw).into_iter().zip(&self.dt_bias[head * dim..]);
            let of_channel = |(x, &bias): (f64, &f32)| log_decay(x, a_log, bias.into());
            biased.map(of_channel).collect()
        };
        match case.gate {
            DecayKind::Log => of_row(given),
            DecayKind::Softplus => computed(&softplus_log_decay),
            DecayKind::LowerBound(bound) => {
                computed(&|x, a_log, bias| lower_bound_log_decay(x, bound.into(), a_log, bias))
            }
        }
    }

    /// β of each token, or its logit.
    pub fn betas(&self, case: &Case) -> Vec<f32> {
        let given = |&beta: &f32| match case.beta {
            KdaBeta::Logit => (beta / (1.0 - beta)).ln(),
            _ => case.beta_scale() * beta,
        };
        self.beta.iter().map(given).collect()
    }

    /// q and k of each token. In a bare case k is of unit length and q twice as long, so that a launch that normalises is wrong.
    pub fn qk(&self, case: &Case) -> [Cow<'_, [bf16]>; 2] {
        [(&self.q, 2.0), (&self.k, 1.0)].map(|(of_all, length)| {
            if case.qk_l2norm {
                return Cow::from(of_all);
            }
            let of_heads = of_all.chunks(case.dim);
            let units = of_heads.flat_map(|head| {
                let head: Vec<f64> = head.iter().map(|x| x.to_f64()).collect();
                normalise(&head, true, length)
                    .into_iter()
                    .map(bf16::from_f64)
            });
            units.collect()
        })
    }

    /// Bytes of a slot in the case's pool.
    pub fn states(&self, case: &Case) -> Vec<u8> {
        let of_heads = self.state.chunks(case.dim * case.value_dim());
        let state: Vec<f32> = match case.layout {
            StateLayout::KLast => self.state.clone(),
            StateLayout::VLast => of_heads
                .flat_map(|state| transposed(state, case.dim))
                .collect(),
        };
        match case.state {
            DType::F32 => bytemuck::cast_slice(&state).to_vec(),
            _ => {
                let rounded: Vec<bf16> = state.into_iter().map(bf16::from_f32).collect();
                bytemuck::cast_slice(&rounded).to_vec()
            }
        }
    }
}

/// Transposes a matrix with rows of `columns` elements.
pub fn transposed<T: Copy>(matrix: &[T], columns: usize) -> Vec<T> {
    let rows = matrix.len() / columns;
    let at = |i: usize| matrix[i % rows * columns + i / rows];
    (0..matrix.len()).map(at).collect()
}

/// Exact results of one value head of a row.
pub struct Truth {
    pub b: usize,
    pub head: usize,
    /// Outputs, `[T, V]`
    pub o: Vec<f64>,
    /// State after the last token, `[V, K]`
    pub state: Vec<f64>,
}

/// Exact results of the first and the last value head of the longest and of the last row.
///
/// # Errors
/// The errors of the reference.
pub fn truths(case: &Case, heads: [usize; 2], values: &Values) -> Result<Vec<Truth>> {
    let last = case.lengths.len() - 1;
    let longest = (0..=last).max_by_key(|&b| case.lengths[b]).unwrap_or(last);
    let mut sampled = Vec::new();
    for b in [longest, last] {
        for head in [0, heads[1] - 1] {
            if !sampled.contains(&(b, head)) {
                sampled.push((b, head));
            }
        }
    }
    thread::scope(|scope| {
        let sampled = sampled.into_iter();
        let threads: Vec<_> = sampled
            .map(|(b, head)| scope.spawn(move || truth(case, heads, values, (b, head))))
            .collect();
        let joined = threads.into_iter().map(|thread| {
            let panicked = |_| anyhow!("the reference panicked");
            thread.join().map_err(panicked)?
        });
        joined.collect()
    })
}

fn truth(
    case: &Case,
    [h, hv]: [usize; 2],
    values: &Values,
    (b, head): (usize, usize),
) -> Result<Truth> {
    let (dim, v_dim) = (case.dim, case.value_dim());
    let first: usize = case.lengths[..b].iter().sum();
    let tokens = first..first + case.lengths[b];
    let key_head = head / (hv / h);
    // For q, k and v: dims, first channel in the row's tokens, and first channel in the projection.
    let [q, k] = values.qk(case);
    let places = [
        (&*q, (h, dim), key_head, key_head * dim),
        (&*k, (h, dim), key_head, (h + key_head) * dim),
        (&*values.v, (hv, v_dim), head, 2 * h * dim + head * v_dim),
    ];
    let of = |values: &[bf16], (heads, dim): (usize, usize), head: usize| -> Vec<f64> {
        let of_token =
            |token: usize| &values[(token % DISTINCT_TOKENS * heads + head) * dim..][..dim];
        let wide = tokens.clone().flat_map(of_token);
        wide.map(|x| x.to_f64()).collect()
    };
    let mut qkv = Vec::new();
    for (values_of, (heads, channels), head, channel) in places {
        let x = of(values_of, (heads, channels), head);
        let wide = |values: &[bf16], of_channel: usize| -> Vec<f64> {
            let values = &values[channel * of_channel..][..channels * of_channel];
            values.iter().map(|x| x.to_f64()).collect()
        };
        qkv.push(match case.layer {
            false => x,
            true => {
                let conv = Conv {
                    channels,
                    width: TAPS,
                    weight: &wide(&values.weight, TAPS),
                    bias: None,
                    activation: Activation::Silu,
                };
                convolve(&conv, &wide(&values.window, TAPS - 1), &x)?
            }
        });
    }
    let len = dim * v_dim;
    let state = &values.state[head * len..][..len];
    let mut state: Vec<f64> = state.iter().map(|&x| x.into()).collect();
    let mut o = Vec::with_capacity(tokens.len() * v_dim);
    for (i, token) in tokens.clone().enumerate() {
        let [q, k, v] = [dim, dim, v_dim].map(|dim| i * dim..(i + 1) * dim);
        let (q, k, v) = (&qkv[0][q], &qkv[1][k], &qkv[2][v]);
        let gate = token % DISTINCT_TOKENS * hv + head;
        let step = Token {
            q: normalise(q, case.qk_l2norm, default_scale(dim)),
            k: normalise(k, case.qk_l2norm, 1.0),
            v: v.to_vec(),
            log_decay: values.log_decays(case, (token, head, hv)),
            beta: (case.beta_scale() * values.beta[gate]).into(),
        };
        let after = recurrence(&state, &[step])?.pop();
        let after = after.context("a token leaves a state")?;
        o.extend(after.o);
        state = after.state;
    }
    if case.layer {
        let weight: Vec<f64> = values.norm.iter().map(|x| x.to_f64()).collect();
        let norm = GatedNorm {
            z: &of(&values.z, (hv, v_dim), head),
            weight: &weight,
            eps: EPS.into(),
            activation: case.norm().into(),
        };
        o = gated_norm(&norm, &o)?;
    }
    Ok(Truth { b, head, o, state })
}
