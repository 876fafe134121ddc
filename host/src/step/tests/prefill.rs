//! Tests of prefills: options refused by name, compiled constants, and the parameter of a launch.

use super::refused::refused;
use super::*;

fn chunked() -> Options {
    Options::default().formulation(Formulation::Chunked)
}

/// A dense prefill with B = 2, T tokens, H = 2, HV = 4, K = V = 64, P = 5.
pub(super) fn dense(tokens: usize) -> Gdn<'static> {
    let (qk, v) = (
        tensor(Bf16, &[2, tokens, 2, 64]),
        tensor(Bf16, &[2, tokens, 4, 64]),
    );
    let gate = tensor(F32, &[2, tokens, 4]);
    Gdn::new(
        Inputs::qkv(qk, qk, v),
        GdnGates::given(gate, gate),
        v,
        States::update(pool()),
    )
    .options(chunked())
}

/// Three packed rows of at most `most` tokens, `total` tokens in all.
pub(super) fn of_total(total: usize, most: usize) -> Gdn<'static> {
    let of_heads = |heads| tensor(Bf16, &[1, total, heads, 64]);
    let gate = tensor(F32, &[1, total, 4]);
    Gdn::new(
        Inputs::qkv(of_heads(2), of_heads(2), of_heads(4)),
        GdnGates::given(gate, gate),
        of_heads(4),
        States::update(pool()),
    )
    .packed(tensor(I32, &[4]), most)
    .options(chunked())
}

/// A prefill with all options.
pub(super) fn full() -> Gdn<'static> {
    dense(300)
        .positions(tensor(I64, &[2]))
        .checkpoints(128, strided(U32, &[2, 3], &[7, 1]))
        .workspace(tensor(F32, &[1 << 20]))
        .fresh(tensor(I32, &[2]))
}

/// A packed prefill of a projection, with all options and a norm.
pub(super) fn layer() -> Gdn<'static> {
    let (x, windows) = (tensor(Bf16, &[1, 300, 512]), tensor(Bf16, &[5, 512, 3]));
    let conv = Convolution::new(x, 2, tensor(Bf16, &[512, 4]), windows);
    let mut step = of_total(300, 300).positions(tensor(I32, &[3]));
    step.inputs = Inputs::conv(conv);
    step.norm(Norm::new(
        tensor(Bf16, &[1, 300, 4, 64]),
        tensor(F32, &[64]),
        1e-6,
    ))
}

#[test]
fn any_number_of_tokens_is_taken() {
    for tokens in [0, 1, 2, 16, 17, 64, 65, 4096, 1 << 20] {
        dense(tokens).request().check().unwrap();
        of_total(tokens, tokens).request().check().unwrap();
    }
    full().request().check().unwrap();
    layer().request().check().unwrap();
}

/// One prewarm serves every T, total and promise, because the constants are the same.
#[test]
fn nothing_that_is_compiled_varies_with_lengths() {
    let problem = |work: &dyn Work| work.request().check().unwrap();
    let with_slots = |step: Gdn<'static>, of_row| {
        step.checkpoints(64, tensor(I32, &[2, of_row]))
            .positions(tensor(I32, &[2]))
    };
    let first = problem(&dense(1));
    for tokens in [0, 2, 64, 65, 300, 4096] {
        assert_eq!(problem(&dense(tokens)), first, "T = {tokens}");
        let [one, other] = [1, tokens].map(|tokens| problem(&with_slots(dense(tokens), tokens)));
        assert_eq!(one, other, "T = C = {tokens}");
    }
    let first = problem(&of_total(1, 1));
    for total in [0, 2, 64, 65, 300, 4096] {
        for most in [1, 64, 65, usize::MAX] {
            assert_eq!(problem(&of_total(total, most)), first, "{total}, {most}");
        }
    }
    let c = problem(&full()).constants;
    assert_eq!((c.tokens, c.previous_tokens, c.update_state), (0, 0, 1));
    assert_eq!(
        [c.q_row, c.k_row, c.v_row, c.o_row, c.g_row, c.b_row],
        [0; 6]
    );
    assert_eq!((c.q_token, c.v_token, c.g_token), (128, 256, 4));
    assert_eq!(
        (c.positions_index, c.checkpoint_index, c.checkpoint_every),
        (2, 3, 128)
    );
    // A view whose tokens are not aligned counts as narrow for any T, although a single token would not show the misalignment.
    let narrow = |tokens| {
        let mut step = dense(tokens);
        *qkv(&mut step)[0] = strided(Bf16, &[2, tokens, 2, 64], &[4096, 129, 64, 1]);
        problem(&step)
    };
    assert_eq!(narrow(1), narrow(2));
    assert_eq!(narrow(1).constants.wide_io, 0);
}

#[test]
fn everything_of_a_prefill_arrives() {
    let params = |step: &Gdn<'_>| step.request().prefill_params();
    let step = full();
    let p = params(&step);
    assert_eq!((p.rows, p.tokens, p.checkpoints), (2, 300, 3));
    assert_eq!(p.checkpoint_slots_row, 7);
    assert_eq!((p.q_row, p.k_row), (300 * 128, 300 * 128));
    assert_eq!((p.v_row, p.o_row), (300 * 256, 300 * 256));
    assert_eq!((p.g_row, p.b_row, p.x_row, p.z_row), (1200, 1200, 0, 0));
    let step = Gdn {
        positions: Some(at(0x2_0000, I32, &[2])),
        workspace: Some(at(0x3_0000, F32, &[1 << 20])),
        ..step.checkpoints(64, at(0x4_0000, I32, &[2, 1]))
    };
    let p = params(&step);
    assert_eq!(
        (p.positions, p.workspace, p.checkpoint_slots),
        (0x2_0000, 0x3_0000, 0x4_0000)
    );
    let p = params(&layer());
    assert_eq!(
        (p.rows, p.tokens, p.layer.step.total_tokens),
        (3, u32::MAX, 300)
    );
    for (most, tokens) in [(1, 64), (64, 64), (65, u32::MAX), (usize::MAX, u32::MAX)] {
        assert_eq!(params(&of_total(300, most)).tokens, tokens, "{most}");
    }
    assert_eq!(
        [p.x_row, p.z_row, p.o_row, p.g_row, p.q_row],
        [0; 5],
        "packed rows"
    );
    assert_eq!((p.layer.step.q, p.layer.x), (0, 0x1_0000));
    let mut step = dense(5);
    step.inputs = Inputs::conv(Convolution::new(
        strided(Bf16, &[2, 5, 512], &[9000, 600, 1]),
        2,
        tensor(Bf16, &[512, 4]),
        tensor(Bf16, &[5, 512, 3]),
    ));
    assert_eq!(params(&step).x_row, 9000);
    // A step that is no prefill has zeros in these fields.
    let p = gdn().request().prefill_params();
    assert_eq!((p.rows, p.tokens, p.q_row, p.workspace), (0, 0, 0, 0));
}

#[test]
fn rows_are_short_by_t_by_total_or_by_promise() {
    let are_short = |step: &Gdn<'_>| {
        let request = step.request();
        request.lengths().are_short()
    };
    for (step, short) in [
        (dense(0), true),
        (dense(64), true),
        (dense(65), false),
        (of_total(64, 1000), true),
        (of_total(65, 1000), false),
        (of_total(65, 65), false),
        (of_total(4096, 64), true),
        (of_total(4096, 1), true),
    ] {
        assert_eq!(are_short(&step), short, "{:?}", step.packed);
    }
}

#[test]
fn what_a_prefill_is_not_for_is_refused_by_name() {
    let both = |other| ["formulation = chunked", other, "exclude each other"];
    for (other, change) in [
        (
            "snapshots",
            (|args| args.snapshots = Some(snapshots())) as fn(&mut Gdn<'static>),
        ),
        ("token_slots", |args| {
            args.states = States::per_token(pool(), tensor(I32, &[2, 300])).into();
        }),
        ("read-only states", |args| {
            args.states = States::read_only(pool()).into();
        }),
        ("previous", |args| {
            let (gate, stored) = (tensor(F32, &[2, 5, 4]), previous().stored);
            args.previous = Some(Previous::new(stored, gate, gate, tensor(I64, &[2])));
        }),
    ] {
        refused(full(), change, &both(other));
    }
    refused(
        commit(),
        |args| args.options.formulation = Formulation::Chunked,
        &both("a commit"),
    );
}

#[test]
fn what_is_of_a_prefill_alone_is_refused_elsewhere() {
    let why = "they are of a prefill";
    for (formulation, name) in [
        (Formulation::Recurrent, "formulation = recurrent"),
        (Formulation::Parallel, "formulation = parallel"),
    ] {
        let step = || gdn().options(Options::default().formulation(formulation));
        refused(
            step(),
            |args| args.positions = Some(tensor(I32, &[2])),
            &[name, "positions", why],
        );
        refused(
            step(),
            |args| *args = args.checkpoints(64, tensor(I32, &[2, 1])),
            &[name, "checkpoints", why],
        );
        refused(
            step(),
            |args| args.workspace = Some(tensor(F32, &[64])),
            &[name, "workspace", why],
        );
    }
}

/// If the caller named another formulation, the error names the formulation that has no such limit.
#[test]
fn more_than_16_tokens_name_the_formulation_that_takes_them() {
    for (formulation, parts) in [
        (
            Formulation::Recurrent,
            [
                "T = 17 is not supported",
                "1 to 16, or any with Formulation::Chunked",
            ],
        ),
        (
            Formulation::Parallel,
            [
                "T of the parallel formulation = 17",
                "1 to 16, or any with Formulation::Chunked",
            ],
        ),
    ] {
        refused(
            dense(17),
            |args| args.options.formulation = formulation,
            &parts,
        );
    }
    let (g, beta) = (tensor(F32, &[2, 17, 4, 64]), tensor(Bf16, &[2, 17, 4]));
    let gates = KdaGates::new(g, KdaDecay::Log, beta, KdaBeta::Given);
    let (qk, v) = (tensor(Bf16, &[2, 17, 2, 64]), tensor(Bf16, &[2, 17, 4, 64]));
    let step = Kda::new(Inputs::qkv(qk, qk, v), gates, v, States::update(pool()));
    let step = step.options(recurrent());
    let message = step.bytes().unwrap_err().to_string();
    let wanted = "T = 17 is not supported: 1 to 16, or any with Formulation::Chunked";
    assert_eq!(message, wanted);
    let options = Options::default().formulation(Formulation::Chunked);
    let message = step.options(options).bytes().unwrap_err().to_string();
    let wanted = "K = 64 is not supported: 128 in a prefill of KDA; up to 16 tokens a launch go token by token";
    assert_eq!(message, wanted);
}

#[test]
fn positions_and_checkpoints_that_do_not_fit_are_refused_by_name() {
    refused(
        full(),
        |args| args.positions = Some(tensor(I32, &[3])),
        &["positions", "[B] = [2]", "[3]"],
    );
    refused(
        full(),
        |args| args.positions = Some(tensor(F32, &[2])),
        &["positions", "i32, i64 or u32"],
    );
    for every in [0, 1, 63, 65, 96, 1 << 32] {
        refused(
            full(),
            |args| *args = args.checkpoints(every, tensor(I32, &[2, 3])),
            &[
                "every of checkpoints",
                "a multiple of 64",
                &every.to_string(),
            ],
        );
    }
    for split in [0, 1, 63, 65, 96] {
        refused(
            full(),
            |args| args.options.split = Some(split),
            &["split", "a multiple of 64", &split.to_string()],
        );
    }
    refused(
        full(),
        |args| args.options.split = Some(64),
        &["K with split", "128", "64"],
    );
    for (slots, parts) in [
        (
            tensor(I32, &[3, 3]),
            ["checkpoint_slots", "[B, C] = [2, 3]"],
        ),
        (tensor(I32, &[6]), ["checkpoint_slots", "[B, C]"]),
        (
            tensor(F16, &[2, 3]),
            ["checkpoint_slots", "i32, i64 or u32"],
        ),
        (
            strided(I32, &[2, 3], &[9, 2]),
            ["checkpoint_slots", "contiguous"],
        ),
    ] {
        refused(full(), |args| *args = args.checkpoints(128, slots), &parts);
    }
    for (workspace, parts) in [
        (tensor(Bf16, &[1 << 20]), ["workspace", "f32"]),
        (
            strided(F32, &[64, 64], &[65, 1]),
            ["workspace", "contiguous"],
        ),
        (
            at(0x1_0008, F32, &[1 << 20]),
            ["workspace", "an alignment of 16 bytes, got 8"],
        ),
    ] {
        refused(full(), |args| args.workspace = Some(workspace), &parts);
    }
}

/// `bytes` counts as many checkpoints as a row at the beginning of its sequence has.
#[test]
fn bytes_count_checkpoints_and_no_workspace() {
    const STATE: u64 = 4 * 64 * 64 * 2;
    let plain = dense(300).bytes().unwrap();
    let with = |of_row| {
        let slots = tensor(I32, &[2, of_row]);
        let bytes = dense(300).checkpoints(128, slots).bytes().unwrap();
        bytes - slots.dims()[1] as u64 * 8
    };
    assert_eq!(
        [0, 1, 2, 3].map(|of_row| (with(of_row) - plain) / STATE),
        [0, 2, 4, 4]
    );
    let workspace = dense(300).workspace(tensor(F32, &[1 << 20]));
    assert_eq!(workspace.bytes().unwrap(), plain);
}
