//! The simulator finds each error that a small kernel makes, and none in a correct one.

mod cluster;
mod counter;
mod machine;
mod mailbox;
mod memory;
mod positive;
mod race;
mod sync;
mod warpgroup;

use gated_delta_kernels::device::shared::dynamic_shared_mem;
use gated_delta_kernels::device::sim::{self, Fault, FaultKind, Launch, Region};
use gated_delta_kernels::device::thread::thread_idx_x;
use gated_delta_kernels::device::{global, shared};
use gated_delta_kernels::launch::LaunchShape;

/// A contiguous, writable tensor over `data`.
fn tensor<T>(name: &'static str, data: &mut [T], dims: &[usize]) -> Region {
    Region {
        name,
        address: data.as_mut_ptr().expose_provenance() as u64,
        element_bytes: size_of_val(data) / dims.iter().product::<usize>(),
        dims: dims.to_vec(),
        strides: (0..dims.len())
            .map(|dim| dims[dim + 1..].iter().product())
            .collect(),
        writable: true,
    }
}

/// Launches `body` with 512 bytes of shared memory.
fn run<R>(
    grid: [u32; 3],
    block: u32,
    regions: &[Region],
    body: impl Fn() -> R + Sync,
) -> Result<(), Fault> {
    run_clusters(1, grid, block, regions, body)
}

/// Launches `body` in clusters, with 512 bytes of shared memory for each block.
fn run_clusters<R>(
    cluster: u32,
    grid: [u32; 3],
    block: u32,
    regions: &[Region],
    body: impl Fn() -> R + Sync,
) -> Result<(), Fault> {
    let shape = LaunchShape {
        cluster,
        overlaps: false,
        grid,
        block,
        shared_bytes: 512,
    };
    let launch = Launch {
        kernel: "crime",
        capability: (9, 0),
        shape,
        constants: &[3, 5],
        regions,
    };
    // SAFETY: the regions of a test are its own buffers.
    unsafe { sim::launch(&launch, &|| _ = body()) }
}

/// Launches one block of 64 threads. Panics unless it ends in a fault of `kind` in `thread`.
#[track_caller]
fn assert_fault<R>(
    regions: &[Region],
    body: impl Fn() -> R + Sync,
    kind: FaultKind,
    thread: u32,
    message: &str,
) {
    let fault = run([1; 3], 64, regions, body).expect_err("the simulator found nothing");
    assert_eq!(fault.message, message);
    assert_eq!((fault.kind, fault.thread), (kind, thread));
}

/// Launches one block of 64 threads. Panics if there is a fault.
#[track_caller]
fn assert_clean<R>(regions: &[Region], body: impl Fn() -> R + Sync) {
    run([1; 3], 64, regions, body).expect("there is no fault");
}

/// Runs `f` in one thread of each block.
fn only<R>(thread: u32, f: impl FnOnce() -> R) {
    if thread_idx_x() == thread {
        f();
    }
}

fn load(address: u64) -> u32 {
    // SAFETY: the simulator checks the address.
    unsafe { global::load_state_b32(address, true) }
}

fn store(address: u64, value: u32) {
    // SAFETY: the simulator checks the address.
    unsafe { global::store_b32(address, value) }
}

fn load_shared(offset: u32) -> u32 {
    // SAFETY: the simulator checks the address.
    unsafe { shared::load_shared_b32(dynamic_shared_mem() + offset) }
}

fn store_shared(offset: u32, value: u32) {
    // SAFETY: the simulator checks the address.
    unsafe { shared::store_shared_b32(dynamic_shared_mem() + offset, value) }
}

fn copy_async(offset: u32, address: u64) {
    // SAFETY: the simulator checks both addresses.
    unsafe { shared::copy_async_b128(dynamic_shared_mem() + offset, address) }
}
