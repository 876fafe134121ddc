//! Named barriers between workers and solver. Nobody waits longer than necessary: workers continue once they have handed their
//! tokens to the solver, and the solver continues once it has handed its solution to the workers. Each barrier but that of the
//! workers is used once in a launch, or alternately by every other set ([`super::sets`]).

use super::map::{Block, Set};
use crate::device::thread::{arrive_at_barrier, sync_barrier};

const WORKERS: u32 = 1;
/// And the next number, for the other set.
const TOKENS: u32 = 2;
/// And the next number, for the other set.
const SOLUTIONS: u32 = 4;

/// Threads of all workers and the solver.
const fn block<B: Block>() -> u32 {
    32 * (B::WARPS + 1)
}

/// Workers: waits for all of them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn workers<B: Block>() {
    sync_barrier(WORKERS, 32 * B::WARPS);
}

/// Workers: the solver may read its inputs from the tokens of `set`. Call it after [`workers`], not before: racecheck reports
/// hazards if a warp arrives at one barrier and then waits at another.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn leave_tokens<B: Block>(set: Set) {
    arrive_at_barrier(TOKENS + set.place(), block::<B>());
}

/// Solver: waits for the tokens of `set`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn take_tokens<B: Block>(set: Set) {
    sync_barrier(TOKENS + set.place(), block::<B>());
}

/// Solver: the workers may read the solution of `set`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn leave_solution<B: Block>(set: Set) {
    arrive_at_barrier(SOLUTIONS + set.place(), block::<B>());
}

/// Workers: waits for the solution of `set`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn take_solution<B: Block>(set: Set) {
    sync_barrier(SOLUTIONS + set.place(), block::<B>());
}
