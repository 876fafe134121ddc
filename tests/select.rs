//! Both sides of every threshold at which another variant is selected: the same results, bit for bit.

use gated_delta::ops::GdnGates;
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::kda_recurrent::{KdaBeta, KdaGate, KdaGates};
use gated_delta::ops::recurrent::{Recurrent, RecurrentOptions};
use gated_delta::{DType, Entry, Tensor};
use gated_delta_tests::args::Args;
use gated_delta_tests::backend::{Backend, backends};
use gated_delta_tests::compare::check;
use gated_delta_tests::problem::{Operator, take};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

/// More heads than any threshold.
const MOST_HEADS: usize = 1 << 15;

/// Every family of every operator.
fn families() -> impl Iterator<Item = Family> {
    let operators = [
        Operator::GdnDecode,
        Operator::GdnMtp,
        Operator::KdaRecurrent,
    ];
    operators.into_iter().flat_map(Family::all)
}

/// The variant that is selected for `batch` rows of `heads` heads.
fn selected(family: Family, batch: usize, heads: usize) -> Entry {
    let Family { state, dim, .. } = family;
    // SAFETY: nothing is launched on these addresses.
    let tensor =
        |dtype, dims: &[usize]| unsafe { Tensor::from_raw(0x1_0000, dtype, dims) }.unwrap();
    let (plain, tokens) = (Spec::plain(family), family.max_tokens().min(2));
    let activations = tensor(DType::Bf16, &[batch, tokens, heads, dim]);
    let gate = tensor(DType::F32, &[batch, tokens, heads]);
    let pool = tensor(state, &[batch, heads, dim, dim]);
    let given = GdnGates::Given {
        g: gate,
        beta: gate,
    };
    let args = match family.operator {
        Operator::GdnDecode => Args::GdnDecode(GdnDecode {
            q: activations,
            k: activations,
            v: activations,
            gates: given,
            o: activations,
            pool,
            write_pool: None,
            read_slots: None,
            write_slots: None,
            options: GdnDecodeOptions {
                state_layout: family.layout,
                ..GdnDecodeOptions::default()
            },
        }),
        Operator::GdnMtp => Args::GdnMtp(verify(activations, given, pool, plain.options)),
        Operator::KdaRecurrent => {
            let gates = KdaGates {
                g: activations,
                kind: KdaGate::Log,
                beta: gate,
                beta_kind: KdaBeta::Given,
            };
            Args::KdaRecurrent(verify(activations, gates, pool, plain.options))
        }
    };
    let selected = args.selected().unwrap();
    assert!(
        args.variants().unwrap().contains(&selected),
        "{}",
        selected.name()
    );
    selected
}

/// A verify in place.
fn verify<'a, G>(
    activations: Tensor<'a>,
    gates: G,
    pool: Tensor<'a>,
    options: RecurrentOptions,
) -> Recurrent<'a, G> {
    Recurrent {
        q: activations,
        k: activations,
        v: activations,
        gates,
        o: activations,
        pool,
        write_pool: None,
        read_slots: None,
        write_slots: None,
        token_slots: None,
        accepted: None,
        snapshots: None,
        packed: None,
        previous: None,
        options,
    }
}

/// The batch sizes of single heads after which another variant is selected.
fn thresholds(family: Family) -> Vec<usize> {
    let selected: Vec<Entry> = (1..=MOST_HEADS)
        .map(|batch| selected(family, batch, 1))
        .collect();
    (1..MOST_HEADS)
        .filter(|&batch| selected[batch - 1] != selected[batch])
        .collect()
}

/// `threshold` rows and one more, of which the first, the middle and the last two are active.
fn both_sides(backend: &Backend, family: Family, threshold: usize) {
    let slots = SlotChoice {
        read: true,
        ..SlotChoice::NONE
    };
    let spec = Spec {
        batch: 4,
        heads: 1,
        ratio: 1,
        slots,
        ..Spec::plain(family)
    };
    let problem = spec.problem();
    let active = [0, threshold / 2, threshold - 1, threshold];
    let place = |b: usize| active.iter().position(|&at| at == b);
    let mut over = problem.take_rows(
        &(0..=threshold)
            .map(|b| place(b).unwrap_or(0))
            .collect::<Vec<_>>(),
    );
    for (b, slot) in over
        .read_slots
        .iter_mut()
        .flatten()
        .enumerate()
        .filter(|(b, _)| place(*b).is_none())
    {
        *slot = -1 - b as i64;
    }
    let rows: Vec<usize> = (0..threshold).collect();
    let (over, up_to) = (
        over.case(&spec.form),
        over.take_rows(&rows).case(&spec.form),
    );
    let (over_after, up_to_after) = (backend.run(&over, None), backend.run(&up_to, None));
    check(&over, &over_after);
    check(&up_to, &up_to_after);
    assert!(
        take(&over_after.o_bits(), &over.o.dims, 0, &rows) == up_to_after.o_bits(),
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
    }
}

#[test]
fn results_are_the_same_on_both_sides_of_each_threshold() {
    for family in families() {
        for threshold in thresholds(family) {
            for backend in backends() {
                println!("{family:?} at {threshold} heads, {}", backend.name());
                both_sides(backend, family, threshold);
            }
        }
    }
}

#[test]
fn thresholds_count_the_heads_of_all_rows() {
    for family in families() {
        for threshold in thresholds(family) {
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
}

#[test]
fn every_entry_is_a_variant_of_its_family() {
    for family in families() {
        let case = Spec::plain(family).case();
        let (variants, _) = backends()[0]
            .with(&case, |_, _, args| args.variants())
            .unwrap();
        let wanted: Vec<Entry> = Entry::ALL
            .iter()
            .copied()
            .filter(|entry| Family::of(*entry) == Some(family))
            .collect();
        assert_eq!(variants.unwrap(), wanted, "{family:?}");
    }
}
