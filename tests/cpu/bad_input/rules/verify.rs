//! Rules of a GDN verify, a resume and a commit that a decode does not have.

use gated_delta::DType::{Bf16, F16, F32, I32, I64, U32};
use gated_delta::Formulation;
use gated_delta::Tensor;
use gated_delta_harness::arguments::{Kept, Packed, Tokens};

use super::{Change, FLOATS, Message, OfTensor, Rule, all, at, strided, tensor};

/// Rules for B = 2, T = 3, H = 2, HV = 4, K = V = 64, P = 5, f32 states, snapshots of 4 steps, slots and a write pool.
pub fn of_snapshots() -> Vec<Rule> {
    #[rustfmt::skip]
    let tensors: Vec<OfTensor> = vec![
        ("q", tensor(Bf16, &[2, 3, 64]), ["q", "[B, T, H, K]", "[2, 3, 64]"]),
        ("q", tensor(Bf16, &[2, 17, 2, 64]), ["T = 17", "not supported: 1 to 16", ""]),
        ("q", tensor(Bf16, &[2, 0, 2, 64]), ["T = 0", "not supported: 1 to 16", ""]),
        ("q", tensor(Bf16, &[2, 3, 2, 80]), ["K = 80", "64, 96 or 128", ""]),
        ("q", tensor(Bf16, &[2, 3, 2, 96]), ["V = 64", "192 with K = 96", ""]),
        ("q", tensor(Bf16, &[2, 3, 65_536, 64]), ["H", "wanted 1..=65535", "got 65536"]),
        ("q", tensor(Bf16, &[65_536, 3, 2, 64]), ["B", "at most 65535", "got 65536"]),
        ("q", tensor(Bf16, &[3, 3, 2, 64]), ["k", "[B, T, H, K] = [3, 3, 2, 64]", "got [2, 3, 2, 64]"]),
        ("q", tensor(Bf16, &[2, 4, 2, 64]), ["k", "[B, T, H, K] = [2, 4, 2, 64]", "got [2, 3, 2, 64]"]),
        ("k", tensor(Bf16, &[2, 3, 4, 64]), ["k", "[B, T, H, K] = [2, 3, 2, 64]", "got [2, 3, 4, 64]"]),
        ("v", tensor(Bf16, &[2, 3, 4]), ["v", "[B, T, HV, V]", "got [2, 3, 4]"]),
        ("v", tensor(Bf16, &[2, 3, 4, 128]), ["V = 128", "the same as K", ""]),
        ("v", tensor(Bf16, &[2, 3, 3, 64]), ["HV", "a multiple of H = 2", "got 3"]),
        ("v", tensor(Bf16, &[2, 2, 4, 64]), ["v", "[B, T, HV, V] = [2, 3, 4, 64]", "got [2, 2, 4, 64]"]),
        ("o", tensor(Bf16, &[2, 4, 4, 64]), ["o", "[B, T, HV, V] = [2, 3, 4, 64]", "got [2, 4, 4, 64]"]),
        ("a", tensor(Bf16, &[2, 3, 2]), ["a", "[B, T, HV] = [2, 3, 4]", "got [2, 3, 2]"]),
        ("b", tensor(Bf16, &[6, 4]), ["b", "[B, T, HV] = [2, 3, 4]", "got [6, 4]"]),
        ("A_log", tensor(F32, &[2]), ["A_log", "[HV] = [4]", "got [2]"]),
        ("dt_bias", tensor(F32, &[4, 64]), ["dt_bias", "[HV] = [4]", "got [4, 64]"]),
        ("pool", tensor(F32, &[5, 2, 64, 64]), ["pool", "[P, HV, V, K] = [5, 4, 64, 64]", "got [5, 2, 64, 64]"]),
        ("write_pool", tensor(Bf16, &[5, 4, 64, 64]), ["write_pool", "the dtype of pool", "got bf16"]),
        ("read_slots", tensor(I32, &[2, 3]), ["read_slots", "[B] = [2]", "got [2, 3]"]),
        ("write_slots", tensor(I32, &[3]), ["write_slots", "[B] = [2]", "got [3]"]),
        ("snapshots", tensor(F32, &[2, 4, 4, 64]), ["snapshots", "[B, steps, HV, V, K]", "got [2, 4, 4, 64]"]),
        ("snapshots", tensor(F32, &[2, 2, 4, 64, 64]), ["steps of snapshots", "at least T = 3", "got 2"]),
        ("snapshots", tensor(F32, &[3, 4, 4, 64, 64]), ["snapshots", "[B, steps, HV, V, K] = [2, 4, 4, 64, 64]", "got [3, 4, 4, 64, 64]"]),
        ("snapshots", tensor(F32, &[2, 4, 4, 64, 128]), ["snapshots", "[B, steps, HV, V, K] = [2, 4, 4, 64, 64]", "got [2, 4, 4, 64, 128]"]),
        ("q", tensor(I32, &[2, 3, 2, 64]), ["q", FLOATS, "got i32"]),
        ("o", tensor(U32, &[2, 3, 4, 64]), ["o", FLOATS, "got u32"]),
        ("a", tensor(I64, &[2, 3, 4]), ["a", FLOATS, "got i64"]),
        ("A_log", tensor(Bf16, &[4]), ["A_log", "wanted f32", "got bf16"]),
        ("pool", tensor(I32, &[5, 4, 64, 64]), ["pool", "bf16, f16 or f32", "got i32"]),
        ("snapshots", tensor(Bf16, &[2, 4, 4, 64, 64]), ["snapshots", "the dtype of pool", "got bf16"]),
        ("read_slots", tensor(F32, &[2]), ["read_slots", "i32, i64 or u32", "got f32"]),
        ("q", strided(Bf16, &[2, 3, 2, 64], &[768, 256, 128, 2]), ["q", "contiguous", "got strides [768, 256, 128, 2]"]),
        ("o", strided(Bf16, &[2, 3, 4, 64], &[768, 0, 64, 1]), ["o", "do not overlap", "got strides [768, 0, 64, 1]"]),
        ("o", strided(Bf16, &[2, 3, 4, 64], &[512, 256, 64, 1]), ["o", "do not overlap", "got strides [512, 256, 64, 1]"]),
        ("k", strided(Bf16, &[2, 3, 2, 64], &[0, 1 << 32, 64, 1]), ["k", "a token stride below 2^32 elements", "got strides [0, 4294967296, 64, 1]"]),
        ("v", strided(Bf16, &[2, 3, 4, 64], &[1 << 32, 256, 64, 1]), ["v", "below 2^32 elements", "got strides [4294967296, 256, 64, 1]"]),
        ("a", strided(Bf16, &[2, 3, 4], &[24, 8, 2]), ["a", "contiguous", "got strides [24, 8, 2]"]),
        ("snapshots", strided(F32, &[2, 4, 4, 64, 64], &[65_536, 16_384, 4096, 1, 64]), ["snapshots", "contiguous states", "got strides [65536, 16384, 4096, 1, 64]"]),
        ("snapshots", strided(F32, &[2, 4, 4, 64, 64], &[65_536, 16_383, 4096, 64, 1]), ["snapshots", "states that do not overlap", "got strides [65536, 16383, 4096, 64, 1]"]),
        ("snapshots", strided(F32, &[2, 4, 4, 64, 64], &[16_384, 16_384, 4096, 64, 1]), ["snapshots", "states that do not overlap", "got strides [16384, 16384, 4096, 64, 1]"]),
        ("snapshots", strided(F32, &[2, 4, 4, 64, 64], &[65_536, 1 << 32, 4096, 64, 1]), ["snapshots", "below 2^32 elements", "got strides [65536, 4294967296, 4096, 64, 1]"]),
        ("q", at(0x1_0001, Bf16, &[2, 3, 2, 64]), ["q", "alignment of 2 bytes", "got 1"]),
        ("snapshots", at(0x1_0002, F32, &[2, 4, 4, 64, 64]), ["snapshots", "alignment of 4 bytes", "got 2"]),
    ];
    #[rustfmt::skip]
    const CHANGES: &[(Change, Message)] = &[
        (|args| args.accepted = Some(tensor(I32, &[2])), ["token_slots is missing", "accepted tokens need it", ""]),
        (|args| args.token_slots = Some(tensor(I32, &[2, 3])), ["token_slots and read_slots exclude each other", "they say where states start", ""]),
        (|args| (args.token_slots, args.read_slots) = (Some(tensor(I32, &[2, 3])), None), ["token_slots and write_slots exclude each other", "where each of them goes", ""]),
        (|args| args.update_state = false, ["update_state = false and write_slots exclude each other", "no state is written", ""]),
        (|args| (args.update_state, args.write_slots) = (false, None), ["update_state = false and write_pool exclude each other", "no state is written", ""]),
        (|args| args.previous = Some(previous()), ["previous and snapshots exclude each other", "no other", ""]),
        (|args| args.options.formulation = Formulation::Parallel, ["formulation = parallel and snapshots exclude each other", "no state after each token", ""]),
        (|args| (args.read_slots, args.pool) = (None, tensor(F32, &[1, 4, 64, 64])), ["B without read_slots", "at most P = 1", "got 2"]),
        (|args| args.options.scale = Some(f32::NAN), ["scale", "a finite number", "got NaN"]),
        (|args| args.options.null_slot = Some(u32::MAX), ["null_slot", "below 2^32 - 1", "got 4294967295"]),
    ];
    all(tensors, CHANGES)
}

/// Previous tokens whose dims match the other arguments.
fn previous() -> Kept<Tensor<'static>> {
    Kept {
        tokens: Tokens {
            k: tensor(Bf16, &[2, 2, 2, 64]),
            v: tensor(Bf16, &[2, 2, 4, 64]),
            gate: tensor(Bf16, &[2, 2, 4]),
            beta: tensor(Bf16, &[2, 2, 4]),
        },
        keep: tensor(I32, &[2]),
    }
}

/// Rules for `[1, 6, …]` of two packed rows of up to 3 tokens, with token slots and accepted tokens. Other sizes as in
/// `of_snapshots`.
pub fn of_token_slots() -> Vec<Rule> {
    #[rustfmt::skip]
    let tensors: Vec<OfTensor> = vec![
        ("q", tensor(Bf16, &[6, 2, 64]), ["q", "[1, total, H, K]", "got [6, 2, 64]"]),
        ("q", tensor(Bf16, &[2, 6, 2, 64]), ["q", "[1, total, H, K] = [1, 6, 2, 64]", "got [2, 6, 2, 64]"]),
        ("k", tensor(Bf16, &[1, 5, 2, 64]), ["k", "[1, total, H, K] = [1, 6, 2, 64]", "got [1, 5, 2, 64]"]),
        ("a", tensor(Bf16, &[1, 6, 2]), ["a", "[1, total, HV] = [1, 6, 4]", "got [1, 6, 2]"]),
        ("o", tensor(Bf16, &[2, 3, 4, 64]), ["o", "[1, total, HV, V] = [1, 6, 4, 64]", "got [2, 3, 4, 64]"]),
        ("cu_seqlens", tensor(I32, &[3, 1]), ["cu_seqlens", "[B + 1]", "got [3, 1]"]),
        ("cu_seqlens", tensor(I32, &[0]), ["elements of cu_seqlens", "B + 1, at least 1", "got 0"]),
        ("cu_seqlens", tensor(I32, &[4]), ["accepted", "[B] = [3]", "got [2]"]),
        ("cu_seqlens", tensor(F32, &[3]), ["cu_seqlens", "i32, i64 or u32", "got f32"]),
        ("cu_seqlens", strided(I32, &[3], &[2]), ["cu_seqlens", "contiguous", "got strides [2]"]),
        ("cu_seqlens", at(0x1_0004, I64, &[3]), ["cu_seqlens", "alignment of 8 bytes", "got 4"]),
        ("token_slots", tensor(I32, &[2, 2]), ["token_slots", "[B, T] = [2, 3]", "got [2, 2]"]),
        ("token_slots", tensor(I32, &[6]), ["token_slots", "[B, T] = [2, 3]", "got [6]"]),
        ("token_slots", tensor(Bf16, &[2, 3]), ["token_slots", "i32, i64 or u32", "got bf16"]),
        ("token_slots", strided(I32, &[2, 3], &[1, 2]), ["token_slots", "contiguous", "got strides [1, 2]"]),
        ("token_slots", strided(I32, &[2, 3], &[1 << 32, 1]), ["token_slots", "below 2^32 elements", "got strides [4294967296, 1]"]),
        ("token_slots", at(0x1_0002, U32, &[2, 3]), ["token_slots", "alignment of 4 bytes", "got 2"]),
        ("accepted", tensor(I32, &[2, 1]), ["accepted", "[B] = [2]", "got [2, 1]"]),
        ("accepted", tensor(F16, &[2]), ["accepted", "i32, i64 or u32", "got f16"]),
        ("accepted", at(0x1_0002, I32, &[2]), ["accepted", "alignment of 4 bytes", "got 2"]),
    ];
    #[rustfmt::skip]
    const CHANGES: &[(Change, Message)] = &[
        (|args| args.packed = Some(Packed { cu_seqlens: tensor(I32, &[3]), max_tokens: 17 }), ["T = 17", "not supported: 1 to 16", ""]),
        (|args| args.packed = Some(Packed { cu_seqlens: tensor(I32, &[3]), max_tokens: 0 }), ["T = 0", "not supported: 1 to 16", ""]),
        (|args| args.packed = Some(Packed { cu_seqlens: tensor(I32, &[3]), max_tokens: 4 }), ["token_slots", "[B, T] = [2, 4]", "got [2, 3]"]),
        (|args| args.token_slots = None, ["token_slots is missing", "accepted tokens need it", ""]),
        (|args| args.read_slots = Some(tensor(I32, &[2])), ["token_slots and read_slots exclude each other", "they say where states start", ""]),
        (|args| args.write_slots = Some(tensor(I32, &[2])), ["token_slots and write_slots exclude each other", "where each of them goes", ""]),
        (|args| args.previous = Some(previous()), ["token_slots and previous exclude each other", "where each of them goes", ""]),
        (|args| args.update_state = false, ["token_slots and update_state = false exclude each other", "where each of them goes", ""]),
        (|args| args.options.formulation = Formulation::Parallel, ["formulation = parallel and token_slots exclude each other", "no state after each token", ""]),
    ];
    all(tensors, CHANGES)
}

/// Rules for two rows of 3 tokens after 9 previous ones, with bf16 states. Other sizes as in `of_snapshots`.
pub fn of_previous() -> Vec<Rule> {
    #[rustfmt::skip]
    let tensors: Vec<OfTensor> = vec![
        ("previous k", tensor(Bf16, &[2, 9, 64]), ["previous k", "[B, T', H, K]", "got [2, 9, 64]"]),
        ("previous k", tensor(Bf16, &[2, 17, 2, 64]), ["T' = 17", "not supported: 1 to 16", ""]),
        ("previous k", tensor(Bf16, &[2, 0, 2, 64]), ["T' = 0", "not supported: 1 to 16", ""]),
        ("previous k", tensor(Bf16, &[3, 9, 2, 64]), ["previous k", "[B, T', H, K] = [2, 9, 2, 64]", "got [3, 9, 2, 64]"]),
        ("previous k", tensor(Bf16, &[2, 9, 4, 64]), ["previous k", "[B, T', H, K] = [2, 9, 2, 64]", "got [2, 9, 4, 64]"]),
        ("previous k", tensor(F32, &[2, 9, 2, 64]), ["previous k", "the dtype of k", "got f32"]),
        ("previous k", strided(Bf16, &[2, 9, 2, 64], &[1152, 1 << 32, 64, 1]), ["previous k", "a token stride below 2^32 elements", "got strides [1152, 4294967296, 64, 1]"]),
        ("previous k", at(0x1_0001, Bf16, &[2, 9, 2, 64]), ["previous k", "alignment of 2 bytes", "got 1"]),
        ("previous v", tensor(Bf16, &[2, 9, 256]), ["previous v", "[B, T', HV, V]", "got [2, 9, 256]"]),
        ("previous v", tensor(Bf16, &[2, 8, 4, 64]), ["previous v", "[B, T', HV, V] = [2, 9, 4, 64]", "got [2, 8, 4, 64]"]),
        ("previous v", tensor(F16, &[2, 9, 4, 64]), ["previous v", "the dtype of v", "got f16"]),
        ("previous v", strided(Bf16, &[2, 9, 4, 64], &[4608, 512, 128, 2]), ["previous v", "contiguous", "got strides [4608, 512, 128, 2]"]),
        ("previous a", tensor(Bf16, &[2, 9, 2]), ["previous a", "[B, T', HV] = [2, 9, 4]", "got [2, 9, 2]"]),
        ("previous a", tensor(F32, &[2, 9, 4]), ["previous a", "the dtype of the new gates", "got f32"]),
        ("previous b", tensor(Bf16, &[2, 3, 4]), ["previous b", "[B, T', HV] = [2, 9, 4]", "got [2, 3, 4]"]),
        ("previous b", tensor(F32, &[2, 9, 4]), ["previous b", "the dtype of the new gates", "got f32"]),
        ("keep", tensor(I32, &[3]), ["keep", "[B] = [2]", "got [3]"]),
        ("keep", tensor(F32, &[2]), ["keep", "i32, i64 or u32", "got f32"]),
        ("keep", strided(I32, &[2], &[0]), ["keep", "contiguous", "got strides [0]"]),
        ("keep", at(0x1_0001, I32, &[2]), ["keep", "alignment of 4 bytes", "got 1"]),
    ];
    #[rustfmt::skip]
    const CHANGES: &[(Change, Message)] = &[
        (|args| args.snapshots = Some(tensor(Bf16, &[2, 3, 4, 64, 64])), ["previous and snapshots exclude each other", "no other", ""]),
        (|args| args.update_state = false, ["previous and update_state = false exclude each other", "the state after the kept tokens is written", ""]),
        (|args| { args.options.formulation = Formulation::Parallel; args.previous.iter_mut().for_each(|previous| previous.tokens.k = tensor(Bf16, &[2, 17, 2, 64])) }, ["T' of the parallel formulation = 17", "not supported: 1 to 16", ""]),
        (|args| { args.options.formulation = Formulation::Parallel; args.new.iter_mut().for_each(|new| new.q = tensor(Bf16, &[2, 17, 2, 64])) }, ["T of the parallel formulation = 17", "not supported: 1 to 16", ""]),
    ];
    all(tensors, CHANGES)
}

/// Rules for a commit of two rows of 9 tokens with slots, a write pool and f32 states.
pub fn of_commit() -> Vec<Rule> {
    #[rustfmt::skip]
    let tensors: Vec<OfTensor> = vec![
        ("k", tensor(Bf16, &[2, 9, 128]), ["k", "[B, T', H, K]", "got [2, 9, 128]"]),
        ("k", tensor(Bf16, &[2, 17, 2, 64]), ["T' = 17", "not supported: 1 to 16", ""]),
        ("k", tensor(Bf16, &[2, 0, 2, 64]), ["T' = 0", "not supported: 1 to 16", ""]),
        ("k", tensor(Bf16, &[2, 9, 2, 32]), ["K = 32", "64, 96 or 128", ""]),
        ("k", tensor(Bf16, &[2, 9, 3, 64]), ["HV", "a multiple of H = 3", "got 4"]),
        ("k", tensor(I32, &[2, 9, 2, 64]), ["k", FLOATS, "got i32"]),
        ("v", tensor(Bf16, &[3, 9, 4, 64]), ["v", "[B, T', HV, V] = [2, 9, 4, 64]", "got [3, 9, 4, 64]"]),
        ("a", tensor(Bf16, &[2, 8, 4]), ["a", "[B, T', HV] = [2, 9, 4]", "got [2, 8, 4]"]),
        ("b", tensor(Bf16, &[2, 9]), ["b", "[B, T', HV] = [2, 9, 4]", "got [2, 9]"]),
        ("A_log", tensor(F32, &[1]), ["A_log", "[HV] = [4]", "got [1]"]),
        ("keep", tensor(I32, &[2, 9]), ["keep", "[B] = [2]", "got [2, 9]"]),
        ("keep", tensor(F32, &[2]), ["keep", "i32, i64 or u32", "got f32"]),
        ("pool", tensor(F32, &[5, 4, 64, 32]), ["pool", "[P, HV, V, K] = [5, 4, 64, 64]", "got [5, 4, 64, 32]"]),
        ("write_pool", tensor(Bf16, &[5, 4, 64, 64]), ["write_pool", "the dtype of pool", "got bf16"]),
        ("read_slots", tensor(I32, &[9]), ["read_slots", "[B] = [2]", "got [9]"]),
        ("write_slots", tensor(F32, &[2]), ["write_slots", "i32, i64 or u32", "got f32"]),
    ];
    #[rustfmt::skip]
    const CHANGES: &[(Change, Message)] = &[
        (|args| args.update_state = false, ["a commit and update_state = false exclude each other", "the state after the kept tokens is written", ""]),
        (|args| { args.options.formulation = Formulation::Parallel; args.previous.iter_mut().for_each(|kept| kept.tokens.k = tensor(Bf16, &[2, 17, 2, 64])) }, ["T' of the parallel formulation = 17", "not supported: 1 to 16", ""]),
        (|args| args.options.null_slot = Some(u32::MAX), ["null_slot", "below 2^32 - 1", "got 4294967295"]),
    ];
    all(tensors, CHANGES)
}
