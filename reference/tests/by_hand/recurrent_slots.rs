//! Tests of the slots of rows and of tokens.

use gated_delta_reference::recurrent::{Recurrent, recurrent};

use crate::assert_bits;
use crate::recurrent::{NAN, POOL, STATES, TOKENS};

#[test]
fn read_and_write_slots() {
    let problem = Recurrent {
        read_slots: Some(&[2, 0]),
        write_slots: Some(&[0, 3]),
        ..TOKENS
    };
    let after = recurrent(&problem, &[8.0, NAN, 16.0, NAN], None, None).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.pool, &[5.0, NAN, 16.0, 5.25]);
}

#[test]
fn separate_write_pool() {
    // The write slot of the second row is not in the write pool.
    let problem = Recurrent {
        write_slots: Some(&[1, 2]),
        ..TOKENS
    };
    let after = recurrent(&problem, &POOL, Some(&[NAN, -1.0]), None).unwrap();
    assert_bits(&after.o, &[12.0, 6.0, 5.0, 0.0, 0.0, 0.0]);
    assert_bits(&after.pool, &[NAN, 5.0]);
}

#[test]
fn rows_of_dead_slots_are_inactive() {
    for dead in [-1, 4, 2, i64::MIN, i64::MAX, u32::MAX.into()] {
        let slots = [0, dead];
        for (read_slots, write_slots) in [
            (&slots, None),
            (&slots, Some(&[0, 1])),
            (&[0, 1], Some(&slots)),
        ] {
            let problem = Recurrent {
                read_slots: Some(read_slots),
                write_slots: write_slots.map(|slots| slots.as_slice()),
                null_slot: Some(2),
                ..TOKENS
            };
            let after = recurrent(&problem, &POOL, None, None).unwrap();
            assert_bits(&after.o, &[12.0, 6.0, 5.0, 0.0, 0.0, 0.0]);
            assert_bits(&after.pool, &[5.0, 8.0, NAN, NAN]);
        }
    }
}

#[test]
fn slot_zero_is_ordinary_unless_null() {
    let problem = Recurrent {
        null_slot: Some(0),
        ..TOKENS
    };
    let after = recurrent(&problem, &POOL, None, None).unwrap();
    assert_bits(&after.o, &[0.0, 0.0, 0.0, 5.0, 4.5, 5.25]);
    assert_bits(&after.pool, &[16.0, 5.25, NAN, NAN]);
}

#[test]
fn token_slots_take_every_state() {
    // Without `accepted`, a row starts from its first slot.
    let problem = Recurrent {
        token_slots: Some(&[0, 2, 3, 1, 5, 4]),
        ..TOKENS
    };
    let after = recurrent(&problem, &[16.0, 8.0, NAN, NAN, NAN, NAN], None, None).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.pool, &[12.0, 5.0, 6.0, 5.0, 5.25, 4.5]);
}

#[test]
fn accepted_tokens_choose_the_start() {
    let problem = Recurrent {
        token_slots: Some(&[3, 0, 5, 2, 4, 1]),
        accepted: Some(&[2, 3]),
        ..TOKENS
    };
    let after = recurrent(&problem, &[16.0, 8.0, NAN, NAN, NAN, NAN], None, None).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.pool, &[6.0, 5.25, 5.0, 12.0, 4.5, 5.0]);
}

#[test]
fn accepted_out_of_range_makes_a_row_inactive() {
    for accepted in [0, 4, -1, i64::MIN, i64::MAX, u32::MAX.into()] {
        let problem = Recurrent {
            token_slots: Some(&[0, 0, 0, 1, 1, 1]),
            accepted: Some(&[accepted, 1]),
            ..TOKENS
        };
        let after = recurrent(&problem, &POOL, None, None).unwrap();
        assert_bits(&after.o, &[0.0, 0.0, 0.0, 5.0, 4.5, 5.25]);
        assert_bits(&after.pool, &[16.0, 5.25, NAN, NAN]);
    }
}

#[test]
fn a_dead_token_slot_skips_its_store_alone() {
    for dead in [-1, 4, 2] {
        let problem = Recurrent {
            token_slots: Some(&[0, dead, 3, dead, 1, dead]),
            accepted: Some(&[1, 2]),
            null_slot: Some(2),
            ..TOKENS
        };
        let after = recurrent(&problem, &POOL, None, None).unwrap();
        assert_bits(&after.o, &STATES);
        assert_bits(&after.pool, &[12.0, 4.5, NAN, 5.0]);

        // The second row would start from the dead slot.
        let problem = Recurrent {
            accepted: Some(&[1, 1]),
            ..problem
        };
        let after = recurrent(&problem, &POOL, None, None).unwrap();
        assert_bits(&after.o, &[12.0, 6.0, 5.0, 0.0, 0.0, 0.0]);
        assert_bits(&after.pool, &[12.0, 8.0, NAN, 5.0]);
    }
}

#[test]
fn token_slots_between_pools() {
    // Start slots are in the read pool, and slots to store in the write pool.
    let problem = Recurrent {
        token_slots: Some(&[3, 0, 1, 1, 2, 0]),
        ..TOKENS
    };
    let after = recurrent(&problem, &[NAN, 8.0, NAN, 16.0], Some(&[-1.0; 2]), None).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.pool, &[5.25, 5.0]);

    let after = recurrent(&problem, &[NAN, 8.0], Some(&[-1.0; 4]), None).unwrap();
    assert_bits(&after.o, &[0.0, 0.0, 0.0, 5.0, 4.5, 5.25]);
    assert_bits(&after.pool, &[5.25, 5.0, 4.5, -1.0]);
}

#[test]
fn token_slots_of_packed_rows_with_snapshots() {
    // Rows of two tokens and of none: the third slot of the first row is only the one that its accepted tokens select.
    let problem = Recurrent {
        token_slots: Some(&[2, 3, 0, 1, 1, 1]),
        accepted: Some(&[3, 1]),
        cu_seqlens: Some(&[0, 2, 2]),
        snapshot_steps: Some(3),
        ..TOKENS
    };
    let after = recurrent(&problem, &POOL, None, Some(&[9.0; 6])).unwrap();
    assert_bits(&after.o, &[12.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
    assert_bits(&after.pool, &[16.0, 8.0, 12.0, 6.0]);
    assert_bits(&after.snapshots.unwrap(), &[12.0, 6.0, 9.0, 9.0, 9.0, 9.0]);
}
