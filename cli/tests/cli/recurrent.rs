//! Tests of GDN MTP and recurrent KDA with every way of keeping states and every form of gates, compared with the reference.

use std::collections::HashMap;

use crate::command::{Contents, check, folder, run};
use safetensors::tensor::Dtype;
use tempfile::TempDir;

const MTP: &str = "gdn_mtp_bf16_snapshots";
const KDA: &str = "kda_recurrent_bf16_softplus";
const KDA_BOUND: &str = "kda_recurrent_bf16_lower_bound_d64";

/// B = 2, T = 4, H = 1, HV = 2, P = 2, states updated.
pub fn mtp() -> Contents {
    Contents::fixture(MTP)
        .without_expected()
        .with_metadata("snapshots", "false")
        .with_metadata("update_state", "true")
}

/// B = 2, T = 1, H = HV = 2, P = 3.
pub fn kda() -> Contents {
    Contents::fixture(KDA).without_expected()
}

/// Repeats the pool `times` times.
fn larger_pool(contents: Contents, times: usize) -> Contents {
    let (dtype, mut shape, data) = contents.tensors["state"].clone();
    shape[0] *= times;
    contents.with("state", dtype, &shape, data.repeat(times))
}

/// Two packed rows of four tokens, with the bounds `bounds`.
pub fn packed(contents: Contents, bounds: &[i32]) -> Contents {
    let contents = contents.with_indices("cu_seqlens", &[bounds.len()], bounds);
    ["q", "k", "v", "a", "b"]
        .iter()
        .fold(contents, |contents, name| {
            let mut shape = contents.tensors[*name].1.clone();
            (shape[0], shape[1]) = (1, shape[0] * shape[1]);
            contents.reshaped(name, &shape)
        })
}

/// Adds the file's own tokens as the previous ones.
fn with_previous(contents: Contents, names: &[&str], keep: &[i32]) -> Contents {
    let previous =
        |contents: Contents, name: &&str| contents.with_copy(&format!("prev.{name}"), name);
    names
        .iter()
        .fold(contents, previous)
        .with_indices("keep", &[keep.len()], keep)
}

/// Converts q to f32.
fn wide_q(contents: Contents) -> Contents {
    let (shape, q) = (contents.tensors["q"].1.clone(), contents.floats("q"));
    contents.with_floats("q", &shape, &q)
}

pub fn resume(keep: &[i32]) -> Contents {
    with_previous(mtp(), &["k", "v", "a", "b"], keep)
}

pub fn commit(keep: &[i32]) -> Contents {
    resume(keep).without(&["q", "k", "v", "a", "b"])
}

/// Runs the file in the simulator. Returns the results, and the lines of its check against the reference.
fn judged(folder: &TempDir, case: &str, contents: &Contents) -> (Contents, String) {
    let input = contents.write(folder, "in");
    let stdout = check(&input, &["--backend", "sim"]).succeeds().stdout;
    assert!(stdout.contains(" reference "), "{case}: {stdout}");
    let output = folder.path().join("out");
    run(&input, &output, &["--backend", "sim"]).succeeds();
    let out = Contents::read(&output);
    expected_by_both(folder, case, contents, &out);
    (out, stdout)
}

/// Checks that both backends accept the results of `run` as expectations.
fn expected_by_both(folder: &TempDir, case: &str, contents: &Contents, out: &Contents) {
    let both = out.tensors.keys().fold(contents.clone(), |both, name| {
        let shape = &out.tensors[name].1;
        both.with_floats(&format!("expected.{name}"), shape, &out.floats(name))
    });
    let both = both.write(folder, "both");
    for backend in ["sim", "reference"] {
        let stdout = check(&both, &["--backend", backend]).succeeds().stdout;
        assert!(!stdout.contains(" reference "), "{case}: {stdout}");
    }
}

#[test]
fn every_way_of_keeping_states_meets_the_reference() {
    let folder = folder();
    let slots = |contents: Contents| {
        larger_pool(contents, 4)
            .with_indices("token_slots", &[2, 4], &[0, 1, -1, 3, 4, 5, 6, 99])
            .with_indices("accepted", &[2], &[2, 3])
    };
    let cases = [
        ("in place", mtp(), &["o", "state"][..]),
        (
            "read only",
            mtp().with_metadata("update_state", "false"),
            &["o", "state"],
        ),
        (
            "snapshots",
            mtp().with_metadata("snapshots", "true"),
            &["o", "snapshots", "state"],
        ),
        (
            "moved",
            larger_pool(mtp(), 2)
                .with_indices("read_slots", &[2], &[3, 0])
                .with_indices("write_slots", &[2], &[1, 0]),
            &["o", "state"],
        ),
        ("token slots", slots(mtp()), &["o", "state"]),
        (
            "token slots and snapshots",
            slots(mtp())
                .without(&["accepted"])
                .with_metadata("snapshots", "true"),
            &["o", "snapshots", "state"],
        ),
        ("packed", packed(mtp(), &[0, 3, 8]), &["o", "state"]),
        (
            "an empty row",
            packed(larger_pool(mtp(), 2), &[0, 3, 3, 8])
                .with_metadata("max_tokens", "6")
                .with_metadata("snapshots", "true"),
            &["o", "snapshots", "state"],
        ),
        ("resume", resume(&[3, 0]), &["o", "state"]),
        (
            "resume, a wider q",
            wide_q(resume(&[3, 4])),
            &["o", "state"],
        ),
        (
            "resume, v last",
            resume(&[4, 1]).with_metadata("state_layout", "v_last"),
            &["o", "state"],
        ),
        (
            "commit, v last",
            commit(&[1, 4]).with_metadata("state_layout", "v_last"),
            &["state"],
        ),
        (
            "resume, packed",
            packed(resume(&[1, 4]), &[0, 1, 8]),
            &["o", "state"],
        ),
        (
            "commit",
            commit(&[4, 2]).with_metadata("qk_l2norm", "true"),
            &["state"],
        ),
        (
            "tiled, not normalised, scaled",
            mtp()
                .with_metadata("head_map", "tiled")
                .with_metadata("formulation", "recurrent")
                .with_metadata("scale", "0.01")
                .with_metadata("beta_scale", "2"),
            &["o", "state"],
        ),
    ];
    for (case, contents, outputs) in cases {
        let (out, _) = judged(&folder, case, &contents);
        let written: Vec<_> = out.tensors.keys().collect();
        assert_eq!(written, outputs, "{case}");
        assert_eq!(
            out.tensors["state"].2 == contents.tensors["state"].2,
            case == "read only",
            "{case}"
        );
    }
}

#[test]
fn rows_that_touch_nothing_leave_everything_but_o_as_it_was() {
    let folder = folder();
    let no_row = packed(mtp(), &[0, 3, 3]).with_metadata("snapshots", "true");
    let (out, stdout) = judged(&folder, "tokens of no row", &no_row);
    for line in ["snapshots, other steps", "state, other slots"] {
        assert!(stdout.contains(line), "{line} in {stdout}");
    }
    let token = 2 * 128;
    let o = out.floats("o");
    assert!(o[..3 * token].iter().all(|o| o.is_finite()));
    assert!(o[3 * token..].iter().all(|o| *o == 0.0));

    let (out, _) = judged(&folder, "keep out of range", &resume(&[5, -1]));
    assert!(out.floats("o").iter().all(|o| *o == 0.0));
    assert!(out.tensors["state"].2 == mtp().tensors["state"].2);
    let input = resume(&[5, 1]).write(&folder, "one");
    let output = folder.path().join("one.out");
    run(&input, &output, &["--backend", "sim"]).succeeds();
    let (before, after) = (mtp(), Contents::read(&output));
    let slots = |contents: &Contents| {
        let state = &contents.tensors["state"].2;
        let (first, second) = state.split_at(state.len() / 2);
        (first.to_vec(), second.to_vec())
    };
    let (before, after) = (slots(&before), slots(&after));
    assert!(before.0 == after.0 && before.1 != after.1);
}

#[test]
fn a_resume_is_a_commit_and_a_verify() {
    let folder = folder();
    let sim = ["--backend", "sim"];
    let written = |contents: &Contents, name: &str| {
        let output = folder.path().join(name).with_extension("out");
        run(&contents.write(&folder, name), &output, &sim).succeeds();
        Contents::read(&output)
    };
    let resumed = written(&resume(&[2, 4]), "resume");
    let committed = written(&commit(&[2, 4]), "commit");
    let (dtype, shape, data) = committed.tensors["state"].clone();
    let verify = mtp()
        .with("state", dtype, &shape, data)
        .with_metadata("update_state", "false");
    let verified = written(&verify, "verify");
    assert!(resumed.tensors["state"].2 == committed.tensors["state"].2);
    assert!(resumed.tensors["o"].2 == verified.tensors["o"].2);
}

#[test]
fn every_gate_meets_the_reference() {
    let folder = folder();
    let log = |contents: Contents| {
        let g: Vec<f32> = contents.floats("g").iter().map(|g| -g.abs()).collect();
        let shape = contents.tensors["g"].1.clone();
        contents
            .without(&["A_log", "dt_bias"])
            .with_floats("g", &shape, &g)
            .with_metadata("gate", "log")
    };
    let bounded = || Contents::fixture(KDA_BOUND).without_expected();
    let given = |contents: Contents| {
        let (dtype, shape, data) = contents.tensors["b"].clone();
        let minus_one = half::bf16::from_f32(-1.0).to_le_bytes();
        contents
            .without(&["a", "b", "A_log", "dt_bias"])
            .with("g", dtype, &shape, minus_one.repeat(data.len() / 2))
            .with("beta", dtype, &shape, data)
    };
    let cases = [
        ("GDN, given", given(mtp())),
        (
            "GDN, given, resume",
            with_previous(given(mtp()), &["k", "v", "g", "beta"], &[1, 3]),
        ),
        ("KDA, log", log(kda())),
        ("KDA, softplus", kda()),
        ("KDA, softplus without dt_bias", kda().without(&["dt_bias"])),
        ("KDA, logit of beta", kda().with_metadata("beta", "sigmoid")),
        ("KDA, lower bound", bounded()),
        (
            "KDA, lower bound alone",
            bounded()
                .without(&["A_log", "dt_bias"])
                .with_metadata("lower_bound", "-2.5"),
        ),
        (
            "KDA, resume",
            with_previous(kda(), &["k", "v", "g", "beta"], &[1, 0]),
        ),
        (
            "KDA, commit",
            with_previous(kda(), &["k", "v", "g", "beta"], &[1, 1])
                .without(&["q", "k", "v", "g", "beta"]),
        ),
        (
            "KDA, a state per token",
            kda()
                .without(&["read_slots"])
                .with_indices("token_slots", &[2, 1], &[2, 0])
                .with_metadata("snapshots", "true"),
        ),
    ];
    let mut states = HashMap::new();
    for (case, contents) in cases {
        let (out, _) = judged(&folder, case, &contents);
        states.insert(case, out.tensors["state"].2.clone());
    }
    let softplus = states.remove("KDA, softplus").unwrap();
    for same in ["KDA, commit", "KDA, a state per token"] {
        assert!(states.remove(same).unwrap() == softplus, "{same}");
    }
    let mut others: Vec<_> = states.into_values().chain([softplus]).collect();
    let count = others.len();
    others.sort();
    others.dedup();
    assert_eq!(others.len(), count, "two gates that are to differ");
}

#[test]
fn wrong_snapshots_fail() {
    let folder = folder();
    let fixture = || Contents::fixture(MTP);
    let sim = ["--backend", "sim"];
    let wrong = fixture().with_float_at("expected.snapshots", 3 * 128, 1e3);
    check(&wrong.write(&folder, "value"), &sim).fails_the_check("above tolerance");
    let wrong = fixture().with_float_at("expected.state", 5, 1e3);
    check(&wrong.write(&folder, "slot"), &sim).fails_the_check("slot 0 is to change");
    let wrong = fixture().with_float_at("expected.o", 1000, 1e3);
    check(&wrong.write(&folder, "o"), &sim).fails_the_check("above tolerance");
}

#[test]
fn indices_of_every_type_are_the_same() {
    let folder = folder();
    let written = |dtype: Dtype, data: Vec<u8>| {
        let contents = mtp().with("read_slots", dtype, &[2], data);
        let output = folder.path().join("out");
        run(
            &contents.write(&folder, "in"),
            &output,
            &["--backend", "sim"],
        )
        .succeeds();
        Contents::read(&output).tensors
    };
    let bytes = |index: &dyn Fn(u8) -> Vec<u8>| [index(1), index(0)].concat();
    let i32s = written(Dtype::I32, bytes(&|i| i32::from(i).to_le_bytes().into()));
    let i64s = written(Dtype::I64, bytes(&|i| i64::from(i).to_le_bytes().into()));
    let u32s = written(Dtype::U32, bytes(&|i| u32::from(i).to_le_bytes().into()));
    assert!(i32s == i64s && i32s == u32s);
}
