//! The one thing in which the operators differ.

use gated_delta_kernels::recurrent::Gate;

use crate::ops::kda_recurrent::{KdaBeta, KdaGate, KdaGates};
use crate::ops::{BetaScale, GdnGates};
use crate::select::Operator;
use crate::shapes::{Named, named};

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
#[derive(Clone, Copy)]
pub struct GateParts<'a> {
    pub(super) operator: Operator,
    pub(super) kind: Gate,
    pub(super) lower_bound: Option<f32>,
    /// `a` or `g`.
    pub(super) gate: Named<'a>,
    /// `b` or `beta`.
    pub(super) beta: Named<'a>,
    pub(super) a_log: Option<Named<'a>>,
    pub(super) dt_bias: Option<Named<'a>>,
    pub(super) beta_logit: bool,
    pub(super) beta_scale: f32,
    /// What the previous tokens' `gate` and `beta` are called.
    pub(super) previous_names: [&'static str; 2],
}

impl sealed::Gates for GdnGates<'_> {
    fn parts(&self) -> GateParts<'_> {
        match self {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                beta_scale,
            } => GateParts {
                operator: Operator::GdnMtp,
                kind: Gate::Softplus,
                lower_bound: None,
                gate: named("a", a),
                beta: named("b", b),
                a_log: Some(named("A_log", a_log)),
                dt_bias: Some(named("dt_bias", dt_bias)),
                beta_logit: true,
                beta_scale: match beta_scale {
                    BetaScale::One => 1.0,
                    BetaScale::Two => 2.0,
                },
                previous_names: ["previous a", "previous b"],
            },
            GdnGates::Given { g, beta } => GateParts {
                operator: Operator::GdnMtp,
                kind: Gate::Log,
                lower_bound: None,
                gate: named("g", g),
                beta: named("beta", beta),
                a_log: None,
                dt_bias: None,
                beta_logit: false,
                beta_scale: 1.0,
                previous_names: ["previous g", "previous beta"],
            },
        }
    }
}

impl sealed::Gates for KdaGates<'_> {
    fn parts(&self) -> GateParts<'_> {
        let (kind, lower_bound, a_log, dt_bias) = match &self.kind {
            KdaGate::Log => (Gate::Log, None, None, None),
            KdaGate::Softplus { a_log, dt_bias } => {
                (Gate::Softplus, None, Some(a_log), dt_bias.as_ref())
            }
            KdaGate::LowerBound {
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
            operator: Operator::KdaRecurrent,
            kind,
            lower_bound,
            gate: named("g", &self.g),
            beta: named("beta", &self.beta),
            a_log: a_log.map(|tensor| named("A_log", tensor)),
            dt_bias: dt_bias.map(|tensor| named("dt_bias", tensor)),
            beta_logit: self.beta_kind == KdaBeta::Logit,
            beta_scale: 1.0,
            previous_names: ["previous g", "previous beta"],
        }
    }
}
