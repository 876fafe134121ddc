//! Tests of the tables, of the room of entries and of the choice of an entry.

use std::collections::HashSet;

use super::table::UNSELECTED;
use super::*;

/// A kind with one token and one value head.
fn kind(
    family: Family,
    per_channel: bool,
    layout: StateLayout,
    state: DType,
    [k_dim, v_dim]: [u32; 2],
) -> Kind {
    Kind {
        family,
        per_channel,
        mode: Mode::Commit,
        narrow: false,
        layout,
        state,
        k_dim,
        v_dim,
        ratio: 1,
        tokens: 1,
        in_sets: false,
        in_pair: false,
        norm: false,
    }
}

/// Kinds that have entries or thresholds of their own.
fn kinds() -> impl Iterator<Item = Kind> {
    use StateLayout::{KLast, VLast};

    // The mode, narrow views and T + T' have thresholds of their own too.
    let others = [
        (Mode::Update, false, 1),
        (Mode::Update, false, 4),
        (Mode::Update, false, 8),
        (Mode::Each, false, 4),
        (Mode::Each, false, 8),
        (Mode::Verify, false, 1),
        (Mode::Resume, false, 2),
        (Mode::Resume, true, 2),
    ];
    let families = Entry::ALL.iter().filter_map(|entry| entry.computes());
    let families: HashSet<_> = families
        .flat_map(|computes| {
            computes
                .all_operators()
                .map(move |pc| (computes.family, pc))
        })
        .filter(|(family, _)| family.knows_states() && !family.takes_singles())
        .collect();
    families.into_iter().flat_map(move |(family, per_channel)| {
        let states = [DType::F32, DType::Bf16, DType::F16];
        let states = [KLast, VLast]
            .into_iter()
            .flat_map(move |layout| states.map(|state| (layout, state)));
        let kinds = states.flat_map(move |(layout, state)| {
            [[64, 64], [96, 192], [128, 128]]
                .map(|dims| kind(family, per_channel, layout, state, dims))
        });
        kinds.flat_map(move |kind| {
            let of = others
                .into_iter()
                .filter_map(move |(mode, narrow, tokens)| {
                    let other = Kind {
                        mode,
                        narrow,
                        tokens,
                        ..kind
                    };
                    let is_none = family.is_parallel() && mode == Mode::Each;
                    (!is_none && rows(other) != rows(kind)).then_some(other)
                });
            [kind].into_iter().chain(of)
        })
    })
}

/// The same kinds with one and with two value heads per query/key head.
fn of_each_ratio() -> impl Iterator<Item = Kind> {
    kinds().flat_map(|kind| [1, 2].map(|ratio| Kind { ratio, ..kind }))
}

/// The selected entry depends on the kept states: f32 K-last updates of eight tokens, and V-last states after each of many
/// tokens.
#[test]
fn what_is_kept_chooses() {
    let kind = |layout, state, tokens, mode| Kind {
        mode,
        ratio: 2,
        tokens,
        ..kind(Family::RECURRENT, false, layout, state, [128, 128])
    };
    let (k_last, v_last) = (StateLayout::KLast, StateLayout::VLast);
    let (each, last, other) = (Mode::Each, Mode::Update, Mode::Verify);
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
    for kind in of_each_ratio() {
        let (rows, variants): (_, Vec<_>) = (rows(kind), kind.variants().collect());
        assert_eq!(rows.is_empty(), variants.is_empty(), "{kind:?}");
        assert!(rows.is_sorted_by(|one, next| one.0 < next.0), "{kind:?}");
        assert!(rows.last().is_none_or(|last| last.0 == ANY), "{kind:?}");
        for (_, entry) in rows {
            assert!(variants.contains(entry), "{kind:?}: {}", entry.name());
        }
    }
}

/// Every entry is in a table, is launched before or after an entry of a table, or is in the list of entries that no launch
/// selects.
#[test]
fn every_entry_is_selected_by_some_kind_or_said_not_to_be() {
    let selected = of_each_ratio().flat_map(|kind| rows(kind).iter().map(|&(_, entry)| entry));
    let beside = kinds().flat_map(|kind| kind.beside(true).chain(kind.carry()));
    let mut known: Vec<Entry> = selected.chain(beside).collect();
    known.sort();
    known.dedup();
    assert!(UNSELECTED.iter().all(|entry| !known.contains(entry)));
    known.extend(UNSELECTED);
    known.sort();
    let all = Entry::ALL.iter().copied();
    let mut all: Vec<Entry> = all.filter(|entry| entry.computes().is_some()).collect();
    all.sort();
    assert_eq!(known, all);
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
            for &(up_to, entry) in rows(kind).iter().filter(on_hopper) {
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

/// GPUs by their published attributes: multiprocessors, compute capability, and KiB of shared memory that a block may have.
const GPUS: [(&str, u32, (u32, u32), u32); 8] = [
    ("A100", 108, (8, 0), 163),
    ("RTX 3090", 82, (8, 6), 99),
    ("RTX 4090", 128, (8, 9), 99),
    ("L40S", 142, (8, 9), 99),
    ("H200", 132, (9, 0), 227),
    ("B200", 148, (10, 0), 227),
    ("RTX 5090", 170, (12, 0), 99),
    ("GB10", 48, (12, 1), 99),
];

#[test]
fn every_gpu_and_every_ratio_has_an_entry_that_runs_there() {
    for (name, multiprocessors, compute_capability, shared) in GPUS {
        let gpu = Gpu::new(multiprocessors, compute_capability);
        assert_eq!(gpu.shared_bytes, shared * 1024, "{name}");
        for kind in kinds().filter(|&kind| !rows(kind).is_empty()) {
            // With many tokens a block has no room for the largest number of heads.
            let most = kind.max_heads().unwrap_or(8);
            let most = if kind.tokens > 1 { 2 } else { most };
            for ratio in [1, 2, most] {
                has_entries(name, gpu, Kind { ratio, ..kind });
            }
        }
    }
}

/// The entries of a kind on a GPU in the notation of `tiles.txt`: each after the largest B · HV that gets it.
fn tiles(kind: Kind, gpu: Gpu) -> String {
    const MOST: u32 = 10_000;
    let mut all = String::new();
    let entry = |heads| kind.entry(heads, gpu).unwrap();
    let tile = |entry: Entry| {
        let name = entry.name();
        name[name.find("tile").unwrap()..].to_owned()
    };
    for heads in (1..MOST).filter(|&heads| entry(heads) != entry(heads + 1)) {
        all += &format!("{heads}:{} ", tile(entry(heads)));
    }
    all + "*:" + &tile(entry(MOST))
}

/// Thresholds follow from the number of multiprocessors, the instructions and the shared memory. Bandwidth does not move them: on an H100,
/// with 0.7 of an H200's bandwidth, they are no lower (docs/lab-notes.md).
#[test]
fn each_gpu_has_thresholds_of_its_own() {
    let of = |family, [k, v]: [u32; 2], mode| Kind {
        mode,
        ratio: 2,
        ..kind(family, false, StateLayout::KLast, DType::Bf16, [k, v])
    };
    let dims = [128, 128];
    let decode = of(Family::RECURRENT, dims, Mode::Update);
    let verify = Kind {
        tokens: 4,
        ..of(Family::PARALLEL, dims, Mode::Verify)
    };
    let layer = of(Family::DECODE.in_layer(), dims, Mode::Update);
    let scan = of(Family::chunked(Stage::Chain), dims, Mode::Update);
    let wanted = [
        (
            "A100",
            [
                "91:tile16 *:tile16_warps2",
                "52:tile64 837:tile128 *:tile64_warps2",
                "*:tile128",
                "*:tile64_mma",
            ],
        ),
        (
            "RTX 3090",
            [
                "69:tile16 *:tile16_warps2",
                "39:tile64 636:tile128 *:tile64_warps2",
                "*:tile128",
                "*:tile64_mma",
            ],
        ),
        (
            "RTX 4090",
            [
                "108:tile16 *:tile16_warps2",
                "62:tile64 992:tile128 *:tile64_warps2",
                "*:tile128",
                "*:tile64_mma",
            ],
        ),
        (
            "L40S",
            [
                "120:tile16 *:tile16_warps2",
                "68:tile64 1101:tile128 *:tile64_warps2",
                "*:tile128",
                "*:tile64_mma",
            ],
        ),
        (
            "H200",
            [
                "112:tile16 *:tile16_warps2",
                "64:tile64 1024:tile128 *:tile64_warps2",
                "128:tile16 *:tile128",
                "128:tile64 *:tile128",
            ],
        ),
        (
            "B200",
            [
                "125:tile16 *:tile16_warps2",
                "71:tile64 1148:tile128 *:tile64_warps2",
                "143:tile16 *:tile128",
                "*:tile64_mma",
            ],
        ),
        (
            "RTX 5090",
            [
                "144:tile16 *:tile16_warps2",
                "82:tile64 1318:tile128 *:tile64_warps2",
                "164:tile16 *:tile128",
                "*:tile64_mma",
            ],
        ),
        (
            "GB10",
            [
                "40:tile16 *:tile16_warps2",
                "23:tile64 372:tile128 *:tile64_warps2",
                "46:tile16 *:tile128",
                "*:tile64_mma",
            ],
        ),
    ];
    for ((name, multiprocessors, capability, _), wanted) in GPUS.into_iter().zip(wanted) {
        let gpu = Gpu::new(multiprocessors, capability);
        let got = [decode, verify, layer, scan].map(|kind| tiles(kind, gpu));
        assert_eq!((name, got.each_ref().map(String::as_str)), wanted);
    }
}

/// A GPU that is used as another one has the kernels of the other, and no more shared memory than either.
#[test]
fn a_gpu_is_used_within_its_own_shared_memory() {
    let [of_99, of_227] = [Gpu::new(170, (12, 0)), Gpu::new(132, (9, 0))];
    assert_eq!(of_227.used_as((8, 9)), Gpu::new(132, (8, 9)));
    assert_eq!(of_99.used_as((8, 0)).shared_bytes, 99 << 10);
    assert_eq!(
        of_99.used_as((8, 0)).machine(),
        Gpu::new(170, (8, 0)).machine()
    );
}

/// Checks that launches of any size get an entry that `gpu` has room and instructions for, or an error that says what is missing.
fn has_entries(name: &str, gpu: Gpu, kind: Kind) {
    // On other GPUs than Hopper the scan takes short rows too.
    let is_short = kind.family.stage() == Some(Stage::Short);
    // With a convolution or a norm, drafts of a row with several value heads take a block each, in a cluster; with deferred write-back
    // even those of a single value head.
    let clusters = kind.family == Family::PARALLEL.in_layer().on_deferred();
    let has_whole_blocks = !(kind.is_layer() && kind.family.is_parallel());
    // A block has no room for a whole head of KDA's f32 states, and none is compiled for K = 64.
    let is_small = kind.state != DType::F32 || (!kind.per_channel && kind.k_dim == 128);
    let alone = (kind.ratio == 1 && !clusters && is_small) || has_whole_blocks;
    for heads in [1, 100, 10_000] {
        match kind.entry(heads, gpu) {
            Ok(entry) => {
                assert!(kind.variants().any(|variant| variant == entry));
                assert!(kind.ratio <= entry.max_ratio(), "{name}: {kind:?}");
                assert!(kind.shared_bytes(entry) <= gpu.shared_bytes, "{name}");
                assert!(!entry.takes_clusters() || gpu.has_clusters(), "{name}");
                assert!(alone || gpu.has_clusters(), "{name}: {kind:?}");
                assert!(serves(entry, gpu.machine()), "{name}: {}", entry.name());
            }
            Err(error) => {
                assert_ne!(gpu.compute_capability, (9, 0), "{kind:?}: {error}");
                if !is_short {
                    assert!(!gpu.has_clusters() && !alone, "{name}: {kind:?}");
                    assert!(error.to_string().contains("clusters"), "{error}");
                }
            }
        }
    }
}

/// If only fewer tokens or value heads fit, the error says how many.
#[test]
fn what_has_no_room_in_a_block_is_an_error() {
    let (mut by_tokens, mut by_heads) = (0, 0);
    for kind in kinds().filter(|&kind| !rows(kind).is_empty()) {
        let fits = |kind: Kind| {
            let entries = rows(kind).iter().map(|&(_, entry)| entry);
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

/// With K-last states, the producer warpgroup of a scan loads the state for a block that has a whole head.
#[test]
fn a_block_has_room_for_the_state_that_is_brought() {
    let bytes = |entry, layout, state| {
        let of_two = kind(
            Family::chunked(Stage::Chain),
            false,
            layout,
            state,
            [128, 128],
        );
        let kind = Kind { ratio: 2, ..of_two };
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

/// If the selected entry for a batch has no room, another entry that has room is selected.
#[test]
fn entries_without_room_are_passed_over() {
    let mut passed = 0;
    for kind in kinds().filter(|&kind| rows(kind).len() > 1) {
        for tokens in 1..2_000 {
            let kind = Kind { tokens, ..kind };
            let entries = rows(kind).iter();
            let room: Vec<bool> = entries.map(|&(_, entry)| kind.has_room(entry)).collect();
            if room.iter().all(|&room| room) || !room.contains(&true) {
                continue;
            }
            for &(up_to, _) in rows(kind) {
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
    let dims = [96, 192];
    let kind = kind(
        Family::PARALLEL,
        false,
        StateLayout::KLast,
        DType::F16,
        dims,
    );
    assert_eq!(
        kind.entry(1, MEASURED_ON).unwrap_err().to_string(),
        "kernel = parallel step of GDN, k_last f16 states, K = 96, V = 192 is not supported: no variant of it is compiled"
    );
    assert_eq!(kind.variants().count(), 0);
}
