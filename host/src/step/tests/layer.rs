//! Tests of decodes with a convolution, a norm and fresh rows.

use super::refused::refused;
use super::*;
use crate::step::shape::checks::ratio;

/// D, the number of channels: 2·H·K + HV·V.
pub(super) const D: usize = 2 * 2 * 64 + 4 * 64;

/// A decode with the given states: B = 2, T = 1, H = 2, HV = 4, K = V = 64, P = 5.
fn decode_to(states: impl Into<States<'static>>) -> Gdn<'static> {
    let (gate, parameter) = (tensor(Bf16, &[2, 1, 4]), tensor(F32, &[4]));
    let gates = GdnGates::raw(gate, gate, parameter, parameter);
    let (qk, vo) = (tensor(Bf16, &[2, 1, 2, 64]), tensor(Bf16, &[2, 1, 4, 64]));
    Gdn::new(Inputs::qkv(qk, qk, vo), gates, vo, states)
}

fn decode() -> Gdn<'static> {
    decode_to(States::update(pool()))
}

fn windows() -> Tensor<'static> {
    tensor(Bf16, &[5, D, 3])
}

fn convolution() -> Convolution<'static> {
    Convolution::new(tensor(Bf16, &[2, 1, D]), 2, tensor(F16, &[D, 4]), windows())
}

fn norm() -> Norm<'static> {
    let z = tensor(F16, &[2, 1, 4, 64]);
    Norm::new(z, tensor(F32, &[64]), 1e-6)
}

fn fresh() -> Tensor<'static> {
    tensor(I32, &[2])
}

fn with_conv(conv: Convolution<'static>) -> Gdn<'static> {
    let mut step = decode();
    step.inputs = Inputs::conv(conv);
    step
}

/// A decode with a convolution, a norm and fresh rows.
pub(super) fn layer() -> Gdn<'static> {
    let conv = convolution().bias(tensor(F32, &[D]));
    with_conv(conv).norm(norm()).fresh(fresh())
}

fn kda_layer() -> Kda<'static> {
    let (g, beta) = (tensor(F32, &[2, 1, 4, 64]), tensor(Bf16, &[2, 1, 4]));
    let gates = KdaGates::new(g, KdaDecay::Log, beta, KdaBeta::Given);
    let (inputs, o) = (Inputs::conv(convolution()), tensor(Bf16, &[2, 1, 4, 64]));
    Kda::new(inputs, gates, o, States::update(pool())).norm(norm())
}

pub(super) fn conv<'b>(step: &'b mut Gdn<'static>) -> &'b mut Convolution<'static> {
    match &mut step.inputs {
        Inputs::Conv(conv) => conv,
        Inputs::Qkv { .. } => unreachable!("other inputs"),
    }
}

fn norm_of<'b>(step: &'b mut Gdn<'static>) -> &'b mut Norm<'static> {
    step.norm.as_mut().unwrap()
}

pub(super) fn constants(work: &dyn Work) -> StepConstants {
    work.request().check().unwrap().constants
}

#[test]
fn constants_and_parameters_are_those_of_the_tensors() {
    // x is a view of rows of a larger projection, the taps have a gap after each channel, and windows are token-major in slots of
    // four inputs.
    let mut step = layer();
    let x = at(0x2_0000, Bf16, &[2, 1, D]);
    *conv(&mut step) = Convolution {
        x: x.with_strides(&[1000, 77, 1]).unwrap(),
        weight: at(0x3_0000, F16, &[D, 4]).with_strides(&[8, 1]).unwrap(),
        bias: Some(at(0x4_0000, F32, &[D])),
        activation: Activation::None,
        windows: at(0x5_0000, Bf16, &[5, D, 3])
            .with_strides(&[4 * D, 1, D])
            .unwrap(),
        write_windows: Some(at(0x6_0000, Bf16, &[7, D, 3])),
        ..convolution()
    };
    step.states = States::update(pool())
        .write_pool(tensor(Bf16, &[7, 4, 64, 64]))
        .into();
    *norm_of(&mut step) = Norm {
        z: at(0x7_0002, F16, &[2, 1, 4, 64])
            .with_strides(&[900, 900, 65, 1])
            .unwrap(),
        weight: at(0x8_0000, F32, &[64]),
        activation: Activation::Sigmoid,
        eps: 0.5,
    };
    step.fresh = Some(at(0x9_0000, I64, &[2]));
    let c = constants(&step);
    assert_eq!((c.h, c.ratio, c.tokens, c.update_state), (2, 2, 1, 1));
    assert_eq!((c.q_row, c.k_token, c.v_head, c.v_element), (0, 0, 0, 0));
    assert_eq!((c.wide_io, c.wide_state), (1, 1));
    assert_eq!((c.taps, c.conv_activation, c.has_conv_bias), (4, 0, 1));
    assert_eq!(
        (c.x_element, c.conv_weight_element, c.conv_bias_element),
        (1, 2, 0)
    );
    assert_eq!((c.wide_conv_weight, c.conv_weight_channel), (1, 8));
    assert_eq!((c.x_row, c.x_token), (1000, 0));
    let d = D as u32;
    let read = (c.read_windows_slot, c.read_windows_channel);
    assert_eq!((read, c.read_windows_input), ((4 * d, 1), d));
    let write = (c.write_windows_slot, c.write_windows_channel);
    assert_eq!((write, c.write_windows_input), ((3 * d, 3), 1));
    assert_eq!((c.has_norm, c.norm_activation), (1, 2));
    assert_eq!(c.norm_eps, 0.5f32.to_bits());
    assert_eq!((c.z_element, c.norm_weight_element), (2, 0));
    assert_eq!((c.z_row, c.z_token, c.z_head), (900, 0, 65));
    assert_eq!(c.fresh_index, 2);

    let params = step.params();
    assert_eq!((params.step.q, params.step.k, params.step.v), (0, 0, 0));
    assert_eq!(params.step.fresh, 0x9_0000);
    assert_eq!((params.x, params.conv_weight), (0x2_0000, 0x3_0000));
    assert_eq!(params.conv_bias, 0x4_0000);
    assert_eq!(
        (params.read_windows, params.write_windows),
        (0x5_0000, 0x6_0000)
    );
    assert_eq!((params.z, params.norm_weight), (0x7_0002, 0x8_0000));
    assert_eq!(
        (params.read_windows_slots, params.write_windows_slots),
        (5, 7)
    );
    step.request().check().unwrap();
    let written = |name| step.request().writes(name);
    assert!(
        written(Argument::WriteWindows) && written(Argument::WritePool) && written(Argument::O)
    );
    assert!(!written(Argument::Windows) && !written(Argument::X) && !written(Argument::Z));
}

#[test]
fn what_is_absent_leaves_no_trace() {
    let c = constants(&decode());
    assert_eq!((c.taps, c.has_norm, c.fresh_index), (0, 0, 0));
    let params = decode().params();
    let around = [params.x, params.read_windows, params.z, params.step.fresh];
    assert_eq!(around, [0; 4]);
    let c = constants(&with_conv(convolution()));
    assert_eq!((c.taps, c.has_conv_bias, c.has_norm), (4, 0, 0));
    assert_eq!(c.conv_activation, 1);
    let c = constants(&decode().norm(norm()));
    assert_eq!((c.taps, c.has_norm, c.norm_activation), (0, 1, 1));
    assert_eq!((c.q_head, c.z_head), (64, 64));
}

/// Both orders of windows that engines use are accepted, also for windows that are updated in place.
#[test]
fn windows_are_channel_major_or_token_major() {
    let strides = |windows| {
        let step = with_conv(Convolution {
            windows,
            ..convolution()
        });
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
        assert_eq!(read, write);
        let params = step.params();
        assert_eq!(params.read_windows, params.write_windows);
        step.request().check().unwrap();
        assert!(step.request().writes(Argument::Windows));
        read
    };
    let d = D as u32;
    assert_eq!(strides(windows()), [3 * d, 3, 1]);
    // W columns, of which the newest W − 1 are the window.
    let four = tensor(Bf16, &[5, D, 4]).narrow(2, 1, 3).unwrap();
    assert_eq!(strides(four), [4 * d, 4, 1]);
    let by_token = strided(Bf16, &[5, D, 3], &[3 * D, 1, D]);
    assert_eq!(strides(by_token), [3 * d, 1, d]);
    let by_slot_last = strided(Bf16, &[5, D, 3], &[1, 15, 5]);
    assert_eq!(strides(by_slot_last), [1, 15, 5]);

    // All slots may share windows that are only read.
    let mut step = with_conv(convolution());
    step.states = States::read_only(pool()).into();
    conv(&mut step).windows = strided(Bf16, &[5, D, 3], &[0, 3, 1]);
    step.request().check().unwrap();
    assert!(!step.request().writes(Argument::Windows));
    let mut step = with_conv(convolution());
    conv(&mut step).windows = strided(Bf16, &[5, D, 3], &[0, 3, 1]);
    conv(&mut step).write_windows = Some(windows());
    step.request().check().unwrap();
}

#[test]
fn taps_that_are_aligned_to_their_bytes_are_read_at_once() {
    let wide = |weight: Tensor<'static>| {
        let taps = weight.dims()[1];
        let windows = tensor(Bf16, &[5, D, taps - 1]);
        let step = with_conv(Convolution {
            weight,
            windows,
            ..convolution()
        });
        let c = constants(&step);
        assert_eq!(c.taps, taps as u32);
        c.wide_conv_weight
    };
    assert_eq!(wide(at(0x1_0008, Bf16, &[D, 4])), 1);
    assert_eq!(wide(at(0x1_0004, Bf16, &[D, 4])), 0);
    assert_eq!(wide(at(0x1_0008, F32, &[D, 4])), 0);
    assert_eq!(wide(at(0x1_0010, F32, &[D, 4])), 1);
    assert_eq!(wide(at(0x1_0004, F16, &[D, 2])), 1);
    assert_eq!(wide(at(0x1_0002, F16, &[D, 2])), 0);
    assert_eq!(wide(tensor(Bf16, &[D, 3])), 0);
    assert_eq!(wide(strided(Bf16, &[D, 4], &[6, 1])), 0);
    assert_eq!(wide(strided(Bf16, &[D, 2], &[6, 1])), 1);

    let (planned, step) = (layer().request().check().unwrap(), layer());
    let mut params = step.params();
    planned.check_aligned(&params).unwrap();
    params.conv_weight += 4;
    let message = planned.check_aligned(&params).unwrap_err().to_string();
    assert_eq!(
        message,
        "conv_weight: wanted an alignment of 8 bytes, got 4"
    );
    params.conv_weight += 4;
    for other in [&mut params.x, &mut params.z, &mut params.read_windows] {
        *other += 2;
    }
    planned.check_aligned(&params).unwrap();
}

#[test]
fn a_layer_has_kernels_of_its_own_and_fresh_rows_have_not() {
    assert_eq!(operator(&layer()), (Family::DECODE.in_layer(), false));
    assert_eq!(
        operator(&with_conv(convolution())),
        (Family::DECODE.in_layer(), false)
    );
    assert_eq!(
        operator(&decode().norm(norm())),
        (Family::DECODE.in_layer(), false)
    );
    assert_eq!(
        operator(&decode().fresh(fresh())),
        (Family::RECURRENT, false)
    );
    assert_eq!(operator(&kda_layer()), (Family::DECODE.in_layer(), true));
    let mut kda = kda_layer();
    let (qk, vo) = (tensor(Bf16, &[2, 1, 2, 64]), tensor(Bf16, &[2, 1, 4, 64]));
    (kda.inputs, kda.norm) = (Inputs::qkv(qk, qk, vo), None);
    assert_eq!(operator(&kda.fresh(fresh())), (Family::RECURRENT, true));
    assert_eq!(constants(&kda_layer()).g_head, 64);
}

#[test]
fn bytes_are_each_window_read_and_written_and_every_other_tensor() {
    let plain = decode().bytes().unwrap();
    let qkv = 2 * (2 * 2 * 64 * 2) + (2 * 4 * 64 * 2);
    let of_conv = (2 * D * 2) + (D * 4 * 2) + 2 * (2 * D * 3 * 2);
    let with = with_conv(convolution()).bytes().unwrap();
    assert_eq!(with, plain - qkv as u64 + of_conv as u64);
    let of_norm = (2 * 4 * 64 * 2) + 64 * 4;
    let others = of_norm + 2 * 4 + D as u64 * 4;
    assert_eq!(layer().bytes().unwrap(), with + others);
    let mut read_only = with_conv(convolution());
    read_only.states = States::read_only(pool()).into();
    let of_states = 2 * (4 * 64 * 64 * 2) + 2 * (D as u64 * 3 * 2);
    assert_eq!(read_only.bytes().unwrap(), with - of_states);
}

#[test]
fn windows_are_written_where_states_are() {
    let mut step = with_conv(convolution().write_windows(windows()));
    step.states = States::update(pool()).slots(tensor(I32, &[2])).into();
    refused(
        step,
        |step| step.states = States::read_only(pool()).slots(tensor(I32, &[2])).into(),
        &[
            "write_windows and read-only states exclude each other: windows are written where states are",
        ],
    );
}

#[test]
fn a_convolution_that_does_not_fit_is_refused_by_name() {
    let changed = |change: fn(&mut Convolution<'static>), parts: &[&str]| {
        refused(layer(), |step| change(conv(step)), parts);
    };
    changed(
        |conv| conv.x = tensor(Bf16, &[2, D]),
        &["x: wanted shape [B, T, D], got [2, 512]"],
    );
    changed(
        |conv| conv.x = tensor(Bf16, &[2, 1, D + 64]),
        &["x: wanted shape [B, T, D] = [2, 1, 512], got [2, 1, 576]"],
    );
    changed(
        |conv| conv.x = tensor(I32, &[2, 1, D]),
        &["x: wanted bf16, f16 or f32, got i32"],
    );
    changed(
        |conv| conv.x = strided(Bf16, &[2, 1, D], &[2 * D, 2 * D, 2]),
        &["x: wanted a contiguous innermost dim"],
    );
    changed(
        |conv| conv.x = at(0x1_0001, Bf16, &[2, 1, D]),
        &["x: wanted an alignment of 2 bytes, got 1"],
    );
    changed(
        |conv| conv.x = tensor(F32, &[2, 1, D]),
        &["windows: wanted the dtype of x, got bf16"],
    );
    changed(
        |conv| conv.heads = 1,
        &["x: wanted shape [B, T, D] = [2, 1, 384], got [2, 1, 512]"],
    );
    changed(
        |conv| conv.heads = 3,
        &["HV: wanted a multiple of H = 3 up to 65535, got 4"],
    );
    for heads in [0, 1 << 32] {
        let what = format!("H: wanted 1..=65535, got {heads}");
        refused(layer(), |step| conv(step).heads = heads, &[&what]);
    }
    changed(
        |conv| conv.activation = Activation::Sigmoid,
        &["activation of the convolution = sigmoid is not supported: silu or none"],
    );
    changed(
        |conv| conv.weight = tensor(F16, &[D]),
        &["conv_weight: wanted shape [D, W], got [512]"],
    );
    for taps in [1, 5] {
        let what = format!("W = {taps} is not supported: 2, 3 or 4");
        let weight = tensor(F16, &[D, taps]);
        refused(layer(), |step| conv(step).weight = weight, &[&what]);
    }
    changed(
        |conv| conv.weight = tensor(F16, &[D - 1, 4]),
        &["conv_weight: wanted shape [D, W] = [512, 4], got [511, 4]"],
    );
    changed(
        |conv| conv.weight = strided(F16, &[D, 4], &[1, D]),
        &["conv_weight: wanted a contiguous innermost dim"],
    );
    changed(
        |conv| conv.weight = strided(F16, &[D, 4], &[1 << 24, 1]),
        &["conv_weight: wanted channels that span less than 2^32 elements"],
    );
    changed(
        |conv| conv.weight = tensor(I64, &[D, 4]),
        &["conv_weight: wanted bf16, f16 or f32, got i64"],
    );
    changed(
        |conv| conv.bias = Some(tensor(F32, &[D, 1])),
        &["conv_bias: wanted shape [D] = [512], got [512, 1]"],
    );
    changed(
        |conv| conv.bias = Some(strided(F32, &[D], &[2])),
        &["conv_bias: wanted a contiguous innermost dim"],
    );
    changed(
        |conv| conv.bias = Some(tensor(U32, &[D])),
        &["conv_bias: wanted bf16, f16 or f32, got u32"],
    );
}

#[test]
fn windows_that_do_not_fit_are_refused_by_name() {
    let changed = |change: fn(&mut Convolution<'static>), parts: &[&str]| {
        refused(layer(), |step| change(conv(step)), parts);
    };
    changed(
        |conv| conv.windows = tensor(Bf16, &[5, D, 4]),
        &["windows: wanted shape [P, D, W - 1] = [5, 512, 3], got [5, 512, 4]"],
    );
    changed(
        |conv| conv.windows = tensor(Bf16, &[6, D, 3]),
        &["windows: wanted shape [P, D, W - 1] = [5, 512, 3], got [6, 512, 3]"],
    );
    changed(
        |conv| conv.windows = tensor(F16, &[5, D, 3]),
        &["windows: wanted the dtype of x, got f16"],
    );
    changed(
        |conv| conv.windows = strided(Bf16, &[5, D, 3], &[3 * D - 1, 3, 1]),
        &["windows: wanted inputs that do not overlap, since they are written"],
    );
    changed(
        |conv| conv.windows = strided(Bf16, &[5, D, 3], &[1 << 32, 3, 1]),
        &["windows: wanted a row or slot stride below 2^32 elements"],
    );
    // Each span is below 2^32, but their sum is not.
    let channel = (1 << 31) / (D - 1);
    refused(
        layer(),
        |step| conv(step).windows = strided(Bf16, &[5, D, 3], &[0, channel, 3 << 29]),
        &["windows: wanted channels and inputs that span less than 2^32 elements"],
    );
    changed(
        |conv| conv.windows = at(0x1_0001, Bf16, &[5, D, 3]),
        &["windows: wanted an alignment of 2 bytes, got 1"],
    );
    changed(
        |conv| conv.write_windows = Some(tensor(Bf16, &[6, D, 3])),
        &["write_windows: wanted shape [P, D, W - 1] = [5, 512, 3], got [6, 512, 3]"],
    );
    changed(
        |conv| conv.write_windows = Some(tensor(F32, &[5, D, 3])),
        &["write_windows: wanted the dtype of x, got f32"],
    );
    changed(
        |conv| conv.write_windows = Some(strided(Bf16, &[5, D, 3], &[3 * D, 0, 1])),
        &["write_windows: wanted inputs that do not overlap, since they are written"],
    );

    // If states are written to another pool, the windows to write have the slots of that pool.
    let split = |slots| {
        let other = tensor(Bf16, &[slots, 4, 64, 64]);
        States::update(pool()).write_pool(other).into()
    };
    let of_slots = |slots| tensor(Bf16, &[slots, D, 3]);
    let mut in_place = layer();
    in_place.states = split(5);
    refused(
        in_place,
        |step| step.states = split(7),
        &["windows: wanted shape [P of write_pool, D, W - 1] = [7, 512, 3], got [5, 512, 3]"],
    );
    let mut both = layer();
    both.states = split(7);
    conv(&mut both).write_windows = Some(of_slots(7));
    refused(
        both,
        |step| conv(step).write_windows = Some(of_slots(5)),
        &["write_windows: wanted shape [P of write_pool, D, W - 1] = [7, 512, 3], got [5, 512, 3]"],
    );
}

#[test]
fn a_norm_that_does_not_fit_is_refused_by_name() {
    let changed = |change: fn(&mut Norm<'static>), parts: &[&str]| {
        refused(layer(), |step| change(norm_of(step)), parts);
    };
    changed(
        |norm| norm.z = tensor(F16, &[2, 1, 2, 64]),
        &["z: wanted shape [B, T, HV, V] = [2, 1, 4, 64], got [2, 1, 2, 64]"],
    );
    changed(
        |norm| norm.z = tensor(I32, &[2, 1, 4, 64]),
        &["z: wanted bf16, f16 or f32, got i32"],
    );
    changed(
        |norm| norm.z = strided(F16, &[2, 1, 4, 64], &[256, 256, 1, 4]),
        &["z: wanted a contiguous innermost dim"],
    );
    changed(
        |norm| norm.weight = tensor(F32, &[128]),
        &["norm_weight: wanted shape [V] = [64], got [128]"],
    );
    changed(
        |norm| norm.weight = tensor(I32, &[64]),
        &["norm_weight: wanted bf16, f16 or f32, got i32"],
    );
    changed(
        |norm| norm.weight = strided(F32, &[64], &[2]),
        &["norm_weight: wanted a contiguous innermost dim"],
    );
    changed(
        |norm| norm.activation = Activation::None,
        &["activation of the norm = none is not supported: silu or sigmoid"],
    );
    for eps in [0.0, -1e-6, f32::NAN, f32::INFINITY] {
        let what = format!("eps of the norm: wanted a finite number above 0, got {eps}");
        refused(layer(), |step| norm_of(step).eps = eps, &[&what]);
    }
}

#[test]
fn fresh_rows_that_do_not_fit_are_refused_by_name() {
    for (other, parts) in [
        (
            tensor(I32, &[3]),
            ["fresh: wanted shape [B] = [2], got [3]"],
        ),
        (
            tensor(F32, &[2]),
            ["fresh: wanted i32, i64 or u32, got f32"],
        ),
        (
            strided(I32, &[2], &[2]),
            ["fresh: wanted contiguous, got strides [2] (in elements)"],
        ),
    ] {
        refused(layer(), |step| step.fresh = Some(other), &parts);
        let plain = decode().fresh(fresh());
        refused(plain, |step| step.fresh = Some(other), &parts);
    }
}

/// A block computes all value heads of a query/key head.
#[test]
fn value_heads_that_no_block_has_are_refused_by_name() {
    ratio(8, Some(8)).unwrap();
    ratio(16, None).unwrap();
    assert_eq!(
        ratio(16, Some(8)).unwrap_err().to_string(),
        "HV / H: wanted at most 8 with a convolution or a norm, got 16"
    );
}

/// The limits are those of the selected entries, if entries exist.
#[test]
fn more_value_heads_than_a_block_has_are_refused() {
    let of_ratio = |ratio: usize, layout| {
        let of_heads = |dtype, rest: &[usize]| tensor(dtype, &[&[2, 1, ratio], rest].concat());
        let gate = of_heads(Bf16, &[]);
        let (channels, z) = ((2 + ratio) * 64, of_heads(Bf16, &[64]));
        let conv = Convolution::new(
            tensor(Bf16, &[2, 1, channels]),
            1,
            tensor(Bf16, &[channels, 4]),
            tensor(Bf16, &[5, channels, 3]),
        );
        let states = States::update(tensor(Bf16, &[5, ratio, 64, 64]));
        Gdn::new(Inputs::conv(conv), GdnGates::given(gate, gate), z, states)
            .norm(Norm::new(z, tensor(Bf16, &[64]), 1e-6))
            .options(Options::default().state_layout(layout))
    };
    for layout in [StateLayout::KLast, StateLayout::VLast] {
        let kind = of_ratio(1, layout).request().check().unwrap().kind;
        let Some(most) = kind.max_heads() else {
            continue;
        };
        of_ratio(most as usize, layout).request().check().unwrap();
        let step = of_ratio(2 * most as usize, layout);
        let message = step.request().check().unwrap_err().to_string();
        let wanted = format!("HV / H: wanted at most {most} with a convolution or a norm");
        assert!(message.starts_with(&wanted), "{message}");
    }
}

#[test]
fn heads_are_those_of_the_states_and_outputs() {
    let mut step = layer();
    step.o = tensor(Bf16, &[2, 1, 8, 64]);
    let message = step.request().check().unwrap_err().to_string();
    assert!(
        message.starts_with("a: wanted shape [B, T, HV] = [2, 1, 8]"),
        "{message}"
    );
    let mut step = layer();
    step.states = States::update(tensor(Bf16, &[5, 4, 64, 96])).into();
    let message = step.request().check().unwrap_err().to_string();
    assert_eq!(message, "V = 64 is not supported: 192 with K = 96");
    let mut kda = kda_layer();
    kda.o = tensor(Bf16, &[2, 1, 4, 96]);
    kda.states = States::update(tensor(Bf16, &[5, 4, 96, 96])).into();
    let message = kda.request().check().unwrap_err().to_string();
    assert_eq!(message, "K = 96 is not supported: 64 or 128 with KDA");
    step.states = States::update(tensor(Bf16, &[5, 4, 64])).into();
    let message = step.request().check().unwrap_err().to_string();
    assert_eq!(message, "pool: wanted shape [P, HV, V, K], got [5, 4, 64]");
}
