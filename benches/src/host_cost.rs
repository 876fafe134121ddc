//! What a launch costs the host: ns per call over a bare `cuLaunchKernel`.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Instant;

use anyhow::Result;
use gated_delta::driver::{RawFunction, Stream};
use gated_delta::raw::{LaunchShape, LayerParams};
use gated_delta::{Error, Library};

use crate::buffers::Buffers;

/// Median ns per call.
#[derive(Clone, Copy, Debug)]
pub struct HostCost {
    /// `cuLaunchKernel` of the same function, and nothing else.
    pub bare: f64,
    /// What a launch of a plan takes above it.
    pub plan: f64,
    /// What a launch through the warm cache takes above it.
    pub cached: f64,
}

/// Times the three ways to launch the first set of `buffers`, turn by turn: differences are those of neighbouring turns,
/// so that a clock that drifts drops out of them.
pub fn host_cost(library: &Library, stream: &Stream, buffers: &Buffers) -> Result<HostCost> {
    let work = &*buffers.work(0)?;
    let plan = library.plan(work)?;
    let planned = || {
        // SAFETY: the buffers outlive the launches, which `turns` waits for.
        unsafe { plan.launch(stream.as_ref(), work) }
    };
    let cached = || {
        // SAFETY: as above.
        unsafe { library.launch(stream.as_ref(), work) }
    };
    let raw = plan.raw(buffers.cell().batch)?;
    // SAFETY: the function takes these parameters, whose buffers outlive the launches.
    unsafe { turns(stream, raw, &work.params(), &planned, &cached) }
}

/// # Safety
/// The function takes `params`; what they address stays valid until this returns.
unsafe fn turns(
    stream: &Stream,
    (function, shape): (RawFunction, LaunchShape),
    params: &LayerParams,
    planned: &dyn Fn() -> Result<(), Error>,
    cached: &dyn Fn() -> Result<(), Error>,
) -> Result<HostCost> {
    const CALLS: usize = 400;
    const ROUNDS: usize = 99;
    let driver = stream.context().driver();
    let mut parameters = [(&raw const *params).cast_mut().cast::<c_void>()];
    let parameters = parameters.as_mut_ptr();
    let [x, y, z] = shape.grid;
    let bare = || {
        // SAFETY: the caller's promise.
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
                parameters,
                null_mut(),
            )
        }
    };
    let ways: [&dyn Fn() -> Result<(), Error>; 3] = [&bare, planned, cached];
    let mut samples = [[0.0; ROUNDS]; 3];
    let _current = stream.context().enter()?;
    for round in 0..ROUNDS {
        let mut nanos = [0.0; 3];
        for turn in 0..3 {
            // Each way comes first, second and last as often.
            let way = (round + turn) % 3;
            stream.synchronize()?;
            let start = Instant::now();
            for _ in 0..CALLS {
                ways[way]()?;
            }
            nanos[way] = start.elapsed().as_nanos() as f64 / CALLS as f64;
        }
        stream.synchronize()?;
        let [bare, plan, cached] = nanos;
        for (samples, nanos) in samples.iter_mut().zip([bare, plan - bare, cached - bare]) {
            samples[round] = nanos;
        }
    }
    let [bare, plan, cached] = samples.map(|mut nanos| {
        nanos.sort_by(f64::total_cmp);
        nanos[ROUNDS / 2]
    });
    Ok(HostCost { bare, plan, cached })
}
