//! Small launches of every entry with every switch, for `compute-sanitizer`, which sees what a comparison does not.

use gated_delta::DType;
use gated_delta::Entry;
use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta::ops::recurrent::Formulation;
use gated_delta::ops::{BetaScale, HeadMap};
use gated_delta_tests::backend::cuda;
use gated_delta_tests::compare::check;
use gated_delta_tests::layout::{Form, Spacing};
use gated_delta_tests::problem::{GateKind, KdaDecay, Operator};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

type Change = fn(&mut Spec);

/// Wide and narrow accesses, each element and index type, active and inactive rows, each gate.
const FORMS: [Change; 6] = [
    |_| {},
    |spec| {
        spec.form = Form {
            qkvo: [DType::F32; 4],
            gates: [DType::F32; 2],
            indices: [DType::I64; 6],
            ..spec.form
        };
        (spec.options.head_map, spec.options.qk_l2norm) = (HeadMap::Tiled, false);
        spec.gates = gates(spec, GateKind::Given, KdaDecay::Log, KdaBeta::Given);
        spec.slots.write_pool = Some(1);
    },
    |spec| {
        spec.form = Form {
            qkvo: [DType::F16; 4],
            gates: [DType::F16; 2],
            indices: [DType::U32; 6],
            ..spec.form
        };
        (spec.form.packed, spec.form.io, spec.form.pools) =
            (true, Spacing::Aligned, Spacing::Aligned);
        let raw = GateKind::Raw(BetaScale::Two);
        spec.gates = gates(spec, raw, KdaDecay::LowerBound(-5.0), KdaBeta::Logit);
        spec.options.null_slot = Some(0);
    },
    |spec| {
        spec.form = Form {
            qkvo: [DType::F32; 4],
            gates: [DType::F32; 2],
            ..spec.form
        };
        (spec.form.io, spec.form.pools) = (Spacing::Odd, Spacing::Odd);
        (spec.options.update_state, spec.slots.write) = (false, false);
        (spec.parameters.a_log, spec.parameters.dt_bias) = (false, false);
    },
    |spec| {
        (spec.form.packed, spec.form.io, spec.form.pools) = (true, Spacing::Odd, Spacing::Odd);
        (spec.batch, spec.slots) = (2, SlotChoice::NONE);
        spec.parameters.of_h = true;
    },
    |spec| {
        spec.form = Form {
            qkvo: [DType::F16; 4],
            gates: [DType::F16; 2],
            indices: [
                DType::I64,
                DType::U32,
                DType::I64,
                DType::U32,
                DType::I64,
                DType::U32,
            ],
            ..spec.form
        };
        (spec.form.io, spec.form.pools, spec.extreme_gates) = (Spacing::Odd, Spacing::Dense, true);
    },
];

/// Ways of keeping states, of operators that take several tokens.
const SWITCHES: [Change; 5] = [
    |spec| (spec.snapshots, spec.packed) = (Some(2), true),
    |spec| {
        let SlotChoice { write_pool, .. } = spec.slots;
        spec.slots = SlotChoice {
            write_pool,
            ..SlotChoice::OF_TOKENS
        };
        (spec.snapshots, spec.options.update_state) = (Some(0), true);
    },
    |spec| (spec.previous, spec.options.update_state) = (Some(4), true),
    |spec| (spec.previous, spec.packed, spec.options.update_state) = (Some(2), true, true),
    |spec| (spec.previous, spec.tokens, spec.options.update_state) = (Some(5), 0, true),
];

/// The operator's gates.
fn gates(spec: &Spec, gdn: GateKind, decay: KdaDecay, beta: KdaBeta) -> GateKind {
    match spec.operator {
        Operator::KdaRecurrent => GateKind::Kda(decay, beta),
        _ => gdn,
    }
}

/// Launches that take each branch that a load-time constant decides.
fn specs(family: Family) -> Vec<Spec> {
    let plain = Spec {
        batch: 5,
        heads: 2,
        ratio: 3,
        slots: SlotChoice::BOTH,
        seed: 4,
        ..Spec::plain(family)
    };
    let mut specs = Vec::new();
    for form in FORMS {
        let mut alone = plain.clone();
        form(&mut alone);
        specs.push(alone.clone());
        if family.max_tokens() == 1 {
            continue;
        }
        specs.push(Spec {
            tokens: 1,
            ..alone.clone()
        });
        for switches in SWITCHES {
            let mut spec = alone.clone();
            switches(&mut spec);
            let each_token = spec.snapshots.is_some() || spec.slots.of_tokens.is_some();
            if family.formulation == Formulation::Recurrent || !each_token {
                specs.push(spec);
            }
        }
    }
    specs
}

#[test]
fn sanitizer_every_entry_and_switch() {
    let Some(backend) = cuda() else { return };
    for &entry in Entry::ALL {
        for spec in Family::of(entry).into_iter().flat_map(specs) {
            let case = spec.case();
            let (variants, _) = backend.with(&case, |_, _, args| args.variants()).unwrap();
            if variants.unwrap().contains(&entry) {
                check(&case, &backend.run(&case, Some(entry)));
            }
        }
    }
}

#[test]
fn sanitizer_an_empty_batch() {
    let Some(backend) = cuda() else { return };
    let operators = [
        Operator::GdnDecode,
        Operator::GdnMtp,
        Operator::KdaRecurrent,
    ];
    for family in operators.into_iter().flat_map(Family::all) {
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
