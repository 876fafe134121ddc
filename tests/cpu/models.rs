//! The linear layer of each model in the table of docs/models.md, from convolution to norm, against the reference: a decode, a
//! verify and a prompt, with every second pair of state dtype and layout. The layers have fewer heads than the models, with the
//! same HV / H.

use gated_delta::{Activation, BetaScale, DType, Formulation, KdaBeta, StateLayout};
use gated_delta_harness::arguments::{DecayKind, GateKind};
use gated_delta_test_support::backend::{backends_if, is_of_gpu, on_threads};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, NormChoice, Spec};

/// The layer of a model.
struct Model {
    name: &'static str,
    gates: GateKind,
    /// The ratio HV / H.
    ratio: usize,
    /// K. V is K, or 192.
    dim: usize,
    norm: NormChoice,
}

const fn norm(eps: f32, activation: Activation) -> NormChoice {
    NormChoice { eps, activation }
}

const SILU: NormChoice = norm(1e-6, Activation::Silu);
const SIGMOID: NormChoice = norm(1e-5, Activation::Sigmoid);
const GDN: GateKind = GateKind::Raw(BetaScale::One);

const MODELS: [Model; 8] = [
    Model {
        name: "Qwen3-Next",
        gates: GDN,
        ratio: 2,
        dim: 128,
        norm: SILU,
    },
    Model {
        name: "Qwen3.5",
        gates: GDN,
        ratio: 3,
        dim: 128,
        norm: SILU,
    },
    Model {
        name: "Qwen3.5-MoE",
        gates: GDN,
        ratio: 4,
        dim: 128,
        norm: SILU,
    },
    Model {
        name: "Qwen4-exp",
        gates: GDN,
        ratio: 3,
        dim: 128,
        norm: norm(1e-6, Activation::Sigmoid),
    },
    Model {
        name: "Qwen4-exp, K = 64",
        gates: GDN,
        ratio: 3,
        dim: 64,
        norm: norm(1e-6, Activation::Sigmoid),
    },
    Model {
        name: "OLMo-Hybrid",
        gates: GateKind::Raw(BetaScale::Two),
        ratio: 1,
        dim: 96,
        norm: norm(1e-5, Activation::Silu),
    },
    Model {
        name: "Kimi-Linear",
        gates: GateKind::Kda(DecayKind::Softplus, KdaBeta::Logit),
        ratio: 1,
        dim: 128,
        norm: SIGMOID,
    },
    Model {
        name: "GLM-5-Next",
        gates: GateKind::Kda(DecayKind::LowerBound(-5.0), KdaBeta::Logit),
        ratio: 1,
        dim: 128,
        norm: SIGMOID,
    },
];

impl Model {
    /// `tokens` tokens of two rows, of which one may be fresh, by the kernels for one token or for several.
    fn spec(&self, layout: StateLayout, state: DType, tokens: usize) -> Spec {
        let family = Family::layer(self.gates.operator(), layout, state, self.dim);
        let mut spec = Spec {
            tokens,
            ratio: self.ratio,
            heads: if self.ratio == 1 { 2 } else { 1 },
            gates: self.gates,
            norm: Some(self.norm),
            slots: SlotChoice::BOTH,
            fresh: true,
            ..Spec::plain(family)
        };
        // x, z and o are bf16, as in the models.
        spec.form.gates = [DType::Bf16; 2];
        spec
    }
}

/// All pairs of layout and state dtype. Any two neighbours differ in at least one of both, and every second pair covers all layouts
/// and dtypes.
const STATES: [(StateLayout, DType); 6] = [
    (StateLayout::KLast, DType::F32),
    (StateLayout::VLast, DType::F32),
    (StateLayout::VLast, DType::Bf16),
    (StateLayout::KLast, DType::Bf16),
    (StateLayout::KLast, DType::F16),
    (StateLayout::VLast, DType::F16),
];

/// Checks `make` for each model with every second pair of [`STATES`]. Models alternate between both halves. The GPU takes the pairs
/// whose position `is_of_gpu` accepts.
fn each(is_of_gpu: impl Fn(usize) -> bool + Sync, make: fn(&Model, StateLayout, DType) -> Spec) {
    let of_model = |m: usize| STATES.into_iter().skip(m % 2).step_by(2).enumerate();
    let models = MODELS.iter().enumerate();
    let pairs = models.flat_map(|(m, model)| of_model(m).map(move |(i, of)| (model, m + i, of)));
    on_threads(
        &pairs.collect::<Vec<_>>(),
        |&(model, i, (layout, state))| {
            println!("{}, {layout} {state}", model.name);
            let case = make(model, layout, state).case();
            for backend in backends_if(is_of_gpu(i)) {
                check(&case, &backend.run(&case, None));
            }
        },
    );
}

#[test]
fn every_models_layer_decodes() {
    each(
        |_| true,
        |model, layout, state| model.spec(layout, state, 1),
    );
}

/// A verify with the state and the window after each token.
#[test]
fn every_models_layer_verifies_drafts() {
    each(
        |_| true,
        |model, layout, state| Spec {
            snapshots: Some(0),
            ..model.spec(layout, state, 3)
        },
    );
}

/// A prompt in chunks of 64 tokens, of which the last is shorter. On a GPU each model has at least one of its pairs.
#[test]
fn every_models_layer_takes_a_prompt() {
    each(
        |i| is_of_gpu(i, STATES.len() / 2),
        |model, layout, state| {
            let mut spec = model.spec(layout, state, 70);
            spec.options.formulation = Formulation::Chunked;
            spec.batch = 1;
            spec
        },
    );
}
