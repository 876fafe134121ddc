//! Tests of the check in the simulator: it passes right results, and refuses wrong ones.

use gated_delta::{Activation, BetaScale, DType, Formulation, Library, StateLayout, StreamRef};
use gated_delta_benches::buffers::Buffers;
use gated_delta_benches::cell::{Cell, Mode, Op};
use gated_delta_benches::shapes::Model;
use gated_delta_harness::arguments::DecayKind;

const MODES: [Mode; 6] = [
    Mode::Update,
    Mode::Snapshots,
    Mode::Verify,
    Mode::Resume,
    Mode::Commit,
    Mode::TokenSlots,
];

fn cell(op: Op, mode: Mode, tokens: usize) -> Cell {
    Cell {
        op,
        mode,
        formulation: Formulation::Recurrent,
        gate: DecayKind::Log,
        model: Model {
            name: "small",
            heads: 1,
            value_heads: 2,
            dim: None,
            norm: Activation::Silu,
            beta: BetaScale::Two,
        },
        dim: 64,
        batch: 3,
        tokens,
        state: DType::Bf16,
        layout: StateLayout::KLast,
        slots: false,
        cold: false,
    }
}

/// Checks every variant of a cell.
fn check(cell: Cell) {
    let library = Library::simulator();
    let mut buffers = Buffers::new(&library, cell).unwrap();
    let truth = buffers.truth().unwrap();
    let variants = buffers.work(0).unwrap().variants().unwrap();
    assert!(!variants.is_empty(), "{}", cell.title());
    for variant in variants {
        let error = buffers.check(&library, StreamRef::default_stream(), variant, &truth);
        let error = error.unwrap_or_else(|error| panic!("{}: {error:#}", cell.title()));
        assert!(error > 0.0, "{}: nothing was compared", cell.title());
    }
}

#[test]
fn every_mode_passes() {
    for op in [Op::GdnMtp, Op::KdaRecurrent] {
        for mode in MODES {
            check(cell(op, mode, 3));
        }
    }
    check(cell(Op::GdnDecode, Mode::Update, 1));
    check(cell(Op::GdnDecode, Mode::Verify, 1));
    for op in [Op::GdnLayer, Op::KdaLayer] {
        check(cell(op, Mode::Update, 1));
        check(Cell {
            slots: true,
            layout: StateLayout::VLast,
            gate: DecayKind::Softplus,
            ..cell(op, Mode::Verify, 1)
        });
    }
}

#[test]
fn every_mode_of_the_parallel_formulation_passes() {
    for op in [Op::GdnMtp, Op::KdaRecurrent] {
        for mode in [Mode::Update, Mode::Verify, Mode::Resume, Mode::Commit] {
            for state in [DType::Bf16, DType::F16] {
                check(Cell {
                    formulation: Formulation::Parallel,
                    state,
                    dim: if op == Op::GdnMtp { 64 } else { 128 },
                    ..cell(op, mode, 4)
                });
            }
        }
    }
}

#[test]
fn every_gate_state_and_layout_passes() {
    for gate in [
        DecayKind::Log,
        DecayKind::Softplus,
        DecayKind::LowerBound(-5.0),
    ] {
        check(Cell {
            gate,
            state: DType::F32,
            ..cell(Op::KdaRecurrent, Mode::Update, 2)
        });
    }
    check(Cell {
        layout: StateLayout::VLast,
        slots: true,
        ..cell(Op::GdnMtp, Mode::Resume, 2)
    });
    check(Cell {
        slots: true,
        ..cell(Op::GdnDecode, Mode::Update, 1)
    });
}

/// K = 96 with V = 192, and f16 states.
#[test]
fn every_width_of_a_state_and_both_its_dims_pass() {
    for layout in [StateLayout::KLast, StateLayout::VLast] {
        for state in [DType::Bf16, DType::F16, DType::F32] {
            for (op, mode) in [
                (Op::GdnDecode, Mode::Update),
                (Op::GdnMtp, Mode::Snapshots),
                (Op::GdnLayer, Mode::Update),
            ] {
                let tokens = if op == Op::GdnMtp { 2 } else { 1 };
                check(Cell {
                    dim: 96,
                    state,
                    layout,
                    ..cell(op, mode, tokens)
                });
            }
        }
    }
}

#[test]
fn what_another_mode_leaves_behind_is_refused() {
    let library = Library::simulator();
    let of = |mode| Buffers::new(&library, cell(Op::GdnMtp, mode, 2)).unwrap();
    let mut updated = of(Mode::Update);
    let variant = updated.work(0).unwrap().selected().unwrap();
    let stream = StreamRef::default_stream();
    for (wrong, named) in [
        (Mode::Verify, "the states"),
        (Mode::Snapshots, "the states"),
    ] {
        let truth = of(wrong).truth().unwrap();
        let refusal = updated.check(&library, stream, variant, &truth);
        let refusal = format!("{:#}", refusal.unwrap_err());
        assert!(refusal.contains(named), "{refusal}");
    }
}
