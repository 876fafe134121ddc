//! Tests of shapes and switches that are refused, with their error messages.

use gated_delta_reference::kda::{KdaBeta, KdaDecay, KdaGates};
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates, recurrent};

use crate::recurrent::{POOL, TOKENS, halfway};

#[track_caller]
fn assert_fails(problem: Recurrent, wanted: &str) {
    assert_fails_between(problem, None, None, wanted);
}

#[track_caller]
fn assert_fails_between(
    problem: Recurrent,
    write_pool: Option<&[f64]>,
    snapshots: Option<&[f64]>,
    wanted: &str,
) {
    let error = recurrent(&problem, &POOL, write_pool, snapshots).unwrap_err();
    assert_eq!(error.to_string(), wanted);
}

const PREVIOUS: Previous = Previous {
    tokens: 1,
    k: &[1.0; 2],
    v: &[1.0; 2],
    gates: halfway(2),
    keep: &[1, 1],
};
const SLOTS: Option<&[i64]> = Some(&[0, 1]);
const TOKEN_SLOTS: Option<&[i64]> = Some(&[0; 6]);

#[test]
fn contradictory_switches() {
    let token_slots = Recurrent {
        token_slots: TOKEN_SLOTS,
        ..TOKENS
    };
    let previous = Recurrent {
        previous: Some(PREVIOUS),
        ..TOKENS
    };
    let frozen = Recurrent {
        update_state: false,
        ..TOKENS
    };
    for (problem, name, with) in [
        (
            Recurrent {
                read_slots: SLOTS,
                ..token_slots
            },
            "token_slots",
            "read_slots",
        ),
        (
            Recurrent {
                write_slots: SLOTS,
                ..token_slots
            },
            "token_slots",
            "write_slots",
        ),
        (
            Recurrent {
                previous: Some(PREVIOUS),
                ..token_slots
            },
            "token_slots",
            "previous",
        ),
        (
            Recurrent {
                update_state: false,
                ..token_slots
            },
            "token_slots",
            "update_state = false",
        ),
        (
            Recurrent {
                update_state: false,
                ..previous
            },
            "previous",
            "update_state = false",
        ),
        (
            Recurrent {
                write_slots: SLOTS,
                ..frozen
            },
            "write_slots",
            "update_state = false",
        ),
        (
            Recurrent {
                snapshot_steps: Some(3),
                ..previous
            },
            "snapshot_steps",
            "previous",
        ),
        (
            Recurrent {
                tokens: 0,
                cu_seqlens: Some(&[0, 0, 0]),
                ..previous
            },
            "cu_seqlens",
            "tokens = 0",
        ),
    ] {
        assert_fails(
            problem,
            &format!("{name}: wanted none with {with}, got some"),
        );
    }
    assert_fails_between(
        frozen,
        Some(&POOL),
        None,
        "write_pool: wanted none with update_state = false, got some",
    );
    assert_fails_between(
        previous,
        None,
        Some(&[0.0; 6]),
        "snapshots: wanted none with previous, got some",
    );
}

#[test]
fn switches_that_need_others() {
    assert_fails(
        Recurrent {
            accepted: Some(&[1, 1]),
            ..TOKENS
        },
        "token_slots: wanted with accepted, got none",
    );
    assert_fails(
        Recurrent {
            snapshot_steps: Some(3),
            ..TOKENS
        },
        "snapshots: wanted with snapshot_steps, got none",
    );
    assert_fails_between(
        TOKENS,
        None,
        Some(&[0.0; 6]),
        "snapshot_steps: wanted with snapshots, got none",
    );
    assert_fails(
        Recurrent {
            tokens: 0,
            q: &[],
            k: &[],
            v: &[],
            gates: halfway(0),
            ..TOKENS
        },
        "tokens: wanted at least 1, got 0",
    );
}

#[test]
fn shapes_of_tokens() {
    for (problem, wanted) in [
        (
            Recurrent {
                q: &[1.0; 5],
                ..TOKENS
            },
            "q [B, T, H, K]: wanted length 6, got 5",
        ),
        (
            Recurrent {
                v: &[1.0; 7],
                ..TOKENS
            },
            "v [B, T, HV, V]: wanted length 6, got 7",
        ),
        (
            Recurrent {
                gates: halfway(2),
                ..TOKENS
            },
            "g [B, T, HV]: wanted length 6, got 2",
        ),
        (
            Recurrent {
                cu_seqlens: Some(&[0, 3, 6]),
                k: &[1.0; 4],
                ..TOKENS
            },
            "k [total, H, K]: wanted length 6, got 4",
        ),
        (
            Recurrent {
                cu_seqlens: Some(&[0, 3, 6]),
                key_dim: 4,
                ..TOKENS
            },
            "q: wanted a multiple of 4 elements (one token, H*K), got 6",
        ),
        (
            Recurrent {
                cu_seqlens: Some(&[0, 3, 6]),
                key_dim: 0,
                ..TOKENS
            },
            "key_dim: wanted at least 1, got 0",
        ),
        (
            Recurrent { heads: 2, ..TOKENS },
            "value_heads: wanted a multiple of heads = 2, got 1",
        ),
        (
            Recurrent {
                batch: usize::MAX,
                ..TOKENS
            },
            "q [B, T, H, K]: wanted length 18446744073709551615, got 6",
        ),
    ] {
        assert_fails(problem, wanted);
    }
}

#[test]
fn shapes_of_indices() {
    for (problem, wanted) in [
        (
            Recurrent {
                read_slots: Some(&[0]),
                ..TOKENS
            },
            "read_slots [B]: wanted length 2, got 1",
        ),
        (
            Recurrent {
                write_slots: Some(&[0]),
                ..TOKENS
            },
            "write_slots [B]: wanted length 2, got 1",
        ),
        (
            Recurrent {
                token_slots: SLOTS,
                ..TOKENS
            },
            "token_slots [B, T]: wanted length 6, got 2",
        ),
        (
            Recurrent {
                token_slots: TOKEN_SLOTS,
                accepted: Some(&[1]),
                ..TOKENS
            },
            "accepted [B]: wanted length 2, got 1",
        ),
        (
            Recurrent {
                cu_seqlens: SLOTS,
                ..TOKENS
            },
            "cu_seqlens [B + 1]: wanted length 3, got 2",
        ),
    ] {
        assert_fails(problem, wanted);
    }
}

#[test]
fn shapes_of_states() {
    let snapshots = |steps| Recurrent {
        snapshot_steps: Some(steps),
        ..TOKENS
    };
    assert_fails_between(
        snapshots(2),
        None,
        Some(&[0.0; 4]),
        "snapshot_steps: wanted at least tokens = 3, got 2",
    );
    assert_fails_between(
        snapshots(4),
        None,
        Some(&[0.0; 6]),
        "snapshots [B, steps, HV, K*V]: wanted length 8, got 6",
    );
    let two_heads = Recurrent {
        value_heads: 2,
        v: &[0.0; 12],
        gates: TokenGates::Kda(KdaGates {
            g: &[0.0; 12],
            kind: KdaDecay::Log,
            beta: &[0.0; 12],
            beta_kind: KdaBeta::Given,
        }),
        ..TOKENS
    };
    assert_fails_between(
        two_heads,
        Some(&[0.0; 3]),
        None,
        "write_pool: wanted a multiple of 2 elements (one slot, HV*K*V), got 3",
    );
}

#[test]
fn shapes_of_previous_tokens() {
    for (previous, wanted) in [
        (
            Previous {
                tokens: 0,
                ..PREVIOUS
            },
            "previous tokens: wanted at least 1, got 0",
        ),
        (
            Previous {
                k: &[1.0],
                ..PREVIOUS
            },
            "previous k [B, T', H, K]: wanted length 2, got 1",
        ),
        (
            Previous { v: &[], ..PREVIOUS },
            "previous v [B, T', HV, V]: wanted length 2, got 0",
        ),
        (
            Previous {
                gates: halfway(3),
                ..PREVIOUS
            },
            "previous g [B, T', HV]: wanted length 2, got 3",
        ),
        (
            Previous {
                keep: &[1],
                ..PREVIOUS
            },
            "previous keep [B]: wanted length 2, got 1",
        ),
    ] {
        let problem = Recurrent {
            previous: Some(previous),
            ..TOKENS
        };
        assert_fails(problem, wanted);
    }
}

#[test]
fn shapes_of_kda_gates() {
    let gates = KdaGates {
        g: &[0.0; 24],
        kind: KdaDecay::Log,
        beta: &[0.0; 12],
        beta_kind: KdaBeta::Given,
    };
    let softplus = |a_log, dt_bias| KdaGates {
        kind: KdaDecay::Softplus {
            a_log,
            dt_bias: Some(dt_bias),
        },
        ..gates
    };
    for (gates, wanted) in [
        (
            KdaGates {
                g: &[0.0; 12],
                ..gates
            },
            "g [B, T, HV, K]: wanted length 24, got 12",
        ),
        (
            KdaGates { beta: &[], ..gates },
            "beta [B, T, HV]: wanted length 12, got 0",
        ),
        (
            softplus(&[0.0; 3], &[0.0; 2]),
            "a_log: wanted length 1 (H rows) or 2 (HV rows), got 3",
        ),
        (
            softplus(&[0.0], &[0.0; 3]),
            "dt_bias: wanted length 2 (H rows) or 4 (HV rows), got 3",
        ),
    ] {
        let problem = Recurrent {
            value_heads: 2,
            key_dim: 2,
            q: &[1.0; 12],
            k: &[1.0; 12],
            v: &[1.0; 12],
            gates: TokenGates::Kda(gates),
            ..TOKENS
        };
        assert_fails(problem, wanted);
    }
}
