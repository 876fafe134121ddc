//! Tests of the convolution.

use gated_delta_reference::Error;
use gated_delta_reference::conv::{Conv, convolve, window_after};
use gated_delta_reference::gate::Activation;

use crate::{assert_bits, assert_near, values};

const CONV: Conv = Conv {
    channels: 2,
    width: 3,
    weight: &[1.0, 10.0, 100.0, 1.0, 0.0, -1.0],
    bias: Some(&[0.5, 0.0]),
    activation: Activation::None,
};
/// Window: inputs 1 and 2 of the first channel, 3 and 4 of the second.
const WINDOW: [f64; 4] = [1.0, 2.0, 3.0, 4.0];
/// Tokens: inputs 5 and 7 of the first channel, 6 and 8 of the second.
const X: [f64; 4] = [5.0, 6.0, 7.0, 8.0];

#[test]
fn two_tokens_by_hand() {
    let y = convolve(&CONV, &WINDOW, &X).unwrap();
    assert_bits(&y, &[521.5, -3.0, 752.5, -4.0]);
    let unbiased = Conv { bias: None, ..CONV };
    let y = convolve(&unbiased, &WINDOW, &X).unwrap();
    assert_bits(&y, &[521.0, -3.0, 752.0, -4.0]);
    assert_eq!(convolve(&CONV, &WINDOW, &[]), Ok(Vec::new()));
}

#[test]
fn a_window_holds_the_last_inputs() {
    for (keep, wanted) in [
        (0, WINDOW),
        (1, [2.0, 5.0, 4.0, 6.0]),
        (2, [5.0, 7.0, 6.0, 8.0]),
    ] {
        assert_bits(&window_after(&CONV, &WINDOW, &X, keep).unwrap(), &wanted);
    }
}

#[test]
fn a_width_of_one_has_no_window() {
    let conv = Conv {
        width: 1,
        weight: &[2.0, 3.0],
        bias: None,
        ..CONV
    };
    assert_eq!(convolve(&conv, &[], &X), Ok(vec![10.0, 18.0, 14.0, 24.0]));
    assert_eq!(window_after(&conv, &[], &X, 2), Ok(Vec::new()));
}

#[test]
fn activations_by_hand() {
    let ln3 = 3.0_f64.ln();
    let of = |activation: Activation| [0.0, ln3, -ln3].map(|x| activation.of(x));
    assert_near(&of(Activation::None), &[0.0, ln3, -ln3]);
    assert_near(&of(Activation::Silu), &[0.0, 0.75 * ln3, -0.25 * ln3]);
    assert_near(&of(Activation::Sigmoid), &[0.5, 0.75, 0.25]);
    let conv = Conv {
        channels: 1,
        width: 2,
        weight: &[1.0, 1.0],
        bias: None,
        activation: Activation::Silu,
    };
    let y = convolve(&conv, &[1.0], &[ln3 - 1.0]).unwrap();
    assert_near(&y, &[0.75 * ln3]);
    for x in [1e4, -1e4, f32::MAX.into(), f32::MIN.into()] {
        assert!(Activation::Silu.of(x).is_finite(), "{x}");
    }
}

#[test]
fn tokens_may_come_in_two_parts() {
    for width in 1..=4 {
        let (weight, bias) = (values(3 * width, 1), values(3, 2));
        let conv = Conv {
            channels: 3,
            width,
            weight: &weight,
            bias: Some(&bias),
            activation: Activation::Silu,
        };
        let (window, x) = (values(3 * (width - 1), 3), values(3 * 7, 4));
        let whole = convolve(&conv, &window, &x).unwrap();
        for keep in 0..=7 {
            let (first, second) = x.split_at(3 * keep);
            let between = window_after(&conv, &window, &x, keep).unwrap();
            let mut parts = convolve(&conv, &window, first).unwrap();
            parts.extend(convolve(&conv, &between, second).unwrap());
            assert_bits(&parts, &whole);
            let after = window_after(&conv, &between, second, 7 - keep).unwrap();
            assert_bits(&after, &window_after(&conv, &window, &x, 7).unwrap());
        }
    }
}

#[test]
fn lengths_are_checked() {
    let fails = |conv: Conv, window: &[f64], x: &[f64], wanted: &str| {
        let errors = [
            convolve(&conv, window, x).unwrap_err(),
            window_after(&conv, window, x, 0).unwrap_err(),
        ];
        assert_eq!(errors.map(|error: Error| error.to_string()), [wanted; 2]);
    };
    fails(
        CONV,
        &WINDOW[1..],
        &X,
        "window [D, W - 1]: wanted length 4, got 3",
    );
    fails(
        CONV,
        &WINDOW,
        &X[1..],
        "x: wanted a multiple of 2 elements (one token, D), got 3",
    );
    let no_width = Conv { width: 0, ..CONV };
    fails(no_width, &WINDOW, &X, "width: wanted at least 1, got 0");
    let no_channels = Conv {
        channels: 0,
        ..CONV
    };
    fails(
        no_channels,
        &WINDOW,
        &X,
        "channels: wanted at least 1, got 0",
    );
    let weight = Conv {
        weight: &WINDOW,
        ..CONV
    };
    fails(weight, &WINDOW, &X, "weight [D, W]: wanted length 6, got 4");
    let bias = Conv {
        bias: Some(&[0.0]),
        ..CONV
    };
    fails(bias, &WINDOW, &X, "bias [D]: wanted length 2, got 1");
    let error = window_after(&CONV, &WINDOW, &X, 3).unwrap_err();
    assert_eq!(error.to_string(), "x [keep, D]: wanted length 6, got 4");
}
