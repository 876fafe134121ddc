//! Weights of a layer, and the parameters of its gates.

use crate::step::{Activation, BetaScale, Gates, GdnGates, KdaBeta, KdaDecay, KdaGates};
#[cfg(doc)]
use crate::step::{Convolution, Norm};
use crate::tensor::Tensor;

/// Weights of a layer between its projections, with H and the activations.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Weights<'a, P> {
    /// H, the number of query/key heads.
    pub heads: usize,
    /// Weight of the convolution, `[D, W]`: see [`Convolution::weight`].
    pub conv: Tensor<'a>,
    /// Bias of the convolution, `[D]`, if it has one: see [`Convolution::bias`].
    pub conv_bias: Option<Tensor<'a>>,
    /// Activation of the convolution, by default SiLU: see [`Convolution::activation`].
    pub conv_activation: Activation,
    /// Parameters of the gates.
    pub parameters: P,
    /// Weight of the norm, `[V]`: see [`Norm::weight`].
    pub norm: Tensor<'a>,
    /// Epsilon of the norm: see [`Norm::eps`].
    pub eps: f32,
    /// Activation of z, by default SiLU: see [`Norm::activation`].
    pub norm_activation: Activation,
}

impl<'a, P> Weights<'a, P> {
    /// Weights with H = `heads`, `conv` `[D, W]` and `norm` `[V]`. The convolution has no bias, and its activation is SiLU. The
    /// activation of z is SiLU too; the field `norm_activation` sets another.
    #[must_use]
    pub fn new(heads: usize, conv: Tensor<'a>, parameters: P, norm: Tensor<'a>, eps: f32) -> Self {
        Self {
            heads,
            conv,
            conv_bias: None,
            conv_activation: Activation::Silu,
            parameters,
            norm,
            eps,
            norm_activation: Activation::Silu,
        }
    }
}

/// Parameters of gates: [`GdnParameters`] or [`KdaParameters`].
pub trait Parameters<'a>: Copy + sealed::Parameters {
    /// The gates that these parameters make.
    type Gates: Gates;

    /// The gates of tokens with the inputs `gate` (a or g) and `beta` (b or β).
    fn gates(&self, gate: Tensor<'a>, beta: Tensor<'a>) -> Self::Gates;
}

pub(super) mod sealed {
    /// Keeps other crates from implementing [`super::Parameters`].
    pub trait Parameters {}
}

/// Parameters of [`GdnGates::raw`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GdnParameters<'a> {
    /// `A_log`, `[HV]`, f32.
    pub a_log: Tensor<'a>,
    /// `dt_bias`, `[HV]`, f32.
    pub dt_bias: Tensor<'a>,
    /// Factor of sigmoid(b), by default 1.
    pub beta_scale: BetaScale,
}

impl<'a> GdnParameters<'a> {
    /// `A_log` and `dt_bias`, both `[HV]` and f32. β is in (0, 1); the field `beta_scale` sets another factor.
    #[must_use]
    pub fn new(a_log: Tensor<'a>, dt_bias: Tensor<'a>) -> Self {
        Self {
            a_log,
            dt_bias,
            beta_scale: BetaScale::One,
        }
    }
}

/// Parameters of [`KdaGates::new`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KdaParameters<'a> {
    /// Kind of the decay, with `A_log` and `dt_bias`.
    pub kind: KdaDecay<'a>,
    /// Whether the projection gives β or its logit. The default is the logit.
    pub beta_kind: KdaBeta,
}

impl<'a> KdaParameters<'a> {
    /// A decay of `kind`. β is given as its logit; the field `beta_kind` sets another form.
    #[must_use]
    pub fn new(kind: KdaDecay<'a>) -> Self {
        let beta_kind = KdaBeta::Logit;
        Self { kind, beta_kind }
    }
}

impl sealed::Parameters for GdnParameters<'_> {}
impl sealed::Parameters for KdaParameters<'_> {}

impl<'a> Parameters<'a> for GdnParameters<'a> {
    type Gates = GdnGates<'a>;

    #[inline]
    fn gates(&self, a: Tensor<'a>, b: Tensor<'a>) -> GdnGates<'a> {
        GdnGates::raw(a, b, self.a_log, self.dt_bias).beta_scale(self.beta_scale)
    }
}

impl<'a> Parameters<'a> for KdaParameters<'a> {
    type Gates = KdaGates<'a>;

    #[inline]
    fn gates(&self, g: Tensor<'a>, beta: Tensor<'a>) -> KdaGates<'a> {
        KdaGates::new(g, self.kind, beta, self.beta_kind)
    }
}
