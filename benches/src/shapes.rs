//! Layers of published models.

/// Heads of a linear-attention layer; K = V = 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Name on the command line.
    pub name: &'static str,
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV.
    pub value_heads: usize,
}

const fn model(name: &'static str, heads: usize, value_heads: usize) -> Model {
    Model {
        name,
        heads,
        value_heads,
    }
}

/// GDN layers.
pub const GDN: [Model; 3] = [
    model("qwen3-next", 16, 32),
    model("qwen3.5-397b", 16, 64),
    model("qwen3.5-27b", 16, 48),
];

/// KDA layers: Kimi-Linear, a KDA layer with two value heads to a key head, a layer of which a GPU has 12 heads, and
/// GLM-5.3-Flash, whose gate is [`LowerBound`](gated_delta_harness::arguments::KdaDecay::LowerBound).
pub const KDA: [Model; 4] = [
    model("kimi-linear", 32, 32),
    model("kda-gva", 16, 32),
    model("kimi-k3-tp8", 12, 12),
    model("glm-5.3-flash", 64, 64),
];
