use super::*;
use crate::ops::GdnGates;
use crate::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use crate::ops::gdn_mtp::{GdnCommit, GdnMtp};
use crate::ops::recurrent::{Packed, Previous, RecurrentOptions};
use crate::tensor::{DeviceElement, Tensor};

const ROWS: usize = 3;
const TOKENS: usize = 2;
const SLOTS: usize = 6;
const DIM: usize = 64;

fn tensor<T: DeviceElement>(values: Vec<T>, dims: &[usize]) -> Tensor<'static> {
    Tensor::from_slice_mut(values.leak(), dims).unwrap()
}

fn floats(dims: &[usize]) -> Tensor<'static> {
    tensor(vec![0.0f32; dims.iter().product()], dims)
}

fn ints(values: &[i32]) -> Tensor<'static> {
    tensor(values.to_vec(), &[values.len()])
}

fn pool() -> Tensor<'static> {
    floats(&[SLOTS, 1, DIM, DIM])
}

fn decode() -> GdnDecode<'static> {
    let tokens = floats(&[ROWS, 1, 1, DIM]);
    let gate = floats(&[ROWS, 1, 1]);
    GdnDecode {
        q: tokens,
        k: tokens,
        v: tokens,
        gates: GdnGates::Given {
            g: gate,
            beta: gate,
        },
        o: tokens,
        pool: pool(),
        write_pool: None,
        read_slots: None,
        write_slots: None,
        options: GdnDecodeOptions::default(),
    }
}

fn verify() -> GdnMtp<'static> {
    let tokens = floats(&[ROWS, TOKENS, 1, DIM]);
    let gate = floats(&[ROWS, TOKENS, 1]);
    GdnMtp {
        q: tokens,
        k: tokens,
        v: tokens,
        gates: GdnGates::Given {
            g: gate,
            beta: gate,
        },
        o: tokens,
        pool: pool(),
        write_pool: None,
        read_slots: None,
        write_slots: None,
        token_slots: None,
        accepted: None,
        snapshots: None,
        packed: None,
        previous: None,
        options: RecurrentOptions::default(),
    }
}

fn packed(bounds: &[i32]) -> GdnMtp<'static> {
    let tokens = floats(&[1, 5, 1, DIM]);
    let gate = floats(&[1, 5, 1]);
    GdnMtp {
        q: tokens,
        k: tokens,
        v: tokens,
        gates: GdnGates::Given {
            g: gate,
            beta: gate,
        },
        o: tokens,
        packed: Some(Packed {
            cu_seqlens: ints(bounds),
            max_tokens: TOKENS,
        }),
        ..verify()
    }
}

fn resume(keep: &[i32]) -> GdnMtp<'static> {
    let tokens = floats(&[ROWS, TOKENS, 1, DIM]);
    let gate = floats(&[ROWS, TOKENS, 1]);
    GdnMtp {
        previous: Some(Previous {
            k: tokens,
            v: tokens,
            gate,
            beta: gate,
            keep: ints(keep),
        }),
        ..verify()
    }
}

fn token_slots(slots: [i32; ROWS * TOKENS]) -> GdnMtp<'static> {
    GdnMtp {
        token_slots: Some(tensor(slots.to_vec(), &[ROWS, TOKENS])),
        ..verify()
    }
}

fn validate(args: &impl Indexed) -> Result<IndexReport, Error> {
    Library::simulator().validate(StreamRef::default_stream(), args)
}

#[track_caller]
fn refused(args: &impl Indexed, message: &str) {
    assert_eq!(validate(args).unwrap_err().to_string(), message);
}

/// (active, inactive as row, tensor and index)
#[track_caller]
fn accepted(args: &impl Indexed, active: usize, inactive: &[(usize, &str, i64)]) -> IndexReport {
    let report = validate(args).unwrap();
    let got: Vec<_> = report
        .inactive
        .iter()
        .map(|row| (row.row, row.tensor, row.index))
        .collect();
    assert_eq!((report.active, &got[..]), (active, inactive));
    assert_eq!(report.rows, active + inactive.len() + report.empty);
    report
}

#[test]
fn rows_without_slots_have_their_own() {
    accepted(&decode(), 3, &[]);
    accepted(&verify(), 3, &[]);
    let mut null = decode();
    null.options.null_slot = Some(1);
    accepted(&null, 2, &[(1, "row", 1)]);
}

#[test]
fn dead_slots_are_reported() {
    let slots = |read: &[i32], write: &[i32]| GdnDecode {
        read_slots: Some(ints(read)),
        write_slots: Some(ints(write)),
        ..decode()
    };
    let args = slots(&[4, -1, 6], &[0, 1, 2]);
    let report = accepted(&args, 1, &[(1, "read_slots", -1), (2, "read_slots", 6)]);
    assert_eq!(
        report.inactive[1].to_string(),
        "row 2 is inactive: read_slots = 6"
    );
    accepted(
        &slots(&[4, 0, 5], &[0, 7, i32::MIN]),
        1,
        &[(1, "write_slots", 7), (2, "write_slots", i32::MIN.into())],
    );
    let unsigned = GdnDecode {
        read_slots: Some(tensor(vec![u32::MAX, 1, 2], &[3])),
        ..decode()
    };
    accepted(&unsigned, 2, &[(0, "read_slots", u32::MAX.into())]);
    let long = GdnDecode {
        read_slots: Some(tensor(vec![1i64 << 32, i64::MIN, 2], &[3])),
        ..decode()
    };
    accepted(
        &long,
        1,
        &[(0, "read_slots", 1 << 32), (1, "read_slots", i64::MIN)],
    );
    let small_pool = GdnDecode {
        write_pool: Some(floats(&[2, 1, DIM, DIM])),
        ..decode()
    };
    accepted(&small_pool, 2, &[(2, "row", 2)]);
}

#[test]
fn two_rows_that_write_a_slot_are_refused() {
    let mut args = GdnDecode {
        read_slots: Some(ints(&[0, 1, 2])),
        write_slots: Some(ints(&[5, 3, 5])),
        ..decode()
    };
    let message =
        "row 0 writes slot 5 of state, and row 2 writes slot 5 of state: nothing orders them";
    refused(&args, message);
    args.write_pool = Some(pool());
    refused(&args, &message.replace("state", "write state"));
    // No hazard where one of them is inactive.
    args.read_slots = Some(ints(&[0, 1, -1]));
    accepted(&args, 2, &[(2, "read_slots", -1)]);
}

#[test]
fn a_slot_that_one_row_reads_and_another_writes_is_refused() {
    let mut args = GdnDecode {
        read_slots: Some(ints(&[0, 1, 2])),
        write_slots: Some(ints(&[1, 3, 4])),
        ..decode()
    };
    let message =
        "row 1 reads slot 1 of state, and row 0 writes slot 1 of state: nothing orders them";
    refused(&args, message);
    // Another pool is another state; the same memory under another name is not.
    args.write_pool = Some(pool());
    accepted(&args, 3, &[]);
    args.write_pool = Some(args.pool.narrow(0, 1, SLOTS - 1).unwrap());
    args.write_slots = Some(ints(&[4, 3, 1]));
    accepted(&args, 3, &[]);
    args.write_slots = Some(ints(&[4, 1, 0]));
    let message =
        "row 1 reads slot 1 of state, and row 2 writes slot 0 of write state: nothing orders them";
    refused(&args, message);
    // Rows may share a state that none writes.
    let mut shared = GdnDecode {
        read_slots: Some(ints(&[1, 1, 1])),
        ..decode()
    };
    shared.options.update_state = false;
    accepted(&shared, 3, &[]);
}

#[test]
fn token_slots_are_checked_one_by_one() {
    let report = accepted(
        &token_slots([0, -1, 9, 1, 2, 3]),
        2,
        &[(1, "token_slots", 9)],
    );
    assert_eq!(report.skipped_stores, 1);
    refused(
        &token_slots([0, 1, 2, 3, 4, 1]),
        "row 0 writes slot 1 of state after token 1, and row 2 writes slot 1 of state after token 1: \
         nothing orders them",
    );
    refused(
        &token_slots([0, 1, 2, 2, 4, 5]),
        "row 1 writes slot 2 of state after token 0, and row 1 writes slot 2 of state after token 1: \
         nothing orders them",
    );
    let mut args = token_slots([0, 1, 2, 3, 4, -1]);
    args.accepted = Some(ints(&[2, 3, 2]));
    accepted(&args, 1, &[(1, "accepted", 3), (2, "token_slots", -1)]);
    args.accepted = Some(tensor(vec![0, i64::MIN, i64::MAX], &[ROWS]));
    accepted(
        &args,
        0,
        &[
            (0, "accepted", 0),
            (1, "accepted", i64::MIN),
            (2, "accepted", i64::MAX),
        ],
    );
}

/// Rows of token slots may lie apart.
#[test]
fn a_row_stride_is_minded() {
    let wide = tensor(vec![0, 1, 77, 2, 3, 77, 4, 5, 77], &[ROWS, 3]);
    let args = GdnMtp {
        token_slots: Some(wide.narrow(1, 0, TOKENS).unwrap()),
        ..verify()
    };
    let report = accepted(&args, 3, &[]);
    assert_eq!(report.skipped_stores, 0);
}

#[test]
fn kept_tokens_are_checked() {
    accepted(&resume(&[0, 2, 1]), 3, &[]);
    accepted(&resume(&[-1, 3, 1]), 1, &[(0, "keep", -1), (1, "keep", 3)]);
    let resumed = resume(&[0, 3, 1]);
    let previous = resumed.previous.unwrap();
    let commit = GdnCommit {
        k: previous.k,
        v: previous.v,
        gates: resumed.gates,
        keep: previous.keep,
        pool: resumed.pool,
        write_pool: None,
        read_slots: Some(ints(&[2, 0, 2])),
        write_slots: None,
        options: resumed.options,
    };
    refused(
        &commit,
        "row 0 writes slot 2 of state, and row 2 writes slot 2 of state: nothing orders them",
    );
    let apart = GdnCommit {
        read_slots: Some(ints(&[2, 0, 1])),
        ..commit
    };
    accepted(&apart, 2, &[(1, "keep", 3)]);
}

#[test]
fn snapshots_over_the_pool_are_refused() {
    let states = floats(&[ROWS * TOKENS + 1, 1, DIM, DIM]);
    let of_rows = |states: Tensor<'static>| states.split(0, TOKENS).unwrap();
    let mut args = GdnMtp {
        pool: states.narrow(0, 0, ROWS).unwrap(),
        snapshots: Some(of_rows(states.narrow(0, 1, ROWS * TOKENS).unwrap())),
        ..verify()
    };
    args.options.update_state = false;
    let message = "row 1 reads slot 1 of state, and row 0 writes state 0 of snapshots after token 0: \
                   nothing orders them";
    refused(&args, message);
    args.snapshots = Some(of_rows(floats(&[ROWS * TOKENS, 1, DIM, DIM])));
    accepted(&args, 3, &[]);
}

#[test]
fn bounds_rise_from_0_within_the_tensors() {
    let report = accepted(&packed(&[0, 2, 2, 4]), 2, &[]);
    assert_eq!((report.empty, report.unused_tokens), (1, 1));
    assert_eq!(accepted(&packed(&[0, 2, 3, 5]), 3, &[]).unused_tokens, 0);
    for (bounds, message) in [
        ([1, 2, 3, 4], "cu_seqlens[0]: wanted 0, got 1"),
        ([-1, 2, 3, 4], "cu_seqlens[0]: wanted 0, got -1"),
        ([0, 2, 1, 3], "cu_seqlens[2]: wanted 2..=4 "),
        ([0, 1, 4, 5], "cu_seqlens[2]: wanted 1..=3 "),
        ([0, 2, 4, 6], "cu_seqlens[3]: wanted 4..=5 "),
        ([0, 2, 4, i32::MIN], "cu_seqlens[3]: wanted 4..=5 "),
    ] {
        let got = validate(&packed(&bounds)).unwrap_err().to_string();
        assert!(got.starts_with(message), "{got}");
    }
}

#[test]
fn what_a_launch_refuses_is_refused() {
    let mut args = decode();
    args.read_slots = Some(ints(&[0, 1]));
    refused(&args, "read_slots: wanted shape [B] = [3], got [2]");
    // SAFETY: never read.
    let elsewhere = unsafe { Tensor::from_raw(0x1000, crate::DType::I32, &[ROWS]) };
    args.read_slots = Some(elsewhere.unwrap());
    refused(&args, "read_slots: wanted host memory, got device memory");
}

#[test]
fn no_rows_are_nothing() {
    let mut args = decode();
    for tensor in [&mut args.q, &mut args.k, &mut args.v, &mut args.o] {
        *tensor = tensor.narrow(0, 0, 0).unwrap();
    }
    let gate = floats(&[0, 1, 1]);
    args.gates = GdnGates::Given {
        g: gate,
        beta: gate,
    };
    args.read_slots = Some(ints(&[]));
    assert_eq!(validate(&args).unwrap(), IndexReport::default());
}
