//! Barriers of some of a block's warps: which warps have arrived, and which accesses happened before the waiting ones continue.

use std::cell::Cell;

use super::block::{Block, LANES};
use super::cluster::latest_phase;
use super::fault::Problem;
use super::fibers::At;
use super::mailbox::all_mail;
use super::race::{MAX_THREADS, WARPS};

/// Barriers of a block; number 0 is the barrier of all its threads.
pub const BARRIERS: usize = 16;

/// Vector clock: for each warp of a block, the time up to which its accesses happened before.
pub type Clock = [Cell<u32>; WARPS];

/// A barrier's number and its thread count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barrier {
    number: u32,
    threads: u32,
}

impl Barrier {
    /// Faults if the number or the thread count is invalid.
    pub fn new(number: u32, threads: u32) -> Self {
        if number == 0 || number as usize >= BARRIERS {
            let message = format!("barrier {number}: wanted 1 to {}", BARRIERS - 1);
            Problem::sync(message).raise();
        }
        if threads == 0 || threads > MAX_THREADS || !threads.is_multiple_of(LANES as u32) {
            let message = format!(
                "barrier {number} for {threads} threads: wanted whole warps, at most {MAX_THREADS}"
            );
            Problem::sync(message).raise();
        }
        Self { number, threads }
    }

    pub fn describe(self) -> String {
        format!("({}, {})", self.number, self.threads)
    }
}

/// The warps that have arrived at a barrier without waiting.
#[derive(Default)]
pub struct Arrivals {
    /// Thread count of the barrier; 0 before the first arrival.
    threads: Cell<u32>,
    warps: Cell<u32>,
    clock: Clock,
    /// Newest phase of the cluster's barrier that happened before an arrival.
    phases: Cell<u32>,
    /// Mailboxes, a bit each, that were received before an arrival.
    mail: Cell<u64>,
    /// Votes: whether any arriving thread has said yes in this phase, and in the last completed phase.
    votes: Cell<[bool; 2]>,
}

impl Arrivals {
    pub fn clear(&self) {
        self.threads.set(0);
        self.warps.set(0);
        self.clock.iter().for_each(|time| time.set(0));
        self.phases.set(0);
        self.mail.set(0);
        let [said, _] = self.votes.get();
        self.votes.set([false, said]);
    }
}

impl Block<'_> {
    /// Adds the running thread's vote at `barrier`.
    pub(super) fn vote(&self, barrier: Barrier, is: bool) {
        let votes = &self.arrivals[barrier.number as usize].votes;
        let [said, last] = votes.get();
        votes.set([said || is, last]);
    }

    /// The result of the vote at `barrier`, for a thread that has waited there.
    pub(super) fn vote_of(&self, barrier: Barrier) -> bool {
        let [_, last] = self.arrivals[barrier.number as usize].votes.get();
        last
    }

    /// `warp` arrives at `barrier` without waiting.
    pub(super) fn arrive(&self, warp: usize, barrier: Barrier) -> Result<(), Box<Problem>> {
        let arrivals = &self.arrivals[barrier.number as usize];
        let Barrier { number, threads } = barrier;
        match arrivals.threads.replace(threads) {
            before if before == 0 || before == threads => {}
            before => {
                let message =
                    format!("barrier {number} is for {before} threads, and for {threads}");
                return Err(Problem::sync(message));
            }
        }
        arrivals.warps.set(arrivals.warps.get() + 1);
        if arrivals.warps.get() * LANES as u32 >= threads {
            let message =
                format!("barrier {number}: all {threads} threads have gone on, none waits");
            return Err(Problem::sync(message));
        }
        self.hand_over(warp, arrivals, self.tick());
        Ok(())
    }

    /// Adds `warp`'s accesses up to `now`, and everything before them, to the clock of `arrivals`.
    pub(super) fn hand_over(&self, warp: usize, arrivals: &Arrivals, now: u32) {
        join(&arrivals.clock, &self.clocks[warp]);
        arrivals.clock[warp].set(now);
        let phases = latest_phase(self.warp(warp));
        arrivals.phases.set(arrivals.phases.get().max(phases));
        let mail = all_mail(self.warp(warp));
        arrivals.mail.set(arrivals.mail.get() | mail);
    }

    /// Orders everything in the clock of `arrivals` before `warp`'s next accesses.
    pub(super) fn take_over(&self, warp: usize, arrivals: &Arrivals) {
        join(&self.clocks[warp], &arrivals.clock);
        for thread in self.warp(warp) {
            thread
                .phases
                .set(thread.phases.get().max(arrivals.phases.get()));
            thread.mail.set(thread.mail.get() | arrivals.mail.get());
        }
    }

    /// Checks that no barrier has arrivals that nobody waited for.
    pub(super) fn check_arrivals(&self) -> Result<(), Problem> {
        let waited_for = |arrivals: &Arrivals| arrivals.warps.get() == 0;
        match self
            .arrivals
            .iter()
            .position(|arrivals| !waited_for(arrivals))
        {
            None => Ok(()),
            Some(number) => {
                let message = format!("barrier {number}: warps have come to it, and none waits");
                Err(*Problem::sync(message))
            }
        }
    }

    /// Releases the warps of a barrier at which all others have arrived; returns whether there was one.
    pub(super) fn complete_a_barrier(&self) -> bool {
        let all_at = |warp: usize, at: At| self.warp(warp).iter().all(|thread| thread.is(at));
        let waits_for = |warp: usize| match self.warp(warp)[0].at.get() {
            at @ At::SyncBarrier(barrier) if all_at(warp, at) => Some(barrier),
            _ => None,
        };
        let warps = self.threads.len() / LANES;
        let due = (0..warps).filter_map(waits_for).find(|&barrier| {
            let waiting = (0..warps).filter(|&warp| waits_for(warp) == Some(barrier));
            let arrivals = &self.arrivals[barrier.number as usize];
            let agreed = [0, barrier.threads].contains(&arrivals.threads.get());
            let come = arrivals.warps.get() + waiting.count() as u32;
            agreed && come * LANES as u32 == barrier.threads
        });
        let Some(barrier) = due else { return false };
        let arrivals = &self.arrivals[barrier.number as usize];
        let waiting = || (0..warps).filter(|&warp| waits_for(warp) == Some(barrier));
        let now = self.tick();
        waiting().for_each(|warp| self.hand_over(warp, arrivals, now));
        let released: Vec<usize> = waiting().collect();
        for warp in released {
            self.take_over(warp, arrivals);
            for thread in self.warp(warp) {
                thread.lane_barriers.iter().for_each(|time| time.set(now));
                thread.at.set(At::Running);
            }
        }
        arrivals.clear();
        true
    }
}

/// Makes each time of `clock` the later of both.
fn join(clock: &Clock, other: &Clock) {
    for (time, other) in clock.iter().zip(other) {
        time.set(time.get().max(other.get()));
    }
}
