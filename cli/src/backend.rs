//! Backends that run a problem: a GPU, the simulator, or the reference.

use std::fmt;

use gated_delta::{Entry, InactiveRow, IndexReport, Library, StreamRef};
use serde_json::{Value, json};

use crate::cuda::Cuda;
use crate::error::Error;
use crate::problem::{Problem, RINGS, Views};
use crate::reference;
use crate::tensor::HostTensor;

/// Backend that the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// A GPU if there is one, else the simulator.
    #[default]
    Auto,
    /// A GPU.
    Cuda,
    /// The simulator: the kernels' own source on the CPU, with every memory access checked.
    Sim,
    /// The reference: the formulas in f64.
    Reference,
}

/// A backend that runs problems.
pub enum Backend {
    /// A GPU.
    Cuda(Cuda),
    /// The simulator: the kernels' own source on the CPU, with every memory access checked.
    Simulator {
        /// The library, opened on the simulator.
        library: Library,
        /// Reason for not using a GPU, if one was wanted.
        reason: Option<String>,
    },
    /// The reference: the formulas in f64, rounded where a kernel stores.
    Reference,
}

/// Results of a launch.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// `[B, T, HV, V]`; `None` for a commit and a flush.
    pub o: Option<HostTensor>,
    /// The whole pool after the launch.
    pub state: HostTensor,
    /// `[B, T, HV, V, K]`, in the layout of the states; `None` if no snapshots are wanted.
    pub snapshots: Option<HostTensor>,
    /// The whole pool of windows after the launch; `None` without a convolution.
    pub conv_state: Option<HostTensor>,
    /// `[B, T, D, W − 1]`; `None` without a convolution or if no snapshots are wanted.
    pub conv_snapshots: Option<HostTensor>,
    /// The rings after the launch: keys, updates, decays, inputs. `None` without deferred write-back; the last one also if windows are not
    /// deferred.
    pub rings: [Option<HostTensor>; 4],
    /// The variant that ran; `None` for the reference.
    pub variant: Option<Entry>,
    /// Activity of each row.
    pub rows: IndexReport,
}

impl Outputs {
    /// Lines for stdout: counts of active and inactive rows, and the variant that ran.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = format!("rows: {}\n", rows_in_words(&self.rows));
        if let Some(variant) = self.variant {
            text += &format!("variant: {}\n", variant.name());
        }
        text
    }

    /// As [`summary`](Self::summary), in JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "rows": {
                "count": self.rows.rows,
                "active": self.rows.active,
                "inactive": Value::from_iter(self.rows.inactive.iter().map(inactive_row)),
                "empty": self.rows.empty,
                "skipped_stores": self.rows.skipped_stores,
                "unused_tokens": self.rows.unused_tokens,
            },
            "variant": self.variant.map(|variant| variant.name()),
        })
    }

    /// Takes the results out of the tensors after a launch.
    fn of(mut after: Problem, variant: Option<Entry>, rows: IndexReport) -> Result<Self, Error> {
        let state = after.tensors.remove("state");
        Ok(Self {
            o: after.tensors.remove("o"),
            state: state.ok_or_else(|| after.missing("state"))?,
            snapshots: after.tensors.remove("snapshots"),
            conv_state: after.tensors.remove("conv_state"),
            conv_snapshots: after.tensors.remove("conv_snapshots"),
            rings: RINGS.map(|name| after.tensors.remove(name)),
            variant,
            rows,
        })
    }
}

/// An inactive row: its number, and the index that makes it inactive.
fn inactive_row(row: &InactiveRow) -> Value {
    json!({ "row": row.row, "tensor": row.tensor, "index": row.index })
}

/// Counts of active and inactive rows, and of tokens and stores that the indices leave out.
fn rows_in_words(rows: &IndexReport) -> String {
    /// Most rows whose indices are shown.
    const SHOWN: usize = 3;
    let mut text = format!("{} active, {} inactive", rows.active, rows.inactive.len());
    if !rows.inactive.is_empty() {
        let shown = rows.inactive.iter().take(SHOWN);
        let mut shown: Vec<String> = shown
            .map(|row| format!("row {}: {} = {}", row.row, row.tensor, row.index))
            .collect();
        if rows.inactive.len() > SHOWN {
            shown.push("…".to_owned());
        }
        text += &format!(" ({})", shown.join(", "));
    }
    for (count, what) in [
        (rows.empty, "without a token"),
        (rows.skipped_stores, "states of a token without a slot"),
        (rows.unused_tokens, "tokens of no row"),
    ] {
        if count > 0 {
            text += &format!(", {count} {what}");
        }
    }
    text
}

impl Backend {
    /// Opens the chosen backend.
    ///
    /// # Errors
    /// For [`Choice::Cuda`], the reason that there is no GPU.
    pub fn pick(choice: Choice) -> Result<Self, Error> {
        Self::pick_as(choice, None)
    }

    /// Opens the chosen backend, with the kernels and the shared memory of a GPU of compute capability `machine` if that is given.
    ///
    /// # Errors
    /// As for [`pick`](Self::pick); for a GPU that lacks what such a GPU has; for the reference, which has no kernels.
    pub fn pick_as(choice: Choice, machine: Option<(u32, u32)>) -> Result<Self, Error> {
        let simulator = |reason| Self::Simulator {
            library: machine.map_or_else(Library::simulator, Library::simulator_of),
            reason,
        };
        let cuda = || Cuda::first(machine);
        match choice {
            Choice::Reference if machine.is_some() => Err(Error::Input(
                "machine: wanted none with the reference, which has no kernels".to_owned(),
            )),
            Choice::Auto => {
                Ok(cuda().map_or_else(|error| simulator(Some(error.to_string())), Self::Cuda))
            }
            Choice::Cuda => Ok(Self::Cuda(cuda()?)),
            Choice::Sim => Ok(simulator(None)),
            Choice::Reference => Ok(Self::Reference),
        }
    }

    /// Runs a problem, with the variant that the library selects or with `variant`.
    ///
    /// # Errors
    /// A rule of the library that the problem breaks; a variant that does not compute the problem; a failure of the GPU; a kernel that the
    /// simulator stopped.
    pub fn run(&self, problem: &Problem, variant: Option<Entry>) -> Result<Outputs, Error> {
        let rows = problem.validate()?;
        let (after, ran) = match self {
            Self::Cuda(cuda) => {
                let (after, entry) = cuda.run(problem, variant)?;
                (after, Some(entry))
            }
            Self::Simulator { library, .. } => {
                let (after, entry) = simulate(library, problem, variant)?;
                (after, Some(entry))
            }
            Self::Reference => match variant {
                Some(variant) => {
                    return Err(Error::Input(format!(
                        "variant {}: wanted none with the reference, which has no variants",
                        variant.name()
                    )));
                }
                None => (reference::run(problem, &rows)?, None),
            },
        };
        Outputs::of(after, ran, rows)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(cuda) => write!(f, "GPU: {}", cuda.name()),
            Self::Simulator { reason: None, .. } => f.write_str("CPU simulator"),
            Self::Simulator {
                reason: Some(reason),
                ..
            } => write!(f, "CPU simulator ({reason})"),
            Self::Reference => f.write_str("reference (f64)"),
        }
    }
}

/// Runs a problem that [`Problem::validate`] has passed. Returns the problem after the launch, and the variant.
fn simulate(
    library: &Library,
    problem: &Problem,
    variant: Option<Entry>,
) -> Result<(Problem, Entry), Error> {
    let mut after = problem.clone();
    let views: Views<'_> = after
        .tensors
        .iter_mut()
        .map(|(&name, tensor)| {
            Ok((
                name,
                if problem.writes(name) {
                    tensor.view_mut()?
                } else {
                    tensor.view()?
                },
            ))
        })
        .collect::<Result<_, gated_delta::Error>>()?;
    let work = problem.arguments(&views)?.work()?;
    let entry = match variant {
        Some(variant) => variant,
        None => library.selected(&*work)?,
    };
    // SAFETY: a simulated launch is over when the call returns, `after` belongs to this function, and the problem has been validated: no
    // two rows write the same slot.
    unsafe { library.launch_with(StreamRef::default_stream(), &*work, entry) }?;
    drop((work, views));
    Ok((after, entry))
}
