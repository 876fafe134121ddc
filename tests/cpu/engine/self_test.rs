//! The self-test passes on every backend.

use std::time::Instant;

use gated_delta_test_support::backend::cuda;

#[test]
fn the_gpu_passes_in_seconds() {
    let Some(backend) = cuda() else { return };
    let start = Instant::now();
    let report = backend.library().self_test().unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} entries, {} launches in {seconds:.1} s; the worst error, {:.2} of what is allowed, is {}'s",
        report.entries.len(),
        report.launches,
        report.worst,
        report.worst_entry.map_or("nobody", |entry| entry.name()),
    );
    assert!(seconds < 60.0, "{seconds:.1} s");
}
