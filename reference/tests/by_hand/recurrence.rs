//! Tests of the recurrence and of the gates alone.

use gated_delta_reference::Error;
use gated_delta_reference::gate::{lower_bound_log_decay, sigmoid, softplus, softplus_log_decay};
use gated_delta_reference::recurrence::{Token, default_scale, normalise, recurrence};

use crate::assert_near;

fn tokens() -> [Token; 2] {
    let half = 0.5_f64.ln();
    [
        Token {
            q: vec![1.0, 1.0],
            k: vec![1.0, 0.0],
            v: vec![4.0, 8.0],
            log_decay: vec![half, half],
            beta: 0.5,
        },
        Token {
            q: vec![2.0, 0.0],
            k: vec![0.5, 0.5],
            v: vec![1.0, 1.0],
            log_decay: vec![half, 0.0],
            beta: 1.0,
        },
    ]
}

#[test]
fn two_tokens_by_hand() {
    let steps = recurrence(&[1.0, 2.0, 3.0, 4.0], &tokens()).unwrap();
    let [first, second] = steps.as_slice() else {
        panic!("{} steps", steps.len())
    };

    // S = [[0.5, 1], [1.5, 2]], S k = [0.5, 1.5], delta = 0.5 [3.5, 6.5].
    assert_near(&first.state, &[2.25, 1.0, 4.75, 2.0]);
    assert_near(&first.o, &[3.25, 6.75]);

    // Only the first channel decays: S = [[1.125, 1], [2.375, 2]], S k = [1.0625, 2.1875].
    assert_near(&second.state, &[1.09375, 0.96875, 1.78125, 1.40625]);
    assert_near(&second.o, &[2.1875, 3.5625]);
}

#[test]
fn more_values_than_keys() {
    let token = Token {
        q: vec![3.0],
        k: vec![2.0],
        v: vec![5.0, 7.0],
        log_decay: vec![0.0],
        beta: 1.0,
    };
    let steps = recurrence(&[1.0, 2.0], &[token]).unwrap();
    // delta = [5 - 2, 7 - 4].
    assert_near(&steps[0].state, &[7.0, 8.0]);
    assert_near(&steps[0].o, &[21.0, 24.0]);
}

#[test]
fn no_tokens_no_steps() {
    assert_eq!(recurrence(&[1.0], &[]), Ok(Vec::new()));
}

#[test]
fn lengths_are_checked() {
    let mut tokens = tokens();
    let wrong = |name, shape: &str, wanted, got| {
        Err(Error::Length {
            name,
            shape: shape.to_owned(),
            wanted,
            got,
        })
    };
    assert_eq!(
        recurrence(&[0.0; 5], &tokens),
        wrong("state", "[V, K]", 4, 5)
    );
    tokens[1].log_decay.push(0.0);
    assert_eq!(
        recurrence(&[0.0; 4], &tokens),
        wrong("log_decay", "[K]", 2, 3)
    );
    tokens[1].v.pop();
    assert_eq!(recurrence(&[0.0; 4], &tokens), wrong("v", "[V]", 2, 1));
}

#[test]
fn normalisation() {
    let norm = 25.000001_f64.sqrt();
    assert_near(
        &normalise(&[3.0, 4.0], true, 1.0),
        &[3.0 / norm, 4.0 / norm],
    );
    assert_near(
        &normalise(&[3.0, 4.0], true, 0.5),
        &[1.5 / norm, 2.0 / norm],
    );
    assert_near(&normalise(&[3.0, 4.0], false, 0.5), &[1.5, 2.0]);
    assert_eq!(normalise(&[0.0, 0.0], true, 1.0), [0.0, 0.0]);
    assert_eq!(default_scale(64), 0.125);
}

#[test]
fn gates_by_hand() {
    let ln2 = 2.0_f64.ln();
    assert_near(
        &[softplus(0.0), softplus(-800.0), softplus(800.0)],
        &[ln2, 0.0, 800.0],
    );
    // softplus(ln 3) = ln 4, softplus(-ln 3) = ln(4/3).
    let ln3 = 3.0_f64.ln();
    assert_near(
        &[softplus(ln3), softplus(-ln3)],
        &[4.0_f64.ln(), (4.0_f64 / 3.0).ln()],
    );
    // Where 1 + exp(x) rounds to 1, softplus(x) is exp(x).
    assert_eq!(softplus(-50.0), (-50.0_f64).exp());
    assert_near(
        &[sigmoid(0.0), sigmoid(ln3), sigmoid(-ln3)],
        &[0.5, 0.75, 0.25],
    );
    // exp(a_log) = 2, softplus(1 - 1) = ln 2.
    assert_near(&[softplus_log_decay(1.0, ln2, -1.0)], &[-2.0 * ln2]);
    // sigmoid(2 (ln 3 / 2 + 0)) = 3/4.
    assert_near(
        &[lower_bound_log_decay(0.0, -5.0, ln2, ln3 / 2.0)],
        &[-3.75],
    );
}

#[test]
fn extreme_gates_are_no_nan() {
    let extremes = [
        0.0,
        1e4,
        -1e4,
        100.0,
        -100.0,
        f32::MAX.into(),
        f32::MIN.into(),
    ];
    for x in extremes {
        assert!((0.0..=1.0).contains(&sigmoid(x)), "sigmoid({x})");
        for a_log in extremes {
            for log_decay in [
                softplus_log_decay(x, a_log, 0.0),
                lower_bound_log_decay(x, -5.0, a_log, 0.0),
            ] {
                assert!(
                    (0.0..=1.0).contains(&log_decay.exp()),
                    "x = {x}, a_log = {a_log}: {log_decay}"
                );
            }
        }
    }
    assert_eq!(softplus_log_decay(-1e4, 100.0, 0.0), 0.0);
    assert_eq!(softplus_log_decay(1e4, 100.0, 0.0).exp(), 0.0);
}
