//! All machine instructions that kernels use, each with one body for the GPU and one for the simulator.
//!
//! `ptx.rs` (instructions) and `sim.rs` (fibers on the CPU) have the same functions; this file holds the contract of each, once.
//! Without the feature `simulator` they panic on a CPU (`absent.rs`). Modules and names follow `cuda_std`.
//!
//! Every lane-collective function (`sync_threads`, `sync_warp`, the shuffles, `mma_m16n8k16_bf16`,
//! `load_matrices`) must be reached by all the lanes it names: the simulator reports one that is not.

#[cfg(not(any(target_arch = "nvptx64", feature = "simulator")))]
mod absent;
#[cfg(target_arch = "nvptx64")]
#[path = "ptx.rs"]
mod backend;
pub mod shapes;
#[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
pub mod sim;

#[cfg(not(any(target_arch = "nvptx64", feature = "simulator")))]
use absent as backend;
#[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
use sim as backend;

/// Defines functions with these signatures, which call the backend's functions of the same names.
macro_rules! instructions {
    () => {};
    (
        $(#[$doc:meta])*
        pub fn $name:ident $(<const $constant:ident: u32>)? ($($argument:ident: $type:ty),*) $(-> $result:ty)?;
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name $(<const $constant: u32>)? ($($argument: $type),*) $(-> $result)? {
            call!($name $(<$constant>)? ($($argument),*))
        }

        instructions! { $($rest)* }
    };
    (
        $(#[$doc:meta])*
        pub unsafe fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;
        $($rest:tt)*
    ) => {
        $(#[$doc])*
        #[inline(always)]
        pub unsafe fn $name($($argument: $type),*) $(-> $result)? {
            call!(unsafe $name($($argument),*))
        }

        instructions! { $($rest)* }
    };
}

#[cfg(any(target_arch = "nvptx64", feature = "simulator"))]
macro_rules! call {
    (unsafe $name:ident($($argument:ident),*)) => {
        // SAFETY: the caller's promise.
        unsafe { backend::$name($($argument),*) }
    };
    ($name:ident $(<$constant:ident>)? ($($argument:ident),*)) => {
        backend::$name $(::<$constant>)? ($($argument),*)
    };
}

#[cfg(not(any(target_arch = "nvptx64", feature = "simulator")))]
macro_rules! call {
    (unsafe $name:ident($($argument:ident),*)) => {
        call!($name($($argument),*))
    };
    ($name:ident $(<$constant:ident>)? ($($argument:ident),*)) => {{
        let _ = ($($argument,)*);
        backend::nothing_runs()
    }};
}

/// Defines a load and a store for each type of value; `$promise` is the `# Safety` section of both.
macro_rules! accesses {
    ($address:ty, $promise:literal; $(#[$doc:meta] $load:ident / #[$store_doc:meta] $store:ident: $t:ty;)*) => {$(instructions! {
        #[$doc]
        ///
        /// # Safety
        #[doc = $promise]
        pub unsafe fn $load(address: $address) -> $t;

        #[$store_doc]
        ///
        /// # Safety
        #[doc = $promise]
        pub unsafe fn $store(address: $address, value: $t);
    })*};
}

/// The position of a thread in the grid, and barriers of its block.
pub mod thread {
    use super::backend;

    instructions! {
        /// Index of this thread in its block.
        pub fn thread_idx_x() -> u32;
        /// Index of this block along x.
        pub fn block_idx_x() -> u32;
        /// Index of this block along y.
        pub fn block_idx_y() -> u32;
        /// Index of this block along z.
        pub fn block_idx_z() -> u32;
        /// Blocks along x.
        pub fn grid_dim_x() -> u32;
        /// Waits until every thread of the block has arrived; orders their shared and global accesses.
        pub fn sync_threads();

        /// Waits until `threads` threads of the block, in whole warps, have arrived at `barrier`, 1 to 15, here or in
        /// [`arrive_at_barrier`]. Their earlier accesses are then done. All waiting threads must wait at the same place of the
        /// program.
        pub fn sync_barrier(barrier: u32, threads: u32);

        /// [`sync_barrier`] with a vote: whether `is` holds for any of the threads. All of them wait.
        pub fn sync_barrier_any(barrier: u32, threads: u32, is: bool) -> bool;
        /// Arrives at a barrier that other threads wait for in [`sync_barrier`], without waiting.
        pub fn arrive_at_barrier(barrier: u32, threads: u32);
    }
}

/// Programmatic dependent launch: overlap of successive launches of a stream, where the second one permits it
/// ([`LaunchShape::overlaps`](crate::device::shapes::LaunchShape::overlaps)). Otherwise launches are serialized and these
/// functions do nothing.
pub mod overlap {
    use super::backend;

    instructions! {
        /// Allows the next launch to begin once every block has called this or ended.
        pub fn let_next_begin();
        /// Waits until the previous launch has ended; its writes are then visible to this thread.
        pub fn wait_for_previous();
    }
}

/// Collectives of the 32 lanes of a warp.
pub mod warp {
    use super::backend;

    /// All 32 lanes.
    pub const FULL_MASK: u32 = u32::MAX;

    instructions! {
        /// Index of this thread in its warp.
        pub fn lane_id() -> u32;
        /// Waits until the lanes of `mask` are here; orders their shared and global accesses.
        pub fn sync_warp(mask: u32);
        /// Ballot: bit i of the result is lane i's `is`. Every lane of the warp calls it; orders no memory.
        pub fn warp_ballot(is: bool) -> u32;
        /// `value` of lane `lane_id() ^ lane_mask`. Every lane of the warp calls it; orders no memory.
        pub fn warp_shuffle_xor(value: f32, lane_mask: u32) -> f32;
        /// `value` of lane `source`, below 32. Every lane of the warp calls it; orders no memory.
        pub fn warp_shuffle_idx(value: f32, source: u32) -> f32;

        /// D = A B + C on the tensor cores: A is [16, 16] and B [16, 8] in bf16, C and D are [16, 8] in f32. Every lane of the
        /// warp calls it; orders no memory.
        ///
        /// With r = `lane_id() / 4` and c = `lane_id() % 4`, a lane holds, two bf16 to a word, the lower index in the low half:
        ///
        /// | | |
        /// |---|---|
        /// | `a` | A[r, 2c..2c+2], A[r+8, 2c..2c+2], A[r, 2c+8..2c+10], A[r+8, 2c+8..2c+10] |
        /// | `b` | B[2c..2c+2, r], B[2c+8..2c+10, r] |
        /// | `c`, D | C[r, 2c], C[r, 2c+1], C[r+8, 2c], C[r+8, 2c+1] |
        ///
        /// Products are exact. An element of D depends only on its row of A, its column of B and its own C, in a fixed way; the
        /// order and rounding of its additions are the machine's own (an error of a few 2⁻²³ of the largest term). The simulator
        /// adds the products to C one by one, in the order of A's columns, each sum rounded to f32.
        pub fn mma_m16n8k16_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];

        /// [`mma_m16n8k16_bf16`] with A and B in f16.
        pub fn mma_m16n8k16_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
        /// [`mma_m16n8k16_f16`] if `is_f16`, a load-time constant, else [`mma_m16n8k16_bf16`].
        pub fn mma_m16n8k16_b16(a: [u32; 4], b: [u32; 2], c: [f32; 4], is_f16: bool) -> [f32; 4];
    }
}

/// Warpgroup products (sm_90a): threads 128 g .. 128 g + 128 of a block multiply matrices of 64 rows in registers by f16 matrices
/// in shared memory, on the tensor cores.
///
/// Warp w of the warpgroup holds rows 16 w .. 16 w + 16 of each matrix in registers, in f16, laid out as in
/// [`warp::mma_m16n8k16_bf16`]: words 4 i .. 4 i + 4 of a left factor are `a` of columns 16 i .. 16 i + 16, sums 4 j .. 4 j + 4
/// are `c` of columns 8 j .. 8 j + 8. Sums become factors without moving between lanes.
///
/// Matrices in shared memory consist of *cores* of 8 · 8 elements, 128 bytes, with rows of 16 bytes:
///
/// | | byte offset of the core of elements \[i, j\] | row in the core | position in the row |
/// |---|---|---|---|
/// | image `[N, K]`, tokens n and channels k | k/8 · 16 N + n/8 · 128 | n % 8 | k % 8 |
/// | triangle `[64, 64]` of (s, t), s ≤ t, zero where s > t | t/32 · 2048 + s/16 · 1024 + t%32/8 · 256 + s%16/8 · 128 | | |
/// | … for [`warpgroup::by_triangle`] | | s % 8 | t % 8 |
/// | … for [`warpgroup::add`] | | t % 8 | s % 8 |
///
/// Elements with s ≥ 32 and t < 32 are not stored. N is 128 unless stated otherwise.
///
/// Products are exact; the order and rounding of sums are the machine's own, as for `mma_m16n8k16_bf16`. All threads of the
/// warpgroup call each function. A thread of the block that wrote to an operand calls [`warpgroup::fence_shared`] before the
/// barrier that precedes the product.
pub mod warpgroup {
    use super::backend;

    /// Bytes of a triangle.
    pub const TRIANGLE_BYTES: u32 = 6144;

    instructions! {
        /// Orders this thread's earlier shared-memory accesses, including copies that it has waited for, before the operand reads
        /// of warpgroup products after a following barrier; and orders earlier operand reads before this thread's later accesses.
        pub fn fence_shared();

        /// Raises the register count of each thread of the warpgroup to `REGISTERS`, and waits until other warpgroups of the
        /// block have released enough: the total never exceeds the count at launch. `REGISTERS` is a multiple of 8 from 24 to
        /// 256, more than a thread has now.
        pub fn take_registers<const REGISTERS: u32>();

        /// Lowers the register count of each thread of the warpgroup to `REGISTERS`, and releases the rest. Same range as
        /// [`take_registers`]; fewer than a thread has now.
        pub fn leave_registers<const REGISTERS: u32>();
    }

    /// Sums of a product that is under way. Only the function that waits for the product returns them.
    #[must_use]
    pub struct Pending<T>(T);

    /// Starts two products D = A Bᵀ, with A `[64, K]`, K 64, 96 or 128: B is the first 64 rows of the image ([`first`] waits for
    /// the sums), and the next 64 rows ([`both`] waits). Only the first K / 4 words of `a` are used.
    ///
    /// # Safety
    /// `image` is the address, a multiple of 128, of a matrix in the block's shared memory, which nobody writes before the
    /// products have been waited for. No product is under way.
    #[inline(always)]
    pub unsafe fn by_both<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]> {
        // SAFETY: the caller's promise.
        Pending(unsafe { backend::warpgroup_by_both::<K>(a, image) })
    }

    /// Starts the first product of [`by_both`], for which [`only`] waits; zeros in place of the other sums.
    ///
    /// # Safety
    /// As for [`by_both`].
    #[inline(always)]
    pub unsafe fn by_first<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]> {
        // SAFETY: the caller's promise.
        Pending([
            unsafe { backend::warpgroup_by_first::<K>(a, image) },
            [0.0; 32],
        ])
    }

    /// Waits for the first sums, if no other product is under way.
    #[inline(always)]
    pub fn only(pending: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2] {
        let [mut first, second] = pending.0;
        backend::warpgroup_settle_only(&mut first);
        [first, second]
    }

    /// Waits for the first sums of [`by_both`]; also returns the other sums, which are still under way.
    #[inline(always)]
    pub fn first(pending: Pending<[[f32; 32]; 2]>) -> ([f32; 32], Pending<[f32; 32]>) {
        let [mut first, second] = pending.0;
        backend::warpgroup_settle_first(&mut first);
        (first, Pending(second))
    }

    /// Starts D = A B, with A `[64, 64]` of s and B the triangle; returns it together with `pending`. [`both`] waits for both.
    ///
    /// # Safety
    /// `triangle` is the address, a multiple of 128, of a matrix in the block's shared memory, which nobody writes before
    /// [`both`]; no product except `pending` is under way.
    #[inline(always)]
    pub unsafe fn by_triangle(
        a: &[u32; 16],
        triangle: u32,
        pending: Pending<[f32; 32]>,
    ) -> Pending<[[f32; 32]; 2]> {
        // SAFETY: the caller's promise.
        let d = unsafe { backend::warpgroup_by_triangle(a, triangle) };
        Pending([d, pending.0])
    }

    /// Waits for all products; returns the sums of [`by_triangle`], and the sums that were under way before it.
    #[inline(always)]
    pub fn both(pending: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2] {
        let mut sums = pending.0;
        backend::warpgroup_settle_two(&mut sums);
        sums
    }

    /// Starts `sums` + A B, with A `[64, 64]` of tokens and B the first 64 tokens of an image of `TOKENS`, 64 or 128, and K
    /// channels; [`settle`] waits for the sums. Also adds X Y to `d`, with X `[64, 64]` of s and Y the triangle. Only the first
    /// K / 2 of `sums` are used.
    ///
    /// # Safety
    /// As for [`by_both`] and [`by_triangle`]; nobody writes the image before [`settle`].
    #[inline(always)]
    pub unsafe fn add<const K: u32, const TOKENS: u32>(
        mut sums: [f32; 64],
        (a, image): (&[u32; 16], u32),
        d: &mut [f32; 32],
        (x, triangle): (&[u32; 16], u32),
    ) -> Pending<[f32; 64]> {
        // SAFETY: the caller's promise.
        unsafe { backend::warpgroup_add::<K, TOKENS>(&mut sums, (a, image), d, (x, triangle)) };
        Pending(sums)
    }

    /// [`add`] without X Y.
    ///
    /// # Safety
    /// As for [`add`].
    #[inline(always)]
    pub unsafe fn add_alone<const K: u32, const TOKENS: u32>(
        mut sums: [f32; 64],
        (a, image): (&[u32; 16], u32),
    ) -> Pending<[f32; 64]> {
        // SAFETY: the caller's promise.
        unsafe { backend::warpgroup_add_alone::<K, TOKENS>(&mut sums, (a, image)) };
        Pending(sums)
    }

    /// Waits for the sums of [`add`].
    #[inline(always)]
    pub fn settle<const K: u32>(pending: Pending<[f32; 64]>) -> [f32; 64] {
        let mut sums = pending.0;
        backend::warpgroup_settle::<K>(&mut sums);
        sums
    }

    /// Wraps finished sums, for a function that takes pending ones.
    #[inline(always)]
    pub fn pending<T>(sums: T) -> Pending<T> {
        Pending(sums)
    }

    /// Unwraps the sums that [`pending`] wrapped.
    #[inline(always)]
    pub fn done<T>(pending: Pending<T>) -> T {
        pending.0
    }
}

/// Global memory. Addresses are aligned to the size of the access.
///
/// `load_*` is for data that nobody writes during the launch (it may go through the read-only cache); `load_state_*` and
/// `store_state_*` are for recurrent states, which a launch reads and writes once: they bypass L1.
pub mod global {
    use super::backend;

    instructions! {
        /// Prefetches the 128 bytes around `address` into L2. An invalid address has no effect.
        pub fn prefetch(address: u64);

        /// Prefetches `bytes` from `address` on into L2; both are multiples of 16.
        ///
        /// # Safety
        /// The range is in global memory.
        pub unsafe fn prefetch_bulk(address: u64, bytes: u32);
    }

    accesses! {
        u64, "`address` is a global-memory address, aligned to the access, of memory valid for it.";
        /// Two bytes that nobody writes during the launch.
        load_b16 / /// Stores two bytes.
        store_b16: u16;
        /// Four bytes that nobody writes during the launch.
        load_b32 / /// Stores four bytes.
        store_b32: u32;
        /// Eight bytes that nobody writes during the launch.
        load_b64 / /// Stores eight bytes.
        store_b64: [u32; 2];
        /// Sixteen bytes that nobody writes during the launch.
        load_b128 / /// Stores sixteen bytes.
        store_b128: [u32; 4];
    }

    macro_rules! state_accesses {
        ($(#[$doc:meta] $load:ident / #[$store_doc:meta] $store:ident: $t:ty;)*) => {$(instructions! {
            #[$doc]
            ///
            /// Unless `live`, nothing is read, and the value is undefined (NaN in the simulator). The load itself has the
            /// predicate, so that it can be issued ahead of the branch on `live`.
            ///
            /// # Safety
            /// If `live`, `address` is a global-memory address, aligned to the access, of memory valid for it.
            pub unsafe fn $load(address: u64, live: bool) -> $t;

            #[$store_doc]
            ///
            /// # Safety
            /// `address` is a global-memory address, aligned to the access, of memory valid for it.
            pub unsafe fn $store(address: u64, value: $t);
        })*};
    }

    state_accesses! {
        /// Two bytes of a state.
        load_state_b16 / /// Stores two bytes of a state.
        store_state_b16: u16;
        /// Four bytes of a state.
        load_state_b32 / /// Stores four bytes of a state.
        store_state_b32: u32;
        /// Eight bytes of a state.
        load_state_b64 / /// Stores eight bytes of a state.
        store_state_b64: [u32; 2];
        /// Sixteen bytes of a state.
        load_state_b128 / /// Stores sixteen bytes of a state.
        store_state_b128: [u32; 4];
    }
}

/// The block's dynamic shared memory. Contents are undefined until written: the simulator reports an earlier read.
pub mod shared {
    use super::backend;

    instructions! {
        /// Byte address of the block's dynamic shared memory, the base of every access here.
        pub fn dynamic_shared_mem() -> u32;
    }

    accesses! {
        u32, "`address` lies in the block's shared memory and is aligned to the access.";
        /// Loads two bytes.
        load_shared_b16 / /// Stores two bytes.
        store_shared_b16: u16;
        /// Loads four bytes.
        load_shared_b32 / /// Stores four bytes.
        store_shared_b32: u32;
        /// Loads eight bytes.
        load_shared_b64 / /// Stores eight bytes.
        store_shared_b64: [u32; 2];
        /// Loads sixteen bytes.
        load_shared_b128 / /// Stores sixteen bytes.
        store_shared_b128: [u32; 4];
    }

    instructions! {
        /// Loads four [8, 8] matrices of 16-bit elements, `[matrix]` in the result. Every lane of the warp calls it; lane
        /// 8m + i gives the address of the 16 bytes of row i of matrix m.
        ///
        /// A lane gets elements 2c and 2c+1 of row r of each matrix, in the low and the high half, with r = `lane_id() / 4` and
        /// c = `lane_id() % 4`: the layout of `mma_m16n8k16_bf16`.
        ///
        /// # Safety
        /// `address` lies in the block's shared memory and is a multiple of 16.
        pub unsafe fn load_matrices(address: u32) -> [u32; 4];

        /// [`load_matrices`], transposed: a lane gets elements r of rows 2c and 2c+1.
        ///
        /// # Safety
        /// As for [`load_matrices`].
        pub unsafe fn load_matrices_transposed(address: u32) -> [u32; 4];

        /// Stores four [8, 8] matrices of 16-bit elements, transposed: the inverse of [`load_matrices_transposed`]. Every lane of
        /// the warp calls it; a lane's low and high half are element r of rows 2c and 2c+1 of a matrix, and lane 8m + i gives the
        /// address of the 16 bytes of row i of matrix m (sm_90).
        ///
        /// # Safety
        /// `address` lies in the block's shared memory and is a multiple of 16.
        pub unsafe fn store_matrices_transposed(address: u32, matrices: [u32; 4]);

        /// Starts copying 16 bytes from global to shared memory. The copied bytes are visible to this thread after
        /// [`copy_async_wait`], to others after a barrier that follows it.
        ///
        /// # Safety
        /// Both addresses are 16-byte aligned and valid; nobody but this thread writes the source during the launch, and
        /// this thread only once it has waited.
        pub unsafe fn copy_async_b128(shared_address: u32, global_address: u64);

        /// [`copy_async_b128`] if `is_there`; otherwise writes 16 zero bytes and reads nothing.
        ///
        /// # Safety
        /// As for [`copy_async_b128`]; `global_address` need not be valid unless `is_there`.
        pub unsafe fn copy_async_b128_or_zeros(shared_address: u32, global_address: u64, is_there: bool);

        /// Closes the group of copies started since the last commit.
        pub fn copy_async_commit();
        /// Waits until at most `PENDING` of this thread's newest groups are still in flight.
        pub fn copy_async_wait<const PENDING: u32>();
    }

    /// Bytes of a counter in shared memory.
    pub const COUNTER_BYTES: u32 = 8;

    instructions! {
        /// Initializes a counter (`mbarrier`), which counts arriving threads and copied bytes, phase by phase.
        ///
        /// A counter for one thread is private to that thread: it counts groups of bulk copies ([`copy_bulk_commit`],
        /// [`copy_bulk_wait`]). Other counters serve whole warps, which arrive at and wait for them ([`arrive_at_counter`],
        /// [`wait_for_counter`]) after a barrier that follows the initialization.
        ///
        /// # Safety
        /// `counter` lies in the block's shared memory and is a multiple of 8; nobody accesses it otherwise.
        pub unsafe fn open_counter(counter: u32, threads: u32);

        /// Arrives at a counter: the warp's earlier accesses are done for threads that have waited for the phase. All lanes call
        /// it.
        ///
        /// # Safety
        /// `counter` is open, and for more than one thread. Before this warp arrives at phase n + 2, it, or a warp that it has
        /// waited for, has waited for phase n.
        pub unsafe fn arrive_at_counter(counter: u32);

        /// Arrives at a counter once the asynchronous copies that the lanes have started, committed or not, are complete. These
        /// copies, and these threads' bulk copies of the phase, are done for threads that have waited for the phase; no other
        /// access is ordered. All lanes call it, and none waits.
        ///
        /// # Safety
        /// As for [`arrive_at_counter`].
        pub unsafe fn arrive_at_counter_behind_copies(counter: u32);

        /// Waits for a phase of a counter, numbered from 0: the current phase, or the last one. All lanes of the warp call it.
        ///
        /// # Safety
        /// As for [`arrive_at_counter`].
        pub unsafe fn wait_for_counter(counter: u32, phase: u32);

        /// Starts a bulk copy (TMA) of `bytes`, a multiple of 16 below 2²⁰, from global to shared memory. This thread arrives at
        /// the counter later ([`arrive_at_counter`]); the bytes are visible to threads that have waited for that phase. With a
        /// private counter they are visible to this thread after [`copy_bulk_wait`], to others after a barrier that follows it.
        /// Warpgroup products may then read them without a fence.
        ///
        /// # Safety
        /// Both addresses are 16-byte aligned and valid; nobody writes the source during the launch; `counter` is open, and
        /// either this thread's own or one for warps.
        pub unsafe fn copy_bulk(shared_address: u32, global_address: u64, bytes: u32, counter: u32);

        /// Closes the group of bulk copies started since the last group was closed. Each group is waited for before the next is
        /// closed.
        ///
        /// # Safety
        /// `counter` is this thread's own.
        pub unsafe fn copy_bulk_commit(counter: u32);

        /// Starts a bulk store of `bytes`, a multiple of 16, from shared to global memory. The stored data are those visible to
        /// this thread after the writers' [`fence_shared`](super::warpgroup::fence_shared) and a barrier.
        ///
        /// # Safety
        /// Both addresses are 16-byte aligned and valid; nobody writes the source before [`store_bulk_wait`].
        pub unsafe fn store_bulk(global_address: u64, shared_address: u32, bytes: u32);

        /// Waits until this thread's bulk stores have read their sources. The stores complete before the launch ends.
        pub fn store_bulk_wait();

        /// Waits for group `group`, numbered from 0; it is the last group that was closed.
        ///
        /// # Safety
        /// `counter` is this thread's own.
        pub unsafe fn copy_bulk_wait(counter: u32, group: u32);
    }
}

/// Clusters: [`crate::device::shapes::LaunchShape::cluster`] blocks along x that run concurrently and can access each other's
/// shared memory. The rank of a block is its index along x, modulo the size of the cluster.
///
/// Without clusters each block is a cluster of one.
pub mod cluster {
    use super::backend;

    /// Arrives at the cluster's barrier, and orders nothing. This thread calls [`wait`] before it arrives again.
    #[inline(always)]
    pub fn arrive_relaxed() {
        backend::cluster_arrive_relaxed()
    }

    /// Arrives at the cluster's barrier: this thread's earlier accesses are done for threads that have waited. This thread calls
    /// [`wait`] before it arrives again.
    #[inline(always)]
    pub fn arrive() {
        backend::cluster_arrive()
    }

    /// Waits until all threads of the cluster that have not exited have arrived at the barrier. A thread calls it once after each
    /// of its arrivals.
    #[inline(always)]
    pub fn wait() {
        backend::cluster_wait()
    }

    macro_rules! stores {
        ($(#[$doc:meta] $store:ident: $t:ty;)*) => {$(instructions! {
            #[$doc]
            ///
            /// A block other than the thread's own must be running: the thread has waited for the cluster before, and the
            /// other block waits once more, in a phase at which the thread arrives ([`arrive`]) after the store.
            ///
            /// # Safety
            /// `rank` is the rank of a block of the cluster; `address` lies in a block's shared memory, at the same place in
            /// all blocks, and is aligned to the access.
            pub unsafe fn $store(address: u32, rank: u32, value: $t);
        })*};
    }

    stores! {
        /// Stores four bytes at `address` in the shared memory of block `rank` of the cluster.
        store_shared_b32_at: u32;
        /// Stores sixteen bytes at `address` in the shared memory of block `rank` of the cluster.
        store_shared_b128_at: [u32; 4];
    }

    /// Bytes of a mailbox in shared memory.
    pub const MAILBOX_BYTES: u32 = 8;

    instructions! {
        /// Initializes a mailbox, to be used once, in the [`MAILBOX_BYTES`] at `mailbox`, for `bytes` bytes, fewer than 2²⁰, that
        /// will be sent to it. One thread of the block calls it.
        ///
        /// A phase of the cluster's barrier separates this call from the first send or wait: this thread arrives at the barrier
        /// ([`arrive_relaxed`] suffices), and each sender and waiter has waited for that phase. From then on nobody loads or
        /// stores the mailbox itself.
        ///
        /// If anything is sent to the mailbox, all `bytes` are sent, and a thread of the block waits for them: the block then
        /// cannot exit before they have arrived.
        ///
        /// # Safety
        /// `mailbox` lies in the block's shared memory and is a multiple of 8.
        pub unsafe fn open_mailbox(mailbox: u32, bytes: u32);

        /// Sends four bytes to `address` in the shared memory of block `rank` of the cluster, which may be the thread's own, and
        /// counts them in the mailbox there.
        ///
        /// They are visible to a thread of that block that has returned from [`wait_mailbox`], and to threads that a barrier
        /// orders after it; to no other thread, this one included. The send orders none of this thread's other accesses.
        ///
        /// # Safety
        /// `rank` is the rank of a block of the cluster; `address` lies in a block's shared memory, at the same place in all
        /// blocks, and is a multiple of 4; `mailbox` is open there.
        pub unsafe fn send_b32(address: u32, rank: u32, value: u32, mailbox: u32);

        /// Waits until all bytes that a mailbox of this block was opened for have arrived: they are then visible to this thread.
        ///
        /// # Safety
        /// `mailbox` is open in this block.
        pub unsafe fn wait_mailbox(mailbox: u32);
    }
}

/// Arithmetic that needs its own instruction. In the four approximations the GPU flushes denormals to zero; the simulator
/// computes them in f32 to within the same bounds.
pub mod float {
    use super::backend;

    instructions! {
        /// `a * b + c`, rounded once.
        pub fn fma(a: f32, b: f32, c: f32) -> f32;
        /// Minimum; NaN if either is NaN.
        pub fn minimum(a: f32, b: f32) -> f32;
        /// Maximum; NaN if either is NaN.
        pub fn maximum(a: f32, b: f32) -> f32;
        /// 2ˣ, 2 ulp.
        pub fn exp2(x: f32) -> f32;
        /// log₂ x: absolute error 2⁻²² for x in (0.5, 2), relative 2⁻²² elsewhere.
        pub fn log2(x: f32) -> f32;
        /// 1/x, 1 ulp.
        pub fn reciprocal(x: f32) -> f32;
        /// 1/√x, relative error 2⁻²².
        pub fn rsqrt(x: f32) -> f32;
        /// Two f32 rounded to nearest-even bf16; `low` in the low half.
        pub fn pack_bf16x2(low: f32, high: f32) -> u32;
        /// Two f32 rounded to nearest-even f16; `low` in the low half.
        pub fn pack_f16x2(low: f32, high: f32) -> u32;
        /// Two f32 rounded to nearest-even bf16, or, if `is_f16`, to f16 clamped to ±65504; NaN stays NaN; `low` in the low half.
        pub fn pack_b16x2(low: f32, high: f32, is_f16: bool) -> u32;
        /// Converts a word's two bf16, or f16 if `is_f16`, to f32, low half first.
        pub fn b16x2_to_f32(word: u32, is_f16: bool) -> [f32; 2];
        /// a · b for the f16 halves of two words, rounded to nearest-even f16.
        pub fn multiply_f16x2(a: u32, b: u32) -> u32;
        /// a + b for the f16 halves of two words, rounded to nearest-even f16.
        pub fn add_f16x2(a: u32, b: u32) -> u32;
        /// a · b + c for the f16 halves of three words, rounded once to nearest-even f16.
        pub fn fma_f16x2(a: u32, b: u32, c: u32) -> u32;
        /// The larger magnitude for each f16 half of two words; NaN (0x7fff) if one of them is NaN.
        pub fn larger_f16x2(a: u32, b: u32) -> u32;
        /// Converts the f16 with these bits to f32.
        pub fn f16_to_f32(bits: u16) -> f32;
    }
}

#[cfg(target_arch = "nvptx64")]
pub(crate) use backend::load_time_constant;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use backend::load_time_constants;

/// Returns `x` as an opaque trip count (docs/compiler.md): a loop up to it is not unrolled, so its code stays small.
#[inline(always)]
pub fn unknown(x: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    return backend::unknown(x);
    #[cfg(not(target_arch = "nvptx64"))]
    x
}

/// Marks the branch that calls it as rarely taken (docs/compiler.md). Code after the branch stays as likely, and is inlined as
/// without the call.
#[inline(always)]
pub fn rarely() {
    #[cfg(target_arch = "nvptx64")]
    core::hint::cold_path();
}
