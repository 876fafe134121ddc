//! Races: accesses that no barrier orders.

use std::slice;

use gated_delta_kernels::device::global;
use gated_delta_kernels::device::shared::{
    copy_async_commit, copy_async_wait, dynamic_shared_mem, load_shared_b64, store_shared_b64,
};
use gated_delta_kernels::device::sim::{FaultKind, Region};
use gated_delta_kernels::device::thread::{
    arrive_at_barrier, block_idx_x, sync_barrier, sync_barrier_any, sync_threads, thread_idx_x,
};
use gated_delta_kernels::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_xor};

use super::{
    assert_clean, assert_fault, copy_async, load, load_shared, only, run, store, store_shared,
    tensor,
};

#[track_caller]
fn assert_race<R>(regions: &[Region], body: impl Fn() -> R + Sync, thread: u32, message: &str) {
    assert_fault(regions, body, FaultKind::Racecheck, thread, message);
}

/// The message of a race with an earlier access.
fn race(access: &str, earlier: &str) -> String {
    format!("race: {access}, and a {earlier} of block (0, 0, 0): no barrier between them")
}

/// Each thread stores a word to shared memory, and loads its neighbour's word after `barrier`.
fn exchange(barrier: fn()) -> impl Fn() {
    move || {
        store_shared(4 * thread_idx_x(), 0);
        sync_threads();
        store_shared(4 * thread_idx_x(), thread_idx_x());
        barrier();
        let neighbour = thread_idx_x() ^ 1;
        assert_eq!(load_shared(4 * neighbour), neighbour);
    }
}

#[test]
fn shared_store_after_a_load() {
    let message = race("4-byte shared store at byte 4", "load by thread 0");
    let body = || {
        only(1, || store_shared(4, 0));
        sync_threads();
        only(0, || load_shared(4));
        only(1, || store_shared(4, 1));
    };
    assert_race(&[], body, 1, &message);
}

#[test]
fn shared_load_after_a_store() {
    let message = race("4-byte shared load at byte 4", "store by thread 1");
    let shuffles_order_no_memory = || _ = warp_shuffle_xor(0.0, 1);
    assert_race(&[], exchange(shuffles_order_no_memory), 0, &message);
}

#[test]
fn barriers_cure_a_race() {
    assert_clean(&[], exchange(sync_threads));
    assert_clean(&[], exchange(|| sync_warp(FULL_MASK)));
    assert_clean(&[], exchange(|| sync_warp(3 << (lane_id() & !1))));
}

#[test]
fn sync_warp_orders_only_its_lanes() {
    let store_sync_load = |mask: u32, reader: u32| {
        move || {
            only(3, || store_shared(0, 7));
            if mask >> lane_id() & 1 == 1 {
                sync_warp(mask);
            }
            if [4, 20].contains(&lane_id()) {
                sync_warp(1 << 4 | 1 << 20);
            }
            only(reader, || load_shared(0));
        }
    };
    assert_clean(&[], store_sync_load(0xffff, 15));
    // Lane 4 is a link between the two lanes.
    assert_clean(&[], store_sync_load(0xffff, 20));
    let message = race("4-byte shared load at byte 0", "store by thread 3");
    assert_race(&[], store_sync_load(0xffff, 21), 21, &message);
    assert_race(&[], store_sync_load(0xffef, 20), 20, &message);
    assert_race(&[], store_sync_load(FULL_MASK, 35), 35, &message);
}

#[test]
fn a_store_races_with_any_of_many_readers() {
    let load_sync_store = |readers: [u32; 3], writer: u32| {
        move || {
            only(0, || store_shared(0, 1));
            sync_threads();
            for reader in readers {
                only(reader, || load_shared(0));
                warp_shuffle_xor(0.0, 1);
            }
            if (8..24).contains(&lane_id()) {
                sync_warp(0x00ff_ff00);
            }
            only(writer, || store_shared(0, 2));
        }
    };
    assert_clean(&[], load_sync_store([5, 5, 5], 5));
    assert_clean(&[], load_sync_store([9, 12, 23], 10));
    let message = |reader| {
        race(
            "4-byte shared store at byte 0",
            &format!("load by thread {reader}"),
        )
    };
    assert_race(&[], load_sync_store([9, 12, 23], 7), 7, &message(9));
    assert_race(&[], load_sync_store([7, 12, 23], 10), 10, &message(7));
    assert_race(&[], load_sync_store([9, 12, 24], 10), 10, &message(24));
    assert_race(&[], load_sync_store([12, 24, 9], 10), 10, &message(24));
    assert_race(&[], load_sync_store([9, 12, 24], 40), 40, &message(9));
}

#[test]
fn global_stores_of_two_threads() {
    let mut data = [0_u32; 8];
    let o = tensor("o", &mut data, &[2, 4]);
    let body = || only(thread_idx_x() & 33, || store(o.address + 24, 1));
    let message = race(
        "4-byte store of `o` [2, 4] at element [1, 2]",
        "store by thread 0",
    );
    assert_race(slice::from_ref(&o), body, 1, &message);
}

#[test]
fn global_accesses_of_two_blocks() {
    let mut data = [0_u32; 4];
    let o = tensor("o", &mut data, &[4]);
    let regions = slice::from_ref(&o);
    let in_each = |op: fn(u64)| run([2, 1, 1], 32, regions, || only(7, || op(o.address + 4)));
    in_each(|address| _ = load(address)).unwrap();

    let fault = in_each(|address| store(address, 1)).unwrap_err();
    let [block, ..] = fault.block;
    let other = 1 - block;
    let tail = "blocks are not ordered";
    let message = format!(
        "race: 4-byte store of `o` [4] at element [1], \
         and a store by thread 7 of block ({other}, 0, 0): {tail}"
    );
    assert_eq!(fault.message, message);

    let fault = in_each(|address| store(address, load(address))).unwrap_err();
    assert!(fault.message.ends_with(tail), "{fault}");
}

#[test]
fn tensors_that_overlap_share_their_accesses() {
    let mut data = [0_u32; 4096];
    let all = tensor("all", &mut data, &[4096]);
    let read_pool = Region {
        name: "read_pool",
        dims: vec![3000],
        writable: false,
        ..all.clone()
    };
    let write_pool = Region {
        name: "write_pool",
        dims: vec![3000],
        address: all.address + 4 * 1096,
        ..all
    };
    let body = || {
        only(0, || store(write_pool.address + 4 * 2999, 1));
        only(0, || load(write_pool.address + 400));
        only(1, || store(write_pool.address + 400, 1));
    };
    let message = race(
        "4-byte store of `write_pool` [3000] at element [100]",
        "load by thread 0",
    );
    assert_race(&[read_pool.clone(), write_pool.clone()], body, 1, &message);
}

#[test]
fn neighbouring_two_byte_stores_do_not_race() {
    let mut data = [0_u16; 64];
    let o = tensor("o", &mut data, &[64]);
    let at = || o.address + 2 * u64::from(thread_idx_x());
    // SAFETY: the simulator checks the address.
    assert_clean(slice::from_ref(&o), || unsafe {
        global::store_b16(at(), thread_idx_x() as u16)
    });
    assert!(data.into_iter().eq(0..64));
}

/// In accesses of 8 bytes the simulator records each 4-byte part separately, and checks a whole access against both parts.
#[test]
fn parts_of_what_is_accessed_together_are_told_apart() {
    // SAFETY: the simulator checks the addresses.
    let store_both = |at: u32| unsafe { store_shared_b64(dynamic_shared_mem() + at, [1, 2]) };
    // SAFETY: as above.
    let load_both = |at: u32| unsafe { load_shared_b64(dynamic_shared_mem() + at) };
    let of_both_after_one = |barrier: fn()| {
        move || {
            only(0, || store_both(8));
            sync_threads();
            only(1, || load_shared(12));
            barrier();
            only(2, || store_both(8));
            sync_threads();
            only(3, || load_both(8));
        }
    };
    assert_clean(&[], of_both_after_one(sync_threads));
    let message = race("8-byte shared store at byte 12", "load by thread 1");
    assert_race(&[], of_both_after_one(|| ()), 2, &message);

    let own_parts = || {
        only(0, || store_both(0));
        sync_threads();
        for turn in 0..2 {
            only(turn, || store_shared(4 * turn, turn));
        }
        for turn in 0..2 {
            only(turn, || assert_eq!(load_shared(4 * turn), turn));
        }
    };
    assert_clean(&[], own_parts);
    let both_after_another = || {
        only(0, || store_both(0));
        sync_threads();
        only(1, || store_shared(4, 3));
        only(2, || load_both(0));
    };
    let message = race("8-byte shared load at byte 4", "store by thread 1");
    assert_race(&[], both_after_another, 2, &message);

    let one_was_stored = || {
        only(0, || store_shared(0, 1));
        only(0, || load_both(0));
    };
    let message = "8-byte shared load at byte 4: the block has not written it";
    assert_fault(&[], one_was_stored, FaultKind::Memcheck, 0, message);
}

#[test]
fn read_only_load_of_what_the_launch_wrote() {
    let mut data = [0_u32; 8];
    let o = tensor("o", &mut data, &[8]);
    let body = || {
        only(3, || store(o.address + 8, 1));
        sync_threads();
        // SAFETY: the simulator checks the address.
        only(5, || unsafe { global::load_b32(o.address + 8) });
    };
    let message = "4-byte load of `o` [8] at element [2] through the read-only path: \
                   thread 3 of block (0, 0, 0) has stored to it";
    assert_race(slice::from_ref(&o), body, 5, message);
}

/// Copies two generations to the same shared memory, and waits for the first.
fn copy_twice(from: u64) {
    let thread = thread_idx_x() % 32;
    for generation in 0..2 {
        if thread_idx_x() < 32 {
            copy_async(
                16 * thread,
                from + u64::from(16 * (32 * generation + thread)),
            );
        }
        copy_async_commit();
        if generation == 0 {
            copy_async_wait::<0>();
        }
    }
}

#[test]
fn asynchronous_copy_that_was_waited_for() {
    let mut data: [u128; 64] = std::array::from_fn(|at| at as u128);
    let k = tensor("k", &mut data, &[64]);
    assert_clean(slice::from_ref(&k), || {
        copy_twice(k.address);
        copy_async_wait::<0>();
        let own = thread_idx_x() % 32;
        only(own, || assert_eq!(load_shared(16 * own), own + 32));
        sync_threads();
        assert_eq!(load_shared(16 * (own ^ 1)), (own ^ 1) + 32);
    });
}

#[test]
fn asynchronous_copy_that_was_not_waited_for() {
    let mut data = [0_u128; 64];
    let k = tensor("k", &mut data, &[64]);
    let load_after = |wait: fn()| {
        move || {
            copy_twice(k.address);
            wait();
            load_shared(0)
        }
    };
    let message = "4-byte shared load at byte 0: \
                   thread 0 of block (0, 0, 0) copies to it and has not waited for the copy";
    let regions = [k.clone()];
    assert_race(&regions, load_after(|| ()), 0, message);
    assert_race(&regions, load_after(copy_async_wait::<1>), 0, message);
    let message = race("4-byte shared load at byte 0", "store by thread 0");
    assert_race(&regions, load_after(copy_async_wait::<0>), 1, &message);
}

#[test]
fn asynchronous_copy_whose_source_is_stored_to() {
    let store_then_wait = |early: bool| {
        let mut data = [0_u128; 1];
        let state = tensor("state", &mut data, &[1]);
        let body = || {
            only(0, || {
                copy_async(0, state.address);
                copy_async_commit();
                if early {
                    store(state.address, 1);
                }
                copy_async_wait::<0>();
                store(state.address, 2);
            })
        };
        run([1; 3], 64, slice::from_ref(&state), body)
    };
    store_then_wait(false).unwrap();
    let fault = store_then_wait(true).unwrap_err();
    let message = "the source of an asynchronous copy changed before the copy was waited for";
    assert_eq!(
        (fault.kind, fault.message.as_str()),
        (FaultKind::Racecheck, message)
    );
}

#[test]
fn asynchronous_copy_into_what_others_read() {
    let mut data = [0_u128; 1];
    let k = tensor("k", &mut data, &[1]);
    let body = || {
        only(0, || store_shared(0, 0));
        sync_threads();
        only(1, || load_shared(0));
        only(2, || copy_async(0, k.address));
    };
    let message = race(
        "16-byte shared asynchronous copy at byte 0",
        "load by thread 1",
    );
    assert_race(slice::from_ref(&k), body, 2, &message);
}

#[test]
fn a_block_inherits_nothing_from_the_one_before() {
    let mut data = [1_u128; 1];
    let k = tensor("k", &mut data, &[1]);
    let regions = slice::from_ref(&k);
    let copy_or_store = || {
        if block_idx_x() < 32 {
            copy_async(0, k.address);
        } else {
            store_shared(0, 5);
        }
        copy_async_commit();
        if block_idx_x() >= 32 {
            copy_async_wait::<0>();
            assert_eq!(load_shared(0), 5);
        }
    };
    let body = || only(0, copy_or_store);
    run([64, 1, 1], 32, regions, body).unwrap();

    for reader in [1, 32] {
        let body = || {
            let last = block_idx_x() == 63;
            only(0, || store_shared(0, 5));
            only(reader, || last.then(|| load_shared(0)));
            sync_warp(FULL_MASK);
            sync_threads();
        };
        let fault = run([64, 1, 1], 64, &[], body).unwrap_err();
        assert_eq!(
            (fault.kind, fault.block),
            (FaultKind::Racecheck, [63, 0, 0])
        );
    }
}

/// Thread 0 stores a word before or after its warp arrives at barrier 1. Thread 32 loads the word after the barrier.
fn hand_over(before: bool) -> impl Fn() {
    move || {
        store_shared(4 * thread_idx_x(), 0);
        sync_threads();
        if thread_idx_x() < 32 {
            if !before {
                arrive_at_barrier(1, 64);
            }
            only(0, || store_shared(0, 7));
            if before {
                arrive_at_barrier(1, 64);
            }
        } else {
            sync_barrier(1, 64);
            only(32, || assert_eq!(load_shared(0), 7));
        }
    }
}

#[test]
fn a_barrier_orders_what_came_before_the_arrival() {
    assert_clean(&[], hand_over(true));
    let message = race("4-byte shared load at byte 0", "store by thread 0");
    assert_race(&[], hand_over(false), 32, &message);
}

#[test]
fn an_arrival_orders_nothing_for_those_that_go_on() {
    let body = || {
        store_shared(4 * thread_idx_x(), 0);
        sync_threads();
        if thread_idx_x() < 32 {
            arrive_at_barrier(1, 64);
            sync_barrier(2, 32);
            only(0, || load_shared(4 * 32));
        } else {
            only(32, || store_shared(4 * 32, 7));
            sync_barrier(1, 64);
        }
    };
    let message = race("4-byte shared load at byte 128", "store by thread 32");
    assert_race(&[], body, 0, &message);
}

#[test]
fn barriers_hand_on_what_they_ordered() {
    let body = || {
        store_shared(4 * thread_idx_x(), 0);
        sync_threads();
        match thread_idx_x() / 32 {
            0 => {
                only(0, || store_shared(0, 7));
                arrive_at_barrier(1, 64);
            }
            1 => {
                sync_barrier(1, 64);
                arrive_at_barrier(2, 64);
            }
            _ => {
                sync_barrier(2, 64);
                only(64, || assert_eq!(load_shared(0), 7));
            }
        }
    };
    run([1; 3], 96, &[], body).expect("ordered through the second warp");
}

/// Each group of two warps gets its own answer at each turn, with earlier accesses ordered. A yes does not last to the next turn.
#[test]
fn a_barrier_says_whether_one_thread_said_yes() {
    let body = || {
        let (thread, group) = (thread_idx_x(), thread_idx_x() / 64);
        for turn in 0..4 {
            let is = group == 1 && turn % 2 == 1 && thread == 100;
            store_shared(4 * thread, turn);
            let any = sync_barrier_any(1 + group, 64, is);
            assert_eq!(any, group == 1 && turn % 2 == 1, "{group}, turn {turn}");
            assert_eq!(load_shared(4 * (thread ^ 32)), turn);
            sync_barrier(1 + group, 64);
        }
    };
    run([1; 3], 128, &[], body).expect("ordered, with one answer for each group");
}
