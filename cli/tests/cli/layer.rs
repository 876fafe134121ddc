//! Tests of whole layers: a convolution before the recurrence, a norm after it, and fresh rows.

use crate::check::gpu;
use crate::command::{Contents, check, fixture_path, folder, run};
use safetensors::tensor::Dtype;

/// B = 4, T = 1, H = 2, HV = 4, K = V = 128, P = 5, W = 4; slots 2, 3, 0 and −1.
const GDN: &str = "layer_qwen3_next_decode";
/// B = 2, T = 1, H = HV = 2, K = V = 128, P = 4, W = 4; slots 2 and 3.
const KDA: &str = "layer_kimi_linear_decode";
/// B = 2, T = 1, H = HV = 2, K = 96, V = 192, P = 4, W = 4; slots of two rows. β up to 2.
const OLMO: &str = "layer_olmo_hybrid_decode";
/// D of [`GDN`].
const CHANNELS: usize = 1024;
/// B = 3 packed rows, one of them fresh, of 221 tokens in all; the rest as [`GDN`]. P = 5.
const PREFILL: &str = "layer_qwen3_next_prefill";
/// B = 2 packed rows, one of them fresh, of 107 tokens in all; the rest as [`KDA`]. P = 4.
const KDA_PREFILL: &str = "layer_kimi_linear_prefill";

fn backends() -> Vec<&'static str> {
    let mut backends = vec!["reference", "sim"];
    backends.extend(gpu().then_some("cuda"));
    backends
}

fn layer() -> Contents {
    Contents::fixture(GDN)
}

/// Sets every bf16 of a tensor to `value`.
fn filled(contents: Contents, name: &str, value: f32) -> Contents {
    let (_, shape, data) = contents.tensors[name].clone();
    let value = half::bf16::from_f32(value).to_le_bytes();
    contents.with(name, Dtype::BF16, &shape, value.repeat(data.len() / 2))
}

/// Converts the states to f16.
fn in_f16(contents: Contents) -> Contents {
    let shape = contents.tensors["state"].1.clone();
    let states = contents.floats("state");
    let bytes = states
        .iter()
        .flat_map(|&x| half::f16::from_f32(x).to_le_bytes());
    contents
        .clone()
        .with("state", Dtype::F16, &shape, bytes.collect())
}

#[test]
fn known_answers_of_layers_hold() {
    for name in [GDN, KDA, OLMO, PREFILL, KDA_PREFILL] {
        for backend in backends() {
            let stdout = check(&fixture_path(name), &["--backend", backend])
                .succeeds()
                .stdout;
            assert_eq!(stdout.matches(" ok |").count(), 5, "{stdout}");
            assert_eq!(stdout.matches(" file ").count(), 3, "{stdout}");
            assert!(stdout.contains("| conv_state, written slots |"), "{stdout}");
        }
    }
}

/// Prompts by the scan for every GPU: with two chunks in shared memory, with one, and with bulk copies. A GPU runs it too.
#[test]
fn known_answers_of_prompts_hold_as_on_other_gpus() {
    for name in [PREFILL, KDA_PREFILL] {
        for backend in backends() {
            for machine in ["sm_80", "sm_86", "sm_100"] {
                let path = fixture_path(name);
                let ran = check(&path, &["--backend", backend, "--machine", machine]);
                if backend == "reference" {
                    ran.refused("wanted none with the reference");
                    continue;
                }
                let stdout = ran.succeeds().stdout;
                assert_eq!(stdout.matches(" ok |").count(), 5, "{stdout}");
                assert!(stdout.contains("_chain_k128_tile64_mma\n"), "{stdout}");
            }
        }
    }
}

#[test]
fn what_run_writes_of_a_layer_passes_as_expected() {
    let folder = folder();
    let given_bias = |contents: Contents| {
        let bias: Vec<f32> = (0..CHANNELS).map(|c| c as f32 / 1024.0).collect();
        contents.with_floats("conv_bias", &[CHANNELS], &bias)
    };
    let plain = || layer().without_expected();
    let cases = [
        ("as it is", plain()),
        ("kda", Contents::fixture(KDA).without_expected()),
        ("olmo", Contents::fixture(OLMO).without_expected()),
        ("f16 states", in_f16(plain())),
        (
            "biased",
            given_bias(plain()).with_metadata("conv_activation", "none"),
        ),
        (
            "sigmoid",
            plain().with_metadata("norm_activation", "sigmoid"),
        ),
        (
            "moved",
            plain().with_indices("write_slots", &[4], &[2, 1, 4, -1]),
        ),
        ("fresh", plain().with_indices("fresh", &[4], &[0, 1, 2, -1])),
        ("read only", plain().with_metadata("update_state", "false")),
        (
            "no norm",
            plain()
                .without(&["z", "norm_weight"])
                .without_metadata("norm_eps")
                .without_metadata("norm_activation"),
        ),
        ("another op", plain().with_metadata("op", "gdn_mtp")),
    ];
    for (case, contents) in cases {
        let input = contents.write(&folder, case);
        let output = folder.path().join("out.safetensors");
        for backend in backends() {
            run(&input, &output, &["--backend", backend]).succeeds();
            let out = Contents::read(&output);
            let names: Vec<_> = out.tensors.keys().collect();
            assert_eq!(names, ["conv_state", "o", "state"], "{case}");
            for (name, like) in [("state", "state"), ("conv_state", "conv_state")] {
                let (got, before) = (&out.tensors[name], &contents.tensors[like]);
                assert_eq!((got.0, &got.1), (before.0, &before.1), "{case}: {name}");
                assert_eq!(case == "read only", got.2 == before.2, "{case}: {name}");
            }
            let o = &out.tensors["o"];
            assert_eq!(o.0, Dtype::BF16);
            assert!(out.floats("o").iter().all(|o| o.is_finite()), "{case}");
            let mut both = contents.clone();
            for name in names {
                let shape = out.tensors[name].1.clone();
                both = both.with_floats(&format!("expected.{name}"), &shape, &out.floats(name));
            }
            let both = both.write(&folder, "both");
            for backend in backends() {
                check(&both, &["--backend", backend]).succeeds();
            }
        }
    }
}

fn prefill() -> Contents {
    Contents::fixture(PREFILL)
}

/// Checkpoints: one for each row, after every 64 tokens, in the slots that no row has. Two rows reach theirs.
#[test]
fn checkpoints_of_a_file_are_written() {
    let folder = folder();
    let slots = [-1, 0, 1, 2, 3, 4];
    let read = prefill().tensors["read_slots"].2.clone();
    let (words, _) = read.as_chunks();
    let read: Vec<i32> = words.iter().map(|&word| i32::from_le_bytes(word)).collect();
    let mut free = slots
        .into_iter()
        .filter(|slot| *slot >= 0 && !read.contains(slot));
    let kept = [free.next().unwrap_or(-1), free.next().unwrap_or(-1), -1];
    let with = |every: &str| {
        prefill()
            .without_expected()
            .with_indices("checkpoint_slots", &[3, 1], &kept)
            .with_metadata("checkpoint_every", every)
    };
    let input = with("64").write(&folder, "kept");
    let output = folder.path().join("out.safetensors");
    for backend in backends() {
        run(&input, &output, &["--backend", backend]).succeeds();
        let (before, after) = (prefill(), Contents::read(&output));
        let state = |contents: &Contents, slot: i32| {
            let all = &contents.tensors["state"].2;
            let len = all.len() / 5;
            all[slot as usize * len..][..len].to_vec()
        };
        assert!(
            state(&before, kept[0]) != state(&after, kept[0]),
            "{backend}: no checkpoint"
        );
        if backend != "reference" {
            check(&input, &["--backend", backend]).succeeds();
        }
    }
    for (part, contents) in [
        ("checkpoint_every: wanted a multiple of 64", with("96")),
        (
            "checkpoint_every: wanted a multiple of 64 with checkpoint_slots, got none",
            with("64").without_metadata("checkpoint_every"),
        ),
        (
            "checkpoint_every: wanted none without checkpoint_slots",
            with("64").without(&["checkpoint_slots"]),
        ),
        (
            "snapshots: gdn_prefill has none, wanted false",
            with("64").with_metadata("snapshots", "true"),
        ),
        (
            "formulation = chunked and update_state = false exclude each other",
            prefill().with_metadata("update_state", "false"),
        ),
        (
            "formulation: gdn_prefill takes none, gdn_mtp or kda_recurrent does",
            prefill().with_metadata("formulation", "recurrent"),
        ),
        (
            "positions[1]: wanted 0 or more, got -64",
            prefill().with_indices("positions", &[3], &[0, -64, 0]),
        ),
    ] {
        check(&contents.write(&folder, "bad"), &["--backend", "sim"]).refused(part);
    }
}

/// The file [`GDN`] with B = T = 2, in slots 2 and 3.
fn two_tokens() -> Contents {
    let shapes: [(&str, &[usize]); 4] = [
        ("x", &[2, 2, CHANNELS]),
        ("z", &[2, 2, 4, 128]),
        ("a", &[2, 2, 4]),
        ("b", &[2, 2, 4]),
    ];
    let contents = layer()
        .without_expected()
        .with_metadata("op", "gdn_mtp")
        .with_indices("read_slots", &[2], &[2, 3]);
    shapes.iter().fold(contents, |contents, (name, shape)| {
        contents.reshaped(name, shape)
    })
}

/// Adds token slots, and windows of four columns.
fn token_slots(contents: Contents, slots: &[i32]) -> Contents {
    let windows = (0..5 * CHANNELS * 4).map(|i| half::bf16::from_f32((i % 37) as f32 / 16.0 - 1.0));
    let windows: Vec<u8> = windows.flat_map(half::bf16::to_le_bytes).collect();
    contents
        .without(&["read_slots"])
        .with_indices("token_slots", &[2, 2], slots)
        .with("conv_state", Dtype::BF16, &[5, CHANNELS, 4], windows)
}

/// A resume whose previous tokens are the file's own.
fn resume(keep: &[i32]) -> Contents {
    let previous =
        |contents: Contents, name: &str| contents.with_copy(&format!("prev.{name}"), name);
    ["x", "a", "b"]
        .into_iter()
        .fold(two_tokens(), previous)
        .with_indices("keep", &[2], keep)
}

fn commit(keep: &[i32]) -> Contents {
    let of_new_tokens = ["x", "z", "norm_weight", "a", "b"];
    resume(keep)
        .without(&of_new_tokens)
        .without_metadata("norm_eps")
        .without_metadata("norm_activation")
}

fn packed(contents: Contents) -> Contents {
    let flat = |contents: Contents, name: &str| {
        let mut shape = contents.tensors[name].1.clone();
        (shape[0], shape[1]) = (1, shape[0] * shape[1]);
        contents.reshaped(name, &shape)
    };
    ["x", "z", "a", "b"]
        .into_iter()
        .fold(contents, flat)
        .with_indices("cu_seqlens", &[3], &[0, 1, 4])
}

#[test]
fn every_way_of_keeping_windows_meets_the_reference() {
    let folder = folder();
    let fresh = |contents: Contents| contents.with_indices("fresh", &[2], &[0, 1]);
    let slots = || token_slots(two_tokens(), &[0, 1, 2, 99]);
    let all = ["conv_state", "o", "state"];
    let kept = ["conv_snapshots", "conv_state", "o", "snapshots", "state"];
    let with_snapshots = |contents: Contents| contents.with_metadata("snapshots", "true");
    let cases = [
        ("in place", two_tokens(), &all[..]),
        ("packed", packed(two_tokens()), &all),
        ("fresh", fresh(two_tokens()), &all),
        (
            "snapshots",
            with_snapshots(two_tokens()).with_metadata("update_state", "false"),
            &kept,
        ),
        (
            "packed, snapshots",
            with_snapshots(packed(two_tokens())),
            &kept,
        ),
        ("token slots", slots(), &all),
        (
            "token slots, accepted, snapshots",
            with_snapshots(slots().with_indices("accepted", &[2], &[2, 1])),
            &kept,
        ),
        (
            "a window without a slot",
            token_slots(two_tokens(), &[-1, 1, 2, 4]),
            &all,
        ),
        ("token slots, fresh", fresh(slots()), &all),
        ("resume", resume(&[1, 2]), &all),
        ("resume, fresh", fresh(resume(&[0, 2])), &all),
        ("commit", commit(&[2, 1]), &["conv_state", "state"]),
        (
            "commit, fresh",
            fresh(commit(&[1, 0])),
            &["conv_state", "state"],
        ),
    ];
    for (case, contents, names) in cases {
        let input = contents.write(&folder, "in");
        let output = folder.path().join("out.safetensors");
        for backend in backends() {
            run(&input, &output, &["--backend", backend]).succeeds();
            let out = Contents::read(&output);
            assert_eq!(out.tensors.keys().collect::<Vec<_>>(), names, "{case}");
            let both = names.iter().fold(contents.clone(), |both, name| {
                let shape = &out.tensors[*name].1;
                both.with_floats(&format!("expected.{name}"), shape, &out.floats(name))
            });
            let both = both.write(&folder, "both");
            for backend in backends() {
                let stdout = check(&both, &["--backend", backend]).succeeds().stdout;
                assert!(!stdout.contains(" reference "), "{case}: {stdout}");
            }
        }
    }
}

/// Columns of windows for which a row has no token are unchanged, and all others are copies.
#[test]
fn columns_of_windows_are_compared_bit_for_bit() {
    let folder = folder();
    let plain = packed(token_slots(two_tokens(), &[0, 1, 2, 99]))
        .with_indices("cu_seqlens", &[3], &[0, 1, 3])
        .with_metadata("max_tokens", "2");
    let output = folder.path().join("out.safetensors");
    run(
        &plain.write(&folder, "in"),
        &output,
        &["--backend", "reference"],
    )
    .succeeds();
    let out = Contents::read(&output).floats("conv_state");
    // Row 0 has one token, whose slot is the first: columns 0 to 2 are written, column 3 is not.
    for (column, part) in [(2, "input 2 differs"), (3, "input 3 is to change")] {
        let mut wrong = out.clone();
        wrong[column] = wrong[column].next_up();
        let shape = plain.tensors["conv_state"].1.clone();
        let file = plain
            .clone()
            .with_floats("expected.conv_state", &shape, &wrong)
            .write(&folder, "wrong");
        check(&file, &["--backend", "reference"]).fails_the_check(part);
    }
}

/// The slot of a fresh row holds NaN; its results are those of a slot with zeros.
#[test]
fn fresh_rows_start_from_zeros() {
    let folder = folder();
    let of = |value: f32| {
        let contents = filled(layer().without_expected(), "state", value);
        filled(contents, "conv_state", value)
    };
    let garbage = of(f32::NAN).with_indices("fresh", &[4], &[1, 1, 1, 0]);
    for backend in backends() {
        let results = [garbage.clone(), of(0.0)].map(|contents| {
            let input = contents.write(&folder, "in");
            let output = folder.path().join("out");
            run(&input, &output, &["--backend", backend]).succeeds();
            Contents::read(&output)
        });
        assert_eq!(results[0].tensors["o"], results[1].tensors["o"]);
        for name in ["state", "conv_state"] {
            let [fresh, zeros] = results.each_ref().map(|result| result.floats(name));
            let slot = fresh.len() / 5;
            for used in [0, 2, 3] {
                let of_slot = used * slot..(used + 1) * slot;
                assert_eq!(fresh[of_slot.clone()], zeros[of_slot], "{name}");
            }
        }
    }
}

#[test]
fn windows_are_compared_bit_for_bit() {
    let folder = folder();
    let window = CHANNELS * 3;
    // Slot 2 is written, slot 1 is not.
    for (slot, part) in [(2, "slot 2 differs"), (1, "slot 1 is to change")] {
        let place = slot * window + 5;
        let next = layer().floats("expected.conv_state")[place].next_up();
        let file = layer()
            .with_float_at("expected.conv_state", place, next)
            .write(&folder, "in");
        for backend in backends() {
            check(&file, &["--backend", backend]).fails_the_check(part);
        }
    }
}

#[test]
fn what_contradicts_a_layer_is_refused_by_name() {
    let folder = folder();
    let plain = || Contents::fixture("gdn_decode_bf16_pool");
    let mtp = || layer().with_metadata("op", "gdn_mtp");
    let meta = |key, value| layer().with_metadata(key, value);
    let copy = |name, of| layer().with_copy(name, of);
    let cases = [
        (
            "metadata heads: wanted the number of query/key heads with x, got none",
            layer().without_metadata("heads"),
        ),
        (
            "metadata heads: wanted the number of query/key heads, got \"two\"",
            meta("heads", "two"),
        ),
        (
            "metadata heads: wanted none without x",
            plain().with_metadata("heads", "2"),
        ),
        (
            "x: wanted shape [B, T, D] with D = 2*H*K + HV*V = 1280 of heads and state, got [4, 1, 1024]",
            meta("heads", "3"),
        ),
        (
            "metadata conv_activation: wanted silu or none, got \"sigmoid\"",
            meta("conv_activation", "sigmoid"),
        ),
        (
            "metadata conv_activation: wanted none without x",
            plain().with_metadata("conv_activation", "silu"),
        ),
        (
            "metadata norm_activation: wanted silu or sigmoid, got \"none\"",
            meta("norm_activation", "none"),
        ),
        (
            "metadata norm_activation: wanted none without z",
            plain().with_metadata("norm_activation", "silu"),
        ),
        (
            "metadata norm_eps: wanted a number above 0 with z, got none",
            layer().without_metadata("norm_eps"),
        ),
        (
            "metadata norm_eps: wanted none without z",
            layer().without(&["z"]),
        ),
        (
            ": norm_eps: wanted a finite number above 0, got 0",
            meta("norm_eps", "0"),
        ),
        (
            "norm_weight is missing: norms need it",
            layer().without(&["norm_weight"]),
        ),
        (
            "z is missing: norms need it",
            layer()
                .without(&["z"])
                .without_metadata("norm_eps")
                .without_metadata("norm_activation"),
        ),
        (
            "x is missing: convolutions need it",
            layer()
                .without(&["x", "expected.o"])
                .without_metadata("heads")
                .without_metadata("conv_activation"),
        ),
        (
            "conv_weight is missing: convolutions need it",
            layer().without(&["conv_weight"]),
        ),
        (
            "conv_state is missing: convolutions need it",
            layer().without(&["conv_state", "expected.conv_state"]),
        ),
        (
            "state is missing",
            layer().without(&["state", "expected.o", "expected.state"]),
        ),
        (
            "x and q exclude each other: a convolution makes q, k and v of x",
            copy("q", "z"),
        ),
        (
            "conv_state and q exclude each other",
            plain().with_floats("conv_state", &[1], &[0.0]),
        ),
        (
            "x: wanted shape [B, T = 1, D] with op = gdn_decode, got [2, 2, 1024]",
            layer()
                .without(&["expected.o"])
                .reshaped("x", &[2, 2, CHANNELS]),
        ),
        (
            "x and prev.k exclude each other: a convolution makes q, k and v of x",
            ["prev.k", "prev.v", "prev.a", "prev.b"]
                .into_iter()
                .fold(mtp(), |contents, name| contents.with_copy(name, "z"))
                .with_indices("keep", &[4], &[0; 4]),
        ),
        (
            "prev.x is missing: previous tokens need it",
            resume(&[0, 0]).without(&["prev.x"]),
        ),
        (
            "prev.x: wanted the dtype of x, got f32",
            resume(&[0, 0]).with_floats("prev.x", &[2, 2, CHANNELS], &[0.0; 4 * CHANNELS]),
        ),
        (
            "prev.x: wanted shape [B, T', D] = [2, 1, 1024], got [2, 1, 2048]",
            commit(&[0, 0]).reshaped("prev.x", &[2, 1, 2 * CHANNELS]),
        ),
        (
            "prev.x and q exclude each other: a convolution makes q, k and v of x",
            resume(&[0, 0]).with_copy("q", "z").without(&["x"]),
        ),
        (
            "metadata heads: wanted the number of query/key heads with x, got none",
            commit(&[0, 0]).without_metadata("heads"),
        ),
        (
            "conv_state: wanted shape [P, D, W - 2 + T] = [5, 1024, 4], got [5, 1024, 3]",
            two_tokens()
                .without(&["read_slots"])
                .with_indices("token_slots", &[2, 2], &[0; 4]),
        ),
        (
            "a commit and z exclude each other: previous tokens without a q or an x are committed",
            commit(&[0, 0])
                .with("z", Dtype::BF16, &[2], vec![0; 4])
                .with_metadata("norm_eps", "1e-6"),
        ),
        (
            "conv_state: wanted shape [P, D, W - 1] = [5, 1024, 3], got [5, 3, 1024]",
            layer()
                .without(&["expected.conv_state"])
                .reshaped("conv_state", &[5, 3, CHANNELS]),
        ),
        (
            "conv_state: wanted the dtype of x, got f32",
            layer().with_floats(
                "conv_state",
                &[5, CHANNELS, 3],
                &vec![0.0; 5 * CHANNELS * 3],
            ),
        ),
        (
            "fresh: wanted shape [B] = [4], got [3]",
            layer().with_indices("fresh", &[3], &[0; 3]),
        ),
        (
            "tensor expected.conv_state: wanted none, since the file asks for no such result",
            plain().with_floats("expected.conv_state", &[1], &[0.0]),
        ),
        (
            "a commit and z exclude each other: previous tokens without a q or an x are committed",
            ["prev.k", "prev.v", "prev.a", "prev.b"]
                .into_iter()
                .fold(mtp(), |contents, name| contents.with_copy(name, "z"))
                .without(&["x", "conv_weight", "conv_state", "a", "b"])
                .without(&["expected.o", "expected.conv_state"])
                .without_metadata("heads")
                .without_metadata("conv_activation"),
        ),
    ];
    for (part, contents) in cases {
        let file = contents.write(&folder, "in");
        check(&file, &["--backend", "reference"]).refused(part);
    }
}
