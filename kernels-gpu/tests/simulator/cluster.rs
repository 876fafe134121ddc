//! Clusters: the order of accesses around a cluster's barrier, and stores to the shared memory of other blocks.

use std::slice;

use gated_delta_kernels::device::cluster::{
    arrive, arrive_relaxed, store_shared_b32_at, store_shared_b128_at, wait,
};
use gated_delta_kernels::device::shared::{dynamic_shared_mem, load_shared_b128};
use gated_delta_kernels::device::sim::{FaultKind, Region};
use gated_delta_kernels::device::thread::{
    arrive_at_barrier, block_idx_x, block_idx_y, sync_barrier, sync_threads, thread_idx_x,
};
use gated_delta_kernels::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_xor};

use super::{load, load_shared, only, run, run_clusters, store, store_shared, tensor};

/// Number of blocks of a cluster, unless a test gives another one.
pub const CLUSTER: u32 = 4;

pub fn rank() -> u32 {
    block_idx_x() % CLUSTER
}

/// Runs `f` in one thread of one block of each cluster.
pub fn at<R>(of: u32, thread: u32, f: impl FnOnce() -> R) {
    if rank() == of {
        only(thread, f);
    }
}

pub fn store_at(offset: u32, rank: u32, value: u32) {
    // SAFETY: the simulator checks address and rank.
    unsafe { store_shared_b32_at(dynamic_shared_mem() + offset, rank, value) }
}

pub fn sync_cluster() {
    arrive();
    wait();
}

/// Waits until all blocks of the cluster have started.
pub fn start() {
    arrive_relaxed();
    wait();
}

/// Launches one cluster of blocks of 64 threads. Panics unless it ends in a fault of `kind` in thread `[block, thread]`.
#[track_caller]
pub fn assert_fault<R>(
    regions: &[Region],
    body: impl Fn() -> R + Sync,
    kind: FaultKind,
    place: [u32; 2],
    message: &str,
) {
    let fault = run_clusters(CLUSTER, [CLUSTER, 1, 1], 64, regions, body)
        .expect_err("the simulator found nothing");
    assert_eq!(fault.message, message);
    assert_eq!((fault.kind, [fault.block[0], fault.thread]), (kind, place));
}

#[track_caller]
pub fn assert_race<R>(
    regions: &[Region],
    body: impl Fn() -> R + Sync,
    place: [u32; 2],
    message: &str,
) {
    assert_fault(regions, body, FaultKind::Racecheck, place, message);
}

#[track_caller]
pub fn assert_synccheck(body: impl Fn() + Sync, place: [u32; 2], message: &str) {
    assert_fault(&[], body, FaultKind::Synccheck, place, message);
}

#[track_caller]
fn assert_memcheck(body: impl Fn() + Sync, place: [u32; 2], message: &str) {
    assert_fault(&[], body, FaultKind::Memcheck, place, message);
}

/// Launches one cluster. Panics if there is a fault.
#[track_caller]
pub fn assert_clean<R>(regions: &[Region], body: impl Fn() -> R + Sync) {
    run_clusters(CLUSTER, [CLUSTER, 1, 1], 64, regions, body).expect("there is no fault");
}

/// The message of a race with an earlier access of block `block`.
fn race(access: &str, earlier: &str, block: u32) -> String {
    format!(
        "race: {access}, and a {earlier} of block ({block}, 0, 0): no cluster barrier between them"
    )
}

/// In each round, each thread sends a word to a block at growing distance, in the first round to its own. Some threads send four
/// words more.
#[test]
fn exchange() {
    const ROUNDS: u32 = 5;
    let grid = [3 * CLUSTER, 2, 1];
    let mut data = vec![0_u32; 2 * 12 * 64 * 5];
    let o = tensor("o", &mut data, &[2, 12, 64, 5]);
    let word = |block: u32, thread: u32, round: u32| 1000 * block + 100 * round + thread;
    let body = || {
        let (rank, thread) = (rank(), thread_idx_x());
        let block = 12 * block_idx_y() + block_idx_x();
        let quads = dynamic_shared_mem() + 256;
        start();
        for round in 0..ROUNDS {
            let value = word(block, thread, round);
            store_at(4 * thread, (rank + round) % CLUSTER, value);
            if thread < 16 {
                // SAFETY: the simulator checks address and rank.
                unsafe { store_shared_b128_at(quads + 16 * thread, rank ^ 2, [value, 0, 0, 7]) };
            }
            sync_cluster();
            let neighbour = (thread + 1) % 64;
            // SAFETY: the simulator checks the address.
            let [first, _, _, last] = unsafe { load_shared_b128(quads + 16 * (neighbour % 16)) };
            let place = u64::from(ROUNDS * (64 * block + thread) + round);
            let sum = load_shared(4 * neighbour) + 100_000 * (first + last);
            store(o.address + 4 * place, sum);
            sync_cluster();
        }
    };
    run_clusters(CLUSTER, grid, 64, slice::from_ref(&o), body).unwrap();
    for (place, &got) in (0..).zip(&data) {
        let (block, thread, round) = (place / ROUNDS / 64, place / ROUNDS % 64, place % ROUNDS);
        let (rank, neighbour) = (block % CLUSTER, (thread + 1) % 64);
        let of_rank = |rank: u32| block / CLUSTER * CLUSTER + rank % CLUSTER;
        let sent = word(of_rank(rank + 2 * CLUSTER - round), neighbour, round);
        let quad = word(of_rank(rank ^ 2), neighbour % 16, round) + 7;
        assert_eq!(
            got,
            sent + 100_000 * quad,
            "block {block}, thread {thread}, round {round}"
        );
    }
}

/// Thread 5 of block 0 sends a word to block 1. `come`, `before` and `after` run before the arrival at the barrier, before the wait
/// and after it.
fn send(come: impl Fn(), before: impl Fn(), after: impl Fn()) -> impl Fn() {
    move || {
        at(1, 0, || store_shared(0, 1));
        sync_cluster();
        at(0, 5, || store_at(0, 1, 7));
        come();
        before();
        wait();
        after();
        sync_cluster();
    }
}

fn receive() {
    at(1, 40, || assert_eq!(load_shared(0), 7));
}

#[test]
fn a_barrier_orders_what_came_before_the_arrival() {
    assert_clean(&[], send(arrive, || (), receive));
    let message = race("4-byte shared load at byte 0", "store by thread 5", 0);
    assert_race(&[], send(arrive_relaxed, || (), receive), [1, 40], &message);
    assert_race(&[], send(arrive, receive, || ()), [1, 40], &message);
    let late = || {
        arrive();
        at(0, 5, || store_at(0, 1, 7));
    };
    let body = || {
        at(1, 0, || store_shared(0, 1));
        sync_cluster();
        late();
        wait();
        receive();
        sync_cluster();
    };
    assert_race(&[], body, [1, 40], &message);
    // The next phase orders the accesses.
    assert_clean(&[], || {
        start();
        late();
        wait();
        sync_cluster();
        receive();
    });
}

#[test]
fn a_store_to_what_another_block_reads() {
    let overwrite = |come: fn()| {
        move || {
            at(1, 40, || store_shared(0, 1));
            sync_cluster();
            at(1, 40, || load_shared(0));
            come();
            wait();
            at(2, 5, || store_at(0, 1, 7));
            sync_cluster();
        }
    };
    assert_clean(&[], overwrite(arrive));
    let race = race("4-byte shared store at byte 0", "load by thread 40", 1);
    let message = format!("in the shared memory of block (1, 0, 0): {race}");
    assert_race(&[], overwrite(arrive_relaxed), [2, 5], &message);
}

/// Thread 7 of each block in `late` reads a word at time `when`: before the barrier, between arrival and wait, or after the wait.
/// All others read it before the barrier. In the end thread 7 of block `writer` overwrites the word.
fn in_place(address: u64, late: &[u32], when: usize, writer: u32) -> impl Fn() {
    move || {
        let read = |now: usize| {
            let is_late = late.contains(&rank()) && thread_idx_x() == 7;
            if now == if is_late { when } else { 0 } {
                load(address);
            }
        };
        read(0);
        shuffle();
        arrive();
        read(1);
        wait();
        read(2);
        at(writer, 7, || store(address, 1));
    }
}

#[test]
fn global_memory_in_place() {
    let mut data = [0_u32; 4];
    let state = tensor("state", &mut data, &[4]);
    let regions = slice::from_ref(&state);
    let address = state.address + 8;
    let store_after_load_of = |block: u32| {
        race(
            "4-byte store of `state` [4] at element [2]",
            "load by thread 7",
            block,
        )
    };
    for writer in 0..CLUSTER {
        assert_clean(regions, in_place(address, &[], 0, writer));
        assert_clean(regions, in_place(address, &[writer], 1, writer));
    }
    // The last block writes after all blocks have read.
    for when in [1, 2] {
        for (late, found) in [
            (&[0][..], 0),
            (&[1], 1),
            (&[2], 2),
            (&[1, 3], 1),
            (&[0, 1, 2], 0),
        ] {
            let message = store_after_load_of(found);
            assert_race(regions, in_place(address, late, when, 3), [3, 7], &message);
        }
    }
    // The simulator keeps the loads of these threads together with the late one. They arrive at the cluster's barrier after it.
    let among_earlier = || {
        if thread_idx_x() >= 32 {
            arrive_at_barrier(1, 64);
        }
        let is_late = (rank(), thread_idx_x()) == (0, 40);
        if is_late {
            arrive();
        }
        load(address);
        if thread_idx_x() < 32 {
            sync_barrier(1, 64);
        }
        if !is_late {
            arrive();
        }
        wait();
        at(3, 7, || store(address, 1));
    };
    let message = store_after_load_of(0).replace("thread 7", "thread 40");
    assert_race(regions, among_earlier, [3, 7], &message);
    let without = || {
        at(2, 7, || load(address));
        at(3, 7, || store(address, 1));
    };
    assert_race(regions, without, [3, 7], &store_after_load_of(2));
    assert_eq!(data, [0, 0, 1, 0]);
}

#[test]
fn blocks_of_two_clusters_are_not_ordered() {
    let mut data = [0_u32; 1];
    let o = tensor("o", &mut data, &[1]);
    let body = || {
        at(0, 0, || (block_idx_x() < CLUSTER).then(|| load(o.address)));
        sync_cluster();
        at(0, 0, || {
            (block_idx_x() >= CLUSTER).then(|| store(o.address, 1))
        });
    };
    let run = |body: &(dyn Fn() + Sync)| {
        let grid = [2 * CLUSTER, 1, 1];
        run_clusters(CLUSTER, grid, 64, slice::from_ref(&o), body).unwrap_err()
    };
    let fault = run(&body);
    assert!(fault.message.ends_with("blocks are not ordered"), "{fault}");
    // The second cluster orders its own loads, some of which are late.
    let fault = run(&|| {
        arrive();
        only(7, || load(o.address));
        wait();
        sync_cluster();
        at(0, 0, || {
            (block_idx_x() >= CLUSTER).then(|| store(o.address, 1))
        });
    });
    assert!(fault.message.ends_with("blocks are not ordered"), "{fault}");
}

/// Thread 5 of block 0 stores to block 1 and arrives relaxed. Thread `releasing` arrives after `hand_over`, and its arrival
/// releases all stores.
fn release(hand_over: fn(), releasing: u32) -> impl Fn() {
    move || {
        start();
        at(0, 5, || store_at(0, 1, 7));
        hand_over();
        let releases = (rank(), thread_idx_x()) == (0, releasing);
        if releases {
            arrive()
        } else {
            arrive_relaxed()
        }
        wait();
        receive();
        sync_cluster();
    }
}

/// The first warp hands over to the second by a named barrier.
fn named_barrier() {
    if thread_idx_x() < 32 {
        arrive_at_barrier(1, 64);
    } else {
        sync_barrier(1, 64);
    }
}

fn sync_full_warp() {
    sync_warp(FULL_MASK);
}

/// A shuffle, which orders no accesses.
fn shuffle() {
    warp_shuffle_xor(0.0, 1);
}

#[test]
fn an_arrival_hands_on_what_was_ordered_before_it() {
    assert_clean(&[], release(|| (), 5));
    assert_clean(&[], release(sync_threads, 40));
    assert_clean(&[], release(named_barrier, 40));
    assert_clean(&[], release(sync_full_warp, 31));
    let message = race("4-byte shared load at byte 0", "store by thread 5", 0);
    for (hand_over, releasing) in [
        ((|| ()) as fn(), 6),
        (named_barrier, 6),
        (sync_full_warp, 40),
    ] {
        assert_race(&[], release(hand_over, releasing), [1, 40], &message);
    }
}

/// All threads have arrived at the barrier. Thread 5 of block 1 alone waits for it, before `hand_over`. Thread `reader` reads
/// afterwards.
fn acquire(hand_over: fn(), reader: u32) -> impl Fn() {
    move || {
        start();
        at(0, 5, || store_at(0, 1, 7));
        arrive();
        let early = rank() != 1 || thread_idx_x() == 5;
        if early {
            wait();
        }
        hand_over();
        at(1, reader, || assert_eq!(load_shared(0), 7));
        if !early {
            wait();
        }
    }
}

#[test]
fn a_wait_hands_on_what_it_orders() {
    assert_clean(&[], acquire(|| (), 5));
    assert_clean(&[], acquire(sync_threads, 40));
    assert_clean(&[], acquire(named_barrier, 40));
    // Lanes wait in `sync_warp` for the one that waits for the cluster.
    assert_clean(&[], acquire(sync_full_warp, 31));
    let half_of_a_warp = || {
        if lane_id() < 16 {
            sync_warp(0xffff);
        }
        shuffle();
    };
    assert_clean(&[], acquire(half_of_a_warp, 15));
    let message = race("4-byte shared load at byte 0", "store by thread 5", 0);
    for (hand_over, reader) in [
        (shuffle as fn(), 6),
        (named_barrier, 6),
        (sync_full_warp, 40),
        (half_of_a_warp, 16),
    ] {
        assert_race(&[], acquire(hand_over, reader), [1, reader], &message);
    }
}

#[test]
fn a_barrier_orders_the_threads_of_a_block_too() {
    let neighbours = |come: fn()| {
        move || {
            store_shared(4 * thread_idx_x(), 0);
            come();
            wait();
            load_shared(4 * (63 - thread_idx_x()));
        }
    };
    assert_clean(&[], neighbours(arrive));
    let message = "race: 4-byte shared load at byte 252, \
                   and a store by thread 63 of block (0, 0, 0): no barrier between them";
    assert_race(&[], neighbours(arrive_relaxed), [0, 0], message);
}

#[test]
fn arrivals_and_waits_take_turns() {
    let twice = "comes to the cluster's barrier again, and has not waited in between";
    for again in [arrive, arrive_relaxed] {
        let body = || {
            start();
            arrive();
            at(1, 3, again);
            wait();
        };
        assert_synccheck(body, [1, 3], twice);
    }
    let message = "waits for the cluster, and has not come to its barrier";
    assert_synccheck(wait, [0, 0], message);
    let body = || {
        sync_cluster();
        at(2, 9, wait);
    };
    assert_synccheck(body, [2, 9], message);
    let message = "exits, and has not waited for the cluster, to whose barrier it came";
    let body = || {
        arrive();
        if (rank(), thread_idx_x()) != (3, 8) {
            wait();
        }
    };
    assert_synccheck(body, [3, 8], message);
}

#[test]
fn threads_that_have_exited_count_as_come() {
    assert_clean(&[], || {
        if lane_id() < 16 && rank() != 2 {
            sync_cluster();
            sync_warp(0xffff);
            sync_cluster();
        }
    });
    // An exit orders nothing: the load races with the store of a sender that exits.
    let body = || {
        start();
        at(0, 5, || store_at(0, 1, 7));
        if (rank(), thread_idx_x()) != (0, 5) {
            sync_cluster();
            receive();
            sync_cluster();
        }
    };
    let message = race("4-byte shared load at byte 0", "store by thread 5", 0);
    assert_race(&[], body, [1, 40], &message);
}

#[test]
fn divergence() {
    let divided = |wait_for: fn()| {
        move || {
            if (rank(), thread_idx_x() / 32) == (2, 1) {
                wait_for();
            }
            sync_cluster();
        }
    };
    let message =
        |place| format!("diverged: thread 0 (lane 0) waits in cluster::wait, but {place}");
    for (wait_for, place) in [
        (sync_threads as fn(), "sync_threads"),
        (|| sync_barrier(1, 64), "sync_barrier(1, 64)"),
    ] {
        let message = message(format!("thread 32 (lane 0) waits in {place}"));
        assert_synccheck(divided(wait_for), [2, 0], &message);
    }
    let lane = || {
        if (rank(), thread_idx_x()) == (2, 9) {
            sync_full_warp();
        }
        sync_cluster();
    };
    let message = message("thread 9 (lane 9) waits in sync_warp(0xffffffff)".into());
    assert_synccheck(lane, [2, 0], &message);
    let after = || {
        sync_cluster();
        at(1, 0, sync_threads);
    };
    let message = "diverged: thread 0 (lane 0) waits in sync_threads, \
                   but thread 1 (lane 1) has exited";
    assert_synccheck(after, [1, 0], message);
}

/// Between arrival and wait, threads reach a barrier of their block at which others already wait.
#[test]
fn threads_of_a_block_wait_for_the_cluster_in_different_places() {
    let meetings = [sync_threads as fn(), sync_full_warp, || sync_barrier(1, 64)];
    for (meet, early) in meetings.into_iter().flat_map(|meet| [(meet, 0), (meet, 1)]) {
        assert_clean(&[], || {
            arrive();
            if thread_idx_x() % 2 == early {
                wait();
                meet();
            } else {
                meet();
                wait();
            }
            sync_cluster();
        });
    }
}

#[test]
fn a_store_to_a_block_that_might_not_have_started() {
    let message = "a store to the shared memory of block (2, 0, 0), which might not have started: \
                   the thread has not waited for the cluster";
    let body = || {
        at(1, 6, || store_at(0, 2, 1));
        sync_cluster();
    };
    assert_synccheck(body, [1, 6], message);
    let body = || {
        arrive();
        at(1, 6, || store_at(0, 2, 1));
        wait();
    };
    assert_synccheck(body, [1, 6], message);
    assert_clean(&[], || at(1, 6, || store_at(0, 1, 1)));
}

#[test]
fn a_store_to_a_block_that_might_have_ended() {
    let message = "a store to the shared memory of block (2, 0, 0), which might have ended: \
                   it does not wait for the cluster afterwards";
    let send = |end: fn()| {
        move || {
            start();
            at(1, 6, || store_at(0, 2, 1));
            end();
        }
    };
    assert_clean(&[], send(sync_cluster));
    // A block exists until its last thread exits.
    assert_clean(
        &[],
        send(|| {
            if rank() != 2 || thread_idx_x() == 9 {
                sync_cluster()
            }
        }),
    );
    for end in [
        (|| ()) as fn(),
        start,
        || {
            if rank() != 2 {
                sync_cluster()
            }
        },
        || {
            if rank() == 2 {
                sync_cluster()
            }
        },
        || {
            sync_cluster();
            at(1, 6, || store_at(0, 2, 1));
        },
    ] {
        assert_synccheck(send(end), [1, 6], message);
    }
}

#[test]
fn a_store_that_is_not_in_the_memory_of_a_block() {
    let send = |offset: u32, rank: u32| {
        move || {
            start();
            at(3, 6, || store_at(offset, rank, 1));
            sync_cluster();
        }
    };
    assert_clean(&[], send(508, 1));
    let message = "a store to the shared memory of rank 4: wanted a rank below 4";
    assert_memcheck(send(0, 4), [3, 6], message);
    let message = "in the shared memory of block (1, 0, 0): out-of-bounds 4-byte shared store: \
                   ends 4 bytes past the end of the 512 bytes of shared memory";
    assert_memcheck(send(512, 1), [3, 6], message);
    let message = "in the shared memory of block (0, 0, 0): misaligned 4-byte shared store: \
                   at byte 2 of the 512 bytes of shared memory";
    assert_memcheck(send(2, 0), [3, 6], message);
    let misaligned = || {
        start();
        let address = dynamic_shared_mem() + 8;
        // SAFETY: the simulator checks the address.
        at(3, 6, || unsafe { store_shared_b128_at(address, 1, [0; 4]) });
    };
    let message = "in the shared memory of block (1, 0, 0): misaligned 16-byte shared store: \
                   at byte 8 of the 512 bytes of shared memory";
    assert_memcheck(misaligned, [3, 6], message);
}

#[test]
fn each_block_has_its_own_memory_and_barriers() {
    assert_clean(&[], || {
        store_shared(4 * thread_idx_x(), rank());
        if thread_idx_x() < 32 {
            (0..rank()).for_each(|_| sync_barrier(1, 32));
            arrive_at_barrier(2, 64);
        } else {
            sync_barrier(2, 64);
            assert_eq!(load_shared(0), rank());
        }
    });
    let message = "4-byte shared load at byte 0: the block has not written it";
    let body = || {
        if rank() == 0 {
            store_shared(4 * thread_idx_x(), 1);
        }
        sync_cluster();
        at(1, 0, || load_shared(0));
    };
    assert_memcheck(body, [1, 0], message);
}

#[test]
fn a_cluster_inherits_nothing_from_the_one_before() {
    let last = || block_idx_x() >= 63 * CLUSTER;
    let fault = |body: &(dyn Fn() + Sync)| {
        run_clusters(CLUSTER, [64 * CLUSTER, 1, 1], 32, &[], body).unwrap_err()
    };
    let unstarted = fault(&|| {
        if !last() {
            start();
        }
        at(1, 0, || store_at(0, 2, 1));
        sync_cluster();
    });
    assert!(
        unstarted.message.contains("might not have started"),
        "{unstarted}"
    );
    let unwritten = fault(&|| {
        start();
        at(1, 0, || (!last()).then(|| store_at(0, 2, 1)));
        sync_cluster();
        at(2, 0, || load_shared(0));
    });
    assert!(
        unwritten.message.ends_with("has not written it"),
        "{unwritten}"
    );
    let unordered = fault(&|| {
        start();
        at(1, 0, || store_at(0, 2, 1));
        if !last() {
            sync_threads();
        }
        if last() {
            arrive_relaxed()
        } else {
            arrive()
        }
        wait();
        at(2, 0, || load_shared(0));
        sync_cluster();
    });
    assert_eq!(unordered.kind, FaultKind::Racecheck);
    for fault in [unstarted, unwritten, unordered] {
        assert_eq!(fault.block[0] / CLUSTER, 63);
    }
}

#[test]
fn a_block_without_a_cluster_is_one() {
    let alone = |rank: u32| {
        run([2, 1, 1], 64, &[], move || {
            only(6, || store_at(0, 0, 7));
            sync_cluster();
            only(40, || assert_eq!(load_shared(0), 7));
            start();
            only(6, || store_at(4, rank, 1));
        })
    };
    alone(0).unwrap();
    let fault = alone(1).unwrap_err();
    let message = "a store to the shared memory of rank 1: wanted a rank below 1";
    assert_eq!(
        (fault.kind, fault.message.as_str()),
        (FaultKind::Memcheck, message)
    );
}

#[test]
fn the_largest_cluster() {
    let body = || {
        start();
        let [rank, thread] = [block_idx_x() % 8, thread_idx_x()];
        if thread < 64 {
            store_at(4 * thread, (rank + thread) % 8, thread);
        }
        sync_cluster();
        assert_eq!(load_shared(4 * (thread % 64)), thread % 64);
    };
    run_clusters(8, [16, 1, 1], 1024, &[], body).unwrap();
}

#[test]
fn clusters_that_cannot_be() {
    let message = |cluster, grid| {
        run_clusters(cluster, grid, 32, &[], || ())
            .unwrap_err()
            .to_string()
    };
    for cluster in [0, 9] {
        let wanted = format!(
            "a cluster of {cluster} blocks: wanted 1 to 8, what every GPU with clusters has; kernel crime"
        );
        assert_eq!(message(cluster, [72, 1, 1]), wanted);
    }
    assert_eq!(
        message(4, [6, 4, 1]),
        "a grid of (6, 4, 1) blocks, and clusters of 4 along x, or of all along x: wanted whole clusters; kernel crime"
    );
}
