//! What a problem's launch takes on a GPU, beside a plain copy.

use gated_delta_harness::timing::{self, cold_sets, copy_ceiling};

use crate::cuda::{Cuda, Upload};
use crate::error::Error;
use crate::problem::Problem;

/// Fewest launches of a graph.
const LAUNCHES: usize = 64;
/// Most copies of a problem.
const MOST_COPIES: usize = 256;

/// What a launch takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// µs of a launch, the gap to the next included: the median of replays of a graph of launches.
    pub micros: f64,
    /// 10⁹ bytes that it must move, per second.
    pub gb_per_second: f64,
}

/// Times problems on a GPU.
pub struct Timer<'a> {
    cuda: &'a Cuda,
    timer: timing::Timer,
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
            timer: timing::Timer::new(cuda.library(), cuda.context())?,
            copy_gb_per_second: copy_ceiling(cuda.context())?,
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
        // SAFETY: the uploads outlive the timing, which waits for every launch, and are used by nobody else; the
        // problem has been validated: no two rows meet in a slot.
        let micros = self.timer.graph(launches, |i| unsafe {
            library.launch(stream, &*works[i % copies])
        })?;
        Ok(Timing {
            micros: micros.median,
            gb_per_second: works[0].bytes()? as f64 / micros.median / 1e3,
        })
    }
}
