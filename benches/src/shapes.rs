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

/// GDN layers.
pub const GDN: [Model; 3] = [
    Model {
        name: "qwen3-next",
        heads: 16,
        value_heads: 32,
    },
    Model {
        name: "qwen3.5-397b",
        heads: 16,
        value_heads: 64,
    },
    Model {
        name: "qwen3.5-27b",
        heads: 16,
        value_heads: 48,
    },
];
