//! Time of a launch on a GPU, and of a plain copy beside it.

use std::time::Instant;

use gated_delta::driver::{DeviceMemory, Event, Graph, attribute};

use crate::cuda::{Cuda, Upload};
use crate::error::Error;
use crate::problem::Problem;

/// Bytes of the copy.
const COPY_BYTES: usize = 1 << 30;
/// Replays that the median is taken of.
const REPLAYS: usize = 15;

/// What a launch takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// µs of a launch, the gap to the next included: the median of replays of a graph of launches.
    pub micros: f64,
    /// 10⁹ bytes that it must move, per second.
    pub gb_per_second: f64,
}

/// Times launches on a GPU.
pub struct Timer<'a> {
    cuda: &'a Cuda,
    copy_gb_per_second: f64,
}

impl<'a> Timer<'a> {
    /// A timer that has measured a copy.
    ///
    /// # Errors
    /// [`Error::Library`] where the GPU has too little memory, or fails.
    pub fn new(cuda: &'a Cuda) -> Result<Self, Error> {
        Ok(Self {
            cuda,
            copy_gb_per_second: copy_gb_per_second(cuda)?,
        })
    }

    /// 10⁹ bytes per second, read and written, of a large copy within GPU memory.
    #[must_use]
    pub fn copy_gb_per_second(&self) -> f64 {
        self.copy_gb_per_second
    }

    /// Times a problem that [`Problem::validate`] has passed. Launches rotate over as many copies of it as do not fit
    /// into the level-2 cache, so that every launch finds its states in memory.
    ///
    /// # Errors
    /// [`Error::Library`] where the GPU has too little memory, or fails.
    pub fn time(&self, problem: &Problem) -> Result<Timing, Error> {
        const LAUNCHES: usize = 64;
        let (context, library, stream) =
            (self.cuda.context(), self.cuda.library(), self.cuda.stream());
        let cache = context
            .device()
            .attribute(attribute::L2_CACHE_SIZE)?
            .unsigned_abs() as usize;
        let state_bytes = problem.tensor("state")?.bytes().len().max(1);
        let copies = (4 * cache).div_ceil(state_bytes).clamp(2, 256);
        let uploads = (0..copies)
            .map(|_| Upload::new(context, problem))
            .collect::<Result<Vec<_>, _>>()?;
        let views = uploads
            .iter()
            .map(|upload| upload.views(problem))
            .collect::<Result<Vec<_>, _>>()?;
        let args = views
            .iter()
            .map(|views| problem.args(views))
            .collect::<Result<Vec<_>, _>>()?;
        let variant = args[0].selected()?;
        let launches = LAUNCHES.next_multiple_of(copies);
        let enqueue = || {
            (0..launches).try_for_each(|i| {
                // SAFETY: the uploads outlive every replay, each of which is waited for, and are used by nobody else;
                // the problem has been validated: no two rows write one slot.
                unsafe { args[i % copies].launch(library, stream.as_ref(), variant) }
            })
        };
        // Compiles, which a capture forbids.
        enqueue()?;
        stream.synchronize()?;
        // The first graph of a process replays with smaller gaps than later ones: it is thrown away.
        // SAFETY: as above.
        drop(unsafe { Graph::capture(stream, enqueue) }?);
        // SAFETY: as above.
        let graph = unsafe { Graph::capture(stream, enqueue) }?;
        let (start, end) = (Event::new(context)?, Event::new(context)?);
        let mut samples = Vec::with_capacity(REPLAYS);
        for _ in 0..=REPLAYS {
            start.record(stream)?;
            // SAFETY: as above.
            unsafe { graph.launch(stream) }?;
            end.record(stream)?;
            end.synchronize()?;
            samples.push(f64::from(end.milliseconds_since(&start)?) * 1e3 / launches as f64);
        }
        let samples = &mut samples[1..];
        samples.sort_by(f64::total_cmp);
        let micros = samples[samples.len() / 2];
        Ok(Timing {
            micros,
            gb_per_second: args[0].bytes()? as f64 / micros / 1e3,
        })
    }
}

fn copy_gb_per_second(cuda: &Cuda) -> Result<f64, Error> {
    const COPIES: usize = 16;
    let context = cuda.context();
    let mut from = DeviceMemory::allocate(context, COPY_BYTES)?;
    let to = DeviceMemory::allocate(context, COPY_BYTES)?;
    from.fill(0x3c)?;
    let _current = context.enter()?;
    let mut best = 0f64;
    for _ in 0..3 {
        context.synchronize()?;
        let start = Instant::now();
        for _ in 0..COPIES {
            // SAFETY: both have that many bytes.
            unsafe {
                context
                    .driver()
                    .memcpy_dtod(to.address(), from.address(), COPY_BYTES)
            }?;
        }
        context.synchronize()?;
        best = best.max(2.0 * (COPIES * COPY_BYTES) as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}
