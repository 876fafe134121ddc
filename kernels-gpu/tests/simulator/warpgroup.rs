//! Products of a warpgroup: all lanes read the right factor.

use gated_delta_kernels::device::shared::{dynamic_shared_mem, store_shared_b32};
use gated_delta_kernels::device::sim::{self, Fault, FaultKind, Launch};
use gated_delta_kernels::device::thread::{sync_threads, thread_idx_x};
use gated_delta_kernels::device::warpgroup;
use gated_delta_kernels::launch::LaunchShape;

/// Bytes of an image of 64 channels.
const IMAGE: u32 = 16384;

/// A product by an image. Each thread stores its words before a barrier. Thread `writer` stores the word `word` again after the
/// barrier. Without a `writer`, no thread stores that word.
fn product(word: u32, writer: Option<u32>) -> Result<(), Fault> {
    let body = || {
        let (base, thread) = (dynamic_shared_mem(), thread_idx_x());
        // SAFETY: the simulator checks the addresses, and the test does not read the sums.
        unsafe {
            for at in (thread..IMAGE / 4).step_by(128) {
                if at != word || writer.is_some() {
                    store_shared_b32(base + 4 * at, 0);
                }
            }
            sync_threads();
            if writer == Some(thread) {
                store_shared_b32(base + 4 * word, 0);
            }
            _ = warpgroup::first(warpgroup::by_both::<64>(&[0; 32], base));
        }
    };
    let shape = LaunchShape {
        cluster: 1,
        overlaps: false,
        grid: [1; 3],
        block: 128,
        shared_bytes: IMAGE,
    };
    let launch = Launch {
        kernel: "product",
        capability: (9, 0),
        shape,
        constants: &[],
        regions: &[],
    };
    // SAFETY: there are no regions.
    unsafe { sim::launch(&launch, &body) }
}

/// A word in each of some cores of the image.
fn words() -> impl Iterator<Item = u32> {
    (0..IMAGE / 4).step_by(101)
}

#[test]
fn a_factor_that_is_there_is_read() {
    product(IMAGE, None).expect("there is no fault");
}

#[test]
fn a_store_that_no_barrier_orders_is_found_whoever_makes_it() {
    for (word, writer) in words().zip((0..128).step_by(7).cycle()) {
        let fault = product(word, Some(writer)).expect_err("the simulator found nothing");
        assert_eq!(fault.kind, FaultKind::Racecheck, "{word}, {writer}");
    }
}

#[test]
fn a_word_that_nobody_stores_is_found() {
    for word in words() {
        let fault = product(word, None).expect_err("the simulator found nothing");
        assert_eq!(fault.kind, FaultKind::Memcheck, "{word}");
    }
}
