//! Gates: the one thing in which the operators differ.

use gated_delta_kernels::step::Gate;

use crate::tensor::Tensor;

/// Factor of sigmoid(b).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BetaScale {
    /// β in (0, 1).
    #[default]
    One,
    /// β in (0, 2): states may have negative eigenvalues (OLMo-Hybrid).
    Two,
}

impl BetaScale {
    /// The number.
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
    /// Computed in the kernel: log decay −exp(A_log) · softplus(a + dt_bias), β = sigmoid(b) · beta_scale.
    #[non_exhaustive]
    Raw {
        /// `[B, T, HV]`, bf16, f16 or f32.
        a: Tensor<'a>,
        /// `[B, T, HV]`, bf16, f16 or f32.
        b: Tensor<'a>,
        /// `[HV]`, f32.
        a_log: Tensor<'a>,
        /// `[HV]`, f32.
        dt_bias: Tensor<'a>,
        /// Factor of sigmoid(b).
        beta_scale: BetaScale,
    },
    /// Given by the caller.
    #[non_exhaustive]
    Given {
        /// Log decay, `[B, T, HV]`, bf16, f16 or f32.
        g: Tensor<'a>,
        /// `[B, T, HV]`, bf16, f16 or f32.
        beta: Tensor<'a>,
    },
}

impl<'a> GdnGates<'a> {
    /// Computed in the kernel, of `a` and `b` `[B, T, HV]`, `a_log` and `dt_bias` `[HV]` (f32); β in (0, 1).
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

    /// Log decay and β, each `[B, T, HV]`.
    #[must_use]
    pub fn given(g: Tensor<'a>, beta: Tensor<'a>) -> Self {
        Self::Given { g, beta }
    }

    /// With another factor of sigmoid(b) than one; given gates have none.
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
    /// `[B, T, HV, K]`, bf16, f16 or f32: the log decay of every key channel, or what it is computed from. Strides of
    /// rows, tokens and heads are free.
    pub g: Tensor<'a>,
    /// What `g` is.
    pub kind: KdaDecay<'a>,
    /// `[B, T, HV]`, bf16, f16 or f32: β or its logit. Strides of rows and tokens are free.
    pub beta: Tensor<'a>,
    /// What `beta` is.
    pub beta_kind: KdaBeta,
}

impl<'a> KdaGates<'a> {
    /// `g` `[B, T, HV, K]` and `beta` `[B, T, HV]`, and what they are.
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

/// What the `g` of [`KdaGates`] is.
///
/// `a_log` and `dt_bias` have H or HV rows, both the same, and are contiguous.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KdaDecay<'a> {
    /// The log decay.
    Log,
    /// Log decay −exp(A_log) · softplus(g + dt_bias).
    Softplus {
        /// `[H]` or `[HV]`, f32.
        a_log: Tensor<'a>,
        /// `[H, K]` or `[HV, K]`, f32; without it, 0.
        dt_bias: Option<Tensor<'a>>,
    },
    /// Log decay lower_bound · sigmoid(exp(A_log) · (g + dt_bias)): a scale, not a clamp.
    LowerBound {
        /// Finite, below 0.
        lower_bound: f32,
        /// `[H]` or `[HV]`, f32; without it, exp(A_log) = 1.
        a_log: Option<Tensor<'a>>,
        /// `[H, K]` or `[HV, K]`, f32; without it, 0.
        dt_bias: Option<Tensor<'a>>,
    },
}

/// What the `beta` of [`KdaGates`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KdaBeta {
    /// β.
    #[default]
    Given,
    /// Its logit: β = sigmoid(beta).
    Logit,
}

/// Gates of an operator: [`GdnGates`] or [`KdaGates`].
pub trait Gates: sealed::Gates {}

impl Gates for GdnGates<'_> {}
impl Gates for KdaGates<'_> {}

pub(crate) mod sealed {
    /// Says what the gates are made of.
    pub trait Gates {
        fn parts(&self) -> super::GateParts<'_>;
    }
}

/// Gates of any operator.
pub struct GateParts<'a> {
    pub(crate) form: GateForm,
    /// `a` or `g`.
    pub(crate) gate: &'a Tensor<'a>,
    /// `b` or `beta`.
    pub(crate) beta: &'a Tensor<'a>,
    pub(crate) a_log: Option<&'a Tensor<'a>>,
    pub(crate) dt_bias: Option<&'a Tensor<'a>>,
}

/// What gates are, besides their tensors.
#[derive(Clone, Copy)]
pub struct GateForm {
    /// A decay for each key channel.
    pub(crate) per_channel: bool,
    pub(crate) kind: Gate,
    pub(crate) lower_bound: Option<f32>,
    pub(crate) beta_logit: bool,
    pub(crate) beta_scale: f32,
    /// What the gate and the beta of the tokens are called, and those of previous ones.
    pub(crate) names: &'static [&'static str; 4],
}

const RAW_NAMES: &[&str; 4] = &["a", "b", "previous a", "previous b"];
const GIVEN_NAMES: &[&str; 4] = &["g", "beta", "previous g", "previous beta"];

impl GateForm {
    /// Log decays and betas.
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

    /// Of no tokens: of what has left `decays` in a ring, GDN's `[P, HV, R]` or KDA's `[P, HV, R, K]`.
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
