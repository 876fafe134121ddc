//! Tables, rooms and the choice of an entry.

use super::*;
use crate::step::kind::Keeps;

fn kinds() -> impl Iterator<Item = Kind> {
    use Operator::{
        GdnDecode, GdnDeferred, GdnDeferredLayer, GdnDeferredLayerParallel, GdnDeferredParallel,
        GdnLayer, GdnLayerMtp, GdnLayerParallel, GdnMtp, GdnMtpParallel, GdnPrefill,
        GdnPrefillShort, KdaDecode, KdaDeferred, KdaDeferredLayer, KdaDeferredLayerParallel,
        KdaDeferredParallel, KdaLayer, KdaLayerMtp, KdaLayerParallel, KdaPrefill, KdaPrefillShort,
        KdaRecurrent, KdaRecurrentParallel,
    };
    use StateLayout::{KLast, VLast};

    let token_by_token = [
        GdnDecode,
        GdnMtp,
        KdaDecode,
        KdaRecurrent,
        GdnDeferred,
        KdaDeferred,
        GdnDeferredLayer,
        KdaDeferredLayer,
        GdnLayer,
        KdaLayer,
        GdnLayerMtp,
        KdaLayerMtp,
        GdnPrefill,
        GdnPrefillShort,
        KdaPrefill,
        KdaPrefillShort,
    ];
    let families = token_by_token.into_iter().flat_map(|operator| {
        [KLast, VLast].into_iter().flat_map(move |layout| {
            [DType::F32, DType::Bf16, DType::F16].map(move |state| (operator, layout, state))
        })
    });
    let parallel = [Mode::Verify, Mode::Update, Mode::Resume, Mode::NarrowResume]
        .into_iter()
        .flat_map(|mode| {
            [
                GdnMtpParallel(mode),
                KdaRecurrentParallel(mode),
                GdnLayerParallel(mode),
                KdaLayerParallel(mode),
            ]
        })
        .flat_map(|operator| [DType::Bf16, DType::F16].map(|state| (operator, KLast, state)))
        .chain(
            [
                GdnDeferredParallel,
                KdaDeferredParallel,
                GdnDeferredLayerParallel,
                KdaDeferredLayerParallel,
            ]
            .map(|it| (it, KLast, DType::Bf16)),
        );
    families
        .chain(parallel)
        .flat_map(|(operator, layout, state)| {
            [[64, 64], [96, 192], [128, 128]].map(|[k_dim, v_dim]| Kind {
                operator,
                layout,
                state,
                k_dim,
                v_dim,
                ratio: 1,
                tokens: 1,
                keeps: Keeps::Other,
                norm: false,
            })
        })
        .flat_map(|kind| {
            // Those that have a table of their own besides.
            let others = [
                (4, Keeps::Last),
                (8, Keeps::Last),
                (4, Keeps::Each),
                (8, Keeps::Each),
            ];
            let others = others.map(|(tokens, keeps)| Kind {
                tokens,
                keeps,
                ..kind
            });
            let others = others
                .into_iter()
                .filter(move |other| other.rows() != kind.rows());
            [kind].into_iter().chain(others)
        })
}

/// What a step keeps has a table of its own: f32 K-last updates of eight tokens, V-last states after each of many.
#[test]
fn what_is_kept_chooses() {
    let kind = |layout, state, tokens, keeps| Kind {
        operator: Operator::GdnMtp,
        layout,
        state,
        k_dim: 128,
        v_dim: 128,
        ratio: 2,
        tokens,
        keeps,
        norm: false,
    };
    let (k_last, v_last) = (StateLayout::KLast, StateLayout::VLast);
    let (each, last, other) = (Keeps::Each, Keeps::Last, Keeps::Other);
    for (kind, heads, wanted) in [
        (kind(k_last, DType::F32, 8, last), 512, "f32_k128_tile16"),
        (
            kind(k_last, DType::F32, 8, last),
            128,
            "f32_k128_tile16_warps2",
        ),
        (
            kind(k_last, DType::F32, 8, other),
            512,
            "f32_k128_tile16_warps2",
        ),
        (
            kind(k_last, DType::F32, 4, last),
            512,
            "f32_k128_tile16_warps2",
        ),
        (kind(v_last, DType::Bf16, 8, each), 2048, "bf16_k128_tile64"),
        (kind(v_last, DType::F16, 8, each), 512, "bf16_k128_tile32"),
        (kind(v_last, DType::Bf16, 8, last), 2048, "bf16_k128_tile32"),
        (kind(v_last, DType::Bf16, 4, each), 2048, "bf16_k128_tile32"),
    ] {
        let entry = kind.entry(heads, MEASURED_ON).unwrap();
        assert!(
            entry.name().ends_with(&format!("_{wanted}")),
            "{kind:?}: {}",
            entry.name()
        );
    }
}

#[test]
fn tables_rise_to_any_number_of_heads_and_hold_entries_of_their_kind() {
    for kind in kinds() {
        let (rows, variants): (_, Vec<_>) = (kind.rows(), kind.variants().collect());
        assert_eq!(rows.is_empty(), variants.is_empty(), "{kind:?}");
        assert!(rows.is_sorted_by(|one, next| one.0 < next.0), "{kind:?}");
        assert!(rows.last().is_none_or(|last| last.0 == ANY), "{kind:?}");
        for (_, entry) in rows {
            assert!(variants.contains(entry), "{kind:?}: {}", entry.name());
        }
    }
}

#[test]
fn every_variant_is_of_some_kind() {
    let of_kind = |kind: Kind| kind.variants().chain(kind.beside(true));
    let mut of_kinds: Vec<Entry> = kinds().flat_map(of_kind).collect();
    of_kinds.sort();
    of_kinds.dedup();
    let all = Entry::ALL.iter().copied();
    let mut all: Vec<Entry> = all.filter(|entry| entry.computes().is_some()).collect();
    all.sort();
    assert_eq!(of_kinds, all);
}

#[test]
fn a_gpu_with_half_the_multiprocessors_changes_at_half_the_heads() {
    for kind in kinds() {
        let measured = |heads| kind.entry(heads, MEASURED_ON);
        for multiprocessors in 16..=192 {
            let gpu = Gpu {
                multiprocessors,
                ..MEASURED_ON
            };
            let on_hopper = |row: &&Row| row.0 != ELSEWHERE;
            for &(up_to, entry) in kind.rows().iter().filter(on_hopper) {
                if up_to == ANY {
                    assert_eq!(kind.entry(u32::MAX, gpu).unwrap(), entry);
                    continue;
                }
                let last = up_to * multiprocessors / MEASURED_ON.multiprocessors;
                assert_eq!(kind.entry(last, gpu).unwrap(), entry, "{kind:?}");
                assert_ne!(kind.entry(last + 1, gpu).unwrap(), entry, "{kind:?}");
                assert_eq!(measured(up_to).unwrap(), entry);
            }
        }
    }
}

#[test]
fn every_gpu_and_every_ratio_has_an_entry_that_runs_there() {
    let without = Gpu {
        compute_capability: (8, 6),
        ..MEASURED_ON
    };
    for kind in kinds().filter(|kind| !kind.rows().is_empty()) {
        // With many tokens a block has no room for the most heads.
        let most = kind.max_heads().unwrap_or(8);
        let most = if kind.tokens > 1 { 2 } else { most };
        for ratio in [1, 2, most] {
            let kind = Kind { ratio, ..kind };
            // Short rows are worked by the chain there.
            let is_short = matches!(
                kind.operator,
                Operator::GdnPrefillShort | Operator::KdaPrefillShort
            );
            // In the parallel formulation a block has one value head, and these meet in clusters; where states wait even
            // of one.
            let clusters = matches!(
                kind.operator,
                Operator::GdnDeferredLayerParallel | Operator::KdaDeferredLayerParallel
            );
            let alone = (ratio == 1 && !clusters) || kind.operator.has_whole_blocks();
            for heads in [1, 100, 10_000] {
                match kind.entry(heads, without) {
                    Ok(entry) => {
                        assert!(!entry.takes_clusters() && alone, "{kind:?}");
                        assert!(!entry.takes_warpgroups() && !is_short, "{kind:?}");
                    }
                    Err(error) => {
                        assert!(!alone || is_short, "{kind:?}");
                        if is_short {
                            continue;
                        }
                        assert!(error.to_string().contains("clusters"), "{error}");
                    }
                }
                let entry = kind.entry(heads, MEASURED_ON).unwrap();
                assert!(kind.variants().any(|variant| variant == entry));
                assert!(ratio <= entry.max_ratio(), "{kind:?}");
            }
        }
    }
}

/// Where no more than a number of tokens, or of value heads, has room, an error says how many.
#[test]
fn what_has_no_room_in_a_block_is_an_error() {
    let (mut by_tokens, mut by_heads) = (0, 0);
    for kind in kinds().filter(|kind| !kind.rows().is_empty()) {
        let fits = |kind: Kind| {
            let entries = kind.rows().iter().map(|&(_, entry)| entry);
            let mut entries = entries.map(|entry| (entry, kind.shared_bytes(entry)));
            entries.any(|(entry, bytes)| bytes <= most_shared_bytes(entry))
        };
        let message = |kind: Kind| kind.check_room().unwrap_err().to_string();
        for tokens in [1, 2 * 16] {
            assert!(Kind { tokens, ..kind }.check_room().is_ok(), "{kind:?}");
        }
        let with = |tokens| Kind { tokens, ..kind };
        if let Some(first) = (1..20_000).find(|&tokens| !fits(with(tokens))) {
            with(first - 1).check_room().unwrap();
            let wanted = format!(
                "T + T': wanted at most {} with HV / H = 1, by the shared memory of a block, got {first}",
                first - 1
            );
            assert_eq!(message(with(first)), wanted);
            let error = with(first).entry(1, MEASURED_ON).unwrap_err();
            assert_eq!(error.to_string(), wanted);
            by_tokens += 1;
        }
        let Some(most) = kind.max_heads() else {
            continue;
        };
        let with = |ratio| Kind { ratio, ..kind };
        let wanted = format!("HV / H: wanted at most {most} with a convolution or a norm");
        assert!(message(with(most + 1)).starts_with(&wanted), "{kind:?}");
        by_heads += 1;
    }
    assert!(by_tokens > 0 && by_heads > 0);
}

/// Of K-last states a chain's copier brings those of a block that has all of a head.
#[test]
fn a_block_has_room_for_the_state_that_is_brought() {
    let bytes = |entry, layout, state| {
        let kind = Kind {
            operator: Operator::GdnPrefill,
            layout,
            state,
            k_dim: 128,
            v_dim: 128,
            ratio: 2,
            tokens: 1,
            keeps: Keeps::Other,
            norm: false,
        };
        kind.shared_bytes(entry)
    };
    for (entry, elements) in [
        (Entry::gdn_prefill_chain_k128_tile128, 128 * 128),
        (Entry::gdn_prefill_chain_k128_tile64, 0),
        (Entry::prefill_single_k128, 0),
    ] {
        let without = entry.shared_bytes();
        for (state, of_element) in [(DType::F32, 4), (DType::Bf16, 2), (DType::F16, 2)] {
            let k_last = bytes(entry, StateLayout::KLast, state);
            assert_eq!(
                k_last,
                without + of_element * elements,
                "{entry:?}, {state}"
            );
            assert_eq!(bytes(entry, StateLayout::VLast, state), without);
        }
    }
}

/// A batch for whose entry there is no room gets one that has.
#[test]
fn entries_without_room_are_passed_over() {
    let mut passed = 0;
    for kind in kinds().filter(|kind| kind.rows().len() > 1) {
        for tokens in 1..2_000 {
            let kind = Kind { tokens, ..kind };
            let rows = kind.rows().iter();
            let room: Vec<bool> = rows.map(|&(_, entry)| kind.has_room(entry)).collect();
            if room.iter().all(|&room| room) || !room.contains(&true) {
                continue;
            }
            for &(up_to, _) in kind.rows() {
                let entry = kind.entry(up_to, MEASURED_ON).unwrap();
                assert!(kind.has_room(entry), "{kind:?}: {}", entry.name());
                passed += 1;
            }
        }
    }
    assert!(passed > 0);
}

#[test]
fn what_is_not_compiled_is_an_error() {
    let kind = Kind {
        operator: Operator::GdnMtpParallel(Mode::Verify),
        layout: StateLayout::KLast,
        state: DType::F16,
        k_dim: 96,
        v_dim: 192,
        ratio: 1,
        tokens: 1,
        keeps: Keeps::Other,
        norm: false,
    };
    assert_eq!(
        kind.entry(1, MEASURED_ON).unwrap_err().to_string(),
        "kernel = GdnMtpParallel(Verify), k_last f16 states, K = 96, V = 192 is not supported: no variant of it is compiled"
    );
    assert_eq!(kind.variants().count(), 0);
}
