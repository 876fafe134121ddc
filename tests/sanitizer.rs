//! Small launches of every entry with every switch, for `compute-sanitizer`, which sees what a comparison does not.

use gated_delta::DType;
use gated_delta::Entry;
use gated_delta::ops::{BetaScale, HeadMap};
use gated_delta_tests::backend::cuda;
use gated_delta_tests::compare::check;
use gated_delta_tests::layout::{Form, Spacing};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

/// Launches that take each branch that a load-time constant decides: wide and narrow accesses, each element and
/// index type, each switch both ways, active and inactive rows.
fn specs(family: Family) -> Vec<Spec> {
    let plain = Spec {
        batch: 5,
        heads: 2,
        ratio: 3,
        slots: SlotChoice::BOTH,
        seed: 4,
        ..Spec::plain(family)
    };
    let with = |change: fn(&mut Spec)| {
        let mut spec = plain.clone();
        change(&mut spec);
        spec
    };
    vec![
        plain.clone(),
        with(|spec| {
            spec.form = Form {
                qkvo: [DType::F32; 4],
                gates: [DType::F32; 2],
                slots: [DType::I64; 2],
                ..spec.form
            };
            (spec.options.head_map, spec.options.qk_l2norm, spec.raw) =
                (HeadMap::Tiled, false, None);
            spec.slots.write_pool = Some(1);
        }),
        with(|spec| {
            spec.form = Form {
                qkvo: [DType::F16; 4],
                gates: [DType::F16; 2],
                slots: [DType::U32; 2],
                ..spec.form
            };
            (spec.form.packed, spec.form.io, spec.form.pools) =
                (true, Spacing::Aligned, Spacing::Aligned);
            (spec.raw, spec.options.null_slot) = (Some(BetaScale::Two), Some(0));
        }),
        with(|spec| {
            spec.form = Form {
                qkvo: [DType::F32; 4],
                gates: [DType::F32; 2],
                ..spec.form
            };
            (spec.form.io, spec.form.pools) = (Spacing::Odd, Spacing::Odd);
            (spec.options.update_state, spec.slots.write) = (false, false);
        }),
        with(|spec| {
            (spec.form.packed, spec.form.io, spec.form.pools) = (true, Spacing::Odd, Spacing::Odd);
            (spec.batch, spec.slots) = (2, SlotChoice::NONE);
        }),
        with(|spec| {
            spec.form = Form {
                qkvo: [DType::F16; 4],
                gates: [DType::F16; 2],
                slots: [DType::I64, DType::U32],
                ..spec.form
            };
            (spec.form.io, spec.form.pools, spec.extreme_gates) =
                (Spacing::Odd, Spacing::Dense, true);
        }),
    ]
}

#[test]
fn sanitizer_every_entry_and_switch() {
    let Some(backend) = cuda() else { return };
    for &entry in Entry::ALL
        .iter()
        .filter(|entry| entry.operator() == "gdn_decode")
    {
        for spec in specs(Family::of(entry)) {
            let case = spec.case();
            check(&case, &backend.run(&case, Some(entry)));
        }
    }
}

#[test]
fn sanitizer_an_empty_batch() {
    let Some(backend) = cuda() else { return };
    for family in Family::all() {
        let case = Spec {
            batch: 0,
            slots: SlotChoice {
                spare: 1,
                ..SlotChoice::NONE
            },
            ..Spec::plain(family)
        }
        .case();
        assert!(
            backend.run(&case, None) == case,
            "{family:?}: something was written"
        );
    }
}
