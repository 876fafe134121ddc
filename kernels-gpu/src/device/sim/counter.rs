//! Counters (mbarriers) of a block: which threads have arrived, and which accesses are ordered before the waiting ones.

use std::cell::Cell;

use super::barrier::Arrivals;
use super::block::{Block, LANES};
use super::fault::Problem;
use super::fibers::At;
use super::race::{Access, MAX_THREADS};
use super::shared::BASE;

/// A counter.
pub struct Counter {
    address: u32,
    opened: Access,
    /// Threads that it counts.
    threads: u32,
    /// Threads that have arrived in the current phase.
    come: Cell<u32>,
    /// Completed phases.
    completed: Cell<u32>,
    /// Phases that the owner of a private counter has waited for.
    waited: Cell<u32>,
    /// Accesses ordered before threads that wait for the current phase, and for the last one.
    arrivals: [Arrivals; 2],
}

impl Counter {
    fn arrivals(&self, phase: u32) -> &Arrivals {
        &self.arrivals[phase as usize % 2]
    }

    /// Whether the counter is private to one thread.
    fn is_own(&self) -> bool {
        self.threads == 1
    }

    fn name(&self) -> String {
        format!("the counter at byte {}", self.address - BASE)
    }

    fn problem<R>(&self, what: &str) -> Result<R, Box<Problem>> {
        Err(Problem::sync(format!("{} {what}", self.name())))
    }
}

impl Block<'_> {
    /// Runs `f` on the counter at `address`.
    fn counter<R>(
        &self,
        address: u32,
        f: impl FnOnce(&Counter) -> Result<R, Box<Problem>>,
    ) -> Result<R, Box<Problem>> {
        let counters = self.counters.borrow();
        match counters.iter().find(|counter| counter.address == address) {
            Some(counter) => f(counter),
            None => {
                let byte = address.wrapping_sub(BASE);
                let message = format!("the counter at byte {byte} is not open");
                Err(Problem::sync(message))
            }
        }
    }

    /// Counts an arrival of `warp` at the counter at `address`.
    pub(super) fn count(&self, warp: usize, address: u32) -> Result<(), Box<Problem>> {
        self.counter(address, |counter| {
            let arrivals = counter.arrivals(counter.completed.get());
            if counter.come.get() == 0 {
                arrivals.clear();
            }
            self.hand_over(warp, arrivals, self.tick());
            let come = counter.come.get() + LANES as u32;
            if come > counter.threads {
                let threads = counter.threads;
                return counter.problem(&format!("is of {threads} threads, and {come} come"));
            }
            counter.come.set(come % counter.threads);
            let completed = counter.completed.get() + come / counter.threads;
            counter.completed.set(completed);
            Ok(())
        })
    }

    /// Whether the phase that `warp` waits for is complete; if so, orders the phase's arrivals before `warp`.
    pub(super) fn pass_counter(
        &self,
        warp: usize,
        (address, phase): (u32, u32),
    ) -> Result<bool, Box<Problem>> {
        self.counter(address, |counter| {
            let completed = counter.completed.get();
            if completed < phase || completed > phase + 1 {
                let name = counter.name();
                let message = format!(
                    "waits for phase {phase} of {name}, of which {completed} are complete: wanted the one under way, or the last"
                );
                return Err(Problem::sync(message));
            }
            if completed == phase {
                return Ok(false);
            }
            self.take_over(warp, counter.arrivals(phase));
            Ok(true)
        })
    }

    /// Whether any warp waits for a phase that is complete.
    pub(super) fn can_pass_a_counter(&self) -> bool {
        let is_complete = |warp: usize| match self.warp(warp)[0].at.get() {
            at @ At::Counter(address, phase) => {
                let has_come = self.counter(address, |it| Ok(it.completed.get() > phase));
                self.warp(warp).iter().all(|thread| thread.is(at)) && has_come.unwrap_or(false)
            }
            _ => false,
        };
        (0..self.threads.len() / LANES).any(is_complete)
    }
}

/// Operations of the running thread.
impl Block<'_> {
    pub fn open_counter(&self, address: u32, threads: u32) {
        let is_counted = threads > 0 && threads <= MAX_THREADS;
        if !is_counted || threads > 1 && !threads.is_multiple_of(LANES as u32) {
            let message = format!(
                "a counter of {threads} threads: wanted one, or whole warps, at most {MAX_THREADS}"
            );
            Problem::sync(message).raise();
        }
        let (memory, by) = (self.memory_of("counter", self.rank as u32), self.observer());
        let opened = memory.open_mailbox(address, &by);
        // A counter that is already open there makes the store fault.
        opened.unwrap_or_else(|problem| problem.raise());
        self.counters.borrow_mut().push(Counter {
            address,
            opened: by.access,
            threads,
            come: Cell::new(0),
            completed: Cell::new(0),
            waited: Cell::new(0),
            arrivals: Default::default(),
        });
    }

    /// Runs `f` on a counter that the running thread may use: its own, or one for warps.
    fn usable<R>(&self, address: u32, f: impl FnOnce(&Counter) -> Result<R, Box<Problem>>) -> R {
        let found = self.counter(address, |counter| {
            if counter.is_own() && counter.opened.thread() != self.thread() {
                return counter.problem("is another thread's own");
            }
            if !self.observer().is_after(counter.opened) {
                return counter.problem(
                    "might not be open: no barrier between that and the use of this thread",
                );
            }
            f(counter)
        });
        found.unwrap_or_else(|problem| problem.raise())
    }

    /// [`Self::usable`] for a private counter (`is_own`), or for one of warps.
    fn open<R>(&self, address: u32, is_own: bool, f: impl FnOnce(&Counter) -> R) -> R {
        self.usable(address, |counter| {
            if is_own != counter.is_own() {
                return counter.problem("is of one thread, or of warps, and is used otherwise");
            }
            Ok(f(counter))
        })
    }

    /// The current phase of a counter, for a copy that the thread counts there.
    pub(super) fn phase_of_copies(&self, address: u32) -> u32 {
        self.usable(address, |counter| Ok(counter.completed.get()))
    }

    /// Arrives; `copies`: the thread's asynchronous copies complete with the arrival.
    ///
    /// # Safety
    /// The regions of the launch are live.
    pub unsafe fn arrive_at_counter(&self, address: u32, copies: bool) {
        self.open(address, false, |_| {});
        // The copies complete immediately, as accesses of this thread: a thread that does not wait for the counter is reported
        // nonetheless.
        // SAFETY: the caller's promise.
        unsafe {
            self.finish_copies(address, u32::MAX);
            if copies {
                self.finish_copies(0, u32::MAX);
            }
        }
        self.wait(At::Count(address));
    }

    pub fn wait_for_counter(&self, address: u32, phase: u32) {
        self.open(address, false, |_| {});
        self.wait(At::Counter(address, phase));
    }

    pub fn copy_bulk_commit(&self, address: u32) {
        let waited = self.open(address, true, |counter| {
            let completed = counter.completed.get();
            counter.completed.set(completed + 1);
            counter.waited.get() == completed
        });
        if !waited {
            let message = "closes a group of bulk copies, and has not waited for the one before";
            Problem::sync(message.into()).raise();
        }
    }

    /// # Safety
    /// The regions of the launch are live.
    pub unsafe fn copy_bulk_wait(&self, address: u32, group: u32) {
        let closed = self.open(address, true, |counter| {
            counter.waited.set(group + 1);
            counter.completed.get()
        });
        if closed != group + 1 {
            let message = format!("waits for group {group} of bulk copies: {closed} are closed");
            Problem::sync(message).raise();
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish_copies(address, closed) };
    }
}
