//! The blocks of a cluster: they run concurrently, share a barrier, and store to each other's shared memory.

use std::cell::Cell;

use bytemuck::Pod;
use corosensei::stack::DefaultStack;

use super::block::{Block, LANES, Thread};
use super::fault::{Fault, Problem};
use super::fibers::{At, Fiber};
use super::mailbox::{Mailboxes, all_mail};
use super::race::Access;
use super::shared::SharedMemory;
use crate::device::shapes::LaunchShape;

/// Blocks that a cluster may have on every GPU that has clusters.
pub const PORTABLE_BLOCKS: usize = 8;

/// The shared state of a cluster's blocks.
///
/// Phase 1 of its barrier is complete when all threads have arrived once. A thread arrives at a phase only after it has waited
/// for the previous one: running threads are after all complete phases, or all but the last.
pub struct Cluster {
    /// Linear index of its first block.
    first: Cell<u32>,
    /// By rank.
    memories: Box<[SharedMemory]>,
    /// Every thread, block by block.
    members: Box<[Member]>,
    /// For each warp, the time up to which its accesses happened before an arrival.
    released: Box<[Cell<u32>]>,
    /// Complete phases.
    completed: Cell<u32>,
    pub(super) mailboxes: Mailboxes,
    /// Whether any thread has arrived at the barrier.
    used: Cell<bool>,
}

/// A thread of a cluster; times are those of its block.
#[derive(Default)]
struct Member {
    /// The phase at which it has arrived without having waited yet, or 0.
    arrived: Cell<u32>,
    /// The time up to which its accesses happened before an arrival.
    released: Cell<u32>,
    /// `released`, of the thread and its warp, as of the last even and the last odd phase.
    before: [Cell<u32>; 2],
    /// For each block, the time of the last store to its memory that the block might not have outlived, or 0.
    stores: [Cell<u32>; PORTABLE_BLOCKS],
}

impl Cluster {
    pub fn new(shape: LaunchShape) -> Self {
        let threads = (shape.cluster * shape.block) as usize;
        let memory = |_| SharedMemory::new(shape.shared_bytes);
        Self {
            first: Cell::new(0),
            memories: (0..shape.cluster).map(memory).collect(),
            members: (0..threads).map(|_| Member::default()).collect(),
            released: (0..threads / LANES).map(|_| Cell::new(0)).collect(),
            completed: Cell::new(0),
            mailboxes: Mailboxes::default(),
            used: Cell::new(false),
        }
    }

    /// The blocks' memories, by rank.
    pub fn memories(&self) -> impl Iterator<Item = (usize, &SharedMemory)> {
        self.memories.iter().enumerate()
    }

    /// Whether a thread of the cluster made `access`.
    pub fn made(&self, access: Access) -> bool {
        self.member(access).is_some()
    }

    /// Whether `access` is ordered before threads that have waited for all phases up to `phase`; 0: none.
    pub fn puts_before(&self, access: Access, phase: u32) -> bool {
        let is_before = |at: usize| access.time() <= self.members[at].before(phase).get();
        phase > 0 && self.member(access).is_some_and(is_before)
    }

    /// Selects two of three unordered loads to remember: first those that the current phase cannot order; among equals the lowest
    /// and the highest.
    pub fn lasting(&self, loads: [Access; 3]) -> [Access; 2] {
        let [a, b, c] = loads;
        if self.used.get() {
            let of = |load| (self.lasts(load), load);
            let (a, b, c) = (of(a), of(b), of(c));
            if a.0 != b.0 || b.0 != c.0 {
                let (low, high) = (a.min(b), a.max(b));
                return [low.max(c.min(high)).1, high.max(c).1];
            }
        }
        [a.min(b).min(c), a.max(b).max(c)]
    }

    /// Whether the current phase cannot order `load` before threads that wait for it: another cluster made it, or a thread made
    /// it after its arrival.
    fn lasts(&self, load: Access) -> bool {
        let has_come = |at: usize| self.members[at].arrived.get() > self.completed.get();
        let member = self.member(load);
        member.is_none_or(|at| has_come(at) && load.time() > self.released(at))
    }

    /// Index in `members` of the thread that made `access`.
    fn member(&self, access: Access) -> Option<usize> {
        let rank = access.block().checked_sub(self.first.get())? as usize;
        let threads = self.members.len() / self.memories.len();
        let at = rank * threads + access.thread() as usize;
        (at < self.members.len()).then_some(at)
    }

    /// The time up to which the accesses of a member happened before an arrival.
    fn released(&self, at: usize) -> u32 {
        let of_warp = self.released[at / LANES].get();
        self.members[at].released.get().max(of_warp)
    }

    /// Resets the state. The previous cluster ended with no thread between arrival and wait and no late store.
    fn start(&self, first: u32) {
        self.first.set(first);
        self.mailboxes.clear();
        if self.used.replace(false) {
            self.completed.set(0);
            self.mailboxes.clear_released();
            self.released.iter().for_each(|time| time.set(0));
            for member in &self.members {
                member.released.set(0);
            }
        }
    }

    /// Runs `blocks`, the blocks of cluster `index`. Takes a stack per thread from `stacks`, and returns them.
    pub fn run(
        &self,
        blocks: &[Block<'_>],
        index: u32,
        body: &(dyn Fn() + Sync),
        stacks: &mut Vec<DefaultStack>,
    ) -> Result<(), Fault> {
        let first = index * blocks.len() as u32;
        self.start(first);
        // SAFETY: the fibers end here.
        let start = |(index, block): (u32, &Block<'_>)| unsafe { block.start(index, body, stacks) };
        let mut fibers: Vec<Vec<Fiber>> = (first..).zip(blocks).map(start).collect();
        let outcome = self.run_blocks(blocks, &mut fibers);
        stacks.extend(fibers.into_iter().flatten().map(|mut fiber| {
            fiber.force_unwind();
            fiber.into_stack()
        }));
        outcome
    }

    fn run_blocks(&self, blocks: &[Block<'_>], fibers: &mut [Vec<Fiber>]) -> Result<(), Fault> {
        loop {
            for (block, fibers) in blocks.iter().zip(&mut *fibers) {
                block.run_fibers(fibers)?;
            }
            if blocks.iter().any(Block::take_mail) {
                continue;
            }
            if blocks.iter().all(|block| block.waiting().is_none()) {
                blocks.iter().try_for_each(Block::check_awaited)?;
                blocks.iter().try_for_each(Block::check_sent)?;
                return self.check_stores(blocks);
            }
            self.complete_a_phase(blocks)?;
        }
    }

    /// Completes a phase to which all threads have arrived, and releases the waiting ones.
    fn complete_a_phase(&self, blocks: &[Block<'_>]) -> Result<(), Fault> {
        blocks.iter().try_for_each(Block::check_arrived)?;
        let phase = self.completed.get() + 1;
        self.completed.set(phase);
        self.mailboxes.complete(phase);
        for (at, member) in self.members.iter().enumerate() {
            member.before(phase).set(self.released(at));
        }
        for (rank, block) in blocks.iter().enumerate() {
            if !block.threads.iter().all(|thread| thread.is(At::Exited)) {
                self.members.iter().for_each(|member| {
                    let store = &member.stores[rank];
                    if store.get() <= member.before(phase).get() {
                        store.set(0);
                    }
                });
            }
            let waiting = block.threads.iter();
            waiting
                .filter(|thread| thread.is(At::ClusterWait))
                .for_each(|thread| thread.at.set(At::Running));
        }
        Ok(())
    }

    /// Checks that no block might have ended before a store to its memory.
    fn check_stores(&self, blocks: &[Block<'_>]) -> Result<(), Fault> {
        for (at, member) in self.members.iter().enumerate() {
            let late = |store: &Cell<u32>| store.get() > 0;
            if let Some(target) = member.stores.iter().position(late) {
                let message = format!(
                    "a store to the shared memory of {}, which might have ended: \
                     it does not wait for the cluster afterwards",
                    blocks[target].name_in_cluster(target)
                );
                let [block, thread] = [at / blocks[0].threads.len(), at % blocks[0].threads.len()];
                return Err(blocks[block].fault(thread, *Problem::sync(message)));
            }
        }
        Ok(())
    }
}

impl Member {
    /// The entry of `phase`, the last one or the last but one.
    fn before(&self, phase: u32) -> &Cell<u32> {
        &self.before[phase as usize % 2]
    }
}

/// The newest phase that is ordered before any of `threads`.
pub fn latest_phase<'a>(threads: impl IntoIterator<Item = &'a Thread>) -> u32 {
    let phases = threads.into_iter().map(|thread| thread.phases.get());
    phases.max().unwrap_or(0)
}

impl Block<'_> {
    /// The first thread that waits for the cluster.
    pub(super) fn waiting(&self) -> Option<usize> {
        let waits = |thread: &Thread| thread.is(At::ClusterWait);
        self.threads.iter().position(waits)
    }

    pub(super) fn name_in_cluster(&self, rank: usize) -> String {
        let [x, y, z] = self.index_of(self.cluster.first.get() + rank as u32);
        format!("block ({x}, {y}, {z})")
    }

    fn member(&self, thread: usize) -> &Member {
        &self.cluster.members[self.rank * self.threads.len() + thread]
    }

    /// Whether `thread` has arrived at the cluster's barrier and not yet waited.
    pub(super) fn has_arrived(&self, thread: usize) -> bool {
        self.member(thread).arrived.get() > 0
    }

    /// Checks that each thread that has not exited has arrived at the cluster's barrier.
    fn check_arrived(&self) -> Result<(), Fault> {
        let has_come =
            |thread: usize| self.threads[thread].is(At::Exited) || self.has_arrived(thread);
        match (0..self.threads.len()).find(|&thread| !has_come(thread)) {
            None => Ok(()),
            Some(starved) if matches!(self.threads[starved].at.get(), At::Mailbox(_)) => {
                Err(self.starved(starved))
            }
            Some(missing) => Err(self.diverged(self.waiting().unwrap_or(missing), missing)),
        }
    }

    /// Orders everything that the cluster's barrier and mailboxes order before any of `threads` before all of them.
    pub(super) fn share_phases<'a>(&self, threads: impl Iterator<Item = &'a Thread> + Clone) {
        if self.cluster.completed.get() > 0 {
            let phase = latest_phase(threads.clone());
            let mail = all_mail(threads.clone());
            threads.for_each(|thread| {
                thread.phases.set(phase);
                thread.mail.set(mail);
            });
        }
    }
}

/// Operations of the running thread.
impl Block<'_> {
    /// Arrives at the cluster's barrier; `releases`: earlier accesses are ordered before threads that wait.
    pub fn arrive_at_cluster(&self, releases: bool) {
        let member = self.member(self.running.get());
        if member.arrived.get() > 0 {
            let message = "comes to the cluster's barrier again, and has not waited in between";
            Problem::sync(message.into()).raise();
        }
        self.cluster.used.set(true);
        member.arrived.set(self.cluster.completed.get() + 1);
        self.announce_mailboxes(member.arrived.get());
        if releases {
            self.release();
        }
    }

    /// Orders everything before the running thread before the threads that wait for the current phase.
    fn release(&self) {
        let thread = self.running.get();
        let raise = |time: &Cell<u32>, to: u32| time.set(time.get().max(to));
        let warps = self.threads.len() / LANES;
        let released = &self.cluster.released[self.rank * warps..][..warps];
        for (of_warp, time) in released.iter().zip(&self.clocks[thread / LANES]) {
            raise(of_warp, time.get().max(self.block_barrier.get()));
        }
        for (lane, time) in self.threads[thread].lane_barriers.iter().enumerate() {
            let member = self.member(thread / LANES * LANES + lane);
            raise(&member.released, time.get());
        }
        self.member(thread).released.set(self.tick());
        self.cluster
            .mailboxes
            .release(self.threads[thread].mail.get());
    }

    pub fn wait_for_cluster(&self) {
        let thread = self.running.get();
        let arrived = &self.member(thread).arrived;
        if arrived.get() == 0 {
            let message = "waits for the cluster, and has not come to its barrier";
            Problem::sync(message.into()).raise();
        }
        if arrived.get() > self.cluster.completed.get() {
            self.wait(At::ClusterWait);
        }
        let phase = arrived.replace(0);
        let thread = &self.threads[thread];
        thread.phases.set(phase);
        let mail = self.cluster.mailboxes.before(phase);
        thread.mail.set(thread.mail.get() | mail);
    }

    /// The shared memory of block `rank` of the cluster.
    pub(super) fn memory_of(&self, op: &str, rank: u32) -> &SharedMemory {
        self.cluster.memories.get(rank as usize).unwrap_or_else(|| {
            let blocks = self.cluster.memories.len();
            let message =
                format!("a {op} to the shared memory of rank {rank}: wanted a rank below {blocks}");
            Problem::memory(message).raise()
        })
    }

    /// Stores to the shared memory of block `rank` of the cluster.
    pub fn store_shared_at<T: Pod>(&self, address: u32, rank: u32, value: T) {
        let thread = self.running.get();
        let memory = self.memory_of("store", rank);
        if rank as usize == self.rank {
            return self.store_shared(address, value);
        }
        let target = || self.name_in_cluster(rank as usize);
        if self.threads[thread].phases.get() == 0 {
            let message = format!(
                "a store to the shared memory of {}, which might not have started: \
                 the thread has not waited for the cluster",
                target()
            );
            Problem::sync(message).raise();
        }
        if let Err(mut problem) = memory.store(address, value, &self.observer()) {
            let place = format!("in the shared memory of {}: ", target());
            problem.message.insert_str(0, &place);
            problem.raise();
        }
        self.member(thread).stores[rank as usize].set(self.time.get());
    }
}
