//! Tests of deferred write-back: states with rings of pending tokens.

use crate::check::gpu;
use crate::command::{Contents, check, folder, run};
use gated_delta::Entry;
use safetensors::tensor::Dtype;

const GDN: &str = "gdn_decode_bf16_pool";
const KDA: &str = "kda_recurrent_bf16_softplus";
/// A layer with a convolution and a norm.
const LAYER: &str = "layer_qwen3_next_decode";
/// Entries of a ring, R.
const ENTRIES: usize = 9;
const RINGS: [&str; 3] = ["pending.keys", "pending.updates", "pending.decays"];

fn backends() -> Vec<&'static str> {
    let mut backends = vec!["reference", "sim"];
    backends.extend(gpu().then_some("cuda"));
    backends
}

/// A fixture as a step with deferred write-back, nothing pending: the rings are NaN. Its expectations hold but for the states.
fn waiting(name: &str) -> Contents {
    let contents = Contents::fixture(name);
    let dims = |name: &str| contents.tensors[name].1.clone();
    let (rows, heads, [slots, value_heads, v_dim, k_dim]) = (
        dims(if name == LAYER { "x" } else { "q" })[0],
        match name {
            LAYER => contents.metadata["heads"].parse().unwrap(),
            _ => dims("q")[2],
        },
        dims("state")[..].try_into().unwrap(),
    );
    let keys: [usize; 4] = [slots, heads, ENTRIES, k_dim];
    let updates = [slots, value_heads, ENTRIES, v_dim];
    let decays = match name {
        KDA => vec![slots, value_heads, ENTRIES, k_dim],
        _ => vec![slots, value_heads, ENTRIES],
    };
    let nan = |dims: &[usize]| vec![f32::NAN; dims.iter().product()];
    let (dtype, bytes) = match name {
        LAYER => (Dtype::F32, 4),
        _ => (Dtype::BF16, 2),
    };
    let of_keys = vec![0xff; bytes * keys.iter().product::<usize>()];
    contents
        .clone()
        .with("pending.keys", dtype, &keys, of_keys)
        .with_floats("pending.updates", &updates, &nan(&updates))
        .with_floats("pending.decays", &decays, &nan(&decays))
        .with_indices("pending.len", &[rows], &vec![0; rows])
        .with_indices("pending.base", &[rows], &vec![ENTRIES as i32 - 1; rows])
}

/// The fixture's answers hold: o and the windows after the step, and the states after its tokens are flushed.
#[test]
fn known_answers_of_deferred_steps_hold() {
    let folder = folder();
    for name in [GDN, KDA, LAYER] {
        let step = waiting(name).without(&["expected.state"]);
        let input = step.write(&folder, "step");
        let output = folder.path().join("out.safetensors");
        for backend in backends() {
            let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
            assert!(stdout.contains("| state, other slots "), "{stdout}");
            assert!(!stdout.contains("| state, written"), "{stdout}");
            let moved = stdout.contains("| conv_state, written slots ");
            assert_eq!(moved, name == LAYER, "{stdout}");
            let wrote = stdout.contains("| pending.updates, written entries ");
            assert_eq!(wrote, backend != "reference", "{stdout}");
            run(&input, &output, &["--backend", backend]).succeeds();
            let after = Contents::read(&output);
            assert_eq!(after.tensors["state"], step.tensors["state"], "{backend}");
            // A flush takes no new token, and here one pending token of each row.
            let of_tokens = ["q", "k", "v", "a", "b", "g", "beta", "x", "z", "expected.o"];
            let of_layer = [
                "conv_weight",
                "conv_state",
                "norm_weight",
                "expected.conv_state",
            ];
            let rows = step.tensors["pending.len"].1[0];
            let mut flush = waiting(name)
                .without(&of_tokens)
                .without(&of_layer)
                .with_indices("pending.len", &[rows], &vec![1; rows]);
            for key in ["heads", "norm_eps", "conv_activation", "norm_activation"] {
                flush.metadata.remove(key);
            }
            for ring in RINGS {
                flush
                    .tensors
                    .insert(ring.to_owned(), after.tensors[ring].clone());
            }
            let flush = flush.write(&folder, "flush");
            for backend in backends() {
                let stdout = check(&flush, &["--backend", backend]).succeeds().stdout;
                assert!(stdout.contains("| state, written slots "), "{stdout}");
                assert!(stdout.contains(" file "), "{stdout}");
                assert!(!stdout.contains("| o |"), "{stdout}");
            }
        }
    }
}

/// Four drafts together have the fixture's outputs, and leave one entry each.
#[test]
fn drafts_are_deferred_too() {
    let folder = folder();
    let contents = Contents::fixture("gdn_mtp_bf16_snapshots");
    let entries = 20;
    let (keys, updates) = ([2, 1, entries, 128], [2, 2, entries, 128]);
    let nan = |dims: &[usize]| vec![f32::NAN; dims.iter().product()];
    let mut step = contents
        .without(&["expected.snapshots", "expected.state"])
        .with(
            "pending.keys",
            Dtype::BF16,
            &keys,
            vec![0xff; 2 * entries * 128 * 2],
        )
        .with_floats("pending.updates", &updates, &nan(&updates))
        .with_floats("pending.decays", &[2, 2, entries], &nan(&[2, 2, entries]))
        .with_indices("pending.len", &[2], &[0, 0])
        .with_indices("pending.base", &[2], &[18, 3])
        .with_metadata("formulation", "parallel");
    for key in ["snapshots", "update_state"] {
        step.metadata.remove(key);
    }
    let input = step.write(&folder, "drafts");
    for backend in backends() {
        let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
        assert!(stdout.contains(" file "), "{stdout}");
        let wrote = stdout.contains("| pending.updates, written entries ");
        assert_eq!(wrote, backend != "reference", "{stdout}");
    }
    // `auto` and no formulation choose the same.
    for formulation in [Some("auto"), None] {
        let chosen = match formulation {
            Some(auto) => step.clone().with_metadata("formulation", auto),
            None => step.clone().without_metadata("formulation"),
        };
        let input = chosen.write(&folder, "chosen");
        check(&input, &["--backend", "sim"]).succeeds();
    }
    let recurrent = step.with_metadata("formulation", "recurrent");
    let input = recurrent.write(&folder, "one");
    check(&input, &["--backend", "sim"]).refused("T with pending = 4");
}

/// A row with 8 pending tokens flushes them, writes its state, and leaves its new token after them in the ring.
#[test]
fn a_row_without_room_flushes() {
    let folder = folder();
    for name in [GDN, KDA, LAYER] {
        let rows = waiting(name).tensors["pending.len"].1[0];
        let mut lens = vec![0; rows];
        lens[0] = 8;
        let mut full = waiting(name)
            .without_expected()
            .with_indices("pending.len", &[rows], &lens);
        for ring in RINGS {
            let (dtype, shape, data) = full.tensors[ring].clone();
            let value = if ring == "pending.decays" {
                -0.125f32
            } else {
                0.0625
            };
            let bytes = match dtype {
                Dtype::BF16 => half::bf16::from_f32(value)
                    .to_le_bytes()
                    .repeat(data.len() / 2),
                _ => value.to_le_bytes().repeat(data.len() / 4),
            };
            full = full.with(ring, dtype, &shape, bytes);
        }
        let input = full.write(&folder, "full");
        for backend in backends().into_iter().filter(|it| *it != "reference") {
            let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
            assert!(stdout.contains("| state, written slots "), "{stdout}");
            let more = full.clone().with_metadata("max_pending", "7");
            check(&more.write(&folder, "more"), &["--backend", backend]).succeeds();
        }
    }
}

/// A key whose square overflows is stored times a power of two, and a log decay of -inf is stored: both hold, pending or new.
#[test]
fn long_keys_and_decays_to_nothing_hold() {
    let folder = folder();
    let tensors = [
        ("q", &[1, 1, 1, 64][..], 0.5),
        ("k", &[1, 1, 1, 64], 1e25),
        ("v", &[1, 1, 2, 64], 0.25),
        ("beta", &[1, 1, 2], 0.5),
        ("state", &[1, 2, 64, 64], 1.0),
        ("pending.keys", &[1, 1, 9, 64], 0.5),
        ("pending.updates", &[1, 2, 9, 64], 0.5),
        ("pending.decays", &[1, 2, 9], f32::NEG_INFINITY),
    ];
    let mut contents = Contents::default();
    for (name, shape, value) in tensors {
        let values = vec![value; shape.iter().product()];
        contents = contents.with_floats(name, shape, &values);
    }
    let base = contents
        .with_floats("g", &[1, 1, 2], &[f32::NEG_INFINITY, -0.5])
        .with_metadata("op", "gdn_decode")
        .with_indices("pending.base", &[1], &[0]);
    for pending in [0, 2, 8] {
        let contents = base.clone().with_indices("pending.len", &[1], &[pending]);
        let input = contents.write(&folder, "in");
        check(&input, &["--backend", "sim"]).succeeds();
        // An update of another size is none of the key's power.
        let output = folder.path().join("out");
        run(&input, &output, &["--backend", "sim"]).succeeds();
        let mut updates = Contents::read(&output).floats("pending.updates");
        updates.iter_mut().for_each(|u| *u *= 2.0);
        let wrong = contents.with_floats("expected.pending.updates", &[1, 2, 9, 64], &updates);
        check(&wrong.write(&folder, "wrong"), &["--backend", "sim"])
            .fails_the_check("pending.updates");
    }
}

/// Entries of a ring of a layer's drafts, R: N = 16 and T up to 8.
const ENTRIES_OF_DRAFTS: usize = 24;
/// Names of the rings of a layer's drafts.
const RINGS_OF_DRAFTS: [&str; 4] = [
    "pending.keys",
    "pending.updates",
    "pending.decays",
    "pending.inputs",
];

/// Backends that run a layer's drafts. A GPU is one of them once its tests have passed on a GPU.
fn backends_of_drafts() -> Vec<&'static str> {
    let mut backends = backends();
    let proved = Entry::gdn_deferred_layer_parallel_klast_bf16_k128_tile64.is_proved();
    backends.retain(|backend| proved || *backend != "cuda");
    backends
}

/// The layer as a step of `tokens` drafts with deferred states and windows. Each row takes the rows' tokens in turn, so that its first
/// token is the fixture's, and with one token the fixture's answers hold; the last row is inactive. `len` entries of each row are
/// pending; all other entries of the rings are NaN.
fn layer_drafts(tokens: usize, len: &[i32]) -> Contents {
    let mut contents = Contents::fixture(LAYER)
        .with_metadata("op", "gdn_mtp")
        .with_metadata("formulation", "parallel");
    for name in ["x", "z", "a", "b"] {
        let (dtype, mut dims, data) = contents.tensors[name].clone();
        let of_rows: Vec<&[u8]> = data.chunks(data.len() / dims[0]).collect();
        let rows = 0..dims[0];
        let repeated = rows.flat_map(|b| (b..b + tokens).map(|t| of_rows[t % of_rows.len()]));
        let repeated: Vec<u8> = repeated.flatten().copied().collect();
        dims[1] = tokens;
        contents = contents.with(name, dtype, &dims, repeated);
    }
    let channels = contents.tensors["x"].1[2];
    let state = contents.tensors["state"].1.clone();
    let heads = contents.metadata["heads"].parse().unwrap();
    let entries = ENTRIES_OF_DRAFTS;
    let base: Vec<i32> = (0..len.len()).map(|b| 23 - 7 * b as i32).collect();
    let slots = indices(&contents, "read_slots");
    let rings = [
        (
            "pending.keys",
            vec![state[0], heads, entries, state[3]],
            0.3,
        ),
        (
            "pending.updates",
            vec![state[0], state[1], entries, state[2]],
            0.1,
        ),
        ("pending.decays", vec![state[0], state[1], entries], -0.2),
        ("pending.inputs", vec![state[0], 1, entries, channels], 1.5),
    ];
    for (name, dims, size) in rings {
        let of_entry: usize = dims[3..].iter().product();
        let mut values = vec![f32::NAN; dims.iter().product()];
        for (b, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            for j in 0..len[b] as usize {
                let entry = (base[b] as usize + j) % entries;
                for head in 0..dims[1] {
                    let first = ((slot as usize * dims[1] + head) * entries + entry) * of_entry;
                    for i in 0..of_entry {
                        let part = ((7 * i + 5 * j + 3 * head + b) % 16) as f32 / 16.0;
                        values[first + i] = size
                            * if name == "pending.decays" {
                                part
                            } else {
                                part - 0.5
                            };
                    }
                }
            }
        }
        contents = match name {
            "pending.inputs" => {
                let values = values
                    .iter()
                    .map(|&x| half::bf16::from_f32(x).to_le_bytes());
                let dims = [dims[0], entries, channels];
                contents.with(name, Dtype::BF16, &dims, values.flatten().collect())
            }
            _ => contents.with_floats(name, &dims, &values),
        };
    }
    contents
        .with_indices("pending.len", &[len.len()], len)
        .with_indices("pending.base", &[len.len()], &base)
}

fn indices(contents: &Contents, name: &str) -> Vec<i32> {
    let (words, _) = contents.tensors[name].2.as_chunks();
    words.iter().map(|word| i32::from_le_bytes(*word)).collect()
}

/// A flush of the entries that a step of a layer's drafts has left, with `len` pending in each row from `base`.
fn flush_of(step: &Contents, after: &Contents, len: &[i32], base: &[i32]) -> Contents {
    let mut flush = step
        .clone()
        .without(&[
            "x",
            "z",
            "a",
            "b",
            "conv_weight",
            "norm_weight",
            "expected.o",
        ])
        .with_indices("pending.len", &[len.len()], len)
        .with_indices("pending.base", &[len.len()], base);
    for key in ["heads", "norm_eps", "conv_activation", "norm_activation"] {
        flush = flush.without_metadata(key);
    }
    for name in RINGS_OF_DRAFTS.into_iter().chain(["state", "conv_state"]) {
        flush
            .tensors
            .insert(name.to_owned(), after.tensors[name].clone());
    }
    flush
}

/// The fixture's answers hold: o after the step, which leaves states and windows unchanged, and both of these after a flush.
#[test]
fn known_answers_of_deferred_windows_hold() {
    let folder = folder();
    let drafts = layer_drafts(1, &[0; 4]);
    let step = drafts
        .clone()
        .without(&["expected.state", "expected.conv_state"]);
    let input = step.write(&folder, "step");
    let output = folder.path().join("out.safetensors");
    for backend in backends_of_drafts() {
        let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
        assert!(!stdout.contains("| state, written"), "{stdout}");
        assert!(!stdout.contains("| conv_state, written"), "{stdout}");
        let wrote = stdout.contains("| pending.inputs, written entries ");
        assert_eq!(wrote, backend != "reference", "{stdout}");
        run(&input, &output, &["--backend", backend]).succeeds();
        let after = Contents::read(&output);
        for name in ["state", "conv_state"] {
            assert_eq!(after.tensors[name], step.tensors[name], "{backend}, {name}");
        }
        let flush = flush_of(&drafts, &after, &[1; 4], &indices(&drafts, "pending.base"));
        let flush = flush.write(&folder, "flush");
        for backend in backends_of_drafts() {
            let stdout = check(&flush, &["--backend", backend]).succeeds().stdout;
            for name in ["state", "conv_state"] {
                let written = format!("| {name}, written slots ");
                let line = stdout.lines().find(|line| line.starts_with(&written));
                assert!(line.is_some_and(|line| line.contains(" file ")), "{stdout}");
            }
            assert!(!stdout.contains("| pending.inputs, written"), "{stdout}");
        }
    }
}

/// Rows with fewer pending tokens than a window, with room, without room, and an inactive one: only the third row writes its state
/// and window.
#[test]
fn a_layers_drafts_are_deferred_and_flushed() {
    let folder = folder();
    let drafts = layer_drafts(4, &[2, 12, 13, 5]).without_expected();
    let input = drafts.write(&folder, "drafts");
    let output = folder.path().join("out.safetensors");
    let slots = indices(&drafts, "read_slots");
    let [x, windows, rings] =
        ["x", "conv_state", "pending.inputs"].map(|name| drafts.tensors[name].2.clone());
    let token = x.len() / 16;
    let mut after = Vec::new();
    for backend in backends_of_drafts() {
        if backend != "reference" {
            let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
            for name in [
                "state, written slots",
                "conv_state, written slots",
                "conv_state, other slots",
            ] {
                assert!(stdout.contains(&format!("| {name} ")), "{stdout}");
            }
        }
        run(&input, &output, &["--backend", backend]).succeeds();
        let contents = Contents::read(&output);
        let (dtype, dims, inputs) = &contents.tensors["pending.inputs"];
        assert_eq!((*dtype, &dims[..]), (Dtype::BF16, &[5, 24, 1024][..]));
        let mut wanted = rings.clone();
        for (b, pending) in [2, 12, 13].into_iter().enumerate() {
            for t in 0..4 {
                let entry = (23 - 7 * b + pending + t) % 24;
                let first = (slots[b] as usize * 24 + entry) * token;
                wanted[first..][..token].copy_from_slice(&x[(4 * b + t) * token..][..token]);
            }
        }
        assert!(*inputs == wanted, "{backend}");
        // The window of the row that flushes has its last three pending inputs.
        let mut wanted = windows.clone();
        let slot = slots[2] as usize;
        for c in 0..1024 {
            for i in 0..3 {
                let entry = (9 + 10 + i) % 24;
                let from = (slot * 24 + entry) * token + 2 * c;
                let to = 2 * ((slot * 1024 + c) * 3 + i);
                wanted[to..to + 2].copy_from_slice(&rings[from..from + 2]);
            }
        }
        assert!(contents.tensors["conv_state"].2 == wanted, "{backend}");
        after.push(contents);
    }
    // The results of one backend are the expectations for another, entry by entry.
    let mut expected = drafts.clone();
    for name in RINGS_OF_DRAFTS.into_iter().chain(["conv_state"]) {
        let dims = after[0].tensors[name].1.clone();
        let values = after[0].floats(name);
        expected = expected.with_floats(&format!("expected.{name}"), &dims, &values);
    }
    let stdout = check(&expected.write(&folder, "expected"), &["--backend", "sim"])
        .succeeds()
        .stdout;
    let line = stdout
        .lines()
        .find(|line| line.starts_with("| pending.inputs, written entries "));
    assert!(
        line.is_some_and(|line| line.contains(" file ") && line.contains(" exact ")),
        "{stdout}"
    );
    let entry = slots[1] as usize * 24 + (16 + 12 + 1) % 24;
    let at = entry * 1024 + 5;
    let off = expected.floats("expected.pending.inputs")[at] + 0.0625;
    let wrong = expected.with_float_at("expected.pending.inputs", at, off);
    check(&wrong.write(&folder, "wrong"), &["--backend", "sim"])
        .fails_the_check(&format!("entry {entry} differs"));

    // Two of four drafts are kept, and flushed.
    for (from, first) in after.iter().zip(backends_of_drafts()) {
        let flush = flush_of(&drafts, from, &[4, 14, 2, 0], &[23, 16, 22, 0]);
        let flush = flush.write(&folder, "flush");
        let stdout = check(&flush, &["--backend", "sim"]).succeeds().stdout;
        for name in ["state", "conv_state"] {
            let written = format!("| {name}, written slots ");
            assert!(stdout.contains(&written), "{first}: {stdout}");
        }
    }
}

#[test]
fn what_contradicts_deferred_windows_is_refused_by_name() {
    let folder = folder();
    let drafts = || layer_drafts(4, &[0; 4]).without_expected();
    let flush = || {
        let drafts = layer_drafts(1, &[1; 4]).without_expected();
        flush_of(&drafts, &drafts, &[1; 4], &indices(&drafts, "pending.base"))
    };
    let cases = [
        (
            "pending.inputs is missing: windows that wait need it",
            drafts().without(&["pending.inputs"]),
        ),
        (
            "pending.inputs and formulation = recurrent exclude each other",
            layer_drafts(1, &[0; 4])
                .without_expected()
                .with_metadata("formulation", "recurrent"),
        ),
        (
            "pending.inputs: wanted the dtype of the windows, got f32",
            drafts().with_floats("pending.inputs", &[5, 24, 1024], &[0.0; 5 * 24 * 1024]),
        ),
        (
            "pending.inputs: wanted shape",
            drafts().reshaped("pending.inputs", &[5, 1024, 24]),
        ),
        (
            "tensor pending.inputs: gdn_decode takes none",
            layer_drafts(1, &[0; 4])
                .without_expected()
                .without_metadata("formulation")
                .with_metadata("op", "gdn_decode"),
        ),
        (
            "tensor expected.pending.inputs: wanted f32 [5, 24, 1024], got f32 [5, 24]",
            drafts().with_floats("expected.pending.inputs", &[5, 24], &[0.0; 5 * 24]),
        ),
        (
            "pending.keys is missing: pending tokens need it",
            drafts().without(&["pending.keys"]),
        ),
        (
            "conv_state is missing: inputs that are pending need it",
            flush().without(&["conv_state"]),
        ),
        (
            "pending.inputs is missing: windows that wait need it",
            flush().without(&["pending.inputs"]),
        ),
        (
            "a flush and conv_weight exclude each other",
            flush().with_floats("conv_weight", &[1024, 4], &[0.0; 4096]),
        ),
        (
            "conv_state and formulation = recurrent exclude each other",
            flush()
                .without(&["pending.inputs"])
                .with_metadata("formulation", "recurrent"),
        ),
        (
            "W - 1 of conv_state = 6",
            flush().reshaped("conv_state", &[5, 512, 6]),
        ),
        (
            "conv_state: wanted shape",
            flush().reshaped("conv_state", &[5, 1536, 2]),
        ),
        (
            "P of pending.keys: wanted P = 5, got 10",
            drafts().reshaped("pending.keys", &[10, 2, 24, 64]),
        ),
    ];
    for (part, contents) in cases {
        check(&contents.write(&folder, "bad"), &["--backend", "sim"]).refused(part);
    }
}

#[test]
fn what_contradicts_a_ring_is_refused_by_name() {
    let folder = folder();
    let cases = [
        ("pending.len", waiting(GDN).without(&["pending.len"])),
        (
            "max_pending: wanted none without pending.len",
            Contents::fixture(GDN).with_metadata("max_pending", "8"),
        ),
        (
            "max_pending: wanted 1..=16, got 17",
            waiting(GDN).with_metadata("max_pending", "17"),
        ),
        (
            "max_pending: wanted 1..=8, got 9",
            waiting(GDN)
                .with_metadata("op", "gdn_mtp")
                .with_metadata("formulation", "recurrent")
                .with_metadata("max_pending", "9"),
        ),
        (
            "tensor pending.base: gdn_prefill takes none",
            waiting(GDN).with_metadata("op", "gdn_prefill"),
        ),
        (
            "pending.keys: wanted f32, as k is that a convolution makes, got bf16",
            {
                let contents = waiting(LAYER).without_expected();
                let (_, dims, data) = contents.tensors["pending.keys"].clone();
                let half = data[..data.len() / 2].to_vec();
                contents.with("pending.keys", Dtype::BF16, &dims, half)
            },
        ),
        (
            "a flush and k exclude each other",
            waiting(GDN).without(&["q"]).without_expected(),
        ),
        (
            "pending.updates",
            waiting(GDN).without(&["pending.updates"]),
        ),
        (
            "pending.decays: wanted shape",
            waiting(KDA).with_floats("pending.decays", &[3, 2, 9], &[0.0; 54]),
        ),
    ];
    for (part, contents) in cases {
        check(&contents.write(&folder, "bad"), &["--backend", "sim"]).refused(part);
    }
}
