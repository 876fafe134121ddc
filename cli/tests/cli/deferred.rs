//! States that wait for the tokens of a ring.

use crate::check::gpu;
use crate::command::{Contents, check, folder, run};
use safetensors::tensor::Dtype;

const GDN: &str = "gdn_decode_bf16_pool";
const KDA: &str = "kda_recurrent_bf16_softplus";
/// With a convolution and a norm.
const LAYER: &str = "layer_qwen3_next_decode";
/// R
const ENTRIES: usize = 9;
const RINGS: [&str; 3] = ["pending.keys", "pending.updates", "pending.decays"];

fn backends() -> Vec<&'static str> {
    let mut backends = vec!["reference", "sim"];
    backends.extend(gpu().then_some("cuda"));
    backends
}

/// What a fixture expects, where its states wait and nothing is pending: rings of NaN.
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

/// The fixture's answers hold: o and the windows of the step, and the states when its tokens have been folded in.
#[test]
fn known_answers_hold_where_states_wait() {
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
            // What a flush takes: no token, and one pending of each row.
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

/// Four drafts at once have the fixture's outputs, and leave an entry each.
#[test]
fn drafts_wait_too() {
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
    let recurrent = step.with_metadata("formulation", "recurrent");
    let input = recurrent.write(&folder, "one");
    check(&input, &["--backend", "sim"]).refused("T with pending = 4");
}

/// A row that has 8 pending folds them, writes its state and leaves its token behind them.
#[test]
fn a_row_without_room_folds() {
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
            "max_pending: wanted 1..=8, got 9",
            waiting(GDN).with_metadata("max_pending", "9"),
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
