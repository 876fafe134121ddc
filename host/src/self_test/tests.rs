use gated_delta_kernels::launch::Family;
use gated_delta_kernels::machine;

use super::cases::Keep;
use super::*;
use crate::step::serves;
use crate::tensor::DType;

#[test]
fn every_entry_on_states_is_right_in_the_simulator() {
    let report = Library::simulator().self_test().unwrap();
    // Scans for GPUs other than Hopper are tested in the simulator of such a GPU.
    let elsewhere = Library::simulator_of((8, 6));
    let of_elsewhere = |case: &Case| !serves(case.entry, machine::HOPPER);
    let cases: Vec<Case> = cases::cases().into_iter().filter(of_elsewhere).collect();
    for case in &cases {
        let results = launch(&elsewhere, None, None, case, Truth::new).unwrap();
        assert!(results.check().unwrap() < 1.0, "{}", case.entry.name());
    }
    let others = [
        Entry::device_contract,
        Entry::cluster_contract,
        Entry::warpgroup_contract,
        Entry::state_floor,
    ];
    let sorted = |mut entries: Vec<Entry>| {
        entries.retain(|entry| !others.contains(entry));
        entries.sort();
        entries
    };
    let mut got = report.entries;
    got.extend(cases.iter().map(|case| case.entry));
    let mut got = sorted(got);
    got.dedup();
    assert_eq!(got, sorted(Entry::ALL.to_vec()));
    assert!(report.launches >= got.len() && report.worst < 1.0);
    assert!(report.worst_entry.is_some());
}

/// A family of kernels, and whether it has one decay per key channel.
fn operator(case: &Case) -> (Family, bool) {
    (case.kind.family, case.kind.per_channel)
}

/// Every operator, layout and state dtype is launched in every way, with K = 64 and K = 128.
#[test]
fn every_family_is_launched_in_every_way() {
    let cases = cases::cases();
    for case in &cases {
        let family = |other: &&Case| {
            operator(other) == operator(case)
                && (other.kind.layout, other.kind.state) == (case.kind.layout, case.kind.state)
        };
        let of_family: Vec<&Case> = cases.iter().filter(family).collect();
        let some = |wanted: fn(&Case) -> bool| of_family.iter().any(|&case| wanted(case));
        let (family, per_channel) = operator(case);
        let has_64 = !per_channel || !(family.is_chunked() || family.is_parallel());
        assert_eq!(some(|case| case.kind.k_dim == 64), has_64);
        assert!(some(|case| case.kind.k_dim == 128));
        let in_place = some(|case| case.way.tokens == 1 && case.way.keep == Keep::InPlace);
        let several_alone = (family.layer && family.max_tokens() > 1) || family.is_chain();
        assert_eq!(in_place, !several_alone);
        if family == Family::DECODE.in_layer() {
            assert!(some(|case| case.way.conv && case.way.norm));
            assert!(some(|case| case.way.conv && !case.way.norm));
            assert!(some(|case| case.way.norm && !case.way.conv));
            assert!(some(|case| case.way.conv && case.way.fresh));
            assert!(some(|case| case.way.keep == Keep::Nothing));
            assert!(some(|case| case.way.keep == Keep::Elsewhere));
        } else if family.is_chunked() {
            assert!(some(|case| case.way.keep == Keep::InPlace));
            assert!(some(|case| case.way.keep == Keep::Elsewhere));
            assert!(some(|case| case.way.tokens > 1));
        } else {
            assert!(some(|case| case.way.tokens == 3));
            assert!(some(|case| case.way.tokens > 0 && case.way.previous > 0));
            assert!(some(|case| case.way.tokens == 0));
            assert_eq!(some(|case| case.way.tokens > 8), family == Family::PARALLEL);
        }
        if family == Family::RECURRENT {
            assert!(some(
                |case| case.way.tokens == 1 && case.way.keep == Keep::Nothing
            ));
            assert!(some(
                |case| case.way.tokens == 1 && case.way.keep == Keep::Elsewhere
            ));
            assert!(some(|case| case.way.snapshots));
            assert!(some(|case| case.way.keep == Keep::EachToken));
        }
        if family == Family::PARALLEL.in_layer() {
            for wanted in [
                |case: &Case| case.way.norm && case.way.keep == Keep::Nothing,
                |case: &Case| case.way.norm && case.way.previous > 0,
                |case: &Case| case.way.fresh && case.way.tokens > 0,
                |case: &Case| case.way.tokens == 0,
            ] {
                assert!(of_family.iter().any(|case| case.way.conv && wanted(case)));
            }
            assert!(some(|case| case.way.norm && !case.way.conv));
        }
        if family == Family::RECURRENT.in_layer() {
            for wanted in [
                |case: &Case| case.way.norm && case.way.keep == Keep::InPlace,
                |case: &Case| case.way.norm && case.way.keep == Keep::EachToken,
                |case: &Case| case.way.norm && case.way.previous > 0,
                |case: &Case| case.way.snapshots,
                |case: &Case| case.way.fresh && case.way.tokens > 0,
                |case: &Case| case.way.tokens == 0,
            ] {
                assert!(of_family.iter().any(|case| case.way.conv && wanted(case)));
            }
            assert!(some(|case| case.way.norm && !case.way.conv));
        }
    }
}

/// The first of the wanted cases of each kind.
fn first_of_each<T: PartialEq>(
    wanted: impl Fn(&Case) -> bool,
    kind: impl Fn(&Case) -> T,
) -> Vec<Case> {
    let mut seen = Vec::new();
    let is_first = |case: &Case| {
        let kind = kind(case);
        let is_first = !seen.contains(&kind);
        seen.push(kind);
        is_first
    };
    let mut cases = cases::cases();
    cases.retain(|case| serves(case.entry, machine::HOPPER));
    cases.retain(wanted);
    cases.retain(is_first);
    cases
}

/// If a kernel computes something else than the reference, the check fails with the kernel's name. Here only one of both
/// normalises q and k. Of cases that differ only in the state dtype, one runs; `a_single_wrong_element_fails` covers the dtypes.
#[test]
fn a_kernel_with_another_constant_fails_by_name() {
    let truth: Says = |case, values, pool| {
        let other = Case {
            l2norm: false,
            ..*case
        };
        Truth::new(&other, values, pool)
    };
    let of = |case: &Case| (operator(case), case.kind.layout, case.way.name);
    for case in first_of_each(|case| case.kind.k_dim == 64, of) {
        let error = run(&Library::simulator(), &[case], truth).unwrap_err();
        let start = format!("self-test of {}, {}: ", case.entry.name(), case.way.name);
        let message = error.to_string();
        assert!(
            message.starts_with(&start) && message.contains("off by"),
            "{message}"
        );
    }
}

/// One wrong bit in an input of a window, or of a snapshot of a window, makes the check fail.
#[test]
fn a_single_wrong_window_fails() {
    let library = Library::simulator();
    let moves =
        |case: &Case| case.way.conv && case.way.keep == Keep::Elsewhere && case.kind.k_dim == 64;
    // Windows do not depend on the layout and the dtype of states.
    for case in first_of_each(moves, |case| (operator(case), case.way.name)) {
        let of_slot = case.channels() * (cases::TAPS - 1);
        let mut results = launch(&library, None, None, &case, Truth::new).unwrap();
        let mut spoil = |element| {
            if let Some(windows) = &mut results.outputs.windows {
                windows.spoil(element, 14);
            }
            results.check()
        };
        // Slot 1 is written; slots 0 and 7 must not change.
        for slot in [1, 0, 7] {
            let message = spoil(slot * of_slot + 5).unwrap_err();
            let wanted = format!("window in slot {slot}: element 5: wanted ");
            assert!(message.starts_with(&wanted), "{message}");
            spoil(slot * of_slot + 5).unwrap();
        }
        let of_row = (case.way.tokens + 1) * of_slot;
        let steps = [
            (0, 5),                         // inside a written window
            (0, case.way.tokens * of_slot), // after the last token
            (1, 7),
        ];
        for (row, element) in steps {
            let Some(snapshots) = &mut results.outputs.window_snapshots else {
                continue;
            };
            snapshots.spoil(row * of_row + element, 14);
            let message = results.check().unwrap_err();
            let wanted = format!("snapshots of windows of row {row}: element {element}: wanted ");
            assert!(message.starts_with(&wanted), "{message}");
            if let Some(snapshots) = &mut results.outputs.window_snapshots {
                snapshots.spoil(row * of_row + element, 14);
            }
        }
    }
}

/// A small error in one element of one tensor makes the check fail. Where nothing may be written, any change does.
#[test]
fn a_single_wrong_element_fails() {
    let library = Library::simulator();
    let cases = cases::cases();
    for state in [DType::F32, DType::Bf16, DType::F16] {
        let snapshots = |case: &&Case| case.way.snapshots && case.kind.state == state;
        let case = cases.iter().find(snapshots).unwrap();
        let launched = || launch(&library, None, None, case, Truth::new).unwrap();
        launched().check().unwrap();
        let per_slot = case.state();
        // Changes a value near a half by a sixteenth, in each dtype.
        let bit = match state {
            DType::F32 => 19,
            DType::F16 => 6,
            _ => 3,
        };
        let spoiled = |spoil: &dyn Fn(&mut Outputs)| {
            let mut results = launched();
            spoil(&mut results.outputs);
            results.check().unwrap_err()
        };
        let expect = |message: String, parts: &[&str]| {
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        };
        let row = case.way.tokens * case.heads().1 * case.value_dim();
        expect(
            spoiled(&|outputs| outputs.o.spoil(7, 19)),
            &["o of row 0, token 0, value head 0", "off by", "element 7"],
        );
        expect(
            spoiled(&|outputs| outputs.o.spoil(row, 0)),
            &["o of row 1, token 0", "wanted 0"],
        );
        expect(
            spoiled(&|outputs| outputs.pool.spoil(per_slot + 5, bit)),
            &["state in slot 1, value head 0", "off by", "element 5"],
        );
        for slot in [0, 2, 3, 7] {
            expect(
                spoiled(&|outputs| outputs.pool.spoil(slot * per_slot, 0)),
                &[&format!("state in slot {slot} is nobody's to write")],
            );
        }
        let snapshots = |element: usize, bit: usize| {
            spoiled(&|outputs| {
                outputs
                    .snapshots
                    .iter_mut()
                    .for_each(|buffer| buffer.spoil(element, bit))
            })
        };
        expect(
            snapshots(per_slot + 2, bit),
            &["snapshot of row 0 after token 1", "element 2"],
        );
        // Changes the exponent, so that a NaN becomes a number.
        let top = if state == DType::F32 { 30 } else { 14 };
        let steps = case.way.tokens + 1;
        expect(
            snapshots(steps * per_slot, top),
            &["snapshot of row 1 after token 0 is nobody's to write"],
        );
    }
}
