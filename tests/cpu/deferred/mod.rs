//! Deferred write-back: every entry against the reference, and laws, on every backend.

mod laws;
mod layer;

use gated_delta::{DType, Entry};
use gated_delta_test_support::backend::Turns;
use gated_delta_test_support::deferred::{Spec, entries, is_layer, of_entry};
use gated_delta_test_support::for_all;
use proptest::prelude::*;
use proptest::sample::select;

/// Random problems like `of`: rows of up to three sequences, in any slots, some of which are out of range.
fn specs(of: Spec) -> BoxedStrategy<Spec> {
    let (most_tokens, most_pending) = if of.parallel { (8, 16) } else { (1, 8) };
    let sizes = (1usize..=3, select(vec![[1, 1], [1, 2], [2, 2], [2, 1]]));
    let ring = (1usize..=most_pending).prop_flat_map(move |most| {
        let tokens = 0..=most.min(most_tokens);
        (
            Just(most),
            most + most_tokens..=most + 2 * most_tokens + 6,
            tokens,
        )
    });
    let dtypes = (
        select(vec![DType::Bf16, DType::F16, DType::F32]),
        select(vec![DType::I32, DType::I64, DType::U32]),
    );
    let switches = (any::<[bool; 4]>(), 0usize..=2, any::<u64>());
    (sizes, ring, dtypes, switches)
        .prop_flat_map(
            move |((rows, heads), (most, entries, tokens), dtypes, switches)| {
                let of_rows = (
                    Just((0..rows as i64).collect::<Vec<_>>()).prop_shuffle(),
                    proptest::collection::vec(0..=most as i64, rows),
                    proptest::collection::vec(0..entries as i64, rows),
                    proptest::collection::vec(any::<bool>(), rows),
                    // Number of the row with an invalid index, and the kind of index.
                    (0..4 * rows, 0usize..=3),
                );
                let ring = ([most, entries], tokens);
                (Just((heads, ring, dtypes, switches)), of_rows)
            },
        )
        .prop_map(
            move |((heads, (ring, tokens), dtypes, switches), of_rows)| {
                let ([raw_gates, tiled, l2norm, fresh], gap, seed) = switches;
                let (slots, len, base, are_fresh, (out, which)) = of_rows;
                let mut spec = Spec {
                    raw_gates,
                    io: dtypes.0,
                    index: dtypes.1,
                    pool_slots: slots.len() + 1,
                    slots,
                    heads,
                    ring,
                    len,
                    base,
                    updates: match of.parallel && seed % 2 == 0 {
                        true => DType::Bf16,
                        false => DType::F32,
                    },
                    fresh: (fresh && tokens > 0).then_some(are_fresh),
                    tokens,
                    gap,
                    tiled,
                    l2norm,
                    spread: seed % 3 == 0,
                    seed,
                    ..of.clone()
                };
                if out < spec.slots.len() {
                    match which {
                        0 => spec.slots[out] = i64::from(i32::MAX),
                        1 => spec.len[out] = ring[0] as i64 + 1,
                        2 => spec.base[out] = ring[1] as i64,
                        _ => spec.null_slot = Some(spec.slots[out] as u32),
                    }
                }
                spec
            },
        )
        .boxed()
}

/// Checks an entry against the reference on every backend, for random problems of `specs`.
fn differential(subject: &str, entry: Entry, specs: fn(Spec) -> BoxedStrategy<Spec>) {
    for of in of_entry(entry, &[]) {
        let cases = match (of.parallel, of.dim) {
            (false, 64) => 12,
            (false, _) | (true, 64) => 4,
            _ => 2,
        };
        let turns = Turns::new(0);
        for_all(subject, cases, specs(of), |spec| {
            let problem = spec.problem();
            turns.next(|backend| problem.check(&problem.run(backend, Some(entry))));
        });
    }
}

#[test]
fn every_entry_computes_what_the_reference_does() {
    let mut seen = 0;
    for entry in entries().filter(|&entry| !is_layer(entry)) {
        differential("deferred", entry, specs);
        seen += 1;
    }
    assert_eq!(seen, 11);
}
