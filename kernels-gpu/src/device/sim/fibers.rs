//! The threads of a block as fibers: which one runs, where the others wait, and when they continue.

use std::panic::{self, AssertUnwindSafe};
use std::{array, ptr};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::barrier::Barrier;
use super::block::{Block, LANES, Thread, Words};
use super::butterfly::Butterfly;
use super::fault::{Fault, Problem};
use super::matrix;
use super::shared::BASE;
use super::warpgroup::Product;
use crate::device::shapes::Element;

pub type Fiber = Coroutine<(), (), ()>;

/// Where a thread is: running, waiting or exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Ready to run.
    Running,
    /// Waits for its warp to take the value of lane `lane ^ .0`.
    ShuffleXor(u32),
    /// Waits for its warp to take the value of lane `.0`.
    ShuffleIdx(u32),
    /// Waits for its warp's ballot.
    Ballot,
    /// Waits for its warp's butterfly reduction.
    Butterfly(Butterfly),
    /// Waits for its warp's matrix product with elements of this type.
    Mma(Element),
    /// Waits for its warp's matrix load (`ldmatrix`).
    LoadMatrices,
    /// Waits for its warp's transposed matrix load.
    LoadMatricesTransposed,
    /// Waits for its warp's transposed matrix store (`stmatrix`).
    StoreMatricesTransposed,
    /// Waits for its warp's part of a warpgroup product.
    Warpgroup(Product),
    /// Waits for the lanes of a mask.
    SyncWarp(u32),
    /// Waits for the block.
    SyncThreads,
    /// Waits for the threads of a barrier.
    SyncBarrier(Barrier),
    /// Waits for its warp to arrive at a barrier, then continues.
    Arrive(Barrier),
    /// Waits for its warp to arrive at the counter at `.0`, then continues.
    Count(u32),
    /// Waits for phase `.1` of the counter at `.0`.
    Counter(u32, u32),
    /// Waits for the cluster.
    ClusterWait,
    /// Waits for mailbox `.0` of the cluster.
    Mailbox(u32),
    /// Has returned.
    Exited,
}

impl At {
    /// The lanes of its warp that it waits for.
    #[inline]
    fn mask(self) -> u32 {
        match self {
            Self::ShuffleXor(_)
            | Self::ShuffleIdx(_)
            | Self::Ballot
            | Self::Butterfly(_)
            | Self::Mma(_)
            | Self::LoadMatrices
            | Self::LoadMatricesTransposed
            | Self::StoreMatricesTransposed
            | Self::Warpgroup(_)
            | Self::SyncBarrier(_)
            | Self::Arrive(_)
            | Self::Count(_)
            | Self::Counter(..) => u32::MAX,
            Self::SyncWarp(mask) => mask,
            Self::Running
            | Self::SyncThreads
            | Self::ClusterWait
            | Self::Mailbox(_)
            | Self::Exited => 0,
        }
    }

    /// Whether it is a barrier or counter that involves other warps.
    #[inline]
    fn is_of_warps(self) -> bool {
        matches!(
            self,
            Self::SyncBarrier(_) | Self::Arrive(_) | Self::Count(_) | Self::Counter(..)
        )
    }

    /// Whether other blocks may release it.
    #[inline]
    fn waits_for_cluster(self) -> bool {
        matches!(self, Self::ClusterWait | Self::Mailbox(_))
    }

    /// Whether both are the same collective.
    #[inline]
    fn meets(self, other: Self) -> bool {
        match (self, other) {
            (Self::ShuffleXor(_), Self::ShuffleXor(_))
            | (Self::ShuffleIdx(_), Self::ShuffleIdx(_)) => true,
            _ => self == other,
        }
    }

    fn describe(self) -> String {
        match self {
            Self::Running => "is running".into(),
            Self::ShuffleXor(_) => "waits in warp_shuffle_xor".into(),
            Self::ShuffleIdx(_) => "waits in warp_shuffle_idx".into(),
            Self::Ballot => "waits in warp_ballot".into(),
            Self::Butterfly(of) => format!("waits in a {}", of.describe()),
            Self::Mma(Element::F16) => "waits in mma_m16n8k16_f16".into(),
            Self::Mma(_) => "waits in mma_m16n8k16_bf16".into(),
            Self::LoadMatrices => "waits in load_matrices".into(),
            Self::LoadMatricesTransposed => "waits in load_matrices_transposed".into(),
            Self::StoreMatricesTransposed => "waits in store_matrices_transposed".into(),
            Self::Warpgroup(_) => "waits in a product of its warpgroup".into(),
            Self::SyncWarp(mask) => format!("waits in sync_warp({mask:#010x})"),
            Self::SyncThreads => "waits in sync_threads".into(),
            Self::SyncBarrier(barrier) => format!("waits in sync_barrier{}", barrier.describe()),
            Self::Arrive(barrier) => format!("waits in arrive_at_barrier{}", barrier.describe()),
            Self::Count(_) => "waits in arrive_at_counter".into(),
            Self::Counter(address, phase) => {
                let byte = address - BASE;
                format!("waits for phase {phase} of the counter at byte {byte}")
            }
            Self::ClusterWait => "waits in cluster::wait".into(),
            Self::Mailbox(_) => "waits in wait_mailbox".into(),
            Self::Exited => "has exited".into(),
        }
    }
}

impl Block<'_> {
    /// Creates a fiber for each thread of block `index`, on stacks taken from `stacks`.
    ///
    /// # Safety
    /// `self` and `body` outlive the fibers.
    pub(super) unsafe fn start(
        &self,
        index: u32,
        body: &(dyn Fn() + Sync),
        stacks: &mut Vec<DefaultStack>,
    ) -> Vec<Fiber> {
        self.clear(index);
        let fiber = |(thread, stack): (&Thread, DefaultStack)| {
            let thread = ptr::from_ref(thread);
            let main = move |yielder: &Yielder<(), ()>, ()| {
                // SAFETY: the threads of `self` outlive the fiber, by the caller's promise.
                unsafe { &*thread }.yielder.set(yielder);
                body();
            };
            // SAFETY: `body` outlives the fiber, as above.
            unsafe { Coroutine::with_stack_unchecked(stack, main) }
        };
        let stacks = stacks.drain(..self.threads.len());
        self.threads.iter().zip(stacks).map(fiber).collect()
    }

    /// Runs the threads until each has exited, or none can continue before the cluster does.
    pub(super) fn run_fibers(&self, fibers: &mut [Fiber]) -> Result<(), Fault> {
        let _entered = self.enter();
        self.run_warps(fibers)
    }

    fn run_warps(&self, fibers: &mut [Fiber]) -> Result<(), Fault> {
        loop {
            for (warp, fibers) in fibers.chunks_mut(LANES).enumerate() {
                self.run_warp(warp * LANES, fibers)?;
            }
            if self.can_pass_a_counter() || self.complete_a_barrier() {
                continue;
            }
            let waits = |thread: &Thread| thread.at.get().waits_for_cluster();
            if self.threads.iter().any(waits) {
                return Ok(());
            }
            let first = |is_there: fn(At) -> bool| {
                let is_there = |thread: &Thread| is_there(thread.at.get());
                self.threads.iter().position(is_there)
            };
            if let Some(waiting) = first(|at| matches!(at, At::SyncBarrier(_) | At::Counter(..))) {
                let at = self.threads[waiting].at.get();
                let elsewhere = |thread: &Thread| thread.at.get() != at;
                let missing = self.threads.iter().position(elsewhere);
                return Err(self.diverged(waiting, missing.unwrap_or(waiting)));
            }
            match (
                first(|at| at == At::SyncThreads),
                first(|at| at == At::Exited),
            ) {
                (Some(waiting), Some(exited)) => return Err(self.diverged(waiting, exited)),
                (None, _) => {
                    let nobody_waits = self.check_arrivals();
                    return nobody_waits.map_err(|problem| self.fault(0, problem));
                }
                (Some(_), None) => self.block_barrier.set(self.tick()),
            }
            self.share_phases(self.threads.iter());
            for thread in &self.threads {
                thread.at.set(At::Running);
            }
        }
    }

    /// Runs the warp of threads `first..` until each of them has exited or waits for the block, or none can continue before the
    /// cluster does.
    fn run_warp(&self, first: usize, fibers: &mut [Fiber]) -> Result<(), Fault> {
        let warp = &self.threads[first..][..LANES];
        loop {
            for (lane, fiber) in fibers.iter_mut().enumerate() {
                if warp[lane].at.get() == At::Running {
                    self.resume(first + lane, fiber)?;
                }
            }
            if self.meet_all(first, warp)? {
                continue;
            }
            let (mut met, mut stuck) = (false, None);
            for (lane, thread) in warp.iter().enumerate() {
                let at = thread.at.get();
                let mut goes_on = |passed: Result<bool, Box<Problem>>| {
                    if passed.map_err(|problem| self.fault(first + lane, *problem))? {
                        warp.iter().for_each(|thread| thread.at.set(At::Running));
                        met = true;
                    }
                    Ok(())
                };
                match lanes(at.mask()).find(|&other| !at.meets(warp[other].at.get())) {
                    Some(missing) => stuck = stuck.or(Some((lane, missing))),
                    None if at.mask() == 0 => {}
                    None => match at {
                        At::SyncBarrier(_) => {}
                        At::Arrive(barrier) => {
                            goes_on(self.arrive(first / LANES, barrier).map(|()| true))?;
                        }
                        At::Count(address) => {
                            goes_on(self.count(first / LANES, address).map(|()| true))?;
                        }
                        At::Counter(address, phase) => {
                            goes_on(self.pass_counter(first / LANES, (address, phase)))?;
                        }
                        _ => {
                            self.meet(first, warp, at)?;
                            met = true;
                        }
                    },
                }
            }
            match stuck {
                _ if met => {}
                Some(_) if warp.iter().any(|it| it.at.get().waits_for_cluster()) => return Ok(()),
                Some((lane, missing)) => return Err(self.diverged(first + lane, first + missing)),
                None => return Ok(()),
            }
        }
    }

    /// Fast path for the common case: completes the collective if the whole warp has reached the same one.
    #[inline]
    fn meet_all(&self, first: usize, warp: &[Thread]) -> Result<bool, Fault> {
        let at = warp[0].at.get();
        let can_meet = at.mask() == u32::MAX && !at.is_of_warps();
        let meets = can_meet && warp.iter().all(|thread| at.meets(thread.at.get()));
        if meets {
            self.meet(first, warp, at)?;
        }
        Ok(meets)
    }

    /// Completes a collective that all its lanes have reached.
    fn meet(&self, first: usize, warp: &[Thread], at: At) -> Result<(), Fault> {
        match at {
            At::SyncWarp(mask) => self.order_lanes(warp, mask),
            At::ShuffleXor(_) | At::ShuffleIdx(_) => shuffle(warp),
            At::Ballot => ballot(warp),
            At::Butterfly(of) => of.add(warp),
            At::Warpgroup(product) => self.add_products(first, warp, product)?,
            _ => exchange(warp, at),
        }
        for lane in lanes(at.mask()) {
            warp[lane].at.set(At::Running);
        }
        Ok(())
    }

    /// Orders everything that the lanes of `mask` have done, or that is ordered before any of them, before all of them.
    fn order_lanes(&self, warp: &[Thread], mask: u32) {
        let now = self.tick();
        let barriers_of =
            |lane: usize| lanes(mask).map(move |by| warp[by].lane_barriers[lane].get());
        let joined: [u32; LANES] = array::from_fn(|lane| match mask >> lane & 1 {
            1 => now,
            _ => barriers_of(lane).max().unwrap_or(0),
        });
        self.share_phases(lanes(mask).map(|lane| &warp[lane]));
        for lane in lanes(mask) {
            for (barrier, time) in warp[lane].lane_barriers.iter().zip(joined) {
                barrier.set(time);
            }
        }
    }

    /// Runs `fiber` until it waits or exits.
    fn resume(&self, thread: usize, fiber: &mut Fiber) -> Result<(), Fault> {
        self.running.set(thread);
        match panic::catch_unwind(AssertUnwindSafe(|| fiber.resume(()))) {
            Ok(CoroutineResult::Yield(())) => Ok(()),
            Ok(CoroutineResult::Return(())) if self.has_arrived(thread) => {
                let message = "exits, and has not waited for the cluster, to whose barrier it came";
                Err(self.fault(thread, *Problem::sync(message.into())))
            }
            Ok(CoroutineResult::Return(())) => {
                self.threads[thread].at.set(At::Exited);
                Ok(())
            }
            Err(payload) => Err(self.fault(thread, *Problem::of_unwinding(payload))),
        }
    }

    #[cold]
    pub(super) fn diverged(&self, waiting: usize, missing: usize) -> Fault {
        let place = |thread: usize| {
            let at = self.threads[thread].at.get().describe();
            format!("thread {thread} (lane {}) {at}", thread % LANES)
        };
        let message = format!("diverged: {}, but {}", place(waiting), place(missing));
        self.fault(waiting, *Problem::sync(message))
    }
}

/// Gives each lane the word of the lane that it names.
fn shuffle(warp: &[Thread]) {
    let mut brought = [0; LANES];
    for (lane, word) in brought.iter_mut().enumerate() {
        *word = warp[lane].word().get();
    }
    for (lane, thread) in warp.iter().enumerate() {
        let source = match thread.at.get() {
            At::ShuffleXor(lane_mask) => lane ^ lane_mask as usize,
            At::ShuffleIdx(source) => source as usize,
            _ => lane,
        };
        thread.word().set(brought[source]);
    }
}

/// Gives each lane the ballot.
fn ballot(warp: &[Thread]) {
    let bits = warp.iter().enumerate();
    let bits = bits.fold(0, |all, (lane, thread)| all | thread.word().get() << lane);
    warp.iter().for_each(|thread| thread.word().set(bits));
}

/// Gives each lane its result of `at`, which all lanes have reached, from the words of all lanes.
fn exchange(warp: &[Thread], at: At) {
    let mut brought = [Words::default(); LANES];
    for (lane, words) in brought.iter_mut().enumerate() {
        *words = warp[lane].words();
    }
    let take = |of_lane: fn(usize, &[Words; LANES]) -> Words| {
        for (lane, thread) in warp.iter().enumerate() {
            thread.set_words(of_lane(lane, &brought));
        }
    };
    match at {
        At::Mma(element) => {
            let products = matrix::multiply(&brought, element);
            for (thread, words) in warp.iter().zip(products) {
                thread.set_words(words);
            }
        }
        At::LoadMatrices => take(matrix::rows),
        At::LoadMatricesTransposed => take(matrix::columns),
        At::StoreMatricesTransposed => take(matrix::stored_rows),
        _ => {}
    }
}

fn lanes(mask: u32) -> impl Iterator<Item = usize> + Clone {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}
