//! The facade on the CPU: a fiber for every GPU thread, and a check on every access.
//!
//! [`launch`] runs a kernel body over a grid: clusters of blocks in parallel on the cores of the machine, the threads of a
//! cluster in a fixed order on one core. The first error ends the launch as a [`Fault`]: an access outside the tensors of the
//! launch, a read of shared memory that was never written, two unordered accesses, a collective that not all of its lanes reach,
//! or a panic.
//!
//! A device function that is called outside [`launch`] panics.

mod barrier;
mod block;
mod butterfly;
mod cluster;
mod counter;
mod fault;
mod fibers;
mod float;
mod mailbox;
mod matrix;
mod memory;
mod race;
mod record;
mod shadow;
mod shared;
mod view;
mod warpgroup;
mod workers;

use fault::Problem;
pub use fault::{Fault, FaultKind};
pub(super) use float::{
    add_f16x2, b16x2_to_f32, exp2, f16_to_f32, fma, fma_f16x2, larger_f16x2, log2, maximum,
    minimum, multiply_f16x2, pack_b16x2, pack_bf16x2, pack_f16x2, reciprocal, rsqrt,
};

use crate::device::shapes::Element;
use crate::device::shapes::LaunchShape;
use crate::machine;
use barrier::Barrier;
use block::current;
use butterfly::Butterfly;
use fibers::At;
use memory::{GlobalMemory, Op};

/// One tensor that a launch may touch, in host memory. Tensors may overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The tensor in messages.
    pub name: &'static str,
    /// Host address of element `[0, 0, …]`.
    pub address: u64,
    /// Size of an element, bytes.
    pub element_bytes: usize,
    /// Extents.
    pub dims: Vec<usize>,
    /// Elements between neighbours along each dim; gaps between rows are outside the tensor.
    pub strides: Vec<usize>,
    /// Whether the launch may store to it.
    pub writable: bool,
}

/// One launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel in messages.
    pub kernel: &'static str,
    /// Compute capability of the simulated GPU.
    pub capability: (u32, u32),
    /// Grid, block and shared memory.
    pub shape: LaunchShape,
    /// Load-time constants, as [`crate::constants::Constants::words`].
    pub constants: &'a [u32],
    /// All memory that the kernel may access.
    pub regions: &'a [Region],
}

/// Runs `body` once for each thread of the grid.
///
/// The first launch installs a panic hook, in front of the process's own, that keeps panics of bodies from being printed.
///
/// # Errors
/// The [`Fault`] of the lowest faulting block; tensors are then partly written.
///
/// # Safety
/// Each region describes memory that is live and that nothing else touches during the call.
pub unsafe fn launch(launch: &Launch<'_>, body: &(dyn Fn() + Sync)) -> Result<(), Fault> {
    check_limits(launch).map_err(|message| Fault::of_launch(launch.kernel, message))?;
    let memory = GlobalMemory::new(launch.regions);
    workers::run_blocks(launch, &memory, body)
}

/// Checks the limits of the GPU and the field widths of a [`race::Access`].
fn check_limits(launch: &Launch<'_>) -> Result<(), String> {
    let (major, minor) = launch.capability;
    let most_shared_bytes = machine::shared_bytes(launch.capability);
    let LaunchShape {
        grid: [x, y, z],
        block,
        shared_bytes,
        cluster,
        overlaps: _,
    } = launch.shape;
    if x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535 {
        return Err(format!(
            "a grid of ({x}, {y}, {z}) blocks: wanted 1 or more, and at most 65535 along y and z"
        ));
    }
    if u64::from(x) * u64::from(y) * u64::from(z) > u64::from(race::MAX_BLOCKS) {
        return Err(format!(
            "a grid of ({x}, {y}, {z}) blocks: the simulator runs at most {}",
            race::MAX_BLOCKS
        ));
    }
    if block == 0 || block > race::MAX_THREADS || !block.is_multiple_of(32) {
        return Err(format!(
            "a block of {block} threads: wanted a multiple of 32, at most {}",
            race::MAX_THREADS
        ));
    }
    if cluster == 0 || cluster as usize > cluster::PORTABLE_BLOCKS {
        return Err(format!(
            "a cluster of {cluster} blocks: wanted 1 to {}, what every GPU with clusters has",
            cluster::PORTABLE_BLOCKS
        ));
    }
    if cluster > 1 && major < 9 {
        return Err(format!(
            "a cluster of {cluster} blocks: a GPU of compute capability {major}.{minor} has no clusters"
        ));
    }
    let has_whole_clusters =
        x.is_multiple_of(cluster) || cluster.is_multiple_of(x) && y.is_multiple_of(cluster / x);
    if !has_whole_clusters {
        return Err(format!(
            "a grid of ({x}, {y}, {z}) blocks, and clusters of {cluster} along x, or of all along x: wanted whole clusters"
        ));
    }
    if shared_bytes > most_shared_bytes {
        return Err(format!(
            "{shared_bytes} bytes of shared memory: a block has at most {most_shared_bytes}"
        ));
    }
    match launch
        .regions
        .iter()
        .find(|region| region.dims.len() != region.strides.len())
    {
        Some(Region {
            name,
            dims,
            strides,
            ..
        }) => Err(format!(
            "tensor `{name}` has {} dims but {} strides",
            dims.len(),
            strides.len()
        )),
        None => Ok(()),
    }
}

/// Hands `f` the load-time constants of the running launch.
///
/// # Panics
/// Outside a launch.
pub fn load_time_constants<R>(f: impl FnOnce(&[u32]) -> R) -> R {
    current(|block| f(block.constants()))
}

/// Ends the launch with a fault if the simulated GPU lacks an instruction; `has` says which machines have it.
fn needs(instruction: &str, has: impl Fn(u32) -> bool) {
    current(|block| {
        let (major, minor) = block.capability();
        if !has(machine::of_capability((major, minor))) {
            Problem::machine(format!(
                "{instruction}: a GPU of compute capability {major}.{minor} has no such instruction"
            ))
            .raise();
        }
    });
}

/// [`needs`] for an instruction of Hopper and later.
fn needs_hopper_or_later(instruction: &str) {
    needs(instruction, |machine| machine >= machine::HOPPER);
}

/// [`needs`] for an instruction of Hopper alone.
fn needs_hopper(instruction: &str) {
    needs(instruction, |machine| machine == machine::HOPPER);
}

pub(super) fn thread_idx_x() -> u32 {
    current(|block| block.thread())
}

pub(super) fn block_idx_x() -> u32 {
    current(|block| block.block()[0])
}

pub(super) fn grid_dim_x() -> u32 {
    current(|block| block.grid()[0])
}

pub(super) fn block_idx_y() -> u32 {
    current(|block| block.block()[1])
}

pub(super) fn block_idx_z() -> u32 {
    current(|block| block.block()[2])
}

pub(super) fn lane_id() -> u32 {
    thread_idx_x() % 32
}

pub(super) fn warp_ballot(is: bool) -> u32 {
    current(|block| block.ballot(is))
}

/// [`butterfly_sum`](crate::math::reduce::butterfly_sum) or `butterfly_scatter` in one collective; `None` for more values than a
/// lane can exchange.
pub(crate) fn butterfly<const N: usize>(
    values: [f32; N],
    low: u32,
    high: u32,
    scatters: bool,
) -> Option<[f32; N]> {
    let of = Butterfly::new(N, low, high, scatters)?;
    Some(current(|block| block.butterfly(values, of)))
}

pub(super) fn sync_threads() {
    current(|block| block.wait(At::SyncThreads));
}

pub(super) fn sync_barrier(barrier: u32, threads: u32) {
    current(|block| block.wait(At::SyncBarrier(Barrier::new(barrier, threads))));
}

pub(super) fn sync_barrier_any(barrier: u32, threads: u32, is: bool) -> bool {
    let barrier = Barrier::new(barrier, threads);
    current(|block| {
        block.vote(barrier, is);
        block.wait(At::SyncBarrier(barrier));
        block.vote_of(barrier)
    })
}

pub(super) fn arrive_at_barrier(barrier: u32, threads: u32) {
    current(|block| block.wait(At::Arrive(Barrier::new(barrier, threads))));
}

pub(super) fn sync_warp(mask: u32) {
    current(|block| block.sync_warp(mask));
}

pub(super) fn warp_shuffle_xor(value: f32, lane_mask: u32) -> f32 {
    current(|block| block.shuffle(value, lane_mask, At::ShuffleXor(lane_mask)))
}

pub(super) fn warp_shuffle_idx(value: f32, source: u32) -> f32 {
    current(|block| block.shuffle(value, source, At::ShuffleIdx(source)))
}

pub(super) fn mma_m16n8k16_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    current(|block| block.multiply(a, b, c, At::Mma(Element::Bf16)))
}

pub(super) fn mma_m16n8k16_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    current(|block| block.multiply(a, b, c, At::Mma(Element::F16)))
}

pub(super) fn mma_m16n8k16_b16(a: [u32; 4], b: [u32; 2], c: [f32; 4], is_f16: bool) -> [f32; 4] {
    if is_f16 {
        mma_m16n8k16_f16(a, b, c)
    } else {
        mma_m16n8k16_bf16(a, b, c)
    }
}

pub(super) unsafe fn load_matrices(address: u32) -> [u32; 4] {
    current(|block| block.load_matrices(address, At::LoadMatrices))
}

pub(super) unsafe fn load_matrices_transposed(address: u32) -> [u32; 4] {
    current(|block| block.load_matrices(address, At::LoadMatricesTransposed))
}

pub(super) unsafe fn store_matrices_transposed(address: u32, matrices: [u32; 4]) {
    needs_hopper_or_later("stmatrix");
    current(|block| block.store_matrices_transposed(address, matrices));
}

pub(super) fn fence_shared() {}

pub(super) fn let_next_begin() {}

pub(super) fn wait_for_previous() {}

pub(super) fn warpgroup_settle_only(_: &mut [f32; 32]) {}

pub(super) unsafe fn warpgroup_by_first<const K: u32>(a: &[u32; 32], image: u32) -> [f32; 32] {
    needs_hopper("wgmma");
    current(|block| block.by_channels(&a[..K as usize / 4], image))
}

pub(super) fn warpgroup_settle_first(_: &mut [f32; 32]) {}

pub(super) unsafe fn warpgroup_by_both<const K: u32>(a: &[u32; 32], image: u32) -> [[f32; 32]; 2] {
    needs_hopper("wgmma");
    let second = image + warpgroup::of_image(8, 0);
    [image, second].map(|image| current(|block| block.by_channels(&a[..K as usize / 4], image)))
}

pub(super) unsafe fn warpgroup_by_triangle(a: &[u32; 16], triangle: u32) -> [f32; 32] {
    needs_hopper("wgmma");
    current(|block| block.by_triangle(a, triangle))
}

pub(super) fn warpgroup_settle_two(_: &mut [[f32; 32]; 2]) {}

pub(super) fn warpgroup_settle<const K: u32>(_: &mut [f32; 64]) {}

pub(super) unsafe fn warpgroup_add<const K: u32, const TOKENS: u32>(
    sums: &mut [f32; 64],
    (a, image): (&[u32; 16], u32),
    d: &mut [f32; 32],
    (x, triangle): (&[u32; 16], u32),
) {
    needs_hopper("wgmma");
    current(|block| {
        block.add_by_tokens(&mut sums[..K as usize / 2], a, image, TOKENS);
        block.add_by_triangle(d, x, triangle);
    });
}

pub(super) unsafe fn warpgroup_add_alone<const K: u32, const TOKENS: u32>(
    sums: &mut [f32; 64],
    (a, image): (&[u32; 16], u32),
) {
    needs_hopper("wgmma");
    current(|block| block.add_by_tokens(&mut sums[..K as usize / 2], a, image, TOKENS));
}

macro_rules! global_memory {
    ($($load:ident $store:ident $load_state:ident $store_state:ident: $t:ty;)*) => {$(
        global_memory!(@load $load: $t);
        global_memory!(@store $store: $t);
        global_memory!(@load_state $load_state: $t);
        global_memory!(@store $store_state: $t);
    )*};
    (@load $load:ident: $t:ty) => {
        pub(super) unsafe fn $load(address: u64) -> $t {
            // SAFETY: the region that covers the address is live, by the promise made to `launch`.
            current(|block| unsafe { block.load_global(address, Op::ReadOnlyLoad) })
        }
    };
    (@load_state $load:ident: $t:ty) => {
        pub(super) unsafe fn $load(address: u64, live: bool) -> $t {
            if !live {
                return bytemuck::cast([u16::MAX; size_of::<$t>() / 2]);
            }
            // SAFETY: the region that covers the address is live, by the promise made to `launch`.
            current(|block| unsafe { block.load_global(address, Op::Load) })
        }
    };
    (@store $store:ident: $t:ty) => {
        pub(super) unsafe fn $store(address: u64, value: $t) {
            // SAFETY: the region that covers the address is live, by the promise made to `launch`.
            current(|block| unsafe { block.store_global(address, value) })
        }
    };
}

global_memory! {
    load_b16 store_b16 load_state_b16 store_state_b16: u16;
    load_b32 store_b32 load_state_b32 store_state_b32: u32;
    load_b64 store_b64 load_state_b64 store_state_b64: [u32; 2];
    load_b128 store_b128 load_state_b128 store_state_b128: [u32; 4];
}

macro_rules! shared_memory {
    ($($load:ident $store:ident: $t:ty;)*) => {$(
        pub(super) unsafe fn $load(address: u32) -> $t {
            current(|block| block.load_shared(address))
        }

        pub(super) unsafe fn $store(address: u32, value: $t) {
            current(|block| block.store_shared(address, value))
        }
    )*};
}

shared_memory! {
    load_shared_b16 store_shared_b16: u16;
    load_shared_b32 store_shared_b32: u32;
    load_shared_b64 store_shared_b64: [u32; 2];
    load_shared_b128 store_shared_b128: [u32; 4];
}

pub(super) fn dynamic_shared_mem() -> u32 {
    shared::BASE
}

pub(super) fn cluster_arrive_relaxed() {
    needs_hopper_or_later("barrier.cluster");
    current(|block| block.arrive_at_cluster(false));
}

pub(super) fn cluster_arrive() {
    needs_hopper_or_later("barrier.cluster");
    current(|block| block.arrive_at_cluster(true));
}

pub(super) fn cluster_wait() {
    needs_hopper_or_later("barrier.cluster");
    current(|block| block.wait_for_cluster());
}

pub(super) unsafe fn store_shared_b32_at(address: u32, rank: u32, value: u32) {
    needs_hopper_or_later("st.shared::cluster");
    current(|block| block.store_shared_at(address, rank, value));
}

pub(super) unsafe fn store_shared_b128_at(address: u32, rank: u32, value: [u32; 4]) {
    needs_hopper_or_later("st.shared::cluster");
    current(|block| block.store_shared_at(address, rank, value));
}

pub(super) unsafe fn open_mailbox(mailbox: u32, bytes: u32) {
    needs_hopper_or_later("st.async");
    current(|block| block.open_mailbox(mailbox, bytes));
}

pub(super) unsafe fn send_b32(address: u32, rank: u32, value: u32, mailbox: u32) {
    needs_hopper_or_later("st.async");
    current(|block| block.send(address, rank, value, mailbox));
}

pub(super) unsafe fn wait_mailbox(mailbox: u32) {
    needs_hopper_or_later("st.async");
    current(|block| block.wait_mailbox(mailbox));
}

pub(super) unsafe fn copy_async_b128(shared_address: u32, global_address: u64) {
    // SAFETY: the region that covers the address is live, by the promise made to `launch`.
    current(|block| unsafe { block.copy_async(shared_address, global_address) })
}

pub(super) unsafe fn copy_async_b128_or_zeros(
    shared_address: u32,
    global_address: u64,
    is_there: bool,
) {
    if is_there {
        // SAFETY: the caller's promise.
        unsafe { copy_async_b128(shared_address, global_address) }
    } else {
        // Written immediately: a read before the barrier is reported nonetheless.
        // SAFETY: the caller's promise.
        unsafe { store_shared_b128(shared_address, [0; 4]) }
    }
}

pub(super) fn copy_async_commit() {
    current(|block| block.copy_async_commit());
}

pub(super) fn copy_async_wait<const PENDING: u32>() {
    // SAFETY: the regions that cover the sources are live, by the promise made to `launch`.
    current(|block| unsafe { block.copy_async_wait(PENDING) });
}

pub(super) fn take_registers<const REGISTERS: u32>() {
    needs_hopper("setmaxnreg");
}

pub(super) fn leave_registers<const REGISTERS: u32>() {
    needs_hopper("setmaxnreg");
}

pub(super) fn prefetch(_: u64) {}

// A hint. The PTX for an older GPU leaves it out, like the fences and waits that such a GPU does not need.
pub(super) unsafe fn prefetch_bulk(_: u64, _: u32) {}

pub(super) unsafe fn open_counter(counter: u32, threads: u32) {
    current(|block| block.open_counter(counter, threads));
}

pub(super) unsafe fn arrive_at_counter(counter: u32) {
    // SAFETY: the regions that cover the sources are live, by the promise made to `launch`.
    current(|block| unsafe { block.arrive_at_counter(counter, false) });
}

pub(super) unsafe fn arrive_at_counter_behind_copies(counter: u32) {
    // SAFETY: as above.
    current(|block| unsafe { block.arrive_at_counter(counter, true) });
}

pub(super) unsafe fn wait_for_counter(counter: u32, phase: u32) {
    current(|block| block.wait_for_counter(counter, phase));
}

pub(super) unsafe fn copy_bulk(shared_address: u32, global_address: u64, bytes: u32, counter: u32) {
    needs_hopper_or_later("cp.async.bulk");
    // SAFETY: the region that covers the address is live, by the promise made to `launch`.
    current(|block| unsafe { block.copy_bulk(shared_address, global_address, bytes, counter) });
}

pub(super) unsafe fn store_bulk(global_address: u64, shared_address: u32, bytes: u32) {
    needs_hopper_or_later("cp.async.bulk");
    current(|block| block.store_bulk(global_address, shared_address, bytes));
}

pub(super) fn store_bulk_wait() {
    needs_hopper_or_later("cp.async.bulk");
    // SAFETY: the regions that cover the destinations are live, by the promise made to `launch`.
    current(|block| unsafe { block.store_bulk_wait() });
}

pub(super) unsafe fn copy_bulk_commit(counter: u32) {
    current(|block| block.copy_bulk_commit(counter));
}

pub(super) unsafe fn copy_bulk_wait(counter: u32, group: u32) {
    // SAFETY: the regions that cover the sources are live, by the promise made to `launch`.
    current(|block| unsafe { block.copy_bulk_wait(counter, group) });
}
