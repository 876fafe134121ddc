//! Time of a problem's launch on a GPU, and the bandwidth of a plain copy.

use gated_delta_harness::timing::{self, cold_sets, copy_ceiling};

use crate::cuda::{Cuda, Upload};
use crate::error::Error;
use crate::problem::Problem;

/// Fewest launches in a graph.
const LAUNCHES: usize = 64;
/// Most copies of a problem in GPU memory.
const MOST_COPIES: usize = 256;

/// Time of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Time per launch in µs, with the gap to the next one: median over replays of a graph of launches.
    pub micros: f64,
    /// Bandwidth in GB/s, from the bytes that a launch has to move.
    pub gb_per_second: f64,
}

/// Times problems on a GPU.
pub struct Timer<'a> {
    cuda: &'a Cuda,
    timer: timing::Timer,
    copy_gb_per_second: f64,
}

impl<'a> Timer<'a> {
    /// A timer. Measures the bandwidth of a copy first.
    ///
    /// # Errors
    /// [`Error::Library`] if the GPU has too little memory, or fails.
    pub fn new(cuda: &'a Cuda) -> Result<Self, Error> {
        Ok(Self {
            cuda,
            timer: timing::Timer::new(cuda.library(), cuda.context())?,
            copy_gb_per_second: copy_ceiling(cuda.context())?,
        })
    }

    /// Bandwidth of a large copy within GPU memory in GB/s, bytes read plus bytes written.
    #[must_use]
    pub fn copy_gb_per_second(&self) -> f64 {
        self.copy_gb_per_second
    }

    /// Times a problem that [`Problem::validate`] has passed. The launches rotate over more copies of the problem than fit into the level-2
    /// cache, so that every launch reads its states from memory.
    ///
    /// # Errors
    /// [`Error::Library`] if the GPU has too little memory, or fails.
    pub fn time(&self, problem: &Problem) -> Result<Timing, Error> {
        let (library, stream) = (self.cuda.library(), self.timer.stream.as_ref());
        let copies = cold_sets(problem.tensor("state")?.bytes().len()).min(MOST_COPIES);
        let uploads = (0..copies)
            .map(|_| Upload::new(self.cuda.context(), problem))
            .collect::<Result<Vec<_>, _>>()?;
        let works = uploads
            .iter()
            .map(|upload| Ok(problem.arguments(&upload.views(problem)?)?.work()?))
            .collect::<Result<Vec<_>, Error>>()?;
        let launches = LAUNCHES.next_multiple_of(copies);
        // SAFETY: the uploads outlive the timing, which waits for every launch, and have no other user; the problem has been validated:
        // no two rows write the same slot.
        let micros = self.timer.graph(launches, |i| unsafe {
            library.launch(stream, &*works[i % copies])
        })?;
        Ok(Timing {
            micros: micros.median,
            gb_per_second: works[0].bytes()? as f64 / micros.median / 1e3,
        })
    }
}
