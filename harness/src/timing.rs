//! Times of launches in µs, from replays of CUDA graphs, and the GPU's ceilings, measured in the same run.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::Instant;

use gated_delta::driver::{Context, DeviceMemory, Event, Graph, Module, Stream};
use gated_delta::{DType, Error, Library};

/// Bytes of state in all buffer sets of a cold measurement together: several times the size of any level-2 cache.
pub const COLD_BYTES: usize = 224 << 20;

/// Bytes that each copy of [`copy_ceiling`] copies.
pub const COPY_BYTES: usize = 1 << 30;

/// Distribution of µs per launch over replays.
#[derive(Clone, Copy, Debug)]
pub struct Micros {
    /// Median over the replays.
    pub median: f64,
    /// 10th percentile over the replays.
    pub p10: f64,
    /// 90th percentile over the replays.
    pub p90: f64,
}

impl Micros {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |quantile: f64| samples[((samples.len() - 1) as f64 * quantile).round() as usize];
        Self {
            median: at(0.5),
            p10: at(0.1),
            p90: at(0.9),
        }
    }
}

/// Number of buffer sets that a cold measurement rotates over, for sets of `state_bytes` each.
#[must_use]
pub fn cold_sets(state_bytes: usize) -> usize {
    COLD_BYTES.div_ceil(state_bytes.max(1)).clamp(1, 1024)
}

/// Times launches on a stream of its own.
pub struct Timer {
    /// The stream that launches go to.
    pub stream: Stream,
    start: Event,
    end: Event,
}

impl Timer {
    /// A timer on a new stream. The first graph that a process captures replays with smaller gaps than all later ones, so one graph is
    /// captured and thrown away here.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(library: &Library, context: &Context) -> Result<Self, Error> {
        let timer = Self {
            stream: Stream::new(context)?,
            start: Event::new(context)?,
            end: Event::new(context)?,
        };
        let mut scratch = DeviceMemory::allocate(context, 1 << 20)?;
        scratch.fill(0)?;
        let words = scratch.tensor_mut(DType::F32, &[1 << 18])?;
        // SAFETY: the graph is waited for before the scratch memory is freed.
        timer.graph(64, |_| unsafe {
            library.state_floor(timer.stream.as_ref(), words, 1.0)
        })?;
        Ok(timer)
    }

    /// Time per launch, in µs, of a graph of `launches` calls of `launch`, which is given the number of the call. The gaps between
    /// kernels in the graph are included. The first call is also made before the capture, which forbids compilation.
    ///
    /// # Errors
    /// The errors of `launch` and of the driver.
    pub fn graph(
        &self,
        launches: usize,
        launch: impl Fn(usize) -> Result<(), Error>,
    ) -> Result<Micros, Error> {
        const REPLAYS: usize = 15;
        launch(0)?;
        self.stream.synchronize()?;
        // SAFETY: the caller's buffers outlive this call, which waits for every replay.
        let mut graph =
            unsafe { Graph::capture(&self.stream, || (0..launches).try_for_each(&launch)) }?;
        let mut samples = Vec::with_capacity(REPLAYS);
        for replay in 0..REPLAYS + 2 {
            self.start.record(&self.stream)?;
            // SAFETY: as above.
            unsafe { graph.launch(&self.stream) }?;
            self.end.record(&self.stream)?;
            self.end.synchronize()?;
            if replay >= 2 {
                samples.push(
                    f64::from(self.end.milliseconds_since(&self.start)?) * 1e3 / launches as f64,
                );
            }
        }
        Ok(Micros::of(samples))
    }
}

/// Time per launch of a kernel that does nothing, in µs: the part of every measured time that is not the kernel's own.
///
/// # Errors
/// The driver's.
pub fn empty_kernel(timer: &Timer, context: &Context) -> Result<f64, Error> {
    const PTX: &CStr =
        c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry empty() { ret; }\n";
    let module = Module::load(context, "empty", PTX)?;
    let function = module.function(c"empty")?;
    let micros = timer.graph(256, |_| {
        let _current = context.enter()?;
        // SAFETY: the kernel has no parameters and touches nothing; the module outlives the graph.
        unsafe {
            context.driver().launch_kernel(
                function.raw(),
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                timer.stream.raw(),
                null_mut(),
                null_mut(),
            )
        }
    })?;
    Ok(micros.median)
}

/// Bandwidth of a plain device-to-device copy of [`COPY_BYTES`], in GB/s, with bytes read and bytes written both counted: the ceiling.
///
/// # Errors
/// The driver's errors, one of them for a GPU with too little memory.
pub fn copy_ceiling(context: &Context) -> Result<f64, Error> {
    const BYTES: usize = COPY_BYTES;
    const COPIES: usize = 8;
    let mut from = DeviceMemory::allocate(context, BYTES)?;
    let to = DeviceMemory::allocate(context, BYTES)?;
    from.fill(0x3c)?;
    let _current = context.enter()?;
    let mut best = 0f64;
    for _ in 0..3 {
        context.synchronize()?;
        let start = Instant::now();
        for _ in 0..COPIES {
            // SAFETY: both buffers have that many bytes.
            unsafe {
                context
                    .driver()
                    .memcpy_dtod(to.address(), from.address(), BYTES)
            }?;
        }
        context.synchronize()?;
        best = best.max(2.0 * (BYTES * COPIES) as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}
