//! Rules of KDA that GDN does not have.

use gated_delta::DType::{Bf16, F16, F32, I32};
use gated_delta::{Formulation, Tensor};
use gated_delta_harness::arguments::{Arguments, DecayKind, GateKind};

use super::{Change, FLOATS, Message, OfTensor, Rule, all, at, strided, tensor};

fn with_bound(args: &mut Arguments<Tensor<'_>>, lower_bound: f32) {
    if let GateKind::Kda(decay, _) = &mut args.gates {
        *decay = DecayKind::LowerBound(lower_bound);
    }
    (args.a_log, args.dt_bias) = (None, None);
}

/// Rules for B = 2, T = 3, T' = 2, H = 2, HV = 4, K = V = 64, P = 5, f32 states, softplus gates with dt_bias.
pub fn rules() -> Vec<Rule> {
    #[rustfmt::skip]
    let tensors: Vec<OfTensor> = vec![
        ("g", tensor(Bf16, &[2, 3, 4]), ["g", "[B, T, HV, K] = [2, 3, 4, 64]", "got [2, 3, 4]"]),
        ("g", tensor(Bf16, &[2, 3, 2, 64]), ["g", "[B, T, HV, K] = [2, 3, 4, 64]", "got [2, 3, 2, 64]"]),
        ("g", tensor(I32, &[2, 3, 4, 64]), ["g", FLOATS, "got i32"]),
        ("g", strided(Bf16, &[2, 3, 4, 64], &[1536, 512, 128, 2]), ["g", "contiguous", "got strides [1536, 512, 128, 2]"]),
        ("g", strided(Bf16, &[2, 3, 4, 64], &[768, 256, 1 << 32, 1]), ["g", "less than 2^32 elements", "got strides [768, 256, 4294967296, 1]"]),
        ("g", at(0x1_0001, F16, &[2, 3, 4, 64]), ["g", "alignment of 2 bytes", "got 1"]),
        ("beta", tensor(Bf16, &[2, 3, 4, 64]), ["beta", "[B, T, HV] = [2, 3, 4]", "got [2, 3, 4, 64]"]),
        ("beta", tensor(I32, &[2, 3, 4]), ["beta", FLOATS, "got i32"]),
        ("A_log", tensor(F32, &[3]), ["A_log", "[H or HV] = [4]", "got [3]"]),
        ("A_log", tensor(F32, &[4, 64]), ["A_log", "[H or HV] = [4]", "got [4, 64]"]),
        ("A_log", tensor(F32, &[2]), ["dt_bias", "[rows of A_log, K] = [2, 64]", "got [4, 64]"]),
        ("A_log", tensor(F16, &[4]), ["A_log", "wanted f32", "got f16"]),
        ("dt_bias", tensor(F32, &[4]), ["dt_bias", "[rows of A_log, K] = [4, 64]", "got [4]"]),
        ("dt_bias", tensor(F32, &[2, 64]), ["dt_bias", "[rows of A_log, K] = [4, 64]", "got [2, 64]"]),
        ("dt_bias", tensor(Bf16, &[4, 64]), ["dt_bias", "wanted f32", "got bf16"]),
        ("dt_bias", strided(F32, &[4, 64], &[65, 1]), ["dt_bias", "contiguous", "got strides [65, 1]"]),
        ("dt_bias", at(0x1_0002, F32, &[4, 64]), ["dt_bias", "alignment of 4 bytes", "got 2"]),
        ("previous g", tensor(Bf16, &[2, 2, 4]), ["previous g", "[B, T', HV, K] = [2, 2, 4, 64]", "got [2, 2, 4]"]),
        ("previous g", tensor(F32, &[2, 2, 4, 64]), ["previous g", "the dtype of the new gates", "got f32"]),
        ("previous beta", tensor(Bf16, &[2, 3, 4]), ["previous beta", "[B, T', HV] = [2, 2, 4]", "got [2, 3, 4]"]),
        ("previous k", tensor(Bf16, &[2, 17, 2, 64]), ["T' = 17", "not supported: 1 to 16", ""]),
        ("q", tensor(Bf16, &[2, 17, 2, 64]), ["T = 17", "not supported: 1 to 16", ""]),
        ("pool", tensor(F32, &[5, 2, 64, 64]), ["pool", "[P, HV, V, K] = [5, 4, 64, 64]", "got [5, 2, 64, 64]"]),
    ];
    #[rustfmt::skip]
    const CHANGES: &[(Change, Message)] = &[
        (|args| with_bound(args, 0.0), ["lower_bound", "a finite number below 0", "got 0"]),
        (|args| with_bound(args, 1.5), ["lower_bound", "a finite number below 0", "got 1.5"]),
        (|args| with_bound(args, f32::NAN), ["lower_bound", "a finite number below 0", "got NaN"]),
        (|args| with_bound(args, f32::NEG_INFINITY), ["lower_bound", "a finite number below 0", "got -inf"]),
        (|args| { with_bound(args, -5.0); args.dt_bias = Some(tensor(F32, &[3, 64])) }, ["dt_bias", "[H or HV, K] = [4, 64]", "got [3, 64]"]),
        (|args| args.options.formulation = Formulation::Parallel, ["K = 64 is not supported", "128 with KDA and formulation = parallel", ""]),
        (|args| args.update_state = false, ["previous and update_state = false exclude each other", "the state after the kept tokens is written", ""]),
    ];
    all(tensors, CHANGES)
}

/// Rules for a commit with T' = 2 and the same other sizes.
pub fn of_commit() -> Vec<Rule> {
    #[rustfmt::skip]
    let tensors: Vec<OfTensor> = vec![
        ("k", tensor(Bf16, &[2, 17, 2, 64]), ["T' = 17", "not supported: 1 to 16", ""]),
        ("g", tensor(Bf16, &[2, 2, 4]), ["g", "[B, T', HV, K] = [2, 2, 4, 64]", "got [2, 2, 4]"]),
        ("beta", tensor(Bf16, &[2, 4]), ["beta", "[B, T', HV] = [2, 2, 4]", "got [2, 4]"]),
        ("dt_bias", tensor(F32, &[4, 32]), ["dt_bias", "[rows of A_log, K] = [4, 64]", "got [4, 32]"]),
        ("keep", tensor(I32, &[1]), ["keep", "[B] = [2]", "got [1]"]),
    ];
    all(tensors, &[])
}
