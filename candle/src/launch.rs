//! Launches on a GPU, on the CPU, and in the simulator.

#[cfg(any(feature = "cuda", feature = "simulator"))]
use candle_core::Device;
use candle_core::{Result, Tensor};
#[cfg(any(feature = "cuda", feature = "simulator"))]
use gated_delta::Library;
use gated_delta::{Formulation, MAX_TOKENS, Work as _};

use crate::bind::{At, Named, with_memory};
use crate::cpu::Work;
use crate::error::wrap;
use crate::pool::LayerStates;
use crate::step::{Commit, Flush, Gates, Step, check};

/// A launch and its arguments.
pub enum Launch<'l> {
    /// A step and its output tensor.
    Step(&'l Step, &'l Tensor),
    Commit(&'l Commit),
    Flush(&'l Flush),
}

/// Target that runs a launch.
enum Target {
    Cpu,
    /// Runs nothing: only the arguments are checked.
    Check,
    #[cfg(feature = "simulator")]
    Simulator(&'static Library),
    #[cfg(feature = "cuda")]
    Cuda(Library, candle_core::CudaDevice),
    /// Runs nothing: only the GPU's kernels are compiled.
    #[cfg(feature = "cuda")]
    Compile(Library),
}

/// Compiles the kernels that a launch on the device of `pool` needs.
pub fn prewarm(launch: &Launch<'_>, pool: &Tensor) -> Result<()> {
    match pool.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let library = crate::cuda::library(device)?;
            launch.run(&Target::Compile(library), pool, None)
        }
        _ => launch.run(&Target::Check, pool, None),
    }
}

/// Checks and runs a launch on the device of `pool`.
pub fn launch(launch: &Launch<'_>, pool: &Tensor, workspace: Option<&Tensor>) -> Result<()> {
    match pool.device() {
        #[cfg(feature = "simulator")]
        Device::Cpu if crate::simulator::is_on() => {
            let library = crate::simulator::library();
            launch.run(&Target::Simulator(library), pool, workspace)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let library = crate::cuda::library(device)?;
            launch.run(&Target::Cuda(library, device.clone()), pool, workspace)
        }
        _ => launch.run(&Target::Cpu, pool, workspace),
    }
}

/// Whether a layer with these gates and states has a prefill: one launch for rows of more than 16 tokens.
pub fn has_prefill(gates: &Gates, states: &LayerStates) -> Result<bool> {
    // With KDA, K = V.
    let (_, _, _, key_dim) = states.states.dims4()?;
    let has_kernels = matches!(gates, Gates::Gdn(_)) || key_dim == 128;
    Ok(has_kernels && states.formulation != Formulation::Recurrent)
}

impl<'l> Launch<'l> {
    fn tensors(&self) -> Vec<Named<'l>> {
        match self {
            Self::Step(step, o) => step.tensors(o),
            Self::Commit(commit) => commit.tensors(),
            Self::Flush(flush) => flush.tensors(),
        }
    }

    fn run(&self, target: &Target, pool: &Tensor, workspace: Option<&Tensor>) -> Result<()> {
        let elements = match target.takes_workspace() {
            true => self.workspace_elements()?,
            false => 0,
        };
        let made;
        let workspace = match workspace {
            _ if elements == 0 => None,
            Some(workspace) => Some(workspace),
            None => {
                let device = pool.device();
                // SAFETY: a launch reads nothing from a workspace that it has not written.
                made = unsafe { Tensor::empty(elements, candle_core::DType::F32, device) }?;
                Some(&made)
            }
        };
        let mut tensors = self.tensors();
        tensors.extend(workspace.map(|of| crate::bind::named("workspace", of).written()));
        with_memory(&tensors, |at| {
            let workspace = workspace.map(|of| at.get(of)).transpose()?;
            self.run_at(target, at, workspace)
        })
    }

    /// Whether the launch may be a prefill.
    fn is_prefill(&self) -> bool {
        let Self::Step(step, o) = self else {
            return false;
        };
        let most = match &step.packed {
            Some((_, most)) => *most,
            None => o.dims().get(1).copied().unwrap_or(0),
        };
        most > MAX_TOKENS || step.positions.is_some() || step.checkpoints.is_some()
    }

    /// Size of the workspace in f32 elements.
    pub fn workspace_elements(&self) -> Result<usize> {
        let Self::Step(step, o) = self else {
            return Ok(0);
        };
        if !self.is_prefill() {
            return Ok(0);
        }
        let bytes = with_memory(&self.tensors(), |at| {
            match &step.gates {
                Gates::Gdn(gates) => step.build(at, gates.build(at)?, o)?.workspace_bytes(),
                Gates::Kda(gates) => step.build(at, gates.build(at)?, o)?.workspace_bytes(),
            }
            .map_err(wrap)
        })?;
        Ok(bytes.div_ceil(size_of::<f32>()))
    }

    fn run_at<'x>(
        &self,
        target: &Target,
        at: &At<'x>,
        workspace: Option<gated_delta::Tensor<'x>>,
    ) -> Result<()> {
        match self {
            Self::Step(step, o) => match &step.gates {
                Gates::Gdn(gates) => {
                    let mut work = step.build(at, gates.build(at)?, o)?;
                    work.workspace = workspace;
                    target.run(&work, Work::gdn)
                }
                Gates::Kda(gates) => {
                    let mut work = step.build(at, gates.build(at)?, o)?;
                    work.workspace = workspace;
                    target.run(&work, Work::kda)
                }
            },
            Self::Commit(commit) => match &commit.gates {
                Gates::Gdn(gates) => {
                    target.run(&commit.build(at, gates.build(at)?)?, Work::gdn_commit)
                }
                Gates::Kda(gates) => {
                    target.run(&commit.build(at, gates.build(at)?)?, Work::kda_commit)
                }
            },
            Self::Flush(flush) => target.run(&flush.build(at)?, Work::flush),
        }
    }
}

impl Target {
    /// Whether a prefill needs a workspace.
    fn takes_workspace(&self) -> bool {
        match self {
            Self::Cpu | Self::Check => false,
            #[cfg(feature = "simulator")]
            Self::Simulator(_) => true,
            #[cfg(feature = "cuda")]
            Self::Cuda(..) => true,
            #[cfg(feature = "cuda")]
            Self::Compile(_) => false,
        }
    }

    fn run<'x, W: gated_delta::Work>(
        &self,
        work: &W,
        on_cpu: impl FnOnce(&W) -> Result<Work<'x>>,
    ) -> Result<()> {
        match self {
            Self::Cpu => {
                check(work)?;
                on_cpu(work)?.run()
            }
            #[cfg(feature = "simulator")]
            Self::Simulator(library) => {
                let stream = gated_delta::StreamRef::default_stream();
                // SAFETY: a simulated launch is done when it returns, and the memory is locked.
                unsafe { library.launch(stream, work) }.map_err(wrap)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(library, device) => {
                // SAFETY: the memory is held until this returns. The callers of this crate on a GPU promise, as documented, that rows write
                // nothing that another launch or row uses in the meantime.
                unsafe { crate::cuda::launch(library, device, work) }
            }
            Self::Check => check(work),
            #[cfg(feature = "cuda")]
            Self::Compile(library) => library.prewarm(work).map_err(wrap),
        }
    }
}
