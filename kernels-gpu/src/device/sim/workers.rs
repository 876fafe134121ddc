//! The clusters of a launch, spread over the cores.

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use corosensei::stack::DefaultStack;

use super::Launch;
use super::block::{Block, in_fiber};
use super::cluster::Cluster;
use super::fault::{Fault, keep_panics_of_fibers_silent};
use super::memory::GlobalMemory;

/// Room for the frames of an unoptimised kernel; only touched pages take memory.
const STACK_BYTES: usize = 256 * 1024;
/// A stack takes two of the 65530 mappings that Linux gives a process.
const MAX_HELPER_STACKS: usize = 16 * 1024;

/// Runs all blocks; returns the fault of the lowest faulting block.
pub fn run_blocks(
    launch: &Launch<'_>,
    memory: &GlobalMemory<'_>,
    body: &(dyn Fn() + Sync),
) -> Result<(), Fault> {
    keep_panics_of_fibers_silent(in_fiber);
    let clusters = launch.shape.grid.iter().product::<u32>() / launch.shape.cluster;
    let threads = launch.shape.cluster * launch.shape.block;
    let (next, failed) = (AtomicU32::new(0), AtomicBool::new(false));
    let first_fault = Mutex::new(None);
    let report = |index: u32, fault: Fault| {
        let mut first = lock(&first_fault);
        if first.as_ref().is_none_or(|(lowest, _)| index < *lowest) {
            *first = Some((index, fault));
        }
        failed.store(true, Ordering::Relaxed);
    };
    let work = || {
        let mut stacks = match take_stacks(threads) {
            Ok(stacks) => stacks,
            Err(error) => {
                let message = format!("no memory for the stacks of a cluster: {error}");
                return report(clusters, Fault::of_launch(launch.kernel, message));
            }
        };
        let cluster = Cluster::new(launch.shape);
        let block = |of_cluster| Block::new(launch, memory, &cluster, of_cluster);
        let blocks: Vec<Block<'_>> = cluster.memories().map(block).collect();
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= clusters {
                break;
            }
            if let Err(fault) = cluster.run(&blocks, index, body, &mut stacks) {
                report(index, fault);
            }
        }
        lock(&STACKS).append(&mut stacks);
    };
    let helpers = Helpers::hire(clusters - 1, threads);
    thread::scope(|scope| {
        (0..helpers.0).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    lock(&first_fault)
        .take()
        .map_or(Ok(()), |(_, fault)| Err(fault))
}

/// OS threads that help the caller. All running launches share one limit, so that concurrent launches do not multiply threads and
/// stacks.
struct Helpers(usize);

static HIRED: AtomicUsize = AtomicUsize::new(0);

impl Helpers {
    /// At most `wanted` helpers, each with `stacks` stacks.
    fn hire(wanted: u32, stacks: u32) -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let limit = (cores - 1).min(MAX_HELPER_STACKS / stacks as usize);
        let mut hired = 0;
        let hire = |others: usize| {
            hired = limit.saturating_sub(others).min(wanted as usize);
            Some(others + hired)
        };
        // `hire` never refuses.
        let _ = HIRED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, hire);
        Self(hired)
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        HIRED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Stacks that no cluster uses.
static STACKS: Mutex<Vec<DefaultStack>> = Mutex::new(Vec::new());

fn take_stacks(count: u32) -> io::Result<Vec<DefaultStack>> {
    let mut stacks = {
        let mut idle = lock(&STACKS);
        let left = idle.len().saturating_sub(count as usize);
        idle.split_off(left)
    };
    while stacks.len() < count as usize {
        stacks.push(DefaultStack::new(STACK_BYTES)?);
    }
    Ok(stacks)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
