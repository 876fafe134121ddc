//! Tests of arguments that are refused by name.

use gated_delta_kernels::launch::LaunchShape;

use super::*;
use crate::driver::RawFunction;
use crate::recall::Last;
use crate::step::Launches;

/// Changes valid arguments, and asserts that the error begins with the first of `parts` and contains them all. Also asserts that the
/// changed arguments are not taken for a launch of the valid ones.
#[track_caller]
pub(super) fn refused<W: Work>(mut args: W, change: impl FnOnce(&mut W), parts: &[&str]) {
    args.request().check().unwrap();
    let (last, request) = (Last::<TENSORS>::default(), args.request());
    let shape = LaunchShape {
        grid: [1; 3],
        block: 32,
        shared_bytes: 0,
        cluster: 1,
        overlaps: false,
    };
    let switches = request.switches(None);
    let launches = Launches::alone(RawFunction::NULL, shape);
    last.remember(switches, request.present(), launches.sequence());
    assert!(last.recall(&switches, request.present(), |_| ()).is_some());
    change(&mut args);
    let request = args.request();
    let recalled = last.recall(&request.switches(None), request.present(), |_| ());
    assert!(recalled.is_none(), "recalled, not refused: {parts:?}");
    let message = args.request().check().unwrap_err().to_string();
    assert!(
        message.starts_with(parts[0]) && parts.iter().all(|part| message.contains(part)),
        "wanted {parts:?}, got: {message}"
    );
}

/// Combinations that the types allow. Tests of `gated_delta_harness::arguments` cover the other refusals.
#[test]
fn a_resume_writes_the_state_after_the_kept_tokens_and_no_other() {
    let why = "the state after the kept tokens is written, and no other";
    let both = |other| ["previous", other, "exclude each other", why];
    refused(
        token_slots(),
        |args| args.previous = Some(previous()),
        &both("token_slots"),
    );
    refused(
        resume(),
        |args| args.states = States::read_only(pool()).into(),
        &both("read-only states"),
    );
    refused(
        resume(),
        |args| args.snapshots = Some(snapshots()),
        &both("snapshots"),
    );
}

#[test]
fn the_parallel_formulation_says_what_it_is_not_for() {
    let parallel = |args: Gdn<'static>| {
        let args = args.options(args.options.formulation(Formulation::Parallel));
        shape::switches::check(&args.request()).unwrap();
        args.request().check().unwrap_err().to_string()
    };
    let norm = |o| Norm::new(o, tensor(F32, &[64]), 1e-6);
    let v_last = gdn().norm(norm(gdn().o));
    let v_last = v_last.options(Options::default().state_layout(StateLayout::VLast));
    let long = |heads| tensor(Bf16, &[2, 17, heads, 64]);
    let long_previous = gdn().previous(Previous {
        stored: Stored::kv(long(2), long(4)),
        ..previous()
    });
    let of = |tokens| {
        let heads = |heads| tensor(Bf16, &[2, tokens, heads, 64]);
        let mut args = gdn();
        args.inputs = Inputs::qkv(heads(2), heads(2), heads(4));
        args
    };
    let normed = of(9).norm(norm(tensor(Bf16, &[2, 9, 4, 64])));
    for (args, part) in [
        (
            of(17),
            "T of the parallel formulation = 17 is not supported: 1 to 16, or any",
        ),
        (
            normed,
            "T of the parallel formulation = 9 is not supported: 1 to 8 with a convolution or a norm",
        ),
        (v_last, "a 16-bit v_last state"),
        (gdn().snapshots(snapshots()), "snapshots"),
        (token_slots(), "token_slots"),
        (
            long_previous,
            "T' of the parallel formulation = 17 is not supported: 1 to 16",
        ),
    ] {
        let message = parallel(args);
        assert!(message.contains(part), "wanted {part}, got: {message}");
    }
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused(
            gdn(),
            |args| args.options.scale = Some(scale),
            &["scale", "a finite number"],
        );
    }
    refused(
        gdn(),
        |args| args.options.null_slot = Some(u32::MAX),
        &["null_slot", "below 2^32 - 1", "4294967295"],
    );
}

#[test]
fn heads_that_no_kernel_takes_are_refused_by_name() {
    let of_heads = |h: usize, k: usize, hv: usize, v: usize| {
        move |args: &mut Gdn<'static>| {
            let (qk, v) = (tensor(Bf16, &[2, 3, h, k]), tensor(Bf16, &[2, 3, hv, v]));
            args.inputs = Inputs::qkv(qk, qk, v);
        }
    };
    refused(gdn(), of_heads(2, 80, 4, 80), &["K = 80", "64, 96 or 128"]);
    refused(
        gdn(),
        of_heads(2, 96, 4, 96),
        &["V = 96", "192 with K = 96"],
    );
    refused(
        gdn(),
        of_heads(2, 64, 4, 128),
        &["V = 128", "the same as K"],
    );
    refused(gdn(), of_heads(0, 64, 4, 64), &["H", "1..=65535", "got 0"]);
    for hv in [0, 5] {
        let got = format!("got {hv}");
        refused(
            gdn(),
            of_heads(2, 64, hv, 64),
            &["HV", "a multiple of H = 2", &got],
        );
    }
    refused(
        gdn(),
        |args| {
            let (qk, v) = (
                tensor(Bf16, &[65536, 3, 2, 64]),
                tensor(Bf16, &[65536, 3, 4, 64]),
            );
            args.inputs = Inputs::qkv(qk, qk, v);
        },
        &["B", "at most 65535", "got 65536"],
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    refused(
        gdn(),
        |args| *qkv(args)[0] = tensor(Bf16, &[2, 17, 2, 64]),
        &["T = 17", "1 to 16, or any with Formulation::Chunked"],
    );
    refused(
        gdn(),
        |args| *qkv(args)[0] = tensor(Bf16, &[2, 0, 2, 64]),
        &["T = 0", "1 to 16"],
    );
    refused(
        gdn(),
        |args| *qkv(args)[1] = tensor(Bf16, &[2, 4, 2, 64]),
        &["k", "[B, T, H, K] = [2, 3, 2, 64]", "[2, 4, 2, 64]"],
    );
    refused(
        gdn(),
        |args| {
            args.o = strided(Bf16, &[2, 3, 4, 64], &[768, 255, 64, 1]);
        },
        &["o", "do not overlap", "[768, 255, 64, 1]"],
    );
    refused(
        gdn(),
        |args| {
            args.o = strided(Bf16, &[2, 3, 4, 64], &[256, 256, 64, 1]);
        },
        &["o", "do not overlap", "[256, 256, 64, 1]"],
    );
    refused(
        gdn(),
        |args| *qkv(args)[0] = strided(Bf16, &[2, 3, 2, 64], &[384, 1 << 32, 64, 1]),
        &["q", "a token stride below 2^32"],
    );
    refused(
        gdn(),
        |args| args.states = States::update(tensor(Bf16, &[1, 4, 64, 64])).into(),
        &["B without read_slots", "at most P = 1", "got 2"],
    );
    refused(
        token_slots(),
        |args| args.states = States::per_token(pool(), tensor(I32, &[2, 2])).into(),
        &["token_slots", "[B, T] = [2, 3]", "[2, 2]"],
    );
    refused(
        token_slots(),
        |args| {
            let states = States::per_token(pool(), tensor(I32, &[2, 3]));
            args.states = states.accepted(tensor(F32, &[2])).into();
        },
        &["accepted", "i32, i64 or u32", "f32"],
    );
    for (other, parts) in [
        (
            tensor(Bf16, &[2, 2, 4, 64, 64]),
            ["steps of snapshots", "at least T = 3", "got 2"],
        ),
        (
            tensor(F32, &[2, 4, 4, 64, 64]),
            ["snapshots", "the dtype of pool", "f32"],
        ),
        (
            tensor(Bf16, &[3, 4, 4, 64, 64]),
            ["snapshots", "[2, 4, 4, 64, 64]", "got [3, 4, 4, 64, 64]"],
        ),
        (
            strided(Bf16, &[2, 4, 4, 64, 64], &[65536, 16383, 4096, 64, 1]),
            ["snapshots", "do not overlap", "16383"],
        ),
        (
            strided(Bf16, &[2, 4, 4, 64, 64], &[65536, 16384, 4096, 1, 64]),
            ["snapshots", "contiguous states", "[65536"],
        ),
    ] {
        refused(
            gdn().snapshots(snapshots()),
            |args| args.snapshots = Some(other),
            &parts,
        );
    }
}

#[test]
fn packed_and_previous_tokens_that_do_not_fit_are_refused_by_name() {
    let of = |cu_seqlens, max_tokens| {
        Some(Packed {
            cu_seqlens,
            max_tokens,
        })
    };
    refused(
        packed(),
        |args| args.packed = of(tensor(I32, &[0]), 3),
        &["elements of cu_seqlens", "at least 1"],
    );
    refused(
        packed(),
        |args| args.packed = of(tensor(I32, &[3]), 0),
        &["T = 0"],
    );
    refused(
        packed(),
        |args| args.packed = of(tensor(F16, &[3]), 3),
        &["cu_seqlens", "i32, i64 or u32"],
    );
    refused(
        packed(),
        |args| *qkv(args)[1] = tensor(Bf16, &[1, 6, 2, 64]),
        &["k", "[1, total, H, K] = [1, 7, 2, 64]"],
    );
    let changed = |change: fn(&mut Previous<'static>)| {
        move |args: &mut Gdn<'static>| {
            let mut changed = previous();
            change(&mut changed);
            args.previous = Some(changed);
        }
    };
    refused(
        resume(),
        changed(|previous| {
            previous.stored = Stored::kv(tensor(F32, &[2, 5, 2, 64]), tensor(Bf16, &[2, 5, 4, 64]))
        }),
        &["previous k", "the dtype of k", "f32"],
    );
    refused(
        resume(),
        changed(|previous| previous.gate = tensor(F16, &[2, 4, 4])),
        &["previous a", "[B, T', HV] = [2, 5, 4]", "[2, 4, 4]"],
    );
    refused(
        resume(),
        changed(|previous| previous.beta = tensor(F16, &[2, 5, 4])),
        &["previous b", "the dtype of the new gates", "f16"],
    );
    refused(
        resume(),
        changed(|previous| previous.keep = tensor(I32, &[3])),
        &["keep", "[B] = [2]", "[3]"],
    );
    refused(
        resume(),
        changed(|previous| {
            previous.stored =
                Stored::kv(tensor(Bf16, &[2, 17, 2, 64]), tensor(Bf16, &[2, 17, 4, 64]))
        }),
        &["T' = 17", "1 to 16"],
    );
    refused(
        resume(),
        changed(|previous| previous.keep = tensor(Bf16, &[2])),
        &["keep", "i32, i64 or u32", "bf16"],
    );
}
