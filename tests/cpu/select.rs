//! Both sides of each batch size at which another variant is selected give the same bits.

use std::sync::OnceLock;

use gated_delta::{Activation, DType, Entry, KdaBeta, StateLayout, Tensor};
use gated_delta_harness::arguments::{
    Arguments, DecayKind, GateKind, GatedNorm, New, Operator, Tokens, value_dim,
};
use gated_delta_test_support::backend::{Backend, backends, on_threads};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Change, take};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::variants;

/// More heads than any threshold.
const MOST_HEADS: usize = 1 << 15;

/// Every selected variant is selected for at least this many consecutive batch sizes.
const APART: usize = 16;

/// The variant that is selected for `batch` rows of `heads` heads.
fn selected(family: Family, batch: usize, heads: usize) -> Entry {
    let Family { state, dim, .. } = family;
    // SAFETY: no kernel is launched on these addresses.
    let tensor =
        |dtype, dims: &[usize]| unsafe { Tensor::from_raw(0x1_0000, dtype, dims) }.unwrap();
    let tokens = family.max_tokens().min(2);
    let v_dim = value_dim(dim);
    let qk = tensor(DType::Bf16, &[batch, tokens, heads, dim]);
    let vo = tensor(DType::Bf16, &[batch, tokens, heads, v_dim]);
    let beta = tensor(DType::F32, &[batch, tokens, heads]);
    let (gates, gate) = match family.operator {
        Operator::Gdn => (GateKind::Given, beta),
        Operator::Kda => (GateKind::Kda(DecayKind::Log, KdaBeta::Given), qk),
    };
    let args = Arguments {
        new: Some(New {
            q: qk,
            tokens: Tokens {
                k: qk,
                v: vo,
                gate,
                beta,
            },
            o: vo,
        }),
        norm: family.layer.then(|| GatedNorm {
            z: vo,
            weight: tensor(DType::F32, &[v_dim]),
            eps: 1e-6,
            activation: Activation::Silu,
        }),
        options: Spec::plain(family).options,
        ..Arguments::new(
            gates,
            tensor(
                state,
                &match family.layout {
                    StateLayout::KLast => [batch, heads, v_dim, dim],
                    StateLayout::VLast => [batch, heads, dim, v_dim],
                },
            ),
        )
    };
    let work = args.work().unwrap();
    let selected = work.selected().unwrap();
    assert!(
        work.variants().unwrap().contains(&selected),
        "{}",
        selected.name()
    );
    selected
}

/// Pairs of a family and a largest batch size (of single heads) before another variant is selected. The search compares batch sizes
/// that are [`APART`] apart, and looks at all sizes between two that have different variants.
fn thresholds() -> &'static [(Family, usize)] {
    static THRESHOLDS: OnceLock<Vec<(Family, usize)>> = OnceLock::new();
    let of = |family| {
        let selected = |batch| selected(family, batch, 1);
        let sizes = (1..=MOST_HEADS + 1).step_by(APART);
        let apart: Vec<_> = sizes.map(|batch| (batch, selected(batch))).collect();
        let changes = apart.windows(2).filter(|pair| pair[0].1 != pair[1].1);
        let between = changes.flat_map(|pair| pair[0].0..pair[1].0);
        between
            .filter(|&batch| selected(batch) != selected(batch + 1))
            .map(|batch| (family, batch))
            .collect::<Vec<_>>()
    };
    THRESHOLDS.get_or_init(|| Family::of_kernels().into_iter().flat_map(of).collect())
}

/// Compares `threshold` rows of `ratio` value heads with one row more. The first, the middle and the last two rows are active.
fn both_sides(backend: &Backend, family: Family, threshold: usize, ratio: usize) {
    let slots = SlotChoice {
        read: true,
        ..SlotChoice::NONE
    };
    let mut spec = Spec {
        batch: 4,
        heads: 1,
        ratio,
        slots,
        ..Spec::plain(family)
    };
    // f32 outputs are not rounded, so that a different order of a sum shows.
    spec.form.qkvo[3] = DType::F32;
    let problem = spec.problem();
    let active = [0, threshold / 2, threshold - 1, threshold];
    let place = |b: usize| active.iter().position(|&at| at == b);
    let mut over = problem.take_rows(
        &(0..=threshold)
            .map(|b| place(b).unwrap_or(0))
            .collect::<Vec<_>>(),
    );
    if let Some(slots) = &mut over.read_slots {
        for b in (0..=threshold).filter(|b| place(*b).is_none()) {
            slots.values[b] = -1.0 - b as f64;
        }
    }
    let rows: Vec<usize> = (0..threshold).collect();
    let (over, up_to) = (
        over.case(&spec.form),
        over.take_rows(&rows).case(&spec.form),
    );
    let (over_after, up_to_after) = (backend.run(&over, None), backend.run(&up_to, None));
    check(&over, &over_after);
    assert!(
        take(&over_after.o_bits(), &over.o().dims, 0, &rows) == up_to_after.o_bits(),
        "o differs"
    );
    let rows = up_to.rows();
    for slot in rows
        .iter()
        .flat_map(|row| &row.live)
        .flat_map(|live| live.writes())
    {
        assert!(
            over_after.slot_bits(slot) == up_to_after.slot_bits(slot),
            "the state of slot {slot} differs"
        );
        assert!(
            over_after.slot_window_bits(slot) == up_to_after.slot_window_bits(slot),
            "the window of slot {slot} differs"
        );
    }
}

/// Rows of at most 64 tokens. With more than 132 value heads a block has two of them, if a query/key head has an even number. Each
/// layout has one dtype.
#[test]
fn results_are_the_same_with_two_heads_a_block() {
    let mut families = Family::prefills();
    families.retain(|it| it.dim == 128 && it.operator == Operator::Gdn);
    families.retain(|it| it.state == DType::F32 || it.state == DType::Bf16);
    families.retain(|it| (it.state == DType::F32) == (it.layout == StateLayout::KLast));
    for family in families {
        let family = Family {
            layer: false,
            ..family
        };
        for backend in backends() {
            println!("{family:?}, {}", backend.name());
            both_sides(backend, family, 66, 2);
            both_sides(backend, family, 44, 3);
        }
    }
}

/// One family of each kind. That all entries of a family give the same bits is tested elsewhere.
#[test]
fn results_are_the_same_on_both_sides_of_each_threshold() {
    let kinds = Family::of_each_kind();
    let mut thresholds = thresholds().to_vec();
    thresholds.retain(|(family, _)| kinds.contains(family));
    on_threads(&thresholds, |&(family, threshold)| {
        for backend in backends() {
            println!("{family:?} at {threshold} heads, {}", backend.name());
            both_sides(backend, family, threshold, 1);
        }
    });
}

#[test]
fn thresholds_count_the_heads_of_all_rows() {
    for &(family, threshold) in thresholds() {
        for heads in [2, 8, 64] {
            let batch = threshold / heads;
            assert_eq!(
                selected(family, batch, heads),
                selected(family, batch * heads, 1),
                "{batch} rows of {heads}"
            );
            let next = selected(family, (batch + 1) * heads, 1);
            assert_eq!(
                selected(family, batch + 1, heads),
                next,
                "{} rows of {heads}",
                batch + 1
            );
        }
    }
}

#[test]
fn every_entry_is_a_variant_of_its_family() {
    for family in Family::all() {
        // Some kernels take a single value head of a query/key head.
        let spec = Spec {
            ratio: 1,
            ..Spec::plain(family)
        };
        let case = spec.case();
        let wanted: Vec<Entry> = Entry::ALL
            .iter()
            .copied()
            .filter(|entry| Family::all_of(*entry).contains(&family))
            // More tokens have other entries.
            .filter(|entry| {
                !spec.has_bits_of_bound() || !entry.computes().is_some_and(|it| it.takes_sets())
            })
            .collect();
        assert_eq!(variants(&case), wanted, "{family:?}");
    }
}
