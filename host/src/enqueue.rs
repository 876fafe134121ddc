//! The unsafe launch: a compiled function on a stream, or a kernel body in the simulator.

use std::{ffi::c_void, ptr};

use gated_delta_kernels::launch::LaunchShape;
#[cfg(feature = "simulator")]
use gated_delta_kernels::{device::sim, entries::Entry};

use crate::driver::{Driver, LaunchAttribute, LaunchConfig, RawFunction};
use crate::error::Error;
use crate::stream::StreamRef;
#[cfg(feature = "simulator")]
use crate::tensor_checks::Named;

/// Enqueues `function`. `params` has the bytes of its only parameter.
///
/// # Safety
/// `params` have the type that the function was compiled for, its context is current, and the tensors in `params` stay valid
/// until the stream has passed the launch.
#[inline(always)]
pub(crate) unsafe fn enqueue(
    driver: &Driver,
    function: RawFunction,
    shape: &LaunchShape,
    stream: StreamRef<'_>,
    params: &[u8],
) -> Result<(), Error> {
    let mut parameters = [params.as_ptr().cast_mut().cast::<c_void>()];
    let [x, y, z] = shape.grid;
    if shape.overlaps {
        // The driver only reads the attribute.
        let attributes = ptr::from_ref(&LaunchAttribute::OVERLAPS).cast_mut();
        let config = LaunchConfig {
            grid: shape.grid,
            block: [shape.block, 1, 1],
            shared_bytes: shape.shared_bytes,
            stream: stream.raw(),
            attributes,
            count: 1,
        };
        // SAFETY: the caller's promise; the driver copies the parameter before it returns.
        return unsafe {
            driver.launch_kernel_ex(
                &raw const config,
                function,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
    }
    // SAFETY: the caller's promise; the driver copies the parameter before it returns.
    unsafe {
        driver.launch_kernel(
            function,
            x,
            y,
            z,
            shape.block,
            1,
            1,
            shape.shared_bytes,
            stream.raw(),
            parameters.as_mut_ptr(),
            ptr::null_mut(),
        )
    }
}

/// Runs `entry` on the host memory of `tensors`, in the simulator of a GPU of this compute capability.
///
/// # Safety
/// `params` have the type that the entry takes, and nothing else uses the tensors during the call.
#[cfg(feature = "simulator")]
pub(crate) unsafe fn simulate(
    entry: Entry,
    capability: (u32, u32),
    constants: &[u32],
    shape: LaunchShape,
    params: &[u8],
    tensors: &[Option<Named<'_>>],
) -> Result<(), Error> {
    let regions: Vec<sim::Region> = tensors
        .iter()
        .flatten()
        .map(|named| sim::Region {
            name: named.name,
            address: named.tensor.address(),
            element_bytes: named.tensor.dtype().size_of(),
            dims: named.tensor.dims().to_vec(),
            strides: named.tensor.strides().to_vec(),
            writable: named.tensor.is_writable(),
        })
        .collect();
    let launch = sim::Launch {
        kernel: entry.name(),
        capability,
        shape,
        constants,
        regions: &regions,
    };
    // SAFETY: the caller's promise.
    unsafe { sim::launch(&launch, &|| entry.simulate(params)) }.map_err(|fault| Error::Fault {
        entry: entry.name(),
        fault: Box::new(fault),
    })
}
