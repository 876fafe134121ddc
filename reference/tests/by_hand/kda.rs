//! Tests of KDA's gates.

use std::f64::consts::LN_2;

use gated_delta_reference::kda::{KdaBeta, KdaDecay, KdaGates};
use gated_delta_reference::recurrent::{HeadMap, Recurrent, TokenGates, recurrent};

use crate::assert_near;
use crate::recurrent::TOKENS;

const LOG: KdaGates = KdaGates {
    g: &[0.0],
    kind: KdaDecay::Log,
    beta: &[0.0],
    beta_kind: KdaBeta::Given,
};

/// A pool of ones after one token of one row that only decays, V = 1.
fn decayed(gates: KdaGates, [heads, value_heads, key_dim]: [usize; 3], tiled: bool) -> Vec<f64> {
    let (keys, values) = (vec![0.0; heads * key_dim], vec![0.0; value_heads]);
    let problem = Recurrent {
        batch: 1,
        tokens: 1,
        heads,
        value_heads,
        key_dim,
        q: &keys,
        k: &keys,
        v: &values,
        gates: TokenGates::Kda(KdaGates {
            beta: &values,
            ..gates
        }),
        head_map: if tiled {
            HeadMap::Tiled
        } else {
            HeadMap::Grouped
        },
        ..TOKENS
    };
    let pool = vec![1.0; value_heads * key_dim];
    recurrent(&problem, &pool, None, None).unwrap().pool
}

#[test]
fn every_channel_decays_on_its_own() {
    // Two heads, whose channels keep 1/2 and 1, 1/4 and 1/8.
    let g = [-LN_2, 0.0, -2.0 * LN_2, -3.0 * LN_2];
    let gates = KdaGates { g: &g, ..LOG };
    assert_near(&decayed(gates, [2, 2, 2], false), &[0.5, 1.0, 0.25, 0.125]);
}

#[test]
fn the_delta_is_predicted_from_decayed_channels() {
    let problem = Recurrent {
        batch: 1,
        tokens: 1,
        key_dim: 2,
        q: &[1.0, 0.0],
        k: &[1.0, 1.0],
        v: &[7.0],
        gates: TokenGates::Kda(KdaGates {
            g: &[-LN_2, 0.0],
            beta: &[0.5],
            ..LOG
        }),
        ..TOKENS
    };
    // Decayed to (1, 4): the delta is half of 7 - 5.
    let after = recurrent(&problem, &[2.0, 4.0], None, None).unwrap();
    assert_near(&after.pool, &[2.0, 5.0]);
    assert_near(&after.o, &[2.0]);
}

#[test]
fn softplus_with_rows_of_heads_and_value_heads() {
    // softplus(0) = ln 2: the state is 2 to the power of -exp(a_log).
    let [one, two, three, four] = [1.0_f64, 2.0, 3.0, 4.0].map(f64::ln);
    let softplus = |a_log| KdaGates {
        g: &[0.0; 4],
        kind: KdaDecay::Softplus {
            a_log,
            dt_bias: None,
        },
        ..LOG
    };
    let rows = [one, two, three, four];
    let (of_heads, of_value_heads) = (softplus(&rows[..2]), softplus(&rows));
    assert_near(
        &decayed(of_heads, [2, 4, 1], false),
        &[0.5, 0.5, 0.25, 0.25],
    );
    assert_near(&decayed(of_heads, [2, 4, 1], true), &[0.5, 0.25, 0.5, 0.25]);
    for tiled in [false, true] {
        assert_near(
            &decayed(of_value_heads, [2, 4, 1], tiled),
            &[0.5, 0.25, 0.125, 0.0625],
        );
    }
}

#[test]
fn dt_bias_with_rows_of_heads_and_value_heads() {
    // Log decay -4 · sigmoid(g + dt_bias), where sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4.
    let ln3 = 3.0_f64.ln();
    let gates = |g, dt_bias| KdaGates {
        g,
        kind: KdaDecay::LowerBound {
            lower_bound: -4.0 * LN_2,
            a_log: None,
            dt_bias: Some(dt_bias),
        },
        ..LOG
    };
    let rows = [ln3, 0.0, -ln3, 0.0];
    let of_heads = gates(&[0.0; 8], &rows);
    assert_near(
        &decayed(of_heads, [2, 4, 2], false),
        &[0.125, 0.25, 0.125, 0.25, 0.5, 0.25, 0.5, 0.25],
    );
    assert_near(
        &decayed(of_heads, [2, 4, 2], true),
        &[0.125, 0.25, 0.5, 0.25, 0.125, 0.25, 0.5, 0.25],
    );
    let (g, rows) = ([ln3; 4], rows.map(|x| x - ln3));
    let of_value_heads = gates(&g, &rows);
    assert_near(
        &decayed(of_value_heads, [1, 2, 2], false),
        &[0.125, 0.25, 0.5, 0.25],
    );
}

#[test]
fn the_lower_bound_is_a_scale() {
    let (a_log, dt_bias) = ([4.0_f64.ln()], [3.0_f64.ln() / 4.0 - 0.25]);
    let gates = |lower_bound| KdaGates {
        g: &[0.25],
        kind: KdaDecay::LowerBound {
            lower_bound,
            a_log: Some(&a_log),
            dt_bias: Some(&dt_bias),
        },
        ..LOG
    };
    // sigmoid(4 · (ln 3)/4) = 3/4 of the bound: a clamp would give both the same decay.
    for bound in [-1.0, -5.0] {
        assert_near(
            &decayed(gates(bound), [1, 1, 1], false),
            &[(0.75 * bound).exp()],
        );
    }
}

#[test]
fn beta_is_given_or_a_logit() {
    // From a state of 0, one token gives beta · v.
    for (beta, beta_kind, wanted) in [
        (0.75, KdaBeta::Given, 6.0),
        (2.0, KdaBeta::Given, 16.0),
        (3.0_f64.ln(), KdaBeta::Logit, 6.0),
        (1e4, KdaBeta::Logit, 8.0),
        (-1e4, KdaBeta::Logit, 0.0),
    ] {
        let problem = Recurrent {
            batch: 1,
            tokens: 1,
            q: &[1.0],
            k: &[1.0],
            v: &[8.0],
            gates: TokenGates::Kda(KdaGates {
                beta: &[beta],
                beta_kind,
                ..LOG
            }),
            ..TOKENS
        };
        let after = recurrent(&problem, &[0.0], None, None).unwrap();
        assert_near(&after.o, &[wanted]);
    }
}

#[test]
fn saturated_gates() {
    for a_log in [-100.0, 0.0, 100.0] {
        for (g, on) in [(1e4, true), (-1e4, false)] {
            let (g, a_log_rows) = ([g], [a_log]);
            let gates = |kind| KdaGates { g: &g, kind, ..LOG };
            let softplus = gates(KdaDecay::Softplus {
                a_log: &a_log_rows,
                dt_bias: None,
            });
            // exp(-100) · 1e4 decays nothing.
            let kept = if on && a_log >= 0.0 { 0.0 } else { 1.0 };
            assert_near(&decayed(softplus, [1, 1, 1], false), &[kept]);

            let bounded = gates(KdaDecay::LowerBound {
                lower_bound: -5.0,
                a_log: Some(&a_log_rows),
                dt_bias: None,
            });
            let part = match (a_log >= 0.0, on) {
                (false, _) => 0.5,
                (true, true) => 1.0,
                (true, false) => 0.0,
            };
            assert_near(
                &decayed(bounded, [1, 1, 1], false),
                &[(-5.0_f64 * part).exp()],
            );
        }
    }
}

/// A NaN in A_log gives NaN, not a decay that forgets everything.
#[test]
fn a_nan_in_a_log_stays_one() {
    use gated_delta_reference::gate::{lower_bound_log_decay, softplus_log_decay};
    assert!(softplus_log_decay(1.0, f64::NAN, 0.0).is_nan());
    assert!(lower_bound_log_decay(1.0, -5.0, f64::NAN, 0.0).is_nan());
    assert_eq!(softplus_log_decay(-1e6, 1e6, 0.0), 0.0);
}
