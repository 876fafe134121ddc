//! GDN MTP verify: up to 16 tokens per sequence, for speculative decoding (Gated DeltaNet, arXiv 2412.06464).
//!
//! Two drafts are verified without a state written; then the first of them is accepted. On the simulator:
//!
//! ```
//! use gated_delta::ops::GdnGates;
//! use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
//! use gated_delta::ops::recurrent::RecurrentOptions;
//! use gated_delta::{Library, StreamRef, Tensor};
//!
//! let mut first_channel = [0.0f32; 2 * 64];
//! (first_channel[0], first_channel[64]) = (1.0, 1.0);
//! let k = Tensor::from_slice(&first_channel, &[1, 2, 1, 64])?;
//! let values: [f32; 2 * 64] = std::array::from_fn(|i| if i < 64 { 0.5 } else { 2.0 });
//! let v = Tensor::from_slice(&values, &[1, 2, 1, 64])?;
//! let (no_decay, all) = ([0.0f32; 2], [1.0f32; 2]);
//! let gates = GdnGates::Given {
//!     g: Tensor::from_slice(&no_decay, &[1, 2, 1])?,
//!     beta: Tensor::from_slice(&all, &[1, 2, 1])?,
//! };
//! let options = RecurrentOptions { scale: Some(1.0), qk_l2norm: false, ..RecurrentOptions::default() };
//! let (mut output, mut states) = ([f32::NAN; 2 * 64], vec![0.0f32; 64 * 64]);
//! let (library, stream) = (Library::simulator(), StreamRef::default_stream());
//!
//! let verify = GdnMtp {
//!     q: k,
//!     k,
//!     v,
//!     gates,
//!     o: Tensor::from_slice_mut(&mut output, &[1, 2, 1, 64])?,
//!     pool: Tensor::from_slice(&states, &[1, 1, 64, 64])?,
//!     write_pool: None,
//!     read_slots: None,
//!     write_slots: None,
//!     token_slots: None,
//!     accepted: None,
//!     snapshots: None,
//!     packed: None,
//!     previous: None,
//!     options: RecurrentOptions { update_state: false, ..options },
//! };
//! // SAFETY: a simulated launch is done when it returns.
//! unsafe { library.gdn_mtp(stream, &verify) }?;
//! assert_eq!((output[0], output[64]), (0.5, 2.0)); // what each token stored at its key
//!
//! let accepted = [1i32];
//! let commit = GdnCommit {
//!     k,
//!     v,
//!     gates,
//!     keep: Tensor::from_slice(&accepted, &[1])?,
//!     pool: Tensor::from_slice_mut(&mut states, &[1, 1, 64, 64])?,
//!     write_pool: None,
//!     read_slots: None,
//!     write_slots: None,
//!     options,
//! };
//! // SAFETY: as above.
//! unsafe { library.gdn_commit(stream, &commit) }?;
//! assert_eq!(states[..2], [0.5, 0.0]); // the first token's, and nothing of the second
//! # Ok::<(), gated_delta::Error>(())
//! ```

use super::GdnGates;
use super::recurrent::{Commit, Recurrent, RecurrentPlan};
use crate::Entry;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::stream::StreamRef;

/// Arguments of a GDN MTP verify: see [`Recurrent`].
pub type GdnMtp<'a> = Recurrent<'a, GdnGates<'a>>;

/// Arguments of a GDN commit: see [`Commit`].
pub type GdnCommit<'a> = Commit<'a, GdnGates<'a>>;

impl Library {
    /// Enqueues a GDN MTP verify or a resume: checks the arguments, looks the compiled kernel up (or compiles it, the first time), launches.
    /// Nothing is allocated or synchronised after the first time.
    ///
    /// # Errors
    /// Whatever the arguments break of [`GdnMtp`]'s rules, named; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, `o`, the snapshots and the written slots are used
    /// by nobody else, and no two live rows write one slot.
    pub unsafe fn gdn_mtp(&self, stream: StreamRef<'_>, args: &GdnMtp<'_>) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), None) }
    }

    /// As [`Library::gdn_mtp`], with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// As [`Library::gdn_mtp`]'s, and [`Error::Unsupported`] for a variant that is not one of [`GdnMtp::variants`](Recurrent::variants).
    ///
    /// # Safety
    /// As [`Library::gdn_mtp`]'s.
    pub unsafe fn gdn_mtp_with(
        &self,
        stream: StreamRef<'_>,
        args: &GdnMtp<'_>,
        variant: Entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), Some(variant)) }
    }

    /// Checks `args` and compiles their kernels; the plan is then launched with other addresses, B and P.
    ///
    /// # Errors
    /// As [`Library::gdn_mtp`]'s; [`Error::Unsupported`] on the simulator, which has nothing to compile.
    pub fn plan_gdn_mtp(&self, args: &GdnMtp<'_>) -> Result<RecurrentPlan, Error> {
        self.plan_recurrent(&args.request())
    }

    /// Compiles every kernel that `args` may be launched with at any batch size, so that no later launch of such
    /// arguments compiles, as graph capture requires.
    ///
    /// # Errors
    /// As [`Library::gdn_mtp`]'s, but for the launch.
    pub fn prewarm_gdn_mtp(&self, args: &GdnMtp<'_>) -> Result<(), Error> {
        self.prewarm_recurrent(&args.request())
    }

    /// Registers and memory of every variant of `args`, compiled for them.
    ///
    /// # Errors
    /// As [`Library::plan_gdn_mtp`]'s.
    pub fn gdn_mtp_resources(
        &self,
        args: &GdnMtp<'_>,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        self.recurrent_resources(&args.request())
    }

    /// Enqueues a commit, as [`Library::gdn_mtp`] its launch.
    ///
    /// # Errors
    /// Whatever the arguments break of [`GdnCommit`]'s rules, named; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, the written slots are used by nobody else, and no
    /// two live rows write one slot.
    pub unsafe fn gdn_commit(
        &self,
        stream: StreamRef<'_>,
        args: &GdnCommit<'_>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), None) }
    }

    /// As [`Library::gdn_commit`], with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// As [`Library::gdn_commit`]'s, and [`Error::Unsupported`] for a variant that is not one of
    /// [`GdnCommit::variants`](Commit::variants).
    ///
    /// # Safety
    /// As [`Library::gdn_commit`]'s.
    pub unsafe fn gdn_commit_with(
        &self,
        stream: StreamRef<'_>,
        args: &GdnCommit<'_>,
        variant: Entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_recurrent(stream, &args.request(), Some(variant)) }
    }

    /// As [`Library::plan_gdn_mtp`], of a commit.
    ///
    /// # Errors
    /// As [`Library::gdn_commit`]'s; [`Error::Unsupported`] on the simulator, which has nothing to compile.
    pub fn plan_gdn_commit(&self, args: &GdnCommit<'_>) -> Result<RecurrentPlan, Error> {
        self.plan_recurrent(&args.request())
    }

    /// As [`Library::prewarm_gdn_mtp`], of a commit.
    ///
    /// # Errors
    /// As [`Library::gdn_commit`]'s, but for the launch.
    pub fn prewarm_gdn_commit(&self, args: &GdnCommit<'_>) -> Result<(), Error> {
        self.prewarm_recurrent(&args.request())
    }
}
