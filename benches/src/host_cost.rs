//! What a launch costs the host: ns per call over a bare `cuLaunchKernel`.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Instant;

use anyhow::Result;
use gated_delta::driver::Stream;
use gated_delta::{Error, Library};

use crate::gdn_decode::Buffers;

/// Median ns per call.
#[derive(Clone, Copy, Debug)]
pub struct HostCost {
    /// `cuLaunchKernel` of the same function, and nothing else.
    pub bare: f64,
    /// [`gated_delta::ops::gdn_decode::GdnDecodePlan::launch`].
    pub plan: f64,
    /// [`Library::gdn_decode`] through the warm cache.
    pub cached: f64,
}

/// Times the three ways to launch the first set of `buffers`, turn by turn.
pub fn host_cost(
    library: &Library,
    stream: &Stream,
    buffers: &Buffers,
    batch: usize,
) -> Result<HostCost> {
    const CALLS: usize = 400;
    const ROUNDS: usize = 101;
    let args = buffers.args(0)?;
    let plan = library.plan_gdn_decode(&args)?;
    let params = args.params();
    let (function, shape) = plan.raw(batch)?;
    let driver = stream.context().driver();
    let mut parameters = [(&raw const params).cast_mut().cast::<c_void>()];
    let parameters = parameters.as_mut_ptr();
    let time = |call: &dyn Fn() -> Result<(), Error>| -> Result<f64> {
        stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        let nanos = start.elapsed().as_nanos() as f64 / CALLS as f64;
        stream.synchronize()?;
        Ok(nanos)
    };
    let mut samples = [Vec::new(), Vec::new(), Vec::new()];
    let _current = stream.context().enter()?;
    for _ in 0..ROUNDS {
        // SAFETY: the buffers outlive the launches, each of which is waited for in `time`.
        unsafe {
            samples[0].push(time(&|| {
                let [x, y, z] = shape.grid;
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
            })?);
            samples[1].push(time(&|| plan.launch(stream.as_ref(), batch, &params))?);
            samples[2].push(time(&|| library.gdn_decode(stream.as_ref(), &args))?);
        }
    }
    let [bare, plan, cached] = samples.map(|mut nanos| {
        nanos.sort_by(f64::total_cmp);
        nanos[nanos.len() / 2]
    });
    Ok(HostCost { bare, plan, cached })
}
