//! What is fixed for a layer: weights, and how its gates are computed.

use crate::step::{Activation, BetaScale, Gates, GdnGates, KdaBeta, KdaDecay, KdaGates};
#[cfg(doc)]
use crate::step::{Convolution, Norm};
use crate::tensor::Tensor;

/// The weights of a layer between its projections; H, and the activations, as well.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Weights<'a, P> {
    /// H.
    pub heads: usize,
    /// [`Convolution::weight`], `[D, W]`.
    pub conv: Tensor<'a>,
    /// [`Convolution::bias`], `[D]`.
    pub conv_bias: Option<Tensor<'a>>,
    /// [`Convolution::activation`].
    pub conv_activation: Activation,
    /// Parameters of the gates.
    pub parameters: P,
    /// [`Norm::weight`], `[V]`.
    pub norm: Tensor<'a>,
    /// [`Norm::eps`].
    pub eps: f32,
    /// [`Norm::activation`].
    pub norm_activation: Activation,
}

impl<'a, P> Weights<'a, P> {
    /// H = `heads`, `conv` `[D, W]`, `norm` `[V]`. The convolution has no bias, and SiLU; z has SiLU too, which the field
    /// `norm_activation` changes.
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
    /// The gates of tokens.
    type Gates: Gates;

    /// The gates of tokens that bring `gate` (a or g) and `beta` (b or β).
    fn gates(&self, gate: Tensor<'a>, beta: Tensor<'a>) -> Self::Gates;
}

pub(super) mod sealed {
    /// Says whether a decay is one for each key channel.
    pub trait Parameters {
        const PER_CHANNEL: bool;
    }
}

/// Parameters of [`GdnGates::raw`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GdnParameters<'a> {
    /// `[HV]`, f32.
    pub a_log: Tensor<'a>,
    /// `[HV]`, f32.
    pub dt_bias: Tensor<'a>,
    /// Factor of sigmoid(b).
    pub beta_scale: BetaScale,
}

impl<'a> GdnParameters<'a> {
    /// `A_log` and `dt_bias` `[HV]`, f32; β is in (0, 1), which the field `beta_scale` changes.
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
    /// What the projection's g is, with `A_log` and `dt_bias`.
    pub kind: KdaDecay<'a>,
    /// What the projection's β is.
    pub beta_kind: KdaBeta,
}

impl<'a> KdaParameters<'a> {
    /// The decay is of this kind; β comes as its logit, which the field `beta_kind` changes.
    #[must_use]
    pub fn new(kind: KdaDecay<'a>) -> Self {
        let beta_kind = KdaBeta::Logit;
        Self { kind, beta_kind }
    }
}

impl sealed::Parameters for GdnParameters<'_> {
    const PER_CHANNEL: bool = false;
}

impl sealed::Parameters for KdaParameters<'_> {
    const PER_CHANNEL: bool = true;
}

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
