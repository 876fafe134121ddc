//! Tests of GDN MTP and recurrent KDA with unusable inputs: the cause is named, and nothing is written.

use crate::command::{Contents, check, folder, run};
use crate::recurrent::{commit, kda, mtp, packed, resume};
use safetensors::tensor::Dtype;

/// Asserts that every case is refused with a line that contains its text.
fn refused(cases: impl IntoIterator<Item = (&'static str, Contents)>) {
    let folder = folder();
    for (part, contents) in cases {
        check(&contents.write(&folder, "in"), &["--backend", "sim"]).refused(part);
    }
}

#[test]
fn keys_that_are_unknown_or_contradict() {
    refused([
        (
            "formulation: wanted auto, recurrent or parallel, got \"fast\"",
            mtp().with_metadata("formulation", "fast"),
        ),
        (
            "formulation = parallel and token_slots exclude each other",
            mtp().with_metadata("formulation", "parallel").with_indices(
                "token_slots",
                &[2, 4],
                &[0, -1, -1, -1, 1, -1, -1, -1],
            ),
        ),
        (
            "max_tokens: wanted a number of tokens, 1 or more, got \"0\"",
            packed(mtp(), &[0, 3, 8]).with_metadata("max_tokens", "0"),
        ),
        (
            "max_tokens: wanted none without cu_seqlens",
            mtp().with_metadata("max_tokens", "4"),
        ),
        (
            "beta: gdn_mtp takes none, kda_recurrent or kda_prefill does",
            mtp().with_metadata("beta", "given"),
        ),
        (
            "beta: wanted given or sigmoid, got \"logit\"",
            kda().with_metadata("beta", "logit"),
        ),
        (
            "beta_scale: kda_recurrent takes none, gdn_decode or gdn_mtp or gdn_prefill does",
            kda().with_metadata("beta_scale", "2"),
        ),
        (
            "gate: wanted log, softplus or lower_bound, got \"raw\"",
            kda().with_metadata("gate", "raw"),
        ),
        (
            "gate: wanted log, softplus or lower_bound, got none",
            kda().without_metadata("gate"),
        ),
        (
            "lower_bound: wanted a number below 0 with gate = lower_bound, got none",
            kda().with_metadata("gate", "lower_bound"),
        ),
        (
            "lower_bound: wanted none without gate = lower_bound, got -5",
            kda().with_metadata("lower_bound", "-5"),
        ),
        (
            "lower_bound: wanted a finite number below 0, got 5",
            kda()
                .with_metadata("gate", "lower_bound")
                .with_metadata("lower_bound", "5"),
        ),
        (
            "gate = log and A_log exclude each other",
            kda().with_metadata("gate", "log"),
        ),
        (
            "A_log is missing: softplus gates need it",
            kda().without(&["A_log"]),
        ),
        (
            "beta is missing: all KDA launches",
            kda().without(&["beta"]),
        ),
    ]);
}

#[test]
fn tensors_that_contradict() {
    let slots = |contents: Contents| {
        contents.with_indices("token_slots", &[2, 4], &[0, -1, -1, -1, 1, -1, -1, -1])
    };
    let with_slots = |name: &str| mtp().with_indices(name, &[2], &[0, 1]);
    refused([
        (
            "token_slots and read_slots exclude each other",
            slots(with_slots("read_slots")),
        ),
        (
            "token_slots and write_slots exclude each other",
            slots(with_slots("write_slots")),
        ),
        (
            "token_slots and prev.k exclude each other",
            slots(resume(&[1, 1])),
        ),
        (
            "token_slots and update_state = false exclude each other",
            slots(mtp()).with_metadata("update_state", "false"),
        ),
        (
            "token_slots is missing: accepted tokens need it",
            with_slots("accepted"),
        ),
        (
            "prev.k and snapshots exclude each other",
            resume(&[1, 1]).with_metadata("snapshots", "true"),
        ),
        (
            "prev.k and update_state = false exclude each other",
            resume(&[1, 1]).with_metadata("update_state", "false"),
        ),
        (
            "a commit and update_state = false exclude each other",
            commit(&[1, 1]).with_metadata("update_state", "false"),
        ),
        (
            "a commit and snapshots exclude each other",
            commit(&[1, 1]).with_metadata("snapshots", "true"),
        ),
        (
            "a commit and k exclude each other",
            resume(&[1, 1]).without(&["q"]),
        ),
        (
            "a commit and cu_seqlens exclude each other",
            commit(&[1, 1]).with_indices("cu_seqlens", &[3], &[0, 4, 8]),
        ),
        (
            "update_state = false and write_slots exclude each other",
            with_slots("write_slots").with_metadata("update_state", "false"),
        ),
        (
            "g, beta and a exclude each other",
            resume(&[1, 1]).with_copy("prev.g", "prev.a"),
        ),
        (
            "tensor a: kda_recurrent takes none",
            kda().with_copy("a", "beta"),
        ),
        (
            "tensor prev.a: kda_recurrent takes none",
            kda().with_copy("prev.a", "beta"),
        ),
        (
            "tensor expected.snapshots: wanted none, since the file asks for no such result",
            Contents::fixture("gdn_mtp_bf16_snapshots").with_metadata("snapshots", "false"),
        ),
        (
            "tensor expected.o: wanted none, since the file asks for no such result",
            commit(&[1, 1]).with_floats("expected.o", &[1], &[0.0]),
        ),
    ]);
}

#[test]
fn rows_of_bad_bounds() {
    let folder = folder();
    let cases = [
        ("cu_seqlens[0]: wanted 0, got 2", packed(mtp(), &[2, 4, 8])),
        (
            "cu_seqlens[0]: wanted 0, got -1",
            packed(mtp(), &[-1, 3, 8]),
        ),
        (
            "cu_seqlens[3]: wanted 4..=8 (no less than the bound before, at most T = 4 more, within total = 8), got 99",
            packed(four_slots(), &[0, 4, 4, 99]),
        ),
        (
            "cu_seqlens[2]: wanted 5..=8",
            packed(four_slots(), &[0, 5, 3, 8]),
        ),
        (
            "cu_seqlens[2]: wanted 3..=7",
            packed(mtp(), &[0, 3, 8]).with_metadata("max_tokens", "4"),
        ),
    ];
    let output = folder.path().join("out");
    for (part, contents) in cases {
        let input = contents.write(&folder, "in");
        for backend in ["sim", "reference"] {
            check(&input, &["--backend", backend]).refused(part);
            run(&input, &output, &["--backend", backend]).refused(part);
        }
    }
    assert!(!output.exists());
}

/// The file of [`mtp`] with a pool of four slots.
fn four_slots() -> Contents {
    let (dtype, mut shape, data) = mtp().tensors["state"].clone();
    shape[0] *= 2;
    mtp().with("state", dtype, &shape, data.repeat(2))
}

#[test]
fn tensors_that_are_missing_or_of_other_shapes() {
    let cases = [
        (
            "q is missing: all GDN MTP verifies need it",
            mtp().without(&["q"]),
        ),
        (
            "keep is missing: previous tokens need it",
            resume(&[1, 1]).without(&["keep"]),
        ),
        (
            "prev.k is missing: previous tokens need it",
            resume(&[1, 1]).without(&["prev.k"]),
        ),
        (
            "prev.b is missing: previous tokens need it",
            commit(&[1, 1]).without(&["prev.b"]),
        ),
        (
            "dt_bias is missing: raw gates need it",
            commit(&[1, 1]).without(&["dt_bias"]),
        ),
        (
            "prev.v: wanted shape [B, T', HV, V] = [2, 4, 2, 128], got [4, 2, 2, 128]",
            resume(&[1, 1]).reshaped("prev.v", &[4, 2, 2, 128]),
        ),
        (
            "prev.v: wanted shape",
            commit(&[1, 1]).reshaped("prev.v", &[4, 2, 2, 128]),
        ),
        (
            "prev.a: wanted shape",
            commit(&[1, 1]).reshaped("prev.a", &[2, 8]),
        ),
        ("keep: wanted shape [B] = [2], got [3]", commit(&[1, 1, 1])),
        (
            "keep: wanted i32, i64 or u32, got f32",
            commit(&[1, 1]).with_floats("keep", &[2], &[1.0, 1.0]),
        ),
        (
            "prev.k: wanted the dtype of k, got f32",
            resume(&[1, 1]).with_floats("prev.k", &[2, 4, 1, 128], &[0.5; 1024]),
        ),
        (
            "token_slots: wanted shape [B, T] = [2, 4]",
            mtp().with_indices("token_slots", &[8], &[0; 8]),
        ),
        (
            "cu_seqlens: wanted shape [B + 1]",
            packed(mtp(), &[0, 3, 8]).reshaped("cu_seqlens", &[1, 3]),
        ),
        (
            "q: wanted shape [1, total, H, K]",
            packed(mtp(), &[0, 3, 8]).reshaped("q", &[8, 128]),
        ),
        (
            "k: wanted shape [1, total, H, K] = [1, 8, 1, 128], got [2, 4, 1, 128]",
            packed(mtp(), &[0, 3, 8]).reshaped("k", &[2, 4, 1, 128]),
        ),
        (
            "T = 32 is not supported: 1 to 16",
            tokens(32, mtp()).with_metadata("formulation", "recurrent"),
        ),
        (
            "tokens of the longest row of cu_seqlens = 31 is not supported: 1 to 16",
            packed(tokens(32, mtp()), &[0, 31, 32]).with_metadata("formulation", "recurrent"),
        ),
        (
            "T above 16 and prev.k exclude each other",
            tokens(32, resume(&[1])),
        ),
        (
            "row 0 writes slot 1 of state after token 1, and row 1 writes slot 1 of state",
            mtp().with_indices("token_slots", &[2, 4], &[0, 1, -1, -1, 1, -1, -1, -1]),
        ),
        (
            "row 0 reads slot 0 of state, and row 1 writes slot 0 of state",
            mtp().with_indices("write_slots", &[2], &[1, 0]),
        ),
        (
            "g: wanted shape [B, T, HV, K] = [2, 1, 2, 128], got [2, 1, 2]",
            kda().with_copy("g", "beta"),
        ),
        ("dt_bias: wanted shape", kda().reshaped("dt_bias", &[256])),
        (
            "A_log: wanted f32, got bf16",
            kda().with("A_log", Dtype::BF16, &[2], vec![0; 4]),
        ),
        (
            "elements of cu_seqlens: wanted B + 1, at least 1, got 0",
            packed(mtp(), &[]),
        ),
    ];
    refused(cases);
}

/// A file that names no operator with more than 16 tokens is a prefill, dense or packed.
#[test]
fn more_than_16_tokens_are_a_prefill() {
    let folder = folder();
    for contents in [tokens(32, mtp()), packed(tokens(32, mtp()), &[0, 31, 32])] {
        let stdout = check(&contents.write(&folder, "in"), &["--backend", "sim"])
            .succeeds()
            .stdout;
        assert!(stdout.contains("variant: gdn_prefill_short_"), "{stdout}");
    }
}

/// The file with B = 1 and `count` tokens, which repeat.
fn tokens(count: usize, contents: Contents) -> Contents {
    ["q", "k", "v", "a", "b"]
        .iter()
        .fold(contents, |contents, name| {
            let (dtype, mut shape, data) = contents.tensors[*name].clone();
            let times = count / (shape[0] * shape[1]);
            (shape[0], shape[1]) = (1, count);
            contents.with(name, dtype, &shape, data.repeat(times))
        })
}
