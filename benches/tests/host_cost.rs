//! Counts the host's instructions of a launch, over a bare launch of the same kernels, on a stand-in for the driver that returns at once.
//! A child process launches, and is stepped through instruction by instruction, so that the numbers are those of the code, whatever
//! else the machine does. The test fails if a number has grown by half.
//!
//! `cargo test --release -p gated-delta-benches --test host_cost`

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions)))]
#[path = "host_cost/counted.rs"]
mod counted;

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions)))]
fn main() -> anyhow::Result<()> {
    counted::main()
}

/// The numbers are those of an x86-64 release build.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions))))]
fn main() {}
