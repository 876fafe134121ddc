//! Tests of the bounds of a launch, with one head of one channel.

use gated_delta_reference::compare::Tolerance;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::judge::{Judgement, judge};
use gated_delta_reference::layer::{Layer, Pools};
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates};

const GATES: TokenGates<'_> = TokenGates::Gdn(Gates::Given {
    g: &[0.0],
    beta: &[1.0],
});

/// The judgement of a token with q = 2, k = 1 and this v, from the state 5. With `kept`, a previous token with v = 4 comes first.
fn of(v: f64, kept: bool, stored: Option<&[f64]>) -> Judgement {
    let step = Recurrent {
        q: &[2.0],
        k: &[1.0],
        v: &[v],
        l2norm: false,
        scale: 1.0,
        previous: kept.then_some(Previous {
            tokens: 1,
            k: &[1.0],
            v: &[4.0],
            gates: GATES,
            keep: &[1],
        }),
        ..Recurrent::new([1, 1], [1, 1], [1, 1], GATES)
    };
    let layer = Layer {
        step,
        projection: None,
        norm: None,
        fresh: None,
        checkpoints: None,
    };
    let pools = Pools {
        states: &[5.0],
        ..Pools::default()
    };
    judge(&layer, &pools, stored, &Tolerance::RECURRENT, 0.0).unwrap()
}

fn near(got: &[f64], wanted: f64) {
    assert!(
        (got[0] / wanted - 1.0).abs() < 1e-3 && got.len() == 1,
        "{got:?}, wanted {wanted}"
    );
}

#[test]
fn bounds_are_parts_of_the_state_and_of_its_terms() {
    let large = of(3.0, false, None);
    assert_eq!((large.o, large.states), (vec![6.0], vec![3.0]));
    near(&large.allowed.states, 1e-5 * 3.0);
    near(&large.allowed.o, 1e-6 * 3.0 * 2.0);
    // Everything cancels: 5 is left of the decayed state, and 5 is subtracted.
    let nothing = of(0.0, false, None);
    assert_eq!((nothing.o, nothing.states), (vec![0.0], vec![0.0]));
    near(&nothing.allowed.states, 1e-5 * 0.2 * (5.0 + 5.0));
    near(&nothing.allowed.o, 1e-6 * 0.2 * (5.0 + 5.0) * 2.0);
}

#[test]
fn new_tokens_follow_from_the_state_as_it_is_stored() {
    let exact = of(3.0, true, None);
    assert_eq!((exact.o, exact.states), (vec![6.0], vec![4.0]));
    // With k = 1 and β = 1 nothing of the state remains in the result, only in its bound.
    let stored = of(0.0, true, Some(&[1024.0]));
    assert_eq!((stored.o, stored.states), (vec![0.0], vec![4.0]));
    near(&stored.allowed.o, 1e-6 * 0.2 * (1024.0 + 1024.0) * 2.0);
    near(&stored.allowed.states, 1e-5 * 4.0);
}
