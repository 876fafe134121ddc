//! Gates of a step: decay and β. They are the only difference between GDN and KDA.

use gated_delta_kernels::step::Gate;

use crate::tensor::Tensor;

/// Factor of sigmoid(b) in β.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BetaScale {
    /// Factor 1: β in (0, 1).
    #[default]
    One,
    /// Factor 2: β in (0, 2). The transition I − β k̂ k̂ᵀ may then have a negative eigenvalue (OLMo-Hybrid).
    Two,
}

impl BetaScale {
    /// The factor as a number.
    #[must_use]
    pub const fn factor(self) -> f32 {
        match self {
            Self::One => 1.0,
            Self::Two => 2.0,
        }
    }
}

/// Gates of a GDN layer: [`GdnGates::raw`] or [`GdnGates::given`].
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum GdnGates<'a> {
    /// Raw projections. The kernel computes the log decay −exp(A_log) · softplus(a + dt_bias), with
    /// softplus(x) = log(1 + exp(x)), and β = beta_scale · sigmoid(b), both in f32.
    #[non_exhaustive]
    Raw {
        /// Projection `[B, T, HV]` of the decay, bf16, f16 or f32.
        a: Tensor<'a>,
        /// Projection `[B, T, HV]` of β, bf16, f16 or f32.
        b: Tensor<'a>,
        /// A_log `[HV]`, f32.
        a_log: Tensor<'a>,
        /// Bias `[HV]` of `a`, f32.
        dt_bias: Tensor<'a>,
        /// Factor of sigmoid(b).
        beta_scale: BetaScale,
    },
    /// Log decays and betas, computed by the caller.
    #[non_exhaustive]
    Given {
        /// Log decays `[B, T, HV]`, bf16, f16 or f32.
        g: Tensor<'a>,
        /// Betas `[B, T, HV]`, bf16, f16 or f32.
        beta: Tensor<'a>,
    },
}

impl<'a> GdnGates<'a> {
    /// Gates that the kernel computes from `a` and `b` `[B, T, HV]`, and `a_log` and `dt_bias` `[HV]` (f32). β is in (0, 1).
    #[must_use]
    pub fn raw(a: Tensor<'a>, b: Tensor<'a>, a_log: Tensor<'a>, dt_bias: Tensor<'a>) -> Self {
        Self::Raw {
            a,
            b,
            a_log,
            dt_bias,
            beta_scale: BetaScale::One,
        }
    }

    /// Gates given as log decays and betas, each `[B, T, HV]`.
    #[must_use]
    pub fn given(g: Tensor<'a>, beta: Tensor<'a>) -> Self {
        Self::Given { g, beta }
    }

    /// Sets the factor of sigmoid(b), by default 1. No effect on given gates.
    #[must_use]
    pub fn beta_scale(mut self, scale: BetaScale) -> Self {
        if let Self::Raw { beta_scale, .. } = &mut self {
            *beta_scale = scale;
        }
        self
    }
}

/// Gates of a KDA layer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KdaGates<'a> {
    /// Log decays `[B, T, HV, K]`, one per key channel, or the numbers that they are computed from (see `kind`): bf16, f16 or
    /// f32. Strides of rows, tokens and heads are free.
    pub g: Tensor<'a>,
    /// Function from `g` to the log decay.
    pub kind: KdaDecay<'a>,
    /// β `[B, T, HV]` or its logit (see `beta_kind`), bf16, f16 or f32. Strides of rows and tokens are free.
    pub beta: Tensor<'a>,
    /// Function from `beta` to β.
    pub beta_kind: KdaBeta,
}

impl<'a> KdaGates<'a> {
    /// Creates gates from `g` `[B, T, HV, K]` and `beta` `[B, T, HV]`, and the meanings of both.
    #[must_use]
    pub fn new(g: Tensor<'a>, kind: KdaDecay<'a>, beta: Tensor<'a>, beta_kind: KdaBeta) -> Self {
        Self {
            g,
            kind,
            beta,
            beta_kind,
        }
    }
}

/// Meaning of the `g` in [`KdaGates`].
///
/// `a_log` and `dt_bias` are contiguous. Both have H rows, or both have HV rows.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KdaDecay<'a> {
    /// `g` is the log decay.
    Log,
    /// The log decay is −exp(A_log) · softplus(g + dt_bias), with softplus(x) = log(1 + exp(x)).
    Softplus {
        /// A_log `[H]` or `[HV]`, f32.
        a_log: Tensor<'a>,
        /// Bias `[H, K]` or `[HV, K]` of `g`, f32. Default: 0.
        dt_bias: Option<Tensor<'a>>,
    },
    /// The log decay is lower_bound · sigmoid(exp(A_log) · (g + dt_bias)): a scale, not a clamp.
    LowerBound {
        /// Lower bound of the log decay: finite, below 0.
        lower_bound: f32,
        /// A_log `[H]` or `[HV]`, f32. Without it, exp(A_log) = 1.
        a_log: Option<Tensor<'a>>,
        /// Bias `[H, K]` or `[HV, K]` of `g`, f32. Default: 0.
        dt_bias: Option<Tensor<'a>>,
    },
}

/// Meaning of the `beta` in [`KdaGates`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KdaBeta {
    /// `beta` is β.
    #[default]
    Given,
    /// `beta` is the logit of β: β = sigmoid(beta).
    Logit,
}

/// Operator of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// Gated DeltaNet: one decay per value head.
    Gdn,
    /// Kimi Delta Attention: one decay per key channel.
    Kda,
}

/// Gates of an operator: [`GdnGates`] or [`KdaGates`].
pub trait Gates: sealed::Gates {
    /// The operator.
    const OPERATOR: Operator;
}

impl Gates for GdnGates<'_> {
    const OPERATOR: Operator = Operator::Gdn;
}

impl Gates for KdaGates<'_> {
    const OPERATOR: Operator = Operator::Kda;
}

pub(crate) mod sealed {
    /// Access to the tensors and the form of gates.
    pub trait Gates {
        fn parts(&self) -> super::GateParts<'_>;
    }
}

/// Gates of any operator, as borrowed tensors and their form.
pub struct GateParts<'a> {
    pub(crate) form: GateForm,
    /// `a` or `g`.
    pub(crate) gate: &'a Tensor<'a>,
    /// `b` or `beta`.
    pub(crate) beta: &'a Tensor<'a>,
    pub(crate) a_log: Option<&'a Tensor<'a>>,
    pub(crate) dt_bias: Option<&'a Tensor<'a>>,
}

/// Form of gates: everything but their tensors.
#[derive(Clone, Copy)]
pub struct GateForm {
    /// Whether the gates have one decay per key channel (KDA) instead of one per head (GDN).
    pub(crate) per_channel: bool,
    pub(crate) kind: Gate,
    pub(crate) lower_bound: Option<f32>,
    pub(crate) beta_logit: bool,
    pub(crate) beta_scale: f32,
    /// Names of the gate and the beta of new tokens, then of previous tokens.
    pub(crate) names: &'static [&'static str; 4],
}

const RAW_NAMES: &[&str; 4] = &["a", "b", "previous a", "previous b"];
const GIVEN_NAMES: &[&str; 4] = &["g", "beta", "previous g", "previous beta"];

impl GateForm {
    /// Form of gates that are given as log decays and betas.
    pub(crate) const fn given(per_channel: bool) -> Self {
        Self {
            per_channel,
            kind: Gate::Log,
            lower_bound: None,
            beta_logit: false,
            beta_scale: 1.0,
            names: GIVEN_NAMES,
        }
    }

    /// Form of the gates of a flush, which has no gate tensors. The rank of the ring `decays` gives the operator: GDN has
    /// `[P, HV, R]`, KDA `[P, HV, R, K]`.
    pub(crate) fn of_none(decays: &Tensor<'_>) -> Self {
        Self::given(decays.dims().len() == 4)
    }
}

impl sealed::Gates for GdnGates<'_> {
    #[inline]
    fn parts(&self) -> GateParts<'_> {
        match self {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => GateParts {
                form: GateForm {
                    per_channel: false,
                    kind: Gate::Softplus,
                    lower_bound: None,
                    beta_logit: true,
                    beta_scale: beta_scale.factor(),
                    names: RAW_NAMES,
                },
                gate: a,
                beta: b,
                a_log: Some(a_log),
                dt_bias: Some(dt_bias),
            },
            GdnGates::Given { g, beta } => GateParts {
                form: GateForm::given(false),
                gate: g,
                beta,
                a_log: None,
                dt_bias: None,
            },
        }
    }
}

impl sealed::Gates for KdaGates<'_> {
    #[inline]
    fn parts(&self) -> GateParts<'_> {
        let (kind, lower_bound, a_log, dt_bias) = match &self.kind {
            KdaDecay::Log => (Gate::Log, None, None, None),
            KdaDecay::Softplus { a_log, dt_bias } => {
                (Gate::Softplus, None, Some(a_log), dt_bias.as_ref())
            }
            KdaDecay::LowerBound {
                lower_bound,
                a_log,
                dt_bias,
            } => (
                Gate::LowerBound,
                Some(*lower_bound),
                a_log.as_ref(),
                dt_bias.as_ref(),
            ),
        };
        GateParts {
            form: GateForm {
                kind,
                lower_bound,
                beta_logit: self.beta_kind == KdaBeta::Logit,
                ..GateForm::given(true)
            },
            gate: &self.g,
            beta: &self.beta,
            a_log,
            dt_bias,
        }
    }
}
