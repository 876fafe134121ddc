//! todo
mod bind;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod functions;
mod launch;
pub mod modules;
pub mod pool;
#[cfg(feature = "simulator")]
mod simulator;
pub mod step;

pub use functions::{commit, flush, gdn, gdn_varlen, kda, kda_varlen, layer};
pub use gated_delta;
pub use gated_delta::{Activation, BetaScale, Formulation, HeadMap, KdaBeta, Options, StateLayout};
pub use modules::{GatedDeltaNet, GdnConfig, KdaConfig, KimiDeltaAttention, Verified};
pub use pool::{DraftRows, LayerShape, LayerStates, NO_SLOT, Operator, Row, Rows, StatePool};
#[cfg(feature = "simulator")]
pub use simulator::on_simulator;
pub use step::{
    Commit, Convolution, Flush, Gates, GdnGates, Inputs, KdaGate, KdaGates, Keep, Norm, Pending,
    Previous, States, Step, Stored,
};
