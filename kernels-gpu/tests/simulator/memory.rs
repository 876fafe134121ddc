//! Accesses outside of tensors, or against their permissions.

use std::slice;

use gated_delta_kernels::device::shared::dynamic_shared_mem;
use gated_delta_kernels::device::sim::{FaultKind, Region};
use gated_delta_kernels::device::thread::{block_idx_x, block_idx_z, thread_idx_x};
use gated_delta_kernels::device::{global, shared};

use super::{
    assert_clean, assert_fault, copy_async, load, load_shared, only, run, store, store_shared,
    tensor,
};

#[track_caller]
fn assert_memcheck<R>(regions: &[Region], body: impl Fn() -> R + Sync, thread: u32, message: &str) {
    assert_fault(regions, body, FaultKind::Memcheck, thread, message);
}

#[test]
fn out_of_bounds_load() {
    let mut data = [0_u32; 24];
    let q = tensor("q", &mut data, &[3, 8]);
    let regions = slice::from_ref(&q);
    for (address, message) in [
        (
            q.address + 96,
            "out-of-bounds 4-byte load: just past the end of `q` [3, 8] \
(nearest element [2, 7])",
        ),
        (
            q.address + 128,
            "out-of-bounds 4-byte load: 32 bytes past the end of `q` [3, 8] \
(nearest element [2, 7])",
        ),
        (
            q.address - 8,
            "out-of-bounds 4-byte load: 8 bytes before the start of `q` [3, 8]",
        ),
        (64 << 20, "4-byte load at 0x4000000, far from every tensor"),
        (0x20, "4-byte load through a null pointer, at 0x20"),
    ] {
        assert_memcheck(regions, || only(17, || load(address)), 17, message);
    }
    assert_memcheck(
        &[],
        || load(q.address & !3),
        0,
        &format!("4-byte load at {:#x}, far from every tensor", q.address),
    );
}

#[test]
fn out_of_bounds_store() {
    let mut data = [0_u128; 8];
    let o = Region {
        element_bytes: 2,
        dims: vec![3, 1, 4, 5],
        strides: vec![20, 20, 5, 1],
        ..tensor("o", &mut data, &[8])
    };
    let body = || {
        if (block_idx_x(), block_idx_z(), thread_idx_x()) == (1, 2, 17) {
            // SAFETY: the simulator checks the address.
            unsafe { global::store_state_b128(o.address + 112, [0; 4]) }
        }
    };
    assert_eq!(
        run([2, 1, 3], 32, slice::from_ref(&o), body)
            .unwrap_err()
            .to_string(),
        "out-of-bounds 16-byte store: its last 8 bytes are outside `o` [3, 1, 4, 5] \
         (nearest element [2, 0, 3, 4]); block (1, 0, 2), thread 17, kernel crime"
    );
}

#[test]
fn misaligned_load() {
    let mut data = [0_u128; 2];
    let q = tensor("q", &mut data, &[2, 8]);
    // SAFETY: the simulator checks the address.
    let load_at = |offset: u64| move || unsafe { global::load_b128(q.address + offset) };
    let message = "misaligned 16-byte load at element [0, 2] of `q` [2, 8]: \
                   the address is a multiple of 4, not of 16";
    assert_memcheck(slice::from_ref(&q), load_at(4), 0, message);
}

#[test]
fn gap_of_a_strided_view() {
    let mut data = [0_u32; 20];
    let k = Region {
        dims: vec![3, 4],
        strides: vec![8, 1],
        ..tensor("k", &mut data, &[20])
    };
    let regions = slice::from_ref(&k);
    for row in 0..3 {
        // SAFETY: the simulator checks the address.
        assert_clean(regions, || unsafe {
            global::load_b64(k.address + 32 * row + 8)
        });
    }
    let message = "out-of-bounds 4-byte load: 8 bytes into a gap between the rows of `k` [3, 4] \
                   with strides [8, 1] (nearest element [1, 3])";
    assert_memcheck(regions, || load(k.address + 32 + 24), 0, message);
}

#[test]
fn broadcast_overlapping_transposed_and_empty_views() {
    let mut data: [u32; 8] = std::array::from_fn(|at| at as u32);
    let all = tensor("all", &mut data, &[8]);
    let view = |dims: &[usize], strides: &[usize]| Region {
        dims: dims.to_vec(),
        strides: strides.to_vec(),
        ..all.clone()
    };
    let empty = view(&[0, 8], &[8, 1]);
    let broadcast = view(&[5, 8], &[0, 1]);
    let transposed = view(&[2, 4], &[1, 2]);
    let windows = view(&[3, 4], &[2, 1]);
    for region in [broadcast, transposed.clone(), windows] {
        assert_clean(&[empty.clone(), region], || {
            assert_eq!(load(all.address + 28), 7)
        });
    }
    let far = format!("4-byte load at {:#x}, far from every tensor", all.address);
    assert_memcheck(&[empty], || load(all.address), 0, &far);
    let message = "misaligned 4-byte load at element [0, 2] of `all` [2, 4]: \
                   the address is a multiple of 2, not of 4";
    assert_memcheck(&[transposed], || load(all.address + 18), 0, message);

    // Elements 0, 2, 4 and 3, 5, 7 of one buffer.
    let interleaved = [view(&[2, 3], &[3, 2])];
    let load_all = || [0, 2, 4, 3, 5, 7].map(|at| load(all.address + 4 * at));
    assert_clean(&interleaved, load_all);
    // SAFETY: the simulator checks the address.
    assert_clean(&interleaved, || unsafe {
        global::load_b64(all.address + 8)
    });
    assert!(run([1; 3], 32, &interleaved, || load(all.address + 4)).is_err());
    assert!(run([1; 3], 32, &interleaved, || load(all.address + 24)).is_err());
}

/// An allowed access does not make the next access of the same place allowed.
#[test]
fn accesses_after_one_that_is_allowed() {
    let mut data = [0_u128; 2];
    let q = Region {
        writable: false,
        dims: vec![7],
        ..tensor("q", &mut data, &[8])
    };
    let regions = slice::from_ref(&q);
    let longer = || {
        load(q.address + 16);
        // SAFETY: the simulator checks the address.
        unsafe { global::load_b128(q.address + 16) }
    };
    let message =
        "out-of-bounds 16-byte load: its last 4 bytes are outside `q` [7] (nearest element [6])";
    assert_memcheck(regions, longer, 0, message);
    let store_behind_a_load = || {
        load(q.address);
        store(q.address, 1);
    };
    let message = "4-byte store to the read-only `q` [7] at element [0]";
    assert_memcheck(regions, store_behind_a_load, 0, message);
}

#[test]
fn store_to_a_read_only_tensor() {
    let mut data = [0_u32; 8];
    let v = Region {
        writable: false,
        ..tensor("v", &mut data, &[2, 4])
    };
    let body = || only(3, || store(v.address + 20, 1));
    assert_memcheck(
        slice::from_ref(&v),
        body,
        3,
        "4-byte store to the read-only `v` [2, 4] at element [1, 1]",
    );

    let in_place = [
        v.clone(),
        Region {
            name: "o",
            writable: true,
            ..v.clone()
        },
    ];
    assert_clean(&in_place, body);
    assert_eq!(data, [0, 0, 0, 0, 0, 1, 0, 0]);
}

#[test]
fn shared_memory_that_was_never_written() {
    let body = || {
        store_shared(4 * thread_idx_x(), 0);
        only(40, || load_shared(256));
    };
    assert_memcheck(
        &[],
        body,
        40,
        "4-byte shared load at byte 256: the block has not written it",
    );
    let second_block_loads = || {
        if block_idx_x() == 0 {
            store_shared(0, 0)
        } else {
            _ = load_shared(0)
        }
    };
    assert_eq!(
        run([2, 1, 1], 32, &[], || only(0, second_block_loads))
            .unwrap_err()
            .block,
        [1, 0, 0]
    );
}

#[test]
fn shared_access_out_of_bounds_or_misaligned() {
    let message = "out-of-bounds 4-byte shared store: ends 12 bytes past the end \
                   of the 512 bytes of shared memory";
    assert_memcheck(&[], || store_shared(520, 0), 0, message);
    let message = "out-of-bounds 4-byte shared load: 1024 bytes before the start \
                   of the 512 bytes of shared memory";
    // SAFETY: the simulator checks the address.
    assert_memcheck(&[], || unsafe { shared::load_shared_b32(0) }, 0, message);
    let message = "misaligned 8-byte shared load: at byte 4 of the 512 bytes of shared memory";
    // SAFETY: the simulator checks the address.
    assert_memcheck(
        &[],
        || unsafe { shared::load_shared_b64(dynamic_shared_mem() + 4) },
        0,
        message,
    );
    let mut data = [0_u128; 1];
    let k = tensor("k", &mut data, &[1]);
    let message =
        "misaligned 16-byte shared asynchronous copy: at byte 8 of the 512 bytes of shared memory";
    assert_memcheck(slice::from_ref(&k), || copy_async(8, k.address), 0, message);
}
