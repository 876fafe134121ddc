//! `cargo bench`: latency tables. Each row is checked against the reference before it is timed.

use anyhow::{Result, ensure};
use clap::Parser;
use gated_delta_benches::latency::run;
use gated_delta_benches::options::Options;

fn main() -> Result<()> {
    let outcome = run(&Options::parse(), &[])?;
    print!("{}", outcome.text);
    let failed = outcome.failures.len();
    ensure!(failed == 0, "{failed} failed");
    Ok(())
}
