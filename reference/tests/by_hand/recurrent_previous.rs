//! Tests of commit and resume.

use gated_delta_reference::recurrent::{Previous, Recurrent, recurrent};

use crate::assert_bits;
use crate::recurrent::{NAN, POOL, TOKENS, halfway};

/// Two previous tokens of each row, with the values of [`TOKENS`]: the states after them are (12, 6) and (5, 4.5).
fn previous(keep: &[i64]) -> Previous<'_> {
    Previous {
        tokens: 2,
        k: &[1.0; 4],
        v: &[8.0, 0.0, 2.0, 4.0],
        gates: halfway(4),
        keep,
    }
}

/// A commit: previous tokens and no new ones.
fn commit(keep: &[i64]) -> Recurrent<'_> {
    Recurrent {
        tokens: 0,
        q: &[],
        k: &[],
        v: &[],
        gates: halfway(0),
        previous: Some(previous(keep)),
        ..TOKENS
    }
}

/// A resume with one new token of each row, halfway to 3 and to 7.
fn resume(keep: &[i64]) -> Recurrent<'_> {
    Recurrent {
        tokens: 1,
        q: &[1.0; 2],
        k: &[1.0; 2],
        v: &[3.0, 7.0],
        gates: halfway(2),
        previous: Some(previous(keep)),
        ..TOKENS
    }
}

#[test]
fn commit_by_hand() {
    for (keep, [first, second]) in [
        ([0, 1], [16.0, 5.0]),
        ([1, 2], [12.0, 4.5]),
        ([2, 0], [6.0, 8.0]),
    ] {
        let after = recurrent(&commit(&keep), &POOL, None, None).unwrap();
        assert_eq!(after.o, []);
        assert_bits(&after.pool, &[first, second, NAN, NAN]);
    }
}

#[test]
fn commit_between_slots_and_pools() {
    let problem = Recurrent {
        read_slots: Some(&[1, 0]),
        write_slots: Some(&[2, 0]),
        ..commit(&[2, 1])
    };
    let (read_pool, write_pool) = ([8.0, 16.0], [-1.0; 3]);
    let after = recurrent(&problem, &read_pool, Some(&write_pool), None).unwrap();
    assert_bits(&after.pool, &[5.0, -1.0, 6.0]);
}

#[test]
fn resume_by_hand() {
    // From (12, 4.5): halfway to 3 and 7. The new tokens are not committed.
    let after = recurrent(&resume(&[1, 2]), &POOL, None, None).unwrap();
    assert_bits(&after.o, &[7.5, 5.75]);
    assert_bits(&after.pool, &[12.0, 4.5, NAN, NAN]);
}

#[test]
fn new_tokens_start_from_the_rounded_state() {
    // 4.5 is stored as 5, and 6 is halfway from 5 to 7. The pool of the result is not rounded: that is up to the caller.
    let problem = Recurrent {
        round_state: f64::round,
        ..resume(&[1, 2])
    };
    let after = recurrent(&problem, &POOL, None, None).unwrap();
    assert_bits(&after.o, &[7.5, 6.0]);
    assert_bits(&after.pool, &[12.0, 4.5, NAN, NAN]);

    // Within the previous tokens nothing is rounded: 2.5 then 3.25, 3 when stored, not 3 then 3.5, 4 when stored.
    let problem = Recurrent {
        batch: 1,
        q: &[1.0],
        k: &[1.0],
        v: &[0.0],
        gates: halfway(1),
        previous: Some(Previous {
            k: &[1.0; 2],
            v: &[4.0; 2],
            gates: halfway(2),
            ..previous(&[2])
        }),
        ..problem
    };
    let after = recurrent(&problem, &[1.0], None, None).unwrap();
    assert_bits(&after.o, &[1.5]);
    assert_bits(&after.pool, &[3.25]);
}

#[test]
fn keeping_none_copies_the_bits() {
    let problem = Recurrent {
        write_slots: Some(&[2, 3]),
        ..resume(&[0, 0])
    };
    for problem in [
        problem,
        Recurrent {
            write_slots: problem.write_slots,
            ..commit(&[0, 0])
        },
    ] {
        let pool = [-0.0, 0.1, NAN, NAN];
        let after = recurrent(&problem, &pool, None, None).unwrap();
        assert_bits(&after.pool, &[-0.0, 0.1, -0.0, 0.1]);
    }
}

#[test]
fn inactive_rows_commit_nothing() {
    for keep in [-1, 3, i64::MIN, i64::MAX, u32::MAX.into()] {
        let after = recurrent(&resume(&[keep, 2]), &POOL, None, None).unwrap();
        assert_bits(&after.o, &[0.0, 5.75]);
        assert_bits(&after.pool, &[16.0, 4.5, NAN, NAN]);
        let after = recurrent(&commit(&[keep, 2]), &POOL, None, None).unwrap();
        assert_bits(&after.pool, &[16.0, 4.5, NAN, NAN]);
    }
    for (read_slots, write_slots) in [([4, 1], [0, 1]), ([0, 1], [-1, 1]), ([2, 1], [0, 1])] {
        let problem = Recurrent {
            read_slots: Some(&read_slots),
            write_slots: Some(&write_slots),
            null_slot: Some(2),
            ..resume(&[1, 2])
        };
        let after = recurrent(&problem, &POOL, None, None).unwrap();
        assert_bits(&after.o, &[0.0, 5.75]);
        assert_bits(&after.pool, &[16.0, 4.5, NAN, NAN]);
    }
}

#[test]
fn packed_rows_resume_from_previous_ones_of_the_batch() {
    // A row without new tokens commits its kept tokens all the same.
    let problem = Recurrent {
        tokens: 2,
        cu_seqlens: Some(&[0, 2, 2]),
        ..resume(&[1, 2])
    };
    let after = recurrent(&problem, &POOL, None, None).unwrap();
    assert_bits(&after.o, &[7.5, 7.25]);
    assert_bits(&after.pool, &[12.0, 4.5, NAN, NAN]);

    let problem = Recurrent {
        cu_seqlens: Some(&[0, 0, 2]),
        ..problem
    };
    let after = recurrent(&problem, &POOL, None, None).unwrap();
    assert_bits(&after.o, &[3.75, 5.375]);
    assert_bits(&after.pool, &[12.0, 4.5, NAN, NAN]);
}
