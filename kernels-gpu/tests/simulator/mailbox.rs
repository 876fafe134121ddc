//! Mailboxes: sent words are visible to the threads that waited, and to no others.

use std::slice;

use gated_delta_kernels::device::cluster::{
    arrive, arrive_relaxed, open_mailbox, send_b32, wait, wait_mailbox,
};
use gated_delta_kernels::device::shared::dynamic_shared_mem;
use gated_delta_kernels::device::sim::{FaultKind, Region};
use gated_delta_kernels::device::thread::{
    arrive_at_barrier, block_idx_x, sync_barrier, sync_threads, thread_idx_x,
};
use gated_delta_kernels::device::warp::{FULL_MASK, sync_warp, warp_shuffle_xor};

use super::cluster::{
    CLUSTER, assert_clean, assert_fault, assert_race, assert_synccheck, at, rank, start, store_at,
    sync_cluster,
};
use super::{copy_async, load, load_shared, only, run, run_clusters, store, store_shared, tensor};

/// Offset of the mailbox of most tests in shared memory, in bytes.
const BOX: u32 = 256;

fn open(mailbox: u32, bytes: u32) {
    // SAFETY: the simulator checks the address.
    unsafe { open_mailbox(dynamic_shared_mem() + mailbox, bytes) }
}

fn send(offset: u32, rank: u32, value: u32, mailbox: u32) {
    let base = dynamic_shared_mem();
    // SAFETY: the simulator checks addresses and rank.
    unsafe { send_b32(base + offset, rank, value, base + mailbox) }
}

fn wait_for(mailbox: u32) {
    // SAFETY: the simulator checks the address.
    unsafe { wait_mailbox(dynamic_shared_mem() + mailbox) }
}

/// Every block opens [`BOX`] for `bytes` bytes, and waits for the cluster.
fn open_all(bytes: u32) {
    only(0, || open(BOX, bytes));
    start();
}

/// In each round with a mailbox of its own, each thread sends a word to the next block and one to its own block.
#[test]
fn exchange() {
    const ROUNDS: u32 = 8;
    let grid = [3 * CLUSTER, 1, 1];
    let mut data = vec![0_u32; 12 * 64 * 8];
    let o = tensor("o", &mut data, &[12, 64, 8]);
    let word = |block: u32, thread: u32, round: u32| 1000 * block + 100 * round + thread;
    let body = || {
        let (rank, thread, block) = (rank(), thread_idx_x(), block_idx_x());
        let mailbox = |round: u32| 256 + 8 * round;
        only(5, || {
            (0..ROUNDS).for_each(|round| open(mailbox(round), 4 * 64))
        });
        start();
        for round in 0..ROUNDS {
            // The words are overwritten only after all threads have read them.
            if round > 0 {
                sync_cluster();
            }
            let target = (rank + round) % CLUSTER;
            send(
                4 * (thread % 64),
                target,
                word(block, thread, round),
                mailbox(round),
            );
            wait_for(mailbox(round));
            let place = u64::from(ROUNDS * (64 * block + thread) + round);
            store(o.address + 4 * place, load_shared(4 * ((thread + 1) % 64)));
        }
    };
    run_clusters(CLUSTER, grid, 64, slice::from_ref(&o), body).unwrap();
    for (place, &got) in (0..).zip(&data) {
        let (block, thread, round) = (place / ROUNDS / 64, place / ROUNDS % 64, place % ROUNDS);
        let rank = (block % CLUSTER + 2 * CLUSTER - round) % CLUSTER;
        let sent = word(block / CLUSTER * CLUSTER + rank, (thread + 1) % 64, round);
        assert_eq!(got, sent, "block {block}, thread {thread}, round {round}");
    }
}

/// Thread 5 of block 0 sends a word to block 1, where thread 40 waits for it. Then all threads of block 1 run `then`.
fn sent(then: impl Fn()) -> impl Fn() {
    move || {
        open_all(4);
        at(0, 5, || send(0, 1, 7, BOX));
        at(1, 40, || wait_for(BOX));
        if rank() == 1 {
            then();
        }
    }
}

fn read(thread: u32) {
    only(thread, || assert_eq!(load_shared(0), 7));
}

const UNORDERED: &str = "race: 4-byte shared load at byte 0: thread 5 of block (0, 0, 0) sends to it, \
     and nothing orders the wait for the mailbox at byte 256 before";

#[test]
fn what_is_sent_is_there_after_the_wait() {
    assert_clean(&[], sent(|| read(40)));
    assert_race(&[], sent(|| read(41)), [1, 41], UNORDERED);
    assert_race(&[], sent(|| read(4)), [1, 4], UNORDERED);
    let early = || {
        open_all(4);
        at(0, 5, || send(0, 1, 7, BOX));
        at(1, 40, || load_shared(0));
        at(1, 40, || wait_for(BOX));
    };
    assert_race(&[], early, [1, 40], UNORDERED);
    // Before the word is sent, memory has nothing or the old value.
    let too_early = || {
        at(3, 40, || store_shared(0, 1));
        open_all(4);
        at(2, 40, || load_shared(0));
        at(3, 5, || send(0, 2, 7, BOX));
    };
    let message = "4-byte shared load at byte 0: the block has not written it";
    assert_fault(&[], too_early, FaultKind::Memcheck, [2, 40], message);
    let before = || {
        at(1, 40, || store_shared(0, 1));
        only(0, || open(BOX, 4));
        sync_cluster();
        at(1, 40, || load_shared(0));
        at(2, 5, || send(0, 1, 7, BOX));
        at(1, 40, || wait_for(BOX));
    };
    let message = "in the shared memory of block (1, 0, 0): race: 4-byte shared send at byte 0, and a load by thread 40 \
         of block (1, 0, 0): no cluster barrier between them";
    assert_race(&[], before, [2, 5], message);
}

#[test]
fn barriers_hand_the_wait_on() {
    assert_clean(
        &[],
        sent(|| {
            sync_threads();
            read(3);
        }),
    );
    assert_clean(
        &[],
        sent(|| {
            if thread_idx_x() >= 32 {
                sync_warp(FULL_MASK);
            }
            read(41);
        }),
    );
    assert_clean(
        &[],
        sent(|| {
            if thread_idx_x() >= 32 {
                arrive_at_barrier(1, 64);
            } else {
                sync_barrier(1, 64);
            }
            read(3);
        }),
    );
    assert_clean(
        &[],
        sent(|| {
            sync_barrier(1, 64);
            read(3);
        }),
    );
    // None of these orders another thread's read: a shuffle, a barrier of another warp, an arrival of the readers.
    let shuffle = sent(|| {
        warp_shuffle_xor(0.0, 1);
        read(41);
    });
    assert_race(&[], shuffle, [1, 41], UNORDERED);
    let of_a_warp = sent(|| {
        sync_warp(FULL_MASK);
        read(3);
    });
    assert_race(&[], of_a_warp, [1, 3], UNORDERED);
    let among_others = sent(|| {
        if thread_idx_x() >= 32 && thread_idx_x() != 40 {
            sync_warp(!(1 << 8));
        }
        read(41);
    });
    assert_race(&[], among_others, [1, 41], UNORDERED);
    let reading = sent(|| {
        if thread_idx_x() < 32 {
            arrive_at_barrier(1, 64);
        } else {
            sync_barrier(1, 64);
        }
        read(3);
    });
    assert_race(&[], reading, [1, 3], UNORDERED);
    // A second use of the same barrier by another warp does not order the read either.
    let again = || {
        let of_warp = |warp: u32| {
            if thread_idx_x() / 32 == warp {
                sync_barrier(1, 32);
            }
        };
        sent(|| of_warp(1))();
        start();
        of_warp(0);
        at(1, 3, || load_shared(0));
    };
    assert_race(&[], again, [1, 3], UNORDERED);
}

/// A word that thread 40 of block 1 has waited for may be overwritten by block 3 after a cluster barrier.
#[test]
fn the_cluster_hands_the_wait_on() {
    let overwritten = |come: fn()| {
        move || {
            open_all(4);
            at(0, 5, || send(0, 1, 7, BOX));
            at(1, 40, || wait_for(BOX));
            come();
            wait();
            at(3, 6, || store_at(0, 1, 8));
            sync_cluster();
            at(1, 9, || assert_eq!(load_shared(0), 8));
        }
    };
    assert_clean(&[], overwritten(arrive));
    let message = UNORDERED.replace("load", "store");
    let message = format!("in the shared memory of block (1, 0, 0): {message}");
    assert_race(&[], overwritten(arrive_relaxed), [3, 6], &message);
    // A thread that waits for the mailbox between its arrival at the cluster's barrier and its wait there hands nothing on by this
    // phase.
    let late = || {
        open_all(4);
        at(0, 5, || send(0, 1, 7, BOX));
        arrive();
        at(1, 40, || wait_for(BOX));
        wait();
        at(3, 6, || store_at(0, 1, 8));
        sync_cluster();
    };
    assert_race(&[], late, [3, 6], &message);
}

#[test]
fn nothing_else_of_the_sender_is_ordered() {
    let mut data = [0_u32; 1];
    let o = tensor("o", &mut data, &[1]);
    let regions = slice::from_ref(&o);
    let with = |before: fn(u64), after: fn(u64)| {
        let address = o.address;
        move || {
            open_all(4);
            at(0, 5, || {
                before(address);
                send(0, 1, 7, BOX);
            });
            at(1, 40, || {
                wait_for(BOX);
                after(address);
            });
            sync_cluster();
        }
    };
    let race = |access: &str| {
        format!(
            "race: {access}, and a store by thread 5 of block (0, 0, 0): no cluster barrier between them"
        )
    };
    let body = with(|_| store_at(4, 1, 1), |_| _ = load_shared(4));
    let message = race("4-byte shared load at byte 4");
    assert_race(regions, body, [1, 40], &message);
    // A plain store, in place of a send, is not ordered by the mailbox.
    let mutant = || {
        open_all(4);
        at(0, 5, || {
            store_at(0, 1, 7);
            send(4, 1, 7, BOX);
        });
        at(1, 40, || wait_for(BOX));
        at(1, 40, || load_shared(0));
        sync_cluster();
    };
    let message = race("4-byte shared load at byte 0");
    assert_race(&[], mutant, [1, 40], &message);
    let body = with(|o| store(o, 1), |o| _ = load(o));
    let message = race("4-byte load of `o` [1] at element [0]");
    assert_race(regions, body, [1, 40], &message);
    // A word that was sent with another mailbox is not ordered either.
    let two = || {
        only(0, || {
            open(BOX, 4);
            open(BOX + 8, 4);
        });
        start();
        at(0, 5, || {
            send(0, 1, 7, BOX);
            send(4, 1, 7, BOX + 8);
        });
        at(1, 40, || {
            wait_for(BOX + 8);
            load_shared(0);
        });
    };
    assert_race(&[], two, [1, 40], UNORDERED);
    // The sender itself is not ordered after its send either.
    let own = || {
        open_all(4);
        at(0, 5, || {
            send(0, 0, 7, BOX);
            load_shared(0);
        });
    };
    assert_race(&[], own, [0, 5], UNORDERED);
    let twice = || {
        open_all(8);
        at(0, 5, || {
            send(0, 1, 7, BOX);
            send(0, 1, 8, BOX);
        });
    };
    let message = format!(
        "in the shared memory of block (1, 0, 0): {}",
        UNORDERED.replace("load", "send")
    );
    assert_race(&[], twice, [0, 5], &message);
}

#[test]
fn a_mailbox_must_be_open() {
    let closed = || {
        start();
        at(0, 5, || send(0, 1, 7, BOX));
    };
    let message = "sends to the mailbox at byte 256 of block (1, 0, 0), which is not open";
    assert_synccheck(closed, [0, 5], message);
    let closed = || {
        open_all(4);
        at(2, 6, || wait_for(BOX + 8));
    };
    let message = "waits for the mailbox at byte 264 of block (2, 0, 0), which is not open";
    assert_synccheck(closed, [2, 6], message);
    let known = "which might not be open: the thread has not waited for the cluster since";
    let message = |op: &str, block: u32| {
        format!("{op} the mailbox at byte 256 of block ({block}, 0, 0), {known}")
    };
    let alone = || {
        only(0, || open(BOX, 4));
        sync_threads();
        at(3, 5, || send(0, 1, 7, BOX));
        start();
    };
    assert_synccheck(alone, [3, 5], &message("sends to", 1));
    // The same holds for sends to the own block, and for the thread that opened the mailbox.
    let own = || {
        only(0, || open(BOX, 4));
        sync_threads();
        at(0, 5, || send(0, 0, 7, BOX));
        start();
    };
    assert_synccheck(own, [0, 5], &message("sends to", 0));
    let unmet = || {
        at(0, 0, || {
            open(BOX, 0);
            wait_for(BOX);
        });
    };
    assert_synccheck(unmet, [0, 0], &message("waits for", 0));
    // The opener arrived at the phase before it opened the mailbox.
    let late = |again: bool| {
        move || {
            arrive_relaxed();
            only(0, || open(BOX, 4));
            wait();
            if again {
                start();
            }
            at(3, 5, || send(0, 1, 7, BOX));
            at(1, 5, || wait_for(BOX));
        }
    };
    assert_synccheck(late(false), [1, 5], &message("waits for", 1));
    assert_clean(&[], late(true));
    // The sender has to wait for the phase itself.
    let unawaited = || {
        start();
        only(0, || open(BOX, 4));
        arrive_relaxed();
        at(3, 5, || send(0, 1, 7, BOX));
        wait();
        at(1, 5, || wait_for(BOX));
    };
    assert_synccheck(unawaited, [3, 5], &message("sends to", 1));
    // An opener that exits arrives at no phase.
    let exited = || {
        if rank() == 1 && thread_idx_x() == 0 {
            return open(BOX, 4);
        }
        start();
        at(3, 5, || send(0, 1, 7, BOX));
    };
    assert_synccheck(exited, [3, 5], &message("sends to", 1));
    // A thread's wait for a phase also counts for the threads that it meets at a barrier of its block.
    assert_clean(&[], || {
        open_all(4);
        sync_threads();
        at(3, 5, || send(0, 1, 7, BOX));
        at(1, 5, || wait_for(BOX));
    });
}

#[test]
fn a_mailbox_is_opened_once_and_left_alone() {
    let twice = || only(0, || (open(BOX, 4), open(BOX, 4)));
    assert_synccheck(
        twice,
        [0, 0],
        "opens the mailbox at byte 256, which is open",
    );
    let memcheck = |body: &(dyn Fn() + Sync), place, message: &str| {
        assert_fault(&[], body, FaultKind::Memcheck, place, message);
    };
    let message = "misaligned 8-byte shared mailbox: at byte 260 of the 512 bytes of shared memory";
    memcheck(&|| at(0, 0, || open(260, 4)), [0, 0], message);
    let message = "out-of-bounds 8-byte shared mailbox: ends 8 bytes past the end \
                   of the 512 bytes of shared memory";
    memcheck(&|| at(0, 0, || open(512, 4)), [0, 0], message);
    let message = "a mailbox for 1048576 bytes: wanted at most 1048575";
    assert_synccheck(|| at(0, 0, || open(BOX, 1 << 20)), [0, 0], message);
    let message = "the simulator has at most 8 mailboxes for a block";
    let many = || at(2, 0, || (0..9).for_each(|i| open(8 * i, 4)));
    assert_synccheck(many, [2, 0], message);

    let touched = |op: &str| {
        format!("{op}: it is in a mailbox, which thread 0 of block (2, 0, 0) has opened")
    };
    let with = |touch: fn()| {
        move || {
            open_all(4);
            at(2, 0, touch);
            sync_cluster();
        }
    };
    let load = with(|| _ = load_shared(BOX));
    memcheck(&load, [2, 0], &touched("4-byte shared load at byte 256"));
    let store = with(|| store_shared(BOX + 4, 1));
    memcheck(&store, [2, 0], &touched("4-byte shared store at byte 260"));
    let of_others = || {
        open_all(4);
        at(1, 0, || store_at(BOX, 2, 1));
    };
    let there = |op: &str| format!("in the shared memory of block (2, 0, 0): {}", touched(op));
    memcheck(
        &of_others,
        [1, 0],
        &there("4-byte shared store at byte 256"),
    );
    let sent = || {
        open_all(4);
        at(1, 0, || send(BOX, 2, 1, BOX));
    };
    memcheck(&sent, [1, 0], &there("4-byte shared send at byte 256"));
    let mut data = [0_u32; 4];
    let source = tensor("source", &mut data, &[4]);
    let address = source.address;
    let copied = move || {
        open_all(4);
        at(2, 0, || copy_async(BOX, address));
    };
    let message = touched("16-byte shared asynchronous copy at byte 256");
    assert_fault(&[source], copied, FaultKind::Memcheck, [2, 0], &message);
    // The opening races with an earlier store like any other store.
    let unordered = || {
        at(2, 7, || store_shared(BOX, 1));
        at(2, 40, || open(BOX, 4));
    };
    let message = "race: 8-byte shared mailbox at byte 256, and a store by thread 7 of block (2, 0, 0): \
                   no barrier between them";
    assert_race(&[], unordered, [2, 40], message);
}

#[test]
fn as_many_bytes_come_as_are_waited_for() {
    let more = || {
        open_all(8);
        only(rank(), || send(4 * rank(), 1, 7, BOX));
        at(1, 40, || wait_for(BOX));
    };
    let message =
        "sends to the mailbox at byte 256 of block (1, 0, 0): 12 bytes, and it was opened for 8";
    assert_synccheck(more, [2, 2], message);
    let starved = |bytes: u32, meet: fn()| {
        move || {
            open_all(bytes);
            only(rank(), || send(4 * rank(), 1, 7, BOX));
            at(1, 40, || wait_for(BOX));
            meet();
        }
    };
    let message = "diverged: the mailbox at byte 256 waits for 4 of 20 bytes, \
                   and no thread goes on to send them";
    assert_synccheck(starved(20, || ()), [1, 40], message);
    assert_synccheck(starved(20, sync_threads), [1, 40], message);
    assert_synccheck(starved(20, sync_cluster), [1, 40], message);
    assert_clean(&[], starved(16, sync_cluster));
    let message = message.replace("4 of 20", "2 of 18");
    assert_synccheck(starved(18, || ()), [1, 40], &message);
    // Threads of the waiting block send, before and after barriers with others.
    assert_clean(&[], || {
        open_all(4 * 64);
        if thread_idx_x() < 32 {
            wait_for(BOX);
        }
        if thread_idx_x() >= 32 {
            sync_barrier(1, 32);
            send(4 * (thread_idx_x() - 32), rank() ^ 1, 7, BOX);
            sync_barrier(1, 32);
            send(4 * thread_idx_x(), rank(), 7, BOX);
        }
        sync_threads();
        wait_for(BOX);
        assert_eq!(load_shared(4 * (thread_idx_x() % 32)), 7);
    });
    // The waiting threads have arrived at the phase that the senders wait for.
    assert_clean(&[], || {
        open_all(4);
        arrive_relaxed();
        if rank() == 1 {
            wait_for(BOX);
        }
        wait();
        at(0, 5, || send(0, 1, 7, BOX));
    });
}

#[test]
fn a_block_is_there_for_what_is_sent_to_it() {
    let ended = |bytes: u32| {
        move || {
            open_all(bytes);
            at(3, 5, || send(0, 1, 7, BOX));
        }
    };
    let message = |expected: u32| {
        format!(
            "4 of {expected} bytes were sent to the mailbox at byte 256, and the block might have ended before: \
             no thread of it waits for them"
        )
    };
    assert_synccheck(ended(4), [1, 0], &message(4));
    assert_synccheck(ended(8), [1, 0], &message(8));
    // A barrier does not help, since it does not wait for the sent words.
    let met = || {
        ended(4)();
        sync_cluster();
    };
    assert_synccheck(met, [1, 0], &message(4));
    // The wait of one thread of the block is enough.
    assert_clean(&[], || {
        ended(4)();
        at(1, 60, || wait_for(BOX));
    });
    // If nothing is sent, no thread has to wait for the mailbox.
    assert_clean(&[], || open_all(4));
}

#[test]
fn a_cluster_inherits_no_mailbox() {
    let last = || block_idx_x() >= 63 * CLUSTER;
    let fault = |body: &(dyn Fn() + Sync)| {
        let fault = run_clusters(CLUSTER, [64 * CLUSTER, 1, 1], 32, &[], body).unwrap_err();
        assert_eq!(fault.block[0] / CLUSTER, 63);
        fault.message
    };
    let closed = fault(&|| {
        if !last() {
            only(0, || open(BOX, 4));
        }
        start();
        at(0, 5, || send(0, 1, 7, BOX));
        at(1, 5, || wait_for(BOX));
    });
    assert!(closed.ends_with("which is not open"), "{closed}");
    let unordered = fault(&|| {
        open_all(4);
        at(0, 5, || send(0, 1, 7, BOX));
        at(1, 5, || wait_for(BOX));
        if !last() {
            sync_threads();
        }
        at(1, 6, || load_shared(0));
    });
    assert!(unordered.contains("nothing orders"), "{unordered}");
    let overwritten = fault(&|| {
        open_all(4);
        at(0, 5, || send(0, 1, 7, BOX));
        at(1, 5, || wait_for(BOX));
        if last() {
            arrive_relaxed()
        } else {
            arrive()
        }
        wait();
        at(3, 6, || store_at(0, 1, 8));
        sync_cluster();
    });
    assert!(overwritten.contains("nothing orders"), "{overwritten}");
}

#[test]
fn ranks_and_places() {
    let memcheck = |body: &(dyn Fn() + Sync), message: &str| {
        assert_fault(&[], body, FaultKind::Memcheck, [3, 6], message);
    };
    let with = |offset: u32, rank: u32| {
        move || {
            open_all(4);
            at(3, 6, || send(offset, rank, 7, BOX));
        }
    };
    let message = "a send to the shared memory of rank 4: wanted a rank below 4";
    memcheck(&with(0, 4), message);
    let message = "in the shared memory of block (1, 0, 0): out-of-bounds 4-byte shared send: \
                   ends 4 bytes past the end of the 512 bytes of shared memory";
    memcheck(&with(512, 1), message);
    let message = "in the shared memory of block (3, 0, 0): misaligned 4-byte shared send: \
                   at byte 2 of the 512 bytes of shared memory";
    memcheck(&with(2, 3), message);
}

#[test]
fn a_block_without_a_cluster_is_one() {
    let regions: &[Region] = &[];
    run([2, 1, 1], 64, regions, || {
        open_all(4);
        only(6, || send(0, 0, 7, BOX));
        wait_for(BOX);
        assert_eq!(load_shared(0), 7);
    })
    .unwrap();
}
