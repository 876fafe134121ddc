//! Tests of the norm gated by z.

use gated_delta_reference::gate::Activation;
use gated_delta_reference::norm::{GatedNorm, gated_norm};

use crate::assert_near;

const NORM: GatedNorm = GatedNorm {
    z: &[0.0; 4],
    weight: &[1.0, 2.0],
    eps: 12.5,
    activation: Activation::Sigmoid,
};
/// Two heads: the root of mean square plus eps is 5 in the first, √12.5 in the second.
const O: [f64; 4] = [3.0, 4.0, 0.0, 0.0];

#[test]
fn two_heads_by_hand() {
    let ln3 = 3.0_f64.ln();
    let z = [0.0, ln3, 1.0, 1.0];
    let sigmoid = GatedNorm { z: &z, ..NORM };
    assert_near(&gated_norm(&sigmoid, &O).unwrap(), &[0.3, 1.2, 0.0, 0.0]);
    let silu = GatedNorm {
        activation: Activation::Silu,
        ..sigmoid
    };
    assert_near(&gated_norm(&silu, &O).unwrap(), &[0.0, 1.2 * ln3, 0.0, 0.0]);
    let bare = GatedNorm {
        z: &[1.0; 4],
        eps: 1e-6,
        activation: Activation::None,
        ..NORM
    };
    let root = (2.0_f64 + 1e-6).sqrt();
    let normed = gated_norm(&bare, &[0.0, 2.0, 1e-3, 0.0]).unwrap();
    assert_near(&normed, &[0.0, 4.0 / root, 1e-3 / 1.5e-6_f64.sqrt(), 0.0]);
}

#[test]
fn lengths_are_checked() {
    for (norm, o, wanted) in [
        (
            NORM,
            &O[1..],
            "o: wanted a multiple of 2 elements (one value head, V), got 3",
        ),
        (NORM, &O[2..], "z as o: wanted length 2, got 4"),
        (
            GatedNorm {
                weight: &[],
                ..NORM
            },
            &O[..],
            "value_dim: wanted at least 1, got 0",
        ),
    ] {
        assert_eq!(gated_norm(&norm, o).unwrap_err().to_string(), wanted);
    }
}
