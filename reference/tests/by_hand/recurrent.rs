//! Tests of several tokens in a row, snapshots and packed rows.

use gated_delta_reference::gdn::Gates;
use gated_delta_reference::recurrent::{HeadMap, Layout, Recurrent, TokenGates, recurrent};

use crate::assert_bits;

pub const NAN: f64 = f64::NAN;

/// Two rows of three tokens, one head, K = V = 1: every token halves the way from the state to v, and o is the
/// state after it.
pub const TOKENS: Recurrent<'static> = Recurrent {
    batch: 2,
    tokens: 3,
    heads: 1,
    value_heads: 1,
    key_dim: 1,
    value_dim: 1,
    q: &[1.0; 6],
    k: &[1.0; 6],
    v: &[8.0, 0.0, 4.0, 2.0, 4.0, 6.0],
    gates: halfway(6),
    l2norm: false,
    scale: 1.0,
    head_map: HeadMap::Grouped,
    layout: Layout::KLast,
    read_slots: None,
    write_slots: None,
    token_slots: None,
    accepted: None,
    cu_seqlens: None,
    null_slot: None,
    update_state: true,
    snapshot_steps: None,
    previous: None,
    round_state: |s| s,
};
pub const POOL: [f64; 4] = [16.0, 8.0, NAN, NAN];
/// The states after the tokens of [`TOKENS`] from the first two slots of [`POOL`].
pub const STATES: [f64; 6] = [12.0, 6.0, 5.0, 5.0, 4.5, 5.25];

/// Gates without decay and with beta 1/2 for `tokens` tokens, at most 6.
pub const fn halfway(tokens: usize) -> TokenGates<'static> {
    const ZERO: &[f64] = &[0.0; 6];
    const HALF: &[f64] = &[0.5; 6];
    TokenGates::Gdn(Gates::Given {
        g: ZERO.split_at(tokens).0,
        beta: HALF.split_at(tokens).0,
    })
}

#[test]
fn every_token_by_hand() {
    let after = recurrent(&TOKENS, &POOL, None, None).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.pool, &[5.0, 5.25, NAN, NAN]);
    assert_eq!(after.snapshots, None);
}

#[test]
fn update_state_off_keeps_the_pool() {
    let problem = Recurrent {
        update_state: false,
        ..TOKENS
    };
    let after = recurrent(&problem, &POOL, None, None).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.pool, &POOL);
}

#[test]
fn snapshots_of_every_token() {
    for (update_state, pool) in [(true, [5.0, 5.25, NAN, NAN]), (false, POOL)] {
        for steps in [3, 5] {
            let problem = Recurrent {
                update_state,
                snapshot_steps: Some(steps),
                ..TOKENS
            };
            let before: Vec<f64> = (0..2 * steps).map(|i| -(i as f64)).collect();
            let after = recurrent(&problem, &POOL, None, Some(&before)).unwrap();
            let mut wanted = before;
            wanted[..3].copy_from_slice(&STATES[..3]);
            wanted[steps..steps + 3].copy_from_slice(&STATES[3..]);
            assert_bits(&after.snapshots.unwrap(), &wanted);
            assert_bits(&after.o, &STATES);
            assert_bits(&after.pool, &pool);
        }
    }
}

#[test]
fn snapshots_are_in_the_layout_of_the_pool() {
    let problem = Recurrent {
        batch: 1,
        tokens: 1,
        key_dim: 2,
        value_dim: 2,
        q: &[0.0; 2],
        k: &[1.0, 0.0],
        v: &[4.0, 8.0],
        gates: halfway(1),
        snapshot_steps: Some(1),
        ..TOKENS
    };
    let v_last = Recurrent {
        layout: Layout::VLast,
        ..problem
    };
    let k_last_after = [2.5, 2.0, 5.5, 4.0];
    let after = recurrent(&problem, &[1.0, 2.0, 3.0, 4.0], None, Some(&[NAN; 4])).unwrap();
    assert_bits(&after.snapshots.unwrap(), &k_last_after);
    let after = recurrent(&v_last, &[1.0, 3.0, 2.0, 4.0], None, Some(&[NAN; 4])).unwrap();
    assert_bits(&after.snapshots.unwrap(), &[2.5, 5.5, 2.0, 4.0]);
}

#[test]
fn snapshots_of_an_inactive_row_keep_their_values() {
    let problem = Recurrent {
        read_slots: Some(&[-1, 1]),
        snapshot_steps: Some(3),
        ..TOKENS
    };
    let after = recurrent(&problem, &POOL, None, Some(&[9.0; 6])).unwrap();
    assert_bits(&after.snapshots.unwrap(), &[9.0, 9.0, 9.0, 5.0, 4.5, 5.25]);
    assert_bits(&after.o, &[0.0, 0.0, 0.0, 5.0, 4.5, 5.25]);
}

/// The tokens of [`TOKENS`], packed in rows with the bounds `cu_seqlens`.
fn packed(cu_seqlens: &[i64]) -> Recurrent<'_> {
    Recurrent {
        batch: cu_seqlens.len() - 1,
        cu_seqlens: Some(cu_seqlens),
        ..TOKENS
    }
}

#[test]
fn packed_rows_by_hand() {
    // Row 1 has no tokens, the first token belongs to no row, and slot 1 is not even read.
    let after = recurrent(&packed(&[1, 3, 3, 6]), &[16.0, NAN, 8.0], None, None).unwrap();
    assert_bits(&after.o, &[0.0, 8.0, 6.0, 5.0, 4.5, 5.25]);
    assert_bits(&after.pool, &[6.0, NAN, 5.25]);
}

#[test]
fn rows_without_tokens_end_with_what_they_start_from() {
    // All tokens belong to no row.
    let problem = Recurrent {
        read_slots: Some(&[0, 1]),
        write_slots: Some(&[2, 3]),
        ..packed(&[2, 2, 2])
    };
    let pool = [16.0, 8.0, NAN, NAN];
    let after = recurrent(&problem, &pool, None, None).unwrap();
    assert_bits(&after.o, &[0.0; 6]);
    assert_bits(&after.pool, &[16.0, 8.0, 16.0, 8.0]);
    let after = recurrent(&problem, &pool, Some(&[-1.0; 5]), None).unwrap();
    assert_bits(&after.pool, &[-1.0, -1.0, 16.0, 8.0, -1.0]);

    // In place, a row without tokens leaves a slot that another row writes alone; a dead slot makes it inactive.
    let one_slot = Recurrent {
        read_slots: Some(&[1, 1]),
        write_slots: None,
        ..packed(&[0, 3, 3])
    };
    let after = recurrent(&one_slot, &[16.0, 8.0], None, None).unwrap();
    let alone = recurrent(&packed(&[0, 3]), &[8.0], None, None).unwrap();
    assert_bits(&after.pool, &[16.0, alone.pool[0]]);
    for (read, write) in [([-1, 1], [2, 7]), ([0, 4], [4, 3])] {
        let dead = Recurrent {
            read_slots: Some(&read),
            write_slots: Some(&write),
            ..problem
        };
        let after = recurrent(&dead, &pool, None, None).unwrap();
        assert_bits(&after.pool, &pool);
    }
    let read_only = Recurrent {
        write_slots: None,
        update_state: false,
        ..problem
    };
    let after = recurrent(&read_only, &pool, None, None).unwrap();
    assert_bits(&after.pool, &pool);
}

#[test]
fn packed_rows_of_one_length_are_the_batch() {
    assert_eq!(
        recurrent(&packed(&[0, 3, 6]), &[16.0, 8.0], None, None),
        recurrent(&TOKENS, &[16.0, 8.0], None, None)
    );
}

#[test]
fn packed_rows_out_of_range_touch_nothing() {
    // More than T tokens, tokens before the first or after the last, ends before starts; then no tokens. Each with the outputs that are
    // zeroed before the first bound and after the last, if these are valid.
    for (bounds, zeroed) in [
        ([0, 4], [0..0, 4..6]),
        ([-1, 2], [0..0, 2..6]),
        ([4, 7], [0..4, 6..6]),
        ([6, 8], [0..6, 6..6]),
        ([3, 2], [0..0, 6..6]),
        ([i64::MIN, i64::MAX], [0..0, 6..6]),
        ([i64::MAX, i64::MIN], [0..0, 6..6]),
        ([u32::MAX.into(), 1], [0..0, 1..6]),
        ([2, 2], [0..2, 2..6]),
    ] {
        let problem = Recurrent {
            snapshot_steps: Some(3),
            ..packed(&bounds)
        };
        let after = recurrent(&problem, &[16.0], None, Some(&[9.0; 3])).unwrap();
        let mut o = [NAN; 6];
        zeroed.into_iter().for_each(|tokens| o[tokens].fill(0.0));
        assert_bits(&after.o, &o);
        assert_bits(&after.pool, &[16.0]);
        assert_bits(&after.snapshots.unwrap(), &[9.0; 3]);
    }
}

#[test]
fn packed_rows_without_a_slot_zero_their_own_output() {
    let problem = Recurrent {
        read_slots: Some(&[0, 7]),
        snapshot_steps: Some(3),
        ..packed(&[1, 3, 5])
    };
    let after = recurrent(&problem, &[16.0], None, Some(&[9.0; 6])).unwrap();
    assert_bits(&after.o, &[0.0, 8.0, 6.0, 0.0, 0.0, 0.0]);
    assert_bits(&after.pool, &[6.0]);
    assert_bits(&after.snapshots.unwrap(), &[8.0, 6.0, 9.0, 9.0, 9.0, 9.0]);
}

#[test]
fn no_rows() {
    let problem = Recurrent {
        batch: 0,
        q: &[],
        k: &[],
        v: &[],
        gates: halfway(0),
        ..TOKENS
    };
    let after = recurrent(&problem, &[16.0], None, None).unwrap();
    assert_eq!((after.o, after.pool), (Vec::new(), vec![16.0]));
}
