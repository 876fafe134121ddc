//! Inputs that cannot be read or used: exit status 2 and one line that names the cause, never a panic.

use std::path::Path;
use std::process::Stdio;

use crate::command::{Contents, check, command, fixture_path, folder, gated_delta, run};
use gated_delta_cli::file;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::tensor::Dtype;

const POOL: &str = "gdn_decode_bf16_pool";

/// Bytes of a file with this header and `data` bytes of data.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn files_that_lie_are_refused() {
    let folder = folder();
    let path = folder.path().join("in.safetensors");
    let fixture = std::fs::read(fixture_path(POOL)).unwrap();
    let op = r#""__metadata__":{"op":"gdn_decode"}"#;
    let tensor = |name: &str, dtype: &str, shape: &str, offsets: &str| {
        format!(
            r#"{{{op},"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#
        )
    };
    let mut longer = fixture.clone();
    longer.push(0);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        (
            "not a safetensors file: wanted one that begins with the 8 bytes of its header's length and a {, got an empty one",
            Vec::new(),
        ),
        (
            r#"not a safetensors file: wanted one that begins with the 8 bytes of its header's length and a {, got one that begins with "\x00\x00"#,
            vec![0; 7],
        ),
        ("not a safetensors file", vec![0; 8]),
        ("header: EOF", [&0u64.to_le_bytes()[..], b"{}"].concat()),
        ("not a safetensors file", u64::MAX.to_le_bytes().to_vec()),
        (
            "not a safetensors file",
            [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
        ),
        (
            r##"got one that begins with "# a text, and no""##,
            b"# a text, and no more".to_vec(),
        ),
        (
            "(a zip archive, which torch.save and np.savez write)",
            b"PK\x03\x04 and what torch.save writes behind it".to_vec(),
        ),
        (
            "bytes of the header: wanted at most 2",
            [&9u64.to_le_bytes()[..], b"{}"].concat(),
        ),
        (
            r##"got one that begins with "\x08\x00\x00\x00\x00\x00\x00\x00not json""##,
            raw("not json", 0),
        ),
        ("header: expected value", raw("{\"q\":}", 0)),
        (
            "header: invalid",
            [&4u64.to_le_bytes()[..], b"{\"\xff\""].concat(),
        ),
        (
            "metadata op: wanted gdn_decode, gdn_mtp, gdn_prefill, kda_recurrent or kda_prefill, got none",
            raw("{}", 0),
        ),
        ("bytes after the header: wanted 0", raw("{}", 5)),
        (
            "bytes after the header",
            fixture[..fixture.len() - 1].to_vec(),
        ),
        ("bytes after the header", longer),
        ("bytes of the header", fixture[..100].to_vec()),
        (
            "tensor q: wanted 8 bytes for F32 [2], got 4",
            raw(&tensor("q", "F32", "[2]", "[0,4]"), 4),
        ),
        (
            "tensor q: wanted bytes from 0 on, got 4..8",
            raw(&tensor("q", "F32", "[1]", "[4,8]"), 8),
        ),
        (
            "tensor q: wanted bytes from 0 on, got 8..4",
            raw(&tensor("q", "F32", "[1]", "[8,4]"), 8),
        ),
        (
            "after the header: wanted 400",
            raw(&tensor("q", "F32", "[100]", "[0,400]"), 4),
        ),
        (
            "more than there can be",
            raw(&tensor("q", "F32", "[4294967296,4294967296,4]", "[0,4]"), 4),
        ),
        (
            "more than there can be",
            raw(&tensor("q", "F32", "[9223372036854775807]", "[0,4]"), 4),
        ),
        (
            "header: unknown variant `F33`",
            raw(&tensor("q", "F33", "[1]", "[0,4]"), 4),
        ),
        (
            "header: invalid value",
            raw(&tensor("q", "F32", "[-1]", "[0,4]"), 4),
        ),
        (
            "tensor q: wanted F32, BF16",
            raw(&tensor("q", "F64", "[1]", "[0,8]"), 8),
        ),
        ("k is missing", raw(&tensor("q", "F32", "[]", "[0,4]"), 4)),
        (
            "q\\nerror: \\u{1b}[31m",
            raw(&tensor("q\\nerror: \\u001b[31m", "F32", "[1]", "[0,4]"), 4),
        ),
    ];
    for (part, bytes) in cases {
        std::fs::write(&path, bytes).unwrap();
        check(&path, &[]).refused(part);
    }
    check(folder.path(), &[]).refused("regular file");
    check(Path::new("/nowhere/in.safetensors"), &[]).refused("/nowhere/in.safetensors");
}

#[test]
fn broken_files_never_panic() {
    let folder = folder();
    let path = folder.path().join("in.safetensors");
    let mut random = StdRng::seed_from_u64(1);
    for name in [
        "gdn_decode_f32_vlast",
        "gdn_mtp_bf16_snapshots",
        "kda_recurrent_bf16_lower_bound_d64",
    ] {
        let fixture = std::fs::read(fixture_path(name)).unwrap();
        let header = 8 + u64::from_le_bytes(*fixture.first_chunk().unwrap()) as usize;
        let mut refused = 0;
        for _ in 0..200 {
            let mut bytes = fixture.clone();
            for _ in 0..random.random_range(1..4) {
                bytes[random.random_range(0..header)] =
                    b"0123456789[]{},:\"eE-\x00\xff"[random.random_range(0..22)];
            }
            if random.random_bool(0.2) {
                bytes.truncate(random.random_range(0..bytes.len()));
            }
            std::fs::write(&path, bytes).unwrap();
            refused += usize::from(file::read_with_expected(&path).is_err());
        }
        assert!(refused > 100, "{name}: {refused} of 200");
    }
}

#[test]
fn metadata_that_is_unknown_or_contradicts_is_refused() {
    let folder = folder();
    let fixture = || Contents::fixture(POOL);
    let gates = |contents: Contents| {
        let b = contents.tensors["b"].clone();
        contents
            .with("g", b.0, &b.1, b.2.clone())
            .with("beta", b.0, &b.1, b.2)
    };
    let given = || gates(fixture()).without(&["a", "b", "A_log", "dt_bias"]);
    let cases = [
        (
            "op: wanted gdn_decode, gdn_mtp, gdn_prefill, kda_recurrent or kda_prefill, got \"gdn\"",
            fixture().with_metadata("op", "gdn"),
        ),
        (
            "\"layout\": wanted no such key, got \"k_last\"",
            fixture().with_metadata("layout", "k_last"),
        ),
        (
            "state_layout: wanted k_last or v_last, got \"K\"",
            fixture().with_metadata("state_layout", "K"),
        ),
        (
            "head_map: wanted grouped or tiled",
            fixture().with_metadata("head_map", ""),
        ),
        (
            "qk_l2norm: wanted true or false, got \"True\"",
            fixture().with_metadata("qk_l2norm", "True"),
        ),
        (
            "snapshots: gdn_decode has none",
            fixture().with_metadata("snapshots", "true"),
        ),
        (
            "scale: wanted a number, got \"half\"",
            fixture().with_metadata("scale", "half"),
        ),
        (
            "scale: wanted a finite number",
            fixture().with_metadata("scale", "nan"),
        ),
        (
            "null_slot: wanted a slot, 0 or more, got \"-1\"",
            fixture().with_metadata("null_slot", "-1"),
        ),
        (
            "null_slot: wanted below",
            fixture().with_metadata("null_slot", "4294967295"),
        ),
        (
            "lower_bound: gdn_decode takes none",
            fixture().with_metadata("lower_bound", "-5"),
        ),
        (
            "beta: gdn_decode takes none",
            fixture().with_metadata("beta", "given"),
        ),
        (
            "beta_scale: wanted 1 or 2, got \"3\"",
            fixture().with_metadata("beta_scale", "3"),
        ),
        (
            "beta_scale: wanted none",
            given().with_metadata("beta_scale", "2"),
        ),
        (
            "formulation: gdn_decode takes none, gdn_mtp or kda_recurrent does",
            fixture().with_metadata("formulation", "recurrent"),
        ),
        (
            "gate: wanted raw or given, got \"log\"",
            fixture().with_metadata("gate", "log"),
        ),
        (
            "gate: given takes g and beta",
            fixture().with_metadata("gate", "given"),
        ),
        (
            "gate: raw takes a, b, A_log and dt_bias",
            given().with_metadata("gate", "raw"),
        ),
        ("g, beta and a exclude each other", gates(fixture())),
    ];
    for (part, contents) in cases {
        check(&contents.write(&folder, "in"), &[]).refused(part);
    }
}

#[test]
fn tensors_that_are_unknown_missing_or_wrong_are_refused() {
    let folder = folder();
    let fixture = || Contents::fixture(POOL);
    let one = || vec![0; 4];
    let reshaped = |name: &str, shape: &[usize]| {
        let (dtype, _, data) = fixture().tensors[name].clone();
        fixture().with(name, dtype, shape, data)
    };
    let slots = |slots: [i32; 3]| {
        fixture().with(
            "read_slots",
            Dtype::I32,
            &[3],
            slots.into_iter().flat_map(i32::to_le_bytes).collect(),
        )
    };
    let writes = slots([0, 1, 2]).with(
        "write_slots",
        Dtype::I32,
        &[3],
        [3i32, 0, 4]
            .into_iter()
            .flat_map(i32::to_le_bytes)
            .collect(),
    );
    let mut cases = vec![
        (
            "tensor read_slot: wanted one of q, k, v",
            fixture().with("read_slot", Dtype::I32, &[1], one()),
        ),
        (
            "tensor expected.q: wanted one of expected.o",
            fixture().with("expected.q", Dtype::F32, &[1], one()),
        ),
        (
            "tensor cu_seqlens: gdn_decode takes none",
            fixture().with("cu_seqlens", Dtype::I32, &[1], one()),
        ),
        (
            "tensor expected.snapshots: gdn_decode takes none",
            fixture().with("expected.snapshots", Dtype::F32, &[1], one()),
        ),
        (
            "tensor expected.o: wanted f32 [3, 1, 4, 128]",
            reshaped("expected.o", &[3, 4, 128]),
        ),
        (
            "q: wanted shape [B, T = 1, H, K] with op = gdn_decode, got [6, 128]",
            reshaped("q", &[6, 128]),
        ),
        ("k: wanted shape", reshaped("k", &[3, 2, 1, 128])),
        (
            "q: wanted shape [B, T, H, K] as k, [3, 1, 2, 128], got [3, 1, 0, 128]",
            fixture().with("q", Dtype::BF16, &[3, 1, 0, 128], Vec::new()),
        ),
        ("state: wanted shape", reshaped("state", &[5, 4, 64, 256])),
        (
            "q: wanted shape [B, T = 1, H, K] with op = gdn_decode, got [1, 3, 2, 128]",
            reshaped("q", &[1, 3, 2, 128]),
        ),
        ("A_log: wanted shape", reshaped("A_log", &[2, 2])),
        (
            "A_log: wanted f32, got i32",
            fixture().with("A_log", Dtype::I32, &[4], vec![0; 16]),
        ),
        (
            "q: wanted bf16, f16 or f32, got i64",
            fixture().with("q", Dtype::I64, &[3, 1, 2, 128], vec![0; 6144]),
        ),
        (
            "read_slots: wanted i32, i64 or u32, got f32",
            fixture().with("read_slots", Dtype::F32, &[3], vec![0; 12]),
        ),
        (
            "row 0 writes slot 1 of state, and row 2 writes slot 1 of state",
            slots([1, -1, 1]),
        ),
        (
            "row 0 reads slot 0 of state, and row 1 writes slot 0 of state",
            writes,
        ),
        (
            "update_state = false and write_slots",
            fixture()
                .with("write_slots", Dtype::I32, &[3], vec![0; 12])
                .with_metadata("update_state", "false"),
        ),
    ];
    for (part, name) in [
        ("q is missing", "q"),
        ("k is missing", "k"),
        ("v is missing", "v"),
        ("state is missing", "state"),
        ("a is missing: raw gates need it", "a"),
        ("dt_bias is missing: raw gates need it", "dt_bias"),
    ] {
        cases.push((part, fixture().without(&[name])));
    }
    for (part, contents) in cases {
        check(&contents.write(&folder, "in"), &[]).refused(part);
    }
}

#[test]
fn nothing_of_the_users_is_overwritten() {
    let folder = folder();
    let input = Contents::fixture(POOL).write(&folder, "in");
    let before = std::fs::read(&input).unwrap();
    let sim = ["--backend", "sim"];
    run(&input, &input, &sim).refused("wanted another file than the input");
    run(&input, folder.path(), &sim).refused("regular file");
    run(&input, &folder.path().join("none/out"), &sim).refused("none");
    run(&input, Path::new("/"), &sim).refused("/");
    #[cfg(unix)]
    {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let (link, other) = (folder.path().join("link"), folder.path().join("other"));
        symlink(&input, &link).unwrap();
        run(&input, &link, &sim).refused("wanted another file than the input");
        run(&input, Path::new("/dev/null"), &sim).refused("regular file");
        std::fs::write(&other, "mine").unwrap();
        std::fs::remove_file(&link).unwrap();
        symlink(&other, &link).unwrap();
        run(&input, &link, &sim).succeeds();
        assert!(link.is_symlink() && std::fs::read(&other).unwrap().len() > 100);
        assert_ne!(other.metadata().unwrap().permissions().mode() & 0o044, 0);
    }
    let output = folder.path().join("kept");
    std::fs::write(&output, "mine").unwrap();
    let broken = Contents::fixture(POOL)
        .without(&["q"])
        .write(&folder, "broken");
    run(&broken, &output, &sim).refused("q is missing");
    assert_eq!(std::fs::read(&output).unwrap(), b"mine");
    assert!(std::fs::read(&input).unwrap() == before);
    let hidden = std::fs::read_dir(folder.path())
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    assert_eq!(
        hidden.filter(|name| name.starts_with('.')).count(),
        0,
        "a temporary file is left"
    );
}

#[test]
fn usage_errors_are_one_line() {
    gated_delta(&["chek"]).refused("'chek'");
    gated_delta(&["check"]).refused("required");
    gated_delta(&["check", "x", "--backend", "gpu"])
        .refused("possible values: auto, cuda, sim, reference");
    gated_delta(&["run", "x"]).refused("--output");
    gated_delta(&["demo", "--batch", "0"]).refused("--batch");
    gated_delta(&["demo", "--model", "gpt"]).refused("qwen3-next");
    for asked in ["--help", "--version"] {
        assert!(
            gated_delta(&[asked])
                .succeeds()
                .stdout
                .contains("gated-delta")
        );
    }
}

#[test]
fn shells_learn_the_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = gated_delta(&["completions", shell]).succeeds().stdout;
        for word in ["gated-delta", "check", "backend", "json"] {
            assert!(script.contains(word), "{word} for {shell}");
        }
    }
    gated_delta(&["completions", "sh"]).refused("bash");
}

#[test]
fn nobody_reading_is_no_panic() {
    for closed in ["stdout", "stderr"] {
        let mut command = command();
        command.args([
            "demo",
            "--batch",
            "1",
            "--prompt",
            "0",
            "--steps",
            "1",
            "--backend",
            "sim",
        ]);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        if closed == "stdout" {
            drop(child.stdout.take());
        } else {
            drop(child.stderr.take());
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{closed}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
    }
}
