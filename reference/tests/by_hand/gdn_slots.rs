//! Tests of the slots that the rows of a batch read and write.

use gated_delta_reference::gdn::{Gates, GdnDecode, decode, decode_between};

use crate::assert_bits;
use crate::gdn_decode::TINY;

/// Three rows, one head, K = V = 1, no decay, beta 1: o = v, and the new state is v.
fn rows(read_slots: &[i64]) -> GdnDecode<'_> {
    GdnDecode {
        batch: 3,
        key_dim: 1,
        value_dim: 1,
        q: &[1.0; 3],
        k: &[1.0; 3],
        v: &[5.0, 6.0, 7.0],
        gates: Gates::Given {
            g: &[0.0; 3],
            beta: &[1.0; 3],
        },
        read_slots: Some(read_slots),
        ..TINY
    }
}

#[test]
fn rows_without_slots_use_their_own() {
    let problem = GdnDecode {
        read_slots: None,
        ..rows(&[])
    };
    let after = decode(&problem, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    assert_eq!(
        (after.o.as_slice(), after.pool.as_slice()),
        (&[5.0, 6.0, 7.0][..], &[5.0, 6.0, 7.0, 4.0][..])
    );
    let after = decode(&problem, &[1.0, 2.0]).unwrap();
    assert_eq!(
        (after.o.as_slice(), after.pool.as_slice()),
        (&[5.0, 6.0, 0.0][..], &[5.0, 6.0][..])
    );
}

#[test]
fn inactive_rows_touch_nothing() {
    let nan = f64::NAN;
    for inactive in [-1, 3, i64::MIN, i64::MAX, u32::MAX.into(), 1] {
        let (slots, pool) = ([2, inactive, 0], [1.0, nan, 3.0]);
        for problem in [
            GdnDecode {
                null_slot: Some(1),
                ..rows(&slots)
            },
            GdnDecode {
                null_slot: Some(1),
                write_slots: Some(&slots),
                ..rows(&[2, 0, 0])
            },
        ] {
            let after = decode(&problem, &pool).unwrap();
            assert_bits(&after.o, &[5.0, 0.0, 7.0]);
            assert_bits(&after.pool, &[7.0, nan, 5.0]);
        }
    }
}

#[test]
fn slot_zero_is_ordinary_unless_null() {
    let slots = [0, 1, 2];
    assert_eq!(
        decode(&rows(&slots), &[1.0, 2.0, 3.0]).unwrap().pool,
        [5.0, 6.0, 7.0]
    );
    let problem = GdnDecode {
        null_slot: Some(0),
        ..rows(&slots)
    };
    assert_eq!(
        decode(&problem, &[1.0, 2.0, 3.0]).unwrap().pool,
        [1.0, 6.0, 7.0]
    );
}

#[test]
fn reads_come_before_writes() {
    let shift = GdnDecode {
        gates: Gates::Given {
            g: &[0.0; 3],
            beta: &[0.0; 3],
        },
        write_slots: Some(&[1, 2, 0]),
        ..rows(&[0, 1, 2])
    };
    let after = decode(&shift, &[1.0, 2.0, 3.0]).unwrap();
    assert_eq!(
        (after.o.as_slice(), after.pool.as_slice()),
        (&[1.0, 2.0, 3.0][..], &[3.0, 1.0, 2.0][..])
    );
}

#[test]
fn separate_pools() {
    let keep = Gates::Given {
        g: &[0.0; 3],
        beta: &[0.0; 3],
    };
    let problem = GdnDecode {
        gates: keep,
        write_slots: Some(&[3, 0, 2]),
        ..rows(&[1, 0, 3])
    };
    // The third row reads a slot that exists only in the write pool.
    let after = decode_between(&problem, &[1.0, 2.0, 3.0], &[0.5; 4]).unwrap();
    assert_eq!(after.o, [2.0, 1.0, 0.0]);
    assert_eq!(after.pool, [1.0, 0.5, 0.5, 2.0]);
}
