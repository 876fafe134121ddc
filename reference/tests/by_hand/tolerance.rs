//! Tests of the comparisons: results that pass, and errors that are caught.

use gated_delta_reference::gate::Activation;
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::tolerance::{
    COMPUTED_IN_CHUNKS, COMPUTED_IN_F32, CONVOLVED, DType, FACTOR, MORE_DECAY, Tolerance,
    UNDERFLOW, excess, norm, of_decays, of_factors, of_norm, of_underflow, relative_error,
    relative_error_of, within,
};
use half::{bf16, f16};

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

#[test]
fn roundings_are_those_of_the_dtypes() {
    let mut values = vec![
        0.0,
        -0.0,
        INF,
        -INF,
        f64::MIN_POSITIVE,
        f64::MAX,
        1.0 - f64::EPSILON,
    ];
    for exponent in -160..=130 {
        for significand in [
            1.0,
            1.001953125,
            1.00390625,
            1.0048828125,
            1.5,
            1.9999999,
            1.998,
        ] {
            values.extend([1.0, -1.0].map(|sign| sign * significand * 2f64.powi(exponent)));
        }
    }
    // On either side of the tie between the largest number and infinity.
    values.extend([65519.999, 65520.0, 65520.001].iter());
    let largest = 2f64.powi(128);
    values.extend([24, 8].map(|bits| largest - 2f64.powi(127 - bits)));
    values.extend([24, 8].map(|bits| (largest - 2f64.powi(127 - bits)).next_down()));
    for x in values {
        let of_crates = [
            f64::from(x as f32),
            // A conversion by way of f32, as some instructions do it, would round a value next to a tie twice.
            bf16::from_f64_const(x).into(),
            f16::from_f64_const(x).into(),
        ];
        let of_ours = DTYPES.map(|dtype| dtype.round(x));
        assert_eq!(
            of_ours.map(f64::to_bits),
            of_crates.map(f64::to_bits),
            "{x:e}"
        );
    }
    assert!(DTYPES.iter().all(|dtype| dtype.round(NAN).is_nan()));
}

#[test]
fn excess_is_what_rounding_does_not_explain() {
    // Neighbours of bf16 between 1 and 2 are 2⁻⁷ apart.
    assert_eq!(excess(1.0, 1.0 + 0.00390625, DType::Bf16), 0.0);
    assert_eq!(excess(1.0078125, 1.0 + 0.00390625, DType::Bf16), 0.0);
    assert_eq!(excess(1.0, 1.0 + 0.00390625 + 0.25, DType::Bf16), 0.25);
    assert_eq!(
        excess(1.0, 1.0 + 0.00390625, DType::F32),
        0.00390625 - 2f64.powi(-24)
    );
    assert_eq!(excess(0.0, 0.0, DType::F32), 0.0);
    assert_eq!(excess(-0.0, 0.0, DType::Bf16), 0.0);
    // Below the normal numbers the distance stays: 2⁻²⁴ for f16.
    assert_eq!(excess(0.0, 2f64.powi(-25), DType::F16), 0.0);
    assert_eq!(excess(0.0, 2f64.powi(-24), DType::F16), 2f64.powi(-25));
}

#[test]
fn what_is_no_number_is_infinitely_far() {
    for dtype in DTYPES {
        for (got, exact) in [
            (NAN, 1.0),
            (1.0, NAN),
            (NAN, NAN),
            (INF, 1.0),
            (1.0, INF),
            (INF, -INF),
            (NAN, INF),
        ] {
            assert_eq!(excess(got, exact, dtype), INF, "{got}, {exact}");
            assert!(within(&[0.0, got], &[0.0, exact], dtype, 1e300).is_err());
        }
        assert_eq!(within(&[INF, -INF], &[INF, -INF], dtype, 0.0), Ok(0.0));
    }
    // A value becomes infinite if rounding makes it so, and only then.
    assert_eq!(excess(INF, 65520.0, DType::F16), 0.0);
    assert_eq!(excess(65504.0, 65520.0, DType::F16), INF);
    assert_eq!(excess(INF, 65519.0, DType::F16), INF);
    assert_eq!(excess(INF, 65520.0, DType::Bf16), INF);
}

#[test]
fn an_excess_is_caught_and_named() {
    let exact = [1.0, 2.0, 3.0, 4.0];
    let got = [1.0, 2.5, 3.0, 4.25];
    let off = (0.25f64 + 0.0625).sqrt();
    let near = within(&got, &exact, DType::F32, 2.0 * off).unwrap();
    assert!((near - 0.5).abs() < 1e-6);
    let far = within(&got, &exact, DType::F32, 0.5).unwrap_err();
    assert_eq!((far.element, far.exact, far.got), (1, 2.0, 2.5));
    assert_eq!(
        far.to_string(),
        "off by 5.6e-1 besides rounding, allowed 5.0e-1; element 1: wanted 2, got 2.5"
    );
    // With a bound of 0, only the rounding is allowed.
    assert_eq!(within(&exact, &exact, DType::Bf16, 0.0), Ok(0.0));
    assert_eq!(within(&[0.0; 4], &[0.0; 4], DType::F32, 0.0), Ok(0.0));
    assert!(within(&got, &exact, DType::F32, 0.0).is_err());
    assert!(within(&[1e-30], &[0.0], DType::F32, 0.0).is_err());
}

#[test]
fn a_bound_that_is_no_number_admits_nothing() {
    for allowed in [NAN, INF, -1.0] {
        assert!(
            within(&[1.0], &[1.0], DType::F32, allowed).is_err(),
            "{allowed}"
        );
    }
}

#[test]
fn lengths_are_compared() {
    let far = within(&[1.0, 2.0], &[1.0], DType::F32, 1.0).unwrap_err();
    assert_eq!((far.off, far.element, far.got), (INF, 1, 2.0));
    assert!(far.exact.is_nan());
    assert!(within(&[], &[1.0], DType::F32, 1.0).is_err());
    assert_eq!(within(&[], &[], DType::F32, 1.0), Ok(0.0));
    assert_eq!(relative_error(&[1.0], &[1.0, 0.0]), INF);
}

#[test]
fn relative_errors() {
    let exact = [3.0, 0.0, 0.0, 4.0];
    assert_eq!(relative_error(&[3.0, 0.0, 0.0, 4.5], &exact), 0.1);
    assert_eq!(relative_error_of([(0.5, 1.0), (0.0, 0.0)]), 0.5);
    assert_eq!(relative_error(&[0.0; 4], &[0.0; 4]), 0.0);
    assert_eq!(relative_error(&[1e-9, 0.0, 0.0, 0.0], &[0.0; 4]), INF);
    for (got, exact) in [
        (NAN, 1.0),
        (1.0, NAN),
        (NAN, NAN),
        (INF, 1.0),
        (1.0, INF),
        (INF, INF),
    ] {
        assert_eq!(
            relative_error(&[1.0, got], &[1.0, exact]),
            INF,
            "{got}, {exact}"
        );
    }
}

#[test]
fn norms() {
    assert_eq!(norm(&[3.0, -4.0]), 5.0);
    assert_eq!(norm(&[]), 0.0);
    assert!(norm(&[1.0, NAN]).is_nan() && norm(&[-INF]) == INF);
}

/// States 2 and 4 that have decayed by exp(-1) and exp(-3).
#[test]
fn decays_add_by_their_sum() {
    let decayed = |part: f64| [2.0 * (-part).exp(), 4.0 * (-3.0 * part).exp(), NAN, INF];
    let got = of_decays(&decayed(1.0), &decayed(1.0 + MORE_DECAY));
    let [x, y, ..] = decayed(1.0);
    let wanted = 2e-6 * norm(&[x, 3.0 * y]);
    assert!(
        (got / wanted - 1.0).abs() < 1e-3,
        "got {got}, wanted {wanted}"
    );
    assert_eq!(of_decays(&[1.0], &[1.0]), 0.0);
}

#[test]
fn keys_change_what_is_finite() {
    assert_eq!(
        of_factors(&[1.0, 2.0, NAN, INF], &[4.0, -2.0, 1.0, INF]),
        5.0
    );
    assert_eq!(of_factors(&[], &[]), 0.0);
}

/// Fails if a tolerance is changed: such a change has to be made here too.
#[test]
fn tolerances() {
    assert_eq!(DTYPES.map(DType::tolerance), [1e-5, 4e-3, 4e-3]);
    let of = |Tolerance { state, output, .. }| (state, output);
    assert_eq!(of(Tolerance::RECURRENT), (1e-5, 1e-6));
    assert_eq!(of(Tolerance::PARALLEL), (3e-4, 3e-4));
    assert_eq!(of(Tolerance::PARALLEL_F32), (2e-5, 1e-5));
    assert_eq!(of(Tolerance::CHUNKED), (1e-3, 1e-3));
    let all = [
        Tolerance::RECURRENT,
        Tolerance::PARALLEL,
        Tolerance::PARALLEL_F32,
        Tolerance::CHUNKED,
    ];
    assert_eq!(all.map(|of| of.least), [0.0, UNDERFLOW, UNDERFLOW, 6e-7]);
    assert_eq!(all.map(|of| of.terms), [0.2, 0.1, 1.0, 0.0]);
    assert_eq!(
        all.map(|of| of.factors * FACTOR),
        [0.0, 0.0, 0.0, 4.0 / 4096.0]
    );
    assert_eq!(of_underflow(4), 2e-12);
    assert_eq!([CONVOLVED, UNDERFLOW], [1e-6, 1e-36]);
    assert_eq!([COMPUTED_IN_F32, COMPUTED_IN_CHUNKS], [1e-6, 5e-6]);
}

/// Factors of 1/2 and 3/2 for o of 1: e² = off² (1/4 + 1/4) in each element.
#[test]
fn a_norm_multiplies_errors_element_by_element() {
    let gated = GatedNorm {
        z: &[0.0; 4],
        weight: &[1.0, 1.0, 3.0, 3.0],
        eps: 1e-30,
        activation: Activation::Sigmoid,
    };
    let bound = of_norm(&gated, &[1.0; 4], 0.1).unwrap();
    let wanted = 0.1 * (0.5f64 * (0.25 + 0.25 + 2.25 + 2.25)).sqrt();
    assert!(
        (bound / wanted - 1.0).abs() < 1e-4,
        "got {bound}, wanted {wanted}"
    );
    assert_eq!(of_norm(&gated, &[NAN, 1.0, 1.0, 1.0], 0.1), Ok(0.0));
}
