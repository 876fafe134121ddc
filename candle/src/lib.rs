//! Gated DeltaNet and Kimi Delta Attention for candle: the layers of Qwen3-Next, Qwen3.5 and Kimi-Linear on the GPU kernels of
//! [`gated_delta`].
//!
//! | an engine wants | it takes |
//! |---|---|
//! | one launch on tensors of its own | [`gdn`], [`gdn_varlen`], [`kda`], [`kda_varlen`]; [`layer`] with the convolution and the norm; [`commit`], [`flush`] |
//! | every option of a launch: ragged rows, drafts, checkpoints, snapshots, token slots, states that wait | [`Step`], [`Commit`], [`Flush`] |
//! | layers with the weights of a checkpoint | [`GatedDeltaNet`], [`KimiDeltaAttention`] |
//! | states of many sequences, handed out by slots | [`StatePool`], and [`Rows`] and [`DraftRows`] of a batch |
//!
//! What shapes, layouts and options mean is said in [`gated_delta::step`]. Tensors of candle are taken as they are: views of a packed
//! row with whatever strides, pools that are written in place, slots in u32, i64 or i32. An error is candle's, with text that names the
//! tensor, what was wanted and what came.
//!
//! | device | what runs |
//! |---|---|
//! | `Device::Cuda` (feature `cuda`) | the kernels, on the device's stream: no copy, nothing waited for |
//! | `Device::Cpu` | the recurrence in f32 on all threads, from the same arguments, which pass the same checks |
//! | the same, within `on_simulator` (feature `simulator`) | the kernels' own source, every access checked |
//!
//! # On a GPU
//! - Which operators there are on which GPU is gated-delta's: compute capability 8.0 and newer. The modules cut prompts into launches of 16 tokens where there is no prefill.
//! - A launch on tensors is a safe function, as candle's own are. That no two live rows write one slot, and that work on other streams
//!   waits for what it reads, is the caller's: on a GPU wrong slots make wrong states, on the CPU they are an error.
//! - [`Step::run`] allocates its output on the stream, and a workspace where a prompt wants one. Under capture use [`Step::run_into`] and
//!   [`Step::workspace`](step::Step::workspace), after [`Step::prewarm`] of each shape, which compiles its kernels.
//! - `Device::new_cuda` uses the default stream of the calling thread: launch from the thread that the model runs on, or make the device
//!   with `new_cuda_with_stream`.
//!
//! # On the CPU
//! What is written (a pool, windows, rings) has a storage of its own there, of which no other tensor of the launch is a view: candle locks
//! storages.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod bind;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
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
    Commit, Convolution, Flush, Gates, GdnGates, Inputs, KdaDecay, KdaGates, Keep, Norm, Pending,
    Previous, States, Step, Stored,
};

/// The README's example runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
