//! Where workers and solver wait for each other, and for no more than they need: workers go on once they have left their
//! tokens to the solver, and the solver once it has left its solution to the workers. Each barrier but that of the
//! workers is met once in a launch.

use super::map::Set;
use crate::device::thread::{arrive_at_barrier, sync_barrier};

const WORKERS: u32 = 1;
/// And the next one, for the other set.
const TOKENS: u32 = 2;
/// And the next one, for the other set.
const SOLUTIONS: u32 = 4;

/// The threads of `WARPS` workers and the solver.
const fn block(warps: u32) -> u32 {
    32 * (warps + 1)
}

/// Workers: waits for all of them.
#[inline(always)]
pub fn workers<const WARPS: u32>() {
    sync_barrier(WORKERS, 32 * WARPS);
}

/// Workers: the solver may read what it needs of the tokens of `set`. Behind [`workers`], not before it: racecheck sees
/// hazards where a warp arrives at one barrier and then waits at another.
#[inline(always)]
pub fn leave_tokens<const WARPS: u32>(set: Set) {
    arrive_at_barrier(TOKENS + set as u32, block(WARPS));
}

/// Solver: waits for the tokens of `set`.
#[inline(always)]
pub fn take_tokens<const WARPS: u32>(set: Set) {
    sync_barrier(TOKENS + set as u32, block(WARPS));
}

/// Solver: the workers may read the solution of `set`.
#[inline(always)]
pub fn leave_solution<const WARPS: u32>(set: Set) {
    arrive_at_barrier(SOLUTIONS + set as u32, block(WARPS));
}

/// Workers: waits for the solution of `set`.
#[inline(always)]
pub fn take_solution<const WARPS: u32>(set: Set) {
    sync_barrier(SOLUTIONS + set as u32, block(WARPS));
}
