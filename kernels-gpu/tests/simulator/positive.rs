//! Results and times of correct launches.

use std::slice;
use std::time::{Duration, Instant};

use gated_delta_kernels::device::sim::{self, FaultKind, Launch, Region};
use gated_delta_kernels::device::thread::{
    block_idx_x, block_idx_y, block_idx_z, sync_threads, thread_idx_x,
};
use gated_delta_kernels::device::warp::{lane_id, warp_ballot, warp_shuffle_idx, warp_shuffle_xor};
use gated_delta_kernels::device::{float, global};
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::math::reduce::{butterfly_scatter, butterfly_sum, butterfly_sum_pairs};

use super::{assert_clean, load, load_shared, only, run, store, store_shared, tensor};

#[test]
fn a_butterfly_of_shuffles() {
    let mut data = [0.0_f32; 64];
    let o = tensor("o", &mut data, &[64]);
    assert_clean(slice::from_ref(&o), || {
        let mut sum = lane_id() as f32;
        for lane_mask in [16, 8, 4, 2, 1] {
            sum += warp_shuffle_xor(sum, lane_mask);
        }
        sum += warp_shuffle_idx(thread_idx_x() as f32, 5);
        store(o.address + 4 * u64::from(thread_idx_x()), sum.to_bits());
    });
    assert_eq!(data[..32], [496.0 + 5.0; 32]);
    assert_eq!(data[32..], [496.0 + 37.0; 32]);
}

/// A value that differs by lane and `i`, with bits that additions round away.
fn value_of(lane: u32, i: usize) -> f32 {
    ((lane * 37 + 11 * i as u32) % 101) as f32 * 0.1 - 3.7
}

/// Reductions of up to sixteen values at once, and of more values by successive shuffles, have the same bits.
#[test]
fn reductions_at_once_have_the_bits_of_shuffles() {
    for (low, high) in [(1, 32), (1, 4), (4, 32), (8, 16), (2, 2)] {
        let mut data = [u32::MAX; 64];
        let o = tensor("o", &mut data, &[64]);
        assert_clean(slice::from_ref(&o), || {
            let lane = lane_id();
            let many: [f32; 17] = std::array::from_fn(|i| value_of(lane, i));
            let few: [f32; 16] = std::array::from_fn(|i| many[i]);
            let pairs: [[f32; 2]; 8] = std::array::from_fn(|i| [many[2 * i], many[2 * i + 1]]);
            let wanted = butterfly_sum(many, low, high);
            let got = butterfly_sum(few, low, high);
            let of_pairs = butterfly_sum_pairs(pairs, low, high);
            let same = (0..16).all(|i| {
                let (bits, pair) = (wanted[i].to_bits(), of_pairs[i / 2][i % 2]);
                got[i].to_bits() == bits && pair.to_bits() == bits
            });
            store(o.address + 4 * u64::from(thread_idx_x()), u32::from(same));
        });
        assert_eq!(data, [1; 64], "{low}..{high}");
    }
}

/// The first places of each lane have its part of the sums, with the bits of a tree that adds neighbours first.
#[test]
fn scattered_sums_are_where_they_belong() {
    // The last step of the reduction leaves two values in the lanes `l % high / low`.
    let tree = |lane: u32, low: u32, high: u32, i: usize| {
        let mut sums: Vec<f32> = (0..32).map(|lane| value_of(lane, i)).collect();
        let mut lane_mask = low;
        while lane_mask < high {
            let before = sums.clone();
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum = before[lane] + before[lane ^ lane_mask as usize];
            }
            lane_mask *= 2;
        }
        sums[lane as usize]
    };
    for (low, high) in [(1, 4), (4, 32), (8, 16), (1, 8)] {
        let parts = (high / low) as usize;
        let mut data = [0_u32; 128];
        let o = tensor("o", &mut data, &[2, 64]);
        assert_clean(slice::from_ref(&o), || {
            let lane = lane_id();
            let right = |sums: &[f32]| {
                let n = sums.len() / parts;
                let first = (lane % high / low) as usize * n;
                (0..n).all(|i| sums[i].to_bits() == tree(lane, low, high, first + i).to_bits())
            };
            let few: [f32; 16] = std::array::from_fn(|i| value_of(lane, i));
            let many: [f32; 32] = std::array::from_fn(|i| value_of(lane, i));
            let of_few = right(&butterfly_scatter(few, low, high));
            let of_many = right(&butterfly_scatter(many, low, high));
            store(o.address + 4 * u64::from(thread_idx_x()), u32::from(of_few));
            store(
                o.address + 4 * u64::from(64 + thread_idx_x()),
                u32::from(of_many),
            );
        });
        assert_eq!(data, [1; 128], "{low}..{high}");
    }
}

#[test]
fn a_ballot_has_a_bit_of_each_lane() {
    let mut data = [0_u32; 64];
    let o = tensor("o", &mut data, &[64]);
    assert_clean(slice::from_ref(&o), || {
        let thread = thread_idx_x();
        let bits = warp_ballot(thread % 3 == 1);
        store(o.address + 4 * u64::from(thread), bits);
    });
    let of_warp = |first: u32| {
        (0..32).fold(0, |all, lane| {
            all | u32::from((first + lane) % 3 == 1) << lane
        })
    };
    assert_eq!(data[..32], [of_warp(0); 32]);
    assert_eq!(data[32..], [of_warp(32); 32]);
}

#[test]
fn block_reduction_through_shared_memory() {
    let mut data = vec![0_u32; 64 * 128];
    let o = tensor("o", &mut data, &[64, 128]);
    let body = || {
        let thread = thread_idx_x();
        store_shared(4 * thread, thread);
        for half in [64, 32, 16, 8, 4, 2, 1] {
            sync_threads();
            if thread < half {
                let sum = load_shared(4 * thread) + load_shared(4 * (thread + half));
                store_shared(4 * thread, sum);
            }
        }
        sync_threads();
        store(
            o.address + 4 * u64::from(128 * block_idx_x() + thread),
            load_shared(0),
        );
    };
    run([64, 1, 1], 128, slice::from_ref(&o), body).unwrap();
    assert!(data.into_iter().all(|sum| sum == 127 * 64));
}

#[test]
fn every_block_runs_once() {
    let mut data = vec![0_u32; 7 * 11 * 13];
    let o = tensor("o", &mut data, &[13, 11, 7]);
    let body = || {
        let block = (block_idx_z() * 11 + block_idx_y()) * 7 + block_idx_x();
        let at = o.address + 4 * u64::from(block);
        only(31, || store(at, load(at) + block));
    };
    run([7, 11, 13], 32, slice::from_ref(&o), body).unwrap();
    assert!(data.into_iter().eq(0..7 * 11 * 13));
}

#[test]
fn load_time_constants() {
    assert_clean(&[], || {
        assert_eq!(sim::load_time_constants(<[u32]>::to_vec), [3, 5])
    });
}

#[test]
fn a_load_that_is_not_live_gives_nan() {
    assert_clean(&[], || {
        // SAFETY: nothing is loaded.
        let value = unsafe { global::load_state_b128(0, false) };
        assert!(value.into_iter().all(|word| f32::from_bits(word).is_nan()));
    });
}

#[test]
fn a_panic_is_a_fault() {
    let table = [1, 2, 3];
    let body = || {
        sync_threads();
        only(9, || assert_ne!(table[thread_idx_x() as usize], 0));
        sync_threads();
    };
    let fault = run([1; 3], 32, &[], body).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::Panic, 9));
    assert!(fault.message.starts_with("panic at "), "{fault}");
    assert!(
        fault.message.ends_with("the len is 3 but the index is 9"),
        "{fault}"
    );
}

#[test]
fn the_fault_of_the_lowest_block_is_reported() {
    let body = || assert!(block_idx_x() < 100);
    assert_eq!(
        run([1000, 1, 1], 32, &[], body).unwrap_err().block,
        [100, 0, 0]
    );
}

#[test]
fn launches_within_launches_and_side_by_side() {
    let launch_all = || {
        for blocks in 1..20 {
            let body = || {
                only(5, || {
                    run([blocks, 1, 1], 64, &[], sync_threads).unwrap();
                    assert_eq!(thread_idx_x(), 5);
                });
            };
            run([2, 1, 1], 32, &[], body).unwrap();
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(launch_all))));
}

#[test]
fn launches_that_cannot_be() {
    let message = |grid, block, shared_bytes, regions: &[Region]| {
        let shape = LaunchShape {
            cluster: 1,
            overlaps: false,
            grid,
            block,
            shared_bytes,
        };
        let launch = Launch {
            kernel: "none",
            capability: (9, 0),
            shape,
            constants: &[],
            regions,
        };
        // SAFETY: nothing is accessed.
        unsafe { sim::launch(&launch, &|| ()) }
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        message([1, 0, 1], 32, 0, &[]),
        "a grid of (1, 0, 1) blocks: wanted 1 or more, and at most 65535 along y and z; kernel none"
    );
    assert_eq!(
        message([1 << 20, 17, 1], 32, 0, &[]),
        "a grid of (1048576, 17, 1) blocks: the simulator runs at most 16777216; kernel none"
    );
    assert_eq!(
        message([1; 3], 48, 0, &[]),
        "a block of 48 threads: wanted a multiple of 32, at most 1024; kernel none"
    );
    assert_eq!(
        message([1; 3], 32, 1 << 20, &[]),
        "1048576 bytes of shared memory: a block has at most 232448; kernel none"
    );
    let bent = Region {
        strides: vec![],
        ..tensor("bent", &mut [0_u8], &[1])
    };
    assert_eq!(
        message([1; 3], 32, 0, &[bent]),
        "tensor `bent` has 1 dims but 0 strides; kernel none"
    );
}

#[test]
#[should_panic(expected = "device function called outside sim::launch")]
fn device_functions_need_a_launch() {
    assert_clean(&[], thread_idx_x);
    thread_idx_x();
}

#[test]
fn arithmetic() {
    let denormal = f32::from_bits(1);
    assert_eq!(float::exp2(3.0), 8.0);
    assert_eq!(float::exp2(-140.0), 0.0);
    assert_eq!(float::exp2(1000.0), f32::INFINITY);
    assert_eq!(float::log2(denormal), f32::NEG_INFINITY);
    assert!(float::log2(-1.0).is_nan());
    assert_eq!(float::reciprocal(f32::MAX), 0.0);
    assert_eq!(
        float::reciprocal(-f32::MIN_POSITIVE / 2.0),
        f32::NEG_INFINITY
    );
    assert_eq!(float::rsqrt(0.25), 2.0);
    assert_eq!(float::rsqrt(denormal), f32::INFINITY);
    let tiny = f32::EPSILON;
    assert_eq!(float::fma(1.0 + tiny, 1.0 - tiny, -1.0), -tiny * tiny);
}

#[test]
fn packing_rounds_to_nearest_even() {
    let [tie_to_even, tie_to_odd] = [0x3f80_8000, 0x3f81_8000].map(f32::from_bits);
    assert_eq!(float::pack_bf16x2(tie_to_even, tie_to_odd), 0x3f82_3f80);
    assert_eq!(float::pack_f16x2(1.0, -65520.0), 0xfc00_3c00);
    assert_eq!(
        float::pack_f16x2(1.0 + 3.0 / 2048.0, 1.0 + 1.0 / 2048.0),
        0x3c00_3c02
    );
    assert_eq!(float::pack_bf16x2(f32::NAN, f32::INFINITY), 0x7f80_7fff);
    assert_eq!(float::pack_f16x2(-f32::NAN, f32::NEG_INFINITY), 0xfc00_7fff);
    assert_eq!(float::f16_to_f32(0x3c01), 1.0 + 1.0 / 1024.0);
}

#[test]
fn every_f16_is_an_f32() {
    for bits in 0..=u16::MAX {
        let (got, wanted) = (float::f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
        let same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
        assert!(same, "{bits:#06x}: wanted {wanted}, got {got}");
    }
}

/// One value head of a decode with K = V = 128 in bf16: 4 blocks of 8 groups of 16 lanes, 4 rows each.
#[test]
fn time_of_one_head() {
    let mut state = vec![0_u128; 128 * 16];
    let mut key = vec![0_u128; 16];
    let regions = [
        tensor("state", &mut state, &[128, 128]),
        tensor("key", &mut key, &[128]),
    ];
    let [state, key] = [0, 1].map(|at: usize| regions[at].address);
    let body = || {
        let [group, lane] = [thread_idx_x() / 16, thread_idx_x() % 16];
        let row =
            |at: u32| state + u64::from(((block_idx_x() * 8 + group) * 4 + at) * 256 + lane * 16);
        // SAFETY: the simulator checks the addresses.
        let rows = unsafe { [0, 1, 2, 3].map(|at| global::load_state_b128(row(at), true)) };
        // SAFETY: as above.
        let [x, y, z, _] = unsafe { global::load_b128(key + u64::from(lane * 16)) };
        let mut sums = [x, y, z].map(f32::from_bits);
        for lane_mask in [8, 4, 2, 1] {
            sums = sums.map(|sum| sum + warp_shuffle_xor(sum, lane_mask));
        }
        for (at, words) in (0..).zip(rows) {
            let update = |word| float::fma(f32::from_bits(word), sums[0], sums[1]).to_bits();
            // SAFETY: as above.
            unsafe { global::store_state_b128(row(at), words.map(update)) };
        }
    };
    let time = |_| {
        let start = Instant::now();
        run([4, 1, 1], 128, &regions, body).unwrap();
        start.elapsed()
    };
    let fastest: Option<Duration> = (0..20).map(time).min();
    println!("one head of a decode: {:?}", fastest.unwrap_or_default());
}
