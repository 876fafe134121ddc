//! Gated DeltaNet and Kimi Delta Attention for candle: the layers of Qwen3-Next, Qwen3.5 and Kimi-Linear on the GPU kernels of
//! [`gated_delta`].
//!
//! | purpose | API |
//! |---|---|
//! | one launch on your own tensors | [`gdn`], [`gdn_varlen`], [`kda`], [`kda_varlen`]; [`layer`] with the convolution and the norm; [`commit`], [`flush`] |
//! | every option of a launch: ragged rows, drafts, checkpoints, snapshots, token slots, deferred write-back | [`Step`], [`Commit`], [`Flush`] |
//! | layers with the weights of a checkpoint | [`GatedDeltaNet`], [`KimiDeltaAttention`] |
//! | states of many sequences, in slots | [`StatePool`], and [`Rows`] and [`DraftRows`] of a batch |
//!
//! [`gated_delta::step`] defines shapes, layouts and options. Tensors of candle are used without a copy: views of a packed row
//! with any strides, pools that are written in place, slots in u32, i64 or i32. Errors are candle's; their text names the tensor,
//! the wanted value and the given value.
//!
//! | device | implementation |
//! |---|---|
//! | `Device::Cuda` (feature `cuda`) | the kernels, on the device's stream, without a copy or a wait |
//! | `Device::Cpu` | the recurrence in f32 on all threads, after the same checks of the same arguments |
//! | `Device::Cpu` within `on_simulator` (feature `simulator`) | the kernels' own source, with every access checked |
//!
//! # On a GPU
//! - gated-delta decides which operators run on which GPU: compute capability 8.0 and newer. Where a layer has no prefill, the
//!   modules cut prompts into launches of up to 16 tokens. They do this too if activations and states are f32, to compute in f32:
//!   see [`StatePool::formulation`].
//! - A launch on tensors is a safe function, as candle's own are. The caller ensures that no two live rows write the same slot,
//!   and that work on other streams waits for the data that it reads. Wrong slots give wrong states on a GPU, and an error on the
//!   CPU.
//! - [`Step::run`] allocates its output on the stream, and a workspace if a prompt needs one. Under capture use
//!   [`Step::run_into`] and [`Step::workspace`](step::Step::workspace), with [`Step::workspace_elements`] elements, after
//!   [`Step::prewarm`] of each shape, which compiles its kernels.
//! - `Device::new_cuda` uses the default stream of the calling thread. Launch from the thread that the model runs on, or make the
//!   device with `new_cuda_with_stream`. cudarc then waits for an event and records an event for every tensor of a launch, which
//!   breaks a capture. With one stream, call `disable_event_tracking` before the first tensor is made.
//!
//! # On the CPU
//! A tensor that a launch writes (a pool, windows, rings) needs a storage of its own on the CPU, because candle locks storages.
//! No other tensor of the launch may be a view of this storage.
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
pub use gated_delta::{
    Activation, BetaScale, Formulation, HeadMap, KdaBeta, Operator, Options, StateLayout,
};
pub use modules::{GatedDeltaNet, GdnConfig, KdaConfig, KimiDeltaAttention, Verified};
pub use pool::{DraftRows, LayerShape, LayerStates, NO_SLOT, Row, Rows, StatePool};
#[cfg(feature = "simulator")]
pub use simulator::on_simulator;
pub use step::{
    Commit, Convolution, Flush, Gates, GdnGates, Inputs, KdaDecay, KdaGates, Keep, Norm, Pending,
    Previous, States, Step, Stored,
};

/// Runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
