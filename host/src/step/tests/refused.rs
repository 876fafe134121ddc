//! Arguments that are refused, by name.

use super::*;
use crate::driver::RawFunction;
use crate::recall::Last;

/// Changes good arguments, and asserts that the error begins with the first of `parts` and has them all, and that a launch
/// of the good ones is not taken for one of theirs.
#[track_caller]
fn refused<G: Gates>(
    mut args: Recurrent<'static, G>,
    change: impl FnOnce(&mut Recurrent<'static, G>),
    parts: &[&str],
) {
    args.request().check().unwrap();
    let (last, request) = (Last::<_, TENSORS>::default(), args.request());
    let shape = LaunchShape {
        grid: [1; 3],
        block: 32,
        shared_bytes: 0,
    };
    let switches = request.switches(None);
    last.remember(switches, &request.tensors(), RawFunction::NULL, shape);
    assert!(last.recall(&switches, &request.tensors()).is_some());
    change(&mut args);
    let request = args.request();
    let recalled = last.recall(&request.switches(None), &request.tensors());
    assert!(recalled.is_none(), "recalled, not refused: {parts:?}");
    let message = args.request().check().unwrap_err().to_string();
    assert!(
        message.starts_with(parts[0]) && parts.iter().all(|part| message.contains(part)),
        "wanted {parts:?}, got: {message}"
    );
}

#[test]
fn switches_that_exclude_each_other_are_refused_by_name() {
    let slots = || Some(tensor(I32, &[2]));
    let both = |one, other| [one, other, "exclude each other"];
    refused(
        token_slots(),
        |args| args.read_slots = slots(),
        &both("token_slots", "read_slots"),
    );
    refused(
        token_slots(),
        |args| args.write_slots = slots(),
        &both("token_slots", "write_slots"),
    );
    refused(
        token_slots(),
        |args| args.previous = Some(previous()),
        &both("token_slots", "previous"),
    );
    refused(
        token_slots(),
        |args| args.options.update_state = false,
        &both("token_slots", "update_state = false"),
    );
    refused(
        token_slots(),
        |args| args.token_slots = None,
        &["token_slots is missing", "accepted"],
    );
    refused(
        resume(),
        |args| args.options.update_state = false,
        &both("previous", "update_state = false"),
    );
    refused(
        resume(),
        |args| args.snapshots = Some(tensor(Bf16, &[2, 3, 4, 64, 64])),
        &both("previous", "snapshots"),
    );
    let output_only = |args: &mut GdnMtp<'static>| args.options.update_state = false;
    refused(
        GdnMtp {
            write_slots: slots(),
            ..gdn()
        },
        output_only,
        &both("update_state = false", "write_slots"),
    );
    refused(
        GdnMtp {
            write_pool: Some(tensor(Bf16, &[9, 4, 64, 64])),
            ..gdn()
        },
        output_only,
        &both("update_state = false", "write_pool"),
    );
    let mut args = commit();
    args.options.update_state = false;
    let message = args.bytes().unwrap_err().to_string();
    assert!(
        message.starts_with("a commit and update_state = false exclude"),
        "{message}"
    );
}

#[test]
fn the_parallel_formulation_says_what_it_is_not_for() {
    let parallel = |args: GdnMtp<'static>| {
        let mut args = args;
        args.options.formulation = Formulation::Parallel;
        args.request().check_switches().unwrap();
        args.request().check().unwrap_err().to_string()
    };
    let f32_state = GdnMtp {
        pool: tensor(F32, &[5, 4, 64, 64]),
        ..gdn()
    };
    let mut v_last = gdn();
    v_last.options.state_layout = StateLayout::VLast;
    let snapshots = GdnMtp {
        snapshots: Some(tensor(Bf16, &[2, 3, 4, 64, 64])),
        ..gdn()
    };
    let nine = |heads| tensor(Bf16, &[2, 9, heads, 64]);
    let long = GdnMtp {
        q: nine(2),
        v: nine(4),
        ..gdn()
    };
    let long_previous = GdnMtp {
        previous: Some(Previous {
            k: nine(2),
            v: nine(4),
            ..previous()
        }),
        ..gdn()
    };
    for (args, part) in [
        (f32_state, "an f32 state"),
        (v_last, "a v_last state"),
        (snapshots, "snapshots"),
        (token_slots(), "token_slots"),
        (
            long,
            "T of the parallel formulation = 9 is not supported: 1 to 8",
        ),
        (
            long_previous,
            "T' of the parallel formulation = 9 is not supported: 1 to 8",
        ),
    ] {
        let message = parallel(args);
        assert!(message.contains(part), "wanted {part}, got: {message}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    refused(
        gdn(),
        |args| args.q = tensor(Bf16, &[2, 17, 2, 64]),
        &["T = 17", "1 to 16"],
    );
    refused(
        gdn(),
        |args| args.q = tensor(Bf16, &[2, 0, 2, 64]),
        &["T = 0", "1 to 16"],
    );
    refused(
        gdn(),
        |args| args.k = tensor(Bf16, &[2, 4, 2, 64]),
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
        |args| args.q = strided(Bf16, &[2, 3, 2, 64], &[384, 1 << 32, 64, 1]),
        &["q", "a token stride below 2^32"],
    );
    refused(
        gdn(),
        |args| args.pool = tensor(Bf16, &[1, 4, 64, 64]),
        &["B without read_slots", "at most P = 1", "got 2"],
    );
    refused(
        token_slots(),
        |args| args.token_slots = Some(tensor(I32, &[2, 2])),
        &["token_slots", "[B, T] = [2, 3]", "[2, 2]"],
    );
    refused(
        token_slots(),
        |args| args.accepted = Some(tensor(F32, &[2])),
        &["accepted", "i32, i64 or u32", "f32"],
    );
    let with_snapshots = || GdnMtp {
        snapshots: Some(tensor(Bf16, &[2, 4, 4, 64, 64])),
        ..gdn()
    };
    for (snapshots, parts) in [
        (
            tensor(Bf16, &[2, 2, 4, 64, 64]),
            ["steps of snapshots", "at least T = 3", "got 2"],
        ),
        (
            tensor(F32, &[2, 4, 4, 64, 64]),
            ["snapshots", "the dtype of state", "f32"],
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
            with_snapshots(),
            |args| args.snapshots = Some(snapshots),
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
        |args| args.k = tensor(Bf16, &[1, 6, 2, 64]),
        &["k", "[1, total, H, K] = [1, 7, 2, 64]"],
    );
    let changed = |change: fn(&mut Previous<'static>)| {
        move |args: &mut GdnMtp<'static>| {
            let mut changed = previous();
            change(&mut changed);
            args.previous = Some(changed);
        }
    };
    refused(
        resume(),
        changed(|previous| previous.k = tensor(F32, &[2, 5, 2, 64])),
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
        changed(|previous| previous.k = tensor(Bf16, &[2, 17, 2, 64])),
        &["T' = 17", "1 to 16"],
    );
}
