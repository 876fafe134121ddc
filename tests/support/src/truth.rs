//! Results of a case by the reference.

use std::convert::Infallible;

use gated_delta::{DType, KdaBeta};
use gated_delta_harness::arguments::{Arguments, DecayKind, GateKind, New, Tokens};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::gdn;
use gated_delta_reference::judge::{Judgement, judge};
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, LayerOutput, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrence::default_scale;
use gated_delta_reference::recurrent::{Checkpoints, Layout, Previous, Recurrent, TokenGates};
use gated_delta_reference::tolerance::Tolerance;

use crate::buffer::View;
use crate::case::Case;
use crate::problem::{self, Sizes, keep};

/// The tokens of a commit: none. Its outputs are read from the states.
static NO_TOKENS: Tokens<Vec<f64>> = Tokens {
    k: Vec::new(),
    v: Vec::new(),
    gate: Vec::new(),
    beta: Vec::new(),
};

/// Values of the tensors of a case.
struct Values {
    /// All tensors, states as `[…, V, K]`. With a convolution, new tokens have gates only.
    floats: Arguments<Vec<f64>>,
    indices: Arguments<Vec<i64>>,
    /// The previous tokens. With a convolution they have gates only.
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
        let indices = of_each(&klast, indices);
        let mut previous = floats.previous.as_ref().map(|kept| kept.tokens.clone());
        // The convolution computes q, k and v.
        let gates_alone = |gate: &Vec<f64>, beta: &Vec<f64>| Tokens {
            gate: gate.clone(),
            beta: beta.clone(),
            ..NO_TOKENS.clone()
        };
        if let Some(convolved) = &floats.convolved {
            floats.new = Some(New {
                q: Vec::new(),
                tokens: gates_alone(&convolved.gate, &convolved.beta),
                o: Vec::new(),
            });
        }
        if let Some(kept) = &floats.previous_x {
            previous = Some(gates_alone(&kept.gate, &kept.beta));
        }
        Self {
            floats,
            indices,
            previous,
        }
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
                    DecayKind::Log => kda::KdaDecay::Log,
                    DecayKind::Softplus => kda::KdaDecay::Softplus {
                        a_log: a_log.unwrap_or_default(),
                        dt_bias,
                    },
                    DecayKind::LowerBound(lower_bound) => kda::KdaDecay::LowerBound {
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

    /// The recurrence of the launch as the reference takes it.
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

    /// The launch as the reference takes it, its convolution and norm included.
    fn whole<'a>(&'a self, case: &Case) -> Layer<'a> {
        let x = self.floats.convolved.as_ref().map(|convolved| &convolved.x);
        let previous_x = self.floats.previous_x.as_ref().map(|kept| &*kept.x);
        Layer {
            step: self.problem(case),
            projection: conv(case, &self.floats).map(|conv| Projection {
                x: x.unwrap_or(&NO_TOKENS.k),
                previous: previous_x,
                conv,
            }),
            norm: self.norm(),
            fresh: self.indices.fresh.as_deref(),
            checkpoints: self.indices.checkpoints.as_ref().map(|of| Checkpoints {
                every: of.every,
                slots: &of.slots,
                positions: self.indices.positions.as_deref(),
            }),
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
            windows: problem::conv(&self.floats).map(|conv| &**conv.windows),
            write_windows: problem::conv(&self.floats)
                .and_then(|conv| conv.write_windows.map(|windows| &**windows)),
            window_snapshots: problem::window_snapshots(&self.floats).map(Vec::as_slice),
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

/// Results of a launch by the reference.
fn run(problem: &Layer, pools: &Pools) -> LayerOutput {
    layer(problem, pools).unwrap_or_else(|error| panic!("{error}"))
}

/// The arguments with each view replaced by `values` of it.
fn of_each<T>(args: &Arguments<View>, values: impl Fn(&View) -> T) -> Arguments<T> {
    let values = |view: &View| Ok::<_, Infallible>(values(view));
    args.map(&values).unwrap_or_else(|never| match never {})
}

/// Exact results of a launch on `before`, with error bounds. Sums of convolutions are exact, since the values of cases are few bits
/// wide.
///
/// New tokens that follow committed ones start from the states in `stored`, the case after the launch. These states are checked
/// against the reference too, and rounding may give either of two neighbours. Without `stored`, new tokens start from the exact
/// states.
///
/// # Panics
/// If the reference refuses the case.
#[must_use]
pub fn truth(before: &Case, stored: Option<&Case>) -> Judgement {
    let state = before.buffers[before.pool.buffer].dtype;
    let tolerance = Tolerance::from(before.formulation()).on(state.into());
    let values = Values::of(before);
    let stored = stored.map(|after| after.floats(&after.as_klast(after.written_pool())));
    let problem = values.whole(before);
    judge(
        &problem,
        &values.pools(),
        stored.as_deref(),
        &tolerance,
        0.0,
    )
    .unwrap_or_else(|error| panic!("{error}"))
}

/// Output and final states by the reference of a launch that starts from `states`, `[P, HV, V, K]`, and writes its pool.
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

#[cfg(test)]
mod tests;
