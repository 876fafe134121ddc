//! Rules of a decode.

use gated_delta::DType::{Bf16, F16, F32, I32, I64, U32};
use gated_delta::Tensor;
use gated_delta_harness::arguments::{Arguments, GateKind};

use super::{Change, FLOATS, Message, OfTensor, Rule, all, at, strided, tensor};

/// Rules for arguments with B = 2, H = 2, HV = 4, K = V = 64, P = 5, f32 states and every optional tensor.
pub fn rules() -> Vec<Rule> {
    all(tensor_rules(), OTHER_RULES)
}

/// Replaces the gates by log decays `g` and `beta` that the caller computed.
fn given(args: &mut Arguments<Tensor<'_>>, g: Tensor<'static>, beta: Tensor<'static>) {
    (args.gates, args.a_log, args.dt_bias) = (GateKind::Given, None, None);
    if let Some(new) = &mut args.new {
        (new.tokens.gate, new.tokens.beta) = (g, beta);
    }
}

/// Broken tensors: name of the tensor, its replacement, and the message.
#[rustfmt::skip]
fn tensor_rules() -> Vec<OfTensor> {
    vec![
        // Dims.
        ("q", tensor(Bf16, &[2, 2, 64]), ["q", "[B, T, H, K]", "[2, 2, 64]"]),
        ("q", tensor(Bf16, &[2, 2, 2, 64]), ["k", "[B, T, H, K] = [2, 2, 2, 64]", "got [2, 1, 2, 64]"]),
        ("q", tensor(Bf16, &[2, 0, 2, 64]), ["T = 0", "not supported: 1 to 16", ""]),
        ("q", tensor(Bf16, &[2, 1, 2, 80]), ["K = 80", "64, 96 or 128", ""]),
        ("q", tensor(Bf16, &[2, 1, 2, 96]), ["V = 64", "192 with K = 96", ""]),
        ("q", tensor(Bf16, &[2, 1, 2, 256]), ["K = 256", "64, 96 or 128", ""]),
        ("q", tensor(Bf16, &[2, 1, 2, 0]), ["K = 0", "64, 96 or 128", ""]),
        ("q", tensor(Bf16, &[2, 1, 0, 64]), ["H", "wanted 1..=65535", "got 0"]),
        ("q", tensor(Bf16, &[2, 1, 65_536, 64]), ["H", "wanted 1..=65535", "got 65536"]),
        ("q", tensor(Bf16, &[65_536, 1, 2, 64]), ["B", "at most 65535", "got 65536"]),
        ("q", tensor(Bf16, &[3, 1, 2, 64]), ["k", "[B, T, H, K] = [3, 1, 2, 64]", "got [2, 1, 2, 64]"]),
        ("k", tensor(Bf16, &[2, 1, 4, 64]), ["k", "[B, T, H, K] = [2, 1, 2, 64]", "got [2, 1, 4, 64]"]),
        ("k", tensor(Bf16, &[2, 1, 2, 128]), ["k", "[B, T, H, K] = [2, 1, 2, 64]", "got [2, 1, 2, 128]"]),
        ("k", tensor(Bf16, &[2, 2, 64]), ["k", "[B, T, H, K] = [2, 1, 2, 64]", "got [2, 2, 64]"]),
        ("v", tensor(Bf16, &[2, 4, 64]), ["v", "[B, T, HV, V]", "got [2, 4, 64]"]),
        ("v", tensor(Bf16, &[2, 1, 4, 128]), ["V = 128", "the same as K", ""]),
        ("v", tensor(Bf16, &[2, 1, 3, 64]), ["HV", "a multiple of H = 2", "got 3"]),
        ("v", tensor(Bf16, &[2, 1, 1, 64]), ["HV", "a multiple of H = 2", "got 1"]),
        ("v", tensor(Bf16, &[2, 1, 0, 64]), ["HV", "a multiple of H = 2", "got 0"]),
        ("v", tensor(Bf16, &[2, 1, 65_536, 64]), ["HV", "up to 65535", "got 65536"]),
        ("v", tensor(Bf16, &[3, 1, 4, 64]), ["v", "[B, T, HV, V] = [2, 1, 4, 64]", "got [3, 1, 4, 64]"]),
        ("v", tensor(Bf16, &[2, 2, 4, 64]), ["v", "[B, T, HV, V] = [2, 1, 4, 64]", "got [2, 2, 4, 64]"]),
        ("o", tensor(Bf16, &[2, 1, 4, 32]), ["o", "[B, T, HV, V] = [2, 1, 4, 64]", "got [2, 1, 4, 32]"]),
        ("o", tensor(Bf16, &[1, 1, 4, 64]), ["o", "[B, T, HV, V] = [2, 1, 4, 64]", "got [1, 1, 4, 64]"]),
        ("a", tensor(Bf16, &[2, 1, 2]), ["a", "[B, T, HV] = [2, 1, 4]", "got [2, 1, 2]"]),
        ("b", tensor(Bf16, &[2, 4]), ["b", "[B, T, HV] = [2, 1, 4]", "got [2, 4]"]),
        ("A_log", tensor(F32, &[2]), ["A_log", "[HV] = [4]", "got [2]"]),
        ("dt_bias", tensor(F32, &[1, 4]), ["dt_bias", "[HV] = [4]", "got [1, 4]"]),
        ("pool", tensor(F32, &[5, 4, 4096]), ["pool", "[P, HV, V, K]", "got [5, 4, 4096]"]),
        ("pool", tensor(F32, &[5, 2, 64, 64]), ["pool", "[P, HV, V, K] = [5, 4, 64, 64]", "got [5, 2, 64, 64]"]),
        ("pool", tensor(F32, &[5, 4, 64, 128]), ["pool", "[P, HV, V, K] = [5, 4, 64, 64]", "got [5, 4, 64, 128]"]),
        ("write_pool", tensor(F32, &[5, 8, 64, 64]), ["write_pool", "[P, HV, V, K] = [5, 4, 64, 64]", "got [5, 8, 64, 64]"]),
        ("pool", tensor(Bf16, &[u32::MAX as usize, 4, 64, 64]), ["P", "below 2^32 - 1", "got 4294967295"]),
        ("read_slots", tensor(I32, &[3]), ["read_slots", "[B] = [2]", "got [3]"]),
        ("write_slots", tensor(I64, &[2, 1]), ["write_slots", "[B] = [2]", "got [2, 1]"]),
        // Dtypes.
        ("q", tensor(I32, &[2, 1, 2, 64]), ["q", FLOATS, "got i32"]),
        ("k", tensor(U32, &[2, 1, 2, 64]), ["k", FLOATS, "got u32"]),
        ("v", tensor(I64, &[2, 1, 4, 64]), ["v", FLOATS, "got i64"]),
        ("o", tensor(I32, &[2, 1, 4, 64]), ["o", FLOATS, "got i32"]),
        ("a", tensor(I32, &[2, 1, 4]), ["a", FLOATS, "got i32"]),
        ("b", tensor(I64, &[2, 1, 4]), ["b", FLOATS, "got i64"]),
        ("A_log", tensor(Bf16, &[4]), ["A_log", "wanted f32", "got bf16"]),
        ("dt_bias", tensor(F16, &[4]), ["dt_bias", "wanted f32", "got f16"]),
        ("pool", tensor(I32, &[5, 4, 64, 64]), ["pool", "bf16, f16 or f32", "got i32"]),
        ("write_pool", tensor(I64, &[5, 4, 64, 64]), ["write_pool", "bf16, f16 or f32", "got i64"]),
        ("write_pool", tensor(F16, &[5, 4, 64, 64]), ["write_pool", "the dtype of pool", "got f16"]),
        ("write_pool", tensor(Bf16, &[5, 4, 64, 64]), ["write_pool", "the dtype of pool", "got bf16"]),
        ("read_slots", tensor(F32, &[2]), ["read_slots", "i32, i64 or u32", "got f32"]),
        ("write_slots", tensor(Bf16, &[2]), ["write_slots", "i32, i64 or u32", "got bf16"]),
        // Strides.
        ("q", strided(Bf16, &[2, 1, 2, 64], &[256, 256, 128, 2]), ["q", "contiguous", "got strides [256, 256, 128, 2]"]),
        ("k", strided(Bf16, &[2, 1, 2, 64], &[128, 128, 1, 2]), ["k", "contiguous", "got strides [128, 128, 1, 2]"]),
        ("v", strided(Bf16, &[2, 1, 4, 64], &[0, 0, 0, 0]), ["v", "contiguous", "got strides [0, 0, 0, 0]"]),
        ("o", strided(Bf16, &[2, 1, 4, 64], &[512, 512, 128, 2]), ["o", "contiguous", "got strides [512, 512, 128, 2]"]),
        ("o", strided(Bf16, &[2, 1, 4, 64], &[0, 0, 64, 1]), ["o", "do not overlap", "got strides [0, 0, 64, 1]"]),
        ("o", strided(Bf16, &[2, 1, 4, 64], &[255, 255, 64, 1]), ["o", "do not overlap", "got strides [255, 255, 64, 1]"]),
        ("o", strided(Bf16, &[2, 1, 4, 64], &[256, 256, 63, 1]), ["o", "do not overlap", "got strides [256, 256, 63, 1]"]),
        ("o", strided(Bf16, &[2, 1, 4, 64], &[64, 64, 127, 1]), ["o", "do not overlap", "got strides [64, 64, 127, 1]"]),
        ("a", strided(Bf16, &[2, 1, 4], &[8, 8, 2]), ["a", "contiguous", "got strides [8, 8, 2]"]),
        ("b", strided(Bf16, &[2, 1, 4], &[1, 1, 2]), ["b", "contiguous", "got strides [1, 1, 2]"]),
        ("A_log", strided(F32, &[4], &[2]), ["A_log", "contiguous", "got strides [2]"]),
        ("dt_bias", strided(F32, &[4], &[0]), ["dt_bias", "contiguous", "got strides [0]"]),
        ("pool", strided(F32, &[5, 4, 64, 64], &[16384, 4096, 1, 64]), ["pool", "contiguous slots", "got strides [16384, 4096, 1, 64]"]),
        ("pool", strided(F32, &[5, 4, 64, 64], &[20480, 5120, 64, 1]), ["pool", "contiguous slots", "got strides [20480, 5120, 64, 1]"]),
        ("pool", strided(F32, &[5, 4, 64, 64], &[16383, 4096, 64, 1]), ["pool", "slots that do not overlap", "got strides [16383, 4096, 64, 1]"]),
        ("write_pool", strided(F32, &[5, 4, 64, 64], &[0, 4096, 64, 1]), ["write_pool", "slots that do not overlap", "got strides [0, 4096, 64, 1]"]),
        ("read_slots", strided(I32, &[2], &[2]), ["read_slots", "contiguous", "got strides [2]"]),
        ("write_slots", strided(I64, &[2], &[0]), ["write_slots", "contiguous", "got strides [0]"]),
        ("q", strided(Bf16, &[2, 1, 2, 64], &[1 << 32, 128, 64, 1]), ["q", "below 2^32 elements", "got strides [4294967296, 128, 64, 1]"]),
        ("k", strided(Bf16, &[2, 1, 2, 64], &[128, 128, 1 << 32, 1]), ["k", "less than 2^32 elements", "got strides [128, 128, 4294967296, 1]"]),
        ("v", strided(Bf16, &[2, 1, 4, 64], &[256, 256, 1 << 31, 1]), ["v", "less than 2^32 elements", "got strides [256, 256, 2147483648, 1]"]),
        ("pool", strided(F32, &[5, 4, 64, 64], &[1 << 32, 4096, 64, 1]), ["pool", "below 2^32 elements", "got strides [4294967296, 4096, 64, 1]"]),
        ("a", strided(Bf16, &[2, 1, 4], &[1 << 32, 4, 1]), ["a", "below 2^32 elements", "got strides [4294967296, 4, 1]"]),
        // Alignment.
        ("q", at(0x1_0001, Bf16, &[2, 1, 2, 64]), ["q", "alignment of 2 bytes", "got 1"]),
        ("k", at(0x1_0002, F32, &[2, 1, 2, 64]), ["k", "alignment of 4 bytes", "got 2"]),
        ("v", at(0x1_0003, F16, &[2, 1, 4, 64]), ["v", "alignment of 2 bytes", "got 1"]),
        ("o", at(0x1_0001, Bf16, &[2, 1, 4, 64]), ["o", "alignment of 2 bytes", "got 1"]),
        ("a", at(0x1_0001, Bf16, &[2, 1, 4]), ["a", "alignment of 2 bytes", "got 1"]),
        ("b", at(0x1_0002, F32, &[2, 1, 4]), ["b", "alignment of 4 bytes", "got 2"]),
        ("A_log", at(0x1_0002, F32, &[4]), ["A_log", "alignment of 4 bytes", "got 2"]),
        ("dt_bias", at(0x1_0001, F32, &[4]), ["dt_bias", "alignment of 4 bytes", "got 1"]),
        ("pool", at(0x1_0002, F32, &[5, 4, 64, 64]), ["pool", "alignment of 4 bytes", "got 2"]),
        ("write_pool", at(0x1_0001, F32, &[5, 4, 64, 64]), ["write_pool", "alignment of 4 bytes", "got 1"]),
        ("read_slots", at(0x1_0002, U32, &[2]), ["read_slots", "alignment of 4 bytes", "got 2"]),
        ("write_slots", at(0x1_0004, I64, &[2]), ["write_slots", "alignment of 8 bytes", "got 4"]),
    ]
}

/// Other broken rules: the change of the arguments, and the message.
#[rustfmt::skip]
const OTHER_RULES: &[(Change, Message)] = &[
    (|args| given(args, tensor(F32, &[2, 1, 4, 64]), tensor(F32, &[2, 1, 4])), ["g", "[B, T, HV] = [2, 1, 4]", "got [2, 1, 4, 64]"]),
    (|args| given(args, tensor(F32, &[2, 1, 4]), tensor(F32, &[2, 4, 1])), ["beta", "[B, T, HV] = [2, 1, 4]", "got [2, 4, 1]"]),
    (|args| (args.read_slots, args.pool) = (None, tensor(F32, &[1, 4, 64, 64])), ["B without read_slots", "at most P = 1", "got 2"]),
    (|args| (args.update_state, args.write_pool) = (false, None), ["update_state = false and write_slots exclude each other", "no state is written", ""]),
    (|args| (args.update_state, args.write_slots) = (false, None), ["update_state = false and write_pool exclude each other", "no state is written", ""]),
    (|args| args.options.scale = Some(f32::NAN), ["scale", "a finite number", "got NaN"]),
    (|args| args.options.scale = Some(f32::INFINITY), ["scale", "a finite number", "got inf"]),
    (|args| args.options.null_slot = Some(u32::MAX), ["null_slot", "below 2^32 - 1", "got 4294967295"]),
];
