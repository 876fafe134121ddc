//! Tests of `check` and `run`: known answers, round trips, failed checks.

use crate::command::{Contents, Ran, check, command, fixture_path, folder, gated_delta, run};
use gated_delta_cli::{Backend, Choice};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

const POOL: &str = "gdn_decode_bf16_pool";
const VLAST: &str = "gdn_decode_f32_vlast";
/// Every file of known answers, and the number of lines in its check.
const FIXTURES: [(&str, usize); 5] = [
    (POOL, 3),
    (VLAST, 2),
    ("gdn_mtp_bf16_snapshots", 3),
    ("kda_recurrent_bf16_lower_bound_d64", 2),
    ("kda_recurrent_bf16_softplus", 3),
];

/// Whether there is a GPU. Without one, panics if `GATED_DELTA_REQUIRE_GPU` is 1.
pub fn gpu() -> bool {
    match Backend::pick(Choice::Cuda) {
        Ok(_) => true,
        Err(error) => {
            let required = std::env::var("GATED_DELTA_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "GATED_DELTA_REQUIRE_GPU=1, but {error}");
            eprintln!("skipped: no GPU");
            false
        }
    }
}

#[test]
fn known_answers_hold_in_the_simulator_and_the_reference() {
    for (name, lines) in FIXTURES {
        for backend in ["sim", "reference"] {
            let stdout = check(&fixture_path(name), &["--backend", backend])
                .succeeds()
                .stdout;
            assert_eq!(stdout.matches(" ok |").count(), lines, "{stdout}");
            assert!(!stdout.contains(" reference "), "{stdout}");
        }
    }
}

#[test]
fn known_answers_hold_on_the_gpu() {
    if gpu() {
        for (name, _) in FIXTURES {
            let ran = check(&fixture_path(name), &["--backend", "cuda"]).succeeds();
            assert!(ran.stderr.starts_with("backend: GPU: "), "{}", ran.stderr);
        }
    }
}

#[test]
fn every_variant_meets_the_known_answers() {
    let files = [
        ("recurrent_klast_bf16_k128_", POOL),
        ("recurrent_vlast_f32_k128_", VLAST),
        ("recurrent_klast_bf16_k128_", "gdn_mtp_bf16_snapshots"),
        (
            "recurrent_klast_bf16_k64_",
            "kda_recurrent_bf16_lower_bound_d64",
        ),
        ("recurrent_klast_bf16_k128_", "kda_recurrent_bf16_softplus"),
    ];
    let mut backends = vec!["sim"];
    backends.extend(gpu().then_some("cuda"));
    for (prefix, name) in files {
        let entries = gated_delta::Entry::ALL.iter().map(|entry| entry.name());
        let mut ran = 0;
        for entry in entries.filter(|entry| entry.starts_with(prefix)) {
            for backend in &backends {
                let options = ["--variant", entry, "--backend", backend];
                let stdout = check(&fixture_path(name), &options).succeeds().stdout;
                assert!(stdout.contains(&format!("variant: {entry}\n")), "{stdout}");
                ran += 1;
            }
        }
        assert!(ran >= 2, "{ran} variants {prefix}");
    }
    check(
        &fixture_path(POOL),
        &["--variant", "device_contract", "--backend", "sim"],
    )
    .refused("variant");
    let reference = [
        "--variant",
        "recurrent_klast_bf16_k128_tile16",
        "--backend",
        "reference",
    ];
    check(&fixture_path(POOL), &reference).refused("no variants");
    check(&fixture_path(POOL), &["--variant", "recurrent"]).refused("recurrent");
}

#[test]
fn auto_says_what_it_is() {
    let stderr = check(&fixture_path(VLAST), &[]).succeeds().stderr;
    let wanted = if gpu() {
        "backend: GPU: "
    } else {
        "backend: CPU simulator (no CUDA"
    };
    assert!(stderr.starts_with(wanted), "{stderr}");
}

#[test]
fn without_expectations_the_reference_is_the_judge() {
    let folder = folder();
    for (name, _) in FIXTURES {
        let fixture = || Contents::fixture(name);
        let outputs = ["expected.o", "expected.state", "expected.snapshots"];
        let written = |name: &str| {
            let read_only =
                fixture().metadata.get("update_state").map(String::as_str) == Some("false");
            fixture().tensors.contains_key(name) && !(name == "expected.state" && read_only)
        };
        let compared = outputs.iter().filter(|name| written(name)).count();
        let file = fixture().without_expected().write(&folder, "alone");
        let stdout = check(&file, &["--backend", "sim"]).succeeds().stdout;
        assert_eq!(stdout.matches(" reference ").count(), compared, "{stdout}");
        check(&file, &["--backend", "reference"]).refused("expected.o, expected.state");
        let half = fixture().without(&["expected.o"]).write(&folder, "half");
        let stdout = check(&half, &["--backend", "sim"]).succeeds().stdout;
        assert_eq!(
            (
                stdout.matches(" file ").count(),
                stdout.matches(" reference ").count()
            ),
            (compared - 1, 1),
            "{stdout}"
        );
    }
}

#[test]
fn what_run_writes_passes_as_expected() {
    let folder = folder();
    let given = |contents: Contents| {
        let beta = contents.tensors["b"].clone();
        let minus_one = half::bf16::from_f32(-1.0)
            .to_le_bytes()
            .repeat(beta.2.len() / 2);
        contents
            .without(&["a", "b", "A_log", "dt_bias"])
            .with("g", Dtype::BF16, &beta.1, minus_one)
            .with("beta", Dtype::BF16, &beta.1, beta.2)
            .with_metadata("gate", "given")
    };
    let fixture = || Contents::fixture(POOL).without_expected();
    let write_slots = [4i64, -1, 0]
        .into_iter()
        .flat_map(i64::to_le_bytes)
        .collect();
    let cases = [
        ("as it is", fixture()),
        ("v last", Contents::fixture(VLAST).without_expected()),
        ("given", given(fixture())),
        (
            "read only",
            fixture().with_metadata("update_state", "false"),
        ),
        (
            "tiled",
            fixture()
                .with_metadata("head_map", "tiled")
                .with_metadata("qk_l2norm", "false"),
        ),
        (
            "scaled",
            fixture()
                .with_metadata("scale", "0.5")
                .with_metadata("beta_scale", "2"),
        ),
        ("null slot", fixture().with_metadata("null_slot", "3")),
        (
            "moved",
            fixture().with("write_slots", Dtype::I64, &[3], write_slots),
        ),
    ];
    for (case, contents) in cases {
        let input = contents.write(&folder, case);
        let output = folder.path().join("out.safetensors");
        let before = std::fs::read(&input).unwrap();
        run(&input, &output, &["--backend", "sim"]).succeeds();
        assert!(
            std::fs::read(&input).unwrap() == before,
            "{case}: the input has changed"
        );
        let out = Contents::read(&output);
        assert_eq!(
            out.tensors.keys().collect::<Vec<_>>(),
            ["o", "state"],
            "{case}"
        );
        for (name, like) in [("o", "v"), ("state", "state")] {
            let (got, wanted) = (&out.tensors[name], &contents.tensors[like]);
            assert_eq!((got.0, &got.1), (wanted.0, &wanted.1), "{case}: {name}");
        }
        let (o, state) = (out.floats("o"), out.floats("state"));
        assert_eq!(
            case == "read only",
            state == contents.floats("state"),
            "{case}"
        );
        let shape = |name: &str| out.tensors[name].1.clone();
        let both = contents
            .with_floats("expected.o", &shape("o"), &o)
            .with_floats("expected.state", &shape("state"), &state)
            .write(&folder, "both");
        for backend in ["sim", "reference"] {
            check(&both, &["--backend", backend]).succeeds();
        }
    }
}

#[test]
fn inactive_rows_are_zero() {
    let folder = folder();
    let slots = [-1i32, 3, 99]
        .into_iter()
        .flat_map(i32::to_le_bytes)
        .collect();
    let contents =
        Contents::fixture(POOL)
            .without_expected()
            .with("read_slots", Dtype::I32, &[3], slots);
    let contents = contents.with_metadata("null_slot", "3");
    let output = folder.path().join("out");
    let input = contents.write(&folder, "in");
    let said = "rows: 0 active, 3 inactive (row 0: read_slots = -1, row 1: read_slots = 3, row 2: read_slots = 99)\n";
    for backend in ["sim", "reference"] {
        let ran = run(&input, &output, &["--backend", backend]).succeeds();
        assert!(ran.stdout.contains(said), "{}", ran.stdout);
    }
    let ran = check(&input, &["--backend", "sim"]).succeeds();
    assert!(ran.stdout.contains(said), "{}", ran.stdout);
    let out = Contents::read(&output);
    assert!(out.floats("o").iter().all(|o| *o == 0.0));
    assert!(out.tensors["state"].2 == contents.tensors["state"].2);
}

#[test]
fn wrong_results_fail() {
    let folder = folder();
    let fixture = || Contents::fixture(POOL);
    let slot = fixture().tensors["state"].1[1..].iter().product::<usize>();
    let used: Vec<i32> = fixture().tensors["read_slots"]
        .2
        .as_chunks()
        .0
        .iter()
        .map(|b| i32::from_le_bytes(*b))
        .collect();
    let used = used
        .iter()
        .find_map(|slot| usize::try_from(*slot).ok())
        .unwrap();
    let unused = (0..5)
        .find(|slot| {
            !fixture().tensors["read_slots"]
                .2
                .chunks(4)
                .any(|b| b[0] == *slot)
        })
        .unwrap();
    let unused = usize::from(unused);
    let cases = [
        (
            "above tolerance",
            fixture().with_float_at("expected.o", 7, 3.0),
        ),
        (
            "wanted NaN",
            fixture().with_float_at("expected.o", 7, f32::NAN),
        ),
        (
            "[0, 0, 0, 7], wanted inf",
            fixture().with_float_at("expected.o", 7, f32::INFINITY),
        ),
        (
            "above tolerance",
            fixture().with_float_at("expected.state", used * slot, 1e3),
        ),
        (
            "is to change",
            fixture().with_float_at("expected.state", unused * slot, 1e3),
        ),
    ];
    for (index, (part, contents)) in cases.into_iter().enumerate() {
        let file = contents.write(&folder, &index.to_string());
        check(&file, &["--backend", "sim"]).fails_the_check(part);
    }
}

/// A NaN that the exact result has too does not fail a check, and is reported.
#[test]
fn nan_on_both_sides_is_counted() {
    let folder = folder();
    let mut fixture = Contents::fixture(POOL);
    let (_, _, v) = fixture.tensors.get_mut("v").unwrap();
    v[..2].copy_from_slice(&[0xc0, 0x7f]);
    check(&fixture.write(&folder, "expected"), &["--backend", "sim"]).fails_the_check("NaN at");
    let by_reference = fixture.without_expected().write(&folder, "nan");
    let nan = check(&by_reference, &["--backend", "sim"]).succeeds();
    assert!(
        nan.stdout.contains("not finite on both sides: 1 NaN"),
        "{}",
        nan.stdout
    );
}

#[test]
fn failures_are_coloured_where_colours_are_wanted() {
    let folder = folder();
    let wrong = Contents::fixture(POOL).with_float_at("expected.o", 7, 3.0);
    let file = wrong.write(&folder, "in");
    let stdout = |variables: &[(&str, &str)]| {
        let mut command = command();
        for variable in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(variable);
        }
        let command = command.envs(variables.iter().copied());
        let arguments = ["--backend", "sim"];
        let ran: Ran = command
            .arg("check")
            .arg(&file)
            .args(arguments)
            .output()
            .unwrap()
            .into();
        assert_eq!(ran.code, Some(1));
        ran.stdout
    };
    let forced = ("CLICOLOR_FORCE", "1");
    assert!(stdout(&[forced]).contains("\u{1b}[31mFAILED\u{1b}[0m: above"));
    for plain in [stdout(&[]), stdout(&[forced, ("NO_COLOR", "1")])] {
        assert!(
            plain.contains("FAILED: above") && !plain.contains('\u{1b}'),
            "{plain}"
        );
    }
}

#[test]
fn a_failed_check_says_what_would_hold() {
    let folder = folder();
    let failed = |contents: Contents, said: &str| {
        let file = contents.write(&folder, "in");
        for backend in ["sim", "reference"] {
            check(&file, &["--backend", backend]).fails_the_check(said);
        }
    };
    let fixture = || Contents::fixture(VLAST);
    let layout = "with state_layout = v_last all that the file expects would hold\n";
    failed(fixture().with_metadata("state_layout", "k_last"), layout);
    let neither = "no other state_layout or head_map would hold what the file expects\n";
    failed(fixture().with_float_at("expected.o", 7, 1e3), neither);
    let expected = |contents: Contents| expecting(contents, &folder, "sim");
    let pool = || Contents::fixture(POOL).without_expected();
    let tiled = expected(pool().with_metadata("head_map", "tiled"));
    failed(
        tiled.clone().with_metadata("head_map", "grouped"),
        "with head_map = tiled all that",
    );
    failed(
        tiled
            .with_metadata("head_map", "grouped")
            .with_metadata("state_layout", "v_last"),
        "with state_layout = k_last and head_map = tiled all that",
    );
}

#[test]
fn what_is_not_finite_on_both_sides_is_said_and_alone_fails() {
    let folder = folder();
    let sim = ["--backend", "sim"];
    let fixture = || Contents::fixture(VLAST);
    let v = fixture().floats("v");
    let shape = fixture().tensors["v"].1.clone();
    let head = shape[3];
    let with_v = |v: &[f32]| {
        let contents = fixture().without_expected().with_floats("v", &shape, v);
        let output = folder.path().join("out");
        run(&contents.write(&folder, "in"), &output, &sim).succeeds();
        let out = Contents::read(&output);
        let o = out.floats("o");
        let state = out.tensors["state"].1.clone();
        let contents = contents.with_floats("expected.o", &shape, &o).with_floats(
            "expected.state",
            &state,
            &out.floats("state"),
        );
        (contents, o)
    };

    // One channel of a value head is NaN, in the kernel and in the expectation; so it is in the reference.
    let mut one = v.clone();
    one[head + 5] = f32::NAN;
    let (contents, o) = with_v(&one);
    assert_eq!(o.iter().filter(|o| o.is_nan()).count(), 1);
    for contents in [contents.clone(), contents.clone().without_expected()] {
        let stdout = check(&contents.write(&folder, "one"), &sim)
            .succeeds()
            .stdout;
        let said = "ok, but not finite on both sides: 1 NaN |";
        assert!(stdout.contains(said), "{stdout}");
        let said = format!("ok, but not finite on both sides: {head} NaN |");
        assert!(stdout.contains(&said), "{stdout}");
    }
    let nan = o.iter().position(|o| o.is_nan()).unwrap();
    // A norm makes the whole head NaN.
    let normed = contents
        .clone()
        .without_expected()
        .with_floats("z", &shape, &v)
        .with_floats("norm_weight", &[head], &vec![1.0; head])
        .with_metadata("norm_eps", "1e-6");
    let stdout = check(&normed.write(&folder, "normed"), &sim)
        .succeeds()
        .stdout;
    let said = format!("ok, but not finite on both sides: {head} NaN |");
    assert!(stdout.contains(&said), "{stdout}");
    let file = contents.with_float_at("expected.o", nan, 0.0);
    check(&file.write(&folder, "one side"), &sim).fails_the_check("NaN at");

    // All values are NaN.
    let (contents, _) = with_v(&vec![f32::NAN; v.len()]);
    let file = contents.write(&folder, "all");
    check(&file, &sim).fails_the_check("in every element, nothing compared");
    let file = contents.without_expected().write(&folder, "all");
    check(&file, &sim).fails_the_check("in every element, nothing compared");
}

#[test]
fn garbage_in_slots_of_no_row_hides_nothing() {
    let folder = folder();
    let fixture = Contents::fixture(VLAST);
    let (dtype, mut shape, mut data) = fixture.tensors["state"].clone();
    shape[0] += 1;
    let slot = shape[1..].iter().product::<usize>();
    data.extend(1e30f32.to_le_bytes().repeat(slot));
    let huge = fixture
        .without(&["expected.state"])
        .with("state", dtype, &shape, data);
    check(&huge.write(&folder, "fine"), &["--backend", "sim"]).succeeds();
    let mut expected = huge.floats("state");
    expected[0] += 1.0;
    let wrong = huge
        .with_floats("expected.state", &shape, &expected)
        .write(&folder, "wrong");
    check(&wrong, &["--backend", "sim"]).fails_the_check("above tolerance");
}

#[test]
fn the_demo_checks_a_layer() {
    let options = [
        "--batch",
        "1",
        "--prompt",
        "66",
        "--steps",
        "2",
        "--backend",
        "sim",
    ];
    for (model, steps) in [
        (
            "qwen3-next",
            &[
                ("a prompt of 66", ["gdn_prefill_chain_"; 2]),
                ("2 decodes", ["layer_klast_"; 2]),
                (
                    "verify 4, resume 4",
                    ["gdn_layer_parallel_f32", "gdn_layer_parallel_klast_bf16"],
                ),
            ][..],
        ),
        (
            "kimi-linear",
            &[
                ("a prompt of 66", ["kda_prefill_chain_"; 2]),
                ("2 decodes", ["layer_klast_"; 2]),
                (
                    "verify 4, resume 4",
                    ["kda_layer_parallel_f32", "kda_layer_parallel_klast_bf16"],
                ),
            ],
        ),
    ] {
        let stdout = gated_delta(&[&options[..], &["--model", model]].concat())
            .succeeds()
            .stdout;
        assert!(stdout.starts_with(&format!("{model}: ")), "{stdout}");
        assert_eq!(stdout.matches(" ok |").count(), 2 * steps.len(), "{stdout}");
        for &(line, variants) in steps {
            let lines = stdout.lines().filter(|table| table.contains(line));
            let lines: Vec<_> = lines.collect();
            let of_states = lines.iter().zip(variants);
            assert_eq!(lines.len(), 2, "{stdout}");
            for (line, variant) in of_states {
                assert!(line.contains(variant), "{variant}: {stdout}");
            }
        }
        assert!(
            !stdout.contains("µs"),
            "a time that is not the GPU's: {stdout}"
        );
    }
    gated_delta(&["demo", "--backend", "reference"]).refused("reference");
}

#[test]
fn every_command_speaks_json() {
    let folder = folder();
    let json = |ran: Ran| -> Value { serde_json::from_str(&ran.stdout).unwrap() };
    let sim = ["--backend", "sim", "--json"];
    let slots = [2i32, -1, 3].into_iter().flat_map(i32::to_le_bytes);
    let contents = Contents::fixture(POOL).without_expected().with(
        "read_slots",
        Dtype::I32,
        &[3],
        slots.collect(),
    );
    let input = contents.write(&folder, "in");
    let said = json(check(&input, &sim).succeeds());
    assert_eq!(said["passed"], true);
    let inactive = json!([{ "row": 1, "tensor": "read_slots", "index": -1 }]);
    assert_eq!(said["rows"]["inactive"], inactive);
    assert_eq!(said["rows"]["active"], 2);
    assert_eq!(said["results"][0]["tensor"], "o");
    assert_eq!(said["results"][1]["part"], "written slots");
    assert!(said["results"][0]["error"].as_f64().unwrap() > 0.0);
    assert!(said["variant"].as_str().unwrap().starts_with("recurrent_"));

    let output = folder.path().join("out");
    let said = json(run(&input, &output, &sim).succeeds());
    assert_eq!(said["rows"]["inactive"], inactive);
    assert!(said["output"].as_str().unwrap().ends_with("/out"));

    let wrong = Contents::fixture(VLAST).with_metadata("state_layout", "k_last");
    let ran = check(&wrong.write(&folder, "wrong"), &sim);
    assert_eq!(ran.code, Some(1));
    let said = json(ran);
    assert_eq!(said["passed"], false);
    assert_eq!(said["would_hold_with"], json!({ "state_layout": "v_last" }));
    assert_eq!(said["results"][0]["passed"], false);

    let said = json(gated_delta(&["info", "--json"]).succeeds());
    let kernels = said["kernels"].as_array().unwrap();
    assert_eq!(kernels.len(), gated_delta::Entry::ALL.len());
    assert_eq!(said["device"].is_null(), !gpu());

    // The default command is the demo.
    let demo = ["--batch", "1", "--prompt", "3", "--steps", "1"];
    let said = json(gated_delta(&[&demo[..], &sim].concat()).succeeds());
    assert_eq!(said["model"], "qwen3-next");
    assert_eq!(said["cases"].as_array().unwrap().len(), 6);
    assert_eq!(said["cases"][0]["passed"], true);
}

#[test]
fn info_needs_no_gpu() {
    let stdout = gated_delta(&["info"]).succeeds().stdout;
    assert_eq!(stdout.contains("device: none (no CUDA"), !gpu(), "{stdout}");
    for entry in gated_delta::Entry::ALL {
        assert!(stdout.contains(entry.name()), "{}", entry.name());
    }
    for (operator, model) in [
        ("gdn_decode", "qwen3.5-397b"),
        ("gdn_mtp", "qwen3-next"),
        ("kda_recurrent", "kimi-linear"),
    ] {
        let lines = stdout.lines().filter(|line| {
            line.starts_with(&format!("| {operator} ")) && line.contains(&format!(" {model} "))
        });
        assert_eq!(lines.count(), 4, "{operator} of {model}: {stdout}");
    }
}

/// Pseudo-random numbers, uniform in ±1, the same for a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn floats(&mut self, count: usize, [least, most]: [f32; 2]) -> Vec<f32> {
        let mut float = || least + (most - least) * self.below(1 << 24) as f32 / (1 << 24) as f32;
        (0..count).map(|_| float()).collect()
    }
}

/// Way in which a problem keeps its states.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Resume,
    ResumeOfLayer,
    Snapshots,
    Deferred,
    DeferredLayer,
    Prefill,
}

/// A random problem of two rows, whose values follow from the seed.
fn random(kda: bool, parallel: bool, state: Dtype, way: Way, seed: u64) -> Contents {
    let mut random = Random(seed);
    // KDA has K = 64 token by token only.
    let dim = match kda && (parallel || matches!(way, Way::Prefill)) {
        true => 128,
        false => 64,
    };
    let io = if random.below(2) == 0 {
        Dtype::F32
    } else {
        Dtype::BF16
    };
    let tokens = match way {
        Way::Deferred | Way::DeferredLayer if !parallel => 1,
        _ => 2 + random.below(3) as usize,
    };
    let (most, entries) = if parallel { (16, 20) } else { (8, 9) };
    let layer = matches!(way, Way::ResumeOfLayer | Way::DeferredLayer);
    let waits = matches!(way, Way::Deferred | Way::DeferredLayer);
    let op = match (kda, way) {
        (false, Way::Prefill) => "gdn_prefill",
        (true, Way::Prefill) => "kda_prefill",
        (false, _) => "gdn_mtp",
        (true, _) => "kda_recurrent",
    };
    let mut contents = Contents::default().with_metadata("op", op);
    if !matches!(way, Way::Prefill) {
        let formulation = if parallel { "parallel" } else { "recurrent" };
        contents = contents.with_metadata("formulation", formulation);
    }
    let mut put = |random: &mut Random, name: &str, dtype: Dtype, shape: &[usize], range| {
        let values = random.floats(shape.iter().product(), range);
        let bytes = |value: f32| match dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            Dtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => half::f16::from_f32(value).to_le_bytes().to_vec(),
        };
        let data = values.into_iter().flat_map(bytes).collect();
        contents = std::mem::take(&mut contents).with(name, dtype, shape, data);
    };
    let gates = |of: [usize; 3]| {
        if kda {
            vec![of[0], of[1], of[2], dim]
        } else {
            of.to_vec()
        }
    };
    let decays = [-0.7, -0.01];
    let one = [-1.0, 1.0];
    let mut given = |random: &mut Random, before: &str, tokens: usize| {
        let (heads, values) = ([2, tokens, 1, dim], [2, tokens, 2, dim]);
        let named = |name: &str| format!("{before}{name}");
        if layer {
            put(random, &named("x"), io, &[2, tokens, 4 * dim], one);
        } else {
            if before.is_empty() {
                put(random, "q", io, &heads, one);
            }
            put(random, &named("k"), io, &heads, one);
            put(random, &named("v"), io, &values, one);
        }
        put(
            random,
            &named("g"),
            Dtype::F32,
            &gates([2, tokens, 2]),
            decays,
        );
        put(
            random,
            &named("beta"),
            Dtype::F32,
            &[2, tokens, 2],
            [0.1, 1.0],
        );
    };
    given(&mut random, "", tokens);
    if matches!(way, Way::Resume | Way::ResumeOfLayer) {
        given(&mut random, "prev.", 3);
    }
    put(&mut random, "state", state, &[3, 2, dim, dim], one);
    if layer {
        put(&mut random, "conv_weight", io, &[4 * dim, 4], one);
        put(&mut random, "conv_state", io, &[3, 4 * dim, 3], one);
        put(&mut random, "z", io, &[2, tokens, 2, dim], [-2.0, 2.0]);
        put(&mut random, "norm_weight", io, &[dim], one);
    }
    if waits {
        let of_keys = if layer { Dtype::F32 } else { io };
        put(
            &mut random,
            "pending.keys",
            of_keys,
            &[3, 1, entries, dim],
            one,
        );
        let of_updates = [-0.3, 0.3];
        put(
            &mut random,
            "pending.updates",
            Dtype::F32,
            &[3, 2, entries, dim],
            of_updates,
        );
        put(
            &mut random,
            "pending.decays",
            Dtype::F32,
            &gates([3, 2, entries]),
            decays,
        );
    }
    if waits && layer && parallel {
        put(
            &mut random,
            "pending.inputs",
            io,
            &[3, entries, 4 * dim],
            one,
        );
    }
    if kda {
        contents = contents.with_metadata("gate", "log");
    }
    if layer {
        contents = contents
            .with_metadata("heads", "1")
            .with_metadata("norm_eps", "1e-5");
    }
    let mut below = |end: usize| random.below(end as u64) as i32;
    match way {
        Way::Resume | Way::ResumeOfLayer => {
            let keep = [below(4), 1 + below(3)];
            contents = contents.with_indices("keep", &[2], &keep);
        }
        Way::Snapshots => contents = contents.with_metadata("snapshots", "true"),
        Way::Prefill => {}
        Way::Deferred | Way::DeferredLayer => {
            // The second row flushes.
            let len = [below(most + 1 - tokens), most as i32];
            let base = [below(entries), below(entries)];
            contents = contents
                .with_indices("pending.len", &[2], &len)
                .with_indices("pending.base", &[2], &base);
        }
    }
    contents.with_indices("read_slots", &[2], &[2, 0])
}

/// Every kind of problem that [`random`] makes.
fn kinds() -> Vec<(bool, bool, Dtype, Way)> {
    let mut kinds = Vec::new();
    for kda in [false, true] {
        for state in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            for way in [
                Way::Resume,
                Way::ResumeOfLayer,
                Way::Snapshots,
                Way::Deferred,
                Way::DeferredLayer,
                Way::Prefill,
            ] {
                kinds.push((kda, false, state, way));
                // The parallel formulation has no f32 states, no state after each token, and deferred write-back only with bf16 states.
                let takes = match way {
                    Way::Resume | Way::ResumeOfLayer => state != Dtype::F32,
                    Way::Snapshots | Way::Prefill => false,
                    Way::Deferred | Way::DeferredLayer => state == Dtype::BF16,
                };
                kinds.extend(takes.then_some((kda, true, state, way)));
            }
        }
    }
    kinds
}

/// Adds the results of `run` as the file's expectations.
fn expecting(contents: Contents, folder: &tempfile::TempDir, backend: &str) -> Contents {
    let output = folder.path().join("out");
    run(
        &contents.write(folder, "in"),
        &output,
        &["--backend", backend],
    )
    .succeeds();
    let out = Contents::read(&output);
    out.tensors.keys().fold(contents, |contents, name| {
        let shape = &out.tensors[name].1;
        contents.with_floats(&format!("expected.{name}"), shape, &out.floats(name))
    })
}

/// Elements that no row writes keep their bits with the reference too: infinities, and the payload of a NaN.
#[test]
fn the_reference_leaves_what_no_row_writes() {
    let folder = folder();
    let fixture = Contents::fixture(POOL).without_expected();
    let (_, shape, mut data) = fixture.tensors["state"].clone();
    let slot = data.len() / shape[0];
    // In f16: an infinity, and a signalling NaN.
    let odd = [0x00, 0x7c, 0x05, 0x7d].repeat(slot / 4);
    data[..slot].copy_from_slice(&odd);
    let pool = fixture
        .with("state", Dtype::F16, &shape, data)
        .with_indices("read_slots", &[3], &[1, -1, 2]);
    let output = folder.path().join("out");
    let input = pool.write(&folder, "in");
    run(&input, &output, &["--backend", "reference"]).succeeds();
    let state = &Contents::read(&output).tensors["state"].2;
    assert!(state[..slot] == odd, "an untouched slot has changed");
    assert!(state[3 * slot..] == pool.tensors["state"].2[3 * slot..]);
}

/// One token of a layer with too many value heads for a decode kernel: a verify kernel with snapshots computes it.
#[test]
fn snapshots_are_part_of_what_is_asked_for() {
    let folder = folder();
    let mut random = Random(3);
    let tensors = [
        ("q", &[1, 1, 1, 96][..]),
        ("k", &[1, 1, 1, 96]),
        ("v", &[1, 1, 16, 192]),
        ("g", &[1, 1, 16]),
        ("beta", &[1, 1, 16]),
        ("state", &[1, 16, 96, 192]),
        ("z", &[1, 1, 16, 192]),
        ("norm_weight", &[192]),
    ];
    let mut contents = Contents::default();
    for (name, shape) in tensors {
        let values = random.floats(shape.iter().product(), [-0.5, 0.0]);
        contents = contents.with_floats(name, shape, &values);
    }
    let metadata = [
        ("op", "gdn_mtp"),
        ("state_layout", "v_last"),
        ("norm_eps", "1e-5"),
    ];
    for (key, value) in metadata {
        contents = contents.with_metadata(key, value);
    }
    let plain = contents.write(&folder, "in");
    check(&plain, &["--backend", "sim"]).refused("HV / H: wanted at most 15");
    let contents = contents.with_metadata("snapshots", "true");
    check(&contents.write(&folder, "in"), &["--backend", "sim"]).succeeds();
}

/// More than 16 tokens are a prefill, which keeps no state after each token.
#[test]
fn snapshots_of_a_prefill_are_refused() {
    let folder = folder();
    let tensors = [
        ("q", &[1, 17, 1, 64][..]),
        ("k", &[1, 17, 1, 64]),
        ("v", &[1, 17, 1, 64]),
        ("g", &[1, 17, 1]),
        ("beta", &[1, 17, 1]),
        ("state", &[1, 1, 64, 64]),
    ];
    let mut contents = Contents::default();
    for (name, shape) in tensors {
        contents = contents.with_floats(name, shape, &vec![0.0; shape.iter().product()]);
    }
    let contents = contents.with_metadata("op", "gdn_mtp");
    check(&contents.write(&folder, "in"), &["--backend", "sim"]).succeeds();
    let contents = contents.with_metadata("snapshots", "true");
    let refused = "T with snapshots: wanted at most 16, got 17";
    check(&contents.write(&folder, "in"), &["--backend", "sim"]).refused(refused);
}

/// New tokens of a resume, and of a step that flushes, start from the state as it is stored. Every fifth kind of problem is drawn once,
/// the same in every run. `GATED_DELTA_DEPTH` multiplies the problems and draws new ones.
#[test]
fn right_results_hold_whatever_the_state_is_rounded_to() {
    let folder = folder();
    let depth = std::env::var("GATED_DELTA_DEPTH").map_or(1, |depth| depth.parse().unwrap());
    let seconds = match depth {
        1 => 0,
        _ => std::time::UNIX_EPOCH.elapsed().unwrap().as_secs(),
    };
    for (i, kind) in kinds().into_iter().enumerate() {
        let (kda, parallel, state, way) = kind;
        let is_drawn = |case: &u64| (i as u64 + case + seconds).is_multiple_of(5);
        for case in (0..depth).filter(is_drawn) {
            let seed = seconds.wrapping_mul(1000) + case;
            println!("{kind:?}, seed {seed}");
            let contents = random(kda, parallel, state, way, seed);
            let file = contents.write(&folder, "in");
            let stdout = check(&file, &["--backend", "sim"]).succeeds().stdout;
            assert!(stdout.contains("value head"), "{stdout}");
            let file = expecting(contents, &folder, "reference").write(&folder, "expecting");
            check(&file, &["--backend", "sim"]).succeeds();
        }
    }
}

/// Small changes in one token of a head or one head of a slot fail, and the head is named.
#[test]
fn wrong_heads_fail() {
    let folder = folder();
    let kinds = [
        (false, true, Dtype::BF16, Way::Deferred),
        (true, false, Dtype::BF16, Way::Snapshots),
        (false, false, Dtype::F16, Way::ResumeOfLayer),
        (false, true, Dtype::BF16, Way::ResumeOfLayer),
        (false, false, Dtype::F32, Way::Prefill),
        (true, false, Dtype::F32, Way::Prefill),
    ];
    for (kda, parallel, state, way) in kinds {
        let right = random(kda, parallel, state, way, 7);
        check(&right.write(&folder, "right"), &["--backend", "sim"]).succeeds();
        let contents = expecting(right, &folder, "sim");
        let [_, tokens, _, dim] = contents.tensors["expected.o"].1[..] else {
            panic!("o has four dims")
        };
        let token = ((tokens + 1) * 2 + 1) * dim;
        let slot = dim * dim;
        for (name, head, len, said) in [
            ("expected.o", token, dim, "row 1, token 1, value head 1"),
            ("expected.state", slot, slot, "slot 0, value head 1"),
            (
                "expected.snapshots",
                token * dim,
                slot,
                "row 1, token 1, value head 1",
            ),
            (
                "expected.pending.updates",
                dim * 20,
                dim * 20,
                "slot 0, value head 1, entry",
            ),
        ] {
            let Some((_, shape, _)) = contents.tensors.get(name) else {
                continue;
            };
            let mut values = contents.floats(name);
            let of_head = &mut values[head..head + len];
            of_head.iter_mut().for_each(|x| *x *= 1.02);
            let wrong = contents.clone().with_floats(name, shape, &values);
            let said = format!("above tolerance at {said}");
            check(&wrong.write(&folder, "wrong"), &["--backend", "sim"]).fails_the_check(&said);
        }
    }
}

/// A prefill of one head, K = V = 64, with the same gates in each token.
fn prompt(k: &[f32], v: &[f32], [g, beta]: [f32; 2]) -> Contents {
    let q = Random(9).floats(k.len(), [-1.0, 1.0]);
    let tokens = k.len() / 64;
    let of_tokens = [1, tokens, 1, 64];
    Contents::default()
        .with_metadata("op", "gdn_prefill")
        .with_floats("q", &of_tokens, &q)
        .with_floats("k", &of_tokens, k)
        .with_floats("v", &of_tokens, v)
        .with_floats("g", &[1, tokens, 1], &vec![g; tokens])
        .with_floats("beta", &[1, tokens, 1], &vec![beta; tokens])
        .with_floats("state", &[1, 1, 64, 64], &[0.0; 4096])
}

/// A large v loosens the bounds of a prefill only as long as it has not decayed.
#[test]
fn what_has_decayed_hides_nothing() {
    let folder = folder();
    let [k, mut v] = [3, 4].map(|seed| Random(seed).floats(130 * 64, [-1.0, 1.0]));
    v[..64].iter_mut().for_each(|v| *v *= 1e3);
    let right = prompt(&k, &v, [-0.5, 0.5]);
    let expected = expecting(right, &folder, "sim");
    let mut o = expected.floats("expected.o");
    o[128 * 64..129 * 64].iter_mut().for_each(|o| *o *= 1.05);
    let wrong = expected.with_floats("expected.o", &[1, 130, 1, 64], &o);
    check(&wrong.write(&folder, "wrong"), &["--backend", "sim"])
        .fails_the_check("above tolerance at row 0, token 128");
}

/// Keys that resemble each other, one v and β near 2: the tokens' contributions cancel, and the roundings of T and R do not.
#[test]
fn roundings_of_what_cancels_are_allowed() {
    let folder = folder();
    let k: Vec<f32> = Random(3).floats(130 * 64, [-0.5, 1.0]);
    let k: Vec<f32> = k.iter().map(|k| k.max(0.0) + 0.2).collect();
    let v = Random(13).floats(64, [-1.0, 1.0]).repeat(130);
    let right = prompt(&k, &v, [0.0, 1.9]);
    check(&right.write(&folder, "right"), &["--backend", "sim"]).succeeds();
}

/// A key that comes again with v = 0 leaves nothing of the state but the rounding errors of its terms. The bounds on such a small state
/// come from these terms.
#[test]
fn what_has_cancelled_is_held_to_what_it_was_made_of() {
    let folder = folder();
    let mut random = Random(5);
    let [q, k, v] = [(); 3].map(|()| random.floats(64, [-1.0, 1.0]));
    let length = k.iter().map(|k| k * k).sum::<f32>().sqrt();
    let state: Vec<f32> = v
        .iter()
        .flat_map(|v| k.iter().map(move |k| v * k / length))
        .collect();
    for (op, [of_o, of_state]) in [("gdn_decode", [1e-5, 1e-4]), ("gdn_prefill", [1e-2, 1e-1])] {
        let contents = prompt(&k, &[0.0; 64], [0.0, 1.0])
            .with_metadata("op", op)
            .with_floats("q", &[1, 1, 1, 64], &q)
            .with_floats("state", &[1, 1, 64, 64], &state);
        check(&contents.write(&folder, "in"), &["--backend", "sim"]).succeeds();
        let expected = expecting(contents, &folder, "reference");
        check(&expected.write(&folder, "in"), &["--backend", "sim"]).succeeds();
        for (name, off) in [("expected.o", of_o), ("expected.state", of_state)] {
            let value = expected.floats(name)[3] + off;
            let wrong = expected.clone().with_float_at(name, 3, value);
            check(&wrong.write(&folder, "in"), &["--backend", "sim"])
                .fails_the_check("above tolerance at");
        }
    }
}
