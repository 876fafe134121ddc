//! Validation of indices: its report about a row agrees with the launch.

use std::ops::Range;

use gated_delta::Error;
use gated_delta_test_support::backend::{Backend, backends};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::for_all;
use gated_delta_test_support::problem::Sizes;
use gated_delta_test_support::rows::Row;
use gated_delta_test_support::spec::Spec;
use gated_delta_test_support::strategy::specs;

use crate::engine::families;

#[test]
fn rows_are_what_a_launch_makes_of_them() {
    for family in families() {
        for_all("indices", 100, specs(family, 16), |spec| {
            let case = spec.case();
            backends()
                .iter()
                .for_each(|backend| check_rows(backend, &case));
        });
    }
}

fn check_rows(backend: &Backend, case: &Case) {
    let (report, after) = backend
        .with(case, |library, stream, args| {
            library.validate(stream, &*args.work()?)
        })
        .unwrap();
    assert!(after == *case, "validating changes nothing");
    let rows = case.rows();
    if !bounds_are_right(case) {
        assert!(matches!(report, Err(Error::Index { .. })), "{report:?}");
        return;
    }
    let report = report.unwrap();
    let lives = rows.iter().filter(|row| row.live.is_some());
    assert_eq!(report.rows, rows.len());
    let no_tokens = |row: &&Row| row.tokens.as_ref().is_some_and(Range::is_empty);
    let empty = lives.clone().filter(no_tokens);
    let empty = empty.filter(|_| !case.has_previous());
    assert_eq!(report.empty, empty.clone().count());
    assert_eq!(report.active, lives.count() - empty.count());
    let inactive: Vec<usize> = report.inactive.iter().map(|row| row.row).collect();
    let wanted = |(_, row): &(usize, &Row)| row.tokens.is_some() && row.live.is_none();
    let wanted = rows.iter().enumerate().filter(wanted);
    assert_eq!(inactive, wanted.map(|(b, _)| b).collect::<Vec<_>>());
}

/// Whether the bounds of all packed rows are in range. Some random cases have invalid ones.
fn bounds_are_right(case: &Case) -> bool {
    let Some(packed) = &case.packed else {
        return true;
    };
    let (bounds, total) = (case.indices(&packed.cu_seqlens), case.o().dims[1] as i64);
    let most = case.max_tokens() as i64;
    let rises = |pair: &[i64]| (0..=most).contains(&(pair[1] - pair[0]));
    bounds[0] == 0
        && bounds.windows(2).all(rises)
        && bounds.iter().all(|bound| (0..=total).contains(bound))
}

/// If two rows write to one slot, the error names both rows, on every backend.
#[test]
fn a_duplicate_is_found() {
    for family in families() {
        let spec = Spec {
            slots: gated_delta_test_support::slots::SlotChoice::LIVE,
            batch: 3,
            ..Spec::plain(family)
        };
        let mut case = spec.case();
        let slots = case.write_slots.clone().unwrap();
        let [first, .., last] = slots.positions()[..] else {
            panic!("three rows")
        };
        let slot = case.buffers[slots.buffer].bits(first);
        case.buffers[slots.buffer].set_bits(last, slot);
        let wanted =
            format!("row 0 writes slot {slot} of pool, and row 2 writes slot {slot} of pool");
        for backend in backends() {
            let (report, _) = backend
                .with(&case, |library, stream, args| {
                    library.validate(stream, &*args.work()?)
                })
                .unwrap();
            let message = report.unwrap_err().to_string();
            assert!(
                message.starts_with(&wanted),
                "{}: {message}",
                backend.name()
            );
        }
    }
}
