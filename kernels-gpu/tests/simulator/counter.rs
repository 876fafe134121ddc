//! Counters of arriving warps and of copies.

use gated_delta_kernels::device::shared::{
    arrive_at_counter, arrive_at_counter_behind_copies, copy_bulk, copy_bulk_commit,
    copy_bulk_wait, dynamic_shared_mem, open_counter, wait_for_counter,
};
use gated_delta_kernels::device::sim::{FaultKind, Region};
use gated_delta_kernels::device::thread::{sync_threads, thread_idx_x};

use super::{assert_clean, assert_fault, copy_async, load_shared, only, run, store_shared, tensor};

/// Offset of the counter of most tests in shared memory, in bytes.
const COUNTER: u32 = 256;

fn open(counter: u32, threads: u32) {
    // SAFETY: the simulator checks the rest.
    unsafe { open_counter(dynamic_shared_mem() + counter, threads) }
}

fn arrive(counter: u32) {
    // SAFETY: the simulator checks the rest.
    unsafe { arrive_at_counter(dynamic_shared_mem() + counter) }
}

fn arrive_behind_copies(counter: u32) {
    // SAFETY: the simulator checks the rest.
    unsafe { arrive_at_counter_behind_copies(dynamic_shared_mem() + counter) }
}

fn wait_for(counter: u32, phase: u32) {
    // SAFETY: the simulator checks the rest.
    unsafe { wait_for_counter(dynamic_shared_mem() + counter, phase) }
}

fn bulk(offset: u32, address: u64, counter: u32) {
    let base = dynamic_shared_mem();
    // SAFETY: the simulator checks the rest.
    unsafe { copy_bulk(base + offset, address, 16, base + counter) }
}

/// Thread 0 opens the counter for the threads of a warp, and all threads wait for that.
fn opened() {
    only(0, || open(COUNTER, 32));
    sync_threads();
}

/// After the counter was opened, the first warp of 64 threads runs `first`, the second one `second`.
fn with_counter(first: impl Fn() + Sync, second: impl Fn() + Sync) -> impl Fn() + Sync {
    move || {
        opened();
        if thread_idx_x() < 32 {
            first();
        } else {
            second();
        }
    }
}

#[track_caller]
fn assert_sync<R>(body: impl Fn() -> R + Sync, thread: u32, message: &str) {
    assert_fault(&[], body, FaultKind::Synccheck, thread, message);
}

#[track_caller]
fn assert_race(regions: &[Region], body: impl Fn() + Sync, thread: u32, message: &str) {
    assert_fault(regions, body, FaultKind::Racecheck, thread, message);
}

const UNORDERED: &str = "race: 4-byte shared load at byte 0, and a store by thread 0 of block (0, 0, 0): \
     no barrier between them";

#[test]
fn what_was_before_the_arrival_is_before_those_that_wait() {
    let hand_over = |before: bool| {
        with_counter(
            move || {
                if !before {
                    arrive(COUNTER);
                }
                only(0, || store_shared(0, 7));
                if before {
                    arrive(COUNTER);
                }
            },
            || {
                wait_for(COUNTER, 0);
                only(32, || assert_eq!(load_shared(0), 7));
            },
        )
    };
    assert_clean(&[], hand_over(true));
    assert_race(&[], hand_over(false), 32, UNORDERED);
}

#[test]
fn who_does_not_wait_is_not_behind() {
    let body = with_counter(
        || {
            only(0, || store_shared(0, 7));
            arrive(COUNTER);
        },
        || only(32, || _ = load_shared(0)),
    );
    assert_race(&[], body, 32, UNORDERED);
}

/// Two warps hand a word back and forth, with a counter for each direction.
#[test]
fn phases_follow_each_other() {
    let rounds = 0..5;
    let body = with_counters(
        {
            let rounds = rounds.clone();
            move || {
                for round in rounds.clone() {
                    if round > 0 {
                        wait_for(COUNTER + 8, round - 1);
                    }
                    only(0, || store_shared(0, round));
                    arrive(COUNTER);
                }
            }
        },
        move || {
            for round in rounds.clone() {
                wait_for(COUNTER, round);
                only(32, || assert_eq!(load_shared(0), round));
                arrive(COUNTER + 8);
            }
        },
    );
    assert_clean(&[], body);
}

fn with_counters(first: impl Fn() + Sync, second: impl Fn() + Sync) -> impl Fn() + Sync {
    move || {
        only(0, || open(COUNTER + 8, 32));
        with_counter(&first, &second)();
    }
}

/// A phase of a counter does not order a second read of a stage with the store that fills it again.
#[test]
fn a_phase_orders_nothing_of_the_next() {
    let body = with_counters(
        || {
            only(0, || store_shared(0, 1));
            arrive(COUNTER);
            wait_for(COUNTER + 8, 0);
            only(0, || store_shared(0, 2));
            arrive(COUNTER);
        },
        || {
            wait_for(COUNTER, 0);
            arrive(COUNTER + 8);
            only(32, || _ = load_shared(0));
        },
    );
    let message = "race: 4-byte shared store at byte 0, and a load by thread 32 of block (0, 0, 0): \
         no barrier between them";
    let fault = run([1; 3], 64, &[], body).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Racecheck);
    assert!([message, UNORDERED].contains(&&*fault.message), "{fault}");
}

#[test]
fn copies_are_there_for_those_that_wait() {
    let mut data: Vec<u32> = (100..108).collect();
    let regions = [tensor("data", &mut data, &[8])];
    let address = regions[0].address;
    let body = |waits: bool, is_bulk: bool| {
        with_counter(
            move || {
                only(0, || match is_bulk {
                    true => bulk(0, address + 16, COUNTER),
                    false => copy_async(0, address + 16),
                });
                arrive_behind_copies(COUNTER);
            },
            move || {
                if waits {
                    wait_for(COUNTER, 0);
                }
                only(32, || assert_eq!(load_shared(4), 105));
            },
        )
    };
    for is_bulk in [false, true] {
        assert_clean(&regions, body(true, is_bulk));
        let message = UNORDERED.replace("byte 0", "byte 4");
        assert_race(&regions, body(false, is_bulk), 32, &message);
    }
}

/// A plain arrival orders bulk copies that the counter counts, and no other copies.
#[test]
fn an_arrival_is_not_behind_asynchronous_copies() {
    let mut data = [7u32; 4];
    let regions = [tensor("data", &mut data, &[4])];
    let address = regions[0].address;
    let body = |is_bulk: bool| {
        with_counter(
            move || {
                only(0, || match is_bulk {
                    true => bulk(0, address, COUNTER),
                    false => copy_async(0, address),
                });
                arrive(COUNTER);
            },
            || {
                wait_for(COUNTER, 0);
                only(32, || assert_eq!(load_shared(0), 7));
            },
        )
    };
    assert_clean(&regions, body(true));
    let message = "4-byte shared load at byte 0: thread 0 of block (0, 0, 0) copies to it and has not waited for the copy";
    assert_fault(&regions, body(false), FaultKind::Racecheck, 32, message);
}

#[test]
fn a_phase_that_never_completes() {
    let body = with_counter(|| {}, || wait_for(COUNTER, 0));
    let message = "diverged: thread 32 (lane 0) waits for phase 0 of the counter at byte 256, \
         but thread 0 (lane 0) has exited";
    assert_sync(body, 32, message);
}

/// A wait for a phase that is neither in progress nor the last one is an error, since its parity would stand for another phase.
#[test]
fn a_phase_that_is_neither_under_way_nor_the_last() {
    let problem = |phase: u32, completed: u32| {
        format!(
            "waits for phase {phase} of the counter at byte 256, of which {completed} are complete: \
             wanted the one under way, or the last"
        )
    };
    let ahead = with_counter(|| {}, || wait_for(COUNTER, 1));
    assert_sync(ahead, 32, &problem(1, 0));
    let arrives_twice = || (0..2).for_each(|_| arrive(COUNTER));
    let behind = with_counter(arrives_twice, || wait_for(COUNTER, 0));
    assert_sync(behind, 32, &problem(0, 2));
}

#[test]
fn whole_warps_come_and_no_more_than_are_counted() {
    let body = || {
        only(0, || open(COUNTER, 96));
        sync_threads();
        arrive(COUNTER);
        arrive(COUNTER);
    };
    // The third arrival completes the first phase, and the fourth begins the next.
    assert_clean(&[], body);
    let body = || {
        opened();
        if thread_idx_x() != 5 {
            arrive(COUNTER);
        }
    };
    let message = "diverged: thread 0 (lane 0) waits in arrive_at_counter, \
         but thread 5 (lane 5) has exited";
    assert_sync(body, 0, message);
    let of = |threads: u32| move || only(0, || open(COUNTER, threads));
    for threads in [0, 33, 1056] {
        let message =
            format!("a counter of {threads} threads: wanted one, or whole warps, at most 1024");
        assert_sync(of(threads), 0, &message);
    }
}

#[test]
fn a_counter_is_open_once_and_for_those_behind_it() {
    let twice = || {
        only(0, || {
            open(COUNTER, 32);
            open(COUNTER, 32);
        });
    };
    let message = "8-byte shared mailbox at byte 256: it is in a mailbox, which thread 0 of block (0, 0, 0) has opened";
    assert_fault(&[], twice, FaultKind::Memcheck, 0, message);
    let message = "the counter at byte 264 is not open";
    assert_sync(with_counter(|| arrive(COUNTER + 8), || {}), 0, message);
    let unordered = || {
        only(0, || open(COUNTER, 32));
        if thread_idx_x() >= 32 {
            arrive(COUNTER);
        }
    };
    let message = "the counter at byte 256 might not be open: no barrier between that and the use of this thread";
    assert_sync(unordered, 32, message);
    let touched = with_counter(|| only(0, || store_shared(COUNTER, 0)), || {});
    let message = "4-byte shared store at byte 256: it is in a mailbox, which thread 0 of block (0, 0, 0) has opened";
    assert_fault(&[], touched, FaultKind::Memcheck, 0, message);
}

/// Groups of bulk copies complete on a counter that belongs to one thread.
#[test]
fn a_thread_has_a_counter_of_its_own() {
    let mut data: Vec<u32> = (0..8).collect();
    let regions = [tensor("data", &mut data, &[8])];
    let address = regions[0].address;
    let commit = || {
        // SAFETY: the simulator checks the rest.
        unsafe { copy_bulk_commit(dynamic_shared_mem() + COUNTER) }
    };
    let wait = |group: u32| {
        // SAFETY: the simulator checks the rest.
        unsafe { copy_bulk_wait(dynamic_shared_mem() + COUNTER, group) }
    };
    let body = |end: u32| {
        move || {
            only(0, || {
                open(COUNTER, 1);
                for group in 0..2 {
                    bulk(16 * group, address + u64::from(16 * group), COUNTER);
                    commit();
                    if group < end {
                        wait(group);
                    }
                }
                assert_eq!(load_shared(20), 5);
            });
        }
    };
    assert_clean(&regions, body(2));
    let message = "4-byte shared load at byte 20: thread 0 of block (0, 0, 0) copies to it and has not waited for the copy";
    assert_fault(&regions, body(1), FaultKind::Racecheck, 0, message);
    let message = "closes a group of bulk copies, and has not waited for the one before";
    assert_fault(&regions, body(0), FaultKind::Synccheck, 0, message);
    let early = || {
        only(0, || {
            open(COUNTER, 1);
            wait(0);
        })
    };
    assert_sync(early, 0, "waits for group 0 of bulk copies: 0 are closed");
    let others = || {
        only(0, || open(COUNTER, 1));
        sync_threads();
        only(1, commit);
    };
    assert_sync(others, 1, "the counter at byte 256 is another thread's own");
    let mixed = with_counter(|| only(0, commit), || {});
    let message = "the counter at byte 256 is of one thread, or of warps, and is used otherwise";
    assert_sync(mixed, 0, message);
}
