//! Tests of steps of several tokens and of commits, with a convolution, a norm and fresh rows.

use super::layer::{D, constants, conv};
use super::refused::refused;
use super::*;
use crate::raw::LayerParams;

const WINDOW: u64 = D as u64 * 3 * 2;

/// A convolution of `x` with `taps` taps, and `inputs` inputs in each window.
fn convolution(x: Tensor<'static>, taps: usize, inputs: usize) -> Convolution<'static> {
    let windows = tensor(Bf16, &[5, D, inputs]);
    Convolution::new(x, 2, tensor(F16, &[D, taps]), windows)
}

fn x() -> Tensor<'static> {
    tensor(Bf16, &[2, 3, D])
}

fn convolved(mut step: Gdn<'static>, conv: Convolution<'static>) -> Gdn<'static> {
    step.inputs = Inputs::conv(conv);
    step
}

fn norm() -> Norm<'static> {
    let z = tensor(F16, &[2, 3, 4, 64]);
    Norm::new(z, tensor(F32, &[64]), 1e-6)
}

fn fresh() -> Tensor<'static> {
    tensor(I32, &[2])
}

/// A verify with T = 3.
fn verify() -> Gdn<'static> {
    convolved(gdn(), convolution(x(), 4, 3))
}

fn window_snapshots() -> Tensor<'static> {
    tensor(Bf16, &[2, 4, D, 3])
}

fn with_snapshots() -> Gdn<'static> {
    let conv = convolution(x(), 4, 3).window_snapshots(window_snapshots());
    convolved(gdn(), conv).snapshots(snapshots())
}

fn per_token() -> Gdn<'static> {
    convolved(token_slots(), convolution(x(), 4, 5))
}

/// Packed rows of at most 3 tokens, 7 tokens in all.
fn packed_rows() -> Gdn<'static> {
    convolved(packed(), convolution(tensor(Bf16, &[1, 7, D]), 4, 3))
}

/// Previous tokens as x, with T' = 5.
fn previous_x() -> Previous<'static> {
    Previous {
        stored: Stored::x(at(0x7_0000, Bf16, &[2, 5, D])),
        ..previous()
    }
}

fn conv_resume() -> Gdn<'static> {
    verify().previous(previous_x())
}

/// A commit with a convolution, with T' = 3.
fn conv_commit() -> GdnCommit<'static> {
    GdnCommit {
        stored: Stored::conv(convolution(x(), 4, 3)),
        ..commit()
    }
}

fn of_commit<'b>(commit: &'b mut GdnCommit<'static>) -> &'b mut Convolution<'static> {
    match &mut commit.stored {
        Stored::Conv(conv) => conv,
        _ => unreachable!("other inputs"),
    }
}

/// Kernels for one token compute only a decode of dense rows whose states are written to at most one place.
#[test]
fn several_tokens_of_a_layer_have_kernels_of_their_own() {
    let normed = |step: Gdn<'static>| step.norm(norm());
    for step in [
        verify(),
        normed(gdn()),
        normed(verify()),
        with_snapshots(),
        per_token(),
        packed_rows(),
        conv_resume(),
        normed(resume()),
        with_states(verify(), States::read_only(pool())),
    ] {
        assert_eq!(operator(&step), (Family::RECURRENT.in_layer(), false));
        assert_eq!(
            operator(&step.fresh(fresh())),
            (Family::RECURRENT.in_layer(), false)
        );
    }
    assert_eq!(
        operator(&conv_commit()),
        (Family::RECURRENT.in_layer(), false)
    );
    assert_eq!(
        operator(&conv_commit().fresh(fresh())),
        (Family::RECURRENT.in_layer(), false)
    );
    let kda = kda(KdaDecay::Log);
    assert_eq!(
        operator(&kda.norm(norm())),
        (Family::RECURRENT.in_layer(), true)
    );

    // Steps of one token with states in more than one place, with previous tokens, or with packed rows.
    let one = convolution(tensor(Bf16, &[2, 1, D]), 4, 3);
    let (gate, o) = (tensor(F32, &[2, 1, 4]), tensor(Bf16, &[2, 1, 4, 64]));
    let decode = |states: States<'static>| {
        let inputs = Inputs::conv(one);
        Gdn::new(inputs, GdnGates::given(gate, gate), o, states).options(recurrent())
    };
    let update = || decode(States::update(pool()).into());
    let slots = States::per_token(pool(), tensor(I32, &[2, 1]));
    assert_eq!(operator(&update()), (Family::DECODE.in_layer(), false));
    assert_eq!(
        operator(&update().fresh(fresh())),
        (Family::DECODE.in_layer(), false)
    );
    assert_eq!(
        operator(&update().snapshots(snapshots())),
        (Family::RECURRENT.in_layer(), false)
    );
    assert_eq!(
        operator(&decode(slots.into())),
        (Family::RECURRENT.in_layer(), false)
    );
    let previous = Previous {
        gate: tensor(F32, &[2, 5, 4]),
        ..previous_x()
    };
    assert_eq!(
        operator(&update().previous(previous)),
        (Family::RECURRENT.in_layer(), false)
    );
    let mut of_one = packed_rows();
    of_one.packed.as_mut().unwrap().max_tokens = 1;
    assert_eq!(operator(&of_one), (Family::RECURRENT.in_layer(), false));
}

/// Fresh rows without a convolution and a norm use the same kernels as other rows.
#[test]
fn fresh_rows_alone_have_no_kernels_of_their_own() {
    for step in [
        gdn(),
        gdn().snapshots(snapshots()),
        token_slots(),
        packed(),
        resume(),
        with_states(gdn(), States::read_only(pool())),
    ] {
        assert_eq!(operator(&step.fresh(fresh())), (Family::RECURRENT, false));
        assert_eq!(constants(&step.fresh(fresh())).fresh_index, 1);
    }
    let commit = commit().fresh(at(0x9_0000, I64, &[2]));
    assert_eq!(operator(&commit), (Family::RECURRENT, false));
    assert_eq!(constants(&commit).fresh_index, 2);
    assert_eq!(commit.params().step.fresh, 0x9_0000);
    assert_eq!(
        operator(&kda(KdaDecay::Log).fresh(fresh())),
        (Family::RECURRENT, true)
    );
}

#[test]
fn constants_and_parameters_of_a_resume_are_those_of_the_tensors() {
    let mut step = conv_resume();
    conv(&mut step).x = at(0x2_0000, Bf16, &[2, 3, D])
        .with_strides(&[5000, 900, 1])
        .unwrap();
    let x = at(0x3_0000, Bf16, &[2, 5, D])
        .with_strides(&[9000, 1000, 1])
        .unwrap();
    step.previous = Some(Previous {
        stored: Stored::x(x),
        ..previous()
    });
    let c = constants(&step);
    assert_eq!((c.tokens, c.previous_tokens, c.taps), (3, 5, 4));
    assert_eq!((c.x_row, c.x_token), (5000, 900));
    assert_eq!((c.previous_x_row, c.previous_x_token), (9000, 1000));
    assert_eq!(
        (c.previous_k_row, c.previous_v_head, c.k_element),
        (0, 0, 0)
    );
    assert_eq!((c.previous_g_row, c.update_state), (20, 0));
    let params = step.params();
    assert_eq!((params.x, params.previous_x), (0x2_0000, 0x3_0000));
    assert_eq!((params.step.previous_k, params.step.previous_v), (0, 0));
    let (request, problem) = (step.request(), step.request().check().unwrap());
    assert!(request.writes(Argument::Windows) && request.writes(Argument::Pool));
    assert!(!request.writes(Argument::PreviousX));
    assert_eq!(problem.kind.tokens, 8);
}

/// In a commit, x is the x of the previous tokens. The rest of the convolution is the commit's own.
#[test]
fn constants_and_parameters_of_a_commit_are_those_of_the_tensors() {
    let mut commit = conv_commit();
    commit.stored = Stored::conv(Convolution {
        x: at(0x2_0000, Bf16, &[2, 3, D])
            .with_strides(&[5000, 900, 1])
            .unwrap(),
        bias: Some(at(0x4_0000, F32, &[D])),
        activation: Activation::None,
        windows: at(0x5_0000, Bf16, &[5, D, 3]),
        write_windows: Some(at(0x6_0000, Bf16, &[7, D, 3])),
        ..convolution(x(), 4, 3)
    });
    commit.states = States::update(pool()).write_pool(tensor(Bf16, &[7, 4, 64, 64]));
    let c = constants(&commit);
    assert_eq!((c.h, c.ratio, c.tokens, c.previous_tokens), (2, 2, 0, 3));
    assert_eq!((c.x_row, c.x_token, c.x_element), (0, 0, 1));
    assert_eq!((c.previous_x_row, c.previous_x_token), (5000, 900));
    assert_eq!((c.taps, c.conv_activation, c.has_conv_bias), (4, 0, 1));
    assert_eq!((c.conv_weight_element, c.conv_bias_element), (2, 0));
    assert_eq!((c.wide_conv_weight, c.conv_weight_channel), (1, 4));
    assert_eq!((c.read_windows_channel, c.write_windows_input), (3, 1));
    assert_eq!((c.k_element, c.v_element, c.has_norm), (0, 0, 0));
    assert_eq!((c.g_element, c.previous_g_row, c.g_row), (2, 12, 0));
    let params = commit.params();
    assert_eq!((params.x, params.previous_x), (0, 0x2_0000));
    assert_eq!((params.step.previous_k, params.step.previous_v), (0, 0));
    assert_eq!((params.conv_weight, params.conv_bias), (0x1_0000, 0x4_0000));
    assert_eq!(
        (params.read_windows, params.write_windows),
        (0x5_0000, 0x6_0000)
    );
    let slots = (params.read_windows_slots, params.write_windows_slots);
    assert_eq!((slots, params.window_snapshots), ((5, 7), 0));
    let request = commit.request();
    request.check().unwrap();
    assert_eq!(request.batch(), 2);
    assert!(request.writes(Argument::WriteWindows));
    assert!(!request.writes(Argument::Windows) && !request.writes(Argument::X));
}

#[test]
fn constants_and_parameters_of_snapshots_are_those_of_the_tensors() {
    let mut step = with_snapshots();
    let c = constants(&step);
    let d = D as u32;
    let strides = (c.window_snapshot_row, c.window_snapshot_token);
    assert_eq!(strides, (12 * d, 3 * d));
    assert_eq!((c.window_snapshot_channel, c.window_snapshot_input), (3, 1));
    assert_eq!(c.has_window_snapshots, 1);
    // Token-major snapshots with a gap after each window.
    conv(&mut step).window_snapshots = Some(
        at(0x8_0000, Bf16, &[2, 4, D, 3])
            .with_strides(&[20 * D, 5 * D, 1, D])
            .unwrap(),
    );
    let c = constants(&step);
    let strides = (c.window_snapshot_row, c.window_snapshot_token);
    assert_eq!(strides, (20 * d, 5 * d));
    assert_eq!((c.window_snapshot_channel, c.window_snapshot_input), (1, d));
    assert_eq!(step.params().window_snapshots, 0x8_0000);
    step.request().check().unwrap();
    assert!(step.request().writes(Argument::WindowSnapshots));
    // Snapshots of states only; then snapshots of both, with a read-only pool.
    let c = constants(&verify().snapshots(snapshots()));
    assert_eq!((c.has_snapshots, c.has_window_snapshots), (1, 0));
    let step = with_states(with_snapshots(), States::read_only(pool()));
    step.request().check().unwrap();
    assert!(step.request().writes(Argument::WindowSnapshots));
    assert!(!step.request().writes(Argument::Windows));
}

/// With token slots, a window has one more input for every token after the first.
#[test]
fn windows_of_token_slots_have_the_inputs_of_every_token() {
    let step = per_token();
    let c = constants(&step);
    let read = [
        c.read_windows_slot,
        c.read_windows_channel,
        c.read_windows_input,
    ];
    let write = [
        c.write_windows_slot,
        c.write_windows_channel,
        c.write_windows_input,
    ];
    assert_eq!((read, c.update_state), ([5 * D as u32, 5, 1], 0));
    assert_eq!(read, write);
    let request = step.request();
    request.check().unwrap();
    assert!(request.writes(Argument::Windows) && request.writes(Argument::Pool));
    for (taps, inputs) in [(2, 3), (3, 4), (4, 5)] {
        let step = convolved(token_slots(), convolution(x(), taps, inputs));
        assert_eq!(constants(&step).taps, taps as u32);
        let wanted = format!("windows: wanted shape [P, D, W - 2 + T] = [5, 512, {inputs}]");
        for other in [taps - 1, inputs - 1, inputs + 1] {
            refused(
                step,
                |step| conv(step).windows = tensor(Bf16, &[5, D, other]),
                &[&wanted],
            );
        }
    }
    // With all other ways of keeping states, windows have W − 1 inputs.
    for step in [verify(), conv_resume(), packed_rows()] {
        refused(
            step,
            |step| conv(step).windows = tensor(Bf16, &[5, D, 5]),
            &["windows: wanted shape [P, D, W - 1] = [5, 512, 3], got [5, 512, 5]"],
        );
    }
    refused(
        conv_commit(),
        |commit| of_commit(commit).windows = tensor(Bf16, &[5, D, 5]),
        &["windows: wanted shape [P, D, W - 1] = [5, 512, 3], got [5, 512, 5]"],
    );

    let split = States::per_token(pool(), tensor(I32, &[2, 3]));
    let split = split.write_pool(tensor(Bf16, &[7, 4, 64, 64]));
    let mut step = with_states(per_token(), split);
    conv(&mut step).write_windows = Some(at(0x6_0000, Bf16, &[7, D, 5]));
    assert_eq!(step.params().write_windows_slots, 7);
    step.request().check().unwrap();
    assert!(step.request().writes(Argument::WriteWindows));
    assert!(!step.request().writes(Argument::Windows));
    refused(
        step,
        |step| conv(step).write_windows = Some(tensor(Bf16, &[7, D, 3])),
        &[
            "write_windows: wanted shape [P of write_pool, D, W - 2 + T] = [7, 512, 5], got [7, 512, 3]",
        ],
    );
    refused(
        step,
        |step| conv(step).write_windows = None,
        &["windows: wanted shape [P of write_pool, D, W - 2 + T] = [7, 512, 5], got [5, 512, 5]"],
    );
    refused(
        per_token(),
        |step| conv(step).windows = strided(Bf16, &[5, D, 5], &[5 * D, 4, 1]),
        &["windows: wanted inputs that do not overlap, since they are written"],
    );
}

#[test]
fn bytes_are_what_is_read_and_written_of_windows_and_every_other_tensor() {
    let qkv = 2 * (2 * 3 * 2 * 64 * 2) + (2 * 3 * 4 * 64 * 2);
    let of_conv = (2 * 3 * D as u64 * 2) + (D as u64 * 4 * 2);
    let more =
        |with: &dyn Work, without: &dyn Work| with.bytes().unwrap() - without.bytes().unwrap();
    assert_eq!(more(&verify(), &gdn()), of_conv - qkv + (2 + 2) * WINDOW);
    let read_only = |step| with_states(step, States::read_only(pool()));
    let once = more(&read_only(verify()), &read_only(gdn()));
    assert_eq!(once, of_conv - qkv + 2 * WINDOW);
    // W − 2 + T inputs of each channel are written.
    let input = D as u64 * 2;
    let slots = more(&per_token(), &token_slots());
    assert_eq!(slots, of_conv - qkv + 2 * WINDOW + 2 * 5 * input);
    let each = more(&with_snapshots(), &gdn().snapshots(snapshots()));
    assert_eq!(each, of_conv - qkv + (2 + 2 + 6) * WINDOW);

    let kv = (2 * 5 * 2 * 64 * 2) + (2 * 5 * 4 * 64 * 2);
    let kept = more(&conv_resume(), &verify()) - more(&resume(), &gdn());
    assert_eq!(kept, 2 * 5 * D as u64 * 2 - kv);
    let kv = (2 * 3 * 2 * 64 * 2) + (2 * 3 * 4 * 64 * 2);
    assert_eq!(
        more(&conv_commit(), &commit()),
        of_conv - kv + (2 + 2) * WINDOW
    );
    assert_eq!(more(&conv_commit().fresh(fresh()), &conv_commit()), 2 * 4);

    // Every token counts once, whatever the length of the longest row.
    let of_slots = |step: Gdn<'static>| {
        let slots = States::per_token(pool(), tensor(I32, &[2, 3]));
        with_states(step, slots)
    };
    let mut rows = of_slots(packed_rows());
    conv(&mut rows).windows = tensor(Bf16, &[5, D, 5]);
    let qkv = 2 * (7 * 2 * 64 * 2) + (7 * 4 * 64 * 2);
    let of_conv = (7 * D as u64 * 2) + (D as u64 * 4 * 2);
    let written = (2 * 2 + 7) * input;
    assert_eq!(
        more(&rows, &of_slots(packed())),
        of_conv - qkv + 2 * WINDOW + written
    );
}

#[test]
fn previous_tokens_come_as_the_new_ones_do() {
    let alike = "exclude each other: previous tokens come as the new ones do";
    refused(
        conv_resume(),
        |step| step.previous = Some(previous()),
        &["x and previous k", alike],
    );
    refused(
        resume(),
        |step| step.previous = Some(previous_x()),
        &["q and previous x", alike],
    );
    refused(
        resume(),
        |step| step.inputs = verify().inputs,
        &["x and previous k", alike],
    );
    refused(
        conv_resume(),
        |step| step.inputs = gdn().inputs,
        &["q and previous x", alike],
    );
    for step in [resume(), conv_resume()] {
        let x = tensor(Bf16, &[2, 5, D]);
        let stored = Stored::conv(convolution(x, 4, 3));
        refused(
            step,
            |step| step.previous.as_mut().unwrap().stored = stored,
            &[
                "previous and a convolution of its own exclude each other: previous tokens are convolved as the new ones are",
            ],
        );
    }
    for commit in [commit(), conv_commit()] {
        refused(
            commit,
            |commit| commit.stored = Stored::x(x()),
            &[
                "a commit and an x without its convolution exclude each other: k and v are given, or made by",
            ],
        );
    }
}

#[test]
fn previous_x_that_does_not_fit_is_refused_by_name() {
    for (x, message) in [
        (
            tensor(Bf16, &[2, 5, 2, D / 2]),
            "previous x: wanted shape [B, T', D], got [2, 5, 2, 256]",
        ),
        (
            tensor(Bf16, &[3, 5, D]),
            "previous x: wanted shape [B, T', D] = [2, 5, 512], got [3, 5, 512]",
        ),
        (
            tensor(Bf16, &[2, 5, D + 1]),
            "previous x: wanted shape [B, T', D] = [2, 5, 512], got [2, 5, 513]",
        ),
        (
            tensor(F16, &[2, 5, D]),
            "previous x: wanted the dtype of x, got f16",
        ),
        (
            tensor(I32, &[2, 5, D]),
            "previous x: wanted bf16, f16 or f32, got i32",
        ),
        (
            strided(Bf16, &[2, 5, D], &[10 * D, 2 * D, 2]),
            "previous x: wanted a contiguous innermost dim",
        ),
        (
            strided(Bf16, &[2, 5, D], &[5 * D, 1 << 32, 1]),
            "previous x: wanted a token stride below 2^32 elements",
        ),
        (
            at(0x1_0001, Bf16, &[2, 5, D]),
            "previous x: wanted an alignment of 2 bytes, got 1",
        ),
        (
            tensor(Bf16, &[2, 17, D]),
            "T' = 17 is not supported: 1 to 16",
        ),
        (
            tensor(Bf16, &[2, 4, D]),
            "previous a: wanted shape [B, T', HV] = [2, 4, 4], got [2, 5, 4]",
        ),
    ] {
        refused(
            conv_resume(),
            |step| step.previous.as_mut().unwrap().stored = Stored::x(x),
            &[message],
        );
    }
    refused(
        verify(),
        |step| conv(step).x = tensor(Bf16, &[2, 17, D]),
        &["T = 17 is not supported: 1 to 16"],
    );
}

#[test]
fn a_commit_that_does_not_fit_is_refused_by_name() {
    let changed = |change: fn(&mut Convolution<'static>), parts: &[&str]| {
        refused(conv_commit(), |commit| change(of_commit(commit)), parts);
    };
    changed(
        |conv| conv.x = tensor(Bf16, &[3, D]),
        &["x: wanted shape [B, T', D], got [3, 512]"],
    );
    changed(
        |conv| conv.x = tensor(Bf16, &[2, 3, D + 64]),
        &["x: wanted shape [B, T', D] = [2, 3, 512], got [2, 3, 576]"],
    );
    changed(
        |conv| conv.x = tensor(Bf16, &[2, 17, D]),
        &["T' = 17 is not supported: 1 to 16"],
    );
    changed(
        |conv| conv.x = tensor(F32, &[2, 3, D]),
        &["windows: wanted the dtype of x, got bf16"],
    );
    changed(
        |conv| conv.heads = 3,
        &["HV: wanted a multiple of H = 3 up to 65535, got 4"],
    );
    changed(
        |conv| conv.weight = tensor(F16, &[D, 5]),
        &["W = 5 is not supported: 2, 3 or 4"],
    );
    changed(
        |conv| conv.windows = tensor(Bf16, &[4, D, 3]),
        &["windows: wanted shape [P, D, W - 1] = [5, 512, 3], got [4, 512, 3]"],
    );
    changed(
        |conv| conv.window_snapshots = Some(window_snapshots()),
        &["window_snapshots and a launch without snapshots exclude each other"],
    );
    // The states determine HV, K and V.
    refused(
        conv_commit(),
        |commit| commit.states = States::update(tensor(Bf16, &[5, 8, 64, 64])),
        &["x: wanted shape [B, T', D] = [2, 3, 768], got [2, 3, 512]"],
    );
    refused(
        conv_commit(),
        |commit| commit.states = States::update(tensor(Bf16, &[5, 4, 64])),
        &["pool: wanted shape [P, HV, V, K], got [5, 4, 64]"],
    );
    let v_last = Options::default().state_layout(StateLayout::VLast);
    refused(
        conv_commit().options(v_last),
        |commit| commit.states = States::update(tensor(Bf16, &[5, 4, 64, 128])),
        &["V = 128 is not supported: the same as K"],
    );
    for commit in [commit(), conv_commit()] {
        refused(
            commit.fresh(fresh()),
            |commit| commit.fresh = Some(tensor(I32, &[3])),
            &["fresh: wanted shape [B] = [2], got [3]"],
        );
    }
}

#[test]
fn window_snapshots_that_do_not_fit_are_refused_by_name() {
    let why = "exclude each other: windows after each token are of no use without the states";
    refused(
        with_snapshots(),
        |step| step.snapshots = None,
        &["window_snapshots and a launch without snapshots", why],
    );
    let dims = [2, 4, D, 3];
    for (snapshots, message) in [
        (
            tensor(Bf16, &[8, D, 3]),
            "window_snapshots: wanted shape [B, steps, D, W - 1], got [8, 512, 3]",
        ),
        (
            tensor(Bf16, &[3, 4, D, 3]),
            "window_snapshots: wanted shape [B, steps, D, W - 1] = [2, 4, 512, 3], got [3, 4, 512, 3]",
        ),
        (
            tensor(Bf16, &[2, 4, D, 4]),
            "window_snapshots: wanted shape [B, steps, D, W - 1] = [2, 4, 512, 3], got [2, 4, 512, 4]",
        ),
        (
            tensor(Bf16, &[2, 2, D, 3]),
            "steps of window_snapshots: wanted at least T = 3, got 2",
        ),
        (
            tensor(F32, &dims),
            "window_snapshots: wanted the dtype of x, got f32",
        ),
        (
            at(0x1_0001, Bf16, &dims),
            "window_snapshots: wanted an alignment of 2 bytes, got 1",
        ),
        (
            strided(Bf16, &dims, &[12 * D, 3 * D - 1, 3, 1]),
            "window_snapshots: wanted inputs that do not overlap, since they are written",
        ),
        (
            strided(Bf16, &dims, &[0, 3 * D, 3, 1]),
            "window_snapshots: wanted inputs that do not overlap, since they are written",
        ),
        (
            strided(Bf16, &dims, &[1 << 32, 3 * D, 3, 1]),
            "window_snapshots: wanted a row or slot stride below 2^32 elements",
        ),
        (
            strided(Bf16, &dims, &[4, 1 << 32, 4 * D, 1]),
            "window_snapshots: wanted a token stride below 2^32 elements",
        ),
        (
            strided(Bf16, &dims, &[12, 3, 1 << 24, 1]),
            "window_snapshots: wanted channels and inputs that span less than 2^32 elements",
        ),
    ] {
        refused(
            with_snapshots(),
            |step| conv(step).window_snapshots = Some(snapshots),
            &[message],
        );
    }
    // A snapshot for each of the T tokens is enough.
    let mut three = with_snapshots();
    conv(&mut three).window_snapshots = Some(tensor(Bf16, &[2, 3, D, 3]));
    three.request().check().unwrap();
}

#[test]
fn packed_rows_that_do_not_fit_are_refused_by_name() {
    refused(
        packed_rows(),
        |step| conv(step).x = tensor(Bf16, &[2, 7, D]),
        &["x: wanted shape [1, total, D] = [1, 7, 512], got [2, 7, 512]"],
    );
    let z = tensor(F16, &[1, 7, 4, 64]);
    let normed = packed_rows().norm(Norm::new(z, tensor(F32, &[64]), 1e-6));
    refused(
        normed,
        |step| step.norm.as_mut().unwrap().z = tensor(F16, &[1, 6, 4, 64]),
        &["z: wanted shape [1, total, HV, V] = [1, 7, 4, 64], got [1, 6, 4, 64]"],
    );
    let c = constants(&normed);
    assert_eq!(
        (c.x_row, c.x_token, c.z_row, c.z_token),
        (0, D as u32, 0, 256)
    );
}

/// In both formulations, a convolution and a norm have kernels of their own; fresh rows have none.
#[test]
fn layers_of_tokens_at_once_have_kernels_of_their_own() {
    use Mode::{Commit, Resume, Update, Verify};

    let of_kind = |work: &dyn Work| {
        let kind = work.request().check().unwrap().kind;
        (kind.family, kind.mode)
    };
    let parallel = Options::default().formulation(Formulation::Parallel);
    let of = |mut step: Gdn<'static>| {
        step.options = parallel;
        of_kind(&step)
    };
    let of_commit = |mut commit: GdnCommit<'static>| {
        commit.options = parallel;
        of_kind(&commit)
    };
    let read_only = with_states(verify(), States::read_only(pool()));
    let layer = |mode| (Family::PARALLEL.in_layer(), mode);
    assert_eq!(of(verify()), layer(Update));
    assert_eq!(of(packed_rows()), layer(Update));
    assert_eq!(of(read_only), layer(Verify));
    assert_eq!(of(conv_resume().norm(norm())), layer(Resume));
    assert_eq!(of(gdn().norm(norm())), layer(Update));
    assert_eq!(of_commit(conv_commit()), layer(Commit));
    assert_eq!(of_commit(conv_commit().fresh(fresh())), layer(Commit));
    assert_eq!(of(gdn().fresh(fresh())), (Family::PARALLEL, Update));
    let mut kda = kda(KdaDecay::Log).norm(norm());
    kda.options = parallel;
    let message = kda.bytes().unwrap_err().to_string();
    let wanted = "K = 64 is not supported: 128 with KDA and formulation = parallel";
    assert_eq!(message, wanted);

    let why = "it has no state after each token";
    let both = |other| format!("formulation = parallel and {other} exclude each other: {why}");
    for (other, step) in [
        ("snapshots", with_snapshots()),
        ("token_slots", per_token()),
    ] {
        refused(step, |step| step.options = parallel, &[&both(other)]);
    }
}

/// A norm with 16-byte reads has to stay aligned. A norm with narrow reads may have any address.
#[test]
fn a_plan_wants_z_and_the_weight_of_a_norm_as_aligned_as_planned() {
    let options = recurrent().formulation(Formulation::Parallel);
    let parallel = gdn().norm(norm()).options(options);
    let (planned, params) = (parallel.request().check().unwrap(), parallel.params());
    assert_eq!(planned.constants.wide_norm, 1);
    planned.check_aligned(&params).unwrap();
    let off = [
        (
            "z",
            LayerParams {
                z: 0x1_0008,
                ..params
            },
        ),
        (
            "norm_weight",
            LayerParams {
                norm_weight: 0x1_0008,
                ..params
            },
        ),
    ];
    let one_by_one = gdn().norm(norm()).request().check().unwrap();
    for (name, params) in off {
        let message = planned.check_aligned(&params).unwrap_err().to_string();
        let wanted = format!("{name}: wanted an alignment of 16 bytes, got 8");
        assert_eq!(message, wanted);
        one_by_one.check_aligned(&params).unwrap();
    }
}
