//! Tests of GDN's decode: gates, heads, layouts.

use gated_delta_reference::Error;
use gated_delta_reference::gdn::{Gates, GdnDecode, HeadMap, Layout, decode, decode_between};
use gated_delta_reference::recurrence::{Token, normalise, recurrence};

use crate::{assert_near, values};

/// One row and head, K = V = 2: decay 1/2, beta 1/2.
pub const TINY: GdnDecode<'static> = GdnDecode {
    batch: 1,
    heads: 1,
    value_heads: 1,
    key_dim: 2,
    value_dim: 2,
    q: &[1.0, 1.0],
    k: &[1.0, 0.0],
    v: &[4.0, 8.0],
    gates: Gates::Raw {
        a: &[0.0],
        b: &[0.0],
        a_log: &[0.0],
        dt_bias: &[0.0],
        beta_scale: 1.0,
    },
    l2norm: false,
    scale: 1.0,
    head_map: HeadMap::Grouped,
    layout: Layout::KLast,
    read_slots: None,
    write_slots: None,
    null_slot: None,
    update_state: true,
};
const TINY_STATE: [f64; 4] = [1.0, 2.0, 3.0, 4.0];

#[test]
fn raw_gates_by_hand() {
    let after = decode(&TINY, &TINY_STATE).unwrap();
    assert_near(&after.o, &[3.25, 6.75]);
    assert_near(&after.pool, &[2.25, 1.0, 4.75, 2.0]);

    // beta 1: delta = [3.5, 6.5].
    let gates = Gates::Raw {
        a: &[0.0],
        b: &[0.0],
        a_log: &[0.0],
        dt_bias: &[0.0],
        beta_scale: 2.0,
    };
    let after = decode(&GdnDecode { gates, ..TINY }, &TINY_STATE).unwrap();
    assert_near(&after.pool, &[4.0, 1.0, 8.0, 2.0]);
    assert_near(&after.o, &[5.0, 10.0]);
}

#[test]
fn given_gates_by_hand() {
    let gates = Gates::Given {
        g: &[-std::f64::consts::LN_2],
        beta: &[0.5],
    };
    let after = decode(
        &GdnDecode {
            gates,
            scale: 2.0,
            ..TINY
        },
        &TINY_STATE,
    )
    .unwrap();
    assert_near(&after.o, &[6.5, 13.5]);
    assert_near(&after.pool, &[2.25, 1.0, 4.75, 2.0]);
}

#[test]
fn v_last_by_hand() {
    let after = decode(
        &GdnDecode {
            layout: Layout::VLast,
            ..TINY
        },
        &[1.0, 3.0, 2.0, 4.0],
    )
    .unwrap();
    assert_near(&after.o, &[3.25, 6.75]);
    assert_near(&after.pool, &[2.25, 4.75, 1.0, 2.0]);
}

#[test]
fn l2norm_by_hand() {
    let problem = GdnDecode {
        l2norm: true,
        q: &[3.0, 4.0],
        k: &[0.0, 2.0],
        ..TINY
    };
    let (q, k) = (
        normalise(problem.q, true, 1.0),
        normalise(problem.k, true, 1.0),
    );
    let normalised = GdnDecode {
        l2norm: false,
        q: &q,
        k: &k,
        ..problem
    };
    assert_eq!(
        decode(&problem, &TINY_STATE),
        decode(&normalised, &TINY_STATE)
    );
    assert!((q[0] - 0.6).abs() < 1e-7 && (k[1] - 1.0).abs() < 1e-6);
}

#[test]
fn zero_query_and_key() {
    let zero = GdnDecode {
        l2norm: true,
        q: &[0.0; 2],
        k: &[0.0; 2],
        ..TINY
    };
    let after = decode(&zero, &TINY_STATE).unwrap();
    assert_near(&after.o, &[0.0, 0.0]);
    assert_near(&after.pool, &[0.5, 1.0, 1.5, 2.0]);
}

#[test]
fn extreme_gates() {
    for (a, a_log) in [(1e4, 100.0), (1e4, -100.0), (-1e4, 100.0), (-1e4, -100.0)] {
        for b in [1e4, -1e4] {
            let gates = Gates::Raw {
                a: &[a],
                b: &[b],
                a_log: &[a_log],
                dt_bias: &[0.0],
                beta_scale: 1.0,
            };
            let after = decode(&GdnDecode { gates, ..TINY }, &TINY_STATE).unwrap();
            // The state is forgotten or kept whole; then its first channel is v or stays as it was.
            let decay = if a > 0.0 && a_log > 0.0 { 0.0 } else { 1.0 };
            let [s0, s1, s2, s3] = TINY_STATE.map(|s| s * decay);
            let [s0, s2] = if b > 0.0 { [4.0, 8.0] } else { [s0, s2] };
            assert_near(&after.pool, &[s0, s1, s2, s3]);
            assert_near(&after.o, &[s0 + s1, s2 + s3]);
        }
    }
}

#[test]
fn grouped_and_tiled_heads() {
    // Value heads differ only in their query.
    let problem = GdnDecode {
        heads: 2,
        value_heads: 4,
        q: &[1.0, 0.0, 0.0, 1.0],
        k: &[0.0; 4],
        v: &[0.0; 8],
        gates: Gates::Given {
            g: &[0.0; 4],
            beta: &[0.0; 4],
        },
        ..TINY
    };
    let pool = TINY_STATE.repeat(4);
    assert_near(
        &decode(&problem, &pool).unwrap().o,
        &[1.0, 3.0, 1.0, 3.0, 2.0, 4.0, 2.0, 4.0],
    );
    let tiled = GdnDecode {
        head_map: HeadMap::Tiled,
        ..problem
    };
    assert_near(
        &decode(&tiled, &pool).unwrap().o,
        &[1.0, 3.0, 2.0, 4.0, 1.0, 3.0, 2.0, 4.0],
    );
}

#[test]
fn layouts_agree() {
    let (batch, heads, value_heads, key_dim, value_dim) = (2, 2, 6, 3, 5);
    let (q, k) = (
        values(batch * heads * key_dim, 1),
        values(batch * heads * key_dim, 2),
    );
    let v = values(batch * value_heads * value_dim, 3);
    let (a, b) = (
        values(batch * value_heads, 4),
        values(batch * value_heads, 5),
    );
    let (a_log, dt_bias) = (values(value_heads, 6), values(value_heads, 7));
    let k_last = GdnDecode {
        batch,
        heads,
        value_heads,
        key_dim,
        value_dim,
        q: &q,
        k: &k,
        v: &v,
        gates: Gates::Raw {
            a: &a,
            b: &b,
            a_log: &a_log,
            dt_bias: &dt_bias,
            beta_scale: 1.0,
        },
        l2norm: true,
        ..TINY
    };
    let pool = values(batch * value_heads * value_dim * key_dim, 8);
    let transposed = |pool: &[f64]| -> Vec<f64> {
        let heads = pool.chunks(value_dim * key_dim);
        heads
            .flat_map(|s| (0..s.len()).map(|i| s[i % value_dim * key_dim + i / value_dim]))
            .collect()
    };
    let k_last_after = decode(&k_last, &pool).unwrap();
    let v_last_after = decode(
        &GdnDecode {
            layout: Layout::VLast,
            ..k_last
        },
        &transposed(&pool),
    )
    .unwrap();
    assert_eq!(k_last_after.o, v_last_after.o);
    assert_eq!(transposed(&k_last_after.pool), v_last_after.pool);
}

#[test]
fn steps_of_decode_are_the_recurrence() {
    let tokens: Vec<Token> = (0..4)
        .map(|t| Token {
            q: values(3, t),
            k: values(3, t + 4),
            v: values(2, t + 8),
            log_decay: vec![-0.1 * t as f64; 3],
            beta: 0.5,
        })
        .collect();
    let mut pool = values(6, 12);
    let steps = recurrence(&pool, &tokens).unwrap();
    for (token, step) in tokens.iter().zip(steps) {
        let gates = Gates::Given {
            g: &token.log_decay[..1],
            beta: &[token.beta],
        };
        let problem = GdnDecode {
            key_dim: 3,
            q: &token.q,
            k: &token.k,
            v: &token.v,
            gates,
            ..TINY
        };
        let after = decode(&problem, &pool).unwrap();
        assert_eq!((&after.o, &after.pool), (&step.o, &step.state));
        pool = after.pool;
    }
}

#[test]
fn update_state_off_keeps_the_pool() {
    let after = decode(
        &GdnDecode {
            update_state: false,
            ..TINY
        },
        &TINY_STATE,
    )
    .unwrap();
    assert_near(&after.o, &[3.25, 6.75]);
    assert_eq!(after.pool, TINY_STATE);
}

#[test]
fn shapes_are_checked() {
    let fails = |problem: GdnDecode| decode(&problem, &TINY_STATE).unwrap_err().to_string();
    assert_eq!(
        fails(GdnDecode {
            q: &[1.0; 3],
            ..TINY
        }),
        "q [B, H, K]: wanted length 2, got 3"
    );
    assert_eq!(
        fails(GdnDecode { v: &[], ..TINY }),
        "v [B, HV, V]: wanted length 2, got 0"
    );
    let gates = Gates::Given {
        g: &[0.0],
        beta: &[],
    };
    assert_eq!(
        fails(GdnDecode { gates, ..TINY }),
        "beta [B, HV]: wanted length 1, got 0"
    );
    assert_eq!(
        fails(GdnDecode {
            write_slots: Some(&[0, 1]),
            ..TINY
        }),
        "write_slots [B]: wanted length 1, got 2"
    );
    assert_eq!(
        fails(GdnDecode { heads: 2, ..TINY }),
        "value_heads: wanted a multiple of heads = 2, got 1"
    );
    assert_eq!(
        fails(GdnDecode { key_dim: 0, ..TINY }),
        "key_dim: wanted at least 1, got 0"
    );
    assert_eq!(
        decode_between(&TINY, &TINY_STATE, &[0.0; 6]),
        Err(Error::Multiple {
            name: "write_pool",
            unit: "one slot, HV*K*V",
            of: 4,
            got: 6
        })
    );
    let huge = GdnDecode {
        batch: usize::MAX,
        ..TINY
    };
    assert!(decode(&huge, &TINY_STATE).is_err());
}
