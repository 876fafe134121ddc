//! The committed PTX: one entry per file, its required and forbidden instructions, and its specialisation.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use gated_delta::specialise::{specialise, template};
use gated_delta::{DType, Entry, StateLayout};
use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch::{self, Stage};
use gated_delta_kernels::machine;
use gated_delta_test_support::backend::{is_portable_chain, on_threads};
use gated_delta_test_support::deferred;
use gated_delta_test_support::spec::Family;

/// Every entry and its committed text.
static TEXTS: LazyLock<Vec<(Entry, String)>> = LazyLock::new(|| {
    let text = |&entry| (entry, template(entry).unwrap());
    Entry::ALL.iter().map(text).collect()
});

/// The entries of the operators on states, with family, name and text.
fn on_states() -> impl Iterator<Item = (Family, &'static str, &'static str)> {
    let of_family = |(entry, text): &'static (Entry, String)| {
        Some((Family::of(*entry)?, entry.name(), &**text))
    };
    TEXTS.iter().filter_map(of_family)
}

/// Words of a text: identifiers, directives and numbers, with `$L1`, `.version` and `ld.global.b32` as one word each.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || "_$%.:".contains(c)))
        .filter(|word| !word.is_empty())
}

/// The instructions of a text, without predicates.
fn instructions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        line.split_whitespace()
            .find(|word| !word.starts_with('@') && *word != "{")
    })
}

fn symbols(text: &str) -> BTreeSet<&str> {
    let of_layer = |word: &&str| word.starts_with("GD_") && !OF_MACHINES.contains(word);
    words(text).filter(of_layer).collect()
}

/// Symbols for properties of a GPU rather than of a layer, and the one that no kernel reads.
const OF_MACHINES: [&str; 6] = [
    "GD_SM80",
    "GD_SM90",
    "GD_VERSION",
    "GD_TARGET",
    "GD_MACHINE",
    "GD_RESERVED",
];

/// The text specialised for Hopper.
fn on_hopper(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with("GD_SM80"));
    let lines = lines.map(|line| line.strip_prefix("GD_SM90 ").unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn there_is_a_file_for_each_entry_and_a_manifest() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../host/ptx"));
    if !folder.is_dir() {
        println!("skipped: the sources are not here");
        return;
    }
    let name =
        |file: std::io::Result<std::fs::DirEntry>| file.unwrap().file_name().into_string().unwrap();
    let files: BTreeSet<_> = folder.read_dir().unwrap().map(name).collect();
    let wanted: BTreeSet<_> = Entry::ALL
        .iter()
        .map(|entry| format!("{}.packed", entry.name()))
        .chain(["manifest.txt".to_owned()])
        .collect();
    assert_eq!(files, wanted);
}

#[test]
fn each_file_has_its_entry_alone() {
    for (entry, text) in &*TEXTS {
        let name = entry.name();
        let entries: Vec<&str> = text
            .lines()
            .filter(|line| line.contains(".entry"))
            .collect();
        assert_eq!(entries, [format!(".visible .entry {name}(")], "{name}");
        let bounds = text
            .lines()
            .any(|line| line == format!(".maxntid {}, 1, 1", entry.block_of(entry.max_heads())));
        assert!(bounds, "{name}: its launch bound");
    }
}

/// Each text has the lowest PTX version and target that its instructions allow: CUDA 11.4 and Ampere; with clusters CUDA 12.1 and
/// Hopper; with warpgroups CUDA 12.0 and exactly Hopper.
#[test]
fn old_drivers_and_gpus_can_load_it() {
    for (entry, text) in &*TEXTS {
        let value = |directive| {
            let mut lines = text
                .lines()
                .filter_map(move |line| line.strip_prefix(directive));
            lines
                .next()
                .map(|word| machine::word(word.trim(), machine::AMPERE).unwrap_or(word.trim()))
                .unwrap_or_else(|| panic!("{}: no {directive}", entry.name()))
        };
        let (major, minor) = value(".version ").split_once('.').unwrap();
        let version: (u32, u32) = (major.parse().unwrap(), minor.parse().unwrap());
        let (highest, target) = match (entry.takes_clusters(), entry.takes_warpgroups()) {
            (false, false) => ((7, 4), "sm_80"),
            (_, true) => ((8, 0), "sm_90a"),
            (true, false) => ((8, 1), "sm_90"),
        };
        assert!(version <= highest, "{}: {version:?}", entry.name());
        assert_eq!(value(".target "), target, "{}", entry.name());
    }
}

/// No text has local memory, a call, or a generic access, whose state space is found at run time.
#[test]
fn nothing_is_in_local_memory_called_or_generic() {
    for (entry, text) in &*TEXTS {
        for instruction in instructions(text) {
            let parts: Vec<&str> = instruction.trim_end_matches(';').split('.').collect();
            let spaces = ["param", "global", "shared", "shared::cluster", "const"];
            let access = ["ld", "st", "ldu", "atom", "red"].contains(&parts[0]);
            let generic = access && !parts.iter().any(|part| spaces.contains(part));
            let bad =
                generic || parts.contains(&"local") || parts[0] == "call" || parts[0] == ".func";
            assert!(!bad, "{}: {instruction}", entry.name());
        }
    }
}

#[test]
fn the_kernels_are_of_the_expected_instructions() {
    for (family, name, text) in on_states().filter(|(family, ..)| !family.is_chunked()) {
        let has = |wanted: &str| {
            instructions(text).any(|instruction| instruction.trim_end_matches(';') == wanted)
        };
        let state_load = match family.is_recurrent() {
            true => "ld.global.L1::no_allocate.v4.b32",
            false => "cp.async.cg.shared.global",
        };
        for wanted in [
            state_load,
            "st.global.L1::no_allocate.v4.b32",
            "shfl.sync.bfly.b32",
            "fma.rn.f32",
            "ex2.approx.ftz.f32",
            "rsqrt.approx.ftz.f32",
        ] {
            assert!(has(wanted), "{name}: no {wanted}");
        }
        let decode = family.decode;
        let vlast = family.layout == StateLayout::VLast;
        assert!(has("bar.sync"), "{name}: no bar.sync");
        let of_columns = ["st.shared.v2.b32", "ld.shared.v2.b32"];
        for of_columns in of_columns.into_iter().filter(|_| family.is_recurrent()) {
            assert!(has(of_columns) || !vlast, "{name}: no {of_columns}");
            assert!(!has(of_columns) || vlast || !decode, "{name}: {of_columns}");
        }
        let mma = instructions(text).any(|instruction| instruction.starts_with("mma.sync."));
        assert_eq!(mma, !family.is_recurrent(), "{name}: mma.sync");
        for inexact in [
            "div.full.f32",
            "div.approx.f32",
            "sqrt.approx.f32",
            "fma.rn.f64",
            "div.rn.f32",
        ] {
            assert!(!has(inexact), "{name}: {inexact}");
        }
        let rounding = if family.state == DType::Bf16 {
            "cvt.rn.bf16x2.f32"
        } else {
            "fma.rn.f32"
        };
        assert!(has(rounding), "{name}: no {rounding}");
    }
}

/// Prefills use the expected instructions for products, for loads of their factors, for decays and for rounding.
#[test]
fn prefills_are_of_the_expected_instructions() {
    for (entry, text) in &*TEXTS {
        let Some(of) = prefill_of(*entry) else {
            continue;
        };
        let text = on_hopper(text);
        let starts = |wanted: &str| {
            instructions(&text).any(|instruction| {
                instruction
                    .strip_prefix(wanted)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ';']))
            })
        };
        let (prepares, walks) = match of {
            Stage::Prepare => (true, false),
            Stage::Chain => (false, true),
            Stage::Short => (true, true),
            _ => (false, false),
        };
        let name = entry.name();
        let portable = is_portable_chain(*entry);
        let per_channel = (entry.computes()).is_some_and(|it| it.per_channel == Some(true));
        // An intra-chunk pass multiplies by warps only.
        let bulk = of == Stage::Prepare && !per_channel;
        for (wanted, has) in [
            ("wgmma.mma_async.sync.aligned", walks && !portable),
            ("wgmma.fence.sync.aligned", walks && !portable),
            ("fence.proxy.async", walks || bulk),
            ("mma.sync.aligned.m16n8k16", prepares || portable),
            ("cvt.rn.f16x2.f32", of != Stage::Carry),
            ("ex2.approx.ftz.f32", of != Stage::Carry),
            (
                "cp.async.bulk.shared::cluster.global",
                (walks && !prepares) || bulk,
            ),
        ] {
            assert_eq!(starts(wanted), has, "{name}: {wanted}");
        }
        for inexact in [
            "div.full.f32",
            "div.approx.f32",
            "div.rn.f32",
            "sqrt.approx.f32",
            "fma.rn.f64",
        ] {
            assert!(!starts(inexact), "{name}: {inexact}");
        }
    }
}

/// Stage of a prefill that an entry is. `None` for other entries.
fn prefill_of(entry: Entry) -> Option<Stage> {
    entry.computes()?.family.stage()
}

/// A state may be loaded before the branch on its slot, but never without the predicate that the slot is valid.
#[test]
fn states_are_loaded_under_a_predicate() {
    for (entry, text) in &*TEXTS {
        for line in text
            .lines()
            .filter(|line| line.contains("ld.global.L1::no_allocate"))
        {
            let is_guarded = line.trim_start().starts_with('@');
            assert!(is_guarded, "{}: {line}", entry.name());
        }
    }
}

#[test]
fn the_symbols_of_a_text_are_those_of_its_operator() {
    for (entry, text) in &*TEXTS {
        assert_eq!(symbols(text), used(*entry).collect(), "{}", entry.name());
    }
}

/// Parts of the names of constants of a convolution and a norm.
const OF_A_LAYER: [&str; 8] = [
    "_CONV_",
    "GD_TAPS",
    "_WINDOWS_",
    "_WINDOW_",
    "_NORM",
    "GD_X_",
    "PREVIOUS_X",
    "GD_Z_",
];

/// Parts of the names of constants that a layer step of one token does not use.
const NOT_OF_A_LAYER: [&str; 9] = [
    "PREVIOUS_K",
    "PREVIOUS_V",
    "PREVIOUS_G",
    "PREVIOUS_B",
    "PREVIOUS_X",
    "SNAPSHOT",
    "KEEP",
    "GD_X_TOKEN",
    "GD_Z_TOKEN",
];

/// Parts of the names of constants that no kernel of a prefill uses. A prefill has no constants that depend on lengths.
const NOT_OF_A_PREFILL: [&str; 7] = [
    "_ROW",
    "GD_TOKENS",
    "TOKEN_INDEX",
    "PREVIOUS",
    "SNAPSHOT",
    "ACCEPTED",
    "KEEP",
];

/// Constants that a prefill of KDA uses and a prefill of GDN does not.
const OF_GATES_OF_CHANNELS: [&str; 5] = [
    "GD_BETA_LOGIT",
    "GD_LOWER_BOUND",
    "GD_HAS_A_LOG",
    "GD_HAS_DT_BIAS",
    "GD_GATE_ROWS_H",
];

/// Constants of prefills, which other operators do not use.
const OF_A_PREFILL: [&str; 3] = [
    "GD_POSITIONS_INDEX",
    "GD_CHECKPOINT_INDEX",
    "GD_CHECKPOINT_EVERY",
];

/// Constants of the rings of deferred write-back, which other operators do not use.
const OF_RINGS: [&str; 8] = [
    "GD_PENDING",
    "GD_RING",
    "GD_KEYS_ELEMENT",
    "GD_KEYS_SLOT",
    "GD_UPDATES_SLOT",
    "GD_DECAYS_SLOT",
    "GD_PENDING_LEN_INDEX",
    "GD_PENDING_BASE_INDEX",
];

/// Parts of the names of constants that a decode with deferred write-back does not use. A flush writes a state in place, and there
/// are no other ways of keeping it.
const NOT_OF_RINGS: [&str; 8] = [
    "PREVIOUS",
    "SNAPSHOT",
    "TOKEN_INDEX",
    "TOKEN_SLOTS",
    "ACCEPTED",
    "KEEP",
    "UPDATE_STATE",
    "GD_WRITE_",
];

/// Constants that a layer step uses and a layer step with deferred write-back does not. Its state is written in place, and whole
/// heads load and store single elements.
const NOT_OF_A_LAYER_WITH_RINGS: [&str; 3] = ["GD_WRITE_SLOT", "GD_WIDE_IO", "GD_WIDE_NORM"];

/// Parts of the names of constants that drafts of a layer with deferred write-back do not use. They commit nothing, and a flush
/// writes a state in place.
const NOT_OF_DRAFTS_OF_A_LAYER: [&str; 8] = [
    "PREVIOUS_K",
    "PREVIOUS_V",
    "PREVIOUS_G",
    "PREVIOUS_B",
    "PREVIOUS_X_TOKEN",
    "SNAPSHOT",
    "KEEP",
    "GD_WRITE_SLOT",
];

/// Part of the names of constants of separate written windows.
const OF_WRITTEN_WINDOWS: &str = "WRITE_WINDOWS";

/// Parts of the names of constants of a norm, except the one that tells whether there is a norm.
const OF_A_NORM: [&str; 3] = ["_NORM_", "GD_WIDE_NORM", "GD_Z_"];

/// Parts of the names of constants of values, outputs and states, which an intra-chunk pass does not use.
const NOT_OF_A_PREPARATION: [&str; 7] = [
    "CHECKPOINT",
    "HAS_NORM",
    "GD_O_",
    "READ_SLOT",
    "WRITE_SLOT",
    "WIDE_STATE",
    "GD_Z_",
];

/// Parts of the names of constants that the launch for windows and normed outputs uses.
const OF_A_FINISH: [&str; 17] = [
    "CHECKPOINT",
    "CU_SEQLENS_INDEX",
    "FRESH_INDEX",
    "HAS_NORM",
    "GD_NULL_SLOT",
    "POSITIONS_INDEX",
    "GD_RATIO",
    "READ_INDEX",
    "WINDOWS",
    "GD_TAPS",
    "GD_TILED",
    "UPDATE_STATE",
    "WRITE_INDEX",
    "GD_WIDE_IO",
    "GD_X_",
    "GD_O_",
    // The dtype of v determines the place of a value head's scales of o.
    "GD_V_ELEMENT",
];

/// Parts of the names of constants that a convolution before the intra-chunk pass uses.
const OF_A_CONVOLUTION: [&str; 15] = [
    "_CONV_",
    "CU_SEQLENS_INDEX",
    "FRESH_INDEX",
    "GD_L2NORM",
    "GD_NULL_SLOT",
    "POSITIONS_INDEX",
    "GD_RATIO",
    "READ_INDEX",
    "READ_WINDOWS",
    "GD_TAPS",
    "GD_TILED",
    "UPDATE_STATE",
    "GD_WIDE_IO",
    "GD_WRITE_INDEX",
    "GD_X_",
];

/// Parts of the names of constants that an intra-chunk pass does not use if a launch before it convolves.
const OF_INPUTS_OF_A_CONVOLUTION: [&str; 3] = ["_CONV_", "READ_WINDOWS", "GD_X_"];

/// Constants that determine whether a value head of a chunk has scales of o in the workspace.
const OF_SCALES_OF_O: [&str; 2] = ["GD_HAS_NORM", "GD_O_ELEMENT"];

/// Constants that determine where the states of splits are in the workspace, and which rows have them.
const OF_A_CARRY: [&str; 16] = [
    "GD_CU_SEQLENS_INDEX",
    "GD_FRESH_INDEX",
    "GD_H",
    "GD_HAS_NORM",
    "GD_NULL_SLOT",
    "GD_O_ELEMENT",
    "GD_PER_CHANNEL",
    "GD_POSITIONS_INDEX",
    "GD_RATIO",
    "GD_READ_INDEX",
    "GD_TAPS",
    "GD_TILED",
    "GD_UPDATE_STATE",
    "GD_V_ELEMENT",
    "GD_WIDE_IO",
    "GD_WRITE_INDEX",
];

/// Whether a stage of a prefill uses a constant.
fn is_of_prefill(of: Stage, per_channel: Option<bool>, symbol: &str) -> bool {
    let has = |parts: &[&str]| parts.iter().any(|part| symbol.contains(part));
    if of == Stage::Carry {
        return OF_A_CARRY.contains(&symbol);
    }
    if OF_GATES_OF_CHANNELS.contains(&symbol) {
        return per_channel == Some(true) || of == Stage::Single;
    }
    if has(&NOT_OF_A_PREFILL) {
        return false;
    }
    if matches!(of, Stage::Convolve | Stage::Prepare) && OF_SCALES_OF_O.contains(&symbol) {
        return true;
    }
    if of == Stage::Convolve {
        return ["GD_H", "GD_SCALE"].contains(&symbol) || has(&OF_A_CONVOLUTION);
    }
    if of == Stage::Finish {
        let of_o = ["GD_H", "GD_SCALE"].contains(&symbol);
        return of_o || has(&OF_A_FINISH) || has(&OF_A_NORM);
    }
    if has(&[OF_WRITTEN_WINDOWS]) {
        return false;
    }
    if of == Stage::Prepare {
        return !has(&NOT_OF_A_PREPARATION)
            && !has(&OF_A_NORM)
            && !has(&OF_INPUTS_OF_A_CONVOLUTION);
    }
    // Only short rows are normed by the kernel that has their states. Rows of a single token are normed too, but by single
    // elements.
    symbol != "GD_WIDE_NORM" || of == Stage::Short
}

/// Whether the entry asks if its states are f16: those with 16-bit states, except drafts with deferred write-back, which take bf16 only.
/// A parallel step of f32 states shares the body, and asks too.
fn takes_f16(entry: Entry) -> bool {
    let are_drafts = |it: launch::Computes| it.family.is_parallel() && it.family.is_deferred();
    let converts = |it: launch::Computes| it.family.knows_states() && !are_drafts(it);
    entry.computes().is_some_and(|it| {
        let mut all = it.all_states();
        let has_16_bits = all.any(|states| states.element == Element::Bf16);
        (has_16_bits || it.family.is_parallel()) && converts(it)
    })
}

/// The constants that an entry uses. A plain step uses all but those of a layer. Exceptions: the parallel formulation,
/// which has no snapshots and no token slots, and whose norm alone stores several elements at once. In a layer step whole heads
/// store normed elements one by one. Layer kernels for several tokens do so too, and those of KDA load the gates of channels
/// together. Deferred write-back has rings and its own kernels.
fn used(entry: Entry) -> impl Iterator<Item = &'static str> {
    let family = Family::of(entry);
    let prefill = prefill_of(entry);
    let is_deferred = (entry.computes()).is_some_and(|it| it.family.is_deferred());
    let is_parallel = (entry.computes()).is_some_and(|it| it.family.is_parallel());
    let symbols = entry.symbols().iter().copied();
    symbols.filter(move |symbol| {
        if OF_MACHINES.contains(symbol) {
            return false;
        }
        // This scan leaves every norm to the launch after it.
        let leaves_norms = is_portable_chain(entry) && entry.computes().is_some_and(|it| it.v > 64);
        let of_norm = symbol.starts_with("GD_NORM_") || symbol.starts_with("GD_Z_");
        if leaves_norms && of_norm {
            return false;
        }
        if *symbol == "GD_STATE_F16" {
            return takes_f16(entry);
        }
        if *symbol == "GD_STATE_V_LAST" {
            return entry.computes().is_some_and(|it| it.has_any_states());
        }
        if *symbol == "GD_STATE_F32" {
            return entry.computes().is_some_and(|it| it.has_any_elements());
        }
        if *symbol == "GD_PER_CHANNEL" {
            return (entry.computes()).is_some_and(|it| it.per_channel.is_none());
        }
        if *symbol == "GD_UPDATES_ELEMENT" {
            return is_deferred && is_parallel;
        }
        if *symbol == "GD_BLOCKS_PER_SM" {
            return entry.min_blocks_by_constant();
        }
        if ["GD_SPLIT", "GD_PASS"].contains(symbol) {
            // A scan of 64 rows of a state by warpgroups, with K = V = 128, takes rows in splits, in two passes.
            let has_splits =
                entry.takes_warpgroups() && entry.computes().is_some_and(|it| it.k == 128);
            return match prefill {
                Some(Stage::Chain) => has_splits && entry.tiles() == 2,
                of => of == Some(Stage::Carry) && *symbol == "GD_SPLIT",
            };
        }
        let has = |parts: &[&str]| parts.iter().any(|part| symbol.contains(part));
        let of_drafts = is_deferred && is_parallel && deferred::is_layer(entry);
        if of_drafts || *symbol == "GD_INPUTS_SLOT" {
            return of_drafts && !has(&NOT_OF_DRAFTS_OF_A_LAYER) && !OF_A_PREFILL.contains(symbol);
        }
        if is_deferred && deferred::is_layer(entry) {
            let of_layer = !has(&NOT_OF_A_LAYER) && !OF_A_PREFILL.contains(symbol);
            return of_layer && !NOT_OF_A_LAYER_WITH_RINGS.contains(symbol);
        }
        if is_deferred {
            return !has(&NOT_OF_RINGS) && !has(&OF_A_LAYER) && !OF_A_PREFILL.contains(symbol);
        }
        if OF_RINGS.contains(symbol) {
            return false;
        }
        if let Some(of) = prefill {
            let per_channel = entry.computes().and_then(|it| it.per_channel);
            return is_of_prefill(of, per_channel, symbol);
        }
        if OF_A_PREFILL.contains(symbol) {
            return false;
        }
        // This entry makes up its matrices.
        if entry == Entry::warpgroup_contract {
            return false;
        }
        family.is_none_or(|family| {
            if family.layer && !family.is_recurrent() {
                return !has(&["SNAPSHOT", "TOKEN_INDEX", "TOKEN_SLOTS", "ACCEPTED"]);
            }
            if family.layer {
                if *symbol == "GD_WIDE_NORM" {
                    return false;
                }
                let wide_io = match family.decode {
                    true => entry.cluster() > 1 && family.layout == StateLayout::KLast,
                    false => (entry.computes()).is_some_and(|it| it.per_channel != Some(false)),
                };
                let of_tokens = !family.decode || !has(&NOT_OF_A_LAYER);
                return of_tokens && (wide_io || *symbol != "GD_WIDE_IO");
            }
            if has(&OF_A_LAYER) {
                return false;
            }
            family.is_recurrent() || !symbol.contains("SNAPSHOT")
        })
    })
}

#[test]
fn specialisation_leaves_no_symbol() {
    for (entry, text) in &*TEXTS {
        let values: Vec<u32> = (0..entry.symbols().len() as u32).collect();
        let special = specialise(text, entry.symbols(), &values)
            .unwrap()
            .into_string()
            .unwrap();
        assert_eq!(symbols(&special), BTreeSet::new(), "{}", entry.name());
        assert_eq!(
            instructions(&special).count(),
            instructions(text).count(),
            "{}",
            entry.name()
        );
    }
}

/// Layers that differ in a compiled-in value never share code: each field of the constants changes the text, differently from every
/// other field.
#[test]
fn keys_that_differ_in_one_field_have_different_code() {
    on_threads(&TEXTS, |(entry, text)| {
        let symbols = entry.symbols();
        // Only lines with symbols can differ between the texts.
        let with_symbols = |line: &&str| line.contains("GD_");
        let lines: Vec<&str> = text.lines().filter(with_symbols).collect();
        let lines = lines.join("\n");
        let special = |values: &[u32]| specialise(&lines, symbols, values).unwrap();
        let plain = vec![7; symbols.len()];
        let mut texts = BTreeSet::from([special(&plain)]);
        for symbol in used(*entry) {
            let field = symbols.iter().position(|other| *other == symbol).unwrap();
            for value in [0, 8, u32::MAX] {
                let mut values = plain.clone();
                values[field] = value;
                assert!(
                    texts.insert(special(&values)),
                    "{}: {symbol} = {value} is not in the code",
                    entry.name()
                );
            }
        }
    });
}
