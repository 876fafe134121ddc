//! Collectives that not all of their lanes reach.

use gated_delta_kernels::device::shared::{
    dynamic_shared_mem, load_matrices, load_matrices_transposed, store_shared_b128,
};
use gated_delta_kernels::device::sim::FaultKind;
use gated_delta_kernels::device::thread::{
    arrive_at_barrier, sync_barrier, sync_threads, thread_idx_x,
};
use gated_delta_kernels::device::warp::{
    FULL_MASK, lane_id, mma_m16n8k16_bf16, sync_warp, warp_shuffle_idx, warp_shuffle_xor,
};

use super::{assert_clean, assert_fault, only};

#[track_caller]
fn assert_synccheck(body: impl Fn() + Sync, thread: u32, message: &str) {
    assert_fault(&[], body, FaultKind::Synccheck, thread, message);
}

/// Thread 40 runs `one`, all others run `others`.
fn diverge(one: fn(), others: fn()) -> impl Fn() {
    move || {
        if thread_idx_x() == 40 {
            one()
        } else {
            others()
        }
    }
}

fn shuffle_xor() {
    warp_shuffle_xor(0.0, 1);
}

fn shuffle_idx() {
    warp_shuffle_idx(0.0, 1);
}

fn multiply() {
    mma_m16n8k16_bf16([0; 4], [0; 2], [0.0; 4]);
}

#[test]
fn diverged_multiplication() {
    for (one, place) in [
        ((|| ()) as fn(), "has exited"),
        (shuffle_xor, "waits in warp_shuffle_xor"),
    ] {
        let message = format!(
            "diverged: thread 32 (lane 0) waits in mma_m16n8k16_bf16, but thread 40 (lane 8) {place}"
        );
        assert_synccheck(diverge(one, multiply), 32, &message);
    }
}

/// The second warp loads matrices of zeros.
fn load_zeros(load: unsafe fn(u32) -> [u32; 4]) {
    if thread_idx_x() >= 32 {
        let row = dynamic_shared_mem() + 16 * lane_id();
        // SAFETY: the simulator checks the address.
        unsafe {
            store_shared_b128(row, [0; 4]);
            load(row);
        }
    }
}

#[test]
fn diverged_matrix_load() {
    let message = "diverged: thread 32 (lane 0) waits in load_matrices, \
                   but thread 40 (lane 8) waits in load_matrices_transposed";
    let body = diverge(
        || load_zeros(load_matrices_transposed),
        || load_zeros(load_matrices),
    );
    assert_synccheck(body, 32, message);
}

#[test]
fn diverged_shuffle() {
    for (one, place) in [
        ((|| ()) as fn(), "has exited"),
        (sync_threads, "waits in sync_threads"),
        (|| sync_warp(1 << 8 | 1), "waits in sync_warp(0x00000101)"),
        (shuffle_idx, "waits in warp_shuffle_idx"),
    ] {
        let message = format!(
            "diverged: thread 32 (lane 0) waits in warp_shuffle_xor, but thread 40 (lane 8) {place}"
        );
        assert_synccheck(diverge(one, shuffle_xor), 32, &message);
    }
}

#[test]
fn shuffle_of_a_lane_that_does_not_exist() {
    let message = "a shuffle names lane or lane mask 32: a warp has 32 lanes";
    assert_synccheck(|| _ = warp_shuffle_idx(0.0, 32), 0, message);
    assert_synccheck(|| _ = warp_shuffle_xor(0.0, 32), 0, message);
}

#[test]
fn diverged_warp_barrier() {
    let message = "diverged: thread 32 (lane 0) waits in sync_warp(0xffffffff), \
                   but thread 40 (lane 8) has exited";
    assert_synccheck(diverge(|| (), || sync_warp(FULL_MASK)), 32, message);
    let message = "diverged: thread 16 (lane 16) waits in sync_warp(0xffffffff), \
                   but thread 0 (lane 0) has exited";
    assert_synccheck(
        || sync_warp(if lane_id() < 16 { 0xffff } else { FULL_MASK }),
        16,
        message,
    );
    let message = "lane 16 calls sync_warp(0x0000ffff), a mask without it";
    assert_synccheck(|| sync_warp(0xffff), 16, message);
}

#[test]
fn a_partial_warp_barrier_waits_for_its_lanes_only() {
    assert_clean(&[], || {
        if lane_id() < 16 {
            sync_warp(0xffff);
        }
        shuffle_xor();
        only(3, || sync_warp(1 << 3));
        sync_threads();
    });
}

#[test]
fn diverged_block_barrier() {
    let message = "diverged: thread 40 (lane 8) waits in warp_shuffle_xor, \
                   but thread 32 (lane 0) waits in sync_threads";
    assert_synccheck(diverge(shuffle_xor, sync_threads), 40, message);
    let message =
        "diverged: thread 0 (lane 0) waits in sync_threads, but thread 40 (lane 8) has exited";
    assert_synccheck(diverge(|| (), sync_threads), 0, message);
}

/// The first warp runs `first`, the second `second`.
fn roles(first: fn(), second: fn()) -> impl Fn() {
    move || {
        if thread_idx_x() < 32 {
            first()
        } else {
            second()
        }
    }
}

#[test]
fn warps_meet_at_a_barrier_in_different_places() {
    assert_clean(
        &[],
        roles(
            || {
                arrive_at_barrier(1, 64);
                sync_barrier(2, 64);
                sync_barrier(3, 32);
                sync_threads();
            },
            || {
                sync_barrier(1, 64);
                arrive_at_barrier(2, 64);
                sync_threads();
            },
        ),
    );
}

#[test]
fn barriers_that_do_not_fill() {
    let alone = "diverged: thread 0 (lane 0) waits in sync_barrier(1, 64), \
                 but thread 32 (lane 0) has exited";
    assert_synccheck(roles(|| sync_barrier(1, 64), || ()), 0, alone);
    let other = "diverged: thread 0 (lane 0) waits in sync_barrier(1, 64), \
                 but thread 32 (lane 0) waits in sync_barrier(2, 64)";
    let body = roles(|| sync_barrier(1, 64), || sync_barrier(2, 64));
    assert_synccheck(body, 0, other);
    let nobody = "barrier 1: warps have come to it, and none waits";
    assert_synccheck(roles(|| arrive_at_barrier(1, 64), || ()), 0, nobody);
    let gone = "barrier 1: all 64 threads have gone on, none waits";
    assert_synccheck(|| arrive_at_barrier(1, 64), 32, gone);
}

#[test]
fn barriers_of_another_size() {
    let message = "barrier 1 is for 64 threads, and for 96";
    let body = roles(|| arrive_at_barrier(1, 64), || arrive_at_barrier(1, 96));
    assert_synccheck(body, 32, message);
    let message = "diverged: thread 32 (lane 0) waits in sync_barrier(1, 32), \
                   but thread 0 (lane 0) has exited";
    let body = roles(|| arrive_at_barrier(1, 64), || sync_barrier(1, 32));
    assert_synccheck(body, 32, message);
}

#[test]
fn barriers_that_are_none() {
    for barrier in [0, 16] {
        let message = format!("barrier {barrier}: wanted 1 to 15");
        assert_synccheck(move || sync_barrier(barrier, 64), 0, &message);
    }
    let message = "barrier 1 for 40 threads: wanted whole warps, at most 1024";
    assert_synccheck(|| arrive_at_barrier(1, 40), 0, message);
}

#[test]
fn diverged_barrier() {
    let message = "diverged: thread 32 (lane 0) waits in arrive_at_barrier(1, 64), \
                   but thread 40 (lane 8) waits in sync_barrier(1, 64)";
    let body = diverge(|| sync_barrier(1, 64), || arrive_at_barrier(1, 64));
    assert_synccheck(
        move || {
            if thread_idx_x() >= 32 {
                body()
            }
        },
        32,
        message,
    );
}
