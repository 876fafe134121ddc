//! The block that runs on a core, and the operations of its running thread.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::ptr;

use bytemuck::Pod;
use corosensei::Yielder;

use super::Launch;
use super::barrier::{Arrivals, BARRIERS, Clock};
use super::butterfly::Butterfly;
use super::cluster::Cluster;
use super::counter::Counter;
use super::fault::{Fault, Problem};
use super::fibers::At;
use super::matrix;
use super::memory::{GlobalMemory, LastRuns, Op, Request};
use super::race::{Access, Observer, block_index};
use super::shared::SharedMemory;
use super::warpgroup::Lent;

/// Threads of a warp.
pub const LANES: usize = 32;

/// The state with which one core runs the blocks of a launch, one after the other.
pub struct Block<'a> {
    launch: &'a Launch<'a>,
    memory: &'a GlobalMemory<'a>,
    pub(super) cluster: &'a Cluster,
    /// Rank of the block in the cluster.
    pub(super) rank: usize,
    shared: &'a SharedMemory,
    last_runs: LastRuns,
    /// Linear index of the block.
    index: Cell<u32>,
    pub(super) threads: Box<[Thread]>,
    pub(super) running: Cell<usize>,
    /// 1 + the number of barriers so far.
    pub(super) time: Cell<u32>,
    /// Time of the last `sync_threads`.
    pub(super) block_barrier: Cell<u32>,
    /// Arrivals at each named barrier.
    pub(super) arrivals: [Arrivals; BARRIERS],
    pub(super) counters: RefCell<Vec<Counter>>,
    /// For each warp, the clock that named barriers have given it.
    pub(super) clocks: Box<[Clock]>,
}

/// One thread of the block.
pub struct Thread {
    pub(super) at: Cell<At>,
    pub(super) yielder: Cell<*const Yielder<(), ()>>,
    /// The words it contributes to a collective, then its result.
    words: [Cell<u32>; WORDS],
    /// Operand that it lends to a product of its warpgroup.
    pub(super) lent: Cell<Lent>,
    /// For each lane of its warp, the time up to which that lane's accesses happened before.
    pub(super) lane_barriers: [Cell<u32>; LANES],
    /// Phases of the cluster's barrier that happened before its next access.
    pub(super) phases: Cell<u32>,
    /// Mailboxes of the cluster, a bit each, that it or a thread ordered before it has waited for.
    pub(super) mail: Cell<u64>,
    copies: Cell<Vec<Copy>>,
    committed_groups: Cell<u32>,
    /// Bulk stores under way: from, to, bytes.
    stores: Cell<Vec<(u32, u64, u32)>>,
}

/// A lane's operand or result of a collective; most collectives use only the first few words.
pub type Words = [u32; WORDS];
pub const WORDS: usize = 16;

/// An asynchronous copy under way.
struct Copy {
    /// The counter of a bulk copy; 0 for other copies.
    counter: u32,
    /// The phase of the counter, or the number of the committed group.
    group: u32,
    source: u64,
    granules: Range<usize>,
    value: [u32; 4],
}

thread_local! {
    /// The block of the running fiber of this OS thread.
    static CURRENT: Cell<*const Block<'static>> = const { Cell::new(ptr::null()) };
}

/// Whether a fiber runs on this OS thread.
pub fn in_fiber() -> bool {
    !CURRENT.get().is_null()
}

/// Runs `f` on the block of the running fiber.
#[inline]
pub fn current<R>(f: impl FnOnce(&Block<'_>) -> R) -> R {
    // `try_with` is inlined; `LocalKey::get` would be a call.
    let block = CURRENT.try_with(Cell::get).unwrap_or(ptr::null());
    assert!(
        !block.is_null(),
        "device function called outside sim::launch"
    );
    // SAFETY: `Block::run_fibers` sets it to a block that outlives the turn of the fiber that runs this.
    f(unsafe { &*block })
}

/// Guard: fibers of a block run on this OS thread while it lives.
pub struct Entered {
    outer: *const Block<'static>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

impl Thread {
    #[inline]
    pub fn is(&self, at: At) -> bool {
        self.at.get() == at
    }

    /// The first of its words, the only one that a shuffle exchanges.
    #[inline]
    pub(super) fn word(&self) -> &Cell<u32> {
        &self.words[0]
    }

    #[inline]
    pub(super) fn words(&self) -> Words {
        let mut words = Words::default();
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.words[i].get();
        }
        words
    }

    #[inline]
    pub(super) fn set_words(&self, words: Words) {
        for (i, word) in self.words.iter().enumerate() {
            word.set(words[i]);
        }
    }
}

impl<'a> Block<'a> {
    /// A block for `rank` of the cluster, with the shared memory of that rank.
    pub fn new(
        launch: &'a Launch<'a>,
        memory: &'a GlobalMemory<'a>,
        cluster: &'a Cluster,
        (rank, shared): (usize, &'a SharedMemory),
    ) -> Self {
        let thread = |_| Thread {
            at: Cell::new(At::Exited),
            yielder: Cell::new(ptr::null()),
            words: [const { Cell::new(0) }; WORDS],
            lent: Cell::new(Lent::NOTHING),
            lane_barriers: [const { Cell::new(0) }; LANES],
            phases: Cell::new(0),
            mail: Cell::new(0),
            copies: Cell::default(),
            committed_groups: Cell::new(0),
            stores: Cell::default(),
        };
        Self {
            launch,
            memory,
            cluster,
            rank,
            shared,
            last_runs: LastRuns::default(),
            index: Cell::new(0),
            threads: (0..launch.shape.block).map(thread).collect(),
            running: Cell::new(0),
            time: Cell::new(1),
            block_barrier: Cell::new(0),
            arrivals: Default::default(),
            counters: RefCell::default(),
            clocks: (0..launch.shape.block as usize / LANES)
                .map(|_| Clock::default())
                .collect(),
        }
    }

    /// Makes this block the result of [`current`].
    pub(super) fn enter(&self) -> Entered {
        Entered {
            outer: CURRENT.replace(ptr::from_ref(self).cast()),
        }
    }

    /// Resets the state for the next block, `index`.
    pub(super) fn clear(&self, index: u32) {
        self.shared.clear();
        self.index.set(index);
        self.time.set(1);
        self.block_barrier.set(0);
        self.arrivals.iter().for_each(Arrivals::clear);
        self.counters.borrow_mut().clear();
        for clock in &self.clocks {
            clock.iter().for_each(|time| time.set(0));
        }
        for thread in &self.threads {
            thread.at.set(At::Running);
            thread.lane_barriers.iter().for_each(|time| time.set(0));
            thread.phases.set(0);
            thread.mail.set(0);
            thread.copies.take();
            thread.committed_groups.set(0);
        }
    }

    /// The threads of a warp.
    #[inline]
    pub(super) fn warp(&self, warp: usize) -> &[Thread] {
        &self.threads[warp * LANES..][..LANES]
    }

    /// Ends the current interval between barriers, and returns its time.
    #[inline]
    pub(super) fn tick(&self) -> u32 {
        self.time.replace(self.time.get() + 1)
    }

    #[cold]
    pub(super) fn fault(&self, thread: usize, Problem { kind, message }: Problem) -> Fault {
        let (kernel, block) = (self.launch.kernel, self.block());
        Fault {
            kind,
            kernel,
            block,
            thread: thread as u32,
            message,
        }
    }
}

/// Operations of the running thread.
impl Block<'_> {
    pub fn capability(&self) -> (u32, u32) {
        self.launch.capability
    }

    pub fn constants(&self) -> &[u32] {
        self.launch.constants
    }

    pub fn block(&self) -> [u32; 3] {
        self.index_of(self.index.get())
    }

    /// Index along x, y, z of the block with this linear index.
    pub(super) fn index_of(&self, linear: u32) -> [u32; 3] {
        block_index(self.launch.shape.grid, linear)
    }

    /// Blocks along each axis.
    pub fn grid(&self) -> [u32; 3] {
        self.launch.shape.grid
    }

    #[inline]
    pub fn thread(&self) -> u32 {
        self.running.get() as u32
    }

    #[inline]
    fn running(&self) -> &Thread {
        &self.threads[self.running.get()]
    }

    /// Suspends the thread until its collective is complete.
    #[inline]
    pub fn wait(&self, at: At) {
        let thread = self.running();
        thread.at.set(at);
        // SAFETY: the fiber of the running thread set it to its own yielder when it began.
        unsafe { &*thread.yielder.get() }.suspend(());
    }

    pub fn sync_warp(&self, mask: u32) {
        let lane = self.running.get() % LANES;
        if mask >> lane & 1 == 0 {
            let message = format!("lane {lane} calls sync_warp({mask:#010x}), a mask without it");
            Problem::sync(message).raise();
        }
        self.wait(At::SyncWarp(mask));
    }

    /// The value of the lane that `at` selects by `source`.
    #[inline]
    pub fn shuffle(&self, value: f32, source: u32, at: At) -> f32 {
        if source >= LANES as u32 {
            let message =
                format!("a shuffle names lane or lane mask {source}: a warp has 32 lanes");
            Problem::sync(message).raise();
        }
        let thread = self.running();
        thread.word().set(value.to_bits());
        self.wait(at);
        f32::from_bits(thread.word().get())
    }

    /// Contributes `words` to the collective `at`; returns this lane's result.
    #[inline]
    pub(super) fn exchange(&self, words: Words, at: At) -> Words {
        let thread = self.running();
        thread.set_words(words);
        self.wait(at);
        thread.words()
    }

    /// Bit i of the result is lane i's `is`.
    pub fn ballot(&self, is: bool) -> u32 {
        let thread = self.running();
        thread.word().set(u32::from(is));
        self.wait(At::Ballot);
        thread.word().get()
    }

    /// Performs the butterfly `of` on `values`, at most [`WORDS`] of them.
    pub fn butterfly<const N: usize>(&self, values: [f32; N], of: Butterfly) -> [f32; N] {
        let mut words = Words::default();
        for (word, value) in words.iter_mut().zip(values) {
            *word = value.to_bits();
        }
        let words = self.exchange(words, At::Butterfly(of));
        let mut sums = values;
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum = f32::from_bits(word);
        }
        sums
    }

    pub fn multiply(&self, a: [u32; 4], b: [u32; 2], c: [f32; 4], at: At) -> [f32; 4] {
        let [x, y, z, w, ..] = self.exchange(matrix::fragments(a, b, c), at);
        bytemuck::cast([x, y, z, w])
    }

    /// This lane's fragments of four matrices; it loads the row at `address`.
    pub fn load_matrices(&self, address: u32, at: At) -> [u32; 4] {
        let mut words = Words::default();
        words[..4].copy_from_slice(&self.load_shared::<[u32; 4]>(address));
        let [x, y, z, w, ..] = self.exchange(words, at);
        [x, y, z, w]
    }

    /// The inverse of [`Self::load_matrices`], transposed: stores row i of matrix m at the address of lane 8m + i.
    pub fn store_matrices_transposed(&self, address: u32, matrices: [u32; 4]) {
        let mut words = Words::default();
        words[..4].copy_from_slice(&matrices);
        let [x, y, z, w, ..] = self.exchange(words, At::StoreMatricesTransposed);
        self.store_shared(address, [x, y, z, w]);
    }

    #[inline]
    pub(super) fn observer(&self) -> Observer<'_> {
        Observer {
            access: Access::new(self.index.get(), self.thread(), self.time.get()),
            grid: self.launch.shape.grid,
            block_barrier: self.block_barrier.get(),
            warp_clock: &self.clocks[self.running.get() / LANES],
            lane_barriers: &self.running().lane_barriers,
            cluster: self.cluster,
            phases: self.running().phases.get(),
            mail: self.running().mail.get(),
        }
    }

    #[inline]
    fn check_global<T>(&self, address: u64, op: Op) {
        let request = Request {
            address,
            size: size_of::<T>() as u64,
            op,
        };
        let checked = self.memory.check(request, &self.last_runs);
        let remembered = checked.unwrap_or_else(|problem| problem.raise());
        if let Some(view) = remembered {
            let recorded = self.memory.record(view, request, &self.observer());
            recorded.unwrap_or_else(|problem| problem.raise());
        }
    }

    /// # Safety
    /// The regions of the launch are live.
    #[inline]
    pub unsafe fn load_global<T: Pod>(&self, address: u64, op: Op) -> T {
        self.check_global::<T>(address, op);
        // SAFETY: aligned, inside a live region, and ordered with every store to it: just checked.
        unsafe { ptr::with_exposed_provenance::<T>(address as usize).read() }
    }

    /// # Safety
    /// The regions of the launch are live.
    #[inline]
    pub unsafe fn store_global<T: Pod>(&self, address: u64, value: T) {
        self.check_global::<T>(address, Op::Store);
        // SAFETY: as for a load, but ordered with all accesses, and the region is writable.
        unsafe { ptr::with_exposed_provenance_mut::<T>(address as usize).write(value) }
    }

    #[inline]
    pub fn load_shared<T: Pod>(&self, address: u32) -> T {
        let loaded = self.try_load_shared(address);
        loaded.unwrap_or_else(|problem| problem.raise())
    }

    /// A load by the thread that runs a collective.
    #[inline]
    pub(super) fn try_load_shared<T: Pod>(&self, address: u32) -> Result<T, Box<Problem>> {
        self.shared.load(address, &self.observer())
    }

    #[inline]
    pub fn store_shared<T: Pod>(&self, address: u32, value: T) {
        let stored = self.shared.store(address, value, &self.observer());
        stored.unwrap_or_else(|problem| problem.raise());
    }

    /// # Safety
    /// The regions of the launch are live.
    pub unsafe fn copy_async(&self, shared_address: u32, global_address: u64) {
        let group = self.running().committed_groups.get();
        // SAFETY: the caller's promise.
        unsafe { self.start_copy(shared_address, global_address, (0, group)) };
    }

    /// # Safety
    /// The regions of the launch are live.
    unsafe fn start_copy(
        &self,
        shared_address: u32,
        global_address: u64,
        (counter, group): (u32, u32),
    ) {
        // SAFETY: the caller's promise.
        let value: [u32; 4] = unsafe { self.load_global(global_address, Op::Load) };
        let started = self
            .shared
            .start_copy::<[u32; 4]>(shared_address, &self.observer());
        let granules = started.unwrap_or_else(|problem| problem.raise());
        let thread = self.running();
        let mut copies = thread.copies.take();
        copies.push(Copy {
            counter,
            group,
            source: global_address,
            granules,
            value,
        });
        thread.copies.set(copies);
    }

    pub fn copy_async_commit(&self) {
        let groups = &self.running().committed_groups;
        groups.set(groups.get() + 1);
    }

    /// # Safety
    /// The regions of the launch are live.
    pub unsafe fn copy_async_wait(&self, pending: u32) {
        let thread = self.running();
        let arrived = thread.committed_groups.get().saturating_sub(pending);
        // SAFETY: the caller's promise.
        unsafe { self.finish_copies(0, arrived) };
    }

    /// Completes the copies of `counter` in groups before `end`.
    ///
    /// # Safety
    /// The regions of the launch are live.
    pub(super) unsafe fn finish_copies(&self, counter: u32, end: u32) {
        let thread = self.running();
        let mut copies = thread.copies.take();
        let is_done = |copy: &mut Copy| copy.counter == counter && copy.group < end;
        for copy in copies.extract_if(.., is_done) {
            // SAFETY: the caller's promise.
            let value: [u32; 4] = unsafe { self.load_global(copy.source, Op::Load) };
            if value != copy.value {
                let message =
                    "the source of an asynchronous copy changed before the copy was waited for";
                Problem::race(message.into()).raise();
            }
            self.shared
                .finish_copy(copy.granules, copy.value, &self.observer());
        }
        thread.copies.set(copies);
    }

    /// # Safety
    /// The regions of the launch are live.
    pub unsafe fn copy_bulk(
        &self,
        shared_address: u32,
        global_address: u64,
        bytes: u32,
        counter: u32,
    ) {
        let group = self.phase_of_copies(counter);
        if !bytes.is_multiple_of(16) || bytes >= 1 << 20 {
            let message =
                format!("a bulk copy of {bytes} bytes: wanted a multiple of 16 below 2^20");
            Problem::sync(message).raise();
        }
        for byte in (0..bytes).step_by(16) {
            let (to, from) = (shared_address + byte, global_address + u64::from(byte));
            // SAFETY: the caller's promise.
            unsafe { self.start_copy(to, from, (counter, group)) };
        }
    }

    pub fn store_bulk(&self, global_address: u64, shared_address: u32, bytes: u32) {
        if !bytes.is_multiple_of(16) {
            let message = format!("a bulk store of {bytes} bytes: wanted a multiple of 16");
            Problem::sync(message).raise();
        }
        let thread = self.running();
        let mut stores = thread.stores.take();
        stores.push((shared_address, global_address, bytes));
        thread.stores.set(stores);
    }

    /// Reads the source as late as the GPU may.
    ///
    /// # Safety
    /// The regions of the launch are live.
    pub unsafe fn store_bulk_wait(&self) {
        for (from, to, bytes) in self.running().stores.take() {
            for byte in (0..bytes).step_by(16) {
                let words: [u32; 4] = self.load_shared(from + byte);
                // SAFETY: the caller's promise.
                unsafe { self.store_global(to + u64::from(byte), words) };
            }
        }
    }
}
