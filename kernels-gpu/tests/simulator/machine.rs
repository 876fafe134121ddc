//! A simulated GPU lacks the features that the real one lacks.

use gated_delta_kernels::device::shared::{
    COUNTER_BYTES, copy_bulk, dynamic_shared_mem, open_counter, store_matrices_transposed,
};
use gated_delta_kernels::device::sim::{self, Fault, FaultKind, Launch, Region};
use gated_delta_kernels::device::warpgroup::{by_both, first, take_registers};
use gated_delta_kernels::device::{cluster, thread};
use gated_delta_kernels::launch::LaunchShape;

use super::tensor;

/// Bytes of an image of 64 tokens and as many queries, with K = 64.
const IMAGE: u32 = 8 * 2048;

/// Launches a warpgroup on a GPU of this compute capability.
fn run(
    capability: (u32, u32),
    shared_bytes: u32,
    cluster: u32,
    regions: &[Region],
    body: impl Fn() + Sync,
) -> Result<(), Fault> {
    let launch = Launch {
        kernel: "played",
        capability,
        shape: LaunchShape {
            cluster,
            overlaps: false,
            grid: [cluster, 1, 1],
            block: 128,
            shared_bytes,
        },
        constants: &[],
        regions,
    };
    // SAFETY: the regions are the callers' buffers.
    unsafe { sim::launch(&launch, &body) }
}

#[test]
fn instructions_that_a_gpu_lacks_are_found() {
    let mut input = [0_u32; 4];
    let source = input.as_mut_ptr().expose_provenance() as u64;
    let regions = [tensor("input", &mut input, &[4])];
    let copies = || {
        if thread::thread_idx_x() == 0 {
            let counter = dynamic_shared_mem();
            // SAFETY: the simulator checks the addresses.
            unsafe {
                open_counter(counter, 128);
                copy_bulk(counter + 16, source, 16, counter);
            }
        }
    };
    let transposes = || {
        let lane = thread::thread_idx_x() % 32;
        // SAFETY: as above.
        unsafe { store_matrices_transposed(dynamic_shared_mem() + 16 * lane, [0; 4]) };
    };
    let meets = || {
        cluster::arrive();
        cluster::wait();
    };
    let multiplies = || {
        // SAFETY: as above.
        let products = unsafe { by_both::<64>(&[0; 32], dynamic_shared_mem()) };
        _ = first(products);
    };
    let bodies: [(&str, &(dyn Fn() + Sync), bool); 5] = [
        ("cp.async.bulk", &copies, true),
        ("stmatrix", &transposes, true),
        ("barrier.cluster", &meets, true),
        ("wgmma", &multiplies, false),
        ("setmaxnreg", &|| take_registers::<216>(), false),
    ];
    for (instruction, body, has_blackwell) in bodies {
        for (capability, has) in [((8, 6), false), ((9, 0), true), ((12, 0), has_blackwell)] {
            let ran = run(capability, IMAGE + COUNTER_BYTES, 1, &regions, body);
            let lacks = ran
                .err()
                .filter(|fault| fault.kind == FaultKind::Machine)
                .map(|fault| fault.message);
            let (major, minor) = capability;
            let wanted = format!(
                "{instruction}: a GPU of compute capability {major}.{minor} has no such instruction"
            );
            assert_eq!(lacks, (!has).then_some(wanted));
        }
    }
}

#[test]
fn a_gpu_has_its_own_shared_memory_and_clusters() {
    for (capability, kilobytes) in [
        ((8, 0), 163),
        ((8, 6), 99),
        ((8, 7), 163),
        ((8, 9), 99),
        ((9, 0), 227),
        ((10, 0), 227),
        ((12, 0), 99),
        ((14, 1), 99),
    ] {
        let most = kilobytes << 10;
        run(capability, most, 1, &[], || ()).unwrap();
        let message = run(capability, most + 16, 1, &[], || ())
            .unwrap_err()
            .message;
        let wanted = format!(
            "{} bytes of shared memory: a block has at most {most}",
            most + 16
        );
        assert_eq!(message, wanted);
        let clusters = run(capability, 0, 2, &[], || ());
        let wanted = format!(
            "a cluster of 2 blocks: a GPU of compute capability {}.{} has no clusters",
            capability.0, capability.1
        );
        let got = clusters.err().map(|fault| fault.message);
        assert_eq!(got, (capability.0 < 9).then_some(wanted));
    }
}
