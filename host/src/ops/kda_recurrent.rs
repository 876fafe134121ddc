//! Recurrent KDA: up to 16 tokens per sequence, one decay per key channel (Kimi Linear, arXiv 2510.26692).
//!
//! A token that stores nothing, and whose gate halves one channel of the state. On the simulator:
//!
//! ```
//! use gated_delta::ops::kda_recurrent::{KdaBeta, KdaGate, KdaGates, KdaRecurrent};
//! use gated_delta::ops::recurrent::RecurrentOptions;
//! use gated_delta::{Library, StreamRef, Tensor};
//!
//! let (ones, nothing, mut log_decay) = ([1.0f32; 64], [0.0f32], [0.0f32; 64]);
//! log_decay[1] = 0.5f32.ln();
//! let qkv = Tensor::from_slice(&ones, &[1, 1, 1, 64])?;
//! let (mut output, mut states) = ([f32::NAN; 64], vec![1.0f32; 64 * 64]);
//! let args = KdaRecurrent {
//!     q: qkv,
//!     k: qkv,
//!     v: qkv,
//!     gates: KdaGates {
//!         g: Tensor::from_slice(&log_decay, &[1, 1, 1, 64])?,
//!         kind: KdaGate::Log,
//!         beta: Tensor::from_slice(&nothing, &[1, 1, 1])?,
//!         beta_kind: KdaBeta::Given,
//!     },
//!     o: Tensor::from_slice_mut(&mut output, &[1, 1, 1, 64])?,
//!     pool: Tensor::from_slice_mut(&mut states, &[1, 1, 64, 64])?,
//!     write_pool: None,
//!     read_slots: None,
//!     write_slots: None,
//!     token_slots: None,
//!     accepted: None,
//!     snapshots: None,
//!     packed: None,
//!     previous: None,
//!     options: RecurrentOptions { scale: Some(1.0), qk_l2norm: false, ..RecurrentOptions::default() },
//! };
//! // SAFETY: a simulated launch is done when it returns.
//! unsafe { Library::simulator().kda_recurrent(StreamRef::default_stream(), &args) }?;
//! assert!((states[1] - 0.5).abs() < 1e-6 && states[2] == 1.0);
//! assert!((output[0] - 63.5).abs() < 1e-4);
//! # Ok::<(), gated_delta::Error>(())
//! ```

use super::recurrent::{Commit, Recurrent, RecurrentPlan};
use crate::Entry;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::stream::StreamRef;
use crate::tensor::Tensor;

/// Arguments of a recurrent KDA: see [`Recurrent`].
pub type KdaRecurrent<'a> = Recurrent<'a, KdaGates<'a>>;

/// Arguments of a KDA commit: see [`Commit`].
pub type KdaCommit<'a> = Commit<'a, KdaGates<'a>>;

/// Gates of a KDA layer.
#[derive(Clone, Copy, Debug)]
pub struct KdaGates<'a> {
    /// `[B, T, HV, K]`, bf16, f16 or f32: the log decay of every key channel, or what it is computed from. Strides of
    /// rows, tokens and heads are free.
    pub g: Tensor<'a>,
    /// What `g` is.
    pub kind: KdaGate<'a>,
    /// `[B, T, HV]`, bf16, f16 or f32: β or its logit. Strides of rows and tokens are free.
    pub beta: Tensor<'a>,
    /// What `beta` is.
    pub beta_kind: KdaBeta,
}

/// What the `g` of [`KdaGates`] is.
///
/// `a_log` and `dt_bias` have H or HV rows, both the same, and are contiguous.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, copied once a launch; a box would allocate"
)]
#[derive(Clone, Copy, Debug)]
pub enum KdaGate<'a> {
    /// The log decay.
    Log,
    /// Log decay −exp(A_log) · softplus(g + dt_bias).
    Softplus {
        /// `[H]` or `[HV]`, f32.
        a_log: Tensor<'a>,
        /// `[H, K]` or `[HV, K]`, f32; without it, 0.
        dt_bias: Option<Tensor<'a>>,
    },
    /// Log decay lower_bound · sigmoid(exp(A_log) · (g + dt_bias)): a scale, not a clamp.
    LowerBound {
        /// Finite, below 0.
        lower_bound: f32,
        /// `[H]` or `[HV]`, f32; without it, exp(A_log) = 1.
        a_log: Option<Tensor<'a>>,
        /// `[H, K]` or `[HV, K]`, f32; without it, 0.
        dt_bias: Option<Tensor<'a>>,
    },
}

/// What the `beta` of [`KdaGates`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KdaBeta {
    /// β.
    #[default]
    Given,
    /// Its logit: β = sigmoid(beta).
    Logit,
}

impl Library {
    /// Enqueues a recurrent KDA or a resume: checks the arguments, looks the compiled kernel up (or compiles it, the first time), launches.
    /// Nothing is allocated or synchronised after the first time.
    ///
    /// # Errors
    /// Whatever the arguments break of [`KdaRecurrent`]'s rules, named; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, `o`, the snapshots and the written slots are used
    /// by nobody else, and no two live rows write one slot.
    pub unsafe fn kda_recurrent(
        &self,
        stream: StreamRef<'_>,
        args: &KdaRecurrent<'_>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), None) }
    }

    /// As [`Library::kda_recurrent`], with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// As [`Library::kda_recurrent`]'s, and [`Error::Unsupported`] for a variant that is not one of [`KdaRecurrent::variants`](Recurrent::variants).
    ///
    /// # Safety
    /// As [`Library::kda_recurrent`]'s.
    pub unsafe fn kda_recurrent_with(
        &self,
        stream: StreamRef<'_>,
        args: &KdaRecurrent<'_>,
        variant: Entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), Some(variant)) }
    }

    /// Checks `args` and compiles their kernels; the plan is then launched with other addresses, B and P.
    ///
    /// # Errors
    /// As [`Library::kda_recurrent`]'s; [`Error::Unsupported`] on the simulator, which has nothing to compile.
    pub fn plan_kda_recurrent(&self, args: &KdaRecurrent<'_>) -> Result<RecurrentPlan, Error> {
        self.plan_recurrent(&args.request())
    }

    /// Compiles every kernel that `args` may be launched with at any batch size, so that no later launch of such
    /// arguments compiles, as graph capture requires.
    ///
    /// # Errors
    /// As [`Library::kda_recurrent`]'s, but for the launch.
    pub fn prewarm_kda_recurrent(&self, args: &KdaRecurrent<'_>) -> Result<(), Error> {
        self.prewarm_recurrent(&args.request())
    }

    /// Registers and memory of every variant of `args`, compiled for them.
    ///
    /// # Errors
    /// As [`Library::plan_kda_recurrent`]'s.
    pub fn kda_recurrent_resources(
        &self,
        args: &KdaRecurrent<'_>,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        self.recurrent_resources(&args.request())
    }

    /// Enqueues a commit, as [`Library::kda_recurrent`] its launch.
    ///
    /// # Errors
    /// Whatever the arguments break of [`KdaCommit`]'s rules, named; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, the written slots are used by nobody else, and no
    /// two live rows write one slot.
    pub unsafe fn kda_commit(
        &self,
        stream: StreamRef<'_>,
        args: &KdaCommit<'_>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), None) }
    }

    /// As [`Library::kda_commit`], with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// As [`Library::kda_commit`]'s, and [`Error::Unsupported`] for a variant that is not one of
    /// [`KdaCommit::variants`](Commit::variants).
    ///
    /// # Safety
    /// As [`Library::kda_commit`]'s.
    pub unsafe fn kda_commit_with(
        &self,
        stream: StreamRef<'_>,
        args: &KdaCommit<'_>,
        variant: Entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), Some(variant)) }
    }

    /// As [`Library::plan_kda_recurrent`], of a commit.
    ///
    /// # Errors
    /// As [`Library::kda_commit`]'s; [`Error::Unsupported`] on the simulator, which has nothing to compile.
    pub fn plan_kda_commit(&self, args: &KdaCommit<'_>) -> Result<RecurrentPlan, Error> {
        self.plan_recurrent(&args.request())
    }

    /// As [`Library::prewarm_kda_recurrent`], of a commit.
    ///
    /// # Errors
    /// As [`Library::kda_commit`]'s, but for the launch.
    pub fn prewarm_kda_commit(&self, args: &KdaCommit<'_>) -> Result<(), Error> {
        self.prewarm_recurrent(&args.request())
    }
}
