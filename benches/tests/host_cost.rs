//! What a launch costs the host, in instructions over a bare launch of the same kernels: on a stand-in for the driver that
//! returns at once. A child of this process launches, and is stepped through instruction by instruction, so that the numbers
//! are those of the code, whatever else the machine does. It fails where a number has grown by half.
//!
//! `cargo test --release -p gated-delta-benches --test host_cost`

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions)))]
#[path = "host_cost/counted.rs"]
mod counted;

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions)))]
fn main() -> anyhow::Result<()> {
    counted::main()
}

/// The numbers are those of x86-64, in a release.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions))))]
fn main() {}
