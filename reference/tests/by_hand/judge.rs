//! Tests of the bounds of a launch, with one head of one channel.

use gated_delta_reference::gdn::Gates;
use gated_delta_reference::judge::{Judgement, judge};
use gated_delta_reference::layer::{Layer, Pools};
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates};
use gated_delta_reference::tolerance::{LARGE_STATE, NORM_AROUND_1, Tolerance};

const GATES: TokenGates<'_> = TokenGates::Gdn(Gates::Given {
    g: &[0.0],
    beta: &[1.0],
});

fn token<'a>(v: &'a [f64], gates: TokenGates<'a>) -> Recurrent<'a> {
    Recurrent {
        q: &[2.0],
        k: &[1.0],
        v,
        l2norm: false,
        scale: 1.0,
        ..Recurrent::new([1, 1], [1, 1], [1, 1], gates)
    }
}

/// The judgement of a token with q = 2, k = 1 and this v, from the state 5. With `kept`, a previous token with v = 4 comes first.
fn of(v: f64, kept: bool, stored: Option<&[f64]>) -> Judgement {
    let v = [v];
    let step = Recurrent {
        previous: kept.then_some(Previous {
            tokens: 1,
            k: &[1.0],
            v: &[4.0],
            gates: GATES,
            keep: &[1],
        }),
        ..token(&v, GATES)
    };
    judged(step, 5.0, stored, &Tolerance::RECURRENT)
}

fn judged(
    step: Recurrent<'_>,
    state: f64,
    stored: Option<&[f64]>,
    tolerance: &Tolerance,
) -> Judgement {
    let layer = Layer {
        step,
        projection: None,
        norm: None,
        fresh: None,
        checkpoints: None,
    };
    let pools = Pools {
        states: &[state],
        ..Pools::default()
    };
    judge(&layer, &pools, stored, tolerance, 0.0).unwrap()
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

/// A state that was large before the chunk hides small tokens, also where it has decayed to nothing.
#[test]
fn chunks_lose_small_tokens_after_a_large_state() {
    let reset = TokenGates::Gdn(Gates::Given {
        g: &[f64::NEG_INFINITY],
        beta: &[1.0],
    });
    let bound = |state| {
        let all = judged(token(&[1e-9], reset), state, None, &Tolerance::CHUNKED);
        all.allowed.states[0]
    };
    let own = 1e-3 * 1e-9;
    near(&[bound(0.9 * LARGE_STATE)], own + 6e-7 * 1e-9);
    near(&[bound(LARGE_STATE)], own + 6e-7 * NORM_AROUND_1);
}
