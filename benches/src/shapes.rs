//! Layers of published models.

use gated_delta::{Activation, BetaScale};

/// Heads of a linear-attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Name on the command line.
    pub name: &'static str,
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV.
    pub value_heads: usize,
    /// Key head dim K, if the model has one of its own; otherwise the options decide.
    pub dim: Option<usize>,
    /// Activation of z, in the layer's norm.
    pub norm: Activation,
    /// Factor of β's sigmoid.
    pub beta: BetaScale,
}

const fn model(name: &'static str, heads: usize, value_heads: usize) -> Model {
    Model {
        name,
        heads,
        value_heads,
        dim: None,
        norm: Activation::Silu,
        beta: BetaScale::One,
    }
}

impl Model {
    /// Heads, H and HV.
    #[must_use]
    pub const fn head_counts(&self) -> [usize; 2] {
        [self.heads, self.value_heads]
    }

    const fn normed_by(self, norm: Activation) -> Self {
        Self { norm, ..self }
    }
}

/// Olmo-Hybrid's layer, with K = 96 and V = 192.
pub const OLMO: Model = Model {
    dim: Some(96),
    beta: BetaScale::Two,
    ..model("olmo-hybrid", 30, 30)
};

/// A layer with as many value heads as query/key heads. No published GDN model with K = V has one.
pub const EQUAL_HEADS: Model = model("gdn-equal-heads", 32, 32);

/// GDN layers of published models.
pub const GDN: [Model; 5] = [
    model("qwen3-next", 16, 32),
    model("qwen3.5-397b", 16, 64),
    model("qwen3.5-27b", 16, 48),
    model("qwen4-exp", 16, 48).normed_by(Activation::Sigmoid),
    OLMO,
];

/// KDA layers: Kimi-Linear, a layer with two value heads for a key head, a layer with 12 heads on each GPU, and GLM-5.3-Flash, whose gate
/// is [`LowerBound`](gated_delta_harness::arguments::DecayKind::LowerBound).
pub const KDA: [Model; 4] = [
    model("kimi-linear", 32, 32).normed_by(Activation::Sigmoid),
    model("kda-gva", 16, 32).normed_by(Activation::Sigmoid),
    model("kimi-k3-tp8", 12, 12).normed_by(Activation::Sigmoid),
    model("glm-5.3-flash", 64, 64).normed_by(Activation::Sigmoid),
];
